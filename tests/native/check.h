// What the test programs share: checks that end the program with 1, skips with 77, seeded
// randomness.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                               \
        }                                                                                \
    } while (false)

[[noreturn]] inline void skip(const char* reason) {
    std::fprintf(stderr, "skipped: %s\n", reason);
    std::_Exit(77);
}

class Random {
public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    /// Uniform in [low, high].
    std::uint64_t between(std::uint64_t low, std::uint64_t high) {
        return std::uniform_int_distribution<std::uint64_t>(low, high)(engine_);
    }
    bool one_in(std::uint64_t n) { return between(1, n) == 1; }

private:
    std::mt19937_64 engine_;
};
