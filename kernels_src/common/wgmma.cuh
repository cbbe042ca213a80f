// Warpgroup matrix multiply-accumulate (wgmma, compute capability 9.0): acc (64 x N) += a (64 x K) * b (K x N) by the
// 128 threads of a warpgroup, with float32 accumulators. N is WGMMA_N, a multiple of 8 up to 256; K is 16 for 16-bit
// types and 8 for float32, which counts as TF32.
//
// Accumulators, warp w, lane l with g = l / 4 and t = l % 4, as PTX ISA has them for wgmma.m64nNk16: acc[4 * j] holds
// (row 16 * w + g, column 8 * j + 2 * t), [4 * j + 1] the next column, [4 * j + 2] and [4 * j + 3] row + 8. Fragments
// of an `a` in registers: a[0] holds (row 16 * w + g, terms 2 * t and 2 * t + 1), a[1] row + 8, a[2] terms + 8, a[3]
// both; of TF32, a[0] holds (row 16 * w + g, term t), a[1] row + 8, a[2] term + 4, a[3] both.
#pragma once

#include "common/types.cuh"

#ifndef WGMMA_N
#error "define WGMMA_N"
#endif
static_assert(WGMMA_N % 8 == 0 && WGMMA_N >= 8 && WGMMA_N <= 256, "wgmma has N in multiples of 8 up to 256");

// Orders accesses of registers and shared memory before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Pending` groups are under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Shared-memory matrix descriptor without the matrix's address: leading and stride byte offsets, and the width of the
// swizzle: 128, 64, 32 or 0. Without swizzling and K-major, the leading offset is from one core matrix (8 rows of 16
// bytes) to the next along K, the stride offset to the next along M or N.
__device__ __forceinline__ constexpr unsigned long long matrix_descriptor(int leading_bytes, int stride_bytes,
                                                                          int swizzle_bytes) {
  return static_cast<unsigned long long>(leading_bytes >> 4) << 16 |
         static_cast<unsigned long long>(stride_bytes >> 4) << 32 |
         static_cast<unsigned long long>(swizzle_bytes == 128  ? 1
                                         : swizzle_bytes == 64 ? 2
                                         : swizzle_bytes == 32 ? 3
                                                               : 0)
             << 62;
}

// The descriptor of the matrix at a shared address.
__device__ __forceinline__ unsigned long long descriptor_at(unsigned long long descriptor, unsigned address) {
  return descriptor | (address & 0x3ffff) >> 4;
}

// By N: the accumulators in the instruction's text, the same as operands of asm, and the six operands that follow them.
// clang-format off
#define WGMMA_FOUR(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define WGMMA_D_8 "%0, %1, %2, %3"
#define WGMMA_D_16 WGMMA_D_8 ", %4, %5, %6, %7"
#define WGMMA_D_24 WGMMA_D_16 ", %8, %9, %10, %11"
#define WGMMA_D_32 WGMMA_D_24 ", %12, %13, %14, %15"
#define WGMMA_D_40 WGMMA_D_32 ", %16, %17, %18, %19"
#define WGMMA_D_48 WGMMA_D_40 ", %20, %21, %22, %23"
#define WGMMA_D_56 WGMMA_D_48 ", %24, %25, %26, %27"
#define WGMMA_D_64 WGMMA_D_56 ", %28, %29, %30, %31"
#define WGMMA_D_72 WGMMA_D_64 ", %32, %33, %34, %35"
#define WGMMA_D_80 WGMMA_D_72 ", %36, %37, %38, %39"
#define WGMMA_D_88 WGMMA_D_80 ", %40, %41, %42, %43"
#define WGMMA_D_96 WGMMA_D_88 ", %44, %45, %46, %47"
#define WGMMA_D_104 WGMMA_D_96 ", %48, %49, %50, %51"
#define WGMMA_D_112 WGMMA_D_104 ", %52, %53, %54, %55"
#define WGMMA_D_120 WGMMA_D_112 ", %56, %57, %58, %59"
#define WGMMA_D_128 WGMMA_D_120 ", %60, %61, %62, %63"
#define WGMMA_D_136 WGMMA_D_128 ", %64, %65, %66, %67"
#define WGMMA_D_144 WGMMA_D_136 ", %68, %69, %70, %71"
#define WGMMA_D_152 WGMMA_D_144 ", %72, %73, %74, %75"
#define WGMMA_D_160 WGMMA_D_152 ", %76, %77, %78, %79"
#define WGMMA_D_168 WGMMA_D_160 ", %80, %81, %82, %83"
#define WGMMA_D_176 WGMMA_D_168 ", %84, %85, %86, %87"
#define WGMMA_D_184 WGMMA_D_176 ", %88, %89, %90, %91"
#define WGMMA_D_192 WGMMA_D_184 ", %92, %93, %94, %95"
#define WGMMA_D_200 WGMMA_D_192 ", %96, %97, %98, %99"
#define WGMMA_D_208 WGMMA_D_200 ", %100, %101, %102, %103"
#define WGMMA_D_216 WGMMA_D_208 ", %104, %105, %106, %107"
#define WGMMA_D_224 WGMMA_D_216 ", %108, %109, %110, %111"
#define WGMMA_D_232 WGMMA_D_224 ", %112, %113, %114, %115"
#define WGMMA_D_240 WGMMA_D_232 ", %116, %117, %118, %119"
#define WGMMA_D_248 WGMMA_D_240 ", %120, %121, %122, %123"
#define WGMMA_D_256 WGMMA_D_248 ", %124, %125, %126, %127"
#define WGMMA_ACC_8 WGMMA_FOUR(0)
#define WGMMA_ACC_16 WGMMA_ACC_8, WGMMA_FOUR(4)
#define WGMMA_ACC_24 WGMMA_ACC_16, WGMMA_FOUR(8)
#define WGMMA_ACC_32 WGMMA_ACC_24, WGMMA_FOUR(12)
#define WGMMA_ACC_40 WGMMA_ACC_32, WGMMA_FOUR(16)
#define WGMMA_ACC_48 WGMMA_ACC_40, WGMMA_FOUR(20)
#define WGMMA_ACC_56 WGMMA_ACC_48, WGMMA_FOUR(24)
#define WGMMA_ACC_64 WGMMA_ACC_56, WGMMA_FOUR(28)
#define WGMMA_ACC_72 WGMMA_ACC_64, WGMMA_FOUR(32)
#define WGMMA_ACC_80 WGMMA_ACC_72, WGMMA_FOUR(36)
#define WGMMA_ACC_88 WGMMA_ACC_80, WGMMA_FOUR(40)
#define WGMMA_ACC_96 WGMMA_ACC_88, WGMMA_FOUR(44)
#define WGMMA_ACC_104 WGMMA_ACC_96, WGMMA_FOUR(48)
#define WGMMA_ACC_112 WGMMA_ACC_104, WGMMA_FOUR(52)
#define WGMMA_ACC_120 WGMMA_ACC_112, WGMMA_FOUR(56)
#define WGMMA_ACC_128 WGMMA_ACC_120, WGMMA_FOUR(60)
#define WGMMA_ACC_136 WGMMA_ACC_128, WGMMA_FOUR(64)
#define WGMMA_ACC_144 WGMMA_ACC_136, WGMMA_FOUR(68)
#define WGMMA_ACC_152 WGMMA_ACC_144, WGMMA_FOUR(72)
#define WGMMA_ACC_160 WGMMA_ACC_152, WGMMA_FOUR(76)
#define WGMMA_ACC_168 WGMMA_ACC_160, WGMMA_FOUR(80)
#define WGMMA_ACC_176 WGMMA_ACC_168, WGMMA_FOUR(84)
#define WGMMA_ACC_184 WGMMA_ACC_176, WGMMA_FOUR(88)
#define WGMMA_ACC_192 WGMMA_ACC_184, WGMMA_FOUR(92)
#define WGMMA_ACC_200 WGMMA_ACC_192, WGMMA_FOUR(96)
#define WGMMA_ACC_208 WGMMA_ACC_200, WGMMA_FOUR(100)
#define WGMMA_ACC_216 WGMMA_ACC_208, WGMMA_FOUR(104)
#define WGMMA_ACC_224 WGMMA_ACC_216, WGMMA_FOUR(108)
#define WGMMA_ACC_232 WGMMA_ACC_224, WGMMA_FOUR(112)
#define WGMMA_ACC_240 WGMMA_ACC_232, WGMMA_FOUR(116)
#define WGMMA_ACC_248 WGMMA_ACC_240, WGMMA_FOUR(120)
#define WGMMA_ACC_256 WGMMA_ACC_248, WGMMA_FOUR(124)
#define WGMMA_IN_8 "%4", "%5", "%6", "%7", "%8", "%9"
#define WGMMA_IN_16 "%8", "%9", "%10", "%11", "%12", "%13"
#define WGMMA_IN_24 "%12", "%13", "%14", "%15", "%16", "%17"
#define WGMMA_IN_32 "%16", "%17", "%18", "%19", "%20", "%21"
#define WGMMA_IN_40 "%20", "%21", "%22", "%23", "%24", "%25"
#define WGMMA_IN_48 "%24", "%25", "%26", "%27", "%28", "%29"
#define WGMMA_IN_56 "%28", "%29", "%30", "%31", "%32", "%33"
#define WGMMA_IN_64 "%32", "%33", "%34", "%35", "%36", "%37"
#define WGMMA_IN_72 "%36", "%37", "%38", "%39", "%40", "%41"
#define WGMMA_IN_80 "%40", "%41", "%42", "%43", "%44", "%45"
#define WGMMA_IN_88 "%44", "%45", "%46", "%47", "%48", "%49"
#define WGMMA_IN_96 "%48", "%49", "%50", "%51", "%52", "%53"
#define WGMMA_IN_104 "%52", "%53", "%54", "%55", "%56", "%57"
#define WGMMA_IN_112 "%56", "%57", "%58", "%59", "%60", "%61"
#define WGMMA_IN_120 "%60", "%61", "%62", "%63", "%64", "%65"
#define WGMMA_IN_128 "%64", "%65", "%66", "%67", "%68", "%69"
#define WGMMA_IN_136 "%68", "%69", "%70", "%71", "%72", "%73"
#define WGMMA_IN_144 "%72", "%73", "%74", "%75", "%76", "%77"
#define WGMMA_IN_152 "%76", "%77", "%78", "%79", "%80", "%81"
#define WGMMA_IN_160 "%80", "%81", "%82", "%83", "%84", "%85"
#define WGMMA_IN_168 "%84", "%85", "%86", "%87", "%88", "%89"
#define WGMMA_IN_176 "%88", "%89", "%90", "%91", "%92", "%93"
#define WGMMA_IN_184 "%92", "%93", "%94", "%95", "%96", "%97"
#define WGMMA_IN_192 "%96", "%97", "%98", "%99", "%100", "%101"
#define WGMMA_IN_200 "%100", "%101", "%102", "%103", "%104", "%105"
#define WGMMA_IN_208 "%104", "%105", "%106", "%107", "%108", "%109"
#define WGMMA_IN_216 "%108", "%109", "%110", "%111", "%112", "%113"
#define WGMMA_IN_224 "%112", "%113", "%114", "%115", "%116", "%117"
#define WGMMA_IN_232 "%116", "%117", "%118", "%119", "%120", "%121"
#define WGMMA_IN_240 "%120", "%121", "%122", "%123", "%124", "%125"
#define WGMMA_IN_248 "%124", "%125", "%126", "%127", "%128", "%129"
#define WGMMA_IN_256 "%128", "%129", "%130", "%131", "%132", "%133"
// clang-format on

#define WGMMA_OF(table, n) WGMMA_JOINED(table, n)
#define WGMMA_JOINED(table, n) table##n
#define WGMMA_TEXT(value) WGMMA_TEXT_OF(value)
#define WGMMA_TEXT_OF(value) #value

// The instruction as text and operands: `go` sets predicate p, whether to accumulate; `factors` names a and b; `major`
// ends the text, for each 16-bit matrix in shared memory whether it is MN-major.
#define WGMMA_ASM(k, type, go, factors, major, ...)                                                               \
  asm volatile("{\n\t.reg .pred p;\n\tsetp." go                                                                   \
               ";\n\t"                                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" WGMMA_TEXT(WGMMA_N) "k" k ".f32." type "." type " {" WGMMA_OF( \
                   WGMMA_D_, WGMMA_N) "}, " factors ", p, 1, 1" major ";\n\t}"                                    \
               : WGMMA_OF(WGMMA_ACC_, WGMMA_N)                                                                    \
               : __VA_ARGS__                                                                                      \
               : "memory")
#define WGMMA_IN WGMMA_OF(WGMMA_IN_, WGMMA_N)
#define WGMMA_IF(accumulates_at) "ne.b32 p, " accumulates_at ", 0"
#define WGMMA_MAJORS "n"(static_cast<int>(kMajorA)), "n"(static_cast<int>(kMajorB))

#define WGMMA_SS_ADD(type, in) WGMMA_SS_ADD_AT(type, in)
#define WGMMA_SS_ADD_AT(type, in0, in1, in2, in3, in4, in5) \
  WGMMA_ASM("16", type, "eq.b32 p, 0, 0", in0 ", " in1, ", " in2 ", " in3, "l"(a), "l"(b), WGMMA_MAJORS)
#define WGMMA_SS(type, in) WGMMA_SS_AT(type, in)
#define WGMMA_SS_AT(type, in0, in1, in2, in3, in4, in5)                                 \
  WGMMA_ASM("16", type, WGMMA_IF(in2), in0 ", " in1, ", " in3 ", " in4, "l"(a), "l"(b), \
            "r"(static_cast<int>(accumulates)), WGMMA_MAJORS)
#define WGMMA_SS_TF32(in) WGMMA_SS_TF32_AT(in)
#define WGMMA_SS_TF32_AT(in0, in1, in2, in3, in4, in5) \
  WGMMA_ASM("8", "tf32", WGMMA_IF(in2), in0 ", " in1, "", "l"(a), "l"(b), "r"(static_cast<int>(accumulates)))
#define WGMMA_RS(k, type, major, in) WGMMA_RS_AT(k, type, major, in)
#define WGMMA_RS_AT(k, type, major, in0, in1, in2, in3, in4, in5)                                              \
  WGMMA_ASM(k, type, WGMMA_IF(in5), "{" in0 ", " in1 ", " in2 ", " in3 "}, " in4, major, "r"(a[0]), "r"(a[1]), \
            "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulates)))

// How an operand lies in shared memory: with K or with its other index (M or N) side by side.
enum class Major { K, MN };

using Accumulators = float[WGMMA_N / 2];

// Begins acc (64 x WGMMA_N) += a * b, or acc = a * b unless `accumulates`. ss takes descriptors of both operands, rs
// fragments of a and the descriptor of a K-major b. Neither accumulators nor registers of a may be written before
// wgmma_wait_group. Always to accumulate is a function of its own: with a constant flag, ptxas allocates registers
// otherwise.
template <typename T>
struct Wgmma;

template <>
struct Wgmma<float16> {
  template <Major kMajorA = Major::K, Major kMajorB = Major::K>
  static __device__ __forceinline__ void ss(Accumulators& acc, unsigned long long a, unsigned long long b) {
    WGMMA_SS_ADD("f16", WGMMA_IN);
  }
  template <Major kMajorA = Major::K, Major kMajorB = Major::K>
  static __device__ __forceinline__ void ss(Accumulators& acc, unsigned long long a, unsigned long long b,
                                            bool accumulates) {
    WGMMA_SS("f16", WGMMA_IN);
  }
  static __device__ __forceinline__ void rs(Accumulators& acc, const unsigned (&a)[4], unsigned long long b,
                                            bool accumulates) {
    WGMMA_RS("16", "f16", ", 0", WGMMA_IN);
  }
};

template <>
struct Wgmma<bfloat16> {
  template <Major kMajorA = Major::K, Major kMajorB = Major::K>
  static __device__ __forceinline__ void ss(Accumulators& acc, unsigned long long a, unsigned long long b) {
    WGMMA_SS_ADD("bf16", WGMMA_IN);
  }
  template <Major kMajorA = Major::K, Major kMajorB = Major::K>
  static __device__ __forceinline__ void ss(Accumulators& acc, unsigned long long a, unsigned long long b,
                                            bool accumulates) {
    WGMMA_SS("bf16", WGMMA_IN);
  }
  static __device__ __forceinline__ void rs(Accumulators& acc, const unsigned (&a)[4], unsigned long long b,
                                            bool accumulates) {
    WGMMA_RS("16", "bf16", ", 0", WGMMA_IN);
  }
};

template <>
struct Wgmma<float32> {
  template <Major kMajorA = Major::K, Major kMajorB = Major::K>
  static __device__ __forceinline__ void ss(Accumulators& acc, unsigned long long a, unsigned long long b,
                                            bool accumulates) {
    static_assert(kMajorA == Major::K && kMajorB == Major::K, "wgmma takes TF32 operands K-major only");
    WGMMA_SS_TF32(WGMMA_IN);
  }
  static __device__ __forceinline__ void rs(Accumulators& acc, const unsigned (&a)[4], unsigned long long b,
                                            bool accumulates) {
    WGMMA_RS("8", "tf32", "", WGMMA_IN);
  }
};

// Registers of each thread of a warpgroup: gives back those beyond `Count`, or waits for so many.
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
