// Filters on their way to shared memory, as the tensor has them, before a kernel lays them out as an operand.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/tile.cuh"

// Starts to copy `count` 16-bit elements, from an address that is a multiple of 16 bytes, as one group.
template <int kThreads, typename T>
__device__ __forceinline__ void load_filters(unsigned to, const T* filters, int count) {
  static_assert(sizeof(T) == 2, "a thread copies 8 elements of 2 bytes");
  for (int i = 8 * threadIdx.x; i < count; i += 8 * kThreads)
    copy_some(to + 2 * i, filters + i, min(16, 2 * (count - i)));
  commit_copies();
}
