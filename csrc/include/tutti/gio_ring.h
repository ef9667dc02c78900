// The CPU's side of gio_uring: init_queue (open), get_iocb, issue_io, wait_cqe.
//
// The ring prepares IOCBs and hands them to an executor: CPU threads of its own, or an external one
// (a CUDA kernel, launched by whoever called `issue`). Both run the same lanes (gio_run.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tutti/gio.h"
#include "tutti/nvme_table.h"

namespace tutti::gio {

/// One namespace as a device of a ring. Everything outlives the ring.
struct Target {
    nvme::Controller* controller;
    nvme::MemoryTable* memory;
    u32 nsid;
};

struct RingOptions {
    u32 depth = 8;                    // IOCBs
    u32 threads = 1;                  // of the CPU executor; 0: an external one launches
    u64 timeout_ns = 10'000'000'000;  // of each launch
};

/// The fragments of one IOCB, as parallel arrays.
struct FragmentArrays {
    std::span<const u32> device;
    std::span<const u64> offset_bytes;
    std::span<const u64> address;
    std::span<const u64> length_bytes;
};

struct RingStats {
    u64 launches;
    u64 iocbs;
    u64 fragments;
    u64 refused_fragments;  // at preparation
    u64 failed_fragments;   // with an NVMe status
    u64 timeouts;
    u64 resets;
};

/// CPU threads that run the lanes of launches, first come, first served: a stream.
class CpuExecutor {
public:
    explicit CpuExecutor(View& view) : view_(view) {}
    /// Ends the threads once what was given to them has ended.
    ~CpuExecutor() { stop(); }
    CpuExecutor(const CpuExecutor&) = delete;
    CpuExecutor& operator=(const CpuExecutor&) = delete;

    /// Start threads. 0 or a negative errno.
    Status start(u32 threads);
    /// Run a launch on at most `lanes` threads. Does not wait.
    void launch(const Launch& launch, u32 lanes);
    void stop();

private:
    struct Share {
        std::shared_ptr<const Launch> launch;
        u32 lane;
        u32 lanes;
    };
    void serve();

    View& view_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Share> shares_;  // guarded by mutex_; bounded by IOCBs times threads
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

class Ring {
public:
    /// Make a ring of IOCBs (the paper's init_queue).
    /// On failure: null, and `failure` says why.
    static std::unique_ptr<Ring> open(std::span<const Target> targets, const RingOptions& options,
                                      nvme::Failure& failure);
    /// `close`s.
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // ---- any thread ----
    /// Take `count` free IOCBs, or none of them. 0, or -EAGAIN where fewer are free.
    Status get_iocb(std::span<u32> ids);
    /// Give one back that was not issued. 0 or -EINVAL.
    Status put_back(u32 id);
    /// Fill an IOCB that was taken. A fragment that cannot be sent has its status from now on
    /// (kBadMemory, kLbaRange, kInvalidField), and the others go on.
    /// 0; -EINVAL: not taken, arrays that do not fit together, an unknown device.
    Status prepare(u32 id, nvme::Io op, const FragmentArrays& fragments);
    /// Send prepared IOCBs by one launch on at most `lanes` CPU threads. With an external executor
    /// nothing is started: the caller launches with `launch`, or says `refuse`.
    /// 0; -EINVAL: one of them was not prepared; -EBUSY: a device of theirs is being reset;
    /// -ESHUTDOWN: closed. Nothing was sent then, and they are prepared still.
    Status issue_io(std::span<const u32> ids, u32 lanes, Launch& launch);
    /// The launch of issued IOCBs failed: their fragments end with kNotIssued. Where an external
    /// executor lost its lanes (a kernel that was killed), what was in flight ends with kTimeout:
    /// its memory is the device's until `reset_device`.
    /// 0; -EINVAL: one of them was not issued, or lanes of this ring may still run.
    Status refuse(std::span<const u32> ids);
    /// Wait until an IOCB has ended; fills `statuses` in the order of its fragments and frees it.
    /// Regions of a transfer that timed out stay in use until its device was reset.
    /// 0; -ETIME: not yet; -EINVAL: not issued. One waiter for each IOCB. Polls one word; watches
    /// the controllers meanwhile.
    Status wait_cqe(u32 id, u64 timeout_ns, std::vector<u32>& statuses);
    /// After timeouts: wait until no launch that touches the device is under way, reset its
    /// controller and go on; launches for other devices go on meanwhile. Memory of transfers that
    /// timed out is the process's again when this returned 0. Other rings on the controller are
    /// quiet meanwhile.
    /// 0; -ETIME: something is still in flight; -EBUSY: being reset; or what the reset failed with.
    /// The device takes no more commands until a reset succeeded.
    Status reset_device(u32 device, u64 timeout_ns, std::string& what);

    const View& view() const { return *view_; }
    void list_shared(SharedRanges& ranges);
    /// Another number whenever `list_shared` may say something else than before.
    u64 shared_version() const;
    RingStats stats() const;
    /// Let what was issued end (launches have a timeout), then take nothing more. Idempotent.
    void close();

private:
    Ring() = default;
    Status start(std::span<const Target> targets, const RingOptions& options,
                 nvme::Failure& failure);
    bool become(u32 id, Event event);
    bool begin_refusal(u32 id);
    u32 check(u32 device, const FragmentArrays& fragments, u32 index) const;
    void watch();
    bool ended(u32 id) const;
    void let_go(u32 id);
    bool wait_quiet(u32 devices, u64 end_ns);
    bool under_way(u32 id, u32 devices);

    std::vector<Target> targets_;
    std::vector<u64> capacities_;
    RingOptions options_;
    SharedMemory view_memory_, words_memory_, iocbs_memory_;
    View* view_ = nullptr;
    std::unique_ptr<CpuExecutor> executor_;

    std::mutex mutex_;
    std::vector<u32> free_;     // guarded by mutex_
    std::vector<u64> used_;     // for each IOCB and device, a bit for each region
    std::vector<u32> devices_;  // of each IOCB, a bit for each device
    std::vector<u32> touched_;  // the same of the launch that an IOCB went with; guarded by mutex_
    u32 resetting_ = 0;         // devices; guarded by mutex_
    bool closed_ = false;       // guarded by mutex_
    std::mutex closing_;
    std::atomic<u64> watched_ns_{0};
    struct Counters {
        std::atomic<u64> launches{0}, iocbs{0}, fragments{0}, refused{0}, failed{0}, timeouts{0},
            resets{0};
    } count_;
};

}  // namespace tutti::gio
