// NVMe through sysfs, without an IOMMU: resource0, huge pages, and /proc/self/pagemap.
#include <fcntl.h>
#include <linux/pci_regs.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tutti/nvme_linux.h"

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

namespace tutti::nvme {
namespace {

constexpr u64 kHugeBytes = 2u << 20;
constexpr u64 kPresent = u64{1} << 63;
constexpr u64 kFrameMask = (u64{1} << 55) - 1;

Failure refused(const std::string& what, int code = errno) {
    if (code == 0) code = EIO;  // a transfer that was short sets no errno
    return {-code, 0, what + ": " + std::strerror(code)};
}

/// Physical address of a page of ours that is in memory; 0: not told.
u64 physical(const void* address) {
    const File map(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    u64 entry = 0;
    const off_t at = off_t(reinterpret_cast<std::uintptr_t>(address) / kPageBytes * sizeof entry);
    if (!map || ::pread(map.get(), &entry, sizeof entry, at) != sizeof entry) return 0;
    return (entry & kPresent) != 0 ? (entry & kFrameMask) * kPageBytes : 0;
}

}  // namespace

std::unique_ptr<Access> SysfsAccess::open(const std::string& pci_address, Failure& failure) {
    std::unique_ptr<SysfsAccess> access(new SysfsAccess);
    failure = access->start(pci_address);
    if (failure) return nullptr;
    return access;
}

Failure SysfsAccess::start(const std::string& pci_address) {
    if (Failure failure = check_nvme_function(pci_address)) return failure;
    const std::string folder = "/sys/bus/pci/devices/" + pci_address;
    if (::access((folder + "/driver").c_str(), F_OK) == 0)
        return {-EBUSY, 0, pci_address + " has a driver of the kernel; unbind it first"};
    resource_ = File(::open((folder + "/resource0").c_str(), O_RDWR | O_CLOEXEC));
    if (!resource_) return refused("BAR0 cannot be opened");
    if (::flock(resource_.get(), LOCK_EX | LOCK_NB) != 0)
        return {-EBUSY, 0, pci_address + " is another process's"};
    const File enable(::open((folder + "/enable").c_str(), O_WRONLY | O_CLOEXEC));
    if (!enable || ::write(enable.get(), "1", 1) != 1)
        return refused(pci_address + " is not there, or cannot be switched on");
    config_ = File(::open((folder + "/config").c_str(), O_RDWR | O_CLOEXEC));
    u16 command = 0;
    if (!config_ || ::pread(config_.get(), &command, sizeof command, PCI_COMMAND) != sizeof command)
        return refused("the PCI configuration cannot be read");
    command = u16(command | PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER);
    if (::pwrite(config_.get(), &command, sizeof command, PCI_COMMAND) != sizeof command)
        return refused("the device cannot be made bus master");
    struct stat about {};
    if (::fstat(resource_.get(), &about) != 0) return refused("BAR0 does not say how long it is");
    if (about.st_size < off_t(2 * kRegDoorbells))
        return {-ENOTSUP, 0, "BAR0 is no NVMe controller's"};
    void* at = ::mmap(nullptr, std::size_t(about.st_size), PROT_READ | PROT_WRITE, MAP_SHARED,
                      resource_.get(), 0);
    if (at == MAP_FAILED) return refused("BAR0 cannot be mapped");
    bar_ = static_cast<u8*>(at);
    bar_bytes_ = u64(about.st_size);
    std::lock_guard guard(mutex_);
    if (const Status status = add_page())
        return refused("no huge page of 2 MiB (vm.nr_hugepages), or no right to see where it is",
                       -status);
    return {};
}

/// Let the device move nothing any more, whether or not its controller stopped.
bool SysfsAccess::stop_dma() {
    u16 command = 0;
    if (!config_) return true;  // nothing was switched on
    if (::pread(config_.get(), &command, sizeof command, PCI_COMMAND) != sizeof command)
        return false;
    if (command == 0xffff) return true;  // it is gone
    command = u16(command & ~PCI_COMMAND_MASTER);
    return ::pwrite(config_.get(), &command, sizeof command, PCI_COMMAND) == sizeof command;
}

SysfsAccess::~SysfsAccess() {
    if (bar_ != nullptr) ::munmap(bar_, bar_bytes_);
    // No IOMMU stands between the device and pages that have another owner by then.
    if (!stop_dma()) return;
    for (const HugePage& page : pages_) ::munmap(page.address, kHugeBytes);
}

Status SysfsAccess::add_page() {
    void* at =
        ::mmap(nullptr, kHugeBytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) return -errno;
    ::madvise(at, kHugeBytes, MADV_DONTFORK);
    // Not touched before it is known to be there: a cgroup's limit of huge pages lets mmap pass
    // and kills who touches. The kernel has zeroed what it put there.
    const u64 dma = physical(at);
    if (dma == 0) {
        ::munmap(at, kHugeBytes);
        return -EPERM;
    }
    pages_.push_back({static_cast<u8*>(at), dma, 0});
    return 0;
}

Status SysfsAccess::allocate(u64 length_bytes, DmaMemory& memory) {
    if (length_bytes > kHugeBytes) return -ENOMEM;
    std::lock_guard guard(mutex_);
    if (pages_.empty() || kHugeBytes - pages_.back().used_bytes < length_bytes) {
        if (const Status status = add_page()) return status;
    }
    HugePage& page = pages_.back();
    memory = {page.address + page.used_bytes, page.dma + page.used_bytes, length_bytes};
    page.used_bytes += (length_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    return 0;
}

Status SysfsAccess::map(void* address, u64 length_bytes, u64& dma) {
    std::lock_guard guard(mutex_);
    const u8* at = static_cast<const u8*>(address);
    for (const HugePage& page : pages_) {
        if (at < page.address || at + length_bytes > page.address + kHugeBytes) continue;
        dma = page.dma + u64(at - page.address);
        return 0;
    }
    return -ENOTSUP;
}

}  // namespace tutti::nvme
