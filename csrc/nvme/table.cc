// Registering memory for a controller, and finding it again.
#include <algorithm>
#include <cerrno>

#include "tutti/nvme_table.h"

namespace tutti::nvme {

MemoryTable::~MemoryTable() {
    for (u32 id : sorted_) {
        access_.unmap(regions_[id].dma, regions_[id].length_bytes);
        access_.release(lists_[id]);
    }
    for (const DmaMemory& list : spare_) access_.release(list);
}

Status MemoryTable::start() {
    if (const Status status = array_.allocate(kRegionsMax * sizeof(Region))) return status;
    regions_ = array_.at<Region>();
    lists_.resize(kRegionsMax);
    uses_.resize(kRegionsMax);
    lost_.resize(kRegionsMax);
    known_.resize(kRegionsMax);
    for (u32 id = kRegionsMax; id-- > 0;) free_.push_back(id);
    return 0;
}

/// Memory for a list: the shortest spare one that does, or new.
Status MemoryTable::take_list(u64 length_bytes, DmaMemory& list) {
    auto best = spare_.end();
    for (auto at = spare_.begin(); at != spare_.end(); ++at) {
        if (at->length_bytes < length_bytes) continue;
        if (best == spare_.end() || at->length_bytes < best->length_bytes) best = at;
    }
    if (best != spare_.end()) {
        list = *best;
        spare_.erase(best);
        return 0;
    }
    const Status status = access_.allocate(length_bytes, list);
    if (status == 0) version_.fetch_add(1, std::memory_order_release);
    return status;
}

std::int64_t MemoryTable::add(u64 address, u64 length_bytes) {
    if (address == 0 || length_bytes == 0 || address % kPageBytes != 0 ||
        length_bytes % kPageBytes != 0 || address > ~u64{0} - length_bytes)
        return -EINVAL;
    std::lock_guard guard(mutex_);
    if (free_.empty()) return -ENOSPC;
    const auto after =
        std::upper_bound(sorted_.begin(), sorted_.end(), address,
                         [this](u64 at, u32 id) { return at < regions_[id].address; });
    if (after != sorted_.end() && regions_[*after].address < address + length_bytes) return -EEXIST;
    if (after != sorted_.begin()) {
        const Region& before = regions_[*(after - 1)];
        if (before.address + before.length_bytes > address) return -EEXIST;
    }
    DmaMemory list;
    if (const Status status = take_list(list_pages(length_bytes) * kPageBytes, list)) return status;
    u64 dma = 0;
    if (const Status status = access_.map(reinterpret_cast<void*>(address), length_bytes, dma)) {
        spare_.push_back(list);
        return status;
    }
    const u32 id = free_.back();
    free_.pop_back();
    Region& region = regions_[id];
    region = Region{address, length_bytes, 0, list.dma, nullptr, 0, 0};
    build_list(region, reinterpret_cast<u64*>(list.address),
               [dma](u64 page) { return dma + page * kPageBytes; });
    lists_[id] = list;
    known_[id] = true;
    sorted_.insert(after, id);
    return id;
}

Status MemoryTable::remove(std::int64_t id) {
    std::lock_guard guard(mutex_);
    if (id < 0 || id >= kRegionsMax || !known_[std::size_t(id)]) return -ENOENT;
    const u32 index = u32(id);
    if (uses_[index] != 0 || lost_[index]) return -EBUSY;
    access_.unmap(regions_[index].dma, regions_[index].length_bytes);
    spare_.push_back(lists_[index]);
    regions_[index] = Region{};
    known_[index] = false;
    sorted_.erase(std::find(sorted_.begin(), sorted_.end(), index));
    free_.push_back(index);
    return 0;
}

void MemoryTable::drop(u32 id) {
    std::lock_guard guard(mutex_);
    --uses_[id];
}

void MemoryTable::lose(u32 id) {
    std::lock_guard guard(mutex_);
    --uses_[id];
    lost_[id] = true;
}

void MemoryTable::reclaim() {
    std::lock_guard guard(mutex_);
    lost_.assign(kRegionsMax, false);
}

void MemoryTable::list_shared(SharedRanges& ranges) {
    std::lock_guard guard(mutex_);
    array_.list(ranges);
    for (u32 id : sorted_) {
        ranges.push_back(
            {reinterpret_cast<std::uintptr_t>(lists_[id].address), lists_[id].length_bytes, false});
    }
    for (const DmaMemory& list : spare_)
        ranges.push_back(
            {reinterpret_cast<std::uintptr_t>(list.address), list.length_bytes, false});
}

int MemoryTable::search(u64 address) const {
    const auto after =
        std::upper_bound(sorted_.begin(), sorted_.end(), address,
                         [this](u64 at, u32 id) { return at < regions_[id].address; });
    return after == sorted_.begin() ? -1 : int(*(after - 1));
}

}  // namespace tutti::nvme
