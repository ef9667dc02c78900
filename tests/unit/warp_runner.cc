// Runs a launch as a GPU would, on CPU threads: warps whose lanes meet at every collective call. A
// lane that leaves the loop alone, or goes round it more often than the others, is found out.
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tutti/gio_run.h"

namespace {

using tutti::u32;
constexpr std::chrono::seconds kMeetTimeout{60};
/// What lanes hear that are apart: that a deadline has passed, among others.
constexpr u32 kEverything = ~u32{0};

/// Where the lanes of one warp meet.
class Meeting {
public:
    explicit Meeting(u32 lanes) : lanes_(lanes), words_(lanes) {}

    template <class Fold>
    u32 meet(u32 lane, u32 mine, Fold fold) {
        std::unique_lock lock(mutex_);
        if (left_ != 0) apart_ = true;  // some are gone
        if (apart_) return kEverything;
        words_[lane] = mine;
        const u32 round = round_;
        if (++here_ == lanes_) {
            result_ = fold(words_);
            here_ = 0;
            ++round_;
            changed_.notify_all();
        } else if (!changed_.wait_for(lock, kMeetTimeout,
                                      [&] { return round_ != round || apart_; })) {
            apart_ = true;
            changed_.notify_all();
        }
        return apart_ ? kEverything : result_;
    }
    /// Some lanes waited for others in vain.
    bool apart() const { return apart_; }
    void leave() {
        std::lock_guard lock(mutex_);
        ++left_;
        if (here_ != 0) apart_ = true;  // somebody waits for a lane that is gone
        changed_.notify_all();
    }

private:
    const u32 lanes_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<u32> words_;
    u32 here_ = 0, round_ = 0, result_ = 0, left_ = 0;
    bool apart_ = false;
};

struct Warp {
    Meeting* meeting;
    u32 number, width, at, total;

    u32 lane() const { return number * width + at; }
    u32 lanes() const { return total; }
    u32 index() const { return number; }
    bool leader() const { return at == 0; }
    bool any(bool mine) const { return unite(mine ? 1 : 0) != 0; }
    u32 unite(u32 mask) const {
        return meeting->meet(at, mask, [](const std::vector<u32>& all) {
            u32 result = 0;
            for (u32 one : all) result |= one;
            return result;
        });
    }
    u32 sum(u32 mine) const {
        return meeting->meet(at, mine, [](const std::vector<u32>& all) {
            u32 result = 0;
            for (u32 one : all) result += one;
            return result;
        });
    }
    u32 share(u32 value) const {
        return meeting->meet(at, value, [](const std::vector<u32>& all) { return all[0]; });
    }
    void sync() const { unite(0); }
};

}  // namespace

/// Run a launch to its end. 0, or 1: the lanes of a warp did not stay together.
extern "C" int run_launch(tutti::gio::View* view, const tutti::gio::Launch* launch, u32 warps,
                          u32 width) {
    std::vector<std::unique_ptr<Meeting>> meetings;
    std::vector<std::thread> threads;
    for (u32 number = 0; number < warps; ++number) {
        meetings.push_back(std::make_unique<Meeting>(width));
        for (u32 at = 0; at < width; ++at) {
            const Warp warp{meetings.back().get(), number, width, at, warps * width};
            threads.emplace_back([=] {
                tutti::gio::run(*view, *launch, warp);
                warp.meeting->leave();
            });
        }
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& meeting : meetings) {
        if (meeting->apart()) return 1;
    }
    return 0;
}
