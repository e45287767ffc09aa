#include "lower/lower.h"

#include <map>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "lower/loop_to_tile/alone.h"
#include "schedule/tuned.h"
#include "target/target.h"

namespace deplo {
namespace {

class Lowering {
 public:
  Lowering(const loop_ir::Module& module, const PassContext& ctx) : module_(module), ctx_(ctx) {}

  tile_ir::Module run() {
    static_cast<ProgramBody&>(out_) = module_;
    out_.steps.clear();
    read_given();
    auto scheduler = target_of(ctx_).make_scheduler(module_, ctx_);
    for (const auto& kernel : module_.kernels) {
      const auto tuned = find_tuned(*kernel);
      scheduler->add_kernel(*kernel, tuned.empty() ? given_ : tuned, out_);
    }
    check_given();
    for (const Step& step : module_.steps) {
      if (const auto* call = std::get_if<CallStep>(&step))
        scheduler->add_call(*call, out_);
      else
        out_.steps.push_back(step);
    }
    if (!module_.steps.empty()) remove_uncalled();
    return std::move(out_);
  }

 private:
  /// Kernels that pack what a step for another kernel has packed already.
  void remove_uncalled() {
    std::set<std::string> called;
    for (const Step& step : out_.steps)
      if (const auto* call = std::get_if<CallStep>(&step)) called.insert(call->kernel);
    std::erase_if(out_.kernels, [&](const auto& kernel) { return called.count(kernel->name) == 0 && !module_.find_kernel(kernel->name); });
  }

  /// The schedules that the options give: every entry is one kernel's, or text that names its kernels.
  void read_given() {
    for (const auto& [key, text] : ctx_.schedules)
      for (auto& [name, schedule] : parse_schedules(text, key.empty() ? "<schedule>" : fmt::format("<schedule of {}>", key))) {
        DEPLO_CHECK(!name.empty() || !key.empty(), "schedule '{}' names no kernel; write 'schedule @name: ...' or give a dict from kernel name",
                    print(schedule));
        DEPLO_CHECK(name.empty() || key.empty() || name == key, "the schedule given for kernel {} is one of @{}", key, name);
        const std::string& kernel = name.empty() ? key : name;
        DEPLO_CHECK(given_.emplace(kernel, schedule).second, "two schedules are given for kernel {}", kernel);
      }
  }

  /// What measurements chose for the kernel, if nobody gave it a schedule by hand. Empty as well if it does not fit: what is kept may be older.
  std::map<std::string, Schedule> find_tuned(const loop_ir::Kernel& kernel) const {
    if (!ctx_.tuned) return {};
    for (const auto& [name, schedule] : given_)
      if (name.starts_with(kernel.name)) return {};
    const loop_ir::Module by_itself = loop_to_tile::alone(module_, kernel);
    std::map<std::string, Schedule> named;
    for (auto& [suffix, schedule] : ctx_.tuned->find(loop_to_tile::tuning_key(by_itself, ctx_)))
      named.emplace(kernel.name + suffix, std::move(schedule));
    if (named.empty()) return {};
    tile_ir::Module trial;
    try {
      target_of(ctx_).make_scheduler(module_, ctx_)->add_kernel(kernel, named, trial);
    } catch (const UserError&) {
      return {};
    }
    return named;
  }

  /// Schedules for no kernel of the program, and those of packing kernels, which follow from the kernels that they pack for.
  void check_given() const {
    std::vector<std::string> names;
    for (const auto& kernel : out_.kernels) names.push_back(kernel->name);
    for (const auto& [name, schedule] : given_) {
      DEPLO_CHECK(out_.find_kernel(name), "a schedule is given for kernel {}, which the program does not have; its kernels are {}", name,
                  joined(names));
      const Schedule& applied = out_.find_kernel(name)->schedule;
      DEPLO_CHECK(applied == schedule,
                  "schedule of kernel {}: it packs an operand, so that its schedule follows from that of the kernel that it "
                  "packs for: '{}', not '{}'",
                  name, print(applied), print(schedule));
    }
  }

  const loop_ir::Module& module_;
  const PassContext& ctx_;
  tile_ir::Module out_;
  std::map<std::string, Schedule> given_;
};

}  // namespace

tile_ir::Module lower_loop_to_tile(const loop_ir::Module& module, const PassContext& ctx) { return Lowering(module, ctx).run(); }

}  // namespace deplo
