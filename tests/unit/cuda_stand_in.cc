// A stand-in for the CUDA driver: memory that no CPU may touch, and copies that happen when they are
// waited for. A GPU's memory here is one file mapped twice: at an address without any access, which
// is what programs get, and at another one, for copies.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

using Address = unsigned long long;
struct Copy {
    Address to, from;
    std::size_t length_bytes;
};
std::mutex mutex;
struct Memory {
    std::uint8_t* front;
    std::uint8_t* behind;
    std::size_t length_bytes;
};
std::vector<Memory> memories;
std::vector<Copy> queued;
int copies = 0, waits = 0, registered = 0, streams = 0, contexts = 0, fail_next = 0;

const Memory* memory_of(Address at) {
    for (const Memory& one : memories) {
        const auto first = Address(reinterpret_cast<std::uintptr_t>(one.front));
        if (at >= first && at < first + one.length_bytes) return &one;
    }
    return nullptr;
}

void* seen_by_copies(Address at) {
    auto* place = reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(at));
    const Memory* memory = memory_of(at);
    return memory != nullptr ? memory->behind + (place - memory->front) : place;
}

}  // namespace

extern "C" {

// ---- for tests ----
void* stand_in_allocate(std::size_t length_bytes) {
    const std::lock_guard lock(mutex);
    const int file = memfd_create("device", 0);
    if (file < 0 || ftruncate(file, off_t(length_bytes)) != 0) return nullptr;
    void* front = mmap(nullptr, length_bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* behind = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    memories.push_back(
        {static_cast<std::uint8_t*>(front), static_cast<std::uint8_t*>(behind), length_bytes});
    return front;
}
void* stand_in_behind(void* address) {
    const std::lock_guard lock(mutex);
    const auto at = Address(reinterpret_cast<std::uintptr_t>(address));
    return memory_of(at) != nullptr ? seen_by_copies(at) : nullptr;
}
int stand_in_count(int which) {
    const int counts[] = {copies, waits, registered, streams, contexts, int(queued.size())};
    return counts[which];
}
void stand_in_fail_next() { fail_next = 1; }

// ---- the driver ----
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &contexts, ++contexts, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return --contexts, 0; }
int cuCtxSetCurrent(void* context) { return context == &contexts ? 0 : 201; }
int cuStreamCreate(void** stream, unsigned flags) {
    if (flags != 1) return 1;
    *stream = &streams;
    return ++streams, 0;
}
int cuStreamDestroy_v2(void*) { return --streams, 0; }
int cuPointerGetAttribute(void* value, int attribute, Address at) {
    const std::lock_guard lock(mutex);
    if (memory_of(at) == nullptr) return 1;  // memory that the driver does not know
    *static_cast<unsigned*>(value) = attribute == 2 ? 2 : 0;
    return 0;
}
int cuMemHostRegister_v2(void*, std::size_t, unsigned) { return ++registered, 0; }
int cuMemHostUnregister(void*) { return --registered, 0; }
int cuMemcpyAsync(Address to, Address from, std::size_t length_bytes, void* stream) {
    const std::lock_guard lock(mutex);
    if (stream != &streams) return 1;
    queued.push_back({to, from, length_bytes});
    return ++copies, 0;
}
int cuStreamSynchronize(void*) {
    const std::lock_guard lock(mutex);
    ++waits;
    for (const Copy& copy : queued)
        std::memcpy(seen_by_copies(copy.to), seen_by_copies(copy.from), copy.length_bytes);
    queued.clear();
    const int result = fail_next != 0 ? 700 : 0;
    return fail_next = 0, result;
}
}
