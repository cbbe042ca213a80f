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

// Starts to copy, channels last, columns `first` to before `end` of kColumns, of kChannels elements each, each to
// kPitch bytes after the one before. `from` is where column 0 would be. A thread copies the same elements of every
// kAtOnce-th column, so that addresses are computed once.
template <int kThreads, int kColumns, int kChannels, int kVector, int kPitch, typename T>
__device__ __forceinline__ void copy_channels_last(unsigned char* to, const T* __restrict__ from, int first, int end) {
  constexpr int kVectors = kChannels / kVector, kAtOnce = kThreads / kVectors;
  if constexpr (kAtOnce > 0) {
    constexpr int kTimes = (kColumns - 1) / kAtOnce + 1;
    const int vector = threadIdx.x % kVectors, column = threadIdx.x / kVectors;
    if (kAtOnce * kVectors != kThreads && column >= kAtOnce) return;
#pragma unroll(kTimes <= 16 ? kTimes : 8)
    for (int i = 0; i < kTimes; ++i) {
      const int at = column + i * kAtOnce;
      if (at >= first && at < end)
        copy_vector<kVector>(to + at * kPitch + int(sizeof(T)) * kVector * vector,
                             from + at * kChannels + vector * kVector);
    }
  } else {
    for (int i = first * kVectors + threadIdx.x; i < end * kVectors; i += kThreads)
      copy_vector<kVector>(to + i / kVectors * kPitch + int(sizeof(T)) * kVector * (i % kVectors), from + i * kVector);
  }
}

// Starts to copy, channels first, columns before `end` of kColumns of kChannels channels, `channel_stride` elements
// apart, each to kPitch bytes after the one before. A thread copies the same columns of every kAtOnce-th channel.
template <int kThreads, int kColumns, int kChannels, int kVector, int kPitch, typename T>
__device__ __forceinline__ void copy_channels_first(unsigned char* to, const T* __restrict__ from, int channel_stride,
                                                    int end) {
  constexpr int kVectors = kColumns / kVector, kAtOnce = kThreads / kVectors;
  if constexpr (kAtOnce > 0) {
    constexpr int kTimes = (kChannels - 1) / kAtOnce + 1;
    const int column = threadIdx.x % kVectors * kVector, first_channel = threadIdx.x / kVectors;
    if (column >= end || (kAtOnce * kVectors != kThreads && first_channel >= kAtOnce)) return;
    const T* source = from + first_channel * channel_stride + column;
    unsigned char* const first = to + first_channel * kPitch + int(sizeof(T)) * column;
#pragma unroll(kTimes <= 16 ? kTimes : 8)
    for (int i = 0; i < kTimes; ++i) {
      if (kChannels % kAtOnce == 0 || i * kAtOnce + first_channel < kChannels)
        copy_vector<kVector>(first + i * kAtOnce * kPitch, source);
      source += kAtOnce * channel_stride;
    }
  } else {
    for (int i = threadIdx.x; i < kChannels * kVectors; i += kThreads) {
      const int channel = i / kVectors, column = i % kVectors * kVector;
      if (column < end)
        copy_vector<kVector>(to + channel * kPitch + int(sizeof(T)) * column, from + channel * channel_stride + column);
    }
  }
}
