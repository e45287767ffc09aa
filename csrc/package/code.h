#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "target/kernels.h"

namespace deplo::package {

/// Linked machine code in memory of this process that nobody can write any more.
class LoadedCode {
 public:
  /// Copies the code, compares the copy's checksum, and only then makes it executable. Throws UserError, with `where` in its text, for other bytes
  /// than `sha256` says and for externals that deplo does not have.
  LoadedCode(const std::string& where, const char* bytes, uint64_t text_bytes, uint64_t data_bytes, const std::vector<std::string>& externals,
             const std::string& sha256);
  ~LoadedCode();
  LoadedCode(const LoadedCode&) = delete;
  LoadedCode& operator=(const LoadedCode&) = delete;
  KernelFn function(uint64_t entry) const;

 private:
  void release();
  char* memory_ = nullptr;
  uint64_t bytes_ = 0;
};

/// One kernel of it.
class PackagedKernel final : public CompiledKernel {
 public:
  PackagedKernel(std::shared_ptr<const LoadedCode> code, uint64_t entry) : code_(std::move(code)), function_(code_->function(entry)) {}
  KernelFn function() const override { return function_; }

 private:
  std::shared_ptr<const LoadedCode> code_;
  KernelFn function_;
};

}  // namespace deplo::package
