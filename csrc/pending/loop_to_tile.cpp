#include "base/error.h"
#include "lower/lower.h"

namespace deplo {

tile_ir::Module lower_loop_to_tile(const loop_ir::Module& /*module*/, const PassContext& /*context*/) {
  throw UnsupportedError("lowering not built: loop_to_tile");
}

}  // namespace deplo
