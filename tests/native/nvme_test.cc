// The queue pair, the controller's bring-up and data pointers, against the software controller.
//
//   nvme_test [ignored [seed]]      exit status 0: all passed
#include <sys/mman.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "tutti/nvme_linux.h"
#include "tutti/nvme_memory.h"
#include "tutti/nvme_soft.h"

using namespace tutti;
using namespace tutti::nvme;

namespace {

constexpr u64 kSecond = 1'000'000'000;
constexpr u64 kPatience = 60 * kSecond;  // nothing that works takes as long
using Kind = SoftFault::Kind;

/// A controller, open, and a data region of 16 MiB that it reaches.
struct Rig {
    SoftController soft;
    SoftAccess access{soft};
    Controller controller{access};
    DmaMemory data;
    DmaMemory list;
    Region region{};

    explicit Rig(const SoftOptions& soft_options = {}, const ControllerOptions& options = {},
                 u64 data_bytes = 16u << 20)
        : soft(soft_options) {
        CHECK(soft.start() == 0);
        const Failure failure = controller.open(options);
        if (failure) std::fprintf(stderr, "open: %s\n", failure.what.c_str());
        CHECK(!failure);
        CHECK(access.allocate(data_bytes, data) == 0);
        CHECK(access.allocate(list_pages(data_bytes) * kPageBytes, list) == 0);
        region.address = u64(reinterpret_cast<std::uintptr_t>(data.address));
        region.length_bytes = data_bytes;
        region.list_dma = list.dma;
        build_list(region, reinterpret_cast<u64*>(list.address),
                   [&](u64 page) { return data.dma + page * kPageBytes; });
    }
    ~Rig() {
        soft.clear_faults();
        soft.release();
        controller.close();
        access.release(data);
        access.release(list);
    }
    Queue& queue(u32 index = 0) { return controller.queue(index); }

    /// A command for `blocks` blocks of 4 KiB (in 512-byte LBAs) at `block`, and memory at `page`.
    Command command(Io op, u64 block, u32 blocks, u64 page, bool sgl = false) const {
        Command made = transfer_command(op, 1, block * 8, blocks * 8);
        const DataPointer pointer =
            data_pointer(region, page * kPageBytes, blocks * kPageBytes, sgl);
        CHECK(pointer.length_bytes == blocks * kPageBytes);
        made.data[0] = pointer.data[0];
        made.data[1] = pointer.data[1];
        made.flags = pointer.flags;
        return made;
    }
    u8* page(u64 index) { return data.address + index * kPageBytes; }

    /// Move blocks with as few commands as data pointers take.
    u32 transfer(Io op, u64 block, u32 blocks, u64 at_page, bool sgl, u32 index) {
        for (u32 done = 0; done < blocks;) {
            const u32 left = blocks - done;
            const DataPointer pointer =
                data_pointer(region, (at_page + done) * kPageBytes, left * kPageBytes, sgl);
            const u32 covered = pointer.length_bytes / kPageBytes;
            const u32 ended = run(command(op, block + done, covered, at_page + done, sgl), index);
            if (ended != 0) return ended;
            done += covered;
        }
        return 0;
    }

    /// Run one command to its end; returns the status.
    u32 run(const Command& made, u32 index = 0) {
        Result result{};
        CHECK(queue(index).submit(made, result, kPatience));
        queue(index).ring();
        CHECK(queue(index).wait(result, kPatience));
        return result.status;
    }
};

void fill(u8* page, u64 seed) {
    for (u32 i = 0; i < kPageBytes; i += 8) {
        const u64 word = (seed + 1) * 0x9e3779b97f4a7c15u + i;
        std::memcpy(page + i, &word, 8);
    }
}

bool holds(const u8* page, u64 seed) {
    u8 wanted[kPageBytes];
    fill(wanted, seed);
    return std::memcmp(page, wanted, kPageBytes) == 0;
}

// ---- data pointers ----
/// Walk a pointer as a controller does, over the list in memory; returns the page numbers.
std::vector<u64> walk(const DataPointer& pointer, const std::vector<u64>& list, u64 list_dma,
                      u64 page_dma) {
    std::vector<u64> pages{pointer.data[0] / kPageBytes - page_dma};
    u64 left = pointer.length_bytes -
               std::min<u64>(pointer.length_bytes, kPageBytes - pointer.data[0] % kPageBytes);
    if (left == 0) return pages;
    if (left <= kPageBytes) {
        pages.push_back(pointer.data[1] / kPageBytes - page_dma);
        return pages;
    }
    u64 at = pointer.data[1];
    while (left > 0) {
        const u64 entry = list[(at - list_dma) / 8];
        const bool last_of_page = at % kPageBytes == kPageBytes - 8;
        if (last_of_page && left > kPageBytes) {
            at = entry;
            continue;
        }
        pages.push_back(entry / kPageBytes - page_dma);
        left -= std::min<u64>(left, kPageBytes);
        at += 8;
    }
    return pages;
}

void test_data_pointers() {
    constexpr u64 kPages = 3 * kListAddresses + 5, kDma = u64{1} << 30, kList = u64{1} << 50;
    std::vector<u64> list(list_pages(kPages * kPageBytes) * kListEntries);
    Region region{};
    region.length_bytes = kPages * kPageBytes;
    region.list_dma = kList;
    for (const bool scattered : {false, true}) {
        build_list(region, list.data(),
                   [=](u64 page) { return kDma + (scattered ? page * 2 : page) * kPageBytes; });
        CHECK((region.contiguous != 0) == !scattered);
        Random random(1);
        for (u32 round = 0; round < 60'000; ++round) {
            // Every start, and lengths around the ends of list pages.
            const u64 first = round % kPages;
            const u64 within = random.one_in(2) ? 0 : 4 * random.between(0, 1023);
            const u64 most = (kPages - first) * kPageBytes - within;
            u64 length = random.between(1, std::min<u64>(most, 4u << 20));
            if (random.one_in(2)) {
                const u64 link = (first / kListAddresses + random.between(1, 3)) * kListAddresses;
                const u64 end = (link + 1) * kPageBytes - first * kPageBytes - within;
                const u64 off = random.between(0, 2 * kPageBytes);
                if (end + kPageBytes > off && end + kPageBytes - off <= most)
                    length = end + kPageBytes - off;
            }
            const DataPointer pointer =
                data_pointer(region, first * kPageBytes + within, u32(length), false);
            CHECK(pointer.length_bytes > 0 && pointer.length_bytes <= length);
            CHECK(length - pointer.length_bytes <= kPageBytes);
            DataPointer counted = pointer;
            const std::vector<u64> pages = walk(counted, list, kList, kDma / kPageBytes);
            CHECK(pages.size() == (within + pointer.length_bytes + kPageBytes - 1) / kPageBytes);
            for (u64 i = 0; i < pages.size(); ++i)
                CHECK(pages[i] == (scattered ? (first + i) * 2 : first + i));
        }
        const DataPointer run = data_pointer(region, 4096, 1 << 20, true);
        CHECK((run.flags == kFlagSgl) == !scattered);
    }
}

// ---- bring-up ----
/// A controller that somebody else has disabled answers nothing any more, but for its registers.
void test_disabled_behind_our_back() {
    Rig rig;
    CHECK(!rig.controller.close_if_dead() && rig.controller.is_open());
    u8* registers = rig.access.registers();
    Shared(*reinterpret_cast<u32*>(registers + kRegConfig)).store_release(0);
    Deadline deadline(kPatience);
    Backoff backoff;
    while (Shared(*reinterpret_cast<u32*>(registers + kRegStatus)).load_acquire() != 0) {
        CHECK(!deadline.passed());
        backoff.turn();
    }
    CHECK(!rig.controller.dead() && rig.controller.close_if_dead());
    CHECK(!rig.controller.is_open() && rig.controller.stopped());
    CHECK(!rig.controller.reset());
    CHECK(rig.controller.flush(1, kPatience) == 0);
}

void test_facts() {
    SoftOptions options;
    options.serial = "SERIAL 7";
    options.namespace_count = 3;
    options.block_bytes = 4096;
    options.transfer_shift = 5;
    options.queue_entries_max = 16;
    options.queue_pairs_max = 2;
    ControllerOptions wanted;
    wanted.queue_pairs = 9;
    wanted.queue_entries = 256;
    Rig rig(options, wanted);
    const ControllerFacts& facts = rig.controller.facts();
    CHECK(facts.serial == "SERIAL 7" && facts.model == "Tutti software controller");
    CHECK(facts.namespaces.size() == 3 && facts.namespaces[2].id == 3);
    CHECK(facts.namespaces[0].block_bytes == 4096);
    CHECK(facts.namespaces[0].blocks == options.namespace_bytes / 4096);
    CHECK(facts.transfer_bytes_max == 128u << 10 && facts.sgl && facts.shadow_doorbells);
    CHECK(rig.controller.queue_count() == 2 && rig.queue().sq_entries() == 16);
}

void test_open_refuses() {
    SoftController soft{SoftOptions{}};
    CHECK(soft.start() == 0);
    SoftAccess access(soft);
    Controller controller(access);
    ControllerOptions bad;
    bad.queue_entries = 1;
    CHECK(controller.open(bad).code == -EINVAL);
    CHECK(!controller.open({}));
    CHECK(controller.open({}).code == -EBUSY);
    controller.close();
    controller.close();
    CHECK(!controller.open({}));  // and again
    SoftFault fault;
    fault.kind = Kind::kGone;
    soft.inject(fault);
    Result result{};
    CHECK(controller.queue(0).submit(transfer_command(Io::kFlush, 1, 0, 1), result, kPatience));
    controller.queue(0).ring();
    while (!controller.dead()) sched_yield();
    CHECK(!controller.queue(0).wait(result, kSecond / 100));
    CHECK(controller.reset().code == -ENODEV);
    CHECK(controller.queue(0).wait(result, kPatience) && result.status == status::kDeviceGone);
    controller.close();
    CHECK(controller.open({}).code == -ENODEV);
    soft.plug_in();
    while (controller.dead()) sched_yield();
    CHECK(!controller.open({}));
}

// ---- data ----
void test_random_transfers(const SoftOptions& options, bool sgl, bool shadow, u64 seed) {
    ControllerOptions wanted;
    wanted.queue_pairs = 2;
    wanted.queue_entries = 32;
    wanted.shadow_doorbells = shadow;
    Rig rig(options, wanted);
    Random random(seed);
    constexpr u64 kBlocks = 1024;
    std::vector<u64> disk(kBlocks, 0);  // seed of each block; 0: never written
    for (u64 round = 1; round <= 400; ++round) {
        const u32 count = u32(random.between(1, 100));
        const u64 block = random.between(0, kBlocks - count), page = random.between(0, 2000);
        const u32 queue = u32(random.between(0, 1));
        if (random.one_in(2)) {
            for (u32 i = 0; i < count; ++i)
                fill(rig.page(page + i), disk[block + i] = round * 128 + i);
            CHECK(rig.transfer(Io::kWrite, block, count, page, sgl, queue) == 0);
        } else {
            std::memset(rig.page(page), 0xee, count * kPageBytes);
            CHECK(rig.transfer(Io::kRead, block, count, page, sgl, queue) == 0);
            for (u32 i = 0; i < count; ++i) {
                const bool fresh = disk[block + i] == 0;
                const u8 zeros[kPageBytes] = {};
                CHECK(fresh ? std::memcmp(rig.page(page + i), zeros, kPageBytes) == 0
                            : holds(rig.page(page + i), disk[block + i]));
            }
        }
    }
    CHECK(rig.soft.stats().unmapped == 0 && rig.soft.stats().bad_pointers == 0);
    CHECK(rig.queue().stats().unknown == 0 && rig.queue().stats().bad_head == 0);
}

void test_scattered_region() {
    SoftOptions options;
    options.transfer_shift = 10;  // 4 MiB: lists lead on
    Rig rig(options);
    // The same memory, page by page, in another order of device addresses.
    constexpr u64 kPages = 1500;
    std::vector<u64> dma(kPages);
    for (u64 i = 0; i < kPages; ++i)
        CHECK(rig.access.map(rig.page(kPages - 1 - i), kPageBytes, dma[kPages - 1 - i]) == 0);
    DmaMemory list;
    Region region{};
    region.length_bytes = kPages * kPageBytes;
    CHECK(rig.access.allocate(list_pages(region.length_bytes) * kPageBytes, list) == 0);
    region.list_dma = list.dma;
    build_list(region, reinterpret_cast<u64*>(list.address), [&](u64 page) { return dma[page]; });
    for (u64 i = 0; i < kPages; ++i) fill(rig.page(i), i);
    u64 at = 0;
    u32 commands = 0;
    for (const Io op : {Io::kWrite, Io::kRead}) {
        for (at = 0; at < kPages * kPageBytes; ++commands) {
            const u32 wanted = u32(std::min<u64>(kPages * kPageBytes - at, 1000 * kPageBytes));
            const DataPointer pointer = data_pointer(region, at, wanted, true);
            Command made = transfer_command(op, 1, at / 512, pointer.length_bytes / 512);
            made.data[0] = pointer.data[0];
            made.data[1] = pointer.data[1];
            made.flags = pointer.flags;
            CHECK(rig.run(made) == 0);
            at += pointer.length_bytes;
        }
        if (op == Io::kWrite) std::memset(rig.data.address, 0, kPages * kPageBytes);
    }
    for (u64 i = 0; i < kPages; ++i) CHECK(holds(rig.page(i), i));
    CHECK(commands <= 6);
    rig.controller.close();
    for (const u64 address : dma) rig.access.unmap(address, kPageBytes);
    rig.access.release(list);
}

void test_bad_commands() {
    Rig rig;
    const u64 blocks = (64u << 20) / 512;
    Command made = rig.command(Io::kRead, 0, 1, 0);
    const auto code = [&](const Command& bad) { return rig.run(bad) & status::kCodeMask; };
    Command bad = made;
    bad.nsid = 9;
    CHECK(code(bad) == status::kInvalidNamespace);
    bad = made;
    bad.opcode = 0x55;
    CHECK(code(bad) == status::kInvalidOpcode);
    bad = made;
    bad.cdw10 = u32(blocks);
    CHECK(code(bad) == status::kLbaRange);
    bad = made;
    bad.cdw12 = 0xffff;
    CHECK(code(bad) == status::kInvalidField);  // over MDTS
    bad = made;
    bad.data[0] += 2;
    CHECK(code(bad) == status::kPrpOffset);
    bad = made;
    bad.data[0] = rig.region.address;  // virtual, not the device's
    CHECK(code(bad) == status::kDataTransfer);
    bad = rig.command(Io::kRead, 0, 2, 0);
    bad.data[1] += 8;
    CHECK(code(bad) == status::kPrpOffset);
    bad = rig.command(Io::kRead, 0, 3, 0);
    bad.data[1] += 4;
    CHECK(code(bad) == status::kPrpOffset);
    bad = rig.command(Io::kRead, 0, 3, 0);
    bad.data[1] = rig.data.dma + rig.data.length_bytes;
    CHECK(code(bad) == status::kDataTransfer);
    bad = rig.command(Io::kRead, 0, 2, 0, true);
    bad.data[1] -= 512;
    CHECK(code(bad) == status::kSglLength);
    CHECK(rig.run(made) == 0);
    CHECK(rig.soft.stats().bad_pointers == 6);
}

// ---- the queue ----
/// Keep `depth` reads of one page in flight until `count` were done; every page is checked.
void pump(Rig& rig, u32 queue, u32 thread, u32 depth, u64 count) {
    std::vector<Result> results(depth);
    Queue& q = rig.queue(queue);
    for (u64 i = 0; i < count + depth; ++i) {
        Result& result = results[i % depth];
        const u64 page = thread * 100 + i % depth;
        if (i >= depth) {
            CHECK(q.wait(result, kPatience) && result.status == 0);
            CHECK(holds(rig.page(page), (i - depth) % 64 + 1));
            std::memset(rig.page(page), 0, 64);
        }
        if (i < count) {
            CHECK(q.submit(rig.command(Io::kRead, i % 64, 1, page), result, kPatience));
            q.ring();
        }
    }
}

void write_pattern(Rig& rig) {
    for (u64 block = 0; block < 64; ++block) {
        fill(rig.page(0), block + 1);
        CHECK(rig.run(rig.command(Io::kWrite, block, 1, 0)) == 0);
    }
}

void test_many_laps(bool shadow) {
    for (const u32 entries : {2u, 3u, 8u}) {
        ControllerOptions options;
        options.queue_entries = entries;
        options.shadow_doorbells = shadow;
        Rig rig({}, options);
        write_pattern(rig);
        pump(rig, 0, 0, entries - 1, 2000);
        CHECK(rig.queue().stats().completions == 2064);
    }
}

void test_threads(bool shadow, u32 depth, u32 entries) {
    ControllerOptions options;
    options.queue_entries = entries;
    options.shadow_doorbells = shadow;
    Rig rig({}, options);
    write_pattern(rig);
    std::vector<std::thread> threads;
    for (u32 thread = 0; thread < 3; ++thread)
        threads.emplace_back([&, thread] { pump(rig, 0, thread, depth, 1500); });
    for (std::thread& thread : threads) thread.join();
    CHECK(rig.queue().stats().completions == 3 * 1500 + 64);
    CHECK(rig.queue().stats().unknown == 0 && rig.queue().stats().bad_head == 0);
}

/// One command a thread and round, all at once: nobody's later command saves one not rung.
void test_no_lost_doorbell(bool shadow) {
    ControllerOptions options;
    options.shadow_doorbells = shadow;
    Rig rig({}, options);
    write_pattern(rig);
    constexpr u32 kThreads = 3, kRounds = 1500;
    std::barrier start(kThreads);
    std::vector<std::thread> threads;
    for (u32 thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
            Result result{};
            for (u32 round = 0; round < kRounds; ++round) {
                start.arrive_and_wait();
                Queue& q = rig.queue();
                CHECK(q.submit(rig.command(Io::kRead, thread, 1, thread), result, kPatience));
                q.ring();
                // No poll of its own beyond this one: who waits must not need to ring again.
                CHECK(q.wait(result, 10 * kSecond) && result.status == 0);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

void test_one_doorbell_a_batch() {
    ControllerOptions options;
    options.queue_entries = 256;
    options.shadow_doorbells = false;
    Rig rig({}, options);
    std::vector<Result> results(64);
    for (u32 round = 0; round < 10; ++round) {
        for (u32 i = 0; i < 64; ++i) {
            const Command made = rig.command(Io::kRead, i, 1, i);
            CHECK(rig.queue().try_submit(made, results[i]) == Submit::kPlaced);
        }
        rig.queue().ring();
        for (Result& result : results) CHECK(rig.queue().wait(result, kPatience));
    }
    CHECK(rig.queue().stats().sq_doorbells == 10);
    CHECK(rig.queue().stats().cq_doorbells <= 640);
}

void test_full_says_so() {
    ControllerOptions options;
    options.queue_entries = 4;
    Rig rig({}, options);
    std::vector<Result> results(4);
    for (u32 i = 0; i < 3; ++i)
        CHECK(rig.queue().try_submit(rig.command(Io::kRead, i, 1, i), results[i]) ==
              Submit::kPlaced);
    CHECK(rig.queue().try_submit(rig.command(Io::kRead, 3, 1, 3), results[3]) == Submit::kFull);
    rig.queue().ring();
    for (u32 i = 0; i < 3; ++i) CHECK(rig.queue().wait(results[i], kPatience));
    rig.queue().close();
    CHECK(rig.queue().try_submit(rig.command(Io::kRead, 3, 1, 3), results[3]) == Submit::kClosed);
    CHECK(!rig.queue().submit(rig.command(Io::kRead, 3, 1, 3), results[3], kPatience));
    CHECK(results[3].status == status::kNotIssued);
}

void test_one_held_command_stops_nobody() {
    ControllerOptions options;
    options.queue_entries = 8;
    Rig rig({}, options);
    write_pattern(rig);
    SoftFault fault;
    fault.kind = Kind::kHold;
    rig.soft.inject(fault);
    Result held{};
    CHECK(rig.queue().submit(rig.command(Io::kRead, 5, 1, 50), held, kPatience));
    rig.queue().ring();
    pump(rig, 0, 1, 6, 3000);  // many laps round the one that is held
    CHECK(!Queue::done(held));
    rig.soft.release();
    CHECK(rig.queue().wait(held, kPatience) && held.status == 0 && holds(rig.page(50), 6));
}

/// More in flight than the submission queue has slots: SQHD frees them, not completions.
void test_slots_are_freed_by_the_head() {
    Rig rig;
    Queue queue{};
    // A queue of our own beside the controller's: 4 slots, 32 completions and ids.
    DmaMemory sq, cq;
    CHECK(rig.access.allocate(kPageBytes, sq) == 0 && rig.access.allocate(kPageBytes, cq) == 0);
    std::vector<u64> marks(4), owners(31);
    std::vector<u32> next(31);
    QueueMemory memory{};
    memory.sq = reinterpret_cast<Command*>(sq.address);
    memory.cq = reinterpret_cast<Completion*>(cq.address);
    memory.marks = marks.data();
    memory.id_owner = owners.data();
    memory.id_next = next.data();
    u32 sq_doorbell = 0, cq_doorbell = 0;
    memory.sq_doorbell = &sq_doorbell;
    memory.cq_doorbell = &cq_doorbell;
    std::memset(cq.address, 0xff, kPageBytes);  // dirty: phase bits set everywhere
    queue.reset(memory, 7, 4, 32, 31);
    CHECK(queue.poll(64) == 0);
    auto complete = [&, at = u32{0}](u32 id, u32 head, u32 of = 7) mutable {
        memory.cq[at % 32].head_and_queue = head | of << 16;
        memory.cq[at % 32].id_and_status = id | (at / 32 % 2 == 0 ? 1u : 0u) << 16;
        ++at;
    };
    std::vector<Result> results(31);
    u32 placed = 0;
    for (; placed < 3; ++placed)
        CHECK(queue.try_submit(Command{}, results[placed]) == Submit::kPlaced);
    CHECK(queue.try_submit(Command{}, results[3]) == Submit::kFull);
    queue.ring();
    CHECK(sq_doorbell == 3);
    complete(results[1].command_id, 3);  // the second of them; all three were fetched
    complete(results[1].command_id, 3);  // and once more
    CHECK(queue.poll(64) == 2 && Queue::done(results[1]) && !Queue::done(results[0]));
    CHECK(cq_doorbell == 2 && queue.stats().unknown == 1);
    for (; placed < 6; ++placed)
        CHECK(queue.try_submit(Command{}, results[placed]) == Submit::kPlaced);
    CHECK(queue.try_submit(Command{}, results[6]) == Submit::kFull);
    queue.ring();
    CHECK(sq_doorbell == 2);                // 6 of 4 slots
    complete(99, 3);                        // an id that never was
    complete(results[0].command_id, 3, 8);  // of another queue
    CHECK(queue.poll(64) == 2 && !Queue::done(results[0]));
    complete(results[0].command_id, 3);
    CHECK(queue.poll(64) == 1 && Queue::done(results[0]));
    CHECK(queue.stats().unknown == 3 && queue.stats().bad_head == 0);
    complete(results[2].command_id, 9);  // a head beyond the queue
    CHECK(queue.poll(64) == 1 && Queue::done(results[2]) && queue.stats().bad_head == 1);
    complete(results[3].command_id, 2);
    complete(results[4].command_id, 3);  // a head beyond what was rung
    CHECK(queue.poll(64) == 2 && queue.stats().bad_head == 2);
    rig.access.release(sq);
    rig.access.release(cq);
}

void test_forget_and_late() {
    Rig rig;
    write_pattern(rig);
    SoftFault fault;
    fault.kind = Kind::kHold;
    rig.soft.inject(fault);
    Result held{};
    CHECK(rig.queue().submit(rig.command(Io::kRead, 5, 1, 50), held, kPatience));
    rig.queue().ring();
    CHECK(!rig.queue().wait(held, kSecond / 100));
    CHECK(rig.queue().forget(held) && Queue::done(held) && held.status == status::kTimeout);
    CHECK(!rig.queue().forget(held));
    const u32 id = held.command_id;
    pump(rig, 0, 1, 6, 2000);
    rig.soft.release();
    while (rig.queue().stats().late == 0) rig.queue().poll(64);
    CHECK(held.status == status::kTimeout && held.command_id == id);
    CHECK(rig.run(rig.command(Io::kRead, 1, 1, 1)) == 0);
    CHECK(rig.queue().stats().unknown == 0);
}

void test_lies_are_counted() {
    Rig rig;
    write_pattern(rig);
    for (const Kind kind : {Kind::kRepeat, Kind::kTorn, Kind::kWrongId, Kind::kWrongQueue,
                            Kind::kWrongHead, Kind::kDelay}) {
        SoftFault fault;
        fault.kind = kind;
        fault.turns = 20;
        fault.skip = 3;
        fault.count = 40;
        rig.soft.inject(fault);
        pump(rig, 0, 1, 4, 300);
        rig.soft.clear_faults();
    }
    while (rig.queue().stats().unknown < 160) rig.queue().poll(64);
    CHECK(rig.queue().stats().unknown == 160);  // repeat, id, queue, head
    CHECK(rig.queue().stats().bad_head >= 1);
    SoftFault fault;
    fault.kind = Kind::kStatus;
    fault.status = status::kReadError | status::kDoNotRetry;
    rig.soft.inject(fault);
    CHECK(rig.run(rig.command(Io::kRead, 1, 1, 1)) == fault.status);
    // What the queue cannot see, a checksum must: the bytes are not those asked for.
    for (const Kind kind : {Kind::kFlip, Kind::kShort}) {
        fault.kind = kind;
        rig.soft.inject(fault);
        std::memset(rig.page(9), 0, kPageBytes);
        CHECK(rig.run(rig.command(Io::kRead, 3, 1, 9)) == 0 && !holds(rig.page(9), 4));
    }
}

void test_abort() {
    Rig rig;
    SoftFault fault;
    fault.kind = Kind::kHold;
    rig.soft.inject(fault);
    Result held{};
    CHECK(rig.queue().submit(rig.command(Io::kRead, 5, 1, 50), held, kPatience));
    rig.queue().ring();
    while (rig.soft.stats().faults == 0) sched_yield();
    bool aborted = false;
    CHECK(!rig.controller.abort(1, held.command_id, aborted) && aborted);
    CHECK(rig.queue().wait(held, kPatience) && held.status == status::kAborted);
    CHECK(!rig.controller.abort(1, held.command_id, aborted) && !aborted);
}

void test_reset_ends_what_hangs(Kind kind) {
    ControllerOptions options;
    options.admin_timeout_ns = kSecond;
    Rig rig({}, options);
    write_pattern(rig);
    for (u32 round = 0; round < 20; ++round) {
        SoftFault fault;
        fault.kind = kind;
        rig.soft.inject(fault);
        std::vector<std::thread> threads;
        for (u32 thread = 0; thread < 3; ++thread) {
            threads.emplace_back([&, thread] {
                Result result{};
                const Command made = rig.command(Io::kRead, thread, 1, thread);
                if (!rig.queue().submit(made, result, kPatience)) return;
                rig.queue().ring();
                CHECK(rig.queue().wait(result, kPatience));
                CHECK(result.status == 0 || result.status == status::kDeviceGone);
            });
        }
        while (rig.soft.stats().faults == round) sched_yield();
        // As `reset`, but with threads that still wait: they end before the queues are made anew.
        rig.controller.close();
        for (std::thread& thread : threads) thread.join();
        rig.soft.clear_faults();
        CHECK(!rig.controller.open(options));
        CHECK(rig.run(rig.command(Io::kRead, 7, 1, 7)) == 0 && holds(rig.page(7), 8));
    }
    SoftFault fault;
    fault.kind = kind;
    rig.soft.inject(fault);
    Result result{};
    CHECK(rig.queue().submit(rig.command(Io::kRead, 1, 1, 1), result, kPatience));
    rig.queue().ring();
    CHECK(!rig.queue().wait(result, kSecond / 100));
    CHECK(!rig.controller.reset());
    CHECK(Queue::done(result) && result.status == status::kDeviceGone);
    CHECK(rig.run(rig.command(Io::kRead, 7, 1, 7)) == 0);
}

void test_shadow_doorbells_are_elided() {
    ControllerOptions options;
    options.queue_entries = 64;
    Rig rig({}, options);
    CHECK(rig.controller.facts().shadow_doorbells);
    write_pattern(rig);
    pump(rig, 0, 0, 32, 3000);
    const QueueStats& stats = rig.queue().stats();
    CHECK(stats.sq_doorbells >= 1 && stats.cq_doorbells + stats.cq_doorbells_elided > 0);
    CHECK(Queue::passes_event(5, 6, 5) && !Queue::passes_event(5, 5, 4));
    CHECK(Queue::passes_event(0xffff, 0, 0xffff) && !Queue::passes_event(9, 8, 2));
}

void test_nonsense_doorbell_is_fatal() {
    Rig rig;
    Shared(*reinterpret_cast<u32*>(rig.soft.registers() + doorbell_offset(1, false, 0)))
        .store_release(60'000);
    SoftOptions plain;
    plain.shadow_doorbells = false;
    Rig other(plain);
    Shared(*reinterpret_cast<u32*>(other.soft.registers() + doorbell_offset(1, false, 0)))
        .store_release(60'000);
    while (!other.controller.dead()) sched_yield();
    CHECK(!other.controller.reset());
    CHECK(other.run(other.command(Io::kRead, 7, 1, 7)) == 0);
}

// ---- device addresses of an IOMMU ----
void test_addresses_are_taken_lowest_first_and_given_back() {
    AddressSpace space({{0, 3 * kPageBytes}, {16 * kPageBytes, 20 * kPageBytes}});
    CHECK(space.take(0) == 0);
    CHECK(space.take(kPageBytes) == kPageBytes);           // never address 0
    CHECK(space.take(2 * kPageBytes) == 16 * kPageBytes);  // does not fit into the first range
    CHECK(space.take(kPageBytes) == 2 * kPageBytes);
    CHECK(space.take(3 * kPageBytes) == 0);
    CHECK(space.take(2 * kPageBytes) == 18 * kPageBytes);
    CHECK(space.take(kPageBytes) == 0);
    space.give(16 * kPageBytes);
    CHECK(space.take(2 * kPageBytes) == 16 * kPageBytes);
    CHECK(space.take(~u64{0}) == 0);
    CHECK(space.taken() == 4);
}

void test_addresses_never_overlap(u64 seed) {
    Random random(seed);
    AddressSpace space({{kPageBytes, 64 * kPageBytes}, {100 * kPageBytes, 128 * kPageBytes}});
    std::vector<std::pair<u64, u64>> taken;
    for (int step = 0; step < 4000; ++step) {
        if (!taken.empty() && random.one_in(2)) {
            const std::size_t at = random.between(0, taken.size() - 1);
            space.give(taken[at].first);
            taken.erase(taken.begin() + std::ptrdiff_t(at));
            continue;
        }
        const u64 length = random.between(1, 9) * kPageBytes;
        const u64 start = space.take(length);
        if (start == 0) continue;
        const u64 end = start + length;
        CHECK((start >= kPageBytes && end <= 64 * kPageBytes) ||
              (start >= 100 * kPageBytes && end <= 128 * kPageBytes));
        for (const auto& [from, to] : taken) CHECK(end <= from || start >= to);
        taken.emplace_back(start, end);
    }
    CHECK(space.taken() == taken.size());
}

void test_what_is_not_there_cannot_be_taken() {
    for (const char* address : {"", "../../etc", "0000:ff:1f.7"}) {
        Failure failure;
        CHECK(VfioAccess::open(address, failure) == nullptr && failure.code < 0);
        CHECK(!failure.what.empty());
        failure = {};
        CHECK(SysfsAccess::open(address, failure) == nullptr && failure.code < 0);
        CHECK(!failure.what.empty());
    }
}

}  // namespace

int main(int count, char** arguments) {
    const u64 seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    test_addresses_are_taken_lowest_first_and_given_back();
    test_addresses_never_overlap(seed);
    test_what_is_not_there_cannot_be_taken();
    test_data_pointers();
    test_facts();
    test_disabled_behind_our_back();
    test_open_refuses();
    SoftOptions plain;
    test_random_transfers(plain, false, true, seed);
    test_random_transfers(plain, true, false, seed);
    SoftOptions small = plain;
    small.transfer_shift = 10;
    test_random_transfers(small, false, false, seed);
    test_scattered_region();
    test_bad_commands();
    for (const bool shadow : {false, true}) {
        test_many_laps(shadow);
        test_threads(shadow, 1, 16);
        test_threads(shadow, 8, 16);
        test_no_lost_doorbell(shadow);
    }
    test_one_doorbell_a_batch();
    test_full_says_so();
    test_one_held_command_stops_nobody();
    test_slots_are_freed_by_the_head();
    test_forget_and_late();
    test_lies_are_counted();
    test_abort();
    test_reset_ends_what_hangs(Kind::kLose);
    test_reset_ends_what_hangs(Kind::kHold);
    test_reset_ends_what_hangs(Kind::kFatal);
    test_shadow_doorbells_are_elided();
    test_nonsense_doorbell_is_fatal();
    std::puts("nvme_test: ok");
    return 0;
}
