// What the guest programs share: drives opened through vfio or sysfs, plans of transfers, and how
// results are told to the host.
//
// A plan is what Python wants to be on the disk in the end: offset, length and seed of each
// stretch. The same words come out of `pattern` here and of patterns.py there.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../native/check.h"
#include "tutti/gio_ring.h"
#include "tutti/nvme_linux.h"

namespace tutti::guest {

inline constexpr u64 kSecond = 1'000'000'000;
inline constexpr u64 kPatience = 60 * kSecond;  // nothing that works takes as long
inline constexpr u64 kPieceBytes = 2u << 20;    // of registered memory; one huge page
inline constexpr u8 kFiller = 0xa5;

// ---- patterns and plans ----
inline u64 mix(u64 x) {
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 29) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 32;
}

/// Word `index` of what a seed stands for.
inline u64 pattern(u64 seed, u64 index) { return mix(seed + index * 0x9e3779b97f4a7c15u); }

/// @param length_bytes  a multiple of 8
inline void fill(u8* at, u64 length_bytes, u64 seed) {
    for (u64 index = 0; index < length_bytes / 8; ++index) {
        const u64 word = pattern(seed, index);
        std::memcpy(at + index * 8, &word, 8);
    }
}

inline bool holds(const u8* at, u64 length_bytes, u64 seed) {
    for (u64 index = 0; index < length_bytes / 8; ++index) {
        const u64 word = pattern(seed, index);
        if (std::memcmp(at + index * 8, &word, 8) != 0) return false;
    }
    return true;
}

inline bool is_filler(const u8* from, const u8* to) {
    for (; from != to; ++from) {
        if (*from != kFiller) return false;
    }
    return true;
}

struct Stretch {
    u64 offset_bytes;
    u64 length_bytes;
    u64 seed;  // or a checksum
};
using Plan = std::vector<Stretch>;

/// The plan of a test, which Python put into the guest. Never empty.
inline Plan plan_of(const std::string& name) {
    std::ifstream file("/plan/" + name);
    Plan plan;
    for (Stretch one{}; file >> one.offset_bytes >> one.length_bytes >> one.seed;)
        plan.push_back(one);
    if (plan.empty()) std::fprintf(stderr, "no plan of the name %s\n", name.c_str());
    CHECK(!plan.empty());
    return plan;
}

// ---- telling the host ----
/// Whether the host asked for something in the kernel's command line ("tutti.skip").
inline bool asked(const std::string& word) {
    std::ifstream file("/proc/cmdline");
    for (std::string one; file >> one;) {
        if (one == word) return true;
    }
    return false;
}

/// Run one test. The kernel's log gets a line before and after, so that what the kernel says has
/// its place among them; the host gets a RESULT. A failed CHECK ends the program.
inline void test(const std::string& name, const std::function<void()>& body) {
    const auto note = [&](const char* what) {
        const std::string line = std::string("<3>tutti: ") + what + " " + name + "\n";
        const nvme::File log(::open("/dev/kmsg", O_WRONLY | O_CLOEXEC));
        CHECK(log && ::write(log.get(), line.data(), line.size()) == ssize_t(line.size()));
    };
    note("begin");
    const u64 start_ns = now_ns();
    body();
    ::usleep(20'000);  // faults of the IOMMU are told by an interrupt
    note("end");
    std::printf("RESULT %s ok %.1f s\n", name.c_str(), double(now_ns() - start_ns) / 1e9);
    std::fflush(stdout);
}

// ---- drives ----
inline std::unique_ptr<nvme::Access> open_access(const std::string& way, const std::string& pci,
                                                 nvme::Failure& failure) {
    return way == "vfio" ? nvme::VfioAccess::open(pci, failure)
                         : nvme::SysfsAccess::open(pci, failure);
}

/// A controller, open, and pieces of memory that it reaches.
class Drive {
public:
    Drive(const std::string& way, const std::string& pci,
          const nvme::ControllerOptions& options = {}, u32 pieces = 8) {
        nvme::Failure failure;
        access_ = open_access(way, pci, failure);
        if (!failure) {
            controller_.emplace(*access_);
            failure = controller_->open(options);
        }
        if (failure) std::fprintf(stderr, "%s: %s\n", pci.c_str(), failure.what.c_str());
        CHECK(!failure);
        table_.emplace(*access_);
        CHECK(table_->start() == 0);
        for (u32 at = 0; at < pieces; ++at) add_piece(kPieceBytes);
    }
    ~Drive() {
        controller_->close();
        table_.reset();
        for (const nvme::DmaMemory& piece : pieces_) access_->release(piece);
    }
    Drive(const Drive&) = delete;
    Drive& operator=(const Drive&) = delete;

    /// More memory, of one region; returns the region's id.
    u32 add_piece(u64 length_bytes) {
        nvme::DmaMemory piece;
        CHECK(access_->allocate(length_bytes, piece) == 0);
        const auto id = table_->add(reinterpret_cast<std::uintptr_t>(piece.address), length_bytes);
        CHECK(id >= 0);
        pieces_.push_back(piece);
        return u32(id);
    }

    nvme::Controller& controller() { return *controller_; }
    nvme::MemoryTable& table() { return *table_; }
    const std::vector<nvme::DmaMemory>& pieces() const { return pieces_; }
    gio::Target target(u32 nsid = 1) { return {&*controller_, &*table_, nsid}; }

private:
    std::unique_ptr<nvme::Access> access_;
    std::optional<nvme::Controller> controller_;
    std::optional<nvme::MemoryTable> table_;
    std::vector<nvme::DmaMemory> pieces_;
};

inline std::unique_ptr<gio::Ring> open_ring(std::span<const gio::Target> targets,
                                            const gio::RingOptions& options) {
    nvme::Failure failure;
    auto ring = gio::Ring::open(targets, options, failure);
    if (failure) std::fprintf(stderr, "ring: %s\n", failure.what.c_str());
    CHECK(!failure && ring != nullptr);
    return ring;
}

/// Fragments of one IOCB.
struct Batch {
    std::vector<u32> device;
    std::vector<u64> offset_bytes, address, length_bytes;
    void add(u32 to, u64 offset, const u8* at, u64 length) {
        device.push_back(to);
        offset_bytes.push_back(offset);
        address.push_back(reinterpret_cast<std::uintptr_t>(at));
        length_bytes.push_back(length);
    }
    gio::FragmentArrays arrays() const { return {device, offset_bytes, address, length_bytes}; }
};

/// Send batches by one launch, an IOCB each, and wait; returns the statuses of all, in order.
inline std::vector<u32> send(gio::Ring& ring, nvme::Io op, std::span<const Batch> batches,
                             u32 lanes) {
    std::vector<u32> ids(batches.size());
    CHECK(ring.get_iocb(ids) == 0);
    for (std::size_t at = 0; at < ids.size(); ++at)
        CHECK(ring.prepare(ids[at], op, batches[at].arrays()) == 0);
    gio::Launch launch;
    CHECK(ring.issue_io(ids, lanes, launch) == 0);
    std::vector<u32> all;
    for (const u32 id : ids) {
        std::vector<u32> statuses;
        CHECK(ring.wait_cqe(id, kPatience, statuses) == 0);
        all.insert(all.end(), statuses.begin(), statuses.end());
    }
    return all;
}

/// How a plan is carried out.
struct Course {
    u32 device = 0;
    u32 lanes = 1;
    u32 batches = 1;  // of one launch
    u32 batch_fragments = 64;
};

/// Carry out a plan through a ring: write all of it, or read and compare all of it. Stretches lie
/// at odd places in memory; what lies between them has to stay as it is.
inline void carry_out(Drive& drive, gio::Ring& ring, const Plan& plan, nvme::Io op,
                      const Course& course) {
    const bool write = op == nvme::Io::kWrite;
    // The negative control of the host's comparison: one write that is not made.
    const bool skips = asked("tutti.skip");
    struct Placed {
        const Stretch* stretch;
        u8* at;
    };
    for (std::size_t next = 0; next < plan.size();) {
        std::vector<Batch> batches;
        std::vector<Placed> placed;
        for (const nvme::DmaMemory& piece : drive.pieces())
            std::memset(piece.address, kFiller, piece.length_bytes);
        for (const nvme::DmaMemory& piece : drive.pieces()) {
            u64 used = 0;
            while (next < plan.size()) {
                const Stretch& one = plan[next];
                const u64 at = used + one.seed % 1024 * 4;
                if (at + one.length_bytes > piece.length_bytes) break;
                if (batches.empty() || batches.back().device.size() == course.batch_fragments) {
                    if (batches.size() == course.batches) break;
                    batches.emplace_back();
                }
                if (write) fill(piece.address + at, one.length_bytes, one.seed);
                if (!(skips && next == 0))
                    batches.back().add(course.device, one.offset_bytes, piece.address + at,
                                       one.length_bytes);
                placed.push_back({&one, piece.address + at});
                used = at + one.length_bytes;
                ++next;
            }
        }
        CHECK(!placed.empty());
        for (const u32 status : send(ring, op, batches, course.lanes)) {
            if (status != 0) std::fprintf(stderr, "status %#x\n", status);
            CHECK(status == 0);
        }
        if (write) continue;
        for (const nvme::DmaMemory& piece : drive.pieces()) {
            const u8* from = piece.address;
            for (const Placed& one : placed) {
                if (one.at < piece.address || one.at >= piece.address + piece.length_bytes)
                    continue;
                if (!(skips && one.stretch == &plan[0])) {
                    CHECK(is_filler(from, one.at));
                    CHECK(holds(one.at, one.stretch->length_bytes, one.stretch->seed));
                }
                from = one.at + one.stretch->length_bytes;
            }
            CHECK(is_filler(from, piece.address + piece.length_bytes));
        }
    }
}

inline void write_and_read(Drive& drive, gio::Ring& ring, const Plan& plan, const Course& course) {
    carry_out(drive, ring, plan, nvme::Io::kWrite, course);
    carry_out(drive, ring, plan, nvme::Io::kRead, course);
}

}  // namespace tutti::guest
