#include "lower/tensor_to_loop/lift.h"

#include <algorithm>

#include "base/error.h"

namespace deplo::lift {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Body;
using loop_ir::ErrorCode;
using loop_ir::make_stmt;
using loop_ir::Names;
using tensor_ir::Op;
using tensor_ir::TensorType;

// Functions that only move values: they work on a 16-bit float as it is stored.
bool moves_only(Fn fn) { return fn == Fn::constant || fn == Fn::where || fn == Fn::bitcast || fn == Fn::cast; }

struct Lifter {
  const Op& op;
  const Tensors& tensors;
  Names names;

  Lifter(const Op& o, const Tensors& t) : op(o), tensors(t), names(&t.reserved) {
    for (const auto& [name, range] : t.symbols) names.reserve(name);
  }

  std::vector<Axis> axes_of(const std::vector<Expr>& shape, const std::string& stem) {
    std::vector<Axis> axes;
    for (const Expr& extent : shape) axes.push_back({names.fresh(stem), extent});
    return axes;
  }

  static std::vector<Expr> symbols_of_axes(const std::vector<Axis>& axes) {
    std::vector<Expr> index;
    for (const Axis& axis : axes) index.push_back(Expr::symbol(axis.name));
    return index;
  }

  Ranges ranges_with(const std::vector<Axis>& axes) const {
    Ranges ranges = tensors.symbols;
    for (const Axis& axis : axes) ranges[axis.name] = axis_range(axis.extent);
    return ranges;
  }

  std::string load(Body& body, const std::string& value, std::vector<Expr> index) {
    return body.load(tensors.buffer(value), tensors.type(value).dtype, std::move(index));
  }

  // A load of an operand in the type in which arithmetic happens.
  std::string load_compute(Body& body, const std::string& value, std::vector<Expr> index) {
    DType dtype = tensors.type(value).dtype;
    return body.cast(load(body, value, std::move(index)), dtype, compute_type(dtype));
  }

  std::vector<Nest> operator()(const tensor_ir::Elementwise& node) {
    const TensorType& type = op.results[0].type;
    std::vector<Axis> axes = axes_of(type.shape, "i");
    std::vector<Expr> at = symbols_of_axes(axes);
    Body body(names);
    std::string value;
    if (node.fn == Fn::constant) {
      value = body.constant(node.literal);
    } else if (node.fn == Fn::index) {
      Substitution axis_names;
      for (size_t d = 0; d < axes.size(); ++d) axis_names[node.axes.at(d)] = at[d];
      DType dtype = compute_type(type.dtype);
      value = body.cast(body.index(dtype, substitute(node.index, axis_names)), dtype, type.dtype);
    } else if (node.fn == Fn::cast) {
      value = body.cast(load(body, node.operands[0], at), tensors.type(node.operands[0]).dtype, type.dtype);
    } else if (moves_only(node.fn)) {
      std::vector<std::string> operands;
      for (const std::string& operand : node.operands) operands.push_back(load(body, operand, at));
      value = body.let(node.fn, type.dtype, std::move(operands));
    } else {
      std::vector<std::string> operands;
      for (const std::string& operand : node.operands) operands.push_back(load_compute(body, operand, at));
      DType dtype = compute_type(type.dtype);
      value = body.cast(body.let(node.fn, dtype, std::move(operands)), dtype, type.dtype);
    }
    std::string target = tensors.buffer(op.results[0].name);
    body.store(target, at, value);
    return {{axes, body.take(), {target}, false}};
  }

  // Stores the results of a combination at the free axes.
  void store_results(Body& body, const std::vector<std::string>& results, const std::vector<DType>& dtypes, const std::vector<Expr>& at,
                     std::vector<std::string>& written) {
    for (size_t k = 0; k < results.size(); ++k) {
      std::string target = tensors.buffer(op.results[k].name);
      body.store(target, at, body.cast(results[k], dtypes[k], op.results[k].type.dtype));
      written.push_back(target);
    }
  }

  void name_results(std::vector<std::string>& results, std::vector<DType>& dtypes) {
    for (const auto& result : op.results) {
      results.push_back(names.fresh("r"));
      dtypes.push_back(compute_type(result.type.dtype));
    }
  }

  std::vector<Nest> operator()(const tensor_ir::Reduction& node) {
    const std::vector<Expr>& shape = tensors.type(node.operands[0]).shape;
    std::vector<Axis> free;
    std::vector<Axis> reduced;
    std::vector<Expr> at;
    std::vector<Expr> index;
    for (size_t d = 0, next = 0; d < shape.size(); ++d) {
      bool reduces = next < node.axes.size() && node.axes[next] == static_cast<int>(d);
      next += reduces ? 1 : 0;
      Axis axis{names.fresh(reduces ? "k" : "i"), shape[d]};
      index.push_back(Expr::symbol(axis.name));
      if (!reduces) at.push_back(index.back());
      (reduces ? reduced : free).push_back(axis);
    }
    if (reduced.empty()) reduced.push_back({names.fresh("k"), 1});
    loop_ir::Reduce reduce;
    reduce.combiner = node.combiner;
    reduce.axes = reduced;
    Body inner(names);
    for (const std::string& operand : node.operands) reduce.operands.push_back(load_compute(inner, operand, index));
    reduce.body = inner.take();
    name_results(reduce.results, reduce.dtypes);
    Nest nest{free, {}, {}, false};
    Body body(names);
    auto results = reduce.results;
    auto dtypes = reduce.dtypes;
    body.append(make_stmt(std::move(reduce)));
    store_results(body, results, dtypes, at, nest.written);
    nest.body = body.take();
    return {nest};
  }

  std::vector<Nest> operator()(const tensor_ir::Scan& node) {
    std::vector<Axis> axes = axes_of(tensors.type(node.operands[0]).shape, "i");
    std::vector<Expr> at = symbols_of_axes(axes);
    loop_ir::Scan scan;
    scan.combiner = node.combiner;
    scan.axis = axes.at(static_cast<size_t>(node.axis));
    Body inner(names);
    for (const std::string& operand : node.operands) scan.operands.push_back(load_compute(inner, operand, at));
    scan.body = inner.take();
    name_results(scan.results, scan.dtypes);
    axes.erase(axes.begin() + node.axis);
    Nest nest{axes, {}, {}, false};
    Body then(names);
    store_results(then, scan.results, scan.dtypes, at, nest.written);
    scan.then = then.take();
    nest.body = {make_stmt(std::move(scan))};
    return {nest};
  }

  // Defines the indirect coordinates; `guard` collects the conditions under which they are in range.
  void indirects(Body& body, const std::vector<tensor_ir::Indirect>& list, Substitution& coordinates, std::vector<Cond>& guard) {
    for (const tensor_ir::Indirect& indirect : list) {
      std::vector<Expr> index;
      for (const Expr& e : indirect.index) index.push_back(substitute(e, coordinates));
      std::string raw = body.cast(load(body, indirect.tensor, index), tensors.type(indirect.tensor).dtype, DType::i64);
      if (!indirect.checked) {
        coordinates[indirect.name] = Expr::symbol(raw);
        continue;
      }
      if (indirect.asserts) {
        Expr j = Expr::symbol(raw);
        for (const Cond& cond : {less_equal(0, j), less(j, substitute(indirect.extent, coordinates))}) {
          body.check(cond, ErrorCode::assertion);
          guard.push_back(cond);
        }
        coordinates[indirect.name] = j;
        continue;
      }
      std::string negative = body.let(Fn::lt, DType::boolean, {raw, body.constant(Scalar::of_int(DType::i64, 0))});
      std::string wrapped = body.let(Fn::add, DType::i64, {raw, body.index(DType::i64, substitute(indirect.extent, coordinates))});
      Expr j = Expr::symbol(body.let(Fn::where, DType::i64, {negative, wrapped, raw}));
      for (const Cond& cond : {less_equal(0, j), less(j, substitute(indirect.extent, coordinates))}) {
        body.check(cond, ErrorCode::index_out_of_range);
        guard.push_back(cond);
      }
      coordinates[indirect.name] = j;
    }
  }

  std::vector<Cond> simplified(const std::vector<Cond>& guard, const Substitution& coordinates, const Ranges& ranges, bool& never) {
    std::vector<Cond> left;
    for (const Cond& cond : guard) {
      Cond c = simplify(substitute(cond, coordinates), ranges);
      auto known = decide(c, ranges);
      never = never || known == std::optional<bool>(false);
      if (!known) left.push_back(c);
    }
    return left;
  }

  std::vector<Nest> operator()(const tensor_ir::IndexMap& node) {
    const TensorType& type = op.results[0].type;
    std::vector<Axis> axes = axes_of(type.shape, "i");
    std::vector<Expr> at = symbols_of_axes(axes);
    Ranges ranges = ranges_with(axes);
    Substitution coordinates;
    for (size_t d = 0; d < axes.size(); ++d) coordinates[node.axes.at(d)] = at[d];
    Body body(names);
    std::vector<Cond> in_range;
    indirects(body, node.indirects, coordinates, in_range);
    // The first source whose guard holds gives the element: later ones become the alternative of a select.
    std::vector<std::pair<std::vector<Cond>, std::string>> choices;
    for (const tensor_ir::Source& source : node.sources) {
      bool never = false;
      std::vector<Cond> guard = simplified(source.guard, coordinates, ranges, never);
      if (never) continue;
      std::vector<Expr> index;
      std::vector<Cond> read_guard = guard;
      auto also = [&](const Cond& cond) {
        if (decide(cond, ranges) != std::optional<bool>(true) && std::find(read_guard.begin(), read_guard.end(), cond) == read_guard.end())
          read_guard.push_back(cond);
      };
      const std::vector<Expr>& shape = tensors.type(source.operand).shape;
      for (size_t d = 0; d < source.index.size(); ++d) {
        index.push_back(simplify(substitute(source.index[d], coordinates), ranges));
        // Only what an indirect coordinate reaches needs its range check.
        for (const Cond& cond : in_range)
          for (const std::string& name : symbols_of(cond.expr))
            if (!ranges.count(name) && uses(index.back(), name)) also(cond);
        // All sources are read here, but a later one is in range only where no earlier one holds.
        if (choices.empty()) continue;
        also(less_equal(0, index.back()));
        also(less(index.back(), shape[d]));
      }
      choices.emplace_back(guard, body.load(tensors.buffer(source.operand), type.dtype, std::move(index), read_guard, node.fill));
      if (guard.empty()) break;
    }
    std::string value;
    for (size_t k = choices.size(); k-- > 0;) {
      const auto& [guard, name] = choices[k];
      value = value.empty() ? name : body.let(Fn::where, type.dtype, {body.truth(guard, ranges), name, value});
    }
    if (value.empty()) value = body.constant(node.fill);
    std::string target = tensors.buffer(op.results[0].name);
    body.store(target, at, value);
    return {{axes, body.take(), {target}, false}};
  }

  std::vector<Nest> operator()(const tensor_ir::Scatter& node) {
    std::string target = tensors.buffer(op.results[0].name);
    Nest base = lift_copy(tensors.buffer(node.base), target, op.results[0].type, tensors);
    const TensorType& type = tensors.type(node.updates);
    std::vector<Axis> axes = axes_of(type.shape, "i");
    std::vector<Expr> at = symbols_of_axes(axes);
    Substitution coordinates;
    for (size_t d = 0; d < axes.size(); ++d) coordinates[node.axes.at(d)] = at[d];
    Body body(names);
    std::vector<Cond> guard;
    indirects(body, node.indirects, coordinates, guard);
    bool never = false;
    for (const Cond& cond : simplified(node.guard, coordinates, ranges_with(axes), never)) guard.push_back(cond);
    if (never) return {base};
    std::vector<Expr> index;
    for (const Expr& e : node.index) index.push_back(simplify(substitute(e, coordinates), ranges_with(axes)));
    body.store(target, index, load(body, node.updates, at), guard, node.combiner);
    return {base, {axes, body.take(), {target}, true}};
  }

  std::vector<Nest> operator()(const tensor_ir::Library&) { DEPLO_ASSERT(false, "a library op has no nest"); }
};

}  // namespace

std::vector<Nest> lift(const tensor_ir::Op& op, const Tensors& tensors) { return std::visit(Lifter(op, tensors), op.node); }

Nest lift_copy(const std::string& source, const std::string& target, const TensorType& type, const Tensors& tensors) {
  Names names(&tensors.reserved);
  for (const auto& [name, range] : tensors.symbols) names.reserve(name);
  std::vector<Axis> axes;
  std::vector<Expr> at;
  for (const Expr& extent : type.shape) {
    axes.push_back({names.fresh("i"), extent});
    at.push_back(Expr::symbol(axes.back().name));
  }
  Body body(names);
  body.store(target, at, body.load(source, type.dtype, at));
  return {axes, body.take(), {target}, false};
}

}  // namespace deplo::lift
