// What differs between compilers of the code that runs on CPU and GPU threads alike: the marks on
// functions, the names of integers, atomics, fences, clocks, and how to wait a little.
//
// Every word that threads share with each other or with a device goes through `Shared`: system
// scope on a GPU, and visible to ThreadSanitizer on a CPU. g++ takes std::atomic_ref, nvcc and
// NVRTC take libcu++'s, which is the same interface.
#pragma once

#if defined(__CUDACC__)
#include <cuda/atomic>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#define TUTTI_HD __host__ __device__
#else
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#define TUTTI_HD
#endif

namespace tutti {

#if defined(__CUDACC__)
using u8 = cuda::std::uint8_t;
using u16 = cuda::std::uint16_t;
using u32 = cuda::std::uint32_t;
using u64 = cuda::std::uint64_t;
template <class T>
using AtomicRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
using cuda::std::memory_order_acq_rel;
using cuda::std::memory_order_acquire;
using cuda::std::memory_order_relaxed;
using cuda::std::memory_order_release;
#else
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
template <class T>
using AtomicRef = std::atomic_ref<T>;
using std::memory_order_acq_rel;
using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
#endif

/// Called before every access to a shared word in builds that hunt for races: gives the processor
/// away at random. On few cores this is what makes a lost wake-up or a missing release show.
#if defined(TUTTI_SHAKE) && !defined(__CUDACC__)
inline void shake() {
    static thread_local u32 state = u32(reinterpret_cast<std::uintptr_t>(&state)) * 2654435761u | 1;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    if ((state & 7) == 0) sched_yield();
}
#else
TUTTI_HD inline void shake() {}
#endif

/// A word in memory that is shared, by reference.
template <class T>
struct Shared {
    AtomicRef<T> word;

    TUTTI_HD explicit Shared(T& at) : word(at) {}
    TUTTI_HD T load_relaxed() const { return shake(), word.load(memory_order_relaxed); }
    TUTTI_HD T load_acquire() const { return shake(), word.load(memory_order_acquire); }
    TUTTI_HD void store_relaxed(T value) const { shake(), word.store(value, memory_order_relaxed); }
    TUTTI_HD void store_release(T value) const { shake(), word.store(value, memory_order_release); }
    TUTTI_HD T exchange(T value) const {
        return shake(), word.exchange(value, memory_order_acq_rel);
    }
    TUTTI_HD T add(T value) const { return shake(), word.fetch_add(value, memory_order_acq_rel); }
    /// On failure `expected` is what is there.
    TUTTI_HD bool swap_if(T& expected, T value) const {
        return shake(), word.compare_exchange_strong(expected, value, memory_order_acq_rel,
                                                     memory_order_acquire);
    }
};

/// Everything before is seen, by all threads and by devices, before anything after.
TUTTI_HD inline void full_fence() {
#if defined(__CUDA_ARCH__)
    __threadfence_system();
#elif defined(__CUDACC__)
    cuda::atomic_thread_fence(cuda::std::memory_order_seq_cst);
#else
    shake();
#if defined(__SANITIZE_THREAD__)
    // ThreadSanitizer knows no fences. A read-modify-write is one to x86, and of a word of the
    // thread's own it tells the sanitizer nothing about order that the fence does not give.
    static thread_local std::atomic<u32> word{0};
    word.fetch_add(1, std::memory_order_seq_cst);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
#endif
}

TUTTI_HD inline u32 popcount(u32 bits) {
#if defined(__CUDA_ARCH__)
    return u32(__popc(bits));
#elif defined(__CUDACC__)
    u32 count = 0;
    for (; bits != 0; bits &= bits - 1) ++count;
    return count;
#else
    return u32(__builtin_popcount(bits));
#endif
}

/// A monotonic clock. On a GPU a read costs about a microsecond and has that resolution.
TUTTI_HD inline u64 now_ns() {
#if defined(__CUDA_ARCH__)
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#elif defined(__CUDACC__)
    return 0;  // host code of a CUDA compiler does not wait
#else
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1'000'000'000u + u64(now.tv_nsec);
#endif
}

/// Bounds a loop of polls. A look at the clock costs more than a poll, so only every 64th asks it.
class Deadline {
public:
    TUTTI_HD explicit Deadline(u64 timeout_ns) : end_ns_(now_ns() + timeout_ns) {}
    TUTTI_HD bool passed() { return ++calls_ % 64 == 0 && now_ns() >= end_ns_; }

private:
    u64 end_ns_;
    u32 calls_ = 0;
};

/// One turn of an empty poll. A CPU thread gives its core away soon: with more threads than cores
/// pure spinning costs two orders of magnitude.
class Backoff {
public:
    TUTTI_HD void turn() {
#if defined(__CUDA_ARCH__)
        turns_ = turns_ < 8 ? 8 : (turns_ < 256 ? turns_ * 2 : 256);
        __nanosleep(turns_);
#elif !defined(__CUDACC__)
        if (++turns_ > 128) {
            turns_ = 0;
            sched_yield();
            return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
#endif
    }
    TUTTI_HD void reset() { turns_ = 0; }

private:
    u32 turns_ = 0;
};

}  // namespace tutti
