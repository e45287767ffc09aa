#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "lower/torch_to_tensor/formula.h"
#include "lower/torch_to_tensor/pointwise.h"

namespace deplo::rules {
namespace {

using Values = std::vector<Value>;

// What says only the type of the result, which the graph records.
void ignore_type(const Call& call) {
  for (const char* name : {"size", "dtype", "self", "stride", "physical_layout"}) call.ignore(name);
}

template <int value>
Values filled(Builder& b, const Call& call) {
  ignore_type(call);
  return {b.constant(call.result().dtype, call.result().shape, value)};
}

Values full(Builder& b, const Call& call) {
  ignore_type(call);
  return finish(b, call, checked_scalar(b, call, "fill_value", call.result().dtype));
}

Values fill(Builder& b, const Call& call) {
  call.tensor("self");
  if (call.is_tensor("value")) return finish(b, call, call.tensor("value"));
  return finish(b, call, checked_scalar(b, call, "value", call.result().dtype));
}

Values scalar_tensor(Builder& b, const Call& call) {
  call.ignore("dtype");
  return finish(b, call, checked_scalar(b, call, "s", call.result().dtype));
}

bool is_whole(const Call& call, std::string_view name) { return !call.has(name) || call.is_symbolic(name) || !is_float(call.number(name).dtype); }

Values arange(Builder& b, const Call& call) {
  call.ignore("dtype");
  call.ignore("end");  // the result's size says it
  TensorType type = call.result();
  if (is_whole(call, "start") && is_whole(call, "step") && is_whole(call, "end"))
    return {b.index(type.dtype, type.shape, call.size("start", Expr(0)) + axis(0) * call.size("step", Expr(1)))};
  if (!is_float(type.dtype)) {
    // RangeFactories.cpp: start and step become whole numbers first.
    auto whole = [&](const char* name, int64_t fallback) {
      if (is_whole(call, name)) return call.size(name, Expr(fallback));
      const double number = call.number(name).as_double();
      DEPLO_SUPPORT(std::fabs(number) < 0x1p62, "an integer range from or by {}", number);
      return Expr(static_cast<int64_t>(number));
    };
    return {b.index(type.dtype, type.shape, whole("start", 0) + axis(0) * whole("step", 1))};
  }
  // In float64, then rounded once.
  Formula i{&b, b.index(DType::f64, type.shape, axis(0))};
  Formula start{&b, call.has("start") ? scalar_operand(b, call, "start", DType::f64) : b.constant(DType::f64, {}, 0)};
  Formula step{&b, call.has("step") ? scalar_operand(b, call, "step", DType::f64) : b.constant(DType::f64, {}, 1)};
  return finish(b, call, (start + i * step).value);
}

// RangeFactories: from the nearer end, so that both ends are exact.
Values linspace(Builder& b, const Call& call) {
  call.ignore("dtype");
  TensorType type = call.result();
  double start = call.real("start");
  double end = call.real("end");
  if (!is_float(type.dtype)) {
    DEPLO_SUPPORT(type.dtype != DType::boolean, "a linspace of bool");
    start = std::trunc(start);
    end = std::trunc(end);
  }
  int64_t steps = call.integer("steps");
  if (steps <= 1) return finish(b, call, b.constant(DType::f64, type.shape, start));
  double step = (end - start) / static_cast<double>(steps - 1);
  Formula i{&b, b.index(DType::f64, type.shape, axis(0))};
  Formula from_start = start + i * step;
  Formula from_end = end - (static_cast<double>(steps - 1) - i) * step;
  int64_t half = steps / 2;  // as eager, which counts whole steps
  return finish(b, call, select(less(i, static_cast<double>(half)), from_start, from_end).value);
}

Values eye(Builder& b, const Call& call) {
  for (const char* name : {"n", "m", "dtype"}) call.ignore(name);
  TensorType type = call.result();
  Value same = b.apply(Fn::eq, {b.index(DType::i64, type.shape, axis(0)), b.index(DType::i64, type.shape, axis(1))});
  return {b.cast(same, type.dtype)};
}

/// The order in which ATen's serial kernels visit a tensor made like one of these strides: outermost dimension first.
std::vector<int64_t> visiting_order(const Builder& b, const Shape& shape, const std::vector<Expr>& strides) {
  const auto inward = b.order_like(shape, strides);
  DEPLO_SUPPORT(inward, "an order in memory that depends on sizes");
  std::vector<int64_t> order;
  for (size_t d = 0; d < shape.size(); ++d)
    if (std::find(inward->begin(), inward->end(), d) == inward->end()) order.push_back(static_cast<int64_t>(d));  // one element: anywhere
  order.insert(order.end(), inward->rbegin(), inward->rend());
  return order;
}

// Dropout.cpp: eager draws the mask by bernoulli_(1 - p) and scales by 1 / (1 - p). For p = 1 F.dropout, which PyTorch traces as this call,
// multiplies by 0 and draws nothing (native_dropout called by itself would draw).
Values native_dropout(Builder& b, const Call& call) {
  Value x = call.tensor("input");
  double keep = 1.0 - call.real("p");
  bool train = call.boolean("train", true);
  DEPLO_SUPPORT(is_float(x.type.dtype), "dropout of {}", to_string(x.type.dtype));
  if (!train) return {x, b.constant(DType::boolean, x.type.shape, 1)};
  if (keep == 0) {
    call.ignore("generator");
    const DType wide = compute_type(x.type.dtype);
    const Formula zero = Formula{&b, b.cast(x, wide)} * 0.0;
    return {b.cast(zero.value, x.type.dtype), b.constant(DType::boolean, x.type.shape, 0)};
  }
  for (Expr extent : x.type.shape) DEPLO_SUPPORT(provably_nonnegative(extent - 1, b.ranges()), "an input that may have no elements");
  // ATen draws for contiguous memory; which element of the mask a number belongs to follows from the input's strides.
  const std::vector<int64_t> order = visiting_order(b, x.type.shape, call.strides("input"));
  Shape drawn;
  std::vector<int64_t> back(order.size());
  for (size_t d = 0; d < order.size(); ++d) {
    drawn.push_back(x.type.shape[static_cast<size_t>(order[d])]);
    back[static_cast<size_t>(order[d])] = static_cast<int64_t>(d);
  }
  Value shaped = b.constant(DType::boolean, drawn, 0);
  std::vector<std::pair<std::string, Attribute>> arguments{{"self", {ValueName{shaped.name}}}, {"p", {keep}}};
  // A generator in this state, where a checkpointed region draws again what it drew before.
  if (auto state = call.optional_tensor("generator")) arguments.emplace_back("generator", Attribute{ValueName{state->name}});
  Value mask = b.library("aten.bernoulli.p", std::move(arguments), {shaped.type}, "random numbers come from ATen's generator")[0];
  if (!std::is_sorted(back.begin(), back.end())) mask = b.permute(mask, back);
  DType dtype = compute_type(x.type.dtype);
  Formula kept = Formula{&b, b.cast(x, dtype)} * Formula{&b, b.cast(mask, dtype)};
  if (dtype != x.type.dtype) kept.value = b.cast(b.cast(kept.value, x.type.dtype), dtype);
  Value scaled = b.cast((kept * (1.0 / keep)).value, x.type.dtype);
  return {scaled, mask};
}

}  // namespace

const std::vector<Row>& creation_rules() {
  static const std::vector<Row> rows{
      {"aten.arange.default", arange},
      {"aten.arange.start", arange},
      {"aten.arange.start_step", arange},
      // Uninitialised memory may hold anything; zeros make results repeatable.
      {"aten.empty.memory_format", filled<0>},
      {"aten.empty_like.default", filled<0>},
      {"aten.empty_permuted.default", filled<0>},
      {"aten.empty_strided.default", filled<0>},
      {"aten.eye.default", eye},
      {"aten.eye.m", eye},
      {"aten.fill.Scalar", fill},
      {"aten.fill.Tensor", fill},
      {"aten.full.default", full},
      {"aten.full_like.default", full},
      {"aten.linspace.default", linspace},
      {"aten.native_dropout.default", native_dropout},
      {"aten.new_empty.default", filled<0>},
      {"aten.new_empty_strided.default", filled<0>},
      {"aten.new_full.default", full},
      {"aten.new_ones.default", filled<1>},
      {"aten.new_zeros.default", filled<0>},
      {"aten.ones.default", filled<1>},
      {"aten.ones_like.default", filled<1>},
      {"aten.scalar_tensor.default", scalar_tensor},
      {"aten.zeros.default", filled<0>},
      {"aten.zero.default", filled<0>},
      {"aten.zeros_like.default", filled<0>},
  };
  return rows;
}

}  // namespace deplo::rules
