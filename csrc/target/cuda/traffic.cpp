#include "target/cuda/traffic.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "analysis/cost.h"
#include "base/error.h"

namespace deplo {
namespace {

using namespace kernel_ir;

constexpr size_t kWarp = 32;
constexpr int64_t kSector = 32;
constexpr int64_t kBank = 4;
constexpr int64_t kBanks = 32;
constexpr int64_t kWidest = 16;
constexpr int64_t kFollowed = 3;              ///< blocks, and turns of a loop
constexpr int64_t kFewTurns = 8;              ///< followed in full
constexpr int64_t kApart = int64_t{1} << 40;  ///< bytes between places that numbers in memory say
constexpr double kLatency = 600;              ///< clocks from a load of the device's memory to its use
constexpr double kAhead = 4;                  ///< turns of a loop whose loads are under way together: compilers unroll it

using Integers = std::map<std::string, int64_t>;

/// The threads of one warp in step. What depends on values in memory is not known: conditions hold then.
class Warp {
 public:
  Warp(const Kernel& kernel, std::vector<Integers> threads, Traffic& out)
      : kernel_(kernel), threads_(std::move(threads)), unknown_(threads_.size()), out_(out) {
    for (const Param& p : kernel.params) dtypes_[p.name] = p.dtype;
  }

  void run(double weight) {
    std::vector<size_t> all;
    for (size_t t = 0; t < threads_.size(); ++t) all.push_back(t);
    block(kernel_.body, all, weight);
    clocks_ /= weight;
    if (loads_) clocks_ += kLatency;
    out_.clocks = std::max(out_.clocks, clocks_);
  }

 private:
  using Active = std::vector<size_t>;

  std::optional<int64_t> value(Expr e, size_t thread) const {
    for (const std::string& s : symbols_of(e))
      if (!threads_[thread].count(s)) return std::nullopt;
    return evaluate(e, threads_[thread]);
  }

  /// Where an offset leads: to an element, or behind one that numbers in memory say. Offsets of equal `base` differ as their elements do.
  struct Place {
    int64_t element = 0;
    int64_t base = 0;     ///< 0: none
    int64_t aligned = 0;  ///< what bases are multiples of; 0: there are none
  };

  std::optional<Place> place(Expr offset, size_t thread) {
    if (const auto known = value(offset, thread)) return Place{*known};
    std::string key;
    Place found;
    Substitution none;
    for (const std::string& s : symbols_of(offset)) {
      if (threads_[thread].count(s)) continue;
      const auto token = unknown_[thread].find(s);
      const auto step = linear_coefficient(offset, s);
      if (token == unknown_[thread].end() || !step || !step->is_constant()) return std::nullopt;
      found.aligned = std::gcd(found.aligned, step->value());
      key += fmt::format("{}*{} ", token->second, step->value());
      none[s] = 0;
    }
    const auto element = value(substitute(offset, none), thread);
    if (!element) return std::nullopt;
    found.element = *element;
    found.base = token(key);
    return found;
  }

  int64_t token(const std::string& key) { return tokens_.emplace(key, static_cast<int64_t>(tokens_.size()) + 1).first->second; }

  /// Of a value that is not known: the same for threads that make it of the same.
  std::optional<int64_t> token(const Let& s, size_t thread) {
    std::string key = s.name;
    bool all = true;
    const auto add = [&](const std::string& name) {
      const auto known = threads_[thread].find(name);
      const auto other = unknown_[thread].find(name);
      if (known != threads_[thread].end())
        key += fmt::format(" {}", known->second);
      else if (other != unknown_[thread].end())
        key += fmt::format(" t{}", other->second);
      else
        all = false;
    };
    for (const std::string& name : s.operands) add(name);
    if (s.fn == Fn::index)
      for (const std::string& name : symbols_of(s.index)) add(name);
    return all ? std::optional<int64_t>(token(key)) : std::nullopt;
  }

  void block(const Block& body, const Active& active, double weight) {
    if (active.empty()) return;
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s, active, weight); }, stmt->node);
  }

  void issue(double instructions, double weight) {
    out_.instructions += weight * instructions;
    clocks_ += weight * instructions;
  }

  /// Of comparisons of indices and what is made of them, one for all lanes.
  std::optional<int64_t> value(const Let& s, size_t thread) const {
    std::vector<int64_t> operands;
    for (const std::string& name : s.operands) {
      auto found = threads_[thread].find(name);
      if (found == threads_[thread].end()) return std::nullopt;
      operands.push_back(found->second);
    }
    switch (s.fn) {
      case Fn::constant: return is_float(s.type.dtype) ? std::nullopt : std::optional<int64_t>(s.literal.i);
      case Fn::ge: return operands[0] >= operands[1];
      case Fn::gt: return operands[0] > operands[1];
      case Fn::le: return operands[0] <= operands[1];
      case Fn::lt: return operands[0] < operands[1];
      case Fn::eq: return operands[0] == operands[1];
      case Fn::ne: return operands[0] != operands[1];
      case Fn::bit_and: return operands[0] & operands[1];
      case Fn::bit_or: return operands[0] | operands[1];
      default: return std::nullopt;
    }
  }

  void statement(const Let& s, const Active& active, double weight) {
    lanes_[s.name] = s.type.lanes;
    if (s.fn == Fn::index && s.index.kind() == ExprKind::mod && s.index.operands()[1].is_constant())
      remainders_[s.name] = s.index.operands()[1].value();
    if (s.fn != Fn::constant && s.fn != Fn::index) issue(analysis::cost_of(s.fn) * s.type.lanes, weight);
    for (size_t t : active) {
      threads_[t].erase(s.name);
      unknown_[t].erase(s.name);
      if (auto known = s.fn == Fn::index ? (s.type.lanes == 1 ? value(s.index, t) : std::nullopt) : value(s, t))
        threads_[t][s.name] = *known;
      else if (s.type.lanes == 1 && !is_float(s.type.dtype) && !(unknown_[t].empty()))
        if (const auto made = token(s, t)) unknown_[t][s.name] = *made;
    }
    if (s.type.dtype != DType::boolean) return;
    if (s.fn == Fn::bit_not)
      if (auto found = first_.find(s.operands[0]); found != first_.end() && found->second.from.is(0))
        first_[s.name] = {found->second.upto, s.type.lanes};
    if (s.fn != Fn::bit_and) return;
    // Both masks, as far as they are known.
    for (const std::string& operand : s.operands)
      if (auto found = first_.find(operand); found != first_.end()) {
        auto [both, is_new] = first_.emplace(s.name, found->second);
        if (!is_new) both->second = {max(both->second.from, found->second.from), min(both->second.upto, found->second.upto)};
      }
  }
  void statement(const FirstLanes& s, const Active& /*active*/, double /*weight*/) { first_[s.name] = {0, s.count}; }
  void statement(const Splat& s, const Active& active, double /*weight*/) {
    lanes_[s.name] = s.type.lanes;
    for (size_t t : active) {
      auto found = threads_[t].find(s.operand);
      if (found != threads_[t].end())
        threads_[t][s.name] = found->second;
      else
        threads_[t].erase(s.name);
    }
  }
  void statement(const Shuffle& s, const Active& /*active*/, double /*weight*/) { lanes_[s.name] = s.type.lanes; }
  void statement(const Var& s, const Active& active, double /*weight*/) {
    lanes_[s.name] = s.type.lanes;
    for (size_t t : active) threads_[t].erase(s.name);
  }
  void statement(const Alloc& s, const Active& /*active*/, double /*weight*/) {
    dtypes_[s.name] = s.dtype;
    spaces_[s.name] = s.space;
  }
  void statement(const Barrier& /*s*/, const Active& /*active*/, double weight) { out_.barriers += weight; }
  void statement(const Load& s, const Active& active, double weight) {
    lanes_[s.name] = s.type.lanes;
    access(s, s.type.lanes, active, weight);
    if (s.type.lanes != 1 || is_float(s.type.dtype)) return;
    for (size_t t : active) {
      threads_[t].erase(s.name);
      unknown_[t].erase(s.name);
      if (const auto at = place(s.offset, t)) unknown_[t][s.name] = token(fmt::format("{}[{} {}]", s.buffer, at->element, at->base));
    }
  }
  void statement(const Store& s, const Active& active, double weight) {
    auto lanes = lanes_.find(s.value);
    access(s, lanes == lanes_.end() ? 1 : lanes->second, active, weight);
    // The next one may have the same place, and waits.
    const auto space = spaces_.find(s.buffer);
    if (s.combiner != Combiner::set && !s.atomic && space == spaces_.end() && !active.empty()) clocks_ += weight * kLatency;
  }
  void statement(const CopyAsync& s, const Active& active, double weight) {
    const int64_t bytes = size_of(dtypes_.at(s.buffer));
    std::vector<int64_t> counts;
    // One access, if it lies at a multiple of its size and all or none is copied; else element by element.
    int64_t piece = s.elements;
    for (size_t t : active) {
      const auto count = value(s.count, t);
      counts.push_back(holds(s.guard, t) ? std::clamp<int64_t>(count.value_or(s.elements), 0, s.elements) : 0);
      const auto at = value(s.from_offset, t);
      if (!at || *at % s.elements != 0 || counts.back() % s.elements != 0) piece = 1;
    }
    for (int64_t element = 0; element < s.elements; element += piece) {
      std::vector<std::optional<int64_t>> from;
      std::vector<std::optional<int64_t>> to;
      for (size_t k = 0; k < active.size(); ++k) {
        const auto place = [&](Expr offset) {
          const auto at = value(offset, active[k]);
          out_.complete = out_.complete && at;
          return at ? std::optional<int64_t>((*at + element) * bytes) : std::nullopt;
        };
        to.push_back(place(s.offset));
        if (element < counts[k]) from.push_back(place(s.from_offset));
      }
      if (!from.empty()) count_global(s.from, from, piece * bytes, weight);
      if (!to.empty()) count_shared(to, piece * bytes, weight);
    }
  }
  void statement(const LoadMatrix& s, const Active& active, double weight) {
    lanes_[s.name] = s.type.lanes;
    // The threads that name rows.
    std::vector<std::optional<int64_t>> rows;
    for (size_t k = 0; k < std::min(active.size(), static_cast<size_t>(s.type.lanes) * static_cast<size_t>(size_of(s.type.dtype)) * 2); ++k) {
      const auto at = value(s.offset, active[k]);
      out_.complete = out_.complete && at;
      rows.push_back(at ? std::optional<int64_t>(*at * size_of(s.type.dtype)) : std::nullopt);
    }
    if (!rows.empty()) count_shared(rows, kWidest, weight);
  }
  void statement(const JoinMatrix& s, const Active& /*active*/, double /*weight*/) { lanes_[s.name] = s.type.lanes; }
  /// One thread copies lines of 128 bytes for all of the block; matrix units read them without conflicts.
  void statement(const MultiplyTiles& s, const Active& active, double weight) {
    const TileProducts& p = s.products;
    for (size_t t : active) {
      const auto thread = value(p.thread, t);
      if (!thread || *thread != p.threads()) continue;
      const auto depth = value(p.a.depth(), t);
      for (const TileFactor* f : {&p.a, &p.b}) {
        const auto at = value(f->at[0], t);
        const auto width = value(f->width(), t);
        out_.complete = out_.complete && depth && at && width;
        if (!depth || !at || !width) continue;
        const int64_t rows = std::clamp<int64_t>(*width - *at, 0, f->rows);
        const auto lines = static_cast<double>(f->turned ? *depth : rows);
        const int64_t line_bytes = (f->turned ? rows : *depth) * size_of(dtypes_.at(f->buffer));
        out_.global_bytes += weight * lines * static_cast<double>(line_bytes);
        out_.of_buffers[f->buffer] += weight * lines * static_cast<double>(line_bytes);
        const int64_t sectors = (line_bytes + kSector - 1) / kSector;
        const int64_t requests = (line_bytes + kBanks * kBank - 1) / (kBanks * kBank);
        out_.global_sectors += weight * lines * static_cast<double>(sectors);
        out_.least_sectors += weight * lines * static_cast<double>(sectors);
        out_.global_requests += weight * lines * static_cast<double>(requests);
        out_.wide_bytes += weight * lines * static_cast<double>(line_bytes);
      }
    }
  }
  /// Matrix units read tiles without conflicts, and beside other accesses.
  void statement(const MultiplyGroup& s, const Active& /*active*/, double weight) {
    const int64_t bytes = s.products.depth * size_of(dtypes_.at(s.products.b.tile));
    issue(static_cast<double>(bytes) / (2 * kWidest), weight);
  }
  void statement(const Exchange& /*s*/, const Active& /*active*/, double weight) { issue(1, weight); }
  void statement(const ReduceLanes& /*s*/, const Active& /*active*/, double weight) { issue(1, weight); }
  void statement(const Mma& /*s*/, const Active& /*active*/, double weight) { issue(1, weight); }
  template <class Other>
  void statement(const Other& /*s*/, const Active& /*active*/, double /*weight*/) {}

  bool holds(const std::vector<Cond>& guard, size_t thread) const {
    bool holds = true;
    for (const Cond& c : guard) {
      auto known = value(c.expr, thread);
      if (!known) continue;
      holds = holds && (c.kind == Cond::Kind::ge0 ? *known >= 0 : c.kind == Cond::Kind::eq0 ? *known == 0 : *known != 0);
    }
    return holds;
  }

  void statement(const If& s, const Active& active, double weight) {
    Active on;
    Active off;
    for (size_t t : active) (holds(s.guard, t) ? on : off).push_back(t);
    block(s.then, on, weight * chance(s.guard, on));
    block(s.otherwise, off, weight);
  }

  /// How often threads take a branch that asks for one of the remainders of a number that is not known.
  double chance(const std::vector<Cond>& guard, const Active& active) const {
    double chance = 1;
    for (const Cond& c : guard) {
      if (c.kind != Cond::Kind::eq0 || active.empty() || value(c.expr, active[0])) continue;
      for (const std::string& name : symbols_of(c.expr)) {
        const auto found = remainders_.find(name);
        if (found != remainders_.end() && !threads_[active[0]].count(name)) chance /= static_cast<double>(found->second);
      }
    }
    return chance;
  }

  void statement(const For& s, const Active& active, double weight) {
    std::vector<int64_t> turns(threads_.size());
    int64_t most = 0;
    for (size_t t : active) {
      auto lo = value(s.lo, t);
      auto hi = value(s.hi, t);
      auto step = value(s.step, t);
      out_.complete = out_.complete && lo && hi && step;
      turns[t] = lo && hi && step && *step > 0 ? std::max<int64_t>(0, (*hi - *lo + *step - 1) / *step) : 1;
      most = std::max(most, turns[t]);
    }
    const int64_t followed = most <= kFewTurns ? most : kFollowed;
    const bool loaded = std::exchange(loads_, false);
    for (int64_t turn = 0; turn < followed; ++turn) {
      Active on;
      double all = 0;
      for (size_t t : active) {
        all += static_cast<double>(turns[t]);
        if (turn >= turns[t]) continue;
        on.push_back(t);
        auto lo = value(s.lo, t);
        auto step = value(s.step, t);
        threads_[t].erase(s.name);
        if (lo && step) threads_[t][s.name] = *lo + turn * *step;
      }
      const double mean = most <= kFewTurns ? static_cast<double>(followed) : all / static_cast<double>(active.size());
      block(s.body, on, weight * mean / static_cast<double>(followed));
      // The loads of the turns that run together are waited for once.
      if (std::exchange(loads_, false)) clocks_ += weight * mean / static_cast<double>(followed) * kLatency / kAhead;
    }
    loads_ = loaded;
  }

  /// The lanes of a thread that take part: from the first number up to the second one.
  std::pair<int64_t, int64_t> lanes_on(const std::string& mask, size_t thread, int64_t lanes) const {
    if (auto known = threads_[thread].find(mask); known != threads_[thread].end()) return {0, known->second ? lanes : 0};
    auto found = first_.find(mask);
    if (found == first_.end()) return {0, lanes};
    const auto from = value(found->second.from, thread);
    const auto upto = value(found->second.upto, thread);
    return {std::clamp<int64_t>(from.value_or(0), 0, lanes), std::clamp<int64_t>(upto.value_or(lanes), 0, lanes)};
  }

  template <class Access>
  void access(const Access& s, int64_t lanes, const Active& active, double weight) {
    const int64_t bytes = size_of(dtypes_.at(s.buffer));
    auto space = spaces_.find(s.buffer);
    const bool shared = space != spaces_.end() && space->second == Space::shared;
    if (space != spaces_.end() && space->second == Space::stack) return;
    // What the text makes one access of: lanes side by side, at a multiple of their size. Threads some of whose lanes are off go lane by lane.
    int64_t piece = std::min(lanes, kWidest / bytes);
    const bool backwards = s.stride.is(-1);
    if (!s.gather.empty() || !(s.stride.is(1) || backwards)) piece = 1;
    Active whole;
    Active parts;
    for (size_t t : active) {
      const auto at = place(s.offset, t);
      if (!at || (backwards ? at->element - (lanes - 1) : at->element) % piece != 0 || at->aligned % piece != 0) piece = 1;
      const auto [from, upto] = lanes_on(s.mask, t, lanes);
      if (from < upto) (upto - from == lanes ? whole : parts).push_back(t);
    }
    access(s, whole, lanes, piece, bytes, shared, weight);
    access(s, parts, lanes, 1, bytes, shared, weight);
  }

  template <class Access>
  void access(const Access& s, const Active& active, int64_t lanes, int64_t piece, int64_t bytes, bool shared, double weight) {
    for (int64_t lane = 0; lane < lanes; lane += piece) {
      std::vector<std::optional<int64_t>> places;
      for (size_t t : active) {
        const auto [from, upto] = lanes_on(s.mask, t, lanes);
        if (lane < from || lane >= upto) continue;
        const auto at = place(s.offset, t);
        auto stride = value(s.stride, t);
        const bool known = at && stride && s.gather.empty();
        out_.complete = out_.complete && known && at->base == 0;
        places.push_back(known ? std::optional<int64_t>((at->element + (lane + (*stride < 0 ? piece - 1 : 0)) * *stride) * bytes + at->base * kApart)
                               : std::nullopt);
      }
      loads_ = loads_ || (!shared && std::is_same_v<Access, Load>);
      if (!places.empty()) shared ? count_shared(places, piece * bytes, weight) : count_global(s.buffer, places, piece * bytes, weight);
    }
  }

  void count_global(const std::string& buffer, const std::vector<std::optional<int64_t>>& places, int64_t bytes, double weight) {
    std::set<int64_t> sectors;
    double unknown = 0;
    for (const auto& at : places) {
      if (!at) ++unknown;
      for (int64_t b = 0; at && b < bytes; b += std::min(bytes, kSector)) sectors.insert((*at + b) / kSector);
    }
    // Threads that ask for one place are served at once.
    std::set<int64_t> distinct;
    for (const auto& at : places)
      if (at) distinct.insert(*at);
    const double needed = (static_cast<double>(distinct.size()) + unknown) * static_cast<double>(bytes);
    const double asked = weight * needed;
    out_.global_bytes += asked;
    out_.of_buffers[buffer] += asked;
    out_.global_sectors += weight * (static_cast<double>(sectors.size()) + unknown);
    out_.least_sectors += weight * std::ceil(needed / static_cast<double>(kSector));
    out_.global_requests += weight;
    if (bytes == kWidest) out_.wide_bytes += asked;
    issue(1, weight);
  }

  void count_shared(const std::vector<std::optional<int64_t>>& places, int64_t bytes, double weight) {
    // A request of wide accesses is served in parts of 128 bytes.
    const size_t together = static_cast<size_t>(kBanks * kBank / std::max(bytes, kBank));
    for (size_t first = 0; first < places.size(); first += together) {
      std::map<int64_t, std::set<int64_t>> words;
      for (size_t k = first; k < std::min(places.size(), first + together); ++k)
        for (int64_t b = 0; places[k] && b < bytes; b += kBank) words[(*places[k] + b) / kBank % kBanks].insert((*places[k] + b) / kBank);
      size_t ways = 1;
      for (const auto& [bank, distinct] : words) ways = std::max(ways, distinct.size());
      out_.shared_requests += weight;
      issue(1, weight);
      out_.shared_ways += weight * static_cast<double>(ways);
    }
  }

  const Kernel& kernel_;
  std::vector<Integers> threads_;
  std::vector<Integers> unknown_;          ///< of threads: tokens of numbers that memory holds
  std::map<std::string, int64_t> tokens_;  ///< by what a number is made of
  Traffic& out_;
  std::map<std::string, DType> dtypes_;
  std::map<std::string, Space> spaces_;
  std::map<std::string, int> lanes_;
  struct Interval {
    Expr from, upto;
  };
  std::map<std::string, Interval> first_;  ///< lanes of masks
  Integers remainders_;                    ///< values that are remainders by a constant
  double clocks_ = 0;
  bool loads_ = false;  ///< the present turn of the innermost loop loads what has not been waited for
};

}  // namespace

Traffic measure_traffic(const Kernel& kernel, const std::map<std::string, int64_t>& symbols) {
  Integers base = symbols;
  for (const Size& s : kernel.sizes) base[s.name] = evaluate(s.value, symbols);
  auto extent = [&](const std::vector<Expr>& list, size_t d) { return d < list.size() ? evaluate(list[d], base) : 1; };
  const int64_t grid[] = {extent(kernel.grid, 0), extent(kernel.grid, 1), extent(kernel.grid, 2)};
  const int64_t block[] = {extent(kernel.block, 0), extent(kernel.block, 1)};
  const int64_t blocks = grid[0] * grid[1] * grid[2];
  Traffic sum;
  if (blocks == 0) return sum;
  // The last block, which edges cut off, counts once; those before it, spread evenly, for all others.
  std::map<int64_t, double> followed;
  const int64_t others = std::min(kFollowed, blocks - 1);
  for (int64_t k = 0; k < others; ++k)
    followed[k * (blocks - 2) / std::max<int64_t>(1, others - 1)] += static_cast<double>(blocks - 1) / static_cast<double>(others);
  followed[blocks - 1] += 1;
  for (const auto& [b, weight] : followed) {
    Integers at = base;
    at["block_x"] = b % grid[0];
    at["block_y"] = b / grid[0] % grid[1];
    at["block_z"] = b / grid[0] / grid[1];
    std::vector<Integers> warp;
    for (int64_t t = 0; t < block[0] * block[1]; ++t) {
      warp.push_back(at);
      warp.back()["thread_x"] = t % block[0];
      warp.back()["thread_y"] = t / block[0];
      if (warp.size() < kWarp && t + 1 < block[0] * block[1]) continue;
      Warp(kernel, std::move(warp), sum).run(weight);
      warp.clear();
    }
  }
  return sum;
}

}  // namespace deplo
