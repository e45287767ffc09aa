#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/location.h"
#include "base/ref.h"
#include "expr/check.h"
#include "expr/expr.h"
#include "torch_ir/attribute.h"

namespace deplo::torch_ir {

// Torch IR: the graph of ATen calls that PyTorch asked for, one node per call.
//
// Semantics: nodes run in order and are functional; every value is defined once. An argument is given by its schema
// name; one left out has its schema default. Sizes and strides (in elements) are expressions over symbols whose values
// come from the inputs. Mutations are the `write` lines at the end: after all nodes ran, the values are copied into the
// inputs; each value is the one before the first write, also where it is an input that another line writes. `return` lists what the caller gets, with
// the strides that eager would give. The storage_offset of aten.as_strided and its kin counts from the first element of self.
//
//   torch @softmax(%x: f32[s0, 2048] strides [2048, 1] user, %w: f32[8] strides [1] parameter static) where s0 in 2..4096
//     %0: f32[s0, 2048] strides [2048, 1] = aten._softmax.default(self=%x, dim=-1, half_to_float=false) at "net.py:12" in "attn.softmax"
//     write %3 to %x
//     return %0, s0, none
//
// A node with several results: `%a: f32[4], %b: i64[4] = aten.max.dim(...)`; a result that is unused by the op (None) is
// typed `none`. Sizes are not negative and no divisor is 0, else the call fails before a node ran, as it does where a `check` does not hold: PyTorch
// divided by numbers that no expression of the graph shows, `check s0 != 0 else "integer division or modulo by zero"`. `where` may also hold facts,
// which every call fulfils: `where s0 in 2.., s1 in 2.., s0 // 2 == s1`. A symbolic integer input is `s1: sym`. Strides left out are the contiguous
// ones (default_strides), an input's kind left out is user; print() leaves out the strides where they are the contiguous ones.

struct TensorType {
  DType dtype = DType::f32;
  std::vector<Expr> shape;
  std::vector<Expr> strides;  ///< in elements, as many as shape
  bool operator==(const TensorType&) const = default;
};

enum class InputKind : uint8_t { user, parameter, buffer, constant, symbol };

struct Input {
  std::string name;  ///< with its %; the bare symbol for InputKind::symbol
  TensorType type;   ///< unused for symbols
  InputKind kind = InputKind::user;
  bool is_static = false;  ///< the storage stays the same between calls (a parameter or buffer that the graph does not mutate)
  Location location{};
  bool operator==(const Input&) const = default;
};

struct Result {
  std::string name;
  std::optional<TensorType> type;  ///< absent: the op returns None here
  bool operator==(const Result&) const = default;
};

struct Node {
  std::vector<Result> results;
  std::string op;  ///< "aten._softmax.default"
  std::vector<std::pair<std::string, Attribute>> arguments;
  std::string source;  ///< "net.py:12", or empty
  std::string module;  ///< "attn.softmax", or empty
  Location location{};
  bool operator==(const Node&) const = default;
};

struct Write {
  std::string value;
  std::string input;
  Location location{};
  bool operator==(const Write&) const = default;
};

struct Graph {
  std::string name;
  std::vector<Input> inputs;
  Ranges symbols;
  std::vector<Cond> facts;  ///< of sizes, which the caller guarantees
  std::vector<SizeCheck> checks;
  Refs<Node> nodes;
  std::vector<Write> writes;
  std::vector<Attribute> outputs;  ///< ValueName, Expr or None
  Location where_location{};
  Location return_location{};
  bool operator==(const Graph&) const = default;
};

/// Row-major strides as PyTorch gives them: an extent of 0 counts as 1.
std::vector<Expr> default_strides(const std::vector<Expr>& shape);
std::string_view to_string(InputKind kind);

std::string print(const TensorType& type);
std::string print(const Node& node);
std::string print(const Graph& graph);
/// Throws UserError with file, line and column.
Graph parse(const std::string& text, const std::string& file = "<torch>");
/// Throws InternalError: undefined or redefined names, ranks of shape and strides that differ, unknown write targets, symbols without a
/// range or that follow from no input.
void verify(const Graph& graph);

}  // namespace deplo::torch_ir
