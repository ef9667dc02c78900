// Memory that GPU threads may be given to see: whole pages, zeroed, at an address that never changes.
//
// A process with a GPU registers each range once (cudaHostRegister); the GPU then reaches it at the
// same address.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tutti/status.h"

namespace tutti {

/// One stretch of memory by address, and whether it is a device's registers.
struct SharedRange {
    std::uint64_t address;
    std::uint64_t length_bytes;
    bool registers;
};
using SharedRanges = std::vector<SharedRange>;

class SharedMemory {
public:
    SharedMemory() = default;
    ~SharedMemory() { reset(); }
    SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
    SharedMemory& operator=(SharedMemory&& other) noexcept {
        std::swap(address_, other.address_);
        std::swap(length_bytes_, other.length_bytes_);
        return *this;
    }

    /// Get zeroed memory in place of what was held. 0 or a negative errno.
    Status allocate(std::uint64_t length_bytes) {
        reset();
        const std::uint64_t rounded = (length_bytes + kPage - 1) / kPage * kPage;
        void* at =
            ::mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) return -errno;
        address_ = static_cast<std::uint8_t*>(at);
        length_bytes_ = rounded;
        return 0;
    }
    void reset() {
        if (address_ != nullptr) ::munmap(address_, length_bytes_);
        address_ = nullptr;
        length_bytes_ = 0;
    }

    template <class T>
    T* at(std::uint64_t offset_bytes = 0) const {
        return reinterpret_cast<T*>(address_ + offset_bytes);
    }
    std::uint64_t length_bytes() const { return length_bytes_; }
    void list(SharedRanges& ranges) const {
        if (address_ != nullptr)
            ranges.push_back({reinterpret_cast<std::uintptr_t>(address_), length_bytes_, false});
    }

private:
    static constexpr std::uint64_t kPage = 4096;
    std::uint8_t* address_ = nullptr;
    std::uint64_t length_bytes_ = 0;
};

}  // namespace tutti
