// XXH3 over page keys and payloads, with xxhash compiled in.
#include "tutti/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <vector>

#include "tutti/status.h"

namespace tutti {
namespace {

static_assert(sizeof(XXH128_canonical_t) == kKeyBytes);

void store_key(std::uint8_t* out, const std::uint8_t* data, std::size_t length_bytes) {
    XXH128_canonical_t key;
    XXH128_canonicalFromHash(&key, XXH3_128bits(data, length_bytes));
    std::memcpy(out, key.digest, kKeyBytes);
}

const void* at(std::uint64_t address) { return reinterpret_cast<const void*>(address); }

}  // namespace

void chain_keys(const std::uint8_t* seed, std::size_t seed_bytes, const std::uint32_t* tokens,
                std::size_t page_count, std::size_t page_tokens, std::uint8_t* keys) {
    if (page_count == 0) return;
    // Link and page are laid side by side: one-shot hashing of the copy is faster than streaming
    // two parts for the page sizes in use (64 tokens are 256 bytes).
    const std::size_t page_bytes = page_tokens * sizeof(std::uint32_t);
    const std::size_t link_bytes_max = seed_bytes > kKeyBytes ? seed_bytes : kKeyBytes;
    std::vector<std::uint8_t> scratch(link_bytes_max + page_bytes);
    const std::uint8_t* link = seed;
    std::size_t link_bytes = seed_bytes;
    for (std::size_t i = 0; i < page_count; ++i) {
        if (link_bytes > 0) std::memcpy(scratch.data(), link, link_bytes);
        std::memcpy(scratch.data() + link_bytes, tokens + i * page_tokens, page_bytes);
        link = keys + i * kKeyBytes;
        store_key(keys + i * kKeyBytes, scratch.data(), link_bytes + page_bytes);
        link_bytes = kKeyBytes;
    }
}

void record_keys(const std::uint8_t* prefix, std::size_t prefix_bytes, const std::uint8_t* keys,
                 std::size_t key_count, std::size_t key_bytes, std::uint8_t* out) {
    std::vector<std::uint8_t> scratch(prefix_bytes + key_bytes);
    if (prefix_bytes > 0) std::memcpy(scratch.data(), prefix, prefix_bytes);
    for (std::size_t i = 0; i < key_count; ++i) {
        std::memcpy(scratch.data() + prefix_bytes, keys + i * key_bytes, key_bytes);
        store_key(out + i * kKeyBytes, scratch.data(), scratch.size());
    }
}

std::uint64_t checksum(const Fragments& fragments) {
    if (fragments.count == 1) {
        return XXH3_64bits(at(fragments.address[0]), fragments.length_bytes[0]);
    }
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    TUTTI_CHECK(XXH3_64bits_reset(&state) == XXH_OK);
    for (std::uint32_t i = 0; i < fragments.count; ++i) {
        XXH3_64bits_update(&state, at(fragments.address[i]), fragments.length_bytes[i]);
    }
    return XXH3_64bits_digest(&state);
}

}  // namespace tutti
