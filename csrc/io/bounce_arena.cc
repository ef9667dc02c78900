// Aligned bounce memory; see bounce_arena.h.
#include "tutti/bounce_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

namespace tutti {

void BounceArena::close() {
    if (base_ != nullptr) munmap(base_, size_bytes_);
    base_ = nullptr;
}

Status BounceArena::open(std::uint64_t size_bytes, std::uint32_t takers_max) {
    TUTTI_CHECK(base_ == nullptr && size_bytes > 0);
    void* memory =
        mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return -errno;
    base_ = static_cast<std::byte*>(memory);
    size_bytes_ = size_bytes;
    free_.reserve(takers_max + 2);  // k taken runs leave at most k + 1 gaps, give adds one
    free_.push_back({0, size_bytes});
    return 0;
}

std::optional<std::uint64_t> BounceArena::take(std::uint64_t length_bytes) {
    const auto fits = [&](const Run& run) { return run.length_bytes >= length_bytes; };
    const auto run = std::find_if(free_.begin(), free_.end(), fits);
    if (run == free_.end()) return std::nullopt;
    const std::uint64_t offset = run->offset_bytes;
    run->offset_bytes += length_bytes;
    run->length_bytes -= length_bytes;
    if (run->length_bytes == 0) free_.erase(run);
    return offset;
}

void BounceArena::give(std::uint64_t offset_bytes, std::uint64_t length_bytes) {
    const auto behind = [](const Run& run, std::uint64_t offset) {
        return run.offset_bytes < offset;
    };
    auto next = std::lower_bound(free_.begin(), free_.end(), offset_bytes, behind);
    const std::uint64_t end = offset_bytes + length_bytes;
    TUTTI_CHECK(end <= size_bytes_ && (next == free_.end() || end <= next->offset_bytes));
    const bool joins_next = next != free_.end() && next->offset_bytes == end;
    if (next != free_.begin()) {
        Run& previous = *std::prev(next);
        const std::uint64_t previous_end = previous.offset_bytes + previous.length_bytes;
        TUTTI_CHECK(previous_end <= offset_bytes);
        if (previous_end == offset_bytes) {
            previous.length_bytes += length_bytes + (joins_next ? next->length_bytes : 0);
            if (joins_next) free_.erase(next);
            return;
        }
    }
    if (joins_next) {
        *next = {offset_bytes, length_bytes + next->length_bytes};
    } else {
        free_.insert(next, {offset_bytes, length_bytes});
    }
}

}  // namespace tutti
