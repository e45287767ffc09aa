#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "loop_ir/text.h"

namespace deplo::loop_ir {
namespace {

struct BufferInfo {
  DType dtype;
  size_t rank;
  bool writable;
};

// Names visible at one point of a kernel. Copied on entering a nested block: kernels are small.
struct Scope {
  std::map<std::string, DType> values;
  std::map<std::string, BufferInfo> buffers;
  std::set<std::string> axes;
};

struct Verifier {
  const Kernel& kernel;
  mutable std::set<std::string> stored;  ///< buffers that a store names

  [[noreturn]] void fail(const std::string& text) const { throw InternalError(fmt::format("loop @{}: {}", kernel.name, text)); }
  void require(bool condition, const std::string& text) const {
    if (!condition) fail(text);
  }

  void define(Scope& scope, const std::string& name, DType dtype) const {
    require(!scope.values.count(name) && !scope.axes.count(name) && !kernel.symbols.count(name), "the name " + name + " is defined twice");
    scope.values[name] = dtype;
  }

  void define_axis(Scope& scope, const Axis& axis) const {
    expression(scope, axis.extent, "extent of " + axis.name);
    require(!scope.values.count(axis.name) && !kernel.symbols.count(axis.name) && scope.axes.insert(axis.name).second,
            "the axis " + axis.name + " is defined twice");
  }

  DType value(const Scope& scope, const std::string& name) const {
    auto it = scope.values.find(name);
    require(it != scope.values.end(), "the value " + name + " is not defined here");
    return it->second;
  }

  void expression(const Scope& scope, Expr e, const std::string& where) const {
    for (const std::string& name : symbols_of(e)) {
      if (scope.axes.count(name) || kernel.symbols.count(name)) continue;
      auto it = scope.values.find(name);
      require(it != scope.values.end(), fmt::format("{} uses {}, which is no axis, symbol or value here", where, name));
      require(it->second == DType::i64, fmt::format("{} uses {} of dtype {}; coordinates are i64", where, name, to_string(it->second)));
    }
  }

  const BufferInfo& access(const Scope& scope, const std::string& buffer, const std::vector<Expr>& index, const std::vector<Cond>& guard) const {
    auto it = scope.buffers.find(buffer);
    require(it != scope.buffers.end(), "the buffer " + buffer + " is not declared here");
    require(it->second.rank == index.size(), fmt::format("{} has {} dimensions, indexed with {}", buffer, it->second.rank, index.size()));
    for (const Expr& e : index) expression(scope, e, "index of " + buffer);
    for (const Cond& c : guard) expression(scope, c.expr, "guard of " + buffer);
    return it->second;
  }

  void block(const Block& body, Scope scope) const {
    for (const auto& stmt : body) statement(*stmt, scope);
  }

  void statement(const Stmt& stmt, Scope& scope) const {
    located(stmt.location, [&] { std::visit([&](const auto& s) { statement(s, scope); }, stmt.node); });
  }

  void statement(const Let& s, Scope& scope) const {
    if (s.fn == Fn::index) expression(scope, s.index, "index " + s.name);
    std::vector<DType> dtypes;
    for (const std::string& operand : s.operands) dtypes.push_back(value(scope, operand));
    std::string complaint = type_error(s.fn, s.dtype, dtypes.data(), static_cast<int>(dtypes.size()));
    require(complaint.empty(), s.name + ": " + complaint);
    require(s.fn != Fn::constant || s.literal.dtype == s.dtype, s.name + ": the literal has another dtype");
    define(scope, s.name, s.dtype);
  }

  void statement(const Load& s, Scope& scope) const {
    const BufferInfo& buffer = access(scope, s.buffer, s.index, s.guard);
    require(buffer.dtype == s.dtype && s.fill.dtype == s.dtype, s.name + ": a load has its buffer's dtype");
    define(scope, s.name, s.dtype);
  }

  void statement(const Store& s, Scope& scope) const {
    stored.insert(s.buffer);
    const BufferInfo& buffer = access(scope, s.buffer, s.index, s.guard);
    require(buffer.writable, "store to the input " + s.buffer);
    require(value(scope, s.value) == buffer.dtype,
            fmt::format("store of {} {} to {} of dtype {}", to_string(value(scope, s.value)), s.value, s.buffer, to_string(buffer.dtype)));
    require(operand_count(s.combiner) == 1 && result_count(s.combiner) == 1, fmt::format("a store cannot combine by {}", to_string(s.combiner)));
  }

  void statement(const For& s, Scope& scope) const {
    Scope inner = scope;
    // Schedules cut and merge the axes of loops, each by itself; the last chunk of a reduction may be shorter.
    for (const std::string& name : symbols_of(s.extent))
      require(kernel.symbols.count(name), fmt::format("the extent of {} uses {}, which is not a size", s.axis, name));
    define_axis(inner, {s.axis, s.extent});
    block(s.body, std::move(inner));
  }

  // Checks a body that defines the operands of a combination; returns the scope at its end.
  Scope combination(const std::vector<std::string>& results, const std::vector<DType>& dtypes, Combiner combiner,
                    const std::vector<std::string>& operands, const std::vector<Axis>& axes, const Block& body, const Scope& scope) const {
    std::string name = results.empty() ? "a reduction" : results[0];
    require(combiner != Combiner::set, name + ": set is no reduction");
    size_t partial = combiner == Combiner::welford ? 3 : combiner == Combiner::online_softmax ? 2 : 0;
    require(operands.size() == static_cast<size_t>(operand_count(combiner)) || (partial > 0 && operands.size() == partial),
            fmt::format("{}: {} takes {} operands, found {}", name, to_string(combiner), operand_count(combiner), operands.size()));
    require(results.size() == static_cast<size_t>(result_count(combiner)) && dtypes.size() == results.size(),
            fmt::format("{}: {} gives {} results, found {}", name, to_string(combiner), result_count(combiner), results.size()));
    require(!axes.empty(), name + ": no axis to reduce");
    Scope inner = scope;
    for (const Axis& axis : axes) define_axis(inner, axis);
    for (const auto& stmt : body) statement(*stmt, inner);
    for (size_t k = 0; k < operands.size(); ++k) {
      DType dtype = value(inner, operands[k]);
      if (operands.size() == results.size() && dtype != dtypes[k])
        fail(fmt::format("{}: operand {} is {}, the result {}", name, operands[k], to_string(dtype), to_string(dtypes[k])));
    }
    return inner;
  }

  void statement(const Reduce& s, Scope& scope) const {
    combination(s.results, s.dtypes, s.combiner, s.operands, s.axes, s.body, scope);
    for (size_t k = 0; k < s.results.size(); ++k) define(scope, s.results[k], s.dtypes[k]);
  }

  void statement(const Scan& s, Scope& scope) const {
    Scope inner = combination(s.results, s.dtypes, s.combiner, s.operands, {s.axis}, s.body, scope);
    for (size_t k = 0; k < s.results.size(); ++k) define(inner, s.results[k], s.dtypes[k]);
    block(s.then, std::move(inner));
  }

  void statement(const Local& s, Scope& scope) const {
    for (const Expr& e : s.shape) expression(scope, e, "shape of " + s.name);
    require(scope.buffers.emplace(s.name, BufferInfo{s.dtype, s.shape.size(), true}).second, "the buffer " + s.name + " is declared twice");
  }

  void statement(const Check& s, Scope& scope) const { expression(scope, s.cond.expr, "check"); }

  void run() const {
    Scope scope;
    for (const Param& p : kernel.params) located(p.location, [&] { declare(p, scope); });
    block(kernel.body, std::move(scope));
    for (const Param& p : kernel.params) located(p.location, [&] { check_stored(p); });
  }

  void declare(const Param& p, Scope& scope) const {
    require(p.shape.size() == p.strides.size(), fmt::format("{} has {} sizes and {} strides", p.name, p.shape.size(), p.strides.size()));
    for (const Expr& e : p.shape) expression(scope, e, "shape of " + p.name);
    for (const Expr& e : p.strides) expression(scope, e, "strides of " + p.name);
    require(scope.buffers.emplace(p.name, BufferInfo{p.dtype, p.shape.size(), p.kind != ParamKind::in}).second,
            "the parameter " + p.name + " is declared twice");
  }

  void check_stored(const Param& p) const {
    bool empty = std::any_of(p.shape.begin(), p.shape.end(), [](const Expr& size) { return size.is(0); });
    require(p.kind != ParamKind::out || empty || stored.count(p.name), "nothing stores the output " + p.name);
  }
};

}  // namespace

void verify(const Kernel& kernel) {
  located(kernel.location, [&] { Verifier{kernel, {}}.run(); });
}

void verify(const Module& module) { verify_module(module); }

}  // namespace deplo::loop_ir
