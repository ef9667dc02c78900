// Copies between host memory and a GPU's, for a controller in software. The CUDA driver is loaded at
// run time; nothing of CUDA is needed to build this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tutti/status.h"

namespace tutti {

class DeviceCopy {
public:
    /// Load the driver and make a stream on its first GPU, in the primary context, which CuPy and
    /// torch use too. On failure: null, and `what` says why.
    /// @param library  of the driver, as dlopen takes it: "libcuda.so.1"
    static std::unique_ptr<DeviceCopy> open(const std::string& library, std::string& what);
    /// What was queued has ended. Memory that was pinned is let go.
    ~DeviceCopy();
    DeviceCopy(const DeviceCopy&) = delete;
    DeviceCopy& operator=(const DeviceCopy&) = delete;

    /// Whether an address is a GPU's, and no CPU may touch it. Any thread; about a microsecond.
    bool is_device(const void* address) const;
    /// Pin host memory that copies use often. Not being able to makes them slower, no more.
    void pin(void* address, std::size_t length_bytes);

    // ---- one thread ----
    /// Queue a copy; both sides stay as they are until `finish`. False: the driver refuses.
    bool copy(void* to, const void* from, std::size_t length_bytes);
    /// Wait for what was queued; the stream is its own, so that it waits for no kernel. False: some
    /// of it failed.
    bool finish();

private:
    struct Driver;
    DeviceCopy();
    std::unique_ptr<Driver> driver_;
};

}  // namespace tutti
