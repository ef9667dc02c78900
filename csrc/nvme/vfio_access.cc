// NVMe through vfio-pci with a type 1 IOMMU (Linux: Documentation/driver-api/vfio.rst).
#include <fcntl.h>
#include <linux/pci_regs.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tutti/nvme_linux.h"

namespace tutti::nvme {
namespace {

/// Where the kernel does not say what an IOMMU can map: above all that is reserved on PCs, and
/// within the 39 bits that every IOMMU has.
constexpr AddressSpace::Range kUsualAddresses{u64{4} << 30, u64{1} << 38};
/// Below, ROMs and legacy devices have their places.
constexpr u64 kAddressMin = 1u << 20;
constexpr u64 kInfoBytesMax = 64u << 10;
/// Mass storage, non-volatile memory, NVM Express.
constexpr const char* kNvmeClass = "0x010802";

Failure refused(const std::string& what, int code = errno) {
    if (code == 0) code = EIO;  // a transfer that was short sets no errno
    return {-code, 0, what + ": " + std::strerror(code)};
}

File open_file(const std::string& path) { return File(::open(path.c_str(), O_RDWR | O_CLOEXEC)); }

}  // namespace

File::~File() {
    if (fd_ >= 0) ::close(fd_);
}

Failure check_nvme_function(const std::string& pci_address) {
    if (pci_address.empty() || pci_address.find('/') != std::string::npos)
        return {-EINVAL, 0, "not the address of a PCI function: " + pci_address};
    const std::string path = "/sys/bus/pci/devices/" + pci_address + "/class";
    const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) return refused("there is no PCI function " + pci_address);
    char text[16] = {};
    if (::read(file.get(), text, sizeof text - 1) < 0)
        return refused(pci_address + " does not say what it is");
    if (std::strncmp(text, kNvmeClass, std::strlen(kNvmeClass)) != 0)
        return {-ENOTSUP, 0, pci_address + " is no NVMe controller"};
    return {};
}

u64 AddressSpace::take(u64 length_bytes) {
    if (length_bytes == 0) return 0;
    for (const Range& range : ranges_) {
        u64 at = std::max(range.start, u64{kPageBytes});
        for (auto next = taken_.lower_bound(range.start);; ++next) {
            const u64 end = next == taken_.end() ? range.end : std::min(range.end, next->first);
            if (end >= at && end - at >= length_bytes) {
                taken_.emplace(at, at + length_bytes);
                return at;
            }
            if (next == taken_.end() || next->first >= range.end) break;
            at = std::max(at, next->second);
        }
    }
    return 0;
}

void AddressSpace::give(u64 start) { taken_.erase(start); }

std::unique_ptr<Access> VfioAccess::open(const std::string& pci_address, Failure& failure) {
    std::unique_ptr<VfioAccess> access(new VfioAccess);
    failure = access->start(pci_address);
    if (failure) return nullptr;
    return access;
}

Failure VfioAccess::start(const std::string& pci_address) {
    if (Failure failure = check_nvme_function(pci_address)) return failure;
    container_ = open_file("/dev/vfio/vfio");
    if (!container_) return refused("/dev/vfio/vfio cannot be opened (is vfio-pci loaded?)");
    if (::ioctl(container_.get(), VFIO_GET_API_VERSION) != VFIO_API_VERSION)
        return {-ENOTSUP, 0, "this kernel has another version of vfio"};
    if (::ioctl(container_.get(), VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) != 1)
        return {-ENOTSUP, 0, "vfio has no type 1 IOMMU here (is vfio_iommu_type1 loaded?)"};
    if (Failure failure = take_group(pci_address)) return failure;
    if (Failure failure = map_registers()) return failure;
    find_addresses();
    return enable_dma();
}

Failure VfioAccess::take_group(const std::string& pci_address) {
    const std::string folder = "/sys/bus/pci/devices/" + pci_address;
    char link[256];
    const ssize_t length = ::readlink((folder + "/iommu_group").c_str(), link, sizeof link - 1);
    if (length < 0)
        return refused(pci_address + " is not there, or is in no IOMMU group (no IOMMU, or off)");
    const std::string path(link, std::size_t(length));
    const std::string number = path.substr(path.rfind('/') + 1);
    group_ = open_file("/dev/vfio/" + number);
    if (!group_)
        return refused("/dev/vfio/" + number + " cannot be opened" +
                       (errno == EBUSY    ? " (another process has the device)"
                        : errno == ENOENT ? " (the device is not bound to vfio-pci)"
                                          : ""));
    vfio_group_status status{};
    status.argsz = sizeof status;
    if (::ioctl(group_.get(), VFIO_GROUP_GET_STATUS, &status) != 0)
        return refused("the IOMMU group does not answer");
    if ((status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0)
        return {-EPERM, 0,
                "IOMMU group " + number +
                    " has another device that a driver of the kernel holds; bind all of the "
                    "group to vfio-pci"};
    int container = container_.get();
    if (::ioctl(group_.get(), VFIO_GROUP_SET_CONTAINER, &container) != 0)
        return refused("the IOMMU group cannot be taken");
    if (::ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) != 0)
        return refused("the IOMMU cannot be set up");
    device_ = File(::ioctl(group_.get(), VFIO_GROUP_GET_DEVICE_FD, pci_address.c_str()));
    if (!device_) return refused(pci_address + " cannot be taken from its group");
    return {};
}

Failure VfioAccess::map_registers() {
    vfio_region_info info{};
    info.argsz = sizeof info;
    info.index = VFIO_PCI_BAR0_REGION_INDEX;
    if (::ioctl(device_.get(), VFIO_DEVICE_GET_REGION_INFO, &info) != 0)
        return refused("BAR0 does not answer");
    if ((info.flags & VFIO_REGION_INFO_FLAG_MMAP) == 0 || info.size < 2 * kRegDoorbells)
        return {-ENOTSUP, 0, "BAR0 is no NVMe controller's"};
    void* at = ::mmap(nullptr, info.size, PROT_READ | PROT_WRITE, MAP_SHARED, device_.get(),
                      off_t(info.offset));
    if (at == MAP_FAILED) return refused("BAR0 cannot be mapped");
    bar_ = static_cast<u8*>(at);
    bar_bytes_ = info.size;
    return {};
}

Failure VfioAccess::enable_dma() {
    vfio_region_info info{};
    info.argsz = sizeof info;
    info.index = VFIO_PCI_CONFIG_REGION_INDEX;
    if (::ioctl(device_.get(), VFIO_DEVICE_GET_REGION_INFO, &info) != 0)
        return refused("the PCI configuration does not answer");
    u16 command = 0;
    const off_t at = off_t(info.offset) + PCI_COMMAND;
    if (::pread(device_.get(), &command, sizeof command, at) != sizeof command)
        return refused("the PCI configuration cannot be read");
    command = u16(command | PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER);
    if (::pwrite(device_.get(), &command, sizeof command, at) != sizeof command)
        return refused("the device cannot be made bus master");
    return {};
}

/// Which device addresses the IOMMU maps, as the kernel says in a chain of capabilities.
void VfioAccess::find_addresses() {
    std::vector<AddressSpace::Range> ranges;
    vfio_iommu_type1_info head{};
    head.argsz = sizeof head;
    if (::ioctl(container_.get(), VFIO_IOMMU_GET_INFO, &head) == 0 && head.argsz > sizeof head &&
        head.argsz <= kInfoBytesMax) {
        std::vector<u64> words((head.argsz + 7) / 8);
        u8* bytes = reinterpret_cast<u8*>(words.data());
        auto* info = reinterpret_cast<vfio_iommu_type1_info*>(bytes);
        info->argsz = head.argsz;
        const bool told = ::ioctl(container_.get(), VFIO_IOMMU_GET_INFO, info) == 0 &&
                          (info->flags & VFIO_IOMMU_INFO_CAPS) != 0;
        u64 offset = told ? info->cap_offset : 0;
        for (u32 links = 0; offset != 0 && links < 64; ++links) {
            if (offset + sizeof(vfio_iommu_type1_info_cap_iova_range) > head.argsz) break;
            const auto* cap =
                reinterpret_cast<vfio_iommu_type1_info_cap_iova_range*>(bytes + offset);
            const u64 room = (head.argsz - offset - sizeof *cap) / sizeof(vfio_iova_range);
            if (cap->header.id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE && cap->nr_iovas <= room) {
                for (u32 at = 0; at < cap->nr_iovas; ++at) {
                    const u64 start = std::max(u64{cap->iova_ranges[at].start}, kAddressMin);
                    // The last address may be the last of all: not one more, which would be 0.
                    const u64 last = cap->iova_ranges[at].end;
                    const u64 end = (last == ~u64{0} ? last : last + 1) & ~u64{kPageBytes - 1};
                    if (end > start) ranges.push_back({start, end});
                }
            }
            offset = cap->header.next;
        }
    }
    if (ranges.empty()) ranges.push_back(kUsualAddresses);
    space_ = std::make_unique<AddressSpace>(std::move(ranges));
}

VfioAccess::~VfioAccess() {
    if (bar_ != nullptr) ::munmap(bar_, bar_bytes_);
}

Status VfioAccess::allocate(u64 length_bytes, DmaMemory& memory) {
    void* at =
        ::mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return -errno;
    // A child's copy on write would leave the device with the wrong pages.
    ::madvise(at, length_bytes, MADV_DONTFORK);
    u64 dma = 0;
    if (const Status status = map(at, length_bytes, dma)) {
        ::munmap(at, length_bytes);
        return status;
    }
    memory = {static_cast<u8*>(at), dma, length_bytes};
    return 0;
}

void VfioAccess::release(const DmaMemory& memory) {
    unmap(memory.dma, memory.length_bytes);
    ::munmap(memory.address, memory.length_bytes);
}

Status VfioAccess::map(void* address, u64 length_bytes, u64& dma) {
    std::lock_guard guard(mutex_);
    const u64 start = space_->take(length_bytes);
    if (start == 0) return -ENOSPC;
    vfio_iommu_type1_dma_map request{};
    request.argsz = sizeof request;
    request.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
    request.vaddr = reinterpret_cast<std::uintptr_t>(address);
    request.iova = start;
    request.size = length_bytes;
    if (::ioctl(container_.get(), VFIO_IOMMU_MAP_DMA, &request) != 0) {
        const int code = errno;  // ENOMEM: the locked-memory limit
        space_->give(start);
        return -code;
    }
    dma = start;
    return 0;
}

void VfioAccess::unmap(u64 dma, u64 length_bytes) {
    std::lock_guard guard(mutex_);
    vfio_iommu_type1_dma_unmap request{};
    request.argsz = sizeof request;
    request.iova = dma;
    request.size = length_bytes;
    if (::ioctl(container_.get(), VFIO_IOMMU_UNMAP_DMA, &request) == 0) space_->give(dma);
}

}  // namespace tutti::nvme
