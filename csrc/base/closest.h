#pragma once

#include <string>
#include <vector>

namespace deplo {

/// The known word with the fewest letters changed; empty if none is near.
std::string closest(const std::string& word, const std::vector<std::string>& known);

}  // namespace deplo
