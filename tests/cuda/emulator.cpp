#include "emulator.h"

#include <ucontext.h>

#include <cstring>
#include <memory>
#include <vector>

deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;
double deplo_shared[(256 << 10) / sizeof(double)];

namespace {

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  deplo_dim3 thread;
  bool done = false;
};

constexpr size_t kStack = 64 << 10;
constexpr size_t kGuard = 4 << 10;  // bytes behind dynamic shared memory that must stay as they are
constexpr unsigned char kUntouched = 0xa7;

ucontext_t scheduler;
Fiber* current = nullptr;
void (*current_body)(void*) = nullptr;
void* current_context = nullptr;

void entry() {
  current_body(current_context);
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  swapcontext(&scheduler, &fiber.context);
}

/// All threads of a block, from barrier to barrier. A barrier that only some of them reach is an error of the kernel.
bool run_block(std::vector<Fiber>& fibers, bool reversed) {
  for (Fiber& f : fibers) {
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, entry, 0);
  }
  for (size_t left = fibers.size(); left > 0;) {
    size_t before = left;
    for (size_t k = 0; k < fibers.size(); ++k) {
      Fiber& f = fibers[reversed ? fibers.size() - 1 - k : k];
      if (f.done) continue;
      resume(f);
      if (f.done) --left;
    }
    if (left != 0 && left != before) return false;
  }
  return true;
}

}  // namespace

void __syncthreads() {
  Fiber* self = current;
  swapcontext(&self->context, &scheduler);
}

bool deplo_run(const deplo_emulated_launch& launch, void (*body)(void*), void* context) {
  auto [grid, block, shared_bytes, reversed] = launch;
  gridDim = grid;
  blockDim = block;
  current_body = body;
  current_context = context;
  std::vector<Fiber> fibers(static_cast<size_t>(block.x) * block.y * block.z);
  for (size_t t = 0; t < fibers.size(); ++t) {
    fibers[t].stack = std::make_unique_for_overwrite<char[]>(kStack);
    fibers[t].thread = {static_cast<unsigned>(t % block.x), static_cast<unsigned>(t / block.x % block.y),
                        static_cast<unsigned>(t / block.x / block.y)};
  }
  auto* shared = reinterpret_cast<unsigned char*>(deplo_shared);
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; ++bx) {
        blockIdx = {bx, by, bz};
        std::memset(shared, kUntouched, shared_bytes + kGuard);
        if (!run_block(fibers, reversed)) return false;
        for (size_t at = 0; at < kGuard; ++at)
          if (shared[shared_bytes + at] != kUntouched) return false;
      }
  return true;
}
