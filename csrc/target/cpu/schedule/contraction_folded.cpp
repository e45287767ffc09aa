#include <algorithm>

#include "base/error.h"
#include "target/cpu/schedule/contraction_scheduler.h"
#include "target/cpu/schedule/statements.h"

// Lanes in words. By many rows they are multiplied as numbers, which are made a panel at a time. Multiplied by few rows, the sum of x (scale code +
// shift) over a group of k is scale sum(x code) + shift sum(x): words are taken apart in registers, into numbers that differ from the codes by what
// is the same for all of them, once for all rows.

namespace deplo::loop_to_tile {
namespace {

using loop_ir::Let;
using loop_ir::Load;

constexpr int64_t kTurn = 3;             // of words of 4-bit codes, see contraction_words.cpp
constexpr int64_t kSpareRegisters = 10;  // for numbers and factors in flight

/// Numbers that one multiply-add takes: two steps of k as bf16, or one as float32.
struct Numbers {
  int64_t step;      ///< the first, of those in the word
  std::string even;  ///< or the only one
  std::string odd;
  bool negated = false;  ///< taken off
};

/// Two bf16 numbers in a word.
Numbers halves(Statements& put, int64_t step, const std::string& word, const std::string& which, bool negated = false) {
  auto [even, odd] = put.halves(word, which);
  return {step, std::move(even), std::move(odd), negated};
}

std::string shifted(Statements& put, const std::string& word, int64_t right, const std::string& which) {
  if (right == 0) return word;
  return put.word("at" + which, right > 0 ? Fn::shr : Fn::shl, {word, put.number("by" + which, std::abs(right))});
}

/// Rotated to the right by less than 32.
std::string turned(Statements& put, const std::string& word, int64_t right, const std::string& which) {
  const std::string low =
      put.word("rest" + which, Fn::bit_and, {shifted(put, word, right, which + "d"), put.number("keep" + which, (int64_t{1} << (32 - right)) - 1)});
  return put.word("turned" + which, Fn::bit_or, {low, shifted(put, word, right - 32, which + "u")});
}

std::string picked(Statements& put, const std::string& word, int64_t bits, int64_t exponent, const std::string& which) {
  auto number = [&](const char* name, int64_t value) { return put.number(name + which, static_cast<int32_t>(value)); };
  return put.word("number" + which, Fn::bit_or,
                  {put.word("bits" + which, Fn::bit_and, {word, number("fraction", bits)}), number("exponent", exponent)});
}

/// Of turned words: 16 and the code, whose bits are the upper ones of a fraction; of float32 `offset` is added at once, whose sums keep more digits
/// than 16 would leave.
std::vector<Numbers> turned_codes(Statements& put, const std::string& word, bool pairs, int64_t offset) {
  std::vector<Numbers> out;
  for (int64_t n = 0; n < (pairs ? 4 : 8); ++n) {
    const std::string which = std::to_string(n);
    if (pairs) {
      const std::string here = n == 3 ? turned(put, word, 12, which) : shifted(put, word, 4 * n, which);
      out.push_back(halves(put, 2 * n, picked(put, here, 0x00780078, 0x41804180, which), which));
      continue;
    }
    // Code n lies at bit 4 n + kTurn; the fraction of a float32 number starts with bit 22.
    const int64_t right = 4 * n + kTurn - 19;
    const std::string here = n == 7 ? turned(put, word, right, which) : shifted(put, word, right, which);
    const std::string number = put.let("float" + which, DType::f32, Fn::bitcast, {picked(put, here, 0x00780000, 0x41800000, which)});
    const std::string code = put.let("whole" + which, DType::f32, Fn::add, {number, put.real("offset" + which, static_cast<double>(offset))});
    out.push_back({n < 4 ? 2 * n : 2 * n - 7, code, {}});
  }
  return out;
}

/// Code n where it lies, at bit 4 n of a word or, of its upper half, of the word shifted by 16. With `scaled`, 16^(n % 4) times the code. Otherwise
/// the code and `offset`, exactly: the power of two whose last bits the code takes is taken off with it.
std::vector<Numbers> four_bits(Statements& put, const std::string& word, bool scaled, int64_t offset) {
  constexpr int64_t kFraction = 23;  // bits of float32
  constexpr int64_t kBias = 127;
  std::vector<Numbers> out;
  const std::string upper = shifted(put, word, 16, "u");
  for (int64_t n = 0; n < 8; ++n) {
    const std::string which = std::to_string(n);
    const std::string& half = n < 4 ? word : upper;
    const int64_t places = 4 * (n % 4);
    const int64_t mask = int64_t{0xf} << places;
    if (scaled) {
      const std::string bits = put.word("bits" + which, Fn::bit_and, {half, put.number("mask" + which, mask)});
      out.push_back({n, put.let("float" + which, DType::f32, Fn::cast, {bits}), {}});
      continue;
    }
    const int64_t exponent = kFraction - places;
    const std::string number = put.let("float" + which, DType::f32, Fn::bitcast, {picked(put, half, mask, (kBias + exponent) << kFraction, which)});
    const std::string less = put.real("offset" + which, static_cast<double>(offset - (int64_t{1} << exponent)));
    out.push_back({n, put.let("whole" + which, DType::f32, Fn::add, {number, less}), {}});
  }
  return out;
}

/// Bytes, exactly; of float32 `offset` is added at once.
std::vector<Numbers> bytes(Statements& put, const std::string& word, bool pairs, int64_t offset) {
  std::vector<std::string> numbers;
  for (int64_t byte = 0; byte < 4; ++byte) {
    const std::string which = std::to_string(byte);
    const std::string top = shifted(put, word, 8 * byte - 24, fmt::format("{}t", which));
    const std::string code = put.word("code" + which, Fn::shr, {top, put.number("down" + which, 24)});
    std::string number = put.let("float" + which, DType::f32, Fn::cast, {code});
    if (!pairs && offset != 0)
      number = put.let(fmt::format("whole{}", which), DType::f32, Fn::add,
                       {number, put.real(fmt::format("offset{}", which), static_cast<double>(offset))});
    numbers.push_back(std::move(number));
  }
  if (!pairs) return {{0, numbers[0], {}}, {2, numbers[1], {}}, {1, numbers[2], {}}, {3, numbers[3], {}}};
  std::vector<Numbers> out;
  for (int64_t n : {0, 1}) {
    // Whole numbers up to 256 are their upper halves.
    const std::string which = "p" + std::to_string(n);
    auto bits = [&](const char* name, const std::string& value) { return put.word(name + which, Fn::bitcast, {value}); };
    const std::string even = put.word("down" + which, Fn::shr, {bits("evens", numbers[static_cast<size_t>(n)]), put.number("half" + which, 16)});
    const std::string low = put.word("lower" + which, Fn::bit_and, {even, put.number("mask" + which, 0xffff)});
    const std::string high =
        put.word("uppers" + which, Fn::bit_and, {bits("odds", numbers[static_cast<size_t>(n) + 2]), put.number("top" + which, -0x10000)});
    out.push_back(halves(put, 2 * n, put.word("pair" + which, Fn::bit_or, {low, high}), which));
  }
  return out;
}

/// Zero points, if there are any, are added to the numbers.
void add_offsets(std::vector<Numbers>& numbers, Statements& put, const std::string& offset) {
  if (offset.empty()) return;
  for (Numbers& number : numbers) number.even = put.let(fmt::format("from_zero{}", number.step), DType::f32, Fn::add, {number.even, offset});
}

/// Bytes as a difference: 128 and the lower bits, less 128 or, where the uppermost bit is set, 256.
std::vector<Numbers> differences(Statements& put, const std::string& word) {
  std::vector<Numbers> out;
  for (int64_t n : {0, 1}) {
    const std::string which = std::to_string(n);
    const std::string here = shifted(put, word, 8 * n, which);
    out.push_back(halves(put, 2 * n, picked(put, here, 0x007f007f, 0x43004300, which + "l"), which + "l"));
    out.push_back(halves(put, 2 * n, picked(put, here, 0x00800080, 0x43004300, which + "s"), which + "s", true));
  }
  return out;
}

}  // namespace

bool ContractionScheduler::sums_rows(const Item& item) {
  return item.folded && ((!item.adds_offsets() && code_offset(item) != 0) || !item.linear(item.adds_offsets())->shift.empty());
}

int64_t ContractionScheduler::shares(const Item& item, const RowBlocks& rows) const {
  const int64_t vectors = rows.mr * nr_ / (ctx_.target.vector_bytes / 4);
  int64_t sums = 1;
  while (2 * sums * vectors <= ctx_.target.vector_registers / 2 && 2 * sums * item.group() <= item.word()) sums *= 2;
  return sums;
}

tile_ir::Block ContractionScheduler::prepare_rows(const Item& item) const {
  const std::string& t = item.tag;
  const DType dtype = item.pairs ? DType::bf16 : item.dtype();
  const Expr row = sym("rs" + t);
  tile_ir::Block inside;
  if (sums_rows(item)) {
    const Expr chain = sym("ks" + t);
    tile_ir::Block element;
    Statements put(element, ".ps" + t);
    std::string value = put.load("x", item.bytes ? DType::u8 : dtype, "pa" + t, {row, chain * item.chain + sym("q" + t)});
    if (item.bytes && item.bits < 8) value = put.let("signed", DType::i8, Fn::cast, {value});
    if (item.pairs || item.bytes) value = put.let("wide", DType::f32, Fn::cast, {value});
    tile_ir::Block sum{make(
        tile_ir::Reduce{{"rowsum" + t}, {DType::f32}, Combiner::sum, {value}, {axis("q" + t, 0, item.chain, LoopKind::lanes)}, std::move(element)})};
    sum.push_back(make(loop_ir::Store{"ps" + t, {row, chain}, "rowsum" + t, {}, Combiner::set}));
    inside.push_back(loop("ks" + t, 0, floordiv(depth_of_block(item), item.chain), LoopKind::serial, std::move(sum)));
  }
  if (item.scales_steps()) {
    // Of a step whose code lies p places up, 2^-p times the number: its exponent is made of the bits of the step.
    tile_ir::Block element;
    Statements put(element, ".pn" + t);
    const Expr k = sym("kn" + t);
    const std::vector<Expr> at{row, k};
    element.push_back(make(Let{"step.pn" + t, DType::i64, Fn::index, {}, {}, mod(k, 4)}));
    const std::string places = put.word("places", Fn::shl, {put.word("short", Fn::cast, {"step.pn" + t}), put.number("up", 25)});
    const std::string power = put.let("power", DType::f32, Fn::bitcast, {put.word("exponent", Fn::sub, {put.number("one", 0x3f800000), places})});
    put.store("pn" + t, at, put.let("scaled", DType::f32, Fn::mul, {put.load("x", DType::f32, "pa" + t, at), power}));
    inside.push_back(loop("kn" + t, 0, depth_of_block(item), LoopKind::lanes, std::move(element)));
  }
  if (item.differs(mr_)) {
    tile_ir::Block element;
    Statements put(element, ".pn" + t);
    const std::vector<Expr> at{row, sym("kn" + t)};
    put.store("pn" + t, at, put.let("less", dtype, Fn::neg, {put.load("x", dtype, "pa" + t, at)}));
    inside.push_back(loop("kn" + t, 0, depth_of_block(item), LoopKind::lanes, std::move(element)));
  }
  if (inside.empty()) return {};
  return {loop("rs" + t, 0, padded_rows(), LoopKind::serial, std::move(inside))};
}

Ref<tile_ir::Stmt> ContractionScheduler::multiply_words(const Item& item, const RowBlocks& rows, const std::string& acc) const {
  const std::string& t = item.tag;
  const Expr row = row_of(item, rows, sym("r" + t));
  const Expr lane = sym("x" + t);
  const Expr k = sym("k" + t);
  tile_ir::Block step{make(Load{"nw" + t, DType::i32, item.lanes.param, packed_lanes(item, k, lane, 0), {}, {}})};
  Statements put(step, ".f" + t);
  const std::string word = "nw" + t;
  const bool differs = item.differs(mr_);
  std::vector<Numbers> numbers = item.turns_words() ? turned_codes(put, word, item.pairs, code_offset(item))
                                 : item.bits == 4   ? four_bits(put, word, item.scales_steps(), code_offset(item))
                                 : differs          ? differences(put, word)
                                                    : bytes(put, word, item.pairs, code_offset(item));
  if (item.adds_offsets() && !item.linear(/*inner=*/true)->offset.empty())
    add_offsets(numbers, put, factors_of(item, sym("kb" + t) * item.depth_block + k * item.word(), lane, ".f" + t, step).offset);
  tile_ir::Block factors;
  Statements of_row(factors, ".a" + t);
  const int64_t sums = shares(item, rows);
  for (size_t n = 0; n < numbers.size(); ++n) {
    const std::string which = std::to_string(n);
    auto factor = [&](const char* name, int64_t half) {
      return of_row.load(name + which, item.pairs ? DType::bf16 : item.dtype(), (numbers[n].negated || item.scales_steps() ? "pn" : "pa") + t,
                         {row, k * item.word() + numbers[n].step + half});
    };
    const std::vector<Expr> at{sym("r" + t), static_cast<int64_t>(n) % sums, lane};
    const std::string even = factor("x", 0);
    const std::string before = put.load("before" + which, DType::f32, acc, at);
    if (item.pairs)
      put.store(acc, at, put.let("sum" + which, DType::f32, Fn::dot2, {even, factor("y", 1), numbers[n].even, numbers[n].odd, before}));
    else
      put.store(acc, at, put.let("sum" + which, DType::f32, Fn::fma, {even, numbers[n].even, before}));
  }
  return over_registers(item, rows, "", std::move(factors), std::move(step));
}

Ref<tile_ir::Stmt> ContractionScheduler::multiply_codes(const Item& item, const RowBlocks& rows, const std::string& acc) const {
  const std::string& t = item.tag;
  const Expr row = row_of(item, rows, sym("r" + t));
  const Expr lane = sym("x" + t);
  const Expr k = sym("k" + t);
  const bool few = item.bits < 8;
  tile_ir::Block step{make(Load{"nw" + t, DType::i32, item.lanes.param, packed_lanes(item, k, lane, 0), {}, {}})};
  Statements put(step, ".f" + t);
  tile_ir::Block factors;
  Statements of_row(factors, ".a" + t);
  const std::string packed = "nw" + t;
  const std::string rows_buffer = "pa" + t;
  const int64_t sums = shares(item, rows);
  for (int64_t n = 0; n < item.word() / 4; ++n) {
    const std::string which = std::to_string(n);
    std::string bytes = packed;
    if (few) {
      const std::string half = shifted(put, packed, 4 * n, which);
      bytes = put.word(fmt::format("codes{}", which), Fn::bit_and, {half, put.number(fmt::format("mask{}", which), 0x0f0f0f0f)});
    }
    std::string word;
    for (int64_t byte = 0; byte < 4; ++byte) {
      const std::string at = fmt::format("{}_{}", n, byte);
      const std::string loaded = of_row.load(fmt::format("byte{}", at), DType::u8, rows_buffer, {row, k * item.word() + 4 * n + byte});
      std::string value = of_row.word(fmt::format("wide{}", at), Fn::cast, {loaded});
      if (byte > 0) value = of_row.word(fmt::format("up{}", at), Fn::shl, {value, of_row.number(fmt::format("places{}", at), 8 * byte)});
      word = word.empty() ? value : of_row.word(fmt::format("word{}", at), Fn::bit_or, {word, value});
    }
    const std::vector<Expr> at{sym("r" + t), n % sums, lane};
    const std::string before = put.load(fmt::format("before{}", which), DType::i32, acc, at);
    put.store(acc, at, put.word(fmt::format("sum{}", which), Fn::dot4, {few ? bytes : word, few ? word : bytes, before}));
  }
  return over_registers(item, rows, "", std::move(factors), std::move(step));
}

Ref<tile_ir::Stmt> ContractionScheduler::scale_rows(const Item& item, const RowBlocks& rows, const std::string& total) const {
  const std::string& t = item.tag;
  const auto linear = item.row_codes();
  const Expr row = sym("r" + t + "s");
  const Expr lane = sym("x" + t + "s");
  Substitution map = outer_map_;
  join(map, unflatten(rows_, min(first_row_ + row_of(item, rows, row), rows_extent_ - 1)));
  tile_ir::Block of_row;
  auto [scale, shift] = linear_at(*linear, map, ".s" + t, of_row);
  Statements row_put(of_row, ".v" + t);
  if (item.turns_rows()) {
    // Packed codes are 128 more, or less beside 4 bits.
    const std::string offset = row_put.real("turned", item.bits < 8 ? 128 : -128);
    const std::string more = scale.empty() ? offset : row_put.let("more", DType::f32, Fn::mul, {offset, scale});
    shift = shift.empty() ? more : row_put.let("shift", DType::f32, Fn::add, {shift, more});
  }
  tile_ir::Block step;
  Statements put(step, ".v" + t);
  std::string value = put.load("sum", DType::f32, total, {row, lane});
  if (!scale.empty()) value = put.let("scaled", DType::f32, Fn::mul, {value, scale});
  if (item.needs_lane_sums()) {
    std::vector<Expr> at = outer_index(item.lanes);
    const Expr place = first_lane_ + panel(item) * nr_;
    at.insert(at.end(), {sym("kb" + t), floordiv(place, item.width), mod(place, item.width) + lane});
    value = put.let("whole", DType::f32, Fn::fma, {put.load("lanes", DType::f32, "sums" + t, std::move(at)), shift, value});
  }
  put.store(total, {row, lane}, value);
  return over_registers(item, rows, "s", std::move(of_row), std::move(step));
}

ContractionScheduler::Factors ContractionScheduler::factors_of(const Item& item, Expr step, Expr lane, const std::string& suffix,
                                                               tile_ir::Block& into) const {
  const auto linear = item.linear(item.adds_offsets());
  const auto instead = linear->group > 0 ? factors_at(item, linear->factors, linear->group, step, lane) : std::map<std::string, Load>{};
  auto name = [&](const std::string& value) { return value.empty() ? value : value + suffix; };
  for (const auto& stmt : linear->statements) {
    if (const auto* load = std::get_if<Load>(&stmt->node)) {
      Load copy = instead.at(load->name);
      copy.name = name(load->name);
      into.push_back(make(std::move(copy)));
    } else {
      Let copy = std::get<Let>(stmt->node);
      copy.name = name(copy.name);
      for (std::string& operand : copy.operands) operand = name(operand);
      into.push_back(make(std::move(copy)));
    }
  }
  return {name(linear->scale), name(linear->shift), name(linear->offset)};
}

Ref<tile_ir::Stmt> ContractionScheduler::widen_words(const Item& item) const {
  const std::string& t = item.tag;
  const std::string panel = "pw" + t;
  const int64_t word = item.word();
  const Expr k = sym("kw" + t);
  const Expr lane = sym("xw" + t);
  // The factors change where one of these ends: their loads stay outside of the loop over its words.
  const int64_t share = share_of_factors(item);
  const Expr share_at = sym("kf" + t);
  tile_ir::Block body{make(Load{"nw" + t, DType::i32, item.lanes.param, packed_lanes(item, k, lane, 0), {}, {}})};
  Statements put(body, ".w" + t);
  const auto [scale, shift, offset] = factors_of(item, sym("kb" + t) * item.depth_block + share_at * share, lane, ".w" + t, body);
  std::vector<std::string> values(static_cast<size_t>(word));
  std::vector<Numbers> numbers = item.turns_words() ? turned_codes(put, "nw" + t, /*pairs=*/false, code_offset(item))
                                                    : four_bits(put, "nw" + t, /*scaled=*/false, code_offset(item));
  add_offsets(numbers, put, offset);
  for (const Numbers& number : numbers) {
    std::string value = number.even;
    const std::string name = fmt::format("value{}", number.step);
    if (!scale.empty() && !shift.empty())
      value = put.let(name, DType::f32, Fn::fma, {scale, value, shift});
    else if (!scale.empty())
      value = put.let(name, DType::f32, Fn::mul, {scale, value});
    else if (!shift.empty())
      value = put.let(name, DType::f32, Fn::add, {value, shift});
    values[static_cast<size_t>(number.step)] = std::move(value);
  }
  const int64_t lines = word / item.group();
  for (int64_t line = 0; line < lines; ++line) {
    const auto step = static_cast<size_t>(line * item.group());
    const std::string value = item.pairs ? put.pair(values[step], values[step + 1], std::to_string(line)) : values[step];
    put.store(panel, {k * lines + line - chunk_start(item), lane}, value);
  }
  tile_ir::Block line = prefetch_panel(item, k);
  line.push_back(loop("xw" + t, 0, nr_, LoopKind::lanes, std::move(body)));
  const Expr first = chunk_start(item) * item.group();
  const Expr end = in_chunks(item) ? min(first + item.chain, depth_of_block(item)) : depth_of_block(item);
  auto inner = loop("kw" + t, share_at * (share / word), (share_at + 1) * (share / word), LoopKind::serial, std::move(line));
  return loop("kf" + t, floordiv(first, share), floordiv(end, share), LoopKind::serial, {inner});
}

tile_ir::Block ContractionScheduler::add_chain(const Item& item, const RowBlocks& rows, const std::string& acc, const std::string& total) const {
  const std::string& t = item.tag;
  const Expr row = sym("r" + t + "a");
  const Expr lane = sym("x" + t + "a");
  const Expr chain = sym("kg" + t);
  tile_ir::Block of_row;
  Statements row_put(of_row, ".g" + t);
  const std::string of_rows = sums_rows(item) ? row_put.load("rows", DType::f32, "ps" + t, {row_of(item, rows, row), chain}) : "";
  tile_ir::Block step;
  Statements put(step, ".g" + t);
  const Factors factors = factors_of(item, sym("kb" + t) * item.depth_block + chain * item.chain, lane, ".g" + t, step);
  const std::string& scale = factors.scale;
  const DType dtype = item.bytes ? DType::i32 : DType::f32;
  std::vector<std::string> sums;
  for (int64_t n = 0; n < shares(item, rows); ++n) sums.push_back(put.load("sum" + std::to_string(n), dtype, acc, {row, n, lane}));
  for (size_t step = 1; step < sums.size(); step *= 2)
    for (size_t n = 0; n + step < sums.size(); n += 2 * step)
      sums[n] = put.let(fmt::format("both{}_{}", n, step), dtype, Fn::add, {sums[n], sums[n + step]});
  std::string sum = item.bytes ? put.let("wide", DType::f32, Fn::cast, {sums[0]}) : sums[0];
  std::string shift = factors.shift;
  if (const int64_t more = item.adds_offsets() ? 0 : code_offset(item); more != 0) {
    if (shift.empty()) {
      const std::string offset = row_put.real("offset", static_cast<double>(more));
      sum = put.let("codes", DType::f32, Fn::add, {sum, row_put.let("turned", DType::f32, Fn::mul, {of_rows, offset})});
    } else {
      const std::string offset = put.real("offset", static_cast<double>(more));
      shift = scale.empty() ? put.let("shift", DType::f32, Fn::add, {shift, offset}) : put.let("shift", DType::f32, Fn::fma, {scale, offset, shift});
    }
  }
  std::string all = put.load("total", DType::f32, total, {row, lane});
  all = scale.empty() ? put.let("added", DType::f32, Fn::add, {all, sum}) : put.let("added", DType::f32, Fn::fma, {scale, sum, all});
  if (!shift.empty()) all = put.let("whole", DType::f32, Fn::fma, {of_rows, shift, all});
  put.store(total, {row, lane}, all);
  return {over_registers(item, rows, "a", std::move(of_row), std::move(step))};
}

tile_ir::Block ContractionScheduler::folded_block(const Item& item, bool several, const RowBlocks& rows) const {
  const std::string& t = item.tag;
  const std::string acc = "acc" + t + rows.suffix;
  const std::string total = "total" + t + rows.suffix;
  auto clear = [&](const std::string& buffer, const std::string& suffix, int64_t sums) {
    const std::string none = fmt::format("none{}{}", suffix, t);
    const DType dtype = item.bytes && buffer == acc ? DType::i32 : DType::f32;
    tile_ir::Block zeros{make(Let{none, dtype, Fn::constant, {}, Scalar::of_float(dtype, 0), 0})};
    Statements put(zeros, "");
    const Expr row = sym("r" + t + suffix);
    const Expr lane = sym("x" + t + suffix);
    for (int64_t n = 0; n < sums; ++n) put.store(buffer, buffer == acc ? std::vector<Expr>{row, n, lane} : std::vector<Expr>{row, lane}, none);
    return over_registers(item, rows, suffix, {}, std::move(zeros));
  };
  const int64_t words = item.chain / item.word();
  tile_ir::Block step = prefetch_panel(item, sym("k" + t));
  step.push_back(item.bytes ? multiply_codes(item, rows, acc) : multiply_words(item, rows, acc));
  const Expr chain = sym("kg" + t);
  tile_ir::Block chains{clear(acc, "i", shares(item, rows)),
                        loop("k" + t, chain * words, chain * words + words, LoopKind::serial, std::move(step), std::min(item.unroll, words))};
  for (auto& stmt : add_chain(item, rows, acc, total)) chains.push_back(stmt);
  tile_ir::Block out{make(tile_ir::Alloc{acc, item.bytes ? DType::i32 : DType::f32, {rows.mr, shares(item, rows), nr_}, Space::reg})};
  // The totals stay in registers where there is room for them beside the sums.
  const int64_t vectors = rows.mr * nr_ / (ctx_.target.vector_bytes / 4);
  const bool room = (1 + shares(item, rows)) * vectors + kSpareRegisters <= ctx_.target.vector_registers;
  out.push_back(make(tile_ir::Alloc{total, item.dtype(), {rows.mr, nr_}, room ? Space::reg : Space::stack}));
  out.push_back(clear(total, "z", 1));
  const Expr count = floordiv(depth_of_block(item), item.chain);
  std::string whole = total;
  if (item.depth_block / item.chain <= 2 * kTotals) {
    out.push_back(loop("kg" + t, 0, count, LoopKind::serial, std::move(chains)));
  } else {
    // Short chains make many: some of them are added up by themselves, so that no chain of totals is long either.
    whole = "whole" + t + rows.suffix;
    const Expr first = sym("kh" + t) * kTotals;
    out.push_back(make(tile_ir::Alloc{whole, item.dtype(), {rows.mr, nr_}, Space::stack}));
    out.push_back(clear(whole, "w", 1));
    tile_ir::Block some{loop("kg" + t, first, min(first + kTotals, count), LoopKind::serial, std::move(chains))};
    tile_ir::Block add;
    Statements put(add, ".h" + t);
    const std::vector<Expr> at{sym("r" + t + "h"), sym("x" + t + "h")};
    put.store(whole, at,
              put.let("wholes", DType::f32, Fn::add, {put.load("earlier", DType::f32, whole, at), put.load("some", DType::f32, total, at)}));
    some.push_back(over_registers(item, rows, "h", {}, std::move(add)));
    some.push_back(clear(total, "y", 1));
    out.push_back(loop("kh" + t, 0, ceildiv(count, kTotals), LoopKind::serial, std::move(some)));
  }
  if (item.bytes) out.push_back(scale_rows(item, rows, whole));
  for (auto& stmt : add_to_tile(item, several, rows, whole)) out.push_back(stmt);
  return out;
}

}  // namespace deplo::loop_to_tile
