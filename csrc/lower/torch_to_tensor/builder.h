#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor_ir/ir.h"
#include "torch_ir/ir.h"

namespace deplo::rules {

using tensor_ir::TensorType;
using tensor_ir::Value;
using Shape = std::vector<Expr>;

/// Appends Tensor IR ops under fresh names. Shapes must agree exactly unless a method says that it broadcasts.
class Builder {
 public:
  Value constant(DType dtype, const Shape& shape, double value);
  Value constant_int(DType dtype, const Shape& shape, int64_t value);
  /// An index expression over axes i0, i1, ... (see axis()) of `shape`, as dtype.
  Value index(DType dtype, const Shape& shape, Expr value);
  /// fn with operands broadcast to their common shape first (PyTorch's rule); operands must already have one dtype.
  /// The result has the operands' dtype, or bool for predicates; `where` takes (bool, T, T).
  Value apply(Fn fn, const std::vector<Value>& operands);
  Value apply(Fn fn, const Value& a, double literal);  ///< the literal in a's dtype
  Value cast(const Value& a, DType dtype);             ///< no op if it has the dtype already
  Value bitcast(const Value& a, DType dtype);
  Value reduce(Combiner combiner, const Value& a, std::vector<int64_t> axes, bool keepdim);  ///< negative axes allowed; empty: all
  std::vector<Value> reduce_many(Combiner combiner, const std::vector<Value>& operands, std::vector<int64_t> axes, bool keepdim);
  std::vector<Value> scan(Combiner combiner, const std::vector<Value>& operands, int64_t axis);
  Value map(const TensorType& type, tensor_ir::IndexMap map);
  /// result[i0, ...] = a[index over i0, i1, ...]; always in range.
  Value remap(const Value& a, const Shape& shape, const std::vector<Expr>& index);
  Value broadcast(const Value& a, const Shape& shape);            ///< right-aligned, sizes 1 expand
  Value permute(const Value& a, const std::vector<int64_t>& dims);
  Value reshape(const Value& a, const Shape& shape);              ///< same elements in row-major order
  Value unsqueeze(const Value& a, int64_t dim);
  Value squeeze(const Value& a, int64_t dim);                     ///< dim must have size 1
  Value slice(const Value& a, int64_t dim, Expr start, Expr length, Expr step);
  Value concatenate(const std::vector<Value>& parts, int64_t dim);
  /// a with `fill` around it: before[d] and after[d] elements per dimension (may be negative: crops).
  Value pad(const Value& a, const std::vector<Expr>& before, const std::vector<Expr>& after, double fill);
  Value scatter(tensor_ir::Scatter scatter, const Value& base);
  /// sum over k of a[..., k] * b[..., k] in at least float32: both operands given with the same full index space
  /// (free axes then reduce axes, as maps), reduced over the trailing `reduce_axes` dimensions.
  Value contract(const Value& a, const Value& b, int reduce_axes, DType result);

  DType dtype_of(const Value& v) const { return v.type.dtype; }
  const std::vector<Ref<tensor_ir::Op>>& ops() const { return ops_; }
  void set_provenance(std::string provenance) { provenance_ = std::move(provenance); }
  /// Known ranges of the symbols, for rules that must decide something about a symbolic size.
  const Ranges& ranges() const { return ranges_; }
  void set_ranges(Ranges ranges) { ranges_ = std::move(ranges); }
  std::vector<Ref<tensor_ir::Op>> take();

 private:
  std::string fresh();
  Value add(Ref<tensor_ir::Op> op);
  std::vector<Ref<tensor_ir::Op>> ops_;
  std::string provenance_;
  Ranges ranges_;
  int next_ = 0;
};

/// The coordinate symbol of dimension d in Builder's maps: i0, i1, ...
Expr axis(int64_t d);

/// The arguments of one ATen call, by schema name. A missing argument has its default; asking for one of another kind
/// throws UnsupportedError naming op and argument. Every argument must have been asked for (or `ignore`d) when the rule
/// returns, else the call becomes library: nothing is dropped silently.
class Call {
 public:
  Call(const torch_ir::Node& node, const std::map<std::string, Value>& values);
  const std::string& op() const;
  Value tensor(std::string_view name) const;
  std::optional<Value> optional_tensor(std::string_view name) const;
  std::vector<Value> tensors(std::string_view name) const;
  std::vector<std::optional<Value>> optional_tensors(std::string_view name) const;
  Expr size(std::string_view name, std::optional<Expr> fallback = std::nullopt) const;      ///< integer, maybe symbolic
  std::optional<Expr> optional_size(std::string_view name) const;
  int64_t integer(std::string_view name, std::optional<int64_t> fallback = std::nullopt) const;  ///< a constant
  std::vector<Expr> sizes(std::string_view name, std::optional<std::vector<Expr>> fallback = std::nullopt) const;
  std::vector<int64_t> integers(std::string_view name, std::optional<std::vector<int64_t>> fallback = std::nullopt) const;
  bool has(std::string_view name) const;     ///< given and not None
  /// A number that may be bool, integer or float.
  Scalar number(std::string_view name, std::optional<double> fallback = std::nullopt) const;
  double real(std::string_view name, std::optional<double> fallback = std::nullopt) const;
  bool boolean(std::string_view name, std::optional<bool> fallback = std::nullopt) const;
  std::string word(std::string_view name, std::string fallback) const;  ///< string or bare word
  std::optional<DType> dtype(std::string_view name) const;
  void ignore(std::string_view name) const;
  /// Type of result k as PyTorch inferred it (dtype and shape are what the rule must produce).
  TensorType result(int k = 0) const;
  int result_count() const;
  bool result_used(int k) const;  ///< false if typed `none`
  /// Strides of a tensor argument or result in elements, as PyTorch sees them (as_strided, memory formats).
  std::vector<Expr> result_strides(int k = 0) const;
  std::vector<std::string> unused_arguments() const;

 private:
  const torch_ir::Node& node_;
  const std::map<std::string, Value>& values_;
  mutable std::vector<std::string> used_;
  const Attribute* find(std::string_view name) const;
};

/// A decomposition: the values of the call's results in order (results typed `none` may be omitted at the end).
/// Throws UnsupportedError for what it does not handle in full.
using Rule = std::vector<Value> (*)(Builder& b, const Call& call);
struct Row {
  std::string_view overload;  ///< "aten.add.Tensor"
  Rule rule;
};

// One table per family; table.cpp joins them.
const std::vector<Row>& pointwise_rules();
const std::vector<Row>& view_rules();
const std::vector<Row>& index_rules();
const std::vector<Row>& creation_rules();
const std::vector<Row>& reduction_rules();
const std::vector<Row>& contraction_rules();
const std::vector<Row>& convolution_rules();
const std::vector<Row>& normalization_rules();
const std::vector<Row>& attention_rules();
const std::vector<Row>& pooling_rules();
const std::vector<Row>& backward_rules();

/// The rule of an overload, or null.
Rule find_rule(std::string_view overload);
/// Overloads left to ATen on purpose, with the reason.
std::string_view library_reason(std::string_view overload);

// Shared by families.
/// Result dtype of PyTorch's promotion is call.result().dtype; brings tensor and scalar operands to `dtype` by casts.
Value as_compute(Builder& b, const Value& v);  ///< casts f16/bf16 to f32, leaves the rest

}  // namespace deplo::rules
