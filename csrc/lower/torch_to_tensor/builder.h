#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lower/torch_to_tensor/sizes.h"
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
  Value broadcast(const Value& a, const Shape& shape);  ///< right-aligned, sizes 1 expand
  Value permute(const Value& a, const std::vector<int64_t>& dims);
  Value reshape(const Value& a, const Shape& shape);  ///< same elements in row-major order
  Value unsqueeze(const Value& a, int64_t dim);
  Value squeeze(const Value& a, int64_t dim);  ///< dim must have size 1
  Value slice(const Value& a, int64_t dim, Expr start, Expr length, Expr step);
  Value concatenate(const std::vector<Value>& parts, int64_t dim);
  /// a with `fill` around it: before[d] and after[d] elements per dimension (may be negative: crops).
  Value pad(const Value& a, const std::vector<Expr>& before, const std::vector<Expr>& after, double fill);
  Value scatter(tensor_ir::Scatter scatter, const Value& base);
  /// sum over k of a[..., k] * b[..., k] in at least float32: both operands given with the same full index space
  /// (free axes then reduce axes, as maps), reduced over the trailing `reduce_axes` dimensions.
  Value contract(const Value& a, const Value& b, int reduce_axes, DType result);
  /// Whether contract() rounds operands of float32 to the 10 bits of tf32, as PyTorch's switches let a GPU's products do.
  void set_tf32(bool rounds) { tf32_ = rounds; }

  Value pad(const Value& a, const std::vector<Expr>& before, const std::vector<Expr>& after, Scalar fill);
  Value constant(const Shape& shape, const Scalar& value);
  /// An ATen call inside a rule (random bits), whose results are row-major.
  std::vector<Value> library(std::string op, std::vector<std::pair<std::string, Attribute>> arguments, const std::vector<TensorType>& results,
                             std::string reason);
  /// True if the sizes are equal, provably under the ranges and facts.
  bool same_size(Expr a, Expr b) const;
  bool same_shape(const Shape& a, const Shape& b) const;
  /// The dimensions of more than one element, from the innermost in memory outward; nothing unless the elements fill one block of memory.
  std::optional<std::vector<size_t>> memory_order(const Shape& shape, const std::vector<Expr>& strides) const;
  /// The dimensions from the innermost in memory outward of what is made like a tensor of these strides, whose gaps and overlaps vanish; all
  /// of them or those of more than one element; nothing where sizes decide.
  std::optional<std::vector<size_t>> order_like(const Shape& shape, const std::vector<Expr>& strides) const;
  /// PyTorch's broadcast of two shapes; UnsupportedError where it depends on a symbol's value.
  Shape common_shape(const Shape& a, const Shape& b) const;
  Expr simplified(Expr e, const Shape& shape) const;  ///< e over i0, i1, ... of `shape`

  DType dtype_of(const Value& v) const { return v.type.dtype; }
  const std::vector<Ref<tensor_ir::Op>>& ops() const { return ops_; }
  /// The expression over i0, i1, ... that index() made `v` of; nothing for other values.
  std::optional<Expr> index_of(const Value& v) const;
  void set_provenance(std::string provenance) { provenance_ = std::move(provenance); }
  /// Known ranges of the symbols, for rules that must decide something about a symbolic size.
  const Ranges& ranges() const { return known_.ranges; }
  const KnownSizes& known_sizes() const { return known_; }
  void set_known_sizes(KnownSizes known) { known_ = std::move(known); }
  std::vector<Ref<tensor_ir::Op>> take();
  /// Names that fresh values must not have.
  void reserve(const std::string& name) { reserved_.insert(name); }
  size_t mark() const { return ops_.size(); }
  /// Forgets the ops since `mark`.
  void roll_back(size_t mark) { ops_.resize(mark); }
  /// Says where in the text the ops since `mark` come from.
  void locate_since(size_t mark, Location location);
  /// Renames values that ops since `mark` define.
  void rename_since(size_t mark, const std::map<std::string, std::string>& names);
  void append(Ref<tensor_ir::Op> op) { ops_.push_back(std::move(op)); }

 private:
  std::string fresh();
  Value add(Ref<tensor_ir::Op> op);
  Value rounded_to_tf32(const Value& a);
  std::vector<Ref<tensor_ir::Op>> ops_;
  std::string provenance_;
  bool tf32_ = false;
  KnownSizes known_;
  std::set<std::string> reserved_;
  std::map<std::string, Scalar> constants_;  ///< values that are one literal everywhere
  int next_ = 0;
};

/// The coordinate symbol of dimension d in Builder's maps: i0, i1, ...
Expr axis(int64_t d);

/// The arguments of one ATen call, by schema name. A missing argument has its default; asking for one of another kind
/// throws UnsupportedError naming op and argument. Every argument must have been asked for (or `ignore`d) when the rule
/// returns, else the call becomes library: nothing is dropped silently.
class Call {
 public:
  /// A value as PyTorch sees it: its type, and the value whose memory it shows (itself unless it is a view).
  struct TorchValue {
    torch_ir::TensorType type;
    std::string base;
  };
  using TorchValues = std::map<std::string, TorchValue>;
  Call(const torch_ir::Node& node, const std::map<std::string, Value>& values, const TorchValues& torch_values);
  const std::string& op() const;
  Value tensor(std::string_view name) const;
  std::optional<Value> optional_tensor(std::string_view name) const;
  std::vector<Value> tensors(std::string_view name) const;
  std::vector<std::optional<Value>> optional_tensors(std::string_view name) const;
  Expr size(std::string_view name, std::optional<Expr> fallback = std::nullopt) const;  ///< integer, maybe symbolic
  std::optional<Expr> optional_size(std::string_view name) const;
  int64_t integer(std::string_view name, std::optional<int64_t> fallback = std::nullopt) const;  ///< a constant
  std::vector<Expr> sizes(std::string_view name, std::optional<std::vector<Expr>> fallback = std::nullopt) const;
  std::vector<int64_t> integers(std::string_view name, std::optional<std::vector<int64_t>> fallback = std::nullopt) const;
  bool has(std::string_view name) const;  ///< given and not None; does not count as asking for it
  bool is_tensor(std::string_view name) const;
  bool is_symbolic(std::string_view name) const;  ///< an integer that is no constant
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
  std::vector<Expr> strides(std::string_view name) const;
  const std::string& value_name(std::string_view name) const;  ///< of a tensor argument, in Torch IR
  std::vector<std::string> unused_arguments() const;

 private:
  const torch_ir::Node& node_;
  const std::map<std::string, Value>& values_;
  const TorchValues& torch_values_;
  mutable std::vector<std::string> used_;
  const Attribute* find(std::string_view name) const;  ///< null if missing or None; marks it used
  [[noreturn]] void fail(std::string_view name, std::string_view expected) const;
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
/// Overloads left to ATen on purpose, with the reason; empty for the others.
std::string_view library_reason(std::string_view overload);
/// True for calls whose meaning depends on the strides of their arguments: they cannot be left to ATen, which would see deplo's layout.
bool needs_layout(std::string_view overload);
/// True for calls whose results show the memory of their first argument.
bool is_view(std::string_view overload);

// Shared by families.
/// Result dtype of PyTorch's promotion is call.result().dtype; brings tensor and scalar operands to `dtype` by casts.
Value as_compute(Builder& b, const Value& v);  ///< casts f16/bf16 to f32, leaves the rest
/// The tensor or number argument `name` in `dtype`; a number (maybe a symbolic integer) as a rank-0 value. For a result of 16 bits that is computed
/// in float32, tensors that promotion narrows (whole numbers, wider floats without dimensions) are rounded to the result's dtype first.
Value operand(Builder& b, const Call& call, std::string_view name, DType dtype);
/// A number argument as a rank-0 value of `dtype`, of `fallback` if it is missing.
Value scalar_operand(Builder& b, const Call& call, std::string_view name, DType dtype, std::optional<double> fallback = std::nullopt);
/// PyTorch's promotion of two dtypes of the same category of operands.
DType promote(DType a, DType b);
/// PyTorch's common dtype of the tensor and number arguments `names`: tensors with dimensions rule over 0-d ones, those over numbers.
DType common_dtype(const Call& call, const std::vector<std::string_view>& names);

}  // namespace deplo::rules
