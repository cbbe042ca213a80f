// Transposition of an 8 x 8 matrix of 16 bits that a warp holds (PTX ISA: movmatrix, from compute capability 7.5 on).
#pragma once

// Lane l holds elements 2 * (l % 4) and the next of row l / 4, before and after.
__device__ __forceinline__ unsigned transposed_matrix(unsigned pair) {
  unsigned to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
  return to;
}
