#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "divisions.h"
#include "pipeline.h"
#include "programs.h"
#include "runtime/program.h"
#include "target/cuda/driver.h"
#include "target/cuda/launch.h"
#include "target/cuda/nvrtc.h"
#include "tensor_ir/interpret.h"

// Programs of the CUDA target on a device, or on the driver and NVRTC that emulate one.

namespace deplo::testing {

/// How the emulated driver behaves while this lives.
class Behaviour {
 public:
  explicit Behaviour(const std::string& settings) { setenv("DEPLO_FAKE_CUDA", settings.c_str(), 1); }
  ~Behaviour() { unsetenv("DEPLO_FAKE_CUDA"); }
  Behaviour(const Behaviour&) = delete;
  Behaviour& operator=(const Behaviour&) = delete;
};

inline kernel_ir::Module kernels_for_cuda(const std::string& text, const std::string& name, const std::string& schedule = "") {
  PassContext context;
  context.target.name = "cuda";
  if (!schedule.empty()) context.schedules = {{"", schedule}};
  return run_pipeline_from_text(text, name, context, {}).kernel;
}

/// No further from what float64 gives than the typed interpreter is, and one more rounding to the result's dtype; and than what n roundings in
/// float32 make of a sum in another order: errors of either sign grow as sqrt(n).
inline void require_close_to_exact(const Array& got, const Array& typed, const Array& exact, double roundings) {
  double worst = 0;
  double largest = 0;
  for (int64_t i = 0; i < exact.count(); ++i) {
    worst = std::max(worst, std::abs(typed.get(i).as_double() - exact.get(i).as_double()));
    largest = std::max(largest, std::abs(exact.get(i).as_double()));
  }
  double allowed = worst + (unit_roundoff(typed.dtype) + std::sqrt(roundings) * unit_roundoff(DType::f32)) * largest;
  REQUIRE(got.shape == exact.shape);
  for (int64_t i = 0; i < got.count(); ++i) {
    INFO("element " << i << ": " << got.get(i).as_double() << ", exact " << exact.get(i).as_double());
    REQUIRE(std::abs(got.get(i).as_double() - exact.get(i).as_double()) <= (is_float(typed.dtype) ? allowed : 0));
  }
}

template <class T>
void put(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void put_scalar(char* at, const Scalar& v) {
  switch (v.dtype) {
    case DType::f16: return put(at, f32_to_f16(static_cast<float>(v.f)));
    case DType::bf16: return put(at, f32_to_bf16(static_cast<float>(v.f)));
    case DType::f32: return put(at, static_cast<float>(v.f));
    case DType::f64: return put(at, v.f);
    case DType::f8: return put(at, f32_to_f8(static_cast<float>(v.f)));
    case DType::i64: return put(at, v.i);
    case DType::i32: return put(at, static_cast<int32_t>(v.i));
    case DType::i16: return put(at, static_cast<int16_t>(v.i));
    case DType::i8: return put(at, static_cast<int8_t>(v.i));
    case DType::u8: return put(at, static_cast<uint8_t>(v.i));
    case DType::boolean: return put(at, static_cast<uint8_t>(v.i != 0));
  }
}

inline Scalar get_scalar(const char* at, DType dtype) {
  switch (dtype) {
    case DType::f16: return Scalar::of_float(dtype, f16_to_f32(get<uint16_t>(at)));
    case DType::bf16: return Scalar::of_float(dtype, bf16_to_f32(get<uint16_t>(at)));
    case DType::f32: return Scalar::of_float(dtype, get<float>(at));
    case DType::f64: return Scalar::of_float(dtype, get<double>(at));
    case DType::f8: return Scalar::of_float(dtype, f8_to_f32(get<uint8_t>(at)));
    case DType::i64: return Scalar::of_int(dtype, get<int64_t>(at));
    case DType::i32: return Scalar::of_int(dtype, get<int32_t>(at));
    case DType::i16: return Scalar::of_int(dtype, get<int16_t>(at));
    case DType::i8: return Scalar::of_int(dtype, get<int8_t>(at));
    default: return Scalar::of_int(dtype, get<uint8_t>(at));
  }
}

/// The bytes of a strided buffer.
class Image {
 public:
  Image(const Buffer& buffer, const Array& array, const Sizes& symbols)
      : dtype_(buffer.dtype),
        layout_{array.shape, evaluate_shape(buffer.strides, symbols)},
        bytes_(static_cast<size_t>(layout_.span() * size_of(dtype_)), static_cast<char>(0xff)) {  // NaN shows a read of what is no element
    layout_.for_each([&](int64_t flat, int64_t offset) { put_scalar(at(offset), array.get(flat)); });
  }

  Image(DType dtype, const BufferShape& shape)
      : dtype_(dtype), layout_{shape.sizes, shape.strides}, bytes_(static_cast<size_t>(shape.bytes), static_cast<char>(0xff)) {}

  CallArgument argument(int device = -1) {
    CallArgument made;
    made.tensor = {bytes_.data(), dtype_, static_cast<int>(layout_.shape.size()), layout_.shape.data(), layout_.strides.data(), bytes_.data(), 0};
    made.tensor.device = device;
    return made;
  }
  char* data() { return bytes_.data(); }

  Array array() {
    Array array = Array::zeros(dtype_, layout_.shape);
    layout_.for_each([&](int64_t flat, int64_t offset) { array.set(flat, get_scalar(at(offset), dtype_)); });
    return array;
  }

 private:
  char* at(int64_t offset) { return bytes_.data() + offset * size_of(dtype_); }

  DType dtype_;
  StridedLayout layout_;
  std::vector<char> bytes_;
};

struct ArrayHost final : Host {
  std::map<size_t, Image> outputs;
  char* allocate(size_t buffer, DType dtype, const BufferShape& shape) override {
    return outputs.try_emplace(buffer, dtype, shape).first->second.data();
  }
  std::shared_ptr<void> watch(size_t /*input*/) override { return nullptr; }
  DeviceBlock allocate_on_device(int64_t bytes) override {
    auto block = std::make_shared<std::vector<char>>(static_cast<size_t>(bytes), static_cast<char>(0xff));
    return {block->data(), block};
  }
};

inline runtime::Program::Options tensors_on(int device) {
  runtime::Program::Options options;
  options.device = device;
  return options;
}

/// A program whose kernels run on a device.
class OnDevice {
 public:
  /// `tensors`: the device that they are on; -1: they are on the host.
  OnDevice(const std::shared_ptr<CudaDevice>& device, const kernel_ir::Module& module, const std::string& nvrtc, int tensors = -1)
      : program_(module, {{}, std::make_shared<CudaKernels>(device, module, nvrtc), ""}, nullptr, tensors_on(tensors)), tensors_(tensors) {}

  /// The outputs.
  std::vector<Array> run(const std::vector<Array>& inputs, const Sizes& sizes) {
    const runtime::Layout& layout = program_.layout();
    std::vector<Image> images;
    images.reserve(inputs.size());
    std::vector<CallArgument> arguments(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (layout.input_order[i]) {
        arguments[i] = images.emplace_back(program_.module().buffers[*layout.input_order[i]], inputs[i], sizes).argument(tensors_);
      } else {
        arguments[i].is_tensor = false;
        arguments[i].integer = inputs[i].get(0).i;
      }
    }
    ArrayHost host;
    const auto plan = program_.run(arguments.data(), arguments.size(), host, 1);
    std::vector<Array> results;
    for (size_t k = 0; k < layout.outputs.size(); ++k) {
      const auto& buffer = layout.outputs[k].buffer;
      results.push_back(buffer ? host.outputs.at(*buffer).array() : Array::filled(DType::i64, {}, Scalar::of_int(DType::i64, plan->integers[k])));
    }
    return results;
  }

 private:
  runtime::Program program_;
  int tensors_;
};

inline std::vector<Array> run_on_device(const std::shared_ptr<CudaDevice>& device, const kernel_ir::Module& module, const std::vector<Array>& inputs,
                                        const Sizes& sizes, const std::string& nvrtc, int tensors = -1) {
  return OnDevice(device, module, nvrtc, tensors).run(inputs, sizes);
}

inline void check_divisions_on(const std::shared_ptr<CudaDevice>& device, const std::string& nvrtc) {
  for (const Divisions& divisions : divisions_by_signs()) {
    const kernel_ir::Module module = kernels_for_cuda(divisions.text(), "divisions");
    INFO(divisions.text() << print(module));
    OnDevice program(device, module, nvrtc);
    for (const DivisionPoint& at : divisions.sizes()) divisions.check(program.run(Divisions::inputs(at), {}), at);
  }
}

/// Runs one case on a device and compares with the Tensor IR.
inline void check_on(const std::shared_ptr<CudaDevice>& device, const Case& c, const std::string& nvrtc, const std::string& schedule = "",
                     int tensors = -1) {
  kernel_ir::Module module = kernels_for_cuda(c.text, c.name, schedule);
  INFO(c.name << " on " << device->name() << "\n" << print(module));
  tensor_ir::Graph graph = tensor_ir::parse(c.text);
  std::vector<Array> inputs = random_inputs(graph, c.sizes);
  std::vector<Array> typed = tensor_ir::interpret(graph, inputs, c.sizes, Mode::typed);
  std::vector<Array> exact = tensor_ir::interpret(graph, inputs, c.sizes, Mode::exact);
  std::vector<Array> got = run_on_device(device, module, inputs, c.sizes, nvrtc, tensors);
  REQUIRE(got.size() == exact.size());
  for (size_t k = 0; k < got.size(); ++k) require_close_to_exact(got[k], typed[k], exact[k], roundings(graph, c.sizes));
}

}  // namespace deplo::testing
