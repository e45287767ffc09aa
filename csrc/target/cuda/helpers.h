#pragma once

#include <string>

namespace deplo {

/// The declarations of the prelude that the text of kernels needs, and those that these need.
std::string helpers_for(const std::string& kernels);

}  // namespace deplo
