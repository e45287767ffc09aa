#pragma once

#include <string>

namespace deplo {

/// SHA-256 (FIPS 180-4) of bytes, as 64 hexadecimal digits.
std::string sha256_hex(const std::string& bytes);

}  // namespace deplo
