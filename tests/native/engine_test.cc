// The engine on real files, from many threads; meant to be run plain and under sanitizers.
//
//   engine_test [DIRECTORY]     on a file system with direct I/O; default: the current one
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "tutti/hash.h"
#include "tutti/uring_engine.h"

using namespace tutti;
using namespace std::chrono_literals;

namespace {

std::string directory = ".";

/// A file of zeros that goes away with the object.
class File {
public:
    explicit File(std::uint64_t size_bytes) {
        static int serial = 0;
        path_ =
            directory + "/engine_test." + std::to_string(getpid()) + "." + std::to_string(serial++);
        const int fd = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size_bytes)) == 0);
        close(fd);
    }
    ~File() { unlink(path_.c_str()); }
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

std::unique_ptr<UringEngine> open_engine(const std::vector<DeviceSpec>& devices,
                                         RingOptions options) {
    OpenFailure failure;
    auto engine = UringEngine::open(devices, options, failure);
    if (engine == nullptr) {
        const bool unsupported = failure.what == "direct" || failure.what == "io_uring_setup";
        if (unsupported) skip((failure.what + ": " + std::strerror(-failure.status)).c_str());
        std::fprintf(stderr, "%s %s: %s\n", failure.what.c_str(), failure.path.c_str(),
                     std::strerror(-failure.status));
        std::_Exit(1);
    }
    return engine;
}

constexpr RingOptions kDefault{64, 1 << 20, 16 << 20, 0};
constexpr RingOptions kTiny{1, 4096, 4096, 0};
constexpr RingOptions kShort{8, 64 << 10, 64 << 10, 8192 + 512};

/// A batch under construction.
struct Arrays {
    std::vector<std::uint32_t> device;
    std::vector<std::uint64_t> offset_bytes;
    std::vector<std::uint32_t> fragment_start{0};
    std::vector<std::uint64_t> address;
    std::vector<std::uint64_t> length_bytes;

    void item(std::uint32_t on, std::uint64_t offset) {
        device.push_back(on);
        offset_bytes.push_back(offset);
        fragment_start.push_back(static_cast<std::uint32_t>(address.size()));
    }
    void fragment(const void* memory, std::uint64_t length) {
        address.push_back(reinterpret_cast<std::uint64_t>(memory));
        length_bytes.push_back(length);
        fragment_start.back() = static_cast<std::uint32_t>(address.size());
    }
    BatchView view(Op op, bool with_checksum = true) const {
        return {op, with_checksum, device, offset_bytes, fragment_start, address, length_bytes};
    }
};

std::shared_ptr<Batch> finish(UringEngine& engine, std::int64_t ticket) {
    std::shared_ptr<Batch> batch;
    CHECK(ticket > 0);
    CHECK(engine.wait(ticket, std::chrono::steady_clock::now() + 60s, batch) == 0);
    return batch;
}

std::shared_ptr<Batch> run(UringEngine& engine, const BatchView& view) {
    return finish(engine, engine.submit(view));
}

/// Cut [0, total) of `memory` into random fragments.
void scatter(Arrays& arrays, std::byte* memory, std::uint64_t total, Random& random) {
    const bool coarse = random.one_in(2);
    for (std::uint64_t at = 0; at < total;) {
        const std::uint64_t step = random.between(1, coarse ? 60'000 : 3000);
        const std::uint64_t length = std::min(step, total - at);
        arrays.fragment(memory + at, length);
        at += length;
    }
}

/// One thread's work: write random items to its own extents, read them back, compare.
void round_trips(UringEngine& engine, std::uint64_t seed, std::uint64_t first_offset,
                 std::uint32_t device_count, int rounds) {
    constexpr std::uint64_t kItems = 6;
    constexpr std::uint64_t kItemBytesMax = 256 << 10;
    Random random(seed);
    const std::size_t size = kItems * (kItemBytesMax + 4096);
    auto* out = static_cast<std::byte*>(std::aligned_alloc(4096, size));
    auto* in = static_cast<std::byte*>(std::aligned_alloc(4096, size));
    CHECK(out != nullptr && in != nullptr);
    for (int round = 0; round < rounds; ++round) {
        for (std::size_t i = 0; i < size; ++i)
            out[i] = static_cast<std::byte>(random.between(0, 255));
        std::memset(in, 0xA5, size);
        const std::int64_t region =
            engine.register_memory(reinterpret_cast<std::uint64_t>(in), size);
        CHECK(region > 0);
        Arrays writes, reads;
        std::vector<std::uint64_t> totals;
        for (std::uint64_t i = 0; i < kItems; ++i) {
            const std::uint64_t total = random.between(1, kItemBytesMax);
            const auto device = static_cast<std::uint32_t>(random.between(0, device_count - 1));
            const std::uint64_t offset = first_offset + i * kItemBytesMax;
            const std::uint64_t skew = random.one_in(2) ? 0 : random.between(0, 4095);
            std::byte* source = out + i * (kItemBytesMax + 4096) + skew;
            std::byte* target = in + i * (kItemBytesMax + 4096) + (random.one_in(2) ? 0 : skew);
            writes.item(device, offset);
            scatter(writes, source, total, random);
            reads.item(device, offset);
            scatter(reads, target, total, random);
            totals.push_back(total);
        }
        const auto written = run(engine, writes.view(Op::kWrite));
        const auto read = run(engine, reads.view(Op::kRead));
        for (std::uint32_t i = 0; i < kItems; ++i) {
            CHECK(written->status[i] == 0 && read->status[i] == 0);
            const auto* a =
                reinterpret_cast<const std::byte*>(writes.address[writes.fragment_start[i]]);
            const auto* b =
                reinterpret_cast<const std::byte*>(reads.address[reads.fragment_start[i]]);
            CHECK(std::memcmp(a, b, totals[i]) == 0);
            CHECK(b[totals[i]] == std::byte{0xA5});  // room for it: a slot is longer than its item
            CHECK(written->checksums[i] == read->checksums[i]);
            const auto address = reinterpret_cast<std::uint64_t>(a);
            CHECK(written->checksums[i] == checksum({&address, &totals[i], 1}));
        }
        CHECK(engine.unregister_memory(region) == 0);
        CHECK(engine.unregister_memory(region) == -ENOENT);
    }
    std::free(out);
    std::free(in);
}

void test_many_threads(const RingOptions& options, int rounds) {
    constexpr std::uint64_t kSpan = 6 * (256 << 10);
    constexpr int kThreads = 4;
    File files[2] = {File(kThreads * kSpan), File(kThreads * kSpan)};
    auto engine = open_engine(
        {{files[0].path(), kThreads * kSpan}, {files[1].path(), kThreads * kSpan}}, options);
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            const auto seed = static_cast<std::uint64_t>(t + 1);
            round_trips(*engine, seed, static_cast<std::uint64_t>(t) * kSpan, 2, rounds);
        });
    }
    std::thread bystander([&] {
        while (!over.load(std::memory_order_relaxed)) {
            CHECK(engine->flush(0) == 0);
            CHECK(engine->stats().failed_items == 0);
            CHECK(engine->grants().memory_align.size() == 2);
            std::this_thread::sleep_for(1ms);
        }
    });
    for (std::thread& thread : threads) thread.join();
    over.store(true, std::memory_order_relaxed);
    bystander.join();
    const EngineStats stats = engine->stats();
    CHECK(stats.read_items == stats.write_items &&
          stats.read_items == 6u * kThreads * static_cast<unsigned>(rounds));
    CHECK((options.first_attempt_bytes > 0) == (stats.short_transfers > 0));
}

void test_failures_are_alone() {
    constexpr std::uint64_t kCapacity = 1 << 20;
    File file(kCapacity);
    auto engine = open_engine({{file.path(), kCapacity}}, kDefault);
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, 1 << 20));
    std::memset(memory, 7, 1 << 20);
    void* hole = mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED);
    Arrays arrays;
    const auto item = [&](std::uint64_t offset, const void* at, std::uint64_t length) {
        arrays.item(0, offset);
        arrays.fragment(at, length);
    };
    item(0, memory, 4096);
    item(kCapacity, memory, 1);             // 1: beyond the end
    item(kCapacity - 4096, memory, 4097);   // 2: across the end
    item(UINT64_MAX - 4095, memory, 4096);  // 3: wraps around
    item(8192, hole, 65'536);               // 4: memory that is not there
    item(16'384, nullptr, 4096);            // 5
    item(4096, memory + 1, 4095);
    item(0, memory, UINT64_MAX);  // 7: no device is that large
    item(kCapacity - 4096, memory + 8192, 1);
    // Without checksums: hashing memory that is not there is the caller's crash.
    const auto result = run(*engine, arrays.view(Op::kWrite, false));
    const std::vector<std::int32_t> expected{0,       -ERANGE, -ERANGE, -ERANGE, -EFAULT,
                                             -EFAULT, 0,       -ERANGE, 0};
    CHECK(result->status == expected);
    CHECK(engine->stats().failed_items == 6 && engine->stats().write_items == 3);

    // The file ends inside the second block: the first 100 bytes of it are there, byte 101 is not.
    CHECK(truncate(file.path().c_str(), 4196) == 0);
    Arrays ends;
    for (const std::uint64_t length : {4096u, 4196u, 4197u, 65'536u}) {
        ends.item(0, 0);
        ends.fragment(memory, length);
    }
    const auto read = run(*engine, ends.view(Op::kRead));
    CHECK((read->status == std::vector<std::int32_t>{0, 0, -ENODATA, -ENODATA}));
    CHECK(engine->flush(0) == 0);
    munmap(hole, 1 << 20);
    engine.reset();
    std::free(memory);
}

void test_limits_and_close() {
    constexpr std::uint64_t kCapacity = 32 << 20;
    File file(kCapacity);
    auto engine = open_engine({{file.path(), kCapacity}}, kDefault);
    std::vector<std::byte> memory(1 << 20, std::byte{3});  // unaligned: everything bounces
    Arrays one;
    for (std::uint64_t i = 0; i < 32; ++i) {
        one.item(0, i << 20);
        one.fragment(memory.data() + 1, memory.size() - 1);
    }
    std::shared_ptr<Batch> batch;
    const auto now = [] { return std::chrono::steady_clock::now(); };
    CHECK(engine->wait(1, now(), batch) == -ENOENT);
    std::vector<std::int64_t> tickets;
    Arrays small;
    small.item(0, 0);
    small.fragment(memory.data(), 100);
    tickets.push_back(engine->submit(one.view(Op::kWrite)));
    while (tickets.size() < kBatchesInFlightMax) {
        tickets.push_back(engine->submit(small.view(Op::kRead, false)));
    }
    CHECK(engine->submit(small.view(Op::kRead)) == -EBUSY);
    finish(*engine, tickets.back());
    CHECK(engine->wait(tickets.back(), now(), batch) == -ENOENT);
    tickets.back() = engine->submit(small.view(Op::kRead));
    CHECK(tickets.back() > 0);

    Arrays bad = small;
    bad.offset_bytes[0] = 512;
    CHECK(engine->submit(bad.view(Op::kRead)) == -EINVAL);

    std::vector<std::thread> closers;
    for (int i = 0; i < 3; ++i) closers.emplace_back([&] { engine->close(); });
    for (std::thread& thread : closers) thread.join();
    CHECK(engine->submit(small.view(Op::kRead)) == -ESHUTDOWN);
    CHECK(engine->flush(0) == -ESHUTDOWN);
    CHECK(engine->register_memory(4096, 4096) == -ESHUTDOWN);
    for (const std::int64_t ticket : tickets) {  // drained, and still to be collected
        const auto drained = finish(*engine, ticket);
        for (const std::int32_t status : drained->status) CHECK(status == 0);
    }
}

/// Submits, waits for each other's tickets, flushes, registers and replaces files from many threads
/// while two close the engine: every call ends, with an answer that is documented.
void test_sharing_while_closing(const RingOptions& options, std::chrono::milliseconds after) {
    constexpr std::uint64_t kCapacity = 4 << 20;
    constexpr int kThreads = 3;
    File file(kCapacity);
    auto engine = open_engine({{file.path(), kCapacity}}, options);
    std::vector<std::byte> memory[kThreads];
    for (auto& own : memory) own.assign(64 << 10, std::byte{5});
    std::atomic<std::int64_t> shared{0};  // a ticket that all wait for
    std::atomic<int> spent{0}, collected{0}, started{0};
    std::vector<std::thread> threads;
    const auto wait = [&](std::int64_t ticket) {
        std::shared_ptr<Batch> batch;
        const auto bound = std::chrono::steady_clock::now() + 60s;
        const Status status = engine->wait(ticket, bound, batch);
        CHECK(status == 0 || status == -ENOENT);
        (status == 0 ? collected : spent).fetch_add(1);
        if (status == 0) {
            for (const std::int32_t item : batch->status) CHECK(item == 0);
        }
    };
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            Random random(static_cast<std::uint64_t>(t) + 1);
            for (;;) {
                Arrays arrays;
                for (std::uint64_t i = 0; i < 4; ++i) {
                    arrays.item(0, (static_cast<std::uint64_t>(t) * 4 + i) * (64 << 10));
                    arrays.fragment(memory[t].data() + i * (8 << 10), random.between(1, 8 << 10));
                }
                const std::int64_t ticket =
                    engine->submit(arrays.view(random.one_in(2) ? Op::kRead : Op::kWrite));
                if (ticket == -ESHUTDOWN) return;
                CHECK(ticket > 0);
                started.fetch_add(1);
                shared.store(ticket);
                wait(ticket);
            }
        });
    }
    std::atomic<bool> over{false};
    threads.emplace_back([&] {  // takes tickets away from those who submitted them
        while (!over.load()) {
            if (const std::int64_t ticket = shared.exchange(0); ticket > 0) wait(ticket);
        }
    });
    threads.emplace_back([&] {
        for (;;) {
            const Status status = engine->flush(0);
            CHECK(status == 0 || status == -ESHUTDOWN);
            CHECK(engine->stats().failed_items == 0);
            CHECK(engine->grants().memory_align.size() == 1);
            if (status == -ESHUTDOWN) return;
        }
    });
    threads.emplace_back([&] {
        for (;;) {
            const auto address = reinterpret_cast<std::uint64_t>(memory[0].data());
            const std::int64_t region = engine->register_memory(address, 64 << 10);
            if (region == -ESHUTDOWN) return;
            CHECK(region > 0);
            const Status status = engine->unregister_memory(region);
            CHECK(status == 0 || status == -ENOENT || status == -ESHUTDOWN);
        }
    });
    std::this_thread::sleep_for(after);
    std::vector<std::thread> closers;
    for (int i = 0; i < 2; ++i) closers.emplace_back([&] { engine->close(); });
    for (std::thread& thread : closers) thread.join();
    for (std::size_t i = 0; i < threads.size(); ++i) {
        if (i == kThreads) over.store(true);
        threads[i].join();
    }
    // Each ticket was collected once, by whoever was first.
    CHECK(collected.load() == started.load());
    CHECK(engine->stats().failed_items == 0);
}

void test_missing_file() {
    OpenFailure failure;
    const std::vector<DeviceSpec> devices{{directory + "/no such file", 4096}};
    CHECK(UringEngine::open(devices, kDefault, failure) == nullptr);
    CHECK(failure.status == -ENOENT && failure.what == "open");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1) directory = argv[1];
    test_missing_file();
    test_failures_are_alone();
    test_limits_and_close();
    test_many_threads(kDefault, 6);
    test_many_threads(kTiny, 1);
    test_many_threads(kShort, 2);
    for (const int after_ms : {0, 1, 20, 300}) {
        test_sharing_while_closing(kDefault, std::chrono::milliseconds(after_ms));
        test_sharing_while_closing(kTiny, std::chrono::milliseconds(after_ms));
    }
    std::puts("engine_test: ok");
    return 0;
}
