#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "kernel_ir/ir.h"
#include "target/cpu/schedule/contraction_scheduler.h"

// The schedule as data: what was chosen is printed, and what is given is checked.

namespace deplo::loop_to_tile {
namespace {

// What a schedule may ask for: beyond, code or memory grows out of proportion.
constexpr int64_t kMostTile = 1 << 16;
constexpr int64_t kMostWork = int64_t{1} << 40;
constexpr int64_t kMostScratch = 64 << 20;  // bytes of a thread

}  // namespace

std::string ContractionScheduler::name_of(const std::vector<Axis>& axes) {
  std::vector<std::string> names;
  for (const auto& a : axes) names.push_back(a.name);
  return group_name(names);
}

Schedule ContractionScheduler::describe() const {
  Schedule s{"contraction", {}};
  auto add = [&](const char* word, std::vector<Argument> arguments) { s.directives.push_back({word, std::move(arguments)}); };
  if (!in_rows_) {
    std::vector<Argument> parallel{{lane_tile_name(), {}}, {row_tile_name(), {}}};
    if (rows_outside_) std::iter_swap(parallel.begin(), parallel.end() - 1);
    std::vector<Argument> outer;
    for (const auto& a : outer_) outer.push_back({a.name, {}});
    parallel.insert(outer_inside_ ? parallel.end() : parallel.begin(), outer.begin(), outer.end());
    parallel.push_back({"work", chunk_work_});
    add("parallel", std::move(parallel));
    add("tile", {{row_tile_name(), window_ ? lines_ : row_tiles_ * mr_}});
  }
  add("tile", {{lane_tile_name(), two_lane_axes() ? lane_lines_ : lane_block_}});
  add("vectorize", {{name_of(lanes_), {}}});
  if (window_)
    add("register_block", {{rows_[0].name, block_lines_}, {rows_[1].name, block_points_}, {name_of(lanes_), nr_}});
  else
    add("register_block", {{name_of(rows_), mr_}, {name_of(lanes_), nr_}});
  if (tail_ > 0) add("partition", {{name_of(rows_), {}}, {"tail", tail_}});
  for (const Item& item : items_) {
    const std::string& result = item.contraction->result;
    add("tile", {{depth_name(item), item.depth_block}});
    if (item.chain < item.depth_block) add("chain", {{depth_name(item), item.chain}});
    add("unroll", {{depth_name(item), item.unroll}});
    if (item.group() > 1) add("dot", {{depth_name(item), item.matrix ? item.matrix_depth() : item.group()}});
    if (item.parts > 1) s.directives.back().arguments.push_back({"parts", item.parts});
    std::vector<Argument> lanes{{result + ".lanes", {}}, {"at", item.lanes.per_call ? "call" : item.lanes.is_static ? "program" : "block"}};
    if (item.bits > 0) lanes.insert(lanes.end(), {{"bits", item.bits}, {"width", item.width}});
    if (item.folded) lanes.push_back({"fold", {}});
    if (item.centered) lanes.push_back({"centered", {}});
    if (item.widened) lanes.push_back({"widen", {}});
    add("pack", std::move(lanes));
    std::vector<Argument> rows{{result + ".rows", {}}, {"at", item.rows.in_place ? "memory" : item.rows.is_static ? "program" : "block"}};
    if (window_)
      rows.push_back({"windows", {}});
    else if (!item.rows.is_static && !item.rows.in_place)
      rows.push_back({"pad", item.rows.padding});
    if (item.rows.in_lines) rows.push_back({"lines", {}});
    add("pack", std::move(rows));
  }
  if (in_registers_) add("epilogue", {{"registers", {}}});
  return s;
}

void ContractionScheduler::read(ScheduleReader& reader) {
  for (Item& item : items_) {
    read_depth(reader, item);
    read_pack(reader, item, item.lanes, "lanes");
    read_pack(reader, item, item.rows, "rows");
    read_dot(reader, item);
    read_widen(reader, item);
    if (window_) read_window(reader, item);
  }
  read_lanes(reader);
  read_parallel(reader);
  read_register_block(reader);
  read_tiles(reader);
  read_epilogue(reader);
  reader.finish("parallel, tile, chain, vectorize, register_block, partition, unroll, dot, pack and epilogue, each axis and operand once");
}

const Directive& ContractionScheduler::needed(ScheduleReader& reader, const std::string& word, const std::string& name) {
  const Directive* d = reader.find(word, name);
  if (!d) reader.fail(fmt::format("it needs '{}({}...)'", word, name));
  return *d;
}

int64_t ContractionScheduler::read_number(ScheduleReader& reader, const std::string& word, const std::string& name, int64_t most) {
  const Directive& d = needed(reader, word, name);
  reader.only(d, {name});
  return reader.number(d, name, 1, most);
}

void ContractionScheduler::read_depth(ScheduleReader& reader, Item& item) const {
  item.depth_block = read_number(reader, "tile", depth_name(item), kMostTile);
  item.chain = item.depth_block;
  if (const Directive* chain = reader.find("chain", depth_name(item))) {
    reader.only(*chain, {depth_name(item)});
    item.chain = reader.number(*chain, depth_name(item), 1, item.depth_block);
  }
  item.unroll = read_number(reader, "unroll", depth_name(item), kMostUnroll);
  item.depth_blocks = ceildiv(item.depth, item.depth_block);
}

void ContractionScheduler::read_dot(ScheduleReader& reader, Item& item) const {
  const Directive* d = reader.find("dot", depth_name(item));
  item.words = item.dtype() == DType::i32;
  item.bytes = false;
  item.pairs = d != nullptr && !item.words;
  if (item.words && (!d || item.depth_block % 4 != 0))
    reader.fail(fmt::format("bytes take 'dot({}=4)' and tiles in multiples of it", depth_name(item)));
  if (!d) return;
  reader.only(*d, {depth_name(item), "parts"});
  const int64_t steps = reader.number(*d, depth_name(item), 2, item.words ? tile_ir::kMatrixBytes : tile_ir::kMatrixDepth);
  if (item.words) {
    item.matrix = steps == tile_ir::kMatrixBytes;
    if ((steps != 4 && !item.matrix) || !can_word(item))
      reader.fail(*d, fmt::format("bytes are multiplied in fours, or {} for a matrix unit, the lanes packed at=program, the rows at=block",
                                  tile_ir::kMatrixBytes));
    if (item.matrix && (!can_use_matrix(item) || item.chain % steps != 0))
      reader.fail(*d, fmt::format("{} steps at once take a CPU with amx-int8, and k, its tiles and chains in multiples of as many", steps));
    if (!item.matrix && has_chains(item)) reader.fail(*d, "sums of bytes are exact: no 'chain' but of a matrix unit");
    return;
  }
  if (steps == 4) {
    if (!can_multiply_codes(item)) reader.fail(*d, "fours are bytes: of lanes that are folded, beside rows that are codes with factors of their own");
    item.bytes = true;
    item.pairs = false;
    return;
  }
  item.matrix = steps == tile_ir::kMatrixDepth;
  if (has_chains(item) && (item.matrix || item.chain % 2 != 0))
    reader.fail(*d, "its chains are pairs, and a matrix unit's are the tile's: no 'chain'");
  if (steps != 2 && !item.matrix) reader.fail(*d, fmt::format("allowed: 2, and {} for a matrix unit", tile_ir::kMatrixDepth));
  item.parts = reader.number(*d, "parts", 1, kParts, 1);
  if (item.parts > 1) {
    if (item.parts != kParts || !item.matrix || !can_split(item) || item.depth_block % steps != 0)
      reader.fail(*d,
                  fmt::format("parts={} makes bf16 of float32 operands for a matrix unit: it takes {}={}, a CPU with amx-bf16 and avx512bf16, the "
                              "lanes packed at=program, the rows at=block, and k and its tiles in multiples of {}",
                              kParts, depth_name(item), tile_ir::kMatrixDepth, tile_ir::kMatrixDepth));
    return;
  }
  if (!can_pair(item)) reader.fail(*d, "it takes bf16 operands that are packed, the rows along k or under windows, outside of phases");
  if (item.depth_block % steps != 0) reader.fail(*d, fmt::format("its tiles are multiples of {} steps", steps));
  if (item.matrix && !can_use_matrix(item)) reader.fail(*d, fmt::format("{} steps at once take a CPU with amx-bf16", steps));
}

void ContractionScheduler::read_window(ScheduleReader& reader, Item& item) const {
  const int64_t steps = window_steps(item);
  const std::string allowed = fmt::format("allowed: multiples of {}, the window's taps{}", steps, item.pairs ? " of two channels" : "");
  if (item.depth_block % steps != 0) reader.fail(needed(reader, "tile", depth_name(item)), allowed);
  if (item.chain % steps != 0) reader.fail(needed(reader, "chain", depth_name(item)), allowed);
  pair_channels(item);
  item.depth_blocks = ceildiv(item.depth, item.depth_block);
}

void ContractionScheduler::read_widen(ScheduleReader& reader, Item& item) const {
  const Directive& d = needed(reader, "pack", item.contraction->result + ".lanes");
  auto has = [&](const char* word) { return std::any_of(d.arguments.begin(), d.arguments.end(), [&](const Argument& a) { return a.name == word; }); };
  item.widened = has("widen");
  item.folded = has("fold");
  item.bits = has("bits") ? reader.number(d, "bits", 4, 8) : 0;
  item.centered = has("centered");
  if (item.folded || item.bits > 0) {
    item.width = has("width") ? reader.number(d, "width", 1, kMostTile) : 0;
    const bool known = (item.bits == 4 || item.bits == 8) && item.width > 0 && item.folded != item.widened;
    const bool right = known && (item.folded ? can_fold(item, item.bits) : item.bits == 4 && can_widen_words(item));
    if (!right)
      reader.fail(
          d,
          "'fold' takes bits=4 or 8 and width, 'widen' bits=4 and width, of lanes that are packed at=program from bytes whose factors are those "
          "of whole words");
    if (item.widened) {
      if (item.chain % item.word() != 0 || item.depth_block % item.word() != 0)
        reader.fail(d, fmt::format("its tiles and chains are whole words of {} steps", item.word()));
      return;
    }
    const int64_t group = item.linear()->group;
    const int64_t end = group > 0 ? group : item.depth.value();
    if (item.chain % item.word() != 0 || end % item.chain != 0 || item.depth_block % item.chain != 0)
      reader.fail(d, fmt::format("its chains are whole words of {} steps, of which {} and the tile are multiples", item.word(), end));
    return;
  }
  if (item.centered) reader.fail(d, "codes are centered that 'fold' or 'widen' takes as words of bits=4 and width");
  if (item.bytes) reader.fail(d, "bytes of lanes with factors are taken apart by 'fold'");
  if (item.widened && !can_widen(item)) reader.fail(d, "only lanes that are packed at=program narrower than they are multiplied are widened");
  if (!item.widened && item.needs_widening()) reader.fail(d, "lanes that are packed in bytes are widened for dot");
}

void ContractionScheduler::read_pack(ScheduleReader& reader, const Item& item, Operand& operand, const std::string& side) const {
  std::string name = item.contraction->result + "." + side;
  const Directive& d = needed(reader, "pack", name);
  const std::string at =
      side == "lanes" && !in_rows_ ? reader.word(d, "at", {"program", "call", "block"}) : reader.word(d, "at", {"program", "block", "memory"});
  operand.per_call = at == "call";
  operand.in_place = at == "memory";
  operand.is_static = at != "block" && !operand.in_place;
  if (at == "program" && !operand.fixed)
    reader.fail(d, fmt::format("{} changes from call to call (loads {}); allowed: at=block", name, joined(operand.source->buffers)));
  if (window_ && side == "rows") {
    if (operand.is_static) reader.fail(d, "windows are packed at=block");
    reader.only(d, {name, "at", "windows"});
    return;
  }
  if (window_ && !operand.is_static) reader.fail(d, "beside windows, the lanes are packed at=program");
  bool padded = side == "rows" && !operand.is_static && !operand.in_place;
  reader.only(d, {name, "at",
                  padded            ? "pad"
                  : side == "lanes" ? "widen"
                                    : "at",
                  side == "lanes" ? "fold"
                  : padded        ? "lines"
                                  : "at",
                  side == "lanes" ? "bits" : "at", side == "lanes" ? "width" : "at", side == "lanes" ? "centered" : "at"});
  operand.padding = padded ? reader.number(d, "pad", 0, 1024, 0) : 0;
  operand.in_lines = padded && std::any_of(d.arguments.begin(), d.arguments.end(), [](const Argument& a) { return a.name == "lines"; });
}

void ContractionScheduler::read_lanes(ScheduleReader& reader) {
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
  auto last = std::find_if(lane_class_.begin(), lane_class_.end(), [&](const Axis& a) { return a.name == names.back(); });
  apart_ = names.back() != unit_.name;
  if (last == lane_class_.end() || (apart_ && names.size() > 1))
    reader.fail(d, fmt::format("{} cannot get the lanes; allowed: {}, along which most stores are contiguous, or one of {}", given[0], unit_.name,
                               name_of(lane_class_)));
  lanes_ = {*last};
  Expr span = last->extent;
  for (size_t i = names.size() - 1; i-- > 0;) {
    auto axis = std::find_if(lane_class_.begin(), lane_class_.end(), [&](const Axis& a) { return a.name == names[i]; });
    bool taken = std::any_of(lanes_.begin(), lanes_.end(), [&](const Axis& l) { return l.name == names[i]; });
    if (axis == lane_class_.end() || taken || !(continues(names[i], span) || whole_vectors(span)))
      reader.fail(d, fmt::format("{} does not continue {} in every store, nor are these whole vectors", names[i], name_of(lanes_)));
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

void ContractionScheduler::read_parallel(ScheduleReader& reader) {
  if (in_rows_) return;
  const Directive& d = reader.one("parallel");
  std::vector<std::string> names = reader.names(d);
  std::vector<std::string> wanted;
  for (const auto& a : outer_) wanted.push_back(a.name);
  wanted.insert(wanted.end(), {lane_tile_name(), row_tile_name()});
  outer_inside_ = !outer_.empty() && names.size() == wanted.size() && names[0] == lane_tile_name() && names[1] == row_tile_name();
  if (outer_inside_) std::rotate(names.begin(), names.begin() + 2, names.end());
  auto same = [&] {
    return names.size() == wanted.size() && std::is_permutation(names.begin(), names.end(), wanted.begin()) &&
           std::is_permutation(names.end() - 2, names.end(), wanted.end() - 2);
  };
  if (!same()) reader.fail(d, fmt::format("allowed: {} and work; the last two stay last, or, in this order, come first", joined(wanted)));
  rows_outside_ = names.back() == wanted[wanted.size() - 2];
  std::vector<Axis> ordered;
  for (size_t i = 0; i + 2 < names.size(); ++i)
    ordered.push_back(*std::find_if(outer_.begin(), outer_.end(), [&](const Axis& a) { return a.name == names[i]; }));
  outer_ = std::move(ordered);
  wanted.push_back("work");
  reader.only(d, {wanted.begin(), wanted.end()});
  chunk_work_ = reader.number(d, "work", 1, kMostWork);
}

void ContractionScheduler::read_register_block(ScheduleReader& reader) {
  const Directive& d = reader.one("register_block");
  const int64_t vector = ctx_.target.vector_bytes / 4;
  const int64_t most = 4 * ctx_.target.vector_registers;  // sums beyond the registers are spilled: slow, but right
  if (window_) {
    reader.only(d, {rows_[0].name, rows_[1].name, name_of(lanes_)});
    block_lines_ = reader.number(d, rows_[0].name, 1, most);
    block_points_ = reader.number(d, rows_[1].name, 1, most);
    if (block_lines_ > 1 && (any_points() || block_points_ != rows_[1].extent.value()))
      reader.fail(d, fmt::format("several lines are taken whole, with {}={}", rows_[1].name, print(rows_[1].extent)));
    mr_ = block_lines_ * block_points_;
  } else {
    reader.only(d, {name_of(rows_), name_of(lanes_)});
    mr_ = reader.number(d, name_of(rows_), 1, most);
    read_tail(reader);
  }
  nr_ = reader.number(d, name_of(lanes_), vector, most * vector);
  check_matrix_sides(reader, d);
  for (const Item& item : items_)
    if (item.bits > 0 && item.width % nr_ != 0) reader.fail(d, fmt::format("panels of {} lanes are not whole blocks of {}", item.width, nr_));
  if (nr_ % vector != 0) reader.fail(d, fmt::format("{} is {}, allowed: multiples of the machine's {} lanes", name_of(lanes_), nr_, vector));
  if (mr_ * (nr_ / vector) > most)
    reader.fail(d, fmt::format("{} x {} sums are {} vectors of {} lanes, at most {} are allowed on a machine of {} vector registers", mr_, nr_,
                               mr_ * (nr_ / vector), vector, most, ctx_.target.vector_registers));
}

void ContractionScheduler::check_matrix_sides(ScheduleReader& reader, const Directive& block) const {
  constexpr int64_t side = tile_ir::kMatrixSide;
  if (std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.matrix; })) return;
  const int64_t registers = mr_ / side * (nr_ / side) + mr_ / side + 1;
  if (mr_ % side != 0 || nr_ % side != 0 || registers > kernel_ir::kMatrixRegisters)
    reader.fail(
        block, fmt::format("{} x {} sums do not fit a matrix unit: allowed are multiples of {} up to 2 x 2, 1 x 6 or 3 x 1 of them", mr_, nr_, side));
}

void ContractionScheduler::read_tail(ScheduleReader& reader) {
  const Directive* d = reader.find("partition", name_of(rows_));
  tail_ = 0;
  if (!d) return;
  reader.only(*d, {name_of(rows_), "tail"});
  if (in_rows_ || std::any_of(items_.begin(), items_.end(), [](const Item& i) { return i.rows.is_static; }))
    reader.fail(*d, "rows that are packed once, or that are a phase's, lie in blocks of one size");
  tail_ = reader.number(*d, "tail", 1, mr_);
  const bool matrix = std::any_of(items_.begin(), items_.end(), [](const Item& i) { return i.matrix; });
  if (matrix && tail_ % tile_ir::kMatrixSide != 0)
    reader.fail(*d, fmt::format("the tail is {}, allowed for a matrix unit: multiples of {}", tail_, tile_ir::kMatrixSide));
}

void ContractionScheduler::read_epilogue(ScheduleReader& reader) {
  in_registers_ = false;
  if (reader.all("epilogue").empty()) return;
  const Directive& d = reader.one("epilogue");
  reader.only(d, {"registers"});
  in_registers_ = true;
  if (reader.names(d).size() != 1 || !can_finish_in_registers())
    reader.fail(d, "'registers' takes an epilogue of few operations and accesses along the lanes, which are the stores' contiguous axis");
}

void ContractionScheduler::read_tiles(ScheduleReader& reader) {
  int64_t rows = in_rows_ ? round_up(in_rows_->count, mr_) : read_number(reader, "tile", row_tile_name(), kMostTile);
  for (const Item& item : items_)
    if (item.rows.in_lines && !can_pack_in_lines(item))
      reader.fail(needed(reader, "pack", item.contraction->result + ".rows"),
                  "'lines' takes one axis of float32 rows, beside lanes along the stores");
  for (const Item& item : items_)
    if (item.rows.in_place && !can_read_in_place(item))
      reader.fail(fmt::format("rows that are read where they lie are float32 numbers of memory along k, in blocks that divide all of them"));
  const int64_t unit = window_ ? block_lines_ : mr_;
  if (rows % unit != 0) reader.fail(needed(reader, "tile", row_tile_name()), fmt::format("allowed: multiples of the register block's {}", unit));
  lines_ = window_ ? rows : 0;
  rows = window_ ? hint(tile_rows()) : rows;
  row_tiles_ = rows / mr_;
  bool whole = rows_extent_.is_constant() && rows_extent_.value() <= rows;
  if (rows_lie_across() && !window_ && rows_.size() > 1 && !whole)
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
    scratch += rows * lane_block_ * (item.parts > 1 ? 3 : 1);
    if (window_)
      scratch += hint(product(window_shape()));
    else if (!item.rows.is_static && !item.rows.in_place)
      scratch += packs_rows_in_lines(item) ? item.depth_block * (rows + item.rows.padding)
                                           : rows * (item.depth_block + item.rows.padding) * (item.parts > 1 ? item.parts - 1 : 1);
    if (!item.lanes.is_static) scratch += item.depth_block * spread(lane_block_);
    if (item.widened) scratch += chunk(item) * nr_;
  }
  if (scratch > kMostScratch / 4)
    reader.fail(fmt::format("its tiles need {} bytes of memory for each thread, at most {} are allowed", scratch * 4, kMostScratch));
}

}  // namespace deplo::loop_to_tile
