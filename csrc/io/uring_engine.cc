// Opening devices, tickets, regions and the end of it all; see uring_engine.h.
#include "tutti/uring_engine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace tutti {
namespace {

/// Alignment where the kernel does not say: enough for drives with 4 KiB sectors.
constexpr std::uint64_t kMemoryAlignDefault = 4096;

/// Learn the alignment of memory for direct I/O. Returns -EINVAL where direct I/O is not possible.
Status query_memory_align(int fd, std::uint64_t& memory_align) {
    memory_align = kMemoryAlignDefault;
#ifdef STATX_DIOALIGN
    struct statx info {};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
        (info.stx_mask & STATX_DIOALIGN) != 0) {
        // Zero: the file system says no. Beyond a block: our extents would not be aligned.
        const std::uint64_t memory = info.stx_dio_mem_align;
        const std::uint64_t offset = info.stx_dio_offset_align;
        const bool usable = std::has_single_bit(memory) && memory <= kBlockBytes &&
                            std::has_single_bit(offset) && offset <= kBlockBytes;
        if (!usable) return -EINVAL;
        memory_align = memory;
    }
#else
    (void)fd;
#endif
    return 0;
}

/// Read the first block, if there is one: some file systems accept the flag and refuse the I/O.
Status probe_direct_read(int fd, const struct stat& info) {
    if (S_ISREG(info.st_mode) && info.st_size < static_cast<off_t>(kBlockBytes)) return 0;
    void* block = std::aligned_alloc(kBlockBytes, kBlockBytes);
    if (block == nullptr) return -ENOMEM;
    ssize_t moved = 0;
    do {
        moved = pread(fd, block, kBlockBytes, 0);
    } while (moved < 0 && errno == EINTR);
    const Status status = moved < 0 ? -errno : 0;
    std::free(block);
    return status;
}

/// Returns a file descriptor, or a negative errno with `what` naming the step.
int open_device(const std::string& path, std::uint64_t& memory_align, std::string& what) {
    what = "open";
    const int fd = ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd < 0) {
        // O_DIRECT is the only flag here that a file system may find invalid.
        if (errno == EINVAL) what = "direct";
        return -errno;
    }
    struct stat info {};
    Status status = fstat(fd, &info) == 0 ? 0 : -errno;
    if (status == 0 && !S_ISREG(info.st_mode) && !S_ISBLK(info.st_mode)) status = -ENOTBLK;
    if (status == 0) {
        what = "direct";
        status = query_memory_align(fd, memory_align);
    }
    if (status == 0) status = probe_direct_read(fd, info);
    if (status == 0) return fd;
    ::close(fd);
    return status;
}

}  // namespace

UringEngine::UringEngine(std::size_t device_count) : pid_(getpid()), flush_mutexes_(device_count) {
    for (std::uint32_t i = kBuffersMax; i-- > 1;) buffers_free_.push_back(i);  // 0: bounce arena
}

std::unique_ptr<UringEngine> UringEngine::open(std::span<const DeviceSpec> devices,
                                               const RingOptions& options, OpenFailure& failure) {
    std::unique_ptr<UringEngine> engine(new UringEngine(devices.size()));
    for (const DeviceSpec& device : devices) {
        failure.path = device.path;
        std::uint64_t align = 0;
        const int fd = open_device(device.path, align, failure.what);
        if (fd < 0) {
            failure.status = fd;
            return nullptr;
        }
        auto ring = std::make_unique<DeviceRing>(fd, device.capacity_bytes, align, options);
        failure.status = ring->start(failure.what);
        if (failure.status < 0) return nullptr;
        engine->lanes_.push_back({std::move(ring), align});
    }
    return engine;
}

bool UringEngine::forked() const { return getpid() != pid_; }

std::int64_t UringEngine::submit(const BatchView& view) {
    if (forked()) return -ECHILD;
    const auto batch = Batch::make(view, static_cast<std::uint32_t>(lanes_.size()));
    if (batch == nullptr) return -EINVAL;
    // Pushed under the lock: nothing may reach a ring after `close` has set `closed_`.
    const std::lock_guard lock(mutex_);
    if (closed_) return -ESHUTDOWN;
    if (tickets_.size() >= kBatchesInFlightMax) return -EBUSY;
    const std::int64_t ticket = next_ticket_++;
    tickets_.emplace(ticket, batch);
    for (Part& part : batch->parts) lanes_[part.device].ring->push(batch, part);
    return ticket;
}

Status UringEngine::wait(std::int64_t ticket, std::chrono::steady_clock::time_point deadline,
                         std::shared_ptr<Batch>& batch) {
    if (forked()) return -ECHILD;
    {
        const std::lock_guard lock(mutex_);
        const auto found = tickets_.find(ticket);
        if (found == tickets_.end()) return -ENOENT;
        batch = found->second;
    }
    if (!batch->wait_until(deadline)) return -ETIME;
    const std::lock_guard lock(mutex_);
    return tickets_.erase(ticket) == 1 ? 0 : -ENOENT;  // another waiter may have been faster
}

Status UringEngine::flush(std::uint32_t device) {
    if (forked()) return -ECHILD;
    const std::shared_lock alive(life_);
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return -ESHUTDOWN;
    }
    // One at a time: of two concurrent calls the kernel reports a lost write to one only.
    const std::lock_guard lock(flush_mutexes_[device]);
    flush_count_.fetch_add(1, std::memory_order_relaxed);
    return lanes_[device].ring->flush();
}

Status UringEngine::replace_file(std::uint32_t device, int fd) {
    if (forked()) return -ECHILD;
    const std::shared_lock alive(life_);
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return -ESHUTDOWN;
    }
    const std::lock_guard lock(flush_mutexes_[device]);
    return lanes_[device].ring->replace_file(fd);
}

std::int64_t UringEngine::register_memory(std::uint64_t address, std::uint64_t length_bytes) {
    if (forked()) return -ECHILD;
    if (address == 0 || length_bytes == 0 || length_bytes > UINT64_MAX - address) return -EINVAL;
    const std::shared_lock alive(life_);
    const std::uint64_t buffer_count = (length_bytes - 1) / kBufferBytesMax + 1;
    std::vector<Buffer> buffers;
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return -ESHUTDOWN;
        if (buffer_count <= buffers_free_.size()) {
            for (std::uint64_t done = 0; done < length_bytes; done += kBufferBytesMax) {
                const std::uint64_t length = std::min(length_bytes - done, kBufferBytesMax);
                buffers.push_back({address + done, length, buffers_free_.back()});
                buffers_free_.pop_back();
            }
        }
    }
    Status status = buffers.empty() ? -ENOSPC : 0;
    for (std::size_t i = 0; i < lanes_.size() && status == 0; ++i) {
        status = lanes_[i].ring->register_buffers(buffers);
    }
    if (status < 0) {  // all rings or none, so that what `grants` says is simple
        forget_buffers(buffers);
        buffers.clear();
    }
    const std::lock_guard lock(mutex_);
    if (status < 0) region_status_ = status;
    const std::int64_t region = next_region_++;
    regions_.emplace(region, std::move(buffers));
    return region;
}

Status UringEngine::unregister_memory(std::int64_t region) {
    if (forked()) return -ECHILD;
    const std::shared_lock alive(life_);
    std::vector<Buffer> buffers;
    bool open = false;
    {
        const std::lock_guard lock(mutex_);
        const auto found = regions_.find(region);
        if (found == regions_.end()) return -ENOENT;
        buffers = std::move(found->second);
        regions_.erase(found);
        open = !closed_;
    }
    if (open) forget_buffers(buffers);
    return 0;
}

void UringEngine::forget_buffers(std::span<const Buffer> buffers) {
    if (buffers.empty()) return;
    for (Lane& lane : lanes_) lane.ring->unregister_buffers(buffers);
    const std::lock_guard lock(mutex_);
    for (const Buffer& buffer : buffers) buffers_free_.push_back(buffer.index);
}

void UringEngine::close() {
    if (forked()) {
        for (Lane& lane : lanes_) lane.ring->close_in_child();
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    const std::unique_lock alone(life_);  // flushes and registrations under way end first
    for (Lane& lane : lanes_) lane.ring->stop();
}

EngineStats UringEngine::stats() const {
    EngineStats sum{};
    const auto add = [](std::uint64_t& total, const RingStats::Counter& counter) {
        total += counter.load(std::memory_order_relaxed);
    };
    for (const Lane& lane : lanes_) {
        const RingStats& ring = lane.ring->stats();
        add(sum.read_items, ring.read_items);
        add(sum.read_bytes, ring.read_bytes);
        add(sum.write_items, ring.write_items);
        add(sum.write_bytes, ring.write_bytes);
        add(sum.failed_items, ring.failed_items);
        add(sum.bounced_bytes, ring.bounced_bytes);
        add(sum.short_transfers, ring.short_transfers);
        add(sum.transfers, ring.transfers);
        add(sum.fixed_transfers, ring.fixed_transfers);
        add(sum.enters, ring.enters);
        std::uint64_t ended = 0;
        add(ended, ring.read_items);
        add(ended, ring.write_items);
        add(ended, ring.failed_items);
        sum.device_items.push_back(ended);
    }
    add(sum.flushes, flush_count_);
    return sum;
}

EngineGrants UringEngine::grants() const {
    EngineGrants grants{.registered_files = true,
                        .registered_buffers = 0,
                        .registered_regions = 0,
                        .memory_align = {}};
    for (const Lane& lane : lanes_) {
        grants.registered_files &= lane.ring->files_registered();
        if (lane.ring->buffers_status() < 0)
            grants.registered_buffers = lane.ring->buffers_status();
        grants.memory_align.push_back(lane.memory_align);
    }
    const std::lock_guard lock(mutex_);
    grants.registered_regions = region_status_;
    return grants;
}

}  // namespace tutti
