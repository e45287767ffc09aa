#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// Gives names that no one uses yet: v0, v1, ...
class Names {
 public:
  Names() = default;
  /// Ignores hints: every name is the stem and a number. `$` makes canonical names that no text has.
  explicit Names(std::string stem) : stem_(std::move(stem)) {}
  /// Takes no name of `others`, which outlives it.
  explicit Names(const std::set<std::string>* others) : others_(others) {}
  void reserve(const std::string& name) { used_.insert(name); }
  /// Reserves every parameter, symbol, axis, value and local of the kernel.
  void reserve(const Kernel& kernel);
  /// `hint` if it ends in a digit and is free, else its stem followed by the next free number.
  std::string fresh(const std::string& hint);

 private:
  bool take(const std::string& name) { return !(others_ && others_->count(name)) && used_.insert(name).second; }

  const std::set<std::string>* others_ = nullptr;
  std::set<std::string> used_;
  std::map<std::string, int> next_;
  std::string stem_;
};

inline Ref<Stmt> make_stmt(decltype(Stmt::node) node) { return std::make_shared<Stmt>(Stmt{std::move(node)}); }
Ref<Stmt> make_for(Axis axis, Block body);
/// `body` inside one For per axis, the first outermost.
Block make_nest(const std::vector<Axis>& axes, Block body);

/// Appends statements under fresh names; each function returns the name of the value.
class Body {
 public:
  explicit Body(Names& names) : names_(names) {}
  std::string let(Fn fn, DType dtype, std::vector<std::string> operands);
  std::string constant(Scalar literal);
  std::string index(DType dtype, Expr value);
  std::string load(const std::string& buffer, DType dtype, std::vector<Expr> index, std::vector<Cond> guard, Scalar fill);
  std::string load(const std::string& buffer, DType dtype, std::vector<Expr> index);
  /// The conversion, with 16-bit floats passing through float32 as PyTorch's do; `name` itself if nothing changes.
  std::string cast(const std::string& name, DType from, DType to);
  /// A bool that is true where the guard holds; 32-bit comparisons where the ranges prove that they suffice.
  std::string truth(const std::vector<Cond>& guard, const Ranges& ranges);
  void store(const std::string& buffer, std::vector<Expr> index, const std::string& value, std::vector<Cond> guard = {},
             Combiner combiner = Combiner::set);
  void check(Cond cond, ErrorCode code);
  void append(Ref<Stmt> stmt) { block_.push_back(std::move(stmt)); }
  void append(const Block& block) { block_.insert(block_.end(), block.begin(), block.end()); }
  Names& names() { return names_; }
  Block take() { return std::move(block_); }

 private:
  Names& names_;
  Block block_;
};

Scalar zero_of(DType dtype);

}  // namespace deplo::loop_ir
