// Status values, and the check that guards invariants.
//
// Calls on I/O paths return a Status and never throw. Programmer errors stop the process through
// TUTTI_CHECK, which is always on; it guards control paths, not inner loops.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace tutti {

/// 0, or a negative errno.
using Status = std::int32_t;

[[noreturn]] inline void check_failed(const char* text, const char* file, int line) {
    std::fprintf(stderr, "tutti: invariant broken: %s (%s:%d)\n", text, file, line);
    std::abort();
}

}  // namespace tutti

#define TUTTI_CHECK(condition) \
    (static_cast<bool>(condition) ? void(0) : ::tutti::check_failed(#condition, __FILE__, __LINE__))
