// Tensor-core products of 16-bit matrices with float32 accumulators, one warp at a time (from compute capability 8.0
// on).
//
// Fragments, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for mma.m16n8k16: a[0] holds (row g, columns 2t
// and 2t + 1), a[1] row g + 8, a[2] columns + 8, a[3] both; b_low holds (rows 2t and 2t + 1, column g), b_high rows +
// 8; accumulators[0] and [1] (row g, columns 2t and 2t + 1), [2] and [3] row g + 8.
#pragma once

#include "common/types.cuh"

// Four 8 x 8 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// accumulators (16 x 8) += a (16 x 16) * b (16 x 8).
template <typename T>
__device__ __forceinline__ void multiply_add(float (&accumulators)[4], const unsigned (&a)[4], unsigned b_low,
                                             unsigned b_high);

template <>
__device__ __forceinline__ void multiply_add<float16>(float (&accumulators)[4], const unsigned (&a)[4], unsigned b_low,
                                                      unsigned b_high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

template <>
__device__ __forceinline__ void multiply_add<bfloat16>(float (&accumulators)[4], const unsigned (&a)[4], unsigned b_low,
                                                       unsigned b_high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}
