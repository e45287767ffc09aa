#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace deplo {

/// Names one kernel's machine code for tools, for as long as the object lives: in /tmp/perf-PID.map for perf, and through GDB's JIT
/// interface (Debugging with GDB, "JIT Compilation Interface") for gdb and lldb.
class DebuggerEntry {
 public:
  /// `object` is the ELF object whose function `symbol` was loaded at `address`. Trouble leaves the code without a name.
  DebuggerEntry(const std::string& symbol, const void* address, const std::string& object);
  ~DebuggerEntry();
  DebuggerEntry(const DebuggerEntry&) = delete;
  DebuggerEntry& operator=(const DebuggerEntry&) = delete;

 private:
  struct Registered;
  std::unique_ptr<Registered> registered_;
};

}  // namespace deplo
