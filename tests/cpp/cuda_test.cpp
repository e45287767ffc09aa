#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "codegen/codegen.h"
#include "pipeline.h"
#include "programs.h"
#include "target/cuda/nvrtc.h"
#include "tensor_ir/interpret.h"

using namespace deplo;
using namespace deplo::testing;

namespace {

namespace fs = std::filesystem;

/// Elements as bytes and back, for the dtypes that the cases use.
std::vector<char> to_bytes(const Array& a) {
  std::vector<char> bytes(static_cast<size_t>(a.count() * size_of(a.dtype)));
  for (int64_t k = 0; k < a.count(); ++k) {
    char* at = bytes.data() + k * size_of(a.dtype);
    auto put = [&](auto value) { std::memcpy(at, &value, sizeof value); };
    if (a.dtype == DType::f32)
      put(static_cast<float>(a.get(k).f));
    else
      put(f32_to_bf16(static_cast<float>(a.get(k).f)));
  }
  return bytes;
}

void from_bytes(Array& a, const std::vector<char>& bytes) {
  for (int64_t k = 0; k < a.count(); ++k) {
    const char* at = bytes.data() + k * size_of(a.dtype);
    float value = 0;
    uint16_t bits = 0;
    std::memcpy(a.dtype == DType::f32 ? static_cast<void*>(&value) : &bits, at, static_cast<size_t>(size_of(a.dtype)));
    a.set(k, Scalar::of_float(a.dtype, a.dtype == DType::f32 ? value : bf16_to_f32(bits)));
  }
}

/// The CUDA text of one kernel, compiled for this CPU with the emulator.
class EmulatedKernel {
 public:
  explicit EmulatedKernel(const kernel_ir::Kernel& kernel) : kernel_(kernel) {
    static int serial = 0;
    fs::path base = fs::temp_directory_path() / fmt::format("deplo-cuda-test-{}-{}", getpid(), serial++);
    std::string source = base.string() + ".cpp";
    std::string library = base.string() + ".so";
    std::ofstream(source) << "#include \"" DEPLO_EMULATOR "\"\n"
                          << cuda_text(kernel)
                          << "extern \"C\" void deplo_launch_test(const unsigned* grid, const unsigned* block, void** arguments, int reversed) {\n"
                          << "  deplo_launch_kernel(" << kernel.name
                          << ", {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, arguments, reversed);\n}\n";
    std::string command = fmt::format(DEPLO_CXX " -std=c++17 -O1 -w -shared -fPIC -o {} {}", library, source);
    REQUIRE(std::system(command.c_str()) == 0);
    handle_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    fs::remove(source);
    fs::remove(library);
    REQUIRE(handle_);
    launch_ = reinterpret_cast<Launch>(dlsym(handle_, "deplo_launch_test"));
    REQUIRE(launch_);
  }
  ~EmulatedKernel() { dlclose(handle_); }
  EmulatedKernel(const EmulatedKernel&) = delete;
  EmulatedKernel& operator=(const EmulatedKernel&) = delete;

  void run(const std::vector<Array*>& arrays, const Sizes& sizes, bool reversed) const {
    std::vector<std::vector<char>> memory;
    std::vector<void*> places;
    std::vector<void*> arguments;
    std::vector<long long> symbols;
    for (const Array* a : arrays) memory.push_back(to_bytes(*a));
    for (auto& m : memory) places.push_back(m.data());
    for (const std::string& s : kernel_.symbols) symbols.push_back(sizes.at(s));
    int error = 0;
    int* error_place = &error;
    for (void*& p : places) arguments.push_back(&p);
    for (long long& s : symbols) arguments.push_back(&s);
    arguments.push_back(&error_place);
    unsigned grid[3] = {1, 1, 1};
    unsigned block[3] = {1, 1, 1};
    for (size_t d = 0; d < kernel_.grid.size(); ++d) grid[d] = static_cast<unsigned>(evaluate(kernel_.grid[d], sizes));
    for (size_t d = 0; d < kernel_.block.size(); ++d) block[d] = static_cast<unsigned>(evaluate(kernel_.block[d], sizes));
    launch_(grid, block, arguments.data(), reversed);
    CHECK(error == 0);
    for (size_t k = 0; k < arrays.size(); ++k) from_bytes(*arrays[k], memory[k]);
  }

 private:
  using Launch = void (*)(const unsigned*, const unsigned*, void**, int);
  const kernel_ir::Kernel& kernel_;
  void* handle_ = nullptr;
  Launch launch_ = nullptr;
};

kernel_ir::Module kernels_for_cuda(const Case& c) {
  PassContext context;
  context.target.name = "cuda";
  return run_pipeline_from_text(c.text, c.name, context, {}).kernel;
}

}  // namespace

TEST_CASE("CUDA text computes what the program means, whatever the order of threads") {
  for (const Case& c : cases()) {
    if (!c.fits_gpu) continue;  // levels_test checks that they are refused
    kernel_ir::Module module = kernels_for_cuda(c);
    INFO(c.name << "\n" << print(module));
    tensor_ir::Graph graph = tensor_ir::parse(c.text);
    std::vector<Array> inputs = random_inputs(graph, c.sizes);
    std::vector<Array> wanted = tensor_ir::interpret(graph, inputs, c.sizes, Mode::typed);
    std::map<std::string, std::unique_ptr<EmulatedKernel>> emulated;
    for (const auto& kernel : module.kernels) emulated[kernel->name] = std::make_unique<EmulatedKernel>(*kernel);
    auto find_params = [&](const std::string& name) -> std::optional<std::vector<ParamType>> {
      std::vector<ParamType> params;
      for (const auto& p : module.find_kernel(name)->params) params.push_back({p.dtype, p.kind != loop_ir::ParamKind::in});
      return params;
    };
    for (bool reversed : {false, true}) {
      auto call = [&](const CallStep& step, const std::vector<Array*>& arrays, const Sizes& sizes) {
        emulated.at(step.kernel)->run(arrays, sizes, reversed);
      };
      require_close(interpret(module, find_params, inputs, c.sizes, call, Mode::typed, no_library()), wanted, c.name == "bfloat16" ? 8e-3 : 2e-5);
    }
  }
}

TEST_CASE("NVRTC compiles every kernel for two generations of GPUs") {
  if (std::string(DEPLO_NVRTC).empty()) {
    WARN("no NVRTC found: install nvidia-cuda-nvrtc 13.0 to run this test");
    return;
  }
  for (const Case& c : cases()) {
    if (!c.fits_gpu) continue;
    for (const auto& kernel : kernels_for_cuda(c).kernels)
      for (const char* arch : {"sm_80", "sm_90"}) {
        INFO(c.name << "\n" << cuda_text(*kernel));
        CHECK(!nvrtc_compile(cuda_text(*kernel), arch, DEPLO_NVRTC).cubin.empty());
      }
  }
}

TEST_CASE("NVRTC's complaints and its absence are told") {
  CHECK_THROWS_AS(nvrtc_compile("", "sm_80", "/nonexistent/libnvrtc.so"), UnsupportedError);
  if (std::string(DEPLO_NVRTC).empty()) return;
  CHECK_THROWS_WITH(nvrtc_compile("__global__ void k() { x = 1; }", "sm_80", DEPLO_NVRTC), Catch::Contains("undefined"));
}
