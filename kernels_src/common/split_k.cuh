// Split-K reduction: the second pass of kernels that split a sum among blocks.
//
// Blocks leave float32 partials, [split][result]. The reduction adds them in a fixed order, so that results do not vary
// from run to run, and rounds each sum once. A reduction under programmatic dependent launch takes `partials` without
// const __restrict__: the compiler would read them through a cache that does not see what the first pass writes.
#pragma once

#include "common/pdl.cuh"
#include "common/types.cuh"

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

// The same, read by a load each: other code than one load, kept where kernels were measured with it.
template <int kCount, int kUnroll, typename Offset>
__device__ __forceinline__ Vector<float, kCount> sum_splits_one_by_one(const float* partials, int at, int size,
                                                                       const Splits& splits, bool inside) {
  Vector<float, kCount> accumulators = {};
  if (inside)
#pragma unroll kUnroll
    for (int split = splits.first; split < splits.end; split += splits.step) {
      const float* const more = partials + static_cast<Offset>(split) * size + at;
#pragma unroll
      for (int i = 0; i < kCount; ++i) accumulators.at[i] += more[i];
    }
  return accumulators;
}

// The same for offsets of 64 bits, where the sum begins with the first of the splits, of which there is at least one.
template <int kCount, int kUnroll>
__device__ __forceinline__ Vector<float, kCount> sum_from_first_split(const float* partials, int64 at, int64 size,
                                                                      const Splits& splits, bool inside = true) {
  using Results = Vector<float, kCount>;
  Results accumulators = {};
  if (!inside) return accumulators;
  accumulators = *reinterpret_cast<const Results*>(partials + splits.first * size + at);
  const auto add = [&](int split) __attribute__((always_inline)) {
    const Results more = *reinterpret_cast<const Results*>(partials + split * size + at);
#pragma unroll
    for (int i = 0; i < kCount; ++i) accumulators.at[i] += more.at[i];
  };
#pragma unroll kUnroll
  for (int split = splits.first + 1; split < splits.end; split += splits.step) add(split);
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

// The reduction of a block of kThreads threads under programmatic dependent launch. `size` results are a multiple of 4.
// kLanes threads, a power of two, share 4 neighbouring results: each sums every kLanes-th split.
template <int kThreads, int kLanes, typename T>
__device__ __forceinline__ void reduce_split_k(T* out, const float* partials, int size, int splits) {
  constexpr int kVectors = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0 && (kLanes & (kLanes - 1)) == 0, "kLanes must be a power of two up to kThreads");
  __shared__ Vector<float, 4> lane_sums[kThreads];
  const int lane = threadIdx.x / kVectors, at = (blockIdx.x * kVectors + threadIdx.x % kVectors) * 4;
  griddepcontrol_wait();
  const auto accumulators = sum_splits<4, 8, int64>(partials, at, size, {lane, splits, kLanes}, at < size);
  lane_sums[threadIdx.x] = accumulators;
  __syncthreads();  // the sums of every lane are there
  if (lane > 0 || at >= size) return;
  Vector<T, 4> rounded;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float total = accumulators.at[i];
#pragma unroll
    for (int other = 1; other < kLanes; ++other) total += lane_sums[other * kVectors + threadIdx.x].at[i];
    rounded.at[i] = convert<T>(total);
  }
  *reinterpret_cast<Vector<T, 4>*>(out + at) = rounded;
}
