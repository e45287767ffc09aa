#include "target/cpu/schedule/nest.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "analysis/cost.h"
#include "base/error.h"
#include "base/text.h"
#include "expr/node.h"
#include "loop_ir/build.h"
#include "loop_ir/rewrite.h"
#include "loop_ir/turns.h"
#include "lower/loop_to_tile/masked_keys.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "target/cpu/schedule/columns.h"
#include "target/cpu/schedule/nest_converter.h"
#include "target/cpu/schedule/rows_in_outputs.h"
#include "target/cpu/schedule/scans.h"
#include "target/cpu/schedule/streams.h"
#include "target/cpu/schedule/turned_stores.h"
#include "target/cpu/schedule/windows.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using tile_ir::LoopKind;

constexpr int64_t kChunkOperations = 32768;   // work that pays for waking a thread
constexpr int64_t kLaneBlock = 4096;          // points of a long vector axis that one parallel iteration takes
constexpr int64_t kColumnBlocks = 8;          // of columns: they keep a few threads busy
constexpr double kColumnGain = 0.7;           // lanes on an outer axis must save more accesses than its arrays cost
constexpr double kMostColumnBytes = 8 << 20;  // of arrays for one vector of columns
constexpr int64_t kTransposedBlock = 256;     // points along memory that a transposing nest reads together
constexpr int64_t kTurnedLanes = 256;         // of points that are kept until they are stored along another axis
constexpr int64_t kPage = 4096;               // bytes
constexpr int64_t kFromMemory = 4;            // second caches that are not read again before they are full
constexpr int64_t kRowsAhead = 8;             // that are fetched
constexpr size_t kMostOfParts = 400;          // statements of all parts
constexpr int64_t kMostLaneParts = 6;         // each is a copy of the statements
constexpr int64_t kMostOfPattern = 5;         // vectors for a pattern of lanes

// What a schedule may ask for.
constexpr int64_t kMostTile = int64_t{1} << 40;
constexpr int64_t kMostVectors = 32;
constexpr int64_t kMostColumns = 4096;
constexpr int64_t kMostSide = 64;

class NestScheduler {
 public:
  NestScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx)
      : kernel_(kernel), ctx_(ctx), nest_(outer_nest(kernel)), converter_(kernel, ctx) {}

  Schedule propose() {
    canonical();
    choose();
    return describe();
  }

  bool has_outer_lanes(const Schedule& schedule) {
    canonical();
    return std::any_of(schedule.directives.begin(), schedule.directives.end(), [&](const Directive& d) {
      const std::string name = d.arguments.empty() ? "" : d.arguments[0].name;
      return d.word == "vectorize" && (find(free_, name) || find(ordered_, name));
    });
  }

  tile_ir::Kernel apply(const Schedule& schedule) {
    canonical();
    ScheduleReader reader(kernel_.name, schedule);
    read(reader);
    tile_ir::Kernel out;
    out.name = kernel_.name;
    out.params = kernel_.params;
    out.symbols = kernel_.symbols;
    out.provenance = kernel_.provenance;
    out.body = nest();
    inner_lanes_.finish();
    out.chunks = chunks();
    out.schedule = schedule;
    return out;
  }

 private:
  /// Axes as schedules name them: neighbours that always move together are one.
  void canonical() {
    const auto& colliding = converter_.colliding();
    for (const auto& a : nest_.axes) (colliding.empty() || separates(a.name, colliding) ? free_ : ordered_).push_back(a);
    if (ordered_.empty()) converter_.merge(free_);
    straight_ = NestConverter::is_straight(*nest_.inner);
  }

  // ---- choice ----------------------------------------------------------------------------------------------------

  void choose() {
    if (ordered_.empty()) windows_ = propose_windows(*nest_.inner, free_, kernel_, converter_, ctx_);
    if (windows_) return choose_windows();
    std::string lanes = straight_ || columns() ? converter_.best_lane_axis(free_) : best_column_axis();
    if (straight_ && lanes.empty() && !free_.empty() && ordered_.empty()) lanes = free_.back().name;
    if (const loop_ir::Axis* a = find(free_, lanes)) lane_axis_ = *a;
    for (const auto& a : free_)
      if (a.name != lanes) parallel_.push_back(a.name);
    for (const auto& a : ordered_) serial_.push_back(a.name);
    if (lanes.empty()) {
      converter_.propose_lanes(*nest_.inner, inner_lanes_);
      for (const auto& a : free_)
        if (auto streams = ordered_.empty() ? propose_streams(kernel_, *nest_.inner, a, ctx_) : std::nullopt) {
          streamed_ = a;
          streams_ = streams->count;
          apart_ = streams->apart;
          ahead_ = !streams->apart;
          inner_lanes_.set_vectors(streams->vectors);
        }
      if (streamed_)
        std::stable_partition(parallel_.begin(), parallel_.end(),
                              [&](const std::string& name) { return name == streamed_->name || moves_streams(name); });
      return;
    }
    // A long vector axis is cut into blocks, which join the parallel axes.
    int64_t vector = ctx_.target.vector_bytes / 4;
    in_flight_ = straight_ ? vectors_of_a_pattern() : holds_loops() ? vectors_of_columns() : column_vectors(ctx_);
    std::vector<loop_ir::Axis> others = free_;
    std::erase_if(others, [&](const auto& a) { return a.name == lanes; });
    const loop_ir::Axis* along = straight_ && ordered_.empty() ? converter_.transposed_axis(others, lanes) : nullptr;
    if (along && converter_.hint(along->extent) >= vector && converter_.hint(lane_axis_->extent) >= vector) {
      transposed_ = *along;
      transposed_tile_ = kTransposedBlock;
      side_ = vector;
      std::erase(parallel_, along->name);
      parallel_.push_back(along->name);
    }
    const loop_ir::Axis* across =
        straight_ && ordered_.empty() && !transposed_ ? turned_axis(*nest_.inner, free_, lanes, kernel_, converter_) : nullptr;
    if (across && converter_.hint(across->extent) >= vector && converter_.hint(lane_axis_->extent) >= vector) {
      turned_ = *across;
      points_ = vector;
    }
    int64_t tile = transposed_ ? vector : turned_ ? kTurnedLanes : straight_ ? kLaneBlock : vector * in_flight_;
    if (!ordered_.empty()) return;
    if (converter_.hint(lane_axis_->extent) <= tile && ((!holds_loops() && !turned_) || lane_axis_->extent.is_constant())) return;
    lane_tile_ = tile;
    parallel_.push_back(lanes);
  }

  /// Whether sums of other points of the axis read other streams. What does not is innermost: a stream comes from memory once for all of it.
  bool moves_streams(const std::string& axis) const {
    bool moves = false;
    for (const auto& stmt : *nest_.inner) {
      const auto* sum = std::get_if<loop_ir::Reduce>(&stmt->node);
      if (!sum) continue;
      for (const auto& inner : sum->body) {
        const auto* load = std::get_if<loop_ir::Load>(&inner->node);
        if (!load) continue;
        const Expr at = converter_.offset(load->buffer, load->index);
        moves = moves || (uses(at, streamed_->name) && uses(at, axis));
      }
    }
    return moves;
  }

  /// So many that quotients and rests of the lane by odd numbers (the phases of a stride of three) go the same way in all trips.
  int64_t vectors_of_a_pattern() const {
    int64_t vectors = 1;
    const auto look = [&](Expr e, const auto& self) -> void {
      if (e.is_constant() || e.is_symbol() || !uses(e, lane_axis_->name)) return;
      const bool divides = e.kind() == ExprKind::floordiv || e.kind() == ExprKind::mod;
      if (divides && e.operands()[1].is_constant() && e.operands()[1].value() % 2 == 1) vectors = std::lcm(vectors, e.operands()[1].value());
      for (const Expr& operand : e.operands()) self(operand, self);
    };
    for (const auto& stmt : *nest_.inner)
      if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node))
        for (const Expr& e : load->index) look(e, look);
    return vectors <= kMostOfPattern ? vectors : 1;
  }

  void choose_windows() {
    lane_axis_ = *find(free_, windows_->lanes);
    in_flight_ = windows_->vectors;
    if (windows_->lane_tile != 0) parallel_.push_back(windows_->lanes);
    for (const auto& a : free_)
      if (a.name != windows_->lanes && (a.name != windows_->axis || windows_->tile != 0)) parallel_.push_back(a.name);
    lane_tile_ = windows_->lane_tile;
  }

  static const loop_ir::Axis* find(const std::vector<loop_ir::Axis>& axes, const std::string& name) {
    for (const auto& a : axes)
      if (a.name == name) return &a;
    return nullptr;
  }

  /// Reductions whose memory runs along an outer axis, or that are too short for lanes: an outer axis gets the lanes and each lane reduces its own
  /// column.
  bool columns() const {
    double outer = 0;
    double inner = 0;
    if (holds_loops()) return false;
    for (const auto& a : nest_.axes) outer = std::max(outer, converter_.lane_score(a, true));
    visit_all(*nest_.inner, [&](const loop_ir::Stmt& stmt) {
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node)) inner = std::max(inner, converter_.reduce_score(*reduce));
    });
    return outer > inner || converter_.short_windows(free_, *nest_.inner);
  }

  /// An axis along which the memory of inner loops runs, if most does and these can run in columns.
  std::string best_column_axis() const {
    if (!holds_loops() || !ordered_.empty() || !runs_in_columns(*nest_.inner)) return "";
    const int64_t vector = ctx_.target.vector_bytes / 4;
    if (bytes_of_column(*nest_.inner, converter_) * static_cast<double>(vector) > kMostColumnBytes) return "";
    std::string best;
    double least = kColumnGain * access_cost(*nest_.inner, "", converter_, ctx_);
    for (const auto& a : free_) {
      const double cost = access_cost(*nest_.inner, a.name, converter_, ctx_);
      if (converter_.hint(a.extent) < vector || cost >= least) continue;
      least = cost;
      best = a.name;
    }
    return best;
  }

  /// As many as leave blocks for some threads, and arrays that stay in the second-level cache.
  int64_t vectors_of_columns() const {
    const int64_t vector = ctx_.target.vector_bytes / 4;
    int64_t others = 1;
    for (const auto& a : free_)
      if (a.name != lane_axis_->name) others *= std::max<int64_t>(1, converter_.hint(a.extent));
    const int64_t extent = converter_.hint(lane_axis_->extent);
    const double bytes = bytes_of_column(*nest_.inner, converter_) * static_cast<double>(vector);
    int64_t count = column_vectors(ctx_);
    while (count > 1 && (others * ((extent + vector * count - 1) / (vector * count)) < kColumnBlocks ||
                         bytes * static_cast<double>(count) > static_cast<double>(ctx_.target.l2_bytes) / 2))
      count /= 2;
    return count;
  }

  /// Loops inside that are no reductions, or arrays.
  bool holds_loops() const {
    return std::any_of(nest_.inner->begin(), nest_.inner->end(), [](const auto& s) {
      return std::holds_alternative<loop_ir::For>(s->node) || std::holds_alternative<loop_ir::Scan>(s->node) ||
             std::holds_alternative<loop_ir::Local>(s->node);
    });
  }

  // ---- the schedule as data --------------------------------------------------------------------------------------

  Schedule describe() const {
    Schedule s{"nest", {}};
    auto add = [&](const char* word, std::vector<Argument> arguments) { s.directives.push_back({word, std::move(arguments)}); };
    std::vector<Argument> arguments;
    for (const std::string& name : parallel_) arguments.push_back({name, {}});
    arguments.push_back({"work", chunk_work_});
    add("parallel", arguments);
    arguments.clear();
    for (const std::string& name : serial_) arguments.push_back({name, {}});
    if (!arguments.empty()) add("reorder", arguments);
    if (transposed_) {
      add("tile", {{transposed_->name, transposed_tile_}});
      add("transpose", {{transposed_->name, side_}});
    }
    if (turned_) add("turn", {{turned_->name, points_}});
    if (lane_tile_ != 0) add("tile", {{lane_axis_->name, lane_tile_}});
    if (windows_ && windows_->tile != 0) add("tile", {{windows_->axis, windows_->tile}});
    if (windows_) add("window", {{windows_->axis, windows_->points}});
    if (streamed_) {
      arguments = {{streamed_->name, streams_}};
      if (apart_) arguments.push_back({"apart", 1});
      if (!ahead_) arguments.push_back({"ahead", 0});
      add("register_block", arguments);
    }
    if (lane_axis_) {
      arguments = {{lane_axis_->name, {}}};
      if (in_flight_ != 1) arguments.push_back({"by", in_flight_});
      add("vectorize", arguments);
    }
    for (Directive& d : inner_lanes_.describe()) s.directives.push_back(std::move(d));
    return s;
  }

  void read(ScheduleReader& reader) {
    std::vector<std::string> known;
    for (const auto& a : free_) known.push_back(a.name);
    for (const auto& a : ordered_) known.push_back(a.name);
    read_lanes(reader);
    read_transpose(reader);
    read_turned(reader);
    read_streams(reader);
    read_windows(reader);
    const Directive& parallel = reader.one("parallel");
    parallel_ = reader.names(parallel);
    for (const std::string& name : parallel_) {
      if (find(ordered_, name)) reader.fail(parallel, fmt::format("{} runs in order, its stores may meet; allowed: reorder({})", name, name));
      if (!find(free_, name)) reader.fail(parallel, fmt::format("there is no axis {}; allowed: {}", name, joined(known)));
      if (lane_axis_ && name == lane_axis_->name && lane_tile_ == 0)
        reader.fail(parallel, fmt::format("{} has the lanes; allowed: its tiles, with tile({}=...)", name, name));
    }
    std::set<std::string> arguments(parallel_.begin(), parallel_.end());
    arguments.insert("work");
    reader.only(parallel, arguments);
    chunk_work_ = reader.number(parallel, "work", 1, kMostTile);
    read_order(reader, known);
    for (const auto& a : free_) {
      bool taken = arguments.count(a.name) > 0 || std::count(serial_.begin(), serial_.end(), a.name) > 0;
      bool windows = windows_ && a.name == windows_->axis;
      bool tiled = (transposed_ && a.name == transposed_->name) || (turned_ && a.name == turned_->name) ||
                   (lane_axis_ && a.name == lane_axis_->name && lane_tile_ != 0) || (streamed_ && a.name == streamed_->name) ||
                   (windows && windows_->tile != 0);
      bool inside = (lane_axis_ && a.name == lane_axis_->name) || windows;
      if (windows && !tiled && taken)
        reader.fail(parallel, fmt::format("{} is the axis of the windows; allowed: its tiles, with tile({}=...)", a.name, a.name));
      if ((tiled && !arguments.count(a.name)) || (!taken && !inside)) reader.fail(parallel, fmt::format("{} is missing", a.name));
    }
    reader.finish(fmt::format(
        "parallel, reorder, tile of the axis with the lanes or windows, register_block, window, transpose, turn and vectorize, over the axes {}",
        joined(known)));
  }

  void read_lanes(ScheduleReader& reader) {
    std::string lanes;
    for (const Directive* d : reader.all("vectorize")) {
      std::vector<std::string> names = reader.names(*d);
      bool outer = names.size() == 1 && (find(free_, names[0]) || find(ordered_, names[0]));
      if (!outer) continue;
      if (lane_axis_) reader.fail(*d, fmt::format("{} has the lanes already", lane_axis_->name));
      if (find(ordered_, names[0])) reader.fail(*d, fmt::format("{} runs in order, its stores may meet", names[0]));
      if (holds_loops() && !(ordered_.empty() && runs_in_columns(*nest_.inner)))
        reader.fail(*d, "there are loops inside that do not run in columns; allowed: lanes on their axes");
      lane_axis_ = *find(free_, names[0]);
      lanes = names[0];
      reader.only(*d, {lanes, "by"});
      in_flight_ = reader.number(*d, "by", 1, kMostVectors, 1);
    }
    inner_lanes_ = InnerLanes::read(reader, lanes);
    if (lanes.empty()) return;
    if (const Directive* d = reader.find("tile", lanes)) {
      reader.only(*d, {lanes});
      lane_tile_ = reader.number(*d, lanes, 1, holds_loops() ? kMostColumns : kMostTile);
    }
    if (holds_loops() && lane_tile_ == 0 && !(lane_axis_->extent.is_constant() && lane_axis_->extent.value() <= kMostColumns))
      reader.fail(fmt::format("columns along {} need 'tile({}=N)', N from 1 to {}", lanes, lanes, kMostColumns));
  }

  void read_transpose(ScheduleReader& reader) {
    auto all = reader.all("transpose");
    if (all.empty()) return;
    const Directive& d = reader.one("transpose");
    std::string name = d.arguments.empty() ? "" : d.arguments[0].name;
    const loop_ir::Axis* along = find(free_, name);
    if (!along || !straight_ || !lane_axis_ || lane_axis_->name == name)
      reader.fail(d, "it takes one parallel axis of a nest of straight-line statements whose lanes are on another axis");
    reader.only(d, {name});
    transposed_ = *along;
    side_ = reader.number(d, name, 1, kMostSide);
    const Directive* tile = reader.find("tile", name);
    if (!tile) reader.fail(d, fmt::format("it needs 'tile({}=...)'", name));
    reader.only(*tile, {name});
    transposed_tile_ = reader.number(*tile, name, 1, kMostTile);
  }

  void read_turned(ScheduleReader& reader) {
    if (reader.all("turn").empty()) return;
    const Directive& d = reader.one("turn");
    const std::string name = d.arguments.empty() ? "" : d.arguments[0].name;
    const loop_ir::Axis* along = straight_ && ordered_.empty() && lane_axis_ && !transposed_
                                     ? turned_axis(*nest_.inner, free_, lane_axis_->name, kernel_, converter_)
                                     : nullptr;
    if (!along || along->name != name)
      reader.fail(d, "it takes the axis along which all results of straight-line statements lie, with the lanes on another axis");
    reader.only(d, {name});
    turned_ = *along;
    points_ = reader.number(d, name, 1, kMostSide);
    if (lane_tile_ > kMostColumns || (lane_tile_ == 0 && !(lane_axis_->extent.is_constant() && lane_axis_->extent.value() <= kMostColumns)))
      reader.fail(fmt::format("what is stored along {} needs 'tile({}=N)', N from 1 to {}", name, lane_axis_->name, kMostColumns));
  }

  void read_streams(ScheduleReader& reader) {
    if (reader.all("register_block").empty()) return;
    const Directive& d = reader.one("register_block");
    std::string name = d.arguments.empty() ? "" : d.arguments[0].name;
    const loop_ir::Axis* along = find(free_, name);
    if (!along || lane_axis_ || !ordered_.empty() || !can_stream(*nest_.inner, *along))
      reader.fail(
          d, "it takes one parallel axis of a nest of float32 sums over the same axes, with the lanes on the last, and straight-line statements");
    reader.only(d, {name, "apart", "ahead"});
    streamed_ = *along;
    streams_ = reader.number(d, name, 1, kMostSide);
    apart_ = reader.number(d, "apart", 0, 1, 0) != 0;
    ahead_ = reader.number(d, "ahead", 0, 1, 1) != 0;
  }

  void read_windows(ScheduleReader& reader) {
    if (reader.all("window").empty()) return;
    const Directive& d = reader.one("window");
    std::string name = d.arguments.empty() ? "" : d.arguments[0].name;
    const bool other = lane_axis_ && lane_axis_->name != name && !transposed_;
    const bool cut = other && lane_tile_ != 0 && !can_cut_lanes(*nest_.inner, free_, lane_axis_->name, kernel_, converter_);
    if (!find(free_, name) || !other || cut || !ordered_.empty() || !has_windows(*nest_.inner))
      reader.fail(d,
                  "it takes one parallel axis of a nest of sums, minima or maxima over few points, with the lanes on another axis, and straight-line "
                  "statements");
    reader.only(d, {name});
    windows_ = Windows{name, reader.number(d, name, 1, kMostSide), 0, lane_axis_->name, in_flight_, lane_tile_};
    if (const Directive* tile = reader.find("tile", name)) {
      reader.only(*tile, {name});
      windows_->tile = reader.number(*tile, name, 1, kMostTile);
    }
  }

  /// Axes that run in order keep theirs; others may be put among them.
  void read_order(ScheduleReader& reader, const std::vector<std::string>& known) {
    auto all = reader.all("reorder");
    std::vector<std::string> kept;
    if (!all.empty()) {
      const Directive& d = reader.one("reorder");
      serial_ = reader.names(d);
      reader.only(d, {serial_.begin(), serial_.end()});
      for (const std::string& name : serial_) {
        if (find(ordered_, name)) kept.push_back(name);
        bool taken = std::count(parallel_.begin(), parallel_.end(), name) > 0 || (lane_axis_ && lane_axis_->name == name);
        if ((!find(free_, name) && !find(ordered_, name)) || taken)
          reader.fail(d, fmt::format("{} is no axis that is neither parallel nor has the lanes; the axes: {}", name, joined(known)));
      }
    }
    std::vector<std::string> wanted;
    for (const auto& a : ordered_) wanted.push_back(a.name);
    if (kept != wanted) reader.fail(fmt::format("stores may meet along {}: allowed: 'reorder' with these in this order", joined(wanted)));
  }

  // ---- building --------------------------------------------------------------------------------------------------

  tile_ir::Block nest() {
    std::vector<loop_ir::Axis> free;
    for (const std::string& name : parallel_) {
      const loop_ir::Axis& a = *find(free_, name);
      bool lanes = lane_axis_ && name == lane_axis_->name;
      bool streamed = streamed_ && name == streamed_->name;
      bool windows = windows_ && name == windows_->axis;
      bool turned = turned_ && name == turned_->name;
      if (!lanes && !streamed && !windows && !turned && !(transposed_ && name == transposed_->name))
        free.push_back(a);
      else
        free.push_back({name + "_block", ceildiv(a.extent, lanes      ? lane_tile_
                                                           : streamed ? streams_
                                                           : windows  ? windows_->tile
                                                           : turned   ? points_
                                                                      : transposed_tile_)});
    }
    Substitution outer = unflatten(free, sym("par"));
    Substitution& map = converter_.map();
    for (auto& [name, value] : map) value = substitute(value, outer);
    for (const auto& [name, value] : outer) map.emplace(name, value);

    const Expr lo = lane_tile_ != 0 ? outer.at(lane_axis_->name + "_block") * lane_tile_ : Expr(0);
    const Expr hi = !lane_axis_ ? Expr(0) : lane_tile_ != 0 ? min(lane_axis_->extent, lo + lane_tile_) : lane_axis_->extent;
    auto in_lanes = [&](tile_ir::Block body) -> tile_ir::Block {
      if (!lane_axis_) return body;
      return {make(tile_ir::For{axis(lane_axis_->name, lo, hi, LoopKind::lanes, 1, in_flight_), std::move(body)})};
    };
    tile_ir::Block body;
    if (streamed_) {
      const Expr block = outer.at(streamed_->name + "_block");
      const Expr apart = apart_ ? ceildiv(streamed_->extent, streams_) : Expr(1);
      body = stream_sums(*nest_.inner, *streamed_, {apart_ ? block : block * streams_, apart, streams_, ahead_}, ctx_, converter_, inner_lanes_);
    } else if (windows_) {
      const Expr extent = find(free_, windows_->axis)->extent;
      const Expr from = windows_->tile != 0 ? outer.at(windows_->axis + "_block") * windows_->tile : Expr(0);
      const Expr to = windows_->tile != 0 ? min(extent, from + windows_->tile) : extent;
      body = run_windows(*nest_.inner, free_, *windows_, {from, to}, {lo, hi}, kernel_, ctx_, converter_, inner_lanes_);
    } else if (turned_) {
      const Expr first = outer.at(turned_->name + "_block") * points_;
      const int64_t capacity = lane_tile_ != 0 ? lane_tile_ : lane_axis_->extent.value();
      const TurnedStores turned{*lane_axis_, lo, hi, capacity, *turned_, first, min(points_, turned_->extent - first), points_, in_flight_};
      body = turn_stores(*nest_.inner, turned, map, kernel_, ctx_);
    } else if (lane_axis_ && holds_loops()) {
      const int64_t capacity = lane_tile_ != 0 ? lane_tile_ : lane_axis_->extent.value();
      body = run_columns(kernel_, *nest_.inner, {*lane_axis_, lo, hi, capacity, in_flight_}, map, ctx_, inner_lanes_);
    } else if (const auto parts = parts_of_lanes(); !parts.empty()) {
      for (const auto& [from, to, part] : parts)
        body.push_back(make(tile_ir::For{axis(lane_axis_->name, max(lo, from), min(hi, to), LoopKind::lanes, 1, in_flight_),
                                         converter_.convert(part, false, inner_lanes_)}));
    } else if (!transposed_) {
      body = in_lanes(fetching_ahead(converter_.convert(*nest_.inner, !lane_axis_, inner_lanes_)));
    } else {
      Expr first = outer.at(transposed_->name + "_block") * transposed_tile_;
      body = squares(*transposed_, first, min(transposed_tile_, transposed_->extent - first), side_, in_lanes);
    }
    for (size_t i = serial_.size(); i-- > 0;) {
      const loop_ir::Axis* ordered = find(ordered_, serial_[i]);
      const loop_ir::Axis& a = ordered ? *ordered : *find(free_, serial_[i]);
      body = {make(tile_ir::For{axis(a.name, 0, a.extent), std::move(body)})};
    }
    parallel_extent_ = count(free);
    return {make(tile_ir::For{axis("par", 0, parallel_extent_, LoopKind::parallel), std::move(body)})};
  }

  /// Reductions down columns of what comes from memory, whose every step is in another page: rows further on are fetched, which hardware does not.
  tile_ir::Block fetching_ahead(tile_ir::Block body) const {
    if (!lane_axis_ || in_flight_ == 1) return body;
    for (auto& stmt : body) {
      const auto* from = std::get_if<tile_ir::Reduce>(&stmt->node);
      if (!from || from->axes.size() != 1) continue;
      tile_ir::Reduce reduce = *from;
      tile_ir::Block ahead;
      for (const auto& s : reduce.body) {
        const auto* load = std::get_if<loop_ir::Load>(&s->node);
        if (!load || !load->guard.empty() || !kernel_.find_param(load->buffer)) continue;
        const Expr offset = converter_.offset(load->buffer, load->index);
        const auto down = linear_coefficient(offset, reduce.axes[0].name);
        const auto along = linear_coefficient(offset, lane_axis_->name);
        const int64_t bytes = size_of(load->dtype);
        if (!down || !along || !along->is(1) || converter_.hint(*down) * bytes < kPage) continue;
        if (converter_.hint(*down) * converter_.hint(reduce.axes[0].hi) * bytes < kFromMemory * ctx_.target.l2_bytes) continue;
        std::vector<Expr> index;
        for (Expr e : load->index) index.push_back(substitute(e, {{reduce.axes[0].name, sym(reduce.axes[0].name) + kRowsAhead}}));
        ahead.push_back(make(tile_ir::Prefetch{load->buffer, std::move(index), 1}));
      }
      if (ahead.empty()) continue;
      reduce.body.insert(reduce.body.begin(), ahead.begin(), ahead.end());
      stmt = make(std::move(reduce));
    }
    return body;
  }

  /// Points of the axis with the lanes, and the statements for them.
  struct LanePart {
    Expr from, to;
    loop_ir::Block body;
  };

  /// Where statements choose among what they load, or its places, by where a lane is (what mirrors an image at its border, or stops there), lanes in
  /// parts that need not choose.
  std::vector<LanePart> parts_of_lanes() const {
    if (!lane_axis_ || !straight_ || transposed_ || !ordered_.empty()) return {};
    const auto chosen = std::count_if(nest_.inner->begin(), nest_.inner->end(), [&](const auto& stmt) {
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      return load && std::any_of(load->guard.begin(), load->guard.end(), [&](const Cond& c) { return uses(c.expr, lane_axis_->name); });
    });
    const bool moves = std::any_of(nest_.inner->begin(), nest_.inner->end(), [&](const auto& stmt) {
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      return load && std::any_of(load->index.begin(), load->index.end(), [&](Expr e) { return !loop_ir::choices_in(e, lane_axis_->name).empty(); });
    });
    if (chosen < 2 && !moves) return {};
    std::vector<Expr> cuts = loop_ir::turning_points(*nest_.inner, *lane_axis_, kernel_.symbols, moves);
    if (cuts.empty() || static_cast<int64_t>(cuts.size()) >= kMostLaneParts) return {};
    if (nest_.inner->size() * (cuts.size() + 1) > kMostOfParts) return {};
    cuts.push_back(lane_axis_->extent);
    Ranges ranges = kernel_.symbols;
    for (const auto& a : nest_.axes)
      if (a.name != lane_axis_->name) ranges[a.name] = axis_range(a.extent);
    std::vector<LanePart> parts;
    Expr from = 0;
    for (const Expr to : cuts) {
      const Expr i = Expr::symbol(lane_axis_->name);
      const loop_ir::Block moved = loop_ir::copy_block(*nest_.inner, {{{lane_axis_->name, i + from}}, {}, {}}, nullptr);
      const loop_ir::Block cleaned = loop_ir::clean({loop_ir::make_for({lane_axis_->name, to - from}, moved)}, ranges);
      const auto* loop = cleaned.empty() ? nullptr : std::get_if<loop_ir::For>(&cleaned.back()->node);
      loop_ir::Block part(cleaned.begin(), cleaned.end() - (loop ? 1 : 0));
      if (!NestConverter::is_straight(part)) return {};
      if (loop) part.insert(part.end(), loop->body.begin(), loop->body.end());  // else it had one point
      parts.push_back({from, to, loop_ir::copy_block(part, {{{lane_axis_->name, i - from}}, {}, {}}, nullptr)});
      from = to;
    }
    return parts;
  }

  /// The axis along which memory runs, unrolled inside the lanes by as many points as a vector has, so that squares are transposed in
  /// registers; then what remains of it.
  template <class InLanes>
  tile_ir::Block squares(const loop_ir::Axis& along, Expr first, Expr valid, int64_t side, const InLanes& in_lanes) {
    Substitution& map = converter_.map();
    Substitution before = map;
    auto at = [&](Expr point) {
      map = before;
      for (auto& [name, value] : map) value = substitute(value, {{along.name, point}});
      map[along.name] = point;
      tile_ir::Block body = converter_.convert(*nest_.inner, false, inner_lanes_);
      map = before;
      return body;
    };
    std::string square = along.name + "_square";
    std::string inside = along.name + "_in";
    tile_ir::Block body = at(first + sym(square) * side + sym(inside));
    body = {make(tile_ir::For{axis(inside, 0, side, LoopKind::unroll), std::move(body)})};
    tile_ir::Block out{make(tile_ir::For{axis(square, 0, floordiv(valid, side)), in_lanes(std::move(body))})};
    if (along.extent.is_constant() && along.extent.value() % side == 0 && transposed_tile_ % side == 0) return out;
    std::string rest = along.name + "_rest";
    out.push_back(make(tile_ir::For{axis(rest, floordiv(valid, side) * side, valid), in_lanes(at(first + sym(rest)))}));
    return out;
  }

  /// From shapes alone: as many pieces as there is work for, at most one per parallel iteration.
  Expr chunks() const {
    Expr work = analysis::cost_of(kernel_).operations + count(nest_.axes);
    // Loops whose length varies with an outer axis (the last piece of a split reduction) count by their longest run.
    std::set<std::string> axes;
    Ranges ranges = kernel_.symbols;
    visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
      if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) {
        axes.insert(loop->axis);
        ranges[loop->axis] = axis_range(loop->extent);
      }
    });
    work = upper_bound(simplify(widest(work, axes), ranges), axes, ranges).value_or(count(nest_.axes));
    for (const std::string& name : symbols_of(work))
      if (!kernel_.symbols.count(name)) work = count(nest_.axes);
    return max(1, min(parallel_extent_, ceildiv(work, chunk_work_)));
  }

  /// e, a sum of products of extents, with every minimum that an axis enters replaced by its other operands.
  static Expr widest(Expr e, const std::set<std::string>& axes) {
    auto varies = [&](Expr t) { return std::any_of(axes.begin(), axes.end(), [&](const std::string& a) { return uses(t, a); }); };
    if (!varies(e)) return e;
    if (e.kind() == ExprKind::add || e.kind() == ExprKind::mul) {
      Expr result = e.kind() == ExprKind::add ? 0 : 1;
      for (const Expr& t : e.operands()) result = e.kind() == ExprKind::add ? result + widest(t, axes) : result * widest(t, axes);
      return result;
    }
    if (e.kind() != ExprKind::min) return e;
    std::optional<Expr> least;
    for (const Expr& t : e.operands())
      if (!varies(t)) least = least ? min(*least, t) : t;
    return least.value_or(e);
  }

  const loop_ir::Kernel& kernel_;
  const PassContext& ctx_;
  OuterNest nest_;
  NestConverter converter_;
  std::vector<loop_ir::Axis> free_;     ///< may run in any order
  std::vector<loop_ir::Axis> ordered_;  ///< stores may meet along them
  bool straight_ = false;

  // The schedule.
  std::vector<std::string> parallel_;
  std::vector<std::string> serial_;  ///< inside the parallel ones
  std::optional<loop_ir::Axis> lane_axis_;
  int64_t lane_tile_ = 0;  ///< 0: the whole axis
  int64_t in_flight_ = 1;
  std::optional<loop_ir::Axis> transposed_;
  int64_t transposed_tile_ = 0;
  int64_t side_ = 0;
  std::optional<loop_ir::Axis> turned_;  ///< results lie along it
  int64_t points_ = 0;                   ///< of it that are kept before they are stored
  std::optional<loop_ir::Axis> streamed_;
  int64_t streams_ = 1;
  bool apart_ = false;  ///< streams
  bool ahead_ = true;   ///< the next ones are fetched
  std::optional<Windows> windows_;
  int64_t chunk_work_ = kChunkOperations;
  InnerLanes inner_lanes_;

  Expr parallel_extent_ = 1;
};

}  // namespace

Schedule propose_cpu_nest(const loop_ir::Kernel& kernel, const PassContext& ctx) {
  const loop_ir::Kernel merged = merge_inner_axes(join_short_rows(kernel));
  Schedule schedule = NestScheduler(merged, ctx).propose();
  if (NestScheduler(merged, ctx).has_outer_lanes(schedule)) return schedule;
  return NestScheduler(merge_inner_axes(take_out_of_scans(kernel)), ctx).propose();
}

tile_ir::Kernel apply_cpu_nest(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx) {
  const loop_ir::Kernel merged = merge_inner_axes(join_short_rows(kernel));
  if (NestScheduler(merged, ctx).has_outer_lanes(schedule)) return NestScheduler(merged, ctx).apply(schedule);
  const loop_ir::Kernel in_outputs = merge_inner_axes(rows_in_outputs(take_out_of_scans(kernel)));
  tile_ir::Kernel out = NestScheduler(in_outputs, ctx).apply(schedule);
  if (!has_masked_keys(kernel)) return out;
  // How many keys count is known only when it runs: the pieces are those for all.
  const Expr chunks = out.chunks;
  const loop_ir::Kernel unmasked = merge_inner_axes(rows_in_outputs(without_masked_keys(kernel)));
  out = NestScheduler(unmasked, ctx).apply(schedule);
  out.chunks = chunks;
  return out;
}

}  // namespace deplo
