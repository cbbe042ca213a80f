// Statistics of a convolution's results: the sum of each channel, and that of its squares. Whoever writes results
// leaves those of parts of the pixels, float32 [2][part][channel]; a last kernel adds the parts in a fixed order. It
// takes them without const __restrict__, as a reduction of common/split_k.cuh does.
#pragma once

#include "common/pdl.cuh"
#include "common/types.cuh"

// The last kernel, of blocks of kThreads threads that take kChannels channels each, blockIdx.y for sum or squares.
template <int kThreads, int kChannels>
__device__ __forceinline__ void finish_statistics(const float* partials, float* sum, float* sum_of_squares,
                                                  int channels, int parts) {
  constexpr int kSide = kThreads / kChannels;
  static_assert(kSide * kChannels == kThreads && (kSide & (kSide - 1)) == 0, "threads are halved");
  __shared__ float thread_sums[kThreads];
  const int channel = blockIdx.x * kChannels + threadIdx.x % kChannels, row = threadIdx.x / kChannels;
  const float* const from = partials + static_cast<int64>(blockIdx.y) * parts * channels + channel;
  float own = 0;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (channel < channels) {
#pragma unroll 8
    for (int part = row; part < parts; part += kSide) own += from[static_cast<int64>(part) * channels];
  }
  thread_sums[threadIdx.x] = own;
#pragma unroll
  for (int half = kSide / 2; half > 0; half /= 2) {
    __syncthreads();  // the sums of the last step are there
    if (row < half) thread_sums[threadIdx.x] = own += thread_sums[threadIdx.x + half * kChannels];
  }
  if (row == 0 && channel < channels) (blockIdx.y == 0 ? sum : sum_of_squares)[channel] = own;
}
