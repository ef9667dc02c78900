// CPU threads in the place of a GPU's.
#include <cerrno>
#include <system_error>

#include "tutti/gio_ring.h"
#include "tutti/gio_run.h"

namespace tutti::gio {

Status CpuExecutor::start(u32 threads) {
    try {
        for (u32 at = 0; at < threads; ++at) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
        stop();
        return -EAGAIN;
    }
    return 0;
}

void CpuExecutor::launch(const Launch& launch, u32 lanes) {
    const u32 count = std::max(1u, std::min(lanes, u32(threads_.size())));
    const auto kept = std::make_shared<const Launch>(launch);
    {
        std::lock_guard guard(mutex_);
        for (u32 lane = 0; lane < count; ++lane) shares_.push_back({kept, lane, count});
    }
    changed_.notify_all();
}

void CpuExecutor::serve() {
    for (;;) {
        Share share;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return stopping_ || !shares_.empty(); });
            if (shares_.empty()) return;
            share = std::move(shares_.front());
            shares_.pop_front();
        }
        run(view_, *share.launch, Alone{share.lane, share.lanes});
    }
}

void CpuExecutor::stop() {
    {
        std::lock_guard guard(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

}  // namespace tutti::gio
