#include "analysis/casts.h"

#include <cstdint>

namespace deplo::analysis {

bool is_lossless(DType from, DType to) {
  if (from == to || from == DType::boolean || to == DType::boolean) return false;
  if (is_float(from)) return is_float(to) && size_of(from) < size_of(to);
  const int64_t bits = size_of(from) * 8 - (is_signed(from) ? 1 : 0);
  // A significand of n bits holds every integer of n bits, and the next power of two.
  const int64_t room = to == DType::f64    ? 53
                       : to == DType::f32  ? 24
                       : to == DType::f16  ? 11
                       : to == DType::bf16 ? 8
                                           : size_of(to) * 8 - (is_signed(to) ? 1 : 0);
  return size_of(from) < size_of(to) && bits <= room && (is_signed(to) || !is_signed(from));
}

}  // namespace deplo::analysis
