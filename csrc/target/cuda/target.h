#pragma once

#include <memory>

#include "target/target.h"

namespace deplo {

/// NVIDIA's GPUs: loops on blocks and threads, CUDA C++ that NVRTC compiles at run time, the first GPU through the driver.
std::unique_ptr<const Target> make_cuda_target();

}  // namespace deplo
