// One submitted batch: its arrays, its split by device, its results, and who waits for it.
//
// Life: made and split by the submitting thread, worked on by the ring threads of its devices, each
// on the items of its own part only, and taken by one waiter. A part keeps the batch alive until
// its ring thread is done with it, so a ticket may be forgotten at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tutti/io.h"
#include "tutti/status.h"

namespace tutti {

struct Batch;

/// The items of a batch that are on one device. Touched only by that device's ring thread.
struct Part {
    std::shared_ptr<Batch> batch;  // set when the part is given to its ring
    std::uint32_t device;
    std::uint32_t first;  // into Batch::order
    std::uint32_t count;
    std::uint32_t opened;      // items taken up so far
    std::uint32_t unfinished;  // items without a result; the part is over at 0
};

/// A batch as the caller gives it; the arrays are borrowed.
struct BatchView {
    Op op;
    bool checksum;
    std::span<const std::uint32_t> device;
    std::span<const std::uint64_t> offset_bytes;
    std::span<const std::uint32_t> fragment_start;
    std::span<const std::uint64_t> address;
    std::span<const std::uint64_t> length_bytes;
};

struct Batch {
    Op op;
    bool wants_checksum;
    std::vector<std::uint64_t> offset_bytes;
    std::vector<std::uint32_t> fragment_start;
    std::vector<std::uint64_t> address;
    std::vector<std::uint64_t> length_bytes;
    std::vector<std::uint32_t> order;  // item indices, grouped by device
    std::vector<Part> parts;

    // One slot per item, written by the item's ring thread, read after `done`.
    std::vector<std::int32_t> status;
    std::vector<std::uint64_t> checksums;

    /// Copy the arrays, check the copies as `check_batch` of transport.py does, split by device.
    /// Returns nothing where they do not fit together. Cost: O(items and fragments).
    static std::shared_ptr<Batch> make(const BatchView& view, std::uint32_t device_count);

    Fragments fragments_of(std::uint32_t item) const {
        const std::uint32_t first = fragment_start[item];
        return {&address[first], &length_bytes[first], fragment_start[item + 1] - first};
    }

    /// Called by a part's ring thread as its last act on the batch.
    void finish(Part& part);

    /// True once every part is over. Threads: any.
    bool wait_until(std::chrono::steady_clock::time_point deadline);

private:
    std::atomic<std::uint32_t> parts_unfinished_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false;
};

}  // namespace tutti
