// Sums of the CLUSTER blocks of a cluster along y, read from each other's shared memory (from compute capability 9.0
// on); of a block alone if CLUSTER is 1. A kernel is declared IN_CLUSTER.
#pragma once

#include "common/types.cuh"

#if CLUSTER > 1
#include "common/hopper.cuh"
#define IN_CLUSTER __cluster_dims__(1, CLUSTER, 1)
#else
#define IN_CLUSTER
#endif

// Orders all that the threads of the cluster read and wrote in shared memory.
__device__ __forceinline__ void cluster_barrier() {
#if CLUSTER > 1
  cluster_arrive<true>();
  cluster_wait();
#else
  __syncthreads();  // a block alone
#endif
}

// A thread's number among those of the cluster, whose blocks have kThreads each.
template <int kThreads>
__device__ __forceinline__ int place_in_cluster() {
#if CLUSTER > 1
  return cluster_rank() * kThreads + threadIdx.x;
#else
  return threadIdx.x;
#endif
}

// The sums that are at `from` in this block, of the block of that rank.
template <int kVector>
__device__ __forceinline__ Vector<float, kVector> sums_of_block(const float* from, int rank) {
#if CLUSTER > 1
  static_assert(kVector == 4, "blocks read each other's sums four at a time");
  return load_floats(address_of(static_cast<unsigned>(__cvta_generic_to_shared(from)), rank));
#else
  return *reinterpret_cast<const Vector<float, kVector>*>(from);
#endif
}
