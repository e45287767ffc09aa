#include "library/aten/host.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/memory.h"
#include "library/aten/call.h"
#include "library/aten/types.h"

namespace deplo::aten {
namespace {

void add_names(const Attribute& attribute, std::set<std::string>& names) {
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) names.insert(value->name);
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) add_names(item, names);
}

/// The buffers that a step takes or the program returns. ATen's other results are dropped: PyTorch's traces say wrong sizes for some of them.
std::set<std::string> read_buffers(const ProgramBody& program) {
  std::set<std::string> names;
  for (const Step& step : program.steps) {
    if (const auto* call = std::get_if<CallStep>(&step)) names.insert(call->arguments.begin(), call->arguments.end());
    if (const auto* library = std::get_if<LibraryStep>(&step))
      for (const auto& [name, value] : library->arguments) add_names(value, names);
  }
  for (const Attribute& output : program.outputs) add_names(output, names);
  return names;
}

/// A library step: the call, and the buffers that its results become.
class AtenStep final : public LibraryOp {
 public:
  AtenStep(const LibraryStep& step, const LibraryContext& context) : call_(step.op, step.arguments), symbols_(context.symbols) {
    for (size_t b = 0; b < context.program->buffers.size(); ++b) buffers_[context.program->buffers[b].name] = b;
    std::set<std::string> read = read_buffers(*context.program);
    for (const std::string& result : step.results) results_.push_back(read.count(result) ? std::optional(buffers_.at(result)) : std::nullopt);
  }

  void run(Host& host) const override {
    auto& tensors = static_cast<TensorHost&>(host);
    std::vector<at::Tensor> operands;
    auto tensor_of = [&](const std::string& name) {
      operands.push_back(tensors.tensor(buffers_.at(name)));
      return operands.back();
    };
    std::map<std::string, int64_t> sizes;
    for (size_t s = 0; s < symbols_.size(); ++s) sizes[symbols_[s]] = (*host.symbols)[s];
    std::vector<at::Tensor> results = call_.run(tensor_of, [&](Expr size) { return evaluate(size, sizes); }, tensors.device());
    DEPLO_ASSERT(results.size() >= results_.size(), "{} returned {} tensors, {} expected", call_.op(), results.size(), results_.size());
    for (size_t r = 0; r < results_.size(); ++r)
      if (results_[r]) tensors.adopt(*results_[r], std::move(results[r]), operands, call_.op());
  }

 private:
  AtenCall call_;
  std::vector<std::string> symbols_;
  std::map<std::string, size_t> buffers_;
  std::vector<std::optional<size_t>> results_;
};

/// Outputs from here on live in deplo's pool: its blocks are huge pages that were touched before, and the first touch of fresh pages costs
/// more than most kernels that fill them.
constexpr int64_t kPooledBytes = 1 << 20;

void give_back(void* block) { delete static_cast<Memory*>(block); }

/// An uninitialised tensor whose storage gives its block back to the pool. Resizing moves it to PyTorch's allocator, as any storage.
at::Tensor pooled_tensor(at::ScalarType dtype, const BufferShape& shape) {
  auto memory = std::make_unique<Memory>(shape.bytes);
  void* data = memory->data();
  at::DataPtr owner(data, memory.release(), give_back, c10::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), shape.bytes, std::move(owner), c10::GetCPUAllocator(),
                                                       /*resizable=*/true);
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  return tensor;
}

/// What the driver calls a stream.
template <class S>
void* handle_of(const S& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    DEPLO_SUPPORT(stream.id() == 0, "this PyTorch does not tell the driver's name of a stream: use PyTorch 2.11 or later, or the default stream");
    return nullptr;
  }
}

bool has_layout(const at::Tensor& tensor, const BufferShape& shape) {
  if (tensor.numel() == 0) return true;
  for (size_t d = 0; d < shape.sizes.size(); ++d)
    if (shape.sizes[d] != 1 && shape.strides[d] != tensor.stride(static_cast<int64_t>(d))) return false;
  return true;
}

}  // namespace

TensorHost::TensorHost(const ProgramBody& program, const std::vector<const at::Tensor*>& inputs, const std::vector<size_t>& argument_of,
                       const std::vector<size_t>& allocated, c10::Device device)
    : program_(program), inputs_(inputs), argument_of_(argument_of), allocated_(allocated), device_(device) {
  outputs_.reserve(allocated.size());
  if (device.is_cpu()) return;
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  stream_ = guard->getStream(device);
  handle_ = handle_of(*stream_);
  allocator_ = c10::GetAllocator(device.type());
  left_ = guard->exchangeDevice(device);  // the last thing that may fail: without an object nobody puts it back
}

TensorHost::~TensorHost() {
  if (left_) c10::impl::getDeviceGuardImpl(device_.type())->uncheckedSetDevice(*left_);
}

at::Tensor TensorHost::empty(at::ScalarType dtype, const BufferShape& shape) const {
  if (!allocator_) return at::Tensor(at::detail::empty_strided_cpu(shape.sizes, shape.strides, dtype));
  c10::DispatchKeySet key(c10::computeDispatchKey(dtype, c10::kStrided, device_));
  return at::Tensor(at::detail::empty_strided_generic(shape.sizes, shape.strides, allocator_, key, dtype));
}

DeviceBlock TensorHost::allocate_on_device(int64_t bytes) {
  if (bytes == 0) return {};
  auto owner = std::make_shared<c10::DataPtr>(allocator_->allocate(static_cast<size_t>(bytes)));
  return {static_cast<char*>(owner->get()), owner};
}

std::shared_ptr<void> TensorHost::mark() {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(*stream_);
  return event;
}

void TensorHost::wait_for(const std::shared_ptr<void>& mark) { static_cast<c10::Event*>(mark.get())->block(*stream_); }

void TensorHost::use(const DeviceBlock& block) {
  if (block.owner) c10::impl::getDeviceGuardImpl(device_.type())->recordDataPtrOnStream(*static_cast<c10::DataPtr*>(block.owner.get()), *stream_);
}

char* TensorHost::allocate(size_t /*buffer*/, DType dtype, const BufferShape& shape) {
  at::ScalarType type = to_scalar_type(dtype);
  outputs_.push_back(!allocator_ && shape.bytes >= kPooledBytes ? pooled_tensor(type, shape) : empty(type, shape));
  return static_cast<char*>(outputs_.back().unsafeGetTensorImpl()->mutable_data());
}

std::shared_ptr<void> TensorHost::watch(size_t input) {
  return std::make_shared<c10::weak_intrusive_ptr<c10::StorageImpl>>(inputs_[input]->storage().getWeakStorageImpl());
}

char* TensorHost::report_end(size_t input, void (*gone)(void*)) {
  static const c10::DeleterFnPtr free_memory = c10::GetCPUAllocator()->raw_deleter();
  static std::atomic<void (*)(void*)> told{nullptr};
  told.store(gone);
  const c10::DeleterFnPtr tell = [](void* memory) {
    told.load()(memory);
    free_memory(memory);
  };
  // The pointer stays what it is: other threads may read it meanwhile.
  c10::DataPtr& memory = inputs_[input]->storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!free_memory || memory.get() != memory.get_context()) return nullptr;
  if (memory.get_deleter() != tell && !memory.compare_exchange_deleter(free_memory, tell)) return nullptr;
  return static_cast<char*>(memory.get());
}

void TensorHost::release(size_t buffer) {
  if (program_.buffers[buffer].kind != BufferKind::input) {
    std::erase_if(adopted_, [&](const auto& adopted) { return adopted.first == buffer; });
    return;
  }
  // A library step may have kept it since the call began, or read it still.
  const at::Tensor& tensor = *inputs_[argument_of_[buffer]];
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.use_count() != 1 || tensor.storage().use_count() != 1) return;
  // Memory that others made (shared with processes, say) they may know of without a reference.
  c10::DataPtr& memory = storage->_mutable_data_ptr_no_checks();
  if (device_.is_cpu() && memory.get_deleter() != give_back && memory.get_deleter() != c10::GetCPUAllocator()->raw_deleter()) return;
  // The tensor stays, as a Python object whose lock this thread may not hold, but what it holds goes.
  storage->set_nbytes(0);
  memory = c10::DataPtr(nullptr, device_);
}

at::Tensor TensorHost::tensor(size_t buffer) const {
  const Buffer& known = program_.buffers[buffer];
  if (known.kind == BufferKind::input) return *inputs_[argument_of_[buffer]];
  for (const auto& [adopted, tensor] : adopted_)
    if (adopted == buffer) return tensor;
  for (size_t k = 0; k < allocated_.size(); ++k)
    if (allocated_[k] == buffer) return outputs_[k];
  const BufferShape& shape = (*shapes)[buffer];
  return at::for_blob(pointers[buffer], shape.sizes)
      .strides(shape.strides)
      .options(at::TensorOptions().dtype(to_scalar_type(known.dtype)).device(device_))
      .target_device(device_)
      .make_tensor();
}

void TensorHost::adopt(size_t buffer, at::Tensor result, const std::vector<at::Tensor>& operands, const std::string& op) {
  const Buffer& expected = program_.buffers[buffer];
  const BufferShape& shape = (*shapes)[buffer];
  // Some kernels give empty tensors of another dtype (the mask of native_dropout).
  if (result.defined() && result.numel() == 0) result = result.to(to_scalar_type(expected.dtype));
  DEPLO_ASSERT(result.defined() && result.scalar_type() == to_scalar_type(expected.dtype) && result.sizes().equals(shape.sizes),
               "{} did not return what the graph says about {}", op, expected.name);
  bool shared = !has_layout(result, shape);
  for (const at::Tensor& operand : operands) shared = shared || operand.storage().data() == result.storage().data();
  if (shared) {
    at::Tensor copy = empty(result.scalar_type(), shape);
    copy.copy_(result);
    result = std::move(copy);
  }
  pointers[buffer] = static_cast<char*>(result.mutable_data_ptr());
  adopted_.emplace_back(buffer, std::move(result));
}

namespace {

/// Tensors whose memory is not, or not alone, what they are: wrapper subclasses, lazy negation and conjugation, zeros without memory, vmap.
constexpr c10::DispatchKeySet kUnlikeTheirMemory({c10::DispatchKey::Python, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
                                                  c10::DispatchKey::ZeroTensor, c10::DispatchKey::FuncTorchBatched,
                                                  c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});

}  // namespace

TensorView view_of(const at::Tensor& tensor, c10::DeviceType elsewhere) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  DEPLO_SUPPORT(!impl->key_set().has_any(kUnlikeTheirMemory), "an input is a tensor that its memory alone does not give (dispatch keys {})",
                c10::toString(impl->key_set() & kUnlikeTheirMemory));
  DEPLO_SUPPORT(impl->layout() == c10::kStrided && impl->has_storage() && (impl->is_cpu() || impl->device_type() == elsewhere),
                "an input is a {} tensor on {}", impl->layout() == c10::kStrided ? "strided" : "sparse", tensor.device().str());
  TensorView view;
  view.data = static_cast<char*>(const_cast<void*>(impl->data()));
  view.dtype = from_scalar_type(c10::typeMetaToScalarType(impl->dtype()));
  view.rank = static_cast<int>(impl->dim());
  view.sizes = impl->sizes().data();
  view.strides = impl->strides().data();
  view.storage = impl->unsafe_storage().unsafeGetStorageImpl();
  view.has_version = !impl->is_inference();
  view.device = impl->is_cpu() ? -1 : impl->device().index();
  view.version = view.has_version ? impl->version_counter().current_version() : 0;
  return view;
}

void refuse_tangents(const std::vector<const at::Tensor*>& tensors) {
  constexpr uint64_t kLevel = 0;  // the only one that PyTorch has
  if (!torch::autograd::ForwardADLevel::try_get_by_idx(kLevel)) return;
  for (const at::Tensor* tensor : tensors)
    DEPLO_SUPPORT(!tensor || !tensor->_fw_grad(kLevel).defined(), "an input carries a tangent of forward-mode differentiation");
}

std::unique_ptr<LibraryOp> make_library_op(const LibraryStep& step, const LibraryContext& context) {
  return std::make_unique<AtenStep>(step, context);
}

}  // namespace deplo::aten
