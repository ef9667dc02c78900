// The pure parts of the engine, against models: planner, continuation, bounce arena, memory table.
#include "tutti/plan.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "tutti/bounce_arena.h"
#include "tutti/hash.h"
#include "tutti/memory_table.h"

using namespace tutti;

namespace {

constexpr std::uint64_t kMemoryBytes = 1 << 20;

/// Random memory with random fragments in it; some touch, some are aligned, none overlap.
struct Shape {
    std::byte* memory = nullptr;
    std::vector<std::uint64_t> address;
    std::vector<std::uint64_t> length_bytes;

    Fragments fragments() const {
        return {address.data(), length_bytes.data(), static_cast<std::uint32_t>(address.size())};
    }
    std::vector<std::byte> gather() const {
        std::vector<std::byte> bytes;
        for (std::size_t i = 0; i < address.size(); ++i) {
            const auto* first = reinterpret_cast<const std::byte*>(address[i]);
            bytes.insert(bytes.end(), first, first + length_bytes[i]);
        }
        return bytes;
    }
};

class Memory {
public:
    Memory() : bytes_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kMemoryBytes))) {}
    ~Memory() { std::free(bytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Shape shape(Random& random) {
        Shape shape;
        shape.memory = bytes_;
        const std::uint64_t style = random.between(0, 3);
        const std::uint64_t fragments_max = random.between(1, style == 0 ? 600 : 40);
        std::uint64_t at = random.one_in(2) ? 0 : random.between(0, 5000);
        while (shape.address.size() < fragments_max) {
            std::uint64_t length = random.between(1, style == 0 ? 40 : 30'000);
            if (style == 2) length = kBlockBytes * random.between(1, 6);
            if (style == 3) length = 512 * random.between(1, 40);
            if (at + length > kMemoryBytes) break;
            shape.address.push_back(reinterpret_cast<std::uint64_t>(bytes_ + at));
            shape.length_bytes.push_back(length);
            at += length;
            if (!random.one_in(3))
                at += style >= 2 ? 512 * random.between(1, 9) : random.between(1, 99);
        }
        return shape;
    }
    void fill(Random& random) {
        for (std::uint64_t i = 0; i < kMemoryBytes; i += 8) {
            const std::uint64_t value = random.between(0, UINT64_MAX);
            std::memcpy(bytes_ + i, &value, sizeof value);
        }
    }
    void poison() { std::memset(bytes_, 0xA5, kMemoryBytes); }
    const std::byte* bytes() const { return bytes_; }

private:
    std::byte* bytes_;
};

PlanLimits random_limits(Random& random) {
    const std::uint64_t aligns[] = {1, 4, 512, 4096};
    return {.memory_align = aligns[random.between(0, 3)],
            .transfer_bytes_max = kBlockBytes * random.between(1, random.one_in(2) ? 8 : 300),
            .bounce_bytes_max = kBlockBytes * random.between(1, 64)};
}

/// May this block of the item go direct? The definition, block by block and byte by byte.
bool block_is_direct(const Shape& shape, std::uint64_t block_start, std::uint64_t align) {
    std::uint64_t before = 0;
    std::uint64_t address = 0;
    std::uint64_t run = 0;
    for (std::size_t i = 0; i < shape.address.size(); ++i) {
        const std::uint64_t end = before + shape.length_bytes[i];
        if (address == 0 && block_start < end) {
            address = shape.address[i] + (block_start - before);
            run = end - block_start;
        } else if (address != 0) {
            if (run >= kBlockBytes || shape.address[i] != address + run) break;
            run += shape.length_bytes[i];
        }
        before = end;
    }
    return run >= kBlockBytes && address % align == 0;
}

struct Planned {
    std::vector<std::unique_ptr<Transfer>> transfers;
};

/// Plan a whole item and check every stated property of the transfers.
Planned plan_item(const Shape& shape, const PlanLimits& limits) {
    const Fragments fragments = shape.fragments();
    const std::uint64_t total = total_bytes(fragments);
    Planned planned;
    Cursor cursor;
    std::uint64_t position = 0;
    while (cursor.fragment < fragments.count) {
        auto transfer = std::make_unique<Transfer>();
        plan_transfer(fragments, limits, cursor, *transfer);
        CHECK(transfer->start.position_bytes == position);
        CHECK(transfer->payload_bytes > 0);
        CHECK(transfer->extent_bytes == round_up_to_block(transfer->payload_bytes));
        CHECK(transfer->extent_bytes <= limits.transfer_bytes_max);
        CHECK(transfer->bounce_bytes <= limits.bounce_bytes_max);
        CHECK(transfer->piece_count >= 1 && transfer->piece_count <= kPiecesMax);
        std::uint64_t extent = 0;
        std::uint64_t bounce = 0;
        for (std::uint32_t i = 0; i < transfer->piece_count; ++i) {
            const Piece& piece = transfer->pieces[i];
            CHECK(piece.length_bytes > 0 && piece.length_bytes % kBlockBytes == 0);
            if (piece.bounce) CHECK(piece.address == bounce);
            for (std::uint64_t b = 0; b < piece.length_bytes; b += kBlockBytes) {
                const bool direct =
                    block_is_direct(shape, position + extent + b, limits.memory_align);
                CHECK(piece.bounce != direct);
            }
            extent += piece.length_bytes;
            bounce += piece.bounce ? piece.length_bytes : 0;
        }
        CHECK(extent == transfer->extent_bytes && bounce == transfer->bounce_bytes);
        position += transfer->payload_bytes;
        CHECK(position == total || position % kBlockBytes == 0);
        planned.transfers.push_back(std::move(transfer));
    }
    CHECK(position == total && cursor.position_bytes == total);
    return planned;
}

/// Move one transfer to or from `disk`, with attempts that end short at random.
void move(Op op, const Fragments& fragments, const Transfer& transfer, std::byte* disk,
          Random& random) {
    std::vector<std::byte> room(transfer.bounce_bytes + 1, std::byte{0x77});
    if (op == Op::kWrite) copy_bounced(op, fragments, transfer, room.data());
    Progress progress;
    for (int attempts = 0;; ++attempts) {
        CHECK(attempts < 5000);
        std::vector<iovec> vectors(kPiecesMax);
        const std::uint64_t limit = random.one_in(2) ? UINT64_MAX : 512 * random.between(1, 40);
        const std::uint32_t n =
            slice_pieces(transfer, progress.from_bytes, limit, room.data(), vectors.data());
        CHECK(n >= 1 && n <= kPiecesMax);
        std::uint64_t length = 0;
        for (std::uint32_t i = 0; i < n; ++i) length += vectors[i].iov_len;
        CHECK(length == std::min(limit, transfer.extent_bytes - progress.from_bytes));
        // A device may stop anywhere, but gains at least a block beyond the last attempt.
        const std::uint64_t moved =
            length > kBlockBytes && random.one_in(3) ? random.between(kBlockBytes, length) : length;
        std::byte* place = disk + transfer.start.position_bytes + progress.from_bytes;
        std::uint64_t left = moved;
        for (std::uint32_t i = 0; i < n && left > 0; ++i) {
            const std::uint64_t step = std::min<std::uint64_t>(left, vectors[i].iov_len);
            std::memcpy(op == Op::kWrite ? place : vectors[i].iov_base,
                        op == Op::kWrite ? vectors[i].iov_base : place, step);
            place += step;
            left -= step;
        }
        auto result = static_cast<std::int32_t>(moved);
        if (limit < kBlockBytes || random.one_in(9)) result = -EINTR;
        const Next next = advance(op, transfer, progress, result);
        if (result == -EINTR && progress.retries > kRetriesMax) {
            CHECK(next == Next::kFail && progress.status == -EINTR);
            progress = {};  // a caller would give up; start again to finish the comparison
            continue;
        }
        if (next == Next::kDone) break;
        CHECK(next == Next::kReissue && progress.from_bytes % kBlockBytes == 0);
        CHECK(progress.from_bytes <= progress.reached_bytes);
    }
    if (op == Op::kRead) copy_bounced(op, fragments, transfer, room.data());
}

void test_round_trips() {
    Memory source, target;
    for (std::uint64_t seed = 1; seed <= 120; ++seed) {
        Random random(seed);
        source.fill(random);
        const PlanLimits limits = random_limits(random);
        const Shape from = source.shape(random);
        const std::uint64_t total = total_bytes(from.fragments());
        const Planned writes = plan_item(from, limits);
        std::vector<std::byte> disk(round_up_to_block(total), std::byte{0xEE});
        for (const auto& transfer : writes.transfers) {
            move(Op::kWrite, from.fragments(), *transfer, disk.data(), random);
        }
        const std::vector<std::byte> bytes = from.gather();
        CHECK(std::memcmp(disk.data(), bytes.data(), total) == 0);
        for (std::uint64_t i = total; i < disk.size(); ++i) CHECK(disk[i] == std::byte{0});

        // Read into another shape, trimmed to the same length.
        Shape to = target.shape(random);
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < to.address.size(); ++i) {
            to.length_bytes[i] = std::min(to.length_bytes[i], total - sum);
            sum += to.length_bytes[i];
            if (sum == total) {
                to.address.resize(i + 1);
                to.length_bytes.resize(i + 1);
            }
        }
        target.poison();
        std::memset(disk.data() + total, 0x55, disk.size() - total);  // padding: never delivered
        const Planned reads = plan_item(to, limits);
        for (const auto& transfer : reads.transfers) {
            move(Op::kRead, to.fragments(), *transfer, disk.data(), random);
        }
        CHECK(to.gather() == std::vector<std::byte>(
                                 bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(sum)));
        std::vector<bool> used(kMemoryBytes, false);
        for (std::size_t i = 0; i < to.address.size(); ++i) {
            const std::uint64_t at =
                to.address[i] - reinterpret_cast<std::uint64_t>(target.bytes());
            for (std::uint64_t b = 0; b < to.length_bytes[i]; ++b) used[at + b] = true;
        }
        for (std::uint64_t i = 0; i < kMemoryBytes; ++i) {
            CHECK(used[i] || target.bytes()[i] == std::byte{0xA5});
        }
    }
}

void test_aligned_items_do_not_bounce() {
    Memory memory;
    const auto base = reinterpret_cast<std::uint64_t>(memory.bytes());
    // Two fragments that touch in memory, cut off the block grid: still one direct piece.
    const std::uint64_t address[] = {base + 512, base + 512 + 5000};
    const std::uint64_t length[] = {5000, 2 * kBlockBytes - 5000};
    const PlanLimits limits{512, 1 << 20, 1 << 20};
    Cursor cursor;
    auto transfer = std::make_unique<Transfer>();
    plan_transfer({address, length, 2}, limits, cursor, *transfer);
    CHECK(transfer->piece_count == 1 && transfer->bounce_bytes == 0);
    CHECK(transfer->payload_bytes == 2 * kBlockBytes);
}

void test_advance() {
    auto transfer = std::make_unique<Transfer>();
    transfer->payload_bytes = 10'000;
    transfer->extent_bytes = 12'288;
    Progress p;
    CHECK(advance(Op::kRead, *transfer, p, 10'000) == Next::kDone);  // the padding may be missing
    p = {};
    CHECK(advance(Op::kWrite, *transfer, p, 10'000) == Next::kReissue && p.from_bytes == 8192);
    CHECK(advance(Op::kWrite, *transfer, p, 4096) == Next::kDone);
    p = {};
    CHECK(advance(Op::kRead, *transfer, p, 0) == Next::kFail && p.status == -ENODATA);
    p = {};
    CHECK(advance(Op::kWrite, *transfer, p, 0) == Next::kFail && p.status == -EIO);
    p = {};  // the file ends inside the block: reading it again gains nothing
    CHECK(advance(Op::kRead, *transfer, p, 9000) == Next::kReissue && p.from_bytes == 8192);
    CHECK(advance(Op::kRead, *transfer, p, 808) == Next::kFail && p.status == -ENODATA);
    p = {};
    CHECK(advance(Op::kRead, *transfer, p, -EIO) == Next::kFail && p.status == -EIO);
    p = {};
    for (std::uint32_t i = 0; i < kRetriesMax; ++i) {
        CHECK(advance(Op::kRead, *transfer, p, i % 2 ? -EINTR : -EAGAIN) == Next::kReissue);
    }
    CHECK(advance(Op::kRead, *transfer, p, -EAGAIN) == Next::kFail && p.status == -EAGAIN);
    transfer->payload_bytes = transfer->extent_bytes = 1 << 30;
    p = {};
    std::uint32_t resumes = 0;
    while (advance(Op::kRead, *transfer, p, 4096) == Next::kReissue) ++resumes;
    CHECK(resumes == kResumesMax && p.status == -ENODATA);
}

void test_bounce_arena() {
    Random random(7);
    constexpr std::uint64_t kBlocks = 64;
    BounceArena arena;
    CHECK(arena.open(kBlocks * kBlockBytes, 32) == 0);
    std::vector<bool> busy(kBlocks, false);
    struct Run {
        std::uint64_t first, count;
    };
    std::vector<Run> taken;
    for (int step = 0; step < 20'000; ++step) {
        if (taken.size() < 32 && random.one_in(2)) {
            const std::uint64_t count = random.between(1, 20);
            const auto place = arena.take(count * kBlockBytes);
            std::uint64_t longest = 0, run = 0;
            for (std::uint64_t b = 0; b < kBlocks; ++b) {
                run = busy[b] ? 0 : run + 1;
                longest = std::max(longest, run);
            }
            CHECK(place.has_value() == (longest >= count));  // runs that touch are one
            if (!place) continue;
            for (std::uint64_t b = *place / kBlockBytes; b < *place / kBlockBytes + count; ++b) {
                CHECK(b < kBlocks && !busy[b]);
                busy[b] = true;
            }
            taken.push_back({*place / kBlockBytes, count});
        } else if (!taken.empty()) {
            const std::uint64_t pick = random.between(0, taken.size() - 1);
            const Run run = taken[pick];
            taken[pick] = taken.back();
            taken.pop_back();
            for (std::uint64_t b = run.first; b < run.first + run.count; ++b) busy[b] = false;
            arena.give(run.first * kBlockBytes, run.count * kBlockBytes);
        }
    }
    for (const Run& run : taken) arena.give(run.first * kBlockBytes, run.count * kBlockBytes);
    CHECK(arena.take(kBlocks * kBlockBytes) == 0);  // all of it, when nothing is taken
}

void test_memory_table() {
    MemoryTable table;
    CHECK(!table.find(4096, 1));
    table.add({0x10000, 0x1000, 3});
    table.add({0x8000, 0x1000, 1});
    table.add({0x11000, 0x1000, 4});
    CHECK(table.find(0x8000, 0x1000) == 1u && table.find(0x8fff, 1) == 1u);
    CHECK(!table.find(0x8fff, 2) && !table.find(0x7fff, 2) && !table.find(0x9000, 1));
    CHECK(table.find(0x10800, 0x800) == 3u);
    CHECK(!table.find(0x10800, 0x1000));  // across two buffers
    CHECK(!table.find(0x11000, UINT64_MAX));
    table.remove(3);
    CHECK(!table.find(0x10000, 16) && table.find(0x11000, 16) == 4u);
}

void test_checksum_of_fragments() {
    Memory memory;
    Random random(3);
    memory.fill(random);
    for (int turn = 0; turn < 200; ++turn) {
        const Shape shape = memory.shape(random);
        const std::vector<std::byte> bytes = shape.gather();
        const auto address = reinterpret_cast<std::uint64_t>(bytes.data());
        const std::uint64_t length = bytes.size();
        CHECK(checksum(shape.fragments()) == checksum({&address, &length, 1}));
    }
}

}  // namespace

int main() {
    test_round_trips();
    test_aligned_items_do_not_bounce();
    test_advance();
    test_bounce_arena();
    test_memory_table();
    test_checksum_of_fragments();
    std::puts("plan_test: ok");
    return 0;
}
