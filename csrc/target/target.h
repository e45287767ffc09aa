#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/context.h"
#include "kernel_ir/ir.h"
#include "loop_ir/ir.h"
#include "scalar/functions.h"
#include "schedule/schedule.h"
#include "schedule/tuned.h"
#include "target/kernels.h"
#include "tile_ir/ir.h"

namespace deplo {

/// How a target turns the kernels of one Loop program into those of a Tile program.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  /// Adds to `out` the Tile kernels of a kernel, under its name and names of others that it needs: by the schedules given for these names, else by
  /// its own proposals. UserError for a schedule that does not fit.
  virtual void add_kernel(const loop_ir::Kernel& kernel, const std::map<std::string, Schedule>& given, tile_ir::Module& out) = 0;
  /// Adds the steps that stand for a call of such a kernel, with the buffers that they need.
  virtual void add_call(const CallStep& call, tile_ir::Module& out);
  /// Where a search may start: schedules of all forms that a kernel may have, or one of its versions (what add_kernel appends to its name), the
  /// target's own choice first. None: schedules are not searched for.
  virtual std::vector<Schedule> proposals(const loop_ir::Kernel& kernel, const std::string& version) const;
  /// Schedules that differ from `base` in one decision each; `wide`: all that may be worth a try. Sums are formed in no longer chains than those
  /// of proposals(), so that their errors have the same bound.
  virtual std::vector<Direction> directions(const loop_ir::Kernel& kernel, const std::string& version, const Schedule& base, bool wide) const;
};

/// Text that a target makes of Kernel IR, as a level that `lower` knows.
struct MachineText {
  std::string level;
  std::string (*write)(const kernel_ir::Module& module, const PassContext& context);
  std::string suffix{};  ///< of files that hold it; empty: dumps of programs leave it out
};

/// An option that one target reads: text.
struct TargetOption {
  std::string name;
  std::string initial{};
  /// Packages of Python with a file that stands for an empty value, and its place in them: {"nvidia.cu13", "lib/libnvrtc.so.13"}. The first one
  /// found.
  std::vector<std::pair<std::string, std::string>> packages{};
};

/// What a target hears of a compilation's options.
struct TargetOptions {
  int threads = 0;                            ///< of a call; 0: as many as the tensor library uses
  bool debug = false;                         ///< name kernels for debuggers and profilers
  int device = -1;                            ///< ordinal of the device that the program's tensors are on; -1: they are on the host
  std::string cache_dir;                      ///< resolved; empty: no disk cache
  std::map<std::string, std::string> values;  ///< of the options that targets declare

  /// InternalError if no target declares it.
  const std::string& operator[](const std::string& option) const;
};

/// What a target is, as data: lowerings, the runtime and Python look here, never at its name.
struct TargetTraits {
  std::string name;
  bool is_default = false;  ///< where no option names one

  bool has_grid = false;        ///< loops run on blocks of threads; elsewhere chunks of a parallel loop do
  std::set<Fn> own_functions;   ///< of float32 that its compiler computes within their documented errors
  int most_vector_bytes = 64;   ///< of one thread's vectors
  bool shuffles_lanes = false;  ///< picks lanes of vectors in registers: strided loads then read all that lies between

  std::string device;           ///< what people call the device that its kernels run on, "gpu"; empty: they are functions of this process
  std::string tensors = "cpu";  ///< PyTorch's type of devices whose tensors a program takes, besides those of the CPU
  bool has_tf32 = false;        ///< PyTorch's switches about tf32 speak of its tensors
  bool has_disk_cache = false;  ///< keeps machine code in cache_dir
  std::vector<TargetOption> options;
  std::vector<MachineText> texts;  ///< the lowest last
};

/// A target: all that deplo's levels, its runtime and Python know of it. Its folder holds the rest.
class Target : public TargetTraits {
 public:
  explicit Target(TargetTraits traits) : TargetTraits(std::move(traits)) {}
  virtual ~Target() = default;
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  virtual std::unique_ptr<Scheduler> make_scheduler(const loop_ir::Module& module, const PassContext& context) const = 0;
  /// The machine at hand, or the one that the options name. UserError for options that it does not know.
  virtual TargetInfo machine(const TargetOptions& options) const = 0;
  /// What runs the kernels of a module. What this machine lacks is no failure: the result says it. Throws UnsupportedError where this build cannot
  /// compile for the target at all.
  virtual KernelCode compile(const kernel_ir::Module& module, const PassContext& context, const TargetOptions& options,
                             CodegenStats& stats) const = 0;
  /// The first device, as people call it. Throws UnsupportedError or ExecutionError that say what is missing; without devices an InternalError.
  virtual std::string find_device(const TargetOptions& options) const;
  /// JSON list of devices that it knows by name, whether or not one is at hand: {"name": "h100", "arch": "sm_90a", ...}.
  virtual std::string known_devices() const;
  /// Whether this machine multiplies words of bytes as fast as pairs of float32 numbers at least, exactly.
  virtual bool multiplies_bytes(const TargetInfo& /*machine*/) const { return false; }
  /// Into how many parts the keys of a sum of weighted values (`analysis/weighted_sum.h`) are worth cutting, for a kernel each; 1: none.
  virtual int64_t key_parts(const loop_ir::Kernel& /*kernel*/, const PassContext& /*context*/) const { return 1; }
  /// Whether it is worth it to compute, without memory for them, sums of products (`analysis/product_chain.h`) or of neighbours that others take.
  virtual bool chains(const loop_ir::Kernel& /*kernel*/, const PassContext& /*context*/) const { return false; }
  /// Whether it multiplies the factors of the kernel's sums of products in blocks of rows and columns, not point by point.
  virtual bool multiplies(const loop_ir::Kernel& /*kernel*/, const PassContext& /*context*/) const { return true; }
  /// JSON about what a kernel's accesses do to memory, for these sizes; the target's documentation says what is in it.
  virtual std::string measure_traffic(const kernel_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes) const;
  /// Seconds that each of the kernels takes in one run, and where they go: a JSON list of {"name", "seconds", ...} in the order of the module.
  /// `figures`: JSON of what the machine does (`python -m deplo env`). `resident`: bytes that are read and written between two runs. Empty: it does
  /// not know.
  virtual std::string estimate_times(const tile_ir::Module& module, const std::map<std::string, int64_t>& sizes, const PassContext& context,
                                     const std::string& figures, double resident) const;
  /// Machine code of the lowest of its texts, where an assembler or compiler of its own makes that. UnsupportedError if it has none.
  virtual std::string assemble(const std::string& text, const TargetOptions& options) const;
  /// Takes a kernel's image for the process: who compiles an equal kernel for an equal machine links it, and keeps it in its disk cache. Nothing
  /// happens if the bytes are no image of this target.
  virtual void offer_kernel(const std::string& /*image*/) const {}
  /// Stores a kernel's image in a folder of compiled kernels, unless the bytes are no image of this target.
  virtual void keep_kernel(const std::string& /*image*/, const std::string& /*folder*/) const {}
  /// Versions of what makes machine code, part of every cache key.
  virtual std::string code_version() const { return {}; }
  /// JSON of what it knows about this machine and build, from name to value.
  virtual std::string describe(const TargetOptions& options) const;
};

/// Adds a target, for the rest of the process; before any compilation starts in another thread. UserError if there is one of this name.
void register_target(std::unique_ptr<const Target> target);
/// In the order in which they were registered.
std::vector<const Target*> all_targets();
std::vector<std::string> target_names();
/// The default target for an empty name; UserError that names the targets if there is none of this name.
const Target& find_target(std::string_view name);
inline const Target& target_of(const PassContext& context) { return find_target(context.target.name); }

}  // namespace deplo
