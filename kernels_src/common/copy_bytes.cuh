// Asynchronous copies of 4, 8 or 16 bytes to shared memory (from compute capability 8.0 on); grouped by commit_copies
// and awaited by wait_for_copies of common/tile.cuh.
#pragma once

// Starts to copy kBytes (4, 8 or 16) to shared memory, or as many zeros.
template <int kBytes>
__device__ __forceinline__ void copy_bytes(unsigned to, const void* from, bool inside) {
  const int bytes = inside ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
}

// Starts to copy the first `bytes` of 16 to shared memory, and as many zeros as are missing.
__device__ __forceinline__ void copy_some(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
