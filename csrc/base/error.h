#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "base/location.h"

namespace deplo {

/// Base of every error that deplo raises; each subclass is one Python class of the same name.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text, Location location = {}) : std::runtime_error(text), location_(location) {}
  /// The part of IR text that the error is about, where one is known.
  Location location() const { return location_; }

 private:
  Location location_;
};

/// The caller's mistake: a bad option, a malformed .ir file, an input of the wrong shape.
class UserError : public Error {
 public:
  using Error::Error;
};

/// deplo does not compile this in full: the op stays in ATen, with this text as the recorded reason.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

/// A bug in deplo: names the level and the pass.
class InternalError : public Error {
 public:
  using Error::Error;
};

/// An index out of range at run time: eager's IndexError.
class IndexError : public Error {
 public:
  using Error::Error;
};

/// An error that eager raises as RuntimeError while running: an integer division by zero, a failed assertion.
class ExecutionError : public Error {
 public:
  using Error::Error;
};

/// Runs f, which is about what stands at `location`: an InternalError or UnsupportedError that knows no place yet gets this one.
template <class F>
auto located(Location location, F&& f) {
  try {
    return f();
  } catch (const InternalError& error) {
    throw InternalError(error.what(), error.location().known() ? error.location() : location);
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(error.what(), error.location().known() ? error.location() : location);
  }
}

[[noreturn]] void throw_internal(const char* file, int line, const char* condition, const std::string& text);

}  // namespace deplo

/// Checks input. The text is formatted only on failure and should quote the offending value.
#define DEPLO_CHECK(condition, ...)                                         \
  do {                                                                      \
    if (!(condition)) throw ::deplo::UserError(::fmt::format(__VA_ARGS__)); \
  } while (false)

/// Refuses what deplo does not handle in full.
#define DEPLO_SUPPORT(condition, ...)                                              \
  do {                                                                             \
    if (!(condition)) throw ::deplo::UnsupportedError(::fmt::format(__VA_ARGS__)); \
  } while (false)

/// Checks what deplo itself guarantees.
#define DEPLO_ASSERT(condition, ...)                                                                       \
  do {                                                                                                     \
    if (!(condition)) ::deplo::throw_internal(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)
