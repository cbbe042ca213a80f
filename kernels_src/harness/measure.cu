// Reads a buffer through the L2 cache, so that what was there before is evicted.
//
// Grid-stride over 16-byte words, any grid and block. `sink` is written only if every word's parts add up to a value
// that the caller rules out by filling the buffer with zeros; it keeps the loads from being removed.
#include "common/types.cuh"

extern "C" __global__ void flush_l2(const uint4* __restrict__ buffer, int64 words, unsigned* __restrict__ sink) {
  unsigned sum = 0;
  const int64 step = int64(gridDim.x) * blockDim.x;
  for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    const uint4 word = buffer[i];
    sum |= word.x | word.y | word.z | word.w;
  }
  if (sum != 0) *sink = sum;
}
