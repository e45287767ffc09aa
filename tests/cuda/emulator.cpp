#include "emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "judge.h"

deplo_dim3 blockIdx, threadIdx, gridDim, blockDim;
alignas(1024) double deplo_shared[(256 << 10) / sizeof(double)];

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kWords = 6;  // that a thread gives at once
constexpr int kCopyBytes = 16;
constexpr unsigned kGroup = 128;  // threads that multiply tiles together

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Product {
  std::vector<float*> sums;
  int columns;
  unsigned long long a, b;
  bool turned_a, turned_b, is_bf16;
  std::vector<float> rows;   // the thread's two rows of 16, where a is no tile
  std::vector<int*> counts;  // sums of bytes
  bool a_signed, b_signed;
};

struct Fiber {
  enum class State : unsigned char { ready, at_barrier, at_exchange, at_flag, at_group, done };
  ucontext_t context;
  char* stack = nullptr;
  deplo_dim3 thread;
  State state = State::ready;
  unsigned number = 0;                   // in the block
  unsigned given[kWords] = {};           // at an exchange
  unsigned line = 0;                     // of it: the lane asked for, and how
  std::deque<std::vector<Copy>> groups;  // of copies under way
  std::vector<Copy> open;
  long long* flag = nullptr;  // that it waits for, at this parity
  int parity = 0;
  std::deque<std::vector<Product>> products;  // groups of them under way
  std::vector<Product> open_products;
};

struct TileCopy {
  void* tile;
  const deplo_emulated_map* map;
  int at[5];
  unsigned thread;
};

struct Flag {
  int arrivals = 0, missing = 0;
  long long bytes = 0;  // that copies still have to bring
  int phase = 0;
  std::vector<TileCopy> copies;  // that have not taken place
};
std::map<long long*, Flag> flags;

// Text of symbolic sizes has thousands of temporaries, which -O0 keeps apart.
constexpr size_t kStack = 4 << 20;
constexpr size_t kPage = 4 << 10;
constexpr size_t kGuard = 4 << 10;  // bytes behind dynamic shared memory that must stay as they are
constexpr unsigned char kUntouched = 0xa7;

/// Memory for the stacks of a block's threads, taken up where it is touched. What runs over the end of one meets a page that nobody may touch.
class Stacks {
 public:
  explicit Stacks(size_t count)
      : bytes_(count * kStack),
        begin_(static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0))) {
    if (begin_ == MAP_FAILED) throw std::bad_alloc();
    for (size_t t = 0; t < count; ++t) mprotect((*this)[t], kPage, PROT_NONE);
  }
  ~Stacks() { munmap(begin_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* operator[](size_t t) const { return begin_ + t * kStack; }

 private:
  size_t bytes_;
  char* begin_;
};

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
  deplo_judge::set_thread(fiber.number, fiber.stack, kStack);
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

bool passed(const Flag& flag, int parity) { return (flag.phase & 1) != parity; }
void take_copies(Flag& flag, int parity);

/// Threads whose flags have been raised, and groups of which all are there, go on.
void release_flags_and_groups(std::vector<Fiber>& fibers, bool& released) {
  using State = Fiber::State;
  for (Fiber& f : fibers) {
    if (f.state != State::at_flag) continue;
    take_copies(flags.at(f.flag), f.parity);
    if (!passed(flags.at(f.flag), f.parity)) continue;
    f.state = State::ready;
    released = true;
  }
  for (size_t first = 0; first + kGroup <= fibers.size(); first += kGroup) {
    const bool all = std::all_of(&fibers[first], &fibers[first] + kGroup,
                                 [&](const Fiber& f) { return f.state == State::at_group && f.line == fibers[first].line; });
    if (!all) continue;
    for (size_t k = 0; k < kGroup; ++k) fibers[first + k].state = State::ready;
    released = true;
  }
}

/// All threads of a block, from barrier to barrier. A barrier or an exchange that only some of them reach is an error of the kernel.
bool run_block(std::vector<Fiber>& fibers, bool reversed) {
  using State = Fiber::State;
  flags.clear();
  for (Fiber& f : fibers) {
    f.state = State::ready;
    f.groups.clear();
    f.open.clear();
    f.products.clear();
    f.open_products.clear();
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
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
    release_flags_and_groups(fibers, released);
    if (released) continue;
    size_t done = 0;
    for (const Fiber& f : fibers) {
      done += f.state == State::done;
      if (f.state == State::at_flag || f.state == State::at_group) return false;
    }
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
constexpr unsigned kAtLoad = kAtMma + 6;
constexpr unsigned kAtBelow = kAtLoad + 64;  // and how far below
constexpr unsigned kAtRows = kAtLoad + 10;
constexpr unsigned kAtTf32 = kAtLoad + 32;

bool misaligned = false;

/// Of what hardware reads or writes 16 bytes at a time.
void check_alignment(const void* at) { misaligned = misaligned || reinterpret_cast<uintptr_t>(at) % kCopyBytes != 0; }

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

unsigned __shfl_up_sync(unsigned /*mask*/, unsigned value, int lane) {
  const unsigned own = current->number % kWarp;
  const auto below = static_cast<unsigned>(lane);
  return exchange(value, kAtBelow + below, own >= below ? own - below : own);
}

void deplo_emulate_copy(void* to, const void* from, int bytes) {
  check_alignment(to);
  if (bytes > 0) check_alignment(from);
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
  if (lane < static_cast<unsigned>(count) * 8) {
    check_alignment(row);
    deplo_judge::read_row(row, __builtin_return_address(0));
  }
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

/// Of an operand's 32 bits matrix units look at 19.
void deplo_emulate_mma_tf32(float* const* sums, const unsigned* a, unsigned b0, unsigned b1) {
  const unsigned lane = current->number % kWarp;
  const unsigned words[] = {a[0], a[1], a[2], a[3], b0, b1};
  const unsigned* all = meet(words, kWords, kAtTf32);
  const auto number = [](unsigned word) {
    word &= 0xffffe000U;
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    return static_cast<double>(value);
  };
  for (unsigned s = 0; s < 4; ++s) {
    const unsigned row = lane / 4;
    const unsigned column = lane % 4 * 2 + s % 2;
    double sum = *sums[s];
    for (unsigned k = 0; k < 8; ++k)
      sum += number(all[(row * 4 + k % 4) * kWords + k / 4 * 2 + s / 2]) * number(all[(column * 4 + k % 4) * kWords + 4 + k / 4]);
    *sums[s] = static_cast<float>(sum);
  }
}

void deplo_emulate_mma_bytes(int* const* sums, const unsigned* a, unsigned b0, unsigned b1, bool a_signed, bool b_signed) {
  const unsigned lane = current->number % kWarp;
  const unsigned words[] = {a[0], a[1], a[2], a[3], b0, b1};
  const unsigned* all = meet(words, kWords, kAtMma + 2 + (a_signed ? 2U : 0U) + (b_signed ? 1U : 0U));
  const auto byte = [](unsigned word, unsigned at, bool is_signed) {
    const auto bits = static_cast<uint8_t>(word >> (8 * at));
    return is_signed ? static_cast<int>(static_cast<int8_t>(bits)) : static_cast<int>(bits);
  };
  for (unsigned s = 0; s < 4; ++s) {
    const unsigned row = lane / 4;
    const unsigned column = lane % 4 * 2 + s % 2;
    auto sum = static_cast<unsigned>(*sums[s]);
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned part = k % 16 / 4;
      sum += static_cast<unsigned>(byte(all[(row * 4 + part) * kWords + k / 16 * 2 + s / 2], k % 4, a_signed) *
                                   byte(all[(column * 4 + part) * kWords + 4 + k / 16], k % 4, b_signed));
    }
    *sums[s] = static_cast<int>(sum);
  }
}

unsigned deplo_emulate_address(const void* shared) {
  return static_cast<unsigned>(static_cast<const char*>(shared) - reinterpret_cast<const char*>(deplo_shared));
}

namespace {

/// Elements of 128 bytes lie in lines of them, their chunks of 16 bytes in an order that differs from line to line.
char* swizzled(unsigned long long at) { return reinterpret_cast<char*>(deplo_shared) + (at ^ ((at >> 7 & 7) << 4)); }

void complete(Flag& flag) {
  if (flag.missing > 0 || flag.bytes != 0) return;
  flag.missing = flag.arrivals;
  ++flag.phase;
  deplo_judge::raise(&flag);
}

void take_place(Flag& flag, const TileCopy& copy) {
  const deplo_emulated_map& m = *copy.map;
  const auto element = m.bytes;
  long long lines = 1;
  for (unsigned d = 1; d < m.dimensions; ++d) lines *= m.box[d];
  const unsigned long long start = deplo_emulate_address(copy.tile);
  for (long long line = 0; line < lines; ++line) {
    bool inside = true;
    unsigned long long from = m.address;
    long long rest = line;
    for (unsigned d = 1; d < m.dimensions; ++d) {
      const long long at = copy.at[d] + rest % m.box[d];
      rest /= m.box[d];
      inside = inside && at >= 0 && static_cast<unsigned long long>(at) < m.extents[d];
      from += static_cast<unsigned long long>(at) * m.strides[d];
    }
    const long long columns = inside ? std::min<long long>(m.box[0], static_cast<long long>(m.extents[0]) - copy.at[0]) : 0;
    if (columns > 0)
      deplo_judge::line_copied(reinterpret_cast<const char*>(from) + static_cast<unsigned long long>(copy.at[0]) * element,
                               static_cast<size_t>(columns) * element);
    for (unsigned column = 0; column < m.box[0]; ++column) {
      const long long at = copy.at[0] + static_cast<long long>(column);
      char* to = swizzled(start + (static_cast<unsigned long long>(line) * m.box[0] + column) * element);
      if (inside && at >= 0 && static_cast<unsigned long long>(at) < m.extents[0])
        std::memcpy(to, reinterpret_cast<const char*>(from) + static_cast<unsigned long long>(at) * element, element);
      else
        std::memset(to, 0, element);
    }
  }
  const long long bytes = lines * m.box[0] * element;
  flag.bytes -= bytes;
  deplo_judge::tile_copied(copy.tile, static_cast<size_t>(bytes), copy.thread, &flag);
  complete(flag);
}

/// Those that somebody waits for.
void take_copies(Flag& flag, int parity) {
  if (passed(flag, parity)) return;
  const std::vector<TileCopy> copies = std::move(flag.copies);
  flag.copies.clear();
  for (const TileCopy& copy : copies) take_place(flag, copy);
}

uint16_t element_of(unsigned long long descriptor, bool turned, unsigned row, unsigned k) {
  const unsigned long long start = (descriptor & 0x3fff) << 4;
  const unsigned long long leading = (descriptor >> 16 & 0x3fff) << 4;
  const unsigned long long stride = (descriptor >> 32 & 0x3fff) << 4;
  const unsigned long long at = turned ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2 : row / 8 * stride + row % 8 * 128 + k * 2;
  uint16_t bits = 0;
  std::memcpy(&bits, swizzled(start + at), sizeof bits);
  return bits;
}

int byte_of(unsigned long long descriptor, bool is_signed, unsigned row, unsigned k) {
  const unsigned long long stride = (descriptor >> 32 & 0x3fff) << 4;
  const char* at = swizzled(((descriptor & 0x3fff) << 4) + row / 8 * stride + row % 8 * 128 + k);
  return is_signed ? static_cast<signed char>(*at) : static_cast<unsigned char>(*at);
}

void take_place(const Product& p, unsigned thread) {
  const unsigned lane = thread % kWarp;
  const unsigned row = thread % kGroup / kWarp * 16 + lane / 4;
  for (size_t s = 0; s < p.counts.size(); ++s) {
    auto sum = static_cast<unsigned>(*p.counts[s]);
    const auto column = static_cast<unsigned>(s / 4 * 8 + lane % 4 * 2 + s % 2);
    for (unsigned k = 0; k < 32; ++k)
      sum += static_cast<unsigned>(byte_of(p.a, p.a_signed, row + 8 * (s / 2 % 2), k) * byte_of(p.b, p.b_signed, column, k));
    *p.counts[s] = static_cast<int>(sum);
  }
  if (!p.counts.empty()) return;
  float a[2][16];
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 16; ++k)
      a[h][k] = p.rows.empty() ? widened(element_of(p.a, p.turned_a, row + 8 * h, k), 0, p.is_bf16) : p.rows[16 * h + k];
  for (unsigned g = 0; g < static_cast<unsigned>(p.columns) / 8; ++g)
    for (unsigned c = 0; c < 2; ++c) {
      float b[16];
      for (unsigned k = 0; k < 16; ++k) b[k] = widened(element_of(p.b, p.turned_b, g * 8 + lane % 4 * 2 + c, k), 0, p.is_bf16);
      for (unsigned h = 0; h < 2; ++h) {
        float& sum = *p.sums[g * 4 + h * 2 + c];
        double exact = sum;
        for (unsigned k = 0; k < 16; ++k) exact += static_cast<double>(a[h][k]) * static_cast<double>(b[k]);
        sum = static_cast<float>(exact);
      }
    }
}

/// f(address) for each 16 bytes that a product reads.
template <class F>
void for_chunks(const Product& p, const F& f) {
  const auto factor = [&](unsigned long long descriptor, bool turned, unsigned rows) {
    for (unsigned row = 0; row < rows; row += turned ? 8 : 1)
      for (unsigned k = 0; k < 16; k += turned ? 1 : 8) {
        const unsigned long long stride = (descriptor >> 32 & 0x3fff) << 4;
        const unsigned long long leading = (descriptor >> 16 & 0x3fff) << 4;
        const unsigned long long at =
            turned ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2 : row / 8 * stride + row % 8 * 128 + k * 2;
        f(swizzled(((descriptor & 0x3fff) << 4) + at));
      }
  };
  if (p.rows.empty()) factor(p.a, p.turned_a, 64);
  factor(p.b, p.turned_b, static_cast<unsigned>(p.columns));
}

// The threads of a group meet, as do those of a warp at an exchange.
void meet_group(unsigned line) {
  current->line = line;
  wait(Fiber::State::at_group);
}

}  // namespace

void deplo_emulate_flag_start(long long* flag, int arrivals) { flags[flag] = {arrivals, arrivals, 0, 0, {}}; }

void deplo_emulate_flag_arrive(long long* flag, int bytes) {
  Flag& f = flags.at(flag);
  f.bytes += bytes;
  --f.missing;
  deplo_judge::arrive(&f, current->number);
  complete(f);
}

void deplo_emulate_flag_wait(long long* flag, int parity) {
  Flag& f = flags.at(flag);
  take_copies(f, parity);
  if (!passed(f, parity)) {
    current->flag = flag;
    current->parity = parity;
    wait(Fiber::State::at_flag);
  }
  deplo_judge::pass(&f, current->number);
}

void deplo_emulate_copy_tile(void* tile, const void* map, const int* at, long long* flag) {
  const auto* m = static_cast<const deplo_emulated_map*>(map);
  TileCopy copy{tile, m, {}, current->number};
  size_t bytes = m->bytes;
  for (unsigned d = 0; d < m->dimensions; ++d) {
    copy.at[d] = at[d];
    bytes *= m->box[d];
  }
  Flag& f = flags.at(flag);
  deplo_judge::copy_tile(tile, bytes);
  if (late)
    f.copies.push_back(copy);
  else
    take_place(f, copy);
}

namespace {

void start_product(Product product, unsigned line) {
  meet_group(line);
  if (current->number % kWarp == 0) for_chunks(product, [](const char* chunk) { deplo_judge::read_chunk(chunk); });
  if (!late) take_place(product, current->number);
  current->open_products.push_back(std::move(product));
}

}  // namespace

void deplo_emulate_group_multiply(float* const* sums, int columns, unsigned long long a, unsigned long long b, bool turned_a, bool turned_b,
                                  bool is_bf16) {
  start_product({{sums, sums + columns / 2}, columns, a, b, turned_a, turned_b, is_bf16, {}, {}, false, false}, static_cast<unsigned>(columns));
}

void deplo_emulate_group_multiply_bytes(int* const* sums, int columns, unsigned long long a, unsigned long long b, bool a_signed, bool b_signed) {
  start_product({{}, columns, a, b, false, false, false, {}, {sums, sums + columns / 2}, a_signed, b_signed}, static_cast<unsigned>(columns) + 2);
}

void deplo_emulate_group_multiply_rows(float* const* sums, int columns, const unsigned* rows, unsigned long long b, bool turned_b, bool is_bf16) {
  const unsigned lane = current->number % kWarp;
  const unsigned* all = meet(rows, 4, kAtRows);
  Product product{{sums, sums + columns / 2}, columns, 0, b, false, turned_b, is_bf16, {}, {}, false, false};
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 16; ++k) product.rows.push_back(widened(all[(lane / 4 * 4 + k % 8 / 2) * kWords + k / 8 * 2 + h], k % 2, is_bf16));
  start_product(std::move(product), static_cast<unsigned>(columns) + 1);
}

void deplo_emulate_group_commit() {
  current->products.push_back(std::move(current->open_products));
  current->open_products.clear();
}

void deplo_emulate_group_wait(int pending) {
  for (auto& groups = current->products; groups.size() > static_cast<size_t>(pending); groups.pop_front())
    for (const Product& product : groups.front()) {
      if (late) take_place(product, current->number);
      if (current->number % kWarp == 0) for_chunks(product, [](const char* chunk) { deplo_judge::chunk_was_read(chunk); });
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
  const Stacks stacks(fibers.size());
  for (size_t t = 0; t < fibers.size(); ++t) {
    fibers[t].stack = stacks[t];
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
        misaligned = false;
        if (!run_block(fibers, reversed) || misaligned) return false;
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
