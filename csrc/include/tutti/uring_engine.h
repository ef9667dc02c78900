// The io_uring engine: several devices, each with a ring and a thread, behind one table of tickets.
//
// Threads: every method may be called from any thread. Calls return statuses and never throw,
// except for a lack of memory while a batch is copied. Locks: `mutex_` guards the tables and is
// held for table work only; `life_` keeps the rings alive (shared) or stops them (exclusive).
// Order: life_, mutex_, then a ring's own. Fork: a child has neither the threads nor the rings. Its
// calls return -ECHILD and it must not run the destructor; `close` there only closes the child's
// file descriptors.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tutti/batch.h"
#include "tutti/device_ring.h"
#include "tutti/status.h"

namespace tutti {

struct DeviceSpec {
    std::string path;
    std::uint64_t capacity_bytes;  // < 2^63
};

/// Why an engine did not open.
struct OpenFailure {
    Status status = 0;
    std::string what;  // "open", "direct" (O_DIRECT is refused), "io_uring_setup", ...
    std::string path;
};

/// Sums over the devices; see RingStats.
struct EngineStats {
    std::uint64_t read_items, read_bytes, write_items, write_bytes, failed_items, bounced_bytes,
        short_transfers, transfers, fixed_transfers, enters, flushes;
    std::vector<std::uint64_t> device_items;  // items that ended, well or not, by device
};

/// What the kernel granted.
struct EngineGrants {
    bool registered_files;                    // on every device
    Status registered_buffers;                // 0, or why some device refused its bounce arena
    Status registered_regions;                // 0, or why the last refused region was
    std::vector<std::uint64_t> memory_align;  // by device
};

class UringEngine {
public:
    /// Open existing devices for direct I/O; creates and truncates nothing.
    /// On failure returns nothing, fills `failure`, and has let go of everything.
    static std::unique_ptr<UringEngine> open(std::span<const DeviceSpec> devices,
                                             const RingOptions& options, OpenFailure& failure);

    ~UringEngine() { close(); }
    UringEngine(const UringEngine&) = delete;
    UringEngine& operator=(const UringEngine&) = delete;

    /// Start a batch. Returns its ticket, > 0, or
    /// -EINVAL the arrays do not fit together, -EBUSY kBatchesInFlightMax tickets are unspent,
    /// -ESHUTDOWN after close, -ECHILD in a forked child. Copies the arrays; does not wait for I/O.
    std::int64_t submit(const BatchView& view);

    /// Wait for a batch and spend its ticket. Returns 0 and the batch; -ETIME at the deadline;
    /// -ENOENT for an unknown or spent ticket. Works after close, for what was submitted before.
    Status wait(std::int64_t ticket, std::chrono::steady_clock::time_point deadline,
                std::shared_ptr<Batch>& batch);

    /// Make finished writes to a device durable. Blocks. After a failure, writes that began before
    /// it are lost for good even if a later flush succeeds: Linux reports lost writes once.
    Status flush(std::uint32_t device);

    /// Use the file behind `fd` for a device from now on; `fd` stays the caller's. What is in
    /// flight ends on the old file. Waits for the device's thread.
    /// On failure: the old file may still be in use for transfers; call again.
    Status replace_file(std::uint32_t device, int fd);

    /// Register memory with every ring, in buffers of at most kBufferBytesMax. Returns an id, > 0,
    /// even where the kernel refuses (see `grants`), or -EINVAL, -ESHUTDOWN, -ECHILD.
    std::int64_t register_memory(std::uint64_t address, std::uint64_t length_bytes);

    /// Forget registered memory. 0, or -ENOENT for an unknown id.
    Status unregister_memory(std::int64_t region);

    /// Finish what is in flight, end the threads, close the files. Idempotent.
    void close();

    EngineStats stats() const;
    EngineGrants grants() const;
    bool forked() const;

private:
    explicit UringEngine(std::size_t device_count);

    struct Lane {
        std::unique_ptr<DeviceRing> ring;
        std::uint64_t memory_align;
    };

    void forget_buffers(std::span<const Buffer> buffers);

    const std::int32_t pid_;
    std::vector<Lane> lanes_;
    std::vector<std::mutex> flush_mutexes_;
    std::atomic<std::uint64_t> flush_count_{0};

    std::shared_mutex life_;
    mutable std::mutex mutex_;
    bool closed_ = false;  // guarded by mutex_; set under life_ too
    std::int64_t next_ticket_ = 1;
    std::unordered_map<std::int64_t, std::shared_ptr<Batch>> tickets_;
    std::int64_t next_region_ = 1;
    std::map<std::int64_t, std::vector<Buffer>> regions_;
    std::vector<std::uint32_t> buffers_free_;  // indices in the kernel's tables, the same in each
    Status region_status_ = 0;
};

}  // namespace tutti
