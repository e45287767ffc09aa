#pragma once

#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "target/cuda/shared_arrays.h"

namespace deplo {

/// CUDA C++ text of a kernel whose loops were mapped to blocks and threads, or of all kernels of a module. No header is included. A kernel takes its
/// params, symbols (long long), the error word (int*) and, if it has scratch_bytes, memory of that many bytes for each block, or null if the launch
/// gives that many bytes of dynamic shared memory; then a tensor map for each factor of its products of tiles.
std::string cuda_text(const kernel_ir::Kernel& kernel);
std::string cuda_text(const kernel_ir::Module& module);

}  // namespace deplo
