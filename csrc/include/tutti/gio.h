// IOCBs as they lie in memory that CPU and GPU threads share (gio_uring, paper section 3.2).
//
// An IOCB is a batch of fragments in one direction: the CPU prepares it, one launch issues it, GPU
// threads (or CPU threads in their place) turn its fragments into NVMe commands, and one word says
// that all of it has ended.
//
//   state      owned by   left by
//   FREE       the ring   get (CPU)
//   PREPARED   the CPU    issue; put_back; finish, where no fragment was fit to be sent
//   ISSUED     the lanes  start, by the first lane that comes to it; refuse, if the launch failed
//   RUNNING    the lanes  finish, by the lane that ends the last fragment
//   DONE       the CPU    take
//
// Invariants
//   - A fragment belongs to one lane of a launch, which alone writes its work and its status.
//   - `left` counts fragments that have not ended; whoever takes it to 0 stores the state and then,
//     with release, the completion word. No lane touches an IOCB after its own share of `left`.
//   - What a lane must know of an IOCB that it may have no part in stands in the launch, which is
//     the lane's own copy: the IOCB itself may be somebody else's by then.
#pragma once

#include "tutti/nvme_memory.h"
#include "tutti/nvme_queue.h"

namespace tutti::gio {

inline constexpr u32 kFragmentsMax = 2048;  // of an IOCB
inline constexpr u32 kDepthMax = 256;       // IOCBs of a ring
inline constexpr u32 kDevicesMax = 16;
inline constexpr u32 kQueuesMax = 64;  // of a device

enum class State : u8 { kFree, kPrepared, kIssued, kRunning, kDone };
enum class Event : u8 { kGet, kPutBack, kIssue, kStart, kFinish, kRefuse, kTake };
inline constexpr u32 kStates = 5;
inline constexpr u32 kEvents = 7;

/// What an event makes of a state; kNever where the event is refused.
inline constexpr u32 kNever = ~u32{0};
TUTTI_HD constexpr u32 next_state(u32 state, Event event) {
    constexpr u32 kFree = u32(State::kFree), kPrepared = u32(State::kPrepared),
                  kIssued = u32(State::kIssued), kRunning = u32(State::kRunning),
                  kDone = u32(State::kDone);
    constexpr u32 table[kStates][kEvents] = {
        // get       put_back  issue    start     finish  refuse  take
        {kPrepared, kNever, kNever, kNever, kNever, kNever, kNever},  // FREE
        {kNever, kFree, kIssued, kNever, kDone, kNever, kNever},      // PREPARED
        {kNever, kNever, kNever, kRunning, kNever, kDone, kNever},    // ISSUED
        {kNever, kNever, kNever, kNever, kDone, kNever, kNever},      // RUNNING
        {kNever, kNever, kNever, kNever, kNever, kNever, kFree},      // DONE
    };
    return state < kStates ? table[state][u32(event)] : kNever;
}

/// One transfer: memory that lies in a region, and as many bytes of a device.
struct Fragment {
    u64 address;
    u64 offset_bytes;
    u32 length_bytes;
    u16 device;
    u16 region;
};
static_assert(sizeof(Fragment) == 24);

enum class Phase : u32 {
    kWaiting,  // no command is in flight: not begun, or between two commands
    kFlying,
    kEnded,
};

/// What becomes of a fragment.
struct Work {
    nvme::Result result;  // of the command in flight
    u32 moved_bytes;      // by commands that have ended well
    u32 flying_bytes;     // of the one in flight
    Phase phase;
    u32 status;  // nvme::status, once it has ended
};
static_assert(sizeof(Work) == 32);

struct alignas(64) Iocb {
    u32 state;
    u32 op;  // nvme::Io, kRead or kWrite
    u32 count;
    u32 generation;  // the completion word's next value
    alignas(64) u32 left;
    alignas(64) Fragment fragments[kFragmentsMax];
    alignas(64) Work work[kFragmentsMax];
};

/// What lanes need to know of a device.
struct Device {
    nvme::Queue* queues[kQueuesMax];
    const nvme::Region* regions;
    u32 queue_count;
    u32 nsid;
    u32 block_shift;
    u32 transfer_bytes_max;
    u32 sgl;
    u32 reserved;
};

/// A ring, as its lanes see it.
struct View {
    Iocb* iocbs;
    u32* words;  // one for each IOCB: the generation that ended last
    u32 depth;
    u32 device_count;
    Device devices[kDevicesMax];
};

/// Several IOCBs, issued together. Handed to each lane by value, or kept until all of them ended.
struct Launch {
    u64 timeout_ns;
    u32 iocb_count;
    u32 devices;  // a bit for each that fragments are for
    u32 ids[kDepthMax];
    u32 first[kDepthMax + 1];  // of each IOCB's fragments, counted over all of them
};

/// Take some fragments of an IOCB as ended; the last of them completes it.
TUTTI_HD inline void end_fragments(View& view, u32 id, u32 count) {
    Iocb& iocb = view.iocbs[id];
    if (Shared(iocb.left).add(u32(0) - count) != count) return;
    const u32 generation = iocb.generation;
    Shared(iocb.state).store_release(u32(State::kDone));
    // Release, and the last access: statuses and state before the word that the CPU polls.
    Shared(view.words[id]).store_release(generation);
}

}  // namespace tutti::gio
