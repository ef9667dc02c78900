// The planner; see plan.h for its invariants.
#include "tutti/plan.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tutti {
namespace {

bool at_end(const Fragments& fragments, const Cursor& cursor) {
    return cursor.fragment == fragments.count;
}

std::uint64_t address_at(const Fragments& fragments, const Cursor& cursor) {
    return fragments.address[cursor.fragment] + cursor.skip_bytes;
}

/// Contiguous bytes of memory at the cursor, up to a bound; neighbours that touch count as one.
std::uint64_t run_bytes(const Fragments& fragments, const Cursor& cursor, std::uint64_t bound) {
    std::uint64_t run = fragments.length_bytes[cursor.fragment] - cursor.skip_bytes;
    const std::uint64_t start = address_at(fragments, cursor);
    for (std::uint32_t i = cursor.fragment + 1; run < bound && i < fragments.count; ++i) {
        if (fragments.address[i] != start + run) break;
        run += fragments.length_bytes[i];
    }
    return std::min(run, bound);
}

/// Walk up to `bytes` of the item, calling visit(address, length) for each stretch of memory.
/// Returns the bytes walked: fewer only at the end of the item.
template <typename Visit>
std::uint64_t walk(const Fragments& fragments, Cursor& cursor, std::uint64_t bytes, Visit&& visit) {
    std::uint64_t walked = 0;
    while (walked < bytes && !at_end(fragments, cursor)) {
        const std::uint64_t left = fragments.length_bytes[cursor.fragment] - cursor.skip_bytes;
        const std::uint64_t step = std::min(left, bytes - walked);
        visit(address_at(fragments, cursor), step);
        walked += step;
        cursor.skip_bytes += step;
        if (step == left) {
            ++cursor.fragment;
            cursor.skip_bytes = 0;
        }
    }
    cursor.position_bytes += walked;
    return walked;
}

/// Append whole blocks; false if the transfer has no room for them.
bool append(Transfer& transfer, std::uint64_t address, std::uint64_t length_bytes, bool bounce) {
    const auto length = static_cast<std::uint32_t>(length_bytes);
    if (transfer.piece_count > 0) {
        Piece& last = transfer.pieces[transfer.piece_count - 1];
        if (bounce == last.bounce && last.address + last.length_bytes == address) {
            last.length_bytes += length;
            return true;
        }
    }
    if (transfer.piece_count == kPiecesMax) return false;
    transfer.pieces[transfer.piece_count++] = {address, length, bounce};
    return true;
}

}  // namespace

void plan_transfer(const Fragments& fragments, const PlanLimits& limits, Cursor& cursor,
                   Transfer& transfer) {
    transfer.start = cursor;
    transfer.payload_bytes = transfer.extent_bytes = transfer.bounce_bytes = 0;
    transfer.piece_count = 0;
    while (!at_end(fragments, cursor) && transfer.extent_bytes < limits.transfer_bytes_max) {
        const std::uint64_t room = limits.transfer_bytes_max - transfer.extent_bytes;
        const std::uint64_t address = address_at(fragments, cursor);
        const std::uint64_t run = run_bytes(fragments, cursor, room);
        const bool bounce = run < kBlockBytes || (address & (limits.memory_align - 1)) != 0;
        // A block that one run does not fill is gathered from several fragments, or padded.
        std::uint64_t take = std::max(round_down_to_block(run), kBlockBytes);
        if (bounce) {
            take = std::min(take, limits.bounce_bytes_max - transfer.bounce_bytes);
            if (take == 0) break;
        }
        if (!append(transfer, bounce ? transfer.bounce_bytes : address, take, bounce)) break;
        if (bounce) transfer.bounce_bytes += static_cast<std::uint32_t>(take);
        transfer.extent_bytes += static_cast<std::uint32_t>(take);
        const auto skip = [](std::uint64_t, std::uint64_t) {};
        transfer.payload_bytes += static_cast<std::uint32_t>(walk(fragments, cursor, take, skip));
    }
    TUTTI_CHECK(transfer.payload_bytes > 0);
}

std::uint64_t copy_bounced(Op op, const Fragments& fragments, const Transfer& transfer,
                           std::byte* room) {
    Cursor cursor = transfer.start;
    std::uint64_t copied = 0;
    for (std::uint32_t i = 0; i < transfer.piece_count; ++i) {
        const Piece& piece = transfer.pieces[i];
        if (!piece.bounce) {
            walk(fragments, cursor, piece.length_bytes, [](std::uint64_t, std::uint64_t) {});
            continue;
        }
        std::byte* place = room + piece.address;
        const auto copy = [&](std::uint64_t address, std::uint64_t length) {
            auto* memory = reinterpret_cast<std::byte*>(address);
            std::memcpy(op == Op::kWrite ? place : memory, op == Op::kWrite ? memory : place,
                        length);
            place += length;
        };
        const std::uint64_t walked = walk(fragments, cursor, piece.length_bytes, copy);
        if (op == Op::kWrite) std::memset(place, 0, piece.length_bytes - walked);
        copied += walked;
    }
    return copied;
}

std::uint32_t slice_pieces(const Transfer& transfer, std::uint64_t from_bytes,
                           std::uint64_t length_bytes, std::byte* room, iovec* vectors) {
    std::uint32_t count = 0;
    std::uint64_t skip = from_bytes;
    for (std::uint32_t i = 0; i < transfer.piece_count && length_bytes > 0; ++i) {
        const Piece& piece = transfer.pieces[i];
        if (skip >= piece.length_bytes) {
            skip -= piece.length_bytes;
            continue;
        }
        std::byte* base =
            piece.bounce ? room + piece.address : reinterpret_cast<std::byte*>(piece.address);
        const std::uint64_t length = std::min(piece.length_bytes - skip, length_bytes);
        vectors[count++] = {base + skip, length};
        length_bytes -= length;
        skip = 0;
    }
    return count;
}

Next advance(Op op, const Transfer& transfer, Progress& progress, std::int32_t result) {
    if (result == -EINTR || result == -EAGAIN) {
        if (++progress.retries <= kRetriesMax) return Next::kReissue;
    }
    if (result < 0) {
        progress.status = result;
        return Next::kFail;
    }
    const std::uint64_t reached = progress.from_bytes + static_cast<std::uint64_t>(result);
    if (reached >= (op == Op::kRead ? transfer.payload_bytes : transfer.extent_bytes)) {
        return Next::kDone;
    }
    if (reached <= progress.reached_bytes || ++progress.resumes > kResumesMax) {
        progress.status = op == Op::kRead ? -ENODATA : -EIO;
        return Next::kFail;
    }
    progress.reached_bytes = reached;
    progress.from_bytes = round_down_to_block(reached);
    return Next::kReissue;
}

}  // namespace tutti
