#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "library/library.h"

namespace deplo::runtime {

/// Memory for `count` pieces of `bytes` each, every one between two pages that nobody may touch. A piece ends where its last page ends, up to
/// the alignment; what is left of its pages holds a pattern.
class GuardedMemory {
 public:
  GuardedMemory(int64_t bytes, int64_t alignment, int64_t count = 1);  ///< throws ExecutionError where the system has no more
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  char* data() const { return first_; }       ///< of the first piece
  int64_t stride() const { return stride_; }  ///< from one piece to the next, in bytes
  /// False if the pattern has changed; `where` is then the place of the first such byte, from its piece's begin.
  bool intact(int64_t& where) const;

 private:
  char* base_ = nullptr;
  char* first_ = nullptr;
  int64_t bytes_ = 0;
  int64_t stride_ = 0;
  int64_t count_ = 0;
};

/// A kernel's buffers, each copied to guarded memory of its own; the option `guard`. A kernel that reads or writes past a guard page ends the
/// process with a line that names it, one that writes closer by is an InternalError.
class GuardedCall {
 public:
  /// `name` says what runs. A buffer that is given twice is one block.
  explicit GuardedCall(std::string name);
  ~GuardedCall();
  GuardedCall(const GuardedCall&) = delete;
  GuardedCall& operator=(const GuardedCall&) = delete;

  /// The guarded copy of a buffer. `is_aligned`: it starts at a cache line, as what programs allocate does.
  char* add(const std::string& name, char* data, const BufferShape& shape, int64_t element_bytes, bool is_aligned, bool is_written);
  /// Fills a buffer that the kernel is to write as a whole with `pattern`, in place of its present contents.
  void forget(const std::string& name, char pattern);
  /// Elements of forgotten buffers that still hold the pattern: their names and places.
  std::vector<std::pair<std::string, int64_t>> untouched() const;
  /// That the patterns around the buffers are intact.
  void check() const;
  /// Checks them and copies what was written back, element by element.
  void finish();

 private:
  struct Block {
    std::string name;
    char* data = nullptr;
    BufferShape shape;
    int64_t element_bytes = 0;
    bool is_written = false;
    std::unique_ptr<GuardedMemory> memory;
    std::optional<char> pattern;
  };
  std::string name_;
  std::vector<Block> blocks_;
};

/// Fills memory with bytes that no computation should depend on: NaN in every float type, -1 in integers.
void poison(char* data, int64_t bytes);

}  // namespace deplo::runtime
