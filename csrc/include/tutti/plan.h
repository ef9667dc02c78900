// The planner: cuts an item into device transfers, and a transfer into direct and bounced pieces.
//
// Pure arithmetic, no I/O, no allocation; everything here is tested without a ring.
//
//   item      |------ fragment 0 ------|-- 1 --|---------- 2 ----------|
//   blocks    |....|....|....|....|....|....|....|....|....|....|....|....|
//   pieces    |  direct, in place |   bounced    |     direct      | b   0|  0: padding
//
// A block goes direct when one contiguous run of memory holds all of it and starts aligned for DMA;
// every other block is bounced: copied through aligned memory. Hence
//   - each piece covers whole blocks, so a transfer may end between any two blocks;
//   - a transfer starts where the last one ended, on a block boundary of the device;
//   - only the last block of an item can be padded, and it is always bounced.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "tutti/io.h"
#include "tutti/status.h"

namespace tutti {

/// With transfers of 1 MiB each block can be a piece of its own; larger ones may end early.
inline constexpr std::uint32_t kPiecesMax = 256;

/// Interrupted or refused attempts at one transfer before it fails.
inline constexpr std::uint32_t kRetriesMax = 16;
/// Short completions of one transfer before it fails.
inline constexpr std::uint32_t kResumesMax = 1024;

/// A place in an item: where the next byte to plan is.
struct Cursor {
    std::uint32_t fragment = 0;        // that holds the byte
    std::uint64_t skip_bytes = 0;      // of that fragment, before the byte
    std::uint64_t position_bytes = 0;  // of the item, before the byte
};

/// Bounds of one transfer, all given by the device and the options.
struct PlanLimits {
    std::uint64_t memory_align;        // of memory for DMA: a power of two, <= kBlockBytes
    std::uint64_t transfer_bytes_max;  // multiple of kBlockBytes, > 0, < 2 GiB
    std::uint64_t bounce_bytes_max;    // multiple of kBlockBytes, > 0
};

/// Whole blocks of a transfer that are contiguous in memory.
struct Piece {
    std::uint64_t address;       // of memory; for a bounced piece the offset in the bounce room
    std::uint32_t length_bytes;  // multiple of kBlockBytes
    bool bounce;
};

/// One contiguous device access. Its device offset is that of the item plus `start.position_bytes`.
struct Transfer {
    Cursor start;
    std::uint32_t payload_bytes;  // of the item, > 0
    std::uint32_t extent_bytes;   // payload rounded up to blocks; sum of the pieces
    std::uint32_t bounce_bytes;   // room needed for the bounced pieces; they fill it without gaps
    std::uint32_t piece_count;
    std::array<Piece, kPiecesMax> pieces;
};

/// Plan the next transfer of an item and move the cursor behind it.
/// @param fragments    in, of the whole item, each length > 0
/// @param cursor       in/out, not at the end of the item
/// @param transfer     out, as long as the limits allow; makes progress of at least one block
/// Cost: O(fragments and pieces of the transfer).
void plan_transfer(const Fragments& fragments, const PlanLimits& limits, Cursor& cursor,
                   Transfer& transfer);

/// Copy between the bounced pieces of a transfer and the fragments: into the room for a write,
/// whose padding is set to zero, out of it for a read, whose padding is ignored.
/// @param room         in/out, `transfer.bounce_bytes`
/// Does not touch direct pieces. Returns the number of item bytes copied.
std::uint64_t copy_bounced(Op op, const Fragments& fragments, const Transfer& transfer,
                           std::byte* room);

/// Describe the transfer's memory from `from_bytes` on as I/O vectors.
/// @param from_bytes   in, multiple of kBlockBytes, < extent_bytes
/// @param length_bytes in, upper bound of what is described, > 0
/// @param room         in, base of the bounce room
/// @param vectors      out, kPiecesMax entries
/// Returns the number of vectors.
std::uint32_t slice_pieces(const Transfer& transfer, std::uint64_t from_bytes,
                           std::uint64_t length_bytes, std::byte* room, iovec* vectors);

/// How far a transfer has come. Starts as all zeros.
struct Progress {
    std::uint64_t from_bytes = 0;     // where the current attempt starts, on a block boundary
    std::uint64_t reached_bytes = 0;  // moved so far, counted from the start of the transfer
    std::uint32_t resumes = 0;
    std::uint32_t retries = 0;
    Status status = 0;  // why it failed
};

enum class Next : std::uint8_t { kDone, kReissue, kFail };

/// Take in the completion of an attempt and say what to do next.
/// @param result       in, bytes moved by the attempt from `progress.from_bytes`, or a negative
/// errno A read needs its payload, a write its whole extent. A short attempt is continued from the
/// block that holds the first missing byte, because direct I/O starts on block boundaries. One that
/// gains nothing fails: -ENODATA for a read, which has met the end of the file, -EIO for a write.
Next advance(Op op, const Transfer& transfer, Progress& progress, std::int32_t result);

}  // namespace tutti
