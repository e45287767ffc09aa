// Packages of deplo.export with LibTorch's tensors: a header over deplo_runtime.h.

#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "deplo_runtime.h"

namespace deplo {

/// A loaded package. Any thread may call; results carry no gradient.
class Model {
 public:
  /// `features`: use no more than these ("sse", "avx2", "avx512"; empty: all). `threads`: 0 for all processors. Throws std::runtime_error.
  explicit Model(const std::string& path, const std::string& features = "", int threads = 0) {
    deplo_options options{};
    options.features = features.empty() ? nullptr : features.c_str();
    options.threads = threads;
    model_.reset(deplo_open(path.c_str(), &options), deplo_close);
    if (!model_) throw std::runtime_error(deplo_last_error());
  }

  const deplo_model* get() const { return model_.get(); }

  /// Tensors on the CPU and integers in the order of deplo_input_name; tensors, integers and, for constants, their JSON. Throws std::runtime_error.
  std::vector<c10::IValue> run(const std::vector<c10::IValue>& inputs) const {
    std::vector<deplo_value> values;
    for (const c10::IValue& input : inputs) values.push_back(value_of(input));
    std::shared_ptr<deplo_results> results(deplo_run(model_.get(), values.data(), values.size()), deplo_free_results);
    if (!results) throw std::runtime_error(deplo_last_error());
    std::vector<c10::IValue> outputs;
    for (size_t k = 0; k < deplo_output_count(model_.get()); ++k) outputs.push_back(ivalue_of(*deplo_result(results.get(), k), results, inputs));
    return outputs;
  }

  /// For models whose inputs and outputs are all tensors.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs) const {
    std::vector<at::Tensor> outputs;
    for (const c10::IValue& output : run({inputs.begin(), inputs.end()})) outputs.push_back(output.toTensor());
    return outputs;
  }

 private:
  static constexpr c10::ScalarType kTypes[] = {c10::kBool, c10::kByte, c10::kChar,     c10::kShort, c10::kInt,
                                               c10::kLong, c10::kHalf, c10::kBFloat16, c10::kFloat, c10::kDouble};

  static deplo_value value_of(const c10::IValue& input) {
    deplo_value value{};
    if (input.isInt()) {
      value.kind = DEPLO_INTEGER;
      value.integer = input.toInt();
      return value;
    }
    const at::Tensor& tensor = input.toTensor();
    if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided) throw std::runtime_error("deplo: an input is no dense tensor on the CPU");
    int dtype = 0;
    while (dtype < 10 && kTypes[dtype] != tensor.scalar_type()) ++dtype;
    if (dtype == 10) throw std::runtime_error(std::string("deplo: an input has the dtype ") + c10::toString(tensor.scalar_type()));
    value.dtype = static_cast<deplo_dtype>(dtype);
    value.rank = static_cast<int32_t>(tensor.dim());
    value.data = tensor.data_ptr();
    value.sizes = tensor.sizes().data();
    value.strides = tensor.strides().data();
    return value;
  }

  /// The tensor keeps the results' memory; one that is an input is that tensor.
  static c10::IValue ivalue_of(const deplo_value& value, const std::shared_ptr<deplo_results>& results, const std::vector<c10::IValue>& inputs) {
    if (value.kind == DEPLO_INTEGER) return value.integer;
    if (value.kind == DEPLO_CONSTANT) return std::string(value.json);
    for (const c10::IValue& input : inputs)
      if (input.isTensor() && value.data && input.toTensor().data_ptr() == value.data && input.toTensor().sizes().data() == value.sizes) return input;
    return at::from_blob(
        value.data, {value.sizes, static_cast<size_t>(value.rank)}, {value.strides, static_cast<size_t>(value.rank)}, [results](void* /*data*/) {},
        at::TensorOptions().dtype(kTypes[value.dtype]));
  }

  std::shared_ptr<deplo_model> model_;
};

}  // namespace deplo
