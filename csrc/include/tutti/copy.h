// Copies between pieces of host memory: what moves pages between the caller's memory and an arena.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tutti {

/// Copy length_bytes[i] bytes from source[i] to target[i], for i in [0, count).
/// @param target       in, `count` addresses of writable memory, any alignment
/// @param source       in, `count` addresses of readable memory, any alignment
/// Pieces that touch on both sides are copied as one. Targets must not overlap one another or a
/// source. Neither allocates nor fails.
/// Order: none is promised; who reads the copies is told by a lock taken after this returned.
void copy_pieces(const std::uint64_t* target, const std::uint64_t* source,
                 const std::uint64_t* length_bytes, std::size_t count);

}  // namespace tutti
