#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "runtime/packed.h"
#include "runtime/unpacking.h"

namespace deplo::runtime {

// Weights of which only the packed copy is in memory (docs/runtime.md). Their pages may not be touched; who touches one all the same, in whatever
// code, waits until the whole weight has been made again from the packed copy, by a handler of SIGSEGV. It may then be read until it is let go again;
// who writes it gets it for good, and the next call packs anew.

/// A weight whose packed copy is to stand for it.
struct Owning {
  char* data = nullptr;
  int64_t bytes = 0;
  char* memory = nullptr;  ///< where the memory that it is a part of begins; forget_memory() tells of its end
  uint64_t sample = 0;     ///< Identity::sample of the weight, which is not looked at while it is gone
  std::shared_ptr<PackedBlock> block;
  std::shared_ptr<const Unpacking> how;
};
/// Lets go of the weight's pages if the packed copy gives exactly its bytes; says why not, or nothing.
std::string own(const Owning& weight);
/// Lets go again of a weight that was read since. The oftener it was read, the longer it stays.
void let_go_again(const char* data);

/// What is known of a weight that may be gone, of which only the parts of pages at both ends are looked at: they stay, and nobody protects them.
struct OwnedContent {
  bool is_known = false;  ///< what was written since `sample` is among `writes`
  uint64_t sample = 0;
  uint64_t writes = 0;  ///< seen so far
};
OwnedContent owned_content(const char* data, int64_t bytes);

/// Of memory that goes back to its allocator now: from here on it is ordinary memory without content.
void forget_memory(void* memory);
/// Of weights that somebody read or wrote, drops packed copies that nobody else has.
void drop_unused_copies();

/// Makes all weights again that are gone, until they are let go again. Throws ExecutionError where memory is missing.
void restore_weights();

/// Rows of a matrix of `row_bytes` each, to `out` one behind another, without bringing back a weight that is gone.
void read_rows(const char* data, int64_t row_bytes, const int64_t* rows, int64_t count, char* out);

/// Weights that are there again because somebody read them.
int64_t weights_shown();
/// Bytes of weights that are gone.
int64_t owned_bytes();

}  // namespace deplo::runtime
