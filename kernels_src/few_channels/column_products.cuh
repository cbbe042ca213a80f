// sums (64 x PRODUCT_COLUMNS) += a (64 x 16) * b (16 x PRODUCT_COLUMNS) of 16-bit types, by a warpgroup: both operands
// K-major in shared memory, each in the form that its descriptor says. Any multiple of 8 columns up to 256.
//
// words_form is of operands without swizzling: words of 16 bytes, 8 terms of a row of a or of a column of b; those of
// eight neighbouring rows or columns lie side by side, and so do eight and the next eight. Such an operand may begin at
// any word, a swizzled one at any row (cell_boxes.cuh). Sums as in narrow_products.cuh.
#pragma once

#include "common/hopper.cuh"

#ifndef PRODUCT_COLUMNS
#error "define PRODUCT_COLUMNS"
#endif
#if PRODUCT_COLUMNS % 8 != 0 || PRODUCT_COLUMNS < 8 || PRODUCT_COLUMNS > 256
#error "PRODUCT_COLUMNS is a multiple of 8 up to 256"
#endif

// Descriptor of an operand without its address: words from 8 terms to the next.
__device__ __forceinline__ constexpr unsigned long long words_form(int words) {
  return static_cast<unsigned long long>(words) << 16 | static_cast<unsigned long long>(128 >> 4) << 32;
}

// Sums of the first COLUMNS columns: where they are among the operands of asm, after those of a and b, and what they
// are.
// clang-format off
#define FOUR_SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_AT_8 "%2, %3, %4, %5"
#define SUMS_AT_16 SUMS_AT_8 ", %6, %7, %8, %9"
#define SUMS_AT_24 SUMS_AT_16 ", %10, %11, %12, %13"
#define SUMS_AT_32 SUMS_AT_24 ", %14, %15, %16, %17"
#define SUMS_AT_40 SUMS_AT_32 ", %18, %19, %20, %21"
#define SUMS_AT_48 SUMS_AT_40 ", %22, %23, %24, %25"
#define SUMS_AT_56 SUMS_AT_48 ", %26, %27, %28, %29"
#define SUMS_AT_64 SUMS_AT_56 ", %30, %31, %32, %33"
#define SUMS_AT_72 SUMS_AT_64 ", %34, %35, %36, %37"
#define SUMS_AT_80 SUMS_AT_72 ", %38, %39, %40, %41"
#define SUMS_AT_88 SUMS_AT_80 ", %42, %43, %44, %45"
#define SUMS_AT_96 SUMS_AT_88 ", %46, %47, %48, %49"
#define SUMS_AT_104 SUMS_AT_96 ", %50, %51, %52, %53"
#define SUMS_AT_112 SUMS_AT_104 ", %54, %55, %56, %57"
#define SUMS_AT_120 SUMS_AT_112 ", %58, %59, %60, %61"
#define SUMS_AT_128 SUMS_AT_120 ", %62, %63, %64, %65"
#define SUMS_AT_136 SUMS_AT_128 ", %66, %67, %68, %69"
#define SUMS_AT_144 SUMS_AT_136 ", %70, %71, %72, %73"
#define SUMS_AT_152 SUMS_AT_144 ", %74, %75, %76, %77"
#define SUMS_AT_160 SUMS_AT_152 ", %78, %79, %80, %81"
#define SUMS_AT_168 SUMS_AT_160 ", %82, %83, %84, %85"
#define SUMS_AT_176 SUMS_AT_168 ", %86, %87, %88, %89"
#define SUMS_AT_184 SUMS_AT_176 ", %90, %91, %92, %93"
#define SUMS_AT_192 SUMS_AT_184 ", %94, %95, %96, %97"
#define SUMS_AT_200 SUMS_AT_192 ", %98, %99, %100, %101"
#define SUMS_AT_208 SUMS_AT_200 ", %102, %103, %104, %105"
#define SUMS_AT_216 SUMS_AT_208 ", %106, %107, %108, %109"
#define SUMS_AT_224 SUMS_AT_216 ", %110, %111, %112, %113"
#define SUMS_AT_232 SUMS_AT_224 ", %114, %115, %116, %117"
#define SUMS_AT_240 SUMS_AT_232 ", %118, %119, %120, %121"
#define SUMS_AT_248 SUMS_AT_240 ", %122, %123, %124, %125"
#define SUMS_AT_256 SUMS_AT_248 ", %126, %127, %128, %129"
#define SUMS_8 FOUR_SUMS(0)
#define SUMS_16 SUMS_8, FOUR_SUMS(4)
#define SUMS_24 SUMS_16, FOUR_SUMS(8)
#define SUMS_32 SUMS_24, FOUR_SUMS(12)
#define SUMS_40 SUMS_32, FOUR_SUMS(16)
#define SUMS_48 SUMS_40, FOUR_SUMS(20)
#define SUMS_56 SUMS_48, FOUR_SUMS(24)
#define SUMS_64 SUMS_56, FOUR_SUMS(28)
#define SUMS_72 SUMS_64, FOUR_SUMS(32)
#define SUMS_80 SUMS_72, FOUR_SUMS(36)
#define SUMS_88 SUMS_80, FOUR_SUMS(40)
#define SUMS_96 SUMS_88, FOUR_SUMS(44)
#define SUMS_104 SUMS_96, FOUR_SUMS(48)
#define SUMS_112 SUMS_104, FOUR_SUMS(52)
#define SUMS_120 SUMS_112, FOUR_SUMS(56)
#define SUMS_128 SUMS_120, FOUR_SUMS(60)
#define SUMS_136 SUMS_128, FOUR_SUMS(64)
#define SUMS_144 SUMS_136, FOUR_SUMS(68)
#define SUMS_152 SUMS_144, FOUR_SUMS(72)
#define SUMS_160 SUMS_152, FOUR_SUMS(76)
#define SUMS_168 SUMS_160, FOUR_SUMS(80)
#define SUMS_176 SUMS_168, FOUR_SUMS(84)
#define SUMS_184 SUMS_176, FOUR_SUMS(88)
#define SUMS_192 SUMS_184, FOUR_SUMS(92)
#define SUMS_200 SUMS_192, FOUR_SUMS(96)
#define SUMS_208 SUMS_200, FOUR_SUMS(100)
#define SUMS_216 SUMS_208, FOUR_SUMS(104)
#define SUMS_224 SUMS_216, FOUR_SUMS(108)
#define SUMS_232 SUMS_224, FOUR_SUMS(112)
#define SUMS_240 SUMS_232, FOUR_SUMS(116)
#define SUMS_248 SUMS_240, FOUR_SUMS(120)
#define SUMS_256 SUMS_248, FOUR_SUMS(124)
// clang-format on

#define JOINED(name, columns) JOINED_TO(name, columns)
#define JOINED_TO(name, columns) name##columns
#define TEXT_OF(value) TEXT_OF_VALUE(value)
#define TEXT_OF_VALUE(value) #value
#define COLUMN_PRODUCT(kind) \
  asm volatile("{\n\t.reg .pred go;\n\tsetp.eq.b32 go, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n" TEXT_OF(           \
                   PRODUCT_COLUMNS) "k16.f32." kind "." kind " {" JOINED(SUMS_AT_, PRODUCT_COLUMNS) "}, %0, %1, go, " \
                                                                                                    "1, 1, 0, 0;\n\t}" \
               : "+l"(a), "+l"(b), JOINED(SUMS_, PRODUCT_COLUMNS)                                                    \
               :                                                                                                      \
               : "memory")

// Begins the product. Sums may not be written before a wait.
template <typename T>
struct ColumnProducts;

template <>
struct ColumnProducts<float16> {
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b) {
    COLUMN_PRODUCT("f16");
  }
};

template <>
struct ColumnProducts<bfloat16> {
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b) {
    COLUMN_PRODUCT("bf16");
  }
};
