#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "expr/points.h"
#include "loop_ir/ir.h"

namespace deplo::loop_ir {

struct BufferInfo {
  DType dtype = DType::f32;
  const std::vector<Expr>* shape = nullptr;
  bool writable = false;
};

/// Names visible at one place of a kernel. Copied on entering a nested block: kernels are small.
struct Visible {
  std::map<std::string, DType> values;
  std::map<std::string, BufferInfo> buffers;
  std::set<std::string> axes;
  Points points;
};

/// What the verifiers of Loop and Tile IR share: parameters, values, accesses and combinations.
class StatementVerifier {
 public:
  /// `kernel` names it in messages: "loop @k0".
  StatementVerifier(std::string kernel, const std::vector<Param>& params, const Ranges& symbols)
      : kernel_(std::move(kernel)), params_(params), symbols_(symbols) {}

 protected:
  [[noreturn]] void fail(const std::string& text) const;
  bool is_size(const std::string& name) const { return symbols_.count(name) > 0; }

  /// The names outside of all statements.
  Visible parameters() const;
  /// That every output is stored.
  void check_stored() const;
  void define(Visible& names, const std::string& name, DType dtype) const;
  /// Adds the loop name = lo, lo + step, ... < hi to the names of its body.
  void define_axis(Visible& names, const std::string& name, Expr lo, Expr hi, int64_t step = 1) const;
  void define_buffer(Visible& names, const std::string& name, const BufferInfo& info) const;
  DType value(const Visible& names, const std::string& name) const;
  void expression(const Visible& names, Expr e, const std::string& where) const;
  void guard(const Visible& names, const std::vector<Cond>& conds, const std::string& where) const;
  const BufferInfo& access(const Visible& names, const std::string& buffer, const std::vector<Expr>& index) const;

  /// That an element of a buffer of this dtype lies in it and may be read, or written.
  void element(const Visible& names, const std::string& buffer, const std::vector<Expr>& index, DType dtype, bool written);

  void statement(const Let& s, Visible& names) const;
  void statement(const Load& s, Visible& names) const;
  void statement(const Store& s, Visible& names);
  void statement(const Check& s, Visible& names) const;
  /// A reduction or scan but for its axes; `inner`: the names at the end of its body.
  void combination(const std::vector<std::string>& results, const std::vector<DType>& dtypes, Combiner combiner,
                   const std::vector<std::string>& operands, const Visible& inner) const;

 private:
  bool taken(const Visible& names, const std::string& name) const { return names.values.count(name) || names.axes.count(name) || is_size(name); }
  void sizes(const Visible& names, const std::vector<Expr>& shape, const std::string& buffer) const;
  void inside(const Visible& names, const std::string& buffer, const std::vector<Expr>& index, const std::vector<Cond>& guard) const;

  std::string kernel_;
  const std::vector<Param>& params_;
  const Ranges& symbols_;
  std::set<std::string> stored_;  ///< buffers that a store names, in no loop without iterations
};

}  // namespace deplo::loop_ir
