#pragma once

// Runs CUDA C++ text on a CPU, for tests: one block after another, its threads as fibers that switch at __syncthreads().
// Include this before the text, and write DEPLO_KERNEL(name) after it for each kernel; link emulator.cpp.

#include <math.h>

#include <utility>

#define __global__
#define __device__
// One block runs at a time, so its shared memory may be static. Where the launch gives its size, it is declared `extern __shared__`, which whoever
// compiles the text for a CPU replaces by `extern`.
#define __shared__ static
#define __restrict__ __restrict

struct deplo_dim3 {
  unsigned x, y, z;
};
extern deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;
extern double deplo_shared[];

void __syncthreads();

inline float atomicAdd(float* place, float value) {
  float old = *place;
  *place = old + value;
  return old;
}

struct deplo_emulated_launch {
  deplo_dim3 grid, block;
  unsigned shared_bytes;
  bool reversed;  // threads run in turn between barriers, in order or the other way round: a missing barrier shows as a difference
};

/// Runs body(context) for every thread. False if the kernel wrote beyond shared_bytes of dynamic shared memory, or its threads wait at barriers that
/// others of the block never reach.
bool deplo_run(const deplo_emulated_launch& launch, void (*body)(void*), void* context);

template <class... Args, std::size_t... I>
void deplo_call(void (*kernel)(Args...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Args*>(arguments[I])...);
}

template <class... Args>
bool deplo_launch(void (*kernel)(Args...), const deplo_emulated_launch& launch, void** arguments) {
  struct Call {
    void (*kernel)(Args...);
    void** arguments;
  } call{kernel, arguments};
  return deplo_run(
      launch,
      [](void* context) {
        auto* c = static_cast<Call*>(context);
        deplo_call(c->kernel, c->arguments, std::index_sequence_for<Args...>());
      },
      &call);
}

/// What launches a kernel, its arguments as cuLaunchKernel takes them.
#define DEPLO_KERNEL(name) \
  extern "C" bool deplo_launch_##name(const deplo_emulated_launch* launch, void** arguments) { return deplo_launch(name, *launch, arguments); }
