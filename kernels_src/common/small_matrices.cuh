// Fragments of one and of two 8 x 8 matrices of 16 bits, and products of depth 8 (from compute capability 8.0 on); see
// common/mma.cuh for how lanes hold them.
#pragma once

#include "common/types.cuh"

// One matrix; lane l < 8 gives the address of row l. kTransposed exchanges rows and columns.
template <bool kTransposed>
__device__ __forceinline__ unsigned load_matrix(unsigned address) {
  unsigned to;
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(to) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to) : "r"(address) : "memory");
  return to;
}

// Two matrices; lane l < 16 gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_matrix_pair(unsigned (&to)[2], unsigned address) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
}

// accumulators (16 x 8) += a (16 x 8: rows g, then rows g + 8) * b (8 x 8).
template <typename T>
__device__ __forceinline__ void multiply_add_half(float (&accumulators)[4], unsigned a_low, unsigned a_high,
                                                  unsigned b);

template <>
__device__ __forceinline__ void multiply_add_half<float16>(float (&accumulators)[4], unsigned a_low, unsigned a_high,
                                                           unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
               : "r"(a_low), "r"(a_high), "r"(b));
}

template <>
__device__ __forceinline__ void multiply_add_half<bfloat16>(float (&accumulators)[4], unsigned a_low, unsigned a_high,
                                                            unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
               : "r"(a_low), "r"(a_high), "r"(b));
}
