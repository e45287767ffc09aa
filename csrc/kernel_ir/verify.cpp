#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/require.h"
#include "expr/check.h"
#include "expr/points.h"
#include "kernel_ir/text.h"
#include "program_ir/text.h"
#include "scalar/bytes.h"
#include "scalar/warp.h"

namespace deplo::kernel_ir {
namespace {

constexpr int64_t kCopyBytes = 16;

/// Elements of the memory of buffers, where they are known.
using Sizes = std::map<std::string, Expr>;

/// Checks names, types, lane counts and accesses of one kernel; `where` in messages is the statement's target.
class Verifier {
 public:
  /// `sizes`: of params; `symbols`: the ranges of the kernel's.
  explicit Verifier(const Kernel& kernel, Sizes sizes = {}, const Ranges& symbols = {})
      : kernel_(kernel), points_(symbols), sizes_(std::move(sizes)), symbols_(symbols) {
    for (const Param& p : kernel.params) {
      located(p.location, [&] { DEPLO_REQUIRE(buffers_.emplace(p.name, p.dtype).second, p.name, "parameter is declared twice"); });
      if (p.kind != loop_ir::ParamKind::in) writable_.insert(p.name);
    }
    for (const std::string& s : kernel.symbols) values_[s] = {DType::i64, 1};
    std::vector<std::string> sizes_of_host;
    for (const Size& s : kernel.sizes) {
      for (const std::string& symbol : symbols_of(s.value)) DEPLO_REQUIRE(values_.count(symbol) > 0, s.name, "unknown symbol " + symbol);
      sizes_of_host.push_back(s.name);
      points_.define(s.name, s.value);
    }
    check_size(kernel.chunks, "chunks");
    check_size(kernel.scratch_bytes, "scratch");
    for (const std::vector<Expr>* extents : {&kernel.grid, &kernel.block})
      for (Expr e : *extents) check_size(e, "grid");
    for (const std::string& s : sizes_of_host) DEPLO_REQUIRE(values_.emplace(s, Type{DType::i64, 1}).second, s, "is declared twice");
    for (const char* s : {"thread", "threads", "block_x", "block_y", "block_z", "thread_x", "thread_y"}) values_[s] = {DType::i64, 1};
    // However many threads of a CPU there are: one alone does the same.
    points_.define("thread", 0);
    points_.define("threads", 1);
    add_indices({"block_x", "block_y", "block_z"}, kernel.grid);
    add_indices({"thread_x", "thread_y"}, kernel.block);
  }

  void run() { block(kernel_.body); }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& what) const {
    throw InternalError(fmt::format("kernel {}: {}: {}", kernel_.name, where, what));
  }

  void check_size(Expr e, const std::string& where) const {
    for (const std::string& s : symbols_of(e)) DEPLO_REQUIRE(values_.count(s) > 0, where, "unknown symbol " + s);
    check_divisors(e, symbols_);
    not_negative(e, where);
  }

  void not_negative(Expr e, const std::string& where) const {
    DEPLO_REQUIRE(decide(less(e, 0), symbols_) != std::optional<bool>(true), where, "the size " + deplo::print(e) + " is negative");
  }

  void add_indices(const std::vector<std::string>& names, const std::vector<Expr>& extents) {
    for (size_t d = 0; d < names.size(); ++d) {
      if (d < extents.size())
        points_.add_axis(names[d], 0, extents[d]);
      else
        points_.define(names[d], 0);
    }
  }

  /// Whether what e is does not change while its names are in scope.
  bool is_fixed(Expr e) const {
    if (vars_.empty()) return true;
    std::set<std::string> names = symbols_of(e);
    return std::none_of(names.begin(), names.end(), [&](const std::string& name) { return vars_.count(name); });
  }
  bool is_fixed(const std::vector<Cond>& guard) const {
    return std::all_of(guard.begin(), guard.end(), [&](const Cond& c) { return is_fixed(c.expr); });
  }

  void in_range(const Points& points, const std::string& buffer, Expr element, const std::string& where) const {
    if (auto why = points.escape(buffer, {element}, {sizes_.at(buffer)})) DEPLO_REQUIRE(false, where, *why);
  }

  /// That the lanes which are on lie in the buffer.
  template <class Access>
  void in_range(const Access& s, int lanes, const std::string& where) {
    if (!sizes_.count(s.buffer) || !s.gather.empty() || !is_fixed(s.offset) || !is_fixed(s.stride)) return;
    if (s.mask.empty()) {
      in_range(points_, s.buffer, s.offset, where);
      if (lanes > 1) in_range(points_, s.buffer, s.offset + s.stride * (lanes - 1), where);
    } else if (auto on = first_lanes_.find(s.mask); on != first_lanes_.end()) {
      auto [points, is_new] = masked_points_.try_emplace({s.mask, lanes}, points_);
      if (is_new) points->second.add_axis("%lane", 0, min(lanes, on->second));
      in_range(points->second, s.buffer, s.offset + s.stride * Expr::symbol("%lane"), where);
    }
  }

  void define(const std::string& name, Type type) {
    DEPLO_REQUIRE(values_.count(name) == 0, name, "is defined twice");
    DEPLO_REQUIRE(type.lanes >= 1, name, "has no lanes");
    values_[name] = type;
    defined_.push_back(name);
  }

  Type use(const std::string& name, const std::string& where) const {
    auto it = values_.find(name);
    DEPLO_REQUIRE(it != values_.end(), where, name + " is not defined here");
    return it->second;
  }

  void index(Expr e, const std::string& where) const {
    for (const std::string& s : symbols_of(e)) {
      Type t = use(s, where);
      DEPLO_REQUIRE(t.lanes == 1 && is_integer(t.dtype), where, fmt::format("{} is {}, an index takes scalar integers", s, print(t)));
    }
  }

  DType buffer(const std::string& name, const std::string& where) const {
    auto it = buffers_.find(name);
    DEPLO_REQUIRE(it != buffers_.end(), where, "buffer " + name + " is not declared here");
    return it->second;
  }

  void mask(const std::string& name, int lanes, const std::string& where) const {
    if (name.empty()) return;
    Type t = use(name, where);
    DEPLO_REQUIRE((t == Type{DType::boolean, lanes}), where, fmt::format("mask {} is {}, needed is boolx{}", name, print(t), lanes));
  }

  void gather(const std::string& name, int lanes, const std::string& where) const {
    if (name.empty()) return;
    Type t = use(name, where);
    DEPLO_REQUIRE(is_integer(t.dtype) && t.lanes == lanes, where, fmt::format("gather {} is {}", name, print(t)));
  }

  void statement(const Let& s) {
    std::vector<DType> operands;
    for (const std::string& o : s.operands) {
      Type t = use(o, s.name);
      DEPLO_REQUIRE(t.lanes == s.type.lanes, s.name, fmt::format("{} has {} lanes, the result {}", o, t.lanes, s.type.lanes));
      operands.push_back(t.dtype);
    }
    std::string complaint = type_error(s.fn, s.type.dtype, operands.data(), static_cast<int>(operands.size()));
    DEPLO_REQUIRE(complaint.empty(), s.name, complaint);
    if (s.fn == Fn::index) {
      index(s.index, s.name);
      index(s.lane_step, s.name);
    }
    define(s.name, s.type);
    if (s.fn == Fn::index && s.type.lanes == 1 && is_fixed(s.index)) {
      points_.define(s.name, s.index);
      masked_points_.clear();
    }
  }
  void statement(const Splat& s) {
    DEPLO_REQUIRE((use(s.operand, s.name) == Type{s.type.dtype, 1}), s.name, s.operand + " must be a scalar of the result's dtype");
    define(s.name, s.type);
  }
  void statement(const FirstLanes& s) {
    index(s.count, s.name);
    define(s.name, {DType::boolean, s.lanes});
    if (is_fixed(s.count)) first_lanes_[s.name] = s.count;
  }
  void statement(const ReduceLanes& s) {
    Type t = use(s.operand, s.name);
    DEPLO_REQUIRE(t.dtype == s.dtype, s.name, "dtype differs from " + s.operand);
    DEPLO_REQUIRE((t.lanes & (t.lanes - 1)) == 0, s.name, fmt::format("{} lanes are not a power of two", t.lanes));
    DType pair[] = {s.dtype, s.dtype};
    std::string complaint = type_error(s.fn, s.dtype, pair, 2);
    DEPLO_REQUIRE(complaint.empty(), s.name, complaint);
    define(s.name, {s.dtype, 1});
  }
  void statement(const Extract& s) {
    Type t = use(s.operand, s.name);
    DEPLO_REQUIRE(t.dtype == s.dtype && s.lane >= 0 && s.lane < t.lanes, s.name, fmt::format("lane {} of {}", s.lane, print(t)));
    define(s.name, {s.dtype, 1});
  }
  void statement(const Shuffle& s) {
    Type a = use(s.a, s.name);
    int lanes = a.lanes;
    if (!s.b.empty()) {
      DEPLO_REQUIRE(use(s.b, s.name) == a, s.name, "operands differ in type");
      lanes *= 2;
    }
    DEPLO_REQUIRE(a.dtype == s.type.dtype && static_cast<int>(s.lanes.size()) == s.type.lanes, s.name, "result type does not fit");
    for (int lane : s.lanes) DEPLO_REQUIRE(lane >= 0 && lane < lanes, s.name, fmt::format("lane {} of {}", lane, lanes));
    define(s.name, s.type);
  }
  void statement(const Exchange& s) {
    DEPLO_REQUIRE((use(s.operand, s.name) == Type{s.dtype, 1}), s.name, s.operand + " must be a scalar of the result's dtype");
    DEPLO_REQUIRE(s.lane >= (s.partner == Partner::number ? 0 : 1) && s.lane < 32, s.name, fmt::format("thread {} of 32", s.lane));
    DEPLO_REQUIRE(!kernel_.block.empty(), s.name, "a CPU's threads exchange nothing");
    define(s.name, {s.dtype, 1});
  }
  void statement(const Load& s) {
    DEPLO_REQUIRE(buffer(s.buffer, s.name) == s.type.dtype, s.name, "dtype differs from buffer " + s.buffer);
    index(s.offset, s.name);
    index(s.stride, s.name);
    gather(s.gather, s.type.lanes, s.name);
    mask(s.mask, s.type.lanes, s.name);
    if (!s.passthrough.empty()) DEPLO_REQUIRE(use(s.passthrough, s.name) == s.type, s.name, s.passthrough + " has another type");
    in_range(s, s.type.lanes, s.name);
    define(s.name, s.type);
  }
  void statement(const Store& s) {
    std::string where = "store to " + s.buffer;
    Type t = use(s.value, where);
    DEPLO_REQUIRE(buffer(s.buffer, where) == t.dtype, where, fmt::format("{} is {}", s.value, print(t)));
    DEPLO_REQUIRE(writable_.count(s.buffer) > 0, where, "it is an input");
    DEPLO_REQUIRE(!s.atomic || loop_ir::combines_atomically(s.combiner, t.dtype), where,
                  fmt::format("{} is {} and atomic; allowed: sums of f32, f64, i32 and i64", s.value, print(t)));
    index(s.offset, where);
    index(s.stride, where);
    gather(s.gather, t.lanes, where);
    mask(s.mask, t.lanes, where);
    in_range(s, t.lanes, where);
  }
  void statement(const Var& s) {
    DEPLO_REQUIRE(use(s.init, s.name) == s.type, s.name, s.init + " has another type");
    define(s.name, s.type);
    vars_.insert(s.name);
  }
  void statement(const Assign& s) {
    DEPLO_REQUIRE(vars_.count(s.name) > 0, s.name, "is not a var");
    DEPLO_REQUIRE(use(s.value, s.name) == use(s.name, s.name), s.name, s.value + " has another type");
  }
  void statement(const For& s) {
    index(s.lo, s.name);
    index(s.hi, s.name);
    index(s.step, s.name);
    DEPLO_REQUIRE(decide(less_equal(s.step, 0), symbols_) != std::optional<bool>(true), s.name,
                  "the step " + deplo::print(s.step) + " does not go on");
    const Scope outer = scope();
    Points points = enter();
    define(s.name, {DType::i64, 1});
    if (is_fixed(s.lo) && is_fixed(s.hi) && s.step.is_constant())
      points_.add_axis(s.name, s.lo, s.hi, s.step.value());
    else
      points_.add_unknown();
    block(s.body);
    leave(outer);
    back_to(std::move(points));
  }
  void statement(const If& s) {
    for (const Cond& c : s.guard) index(c.expr, "if");
    if (s.guard.empty()) mask(s.condition, 1, "if");
    bool known = !s.guard.empty() && is_fixed(s.guard);
    Points points = enter();
    known ? points_.add_guard(s.guard) : points_.add_unknown();
    block(s.then);
    back_to(points);
    known ? points_.add_failed(s.guard) : points_.add_unknown();
    block(s.otherwise);
    back_to(std::move(points));
  }
  void statement(const Alloc& s) {
    DEPLO_REQUIRE(buffers_.emplace(s.name, s.dtype).second, s.name, "buffer is declared twice");
    arrays_.push_back(s.name);
    if (s.space == Space::shared) shared_.insert(s.name);
    writable_.insert(s.name);
    index(s.count, s.name);
    if (s.space == Space::scratch) index(s.offset, s.name);
    not_negative(s.count, s.name);
    sizes_[s.name] = s.count;
    if (s.space != Space::scratch) DEPLO_REQUIRE(s.count.is_constant(), s.name, "needs a constant size, has " + deplo::print(s.count));
  }
  void statement(const Prefetch& s) {
    buffer(s.buffer, "prefetch");
    index(s.offset, "prefetch");
    DEPLO_REQUIRE(s.level >= 1 && s.level <= 3, "prefetch", fmt::format("cache level {} is not 1, 2 or 3", s.level));
  }
  void statement(const Barrier& /*s*/) {}
  void statement(const Matrix& s) {
    for (int r : {s.target, s.a, s.b}) DEPLO_REQUIRE(r >= 0 && r < kMatrixRegisters, "matrix", fmt::format("t{} is no register", r));
    if (s.kind == Matrix::Kind::multiply)
      DEPLO_REQUIRE(s.target != s.a && s.target != s.b && s.a != s.b, "matrix", "the registers of a product differ");
    if (s.kind == Matrix::Kind::multiply)
      DEPLO_REQUIRE(is_byte(s.a_dtype) ? is_byte(s.b_dtype) : s.a_dtype == DType::bf16 && s.b_dtype == DType::bf16, "matrix",
                    "both factors of a product are bf16, or bytes");
    if (s.kind == Matrix::Kind::zero)
      DEPLO_REQUIRE(s.dtype == DType::f32 || s.dtype == DType::i32, "matrix", fmt::format("sums are f32 or i32, not {}", to_string(s.dtype)));
    if (s.kind == Matrix::Kind::zero || s.kind == Matrix::Kind::multiply) return;
    const std::string where = "matrix rows of " + s.buffer;
    const DType dtype = buffer(s.buffer, where);
    const bool written = s.kind == Matrix::Kind::store;
    const bool sums = dtype == DType::f32 || dtype == DType::i32;
    DEPLO_REQUIRE(sums || ((dtype == DType::bf16 || is_byte(dtype)) && !written), where, fmt::format("it is {}", to_string(dtype)));
    DEPLO_REQUIRE(!written || writable_.count(s.buffer) > 0, where, "it is an input");
    index(s.offset, where);
    index(s.stride, where);
    if (!sizes_.count(s.buffer) || !is_fixed(s.offset) || !is_fixed(s.stride)) return;
    for (int64_t row : {int64_t{0}, kMatrixRows - 1})
      for (int64_t column : {int64_t{0}, kMatrixRowBytes / size_of(dtype) - 1})
        in_range(points_, s.buffer, s.offset + s.stride * row + column, where);
  }
  void statement(const CopyAsync& s) {
    const std::string where = "copy to " + s.buffer;
    DEPLO_REQUIRE(buffer(s.buffer, where) == buffer(s.from, where), where, s.from + " has another dtype");
    DEPLO_REQUIRE(shared_.count(s.buffer) > 0 && !shared_.count(s.from), where, "copies go from global to shared memory");
    DEPLO_REQUIRE(s.elements * size_of(buffers_.at(s.buffer)) == kCopyBytes, where,
                  fmt::format("{} elements are not {} bytes", s.elements, kCopyBytes));
    for (Expr e : {s.offset, s.from_offset, s.count}) index(e, where);
    for (const Cond& c : s.guard) index(c.expr, where);
    if (!sizes_.count(s.buffer) || !is_fixed(s.offset)) return;
    for (int64_t element : {0, s.elements - 1}) in_range(points_, s.buffer, s.offset + element, where);
  }
  void statement(const CopyGroup& s) { DEPLO_REQUIRE(s.pending >= CopyGroup::kCommit, "copy_wait", "a number of groups is negative"); }
  void statement(const LoadMatrix& s) {
    DEPLO_REQUIRE(buffer(s.buffer, s.name) == s.type.dtype && is_matrix_dtype(s.type.dtype), s.name,
                  s.buffer + " has another dtype than the result's, of bf16, f16, f32 or bytes");
    DEPLO_REQUIRE(!s.transposed || size_of(s.type.dtype) == 2, s.name, "matrices of bytes or f32 are not transposed");
    DEPLO_REQUIRE(shared_.count(s.buffer) > 0, s.name, "matrices are loaded from shared memory");
    const int count = s.type.lanes / lanes_of_matrix(s.type.dtype);
    DEPLO_REQUIRE((count == 1 || count == 2 || count == 4) && s.type.lanes == count * lanes_of_matrix(s.type.dtype), s.name,
                  fmt::format("{} lanes are not 1, 2 or 4 matrices", s.type.lanes));
    index(s.offset, s.name);
    if (is_fixed(s.offset))
      for (int64_t element : {int64_t{0}, kCopyBytes / size_of(s.type.dtype) - 1}) in_range(points_, s.buffer, s.offset + element, s.name);
    define(s.name, s.type);
  }
  void statement(const JoinMatrix& s) {
    DEPLO_REQUIRE(is_matrix_dtype(s.type.dtype) && is_float(s.type.dtype), s.name, "matrices are of bf16, f16 or f32");
    const int lanes = lanes_of_matrix(s.type.dtype);
    DEPLO_REQUIRE(s.parts.size() <= 4 && s.type.lanes == lanes * static_cast<int>(s.parts.size()), s.name,
                  fmt::format("each part fills {} lanes of at most {}", lanes, 4 * lanes));
    for (const std::string& part : s.parts) {
      const Type type = use(part, s.name);
      DEPLO_REQUIRE((type.dtype == DType::f32 || type.dtype == s.type.dtype) && s.lane >= 0 && s.lane + lanes <= type.lanes, s.name,
                    fmt::format("{} has no lanes {} of f32 or {}", part, s.lane, to_string(s.type.dtype)));
    }
    define(s.name, s.type);
  }
  void statement(const Mma& s) {
    for (const std::string& sum : {s.low, s.high}) {
      DEPLO_REQUIRE(vars_.count(sum) > 0 && use(sum, "mma").dtype == (size_of(use(s.a, "mma").dtype) == 1 ? DType::i32 : DType::f32), "mma",
                    sum + " is no var of f32, or of i32 for bytes");
      DEPLO_REQUIRE(s.lane >= 0 && s.lane % 2 == 0 && s.lane + 1 < use(sum, "mma").lanes, "mma", fmt::format("{} has no lane {}", sum, s.lane));
    }
    const Type a = use(s.a, "mma");
    const Type b = use(s.b, "mma");
    const int lanes = 4 * lanes_of_matrix(a.dtype);
    const bool alike = b.dtype == a.dtype || (size_of(a.dtype) == 1 && size_of(b.dtype) == 1);
    DEPLO_REQUIRE(is_matrix_dtype(a.dtype) && a.lanes == lanes, "mma", s.a + " is no matrix of 16 rows");
    DEPLO_REQUIRE(is_matrix_dtype(b.dtype) && alike && s.half >= 0 && b.lanes >= lanes / 2 * (s.half + 1), "mma",
                  fmt::format("{} has no half {} of the dtype of {}", s.b, s.half, s.a));
    DEPLO_REQUIRE(s.low != s.high, "mma", "its sums are one var");
  }
  void statement(const MultiplyTiles& s) {
    const TileProducts& p = s.products;
    const std::string where = "products of tiles";
    const std::string problem = problem_of(p);
    DEPLO_REQUIRE(problem.empty(), where, problem);
    DEPLO_REQUIRE(static_cast<int64_t>(s.sums.size()) == p.b.rows / 4, where, fmt::format("{} vars, needed are {}", s.sums.size(), p.b.rows / 4));
    for (const std::string& sum : s.sums)
      DEPLO_REQUIRE((vars_.count(sum) > 0 && use(sum, where) == Type{DType::f32, 2}), where, sum + " is no var of f32x2");
    for_each_expr(p, [&](Expr e) { index(e, where); });
    for (const TileFactor* f : {&p.a, &p.b}) {
      DEPLO_REQUIRE(buffer(f->buffer, where) == buffer(f->tiles, where), where, f->buffer + " has another dtype than its tiles");
      DEPLO_REQUIRE(size_of(buffers_.at(f->tiles)) == 2 && is_float(buffers_.at(f->tiles)), where, f->tiles + " is not of bf16 or f16");
      DEPLO_REQUIRE(shared_.count(f->tiles) > 0 && !shared_.count(f->buffer) && !writable_.count(f->buffer), where,
                    "tiles come from inputs to shared memory");
      in_range(points_, f->tiles, p.stages * f->elements() - 1, where);
    }
    DEPLO_REQUIRE(shared_.count(p.flags) > 0 && buffer(p.flags, where) == DType::i64, where, p.flags + " is no shared array of i64");
    in_range(points_, p.flags, 2 * p.stages - 1, where);
  }
  void statement(const MultiplyGroup& s) {
    const GroupProducts& p = s.products;
    const std::string where = "products of groups";
    const std::string problem = problem_of(p);
    DEPLO_REQUIRE(problem.empty(), where, problem);
    const DType dtype = buffer(p.b.tile, where);
    const int64_t bytes = size_of(dtype);
    DEPLO_REQUIRE(is_matrix_dtype(dtype), where, p.b.tile + " is not of bf16, f16 or bytes");
    const int64_t vars = p.columns / (2 * p.lanes);
    DEPLO_REQUIRE(static_cast<int64_t>(s.sums.size()) == vars, where, fmt::format("{} vars, needed are {}", s.sums.size(), vars));
    for (const std::string& sum : s.sums)
      DEPLO_REQUIRE((vars_.count(sum) > 0 && use(sum, where) == Type{bytes == 1 ? DType::i32 : DType::f32, static_cast<int>(p.lanes)}), where,
                    fmt::format("{} is no var of {} sums", sum, p.lanes));
    if (p.depth == 0) return;
    DEPLO_REQUIRE(bytes == 2 || (p.depth % (2 * kGroupDepth) == 0 && !p.a.turned && !p.b.turned && p.matrices.empty()), where,
                  "bytes are multiplied from lines of k in shared memory, 32 at a time");
    const int64_t length = 2 * kGroupLine / bytes;  // of a line: what begins within one stays there
    const auto factor = [&](const GroupFactor& f, int64_t rows) {
      const DType own = buffer(f.tile, where);
      DEPLO_REQUIRE(shared_.count(f.tile) > 0 && (own == dtype || (bytes == 1 && size_of(own) == 1)), where,
                    fmt::format("{} is no shared array of {}", f.tile, to_string(dtype)));
      index(f.at, where);
      if (is_fixed(f.at))
        for (int64_t row : {int64_t{0}, rows - 1})
          for (int64_t k : {int64_t{0}, p.depth - 1}) in_range(points_, f.tile, f.at + f.place(0, row, k, bytes) / length * length, where);
    };
    factor(p.b, p.columns);
    if (p.matrices.empty()) return factor(p.a, kGroupRows);
    for (const std::string& matrix : p.matrices)
      DEPLO_REQUIRE((use(matrix, where) == Type{dtype, 8}), where, fmt::format("{} is no matrix of 16 rows of {}", matrix, to_string(dtype)));
  }
  void statement(const SetError& s) { DEPLO_REQUIRE(use(s.condition, "error").dtype == DType::boolean, "error", s.condition + " is not bool"); }

  /// The points of an inner scope are a copy. Returns those of the outer one, to be put back.
  Points enter() {
    Points outer = std::move(points_);
    back_to(outer);
    return outer;
  }
  void back_to(Points points) {
    points_ = std::move(points);
    masked_points_.clear();
  }

  /// How many values and arrays there are.
  struct Scope {
    size_t values;
    size_t arrays;
  };
  Scope scope() const { return {defined_.size(), arrays_.size()}; }
  void leave(const Scope& outer) {
    for (; defined_.size() > outer.values; defined_.pop_back()) values_.erase(defined_.back());
    for (; arrays_.size() > outer.arrays; arrays_.pop_back()) {
      buffers_.erase(arrays_.back());
      sizes_.erase(arrays_.back());
    }
  }

  void block(const Block& statements) {
    const Scope outer = scope();
    for (const auto& stmt : statements) located(stmt->location, [&] { std::visit([&](const auto& s) { statement(s); }, stmt->node); });
    leave(outer);
  }

  const Kernel& kernel_;
  Points points_;
  std::map<std::pair<std::string, int>, Points> masked_points_;  ///< the same with the lanes that a mask has on
  Sizes sizes_;
  const Ranges symbols_;
  std::map<std::string, Expr> first_lanes_;  ///< of masks, how many lanes they have on
  std::map<std::string, Type> values_;
  std::vector<std::string> defined_;  ///< in the order of the text, as are arrays
  std::vector<std::string> arrays_;
  std::map<std::string, DType> buffers_;
  std::set<std::string> writable_;
  std::set<std::string> vars_;
  std::set<std::string> shared_;  ///< arrays
};

/// Elements from the first to the last of a buffer that has any.
Expr span_of(const Buffer& buffer) {
  Expr last = 0;
  for (size_t d = 0; d < buffer.shape.size(); ++d) last = last + (buffer.shape[d] - 1) * buffer.strides[d];
  return last + 1;
}

}  // namespace

void verify(const Kernel& kernel) {
  located(kernel.location, [&] { Verifier(kernel).run(); });
}

void verify(const Module& module) {
  verify_module(module);
  std::vector<std::pair<const Kernel*, Sizes>> seen;
  for (const Step& step : module.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call) continue;
    const Kernel* kernel = module.find_kernel(call->kernel);
    Sizes sizes;
    for (size_t k = 0; k < call->arguments.size(); ++k) sizes[kernel->params[k].name] = span_of(*module.find_buffer(call->arguments[k]));
    if (std::find(seen.begin(), seen.end(), std::pair{kernel, sizes}) != seen.end()) continue;
    located(kernel->location, [&] { Verifier(*kernel, sizes, module.symbols).run(); });
    seen.emplace_back(kernel, std::move(sizes));
  }
}

}  // namespace deplo::kernel_ir
