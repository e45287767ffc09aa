#include "base/error.h"
#include "lower/lower.h"

namespace deplo {

kernel_ir::Module lower_tile_to_kernel(const tile_ir::Module& /*module*/, const PassContext& /*context*/) {
  throw UnsupportedError("lowering not built: tile_to_kernel");
}

}  // namespace deplo
