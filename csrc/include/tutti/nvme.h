// NVMe as it lies in memory: registers, queue entries, data pointers, status.
//
// Field layouts and values are those of the NVM Express Base Specification 2.0 and the NVM Command
// Set Specification 1.0; figure numbers are the base specification's. Only what Tutti uses is here.
// The same source is compiled by g++, by nvcc and, at run time, by NVRTC.
#pragma once

#include "tutti/portable.h"

namespace tutti::nvme {

/// Memory page of the controller, as we set it (CC.MPS = 0).
inline constexpr u32 kPageBytes = 4096;

// ---- registers: offsets into BAR0 (figure 35) ----
inline constexpr u32 kRegCap = 0x00;  // capabilities, 64 bits
inline constexpr u32 kRegVersion = 0x08;
inline constexpr u32 kRegMaskSet = 0x0c;
inline constexpr u32 kRegConfig = 0x14;      // CC
inline constexpr u32 kRegStatus = 0x1c;      // CSTS
inline constexpr u32 kRegAdminSizes = 0x24;  // AQA
inline constexpr u32 kRegAdminSq = 0x28;     // ASQ, 64 bits
inline constexpr u32 kRegAdminCq = 0x30;     // ACQ, 64 bits
inline constexpr u32 kRegDoorbells = 0x1000;

/// Offset of a doorbell (figure 69): of submission queue `queue`, or of its completion queue.
TUTTI_HD constexpr u32 doorbell_offset(u32 queue, bool completion, u32 stride_shift) {
    return kRegDoorbells + (2 * queue + (completion ? 1 : 0)) * (4u << stride_shift);
}

/// Capabilities register, taken apart (figure 36).
struct Capabilities {
    u64 raw;
    /// Entries of the deepest queue.
    TUTTI_HD constexpr u32 queue_entries_max() const { return u32(raw & 0xffff) + 1; }
    TUTTI_HD constexpr bool contiguous_queues() const { return (raw >> 16) & 1; }
    /// Bound on what a change of CC.EN may take.
    TUTTI_HD constexpr u64 ready_timeout_ms() const { return ((raw >> 24) & 0xff) * 500; }
    TUTTI_HD constexpr u32 stride_shift() const { return u32(raw >> 32) & 0xf; }
    TUTTI_HD constexpr bool nvm_command_set() const { return (raw >> 37) & 1; }
    /// log2 of the smallest memory page, less 12.
    TUTTI_HD constexpr u32 page_shift_min() const { return u32(raw >> 48) & 0xf; }
    /// A device that is gone reads as all ones. Ask before anything else is computed.
    TUTTI_HD constexpr bool gone() const { return raw == ~u64{0}; }
};

inline constexpr u32 kConfigEnable = 1;
/// CC for 4 KiB pages, the NVM command set, 64-byte and 16-byte entries (figure 46).
inline constexpr u32 kConfigEntries = 6u << 16 | 4u << 20;
inline constexpr u32 kConfigShutdown = 1u << 14;
inline constexpr u32 kStatusReady = 1;
inline constexpr u32 kStatusFatal = 2;
inline constexpr u32 kStatusShutdownMask = 3u << 2;
inline constexpr u32 kStatusShutdownDone = 2u << 2;
inline constexpr u32 kAllOnes = ~u32{0};  // what a device that is gone reads as

// ---- commands ----
enum class Admin : u8 {
    kDeleteSq = 0x00,
    kCreateSq = 0x01,
    kGetLog = 0x02,
    kDeleteCq = 0x04,
    kCreateCq = 0x05,
    kIdentify = 0x06,
    kAbort = 0x08,
    kSetFeatures = 0x09,
    kGetFeatures = 0x0a,
    kAsyncEvent = 0x0c,
    kDoorbellBuffers = 0x7c,
};

enum class Io : u8 { kFlush = 0x00, kWrite = 0x01, kRead = 0x02 };

inline constexpr u32 kFeatureQueueCount = 0x07;
inline constexpr u32 kIdentifyNamespace = 0x00;
inline constexpr u32 kIdentifyController = 0x01;
inline constexpr u32 kIdentifyActiveNamespaces = 0x02;
inline constexpr u32 kAllNamespaces = 0xffffffff;

/// SGL descriptor (figure 91): one run of memory that is contiguous for the device.
struct SglDescriptor {
    u64 address;
    u32 length_bytes;
    u8 reserved[3];
    u8 type;
};
static_assert(sizeof(SglDescriptor) == 16);
inline constexpr u8 kSglDataBlock = 0x00;
inline constexpr u8 kSglLastSegment = 0x30;

/// Submission queue entry (figure 88).
struct alignas(64) Command {
    u8 opcode;
    u8 flags;  // bits 7:6 say what the data pointer is: 0 PRP, 1 SGL
    u16 id;
    u32 nsid;
    u32 cdw2;
    u32 cdw3;
    u64 metadata;
    u64 data[2];  // PRP1 and PRP2, or one SGL descriptor
    u32 cdw10;
    u32 cdw11;
    u32 cdw12;
    u32 cdw13;
    u32 cdw14;
    u32 cdw15;
};
static_assert(sizeof(Command) == 64);
#if !defined(__CUDACC_RTC__)  // its offsetof is no constant
static_assert(offsetof(Command, id) == 2 && offsetof(Command, nsid) == 4);
static_assert(offsetof(Command, metadata) == 16 && offsetof(Command, data) == 24);
static_assert(offsetof(Command, cdw10) == 40 && offsetof(Command, cdw15) == 60);
#endif
inline constexpr u8 kFlagSgl = 1u << 6;

/// Completion queue entry (figure 92), in the units in which it is read.
struct alignas(16) Completion {
    u32 result;          // DW0, of the command
    u32 reserved;        // DW1
    u32 head_and_queue;  // DW2: SQ head, SQ id << 16
    u32 id_and_status;   // DW3: command id, phase << 16, status << 17
};
static_assert(sizeof(Completion) == 16);

/// Status field of a completion without its phase bit (figure 93): SC 7:0, SCT 10:8, DNR 14.
namespace status {
inline constexpr u32 kSuccess = 0x000;
inline constexpr u32 kInvalidOpcode = 0x001;
inline constexpr u32 kInvalidField = 0x002;
inline constexpr u32 kIdConflict = 0x003;
inline constexpr u32 kDataTransfer = 0x004;
inline constexpr u32 kInternal = 0x006;
inline constexpr u32 kAborted = 0x007;
inline constexpr u32 kQueueDeleted = 0x008;
inline constexpr u32 kInvalidNamespace = 0x00b;
inline constexpr u32 kSglLength = 0x00f;
inline constexpr u32 kSglType = 0x011;
inline constexpr u32 kPrpOffset = 0x013;
inline constexpr u32 kLbaRange = 0x080;
inline constexpr u32 kCqInvalid = 0x100;
inline constexpr u32 kQueueId = 0x101;
inline constexpr u32 kQueueSize = 0x102;
inline constexpr u32 kQueueDeletion = 0x10c;
inline constexpr u32 kWriteFault = 0x280;
inline constexpr u32 kReadError = 0x281;
inline constexpr u32 kGuardError = 0x282;
inline constexpr u32 kCodeMask = 0x7ff;  // SC and SCT
inline constexpr u32 kDoNotRetry = 0x4000;
// Ours: outside of the 15 bits that a controller can send.
inline constexpr u32 kTimeout = 0x10000;     // no completion in time
inline constexpr u32 kDeviceGone = 0x10001;  // registers read as all ones, or CSTS.CFS
inline constexpr u32 kNotIssued = 0x10002;   // given up before the command was sent
inline constexpr u32 kBadMemory = 0x10003;   // not registered, misaligned, across a region's end
}  // namespace status

/// A read or write of whole logical blocks; the data pointer is the caller's to fill.
/// @param lba_count 1 .. 65,536
TUTTI_HD inline Command transfer_command(Io op, u32 nsid, u64 lba, u32 lba_count) {
    Command command{};
    command.opcode = u8(op);
    command.nsid = nsid;
    command.cdw10 = u32(lba);
    command.cdw11 = u32(lba >> 32);
    command.cdw12 = lba_count - 1;
    return command;
}

}  // namespace tutti::nvme
