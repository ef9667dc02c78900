// The kernel of gio_uring: each warp is a group of lanes, and goes round the loop of gio_run.h as one.
//
// Compiled by NVRTC when a ring opens (cuda_executor.py), and by nvcc in the tests. All memory that it
// touches is registered host memory, at the same address on both sides, or the launch, which is a
// parameter. Nothing that another thread may write lies in a thread's local memory.
#include "tutti/gio_run.h"

namespace tutti::gio {

/// 32 lanes of a kernel whose blocks are whole warps.
struct Warp {
    static constexpr u32 kAll = 0xffffffff;
    static constexpr u32 kLanes = 32;

    __device__ u32 lane() const { return blockIdx.x * blockDim.x + threadIdx.x; }
    __device__ u32 lanes() const { return gridDim.x * blockDim.x; }
    __device__ u32 index() const { return lane() / kLanes; }
    __device__ bool leader() const { return threadIdx.x % kLanes == 0; }
    __device__ bool any(bool mine) const { return __any_sync(kAll, mine) != 0; }
    __device__ u32 unite(u32 mask) const { return __reduce_or_sync(kAll, mask); }
    __device__ u32 sum(u32 mine) const { return __reduce_add_sync(kAll, mine); }
    __device__ u32 share(u32 value) const { return __shfl_sync(kAll, value, 0); }
    __device__ void sync() const { __syncwarp(kAll); }
};

}  // namespace tutti::gio

/// @param view    of the ring
/// @param launch  read where the driver put it: a copy would be 2 KiB of local memory for each lane
extern "C" __global__ void tutti_gio_run(tutti::gio::View* view,
                                         const __grid_constant__ tutti::gio::Launch launch) {
    tutti::gio::run(*view, launch, tutti::gio::Warp{});
}
