// sums (64 x PRODUCT_COLUMNS) += a (64 x 16) * b (16 x PRODUCT_COLUMNS) of 16-bit types, by a warpgroup: a in registers
// or in shared memory, b in shared memory, both K-major without swizzling. Any multiple of 16 columns up to 128.
//
// Fragments of a, warp w, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for wgmma.m64nNk16: a[0] holds (row
// 16 * w + g, terms 2 * t and 2 * t + 1), a[1] row + 8, a[2] terms + 8, a[3] both. Sums: sums[4 * j] holds (row 16 * w
// + g, column 8 * j + 2 * t), [4 * j + 1] the next column, [4 * j + 2] and [4 * j + 3] row + 8.
#pragma once

#include "common/hopper.cuh"

#ifndef PRODUCT_COLUMNS
#error "define PRODUCT_COLUMNS"
#endif

#define SUMS_AT_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_AT_1 SUMS_AT_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_AT_2 SUMS_AT_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_AT_3 SUMS_AT_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_AT_4 SUMS_AT_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_AT_5 SUMS_AT_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_AT_6 SUMS_AT_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SUMS_AT_7 SUMS_AT_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define EIGHT_SUMS(i)                                                                                           \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define ALL_SUMS_0 EIGHT_SUMS(0)
#define ALL_SUMS_1 ALL_SUMS_0, EIGHT_SUMS(8)
#define ALL_SUMS_2 ALL_SUMS_1, EIGHT_SUMS(16)
#define ALL_SUMS_3 ALL_SUMS_2, EIGHT_SUMS(24)
#define ALL_SUMS_4 ALL_SUMS_3, EIGHT_SUMS(32)
#define ALL_SUMS_5 ALL_SUMS_4, EIGHT_SUMS(40)
#define ALL_SUMS_6 ALL_SUMS_5, EIGHT_SUMS(48)
#define ALL_SUMS_7 ALL_SUMS_6, EIGHT_SUMS(56)

// What comes after the sums: the operands with a in registers, with a in shared memory, and whether to add.
#if PRODUCT_COLUMNS == 16
#define SUMS_AT SUMS_AT_0
#define ALL_SUMS ALL_SUMS_0
#define HELD_AT "{%8, %9, %10, %11}, %12", "%13"
#define SHARED_AT "%8, %9", "%10"
#elif PRODUCT_COLUMNS == 32
#define SUMS_AT SUMS_AT_1
#define ALL_SUMS ALL_SUMS_1
#define HELD_AT "{%16, %17, %18, %19}, %20", "%21"
#define SHARED_AT "%16, %17", "%18"
#elif PRODUCT_COLUMNS == 48
#define SUMS_AT SUMS_AT_2
#define ALL_SUMS ALL_SUMS_2
#define HELD_AT "{%24, %25, %26, %27}, %28", "%29"
#define SHARED_AT "%24, %25", "%26"
#elif PRODUCT_COLUMNS == 64
#define SUMS_AT SUMS_AT_3
#define ALL_SUMS ALL_SUMS_3
#define HELD_AT "{%32, %33, %34, %35}, %36", "%37"
#define SHARED_AT "%32, %33", "%34"
#elif PRODUCT_COLUMNS == 80
#define SUMS_AT SUMS_AT_4
#define ALL_SUMS ALL_SUMS_4
#define HELD_AT "{%40, %41, %42, %43}, %44", "%45"
#define SHARED_AT "%40, %41", "%42"
#elif PRODUCT_COLUMNS == 96
#define SUMS_AT SUMS_AT_5
#define ALL_SUMS ALL_SUMS_5
#define HELD_AT "{%48, %49, %50, %51}, %52", "%53"
#define SHARED_AT "%48, %49", "%50"
#elif PRODUCT_COLUMNS == 112
#define SUMS_AT SUMS_AT_6
#define ALL_SUMS ALL_SUMS_6
#define HELD_AT "{%56, %57, %58, %59}, %60", "%61"
#define SHARED_AT "%56, %57", "%58"
#elif PRODUCT_COLUMNS == 128
#define SUMS_AT SUMS_AT_7
#define ALL_SUMS ALL_SUMS_7
#define HELD_AT "{%64, %65, %66, %67}, %68", "%69"
#define SHARED_AT "%64, %65", "%66"
#else
#error "PRODUCT_COLUMNS is a multiple of 16 up to 128"
#endif

#define TEXT_OF(value) TEXT_OF_VALUE(value)
#define TEXT_OF_VALUE(value) #value
// `at` is two arguments: the operands and whether to add; `ways` says that operands in shared memory are K-major.
#define FILTER_PRODUCT(kind, ways, at, ...) FILTER_PRODUCT_AT(kind, ways, at, __VA_ARGS__)
#define FILTER_PRODUCT_AT(kind, ways, operands, go, ...)                                                          \
  asm volatile("{\n\t.reg .pred go;\n\tsetp.ne.b32 go, " go                                                       \
               ", 0;\n\t"                                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(PRODUCT_COLUMNS) "k16.f32." kind "." kind " {" SUMS_AT \
                                                                            "}, " operands ", go, 1, 1, " ways    \
                                                                            ";\n\t}"                              \
               : ALL_SUMS                                                                                         \
               : __VA_ARGS__, "l"(b), "r"(static_cast<int>(adds))                                                 \
               : "memory")

// Begins the product; without `adds` the sums are replaced. Neither sums nor an `a` in registers may be written before
// a wait.
template <typename T>
struct FilterProducts;

template <>
struct FilterProducts<float16> {
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], const unsigned (&a)[4],
                                               unsigned long long b, bool adds) {
    FILTER_PRODUCT("f16", "0", HELD_AT, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
  }
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b, bool adds) {
    FILTER_PRODUCT("f16", "0, 0", SHARED_AT, "l"(a));
  }
};

template <>
struct FilterProducts<bfloat16> {
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], const unsigned (&a)[4],
                                               unsigned long long b, bool adds) {
    FILTER_PRODUCT("bf16", "0", HELD_AT, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
  }
  static __device__ __forceinline__ void begin(float (&sums)[PRODUCT_COLUMNS / 2], unsigned long long a,
                                               unsigned long long b, bool adds) {
    FILTER_PRODUCT("bf16", "0, 0", SHARED_AT, "l"(a));
  }
};

// Descriptor of a K-major operand without swizzling, but for its address: of core matrices of 8 rows by 16 bytes, bytes
// from one to the next along the terms, and along the rows.
__device__ __forceinline__ constexpr unsigned long long plain_form(int term_bytes, int row_bytes) {
  return static_cast<unsigned long long>(term_bytes >> 4) << 16 | static_cast<unsigned long long>(row_bytes >> 4) << 32;
}
