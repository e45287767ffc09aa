#pragma once

#include <string>
#include <vector>

#include "kernel_ir/ir.h"

namespace deplo {

/// CUDA C++ text of a kernel whose loops were mapped to blocks and threads, or of all kernels of a module. No header is included. A kernel takes its
/// params, symbols (long long), the error word (int*) and, if it has scratch_bytes, memory of that many bytes for each block, or null if the launch
/// gives that many bytes of dynamic shared memory; then a tensor map for each factor of its products of tiles.
std::string cuda_text(const kernel_ir::Kernel& kernel);
std::string cuda_text(const kernel_ir::Module& module);

/// Shared memory that every GPU gives to a block without being asked for more.
constexpr int64_t kStaticSharedBytes = 48 << 10;
/// The kernel's products of tiles, in the order of their tensor maps: of a, then of b.
std::vector<const TileProducts*> tile_products(const kernel_ir::Kernel& kernel);
/// Bytes of dynamic shared memory in which the kernel's shared arrays lie, where they are too large to be declared; 0: they are declared.
int64_t dynamic_shared_bytes(const kernel_ir::Kernel& kernel);

}  // namespace deplo
