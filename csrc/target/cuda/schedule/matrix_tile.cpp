#include "target/cuda/schedule/matrix_tile.h"

#include <algorithm>
#include <cstdlib>

#include "analysis/tf32.h"
#include "expr/node.h"
#include "loop_ir/places.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kLine = 8;         // chunks in which all banks lie
constexpr int64_t kWidestOrder = 8;  // columns side by side in a thread's sums

/// The last of the axes, as many as memory runs through in one step, until chunks along them, taken as one index, do not leave them; none where
/// chunks always may.
std::vector<std::string> find_run(const std::vector<loop_ir::Axis>& axes, Expr offset, int64_t chunk) {
  std::vector<std::string> run;
  int64_t length = 1;
  for (size_t a = axes.size(); a-- > 0;) {
    const auto step = linear_coefficient(offset, axes[a].name);
    if (!step || !step->is(length)) return {};
    run.push_back(axes[a].name);
    if (a == 0) return run;
    if (!axes[a].extent.is_constant()) return {};
    length *= axes[a].extent.value();
    if (length % chunk == 0) return run;
  }
  return run;
}

Expr offset_of(const loop_ir::Load& load, const loop_ir::Param& param) {
  Expr offset = 0;
  for (size_t d = 0; d < load.index.size(); ++d) offset = offset + load.index[d] * param.strides[d];
  return offset;
}

/// Whether chunks along `run` lie at multiples of their size, as far as constants say.
bool is_aligned(Expr offset, const std::vector<std::string>& run, int64_t chunk) {
  Substitution zero;
  for (const std::string& axis : run) zero[axis] = 0;
  const auto terms = terms_of(substitute(offset, zero));
  return std::all_of(terms.begin(), terms.end(), [&](const Term& t) { return t.coefficient % chunk == 0 || t.atoms.size() > 1; });
}

/// The exclusive or of three bits: index expressions have sums and remainders.
Expr differing_bits(Expr a, Expr b) {
  Expr out = 0;
  for (int64_t bit = 1; bit < kLine; bit *= 2) out = out + mod(floordiv(a, bit) + floordiv(b, bit), 2) * bit;
  return out;
}

/// Elements from one row or column to the next, where threads side by side should load them.
constexpr int64_t kNear = 8;

}  // namespace

void MatrixTile::set_shape(int64_t width, int64_t depth) {
  filled = along_k ? depth * chunk() / depth_of_chunk() : width;
  lines = along_k ? width : depth;
  line = filled;
  if (in_boxes) {
    line = kLine * chunk();
    return;
  }
  const int64_t chunks = filled / chunk();
  if (chunks > kLine / 2) line = (chunks + kLine - 1) / kLine * kLine * chunk();
  if (chunks == kLine / 2 - 1) line = kLine / 2 * chunk();
  line += apart;
}

Expr MatrixTile::rotated(Expr line_at, Expr chunk) const {
  const int64_t turn = std::min(line / this->chunk(), kLine);
  if (turn == 1 || alike == 0) return chunk;
  // Eight lines of a matrix: lines of columns are taken in the order of the sums.
  Expr by = floordiv(line_at, kLine / turn * alike);
  if (along_k && !of_rows && lanes > 2 && alike == 1) {
    by = floordiv(line_at, lanes);
    // So are eight lines side by side, where threads fill them together.
    if (gathered) by = by + mod(floordiv(line_at, 2), lanes / 2) * (kWidestOrder / lanes);
    if (turn == kLine) by = by * 2 + mod(line_at, 2);
  }
  if (line / this->chunk() <= kLine) return mod(chunk + by, turn);
  return floordiv(chunk, kLine) * kLine + mod(chunk + by, kLine);
}

Expr MatrixTile::place_of(Expr begin, Expr line_at, Expr chunk) const {
  if (!in_boxes) return begin + line_at * line + rotated(line_at, chunk) * this->chunk();
  return begin + (floordiv(chunk, kLine) * lines + line_at) * line + differing_bits(chunk, line_at) * this->chunk();
}

Expr MatrixTile::place_of_number(Expr begin, Expr first, Expr past, Expr chunk, Expr k) const {
  if (along_k) return place_of(begin, first, chunk) + past * line + k;
  return begin + (chunk * this->chunk() + k) * line + first + past;
}

Expr MatrixTile::column_of(Expr line_at) const {
  if (!in_boxes || of_rows || !along_k || lanes <= 2) return line_at;
  const int64_t width = lanes / 2 * kMatrixColumns;
  const Expr unit = mod(line_at, width);
  return floordiv(line_at, width) * width + floordiv(mod(unit, kMatrixColumns), 2) * lanes + floordiv(unit, kMatrixColumns) * 2 + mod(unit, 2);
}

Expr MatrixTile::line_of(Expr row, Expr first, Expr next) const {
  if (of_rows || lanes <= 2) return first + next * 8 + row;
  // Columns 8 t to 8 t + 7 of the unit, of a group of lanes / 2 times 8, are 2 t and 2 t + 1 of each of a group's four vectors.
  const int64_t width = lanes / 2 * kMatrixColumns;
  const Expr unit = floordiv(first, width) * width;
  const Expr t = floordiv(mod(first, width), kMatrixColumns) + next;
  return unit + floordiv(row, 2) * lanes + t * 2 + mod(row, 2);
}

Expr MatrixTile::row_of_matrix(Expr lane, Expr begin, Expr first, Expr depth) const {
  const Expr row = mod(lane, 8);
  const Expr matrix = floordiv(lane, 8);
  const Expr second = mod(matrix, 2);
  const Expr fourth = floordiv(matrix, 2);
  const Expr next = of_rows ? second : fourth;  // 8 rows or columns on
  const Expr deeper = of_rows ? fourth : second;
  if (!along_k) {
    const Expr at = depth + deeper * 8 + row;
    return place_of(begin, at, floordiv(first, chunk()) + next);
  }
  const Expr at = line_of(row, first, next);
  return place_of(begin, at, floordiv(depth, chunk()) + deeper);
}

std::optional<MatrixTile> find_matrix_tile(const loop_ir::Kernel& kernel, const loop_ir::Block& slice, const std::string& value,
                                           const std::vector<loop_ir::Axis>& k, const std::vector<loop_ir::Axis>& free, bool of_rows, bool gathers,
                                           DType sum, bool numbers, bool tf32) {
  if (const auto rounding = tf32 && sum == DType::f32 ? analysis::tf32_rounding(slice, value) : std::nullopt)
    return find_matrix_tile(kernel, statements_for(slice, {rounding->operand}), rounding->operand, k, free, of_rows, gathers, sum, true);
  MatrixTile tile;
  tile.of_rows = of_rows;
  const loop_ir::Let* widened = nullptr;
  for (const auto& stmt : slice)
    if (name_of(*stmt) == value) widened = std::get_if<loop_ir::Let>(&stmt->node);
  if (!numbers && (!widened || widened->fn != Fn::cast || widened->dtype != sum)) return std::nullopt;
  tile.value = numbers ? value : widened->operands[0];
  for (const auto& stmt : slice) {
    if (numbers || name_of(*stmt) != value) tile.slice.push_back(stmt);
    if (name_of(*stmt) != tile.value) continue;
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) tile.dtype = let->dtype;
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) tile.dtype = load->dtype;
  }
  const bool is_half = tile.dtype == DType::bf16 || tile.dtype == DType::f16;
  const bool is_byte = tile.dtype == DType::i8 || tile.dtype == DType::u8;
  if (numbers ? tile.dtype != DType::f32 : sum == DType::i32 ? !is_byte : !is_half) return std::nullopt;

  // Tiles lie as memory does, along k where there is a choice.
  const std::vector<GlobalAccess> accesses = global_accesses(kernel, tile.slice);
  const auto runs = [&](const loop_ir::Axis& axis) {
    return std::any_of(accesses.begin(), accesses.end(), [&](const GlobalAccess& access) {
      auto step = linear_coefficient(access.offset, axis.name);
      return step && step->is(1);
    });
  };
  tile.along_k = runs(k.back()) || !runs(free.back());
  const auto* load = tile.slice.size() == 1 ? std::get_if<loop_ir::Load>(&tile.slice[0]->node) : nullptr;
  const loop_ir::Param* param = load ? kernel.find_param(load->buffer) : nullptr;
  const auto is_guarded = [](const loop_ir::Load& l, const std::vector<std::string>& axes) {
    return std::any_of(l.guard.begin(), l.guard.end(), [&](const Cond& c) {
      const auto names = symbols_of(c.expr);
      return std::any_of(axes.begin(), axes.end(), [&](const std::string& axis) { return names.count(axis) > 0; });
    });
  };
  std::vector<std::string> run;
  if (param && param->kind == loop_ir::ParamKind::in) run = find_run(tile.along_k ? k : free, offset_of(*load, *param), tile.chunk());
  const bool copies = !run.empty() && !is_guarded(*load, run) && (load->guard.empty() || (load->fill.f == 0 && load->fill.i == 0));
  for (size_t d = 0; copies && d < load->index.size(); ++d) {
    auto step = linear_coefficient(load->index[d], run.front());
    if (!symbols_of(load->index[d]).count(run.front())) continue;
    if (tile.copied || !step || !step->is(1) || !param->strides[d].is(1)) {
      tile.copied = nullptr;
      break;
    }
    tile.copied = load;
    tile.dimension = d;
  }

  if (tile.copied && tile.along_k && k.size() > 1)
    tile.linear = std::all_of(k.begin(), k.end(), [&](const loop_ir::Axis& axis) {
      for (size_t d = 0; d < load->index.size(); ++d)
        if (d != tile.dimension && uses(load->index[d], axis.name)) return false;
      return load->guard.empty();
    });
  if (tile.linear) {
    int64_t length = 1;
    for (size_t a = k.size(); a-- > 0; length *= k[a].extent.value()) {
      const auto step = linear_coefficient(load->index[tile.dimension], k[a].name);
      tile.linear = tile.linear && step && step->is(length) && k[a].extent.is_constant();
      if (!tile.linear) break;
    }
  }

  // A window that moves along the rows or columns meets borders and begins anywhere: its elements are loaded one by one, in registers to lines of k.
  const bool moves = std::any_of(accesses.begin(), accesses.end(), [&](const GlobalAccess& access) {
    const auto step = linear_coefficient(access.offset, free.back().name);
    return !runs(k.back()) && step && step->is_constant() && step->value() != 0 && std::abs(step->value()) <= kNear;
  });
  const bool begins_anywhere = std::any_of(tile.slice.begin(), tile.slice.end(), [&](const auto& stmt) {
    const auto* l = std::get_if<loop_ir::Load>(&stmt->node);
    const loop_ir::Param* p = l ? kernel.find_param(l->buffer) : nullptr;
    if (!p) return false;
    const std::vector<std::string> own = find_run(free, offset_of(*l, *p), tile.chunk());
    return own.empty() || is_guarded(*l, own) || !is_aligned(offset_of(*l, *p), own, tile.chunk());
  });
  // Bytes have to lie along k in the tile.
  const bool turns = is_byte && !tile.along_k;
  if (turns && !gathers) return std::nullopt;
  if (turns || (gathers && moves && begins_anywhere)) {
    tile.copied = nullptr;
    tile.along_k = true;
    tile.gathered = true;
  }
  return tile;
}

int64_t turns_of(const MatrixTile& tile, int64_t threads) {
  const int64_t chunks = tile.lines * ((tile.filled + tile.chunk() - 1) / tile.chunk());
  return (chunks + threads - 1) / threads;
}

namespace {

/// `in_line` chunks of each line, from `first_chunk` on. `by_lines`: threads side by side copy one chunk of eight lines, which lie in different
/// banks.
tile_ir::Block copy_chunks(const MatrixTile& tile, const TileCopy& copy, int64_t first_chunk, int64_t in_line, bool by_lines, loop_ir::Names& names) {
  const int64_t size = tile.chunk();
  const int64_t chunks = tile.lines * in_line;
  const std::string q = names.fresh("q");
  const std::string v = names.fresh("v");
  const Expr number = copy.thread + sym(q) * copy.threads;
  Expr line = tile.gathered ? mod(number, tile.lines) : floordiv(number, in_line);
  Expr chunk = tile.gathered ? floordiv(number, tile.lines) : mod(number, in_line);
  if (by_lines) {
    line = floordiv(number, kLine * in_line) * kLine + mod(number, kLine);
    chunk = mod(floordiv(number, kLine), in_line) + first_chunk;
  }
  const Expr along = (tile.along_k ? copy.depth : copy.first) + chunk * (tile.along_k ? tile.depth_of_chunk() : size);
  const Expr across = (tile.along_k ? copy.first : copy.depth) + tile.column_of(line);
  const Expr most_along = count(tile.along_k ? *copy.k : *copy.free);
  const Expr most_across = count(tile.along_k ? *copy.free : *copy.k);
  // Whether tiles end where the operand does.
  const auto whole = [&](Expr extent, int64_t of) { return extent.is_constant() && extent.value() % of == 0; };
  const bool whole_along = whole(most_along, tile.along_k ? tile.filled * tile.depth_of_chunk() / size : tile.filled);
  const bool whole_across = whole(most_across, tile.lines);
  const Expr at = tile.place_of(copy.begin, line, chunk);
  const auto place = [&](Expr past) {
    Substitution map = *copy.batch;
    const auto add = [&](const std::vector<loop_ir::Axis>& axes, bool runs) {
      if (runs && tile.linear) {
        for (const loop_ir::Axis& axis : axes) map[axis.name] = 0;
        map[axes.back().name] = along + past;
        return;
      }
      // Chunks begin at multiples of their size: where these divide the last axis, only it moves within one.
      const loop_ir::Axis& last = axes.back();
      const bool inside = runs && last.extent.is_constant() && last.extent.value() % size == 0;
      map.merge(unflatten(axes, runs ? (inside ? along : along + past) : across));
      if (inside) map[last.name] = map.at(last.name) + past;
    };
    add(*copy.k, tile.along_k);
    add(*copy.free, !tile.along_k);
    return map;
  };
  tile_ir::Block body;
  std::vector<Cond> guard;
  if (!whole_across) guard.push_back(less(across, most_across));
  if (tile.copied) {
    const loop_ir::Load load = substituted(*tile.copied, place(0));
    tile_ir::CopyAsync node{tile.tile, {at}, load.buffer, load.index, static_cast<int64_t>(tile.dimension), size, size, guard};
    node.guard.insert(node.guard.end(), load.guard.begin(), load.guard.end());
    if (!whole_along) node.count = most_along - along;
    body.push_back(make(std::move(node)));
  } else {
    const std::string zero = names.fresh("none");
    const std::string stored = names.fresh("n");
    const bool own = copy.part == TileCopy::Part::all;
    const auto next = [&](const std::string& lane) { return own ? std::vector<Expr>{sym(lane)} : std::vector<Expr>{sym(q) - copy.from, sym(lane)}; };
    if (!whole_along) guard.push_back(less(along + sym(v), most_along));
    if (own) body.push_back(make(tile_ir::Alloc{tile.next, tile.dtype, {size}, Space::reg}));
    if (copy.part != TileCopy::Part::put) {
      const Substitution map = place(sym(v));
      tile_ir::Block inside;
      for (const auto& stmt : tile.slice) {
        if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) inside.push_back(make(substituted(*let, map)));
        if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) inside.push_back(make(substituted(*load, map)));
      }
      inside.push_back(make(tile_ir::Store{tile.next, next(v), tile.value, {}, Combiner::set}));
      if (guard.empty()) {
        body.push_back(make(tile_ir::For{axis(v, 0, size, LoopKind::lanes), std::move(inside)}));
      } else {
        tile_ir::Block vector{make(tile_ir::Let{zero, tile.dtype, Fn::constant, {}, loop_ir::zero_of(tile.dtype), 0}),
                              make(tile_ir::Store{tile.next, next(v), zero, {}, Combiner::set}), make(tile_ir::If{guard, std::move(inside)})};
        body.push_back(make(tile_ir::For{axis(v, 0, size, LoopKind::lanes), std::move(vector)}));
      }
    }
    if (copy.part != TileCopy::Part::load) {
      const std::string w = names.fresh("v");
      body.push_back(make(tile_ir::For{axis(w, 0, size, LoopKind::lanes),
                                       {make(tile_ir::Load{stored, tile.dtype, tile.next, next(w), {}, {}}),
                                        make(tile_ir::Store{tile.tile, {at + sym(w)}, stored, {}, Combiner::set})}}));
    }
  }
  if (chunks < copy.threads)
    return {make(tile_ir::If{{less(copy.thread, chunks)}, {make(tile_ir::For{axis(q, 0, 1, LoopKind::unroll), std::move(body)})}})};
  if (chunks % copy.threads != 0) body = {make(tile_ir::If{{less(number, chunks)}, std::move(body)})};
  return {make(tile_ir::For{axis(q, copy.from, copy.to ? *copy.to : (chunks + copy.threads - 1) / copy.threads, LoopKind::unroll), std::move(body)})};
}

}  // namespace

tile_ir::Block copy_tile(const MatrixTile& tile, const TileCopy& copy, loop_ir::Names& names) {
  const int64_t in_line = (tile.filled + tile.chunk() - 1) / tile.chunk();
  const int64_t rest = in_line % kLine;
  if (!tile.in_boxes || !tile.copied || rest == 0 || tile.lines % kLine != 0) return copy_chunks(tile, copy, 0, in_line, false, names);
  // Lines of a box that is not full are shorter than all banks.
  tile_ir::Block out;
  if (in_line > rest) out = copy_chunks(tile, copy, 0, in_line - rest, false, names);
  for (auto& s : copy_chunks(tile, copy, in_line - rest, rest, true, names)) out.push_back(s);
  return out;
}

}  // namespace deplo::loop_to_tile
