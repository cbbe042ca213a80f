// Programmatic dependent launch (PDL, from compute capability 9.0 on): a kernel begins while the kernel before it still
// runs. Older devices have none: there the kernel before has ended, and nothing is to be done.
#pragma once

// Waits until the kernel before has ended and all that it wrote is visible; returns at once in a launch without PDL. A
// kernel whose KernelStep says `pdl` calls it before it touches memory that earlier steps read or write.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once all blocks have called this or ended. Only where HAS_DEPENDENT is defined: the next
// kernel is a step of the same solution then, and waits. Another's need not, and begins when this one has ended.
// Second kernels of a file, such as those that add up partial sums, do not call this: one of them may be the last step
// of a solution, and is compiled with the defines of the first.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900 && defined(HAS_DEPENDENT)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
