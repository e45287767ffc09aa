#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/memory.h"
#include "kernel_ir/ir.h"
#include "library/library.h"
#include "runtime/plan.h"

namespace deplo::runtime {

/// What tells one content of a static input from another, as far as the tensor library knows. Of writes that bypass it (through .data or
/// numpy), those are seen that change one of the sampled elements (all of a small tensor, some in each row and column of a large one; none of one on
/// a device, which would have to be waited for); forget_packed() is for the others.
struct Identity {
  const void* storage = nullptr;
  const char* data = nullptr;
  uint64_t version = 0;
  uint64_t sample = 0;  ///< of the elements
  uint64_t writes = 0;  ///< that were seen beside the version: of weights that were gone (owned.h)
  auto operator<=>(const Identity&) const = default;
};
/// The identity of a tensor without a version is new at every call: what is packed from it is packed again. Without `sampled`, no element is looked
/// at.
Identity identity_of(const TensorView& view, bool sampled);

/// `once` steps that belong together: connected through the packed buffers that they write and read.
struct OnceGroup {
  std::vector<size_t> steps;
  std::vector<size_t> inputs;  ///< static inputs that they read, as buffers
  std::vector<size_t> packed;  ///< buffers that they write
  uint64_t content = 0;        ///< equal for groups that compute the same from the same inputs, in any program
};
std::vector<OnceGroup> find_once_groups(const kernel_ir::Module& module, const Layout& layout);

/// Of a kernel's params those that it reads; all where a statement does not tell.
std::set<std::string> loaded_params(const kernel_ir::Kernel& kernel);
/// A step that reads static inputs though it is no `once` step.
struct Reader {
  size_t step = 0;
  std::string name;  ///< of its kernel or operator
};
/// The readers of each buffer.
std::vector<std::vector<Reader>> find_readers(const kernel_ir::Module& module, const Layout& layout);

/// `possible` are the steps that may run (program_ir/facts.h).
PackedNeeds packed_needs(const kernel_ir::Module& module, const Layout& layout, const std::vector<std::vector<Reader>>& readers,
                         const std::vector<bool>& possible);

/// What one group made from one content of its inputs.
struct PackedBlock {
  Memory memory;
  DeviceBlock device;      ///< in its place where the inputs are on a device
  void* stream = nullptr;  ///< that filled it, up to `filled`
  std::shared_ptr<void> filled{};
  std::vector<char*> pointers;  ///< by OnceGroup::packed; null for what only other `once` steps read
  int64_t bytes = 0;
  std::vector<std::shared_ptr<void>> watches;  ///< keep the inputs' identities from being reused

  std::mutex making;
  bool ready = false;
};

/// The block for this content and these inputs, shared by all programs of the process; `make` fills a new one. Two callers that
/// want the same block at once make it once. It lives as long as somebody holds it.
std::shared_ptr<PackedBlock> share_packed(uint64_t content, const std::vector<Identity>& inputs, const std::function<void(PackedBlock&)>& make);

/// Bytes of all living packed blocks.
int64_t packed_bytes();
/// Makes every program pack again at its next call.
void forget_packed();
/// Counts the calls of forget_packed().
uint64_t packed_generation();

}  // namespace deplo::runtime
