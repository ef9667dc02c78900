// Memory that a controller may reach: from virtual addresses to data pointers, in constant time.
//
// Each region carries a PRP list of all of its pages, built once when it is registered. The pointer
// of a transfer points into the middle of that list, so that a GPU thread writes two words and
// builds nothing. A list page holds 511 addresses; its last entry leads on to the next list page.
//
// That last entry is read as an address by a transfer that ends exactly with it, so no transfer may:
// `data_pointer` shortens such a one by a page, and the caller sends the rest with another command.
// Where the region is one run for the device and the controller takes SGLs, one descriptor does.
#pragma once

#include "tutti/nvme.h"

namespace tutti::nvme {

inline constexpr u32 kListEntries = kPageBytes / 8;
inline constexpr u32 kListAddresses = kListEntries - 1;

/// One registered stretch of memory. Plain data, read by CPU and GPU threads.
struct Region {
    u64 address;       // virtual, a multiple of kPageBytes
    u64 length_bytes;  // a multiple of kPageBytes
    u64 dma;           // device address of the first page; of all, if `contiguous`
    u64 list_dma;      // device address of the list
    const u64* list;   // list_pages(length_bytes) pages of kListEntries
    u32 contiguous;
    u32 reserved;
};
static_assert(sizeof(Region) == 48);

/// Pages that the list of a region takes.
TUTTI_HD constexpr u64 list_pages(u64 length_bytes) {
    const u64 pages = length_bytes / kPageBytes;
    return (pages + kListAddresses - 1) / kListAddresses;
}

/// Where in its list the address of the n-th page of a region stands.
TUTTI_HD constexpr u64 list_index(u64 page) {
    return page / kListAddresses * kListEntries + page % kListAddresses;
}

/// Fill a region's list.
/// @param list      list_pages(length) pages, which the device sees at region.list_dma in one run
/// @param page_dma  device address of the n-th page
template <class PageDma>
TUTTI_HD void build_list(Region& region, u64* list, PageDma page_dma) {
    const u64 pages = region.length_bytes / kPageBytes;
    region.dma = page_dma(u64{0});
    region.contiguous = 1;
    for (u64 page = 0; page < pages; ++page) {
        const u64 dma = page_dma(page);
        list[list_index(page)] = dma;
        if (dma != region.dma + page * kPageBytes) region.contiguous = 0;
    }
    for (u64 at = 0; at + 1 < list_pages(region.length_bytes); ++at) {
        list[at * kListEntries + kListAddresses] = region.list_dma + (at + 1) * kPageBytes;
    }
    region.list = list;
}

/// The data pointer of a command, and how many of the bytes it covers.
struct DataPointer {
    u64 data[2];
    u32 length_bytes;
    u8 flags;
};

/// Point at `length_bytes` of a region from `offset_bytes` on. The result may cover less, by a page
/// at most and never nothing: send the rest with another command.
/// @param offset_bytes  a multiple of 4; offset_bytes + length_bytes lie in the region
/// @param sgl           the controller takes SGLs
TUTTI_HD inline DataPointer data_pointer(const Region& region, u64 offset_bytes, u32 length_bytes,
                                         bool sgl) {
    if (sgl && region.contiguous != 0) {
        const u64 type = u64{kSglDataBlock} << 56;
        return {{region.dma + offset_bytes, length_bytes | type}, length_bytes, kFlagSgl};
    }
    const u64 first = offset_bytes / kPageBytes;
    const u32 within = u32(offset_bytes % kPageBytes);
    const u64 head = region.list[list_index(first)] + within;
    const u32 in_first = kPageBytes - within;
    if (length_bytes <= in_first) return {{head, 0}, length_bytes, 0};
    if (length_bytes - in_first <= kPageBytes)
        return {{head, region.list[list_index(first + 1)]}, length_bytes, 0};
    const u64 last = first + (within + length_bytes - 1) / kPageBytes;
    // The entry after the last address of a list page leads on, unless the transfer ends there.
    const bool ends_on_link = last % kListAddresses == 0;
    const u32 covered = ends_on_link ? u32((last - first) * kPageBytes) - within : length_bytes;
    const u64 pointer = region.list_dma + list_index(first + 1) * 8;
    if (covered - in_first <= kPageBytes)
        return {{head, region.list[list_index(first + 1)]}, covered, 0};
    return {{head, pointer}, covered, 0};
}

}  // namespace tutti::nvme
