#include "target/cuda/shared_arrays.h"

#include "kernel_ir/rewrite.h"

namespace deplo {

using namespace kernel_ir;

namespace {

constexpr int64_t kAccessBytes = 16;     // of one thread's widest access
constexpr int64_t kSwizzleBytes = 1024;  // eight lines of 128

}  // namespace

std::vector<const TileProducts*> tile_products(const Kernel& kernel) {
  std::vector<const TileProducts*> all;
  visit_all(kernel.body, [&](const Stmt& stmt) {
    if (const auto* s = std::get_if<MultiplyTiles>(&stmt.node)) all.push_back(&s->products);
  });
  return all;
}

bool multiplies_in_groups(const Kernel& kernel) {
  bool found = false;
  visit_all(kernel.body, [&](const Stmt& stmt) { found = found || std::holds_alternative<MultiplyGroup>(stmt.node); });
  return found;
}

int64_t shared_alignment(const Kernel& kernel) {
  return multiplies_in_groups(kernel) || !tile_products(kernel).empty() ? kSwizzleBytes : kAccessBytes;
}

int64_t shared_bytes_of(const Alloc& array, int64_t alignment) {
  return array.count.is_constant() ? (array.count.value() * size_of(array.dtype) + alignment - 1) / alignment * alignment : 0;
}

int64_t dynamic_shared_bytes(const Kernel& kernel) {
  const int64_t alignment = shared_alignment(kernel);
  int64_t bytes = 0;
  visit_all(kernel.body, [&](const Stmt& stmt) {
    if (const auto* array = std::get_if<Alloc>(&stmt.node); array && array->space == Space::shared) bytes += shared_bytes_of(*array, alignment);
  });
  return bytes > kStaticSharedBytes || alignment > kAccessBytes ? bytes : 0;
}

}  // namespace deplo
