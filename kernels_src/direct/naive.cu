// y[n,k,o] = sum_{c,t} x[n, c, o*stride - pad + t*dilation] * w[k,c,t], its gradient to x, and its gradient to w.
//
// Any shape, group, padding, stride, dilation, layout and dtype: sizes and strides are arguments.
// forward, backward_data: one thread an output element, neighbours or nearly so in neighbouring threads.
// backward_weights: a block computes LANES neighbouring elements; THREADS / LANES threads split each reduction over
// n, d, h, w of dy and a tree in shared memory joins them in a fixed order.
// Defines: T_X, T_W, T_Y, T_SUM (dtype names), INDEX_BITS, OUTPUT_CHANNELS_LAST (0, 1), THREADS, LANES.
#include "common/geometry.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(T_X) || !defined(T_W) || !defined(T_Y) || !defined(T_SUM)
#error "define T_X, T_W, T_Y and T_SUM"
#endif
#if !defined(OUTPUT_CHANNELS_LAST) || !defined(THREADS) || !defined(LANES)
#error "define OUTPUT_CHANNELS_LAST, THREADS and LANES"
#endif

constexpr bool kOutputChannelsLast = OUTPUT_CHANNELS_LAST;
constexpr int kThreads = THREADS;
constexpr int kLanes = LANES;
constexpr int kSplit = kThreads / kLanes;
static_assert(kThreads >= 32 && kThreads <= 256 && (kThreads & (kThreads - 1)) == 0,
              "THREADS is a power of two up to 256");
// Room for 64-bit offsets without spills: left alone, ptxas spills to fit more blocks on a multiprocessor.
constexpr int kMinBlocks = INDEX_BITS == 64 ? 2 : 3;
static_assert(kLanes >= 1 && kThreads % kLanes == 0, "LANES divides THREADS");

// sum_i a[i * a_step] * b[i * b_step] over `count` channels.
template <typename A, typename B>
__device__ __forceinline__ T_SUM dot(const A* a, Index a_step, const B* b, Index b_step, Index count, T_SUM sum) {
#pragma unroll 4
  for (Index i = 0; i < count; ++i) sum += convert<T_SUM>(a[i * a_step]) * convert<T_SUM>(b[i * b_step]);
  return sum;
}

// The output that a thread computes. Channels last, a warp takes 4 pixels of 8 channels rather than 32 channels of one
// pixel: it then reads 12 rows of channels at a time, which stay in the cache, instead of 33.
__device__ __forceinline__ Position output_of(int64 rank, const Geometry& conv) {
  constexpr Index kChannels = 8;
  if (!kOutputChannelsLast || conv.k % kChannels != 0) return position_of<kOutputChannelsLast>(rank, conv.k, conv.out);
  const Index in_slice = conv.n * conv.out[0] * conv.out[1] * conv.out[2] * kChannels;
  Position out = position_of<true>(static_cast<Index>(rank) % in_slice, kChannels, conv.out);
  out.c += static_cast<Index>(rank) / in_slice * kChannels;
  return out;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    direct_naive_forward(const T_X* __restrict__ x, const T_W* __restrict__ w, T_Y* __restrict__ y,
#ifdef EPILOGUE
                         const __grid_constant__ Geometry conv, const __grid_constant__ Epilogue epilogue) {
#else
                         const __grid_constant__ Geometry conv) {
#endif
  const int64 total = int64(conv.n) * conv.k * conv.out[0] * conv.out[1] * conv.out[2];
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  for (int64 rank = int64(blockIdx.x) * kThreads + threadIdx.x; rank < total; rank += int64(gridDim.x) * kThreads) {
    const Position out = output_of(rank, conv);
    Index start[3];
    Range taps[3];
    for (int i = 0; i < 3; ++i) {
      start[i] = out.at[i] * conv.stride[i] - conv.pad[i];
      taps[i] = taps_inside(start[i], conv.size[i], conv.taps[i], conv.dilation[i]);
    }
    const T_X* x_base = x + out.n * conv.x.n + out.c / group_k * group_c * conv.x.c;
    const T_W* w_base = w + out.c * conv.w.n;
    T_SUM sum = 0;
    for (Index tz = taps[0].first; tz < taps[0].end; ++tz)
      for (Index ty = taps[1].first; ty < taps[1].end; ++ty)
        for (Index tx = taps[2].first; tx < taps[2].end; ++tx) {
          const T_X* x_tap = x_base + (start[0] + tz * conv.dilation[0]) * conv.x.at[0] +
                             (start[1] + ty * conv.dilation[1]) * conv.x.at[1] +
                             (start[2] + tx * conv.dilation[2]) * conv.x.at[2];
          const T_W* w_tap = w_base + tz * conv.w.at[0] + ty * conv.w.at[1] + tx * conv.w.at[2];
          sum = dot(x_tap, conv.x.c, w_tap, conv.w.c, group_c, sum);
        }
#ifdef EPILOGUE
    const Index at = offset_of(out, conv.y);
    y[at] = convert<T_Y>(finish_at(static_cast<EpilogueNumber>(sum), epilogue, out.n, out.c, conv.k, at));
#else
    y[offset_of(out, conv.y)] = convert<T_Y>(sum);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    direct_naive_backward_data(const T_Y* __restrict__ dy, const T_W* __restrict__ w, T_X* __restrict__ dx,
#ifdef EPILOGUE
                               const __grid_constant__ Geometry conv, const __grid_constant__ Epilogue epilogue) {
#else
                               const __grid_constant__ Geometry conv) {
#endif
  const int64 total = int64(conv.n) * conv.c * conv.size[0] * conv.size[1] * conv.size[2];
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  for (int64 rank = int64(blockIdx.x) * kThreads + threadIdx.x; rank < total; rank += int64(gridDim.x) * kThreads) {
    const Position in = position_of<kOutputChannelsLast>(rank, conv.c, conv.size);
    Range taps[3];
    for (int i = 0; i < 3; ++i) taps[i] = taps_reaching(conv, i, in.at[i]);
    const Index first_k = in.c / group_c * group_k;
    const T_Y* dy_base = dy + in.n * conv.y.n + first_k * conv.y.c;
    const T_W* w_base = w + first_k * conv.w.n + in.c % group_c * conv.w.c;
    T_SUM sum = 0;
    for (Index tz = taps[0].first; tz < taps[0].end; tz += taps[0].step)
      for (Index ty = taps[1].first; ty < taps[1].end; ty += taps[1].step)
        for (Index tx = taps[2].first; tx < taps[2].end; tx += taps[2].step) {
          const Index od = (in.at[0] + conv.pad[0] - tz * conv.dilation[0]) / conv.stride[0];
          const Index oh = (in.at[1] + conv.pad[1] - ty * conv.dilation[1]) / conv.stride[1];
          const Index ow = (in.at[2] + conv.pad[2] - tx * conv.dilation[2]) / conv.stride[2];
          const T_Y* dy_tap = dy_base + od * conv.y.at[0] + oh * conv.y.at[1] + ow * conv.y.at[2];
          const T_W* w_tap = w_base + tz * conv.w.at[0] + ty * conv.w.at[1] + tx * conv.w.at[2];
          sum = dot(dy_tap, conv.y.c, w_tap, conv.w.n, group_k, sum);
        }
#ifdef EPILOGUE
    dx[rank] = convert<T_X>(finish_at(static_cast<EpilogueNumber>(sum), epilogue, in.n, in.c, conv.c, rank));
#else
    dx[rank] = convert<T_X>(sum);
#endif
  }
}

// The outputs o with 0 <= o*stride + shift < size.
__device__ __forceinline__ Range outputs_inside(Index shift, Index size, Index out, Index stride) {
  const Index first = shift < 0 ? (-shift + stride - 1) / stride : 0;
  const Index reach = shift < size ? (size - shift + stride - 1) / stride : 0;
  return {first, reach < out ? reach : out, 1};
}

// sum over n and the outputs inside of dy * x for one tap; this thread takes every kSplit-th term from `part` on.
__device__ T_SUM correlate(const Geometry& conv, const T_Y* dy, const T_X* x, const Range (&outs)[3],
                           const Index (&shift)[3], int part) {
  const Index count_d = outs[0].end - outs[0].first, count_h = outs[1].end - outs[1].first;
  const Index count_w = outs[2].end - outs[2].first;
  if (count_d <= 0 || count_h <= 0 || count_w <= 0) return 0;
  // Coordinates advance by kSplit with carries: no division a term.
  const Index step_w = kSplit % count_w, step_h = kSplit / count_w % count_h;
  const Index step_d = kSplit / count_w / count_h % count_d, step_n = kSplit / count_w / count_h / count_d;
  Index ow = part % count_w, oh = part / count_w % count_h;
  Index od = part / count_w / count_h % count_d, n = part / count_w / count_h / count_d;
  T_SUM sum = 0;
  while (n < conv.n) {
    const Index d = outs[0].first + od, h = outs[1].first + oh, v = outs[2].first + ow;
    const T_Y dy_value = dy[n * conv.y.n + d * conv.y.at[0] + h * conv.y.at[1] + v * conv.y.at[2]];
    const T_X x_value =
        x[n * conv.x.n + (d * conv.stride[0] + shift[0]) * conv.x.at[0] +
          (h * conv.stride[1] + shift[1]) * conv.x.at[1] + (v * conv.stride[2] + shift[2]) * conv.x.at[2]];
    sum += convert<T_SUM>(dy_value) * convert<T_SUM>(x_value);
    ow += step_w;
    oh += step_h + (ow >= count_w);
    ow -= ow >= count_w ? count_w : 0;
    od += step_d + (oh >= count_h);
    oh -= oh >= count_h ? count_h : 0;
    n += step_n + (od >= count_d);
    od -= od >= count_d ? count_d : 0;
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    direct_naive_backward_weights(const T_Y* __restrict__ dy, const T_X* __restrict__ x, T_W* __restrict__ dw,
                                  const __grid_constant__ Geometry conv) {
  __shared__ T_SUM partial[kThreads];
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const int64 total = int64(conv.k) * group_c * conv.taps[0] * conv.taps[1] * conv.taps[2];
  const int lane = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
  for (int64 first = int64(blockIdx.x) * kLanes; first < total; first += int64(gridDim.x) * kLanes) {
    const int64 rank = first + lane;
    T_SUM sum = 0;
    if (rank < total) {
      const Position tap = position_of<kOutputChannelsLast>(rank, group_c, conv.taps);
      Index shift[3];
      Range outs[3];
      for (int i = 0; i < 3; ++i) {
        shift[i] = tap.at[i] * conv.dilation[i] - conv.pad[i];
        outs[i] = outputs_inside(shift[i], conv.size[i], conv.out[i], conv.stride[i]);
      }
      const T_Y* dy_base = dy + tap.n * conv.y.c;
      const T_X* x_base = x + (tap.n / group_k * group_c + tap.c) * conv.x.c;
      sum = correlate(conv, dy_base, x_base, outs, shift, part);
    }
    partial[threadIdx.x] = sum;
    __syncthreads();  // all parts are written before the tree reads them
    for (int half = kSplit / 2; half > 0; half /= 2) {
      if (part < half) partial[threadIdx.x] += partial[threadIdx.x + half * kLanes];
      __syncthreads();  // one level of the tree is complete before the next reads it
    }
    if (part == 0 && rank < total) dw[rank] = convert<T_W>(partial[lane]);
    __syncthreads();  // the root is read before the next element overwrites it
  }
}
