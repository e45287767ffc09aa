#pragma once

// Runs CUDA C++ text on a CPU, for tests: one block after another, its threads as fibers that switch at __syncthreads().
// Include this before the text; then call deplo_launch(grid, block, [&] { kernel(args...); }), or deplo_launch_kernel with pointers to the
// arguments, as the driver's cuLaunchKernel takes them.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
// One block runs at a time, so its shared memory may be static.
#define __shared__ static
#define __restrict__ __restrict

struct deplo_dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;

namespace deplo_emulator {

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  deplo_dim3 thread;
  bool done = false;
};

inline ucontext_t scheduler;
inline Fiber* current = nullptr;
inline const std::function<void()>* body = nullptr;

inline void entry() {
  (*body)();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  swapcontext(&scheduler, &fiber.context);
}

}  // namespace deplo_emulator

inline void __syncthreads() {
  deplo_emulator::Fiber* self = deplo_emulator::current;
  swapcontext(&self->context, &deplo_emulator::scheduler);
}

inline float atomicAdd(float* place, float value) {
  float old = *place;
  *place = old + value;
  return old;
}

/// Between barriers every thread of a block runs in turn, in order or (reversed) the other way round: a missing barrier shows as a difference.
inline void deplo_launch(deplo_dim3 grid, deplo_dim3 block, const std::function<void()>& kernel, bool reversed = false) {
  using namespace deplo_emulator;
  constexpr size_t kStack = 64 << 10;
  gridDim = grid;
  blockDim = block;
  body = &kernel;
  size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
  std::vector<Fiber> fibers(threads);
  for (Fiber& f : fibers) f.stack = std::make_unique<char[]>(kStack);
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; ++bx) {
        blockIdx = {bx, by, bz};
        for (size_t t = 0; t < threads; ++t) {
          Fiber& f = fibers[t];
          f.thread = {static_cast<unsigned>(t % block.x), static_cast<unsigned>(t / block.x % block.y), static_cast<unsigned>(t / block.x / block.y)};
          f.done = false;
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.get();
          f.context.uc_stack.ss_size = kStack;
          f.context.uc_link = &scheduler;
          makecontext(&f.context, entry, 0);
        }
        for (size_t left = threads; left > 0;) {
          for (size_t k = 0; k < threads; ++k) {
            Fiber& f = fibers[reversed ? threads - 1 - k : k];
            if (f.done) continue;
            resume(f);
            if (f.done) --left;
          }
        }
      }
}

namespace deplo_emulator {

template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void** arguments, std::index_sequence<I...> /*positions*/) {
  kernel(*static_cast<Args*>(arguments[I])...);
}

}  // namespace deplo_emulator

template <class... Args>
void deplo_launch_kernel(void (*kernel)(Args...), deplo_dim3 grid, deplo_dim3 block, void** arguments, bool reversed) {
  deplo_launch(grid, block, [&] { deplo_emulator::call(kernel, arguments, std::index_sequence_for<Args...>()); }, reversed);
}
