// The software controller: its thread, the NVMe rules that it checks, and its faults.
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "tutti/nvme_soft.h"

namespace tutti::nvme {
namespace {

constexpr u32 kNotRung = 0xffffffff;
constexpr u32 kBurst = 32;  // commands of one queue before the next one's turn
constexpr u32 kFaultsMax = 4096;
constexpr u32 kMappingsMax = 1 << 20;
constexpr u32 kPiecesPerCall = 1024;  // of preadv and pwritev

u32 entries_of(u32 cdw10) { return (cdw10 >> 16) + 1; }

template <class T>
void put(std::array<u8, kPageBytes>& page, u32 offset, T value) {
    std::memcpy(page.data() + offset, &value, sizeof value);
}

void put_text(std::array<u8, kPageBytes>& page, u32 offset, u32 width, const std::string& text) {
    std::memset(page.data() + offset, ' ', width);
    std::memcpy(page.data() + offset, text.data(), std::min<std::size_t>(width, text.size()));
}

/// Move all bytes of the pieces; false if the file refuses.
bool move_file(int file, bool write, std::vector<iovec>& pieces, off_t at) {
    std::size_t first = 0;
    while (first < pieces.size()) {
        const int count = int(std::min<std::size_t>(pieces.size() - first, kPiecesPerCall));
        ssize_t moved = write ? pwritev(file, &pieces[first], count, at)
                              : preadv(file, &pieces[first], count, at);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return false;
        at += moved;
        while (moved > 0) {
            iovec& piece = pieces[first];
            const ssize_t part = std::min(moved, ssize_t(piece.iov_len));
            piece.iov_base = static_cast<u8*>(piece.iov_base) + part;
            piece.iov_len -= std::size_t(part);
            moved -= part;
            if (piece.iov_len == 0) ++first;
        }
    }
    return true;
}

}  // namespace

SoftController::SoftController(SoftOptions options) : options_(std::move(options)) {}

SoftController::~SoftController() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
    if (bar_ != nullptr) munmap(bar_, kRegisterBytes);
}

Status SoftController::start() {
    const SoftOptions& o = options_;
    const bool fits = o.namespace_count >= 1 && o.namespace_count <= kSoftNamespacesMax &&
                      (o.block_bytes == 512 || o.block_bytes == 4096) && o.namespace_bytes > 0 &&
                      o.namespace_bytes % o.block_bytes == 0 && o.transfer_shift <= 16 &&
                      o.queue_entries_max >= 2 && o.queue_entries_max <= kSoftEntriesMax &&
                      o.queue_pairs_max >= 1 && o.queue_pairs_max < kSoftQueuesMax &&
                      (o.files.empty() || o.files.size() == o.namespace_count);
    if (!fits) return -EINVAL;
    void* bar =
        mmap(nullptr, kRegisterBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (bar == MAP_FAILED) return -errno;
    bar_ = static_cast<u8*>(bar);
    if (o.files.empty() && !o.null_backend) {
        for (u32 i = 0; i < o.namespace_count; ++i)
            media_.push_back(std::make_unique<u8[]>(o.namespace_bytes));
    }
    if (!o.cuda_library.empty()) {
        if (!o.files.empty()) {
            why_ = "namespaces in files are not copied to GPUs";
            return -ENOTSUP;
        }
        copies_ = DeviceCopy::open(o.cuda_library, why_);
        if (copies_ == nullptr) return -ENOTSUP;
        for (const auto& media : media_) copies_->pin(media.get(), o.namespace_bytes);
    }
    plug_in_.store(true);
    follow_config();
    thread_ = std::thread([this] { run(); });
    return 0;
}

// ---- any thread ----
u64 SoftController::map(void* address, u64 length_bytes) {
    const u64 start = u64(reinterpret_cast<std::uintptr_t>(address));
    if (length_bytes == 0 || start % kPageBytes != 0 || length_bytes % kPageBytes != 0) return 0;
    const bool device = copies_ != nullptr && copies_->is_device(address);
    const std::lock_guard lock(mutex_);
    if (mappings_.size() >= kMappingsMax) return 0;
    const u64 dma = next_dma_;
    next_dma_ += length_bytes + kPageBytes;  // a gap: what runs over the end is noticed
    mappings_.push_back({dma, static_cast<u8*>(address), length_bytes, device});
    mappings_version_.fetch_add(1);
    return dma;
}

void SoftController::unmap(u64 dma) {
    {
        const std::lock_guard lock(mutex_);
        std::erase_if(mappings_, [=](const Mapping& mapping) { return mapping.dma == dma; });
        mappings_version_.fetch_add(1);
    }
    sync_unmapped();
}

void SoftController::sync_unmapped() {
    const u64 version = mappings_version_.load();
    while (mappings_seen_.load() < version && !stop_.load()) sched_yield();
}

void SoftController::inject(const SoftFault& fault) {
    const std::lock_guard lock(mutex_);
    if (faults_.size() < kFaultsMax) faults_.push_back(fault);
    any_faults_.store(true);
}

void SoftController::clear_faults() {
    const std::lock_guard lock(mutex_);
    faults_.clear();
    any_faults_.store(false);
}

void SoftController::release() {
    const std::lock_guard lock(mutex_);  // before or after a command meets a fault, never between
    releases_.fetch_add(1, std::memory_order_release);
}

void SoftController::plug_in() { plug_in_.store(true); }

SoftStats SoftController::stats() const {
    return {count_.commands.load(), count_.faults.load(), count_.bad_pointers.load(),
            count_.unmapped.load(), count_.doorbells.load()};
}

// ---- registers ----
u32 SoftController::load(u32 offset) { return Shared(*reg(offset)).load_acquire(); }

void SoftController::store(u32 offset, u32 value) { Shared(*reg(offset)).store_release(value); }

void SoftController::store64(u32 offset, u64 value) {
    store(offset, u32(value));
    store(offset + 4, u32(value >> 32));
}

u32* SoftController::doorbell_word(u32 queue, bool completion) {
    return reg(doorbell_offset(queue, completion, 0));
}

void SoftController::follow_config() {
    if (plug_in_.exchange(false)) {
        for (u32 offset = 0; offset < kRegDoorbells; offset += 4) {
            if (offset != kRegStatus) store(offset, 0);
        }
        // NVM command set, 7.5 s to become ready, contiguous queues.
        const u64 entries = options_.queue_entries_max - 1;
        store64(kRegCap, u64{1} << 37 | u64{15} << 24 | u64{1} << 16 | entries);
        store(kRegVersion, 0x10400);
        gone_ = false;
        disable();  // the status is the last to come back
    }
    if (gone_) {
        for (u32 offset = 0; offset < kRegDoorbells; offset += 4) store(offset, kAllOnes);
        return;
    }
    const u32 config = load(kRegConfig);
    const bool wanted = (config & kConfigEnable) != 0;
    if (wanted && !enabled_) enable();
    if (!wanted && (enabled_ || fatal_)) disable();
    const u32 status = load(kRegStatus);
    if (enabled_ && (config >> 14 & 3) != 0 && (status & kStatusShutdownMask) == 0)
        store(kRegStatus, status | kStatusShutdownDone);
}

void SoftController::enable() {
    const u32 sizes = load(kRegAdminSizes);
    const u64 sq = load(kRegAdminSq) | u64{load(kRegAdminSq + 4)} << 32;
    const u64 cq = load(kRegAdminCq) | u64{load(kRegAdminCq + 4)} << 32;
    refresh_mappings();
    Sq admin_sq{nullptr, (sizes & 0xfff) + 1, 0, 0, 0};
    Cq admin_cq{nullptr, (sizes >> 16 & 0xfff) + 1, 0, 0, 1};
    admin_sq.entries = reinterpret_cast<Command*>(reach(sq, admin_sq.size * sizeof(Command)));
    admin_cq.entries = reinterpret_cast<Completion*>(reach(cq, admin_cq.size * sizeof(Completion)));
    enabled_ = true;
    if (admin_sq.entries == nullptr || admin_cq.entries == nullptr || sq % kPageBytes != 0 ||
        cq % kPageBytes != 0) {
        fatal_ = true;
        store(kRegStatus, kStatusFatal);
        return;
    }
    sq_[0] = admin_sq;
    cq_[0] = admin_cq;
    store(kRegStatus, kStatusReady);
}

void SoftController::disable() {
    for (u32 queue = 0; queue < kSoftQueuesMax; ++queue) {
        sq_[queue] = Sq{};
        cq_[queue] = Cq{};
        asleep_[queue] = false;
        Shared(*doorbell_word(queue, false)).store_release(kNotRung);
        Shared(*doorbell_word(queue, true)).store_release(kNotRung);
    }
    waiting_.clear();
    posted_.clear();
    events_.clear();
    shadow_ = event_ = nullptr;
    enabled_ = fatal_ = false;
    store(kRegStatus, 0);
}

// ---- the thread ----
void SoftController::run() {
    Backoff backoff;
    while (!stop_.load(std::memory_order_relaxed)) {
        follow_config();
        refresh_mappings();
        bool worked = false;
        if (enabled_ && !fatal_ && !gone_) {
            worked |= post_waiting();
            for (u32 queue = 0; queue < kSoftQueuesMax && !fatal_ && !gone_; ++queue)
                worked |= serve(queue);
            worked |= age_waiting();
        }
        if (worked) {
            backoff.reset();
        } else {
            backoff.turn();
        }
    }
}

void SoftController::refresh_mappings() {
    const u64 version = mappings_version_.load();
    if (version == mappings_seen_.load(std::memory_order_relaxed)) return;
    {
        const std::lock_guard lock(mutex_);
        reachable_ = mappings_;  // device addresses only grow: sorted
    }
    mappings_seen_.store(version);
}

/// Whether a doorbell was written since the last look. It is set back to a value that is none, so
/// that writing the same value again is seen, as a device sees it.
bool SoftController::take_doorbell(u32 queue, bool completion, u32& value) {
    Shared word(*doorbell_word(queue, completion));
    if (word.load_relaxed() == kNotRung) return false;
    value = word.exchange(kNotRung);
    count_.doorbells.fetch_add(1, std::memory_order_relaxed);
    return true;
}

/// The tail of a submission queue as the host says it.
u32 SoftController::tail_of(u32 queue) {
    Sq& sq = sq_[queue];
    if (take_doorbell(queue, false, sq.rung)) asleep_[queue] = false;
    if (shadow_ == nullptr || queue == 0) return sq.rung;
    if (asleep_[queue]) return sq.head;
    return Shared(shadow_[2 * queue]).load_acquire();
}

bool SoftController::serve(u32 queue) {
    Sq& sq = sq_[queue];
    if (sq.entries == nullptr) return false;
    const u32 tail = tail_of(queue);
    refresh_mappings();     // what was mapped before that tail was rung is reached
    if (tail >= sq.size) {  // the host wrote nonsense
        fatal_ = true;
        Shared(*reg(kRegStatus)).store_release(load(kRegStatus) | kStatusFatal);
        return false;
    }
    if (sq.head == tail) {
        if (shadow_ == nullptr || queue == 0 || asleep_[queue]) return false;
        // Ask to be told when the tail passes what we know, then look once more.
        Shared(event_[2 * queue]).store_release(tail);
        full_fence();
        asleep_[queue] = Shared(shadow_[2 * queue]).load_acquire() == tail;
        return false;
    }
    for (u32 left = kBurst; left > 0 && sq.entries != nullptr && sq.head != tail; --left) {
        const Command command = sq.entries[sq.head];
        sq.head = sq.head + 1 == sq.size ? 0 : sq.head + 1;
        count_.commands.fetch_add(1, std::memory_order_relaxed);
        if (queue != 0) {
            serve_io(queue, command);
        } else if (command.opcode == u8(Admin::kAsyncEvent)) {
            events_.push_back(command.id);
        } else {
            u32 value = 0;
            const u32 status = serve_admin(command, value);
            complete(0, command.id, status | (status != 0 ? status::kDoNotRetry : 0), value);
        }
        if (fatal_ || gone_) break;
    }
    complete_copied();
    return true;
}

// ---- completions ----
bool SoftController::has_room(u32 cq_id) {
    Cq& cq = cq_[cq_id];
    take_doorbell(cq_id, true, cq.head);
    if (shadow_ != nullptr && cq_id != 0) cq.head = Shared(shadow_[2 * cq_id + 1]).load_acquire();
    return (cq.tail + 1) % cq.size != cq.head;
}

void SoftController::complete(u32 queue, u32 id, u32 status, u32 value) {
    const u32 cq_id = sq_[queue].cq;
    if (sq_[queue].entries == nullptr || cq_[cq_id].entries == nullptr)
        return;  // deleted meanwhile
    const Posted posted{queue, cq_id, id, status, value};
    const bool first = std::none_of(posted_.begin(), posted_.end(),
                                    [=](const Posted& other) { return other.cq_id == cq_id; });
    if (first && has_room(cq_id)) {
        write_completion(posted, queue, sq_[queue].head, 0);
    } else {
        posted_.push_back(posted);
    }
}

bool SoftController::post_waiting() {
    bool worked = false;
    for (std::size_t i = 0; i < posted_.size();) {
        const Posted posted = posted_[i];
        if (cq_[posted.cq_id].entries != nullptr && !has_room(posted.cq_id)) {
            ++i;
            continue;
        }
        posted_.erase(posted_.begin() + std::ptrdiff_t(i));
        if (cq_[posted.cq_id].entries != nullptr)
            write_completion(posted, posted.sq_id, sq_[posted.sq_id].head, 0);
        worked = true;
    }
    return worked;
}

void SoftController::write_completion(const Posted& posted, u32 sq_id, u32 head, u32 turns) {
    Cq& cq = cq_[posted.cq_id];
    Completion& entry = cq.entries[cq.tail];
    Shared(entry.result).store_relaxed(posted.value);
    Shared(entry.reserved).store_relaxed(0);
    Shared(entry.head_and_queue).store_relaxed(head | sq_id << 16);
    for (; turns > 0; --turns) sched_yield();
    // The word with the phase last, and with release.
    Shared(entry.id_and_status)
        .store_release(posted.id | cq.phase << 16 | (posted.status & 0x7fff) << 17);
    if (++cq.tail == cq.size) {
        cq.tail = 0;
        cq.phase ^= 1;
    }
}

// ---- memory ----
const SoftController::Mapping* SoftController::mapping_of(u64 dma, u64 length_bytes) {
    auto next = std::upper_bound(reachable_.begin(), reachable_.end(), dma,
                                 [](u64 at, const Mapping& mapping) { return at < mapping.dma; });
    if (next != reachable_.begin()) {
        const Mapping& mapping = *std::prev(next);
        const u64 skip = dma - mapping.dma;
        if (skip <= mapping.length_bytes && length_bytes <= mapping.length_bytes - skip)
            return &mapping;
    }
    count_.unmapped.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
}

/// Host memory by device address, or null.
u8* SoftController::reach(u64 dma, u64 length_bytes) {
    const Mapping* mapping = mapping_of(dma, length_bytes);
    return mapping == nullptr || mapping->device ? nullptr
                                                 : mapping->address + (dma - mapping->dma);
}

bool SoftController::add_piece(u64 dma, u64 length_bytes) {
    const Mapping* mapping = mapping_of(dma, length_bytes);
    if (mapping == nullptr) return false;
    u8* address = mapping->address + (dma - mapping->dma);
    if (!pieces_.empty() && pieces_.back().address + pieces_.back().length_bytes == address &&
        pieces_.back().device == mapping->device) {
        pieces_.back().length_bytes += u32(length_bytes);
    } else {
        pieces_.push_back({address, u32(length_bytes), mapping->device});
    }
    return true;
}

u32 SoftController::gather(const Command& command, u64 length_bytes) {
    pieces_.clear();
    const u32 kind = command.flags >> 6;
    u32 status = status::kInvalidField;
    if (kind == 0) status = gather_prp(command, length_bytes);
    if (kind == 1 && options_.sgl) status = gather_sgl(command, length_bytes);
    if (status != 0) count_.bad_pointers.fetch_add(1, std::memory_order_relaxed);
    return status;
}

/// Every rule: PRP1 aligned to 4, PRP2 and list entries to a page, the list itself to 8, and the
/// last entry of a list page leads on if more than one page is left.
u32 SoftController::gather_prp(const Command& command, u64 length_bytes) {
    const u64 first = command.data[0];
    if (first % 4 != 0) return status::kPrpOffset;
    u64 part = std::min<u64>(length_bytes, kPageBytes - first % kPageBytes);
    if (!add_piece(first, part)) return status::kDataTransfer;
    u64 left = length_bytes - part;
    if (left == 0) return 0;
    u64 at = command.data[1];
    if (left <= kPageBytes) {
        if (at % kPageBytes != 0) return status::kPrpOffset;
        return add_piece(at, left) ? 0 : status::kDataTransfer;
    }
    if (at % 8 != 0) return status::kPrpOffset;
    while (left > 0) {
        const u64 in_page = (kPageBytes - at % kPageBytes) / 8;
        const u64 count = std::min(in_page, (left + kPageBytes - 1) / kPageBytes);
        const bool leads_on = count == in_page && left > in_page * kPageBytes;
        const u8* entries = reach(at, count * 8);
        if (entries == nullptr) return status::kDataTransfer;
        for (u64 i = 0; i < count; ++i) {
            u64 entry = 0;
            std::memcpy(&entry, entries + i * 8, 8);
            if (entry % kPageBytes != 0) return status::kPrpOffset;
            if (leads_on && i + 1 == count) {
                at = entry;
                break;
            }
            part = std::min<u64>(left, kPageBytes);
            if (!add_piece(entry, part)) return status::kDataTransfer;
            left -= part;
        }
    }
    return 0;
}

/// One data block descriptor in the command, which is all that Tutti sends.
u32 SoftController::gather_sgl(const Command& command, u64 length_bytes) {
    SglDescriptor sgl{};
    std::memcpy(&sgl, command.data, sizeof sgl);
    if (sgl.type != kSglDataBlock) return status::kSglType;
    if (sgl.address % 4 != 0) return status::kInvalidField;
    if (sgl.length_bytes != length_bytes) return status::kSglLength;
    return add_piece(sgl.address, length_bytes) ? 0 : status::kDataTransfer;
}

// ---- I/O commands ----
void SoftController::serve_io(u32 queue, const Command& command) {
    SoftFault fault;
    if (any_faults_.load(std::memory_order_acquire) && take_fault(queue, command, fault)) {
        count_.faults.fetch_add(1, std::memory_order_relaxed);
        complete_copied();
        meet(queue, command, fault);
        return;
    }
    const u32 status = run_command(command, SoftFault::Kind::kStatus);
    if (copies_queued_) {
        copying_.push_back(
            {queue, command.id, status});  // the copies of a burst are waited for together
    } else {
        complete(queue, command.id, status);
    }
}

/// Wait for queued copies. A status.
u32 SoftController::finish_copies() {
    if (!copies_queued_) return 0;
    copies_queued_ = false;
    return copies_->finish() ? 0 : status::kDataTransfer;
}

/// End the commands of a burst whose copies were queued.
void SoftController::complete_copied() {
    const u32 status = finish_copies();
    for (const Copying& one : copying_)
        complete(one.queue, one.id, one.status != 0 ? one.status : status);
    copying_.clear();
}

/// Carry a command out; nothing of it is queued on return.
u32 SoftController::execute(const Command& command, SoftFault::Kind how) {
    const u32 status = run_command(command, how);
    const u32 copied = finish_copies();
    return status != 0 ? status : copied;
}

bool SoftController::take_fault(u32 queue, const Command& command, SoftFault& fault) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < faults_.size(); ++i) {
        SoftFault& at = faults_[i];
        if (at.queue != 0 && at.queue != queue) continue;
        if (at.opcode >= 0 && at.opcode != command.opcode) continue;
        if (at.skip > 0) {
            --at.skip;
            continue;
        }
        fault = at;
        releases_met_ = releases_.load(std::memory_order_relaxed);
        if (--at.count == 0) faults_.erase(faults_.begin() + std::ptrdiff_t(i));
        if (faults_.empty()) any_faults_.store(false);
        return true;
    }
    return false;
}

void SoftController::meet(u32 queue, const Command& command, const SoftFault& fault) {
    using Kind = SoftFault::Kind;
    const auto lie = [&](u32 id, u32 sq_id, u32 head) {
        if (has_room(sq_[queue].cq))
            write_completion({queue, sq_[queue].cq, id, 0, 0}, sq_id, head, 0);
    };
    switch (fault.kind) {
        case Kind::kStatus:
            complete(queue, command.id, fault.status);
            break;
        case Kind::kDrop:
            execute(command, fault.kind);
            break;
        case Kind::kLose:
            break;
        case Kind::kDelay:
            waiting_.push_back({queue, fault.turns, false, 0, fault.kind, command});
            break;
        case Kind::kHold:
            waiting_.push_back({queue, 0, true, releases_met_, fault.kind, command});
            break;
        case Kind::kRepeat: {
            const u32 status = execute(command, fault.kind);
            complete(queue, command.id, status);
            complete(queue, command.id, status);
            break;
        }
        case Kind::kTorn: {
            const u32 status = execute(command, fault.kind);
            if (has_room(sq_[queue].cq)) {
                write_completion({queue, sq_[queue].cq, command.id, status, 0}, queue,
                                 sq_[queue].head, fault.turns);
            } else {
                complete(queue, command.id, status);
            }
            break;
        }
        case Kind::kWrongId:
            lie(0xfffe, queue, sq_[queue].head);
            complete(queue, command.id, execute(command, fault.kind));
            break;
        case Kind::kWrongQueue:
            lie(command.id, queue + 1, sq_[queue].head);
            complete(queue, command.id, execute(command, fault.kind));
            break;
        case Kind::kWrongHead:
            lie(0xfffe, queue, (sq_[queue].head + sq_[queue].size / 2) % sq_[queue].size);
            complete(queue, command.id, execute(command, fault.kind));
            break;
        case Kind::kShort:
        case Kind::kFlip:
            complete(queue, command.id, execute(command, fault.kind));
            break;
        case Kind::kFatal:
            fatal_ = true;
            store(kRegStatus, load(kRegStatus) | kStatusFatal);
            break;
        case Kind::kGone:
            disable();
            gone_ = true;
            follow_config();
            break;
    }
}

u32 SoftController::run_command(const Command& command, SoftFault::Kind how) {
    const bool flush = command.opcode == u8(Io::kFlush);
    if (flush && command.nsid == kAllNamespaces) return 0;
    if (command.nsid < 1 || command.nsid > options_.namespace_count)
        return status::kInvalidNamespace | status::kDoNotRetry;
    if (flush) return 0;
    if (command.opcode != u8(Io::kRead) && command.opcode != u8(Io::kWrite))
        return status::kInvalidOpcode | status::kDoNotRetry;
    const u32 status = move(command, how);
    return status == 0 ? 0 : status | status::kDoNotRetry;
}

u32 SoftController::move(const Command& command, SoftFault::Kind how) {
    const u64 lba = command.cdw10 | u64{command.cdw11} << 32;
    const u64 count = (command.cdw12 & 0xffff) + 1;
    const u64 blocks = options_.namespace_bytes / options_.block_bytes;
    u64 length = count * options_.block_bytes;
    if (options_.transfer_shift != 0 && length > u64{kPageBytes} << options_.transfer_shift)
        return status::kInvalidField;
    if (lba > blocks || count > blocks - lba) return status::kLbaRange;
    if (options_.null_backend) return 0;
    const u32 refused = gather(command, length);
    if (refused != 0) return refused;
    if (how == SoftFault::Kind::kShort) length /= 2;
    const bool write = command.opcode == u8(Io::kWrite);
    const u64 at = lba * options_.block_bytes;
    if (std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& one) { return one.device; })) {
        if (how == SoftFault::Kind::kFlip) return status::kInternal;
        return copy_parts(media_[command.nsid - 1].get() + at, write, length);
    }
    std::vector<iovec> parts;
    for (const Piece& piece : pieces_) {
        const u64 part = std::min<u64>(piece.length_bytes, length);
        if (part > 0) parts.push_back({piece.address, part});
        length -= part;
    }
    u8* first = static_cast<u8*>(parts[0].iov_base);
    if (how == SoftFault::Kind::kFlip && write) first[0] ^= 1;
    bool good = true;
    if (options_.files.empty()) {
        u8* disk = media_[command.nsid - 1].get() + at;
        for (const iovec& part : parts) {
            std::memcpy(write ? disk : part.iov_base, write ? part.iov_base : disk, part.iov_len);
            disk += part.iov_len;
        }
    } else {
        good = move_file(options_.files[command.nsid - 1], write, parts, off_t(at));
    }
    if (how == SoftFault::Kind::kFlip) first[0] ^= 1;
    if (good) return 0;
    return write ? status::kWriteFault : status::kReadError;
}

/// Queue the copies of a command that reaches into a GPU's memory.
u32 SoftController::copy_parts(u8* disk, bool write, u64 length_bytes) {
    for (const Piece& piece : pieces_) {
        const u64 part = std::min<u64>(piece.length_bytes, length_bytes);
        if (part == 0) break;
        copies_queued_ = true;
        if (!copies_->copy(write ? disk : piece.address, write ? piece.address : disk, part))
            return status::kDataTransfer;
        disk += part;
        length_bytes -= part;
    }
    return 0;
}

bool SoftController::age_waiting() {
    const u64 releases = releases_.load(std::memory_order_acquire);
    bool worked = false;
    for (std::size_t i = 0; i < waiting_.size();) {
        Waiting& at = waiting_[i];
        const bool due = at.held ? releases != at.releases : at.turns == 0;
        if (!due) {
            if (!at.held) --at.turns;
            worked |= !at.held;
            ++i;
            continue;
        }
        const Waiting out = at;
        waiting_.erase(waiting_.begin() + std::ptrdiff_t(i));
        complete(out.queue, out.command.id, execute(out.command, SoftFault::Kind::kStatus));
        worked = true;
    }
    return worked;
}

/// End what waits of one queue with `status`: the command `id`, or all (id < 0).
u32 SoftController::end_waiting(u32 queue, int id, u32 status) {
    u32 count = 0;
    for (std::size_t i = 0; i < waiting_.size();) {
        const Waiting at = waiting_[i];
        if (at.queue != queue || (id >= 0 && at.command.id != id)) {
            ++i;
            continue;
        }
        waiting_.erase(waiting_.begin() + std::ptrdiff_t(i));
        complete(queue, at.command.id, status);
        ++count;
    }
    return count;
}

// ---- admin commands ----
u32 SoftController::serve_admin(const Command& command, u32& value) {
    switch (Admin(command.opcode)) {
        case Admin::kIdentify:
            return identify(command);
        case Admin::kSetFeatures:
        case Admin::kGetFeatures:
            if ((command.cdw10 & 0xff) != kFeatureQueueCount) return status::kInvalidField;
            value = (options_.queue_pairs_max - 1) << 16 | (options_.queue_pairs_max - 1);
            return 0;
        case Admin::kCreateCq:
            return create_cq(command);
        case Admin::kCreateSq:
            return create_sq(command);
        case Admin::kDeleteSq:
            return delete_sq(command.cdw10 & 0xffff);
        case Admin::kDeleteCq:
            return delete_cq(command.cdw10 & 0xffff);
        case Admin::kAbort:
            // Bit 0 of the result: not aborted.
            value = end_waiting(command.cdw10 & 0xffff, int(command.cdw10 >> 16), status::kAborted)
                        ? 0
                        : 1;
            return 0;
        case Admin::kDoorbellBuffers:
            return set_shadow(command);
        default:
            return status::kInvalidOpcode;
    }
}

u32 SoftController::identify(const Command& command) {
    std::array<u8, kPageBytes> page{};
    switch (command.cdw10 & 0xff) {
        case kIdentifyNamespace: {
            if (command.nsid < 1 || command.nsid > options_.namespace_count)
                return status::kInvalidNamespace;
            const u64 blocks = options_.namespace_bytes / options_.block_bytes;
            put(page, 0, blocks);
            put(page, 8, blocks);
            put(page, 16, blocks);
            const u32 shift = options_.block_bytes == 512 ? 9 : 12;
            put(page, 128, shift << 16);
            break;
        }
        case kIdentifyController:
            put(page, 0, u16{0x1d17});
            put_text(page, 4, 20, options_.serial);
            put_text(page, 24, 40, "Tutti software controller");
            put_text(page, 64, 8, "1");
            put(page, 77, u8(options_.transfer_shift));
            put(page, 80, u32{0x10400});
            put(page, 256, u16(options_.shadow_doorbells ? 1u << 8 : 0u));
            put(page, 512, u8{0x66});
            put(page, 513, u8{0x44});
            put(page, 516, options_.namespace_count);
            put(page, 536, options_.sgl ? u32{1} : u32{0});
            break;
        case kIdentifyActiveNamespaces: {
            u32 at = 0;
            for (u32 id = command.nsid + 1; id <= options_.namespace_count; ++id)
                put(page, 4 * at++, id);
            break;
        }
        default:
            return status::kInvalidField;
    }
    const u32 refused = gather(command, kPageBytes);
    if (refused != 0) return refused;
    const u8* from = page.data();
    for (const Piece& piece : pieces_) {
        std::memcpy(piece.address, from, piece.length_bytes);
        from += piece.length_bytes;
    }
    return 0;
}

u32 SoftController::create_cq(const Command& command) {
    const u32 queue = command.cdw10 & 0xffff, size = entries_of(command.cdw10);
    if (queue == 0 || queue > options_.queue_pairs_max || cq_[queue].entries != nullptr)
        return status::kQueueId;
    if (size < 2 || size > options_.queue_entries_max) return status::kQueueSize;
    if ((command.cdw11 & 1) == 0) return status::kInvalidField;  // has to be contiguous
    if (command.data[0] % kPageBytes != 0) return status::kPrpOffset;
    u8* memory = reach(command.data[0], size * sizeof(Completion));
    if (memory == nullptr) return status::kDataTransfer;
    Shared(*doorbell_word(queue, true)).store_release(kNotRung);
    cq_[queue] = {reinterpret_cast<Completion*>(memory), size, 0, 0, 1};
    return 0;
}

u32 SoftController::create_sq(const Command& command) {
    const u32 queue = command.cdw10 & 0xffff, size = entries_of(command.cdw10);
    const u32 cq_id = command.cdw11 >> 16;
    if (queue == 0 || queue > options_.queue_pairs_max || sq_[queue].entries != nullptr)
        return status::kQueueId;
    if (cq_id == 0 || cq_id >= kSoftQueuesMax || cq_[cq_id].entries == nullptr)
        return status::kCqInvalid;
    if (size < 2 || size > options_.queue_entries_max) return status::kQueueSize;
    if ((command.cdw11 & 1) == 0) return status::kInvalidField;
    if (command.data[0] % kPageBytes != 0) return status::kPrpOffset;
    u8* memory = reach(command.data[0], size * sizeof(Command));
    if (memory == nullptr) return status::kDataTransfer;
    Shared(*doorbell_word(queue, false)).store_release(kNotRung);
    asleep_[queue] = false;
    sq_[queue] = {reinterpret_cast<const Command*>(memory), size, 0, 0, cq_id};
    return 0;
}

u32 SoftController::delete_sq(u32 queue) {
    if (queue == 0 || queue >= kSoftQueuesMax || sq_[queue].entries == nullptr)
        return status::kQueueId;
    end_waiting(queue, -1, status::kQueueDeleted);
    sq_[queue] = Sq{};
    return 0;
}

u32 SoftController::delete_cq(u32 queue) {
    if (queue == 0 || queue >= kSoftQueuesMax || cq_[queue].entries == nullptr)
        return status::kQueueId;
    for (const Sq& sq : sq_) {
        if (sq.entries != nullptr && sq.cq == queue) return status::kQueueDeletion;
    }
    cq_[queue] = Cq{};
    std::erase_if(posted_, [=](const Posted& posted) { return posted.cq_id == queue; });
    return 0;
}

u32 SoftController::set_shadow(const Command& command) {
    if (!options_.shadow_doorbells) return status::kInvalidOpcode;
    const u64 shadow = command.data[0], event = command.data[1];
    if (shadow % kPageBytes != 0 || event % kPageBytes != 0) return status::kInvalidField;
    u8* one = reach(shadow, kPageBytes);
    u8* other = reach(event, kPageBytes);
    if (one == nullptr || other == nullptr) return status::kInvalidField;
    shadow_ = reinterpret_cast<u32*>(one);
    event_ = reinterpret_cast<u32*>(other);
    for (bool& asleep : asleep_) asleep = false;
    return 0;
}

// ---- the way to it ----
Status SoftAccess::allocate(u64 length_bytes, DmaMemory& memory) {
    void* address =
        mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return -errno;
    u64 dma = 0;
    const Status status = map(address, length_bytes, dma);
    if (status != 0) {
        munmap(address, length_bytes);
        return status;
    }
    memory = {static_cast<u8*>(address), dma, length_bytes};
    return 0;
}

void SoftAccess::release(const DmaMemory& memory) {
    unmap(memory.dma, memory.length_bytes);
    munmap(memory.address, memory.length_bytes);
}

Status SoftAccess::map(void* address, u64 length_bytes, u64& dma) {
    dma = controller_.map(address, length_bytes);
    return dma == 0 ? -EINVAL : 0;
}

void SoftAccess::unmap(u64 dma, u64) { controller_.unmap(dma); }

}  // namespace tutti::nvme
