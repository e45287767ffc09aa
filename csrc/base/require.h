#pragma once

/// Calls `fail(...)` of the scope unless the condition holds. Verifiers ask much that holds: what a complaint would say is not made before there is
/// one.
#define DEPLO_REQUIRE(condition, ...)    \
  do {                                   \
    if (!(condition)) fail(__VA_ARGS__); \
  } while (false)
