#include "target/cuda/schedule/products.h"

#include <algorithm>

#include "base/error.h"
#include "loop_ir/places.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using analysis::AxisClass;

namespace {

constexpr size_t kMostItems = 3;  // sums of all stay in registers

bool uses_any(const std::set<std::string>& names, const std::vector<loop_ir::Axis>& axes) {
  return std::any_of(axes.begin(), axes.end(), [&](const auto& a) { return names.count(a.name) > 0; });
}

}  // namespace

/// Moves the axis last along which memory runs in most of the accesses, if it is long enough for vectors. Of axes that run alike the last one stays.
void GpuProducts::move_last_what_runs(std::vector<loop_ir::Axis>& axes, const std::vector<GlobalAccess>& accesses) {
  size_t best = 0;
  double most = 0;
  for (size_t a = 0; a < axes.size(); ++a) {
    const Expr extent = axes[a].extent;
    if (extent.is_constant() && extent.value() < kMostLanes) continue;
    double runs = 0;
    for (const GlobalAccess& access : accesses)
      if (auto step = linear_coefficient(access.offset, axes[a].name); step && step->is(1)) ++runs;
    if (runs == 0 || runs < most) continue;
    best = a;
    most = runs;
  }
  if (most == 0) return;
  const auto at = axes.begin() + static_cast<std::ptrdiff_t>(best);
  std::rotate(at, at + 1, axes.end());
}

std::vector<GlobalAccess> GpuProducts::loads_of(const analysis::Contraction& contraction) const {
  return global_accesses(kernel_, contraction.reduce->body);
}

GpuProducts::GpuProducts(const loop_ir::Kernel& kernel) : kernel_(kernel) {
  names_.reserve(kernel);
  fits_ = match();
}

std::string GpuProducts::group_of(const std::vector<loop_ir::Axis>& axes) {
  std::vector<std::string> names;
  for (const auto& a : axes) names.push_back(a.name);
  return group_name(names);
}

const std::string& GpuProducts::name_of(const loop_ir::Stmt& stmt) {
  static const std::string kNone;
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return let->name;
  if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) return load->name;
  return kNone;
}

bool GpuProducts::match() {
  std::vector<analysis::Contraction> found = analysis::find_contractions(kernel_);
  OuterNest nest = outer_nest(kernel_);
  inner_ = nest.inner;
  if (found.empty() || found.size() > kMostItems || !colliding_stores(kernel_).empty()) return false;
  for (const auto& a : nest.axes) batch_.push_back(a);
  loop_ir::Block before;
  for (const auto& stmt : *inner_) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    if (!reduce) {
      if (std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node)) before.push_back(stmt);
      if (std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Scan>(stmt->node) ||
          std::holds_alternative<loop_ir::Local>(stmt->node))
        return false;
      continue;
    }
    auto at = std::find_if(found.begin(), found.end(), [&](const auto& c) { return c.reduce == reduce; });
    if (at == found.end() || !classify(*at) || !add_item(*at, before)) return false;
  }
  return items_.size() == found.size();
}

/// The axis along which memory runs in the results; the last one where it runs along none.
std::string GpuProducts::stored_along(const std::vector<std::string>& axes) const {
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_)) {
    if (!access.stores) continue;
    for (const std::string& axis : axes)
      if (auto step = linear_coefficient(access.offset, axis); step && step->is(1)) return axis;
  }
  return axes.back();
}

/// The first contraction says which axes are rows and which are columns, which are those of the results' memory; the others must agree.
bool GpuProducts::classify(const analysis::Contraction& contraction) {
  std::vector<loop_ir::Axis> batch;
  std::vector<loop_ir::Axis> m;
  std::vector<loop_ir::Axis> n;
  std::vector<std::string> free;
  for (const auto& a : contraction.axes) {
    if (a.kind == AxisClass::k) continue;
    if (!a.shared) return false;
    if (a.kind == AxisClass::m || a.kind == AxisClass::n) free.push_back(a.name);
    (a.kind == AxisClass::m ? m : a.kind == AxisClass::n ? n : batch).push_back({a.name, a.extent});
  }
  if (free.empty()) return false;
  const std::string last = stored_along(free);
  if (std::any_of(m.begin(), m.end(), [&](const auto& a) { return a.name == last; })) std::swap(m, n);
  const std::vector<GlobalAccess> accesses = loads_of(contraction);
  for (auto* axes : {&m, &n}) move_last_what_runs(*axes, accesses);
  if (!items_.empty()) return (m == rows_ && n == columns_) || (n == rows_ && m == columns_);
  rows_ = m;
  columns_ = n;
  batch_ = batch;
  return !rows_.empty() && !columns_.empty();
}

bool GpuProducts::add_item(const analysis::Contraction& contraction, const loop_ir::Block& before) {
  const loop_ir::Reduce& reduce = *contraction.reduce;
  if (reduce.dtypes[0] != DType::f32 && reduce.dtypes[0] != DType::f64 && reduce.dtypes[0] != DType::i32) return false;
  loop_ir::Block whole = before;
  for (const auto& s : reduce.body) {
    if (name_of(*s).empty()) return false;  // a check, or a loop
    whole.push_back(s);
  }
  Item item;
  item.reduce = &reduce;
  for (const auto* side : {&contraction.a, &contraction.b}) {
    std::set<std::string> needed{side->value};
    Operand operand;
    operand.value = side->value;
    for (size_t i = whole.size(); i-- > 0;) {
      if (!needed.count(name_of(*whole[i]))) continue;
      collect_uses(*whole[i], needed);
      operand.slice.insert(operand.slice.begin(), whole[i]);
    }
    for (const Item& other : items_)
      if (needed.count(other.reduce->results[0])) return false;
    bool of_rows = uses_any(needed, rows_);
    if (of_rows == uses_any(needed, columns_)) return false;
    (of_rows ? item.rows : item.columns) = std::move(operand);
  }
  if (item.rows.value.empty() || item.columns.value.empty()) return false;
  item.k = reduce.axes;
  move_last_what_runs(item.k, loads_of(contraction));
  item.depth_name = reduce.results[0] + "." + group_of(item.k);
  for (Operand* operand : {&item.rows, &item.columns}) {
    const bool of_rows = operand == &item.rows;
    operand->tile = names_.fresh(of_rows ? "a_tile" : "b_tile");
    operand->next = names_.fresh(of_rows ? "a_next" : "b_next");
    // Along its rows or columns, or along k, wherever memory runs.
    const std::vector<GlobalAccess> accesses = global_accesses(kernel_, operand->slice);
    auto along = [&](const std::vector<loop_ir::Axis>& axes) {
      const loop_ir::Axis& last = axes.back();
      return axes.size() > 1 && !last.extent.is_constant() ? 1 : lanes_along(accesses, last.name, last.extent);
    };
    const int64_t across = along(of_rows ? rows_ : columns_);
    const int64_t down = along(item.k);
    operand->along_k = down > across;
    operand->lanes = std::max(across, down);
  }
  item.sums = names_.fresh("acc");
  items_.push_back(std::move(item));
  return true;
}

tile_ir::Block GpuProducts::convert(const loop_ir::Block& block, const Substitution& map, const std::vector<Expr>& sum_index) const {
  tile_ir::Block out;
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Load& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Store& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Check& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Reduce& s) {
                            auto item = std::find_if(items_.begin(), items_.end(), [&](const Item& i) { return i.reduce == &s; });
                            out.push_back(make(tile_ir::Load{s.results[0], s.dtypes[0], item->sums, sum_index, {}, {}}));
                          },
                          [](const auto&) {}},
               stmt->node);
  return out;
}

}  // namespace deplo::loop_to_tile
