#include "loop_ir/verify.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/require.h"
#include "expr/check.h"
#include "program_ir/text.h"
#include "scalar/bytes.h"
#include "scalar/warp.h"
#include "tile_ir/rewrite.h"
#include "tile_ir/text.h"

namespace deplo::tile_ir {
namespace {

/// Copies that a lowering may make of one loop's body.
constexpr int64_t kMaxCopies = 1024;
constexpr int64_t kCopyBytes = 16;
constexpr int64_t kMaxRegisters = 1 << 16;  ///< elements of a register array

/// Names visible at one place of a kernel, and what surrounds it.
struct Scope : loop_ir::Visible {
  std::map<std::string, LoopKind> kinds;                                ///< of axes
  std::set<std::string> registers;                                      ///< arrays that become variables
  std::map<std::string, std::pair<DType, std::vector<Expr>>> matrices;  ///< arrays of a matrix unit, and their shapes
  std::set<std::string> shared;                                         ///< arrays
  std::map<std::string, int> fragments;                                 ///< matrices that a warp's threads hold, and how many of 8 x 8
  bool parallel = false;                                                ///< inside a parallel loop
  bool lanes = false;                                                   ///< inside a lanes loop
  bool nested = false;                                                  ///< inside any loop but parallel
  bool reduces = false;                                                 ///< inside a reduce or scan
};

class Verifier : loop_ir::StatementVerifier {
 public:
  explicit Verifier(const Kernel& kernel) : StatementVerifier("tile @" + kernel.name, kernel.params, kernel.symbols), kernel_(kernel) {}

  void run() {
    Scope scope{parameters(), {}, {}, {}, {}, {}};
    for (const std::string& name : symbols_of(kernel_.chunks)) DEPLO_REQUIRE(is_size(name), "chunks depend on " + name + ", which is not a size");
    check_divisors(kernel_.chunks, kernel_.symbols);
    block(kernel_.body, std::move(scope));
    check_stored();
  }

 private:
  // Adds the axis to `scope`, which is that of its body.
  void define_axis(Scope& scope, const Axis& axis) const {
    const std::string& name = axis.name;
    expression(scope, axis.lo, "lower bound of " + name);
    expression(scope, axis.hi, "upper bound of " + name);
    DEPLO_REQUIRE(axis.step >= 1, fmt::format("the step of {} is {}", name, axis.step));
    if (axis.lo.is_constant() && axis.hi.is_constant())
      DEPLO_REQUIRE(axis.hi.value() >= axis.lo.value(), fmt::format("{} ends at {}, below its start {}", name, axis.hi.value(), axis.lo.value()));
    StatementVerifier::define_axis(scope, name, axis.lo, axis.hi, axis.step);
    DEPLO_REQUIRE(axis.by >= 1 && axis.by <= kMaxCopies, fmt::format("{} by {}: expected 1 to {}", name, axis.by, kMaxCopies));
    DEPLO_REQUIRE(axis.by == 1 || axis.kind == LoopKind::lanes || axis.kind == LoopKind::serial,
                  fmt::format("{}: a {} loop has no `by`", name, to_string(axis.kind)));
    switch (axis.kind) {
      case LoopKind::serial: break;
      case LoopKind::parallel:
        DEPLO_REQUIRE(!scope.parallel && !scope.nested, name + ": a parallel loop must be outermost");
        scope.parallel = true;
        break;
      case LoopKind::lanes:
        DEPLO_REQUIRE(!scope.lanes, name + ": lanes inside lanes");
        DEPLO_REQUIRE(axis.step == 1, name + ": a lanes loop has step 1");
        scope.lanes = true;
        break;
      case LoopKind::unroll:
        DEPLO_REQUIRE(axis.lo.is_constant() && axis.hi.is_constant(), name + ": an unrolled loop has constant bounds");
        DEPLO_REQUIRE(axis.hi.value() < 0 || axis.lo.value() >= axis.hi.value() - kMaxCopies * axis.step,
                      fmt::format("{}: an unrolled loop has at most {} iterations", name, kMaxCopies));
        break;
      case LoopKind::block_x:
      case LoopKind::block_y:
      case LoopKind::block_z: DEPLO_REQUIRE(axis.step == 1, name + ": a block loop has step 1"); break;
      case LoopKind::thread_x:
      case LoopKind::thread_y:
        DEPLO_REQUIRE(axis.step == 1 && axis.lo.is(0) && axis.hi.is_constant(), name + ": a thread loop runs from 0 to a constant by 1");
        break;
    }
    if (axis.kind != LoopKind::parallel) scope.nested = true;
    scope.kinds[name] = axis.kind;
  }

  void register_index(const Scope& scope, const std::string& buffer, const std::vector<Expr>& index) const {
    DEPLO_REQUIRE(!scope.matrices.count(buffer), fmt::format("{} is a matrix array, which `matrix` statements alone take", buffer));
    if (!scope.registers.count(buffer)) return;
    for (size_t d = 0; d < index.size(); ++d)
      for (const std::string& name : symbols_of(index[d])) {
        auto axis = scope.kinds.find(name);
        bool allowed = axis != scope.kinds.end() && (axis->second == LoopKind::unroll || (axis->second == LoopKind::lanes && d + 1 == index.size()));
        DEPLO_REQUIRE(allowed,
                      fmt::format("index {} of the register array {} uses {}, which is neither unrolled nor the lanes axis of its last dimension", d,
                                  buffer, name));
      }
  }

  void block(const Block& body, Scope scope) {
    for (const auto& stmt : body) statement(*stmt, scope);
  }

  void statement(const Stmt& stmt, Scope& scope) {
    located(stmt.location, [&] { std::visit([&](const auto& s) { statement(s, scope); }, stmt.node); });
  }

  void statement(const Let& s, Scope& scope) { StatementVerifier::statement(s, scope); }
  void statement(const Load& s, Scope& scope) {
    StatementVerifier::statement(s, scope);
    register_index(scope, s.buffer, s.index);
  }
  void statement(const Store& s, Scope& scope) {
    StatementVerifier::statement(s, scope);
    register_index(scope, s.buffer, s.index);
  }
  void statement(const Check& s, Scope& scope) { StatementVerifier::statement(s, scope); }

  void statement(const For& s, Scope& scope) {
    Scope inner = scope;
    define_axis(inner, s.axis);
    block(s.body, std::move(inner));
  }

  void statement(const If& s, Scope& scope) {
    DEPLO_REQUIRE(!s.guard.empty(), "an `if` without a condition");
    guard(scope, s.guard, "an `if`");
    Scope inner = scope;
    inner.points.add_guard(s.guard);
    block(s.body, std::move(inner));
  }

  /// The names at the end of a body that defines what is combined.
  Scope reduced(const std::vector<Axis>& axes, const Block& body, const Scope& scope) {
    DEPLO_REQUIRE(!axes.empty(), "a reduction has no axis");
    Scope inner = scope;
    inner.reduces = true;
    for (const Axis& axis : axes) {
      if (is_thread(axis)) {
        auto loop = scope.kinds.find(axis.name);
        DEPLO_REQUIRE(loop != scope.kinds.end() && loop->second == axis.kind,
                      fmt::format("{}: it is no {} loop around the reduction", axis.name, to_string(axis.kind)));
        DEPLO_REQUIRE(&axis == &axes[0] || is_thread(*(&axis - 1)), axis.name + ": threads come before other axes");
        DEPLO_REQUIRE(axis.hi.is_constant() && (axis.hi.value() & (axis.hi.value() - 1)) == 0, axis.name + ": a power of two of threads is reduced");
        DEPLO_REQUIRE(!scope.reduces, axis.name + ": threads are reduced inside of a reduction");
        continue;
      }
      DEPLO_REQUIRE(axis.kind == LoopKind::serial || axis.kind == LoopKind::lanes || axis.kind == LoopKind::unroll,
                    fmt::format("{}: a {} axis cannot be reduced", axis.name, to_string(axis.kind)));
      define_axis(inner, axis);
    }
    DEPLO_REQUIRE(!is_thread(axes.back()), "a reduction over threads alone");
    for (const auto& stmt : body) statement(*stmt, inner);
    return inner;
  }

  void statement(const Reduce& s, Scope& scope) {
    combination(s.results, s.dtypes, s.combiner, s.operands, reduced(s.axes, s.body, scope));
    for (size_t k = 0; k < s.results.size(); ++k) define(scope, s.results[k], s.dtypes[k]);
  }

  /// The names at the end of the body of a scan over threads.
  Scope shared_scan(const Scan& s, const Scope& scope) {
    const auto thread = std::find_if(s.axes.begin(), s.axes.end(), is_thread);
    DEPLO_REQUIRE(thread - s.axes.begin() <= 1 && s.axes.end() - thread == 2,
                  "a scan over threads has an axis of pieces at most, one of threads, and one of a thread's elements");
    const bool known = thread->hi.is_constant() && (thread->hi.value() & (thread->hi.value() - 1)) == 0;
    auto loop = scope.kinds.find(thread->name);
    DEPLO_REQUIRE(loop != scope.kinds.end() && loop->second == thread->kind,
                  fmt::format("{}: it is no {} loop around the scan", thread->name, to_string(thread->kind)));
    DEPLO_REQUIRE(known, thread->name + ": a power of two of threads scans");
    DEPLO_REQUIRE(!scope.reduces, thread->name + ": threads scan inside of a reduction");
    const Axis& own = s.axes.back();
    DEPLO_REQUIRE(own.kind == LoopKind::lanes || own.kind == LoopKind::unroll,
                  fmt::format("{}: a thread's elements are those of an unrolled or a lanes loop", own.name));
    Scope inner = scope;
    inner.reduces = true;
    for (const Axis& axis : s.axes) {
      if (is_thread(axis)) continue;
      const bool pieces = &axis != &own;
      DEPLO_REQUIRE(!pieces || axis.kind == LoopKind::serial || axis.kind == LoopKind::unroll,
                    fmt::format("{}: a {} axis has no pieces", axis.name, to_string(axis.kind)));
      DEPLO_REQUIRE(!pieces || (!uses(axis.lo, thread->name) && !uses(axis.hi, thread->name)), axis.name + ": all threads have the same pieces");
      define_axis(inner, axis);
    }
    for (const Block* block : {&s.body, &s.then})
      visit_all(*block, [&](const Stmt& stmt) {
        const bool plain = std::holds_alternative<Let>(stmt.node) || std::holds_alternative<Load>(stmt.node) ||
                           std::holds_alternative<Store>(stmt.node) || std::holds_alternative<Check>(stmt.node) ||
                           std::holds_alternative<If>(stmt.node);
        DEPLO_REQUIRE(plain, "in a scan over threads there are values, accesses, checks and `if` alone");
      });
    for (const auto& stmt : s.body) statement(*stmt, inner);
    return inner;
  }

  void statement(const Scan& s, Scope& scope) {
    DEPLO_REQUIRE(!s.axes.empty(), "a scan has no axis");
    const bool shared = std::any_of(s.axes.begin(), s.axes.end(), is_thread);
    DEPLO_REQUIRE(shared || (s.axes.size() == 1 && s.axes[0].kind == LoopKind::serial), s.axes[0].name + ": a scan is serial");
    Scope inner = shared ? shared_scan(s, scope) : reduced(s.axes, s.body, scope);
    combination(s.results, s.dtypes, s.combiner, s.operands, inner);
    for (size_t k = 0; k < s.results.size(); ++k) define(inner, s.results[k], s.dtypes[k]);
    block(s.then, std::move(inner));
  }

  void statement(const Alloc& s, Scope& scope) {
    bool symbolic = s.space == Space::scratch;
    for (const Expr& e : s.shape) {
      DEPLO_REQUIRE(symbolic || e.is_constant(),
                    fmt::format("the {} array {} needs a constant shape, found {}", to_string(s.space), s.name, print_shape(s.shape)));
      for (const std::string& symbol : symbols_of(e))
        DEPLO_REQUIRE(is_size(symbol), fmt::format("the shape of {} uses {}, which is not a size", s.name, symbol));
    }
    define_buffer(scope, s.name, {s.dtype, &s.shape, true});
    if (s.space == Space::reg) {
      DEPLO_REQUIRE(decide(less_equal(product(s.shape), kMaxRegisters), {}) == std::optional<bool>(true),
                    fmt::format("the register array {}{} has more than {} elements", s.name, print_shape(s.shape), kMaxRegisters));
      scope.registers.insert(s.name);
    }
    if (s.space == Space::shared) scope.shared.insert(s.name);
    if (s.space != Space::matrix) return;
    auto fits = [](Expr e) { return e.value() > 0 && e.value() % kMatrixSide == 0; };
    DEPLO_REQUIRE((s.dtype == DType::f32 || s.dtype == DType::i32) && s.shape.size() == 2 && fits(s.shape[0]) && fits(s.shape[1]),
                  fmt::format("the matrix array {} is {}{}, allowed is f32 or i32 of two multiples of {}", s.name, to_string(s.dtype),
                              print_shape(s.shape), kMatrixSide));
    for (const auto& [other, shape] : scope.matrices) fail(fmt::format("the matrix array {} lies inside the scope of {}", s.name, other));
    scope.matrices[s.name] = {s.dtype, s.shape};
  }

  void statement(const Barrier&, Scope& scope) { DEPLO_REQUIRE(!scope.lanes && !scope.reduces, "a barrier inside a lanes loop or a reduction"); }

  /// That `rows` x `columns` elements from there on, along the last two dimensions or those before `pairs`, lie in the buffer.
  void matrix_place(const Scope& scope, const Matrix::Place& p, DType dtype, Expr rows, Expr columns, bool pairs, bool written = false) {
    DEPLO_REQUIRE(!scope.matrices.count(p.buffer) && !scope.registers.count(p.buffer), fmt::format("{} does not lie in memory", p.buffer));
    const size_t ends = pairs ? 1 : 0;
    DEPLO_REQUIRE(p.index.size() >= 2 + ends, fmt::format("{} has too few dimensions for a matrix", p.buffer));
    std::vector<Expr> last = p.index;
    last[last.size() - 2 - ends] = last[last.size() - 2 - ends] + rows - 1;
    last[last.size() - 1 - ends] = last[last.size() - 1 - ends] + columns - 1;
    if (pairs) last.back() = last.back() + 1;
    for (const std::vector<Expr>& index : {p.index, last}) element(scope, p.buffer, index, dtype, written);
  }

  void statement(const Matrix& s, Scope& scope) {
    auto array = scope.matrices.find(s.array);
    DEPLO_REQUIRE(array != scope.matrices.end(), fmt::format("{} is no matrix array", s.array));
    DEPLO_REQUIRE(!scope.lanes, "a matrix statement inside a lanes loop");
    const auto& [dtype, shape] = array->second;
    if (s.kind == Matrix::Kind::load) matrix_place(scope, s.a, dtype, shape[0], shape[1], false);
    if (s.kind == Matrix::Kind::store) matrix_place(scope, s.a, dtype, shape[0], shape[1], false, true);
    if (s.kind != Matrix::Kind::multiply) return;
    DEPLO_REQUIRE(s.bytes.has_value() == (dtype == DType::i32),
                  fmt::format("the sums of {} are {}, those of words of bytes are i32", s.array, to_string(dtype)));
    if (s.bytes) {
      DEPLO_REQUIRE(is_byte(*s.bytes), fmt::format("words are of u8 or i8, not of {}", to_string(*s.bytes)));
      const DType of_a = access(scope, s.a.buffer, s.a.index).dtype;
      DEPLO_REQUIRE(is_byte(of_a), fmt::format("{} is {}, needed is u8 or i8", s.a.buffer, to_string(of_a)));
      matrix_place(scope, s.a, of_a, shape[0], kMatrixBytes, false);
      matrix_place(scope, s.b, DType::i32, kMatrixBytes / 4, shape[1], false);
      return;
    }
    matrix_place(scope, s.a, DType::bf16, shape[0], kMatrixDepth, false);
    matrix_place(scope, s.b, DType::bf16, kMatrixDepth / 2, shape[1], true);
  }

  void statement(const CopyAsync& s, Scope& scope) {
    DEPLO_REQUIRE(scope.shared.count(s.buffer) > 0 && !scope.shared.count(s.from),
                  fmt::format("copies go from global to shared memory, {} is none", s.buffer));
    const DType dtype = access(scope, s.buffer, s.index).dtype;
    DEPLO_REQUIRE(s.elements * size_of(dtype) == kCopyBytes,
                  fmt::format("{} elements of {} are not {} bytes", s.elements, to_string(dtype), kCopyBytes));
    DEPLO_REQUIRE(s.along >= 0 && s.along < static_cast<int64_t>(s.from_index.size()), fmt::format("{} has no dimension {}", s.from, s.along));
    for (int64_t past : {int64_t{0}, s.elements - 1}) {
      std::vector<Expr> index = s.index;
      index.back() = index.back() + past;
      element(scope, s.buffer, index, dtype, true);
    }
    guard(scope, s.guard, "a copy");
    expression(scope, s.count, "the count of a copy");
    Scope inner = scope;
    inner.points.add_guard(s.guard);
    define_axis(inner, {"%e", 0, min(s.elements, s.count), 1, LoopKind::serial, 1});
    element(inner, s.from, following(s, Expr::symbol("%e")), dtype, false);
  }

  /// The index of the element that lies `e` elements behind the first one that is copied: behind the end of a row the next one in memory begins.
  std::vector<Expr> following(const CopyAsync& s, Expr e) const {
    std::vector<Expr> index = s.from_index;
    auto d = static_cast<size_t>(s.along);
    const auto param = std::find_if(kernel_.params.begin(), kernel_.params.end(), [&](const Param& p) { return p.name == s.from; });
    if (param == kernel_.params.end() || param->shape.size() != index.size()) return index;
    index[d] = index[d] + e;
    for (size_t turn = 0; turn < index.size(); ++turn) {
      const Expr extent = param->shape[d];
      if (!extent.is_constant() || (turn == 0 && extent.value() % s.elements == 0)) break;
      size_t outer = 0;
      while (outer < index.size() && (outer == d || param->strides[outer] != extent * param->strides[d] || param->shape[outer].is(1))) ++outer;
      if (outer == index.size()) break;
      index[outer] = index[outer] + floordiv(index[d], extent);
      index[d] = mod(index[d], extent);
      d = outer;
    }
    return index;
  }

  void statement(const CopyGroup& s, Scope&) { DEPLO_REQUIRE(s.pending >= CopyGroup::kCommit, "a number of groups is negative"); }

  void statement(const LoadMatrix& s, Scope& scope) {
    DEPLO_REQUIRE(scope.shared.count(s.buffer) > 0, fmt::format("{} is no shared array", s.buffer));
    DEPLO_REQUIRE(is_matrix_dtype(s.dtype), fmt::format("{} is {}, a matrix is of bf16, f16, f32 or bytes", s.name, to_string(s.dtype)));
    DEPLO_REQUIRE(!s.transposed || size_of(s.dtype) == 2, s.name + " is a matrix of bytes or f32, which are not transposed");
    DEPLO_REQUIRE(!scope.lanes && !scope.reduces, "a warp's matrices inside a lanes loop or a reduction");
    for (int64_t past : {int64_t{0}, kWarpRowBytes / size_of(s.dtype) - 1}) {
      std::vector<Expr> index = s.index;
      DEPLO_REQUIRE(!index.empty(), s.buffer + " has no rows");
      index.back() = index.back() + past;
      element(scope, s.buffer, index, s.dtype, false);
    }
    define(scope, s.name, s.dtype);
    scope.fragments[s.name] = s.count;
  }

  void statement(const JoinMatrix& s, Scope& scope) {
    DEPLO_REQUIRE(is_matrix_dtype(s.dtype) && is_float(s.dtype),
                  fmt::format("{} is {}, a matrix is of bf16, f16 or f32", s.name, to_string(s.dtype)));
    DEPLO_REQUIRE(!scope.lanes && !scope.reduces, "a warp's matrices inside a lanes loop or a reduction");
    DEPLO_REQUIRE(scope.registers.count(s.array) > 0, fmt::format("{} is no register array", s.array));
    DEPLO_REQUIRE(s.places.size() == 1 || s.places.size() == 2 || s.places.size() == 4, s.name + " is not made of 1, 2 or 4 matrices");
    for (const std::vector<Expr>& place : s.places) {
      const DType dtype = access(scope, s.array, place).dtype;
      DEPLO_REQUIRE(dtype == DType::f32 || dtype == s.dtype,
                    fmt::format("{} is made of {}, a matrix of {} is of f32 or of such", s.name, to_string(dtype), to_string(s.dtype)));
      element(scope, s.array, place, dtype, false);
      register_index(scope, s.array, place);
      DEPLO_REQUIRE(!place.empty() && place.back().is_constant() && place.back().value() % lanes_of_matrix(s.dtype) == 0,
                    "numbers lie in pairs of the last dimension");
    }
    define(scope, s.name, s.dtype);
    scope.fragments[s.name] = static_cast<int>(s.places.size());
  }

  void statement(const Mma& s, Scope& scope) {
    DEPLO_REQUIRE(!scope.lanes && !scope.reduces, "a warp's matrices inside a lanes loop or a reduction");
    DEPLO_REQUIRE(scope.registers.count(s.array) > 0, fmt::format("{} is no register array", s.array));
    auto a = scope.fragments.find(s.a);
    auto b = scope.fragments.find(s.b);
    DEPLO_REQUIRE(a != scope.fragments.end() && b != scope.fragments.end(), fmt::format("{} or {} is no matrix", s.a, s.b));
    for (const std::vector<Expr>* index : {&s.low, &s.high}) {
      element(scope, s.array, *index, size_of(value(scope, s.a)) == 1 ? DType::i32 : DType::f32, true);
      register_index(scope, s.array, *index);
      DEPLO_REQUIRE(!index->empty() && index->back().is_constant() && index->back().value() % 2 == 0, "sums lie in pairs of the last dimension");
    }
    DEPLO_REQUIRE(a->second == 4, s.a + " is no matrix of 16 rows");
    DEPLO_REQUIRE(s.half >= 0 && b->second >= 2 * (s.half + 1), fmt::format("{} has no half {}", s.b, s.half));
    const DType of_a = value(scope, s.a);
    const DType of_b = value(scope, s.b);
    DEPLO_REQUIRE(of_a == of_b || (size_of(of_a) == 1 && size_of(of_b) == 1), fmt::format("{} and {} differ in dtype", s.a, s.b));
  }

  void statement(const MultiplyTiles& s, Scope& scope) {
    const TileProducts& p = s.products;
    DEPLO_REQUIRE(!scope.lanes && !scope.reduces, "products of tiles inside a lanes loop or a reduction");
    DEPLO_REQUIRE(scope.registers.count(s.array) > 0, fmt::format("{} is no register array", s.array));
    const std::string problem = problem_of(p);
    DEPLO_REQUIRE(problem.empty(), "products of tiles: " + problem);
    element(scope, s.array, {1, p.b.rows / 8 - 1, 1}, DType::f32, true);
    for_each_expr(p, [&](Expr e) { expression(scope, e, "products of tiles"); });
    for (const TileFactor* f : {&p.a, &p.b}) {
      DEPLO_REQUIRE(scope.shared.count(f->tiles) > 0, f->tiles + " is no shared array");
      const DType dtype = access(scope, f->tiles, {0}).dtype;
      DEPLO_REQUIRE(size_of(dtype) == 2 && is_float(dtype), fmt::format("{} is {}, tiles are of bf16 or f16", f->tiles, to_string(dtype)));
      element(scope, f->tiles, {p.stages * f->elements() - 1}, dtype, true);
      const auto* param =
          std::find_if(kernel_.params.data(), kernel_.params.data() + kernel_.params.size(), [&](const Param& x) { return x.name == f->buffer; });
      DEPLO_REQUIRE(param != kernel_.params.data() + kernel_.params.size() && param->kind == ParamKind::in && param->dtype == dtype,
                    fmt::format("{} is no input of {}", f->buffer, to_string(dtype)));
    }
    DEPLO_REQUIRE(scope.shared.count(p.flags) > 0, p.flags + " is no shared array");
    element(scope, p.flags, {2 * p.stages - 1}, DType::i64, true);
  }

  void statement(const MultiplyGroup& s, Scope& scope) {
    const GroupProducts& p = s.products;
    DEPLO_REQUIRE(!scope.lanes && !scope.reduces, "products of groups inside a lanes loop or a reduction");
    DEPLO_REQUIRE(scope.registers.count(s.array) > 0, fmt::format("{} is no register array", s.array));
    const std::string problem = problem_of(p);
    DEPLO_REQUIRE(problem.empty(), "products of groups: " + problem);
    const DType dtype = access(scope, p.b.tile, {0}).dtype;
    const int64_t bytes = size_of(dtype);
    DEPLO_REQUIRE(is_matrix_dtype(dtype), fmt::format("{} is {}, tiles are of bf16, f16 or bytes", p.b.tile, to_string(dtype)));
    const std::vector<Expr> last{s.unit, 1, p.columns / (4 * p.lanes) - 1, p.lanes - 1};
    element(scope, s.array, last, bytes == 1 ? DType::i32 : DType::f32, true);
    register_index(scope, s.array, last);
    if (p.depth == 0) return;
    DEPLO_REQUIRE(bytes == 2 || (p.depth % (2 * kGroupDepth) == 0 && !p.a.turned && !p.b.turned && p.matrices.empty()),
                  "products of bytes take lines of k in shared memory, 32 at a time");
    const int64_t length = 2 * kGroupLine / bytes;  // of a line: what begins within one stays there
    const auto factor = [&](const GroupFactor& f, int64_t rows) {
      DEPLO_REQUIRE(scope.shared.count(f.tile) > 0, f.tile + " is no shared array");
      expression(scope, f.at, "products of groups");
      for (int64_t row : {int64_t{0}, rows - 1})
        for (int64_t k : {int64_t{0}, p.depth - 1})
          element(scope, f.tile, {f.at + f.place(0, row, k, bytes) / length * length}, access(scope, f.tile, {0}).dtype, false);
      const DType own = access(scope, f.tile, {0}).dtype;
      DEPLO_REQUIRE(own == dtype || (bytes == 1 && size_of(own) == 1), fmt::format("{} and {} differ in dtype", p.a.tile, p.b.tile));
    };
    factor(p.b, p.columns);
    if (p.matrices.empty()) return factor(p.a, kGroupRows);
    for (const std::string& name : p.matrices) {
      auto matrix = scope.fragments.find(name);
      DEPLO_REQUIRE(matrix != scope.fragments.end() && matrix->second == 4 && value(scope, name) == dtype,
                    fmt::format("{} is no matrix of 16 rows of {}", name, to_string(dtype)));
    }
  }

  // A hint: it may name a place beyond the end.
  void statement(const Prefetch& s, Scope& scope) {
    access(scope, s.buffer, s.index);
    DEPLO_REQUIRE(!scope.matrices.count(s.buffer), fmt::format("{} is a matrix array, which `matrix` statements alone take", s.buffer));
    DEPLO_REQUIRE(s.level >= 1 && s.level <= 3, fmt::format("prefetch to level {}", s.level));
  }

  const Kernel& kernel_;
};

}  // namespace

void verify(const Kernel& kernel) {
  located(kernel.location, [&] { Verifier(kernel).run(); });
}

void verify(const Module& module) { verify_module(module); }

}  // namespace deplo::tile_ir
