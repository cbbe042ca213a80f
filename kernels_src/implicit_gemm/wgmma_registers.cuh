// sums (64 x PRODUCT_COLUMNS) += a (64 x 8) * b (8 x PRODUCT_COLUMNS) of TF32, by a warpgroup: a in registers, b in
// shared memory; and how many registers a thread has.
//
// Fragments of a, warp w, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for wgmma.m64nNk8: a[0] holds (row
// 16 * w + g, term t), a[1] row + 8, a[2] term + 4, a[3] both. Sums as in implicit_gemm/products.cuh.
#pragma once

#include "implicit_gemm/products.cuh"

#if PRODUCT_COLUMNS == 32
#define REGISTERS_AT "{" AT_0 "}, {%16, %17, %18, %19}, %20, go, 1, 1"
#define REGISTERS_GO "%21"
#elif PRODUCT_COLUMNS == 64
#define REGISTERS_AT "{" AT_0 ", " AT_1 "}, {%32, %33, %34, %35}, %36, go, 1, 1"
#define REGISTERS_GO "%37"
#elif PRODUCT_COLUMNS == 96
#define REGISTERS_AT "{" AT_0 ", " AT_1 ", " AT_2 "}, {%48, %49, %50, %51}, %52, go, 1, 1"
#define REGISTERS_GO "%53"
#elif PRODUCT_COLUMNS == 128
#define REGISTERS_AT "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 "}, {%64, %65, %66, %67}, %68, go, 1, 1"
#define REGISTERS_GO "%69"
#elif PRODUCT_COLUMNS == 160
#define REGISTERS_AT "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 ", " AT_4 "}, {%80, %81, %82, %83}, %84, go, 1, 1"
#define REGISTERS_GO "%85"
#elif PRODUCT_COLUMNS == 192
#define REGISTERS_AT \
  "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 ", " AT_4 ", " AT_5 "}, {%96, %97, %98, %99}, %100, go, 1, 1"
#define REGISTERS_GO "%101"
#elif PRODUCT_COLUMNS == 256
#define REGISTERS_AT                                                             \
  "{" AT_0 ", " AT_1 ", " AT_2 ", " AT_3 ", " AT_4 ", " AT_5 ", " AT_6 ", " AT_7 \
  "}, {%128, %129, %130, %131}, %132, go, 1, 1"
#define REGISTERS_GO "%133"
#else
#error "no product with registers has that many columns"
#endif

// Begins the product; without `adds` the sums are replaced. Neither sums nor `a` may be written before a wait.
__device__ __forceinline__ void begin_tf32(float (&sums)[PRODUCT_COLUMNS / 2], const unsigned (&a)[4],
                                           unsigned long long b, bool adds) {
  asm volatile("{\n\t.reg .pred go;\n\tsetp.ne.b32 go, " REGISTERS_GO
               ", 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(PRODUCT_COLUMNS) "k8.f32.tf32.tf32 " REGISTERS_AT ";\n\t}"
               : PRODUCT_SUMS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds))
               : "memory");
}

// Gives back registers of each thread of a warpgroup beyond `Count`, or waits for so many.
template <int Count>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

__device__ __forceinline__ unsigned load_word(unsigned address) {
  unsigned word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Neighbouring words.
__device__ __forceinline__ void load_words(unsigned (&words)[2], unsigned address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_words(unsigned (&words)[4], unsigned address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_words(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
