#include <algorithm>
#include <utility>

#include "lower/tile_to_kernel/lowering.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;

namespace {

bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

// Lane l of the result r is lane r of row l. The butterfly of Eklundh (1972), in log2(lanes) steps.
std::vector<std::string> Lowering::transpose(std::vector<std::string> rows) {
  Type type = emit_.type(rows[0]);
  int lanes = type.lanes;
  auto pairs = [&](int distance, auto&& first, auto&& second) {
    std::vector<std::string> next(rows.size());
    for (int r = 0; r < lanes; ++r) {
      if (r & distance) continue;
      std::vector<int> low;
      std::vector<int> high;
      for (int j = 0; j < lanes; ++j) {
        low.push_back(first(j));
        high.push_back(second(j));
      }
      const auto a = static_cast<size_t>(r);
      const auto b = static_cast<size_t>(r + distance);
      next[a] = emit_.shuffle(type, rows[a], rows[b], low);
      next[b] = emit_.shuffle(type, rows[a], rows[b], high);
    }
    rows = std::move(next);
  };
  // Rows d apart exchange groups of d lanes; after all d, row r holds column r.
  for (int d = 1; d < lanes; d *= 2) {
    auto from = [&](int j, int odd) { return ((j & d) ? lanes + (j & ~d) : j) + odd; };
    pairs(d, [&](int j) { return from(j, 0); }, [&](int j) { return from(j, d); });
  }
  return rows;
}

// A strided load inside an unrolled axis along which it is contiguous: as many rows as lanes are read whole and transposed in registers.
// Every index of the axis asks for the same rows, and equal values have one name.
std::optional<std::string> Lowering::transposed_load(const Load& s, const Memory& memory, size_t copy) {
  if (unrolls_.empty() || !s.guard.empty() || lanes_->diverges || !lanes_->copies[copy].mask.empty() || !is_power_of_two(width()))
    return std::nullopt;
  const Unrolling& unrolling = unrolls_.back();
  int64_t at = unrolling.at - unrolling.lo;
  int64_t block = unrolling.lo + at / width() * width();
  if (width() < 4 || block + width() > unrolling.hi) return std::nullopt;
  Expr now = names_.at(unrolling.axis);
  auto offset_at = [&](int64_t index) {
    names_[unrolling.axis] = index;
    return flat(memory, s.index);
  };
  Expr start = offset_at(block);
  bool contiguous = true;
  for (int64_t k = 1; k < width() && contiguous; ++k) contiguous = offset_at(block + k) - start == Expr(k);
  names_[unrolling.axis] = now;
  for (const auto& [symbol, value] : placeholders_) contiguous = contiguous && !uses(start, symbol);
  auto stride = linear_coefficient(start, lanes_->symbol);
  if (!contiguous || !stride || stride->is(0) || stride->is(1) || stride->is(-1)) return std::nullopt;
  std::vector<std::string> rows;
  for (int l = 0; l < width(); ++l) {
    kernel_ir::Load row;
    row.type = {s.dtype, width()};
    row.buffer = memory.name;
    row.offset = tidy(simplify(substitute(start, {{lanes_->symbol, lanes_->copies[copy].base + l}}), ranges_));
    rows.push_back(emit_.load(s.name, std::move(row)));
  }
  return transpose(std::move(rows))[static_cast<size_t>(unrolling.at - block)];
}

}  // namespace deplo::tile_to_kernel
