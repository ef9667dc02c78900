// Ways to an NVMe device of this machine that no kernel driver has: vfio-pci, and plain sysfs.
//
// vfio-pci is the one for use: the IOMMU keeps the device to the memory that was mapped for it, and
// the kernel to one process at a time. sysfs is for machines without an IOMMU: root only, memory in
// huge pages, and a wrong address is a wrong write.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tutti/nvme_controller.h"

namespace tutti::nvme {

/// Device addresses that may be mapped, and those that are. Not thread-safe.
class AddressSpace {
public:
    struct Range {
        u64 start;
        u64 end;  // the first address behind it
    };
    /// @param ranges  rising, apart from each other; whole pages
    explicit AddressSpace(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}

    /// The lowest free run of so many bytes; 0: there is none. Address 0 is never given.
    u64 take(u64 length_bytes);
    void give(u64 start);
    std::size_t taken() const { return taken_.size(); }

private:
    std::vector<Range> ranges_;
    std::map<u64, u64> taken_;  // start, end
};

/// A descriptor that is closed in the end.
class File {
public:
    File() = default;
    explicit File(int fd) : fd_(fd) {}
    ~File();
    File(File&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    File& operator=(File&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

private:
    int fd_ = -1;
};

/// Whether a PCI function says of itself that it is an NVMe controller; where not, why. To be asked
/// before anything of the function is touched.
Failure check_nvme_function(const std::string& pci_address);

class VfioAccess : public Access {
public:
    /// Take a PCI function, such as "0000:01:00.0", that is bound to vfio-pci.
    /// On failure: null, and `failure` says why; -EBUSY: another process has it.
    static std::unique_ptr<Access> open(const std::string& pci_address, Failure& failure);
    ~VfioAccess() override;

    u8* registers() override { return bar_; }
    u64 register_bytes() const override { return bar_bytes_; }
    Status allocate(u64 length_bytes, DmaMemory& memory) override;
    void release(const DmaMemory& memory) override;
    Status map(void* address, u64 length_bytes, u64& dma) override;
    void unmap(u64 dma, u64 length_bytes) override;

private:
    VfioAccess() = default;
    Failure start(const std::string& pci_address);
    Failure take_group(const std::string& pci_address);
    Failure map_registers();
    Failure enable_dma();
    void find_addresses();

    File container_, group_, device_;
    u8* bar_ = nullptr;
    u64 bar_bytes_ = 0;
    std::mutex mutex_;
    std::unique_ptr<AddressSpace> space_;  // guarded by mutex_
};

class SysfsAccess : public Access {
public:
    /// Take a PCI function that no driver is bound to. Root only; needs huge pages of 2 MiB.
    /// On failure: null, and `failure` says why; -EBUSY: a driver or another process has it.
    static std::unique_ptr<Access> open(const std::string& pci_address, Failure& failure);
    ~SysfsAccess() override;

    u8* registers() override { return bar_; }
    u64 register_bytes() const override { return bar_bytes_; }
    /// At most one huge page.
    Status allocate(u64 length_bytes, DmaMemory& memory) override;
    /// Given back with the access, all at once.
    void release(const DmaMemory& memory) override { (void)memory; }
    /// Only of memory that `allocate` returned: other memory may be moved by the kernel. -ENOTSUP.
    Status map(void* address, u64 length_bytes, u64& dma) override;
    void unmap(u64 dma, u64 length_bytes) override { (void)dma, (void)length_bytes; }

private:
    SysfsAccess() = default;
    Failure start(const std::string& pci_address);
    bool stop_dma();
    Status add_page();

    struct HugePage {
        u8* address;
        u64 dma;
        u64 used_bytes;
    };
    File config_, resource_;  // the lock on `resource_` is what keeps other processes out
    u8* bar_ = nullptr;
    u64 bar_bytes_ = 0;
    std::mutex mutex_;
    std::vector<HugePage> pages_;  // guarded by mutex_
};

}  // namespace tutti::nvme
