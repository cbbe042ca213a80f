// Asynchronous copies of 16 bytes to shared memory under a condition, without a branch (from compute capability 8.0
// on); grouped by commit_copies and awaited by wait_for_copies of common/tile.cuh.
#pragma once

// Starts to copy 16 bytes to shared memory if `copies`; else nothing is read or written.
__device__ __forceinline__ void copy_if(bool copies, unsigned to, const void* from) {
  asm volatile(
      "{\n.reg .pred copies;\nsetp.ne.u32 copies, %2, 0;\n@copies cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(
          to),
      "l"(from), "r"(static_cast<unsigned>(copies))
      : "memory");
}
