// sums (64 x PRODUCT_COLUMNS) += a (64 x 16) * b (16 x PRODUCT_COLUMNS), by a warpgroup, both operands in shared
// memory. Of float32 elements, which count as TF32, the depth is 8.
//
// Sums, warp w, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for wgmma.m64nNk16: sums[4 * j] holds (row 16
// * w + g, column 8 * j + 2 * t), [4 * j + 1] the next column, [4 * j + 2] and [4 * j + 3] row + 8.
#pragma once

#include "common/hopper.cuh"

#ifndef PRODUCT_COLUMNS
#error "define PRODUCT_COLUMNS"
#endif

#define AT_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define AT_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define AT_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define AT_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define AT_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define AT_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define AT_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define AT_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)

#if PRODUCT_COLUMNS == 32
#define PRODUCT_AT "{" AT_0 "}, %16, %17, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %19, %20"
#define PRODUCT_GO "%18"
#define PRODUCT_SUMS SUMS_16(0)
#elif PRODUCT_COLUMNS == 64
#define PRODUCT_AT "{" AT_0 ", " AT_1 "}, %32, %33, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %35, %36"
#define PRODUCT_GO "%34"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16)
#elif PRODUCT_COLUMNS == 80
#define PRODUCT_AT "{" AT_0 ", " AT_1 ", %32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %43, %44"
#define PRODUCT_GO "%42"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16), SUMS_4(32), SUMS_4(36)
#elif PRODUCT_COLUMNS == 96
#define PRODUCT_AT "{" AT_0 ", " AT_1 ", " AT_2 "}, %48, %49, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %51, %52"
#define PRODUCT_GO "%50"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16), SUMS_16(32)
#elif PRODUCT_COLUMNS == 112
#define PRODUCT_AT "{" AT_0 ", " AT_1 ", " AT_2 ", %48, %49, %50, %51, %52, %53, %54, %55}, %56, %57, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %59, %60"
#define PRODUCT_GO "%58"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_4(48), SUMS_4(52)
#elif PRODUCT_COLUMNS == 128
#define PRODUCT_AT "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 "}, %64, %65, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %67, %68"
#define PRODUCT_GO "%66"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
#elif PRODUCT_COLUMNS == 160
#define PRODUCT_AT "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 ", " AT_4 "}, %80, %81, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %83, %84"
#define PRODUCT_GO "%82"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64)
#elif PRODUCT_COLUMNS == 192
#define PRODUCT_AT "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 ", " AT_4 ", " AT_5 "}, %96, %97, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %99, %100"
#define PRODUCT_GO "%98"
#define PRODUCT_SUMS SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80)
#elif PRODUCT_COLUMNS == 256
#define PRODUCT_AT \
  "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 ", " AT_4 ", " AT_5 ", " AT_6 ", " AT_7 "}, %128, %129, go, 1, 1"
#define PRODUCT_TRANSPOSED ", %131, %132"
#define PRODUCT_GO "%130"
#define PRODUCT_SUMS \
  SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80), SUMS_16(96), SUMS_16(112)
#else
#error "no product has that many columns"
#endif

#define TEXT_OF(value) TEXT_OF_VALUE(value)
#define TEXT_OF_VALUE(value) #value
#define PRODUCT(depth, kind, transposed, ...)                                                                  \
  asm volatile("{\n\t.reg .pred go;\n\tsetp.ne.b32 go, " PRODUCT_GO                                            \
               ", 0;\n\t"                                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(PRODUCT_COLUMNS) "k" depth ".f32." kind "." kind    \
                                                                            " " PRODUCT_AT transposed ";\n\t}" \
               : PRODUCT_SUMS                                                                                  \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds))__VA_ARGS__                                        \
               : "memory")
#define BOTH_WAYS , "n"(TransposeA), "n"(TransposeB)

// Begins the product; without `adds` the sums are replaced. A transposed operand is stored with its rows (of a) or
// columns (of b) side by side, not its 16 terms.
template <typename T>
struct Products;

template <>
struct Products<float16> {
  template <int TransposeA, int TransposeB>
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b, bool adds) {
    PRODUCT("16", "f16", PRODUCT_TRANSPOSED, BOTH_WAYS);
  }
};

template <>
struct Products<bfloat16> {
  template <int TransposeA, int TransposeB>
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b, bool adds) {
    PRODUCT("16", "bf16", PRODUCT_TRANSPOSED, BOTH_WAYS);
  }
};

template <>
struct Products<float32> {
  template <int TransposeA, int TransposeB>
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b, bool adds) {
    static_assert(!TransposeA && !TransposeB, "only 16-bit operands can be transposed");
    PRODUCT("8", "tf32", "", );
  }
};
