#include "base/array.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/text.h"

namespace deplo {

Array Array::filled(DType dtype, std::vector<int64_t> shape, Scalar value) {
  Array array{dtype, std::move(shape), {}, {}};
  auto n = static_cast<size_t>(array.count());
  if (is_float(dtype))
    array.floats.assign(n, value.f);
  else
    array.ints.assign(n, value.i);
  return array;
}

Array Array::zeros(DType dtype, std::vector<int64_t> shape) { return filled(dtype, std::move(shape), {dtype, 0, 0}); }

Array Array::undefined(DType dtype, std::vector<int64_t> shape) {
  Array array = zeros(dtype, std::move(shape));
  array.make_undefined();
  return array;
}

void Array::make_undefined() {
  for (double& x : floats) x = std::numeric_limits<double>::quiet_NaN();
  for (int64_t& x : ints) x = dtype == DType::boolean ? 1 : Scalar::of_int(dtype, -0x5a5a5a5a5a5a5a5b).i;
}

int64_t Array::count() const {
  int64_t n = 1;
  for (int64_t extent : shape) n *= extent;
  return n;
}

Scalar Array::get(int64_t flat) const {
  auto at = static_cast<size_t>(flat);
  return is_float(dtype) ? Scalar{dtype, floats.at(at), 0} : Scalar{dtype, 0, ints.at(at)};
}

void Array::set(int64_t flat, const Scalar& value) {
  auto at = static_cast<size_t>(flat);
  if (is_float(dtype))
    floats.at(at) = value.f;
  else
    ints.at(at) = value.i;
}

int64_t Array::flat_index(std::span<const int64_t> index) const {
  auto text = [](std::span<const int64_t> v) {
    std::vector<std::string> parts;
    for (int64_t x : v) parts.push_back(std::to_string(x));
    return joined(parts);
  };
  DEPLO_ASSERT(index.size() == shape.size(), "index ({}) for an array of shape ({})", text(index), text(shape));
  int64_t flat = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    DEPLO_ASSERT(index[d] >= 0 && index[d] < shape[d], "index ({}) is out of range for shape ({})", text(index), text(shape));
    flat = flat * shape[d] + index[d];
  }
  return flat;
}

}  // namespace deplo
