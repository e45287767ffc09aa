#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "library/library.h"
#include "runtime/memory_plan.h"
#include "target/kernels.h"

namespace deplo::runtime {

/// Distinct buffers start on distinct cache lines.
inline constexpr int64_t kAlignment = 64;
/// From here on a temporary is worth memory of its own where that can be another's before and after.
inline constexpr int64_t kLargeTemporary = int64_t{1} << 18;

/// A program with its names resolved to places: what holds for every size.
struct Layout {
  struct Step {
    std::optional<size_t> kernel;  ///< of a call, by place in the module; nothing for a library step
    size_t library = 0;            ///< of a library step, by place among them
    std::vector<size_t> buffers;   ///< a call's arguments, a library step's operands and results
    bool once = false;
    bool writes_input = false;
  };
  struct Output {
    std::optional<size_t> buffer;
    std::optional<Expr> integer;  ///< neither: None
  };
  /// Lifetime of a buffer in the arena, in steps.
  struct Temporary {
    size_t buffer;
    int first;
    int last;
  };
  /// A buffer that the host may let go of after step `last`: no later one reads it, and the program does not return it.
  struct Ending {
    size_t buffer;
    std::optional<size_t> argument;  ///< of an input; nothing for what a library step makes
    int last;
  };

  std::vector<Step> steps;
  std::vector<Output> outputs;
  std::vector<Temporary> temporaries;
  std::vector<size_t> last_used;                   ///< temporaries, by place among them, in the order of their last steps
  std::vector<size_t> allocated;                   ///< buffers that the host allocates: outputs that no library step makes, by first use
  std::vector<int> allocated_first;                ///< the step that uses each first; past all steps for one that none does
  std::vector<Ending> endings;                     ///< in the order of their last steps
  std::vector<std::optional<size_t>> input_order;  ///< buffer of each argument; nothing for a symbol
  std::vector<size_t> written_inputs;              ///< arguments, by place in the calling order
};

/// Throws InternalError for a name that the module does not have.
Layout make_layout(const kernel_ir::Module& module);

/// What `once` steps make that some step may read, at whatever sizes, while facts are what they are.
struct PackedNeeds {
  std::vector<bool> kept;  ///< by buffer: packed, and read by a step that is no `once` step
  std::vector<bool> made;  ///< by step: `once`, and what is kept follows from it
};

/// A program with its sizes resolved to numbers: made once per tuple of symbol values.
struct Plan {
  /// How long calls take that nothing holds up: the least of the first few.
  class Duration {
   public:
    /// Whether another call should be timed.
    bool open() const { return calls_.load(std::memory_order_relaxed) < kTimed; }
    void add(int64_t nanoseconds) {
      int64_t least = least_.load(std::memory_order_relaxed);
      while (nanoseconds < least && !least_.compare_exchange_weak(least, nanoseconds)) {
      }
      calls_.fetch_add(1);
    }
    /// Known to be less than what it takes to hand Python's lock to another thread and get it back.
    bool is_brief() const { return !open() && least_.load(std::memory_order_relaxed) < kBrief; }

   private:
    static constexpr int kTimed = 8;
    static constexpr int64_t kBrief = 20'000;
    std::atomic<int> calls_{0};
    std::atomic<int64_t> least_{INT64_MAX};
  };
  struct Step {
    bool runs = true;  ///< no alternative that is not taken, nor a `once` step of which no taken step reads anything
    int64_t chunks = 1;
    std::vector<int64_t> symbols;  ///< in the order of the kernel's
  };
  std::vector<int64_t> symbols;     ///< values, in the order of the program's
  std::vector<BufferShape> shapes;  ///< by buffer
  std::vector<int64_t> offsets;     ///< in the arena, by temporary
  /// The same for calls in which large temporaries come and go as inputs do (StepMemory): -1 for those, the others in an arena of `rest_bytes`.
  std::vector<int64_t> rest_offsets;
  int64_t rest_bytes = 0;
  std::vector<Step> steps;
  std::vector<int64_t> integers;  ///< by output; 0 where it is none
  int64_t arena_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t scratch_bytes = 0;  ///< per thread, the most of any kernel
  mutable Duration duration;
  std::shared_ptr<const PackedNeeds> needs;  ///< null without `once` steps

  /// Of a program whose tensors are on its kernels' device: kernels made ready to start.
  std::shared_ptr<DeviceLaunches> launches;
  std::vector<std::optional<size_t>> launch_of;  ///< by step: its place among them
};

/// Throws UserError if a value lies outside its symbol's range, ExecutionError if a check of the program does not hold.
std::shared_ptr<Plan> make_plan(const kernel_ir::Module& module, const Layout& layout, const std::vector<std::string>& names,
                                const std::vector<int64_t>& values);

}  // namespace deplo::runtime
