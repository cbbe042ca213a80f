// Fills a tensor with values that depend on a seed and on each element's place in memory alone, and plants others.
//
// kind 0: normal, mean 0 and standard deviation 1 (Box-Muller), in float16 to multiples of 2^-12, so that they can be
// divided by that exactly; kind 1: -1, 0 or 1, equally likely, half of the zeros negative; kind 2: 1/64 ... 128/64 or
// their negatives; kind 3: 1/64 ... 128/64; kind 4: -4, -3.75 ... 4, half of the zeros negative. All are multiplied by
// 2^even or 2^odd, by the parity of place / stride % size. Grid-stride over the elements, any grid and block. The bits
// come from splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). Define: T (dtype
// name).
#include "common/types.cuh"

#ifndef T
#error "define T"
#endif

__device__ __forceinline__ unsigned long long random_bits(unsigned long long seed, int64 place) {
  unsigned long long z = seed + (place + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ float normal(unsigned long long bits) {
  // In (0, 1], so that the logarithm is finite.
  const float radius = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f;
  const float turns = static_cast<float>(bits & 0xFFFFFFu) * 0x1p-23f;
  return sqrtf(-2.0f * logf(radius)) * cospif(turns);
}

// -1, 0, -0 or 1.
__device__ __forceinline__ double small(unsigned long long bits) {
  const int value = static_cast<int>((bits >> 33) % 3) - 1;
  return value == 0 && (bits & 1) ? -0.0 : value;
}

// A multiple of 1/64 up to 2, never 0.
__device__ __forceinline__ double dyadic(unsigned long long bits, bool is_signed) {
  const double value = static_cast<double>((bits >> 33) % 128 + 1) * 0x1p-6;
  return is_signed && (bits & 1) ? -value : value;
}

// A multiple of 1/4 up to 4, or its negative.
__device__ __forceinline__ double edge(unsigned long long bits) {
  const double value = (static_cast<double>((bits >> 33) % 33) - 16) * 0.25;
  return value == 0 && (bits & 1) ? -0.0 : value;
}

// `value` with what its type can hold of it: float64 gets the bits that the normal number lacks.
template <typename Element>
__device__ __forceinline__ double in_type(float value, unsigned long long bits) {
  if constexpr (sizeof(Element) == 8) return value * (1.0 + static_cast<double>(bits >> 24 & 0xFFFFFFFFull) * 0x1p-55);
  return value;
}
template <>
__device__ __forceinline__ double in_type<float16>(float value, unsigned long long bits) {
  return rintf(value * 0x1p12f) * 0x1p-12f;
}

extern "C" __global__ void random_inputs(T* __restrict__ out, int64 count, unsigned long long seed, int kind, int even,
                                         int odd, int64 stride, int64 size) {
  const int64 step = int64(gridDim.x) * blockDim.x;
  const double scales[2] = {scalbn(1.0, even), scalbn(1.0, odd)};
  for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const unsigned long long bits = random_bits(seed, i);
    const double value = kind == 0   ? in_type<T>(normal(bits), bits)
                         : kind == 1 ? small(bits)
                         : kind == 4 ? edge(bits)
                                     : dyadic(bits, kind == 2);
    out[i] = convert<T>(even == odd ? value * scales[0] : value * scales[i / stride % size % 2]);
  }
}

// out[places[i]] = values[i].
extern "C" __global__ void plant(T* __restrict__ out, const int64* __restrict__ places,
                                 const double* __restrict__ values, int64 count) {
  const int64 step = int64(gridDim.x) * blockDim.x;
  for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    out[places[i]] = convert<T>(values[i]);
}
