// Bring-up in the order of the base specification 3.5.1, and every way back down.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tutti/nvme_controller.h"

namespace tutti::nvme {
namespace {

constexpr u64 kShutdownTimeoutNs = 5'000'000'000;

Failure failed(Status code, std::string what, u32 nvme_status = 0) {
    return {code, nvme_status, std::move(what)};
}

Failure gone() { return failed(-ENODEV, "the device is gone: its registers read as all ones"); }

std::string text(const u8* from, std::size_t width) {
    std::string read(reinterpret_cast<const char*>(from), width);
    read.erase(read.find_last_not_of(std::string(" \0", 2)) + 1);
    return read;
}

template <class T>
T get(const u8* page, u32 offset) {
    T value{};
    std::memcpy(&value, page + offset, sizeof value);
    return value;
}

std::string hex(u32 value) {
    char digits[16];
    std::snprintf(digits, sizeof digits, "%#x", value);
    return digits;
}

}  // namespace

Controller::~Controller() {
    close();
    if (stopped_) release_all();  // else the device may still write there
}

// ---- registers ----
u32 Controller::load(u32 offset) {
    return Shared(*reinterpret_cast<u32*>(access_.registers() + offset)).load_acquire();
}

// In two halves: some devices refuse 64-bit reads of registers.
u64 Controller::load64(u32 offset) { return load(offset) | u64{load(offset + 4)} << 32; }

void Controller::store(u32 offset, u32 value) {
    Shared(*reinterpret_cast<u32*>(access_.registers() + offset)).store_release(value);
}

void Controller::store64(u32 offset, u64 value) {
    store(offset, u32(value));
    store(offset + 4, u32(value >> 32));
}

u32* Controller::doorbell(u32 queue, bool completion) {
    const u32 offset = doorbell_offset(queue, completion, capabilities_.stride_shift());
    return reinterpret_cast<u32*>(access_.registers() + offset);
}

bool Controller::dead() {
    const u32 status = load(kRegStatus);
    return status == kAllOnes || (status & kStatusFatal) != 0;
}

bool Controller::ready() { return (load(kRegStatus) & kStatusReady) != 0; }

// ---- up ----
Failure Controller::open(const ControllerOptions& options) {
    std::lock_guard control(control_);
    if (options.queue_pairs < 1 || options.queue_entries < 2 || options.queue_entries > 65536)
        return failed(-EINVAL, "queue_pairs has to be at least 1, queue_entries 2 to 65536");
    if (open_) return failed(-EBUSY, "the controller is open already");
    options_ = options;
    open_ = true;
    Failure failure = start();
    if (failure) close();
    return failure;
}

Failure Controller::start() {
    std::lock_guard alone(running_);
    capabilities_ = {load64(kRegCap)};
    if (capabilities_.gone()) return gone();
    if (!capabilities_.nvm_command_set())
        return failed(-ENOTSUP, "the controller has no NVM command set");
    if (capabilities_.page_shift_min() != 0)
        return failed(-ENOTSUP, "the controller takes no pages of 4 KiB");
    if (Failure failure = disable()) return failure;
    if (Failure failure = enable()) return failure;
    if (Failure failure = identify()) return failure;
    if (facts_.shadow_doorbells) {
        if (Failure failure = use_shadow()) return failure;
    }
    return make_queues();
}

Failure Controller::wait_ready(bool wanted, u64 timeout_ns) {
    Deadline deadline(timeout_ns);
    Backoff backoff;
    for (;;) {
        const u32 status = load(kRegStatus);
        if (status == kAllOnes) return gone();
        if (((status & kStatusReady) != 0) == wanted) return {};
        if (wanted && (status & kStatusFatal) != 0)
            return failed(-EIO, "the controller failed while it was enabled (CSTS.CFS)");
        if (deadline.passed())
            return failed(-ETIMEDOUT, wanted ? "the controller does not become ready"
                                             : "the controller does not stop");
        backoff.turn();
    }
}

Failure Controller::disable() {
    const u32 config = load(kRegConfig);
    if (config == kAllOnes) return gone();
    store(kRegConfig, config & ~(kConfigEnable | 3u << 14));
    return wait_ready(false, capabilities_.ready_timeout_ms() * 1'000'000);
}

Failure Controller::enable() {
    if (Failure failure = prepare(admin_, 0, kAdminEntries, kAdminEntries - 1)) return failure;
    if (page_.address == nullptr && memory_for(kPageBytes, page_) != 0)
        return failed(-ENOMEM, "no memory for DMA");
    stopped_ = false;
    store(kRegAdminSizes, (kAdminEntries - 1) << 16 | (kAdminEntries - 1));
    store64(kRegAdminSq, admin_.sq.dma);
    store64(kRegAdminCq, admin_.cq.dma);
    store(kRegConfig, kConfigEntries | kConfigEnable);
    return wait_ready(true, capabilities_.ready_timeout_ms() * 1'000'000);
}

Status Controller::memory_for(u64 length_bytes, DmaMemory& memory) {
    const u64 rounded = (length_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    const Status status = access_.allocate(rounded, memory);
    if (status == 0) allocated_.push_back(memory);
    return status;
}

QueueMemory Controller::memory_of(Pair& pair, u32 queue) {
    QueueMemory memory{};
    memory.sq = reinterpret_cast<Command*>(pair.sq.address);
    memory.cq = reinterpret_cast<Completion*>(pair.cq.address);
    memory.marks = pair.words.at<u64>();
    memory.id_owner = memory.marks + pair.entries;
    memory.id_next = reinterpret_cast<u32*>(memory.id_owner + pair.ids);
    memory.sq_doorbell = doorbell(queue, false);
    memory.cq_doorbell = doorbell(queue, true);
    if (queue != 0 && facts_.shadow_doorbells) {
        u32* shadow = reinterpret_cast<u32*>(shadow_.address);
        u32* event = reinterpret_cast<u32*>(event_.address);
        memory.sq_shadow = shadow + 2 * queue;
        memory.cq_shadow = shadow + 2 * queue + 1;
        memory.sq_event = event + 2 * queue;
        memory.cq_event = event + 2 * queue + 1;
        // Words of an earlier queue of this number would be taken for this one's.
        for (u32* word : {memory.sq_shadow, memory.cq_shadow, memory.sq_event, memory.cq_event})
            Shared(*word).store_release(0);
    }
    return memory;
}

Status Controller::make_room(Pair& pair, u32 entries, u32 ids) {
    if (pair.queue == nullptr) {
        if (const Status status = pair.object.allocate(sizeof(Queue))) return status;
        pair.queue = new (pair.object.at<void>()) Queue{};
    }
    if (pair.entries >= entries && pair.ids >= ids) return 0;
    if (const Status status = memory_for(entries * sizeof(Command), pair.sq)) return status;
    if (const Status status = memory_for(entries * sizeof(Completion), pair.cq)) return status;
    if (const Status status =
            pair.words.allocate(entries * sizeof(u64) + ids * (sizeof(u64) + sizeof(u32))))
        return status;
    pair.entries = entries;
    pair.ids = ids;
    return 0;
}

Failure Controller::prepare(Pair& pair, u32 id, u32 entries, u32 ids) {
    if (make_room(pair, entries, ids) != 0) return failed(-ENOMEM, "no memory for a queue");
    pair.queue->reset(memory_of(pair, id), id, entries, entries, ids);
    return {};
}

/// Run one admin command and wait for it.
Failure Controller::run(const Command& command, u32* value) {
    Result result{};
    Queue& admin = *admin_.queue;
    if (!admin.submit(command, result, options_.admin_timeout_ns))
        return failed(-EIO, "the admin queue takes no command");
    admin.ring();
    if (!admin.wait(result, options_.admin_timeout_ns)) {
        admin.forget(result);
        if (dead()) return gone();
        return failed(-ETIMEDOUT, "admin command " + hex(command.opcode) + " got no answer",
                      status::kTimeout);
    }
    if (value != nullptr) *value = result.value;
    if (result.status == 0) return {};
    return failed(-EIO,
                  "admin command " + hex(command.opcode) + " failed: status " + hex(result.status),
                  result.status);
}

Failure Controller::identify() {
    const auto ask = [this](u32 what, u32 nsid) {
        Command command{};
        command.opcode = u8(Admin::kIdentify);
        command.nsid = nsid;
        command.data[0] = page_.dma;
        command.cdw10 = what;
        return run(command);
    };
    if (Failure failure = ask(kIdentifyController, 0)) return failure;
    const u8* page = page_.address;
    ControllerFacts found;
    found.serial = text(page + 4, 20);
    found.model = text(page + 24, 40);
    found.firmware = text(page + 64, 8);
    found.version = load(kRegVersion);
    const u32 shift = page[77];
    found.transfer_bytes_max = kTransferBytesCap;
    if (shift != 0 && shift < 32)
        found.transfer_bytes_max = std::min(u64{kPageBytes} << shift, kTransferBytesCap);
    found.queue_entries_max = capabilities_.queue_entries_max();
    found.queue_pairs_max = facts_.queue_pairs_max;
    found.shadow_doorbells = options_.shadow_doorbells && (get<u16>(page, 256) >> 8 & 1) != 0;
    found.sgl = (get<u32>(page, 536) & 3) == 1;  // data blocks at any address

    if (Failure failure = ask(kIdentifyActiveNamespaces, 0)) return failure;
    std::vector<u32> ids;
    for (u32 at = 0; at < kPageBytes / 4 && get<u32>(page, 4 * at) != 0; ++at)
        ids.push_back(get<u32>(page, 4 * at));
    for (const u32 id : ids) {
        if (Failure failure = ask(kIdentifyNamespace, id)) return failure;
        const u32 format = page[26] & 0xf;
        const u32 lbaf = get<u32>(page, 128 + 4 * format);
        const u32 lba_shift = lbaf >> 16 & 0xff;
        if (lba_shift < 9 || lba_shift > 16)
            return failed(-ENOTSUP, "namespace " + std::to_string(id) + " has blocks of 2^" +
                                        std::to_string(lba_shift) + " bytes");
        found.namespaces.push_back({id, get<u64>(page, 0), 1u << lba_shift, lbaf & 0xffff});
    }
    std::lock_guard guard(facts_mutex_);
    facts_ = std::move(found);
    return {};
}

Failure Controller::use_shadow() {
    if (shadow_.address == nullptr &&
        (memory_for(kPageBytes, shadow_) != 0 || memory_for(kPageBytes, event_) != 0))
        return failed(-ENOMEM, "no memory for DMA");
    std::memset(shadow_.address, 0, kPageBytes);
    std::memset(event_.address, 0, kPageBytes);
    Command command{};
    command.opcode = u8(Admin::kDoorbellBuffers);
    command.data[0] = shadow_.dma;
    command.data[1] = event_.dma;
    return run(command);
}

Failure Controller::make_queues() {
    Command command{};
    command.opcode = u8(Admin::kSetFeatures);
    command.cdw10 = kFeatureQueueCount;
    command.cdw11 = (options_.queue_pairs - 1) << 16 | (options_.queue_pairs - 1);
    u32 given = 0;
    if (Failure failure = run(command, &given)) return failure;
    {
        std::lock_guard guard(facts_mutex_);
        facts_.queue_pairs_max = std::min((given & 0xffff) + 1, (given >> 16) + 1);
    }
    u32 count = std::min(options_.queue_pairs, facts_.queue_pairs_max);
    const u64 end = doorbell_offset(count + 1, false, capabilities_.stride_shift());
    if (end > access_.register_bytes())
        return failed(-ENOTSUP, "the doorbells of " + std::to_string(count) +
                                    " queue pairs lie outside of BAR0");
    if (facts_.shadow_doorbells) count = std::min(count, kPageBytes / 8 - 1);
    while (pairs_.size() < count) pairs_.push_back(std::make_unique<Pair>());
    for (u32 index = 0; index < count; ++index) {
        if (Failure failure = make_queue(index)) return failure;
    }
    return {};
}

Failure Controller::make_queue(u32 index) {
    const u32 id = index + 1;
    const u32 entries = std::min(options_.queue_entries, facts_.queue_entries_max);
    u32 ids = entries - 1;
    if (options_.commands_max != 0) ids = std::min(ids, options_.commands_max);
    Pair& pair = *pairs_[index];
    if (Failure failure = prepare(pair, id, entries, ids)) return failure;
    Command command{};
    command.opcode = u8(Admin::kCreateCq);
    command.data[0] = pair.cq.dma;
    command.cdw10 = (entries - 1) << 16 | id;
    command.cdw11 = 1;  // contiguous, no interrupt
    if (Failure failure = run(command)) return failure;
    command.opcode = u8(Admin::kCreateSq);
    command.data[0] = pair.sq.dma;
    command.cdw11 = id << 16 | 1;
    return run(command);
}

u32 Controller::flush(u32 nsid, u64 timeout_ns) {
    Command command{};
    command.opcode = u8(Io::kFlush);
    command.nsid = nsid;
    return run_io(command, timeout_ns);
}

u32 Controller::transfer(Io op, u32 nsid, u64 offset_bytes, u8* bytes, u64 length_bytes,
                         u64 timeout_ns) {
    const std::vector<Namespace> namespaces = facts().namespaces;
    const auto found = std::find_if(namespaces.begin(), namespaces.end(),
                                    [nsid](const Namespace& one) { return one.id == nsid; });
    if (found == namespaces.end()) return status::kInvalidNamespace;
    const u64 block = found->block_bytes;
    // With metadata a block is longer than it says, or the rest goes to an address of its own.
    if (found->metadata_bytes != 0 || offset_bytes % block != 0 || length_bytes % block != 0 ||
        block > kPageBytes)
        return status::kInvalidField;
    std::lock_guard guard(pages_mutex_);
    if (pages_.address == nullptr) {
        std::lock_guard control(control_);
        if (memory_for(2 * kPageBytes, pages_) != 0) return status::kBadMemory;
    }
    while (length_bytes > 0) {
        const u64 step = std::min(length_bytes, u64{2 * kPageBytes});
        Command command = transfer_command(op, nsid, offset_bytes / block, u32(step / block));
        command.data[0] = pages_.dma;
        command.data[1] = step > kPageBytes ? pages_.dma + kPageBytes : 0;
        if (op == Io::kWrite) std::memcpy(pages_.address, bytes, step);
        const u32 status = run_io(command, timeout_ns);
        if (status == status::kTimeout) pages_ = {};  // the device's, until it was reset
        if (status != status::kSuccess) return status;
        if (op == Io::kRead) std::memcpy(bytes, pages_.address, step);
        offset_bytes += step;
        bytes += step;
        length_bytes -= step;
    }
    return status::kSuccess;
}

u32 Controller::run_io(const Command& command, u64 timeout_ns) {
    std::shared_lock running(running_);
    if (!open_) return status::kDeviceGone;
    if (pairs_.empty()) return status::kNotIssued;
    Queue& queue = *pairs_[0]->queue;
    // Not on the stack: if it has to be forgotten while another thread retires it, that one may
    // still be writing.
    Result& result = *new Result{};
    bool ended = !queue.submit(command, result, timeout_ns);
    if (!ended) {
        queue.ring();
        ended = queue.wait(result, timeout_ns) || queue.forget(result);
    }
    if (!ended && !queue.wait(result, timeout_ns)) return status::kTimeout;
    const u32 status = result.status;
    delete &result;
    return status;
}

void Controller::list_shared(SharedRanges& ranges) {
    std::lock_guard control(control_);
    ranges.push_back(
        {reinterpret_cast<std::uintptr_t>(access_.registers()), access_.register_bytes(), true});
    for (const DmaMemory& memory : allocated_)
        ranges.push_back(
            {reinterpret_cast<std::uintptr_t>(memory.address), memory.length_bytes, false});
    for (const auto& pair : pairs_) {
        pair->object.list(ranges);
        pair->words.list(ranges);
    }
}

// ---- trouble, and down ----
Failure Controller::abort(u32 queue, u32 command_id, bool& aborted) {
    std::lock_guard control(control_);
    Command command{};
    command.opcode = u8(Admin::kAbort);
    command.cdw10 = command_id << 16 | queue;
    u32 value = 1;
    Failure failure = run(command, &value);
    aborted = !failure && (value & 1) == 0;
    return failure;
}

void Controller::close_queues() {
    for (auto& pair : pairs_) {
        if (pair->queue != nullptr) pair->queue->close();
    }
}

void Controller::end_all(u32 why) {
    if (admin_.queue != nullptr) admin_.queue->abandon(why);
    for (auto& pair : pairs_) {
        if (pair->queue != nullptr) pair->queue->abandon(why);
    }
}

Failure Controller::reset() {
    std::lock_guard control(control_);
    if (!open_) return open(options_);
    close_queues();
    const Failure stopped = disable();
    // What did not stop may still move bytes: nothing in flight is given back then.
    if (stopped && stopped.code != -ENODEV) return stopped;
    stopped_ = true;
    end_all(status::kDeviceGone);
    if (stopped) return stopped;
    return start();
}

void Controller::close() {
    std::lock_guard control(control_);
    if (!open_) return;
    open_ = false;
    close_queues();
    if (!dead() && ready()) {
        store(kRegConfig, load(kRegConfig) | kConfigShutdown);
        Deadline deadline(kShutdownTimeoutNs);
        Backoff backoff;
        while ((load(kRegStatus) & kStatusShutdownMask) != kStatusShutdownDone && !dead() &&
               !deadline.passed())
            backoff.turn();
    }
    const Failure failure = disable();
    stopped_ = !failure || failure.code == -ENODEV;
    if (stopped_) end_all(status::kDeviceGone);
}

bool Controller::close_if_dead() {
    std::unique_lock control(control_, std::try_to_lock);
    if (!control.owns_lock() || !open_ || (!dead() && ready())) return false;
    close();
    return stopped_;
}

void Controller::release_all() {
    for (const DmaMemory& memory : allocated_) access_.release(memory);
    allocated_.clear();
}

}  // namespace tutti::nvme
