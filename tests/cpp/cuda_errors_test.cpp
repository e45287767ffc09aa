#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.h"
#include "base/sha256.h"
#include "cuda_programs.h"

using namespace deplo;
using namespace deplo::testing;

TEST_CASE("a digest is that of SHA-256") {
  CHECK(sha256_hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256_hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256_hex(std::string(1000000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("NVRTC's complaints and its absence are told") {
  CHECK_THROWS_AS(nvrtc_compile("", "sm_80", "/nonexistent/libnvrtc.so"), UnsupportedError);
  CHECK_THROWS_WITH(nvrtc_compile("__global__ void k() { x = 1; }", "sm_80", DEPLO_FAKE_CUDA), Catch::Contains("not declared"));
  if (std::string(DEPLO_NVRTC).empty()) return;
  CHECK_THROWS_WITH(nvrtc_compile("__global__ void k() { x = 1; }", "sm_80", DEPLO_NVRTC), Catch::Contains("undefined"));
}

TEST_CASE("inputs on another device, or not aligned to their elements, are refused before anything starts") {
  kernel_ir::Module module = kernels_for_cuda(softmax_of("s0", "8", " where s0 in 0.."), "softmax");
  Behaviour behaviour("devices=2");
  auto device = CudaDevice::open(DEPLO_FAKE_CUDA, 1);
  runtime::Program program(module, {{}, std::make_shared<CudaKernels>(device, module, DEPLO_FAKE_CUDA), ""}, nullptr, tensors_on(1));
  alignas(8) char bytes[72] = {};
  std::vector<int64_t> sizes{2, 8};
  std::vector<int64_t> strides{8, 1};
  auto run = [&](char* data, int on) {
    CallArgument argument;
    argument.tensor = {data, DType::f32, 2, sizes.data(), strides.data(), bytes, 0};
    argument.tensor.device = on;
    ArrayHost host;
    program.run(&argument, 1, host, 1);
  };
  run(bytes, 1);
  CHECK_THROWS_WITH(run(bytes, 0), Catch::Contains("is on device 0, the program on device 1"));
  CHECK_THROWS_WITH(run(bytes, -1), Catch::Contains("is on the host, the program on device 1"));
  CHECK_THROWS_WITH(run(bytes + 2, 1), Catch::Contains("no multiple of its elements' 4 bytes"));
  sizes[0] = 0;
  run(bytes, 1);  // a grid of no blocks
}

TEST_CASE("what the driver lacks is told") {
  CHECK_THROWS_WITH(CudaDevice::open("/nonexistent/libcuda.so"), Catch::Contains("install NVIDIA's driver"));
  CHECK_THROWS_WITH(CudaDevice::open("libdl.so.2"), Catch::Contains("this libcuda has no cuInit"));
  {
    Behaviour behaviour("devices=0");
    CHECK_THROWS_WITH(CudaDevice::open(DEPLO_FAKE_CUDA), Catch::Contains("finds no device"));
  }
  {
    Behaviour behaviour("fail=cuInit:100");
    CHECK_THROWS_WITH(CudaDevice::open(DEPLO_FAKE_CUDA), Catch::Contains("cannot start: CUDA_ERROR_NO_DEVICE (some text)"));
  }
  {
    Behaviour behaviour("fail=cuDeviceGetCount:9");
    CHECK_THROWS_WITH(CudaDevice::open(DEPLO_FAKE_CUDA), Catch::Contains("cannot count devices: error 9"));
  }
  CHECK_THROWS_AS(CudaDevice::open(DEPLO_FAKE_CUDA, 1), UserError);
  Behaviour behaviour("capability=86");
  auto device = CudaDevice::open(DEPLO_FAKE_CUDA);
  CHECK(device->name() == "emulated GPU");
  CHECK(device->capability() == 86);
  CHECK(device->shared_bytes() == 232448);
  CHECK(nvrtc_arch(device->capability(), DEPLO_FAKE_CUDA) == "compute_80");
}

TEST_CASE("every call that the driver refuses is an error with its name and text, and leaves nothing behind") {
  // A row of 60 KiB: dynamic shared memory that a function must ask for.
  Case c{"softmax", softmax_of("s0", "s1", " where s0 in 1.., s1 in 1.."), {{"s0", 1}, {"s1", 15000}}};
  kernel_ir::Module module = kernels_for_cuda(c.text, c.name, "schedule @k0: gpu_rows threads(32) blocks(4)");
  std::vector<Array> inputs = random_inputs(tensor_ir::parse(c.text), c.sizes);
  auto log = std::filesystem::temp_directory_path() / fmt::format("deplo-cuda-calls-{}", getpid());
  auto run = [&](const std::string& settings) {
    Behaviour behaviour(settings + ",log=" + log.string());
    run_on_device(CudaDevice::open(DEPLO_FAKE_CUDA), module, inputs, c.sizes, DEPLO_FAKE_CUDA);
  };
  /// How often each call was made since the last time.
  auto calls_made = [&] {
    std::map<std::string, int> calls;
    std::ifstream in(log);
    for (std::string line; std::getline(in, line);) ++calls[line];
    std::filesystem::remove(log);
    return calls;
  };
  auto check_balance = [&](std::map<std::string, int> calls, const std::string& failing) {
    for (const auto& [open, close] : {std::pair<std::string, std::string>{"cuMemAlloc_v2", "cuMemFree_v2"},
                                      {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"},
                                      {"cuModuleLoadData", "cuModuleUnload"},
                                      {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"}}) {
      INFO(open);
      if (open != failing) CHECK(calls[open] == calls[close]);
    }
  };
  calls_made();
  run("");
  std::map<std::string, int> calls = calls_made();
  CHECK(calls.at("cuLaunchKernel") == 1);
  CHECK(calls.at("cuFuncSetAttribute") == 1);
  check_balance(calls, "");
  const std::set<std::string> ending{"cuMemFree_v2", "cuCtxPopCurrent_v2", "cuModuleUnload", "cuDevicePrimaryCtxRelease_v2"};
  const std::set<std::string> starting{"cuInit", "cuDeviceGetCount"};
  for (const auto& [name, count] : calls) {
    if (name.substr(0, 2) != "cu" || starting.count(name)) continue;  // of NVRTC, or tested above
    INFO(name);
    if (ending.count(name)) {
      CHECK_NOTHROW(run("fail=" + name + ":719"));  // clearing up reports nothing: what failed before has been told
      continue;
    }
    std::string call = name.substr(0, name.find("_v2"));
    calls_made();
    CHECK_THROWS_AS(run("fail=" + name + ":719"), ExecutionError);
    check_balance(calls_made(), name);
    CHECK_THROWS_WITH(run("fail=" + name + ":719"), Catch::Contains("failed in " + call + ": CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"));
  }
  CHECK_THROWS_WITH(run("fail=cuMemAlloc_v2:2"), Catch::Contains("bytes of memory left: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"));
  CHECK_THROWS_AS(run("fail=nvrtcCreateProgram:1"), InternalError);
  CHECK_THROWS_AS(run("fail=nvrtcCompileProgram:6"), InternalError);
  CHECK_THROWS_AS(run("fail=nvrtcGetCUBIN:1"), InternalError);
  CHECK_NOTHROW(run(""));  // and the device works on
  calls_made();
}

TEST_CASE("errors that kernels report reach the caller") {
  const std::string text = R"(program @p(x: i64[40] user, y: i64[40] user)
  buffer z: i64[40] output
  call @k0(x, y, z)
  return z

loop @k0(x: i64[40], y: i64[40], out z: i64[40])
  for i in 40:
    a = load x[i]
    b = load y[i]
    c = trunc_div(a, b)
    store z[i] = c
)";
  kernel_ir::Module module = kernels_for_cuda(text, "division");
  Array ones = Array::filled(DType::i64, {40}, Scalar::of_int(DType::i64, 1));
  Array zero = ones;
  zero.ints[17] = 0;
  auto device = CudaDevice::open(DEPLO_FAKE_CUDA);
  CHECK_NOTHROW(run_on_device(device, module, {ones, ones}, {}, DEPLO_FAKE_CUDA));
  CHECK_THROWS_AS(run_on_device(device, module, {ones, zero}, {}, DEPLO_FAKE_CUDA), ExecutionError);
  // A grid of no blocks is not launched.
  Case empty{"softmax", softmax_of("s0", "40", " where s0 in 0.."), {{"s0", 0}}};
  CHECK_NOTHROW(check_on(device, empty, DEPLO_FAKE_CUDA));
}
