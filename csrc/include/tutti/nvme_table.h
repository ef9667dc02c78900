// The memory that one controller may reach: regions by id, found by address.
//
// A region is mapped for the device and given its PRP list once, when it is registered. The array
// of regions lies in shared memory, where CPU and GPU threads index it by id; what finds an id by
// address is the CPU's alone.
//
// PRP lists are kept when their region goes, and used for later ones: a process with a GPU has them
// registered there, and memory that is must not go away.
#pragma once

#include <atomic>
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
    /// Take a region back. -ENOENT: no such region; -EBUSY: in use, or lost.
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
    /// As `drop`, for a user that gave up on a transfer: the device may still reach the region,
    /// which stays in use until `reclaim`.
    void lose(u32 id);
    /// The controller was reset or is gone: regions that were lost are no longer in use.
    void reclaim();

    /// Indexed by id; only those of regions in use mean anything.
    const Region* regions() const { return regions_; }
    void list_shared(SharedRanges& ranges);
    /// Another number whenever `list_shared` has more to say than before.
    u64 shared_version() const { return version_.load(std::memory_order_acquire); }

private:
    Status take_list(u64 length_bytes, DmaMemory& list);
    int search(u64 address) const;

    Access& access_;
    std::mutex mutex_;
    SharedMemory array_;
    Region* regions_ = nullptr;
    std::vector<u32> free_;
    std::vector<u32> sorted_;  // ids by address
    std::vector<DmaMemory> lists_;
    std::vector<DmaMemory> spare_;  // lists of regions that are gone
    std::atomic<u64> version_{0};
    std::vector<u32> uses_;
    std::vector<bool> lost_;
    std::vector<bool> known_;
};

}  // namespace tutti::nvme
