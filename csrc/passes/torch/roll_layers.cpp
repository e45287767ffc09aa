#include "passes/torch/roll_layers.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_ir/rewrite.h"

namespace deplo {
namespace {

using namespace torch_ir;

constexpr size_t kFewestParts = Rolled::kKept + 2;  // fewer save nothing
constexpr size_t kFewestCalls = 8;                  // of a part
constexpr size_t kWindow = 16;                      // calls by which equal stretches are found
constexpr size_t kMostMultiple = 6;                 // layers of several kinds in turn
constexpr size_t kMostStarts = 4;                   // places in a layer where parts may begin, that are tried

size_t mixed(size_t seed, size_t value) { return seed ^ (value + 0x9e3779b97f4a7c15U + (seed << 6U) + (seed >> 2U)); }

size_t hash_of(const Node& node) {
  size_t hash = std::hash<std::string>{}(node.op);
  for (const Result& r : node.results) hash = mixed(hash, r.type ? r.type->shape.size() * 32 + static_cast<size_t>(r.type->dtype) : 7);
  return mixed(hash, node.arguments.size());
}

/// Equal but for the names of values.
bool are_alike(const Node& a, const Node& b) {
  return a.op == b.op && std::ranges::equal(a.results, b.results, [](const Result& x, const Result& y) { return x.type == y.type; }) &&
         std::ranges::equal(a.arguments, b.arguments,
                            [](const auto& x, const auto& y) { return x.first == y.first && torch_ir::are_alike(x.second, y.second); });
}

bool are_alike(const Input& a, const Input& b) { return a.kind == b.kind && a.is_static == b.is_static && a.type == b.type; }

/// Parts of `length` calls each from `start` on.
struct Stretch {
  size_t start = 0, length = 0, parts = 0;
  size_t end() const { return start + length * parts; }
  size_t saved() const { return parts < kFewestParts ? 0 : (parts - Rolled::kKept) * length; }
};

class Roller {
 public:
  explicit Roller(const Graph& graph) : graph_(graph) {
    for (size_t k = 0; k < graph.inputs.size(); ++k) inputs_.emplace(graph.inputs[k].name, k);
    for (size_t at = 0; at < graph.nodes.size(); ++at) {
      for (const Result& r : graph.nodes[at]->results) definitions_.emplace(r.name, at);
      operands_.emplace_back();
      for (const auto& [name, value] : graph.nodes[at]->arguments)
        for_each_value(value, [&](const std::string& operand) { operands_.back().emplace_back(operand); });
    }
  }

  std::optional<Rolled> run() {
    for (const Run& run : find_runs())
      for (const size_t by : starts(run)) {
        stretch_ = {run.start + by, run.length, (run.calls - by) / run.length};
        if (stretch_.saved() == 0) continue;
        rolled_ = {};
        if (find_parts() && find_tails() && find_writes() && find_outputs() && nothing_else_reads()) return made();
      }
    return std::nullopt;
  }

 private:
  /// The part that a value or an input belongs to, and its place there.
  struct Owner {
    size_t part = 0, place = 0;
    bool is_input = false;
    bool operator<(const Owner& o) const { return std::tie(is_input, place, part) < std::tie(o.is_input, o.place, o.part); }
  };

  const Node& node(size_t at) const { return *graph_.nodes[at]; }

  /// Calls from `start` on of which each is like the one `length` calls later, but for the last `length` of them.
  struct Run {
    size_t start = 0, length = 0, calls = 0;
    size_t saved() const { return Stretch{start, length, length ? calls / length : 0}.saved(); }
  };

  /// Those that save most come first.
  std::vector<Run> find_runs() const {
    const size_t count = graph_.nodes.size();
    if (count < kFewestParts * kFewestCalls) return {};
    std::vector<size_t> hashes;
    for (const auto& n : graph_.nodes) hashes.push_back(hash_of(*n));
    std::unordered_map<size_t, size_t> last;
    std::map<size_t, size_t> distances;
    for (size_t at = 0; at + kWindow <= count; ++at) {
      size_t window = 0;
      for (size_t k = 0; k < kWindow; ++k) window = mixed(window, hashes[at + k]);
      auto [it, is_new] = last.try_emplace(window, at);
      if (!is_new) ++distances[at - std::exchange(it->second, at)];
    }
    size_t usual = 0;
    for (const auto& [distance, times] : distances)
      if (distance >= kFewestCalls && (usual == 0 || times * distance > distances[usual] * usual)) usual = distance;
    std::vector<Run> runs;
    for (size_t multiple = 1; usual > 0 && multiple <= kMostMultiple; ++multiple) {
      const size_t length = usual * multiple;
      Run best;
      for (size_t from = 0, at = 0; at + length <= count; ++at) {
        const bool ends = at + length == count || hashes[at] != hashes[at + length] || !are_alike(node(at), node(at + length));
        if (!ends) continue;
        const Run found{from, length, at + length - from};
        if (found.saved() > best.saved()) best = found;
        from = at + 1;
      }
      if (best.saved() > 0) runs.push_back(best);
    }
    std::ranges::stable_sort(runs, std::greater(), &Run::saved);
    return runs;
  }

  /// Where parts may begin, from the run's start on: where the fewest values go from one to the next.
  std::vector<size_t> starts(const Run& run) const {
    const size_t length = run.length;
    const size_t from = run.start + length;   // what the first part defines may be for all
    std::vector<size_t> passing(length);      // how many values pass each place of a part
    std::unordered_map<size_t, size_t> last;  // where what a call defines is read for the last time
    for (size_t at = from; at < from + 3 * length; ++at)
      for (const std::string_view name : operands_[at])
        if (auto it = definitions_.find(name); it != definitions_.end() && it->second >= from) last[it->second] = at;
    const size_t cut = from + length;
    for (const auto& [defined, read] : last)
      for (size_t by = 0; by < length; ++by) passing[by] += defined < cut + by && read >= cut + by ? 1 : 0;
    std::vector<size_t> order(length);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](size_t by) { return passing[by]; });
    order.resize(std::min(order.size(), kMostStarts));
    return order;
  }

  /// Where a value of the stretch is defined, from its start on; nothing for others.
  std::optional<size_t> place_of(std::string_view name) const {
    auto it = definitions_.find(name);
    if (it == definitions_.end() || it->second < stretch_.start || it->second >= stretch_.end()) return std::nullopt;
    return it->second - stretch_.start;
  }

  size_t result_of(std::string_view name) const {
    const auto& results = node(definitions_.at(name)).results;
    return static_cast<size_t>(std::ranges::find(results, name, &Result::name) - results.begin());
  }

  /// The place of an input among the inputs that a part has for itself.
  bool claim(size_t part, std::string_view name, size_t slot_of_first, size_t& slot) {
    auto [it, is_new] = owners_.try_emplace(name, part, rolled_.own_inputs[part].size());
    if (it->second.first != part) return false;
    if (is_new) rolled_.own_inputs[part].emplace_back(name);
    slot = it->second.second;
    return part == 0 || (slot == slot_of_first && slot < rolled_.own_inputs[0].size() &&
                         are_alike(graph_.inputs[inputs_.at(name)], graph_.inputs[inputs_.at(rolled_.own_inputs[0][slot])]));
  }

  bool find_parts() {
    owners_.clear();
    in_tail_.clear();
    outside_.clear();
    tail_nodes_.clear();
    shared_.clear();
    rolled_.values.resize(stretch_.parts);
    rolled_.own_inputs.resize(stretch_.parts);
    for (size_t part = 0; part < stretch_.parts; ++part)
      for (size_t at = 0; at < stretch_.length; ++at)
        for (const Result& r : node(stretch_.start + part * stretch_.length + at).results) rolled_.values[part].push_back(r.name);
    for (size_t at = 0; at < stretch_.length; ++at) {
      const auto& first = operands_of(0, at);
      const auto& second = operands_of(1, at);
      for (size_t k = 0; k < second.size(); ++k)
        if (!find_operand(first[k], second[k], at, k)) return false;
    }
    return true;
  }

  const std::vector<std::string_view>& operands_of(size_t part, size_t at) const { return operands_[stretch_.start + part * stretch_.length + at]; }

  /// Whether operand k of call `at` is the same in all parts: one value for all, one that lies a part earlier or in the part, or an input of each
  /// part.
  bool find_operand(std::string_view first, std::string_view second, size_t at, size_t k) {
    const size_t length = stretch_.length;
    const auto all = [&](const auto& holds) {
      for (size_t part = 2; part < stretch_.parts; ++part)
        if (!holds(part, operands_of(part, at)[k])) return false;
      return true;
    };
    const auto place = place_of(second);
    if (!place || *place < length) {
      // Not of the second part: the same for all (a value of the first part, too), the first part's for the second, or inputs.
      if (first == second && all([&](size_t, std::string_view name) { return name == second; })) {
        shared_.insert(second);
        return true;
      }
      if (!place) {
        if (!inputs_.contains(first) || !inputs_.contains(second)) return false;
        size_t slot = 0;
        size_t other = 0;
        return claim(0, first, 0, slot) && claim(1, second, slot, other) &&
               all([&](size_t part, std::string_view name) { return inputs_.contains(name) && claim(part, name, slot, other); });
      }
    }
    const bool carried = *place < length;
    const size_t result = result_of(second);
    const auto earlier = place_of(first);
    // What the first part reads of the part before it may be anything that lies before.
    if (carried ? earlier.has_value() : (!earlier || *earlier + length != *place || result_of(first) != result)) return false;
    if (carried && !is_alike_value(first, second)) return false;
    if (carried) shared_.insert(first);
    return all([&](size_t part, std::string_view name) {
      const auto there = place_of(name);
      return there && *there == *place + (part - 1) * length && result_of(name) == result;
    });
  }

  bool is_alike_value(std::string_view first, std::string_view second) const {
    const TensorType* a = type_of(first);
    const TensorType* b = type_of(second);
    return a && b && *a == *b;
  }

  const TensorType* type_of(std::string_view name) const {
    if (auto it = inputs_.find(name); it != inputs_.end()) return &graph_.inputs[it->second].type;
    const Result& result = node(definitions_.at(name)).results[result_of(name)];
    return result.type ? &*result.type : nullptr;
  }

  /// Calls behind all parts that read one of them alone, as those that arrange what a gradient needs do, belong to that part.
  bool find_tails() {
    std::vector<std::vector<size_t>> tails(stretch_.parts);
    for (size_t at = stretch_.end(); at < graph_.nodes.size(); ++at) {
      std::set<size_t> of;
      for (const std::string_view name : operands_[at])
        if (const auto part = part_of(name)) of.insert(*part);
      if (of.empty()) continue;
      const size_t part = *of.rbegin();
      if (part + 1 == stretch_.parts || (part == 0 && of.size() == 1)) {  // what follows from an end of the stretch stays
        for (const Result& r : node(at).results) outside_[r.name] = part;
        continue;
      }
      if (of.size() != 1) return false;
      tails[part].push_back(at);
      tail_nodes_[at] = part;
      for (const Result& r : node(at).results) {
        in_tail_[r.name] = {part, rolled_.values[part].size(), false};
        rolled_.values[part].push_back(r.name);
      }
    }
    for (size_t part = 2; part + 1 < stretch_.parts; ++part) {
      if (tails[part].size() != tails[1].size()) return false;
      for (size_t k = 0; k < tails[1].size(); ++k)
        if (!is_same_tail(tails[1][k], tails[part][k])) return false;
    }
    return true;
  }

  /// The part that a value or an input belongs to, or follows from behind all parts.
  std::optional<size_t> part_of(std::string_view name) const {
    if (auto it = outside_.find(name); it != outside_.end()) return it->second;
    const auto owner = owner_of(name);
    return owner ? std::optional(owner->part) : std::nullopt;
  }

  bool is_same_tail(size_t at, size_t other) const {
    return are_alike(node(at), node(other)) && std::ranges::equal(operands_[at], operands_[other], [&](std::string_view a, std::string_view b) {
             const auto owner = owner_of(a);
             const auto same = owner_of(b);
             return owner && same ? owner->place == same->place && owner->is_input == same->is_input : a == b;
           });
  }

  std::optional<Owner> owner_of(std::string_view name) const {
    if (auto it = owners_.find(name); it != owners_.end()) return Owner{it->second.first, it->second.second, true};
    if (auto it = in_tail_.find(name); it != in_tail_.end()) return it->second;
    const auto place = place_of(name);
    if (!place) return std::nullopt;
    size_t index = result_of(name);
    const size_t part = *place / stretch_.length;
    for (size_t at = part * stretch_.length; at < *place; ++at) index += node(stretch_.start + at).results.size();
    return Owner{part, index, false};
  }

  bool find_outputs() {
    std::map<Owner, size_t> places;  // of outputs in the whole
    std::vector<std::optional<Owner>> owners;
    for (size_t k = 0; k < graph_.outputs.size(); ++k) {
      const auto* value = std::get_if<ValueName>(&graph_.outputs[k].value);
      owners.push_back(value ? owner_of(value->name) : std::nullopt);
      if (owners.back() && !places.emplace(*owners.back(), k).second) return false;
    }
    // What one part inside gives, all others give.
    for (const auto& [owner, k] : places) {
      if (owner.part == 0 || owner.part + 1 == stretch_.parts) continue;
      for (size_t part = 1; part + 1 < stretch_.parts; ++part)
        if (!places.contains({part, owner.place, owner.is_input})) return false;
    }
    std::vector<size_t> numbers(graph_.outputs.size());  // of those that are kept
    for (size_t k = 0; k < graph_.outputs.size(); ++k) {
      numbers[k] = rolled_.graph.outputs.size();
      if (!owners[k] || !rolled_.is_left_out(owners[k]->part)) rolled_.graph.outputs.push_back(graph_.outputs[k]);
    }
    const std::vector<size_t> kept = rolled_.kept();
    for (size_t k = 0; k < graph_.outputs.size(); ++k) {
      Rolled::Output output;
      const auto* value = std::get_if<ValueName>(&graph_.outputs[k].value);
      if (!owners[k]) {
        output.part = value ? part_of(value->name) : std::nullopt;
        output.of_kept[output.part && *output.part != 0 ? kept.size() - 1 : 0] = numbers[k];
      } else {
        output.part = owners[k]->part;
        for (size_t q = 0; q < kept.size(); ++q)
          if (auto it = places.find({kept[q], owners[k]->place, owners[k]->is_input}); it != places.end()) output.of_kept[q] = numbers[it->second];
      }
      rolled_.outputs.push_back(output);
    }
    return true;
  }

  bool find_writes() {
    std::map<std::pair<size_t, size_t>, size_t> slots;  // part and place of a value that is written to an input -> the input's place
    std::vector<std::optional<Owner>> owners;
    for (const Write& write : graph_.writes) {
      const auto owner = owner_of(write.value);
      owners.push_back(owner);
      if (!owner || owner->is_input) {
        if (owners_.contains(write.input) || owner) return false;
        continue;
      }
      auto [it, is_new] = owners_.try_emplace(write.input, owner->part, rolled_.own_inputs[owner->part].size());
      if (it->second.first != owner->part) return false;
      if (is_new) rolled_.own_inputs[owner->part].push_back(write.input);
      if (!slots.emplace(std::pair{owner->part, owner->place}, it->second.second).second) return false;
    }
    for (const auto& [from, slot] : slots)
      for (size_t part = 0; part < stretch_.parts; ++part) {
        auto it = slots.find({part, from.second});
        if (it == slots.end() || it->second != slot) return false;
        if (!are_alike(graph_.inputs[inputs_.at(rolled_.own_inputs[part][slot])], graph_.inputs[inputs_.at(rolled_.own_inputs[0][slot])]))
          return false;
      }
    for (size_t k = 0; k < graph_.writes.size(); ++k)
      if (!owners[k] || !rolled_.is_left_out(owners[k]->part)) rolled_.graph.writes.push_back(graph_.writes[k]);
    return true;
  }

  /// Whether what lies around the parts reads the last of them, or the first, alone, and none of their inputs.
  bool nothing_else_reads() const {
    for (const std::string_view name : shared_)
      if (owners_.contains(name)) return false;
    for (size_t at = 0; at < graph_.nodes.size(); ++at) {
      if ((at >= stretch_.start && at < stretch_.end()) || tail_nodes_.contains(at)) continue;
      for (const std::string_view name : operands_[at]) {
        const auto owner = owner_of(name);
        if (owner && (owner->is_input || (owner->part != 0 && owner->part + 1 != stretch_.parts))) return false;
      }
    }
    return true;
  }

  std::optional<Rolled> made() {
    Graph& made = rolled_.graph;
    made.name = graph_.name;
    made.symbols = graph_.symbols;
    made.facts = graph_.facts;
    made.checks = graph_.checks;
    made.where_location = graph_.where_location;
    made.return_location = graph_.return_location;
    rolled_.inputs = graph_.inputs;
    for (const Input& input : graph_.inputs) {
      auto it = owners_.find(input.name);
      if (it == owners_.end() || !rolled_.is_left_out(it->second.first)) made.inputs.push_back(input);
    }
    // The third part that is kept reads what the second gives.
    Renaming names;
    const size_t third = stretch_.parts - 2;
    for (size_t k = 0; k < rolled_.values[1].size(); ++k) names.emplace(rolled_.values[third - 1][k], rolled_.values[1][k]);
    for (size_t at = 0; at < graph_.nodes.size(); ++at) {
      const auto tail = tail_nodes_.find(at);
      const bool inside = (at >= stretch_.start && at < stretch_.end()) || tail != tail_nodes_.end();
      const size_t part = tail != tail_nodes_.end() ? tail->second : inside ? (at - stretch_.start) / stretch_.length : 0;
      if (inside && rolled_.is_left_out(part)) continue;
      made.nodes.push_back(inside && part == third ? rename_operands(graph_.nodes[at], names) : graph_.nodes[at]);
    }
    return std::move(rolled_);
  }

  template <class V>
  using ByName = std::unordered_map<std::string_view, V>;  // names of the graph

  const Graph& graph_;
  ByName<size_t> inputs_, definitions_;
  std::vector<std::vector<std::string_view>> operands_;  ///< of each call
  Stretch stretch_;
  ByName<std::pair<size_t, size_t>> owners_;  ///< of inputs: part and place
  ByName<Owner> in_tail_;
  ByName<size_t> outside_;                         ///< parts from which follows what is none's
  std::unordered_map<size_t, size_t> tail_nodes_;  ///< their parts
  std::set<std::string_view> shared_;              ///< what all parts read, or the first one instead of a part before it
  Rolled rolled_;
};

}  // namespace

std::optional<torch_ir::Rolled> roll_layers(const torch_ir::Graph& graph) { return Roller(graph).run(); }

}  // namespace deplo
