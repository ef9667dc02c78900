// One entry for each step of the queue and the ring that others rely on, so that a test can read in
// the PTX how each of them touches shared words. Compiled with private members open.
#include "tutti/portable.h"
#define private public
#include "tutti/gio_run.h"
#undef private

using namespace tutti;
using nvme::Queue;
using nvme::Result;

extern "C" {
__global__ void load_relaxed(u32* at, u32* out) { *out = Shared(*at).load_relaxed(); }
__global__ void load_acquire(u32* at, u32* out) { *out = Shared(*at).load_acquire(); }
__global__ void store_relaxed(u32* at) { Shared(*at).store_relaxed(1); }
__global__ void store_release(u32* at) { Shared(*at).store_release(1); }
__global__ void exchange(u32* at, u32* out) { *out = Shared(*at).exchange(1); }
__global__ void add(u32* at, u32* out) { *out = Shared(*at).add(1); }
__global__ void swap_if(u32* at, u32* expected) { Shared(*at).swap_if(*expected, 1); }
__global__ void fence() { full_fence(); }

// The result of a command: what it says before that it is there.
__global__ void finish(Result* result) { Queue::finish(*result, 1, 2); }
__global__ void done(Result* result, bool* out) { *out = Queue::done(*result); }
// An entry before its mark, and the mark before the doorbell.
__global__ void submit(Queue* queue, nvme::Command* command, Result* result, u32* out) {
    *out = u32(queue->try_submit(*command, *result));
}
__global__ void marked(Queue* queue, u64 ticket, bool* out) { *out = queue->marked(ticket); }
__global__ void doorbell(u32* at) { Queue::write_doorbell(at, nullptr, nullptr, 1, 2); }
__global__ void shadow(u32* at, u32* shadow, u32* event) {
    if (shadow == nullptr) return;
    Queue::write_doorbell(at, shadow, event, 1, 2);
}
// The word with the phase before the rest of a completion.
__global__ void completion(Queue* queue, u64 at, bool* out) { *out = queue->take_completion(at); }
__global__ void forget(Queue* queue, Result* result, bool* out) { *out = queue->forget(*result); }
// The statuses of an IOCB before its completion word.
__global__ void end_fragments(gio::View* view) { gio::end_fragments(*view, 0, 1); }
}
