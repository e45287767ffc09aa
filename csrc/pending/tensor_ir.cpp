#include "base/error.h"
#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {

std::string print(const Graph& /*graph*/) { throw UnsupportedError("level not built: tensor"); }
Graph parse(const std::string& /*text*/, const std::string& /*file*/) { throw UnsupportedError("level not built: tensor"); }
void verify(const Graph& /*graph*/) { throw UnsupportedError("level not built: tensor"); }

}  // namespace deplo::tensor_ir
