#include "lower/torch_to_tensor/dtypes.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "base/error.h"

namespace deplo::rules {
namespace {

using DTypes = std::vector<DType>;

/// What the kernels of some operators ask of the dtypes of some arguments, numbers among them; arguments that are not there ask nothing.
struct Demand {
  std::string_view packets;  ///< of operators, each between bars
  std::vector<std::string_view> arguments;
  bool (*holds)(const DTypes& dtypes);
  std::string_view text;
};

bool is_short_float(DType dtype) { return is_float(dtype) && size_of(dtype) == 2; }
bool is_true_integer(DType dtype) { return !is_float(dtype) && dtype != DType::boolean; }

bool same(const DTypes& dtypes) { return std::adjacent_find(dtypes.begin(), dtypes.end(), std::not_equal_to<>()) == dtypes.end(); }
bool no_bool(const DTypes& dtypes) { return std::find(dtypes.begin(), dtypes.end(), DType::boolean) == dtypes.end(); }
bool not_all_bool(const DTypes& dtypes) {
  return std::any_of(dtypes.begin(), dtypes.end(), [](DType dtype) { return dtype != DType::boolean; });
}
bool a_float(const DTypes& dtypes) { return std::any_of(dtypes.begin(), dtypes.end(), is_float); }
bool no_float(const DTypes& dtypes) { return std::none_of(dtypes.begin(), dtypes.end(), is_float); }
bool points(const DTypes& dtypes) { return is_float(dtypes[0]) || dtypes[0] == DType::u8; }
bool no_integer(const DTypes& dtypes) { return std::none_of(dtypes.begin(), dtypes.end(), is_true_integer); }
bool places(const DTypes& dtypes) { return dtypes[0] == DType::i64 || dtypes[0] == DType::i32; }
bool long_places(const DTypes& dtypes) { return dtypes[0] == DType::i64; }
bool classes(const DTypes& dtypes) { return dtypes[0] == DType::i64 || dtypes[0] == DType::u8; }

// ATen/native/cpu/mixed_data_type.h: the input's dtype, or float32 beside 16 bits.
bool norm(const DTypes& dtypes) {
  const DTypes parameters(dtypes.begin() + 1, dtypes.end());
  return same(dtypes) || (same(parameters) && is_short_float(dtypes[0]) && parameters[0] == DType::f32);
}

const std::vector<Demand>& demands() {
  constexpr std::string_view kSame = "one dtype";
  constexpr std::string_view kNoBool = "no bool";
  constexpr std::string_view kFloat = "floats";
  static const std::vector<Demand> all{
      {"|sub|rsub|", {"self", "other"}, no_bool, kNoBool},
      {"|abs|ceil|floor|round|trunc|trace|threshold|max_pool2d_with_indices|reflection_pad1d|", {"self"}, no_bool, kNoBool},
      {"|addcmul|", {"self", "tensor1", "tensor2"}, not_all_bool, kNoBool},
      {"|pow|", {"self", "exponent"}, not_all_bool, kNoBool},
      {"|clamp|clamp_min|clamp_max|", {"self", "min", "max"}, not_all_bool, kNoBool},
      {"|bitwise_left_shift|bitwise_right_shift|", {"self", "other"}, not_all_bool, kNoBool},
      {"|searchsorted|", {"sorted_sequence"}, no_bool, kNoBool},
      {"|lerp|_prelu_kernel|log_sigmoid_forward|adaptive_max_pool2d|adaptive_max_pool3d|nll_loss_forward|nll_loss2d_forward|",
       {"self"},
       a_float,
       kFloat},
      {"|frac|gelu|glu|hardshrink|hardsigmoid|hardswish|mish|silu|softplus|", {"self"}, a_float, kFloat},
      {"|max_pool2d_with_indices_backward|_softmax_backward_data|_log_softmax_backward_data|", {"grad_output"}, a_float, kFloat},
      {"|nextafter|hypot|logaddexp|logaddexp2|", {"self", "other"}, a_float, kFloat},
      {"|bitwise_and|bitwise_or|bitwise_xor|bitwise_not|bitwise_left_shift|bitwise_right_shift|", {"self", "other"}, no_float, "integers or bool"},
      {"|upsample_nearest1d|upsample_nearest2d|upsample_nearest3d|_upsample_nearest_exact1d|_upsample_nearest_exact2d|_upsample_nearest_exact3d|",
       {"self"},
       points,
       "floats or uint8"},
      {"|im2col|", {"self"}, no_integer, "floats or bool"},
      {"|mm|", {"self", "mat2"}, same, kSame},
      {"|_cdist_forward|", {"x1", "x2"}, same, kSame},
      {"|mv|", {"self", "vec"}, same, kSame},
      {"|addmm|", {"self", "mat1", "mat2"}, same, kSame},
      {"|addmv|", {"self", "mat", "vec"}, same, kSame},
      {"|addbmm|baddbmm|", {"self", "batch1", "batch2"}, same, kSame},
      {"|dot|vdot|", {"self", "tensor"}, same, kSame},
      {"|linear|convolution|", {"input", "weight", "bias"}, same, kSame},
      {"|index_put|_index_put_impl|_unsafe_index_put|", {"self", "values"}, same, kSame},
      {"|index_add|index_copy|index_reduce|put|", {"self", "source"}, same, kSame},
      {"|index_add|index_reduce|index_select|gather|scatter|scatter_add|scatter_reduce|", {"index"}, places, "int64 or int32"},
      {"|index_fill|index_copy|", {"index"}, long_places, "int64"},
      {"|nll_loss_forward|nll_loss2d_forward|", {"target"}, classes, "int64 or uint8"},
      {"|grid_sampler_2d|grid_sampler_3d|", {"input", "grid"}, same, kSame},
      {"|_embedding_bag|_embedding_bag_forward_only|", {"weight", "per_sample_weights"}, same, kSame},
      {"|binary_cross_entropy|", {"self", "target", "weight"}, same, kSame},
      {"|huber_loss|soft_margin_loss|", {"self", "target"}, same, kSame},
      {"|_softmax_backward_data|_log_softmax_backward_data|", {"grad_output", "output"}, same, kSame},
      {"|native_layer_norm|native_group_norm|native_batch_norm|_native_batch_norm_legit|_native_batch_norm_legit_no_training|"
       "_native_batch_norm_legit_functional|_batch_norm_with_update|_batch_norm_with_update_functional|_batch_norm_no_update|",
       {"input", "weight", "bias", "running_mean", "running_var"},
       norm,
       "one dtype, or float32 beside an input of 16 bits"},
  };
  return all;
}

/// Operators that move elements, or convert them: all that there is for float8.
constexpr std::string_view kMoves =
    "|_to_copy|_reshape_alias|_unsafe_view|alias|as_strided|cat|clone|contiguous|copy|detach|diagonal|expand|flip|index|index_select|lift|lift_fresh|"
    "permute|repeat|reshape|roll|select|slice|split|split_with_sizes|squeeze|stack|t|transpose|unbind|unfold|unsqueeze|view|embedding|";

std::optional<DType> dtype_of(const torch_ir::Node& node, std::string_view name, const Call::TorchValues& values) {
  for (const auto& [key, attribute] : node.arguments) {
    if (key != name) continue;
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) return values.at(value->name).type.dtype;
    if (std::holds_alternative<bool>(attribute.value)) return DType::boolean;
    if (std::holds_alternative<double>(attribute.value)) return DType::f32;
    if (std::holds_alternative<Expr>(attribute.value)) return DType::i64;
  }
  return std::nullopt;
}

}  // namespace

void refuse_dtypes(const torch_ir::Node& node, const Call::TorchValues& values) {
  const size_t start = node.op.find('.') + 1;
  const std::string packet = "|" + node.op.substr(start, node.op.find('.', start) - start) + "|";
  if (kMoves.find(packet) == std::string_view::npos) {
    auto is_f8 = [&](const std::string& name) { return values.at(name).type.dtype == DType::f8; };
    bool some = false;
    for (const auto& result : node.results) some = some || (result.type && result.type->dtype == DType::f8);
    for (const auto& [key, attribute] : node.arguments) {
      if (const auto* value = std::get_if<ValueName>(&attribute.value)) some = some || is_f8(value->name);
    }
    DEPLO_SUPPORT(!some, "arithmetic in float8");
  }
  for (const Demand& demand : demands()) {
    if (demand.packets.find(packet) == std::string_view::npos) continue;
    DTypes dtypes;
    for (std::string_view name : demand.arguments)
      if (auto dtype = dtype_of(node, name, values)) dtypes.push_back(*dtype);
    if (dtypes.empty() || demand.holds(dtypes)) continue;
    std::string given;
    for (DType dtype : dtypes) given += (given.empty() ? "" : ", ") + std::string(to_string(dtype));
    throw UnsupportedError(fmt::format("eager mode wants {} here, not {}", demand.text, given));
  }
}

}  // namespace deplo::rules
