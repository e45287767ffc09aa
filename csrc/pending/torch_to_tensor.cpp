#include "lower/torch_to_tensor.h"

#include "base/error.h"

namespace deplo {

tensor_ir::Graph lower_torch_to_tensor(const torch_ir::Graph& /*graph*/) { throw UnsupportedError("lowering not built: torch_to_tensor"); }

}  // namespace deplo
