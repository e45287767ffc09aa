#pragma once

#include <cstddef>
#include <cstdint>

namespace deplo::package {

/// CRC-32C of four interleaved streams: word k of 8 bytes goes to stream k mod 4, what is left over to stream 0; then of the four results. As fast as
/// memory, where the CPU has the instruction (SSE4.2).
uint32_t quick_checksum(const void* data, size_t bytes);
/// The same without the instruction.
uint32_t quick_checksum_by_table(const void* data, size_t bytes);

}  // namespace deplo::package
