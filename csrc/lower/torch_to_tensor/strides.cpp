#include <algorithm>
#include <optional>
#include <vector>

#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {
namespace {

enum class Inside { no, yes, either, unknown };

/// Whether dimension a of a tensor lies inside of b in memory.
Inside lies_inside(const Builder& b, const Shape& shape, const std::vector<Expr>& strides, size_t inner, size_t outer) {
  auto covers = [&](Expr wide, Expr narrow) {
    const auto times = exact_quotient(wide, narrow);
    return provably_nonnegative(wide - narrow, b.known_sizes()) || (times && provably_nonnegative(*times - 1, b.known_sizes()));
  };
  Expr si = strides[inner];
  Expr so = strides[outer];
  if (si.is(0) || so.is(0)) return Inside::either;
  if (b.same_size(si, so)) {
    if (covers(shape[outer], shape[inner])) return Inside::either;
    return covers(shape[inner], shape[outer]) ? Inside::no : Inside::unknown;
  }
  if (covers(so, si)) return Inside::yes;
  return covers(si, so) ? Inside::no : Inside::unknown;
}

}  // namespace

std::optional<std::vector<size_t>> Builder::memory_order(const Shape& shape, const std::vector<Expr>& strides) const {
  std::vector<size_t> left;
  for (size_t d = 0; d < shape.size(); ++d)
    if (!shape[d].is(1)) left.push_back(d);
  std::vector<size_t> order;
  Expr expected = 1;
  while (!left.empty()) {
    auto next = std::find_if(left.begin(), left.end(), [&](size_t d) { return same_size(strides[d], expected); });
    if (next == left.end()) return std::nullopt;
    order.push_back(*next);
    if (!shape[*next].is(0)) expected = expected * shape[*next];
    left.erase(next);
  }
  return order;
}

// As infer_dense_strides in aten/src/ATen/ExpandUtils.cpp finds them: an insertion sort that passes over broadcast dimensions.
std::optional<std::vector<size_t>> Builder::order_like(const Shape& shape, const std::vector<Expr>& strides) const {
  if (auto dense = memory_order(shape, strides)) return dense;
  std::vector<size_t> order;
  for (size_t d = shape.size(); d-- > 0;) order.push_back(d);
  for (size_t i = 1; i < order.size(); ++i) {
    size_t moving = i;
    for (size_t j = i; j-- > 0;) {
      const Inside inside = lies_inside(*this, shape, strides, order[j], order[moving]);
      if (inside == Inside::unknown) return std::nullopt;
      if (inside == Inside::yes) break;
      if (inside == Inside::either) continue;
      std::swap(order[j], order[moving]);
      moving = j;
    }
  }
  return order;
}

}  // namespace deplo::rules
