// Filters of groups in shared memory as rows of block-diagonal matrices: a row a filter, [tap][channel of its pack],
// zeros where the groups differ.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/groups.cuh"
#include "common/types.cuh"

// kFilterCount filters, a multiple of 8, of kTapCount taps; in memory [tap][channel] if kChannelsLast, else the other
// way round.
template <int kGroupC, int kGroupK, int kTapCount, int kFilterCount, bool kChannelsLast>
struct FilterRows {
  using Group = Groups<kGroupC, kGroupK>;
  static constexpr int kC = kGroupC, kK = kGroupK, kTaps = kTapCount, kFilters = kFilterCount;
  static constexpr bool kLast = kChannelsLast;
  static constexpr int kTapBytes = 2 * Group::kPackC, kRowBytes = odd_words(kTaps * kTapBytes);
  static constexpr int kBytes = kFilters * kRowBytes, kRawBytes = 2 * kFilters * kTaps * kC;
  static_assert(kFilters % 8 == 0, "filters in memory are whole 16-byte words");
};

// Starts to copy the filters from number `first` on, of `filters`, as they are in memory.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void stage_raw_filters(unsigned to, const T* filter, int first, int filters) {
  constexpr int kElements = Shape::kTaps * Shape::kC;
#pragma unroll 4
  for (int i = threadIdx.x; i < Shape::kFilters * kElements / 8; i += kThreads) {
    const bool inside = first * kElements + 8 * i < filters * kElements;
    copy_bytes<16>(to + 16 * i, filter + (inside ? first * kElements + 8 * i : 0), inside);
  }
}

// Starts to copy filters that need not be rearranged: channels last, a group a pack.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void stage_filters(unsigned to, const T* filter, int first, int filters) {
  constexpr int kWords = Shape::kTaps * Shape::kC / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < Shape::kFilters * kWords; i += kThreads) {
    const bool inside = first + i / kWords < filters;
    copy_bytes<16>(to + i / kWords * Shape::kRowBytes + 16 * (i % kWords),
                   filter + (inside ? (first * kWords + i) * 8 : 0), inside);
  }
}

// Lays filters out that lie in memory from `filter` on, zeros from number `filters` on.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void arrange_filters(unsigned char* staged, const T* filter, int filters) {
  constexpr int kC = Shape::kC, kTaps = Shape::kTaps;
  constexpr int kWords = Shape::Group::kPackC / 8, kPart = Shape::kLast ? greatest_divisor(8, kC) : 1;
#pragma unroll 2
  for (int i = threadIdx.x; i < Shape::kFilters * kTaps * kWords; i += kThreads) {
    const int word = i % kWords, tap = i / kWords % kTaps, row = i / (kWords * kTaps);
    const int group = row / Shape::kK % Shape::Group::kPack;
    Vector<T, 8> values = {};
#pragma unroll
    for (int part = 0; part < 8; part += kPart) {
      const int channel = 8 * word + part - group * kC;
      if (channel < 0 || channel >= kC || row >= filters) continue;
      const int at = Shape::kLast ? (row * kTaps + tap) * kC + channel : (row * kC + channel) * kTaps + tap;
      const auto some = *reinterpret_cast<const Vector<T, kPart>*>(filter + at);
#pragma unroll
      for (int e = 0; e < kPart; ++e) values.at[part + e] = some.at[e];
    }
    *reinterpret_cast<Vector<T, 8>*>(staged + row * Shape::kRowBytes + tap * Shape::kTapBytes + 16 * word) = values;
  }
}
