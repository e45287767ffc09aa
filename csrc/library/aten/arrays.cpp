#include "library/aten/arrays.h"

#include <ATen/EmptyTensor.h>

#include "base/error.h"
#include "library/aten/call.h"
#include "library/aten/types.h"

namespace deplo::aten {
namespace {

at::Tensor contiguous_as(const at::Tensor& tensor, c10::ScalarType type) {
  at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), type);
  return copy.copy_(tensor.detach());
}

at::Tensor to_wide_tensor(const Array& array) {
  at::IntArrayRef shape(array.shape);
  auto wide = is_float(array.dtype) ? c10::ScalarType::Double : c10::ScalarType::Long;
  at::Tensor tensor = at::detail::empty_cpu(shape, wide);
  if (is_float(array.dtype))
    std::copy(array.floats.begin(), array.floats.end(), static_cast<double*>(tensor.mutable_data_ptr()));
  else
    std::copy(array.ints.begin(), array.ints.end(), static_cast<int64_t*>(tensor.mutable_data_ptr()));
  return tensor;
}

}  // namespace

Array to_array(const at::Tensor& tensor) {
  DType dtype = from_scalar_type(tensor.scalar_type());
  Array array = Array::zeros(dtype, tensor.sizes().vec());
  at::Tensor copy = contiguous_as(tensor, is_float(dtype) ? c10::ScalarType::Double : c10::ScalarType::Long);
  auto count = static_cast<size_t>(tensor.numel());
  if (is_float(dtype))
    std::copy_n(static_cast<const double*>(copy.const_data_ptr()), count, array.floats.begin());
  else
    std::copy_n(static_cast<const int64_t*>(copy.const_data_ptr()), count, array.ints.begin());
  return array;
}

at::Tensor to_tensor(const Array& array) { return contiguous_as(to_wide_tensor(array), to_scalar_type(array.dtype)); }

at::Tensor to_exact_tensor(const Array& array) { return is_float(array.dtype) ? to_wide_tensor(array) : to_tensor(array); }

LibraryCall aten_library(Mode mode) {
  return [mode](const std::string& op, const std::vector<std::pair<std::string, Attribute>>& arguments, const std::map<std::string, Array>& arrays) {
    AtenCall call(op, arguments);
    auto tensor_of = [&](const std::string& name) {
      const Array& array = arrays.at(name);
      return mode == Mode::exact ? to_exact_tensor(array) : to_tensor(array);
    };
    std::vector<Array> results;
    for (const at::Tensor& result : call.run(tensor_of, [](Expr size) { return size.value(); }))
      results.push_back(result.defined() ? to_array(result) : Array::zeros(DType::boolean, {0}));
    return results;
  };
}

}  // namespace deplo::aten
