// Register tiles: neighbouring outputs of one thread along an axis, and the window of sources that they meet.
//
// Sources are counted from where a tile's origin lies among them; all that depends on an output's place within its
// tile is known to the compiler.
#pragma once

#include "depthwise/segments.cuh"

constexpr int kNever = 1 << 30;

constexpr int least(int a, int b) {
  return a < b ? a : b;
}
// The largest power of two, at most kCopyElements, that divides both.
template <typename T>
constexpr int common_vector(int a, int b) {
  int vector = kCopyElements<T>;
  while (a % vector || b % vector) vector /= 2;
  return vector;
}

// An axis of kSize sources. Output o and tap t meet source o * kStride - kPad + t * kDilation; in a transposed
// convolution source s and tap t meet output s * kStride - kPad + t * kDilation instead, and tiles are as long as a
// multiple of the stride. There are kTiles tiles of kOutputs.
template <int kSourceCount, int kTapCount, int kStride, int kDilation, int kPad, int kOutputCount, int kTileCount,
          bool kTransposed>
struct Axis {
  static constexpr int kSize = kSourceCount, kTaps = kTapCount, kOutputs = kOutputCount, kTiles = kTileCount;
  static constexpr int kStep = kTransposed ? kOutputs / kStride : kOutputs * kStride;  // from origin to origin
  static_assert(!kTransposed || kOutputs % kStride == 0,
                "a register tile must begin on a source: kOutputs must be a multiple of the stride");

  // The source that an output and a tap meet in, or kNever.
  static __device__ __forceinline__ constexpr int at(int output, int tap) {
    if (!kTransposed) return output * kStride - kPad + tap * kDilation;
    const int ahead = output + kPad - tap * kDilation;
    return ahead % kStride ? kNever : ahead / kStride;
  }
  // Whether a source is surely outside: there is one tile.
  static __device__ __forceinline__ constexpr bool is_outside(int source) {
    return kTiles == 1 && (source < 0 || source >= kSize);
  }
  // Whether it lies outside for some tiles.
  static constexpr bool may_be_outside(int source) {
    return kTiles > 1 && (source < 0 || source + (kTiles - 1) * kStep >= kSize);
  }
  static constexpr bool is_met(int source) {
    if (is_outside(source)) return false;
    for (int output = 0; output < kOutputs; ++output)
      for (int tap = 0; tap < kTaps; ++tap)
        if (at(output, tap) == source) return true;
    return false;
  }
  // Whether there is one tile, which meets several neighbouring sources and no others.
  static constexpr bool is_a_run() {
    if (kTiles > 1) return false;
    const int from = maximum(kFirst, 0), end = least(kLast + 1, kSize);
    for (int source = from; source < end; ++source)
      if (!is_met(source)) return false;
    return end - from > 2;
  }
  static constexpr int first() {
    int found = kNever;
    for (int output = 0; output < kOutputs; ++output)
      for (int tap = 0; tap < kTaps; ++tap) found = least(found, at(output, tap));
    return found;
  }
  static constexpr int last() {
    int found = -kNever;
    for (int output = 0; output < kOutputs; ++output)
      for (int tap = 0; tap < kTaps; ++tap)
        if (at(output, tap) != kNever) found = maximum(found, at(output, tap));
    return found;
  }
  static constexpr int kFirst = first(), kLast = last(), kWindow = kLast - kFirst + 1;
};

constexpr int floor_to(int a, int b) {
  return a >= 0 ? a / b * b : -round_up(-a, b);
}

// Reads what a tile meets of one row into window[source - kFirst], in vectors of at most kVector elements, to which
// `row` and origins are aligned. What lies outside reads as zero; what is not met is not read.
template <typename Columns, int kVector, int kGroup = floor_to(Columns::kFirst, kVector), typename T>
__device__ __forceinline__ void read_window(float (&window)[Columns::kWindow], const T* row, int origin) {
  if constexpr (kVector == 1 && sizeof(T) == 2 && Columns::is_a_run()) {
    constexpr int kFrom = maximum(Columns::kFirst, 0), kCount = least(Columns::kLast + 1, Columns::kSize) - kFrom;
    read_anywhere<kCount>(window + kFrom - Columns::kFirst, row + kFrom);
  } else if constexpr (kGroup <= Columns::kLast) {
    constexpr auto met = [](bool is_last) {
      int found = kNever;
      for (int source = kGroup; source < kGroup + kVector; ++source)
        if (source >= Columns::kFirst && source <= Columns::kLast && Columns::is_met(source))
          found = is_last || found == kNever ? source : found;
      return found;
    };
    constexpr int kFirstMet = met(false), kLastMet = met(true);
    if constexpr (kFirstMet != kNever) {
      constexpr auto fitting = [] {
        int length = 1;
        while (floor_to(kFirstMet, length) + length <= kLastMet) length *= 2;
        return length;
      };
      constexpr int kLength = fitting(), kFrom = floor_to(kFirstMet, kLength);
      float values[kLength] = {};
      bool is_inside = true;
      if constexpr (Columns::may_be_outside(kFrom) || Columns::may_be_outside(kFrom + kLength - 1))
        is_inside = static_cast<unsigned>(origin + kFrom) < static_cast<unsigned>(Columns::kSize);
      if (is_inside) read_elements<kLength>(values, row + origin + kFrom);
#pragma unroll
      for (int i = 0; i < kLength; ++i)
        if (kFrom + i >= Columns::kFirst && kFrom + i <= Columns::kLast)
          window[kFrom + i - Columns::kFirst] = values[i];
    }
    read_window<Columns, kVector, kGroup + kVector>(window, row, origin);
  }
}
