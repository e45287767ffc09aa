#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "base/error.h"
#include "cuda_programs.h"
#include "loop_ir/text.h"
#include "target/cuda/text.h"
#include "target/cuda/traffic.h"

using namespace deplo;
using namespace deplo::testing;

namespace {

/// Threads in order and the other way round, scratch memory in shared and in global memory, tensors on the device and on the host.
void check_emulated(const Case& c, const std::string& schedule = "") {
  for (const auto& [settings, tensors] : {std::pair{"shared=0", 0}, {"reversed=1,late=1", -1}}) {
    Behaviour behaviour(settings);
    INFO(settings);
    check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA, schedule, tensors);
  }
}

/// c[.., i, j] = sum over k of a[.., i, k] * y[.., k, j], where `prologue` computes a from x.
std::string matmul_of(const std::string& m, const std::string& n, const std::string& k, const std::string& batch = "",
                      const std::string& prologue = "  %zero: f32SHAPE = constant 0.0\n  %a: f32SHAPE = add(%x, %zero)\n") {
  std::string where;
  for (const std::string& size : {batch, m, n, k})
    if (!size.empty() && size[0] == 's') where += (where.empty() ? " where " : ", ") + size + " in 1..";
  auto shape = [&](const std::string& rows, const std::string& columns) {
    return fmt::format("[{}{}, {}]", batch.empty() ? "" : batch + ", ", rows, columns);
  };
  auto strides = [&](const std::string& rows, const std::string& columns) {
    return fmt::format("strides [{}{}, 1]", batch.empty() ? "" : fmt::format("{}*{}, ", rows, columns), columns);
  };
  std::string text = R"(tensor @mm(%x: f32SHAPE STRIDES user, %y: f32YSHAPE YSTRIDES user)WHERE
PROLOGUE  %xm: f32ALL = map (Bi, j, k) -> %a[Bi, k]
  %ym: f32ALL = map (Bi, j, k) -> %y[Bk, j]
  %p: f32ALL = mul(%xm, %ym)
  %c: f32OUT = reduce sum(%p) axes=[AXIS]
  return %c CSTRIDES
)";
  const std::pair<std::string, std::string> replacements[] = {{"PROLOGUE", prologue},
                                                              {"WHERE", where},
                                                              {"YSHAPE", shape(k, n)},
                                                              {"YSTRIDES", strides(k, n)},
                                                              {"CSTRIDES", strides(m, n)},
                                                              {"SHAPE", shape(m, k)},
                                                              {"STRIDES", strides(m, k)},
                                                              {"OUT", shape(m, n)},
                                                              {"ALL", fmt::format("[{}{}, {}, {}]", batch.empty() ? "" : batch + ", ", m, n, k)},
                                                              {"B", batch.empty() ? "" : "b, "},
                                                              {"AXIS", batch.empty() ? "2" : "3"}};
  for (const auto& [from, to] : replacements) text = std::regex_replace(text, std::regex(from), to);
  return text;
}

/// A convolution of 3 x 3 taps with zeros around the image.
std::string convolution_of(const std::string& images, int stride) {
  std::string where = images[0] == 's' ? " where s0 in 1.." : "";
  int out = stride == 1 ? 9 : 5;
  return fmt::format(
      R"(tensor @conv(%x: f32[{0}, 5, 9, 9] strides [405, 81, 9, 1] user, %w: f32[7, 5, 3, 3] strides [45, 9, 3, 1] parameter static){1}
  %xm: f32[{0}, 7, {2}, {2}, 5, 3, 3] = map (n, o, y, x, c, u, v) -> %x[n, c, y*{3} + u - 1, x*{3} + v - 1] if y*{3} + u - 1 >= 0 and y*{3} + u - 1 < 9 and x*{3} + v - 1 >= 0 and x*{3} + v - 1 < 9 else 0.0
  %wm: f32[{0}, 7, {2}, {2}, 5, 3, 3] = map (n, o, y, x, c, u, v) -> %w[o, c, u, v]
  %p: f32[{0}, 7, {2}, {2}, 5, 3, 3] = mul(%xm, %wm)
  %c: f32[{0}, 7, {2}, {2}] = reduce sum(%p) axes=[4, 5, 6]
  return %c strides [{4}, {5}, {2}, 1]
)",
      images, where, out, stride, 7 * out * out, out * out);
}

/// What the text of one kernel shows of staging: two arrays in shared memory, and a loop over stages that fills them before its one barrier, fetches
/// the operands of the next stage behind it, and multiplies what it reads from them alone.
void check_staged(const std::string& text) {
  INFO(text);
  std::smatch body;
  REQUIRE(std::regex_search(text, body, std::regex(R"(__global__ void (__launch_bounds__\(\d+\) )?\w*(mm|conv|k0)\w*\()")));
  std::string kernel = text.substr(static_cast<size_t>(body.position()));
  std::vector<std::string> shared;
  static const std::regex kShared(R"(__shared__ __align__\(16\) \w+ (\w+)\[\d+\])");
  for (std::sregex_iterator at(kernel.begin(), kernel.end(), kShared), end; at != end; ++at) shared.push_back((*at)[1]);
  REQUIRE(shared.size() == 2);
  size_t barrier = kernel.find("__syncthreads();");
  REQUIRE(barrier != std::string::npos);
  std::smatch unrolled;
  const std::string behind = kernel.substr(barrier);
  REQUIRE(std::regex_search(behind, unrolled, std::regex(R"(#pragma unroll \d+)")));
  std::string multiplying = behind.substr(static_cast<size_t>(unrolled.position()), behind.find("}") - 0);
  multiplying = multiplying.substr(0, multiplying.find("}\n"));
  const std::string filling = kernel.substr(0, barrier);
  for (const std::string& array : shared) {
    CHECK(std::regex_search(filling, std::regex(fmt::format(R"(({0}\[[^;]*\] = |deplo_put\({0} \+ ))", array))));
    CHECK(std::regex_search(multiplying, std::regex(fmt::format(R"(= ({0}\[|deplo_get<\d>\({0} \+ ))", array))));
    CHECK_FALSE(std::regex_search(multiplying, std::regex(fmt::format(R"(({0}\[[^=;]*\] = |deplo_put\({0} ))", array))));
  }
  // Only fetching reads operands in global memory.
  CHECK_FALSE(std::regex_search(multiplying, std::regex(R"((= v_a\d+\[|deplo_get<\d>\(v_a\d+ ))")));
}

/// The lines that the emulator's judge has written.
struct JudgeFile {
  std::string path = (std::filesystem::temp_directory_path() / fmt::format("deplo-judge-{}", getpid())).string();
  JudgeFile() { std::filesystem::remove(path); }
  ~JudgeFile() { std::filesystem::remove(path); }
  std::string text() const {
    std::ifstream in(path);
    std::ostringstream all;
    all << in.rdbuf();
    return all.str();
  }
};

double counted(const std::string& text, const std::string& name) {
  std::smatch found;
  REQUIRE(std::regex_search(text, found, std::regex(name + R"(=(\d+))")));
  return std::stod(found[1]);
}

}  // namespace

TEST_CASE("CUDA text computes what the program means, whatever the order of threads and the place of scratch memory") {
  for (const Case& c : cases()) check_emulated(c);
}

TEST_CASE("index expressions divide as Python does in CUDA text") { check_divisions_on(CudaDevice::open(DEPLO_FAKE_CUDA), DEPLO_FAKE_CUDA); }

TEST_CASE("CUDA text has no race on shared memory and reads nothing there that it did not write") {
  JudgeFile file;
  Behaviour behaviour("judge=" + file.path);
  for (const Case& c : cases()) check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA);
  for (const char* m : {"64", "70"}) check_on(CudaDevice::open(DEPLO_FAKE_CUDA), {"mm", matmul_of(m, "72", "40"), {}}, DEPLO_FAKE_CUDA);
  CHECK(file.text().find("races=0") != std::string::npos);
}

TEST_CASE("the emulator's judge finds what is seeded, and counts sectors and conflicts") {
  JudgeFile file;
  Behaviour behaviour("judge=" + file.path);
  auto device = CudaDevice::open(DEPLO_FAKE_CUDA);
  auto run = [&](const std::string& body) {
    std::filesystem::remove(file.path);
    const std::string text =
        "extern \"C\" __global__ void k(const float* __restrict__ x, float* __restrict__ y) {\n"
        "  __shared__ __align__(16) float s[2048];\n  int t = (int)threadIdx.x;\n" +
        body + "}\n";
    void* module = device->load_module(nvrtc_compile(text, "sm_90", DEPLO_FAKE_CUDA).image);
    unsigned long long x = device->allocate(4 * 2048);
    unsigned long long y = device->allocate(4 * 2048);
    device->fill(x, 0, 4 * 2048);
    void* arguments[] = {&x, &y};
    CudaLaunch launch;
    launch.block[0] = 64;
    bool fine = true;
    try {
      device->launch(device->function(module, "k"), launch, arguments);
      device->synchronize();
    } catch (const ExecutionError&) {
      fine = false;
    }
    device->free(x);
    device->free(y);
    device->unload_module(module);
    return fine;
  };
  CHECK(run("  s[t] = x[t];\n  __syncthreads();\n  y[t] = s[63 - t];\n"));
  CHECK(counted(file.text(), "global_bytes") == 2 * 64 * 4);
  CHECK(counted(file.text(), "global_sectors") == 2 * 2 * 4);
  CHECK(counted(file.text(), "global_requests") == 4);
  CHECK(counted(file.text(), "shared_ways") == counted(file.text(), "shared_requests"));
  CHECK_FALSE(run("  s[t] = x[t];\n  y[t] = s[63 - t];\n"));  // no barrier behind the writes
  CHECK(counted(file.text(), "races") > 0);
  const std::string copied =
      "  deplo_emulate_copy(s + 4*t + {0}, x + 4*t + {1}, 16);\n  deplo_emulate_copy_commit();\n"
      "  deplo_emulate_copy_wait(0);\n  __syncthreads();\n  y[t] = s[4*t + {0}];\n";
  auto copies = [&](int to, int from) {
    return run(
        std::regex_replace(std::regex_replace(copied, std::regex("\\{0\\}"), std::to_string(to)), std::regex("\\{1\\}"), std::to_string(from)));
  };
  CHECK(copies(4, 4));
  CHECK_FALSE(copies(1, 4));  // hardware copies 16 bytes from and to multiples of 16
  CHECK_FALSE(copies(4, 2));
  CHECK_FALSE(run("  s[t] = x[t];\n  __syncthreads();\n  float v = s[63 - t];\n  s[t] = v + 1;\n  y[t] = v;\n"));  // none before they are overwritten
  CHECK(counted(file.text(), "races") > 0);
  CHECK_FALSE(run("  s[t] = x[t];\n  __syncthreads();\n  y[t] = s[t ^ 1];\n  if (t % 2 == 1) s[t] = 1;\n"));
  CHECK(file.text().find("is read and written without a barrier") != std::string::npos);
  CHECK_FALSE(run("  s[0] = x[t];\n  __syncthreads();\n  y[t] = s[0];\n"));
  CHECK(file.text().find("written twice") != std::string::npos);
  CHECK_FALSE(run("  if (t < 63) s[t] = x[t];\n  __syncthreads();\n  y[t] = s[t];\n"));
  CHECK(counted(file.text(), "unwritten") == 4);
  CHECK_FALSE(run("  if (t < 32) __syncthreads();\n  y[t] = x[t];\n"));  // a barrier that half of the threads reach
  const std::string copy = "  deplo_emulate_copy(&s[4 * t], &x[4 * t], 16);\n  deplo_emulate_copy_commit();\n";
  const std::string wait = "  deplo_emulate_copy_wait(0);\n";
  const std::string barrier = "  __syncthreads();\n";
  CHECK(run(copy + wait + barrier + "  y[t] = s[255 - t];\n"));
  CHECK(counted(file.text(), "global_bytes") == 64 * (16 + 4));
  CHECK_FALSE(run(copy + barrier + "  y[t] = s[255 - t];\n"));  // not waited for
  CHECK(file.text().find("read before a copy to it was waited for") != std::string::npos);
  CHECK_FALSE(run(copy + barrier + wait + "  y[t] = s[255 - t];\n"));                              // waited for behind the barrier
  CHECK_FALSE(run(copy + wait + barrier + "  float v = s[255 - t];\n" + copy + "  y[t] = v;\n"));  // copied over what others may still read
  CHECK_FALSE(run(copy + copy + wait + barrier + "  y[t] = s[t];\n"));
  const std::string zeros = "  for (int k = 0; k < 32; ++k) s[t + 64 * k] = 0;\n  unsigned r[4];\n";
  CHECK(run(zeros + barrier + "  deplo_emulate_load_matrix(&s[32 * t], r, 4, false);\n  y[t] = r[0];\n"));
  CHECK(counted(file.text(), "shared_ways") == counted(file.text(), "shared_requests") + 2 * 4 * 7);  // eight rows in the same banks
  CHECK_FALSE(run(zeros + "  deplo_emulate_load_matrix(&s[32 * t], r, 4, false);\n  y[t] = r[0];\n"));
  const std::string product = "  float c[4] = {};\n  float* const p[] = {c, c + 1, c + 2, c + 3};\n  unsigned a[4] = {};\n";
  CHECK(run(product + "  deplo_emulate_mma(p, a, 0, 0, true);\n  y[t] = c[0];\n"));
  CHECK_FALSE(run(product + "  if (t < 16) deplo_emulate_mma(p, a, 0, 0, true);\n  y[t] = c[0];\n"));  // half a warp
  CHECK_FALSE(run(product + "  if (t < 16) deplo_emulate_mma_tf32(p, a, 0, 0);\n  y[t] = c[0];\n"));
  // Element (row, k) of a is 1 at (3, 5) alone, (k, column) of b 7 at (5, 2): by the PTX manual's layout of m16n8k8. What tf32 lacks is cut.
  const std::string one = "  a[2] = t % 32 == 13 ? 0x3f800fffu : 0;\n  unsigned b1 = t % 32 == 9 ? 0x40e00000u : 0;\n";
  const std::string good = "c[0] == (t % 32 == 13 ? 7 : 0) && c[1] == 0 && c[2] == 0 && c[3] == 0";
  CHECK(run(product + one + "  deplo_emulate_mma_tf32(p, a, 0, b1);\n  y[t] = " + good + " ? 0 : s[t];\n"));  // else what nobody wrote
  CHECK(run("  s[t * 32 % 2048] = x[t * 8];\n"));
  CHECK(counted(file.text(), "shared_ways") == 32 * counted(file.text(), "shared_requests"));
  CHECK(counted(file.text(), "global_sectors") == 64);
}

TEST_CASE("counts of the emulator agree with those of the kernel's text") {
  for (const Case& c :
       {Case{"softmax", softmax_of("8", "256"), {}}, Case{"mm", matmul_of("64", "64", "32"), {}},
        Case{"halves", halves_of("bf16", "64", "64", "64", false, false), {}}, Case{"halves", halves_of("f16", "64", "64", "72", true, true), {}}}) {
    JudgeFile file;
    Behaviour behaviour("judge=" + file.path);
    check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA);
    const Traffic traffic = measure_traffic(*kernels_for_cuda(c.text, c.name).kernels[0], {});
    INFO(c.name << ": " << file.text());
    CHECK(traffic.complete);
    CHECK(traffic.global_bytes == Approx(counted(file.text(), "global_bytes")));
    CHECK(traffic.global_sectors == Approx(counted(file.text(), "global_sectors")));
    CHECK(traffic.global_requests == Approx(counted(file.text(), "global_requests")));
    CHECK(traffic.shared_requests == Approx(counted(file.text(), "shared_requests")));
    CHECK(traffic.shared_ways == Approx(counted(file.text(), "shared_ways")));
  }
}

TEST_CASE("products of 16-bit operands run on matrix units without races and without bank conflicts") {
  JudgeFile file;
  for (const bool x_by_k : {false, true})
    for (const bool y_by_k : {false, true})
      for (const char* settings : {"", ",late=1,reversed=1"}) {
        std::filesystem::remove(file.path);
        Behaviour behaviour("judge=" + file.path + settings);
        const Case c{"halves", halves_of(y_by_k ? "f16" : "bf16", "136", "40", "104", x_by_k, y_by_k), {}};
        const std::string schedule = "schedule @k0: gpu_matrix tile(i0=64) tile(i1=32) tile(r0.k0=32) warps(i0=2, i1=1) stages(4) raster(2)";
        check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA, schedule);
        CHECK(counted(file.text(), "shared_ways") == counted(file.text(), "shared_requests"));
        CHECK(cuda_text(kernels_for_cuda(c.text, c.name)).find("deplo_mma_") != std::string::npos);
      }
  // Nothing is aligned.
  check_emulated({"halves", halves_of("bf16", "s0", "37", "45", false, true), {{"s0", 33}}});
}

TEST_CASE("tiles that come by maps are multiplied by groups of threads without races") {
  JudgeFile file;
  for (const bool x_by_k : {false, true})
    for (const bool y_by_k : {false, true}) {
      std::filesystem::remove(file.path);
      Behaviour behaviour("judge=" + file.path + (x_by_k ? ",late=1,reversed=1" : ""));
      const Case c{"halves", halves_of(y_by_k ? "f16" : "bf16", "136", "40", "136", x_by_k, y_by_k), {}};
      check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA, "schedule @k0: gpu_tiles tile(i0=128) tile(i1=64) stages(2) raster(2)");
      CHECK(counted(file.text(), "races") == 0);
    }
}

TEST_CASE("groups of threads multiply what the block copied or computed, without races and without bank conflicts") {
  JudgeFile file;
  for (const bool x_by_k : {false, true})
    for (const bool y_by_k : {false, true}) {
      std::filesystem::remove(file.path);
      Behaviour behaviour("judge=" + file.path + (x_by_k == y_by_k ? ",late=1,reversed=1" : ""));
      const Case c{"halves", halves_of(y_by_k ? "f16" : "bf16", "136", "40", "136", x_by_k, y_by_k), {}};
      check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA,
               "schedule @k0: gpu_groups tile(i0=128) tile(i1=64) tile(r0.k0=64) stages(3) raster(2)");
      CHECK(counted(file.text(), "races") == 0);
      CHECK(counted(file.text(), "shared_ways") == counted(file.text(), "shared_requests"));
    }
}

TEST_CASE("warps that add up parts of k meet in shared memory") {
  JudgeFile file;
  for (const char* settings : {"", ",late=1,reversed=1"}) {
    std::filesystem::remove(file.path);
    Behaviour behaviour("judge=" + file.path + settings);
    const Case c{"halves", halves_of("bf16", "20", "40", "256", false, false), {}};
    check_on(CudaDevice::open(DEPLO_FAKE_CUDA), c, DEPLO_FAKE_CUDA,
             "schedule @k0: gpu_matrix tile(i0=16) tile(i1=32) tile(r0.k0=32) warps(i0=1, i1=1) split(4) stages(3) raster(2)");
    CHECK(counted(file.text(), "races") == 0);
    CHECK(counted(file.text(), "shared_ways") == counted(file.text(), "shared_requests"));
  }
}

TEST_CASE("the emulator's judge finds flags that nobody waits for, and tiles that are overwritten") {
  JudgeFile file;
  auto device = CudaDevice::open(DEPLO_FAKE_CUDA);
  constexpr int64_t kSide = 64;
  constexpr int64_t kDepth = 320;
  const std::string text = cuda_text(kernels_for_cuda(halves_of("bf16", "64", "64", "320", false, false), "halves",
                                                      "schedule @k0: gpu_tiles tile(i0=64) tile(i1=64) stages(2) raster(1)"));
  std::smatch kernel;
  REQUIRE(std::regex_search(text, kernel, std::regex(R"(void __launch_bounds__\(160\) (\w+)\()")));
  std::vector<uint16_t> numbers(kSide * kDepth);
  for (size_t k = 0; k < numbers.size(); ++k) numbers[k] = f32_to_bf16(static_cast<float>(k * k % 11) - 5);
  std::vector<uint16_t> results(kSide * kSide);
  auto run = [&](const std::string& what, const std::string& becomes, const std::string& settings, uint64_t past = 0) {
    std::filesystem::remove(file.path);
    Behaviour behaviour("judge=" + file.path + settings);
    std::string changed = text;
    const size_t at = changed.find(what);  // in the body that maps feed
    REQUIRE(at != std::string::npos);
    changed.replace(at, what.size(), becomes);
    void* module = device->load_module(nvrtc_compile(changed, "sm_90a", DEPLO_FAKE_CUDA).image);
    CudaMemory x(device, kSide * kDepth * 2 + 2);
    CudaMemory y(device, kSide * kDepth * 2);
    CudaMemory b(device, kSide * 2);
    CudaMemory z(device, kSide * kSide * 2);
    device->fill(b.pointer(), 0, kSide * 2);
    CudaMemory error_word(device, 4);
    device->copy_to_device(x.pointer() + past, numbers.data(), kSide * kDepth * 2);
    device->copy_to_device(y.pointer(), numbers.data(), kSide * kDepth * 2);
    const CudaTensor tensor{true, {kDepth, kSide}, {kDepth * 2}, {64, 64}};
    TensorMap maps[] = {device->encode(tensor, x.pointer() + past), device->encode(tensor, y.pointer())};
    unsigned long long pointers[] = {x.pointer() + past, y.pointer(), b.pointer(), z.pointer(), error_word.pointer()};
    void* arguments[] = {&pointers[0], &pointers[1], &pointers[2], &pointers[3], &pointers[4], maps[0].data(), maps[1].data()};
    CudaLaunch launch;
    launch.block[0] = 160;
    launch.shared_bytes = 2 * 2 * kSide * 64 * 2 + 32;
    bool fine = true;
    try {
      void* function = device->function(module, kernel[1]);
      device->launch(function, launch, arguments);
      device->synchronize();
    } catch (const ExecutionError&) {
      fine = false;
    }
    device->unload_module(module);
    device->copy_to_host(results.data(), z.pointer(), kSide * kSide * 2);
    return fine;
  };
  const auto all_right = [&] {
    for (size_t at = 0; at < results.size(); ++at) {
      float sum = 0;
      for (size_t k = 0; k < kDepth; ++k) sum += bf16_to_f32(numbers[at / kSide * kDepth + k]) * bf16_to_f32(numbers[at % kSide * kDepth + k]);
      if (results[at] != f32_to_bf16(sum)) return false;
    }
    return true;
  };
  CHECK(run("deplo_group_wait<1>();", "deplo_group_wait<1>();", ""));
  CHECK(all_right());
  CHECK(run("deplo_group_wait<1>();", "deplo_group_wait<1>();", "", 2));  // no map can say where the operand lies
  CHECK(all_right());
  CHECK(run(", 16, 1024);", ", 16, 512);", ""));  // a wrong distance between lines
  CHECK_FALSE(all_right());
  for (const char* settings : {"", ",late=1", ",reversed=1"}) {
    INFO(settings);
    CHECK(run("deplo_group_wait<1>();", "deplo_group_wait<1>();", settings));
    CHECK_FALSE(run("deplo_group_wait<1>();", "deplo_group_wait<2>();", settings));  // the products may still read what is given free
    CHECK(file.text().find("a tile is written while a product may read it") != std::string::npos);
  }
  const std::regex of_consumer(R"(deplo_flag_wait\((\w+), stage, turn\);)");
  std::smatch wait;
  REQUIRE(std::regex_search(text, wait, of_consumer));
  CHECK_FALSE(run(wait[0], "", ""));  // tiles are read before they are there
  const std::string flags = wait[1];
  CHECK_FALSE(run("deplo_flag_wait(" + flags + ", 2 + stage, turn ^ 1);", "", ""));  // and overwritten before they are read
  CHECK_FALSE(run("deplo_flag_expect(" + flags + ", stage, 16384);", "deplo_flag_expect(" + flags + ", stage, 16386);", ""));  // no one goes on
  CHECK_FALSE(run("    } else {\n", "    } else if (threadIdx.x < 64) {\n", ""));                                              // half a group
}

TEST_CASE("CUDA text runs on a GPU, where there is one") {
  std::shared_ptr<CudaDevice> device;
  try {
    device = CudaDevice::open();
  } catch (const UnsupportedError& error) {
    WARN("no GPU: " << error.what() << "; the emulator runs the programs alone");
    return;
  }
  for (const Case& c : cases()) check_on(device, c, DEPLO_NVRTC);
  check_divisions_on(device, DEPLO_NVRTC);
}

TEST_CASE("rows of any length have a CUDA form") {
  // In shared memory of constant size; in dynamic shared memory; in dynamic shared memory that must be asked for; in no memory of their own.
  CHECK(cuda_text(kernels_for_cuda(softmax_of("5", "300"), "softmax")).find("scratch") == std::string::npos);
  for (const auto& [columns, threads] : {std::pair{300, 16}, {20000, 64}, {70000, 64}}) {
    Case symbolic{"softmax", softmax_of("s0", "s1", " where s0 in 1.., s1 in 1.."), {{"s0", 2}, {"s1", columns}}};
    check_emulated(symbolic, fmt::format("schedule @k0: gpu_rows threads({}) blocks(512)", threads));
  }
  std::string text = cuda_text(kernels_for_cuda(softmax_of("600", "100000"), "softmax"));
  CHECK(text.find("scratch") == std::string::npos);
  check_emulated({"softmax", softmax_of("16", "13000"), {}}, "schedule @k0: gpu_rows threads(32) blocks(5)");
}

TEST_CASE("more rows than blocks take turns in the blocks' scratch memory") {
  Case c{"softmax", softmax_of("s0", "s1", " where s0 in 1.., s1 in 1.."), {{"s0", 7}, {"s1", 40}}};
  check_emulated(c, "schedule @k0: gpu_rows threads(32) blocks(3)");
  check_emulated(c, "schedule @k0: gpu_points threads(4) blocks(1)");
  check_emulated(c, "schedule @k0: gpu_serial threads(1)");
  std::string text = cuda_text(kernels_for_cuda(c.text, c.name, "schedule @k0: gpu_points threads(4) blocks(1)"));
  CHECK(text.find("scratch ((s1*16 + 63) // 64)*64 bytes a block") != std::string::npos);
}

TEST_CASE("rows and columns that threads share by hand are right at their edges") {
  const Case rows{"softmax", softmax_of("7", "300"), {}};
  check_emulated(rows, "schedule @k0: gpu_rows threads(32) vectorize(by=4) rows(4) keep(registers)");
  check_emulated(rows, "schedule @k0: gpu_rows threads(128) vectorize(by=2) rows(1) keep(registers)");
  const Case symbolic{"softmax", softmax_of("s0", "s1", " where s0 in 1.., s1 in 1.."), {{"s0", 5}, {"s1", 301}}};
  for (int64_t columns : {1, 3, 300, 301}) {
    Case c = symbolic;
    c.sizes["s1"] = columns;
    check_emulated(c);
  }
  const std::string sums = R"(tensor @sums(%x: f32[ROWS, COLUMNS] strides [COLUMNS, 1] user)WHERE
  %y: f32[COLUMNS] = reduce sum(%x) axes=[0]
  return %y strides [1]
)";
  auto columns_of = [&](const std::string& rows, const std::string& columns, const std::string& where, Sizes sizes) {
    std::string text = std::regex_replace(sums, std::regex("ROWS"), rows);
    text = std::regex_replace(std::regex_replace(text, std::regex("COLUMNS"), columns), std::regex("WHERE"), where);
    return Case{"sums", text, std::move(sizes)};
  };
  check_emulated(columns_of("100", "72", "", {}));
  check_emulated(columns_of("100", "70", "", {}), "schedule @k0: gpu_points threads(16) vectorize(i0, by=2) split(4)");
  check_emulated(columns_of("s0", "s1", " where s0 in 1.., s1 in 1..", {{"s0", 77}, {"s1", 39}}));
  const Case turned{"turned",
                    R"(tensor @turned(%x: f32[70, 45] strides [45, 1] user, %z: f32[45, 70] strides [70, 1] user)
  %t: f32[45, 70] = map (i, j) -> %x[j, i]
  %y: f32[45, 70] = add(%t, %z)
  return %y strides [70, 1]
)",
                    {}};
  check_emulated(turned);
  CHECK(print(kernels_for_cuda(turned.text, turned.name)).find("turned0") != std::string::npos);
}

TEST_CASE("running results that threads share are right at their edges") {
  const std::string frame = R"(tensor @running(%x: f32[ROWS, COLUMNS] strides [COLUMNS, 1] user)WHERE
  %d: f64[ROWS, COLUMNS] = cast(%x)
SCAN  %y: f32[ROWS, COLUMNS] = cast(%s)
  return %y strides [COLUMNS, 1]
)";
  const std::map<std::string, std::string> scans = {
      {"sum", "  %s: f64[ROWS, COLUMNS] = scan sum(%d) axis=AXIS\n"},
      {"product", "  %s: f64[ROWS, COLUMNS] = scan prod(%d) axis=AXIS\n"},
      {"extreme",
       "  %n: i64[ROWS, COLUMNS] = index (i, j) -> -i - j\n  %v: f32[ROWS, COLUMNS], %k: i64[ROWS, COLUMNS] = scan argmax(%x, %n) axis=AXIS\n"
       "  %w: f64[ROWS, COLUMNS] = cast(%v)\n  %i: f64[ROWS, COLUMNS] = cast(%k)\n  %s: f64[ROWS, COLUMNS] = add(%w, %i)\n"},
      {"exponentials",
       "  %m: f64[ROWS, COLUMNS], %r: f64[ROWS, COLUMNS] = scan online_softmax(%d) axis=AXIS\n"
       "  %l: f64[ROWS, COLUMNS] = log(%r)\n  %s: f64[ROWS, COLUMNS] = add(%m, %l)\n"}};
  auto running = [&](const std::string& kind, int axis, const std::string& rows, const std::string& columns, Sizes sizes = {}) {
    std::string text = std::regex_replace(frame, std::regex("SCAN"), scans.at(kind));
    const std::string where = sizes.empty() ? "" : " where s0 in 1.., s1 in 1..";
    for (const auto& [from, to] :
         {std::pair<std::string, std::string>{"ROWS", rows}, {"COLUMNS", columns}, {"WHERE", where}, {"AXIS", std::to_string(axis)}})
      text = std::regex_replace(text, std::regex(from), to);
    return Case{"running", text, std::move(sizes)};
  };
  JudgeFile file;
  for (const auto& [kind, text] : scans) {
    INFO(kind);
    check_emulated(running(kind, 1, "5", "300"));  // two warps a row
    check_emulated(running(kind, 0, "70", "24"));
  }
  check_emulated(running("sum", 1, "3", "301"));  // rows begin anywhere in a vector
  check_emulated(running("extreme", 1, "2", "301"), "schedule @k0: gpu_rows threads(32) vectorize(by=2) rows(1)");
  check_emulated(running("sum", 1, "2", "270"), "schedule @k0: gpu_rows threads(64) vectorize(by=2) rows(2)");
  check_emulated(running("sum", 1, "2", "39"), "schedule @k0: gpu_rows threads(32) vectorize(by=1) rows(2)");
  check_emulated(running("sum", 0, "100", "70"), "schedule @k0: gpu_points threads(16) vectorize(i0, by=2) split(4)");
  check_emulated(running("sum", 0, "33", "70"), "schedule @k0: gpu_points threads(32) vectorize(i0, by=2)");
  for (int axis : {0, 1}) check_emulated(running("sum", axis, "s0", "s1", {{"s0", 65}, {"s1", 257}}));
  Behaviour behaviour("judge=" + file.path);
  for (int axis : {0, 1}) check_on(CudaDevice::open(DEPLO_FAKE_CUDA), running("exponentials", axis, "66", "130"), DEPLO_FAKE_CUDA);
  CHECK(file.text().find("races=0") != std::string::npos);
}

TEST_CASE("every contraction stages both operands in shared memory") {
  const std::string relu = "  %zero: f32SHAPE = constant 0.0\n  %a: f32SHAPE = max(%x, %zero)\n";
  const std::string sigmoid =
      "  %n: f32SHAPE = neg(%x)\n  %e: f32SHAPE = exp(%n)\n  %one: f32SHAPE = constant 1.0\n  %d: f32SHAPE = add(%e, %one)\n  %a: f32SHAPE = "
      "div(%one, "
      "%d)\n";
  const std::string square = "  %a: f32SHAPE = mul(%x, %x)\n";
  const std::string scale = "  %b: f32SHAPE = map (i, k) -> %x[0, k]\n  %a: f32SHAPE = mul(%x, %b)\n";
  const Sizes sizes{{"s0", 3}, {"s1", 70}, {"s2", 37}, {"s3", 19}};
  std::vector<Case> all{{"matmul", matmul_of("32", "32", "64"), {}},
                        {"matmul of odd sizes", matmul_of("65", "47", "33"), {}},
                        {"matmul of symbolic sizes", matmul_of("s1", "s2", "s3"), sizes},
                        {"batched matmul", matmul_of("20", "24", "16", "3"), {}},
                        {"batched matmul of symbolic sizes", matmul_of("s1", "s2", "s3", "s0"), sizes},
                        {"relu", matmul_of("32", "32", "64", "", relu), {}},
                        {"sigmoid", matmul_of("32", "32", "64", "", sigmoid), {}},
                        {"square", matmul_of("32", "32", "64", "", square), {}},
                        {"scale", matmul_of("32", "32", "64", "", scale), {}},
                        {"relu of symbolic sizes", matmul_of("s1", "s2", "s3", "", relu), sizes},
                        {"convolution", convolution_of("2", 1), {}},
                        {"strided convolution", convolution_of("2", 2), {}},
                        {"convolution of any number of images", convolution_of("s0", 1), sizes}};
  for (const Case& c : all) {
    INFO(c.name);
    check_staged(cuda_text(kernels_for_cuda(c.text, c.name)));
    check_emulated(c);
  }
}

TEST_CASE("NVRTC compiles every kernel for two generations of GPUs") {
  if (std::string(DEPLO_NVRTC).empty()) {
    WARN("no NVRTC found: install nvidia-cuda-nvrtc 13.0 to run this test");
    return;
  }
  for (const Case& c : cases())
    for (const char* arch : {"sm_80", "sm_90"}) {
      std::string text = cuda_text(kernels_for_cuda(c.text, c.name));
      INFO(c.name << "\n" << text);
      CHECK(!nvrtc_compile(text, arch, DEPLO_NVRTC).image.empty());
    }
  CHECK(nvrtc_compile("__global__ void k() {}", "compute_80", DEPLO_NVRTC).image.find(".target sm_80") != std::string::npos);
  CHECK(nvrtc_arch(90, DEPLO_NVRTC) == "sm_90a");
  CHECK(nvrtc_arch(9999, DEPLO_NVRTC).substr(0, 8) == "compute_");
  CHECK_THROWS_WITH(nvrtc_arch(20, DEPLO_NVRTC), Catch::Contains("the device is sm_20"));
}

TEST_CASE("names that schedules would take may be the program's own") {
  const std::string text = R"(program @p(x: f32[3, 5, 40] user)
  buffer y: f32[3, 5] output
  buffer z: f32[3, 5, 40] output
  call @k0(x, y, z)
  return y, z

loop @k0(x: f32[3, 5, 40], out y: f32[3, 5], out z: f32[3, 5, 40])
  for b0 in 3:
    for row0 in 5:
      reduce r0: f32 = sum(a0) over t0 in 40:
        a0 = load x[b0, row0, t0]
      for t in 40:
        d0 = load x[b0, row0, t]
        c0 = sub(d0, r0)
        store z[b0, row0, t] = c0
      store y[b0, row0] = r0
)";
  kernel_ir::Module module = kernels_for_cuda(text, "names", "schedule @k0: gpu_rows threads(16) blocks(4)");
  Array x = Array::zeros(DType::f32, {3, 5, 40});
  for (int64_t k = 0; k < x.count(); ++k) x.set(k, Scalar::of_float(DType::f32, static_cast<double>(k % 7)));
  std::vector<Array> got = run_on_device(CudaDevice::open(DEPLO_FAKE_CUDA), module, {x}, {}, DEPLO_FAKE_CUDA);
  for (int64_t row = 0; row < 15; ++row) {
    double sum = 0;
    for (int64_t k = 0; k < 40; ++k) sum += x.get(row * 40 + k).f;
    CHECK(got[0].get(row).f == sum);
    for (int64_t k = 0; k < 40; ++k) CHECK(got[1].get(row * 40 + k).f == x.get(row * 40 + k).f - sum);
  }
}
