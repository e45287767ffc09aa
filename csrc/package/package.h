#pragma once

#include <memory>
#include <string>

#include "library/library.h"
#include "package/manifest.h"
#include "runtime/program.h"

namespace deplo::package {

/// What is compared with checksums when a package is opened, besides its manifest and the program and code that it runs.
enum class Check : uint8_t {
  code,   ///< nothing: damaged constants go unseen
  quick,  ///< constants, by checksums that find damage
  full,   ///< constants, by SHA-256
};

/// A file in memory, read-only, for as long as the object lives. Others that map the same file share its pages.
class Mapping {
 public:
  /// Throws UserError that begins with the path.
  explicit Mapping(const std::string& path);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  const char* data() const { return memory_; }
  uint64_t bytes() const { return bytes_; }

 private:
  char* memory_ = nullptr;
  uint64_t bytes_ = 0;
};

/// A package opened for this CPU.
class Package {
 public:
  /// Opens a file for this CPU, with no more than `features` ("sse", "avx2", "avx512"; "native" or empty: all). Throws UserError that begins with the
  /// path: not a package, of a newer format, truncated, damaged, without code for this CPU.
  Package(const std::string& path, const std::string& features, Check check);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  const Variant& variant() const { return manifest_.variants[chosen_]; }
  /// The bytes of a tensor in the mapping, aligned to 64.
  const char* data_of(const PackedTensor& tensor) const { return file_.data() + tensor.section.offset; }

  /// The program, with the code loaded. UnsupportedError that names ATen's operators if it calls some and there is no `library`.
  std::unique_ptr<runtime::Program> make_program(LibraryFactory library, const runtime::Program::Options& options) const;

 private:
  void choose(const std::string& features);
  void check_tensors(Check check) const;

  std::string path_;
  Mapping file_;
  Manifest manifest_;
  size_t chosen_ = 0;
};

/// The manifest of a package, checked; of the rest of the file only that it is there. Throws UserError as Package does.
std::string read_manifest(const Mapping& file, const std::string& path);

}  // namespace deplo::package
