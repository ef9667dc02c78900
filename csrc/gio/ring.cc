// Preparing IOCBs, handing them over, and hearing of their end.
#include <algorithm>
#include <bit>
#include <cerrno>

#include "tutti/gio_ring.h"

namespace tutti::gio {
namespace {

/// How often a waiting thread looks whether a controller has died.
constexpr u64 kWatchNs = 50'000'000;
/// Of waits that go on for longer than some polls.
constexpr u64 kNapNs = 20'000;
/// What a launch may take for its end beyond its own timeout.
constexpr u64 kEndNs = 1'000'000'000;
/// Words of a set of regions.
constexpr u32 kRegionWords = nvme::kRegionsMax / 64;

void nap() {
    const timespec time{0, kNapNs};
    ::nanosleep(&time, nullptr);
}

}  // namespace

std::unique_ptr<Ring> Ring::open(std::span<const Target> targets, const RingOptions& options,
                                 nvme::Failure& failure) {
    std::unique_ptr<Ring> ring(new Ring);
    const Status status = ring->start(targets, options, failure);
    if (status == 0) return ring;
    if (!failure) failure = {status, 0, "no memory or no threads for a ring"};
    return nullptr;
}

Status Ring::start(std::span<const Target> targets, const RingOptions& options,
                   nvme::Failure& failure) {
    if (targets.empty() || targets.size() > kDevicesMax || options.depth < 1 ||
        options.depth > kDepthMax) {
        failure = {-EINVAL, 0, "a ring has 1 to 16 devices and 1 to 256 IOCBs"};
        return failure.code;
    }
    options_ = options;
    targets_.assign(targets.begin(), targets.end());
    used_.resize(options.depth * targets.size() * kRegionWords);
    devices_.resize(options.depth);
    touched_.resize(options.depth);
    if (const Status status = view_memory_.allocate(sizeof(View))) return status;
    if (const Status status = words_memory_.allocate(options.depth * sizeof(u32))) return status;
    if (const Status status = iocbs_memory_.allocate(options.depth * sizeof(Iocb))) return status;
    view_ = view_memory_.at<View>();
    view_->iocbs = iocbs_memory_.at<Iocb>();
    view_->words = words_memory_.at<u32>();
    view_->depth = options.depth;
    view_->device_count = u32(targets.size());
    for (std::size_t at = 0; at < targets.size(); ++at) {
        const Target& target = targets[at];
        const nvme::ControllerFacts& facts = target.controller->facts();
        const auto found =
            std::find_if(facts.namespaces.begin(), facts.namespaces.end(),
                         [&target](const nvme::Namespace& one) { return one.id == target.nsid; });
        if (found == facts.namespaces.end() || found->metadata_bytes != 0 ||
            found->block_bytes > nvme::kPageBytes) {
            failure = {-ENODEV, 0,
                       "namespace " + std::to_string(target.nsid) + " of " + facts.serial +
                           " does not exist, has metadata, or blocks of more than 4096 bytes"};
            return failure.code;
        }
        Device& device = view_->devices[at];
        // The first pair is the CPU's, for what the controller does itself: a GPU's read-modify-write
        // of host memory may be atomic to other GPU threads alone.
        const u32 skip = options.threads == 0 ? 1 : 0;
        const u32 pairs = target.controller->queue_count();
        if (pairs <= skip) {
            failure = {-EINVAL, 0,
                       "lanes that are no CPU threads need queues of their own: two pairs"};
            return failure.code;
        }
        device.queue_count = std::min(pairs - skip, kQueuesMax);
        for (u32 queue = 0; queue < device.queue_count; ++queue)
            device.queues[queue] = &target.controller->queue(queue + skip);
        device.regions = target.memory->regions();
        device.nsid = target.nsid;
        device.block_shift = u32(std::countr_zero(found->block_bytes));
        device.transfer_bytes_max =
            u32(std::min(facts.transfer_bytes_max, u64{found->block_bytes} << 16));
        device.sgl = facts.sgl ? 1 : 0;
        capacities_.push_back(found->blocks * found->block_bytes);
    }
    for (u32 id = options.depth; id-- > 0;) free_.push_back(id);
    if (options.threads == 0) return 0;
    executor_ = std::make_unique<CpuExecutor>(*view_);
    return executor_->start(options.threads);
}

Ring::~Ring() {
    close();
    for (u32 id = 0; view_ != nullptr && id < view_->depth; ++id) {
        if (ended(id)) continue;
        // Lanes of an external executor that never ended: what they write to stays.
        for (SharedMemory* memory : {&view_memory_, &words_memory_, &iocbs_memory_})
            new SharedMemory(std::move(*memory));
        return;
    }
}

/// Make a transition of the CPU's; false where the table refuses it.
bool Ring::become(u32 id, Event event) {
    if (id >= view_->depth) return false;
    Iocb& iocb = view_->iocbs[id];
    u32 state = Shared(iocb.state).load_acquire();
    const u32 next = next_state(state, event);
    return next != kNever && Shared(iocb.state).swap_if(state, next);
}

Status Ring::get_iocb(std::span<u32> ids) {
    std::lock_guard guard(mutex_);
    if (closed_) return -ESHUTDOWN;
    if (ids.size() > free_.size()) return -EAGAIN;
    for (u32& id : ids) {
        id = free_.back();
        free_.pop_back();
        become(id, Event::kGet);
        view_->iocbs[id].count = 0;
    }
    return 0;
}

Status Ring::put_back(u32 id) {
    if (id >= view_->depth) return -EINVAL;
    std::lock_guard guard(mutex_);
    if (!become(id, Event::kPutBack)) return -EINVAL;
    let_go(id);
    free_.push_back(id);
    return 0;
}

u32 Ring::check(u32 device, const FragmentArrays& fragments, u32 index) const {
    const u64 block = u64{1} << view_->devices[device].block_shift;
    const u64 length = fragments.length_bytes[index];
    const u64 offset = fragments.offset_bytes[index];
    if (length == 0 || length > ~u32{0} || length % block != 0 || offset % block != 0)
        return nvme::status::kInvalidField;
    if (length > capacities_[device] || offset > capacities_[device] - length)
        return nvme::status::kLbaRange;
    if (fragments.address[index] % 4 != 0) return nvme::status::kBadMemory;
    return nvme::status::kSuccess;
}

Status Ring::prepare(u32 id, nvme::Io op, const FragmentArrays& fragments) {
    const std::size_t count = fragments.device.size();
    if (id >= view_->depth || count > kFragmentsMax || fragments.offset_bytes.size() != count ||
        fragments.address.size() != count || fragments.length_bytes.size() != count ||
        (op != nvme::Io::kRead && op != nvme::Io::kWrite))
        return -EINVAL;
    for (const u32 device : fragments.device) {
        if (device >= view_->device_count) return -EINVAL;
    }
    Iocb& iocb = view_->iocbs[id];
    if (Shared(iocb.state).load_acquire() != u32(State::kPrepared)) return -EINVAL;
    let_go(id);
    devices_[id] = 0;
    iocb.op = u32(op);
    iocb.count = u32(count);
    // One device after another, so that each table is held once; most IOCBs have one device.
    u64 refused = 0;
    for (u32 device = 0; device < view_->device_count; ++device) {
        nvme::MemoryTable::Finder finder(*targets_[device].memory);
        for (u32 index = 0; index < count; ++index) {
            if (fragments.device[index] != device) continue;
            Work& work = iocb.work[index];
            work.moved_bytes = 0;
            work.phase = Phase::kWaiting;
            work.status = check(device, fragments, index);
            const u64 address = fragments.address[index];
            const u64 length = fragments.length_bytes[index];
            int region = -1;
            if (work.status == 0 && (region = finder.find(address, length)) < 0)
                work.status = nvme::status::kBadMemory;
            if (work.status != 0) {
                work.phase = Phase::kEnded;
                ++refused;
                continue;
            }
            iocb.fragments[index] = {address, fragments.offset_bytes[index], u32(length),
                                     u16(device), u16(region)};
            devices_[id] |= 1u << device;
            u64& word =
                used_[(id * view_->device_count + device) * kRegionWords + u32(region) / 64];
            const u64 bit = u64{1} << (region % 64);
            if ((word & bit) == 0) finder.use(u32(region));
            word |= bit;
        }
    }
    count_.refused += refused;
    return 0;
}

Status Ring::issue_io(std::span<const u32> ids, u32 lanes, Launch& launch) {
    std::lock_guard guard(mutex_);
    if (closed_) return -ESHUTDOWN;
    if (ids.empty() || ids.size() > view_->depth) return -EINVAL;
    for (std::size_t at = 0; at < ids.size(); ++at) {
        if (ids[at] >= view_->depth ||
            Shared(view_->iocbs[ids[at]].state).load_acquire() != u32(State::kPrepared) ||
            std::find(ids.begin(), ids.begin() + std::ptrdiff_t(at), ids[at]) !=
                ids.begin() + std::ptrdiff_t(at))
            return -EINVAL;
    }
    u32 devices = 0;
    for (const u32 id : ids) devices |= devices_[id];
    if ((devices & resetting_) != 0) return -EBUSY;
    launch.timeout_ns = options_.timeout_ns;
    launch.iocb_count = 0;
    launch.devices = devices;
    launch.first[0] = 0;
    for (const u32 id : ids) {
        Iocb& iocb = view_->iocbs[id];
        iocb.generation = view_->words[id] + 1;
        iocb.left = iocb.count;
        touched_[id] = devices;
        count_.fragments += iocb.count;
        if (iocb.count == 0) {  // nothing to do
            become(id, Event::kFinish);
            Shared(view_->words[id]).store_release(iocb.generation);
            continue;
        }
        // Release: what was prepared before the state that lanes go by.
        become(id, Event::kIssue);
        launch.ids[launch.iocb_count] = id;
        launch.first[launch.iocb_count + 1] = launch.first[launch.iocb_count] + iocb.count;
        ++launch.iocb_count;
    }
    count_.iocbs += ids.size();
    if (launch.iocb_count == 0) return 0;
    ++count_.launches;
    if (executor_ != nullptr) executor_->launch(launch, lanes);
    return 0;
}

bool Ring::begin_refusal(u32 id) {
    if (become(id, Event::kRefuse)) return true;
    if (id >= view_->depth || executor_ != nullptr) return false;
    // In place of the lanes, which are gone.
    return Shared(view_->iocbs[id].state).load_acquire() == u32(State::kRunning) &&
           become(id, Event::kFinish);
}

Status Ring::refuse(std::span<const u32> ids) {
    Status status = 0;
    for (const u32 id : ids) {
        if (!begin_refusal(id)) {
            status = -EINVAL;
            continue;
        }
        Iocb& iocb = view_->iocbs[id];
        for (u32 index = 0; index < iocb.count; ++index) {
            Work& work = iocb.work[index];
            if (work.phase == Phase::kEnded) continue;
            const bool flying = work.phase == Phase::kFlying;
            work.phase = Phase::kEnded;
            work.status = flying ? nvme::status::kTimeout : nvme::status::kNotIssued;
        }
        Shared(view_->words[id]).store_release(iocb.generation);
    }
    return status;
}

Status Ring::wait_cqe(u32 id, u64 timeout_ns, std::vector<u32>& statuses) {
    if (id >= view_->depth) return -EINVAL;
    Iocb& iocb = view_->iocbs[id];
    const u32 state = Shared(iocb.state).load_acquire();
    if (state == u32(State::kFree) || state == u32(State::kPrepared)) return -EINVAL;
    const u32 wanted = iocb.generation;
    const u64 end_ns = now_ns() + timeout_ns;
    for (u32 turns = 0; Shared(view_->words[id]).load_acquire() != wanted; ++turns) {
        if (turns < 64) continue;
        watch();
        if (now_ns() >= end_ns) return -ETIME;
        nap();
    }
    std::lock_guard guard(mutex_);
    if (Shared(iocb.state).load_acquire() != u32(State::kDone)) return -EINVAL;
    statuses.resize(iocb.count);
    for (u32 index = 0; index < iocb.count; ++index) {
        statuses[index] = iocb.work[index].status;
        if (statuses[index] != 0) ++count_.failed;
        if (statuses[index] == nvme::status::kTimeout) ++count_.timeouts;
    }
    let_go(id);
    become(id, Event::kTake);
    free_.push_back(id);
    return 0;
}

/// End everything on controllers that have died: their lanes would wait for the deadline. The one
/// that reads registers is the CPU.
void Ring::watch() {
    u64 last = watched_ns_.load(std::memory_order_relaxed);
    const u64 now = now_ns();
    if (now < last + kWatchNs || !watched_ns_.compare_exchange_strong(last, now)) return;
    for (const Target& target : targets_) {
        if (target.controller->close_if_dead()) target.memory->reclaim();
    }
}

Status Ring::reset_device(u32 device, u64 timeout_ns, std::string& what) {
    if (device >= view_->device_count) return -EINVAL;
    {
        std::lock_guard guard(mutex_);
        if ((resetting_ >> device & 1) != 0) {
            what = "the device is being reset already";
            return -EBUSY;
        }
        resetting_ |= 1u << device;
    }
    const Target& target = targets_[device];
    // Launches that were issued already must not wait for their own deadlines one by one.
    target.controller->close_queues();
    Status status = -ETIME;
    what = "transfers are still in flight";
    if (wait_quiet(1u << device, now_ns() + timeout_ns)) {
        ++count_.resets;
        nvme::Failure failure = target.controller->reset();
        status = failure.code;
        what = std::move(failure.what);
        if (status == 0 || target.controller->stopped()) target.memory->reclaim();
    }
    std::lock_guard guard(mutex_);
    resetting_ &= ~(1u << device);
    return status;
}

/// Wait until no lane can be in the queues of these devices: those of a launch poll all queues that
/// it has put commands into, until they have ended. False: not in time.
bool Ring::wait_quiet(u32 devices, u64 end_ns) {
    for (u32 id = 0; id < view_->depth;) {
        if (!under_way(id, devices)) {
            ++id;
            continue;
        }
        watch();
        if (now_ns() >= end_ns) return false;
        nap();
    }
    return true;
}

/// Whether no lane has, or will have, to do with an IOCB.
bool Ring::ended(u32 id) const {
    const u32 state = Shared(view_->iocbs[id].state).load_acquire();
    return state != u32(State::kIssued) && state != u32(State::kRunning);
}

/// Whether an IOCB was issued by a launch that touches one of these devices, and has not ended.
bool Ring::under_way(u32 id, u32 devices) {
    if (ended(id)) return false;
    std::lock_guard guard(mutex_);
    return (touched_[id] & devices) != 0;
}

/// The regions of an IOCB are its no more; of devices that did not answer in time they are lost.
void Ring::let_go(u32 id) {
    const Iocb& iocb = view_->iocbs[id];
    u32 silent = 0;
    for (u32 index = 0; index < iocb.count; ++index) {
        if (iocb.work[index].status == nvme::status::kTimeout)
            silent |= 1u << iocb.fragments[index].device;
    }
    for (u32 device = 0; device < view_->device_count; ++device) {
        nvme::MemoryTable& memory = *targets_[device].memory;
        u64* words = &used_[(id * view_->device_count + device) * kRegionWords];
        for (u32 at = 0; at < kRegionWords; ++at) {
            for (; words[at] != 0; words[at] &= words[at] - 1) {
                const u32 region = at * 64 + u32(std::countr_zero(words[at]));
                if ((silent >> device & 1) != 0) {
                    memory.lose(region);
                } else {
                    memory.drop(region);
                }
            }
        }
    }
}

void Ring::list_shared(SharedRanges& ranges) {
    view_memory_.list(ranges);
    words_memory_.list(ranges);
    iocbs_memory_.list(ranges);
    for (const Target& target : targets_) {
        target.controller->list_shared(ranges);
        target.memory->list_shared(ranges);
    }
}

u64 Ring::shared_version() const {
    u64 version = count_.resets;
    for (const Target& target : targets_) version += target.memory->shared_version();
    return version;
}

RingStats Ring::stats() const {
    return {count_.launches, count_.iocbs,    count_.fragments, count_.refused,
            count_.failed,   count_.timeouts, count_.resets};
}

void Ring::close() {
    std::lock_guard closing(closing_);
    {
        std::lock_guard guard(mutex_);
        closed_ = true;
    }
    // Its threads end with the last launch, which has a timeout.
    if (executor_ != nullptr) executor_->stop();
    if (view_ == nullptr) return;
    (void)wait_quiet(~u32{0}, now_ns() + options_.timeout_ns + kEndNs);
    std::lock_guard guard(mutex_);
    for (u32 id = 0; id < view_->depth; ++id) {
        if (ended(id)) let_go(id);
    }
}

}  // namespace tutti::gio
