// Tensor-core products of float32 matrices whose elements are cut to tf32, with float32 accumulators (from compute
// capability 8.0 on).
//
// Fragments, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for mma.m16n8k8: a[0] holds (row g, column t),
// a[1] row g + 8, a[2] column t + 4, a[3] both; b_low holds (row t, column g), b_high row t + 4; accumulators as in
// common/mma.cuh.
#pragma once

#include "common/mma.cuh"

// accumulators (16 x 8) += a (16 x 8) * b (8 x 8); the last 13 bits of elements are ignored.
template <>
__device__ __forceinline__ void multiply_add<float32>(float (&accumulators)[4], const unsigned (&a)[4], unsigned b_low,
                                                      unsigned b_high) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// The tf32 nearest to a float in `whole`, by two instructions where cvt.rna.tf32 takes four on sm_90, and what it
// leaves in `rest`, of which tensor cores ignore the last bits: NaN if the float is not finite.
__device__ __forceinline__ void split_tf32(float value, unsigned& whole, unsigned& rest) {
  whole = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
  rest = __float_as_uint(value - __uint_as_float(whole));
}
