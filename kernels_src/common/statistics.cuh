// Statistics of a convolution's results: the sum of each channel, and that of its squares. Whoever writes results
// leaves those of parts of the pixels, float32 [2][part][channel]; a last kernel adds the parts in a fixed order. It
// takes them without const __restrict__, as a reduction of common/split_k.cuh does.
#pragma once

#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

// Adds up 16 pixels of 8 channels on tensor cores: `low` and `high` are the fragments of B that common/mma.cuh tells
// of, of which rows are pixels and columns channels. They are multiplied by themselves, transposed, and by 8 rows of
// ones.
template <typename T>
__device__ __forceinline__ void add_pixels(float (&products)[4], unsigned low, unsigned high) {
  Vector<T, 2> pair;
  pair.at[0] = pair.at[1] = convert<T>(1.0f);
  const unsigned ones = *reinterpret_cast<const unsigned*>(&pair);
  const unsigned rows[4] = {low, ones, high, ones};
  multiply_add<T>(products, rows, low, high);
}

// Of these products 8 lanes have what is asked for: the squares' sum on the diagonal and the sum, of channel lane / 4.
__device__ __forceinline__ bool holds_channel(int lane) {
  return lane / 8 == lane % 4;
}
__device__ __forceinline__ float sum_of(const float (&products)[4], int lane) {
  return lane / 4 % 2 ? products[3] : products[2];
}
__device__ __forceinline__ float squares_of(const float (&products)[4], int lane) {
  return lane / 4 % 2 ? products[1] : products[0];
}

// The last kernel, as solvers/common/statistics.py launches it: of blocks of up to 1024 threads, 32 for each of their
// channels at least; blockIdx.y is 0 for the sum, 1 for squares.
__device__ __forceinline__ void finish_statistics(const float* partials, float* sum, float* sum_of_squares,
                                                  int channels, int parts) {
  constexpr int kChannels = 8, kAtOnce = 8;  // of a block, and parts that a thread loads before it adds them
  static_assert(kChannels <= 32 && (kChannels & (kChannels - 1)) == 0, "a warp has whole rows of channels");
  __shared__ float warp_sums[kChannels][32];
  const int first = blockIdx.x * kChannels, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = first + lane % kChannels, side = blockDim.x / kChannels;
  const float* const from = partials + static_cast<int64>(blockIdx.y) * parts * channels + channel;
  float own = 0;
  griddepcontrol_wait();
  for (int part = threadIdx.x / kChannels; part < parts; part += kAtOnce * side) {
    float loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = channel < channels && part + i * side < parts;
      loaded[i] = exists ? from[static_cast<int64>(part + i * side) * channels] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) own += loaded[i];
  }
#pragma unroll
  for (int apart = kChannels; apart < 32; apart *= 2) own += __shfl_xor_sync(~0u, own, apart);
  if (lane < kChannels) warp_sums[lane][warp] = own;
  __syncthreads();  // all warps' sums are there
  if (warp >= kChannels) return;
  own = 32 * lane < blockDim.x ? warp_sums[warp][lane] : 0;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) own += __shfl_xor_sync(~0u, own, apart);
  if (lane == 0 && first + warp < channels) (blockIdx.y == 0 ? sum : sum_of_squares)[first + warp] = own;
}
