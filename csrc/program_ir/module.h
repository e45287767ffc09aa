#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/location.h"
#include "base/ref.h"
#include "expr/check.h"
#include "expr/expr.h"
#include "torch_ir/ir.h"

namespace deplo {

// What Loop, Tile and Kernel IR share: a program of steps over buffers, whose kernels are of one level.
//
//   program @net(x: f32[s0, 64] user, w: f32[64, 64] strides [1, 64] parameter static, s1: sym) where s0 in 2..
//     check s1 - s0 != 0 else "integer division or modulo by zero"
//     fact few0 = all q in -8..7
//     buffer t0: f32[s0, 64]
//     buffer p0: f32[4, 64, 16] packed
//     once call @k1_pack(w, p0)
//     call @k0_linear_relu_small(x, w, t0) when 2 - s0 >= 0
//     or call @k0_linear_relu(x, p0, t0)
//     library aten.sort.stable(self=t0, dim=0) -> t1, t2 reason "sort"
//     return t1, s0, none
//
// Semantics: a `fact` is a symbol that is 1 if all elements of a static input of bytes lie in a range, else 0. A call whose sizes do not fulfil a
// `check` fails before anything ran. Steps run in order. Buffers never overlap unless one is declared `alias of`; the memory plan decides who reuses
// whose memory. `once` steps read only static inputs and constants, and run again only when one of those changed; what they write (buffers marked
// packed) lives as long as the program; they wait until a step that runs reads it. Of a call and the `or` calls that follow it, the first whose
// `when` holds for the sizes runs: they compute the same by schedules for different sizes, and the last one has no `when`. Inputs may be written by
// steps (mutation). A kernel's parameters are bound to buffers by position. Strides are in elements, row-major where the text has none. Names of
// buffers carry no %; inside the arguments of a library step a bare word that names a buffer is that buffer.

enum class BufferKind : uint8_t {
  input,   ///< the caller's memory
  temp,    ///< lives inside one call: the arena
  output,  ///< allocated for the caller
  packed,  ///< written by `once` steps, kept between calls
};

struct Buffer {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Expr> shape;
  std::vector<Expr> strides;  ///< in elements
  BufferKind kind = BufferKind::temp;
  torch_ir::InputKind input_kind = torch_ir::InputKind::user;  ///< of inputs
  bool is_static = false;                                      ///< of inputs
  Location location{};
  bool operator==(const Buffer&) const = default;
};

/// Whether all elements of an input lie in lo..hi, as the value of a symbol.
struct Fact {
  std::string symbol;
  std::string buffer;  ///< a static input, of i8 or u8
  int64_t lo = 0;
  int64_t hi = 0;
  bool operator==(const Fact&) const = default;
};

struct CallStep {
  std::string kernel;
  std::vector<std::string> arguments;
  bool once = false;
  std::vector<Cond> when = {};  ///< on sizes
  bool is_alternative = false;  ///< `or`: for sizes at which none of the calls runs that it is an alternative of
  Location location{};
  bool operator==(const CallStep&) const = default;
};

struct LibraryStep {
  std::string op;
  std::vector<std::pair<std::string, Attribute>> arguments;  ///< ValueName names a buffer
  std::vector<std::string> results;
  std::string reason;
  Location location{};
  bool operator==(const LibraryStep&) const = default;
};

using Step = std::variant<CallStep, LibraryStep>;

/// The part of a module that does not depend on the level of its kernels.
struct ProgramBody {
  std::string name;
  Ranges symbols;
  std::vector<SizeCheck> checks;           ///< run before the steps
  std::vector<Fact> facts;                 ///< symbols that follow from the elements of inputs
  std::vector<std::string> symbol_inputs;  ///< symbols given as inputs of their own, `s1: sym`; see input_order
  std::vector<Buffer> buffers;             ///< inputs first, in calling order
  std::vector<std::string> input_order;    ///< names of input buffers and symbol inputs in calling order
  std::vector<Step> steps;
  std::vector<Attribute> outputs;  ///< ValueName of a buffer, Expr or None

  const Buffer* find_buffer(const std::string& buffer) const {
    for (const Buffer& b : buffers)
      if (b.name == buffer) return &b;
    return nullptr;
  }
  Buffer* find_buffer(const std::string& buffer) {
    for (Buffer& b : buffers)
      if (b.name == buffer) return &b;
    return nullptr;
  }
  Location return_location{};
  bool operator==(const ProgramBody&) const = default;
};

using FindBuffer = std::function<const Buffer*(const std::string&)>;

/// The buffers of a program by name, while none is added or removed.
class BufferIndex {
 public:
  explicit BufferIndex(const ProgramBody& program) {
    for (const Buffer& b : program.buffers) places_.emplace(b.name, &b);
  }
  const Buffer* find(const std::string& buffer) const {
    auto it = places_.find(buffer);
    return it == places_.end() ? nullptr : it->second;
  }

 private:
  std::unordered_map<std::string, const Buffer*> places_;
};

template <class Kernel>
struct ModuleOf : ProgramBody {
  Refs<Kernel> kernels;

  const Kernel* find_kernel(const std::string& kernel) const {
    for (const auto& k : kernels)
      if (k->name == kernel) return k.get();
    return nullptr;
  }
  bool operator==(const ModuleOf&) const = default;
};

/// Which steps run for these sizes: all but those of the alternatives that are not taken.
std::vector<bool> taken_steps(const ProgramBody& program, const std::map<std::string, int64_t>& symbols);

/// One argument or result type that a kernel expects.
struct ParamType {
  DType dtype = DType::f32;
  bool writes = false;
  std::optional<std::vector<Expr>> shape = std::nullopt;  ///< nothing where the level's parameters are pointers
};
/// The parameters of a kernel by name; nothing if there is no such kernel.
using FindParams = std::function<std::optional<std::vector<ParamType>>(const std::string& kernel)>;
/// Row-major strides in elements, as PyTorch gives them: a constant size 0 counts as 1.
std::vector<Expr> contiguous_strides(const std::vector<Expr>& shape);

}  // namespace deplo
