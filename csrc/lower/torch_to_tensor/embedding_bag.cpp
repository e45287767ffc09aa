#include <limits>
#include <optional>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Sums, means and maxima of rows of a table, a bag of indices each, and their gradients. Bag k holds the indices from offsets[k] up to
// offsets[k + 1]; each index finds its bag as the number of offsets at or before it, which is a scatter and a running sum.

namespace deplo::rules {
namespace {

using tensor_ir::IndexMap;
using tensor_ir::Indirect;
using tensor_ir::Scatter;

enum BagMode { kBagSum = 0, kBagMean = 1, kBagMax = 2 };

Indirect row_of(const Value& index, Expr rows) { return {"j", index.name, {axis(0)}, rows, true}; }

// table[index[i0]], for each i0 and the table's further dimensions.
Value rows_at(Builder& b, const Value& table, const Value& index) {
  Shape shape = table.type.shape;
  shape[0] = index.type.shape[0];
  IndexMap map;
  map.axes = axis_names(shape.size());
  map.indirects.push_back(row_of(index, table.type.shape[0]));
  std::vector<Expr> at = axes_from(0, static_cast<int64_t>(shape.size()));
  at[0] = Expr::symbol("j");
  map.sources.push_back({table.name, at, {}});
  map.fill.dtype = table.type.dtype;
  return b.map({table.type.dtype, shape}, std::move(map));
}

// v at the coordinates `at`, in which j is place[i0, i1]: 0 where v is empty.
Value entries_at(Builder& b, const Value& v, const Value& place, std::vector<Expr> at) {
  IndexMap map;
  map.axes = axis_names(2);
  map.indirects.push_back({"j", place.name, axes_from(0, 2), v.type.shape[0], false});
  map.sources.push_back({v.name, std::move(at), {less(0, v.type.shape[0])}});
  map.fill.dtype = v.type.dtype;
  return b.map({v.type.dtype, place.type.shape}, std::move(map));
}

// base with `updates` combined into the rows base[index[i0]].
Value into_rows(Builder& b, const Value& base, const Value& index, const Value& updates, Combiner combiner) {
  Scatter scatter;
  scatter.combiner = combiner;
  scatter.updates = updates.name;
  scatter.axes = axis_names(updates.type.shape.size());
  scatter.indirects.push_back(row_of(index, base.type.shape[0]));
  scatter.index = axes_from(0, rank_of(updates));
  scatter.index[0] = Expr::symbol("j");
  return b.scatter(std::move(scatter), base);
}

Value whole(Builder& b, const Shape& shape, int64_t value) { return b.constant_int(DType::i64, shape, value); }

// The bag of each index.
Value bags_of(Builder& b, const Value& offsets, Expr count) {
  Value ones = whole(b, offsets.type.shape, 1);
  // One place more than there are indices: trailing empty bags start there.
  Value starts = into_rows(b, whole(b, {count + 1}, 0), b.cast(offsets, DType::i64), ones, Combiner::sum);
  Value running = b.scan(Combiner::sum, {starts}, 0)[0];
  return b.apply(Fn::sub, {b.slice(running, 0, 0, count, 1), whole(b, {}, 1)});
}

// The length that all bags have, where the offsets are a range by it that ends with the indices.
std::optional<Expr> length_of_all(const Builder& b, const Value& offsets, Expr indices) {
  const std::optional<Expr> start = b.index_of(offsets);
  const std::optional<Expr> length = start ? linear_coefficient(*start, print(axis(0))) : std::nullopt;
  if (!length || !(*start - *length * axis(0)).is(0) || !b.same_size(*length * offsets.type.shape.at(0), indices)) return std::nullopt;
  if (!provably_nonnegative(*length - 1, b.known_sizes())) return std::nullopt;
  return length;
}

struct Bags {
  Value indices;               ///< i64
  Value bag;                   ///< of each index
  Expr count;                  ///< of bags
  Value kept;                  ///< bool: the index is not the padding
  std::optional<Expr> length;  ///< of each bag, where it is one

  // The entries v of each bag combined; `base`, which changes nothing, where it has none.
  Value combined(Builder& b, const Value& base, const Value& v, Combiner combiner) const {
    if (!length) return into_rows(b, base, bag, v, combiner);
    Shape shape = v.type.shape;
    shape[0] = *length;
    shape.insert(shape.begin(), count);
    return b.reduce(combiner, b.reshape(v, shape), {1}, false);
  }

  // v[i0, ...] where the index counts, else `fill`.
  Value masked(Builder& b, const Value& v, double fill) const {
    Value mask = rank_of(v) == 1 ? kept : b.remap(kept, v.type.shape, {axis(0)});
    Value other = is_float(v.type.dtype) ? constant_like(b, v, fill) : whole(b, {}, static_cast<int64_t>(fill));
    return b.apply(Fn::where, {mask, v, other});
  }
  // How many indices of each bag count.
  Value sizes(Builder& b) const { return combined(b, whole(b, {count}, 0), masked(b, whole(b, indices.type.shape, 1), 0), Combiner::sum); }
};

Value kept_indices(Builder& b, const Call& call, const Value& indices) {
  int64_t padding = call.integer("padding_idx", -1);
  return b.apply(Fn::ne, {indices, whole(b, {}, padding)});
}

// Negative indices are errors here: they are moved out of range.
Value checked_indices(Builder& b, const Value& given, Expr rows) {
  Value indices = b.cast(given, DType::i64);
  return b.apply(Fn::where, {b.apply(Fn::lt, {indices, whole(b, {}, 0)}), size_value(b, DType::i64, rows), indices});
}

// Whether ATen sums the rows by its fast path, which ends the last bag at the last offset where that is given; else the bag takes all the rest.
bool ends_at_last_offset(const Call& call, int64_t mode) {
  const DType dtype = call.tensor("weight").type.dtype;
  if (mode == kBagMax || dtype == DType::f64 || call.integer("padding_idx", -1) >= 0) return false;
  std::vector<Expr> strides{call.strides("weight").at(1)};
  if (call.has("per_sample_weights")) strides.push_back(call.strides("per_sample_weights").at(0));
  for (const Expr& stride : strides) {
    DEPLO_SUPPORT(stride.is_constant(), "include_last_offset and a stride of {}", print(stride));
    if (!stride.is(1)) return false;
  }
  return true;
}

std::vector<Value> embedding_bag(Builder& b, const Call& call) {
  Value weight = call.tensor("weight");
  DEPLO_SUPPORT(is_float(weight.type.dtype), "a table of {}", to_string(weight.type.dtype));
  Value table = as_compute(b, weight);
  for (const char* name : {"scale_grad_by_freq", "sparse"}) call.ignore(name);  // of the gradient
  int64_t mode = call.integer("mode", kBagSum);
  Value offsets = call.tensor("offsets");
  // The last offset is the end of the last bag.
  std::optional<Value> end;
  if (call.boolean("include_last_offset", false)) {
    const Expr count = offsets.type.shape.at(0) - 1;
    if (ends_at_last_offset(call, mode)) end = b.cast(b.remap(offsets, {}, {count}), DType::i64);
    offsets = b.slice(offsets, 0, 0, count, 1);
  }
  Value indices = checked_indices(b, call.tensor("indices"), table.type.shape.at(0));
  Expr count = call.result().shape.at(0);
  const Expr all = indices.type.shape.at(0);
  const std::optional<Expr> length = length_of_all(b, offsets, all);
  // An index before the first offset has no bag.
  Value bag = length ? b.index(DType::i64, {all}, floordiv(axis(0), *length)) : checked_indices(b, bags_of(b, offsets, all), count);
  Bags bags{indices, bag, count, kept_indices(b, call, indices), length};
  DEPLO_SUPPORT(b.same_size(bags.count, offsets.type.shape[0]), "{} bags for {} offsets", print(bags.count), print(offsets.type.shape[0]));
  Value rows = rows_at(b, table, indices);
  if (auto scale = call.optional_tensor("per_sample_weights")) {
    Value s = b.cast(*scale, rows.type.dtype);
    rows = b.apply(Fn::mul, {rows, b.remap(s, rows.type.shape, {axis(0)})});
  }
  Shape shape = call.result().shape;
  Value sizes = bags.sizes(b);
  Value result, winners;
  if (mode == kBagMax) {
    // What is greater than the greatest so far takes its place: NaN stays where it comes first, and is passed over elsewhere.
    Value last = size_value(b, DType::i64, indices.type.shape[0]);
    Value number = b.apply(Fn::where, {b.apply(Fn::eq, {rows, rows}), rows, constant_like(b, rows, -std::numeric_limits<double>::infinity())});
    Value start = bags.combined(
        b, b.broadcast(last, {count}),
        b.apply(Fn::where, {bags.kept, b.index(DType::i64, indices.type.shape, axis(0)), b.broadcast(last, indices.type.shape)}), Combiner::min);
    Value begins = b.remap(start, shape, {axis(0)});
    Value leader = entries_at(b, rows, b.apply(Fn::where, {b.apply(Fn::lt, {begins, last}), begins, whole(b, {}, 0)}), {Expr::symbol("j"), axis(1)});
    Value no_number = b.apply(Fn::bit_and, {b.apply(Fn::lt, {begins, last}), b.apply(Fn::ne, {leader, leader})});
    Value lowest = b.constant(rows.type.dtype, shape, -std::numeric_limits<double>::infinity());
    Value highest = bags.combined(b, lowest, bags.masked(b, number, -std::numeric_limits<double>::infinity()), Combiner::max);
    Value empty = b.remap(b.apply(Fn::eq, {sizes, whole(b, {}, 0)}), shape, {axis(0)});
    result = b.apply(Fn::where, {empty, constant_like(b, highest, 0), b.apply(Fn::where, {no_number, leader, highest})});
    // The first of the equal ones wins.
    Value position = b.index(DType::i64, rows.type.shape, axis(0));
    Value wins = b.apply(Fn::bit_and, {b.apply(Fn::eq, {number, rows_at(b, highest, bags.bag)}), b.remap(bags.kept, rows.type.shape, {axis(0)})});
    Value first = bags.combined(b, b.broadcast(last, shape), b.apply(Fn::where, {wins, position, b.broadcast(last, rows.type.shape)}), Combiner::min);
    first = b.apply(Fn::where, {no_number, begins, first});
    Value found = b.apply(Fn::lt, {first, last});
    Value winner = entries_at(b, indices, b.apply(Fn::where, {found, first, whole(b, {}, 0)}), {Expr::symbol("j")});
    winners = b.apply(Fn::where, {found, winner, whole(b, {}, 0)});
  } else {
    DEPLO_SUPPORT(mode == kBagSum || mode == kBagMean, "mode {}", mode);
    Bags summed = bags;  // the gradient of a mean, and what it divides by, count what comes after the end, too
    if (end) summed.kept = b.apply(Fn::bit_and, {bags.kept, b.apply(Fn::lt, {b.index(DType::i64, indices.type.shape, axis(0)), *end})});
    result = summed.combined(b, b.constant(rows.type.dtype, shape, 0), summed.masked(b, rows, 0), Combiner::sum);
    if (mode == kBagMean) {
      Value divisor = b.cast(b.apply(Fn::max, {sizes, whole(b, {}, 1)}), rows.type.dtype);
      result = b.apply(Fn::div, {result, b.remap(divisor, shape, {axis(0)})});
    }
  }
  // What the gradient reads; nothing where ATen leaves it out.
  auto extra = [&](int k, const Value& v) {
    TensorType type = call.result(k);
    if (type.shape.size() == v.type.shape.size() && b.same_shape(type.shape, v.type.shape)) return b.cast(v, type.dtype);
    return b.constant_int(type.dtype, type.shape, 0);
  };
  // In sums, ATen counts nothing.
  Value counts = mode == kBagSum ? b.broadcast(whole(b, {}, 0), {count}) : sizes;
  return {conform(b, result, call.result()), extra(1, bags.bag), extra(2, counts), extra(3, mode == kBagMax ? winners : counts)};
}

// The bags of a gradient: as the forward gave them, or anew where ATen's forward leaves them out (on its fast path). Indices after the end of the
// last bag count for nothing; ATen reads memory for them that is not the gradient's.
Bags given_bags(Builder& b, const Call& call, const Value& indices, Expr count) {
  Value given = call.tensor("offset2bag");
  Bags bags{indices, given, count, kept_indices(b, call, indices), {}};
  std::optional<Value> offsets = call.optional_tensor("offsets");
  if (!offsets || b.same_shape(given.type.shape, indices.type.shape)) {
    bags.bag = b.cast(given, DType::i64);
    return bags;
  }
  bags.bag = bags_of(b, *offsets, indices.type.shape.at(0));
  if (b.same_size(offsets->type.shape.at(0), count)) return bags;
  Value inside = b.apply(Fn::lt, {bags.bag, size_value(b, DType::i64, count)});
  bags.kept = b.apply(Fn::bit_and, {bags.kept, inside});
  bags.bag = b.apply(Fn::where, {inside, bags.bag, whole(b, {}, 0)});
  return bags;
}

std::vector<Value> embedding_bag_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad"));
  Expr rows = call.size("num_weights");
  int64_t mode = call.integer("mode");
  TensorType type = call.result();
  Value total = b.constant(grad.type.dtype, type.shape, 0);
  Value indices = b.cast(call.tensor("indices"), DType::i64);
  // Eager divides by the frequencies of other rows: the i-th index instead of the i-th different one.
  DEPLO_SUPPORT(!call.boolean("scale_grad_by_freq"), "scale_grad_by_freq");
  DEPLO_SUPPORT(!call.boolean("sparse", false), "a sparse gradient");
  if (mode == kBagMax) {
    for (const char* name : {"offset2bag", "per_sample_weights", "padding_idx", "offsets"}) call.ignore(name);
    // Each feature of a bag goes to the row that won; those of empty bags were zero.
    Value winners = call.tensor("maximum_indices");
    Value sizes = call.tensor("bag_size");
    Value nonempty = b.apply(Fn::gt, {b.cast(sizes, DType::i64), whole(b, {}, 0)});
    Value share = b.apply(Fn::where, {b.remap(nonempty, grad.type.shape, {axis(0)}), grad, constant_like(b, grad, 0)});
    Scatter scatter;
    scatter.combiner = Combiner::sum;
    scatter.updates = share.name;
    scatter.axes = axis_names(2);
    scatter.indirects.push_back({"j", winners.name, axes_from(0, 2), rows, true});
    scatter.index = {Expr::symbol("j"), axis(1)};
    return {conform(b, b.scatter(std::move(scatter), total), type)};
  }
  call.ignore("maximum_indices");
  Bags bags = given_bags(b, call, indices, grad.type.shape.at(0));
  Value sizes = call.tensor("bag_size");
  if (mode == kBagMean) {
    Value divisor = b.cast(b.apply(Fn::max, {b.cast(sizes, DType::i64), whole(b, {}, 1)}), grad.type.dtype);
    grad = b.apply(Fn::div, {grad, b.remap(divisor, grad.type.shape, {axis(0)})});
  }
  Value share = rows_at(b, grad, bags.bag);
  if (auto scale = call.optional_tensor("per_sample_weights")) {
    Value s = b.cast(*scale, share.type.dtype);
    share = b.apply(Fn::mul, {share, b.remap(s, share.type.shape, {axis(0)})});
  }
  return {conform(b, into_rows(b, total, indices, bags.masked(b, share, 0), Combiner::sum), type)};
}

std::vector<Value> per_sample_weights_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad"));
  Value weight = b.cast(call.tensor("weight"), grad.type.dtype);
  Value indices = b.cast(call.tensor("indices"), DType::i64);
  DEPLO_SUPPORT(call.integer("mode") == kBagSum, "mode {}", call.integer("mode"));
  Bags bags = given_bags(b, call, indices, grad.type.shape.at(0));
  Value product = b.apply(Fn::mul, {rows_at(b, grad, bags.bag), rows_at(b, weight, indices)});
  return {conform(b, bags.masked(b, b.reduce(Combiner::sum, product, {1}, false), 0), call.result())};
}

}  // namespace

const std::vector<Row>& embedding_bag_rows() {
  static const std::vector<Row> rows{
      {"aten._embedding_bag.default", embedding_bag},
      {"aten._embedding_bag_backward.default", embedding_bag_backward},
      {"aten._embedding_bag_dense_backward.default", embedding_bag_backward},
      {"aten._embedding_bag_forward_only.default", embedding_bag},
      {"aten._embedding_bag_per_sample_weights_backward.default", per_sample_weights_backward},
  };
  return rows;
}

}  // namespace deplo::rules
