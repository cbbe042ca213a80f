// Sizes and element strides of one convolution lifted to three spatial dimensions, as one kernel argument.
//
// Defines, as miofind/solver/geometry.py gives them: INDEX_BITS 32 or 64, 32 only where the host proved that no offset
// and no coordinate reaches 2**31; STRIDES_FIELDS and GEOMETRY_FIELDS, the fields of both structures.
#pragma once

#include "common/types.cuh"

#ifndef INDEX_BITS
#error "define INDEX_BITS as 32 or 64"
#endif
#if INDEX_BITS == 32
using Index = int;
#elif INDEX_BITS == 64
using Index = int64;
#else
#error "INDEX_BITS must be 32 or 64"
#endif

#if !defined(STRIDES_FIELDS) || !defined(GEOMETRY_FIELDS)
#error "define STRIDES_FIELDS and GEOMETRY_FIELDS"
#endif

// Elements between neighbours along each dimension: n, c, at[3]; for w, `n` counts output channels.
struct Strides {
  STRIDES_FIELDS
};

// n, c, k, groups; size, taps, out, pad, stride, dilation [3]; Strides x, w, y.
struct Geometry {
  GEOMETRY_FIELDS
};

// One element of a tensor by its logical coordinates; `c` counts within the whole tensor, not within a group.
struct Position {
  Index n, c, at[3];
};

// The coordinates of the element with that rank in memory: channels innermost if kChannelsLast, else third from last.
template <bool kChannelsLast>
__device__ __forceinline__ Position position_of(int64 rank, Index channels, const Index (&size)[3]) {
  Position p;
  Index rest = static_cast<Index>(rank);
  if (kChannelsLast) {
    p.c = rest % channels;
    rest /= channels;
  }
  for (int i = 2; i >= 0; --i) {
    p.at[i] = rest % size[i];
    rest /= size[i];
  }
  if (!kChannelsLast) {
    p.c = rest % channels;
    rest /= channels;
  }
  p.n = rest;
  return p;
}

__device__ __forceinline__ Index offset_of(const Position& p, const Strides& strides) {
  return p.n * strides.n + p.c * strides.c + p.at[0] * strides.at[0] + p.at[1] * strides.at[1] +
         p.at[2] * strides.at[2];
}

// Taps or outputs [first, end) in steps of `step`; empty if first >= end.
struct Range {
  Index first, end, step;
};

// The taps that meet the input when the filter starts at coordinate `start`, which padding can make negative.
__device__ __forceinline__ Range taps_inside(Index start, Index size, Index taps, Index dilation) {
  const Index first = start < 0 ? (-start + dilation - 1) / dilation : 0;
  const Index reach = start < size ? (size - start + dilation - 1) / dilation : 0;
  return {first, reach < taps ? reach : taps, 1};
}

// The taps through which an output reaches input coordinate `at`: (at + pad - tap * dilation) is a multiple of stride.
// They recur every stride / gcd(stride, dilation) taps.
__device__ __forceinline__ Range taps_reaching(const Geometry& conv, int dim, Index at) {
  const Index stride = conv.stride[dim], dilation = conv.dilation[dim];
  Index a = stride, b = dilation;
  while (b != 0) {
    const Index remainder = a % b;
    a = b;
    b = remainder;
  }
  const Index step = stride / a, shifted = at + conv.pad[dim];
  Index first = 0;
  while (first < step && (shifted - first * dilation) % stride != 0) ++first;
  if (first == step) return {0, 0, 1};
  // Outputs fall as taps rise: skip taps whose output is past the end, stop before it turns negative.
  const Index past = shifted - (conv.out[dim] - 1) * stride;
  if (first * dilation < past) {
    const Index skip = (past - first * dilation + step * dilation - 1) / (step * dilation);
    first += skip * step;
  }
  const Index end = shifted < 0 ? 0 : shifted / dilation + 1;
  return {first, end < conv.taps[dim] ? end : conv.taps[dim], step};
}
