// Copies between pieces of host memory; see copy.h.
#include "tutti/copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tutti {
namespace {

/// Runs of at least so many bytes go past the caches: a page is not read again by this CPU, and what
/// it would push out, the interpreter's own data, is.
constexpr std::uint64_t kStreamBytes = 128 << 10;

void copy_run(std::byte* target, const std::byte* source, std::uint64_t length) {
#if defined(__SSE2__)
    if (length >= kStreamBytes) {
        const std::uint64_t head = -reinterpret_cast<std::uint64_t>(target) & 63;
        std::memcpy(target, source, head);
        target += head;
        source += head;
        length -= head;
        for (; length >= 64; target += 64, source += 64, length -= 64) {
            const auto* from = reinterpret_cast<const __m128i*>(source);
            auto* to = reinterpret_cast<__m128i*>(target);
            const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
        _mm_sfence();  // streaming stores are ordered by no later lock; readers are told by one
    }
#endif
    std::memcpy(target, source, length);
}

}  // namespace

void copy_pieces(const std::uint64_t* target, const std::uint64_t* source,
                 const std::uint64_t* length_bytes, std::size_t count) {
    for (std::size_t i = 0; i < count;) {
        std::uint64_t length = length_bytes[i];
        std::size_t next = i + 1;
        while (next < count && target[next] == target[i] + length &&
               source[next] == source[i] + length) {
            length += length_bytes[next++];
        }
        copy_run(reinterpret_cast<std::byte*>(target[i]),
                 reinterpret_cast<const std::byte*>(source[i]), length);
        i = next;
    }
}

}  // namespace tutti
