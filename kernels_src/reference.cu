// The definition of correctness on the GPU: float64 sums for listed elements of a convolution or of its gradients.
//
// For element indices[i] of the output, a flat index in logical (n, c, d, h, w) order whatever the layout, with a and b
// the operands of each product: sums[3*i + 0] = sum a*b, sums[3*i + 1] = sum |a|*|b|, sums[3*i + 2] = sum a^2 * b^2.
// One block an element, the reduction split over its THREADS threads and joined in a fixed order.
// Defines: T_X, T_W, T_Y (dtype names), INDEX_BITS, THREADS (a power of two, 32 to 1024).
#include "common/geometry.cuh"

#if !defined(T_X) || !defined(T_W) || !defined(T_Y) || !defined(THREADS)
#error "define T_X, T_W, T_Y and THREADS"
#endif

constexpr int kThreads = THREADS;
static_assert(kThreads >= 32 && kThreads <= 1024 && (kThreads & (kThreads - 1)) == 0, "THREADS is a power of two");

struct Sums {
  double product, magnitude, square;

  __device__ void add(double a, double b) {
    product += a * b;
    magnitude += fabs(a) * fabs(b);
    square += a * a * b * b;
  }
  __device__ void add(const Sums& other) {
    product += other.product;
    magnitude += other.magnitude;
    square += other.square;
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

__device__ void write_sums(const Sums& mine, double* sums) {
  __shared__ Sums partial[kThreads];
  partial[threadIdx.x] = mine;
  __syncthreads();  // all parts are written before the tree reads them
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x].add(partial[threadIdx.x + half]);
    __syncthreads();  // one level of the tree is complete before the next reads it
  }
  if (threadIdx.x == 0) {
    sums[0] = partial[0].product;
    sums[1] = partial[0].magnitude;
    sums[2] = partial[0].square;
  }
  __syncthreads();  // the root is read before the next element overwrites it
}

extern "C" __global__ void __launch_bounds__(kThreads)
    reference_forward(const T_X* __restrict__ x, const T_W* __restrict__ w, const int64* __restrict__ indices,
                      double* __restrict__ sums, int64 count, GEOMETRY_PARAMETERS) {
  const Geometry conv = GEOMETRY;
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = group_c * conv.taps[0] * conv.taps[1] * conv.taps[2];
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const Position out = position_of<false>(indices[i], conv.k, conv.out);
    Sums mine = {};
    for (Index term = threadIdx.x; term < length; term += kThreads) {
      Index rest = term;
      const Index tx = take(rest, conv.taps[2]), ty = take(rest, conv.taps[1]), tz = take(rest, conv.taps[0]);
      const Position in = {out.n,
                           out.c / group_k * group_c + rest,
                           {out.at[0] * conv.stride[0] - conv.pad[0] + tz * conv.dilation[0],
                            out.at[1] * conv.stride[1] - conv.pad[1] + ty * conv.dilation[1],
                            out.at[2] * conv.stride[2] - conv.pad[2] + tx * conv.dilation[2]}};
      if (!inside(in.at[0], conv.size[0]) || !inside(in.at[1], conv.size[1]) || !inside(in.at[2], conv.size[2]))
        continue;
      const Position tap = {out.c, rest, {tz, ty, tx}};
      mine.add(convert<double>(x[offset_of(in, conv.x)]), convert<double>(w[offset_of(tap, conv.w)]));
    }
    write_sums(mine, sums + 3 * i);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    reference_backward_data(const T_Y* __restrict__ dy, const T_W* __restrict__ w, const int64* __restrict__ indices,
                            double* __restrict__ sums, int64 count, GEOMETRY_PARAMETERS) {
  const Geometry conv = GEOMETRY;
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = group_k * conv.taps[0] * conv.taps[1] * conv.taps[2];
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const Position in = position_of<false>(indices[i], conv.c, conv.size);
    Sums mine = {};
    for (Index term = threadIdx.x; term < length; term += kThreads) {
      Index rest = term;
      const Index tx = take(rest, conv.taps[2]), ty = take(rest, conv.taps[1]), tz = take(rest, conv.taps[0]);
      const Index k = in.c / group_c * group_k + rest;
      // Output o reaches this input through tap t where o * stride = at + pad - t * dilation.
      const Index d = in.at[0] + conv.pad[0] - tz * conv.dilation[0];
      const Index h = in.at[1] + conv.pad[1] - ty * conv.dilation[1];
      const Index v = in.at[2] + conv.pad[2] - tx * conv.dilation[2];
      if (d % conv.stride[0] != 0 || h % conv.stride[1] != 0 || v % conv.stride[2] != 0) continue;
      const Position out = {in.n, k, {d / conv.stride[0], h / conv.stride[1], v / conv.stride[2]}};
      if (!inside(out.at[0], conv.out[0]) || !inside(out.at[1], conv.out[1]) || !inside(out.at[2], conv.out[2]))
        continue;
      const Position tap = {k, in.c % group_c, {tz, ty, tx}};
      mine.add(convert<double>(dy[offset_of(out, conv.y)]), convert<double>(w[offset_of(tap, conv.w)]));
    }
    write_sums(mine, sums + 3 * i);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    reference_backward_weights(const T_Y* __restrict__ dy, const T_X* __restrict__ x, const int64* __restrict__ indices,
                               double* __restrict__ sums, int64 count, GEOMETRY_PARAMETERS) {
  const Geometry conv = GEOMETRY;
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = conv.n * conv.out[0] * conv.out[1] * conv.out[2];
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const Position tap = position_of<false>(indices[i], group_c, conv.taps);
    Sums mine = {};
    for (Index term = threadIdx.x; term < length; term += kThreads) {
      Index rest = term;
      const Index ow = take(rest, conv.out[2]), oh = take(rest, conv.out[1]), od = take(rest, conv.out[0]);
      const Position in = {rest,
                           tap.n / group_k * group_c + tap.c,
                           {od * conv.stride[0] - conv.pad[0] + tap.at[0] * conv.dilation[0],
                            oh * conv.stride[1] - conv.pad[1] + tap.at[1] * conv.dilation[1],
                            ow * conv.stride[2] - conv.pad[2] + tap.at[2] * conv.dilation[2]}};
      if (!inside(in.at[0], conv.size[0]) || !inside(in.at[1], conv.size[1]) || !inside(in.at[2], conv.size[2]))
        continue;
      const Position out = {rest, tap.n, {od, oh, ow}};
      mine.add(convert<double>(dy[offset_of(out, conv.y)]), convert<double>(x[offset_of(in, conv.x)]));
    }
    write_sums(mine, sums + 3 * i);
  }
}
