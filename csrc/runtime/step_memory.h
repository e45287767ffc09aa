#pragma once

#include <cstddef>
#include <vector>

#include "base/memory.h"
#include "library/library.h"
#include "runtime/plan.h"

namespace deplo::runtime {

/// The memory of one call: an arena for temporaries, and outputs, which are allocated when the first step uses them.
///
/// Where inputs end in the call (CallArgument::is_last; what a gradient's program reads, most of all) they go back after their last step, and large
/// temporaries are blocks of their own, which live where those lay: such a call never holds all that it reads beside all that it makes.
class StepMemory {
 public:
  struct Options {
    int64_t scratch_bytes = 0;  ///< for all threads
    bool is_on_device = false;  ///< memory is the host's, of a device
    bool inputs_end = true;     ///< false: they stay whatever their arguments say
    bool poisons = false;       ///< what is allocated holds no number
  };

  /// Sets `pointers`, by buffer, of what lives in the arena.
  StepMemory(const ProgramBody& program, const Layout& layout, const Plan& plan, const CallArgument* arguments, char** pointers, Host& host,
             Options options);

  char* scratch() const { return scratch_; }
  /// Before a step runs, or is passed over: memory for what it uses first.
  void before(size_t step);
  /// After it: lets go of what it used last.
  void after(size_t step);
  /// After all steps.
  void finish() { before(layout_.steps.size()); }
  /// The step before which before() or after() have something to do again: those from `step` on until then may run as one.
  size_t calm_until(size_t step) const;

 private:
  struct Block {
    Memory memory;
    DeviceBlock on_device;
    char* data() const { return on_device.data ? on_device.data : memory.data(); }
  };
  Block block(int64_t bytes);
  void allocate_output(size_t place);

  const ProgramBody& program_;
  const Layout& layout_;
  const Plan& plan_;
  const CallArgument* arguments_;
  char** pointers_;
  Host& host_;
  const Options options_;
  bool has_ends_ = false;
  Block arena_;
  char* scratch_ = nullptr;
  std::vector<Block> large_;  ///< by temporary, where inputs end
  // What comes next, in the orders of the layout.
  size_t allocated_ = 0;
  size_t first_ = 0;
  size_t last_ = 0;
  size_t ending_ = 0;
};

/// Gives `pointers` memory for all outputs at once.
void allocate_outputs(const ProgramBody& program, const Layout& layout, const Plan& plan, char** pointers, Host& host);

}  // namespace deplo::runtime
