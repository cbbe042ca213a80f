// Tiles that are transformed: where in memory the elements along an axis are, found once for all of its positions.
#pragma once

#include "fft/fourier.cuh"

// A tile along an axis of a tensor: `count` positions from `low` on hold elements, or some of them do.
struct Row {
  int start, ahead, low, count;
};

// Positions of one axis of a tile, the `tile`-th along it; offsets begin at `start`. None where `exists` is false.
template <bool kSpread>
__device__ __forceinline__ Row row_of(int tile, int start, bool exists, const TileAxis& axis) {
  const int ahead = tile * axis.step - axis.shift, low = max(axis.low, -ahead);
  const int high = min(axis.high, axis.size * axis.spread.by - ahead);
  return {start + (kSpread ? 0 : ahead * axis.stride), ahead, low, exists ? max(0, high - low) : 0};
}

// Whether a position holds an element, and its offset in memory if it does.
struct Place {
  bool holds;
  int offset;
};

template <bool kSpread>
__device__ __forceinline__ Place place_of(const Row& row, const TileAxis& columns, int position) {
  const bool inside = static_cast<unsigned>(position - row.low) < static_cast<unsigned>(row.count);
  if constexpr (!kSpread) return {inside, row.start + position * columns.stride};
  const int ahead = position + row.ahead, element = ahead / columns.spread;
  return {inside && element * columns.spread.by == ahead, row.start + element * columns.stride};
}
