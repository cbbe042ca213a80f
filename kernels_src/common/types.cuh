// Element types by name, and conversions that round once, to nearest even.
//
// A dtype's name is a type here, so that a define such as -DT_X=bfloat16 selects it. Arithmetic happens in float or
// double: `convert<float>(value)` widens an element exactly, `convert<float16>(sum)` rounds an accumulator to the
// element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using float64 = double;
using float32 = float;
using float16 = __half;
using bfloat16 = __nv_bfloat16;
using int64 = long long;

template <typename To>
struct Convert {
  template <typename From>
  static __device__ __forceinline__ To from(From value) {
    return static_cast<To>(value);
  }
  static __device__ __forceinline__ To from(float16 value) { return static_cast<To>(__half2float(value)); }
  static __device__ __forceinline__ To from(bfloat16 value) { return static_cast<To>(__bfloat162float(value)); }
};

template <>
struct Convert<float16> {
  static __device__ __forceinline__ float16 from(float16 value) { return value; }
  static __device__ __forceinline__ float16 from(float value) { return __float2half_rn(value); }
  static __device__ __forceinline__ float16 from(double value) { return __double2half(value); }
  static __device__ __forceinline__ float16 from(bfloat16 value) { return __float2half_rn(__bfloat162float(value)); }
};

template <>
struct Convert<bfloat16> {
  static __device__ __forceinline__ bfloat16 from(bfloat16 value) { return value; }
  static __device__ __forceinline__ bfloat16 from(float value) { return __float2bfloat16_rn(value); }
  static __device__ __forceinline__ bfloat16 from(double value) { return __double2bfloat16(value); }
  static __device__ __forceinline__ bfloat16 from(float16 value) { return __float2bfloat16_rn(__half2float(value)); }
};

// `value` as a To: exact where To is wider, else rounded once to nearest even.
template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  return Convert<To>::from(value);
}

// kCount neighbouring elements moved by one load or store; the address must be a multiple of its size.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};
