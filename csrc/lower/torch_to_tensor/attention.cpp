#include <cmath>

#include "base/error.h"
#include "lower/torch_to_tensor/normalization.h"

// Scaled dot-product attention and its gradient as products, softmax and selects: nothing below knows that it is attention.

namespace deplo::rules {
namespace {

// Axes of the leading dimensions of `v` in a space whose leading sizes are `batch`: size 1 broadcasts, and fewer heads than the
// space has (grouped queries) serve consecutive heads each.
std::vector<Expr> leading_index(const Value& v, const Shape& batch) {
  auto lead = rank_of(v) - 2;
  auto r = static_cast<int64_t>(batch.size());
  DEPLO_SUPPORT(lead <= r, "attention of {} by {} dimensions", r + 2, lead + 2);
  std::vector<Expr> index;
  for (int64_t d = 0; d < lead; ++d) {
    int64_t at = r - lead + d;
    Expr size = v.type.shape[d];
    if (size == batch[at]) {
      index.push_back(axis(at));
    } else if (size.is(1)) {
      index.push_back(0);
    } else {
      DEPLO_SUPPORT(at == r - 1, "attention whose dimension {} is {} and {}", at, print(batch[at]), print(size));
      auto group = exact_quotient(batch[at], size);
      DEPLO_SUPPORT(group.has_value(), "{} query heads for {} key heads", print(batch[at]), print(size));
      index.push_back(floordiv(axis(at), *group));
    }
  }
  return index;
}

struct Problem {
  Value query, key, value;
  Shape batch;  ///< leading dimensions of the query
  Expr rows, columns, width, value_width;
  DType dtype = DType::f32;
  bool causal = false;
  Value scale;  ///< 0-d
  std::optional<Value> mask;
};

// 1 / sqrt(width), rounded once to `dtype`.
Value default_scale(Builder& b, DType dtype, Expr width) {
  if (width.is_constant()) return b.constant(dtype, {}, 1 / std::sqrt(static_cast<double>(width.value())));
  Value root = b.apply(Fn::sqrt, {size_value(b, DType::f64, width)});
  return b.cast(b.apply(Fn::div, {b.constant(DType::f64, {}, 1), root}), dtype);
}

Problem problem_of(Builder& b, const Call& call) {
  Problem p{call.tensor("query"), call.tensor("key"), call.tensor("value"), {}, 0, 0, 0, 0, DType::f32, false, {}, std::nullopt};
  DEPLO_SUPPORT(rank_of(p.query) >= 2 && rank_of(p.key) >= 2 && rank_of(p.value) >= 2, "attention of a vector");
  DEPLO_SUPPORT(call.real("dropout_p", 0) == 0, "attention with dropout");
  const Shape& shape = p.query.type.shape;
  p.batch.assign(shape.begin(), shape.end() - 2);
  p.rows = shape[shape.size() - 2];
  p.width = shape.back();
  p.columns = p.key.type.shape[rank_of(p.key) - 2];
  p.value_width = p.value.type.shape.back();
  p.dtype = compute_type(p.query.type.dtype);
  p.causal = call.boolean("is_causal", false);
  // Sizes that PyTorch does not compare when it traces: only equal ones are safe to read.
  Expr rows_of_value = p.value.type.shape[rank_of(p.value) - 2];
  DEPLO_SUPPORT(b.same_size(p.columns, rows_of_value), "{} keys for {} values", print(p.columns), print(rows_of_value));
  DEPLO_SUPPORT(b.same_size(p.width, p.key.type.shape.back()), "queries of {} elements for keys of {}", print(p.width),
                print(p.key.type.shape.back()));
  p.scale = call.has("scale") ? b.constant(p.dtype, {}, call.real("scale")) : default_scale(b, p.dtype, p.width);
  if (auto mask = call.optional_tensor("attn_mask")) p.mask = mask->type.dtype == DType::boolean ? *mask : b.cast(*mask, p.dtype);
  return p;
}

Shape extended(Shape shape, std::initializer_list<Expr> more) {
  shape.insert(shape.end(), more);
  return shape;
}

std::vector<Expr> extended_index(std::vector<Expr> index, std::initializer_list<Expr> more) {
  index.insert(index.end(), more);
  return index;
}

// scale * q k^T with the masks applied: [batch..., rows, columns].
Value scores_of(Builder& b, const Problem& p) {
  auto r = static_cast<int64_t>(p.batch.size());
  Shape space = extended(p.batch, {p.rows, p.columns, p.width});
  Value q = b.remap(p.query, space, extended_index(axes_from(0, r), {axis(r), axis(r + 2)}));
  Value k = b.remap(p.key, space, extended_index(leading_index(p.key, p.batch), {axis(r + 1), axis(r + 2)}));
  Value scores = b.apply(Fn::mul, {b.contract(q, k, 1, p.dtype), p.scale});
  const Shape shape = scores.type.shape;
  if (p.causal) scores = guarded_map(b, scores, shape, axes_from(0, r + 2), {less_equal(axis(r + 1), axis(r))}, -kInfinity);
  if (p.mask && p.mask->type.dtype == DType::boolean) {
    scores = b.apply(Fn::where, {b.broadcast(*p.mask, shape), scores, constant_like(b, scores, -kInfinity)});
  } else if (p.mask) {
    scores = b.apply(Fn::add, {scores, b.broadcast(*p.mask, shape)});
  }
  return scores;
}

// probabilities [batch..., rows, columns] times the values.
Value weighted_values(Builder& b, const Problem& p, const Value& probabilities) {
  auto r = static_cast<int64_t>(p.batch.size());
  Shape space = extended(p.batch, {p.rows, p.value_width, p.columns});
  Value w = b.remap(probabilities, space, extended_index(axes_from(0, r), {axis(r), axis(r + 2)}));
  Value v = b.remap(p.value, space, extended_index(leading_index(p.value, p.batch), {axis(r + 2), axis(r + 1)}));
  return b.contract(w, v, 1, p.dtype);
}

// Rows without any admitted key give 0, and 0 for the log of their sum, as eager's kernel does.
std::vector<Value> flash_attention(Builder& b, const Call& call) {
  Problem p = problem_of(b, call);
  Value scores = scores_of(b, p);
  int64_t last = rank_of(scores) - 1;
  Value top = b.reduce(Combiner::max, scores, {last}, true);
  Value e = b.apply(Fn::exp, {b.apply(Fn::sub, {scores, top})});
  Value total = b.reduce(Combiner::sum, e, {last}, true);
  // As in eager's kernel, the sums are divided, not each weight: fewer divisions and roundings.
  Value sums = weighted_values(b, p, e);
  Value out = b.apply(Fn::div, {sums, total});
  Value empty = b.apply(Fn::eq, top, -kInfinity);
  Value zero = constant_like(b, out, 0);
  std::vector<Value> results = {conform(b, b.apply(Fn::where, {empty, zero, out}), call.result(0))};
  if (call.result_count() > 1) {
    Value lse = b.apply(Fn::where, {empty, zero, b.apply(Fn::add, {top, b.apply(Fn::log, {total})})});
    results.push_back(conform(b, lse, call.result(1)));
  }
  return results;
}

std::vector<Value> composite_attention(Builder& b, const Call& call) {
  call.ignore("enable_gqa");
  return flash_attention(b, call);
}

std::vector<Value> math_attention(Builder& b, const Call& call) {
  call.ignore("enable_gqa");
  DEPLO_SUPPORT(!call.has("dropout_mask"), "attention with a dropout mask");
  Problem p = problem_of(b, call);
  DEPLO_SUPPORT(!p.mask || p.mask->type.dtype != DType::boolean, "a boolean mask, which this form adds as a number");
  Value probabilities = safe_softmax_of(b, scores_of(b, p), static_cast<int64_t>(p.batch.size()) + 1);
  return {conform(b, weighted_values(b, p, probabilities), call.result(0)), conform(b, probabilities, call.result(1))};
}

// Dao et al. 2022, "FlashAttention", algorithm 4 without its blocks: with P = exp(S - lse), dP = dO V^T, D = sum dO * O,
// dS = P * (dP - D): dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO.
struct Gradient {
  Builder& b;
  const Problem& p;
  Value grad;           ///< of the output
  Value probabilities;  ///< [B, H, rows, columns]
  Value scores;         ///< gradient of the scores before masks, times scale

  Value query() const {
    Shape space = extended(p.batch, {p.rows, p.width, p.columns});
    Value ds = b.remap(scores, space, {axis(0), axis(1), axis(2), axis(4)});
    Value k = b.remap(p.key, space, extended_index(leading_index(p.key, p.batch), {axis(4), axis(3)}));
    return b.contract(ds, k, 1, p.dtype);
  }

  // sum over rows (and over the query heads that share a key head) of weights[b, h, i, j] * rows[b, h, i, d].
  Value transposed(const Value& weights, const Value& rows, const Value& like) const {
    Expr heads = like.type.shape[1];
    bool grouped = heads != p.batch[1];
    Shape space = {p.batch[0], heads, p.columns, like.type.shape[3]};
    Expr group = grouped ? part_of(p.batch[1], heads) : Expr(1);
    if (grouped) space.push_back(group);
    Expr head = grouped ? axis(1) * group + axis(4) : axis(1);
    Expr row = axis(static_cast<int64_t>(space.size()));
    space.push_back(p.rows);
    Value left = b.remap(weights, space, {axis(0), head, row, axis(2)});
    Value right = b.remap(rows, space, {axis(0), head, row, axis(3)});
    return b.contract(left, right, grouped ? 2 : 1, p.dtype);
  }
};

std::vector<Value> flash_attention_backward(Builder& b, const Call& call) {
  Problem p = problem_of(b, call);
  DEPLO_SUPPORT(rank_of(p.query) == 4 && rank_of(p.key) == 4 && rank_of(p.value) == 4, "attention of {} dimensions", rank_of(p.query));
  DEPLO_SUPPORT(p.key.type.shape[0] == p.batch[0] && p.value.type.shape[0] == p.batch[0], "keys broadcast over the batch");
  Value grad = call.tensor("grad_out");
  Value lse = b.unsqueeze(b.cast(call.tensor("logsumexp"), p.dtype), 3);
  Value probabilities = b.apply(Fn::exp, {b.apply(Fn::sub, {scores_of(b, p), lse})});
  Shape space = extended(p.batch, {p.rows, p.columns, p.value_width});
  Value dout = b.remap(grad, space, {axis(0), axis(1), axis(2), axis(4)});
  Value v = b.remap(p.value, space, extended_index(leading_index(p.value, p.batch), {axis(3), axis(4)}));
  Value dp = b.contract(dout, v, 1, p.dtype);
  Value delta = b.reduce(Combiner::sum, b.apply(Fn::mul, {b.cast(grad, p.dtype), b.cast(call.tensor("out"), p.dtype)}), {3}, true);
  Value ds = b.apply(Fn::mul, {probabilities, b.apply(Fn::sub, {dp, delta})});
  Gradient g{b, p, grad, probabilities, b.apply(Fn::mul, {ds, p.scale})};
  return {conform(b, g.query(), call.result(0)), conform(b, g.transposed(g.scores, p.query, p.key), call.result(1)),
          conform(b, g.transposed(g.probabilities, grad, p.value), call.result(2))};
}

}  // namespace

const std::vector<Row>& attention_rules() {
  static const std::vector<Row> rows = {
      {"aten._scaled_dot_product_flash_attention_for_cpu.default", flash_attention},
      {"aten._scaled_dot_product_flash_attention_for_cpu_backward.default", flash_attention_backward},
      {"aten.scaled_dot_product_attention.default", composite_attention},
      {"aten._scaled_dot_product_attention_math.default", math_attention},
  };
  return rows;
}

}  // namespace deplo::rules
