// One NVMe queue pair for many threads: CPU threads, or the threads of a GPU kernel.
//
// Three lifetimes are kept apart, because tying them together deadlocks:
//   - A slot of the submission queue is free when the controller has fetched its entry. SQHD says
//     so, in any completion; never the completion of that command.
//   - A command id is free when its completion was retired. Ids come from a free list.
//   - A result belongs to the submitter. Whoever polls retires every completion it finds, so nobody
//     waits for the owner to come by.
//
// Invariants
//   - Tickets count for ever; the slot of a ticket is its remainder. fetched <= rung <= next, and
//     next - fetched <= sq_entries - 1: a full ring is told from an empty one.
//   - There are at most cq_entries - 1 ids, so the completion queue cannot overflow.
//   - An entry is complete in memory before its slot is marked (release), and marked slots are
//     covered by the doorbell only in order, by whoever holds the doorbell's lock.
//   - `rung` is stored before the doorbell: a fast completion may report an SQHD up to it.
//   - Of all that end a command (its completion, a repeated one, `forget`, `abandon`), the one that
//     takes the owner word out by an atomic exchange writes the result; the others find nothing.
//   - An id that was forgotten stays out of use until its completion comes or the queue is made
//     anew: a late completion can never hit another command.
//
// Nothing here blocks without a bound. The object and its arrays are plain memory, mapped into
// whatever runs this code; see QueueMemory.
#pragma once

#include "tutti/nvme.h"

namespace tutti::nvme {

/// Outcome of one command, written by whichever thread retires it. It stays where it is until
/// `done` or until `forget` returned true; on a GPU that excludes a thread's local memory.
struct Result {
    u32 state;       // kPending or kDone; stored last, with release
    u32 status;      // see nvme::status
    u32 value;       // DW0 of the completion
    u32 command_id;  // for an Abort; valid once submitted
};
inline constexpr u32 kPending = 0;
inline constexpr u32 kDone = 1;

/// A command that was placed, or why it was not.
enum class Submit : u8 {
    kPlaced,  // it will be covered by the next `ring`
    kFull,    // no slot or no id: ring, poll, try again
    kClosed,  // the queue takes nothing more
};

/// The memory of a queue pair. Everything is zero at the start; `sq`, `cq` and the doorbells are
/// seen by the device, the rest by all threads that use the queue.
struct QueueMemory {
    Command* sq;
    Completion* cq;
    u64* marks;     // sq_entries: ticket + 1 of the entry that is complete in memory
    u32* id_next;   // id_count
    u64* id_owner;  // id_count
    u32* sq_doorbell;
    u32* cq_doorbell;
    // Shadow doorbells and event indices (Doorbell Buffer Config), or null.
    u32* sq_shadow;
    u32* cq_shadow;
    u32* sq_event;
    u32* cq_event;
};

/// What happened in a queue since the object was made, resets included. Each is exact; together
/// they are no snapshot.
struct QueueStats {
    u64 sq_doorbells;
    u64 sq_doorbells_elided;
    u64 cq_doorbells;
    u64 cq_doorbells_elided;
    u64 completions;
    u64 unknown;   // completions with an id or a queue that is not ours, or a second one
    u64 bad_head;  // SQHD outside of what was rung
    u64 late;      // completions of forgotten commands
};

class Queue {
public:
    static constexpr u32 kPollMax = 64;

    /// Make the queue empty. Before the controller's queues are created and while no thread uses
    /// it; zeroes the completion queue, where stale phase bits would be completions.
    /// @param sq_entries, cq_entries  2 .. 65,536, as the controller was told
    /// @param id_count   commands in flight at most; at most cq_entries - 1 and 65,535
    TUTTI_HD void reset(const QueueMemory& memory, u32 id, u32 sq_entries, u32 cq_entries,
                        u32 id_count) {
        m_ = memory;
        id_ = id;
        sq_entries_ = sq_entries;
        cq_entries_ = cq_entries;
        id_count_ = id_count;
        next_ = fetched_ = rung_ = cq_count_ = 0;
        ring_lock_ = poll_lock_ = closed_ = 0;
        for (u32 slot = 0; slot < sq_entries; ++slot) m_.marks[slot] = 0;
        for (u32 slot = 0; slot < cq_entries; ++slot) m_.cq[slot] = Completion{};
        for (u32 at = 0; at < id_count; ++at) {
            m_.id_next[at] = at + 1 < id_count ? at + 2 : 0;
            m_.id_owner[at] = kNoOwner;
        }
        free_ids_ = id_count > 0 ? 1 : 0;
        full_fence();
    }

    // ---- submission ----
    /// Place one command, without ringing. Never waits. On kFull the entries that fill the ring may
    /// be the caller's own, not rung yet: call `ring` and `poll` before the next try.
    TUTTI_HD Submit try_submit(const Command& command, Result& result) {
        if (Shared(closed_).load_acquire() != 0) return Submit::kClosed;
        u32 id = 0;
        if (!take_id(id)) return Submit::kFull;
        u64 ticket = 0;
        if (!claim(ticket)) {
            give_id(id);
            return Submit::kFull;
        }
        result.status = status::kSuccess;
        result.value = 0;
        result.command_id = id;
        Shared(result.state).store_relaxed(kPending);
        Shared(m_.id_owner[id]).store_relaxed(owner_of(result));
        const u32 slot = slot_of(ticket);
        m_.sq[slot] = command;
        m_.sq[slot].id = u16(id);
        // Release: entry, owner and result before the mark that lets a doorbell cover them.
        Shared(m_.marks[slot]).store_release(ticket + 1);
        return Submit::kPlaced;
    }

    /// `try_submit`, waiting for room. False: closed, or none came in time; the result then says
    /// kNotIssued.
    TUTTI_HD bool submit(const Command& command, Result& result, u64 timeout_ns) {
        Deadline deadline(timeout_ns);
        Backoff backoff;
        for (;;) {
            const Submit placed = try_submit(command, result);
            if (placed == Submit::kPlaced) return true;
            if (placed == Submit::kClosed || deadline.passed()) break;
            ring();
            if (poll(kPollMax) == 0) backoff.turn();
        }
        finish(result, status::kNotIssued, 0);
        return false;
    }

    /// Ring once for everything that was placed so far. Who does not get the lock leaves at once:
    /// the holder looks again after it unlocked.
    TUTTI_HD void ring() {
        for (;;) {
            if (Shared(closed_).load_relaxed() == kAbandoned) return;
            // Pairs with the fence below, store before load on both sides. Without either of them a
            // thread with one command in flight can wait for a doorbell that nobody writes.
            full_fence();
            if (Shared(ring_lock_).exchange(1) != 0) return;
            const u64 first = Shared(rung_).load_relaxed();
            u64 last = first;
            while (last - first < sq_entries_ && marked(last)) ++last;
            if (last != first) {
                Shared(rung_).store_release(last);
                ring_sq(slot_of(first), slot_of(last));
            }
            Shared(ring_lock_).store_release(0);
            full_fence();
            if (!marked(last)) return;
        }
    }

    // ---- completion ----
    /// Retire up to `count_max` completions, whoever submitted them; returns how many. Never waits:
    /// 0 if another thread is at it.
    TUTTI_HD u32 poll(u32 count_max) {
        if (Shared(poll_lock_).exchange(1) != 0) return 0;
        const u64 first = cq_count_;
        u64 at = first;
        // Abandoned: what the completion queue says is of before.
        if (Shared(closed_).load_relaxed() == kAbandoned) count_max = 0;
        while (at - first < count_max && take_completion(at)) ++at;
        if (at != first) {
            cq_count_ = at;
            count(stats_.completions, at - first);
            ring_cq(u32(first % cq_entries_), u32(at % cq_entries_));
        }
        Shared(poll_lock_).store_release(0);
        return u32(at - first);
    }

    /// Whether a command has ended; its status and value may be read then.
    TUTTI_HD static bool done(Result& result) {
        return Shared(result.state).load_acquire() == kDone;
    }

    /// Poll until a command has ended. False: not in time; the result is still the queue's. Wait
    /// again, or `forget` it.
    TUTTI_HD bool wait(Result& result, u64 timeout_ns) {
        Deadline deadline(timeout_ns);
        Backoff backoff;
        while (!done(result)) {
            if (abandoned()) withdraw(result);
            if (poll(kPollMax) == 0) backoff.turn();
            if (deadline.passed()) return done(result);
        }
        return true;
    }

    /// Give up on a command. True: the result is the caller's again, with kTimeout in it. False: it
    /// is being retired at this moment, `done` is true or about to be. The memory of the transfer
    /// is the device's until the controller was reset, in either case.
    TUTTI_HD bool forget(Result& result) {
        u64 owner = owner_of(result);
        if (!Shared(m_.id_owner[result.command_id]).swap_if(owner, kForgotten)) return false;
        finish(result, status::kTimeout, 0);
        return true;
    }

    // ---- the end ----
    /// Take nothing more. What is in flight goes on.
    TUTTI_HD void close() {
        u32 open = 0;
        Shared(closed_).swap_if(open, kClosed);  // one that was abandoned stays so
    }

    /// End all that is in flight with `why`; returns how much that was. Only after the controller
    /// was disabled: nothing completes any more, and nothing moves. Threads may be waiting
    /// meanwhile; a command that one of them places at this moment is ended by its `wait`.
    TUTTI_HD u32 abandon(u32 why) {
        Shared(closed_).store_release(kAbandoned);
        full_fence();
        Backoff backoff;
        Deadline deadline(kHolderTimeoutNs);
        // Its holder never waits. One that does not let go in time was a thread of a kernel that was
        // killed.
        while (Shared(poll_lock_).exchange(1) != 0 && !deadline.passed()) backoff.turn();
        u32 count = 0;
        for (u32 id = 0; id < id_count_; ++id) {
            if (retire(id, why, 0)) ++count;
        }
        Shared(poll_lock_).store_release(0);
        return count;
    }

    /// Whether everything was ended by `abandon`.
    TUTTI_HD bool abandoned() { return Shared(closed_).load_acquire() == kAbandoned; }

    /// End a command of one's own that was placed while the queue was being abandoned. Does nothing
    /// to one that another thread ends.
    TUTTI_HD void withdraw(Result& result) { end_own(result, status::kDeviceGone); }

    /// Any thread, at any time.
    TUTTI_HD QueueStats stats() {
        return {load(stats_.sq_doorbells), load(stats_.sq_doorbells_elided),
                load(stats_.cq_doorbells), load(stats_.cq_doorbells_elided),
                load(stats_.completions),  load(stats_.unknown),
                load(stats_.bad_head),     load(stats_.late)};
    }
    TUTTI_HD u32 id() const { return id_; }
    TUTTI_HD u32 sq_entries() const { return sq_entries_; }
    TUTTI_HD u32 id_count() const { return id_count_; }

    /// Whether the controller asked to be told of an index in (old, next] (the virtio rule).
    TUTTI_HD static constexpr bool passes_event(u16 event, u16 next, u16 old) {
        return u16(next - event - 1) < u16(next - old);
    }

private:
    static constexpr u64 kNoOwner = 0;
    static constexpr u64 kForgotten = 1;
    static constexpr u64 kHolderTimeoutNs = 10'000'000'000;
    static constexpr u32 kClosed = 1;
    static constexpr u32 kAbandoned = 2;

    TUTTI_HD static u64 load(u64& counter) { return Shared(counter).load_relaxed(); }
    /// One writer at a time: under the counter's lock.
    TUTTI_HD static void count(u64& counter, u64 by = 1) {
        Shared(counter).store_relaxed(counter + by);
    }

    TUTTI_HD static u64 owner_of(Result& result) { return u64(reinterpret_cast<size_t>(&result)); }

    TUTTI_HD u32 slot_of(u64 ticket) const { return u32(ticket % sq_entries_); }

    TUTTI_HD bool marked(u64 ticket) {
        return Shared(m_.marks[slot_of(ticket)]).load_acquire() == ticket + 1;
    }

    TUTTI_HD bool claim(u64& ticket) {
        for (;;) {
            // The head first: an older head only makes the ring look fuller than it is.
            const u64 fetched = Shared(fetched_).load_acquire();
            u64 next = Shared(next_).load_relaxed();
            if (next - fetched >= sq_entries_ - 1) return false;
            if (Shared(next_).swap_if(next, next + 1)) {
                ticket = next;
                return true;
            }
        }
    }

    // Free ids are a stack. Low half: id + 1 of the top, 0 if empty; high half: a count that tells
    // two states with the same top apart.
    TUTTI_HD bool take_id(u32& id) {
        u64 top = Shared(free_ids_).load_acquire();
        for (;;) {
            if (u32(top) == 0) return false;
            id = u32(top) - 1;
            const u32 below = Shared(m_.id_next[id]).load_relaxed();
            if (Shared(free_ids_).swap_if(top, ((top >> 32) + 1) << 32 | below)) return true;
        }
    }

    TUTTI_HD void give_id(u32 id) {
        u64 top = Shared(free_ids_).load_acquire();
        for (;;) {
            Shared(m_.id_next[id]).store_relaxed(u32(top));
            if (Shared(free_ids_).swap_if(top, ((top >> 32) + 1) << 32 | (id + 1))) return;
        }
    }

    // Under poll_lock_.
    TUTTI_HD bool take_completion(u64 at) {
        Completion& entry = m_.cq[at % cq_entries_];
        // The word with the phase first, and with acquire: what is read before it may be of the
        // lap before.
        const u32 last = Shared(entry.id_and_status).load_acquire();
        const u32 phase = (at / cq_entries_ & 1) == 0 ? 1 : 0;
        if ((last >> 16 & 1) != phase) return false;
        const u32 head = Shared(entry.head_and_queue).load_relaxed();
        const u32 value = Shared(entry.result).load_relaxed();
        if (head >> 16 == id_) {
            advance(head & 0xffff);
            if (!retire(last & 0xffff, last >> 17, value)) count(stats_.unknown);
        } else {
            count(stats_.unknown);
        }
        return true;
    }

    // Under poll_lock_.
    TUTTI_HD void advance(u32 head) {
        const u64 fetched = Shared(fetched_).load_relaxed();
        const u32 slot = slot_of(fetched);
        const u32 step = head >= slot ? head - slot : head + sq_entries_ - slot;
        if (head >= sq_entries_ || fetched + step > Shared(rung_).load_acquire()) {
            count(stats_.bad_head);
        } else if (step != 0) {
            // Release: the controller's reads of the entries before who writes them anew.
            Shared(fetched_).store_release(fetched + step);
        }
    }

    // Under poll_lock_. False: this id was not in flight.
    TUTTI_HD bool retire(u32 id, u32 status, u32 value) {
        if (id >= id_count_) return false;
        const u64 owner = Shared(m_.id_owner[id]).exchange(kNoOwner);
        if (owner == kNoOwner) return false;
        if (owner == kForgotten) {
            count(stats_.late);
        } else {
            finish(*reinterpret_cast<Result*>(static_cast<size_t>(owner)), status, value);
        }
        give_id(id);
        return true;
    }

    TUTTI_HD void end_own(Result& result, u32 status) {
        u64 owner = owner_of(result);
        if (!Shared(m_.id_owner[result.command_id]).swap_if(owner, kNoOwner)) return;
        give_id(result.command_id);
        finish(result, status, 0);
    }

    // The last access: from here on the result may be gone.
    TUTTI_HD static void finish(Result& result, u32 status, u32 value) {
        result.value = value;
        result.status = status;
        Shared(result.state).store_release(kDone);
    }

    TUTTI_HD static bool write_doorbell(u32* doorbell, u32* shadow, u32* event, u32 old, u32 next) {
        full_fence();  // entries before the doorbell, for a device behind PCIe too
        if (shadow != nullptr) {
            Shared(*shadow).store_release(next);
            full_fence();  // the shadow's store before the event's load
            if (!passes_event(u16(Shared(*event).load_acquire()), u16(next), u16(old)))
                return false;
        }
        Shared(*doorbell).store_release(next);
        return true;
    }

    TUTTI_HD void ring_sq(u32 old, u32 next) {
        if (write_doorbell(m_.sq_doorbell, m_.sq_shadow, m_.sq_event, old, next)) {
            count(stats_.sq_doorbells);
        } else {
            count(stats_.sq_doorbells_elided);
        }
    }

    TUTTI_HD void ring_cq(u32 old, u32 next) {
        if (write_doorbell(m_.cq_doorbell, m_.cq_shadow, m_.cq_event, old, next)) {
            count(stats_.cq_doorbells);
        } else {
            count(stats_.cq_doorbells_elided);
        }
    }

    QueueMemory m_;
    u32 id_;
    u32 sq_entries_;
    u32 cq_entries_;
    u32 id_count_;

    // Each in a line of its own: they are written by different threads.
    alignas(64) u64 next_;     // ticket of the next entry
    alignas(64) u64 fetched_;  // tickets that the controller has fetched
    alignas(64) u64 rung_;     // tickets that the doorbell covers; under ring_lock_
    alignas(64) u64 free_ids_;
    alignas(64) u32 ring_lock_;
    alignas(64) u32 poll_lock_;
    u64 cq_count_;  // completions taken; under poll_lock_
    alignas(64) u32 closed_;
    QueueStats stats_;  // doorbells of the SQ under ring_lock_, the rest under poll_lock_
};

}  // namespace tutti::nvme
