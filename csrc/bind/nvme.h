// An open NVMe controller as Python objects hold it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>

#include "tutti/nvme_controller.h"
#include "tutti/nvme_linux.h"
#include "tutti/nvme_soft.h"
#include "tutti/nvme_table.h"

namespace tutti {

/// The process that made an object. Threads and devices stay there when it forks.
class Owner {
public:
    bool here() const { return ::getpid() == pid_; }

private:
    pid_t pid_ = ::getpid();
};

/// Everything that one controller needs; destroyed from the controller down. In a forked child
/// nothing is: the device and its memory are the parent's.
struct NvmeHandle {
    std::shared_ptr<nvme::SoftController> soft;
    std::unique_ptr<nvme::Access> access;
    std::unique_ptr<nvme::MemoryTable> memory;
    std::unique_ptr<nvme::Controller> controller;
    Owner owner;

    NvmeHandle() = default;
    ~NvmeHandle() {
        if (owner.here()) return;
        (void)controller.release();
        (void)memory.release();
        (void)access.release();
        new std::shared_ptr<nvme::SoftController>(std::move(soft));
    }
    NvmeHandle(const NvmeHandle&) = delete;
    NvmeHandle& operator=(const NvmeHandle&) = delete;
};

/// What Python calls an NvmeController.
class PyController {
public:
    std::shared_ptr<NvmeHandle> handle;
};

}  // namespace tutti
