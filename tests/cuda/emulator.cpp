#include "emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "judge.h"

deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;
double deplo_shared[(256 << 10) / sizeof(double)];

namespace {

constexpr unsigned kWarp = 32;

struct Fiber {
  enum class State : unsigned char { ready, at_barrier, at_exchange, done };
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  deplo_dim3 thread;
  State state = State::ready;
  unsigned number = 0;  // in the block
  unsigned given = 0;   // at an exchange
  unsigned line = 0;    // of it: the lane asked for, and how
  unsigned taken[kWarp] = {};
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
  current->state = Fiber::State::done;
  swapcontext(&current->context, &scheduler);
}

void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  deplo_judge::set_thread(fiber.number, fiber.stack.get(), kStack);
  swapcontext(&scheduler, &fiber.context);
  deplo_judge::set_thread(0, nullptr, 0);
}

/// The threads of a warp meet at an exchange, all of them at the same one, and go on with each other's values. False if they do not meet.
bool release_warps(std::vector<Fiber>& fibers, bool& released) {
  using State = Fiber::State;
  for (size_t first = 0; first < fibers.size(); first += kWarp) {
    size_t count = std::min<size_t>(kWarp, fibers.size() - first);
    size_t waiting = 0;
    for (size_t k = 0; k < count; ++k) waiting += fibers[first + k].state == State::at_exchange;
    if (waiting == 0) continue;
    if (waiting < kWarp) return false;
    for (size_t k = 0; k < count; ++k) {
      Fiber& f = fibers[first + k];
      if (f.line != fibers[first].line) return false;
      for (size_t other = 0; other < kWarp; ++other) f.taken[other] = fibers[first + other].given;
      f.state = State::ready;
    }
    released = true;
  }
  return true;
}

/// All threads of a block, from barrier to barrier. A barrier or an exchange that only some of them reach is an error of the kernel.
bool run_block(std::vector<Fiber>& fibers, bool reversed) {
  using State = Fiber::State;
  for (Fiber& f : fibers) {
    f.state = State::ready;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, entry, 0);
  }
  for (;;) {
    for (size_t k = 0; k < fibers.size(); ++k) {
      Fiber& f = fibers[reversed ? fibers.size() - 1 - k : k];
      if (f.state == State::ready) resume(f);
    }
    bool released = false;
    if (!release_warps(fibers, released)) return false;
    if (released) continue;
    size_t done = 0;
    for (const Fiber& f : fibers) done += f.state == State::done;
    if (done == fibers.size()) return true;
    if (done != 0) return false;
    for (Fiber& f : fibers) {
      f.state = State::ready;
      deplo_judge::pass_barrier(f.number);
    }
  }
}

void wait(Fiber::State state) {
  Fiber* self = current;
  self->state = state;
  swapcontext(&self->context, &scheduler);
}

unsigned exchange(unsigned value, unsigned line, unsigned lane) {
  Fiber* self = current;
  self->given = value;
  self->line = line;
  wait(Fiber::State::at_exchange);
  return self->taken[lane % kWarp];
}

}  // namespace

void __syncthreads() { wait(Fiber::State::at_barrier); }

unsigned __shfl_xor_sync(unsigned /*mask*/, unsigned value, int lane) {
  return exchange(value, static_cast<unsigned>(lane), (current->number % kWarp) ^ static_cast<unsigned>(lane));
}

unsigned __shfl_sync(unsigned /*mask*/, unsigned value, int lane) {
  return exchange(value, kWarp + static_cast<unsigned>(lane), static_cast<unsigned>(lane));
}

bool deplo_run(const char* kernel, const deplo_emulated_launch& launch, void (*body)(void*), void* context) {
  auto [grid, block, shared_bytes, judge, reversed] = launch;
  gridDim = grid;
  blockDim = block;
  current_body = body;
  current_context = context;
  std::vector<Fiber> fibers(static_cast<size_t>(block.x) * block.y * block.z);
  for (size_t t = 0; t < fibers.size(); ++t) {
    fibers[t].stack = std::make_unique_for_overwrite<char[]>(kStack);
    fibers[t].number = static_cast<unsigned>(t);
    fibers[t].thread = {static_cast<unsigned>(t % block.x), static_cast<unsigned>(t / block.x % block.y),
                        static_cast<unsigned>(t / block.x / block.y)};
  }
  deplo_judge::start(judge != nullptr, static_cast<unsigned>(fibers.size()), shared_bytes);
  auto* shared = reinterpret_cast<unsigned char*>(deplo_shared);
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; ++bx) {
        blockIdx = {bx, by, bz};
        std::memset(shared, kUntouched, shared_bytes + kGuard);
        deplo_judge::start_block();
        if (!run_block(fibers, reversed)) return false;
        deplo_judge::end_block();
        for (size_t at = 0; at < kGuard; ++at)
          if (shared[shared_bytes + at] != kUntouched) return false;
      }
  std::string first;
  const deplo_judge::Counts counts = deplo_judge::end(first);
  if (judge) {
    std::ofstream(judge, std::ios::app) << kernel << " global_bytes=" << counts.global_bytes << " global_sectors=" << counts.global_sectors
                                        << " global_requests=" << counts.global_requests << " shared_requests=" << counts.shared_requests
                                        << " shared_ways=" << counts.shared_ways << " races=" << counts.races << " unwritten=" << counts.unwritten
                                        << (first.empty() ? "" : " first: ") << first << "\n";
  }
  return first.empty();
}
