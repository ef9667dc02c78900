// An NVMe controller in this process: registers and doorbells are shared memory, and one thread
// serves them. Every test without a drive, and every GPU machine without one to give away, has it
// as its peer.
//
// It is strict where devices may be lax: every rule of PRPs and SGLs is checked, and device addresses
// are not virtual addresses, so code that confuses the two fails at once. Memory that was not mapped
// ends a command with a status, never the process. It does on demand what hardware does once a
// month: see SoftFault.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tutti/device_copy.h"
#include "tutti/nvme_controller.h"

namespace tutti::nvme {

inline constexpr u32 kSoftQueuesMax = 65;  // the admin queue and 64 pairs
inline constexpr u32 kSoftEntriesMax = 4096;
inline constexpr u32 kSoftNamespacesMax = 16;

struct SoftOptions {
    u64 namespace_bytes = 64u << 20;  // of each, a multiple of block_bytes
    u32 namespace_count = 1;
    u32 block_bytes = 512;   // 512 or 4096
    u32 transfer_shift = 7;  // MDTS: 4096 << n bytes a command; 0: no limit of its own
    u32 queue_entries_max = 1024;
    u32 queue_pairs_max = 64;
    bool sgl = true;
    bool shadow_doorbells = true;
    std::string serial = "TUTTI-SOFT-1";
    /// Files, one for each namespace, of namespace_bytes; none: memory. Borrowed descriptors.
    std::vector<int> files;
    /// Move no bytes and look at no data pointer: the protocol alone.
    bool null_backend = false;
    /// The CUDA driver's library. With it memory of the first GPU may be mapped too; namespaces then
    /// have to be in memory. Empty: host memory alone.
    std::string cuda_library;
};

/// Something that goes wrong with some commands.
struct SoftFault {
    enum class Kind : u8 {
        kStatus,   // end with `status`, move nothing
        kDrop,     // move the bytes and never complete
        kLose,     // neither move nor complete
        kDelay,    // serve after `turns` turns of the controller: reorders
        kHold,     // serve when `release` is called, or never
        kRepeat,   // complete twice
        kTorn,     // write the completion's first words, wait `turns`, then the word with the phase
        kWrongId,  // complete with an id that is not in flight, then properly
        kWrongQueue,  // a completion that names another submission queue, then properly
        kWrongHead,   // complete with an SQHD that was never rung
        kShort,       // move half of the bytes and report success
        kFlip,        // move the bytes with one bit flipped and report success
        kFatal,       // set CSTS.CFS and serve nothing more until reset
        kGone,        // every register reads as all ones from now on, until `plug_in`
    };
    Kind kind = Kind::kStatus;
    u32 queue = 0;    // 0: any I/O queue
    int opcode = -1;  // -1: any
    u32 skip = 0;     // leave so many fitting commands alone first
    u32 count = 1;    // then meet so many
    u32 status = 0;
    u32 turns = 0;
};

struct SoftStats {
    u64 commands;
    u64 faults;        // commands that met a fault
    u64 bad_pointers;  // commands refused for their data pointer
    u64 unmapped;      // accesses to memory that was not mapped: what an IOMMU reports
    u64 doorbells;     // doorbell writes; two between two looks are one
};

class SoftController {
public:
    explicit SoftController(SoftOptions options);
    /// Stops. Nothing that it maps is touched afterwards.
    ~SoftController();
    SoftController(const SoftController&) = delete;
    SoftController& operator=(const SoftController&) = delete;

    /// Get memory and start serving. Called once, before anything else. -ENOTSUP: no GPU to copy to,
    /// and `why` says so.
    Status start();
    const std::string& why() const { return why_; }

    /// Registers and doorbells: what BAR0 of a device is. Valid as long as the controller.
    u8* registers() { return bar_; }
    static constexpr u64 kRegisterBytes = 16384;

    /// Let the controller reach memory, at the device address that is returned; 0: no room.
    /// @param address, length_bytes  multiples of kPageBytes
    u64 map(void* address, u64 length_bytes);
    /// Take it back. On return the controller does not touch it any more.
    void unmap(u64 dma);

    /// Add a fault; the first that fits a command is met. Any thread, any time.
    void inject(const SoftFault& fault);
    /// Forget all faults that were not met yet.
    void clear_faults();
    /// Serve everything that is held now. What is held later waits for another call.
    void release();
    /// The device comes back after kGone, as after a power-up.
    void plug_in();

    SoftStats stats() const;
    /// Bytes of a namespace, where it lies in memory.
    u8* media(u32 nsid) { return media_[nsid - 1].get(); }

private:
    struct Sq {
        const Command* entries = nullptr;
        u32 size = 0;
        u32 head = 0;
        u32 rung = 0;  // the doorbell's last value
        u32 cq = 0;
    };
    struct Cq {
        Completion* entries = nullptr;
        u32 size = 0;
        u32 tail = 0;
        u32 head = 0;  // as the host last said
        u32 phase = 1;
    };
    struct Mapping {
        u64 dma;
        u8* address;
        u64 length_bytes;
        bool device;  // a GPU's
    };
    struct Piece {
        u8* address;
        u32 length_bytes;
        bool device;
    };
    /// A command whose copies are queued.
    struct Copying {
        u32 queue;
        u32 id;
        u32 status;
    };
    struct Waiting {
        u32 queue;
        u32 turns;
        bool held;
        u64 releases;  // that had been asked for when it was held
        SoftFault::Kind after;
        Command command;
    };
    /// A completion that found its queue full.
    struct Posted {
        u32 sq_id;
        u32 cq_id;
        u32 id;
        u32 status;
        u32 value;
    };

    void run();
    void follow_config();
    void enable();
    void disable();
    bool serve(u32 queue);
    void serve_io(u32 queue, const Command& command);
    void meet(u32 queue, const Command& command, const SoftFault& fault);
    u32 execute(const Command& command, SoftFault::Kind how);
    u32 run_command(const Command& command, SoftFault::Kind how);
    u32 finish_copies();
    void complete_copied();
    u32 copy_parts(u8* disk, bool write, u64 length_bytes);
    u32 move(const Command& command, SoftFault::Kind how);
    u32 serve_admin(const Command& command, u32& value);
    u32 identify(const Command& command);
    u32 create_cq(const Command& command);
    u32 create_sq(const Command& command);
    u32 delete_sq(u32 queue);
    u32 delete_cq(u32 queue);
    u32 set_shadow(const Command& command);
    bool take_fault(u32 queue, const Command& command, SoftFault& fault);
    bool age_waiting();
    u32 end_waiting(u32 queue, int id, u32 status);
    void complete(u32 queue, u32 id, u32 status, u32 value = 0);
    bool post_waiting();
    bool has_room(u32 cq_id);
    void write_completion(const Posted& posted, u32 sq_id, u32 head, u32 turns);
    bool take_doorbell(u32 queue, bool completion, u32& value);
    u32 tail_of(u32 queue);
    u32 gather(const Command& command, u64 length_bytes);
    u32 gather_prp(const Command& command, u64 length_bytes);
    u32 gather_sgl(const Command& command, u64 length_bytes);
    bool add_piece(u64 dma, u64 length_bytes);
    const Mapping* mapping_of(u64 dma, u64 length_bytes);
    u8* reach(u64 dma, u64 length_bytes);
    void refresh_mappings();
    void sync_unmapped();

    u32* reg(u32 offset) { return reinterpret_cast<u32*>(bar_ + offset); }
    u32 load(u32 offset);
    void store(u32 offset, u32 value);
    void store64(u32 offset, u64 value);
    u32* doorbell_word(u32 queue, bool completion);

    SoftOptions options_;
    u8* bar_ = nullptr;
    std::vector<std::unique_ptr<u8[]>> media_;
    std::string why_;
    std::unique_ptr<DeviceCopy> copies_;  // before the media that it pins are gone

    std::mutex mutex_;  // mappings and faults
    std::vector<Mapping> mappings_;
    std::vector<SoftFault> faults_;
    u64 next_dma_ = u64{1} << 40;
    std::atomic<u64> mappings_version_{1};
    std::atomic<u64> mappings_seen_{0};
    std::atomic<bool> any_faults_{false};
    std::atomic<u64> releases_{0};  // added to under mutex_
    std::atomic<bool> plug_in_{false};
    std::atomic<bool> stop_{false};

    // The controller's thread.
    std::vector<Mapping> reachable_;  // sorted by device address
    std::vector<Piece> pieces_;
    std::vector<Copying> copying_;  // at most one burst
    bool copies_queued_ = false;
    u64 releases_met_ = 0;  // when the last fault was met
    std::vector<Waiting> waiting_;
    std::vector<Posted> posted_;
    std::vector<u16> events_;  // asynchronous event requests, never answered
    Sq sq_[kSoftQueuesMax];
    Cq cq_[kSoftQueuesMax];
    bool asleep_[kSoftQueuesMax] = {};  // looks at the doorbell alone, no more at the shadow
    u32* shadow_ = nullptr;
    u32* event_ = nullptr;
    bool enabled_ = false;
    bool fatal_ = false;
    bool gone_ = false;

    struct Counters {
        std::atomic<u64> commands{0}, faults{0}, bad_pointers{0}, unmapped{0}, doorbells{0};
    } count_;
    std::thread thread_;
};

/// The way to a software controller.
class SoftAccess : public Access {
public:
    /// @param controller  outlives the access
    explicit SoftAccess(SoftController& controller) : controller_(controller) {}
    u8* registers() override { return controller_.registers(); }
    u64 register_bytes() const override { return SoftController::kRegisterBytes; }
    Status allocate(u64 length_bytes, DmaMemory& memory) override;
    void release(const DmaMemory& memory) override;
    Status map(void* address, u64 length_bytes, u64& dma) override;
    void unmap(u64 dma, u64 length_bytes) override;

private:
    SoftController& controller_;
};

}  // namespace tutti::nvme
