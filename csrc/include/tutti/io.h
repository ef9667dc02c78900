// Words of the I/O layer: blocks, directions, fragments. The Python side is
// tutti_core/io/transport.py.
#pragma once

#include <bit>
#include <cstdint>

namespace tutti {

static_assert(std::endian::native == std::endian::little, "stored integers are little-endian");

/// Device offsets and the extents of items are multiples of this.
inline constexpr std::uint64_t kBlockBytes = 4096;

inline constexpr std::uint64_t kBatchItemsMax = 65'536;
inline constexpr std::uint64_t kBatchFragmentsMax = 4'194'304;
inline constexpr std::uint64_t kBatchesInFlightMax = 256;

/// Direction of a transfer, seen from the device.
enum class Op : std::uint8_t { kRead = 0, kWrite = 1 };

/// The bytes of one item: those of its fragments, in order. Addresses have any alignment.
struct Fragments {
    const std::uint64_t* address;
    const std::uint64_t* length_bytes;
    std::uint32_t count;
};

constexpr std::uint64_t round_down_to_block(std::uint64_t bytes) {
    return bytes & ~(kBlockBytes - 1);
}

/// Saturates: a length that cannot be rounded up stays too large for any device.
constexpr std::uint64_t round_up_to_block(std::uint64_t bytes) {
    return bytes > UINT64_MAX - kBlockBytes ? UINT64_MAX
                                            : round_down_to_block(bytes + kBlockBytes - 1);
}

/// Sum of the fragments' lengths; saturates.
constexpr std::uint64_t total_bytes(const Fragments& fragments) {
    std::uint64_t total = 0;
    for (std::uint32_t i = 0; i < fragments.count; ++i) {
        const std::uint64_t length = fragments.length_bytes[i];
        total = length > UINT64_MAX - total ? UINT64_MAX : total + length;
    }
    return total;
}

}  // namespace tutti
