#include "passes/loop/split_keys.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "analysis/weighted_sum.h"
#include "loop_ir/places.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;
using analysis::WeightedSum;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kFewestLoops = 5;  // of such a sum

bool is_minus_infinity(const Scalar& s) { return is_float(s.dtype) && s.f == -kInfinity; }

/// Whether the value that the softmax reads is -inf where the score is.
bool follows_score(const WeightedSum& sum, const std::string& name) {
  for (const auto& stmt : sum.read) {
    if (name_of(*stmt) != name) continue;
    if (const auto* load = std::get_if<Load>(&stmt->node)) return load->buffer == sum.local && (load->guard.empty() || is_minus_infinity(load->fill));
  }
  return false;
}

struct KeySplitter {
  ProgramGraph graph;
  const PassContext& context;

  void visit_kernel(size_t at) {
    const auto& node = graph.nodes()[at];
    if (!node.alive || !node.is_kernel || node.once) return;
    Kernel kernel;
    kernel.body = node.body;
    kernel.symbols = graph.program().symbols;
    const Nest nest = peel(kernel.body);
    size_t loops = 0;
    for (const auto& stmt : nest.body) loops += std::holds_alternative<For>(stmt->node) || std::holds_alternative<Reduce>(stmt->node);
    if (loops < kFewestLoops) return;
    kernel.params =
        make_params(kernel.body, [&](const std::string& name) { return &graph.buffer(name); }, {node.updated.begin(), node.updated.end()});
    const int64_t parts = target_of(context).key_parts(kernel, context);
    if (parts <= 1) return;
    const auto sum = analysis::find_weighted_sum(kernel, nest.body, true);
    if (sum && sum->contractions && follows_score(*sum, sum->read_value)) split(at, kernel, nest, *sum, parts);
  }

  /// The body with the guard on what it loads of the scores.
  static Block guarded(const Block& body, const WeightedSum& sum, const std::string& axis, const Axis& part) {
    return rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || load->buffer != sum.local) return {stmt};
      Load made = *load;
      made.guard.push_back(analysis::in_part(Expr::symbol(axis), Expr::symbol(part.name), part.extent.value()));
      made.fill = Scalar::of_float(DType::f32, -kInfinity);
      return {make_stmt(std::move(made))};
    });
  }

  /// The sum of values with its weights rounded, where values have 16 bits, stored for the part.
  static Ref<Stmt> partial_values(const WeightedSum& sum, Names& names, const std::string& buffer, std::vector<Expr> place) {
    const Reduce& values = *sum.contractions->values.reduce;
    const analysis::Contraction& products = sum.contractions->values;
    const std::string weight = sum.contractions->value.value == products.b.value ? products.a.value : products.b.value;
    Reduce made = values;
    std::optional<DType> narrow;
    for (const auto& stmt : sum.contractions->value.slice)
      if (const auto* load = std::get_if<Load>(&stmt->node); load && size_of(load->dtype) == 2) narrow = load->dtype;
    if (!sum.rounded && narrow) {
      made.body.clear();
      for (const auto& stmt : values.body) {
        const auto* let = std::get_if<Let>(&stmt->node);
        if (!let || let->name != values.operands[0]) {
          made.body.push_back(stmt);
          continue;
        }
        Body body(names);
        const std::string rounded = body.let(Fn::cast, DType::f32, {body.let(Fn::cast, *narrow, {weight})});
        for (const auto& s : body.take()) made.body.push_back(s);
        Let product = *let;
        product.operands[product.operands[0] == weight ? 0 : 1] = rounded;
        made.body.push_back(make_stmt(std::move(product)));
      }
    }
    Block column = statements_for(sum.column_body, [&] {
      std::set<std::string> used;
      for (const auto& stmt : made.body) collect_uses(*stmt, used);
      return used;
    }());
    column.push_back(make_stmt(std::move(made)));
    place.push_back(Expr::symbol(sum.column.name));
    column.push_back(make_stmt(Store{buffer, std::move(place), values.results[0], {}, Combiner::set}));
    return make_for(sum.column, std::move(column));
  }

  void split(size_t at, const Kernel& kernel, const Nest& nest, const WeightedSum& sum, int64_t parts) {
    Names names;
    names.reserve(kernel);
    const Axis part{names.fresh("c0"), parts};
    // Parts of one result lie apart, results side by side: threads go along these.
    std::vector<Expr> shape{parts};
    std::vector<Expr> place{Expr::symbol(part.name)};
    for (const Axis& a : nest.axes) {
      shape.push_back(a.extent);
      place.push_back(Expr::symbol(a.name));
    }
    const std::string maxima = graph.add_buffer("part0", DType::f32, shape);
    const std::string totals = graph.add_buffer("part0", DType::f32, shape);
    shape.push_back(sum.column.extent);
    const std::string values = graph.add_buffer("part0", DType::f32, shape);

    // What rows compute of the sum comes after it.
    std::set<std::string> late{sum.max, sum.sum, sum.contractions->values.result};
    Block early;
    for (const auto& stmt : sum.rows) {
      std::set<std::string> used;
      collect_uses(*stmt, used);
      bool is_late = std::holds_alternative<Store>(stmt->node);
      for (const std::string& name : used) is_late = is_late || late.count(name) > 0;
      if (is_late)
        late.insert(name_of(*stmt));
      else
        early.push_back(stmt);
    }

    Block first;
    std::set<std::string> needed;
    const Stmt* last = nullptr;  // the nest of values
    for (const auto& stmt : nest.body)
      if (std::holds_alternative<For>(stmt->node)) last = stmt.get();
    for (const auto& stmt : nest.body) {
      if (std::holds_alternative<Local>(stmt->node)) first.push_back(stmt);
      const bool loops = std::holds_alternative<For>(stmt->node) || std::holds_alternative<Reduce>(stmt->node);
      if (!loops) continue;
      if (stmt.get() == last) {
        first.push_back(partial_values(sum, names, values, place));
      } else if (stmt.get() == sum.over_keys[1]) {
        Reduce made = std::get<Reduce>(stmt->node);
        made.body = guarded(made.body, sum, made.axes[0].name, part);
        first.push_back(make_stmt(std::move(made)));
      } else if (stmt.get() == sum.over_keys[2]) {
        const auto& loop = std::get<For>(stmt->node);
        first.push_back(make_for({loop.axis, loop.extent}, guarded(loop.body, sum, loop.axis, part)));
      } else {
        first.push_back(stmt);
      }
    }
    visit(first, [&](const Stmt& stmt, const std::vector<Axis>&) { collect_uses(stmt, needed); });
    const Block before = statements_for(early, needed);
    first.insert(first.begin(), before.begin(), before.end());
    first.push_back(make_stmt(Store{maxima, place, sum.max, {}, Combiner::set}));
    first.push_back(make_stmt(Store{totals, place, sum.sum, {}, Combiner::set}));
    std::vector<Axis> outer = nest.axes;
    outer.push_back(part);
    graph.add_kernel(make_nest(outer, std::move(first)), at);
    graph.set_body(at, combination(nest, sum, names, part, place, maxima, totals, values));
  }

  /// What parts give together, then what followed the whole sum. A part without keys counts for nothing.
  static Block combination(const Nest& nest, const WeightedSum& sum, Names& names, const Axis& part, const std::vector<Expr>& place,
                           const std::string& maxima, const std::string& totals, const std::string& values) {
    const auto over_parts = [&](const std::string& result, Combiner combiner, const std::string& operand, Block body) {
      return make_stmt(Reduce{{result}, {DType::f32}, combiner, {operand}, {part}, std::move(body)});
    };
    const auto relative = [&](Body& body, std::optional<std::string> of, bool by_total) {
      const std::string most = body.load(maxima, DType::f32, place);
      const std::string none = body.let(Fn::eq, DType::boolean, {most, body.constant(Scalar::of_float(DType::f32, -kInfinity))});
      std::string factor = body.let(Fn::exp, DType::f32, {body.let(Fn::sub, DType::f32, {most, sum.max})});
      if (by_total) factor = body.let(Fn::mul, DType::f32, {factor, body.load(totals, DType::f32, place)});
      if (of) factor = body.let(Fn::mul, DType::f32, {factor, *of});
      return body.let(Fn::where, DType::f32, {none, body.constant(Scalar::of_float(DType::f32, 0)), factor});
    };
    Block second;
    Body greatest(names);
    const std::string most = greatest.load(maxima, DType::f32, place);
    second.push_back(over_parts(sum.max, Combiner::max, most, greatest.take()));
    Body total(names);
    const std::string of_part = relative(total, std::nullopt, true);
    second.push_back(over_parts(sum.sum, Combiner::sum, of_part, total.take()));

    Block column;
    const std::string& result = sum.contractions->values.result;
    for (const auto& stmt : sum.column_body) {
      if (!std::holds_alternative<Reduce>(stmt->node)) {
        column.push_back(stmt);
        continue;
      }
      std::vector<Expr> at = place;
      at.push_back(Expr::symbol(sum.column.name));
      Body body(names);
      const std::string value = body.load(values, DType::f32, at);
      const std::string weighed = relative(body, value, sum.normalized);
      const std::string whole = sum.normalized ? names.fresh("whole") : result;
      column.push_back(over_parts(whole, Combiner::sum, weighed, body.take()));
      if (sum.normalized) column.push_back(make_stmt(Let{result, DType::f32, Fn::div, {whole, sum.sum}, {}, 0}));
    }
    std::set<std::string> used;
    visit(column, [&](const Stmt& stmt, const std::vector<Axis>&) { collect_uses(stmt, used); });
    bool stores = false;
    for (const auto& stmt : sum.rows) {
      if (!std::holds_alternative<Store>(stmt->node)) continue;
      stores = true;
      collect_uses(*stmt, used);
    }
    const Block needed = statements_for(sum.rows, used);
    const auto append_rows = [&](size_t from, size_t to) {
      for (size_t r = from; r < to; ++r)
        if (std::holds_alternative<Store>(sum.rows[r]->node) || std::count(needed.begin(), needed.end(), sum.rows[r]) > 0)
          second.push_back(sum.rows[r]);
    };
    append_rows(0, sum.before);
    std::vector<Axis> outer = nest.axes;
    if (stores) {
      second.push_back(make_for(sum.column, std::move(column)));
      append_rows(sum.before, sum.rows.size());
    } else {
      // A thread for each result.
      second.insert(second.end(), column.begin(), column.end());
      outer.push_back(sum.column);
    }
    return make_nest(outer, std::move(second));
  }

  Module run() {
    for (size_t at = 0, count = graph.nodes().size(); at < count; ++at) visit_kernel(at);
    return graph.finish();
  }
};

}  // namespace

Module split_keys(Module module, const PassContext& context) { return KeySplitter{ProgramGraph(std::move(module)), context}.run(); }

}  // namespace deplo
