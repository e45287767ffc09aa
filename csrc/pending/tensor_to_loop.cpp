#include "base/error.h"
#include "lower/lower.h"

namespace deplo {

loop_ir::Module lower_tensor_to_loop(const tensor_ir::Graph& /*graph*/, const PassContext& /*context*/) {
  throw UnsupportedError("lowering not built: tensor_to_loop");
}

}  // namespace deplo
