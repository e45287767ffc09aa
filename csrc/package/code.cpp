#include "package/code.h"

#include <sys/mman.h>

#include <cstring>

#include "base/error.h"
#include "base/sha256.h"
#include "package/link.h"
#include "target/cpu/callable.h"

namespace deplo::package {

LoadedCode::LoadedCode(const std::string& where, const char* bytes, uint64_t text_bytes, uint64_t data_bytes,
                       const std::vector<std::string>& externals, const std::string& sha256) {
  const uint64_t addresses = text_bytes + data_bytes;
  bytes_ = (addresses + 8 * externals.size() + kPage - 1) / kPage * kPage;
  void* made = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) throw ExecutionError(fmt::format("{}: the system gives no {} bytes of memory for code", where, bytes_));
  memory_ = static_cast<char*>(made);
  try {
    std::memcpy(memory_, bytes, addresses);
    DEPLO_CHECK(sha256_hex(memory_, addresses) == sha256, "{} is damaged: its machine code has another checksum", where);
    for (size_t k = 0; k < externals.size(); ++k) {
      void* function = callable_address(externals[k]);
      DEPLO_CHECK(function, "{} calls {}, which this deplo does not have", where, externals[k]);
      std::memcpy(memory_ + addresses + 8 * k, static_cast<const void*>(&function), sizeof(function));
    }
    const bool sealed = mprotect(memory_, text_bytes, PROT_READ | PROT_EXEC) == 0 &&
                        (bytes_ == text_bytes || mprotect(memory_ + text_bytes, bytes_ - text_bytes, PROT_READ) == 0);
    if (!sealed) throw ExecutionError(fmt::format("{}: the system does not let its machine code be executed", where));
  } catch (const Error&) {
    release();
    throw;
  }
}

LoadedCode::~LoadedCode() { release(); }

void LoadedCode::release() {
  if (memory_) munmap(memory_, bytes_);
  memory_ = nullptr;
}

KernelFn LoadedCode::function(uint64_t entry) const { return reinterpret_cast<KernelFn>(memory_ + entry); }

}  // namespace deplo::package
