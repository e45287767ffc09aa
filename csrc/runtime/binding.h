#pragma once

#include <map>
#include <string>
#include <vector>

#include "library/library.h"
#include "program_ir/module.h"

namespace deplo::runtime {

/// Reads the values of a program's symbols from its arguments: those given as inputs of their own, then those that follow
/// from a size or stride, one unknown at a time.
class SymbolSolver {
 public:
  /// Throws InternalError naming a symbol that follows from no input.
  explicit SymbolSolver(const ProgramBody& program);

  const std::vector<std::string>& names() const { return names_; }
  /// A symbol that follows from the elements of an argument.
  struct Fact {
    size_t symbol;
    size_t argument;
    int64_t lo, hi;
  };
  const std::vector<Fact>& facts() const { return facts_; }
  /// Values in the order of names(), 0 for facts. Throws UserError naming the input whose size fits no value.
  void solve(const CallArgument* arguments, std::vector<int64_t>& values) const;

 private:
  enum class Source : uint8_t { integer, size, stride };
  struct Step {
    size_t symbol;
    size_t argument;
    Source source;
    int dimension;
    Expr expression;  ///< equals what the source gives; linear in the symbol
    bool direct;      ///< the expression is the symbol
  };
  bool add(size_t argument, Source source, int dimension, Expr expression);
  int64_t solve(const Step& step, int64_t given, const std::vector<int64_t>& values) const;

  std::vector<std::string> names_;
  std::map<std::string, size_t> index_;
  std::vector<bool> known_;
  std::vector<Step> steps_;
  std::vector<Fact> facts_;
  std::vector<std::string> arguments_;
};

/// Whether all elements of a tensor of integers in this process lie in lo..hi.
bool all_within(const TensorView& integers, int64_t lo, int64_t hi);

/// Throws UserError naming the input if dtype, sizes or strides are not those expected. The stride of a dimension of
/// size 1, and all strides of an empty tensor, mean nothing and are not compared.
void check_input(const Buffer& buffer, const BufferShape& expected, const TensorView& given);
/// True if both strided tensors have a byte in common. Exact for layouts met in practice; true when deciding would take
/// too long.
bool may_share_memory(const TensorView& a, const TensorView& b);

/// Sizes and strides of a buffer for given symbol values; negative strides do not occur.
BufferShape evaluate_shape(const Buffer& buffer, const std::map<std::string, int64_t>& symbols);

}  // namespace deplo::runtime
