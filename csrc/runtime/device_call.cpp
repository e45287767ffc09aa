#include "runtime/device_call.h"

#include <cstring>

#include "base/error.h"
#include "runtime/kernel_error.h"

namespace deplo::runtime {
namespace {

/// What the driver itself aligns memory to; distinct buffers never share a line of the cache.
constexpr int64_t kDeviceAlignment = 256;

int64_t round_up(int64_t bytes) { return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment; }

/// Copies the elements of dimension `d` and those after it between two blocks of memory of the same strides.
void copy_elements(char* to, const char* from, const BufferShape& shape, int64_t element_bytes, size_t d = 0) {
  if (d == shape.sizes.size()) {
    std::memcpy(to, from, static_cast<size_t>(element_bytes));
    return;
  }
  int64_t step = shape.strides[d] * element_bytes;
  for (int64_t i = 0; i < shape.sizes[d]; ++i) copy_elements(to + i * step, from + i * step, shape, element_bytes, d + 1);
}

/// Temporaries lie as in the host's arena; everything else that a kernel touches follows.
DevicePlaces place_buffers(const Layout& layout, const Plan& plan, const std::vector<size_t>& steps) {
  constexpr int64_t kUnplaced = -1;
  DevicePlaces made{std::vector<int64_t>(plan.shapes.size(), kUnplaced), 0, 0};
  auto take = [&made](int64_t bytes) {
    int64_t offset = made.bytes;
    made.bytes += round_up(bytes);
    return offset;
  };
  take(plan.arena_bytes);
  for (size_t t = 0; t < layout.temporaries.size(); ++t) made.offsets[layout.temporaries[t].buffer] = plan.offsets[t];
  for (size_t s : steps) {
    if (!layout.steps[s].kernel) continue;
    for (size_t buffer : layout.steps[s].buffers)
      if (made.offsets[buffer] == kUnplaced) made.offsets[buffer] = take(plan.shapes[buffer].bytes);
  }
  made.errors = take(static_cast<int64_t>(layout.steps.size() * sizeof(int32_t)));
  return made;
}

}  // namespace

DeviceCall::DeviceCall(DeviceKernels& kernels, const kernel_ir::Module& module, const Layout& layout, const Plan& plan,
                       const std::vector<std::string>& names, const std::vector<size_t>& steps, char* const* pointers)
    : kernels_(kernels),
      module_(module),
      layout_(layout),
      plan_(plan),
      pointers_(pointers),
      places_(place_buffers(layout, plan, steps)),
      block_(kernels, places_.bytes) {
  for (size_t i = 0; i < names.size(); ++i) symbols_[names[i]] = plan.symbols[i];
  // Packed buffers are on the host between calls; only packing itself makes them.
  bool packs = !steps.empty() && layout.steps[steps.front()].once;
  for (size_t b = 0; b < module.buffers.size(); ++b) {
    const BufferKind kind = module.buffers[b].kind;
    const bool is_packed = kind == BufferKind::packed && !packs && pointers[b];  // null: not kept, as no kernel reads it
    homes_.push_back(kind == BufferKind::input || is_packed ? Home::host : Home::nowhere);
  }
  kernels.fill(block_.pointer() + static_cast<uint64_t>(places_.errors), 0, places_.bytes - places_.errors);
}

void DeviceCall::launch(size_t s) {
  const Layout::Step& step = layout_.steps[s];
  const kernel_ir::Kernel& kernel = *module_.kernels[*step.kernel];
  std::vector<uint64_t> addresses;
  for (size_t buffer : step.buffers) {
    addresses.push_back(address(buffer));
    if (homes_[buffer] != Home::host) continue;
    kernels_.copy_to_device(addresses.back(), pointers_[buffer], plan_.shapes[buffer].bytes);
    homes_[buffer] = Home::both;
  }
  uint64_t error = block_.pointer() + static_cast<uint64_t>(places_.errors) + s * sizeof(int32_t);
  kernels_.launch(kernel.name, addresses, symbols_, error);
  launched_ = true;
  for (size_t a = 0; a < step.buffers.size(); ++a)
    if (kernel.params[a].kind != loop_ir::ParamKind::in) homes_[step.buffers[a]] = Home::device;
}

void DeviceCall::check_errors() {
  if (!launched_) return;
  synchronize();
  launched_ = false;
  std::vector<int32_t> words(layout_.steps.size());
  kernels_.copy_to_host(words.data(), block_.pointer() + static_cast<uint64_t>(places_.errors), static_cast<int64_t>(words.size() * sizeof(int32_t)));
  for (size_t s = 0; s < words.size(); ++s)
    if (words[s] != 0) throw_kernel_error(words[s], module_.kernels[*layout_.steps[s].kernel]->name);
}

void DeviceCall::copy_back(size_t buffer) {
  const BufferShape& shape = plan_.shapes[buffer];
  int64_t element_bytes = size_of(module_.buffers[buffer].dtype);
  int64_t bytes = element_bytes;
  for (int64_t size : shape.sizes) bytes *= size;
  if (bytes == shape.bytes) return kernels_.copy_to_host(pointers_[buffer], address(buffer), bytes);
  std::vector<char> copy(static_cast<size_t>(shape.bytes));
  kernels_.copy_to_host(copy.data(), address(buffer), shape.bytes);
  copy_elements(pointers_[buffer], copy.data(), shape, element_bytes);
}

void DeviceCall::finish(const std::vector<size_t>& buffers) {
  check_errors();
  for (size_t buffer : buffers) {
    if (homes_[buffer] != Home::device) continue;
    copy_back(buffer);
    homes_[buffer] = Home::both;
  }
}

void DeviceCall::made_on_host(const std::vector<size_t>& buffers) {
  for (size_t buffer : buffers)
    if (homes_[buffer] == Home::nowhere) homes_[buffer] = Home::host;
}

}  // namespace deplo::runtime
