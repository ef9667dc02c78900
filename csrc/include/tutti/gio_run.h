// What the threads of a launch do: fragments into commands, commands into completions.
//
// The fragments of a launch are dealt out to its lanes: lane, lane + lanes, and so on. A lane is a
// CPU thread or one GPU thread; lanes of a GPU warp form a group that goes round its loop together,
// so that one of them rings and polls for all. Any lane retires any completion.
//
// Every turn of the loop either gets something done or waits a little, and none begins after the
// deadline: what has not ended by then is given up, and its memory is the device's until the
// controller was reset.
#pragma once

#include "tutti/gio.h"

namespace tutti::gio {

/// Commands that one doorbell covers, where so many are to be had.
inline constexpr u32 kRingCommands = 32;
/// Turns without any completion after which fewer are rung for.
inline constexpr u32 kIdleTurns = 8;
/// Turns without any completion after which a lane looks whether others retired its commands.
inline constexpr u32 kLookTurns = 4;
/// Fragments that a lane passes over because their queue is full, to go on with those of other
/// devices: a whole IOCB's. A device that hangs holds up what lies beyond these alone.
inline constexpr u32 kAsideMax = kFragmentsMax;

/// A group of one: a CPU thread.
struct Alone {
    u32 lane_index;
    u32 lane_count;
    TUTTI_HD u32 lane() const { return lane_index; }
    TUTTI_HD u32 lanes() const { return lane_count; }
    /// Which group it is, for the choice of a queue.
    TUTTI_HD u32 index() const { return lane_index; }
    TUTTI_HD bool leader() const { return true; }
    TUTTI_HD bool any(bool mine) const { return mine; }
    TUTTI_HD u32 unite(u32 mask) const { return mask; }
    TUTTI_HD u32 sum(u32 mine) const { return mine; }
    TUTTI_HD u32 share(u32 value) const { return value; }  // the leader's, for all
    TUTTI_HD void sync() const {}
};

/// The fragments of one lane, from first to last. `oldest` .. `next` were begun or passed over.
template <class Group>
class Lane {
public:
    TUTTI_HD Lane(View& view, const Launch& launch, const Group& group)
        : view_(view), launch_(launch), group_(group), total_(launch.first[launch.iocb_count]) {
        oldest_ = next_ = {group.lane(), 0};
        settle(oldest_);
        settle(next_);
    }

    TUTTI_HD bool finished() const { return oldest_.at >= total_; }
    /// Nothing is left to be placed, and no fragment in flight has another command to come.
    TUTTI_HD bool all_placed() const {
        return next_.at >= total_ && waiting_ == 0 && unfinished_ == 0;
    }
    /// Commands in flight, rung or not.
    TUTTI_HD u32 flying() const { return flying_; }
    /// Commands placed since they were last asked for, and their devices.
    TUTTI_HD u32 take_placed(u32& devices) {
        devices |= placed_devices_;
        const u32 count = placed_;
        placed_ = placed_devices_ = 0;
        return count;
    }
    /// Devices with commands in flight, of all that were begun.
    TUTTI_HD u32 devices() const { return devices_; }

    /// Begin fragments until the queues of all devices are full.
    TUTTI_HD void place() {
        while (next_.at < total_ && (full_devices_ == 0 || full_devices_ != launch_.devices)) {
            Iocb& iocb = view_.iocbs[launch_.ids[next_.iocb]];
            begin(iocb);
            if (!advance(iocb, next_.at - launch_.first[next_.iocb])) {
                if (full_devices_ == launch_.devices || waiting_ == kAsideMax) return;
                ++waiting_;
            }
            step(next_);
        }
    }

    /// Settle commands that have ended, and go on with what has more to move.
    TUTTI_HD void look() {
        full_devices_ = waiting_ = 0;
        for (Cursor at = oldest_; at.at < next_.at; step(at)) {
            Iocb& iocb = view_.iocbs[launch_.ids[at.iocb]];
            const u32 index = at.at - launch_.first[at.iocb];
            Work& work = iocb.work[index];
            if (work.phase == Phase::kFlying) collect(iocb, index);
            if (work.phase == Phase::kWaiting && !advance(iocb, index)) ++waiting_;
        }
        retire();
    }

    /// Give up on everything that has not ended.
    TUTTI_HD void give_up() {
        for (Cursor at = oldest_; at.at < total_; step(at)) {
            Iocb& iocb = view_.iocbs[launch_.ids[at.iocb]];
            const u32 index = at.at - launch_.first[at.iocb];
            Work& work = iocb.work[index];
            begin(iocb);
            if (work.phase == Phase::kFlying) {
                nvme::Queue& queue = queue_of(iocb.fragments[index].device);
                Backoff backoff;
                // Ended between two looks: whoever retires it is about to say so.
                while (!nvme::Queue::done(work.result) && !queue.forget(work.result))
                    backoff.turn();
                collect(iocb, index);
            }
            if (work.phase == Phase::kWaiting) end(work, nvme::status::kNotIssued);
        }
        next_.at = total_;
        retire();
    }

private:
    /// A fragment: its number in the launch, and the number of its IOCB there.
    struct Cursor {
        u32 at;
        u32 iocb;
    };

    TUTTI_HD void settle(Cursor& cursor) const {
        while (cursor.iocb < launch_.iocb_count && cursor.at >= launch_.first[cursor.iocb + 1])
            ++cursor.iocb;
    }
    TUTTI_HD void step(Cursor& cursor) const {
        cursor.at += group_.lanes();
        settle(cursor);
    }

    TUTTI_HD nvme::Queue& queue_of(u32 device) const {
        const Device& of = view_.devices[device];
        return *of.queues[group_.index() % of.queue_count];
    }

    /// The data pointer of as many whole blocks as one command can move; at least one.
    TUTTI_HD static nvme::DataPointer whole_blocks(const nvme::Region& region, u64 offset_bytes,
                                                   u32 length_bytes, const Device& device) {
        for (;;) {
            const nvme::DataPointer pointer =
                data_pointer(region, offset_bytes, length_bytes, device.sgl != 0);
            length_bytes = pointer.length_bytes >> device.block_shift << device.block_shift;
            // What was cut to blocks may need a pointer of another kind.
            if (length_bytes == pointer.length_bytes) return pointer;
        }
    }

    TUTTI_HD void begin(Iocb& iocb) const {
        u32 state = u32(State::kIssued);
        if (Shared(iocb.state).load_relaxed() == state)
            Shared(iocb.state).swap_if(state, next_state(state, Event::kStart));
    }

    TUTTI_HD void end(Work& work, u32 status) {
        work.status = status;
        work.phase = Phase::kEnded;
    }

    /// Place the next command of a fragment. False: its queue is full.
    TUTTI_HD bool advance(Iocb& iocb, u32 index) {
        Work& work = iocb.work[index];
        if (work.phase != Phase::kWaiting) return true;  // refused when it was prepared
        const Fragment& fragment = iocb.fragments[index];
        const u32 device_bit = 1u << fragment.device;
        if ((full_devices_ & device_bit) != 0) return false;
        const Device& device = view_.devices[fragment.device];
        const nvme::Region& region = device.regions[fragment.region];
        const u32 left = fragment.length_bytes - work.moved_bytes;
        const u32 length = left < device.transfer_bytes_max ? left : device.transfer_bytes_max;
        const nvme::DataPointer pointer = whole_blocks(
            region, fragment.address - region.address + work.moved_bytes, length, device);
        const u32 covered = pointer.length_bytes;
        const u64 lba = (fragment.offset_bytes + work.moved_bytes) >> device.block_shift;
        nvme::Command command = nvme::transfer_command(nvme::Io(iocb.op), device.nsid, lba,
                                                       covered >> device.block_shift);
        command.flags = pointer.flags;
        command.data[0] = pointer.data[0];
        command.data[1] = pointer.data[1];
        nvme::Queue& queue = queue_of(fragment.device);
        switch (queue.try_submit(command, work.result)) {
            case nvme::Submit::kFull:
                full_devices_ |= device_bit;
                return false;
            case nvme::Submit::kClosed:
                end(work, queue.abandoned() ? nvme::status::kDeviceGone : nvme::status::kNotIssued);
                return true;
            case nvme::Submit::kPlaced:
                break;
        }
        work.flying_bytes = covered;
        if (covered != left) ++unfinished_;
        work.phase = Phase::kFlying;
        ++flying_;
        ++placed_;
        placed_devices_ |= device_bit;
        devices_ |= device_bit;
        return true;
    }

    TUTTI_HD void collect(Iocb& iocb, u32 index) {
        Work& work = iocb.work[index];
        const Fragment& fragment = iocb.fragments[index];
        if (!nvme::Queue::done(work.result)) {
            // Placed at the moment when the queue was abandoned: nobody else will end it.
            nvme::Queue& queue = queue_of(fragment.device);
            if (!queue.abandoned()) return;
            queue.withdraw(work.result);
            if (!nvme::Queue::done(work.result)) return;  // being ended this moment
        }
        --flying_;
        if (work.moved_bytes + work.flying_bytes != fragment.length_bytes) --unfinished_;
        work.phase = Phase::kWaiting;
        if (work.result.status != nvme::status::kSuccess) return end(work, work.result.status);
        work.moved_bytes += work.flying_bytes;
        if (work.moved_bytes == fragment.length_bytes) end(work, nvme::status::kSuccess);
    }

    /// Let go of the oldest fragments, up to one that has not ended.
    TUTTI_HD void retire() {
        while (oldest_.at < next_.at) {
            const u32 id = launch_.ids[oldest_.iocb];
            const Iocb& iocb = view_.iocbs[id];
            const u32 first = launch_.first[oldest_.iocb], end_at = launch_.first[oldest_.iocb + 1];
            u32 count = 0;
            u32 at = oldest_.at;
            while (at < end_at && at < next_.at && iocb.work[at - first].phase == Phase::kEnded) {
                ++count;
                at += group_.lanes();
            }
            if (count == 0) return;
            oldest_.at = at;
            settle(oldest_);
            end_fragments(view_, id, count);
        }
    }

    View& view_;
    const Launch& launch_;
    const Group& group_;
    const u32 total_;
    Cursor oldest_, next_;
    u32 flying_ = 0;
    u32 placed_ = 0;
    u32 placed_devices_ = 0;
    u32 devices_ = 0;
    u32 unfinished_ = 0;    // in flight, by a command that is not their last
    u32 waiting_ = 0;       // passed over, or between two commands
    u32 full_devices_ = 0;  // as seen since the last `look`
};

template <class Group>
TUTTI_HD void ring_devices(View& view, u32 devices, const Group& group) {
    for (u32 device = 0; device < view.device_count; ++device) {
        if ((devices >> device & 1) == 0) continue;
        const Device& of = view.devices[device];
        of.queues[group.index() % of.queue_count]->ring();
    }
}

template <class Group>
TUTTI_HD u32 poll_devices(View& view, u32 devices, const Group& group) {
    u32 count = 0;
    for (u32 device = 0; device < view.device_count; ++device) {
        if ((devices >> device & 1) == 0) continue;
        const Device& of = view.devices[device];
        count += of.queues[group.index() % of.queue_count]->poll(nvme::Queue::kPollMax);
    }
    return count;
}

/// One lane's part of a launch. Returns when all of its fragments have ended, at the deadline at
/// the latest.
/// @param launch  stays as it is until all lanes have returned
template <class Group>
TUTTI_HD void run(View& view, const Launch& launch, const Group& group) {
    Lane<Group> lane(view, launch, group);
    Deadline deadline(launch.timeout_ns);
    Backoff backoff;
    u32 unrung = 0, unrung_devices = 0, idle = 0;
    while (group.any(!lane.finished())) {
        lane.place();
        u32 placed_devices = 0;
        unrung += group.sum(lane.take_placed(placed_devices));
        unrung_devices |= group.unite(placed_devices);
        const u32 flying = group.sum(lane.flying());
        group.sync();
        const bool enough = unrung >= kRingCommands * popcount(unrung_devices);
        const bool last = !group.any(!lane.all_placed());
        if (unrung != 0 && (enough || last || unrung == flying || idle >= kIdleTurns)) {
            if (group.leader()) ring_devices(view, unrung_devices, group);
            unrung = unrung_devices = 0;
        }
        const u32 devices = group.unite(lane.devices());
        u32 polled = group.leader() ? poll_devices(view, devices, group) : 0;
        polled = group.share(polled);
        idle = polled != 0 ? 0 : idle + 1;
        if (polled != 0 || idle % kLookTurns == 0) lane.look();
        if (polled == 0) backoff.turn();
        if (group.any(deadline.passed())) {
            lane.give_up();
            return;
        }
    }
}

}  // namespace tutti::gio
