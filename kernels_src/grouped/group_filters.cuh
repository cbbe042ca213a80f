// Filters of groups in shared memory as rows of block-diagonal matrices: a row a filter, [tap][channel of its pack],
// zeros where the groups differ.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/packed_groups.cuh"
#include "common/types.cuh"

// kFilterCount filters, a multiple of 8, of kTapCount taps; in memory [tap][channel] if kChannelsLast, else the other
// way round.
template <int kGroupC, int kGroupK, int kTapCount, int kFilterCount, bool kChannelsLast>
struct FilterRows {
  using Group = PackedGroups<kGroupC, kGroupK>;
  static constexpr int kC = kGroupC, kK = kGroupK, kTaps = kTapCount, kFilters = kFilterCount;
  static constexpr bool kLast = kChannelsLast;
  static constexpr int kTapBytes = 2 * Group::kPackedC, kRowBytes = odd_words(kTaps * kTapBytes);
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

// Starts to copy filters of packs of one group row by row, in the order of memory.
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

// What holds kBytes bytes.
template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using Type = unsigned short;
};
template <>
struct Bits<4> {
  using Type = unsigned;
};
template <>
struct Bits<8> {
  using Type = uint2;
};
template <>
struct Bits<16> {
  using Type = uint4;
};

// Lays filters out that lie in memory from `filter` on, zeros from number `filters` on. A thread copies 8 channels of a
// filter tap by tap, which takes few instructions.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void arrange_filters(unsigned char* staged, const T* filter, int filters) {
  constexpr int kC = Shape::kC, kTaps = Shape::kTaps, kWords = Shape::Group::kPackedC / 8;
  constexpr int kChunk = Shape::kLast ? greatest_divisor(8, kC) : 1;
  constexpr int kChannelStep = Shape::kLast ? 1 : kTaps, kTapStep = Shape::kLast ? kC : 1;
  using Chunk = typename Bits<2 * kChunk>::Type;
  struct alignas(16) Eight {
    Chunk at[8 / kChunk];
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kFilters * kWords; i += kThreads) {
    const int word = i % kWords, row = i / kWords,
              first = 8 * word - row / Shape::kK % Shape::Group::kPackedGroups * kC;
    const T* const from = filter + row * kTaps * kC;
    unsigned char* const to = staged + row * Shape::kRowBytes + 16 * word;
#pragma unroll(kTaps <= 12 ? kTaps : 4)
    for (int tap = 0; tap < kTaps; ++tap) {
      Eight values = {};
#pragma unroll
      for (int at = 0; at < 8; at += kChunk) {
        const int channel = first + at;
        if (channel >= 0 && channel < kC && row < filters)
          values.at[at / kChunk] = *reinterpret_cast<const Chunk*>(from + channel * kChannelStep + tap * kTapStep);
      }
      *reinterpret_cast<Eight*>(to + tap * Shape::kTapBytes) = values;
    }
  }
}

// The taps of two neighbours in pairs, from rows that lie as in memory, channels first, in packs of one group: of
// filter k and channels c, which is even, and c + 1, or, if kAcross, of filters k and k + 1 and channel c. A warp
// whose lanes 4g + t read k = g and c = 2t, or k = 2t and c = g, meets each bank once.
template <typename Shape, bool kAcross>
__device__ __forceinline__ void load_pairs(unsigned (&to)[Shape::kTaps], const unsigned char* rows, int k, int c) {
  constexpr int kTaps = Shape::kTaps;
  if constexpr (kAcross) {
    constexpr int kWords = (kTaps + 1) / 2;
    const int first = c * kTaps, bits = first % 2 * 16;
    unsigned taps[2][kWords];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned* const from = reinterpret_cast<const unsigned*>(rows + (k + half) * Shape::kRowBytes) + first / 2;
      unsigned words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = from[i];
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        taps[half][i] = __funnelshift_r(words[i], words[i + 1 < kWords ? i + 1 : i], bits);
    }
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap)
      to[tap] = __byte_perm(taps[0][tap / 2], taps[1][tap / 2], tap % 2 ? 0x7632u : 0x5410u);
  } else {
    const unsigned* const from = reinterpret_cast<const unsigned*>(rows + k * Shape::kRowBytes) + c * kTaps / 2;
    unsigned words[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) words[i] = from[i];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap)
      to[tap] = __byte_perm(words[tap / 2], words[(kTaps + tap) / 2],
                            (tap % 2 ? 0x32u : 0x10u) | ((kTaps + tap) % 2 ? 0x7600u : 0x5400u));
  }
}
