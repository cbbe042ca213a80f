// Fills a tensor with values that depend on a seed and on each element's place in memory alone.
//
// kind 0: normal, mean 0 and standard deviation 1 (Box-Muller); kind 1: -1, 0 or 1, equally likely. Grid-stride over
// the elements, any grid and block. The bits come from splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
// number generators", 2014). Define: T (dtype name).
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

extern "C" __global__ void random_inputs(T* __restrict__ out, int64 size, unsigned long long seed, int kind) {
  const int64 step = int64(gridDim.x) * blockDim.x;
  for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const unsigned long long bits = random_bits(seed, i);
    const float value = kind == 0 ? normal(bits) : static_cast<float>(static_cast<int>((bits >> 33) % 3) - 1);
    out[i] = convert<T>(value);
  }
}
