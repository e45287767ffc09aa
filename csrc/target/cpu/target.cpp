#include "target/target.h"

#include "target/cpu/scheduler.h"

namespace deplo {

constinit const Target kCpuTarget{"cpu", /*has_grid=*/false, /*most_vector_bytes=*/64, /*shuffles_lanes=*/true, make_cpu_scheduler};

}  // namespace deplo
