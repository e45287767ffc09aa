#pragma once

#include <string>
#include <string_view>

namespace deplo {

/// What NVIDIA publishes of a device: enough for a roofline and the occupancy of its SMs.
struct CudaModel {
  std::string_view name;  ///< as --device takes it
  std::string_view arch;
  int sms;
  double boost_ghz;
  double dram_gb_s;
  double l2_mb;
  int shared_kb_sm, shared_kb_block;
  int warps_sm;
  double float32_tflops, bf16_tflops;  ///< without and with matrix units, dense
};

inline constexpr CudaModel kCudaModels[] = {
    {"a100", "sm_80", 108, 1.41, 2039, 40, 164, 163, 64, 19.5, 312},   {"h100", "sm_90a", 132, 1.98, 3350, 50, 228, 227, 64, 67, 989},
    {"h200", "sm_90a", 132, 1.98, 4800, 50, 228, 227, 64, 67, 989},    {"l4", "sm_89", 58, 2.04, 300, 48, 100, 99, 48, 30, 121},
    {"rtx4090", "sm_89", 128, 2.52, 1008, 72, 100, 99, 48, 82.6, 165}, {"rtx5090", "sm_120", 170, 2.41, 1792, 96, 100, 99, 48, 105, 210},
    {"b200", "sm_100", 148, 1.97, 8000, 126, 228, 227, 64, 80, 2250},
};

/// "sm_90a" of 90: what that generation alone has is used.
inline std::string cuda_arch(int capability) { return "sm_" + std::to_string(capability) + (capability == 90 ? "a" : ""); }

/// 90 of sm_90a.
inline int cuda_generation(std::string_view arch) {
  int number = 0;
  for (char c : arch)
    if (c >= '0' && c <= '9') number = number * 10 + (c - '0');
  return number;
}

/// A device of that architecture, or of one that is like it.
inline const CudaModel& cuda_model(std::string_view arch) {
  for (const CudaModel& model : kCudaModels)
    if (model.arch == arch) return model;
  const int generation = cuda_generation(arch);
  const bool small = generation == 86 || generation == 89 || generation >= 120;
  const std::string_view like = small ? "rtx4090" : generation >= 100 ? "b200" : generation >= 90 ? "h100" : "a100";
  for (const CudaModel& model : kCudaModels)
    if (model.name == like) return model;
  return kCudaModels[0];
}

}  // namespace deplo
