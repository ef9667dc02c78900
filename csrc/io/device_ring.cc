// The thread of one device; see device_ring.h for its invariants.
#include "tutti/device_ring.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "tutti/hash.h"

namespace tutti {
namespace {

/// Bytes hashed between two visits to the ring: long enough to be worth a system call, short enough
/// that the device does not run dry.
constexpr std::uint64_t kHashBytesPerTurn = 1 << 20;

/// Pause after the kernel had no memory for a submission.
constexpr std::chrono::microseconds kBackoff{100};

void count(RingStats::Counter& counter, std::uint64_t amount = 1) {
    counter.fetch_add(amount, std::memory_order_relaxed);
}

PlanLimits plan_limits(std::uint64_t memory_align, const RingOptions& options) {
    // A quarter of the arena each, so that bounced transfers overlap.
    const std::uint64_t share = round_down_to_block(options.bounce_bytes / 4);
    const std::uint64_t bounce = std::clamp(share, kBlockBytes, options.transfer_bytes_max);
    return {memory_align, options.transfer_bytes_max, bounce};
}

}  // namespace

void DeviceRing::Reply::set(Status value) {
    const std::lock_guard lock(mutex);
    status = value;
    done = true;
    changed.notify_one();  // under the lock: the waiter frees us once it has it
}

Status DeviceRing::Reply::get() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
    return status;
}

DeviceRing::DeviceRing(int fd, std::uint64_t capacity_bytes, std::uint64_t memory_align,
                       const RingOptions& options)
    : fd_(fd),
      capacity_bytes_(capacity_bytes),
      options_(options),
      limits_(plan_limits(memory_align, options)) {}

DeviceRing::~DeviceRing() { stop(); }

Status DeviceRing::start(std::string& what) {
    what = "bounce memory";
    if (const Status status = arena_.open(options_.bounce_bytes, options_.queue_depth);
        status < 0) {
        return status;
    }
    slots_.resize(options_.queue_depth);
    items_.resize(std::size_t{2} * options_.queue_depth);
    for (std::uint32_t i = options_.queue_depth; i-- > 0;) slots_free_.push_back(i);
    for (auto i = static_cast<std::uint32_t>(items_.size()); i-- > 0;) items_free_.push_back(i);
    what = "eventfd";
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return -errno;

    // Signals stay with the interpreter's threads; the new thread inherits the mask.
    what = "thread";
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    Reply started;
    Status status = 0;
    try {
        thread_ = std::thread([this, &started] { run(started); });
    } catch (const std::system_error& error) {
        status = -error.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (status < 0) return status;
    what = "io_uring_setup";
    status = started.get();
    if (status < 0) thread_.join();
    return status;
}

void DeviceRing::send(const Command& command) {
    bool wake = false;
    {
        const std::lock_guard lock(mutex_);
        commands_.push_back(command);
        wake = !std::exchange(signalled_, true);
    }
    if (wake) {
        const std::uint64_t one = 1;
        TUTTI_CHECK(write(wake_fd_, &one, sizeof one) == sizeof one);
    }
}

Status DeviceRing::call(const Command& command) {
    Reply reply;
    Command with_reply = command;
    with_reply.reply = &reply;
    send(with_reply);
    return reply.get();
}

void DeviceRing::push(std::shared_ptr<Batch> batch, Part& part) {
    part.batch = std::move(batch);
    send({.kind = Command::Kind::kPart, .part = &part});
}

Status DeviceRing::register_buffers(std::span<const Buffer> buffers) {
    return call({.kind = Command::Kind::kRegister, .buffers = buffers});
}

void DeviceRing::unregister_buffers(std::span<const Buffer> buffers) {
    call({.kind = Command::Kind::kUnregister, .buffers = buffers});
}

void DeviceRing::stop() {
    if (thread_.joinable()) {
        send({.kind = Command::Kind::kStop});
        thread_.join();
    }
    close_files();
    arena_.close();
}

void DeviceRing::close_in_child() {
    close_files();
    if (ring_open_) close(ring_.ring_fd);
    ring_open_ = false;
}

void DeviceRing::close_files() {
    for (int* fd : {&fd_, &wake_fd_}) {
        if (*fd >= 0) close(*fd);
        *fd = -1;
    }
}

Status DeviceRing::flush() const {
    while (fdatasync(fd_) != 0) {
        if (errno != EINTR) return -errno;
    }
    return 0;
}

Status DeviceRing::replace_file(int fd) {
    // The number stays, so that nobody can meet a descriptor that is somebody else's by now.
    if (dup3(fd, fd_, O_CLOEXEC) < 0) return -errno;
    return files_registered_ ? call({.kind = Command::Kind::kFile}) : 0;
}

// ---- the thread -------------------------------------------------------------------------------

void DeviceRing::run(Reply& started) {
    pthread_setname_np(pthread_self(), "tutti-uring");
    const Status status = open_ring();
    if (status == 0) arm_wake();
    started.set(status);  // `started` is gone from here on
    if (status < 0) return;
    for (;;) {
        while (issue()) {
        }
        if (stopping_ && idle()) break;
        // Hash while the device works; sleep only with nothing to hash.
        const bool has_work = !hash_queue_.empty();
        enter(!has_work);
        if (has_work) hash_some();
        reap();
    }
    close_ring();
}

Status DeviceRing::open_ring() {
    // Completions are run when this thread asks for them, not by interrupting it. Older kernels
    // refuse the flags.
    const unsigned flag_choices[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
                                     IORING_SETUP_COOP_TASKRUN, 0};
    Status status = -EINVAL;
    for (const unsigned flags : flag_choices) {
        io_uring_params params{};
        params.flags = flags;
        // Each slot has at most one entry in the queue, and so has the eventfd.
        status = io_uring_queue_init_params(options_.queue_depth + 1, &ring_, &params);
        if (status != -EINVAL) break;
    }
    if (status < 0) return status;
    if ((ring_.features & IORING_FEAT_FAST_POLL) == 0) {  // older than Linux 5.7
        io_uring_queue_exit(&ring_);
        return -ENOSYS;
    }
    ring_open_ = true;
    io_uring_register_ring_fd(&ring_);  // an optimisation; refused by older kernels
    files_registered_ = io_uring_register_files(&ring_, &fd_, 1) == 0;
    table_status_ = io_uring_register_buffers_sparse(&ring_, kBuffersMax);
    // Of an arena that is larger than one buffer, the rest is used unregistered.
    const Buffer arena = {reinterpret_cast<std::uint64_t>(arena_.base()),
                          std::min(arena_.size_bytes(), kBufferBytesMax), 0};
    buffers_status_ = apply({&arena, 1}, true);
    return 0;
}

void DeviceRing::close_ring() {
    // Explicitly, because the exit of a ring ends in the background: locked memory and the file
    // would be held for a while.
    io_uring_unregister_buffers(&ring_);
    if (files_registered_) io_uring_unregister_files(&ring_);
    io_uring_queue_exit(&ring_);
    ring_open_ = false;
}

void DeviceRing::arm_wake() {
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_read(sqe, wake_fd_, &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data64(sqe, kWake);
}

void DeviceRing::take_commands() {
    {
        // A command pushed after this finds `signalled_` false and writes to the eventfd again.
        const std::lock_guard lock(mutex_);
        std::swap(commands_, taken_);
        signalled_ = false;
    }
    for (const Command& command : taken_) {
        switch (command.kind) {
            case Command::Kind::kPart:
                parts_.push_back(command.part);
                break;
            case Command::Kind::kRegister:
                command.reply->set(apply(command.buffers, true));
                break;
            case Command::Kind::kUnregister:
                command.reply->set(apply(command.buffers, false));
                break;
            case Command::Kind::kFile: {
                const int updated = io_uring_register_files_update(&ring_, 0, &fd_, 1);
                command.reply->set(updated == 1 ? 0 : updated < 0 ? updated : -EIO);
                break;
            }
            case Command::Kind::kStop:
                stopping_ = true;
                break;
        }
    }
    taken_.clear();
    if (!stopping_) arm_wake();
}

Status DeviceRing::apply(std::span<const Buffer> buffers, bool add) {
    if (table_status_ < 0) return table_status_;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
        const Buffer& buffer = buffers[i];
        if (!add) memory_.remove(buffer.index);
        const iovec vector = {add ? reinterpret_cast<void*>(buffer.address) : nullptr,
                              add ? buffer.length_bytes : 0};
        const int updated =
            io_uring_register_buffers_update_tag(&ring_, buffer.index, &vector, nullptr, 1);
        if (!add) continue;
        if (updated != 1) {
            apply(buffers.first(i), false);
            return updated < 0 ? updated : -EIO;
        }
        memory_.add(buffer);
    }
    return 0;
}

io_uring_sqe* DeviceRing::next_sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    TUTTI_CHECK(sqe != nullptr);  // the ring has an entry for every slot and the eventfd
    return sqe;
}

void DeviceRing::enter(bool wait) {
    count(stats_.enters);
    const int result =
        wait ? io_uring_submit_and_wait(&ring_, 1) : io_uring_submit_and_get_events(&ring_);
    if (result >= 0 || result == -EINTR || result == -EBUSY) return;
    // What was not taken stays in the queue for the next turn. Anything but a shortage is our bug.
    TUTTI_CHECK(result == -EAGAIN || result == -ENOMEM);
    std::this_thread::sleep_for(kBackoff);
}

void DeviceRing::reap() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
        const std::uint64_t who = io_uring_cqe_get_data64(cqe);
        const std::int32_t result = cqe->res;
        io_uring_cqe_seen(&ring_, cqe);
        if (who == kWake) {
            take_commands();
        } else {
            landed(static_cast<std::uint32_t>(who), result);
        }
    }
}

/// Issue one transfer. False if nothing can be issued before something else ends.
bool DeviceRing::issue() {
    if (slots_free_.empty() || (issuing_ == kNone && !open_item())) return false;
    Item& item = items_[issuing_];
    const Batch& batch = *item.part->batch;
    const std::uint32_t slot_index = slots_free_.back();
    Slot& slot = slots_[slot_index];
    Cursor cursor = item.cursor;
    plan_transfer(item.fragments, limits_, cursor, slot.transfer);
    slot.bounce_offset_bytes = 0;
    if (slot.transfer.bounce_bytes > 0) {
        const auto place = arena_.take(slot.transfer.bounce_bytes);
        if (!place) return false;
        slot.bounce_offset_bytes = *place;
        if (batch.op == Op::kWrite) {
            count(stats_.bounced_bytes,
                  copy_bounced(Op::kWrite, item.fragments, slot.transfer, arena_.base() + *place));
        }
    }
    slots_free_.pop_back();
    slot.item = issuing_;
    slot.progress = {};
    item.cursor = cursor;
    ++item.transfers_in_flight;
    count(stats_.transfers);
    attempt(slot_index);
    if (cursor.fragment == item.fragments.count) {
        item.issued = true;
        // The source of a write is hashed while the device reads it.
        if (batch.op == Op::kWrite && batch.wants_checksum) queue_hash(issuing_);
        issuing_ = kNone;
    }
    return true;
}

/// Open the next item that has I/O to do; those that must not touch the device end here.
bool DeviceRing::open_item() {
    while (!parts_.empty() && !items_free_.empty()) {
        Part& part = *parts_.front();
        const Batch& batch = *part.batch;
        const std::uint32_t index = batch.order[part.first + part.opened];
        if (++part.opened == part.count) parts_.pop_front();
        const Fragments fragments = batch.fragments_of(index);
        const std::uint64_t length = total_bytes(fragments);
        const std::uint64_t extent = round_up_to_block(length);
        const std::uint64_t offset = batch.offset_bytes[index];
        if (offset > capacity_bytes_ || extent > capacity_bytes_ - offset) {
            close_item(part, index, -ERANGE, length);
            continue;
        }
        const std::uint64_t* address_end = fragments.address + fragments.count;
        if (std::find(fragments.address, address_end, 0) != address_end) {
            close_item(part, index, -EFAULT, length);
            continue;
        }
        issuing_ = items_free_.back();
        items_free_.pop_back();
        items_[issuing_] = {.part = &part,
                            .fragments = fragments,
                            .cursor = {},
                            .length_bytes = length,
                            .index = index,
                            .transfers_in_flight = 0,
                            .status = 0,
                            .issued = false,
                            .hash_queued = false,
                            .hashed = false};
        return true;
    }
    return false;
}

/// Put the rest of a transfer into the submission queue.
void DeviceRing::attempt(std::uint32_t slot_index) {
    Slot& slot = slots_[slot_index];
    const Item& item = items_[slot.item];
    const Batch& batch = *item.part->batch;
    const bool first = slot.progress.resumes == 0 && slot.progress.retries == 0;
    const std::uint64_t length_max = first && options_.first_attempt_bytes > 0
                                         ? options_.first_attempt_bytes
                                         : limits_.transfer_bytes_max;
    std::byte* room = arena_.base() + slot.bounce_offset_bytes;
    iovec* vectors = slot.vectors.data();
    const std::uint32_t vector_count =
        slice_pieces(slot.transfer, slot.progress.from_bytes, length_max, room, vectors);
    const std::uint64_t offset = batch.offset_bytes[item.index] +
                                 slot.transfer.start.position_bytes + slot.progress.from_bytes;
    const bool read = batch.op == Op::kRead;
    const int file = files_registered_ ? 0 : fd_;
    io_uring_sqe* sqe = next_sqe();
    if (vector_count > 1) {
        if (read) {
            io_uring_prep_readv(sqe, file, vectors, vector_count, offset);
        } else {
            io_uring_prep_writev(sqe, file, vectors, vector_count, offset);
        }
    } else {
        void* memory = vectors[0].iov_base;
        const auto length = static_cast<unsigned>(vectors[0].iov_len);
        const auto buffer = memory_.find(reinterpret_cast<std::uint64_t>(memory), length);
        if (buffer) {
            count(stats_.fixed_transfers);
            const auto index = static_cast<int>(*buffer);
            if (read) {
                io_uring_prep_read_fixed(sqe, file, memory, length, offset, index);
            } else {
                io_uring_prep_write_fixed(sqe, file, memory, length, offset, index);
            }
        } else if (read) {
            io_uring_prep_read(sqe, file, memory, length, offset);
        } else {
            io_uring_prep_write(sqe, file, memory, length, offset);
        }
    }
    if (files_registered_) sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(sqe, slot_index);
}

/// Take in the completion of an attempt.
void DeviceRing::landed(std::uint32_t slot_index, std::int32_t result) {
    Slot& slot = slots_[slot_index];
    const std::uint32_t item_index = slot.item;
    Item& item = items_[item_index];
    const Op op = item.part->batch->op;
    const Next next = advance(op, slot.transfer, slot.progress, result);
    if (next == Next::kReissue) {
        if (result >= 0) count(stats_.short_transfers);
        attempt(slot_index);
        return;
    }
    if (next == Next::kDone && op == Op::kRead && slot.transfer.bounce_bytes > 0) {
        count(stats_.bounced_bytes, copy_bounced(Op::kRead, item.fragments, slot.transfer,
                                                 arena_.base() + slot.bounce_offset_bytes));
    }
    if (next == Next::kFail && item.status == 0) {
        item.status = slot.progress.status;
        if (issuing_ == item_index) {
            item.issued = true;
            issuing_ = kNone;
        }
    }
    if (slot.transfer.bounce_bytes > 0)
        arena_.give(slot.bounce_offset_bytes, slot.transfer.bounce_bytes);
    slots_free_.push_back(slot_index);
    --item.transfers_in_flight;
    settle(item_index);
}

/// Close the item if everything about it is known.
void DeviceRing::settle(std::uint32_t item_index) {
    Item& item = items_[item_index];
    if (!item.issued || item.transfers_in_flight > 0 || item.hash_queued) return;
    if (item.part->batch->wants_checksum && item.status == 0 && !item.hashed) {
        queue_hash(item_index);
        return;
    }
    items_free_.push_back(item_index);
    close_item(*item.part, item.index, item.status, item.length_bytes);
}

void DeviceRing::queue_hash(std::uint32_t item_index) {
    items_[item_index].hash_queued = true;
    hash_queue_.push_back(item_index);
}

/// Hash queued items until a turn's worth of bytes is done.
void DeviceRing::hash_some() {
    std::uint64_t hashed_bytes = 0;
    while (!hash_queue_.empty() && hashed_bytes < kHashBytesPerTurn) {
        const std::uint32_t item_index = hash_queue_.front();
        hash_queue_.pop_front();
        Item& item = items_[item_index];
        item.hash_queued = false;
        if (item.status == 0) {
            item.part->batch->checksums[item.index] = checksum(item.fragments);
            item.hashed = true;
            hashed_bytes += item.length_bytes;
        }
        settle(item_index);
    }
}

/// Record an item's result; with the last one the part and its batch are no longer ours.
void DeviceRing::close_item(Part& part, std::uint32_t index, Status status,
                            std::uint64_t length_bytes) {
    Batch& batch = *part.batch;
    batch.status[index] = status;
    if (status < 0) {
        count(stats_.failed_items);
    } else if (batch.op == Op::kRead) {
        count(stats_.read_items);
        count(stats_.read_bytes, length_bytes);
    } else {
        count(stats_.write_items);
        count(stats_.write_bytes, length_bytes);
    }
    if (--part.unfinished == 0) batch.finish(part);
}

}  // namespace tutti
