#pragma once

// Runs CUDA C++ text on a CPU, for tests: one block after another, its threads as fibers that switch at __syncthreads().
// Include this before the text, and write DEPLO_KERNEL(name) after it for each kernel; link emulator.cpp.

#include <math.h>

#include <utility>

#define __global__
#ifdef DEPLO_JUDGED
#define __device__ __attribute__((always_inline))  // so that each access of a kernel has a place of its own in the text
#define DEPLO_UNWATCHED __attribute__((no_sanitize("kernel-address")))
#else
#define __device__
#define DEPLO_UNWATCHED
#endif
// One block runs at a time, so its shared memory may be static. Where the launch gives its size, it is declared `extern __shared__`, which whoever
// compiles the text for a CPU replaces by `extern`.
#define __shared__ static __attribute__((section("deplo_shared_arrays")))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads)
#define __grid_constant__
#define __restrict__ __restrict

struct deplo_dim3 {
  unsigned x, y, z;
};
extern deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;
extern double deplo_shared[];

void __syncthreads();
unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lane);
unsigned __shfl_sync(unsigned mask, unsigned value, int lane);
unsigned __shfl_up_sync(unsigned mask, unsigned value, int lane);

// What the prelude's functions of hardware instructions do here; a warp's threads meet at those of matrices.
void deplo_emulate_copy(void* to, const void* from, int bytes);  // of 16; the others are 0
void deplo_emulate_copy_commit();
void deplo_emulate_copy_wait(int pending);
void deplo_emulate_mma_tf32(float* const* sums, const unsigned* a, unsigned b0, unsigned b1);
void deplo_emulate_load_matrix(const void* row, unsigned* registers, int count, bool transposed);
void deplo_emulate_mma(float* const* sums, const unsigned* a, unsigned b0, unsigned b1, bool is_bf16);
void deplo_emulate_mma_bytes(int* const* sums, const unsigned* a, unsigned b0, unsigned b1, bool a_signed, bool b_signed);
// Flags that count arrivals and bytes of copies (mbarrier), copies of tiles that they wait for, and products of tiles by groups of 128 threads.
unsigned deplo_emulate_address(const void* shared);
void deplo_emulate_flag_start(long long* flag, int arrivals);
void deplo_emulate_flag_arrive(long long* flag, int bytes);
void deplo_emulate_flag_wait(long long* flag, int parity);
void deplo_emulate_copy_tile(void* tile, const void* map, const int* at, long long* flag);
void deplo_emulate_group_multiply(float* const* sums, int columns, unsigned long long a, unsigned long long b, bool turned_a, bool turned_b,
                                  bool is_bf16);
void deplo_emulate_group_multiply_rows(float* const* sums, int columns, const unsigned* rows, unsigned long long b, bool turned_b, bool is_bf16);
void deplo_emulate_group_multiply_bytes(int* const* sums, int columns, unsigned long long a, unsigned long long b, bool a_signed, bool b_signed);
void deplo_emulate_group_commit();
void deplo_emulate_group_wait(int pending);

/// What the emulated driver writes into a tensor map.
struct deplo_emulated_map {
  unsigned long long address, extents[5], strides[5];  // strides in bytes
  unsigned box[5], dimensions, bytes;                  // of an element
};
static_assert(sizeof(deplo_emulated_map) <= 128);

template <class T>
inline T atomicAdd(T* place, T value) {
  T old = *place;
  *place = old + value;
  return old;
}

struct deplo_emulated_launch {
  deplo_dim3 grid, block;
  unsigned shared_bytes;
  const char* judge;  // the file that what was found is added to; null: nothing is watched
  bool late;          // asynchronous copies take place when they are waited for, not at once
  bool reversed;      // threads run in turn between barriers, in order or the other way round: a missing barrier shows as a difference
};

/// Runs body(context) for every thread. False if the judge finds a race or a read of unwritten shared memory, the kernel wrote beyond shared_bytes of
/// dynamic shared memory, or its threads wait at barriers or for values that others of the block or of their warp never reach.
bool deplo_run(const char* kernel, const deplo_emulated_launch& launch, void (*body)(void*), void* context);

template <class... Args, std::size_t... I>
DEPLO_UNWATCHED void deplo_call(void (*kernel)(Args...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Args*>(arguments[I])...);
}

template <class... Args>
bool deplo_launch(const char* name, void (*kernel)(Args...), const deplo_emulated_launch& launch, void** arguments) {
  struct Call {
    void (*kernel)(Args...);
    void** arguments;
  } call{kernel, arguments};
  return deplo_run(
      name, launch,
      [](void* context) DEPLO_UNWATCHED {
        auto* c = static_cast<Call*>(context);
        deplo_call(c->kernel, c->arguments, std::index_sequence_for<Args...>());
      },
      &call);
}

/// What launches a kernel, its arguments as cuLaunchKernel takes them.
#define DEPLO_KERNEL(name) \
  extern "C" bool deplo_launch_##name(const deplo_emulated_launch* launch, void** arguments) { return deplo_launch(#name, name, *launch, arguments); }
