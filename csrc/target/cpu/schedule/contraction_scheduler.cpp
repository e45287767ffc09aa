#include "target/cpu/schedule/contraction_scheduler.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "loop_ir/text.h"

namespace deplo::loop_to_tile {
namespace {

constexpr int64_t kWidestInnerAxis = 512;  // of the two axes that share the lanes
constexpr int64_t kStreamRows = 1;         // up to here, weights that lie along k are streamed, not packed
constexpr int64_t kUnpackedRows = 2;       // up to here, packing what changes from call to call costs more than it saves
constexpr int64_t kUnpackedStreams = 6;    // ... where it lies along k, and is streamed
constexpr int64_t kLeastWork = 8192;       // multiply-adds below which packing does not pay
constexpr int64_t kUnknownExtent = 128;
constexpr int64_t kLineOfRows = 512;     // of an image: its last block's empty rows cost less than gathering rows of several images
constexpr double kAcrossGain = 0.95;     // lanes off the stores' contiguous axis must save more than transposing the sums costs
constexpr double kPairCost = 0.55;       // of two multiply-adds in one instruction
constexpr double kWordCost = 0.3;        // of four in one instruction
constexpr double kMatrixCost = 0.1;      // of one in a matrix unit
constexpr double kByteCost = 0.05;       // of bytes there
constexpr double kSplitCost = 0.6;       // of six there, for one of float32
constexpr double kWindowGain = 1.25;     // measured: packing every tap costs more than its copies
constexpr int64_t kWidestImage = 1024;   // points of a line of which a block takes whole lines
constexpr double kCopy = 8;              // cost of packing an element, in multiply-adds
constexpr double kFarCopy = 8;           // of one that comes from memory, which nothing hides
constexpr double kLineCopy = 1;          // where lines of k are copied as they lie
constexpr double kFarLineCopy = 20;      // ... and come from beyond the second cache: measured where vectors are 32 bytes
constexpr double kFarLine = 3;           // more for lines of weights, which come from memory: measured for 16 to 256 lanes, float32 and bfloat16
constexpr double kGather = 150;          // of one of 16 bits whose neighbours lie elsewhere: measured
constexpr double kCallCopy = 24;         // once a call: it goes through memory once more, and threads wait for one another
constexpr int64_t kKeptBytes = 1 << 16;  // weights up to here are packed once in any case

}  // namespace

ContractionScheduler::ContractionScheduler(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx, int64_t bits,
                                           bool centered)
    : kernel_(kernel),
      statics_(statics),
      ctx_(ctx),
      nest_(outer_nest(kernel_)),
      contractions_(analysis::find_contractions(kernel_)),
      bits_(bits),
      centered_(centered) {
  ranges_ = kernel_.symbols;
  for (const auto& a : nest_.axes) ranges_[a.name] = axis_range(a.extent);
  for (const Contraction& c : contractions_)
    for (const auto& a : c.reduce->axes) ranges_[a.name] = axis_range(a.extent);
}

std::optional<Schedule> ContractionScheduler::propose() {
  if (!recognize()) return std::nullopt;
  group_lanes();
  if (!streamed()) return std::nullopt;
  choose_sizes();
  return describe();
}

std::optional<Schedule> ContractionScheduler::propose_across(double best) {
  across_ = true;
  if (!recognize() || !lanes_static()) return std::nullopt;
  group_lanes();
  bool known = rows_extent_.is_constant() && lanes_extent_.is_constant() && rows_.size() <= 2;
  known = known && (!rows_lie_across() || rows_extent_.value() <= kDynamicRows);
  if (!known || !streamed()) return std::nullopt;
  choose_sizes();
  if (padded_work() > kAcrossGain * best) return std::nullopt;
  return describe();
}

std::optional<Schedule> ContractionScheduler::propose_apart(double best) {
  apart_ = true;
  if (!recognize() || lane_class_.size() < 2) return std::nullopt;
  group_lanes();
  if (!streamed()) return std::nullopt;
  choose_sizes();
  if (padded_work() > kAcrossGain * best) return std::nullopt;
  return describe();
}

bool ContractionScheduler::keeps_plain_weights() const {
  auto plain = [](const Operand& operand) {
    return operand.source->buffers.size() == 1 && (operand.narrow() || operand.statements_of(operand.source->value).size() == 1);
  };
  bool any = false;
  for (const Item& item : items_) {
    if (item.matrix || item.parts > 1 || item.words) return false;
    for (const Operand* operand : {&item.lanes, &item.rows}) {
      if (!operand->is_static || operand->per_call) continue;
      if (!plain(*operand)) return false;
      any = true;
    }
  }
  return any;
}

std::optional<Schedule> ContractionScheduler::propose_per_call(bool across, double best) {
  across_ = across;
  per_call_ = true;
  if (!recognize() || std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.lanes.per_call; })) return std::nullopt;
  group_lanes();
  if (across_ && (rows_.size() > 2 || rows_lie_across())) return std::nullopt;
  if (!streamed()) return std::nullopt;
  choose_sizes();
  if (padded_work() > best) return std::nullopt;
  return describe();
}

std::optional<Schedule> ContractionScheduler::propose_window(bool across, bool per_call, double best) {
  across_ = across;
  per_call_ = per_call;
  windowed_ = true;
  if (!recognize() || !lanes_static()) return std::nullopt;
  // Of weights: copies of other lanes would be the windows of an image.
  if (per_call_ && std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.lanes.per_call && i.lanes.fixed; })) return std::nullopt;
  group_lanes();
  if (!lanes_extent_.is_constant() || !streamed()) return std::nullopt;
  choose_sizes();
  if (padded_work() > kWindowGain * best) return std::nullopt;
  return describe();
}

double ContractionScheduler::padded_work() const {
  const auto points = static_cast<double>(hint(count(outer_)));
  int64_t lanes = round_up(hint(lanes_extent_), nr_);
  if (window_) {
    double rows = window_cost(block_lines_, block_points_);
    Expr image = window_->line.span(lines_) * window_->point.span(window_->point.axis.extent);
    Expr packs = ceildiv(window_->line.axis.extent, lines_) * lane_groups();
    const double products =
        items_[0].pairs ? kPairCost * static_cast<double>(hint(items_[0].depth)) / static_cast<double>(hint(count(items_[0].summed))) : 1;
    return points *
           (products * rows * static_cast<double>(lanes) + kCopy * static_cast<double>(hint(image * packs)) / static_cast<double>(window_->taps()));
  }
  if (two_lane_axes() && lanes_[0].extent.is_constant()) {
    int64_t inner = lanes_[1].extent.value();
    int64_t lines = lanes_[0].extent.value();
    lanes = lines / lane_lines_ * round_up(lane_lines_ * inner, nr_) + round_up(lines % lane_lines_ * inner, nr_);
  }
  double packed = 0;  // multiply-adds that it costs
  const int64_t row_blocks = hint(ceildiv(rows_extent_, row_tiles_ * mr_));
  // What does not stay in a cache comes from memory for each pack.
  const int64_t l3 = ctx_.target.l3_bytes;
  const bool lines = items_[0].contraction->reduce->axes.size() == 1 && unit_along(items_[0].lanes, lanes_.back().name);
  const int64_t bytes = hint(count(lanes_) * items_[0].depth) * 4;
  const bool far_lines = lines && bytes > ctx_.target.l2_bytes && ctx_.target.vector_bytes <= 32 && !items_[0].pairs;
  const double near = far_lines ? kFarLineCopy : lines ? kLineCopy : kCopy;
  const double copy = bytes > l3 ? near + kFarCopy : near;
  if (!items_[0].lanes.is_static) packed += copy * static_cast<double>(lanes * row_blocks);
  if (items_[0].lanes.per_call) packed += kCallCopy * static_cast<double>(lanes);
  const bool in_lines = wants_lines(items_[0]) || unit_along(items_[0].rows, items_[0].summed.back().name);
  if (!items_[0].rows.is_static) packed += (in_lines ? kLineCopy : kCopy) * static_cast<double>(hint(rows_extent_ * lane_groups()));
  if (items_[0].pairs) {
    // Of 16 bits, what lies apart is read element by element.
    const auto& summed = items_[0].summed;
    auto gathered = [&](const Operand& operand, const std::vector<Axis>& axes, bool one) {
      const Axis& inner = summed.back();
      const bool run = summed.size() == 1 || (inner.extent.is_constant() && inner.extent.value() >= kCacheLine) || lies_along(operand, summed);
      return !((!one || axes.size() == 1) && unit_along(operand, axes.back().name)) && !(run && unit_along(operand, inner.name));
    };
    const bool per_call = items_[0].lanes.per_call;
    if ((per_call || !items_[0].lanes.is_static) && gathered(items_[0].lanes, lanes_, per_call))
      packed += kGather * static_cast<double>(lanes * (per_call ? 1 : row_blocks));
    if (!items_[0].rows.is_static && gathered(items_[0].rows, rows_, true))
      packed += kGather * static_cast<double>(hint(rows_extent_ * lane_groups()));
  }
  const bool split = items_[0].parts > 1;
  const double products = split                                ? kSplitCost
                          : items_[0].matrix                   ? (items_[0].words ? kByteCost : kMatrixCost)
                          : items_[0].words || items_[0].bytes ? kWordCost
                          : items_[0].pairs                    ? kPairCost
                                                               : 1;
  return points * (products * block_cost(hint(rows_extent_), mr_, block_vectors(), items_[0].group() > 1 ? 0 : ctx_.target.load_cost) *
                       static_cast<double>(lanes) +
                   packed);
}

double ContractionScheduler::reading_rows() const {
  // Weights stay in the second cache from call to call where all that a thread touches does: threads share the rows.
  const Expr depth = items_[0].depth;
  const Expr rows = ceildiv(rows_extent_, ctx_.target.threads);
  if (hint(count(outer_) * (rows * depth + lanes_extent_ * depth + rows * lanes_extent_)) * 4 <= ctx_.target.l2_bytes) return 0;
  return kFarLine * static_cast<double>(hint(count(outer_)) * hint(rows_extent_ * lane_groups()));
}

ScheduledContraction ContractionScheduler::apply(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  across_ = is_across(schedule);
  windowed_ = is_windowed(schedule);
  parallel_ = parallel_names(schedule);
  per_call_ = is_per_call(schedule);
  if (!recognize()) reader.fail("the kernel is no contraction whose operands vary along its stores' contiguous axis");
  read(reader);
  ScheduledContraction out;
  tile_ir::Kernel& k = out.kernel;
  k.name = kernel_.name;
  k.params = kernel_.params;
  k.symbols = kernel_.symbols;
  k.provenance = kernel_.provenance;
  for (Item& item : items_) {
    const Item* same = nullptr;
    for (const Item& other : items_) {
      if (&other == &item) break;
      if (item.lanes.per_call && other.lanes.per_call && packs_alike(item, other)) same = &other;
    }
    if (same) {
      item.lanes.param = same->lanes.param;
    } else if (item.lanes.is_static) {
      out.packed.push_back(pack_once(item, item.lanes, true));
      for (auto& factor : pack_factors(item)) out.packed.push_back(std::move(factor));
      if (item.needs_lane_sums()) out.packed.push_back(pack_lane_sums(item));
    }
    if (item.rows.is_static) out.packed.push_back(pack_once(item, item.rows, false));
  }
  for (const PackedOperand& p : out.packed)
    k.params.push_back({p.param, loop_ir::ParamKind::in, p.dtype, p.shape, contiguous_strides(p.shape), p.once});
  k.body = body();
  Expr work = count(outer_) * rows_extent_ * lanes_extent_ * items_[0].depth * static_cast<int64_t>(items_.size());
  k.chunks = max(1, min(parallel_extent_, ceildiv(work, chunk_work_)));
  k.schedule = schedule;
  return out;
}

bool ContractionScheduler::packs_alike(const Item& a, const Item& b) {
  const bool sizes = a.depth == b.depth && a.depth_block == b.depth_block && a.group() == b.group() && a.matrix == b.matrix && a.parts == b.parts;
  return sizes && lanes_text(a) == lanes_text(b);
}

std::string ContractionScheduler::lanes_text(const Item& item) {
  Substitution at = depth_map(item, sym("k"));
  std::map<std::string, std::string> names;
  std::string text;
  auto number = [&](std::string& name) {
    names[name] = fmt::format("v{}", names.size());
    at[name] = sym(names[name]);
    name = names[name];
  };
  for (const auto& stmt : item.lanes.statements_of(item.lanes.source->value)) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) {
      loop_ir::Let s = substituted(*let, at);
      for (std::string& o : s.operands)
        if (auto known = names.find(o); known != names.end()) o = known->second;
      number(s.name);
      text += loop_ir::print(s) + ";";
    } else if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) {
      loop_ir::Load s = substituted(*load, at);
      number(s.name);
      text += loop_ir::print(s) + ";";
    }
  }
  return text;
}

std::optional<std::vector<Directive>> ContractionScheduler::propose_rows(const ContractionRows& tile) {
  in_rows_ = &tile;
  if (!recognize()) return std::nullopt;
  group_lanes();
  if (!bound()) return std::nullopt;
  choose_sizes();
  return describe().directives;
}

tile_ir::Block ContractionScheduler::apply_rows(const ContractionRows& tile, const Schedule& schedule) {
  in_rows_ = &tile;
  tag_ = tile.tag;
  ScheduleReader reader(kernel_.name, schedule);
  if (!recognize()) reader.fail("a phase is no contraction whose operands vary along its stores' contiguous axis");
  read(reader);
  if (!bound()) reader.fail(fmt::format("the rows of a phase must be those of {}, its lanes axes of its own", tile.axis));
  outer_map_ = tile.outer;
  first_row_ = tile.first;
  valid_rows_ = tile.valid;
  count_tiles();
  choose_lanes(sym("group" + tag_));
  tile_ir::Block out = allocations();
  out.push_back(loop("group" + tag_, 0, lane_groups(), LoopKind::serial, tile_body()));
  return out;
}

bool ContractionScheduler::bound() const {
  bool ok = rows_.size() == 1 && rows_[0].name == in_rows_->axis;
  for (const auto& a : outer_) ok = ok && in_rows_->outer.count(a.name) > 0;
  for (const auto& a : lanes_) ok = ok && in_rows_->outer.count(a.name) == 0;
  return ok;
}

bool ContractionScheduler::fits() {
  size_t found = 0;
  for (const auto& stmt : *nest_.inner) {
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
      bool known = std::any_of(contractions_.begin(), contractions_.end(), [&](const Contraction& c) { return c.reduce == reduce; });
      if (!known || (reduce->dtypes[0] != DType::f32 && reduce->dtypes[0] != DType::i32)) return false;
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

std::vector<const loop_ir::Store*> ContractionScheduler::stores() const {
  std::vector<const loop_ir::Store*> all;
  for (const auto& stmt : *nest_.inner)
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) all.push_back(store);
  return all;
}

Expr ContractionScheduler::offset(const std::string& buffer, const std::vector<Expr>& index) const {
  const loop_ir::Param* param = kernel_.find_param(buffer);
  Expr sum = 0;
  if (!param) return sum;
  for (size_t d = 0; d < index.size(); ++d) sum = sum + index[d] * param->strides[d];
  return simplify(sum, ranges_);
}

std::optional<Axis> ContractionScheduler::contiguous_axis() const {
  std::optional<Axis> best;
  int64_t most = 1;
  for (const auto& a : nest_.axes) {
    int64_t count = 0;
    for (const loop_ir::Store* s : stores()) {
      auto step = linear_coefficient(offset(s->buffer, s->index), a.name);
      if (step && step->is(1)) ++count;
    }
    if (count < most) continue;
    most = count;
    best = a;
  }
  return best;
}

bool ContractionScheduler::continues(const std::string& axis, Expr span) const {
  auto all = stores();
  return std::all_of(all.begin(), all.end(), [&](const loop_ir::Store* s) {
    const Expr at = offset(s->buffer, s->index);
    auto outer = linear_coefficient(at, axis);
    auto inner = linear_coefficient(at, unit_.name);
    return outer && inner && *outer == simplify(*inner * span, ranges_);
  });
}

bool ContractionScheduler::whole_vectors(Expr span) const { return span.is_constant() && span.value() % (ctx_.target.vector_bytes / 4) == 0; }

bool ContractionScheduler::classify() {
  auto unit = contiguous_axis();
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
    if (!prepare(item.lanes, in_a ? c.a : c.b, c.reduce->axes) || !prepare(item.rows, in_a ? c.b : c.a, c.reduce->axes)) return false;
    if (per_call_ && !item.lanes.is_static) item.lanes.is_static = item.lanes.per_call = true;
    item.depth = count(c.reduce->axes);
    order_steps(item);
    const auto is_empty = [](const Axis& a) { return a.extent.is(0); };
    if (std::any_of(c.reduce->axes.begin(), c.reduce->axes.end(), is_empty)) return false;  // sums of nothing
    if (std::any_of(nest_.axes.begin(), nest_.axes.end(), is_empty)) return false;
    items_.push_back(std::move(item));
  }
  auto kind_of = [&](const Axis& a, const Item& item) {
    if (in_rows_ && in_rows_->outer.count(a.name)) return 'o';
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
  if (rows_.size() == 2 && !windowed_ && (parallel_ ? parallel_->count(rows_.back().name) > 0 : are_lines_enough())) {
    outer_.push_back(rows_.front());
    rows_.erase(rows_.begin());
  }
  rows_extent_ = count(rows_);
  if (across_ && (rows_.empty() || rows_.back().name != unit_.name || rows_.size() > 2)) return false;
  if (rows_.empty() || lane_class_.empty()) return false;
  // Integers are multiplied in bytes or not at all.
  return std::all_of(items_.begin(), items_.end(),
                     [&](const Item& i) { return i.dtype() == items_[0].dtype() && (i.dtype() != DType::i32 || can_word(i)); });
}

bool ContractionScheduler::are_lines_enough() const {
  return !across_ && !in_rows_ && hint(rows_.back().extent) >= kLineOfRows && std::all_of(items_.begin(), items_.end(), [&](const Item& item) {
    return item.lanes.is_static && !item.rows.is_static && item.dtype() == DType::f32 && unit_along(item.rows, rows_.back().name);
  });
}

void ContractionScheduler::order_steps(Item& item) const {
  item.summed = item.contraction->reduce->axes;
  auto is_bf16 = [&](const Operand& operand) {
    const auto narrow = operand.narrow();
    const auto stored = operand.stored();
    return narrow && narrow->dtype == DType::bf16 && stored->dtype == DType::bf16 && !operand.prologue(item.summed);
  };
  if (windowed_ || in_rows_ || !is_bf16(item.rows) || !is_bf16(item.lanes) || unit_along(item.rows, item.summed.back().name)) return;
  auto along = std::find_if(item.summed.begin(), item.summed.end(), [&](const Axis& a) { return unit_along(item.rows, a.name); });
  if (along != item.summed.end()) std::rotate(along, along + 1, item.summed.end());
}

std::optional<Window> ContractionScheduler::find_window() const {
  if (items_.size() != 1 || rows_.size() != 2 || items_[0].rows.is_static) return std::nullopt;
  auto line = find_side(rows_[0]);
  auto point = find_side(rows_[1]);
  if (!line || !point || (line->tap.empty() && point->tap.empty()) || line->tap == point->tap) return std::nullopt;
  Window window{*line, *point, {}};
  bool known = hint(point->axis.extent) <= kWidestImage;
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

std::optional<WindowSide> ContractionScheduler::find_side(const Axis& axis) const {
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

bool ContractionScheduler::is_windowed(const Schedule& schedule) {
  return std::any_of(schedule.directives.begin(), schedule.directives.end(), [](const Directive& d) {
    return d.word == "pack" && std::any_of(d.arguments.begin(), d.arguments.end(), [](const Argument& a) { return a.name == "windows"; });
  });
}

bool ContractionScheduler::is_per_call(const Schedule& schedule) {
  const Argument call{"at", "call"};
  return std::any_of(schedule.directives.begin(), schedule.directives.end(), [&](const Directive& d) {
    return d.word == "pack" && std::find(d.arguments.begin(), d.arguments.end(), call) != d.arguments.end();
  });
}

std::set<std::string> ContractionScheduler::parallel_names(const Schedule& schedule) {
  std::set<std::string> names;
  for (const Directive& d : schedule.directives)
    for (const Argument& a : d.arguments)
      if (d.word == "parallel") names.insert(a.name);
  return names;
}

bool ContractionScheduler::is_across(const Schedule& schedule) const {
  for (const Directive& d : schedule.directives) {
    if (d.word != "vectorize" || d.arguments.size() != 1) continue;
    std::vector<std::string> names = group_axes(d.arguments[0].name);
    auto unit = contiguous_axis();
    if (!unit || contractions_.empty()) return false;
    const auto& axes = contractions_[0].a.axes;
    return std::all_of(names.begin(), names.end(), [&](const std::string& n) { return axes.count(n) != axes.count(unit->name); });
  }
  return false;
}

void ContractionScheduler::group_lanes() {
  if (across_) {
    lanes_ = lane_class_;
    lanes_extent_ = count(lanes_);
    return;
  }
  lanes_ = {unit_};
  if (apart_)
    for (const auto& a : lane_class_)
      if (hint(a.extent) > hint(lanes_[0].extent)) lanes_ = {a};
  Expr span = unit_.extent;
  // The axis that comes next: one that continues the lanes in every store, else the innermost one if no vector of lanes would cross into it.
  auto next = [&]() -> const Axis* {
    auto taken = [&](const Axis& a) { return std::any_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l == a; }); };
    for (const auto& a : lane_class_)
      if (!taken(a) && continues(a.name, span)) return &a;
    if (!whole_vectors(span)) return nullptr;
    for (size_t i = lane_class_.size(); i-- > 0;)
      if (!taken(lane_class_[i])) return &lane_class_[i];
    return nullptr;
  };
  while (lanes_[0].name == unit_.name || lanes_.size() > 1) {
    // Lanes that are packed per block are packed one whole inner axis at a time, which must be short and known.
    if (!lanes_static() && (lanes_.size() == 2 || !unit_.extent.is_constant() || unit_.extent.value() > kWidestInnerAxis)) break;
    const Axis* a = next();
    if (!a) break;
    lanes_.insert(lanes_.begin(), *a);
    span = span * a->extent;
  }
  lanes_extent_ = count(lanes_);
  for (const auto& a : lane_class_)
    if (std::none_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l == a; })) outer_.push_back(a);
}

bool ContractionScheduler::lanes_change() const {
  return std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.lanes.is_static; });
}

bool ContractionScheduler::lanes_static() const {
  return std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.lanes.is_static; });
}

bool ContractionScheduler::is_kept(const analysis::ContractionOperand& source, const std::vector<Axis>& summed) const {
  if (ctx_.weights != Weights::original) return true;
  Expr elements = count(summed);
  for (const auto& a : nest_.axes)
    if (source.axes.count(a.name) > 0) elements = elements * a.extent;
  return elements.value() * 4 <= kKeptBytes;
}

bool ContractionScheduler::prepare(Operand& operand, const analysis::ContractionOperand& source, const std::vector<Axis>& summed) {
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
  operand.fixed = !in_rows_;  // a phase has no parameters for what is packed once, not even for an operand that reads nothing
  for (const auto& stmt : operand.slice)
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) operand.fixed = operand.fixed && statics_.count(load->buffer) > 0;
  // What is packed once must not depend on a size that changes from call to call.
  for (const std::string& name : needed) operand.fixed = operand.fixed && kernel_.symbols.count(name) == 0;
  auto varies = [&](const Axis& a) { return source.axes.count(a.name) > 0 && !a.extent.is_constant(); };
  if (std::any_of(nest_.axes.begin(), nest_.axes.end(), varies) || std::any_of(summed.begin(), summed.end(), varies)) operand.fixed = false;
  operand.is_static = operand.fixed && is_kept(source, summed);
  return true;
}

int64_t ContractionScheduler::hint(Expr e) const {
  std::map<std::string, int64_t> values;
  for (const std::string& s : symbols_of(e)) {
    auto it = ctx_.hints.find(s);
    values[s] = it == ctx_.hints.end() ? kUnknownExtent : it->second;
  }
  return evaluate(e, values);
}

const loop_ir::Load* ContractionScheduler::main_load(const Operand& operand) {
  const loop_ir::Load* main = nullptr;
  for (const auto& stmt : operand.slice)
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node))
      if (!main || load->buffer == operand.source->buffers.front()) main = load;
  return main;
}

std::optional<Expr> ContractionScheduler::step_along(const Operand& operand, const std::string& axis) const {
  const loop_ir::Load* main = main_load(operand);
  return main ? linear_coefficient(offset(main->buffer, main->index), axis) : std::nullopt;
}

bool ContractionScheduler::rows_lie_across() const {
  if (!across_) return false;
  return window_ || std::any_of(items_.begin(), items_.end(), [&](const Item& item) {
           const auto& axes = item.summed;
           return (axes.size() != 1 && !per_call_) || !lies_along(item.rows, axes);
         });
}

bool ContractionScheduler::lies_along(const Operand& operand, const std::vector<Axis>& axes) const {
  Expr step = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    auto found = step_along(operand, axes[i].name);
    if (!found || *found != step) return false;
    step = simplify(step * axes[i].extent, ranges_);
  }
  return true;
}

bool ContractionScheduler::unit_along(const Operand& operand, const std::string& axis) const {
  auto step = step_along(operand, axis);
  return step && step->is(1);
}

std::optional<std::vector<Cond>> ContractionScheduler::streamed() const {
  const bool known_rows = count(rows_).is_constant();
  // Few rows of any number read what calls of more rows have packed.
  const bool shares = ctx_.weights == Weights::packed && !known_rows &&
                      std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.lanes.is_static && !i.lanes.per_call; });
  if (shares && decide(less(count(lanes_) * items_[0].depth, kLeastWork), ranges_) == false) return std::vector<Cond>{};
  std::vector<Cond> cases{less(count(rows_) * count(lanes_) * items_[0].depth, kLeastWork)};
  // Bytes without factors are streamed as fast as words.
  const bool folds = known_rows && std::all_of(items_.begin(), items_.end(),
                                               [&](const Item& i) { return can_fold(i, bits_) && (bits_ < 8 || i.linear()->group > 0); });
  if (!folds && rows_.size() == 1 && rows_[0].name == kOnlyRow) return std::nullopt;
  bool along_k =
      std::all_of(items_.begin(), items_.end(), [&](const Item& i) { return unit_along(i.lanes, i.contraction->reduce->axes.back().name); });
  // Few rows read the lane operand once anyway: packing it per call would double the traffic.
  bool packs_per_call = std::any_of(items_.begin(), items_.end(), [](const Item& i) { return !i.lanes.is_static || i.lanes.per_call; });
  if ((along_k && !folds) || packs_per_call)
    cases.push_back(less_equal(count(rows_), packs_per_call ? along_k ? kUnpackedStreams : kUnpackedRows : kStreamRows));
  std::vector<Cond> open;
  for (const Cond& c : cases) {
    auto decided = decide(c, ranges_);
    if (decided == true) return std::nullopt;
    if (!decided) open.push_back(c);
  }
  return open;
}

}  // namespace deplo::loop_to_tile
