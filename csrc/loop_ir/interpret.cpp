#include "loop_ir/interpret.h"

#include <limits>

#include "base/error.h"
#include "expr/named.h"
#include "loop_ir/text.h"
#include "scalar/combine.h"

namespace deplo::loop_ir {
namespace {

struct Machine {
  const Kernel& kernel;
  Mode mode;
  NameNumbers names{};
  NamedIntegers integers{names};  ///< symbols, axes and i64 values
  Named<Scalar> values{names};
  Named<Array*> buffers{names};
  std::map<std::string, Array> locals{};
  mutable std::vector<int64_t> coordinates{};  ///< of the access at hand
  bool division_error = false;
  ErrorCode error = ErrorCode::none;

  void define(const std::string& name, const Scalar& value) {
    values[name] = value;
    if (value.dtype == DType::i64) integers[name] = value.i;
  }

  bool holds(const std::vector<Cond>& guard) const {
    for (const Cond& cond : guard)
      if (!evaluate(cond, integers)) return false;
    return true;
  }

  int64_t place(const std::string& buffer, const std::vector<Expr>& index) const {
    coordinates.clear();
    for (const Expr& e : index) coordinates.push_back(evaluate(e, integers));
    return buffers.at(buffer)->flat_index(coordinates);
  }

  void run(const Block& block) {
    for (const auto& stmt : block) std::visit([&](const auto& s) { run(s); }, stmt->node);
  }

  void run(const Let& s) {
    if (s.fn == Fn::constant) return define(s.name, s.literal);
    if (s.fn == Fn::index) {
      int64_t value = evaluate(s.index, integers);
      return define(s.name, is_float(s.dtype) ? Scalar::of_float(s.dtype, static_cast<double>(value)) : Scalar::of_int(s.dtype, value));
    }
    Scalar operands[kMostOperands];
    for (size_t k = 0; k < s.operands.size(); ++k) operands[k] = values.at(s.operands[k]);
    define(s.name, apply(s.fn, s.dtype, operands, mode, &division_error));
  }

  void run(const Load& s) { define(s.name, holds(s.guard) ? buffers.at(s.buffer)->get(place(s.buffer, s.index)) : s.fill); }

  void run(const Store& s) {
    if (!holds(s.guard)) return;
    Array& array = *buffers.at(s.buffer);
    int64_t at = place(s.buffer, s.index);
    const Scalar& value = values.at(s.value);
    array.set(at, s.combiner == Combiner::set ? value : combine(s.combiner, array.get(at), value, mode));
  }

  void run(const For& s) {
    int64_t extent = evaluate(s.extent, integers);
    for (int64_t i = 0; i < extent; ++i) {
      integers[s.axis] = i;
      run(s.body);
    }
  }

  std::vector<Scalar> operands(const std::vector<std::string>& names) const {
    std::vector<Scalar> result;
    for (const std::string& name : names) result.push_back(values.at(name));
    return result;
  }

  // Runs the axes from `at` on as nested loops.
  void reduce(const Reduce& s, size_t at, Accumulator& accumulator) {
    if (at == s.axes.size()) {
      run(s.body);
      accumulator.add(operands(s.operands));
      return;
    }
    int64_t extent = evaluate(s.axes[at].extent, integers);
    for (int64_t i = 0; i < extent; ++i) {
      integers[s.axes[at].name] = i;
      reduce(s, at + 1, accumulator);
    }
  }

  void run(const Reduce& s) {
    Accumulator accumulator(s.combiner, s.dtypes[0], mode);
    reduce(s, 0, accumulator);
    auto results = accumulator.results(s.dtypes);
    for (size_t k = 0; k < s.results.size(); ++k) define(s.results[k], results[k]);
  }

  void run(const Scan& s) {
    Accumulator accumulator(s.combiner, s.dtypes[0], mode);
    int64_t extent = evaluate(s.axis.extent, integers);
    for (int64_t i = 0; i < extent; ++i) {
      integers[s.axis.name] = i;
      run(s.body);
      accumulator.add(operands(s.operands));
      auto results = accumulator.results(s.dtypes);
      for (size_t k = 0; k < s.results.size(); ++k) define(s.results[k], results[k]);
      run(s.then);
    }
  }

  void run(const Local& s) {
    Array& array = locals[s.name];
    array = Array::zeros(s.dtype, evaluate_shape(s.shape, integers));
    // Undefined contents: a NaN shows a read before the write.
    for (double& x : array.floats) x = std::numeric_limits<double>::quiet_NaN();
    buffers[s.name] = &array;
  }

  void run(const Check& s) {
    if (error == ErrorCode::none && !evaluate(s.cond, integers)) error = s.code;
  }
};

}  // namespace

void interpret(const Kernel& kernel, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& symbols, Mode mode) {
  DEPLO_ASSERT(arguments.size() == kernel.params.size(), "loop @{} takes {} arguments, got {}", kernel.name, kernel.params.size(), arguments.size());
  Machine machine{kernel, mode};
  for (const auto& [name, value] : symbols) machine.integers[name] = value;
  for (size_t i = 0; i < arguments.size(); ++i) machine.buffers[kernel.params[i].name] = arguments[i];
  machine.run(kernel.body);
  if (machine.division_error && machine.error == ErrorCode::none) machine.error = ErrorCode::division_by_zero;
  if (machine.error == ErrorCode::index_out_of_range) throw IndexError(fmt::format("loop @{}: index out of range", kernel.name));
  DEPLO_CHECK(machine.error == ErrorCode::none, "loop @{}: {}", kernel.name, to_string(machine.error));
}

std::vector<Array> interpret(const Module& module, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library) {
  auto find_params = [&](const std::string& name) -> std::optional<std::vector<ParamType>> {
    std::vector<ParamType> params;
    for (const Param& p : module.find_kernel(name)->params) params.push_back({p.dtype, p.kind != ParamKind::in});
    return params;
  };
  auto call = [&](const CallStep& step, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& sizes) {
    interpret(*module.find_kernel(step.kernel), arguments, sizes, mode);
  };
  return deplo::interpret(module, find_params, inputs, symbols, call, mode, library);
}

}  // namespace deplo::loop_ir
