#pragma once

#include <string>
#include <string_view>

namespace deplo {

/// What the buffer of a value is called, but for what makes names unique: the value's letters, digits and underscores, behind a letter.
std::string buffer_stem(std::string_view value);

}  // namespace deplo
