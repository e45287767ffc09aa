#include "tensor_ir/interpret.h"

#include "base/error.h"
#include "expr/named.h"
#include "scalar/combine.h"

namespace deplo::tensor_ir {
namespace {

using Symbols = std::map<std::string, int64_t>;

/// Calls f with every multi-index of `shape`, in row-major order.
template <class F>
void for_each(const std::vector<int64_t>& shape, F&& f) {
  for (int64_t extent : shape)
    if (extent == 0) return;
  std::vector<int64_t> at(shape.size(), 0);
  while (true) {
    f(at);
    size_t d = shape.size();
    while (d > 0 && ++at[d - 1] == shape[d - 1]) at[--d] = 0;
    if (d == 0) return;
  }
}

struct Evaluator {
  const Op& op;
  Mode mode;
  NameNumbers names{};
  Named<const Array*> operands{names};
  NamedIntegers symbols{names};  ///< grows by the axes and coordinates
  mutable std::vector<int64_t> coordinates{};

  const Array& array(const std::string& name) const { return *operands.at(name); }

  Array result(size_t k) const { return Array::zeros(op.results.at(k).type.dtype, evaluate_shape(op.results[k].type.shape, symbols)); }

  const std::vector<int64_t>& place(const std::vector<Expr>& index) const {
    coordinates.clear();
    for (const Expr& e : index) coordinates.push_back(evaluate(e, symbols));
    return coordinates;
  }

  bool holds(const std::vector<Cond>& guard) const {
    for (const Cond& cond : guard)
      if (!evaluate(cond, symbols)) return false;
    return true;
  }

  void bind(const std::vector<std::string>& axes, const std::vector<int64_t>& at) {
    for (size_t d = 0; d < axes.size(); ++d) symbols[axes[d]] = at[d];
  }

  void bind(const std::vector<Indirect>& indirects) {
    for (const Indirect& j : indirects) {
      const Array& tensor = array(j.tensor);
      int64_t value = tensor.get(tensor.flat_index(place(j.index))).i;
      int64_t extent = evaluate(j.extent, symbols);
      if (value < 0 && j.checked && !j.asserts) value += extent;
      bool inside = value >= 0 && value < extent;
      if (!inside && j.asserts) throw ExecutionError(fmt::format("assertion failed: {} = {} is not in 0..{}", j.name, value, extent));
      if (!inside && j.checked) throw IndexError(fmt::format("index {} is out of range for a dimension of size {}", value, extent));
      DEPLO_ASSERT(inside, "{}: the index {} = {} was promised to be in 0..{}", op.results[0].name, j.name, value, extent);
      symbols[j.name] = value;
    }
  }

  std::vector<Array> operator()(const Elementwise& n) {
    Array out = result(0);
    if (n.fn == Fn::constant) {
      for (int64_t i = 0; i < out.count(); ++i) out.set(i, n.literal);
      return {out};
    }
    if (n.fn == Fn::index) {
      int64_t flat = 0;
      for_each(out.shape, [&](const auto& at) {
        bind(n.axes, at);
        int64_t value = evaluate(n.index, symbols);
        out.set(flat++, is_float(out.dtype) ? Scalar::of_float(out.dtype, static_cast<double>(value)) : Scalar::of_int(out.dtype, value));
      });
      return {out};
    }
    bool error = false;
    Scalar x[kMostOperands];
    for (int64_t i = 0; i < out.count(); ++i) {
      for (size_t k = 0; k < n.operands.size(); ++k) x[k] = array(n.operands[k]).get(i);
      out.set(i, apply(n.fn, out.dtype, x, mode, &error));
    }
    DEPLO_CHECK(!error, "ZeroDivisionError");
    return {out};
  }

  std::vector<DType> result_dtypes() const {
    std::vector<DType> dtypes;
    for (const Value& v : op.results) dtypes.push_back(v.type.dtype);
    return dtypes;
  }

  std::vector<Scalar> elements(const std::vector<std::string>& names, int64_t flat) const {
    std::vector<Scalar> values;
    for (const std::string& name : names) values.push_back(array(name).get(flat));
    return values;
  }

  std::vector<Array> operator()(const Reduction& n) {
    const Array& first = array(n.operands[0]);
    std::vector<Array> out;
    for (size_t k = 0; k < op.results.size(); ++k) out.push_back(result(k));
    std::vector<Accumulator> accumulators(static_cast<size_t>(out[0].count()), Accumulator(n.combiner, first.dtype, mode));
    int64_t flat = 0;
    for_each(first.shape, [&](const std::vector<int64_t>& at) {
      std::vector<int64_t> kept;
      for (size_t d = 0, next = 0; d < at.size(); ++d) {
        bool reduces = next < n.axes.size() && n.axes[next] == static_cast<int>(d);
        next += reduces ? 1 : 0;
        if (!reduces) kept.push_back(at[d]);
      }
      accumulators[static_cast<size_t>(out[0].flat_index(kept))].add(elements(n.operands, flat++));
    });
    for (size_t i = 0; i < accumulators.size(); ++i) {
      auto values = accumulators[i].results(result_dtypes());
      for (size_t k = 0; k < out.size(); ++k) out[k].set(static_cast<int64_t>(i), values[k]);
    }
    return out;
  }

  std::vector<Array> operator()(const Scan& n) {
    const Array& first = array(n.operands[0]);
    std::vector<Array> out;
    for (size_t k = 0; k < op.results.size(); ++k) out.push_back(result(k));
    auto axis = static_cast<size_t>(n.axis);
    std::vector<int64_t> rows = first.shape;
    rows[axis] = 1;
    for_each(rows, [&](std::vector<int64_t> at) {
      Accumulator accumulator(n.combiner, first.dtype, mode);
      for (int64_t i = 0; i < first.shape[axis]; ++i) {
        at[axis] = i;
        int64_t flat = first.flat_index(at);
        accumulator.add(elements(n.operands, flat));
        auto values = accumulator.results(result_dtypes());
        for (size_t k = 0; k < out.size(); ++k) out[k].set(flat, values[k]);
      }
    });
    return out;
  }

  std::vector<Array> operator()(const IndexMap& n) {
    Array out = result(0);
    int64_t flat = 0;
    for_each(out.shape, [&](const auto& at) {
      bind(n.axes, at);
      bind(n.indirects);
      Scalar value = n.fill;
      for (const Source& source : n.sources) {
        if (!holds(source.guard)) continue;
        const Array& from = array(source.operand);
        value = from.get(from.flat_index(place(source.index)));
        break;
      }
      out.set(flat++, value);
    });
    return {out};
  }

  std::vector<Array> operator()(const Scatter& n) {
    Array out = array(n.base);
    const Array& updates = array(n.updates);
    int64_t flat = 0;
    for_each(updates.shape, [&](const auto& at) {
      bind(n.axes, at);
      bind(n.indirects);
      Scalar value = updates.get(flat++);
      if (!holds(n.guard)) return;
      int64_t target = out.flat_index(place(n.index));
      out.set(target, combine(n.combiner, out.get(target), value, mode));
    });
    return {out};
  }

  std::vector<Array> operator()(const Library& n) { throw UnsupportedError("no interpreter runs " + n.op); }
};

void check_results(const Op& op, std::vector<Array>& made, const Symbols& symbols, Mode mode) {
  DEPLO_ASSERT(made.size() == op.results.size(), "library {} gave {} results, not {}", std::get<Library>(op.node).op, made.size(), op.results.size());
  for (size_t k = 0; k < made.size(); ++k)
    accept_library_result(made[k], op.results[k].type.dtype, evaluate_shape(op.results[k].type.shape, symbols), std::get<Library>(op.node).op,
                          op.results[k].name, mode);
}

Array integer_array(int64_t value) { return Array::filled(DType::i64, {}, Scalar::of_int(DType::i64, value)); }

/// Binds inputs to names and the symbols that they determine.
std::map<std::string, Array> bind_inputs(const Graph& graph, const std::vector<Array>& inputs, Symbols& symbols) {
  DEPLO_CHECK(inputs.size() == graph.inputs.size(), "tensor @{} takes {} inputs, got {}", graph.name, graph.inputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (graph.inputs[i].kind == torch_ir::InputKind::symbol) symbols[graph.inputs[i].name] = inputs[i].get(0).i;
  std::map<std::string, Array> memory;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Input& input = graph.inputs[i];
    if (input.kind == torch_ir::InputKind::symbol) continue;
    DEPLO_CHECK(inputs[i].dtype == input.type.dtype, "input {} must be {}, got {}", input.name, to_string(input.type.dtype),
                to_string(inputs[i].dtype));
    bind_symbols(input.type.shape, inputs[i].shape, input.name, symbols);
    memory[input.name] = inputs[i];
  }
  return memory;
}

}  // namespace

std::vector<Array> evaluate_op(const Op& op, const std::map<std::string, const Array*>& operands, const Symbols& symbols, Mode mode) {
  Evaluator evaluator{op, mode};
  for (const auto& [name, array] : operands) evaluator.operands.set_text(name, array);
  for (const auto& [name, value] : symbols) evaluator.symbols.set_text(name, value);
  return std::visit(evaluator, op.node);
}

std::vector<Array> interpret(const Graph& graph, const std::vector<Array>& inputs, const Symbols& given, Mode mode, const LibraryCall& library) {
  Symbols symbols = given;
  std::map<std::string, Array> memory = bind_inputs(graph, inputs, symbols);
  run_size_checks(graph.checks, symbols);
  for (const auto& op : graph.ops) {
    std::vector<Array> made;
    if (const auto* call = std::get_if<Library>(&op->node)) {
      std::map<std::string, Array> arrays;
      for (const std::string& name : operands_of(*op)) arrays[name] = memory.at(name);
      made = library(call->op, evaluate_arguments(call->arguments, symbols), arrays);
      check_results(*op, made, symbols, mode);
    } else {
      std::map<std::string, const Array*> operands;
      for (const std::string& name : operands_of(*op)) operands[name] = &memory.at(name);
      made = evaluate_op(*op, operands, symbols, mode);
    }
    for (size_t k = 0; k < made.size(); ++k) memory[op->results[k].name] = std::move(made[k]);
  }
  std::vector<Array> results;
  for (const Output& output : graph.outputs) {
    if (const auto* value = std::get_if<ValueName>(&output.value.value))
      results.push_back(memory.at(value->name));
    else if (const auto* e = std::get_if<Expr>(&output.value.value))
      results.push_back(integer_array(evaluate(*e, symbols)));
    else
      results.push_back(Array::zeros(DType::boolean, {0}));
  }
  // Writes read values, not inputs that an earlier write changed: the values are those at the end of the ops.
  std::map<std::string, const Array*> written;
  for (const auto& write : graph.writes) written[write.input] = &memory.at(write.value);
  for (const Input& input : graph.inputs)
    if (written.count(input.name)) results.push_back(*written.at(input.name));
  return results;
}

}  // namespace deplo::tensor_ir
