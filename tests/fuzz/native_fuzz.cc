// Any bytes as batches, memory tables and items to plan, against what headers promise of them.
//
// With clang: a libFuzzer target. With -DOWN_DRIVER: random inputs and files, `program SEED SECONDS
// ROUNDS [FILE ...]`; at least ROUNDS inputs, and as many as fit into SECONDS. An input that breaks a
// promise ends the program with a line and, where it was random, is written to ./crash-native.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

#include "tutti/batch.h"
#include "tutti/memory_table.h"
#include "tutti/plan.h"

using namespace tutti;

namespace {

void promise(bool kept, const char* what) {
    if (kept) return;
    std::fprintf(stderr, "native_fuzz: broken: %s\n", what);
    std::abort();
}

/// Numbers out of an input; zeros when it is used up.
class Source {
public:
    Source(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

    bool empty() const { return at_ == end_; }

    std::uint64_t byte() { return empty() ? 0 : *at_++; }

    /// Any number, often a small one or one near a power of two.
    std::uint64_t number() {
        const std::uint64_t kind = byte();
        if (kind < 128) return kind;
        const std::uint64_t power = std::uint64_t{1} << (byte() & 63);
        if (kind < 192) return power - (kind & 1);
        return power + byte() * 256 + byte();
    }

private:
    const std::uint8_t* at_;
    const std::uint8_t* end_;
};

// ---- batches ----
template <typename T>
std::vector<T> numbers(Source& in, std::size_t count) {
    std::vector<T> made(count);
    for (T& value : made) value = static_cast<T>(in.number());
    return made;
}

void try_batch(Source& in) {
    const std::size_t items = in.byte() % 12;
    const std::size_t fragments = in.byte() % 40;
    const auto devices = static_cast<std::uint32_t>(in.byte() % 5);
    auto device = numbers<std::uint32_t>(in, items);
    auto offset = numbers<std::uint64_t>(in, items + (in.byte() > 250));
    auto start = numbers<std::uint32_t>(in, items + (in.byte() < 250));
    auto address = numbers<std::uint64_t>(in, fragments);
    auto length = numbers<std::uint64_t>(in, fragments + (in.byte() > 250));
    if (in.byte() & 1) {  // else hardly any would fit
        for (std::uint32_t& d : device) d %= std::max(devices, 1U);
        for (std::uint64_t& o : offset) o = round_down_to_block(o);
        for (std::size_t i = 0; i < start.size(); ++i)
            start[i] = static_cast<std::uint32_t>(i * fragments / std::max<std::size_t>(items, 1));
        for (std::uint64_t& l : length) l += l == 0;
    }
    const BatchView view{Op::kRead, true, device, offset, start, address, length};
    const auto batch = Batch::make(view, devices);
    if (!batch) return;
    promise(items > 0 && batch->order.size() == items, "a batch has its items");
    auto order = batch->order;
    std::sort(order.begin(), order.end());
    for (std::uint32_t i = 0; i < items; ++i) promise(order[i] == i, "each item comes once");
    std::uint32_t total = 0;
    for (const Part& part : batch->parts) {
        promise(part.device < devices && part.count > 0, "a part is of a device");
        promise(part.first == total && part.unfinished == part.count, "parts follow one another");
        for (std::uint32_t i = 0; i < part.count; ++i)
            promise(device[batch->order[part.first + i]] == part.device, "an item is on its device");
        total += part.count;
    }
    promise(total == items, "parts hold all items");
    for (std::uint32_t i = 0; i < items; ++i) {
        const Fragments all = batch->fragments_of(i);
        promise(all.count > 0, "an item has a fragment");
        for (std::uint32_t f = 0; f < all.count; ++f)
            promise(all.length_bytes[f] > 0, "a fragment has bytes");
        promise(total_bytes(all) > 0, "an item has bytes");
    }
}

// ---- registered memory ----
void try_table(Source& in) {
    MemoryTable table;
    std::vector<Buffer> known;
    for (std::uint32_t turn = 0; turn < 64 && !in.empty(); ++turn) {
        const std::uint64_t kind = in.byte() % 4;
        if (kind == 0) {
            Buffer buffer{in.number(), in.number() % kBufferBytesMax + 1, turn};
            if (buffer.length_bytes > UINT64_MAX - buffer.address) continue;
            table.add(buffer);
            known.push_back(buffer);
        } else if (kind == 1 && !known.empty()) {
            const std::size_t at = in.byte() % known.size();
            table.remove(known[at].index);
            known.erase(known.begin() + static_cast<std::ptrdiff_t>(at));
        } else {
            std::uint64_t address = in.number(), length = in.number();
            if (kind == 2 && !known.empty()) address = known[in.byte() % known.size()].address + in.byte();
            const auto found = table.find(address, length);
            if (!found) continue;
            const auto holds = [&](const Buffer& b) {
                return b.index == *found && address >= b.address &&
                       length <= b.length_bytes && address - b.address <= b.length_bytes - length;
            };
            promise(std::any_of(known.begin(), known.end(), holds), "a buffer that holds the memory");
        }
    }
}

// ---- planning ----
std::byte pattern(std::uint64_t at, std::uint64_t salt) {
    return static_cast<std::byte>((at * 131 + at / 251 + salt) & 0xff);
}

void check_transfer(const Transfer& transfer, const PlanLimits& limits, const Cursor& before,
                    const Cursor& after) {
    promise(transfer.piece_count > 0 && transfer.piece_count <= kPiecesMax, "pieces are counted");
    promise(transfer.payload_bytes > 0, "each transfer makes progress");
    promise(transfer.extent_bytes <= limits.transfer_bytes_max, "the transfer keeps to its limit");
    promise(transfer.bounce_bytes <= limits.bounce_bytes_max, "the bounce room keeps to its limit");
    promise(transfer.payload_bytes <= transfer.extent_bytes &&
                transfer.extent_bytes - transfer.payload_bytes < kBlockBytes,
            "padding is less than a block");
    promise(after.position_bytes == before.position_bytes + transfer.payload_bytes,
            "the cursor moves by the payload");
    std::uint64_t extent = 0, room = 0;
    for (std::uint32_t i = 0; i < transfer.piece_count; ++i) {
        const Piece& piece = transfer.pieces[i];
        promise(piece.length_bytes > 0 && piece.length_bytes % kBlockBytes == 0, "whole blocks");
        if (piece.bounce) {
            promise(piece.address == room, "bounced pieces fill the room without gaps");
            room += piece.length_bytes;
        } else {
            promise(piece.address % limits.memory_align == 0, "direct pieces are aligned");
        }
        extent += piece.length_bytes;
    }
    promise(extent == transfer.extent_bytes && room == transfer.bounce_bytes, "sums add up");
}

/// Gather the whole transfer from its I/O vectors, or scatter it into them, in slices.
void move(const Transfer& transfer, std::byte* room, std::byte* device, bool write, Source& in) {
    std::vector<iovec> vectors(kPiecesMax);
    std::uint64_t from = 0;
    while (from < transfer.extent_bytes) {
        std::uint64_t most = round_down_to_block(in.number() % (transfer.extent_bytes + 1));
        if (most == 0) most = transfer.extent_bytes;
        const std::uint32_t count = slice_pieces(transfer, from, most, room, vectors.data());
        promise(count > 0 && count <= kPiecesMax, "a slice has vectors");
        std::uint64_t moved = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            std::byte* memory = static_cast<std::byte*>(vectors[i].iov_base);
            std::byte* place = device + from + moved;
            std::memcpy(write ? place : memory, write ? memory : place, vectors[i].iov_len);
            moved += vectors[i].iov_len;
        }
        promise(moved == std::min(most, transfer.extent_bytes - from), "a slice is as long as asked");
        from += moved;
    }
}

void try_plan(Source& in) {
    PlanLimits limits;
    limits.memory_align = std::uint64_t{1} << in.byte() % 13;
    limits.transfer_bytes_max = (1 + in.byte() % 64) * kBlockBytes;
    limits.bounce_bytes_max = (1 + in.byte() % 16) * kBlockBytes;
    std::vector<std::byte> memory(1 << 18);
    std::uint64_t gap = in.byte() * 16;
    std::vector<std::uint64_t> address, length;
    const auto base = reinterpret_cast<std::uint64_t>(memory.data());
    std::uint64_t at = gap;
    for (std::size_t i = 0, count = 1 + in.byte() % 60; i < count; ++i) {
        const std::uint64_t bytes = 1 + in.number() % 20000;
        if (in.byte() & 1) at = in.byte() & 1 ? (at + 4095) / 4096 * 4096 : at + in.byte();
        if (at + bytes > memory.size()) break;
        address.push_back(base + at);
        length.push_back(bytes);
        at += bytes;
    }
    if (address.empty()) return;
    const Fragments fragments{address.data(), length.data(), static_cast<std::uint32_t>(address.size())};
    const std::uint64_t total = total_bytes(fragments);
    const std::uint64_t extent = round_up_to_block(total);
    for (const bool write : {true, false}) {
        std::vector<std::byte> device(extent, std::byte{0x5a});
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = pattern(i, write);
        if (!write)
            for (std::uint64_t i = 0; i < extent; ++i) device[i] = pattern(i, 99);
        Cursor cursor;
        Transfer transfer;
        while (cursor.fragment < fragments.count) {
            const Cursor before = cursor;
            plan_transfer(fragments, limits, cursor, transfer);
            check_transfer(transfer, limits, before, cursor);
            std::vector<std::byte> room(transfer.bounce_bytes);
            if (write) copy_bounced(Op::kWrite, fragments, transfer, room.data());
            move(transfer, room.data(), device.data() + before.position_bytes, write, in);
            if (!write) copy_bounced(Op::kRead, fragments, transfer, room.data());
        }
        promise(cursor.position_bytes == total, "all of the item was planned");
        std::uint64_t place = 0;
        for (std::uint32_t f = 0; f < fragments.count; ++f)
            for (std::uint64_t i = 0; i < length[f]; ++i, ++place) {
                const std::uint64_t here = address[f] + i - base;
                promise(memory[here] == device[place], "the bytes of the item are on the device");
                promise(!write || device[place] == pattern(here, 1), "a write changes no memory");
                promise(write || memory[here] == pattern(place, 99), "a read brings the device's");
            }
        for (; write && place < extent; ++place)
            promise(device[place] == std::byte{0}, "padding is zeros");
    }
}

void try_advance(Source& in) {
    Transfer transfer{};
    transfer.payload_bytes = static_cast<std::uint32_t>(1 + in.number() % (1 << 20));
    transfer.extent_bytes = static_cast<std::uint32_t>(round_up_to_block(transfer.payload_bytes));
    const Op op = in.byte() & 1 ? Op::kRead : Op::kWrite;
    Progress progress;
    for (std::uint32_t turn = 0;; ++turn) {
        promise(turn <= kResumesMax + kRetriesMax + 1, "attempts are bounded");
        const std::uint64_t left = transfer.extent_bytes - progress.from_bytes;
        auto result = static_cast<std::int32_t>(in.number() % (left + 1));
        const std::uint64_t kind = in.byte() % 8;
        if (kind == 0) result = -EAGAIN;
        if (kind == 1) result = -static_cast<std::int32_t>(1 + in.byte() % 130);
        if (kind == 2) result = 0;
        const Next next = advance(op, transfer, progress, result);
        if (next == Next::kFail) {
            promise(progress.status < 0, "a failure says why");
            return;
        }
        if (next == Next::kDone) {
            promise(result >= 0, "an error ends nothing well");
            const std::uint64_t reached = progress.from_bytes + static_cast<std::uint64_t>(result);
            promise(reached >= transfer.payload_bytes, "done is when all bytes were moved");
            return;
        }
        promise(progress.from_bytes % kBlockBytes == 0, "attempts begin on a block");
        promise(progress.from_bytes < transfer.extent_bytes, "attempts begin inside");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Source in(data, size);
    switch (in.byte() % 4) {
        case 0: try_batch(in); break;
        case 1: try_table(in); break;
        case 2: try_plan(in); break;
        default: try_advance(in);
    }
    return 0;
}

#ifdef OWN_DRIVER
namespace {

std::vector<std::uint8_t> current;

void keep_input(int) {
    std::ofstream("crash-native", std::ios::binary)
        .write(reinterpret_cast<const char*>(current.data()),
               static_cast<std::streamsize>(current.size()));
    std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) return 2;
    const double seconds = std::atof(argv[2]);
    const long rounds = std::atol(argv[3]);
    for (int i = 4; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
        std::fprintf(stderr, "%s\n", argv[i]);
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(raw.data()), raw.size());
    }
    std::signal(SIGABRT, keep_input);
    std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    long count = 0;
    for (; count < rounds || std::chrono::steady_clock::now() < end; ++count) {
        current.resize(random() % 600);
        for (std::uint8_t& byte : current) byte = static_cast<std::uint8_t>(random());
        LLVMFuzzerTestOneInput(current.data(), current.size());
    }
    std::printf("native: %ld inputs and %d files, nothing broken\n", count, argc - 4);
    return 0;
}
#endif
