// The definition of correctness on the GPU: float64 sums for elements of a convolution or of its gradients.
//
// For element indices[i] of the output, a flat index in logical (n, c, d, h, w) order whatever the layout, or for
// element i where indices is null: sums[i] = sum a*b over the products a*b that make it, and unless scales is null
// scales[2*i] = sum |a|*|b| and scales[2*i + 1] = sqrt(sum a^2 * b^2), rounded up.
// One block an element, the reduction split over its THREADS threads and joined in a fixed order; in the kernels for
// whole outputs one thread an element. Whole outputs of dense convolutions have reference_tiled.cu.
// Defines: T_X, T_W, T_Y (dtype names), INDEX_BITS, THREADS (a power of two, 32 to 1024), and which kernel is wanted:
// FORWARD, BACKWARD_DATA or BACKWARD_WEIGHTS, or FORWARD_WHOLE or BACKWARD_DATA_WHOLE. One alone compiles in a third of
// the time of all.
#include "harness/reference_sums.cuh"

#if !defined(T_X) || !defined(T_W) || !defined(T_Y) || !defined(THREADS)
#error "define T_X, T_W, T_Y and THREADS"
#endif
#if !defined(FORWARD) && !defined(BACKWARD_DATA) && !defined(BACKWARD_WEIGHTS) && !defined(FORWARD_WHOLE) && \
    !defined(BACKWARD_DATA_WHOLE)
#error "define which kernel is wanted: FORWARD, BACKWARD_DATA, BACKWARD_WEIGHTS, FORWARD_WHOLE or BACKWARD_DATA_WHOLE"
#endif

constexpr int kThreads = THREADS;
static_assert(kThreads >= 32 && kThreads <= 1024 && (kThreads & (kThreads - 1)) == 0, "THREADS is a power of two");

__device__ __forceinline__ int64 element_of(const int64* indices, int64 i) {
  return indices == nullptr ? i : indices[i];
}

__device__ void write_joined(const Sums& mine, int64 i, double* sums, float* scales) {
  __shared__ Sums partial[kThreads];
  partial[threadIdx.x] = mine;
  __syncthreads();  // all parts are written before the tree reads them
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x].add(partial[threadIdx.x + half]);
    __syncthreads();  // one level of the tree is complete before the next reads it
  }
  if (threadIdx.x == 0) partial[0].write(i, sums, scales);
  __syncthreads();  // the root is read before the next element overwrites it
}

#ifdef FORWARD
extern "C" __global__ void __launch_bounds__(kThreads)
    reference_forward(const T_X* __restrict__ x, const T_W* __restrict__ w, const int64* __restrict__ indices,
                      double* __restrict__ sums, float* __restrict__ scales, int64 count,
                      const __grid_constant__ Geometry conv) {
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = group_c * conv.taps[0] * conv.taps[1] * conv.taps[2];
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const Position out = position_of<false>(element_of(indices, i), conv.k, conv.out);
    Sums mine = {};
    for (Index term = threadIdx.x; term < length; term += kThreads) {
      Index rest = term;
      const Index tx = take(rest, conv.taps[2]), ty = take(rest, conv.taps[1]), tz = take(rest, conv.taps[0]);
      const Position tap = {out.c, rest, {tz, ty, tx}};
      Position in = {out.n, out.c / group_k * group_c + rest, {}};
      if (!meets_input(conv, out.at, tap.at, in.at)) continue;
      mine.add(convert<double>(x[offset_of(in, conv.x)]), convert<double>(w[offset_of(tap, conv.w)]),
               scales != nullptr);
    }
    write_joined(mine, i, sums, scales);
  }
}
#endif

#ifdef BACKWARD_DATA
extern "C" __global__ void __launch_bounds__(kThreads)
    reference_backward_data(const T_Y* __restrict__ dy, const T_W* __restrict__ w, const int64* __restrict__ indices,
                            double* __restrict__ sums, float* __restrict__ scales, int64 count,
                            const __grid_constant__ Geometry conv) {
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = group_k * conv.taps[0] * conv.taps[1] * conv.taps[2];
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const Position in = position_of<false>(element_of(indices, i), conv.c, conv.size);
    Sums mine = {};
    for (Index term = threadIdx.x; term < length; term += kThreads) {
      Index rest = term;
      const Index tx = take(rest, conv.taps[2]), ty = take(rest, conv.taps[1]), tz = take(rest, conv.taps[0]);
      const Index k = in.c / group_c * group_k + rest;
      const Position tap = {k, in.c % group_c, {tz, ty, tx}};
      Position out = {in.n, k, {}};
      if (!meets_output(conv, in.at, tap.at, out.at)) continue;
      mine.add(convert<double>(dy[offset_of(out, conv.y)]), convert<double>(w[offset_of(tap, conv.w)]),
               scales != nullptr);
    }
    write_joined(mine, i, sums, scales);
  }
}
#endif

#ifdef BACKWARD_WEIGHTS
extern "C" __global__ void __launch_bounds__(kThreads)
    reference_backward_weights(const T_Y* __restrict__ dy, const T_X* __restrict__ x, const int64* __restrict__ indices,
                               double* __restrict__ sums, float* __restrict__ scales, int64 count,
                               const __grid_constant__ Geometry conv) {
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = conv.n * conv.out[0] * conv.out[1] * conv.out[2];
  for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
    const Position tap = position_of<false>(element_of(indices, i), group_c, conv.taps);
    Sums mine = {};
    for (Index term = threadIdx.x; term < length; term += kThreads) {
      Index rest = term;
      const Index ow = take(rest, conv.out[2]), oh = take(rest, conv.out[1]), od = take(rest, conv.out[0]);
      const Position out = {rest, tap.n, {od, oh, ow}};
      Position in = {rest, tap.n / group_k * group_c + tap.c, {}};
      if (!meets_input(conv, out.at, tap.at, in.at)) continue;
      mine.add(convert<double>(dy[offset_of(out, conv.y)]), convert<double>(x[offset_of(in, conv.x)]),
               scales != nullptr);
    }
    write_joined(mine, i, sums, scales);
  }
}
#endif

// Adds `length` products of elements that lie `a_step` and `b_step` apart.
template <typename A, typename B>
__device__ __forceinline__ void add_products(Sums& mine, const A* a, Index a_step, const B* b, Index b_step,
                                             Index length, bool scaled) {
  for (Index i = 0; i < length; ++i) mine.add(convert<double>(a[i * a_step]), convert<double>(b[i * b_step]), scaled);
}

__device__ __forceinline__ int64 first_element() {
  return int64(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ __forceinline__ int64 element_step() {
  return int64(gridDim.x) * kThreads;
}

// Element i of a whole tensor of (n, channels, *size): threads next to each other take elements next to each other in
// memory, so that they read the same lines.
__device__ __forceinline__ Position element_at(int64 i, Index channels, const Index (&size)[3], bool channels_last) {
  return channels_last ? position_of<true>(i, channels, size) : position_of<false>(i, channels, size);
}

#ifdef FORWARD_WHOLE
extern "C" __global__ void __launch_bounds__(kThreads)
    reference_forward_whole(const T_X* __restrict__ x, const T_W* __restrict__ w, double* __restrict__ sums,
                            float* __restrict__ scales, int64 count, const __grid_constant__ Geometry conv) {
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  for (int64 i = first_element(); i < count; i += element_step()) {
    const Position out = element_at(i, conv.k, conv.out, conv.y.c == 1);
    Sums mine = {};
    for (Index tz = 0; tz < conv.taps[0]; ++tz)
      for (Index ty = 0; ty < conv.taps[1]; ++ty)
        for (Index tx = 0; tx < conv.taps[2]; ++tx) {
          const Position tap = {out.c, 0, {tz, ty, tx}};
          Position in = {out.n, out.c / group_k * group_c, {}};
          if (!meets_input(conv, out.at, tap.at, in.at)) continue;
          add_products(mine, x + offset_of(in, conv.x), conv.x.c, w + offset_of(tap, conv.w), conv.w.c, group_c,
                       scales != nullptr);
        }
    mine.write(logical_rank(out, conv.k, conv.out), sums, scales);
  }
}
#endif

#ifdef BACKWARD_DATA_WHOLE
extern "C" __global__ void __launch_bounds__(kThreads)
    reference_backward_data_whole(const T_Y* __restrict__ dy, const T_W* __restrict__ w, double* __restrict__ sums,
                                  float* __restrict__ scales, int64 count, const __grid_constant__ Geometry conv) {
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  for (int64 i = first_element(); i < count; i += element_step()) {
    const Position in = element_at(i, conv.c, conv.size, conv.x.c == 1);
    const Index first_k = in.c / group_c * group_k;
    Sums mine = {};
    for (Index tz = 0; tz < conv.taps[0]; ++tz)
      for (Index ty = 0; ty < conv.taps[1]; ++ty)
        for (Index tx = 0; tx < conv.taps[2]; ++tx) {
          const Position tap = {first_k, in.c % group_c, {tz, ty, tx}};
          Position out = {in.n, first_k, {}};
          if (!meets_output(conv, in.at, tap.at, out.at)) continue;
          add_products(mine, dy + offset_of(out, conv.y), conv.y.c, w + offset_of(tap, conv.w), conv.w.n, group_k,
                       scales != nullptr);
        }
    mine.write(logical_rank(in, conv.c, conv.size), sums, scales);
  }
}
#endif
