#include "emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "judge.h"

deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;
double deplo_shared[(256 << 10) / sizeof(double)];

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kWords = 6;  // that a thread gives at once
constexpr int kCopyBytes = 16;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  enum class State : unsigned char { ready, at_barrier, at_exchange, done };
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  deplo_dim3 thread;
  State state = State::ready;
  unsigned number = 0;                   // in the block
  unsigned given[kWords] = {};           // at an exchange
  unsigned line = 0;                     // of it: the lane asked for, and how
  std::deque<std::vector<Copy>> groups;  // of copies under way
  std::vector<Copy> open;
};

constexpr size_t kStack = 512 << 10;
constexpr size_t kGuard = 4 << 10;  // bytes behind dynamic shared memory that must stay as they are
constexpr unsigned char kUntouched = 0xa7;

ucontext_t scheduler;
Fiber* current = nullptr;
bool late = false;
// What the threads of each warp gave where they last met: they meet again after all have taken it.
std::vector<unsigned> taken;
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
      std::copy(f.given, f.given + kWords, &taken[(first + k) * kWords]);
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
    f.groups.clear();
    f.open.clear();
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

/// Waits for the other threads of the warp. What thread t gave begins at word t * kWords of the result.
const unsigned* meet(const unsigned* words, unsigned count, unsigned line) {
  Fiber* self = current;
  std::copy(words, words + count, self->given);
  self->line = line;
  wait(Fiber::State::at_exchange);
  return &taken[static_cast<size_t>(self->number / kWarp * kWarp) * kWords];
}

unsigned exchange(unsigned value, unsigned line, unsigned lane) { return meet(&value, 1, line)[lane % kWarp * kWords]; }

// Places of exchanges that no lane tells apart.
constexpr unsigned kAtMma = 2 * kWarp;
constexpr unsigned kAtLoad = kAtMma + 2;

void take_place(const Copy& copy) {
  std::memset(copy.to, 0, kCopyBytes);
  if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
}

float widened(unsigned word, size_t half, bool is_bf16) {
  const auto bits = static_cast<uint16_t>(word >> (16 * half));
  float value = 0;
  if (is_bf16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31)
    value = mantissa ? NAN : INFINITY;
  else
    value = std::ldexp(static_cast<float>(exponent ? mantissa | 1024 : mantissa), std::max(exponent, 1) - 25);
  return bits >> 15 ? -value : value;
}

}  // namespace

void __syncthreads() { wait(Fiber::State::at_barrier); }

unsigned __shfl_xor_sync(unsigned /*mask*/, unsigned value, int lane) {
  return exchange(value, static_cast<unsigned>(lane), (current->number % kWarp) ^ static_cast<unsigned>(lane));
}

unsigned __shfl_sync(unsigned /*mask*/, unsigned value, int lane) {
  return exchange(value, kWarp + static_cast<unsigned>(lane), static_cast<unsigned>(lane));
}

void deplo_emulate_copy(void* to, const void* from, int bytes) {
  deplo_judge::copy(to, from, static_cast<size_t>(bytes), __builtin_return_address(0));
  const Copy copy{to, from, static_cast<size_t>(bytes)};
  if (!late) take_place(copy);
  current->open.push_back(copy);
}

void deplo_emulate_copy_commit() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

void deplo_emulate_copy_wait(int pending) {
  for (auto& groups = current->groups; groups.size() > static_cast<size_t>(pending); groups.pop_front())
    for (const Copy& copy : groups.front()) {
      if (late) take_place(copy);
      deplo_judge::copied(copy.to);
    }
}

void deplo_emulate_load_matrix(const void* row, unsigned* registers, int count, bool transposed) {
  const auto address = reinterpret_cast<uintptr_t>(row);
  const auto lane = current->number % kWarp;
  // Only these threads' addresses are used.
  if (lane < static_cast<unsigned>(count) * 8) deplo_judge::read_row(row, __builtin_return_address(0));
  const unsigned words[] = {static_cast<unsigned>(address), static_cast<unsigned>(address >> 32)};
  const unsigned* all = meet(words, 2, kAtLoad + static_cast<unsigned>(count) * 2 + transposed);
  for (unsigned m = 0; m < static_cast<unsigned>(count); ++m)
    for (unsigned pair = 0; pair < 2; ++pair) {
      const unsigned across = lane / 4;
      const unsigned along = lane % 4 * 2 + pair;
      const unsigned* from = all + (m * 8 + (transposed ? along : across)) * kWords;
      uint16_t element = 0;
      std::memcpy(&element, reinterpret_cast<const char*>(uintptr_t{from[1]} << 32 | from[0]) + 2 * (transposed ? across : along), sizeof element);
      registers[m] = (pair ? registers[m] : 0) | static_cast<unsigned>(element) << (16 * pair);
    }
}

void deplo_emulate_mma(float* const* sums, const unsigned* a, unsigned b0, unsigned b1, bool is_bf16) {
  const unsigned lane = current->number % kWarp;
  const unsigned words[] = {a[0], a[1], a[2], a[3], b0, b1};
  const unsigned* all = meet(words, kWords, kAtMma + is_bf16);
  for (unsigned s = 0; s < 4; ++s) {
    const unsigned row = lane / 4;
    const unsigned column = lane % 4 * 2 + s % 2;
    double sum = *sums[s];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned part = k % 8 / 2;
      sum += static_cast<double>(widened(all[(row * 4 + part) * kWords + k / 8 * 2 + s / 2], k % 2, is_bf16)) *
             static_cast<double>(widened(all[(column * 4 + part) * kWords + 4 + k / 8], k % 2, is_bf16));
    }
    *sums[s] = static_cast<float>(sum);
  }
}

bool deplo_run(const char* kernel, const deplo_emulated_launch& launch, void (*body)(void*), void* context) {
  auto [grid, block, shared_bytes, judge, late_copies, reversed] = launch;
  late = late_copies;
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
  taken.assign(fibers.size() * kWords, 0);
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
