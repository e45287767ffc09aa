#include "tile_agreement.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "kernel_ir/ir.h"
#include "lower/lower.h"
#include "passes/kernel/expand_math.h"
#include "target/cpu/codegen.h"

namespace deplo {
namespace {

// ---- arrays as memory ----

void put(char* at, DType dtype, const Scalar& s) {
  auto write = [&](auto value) { std::memcpy(at, &value, sizeof value); };
  switch (dtype) {
    case DType::boolean:
    case DType::u8: return write(static_cast<uint8_t>(s.i));
    case DType::i8: return write(static_cast<int8_t>(s.i));
    case DType::i16: return write(static_cast<int16_t>(s.i));
    case DType::i32: return write(static_cast<int32_t>(s.i));
    case DType::i64: return write(s.i);
    case DType::f16: return write(f32_to_f16(static_cast<float>(s.f)));
    case DType::bf16: return write(f32_to_bf16(static_cast<float>(s.f)));
    case DType::f32: return write(static_cast<float>(s.f));
    case DType::f64: return write(s.f);
    case DType::f8: return write(f32_to_f8(static_cast<float>(s.f)));
  }
}

template <class T>
T read(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

Scalar take(const char* at, DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8: return Scalar::of_int(dtype, read<uint8_t>(at));
    case DType::i8: return Scalar::of_int(dtype, read<int8_t>(at));
    case DType::i16: return Scalar::of_int(dtype, read<int16_t>(at));
    case DType::i32: return Scalar::of_int(dtype, read<int32_t>(at));
    case DType::i64: return Scalar::of_int(dtype, read<int64_t>(at));
    case DType::f16: return Scalar::of_float(dtype, f16_to_f32(read<uint16_t>(at)));
    case DType::bf16: return Scalar::of_float(dtype, bf16_to_f32(read<uint16_t>(at)));
    case DType::f32: return Scalar::of_float(dtype, read<float>(at));
    case DType::f64: return Scalar::of_float(dtype, read<double>(at));
    case DType::f8: return Scalar::of_float(dtype, f8_to_f32(read<uint8_t>(at)));
  }
  return {};
}

// The elements of a strided parameter, with a border that nothing may touch.
struct Bytes {
  static constexpr int64_t kBorder = 64;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<char> data;
  int64_t origin = 0;

  Bytes(const tile_ir::Param& p, const Array& array, const Sizes& sizes) : dtype(p.dtype), shape(array.shape) {
    int64_t low = 0;
    int64_t high = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      strides.push_back(evaluate(p.strides[d], sizes));
      int64_t reach = strides[d] * std::max<int64_t>(0, shape[d] - 1);
      (reach < 0 ? low : high) += reach;
    }
    origin = kBorder - low * size_of(dtype);
    data.assign(static_cast<size_t>(2 * kBorder + (high - low + 1) * size_of(dtype)), 0x5a);
    for_each([&](int64_t flat, char* at) { put(at, dtype, array.get(flat)); });
  }

  template <class F>
  void for_each(const F& f) {
    int64_t count = 1;
    for (int64_t n : shape) count *= n;
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat;
      int64_t offset = 0;
      for (size_t d = shape.size(); d-- > 0;) {
        offset += rest % shape[d] * strides[d];
        rest /= shape[d];
      }
      f(flat, data.data() + origin + offset * size_of(dtype));
    }
  }

  void* base() { return data.data() + origin; }
  bool border_intact() const {
    for (size_t k = 0; k < kBorder; ++k)
      if (data[k] != 0x5a || data[data.size() - 1 - k] != 0x5a) return false;
    return true;
  }
};

}  // namespace

// ---- running ----

int run_native(const tile_ir::Kernel& tile, const std::vector<Array*>& arguments, const Sizes& sizes, int vector_bytes, int threads) {
  PassContext context;
  context.target = cpu_target_info("");
  context.target.vector_bytes = vector_bytes;
  tile_ir::Module module;
  module.kernels.push_back(std::make_shared<tile_ir::Kernel>(tile));
  kernel_ir::Module lowered = lower_tile_to_kernel(module, context);
  INFO(kernel_ir::print(lowered));
  kernel_ir::verify(*lowered.kernels[0]);
  CHECK(kernel_ir::parse(kernel_ir::print(lowered)) == lowered);
  lowered = expand_math(lowered, context);
  CodegenStats stats;
  auto compiled = compile_cpu_kernels(lowered.kernels, context, {}, &stats).front();
  std::vector<Bytes> memory;
  std::vector<void*> buffers;
  for (size_t k = 0; k < arguments.size(); ++k) memory.emplace_back(tile.params[k], *arguments[k], sizes);
  for (Bytes& bytes : memory) buffers.push_back(bytes.base());
  std::vector<int64_t> symbols = kernel_ir::passed_values(*lowered.kernels[0], sizes);
  std::vector<char> scratch(static_cast<size_t>(evaluate(lowered.kernels[0]->scratch_bytes, sizes)) + 64);
  int32_t error = 0;
  auto aligned = reinterpret_cast<uintptr_t>(scratch.data());
  KernelArgs args{buffers.data(), symbols.data(), &error, reinterpret_cast<void*>((aligned + 63) / 64 * 64)};
  for (int t = 0; t < threads; ++t) compiled->function()(&args, t, threads);
  for (size_t k = 0; k < arguments.size(); ++k) {
    CHECK(memory[k].border_intact());
    memory[k].for_each([&](int64_t flat, char* at) { arguments[k]->set(flat, take(at, memory[k].dtype)); });
  }
  return error;
}

Array filled(DType dtype, std::vector<int64_t> shape, std::mt19937& rng) {
  Array a = Array::zeros(dtype, std::move(shape));
  std::uniform_real_distribution<double> real(-2, 2);
  std::uniform_int_distribution<int64_t> integer(0, 7);
  for (int64_t k = 0; k < a.count(); ++k) {
    int64_t n = integer(rng);
    a.set(k, is_float(dtype)           ? Scalar::of_float(dtype, real(rng))
             : dtype == DType::boolean ? Scalar::of_int(dtype, n & 1)
                                       : Scalar::of_int(dtype, is_signed(dtype) && n == 0 ? -3 : n + 1));
  }
  return a;
}

namespace {

/// What an array may be off by, from the same computed in float64: as much as the interpreter's own roundings put it off (sums are formed in
/// another order here), and two units of its dtype and of float32, in which 16 bits are computed, for the functions around them.
double allowed_error(const Array& typed, const Array& exact) {
  double worst = 0;
  double largest = 0;
  for (int64_t k = 0; k < typed.count(); ++k) {
    if (!std::isfinite(typed.get(k).f) || !std::isfinite(exact.get(k).f)) continue;
    worst = std::max(worst, std::abs(typed.get(k).f - exact.get(k).f));
    largest = std::max(largest, std::abs(exact.get(k).f));
  }
  double unit = std::ldexp(1.0, typed.dtype == DType::f64 ? -52 : typed.dtype == DType::f32 ? -23 : typed.dtype == DType::f16 ? -10 : -7);
  return 2 * worst + 2 * unit * largest;
}

}  // namespace

void same(const Array& wanted, const Array& exact, const Array& got, const std::string& name) {
  double allowed = is_float(wanted.dtype) ? allowed_error(wanted, exact) : 0;
  for (int64_t k = 0; k < wanted.count(); ++k) {
    Scalar w = wanted.get(k);
    Scalar g = got.get(k);
    INFO(name << "[" << k << "]: wanted " << w.as_double() << ", got " << g.as_double());
    if (!is_float(w.dtype)) {
      REQUIRE(w.i == g.i);
    } else if (std::isnan(w.f) || std::isinf(w.f)) {
      REQUIRE(((std::isnan(w.f) && std::isnan(g.f)) || w.f == g.f));
    } else {
      REQUIRE(std::abs(g.f - exact.get(k).f) <= allowed);
    }
  }
}

std::vector<Array*> pointers(std::vector<Array>& arrays) {
  std::vector<Array*> out;
  for (Array& a : arrays) out.push_back(&a);
  return out;
}

void agree(const std::string& text, const Sizes& sizes, const Prepare& prepare) {
  tile_ir::Module module = tile_ir::parse(text);
  tile_ir::verify(module);
  const tile_ir::Kernel& kernel = *module.kernels[0];
  std::mt19937 rng(7);
  std::vector<Array> inputs;
  for (const auto& p : kernel.params) inputs.push_back(filled(p.dtype, evaluate_shape(p.shape, sizes), rng));
  if (prepare) prepare(inputs);
  std::vector<Array> wanted = inputs;
  std::vector<Array> exact = inputs;
  bool wanted_error = false;
  for (Mode mode : {Mode::exact, Mode::typed}) try {
      tile_ir::interpret(kernel, pointers(mode == Mode::exact ? exact : wanted), sizes, mode);
    } catch (const IndexError&) {
      wanted_error = true;
    } catch (const UserError&) {
      wanted_error = true;
    }
  for (int bytes : {4, 16, 32, 64})
    for (int threads : {1, 3}) {
      if (threads > 1 && kernel.chunks.is(1)) continue;
      INFO(text << "\nvector bytes " << bytes << ", threads " << threads);
      std::vector<Array> got = inputs;
      int error = run_native(kernel, pointers(got), sizes, bytes, threads);
      CHECK((error != 0) == wanted_error);
      for (size_t k = 0; k < got.size(); ++k)
        if (kernel.params[k].kind != loop_ir::ParamKind::in) same(wanted[k], exact[k], got[k], kernel.params[k].name);
    }
}

}  // namespace deplo
