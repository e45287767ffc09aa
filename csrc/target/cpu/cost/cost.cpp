#include "target/cpu/cost/cost.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "target/cpu/cost/tree.h"

namespace deplo::cpu_cost {
namespace {

constexpr double kLine = 64;      ///< bytes that come from a cache together
constexpr double kUsable = 0.75;  ///< of a cache, beside what passes through
constexpr double kStore = 2;      ///< a vector's store, in loads
constexpr double kWritten = 2;    ///< a line that is written is read before and goes back later
constexpr double kKept = 0.4;     ///< of the last cache, for data that does not fit in it
constexpr double kTaken = 7e-9;   ///< seconds until a core may write a line that others have read: measured on a Zen 4
constexpr double kApart = 0.1;    ///< of what could happen at the same time and does not
constexpr double kCall = 1e-7;    ///< seconds of a kernel that does nothing

// ---- what a part of a tree touches ----------------------------------------------------------------------------------------------------------------

using Bytes = std::map<int, double>;  ///< by buffer

double total(const Bytes& bytes) {
  double sum = 0;
  for (const auto& [buffer, n] : bytes) sum += n;
  return sum;
}

using Loops = std::set<int>;

/// One access over the turns of some loops, in bytes of whole lines.
double touched(const Access& access, const Tree& tree, const Loops& loops) {
  const BufferSize& buffer = tree.buffers[static_cast<size_t>(access.buffer)];
  const size_t rank = access.dims.size();
  double lines = 1;    // runs of neighbours
  double run = 1;      // elements of a run
  bool is_run = true;  // dimensions so far follow one another in memory
  double all = static_cast<double>(buffer.bytes);
  // From the dimension whose elements are nearest to each other.
  std::vector<size_t> order(rank);
  for (size_t d = 0; d < rank; ++d) order[d] = d;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::abs(buffer.strides[a]) < std::abs(buffer.strides[b]); });
  double next = 1;  // stride at which the run goes on
  for (size_t d : order) {
    double places = 1;
    double span = 1;
    for (const auto& [loop, move] : access.dims[d])
      if (loops.count(loop)) {
        places *= move.places;
        span += move.span;
      }
    const auto size = static_cast<double>(buffer.shape[d]);
    places = std::min({places, span, size});
    all *= size;
    // A line brings what lies beside an element.
    if (is_run && std::abs(static_cast<double>(buffer.strides[d])) <= next + 0.5 && next * size * static_cast<double>(buffer.bytes) <= kLine) {
      run *= size;
      next *= size;
      continue;
    }
    if (places <= 1 && size > 1) {
      is_run = false;
      continue;
    }
    if (is_run && std::abs(static_cast<double>(buffer.strides[d])) <= next + 0.5) {
      // Between whole lines nothing is brought that no turn asks for.
      const bool whole_lines = run * static_cast<double>(buffer.bytes) >= kLine;
      run *= whole_lines ? places : std::max(places, std::min(span, places * 2));
      next *= size;
      if (places < size) is_run = false;
    } else {
      lines *= places;
      is_run = false;
    }
  }
  // A loop over several dimensions at once reaches no more elements than it has turns.
  double most = 1;
  Loops moving;
  for (const auto& dim : access.dims)
    for (const auto& [loop, move] : dim)
      if (loops.count(loop) && moving.insert(loop).second) most *= tree.turns.at(loop);
  const double bytes = lines * std::ceil(run * static_cast<double>(buffer.bytes) / kLine) * kLine;
  return std::min({bytes, most * kLine, std::max(all, static_cast<double>(buffer.bytes))});
}

/// Accesses of one buffer that begin so far from one another that they share nothing count each, others once.
class Footprint {
 public:
  explicit Footprint(const Tree& tree) : tree_(tree) {}

  Bytes of(const Body& body) { return gather(body, nullptr); }
  Bytes of(const Loop& loop) { return gather(main_sample(loop), &loop); }

  static const Body& main_sample(const Loop& loop) {
    return std::max_element(loop.samples.begin(), loop.samples.end(), [](const auto& a, const auto& b) { return a.weight < b.weight; })->body;
  }

 private:
  struct Part {
    std::vector<int64_t> first;
    std::vector<double> span;
    double bytes;
  };

  Bytes gather(const Body& body, const Loop* around) {
    Loops loops;
    if (around) loops.insert(around->id);
    std::map<int, std::vector<Part>> parts;
    add(body, loops, parts);
    Bytes bytes;
    for (const auto& [buffer, list] : parts) {
      double sum = 0;
      for (const Part& part : list) sum += part.bytes;
      const BufferSize& size = tree_.buffers[static_cast<size_t>(buffer)];
      double all = static_cast<double>(size.bytes);
      for (int64_t n : size.shape) all *= static_cast<double>(n);
      bytes[buffer] = std::min(sum, std::max(all, kLine));
    }
    return bytes;
  }

  void add(const Body& body, Loops& loops, std::map<int, std::vector<Part>>& parts) {
    for (const Access& access : body.accesses) {
      Part part{access.first, {}, touched(access, tree_, loops)};
      for (const auto& dim : access.dims) {
        double span = 0;
        for (const auto& [loop, move] : dim)
          if (loops.count(loop)) span += move.span;
        part.span.push_back(span);
      }
      auto& list = parts[access.buffer];
      auto shared = std::find_if(list.begin(), list.end(), [&](const Part& known) {
        for (size_t d = 0; d < known.first.size(); ++d)
          if (std::abs(static_cast<double>(known.first[d] - part.first[d])) > std::max(known.span[d], part.span[d])) return false;
        return true;
      });
      if (shared == list.end())
        list.push_back(std::move(part));
      else if (shared->bytes < part.bytes)
        *shared = std::move(part);
    }
    for (const Loop& loop : body.loops) {
      loops.insert(loop.id);
      add(main_sample(loop), loops, parts);
    }
  }

  const Tree& tree_;
};

/// Bytes that one thread brings to a cache of some size from beyond it.
class Traffic {
 public:
  Traffic(const Tree& tree, double capacity) : tree_(tree), footprint_(tree), capacity_(kUsable * capacity) { find_written(tree.body); }

  double of(const Body& body) {
    const Bytes bytes = footprint_.of(body);
    if (total(bytes) <= capacity_) return brought(bytes);
    double sum = 0;
    for (const Access& access : body.accesses) sum += brought({{access.buffer, touched(access, tree_, {})}});
    for (const Loop& loop : body.loops) sum += of(loop);
    return sum;
  }

 private:
  double of(const Loop& loop) {
    const Bytes bytes = footprint_.of(loop);
    const double all = brought(bytes);
    if (total(bytes) <= capacity_) return all;
    double each = 0;
    bool fits = true;
    for (const Sample& sample : loop.samples) {
      fits = fits && total(footprint_.of(sample.body)) <= capacity_;
      each += sample.weight * of(sample.body);
    }
    // What a turn shares with the next one stays.
    return fits ? std::min(all, each) : each;
  }

  double brought(const Bytes& bytes) const {
    double sum = 0;
    for (const auto& [buffer, n] : bytes) sum += n * (written_.count(buffer) ? kWritten : 1);
    return sum;
  }

  void find_written(const Body& body) {
    for (const Access& access : body.accesses)
      if (access.writes) written_.insert(access.buffer);
    for (const Loop& loop : body.loops)
      for (const Sample& sample : loop.samples) find_written(sample.body);
  }

  const Tree& tree_;
  Footprint footprint_;
  const double capacity_;
  std::set<int> written_;
};

// ---- instructions ---------------------------------------------------------------------------------------------------------------------------------

/// In multiply-adds of full vectors.
struct Work {
  double arithmetic = 0;
  double memory = 0;
  double latency = 0;
  double done = 0;  ///< loops that are over
};

class Instructions {
 public:
  /// `load`: time of a vector's load from the first cache.
  explicit Instructions(double load) : load_(load) {}

  double of(const Body& body) const { return closed(work(body)); }

 private:
  static double closed(const Work& work) { return work.done + std::max({work.arithmetic, work.memory, work.latency}); }

  Work work(const Body& body) const {
    Work sum{body.arithmetic, load_ * (body.loads + kStore * body.stores), body.latency, body.overhead};
    for (const Loop& loop : body.loops)
      for (const Sample& sample : loop.samples) {
        const Work inner = work(sample.body);
        if (loop.flat) {
          sum.arithmetic += sample.weight * inner.arithmetic;
          sum.memory += sample.weight * inner.memory;
          sum.latency = std::max(sum.latency, inner.latency);
          sum.done += sample.weight * inner.done;
        } else {
          sum.done += sample.weight * closed(inner);
        }
      }
    return sum;
  }

  const double load_;
};

/// What a kernel packs, for all threads to read.
double bytes_written(const tile_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes) {
  double sum = 0;
  for (const auto& p : kernel.params) {
    if (p.kind == loop_ir::ParamKind::in) continue;
    double bytes = size_of(p.dtype);
    for (Expr e : p.shape) bytes *= static_cast<double>(std::max<int64_t>(0, evaluate(e, sizes)));
    sum += bytes;
  }
  return sum;
}

}  // namespace

Estimate estimate(const tile_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes, const PassContext& context, const Figures& figures,
                  double resident) {
  const TargetInfo& target = context.target;
  const double lanes = static_cast<double>(target.vector_bytes) / 4;
  const double multiply_add = 2 * lanes / figures.f32;
  Ratios ratios;
  if (figures.bf16 > 0) ratios.dot2 = 4 * lanes / figures.bf16 / multiply_add;
  if (figures.int8 > 0) ratios.dot4 = 8 * lanes / figures.int8 / multiply_add;
  const Tree tree = make_tree(kernel, sizes, context, ratios, figures.threads);
  Estimate made;
  made.core = multiply_add * Instructions(target.vector_bytes / figures.l1 / multiply_add).of(tree.body);
  const auto l1 = static_cast<double>(target.l1_bytes);
  const auto l2 = static_cast<double>(target.l2_bytes);
  const auto l3 = static_cast<double>(target.l3_bytes);
  made.second = Traffic(tree, l1).of(tree.body) / figures.l2;
  if (resident > kUsable * l2 * tree.threads) made.third = Traffic(tree, l2).of(tree.body) / figures.l3;
  // Of what is touched again and again a part stays in the last cache, which others use as well.
  if (const double missing = 1 - kKept * l3 / resident; missing > 0)
    made.memory = missing * Traffic(tree, l3 / tree.threads).of(tree.body) / std::min(figures.memory, figures.memory_all / tree.threads);
  const double taken = kernel.schedule.kind == "pack" && tree.threads > 1 ? kTaken * bytes_written(kernel, sizes) / kLine / tree.threads : 0;
  const double longest = std::max({made.core, made.second, made.third, made.memory});
  made.seconds =
      longest + kApart * (made.core + made.second + made.third + made.memory - longest) + taken + (tree.threads > 1 ? figures.barrier : kCall);
  return made;
}

}  // namespace deplo::cpu_cost
