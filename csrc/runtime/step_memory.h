#pragma once

#include <cstddef>
#include <vector>

#include "base/memory.h"
#include "library/library.h"
#include "runtime/plan.h"

namespace deplo::runtime {

/// The memory of one call whose steps run in this process: an arena for temporaries, and outputs, which are allocated when the first step uses them.
///
/// Where inputs end in the call (CallArgument::is_last; what a gradient's program reads, most of all) they go back after their last step, and large
/// temporaries are blocks of their own, which live where those lay: such a call never holds all that it reads beside all that it makes.
class StepMemory {
 public:
  /// Sets `pointers`, by buffer, of what lives in the arena. `scratch_bytes` are for all threads.
  StepMemory(const ProgramBody& program, const Layout& layout, const Plan& plan, const CallArgument* arguments, char** pointers, Host& host,
             int64_t scratch_bytes, bool poisons);

  char* scratch() const { return scratch_; }
  /// Before a step runs, or is passed over: memory for what it uses first.
  void before(size_t step);
  /// After it: lets go of what it used last.
  void after(size_t step);
  /// After all steps.
  void finish() { before(layout_.steps.size()); }

 private:
  void allocate_output(size_t place);

  const ProgramBody& program_;
  const Layout& layout_;
  const Plan& plan_;
  const CallArgument* arguments_;
  char** pointers_;
  Host& host_;
  const bool poisons_;
  bool has_ends_ = false;
  Memory arena_;
  char* scratch_ = nullptr;
  std::vector<Memory> large_;  ///< by temporary, where inputs end
  // What comes next, in the orders of the layout.
  size_t allocated_ = 0;
  size_t first_ = 0;
  size_t last_ = 0;
  size_t ending_ = 0;
};

/// Gives `pointers` memory for all outputs at once.
void allocate_outputs(const ProgramBody& program, const Layout& layout, const Plan& plan, char** pointers, Host& host);

}  // namespace deplo::runtime
