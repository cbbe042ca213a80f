// Float64 sums of products, and where a convolution's outputs meet its inputs.
#pragma once

#include "common/geometry.cuh"

struct Sums {
  double product, magnitude, square;

  // Float64 is slow on most GPUs: what is not wanted is not summed.
  __device__ __forceinline__ void add(double a, double b, bool scaled) {
    const double term = a * b;
    product += term;
    if (!scaled) return;
    magnitude += fabs(term);
    square += term * term;
  }
  __device__ void add(const Sums& other) {
    product += other.product;
    magnitude += other.magnitude;
    square += other.square;
  }
  __device__ void write(int64 i, double* sums, float* scales) const {
    sums[i] = product;
    if (scales == nullptr) return;
    scales[2 * i] = __double2float_ru(magnitude);
    scales[2 * i + 1] = __double2float_ru(sqrt(square));
  }
};

// Splits `rest` into its remainder by `size`, which is returned, and its quotient, which is left.
__device__ __forceinline__ Index take(Index& rest, Index size) {
  const Index remainder = rest % size;
  rest /= size;
  return remainder;
}

__device__ __forceinline__ bool inside(Index at, Index size) {
  return at >= 0 && at < size;
}

// Where output `out` meets the input through `tap`; false where that is padding.
__device__ __forceinline__ bool meets_input(const Geometry& conv, const Index (&out)[3], const Index (&tap)[3],
                                            Index (&in)[3]) {
  for (int dim = 0; dim < 3; ++dim) {
    in[dim] = out[dim] * conv.stride[dim] - conv.pad[dim] + tap[dim] * conv.dilation[dim];
    if (!inside(in[dim], conv.size[dim])) return false;
  }
  return true;
}

// Which output reaches input `in` through `tap`, if one does: out * stride = in + pad - tap * dilation.
__device__ __forceinline__ bool meets_output(const Geometry& conv, const Index (&in)[3], const Index (&tap)[3],
                                             Index (&out)[3]) {
  for (int dim = 0; dim < 3; ++dim) {
    const Index start = in[dim] + conv.pad[dim] - tap[dim] * conv.dilation[dim];
    if (start % conv.stride[dim] != 0 || !inside(start / conv.stride[dim], conv.out[dim])) return false;
    out[dim] = start / conv.stride[dim];
  }
  return true;
}

// Flat index of an element of (n, channels, *size) in logical order.
__device__ __forceinline__ int64 logical_rank(const Position& p, Index channels, const Index (&size)[3]) {
  int64 rank = int64(p.n) * channels + p.c;
  for (int dim = 0; dim < 3; ++dim) rank = rank * size[dim] + p.at[dim];
  return rank;
}
