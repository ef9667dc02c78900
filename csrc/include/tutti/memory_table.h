// Which registered buffer holds a stretch of memory. One table per ring, used by its thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <vector>

namespace tutti {

/// The kernel takes no more in one registered buffer; larger regions are registered as several.
inline constexpr std::uint64_t kBufferBytesMax = std::uint64_t{1} << 30;

/// One entry of the kernel's table of registered buffers.
struct Buffer {
    std::uint64_t address;
    std::uint64_t length_bytes;
    std::uint32_t index;  // in the kernel's table
};

class MemoryTable {
public:
    void add(const Buffer& buffer) {
        buffers_.insert(std::upper_bound(buffers_.begin(), buffers_.end(), buffer.address, before),
                        buffer);
    }

    void remove(std::uint32_t index) {
        std::erase_if(buffers_, [=](const Buffer& buffer) { return buffer.index == index; });
    }

    /// Index of a buffer that holds all of the memory. Where buffers overlap it may find none:
    /// that costs speed, not correctness. Cost: O(log buffers).
    std::optional<std::uint32_t> find(std::uint64_t address, std::uint64_t length_bytes) const {
        auto next = std::upper_bound(buffers_.begin(), buffers_.end(), address, before);
        if (next == buffers_.begin()) return std::nullopt;
        const Buffer& buffer = *std::prev(next);
        const std::uint64_t skip = address - buffer.address;
        if (skip > buffer.length_bytes || length_bytes > buffer.length_bytes - skip)
            return std::nullopt;
        return buffer.index;
    }

private:
    static bool before(std::uint64_t address, const Buffer& buffer) {
        return address < buffer.address;
    }

    std::vector<Buffer> buffers_;  // sorted by address
};

}  // namespace tutti
