#include "passes/loop/keep_windows.h"

#include <algorithm>
#include <map>
#include <set>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "expr/node.h"
#include "loop_ir/places.h"
#include "passes/loop/kept_factor.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using analysis::Contraction;
using analysis::ContractionOperand;
using loop_ir::Block;
using loop_ir::Check;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Stmt;

constexpr double kLeastReads = 2;           ///< of each element, which are packed for less once it is kept
constexpr double kLeastProducts = 1 << 16;  ///< that take longer than one kernel more
constexpr int kParts = 3;                   ///< loads of an image that are chosen from at each point

/// Axes by coefficient, the first one's positive.
using Sum = std::map<std::string, int64_t>;

Sum with_positive_start(Sum sum) {
  if (sum.begin()->second < 0)
    for (auto& [name, step] : sum) step = -step;
  return sum;
}

/// How a factor's places count along the axes of a product.
struct Places {
  std::set<Sum> sums;       ///< of which quotients, rests and linear places are made
  std::set<Sum> crooked;    ///< those inside of quotients and the like
  bool are_counted = true;  ///< each is of sums of axes by constants

  void note(Expr e, const std::set<std::string>& axes, bool inside = false) {
    const auto moves = [&](Expr part) {
      const std::set<std::string> names = symbols_of(part);
      return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return axes.count(name) > 0; });
    };
    Sum sum;
    for (const Term& term : terms_of(e)) {
      if (std::none_of(term.atoms.begin(), term.atoms.end(), moves)) continue;
      if (term.atoms.size() != 1) {
        are_counted = false;
      } else if (term.atoms[0].is_symbol()) {
        sum[term.atoms[0].name()] += term.coefficient;
      } else {
        for (Expr operand : term.atoms[0].operands()) note(operand, axes, true);
      }
    }
    if (sum.empty()) return;
    sum = with_positive_start(std::move(sum));
    if (inside) crooked.insert(sum);
    sums.insert(std::move(sum));
  }
};

/// Calls f for all expressions of straight statements.
template <class F>
void for_places(const Block& body, const F& f) {
  for (const auto& stmt : body) {
    if (const auto* load = std::get_if<Load>(&stmt->node)) {
      for (Expr e : load->index) f(e);
      for (const Cond& c : load->guard) f(c.expr);
    } else if (const auto* let = std::get_if<Let>(&stmt->node)) {
      f(let->index);
    }
  }
}

/// An image that windows overlap: how the factor is computed at each of its points.
struct Image {
  Factor factor;
  std::vector<KeptDimension> dimensions;
};

class WindowKeeper {
 public:
  WindowKeeper(loop_ir::Module module, const PassContext& context) : graph_(std::move(module)), context_(context) {}

  loop_ir::Module run() {
    for (size_t at = 0, count = graph_.nodes().size(); at < count; ++at) {
      const auto& node = graph_.nodes()[at];
      while (node.alive && node.is_kernel && !node.once && keep_one(at)) continue;
    }
    return graph_.finish();
  }

 private:
  bool keep_one(size_t at) {
    const loop_ir::Kernel kernel = kernel_of(graph_.nodes()[at].body, graph_.program().symbols);
    for (const Contraction& c : analysis::find_contractions(kernel))
      for (const ContractionOperand* operand : {&c.a, &c.b})
        if (const auto image = find_image(kernel, c, *operand)) {
          keep_factor(graph_, at, kernel, image->factor, image->dimensions, {});
          return true;
        }
    return false;
  }

  std::optional<Image> find_image(const loop_ir::Kernel& kernel, const Contraction& c, const ContractionOperand& operand) {
    auto factor = find_factor(kernel, operand);
    if (!factor || !may_be_kept(graph_, *factor) || is_checked(kernel, operand)) return std::nullopt;
    Places places;
    for_places(factor->body, [&](Expr e) { places.note(e, operand.axes); });
    if (!places.are_counted) return std::nullopt;
    std::map<std::string, const Sum*> windows;  // by axis
    for (const Sum& sum : places.sums) {
      if (sum.size() < 2) continue;
      for (const auto& [axis, step] : sum)
        if (!windows.emplace(axis, &sum).second) return std::nullopt;
    }
    for (const Sum& sum : places.sums)
      if (sum.size() == 1 && windows.count(sum.begin()->first) > 0) return std::nullopt;
    if (windows.empty() || !is_crooked(*factor, places, windows)) return std::nullopt;
    Image image{std::move(*factor), {}};
    double elements = 1;
    double reads = 1;
    double products = 1;
    Substitution at;
    std::set<std::string> gone;
    Ranges ranges = kernel.symbols;
    std::set<const Sum*> done;
    for (const auto& axis : c.axes) {
      products *= size(axis.extent);
      if (operand.axes.count(axis.name) == 0) continue;
      reads *= size(axis.extent);
      ranges[axis.name] = axis_range(axis.extent);
      const auto window = windows.find(axis.name);
      if (window == windows.end()) {
        image.dimensions.push_back({{axis.name, axis.extent}, Expr::symbol(axis.name)});
      } else if (done.insert(window->second).second) {
        auto dimension = along(*window->second, c, kernel.symbols, at);
        if (!dimension) return std::nullopt;
        ranges[dimension->axis.name] = axis_range(dimension->axis.extent);
        image.dimensions.push_back(std::move(*dimension));
        for (const auto& [name, step] : *window->second) gone.insert(name);
      } else {
        continue;
      }
      elements *= size(image.dimensions.back().axis.extent);
    }
    if (products < kLeastProducts || reads < kLeastReads * elements) return std::nullopt;
    bool sees_sums = true;
    for_places(image.factor.body, [&](Expr e) {
      const std::set<std::string> left = symbols_of(simplify(substitute(e, at), ranges));
      sees_sums = sees_sums && std::none_of(left.begin(), left.end(), [&](const std::string& name) { return gone.count(name) > 0; });
    });
    if (!sees_sums) return std::nullopt;
    image.factor.body = loop_ir::copy_block(image.factor.body, {at, {}, {}}, nullptr);
    order_as_memory(image);
    return image;
  }

  /// Whether the kernel checks the factor's places.
  static bool is_checked(const loop_ir::Kernel& kernel, const ContractionOperand& operand) {
    bool checked = false;
    loop_ir::visit(kernel.body, [&](const Stmt& stmt, const auto&) {
      const auto* check = std::get_if<Check>(&stmt.node);
      checked =
          checked || (check && std::any_of(operand.axes.begin(), operand.axes.end(), [&](const auto& axis) { return uses(check->cond.expr, axis); }));
    });
    return checked;
  }

  /// Whether packing would take more than one load at places in a row.
  static bool is_crooked(const Factor& factor, const Places& places, const std::map<std::string, const Sum*>& windows) {
    const auto is_window = [&](const Sum& sum) { return sum.size() > 1; };
    if (std::any_of(places.crooked.begin(), places.crooked.end(), is_window)) return true;
    int parts = 0;
    for (const auto& stmt : factor.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      const auto moves = [&](Expr e) {
        return std::any_of(windows.begin(), windows.end(), [&](const auto& window) { return uses(e, window.first); });
      };
      parts += load && std::any_of(load->index.begin(), load->index.end(), moves) ? 1 : 0;
    }
    return parts >= kParts;
  }

  /// The dimension of a sum's values; `at` says what one of its axes is by the value and the other axes. Nothing where values between the least and
  /// the greatest one are none of the sum's, or nobody knows whether it has any.
  static std::optional<KeptDimension> along(const Sum& sum, const Contraction& c, const Ranges& symbols, Substitution& at) {
    const auto extent_of = [&](const std::string& name) {
      return std::find_if(c.axes.begin(), c.axes.end(), [&](const auto& axis) { return axis.name == name; })->extent;
    };
    std::vector<std::pair<int64_t, std::string>> steps;
    for (const auto& [name, step] : sum) steps.emplace_back(std::abs(step), name);
    std::sort(steps.begin(), steps.end());
    Expr least = 0;
    Expr whole = 0;
    Expr extent = 1;
    for (const auto& [step, name] : steps) {
      const Expr behind = extent_of(name) - 1;
      if (!provably_nonnegative(behind, symbols)) return std::nullopt;
      if (step > 1 && (!extent.is_constant() || step > extent.value())) return std::nullopt;
      extent = extent + step * behind;
      if (sum.at(name) < 0) least = least - step * behind;
      whole = whole + sum.at(name) * Expr::symbol(name);
    }
    if (steps[0].first != 1) return std::nullopt;
    const std::string& pivot = steps[0].second;
    const std::string axis = pivot + "_point";
    at[pivot] = sum.at(pivot) * (Expr::symbol(axis) + least - (whole - sum.at(pivot) * Expr::symbol(pivot)));
    return KeptDimension{{axis, extent}, whole - least};
  }

  /// Dimensions follow one another as they lie in what is read.
  void order_as_memory(Image& image) const {
    std::map<std::string, double> strides;
    for (const auto& stmt : image.factor.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load) continue;
      const Buffer& buffer = graph_.buffer(load->buffer);
      for (size_t d = 0; d < load->index.size(); ++d)
        for (const KeptDimension& dimension : image.dimensions)
          if (uses(load->index[d], dimension.axis.name)) strides.emplace(dimension.axis.name, size(buffer.strides[d]));
    }
    const auto stride = [&](const KeptDimension& dimension) {
      const auto found = strides.find(dimension.axis.name);
      return found == strides.end() ? 1e18 : found->second;
    };
    std::stable_sort(image.dimensions.begin(), image.dimensions.end(), [&](const auto& a, const auto& b) { return stride(a) > stride(b); });
  }

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context_.hints, graph_.program().symbols)); }

  ProgramGraph graph_;
  const PassContext& context_;
};

}  // namespace

loop_ir::Module keep_windows(loop_ir::Module module, const PassContext& context) {
  if (target_of(context).has_grid) return module;
  return WindowKeeper(std::move(module), context).run();
}

}  // namespace deplo
