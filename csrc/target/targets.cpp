#include "target/targets.h"

#include <mutex>

#include "target/cpu/target.h"
#include "target/cuda/target.h"
#include "target/target.h"

namespace deplo {

void register_targets() {
  static std::once_flag once;
  std::call_once(once, [] {
    // The only list of targets.
    register_target(make_cpu_target());
    register_target(make_cuda_target());
  });
}

}  // namespace deplo
