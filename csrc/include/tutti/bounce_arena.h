// Aligned memory that unaligned fragments pass through, handed out in contiguous runs of blocks.
//
// Invariants
//   - Free runs are sorted, never touch each other, and together with the taken ones cover the
//   arena.
//   - With nothing taken there is one free run, so any request up to the size succeeds: a user who
//     waits for taken runs to come back cannot wait for ever.
//
// Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tutti/status.h"

namespace tutti {

class BounceArena {
public:
    BounceArena() = default;
    ~BounceArena() { close(); }
    BounceArena(const BounceArena&) = delete;
    BounceArena& operator=(const BounceArena&) = delete;

    /// Map `size_bytes`, a multiple of kBlockBytes. Called once. `takers_max` runs are the most
    /// that will ever be out at once; with it known, take and give do not allocate.
    Status open(std::uint64_t size_bytes, std::uint32_t takers_max);

    /// Unmap. Idempotent.
    void close();

    /// Take the first run that fits; nothing if none does. `length_bytes`: a multiple of
    /// kBlockBytes. Cost: O(runs taken).
    std::optional<std::uint64_t> take(std::uint64_t length_bytes);

    /// Give a run back, with the length it was taken with.
    void give(std::uint64_t offset_bytes, std::uint64_t length_bytes);

    std::byte* base() const { return base_; }
    std::uint64_t size_bytes() const { return size_bytes_; }

private:
    struct Run {
        std::uint64_t offset_bytes;
        std::uint64_t length_bytes;
    };

    std::byte* base_ = nullptr;
    std::uint64_t size_bytes_ = 0;
    std::vector<Run> free_;
};

}  // namespace tutti
