#pragma once

#include <cstddef>
#include <string>

namespace deplo {

/// SHA-256 (FIPS 180-4) of bytes, as 64 hexadecimal digits.
std::string sha256_hex(const void* data, size_t bytes);
inline std::string sha256_hex(const std::string& bytes) { return sha256_hex(bytes.data(), bytes.size()); }

}  // namespace deplo
