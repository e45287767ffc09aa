#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "program_ir/module.h"

namespace deplo {

// What the runtime asks of the tensor library that calls it. The runtime itself sees raw memory only.

/// A tensor as a program is given it. Sizes and strides (in elements) belong to the caller and outlive the call.
struct TensorView {
  char* data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  const void* storage = nullptr;  ///< identity of the memory's owner
  uint64_t version = 0;           ///< changes with every write that the library knows of
  bool has_version = true;        ///< false: writes leave no trace
  int device = -1;                ///< ordinal of the device whose memory `data` addresses; -1: it is the host's
};

/// An input in calling order: a tensor, or the value of a symbol.
struct CallArgument {
  bool is_tensor = true;
  bool is_last = false;  ///< nobody but the call holds the tensor: its memory may go once the program has read it
  int64_t integer = 0;
  TensorView tensor;
};

/// Concrete type of a buffer in one call.
struct BufferShape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t bytes = 0;  ///< from the first to the last element
  bool operator==(const BufferShape&) const = default;
};

class Host;

/// Memory of a device. Work that the call's stream was given before the owner went is safe from who gets the memory next.
struct DeviceBlock {
  char* data = nullptr;
  std::shared_ptr<void> owner;
};

/// A library step made ready to run.
class LibraryOp {
 public:
  virtual ~LibraryOp() = default;
  /// Runs it; `host` knows the call's tensors and memory.
  virtual void run(Host& host) const = 0;
};

/// What a library step needs to know of its program: buffers are named by their place in it.
struct LibraryContext {
  const ProgramBody* program = nullptr;
  std::vector<std::string> symbols;  ///< names, in the order of Host::symbols
};

/// Makes LibraryOps. Throws UnsupportedError for an op that the library does not have.
using LibraryFactory = std::unique_ptr<LibraryOp> (*)(const LibraryStep& step, const LibraryContext& context);

/// One call's side of the tensor library.
class Host {
 public:
  virtual ~Host() = default;
  /// Memory of the caller's for output buffer `buffer`. Asked in the order of the layout's `allocated`, before the first step that uses it.
  virtual char* allocate(size_t buffer, DType dtype, const BufferShape& shape) = 0;
  /// Keeps the identity of a static input's storage from being reused while the result lives.
  virtual std::shared_ptr<void> watch(size_t input) = 0;

  /// Has `gone(memory)` called before the memory that a static input lies in goes back to its allocator. `memory` is where it begins; null where the
  /// library cannot promise that.
  virtual char* report_end(size_t /*input*/, void (* /*gone*/)(void*)) { return nullptr; }

  /// The program reads a buffer no more: what a library step made, or an input whose argument `is_last`.
  virtual void release(size_t /*buffer*/) {}

  /// The call goes on for long: what the caller holds that others wait for (Python's lock) should be let go.
  virtual void will_take_long() {}

  // Asked by programs whose tensors are on a device.

  /// What the device's driver calls the stream that the call's work goes to; library steps use the same.
  virtual void* stream() { return nullptr; }
  virtual DeviceBlock allocate_on_device(int64_t /*bytes*/) { throw InternalError("this tensor library has no device"); }
  /// A point of the stream, which other streams may wait for.
  virtual std::shared_ptr<void> mark() { return nullptr; }
  virtual void wait_for(const std::shared_ptr<void>& /*mark*/) {}
  /// The stream will use memory that was allocated for another one.
  virtual void use(const DeviceBlock& /*block*/) {}

  // Set by the program before its steps run.
  const std::vector<int64_t>* symbols = nullptr;     ///< values, in the program's order
  const std::vector<BufferShape>* shapes = nullptr;  ///< by buffer
  char** pointers = nullptr;                         ///< by buffer; a library op sets those of its results
};

}  // namespace deplo
