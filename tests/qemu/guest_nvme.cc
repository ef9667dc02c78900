// What runs in the guests: controllers of QEMU, driven by Tutti's own code.
//
//   guest_nvme SUITE        results to stdout; exit status 0: all passed
//   guest_nvme exit CODE    ends the machine; QEMU's exit status is CODE * 2 + 1
//
// Where the drives are and what they are is up to boots.py. All stretches that are written, and
// nothing else, are in plans.
#define XXH_INLINE_ALL
#include <sys/io.h>
#include <termios.h>
#include <xxhash.h>

#include <atomic>
#include <thread>

#include "guest_kit.h"

using namespace tutti;
using namespace tutti::guest;
using nvme::Io;
namespace status = tutti::nvme::status;

namespace {

const std::string kFirst = "0000:00:04.0";
const std::string kOther = "0000:00:05.0";
const std::string kShapes = "0000:00:06.0";
const std::string kElsewhere = "0000:00:07.0";
const std::string kPort = "0000:00:08.0";  // of kRemovable
const std::string kSlow = "0000:00:09.0";
const std::string kRemovable = "0000:01:00.0";
constexpr int kPassed = 21;                    // as in init.sh and boots.py
constexpr u32 kTransferBytesMax = 512u << 10;  // QEMU's default

/// QEMU ends at once, with this in its exit status.
void end_machine(int code) {
    if (::ioperm(0xf4, 1, 1) == 0) ::outb(u8(code), 0xf4);
}

nvme::ControllerOptions options_of(u32 pairs, u32 entries, bool shadow = true) {
    nvme::ControllerOptions options;
    options.queue_pairs = pairs;
    options.queue_entries = entries;
    options.shadow_doorbells = shadow;
    return options;
}

/// The view is in memory that all share; a test may change what lanes see of a device.
void set_sgl(gio::Ring& ring, bool sgl) {
    const_cast<gio::View&>(ring.view()).devices[0].sgl = sgl ? 1 : 0;
}

// ---- one controller ----
void identify(const std::string& way) {
    Drive drive(way, kFirst, options_of(4, 64), 1);
    const nvme::ControllerFacts facts = drive.controller().facts();
    CHECK(facts.serial == "TUTTI-FIRST" && facts.model == "QEMU NVMe Ctrl");
    CHECK(facts.transfer_bytes_max == kTransferBytesMax && facts.sgl && facts.shadow_doorbells);
    CHECK(facts.queue_pairs_max >= 4 && drive.controller().queue_count() == 4);
    CHECK(facts.namespaces.size() == 1 && facts.namespaces[0].block_bytes == 512);
    CHECK(facts.namespaces[0].blocks == (64u << 20) / 512);
    CHECK(!drive.controller().dead());
}

void blocking(const std::string& way) {
    Drive drive(way, kFirst, {}, 1);
    const Plan plan = plan_of("blocking");
    const bool skips = asked("tutti.skip");
    for (const Stretch& one : plan) {
        std::vector<u8> bytes(one.length_bytes);
        fill(bytes.data(), bytes.size(), one.seed);
        if (!skips)
            CHECK(drive.controller().transfer(Io::kWrite, 1, one.offset_bytes, bytes.data(),
                                              bytes.size(), kPatience) == 0);
        CHECK(drive.controller().flush(1, kPatience) == 0);
        std::memset(bytes.data(), kFiller, bytes.size());
        CHECK(drive.controller().transfer(Io::kRead, 1, one.offset_bytes, bytes.data(),
                                          bytes.size(), kPatience) == 0);
        CHECK(skips || holds(bytes.data(), bytes.size(), one.seed));
    }
}

/// Two threads on one queue of eight entries, for many laps.
void queue_pair(const std::string& way, bool shadow) {
    Drive drive(way, kFirst, options_of(1, 8, shadow), 2);
    const Plan plan = plan_of(shadow ? "queue_shadow" : "queue_plain");
    nvme::Queue& queue = drive.controller().queue(0);
    CHECK(queue.sq_entries() == 8 && drive.controller().facts().shadow_doorbells == shadow);
    const auto work = [&](u32 half) {
        nvme::Result result{};
        const nvme::Region& region = drive.table().regions()[half];
        u8* memory = drive.pieces()[half].address;
        CHECK(region.address == u64(reinterpret_cast<std::uintptr_t>(memory)));
        for (std::size_t at = half; at < plan.size(); at += 2) {
            const Stretch& one = plan[at];
            for (const Io op : {Io::kWrite, Io::kRead}) {
                nvme::Command command = nvme::transfer_command(op, 1, one.offset_bytes / 512,
                                                               u32(one.length_bytes / 512));
                const nvme::DataPointer pointer = nvme::data_pointer(
                    region, one.seed % 1024 * 4, u32(one.length_bytes), at % 3 == 0);
                CHECK(pointer.length_bytes == one.length_bytes);
                command.flags = pointer.flags;
                command.data[0] = pointer.data[0];
                command.data[1] = pointer.data[1];
                u8* bytes = memory + one.seed % 1024 * 4;
                if (op == Io::kWrite)
                    fill(bytes, one.length_bytes, one.seed);
                else
                    std::memset(bytes, kFiller, one.length_bytes);
                CHECK(queue.submit(command, result, kPatience));
                queue.ring();
                CHECK(queue.wait(result, kPatience) && result.status == 0);
            }
            CHECK(holds(memory + one.seed % 1024 * 4, one.length_bytes, one.seed));
        }
    };
    std::thread other(work, 1u);
    work(0);
    other.join();
    const nvme::QueueStats stats = queue.stats();
    CHECK(stats.completions == 2 * plan.size() && plan.size() > 4 * queue.sq_entries());
    CHECK(stats.unknown == 0 && stats.bad_head == 0 && stats.late == 0);
}

void through_ring(const std::string& way, const std::string& name, u32 pairs, u32 entries, bool sgl,
                  bool shadow, u32 lanes) {
    Drive drive(way, kFirst, options_of(pairs, entries, shadow));
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.depth = 4;
    options.threads = lanes;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    if (!sgl) set_sgl(*ring, false);
    Course course;
    course.lanes = lanes;
    course.batches = 4;
    course.batch_fragments = 6;
    write_and_read(drive, *ring, plan_of(name), course);
    CHECK(ring->stats().failed_fragments == 0 && ring->stats().timeouts == 0);
}

/// Lists of more than a page: 3 MiB in one command.
void chained(const std::string& way) {
    Drive drive(way, kOther, options_of(2, 32), 0);
    drive.add_piece(8u << 20);
    CHECK(drive.controller().facts().transfer_bytes_max == nvme::kTransferBytesCap);
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    set_sgl(*ring, false);
    write_and_read(drive, *ring, plan_of("chained"), {});
    // A whole one and what was cut from it where the list leads on, at most.
    CHECK(drive.controller().queue(0).stats().completions <= 4 * plan_of("chained").size());
    set_sgl(*ring, true);
    carry_out(drive, *ring, plan_of("chained"), Io::kRead, {});
}

void resets(const std::string& way) {
    Drive drive(way, kFirst, options_of(2, 16), 2);
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    const Plan plan = plan_of("resets");
    CHECK(plan.size() == 50);
    for (const Stretch& one : plan) {
        std::string what;
        CHECK(ring->reset_device(0, kPatience, what) == 0);
        write_and_read(drive, *ring, {one}, {});
    }
    carry_out(drive, *ring, plan, Io::kRead, {});
    CHECK(ring->stats().resets == plan.size());
}

void suite_basics(const std::string& way) {
    test("identify", [&] { identify(way); });
    test("blocking", [&] { blocking(way); });
    test("queue_shadow", [&] { queue_pair(way, true); });
    test("queue_plain", [&] { queue_pair(way, false); });
    test("ring_sgl", [&] { through_ring(way, "ring_sgl", 4, 64, true, true, 2); });
    test("ring_prp", [&] { through_ring(way, "ring_prp", 4, 64, false, true, 2); });
    test("ring_no_shadow", [&] { through_ring(way, "ring_no_shadow", 2, 4, false, false, 2); });
    test("resets", [&] { resets(way); });
    if (way == "vfio") test("chained", [&] { chained(way); });
}

// ---- trouble ----
/// Only the fragment that touches the bad block fails, with the device's word for it.
void bad_blocks() {
    Drive drive("vfio", kFirst, options_of(1, 64));
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    u8* memory = drive.pieces()[0].address;
    std::memset(memory, 0, kPieceBytes);
    const auto statuses_of = [&](Io op, u64 first_block) {
        Batch batch;
        for (u64 at = 0; at < 16; ++at)
            batch.add(0, (first_block + at * 8) * 512, memory + at * 4096, 4096);
        // Of four commands; the bad block is in the third.
        batch.add(0, (first_block + 40) * 512 - 1200 * 1024, drive.pieces()[1].address,
                  4 * kTransferBytesMax);
        return send(*ring, op, {&batch, 1}, 1);
    };
    // Blocks 2,048 (reads) and 16,384 (writes) are bad.
    const std::pair<Io, u64> cases[] = {{Io::kRead, 8192}, {Io::kWrite, 16384}};
    for (const auto& [op, bad] : cases) {
        const std::vector<u32> statuses = statuses_of(op, bad - 5 * 8);
        const u32 wanted = op == Io::kRead ? status::kReadError : status::kWriteFault;
        for (u32 at = 0; at < statuses.size(); ++at)
            CHECK((statuses[at] & status::kCodeMask) == (at == 5 || at == 16 ? wanted : 0));
    }
    CHECK(ring->stats().failed_fragments == 4);
}

/// Memory that the IOMMU knows nothing of. QEMU calls such a transfer a success: what shows it is
/// the kernel's log, which is why the host counts its lines.
void stray_address() {
    Drive drive("vfio", kFirst, options_of(2, 64));
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    const u32 id = drive.add_piece(kPieceBytes);
    auto& region = const_cast<nvme::Region&>(drive.table().regions()[id]);
    const u64 good = region.dma;
    region.dma = u64{0xdead} << 28;
    Batch batch;
    batch.add(0, 8192, reinterpret_cast<u8*>(region.address), 8192);
    send(*ring, Io::kRead, {&batch, 1}, 1);
    region.dma = good;
}

/// A command that takes longer than it may: it times out, the controller is reset, and I/O goes
/// on. Another drive goes on all the while, in the same launch and in one of its own.
void hung_command() {
    Drive drive("vfio", kSlow, options_of(2, 64), 3);
    Drive other("vfio", kOther, options_of(2, 64), 4);
    const gio::Target both[] = {drive.target(), other.target()};
    gio::RingOptions options;
    options.timeout_ns = 3 * kSecond / 2;
    auto ring = open_ring(both, options);
    u8* late = drive.pieces()[2].address;
    Batch batch;  // the second is as much as the drive moves in five seconds: the third waits
    batch.add(0, 0, drive.pieces()[0].address, 4096);
    batch.add(0, 8192, drive.pieces()[1].address, kTransferBytesMax);
    batch.add(0, 4096, late, 4096);
    for (u64 at = 0; at < 8; ++at)
        batch.add(1, at * 65536, other.pieces()[0].address + at * 65536, 65536);

    std::atomic<bool> over{false};
    std::atomic<u64> rounds{0};
    std::thread meanwhile([&] {
        const gio::Target targets[] = {other.target()};
        auto own = open_ring(targets, options);
        while (!over) {
            Batch reads;
            for (u64 at = 0; at < 4; ++at)
                reads.add(0, at * 4096, other.pieces()[1].address + at * 4096, 4096);
            for (const u32 ended : send(*own, Io::kRead, {&reads, 1}, 1)) CHECK(ended == 0);
            ++rounds;
        }
    });
    const std::vector<u32> statuses = send(*ring, Io::kRead, {&batch, 1}, 1);
    const u64 rounds_meanwhile = rounds;
    over = true;
    meanwhile.join();
    for (u32 at = 0; at < statuses.size(); ++at)
        CHECK(statuses[at] == (at == 2 ? status::kTimeout : 0));
    CHECK(rounds_meanwhile > 1);
    // Its memory is the device's until the controller was reset.
    nvme::MemoryTable& table = drive.table();
    const auto region_of = [&table](const u8* at) {
        nvme::MemoryTable::Finder finder(table);
        return finder.find(reinterpret_cast<std::uintptr_t>(at), 4096);
    };
    CHECK(table.remove(region_of(late)) == -EBUSY);

    std::string what;
    CHECK(ring->reset_device(0, kPatience, what) == 0);
    options.timeout_ns = kPatience;  // the drive is as slow as before
    auto patient = open_ring({both, 1}, options);
    write_and_read(drive, *patient, plan_of("after_hang"), {});
    CHECK(ring->stats().timeouts == 1 && ring->stats().resets == 1);
    CHECK(table.remove(region_of(late)) == 0);
}

void deep_queue() {
    Drive drive("vfio", kOther, options_of(1, 65536), 1);
    CHECK(drive.controller().facts().queue_entries_max == 2048);
    CHECK(drive.controller().queue(0).sq_entries() == 2048);
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    Batch batch;  // more than one lap's worth, two IOCBs
    for (u64 at = 0; at < 1500; ++at)
        batch.add(0, at * 512, drive.pieces()[0].address + at * 512, 512);
    const Batch batches[] = {batch, batch};
    for (const u32 ended : send(*ring, Io::kRead, batches, 1)) CHECK(ended == 0);
}

/// As many pairs as there are, each of them used.
void many_pairs() {
    Drive drive("vfio", kOther, options_of(70, 16));
    CHECK(drive.controller().facts().queue_pairs_max == 64);
    CHECK(drive.controller().queue_count() == 64);
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.threads = 64;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    Course course;
    course.lanes = 64;
    course.batch_fragments = 128;
    write_and_read(drive, *ring, plan_of("many_pairs"), course);
    for (u32 at = 0; at < 64; ++at) CHECK(drive.controller().queue(at).stats().completions >= 2);
}

/// Namespaces of several shapes on one controller: 4 KiB blocks, 512 bytes, and metadata.
void shapes() {
    Drive drive("vfio", kShapes, options_of(2, 32));
    const nvme::ControllerFacts facts = drive.controller().facts();
    CHECK(facts.namespaces.size() == 3);
    CHECK(facts.namespaces[0].block_bytes == 4096 && facts.namespaces[0].metadata_bytes == 0);
    CHECK(facts.namespaces[1].block_bytes == 512 && facts.namespaces[1].metadata_bytes == 0);
    CHECK(facts.namespaces[2].metadata_bytes == 8);
    const gio::Target targets[] = {drive.target(1), drive.target(2)};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    auto ring = open_ring(targets, options);
    Course second;
    second.device = 1;
    write_and_read(drive, *ring, plan_of("blocks_4096"), {});
    write_and_read(drive, *ring, plan_of("blocks_512"), second);
    carry_out(drive, *ring, plan_of("blocks_4096"), Io::kRead, {});
    Batch batch;  // half of a block; beyond the end; of the namespace beside it
    u8* memory = drive.pieces()[0].address;
    batch.add(0, 512, memory, 512);
    batch.add(0, facts.namespaces[0].blocks * 4096, memory, 4096);
    batch.add(1, 512, memory, 512);
    const std::vector<u32> statuses = send(*ring, Io::kRead, {&batch, 1}, 1);
    CHECK(statuses[0] == status::kInvalidField && statuses[1] == status::kLbaRange);
    CHECK(statuses[2] == 0);
    // Not even a small read: with metadata the bytes would not go where they are meant to.
    CHECK(drive.controller().transfer(Io::kRead, 3, 0, memory, 8192, kPatience) ==
          status::kInvalidField);
    const gio::Target metadata[] = {drive.target(3)};
    nvme::Failure failure;
    CHECK(gio::Ring::open(metadata, options, failure) == nullptr && failure.code == -ENODEV);
}

/// Who has a device keeps it.
void held_elsewhere() {
    nvme::Failure failure;
    CHECK(nvme::VfioAccess::open(kElsewhere, failure) == nullptr && failure.code == -ENOENT);
    CHECK(nvme::SysfsAccess::open(kElsewhere, failure) == nullptr && failure.code == -EBUSY);
    CHECK(nvme::VfioAccess::open("0000:00:1e.0", failure) == nullptr && failure.code == -ENOENT);
    CHECK(nvme::VfioAccess::open("../x", failure) == nullptr && failure.code == -EINVAL);
    // The host bridge: nothing of it is touched.
    CHECK(nvme::VfioAccess::open("0000:00:00.0", failure) == nullptr && failure.code == -ENOTSUP);
    CHECK(nvme::SysfsAccess::open("0000:00:00.0", failure) == nullptr && failure.code == -ENOTSUP);
    Drive drive("vfio", kFirst, {}, 1);
    CHECK(nvme::VfioAccess::open(kFirst, failure) == nullptr && failure.code == -EBUSY);
    CHECK(nvme::SysfsAccess::open(kFirst, failure) == nullptr && failure.code == -EBUSY);
    CHECK(drive.controller().flush(1, kPatience) == 0);
}

/// Take power from a slot: QEMU removes the device at once, as if it were pulled.
void cut_power(const std::string& port) {
    const nvme::File config(
        ::open(("/sys/bus/pci/devices/" + port + "/config").c_str(), O_RDWR | O_CLOEXEC));
    CHECK(bool(config));
    u8 at = 0, next = 0, id = 0;
    CHECK(::pread(config.get(), &at, 1, 0x34) == 1);
    for (u32 links = 0; links < 48 && at != 0; ++links, at = next) {
        CHECK(::pread(config.get(), &id, 1, at) == 1);
        CHECK(::pread(config.get(), &next, 1, at + 1) == 1);
        if (id == 0x10) break;
    }
    CHECK(at != 0 && id == 0x10);
    u16 control = 0;  // of the slot: power indicator off, power off
    CHECK(::pread(config.get(), &control, 2, at + 0x18) == 2);
    control = u16(control | 0x0300 | 0x0400);
    CHECK(::pwrite(config.get(), &control, 2, at + 0x18) == 2);
}

/// A drive that is pulled: what is in flight ends with an error, not after the launch's timeout.
/// Its registers read as zeros in QEMU, and as ones on hardware.
void removed() {
    // Never closed: the kernel would wait for the drive for a minute.
    Drive& drive = *new Drive("vfio", kRemovable, options_of(2, 32), 2);
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = 5 * kSecond;
    auto ring = open_ring(targets, options);
    write_and_read(drive, *ring, plan_of("removed"), {});
    cut_power(kPort);
    Batch batch;
    for (u64 at = 0; at < 8; ++at)
        batch.add(0, at * 4096, drive.pieces()[0].address + at * 4096, 4096);
    const u64 start_ns = now_ns();
    const std::vector<u32> statuses = send(*ring, Io::kRead, {&batch, 1}, 1);
    const u64 took_ns = now_ns() - start_ns;
    std::fprintf(stderr, "removed: status %#x after %.2f s\n", statuses[0], double(took_ns) / 1e9);
    for (const u32 ended : statuses) CHECK(ended == status::kDeviceGone);
    std::string what;
    CHECK(ring->reset_device(0, kPatience, what) < 0);
    ring->close();
}

void suite_faults() {
    test("bad_blocks", bad_blocks);
    test("deep_queue", deep_queue);
    test("many_pairs", many_pairs);
    test("shapes", shapes);
    test("held_elsewhere", held_elsewhere);
    test("stray_address", stray_address);
    test("hung_command", hung_command);
    test("removed", removed);
    ::tcdrain(STDOUT_FILENO);
    end_machine(kPassed);
}

// ---- what the host wrote, and will read ----
void suite_exchange() {
    Drive drive("vfio", kFirst, options_of(4, 64));
    const gio::Target targets[] = {drive.target()};
    gio::RingOptions options;
    options.timeout_ns = kPatience;
    options.threads = 2;
    auto ring = open_ring(targets, options);
    test("host_pages", [&] {
        for (const Stretch& page : plan_of("host_pages")) {
            CHECK(page.length_bytes <= kPieceBytes);
            u8* memory = drive.pieces()[0].address;
            std::memset(memory, kFiller, page.length_bytes);
            Batch batch;
            batch.add(0, page.offset_bytes, memory, page.length_bytes);
            for (const u32 ended : send(*ring, Io::kRead, {&batch, 1}, 1)) CHECK(ended == 0);
            CHECK(XXH3_64bits(memory, page.length_bytes) == page.seed);
        }
    });
    test("guest_pages", [&] {
        write_and_read(drive, *ring, plan_of("guest_pages"), {.lanes = 2});
        CHECK(drive.controller().flush(1, kPatience) == 0);
    });
}

// ---- controls: what the host has to notice ----
void suite_skip() {
    test("blocking", [] { blocking("vfio"); });
}

void suite_die() {
    test("identify", [] { identify("vfio"); });
    std::abort();
}

void suite_hang() {
    for (;;) ::sleep(1);
}

}  // namespace

int main(int count, char** arguments) {
    const std::string suite = count > 1 ? arguments[1] : "";
    if (suite == "exit" && count > 2) {
        end_machine(std::atoi(arguments[2]));
        return 1;
    }
    if (suite == "vfio" || suite == "sysfs")
        suite_basics(suite);
    else if (suite == "faults")
        suite_faults();
    else if (suite == "exchange")
        suite_exchange();
    else if (suite == "skip")
        suite_skip();
    else if (suite == "die")
        suite_die();
    else if (suite == "hang")
        suite_hang();
    else
        return 2;
    return 0;
}
