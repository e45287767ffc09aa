#pragma once

#include <string_view>

namespace deplo {

/// Device helpers in front of every CUDA text. They include no header, so that NVRTC compiles them alone; the CPU emulator compiles the same text.
/// Bytes become floats as the lowest bits of 2^23, which takes no unit for conversions, of which there are few.
/// Activations of float32 take no double, of which some GPUs have a 64th; what a rounding loses goes with the last step. deplo_share is (x + rest) /
/// (1 + e) for 0 <= e <= 1, deplo_gated_pair x / (1 + exp(-(y + rest))), deplo_gelu the formula of VectorMath::gelu in 1 / (|x| + 3), of which the
/// fit is as well. deplo_small_product is x exp(y): exp(y + 37) exp(-37) where exp(y) may be subnormal, below -40, where 1 + exp(y) is 1.
/// deplo_add_together is for threads of a warp that may all have one place: their sum is then added at once.
inline constexpr std::string_view kCudaPrelude = R"cuda(typedef struct { unsigned short bits; } deplo_f16;
typedef struct { unsigned short bits; } deplo_bf16;
typedef struct { unsigned char bits; } deplo_f8;
template <class T, int N> struct __align__(N * sizeof(T) < 16 ? N * sizeof(T) : 16) deplo_pack { T lane[N]; };
template <int N, class T> __device__ inline deplo_pack<T, N> deplo_get(const T* p) { return *(const deplo_pack<T, N>*)p; }
template <class T, int N> __device__ inline void deplo_put(T* p, const deplo_pack<T, N>& v) { *(deplo_pack<T, N>*)p = v; }
template <int N, class T> __device__ inline deplo_pack<T, N> deplo_fill(T v) { deplo_pack<T, N> r; for (int k = 0; k < N; ++k) r.lane[k] = v; return r; }
template <class T, class S> __device__ inline T deplo_bits(S s) { union { S from; T to; } u; u.from = s; return u.to; }
__device__ inline float deplo_from_bf16(deplo_bf16 v) { return deplo_bits<float>((unsigned)v.bits << 16); }
__device__ inline deplo_bf16 deplo_to_bf16(float v) {
  deplo_bf16 r;
  #if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  #else
  unsigned b = deplo_bits<unsigned>(v);
  r.bits = (b & 0x7fffffffu) > 0x7f800000u ? (unsigned short)((b >> 16) | 0x40u) : (unsigned short)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  #endif
  return r;
}
__device__ inline float deplo_from_f8(deplo_f8 v) {
  unsigned s = (unsigned)(v.bits & 0x80u) << 24, m = v.bits & 0x7fu;
  if (m == 0x7f) return deplo_bits<float>(s | 0x7ff00000u);
  if (m >= 8) return deplo_bits<float>(s | ((m << 20) + 0x3c000000u));
  return deplo_bits<float>(s | deplo_bits<unsigned>((float)m * 0.001953125f));
}
__device__ inline float deplo_from_i8(signed char v) { return deplo_bits<float>(0x4b000080u ^ (unsigned char)v) - 8388736.0f; }
__device__ inline float deplo_from_u8(unsigned char v) { return deplo_bits<float>(0x4b000000u | v) - 8388608.0f; }
__device__ inline deplo_f8 deplo_to_f8(float v) {
  unsigned b = deplo_bits<unsigned>(v), s = (b >> 24) & 0x80u, m = b & 0x7fffffffu, r = (m + 0x7ffffu + ((m >> 20) & 1u) - 0x3c000000u) >> 20;
  if (m < 0x3c800000u) r = deplo_bits<unsigned>(deplo_bits<float>(m) + 16384.0f) - 0x46800000u;
  if (r > 0x7e) r = 0x7e;
  if (m > 0x7f800000u) r = 0x7f;
  deplo_f8 h;
  h.bits = (unsigned char)(s | r);
  return h;
}
__device__ inline float deplo_from_f16(deplo_f16 h) {
  #if __CUDA_ARCH__ >= 530
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h.bits));
  return v;
  #else
  unsigned s = (unsigned)(h.bits & 0x8000u) << 16, e = (h.bits >> 10) & 31u, m = h.bits & 0x3ffu;
  if (e == 31) return deplo_bits<float>(s | 0x7f800000u | (m << 13));
  if (e) return deplo_bits<float>(s | ((e + 112) << 23) | (m << 13));
  return deplo_bits<float>(s | deplo_bits<unsigned>((float)m * 5.9604644775390625e-08f));
  #endif
}
__device__ inline deplo_f16 deplo_to_f16(float v) {
  deplo_f16 h;
  #if __CUDA_ARCH__ >= 530
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
  #else
  unsigned b = deplo_bits<unsigned>(v), s = (b >> 16) & 0x8000u, m = b & 0x7fffffffu, r;
  if (m > 0x7f800000u) r = 0x7e00u;
  else if (m >= 0x477ff000u) r = 0x7c00u;
  else if (m < 0x38800000u) r = deplo_bits<unsigned>(deplo_bits<float>(m) + 0.5f) - deplo_bits<unsigned>(0.5f);
  else r = (m + 0xfffu + ((m >> 13) & 1u) - 0x38000000u) >> 13;
  h.bits = (unsigned short)(s | r);
  #endif
  return h;
}
template <class T> union deplo_words { T value; unsigned word[(sizeof(T) + 3) / 4]; };
template <class T> __device__ inline T deplo_exchange_xor(T v, int lane) {
  deplo_words<T> u;
  u.word[0] = 0;
  u.value = v;
  for (int k = 0; k < (int)((sizeof(T) + 3) / 4); ++k) u.word[k] = __shfl_xor_sync(0xffffffffu, u.word[k], lane);
  return u.value;
}
template <class T> __device__ inline T deplo_exchange_from(T v, int lane) {
  deplo_words<T> u;
  u.word[0] = 0;
  u.value = v;
  for (int k = 0; k < (int)((sizeof(T) + 3) / 4); ++k) u.word[k] = __shfl_sync(0xffffffffu, u.word[k], lane);
  return u.value;
}
template <class T> __device__ inline T deplo_exchange_below(T v, int lane) {
  deplo_words<T> u;
  u.word[0] = 0;
  u.value = v;
  for (int k = 0; k < (int)((sizeof(T) + 3) / 4); ++k) u.word[k] = __shfl_up_sync(0xffffffffu, u.word[k], lane);
  return u.value;
}
template <int N, class T> __device__ inline void deplo_copy_elements(T* to, const T* from, long long count) {
  #pragma unroll 1
  for (int k = 0; k < N; ++k) {
    T v{};
    if (k < count) v = from[k];
    to[k] = v;
  }
}
template <int N, int B> __device__ inline int deplo_copied_bytes(long long count) { return count <= 0 ? 0 : count >= N ? N * B : (int)count * B; }
template <class T> __device__ inline unsigned deplo_shared_address(const T* array, int offset) {
  #if __CUDA_ARCH__ >= 750
  return (unsigned)__cvta_generic_to_shared(array) + (unsigned)offset * (unsigned)sizeof(T);
  #else
  return deplo_emulate_address(array + offset);
  #endif
}
template <class T> __device__ inline void deplo_copy_async(T* array, int offset, const T* from) {
  #if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(deplo_shared_address(array, offset)), "l"(from) : "memory");
  #else
  deplo_emulate_copy(array + offset, from, 16);
  #endif
}
template <class T> __device__ inline void deplo_copy_async_first(T* array, int offset, const T* from, int bytes) {
  #if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(deplo_shared_address(array, offset)), "l"(from), "r"(bytes) : "memory");
  #else
  deplo_emulate_copy(array + offset, from, bytes);
  #endif
}
__device__ inline void deplo_copy_commit() {
  #if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
  #else
  deplo_emulate_copy_commit();
  #endif
}
template <int N> __device__ inline void deplo_copy_wait() {
  #if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
  #else
  deplo_emulate_copy_wait(N);
  #endif
}
template <class T> __device__ inline deplo_pack<unsigned, 1> deplo_load_matrix_x1(const T* array, int offset) {
  deplo_pack<unsigned, 1> r;
  #if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r.lane[0]) : "r"(deplo_shared_address(array, offset)));
  #else
  deplo_emulate_load_matrix(array + offset, r.lane, 1, false);
  #endif
  return r;
}
template <class T> __device__ inline deplo_pack<unsigned, 1> deplo_load_matrix_x1_transposed(const T* array, int offset) {
  deplo_pack<unsigned, 1> r;
  #if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r.lane[0]) : "r"(deplo_shared_address(array, offset)));
  #else
  deplo_emulate_load_matrix(array + offset, r.lane, 1, true);
  #endif
  return r;
}
template <class T> __device__ inline deplo_pack<unsigned, 2> deplo_load_matrix_x2(const T* array, int offset) {
  deplo_pack<unsigned, 2> r;
  #if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r.lane[0]), "=r"(r.lane[1]) : "r"(deplo_shared_address(array, offset)));
  #else
  deplo_emulate_load_matrix(array + offset, r.lane, 2, false);
  #endif
  return r;
}
template <class T> __device__ inline deplo_pack<unsigned, 2> deplo_load_matrix_x2_transposed(const T* array, int offset) {
  deplo_pack<unsigned, 2> r;
  #if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r.lane[0]), "=r"(r.lane[1]) : "r"(deplo_shared_address(array, offset)));
  #else
  deplo_emulate_load_matrix(array + offset, r.lane, 2, true);
  #endif
  return r;
}
template <class T> __device__ inline deplo_pack<unsigned, 4> deplo_load_matrix_x4(const T* array, int offset) {
  deplo_pack<unsigned, 4> r;
  #if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r.lane[0]), "=r"(r.lane[1]), "=r"(r.lane[2]), "=r"(r.lane[3]) : "r"(deplo_shared_address(array, offset)));
  #else
  deplo_emulate_load_matrix(array + offset, r.lane, 4, false);
  #endif
  return r;
}
template <class T> __device__ inline deplo_pack<unsigned, 4> deplo_load_matrix_x4_transposed(const T* array, int offset) {
  deplo_pack<unsigned, 4> r;
  #if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r.lane[0]), "=r"(r.lane[1]), "=r"(r.lane[2]), "=r"(r.lane[3]) : "r"(deplo_shared_address(array, offset)));
  #else
  deplo_emulate_load_matrix(array + offset, r.lane, 4, true);
  #endif
  return r;
}
__device__ inline unsigned deplo_pair_bf16(float low, float high) {
  #if __CUDA_ARCH__ >= 800
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
  #else
  return (unsigned)deplo_to_bf16(low).bits | (unsigned)deplo_to_bf16(high).bits << 16;
  #endif
}
__device__ inline unsigned deplo_pair_f16(float low, float high) {
  #if __CUDA_ARCH__ >= 800
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
  #else
  return (unsigned)deplo_to_f16(low).bits | (unsigned)deplo_to_f16(high).bits << 16;
  #endif
}
template <class T> __device__ inline unsigned deplo_pair_bits(T low, T high) { return (unsigned)low.bits | (unsigned)high.bits << 16; }
__device__ inline void deplo_mma_bf16(float& c0, float& c1, float& c2, float& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  float* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma(c, a.lane, b0, b1, true);
  #endif
}
__device__ inline void deplo_mma_f16(float& c0, float& c1, float& c2, float& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  float* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma(c, a.lane, b0, b1, false);
  #endif
}
__device__ inline void deplo_add_atomic(float* p, float v) { atomicAdd(p, v); }
__device__ inline void deplo_add_atomic(double* p, double v) { atomicAdd(p, v); }
__device__ inline void deplo_add_atomic(int* p, int v) { atomicAdd(p, v); }
__device__ inline void deplo_add_atomic(long long* p, long long v) { atomicAdd((unsigned long long*)p, (unsigned long long)v); }
template <class T> __device__ inline void deplo_add_together(T* p, T v) {
  #if __CUDA_ARCH__ >= 700
  if (__activemask() == 0xffffffffu) {
    int meets;
    __match_all_sync(0xffffffffu, (unsigned long long)p, &meets);
    if (meets) {
      for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
      unsigned lane;
      asm("mov.u32 %0, %%laneid;" : "=r"(lane));
      if (lane != 0) return;
    }
  }
  #endif
  deplo_add_atomic(p, v);
}
__device__ inline unsigned deplo_tf32(float x) {
  #if __CUDA_ARCH__ >= 800
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
  #else
  unsigned bits = deplo_bits<unsigned>(x);
  return x != x ? bits : bits + 0x1000u & 0xffffe000u;
  #endif
}
template <int N> __device__ inline deplo_pack<unsigned, N> deplo_tf32_of(deplo_pack<unsigned, N> a) {
  for (int k = 0; k < N; ++k) a.lane[k] = deplo_tf32(deplo_bits<float>(a.lane[k]));
  return a;
}
__device__ inline void deplo_mma_tf32(float& c0, float& c1, float& c2, float& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  float* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma_tf32(c, a.lane, b0, b1);
  #endif
}
__device__ inline void deplo_mma_s8_s8(int& c0, int& c1, int& c2, int& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  int* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma_bytes(c, a.lane, b0, b1, true, true);
  #endif
}
__device__ inline void deplo_mma_s8_u8(int& c0, int& c1, int& c2, int& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  int* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma_bytes(c, a.lane, b0, b1, true, false);
  #endif
}
__device__ inline void deplo_mma_u8_s8(int& c0, int& c1, int& c2, int& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  int* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma_bytes(c, a.lane, b0, b1, false, true);
  #endif
}
__device__ inline void deplo_mma_u8_u8(int& c0, int& c1, int& c2, int& c3, const deplo_pack<unsigned, 4>& a, unsigned b0, unsigned b1) {
  #if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3) : "r"(a.lane[0]), "r"(a.lane[1]), "r"(a.lane[2]), "r"(a.lane[3]), "r"(b0), "r"(b1));
  #else
  int* const c[] = {&c0, &c1, &c2, &c3};
  deplo_emulate_mma_bytes(c, a.lane, b0, b1, false, false);
  #endif
}
__device__ inline float deplo_inf32() { return deplo_bits<float>(0x7f800000u); }
__device__ inline float deplo_nan32() { return deplo_bits<float>(0x7fc00000u); }
__device__ inline double deplo_inf64() { return deplo_bits<double>(0x7ff0000000000000ull); }
__device__ inline double deplo_nan64() { return deplo_bits<double>(0x7ff8000000000000ull); }
__device__ inline bool deplo_signbit(float v) { return deplo_bits<unsigned>(v) >> 31; }
__device__ inline bool deplo_signbit(double v) { return deplo_bits<unsigned long long>(v) >> 63; }
__device__ inline long long deplo_floordiv(long long a, long long b) { if (b == 0 || b == -1) return b == 0 ? a : (long long)(0ull - (unsigned long long)a); long long q = a / b; return q - (a % b != 0 && (a < 0) != (b < 0)); }
__device__ inline int deplo_dot4(int x, int y, int z) { for (int k = 0; k < 32; k += 8) z += ((x >> k) & 255) * (signed char)(y >> k); return z; }
__device__ inline long long deplo_mod(long long a, long long b) { return a - deplo_floordiv(a, b) * b; }
__device__ inline long long deplo_min_i(long long a, long long b) { return a < b ? a : b; }
__device__ inline long long deplo_max_i(long long a, long long b) { return a > b ? a : b; }
template <class T> __device__ inline T deplo_min(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
__device__ inline float deplo_min(float a, float b) {
  #if __CUDA_ARCH__ >= 800
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
  #else
  return a != a ? a : b != b ? b : a < b ? a : b;
  #endif
}
template <class T> __device__ inline T deplo_max(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
__device__ inline float deplo_max(float a, float b) {
  #if __CUDA_ARCH__ >= 800
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
  #else
  return a != a ? a : b != b ? b : a > b ? a : b;
  #endif
}
template <class T> __device__ inline T deplo_add(T a, T b) { return a + b; }
template <class T> __device__ inline T deplo_mul(T a, T b) { return a * b; }
template <class T> __device__ inline T deplo_abs_i(T a) { return a < 0 ? (T)(0ull - (unsigned long long)a) : a; }
template <class T> __device__ inline T deplo_trunc_div(T a, T b, int* error) {
  if (b == 0) { *error = 2; return 0; }
  return b == (T)-1 ? (T)(0ull - (unsigned long long)a) : (T)(a / b);
}
template <class T> __device__ inline T deplo_rem_c(T a, T b, int* error) {
  if (b == 0) { *error = 2; return 0; }
  return b == (T)-1 ? (T)0 : (T)(a % b);
}
template <class T> __device__ inline T deplo_rem_python(T a, T b, int* error) {
  T r = deplo_rem_c(a, b, error);
  return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}
template <class T> __device__ inline T deplo_floor_div(T a, T b, int* error) {
  T q = deplo_trunc_div(a, b, error);
  return b != 0 && deplo_rem_c(a, b, error) != 0 && (a < 0) != (b < 0) ? (T)(q - 1) : q;
}
__device__ inline float deplo_remainder_f(float a, float b) { float r = fmodf(a, b); return r != 0 && (r < 0) != (b < 0) ? r + b : r; }
__device__ inline double deplo_remainder_f(double a, double b) { double r = fmod(a, b); return r != 0 && (r < 0) != (b < 0) ? r + b : r; }
template <class T> __device__ inline T deplo_pow_i(T x, T n) {
  if (n < 0) return x == 1 ? (T)1 : x == (T)-1 ? (T)(n % 2 ? -1 : 1) : (T)0;
  unsigned long long r = 1, b = (unsigned long long)x;
  for (unsigned long long k = (unsigned long long)n; k; k >>= 1, b *= b) if (k & 1) r *= b;
  return (T)r;
}
template <class T> __device__ inline T deplo_shl(T x, T n) { return n < 0 || n >= (T)(8 * sizeof(T)) ? (T)0 : (T)((unsigned long long)x << n); }
template <class T> __device__ inline T deplo_shr(T x, T n) { return n < 0 || n >= (T)(8 * sizeof(T)) ? (T)(x < 0 ? -1 : 0) : (T)(x >> n); }
__device__ inline long long deplo_float_to_i64(double v) { return v >= -9223372036854775808.0 && v < 9223372036854775808.0 ? (long long)v : (-9223372036854775807LL - 1); }
__device__ inline int deplo_float_to_i32(double v) { return v > -2147483649.0 && v < 2147483648.0 ? (int)v : (-2147483647 - 1); }
__device__ inline float deplo_exp(float x) { return expf(x); }
__device__ inline double deplo_exp(double x) { return exp(x); }
__device__ inline float deplo_log(float x) { return logf(x); }
__device__ inline double deplo_log(double x) { return log(x); }
__device__ inline float deplo_log1p(float x) { return log1pf(x); }
__device__ inline double deplo_log1p(double x) { return log1p(x); }
__device__ inline float deplo_sin(float x) { return sinf(x); }
__device__ inline double deplo_sin(double x) { return sin(x); }
__device__ inline float deplo_rint(float x) { return rintf(x); }
__device__ inline double deplo_rint(double x) { return rint(x); }
__device__ inline float deplo_fabs(float x) { return fabsf(x); }
__device__ inline double deplo_fabs(double x) { return fabs(x); }
__device__ inline float deplo_erfc(float x) { return erfcf(x); }
__device__ inline double deplo_erfc(double x) { return erfc(x); }
__device__ inline float deplo_fma(float x, float y, float z) { return fmaf(x, y, z); }
__device__ inline double deplo_fma(double x, double y, double z) { return fma(x, y, z); }
__device__ inline float deplo_exp2_near(float x) {
  #if __CUDA_ARCH__ >= 200
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
  #else
  return exp2f(x);
  #endif
}
__device__ inline float deplo_reciprocal_near(float x) {
  #if __CUDA_ARCH__ >= 200
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
  #else
  return 1 / x;
  #endif
}
__device__ inline float deplo_share(float x, float rest, float e) {
  float d = 1 + e, lost = e - (d - 1), i = deplo_reciprocal_near(d), y = x * i;
  return fmaf(fmaf(-d, y, x) + fmaf(-lost, y, rest), i, y);
}
__device__ inline float deplo_gated_pair(float x, float y, float rest) {
  bool far = y < -40;
  float e = expf(far ? y + 37 : -fabsf(y));
  e = fmaf(e, y < 0 ? rest : -rest, e);
  float p = y < 0 ? x * e : x;
  return y > 40 ? x : far ? p * 8.533047625744066e-17f : deplo_share(p, y < 0 ? fmaf(x, e, -p) : 0.0f, e);
}
__device__ inline float deplo_sigmoid(float x) { float e = expf(-fabsf(x)); return deplo_share(x < 0 ? e : 1.0f, 0, e); }
__device__ inline float deplo_silu(float x) { return deplo_gated_pair(x, x, 0); }
__device__ inline float deplo_gelu_tanh(float x) {
  float c = fminf(fmaxf(x, -11.0f), 11.0f), u = c * c, cube = u * 0x1.2444f2p-4f;
  float slope = 0x1.988454p+0f + cube, part = slope - 0x1.988454p+0f;
  float rest = 0x1.988454p+0f - (slope - part) + (cube - part) + (fmaf(u, 0x1.2444f2p-4f, -cube) + fmaf(fmaf(c, c, -u), 0x1.2444f2p-4f, fmaf(u, 0x1.49b16ap-29f, -0x1.857936p-25f)));
  float z = c * slope;
  return x < -11 ? x * 0 : deplo_gated_pair(x, z, fmaf(c, slope, -z) + c * rest);
}
__device__ inline float deplo_gelu(float x) {
  float a = fminf(fabsf(x), 14.5f), d = a + 3, i = deplo_reciprocal_near(d), w = i - 0.1875f, u = a * a;
  float correction = fmaf(fmaf(a, a, -u), -0.5f, fmaf(i, 0x1.28fd64p+2f, 0x1.d72176p-1f) * fmaf(d - 3 - a, i, fmaf(-d, i, 1.0f)));
  float r = fmaf(-0x1.054c3cp+9f, w, -0x1.b87582p+8f);
  r = fmaf(fmaf(fmaf(r, w, 0x1.8f9228p+7f), w, 0x1.462f8cp+6f), w, -0x1.6e45aap+5f);
  r = fmaf(fmaf(fmaf(r, w, -0x1.2ca662p+4f), w, 0x1.1b5372p+3f), w, 0x1.1c1d68p+3f);
  r = fmaf(fmaf(r, w, 0x1.b4f672p+1f), w, 0x1.97c62cp-1f);
  float t = a * i, h = t * r, rest = fmaf(h, correction, fmaf(t, r, -h) + fmaf(a, i, -t) * r), e = expf(u * -0.5f);
  return x > 0 ? fmaf(-rest, e, fmaf(-h, e, x)) : -fmaf(h, e, rest * e) + x * 0;
}
template <class T> __device__ inline T deplo_sigmoid(T x) { T e = deplo_exp(-deplo_fabs(x)); return (x < 0 ? e : (T)1) / (1 + e); }
template <class T> __device__ inline T deplo_softplus(T x) { return deplo_log1p(deplo_exp(-deplo_fabs(x))) + (x < 0 ? (T)0 : x); }
template <class T> __device__ inline T deplo_small_product(T x, T y) { return x * deplo_exp(y + 37) * (T)8.533047625744066e-17; }
template <class T> __device__ inline T deplo_gated(T x, T y) { return y < -40 ? deplo_small_product(x, y) : x / (1 + deplo_exp(-y)); }
template <class T> __device__ inline T deplo_silu(T x) { return deplo_gated(x, x); }
template <class T> __device__ inline T deplo_gelu_tanh(T x) { return deplo_gated(x, x * (x * x * (T)0.07135481627260025 + (T)1.5957691216057308)); }
template <class T> __device__ inline T deplo_mish(T x) {
  if (x > 20) return x;
  if (x < -40) return deplo_small_product(x, x);
  T e = deplo_exp(x), n = e * (e + 2);
  return x * (n / (n + 2));
}
template <class T> __device__ inline T deplo_gelu(T x) {
  T a = deplo_fabs(x), z = a * (T)0.7071067811865476;
  if (!(a < 39)) return x > 0 ? x : x * 0;
  T lost = deplo_fma(a, (T)0.7071067811865476, -z) + a * (sizeof(T) == 4 ? (T)1.210161710447897e-08 : (T)-4.833646656726457e-17);
  T tail = a * (T)0.5 * (deplo_erfc(z) - lost * (T)1.1283791670955126 * deplo_exp(-z * z));
  return x > 0 ? x - tail : -tail;
}
template <class T> __device__ inline T deplo_logit(T x) {
  return deplo_fabs(x - (T)0.5) < (T)0.25 ? deplo_log1p((2 * x - 1) / (1 - x)) : deplo_log(x / (1 - x));
}
template <class T> __device__ inline T deplo_sinc(T x) {
  T n = deplo_rint(x), half = n * (T)0.5, sine = deplo_sin((x - n) * (T)3.141592653589793);
  return x == 0 ? (T)1 : (deplo_rint(half) == half ? sine : -sine) / (x * (T)3.141592653589793);
}
template <class T> __device__ inline T deplo_xlogy(T x, T y) { return y != y ? y : x == 0 ? (T)0 : x * deplo_log(y); }
__device__ inline double deplo_log_of_sum(double x, double y, double unit) {
  double larger = x > y ? x : y;
  return x != x || y != y ? x + y : x == y ? x + deplo_log(2.0) / unit : larger + deplo_log1p(deplo_exp(-deplo_fabs(x - y) * unit)) / unit;
}
template <class T> __device__ inline T deplo_logaddexp(T x, T y) { return (T)deplo_log_of_sum(x, y, 1); }
template <class T> __device__ inline T deplo_logaddexp2(T x, T y) { return (T)deplo_log_of_sum(x, y, 0.6931471805599453); }
)cuda";

}  // namespace deplo
