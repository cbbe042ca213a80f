// Arithmetic of activations: bounds that let NaN pass, and the `short_` activations of float32 numbers whose results
// are rounded to 16 bits, of few instructions and with errors that do not show there.
//
// Their errors are declared in miofind/verify/epilogue_bounds.py; results below 2^-112 may be 0. NaN stays NaN, and
// minus infinity goes to where the large negative numbers before it go.
#pragma once

#include "common/types.cuh"

// The larger of v and the bound, NaN for NaN.
__device__ __forceinline__ float at_least(float v, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(bound));
  return result;
#else
  return v < bound ? bound : v;
#endif
}

// The smaller of v and the bound, NaN for NaN.
__device__ __forceinline__ float at_most(float v, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(bound));
  return result;
#else
  return v > bound ? bound : v;
#endif
}

__device__ __forceinline__ double at_least(double v, double bound) {
  return v < bound ? bound : v;
}
__device__ __forceinline__ double at_most(double v, double bound) {
  return v > bound ? bound : v;
}

// v between 0 and 1; what NaN is does not matter.
__device__ __forceinline__ float saturated(float v) {
  return __saturatef(v);
}
__device__ __forceinline__ double saturated(double v) {
  return v < 0 ? 0.0 : v > 1 ? 1.0 : v;
}

// 2^v to two units in the last place, 0 below 2^-126.
__device__ __forceinline__ float exp2_of(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

// 1 / v to a unit in the last place, 0 below 2^-126.
__device__ __forceinline__ float reciprocal_of(float v) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

constexpr float kLog2E = 1.44269504f;

__device__ __forceinline__ float short_sigmoid(float v) {
  return reciprocal_of(1.0f + exp2_of(-kLog2E * v));
}

// v * sigmoid(v), bounded where it is 0: the exponential may be infinite.
__device__ __forceinline__ float short_silu(float v) {
  const float bounded = at_least(v, -89.0f);
  return bounded * reciprocal_of(1.0f + exp2_of(-kLog2E * bounded));
}

// (1 + tanh(u)) / 2 = sigmoid(2 u): the exponent is 2 u * log2(e), and bounded as that of silu.
__device__ __forceinline__ float gelu_tanh_exponent(float v) {
  return v * (2.30220819f + 0.10294324f * v * v);
}

__device__ __forceinline__ float short_gelu_tanh(float v) {
  const float bounded = at_least(v, -10.5f);
  return bounded * reciprocal_of(1.0f + exp2_of(-gelu_tanh_exponent(bounded)));
}

// Two of silu or gelu_tanh by one reciprocal: v * sigmoid(exponent) = max(v, 0) - |v| * sigmoid(-|exponent|), so that
// exponentials are 1 at most and their sums with 1 have a product. `magnitude` is |v| up to where the product is 0,
// `small` e^-|exponent|.
struct ShortGate {
  float magnitude, small;
};

__device__ __forceinline__ ShortGate short_silu_gate(float v) {
  const float magnitude = fminf(fabsf(v), 128.0f);
  return {magnitude, exp2_of(-kLog2E * magnitude)};
}

__device__ __forceinline__ ShortGate short_gelu_tanh_gate(float v) {
  const float magnitude = fminf(fabsf(v), 16.0f);
  return {magnitude, exp2_of(-gelu_tanh_exponent(magnitude))};
}

__device__ __forceinline__ void short_gate_pair(float (&v)[2], const ShortGate& first, const ShortGate& second) {
  const float of_first = 1.0f + first.small, of_second = 1.0f + second.small;
  const float reciprocal = reciprocal_of(of_first * of_second);
  v[0] = at_least(v[0], 0.0f) - first.magnitude * first.small * (reciprocal * of_second);
  v[1] = at_least(v[1], 0.0f) - second.magnitude * second.small * (reciprocal * of_first);
}

// The base 2 logarithm of erfc(v / sqrt(2)) / 2 from 0 to kEnd, where v times that factor is 0 in the type of results:
// a polynomial fitted for equal relative errors of the factor, divided by 1 + v^2 / 4.
template <typename Element>
struct GeluExponent;
template <>
struct GeluExponent<float16> {
  static constexpr float kEnd = 6.0f;
  static constexpr float kTerms[] = {-1.0000200f,   -1.1507821f,     -0.45995596f,  -0.052207727f,
                                     0.0075488235f, -0.00066663796f, 2.6231648e-05f};
};
template <>
struct GeluExponent<bfloat16> {
  static constexpr float kEnd = 13.3f;
  static constexpr float kTerms[] = {-1.0000262f,     -1.1508089f,    -0.45954061f,    -0.053022221f, 0.0081520323f,
                                     -0.00087329390f, 6.0061531e-05f, -2.3520265e-06f, 3.9557250e-08f};
};

// v * erfc(-v / sqrt(2)) / 2 = max(v, 0) - |v| * erfc(|v| / sqrt(2)) / 2
template <typename Element>
__device__ __forceinline__ float short_gelu(float v) {
  using Exponent = GeluExponent<Element>;
  constexpr int kDegree = sizeof(Exponent::kTerms) / sizeof(float) - 1;
  const float magnitude = fminf(fabsf(v), Exponent::kEnd);
  float exponent = Exponent::kTerms[kDegree];
#pragma unroll
  for (int i = kDegree - 1; i >= 0; i--) exponent = exponent * magnitude + Exponent::kTerms[i];
  return at_least(v, 0.0f) - magnitude * exp2_of(exponent);
}

// Near 0, where the difference of two numbers next to 1 has no digits left, the first terms of its series.
__device__ __forceinline__ float short_tanh(float v) {
  const float near = v - v * v * v * (1.0f / 3);
  const float result = 1.0f - 2.0f * reciprocal_of(1.0f + exp2_of(2 * kLog2E * v));
  return fabsf(v) < 0.0625f ? near : result;
}

// exp(v) - 1 for v that is not positive; near 0 as `short_tanh`.
__device__ __forceinline__ float short_expm1(float v) {
  const float near = v + v * v * (0.5f + v * (1.0f / 6));
  const float result = exp2_of(kLog2E * v) - 1.0f;
  return v > -0.03125f ? near : result;
}

// tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2) of e = exp(v), which is 1 from 20 on.
__device__ __forceinline__ float short_mish(float v) {
  const float bounded = at_least(v, -88.0f), small = exp2_of(kLog2E * fminf(bounded, 20.0f));
  const float top = small * (small + 2);
  return bounded * (top * reciprocal_of(top + 2));
}
