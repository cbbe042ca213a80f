// Copies of neighbouring columns of a row of an image to shared memory, of all channels, in either layout.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/types.cuh"

// Starts to copy kVector elements.
template <int kVector, typename T>
__device__ __forceinline__ void copy_vector(unsigned char* to, const T* from) {
  if constexpr (kVector * sizeof(T) > 2)
    copy_bytes<kVector * sizeof(T)>(static_cast<unsigned>(__cvta_generic_to_shared(to)), from, true);
  else
    *reinterpret_cast<T*>(to) = *from;
}

// Starts to copy columns `first` to before `end` of kColumns, of kDepth elements each, each to kPitch bytes after the
// one before. `from` is where column 0 would be. A thread copies the same elements of every kAtOnce-th column, so that
// places are reckoned once.
template <int kThreads, int kColumns, int kDepth, int kVector, int kPitch, typename T>
__device__ __forceinline__ void copy_columns(unsigned char* to, const T* __restrict__ from, int first, int end) {
  constexpr int kRuns = kDepth / kVector, kAtOnce = kThreads / kRuns;
  if constexpr (kAtOnce > 0) {
    constexpr int kTimes = (kColumns - 1) / kAtOnce + 1;
    const int run = threadIdx.x % kRuns, column = threadIdx.x / kRuns;
    if (kAtOnce * kRuns != kThreads && column >= kAtOnce) return;
#pragma unroll(kTimes <= 16 ? kTimes : 8)
    for (int i = 0; i < kTimes; ++i) {
      const int at = column + i * kAtOnce;
      if (at >= first && at < end)
        copy_vector<kVector>(to + at * kPitch + int(sizeof(T)) * kVector * run, from + at * kDepth + run * kVector);
    }
  } else {
    for (int i = first * kRuns + threadIdx.x; i < end * kRuns; i += kThreads)
      copy_vector<kVector>(to + i / kRuns * kPitch + int(sizeof(T)) * kVector * (i % kRuns), from + i * kVector);
  }
}

// Starts to copy columns before `end` of kColumns of kDepth planes, `plane` elements apart, each to kPitch bytes after
// the one before. A thread copies the same columns of every kAtOnce-th plane.
template <int kThreads, int kColumns, int kDepth, int kVector, int kPitch, typename T>
__device__ __forceinline__ void copy_planes(unsigned char* to, const T* __restrict__ from, int plane, int end) {
  constexpr int kRuns = kColumns / kVector, kAtOnce = kThreads / kRuns;
  if constexpr (kAtOnce > 0) {
    constexpr int kTimes = (kDepth - 1) / kAtOnce + 1;
    const int column = threadIdx.x % kRuns * kVector, group = threadIdx.x / kRuns;
    if (column >= end || (kAtOnce * kRuns != kThreads && group >= kAtOnce)) return;
    const T* source = from + group * plane + column;
    unsigned char* const first = to + group * kPitch + int(sizeof(T)) * column;
#pragma unroll(kTimes <= 16 ? kTimes : 8)
    for (int i = 0; i < kTimes; ++i) {
      if (kDepth % kAtOnce == 0 || i * kAtOnce + group < kDepth)
        copy_vector<kVector>(first + i * kAtOnce * kPitch, source);
      source += kAtOnce * plane;
    }
  } else {
    for (int i = threadIdx.x; i < kDepth * kRuns; i += kThreads) {
      const int k = i / kRuns, column = i % kRuns * kVector;
      if (column < end) copy_vector<kVector>(to + k * kPitch + int(sizeof(T)) * column, from + k * plane + column);
    }
  }
}
