#include <algorithm>

#include "base/error.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo::loop_to_tile {

Ref<tile_ir::Stmt> ContractionScheduler::loop(const std::string& name, Expr lo, Expr hi, LoopKind kind, tile_ir::Block body, int64_t by) {
  return make(tile_ir::For{axis(name, lo, hi, kind, 1, by), std::move(body)});
}

tile_ir::Block ContractionScheduler::store_zero(const std::string& buffer, std::vector<Expr> index, const std::string& name, DType dtype) {
  return {make(loop_ir::Let{name, dtype, Fn::constant, {}, Scalar::of_float(dtype, 0), 0}),
          make(loop_ir::Store{buffer, std::move(index), name, {}, Combiner::set})};
}

std::string ContractionScheduler::operand_value(const Operand& operand, const Substitution& map, const std::string& suffix,
                                                const std::optional<Operand::Narrow>& before, tile_ir::Block& into,
                                                const std::map<std::string, loop_ir::Load>& instead) {
  const std::string& wanted = before ? before->value : operand.source->value;
  return copy_statements(operand.statements_of(wanted), map, suffix, into, instead).at(wanted);
}

std::map<std::string, std::string> ContractionScheduler::copy_statements(const loop_ir::Block& statements, const Substitution& map,
                                                                         const std::string& suffix, tile_ir::Block& into,
                                                                         const std::map<std::string, loop_ir::Load>& instead) {
  Substitution all = map;
  std::map<std::string, std::string> renamed;
  for (const auto& stmt : statements) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) {
      loop_ir::Let s = substituted(*let, all);
      for (std::string& o : s.operands)
        if (auto it = renamed.find(o); it != renamed.end()) o = it->second;
      renamed[let->name] = s.name = let->name + suffix;
      into.push_back(make(std::move(s)));
    } else if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) {
      auto other = instead.find(load->name);
      loop_ir::Load s = other == instead.end() ? substituted(*load, all) : other->second;
      renamed[load->name] = s.name = load->name + suffix;
      into.push_back(make(std::move(s)));
    }
    for (const auto& [from, to] : renamed) all[from] = sym(to);
  }
  return renamed;
}

tile_ir::Block ContractionScheduler::store_operand(const Operand& operand, const Substitution& map, const std::string& buffer,
                                                   std::vector<Expr> index, const std::string& suffix, const std::optional<Operand::Narrow>& before) {
  tile_ir::Block out;
  std::string value = operand_value(operand, map, suffix, before, out);
  out.push_back(make(loop_ir::Store{buffer, std::move(index), std::move(value), {}, Combiner::set}));
  return out;
}

tile_ir::Block ContractionScheduler::store_word(const Operand& operand, const std::vector<Substitution>& maps, const std::string& buffer,
                                                std::vector<Expr> index, const std::string& suffix) {
  tile_ir::Block out;
  constexpr DType i32 = DType::i32;
  auto let = [&](const std::string& name, Fn fn, std::vector<std::string> operands, int64_t value = 0) {
    out.push_back(make(loop_ir::Let{name + suffix, i32, fn, std::move(operands), fn == Fn::constant ? Scalar::of_int(i32, value) : Scalar{}, 0}));
    return name + suffix;
  };
  const std::string mask = let("byte_mask", Fn::constant, {}, 0xff);
  std::string word;
  for (size_t byte = 0; byte < maps.size(); ++byte) {
    const std::string whole = operand_value(operand, maps[byte], fmt::format("{}.b{}", suffix, byte), std::nullopt, out);
    std::string value = let(fmt::format("low{}", byte), Fn::bit_and, {whole, mask});
    if (byte > 0) {
      const std::string by = let(fmt::format("places{}", byte), Fn::constant, {}, static_cast<int64_t>(8 * byte));
      value = let(fmt::format("up{}", byte), Fn::shl, {value, by});
      value = let(fmt::format("word{}", byte), Fn::bit_or, {word, value});
    }
    word = value;
  }
  out.push_back(make(loop_ir::Store{buffer, std::move(index), word, {}, Combiner::set}));
  return out;
}

tile_ir::Block ContractionScheduler::store_parts(const Operand& operand, const Substitution& map, const std::string& buffer,
                                                 const std::vector<Expr>& index, size_t part, const std::string& suffix) {
  tile_ir::Block out;
  std::string rest = operand_value(operand, map, suffix, std::nullopt, out);
  const std::string tag = ".p" + suffix;
  auto let = [&](std::string name, DType dtype, Fn fn, std::vector<std::string> operands, int64_t value = 0) {
    name += tag;
    out.push_back(make(loop_ir::Let{name, dtype, fn, std::move(operands), fn == Fn::constant ? Scalar::of_int(dtype, value) : Scalar{}, 0}));
    return name;
  };
  constexpr DType i32 = DType::i32;
  auto number = [&](const std::string& name, int64_t value) { return let(name, i32, Fn::constant, {}, value); };
  // A bf16 number is the upper half of a float32. The first part is rounded, but not where that gives infinity, and NaN keeps a bit in that half; the
  // others, of a finite number, lose nothing when they are cut off: 8 + 8 + 8 bits.
  const std::string bits = let("bits", i32, Fn::bitcast, {rest});
  const std::string size = let("size", i32, Fn::bit_and, {bits, number("positive", 0x7fffffff)});
  const std::string below = let("below", DType::boolean, Fn::lt, {size, number("most", 0x7f7f8000)});
  const std::string rounded = let("rounded", i32, Fn::add, {bits, number("half_unit", 0x8000)});
  const std::string fit = let("fit", i32, Fn::where, {below, rounded, bits});
  const std::string nan = let("unordered", DType::boolean, Fn::ne, {rest, rest});
  std::string next = let("first", i32, Fn::where, {nan, number("nan", 0x7fc00000), fit});
  const std::string upper = number("upper", -0x10000);
  const std::string shift = number("shift", 16);
  for (int64_t p = 0; p < kParts; ++p) {
    const std::string which = std::to_string(p);
    const std::string narrow = let("narrow" + which, DType::i16, Fn::cast, {let("down" + which, i32, Fn::shr, {next, shift})});
    std::vector<Expr> place = index;
    place[part] = p;
    out.push_back(make(loop_ir::Store{buffer, std::move(place), let("part" + which, DType::bf16, Fn::bitcast, {narrow}), {}, Combiner::set}));
    if (p + 1 == kParts) break;
    const std::string wide = let("wide" + which, DType::f32, Fn::bitcast, {let("cut" + which, i32, Fn::bit_and, {next, upper})});
    const std::string left = let("rest" + which, DType::f32, Fn::sub, {rest, wide});
    next = let("bits" + which, i32, Fn::bitcast, {left});
    rest = left;
  }
  return out;
}

void ContractionScheduler::prefetch_operand(const Item& item, const Operand& operand, const Substitution& map, Expr k, tile_ir::Block& into) const {
  Expr window = 1;
  for (size_t i = 1; i < item.summed.size(); ++i) window = window * item.summed[i].extent;
  Substitution ahead = map;
  join(ahead, depth_map(item, min(k + window * kPrefetchSteps, item.depth - 1)));
  prefetch_at(operand, ahead, into);
}

std::optional<int64_t> ContractionScheduler::run_of_lines(const Item& item, const Operand& operand) const {
  const std::vector<Axis>& axes = item.summed;
  const auto step = step_along(operand, axes.back().name);
  if (axes.size() < 2 || !axes.back().extent.is_constant() || !step || !step->is_constant() || std::abs(step->value()) < kCacheLine)
    return std::nullopt;
  const int64_t run = axes.back().extent.value();
  if (run < kPrefetchLines || item.depth_block % run != 0) return std::nullopt;
  return run;
}

bool ContractionScheduler::knows_place(const Operand& operand) {
  const loop_ir::Load* main = main_load(operand);
  if (!main) return false;
  std::set<std::string> read;
  for (Expr e : main->index) collect_symbols(e, read);
  return std::none_of(operand.slice.begin(), operand.slice.end(), [&](const auto& stmt) {
    const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    return read.count(let ? let->name : load ? load->name : "") > 0;
  });
}

void ContractionScheduler::prefetch_at(const Operand& operand, const Substitution& map, tile_ir::Block& into, int level) {
  if (!knows_place(operand)) return;
  const loop_ir::Load* main = main_load(operand);
  std::vector<Expr> index;
  for (Expr e : main->index) index.push_back(substitute(e, map));
  into.push_back(make(tile_ir::Prefetch{main->buffer, std::move(index), level}));
}

void ContractionScheduler::join(Substitution& into, const Substitution& more) {
  for (const auto& [name, value] : more) into[name] = value;
}

Substitution ContractionScheduler::depth_map(const Item& item, Expr k) {
  if (item.channels == 0) return unflatten(item.summed, k);
  const auto first = item.summed.begin();
  const std::vector<Axis> channels(first, first + static_cast<std::ptrdiff_t>(item.channels));
  const std::vector<Axis> taps(first + static_cast<std::ptrdiff_t>(item.channels), item.summed.end());
  const Expr pair = floordiv(k, 2);
  const Expr channel = floordiv(pair, count(taps)) * 2 + mod(k, 2);
  Substitution map = unflatten(channels, item.has_odd_channels() ? min(channel, count(channels) - 1) : channel);
  join(map, unflatten(taps, mod(pair, count(taps))));
  return map;
}

Expr ContractionScheduler::depth_of_block(const Item& item) {
  Expr kb = sym("kb" + item.tag) * item.depth_block;
  return min(item.depth_block, item.depth - kb);
}

Expr ContractionScheduler::steps_of_block(const Item& item) {
  const Expr depth = depth_of_block(item);
  return item.pads_depth() ? ceildiv(depth, item.step()) : floordiv(depth, item.step());
}

tile_ir::Block ContractionScheduler::pack_panel(const Item& item, const Operand& operand, bool lanes, const PackedOperand& packed,
                                                const std::vector<Axis>& batch) const {
  const std::vector<Axis>& axes = lanes ? lanes_ : rows_;
  const int64_t width = packed_width(item, lanes);
  const bool split = lanes && item.parts > 1;
  const bool pairs = lanes && item.paired_lanes();
  const bool row_pairs = !lanes && item.pairs;
  const Expr extent = count(axes);
  const Expr panels = ceildiv(extent, width);
  const Expr panel = mod(sym("par"), panels);
  const Expr valid = min(width, extent - panel * width);
  const Expr position = sym("pos");
  const Expr k = sym("k");
  const Expr half = sym("half");
  const Expr step = pairs ? k * 2 + half : k;
  const bool blocks = (lanes && item.bits == 0) || row_pairs;  // words lie alike whatever the blocks of k
  const Expr all = blocks ? depth_of_block(item) : item.depth;
  const bool words = lanes && (item.words || item.bits > 0);
  const int64_t word = item.words ? 4 : item.word();
  const Expr depth = pairs ? floordiv(all, 2) : words ? floordiv(all, word) : all;
  Substitution map = unflatten(batch, floordiv(sym("par"), panels));
  std::vector<Expr> prefix;
  for (const auto& a : batch) prefix.push_back(map.at(a.name));
  join(map, unflatten(axes, panel * width + position));
  join(map, depth_map(item, blocks ? sym("kb" + item.tag) * item.depth_block + step : step));
  const size_t part = packed.shape.size() - 4;  // of the index, where lanes are split
  auto place = [&](Expr where) {
    std::vector<Expr> index = prefix;
    if (blocks) index.push_back(sym("kb" + item.tag));
    index.push_back(panel);
    if (split) index.emplace_back(0);
    index.insert(index.end(), {k, where});
    if (row_pairs) std::iter_swap(index.end() - 2, index.end() - 1);
    if (pairs) index.push_back(half);
    return index;
  };
  auto halves = [&](tile_ir::Block body) { return pairs ? tile_ir::Block{loop("half", 0, 2, LoopKind::unroll, std::move(body))} : body; };
  auto copy = [&](const Substitution& from, const std::vector<Expr>& to) {
    if (words) {
      std::vector<Substitution> maps;
      for (int64_t step = 0; step < word; ++step) {
        maps.push_back(from);
        for (auto& [name, value] : maps.back()) value = substitute(value, {{"k", Expr::symbol("k") * word + step}});
      }
      if (item.bits > 0) return store_codes(item, maps, packed.param, to, "");
      return store_word(operand, maps, packed.param, to, "");
    }
    return split ? store_parts(operand, from, packed.param, to, part, "")
                 : store_operand(operand, from, packed.param, to, "",
                                 lanes       ? item.packed_lanes()
                                 : row_pairs ? operand.narrow()
                                             : std::nullopt);
  };
  tile_ir::Block out;
  Expr padded = depth;  // zeros behind the last step complete what is multiplied at once, and the last block
  const bool whole_blocks = item.depth.is_constant() && item.depth.value() % item.depth_block == 0;
  if ((pairs || row_pairs || (blocks && operand.per_call && !words)) && item.parts == 1 && !whole_blocks) {
    padded = pairs ? item.depth_block / 2 : item.depth_block;
    tile_ir::Block zero = halves(store_zero(packed.param, place(position), "rest", packed.dtype));
    if (row_pairs)
      out.push_back(loop("pos", 0, valid, LoopKind::serial, {loop("k", depth, padded, LoopKind::lanes, std::move(zero))}));
    else
      out.push_back(loop("k", depth, padded, LoopKind::serial, {loop("pos", 0, valid, LoopKind::lanes, std::move(zero))}));
    if (pairs && item.may_be_odd()) {
      const Substitution even{{"k", floordiv(k, 2)}, {"half", 0}};
      Substitution last = map;
      for (auto& [name, value] : last) value = substitute(value, even);
      std::vector<Expr> to = place(position);
      for (Expr& e : to) e = substitute(e, even);
      out.push_back(loop("k", depth * 2, all, LoopKind::serial, {loop("pos", 0, valid, LoopKind::lanes, copy(last, to))}));
    }
  }
  if (axes.size() == 1 && unit_along(operand, axes[0].name)) {
    out.push_back(loop("k", 0, depth, LoopKind::serial, {loop("pos", 0, valid, LoopKind::lanes, halves(copy(map, place(position))))}));
  } else {
    const bool along_depth = lies_along(operand, item.summed);
    const int64_t side = ctx_.target.vector_bytes / 4;
    const Axis& inner = item.summed.back();
    // Or along runs of k that hold whole squares, as the numbers of a head do.
    const bool along_inner = unit_along(operand, inner.name);
    const bool runs = along_inner && inner.extent.is_constant() && inner.extent.value() % side == 0 && item.depth_block % side == 0;
    const bool squares = axes.size() == 1 && (along_depth || runs) && !words && !row_pairs && item.channels == 0;
    Expr first = 0;
    if (squares) {
      // Memory runs along k: squares are transposed in registers.
      first = floordiv(all, side) * side;
      const Expr point = sym("square") * side + sym("inner");
      const Substitution here{{"k", pairs ? floordiv(point, 2) : point}, {"half", mod(point, 2)}};
      Substitution from = map;
      for (auto& [name, value] : from) value = substitute(value, here);
      std::vector<Expr> to = place(position);
      for (Expr& e : to) e = substitute(e, here);
      tile_ir::Block square{loop("inner", 0, side, LoopKind::unroll, copy(from, to))};
      square = {loop("pos", 0, valid, LoopKind::lanes, std::move(square))};
      out.push_back(loop("square", 0, floordiv(all, side), LoopKind::serial, std::move(square)));
    }
    const bool whole =
        squares && item.depth.is_constant() && item.depth.value() % side == 0 && (!lanes || item.depth_block % side == 0 || item.depth_blocks.is(1));
    if ((!along_inner || item.channels > 0) && !words && !row_pairs) {
      // Memory runs along neither: stores at least are whole.
      tile_ir::Block column{loop("k", 0, depth, LoopKind::serial, halves(copy(map, place(position))))};
      out.push_back(loop("pos", 0, valid, LoopKind::lanes, std::move(column)));
    } else if (!whole) {
      tile_ir::Block rest{loop("k", pairs ? floordiv(first, 2) : first, depth, LoopKind::lanes, copy(map, place(position)))};
      out.push_back(loop("pos", 0, valid, LoopKind::serial, halves(std::move(rest))));
    }
  }
  if (lanes && item.has_odd_channels()) {
    // Beside the zeros that complete the image's last pair of channels, as whatever stands there may be infinite.
    const int64_t taps = window_->taps();
    const Substitution last{{"k", floordiv(all, 2) - taps + sym("tap")}, {"half", 1}};
    std::vector<Expr> to = place(position);
    for (Expr& e : to) e = substitute(e, last);
    tile_ir::Block zero{loop("pos", 0, valid, LoopKind::lanes, store_zero(packed.param, to, "odd", packed.dtype))};
    zero = {loop("tap", 0, taps, LoopKind::serial, std::move(zero))};
    out.push_back(make(tile_ir::If{{Cond{Cond::Kind::ge0, sym("kb" + item.tag) + 1 - item.depth_blocks}}, std::move(zero)}));
  }
  tile_ir::Block zeros = store_zero(packed.param, place(sym("pad")), "none", packed.dtype);
  for (int64_t p = 1; split && p < item.parts; ++p) {
    std::vector<Expr> there = place(sym("pad"));
    there[part] = p;
    zeros.push_back(make(loop_ir::Store{packed.param, std::move(there), "none", {}, Combiner::set}));
  }
  out.push_back(loop("pad", valid, width, LoopKind::serial, halves({loop("k", 0, padded, LoopKind::lanes, std::move(zeros))})));
  if (lanes && item.shifted()) {
    // What 128 in each byte of the rows adds, to be taken off: behind the last step of the panel.
    std::vector<Expr> last = place(position);
    last[last.size() - 2] = item.depth_block / 4;
    std::vector<Expr> edge = place(sym("pad"));
    edge[edge.size() - 2] = item.depth_block / 4;
    tile_ir::Block sum;
    const std::string value = operand_value(operand, map, ".s", std::nullopt, sum);
    sum.push_back(make(loop_ir::Let{"shift.s", DType::i32, Fn::constant, {}, Scalar::of_int(DType::i32, -128), 0}));
    sum.push_back(make(loop_ir::Let{"added.s", DType::i32, Fn::mul, {value, "shift.s"}, {}, 0}));
    sum.push_back(make(loop_ir::Store{packed.param, last, "added.s", {}, Combiner::sum}));
    out.push_back(loop("pos", 0, valid, LoopKind::lanes, store_zero(packed.param, last, "start.s", DType::i32)));
    out.push_back(loop("pad", valid, width, LoopKind::lanes, store_zero(packed.param, edge, "edge.s", DType::i32)));
    out.push_back(loop("k", 0, all, LoopKind::serial, {loop("pos", 0, valid, LoopKind::lanes, std::move(sum))}));
  }
  return out;
}

PackedOperand ContractionScheduler::pack_once(Item& item, Operand& operand, bool lanes) {
  PackedOperand packed;
  packed.once = !operand.per_call;
  if (lanes && item.packed_lanes()) packed.dtype = item.packed_lanes()->dtype;
  const bool split = lanes && item.parts > 1;
  if (split) packed.dtype = DType::bf16;
  if (lanes && (item.words || item.bits > 0)) packed.dtype = DType::i32;
  const bool row_pairs = !lanes && item.pairs;
  if (row_pairs) packed.dtype = DType::bf16;
  operand.param = packed.param = (lanes ? "packed_lanes" : "packed_rows") + item.tag;
  const int64_t width = packed_width(item, lanes);
  const std::vector<Axis>& axes = lanes ? lanes_ : rows_;
  const Expr panels = ceildiv(count(axes), width);
  std::vector<Axis> batch;
  for (const auto& a : outer_)
    if (operand.source->axes.count(a.name)) batch.push_back(a);
  for (const auto& a : batch) packed.shape.push_back(a.extent);
  // Lanes [outer][k / KC][panel][KC][NR] stream through the cache block by block; words [outer][panel][k / word][NR], so that schedules with other
  // blocks read the same; rows [outer][panel][k][MR], of pairs [outer][k / KC][panel][MR][KC].
  const bool blocks = (lanes && item.bits == 0) || row_pairs;
  if (blocks) packed.shape.push_back(item.depth_blocks);
  packed.shape.push_back(panels);
  if (split) packed.shape.emplace_back(item.parts);
  // Pairs of k lie side by side: [k / 2][NR][2].
  const bool pairs = lanes && item.paired_lanes();
  if (row_pairs)
    packed.shape.insert(packed.shape.end(), {Expr(width), Expr(item.depth_block)});
  else if (lanes && item.bits > 0)
    packed.shape.insert(packed.shape.end(), {floordiv(item.depth, item.word()), Expr(width)});
  else
    packed.shape.insert(packed.shape.end(), {lanes ? Expr(item.depth_block / item.group() + (item.shifted() ? 1 : 0)) : item.depth, Expr(width)});
  if (pairs) packed.shape.emplace_back(2);

  tile_ir::Block inside = pack_panel(item, operand, lanes, packed, batch);
  if (blocks) inside = {loop("kb" + item.tag, 0, item.depth_blocks, LoopKind::serial, std::move(inside))};

  const auto narrow = lanes ? item.packed_lanes() : row_pairs ? operand.narrow() : std::nullopt;
  packed.kernel.name = fmt::format("pack_{}{}_{}", lanes ? "lanes" : "rows", item.tag, kernel_.name);
  std::set<std::string> reads;
  for (const auto& stmt : operand.statements_of(narrow ? narrow->value : operand.source->value))
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) reads.insert(load->buffer);
  if (operand.per_call && lanes) inside = pack_within_limit(std::move(inside), batch, panels, reads);
  finish_pack(packed, reads, std::move(inside), batch, axes, width);
  if (!packed.once) {
    packed.kernel.symbols = kernel_.symbols;
    packed.kernel.provenance.clear();  // a call's own work is not done twice
  }
  return packed;
}

void ContractionScheduler::finish_pack(PackedOperand& packed, const std::set<std::string>& reads, tile_ir::Block inside,
                                       const std::vector<Axis>& batch, const std::vector<Axis>& axes, int64_t width) const {
  tile_ir::Kernel& kernel = packed.kernel;
  for (const auto& p : kernel_.params) {
    if (reads.count(p.name) == 0) continue;
    kernel.params.push_back(p);
    packed.sources.push_back(p.name);
  }
  kernel.params.push_back({packed.param, loop_ir::ParamKind::out, packed.dtype, packed.shape, contiguous_strides(packed.shape), false});
  Expr iterations = count(batch) * ceildiv(count(axes), width);
  kernel.body = {loop("par", 0, iterations, LoopKind::parallel, std::move(inside))};
  kernel.chunks = max(1, min(iterations, ceildiv(product(packed.shape), chunk_work_)));
  std::vector<Argument> parallel;
  for (const auto& a : batch) parallel.push_back({a.name, {}});
  parallel.insert(parallel.end(), {{name_of(axes), {}}, {"work", chunk_work_}});
  kernel.schedule = {"pack", {{"parallel", parallel}, {"tile", {{name_of(axes), width}}}}};
  kernel.provenance = kernel_.provenance;
}

std::vector<PackedOperand> ContractionScheduler::pack_factors(Item& item) {
  std::vector<PackedOperand> out;
  const auto prologue = item.prologue();
  if (!prologue) return out;
  const bool pairs = item.paired_lanes();
  const int64_t width = packed_width(item, true);
  std::vector<Axis> batch;
  for (const auto& a : outer_)
    if (item.lanes.source->axes.count(a.name)) batch.push_back(a);
  const Expr extent = count(lanes_);
  const Expr panels = ceildiv(extent, width);
  const Expr panel = mod(sym("par"), panels);
  const Expr group = sym("group");
  const Expr valid = min(width, extent - panel * width);
  const Substitution at = unflatten(batch, floordiv(sym("par"), panels));
  const std::vector<const loop_ir::Load*> factors = item.bits > 0 ? item.linear()->factors : prologue->factors;
  for (const loop_ir::Load* factor : factors) {
    PackedOperand packed;
    packed.once = !item.lanes.per_call;
    packed.dtype = factor->dtype;
    packed.param = fmt::format("factor{}_{}", out.size(), item.tag);
    for (const auto& a : batch) packed.shape.push_back(a.extent);
    // [outer][panel][group of k][NR], in pairs as the panel's elements are.
    packed.shape.insert(packed.shape.end(), {panels, floordiv(item.depth, prologue->group), Expr(width)});
    if (pairs) packed.shape.emplace_back(2);
    auto store = [&](Expr lane, Expr half, bool zero) {
      std::vector<Expr> to;
      for (const auto& a : batch) to.push_back(at.at(a.name));
      to.insert(to.end(), {panel, group, lane});
      if (pairs) to.push_back(half);
      if (zero) return store_zero(packed.param, std::move(to), "none", packed.dtype);
      Substitution map = at;
      join(map, unflatten(lanes_, panel * width + lane));
      join(map, depth_map(item, group * prologue->group));
      loop_ir::Load load = substituted(*factor, map);
      const std::string name = load.name;
      return tile_ir::Block{make(std::move(load)), make(loop_ir::Store{packed.param, std::move(to), name, {}, Combiner::set})};
    };
    auto halves = [&](Expr lane, bool zero) {
      tile_ir::Block one = store(lane, sym("half"), zero);
      return pairs ? tile_ir::Block{loop("half", 0, 2, LoopKind::unroll, std::move(one))} : one;
    };
    const Expr groups = floordiv(item.depth, prologue->group);
    tile_ir::Block inside{loop("pos", 0, valid, LoopKind::serial, {loop("group", 0, groups, LoopKind::lanes, halves(sym("pos"), false))}),
                          loop("pad", valid, width, LoopKind::serial, {loop("group", 0, groups, LoopKind::lanes, halves(sym("pad"), true))})};
    packed.kernel.name = fmt::format("pack_{}_{}", packed.param, kernel_.name);
    finish_pack(packed, {factor->buffer}, std::move(inside), batch, lanes_, width);
    out.push_back(std::move(packed));
  }
  return out;
}

std::vector<Expr> ContractionScheduler::window_shape() const {
  const Item& item = items_[0];
  std::vector<Expr> shape{item.depth_block / window_steps(item), window_->line.span(lines_), window_->point.span(tile_points())};
  if (item.pairs) shape.emplace_back(2);
  return shape;
}

void ContractionScheduler::pair_channels(Item& item) const {
  item.channels = item.pairs ? window_->channels.size() : 0;
  const Expr channels = count(window_->channels);
  item.depth = (item.pairs ? round_up(channels, 2) : channels) * window_->taps();
}

tile_ir::Block ContractionScheduler::pack_window(const Item& item) const {
  const std::string buffer = "pa" + item.tag;
  const Expr step = sym("kc");
  const Expr line = sym("ul");
  const Expr point = sym("up");
  const Expr half = item.pairs ? sym("uh") : Expr(0);
  const int64_t group = item.group();
  const int64_t block = item.depth_block / window_->taps();  // channels
  const Expr first = sym("kb" + item.tag) * block;
  const Expr channels = min(block, count(window_->channels) - first);
  const std::vector<Expr> shape = window_shape();
  auto place = [&](Expr line, Expr point, Expr half) {
    std::vector<Expr> index{step, line, point};
    if (item.pairs) index.push_back(half);
    return index;
  };
  auto halves = [&](tile_ir::Block body) { return item.pairs ? tile_ir::Block{loop("uh", 0, 2, LoopKind::unroll, std::move(body))} : body; };
  const Expr points = window_->point.span(rows_[1].extent);
  auto over_points = [&](tile_ir::Block body) {
    body = {loop("up", 0, points, LoopKind::lanes, std::move(body))};
    if (any_points()) {  // beside them those of padding
      tile_ir::Block zero = halves(store_zero(buffer, place(line, sym("uw"), half), "beyond", item.pairs ? DType::bf16 : DType::f32));
      body.push_back(loop("uw", points, shape[2], LoopKind::lanes, std::move(zero)));
    }
    return loop("ul", 0, window_->line.span(valid_row_lines_), LoopKind::serial, std::move(body));
  };
  auto copy = [&](Expr half) {
    const Expr at = first + step * group + half;
    Substitution map = outer_map_;
    join(map, window_->line.at(first_row_line_, line));
    join(map, window_->point.at(0, point));
    join(map, unflatten(window_->channels, at));
    tile_ir::Block out = store_operand(item.rows, map, buffer, place(line, point, half), ".r", item.pairs ? item.rows.narrow() : std::nullopt);
    Substitution ahead = map;
    join(ahead, unflatten(window_->channels, min(at + kPrefetchSteps, count(window_->channels) - 1)));
    prefetch_at(item.rows, ahead, out);
    return out;
  };
  tile_ir::Block edges;  // lines that complete the last register block
  if (block_lines_ > 1) {
    tile_ir::Block zero = halves(store_zero(buffer, place(sym("uz"), sym("ue"), half), "edge", item.pairs ? DType::bf16 : DType::f32));
    zero = {loop("ue", 0, shape[2], LoopKind::lanes, std::move(zero))};
    edges.push_back(
        loop("uz", window_->line.span(valid_row_lines_), window_->line.span(lines_padded(valid_row_lines_)), LoopKind::serial, std::move(zero)));
  }
  auto over_steps = [&](Expr from, Expr to, tile_ir::Block body) {
    body = {over_points(std::move(body))};
    body.insert(body.end(), edges.begin(), edges.end());
    return loop("kc", from, to, LoopKind::serial, std::move(body));
  };
  tile_ir::Block out{over_steps(0, floordiv(channels, group), halves(copy(half)))};
  if (!item.has_odd_channels()) return out;
  tile_ir::Block last = copy(0);
  for (auto& stmt : store_zero(buffer, place(line, point, 1), "odd", DType::bf16)) last.push_back(stmt);
  out.push_back(over_steps(floordiv(channels, group), ceildiv(channels, group), std::move(last)));
  return out;
}

ContractionScheduler::Lines ContractionScheduler::row_lines() const {
  bool two = rows_.size() == 2;
  return {rows_, two, first_row_, valid_rows_, 0, two ? rows_[0].extent : 0};
}

tile_ir::Block ContractionScheduler::pack_lines(const Item& item, const Operand& operand, const std::string& side, const std::string& prefix,
                                                const Lines& lines, Expr padded) const {
  std::string t = item.tag;
  std::string buffer = prefix + t;
  std::string suffix = "." + side + t;
  std::string k_name = "k" + side + t;
  std::string p_name = "p" + side + t;
  std::string u_name = "u" + side + t;
  const Expr depth = depth_of_block(item);
  const Expr start = sym("kb" + t) * item.depth_block;
  // Two steps of k lie side by side: both are copied at once.
  const bool pairs = item.pairs;
  const Expr half = sym("h" + side + t);
  const Expr k = pairs ? sym(k_name) * 2 + half : sym(k_name);
  const Expr steps = pairs ? floordiv(depth, 2) : depth;
  const Expr place = lines.two ? sym(u_name) * lines.axes[1].extent + sym(p_name) : sym(p_name);
  auto with_places = [&](Substitution map) {
    if (lines.two) {
      map[lines.axes[0].name] = lines.first_line + sym(u_name);
      map[lines.axes[1].name] = sym(p_name);
    } else {
      join(map, unflatten(lines.axes, lines.first + sym(p_name)));
    }
    return map;
  };
  auto over_places = [&](tile_ir::Block body) {
    if (!lines.two) return tile_ir::Block{loop(p_name, 0, lines.valid, LoopKind::lanes, std::move(body))};
    body = {loop(p_name, 0, lines.axes[1].extent, LoopKind::lanes, std::move(body))};
    return tile_ir::Block{loop(u_name, 0, lines.valid_lines, LoopKind::serial, std::move(body))};
  };
  auto halves = [&](tile_ir::Block body) { return pairs ? tile_ir::Block{loop(half.name(), 0, 2, LoopKind::unroll, std::move(body))} : body; };
  // The value at a step of the block, to line `line` of the buffer.
  auto copy_to = [&](Expr step, Expr line, Expr which) {
    Substitution map = outer_map_;
    join(map, depth_map(item, start + step));
    std::vector<Expr> index{line, place};
    if (pairs) index.push_back(which);
    return store_operand(operand, with_places(map), buffer, std::move(index), suffix, pairs ? operand.narrow() : std::nullopt);
  };
  tile_ir::Block out;
  if (item.pads_depth() && pairs) {
    tile_ir::Block zero = halves(store_zero(buffer, {sym(k_name + "z"), sym(p_name), half}, "pad" + side + t, DType::bf16));
    zero = {loop(p_name, 0, padded, LoopKind::lanes, std::move(zero))};
    out.push_back(loop(k_name + "z", steps, steps_of_block(item) * (item.step() / 2), LoopKind::serial, std::move(zero)));
    const Expr last = sym(k_name + "o");
    if (item.may_be_odd()) out.push_back(loop(last.name(), steps * 2, depth, LoopKind::serial, over_places(copy_to(last, steps, 0))));
  }
  const auto run = lines.two ? std::nullopt : run_of_lines(item, operand);
  if (run && (!pairs || *run % 2 == 0)) {
    // Places are found once a run of the innermost axis, not for each step of k.
    const Expr of_run = sym(k_name + "_run");
    const int64_t lines_of_run = pairs ? *run / 2 : *run;
    Substitution ahead = outer_map_;
    join(ahead, depth_map(item, start + of_run * *run + min(k + kPrefetchLines, *run - 1)));
    tile_ir::Block copy = copy_to(of_run * *run + k, of_run * lines_of_run + sym(k_name), half);
    prefetch_at(operand, with_places(ahead), copy);
    copy = {loop(k_name, 0, lines_of_run, LoopKind::serial, over_places(halves(std::move(copy))))};
    out.push_back(loop(of_run.name(), 0, floordiv(depth, *run), LoopKind::serial, std::move(copy)));
  } else {
    Expr first = 0;
    bool whole = false;
    const bool squares = !lines.two && item.summed.size() == 1 && unit_along(operand, item.summed[0].name);
    if (squares) {
      // Memory runs along k: squares are transposed in registers.
      const int64_t side_of_square = ctx_.target.vector_bytes / 4;
      std::string s_name = k_name + "_square";
      std::string i_name = k_name + "_in";
      const Expr point = sym(s_name) * side_of_square + sym(i_name);
      tile_ir::Block square{loop(i_name, 0, side_of_square, LoopKind::unroll,
                                 copy_to(point, pairs ? sym(s_name) * (side_of_square / 2) + floordiv(sym(i_name), 2) : point, mod(sym(i_name), 2)))};
      out.push_back(loop(s_name, 0, floordiv(depth, side_of_square), LoopKind::serial, over_places(std::move(square))));
      first = floordiv(depth, side_of_square) * side_of_square;
      whole =
          item.depth.is_constant() && item.depth.value() % side_of_square == 0 && (item.depth_block % side_of_square == 0 || item.depth_blocks.is(1));
    }
    tile_ir::Block copy = copy_to(k, sym(k_name), half);
    if (!squares) {
      Substitution map = outer_map_;
      join(map, depth_map(item, start + k));
      prefetch_operand(item, operand, with_places(map), start + k, copy);
    }
    if (!whole) out.push_back(loop(k_name, pairs ? floordiv(first, 2) : first, steps, LoopKind::serial, over_places(halves(std::move(copy)))));
  }
  std::string e_name = "e" + side + t;
  std::vector<Expr> edge_at{sym(k_name + "e"), sym(e_name)};
  if (pairs) edge_at.push_back(half);
  tile_ir::Block edge = halves(store_zero(buffer, edge_at, "edge" + side + t, pairs ? DType::bf16 : DType::f32));
  edge = {loop(e_name, lines.valid, padded, LoopKind::lanes, std::move(edge))};
  out.push_back(loop(k_name + "e", 0, steps, LoopKind::serial, std::move(edge)));
  return out;
}

tile_ir::Block ContractionScheduler::pack_rows(const Item& item) const {
  if (item.words || item.bytes) return pack_bytes(item);
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
    if (item.parts > 1) {
      // A block takes few bytes of a row: no hardware prefetcher sees the next ones coming.
      tile_ir::Block split = store_parts(item.rows, map, buffer, {0, point, k}, 0, ".r" + t);
      Substitution ahead = map;
      join(ahead, depth_map(item, min((sym("kb" + t) + 1) * item.depth_block + k, item.depth - 1)));
      prefetch_at(item.rows, ahead, split, 2);
      return split;
    }
    return store_operand(item.rows, map, buffer, {point, k}, ".r" + t, item.pairs ? item.rows.narrow() : std::nullopt);
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
  const Axis& inner = item.summed.back();
  const bool in_lines = item.pairs && item.summed.size() > 1 && first.is(0) && inner.extent.is_constant() &&
                        item.depth_block % inner.extent.value() == 0 && unit_along(item.rows, inner.name) && !lies_along(item.rows, item.summed);
  if (in_lines) {
    // Lines of several summed axes are copied one by one: conditions are those of a line.
    const Expr line = sym("kl" + t);
    const Expr start = sym("kb" + t) * (item.depth_block / inner.extent.value());
    Substitution map = outer_map_;
    join(map, unflatten(rows_, first_row_ + row));
    join(map, unflatten({item.summed.begin(), item.summed.end() - 1}, start + line));
    map[inner.name] = k;
    tile_ir::Block points = store_operand(item.rows, map, buffer, {row, line * inner.extent + k}, ".r" + t, item.rows.narrow());
    points = {loop(k_name, 0, inner.extent, LoopKind::lanes, std::move(points))};
    points = {loop(line.name(), 0, floordiv(depth, inner.extent), LoopKind::serial, std::move(points))};
    out.push_back(loop(r_name, 0, valid_rows_, LoopKind::serial, std::move(points)));
  } else {
    out.push_back(loop(r_name, first, valid_rows_, LoopKind::serial, along_depth(copy(row))));
  }
  const Expr padded = item.pads_depth() ? steps_of_block(item) * item.step() : depth;
  if (item.pads_depth()) {
    tile_ir::Block zero = store_zero(buffer, {row, sym(k_name + "z")}, "padr" + t, DType::bf16);
    out.push_back(loop(r_name, 0, valid_rows_, LoopKind::serial, {loop(k_name + "z", depth, padded, LoopKind::lanes, std::move(zero))}));
  }
  std::string e_name = "er" + t;
  std::vector<Expr> place{sym(e_name), sym(k_name + "e")};
  if (item.parts > 1) place.insert(place.begin(), 0);
  tile_ir::Block edge = store_zero(buffer, place, "edger" + t, item.pairs ? DType::bf16 : item.dtype());
  for (int64_t p = 1; p < item.parts; ++p) {
    place[0] = p;
    edge.push_back(make(loop_ir::Store{buffer, place, "edger" + t, {}, Combiner::set}));
  }
  out.push_back(loop(e_name, valid_rows_, padded_rows(), LoopKind::serial, {loop(k_name + "e", 0, padded, LoopKind::lanes, std::move(edge))}));
  return out;
}

std::vector<Expr> ContractionScheduler::outer_index(const Operand& operand) const {
  std::vector<Expr> index;
  for (const auto& a : outer_)
    if (operand.source->axes.count(a.name)) index.push_back(outer_map_.at(a.name));
  return index;
}

}  // namespace deplo::loop_to_tile
