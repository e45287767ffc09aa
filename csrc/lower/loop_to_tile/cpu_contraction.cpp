#include "lower/loop_to_tile/cpu_contraction.h"

#include <algorithm>
#include <map>

#include "analysis/contraction.h"
#include "base/error.h"
#include "base/text.h"
#include "lower/loop_to_tile/convert.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "schedule/reader.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using analysis::Contraction;
using loop_ir::Axis;
using tile_ir::LoopKind;
using tile_ir::Space;

constexpr int64_t kWholeDepth = 384;  // k is not split up to here
constexpr int64_t kDepthBlock = 256;  // KC beyond: a sliver of it stays in L1, and no chain of additions is longer
constexpr int64_t kDepthUnroll = 4;
constexpr int64_t kPrefetchSteps = 4;       // of the outermost reduce axis, ahead of the pack
constexpr int64_t kStaticLanes = 256;       // lanes of a block whose lane operand was packed before
constexpr int64_t kStaticRows = 96;         // its rows
constexpr int64_t kDynamicLanes = 256;      // lanes of a block that packs its lane operand
constexpr int64_t kDynamicRows = 256;       // its rows: they pay for that pack
constexpr int64_t kLeastRows = 128;         // its rows at least where few blocks would leave threads idle
constexpr int64_t kTileElements = 1 << 17;  // of the tile of sums: it shares L2 with the packed operands
constexpr int64_t kWantedBlocks = 8;        // parallel iterations that keep a few threads busy
constexpr int64_t kWidestInnerAxis = 512;   // of the two axes that share the lanes
constexpr int64_t kStreamRows = 2;          // up to here, weights that lie along k are streamed, not packed
constexpr int64_t kLeastWork = 8192;        // multiply-adds below which packing does not pay
constexpr int64_t kChunkWork = 65536;
constexpr int64_t kUnknownExtent = 128;
constexpr double kAcrossGain = 0.95;    // lanes off the stores' contiguous axis must save more than transposing the sums costs
constexpr double kWindowGain = 1.25;    // measured: packing every tap costs more than its copies
constexpr int64_t kCacheLine = 16;      // float32 elements
constexpr int64_t kRowPadding = 16;     // keeps packed rows off each other's cache sets
constexpr int64_t kWidestImage = 1024;  // points of a line of which a block takes whole lines
constexpr double kCopy = 8;             // cost of packing an element, in multiply-adds

// What a schedule may ask for: beyond, code or memory grows out of proportion.
constexpr int64_t kMostTile = 1 << 16;
constexpr int64_t kMostUnroll = 16;
constexpr int64_t kMostWork = int64_t{1} << 40;
constexpr int64_t kMostScratch = 64 << 20;  // bytes of a thread

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
Expr round_up(Expr a, int64_t b) { return ceildiv(a, b) * b; }
/// a cut into equal parts of at most `most`: the size of a part.
int64_t balanced(int64_t a, int64_t most) {
  int64_t parts = (a + most - 1) / most;
  return (a + parts - 1) / parts;
}

/// Rows of a register block at most: two vectors each, beside those that hold operands.
int64_t most_register_rows(const PassContext& ctx) { return ctx.target.vector_registers >= 32 ? 14 : 6; }

/// What `rows` rows cost in register blocks of mr: little where little is padding, each row of lanes that is read serves many, and enough
/// sums are independent of one another to hide the latency of multiply-adds. The constants fit what blocks of 4 to 14 rows took on Zen 4,
/// with AVX2 and AVX-512.
double block_overhead(int64_t mr) {
  constexpr double kReload = 1.2;  // cost of reading the lanes, in rows
  constexpr double kChains = 4;    // rows that hide the latency
  auto m = static_cast<double>(mr);
  return (1 + kReload / m) * std::max(1.0, kChains / m);
}
double block_cost(int64_t rows, int64_t mr) { return static_cast<double>(round_up(rows, mr)) * block_overhead(mr); }

/// Rows of the register block for `rows` rows.
int64_t register_rows(int64_t rows, const PassContext& ctx) {
  int64_t most = most_register_rows(ctx);
  if (rows <= most) return std::max<int64_t>(rows, 1);
  int64_t best = most;
  for (int64_t mr = most; mr >= std::min<int64_t>(most, 4); --mr)
    if (block_cost(rows, mr) < block_cost(rows, best)) best = mr;
  return best;
}

struct Operand {
  const analysis::ContractionOperand* source = nullptr;
  loop_ir::Block slice;    ///< with the statements outside of the reduction that it needs
  bool fixed = false;      ///< made of static buffers and constant sizes alone: it may be packed once
  bool is_static = false;  ///< packed once
  int64_t padding = kRowPadding;
  std::string param;  ///< of the packed buffer when static
};

/// One direction of the windows that the reduction slides over the rows' operand: its coordinate is axis * stride + tap * dilation. A buffer
/// that holds the points under a block of rows has them at axis * step + tap * tap_step.
struct WindowSide {
  Axis axis;
  std::string tap;  ///< the reduce axis; none where windows are one point wide
  int64_t taps = 1;
  int64_t step = 1;
  int64_t tap_step = 0;

  /// Points under `rows` rows next to each other.
  Expr span(Expr rows) const { return (rows - 1) * step + (taps - 1) * tap_step + 1; }
  /// What the axes are at a point of the buffer whose first row is `first`.
  Substitution at(Expr first, Expr point) const {
    Substitution map;
    bool by_tap = tap_step == 1 && step != 1;  // the finer of both reaches every point
    map[axis.name] = by_tap ? first : first + point;
    if (!tap.empty()) map[tap] = by_tap ? point : Expr(0);
    return map;
  }
};

/// Rows that are the points of lines of an image. Under overlapping windows the image is packed once, not once a tap.
struct Window {
  WindowSide line, point;
  std::vector<Axis> channels;  ///< the reduce axes that are no taps: outside of them

  int64_t taps() const { return line.taps * point.taps; }
};

struct Item {
  const Contraction* contraction = nullptr;
  Operand rows;
  Operand lanes;
  Expr depth;
  int64_t depth_block = 0;  ///< KC
  int64_t unroll = kDepthUnroll;
  Expr depth_blocks;
  std::string tag;
};

class Scheduler {
 public:
  Scheduler(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx)
      : kernel_(kernel), statics_(statics), ctx_(ctx), nest_(outer_nest(kernel_)), contractions_(analysis::find_contractions(kernel_)) {
    ranges_ = kernel_.symbols;
    for (const auto& a : nest_.axes) ranges_[a.name] = axis_range(a.extent);
    for (const Contraction& c : contractions_)
      for (const auto& a : c.reduce->axes) ranges_[a.name] = axis_range(a.extent);
  }

  std::optional<Schedule> propose() {
    if (!recognize()) return std::nullopt;
    group_lanes();
    if (!worthwhile()) return std::nullopt;
    choose_sizes();
    return describe();
  }

  /// With the lanes along the other operand's axes, where that pads less; `best` is the cost to beat.
  std::optional<Schedule> propose_across(double best) {
    across_ = true;
    if (!recognize() || !lanes_static()) return std::nullopt;
    group_lanes();
    bool known = rows_extent_.is_constant() && rows_extent_.value() <= kDynamicRows && lanes_extent_.is_constant() && rows_.size() <= 2;
    if (!known || !worthwhile()) return std::nullopt;
    choose_sizes();
    if (padded_work() > kAcrossGain * best) return std::nullopt;
    return describe();
  }

  /// With the points of an image as rows, packed as they lie.
  std::optional<Schedule> propose_window(bool across, double best) {
    across_ = across;
    windowed_ = true;
    if (!recognize() || !lanes_static()) return std::nullopt;
    group_lanes();
    if (!lanes_extent_.is_constant() || !worthwhile()) return std::nullopt;
    choose_sizes();
    if (padded_work() > kWindowGain * best) return std::nullopt;
    return describe();
  }

  /// Of the sizes chosen: multiply-adds with the padding, weighed by how well their register blocks run, and the elements packed, for one k.
  double padded_work() const {
    int64_t lanes = round_up(hint(lanes_extent_), nr_);
    if (window_) {
      double rows = window_cost(block_lines_, block_points_);
      Expr points = window_->line.span(lines_) * window_->point.span(window_->point.axis.extent);
      Expr packs = ceildiv(window_->line.axis.extent, lines_) * lane_groups();
      return rows * static_cast<double>(lanes) + kCopy * static_cast<double>(hint(points * packs)) / static_cast<double>(window_->taps());
    }
    if (two_lane_axes() && lanes_[0].extent.is_constant()) {
      int64_t inner = lanes_[1].extent.value();
      int64_t lines = lanes_[0].extent.value();
      lanes = lines / lane_lines_ * round_up(lane_lines_ * inner, nr_) + round_up(lines % lane_lines_ * inner, nr_);
    }
    double packed = 0;
    if (!items_[0].lanes.is_static) packed += static_cast<double>(lanes * ((hint(rows_extent_) + row_tiles_ * mr_ - 1) / (row_tiles_ * mr_)));
    if (!items_[0].rows.is_static) packed += static_cast<double>(hint(rows_extent_ * lane_groups()));
    return block_cost(hint(rows_extent_), mr_) * static_cast<double>(lanes) + kCopy * packed;
  }

  ScheduledContraction apply(const Schedule& schedule) {
    ScheduleReader reader(kernel_.name, schedule);
    across_ = is_across(schedule);
    windowed_ = is_windowed(schedule);
    if (!recognize()) reader.fail("the kernel is no contraction whose operands vary along its stores' contiguous axis");
    read(reader);
    ScheduledContraction out;
    tile_ir::Kernel& k = out.kernel;
    k.name = kernel_.name;
    k.params = kernel_.params;
    k.symbols = kernel_.symbols;
    k.provenance = kernel_.provenance;
    for (Item& item : items_) {
      if (item.lanes.is_static) out.packed.push_back(pack_once(item, item.lanes, true));
      if (item.rows.is_static) out.packed.push_back(pack_once(item, item.rows, false));
    }
    for (const PackedOperand& p : out.packed)
      k.params.push_back({p.param, loop_ir::ParamKind::in, DType::f32, p.shape, contiguous_strides(p.shape), true});
    k.body = body();
    Expr work = count(outer_) * rows_extent_ * lanes_extent_ * items_[0].depth * static_cast<int64_t>(items_.size());
    k.chunks = max(1, min(parallel_extent_, ceildiv(work, chunk_work_)));
    k.schedule = schedule;
    return out;
  }

  /// For a block of `rows` rows of one axis.
  std::optional<std::vector<Directive>> propose_rows(const ContractionRows& tile) {
    in_rows_ = &tile;
    if (!recognize()) return std::nullopt;
    group_lanes();
    if (!bound()) return std::nullopt;
    choose_sizes();
    return describe().directives;
  }

  tile_ir::Block apply_rows(const ContractionRows& tile, const Schedule& schedule) {
    in_rows_ = &tile;
    tag_ = tile.tag;
    ScheduleReader reader(kernel_.name, schedule);
    if (!recognize()) reader.fail("a phase is no contraction whose operands vary along its stores' contiguous axis");
    read(reader);
    if (!bound()) reader.fail(fmt::format("the rows of a phase must be those of {}, its lanes axes of its own", tile.axis));
    outer_map_ = tile.outer;
    first_row_ = tile.first;
    valid_rows_ = tile.valid;
    tiles_ = ceildiv(valid_rows_, mr_);
    choose_lanes(sym("group" + tag_));
    tile_ir::Block out = allocations();
    out.push_back(loop("group" + tag_, 0, lane_groups(), LoopKind::serial, tile_body()));
    return out;
  }

 private:
  // ---- recognition -----------------------------------------------------------------------------------------------

  bool recognize() { return !contractions_.empty() && fits() && classify(); }

  /// Of a phase: its rows are the block's, and all else but the lanes is known outside.
  bool bound() const {
    bool ok = rows_.size() == 1 && rows_[0].name == in_rows_->axis;
    for (const auto& a : outer_) ok = ok && in_rows_->outer.count(a.name) > 0;
    for (const auto& a : lanes_) ok = ok && in_rows_->outer.count(a.name) == 0;
    return ok;
  }

  /// Inside the outer nest: the contractions' reductions and straight-line statements only.
  bool fits() {
    size_t found = 0;
    for (const auto& stmt : *nest_.inner) {
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
        bool known = std::any_of(contractions_.begin(), contractions_.end(), [&](const Contraction& c) { return c.reduce == reduce; });
        if (!known || reduce->dtypes[0] != DType::f32) return false;
        for (const auto& s : reduce->body)
          if (std::holds_alternative<loop_ir::Check>(s->node)) return false;
        ++found;
      } else if (std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Scan>(stmt->node) ||
                 std::holds_alternative<loop_ir::Local>(stmt->node)) {
        return false;
      }
    }
    return found == contractions_.size() && colliding_stores(kernel_).empty();
  }

  std::vector<const loop_ir::Store*> stores() const {
    std::vector<const loop_ir::Store*> all;
    for (const auto& stmt : *nest_.inner)
      if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) all.push_back(store);
    return all;
  }

  Expr offset(const std::string& buffer, const std::vector<Expr>& index) const {
    const loop_ir::Param* param = kernel_.find_param(buffer);
    Expr sum = 0;
    if (!param) return sum;
    for (size_t d = 0; d < index.size(); ++d) sum = sum + index[d] * param->strides[d];
    return simplify(sum, ranges_);
  }

  bool steps_by(const std::string& axis, Expr step) const {
    auto all = stores();
    return !all.empty() && std::all_of(all.begin(), all.end(), [&](const loop_ir::Store* s) {
      auto c = linear_coefficient(offset(s->buffer, s->index), axis);
      return c && *c == step;
    });
  }

  /// Sorts the outer axes into rows, lanes and the rest, and each contraction's operands likewise.
  bool classify() {
    const Axis* unit = nullptr;
    for (const auto& a : nest_.axes)
      if (steps_by(a.name, 1)) unit = &a;
    if (!unit) return false;
    unit_ = *unit;
    for (const Contraction& c : contractions_) {
      bool in_a = c.a.axes.count(unit->name) > 0;
      bool in_b = c.b.axes.count(unit->name) > 0;
      if (in_a == in_b) return false;
      if (across_) std::swap(in_a, in_b);
      Item item;
      item.contraction = &c;
      item.tag = tag_ + std::to_string(items_.size());
      if (!prepare(item.lanes, in_a ? c.a : c.b) || !prepare(item.rows, in_a ? c.b : c.a)) return false;
      item.depth = count(c.reduce->axes);
      items_.push_back(std::move(item));
    }
    auto kind_of = [&](const Axis& a, const Item& item) {
      bool lanes = item.lanes.source->axes.count(a.name) > 0;
      bool rows = item.rows.source->axes.count(a.name) > 0;
      return lanes && !rows ? 'l' : rows && !lanes ? 'r' : 'o';
    };
    for (const auto& a : nest_.axes) {
      char kind = kind_of(a, items_[0]);
      for (const Item& item : items_)
        if (kind_of(a, item) != kind) return false;
      (kind == 'l' ? lane_class_ : kind == 'r' ? rows_ : outer_).push_back(a);
    }
    if (windowed_) {
      while (rows_.size() > 2) {
        outer_.push_back(rows_.front());
        rows_.erase(rows_.begin());
      }
      window_ = find_window();
      if (!window_) return false;
    }
    rows_extent_ = count(rows_);
    if (across_ && (rows_.empty() || rows_.back().name != unit_.name || rows_.size() > 2)) return false;
    return !rows_.empty() && !lane_class_.empty();
  }

  /// The windows of the only contraction over lines of a known length, if it has any.
  std::optional<Window> find_window() const {
    if (items_.size() != 1 || rows_.size() != 2 || items_[0].rows.is_static) return std::nullopt;
    auto line = find_side(rows_[0]);
    auto point = find_side(rows_[1]);
    if (!line || !point || (line->tap.empty() && point->tap.empty()) || line->tap == point->tap) return std::nullopt;
    Window window{*line, *point, {}};
    bool known = point->axis.extent.is_constant() && point->axis.extent.value() <= kWidestImage && line->axis.extent.is_constant();
    // The taps are the innermost reduce axes, those of a line inside.
    for (const auto& a : items_[0].contraction->reduce->axes) {
      if (a.name == line->tap || a.name == point->tap) {
        known = known && a.extent.is_constant();
        continue;
      }
      window.channels.push_back(a);
    }
    const auto& axes = items_[0].contraction->reduce->axes;
    size_t at = window.channels.size();
    if (!line->tap.empty()) known = known && axes[at++].name == line->tap;
    if (!point->tap.empty()) known = known && axes[at].name == point->tap;
    if (!known) return std::nullopt;
    return window;
  }

  /// One direction: every index and condition of the operand has axis and tap in the same proportion, so that their sum is one coordinate.
  std::optional<WindowSide> find_side(const Axis& axis) const {
    std::vector<Expr> all;
    for (const auto& stmt : items_[0].rows.slice) {
      if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) {
        all.insert(all.end(), load->index.begin(), load->index.end());
        for (const Cond& c : load->guard) all.push_back(c.expr);
      } else if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) {
        all.push_back(let->index);
      }
    }
    auto step = [](Expr e, const std::string& name) -> std::optional<int64_t> {
      auto c = linear_coefficient(e, name);
      if (!c || !c->is_constant()) return std::nullopt;
      return c->value();
    };
    WindowSide side{axis, "", 1, 1, 0};
    int64_t stride = 0;
    int64_t dilation = 0;
    for (Expr e : all) {
      auto s = step(e, axis.name);
      if (!s) return std::nullopt;
      for (const auto& r : items_[0].contraction->reduce->axes) {
        auto d = step(e, r.name);
        if (*s == 0 && r.name != side.tap) continue;  // may depend on it in any way
        if (!d) return std::nullopt;
        if (*s != 0 && *d != 0 && side.tap.empty()) {
          if (!r.extent.is_constant()) return std::nullopt;
          side.tap = r.name;
          side.taps = r.extent.value();
          stride = std::abs(*s);
          dilation = std::abs(*d);
          if ((*s < 0) != (*d < 0)) return std::nullopt;
        }
        if (r.name == side.tap ? *s * dilation != *d * stride : *d != 0) return std::nullopt;
      }
    }
    if (side.tap.empty()) return side;
    // Expressions that came before the tap was known.
    for (Expr e : all) {
      auto s = step(e, axis.name);
      auto d = step(e, side.tap);
      if (!d || *s * dilation != *d * stride) return std::nullopt;
    }
    int64_t unit = std::min(stride, dilation);
    if (stride % unit != 0 || dilation % unit != 0) return std::nullopt;
    side.step = stride / unit;
    side.tap_step = dilation / unit;
    return side;
  }

  /// Whether a schedule packs the rows' operand as it lies under windows.
  static bool is_windowed(const Schedule& schedule) {
    return std::any_of(schedule.directives.begin(), schedule.directives.end(), [](const Directive& d) {
      return d.word == "pack" && std::any_of(d.arguments.begin(), d.arguments.end(), [](const Argument& a) { return a.name == "windows"; });
    });
  }

  /// Whether a schedule gives the lanes to another axis than the stores' contiguous one.
  bool is_across(const Schedule& schedule) const {
    for (const Directive& d : schedule.directives) {
      if (d.word != "vectorize" || d.arguments.size() != 1) continue;
      std::vector<std::string> names = group_axes(d.arguments[0].name);
      return std::none_of(names.begin(), names.end(), [&](const std::string& n) { return steps_by(n, 1); });
    }
    return false;
  }

  /// The lanes are the contiguous axis, and with it the axis that continues it in every store; other axes of its class run outside.
  void group_lanes() {
    if (across_) {
      lanes_ = lane_class_;
      lanes_extent_ = count(lanes_);
      return;
    }
    lanes_ = {unit_};
    Expr span = unit_.extent;
    bool grew = true;
    while (grew) {
      grew = false;
      // Lanes that are packed per block are packed one whole inner axis at a time, which must be short and known.
      if (!lanes_static() && (lanes_.size() == 2 || !unit_.extent.is_constant() || unit_.extent.value() > kWidestInnerAxis)) break;
      for (const auto& a : lane_class_) {
        bool taken = std::any_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l == a; });
        if (taken || !steps_by(a.name, span)) continue;
        lanes_.insert(lanes_.begin(), a);
        span = span * a.extent;
        grew = true;
        break;
      }
    }
    lanes_extent_ = count(lanes_);
    for (const auto& a : lane_class_)
      if (std::none_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l == a; })) outer_.push_back(a);
  }

  bool lanes_static() const {
    return std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.lanes.is_static; });
  }

  bool prepare(Operand& operand, const analysis::ContractionOperand& source) {
    operand.source = &source;
    operand.slice = source.slice;
    std::set<std::string> defined;
    std::set<std::string> needed{source.value};
    auto note = [&](const loop_ir::Stmt& stmt) {
      if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) {
        defined.insert(let->name);
        needed.insert(let->operands.begin(), let->operands.end());
        collect_symbols(let->index, needed);
      } else if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) {
        defined.insert(load->name);
        for (Expr e : load->index) collect_symbols(e, needed);
        for (const Cond& c : load->guard) collect_symbols(c.expr, needed);
      }
    };
    for (const auto& stmt : operand.slice) note(*stmt);
    // Statements of the outer nest that the slice reads come along; the result of another reduction cannot.
    for (size_t i = nest_.inner->size(); i-- > 0;) {
      const auto& stmt = (*nest_.inner)[i];
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
        for (const std::string& r : reduce->results)
          if (needed.count(r)) return false;
        continue;
      }
      const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      std::string name = let ? let->name : load ? load->name : "";
      if (name.empty() || !needed.count(name) || defined.count(name)) continue;
      note(*stmt);
      operand.slice.insert(operand.slice.begin(), stmt);
    }
    operand.fixed = true;
    for (const auto& stmt : operand.slice)
      if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) operand.fixed = operand.fixed && statics_.count(load->buffer) > 0;
    // What is packed once must not depend on a size that changes from call to call.
    for (const std::string& name : needed) operand.fixed = operand.fixed && kernel_.symbols.count(name) == 0;
    for (const auto& a : nest_.axes)
      if (source.axes.count(a.name) && !a.extent.is_constant()) operand.fixed = false;
    operand.is_static = operand.fixed;
    return true;
  }

  int64_t hint(Expr e) const {
    std::map<std::string, int64_t> values;
    for (const std::string& s : symbols_of(e)) {
      auto it = ctx_.hints.find(s);
      values[s] = it == ctx_.hints.end() ? kUnknownExtent : it->second;
    }
    return evaluate(e, values);
  }

  static const loop_ir::Load* main_load(const Operand& operand) {
    const loop_ir::Load* main = nullptr;
    for (const auto& stmt : operand.slice)
      if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node))
        if (!main || load->buffer == operand.source->buffers.front()) main = load;
    return main;
  }

  /// Step of the operand's main load along an axis; nothing if it is not affine there.
  std::optional<Expr> step_along(const Operand& operand, const std::string& axis) const {
    const loop_ir::Load* main = main_load(operand);
    return main ? linear_coefficient(offset(main->buffer, main->index), axis) : std::nullopt;
  }

  bool unit_along(const Operand& operand, const std::string& axis) const {
    auto step = step_along(operand, axis);
    return step && step->is(1);
  }

  bool worthwhile() const {
    Expr work = count(rows_) * count(lanes_) * items_[0].depth;
    if (hint(work) < kLeastWork) return false;
    bool along_k =
        std::all_of(items_.begin(), items_.end(), [&](const Item& i) { return unit_along(i.lanes, i.contraction->reduce->axes.back().name); });
    // Few rows read the lane operand once anyway: packing it per call would double the traffic.
    bool packs_per_call = std::any_of(items_.begin(), items_.end(), [](const Item& i) { return !i.lanes.is_static; });
    return hint(count(rows_)) > kStreamRows || !(along_k || packs_per_call);
  }

  // ---- sizes -----------------------------------------------------------------------------------------------------

  void choose_sizes() {
    int64_t vector = ctx_.target.vector_bytes / 4;
    nr_ = 2 * vector;
    int64_t rows = hint(rows_extent_);
    mr_ = rows_extent_.is_constant() ? register_rows(rows, ctx_) : most_register_rows(ctx_);
    for (Item& item : items_) {
      int64_t depth = hint(item.depth);
      item.depth_block = item.depth.is_constant() && depth <= kWholeDepth ? std::max<int64_t>(depth, 1) : kDepthBlock;
      if (item.depth.is_constant() && depth > kWholeDepth) item.depth_block = round_up(balanced(depth, kDepthBlock), kDepthUnroll);
    }
    choose_lane_block();
    if (window_) {
      choose_window_sizes();
      return;
    }
    if (in_rows_) {
      mr_ = register_rows(in_rows_->count, ctx_);
      row_tiles_ = (in_rows_->count + mr_ - 1) / mr_;
      return;
    }
    if (across_) {
      row_tiles_ = (rows + mr_ - 1) / mr_;
      for (Item& item : items_) item.rows.padding = round_up(row_tiles_ * mr_, kCacheLine) + kRowPadding - row_tiles_ * mr_;
      return;
    }
    int64_t most = lanes_static() ? kStaticRows : kDynamicRows;
    bool rows_static = std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.rows.is_static; });
    if (rows_static && !lanes_static()) {
      // Every block of rows packs the lanes anew: one block takes all rows, unless that leaves too few blocks.
      int64_t others = std::max<int64_t>(1, hint(count(outer_) * lane_groups()));
      int64_t blocks = (kWantedBlocks + others - 1) / others;
      most = std::min(std::max(kLeastRows, (rows + blocks - 1) / blocks), std::max(kDynamicRows, kTileElements / lane_block_));
    }
    int64_t tiles = std::max<int64_t>(1, most / mr_);
    if (rows_extent_.is_constant()) tiles = balanced((rows + mr_ - 1) / mr_, tiles);
    row_tiles_ = tiles;
  }

  /// Lines of a block and the rows of its register blocks: points of one line, or several whole lines.
  void choose_window_sizes() {
    const int64_t most = most_register_rows(ctx_);
    const int64_t lines = window_->line.axis.extent.value();
    const int64_t points = window_->point.axis.extent.value();
    double best = 0;
    for (int64_t dx = 1; dx <= std::min(most, points); ++dx)
      for (int64_t dy = 1; dy * dx <= most && dy <= lines && (dy == 1 || dx == points); ++dy) {
        double cost = window_cost(dy, dx);
        if (best != 0 && cost >= best) continue;
        best = cost;
        block_lines_ = dy;
        block_points_ = dx;
      }
    mr_ = block_lines_ * block_points_;
    lines_ = round_up(balanced(lines, std::max<int64_t>(1, kDynamicRows / points)), block_lines_);
    Item& item = items_[0];
    const int64_t channels = std::max<int64_t>(1, kDepthBlock / window_->taps());
    Expr all = count(window_->channels);
    const bool whole = all.is_constant() && all.value() * window_->taps() <= kWholeDepth;
    item.depth_block = window_->taps() * (whole ? all.value() : all.is_constant() ? balanced(all.value(), channels) : channels);
    item.unroll = window_->point.taps > 1 ? std::min(window_->point.taps, kMostUnroll) : kDepthUnroll;
    // Packing for fewer lanes costs little, idle threads much.
    while (lane_block_ > nr_ && hint(count(outer_) * lane_groups()) * ((lines + lines_ - 1) / lines_) < kWantedBlocks)
      lane_block_ = round_up(lane_block_ / 2, nr_);
  }

  /// Register blocks that share the points of a line: all of one size, or some with a point more.
  struct LineBlocks {
    int64_t first, count, points;
  };
  std::vector<LineBlocks> line_blocks(int64_t most) const {
    const int64_t points = window_->point.axis.extent.value();
    const int64_t count = (points + most - 1) / most;
    const int64_t larger = points % count;
    std::vector<LineBlocks> out;
    if (larger > 0) out.push_back({0, larger, points / count + 1});
    out.push_back({larger * (points / count + 1), count - larger, points / count});
    return out;
  }

  /// Of the whole image, in rows.
  double window_cost(int64_t lines, int64_t points) const {
    double cost = 0;
    for (const LineBlocks& b : line_blocks(points)) cost += static_cast<double>(b.count * b.points) * block_overhead(lines * b.points);
    return cost * static_cast<double>(round_up(window_->line.axis.extent.value(), lines));
  }

  Expr lines_padded(Expr lines) const { return ceildiv(lines, block_lines_) * block_lines_; }
  int64_t tile_rows() const { return window_ ? lines_ * rows_[1].extent.value() : row_tiles_ * mr_; }
  std::string row_tile_name() const { return window_ ? rows_[0].name : name_of(rows_); }

  void choose_lane_block() {
    if (two_lane_axes()) {
      int64_t inner = lanes_.back().extent.value();
      lane_lines_ = lines_of_block(inner);
      lane_block_ = round_up(lane_lines_ * inner, nr_);
    } else {
      int64_t widest = across_ ? kLeastRows : lanes_static() ? kStaticLanes : kDynamicLanes;
      lane_block_ = lanes_extent_.is_constant() ? round_up(balanced(lanes_extent_.value(), widest), nr_) : widest;
    }
  }

  /// Lines of `inner` lanes that a block packs side by side: many enough to share the rows, and little padding up to whole vectors.
  int64_t lines_of_block(int64_t inner) const {
    int64_t widest = std::max<int64_t>(1, kDynamicLanes / inner);
    if (!lanes_[0].extent.is_constant()) return widest;
    int64_t all = lanes_[0].extent.value();
    auto padded = [&](int64_t lines) { return all / lines * round_up(lines * inner, nr_) + round_up(all % lines * inner, nr_); };
    int64_t best = balanced(all, widest);
    for (int64_t lines = best + 1; lines <= std::min(all, widest); ++lines)
      if (padded(lines) < padded(best)) best = lines;
    return best;
  }

  /// Lanes of two axes that are packed per block: whole lines of the inner axis side by side.
  bool two_lane_axes() const { return !across_ && lanes_.size() == 2 && !lanes_static(); }

  // ---- the schedule as data --------------------------------------------------------------------------------------

  static std::string name_of(const std::vector<Axis>& axes) {
    std::vector<std::string> names;
    for (const auto& a : axes) names.push_back(a.name);
    return group_name(names);
  }
  /// The reduce axes of one contraction: those of another may have the same names.
  static std::string depth_name(const Item& item) { return item.contraction->result + "." + name_of(item.contraction->reduce->axes); }
  std::string lane_tile_name() const { return two_lane_axes() ? lanes_[0].name : name_of(lanes_); }

  Schedule describe() const {
    Schedule s{"contraction", {}};
    auto add = [&](const char* word, std::vector<Argument> arguments) { s.directives.push_back({word, std::move(arguments)}); };
    if (!in_rows_) {
      std::vector<Argument> parallel;
      for (const auto& a : outer_) parallel.push_back({a.name, {}});
      parallel.insert(parallel.end(), {{lane_tile_name(), {}}, {row_tile_name(), {}}, {"work", chunk_work_}});
      add("parallel", std::move(parallel));
      add("tile", {{row_tile_name(), window_ ? lines_ : row_tiles_ * mr_}});
    }
    add("tile", {{lane_tile_name(), two_lane_axes() ? lane_lines_ : lane_block_}});
    add("vectorize", {{name_of(lanes_), {}}});
    if (window_)
      add("register_block", {{rows_[0].name, block_lines_}, {rows_[1].name, block_points_}, {name_of(lanes_), nr_}});
    else
      add("register_block", {{name_of(rows_), mr_}, {name_of(lanes_), nr_}});
    for (const Item& item : items_) {
      const std::string& result = item.contraction->result;
      add("tile", {{depth_name(item), item.depth_block}});
      add("unroll", {{depth_name(item), item.unroll}});
      add("pack", {{result + ".lanes", {}}, {"at", item.lanes.is_static ? "program" : "block"}});
      std::vector<Argument> rows{{result + ".rows", {}}, {"at", item.rows.is_static ? "program" : "block"}};
      if (window_)
        rows.push_back({"windows", {}});
      else if (!item.rows.is_static)
        rows.push_back({"pad", item.rows.padding});
      add("pack", std::move(rows));
    }
    return s;
  }

  void read(ScheduleReader& reader) {
    for (Item& item : items_) {
      read_depth(reader, item);
      read_pack(reader, item, item.lanes, "lanes");
      read_pack(reader, item, item.rows, "rows");
    }
    read_lanes(reader);
    read_parallel(reader);
    read_register_block(reader);
    read_tiles(reader);
    reader.finish("parallel, tile, vectorize, register_block, unroll and pack, each axis and operand once");
  }

  static const Directive& needed(ScheduleReader& reader, const std::string& word, const std::string& name) {
    const Directive* d = reader.find(word, name);
    if (!d) reader.fail(fmt::format("it needs '{}({}...)'", word, name));
    return *d;
  }

  static int64_t read_number(ScheduleReader& reader, const std::string& word, const std::string& name, int64_t most) {
    const Directive& d = needed(reader, word, name);
    reader.only(d, {name});
    return reader.number(d, name, 1, most);
  }

  void read_depth(ScheduleReader& reader, Item& item) const {
    item.depth_block = read_number(reader, "tile", depth_name(item), kMostTile);
    if (window_ && item.depth_block % window_->taps() != 0)
      reader.fail(needed(reader, "tile", depth_name(item)), fmt::format("allowed: multiples of the window's {} taps", window_->taps()));
    item.unroll = read_number(reader, "unroll", depth_name(item), kMostUnroll);
    item.depth_blocks = ceildiv(item.depth, item.depth_block);
  }

  void read_pack(ScheduleReader& reader, const Item& item, Operand& operand, const std::string& side) const {
    std::string name = item.contraction->result + "." + side;
    const Directive& d = needed(reader, "pack", name);
    operand.is_static = reader.word(d, "at", {"program", "block"}) == "program";
    if (operand.is_static && !operand.fixed)
      reader.fail(d, fmt::format("{} changes from call to call (loads {}); allowed: at=block", name, joined(operand.source->buffers)));
    if (window_ && side == "rows") {
      if (operand.is_static) reader.fail(d, "windows are packed at=block");
      reader.only(d, {name, "at", "windows"});
      return;
    }
    if (window_ && !operand.is_static) reader.fail(d, "beside windows, the lanes are packed at=program");
    bool padded = side == "rows" && !operand.is_static;
    reader.only(d, padded ? std::set<std::string>{name, "at", "pad"} : std::set<std::string>{name, "at"});
    operand.padding = padded ? reader.number(d, "pad", 0, 1024, 0) : 0;
  }

  void read_lanes(ScheduleReader& reader) {
    const Directive& d = reader.one("vectorize");
    std::vector<std::string> given = reader.names(d);
    if (given.size() != 1 || d.arguments.size() != 1) reader.fail(d, "it takes one axis, or axes joined by *");
    std::vector<std::string> names = group_axes(given[0]);
    if (across_) {
      if (given[0] != name_of(lane_class_)) reader.fail(d, fmt::format("lanes off the stores' contiguous axis are {}", name_of(lane_class_)));
      group_lanes();
      if (!lanes_static())
        reader.fail(d, fmt::format("lanes off the stores' contiguous axis are packed at=program; allowed otherwise: {}", unit_.name));
      return;
    }
    if (names.back() != unit_.name)
      reader.fail(d, fmt::format("{} cannot get the lanes; allowed: {}, along which all stores are contiguous", names.back(), unit_.name));
    lanes_ = {unit_};
    Expr span = unit_.extent;
    for (size_t i = names.size() - 1; i-- > 0;) {
      auto axis = std::find_if(lane_class_.begin(), lane_class_.end(), [&](const Axis& a) { return a.name == names[i]; });
      bool taken = std::any_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l.name == names[i]; });
      if (axis == lane_class_.end() || taken || !steps_by(names[i], span))
        reader.fail(d, fmt::format("{} does not continue {} in every store", names[i], name_of(lanes_)));
      lanes_.insert(lanes_.begin(), *axis);
      span = span * axis->extent;
    }
    bool short_inner = unit_.extent.is_constant() && unit_.extent.value() <= kMostTile;
    if (!lanes_static() && lanes_.size() > 1 && (lanes_.size() > 2 || !short_inner))
      reader.fail(d,
                  fmt::format("lanes that are packed for each block are one axis, or two whose inner one has a constant extent up to {}", kMostTile));
    lanes_extent_ = count(lanes_);
    for (const auto& a : lane_class_)
      if (std::none_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l == a; })) outer_.push_back(a);
  }

  /// The outer axes in the order given, then the tiles of lanes, then those of rows.
  void read_parallel(ScheduleReader& reader) {
    if (in_rows_) return;
    const Directive& d = reader.one("parallel");
    std::vector<std::string> names = reader.names(d);
    std::vector<std::string> wanted;
    for (const auto& a : outer_) wanted.push_back(a.name);
    wanted.insert(wanted.end(), {lane_tile_name(), row_tile_name()});
    auto same = [&] {
      return names.size() == wanted.size() && std::is_permutation(names.begin(), names.end(), wanted.begin()) &&
             std::equal(names.end() - 2, names.end(), wanted.end() - 2);
    };
    if (!same()) reader.fail(d, fmt::format("allowed: {} and work; the last two stay in place", joined(wanted)));
    std::vector<Axis> ordered;
    for (size_t i = 0; i + 2 < names.size(); ++i)
      ordered.push_back(*std::find_if(outer_.begin(), outer_.end(), [&](const Axis& a) { return a.name == names[i]; }));
    outer_ = std::move(ordered);
    wanted.push_back("work");
    reader.only(d, {wanted.begin(), wanted.end()});
    chunk_work_ = reader.number(d, "work", 1, kMostWork);
  }

  void read_register_block(ScheduleReader& reader) {
    const Directive& d = reader.one("register_block");
    const int64_t vector = ctx_.target.vector_bytes / 4;
    const int64_t most = 4 * ctx_.target.vector_registers;  // sums beyond the registers are spilled: slow, but right
    if (window_) {
      reader.only(d, {rows_[0].name, rows_[1].name, name_of(lanes_)});
      block_lines_ = reader.number(d, rows_[0].name, 1, most);
      block_points_ = reader.number(d, rows_[1].name, 1, most);
      if (block_lines_ > 1 && block_points_ != rows_[1].extent.value())
        reader.fail(d, fmt::format("several lines are taken whole, with {}={}", rows_[1].name, print(rows_[1].extent)));
      mr_ = block_lines_ * block_points_;
    } else {
      reader.only(d, {name_of(rows_), name_of(lanes_)});
      mr_ = reader.number(d, name_of(rows_), 1, most);
    }
    nr_ = reader.number(d, name_of(lanes_), vector, most * vector);
    if (nr_ % vector != 0) reader.fail(d, fmt::format("{} is {}, allowed: multiples of the machine's {} lanes", name_of(lanes_), nr_, vector));
    if (mr_ * (nr_ / vector) > most)
      reader.fail(d, fmt::format("{} x {} sums are {} vectors of {} lanes, at most {} are allowed on a machine of {} vector registers", mr_, nr_,
                                 mr_ * (nr_ / vector), vector, most, ctx_.target.vector_registers));
  }

  void read_tiles(ScheduleReader& reader) {
    int64_t rows = in_rows_ ? round_up(in_rows_->count, mr_) : read_number(reader, "tile", row_tile_name(), kMostTile);
    const int64_t unit = window_ ? block_lines_ : mr_;
    if (rows % unit != 0) reader.fail(needed(reader, "tile", row_tile_name()), fmt::format("allowed: multiples of the register block's {}", unit));
    lines_ = window_ ? rows : 0;
    rows = window_ ? tile_rows() : rows;
    row_tiles_ = rows / mr_;
    bool whole = rows_extent_.is_constant() && rows_extent_.value() <= rows;
    if (across_ && !window_ && rows_.size() > 1 && !whole)
      reader.fail(needed(reader, "tile", name_of(rows_)), fmt::format("two axes of rows are one tile, allowed: {} or more", print(rows_extent_)));
    int64_t lanes = read_number(reader, "tile", lane_tile_name(), kMostTile);
    if (two_lane_axes()) {
      lane_lines_ = lanes;
      lane_block_ = round_up(lanes * lanes_.back().extent.value(), nr_);
    } else {
      if (lanes % nr_ != 0) reader.fail(needed(reader, "tile", lane_tile_name()), fmt::format("allowed: multiples of the register block's {}", nr_));
      lane_block_ = lanes;
    }
    int64_t scratch = 0;
    for (const Item& item : items_) {
      scratch += rows * lane_block_;
      if (window_)
        scratch += product(window_shape()).value();
      else if (!item.rows.is_static)
        scratch += across_ ? item.depth_block * (rows + item.rows.padding) : rows * (item.depth_block + item.rows.padding);
      if (!item.lanes.is_static) scratch += item.depth_block * lane_block_;
    }
    if (scratch > kMostScratch / 4)
      reader.fail(fmt::format("its tiles need {} bytes of memory for each thread, at most {} are allowed", scratch * 4, kMostScratch));
  }

  // ---- statements ------------------------------------------------------------------------------------------------

  static Ref<tile_ir::Stmt> loop(const std::string& name, Expr lo, Expr hi, LoopKind kind, tile_ir::Block body, int64_t by = 1) {
    return make(tile_ir::For{axis(name, lo, hi, kind, 1, by), std::move(body)});
  }

  static tile_ir::Block store_zero(const std::string& buffer, std::vector<Expr> index, const std::string& name) {
    return {make(loop_ir::Let{name, DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, 0), 0}),
            make(loop_ir::Store{buffer, std::move(index), name, {}, Combiner::set})};
  }

  /// The operand at the point that `map` gives, stored as float32 at buffer[index]. Names get a suffix: a body holds several copies.
  static tile_ir::Block store_operand(const Operand& operand, const Substitution& map, const std::string& buffer, std::vector<Expr> index,
                                      const std::string& suffix) {
    tile_ir::Block out;
    Substitution all = map;
    std::map<std::string, std::string> renamed;
    for (const auto& stmt : operand.slice) {
      if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) {
        loop_ir::Let s = substituted(*let, all);
        for (std::string& o : s.operands)
          if (auto it = renamed.find(o); it != renamed.end()) o = it->second;
        renamed[let->name] = s.name = let->name + suffix;
        out.push_back(make(std::move(s)));
      } else if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) {
        loop_ir::Load s = substituted(*load, all);
        renamed[load->name] = s.name = load->name + suffix;
        out.push_back(make(std::move(s)));
      }
      for (const auto& [from, to] : renamed) all[from] = sym(to);
    }
    out.push_back(make(loop_ir::Store{buffer, std::move(index), renamed.at(operand.source->value), {}, Combiner::set}));
    return out;
  }

  /// A hint to fetch what the pack will read kPrefetchSteps steps of the outermost reduce axis later: rows of one k lie far apart, so that
  /// no hardware prefetcher sees them coming.
  void prefetch_operand(const Item& item, const Operand& operand, const Substitution& map, Expr k, tile_ir::Block& into) const {
    Expr window = 1;
    for (size_t i = 1; i < item.contraction->reduce->axes.size(); ++i) window = window * item.contraction->reduce->axes[i].extent;
    Substitution ahead = map;
    join(ahead, depth_map(item, min(k + window * kPrefetchSteps, item.depth - 1)));
    prefetch_at(operand, ahead, into);
  }

  static void prefetch_at(const Operand& operand, const Substitution& map, tile_ir::Block& into) {
    const loop_ir::Load* main = main_load(operand);
    if (!main) return;
    std::vector<Expr> index;
    for (Expr e : main->index) index.push_back(substitute(e, map));
    into.push_back(make(tile_ir::Prefetch{main->buffer, std::move(index), 1}));
  }

  static void join(Substitution& into, const Substitution& more) {
    for (const auto& [name, value] : more) into[name] = value;
  }

  static Substitution depth_map(const Item& item, Expr k) { return unflatten(item.contraction->reduce->axes, k); }

  static Expr depth_of_block(const Item& item) {
    Expr kb = sym("kb" + item.tag) * item.depth_block;
    return min(item.depth_block, item.depth - kb);
  }

  // ---- packing once ----------------------------------------------------------------------------------------------

  PackedOperand pack_once(Item& item, Operand& operand, bool lanes) {
    PackedOperand packed;
    operand.param = packed.param = (lanes ? "packed_lanes" : "packed_rows") + item.tag;
    int64_t width = lanes ? nr_ : mr_;
    const std::vector<Axis>& axes = lanes ? lanes_ : rows_;
    Expr extent = count(axes);
    Expr panels = ceildiv(extent, width);
    std::vector<Expr> batch_shape;
    for (const auto& a : outer_)
      if (operand.source->axes.count(a.name)) batch_shape.push_back(a.extent);
    // Lanes [outer][k / KC][panel][KC][NR] stream through the cache block by block; rows [outer][panel][k][MR].
    packed.shape = batch_shape;
    if (lanes) packed.shape.push_back(item.depth_blocks);
    packed.shape.push_back(panels);
    packed.shape.push_back(lanes ? Expr(item.depth_block) : item.depth);
    packed.shape.emplace_back(width);

    std::vector<Axis> batch;
    for (const auto& a : outer_)
      if (operand.source->axes.count(a.name)) batch.push_back(a);
    Substitution map = unflatten(batch, floordiv(sym("par"), panels));
    Expr panel = mod(sym("par"), panels);
    std::vector<Expr> prefix;
    for (const auto& a : batch) prefix.push_back(map.at(a.name));
    Expr valid = min(width, extent - panel * width);
    Expr position = sym("pos");
    Expr k = sym("k");
    join(map, unflatten(axes, panel * width + position));
    Expr depth = lanes ? depth_of_block(item) : item.depth;
    join(map, depth_map(item, lanes ? sym("kb" + item.tag) * item.depth_block + k : k));
    auto place = [&](Expr where) {
      std::vector<Expr> index = prefix;
      if (lanes) index.push_back(sym("kb" + item.tag));
      index.insert(index.end(), {panel, k, where});
      return index;
    };
    tile_ir::Block inside;
    bool across = axes.size() == 1 && unit_along(operand, axes[0].name);
    tile_ir::Block copy = store_operand(operand, map, packed.param, place(position), "");
    if (across)
      inside = {loop("k", 0, depth, LoopKind::serial, {loop("pos", 0, valid, LoopKind::lanes, copy)})};
    else
      inside = {loop("pos", 0, valid, LoopKind::serial, {loop("k", 0, depth, LoopKind::lanes, copy)})};
    inside.push_back(
        loop("pad", valid, width, LoopKind::serial, {loop("k", 0, depth, LoopKind::lanes, store_zero(packed.param, place(sym("pad")), "none"))}));
    if (lanes) inside = {loop("kb" + item.tag, 0, item.depth_blocks, LoopKind::serial, std::move(inside))};

    tile_ir::Kernel& kernel = packed.kernel;
    kernel.name = fmt::format("pack_{}{}_{}", lanes ? "lanes" : "rows", item.tag, kernel_.name);
    for (const auto& p : kernel_.params) {
      bool used = std::any_of(operand.slice.begin(), operand.slice.end(), [&](const auto& stmt) {
        const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
        return load && load->buffer == p.name;
      });
      if (!used) continue;
      kernel.params.push_back(p);
      packed.sources.push_back(p.name);
    }
    kernel.params.push_back({packed.param, loop_ir::ParamKind::out, DType::f32, packed.shape, contiguous_strides(packed.shape), false});
    Expr iterations = count(batch) * panels;
    kernel.body = {loop("par", 0, iterations, LoopKind::parallel, std::move(inside))};
    kernel.chunks = max(1, min(iterations, ceildiv(product(packed.shape), chunk_work_)));
    std::vector<Argument> parallel;
    for (const auto& a : batch) parallel.push_back({a.name, {}});
    parallel.insert(parallel.end(), {{name_of(axes), {}}, {"work", chunk_work_}});
    kernel.schedule = {"pack", {{"parallel", parallel}, {"tile", {{name_of(axes), width}}}}};
    kernel.provenance = kernel_.provenance;
    return packed;
  }

  // ---- the kernel ------------------------------------------------------------------------------------------------

  tile_ir::Block body() {
    const int64_t rows_block = row_tiles_ * mr_;
    row_blocks_ = window_ ? ceildiv(rows_[0].extent, lines_) : ceildiv(rows_extent_, rows_block);
    parallel_extent_ = count(outer_) * lane_groups() * row_blocks_;
    Expr par = sym("par");
    outer_map_ = unflatten(outer_, floordiv(par, row_blocks_ * lane_groups()));
    if (window_) {
      first_row_line_ = mod(par, row_blocks_) * lines_;
      valid_row_lines_ = min(lines_, rows_[0].extent - first_row_line_);
      valid_rows_ = valid_row_lines_ * rows_[1].extent;
    } else {
      first_row_ = mod(par, row_blocks_) * rows_block;
      valid_rows_ = min(rows_block, rows_extent_ - first_row_);
      tiles_ = ceildiv(valid_rows_, mr_);
    }
    choose_lanes(mod(floordiv(par, row_blocks_), lane_groups()));
    tile_ir::Block out = allocations();
    for (auto& stmt : tile_body()) out.push_back(stmt);
    return {loop("par", 0, parallel_extent_, LoopKind::parallel, std::move(out))};
  }

  Expr lane_groups() const { return two_lane_axes() ? ceildiv(lanes_[0].extent, lane_lines_) : ceildiv(lanes_extent_, lane_block_); }

  void choose_lanes(Expr group) {
    if (two_lane_axes()) {
      first_line_ = group * lane_lines_;
      valid_lines_ = min(lane_lines_, lanes_[0].extent - first_line_);
      first_lane_ = first_line_ * lanes_[1].extent;
      valid_lanes_ = valid_lines_ * lanes_[1].extent;
    } else {
      first_lane_ = group * lane_block_;
      valid_lanes_ = min(lane_block_, lanes_extent_ - first_lane_);
    }
  }

  tile_ir::Block allocations() const {
    tile_ir::Block out;
    for (const Item& item : items_) {
      auto scratch = [&](const char* name, std::vector<Expr> shape) {
        out.push_back(make(tile_ir::Alloc{name + item.tag, DType::f32, std::move(shape), Space::scratch}));
      };
      scratch("c", {tile_rows(), lane_block_});
      if (window_) {
        scratch("pa", window_shape());
        continue;
      }
      if (!item.rows.is_static && across_) scratch("pa", {item.depth_block, row_tiles_ * mr_ + item.rows.padding});
      if (!item.rows.is_static && !across_) scratch("pa", {row_tiles_ * mr_, item.depth_block + item.rows.padding});
      if (!item.lanes.is_static) scratch("pb", {item.depth_block, lane_block_});
    }
    return out;
  }

  tile_ir::Block tile_body() const {
    tile_ir::Block out;
    for (const Item& item : items_)
      for (auto& stmt : contraction(item)) out.push_back(stmt);
    for (auto& stmt : epilogue()) out.push_back(stmt);
    return out;
  }

  tile_ir::Block contraction(const Item& item) const {
    tile_ir::Block out;
    bool several = !item.depth_blocks.is(1);
    std::string t = item.tag;
    if (several) {
      tile_ir::Block clear = store_zero("c" + t, {sym("zr" + t), sym("zl" + t)}, "zero" + t);
      clear = {loop("zl" + t, 0, round_up(valid_lanes_, nr_), LoopKind::lanes, std::move(clear))};
      Expr rows = window_ ? lines_padded(valid_row_lines_) * rows_[1].extent : tiles_ * mr_;
      out.push_back(loop("zr" + t, 0, rows, LoopKind::serial, std::move(clear)));
    }
    tile_ir::Block block;
    if (!item.lanes.is_static)
      for (auto& s : pack_lines(item, item.lanes, "l", "pb", lane_lines(), round_up(valid_lanes_, nr_))) block.push_back(s);
    if (window_)
      for (auto& s : pack_window(item)) block.push_back(s);
    else if (!item.rows.is_static)
      for (auto& s : across_ ? pack_lines(item, item.rows, "r", "pa", row_lines(), tiles_ * mr_) : pack_rows(item)) block.push_back(s);
    block.push_back(multiply(item, several));
    out.push_back(loop("kb" + t, 0, item.depth_blocks, LoopKind::serial, std::move(block)));
    return out;
  }

  /// Points under the block: [channels of a block of k][lines][points of a line].
  std::vector<Expr> window_shape() const {
    return {items_[0].depth_block / window_->taps(), window_->line.span(lines_), window_->point.span(rows_[1].extent)};
  }

  /// Copies the points under a block of lines as they lie, with the border; what only padding reads is zero.
  tile_ir::Block pack_window(const Item& item) const {
    const Expr channel = sym("kc");
    const Expr line = sym("ul");
    const Expr point = sym("up");
    const Expr channels = count(window_->channels);
    const int64_t block = item.depth_block / window_->taps();
    const Expr lines = window_->line.span(valid_row_lines_);
    const std::vector<Expr> shape = window_shape();
    Expr at = sym("kb" + item.tag) * block + channel;
    Substitution map = outer_map_;
    join(map, window_->line.at(first_row_line_, line));
    join(map, window_->point.at(0, point));
    join(map, unflatten(window_->channels, at));
    tile_ir::Block copy = store_operand(item.rows, map, "pa" + item.tag, {channel, line, point}, ".r");
    Substitution ahead = map;
    join(ahead, unflatten(window_->channels, min(at + kPrefetchSteps, channels - 1)));
    prefetch_at(item.rows, ahead, copy);
    tile_ir::Block inside{loop("ul", 0, lines, LoopKind::serial, {loop("up", 0, shape[2], LoopKind::lanes, std::move(copy))})};
    if (block_lines_ > 1) {
      tile_ir::Block zero{loop("ue", 0, shape[2], LoopKind::lanes, store_zero("pa" + item.tag, {channel, sym("uz"), sym("ue")}, "edge"))};
      inside.push_back(loop("uz", lines, window_->line.span(lines_padded(valid_row_lines_)), LoopKind::serial, std::move(zero)));
    }
    return {loop("kc", 0, min(block, channels - sym("kb" + item.tag) * block), LoopKind::serial, std::move(inside))};
  }

  /// A tile along one axis or a group, or along two of which whole lines of the inner one lie side by side.
  struct Lines {
    std::vector<Axis> axes;
    bool two = false;
    Expr first, valid;             ///< of the group
    Expr first_line, valid_lines;  ///< of the outer axis, if there are two
  };

  Lines lane_lines() const { return {lanes_, two_lane_axes(), first_lane_, valid_lanes_, first_line_, valid_lines_}; }

  Lines row_lines() const {
    bool two = rows_.size() == 2;
    return {rows_, two, first_row_, valid_rows_, 0, two ? rows_[0].extent : 0};
  }

  /// Copies a tile of an operand to buffer[k][place], with vectors along its axes; zeros up to `padded`.
  tile_ir::Block pack_lines(const Item& item, const Operand& operand, const std::string& side, const std::string& prefix, const Lines& lines,
                            Expr padded) const {
    std::string t = item.tag;
    std::string buffer = prefix + t;
    std::string suffix = "." + side + t;
    std::string k_name = "k" + side + t;
    std::string p_name = "p" + side + t;
    Expr k = sym(k_name);
    Expr depth = depth_of_block(item);
    Substitution map = outer_map_;
    join(map, depth_map(item, sym("kb" + t) * item.depth_block + k));
    tile_ir::Block out;
    if (lines.two) {
      std::string u_name = "u" + side + t;
      map[lines.axes[0].name] = lines.first_line + sym(u_name);
      map[lines.axes[1].name] = sym(p_name);
      Expr place = sym(u_name) * lines.axes[1].extent + sym(p_name);
      tile_ir::Block copy = store_operand(operand, map, buffer, {k, place}, suffix);
      prefetch_operand(item, operand, map, sym("kb" + t) * item.depth_block + k, copy);
      copy = {loop(p_name, 0, lines.axes[1].extent, LoopKind::lanes, std::move(copy))};
      copy = {loop(u_name, 0, lines.valid_lines, LoopKind::serial, std::move(copy))};
      out.push_back(loop(k_name, 0, depth, LoopKind::serial, std::move(copy)));
    } else {
      join(map, unflatten(lines.axes, lines.first + sym(p_name)));
      tile_ir::Block copy = store_operand(operand, map, buffer, {k, sym(p_name)}, suffix);
      bool along_k = item.contraction->reduce->axes.size() == 1 && unit_along(operand, item.contraction->reduce->axes[0].name);
      if (along_k) {
        // Memory runs along k: squares are transposed in registers.
        const int64_t side = ctx_.target.vector_bytes / 4;
        std::string s_name = k_name + "_square";
        std::string i_name = k_name + "_in";
        auto at = [&](Expr point) {
          Substitution there = map;
          for (auto& [name, value] : there) value = substitute(value, {{k_name, point}});
          return store_operand(operand, there, buffer, {point, sym(p_name)}, suffix);
        };
        tile_ir::Block square{loop(i_name, 0, side, LoopKind::unroll, at(sym(s_name) * side + sym(i_name)))};
        square = {loop(p_name, 0, lines.valid, LoopKind::lanes, std::move(square))};
        out.push_back(loop(s_name, 0, floordiv(depth, side), LoopKind::serial, std::move(square)));
        bool whole = item.depth.is_constant() && item.depth.value() % side == 0 && (item.depth_block % side == 0 || item.depth_blocks.is(1));
        if (!whole)
          out.push_back(
              loop(k_name, floordiv(depth, side) * side, depth, LoopKind::serial, {loop(p_name, 0, lines.valid, LoopKind::lanes, std::move(copy))}));
      } else {
        prefetch_operand(item, operand, map, sym("kb" + t) * item.depth_block + k, copy);
        out.push_back(loop(k_name, 0, depth, LoopKind::serial, {loop(p_name, 0, lines.valid, LoopKind::lanes, std::move(copy))}));
      }
    }
    std::string e_name = "e" + side + t;
    tile_ir::Block edge = store_zero(buffer, {sym(k_name + "e"), sym(e_name)}, "edge" + side + t);
    edge = {loop(e_name, lines.valid, padded, LoopKind::lanes, std::move(edge))};
    out.push_back(loop(k_name + "e", 0, depth, LoopKind::serial, std::move(edge)));
    return out;
  }

  tile_ir::Block pack_rows(const Item& item) const {
    std::string t = item.tag;
    std::string buffer = "pa" + t;
    std::string k_name = "kr" + t;
    std::string r_name = "rr" + t;
    Expr row = sym(r_name);
    Expr k = sym(k_name);
    Expr depth = depth_of_block(item);
    auto copy = [&](Expr point) {
      Substitution map = outer_map_;
      join(map, unflatten(rows_, first_row_ + point));
      join(map, depth_map(item, sym("kb" + t) * item.depth_block + k));
      return store_operand(item.rows, map, buffer, {point, k}, ".r" + t);
    };
    auto along_depth = [&](tile_ir::Block body) { return tile_ir::Block{loop(k_name, 0, depth, LoopKind::lanes, std::move(body))}; };
    tile_ir::Block out;
    Expr first = 0;
    if (rows_.size() == 1 && unit_along(item.rows, rows_[0].name)) {
      // Memory runs along the rows: squares are transposed in registers.
      const int64_t side = ctx_.target.vector_bytes / 4;
      tile_ir::Block square{loop(r_name + "_in", 0, side, LoopKind::unroll, copy(sym(r_name + "_square") * side + sym(r_name + "_in")))};
      out.push_back(loop(r_name + "_square", 0, floordiv(valid_rows_, side), LoopKind::serial, along_depth(std::move(square))));
      first = floordiv(valid_rows_, side) * side;
    }
    out.push_back(loop(r_name, first, valid_rows_, LoopKind::serial, along_depth(copy(row))));
    std::string e_name = "er" + t;
    tile_ir::Block edge = store_zero(buffer, {sym(e_name), sym(k_name + "e")}, "edger" + t);
    out.push_back(loop(e_name, valid_rows_, tiles_ * mr_, LoopKind::serial, {loop(k_name + "e", 0, depth, LoopKind::lanes, std::move(edge))}));
    return out;
  }

  std::vector<Expr> outer_index(const Operand& operand) const {
    std::vector<Expr> index;
    for (const auto& a : outer_)
      if (operand.source->axes.count(a.name)) index.push_back(outer_map_.at(a.name));
    return index;
  }

  /// All register blocks of the tile over one block of k.
  Ref<tile_ir::Stmt> multiply(const Item& item, bool several) const {
    const std::string& t = item.tag;
    tile_ir::Block tiles;
    if (window_) {
      for (const LineBlocks& b : line_blocks(block_points_))
        tiles.push_back(loop("rx" + t, 0, b.count, LoopKind::serial, register_block(item, several, block_lines_ * b.points, b)));
      tiles = {loop("rt" + t, 0, ceildiv(valid_row_lines_, block_lines_), LoopKind::serial, std::move(tiles))};
    } else {
      tiles = {loop("rt" + t, 0, tiles_, LoopKind::serial, register_block(item, several, mr_, {}))};
    }
    return loop("pt" + t, 0, ceildiv(valid_lanes_, nr_), LoopKind::serial, std::move(tiles));
  }

  /// One block of mr rows; of lines, where `points` lie.
  tile_ir::Block register_block(const Item& item, bool several, int64_t mr, const LineBlocks& points) const {
    std::string t = item.tag;
    Expr tile = sym("rt" + t);
    Expr panel = sym("pt" + t);
    Expr r = sym("r" + t);
    Expr lane = sym("x" + t);
    Expr k = sym("k" + t);
    // Of windows, k is made of a channel and two taps, a row of a line and a point.
    const Expr channel = sym("kc" + t);
    const Expr line_tap = window_ && window_->line.taps > 1 ? sym("ky" + t) : Expr(0);
    const Expr point_tap = window_ && window_->point.taps > 1 ? sym("kx" + t) : Expr(0);
    if (window_) k = channel * window_->taps() + line_tap * window_->point.taps + point_tap;
    auto line_of = [&](Expr row) { return tile * block_lines_ + floordiv(row, points.points); };
    auto point_of = [&](Expr row) { return sym("rx" + t) * points.points + points.first + mod(row, points.points); };
    // Arrays of registers need names of their own.
    std::string acc = "acc" + t + (points.first > 0 ? "s" : "");
    auto each = [&](const std::string& suffix, tile_ir::Block before, tile_ir::Block inner) {
      tile_ir::Block body = std::move(before);
      body.push_back(loop("x" + t + suffix, 0, nr_, LoopKind::lanes, std::move(inner)));
      return loop("r" + t + suffix, 0, mr, LoopKind::unroll, std::move(body));
    };
    auto rows_at = [&](Expr row) {
      std::vector<Expr> index = outer_index(item.rows);
      if (window_)
        return std::vector<Expr>{channel, line_of(row) * window_->line.step + line_tap * window_->line.tap_step,
                                 point_of(row) * window_->point.step + point_tap * window_->point.tap_step};
      if (!item.rows.is_static && across_) return std::vector<Expr>{k, tile * mr_ + row};
      if (!item.rows.is_static) return std::vector<Expr>{tile * mr_ + row, k};
      index.insert(index.end(), {floordiv(first_row_, mr_) + tile, sym("kb" + t) * item.depth_block + k, row});
      return index;
    };
    auto lanes_at = [&](Expr at) {
      if (!item.lanes.is_static) return std::vector<Expr>{k, panel * nr_ + at};
      std::vector<Expr> index = outer_index(item.lanes);
      index.insert(index.end(), {sym("kb" + t), floordiv(first_lane_, nr_) + panel, k, at});
      return index;
    };
    std::string rows_buffer = item.rows.is_static ? item.rows.param : "pa" + t;
    std::string lanes_buffer = item.lanes.is_static ? item.lanes.param : "pb" + t;
    auto f32 = DType::f32;
    Expr r0 = sym("r" + t + "i");
    Expr x0 = sym("x" + t + "i");
    tile_ir::Block block{make(tile_ir::Alloc{acc, f32, {mr, nr_}, Space::reg}), each("i", {}, store_zero(acc, {r0, x0}, "start" + t))};
    tile_ir::Block step{make(loop_ir::Load{"bv" + t, f32, lanes_buffer, lanes_at(lane), {}, {}}),
                        make(loop_ir::Load{"cv" + t, f32, acc, {r, lane}, {}, {}}),
                        make(loop_ir::Let{"fv" + t, f32, Fn::fma, {"av" + t, "bv" + t, "cv" + t}, {}, 0}),
                        make(loop_ir::Store{acc, {r, lane}, "fv" + t, {}, Combiner::set})};
    tile_ir::Block body;
    if (item.lanes.is_static && in_rows_ == nullptr) {
      std::vector<Expr> next = lanes_at(0);
      next[next.size() - 3] = min(next[next.size() - 3] + 1, ceildiv(lanes_extent_, nr_) - 1);
      for (int64_t line = 0; line < nr_; line += kCacheLine) {
        std::vector<Expr> at = next;
        at.back() = at.back() + line;
        body.push_back(make(tile_ir::Prefetch{lanes_buffer, std::move(at), 2}));
      }
    }
    body.push_back(each("", {make(loop_ir::Load{"av" + t, f32, rows_buffer, rows_at(r), {}, {}})}, std::move(step)));
    if (window_) {
      bool unrolled = false;
      auto wrap = [&](const std::string& name, Expr extent) {
        body = {loop(name + t, 0, extent, LoopKind::serial, std::move(body), unrolled ? 1 : item.unroll)};
        unrolled = true;
      };
      if (window_->point.taps > 1) wrap("kx", window_->point.taps);
      if (window_->line.taps > 1) wrap("ky", window_->line.taps);
      wrap("kc", floordiv(depth_of_block(item), window_->taps()));
      block.insert(block.end(), body.begin(), body.end());
    } else {
      block.push_back(loop("k" + t, 0, depth_of_block(item), LoopKind::serial, std::move(body), item.unroll));
    }
    // Each block of k is summed by itself and then added: shorter chains than one over all of k.
    Expr ro = sym("r" + t + "o");
    Expr xo = sym("x" + t + "o");
    Expr sum_row = window_ ? line_of(ro) * rows_[1].extent + point_of(ro) : tile * mr_ + ro;
    std::vector<Expr> target{sum_row, panel * nr_ + xo};
    tile_ir::Block finish{make(loop_ir::Load{"dv" + t, f32, acc, {ro, xo}, {}, {}})};
    std::string sum = "dv" + t;
    if (several) {
      finish.push_back(make(loop_ir::Load{"ov" + t, f32, "c" + t, target, {}, {}}));
      finish.push_back(make(loop_ir::Let{"sv" + t, f32, Fn::add, {"ov" + t, "dv" + t}, {}, 0}));
      sum = "sv" + t;
    }
    finish.push_back(make(loop_ir::Store{"c" + t, target, sum, {}, Combiner::set}));
    block.push_back(each("o", {}, std::move(finish)));
    return block;
  }

  /// Everything but the sums, over the finished tile, with vectors along the stores' contiguous axis.
  tile_ir::Block epilogue() const {
    Expr row = sym("row");
    if (!across_) return {loop("row", 0, valid_rows_, LoopKind::serial, {loop("lane", 0, valid_lanes_, LoopKind::lanes, finish(row, sym("lane")))})};
    // The sums lie across: squares of them are transposed in registers.
    const int64_t side = ctx_.target.vector_bytes / 4;
    auto rows = [&](tile_ir::Block inner) { return tile_ir::Block{loop("row", 0, valid_rows_, LoopKind::lanes, std::move(inner))}; };
    tile_ir::Block inside{loop("lane_in", 0, side, LoopKind::unroll, finish(row, sym("lane_square") * side + sym("lane_in")))};
    tile_ir::Block out{loop("lane_square", 0, floordiv(valid_lanes_, side), LoopKind::serial, rows(std::move(inside)))};
    if (!lanes_extent_.is_constant() || lanes_extent_.value() % side != 0)
      out.push_back(loop("lane", floordiv(valid_lanes_, side) * side, valid_lanes_, LoopKind::serial, rows(finish(row, sym("lane")))));
    return out;
  }

  /// The statements outside of the reductions, at one point of the tile.
  tile_ir::Block finish(Expr row, Expr lane) const {
    Substitution map = outer_map_;
    if (window_) {
      map[rows_[0].name] = first_row_line_ + floordiv(row, rows_[1].extent);
      map[rows_[1].name] = mod(row, rows_[1].extent);
    } else {
      join(map, unflatten(rows_, first_row_ + row));
    }
    join(map, unflatten(lanes_, first_lane_ + lane));
    tile_ir::Block inner;
    for (const auto& stmt : *nest_.inner) {
      std::visit(Overloaded{[&](const loop_ir::Let& s) { inner.push_back(make(substituted(s, map))); },
                            [&](const loop_ir::Load& s) { inner.push_back(make(substituted(s, map))); },
                            [&](const loop_ir::Store& s) { inner.push_back(make(substituted(s, map))); },
                            [&](const loop_ir::Check& s) { inner.push_back(make(substituted(s, map))); },
                            [&](const loop_ir::Reduce& s) {
                              for (const Item& item : items_)
                                if (item.contraction->reduce == &s)
                                  inner.push_back(make(loop_ir::Load{s.results[0], DType::f32, "c" + item.tag, {row, lane}, {}, {}}));
                            },
                            [](const auto&) {}},
                 stmt->node);
    }
    return inner;
  }

  const loop_ir::Kernel kernel_;
  const std::set<std::string>& statics_;
  const PassContext& ctx_;
  OuterNest nest_;
  std::vector<Contraction> contractions_;
  std::vector<Item> items_;
  std::vector<Axis> rows_, lanes_, outer_;
  std::vector<Axis> lane_class_;  ///< the axes that only the lane operands vary along
  Axis unit_;                     ///< the one along which stores are contiguous
  std::optional<Window> window_;  ///< when the rows' operand is packed as it lies under windows
  bool windowed_ = false;         ///< asked for
  int64_t lines_ = 0, block_lines_ = 0, block_points_ = 0;
  Expr first_row_line_, valid_row_lines_;
  bool across_ = false;                       ///< lanes are off that axis: the sums are transposed at the end
  const ContractionRows* in_rows_ = nullptr;  ///< when this is a phase of a block of rows
  int64_t chunk_work_ = kChunkWork;
  int64_t mr_ = 0, nr_ = 0, row_tiles_ = 0, lane_block_ = 0, lane_lines_ = 0;
  Expr rows_extent_, lanes_extent_, row_blocks_, parallel_extent_;
  Expr first_row_, first_lane_, first_line_, valid_rows_, valid_lanes_, valid_lines_, tiles_;
  Substitution outer_map_;
  Ranges ranges_;
  std::string tag_;
};

}  // namespace

std::optional<Schedule> propose_cpu_contraction(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx) {
  loop_ir::Kernel merged = loop_to_tile::merge_outer_axes(kernel);
  Scheduler along(merged, statics, ctx);
  auto schedule = along.propose();
  if (!schedule) return std::nullopt;
  double best = along.padded_work();
  auto consider = [&](Scheduler&& other, auto propose) {
    if (auto better = propose(other)) {
      schedule = better;
      best = other.padded_work();
    }
  };
  consider(Scheduler(merged, statics, ctx), [&](Scheduler& s) { return s.propose_across(best); });
  for (bool across : {true, false}) consider(Scheduler(merged, statics, ctx), [&](Scheduler& s) { return s.propose_window(across, best); });
  return schedule;
}

ScheduledContraction apply_cpu_contraction(const loop_ir::Kernel& kernel, const Schedule& schedule, const std::set<std::string>& statics,
                                           const PassContext& ctx) {
  return Scheduler(loop_to_tile::merge_outer_axes(kernel), statics, ctx).apply(schedule);
}

int64_t contraction_rows(int64_t rows, const PassContext& ctx) { return round_up(rows, register_rows(rows, ctx)); }

std::optional<std::vector<Directive>> propose_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const PassContext& ctx) {
  return Scheduler(kernel, {}, ctx).propose_rows(rows);
}

tile_ir::Block apply_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const Schedule& schedule, const PassContext& ctx) {
  return Scheduler(kernel, {}, ctx).apply_rows(rows, schedule);
}

}  // namespace deplo
