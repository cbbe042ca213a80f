// `value`, of which the compiler forgets all it knows: what follows from it is computed where it is used, instead of
// once before a loop and kept in registers.
#pragma once

__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
