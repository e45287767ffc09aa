#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "program_ir/module.h"
#include "scalar/functions.h"

namespace deplo {

// Pieces of text that the kernel levels share. parse_x reads what print_x writes.

/// " where s0 in 2.., s1 in 1..8", or nothing.
std::string print_ranges(const Ranges& ranges);
Ranges parse_ranges(Lexer& lexer);
/// "[s0, 64]".
std::string print_shape(const std::vector<Expr>& shape);
std::vector<Expr> parse_shape(Lexer& lexer);
/// "f32[s0, 64] strides [64, 1]"; row-major strides are left out.
struct TypeText {
  DType dtype = DType::f32;
  std::vector<Expr> shape;
  std::vector<Expr> strides;
};
std::string print_type(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides);
TypeText parse_type(Lexer& lexer);
DType parse_dtype(Lexer& lexer);
/// "1.5", "7", "true": what kind of number it is follows from the dtype.
std::string print_literal(const Scalar& literal);
Scalar parse_literal(Lexer& lexer, DType dtype);
/// ` from "a", "b"`, or nothing.
std::string print_provenance(const std::vector<std::string>& provenance);
std::vector<std::string> parse_provenance(Lexer& lexer);

/// The `program @...` block; "" for a module that holds nothing but kernels.
std::string print(const ProgramBody& program);
/// Reads a program block from a lexer with layout; call it only at `program`.
ProgramBody parse_program(Lexer& lexer);

/// Throws InternalError: undefined buffers, a wrong number or dtype of arguments, a buffer read before it is written.
void verify(const ProgramBody& program, const FindParams& find_params);

/// Buffers lie as the kernel's parameters say, which its accesses follow; steps along one element do not matter.
template <class Kernel>
void verify_strides(const ProgramBody& program, const BufferIndex& buffers, const CallStep& call, const Kernel& kernel) {
  for (size_t i = 0; i < kernel.params.size(); ++i) {
    const auto& p = kernel.params[i];
    if constexpr (requires { p.strides; }) {
      const Buffer& b = *buffers.find(call.arguments[i]);
      for (size_t d = 0; d < b.strides.size(); ++d)
        DEPLO_ASSERT(b.shape[d].is(1) || b.strides[d] == p.strides[d],
                     "program @{}: call @{} binds {}, whose stride in dimension {} is {}, to a parameter with the stride {}", program.name,
                     call.kernel, b.name, d, print(b.strides[d]), print(p.strides[d]));
    }
  }
}

/// Verifies every kernel by `verify_kernel`, that their names differ, and the program that calls them.
template <class Kernel, class VerifyKernel>
void verify_module(const ModuleOf<Kernel>& module, const VerifyKernel& verify_kernel) {
  std::unordered_map<std::string, const Kernel*> kernels;
  for (const auto& kernel : module.kernels) {
    if (!kernels.emplace(kernel->name, kernel.get()).second)
      throw InternalError(fmt::format("two kernels are called @{}", kernel->name), kernel->location);
    verify_kernel(*kernel);
  }
  verify(static_cast<const ProgramBody&>(module), [&](const std::string& name) -> std::optional<std::vector<ParamType>> {
    auto kernel = kernels.find(name);
    if (kernel == kernels.end()) return std::nullopt;
    std::vector<ParamType> params;
    for (const auto& p : kernel->second->params) {
      params.push_back({p.dtype, static_cast<int>(p.kind) != 0, std::nullopt});
      if constexpr (requires { p.shape; }) params.back().shape = p.shape;
    }
    return params;
  });
  const BufferIndex buffers(module);
  for (const Step& step : module.steps)
    if (const auto* call = std::get_if<CallStep>(&step))
      located(call->location, [&] { verify_strides(module, buffers, *call, *kernels.at(call->kernel)); });
}

template <class Kernel>
void verify_module(const ModuleOf<Kernel>& module) {
  verify_module(module, [](const Kernel& kernel) { verify(kernel); });
}

/// A module's text: the program, then its kernels, separated by blank lines.
template <class Kernel>
std::string print_module(const ModuleOf<Kernel>& module) {
  std::string text = print(static_cast<const ProgramBody&>(module));
  for (const auto& kernel : module.kernels) {
    if (!text.empty()) text += '\n';
    text += print(*kernel);
  }
  return text;
}

/// Reads a module whose kernels `parse_kernel(lexer)` reads (a kernel starts at `keyword`: loop, tile, kernel, or at its schedule).
template <class Kernel, class ParseKernel>
ModuleOf<Kernel> parse_module(const std::string& text, const std::string& file, const std::string& keyword, const ParseKernel& parse_kernel) {
  Lexer lexer(text, file, true);
  ModuleOf<Kernel> module;
  lexer.skip_newlines();
  if (lexer.at("program")) static_cast<ProgramBody&>(module) = parse_program(lexer);
  for (lexer.skip_newlines(); !lexer.at_end(); lexer.skip_newlines()) {
    if (!lexer.at(keyword) && !lexer.at("schedule")) lexer.fail(fmt::format("expected '{} @name(...)', found '{}'", keyword, lexer.peek().text));
    module.kernels.push_back(std::make_shared<Kernel>(parse_kernel(lexer)));
  }
  return module;
}

}  // namespace deplo
