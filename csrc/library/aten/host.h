#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <vector>

#include "library/library.h"

namespace deplo::aten {

/// One call of a program with at::Tensors on its other side. Lives for the length of the call; inputs are borrowed.
class TensorHost : public Host {
 public:
  /// `inputs` by place in the calling order (null for a symbol), `argument_of` the place of each input buffer,
  /// `allocated` the output buffers in the order in which the program allocates them, `device` where its tensors are. A device is the thread's
  /// current one while this lives: its memory comes from PyTorch's allocator, and work goes to PyTorch's current stream.
  TensorHost(const ProgramBody& program, const std::vector<const at::Tensor*>& inputs, const std::vector<size_t>& argument_of,
             const std::vector<size_t>& allocated, c10::Device device);
  ~TensorHost() override;
  TensorHost(const TensorHost&) = delete;
  TensorHost& operator=(const TensorHost&) = delete;

  char* allocate(size_t buffer, DType dtype, const BufferShape& shape) override;
  std::shared_ptr<void> watch(size_t input) override;
  /// Leaves what somebody has taken a reference to since the call began.
  void release(size_t buffer) override;
  /// Of memory of PyTorch's allocator for CPUs alone: mapped files, shared memory and what others lent have ends of their own.
  char* report_end(size_t input, void (*gone)(void*)) override;
  void* stream() override { return handle_; }
  DeviceBlock allocate_on_device(int64_t bytes) override;
  std::shared_ptr<void> mark() override;
  void wait_for(const std::shared_ptr<void>& mark) override;
  void use(const DeviceBlock& block) override;

  /// Where library calls make their results, which is where their operands are.
  c10::Device device() const { return device_; }

  /// The tensor of the output buffer that was allocated `place`th.
  const at::Tensor& allocated(size_t place) const { return outputs_[place]; }
  /// The tensor of a buffer: the caller's, one allocated in this call, or a view of the arena that dies with the call.
  at::Tensor tensor(size_t buffer) const;
  /// Takes what a library op returned as the contents of `buffer`: in the strides that the program expects and in memory of its own.
  void adopt(size_t buffer, at::Tensor result, const std::vector<at::Tensor>& operands, const std::string& op);

 protected:
  size_t argument_of(size_t buffer) const { return argument_of_[buffer]; }
  bool is_input(size_t buffer) const { return program_.buffers[buffer].kind == BufferKind::input; }

 private:
  /// An uninitialised tensor.
  at::Tensor empty(at::ScalarType dtype, const BufferShape& shape) const;

  const ProgramBody& program_;
  const std::vector<const at::Tensor*>& inputs_;
  const std::vector<size_t>& argument_of_;
  const std::vector<size_t>& allocated_;
  std::vector<at::Tensor> outputs_;                     ///< in the order of allocated_
  std::vector<std::pair<size_t, at::Tensor>> adopted_;  ///< by buffer; few
  c10::Device device_;
  // Of a device that is none of the host's:
  std::optional<c10::Device> left_;  ///< the thread's current one before
  std::optional<c10::Stream> stream_;
  void* handle_ = nullptr;
  c10::Allocator* allocator_ = nullptr;
};

/// The runtime's view of a tensor. Throws UnsupportedError for what is no dense tensor of a dtype that deplo has, on the CPU or a device of type
/// `elsewhere`.
TensorView view_of(const at::Tensor& tensor, c10::DeviceType elsewhere = c10::kCPU);

/// Throws UnsupportedError where one of the tensors (null for those that are none) carries a tangent of forward-mode differentiation, which a program
/// would drop.
void refuse_tangents(const std::vector<const at::Tensor*>& tensors);

/// The LibraryFactory of programs called from PyTorch.
std::unique_ptr<LibraryOp> make_library_op(const LibraryStep& step, const LibraryContext& context);

}  // namespace deplo::aten
