#pragma once

#include <vector>

#include "kernel_ir/ir.h"

namespace deplo {

/// Shared memory that every GPU gives to a block without being asked for more.
constexpr int64_t kStaticSharedBytes = 48 << 10;

/// The kernel's products of tiles, in the order of their tensor maps: of a, then of b.
std::vector<const TileProducts*> tile_products(const kernel_ir::Kernel& kernel);
/// Whether it has products of groups of threads.
bool multiplies_in_groups(const kernel_ir::Kernel& kernel);
/// Bytes at whose multiples the kernel's shared arrays begin.
int64_t shared_alignment(const kernel_ir::Kernel& kernel);
/// Bytes of a shared array, up to where the next one may begin.
int64_t shared_bytes_of(const kernel_ir::Alloc& array, int64_t alignment);
/// Bytes of dynamic shared memory in which the kernel's shared arrays lie, where they are too large to be declared, or swizzled; 0: they are
/// declared.
int64_t dynamic_shared_bytes(const kernel_ir::Kernel& kernel);

}  // namespace deplo
