#include "target/cpu/llvm/debugger.h"

#include <fcntl.h>
#include <llvm/ExecutionEngine/Orc/TargetProcess/JITLoaderGDB.h>
#include <llvm/Object/ELFObjectFile.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/error.h"

// Debuggers find these by name: exports.map keeps them visible in the extension. LLVM defines them.
extern "C" {
extern struct jit_descriptor __jit_debug_descriptor;  // NOLINT(bugprone-reserved-identifier)
void __jit_debug_register_code();                     // NOLINT(bugprone-reserved-identifier)
}

namespace deplo {
namespace {

struct Function {
  uint64_t offset;   ///< in its section
  uint64_t size;     ///< bytes
  uint64_t section;  ///< index in the section table
};

std::optional<Function> find_function(const std::string& symbol, const std::string& object) {
  auto parsed = llvm::object::ObjectFile::createObjectFile(llvm::MemoryBufferRef(object, symbol));
  if (!parsed) {
    llvm::consumeError(parsed.takeError());
    return std::nullopt;
  }
  for (const llvm::object::ELFSymbolRef s : (*parsed)->symbols()) {
    auto name = s.getName();
    auto section = s.getSection();
    auto value = s.getValue();
    bool found = name && section && value && *name == symbol && *section != (*parsed)->section_end();
    if (found) return Function{*value, s.getSize(), (*section)->getIndex()};
    if (!name) llvm::consumeError(name.takeError());
    if (!section) llvm::consumeError(section.takeError());
    if (!value) llvm::consumeError(value.takeError());
  }
  return std::nullopt;
}

/// The object with the address at which a section lies written into its section table, as debuggers expect it.
std::string with_address(std::string object, uint64_t section, uint64_t address) {
  llvm::ELF::Elf64_Ehdr file;
  std::memcpy(&file, object.data(), sizeof file);
  size_t at = file.e_shoff + section * file.e_shentsize + offsetof(llvm::ELF::Elf64_Shdr, sh_addr);
  DEPLO_ASSERT(at + sizeof address <= object.size(), "[jit] the object's section table is cut off");
  std::memcpy(object.data() + at, &address, sizeof address);
  return object;
}

void write_perf_map(const std::string& symbol, uint64_t address, uint64_t size) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  int file = open(fmt::format("/tmp/perf-{}.map", getpid()).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return;
  dprintf(file, "%" PRIx64 " %" PRIx64 " %s\n", address, size, symbol.c_str());
  close(file);
}

std::mutex& descriptor_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

void tell_debugger(jit_actions_t action, jit_code_entry* entry) {
  __jit_debug_descriptor.action_flag = action;
  __jit_debug_descriptor.relevant_entry = entry;
  __jit_debug_register_code();
  __jit_debug_descriptor.action_flag = JIT_NOACTION;
  __jit_debug_descriptor.relevant_entry = nullptr;
}

}  // namespace

struct DebuggerEntry::Registered {
  std::string object;
  jit_code_entry entry;
};

DebuggerEntry::DebuggerEntry(const std::string& symbol, const void* address, const std::string& object) {
  auto function = find_function(symbol, object);
  if (!function) return;
  auto start = reinterpret_cast<uint64_t>(address);
  write_perf_map(symbol, start, function->size);
  registered_ = std::make_unique<Registered>();
  registered_->object = with_address(object, function->section, start - function->offset);
  std::lock_guard lock(descriptor_mutex());
  jit_code_entry& entry = registered_->entry;
  entry = {__jit_debug_descriptor.first_entry, nullptr, registered_->object.data(), registered_->object.size()};
  if (entry.next_entry) entry.next_entry->prev_entry = &entry;
  __jit_debug_descriptor.first_entry = &entry;
  tell_debugger(JIT_REGISTER_FN, &entry);
}

DebuggerEntry::~DebuggerEntry() {
  if (!registered_) return;
  std::lock_guard lock(descriptor_mutex());
  jit_code_entry& entry = registered_->entry;
  (entry.prev_entry ? entry.prev_entry->next_entry : __jit_debug_descriptor.first_entry) = entry.next_entry;
  if (entry.next_entry) entry.next_entry->prev_entry = entry.prev_entry;
  tell_debugger(JIT_UNREGISTER_FN, &entry);
}

}  // namespace deplo
