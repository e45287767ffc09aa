#include "target/cuda/schedule/nest.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "target/cuda/schedule/scan_readers.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

/// Of one local buffer on a thread's stack.
constexpr int64_t kStackBytes = 1 << 10;
/// Blocks of a grid whose blocks have scratch memory: enough to fill a GPU; each then goes on with further points.
constexpr int64_t kBlocksWithScratch = 512;
constexpr int64_t kMostBlocks = 1 << 20;
constexpr int64_t kOrderedThreads = 64;  ///< of a block whose threads run through long loops: points are few
constexpr int64_t kMostSharers = 64;     ///< threads of a point, each of which looks at all places
constexpr int64_t kSharedTurns = 64;     ///< of a loop worth sharing
constexpr double kPlaceClocks = 150;     ///< of a turn that loads a place, beside others
constexpr double kSumClocks = 600;       ///< of one that adds to memory, which the next one waits for
constexpr double kCores = 132;
constexpr double kTogether = 32;  ///< threads of a warp

Fn combine_fn(Combiner combiner) {
  switch (combiner) {
    case Combiner::sum: return Fn::add;
    case Combiner::prod: return Fn::mul;
    case Combiner::min: return Fn::min;
    case Combiner::max: return Fn::max;
    default: return Fn::constant;
  }
}

/// The first statement behind those that define what a place is made of.
template <class Block>
auto behind(Block& block, Expr place) {
  const auto defines = [&](const auto& stmt) {
    const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    return (let && uses(place, let->name)) || (load && uses(place, load->name));
  };
  return std::find_if(block.rbegin(), block.rend(), defines).base();
}

void collect_reads(const loop_ir::Block& block, std::set<std::string>& buffers) {
  visit_all(block, [&](const loop_ir::Stmt& stmt) {
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) buffers.insert(load->buffer);
  });
}

}  // namespace

GpuNest::GpuNest(const loop_ir::Kernel& kernel) : kernel_(kernel) {
  OuterNest nest = outer_nest(kernel);
  outer_ = nest.axes;
  inner_ = nest.inner;
  names_.reserve(kernel);
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

Schedule GpuNest::propose(bool deterministic) const {
  const std::vector<std::string> ordered = ordered_axes();
  const bool meets = !colliding_stores(kernel_).empty();
  if (meets && !ordered.empty() && adds_in_any_order(deterministic)) return {"gpu_points", {{"threads", {{"", kGpuThreads}}}, {"atomic", {}}}};
  const bool serial = meets && ordered.size() == outer_.size();
  std::string kind = serial ? "gpu_serial" : !meets && shares_rows() ? "gpu_rows" : "gpu_points";
  Schedule s{kind, {{"threads", {{"", serial ? 1 : meets ? kOrderedThreads : kGpuThreads}}}}};
  if (meets && !serial && !ordered.empty()) {
    s.directives.push_back({"order", {}});
    for (const std::string& axis : ordered) s.directives.back().arguments.push_back({axis, {}});
    if (const int64_t sharers = proposed_sharers(ordered); sharers > 1) s.directives.push_back({"share", {{"", sharers}}});
  }
  int64_t shared_bytes = 0;
  if (kind != "gpu_serial" && needs_scratch(*inner_, kind == "gpu_rows" ? Share::together : Share::alone, shared_bytes))
    s.directives.push_back({"blocks", {{"", kBlocksWithScratch}}});
  return s;
}

void GpuNest::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  const std::string& kind = schedule.kind;
  if (kind != "gpu_serial" && kind != "gpu_rows" && kind != "gpu_points")
    reader.fail(
        "unknown kind; a GPU kernel is allowed to be gpu_points, gpu_rows, gpu_contraction, gpu_matrix, gpu_tiles, gpu_online, gpu_chain, "
        "gpu_stencil, gpu_stencils, gpu_taps, gpu_transpose or gpu_serial");
  const std::vector<std::string> ordered = ordered_axes();
  if (!reader.all("order").empty()) {
    const Directive& order = reader.one("order");
    if (kind != "gpu_points") reader.fail(order, "allowed with gpu_points");
    order_ = reader.names(order);
    for (const std::string& axis : order_)
      if (std::none_of(outer_.begin(), outer_.end(), [&](const auto& a) { return a.name == axis; })) reader.fail(order, "allowed: outer axes");
  }
  if (!reader.all("atomic").empty()) {
    const Directive& atomic = reader.one("atomic");
    if (kind != "gpu_points" || !adds_in_any_order(false))
      reader.fail(atomic, "allowed with gpu_points, where all that is stored to what may meet are sums of f32, f64, i32 or i64 that nobody reads");
    atomic_ = true;
  }
  if (kind != "gpu_serial" && !atomic_ && !colliding_stores(kernel_).empty()) {
    const bool orders = std::all_of(ordered.begin(), ordered.end(), [&](const auto& a) { return std::count(order_.begin(), order_.end(), a) > 0; });
    if (kind != "gpu_points" || !orders)
      reader.fail("its stores may meet; allowed: gpu_serial" +
                  (ordered.size() == outer_.size()
                       ? ""
                       : ", or gpu_points with order(" + joined(ordered) + ")" + (adds_in_any_order(false) ? " or atomic" : "")));
  }
  threads_ = read_threads(reader);
  if (kind == "gpu_serial") return reader.finish("threads");
  if (const auto all = reader.all("blocks"); !all.empty()) {
    const Directive& blocks = reader.one("blocks");
    reader.only(blocks, {""});
    blocks_ = reader.number(blocks, "", 1, kMostBlocks);
  }
  if (const auto all = reader.all("share"); !all.empty()) {
    const Directive& share = reader.one("share");
    reader.only(share, {""});
    sharers_ = reader.number(share, "", 1, kMostSharers);
    if (order_.empty() || !shared_place()) reader.fail(share, "allowed with order, where all stores that may meet have one place of loaded values");
  }
  reader.finish("threads, blocks, order, share and atomic");
}

/// Threads for each point, as many as take least: each looks at all places and waits for its own sums, and all ask the caches for places.
int64_t GpuNest::proposed_sharers(const std::vector<std::string>& ordered) const {
  int64_t points = 1;
  int64_t turns = 1;
  for (const loop_ir::Axis& axis : outer_) {
    if (!axis.extent.is_constant()) return 1;
    (std::count(ordered.begin(), ordered.end(), axis.name) ? turns : points) *= axis.extent.value();
  }
  const std::optional<Expr> place = shared_place();
  if (points < 1 || turns < kSharedTurns || !place) return 1;
  std::set<std::string> along;
  for (auto at = inner_->begin(); at != behind(*inner_, *place); ++at)
    if (const auto* load = std::get_if<loop_ir::Load>(&(*at)->node))
      for (Expr e : load->index) collect_symbols(e, along);
  // Points of a warp that have places of their own ask for a sector each.
  const bool apart = std::any_of(outer_.begin(), outer_.end(),
                                 [&](const auto& a) { return along.count(a.name) > 0 && std::count(ordered.begin(), ordered.end(), a.name) == 0; });
  const auto clocks = [&](int64_t sharers) {
    const double warps = std::ceil(static_cast<double>(points * sharers) / kTogether);
    const double sectors = warps * static_cast<double>(turns) * (apart ? kTogether : 1) / kCores;
    return sectors + static_cast<double>(turns) * (kPlaceClocks + kSumClocks / static_cast<double>(sharers));
  };
  int64_t best = 1;
  for (int64_t sharers = 2; sharers <= kMostSharers; sharers *= 2)
    if (clocks(sharers) < clocks(best)) best = sharers;
  return best;
}

/// Whether all that is stored to buffers where stores may meet is added there, by what devices add atomically, and nobody reads it. Sums of integers
/// are the same in any order.
bool GpuNest::adds_in_any_order(bool deterministic) const {
  std::set<std::string> buffers;
  for (const loop_ir::Store* store : colliding_stores(kernel_)) buffers.insert(store->buffer);
  bool adds = !buffers.empty();
  for (const std::string& buffer : buffers) {
    const auto param = std::find_if(kernel_.params.begin(), kernel_.params.end(), [&](const auto& p) { return p.name == buffer; });
    adds = adds && param != kernel_.params.end() && loop_ir::combines_atomically(Combiner::sum, param->dtype) &&
           !(deterministic && is_float(param->dtype));
  }
  visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
    const auto* store = std::get_if<loop_ir::Store>(&stmt.node);
    if (load) adds = adds && buffers.count(load->buffer) == 0;
    if (store) adds = adds && (buffers.count(store->buffer) == 0 || store->combiner == Combiner::sum);
  });
  return adds;
}

/// The index, made of loaded values, of all stores that may meet: threads that share a point take those at places of their own. Nothing where it is
/// another dimension's, where the place takes more than loads and values, or where other places of what is stored are read.
std::optional<Expr> GpuNest::shared_place() const {
  std::set<std::string> values;
  for (const auto& stmt : *inner_)
    if (loop_ir::is_straight(*stmt)) values.insert(loop_ir::name_of(*stmt));
  std::optional<Expr> found;
  std::map<std::string, size_t> dimensions;  // of the place, by buffer
  for (const loop_ir::Store* store : colliding_stores(kernel_)) {
    const auto at_top = [&](const auto& stmt) { return std::get_if<loop_ir::Store>(&stmt->node) == store; };
    if (std::none_of(inner_->begin(), inner_->end(), at_top)) return std::nullopt;
    size_t d = 0;
    while (d < store->index.size() && std::none_of(values.begin(), values.end(), [&](const auto& v) { return uses(store->index[d], v); })) ++d;
    if (d == store->index.size() || (found && *found != store->index[d]) || dimensions.emplace(store->buffer, d).first->second != d)
      return std::nullopt;
    found = store->index[d];
  }
  if (!found) return found;
  const auto first = behind(*inner_, *found);
  bool fits = std::all_of(inner_->begin(), first, [&](const auto& stmt) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    return std::holds_alternative<loop_ir::Check>(stmt->node) || (loop_ir::is_straight(*stmt) && !(load && dimensions.count(load->buffer) > 0));
  });
  visit_all(*inner_, [&](const loop_ir::Stmt& stmt) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
    const auto at = load ? dimensions.find(load->buffer) : dimensions.end();
    fits = fits && (at == dimensions.end() || load->index[at->second] == *found);
  });
  return fits ? found : std::nullopt;
}

/// The statements of a point that follow its place, for the places of one of the threads that share it.
tile_ir::Block GpuNest::of_sharer(tile_ir::Block body, Expr sharer) const {
  const Expr place = substitute(*shared_place(), map_);
  const auto first = behind(body, place);
  tile_ir::Block rest(first, body.end());
  body.erase(first, body.end());
  body.push_back(make(tile_ir::If{{equal(mod(place, sharers_), sharer)}, std::move(rest)}));
  return body;
}

/// The outer axes along which stores may meet: those whose iterations do not each have an index of their own in all that touches what is stored so.
std::vector<std::string> GpuNest::ordered_axes() const {
  std::vector<std::string> ordered;
  const std::vector<const loop_ir::Store*> stores = colliding_stores(kernel_);
  if (stores.empty()) return ordered;
  for (const loop_ir::Axis& axis : outer_) {
    bool apart = separates(axis.name, stores);
    for (const loop_ir::Store* store : stores) {
      size_t d = 0;
      while (d < store->index.size() && !(uses(store->index[d], axis.name) && (store->index[d] - sym(axis.name)).is_constant())) ++d;
      visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
        const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
        const auto* other = std::get_if<loop_ir::Store>(&stmt.node);
        const std::vector<Expr>* index = load && load->buffer == store->buffer     ? &load->index
                                         : other && other->buffer == store->buffer ? &other->index
                                                                                   : nullptr;
        if (index) apart = apart && d < index->size() && (*index)[d] == store->index[d];
      });
    }
    if (!apart) ordered.push_back(axis.name);
  }
  return ordered;
}

bool GpuNest::shares_rows() const {
  bool loops = false;
  for (const auto& stmt : *inner_)
    loops = loops || std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Reduce>(stmt->node);
  if (!loops) return false;
  // A single short reduction per point is cheaper in one thread.
  bool wide = false;
  loop_ir::visit(*inner_, [&](const loop_ir::Stmt& stmt, const std::vector<loop_ir::Axis>& loops) {
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) {
      const Expr n = count(loops) * loop->extent;
      wide = wide || !n.is_constant() || n.value() >= kTogether;
    }
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node)) {
      Expr n = count(reduce->axes);
      wide = wide || !n.is_constant() || n.value() >= 64;
    }
  });
  return wide;
}

Space GpuNest::space_of(const loop_ir::Local& s, Share share, int64_t& shared_bytes) const {
  Expr n = product(s.shape);
  if (!n.is_constant()) return Space::scratch;
  int64_t bytes = n.value() * size_of(s.dtype);
  if (share == Share::alone) return bytes <= kStackBytes ? Space::stack : Space::scratch;
  if (bytes > kSharedBytes - reduction_bytes() - shared_bytes) return Space::scratch;
  shared_bytes += bytes;
  return Space::shared;
}

/// Of shared memory: an element for each thread of every dtype that the block reduces or scans.
int64_t GpuNest::reduction_bytes() const {
  std::set<DType> dtypes;
  for (const auto& stmt : *inner_)
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node))
      dtypes.insert(reduce->dtypes[0]);
    else if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node))
      dtypes.insert(scan->dtypes[0]);
  int64_t bytes = 0;
  for (DType dtype : dtypes) bytes += threads_ * size_of(dtype);
  return bytes;
}

bool GpuNest::needs_scratch(const loop_ir::Block& block, Share share, int64_t& shared_bytes) const {
  bool needs = false;
  for (const auto& stmt : block) {
    auto inside = [&](const loop_ir::Block& body) { needs = needs_scratch(body, Share::alone, shared_bytes) || needs; };
    std::visit(Overloaded{[&](const loop_ir::Local& s) { needs = space_of(s, share, shared_bytes) == Space::scratch || needs; },
                          [&](const loop_ir::For& s) { inside(s.body); }, [&](const loop_ir::Reduce& s) { inside(s.body); },
                          [&](const loop_ir::Scan& s) {
                            inside(s.body);
                            inside(s.then);
                          },
                          [](const auto&) {}},
               stmt->node);
  }
  return needs;
}

// ---- outer axes as one linear index --------------------------------------------------------------------------------

tile_ir::Block GpuNest::apply(const Schedule& schedule) {
  read(schedule);
  return schedule.kind == "gpu_serial" ? serial() : schedule.kind == "gpu_rows" ? rows() : points();
}

/// body(k) for every k below count, spread over the blocks of the grid.
template <class Body>
tile_ir::Block GpuNest::over_blocks(Expr count, const Body& body) {
  if (blocks_ == 0 || (count.is_constant() && count.value() <= blocks_)) return gpu_grid(block_, count, thread_, threads_, body(sym(block_)));
  std::string k = names_.fresh("row");
  tile_ir::Block loop{make(tile_ir::For{axis(k, sym(block_), count, LoopKind::serial, blocks_), body(sym(k))})};
  return gpu_grid(block_, min(count, blocks_), thread_, threads_, std::move(loop));
}

tile_ir::Block GpuNest::points() {
  std::vector<loop_ir::Axis> free;
  std::vector<loop_ir::Axis> ordered;
  for (const loop_ir::Axis& a : outer_) (std::count(order_.begin(), order_.end(), a.name) ? ordered : free).push_back(a);
  const Expr points = count(free);
  const Expr n = points * sharers_;
  return over_blocks(ceildiv(n, threads_), [&](Expr block) {
    Expr linear = block * threads_ + thread();
    map_ = unflatten(free, sharers_ > 1 ? mod(linear, points) : linear);
    tile_ir::Block body = convert(*inner_, Share::alone);
    if (sharers_ > 1) body = of_sharer(std::move(body), floordiv(linear, points));
    for (size_t k = ordered.size(); k-- > 0;)
      body = {make(tile_ir::For{axis(ordered[k].name, 0, ordered[k].extent, LoopKind::serial), std::move(body)})};
    return tile_ir::Block{make(tile_ir::If{{less(linear, n)}, std::move(body)})};
  });
}

tile_ir::Block GpuNest::rows() {
  return over_blocks(count(outer_), [&](Expr row) {
    map_ = unflatten(outer_, row);
    tile_ir::Block body = convert(*inner_, Share::together);
    // The next row reuses the buffers.
    if (!read_.empty()) barrier(body);
    return body;
  });
}

tile_ir::Block GpuNest::serial() {
  tile_ir::Block body{make(tile_ir::If{{equal(thread(), 0)}, convert(kernel_.body, Share::alone)})};
  return gpu_grid(block_, 1, thread_, threads_, std::move(body));
}

// ---- statements ----------------------------------------------------------------------------------------------------

tile_ir::Block GpuNest::convert(const loop_ir::Block& block, Share share) {
  tile_ir::Block out;
  for (const auto& stmt : block) std::visit([&](const auto& s) { lower(s, share, out); }, stmt->node);
  return out;
}

void GpuNest::barrier(tile_ir::Block& out) {
  out.push_back(make(tile_ir::Barrier{}));
  read_.clear();
}

/// What the block is about to write, no thread may still be reading.
void GpuNest::before_writing(const loop_ir::Block& block, tile_ir::Block& out) {
  bool meets = false;
  visit_all(block, [&](const loop_ir::Stmt& stmt) {
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt.node)) meets = meets || read_.count(store->buffer) > 0;
  });
  if (meets) barrier(out);
}

void GpuNest::lower(loop_ir::Let s, Share /*share*/, tile_ir::Block& out) { out.push_back(make(substituted(std::move(s), map_))); }

void GpuNest::lower(loop_ir::Load s, Share share, tile_ir::Block& out) {
  if (share == Share::together) read_.insert(s.buffer);
  s = substituted(std::move(s), map_);
  if (of_thread_.count(s.buffer)) s.index.insert(s.index.begin(), thread());
  out.push_back(make(std::move(s)));
}

void GpuNest::lower(loop_ir::Store s, Share share, tile_ir::Block& out) {
  s.atomic = atomic_ && s.combiner != Combiner::set;
  bool meets = read_.count(s.buffer) > 0;
  s = substituted(std::move(s), map_);
  if (of_thread_.count(s.buffer)) s.index.insert(s.index.begin(), thread());
  if (share == Share::alone) {
    out.push_back(make(std::move(s)));
    return;
  }
  if (meets) barrier(out);
  out.push_back(make(tile_ir::If{{equal(thread(), 0)}, {make(std::move(s))}}));
  barrier(out);
}

void GpuNest::lower(loop_ir::Check s, Share /*share*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

void GpuNest::lower(const loop_ir::Local& s, Share share, tile_ir::Block& out) {
  Space space = space_of(s, share, shared_bytes_);
  std::vector<Expr> shape = s.shape;
  if (space == Space::scratch && share == Share::alone) {
    shape.insert(shape.begin(), threads_);
    of_thread_.insert(s.name);
  }
  out.push_back(make(tile_ir::Alloc{s.name, s.dtype, std::move(shape), space}));
}

void GpuNest::lower(const loop_ir::For& s, Share share, tile_ir::Block& out) {
  if (share == Share::alone) {
    const Expr extent = substitute(s.extent, map_);
    out.push_back(make(tile_ir::For{axis(s.axis, 0, extent, LoopKind::serial), convert(s.body, Share::alone)}));
    return;
  }
  before_writing(s.body, out);
  // Threads share the points of all loops inside of one another, unless what these combine is in their order, or they read what they store.
  bool in_order = false;
  std::set<std::string> loaded;
  collect_reads(s.body, loaded);
  visit_all(s.body, [&](const loop_ir::Stmt& stmt) {
    const auto* store = std::get_if<loop_ir::Store>(&stmt.node);
    in_order = in_order || (store && (store->combiner != Combiner::set || loaded.count(store->buffer) > 0));
  });
  const Flat flat = in_order ? Flat{{{s.axis, s.extent}}, s.body} : flatten(s);
  const tile_ir::Axis shared = share_axes(flat.axes);
  out.push_back(make(tile_ir::For{shared, convert(flat.body, Share::alone)}));
  for (const auto& a : flat.axes) map_.erase(a.name);
  barrier(out);
}

/// The points of axes, one after the other, as one that threads share. Until the axes are taken off the map, their names stand for places along it.
tile_ir::Axis GpuNest::share_axes(const std::vector<loop_ir::Axis>& axes) {
  if (axes.size() == 1) return axis(axes[0].name, thread(), substitute(axes[0].extent, map_), LoopKind::serial, threads_);
  std::vector<loop_ir::Axis> here = axes;
  for (auto& a : here) a.extent = substitute(a.extent, map_);
  const std::string point = names_.fresh("point");
  for (const auto& [name, place] : unflatten(here, sym(point))) map_[name] = place;
  return axis(point, thread(), count(here), LoopKind::serial, threads_);
}

void GpuNest::lower(const loop_ir::Scan& s, Share share, tile_ir::Block& out) {
  if (share == Share::together) before_writing(s.then, out);
  if (share == Share::together && can_share(s)) {
    share_elements(s, out);
    barrier(out);
    return;
  }
  tile_ir::Scan scan{s.results,
                     s.dtypes,
                     s.combiner,
                     s.operands,
                     {axis(s.axis.name, 0, substitute(s.axis.extent, map_))},
                     convert(s.body, Share::alone),
                     convert(s.then, Share::alone)};
  if (share == Share::alone) {
    out.push_back(make(std::move(scan)));
    return;
  }
  out.push_back(make(tile_ir::If{{equal(thread(), 0)}, {make(std::move(scan))}}));
  barrier(out);
}

/// Whether threads may scan parts each: of straight-line statements, of which none reads what another element stores.
bool GpuNest::can_share(const loop_ir::Scan& s) const {
  const bool fits = threads_ % kWarpThreads == 0 && (threads_ & (threads_ - 1)) == 0;
  if (!fits || s.dtypes[0] == DType::boolean || is_product_of_doubles(loop_ir::Stmt{s})) return false;
  std::set<std::string> loaded;
  for (const loop_ir::Block* block : {&s.body, &s.then}) collect_reads(*block, loaded);
  const auto is_simple = [&](const Ref<loop_ir::Stmt>& stmt) {
    const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
    if (store) return store->combiner == Combiner::set && loaded.count(store->buffer) == 0;
    return std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node) ||
           std::holds_alternative<loop_ir::Check>(stmt->node);
  };
  return std::all_of(s.body.begin(), s.body.end(), is_simple) && std::all_of(s.then.begin(), s.then.end(), is_simple);
}

void GpuNest::share_elements(const loop_ir::Scan& s, tile_ir::Block& out) {
  const Expr extent = substitute(s.axis.extent, map_);
  const std::string piece = names_.fresh("c");
  const Expr element = sym(piece) * threads_ + thread();
  const bool whole = extent.is_constant() && extent.value() % threads_ == 0;
  // Threads behind the end take the last element again: nothing that counts follows them.
  map_[s.axis.name] = whole ? element : min(element, extent - 1);
  tile_ir::Scan scan{s.results, s.dtypes, s.combiner, s.operands, {}, convert(s.body, Share::alone), {}};
  map_[s.axis.name] = element;
  scan.then = convert(s.then, Share::alone);
  if (!whole) scan.then = {make(tile_ir::If{{less(element, extent)}, std::move(scan.then)})};
  map_.erase(s.axis.name);
  scan.axes = {axis(piece, 0, ceildiv(extent, threads_), LoopKind::serial), axis(thread_, 0, threads_, LoopKind::thread_x),
               axis(names_.fresh("e"), 0, 1, LoopKind::unroll)};
  out.push_back(make(std::move(scan)));
}

void GpuNest::lower(const loop_ir::Reduce& s, Share share, tile_ir::Block& out) {
  tile_ir::Reduce reduce{s.results, s.dtypes, s.combiner, s.operands, {}, {}};
  Fn fn = combine_fn(s.combiner);
  // Pairs (argmax, Welford, online softmax) are reduced by every thread alike: right, not yet fast.
  if (share == Share::alone || fn == Fn::constant || s.dtypes[0] == DType::boolean) {
    if (share == Share::together) collect_reads(s.body, read_);
    for (const auto& a : s.axes) reduce.axes.push_back(axis(a.name, 0, substitute(a.extent, map_)));
    reduce.body = convert(s.body, Share::alone);
    out.push_back(make(std::move(reduce)));
    return;
  }
  // A long last axis is shared as it is.
  const loop_ir::Axis& last = s.axes.back();
  const bool is_long = !last.extent.is_constant() || last.extent.value() >= threads_;
  for (size_t k = 0; is_long && k + 1 < s.axes.size(); ++k) reduce.axes.push_back(axis(s.axes[k].name, 0, substitute(s.axes[k].extent, map_)));
  reduce.axes.push_back(share_axes(is_long ? std::vector{last} : s.axes));
  reduce.body = convert(s.body, Share::alone);
  for (const auto& a : s.axes) map_.erase(a.name);
  std::string result = s.results[0];
  std::string partial = names_.fresh(result + "_part");
  reduce.results[0] = partial;
  DType dtype = s.dtypes[0];
  std::string shared = shared_for(dtype, out);
  out.push_back(make(std::move(reduce)));
  out.push_back(make(tile_ir::Store{shared, {thread()}, partial, {}, Combiner::set}));
  barrier(out);
  for (int64_t stride = threads_ / 2; stride > 0; stride /= 2) {
    std::string a = names_.fresh("a");
    std::string b = names_.fresh("c");
    std::string c = names_.fresh("d");
    tile_ir::Block step{make(tile_ir::Load{a, dtype, shared, {thread()}, {}, {}}), make(tile_ir::Load{b, dtype, shared, {thread() + stride}, {}, {}}),
                        make(tile_ir::Let{c, dtype, fn, {a, b}, {}, 0}), make(tile_ir::Store{shared, {thread()}, c, {}, Combiner::set})};
    out.push_back(make(tile_ir::If{{less(thread(), stride)}, std::move(step)}));
    barrier(out);
  }
  out.push_back(make(tile_ir::Load{result, dtype, shared, {0}, {}, {}}));
  // The next reduction reuses the array.
  barrier(out);
}

/// The shared array of a dtype, declared where first needed.
std::string GpuNest::shared_for(DType dtype, tile_ir::Block& out) {
  auto [at, added] = arrays_.try_emplace(dtype);
  if (added) {
    at->second = names_.fresh(fmt::format("shared_{}_", to_string(dtype)));
    out.push_back(make(tile_ir::Alloc{at->second, dtype, {threads_}, Space::shared}));
  }
  return at->second;
}

}  // namespace deplo::loop_to_tile
