// Launches that begin while the kernel step before them still runs (compute capability 9.0 on; nothing before).
#pragma once

// Waits until the step before has ended and all that it wrote can be read.
__device__ __forceinline__ void wait_for_previous_step() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next step may begin once all blocks have said so or ended.
__device__ __forceinline__ void let_next_step_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
