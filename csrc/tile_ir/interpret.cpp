#include "tile_ir/interpret.h"

#include <algorithm>
#include <limits>
#include <set>

#include "base/error.h"
#include "expr/named.h"
#include "loop_ir/text.h"
#include "scalar/bytes.h"
#include "scalar/combine.h"
#include "scalar/warp.h"
#include "tile_ir/rewrite.h"

namespace deplo::tile_ir {
namespace {

/// What one thread sees. A thread loop that contains a barrier runs as many of these, copied from the one that reaches it.
struct Thread {
  explicit Thread(NameNumbers& names) : integers(names), values(names), buffers(names), fragments(names) {}

  NamedIntegers integers;  ///< symbols, axes and i64 values
  Named<Scalar> values;
  Named<std::shared_ptr<Array>> buffers;
  Named<std::vector<Scalar>> fragments;  ///< its part of a warp's matrices
  PendingCopies copies;
};

struct Machine {
  const Kernel& kernel;
  Mode mode;
  std::set<const Stmt*> joint;  ///< statements that contain a barrier
  std::set<std::string> thread_loops{};
  mutable std::vector<int64_t> coordinates{};  ///< of the access at hand
  bool division_error = false;
  ErrorCode error = ErrorCode::none;

  // ---- one thread --------------------------------------------------------------------------------------------------

  static void define(Thread& t, const std::string& name, const Scalar& value) {
    t.values[name] = value;
    if (value.dtype == DType::i64) t.integers[name] = value.i;
  }

  static bool holds(const Thread& t, const std::vector<Cond>& guard) {
    for (const Cond& cond : guard)
      if (!evaluate(cond, t.integers)) return false;
    return true;
  }

  int64_t place(const Thread& t, const std::string& buffer, const std::vector<Expr>& index) const {
    coordinates.clear();
    for (const Expr& e : index) coordinates.push_back(evaluate(e, t.integers));
    const Array& array = *t.buffers.at(buffer);
    try {
      return array.flat_index(coordinates);
    } catch (const InternalError& e) {
      throw InternalError(fmt::format("tile @{}: access of {}: {}", kernel.name, buffer, e.what()));
    }
  }

  void run(const Block& block, Thread& t) {
    for (const auto& stmt : block) {
      if (joint.count(stmt.get())) {
        std::vector<Thread*> alone{&t};
        run_jointly(*stmt, alone);
      } else {
        std::visit([&](const auto& s) { run(s, t); }, stmt->node);
      }
    }
  }

  void run(const Let& s, Thread& t) {
    if (s.fn == Fn::constant) return define(t, s.name, s.literal);
    if (s.fn == Fn::index) {
      int64_t value = evaluate(s.index, t.integers);
      return define(t, s.name, is_float(s.dtype) ? Scalar::of_float(s.dtype, static_cast<double>(value)) : Scalar::of_int(s.dtype, value));
    }
    Scalar operands[kMostOperands];
    for (size_t k = 0; k < s.operands.size(); ++k) operands[k] = t.values.at(s.operands[k]);
    define(t, s.name, apply(s.fn, s.dtype, operands, mode, &division_error));
  }

  void run(const Load& s, Thread& t) { define(t, s.name, holds(t, s.guard) ? t.buffers.at(s.buffer)->get(place(t, s.buffer, s.index)) : s.fill); }

  void run(const Store& s, Thread& t) {
    if (!holds(t, s.guard)) return;
    Array& array = *t.buffers.at(s.buffer);
    int64_t at = place(t, s.buffer, s.index);
    const Scalar& value = t.values.at(s.value);
    array.set(at, s.combiner == Combiner::set ? value : combine(s.combiner, array.get(at), value, mode));
  }

  template <class F>
  void for_axis(const Axis& axis, Thread& t, const F& f) {
    int64_t hi = evaluate(axis.hi, t.integers);
    for (int64_t i = evaluate(axis.lo, t.integers); i < hi; i += axis.step) {
      t.integers[axis.name] = i;
      f();
    }
  }

  void run(const For& s, Thread& t) {
    for_axis(s.axis, t, [&] { run(s.body, t); });
  }

  void run(const If& s, Thread& t) {
    if (holds(t, s.guard)) run(s.body, t);
  }

  static std::vector<Scalar> operands(const std::vector<std::string>& names, const Thread& t) {
    std::vector<Scalar> result;
    for (const std::string& name : names) result.push_back(t.values.at(name));
    return result;
  }

  void reduce(const Reduce& s, size_t at, Accumulator& accumulator, Thread& t) {
    if (at == s.axes.size()) {
      run(s.body, t);
      accumulator.add(operands(s.operands, t));
      return;
    }
    for_axis(s.axes[at], t, [&] { reduce(s, at + 1, accumulator, t); });
  }

  /// Where a reduction's axes begin that are no threads.
  static size_t own_axes(const Reduce& s) {
    return static_cast<size_t>(std::find_if(s.axes.begin(), s.axes.end(), [](const Axis& axis) { return !is_thread(axis); }) - s.axes.begin());
  }

  /// Those that differ in thread loops among the axes alone, in their order.
  std::vector<std::vector<Thread*>> groups_of(const std::vector<Axis>& axes, const std::vector<Thread*>& threads) const {
    std::map<std::vector<int64_t>, std::vector<Thread*>> groups;
    for (Thread* t : threads) {
      std::vector<int64_t> place;
      for (const std::string& loop : thread_loops) {
        const bool combined = std::any_of(axes.begin(), axes.end(), [&](const Axis& axis) { return is_thread(axis) && axis.name == loop; });
        if (!combined && t->integers.holds(loop)) place.push_back(t->integers.at(loop));
      }
      groups[place].push_back(t);
    }
    std::vector<std::vector<Thread*>> out;
    for (auto& [place, group] : groups) out.push_back(std::move(group));
    return out;
  }

  /// One result for all threads that differ in the reduced thread loops alone.
  void run_jointly(const Reduce& s, const std::vector<Thread*>& threads) {
    for (const std::vector<Thread*>& group : groups_of(s.axes, threads)) {
      Accumulator accumulator(s.combiner, s.dtypes[0], mode);
      for (Thread* t : group) reduce(s, own_axes(s), accumulator, *t);
      for (Thread* t : group) define_results(s, accumulator, *t);
    }
  }

  void run_jointly(const Scan& s, const std::vector<Thread*>& threads) {
    for (const std::vector<Thread*>& group : groups_of(s.axes, threads)) {
      Accumulator accumulator(s.combiner, s.dtypes[0], mode);
      scan(s, 0, accumulator, group);
    }
  }

  /// The elements of the axes from `at` on, which the threads have, one of them where the thread loop lies outside.
  void scan(const Scan& s, size_t at, Accumulator& accumulator, const std::vector<Thread*>& threads) {
    if (at == s.axes.size()) {
      Thread& t = *threads[0];
      run(s.body, t);
      accumulator.add(operands(s.operands, t));
      define_results(s, accumulator, t);
      return run(s.then, t);
    }
    const Axis& axis = s.axes[at];
    if (is_thread(axis)) {
      for (Thread* t : threads) scan(s, at + 1, accumulator, {t});
      return;
    }
    const int64_t lo = evaluate(axis.lo, threads[0]->integers);
    const int64_t hi = evaluate(axis.hi, threads[0]->integers);
    for (Thread* t : threads)
      DEPLO_ASSERT(evaluate(axis.lo, t->integers) == lo && evaluate(axis.hi, t->integers) == hi,
                   "tile @{}: threads scan together, whose pieces {} differ", kernel.name, axis.name);
    for (int64_t i = lo; i < hi; i += axis.step) {
      for (Thread* t : threads) t->integers[axis.name] = i;
      scan(s, at + 1, accumulator, threads);
    }
  }

  template <class Combination>
  static void define_results(const Combination& s, const Accumulator& accumulator, Thread& t) {
    auto results = accumulator.results(s.dtypes);
    for (size_t k = 0; k < s.results.size(); ++k) define(t, s.results[k], results[k]);
  }

  void run(const Reduce& s, Thread& t) {
    Accumulator accumulator(s.combiner, s.dtypes[0], mode);
    reduce(s, own_axes(s), accumulator, t);
    define_results(s, accumulator, t);
  }

  void run(const Scan& s, Thread& t) {
    Accumulator accumulator(s.combiner, s.dtypes[0], mode);
    scan(s, 0, accumulator, {&t});
  }

  void run(const Alloc& s, Thread& t) {
    auto array = std::make_shared<Array>(Array::zeros(s.dtype, evaluate_shape(s.shape, t.integers)));
    // Undefined contents: NaN, or an improbable integer, shows a read before the write.
    for (double& x : array->floats) x = std::numeric_limits<double>::quiet_NaN();
    if (s.dtype != DType::boolean)
      for (int64_t& x : array->ints) x = Scalar::of_int(s.dtype, -0x5a5a5a5a5a5a5a5b).i;
    t.buffers[s.name] = std::move(array);
  }

  void run(const Check& s, Thread& t) {
    if (error == ErrorCode::none && !evaluate(s.cond, t.integers)) error = s.code;
  }

  void run(const Barrier& /*s*/, Thread& /*t*/) {}

  void run(const Matrix& s, Thread& t) {
    Array& sums = *t.buffers.at(s.array);
    const int64_t rows = sums.shape[0];
    const int64_t columns = sums.shape[1];
    /// The element `row` rows and `column` columns on from a place, in dimensions `last` and the one before it, counted from the end.
    auto element = [&](const Matrix::Place& p, int64_t row, int64_t column, size_t last, int64_t half) {
      std::vector<Expr> index = p.index;
      index[index.size() - 1 - last] = index[index.size() - 1 - last] + column;
      index[index.size() - 2 - last] = index[index.size() - 2 - last] + row;
      if (last > 0) index.back() = index.back() + half;
      return place(t, p.buffer, index);
    };
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t at = i * columns + j;
        if (s.kind == Matrix::Kind::zero) sums.set(at, Scalar::of_float(sums.dtype, 0));
        if (s.kind == Matrix::Kind::load) sums.set(at, t.buffers.at(s.a.buffer)->get(element(s.a, i, j, 0, 0)));
        if (s.kind == Matrix::Kind::store) t.buffers.at(s.a.buffer)->set(element(s.a, i, j, 0, 0), sums.get(at));
        if (s.kind != Matrix::Kind::multiply) continue;
        const Array& a = *t.buffers.at(s.a.buffer);
        const Array& b = *t.buffers.at(s.b.buffer);
        Scalar sum = sums.get(at);
        for (int64_t p = 0; s.bytes && p < kMatrixBytes; ++p) {
          const int64_t word = b.get(element(s.b, p / 4, j, 0, 0)).i;
          sum = Scalar::of_int(DType::i32, sum.i + a.get(element(s.a, i, p, 0, 0)).i * byte_of_word(word, p % 4, *s.bytes));
        }
        for (int64_t p = 0; !s.bytes && p < kMatrixDepth / 2; ++p) {
          Scalar operands[] = {a.get(element(s.a, i, 2 * p, 0, 0)), a.get(element(s.a, i, 2 * p + 1, 0, 0)), b.get(element(s.b, p, j, 1, 0)),
                               b.get(element(s.b, p, j, 1, 1)), sum};
          sum = apply(Fn::dot2, DType::f32, operands, mode, &division_error);
        }
        sums.set(at, sum);
      }
  }

  /// Of the element that lies `e` elements behind the first one in memory: behind the end of a row the next one begins.
  int64_t following_place(const Thread& t, const CopyAsync& s, int64_t e) const {
    const auto param = std::find_if(kernel.params.begin(), kernel.params.end(), [&](const auto& p) { return p.name == s.from; });
    std::vector<Expr> index = s.from_index;
    auto d = static_cast<size_t>(s.along);
    int64_t more = e;
    while (more > 0) {
      const int64_t at = evaluate(index[d], t.integers) + more;
      const int64_t extent = t.buffers.at(s.from)->shape[d];
      index[d] = at;
      more = 0;
      if (at < extent || param == kernel.params.end()) break;
      const int64_t row = extent * evaluate(param->strides[d], t.integers);
      size_t outer = 0;
      const auto is_next = [&](size_t other) {
        return other != d && t.buffers.at(s.from)->shape[other] > 1 && evaluate(param->strides[other], t.integers) == row;
      };
      while (outer < index.size() && !is_next(outer)) ++outer;
      if (outer == index.size()) break;
      index[d] = at % extent;
      more = at / extent;
      d = outer;
    }
    return place(t, s.from, index);
  }

  void run(const CopyAsync& s, Thread& t) {
    PendingCopies::Copy copy{t.buffers.at(s.buffer), t.buffers.at(s.from), place(t, s.buffer, s.index), {}, s.elements};
    const int64_t count = holds(t, s.guard) ? std::min<int64_t>(evaluate(s.count, t.integers), s.elements) : 0;
    for (int64_t e = 0; e < count; ++e) copy.places.push_back(following_place(t, s, e));
    t.copies.add(std::move(copy));
  }

  void run(const CopyGroup& s, Thread& t) {
    if (s.pending == CopyGroup::kCommit) return t.copies.commit();
    t.copies.wait(static_cast<size_t>(s.pending));
  }

  void run(const LoadMatrix& s, Thread& t) { run_jointly(s, {&t}); }
  void run(const Mma& s, Thread& t) { run_jointly(s, {&t}); }
  void run(const MultiplyTiles& s, Thread& t) {
    const TileProducts& p = s.products;
    Array& sums = *t.buffers.at(s.array);
    for (int64_t which = 0; which < p.b.rows / 2; ++which) {
      const int64_t at = (which / 2 % 2 * (p.b.rows / 8) + which / 4) * 2 + which % 2;
      const double more =
          tile_product(p, t.integers, which, [&](const TileFactor& f, int64_t place) { return t.buffers.at(f.buffer)->get(place).f; });
      const double sum = sums.get(at).f + more;
      sums.set(at, mode == Mode::typed ? Scalar::of_float(DType::f32, sum) : Scalar{DType::f32, sum, 0});
    }
  }
  void run(const MultiplyGroup& s, Thread& t) { run_jointly(s, {&t}); }
  void run(const JoinMatrix& s, Thread& t) {
    std::vector<Scalar> lanes;
    for (const std::vector<Expr>& index : s.places)
      for (int64_t e = 0; e < lanes_of_matrix(s.dtype); ++e) {
        Scalar wide[] = {t.buffers.at(s.array)->get(place(t, s.array, index) + e)};
        lanes.push_back(as_factor(apply(Fn::cast, s.dtype, wide, mode, &division_error)));
      }
    t.fragments[s.name] = std::move(lanes);
  }

  /// f(threads) for each warp.
  template <class F>
  void for_warps(const std::vector<Thread*>& threads, const F& f) const {
    DEPLO_ASSERT(threads.size() % kWarpThreads == 0, "tile @{}: matrices of warps, of which {} threads are no whole number", kernel.name,
                 threads.size());
    for (auto at = threads.begin(); at != threads.end(); at += kWarpThreads) f(std::vector<Thread*>(at, at + kWarpThreads));
  }

  void run_jointly(const LoadMatrix& s, const std::vector<Thread*>& threads) const {
    for_warps(threads, [&](const std::vector<Thread*>& warp) {
      std::vector<int64_t> rows;
      for (Thread* t : warp) rows.push_back(place(*t, s.buffer, s.index));
      auto loaded = load_matrices(s.count, s.dtype, s.transposed, [&](size_t thread, size_t column) {
        return warp[thread]->buffers.at(s.buffer)->get(rows[thread] + static_cast<int64_t>(column));
      });
      for (size_t k = 0; k < kWarpThreads; ++k) warp[k]->fragments[s.name] = std::move(loaded[k]);
    });
  }

  void run_jointly(const Mma& s, const std::vector<Thread*>& threads) const {
    for_warps(threads, [&](const std::vector<Thread*>& warp) {
      std::vector<std::vector<Scalar>> a;
      std::vector<std::vector<Scalar>> b;
      std::vector<std::vector<Scalar>> sums;
      std::vector<std::vector<int64_t>> places;
      for (Thread* t : warp) {
        a.push_back(t->fragments.at(s.a));
        const std::vector<Scalar>& both = t->fragments.at(s.b);
        const auto lanes = static_cast<std::ptrdiff_t>(a.back().size() / 2);
        b.emplace_back(both.begin() + s.half * lanes, both.begin() + (s.half + 1) * lanes);
        const int64_t low = place(*t, s.array, s.low);
        const int64_t high = place(*t, s.array, s.high);
        places.push_back({low, low + 1, high, high + 1});
        sums.emplace_back();
        for (int64_t at : places.back()) sums.back().push_back(t->buffers.at(s.array)->get(at));
      }
      multiply_matrices(a, b, sums, mode);
      for (size_t k = 0; k < kWarpThreads; ++k)
        for (size_t e = 0; e < 4; ++e) warp[k]->buffers.at(s.array)->set(places[k][e], sums[k][e]);
    });
  }

  void run_jointly(const MultiplyGroup& s, const std::vector<Thread*>& threads) const {
    const GroupProducts& p = s.products;
    DEPLO_ASSERT(threads.size() % kGroupThreads == 0, "tile @{}: products of groups of {}, of which {} threads are no whole number", kernel.name,
                 kGroupThreads, threads.size());
    if (p.depth == 0) return;
    for (size_t first = 0; first < threads.size(); first += kGroupThreads) {
      Thread* const* group = &threads[first];
      const auto factor = [&](const GroupFactor& f) {
        return [&f, array = group[0]->buffers.at(f.tile), from = place(*group[0], f.tile, {f.at})](int64_t row, int64_t k) {
          const Scalar element = array->get(f.place(from, row, k, size_of(array->dtype)));
          return is_float(element.dtype) ? element.f : static_cast<double>(element.i);
        };
      };
      const auto add = [&](int64_t thread, int64_t h, int64_t g, int64_t c, double more) {
        Array& sums = *group[thread]->buffers.at(s.array);
        const int64_t at = place(*group[thread], s.array, {s.unit, h, g / (p.lanes / 2), g % (p.lanes / 2) * 2 + c});
        sums.set(at, sum_of_products(sums.get(at), more, mode));
      };
      if (p.matrices.empty()) {
        multiply_group(p, factor(p.a), factor(p.b), add);
        continue;
      }
      const auto matrix = [&](int64_t row, int64_t k) {
        const auto& lanes = group[matrix_thread(row, k)]->fragments.at(p.matrices[static_cast<size_t>(k / kGroupDepth)]);
        return lanes[static_cast<size_t>(matrix_element(row, k))].f;
      };
      multiply_group(p, matrix, factor(p.b), add);
    }
  }

  // Prefetching outside a buffer is allowed.
  void run(const Prefetch& /*s*/, Thread& /*t*/) {}

  // ---- the threads of a block in step ------------------------------------------------------------------------------

  void run_jointly(const Block& block, const std::vector<Thread*>& threads) {
    for (const auto& stmt : block) {
      const auto* alloc = std::get_if<Alloc>(&stmt->node);
      if (joint.count(stmt.get())) {
        run_jointly(*stmt, threads);
      } else if (alloc && (alloc->space == Space::shared || alloc->space == Space::scratch) && !threads.empty()) {
        run(*alloc, *threads[0]);
        for (Thread* t : threads) t->buffers[alloc->name] = threads[0]->buffers[alloc->name];
      } else {
        for (Thread* t : threads) std::visit([&](const auto& s) { run(s, *t); }, stmt->node);
      }
    }
  }

  void run_jointly(const Stmt& stmt, const std::vector<Thread*>& threads) {
    if (threads.empty() || std::holds_alternative<Barrier>(stmt.node)) return;
    if (const auto* combined = std::get_if<Reduce>(&stmt.node)) return run_jointly(*combined, threads);
    if (const auto* running = std::get_if<Scan>(&stmt.node)) return run_jointly(*running, threads);
    if (const auto* load = std::get_if<LoadMatrix>(&stmt.node)) return run_jointly(*load, threads);
    if (const auto* product = std::get_if<Mma>(&stmt.node)) return run_jointly(*product, threads);
    if (const auto* product = std::get_if<MultiplyGroup>(&stmt.node)) return run_jointly(*product, threads);
    if (const auto* branch = std::get_if<If>(&stmt.node)) {
      bool taken = holds(*threads[0], branch->guard);
      for (Thread* t : threads)
        DEPLO_ASSERT(holds(*t, branch->guard) == taken, "tile @{}: a barrier under `if {}`, where threads disagree", kernel.name,
                     print(branch->guard));
      if (taken) run_jointly(branch->body, threads);
      return;
    }
    const auto& loop = std::get<For>(stmt.node);
    const Axis& axis = loop.axis;
    if (axis.kind == LoopKind::thread_x || axis.kind == LoopKind::thread_y) return run_threads(loop, threads);
    int64_t lo = evaluate(axis.lo, threads[0]->integers);
    int64_t hi = evaluate(axis.hi, threads[0]->integers);
    for (Thread* t : threads)
      DEPLO_ASSERT(evaluate(axis.lo, t->integers) == lo && evaluate(axis.hi, t->integers) == hi,
                   "tile @{}: a barrier in the loop {}, whose bounds differ between threads", kernel.name, axis.name);
    for (int64_t i = lo; i < hi; i += axis.step) {
      for (Thread* t : threads) t->integers[axis.name] = i;
      run_jointly(loop.body, threads);
    }
  }

  void run_threads(const For& loop, const std::vector<Thread*>& threads) {
    std::vector<std::unique_ptr<Thread>> copies;
    for (Thread* t : threads) for_axis(loop.axis, *t, [&] { copies.push_back(std::make_unique<Thread>(*t)); });
    std::vector<Thread*> inner;
    for (const auto& copy : copies) inner.push_back(copy.get());
    run_jointly(loop.body, inner);
  }
};

bool find_barriers(const Block& block, std::set<const Stmt*>& joint) {
  bool found = false;
  for (const auto& stmt : block) {
    bool inside = std::visit(Overloaded{[](const Barrier&) { return true; }, [](const Reduce& s) { return is_thread(s.axes[0]); },
                                        [](const Scan& s) { return std::any_of(s.axes.begin(), s.axes.end(), is_thread); },
                                        [](const LoadMatrix&) { return true; }, [](const Mma&) { return true; },
                                        [](const MultiplyGroup&) { return true; }, [&](const For& s) { return find_barriers(s.body, joint); },
                                        [&](const If& s) { return find_barriers(s.body, joint); }, [](const auto&) { return false; }},
                             stmt->node);
    if (inside) joint.insert(stmt.get());
    found = found || inside;
  }
  return found;
}

}  // namespace

void interpret(const Kernel& kernel, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& symbols, Mode mode) {
  DEPLO_ASSERT(arguments.size() == kernel.params.size(), "tile @{} takes {} arguments, got {}", kernel.name, kernel.params.size(), arguments.size());
  Machine machine{kernel, mode, {}};
  find_barriers(kernel.body, machine.joint);
  visit_all(kernel.body, [&](const Stmt& stmt) {
    if (const auto* loop = std::get_if<For>(&stmt.node); loop && is_thread(loop->axis)) machine.thread_loops.insert(loop->axis.name);
  });
  NameNumbers names;
  Thread thread(names);
  for (const auto& [name, value] : symbols) thread.integers[name] = value;
  for (size_t i = 0; i < arguments.size(); ++i)
    thread.buffers[kernel.params[i].name] = std::shared_ptr<Array>(arguments[i], [](Array*) {});  // the caller's
  machine.run(kernel.body, thread);
  if (machine.division_error && machine.error == ErrorCode::none) machine.error = ErrorCode::division_by_zero;
  if (machine.error == ErrorCode::index_out_of_range) throw IndexError(fmt::format("tile @{}: index out of range", kernel.name));
  DEPLO_CHECK(machine.error == ErrorCode::none, "tile @{}: {}", kernel.name, loop_ir::to_string(machine.error));
}

std::vector<Array> interpret(const Module& module, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library) {
  auto find_params = [&](const std::string& name) -> std::optional<std::vector<ParamType>> {
    std::vector<ParamType> params;
    for (const Param& p : module.find_kernel(name)->params) params.push_back({p.dtype, p.kind != ParamKind::in});
    return params;
  };
  auto call = [&](const CallStep& step, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& sizes) {
    interpret(*module.find_kernel(step.kernel), arguments, sizes, mode);
  };
  return deplo::interpret(module, find_params, inputs, symbols, call, mode, library);
}

}  // namespace deplo::tile_ir
