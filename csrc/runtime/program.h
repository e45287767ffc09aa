#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "library/library.h"
#include "runtime/binding.h"
#include "runtime/packed.h"
#include "runtime/plan.h"
#include "runtime/resident.h"
#include "runtime/thread_team.h"
#include "runtime/unpacking.h"
#include "target/kernels.h"

namespace deplo::runtime {

/// Time spent in one step since the last reset, all calls together.
struct StepTime {
  int64_t calls = 0;
  int64_t nanoseconds = 0;
};

/// A compiled graph, ready to be called from several threads at once.
///
/// A call solves the symbols from its inputs, checks every input against what was compiled, packs static inputs that
/// are new, takes an arena, and runs the steps in order: each kernel on all threads, or on a device, to which tensors are copied (DeviceCall) where
/// they are not there (Resident).
class Program {
 public:
  struct Options {
    int64_t memory_limit = 0;  ///< bytes of packed inputs and of one call's temporaries; 0: any
    int plans_kept = 16;       ///< tuples of sizes whose plan is remembered
    bool sampled = true;       ///< elements of weights are compared at each call, for writes that no version counts
    bool own = false;          ///< packed copies stand for the weights, which leave memory
    bool guard = false;        ///< each kernel works on guarded copies of its buffers
    int device = -1;           ///< that its tensors are on, where its kernels run on one
    bool replay = false;       ///< launches of equal sizes are recorded, and then repeated
  };

  /// `library` may be null if there is no library step.
  Program(kernel_ir::Module module, KernelCode code, LibraryFactory library, Options options);
  ~Program();

  /// Runs the program on at most `threads` threads. Outputs are in the memory that `host` gave; the plan returned holds the values of
  /// integer outputs. Throws UserError for inputs that do not fit, IndexError and ExecutionError as eager would; written
  /// inputs are then as they were unless an earlier step had already written them. Throws UnsupportedError where something is missing().
  std::shared_ptr<const Plan> run(const CallArgument* arguments, size_t count, Host& host, int threads);
  /// Does what the next call with such arguments needs not do then: makes the plan, and packs static inputs, on the calling thread alone. Of other
  /// inputs nothing is read but their layout. Nothing for programs of a device. Throws as run() does.
  void prepare(const CallArgument* arguments, size_t count, Host& host);

  const kernel_ir::Module& module() const { return module_; }
  const Layout& layout() const { return layout_; }
  /// What this machine lacks to run the kernels; empty: nothing.
  const std::string& missing() const { return code_.missing; }
  /// Where the kernels run; null: in this process, or nowhere.
  const DeviceKernels* device() const { return code_.device.get(); }
  /// The kernels of this CPU, one for each of the module; none where they run elsewhere.
  const std::vector<std::shared_ptr<CompiledKernel>>& functions() const { return code_.functions; }
  const std::vector<OnceGroup>& once_groups() const { return groups_; }
  /// The plan of the latest call; null before the first.
  std::shared_ptr<const Plan> latest_plan() const;
  int64_t packed_bytes() const;
  /// Static inputs of which there are two copies in spite of the option `own`, and why.
  std::map<std::string, std::string> kept_twice() const;

  void set_profiling(bool on);
  std::vector<StepTime> step_times() const;

 private:
  struct CallState;
  struct PackedState;
  class CallGuard;

  /// The plan of a call, for whose symbols it solves; checks the arguments.
  std::shared_ptr<const Plan> bind(const CallArgument* arguments, size_t count, CallState& state, Host& host);
  void check_arguments(const CallArgument* arguments, size_t count, const Plan& plan) const;
  void check_overlaps(const CallArgument* arguments, const Plan& plan) const;
  std::shared_ptr<const Plan> plan_for(const std::vector<int64_t>& symbols);
  /// The identity of an argument, which each call looks at once.
  const Identity& identity(size_t argument, const CallArgument* arguments, CallState& state) const;
  /// Symbols that follow from elements: looked at again where an argument's identity is another.
  void find_facts(const CallArgument* arguments, CallState& state, Host& host);
  /// Of the facts among these values.
  std::shared_ptr<const PackedNeeds> needs_for(const std::vector<int64_t>& symbols);
  /// Whether a step that runs at these sizes reads what the group packs.
  static bool is_wanted(const OnceGroup& group, const Plan& plan);
  /// Beside the inputs, what a group's block follows from: calls `visit` with symbol values, and whether each packed buffer is kept.
  template <class Visit>
  static void visit_choices(const OnceGroup& group, const Plan& plan, Visit visit);
  bool same_identities(const PackedState& state, const CallArgument* arguments, CallState& call, const Plan& plan) const;
  std::shared_ptr<const PackedState> packed_for(const CallArgument* arguments, CallState& state, const Plan& plan, Host& host, TeamLease& team);
  void pack(const OnceGroup& group, const CallState& state, const Plan& plan, Host& host, TeamLease& team, PackedBlock& block);
  /// Lets the group's inputs go, as far as the block gives them back and nothing else reads them (owned.h).
  void own_inputs(const OnceGroup& group, const std::shared_ptr<PackedBlock>& block, const CallArgument* arguments, const CallState& state,
                  const Plan& plan, Host& host, TeamLease& team);
  /// Steps that may run at some sizes while the facts are those of the plan: a weight that is written has others, and stays.
  std::vector<bool> possible_steps_of(const std::vector<int64_t>& symbols) const;
  /// A possible step that reads the input beside `once` steps; null: none.
  const Reader* reader_of(size_t buffer, const std::vector<bool>& possible) const;
  std::shared_ptr<const Unpacking> unpacking_of(const OnceGroup& group, size_t input, const CallState& state, const Plan& plan, TeamLease& team);
  /// Has the call's stream wait until packed blocks are filled.
  static void await_packed(const PackedState& packed, Host& host);
  void run_steps(CallState& state, const Plan& plan, const CallArgument* arguments, Host& host, TeamLease& team);
  /// The same, adding to what the plan knows of its duration.
  void run_timed(CallState& state, const Plan& plan, const CallArgument* arguments, Host& host, TeamLease& team);
  void run_steps_on_device(CallState& state, const Plan& plan, Host& host);
  void run_steps_of_residents(CallState& state, const Plan& plan, const CallArgument* arguments, Host& host);
  void add_time(size_t step, std::chrono::steady_clock::time_point& start);
  void run_kernel(size_t step, const Plan& plan, char* const* pointers, char* scratch, TeamLease& team);
  void run_guarded(size_t step, const Plan& plan, char* const* pointers, TeamLease& team);
  void call_kernel(size_t step, const Plan& plan, void* const* buffers, char* scratch, int64_t scratch_stride, TeamLease& team);

  kernel_ir::Module module_;
  KernelCode code_;
  Options options_;
  Layout layout_;
  SymbolSolver solver_;
  std::vector<OnceGroup> groups_;
  std::vector<size_t> argument_of_;           ///< place in the calling order of each input buffer
  std::vector<std::vector<Reader>> readers_;  ///< by buffer; none without `once` steps
  std::vector<KernelFn> functions_;           ///< by step; null for library steps, and where no function is
  std::vector<std::unique_ptr<LibraryOp>> libraries_;
  std::unique_ptr<Resident> resident_;  ///< of a program whose tensors are on a device

  mutable std::mutex mutex_;                                                  ///< of the members below
  std::list<std::shared_ptr<const Plan>> plans_;                              ///< the latest first
  std::map<std::vector<int64_t>, std::shared_ptr<const PackedNeeds>> needs_;  ///< by the facts' values
  std::shared_ptr<const PackedState> packed_;
  std::map<std::string, std::string> kept_twice_;
  std::vector<std::unique_ptr<CallState>> idle_;
  struct KnownFact {
    Identity identity;
    std::shared_ptr<void> watch;  ///< keeps the identity from being reused
    uint64_t generation = 0;
    int64_t value = 0;
  };
  std::vector<std::optional<KnownFact>> facts_;  ///< in the order of the solver's

  std::atomic<bool> profiling_{false};
  mutable std::mutex times_mutex_;
  std::vector<StepTime> times_;
};

}  // namespace deplo::runtime
