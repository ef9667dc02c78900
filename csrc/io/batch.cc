// Copying, checking, splitting and finishing batches; see batch.h.
#include "tutti/batch.h"

#include <algorithm>
#include <utility>

namespace tutti {
namespace {

bool fits(const BatchView& view, const Batch& copy, std::span<const std::uint32_t> device,
          std::uint32_t device_count) {
    const std::size_t n = device.size();
    const std::size_t m = copy.address.size();
    if (n == 0 || n > kBatchItemsMax || m > kBatchFragmentsMax) return false;
    if (view.offset_bytes.size() != n || view.fragment_start.size() != n + 1) return false;
    if (view.length_bytes.size() != m) return false;
    const auto& start = copy.fragment_start;
    const auto steady = [](std::uint32_t a, std::uint32_t b) { return a >= b; };
    if (start.front() != 0 || start.back() != m) return false;
    if (std::adjacent_find(start.begin(), start.end(), steady) != start.end()) return false;
    const auto foreign = [=](std::uint32_t d) { return d >= device_count; };
    const auto askew = [](std::uint64_t offset) { return offset % kBlockBytes != 0; };
    const auto empty = [](std::uint64_t length) { return length == 0; };
    return std::ranges::none_of(device, foreign) &&
           std::ranges::none_of(copy.offset_bytes, askew) &&
           std::ranges::none_of(copy.length_bytes, empty);
}

}  // namespace

std::shared_ptr<Batch> Batch::make(const BatchView& view, std::uint32_t device_count) {
    auto batch = std::make_shared<Batch>();
    batch->op = view.op;
    batch->wants_checksum = view.checksum;
    const std::vector<std::uint32_t> device(view.device.begin(), view.device.end());
    batch->offset_bytes.assign(view.offset_bytes.begin(), view.offset_bytes.end());
    batch->fragment_start.assign(view.fragment_start.begin(), view.fragment_start.end());
    batch->address.assign(view.address.begin(), view.address.end());
    batch->length_bytes.assign(view.length_bytes.begin(), view.length_bytes.end());
    // The copies are checked, not the originals: another thread may still write those.
    if (!fits(view, *batch, device, device_count)) return nullptr;

    const auto n = static_cast<std::uint32_t>(device.size());
    std::vector<std::uint32_t> place(device_count, 0);
    for (const std::uint32_t d : device) ++place[d];
    std::uint32_t first = 0;
    for (std::uint32_t d = 0; d < device_count; ++d) {
        const std::uint32_t count = place[d];
        if (count > 0) batch->parts.push_back({nullptr, d, first, count, 0, count});
        place[d] = first;
        first += count;
    }
    batch->order.resize(n);
    for (std::uint32_t i = 0; i < n; ++i) batch->order[place[device[i]]++] = i;
    batch->status.assign(n, 0);
    batch->checksums.assign(n, 0);
    batch->parts_unfinished_.store(static_cast<std::uint32_t>(batch->parts.size()),
                                   std::memory_order_relaxed);  // published by the rings' mutexes
    return batch;
}

void Batch::finish(Part& part) {
    const std::shared_ptr<Batch> alive = std::move(part.batch);  // outlives the lock below
    // Release: our items' results are visible to whoever finds the count at 0. Acquire: if that is
    // us, we see the results of the other rings and pass them on through the mutex.
    if (parts_unfinished_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
}

bool Batch::wait_until(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [this] { return done_; });
}

}  // namespace tutti
