#include "passes/loop/program_graph.h"

#include <algorithm>
#include <optional>
#include <queue>
#include <utility>

#include "base/error.h"
#include "program_ir/facts.h"

namespace deplo {
namespace {

using loop_ir::Kernel;
using loop_ir::Module;
using loop_ir::ParamKind;

void collect_buffers(const Attribute& attribute, FlatSet<std::string>& names) {
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) collect_buffers(item, names);
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) names.insert(value->name);
}

Attribute renamed(const Attribute& attribute, const std::string& from, const std::string& to) {
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) return value->name == from ? Attribute{ValueName{to}} : attribute;
  const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value);
  if (!list) return attribute;
  std::vector<Attribute> items;
  for (const Attribute& item : *list) items.push_back(renamed(item, from, to));
  return {std::move(items)};
}

/// Parameters stand as make_params has them: what is read, then what is written, by first accesses.
bool in_order(const std::vector<loop_ir::Param>& params, const std::vector<loop_ir::Access>& accesses) {
  size_t k = 0;
  for (bool writes : {false, true})
    for (const loop_ir::Access& access : accesses) {
      if (access.writes != writes) continue;
      if (k >= params.size() || params[k].name != access.buffer || (params[k].kind == ParamKind::in) == writes) return false;
      if (writes && access.reads_first && params[k].kind != ParamKind::inout) return false;
      ++k;
    }
  return k == params.size();
}

}  // namespace

ProgramGraph::ProgramGraph(Module module) : module_(std::move(module)) {
  buffers_.reserve(module_.buffers.size());
  writers_.reserve(module_.buffers.size());
  readers_.reserve(module_.buffers.size());
  nodes_.reserve(module_.steps.size());
  for (Buffer& b : module_.buffers) buffers_[b.name] = &b;
  for (const Attribute& output : module_.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value)) returned_.insert(value->name);
  std::unordered_map<std::string, Ref<Kernel>> kernels;
  std::unordered_set<std::string> names;
  for (const auto& kernel : module_.kernels) kernels[kernel->name] = kernel;
  for (const Step& step : module_.steps) {
    Node node;
    node.place = nodes_.size();
    if (const auto* library = std::get_if<LibraryStep>(&step)) {
      node.library = *library;
    } else {
      const auto& call = std::get<CallStep>(step);
      const Kernel& kernel = *kernels.at(call.kernel);
      loop_ir::Renaming renaming;
      for (size_t i = 0; i < kernel.params.size(); ++i) {
        const loop_ir::Param& p = kernel.params[i];
        if (p.name != call.arguments[i]) renaming.buffers[p.name] = call.arguments[i];
        if (p.kind == ParamKind::inout) node.updated.insert(call.arguments[i]);
      }
      const bool renamed = !renaming.buffers.empty();
      node.is_kernel = true;
      node.once = call.once;
      node.body = renamed ? loop_ir::copy_block(kernel.body, renaming, nullptr) : kernel.body;
      node.provenance = kernel.provenance;
      node.name = kernel.name;
      for (int copy = 1; !names.insert(node.name).second; ++copy) node.name = fmt::format("{}_{}", kernel.name, copy);
      const auto accesses = loop_ir::accesses(node.body);
      if (!renamed && in_order(kernel.params, accesses)) node.made = kernels.at(call.kernel);
      nodes_.push_back(std::move(node));
      index_accesses(nodes_.size() - 1, accesses);
      continue;
    }
    nodes_.push_back(std::move(node));
    index_accesses(nodes_.size() - 1, {});
  }
  record_order();
}

void ProgramGraph::index_accesses(size_t at) {
  index_accesses(at, nodes_[at].is_kernel ? loop_ir::accesses(nodes_[at].body) : std::vector<loop_ir::Access>());
}

void ProgramGraph::index_accesses(size_t at, const std::vector<loop_ir::Access>& accesses) {
  Node& node = nodes_[at];
  node.reads.clear();
  node.writes.clear();
  if (node.is_kernel) {
    for (const auto& access : accesses) {
      if (access.reads || node.updated.count(access.buffer)) node.reads.insert(access.buffer);
      if (access.writes) node.writes.insert(access.buffer);
    }
  } else {
    for (const auto& [name, value] : node.library.arguments) collect_buffers(value, node.reads);
    node.writes.insert(node.library.results.begin(), node.library.results.end());
  }
  for (const std::string& b : node.reads) readers_[b].insert(at);
  for (const std::string& b : node.writes) {
    auto& list = writers_[b];
    list.insert(std::lower_bound(list.begin(), list.end(), at), at);
  }
}

void ProgramGraph::forget_accesses(size_t at) {
  for (const std::string& b : nodes_[at].reads) readers_[b].erase(at);
  for (const std::string& b : nodes_[at].writes) {
    auto& list = writers_[b];
    list.erase(std::find(list.begin(), list.end(), at));
  }
}

bool ProgramGraph::may_vanish(const std::string& name) const {
  auto it = buffers_.find(name);
  return it != buffers_.end() && it->second->kind != BufferKind::input && returned_.count(name) == 0 && versioned_.count(name) == 0;
}

bool ProgramGraph::is_private(const std::string& name) {
  auto it = buffers_.find(name);
  if (it == buffers_.end() || it->second->kind == BufferKind::input || returned_.count(name)) return false;
  const auto& written = writers_[name];
  if (written.size() != 1 || !nodes_[written[0]].is_kernel || nodes_[written[0]].updated.count(name)) return false;
  return std::all_of(readers_[name].begin(), readers_[name].end(), [&](size_t r) { return nodes_[r].is_kernel; });
}

void ProgramGraph::set_body(size_t at, loop_ir::Block body) {
  forget_accesses(at);
  nodes_[at].body = std::move(body);
  index_accesses(at);
  keep_order_around(at);
}

void ProgramGraph::join(size_t from, size_t into, loop_ir::Block body) {
  Node& node = nodes_[into];
  const FlatSet<std::string> reads = nodes_[from].reads;
  const FlatSet<std::string> writes = nodes_[from].writes;
  std::vector<std::string> inside = std::move(nodes_[from].inside);
  remove(from);
  node.body = std::move(body);
  for (const std::string& b : reads)
    if (node.reads.insert(b).second) readers_[b].insert(into);
  for (const std::string& b : writes) {
    // What flowed between the two alone is nobody else's to ask for.
    const auto& readers = readers_[b];
    if (writers_[b].empty() && readers.size() == 1 && *readers.begin() == into && !node.writes.count(b) && !nodes_[from].updated.count(b) &&
        may_vanish(b)) {
      readers_[b].clear();
      node.reads.erase(b);
      node.inside.push_back(b);
      continue;
    }
    if (!node.writes.insert(b).second) continue;
    auto& list = writers_[b];
    list.insert(std::lower_bound(list.begin(), list.end(), into), into);
  }
  if (inside.size() > node.inside.size()) std::swap(inside, node.inside);
  node.inside.insert(node.inside.end(), std::make_move_iterator(inside.begin()), std::make_move_iterator(inside.end()));
  keep_order_around(into);
}

void ProgramGraph::rename_buffer(const std::string& from, const std::string& to) {
  loop_ir::Renaming renaming;
  renaming.buffers[from] = to;
  FlatSet<size_t> users = readers_[from];
  users.insert(writers_[from].begin(), writers_[from].end());
  if (versioned_.count(from)) versioned_.insert(to);
  ordered_ = false;
  for (size_t at : users) {
    Node& node = nodes_[at];
    forget_accesses(at);
    if (node.updated.erase(from)) node.updated.insert(to);
    if (node.is_kernel) {
      node.body = loop_ir::copy_block(node.body, renaming, nullptr);
    } else {
      for (auto& [name, value] : node.library.arguments) value = renamed(value, from, to);
      std::replace(node.library.results.begin(), node.library.results.end(), from, to);
    }
    index_accesses(at);
  }
}

std::vector<bool> ProgramGraph::static_nodes() {
  std::vector<bool> result(nodes_.size(), false);
  std::set<std::string> held;
  for (const Buffer& b : module_.buffers)
    if ((b.kind == BufferKind::input && b.is_static && !versioned_.count(b.name)) || b.kind == BufferKind::packed) held.insert(b.name);
  for (bool grew = true; grew;) {
    grew = false;
    for (size_t at = 0; at < nodes_.size(); ++at) {
      const Node& node = nodes_[at];
      if (!node.alive || !node.is_kernel || result[at] || node.writes.empty()) continue;
      bool fits = std::all_of(node.reads.begin(), node.reads.end(), [&](const auto& b) { return held.count(b) > 0 || node.writes.count(b) > 0; }) &&
                  std::all_of(node.writes.begin(), node.writes.end(), [&](const auto& b) { return is_private(b); });
      if (!fits) continue;
      Kernel kernel;
      kernel.body = node.body;
      for (const std::string& b : node.writes) kernel.params.push_back({b, ParamKind::out, DType::f32, buffer(b).shape, buffer(b).strides, false});
      if (!loop_ir::used_symbols(kernel, module_.symbols).empty()) continue;
      result[at] = true;
      grew = true;
      held.insert(node.writes.begin(), node.writes.end());
    }
  }
  return result;
}

void ProgramGraph::set_shape(const std::string& buffer, std::vector<Expr> shape) {
  buffers_.at(buffer)->strides = contiguous_strides(shape);
  buffers_.at(buffer)->shape = std::move(shape);
}

std::string ProgramGraph::add_fact(const std::string& buffer, int64_t lo, int64_t hi) {
  std::string symbol = deplo::add_fact(module_, buffer, lo, hi);
  names_.reserve(symbol);
  return symbol;
}

std::string ProgramGraph::add_buffer(const std::string& hint, DType dtype, std::vector<Expr> shape) {
  std::vector<Buffer>& all = module_.buffers;
  if (!adds_buffers_) {
    for (const Buffer& b : all) names_.reserve(b.name);
    for (const auto& [name, range] : module_.symbols) names_.reserve(name);
    adds_buffers_ = true;
  }
  std::string name = names_.fresh(hint);
  std::vector<Expr> strides = contiguous_strides(shape);
  const Buffer* before = all.data();
  all.push_back({name, dtype, std::move(shape), std::move(strides), BufferKind::temp, torch_ir::InputKind::user, false});
  if (all.data() == before)
    buffers_[name] = &all.back();
  else
    for (Buffer& b : all) buffers_[b.name] = &b;
  return name;
}

size_t ProgramGraph::add_kernel(loop_ir::Block body, size_t like) {
  Node node;
  node.is_kernel = true;
  node.place = nodes_[like].place;
  node.provenance = nodes_[like].provenance;
  node.name = fmt::format("{}_{}", nodes_[like].name, nodes_.size());
  node.body = std::move(body);
  nodes_.push_back(std::move(node));
  index_accesses(nodes_.size() - 1);
  ordered_ = false;
  inherit_order(like, nodes_.size() - 1);
  return nodes_.size() - 1;
}

std::vector<size_t> ProgramGraph::split(size_t at, const std::vector<loop_ir::Block>& bodies) {
  std::vector<size_t> parts;
  for (const loop_ir::Block& body : bodies) {
    parts.push_back(add_kernel(body, at));
    nodes_[parts.back()].updated = nodes_[parts.back()].writes;
    set_body(parts.back(), body);
  }
  const FlatSet<std::string> writes = nodes_[at].writes;
  remove(at);
  ordered_ = false;
  for (const std::string& b : writes) {
    versioned_.insert(b);
    for (size_t r : readers_[b]) {
      if (std::find(parts.begin(), parts.end(), r) != parts.end()) continue;
      for (size_t part : parts) add_order(part, r);
    }
  }
  return parts;
}

void ProgramGraph::add_order(size_t first, size_t second) {
  before_[second].insert(first);
  after_[first].insert(second);
  keep_order(first, second);
}

void ProgramGraph::remove(size_t at) {
  forget_accesses(at);
  nodes_[at].alive = false;
  for (size_t w : edges(after_, at)) before_[w].erase(at);
  for (size_t b : edges(before_, at)) after_[b].erase(at);
  nodes_[at].reads.clear();
  nodes_[at].writes.clear();
  nodes_[at].body.clear();
}

void ProgramGraph::remove_dead() {
  for (size_t at = nodes_.size(); at-- > 0;) {
    const Node& node = nodes_[at];
    if (!node.alive || !node.is_kernel) continue;
    bool live = std::any_of(node.writes.begin(), node.writes.end(), [&](const auto& b) {
      const auto& readers = readers_[b];
      bool read = std::any_of(readers.begin(), readers.end(), [&](size_t r) { return r != at; });
      return read || returned_.count(b) || buffers_.at(b)->kind == BufferKind::input;
    });
    loop_ir::visit(node.body, [&](const loop_ir::Stmt& stmt, const auto&) { live = live || std::holds_alternative<loop_ir::Check>(stmt.node); });
    if (!live) remove(at);
  }
}

void ProgramGraph::merge_provenance(size_t from, size_t into, bool before) {
  auto& target = nodes_[into].provenance;
  std::vector<std::string> added;
  for (const std::string& name : nodes_[from].provenance)
    if (std::find(target.begin(), target.end(), name) == target.end()) added.push_back(name);
  target.insert(before ? target.begin() : target.end(), added.begin(), added.end());
}

void ProgramGraph::record_order() {
  for (const auto& [name, list] : writers_)
    if (list.size() > 1 || (!list.empty() && buffers_.at(name)->kind == BufferKind::input)) versioned_.insert(name);
  auto edge = [&](size_t first, size_t second) {
    if (first == second) return;
    before_[second].insert(first);
    after_[first].insert(second);
  };
  // Random numbers come in the order of the calls.
  std::optional<size_t> last_library;
  for (size_t at = 0; at < nodes_.size(); ++at) {
    if (nodes_[at].is_kernel) continue;
    if (last_library) edge(*last_library, at);
    last_library = at;
  }
  for (const std::string& name : versioned_) {
    for (size_t w : writers_[name]) {
      for (size_t other : writers_[name])
        if (other < w) edge(other, w);
      for (size_t r : readers_[name]) r < w ? edge(r, w) : edge(w, r);
    }
  }
}

template <class F>
void ProgramGraph::for_predecessors(size_t at, const F& f) const {
  for (size_t p : edges(before_, at)) f(p);
  for (const std::string& b : nodes_[at].reads) {
    if (versioned_.count(b)) continue;
    if (auto it = writers_.find(b); it != writers_.end())
      for (size_t w : it->second)
        if (w != at) f(w);
  }
}

template <class F>
void ProgramGraph::for_successors(size_t at, const F& f) const {
  for (size_t s : edges(after_, at)) f(s);
  for (const std::string& b : nodes_[at].writes) {
    if (versioned_.count(b)) continue;
    if (auto it = readers_.find(b); it != readers_.end())
      for (size_t r : it->second)
        if (r != at) f(r);
  }
}

std::set<size_t> ProgramGraph::predecessors(size_t at) {
  std::set<size_t> result;
  for_predecessors(at, [&](size_t p) { result.insert(p); });
  return result;
}

// Kahn's algorithm. Without an order, as while a pass is about to break a circle, every search goes to its end.
void ProgramGraph::find_positions() {
  std::vector<size_t> waiting(nodes_.size(), 0);
  for (size_t at = 0; at < nodes_.size(); ++at) for_predecessors(at, [&](size_t) { ++waiting[at]; });
  std::vector<size_t> ready;
  for (size_t at = 0; at < nodes_.size(); ++at)
    if (waiting[at] == 0) ready.push_back(at);
  for (size_t k = 0; k < ready.size(); ++k)
    for_successors(ready[k], [&](size_t s) {
      if (--waiting[s] == 0) ready.push_back(s);
    });
  ordered_ = ready.size() == nodes_.size();
  positions_.resize(nodes_.size());
  for (size_t k = 0; k < ready.size(); ++k) positions_[ready[k]] = k;
}

// Moves what must follow `second` behind what must precede `first`, within the stretch of positions between the two (Pearce and Kelly).
void ProgramGraph::keep_order(size_t first, size_t second) {
  if (!ordered_ || positions_[first] < positions_[second]) return;
  const size_t lowest = positions_[second];
  const size_t highest = positions_[first];
  std::vector<size_t> behind{second};
  std::vector<size_t> ahead{first};
  std::unordered_set<size_t> seen{first, second};
  for (size_t k = 0; k < behind.size() && ordered_; ++k)
    for_successors(behind[k], [&](size_t s) {
      if (s == first) ordered_ = false;  // a circle
      if (positions_[s] < highest && seen.insert(s).second) behind.push_back(s);
    });
  if (!ordered_) return;
  for (size_t k = 0; k < ahead.size(); ++k)
    for_predecessors(ahead[k], [&](size_t p) {
      if (positions_[p] > lowest && seen.insert(p).second) ahead.push_back(p);
    });
  std::vector<size_t> free;
  for (std::vector<size_t>* part : {&ahead, &behind}) {
    std::sort(part->begin(), part->end(), [&](size_t a, size_t b) { return positions_[a] < positions_[b]; });
    for (size_t at : *part) free.push_back(positions_[at]);
  }
  std::sort(free.begin(), free.end());
  size_t next = 0;
  for (const std::vector<size_t>* part : {&ahead, &behind})
    for (size_t at : *part) positions_[at] = free[next++];
}

void ProgramGraph::keep_order_around(size_t at) {
  if (!ordered_) return;
  std::vector<size_t> found;  // positions change meanwhile
  for_predecessors(at, [&](size_t p) { found.push_back(p); });
  for (size_t p : found) keep_order(p, at);
  found.clear();
  for_successors(at, [&](size_t s) { found.push_back(s); });
  for (size_t s : found) keep_order(at, s);
}

bool ProgramGraph::reaches(size_t from, size_t to, bool skip_direct) {
  if (!ordered_) find_positions();
  auto too_early = [&](size_t at) { return ordered_ && positions_[at] < positions_[from]; };
  if (too_early(to)) return false;
  std::unordered_set<size_t> seen{to};
  std::vector<size_t> work{to};
  bool found = false;
  while (!work.empty() && !found) {
    size_t at = work.back();
    work.pop_back();
    for_predecessors(at, [&](size_t p) {
      if (p == from)
        found = found || !skip_direct || at != to;
      else if (!too_early(p) && seen.insert(p).second)
        work.push_back(p);
    });
  }
  return found;
}

void ProgramGraph::inherit_order(size_t from, size_t into) {
  const FlatSet<size_t> later = edges(after_, from);  // add_order changes them
  const FlatSet<size_t> earlier = edges(before_, from);
  for (size_t w : later)
    if (w != into) add_order(into, w);
  for (size_t b : earlier)
    if (b != into) add_order(b, into);
}

// A kernel that nothing has changed is taken as it was.
Ref<Kernel> ProgramGraph::kernel_of(Node& node, const BufferIndex& buffers, const Ranges& symbols) const {
  auto same_type = [&](const loop_ir::Param& p) {
    const Buffer* b = buffers.find(p.name);
    return b && b->dtype == p.dtype && b->shape == p.shape && b->strides == p.strides && b->is_static == p.is_static &&
           (p.kind == ParamKind::inout) == (node.updated.count(p.name) > 0);
  };
  auto same_body = [](const loop_ir::Block& a, const loop_ir::Block& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
  if (node.made && node.made->name == node.name && same_body(node.made->body, node.body) && node.made->provenance == node.provenance &&
      std::all_of(node.made->params.begin(), node.made->params.end(), same_type) && node.made->symbols == loop_ir::used_symbols(*node.made, symbols))
    return node.made;
  Kernel kernel;
  kernel.name = node.name;
  kernel.body = std::move(node.body);
  kernel.params =
      loop_ir::make_params(kernel.body, [&](const std::string& name) { return buffers.find(name); }, {node.updated.begin(), node.updated.end()});
  kernel.symbols = loop_ir::used_symbols(kernel, symbols);
  kernel.provenance = std::move(node.provenance);
  return std::make_shared<Kernel>(std::move(kernel));
}

Module ProgramGraph::finish() {
  if (module_.name.empty() && nodes_.empty()) return std::move(module_);  // kernels without a program that calls them
  // Kahn's algorithm, first place first, so that the order changes only where it must.
  std::vector<std::vector<size_t>> successors(nodes_.size());
  std::vector<size_t> waiting(nodes_.size(), 0);
  size_t alive = 0;
  for (size_t at = 0; at < nodes_.size(); ++at) {
    if (!nodes_[at].alive) continue;
    ++alive;
    for_predecessors(at, [&](size_t p) {
      successors[p].push_back(at);
      ++waiting[at];
    });
  }
  using Placed = std::pair<size_t, size_t>;  // place and node
  std::priority_queue<Placed, std::vector<Placed>, std::greater<>> ready;
  for (size_t at = 0; at < nodes_.size(); ++at)
    if (nodes_[at].alive && waiting[at] == 0) ready.emplace(nodes_[at].place, at);
  Module result = std::move(module_);
  result.steps.clear();
  result.kernels.clear();
  size_t placed = 0;
  std::unordered_set<std::string> used;
  const BufferIndex buffers(result);
  while (!ready.empty()) {
    const size_t at = ready.top().second;
    ready.pop();
    ++placed;
    Node& node = nodes_[at];
    used.insert(node.reads.begin(), node.reads.end());
    used.insert(node.writes.begin(), node.writes.end());
    if (!node.is_kernel) {
      result.steps.emplace_back(std::move(node.library));
    } else {
      const Ref<Kernel> kernel = kernel_of(node, buffers, result.symbols);
      CallStep call{kernel->name, {}, node.once};
      for (const auto& p : kernel->params) call.arguments.push_back(p.name);
      result.kernels.push_back(kernel);
      result.steps.emplace_back(std::move(call));
    }
    for (size_t next : successors[at])
      if (--waiting[next] == 0) ready.emplace(nodes_[next].place, next);
  }
  DEPLO_ASSERT(placed == alive, "program @{}: the steps depend on each other in a circle", result.name);
  std::erase_if(result.buffers, [&](const Buffer& b) { return b.kind != BufferKind::input && !used.count(b.name) && !returned_.count(b.name); });
  return result;
}

}  // namespace deplo
