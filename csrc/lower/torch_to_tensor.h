#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor_ir/ir.h"
#include "torch_ir/ir.h"

namespace deplo {

/// Decomposes every ATen call into elementwise, reduction, scan, indexmap and scatter by the one table of rules in
/// torch_to_tensor/. An overload without a rule, or one whose rule throws UnsupportedError, becomes a library op with the
/// reason. Before: verified Torch IR. After: verified Tensor IR, dtypes and broadcasts explicit.
tensor_ir::Graph lower_torch_to_tensor(const torch_ir::Graph& graph);

/// True for calls whose results show the memory of their first argument.
bool is_view(std::string_view overload);
/// True if equal calls are known to give equal results: not for random numbers, nor for overloads that deplo does not know.
bool is_deterministic(std::string_view overload);

/// Overloads that have a rule ("aten.add.Tensor") and the file of torch_to_tensor/ with its row, sorted.
std::vector<std::pair<std::string, std::string>> overload_files();
/// Operators left to ATen on purpose ("aten.sort", all overloads), with the reason, sorted.
std::vector<std::pair<std::string, std::string>> library_packets();

}  // namespace deplo
