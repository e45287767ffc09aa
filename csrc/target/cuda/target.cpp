#include "target/target.h"

#include "lower/loop_to_tile/gpu.h"

namespace deplo {
namespace {

class CudaScheduler final : public Scheduler {
 public:
  explicit CudaScheduler(const PassContext& context) : context_(context) {}
  void add_kernel(const loop_ir::Kernel& kernel, const std::map<std::string, Schedule>& given, tile_ir::Module& out) override {
    auto found = given.find(kernel.name);
    Schedule schedule = found != given.end() ? found->second : propose_gpu(kernel, context_);
    out.kernels.push_back(std::make_shared<tile_ir::Kernel>(apply_gpu(kernel, schedule, context_)));
  }

 private:
  const PassContext& context_;
};

std::unique_ptr<Scheduler> make_scheduler(const loop_ir::Module&, const PassContext& context) { return std::make_unique<CudaScheduler>(context); }

}  // namespace

constinit const Target kCudaTarget{"cuda", /*has_grid=*/true, /*most_vector_bytes=*/16, /*shuffles_lanes=*/false, make_scheduler};

}  // namespace deplo
