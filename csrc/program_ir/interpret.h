#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/array.h"
#include "program_ir/module.h"

namespace deplo {

/// Runs one ATen call for an interpreter: the overload, its arguments (sizes already numbers), and the array of every ValueName
/// that occurs in them. Returns one array per result. Throws UnsupportedError if it cannot.
using LibraryCall = std::function<std::vector<Array>(const std::string& op, const std::vector<std::pair<std::string, Attribute>>& arguments,
                                                     const std::map<std::string, Array>& arrays)>;

/// A LibraryCall that knows no op.
LibraryCall no_library();

/// The arguments with every size expression evaluated.
std::vector<std::pair<std::string, Attribute>> evaluate_arguments(const std::vector<std::pair<std::string, Attribute>>& arguments,
                                                                  const std::map<std::string, int64_t>& symbols);

template <class Values = std::map<std::string, int64_t>>
std::vector<int64_t> evaluate_shape(const std::vector<Expr>& shape, const Values& symbols) {
  std::vector<int64_t> sizes;
  for (const Expr& e : shape) sizes.push_back(evaluate(e, symbols));
  return sizes;
}

/// Adds the symbols that a shape determines by itself (a size that is a bare symbol); UserError if another size then disagrees.
void bind_symbols(const std::vector<Expr>& shape, const std::vector<int64_t>& sizes, const std::string& name,
                  std::map<std::string, int64_t>& symbols);

/// Runs one call step over the arrays of its arguments, in place.
using KernelCall = std::function<void(const CallStep& step, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& symbols)>;

/// The meaning of a program: runs its steps in order. `inputs` are in calling order, a symbol input as a 0-d i64 array; `symbols` may
/// be empty where shapes determine them. Returns the outputs (an integer as 0-d i64, None as an empty bool array), then every
/// input that a step writes, in calling order.
std::vector<Array> interpret(const ProgramBody& program, const FindParams& find_params, const std::vector<Array>& inputs,
                             std::map<std::string, int64_t> symbols, const KernelCall& call, Mode mode, const LibraryCall& library);

/// Checks what a library call gave for `name` against its declared type. In exact mode floats come as float64 and only take the
/// declared dtype's name.
void accept_library_result(Array& result, DType dtype, const std::vector<int64_t>& shape, const std::string& op, const std::string& name, Mode mode);

/// The memory of a strided array: every place that an index reaches, and what lies between.
struct StridedLayout {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  int64_t span() const {
    int64_t last = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 0) return 0;
      last += (shape[d] - 1) * strides[d];
    }
    return last + 1;
  }

  /// f(flat row-major position, offset in memory) for each element.
  template <class F>
  void for_each(const F& f) const {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t offset = 0;
      int64_t rest = flat;
      for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) offset += rest % shape[d] * strides[d];
      f(flat, offset);
    }
  }
};

}  // namespace deplo
