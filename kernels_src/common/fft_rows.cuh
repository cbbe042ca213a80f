// Lines of tiles that are transformed: where in memory the elements of a line are, found once for all of its positions.
#pragma once

#include "common/fourier.cuh"

// A tile along a row of a tensor: `count` positions from `low` on hold elements, or some of them do.
struct Row {
  int start, ahead, low, count;
};

// A line of a tile, which begins at `plane`; none where `exists` is false.
template <bool kSpread>
__device__ __forceinline__ Row row_of(const TilePlace& at, int plane, bool exists, const TileAxis& rows,
                                      const TileAxis& columns) {
  const int down = exists ? rows.offset(at.row, rows.low) : -1;
  const int ahead = at.column * columns.step - columns.shift, low = max(columns.low, -ahead);
  const int high = min(columns.high, columns.size * columns.spread.by - ahead);
  return {plane + down + (kSpread ? 0 : ahead * columns.stride), ahead, low, down < 0 ? 0 : max(0, high - low)};
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
