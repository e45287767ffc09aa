#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "library/library.h"
#include "runtime/plan.h"
#include "target/kernels.h"

namespace deplo::runtime {

/// The kernels of a program whose tensors are on the device that runs them: started on the stream of the tensor library, in order with its own work.
/// Nothing waits for them. An error that a kernel reports is therefore thrown by a later call, or by check_kernel_errors(): it is in memory that the
/// host reads without a copy. Any thread may call.
class Resident {
 public:
  Resident(DeviceKernels& kernels, const kernel_ir::Module& module, const Layout& layout, std::vector<std::string> names, int device, bool replay);
  ~Resident();
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;

  /// Gives a plan its launches.
  void prepare(Plan& plan) const;
  /// The addresses of the inputs, in `pointers`. Numbers that are on the host (tensors without dimensions) are copied to the block returned, in the
  /// stream's order. Throws UnsupportedError for other tensors that are elsewhere than the program, UserError for one that is not aligned to its
  /// elements.
  DeviceBlock bind(const CallArgument* arguments, char** pointers, Host& host) const;
  /// Starts the kernel of a step.
  void start(size_t step, const Plan& plan, char* const* pointers, char* scratch, void* stream) const;
  /// Starts those of the steps first..last-1 that run, which are all kernels.
  void start(size_t first, size_t last, const Plan& plan, char* const* pointers, char* scratch, void* stream) const;
  /// Throws what a kernel of an earlier call has reported, once.
  void check_errors();
  /// A step's kernel, with the operators that it computes, for people.
  std::string describe(size_t step) const;

 private:
  DeviceKernels& kernels_;
  const kernel_ir::Module& module_;
  const Layout& layout_;
  std::vector<std::string> names_;
  int device_;
  bool replay_;
  std::unique_ptr<SharedMemory> errors_;  ///< a word for each step
};

/// Throws what kernels of any program have reported and no call has thrown yet. Waits for nothing.
void check_kernel_errors();

}  // namespace deplo::runtime
