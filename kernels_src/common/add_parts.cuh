// The second pass of backward weights: adds float32 sums of several blocks in a fixed order.
#pragma once

#include "common/pdl.cuh"
#include "common/types.cuh"

// Adds `splits` parts of `size` floats each, `size` a multiple of 4: kLanes threads (a power of two) share 4
// neighbours, each for every kLanes-th part. `parts` is read by plain loads once the step before is done: the kernel's
// parameter must not be const __restrict__, which would let the compiler read it through a cache that knows of no
// writes.
template <int kThreads, int kLanes, typename T>
__device__ __forceinline__ void add_parts(T* out, const float* parts, int size, int splits) {
  constexpr int kFours = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0 && (kLanes & (kLanes - 1)) == 0, "lanes are a power of two");
  __shared__ Vector<float, 4> staged[kThreads];
  const int first = threadIdx.x / kFours, at = (blockIdx.x * kFours + threadIdx.x % kFours) * 4;
  Vector<float, 4> sum = {};
  griddepcontrol_wait();
  if (at < size)
#pragma unroll 8
    for (int split = first; split < splits; split += kLanes) {
      const auto more = *reinterpret_cast<const Vector<float, 4>*>(parts + static_cast<int64>(split) * size + at);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.at[e] += more.at[e];
    }
  staged[threadIdx.x] = sum;
  __syncthreads();  // every thread's sum is there
  if (first > 0 || at >= size) return;
  Vector<T, 4> rounded;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float total = sum.at[e];
#pragma unroll
    for (int lane = 1; lane < kLanes; ++lane) total += staged[lane * kFours + threadIdx.x].at[e];
    rounded.at[e] = convert<T>(total);
  }
  *reinterpret_cast<Vector<T, 4>*>(out + at) = rounded;
}
