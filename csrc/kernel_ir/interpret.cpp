#include "kernel_ir/interpret.h"

#include <limits>
#include <set>

#include "base/error.h"
#include "expr/named.h"
#include "loop_ir/text.h"
#include "scalar/bytes.h"
#include "scalar/combine.h"
#include "scalar/warp.h"

namespace deplo::kernel_ir {
namespace {

using loop_ir::ErrorCode;
using Lanes = std::vector<Scalar>;

/// An array and, if it lies in scratch memory, which bytes of it.
struct Memory {
  std::shared_ptr<Array> array;
  int64_t begin = 0;
  int64_t end = 0;
};

/// What one thread sees.
struct Thread {
  explicit Thread(NameNumbers& names) : integers(names), values(names), buffers(names) {}

  NamedIntegers integers;  ///< symbols, indices and scalar integers
  Named<Lanes> values;
  Named<Memory> buffers;
  std::map<int, std::vector<Lanes>> matrices;  ///< registers of a matrix unit by row
  PendingCopies copies;
};

struct Machine {
  const Kernel& kernel;
  Mode mode;
  std::set<const Stmt*> joint;  ///< statements that contain a barrier
  int64_t scratch_bytes = 0;
  bool division_error = false;
  ErrorCode error = ErrorCode::none;

  // ---- values and places -------------------------------------------------------------------------------------------

  static void define(Thread& t, const std::string& name, Lanes lanes) {
    if (lanes.size() == 1 && !is_float(lanes[0].dtype)) t.integers[name] = lanes[0].i;
    t.values[name] = std::move(lanes);
  }

  /// The name may be gone soon.
  static void define_text(Thread& t, const std::string& name, int64_t value) {
    t.integers.set_text(name, value);
    t.values.set_text(name, {Scalar::of_int(DType::i64, value)});
  }

  static Scalar integer(DType dtype, int64_t value) {
    return is_float(dtype) ? Scalar::of_float(dtype, static_cast<double>(value)) : Scalar::of_int(dtype, value);
  }

  static bool holds(const Thread& t, const If& s) {
    if (s.guard.empty()) return t.values.at(s.condition)[0].i != 0;
    for (const Cond& cond : s.guard)
      if (!evaluate(cond, t.integers)) return false;
    return true;
  }

  /// Per-lane offsets of an access; nothing for lanes that its mask switches off.
  template <class Access>
  std::vector<std::optional<int64_t>> places(const Thread& t, const Access& s, size_t lanes) const {
    int64_t offset = evaluate(s.offset, t.integers);
    int64_t stride = evaluate(s.stride, t.integers);
    const Array& array = *t.buffers.at(s.buffer).array;
    std::vector<std::optional<int64_t>> result(lanes);
    for (size_t lane = 0; lane < lanes; ++lane) {
      if (!s.mask.empty() && t.values.at(s.mask)[lane].i == 0) continue;
      int64_t at = offset + (s.gather.empty() ? static_cast<int64_t>(lane) * stride : t.values.at(s.gather)[lane].i);
      DEPLO_ASSERT(at >= 0 && at < array.count(), "kernel @{}: lane {} accesses element {} of {}, which has {}", kernel.name, lane, at, s.buffer,
                   array.count());
      result[lane] = at;
    }
    return result;
  }

  // ---- one thread --------------------------------------------------------------------------------------------------

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
    auto count = static_cast<size_t>(s.type.lanes);
    if (s.fn == Fn::constant) return define(t, s.name, Lanes(count, s.literal));
    Lanes result;
    if (s.fn == Fn::index) {
      int64_t first = evaluate(s.index, t.integers);
      int64_t step = evaluate(s.lane_step, t.integers);
      for (int64_t lane = 0; lane < s.type.lanes; ++lane) result.push_back(integer(s.type.dtype, first + lane * step));
      return define(t, s.name, std::move(result));
    }
    for (size_t lane = 0; lane < count; ++lane) {
      Scalar operands[kMostOperands];
      for (size_t k = 0; k < s.operands.size(); ++k) operands[k] = t.values.at(s.operands[k])[lane];
      result.push_back(apply(s.fn, s.type.dtype, operands, mode, &division_error));
    }
    define(t, s.name, std::move(result));
  }

  void run(const Splat& s, Thread& t) { define(t, s.name, Lanes(static_cast<size_t>(s.type.lanes), t.values.at(s.operand)[0])); }

  void run(const FirstLanes& s, Thread& t) {
    int64_t count = evaluate(s.count, t.integers);
    Lanes result;
    for (int64_t lane = 0; lane < s.lanes; ++lane) result.push_back(Scalar::of_int(DType::boolean, lane < count));
    define(t, s.name, std::move(result));
  }

  void run(const ReduceLanes& s, Thread& t) {
    Lanes lanes = t.values.at(s.operand);
    while (lanes.size() > 1) {
      size_t half = lanes.size() / 2;
      for (size_t l = 0; l < half; ++l) {
        Scalar pair[] = {lanes[l], lanes[l + half]};
        lanes[l] = apply(s.fn, s.dtype, pair, mode, &division_error);
      }
      lanes.resize(half);
    }
    define(t, s.name, std::move(lanes));
  }

  void run(const Extract& s, Thread& t) { define(t, s.name, {t.values.at(s.operand).at(static_cast<size_t>(s.lane))}); }

  void run(const Shuffle& s, Thread& t) {
    Lanes all = t.values.at(s.a);
    if (!s.b.empty()) all.insert(all.end(), t.values.at(s.b).begin(), t.values.at(s.b).end());
    Lanes result;
    for (int lane : s.lanes) result.push_back(all.at(static_cast<size_t>(lane)));
    define(t, s.name, std::move(result));
  }

  void run(const Load& s, Thread& t) {
    Lanes result = s.passthrough.empty() ? Lanes(static_cast<size_t>(s.type.lanes), integer(s.type.dtype, 0)) : t.values.at(s.passthrough);
    auto at = places(t, s, result.size());
    for (size_t lane = 0; lane < result.size(); ++lane)
      if (at[lane]) result[lane] = t.buffers.at(s.buffer).array->get(*at[lane]);
    define(t, s.name, std::move(result));
  }

  void run(const Store& s, Thread& t) {
    const Lanes& value = t.values.at(s.value);
    Array& array = *t.buffers.at(s.buffer).array;
    auto at = places(t, s, value.size());
    for (size_t lane = 0; lane < value.size(); ++lane)
      if (at[lane]) array.set(*at[lane], s.combiner == Combiner::set ? value[lane] : combine(s.combiner, array.get(*at[lane]), value[lane], mode));
  }

  void run(const Var& s, Thread& t) { define(t, s.name, t.values.at(s.init)); }
  void run(const Assign& s, Thread& t) { define(t, s.name, t.values.at(s.value)); }

  struct Bounds {
    int64_t lo, hi, step;
    bool operator==(const Bounds&) const = default;
  };
  Bounds bounds_of(const For& s, const Thread& t) const {
    Bounds b{evaluate(s.lo, t.integers), evaluate(s.hi, t.integers), evaluate(s.step, t.integers)};
    DEPLO_ASSERT(b.step > 0, "kernel @{}: the loop {} steps by {}", kernel.name, s.name, b.step);
    return b;
  }

  void run(const For& s, Thread& t) {
    Bounds b = bounds_of(s, t);
    for (int64_t i = b.lo; i < b.hi; i += b.step) {
      define(t, s.name, {Scalar::of_int(DType::i64, i)});
      run(s.body, t);
    }
  }

  void run(const If& s, Thread& t) { run(holds(t, s) ? s.then : s.otherwise, t); }

  void run(const Alloc& s, Thread& t) {
    int64_t count = evaluate(s.count, t.integers);
    Memory memory{std::make_shared<Array>(Array::zeros(s.dtype, {count}))};
    memory.array->make_undefined();
    if (s.space == Space::scratch) {
      memory.begin = evaluate(s.offset, t.integers);
      memory.end = memory.begin + count * size_of(s.dtype);
      DEPLO_ASSERT(memory.begin >= 0 && memory.end <= scratch_bytes, "kernel @{}: {} takes bytes {} to {} of {} bytes of scratch memory", kernel.name,
                   s.name, memory.begin, memory.end, scratch_bytes);
      // Arrays that die may share memory with later ones: what they held is gone.
      t.buffers.for_each([&](Memory& other) {
        if (other.begin < memory.end && memory.begin < other.end) other.array->make_undefined();
      });
    }
    t.buffers[s.name] = std::move(memory);
  }

  void run(const Prefetch& /*s*/, Thread& /*t*/) {}  // outside a buffer it is allowed
  void run(const Barrier& /*s*/, Thread& /*t*/) {}
  void run(const Exchange& s, Thread& t) { run_jointly(s, {&t}); }

  void run(const CopyAsync& s, Thread& t) {
    PendingCopies::Copy copy{t.buffers.at(s.buffer).array, t.buffers.at(s.from).array, evaluate(s.offset, t.integers), {}, s.elements};
    inside(*copy.to, s.buffer, copy.at);
    inside(*copy.to, s.buffer, copy.at + s.elements - 1);
    bool any = true;
    for (const Cond& cond : s.guard) any = any && evaluate(cond, t.integers);
    const int64_t count = any ? std::min<int64_t>(evaluate(s.count, t.integers), s.elements) : 0;
    for (int64_t e = 0; e < count; ++e) {
      copy.places.push_back(evaluate(s.from_offset, t.integers) + e);
      inside(*copy.from, s.from, copy.places.back());
    }
    t.copies.add(std::move(copy));
  }

  void run(const CopyGroup& s, Thread& t) {
    if (s.pending == CopyGroup::kCommit) return t.copies.commit();
    t.copies.wait(static_cast<size_t>(s.pending));
  }

  void run(const MultiplyTiles& s, Thread& t) {
    const TileProducts& p = s.products;
    for (int64_t which = 0; which < p.b.rows / 2; ++which) {
      Scalar& sum = t.values.at(s.sums[static_cast<size_t>(which / 2)])[static_cast<size_t>(which % 2)];
      const double more = tile_product(p, t.integers, which, [&](const TileFactor& f, int64_t place) {
        const Array& array = *t.buffers.at(f.buffer).array;
        inside(array, f.buffer, place);
        return array.get(place).f;
      });
      sum = mode == Mode::typed ? Scalar::of_float(DType::f32, sum.f + more) : Scalar{DType::f32, sum.f + more, 0};
    }
  }
  void run(const MultiplyGroup& s, Thread& t) { run_jointly(s, {&t}); }
  void run(const LoadMatrix& s, Thread& t) { run_jointly(s, {&t}); }
  void run(const Mma& s, Thread& t) { run_jointly(s, {&t}); }
  void run(const JoinMatrix& s, Thread& t) {
    Lanes lanes;
    for (const std::string& part : s.parts)
      for (int e = 0; e < lanes_of_matrix(s.type.dtype); ++e) {
        Scalar wide[] = {t.values.at(part)[static_cast<size_t>(s.lane) + static_cast<size_t>(e)]};
        lanes.push_back(as_factor(apply(Fn::cast, s.type.dtype, wide, mode, &division_error)));
      }
    define(t, s.name, std::move(lanes));
  }

  void inside(const Array& array, const std::string& name, int64_t at) const {
    DEPLO_ASSERT(at >= 0 && at < array.count(), "kernel @{}: element {} of {} is accessed, which has {}", kernel.name, at, name, array.count());
  }

  void run(const Matrix& s, Thread& t) {
    constexpr auto kRows = static_cast<size_t>(kMatrixRows);
    if (s.kind == Matrix::Kind::zero) {
      t.matrices[s.target] = std::vector<Lanes>(kRows, Lanes(kRows, Scalar::of_float(s.dtype, 0)));
      return;
    }
    if (s.kind == Matrix::Kind::multiply && is_byte(s.a_dtype)) {
      std::vector<Lanes>& sums = matrix(t, s.target, DType::i32);
      const std::vector<Lanes> a = bytes(t, s.a, s.a_dtype);
      const std::vector<Lanes> b = bytes(t, s.b, s.b_dtype);
      for (size_t i = 0; i < kRows; ++i)
        for (size_t j = 0; j < kRows; ++j)
          for (size_t k = 0; k < 4 * kRows; ++k) sums[i][j] = Scalar::of_int(DType::i32, sums[i][j].i + a[i][k].i * b[k / 4][4 * j + k % 4].i);
      return;
    }
    if (s.kind == Matrix::Kind::multiply) {
      std::vector<Lanes>& sums = matrix(t, s.target, DType::f32);
      const std::vector<Lanes>& a = matrix(t, s.a, DType::bf16);
      const std::vector<Lanes>& b = matrix(t, s.b, DType::bf16);
      for (size_t i = 0; i < kRows; ++i)
        for (size_t j = 0; j < kRows; ++j)
          for (size_t p = 0; p < kRows; ++p) {
            Scalar operands[] = {a[i][2 * p], a[i][2 * p + 1], b[p][2 * j], b[p][2 * j + 1], sums[i][j]};
            sums[i][j] = apply(Fn::dot2, DType::f32, operands, mode, &division_error);
          }
      return;
    }
    Array& array = *t.buffers.at(s.buffer).array;
    const int64_t offset = evaluate(s.offset, t.integers);
    const int64_t stride = evaluate(s.stride, t.integers);
    const size_t columns = static_cast<size_t>(kMatrixRowBytes / size_of(array.dtype));
    std::vector<Lanes>& rows = s.kind == Matrix::Kind::store ? matrix(t, s.target, array.dtype) : t.matrices[s.target];
    if (s.kind == Matrix::Kind::load) rows.assign(kRows, Lanes(columns));
    for (size_t i = 0; i < kRows; ++i)
      for (size_t j = 0; j < columns; ++j) {
        const int64_t at = offset + static_cast<int64_t>(i) * stride + static_cast<int64_t>(j);
        DEPLO_ASSERT(at >= 0 && at < array.count(), "kernel @{}: matrix row {} accesses element {} of {}, which has {}", kernel.name, i, at, s.buffer,
                     array.count());
        if (s.kind == Matrix::Kind::load)
          rows[i][j] = array.get(at);
        else
          array.set(at, rows[i][j]);
      }
  }

  /// The rows of a register that holds bytes, or words that are made of such.
  std::vector<Lanes> bytes(Thread& t, int number, DType dtype) const {
    auto it = t.matrices.find(number);
    if (it == t.matrices.end() || it->second[0][0].dtype != DType::i32) return matrix(t, number, dtype);
    std::vector<Lanes> rows;
    for (const Lanes& words : it->second) {
      rows.emplace_back();
      for (const Scalar& word : words)
        for (int64_t byte = 0; byte < 4; ++byte) rows.back().push_back(Scalar::of_int(dtype, byte_of_word(word.i, byte, dtype)));
    }
    return rows;
  }

  /// A register that holds rows of this dtype.
  std::vector<Lanes>& matrix(Thread& t, int number, DType dtype) const {
    auto it = t.matrices.find(number);
    DEPLO_ASSERT(it != t.matrices.end(), "kernel @{}: matrix register t{} is read before it is written", kernel.name, number);
    DEPLO_ASSERT(it->second[0][0].dtype == dtype, "kernel @{}: matrix register t{} holds {}, needed is {}", kernel.name, number,
                 to_string(it->second[0][0].dtype), to_string(dtype));
    return it->second;
  }

  void run(const SetError& s, Thread& t) {
    for (const Scalar& lane : t.values.at(s.condition))
      if (lane.i != 0 && error == ErrorCode::none) error = s.code;
  }

  // ---- the threads of a GPU block in step --------------------------------------------------------------------------

  void run_jointly(const Block& block, const std::vector<Thread*>& threads) {
    for (const auto& stmt : block) {
      const auto* alloc = std::get_if<Alloc>(&stmt->node);
      if (joint.count(stmt.get())) {
        run_jointly(*stmt, threads);
      } else if (alloc && alloc->space != Space::stack) {
        run(*alloc, *threads[0]);
        for (Thread* t : threads) t->buffers[alloc->name] = threads[0]->buffers[alloc->name];
      } else {
        for (Thread* t : threads) std::visit([&](const auto& s) { run(s, *t); }, stmt->node);
      }
    }
  }

  void run_jointly(const Exchange& s, const std::vector<Thread*>& threads) const {
    std::vector<Lanes> given;
    for (Thread* t : threads) given.push_back(t->values.at(s.operand));
    for (size_t k = 0; k < threads.size(); ++k) {
      const auto named = static_cast<size_t>(s.lane);
      const size_t lane = s.partner == Partner::number    ? named
                          : s.partner == Partner::differs ? k % 32 ^ named
                                                          : k % 32 - (k % 32 >= named ? named : 0);
      const size_t other = k / 32 * 32 + lane;
      DEPLO_ASSERT(other < threads.size(), "kernel @{}: thread {} exchanges {} with thread {}, of {}", kernel.name, k, s.operand, other,
                   threads.size());
      define(*threads[k], s.name, given[other]);
    }
  }

  /// f(threads) for each warp.
  template <class F>
  void for_warps(const std::vector<Thread*>& threads, const F& f) const {
    DEPLO_ASSERT(threads.size() % kWarpThreads == 0, "kernel @{}: matrices of warps, of which {} threads are no whole number", kernel.name,
                 threads.size());
    for (auto at = threads.begin(); at != threads.end(); at += kWarpThreads) f(std::vector<Thread*>(at, at + kWarpThreads));
  }

  void run_jointly(const LoadMatrix& s, const std::vector<Thread*>& threads) const {
    for_warps(threads, [&](const std::vector<Thread*>& warp) {
      auto loaded = load_matrices(s.type.lanes / lanes_of_matrix(s.type.dtype), s.type.dtype, s.transposed, [&](size_t thread, size_t column) {
        const Array& array = *warp[thread]->buffers.at(s.buffer).array;
        const int64_t at = evaluate(s.offset, warp[thread]->integers) + static_cast<int64_t>(column);
        inside(array, s.buffer, at);
        return array.get(at);
      });
      for (size_t k = 0; k < kWarpThreads; ++k) define(*warp[k], s.name, std::move(loaded[k]));
    });
  }

  void run_jointly(const Mma& s, const std::vector<Thread*>& threads) const {
    for_warps(threads, [&](const std::vector<Thread*>& warp) {
      std::vector<Lanes> a;
      std::vector<Lanes> b;
      std::vector<Lanes> sums;
      const auto lane = static_cast<size_t>(s.lane);
      for (Thread* t : warp) {
        a.push_back(t->values.at(s.a));
        const Lanes& both = t->values.at(s.b);
        const auto lanes = static_cast<std::ptrdiff_t>(a.back().size() / 2);
        b.emplace_back(both.begin() + s.half * lanes, both.begin() + (s.half + 1) * lanes);
        const Lanes& low = t->values.at(s.low);
        const Lanes& high = t->values.at(s.high);
        sums.push_back({low[lane], low[lane + 1], high[lane], high[lane + 1]});
      }
      multiply_matrices(a, b, sums, mode);
      for (size_t k = 0; k < kWarpThreads; ++k)
        for (size_t e : {0, 1}) {
          warp[k]->values.at(s.low)[lane + e] = sums[k][e];
          warp[k]->values.at(s.high)[lane + e] = sums[k][2 + e];
        }
    });
  }

  void run_jointly(const MultiplyGroup& s, const std::vector<Thread*>& threads) const {
    const GroupProducts& p = s.products;
    DEPLO_ASSERT(threads.size() % kGroupThreads == 0, "kernel @{}: products of groups of {}, of which {} threads are no whole number", kernel.name,
                 kGroupThreads, threads.size());
    if (p.depth == 0) return;
    for (size_t first = 0; first < threads.size(); first += kGroupThreads) {
      Thread* const* group = &threads[first];
      const auto factor = [&](const GroupFactor& f) {
        return [&, array = group[0]->buffers.at(f.tile).array, from = evaluate(f.at, group[0]->integers)](int64_t row, int64_t k) {
          const int64_t at = f.place(from, row, k, size_of(array->dtype));
          inside(*array, f.tile, at);
          const Scalar element = array->get(at);
          return is_float(element.dtype) ? element.f : static_cast<double>(element.i);
        };
      };
      const auto add = [&](int64_t thread, int64_t h, int64_t g, int64_t c, double more) {
        Scalar& sum = group[thread]->values.at(s.sums[s.var_of(h, g)])[static_cast<size_t>(g % (p.lanes / 2) * 2 + c)];
        sum = sum_of_products(sum, more, mode);
      };
      if (p.matrices.empty()) {
        multiply_group(p, factor(p.a), factor(p.b), add);
        continue;
      }
      const auto matrix = [&](int64_t row, int64_t k) {
        const Lanes& lanes = group[matrix_thread(row, k)]->values.at(p.matrices[static_cast<size_t>(k / kGroupDepth)]);
        return lanes[static_cast<size_t>(matrix_element(row, k))].f;
      };
      multiply_group(p, matrix, factor(p.b), add);
    }
  }

  void run_jointly(const Stmt& stmt, const std::vector<Thread*>& threads) {
    if (const auto* group = std::get_if<MultiplyGroup>(&stmt.node)) return run_jointly(*group, threads);
    if (const auto* load = std::get_if<LoadMatrix>(&stmt.node)) return run_jointly(*load, threads);
    if (const auto* product = std::get_if<Mma>(&stmt.node)) return run_jointly(*product, threads);
    if (const auto* exchange = std::get_if<Exchange>(&stmt.node)) return run_jointly(*exchange, threads);
    if (const auto* branch = std::get_if<If>(&stmt.node)) {
      bool taken = holds(*threads[0], *branch);
      for (Thread* t : threads)
        DEPLO_ASSERT(holds(*t, *branch) == taken, "kernel @{}: a barrier or an exchange under an if where threads disagree", kernel.name);
      return run_jointly(taken ? branch->then : branch->otherwise, threads);
    }
    const auto* loop = std::get_if<For>(&stmt.node);
    if (!loop) return;  // the barrier itself: all threads are here
    Bounds b = bounds_of(*loop, *threads[0]);
    for (Thread* t : threads)
      DEPLO_ASSERT(bounds_of(*loop, *t) == b, "kernel @{}: a barrier in the loop {}, whose bounds differ between threads", kernel.name, loop->name);
    for (int64_t i = b.lo; i < b.hi; i += b.step) {
      for (Thread* t : threads) define(*t, loop->name, {Scalar::of_int(DType::i64, i)});
      run_jointly(loop->body, threads);
    }
  }

  void run_grid(const Thread& base) {
    auto extent = [&](const std::vector<Expr>& list, size_t k) { return k < list.size() ? evaluate(list[k], base.integers) : 1; };
    for (int64_t z = 0; z < extent(kernel.grid, 2); ++z)
      for (int64_t y = 0; y < extent(kernel.grid, 1); ++y)
        for (int64_t x = 0; x < extent(kernel.grid, 0); ++x) {
          std::vector<std::unique_ptr<Thread>> block;
          for (int64_t v = 0; v < extent(kernel.block, 1); ++v)
            for (int64_t u = 0; u < extent(kernel.block, 0); ++u) {
              block.push_back(std::make_unique<Thread>(base));
              for (auto [name, value] : {std::pair{"block_x", x}, {"block_y", y}, {"block_z", z}, {"thread_x", u}, {"thread_y", v}})
                define_text(*block.back(), name, value);
            }
          std::vector<Thread*> threads;
          for (const auto& t : block) threads.push_back(t.get());
          if (!threads.empty()) run_jointly(kernel.body, threads);
        }
  }

  void run_chunks(const Thread& base) {
    int64_t chunks = evaluate(kernel.chunks, base.integers);
    for (int64_t k = 0; k < chunks; ++k) {
      Thread t = base;
      define_text(t, "thread", k);
      define_text(t, "threads", chunks);
      run(kernel.body, t);
    }
  }
};

bool find_barriers(const Block& block, std::set<const Stmt*>& joint) {
  bool found = false;
  for (const auto& stmt : block) {
    bool inside = std::visit(Overloaded{[](const Barrier&) { return true; }, [](const Exchange&) { return true; },
                                        [](const LoadMatrix&) { return true; }, [](const Mma&) { return true; },
                                        [](const MultiplyGroup&) { return true; }, [&](const For& s) { return find_barriers(s.body, joint); },
                                        [&](const If& s) {
                                          bool then = find_barriers(s.then, joint);
                                          return find_barriers(s.otherwise, joint) || then;
                                        },
                                        [](const auto&) { return false; }},
                             stmt->node);
    if (inside) joint.insert(stmt.get());
    found = found || inside;
  }
  return found;
}

/// Runs one step of a module: arrays into memory, the kernel, memory back into the arrays that it writes.
void run_step(const Module& module, const CallStep& step, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& symbols,
              Mode mode) {
  const Kernel& kernel = *module.find_kernel(step.kernel);
  std::vector<StridedLayout> layouts;
  std::vector<Array> memory;
  for (size_t k = 0; k < arguments.size(); ++k) {
    const Buffer* buffer = module.find_buffer(step.arguments[k]);
    layouts.push_back({arguments[k]->shape, evaluate_shape(buffer->strides, symbols)});
    memory.push_back(Array::zeros(arguments[k]->dtype, {layouts[k].span()}));
    memory[k].make_undefined();
    layouts[k].for_each([&](int64_t flat, int64_t offset) { memory[k].set(offset, arguments[k]->get(flat)); });
  }
  std::vector<Array*> pointers;
  for (Array& m : memory) pointers.push_back(&m);
  interpret(kernel, pointers, symbols, mode);
  for (size_t k = 0; k < arguments.size(); ++k)
    if (kernel.params[k].kind != loop_ir::ParamKind::in)
      layouts[k].for_each([&](int64_t flat, int64_t offset) { arguments[k]->set(flat, memory[k].get(offset)); });
}

}  // namespace

void interpret(const Kernel& kernel, const std::vector<Array*>& buffers, const std::map<std::string, int64_t>& symbols, Mode mode) {
  DEPLO_ASSERT(buffers.size() == kernel.params.size(), "kernel @{} takes {} buffers, got {}", kernel.name, kernel.params.size(), buffers.size());
  Machine machine{kernel, mode, {}};
  find_barriers(kernel.body, machine.joint);
  NameNumbers names;
  Thread base(names);
  for (const auto& [name, value] : symbols) Machine::define(base, name, {Scalar::of_int(DType::i64, value)});
  for (const Size& size : kernel.sizes) Machine::define(base, size.name, {Scalar::of_int(DType::i64, evaluate(size.value, symbols))});
  for (size_t i = 0; i < buffers.size(); ++i) base.buffers[kernel.params[i].name] = {std::shared_ptr<Array>(buffers[i], [](Array*) {})};
  machine.scratch_bytes = evaluate(kernel.scratch_bytes, base.integers);
  if (kernel.grid.empty())
    machine.run_chunks(base);
  else
    machine.run_grid(base);
  if (machine.division_error && machine.error == ErrorCode::none) machine.error = ErrorCode::division_by_zero;
  if (machine.error == ErrorCode::index_out_of_range) throw IndexError(fmt::format("kernel @{}: index out of range", kernel.name));
  if (machine.error != ErrorCode::none) throw ExecutionError(fmt::format("kernel @{}: {}", kernel.name, loop_ir::to_string(machine.error)));
}

std::vector<int64_t> passed_values(const Kernel& kernel, const std::map<std::string, int64_t>& symbols) {
  std::vector<int64_t> values;
  for (const std::string& name : kernel.symbols) {
    auto found = symbols.find(name);
    DEPLO_ASSERT(found != symbols.end(), "kernel @{}: no value for symbol {}", kernel.name, name);
    values.push_back(found->second);
  }
  for (const Size& size : kernel.sizes) values.push_back(evaluate(size.value, symbols));
  return values;
}

std::vector<Array> interpret(const Module& module, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library) {
  auto find_params = [&](const std::string& name) -> std::optional<std::vector<ParamType>> {
    std::vector<ParamType> params;
    for (const Param& p : module.find_kernel(name)->params) params.push_back({p.dtype, p.kind != loop_ir::ParamKind::in});
    return params;
  };
  auto call = [&](const CallStep& step, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& sizes) {
    run_step(module, step, arguments, sizes, mode);
  };
  return deplo::interpret(module, find_params, inputs, symbols, call, mode, library);
}

}  // namespace deplo::kernel_ir
