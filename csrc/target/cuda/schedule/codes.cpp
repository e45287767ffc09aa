#include "target/cuda/schedule/codes.h"

#include <algorithm>
#include <set>

#include "loop_ir/places.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kMatrices = 4;
constexpr int64_t kInChunk = 16;  ///< bytes, as many as one instruction multiplies of k

const loop_ir::Let* let_of(const loop_ir::Block& slice, const std::string& name) {
  for (const auto& stmt : slice)
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node); let && let->name == name) return let;
  return nullptr;
}

std::optional<DType> dtype_of(const loop_ir::Block& slice, const std::string& name) {
  for (const auto& stmt : slice) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node); let && let->name == name) return let->dtype;
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node); load && load->name == name) return load->dtype;
  }
  return std::nullopt;
}

void collect_names(const loop_ir::Stmt& stmt, std::set<std::string>& out) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) {
    out.insert(let->operands.begin(), let->operands.end());
    collect_symbols(let->index, out);
  }
  if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) {
    for (Expr e : load->index) collect_symbols(e, out);
    for (const Cond& c : load->guard) collect_symbols(c.expr, out);
  }
}

/// Whether e is the same for 16 k side by side.
bool is_steady(Expr e, const std::vector<loop_ir::Axis>& k) {
  const std::string step = "%step";
  const std::string within = "%within";
  Ranges ranges;
  ranges[step] = axis_range(floordiv(count(k), kInChunk));
  ranges[within] = axis_range(kInChunk);
  return !uses(simplify(substitute(e, unflatten(k, sym(step) * kInChunk + sym(within))), ranges), within);
}

/// Names of the slice's statements that follow from the codes.
std::set<std::string> made_of_codes(const MatrixTile& tile) {
  std::set<std::string> made{tile.copied->name};
  for (const auto& stmt : tile.slice) {
    std::set<std::string> used;
    collect_names(*stmt, used);
    if (std::any_of(used.begin(), used.end(), [&](const std::string& name) { return made.count(name) > 0; })) made.insert(name_of(*stmt));
  }
  return made;
}

Ref<tile_ir::Stmt> substituted_stmt(const loop_ir::Stmt& stmt, const Substitution& map) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return make(substituted(*let, map));
  return make(substituted(std::get<loop_ir::Load>(stmt.node), map));
}

}  // namespace

std::optional<MatrixTile> find_codes(const loop_ir::Kernel& kernel, const MatrixTile& computed, const std::vector<loop_ir::Axis>& k,
                                     const std::vector<loop_ir::Axis>& free) {
  if (computed.copied || !computed.along_k || computed.gathered || size_of(computed.dtype) != 2) return std::nullopt;
  const Expr depth = count(k);
  if (!depth.is_constant() || depth.value() % kLeastStepOfCodes != 0) return std::nullopt;
  MatrixTile tile = computed;
  tile.wide = computed.dtype;
  const loop_ir::Axis& last = k.back();
  for (const auto& stmt : computed.slice) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (!load) continue;
    const loop_ir::Param* param = kernel.find_param(load->buffer);
    if (!param || param->kind != loop_ir::ParamKind::in || !load->guard.empty()) return std::nullopt;
    Expr offset = 0;
    for (size_t d = 0; d < load->index.size(); ++d) offset = offset + load->index[d] * param->strides[d];
    const bool is_factor = std::all_of(load->index.begin(), load->index.end(), [&](Expr e) { return is_steady(e, k); });
    if (is_factor) continue;
    const auto step = linear_coefficient(offset, last.name);
    if (tile.copied || size_of(load->dtype) != 1 || load->dtype == DType::boolean || !step || !step->is(1)) return std::nullopt;
    // A copy knows axes alone, not what was loaded (of matrices that an index chooses).
    const auto is_computed = [&](const auto& s) { return uses(offset, loop_ir::name_of(*s)); };
    if (std::any_of(computed.slice.begin(), computed.slice.end(), is_computed)) return std::nullopt;
    if (load->index.back() == Expr(0) || !param->strides.back().is(1)) return std::nullopt;
    const auto in_last = linear_coefficient(load->index.back(), last.name);
    if (!in_last || !in_last->is(1)) return std::nullopt;
    tile.copied = load;
    tile.dimension = load->index.size() - 1;
    tile.dtype = load->dtype;
    // Axes from the last one on: dense, but for one of two halves that lie in the same bytes.
    int64_t length = 1;
    for (size_t a = k.size(); a-- > 0;) {
      const auto coefficient = linear_coefficient(offset, k[a].name);
      if (!coefficient || !k[a].extent.is_constant()) return std::nullopt;
      if (coefficient->is(0) && length == kInChunk && k[a].extent.is(2) && !tile.halves) {
        tile.halves = true;
        continue;
      }
      if (!coefficient->is(length)) return std::nullopt;
      length *= k[a].extent.value();
    }
    if (std::any_of(free.begin(), free.end(), [&](const loop_ir::Axis& axis) { return uses(load->index.back(), axis.name); })) return std::nullopt;
  }
  if (!tile.copied) return std::nullopt;
  // What is computed of indices changes with k, if at all, as factors do, but for the half.
  for (const auto& stmt : computed.slice)
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node); let && let->fn == Fn::index && !is_steady(let->index, k)) return std::nullopt;
  return tile;
}

int64_t count_factors(const MatrixTile& tile, const std::vector<loop_ir::Axis>& k, int64_t steps) {
  int64_t count = 0;
  for (const auto& stmt : tile.slice) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (!load || load == tile.copied) continue;
    std::vector<loop_ir::Load> different;
    for (int64_t step = 0; step < steps; step += kInChunk) {
      loop_ir::Load here = substituted(*load, unflatten(k, step));
      if (std::find(different.begin(), different.end(), here) == different.end()) different.push_back(std::move(here));
    }
    count += static_cast<int64_t>(different.size());
  }
  return count;
}

namespace {

/// A matrix of the four: rows or columns from `first` on, and k.
struct Part {
  Expr column;           ///< in the tile
  Substitution factors;  ///< for statements that codes do not reach
};

Part part_of(const MatrixTile& tile, const CodesAt& at, int64_t matrix) {
  const int64_t next = tile.of_rows ? matrix % 2 : matrix / 2;
  Part part;
  part.column = tile.line_of(floordiv(at.lane, 4), at.first, next);
  const Expr all = count(*at.free);
  part.factors = *at.batch;
  part.factors.merge(unflatten(*at.free, min(at.origin + part.column, all - 1)));
  part.factors.merge(unflatten(*at.k, at.depth + at.step * kInChunk));
  return part;
}

}  // namespace

tile_ir::Block load_factors(const MatrixTile& tile, const CodesAt& at, std::vector<tile_ir::Load>& seen, loop_ir::Names& names) {
  const std::set<std::string> made = made_of_codes(tile);
  tile_ir::Block out;
  for (int64_t next : {0, 1}) {
    const Part part = part_of(tile, at, tile.of_rows ? next : 2 * next);
    tile_ir::Block body;
    for (const auto& stmt : tile.slice) {
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      if (!load || made.count(load->name)) continue;
      // Places that other values say wait for these.
      std::set<std::string> used;
      collect_names(*stmt, used);
      if (std::any_of(used.begin(), used.end(), [&](const std::string& name) { return dtype_of(tile.slice, name).has_value(); })) continue;
      const loop_ir::Load here = substituted(*load, part.factors);
      if (std::find(seen.begin(), seen.end(), here) != seen.end()) continue;
      seen.push_back(here);
      body.push_back(make(here));
    }
    if (!body.empty()) out.push_back(make(tile_ir::For{axis(names.fresh("q"), 0, 1, LoopKind::unroll), std::move(body)}));
  }
  return out;
}

tile_ir::Block widen_codes(const MatrixTile& tile, const CodesAt& at, const std::string& fragment, loop_ir::Names& names) {
  const std::set<std::string> made = made_of_codes(tile);
  const std::string array = names.fresh("wide");
  tile_ir::Block out{make(tile_ir::Alloc{array, DType::f32, {kMatrices, 2}, Space::reg})};
  tile_ir::JoinMatrix join{fragment, tile.wide, array, {}};
  // Rounding to the operand's type is what joining does.
  std::string value = tile.value;
  if (const auto* let = let_of(tile.slice, value); let && let->fn == Fn::cast) {
    const auto from = dtype_of(tile.slice, let->operands[0]);
    if (from && (size_of(*from) == 1 || *from == DType::f32) && *from != DType::boolean) value = let->operands[0];
  }
  const DType dtype = dtype_of(tile.slice, value).value_or(tile.wide);
  for (int64_t m = 0; m < kMatrices; ++m) {
    const Part part = part_of(tile, at, m);
    const int64_t deeper = tile.of_rows ? m / 2 : m % 2;
    const std::string v = names.fresh("v");
    const Expr within = mod(at.lane, 4) * 2 + deeper * (kInChunk / 2) + sym(v);
    const Expr place = at.begin + part.column * tile.line + tile.rotated(part.column, tile.halves ? at.step / 2 : at.step) * kInChunk + within;
    tile_ir::Block body;
    for (const auto& stmt : tile.slice) {
      const std::string name = name_of(*stmt);
      if (name == tile.copied->name)
        body.push_back(make(tile_ir::Load{name, tile.dtype, tile.tile, {place}, {}, {}}));
      else if (name != tile.value || value == tile.value)
        body.push_back(substituted_stmt(*stmt, part.factors));
    }
    std::string stored = value;
    if (dtype != DType::f32) {
      stored = names.fresh("x");
      body.push_back(make(tile_ir::Let{stored, DType::f32, Fn::cast, {value}, {}, 0}));
    }
    body.push_back(make(tile_ir::Store{array, {m, sym(v)}, stored, {}, Combiner::set}));
    out.push_back(make(tile_ir::For{axis(v, 0, 2, LoopKind::lanes), std::move(body)}));
    join.places.push_back({m, 0});
  }
  out.push_back(make(std::move(join)));
  return out;
}

}  // namespace deplo::loop_to_tile
