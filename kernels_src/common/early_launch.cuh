// Launches that begin while the kernel before them still runs (programmatic dependent launch, from compute capability
// 9.0 on). Older devices have none: there the kernel before has ended, and nothing is to be done.
#pragma once

// Waits until the step before has ended and all that it wrote can be read; at once in a launch that did not begin
// early. A kernel whose KernelStep says `waits_itself` does so before it touches memory that earlier steps read or
// write.
__device__ __forceinline__ void previous_step_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next step may begin once all blocks have said so or ended: its kernel waits itself before it touches memory.
__device__ __forceinline__ void next_step_may_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
