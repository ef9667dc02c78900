// XXH3 over page keys and payloads; the results equal python-xxhash byte for byte.
//
// Keys are XXH3-128 in canonical (big-endian) form, 16 bytes. Payload checksums are XXH3-64. All
// functions are pure and may run on any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tutti/io.h"

namespace tutti {

inline constexpr std::size_t kKeyBytes = 16;

/// Hash a chain of token pages: h[0] = H(seed, page 0), h[i] = H(h[i-1], page i).
/// @param seed         in, `seed_bytes` readable
/// @param tokens       in, `page_count * page_tokens` tokens, hashed as little-endian uint32
/// @param keys         out, `page_count * kKeyBytes` writable
/// Cost: one pass over the tokens; allocates the room of one page.
void chain_keys(const std::uint8_t* seed, std::size_t seed_bytes, const std::uint32_t* tokens,
                std::size_t page_count, std::size_t page_tokens, std::uint8_t* keys);

/// Hash each of `key_count` keys of `key_bytes` behind a common prefix: out[i] = H(prefix, key i).
/// @param out          out, `key_count * kKeyBytes` writable
void record_keys(const std::uint8_t* prefix, std::size_t prefix_bytes, const std::uint8_t* keys,
                 std::size_t key_count, std::size_t key_bytes, std::uint8_t* out);

/// XXH3-64 of the bytes of one item. One pass; neither copies nor allocates.
std::uint64_t checksum(const Fragments& fragments);

}  // namespace tutti
