// One device: a file, an io_uring and the thread that owns them.
//
// The thread is the only one that touches the ring, the slots and the items. Others leave commands
// in a queue under a mutex and wake it through an eventfd that the ring itself reads, so one system
// call waits for I/O and for commands alike.
//
// Invariants
//   - At most `queue_depth` transfers are in flight, each in a slot; at most twice as many items
//     are open. An item is closed once its transfers landed and its checksum, if wanted, is known.
//   - Items are issued in the order of submission, and a transfer that finds no bounce room holds
//     up those behind it. It cannot wait for ever: it never needs more than the arena holds, and
//     whatever is taken belongs to transfers in flight.
//   - After a failure no more transfers of that item are issued; others are not affected.
#pragma once

#include <liburing.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tutti/batch.h"
#include "tutti/bounce_arena.h"
#include "tutti/memory_table.h"
#include "tutti/plan.h"
#include "tutti/status.h"

namespace tutti {

/// Size of each ring's table of registered buffers; the first is the bounce arena.
inline constexpr std::uint32_t kBuffersMax = 1024;

inline constexpr std::uint32_t kQueueDepthMax = 4096;
/// The kernel moves less than 2 GiB in one call.
inline constexpr std::uint64_t kTransferBytesMax = std::uint64_t{1} << 30;

struct RingOptions {
    std::uint32_t queue_depth;          // 1 .. kQueueDepthMax
    std::uint64_t transfer_bytes_max;   // multiple of kBlockBytes, at most kTransferBytesMax
    std::uint64_t bounce_bytes;         // multiple of kBlockBytes, > 0
    std::uint64_t first_attempt_bytes;  // for tests: makes every longer transfer complete short
};

/// Counters of one ring. Written by its thread, read by any: each is exact, together they are not a
/// snapshot, hence relaxed.
struct RingStats {
    using Counter = std::atomic<std::uint64_t>;
    Counter read_items{0};
    Counter read_bytes{0};
    Counter write_items{0};
    Counter write_bytes{0};
    Counter failed_items{0};
    Counter bounced_bytes{0};
    Counter short_transfers{0};
    Counter transfers{0};
    Counter fixed_transfers{0};
    Counter enters{0};
};

class DeviceRing {
public:
    /// @param fd           owned from here on; open for direct reading and writing
    /// @param memory_align of memory for DMA to this device
    DeviceRing(int fd, std::uint64_t capacity_bytes, std::uint64_t memory_align,
               const RingOptions& options);

    /// Stops; see `stop`.
    ~DeviceRing();
    DeviceRing(const DeviceRing&) = delete;
    DeviceRing& operator=(const DeviceRing&) = delete;

    /// Set up memory, ring and thread. Called once, before anything else.
    /// On failure: `what` names the step that was refused; the object may only be destroyed.
    Status start(std::string& what);

    /// Give a part to the thread, which keeps its batch alive. Does not wait. Not after `stop`.
    void push(std::shared_ptr<Batch> batch, Part& part);

    /// Add buffers to the kernel's table, or none of them. Waits for the thread. Not after `stop`.
    Status register_buffers(std::span<const Buffer> buffers);

    /// Take buffers out again. Safe while I/O is in flight: the kernel keeps them until it ended.
    void unregister_buffers(std::span<const Buffer> buffers);

    /// Finish what was pushed, then end the thread and let go of ring, file and memory. Idempotent;
    /// one caller at a time. Waits for as long as the device takes: memory under DMA cannot be
    /// abandoned.
    void stop();

    /// In a forked child, where the thread does not exist: close the child's copies of the file
    /// descriptors and nothing else, so that the parent's close has its full effect.
    void close_in_child();

    /// Make finished writes durable. Blocks; any thread. Not after `stop`.
    Status flush() const;

    /// Use the file behind `fd` from now on; `fd` stays the caller's. What is in flight ends on the
    /// old file. Waits for the thread. Not while a `flush` runs, not after `stop`.
    Status replace_file(int fd);

    const RingStats& stats() const { return stats_; }
    bool files_registered() const { return files_registered_; }
    /// 0, or why the bounce arena could not be registered.
    Status buffers_status() const { return buffers_status_; }

private:
    // Called from outside and answered by the thread.
    struct Reply {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
        Status status = 0;
        void set(Status value);
        Status get();
    };
    struct Command {
        enum class Kind : std::uint8_t { kPart, kRegister, kUnregister, kFile, kStop } kind;
        Part* part = nullptr;
        std::span<const Buffer> buffers = {};
        Reply* reply = nullptr;
    };
    struct Item {
        Part* part;
        Fragments fragments;
        Cursor cursor;  // behind the last transfer that was issued
        std::uint64_t length_bytes;
        std::uint32_t index;  // in the batch
        std::uint32_t transfers_in_flight;
        Status status;  // of the first failure
        bool issued;    // no further transfers will be
        bool hash_queued;
        bool hashed;
    };
    struct Slot {
        Transfer transfer;
        Progress progress;
        std::uint64_t bounce_offset_bytes;
        std::uint32_t item;
        std::array<iovec, kPiecesMax> vectors;  // read by the kernel when the attempt is submitted
    };
    static constexpr std::uint32_t kNone = UINT32_MAX;
    static constexpr std::uint64_t kWake = UINT64_MAX;  // user_data of the eventfd read

    void send(const Command& command);
    Status call(const Command& command);

    void run(Reply& started);
    Status open_ring();
    void close_ring();
    void arm_wake();
    void take_commands();
    Status apply(std::span<const Buffer> buffers, bool add);
    void enter(bool wait);
    void reap();

    bool issue();
    bool open_item();
    void attempt(std::uint32_t slot_index);
    void landed(std::uint32_t slot_index, std::int32_t result);
    void settle(std::uint32_t item_index);
    void queue_hash(std::uint32_t item_index);
    void hash_some();
    void close_item(Part& part, std::uint32_t index, Status status, std::uint64_t length_bytes);
    bool idle() const { return parts_.empty() && items_free_.size() == items_.size(); }
    io_uring_sqe* next_sqe();

    void close_files();

    int fd_;
    const std::uint64_t capacity_bytes_;
    const RingOptions options_;
    const PlanLimits limits_;
    RingStats stats_;
    std::thread thread_;

    std::mutex mutex_;
    std::vector<Command> commands_;  // guarded by mutex_; bounded by batches in flight and callers
    bool signalled_ = false;         // guarded by mutex_; the eventfd was written, not yet answered
    int wake_fd_ = -1;

    // From here on the thread's own, once it runs.
    io_uring ring_{};
    bool ring_open_ = false;
    bool stopping_ = false;
    bool files_registered_ = false;
    Status table_status_ = 0;  // of the kernel's table of buffers
    Status buffers_status_ = 0;
    std::uint64_t wake_count_ = 0;
    std::vector<Command> taken_;
    MemoryTable memory_;
    BounceArena arena_;
    std::deque<Part*> parts_;  // with items that are not yet open; front first
    std::vector<Slot> slots_;
    std::vector<std::uint32_t> slots_free_;
    std::vector<Item> items_;
    std::vector<std::uint32_t> items_free_;
    std::uint32_t issuing_ = kNone;  // the item that transfers are being planned for
    std::deque<std::uint32_t> hash_queue_;
};

}  // namespace tutti
