#include "passes/loop/keep_places.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "analysis/weighted_sum.h"
#include "loop_ir/bounded.h"
#include "loop_ir/build.h"
#include "loop_ir/params.h"
#include "loop_ir/places.h"
#include "passes/loop/program_graph.h"

namespace deplo {
namespace {

using namespace loop_ir;

/// Each check as part of a pair that bounds a value; nothing if one is not.
std::optional<std::vector<Bounded>> all_bounded(const std::vector<Check>& checks, const Ranges& symbols) {
  const std::vector<Bounded> found = bounded_by(checks, symbols);
  const bool all = std::all_of(checks.begin(), checks.end(), [&](const Check& check) {
    return std::any_of(found.begin(), found.end(), [&](const Bounded& b) { return check.cond == b.above || check.cond == b.below; });
  });
  return all ? std::optional(found) : std::nullopt;
}

void collect_divisors(Expr e, Expr of, std::set<int64_t>& into) {
  if (e.kind() == ExprKind::floordiv && e.operands()[0] == of && e.operands()[1].is_constant()) into.insert(e.operands()[1].value());
  for (const Expr& part : e.operands()) collect_divisors(part, of, into);
}

class PlaceKeeper {
 public:
  explicit PlaceKeeper(Module module) : graph_(std::move(module)) {}

  Module run() {
    for (size_t at = 0, count = graph_.nodes().size(); at < count; ++at)
      if (graph_.nodes()[at].alive && graph_.nodes()[at].is_kernel && !graph_.nodes()[at].once) visit_kernel(at);
    return graph_.finish();
  }

 private:
  /// What a loop of the outer nest, or that nest, checks.
  struct Scope {
    std::vector<Axis> axes;
    Block pool;  ///< straight-line statements that its checks see
    std::vector<Check> checks;
  };

  void visit_kernel(size_t at) {
    const auto& node = graph_.nodes()[at];
    const Nest nest = peel(node.body);
    std::vector<Scope> scopes = scopes_of(nest);
    if (scopes.empty() || !is_attention(node, nest)) return;
    // Everything is known of all of them, or nothing changes.
    std::vector<std::pair<Bounded, Places>> found;
    for (const Scope& scope : scopes) {
      const auto bounded = all_bounded(scope.checks, graph_.program().symbols);
      if (!bounded) return;
      for (const Bounded& b : *bounded) {
        auto places = places_of(scope, b);
        if (!places || places->axes.empty()) return;
        found.emplace_back(b, std::move(*places));
      }
    }
    Block body = node.body;
    Names names;
    names.reserve(kernel_of(node, body));
    for (const auto& [b, places] : found) body = reading(places, b, keep(places, b, at), std::move(body), names);
    graph_.set_body(at, clean(body, graph_.program().symbols));
  }

  static Block without_checks(const Block& body) {
    return rewrite(body, [](const Ref<Stmt>& stmt) { return std::holds_alternative<Check>(stmt->node) ? Block{} : Block{stmt}; });
  }

  Kernel kernel_of(const ProgramGraph::Node& node, Block body) const {
    Kernel kernel;
    kernel.body = std::move(body);
    kernel.symbols = graph_.program().symbols;
    kernel.params =
        make_params(kernel.body, [&](const std::string& name) { return &graph_.buffer(name); }, {node.updated.begin(), node.updated.end()});
    return kernel;
  }

  bool is_attention(const ProgramGraph::Node& node, const Nest& nest) const {
    const Kernel kernel = kernel_of(node, without_checks(node.body));
    const auto sum = analysis::find_weighted_sum(kernel, peel(kernel.body).body, true);
    return !nest.axes.empty() && sum && sum->contractions;
  }

  static std::vector<Scope> scopes_of(const Nest& nest) {
    std::vector<Scope> found;
    Block rows;
    Scope outside{nest.axes, {}, {}};
    for (const auto& stmt : nest.body) {
      if (is_straight(*stmt)) rows.push_back(stmt);
      if (const auto* check = std::get_if<Check>(&stmt->node)) outside.checks.push_back(*check);
      Scope scope{nest.axes, rows, {}};
      visit({stmt}, [&](const Stmt& s, const std::vector<Axis>& loops) {
        if (loops.empty()) return;
        if (is_straight(s)) scope.pool.push_back(make_stmt(s.node));
        if (const auto* check = std::get_if<Check>(&s.node)) scope.checks.push_back(*check);
        for (const Axis& axis : loops)
          if (std::none_of(scope.axes.begin(), scope.axes.end(), [&](const Axis& a) { return a.name == axis.name; })) scope.axes.push_back(axis);
      });
      if (!scope.checks.empty()) found.push_back(std::move(scope));
    }
    outside.pool = rows;
    if (!outside.checks.empty()) found.push_back(std::move(outside));
    return found;
  }

  /// A kernel's loop of places, and where one of them lies.
  struct Places {
    std::vector<Axis> axes;
    std::vector<Expr> index;
    Block body;
  };

  /// The statements that the value needs, along the axes that they use.
  std::optional<Places> places_of(const Scope& scope, const Bounded& b) {
    Places out;
    Block slice = statements_for(scope.pool, {b.value});
    std::set<std::string> defined;
    for (const auto& stmt : slice) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (load && (!graph_.find_buffer(load->buffer) || graph_.is_versioned(load->buffer))) return std::nullopt;
      defined.insert(name_of(*stmt));
    }
    std::set<std::string> used;
    for (const auto& stmt : slice) collect_uses(*stmt, used);
    Ranges ranges = graph_.program().symbols;
    for (const Axis& axis : scope.axes) {
      ranges[axis.name] = axis_range(axis.extent);
      if (used.erase(axis.name) == 0) continue;
      Axis whole = axis;
      const Expr i = Expr::symbol(axis.name);
      Expr place = i;
      // Keys of a block have one place.
      std::set<int64_t> divisors;
      for_each_expr(slice, [&](const Expr& e) { collect_divisors(e, i, divisors); });
      const auto blocks = divisors.size() == 1 ? exact_quotient(axis.extent, *divisors.begin()) : std::nullopt;
      if (blocks) {
        const std::string inner = axis.name + ".inner";
        ranges[inner] = axis_range(*divisors.begin());
        ranges[axis.name] = axis_range(*blocks);
        const Block reduced = clean_exprs(slice, {{axis.name, i * *divisors.begin() + Expr::symbol(inner)}}, ranges);
        std::set<std::string> left;
        for (const auto& stmt : reduced) collect_uses(*stmt, left);
        if (left.count(inner) == 0) {
          slice = reduced;
          whole.extent = *blocks;
          place = floordiv(i, *divisors.begin());
        } else {
          ranges[axis.name] = axis_range(axis.extent);
        }
      }
      out.axes.push_back(whole);
      out.index.push_back(place);
    }
    for (const std::string& name : used)
      if (defined.count(name) == 0 && graph_.program().symbols.count(name) == 0) return std::nullopt;  // a value of another loop
    out.body = slice;
    return out;
  }

  static Block clean_exprs(const Block& block, const Substitution& map, const Ranges& ranges) {
    Block out;
    auto changed = [&](Expr e) { return simplify(substitute(e, map), ranges); };
    for (const auto& stmt : block) {
      Stmt copy = *stmt;
      if (auto* let = std::get_if<Let>(&copy.node)) let->index = changed(let->index);
      if (auto* load = std::get_if<Load>(&copy.node)) {
        for (Expr& e : load->index) e = changed(e);
        for (Cond& c : load->guard) c = simplify(substitute(c, map), ranges);
      }
      out.push_back(make_stmt(std::move(copy.node)));
    }
    return out;
  }

  /// The body, which reads the place that `b` bounds from the buffer.
  static Block reading(const Places& places, const Bounded& b, const std::string& buffer, Block body, Names& names) {
    const std::string place = names.fresh("at0");
    const Load load{place, DType::i64, buffer, places.index, {}, zero_of(DType::i64)};
    return rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* check = std::get_if<Check>(&stmt->node)) return check->cond == b.above || check->cond == b.below ? Block{} : Block{stmt};
      if (name_of(*stmt) == b.value) return {stmt, make_stmt(load)};
      const auto* from = std::get_if<Load>(&stmt->node);
      if (!from || from->guard.empty()) return {stmt};
      Load made = *from;
      for (const Cond& cond : {b.above, b.below}) std::erase(made.guard, cond);
      if (made.guard.size() + 2 != from->guard.size()) return {stmt};
      for (Expr& e : made.index) e = substitute(e, {{b.value, Expr::symbol(place)}});
      return {make_stmt(std::move(made))};
    });
  }

  /// The buffer of these places.
  std::string keep(const Places& places, const Bounded& b, size_t at) {
    Names canonical("$");
    Renaming renaming;
    std::vector<Axis> axes;
    for (const Axis& axis : places.axes) {
      axes.push_back({canonical.fresh(""), axis.extent});
      renaming.exprs[axis.name] = Expr::symbol(axes.back().name);
    }
    Block body = copy_block(places.body, renaming, &canonical);
    const std::string value = name_of(*body.back());
    const Substitution to{{b.value, Expr::symbol(value)}};
    body.push_back(make_stmt(Check{substitute(b.above, to), b.code}));
    body.push_back(make_stmt(Check{substitute(b.below, to), b.code}));
    Body more(canonical);
    const std::string place = more.index(DType::i64, substitute(b.in_range(), to));
    for (auto& stmt : more.take()) body.push_back(stmt);
    Kernel described;
    described.body = make_nest(axes, body);
    auto [known, fresh] = kept_.try_emplace(print(described));
    if (!fresh) return known->second;
    std::vector<Expr> shape;
    std::vector<Expr> index;
    for (const Axis& axis : axes) {
      shape.push_back(axis.extent);
      index.push_back(Expr::symbol(axis.name));
    }
    known->second = graph_.add_buffer("place0", DType::i64, shape);
    body.push_back(make_stmt(Store{known->second, index, place, {}, Combiner::set}));
    Names own("v");
    for (const auto& [symbol, range] : graph_.program().symbols) own.reserve(symbol);
    for (const Buffer& b : graph_.program().buffers) own.reserve(b.name);
    graph_.add_kernel(copy_block(make_nest(axes, std::move(body)), {}, &own), at);
    return known->second;
  }

  ProgramGraph graph_;
  std::map<std::string, std::string> kept_;  ///< buffers, by what is in them
};

}  // namespace

Module keep_places(Module module, const PassContext&) { return PlaceKeeper(std::move(module)).run(); }

}  // namespace deplo
