#pragma once

#include <string>
#include <vector>

namespace deplo {

/// Address of a function that generated code may call; null if it may not.
void* callable_address(const std::string& symbol);
/// All symbols that generated code may call.
const std::vector<std::string>& callable_symbols();

}  // namespace deplo
