#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace deplo::package {

// What a package says of itself: docs/packages.md describes the file.

/// Goes up with every change of the file, of Kernel IR's text, of what kernels are passed or may call.
inline constexpr uint32_t kFormat = 1;

/// A run of bytes in the file.
struct Section {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::string sha256;
};

/// A constant, or the first value of a buffer that calls write.
struct PackedTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  ///< in elements
  Section section;
  uint32_t quick = 0;  ///< quick_checksum
  bool is_written = false;
};

/// A tensor or an integer that a call gives. Sizes are expressions of the symbols, as text.
struct UserInput {
  std::string name;
  bool is_tensor = true;
  DType dtype = DType::f32;
  std::vector<std::string> sizes;
  bool is_written = false;
};

struct UserOutput {
  enum class Kind : uint8_t { result, input, constant };
  Kind kind = Kind::result;
  size_t index = 0;      ///< of the program's results, or of the user's inputs
  std::string constant;  ///< as JSON
};

/// The program for one set of CPU features.
struct Variant {
  struct Argument {
    bool is_tensor = false;  ///< of the package; else the user's input
    size_t index = 0;
  };
  std::string name;
  std::set<std::string> features;
  Section program;  ///< Kernel IR as text
  Section code;
  uint64_t text_bytes = 0;
  std::vector<uint64_t> entries;
  std::vector<std::string> externals;
  std::vector<Argument> arguments;
  std::vector<std::string> library;  ///< ATen's operators that it calls
};

struct Manifest {
  std::string text;  ///< JSON
  std::vector<PackedTensor> tensors;
  std::vector<UserInput> inputs;
  std::vector<UserOutput> outputs;
  std::vector<Variant> variants;  ///< the most capable first
};

/// Reads a manifest of a file of `file_bytes` and checks all that it says of places in the file and of indices. Throws UserError that begins with
/// `path`.
Manifest parse_manifest(const std::string& text, const std::string& path, uint64_t file_bytes);

}  // namespace deplo::package
