#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "loop_ir/text.h"
#include "tile_ir/text.h"

namespace deplo::tile_ir {
namespace {

/// Copies that a lowering may make of one loop's body.
constexpr int64_t kMaxCopies = 1024;

struct BufferInfo {
  DType dtype;
  size_t rank;
  bool writable;
  Space space = Space::stack;
  bool param = true;
};

// Names visible at one point of a kernel. Copied on entering a nested block: kernels are small.
struct Scope {
  std::map<std::string, DType> values;
  std::map<std::string, BufferInfo> buffers;
  std::map<std::string, LoopKind> axes;
  bool parallel = false;  ///< inside a parallel loop
  bool lanes = false;     ///< inside a lanes loop
  bool nested = false;    ///< inside any loop but parallel
  bool reduces = false;   ///< inside a reduce or scan
};

struct Verifier {
  const Kernel& kernel;
  mutable std::set<std::string> stored;  ///< buffers that a store names

  [[noreturn]] void fail(const std::string& text) const { throw InternalError(fmt::format("tile @{}: {}", kernel.name, text)); }
  void require(bool condition, const std::string& text) const {
    if (!condition) fail(text);
  }

  bool taken(const Scope& scope, const std::string& name) const {
    return scope.values.count(name) || scope.axes.count(name) || kernel.symbols.count(name);
  }

  void define(Scope& scope, const std::string& name, DType dtype) const {
    require(!taken(scope, name), "the name " + name + " is defined twice");
    scope.values[name] = dtype;
  }

  // Adds the axis to `scope`, which is that of its body.
  void define_axis(Scope& scope, const Axis& axis) const {
    const std::string& name = axis.name;
    expression(scope, axis.lo, "lower bound of " + name);
    expression(scope, axis.hi, "upper bound of " + name);
    require(!taken(scope, name), "the axis " + name + " is defined twice");
    require(axis.step >= 1, fmt::format("the step of {} is {}", name, axis.step));
    require(axis.by >= 1 && axis.by <= kMaxCopies, fmt::format("{} by {}: expected 1 to {}", name, axis.by, kMaxCopies));
    require(axis.by == 1 || axis.kind == LoopKind::lanes || axis.kind == LoopKind::serial,
            fmt::format("{}: a {} loop has no `by`", name, to_string(axis.kind)));
    switch (axis.kind) {
      case LoopKind::serial: break;
      case LoopKind::parallel:
        require(!scope.parallel && !scope.nested, name + ": a parallel loop must be outermost");
        scope.parallel = true;
        break;
      case LoopKind::lanes:
        require(!scope.lanes, name + ": lanes inside lanes");
        require(axis.step == 1, name + ": a lanes loop has step 1");
        scope.lanes = true;
        break;
      case LoopKind::unroll:
        require(axis.lo.is_constant() && axis.hi.is_constant(), name + ": an unrolled loop has constant bounds");
        require(axis.hi.value() < 0 || axis.lo.value() >= axis.hi.value() - kMaxCopies * axis.step,
                fmt::format("{}: an unrolled loop has at most {} iterations", name, kMaxCopies));
        break;
      case LoopKind::block_x:
      case LoopKind::block_y:
      case LoopKind::block_z: require(axis.step == 1, name + ": a block loop has step 1"); break;
      case LoopKind::thread_x:
      case LoopKind::thread_y:
        require(axis.step == 1 && axis.lo.is(0) && axis.hi.is_constant(), name + ": a thread loop runs from 0 to a constant by 1");
        break;
    }
    if (axis.kind != LoopKind::parallel) scope.nested = true;
    scope.axes[name] = axis.kind;
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
      require(it->second == DType::i64, fmt::format("{} uses {} of dtype {}; coordinates are i64", where, name, deplo::to_string(it->second)));
    }
  }

  void guard(const Scope& scope, const std::vector<Cond>& conds, const std::string& where) const {
    for (const Cond& c : conds) expression(scope, c.expr, where);
  }

  const BufferInfo& access(const Scope& scope, const std::string& buffer, const std::vector<Expr>& index) const {
    auto it = scope.buffers.find(buffer);
    require(it != scope.buffers.end(), "the buffer " + buffer + " is not declared here");
    require(it->second.rank == index.size(), fmt::format("{} has {} dimensions, indexed with {}", buffer, it->second.rank, index.size()));
    for (const Expr& e : index) expression(scope, e, "index of " + buffer);
    if (it->second.space == Space::reg && !it->second.param) register_index(scope, buffer, index);
    return it->second;
  }

  void register_index(const Scope& scope, const std::string& buffer, const std::vector<Expr>& index) const {
    for (size_t d = 0; d < index.size(); ++d)
      for (const std::string& name : symbols_of(index[d])) {
        auto axis = scope.axes.find(name);
        bool allowed = axis != scope.axes.end() && (axis->second == LoopKind::unroll || (axis->second == LoopKind::lanes && d + 1 == index.size()));
        require(allowed, fmt::format("index {} of the register array {} uses {}, which is neither unrolled nor the lanes axis of its last dimension",
                                     d, buffer, name));
      }
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
    const BufferInfo& buffer = access(scope, s.buffer, s.index);
    guard(scope, s.guard, "guard of " + s.name);
    require(buffer.dtype == s.dtype, s.name + ": a load has its buffer's dtype");
    require(s.guard.empty() || s.fill.dtype == s.dtype, s.name + ": the fill of a load has its buffer's dtype");
    define(scope, s.name, s.dtype);
  }

  void statement(const Store& s, Scope& scope) const {
    stored.insert(s.buffer);
    const BufferInfo& buffer = access(scope, s.buffer, s.index);
    guard(scope, s.guard, "guard of the store to " + s.buffer);
    require(buffer.writable, "store to the input " + s.buffer);
    DType dtype = value(scope, s.value);
    require(dtype == buffer.dtype,
            fmt::format("store of {} {} to {} of dtype {}", deplo::to_string(dtype), s.value, s.buffer, deplo::to_string(buffer.dtype)));
    require(operand_count(s.combiner) == 1 && result_count(s.combiner) == 1,
            fmt::format("a store cannot combine by {}", deplo::to_string(s.combiner)));
  }

  void statement(const For& s, Scope& scope) const {
    Scope inner = scope;
    define_axis(inner, s.axis);
    block(s.body, std::move(inner));
  }

  void statement(const If& s, Scope& scope) const {
    require(!s.guard.empty(), "an `if` without a condition");
    guard(scope, s.guard, "an `if`");
    block(s.body, scope);
  }

  // Checks a body that defines the operands of a combination; returns the scope at its end.
  Scope combination(const std::vector<std::string>& results, const std::vector<DType>& dtypes, Combiner combiner,
                    const std::vector<std::string>& operands, const std::vector<Axis>& axes, const Block& body, const Scope& scope) const {
    std::string name = results.empty() ? "a reduction" : results[0];
    require(combiner != Combiner::set, name + ": set is no reduction");
    size_t partial = combiner == Combiner::welford ? 3 : combiner == Combiner::online_softmax ? 2 : 0;
    require(operands.size() == static_cast<size_t>(operand_count(combiner)) || (partial > 0 && operands.size() == partial),
            fmt::format("{}: {} takes {} operands, found {}", name, deplo::to_string(combiner), operand_count(combiner), operands.size()));
    require(results.size() == static_cast<size_t>(result_count(combiner)) && dtypes.size() == results.size(),
            fmt::format("{}: {} gives {} results, found {}", name, deplo::to_string(combiner), result_count(combiner), results.size()));
    require(!axes.empty(), name + ": no axis to reduce");
    Scope inner = scope;
    inner.reduces = true;
    for (const Axis& axis : axes) {
      require(axis.kind == LoopKind::serial || axis.kind == LoopKind::lanes || axis.kind == LoopKind::unroll,
              fmt::format("{}: a {} axis cannot be reduced", name, to_string(axis.kind)));
      define_axis(inner, axis);
    }
    for (const auto& stmt : body) statement(*stmt, inner);
    for (size_t k = 0; k < operands.size(); ++k) {
      DType dtype = value(inner, operands[k]);
      bool same = operands.size() != results.size() || dtype == dtypes[k];
      require(same, fmt::format("{}: operand {} is {}, the result {}", name, operands[k], deplo::to_string(dtype), deplo::to_string(dtypes[k])));
    }
    return inner;
  }

  void statement(const Reduce& s, Scope& scope) const {
    combination(s.results, s.dtypes, s.combiner, s.operands, s.axes, s.body, scope);
    for (size_t k = 0; k < s.results.size(); ++k) define(scope, s.results[k], s.dtypes[k]);
  }

  void statement(const Scan& s, Scope& scope) const {
    require(s.axis.kind == LoopKind::serial, s.axis.name + ": a scan is serial");
    Scope inner = combination(s.results, s.dtypes, s.combiner, s.operands, {s.axis}, s.body, scope);
    for (size_t k = 0; k < s.results.size(); ++k) define(inner, s.results[k], s.dtypes[k]);
    block(s.then, std::move(inner));
  }

  void statement(const Alloc& s, Scope& scope) const {
    bool symbolic = s.space == Space::scratch;
    for (const Expr& e : s.shape) {
      expression(scope, e, "shape of " + s.name);
      require(symbolic || e.is_constant(),
              fmt::format("the {} array {} needs a constant shape, found {}", to_string(s.space), s.name, print_shape(s.shape)));
      for (const std::string& symbol : symbols_of(e))
        require(kernel.symbols.count(symbol), fmt::format("the shape of {} uses {}, which is not a size", s.name, symbol));
    }
    require(scope.buffers.emplace(s.name, BufferInfo{s.dtype, s.shape.size(), true, s.space, false}).second,
            "the buffer " + s.name + " is declared twice");
  }

  void statement(const Check& s, Scope& scope) const { expression(scope, s.cond.expr, "check"); }

  void statement(const Barrier&, Scope& scope) const { require(!scope.lanes && !scope.reduces, "a barrier inside a lanes loop or a reduction"); }

  void statement(const Prefetch& s, Scope& scope) const {
    access(scope, s.buffer, s.index);
    require(s.level >= 1 && s.level <= 3, fmt::format("prefetch to level {}", s.level));
  }

  void run() const {
    Scope scope;
    for (const Param& p : kernel.params) located(p.location, [&] { declare(p, scope); });
    for (const std::string& name : symbols_of(kernel.chunks))
      require(kernel.symbols.count(name), "chunks depend on " + name + ", which is not a size");
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

}  // namespace deplo::tile_ir
