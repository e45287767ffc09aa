#include "runtime/guard.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "runtime/plan.h"

namespace deplo::runtime {
namespace {

constexpr int64_t kPage = 4096;
constexpr char kPattern = 0x5A;

// What the handler of SIGSEGV says. Calls with `guard` are few and may share it: the name of one that runs at the same time is as good a hint.
char running[512];
struct sigaction previous;
std::once_flag installed;

void report_fault(int /*signal*/, siginfo_t* /*info*/, void* /*context*/) {
  if (running[0] != 0) {
    const char text[] = "\ndeplo: touched memory outside of its buffers: ";
    (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
    (void)!write(STDERR_FILENO, running, strnlen(running, sizeof(running)));
    (void)!write(STDERR_FILENO, "\n", 1);
  }
  sigaction(SIGSEGV, &previous, nullptr);  // the access faults again, for whoever handled it before
}

void install_handler() {
  struct sigaction action{};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &previous);
}

/// f(offset in bytes) for each element.
template <class F>
void for_each_element(const BufferShape& shape, int64_t element_bytes, const F& f, size_t axis = 0, int64_t offset = 0) {
  if (axis == shape.sizes.size()) return f(offset);
  for (int64_t i = 0; i < shape.sizes[axis]; ++i)
    for_each_element(shape, element_bytes, f, axis + 1, offset + i * shape.strides[axis] * element_bytes);
}

}  // namespace

GuardedMemory::GuardedMemory(int64_t bytes, int64_t alignment, int64_t count)
    : bytes_(bytes), stride_(std::max(round_up(bytes, kPage), kPage) + kPage), count_(count) {
  auto total = static_cast<size_t>(count * stride_ + kPage);
  void* mapped = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw ExecutionError(fmt::format("out of memory: no room for {} bytes between guard pages", bytes));
  base_ = static_cast<char*>(mapped);
  first_ = base_ + stride_ - round_up(bytes, alignment);
  for (int64_t k = 0; k < count; ++k) {
    char* pages = base_ + kPage + k * stride_;
    if (mprotect(pages, static_cast<size_t>(stride_ - kPage), PROT_READ | PROT_WRITE) != 0)
      throw ExecutionError("out of memory: the system has no more mappings for guard pages");
    std::memset(pages, kPattern, static_cast<size_t>(stride_ - kPage));
  }
}

GuardedMemory::~GuardedMemory() { munmap(base_, static_cast<size_t>(count_ * stride_ + kPage)); }

bool GuardedMemory::intact(int64_t& where) const {
  for (int64_t k = 0; k < count_; ++k) {
    const char* pages = base_ + kPage + k * stride_;
    const char* piece = first_ + k * stride_;
    for (const char* at = pages; at < pages + stride_ - kPage; ++at) {
      if (at == piece && bytes_ > 0) at += bytes_ - 1;
      bool inside = at >= piece && at < piece + bytes_;
      if (inside || *at == kPattern) continue;
      where = at - piece;
      return false;
    }
  }
  return true;
}

GuardedCall::GuardedCall(std::string name) : name_(std::move(name)) {
  std::call_once(installed, install_handler);
  std::strncpy(running, name_.c_str(), sizeof(running) - 1);
}

GuardedCall::~GuardedCall() { running[0] = 0; }

char* GuardedCall::add(const std::string& name, char* data, const BufferShape& shape, int64_t element_bytes, bool is_aligned, bool is_written) {
  for (Block& block : blocks_)
    if (block.name == name) {
      block.is_written = block.is_written || is_written;
      return block.memory->data();
    }
  Block block{name, data, shape, element_bytes, is_written, std::make_unique<GuardedMemory>(shape.bytes, is_aligned ? kAlignment : element_bytes),
              {}};
  if (shape.bytes > 0) std::memcpy(block.memory->data(), data, static_cast<size_t>(shape.bytes));
  blocks_.push_back(std::move(block));
  return blocks_.back().memory->data();
}

void GuardedCall::forget(const std::string& name, char pattern) {
  for (Block& block : blocks_) {
    if (block.name != name) continue;
    block.pattern = pattern;
    if (block.shape.bytes > 0) std::memset(block.memory->data(), pattern, static_cast<size_t>(block.shape.bytes));
  }
}

std::vector<std::pair<std::string, int64_t>> GuardedCall::untouched() const {
  std::vector<std::pair<std::string, int64_t>> found;
  for (const Block& block : blocks_) {
    if (!block.pattern) continue;
    for_each_element(block.shape, block.element_bytes, [&](int64_t offset) {
      const char* element = block.memory->data() + offset;
      if (std::all_of(element, element + block.element_bytes, [&](char c) { return c == *block.pattern; })) found.emplace_back(block.name, offset);
    });
  }
  return found;
}

void GuardedCall::check() const {
  for (const Block& block : blocks_) {
    int64_t where = 0;
    if (!block.memory->intact(where))
      throw InternalError(fmt::format("{} wrote byte {} of {}, which has {}", name_, where, block.name, block.shape.bytes));
  }
}

void GuardedCall::finish() {
  check();
  for (const Block& block : blocks_) {
    if (block.is_written && block.shape.bytes > 0)
      for_each_element(block.shape, block.element_bytes, [&](int64_t offset) {
        std::memcpy(block.data + offset, block.memory->data() + offset, static_cast<size_t>(block.element_bytes));
      });
  }
}

void poison(char* data, int64_t bytes) {
  if (bytes > 0) std::memset(data, 0xFF, static_cast<size_t>(bytes));
}

}  // namespace deplo::runtime
