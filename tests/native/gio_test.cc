// Rings of IOCBs: states, fragments, lanes, failures, against software controllers.
//
//   gio_test [ignored [seed]]      exit status 0: all passed
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "tutti/gio_ring.h"
#include "tutti/gio_run.h"
#include "tutti/nvme_soft.h"

using namespace tutti;
using namespace tutti::gio;
using nvme::Io;
using nvme::SoftFault;
using Kind = nvme::SoftFault::Kind;
namespace status = nvme::status;

namespace {

/// Allocations of this thread.
thread_local u64 allocations = 0;

}  // namespace

// Not inlined: the compiler would see malloc's memory handed to delete, and warn.
[[gnu::noinline]] void* operator new(std::size_t size) {
    ++allocations;
    if (void* at = std::malloc(size)) return at;
    std::abort();
}
[[gnu::noinline]] void operator delete(void* at) noexcept { std::free(at); }
[[gnu::noinline]] void operator delete(void* at, std::size_t) noexcept { std::free(at); }

namespace {

constexpr u64 kSecond = 1'000'000'000;
constexpr u64 kPatience = 60 * kSecond;  // nothing that works takes as long
constexpr u64 kPage = nvme::kPageBytes;

u64 number(const void* at) { return u64(reinterpret_cast<std::uintptr_t>(at)); }

/// A software controller and everything that leads to it.
struct Drive {
    nvme::SoftController soft;
    nvme::SoftAccess access{soft};
    nvme::MemoryTable memory{access};
    nvme::Controller controller{access};

    Drive(const nvme::SoftOptions& options, const nvme::ControllerOptions& wanted) : soft(options) {
        CHECK(soft.start() == 0 && memory.start() == 0);
        const nvme::Failure failure = controller.open(wanted);
        if (failure) std::fprintf(stderr, "open: %s\n", failure.what.c_str());
        CHECK(!failure);
    }
    ~Drive() {
        soft.clear_faults();
        soft.release();
        controller.close();
    }
    void fail(Kind kind, u32 count = 1, u32 skip = 0, u32 code = 0, u32 turns = 20) {
        SoftFault fault;
        fault.kind = kind;
        fault.count = count;
        fault.skip = skip;
        fault.status = code;
        fault.turns = turns;
        soft.inject(fault);
    }
    u64 count(u64 nvme::QueueStats::*what) {
        u64 sum = 0;
        for (u32 at = 0; at < controller.queue_count(); ++at)
            sum += controller.queue(at).stats().*what;
        return sum;
    }
};

struct Setup {
    nvme::SoftOptions soft;
    nvme::ControllerOptions controller;
    RingOptions ring;
    u32 drives = 1;
    u64 memory_bytes = 8u << 20;

    Setup() {
        soft.namespace_bytes = 8u << 20;
        controller.queue_entries = 64;
        ring.depth = 4;
        ring.timeout_ns = kPatience;
    }
};

/// The fragments of one IOCB, in arrays.
struct Batch {
    std::vector<u32> device;
    std::vector<u64> offset, address, length;

    void add(u32 of, u64 offset_bytes, u64 at, u64 length_bytes) {
        device.push_back(of);
        offset.push_back(offset_bytes);
        address.push_back(at);
        length.push_back(length_bytes);
    }
    std::size_t size() const { return device.size(); }
    FragmentArrays arrays() const { return {device, offset, address, length}; }
};

/// Drives, a ring over the first namespace of each, and memory that all of them reach.
struct Rig {
    std::vector<std::unique_ptr<Drive>> drives;
    SharedMemory arena;
    std::unique_ptr<Ring> ring;
    std::vector<std::int64_t> regions;
    Launch launch{};

    explicit Rig(const Setup& setup = {}) {
        CHECK(arena.allocate(setup.memory_bytes) == 0);
        std::vector<Target> targets;
        for (u32 at = 0; at < setup.drives; ++at) {
            drives.push_back(std::make_unique<Drive>(setup.soft, setup.controller));
            Drive& drive = *drives.back();
            regions.push_back(drive.memory.add(number(memory()), setup.memory_bytes));
            CHECK(regions.back() >= 0);
            targets.push_back({&drive.controller, &drive.memory, 1});
        }
        nvme::Failure failure;
        ring = Ring::open(targets, setup.ring, failure);
        if (failure) std::fprintf(stderr, "ring: %s\n", failure.what.c_str());
        CHECK(ring != nullptr);
    }
    u8* memory(u64 at = 0) { return arena.at<u8>(at); }
    u8* media(u32 drive, u64 at = 0) { return drives[drive]->soft.media(1) + at; }

    u32 take() {
        u32 id = 0;
        CHECK(ring->get_iocb({&id, 1}) == 0);
        return id;
    }
    u32 prepare(Io op, const Batch& batch) {
        const u32 id = take();
        CHECK(ring->prepare(id, op, batch.arrays()) == 0);
        return id;
    }
    u32 issue(Io op, const Batch& batch, u32 lanes = 64) {
        const u32 id = prepare(op, batch);
        Launch mine;
        CHECK(ring->issue_io({&id, 1}, lanes, mine) == 0);
        return id;
    }
    std::vector<u32> wait(u32 id) {
        std::vector<u32> statuses;
        CHECK(ring->wait_cqe(id, kPatience, statuses) == 0);
        return statuses;
    }
    std::vector<u32> run(Io op, const Batch& batch, u32 lanes = 64) {
        return wait(issue(op, batch, lanes));
    }
    /// One block there and back: the device works.
    void works(u32 device) {
        Batch batch;
        batch.add(device, 4096, number(memory()), 4096);
        for (u32 at = 0; at < 4096; ++at) memory()[at] = u8(at * 7 + device);
        CHECK(run(Io::kWrite, batch) == std::vector<u32>{0});
        CHECK(std::memcmp(memory(), media(device, 4096), 4096) == 0);
        std::memset(memory(), 0, 4096);
        CHECK(run(Io::kRead, batch) == std::vector<u32>{0});
        CHECK(std::memcmp(memory(), media(device, 4096), 4096) == 0 &&
              memory()[1] == u8(7 + device));
    }
    /// Reads of a page each, at pages from `page` on in memory, from all devices in turn.
    Batch pages(u32 count, u64 page, u32 devices = 1) {
        Batch batch;
        for (u32 at = 0; at < count; ++at)
            batch.add(at % devices, at / devices * kPage, number(memory((page + at) * kPage)),
                      kPage);
        return batch;
    }
};

void scramble(u8* bytes, u64 length_bytes, u64 seed) {
    std::mt19937_64 engine(seed);
    for (u64 at = 0; at + 8 <= length_bytes; at += 8) {
        const u64 word = engine();
        std::memcpy(bytes + at, &word, 8);
    }
}

bool all(const std::vector<u32>& statuses, u32 value) {
    return std::all_of(statuses.begin(), statuses.end(), [=](u32 one) { return one == value; });
}

/// What was read is what the devices hold.
bool same(Rig& rig, const Batch& batch, std::size_t index) {
    return std::memcmp(reinterpret_cast<const void*>(batch.address[index]),
                       rig.media(batch.device[index], batch.offset[index]),
                       batch.length[index]) == 0;
}
bool same(Rig& rig, const Batch& batch) {
    for (std::size_t at = 0; at < batch.size(); ++at) {
        if (!same(rig, batch, at)) return false;
    }
    return true;
}

// ---- states ----
void test_state_table() {
    struct {
        State from;
        Event event;
        State to;
    } const known[] = {
        {State::kFree, Event::kGet, State::kPrepared},
        {State::kPrepared, Event::kPutBack, State::kFree},
        {State::kPrepared, Event::kIssue, State::kIssued},
        {State::kPrepared, Event::kFinish, State::kDone},
        {State::kIssued, Event::kStart, State::kRunning},
        {State::kIssued, Event::kRefuse, State::kDone},
        {State::kRunning, Event::kFinish, State::kDone},
        {State::kDone, Event::kTake, State::kFree},
    };
    u32 allowed = 0;
    for (u32 state = 0; state < kStates + 2; ++state) {
        for (u32 event = 0; event < kEvents; ++event) {
            u32 wanted = kNever;
            for (const auto& one : known) {
                if (u32(one.from) == state && u32(one.event) == event) wanted = u32(one.to);
            }
            CHECK(next_state(state, Event(event)) == wanted);
            allowed += wanted != kNever;
        }
    }
    CHECK(allowed == std::size(known));
}

/// Every call of the ring in every state that a caller can bring an IOCB into.
void test_calls_by_state() {
    Setup setup;
    setup.ring.depth = 2;
    Rig rig(setup);
    Ring& ring = *rig.ring;
    const Batch batch = rig.pages(1, 0);
    std::vector<u32> statuses;
    Launch launch;
    const auto prepare = [&](u32 id) { return ring.prepare(id, Io::kRead, batch.arrays()); };
    const auto issue = [&](u32 id) { return ring.issue_io({&id, 1}, 1, launch); };
    const auto refuse = [&](u32 id) { return ring.refuse({&id, 1}); };
    const auto wait = [&](u32 id) { return ring.wait_cqe(id, kPatience, statuses); };
    const auto refuses_all = [&](u32 id) {
        CHECK(prepare(id) == -EINVAL && issue(id) == -EINVAL && refuse(id) == -EINVAL);
        CHECK(ring.put_back(id) == -EINVAL);
    };
    const u32 id = rig.take();
    CHECK(ring.put_back(id) == 0);
    for (const u32 free : {id, 2u, ~0u}) {  // free, or none of the ring's
        refuses_all(free);
        CHECK(wait(free) == -EINVAL);
    }
    CHECK(rig.take() == id && prepare(id) == 0 && prepare(id) == 0);
    CHECK(refuse(id) == -EINVAL && wait(id) == -EINVAL);
    const u32 twice[] = {id, id};
    CHECK(ring.issue_io(twice, 1, launch) == -EINVAL);
    const u32 bad[] = {id, 1 - id};
    CHECK(ring.issue_io(bad, 1, launch) == -EINVAL);
    CHECK(ring.issue_io({}, 1, launch) == -EINVAL);
    rig.drives[0]->fail(Kind::kHold);
    CHECK(issue(id) == 0);
    while (rig.drives[0]->soft.stats().faults == 0) sched_yield();
    refuses_all(id);
    CHECK(ring.wait_cqe(id, 0, statuses) == -ETIME);
    rig.drives[0]->soft.release();
    while (rig.drives[0]->count(&nvme::QueueStats::completions) == 0) sched_yield();
    CHECK(wait(id) == 0 && statuses == std::vector<u32>{0});
    CHECK(wait(id) == -EINVAL);
    // Nothing to do is done at once, and is waited for all the same.
    CHECK(rig.take() == id && issue(id) == 0 && launch.iocb_count == 0);
    refuses_all(id);
    CHECK(wait(id) == 0 && statuses.empty());
    CHECK(ring.stats().iocbs == 2 && ring.stats().launches == 1 && ring.stats().fragments == 1);
}

void test_depth() {
    Setup setup;
    setup.ring.depth = 3;
    Rig rig(setup);
    for (u32 lap = 0; lap < 5; ++lap) {
        std::vector<u32> ids(4);
        CHECK(rig.ring->get_iocb(ids) == -EAGAIN);
        CHECK(rig.ring->get_iocb({ids.data(), 2}) == 0 && ids[0] != ids[1]);
        CHECK(rig.ring->get_iocb({ids.data() + 2, 2}) == -EAGAIN);  // none rather than one
        CHECK(rig.ring->get_iocb({ids.data() + 2, 1}) == 0);
        for (const u32 id : {0u, 1u, 2u}) CHECK(std::count(ids.begin(), ids.begin() + 3, id) == 1);
        Launch launch;
        for (u32 at = 0; at < 3; ++at)
            CHECK(rig.ring->prepare(ids[at], Io::kRead, rig.pages(9, at * 9).arrays()) == 0);
        CHECK(rig.ring->issue_io({ids.data(), 3}, 2, launch) == 0);
        CHECK(launch.iocb_count == 3 && launch.first[3] == 27 && launch.devices == 1);
        CHECK(rig.ring->get_iocb({ids.data() + 3, 1}) == -EAGAIN);
        for (u32 at = 0; at < 3; ++at) CHECK(all(rig.wait(ids[at]), 0));
    }
}

void test_open_refuses() {
    Drive drive({}, {});
    const auto refused = [&](std::vector<Target> targets, RingOptions options) {
        nvme::Failure failure;
        return Ring::open(targets, options, failure) == nullptr && failure && !failure.what.empty();
    };
    const Target target{&drive.controller, &drive.memory, 1};
    RingOptions options;
    CHECK(!refused({target}, options));
    CHECK(refused({}, options));
    CHECK(refused(std::vector<Target>(kDevicesMax + 1, target), options));
    CHECK(refused({{&drive.controller, &drive.memory, 2}}, options));
    for (const u32 depth : {0u, kDepthMax + 1}) {
        options.depth = depth;
        CHECK(refused({target}, options));
    }
    options.depth = 1;
    options.threads = 0;  // lanes of others need queues of their own
    CHECK(refused({target}, options));
}

void test_prepare_refuses() {
    Rig rig;
    const u32 id = rig.take();
    Batch batch = rig.pages(3, 0);
    const auto prepare = [&](Io op = Io::kRead) {
        return rig.ring->prepare(id, op, batch.arrays());
    };
    CHECK(prepare() == 0 && prepare(Io::kFlush) == -EINVAL);
    for (std::vector<u64>* one : {&batch.offset, &batch.address, &batch.length}) {
        const u64 last = one->back();
        one->pop_back();
        CHECK(prepare() == -EINVAL);
        one->push_back(last);
    }
    batch.device[1] = 1;
    CHECK(prepare() == -EINVAL);
    batch = rig.pages(kFragmentsMax, 0);
    CHECK(prepare() == 0);
    batch = rig.pages(kFragmentsMax + 1, 0);
    CHECK(prepare() == -EINVAL);
    CHECK(rig.ring->put_back(id) == 0);
}

/// Fragments that cannot be sent have their status; those around them go on.
void test_bad_fragments() {
    Setup setup;
    setup.drives = 2;
    Rig rig(setup);
    const u64 size = setup.soft.namespace_bytes, end = number(rig.memory(setup.memory_bytes));
    SharedMemory more;
    CHECK(more.allocate(4 * kPage) == 0);
    const u64 extra = number(more.at<u8>());
    // Two regions side by side, for the first device alone; nobody knows the pages behind them.
    CHECK(rig.drives[0]->memory.add(extra, kPage) >= 0);
    CHECK(rig.drives[0]->memory.add(extra + kPage, kPage) >= 0);
    const u64 here = number(rig.memory(kPage * 64));
    struct {
        u32 device;
        u64 offset, address, length;
        u32 wanted;
    } const cases[] = {
        {0, 0, here, 0, status::kInvalidField},
        {0, 0, here, 511, status::kInvalidField},
        {0, 256, here, 512, status::kInvalidField},
        {0, 0, here, u64{1} << 32, status::kInvalidField},
        {0, size, here, 512, status::kLbaRange},
        {0, size - 512, here, 1024, status::kLbaRange},
        {0, ~u64{0} - 511, here, 512, status::kLbaRange},
        {0, 0, here, size + 512, status::kLbaRange},
        {1, size - 512, here + kPage, 512, 0},
        {0, 0, here + 2, 512, status::kBadMemory},
        {0, 0, here + 4, 512, 0},
        {0, 0, end, 512, status::kBadMemory},
        {0, 0, end - 512, 512, 0},
        {0, 0, end - 508, 512, status::kBadMemory},
        {0, 0, ~u64{0} - 511, 512, status::kBadMemory},
        {0, 0, 0, 512, status::kBadMemory},
        {0, 0, extra, kPage, 0},
        {0, 0, extra + kPage, kPage, 0},
        {0, 0, extra + kPage - 512, 1024, status::kBadMemory},
        {0, 0, extra + 2 * kPage, 512, status::kBadMemory},
        {1, 0, extra, kPage, status::kBadMemory},
    };
    scramble(rig.media(0), size, 1);
    scramble(rig.media(1), size, 2);
    Batch batch;
    std::vector<u32> wanted;
    for (const auto& one : cases) {
        batch.add(one.device, one.offset, one.address, one.length);
        wanted.push_back(one.wanted);
        batch.add(1, 8192, number(rig.memory()) + (batch.size() + 1) * kPage, 512);
        wanted.push_back(0);
    }
    CHECK(rig.run(Io::kRead, batch) == wanted);
    for (std::size_t at = 1; at < batch.size(); at += 2) CHECK(same(rig, batch, at));
    const u64 refused =
        u64(std::count_if(wanted.begin(), wanted.end(), [](u32 s) { return s != 0; }));
    CHECK(rig.ring->stats().refused_fragments == refused);
    CHECK(rig.ring->stats().failed_fragments == refused);
    CHECK(rig.drives[0]->soft.stats().bad_pointers == 0 &&
          rig.drives[0]->soft.stats().unmapped == 0);
    // All of one IOCB refused: it ends all the same.
    Batch bad;
    for (u32 at = 0; at < 100; ++at) bad.add(0, 0, 0, 512);
    CHECK(all(rig.run(Io::kRead, bad), status::kBadMemory));
    rig.ring->close();
}

// ---- the table ----
void test_memory_table() {
    Drive drive({}, {});
    nvme::MemoryTable& table = drive.memory;
    constexpr u64 kSpan = 4 * kPage * nvme::kRegionsMax + kPage;
    SharedMemory arena;
    CHECK(arena.allocate(kSpan) == 0);
    const u64 base = number(arena.at<u8>());
    for (const auto& [address, length] : std::vector<std::pair<u64, u64>>{
             {0, kPage}, {base, 0}, {base + 512, kPage}, {base, 512}, {~u64{0} - 4095, 8192}})
        CHECK(table.add(address, length) == -EINVAL);
    // Odd places first, then what lies between: the order of registration is no order of addresses.
    std::vector<std::int64_t> ids(nvme::kRegionsMax);
    for (const u32 parity : {1u, 0u}) {
        for (u32 at = parity; at < nvme::kRegionsMax; at += 2) {
            ids[at] = table.add(base + at * 4 * kPage, (1 + at % 3) * kPage);
            CHECK(ids[at] >= 0);
        }
    }
    CHECK(table.add(base + kSpan - kPage, kPage) == -ENOSPC);
    CHECK(table.remove(ids[7]) == 0 && table.remove(ids[7]) == -ENOENT);
    CHECK(table.remove(-1) == -ENOENT && table.remove(nvme::kRegionsMax) == -ENOENT);
    const u64 hole = base + 7 * 4 * kPage;  // from region 6, of one page, to region 8, of three
    CHECK(table.add(hole - 4 * kPage, kPage) == -EEXIST);
    CHECK(table.add(hole - 5 * kPage, 2 * kPage) == -EEXIST);
    CHECK(table.add(hole + 3 * kPage, 2 * kPage) == -EEXIST);
    CHECK(table.add(hole - 5 * kPage, 12 * kPage) == -EEXIST);
    CHECK(table.add(hole - 3 * kPage, 7 * kPage) == ids[7]);  // fits exactly
    nvme::MemoryTable::Finder finder(table);
    const auto find = [&](u64 address, u64 length) {
        return std::int64_t(finder.find(address, length));
    };
    for (u32 at = 0; at < nvme::kRegionsMax; ++at) {
        if (at >= 6 && at <= 8) continue;
        const u64 first = base + at * 4 * kPage, length = (1 + at % 3) * kPage;
        CHECK(find(first, length) == ids[at] && find(first + length - 1, 1) == ids[at]);
        CHECK(find(first + 1, length) == -1 && find(first + length, 1) == -1);
        CHECK(find(first, ~u64{0}) == -1 && (at == 9 || find(first - 1, 1) == -1));
    }
    CHECK(find(hole - 3 * kPage, 7 * kPage) == ids[7] && find(hole - 3 * kPage, 8 * kPage) == -1);
}

// ---- data ----
/// Cut both memory and devices into fragments that do not overlap, and give them out at random.
Batch random_batch(Rig& rig, const Setup& setup, Random& random, u32 count, u64 most) {
    const u64 block = setup.soft.block_bytes;
    Batch batch;
    u64 at = 4 * random.between(0, 2000);
    std::vector<u64> offset(setup.drives, block * random.between(0, 9));
    for (u32 i = 0; i < count; ++i) {
        const u32 device = u32(random.between(0, setup.drives - 1));
        const u64 longest = random.one_in(4) ? most : std::min(most, 5 * kPage);
        const u64 length = block * random.between(1, longest / block);
        if (at + length > setup.memory_bytes ||
            offset[device] + length > setup.soft.namespace_bytes)
            break;
        batch.add(device, offset[device], number(rig.memory(at)), length);
        offset[device] += length + block * random.between(0, 2);
        at += length + 4 * random.between(0, 300) * random.between(0, 1);
        if (random.one_in(3)) at = (at + kPage - 1) / kPage * kPage;
    }
    // In another order than that of addresses.
    for (std::size_t i = batch.size(); i > 1; --i) {
        const std::size_t other = random.between(0, i - 1);
        std::swap(batch.device[i - 1], batch.device[other]);
        std::swap(batch.offset[i - 1], batch.offset[other]);
        std::swap(batch.address[i - 1], batch.address[other]);
        std::swap(batch.length[i - 1], batch.length[other]);
    }
    return batch;
}

/// Every byte of memory and of all devices is what a model says, also where nothing was sent.
void test_random_transfers(const Setup& setup, u32 rounds, u64 most, u64 seed) {
    Rig rig(setup);
    Random random(seed);
    std::vector<u8> memory(setup.memory_bytes);
    std::vector<std::vector<u8>> media(setup.drives);
    scramble(rig.memory(), setup.memory_bytes, seed);
    std::memcpy(memory.data(), rig.memory(), memory.size());
    for (u32 drive = 0; drive < setup.drives; ++drive) {
        scramble(rig.media(drive), setup.soft.namespace_bytes, seed + drive + 1);
        media[drive].assign(rig.media(drive), rig.media(drive, setup.soft.namespace_bytes));
    }
    u64 sent = 0;
    for (u32 round = 0; round < rounds; ++round) {
        const Batch batch = random_batch(rig, setup, random, u32(random.between(1, 300)), most);
        const Io op = random.one_in(2) ? Io::kRead : Io::kWrite;
        for (std::size_t i = 0; i < batch.size(); ++i) {
            u8* ours = &memory[batch.address[i] - number(rig.memory())];
            u8* theirs = &media[batch.device[i]][batch.offset[i]];
            std::memcpy(op == Io::kRead ? ours : theirs, op == Io::kRead ? theirs : ours,
                        batch.length[i]);
        }
        CHECK(all(rig.run(op, batch, u32(random.between(1, 4))), 0));
        sent += batch.size();
        CHECK(std::memcmp(memory.data(), rig.memory(), memory.size()) == 0);
        for (u32 drive = 0; drive < setup.drives; ++drive)
            CHECK(std::memcmp(media[drive].data(), rig.media(drive), media[drive].size()) == 0);
    }
    CHECK(rig.ring->stats().fragments == sent && rig.ring->stats().failed_fragments == 0);
    for (const auto& drive : rig.drives) {
        CHECK(drive->soft.stats().unmapped == 0 && drive->soft.stats().bad_pointers == 0);
        CHECK(drive->count(&nvme::QueueStats::unknown) == 0);
        CHECK(drive->count(&nvme::QueueStats::bad_head) == 0);
    }
}

void test_all_shapes(u64 seed) {
    struct {
        u32 drives, pairs, entries, threads, block, transfer_shift;
        bool sgl, shadow;
        u64 most;
    } const shapes[] = {
        {1, 1, 64, 1, 512, 7, true, true, 1u << 20},
        {1, 1, 2, 1, 512, 1, false, false, 64u << 10},  // one command at a time, of 8 KiB at most
        {1, 2, 16, 3, 4096, 2, false, true,
         256u << 10},  // lanes with queues of their own, MDTS 16 KiB
        {3, 1, 3, 2, 512, 3, true, true, 128u << 10},
        {2, 3, 32, 3, 512, 0, false, false, 4u << 20},  // no MDTS: lists of several pages
    };
    for (const auto& shape : shapes) {
        Setup setup;
        setup.drives = shape.drives;
        setup.controller.queue_pairs = shape.pairs;
        setup.controller.queue_entries = shape.entries;
        setup.controller.shadow_doorbells = shape.shadow;
        setup.ring.threads = shape.threads;
        setup.soft.block_bytes = shape.block;
        setup.soft.transfer_shift = shape.transfer_shift;
        setup.soft.sgl = shape.sgl;
        test_random_transfers(setup, 12, shape.most, seed++);
    }
}

/// Around the ends of list pages every start, every length.
void test_list_links() {
    Setup setup;
    setup.soft.sgl = false;
    setup.soft.transfer_shift = 0;
    Rig rig(setup);
    scramble(rig.media(0), setup.soft.namespace_bytes, 3);
    const u64 link = nvme::kListAddresses * kPage;
    for (u64 start = link - 4 * kPage; start <= link + kPage; start += kPage) {
        for (const u64 within : {u64{0}, u64{4}, u64{2048}, kPage - 4}) {
            Batch batch;
            for (u64 length = 512; length <= 6 * kPage; length += length < kPage ? 512 : 1536)
                batch.add(0, batch.size() * 6 * kPage, number(rig.memory(start + within)), length);
            for (std::size_t at = 0; at < batch.size(); ++at) {
                Batch one;
                one.add(0, batch.offset[at], batch.address[at], batch.length[at]);
                rig.memory(start + within)[batch.length[at]] = 0x5a;
                CHECK(rig.run(Io::kRead, one) == std::vector<u32>{0} && same(rig, one));
                CHECK(rig.memory(start + within)[batch.length[at]] == 0x5a);
            }
        }
    }
    CHECK(rig.drives[0]->soft.stats().bad_pointers == 0 &&
          rig.drives[0]->soft.stats().unmapped == 0);
}

/// Full IOCBs in flight together, issued one by one and by one launch, for many laps of the queue.
void test_launches_in_flight() {
    Setup setup;
    setup.drives = 2;
    setup.ring.threads = 2;
    setup.memory_bytes = 2048 * 4 * 512;
    Rig rig(setup);
    for (u32 drive : {0u, 1u}) scramble(rig.media(drive), setup.soft.namespace_bytes, drive);
    for (u32 lap = 0; lap < 3; ++lap) {
        std::memset(rig.memory(), int(lap), setup.memory_bytes);
        std::vector<u32> ids;
        std::vector<Batch> batches(4);
        for (u32 part = 0; part < 4; ++part) {
            for (u32 at = 0; at < kFragmentsMax; ++at)
                batches[part].add(at % 2, (at * 7 + lap + part) % 4096 * 512,
                                  number(rig.memory((part * kFragmentsMax + at) * 512)), 512);
            ids.push_back(rig.prepare(Io::kRead, batches[part]));
        }
        Launch launch;
        if (lap % 2 == 0) {
            CHECK(rig.ring->issue_io(ids, 2, launch) == 0 && launch.devices == 3);
        } else {
            for (const u32& id : ids) CHECK(rig.ring->issue_io({&id, 1}, 1 + lap % 2, launch) == 0);
        }
        for (u32 part = 4; part-- > 0;)
            CHECK(all(rig.wait(ids[part]), 0) && same(rig, batches[part]));
    }
    CHECK(rig.ring->stats().launches == 1 + 4 + 1);
}

void test_many_callers() {
    Setup setup;
    setup.ring.threads = 2;
    setup.ring.depth = 6;
    setup.controller.queue_pairs = 2;
    setup.controller.queue_entries = 8;
    Rig rig(setup);
    scramble(rig.media(0), setup.soft.namespace_bytes, 5);
    std::vector<std::thread> callers;
    for (u32 caller = 0; caller < 3; ++caller) {
        callers.emplace_back([&, caller] {
            for (u32 round = 0; round < 60; ++round) {
                Batch batch;
                for (u32 at = 0; at < 20; ++at)
                    batch.add(0, (round * 20 + at) % 2000 * kPage,
                              number(rig.memory((caller * 32 + at) * kPage)), kPage);
                CHECK(all(rig.run(Io::kRead, batch, 1 + round % 2), 0));
                CHECK(same(rig, batch));
                std::memset(rig.memory(caller * 32 * kPage), 0, 20 * kPage);
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(rig.ring->stats().iocbs == 180);
}

void test_prepare_allocates_nothing() {
    Setup setup;
    setup.drives = 2;
    Rig rig(setup);
    // Regions that alternate from fragment to fragment.
    SharedMemory more;
    CHECK(more.allocate(200 * kPage) == 0);
    for (u32 at = 0; at < 100; ++at)
        CHECK(rig.drives[0]->memory.add(number(more.at<u8>(at * 2 * kPage)), kPage) >= 0);
    Batch batch = rig.pages(kFragmentsMax, 0, 2);
    for (u32 at = 0; at < kFragmentsMax; ++at) {
        if (batch.device[at] == 0)
            batch.address[at] = number(more.at<u8>(at / 2 % 100 * 2 * kPage));
    }
    const u32 id = rig.take();
    const u64 before = allocations;
    delete new int(1);
    CHECK(allocations == before + 1);  // it counts
    CHECK(rig.ring->prepare(id, Io::kRead, batch.arrays()) == 0);
    CHECK(rig.ring->prepare(id, Io::kWrite, batch.arrays()) == 0);
    CHECK(allocations == before + 1);
    CHECK(rig.ring->stats().refused_fragments == 0);
    CHECK(rig.ring->put_back(id) == 0);
    rig.ring->close();
}

// ---- failures ----
void test_status_of_one_fragment() {
    Rig rig;
    scramble(rig.media(0), 1u << 20, 1);
    for (u32 at : {0u, 7u, 19u}) {
        const Batch batch = rig.pages(20, 0);
        std::memset(rig.memory(), 0, 20 * kPage);
        rig.drives[0]->fail(Kind::kStatus, 1, at, status::kReadError | status::kDoNotRetry);
        const std::vector<u32> statuses = rig.run(Io::kRead, batch);
        for (u32 i = 0; i < 20; ++i) {
            const u32 wanted = i == at ? status::kReadError | status::kDoNotRetry : 0;
            CHECK(statuses[i] == wanted && same(rig, batch, i) == (i != at));
        }
    }
    // In the middle of a fragment of several commands: what follows is not sent.
    Setup setup;
    setup.soft.transfer_shift = 0;
    setup.soft.transfer_shift = 2;
    Rig split(setup);
    scramble(split.media(0), 1u << 20, 1);
    Batch batch;
    batch.add(0, 0, number(split.memory()), 10 * 16384);
    split.drives[0]->fail(Kind::kStatus, 1, 4, status::kReadError);
    CHECK(split.run(Io::kRead, batch) == std::vector<u32>{status::kReadError});
    CHECK(std::memcmp(split.memory(), split.media(0), 4 * 16384) == 0);
    CHECK(std::memcmp(split.memory(4 * 16384), split.media(0, 4 * 16384), 16384) != 0);
    CHECK(split.drives[0]->soft.stats().faults == 1);
    CHECK(split.drives[0]->count(&nvme::QueueStats::completions) == 5);
}

/// What a controller may do, or does wrong in a way that can be seen through: every byte is right.
void test_harmless_faults() {
    for (const Kind kind : {Kind::kDelay, Kind::kRepeat, Kind::kTorn, Kind::kWrongId,
                            Kind::kWrongQueue, Kind::kWrongHead}) {
        Setup setup;
        setup.controller.queue_entries = 16;
        Rig rig(setup);
        scramble(rig.media(0), 1u << 20, 9);
        for (u32 round = 0; round < 4; ++round) {
            std::memset(rig.memory(), 0, 100 * kPage);
            rig.drives[0]->fail(kind, 30, 3);
            const Batch batch = rig.pages(100, 0);
            CHECK(all(rig.run(Io::kRead, batch), 0) && same(rig, batch));
        }
        CHECK(rig.drives[0]->soft.stats().faults == 120);
    }
}

/// What no queue can notice is noticed by the comparison that these tests rely on.
void test_silent_faults_are_seen_here() {
    for (const Kind kind : {Kind::kFlip, Kind::kShort}) {
        Rig rig;
        scramble(rig.media(0), 1u << 20, 9);
        rig.drives[0]->fail(kind, 1, 11);
        const Batch batch = rig.pages(20, 0);
        CHECK(all(rig.run(Io::kRead, batch), 0));
        for (u32 at = 0; at < 20; ++at) CHECK(same(rig, batch, at) == (at != 11));
    }
}

/// A command without an answer ends with its launch's timeout; its memory is the device's until the
/// reset, after which everything goes on.
void test_timeout_and_reset(Kind kind) {
    Setup setup;
    setup.drives = 2;
    setup.ring.timeout_ns = kSecond / 5;
    Rig rig(setup);
    Drive& bad = *rig.drives[0];
    for (u32 lap = 0; lap < 3; ++lap) {
        for (u32 drive : {0u, 1u}) scramble(rig.media(drive), 1u << 20, lap + drive);
        bad.fail(kind, 1, 5);
        const Batch batch = rig.pages(40, 0, 2);
        const std::vector<u32> statuses = rig.run(Io::kRead, batch);
        for (u32 at = 0; at < 40; ++at) {
            CHECK(statuses[at] == (at == 10 ? status::kTimeout : 0));
            if (at != 10) CHECK(same(rig, batch, at));
        }
        CHECK(bad.memory.remove(rig.regions[0]) == -EBUSY);
        CHECK(rig.drives[1]->memory.remove(rig.regions[1]) == 0);  // nothing was lost there
        rig.regions[1] = rig.drives[1]->memory.add(number(rig.memory()), setup.memory_bytes);
        rig.works(0);  // what did not hang goes on, before the reset too
        if (kind == Kind::kHold && lap % 2 == 0) {
            bad.soft.release();
            // It comes after all, into memory that is still the device's, and hits nobody.
            while (bad.count(&nvme::QueueStats::late) == 0) rig.works(0);
        }
        std::string what;
        CHECK(rig.ring->reset_device(0, kPatience, what) == 0);
        CHECK(bad.memory.remove(rig.regions[0]) == 0);
        rig.regions[0] = bad.memory.add(number(rig.memory()), setup.memory_bytes);
        CHECK(rig.regions[0] >= 0);
        rig.works(0);
        rig.works(1);
        CHECK(bad.soft.stats().unmapped == 0);
    }
    CHECK(rig.ring->stats().timeouts == 3 && rig.ring->stats().resets == 3);
}

/// A device that answers nothing fills its queue, and holds up no fragment of others.
void test_hang_holds_up_nobody() {
    Setup setup;
    setup.drives = 3;
    setup.controller.queue_entries = 4;
    setup.ring.timeout_ns = 3 * kSecond;  // what works needs some ms
    setup.memory_bytes = 2048 * kPage;
    Rig rig(setup);
    rig.drives[1]->fail(Kind::kHold, 1000);
    for (u32 drive : {0u, 2u}) scramble(rig.media(drive), 4u << 20, drive);
    const Batch batch = rig.pages(1800, 0, 3);
    const std::vector<u32> statuses = rig.run(Io::kRead, batch, 1);
    u32 hung = 0, never = 0;
    for (u32 at = 0; at < batch.size(); ++at) {
        if (at % 3 != 1) CHECK(statuses[at] == 0 && same(rig, batch, at));
        if (at % 3 == 1) (statuses[at] == status::kTimeout ? hung : never) += 1;
        if (at % 3 == 1)
            CHECK(statuses[at] == status::kTimeout || statuses[at] == status::kNotIssued);
    }
    CHECK(hung == 3 && never == 597);
    std::string what;
    rig.drives[1]->soft.clear_faults();
    CHECK(rig.ring->reset_device(1, kPatience, what) == 0);
    for (u32 drive : {0u, 1u, 2u}) rig.works(drive);
}

/// A reset waits for launches that touch its device, and keeps new ones off; others go on.
void test_reset_beside_others() {
    Setup setup;
    setup.drives = 2;
    setup.ring.threads = 2;
    Rig rig(setup);
    rig.drives[0]->fail(Kind::kHold);
    const u32 held = rig.issue(Io::kRead, rig.pages(1, 100), 1);
    while (rig.drives[0]->soft.stats().faults == 0) sched_yield();
    std::string what;
    CHECK(rig.ring->reset_device(0, kSecond / 50, what) == -ETIME && !what.empty());
    CHECK(rig.ring->reset_device(2, 0, what) == -EINVAL);
    std::atomic<int> ended{1};
    std::thread resetting([&] {
        std::string why;
        ended = rig.ring->reset_device(0, kPatience, why);
    });
    const Batch page = rig.pages(1, 50);
    Launch launch;
    for (u32 round = 0;; ++round) {
        const u32 id = rig.prepare(Io::kRead, page);
        const Status sent = rig.ring->issue_io({&id, 1}, 1, launch);
        if (sent != 0) {
            CHECK(sent == -EBUSY && rig.ring->put_back(id) == 0);
            break;
        }
        // Since a reset failed the device takes nothing.
        CHECK(rig.wait(id) == std::vector<u32>{status::kNotIssued} && round < 100'000);
    }
    std::string why;
    CHECK(rig.ring->reset_device(0, kPatience, why) == -EBUSY);
    for (u32 round = 0; round < 20; ++round) rig.works(1);
    CHECK(ended == 1);
    rig.drives[0]->soft.release();
    resetting.join();
    CHECK(ended == 0 && rig.wait(held) == std::vector<u32>{0});
    // Launches of the other device do not keep a reset waiting, unless they touch this one too:
    // their lanes poll its queues until all has ended.
    rig.drives[1]->fail(Kind::kHold);
    u32 ids[] = {rig.prepare(Io::kRead, rig.pages(1, 100)), rig.take()};
    Batch other;
    other.add(1, 0, number(rig.memory(101 * kPage)), kPage);
    CHECK(rig.ring->prepare(ids[1], Io::kRead, other.arrays()) == 0);
    CHECK(rig.ring->issue_io(ids, 1, launch) == 0 && rig.wait(ids[0]) == std::vector<u32>{0});
    CHECK(rig.ring->reset_device(0, kSecond / 50, what) == -ETIME);
    rig.drives[1]->soft.release();
    CHECK(rig.wait(ids[1]) == std::vector<u32>{0});
    rig.drives[1]->fail(Kind::kHold);
    ids[0] = rig.issue(Io::kRead, other, 1);
    while (rig.drives[1]->soft.stats().faults < 2) sched_yield();
    CHECK(rig.ring->reset_device(0, kPatience, what) == 0);
    rig.drives[1]->soft.release();
    CHECK(rig.wait(ids[0]) == std::vector<u32>{0});
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop) rig.works(1);
    });
    for (u32 round = 0; round < 5; ++round) CHECK(rig.ring->reset_device(0, kPatience, what) == 0);
    stop = true;
    busy.join();
    rig.works(0);
}

/// A controller that dies ends its commands long before their timeout, and nobody else's.
void test_death(Kind kind) {
    Setup setup;
    setup.drives = 2;
    setup.ring.threads = 2;
    setup.controller.queue_entries = 16;
    Rig rig(setup);
    for (u32 lap = 0; lap < 3; ++lap) {
        for (u32 drive : {0u, 1u}) scramble(rig.media(drive), 1u << 20, lap + drive);
        rig.drives[0]->fail(kind, 1, 20);
        const Batch batch = rig.pages(200, 0, 2);
        const std::vector<u32> statuses = rig.run(Io::kRead, batch, 1 + lap % 2);
        u32 gone = 0;
        for (u32 at = 0; at < 200; ++at) {
            if (at % 2 == 1) CHECK(statuses[at] == 0);
            if (at % 2 == 0 && statuses[at] != 0) {
                CHECK(statuses[at] == status::kDeviceGone || statuses[at] == status::kNotIssued);
                ++gone;
            }
            if (statuses[at] == 0) CHECK(same(rig, batch, at));
        }
        CHECK(gone >= 100 - 20 - 1);
        CHECK(!rig.drives[0]->controller.is_open() && rig.ring->stats().timeouts == 0);
        CHECK(!rig.drives[0]->controller.close_if_dead());
        rig.drives[0]->controller.close_queues();
        CHECK(rig.drives[0]->controller.queue(0).abandoned());  // still
        // More is refused by the closed queues at once.
        for (const u32 one : rig.run(Io::kRead, rig.pages(9, 0))) CHECK(one == status::kDeviceGone);
        // Nothing reaches its memory any more.
        CHECK(rig.drives[0]->memory.remove(rig.regions[0]) == 0);
        rig.regions[0] = rig.drives[0]->memory.add(number(rig.memory()), setup.memory_bytes);
        rig.works(1);
        std::string what;
        if (kind == Kind::kGone) {
            CHECK(rig.ring->reset_device(0, kPatience, what) == -ENODEV && !what.empty());
            CHECK(rig.run(Io::kRead, rig.pages(1, 0)) == std::vector<u32>{status::kDeviceGone});
            rig.drives[0]->soft.plug_in();
            while (rig.drives[0]->controller.dead()) sched_yield();
        }
        CHECK(rig.ring->reset_device(0, kPatience, what) == 0);
        rig.works(0);
        CHECK(!rig.drives[0]->controller.close_if_dead());  // it lives
        CHECK(rig.drives[0]->controller.is_open());
    }
}

void test_unregister_in_use() {
    Rig rig;
    Drive& drive = *rig.drives[0];
    const auto removed = [&] { return drive.memory.remove(rig.regions[0]); };
    const u32 id = rig.prepare(Io::kRead, rig.pages(3, 0));
    CHECK(removed() == -EBUSY && rig.ring->put_back(id) == 0 && removed() == 0);
    rig.regions[0] = drive.memory.add(number(rig.memory()), 1u << 20);
    // Prepared anew with other memory: the first is free.
    SharedMemory more;
    CHECK(more.allocate(kPage) == 0);
    const std::int64_t other = drive.memory.add(number(more.at<u8>()), kPage);
    CHECK(rig.prepare(Io::kRead, rig.pages(3, 0)) == id);
    Batch batch;
    batch.add(0, 0, number(more.at<u8>()), kPage);
    CHECK(rig.ring->prepare(id, Io::kRead, batch.arrays()) == 0);
    CHECK(removed() == 0 && drive.memory.remove(other) == -EBUSY);
    drive.fail(Kind::kHold);
    Launch launch;
    CHECK(rig.ring->issue_io({&id, 1}, 1, launch) == 0);
    while (drive.soft.stats().faults == 0) sched_yield();
    CHECK(drive.memory.remove(other) == -EBUSY);
    drive.soft.release();
    CHECK(rig.wait(id) == std::vector<u32>{0});
    CHECK(drive.memory.remove(other) == 0);
    // What is gone is not found.
    CHECK(rig.run(Io::kRead, batch) == std::vector<u32>{status::kBadMemory});
    CHECK(drive.soft.stats().unmapped == 0);
}

void test_close_in_flight() {
    Setup setup;
    setup.ring.timeout_ns = kSecond / 5;
    Rig rig(setup);
    rig.drives[0]->fail(Kind::kHold, 3);
    const u32 first = rig.issue(Io::kRead, rig.pages(2, 0));
    const u32 second = rig.issue(Io::kRead, rig.pages(2, 2));
    const u32 unsent = rig.prepare(Io::kRead, rig.pages(2, 4));
    while (rig.drives[0]->soft.stats().faults == 0) sched_yield();
    std::thread waiting([&] {
        const std::vector<u32> statuses = rig.wait(first);
        CHECK(all(statuses, status::kTimeout));
    });
    std::thread closing([&] { rig.ring->close(); });
    rig.ring->close();
    closing.join();
    waiting.join();
    CHECK(rig.wait(second) == (std::vector<u32>{status::kTimeout, 0}));
    Launch launch;
    u32 id = 0;
    CHECK(rig.ring->issue_io({&unsent, 1}, 1, launch) == -ESHUTDOWN);
    CHECK(rig.ring->put_back(unsent) == 0 && rig.ring->get_iocb({&id, 1}) == -ESHUTDOWN);
    CHECK(rig.drives[0]->memory.remove(rig.regions[0]) == -EBUSY);  // held commands may still come
    rig.drives[0]->controller.close();
    rig.ring->close();
}

/// Controller commands of the CPU's own, and questions, while another thread resets it.
void test_flush_while_reset() {
    Rig rig;
    nvme::Controller& controller = rig.drives[0]->controller;
    std::atomic<bool> stop{false};
    std::atomic<u32> good{0};
    std::vector<std::thread> threads;
    for (u32 thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&, thread] {
            std::vector<u8> page(kPage);
            while (!stop) {
                const u32 ended = thread == 0 ? controller.flush(1, kPatience)
                                              : controller.transfer(Io::kRead, 1, 0, page.data(),
                                                                    kPage, kPatience);
                CHECK(ended == 0 || ended == status::kDeviceGone || ended == status::kNotIssued);
                CHECK(controller.facts().namespaces.size() == 1);
                if (ended == 0) ++good;
            }
        });
    }
    std::string what;
    for (u32 round = 0; round < 20; ++round) {
        const u32 before = good;
        CHECK(rig.ring->reset_device(0, kPatience, what) == 0);
        while (good == before) sched_yield();
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    rig.works(0);
}

// ---- lanes of others ----
/// Threads that go round together, as lanes of a GPU warp do.
struct Team {
    struct Meeting {
        explicit Meeting(u32 size) : values(size), barrier(size) {}
        std::vector<u32> values;
        std::barrier<> barrier;
    };
    Meeting& meeting;
    u32 number, size, first, all;

    u32 lane() const { return first + number; }
    u32 lanes() const { return all; }
    u32 index() const { return first / size; }
    bool leader() const { return number == 0; }
    void sync() const { meeting.barrier.arrive_and_wait(); }
    template <class Fold>
    u32 fold(u32 mine, u32 start, Fold with) const {
        meeting.values[number] = mine;
        sync();
        for (const u32 value : meeting.values) start = with(start, value);
        sync();
        return start;
    }
    bool any(bool mine) const {
        return fold(mine, 0, [](u32 a, u32 b) { return a | b; }) != 0;
    }
    u32 unite(u32 mask) const {
        return fold(mask, 0, [](u32 a, u32 b) { return a | b; });
    }
    u32 sum(u32 mine) const {
        return fold(mine, 0, [](u32 a, u32 b) { return a + b; });
    }
    u32 share(u32 value) const { return sum(leader() ? value : 0); }
};

Setup external() {
    Setup setup;
    setup.ring.threads = 0;
    setup.controller.queue_pairs = 3;
    setup.controller.queue_entries = 16;
    return setup;
}

/// Run a launch on teams of threads.
void run_teams(Ring& ring, const Launch& launch, u32 teams, u32 size) {
    View& view = const_cast<View&>(ring.view());
    std::vector<std::unique_ptr<Team::Meeting>> meetings;
    std::vector<std::thread> threads;
    for (u32 team = 0; team < teams; ++team)
        meetings.push_back(std::make_unique<Team::Meeting>(size));
    for (u32 team = 0; team < teams; ++team) {
        for (u32 at = 0; at < size; ++at) {
            threads.emplace_back([&, at, team] {
                run(view, launch, Team{*meetings[team], at, size, team * size, teams * size});
            });
        }
    }
    for (std::thread& thread : threads) thread.join();
}

void test_teams() {
    Setup setup = external();
    setup.drives = 2;
    Rig rig(setup);
    for (u32 drive : {0u, 1u}) scramble(rig.media(drive), 1u << 20, drive);
    for (u32 lap = 0; lap < 3; ++lap) {
        std::memset(rig.memory(), 0, 1u << 20);
        // Fewer fragments than lanes in the first of them.
        const Batch few = rig.pages(3, 0, 2), many = rig.pages(100, 8, 2);
        const u32 ids[] = {rig.prepare(Io::kRead, few), rig.prepare(Io::kRead, many)};
        Launch launch;
        CHECK(rig.ring->issue_io(ids, 1, launch) == 0);
        run_teams(*rig.ring, launch, 2, 3);
        CHECK(all(rig.wait(ids[0]), 0) && all(rig.wait(ids[1]), 0));
        CHECK(same(rig, few) && same(rig, many));
    }
    CHECK(rig.drives[0]->controller.queue(0).stats().completions == 0);  // the CPU's own
    CHECK(rig.drives[0]->controller.queue(1).stats().completions > 0);
    CHECK(rig.drives[0]->controller.queue(2).stats().completions > 0);
}

/// A deadline that only one lane of a team sees ends all of them.
void test_team_gives_up() {
    Setup setup = external();
    setup.ring.timeout_ns = kSecond / 5;
    Rig rig(setup);
    rig.drives[0]->fail(Kind::kLose, 1, 4);
    const Batch batch = rig.pages(50, 0);
    const u32 id = rig.prepare(Io::kRead, batch);
    Launch launch;
    CHECK(rig.ring->issue_io({&id, 1}, 1, launch) == 0);
    run_teams(*rig.ring, launch, 1, 3);
    const std::vector<u32> statuses = rig.wait(id);
    CHECK(std::count(statuses.begin(), statuses.end(), status::kTimeout) == 1);
    CHECK(std::count(statuses.begin(), statuses.end(), 0u) == 49);
}

void test_refuse() {
    Setup setup = external();
    setup.ring.timeout_ns = kSecond / 5;
    Rig rig(setup);
    Batch batch = rig.pages(3, 0);
    batch.address[1] = 0;
    u32 id = rig.prepare(Io::kRead, batch);
    Launch launch;
    CHECK(rig.ring->issue_io({&id, 1}, 1, launch) == 0);
    CHECK(rig.drives[0]->memory.remove(rig.regions[0]) == -EBUSY);
    CHECK(rig.ring->refuse({&id, 1}) == 0 && rig.ring->refuse({&id, 1}) == -EINVAL);
    CHECK(rig.wait(id) ==
          (std::vector<u32>{status::kNotIssued, status::kBadMemory, status::kNotIssued}));
    CHECK(rig.drives[0]->memory.remove(rig.regions[0]) == 0);  // nothing was sent
    rig.regions[0] = rig.drives[0]->memory.add(number(rig.memory()), 1u << 20);
    // Never launched: close does not wait for ever, and leaves the memory alone.
    id = rig.issue(Io::kRead, rig.pages(3, 0));
    rig.ring->close();
    CHECK(rig.drives[0]->memory.remove(rig.regions[0]) == -EBUSY);
    CHECK(rig.ring->refuse({&id, 1}) == 0);
    CHECK(all(rig.wait(id), status::kNotIssued));
    CHECK(rig.drives[0]->memory.remove(rig.regions[0]) == 0);
}

// ---- doorbells ----
/// One lane, and in the same thread a controller that takes a step at each turn of the lane: what
/// is rung is fetched, and `due(turn)` of the oldest are completed.
struct Stepper : Alone {
    struct Model {
        std::function<u32(u32)> due;
        std::vector<nvme::Command> sq;
        std::vector<nvme::Completion> cq;
        std::vector<u64> marks, owners;
        std::vector<u32> next;
        u32 sq_doorbell = 0, cq_doorbell = 0, head = 0, tail = 0, phase = 1, turns = 0;
        u32 first_bell = 0;  // the turn of the first doorbell
        std::deque<u16> fetched;

        explicit Model(u32 entries)
            : sq(entries), cq(entries), marks(entries), owners(entries - 1), next(entries - 1) {}
        void step() {
            ++turns;
            // A lane meets its group before it rings: this bell is of the turn before.
            if (first_bell == 0 && sq_doorbell != head) first_bell = turns - 1;
            for (; head != sq_doorbell; head = (head + 1) % u32(sq.size()))
                fetched.push_back(sq[head].id);
            for (u32 left = due(turns); left > 0 && !fetched.empty(); --left) {
                nvme::Completion& entry = cq[tail];
                entry.head_and_queue = head | 1u << 16;
                entry.id_and_status = fetched.front() | phase << 16;
                fetched.pop_front();
                if (++tail == cq.size()) tail = 0, phase ^= 1;
            }
        }
    };
    Model* model;
    void sync() const { model->step(); }
};

/// Doorbells of the submission queue for `count` fragments; nothing here depends on time.
u64 doorbells(u32 count, u32 entries, std::function<u32(u32)> due, u32* first_bell = nullptr,
              u32 commands_each = 1) {
    Stepper::Model model(entries);
    model.due = std::move(due);
    auto queue = std::make_unique<nvme::Queue>();
    nvme::QueueMemory memory{};
    memory.sq = model.sq.data();
    memory.cq = model.cq.data();
    memory.marks = model.marks.data();
    memory.id_owner = model.owners.data();
    memory.id_next = model.next.data();
    memory.sq_doorbell = &model.sq_doorbell;
    memory.cq_doorbell = &model.cq_doorbell;
    queue->reset(memory, 1, entries, entries, entries - 1);
    const nvme::Region region{kPage, kPage * 64, kPage, 0, nullptr, 1, 0};
    SharedMemory iocb_memory;
    CHECK(iocb_memory.allocate(sizeof(Iocb)) == 0);
    u32 word = 0;
    View view{};
    view.iocbs = iocb_memory.at<Iocb>();
    view.words = &word;
    view.depth = view.device_count = 1;
    view.devices[0] = {{queue.get()}, &region, 1, 1, 9, 512, 1, 0};
    Iocb& iocb = view.iocbs[0];
    iocb.state = u32(State::kIssued);
    iocb.op = u32(Io::kRead);
    iocb.count = iocb.left = count;
    iocb.generation = 1;
    for (u32 at = 0; at < count; ++at)
        iocb.fragments[at] = {kPage, at * u64{8192}, commands_each * 512, 0, 0};
    Launch launch{};
    launch.timeout_ns = kPatience;
    launch.iocb_count = launch.devices = 1;
    launch.first[1] = count;
    Stepper group{{0, 1}, &model};
    run(view, launch, group);
    CHECK(word == 1 && iocb.state == u32(State::kDone));
    for (u32 at = 0; at < count; ++at) CHECK(iocb.work[at].status == 0);
    if (first_bell != nullptr) *first_bell = model.first_bell;
    return queue->stats().sq_doorbells;
}

void test_doorbells() {
    // However fast completions come, one doorbell covers at least 32 commands; the rest rings once.
    for (const u32 each : {1u, 2u, 7u, 31u, 32u, 33u, 64u, 200u}) {
        const u64 bells = doorbells(2048, 256, [=](u32) { return each; });
        CHECK(bells <= 2048 / kRingCommands);
    }
    CHECK(doorbells(2048, 256, [](u32 turn) { return turn % 5 == 0 ? 3u : 0u; }) <= 64);
    CHECK(doorbells(2048, 256, [](u32 turn) { return turn % (kIdleTurns - 1) == 0 ? 1u : 0u; }) <=
          64);
    // Enough at once is rung for at once, and so is all that there is.
    u32 first = 0;
    for (const u32 count : {1u, 5u, 255u}) {
        CHECK(doorbells(
                  count, 256, [](u32) { return 64u; }, &first) == 1 &&
              first == 1);
    }
    // Fragments of several commands, of which each has one in flight at a time.
    for (const u32 each : {1u, 7u, 33u}) {
        const u64 bells = doorbells(
            128, 256, [=](u32) { return each; }, nullptr, 16);
        CHECK(bells <= 128 * 16 / kRingCommands);
    }
    // A queue that takes fewer than 32 is rung for when it is full.
    CHECK(doorbells(
              70, 8, [](u32) { return 64u; }, &first) == 10 &&
          first == 1);
    // A device that answers seldom is not kept waiting for 32: each answer makes room for one more.
    const u64 seldom = doorbells(300, 256, [](u32 turn) { return turn % 50 == 0 ? 1u : 0u; });
    CHECK(seldom == 1 + 300 - 255);
}

}  // namespace

int main(int count, char** arguments) {
    const u64 seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    test_state_table();
    test_calls_by_state();
    test_depth();
    test_open_refuses();
    test_prepare_refuses();
    test_bad_fragments();
    test_memory_table();
    test_all_shapes(seed);
    test_list_links();
    test_launches_in_flight();
    test_many_callers();
    test_prepare_allocates_nothing();
    test_status_of_one_fragment();
    test_harmless_faults();
    test_silent_faults_are_seen_here();
    for (const Kind kind : {Kind::kDrop, Kind::kLose, Kind::kHold}) test_timeout_and_reset(kind);
    test_hang_holds_up_nobody();
    test_reset_beside_others();
    for (const Kind kind : {Kind::kFatal, Kind::kGone}) test_death(kind);
    test_unregister_in_use();
    test_close_in_flight();
    test_flush_while_reset();
    test_teams();
    test_team_gives_up();
    test_refuse();
    test_doorbells();
    std::puts("gio_test: ok");
    return 0;
}
