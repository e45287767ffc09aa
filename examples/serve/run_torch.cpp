// run_torch MODEL.deplo: runs a package on LibTorch's tensors: of ones, each symbolic size 4; prints sizes and sums of its outputs.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "deplo_runtime_torch.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run_torch MODEL.deplo\n");
    return 2;
  }
  try {
    const deplo::Model model(argv[1]);
    std::vector<c10::IValue> inputs;
    for (size_t i = 0; i < deplo_input_count(model.get()); ++i) {
      std::vector<int64_t> sizes;
      for (int d = 0; d < deplo_input_rank(model.get(), i); ++d) sizes.push_back(std::max<int64_t>(deplo_input_size(model.get(), i, d), 4));
      if (deplo_input_kind(model.get(), i) == DEPLO_INTEGER)
        inputs.emplace_back(int64_t{4});
      else
        inputs.emplace_back(at::ones(sizes));
    }
    for (const c10::IValue& output : model.run(inputs)) {
      if (!output.isTensor()) continue;
      const at::Tensor& tensor = output.toTensor();
      std::printf("[");
      for (int64_t d = 0; d < tensor.dim(); ++d) std::printf("%s%lld", d ? ", " : "", static_cast<long long>(tensor.size(d)));
      std::printf("] sum %.6f\n", tensor.to(at::kDouble).sum().item<double>());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
