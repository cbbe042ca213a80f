// What compute capability 9.0 adds, as PTX ISA names it: mbarriers, bulk tensor copies (TMA) and clusters.
// Shared addresses are 32-bit, as __cvta_generic_to_shared gives them.
#pragma once

#include "common/pdl.cuh"
#include "common/types.cuh"

// A descriptor that the driver encodes; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Orders the initialisation of mbarriers before TMA loads that complete on them.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at an mbarrier of this block, or of the block of that rank in a cluster of several. In a cluster it orders
// reads alone, not writes: a release in the cluster's scope would cost as much as a k-tile.
template <int Cluster = 1>
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier, int rank = 0) {
  if constexpr (Cluster == 1)
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  else
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the mbarrier's phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// TMA load of a box of a tensor: to the same address in the `kMulticast` blocks of the cluster that `cta_mask` names,
// and completes on the mbarrier of each.
template <int kMulticast = 1>
__device__ __forceinline__ void tma_load_tiled(unsigned to, const TensorMap* map, unsigned barrier, int x, int y, int z,
                                               unsigned short cta_mask = 1) {
  if constexpr (kMulticast == 1)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(cta_mask)
        : "memory");
}

// The same in im2col mode: pixels of a tensor of C, W, H, N from a start on, shifted by a filter tap's offsets.
template <int kMulticast = 1>
__device__ __forceinline__ void tma_load_im2col(unsigned to, const TensorMap* map, unsigned barrier, int c, int w,
                                                int h, int n, unsigned short tap_w, unsigned short tap_h,
                                                unsigned short cta_mask = 1) {
  if constexpr (kMulticast == 1)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2], {%7, %8};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w), "h"(tap_h)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w), "h"(tap_h), "h"(cta_mask)
        : "memory");
}

#ifdef VARIANT_VOLUME
// The same of a tensor of C, W, H, D, N.
template <int kMulticast = 1>
__device__ __forceinline__ void tma_load_im2col(unsigned to, const TensorMap* map, unsigned barrier, int c, int w,
                                                int h, int d, int n, unsigned short tap_w, unsigned short tap_h,
                                                unsigned short tap_d, unsigned short cta_mask) {
  if constexpr (kMulticast == 1)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2], {%8, %9, %10};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(tap_w), "h"(tap_h), "h"(tap_d)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10}, %11;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(tap_w), "h"(tap_h), "h"(tap_d),
        "h"(cta_mask)
        : "memory");
}
#endif

__device__ __forceinline__ void tma_store(const TensorMap* map, unsigned from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until committed TMA stores have read shared memory, so that it may be written again.
__device__ __forceinline__ void tma_store_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy: TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ int cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Arrives at the barrier of all threads of the cluster; with `kRelease` what each has written is visible after it.
template <bool kRelease>
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kRelease)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The block's barrier, wherever in the code each warp is: __syncthreads() wants one place for all.
__device__ __forceinline__ void block_sync() {
  asm volatile("barrier.sync 0;" ::: "memory");
}

// The same address in the shared memory of the cluster's block of that rank (DSMEM).
__device__ __forceinline__ unsigned map_shared_rank(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ Vector<float, 4> load_cluster_floats(unsigned address) {
  Vector<float, 4> values;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.at[0]), "=f"(values.at[1]), "=f"(values.at[2]), "=f"(values.at[3])
               : "r"(address)
               : "memory");
  return values;
}

// A named barrier of `kThreadCount` threads.
template <int kThreadCount>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(kThreadCount) : "memory");
}

// A barrier of the 128 threads of one warpgroup.
__device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("barrier.sync %0, 128;" ::"r"(id) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_trans(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_shared_pair(unsigned address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ unsigned load_shared(unsigned address) {
  unsigned word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Neighbouring words.
__device__ __forceinline__ void load_shared(unsigned (&words)[2], unsigned address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(unsigned (&words)[4], unsigned address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
