// Split-K reduction: the second pass of kernels that split a sum among blocks.
//
// Blocks leave float32 partials, [split][result]. The reduction adds them in a fixed order, so that results do not vary
// from run to run, and rounds each sum once. A reduction under programmatic dependent launch takes `partials` without
// const __restrict__: the compiler would read them through a cache that does not see what the first pass writes.
#pragma once

#include "common/pdl.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "common/divisor.cuh"
#include "common/epilogue.cuh"
#endif

// Splits first, first + step, ... below `end`.
struct Splits {
  int first, end, step;
};

// Sum over splits of result `at`, 0 if not `inside`. Splits are `size` results apart; Offset counts those of all
// splits. With kUnroll 0 the compiler chooses, and every `at` must be inside.
template <int kUnroll, typename Offset, typename At, typename Size>
__device__ __forceinline__ float sum_splits(const float* partials, At at, Size size, const Splits& splits,
                                            bool inside = true) {
  float sum = 0;
  if constexpr (kUnroll == 0) {
    for (int split = splits.first; split < splits.end; split += splits.step)
      sum += partials[static_cast<Offset>(split) * size + at];
  } else if (inside) {
#pragma unroll kUnroll
    for (int split = splits.first; split < splits.end; split += splits.step)
      sum += partials[static_cast<Offset>(split) * size + at];
  }
  return sum;
}

// The same of kCount neighbouring results, read by one load. `partials`, `at` and `size` are in units of Unit: float,
// or vectors of it.
template <int kCount, int kUnroll, typename Offset, typename Unit>
__device__ __forceinline__ Vector<float, kCount> sum_splits(const Unit* partials, int at, int size,
                                                            const Splits& splits, bool inside = true) {
  Vector<float, kCount> accumulators = {};
  if (inside)
#pragma unroll kUnroll
    for (int split = splits.first; split < splits.end; split += splits.step) {
      const auto more =
          *reinterpret_cast<const Vector<float, kCount>*>(partials + static_cast<Offset>(split) * size + at);
#pragma unroll
      for (int i = 0; i < kCount; ++i) accumulators.at[i] += more.at[i];
    }
  return accumulators;
}

// Adds the sums of the `lanes` - 1 threads that are 1, 2, ... times `apart` behind this one, in order.
template <int kCount>
__device__ __forceinline__ void add_lanes(Vector<float, kCount>& accumulators, const Vector<float, kCount>* lane_sums,
                                          int lanes, int apart) {
  for (int lane = 1; lane < lanes; ++lane)
#pragma unroll
    for (int i = 0; i < kCount; ++i) accumulators.at[i] += lane_sums[threadIdx.x + lane * apart].at[i];
}

#ifdef EPILOGUE
// How results lie in memory: neighbouring channels are `channel_stride` elements apart, images `image_stride`. Defines:
// RESULTORDER_FIELDS, as solvers/common/split_k.py gives it.
struct ResultOrder {
  RESULTORDER_FIELDS
};

// The result, not rounded, of the sum of the output's element `at`.
__device__ __forceinline__ EpilogueNumber result_at(float sum, const Epilogue& epilogue, const ResultOrder& order,
                                                    int at) {
  const int line = at / order.channel_stride, channel = line - line / order.channels * order.channels.by;
  const int image = kHasChannelBias ? at / order.image_stride : 0;
  return finish_at(sum, epilogue, image, channel, order.channels.by, at);
}
#endif

// The reduction of a block of kThreads threads, for a launch with PDL or without. `size` results are a multiple of
// kCount. `lanes` threads, a power of two up to kThreads, share kCount neighbouring results: each sums every `lanes`-th
// split. A fused kernel's results have the problem's epilogue.
template <int kThreads, int kCount, typename T>
#ifdef EPILOGUE
__device__ __forceinline__ void reduce_split_k(const float* partials, T* out, int size, int splits, int lanes,
                                               const ResultOrder& order, const Epilogue& epilogue) {
#else
__device__ __forceinline__ void reduce_split_k(const float* partials, T* out, int size, int splits, int lanes) {
#endif
  __shared__ Vector<float, kCount> lane_sums[kThreads];
  const int apart = kThreads / lanes, lane = threadIdx.x / apart;
  const int at = (blockIdx.x * apart + threadIdx.x % apart) * kCount;
  griddepcontrol_wait();
  auto accumulators = sum_splits<kCount, 8, int64>(partials, at, size, {lane, splits, lanes}, at < size);
  if (lanes > 1) {
    lane_sums[threadIdx.x] = accumulators;
    __syncthreads();  // the sums of every lane are there
    if (lane > 0) return;
    add_lanes(accumulators, lane_sums, lanes, apart);
  }
  if (at >= size) return;
  Vector<T, kCount> rounded;
#ifdef EPILOGUE
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulators.at[i] = result_at(accumulators.at[i], epilogue, order, at + i);
#endif
#pragma unroll
  for (int i = 0; i < kCount; ++i) rounded.at[i] = convert<T>(accumulators.at[i]);
  *reinterpret_cast<Vector<T, kCount>*>(out + at) = rounded;
}

#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
// The reduction where neighbouring results are of neighbouring channels, kCount of which divide all, and the sums of
// the rounded results of each channel and of their squares: sums[2][part][channel]. A block takes a part of kPixels *
// kThreads / kVectors pixels of kVectors * kCount channels; strips of these are neighbouring blocks.
template <int kThreads, int kCount, int kVectors, int kPixels, typename T>
__device__ __forceinline__ void reduce_split_k_and_sum(const float* partials, T* out, int size, int splits,
                                                       const ResultOrder& order, const Epilogue& epilogue,
                                                       float* sums) {
  constexpr int kSide = kThreads / kVectors;
  __shared__ Vector<float, kCount> thread_sums[2][kThreads];
  const int channels = order.channels.by, strips = (channels + kVectors * kCount - 1) / (kVectors * kCount);
  const int part = blockIdx.x / strips, parts = gridDim.x / strips, row = threadIdx.x / kVectors;
  const int channel = ((blockIdx.x - part * strips) * kVectors + threadIdx.x % kVectors) * kCount;
  Vector<float, kCount> own[2] = {};
  griddepcontrol_wait();
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    const int64 at = static_cast<int64>((part * kPixels + i) * kSide + row) * channels + channel;
    if (channel >= channels || at >= size) continue;
    const int there = static_cast<int>(at);
    const auto accumulators = sum_splits<kCount, 8, int64>(partials, there, size, {0, splits, 1});
    Vector<T, kCount> rounded;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      rounded.at[k] = convert<T>(result_at(accumulators.at[k], epilogue, order, there + k));
      const float result = convert<float>(rounded.at[k]);
      own[0].at[k] += result;
      own[1].at[k] += result * result;
    }
    *reinterpret_cast<Vector<T, kCount>*>(out + there) = rounded;
  }
#pragma unroll
  for (int q = 0; q < 2; ++q) thread_sums[q][threadIdx.x] = own[q];
#pragma unroll
  for (int half = kSide / 2; half > 0; half /= 2) {
    __syncthreads();  // the sums of the last step are there
    if (row >= half) continue;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      add_lanes(own[q], thread_sums[q], 2, half * kVectors);
      thread_sums[q][threadIdx.x] = own[q];
    }
  }
  if (row > 0 || channel >= channels) return;
#pragma unroll
  for (int q = 0; q < 2; ++q)
    *reinterpret_cast<Vector<float, kCount>*>(sums + (static_cast<int64>(q) * parts + part) * channels + channel) =
        own[q];
}
#endif
#endif
