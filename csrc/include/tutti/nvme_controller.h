// Bringing a controller up and down: reset, admin queue, identify, I/O queues, shadow doorbells.
//
// Host code only; threads take turns, admin commands one after another. How registers and memory for
// DMA are reached is the Access's matter: the software controller's, vfio's or sysfs's. Every wait is
// bounded, by what the controller says of itself or by kAdminTimeoutNs.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tutti/nvme_queue.h"
#include "tutti/shared_memory.h"
#include "tutti/status.h"

namespace tutti::nvme {

inline constexpr u64 kAdminTimeoutNs = 10'000'000'000;
inline constexpr u32 kAdminEntries = 32;

/// Memory that the controller reaches at `dma`, in one run.
struct DmaMemory {
    u8* address = nullptr;
    u64 dma = 0;
    u64 length_bytes = 0;
};

/// The way to one device.
class Access {
public:
    virtual ~Access() = default;
    /// BAR0, mapped.
    virtual u8* registers() = 0;
    virtual u64 register_bytes() const = 0;
    /// Zeroed memory for queues and lists. 0 or a negative errno.
    virtual Status allocate(u64 length_bytes, DmaMemory& memory) = 0;
    /// Only when the device does not use it any more.
    virtual void release(const DmaMemory& memory) = 0;
    /// Let the device reach memory of ours; `dma` is where it sees the first page, and the others
    /// behind it in one run. 0 or a negative errno.
    /// @param address, length_bytes  multiples of kPageBytes
    virtual Status map(void* address, u64 length_bytes, u64& dma) = 0;
    virtual void unmap(u64 dma, u64 length_bytes) = 0;
};

struct Namespace {
    u32 id;
    u64 blocks;
    u32 block_bytes;
    u32 metadata_bytes;
};

/// What a controller says of itself (Identify), and what we asked of it.
struct ControllerFacts {
    std::string serial;
    std::string model;
    std::string firmware;
    u32 version = 0;
    u64 transfer_bytes_max = 0;  // MDTS, or kTransferBytesCap where it has none
    u32 queue_entries_max = 0;
    u32 queue_pairs_max = 0;
    bool sgl = false;
    bool shadow_doorbells = false;  // in use
    std::vector<Namespace> namespaces;
};

/// No command is longer, even where a controller sets no limit: 65,536 blocks of 512 bytes are more.
inline constexpr u64 kTransferBytesCap = 4u << 20;

struct ControllerOptions {
    u32 queue_pairs = 1;      // fewer are made where the controller gives fewer
    u32 queue_entries = 256;  // of each queue; fewer where the controller takes fewer
    u32 commands_max = 0;     // in flight on each pair; 0: as many as the queue has room for
    bool shadow_doorbells = true;
    u64 admin_timeout_ns = kAdminTimeoutNs;
};

/// Why something failed: an errno of ours, the NVMe status if there is one, and words for people.
struct Failure {
    Status code = 0;
    u32 nvme_status = 0;
    std::string what;
    explicit operator bool() const { return code != 0; }
};

class Controller {
public:
    /// @param access  outlives the controller
    explicit Controller(Access& access) : access_(access) {}
    /// `close`s, and gives the memory back. No thread is in the queues any more.
    ~Controller();
    Controller(const Controller&) = delete;
    Controller& operator=(const Controller&) = delete;

    /// Reset the device, identify it and make the queues.
    Failure open(const ControllerOptions& options);
    /// After a command hung or the device failed: disable, end everything in flight with
    /// kDeviceGone, open again; after `close`, only the last. No thread is in the queues but in
    /// `flush` and `transfer`; where others are, `close` and let them end first.
    Failure reset();
    /// Ask the device to stop a command. It may answer that it did not: `aborted` is false then.
    Failure abort(u32 queue, u32 command_id, bool& aborted);
    /// Let the queues take no more commands, until `reset`. What is in flight goes on.
    void close_queues();
    /// Shut down in order, then disable. Idempotent; everything in flight ends with kDeviceGone.
    /// Threads may be in the queues meanwhile. The queues' memory stays until the destructor.
    void close();
    /// `close`, if it is open and dead, or was disabled by somebody else: true, if it moves nothing
    /// of ours any more. Leaves at once where another thread opens, resets or closes it.
    bool close_if_dead();

    /// A copy: `reset` asks the device anew.
    ControllerFacts facts() const {
        std::lock_guard guard(facts_mutex_);
        return facts_;
    }
    u32 queue_count() const { return u32(pairs_.size()); }
    /// At the same address for as long as the controller object lives, resets included.
    Queue& queue(u32 index) { return *pairs_[index]->queue; }
    /// Registers are all ones, or the controller says that it failed.
    bool dead();
    bool is_open() const { return open_; }
    /// The device moves nothing of ours: it was disabled, or is gone.
    bool stopped() const { return stopped_; }
    Access& access() { return access_; }

    /// Flush a namespace: what was written before is durable then. Any thread, also while another
    /// resets; one of the I/O queues is used. A status of nvme::status, 0 for success.
    u32 flush(u32 nsid, u64 timeout_ns);
    /// Move bytes by way of two pages of our own, for what is small and rare. `timeout_ns` is for
    /// each command. Any thread. A status of nvme::status.
    /// @param offset_bytes, length_bytes  whole blocks of the namespace
    u32 transfer(Io op, u32 nsid, u64 offset_bytes, u8* bytes, u64 length_bytes, u64 timeout_ns);

    /// All memory that threads in the queues read and write, registers included.
    void list_shared(SharedRanges& ranges);

private:
    Failure disable();
    Failure enable();
    Failure start();
    Failure identify();
    Failure make_queues();
    Failure make_queue(u32 index);
    Failure use_shadow();
    Failure run(const Command& command, u32* value = nullptr);
    Failure wait_ready(bool wanted, u64 timeout_ns);
    Status memory_for(u64 length_bytes, DmaMemory& memory);
    u32 run_io(const Command& command, u64 timeout_ns);
    void end_all(u32 why);
    void release_all();

    /// Enabled. One that is not, and that we did not disable, was reset or lost power: it has
    /// forgotten us. Meaningless while it is being brought up or down.
    bool ready();
    u32 load(u32 offset);
    u64 load64(u32 offset);
    void store(u32 offset, u32 value);
    void store64(u32 offset, u64 value);
    u32* doorbell(u32 queue, bool completion);

    /// One queue pair and its memory, with room for so many entries and ids.
    struct Pair {
        DmaMemory sq, cq;
        SharedMemory object, words;
        Queue* queue = nullptr;
        u32 entries = 0;
        u32 ids = 0;
    };
    QueueMemory memory_of(Pair& pair, u32 queue);
    Status make_room(Pair& pair, u32 entries, u32 ids);
    Failure prepare(Pair& pair, u32 id, u32 entries, u32 ids);

    Access& access_;
    std::recursive_mutex control_;  // what is not about single queues, one thread at a time
    // Shared by who runs an I/O command of our own; `start` makes the queues anew when nobody does.
    std::shared_mutex running_;
    std::mutex pages_mutex_;
    DmaMemory pages_;  // of `transfer`; guarded by pages_mutex_
    ControllerOptions options_;
    mutable std::mutex facts_mutex_;
    ControllerFacts facts_;  // written under both facts_mutex_ and control_
    Capabilities capabilities_{0};
    Pair admin_;
    DmaMemory page_, shadow_, event_;
    std::vector<std::unique_ptr<Pair>> pairs_;
    std::vector<DmaMemory> allocated_;
    std::atomic<bool> open_{false};
    std::atomic<bool> stopped_{true};
};

}  // namespace tutti::nvme
