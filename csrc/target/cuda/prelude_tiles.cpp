#include "target/cuda/prelude_tiles.h"

#include <string_view>

#include "base/error.h"
#include "program_ir/groups.h"
#include "program_ir/tiles.h"

namespace deplo {
namespace {

/// A descriptor is of tiles whose lines of 128 bytes are swizzled: where they begin, and bytes from 64 elements along lines to the next ones, and
/// from 8 lines to the next ones.
constexpr std::string_view kStart = R"cuda(struct __align__(64) deplo_tensor_map { unsigned long long words[16]; };
__device__ inline void deplo_flags_start(long long* flags, int stages, int warps) {
  for (int s = 0; s < stages; ++s) {
    #if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(deplo_shared_address(flags, s)) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(deplo_shared_address(flags, stages + s)), "r"(warps) : "memory");
    #else
    deplo_emulate_flag_start(flags + s, 1);
    deplo_emulate_flag_start(flags + stages + s, warps);
    #endif
  }
  #if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  #endif
}
__device__ inline void deplo_flag_expect(long long* flags, int at, int bytes) {
  #if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(deplo_shared_address(flags, at)), "r"(bytes) : "memory");
  #else
  deplo_emulate_flag_arrive(flags + at, bytes);
  #endif
}
__device__ inline void deplo_flag_arrive(long long* flags, int at) {
  #if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(deplo_shared_address(flags, at)) : "memory");
  #else
  deplo_emulate_flag_arrive(flags + at, 0);
  #endif
}
__device__ inline void deplo_flag_wait(long long* flags, int at, int parity) {
  #if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}"
               :: "r"(deplo_shared_address(flags, at)), "r"(parity) : "memory");
  #else
  deplo_emulate_flag_wait(flags + at, parity);
  #endif
}
__device__ inline void deplo_tiles_written() {
  #if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  #endif
}
template <class T> __device__ inline unsigned long long deplo_tile_descriptor(const T* tiles, int offset, int leading, int stride) {
  unsigned at = deplo_shared_address(tiles, offset);
  return (unsigned long long)((at & 0x3ffffu) >> 4) | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 | 1ull << 62;
}
template <class T> __device__ inline void deplo_fill_tile(T* tile, int lines, const T* from, long long stride, long long along, long long most_along, long long across, long long most_across, int thread, int threads) {
  #pragma unroll 1
  for (int k = thread; k < lines * 64; k += threads) {
    int line = k / 64, column = k % 64;
    T v;
    v.bits = 0;
    if (along + column < most_along && across + line < most_across) v = from[(across + line) * stride + along + column];
    tile[line * 64 + ((column / 8 ^ line % 8) * 8 + column % 8)] = v;
  }
}
__device__ inline void deplo_group_start() {
  #if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #endif
}
__device__ inline void deplo_group_commit() {
  #if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  #else
  deplo_emulate_group_commit();
  #endif
}
template <int N> __device__ inline void deplo_group_wait() {
  #if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
  #else
  deplo_emulate_group_wait(N);
  #endif
}
)cuda";

/// f(k) for k below n, with commas.
template <class F>
std::string list(int64_t n, const F& f) {
  std::string out;
  for (int64_t k = 0; k < n; ++k) out += (k ? ", " : "") + f(k);
  return out;
}

std::string copy_of(int dimensions) {
  const std::string at = list(dimensions, [](int64_t k) { return fmt::format("int c{}", k); });
  const std::string places = list(dimensions, [](int64_t k) { return fmt::format("%{}", k + 3); });
  const std::string operands = list(dimensions, [](int64_t k) { return fmt::format("\"r\"(c{})", k); });
  const std::string names = list(dimensions, [](int64_t k) { return fmt::format("c{}", k); });
  return fmt::format(
      R"cuda(template <class T> __device__ inline void deplo_copy_tile_{0}d(T* tiles, int offset, const deplo_tensor_map* map, {1}, long long* flags, int flag) {{
  #if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.{0}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {{{2}}}], [%2];"
               :: "r"(deplo_shared_address(tiles, offset)), "l"(map), "r"(deplo_shared_address(flags, flag)), {3} : "memory");
  #else
  const int at[] = {{{4}}};
  deplo_emulate_copy_tile(tiles + offset, map, at, flags + flag);
  #endif
}}
)cuda",
      dimensions, at, places, operands, names);
}

std::string product_of(int64_t columns, bool is_bf16) {
  const int64_t sums = columns / 2;
  const std::string type = is_bf16 ? "bf16" : "f16";
  return fmt::format(
      R"cuda(template <int A, int B> __device__ inline void deplo_group_multiply_{0}_{1}({2}, unsigned long long a, unsigned long long b) {{
  #if __CUDA_ARCH__ >= 900
  asm volatile("{{\n.reg .pred more;\nsetp.eq.u32 more, 1, 1;\nwgmma.mma_async.sync.aligned.m64n{1}k16.f32.{0}.{0} {{{3}}}, %{4}, %{5}, more, 1, 1, %{6}, %{7};\n}}"
               : {8} : "l"(a), "l"(b), "n"(A), "n"(B));
  #else
  float* const c[] = {{{9}}};
  deplo_emulate_group_multiply(c, {1}, a, b, A, B, {10});
  #endif
}}
)cuda",
      type, columns, list(sums, [](int64_t k) { return fmt::format("float& c{}", k); }), list(sums, [](int64_t k) { return fmt::format("%{}", k); }),
      sums, sums + 1, sums + 2, sums + 3, list(sums, [](int64_t k) { return fmt::format("\"+f\"(c{})", k); }),
      list(sums, [](int64_t k) { return fmt::format("&c{}", k); }), is_bf16);
}

/// The same of rows that the group's threads hold.
std::string product_of_rows(int64_t columns, bool is_bf16) {
  const int64_t sums = columns / 2;
  const std::string type = is_bf16 ? "bf16" : "f16";
  return fmt::format(
      R"cuda(template <int B> __device__ inline void deplo_group_multiply_rows_{0}_{1}({2}, const deplo_pack<unsigned, 4>& a, unsigned long long b) {{
  #if __CUDA_ARCH__ >= 900
  asm volatile("{{\n.reg .pred more;\nsetp.eq.u32 more, 1, 1;\nwgmma.mma_async.sync.aligned.m64n{1}k16.f32.{0}.{0} {{{3}}}, {{%{4}, %{5}, %{6}, %{7}}}, %{8}, more, 1, 1, %{9};\n}}"
               : {10} : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "l"(b), "n"(B));
  #else
  float* const c[] = {{{11}}};
  deplo_emulate_group_multiply_rows(c, {1}, a.lane, b, B, {12});
  #endif
}}
)cuda",
      type, columns, list(sums, [](int64_t k) { return fmt::format("float& c{}", k); }), list(sums, [](int64_t k) { return fmt::format("%{}", k); }),
      sums, sums + 1, sums + 2, sums + 3, sums + 4, sums + 5, list(sums, [](int64_t k) { return fmt::format("\"+f\"(c{})", k); }),
      list(sums, [](int64_t k) { return fmt::format("&c{}", k); }), is_bf16);
}

/// The same of bytes, with signs or without, along k.
std::string product_of_bytes(int64_t columns, bool a_signed, bool b_signed) {
  const int64_t sums = columns / 2;
  return fmt::format(
      R"cuda(template <int A, int B> __device__ inline void deplo_group_multiply_{0}8_{1}8_{2}({3}, unsigned long long a, unsigned long long b) {{
  #if __CUDA_ARCH__ >= 900
  asm volatile("{{\n.reg .pred more;\nsetp.eq.u32 more, 1, 1;\nwgmma.mma_async.sync.aligned.m64n{2}k32.s32.{0}8.{1}8 {{{4}}}, %{5}, %{6}, more;\n}}"
               : {7} : "l"(a), "l"(b));
  #else
  int* const c[] = {{{8}}};
  deplo_emulate_group_multiply_bytes(c, {2}, a, b, {9}, {10});
  #endif
}}
)cuda",
      a_signed ? "s" : "u", b_signed ? "s" : "u", columns, list(sums, [](int64_t k) { return fmt::format("int& c{}", k); }),
      list(sums, [](int64_t k) { return fmt::format("%{}", k); }), sums, sums + 1,
      list(sums, [](int64_t k) { return fmt::format("\"+r\"(c{})", k); }), list(sums, [](int64_t k) { return fmt::format("&c{}", k); }), a_signed,
      b_signed);
}

/// Waits for all products, of which the sums are known only then.
std::string end_of(int64_t columns, bool of_bytes) {
  const int64_t sums = columns / 2;
  return fmt::format(R"cuda(__device__ inline void deplo_group_end_{0}({1}) {{
  #if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {2} :: "memory");
  #else
  deplo_emulate_group_wait(0);
  #endif
}}
)cuda",
                     of_bytes ? fmt::format("bytes_{}", columns) : std::to_string(columns),
                     list(sums, [&](int64_t k) { return fmt::format("{}& c{}", of_bytes ? "int" : "float", k); }),
                     list(sums, [&](int64_t k) { return fmt::format("\"+{}\"(c{})", of_bytes ? "r" : "f", k); }));
}

}  // namespace

const std::string& cuda_tile_prelude() {
  static const std::string kText = [] {
    std::string text(kStart);
    for (int dimensions = 2; dimensions <= static_cast<int>(kMostTileDimensions); ++dimensions) text += copy_of(dimensions);
    for (int64_t columns = kGroupColumnStep; columns <= kMostGroupColumns; columns += kGroupColumnStep) {
      for (bool is_bf16 : {true, false}) text += product_of(columns, is_bf16) + product_of_rows(columns, is_bf16);
      for (bool a_signed : {true, false})
        for (bool b_signed : {true, false}) text += product_of_bytes(columns, a_signed, b_signed);
      for (bool of_bytes : {true, false}) text += end_of(columns, of_bytes);
    }
    return text;
  }();
  return kText;
}

}  // namespace deplo
