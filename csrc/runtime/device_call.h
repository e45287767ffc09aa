#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "runtime/plan.h"
#include "target/kernels.h"

namespace deplo::runtime {

/// Where buffers lie in a block of a device's memory.
struct DevicePlaces {
  std::vector<int64_t> offsets;  ///< by buffer
  int64_t errors = 0;            ///< the error words, one for each step of the program
  int64_t bytes = 0;
};

/// The steps of one call on a device, or those of one packing. Every buffer that their kernels touch has a place in one block of the device's memory;
/// it is copied there before the first kernel that uses what the host has, and back when finish() asks.
class DeviceCall {
 public:
  /// `steps` will run, in that order; `names` are those of the plan's symbols. `pointers` are addresses on the host, by buffer: they may change
  /// until a buffer is copied, and those that never are may be null.
  DeviceCall(DeviceKernels& kernels, const kernel_ir::Module& module, const Layout& layout, const Plan& plan, const std::vector<std::string>& names,
             const std::vector<size_t>& steps, char* const* pointers);

  /// Starts the kernel of a step.
  void launch(size_t step);
  /// Waits for all kernels.
  void synchronize() { kernels_.synchronize(); }
  /// Waits for all kernels, throws what the first of them that failed has reported, and brings these buffers up to date on the host. Of an input,
  /// elements alone are written: what lies between them may belong to other tensors.
  void finish(const std::vector<size_t>& buffers);
  /// The host has made those of these buffers that were nowhere.
  void made_on_host(const std::vector<size_t>& buffers);

 private:
  enum class Home : uint8_t { nowhere, host, device, both };

  uint64_t address(size_t buffer) const { return block_.pointer() + static_cast<uint64_t>(places_.offsets[buffer]); }
  void check_errors();
  void copy_back(size_t buffer);

  DeviceKernels& kernels_;
  const kernel_ir::Module& module_;
  const Layout& layout_;
  const Plan& plan_;
  char* const* pointers_;
  std::map<std::string, int64_t> symbols_;
  std::vector<Home> homes_;  ///< where a buffer's present contents are
  bool launched_ = false;    ///< since the last check
  DevicePlaces places_;
  DeviceMemory block_;
};

}  // namespace deplo::runtime
