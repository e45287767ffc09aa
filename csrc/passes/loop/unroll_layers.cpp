#include "passes/loop/unroll_layers.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "loop_ir/structure.h"
#include "program_ir/names.h"
#include "torch_ir/rewrite.h"

namespace deplo {
namespace {

using namespace loop_ir;
using torch_ir::Rolled;

constexpr int kNoPart = -1;
constexpr int kSecond = 1;  // of the parts that are kept
constexpr int kThird = 2;
constexpr int kLast = 3;

class Unroller {
 public:
  Unroller(const Module& module, const Rolled& rolled) : module_(module), rolled_(rolled), buffers_(module) {}

  std::optional<Module> run() {
    if (!module_.facts.empty() || !number_inputs() || !number_steps() || !match_layers()) return std::nullopt;
    name_copies();
    Module made = module_;
    made.buffers = all_buffers();
    made.input_order = all_inputs();
    if (!find_outputs(made)) return std::nullopt;
    for (const bool by_layers : {false, true}) {
      if (by_layers && keeps_its_order()) break;
      made.kernels.clear();
      made.steps.clear();
      made_from_.clear();
      put_steps(made, order_of_steps(by_layers));
      if (is_in_order(made)) return made;
    }
    return std::nullopt;
  }

 private:
  size_t parts() const { return rolled_.parts(); }
  size_t third() const { return parts() - 2; }  ///< its number in the whole
  int part_of(const std::string& buffer) const {
    auto it = part_of_.find(buffer);
    return it == part_of_.end() ? kNoPart : it->second;
  }

  bool number_inputs() {
    if (module_.input_order.size() != rolled_.graph.inputs.size()) return false;
    std::unordered_map<std::string, std::string> by_value;
    for (size_t k = 0; k < module_.input_order.size(); ++k) by_value.emplace(rolled_.graph.inputs[k].name, module_.input_order[k]);
    const std::vector<size_t> kept = rolled_.kept();
    for (size_t k = 0; k < kept.size(); ++k) {
      for (size_t slot = 0; slot < rolled_.own_inputs[kept[k]].size(); ++slot) {
        const std::string& buffer = by_value.at(rolled_.own_inputs[kept[k]][slot]);
        part_of_[buffer] = static_cast<int>(k);
        slots_[buffer] = slot;
        own_[k].push_back(buffer);
      }
      for (size_t j = 0; j < rolled_.values[kept[k]].size(); ++j) {
        const std::string& value = rolled_.values[kept[k]][j];
        values_.emplace(buffer_stem(value), std::pair{static_cast<int>(k), j});
        provenance_.emplace(value.substr(1), std::pair{static_cast<int>(k), j});
      }
    }
    for (size_t slot = 0; slot < own_[kSecond].size(); ++slot) partners_.emplace(own_[kSecond][slot], own_[kThird][slot]);
    return true;
  }

  /// A step with what it reads and writes.
  struct Place {
    int part = kNoPart;
    const Kernel* kernel = nullptr;
    std::vector<std::string> reads, writes;
  };

  std::optional<Place> place_of(const Step& step, const std::unordered_map<std::string, const Kernel*>& kernels) const {
    Place place;
    if (const auto* library = std::get_if<LibraryStep>(&step)) {
      for (const auto& [name, value] : library->arguments)
        torch_ir::for_each_value(value, [&](const std::string& buffer) { place.reads.push_back(buffer); });
      place.writes = library->results;
      return place;
    }
    const auto& call = std::get<CallStep>(step);
    place.kernel = kernels.at(call.kernel);
    for (size_t k = 0; k < call.arguments.size(); ++k) {
      const Param& p = place.kernel->params[k];
      if (p.name != call.arguments[k]) return std::nullopt;
      if (p.kind != ParamKind::out) place.reads.push_back(p.name);
      if (p.kind != ParamKind::in) place.writes.push_back(p.name);
    }
    return place;
  }

  /// A step belongs to the last part of which it reads or writes something, or to that of the value that it makes.
  bool number_steps() {
    std::unordered_map<std::string, const Kernel*> kernels;
    for (const auto& kernel : module_.kernels) kernels.emplace(kernel->name, kernel.get());
    std::set<const Kernel*> called;
    for (const Step& step : module_.steps) {
      auto place = place_of(step, kernels);
      if (!place || (place->kernel && !called.insert(place->kernel).second)) return false;
      for (const auto* names : {&place->reads, &place->writes})
        for (const std::string& name : *names) place->part = std::max(place->part, part_of(name));
      // What draws random numbers may read nothing.
      for (size_t k = 0; place->part == kNoPart && k < place->writes.size(); ++k)
        if (auto value = values_.find(place->writes[k]); value != values_.end()) place->part = value->second.first;
      for (const std::string& name : place->writes) {
        if (buffers_.find(name)->kind == BufferKind::input) continue;
        auto [it, is_new] = part_of_.emplace(name, place->part);
        if (it->second == place->part) continue;
        // Filled by a step before it and by one behind it, neither of which is put elsewhere.
        for (const int part : {it->second, place->part})
          if (part == kSecond || part == kThird) return false;
        it->second = std::max(it->second, place->part);
      }
      for (const std::string& name : place->writes) writers_[name] = places_.size();
      places_.push_back(*std::move(place));
    }
    return true;
  }

  bool match_layers() {
    std::vector<size_t> second;
    std::vector<size_t> third;
    for (size_t at = 0; at < places_.size(); ++at) {
      if (places_[at].part == kSecond) second.push_back(at);
      if (places_[at].part == kThird) third.push_back(at);
      if (places_[at].part == kLast && std::ranges::any_of(places_[at].reads, [&](const auto& name) { return part_of(name) == kSecond; }))
        return false;
    }
    if (second.empty() || second.size() != third.size()) return false;
    for (size_t k = 0; k < second.size(); ++k)
      if (!match_steps(second[k], third[k])) return false;
    for (const auto& [name, partner] : partners_) second_of_.emplace(partner, name);
    return std::ranges::all_of(module_.buffers, [&](const Buffer& b) { return part_of(b.name) != kThird || second_of_.contains(b.name); });
  }

  /// Equal but for the buffers.
  bool are_equal_steps(size_t at, size_t other) const {
    if (module_.steps[at].index() != module_.steps[other].index()) return false;
    const auto* call = std::get_if<CallStep>(&module_.steps[at]);
    if (!call) return match_calls(std::get<LibraryStep>(module_.steps[at]), std::get<LibraryStep>(module_.steps[other]));
    const auto& call_of_other = std::get<CallStep>(module_.steps[other]);
    return call->once == call_of_other.once && call->when == call_of_other.when && call->is_alternative == call_of_other.is_alternative &&
           match_kernels(*places_[at].kernel, *places_[other].kernel);
  }

  bool match_steps(size_t at, size_t other) {
    const Place& a = places_[at];
    const Place& b = places_[other];
    if (!are_equal_steps(at, other) || a.reads.size() != b.reads.size() || a.writes.size() != b.writes.size()) return false;
    for (size_t k = 0; k < a.writes.size(); ++k)
      if (!match_written(a.writes[k], b.writes[k])) return false;
    for (size_t k = 0; k < a.reads.size(); ++k)
      if (!match_read(a.reads[k], b.reads[k])) return false;
    return true;
  }

  static bool match_kernels(const Kernel& a, const Kernel& b) {
    if (a.params.size() != b.params.size() || a.symbols != b.symbols || a.provenance.size() != b.provenance.size()) return false;
    std::vector<std::string> names;
    std::vector<std::string> others;
    if (structure_of(a.body, names) != structure_of(b.body, others) || names.size() != others.size()) return false;
    const std::unordered_map<std::string, std::string> same = [&] {
      std::unordered_map<std::string, std::string> made;
      for (size_t k = 0; k < names.size(); ++k) made.emplace(names[k], others[k]);
      return made;
    }();
    for (size_t k = 0; k < a.params.size(); ++k) {
      Param renamed = a.params[k];
      auto it = same.find(renamed.name);
      renamed.name = it == same.end() ? b.params[k].name : it->second;
      renamed.location = b.params[k].location;
      if (!(renamed == b.params[k])) return false;
    }
    return true;
  }

  static bool match_calls(const LibraryStep& a, const LibraryStep& b) {
    return a.op == b.op && a.reason == b.reason && a.results.size() == b.results.size() &&
           std::ranges::equal(a.arguments, b.arguments,
                              [](const auto& x, const auto& y) { return x.first == y.first && torch_ir::are_alike(x.second, y.second); });
  }

  bool have_same_type(const std::string& a, const std::string& b) const {
    const Buffer& x = *buffers_.find(a);
    const Buffer& y = *buffers_.find(b);
    return x.dtype == y.dtype && x.shape == y.shape && x.strides == y.strides && x.kind == y.kind && x.input_kind == y.input_kind &&
           x.is_static == y.is_static;
  }

  bool match_written(const std::string& a, const std::string& b) {
    if (part_of(a) != kSecond || part_of(b) != kThird || !have_same_type(a, b)) return false;
    return partners_.emplace(a, b).first->second == b;
  }

  bool match_read(const std::string& a, const std::string& b) {
    if (part_of(b) == kThird) {
      auto it = partners_.find(a);
      return it != partners_.end() && it->second == b;
    }
    if (a == b) return part_of(a) != kSecond;
    return part_of(b) == kSecond && is_next(a, b);
  }

  /// Whether b is for its layer what a is for the layer before: inputs at the same place, values at the same place, or what equal steps make of such.
  bool is_next(const std::string& a, const std::string& b) {
    if (a == b) return part_of(a) == kNoPart;
    if (part_of(b) != part_of(a) + 1 || !have_same_type(a, b)) return false;
    const auto slot = slots_.find(a);
    const auto other = slots_.find(b);
    if (slot != slots_.end() || other != slots_.end()) return slot != slots_.end() && other != slots_.end() && slot->second == other->second;
    const auto value = values_.find(a);
    const auto next = values_.find(b);
    if (value != values_.end() && next != values_.end()) return next->second == std::pair{value->second.first + 1, value->second.second};
    auto [known, is_new] = next_.try_emplace({a, b}, false);
    if (is_new) next_[{a, b}] = are_next_steps(writers_.at(a), writers_.at(b), a, b);
    return next_[{a, b}];
  }

  bool are_next_steps(size_t at, size_t other, const std::string& a, const std::string& b) {
    const Place& x = places_[at];
    const Place& y = places_[other];
    if (!are_equal_steps(at, other) || x.reads.size() != y.reads.size() || x.writes.size() != y.writes.size()) return false;
    for (size_t k = 0; k < x.reads.size(); ++k)
      if (!is_next(x.reads[k], y.reads[k])) return false;
    return std::ranges::find(x.writes, a) - x.writes.begin() == std::ranges::find(y.writes, b) - y.writes.begin();
  }

  /// `name`, or with something behind it if a buffer or a symbol has it.
  std::string unused(std::string name) {
    while (!used_.insert(name).second) name += '_';
    return name;
  }

  void name_copies() {
    for (const Buffer& b : module_.buffers) used_.insert(b.name);
    for (const std::string& name : module_.symbol_inputs) used_.insert(name);
    for (const auto& [name, range] : module_.symbols) used_.insert(name);
    // The third layer that is kept was the second one's reader: what is named after its values there is the whole's third's.
    for (const Buffer& b : module_.buffers)
      if (part_of(b.name) == kSecond && b.kind != BufferKind::input)
        if (auto value = values_.find(b.name); value != values_.end() && value->second.first == kThird)
          renamed_[b.name] = unused(buffer_stem(rolled_.values[2][value->second.second]));
    for (const auto& [name, other] : renamed_) used_.erase(name);
    copies_.resize(parts());
    for (size_t part = 2; part < third(); ++part) {
      for (size_t slot = 0; slot < own_[kThird].size(); ++slot)
        copies_[part][own_[kThird][slot]] = unused(buffer_stem(rolled_.own_inputs[part][slot]));
      for (const Buffer& b : module_.buffers)
        if (part_of(b.name) == kThird && b.kind != BufferKind::input) copies_[part][b.name] = unused(name_in(part, b.name));
    }
  }

  /// The name for a buffer of the third layer in another layer: a layer's step may make a value of the next one, or of the one before.
  std::string name_in(size_t part, const std::string& buffer) const {
    auto value = values_.find(buffer);
    if (value == values_.end() || value->second.first < kSecond) return buffer + "_" + std::to_string(part);
    return buffer_stem(rolled_.values[part + static_cast<size_t>(value->second.first) - kThird][value->second.second]);
  }

  std::string renamed(const std::string& buffer) const {
    auto it = renamed_.find(buffer);
    return it == renamed_.end() ? buffer : it->second;
  }

  /// What stands for a buffer of the third layer's steps, if these are to be those of a layer of the whole.
  std::string in_layer(size_t part, const std::string& buffer) const {
    const int of = part_of(buffer);
    if (of == kThird) return part == third() ? buffer : copies_[part].at(buffer);
    if (of != kSecond) return buffer;
    return part == 2 ? renamed(buffer) : copies_[part - 1].at(partners_.at(buffer));
  }

  std::vector<Buffer> all_buffers() const {
    std::unordered_map<std::string, const Buffer*> inputs;  // by value
    for (size_t k = 0; k < module_.input_order.size(); ++k)
      if (const Buffer* b = buffers_.find(module_.input_order[k])) inputs.emplace(rolled_.graph.inputs[k].name, b);
    std::vector<Buffer> all;
    for (const torch_ir::Input& input : rolled_.inputs) {
      if (input.kind == torch_ir::InputKind::symbol) continue;
      auto it = inputs.find(input.name);
      if (it != inputs.end()) {
        all.push_back(*it->second);
        continue;
      }
      const auto [part, slot] = left_out_.at(input.name);
      all.push_back(*buffers_.find(own_[kThird][slot]));
      all.back().name = copies_[part].at(own_[kThird][slot]);
    }
    const std::vector<Buffer>& others = module_.buffers;
    for (size_t at = 0; at < others.size();) {
      size_t end = at;
      while (end < others.size() && part_of(others[end].name) == kThird && others[end].kind != BufferKind::input) ++end;
      for (size_t part = 2; part < third(); ++part)
        for (size_t k = at; k < end; ++k) {
          all.push_back(others[k]);
          all.back().name = copies_[part].at(others[k].name);
        }
      for (end = std::max(end, at + 1); at < end; ++at) {
        if (others[at].kind == BufferKind::input) continue;
        all.push_back(others[at]);
        all.back().name = renamed(others[at].name);
      }
    }
    return all;
  }

  std::vector<std::string> all_inputs() {
    std::unordered_map<std::string, std::string> names;
    for (size_t k = 0; k < module_.input_order.size(); ++k) names.emplace(rolled_.graph.inputs[k].name, module_.input_order[k]);
    std::vector<std::string> order;
    for (const torch_ir::Input& input : rolled_.inputs) {
      auto it = names.find(input.name);
      if (it != names.end()) {
        order.push_back(it->second);
      } else {
        const auto [part, slot] = left_out_.at(input.name);
        order.push_back(copies_[part].at(own_[kThird][slot]));
      }
    }
    return order;
  }

  /// "mm:mm_3 of linear" with the name of the value that another layer has there.
  std::string provenance_in(size_t part, const std::string& from) const {
    const size_t colon = from.find(':');
    if (colon == std::string::npos) return from;
    const size_t end = std::min(from.find(" of ", colon), from.size());
    auto it = provenance_.find(from.substr(colon + 1, end - colon - 1));
    if (it == provenance_.end()) return from;
    const int step = part == 1 ? kSecond : kThird;  // whose provenance it is
    if (it->second.first < kSecond || (step == kSecond && it->second.first == kSecond)) return from;
    const size_t of = part + static_cast<size_t>(it->second.first) - static_cast<size_t>(step);
    return from.substr(0, colon + 1) + rolled_.values[of][it->second.second].substr(1) + from.substr(end);
  }

  void put_step(Module& made, size_t at, std::optional<size_t> part) {
    Step step = module_.steps[at];
    const auto to = [&](const std::string& buffer) { return part ? in_layer(*part, buffer) : renamed(buffer); };
    if (auto* library = std::get_if<LibraryStep>(&step)) {
      torch_ir::Renaming names;
      for (const std::string& buffer : places_[at].reads) names.emplace(buffer, to(buffer));
      for (auto& [name, value] : library->arguments) torch_ir::rename(value, names);
      for (std::string& result : library->results) result = to(result);
    } else {
      auto& call = std::get<CallStep>(step);
      Kernel kernel = *places_[at].kernel;
      std::unordered_map<std::string, std::string> names;
      for (Param& p : kernel.params) {
        const std::string name = to(p.name);
        if (name != p.name) names.emplace(p.name, name);
        p.name = name;
      }
      if (!names.empty()) kernel.body = rename_buffers(kernel.body, names);
      if (part || places_[at].part == kSecond)
        for (std::string& from : kernel.provenance) from = provenance_in(part.value_or(kSecond), from);
      kernel.name = "k" + std::to_string(made.kernels.size());
      call.kernel = kernel.name;
      for (std::string& argument : call.arguments) argument = to(argument);
      made.kernels.push_back(std::make_shared<Kernel>(std::move(kernel)));
    }
    made.steps.push_back(std::move(step));
    made_from_.emplace_back(at, part.value_or(0));
  }

  /// Those of the module, or where steps of several layers take turns and a layer needs all of the one before, all up to the second layer first, then
  /// the third, then the rest.
  std::vector<size_t> order_of_steps(bool by_layers) const {
    std::vector<size_t> order(places_.size());
    std::iota(order.begin(), order.end(), 0);
    if (by_layers) std::ranges::stable_sort(order, {}, [&](size_t at) { return std::max(places_[at].part, kSecond); });
    return order;
  }

  /// Whether another order may show: calls may draw random numbers, and inputs that no layer has for itself be written.
  bool keeps_its_order() const {
    return std::ranges::any_of(places_, [&](const Place& place) {
      const auto is_others = [&](const auto& name) { return part_of(name) == kNoPart && buffers_.find(name)->kind == BufferKind::input; };
      return !place.kernel || std::ranges::any_of(place.writes, is_others);
    });
  }

  /// Copies of neighbouring steps of the third layer come before these.
  void put_steps(Module& made, const std::vector<size_t>& order) {
    for (size_t at = 0; at < order.size();) {
      if (places_[order[at]].part != kThird) {
        put_step(made, order[at++], std::nullopt);
        continue;
      }
      size_t end = at;
      while (end < order.size() && places_[order[end]].part == kThird) ++end;
      // What a program gives of its layers may come in their order or the other way round.
      const auto part_at = [&](size_t k) { return k < order.size() ? places_[order[k]].part : kNoPart; };
      const bool is_falling = part_at(at - 1) != kSecond && (part_at(at - 1) == kLast || part_at(end) == kSecond);
      for (size_t n = 2; n <= third(); ++n)
        for (size_t k = at; k < end; ++k) put_step(made, order[k], is_falling ? third() + 2 - n : n);
      at = end;
    }
  }

  bool find_outputs(Module& made) const {
    made.outputs.clear();
    for (const Rolled::Output& output : rolled_.outputs) {
      const auto given = output_of(output);
      if (!given) return false;
      made.outputs.push_back(*given);
    }
    return true;
  }

  const std::string* buffer_of(std::optional<size_t> output) const {
    const auto* value = output ? std::get_if<ValueName>(&module_.outputs[*output].value) : nullptr;
    return value ? &value->name : nullptr;
  }

  std::optional<Attribute> output_of(const Rolled::Output& output) const {
    const auto unmoved = [&](size_t at) -> std::optional<Attribute> {
      const std::string* buffer = buffer_of(at);
      if (!buffer) return module_.outputs[at];
      if (part_of(*buffer) == kSecond && output.part == 0U) return Attribute{ValueName{renamed(*buffer)}};
      if (part_of(*buffer) == kSecond || part_of(*buffer) == kThird) return std::nullopt;
      return module_.outputs[at];
    };
    if (!output.part) return unmoved(*output.of_kept[0]);
    // A step of a neighbour may make a layer's value: whichever layer's value the third layer's steps make, theirs stand for all others.
    for (size_t k = kSecond; k <= kLast; ++k) {
      const std::string* buffer = buffer_of(output.of_kept[k]);
      if (!buffer || part_of(*buffer) != kThird) continue;
      const size_t layer = *output.part + kThird - k;
      if (layer == 0 || layer > third()) break;
      return Attribute{ValueName{layer == 1 ? renamed(second_of_.at(*buffer)) : in_layer(layer, *buffer)}};
    }
    const std::vector<size_t> kept = rolled_.kept();
    const auto at = std::ranges::find(kept, *output.part);
    return at == kept.end() ? std::nullopt : unmoved(*output.of_kept[static_cast<size_t>(at - kept.begin())]);
  }

  /// Whether all that a step reads of others was written before, as it was in the module.
  bool is_in_order(const Module& made) const {
    std::unordered_map<std::string, size_t> last;  // where a buffer is written for the last time
    std::vector<Place> all;
    for (size_t k = 0; k < made.steps.size(); ++k) {
      const auto [at, part] = made_from_[k];
      Place place = places_[at];
      for (auto* names : {&place.reads, &place.writes})
        for (std::string& name : *names) name = part == 0 ? renamed(name) : in_layer(part, name);
      for (const std::string& name : place.writes) last[name] = k;
      all.push_back(std::move(place));
    }
    std::unordered_map<std::string, std::pair<int, size_t>> owner;  // of a buffer: part that is kept, layer of the whole
    for (size_t k = 0; k < all.size(); ++k)
      for (const std::string& name : all[k].writes) owner.emplace(name, std::pair{all[k].part, made_from_[k].second});
    for (size_t k = 0; k < all.size(); ++k)
      for (const std::string& name : all[k].reads) {
        auto it = owner.find(name);
        if (it != owner.end() && it->second != std::pair{all[k].part, made_from_[k].second} && last.at(name) > k) return false;
      }
    return true;
  }

  const Module& module_;
  const Rolled& rolled_;
  const BufferIndex buffers_;
  std::unordered_map<std::string, int> part_of_;   ///< of buffers: a part that is kept
  std::unordered_map<std::string, size_t> slots_;  ///< of inputs
  std::array<std::vector<std::string>, Rolled::kKept> own_;
  std::unordered_map<std::string, std::pair<int, size_t>> values_;      ///< part that is kept and place of the value that a buffer is named after
  std::unordered_map<std::string, std::pair<int, size_t>> provenance_;  ///< the same by the value's name
  std::unordered_map<std::string, std::pair<size_t, size_t>> left_out_ = [this] {
    std::unordered_map<std::string, std::pair<size_t, size_t>> all;  // by input: part and slot
    for (size_t part = 0; part < parts(); ++part)
      for (size_t slot = 0; slot < rolled_.own_inputs[part].size(); ++slot) all.emplace(rolled_.own_inputs[part][slot], std::pair{part, slot});
    return all;
  }();
  std::vector<Place> places_;
  std::unordered_map<std::string, size_t> writers_;           ///< of buffers: the last step that writes them
  std::map<std::pair<std::string, std::string>, bool> next_;  ///< what is known of two buffers
  std::map<std::string, std::string> partners_;               ///< of the second layer's buffers: the third's
  std::unordered_map<std::string, std::string> second_of_;    ///< the other way round
  std::unordered_map<std::string, std::string> renamed_;      ///< buffers of the second layer
  std::set<std::string> used_;
  std::vector<std::unordered_map<std::string, std::string>> copies_;  ///< of each layer: of the third layer's buffers
  std::vector<std::pair<size_t, size_t>> made_from_;                  ///< of each step: the module's, and the layer or 0
};

}  // namespace

std::optional<loop_ir::Module> unroll_layers(const loop_ir::Module& module, const Rolled& rolled) { return Unroller(module, rolled).run(); }

}  // namespace deplo
