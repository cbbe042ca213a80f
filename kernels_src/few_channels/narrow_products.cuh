// sums (64 x 8 * COLUMN_BLOCKS) += a (64 x 16) * b (16 x 8 * COLUMN_BLOCKS), by a warpgroup, both operands of 16 bits
// in shared memory without swizzling, for up to 64 columns.
//
// An operand is blocks of 128 bytes without gaps: 8 terms of 8 rows of a or columns of b, either may lie side by side.
// Blocks of the second 8 terms and of the next 8 rows or columns may lie anywhere that is a multiple of 16 bytes away,
// and may overlap. Sums, warp w, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for wgmma.m64nNk16: sums[4 *
// j] holds (row 16 * w + g, column 8 * j + 2 * t), [4 * j + 1] the next column, [4 * j + 2] and [4 * j + 3] row + 8.
#pragma once

#include "common/hopper.cuh"

#ifndef COLUMN_BLOCKS
#error "define COLUMN_BLOCKS"
#endif

// Descriptor of an operand without its address: byte offsets from terms to the next 8 and from rows or columns to the
// next 8. Without swizzling PTX ISA calls them leading and stride offset, whichever lies side by side.
__device__ __forceinline__ constexpr unsigned long long plain_form(int terms_bytes, int others_bytes) {
  return static_cast<unsigned long long>(terms_bytes >> 4) << 16 | static_cast<unsigned long long>(others_bytes >> 4)
                                                                       << 32;
}

#define SUMS_OF(j) "+f"(sums[4 * j]), "+f"(sums[4 * j + 1]), "+f"(sums[4 * j + 2]), "+f"(sums[4 * j + 3])
#define SUMS_AT_1 "%0, %1, %2, %3"
#define SUMS_AT_2 SUMS_AT_1 ", %4, %5, %6, %7"
#define SUMS_AT_3 SUMS_AT_2 ", %8, %9, %10, %11"
#define SUMS_AT_4 SUMS_AT_3 ", %12, %13, %14, %15"
#define SUMS_AT_5 SUMS_AT_4 ", %16, %17, %18, %19"
#define SUMS_AT_6 SUMS_AT_5 ", %20, %21, %22, %23"
#define SUMS_AT_7 SUMS_AT_6 ", %24, %25, %26, %27"
#define SUMS_AT_8 SUMS_AT_7 ", %28, %29, %30, %31"

#if COLUMN_BLOCKS == 1
#define PRODUCT_FORM(kind) "m64n8k16.f32." kind "." kind " {" SUMS_AT_1 "}, %4, %5, go, 1, 1, %6, %7"
#define PRODUCT_SUMS SUMS_OF(0)
#elif COLUMN_BLOCKS == 2
#define PRODUCT_FORM(kind) "m64n16k16.f32." kind "." kind " {" SUMS_AT_2 "}, %8, %9, go, 1, 1, %10, %11"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1)
#elif COLUMN_BLOCKS == 3
#define PRODUCT_FORM(kind) "m64n24k16.f32." kind "." kind " {" SUMS_AT_3 "}, %12, %13, go, 1, 1, %14, %15"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2)
#elif COLUMN_BLOCKS == 4
#define PRODUCT_FORM(kind) "m64n32k16.f32." kind "." kind " {" SUMS_AT_4 "}, %16, %17, go, 1, 1, %18, %19"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3)
#elif COLUMN_BLOCKS == 5
#define PRODUCT_FORM(kind) "m64n40k16.f32." kind "." kind " {" SUMS_AT_5 "}, %20, %21, go, 1, 1, %22, %23"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4)
#elif COLUMN_BLOCKS == 6
#define PRODUCT_FORM(kind) "m64n48k16.f32." kind "." kind " {" SUMS_AT_6 "}, %24, %25, go, 1, 1, %26, %27"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5)
#elif COLUMN_BLOCKS == 7
#define PRODUCT_FORM(kind) "m64n56k16.f32." kind "." kind " {" SUMS_AT_7 "}, %28, %29, go, 1, 1, %30, %31"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6)
#elif COLUMN_BLOCKS == 8
#define PRODUCT_FORM(kind) "m64n64k16.f32." kind "." kind " {" SUMS_AT_8 "}, %32, %33, go, 1, 1, %34, %35"
#define PRODUCT_SUMS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7)
#else
#error "COLUMN_BLOCKS is 1 to 8"
#endif

#define NARROW_PRODUCT(kind)                                                                                      \
  asm volatile(                                                                                                   \
      "{\n\t.reg .pred go;\n\tsetp.eq.b32 go, 0, 0;\n\twgmma.mma_async.sync.aligned." PRODUCT_FORM(kind) ";\n\t}" \
      : PRODUCT_SUMS                                                                                              \
      : "l"(a), "l"(b), "n"(TransposeA), "n"(TransposeB)                                                          \
      : "memory")

// Begins the product. A transposed operand has its rows (of a) or columns (of b) side by side, not its terms.
template <typename T>
struct NarrowProducts;

template <>
struct NarrowProducts<float16> {
  template <int TransposeA, int TransposeB>
  static __device__ __forceinline__ void begin(float (&sums)[4 * COLUMN_BLOCKS], unsigned long long a,
                                               unsigned long long b) {
    NARROW_PRODUCT("f16");
  }
};

template <>
struct NarrowProducts<bfloat16> {
  template <int TransposeA, int TransposeB>
  static __device__ __forceinline__ void begin(float (&sums)[4 * COLUMN_BLOCKS], unsigned long long a,
                                               unsigned long long b) {
    NARROW_PRODUCT("bf16");
  }
};
