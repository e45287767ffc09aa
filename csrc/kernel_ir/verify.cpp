#include <map>
#include <set>

#include "base/error.h"
#include "kernel_ir/text.h"
#include "program_ir/text.h"

namespace deplo::kernel_ir {
namespace {

/// Checks names, types and lane counts of one kernel; `where` in messages is the statement's target.
class Verifier {
 public:
  explicit Verifier(const Kernel& kernel) : kernel_(kernel) {
    for (const Param& p : kernel.params) {
      located(p.location, [&] { require(buffers_.emplace(p.name, p.dtype).second, p.name, "parameter is declared twice"); });
      if (p.kind != loop_ir::ParamKind::in) writable_.insert(p.name);
    }
    for (const std::string& s : kernel.symbols) values_[s] = {DType::i64, 1};
    check_free(kernel.chunks, "chunks");
    check_free(kernel.scratch_bytes, "scratch");
    for (const char* s : {"thread", "threads", "block_x", "block_y", "block_z", "thread_x", "thread_y"}) values_[s] = {DType::i64, 1};
  }

  void run() { block(kernel_.body); }

 private:
  void require(bool condition, const std::string& where, const std::string& what) const {
    DEPLO_ASSERT(condition, "kernel {}: {}: {}", kernel_.name, where, what);
  }

  void check_free(Expr e, const std::string& where) const {
    for (const std::string& s : symbols_of(e)) require(values_.count(s) > 0, where, "unknown symbol " + s);
  }

  void define(const std::string& name, Type type) {
    require(values_.count(name) == 0, name, "is defined twice");
    require(type.lanes >= 1, name, "has no lanes");
    values_[name] = type;
  }

  Type use(const std::string& name, const std::string& where) const {
    auto it = values_.find(name);
    require(it != values_.end(), where, name + " is not defined here");
    return it->second;
  }

  void index(Expr e, const std::string& where) const {
    for (const std::string& s : symbols_of(e)) {
      Type t = use(s, where);
      require(t.lanes == 1 && is_integer(t.dtype), where, fmt::format("{} is {}, an index takes scalar integers", s, print(t)));
    }
  }

  DType buffer(const std::string& name, const std::string& where) const {
    auto it = buffers_.find(name);
    require(it != buffers_.end(), where, "buffer " + name + " is not declared here");
    return it->second;
  }

  void mask(const std::string& name, int lanes, const std::string& where) const {
    if (name.empty()) return;
    Type t = use(name, where);
    require(t == Type{DType::boolean, lanes}, where, fmt::format("mask {} is {}, needed is boolx{}", name, print(t), lanes));
  }

  void gather(const std::string& name, int lanes, const std::string& where) const {
    if (name.empty()) return;
    Type t = use(name, where);
    require(is_integer(t.dtype) && t.lanes == lanes, where, fmt::format("gather {} is {}", name, print(t)));
  }

  void statement(const Let& s) {
    std::vector<DType> operands;
    for (const std::string& o : s.operands) {
      Type t = use(o, s.name);
      require(t.lanes == s.type.lanes, s.name, fmt::format("{} has {} lanes, the result {}", o, t.lanes, s.type.lanes));
      operands.push_back(t.dtype);
    }
    std::string complaint = type_error(s.fn, s.type.dtype, operands.data(), static_cast<int>(operands.size()));
    require(complaint.empty(), s.name, complaint);
    if (s.fn == Fn::index) {
      index(s.index, s.name);
      index(s.lane_step, s.name);
    }
    define(s.name, s.type);
  }
  void statement(const Splat& s) {
    require(use(s.operand, s.name) == Type{s.type.dtype, 1}, s.name, s.operand + " must be a scalar of the result's dtype");
    define(s.name, s.type);
  }
  void statement(const FirstLanes& s) {
    index(s.count, s.name);
    define(s.name, {DType::boolean, s.lanes});
  }
  void statement(const ReduceLanes& s) {
    Type t = use(s.operand, s.name);
    require(t.dtype == s.dtype, s.name, "dtype differs from " + s.operand);
    require((t.lanes & (t.lanes - 1)) == 0, s.name, fmt::format("{} lanes are not a power of two", t.lanes));
    DType pair[] = {s.dtype, s.dtype};
    std::string complaint = type_error(s.fn, s.dtype, pair, 2);
    require(complaint.empty(), s.name, complaint);
    define(s.name, {s.dtype, 1});
  }
  void statement(const Extract& s) {
    Type t = use(s.operand, s.name);
    require(t.dtype == s.dtype && s.lane >= 0 && s.lane < t.lanes, s.name, fmt::format("lane {} of {}", s.lane, print(t)));
    define(s.name, {s.dtype, 1});
  }
  void statement(const Shuffle& s) {
    Type a = use(s.a, s.name);
    int lanes = a.lanes;
    if (!s.b.empty()) {
      require(use(s.b, s.name) == a, s.name, "operands differ in type");
      lanes *= 2;
    }
    require(a.dtype == s.type.dtype && static_cast<int>(s.lanes.size()) == s.type.lanes, s.name, "result type does not fit");
    for (int lane : s.lanes) require(lane >= 0 && lane < lanes, s.name, fmt::format("lane {} of {}", lane, lanes));
    define(s.name, s.type);
  }
  void statement(const Load& s) {
    require(buffer(s.buffer, s.name) == s.type.dtype, s.name, "dtype differs from buffer " + s.buffer);
    index(s.offset, s.name);
    index(s.stride, s.name);
    gather(s.gather, s.type.lanes, s.name);
    mask(s.mask, s.type.lanes, s.name);
    if (!s.passthrough.empty()) require(use(s.passthrough, s.name) == s.type, s.name, s.passthrough + " has another type");
    define(s.name, s.type);
  }
  void statement(const Store& s) {
    std::string where = "store to " + s.buffer;
    Type t = use(s.value, where);
    require(buffer(s.buffer, where) == t.dtype, where, fmt::format("{} is {}", s.value, print(t)));
    require(writable_.count(s.buffer) > 0, where, "it is an input");
    index(s.offset, where);
    index(s.stride, where);
    gather(s.gather, t.lanes, where);
    mask(s.mask, t.lanes, where);
  }
  void statement(const Var& s) {
    require(use(s.init, s.name) == s.type, s.name, s.init + " has another type");
    define(s.name, s.type);
    vars_.insert(s.name);
  }
  void statement(const Assign& s) {
    require(vars_.count(s.name) > 0, s.name, "is not a var");
    require(use(s.value, s.name) == use(s.name, s.name), s.name, s.value + " has another type");
  }
  void statement(const For& s) {
    index(s.lo, s.name);
    index(s.hi, s.name);
    index(s.step, s.name);
    auto outer = values_;
    define(s.name, {DType::i64, 1});
    block(s.body);
    values_ = std::move(outer);
  }
  void statement(const If& s) {
    for (const Cond& c : s.guard) index(c.expr, "if");
    if (s.guard.empty()) mask(s.condition, 1, "if");
    block(s.then);
    block(s.otherwise);
  }
  void statement(const Alloc& s) {
    require(buffers_.emplace(s.name, s.dtype).second, s.name, "buffer is declared twice");
    writable_.insert(s.name);
    index(s.count, s.name);
    if (s.space == Space::scratch) index(s.offset, s.name);
    if (s.space != Space::scratch) require(s.count.is_constant(), s.name, "needs a constant size, has " + deplo::print(s.count));
  }
  void statement(const Prefetch& s) {
    buffer(s.buffer, "prefetch");
    index(s.offset, "prefetch");
    require(s.level >= 1 && s.level <= 3, "prefetch", fmt::format("cache level {} is not 1, 2 or 3", s.level));
  }
  void statement(const Barrier& /*s*/) {}
  void statement(const SetError& s) { require(use(s.condition, "error").dtype == DType::boolean, "error", s.condition + " is not bool"); }

  void block(const Block& statements) {
    auto values = values_;
    auto buffers = buffers_;
    for (const auto& stmt : statements) located(stmt->location, [&] { std::visit([&](const auto& s) { statement(s); }, stmt->node); });
    values_ = std::move(values);
    buffers_ = std::move(buffers);
  }

  const Kernel& kernel_;
  std::map<std::string, Type> values_;
  std::map<std::string, DType> buffers_;
  std::set<std::string> writable_;
  std::set<std::string> vars_;
};

}  // namespace

void verify(const Kernel& kernel) {
  located(kernel.location, [&] { Verifier(kernel).run(); });
}
void verify(const Module& module) { verify_module(module); }

}  // namespace deplo::kernel_ir
