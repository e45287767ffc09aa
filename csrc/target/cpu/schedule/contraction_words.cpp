#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "loop_ir/build.h"
#include "target/cpu/features.h"
#include "target/cpu/schedule/contraction_scheduler.h"
#include "target/cpu/schedule/statements.h"

namespace deplo::loop_to_tile {
namespace {

using loop_ir::Let;
using loop_ir::Load;

/// Of a word of 4-bit codes: each lies three bits further up than its place, the last one across the ends, so that a shift brings it where bf16
/// numbers have the upper bits of their fraction.
constexpr int64_t kWordTurn = 3;
constexpr int64_t kFewestBits = 4;
constexpr int64_t kLeastOfPadding = 16;  // of the lanes, one of so many may be padding
constexpr int64_t kLongestGroup = 1024;  // steps of k of a sum of products of codes
constexpr int64_t kFoldedRows = 16;      // up to here, taking words apart in registers costs less than going through the first cache

/// The place of a step's code in its word: for pairs, those of two steps next to each other lie 16 bits apart.
int64_t place_of_step(const Item& item, int64_t step) { return item.turns_words() || item.bits == 8 ? step / 2 + step % 2 * (16 / item.bits) : step; }

/// The load that a code is.
const Load* loaded_code(const Operand& operand, const std::string& code) {
  for (const auto& stmt : operand.slice)
    if (const auto* load = std::get_if<Load>(&stmt->node); load && load->name == code && load->guard.empty()) return load;
  return nullptr;
}

/// Writes scale * (code + offset) + shift as statements about the factors; without `inner` the offset is part of the shift, and `centered` codes have
/// none: what is added to them before they are scaled is an integer in memory, taken to be 0.
class LinearForm {
 public:
  LinearForm(const Operand& operand, std::string code, bool inner, bool centered, loop_ir::Block& into)
      : operand_(operand), code_(std::move(code)), inner_(inner), centered_(centered), into_(into) {
    for (const auto& stmt : operand.slice) {
      if (const auto* let = std::get_if<Let>(&stmt->node)) definitions_[let->name] = let;
      if (const auto* load = std::get_if<Load>(&stmt->node)) loads_[load->name] = load;
    }
  }

  struct Form {
    std::string scale, shift, offset;
  };
  std::optional<Form> of(const std::string& value) {
    if (value == code_) return Form{};
    auto it = definitions_.find(value);
    if (it == definitions_.end()) return std::nullopt;
    const Let& let = *it->second;
    if (!is_float(let.dtype) && let.dtype != DType::i32) return std::nullopt;
    if (let.fn == Fn::cast) return of(let.operands[0]);
    if (let.fn != Fn::mul && let.fn != Fn::add && let.fn != Fn::sub) return std::nullopt;
    const bool first = varies(let.operands[0]);
    if (first == varies(let.operands[1]) || (!first && let.fn == Fn::sub)) return std::nullopt;
    auto form = of(let.operands[first ? 0 : 1]);
    if (let.fn != Fn::mul && form && form->scale.empty() && form->shift.empty()) {
      const Load* center = integer(let.operands[first ? 1 : 0]);
      if (center) centers_.push_back(center);
      if (center && centered_) return form;
    }
    auto factor = form ? number(let.operands[first ? 1 : 0]) : std::nullopt;
    if (!factor) return std::nullopt;
    if (let.fn == Fn::mul) {
      form->scale = form->scale.empty() ? *factor : make_let(Fn::mul, {form->scale, *factor});
      if (!form->shift.empty()) form->shift = make_let(Fn::mul, {form->shift, *factor});
      return form;
    }
    std::string& sum = inner_ && form->scale.empty() ? form->offset : form->shift;
    if (sum.empty())
      sum = let.fn == Fn::sub ? make_let(Fn::neg, {*factor}) : *factor;
    else
      sum = make_let(let.fn, {sum, *factor});
    return form;
  }

  /// The integers in memory that are added to codes.
  const std::vector<const Load*>& centers() const { return centers_; }
  bool reads(const Load& load) const { return made_.count(load.name) > 0; }

 private:
  /// The load of an integer that a value is, after casts.
  const Load* integer(const std::string& value) const {
    if (auto load = loads_.find(value); load != loads_.end())
      return is_float(load->second->dtype) || !load->second->guard.empty() ? nullptr : load->second;
    auto let = definitions_.find(value);
    return let != definitions_.end() && let->second->fn == Fn::cast ? integer(let->second->operands[0]) : nullptr;
  }

  bool varies(const std::string& value) const {
    if (value == code_) return true;
    auto it = definitions_.find(value);
    return it != definitions_.end() &&
           std::any_of(it->second->operands.begin(), it->second->operands.end(), [&](const auto& o) { return varies(o); });
  }

  /// A value that is made of factors alone, as float32.
  std::optional<std::string> number(const std::string& value) {
    for (const auto& stmt : operand_.statements_of(value)) {
      const auto* let = std::get_if<Let>(&stmt->node);
      const auto* load = std::get_if<Load>(&stmt->node);
      const std::string& name = let ? let->name : load->name;
      if (made_.insert(name).second) into_.push_back(stmt);
    }
    const DType dtype = loads_.count(value) > 0 ? loads_.at(value)->dtype : definitions_.at(value)->dtype;
    if (dtype == DType::f32) return value;
    if (dtype != DType::bf16 && dtype != DType::f16 && dtype != DType::i32 && size_of(dtype) != 1) return std::nullopt;
    return make_let(Fn::cast, {value});
  }

  std::string make_let(Fn fn, std::vector<std::string> operands) {
    const std::string name = fmt::format("{}.l{}", code_, next_++);
    into_.push_back(loop_ir::make_stmt(Let{name, DType::f32, fn, std::move(operands), {}, 0}));
    return name;
  }

  const Operand& operand_;
  const std::string code_;
  const bool inner_;
  const bool centered_;
  loop_ir::Block& into_;
  std::map<std::string, const Let*> definitions_;
  std::map<std::string, const Load*> loads_;
  std::set<std::string> made_;
  std::vector<const Load*> centers_;
  int next_ = 0;
};

}  // namespace

std::optional<Operand::Linear> Operand::linear(const std::vector<Axis>& summed, bool inner, bool centered) const {
  Linear out;
  if (auto scaled = prologue(summed)) {
    out.code = scaled->main;
    out.factors = scaled->factors;
    out.group = scaled->group;
  } else if (auto narrow = stored()) {
    out.code = *narrow;
  } else {
    return std::nullopt;
  }
  if (out.code.dtype != DType::i8 && out.code.dtype != DType::u8) return std::nullopt;
  LinearForm writer(*this, out.code.value, inner, centered, out.statements);
  auto form = writer.of(source->value);
  if (!form) return std::nullopt;
  out.centers = writer.centers();
  if (centered)
    std::erase_if(out.factors,
                  [&](const Load* f) { return std::find(out.centers.begin(), out.centers.end(), f) != out.centers.end() && !writer.reads(*f); });
  out.scale = form->scale;
  out.shift = form->shift;
  out.offset = form->offset;
  return out;
}

std::optional<Operand::Linear> Item::linear(bool inner) const {
  if (words || parts > 1 || matrix || dtype() != DType::f32 || !lanes.is_static || lanes.per_call) return std::nullopt;
  return lanes.linear(contraction->reduce->axes, inner, centered);
}

bool Item::scales_steps() const { return folded && bits == kFewestBits && !pairs && !bytes && rows.narrow(); }

std::optional<Operand::Linear> Item::row_codes() const {
  auto out = rows.linear(contraction->reduce->axes);
  const bool whole = out && (out->group == 0 || (depth.is_constant() && out->group == depth.value()));
  return whole ? out : std::nullopt;
}

bool Item::turns_rows() const { return words ? shifted() && !matrix : (bits == 8) == (row_codes()->code.dtype == DType::i8); }

bool Item::needs_lane_sums() const { return bytes && (turns_rows() || !row_codes()->shift.empty()); }

bool ContractionScheduler::can_multiply_codes(const Item& item) const {
  return multiplies_bytes(ctx_.target.features) && item.row_codes() && can_fold(item, 8);
}

bool ContractionScheduler::can_fold(const Item& item, int64_t bits) const {
  const auto linear = item.linear(/*inner=*/true);
  if (!linear || !lies_for_pairs(item) || ctx_.training) return false;
  // What leaves the sums of float32 layers would take digits from them; zero points are added to the codes there.
  if (!linear->shift.empty() && !item.rows.narrow() && !item.row_codes()) return false;
  // Codes of 4 bits are elements of a param, whose range can be looked at.
  if (bits == kFewestBits && !loaded_code(item.lanes, linear->code.value)) return false;
  const int64_t word = 32 / bits;
  return item.depth.value() % word == 0 && linear->group % word == 0;
}

bool ContractionScheduler::folds_wide() const {
  if (!lanes_extent_.is_constant() || two_lane_axes() || !std::all_of(items_.begin(), items_.end(), [&](const Item& i) { return can_fold(i, 8); }))
    return false;
  const int64_t lanes = lanes_extent_.value();
  return round_up(lanes, lanes_of(word_vectors())) - lanes <= lanes / kLeastOfPadding;
}

std::vector<AssumedRange> ContractionScheduler::few_bits() const {
  std::vector<AssumedRange> out;
  for (const Item& item : items_) {
    if (item.bits != kFewestBits) return {};
    const Load& load = *loaded_code(item.lanes, item.linear()->code.value);
    const bool is_signed = load.dtype == DType::i8;
    out.push_back({load.buffer, is_signed ? -8 : 0, is_signed ? 7 : 15});
    if (!item.centered) continue;
    const auto linear = item.linear();
    for (const Load* center : linear->centers) out.push_back({center->buffer, 0, 0});
  }
  return out;
}

bool ContractionScheduler::can_widen_words(const Item& item) const { return !item.bytes && can_widen(item) && can_fold(item, kFewestBits); }

bool ContractionScheduler::wants_widened_words(const Item& item) const { return bits_ == kFewestBits && !folds_rows(item) && can_widen_words(item); }

bool ContractionScheduler::folds_rows(const Item& item) const {
  return item.bytes || (rows_extent_.is_constant() && rows_extent_.value() <= kFoldedRows && can_fold(item, 8));
}

int64_t ContractionScheduler::share_of_factors(const Item& item) {
  const int64_t group = item.linear()->group;
  return std::gcd(group > 0 ? group : item.depth.value(), std::gcd(item.depth_block, chunk(item)));
}

void ContractionScheduler::choose_widened_words(Item& item) const {
  const int64_t width = lanes_of(folds_wide() ? word_vectors() : kBlockVectors);
  if (!wants_widened_words(item) || width % nr_ != 0) return;
  item.bits = bits_;
  item.centered = centered_;
  item.width = width;
  // Blocks of k are whole words, and whole groups where these are short.
  const int64_t group = item.linear()->group;
  const int64_t unit = group > 0 && group <= kLongestFold ? group : item.word();
  item.chain = round_up(item.chain, unit);
  item.depth_block = item.depth_block > item.chain ? round_up(item.depth_block, item.chain) : item.chain;
}

void ContractionScheduler::choose_words(Item& item) const {
  item.folded = folds_rows(item);
  if (!item.folded) return choose_widened_words(item);
  item.bits = can_fold(item, bits_) ? bits_ : 8;
  item.centered = centered_ && item.bits == kFewestBits;
  item.width = folds_wide() ? lanes_of(word_vectors()) : nr_;
  // Chains end where groups do.
  const int64_t group = item.linear()->group;
  const int64_t end = group > 0 ? group : item.depth.value();
  item.chain = round_up(std::min(end, item.bytes ? kLongestGroup : item.pairs ? 2 * kLongestFold : kLongestFold), item.word());
  while (end % item.chain != 0) item.chain -= item.word();
  item.depth_block = round_up(item.depth_block, item.chain);
}

int64_t ContractionScheduler::code_offset(const Item& item) {
  const bool is_signed = item.linear()->code.dtype == DType::i8;
  if (item.turns_words()) return is_signed ? -24 : -16;
  if (item.bits == kFewestBits) return is_signed ? -8 : 0;
  return is_signed ? 0 : 128;
}

tile_ir::Block ContractionScheduler::store_codes(const Item& item, const std::vector<Substitution>& maps, const std::string& buffer,
                                                 std::vector<Expr> index, const std::string& suffix) {
  const auto linear = item.linear();
  const bool is_signed = linear->code.dtype == DType::i8;
  const bool few = item.bits == kFewestBits;
  tile_ir::Block out;
  Statements put(out, suffix);
  const std::string mask = put.number("code_mask", few ? 0xf : 0xff);
  std::string word;
  for (size_t step = 0; step < maps.size(); ++step) {
    const std::string code = operand_value(item.lanes, maps[step], fmt::format("{}.c{}", suffix, step), linear->code, out);
    auto name = [&](const char* stem) { return fmt::format("{}{}", stem, step); };
    std::string value = put.word(name("code"), Fn::bit_and, {put.word(name("wide"), Fn::cast, {code}), mask});
    // What is multiplied as bytes lies in bytes: the lower halves first.
    const auto at = static_cast<int64_t>(step);
    const int64_t by = item.bytes ? at % 4 * 8 + at / 4 * 4 : item.bits * place_of_step(item, at);
    if (by > 0) value = put.word(name("up"), Fn::shl, {value, put.number(name("places"), by)});
    word = word.empty() ? value : put.word(name("word"), Fn::bit_or, {word, value});
  }
  // Turning the uppermost bit over adds half of the range: 4-bit codes are unsigned, bytes signed.
  if (few == is_signed) word = put.word("turned", Fn::bit_xor, {word, put.number("upper_bits", static_cast<int32_t>(few ? 0x88888888 : 0x80808080))});
  if (item.turns_words()) {
    const std::string low =
        put.word("low", Fn::bit_and, {put.word("over", Fn::shr, {word, put.number("back", 32 - kWordTurn)}), put.number("ends", 7)});
    word = put.word("placed", Fn::bit_or, {put.word("on", Fn::shl, {word, put.number("turn", kWordTurn)}), low});
  }
  out.push_back(make(loop_ir::Store{buffer, std::move(index), word, {}, Combiner::set}));
  return out;
}

tile_ir::Block ContractionScheduler::pack_bytes(const Item& item) const {
  const std::string& t = item.tag;
  const std::string buffer = "pa" + t;
  const std::string row_name = "rr" + t;
  const std::string k_name = "kr" + t;
  const std::string line_name = "kl" + t;
  const Expr row = sym(row_name);
  const Expr k = sym(k_name);
  const auto& summed = item.contraction->reduce->axes;
  const Expr inner = summed.back().extent;
  // Lines of several summed axes are copied one by one, along the innermost axis.
  const bool in_lines = summed.size() > 1 && inner.is_constant() && item.depth_block % inner.value() == 0;
  const Expr start = sym("kb" + t) * item.depth_block;
  const Expr place = in_lines ? sym(line_name) * inner + k : k;
  Substitution map = outer_map_;
  join(map, unflatten(rows_, first_row_ + row));
  if (in_lines) {
    join(map, unflatten({summed.begin(), summed.end() - 1}, floordiv(start, inner) + sym(line_name)));
    map[summed.back().name] = k;
  } else {
    join(map, depth_map(item, start + k));
  }
  auto store = [&](tile_ir::Block block, std::string value, DType dtype) {
    Statements put(block, ".u" + t);
    if (dtype != item.row_bytes()) value = put.let("bits", DType::u8, Fn::cast, {value});
    if (item.turns_rows())
      value = put.let("shifted", DType::u8, Fn::add, {value, put.let("half", DType::u8, Fn::constant, {}, Scalar::of_int(DType::u8, 128))});
    put.store(buffer, {row, place}, value);
    return tile_ir::Block{loop(k_name, 0, in_lines ? inner : depth_of_block(item), LoopKind::lanes, std::move(block))};
  };
  const auto narrow = item.bytes ? std::optional(item.row_codes()->code) : item.rows.narrow();
  tile_ir::Block copy;
  const std::string value = operand_value(item.rows, map, ".r" + t, narrow, copy);
  tile_ir::Block along;
  auto* load = copy.size() == 1 ? std::get_if<Load>(&copy[0]->node) : nullptr;
  const bool whole_lines = in_lines && load && !load->guard.empty() && std::all_of(load->guard.begin(), load->guard.end(), [&](const Cond& c) {
                             return c.kind == Cond::Kind::ge0 && !uses(c.expr, k_name);
                           });
  if (whole_lines) {
    // A line is read as a whole, or all of it is padding.
    Load inside = *load;
    inside.guard.clear();
    along.push_back(make(tile_ir::If{load->guard, store({make(inside)}, value, narrow->dtype)}));
    std::vector<Cond> before;
    for (const Cond& c : load->guard) {
      std::vector<Cond> fails = before;
      fails.push_back({Cond::Kind::ge0, Expr(-1) - c.expr});
      tile_ir::Block padding{make(Let{value, narrow->dtype, Fn::constant, {}, load->fill, 0})};
      along.push_back(make(tile_ir::If{std::move(fails), store(std::move(padding), value, narrow->dtype)}));
      before.push_back(c);
    }
  } else {
    along = store(std::move(copy), value, narrow->dtype);
  }
  if (in_lines) along = {loop(line_name, 0, floordiv(depth_of_block(item), inner), LoopKind::serial, std::move(along))};
  tile_ir::Block out{loop(row_name, 0, valid_rows_, LoopKind::serial, std::move(along))};
  tile_ir::Block edge = store_zero(buffer, {sym("er" + t), sym(k_name + "e")}, "edger" + t, item.row_bytes());
  out.push_back(
      loop("er" + t, valid_rows_, padded_rows(), LoopKind::serial, {loop(k_name + "e", 0, depth_of_block(item), LoopKind::lanes, std::move(edge))}));
  return out;
}

std::pair<std::string, std::string> ContractionScheduler::linear_at(const Operand::Linear& linear, const Substitution& map, const std::string& suffix,
                                                                    tile_ir::Block& into) {
  auto name = [&](const std::string& value) { return value.empty() ? value : value + suffix; };
  for (const auto& stmt : linear.statements) {
    if (const auto* load = std::get_if<Load>(&stmt->node)) {
      Load copy = substituted(*load, map);
      copy.name = name(load->name);
      into.push_back(make(std::move(copy)));
    } else {
      Let copy = std::get<Let>(stmt->node);
      copy.name = name(copy.name);
      for (std::string& operand : copy.operands) operand = name(operand);
      into.push_back(make(std::move(copy)));
    }
  }
  return {name(linear.scale), name(linear.shift)};
}

PackedOperand ContractionScheduler::pack_lane_sums(const Item& item) {
  PackedOperand packed;
  const auto linear = item.linear();
  const std::string& t = item.tag;
  packed.param = "sums" + t;
  std::vector<Axis> batch;
  for (const auto& a : outer_)
    if (item.lanes.source->axes.count(a.name)) batch.push_back(a);
  const Expr extent = count(lanes_);
  const Expr panels = ceildiv(extent, item.width);
  const Expr panel = mod(sym("par"), panels);
  const Expr valid = min(item.width, extent - panel * item.width);
  const Expr kb = sym("kb" + t);
  for (const auto& a : batch) packed.shape.push_back(a.extent);
  packed.shape.insert(packed.shape.end(), {item.depth_blocks, panels, Expr(item.width)});
  const Substitution outer = unflatten(batch, floordiv(sym("par"), panels));
  auto place = [&](Expr lane) {
    std::vector<Expr> to;
    for (const auto& a : batch) to.push_back(outer.at(a.name));
    to.insert(to.end(), {kb, panel, lane});
    return to;
  };
  Substitution map = outer;
  join(map, unflatten(lanes_, panel * item.width + sym("pos")));
  join(map, depth_map(item, kb * item.depth_block + sym("k")));
  tile_ir::Block element;
  const std::string code = operand_value(item.lanes, map, ".q", linear->code, element);
  const auto [scale, shift] = linear_at(*linear, map, ".q", element);
  Statements put(element, ".n");
  std::string value = put.let("wide", DType::f64, Fn::cast, {code});
  if (!scale.empty()) value = put.let("scaled", DType::f64, Fn::mul, {value, put.let("scale", DType::f64, Fn::cast, {scale})});
  if (!shift.empty()) value = put.let("whole", DType::f64, Fn::add, {value, put.let("shift", DType::f64, Fn::cast, {shift})});
  tile_ir::Block sum{make(
      tile_ir::Reduce{{"sum.n"}, {DType::f64}, Combiner::sum, {value}, {axis("k", 0, depth_of_block(item), LoopKind::lanes)}, std::move(element)})};
  sum.push_back(make(Let{"rounded.n", DType::f32, Fn::cast, {"sum.n"}, {}, 0}));
  sum.push_back(make(loop_ir::Store{packed.param, place(sym("pos")), "rounded.n", {}, Combiner::set}));
  tile_ir::Block inside{loop("pos", 0, valid, LoopKind::serial, std::move(sum)),
                        loop("pad", valid, item.width, LoopKind::serial, store_zero(packed.param, place(sym("pad")), "none.n"))};
  inside = {loop("kb" + t, 0, item.depth_blocks, LoopKind::serial, std::move(inside))};
  packed.kernel.name = fmt::format("pack_{}_{}", packed.param, kernel_.name);
  std::set<std::string> reads;
  for (const auto& stmt : item.lanes.slice)
    if (const auto* load = std::get_if<Load>(&stmt->node)) reads.insert(load->buffer);
  finish_pack(packed, reads, std::move(inside), batch, lanes_, item.width);
  return packed;
}

std::map<std::string, loop_ir::Load> ContractionScheduler::factors_at(const Item& item, const std::vector<const loop_ir::Load*>& factors,
                                                                      int64_t group, Expr step, Expr lane) const {
  std::map<std::string, loop_ir::Load> out;
  for (size_t i = 0; i < factors.size(); ++i) {
    std::vector<Expr> at = outer_index(item.lanes);
    const Expr place = first_lane_ + panel(item) * nr_;
    at.insert(at.end(), {floordiv(place, item.width), floordiv(step, group), mod(place, item.width) + lane});
    out[factors[i]->name] = Load{factors[i]->name, factors[i]->dtype, fmt::format("factor{}_{}", i, item.tag), std::move(at), {}, {}};
  }
  return out;
}

}  // namespace deplo::loop_to_tile
