// The memory that one controller may reach: regions by id, found by address.
//
// A region is mapped for the device and given its PRP list once, when it is registered. The array
// of regions lies in shared memory, where CPU and GPU threads index it by id; what finds an id by
// address is the CPU's alone.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tutti/nvme_controller.h"
#include "tutti/nvme_memory.h"

namespace tutti::nvme {

inline constexpr u32 kRegionsMax = 1024;

class MemoryTable {
public:
    /// @param access  outlives the table
    explicit MemoryTable(Access& access) : access_(access) {}
    /// Takes everything back. The device uses none of it any more.
    ~MemoryTable();
    MemoryTable(const MemoryTable&) = delete;
    MemoryTable& operator=(const MemoryTable&) = delete;

    /// Called once, before anything else. 0 or a negative errno.
    Status start();

    // ---- any thread ----
    /// Let the device reach memory; returns an id. -EINVAL: not whole pages; -EEXIST: overlaps a
    /// region; -ENOSPC: kRegionsMax are registered; or what the access answers.
    std::int64_t add(u64 address, u64 length_bytes);
    /// Take a region back. -ENOENT: no such region; -EBUSY: in use.
    Status remove(std::int64_t id);

    /// Ids by address, for many look-ups in a row. Holds the table still for as long as it lives.
    class Finder {
    public:
        explicit Finder(MemoryTable& table) : table_(table), lock_(table.mutex_) {}
        /// The id of the region that holds all of these bytes, or -1.
        int find(u64 address, u64 length_bytes) {
            if (!holds(last_, address, length_bytes)) last_ = table_.search(address);
            return holds(last_, address, length_bytes) ? last_ : -1;
        }
        /// A user of a region, until `drop`.
        void use(u32 id) { ++table_.uses_[id]; }

    private:
        bool holds(int id, u64 address, u64 length_bytes) const {
            if (id < 0) return false;
            const Region& region = table_.regions_[id];
            return address >= region.address && length_bytes <= region.length_bytes &&
                   address - region.address <= region.length_bytes - length_bytes;
        }
        MemoryTable& table_;
        std::unique_lock<std::mutex> lock_;
        int last_ = -1;
    };
    void drop(u32 id);

    /// Indexed by id; only those of regions in use mean anything.
    const Region* regions() const { return regions_; }
    void list_shared(SharedRanges& ranges);

private:
    int search(u64 address) const;

    Access& access_;
    std::mutex mutex_;
    SharedMemory array_;
    Region* regions_ = nullptr;
    std::vector<u32> free_;
    std::vector<u32> sorted_;  // ids by address
    std::vector<DmaMemory> lists_;
    std::vector<u32> uses_;
    std::vector<bool> known_;
};

}  // namespace tutti::nvme
