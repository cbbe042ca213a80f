// Results that are sums of few products, by direct summation in float32: transforms would round them as their tile.
//
// Forward: y[n,k,o] = sum_{c,t} x[n,c,o*stride-pad+t] w[k,c,t]; backward: dx[n,c,i] = sum_{k,t}
// dy[n,k,(i+pad-t)/stride] w[k,c,t]. A thread a result of those near the corners: of each axis the first and the last,
// in boxes that the host chooses; those of `limit` products or more are left alone. Offsets fit 30 bits. Defines:
// T_SOURCE, T_W, T_RESULT (dtype names), BACKWARD, AXIS_FIELDS, SHAPE_FIELDS.
#include "common/divisor.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(T_SOURCE) || !defined(T_W) || !defined(T_RESULT) || !defined(BACKWARD)
#error "define T_SOURCE, T_W, T_RESULT and BACKWARD"
#endif
#if !defined(AXIS_FIELDS) || !defined(SHAPE_FIELDS)
#error "define AXIS_FIELDS and SHAPE_FIELDS"
#endif

constexpr int kThreads = 128;

// One axis: sizes, taps, strides in memory, and how many results are near its ends: `edges`, the first `leading` of
// them from the first on, the others up to the last.
struct Axis {
  AXIS_FIELDS

  __device__ __forceinline__ int result(int rank) const {
    return rank < leading ? rank : result_size - edges.by + rank;
  }
};

// results: those near edges, of all images and channels; terms: channels of a group that are summed.
struct Shape {
  SHAPE_FIELDS
};

// The taps that a result meets: `first`, first + step, ... below `end`; the first one's source, from one to the next.
struct TapRange {
  int first, end, step, source, source_step;

  __device__ __forceinline__ int count() const { return max(0, end - first + step - 1) / step; }
};

__device__ __forceinline__ TapRange taps_of(const Axis& axis, int result) {
  if constexpr (BACKWARD) {
    const int at = result + axis.pad, last = axis.source_size - 1;
    // Taps t with t = at modulo the stride and 0 <= (at - t) / stride <= last.
    int first = at - at / axis.stride * axis.stride.by;
    if (at - last * axis.stride.by > first) first = at - last * axis.stride.by;
    return {first, min(axis.taps, at + 1), axis.stride.by, (at - first) / axis.stride, -1};
  } else {
    const int start = result * axis.stride.by - axis.pad;
    const int first = max(0, -start);
    return {first, min(axis.taps, axis.source_size - start), 1, start + first, 1};
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_edges(const T_SOURCE* __restrict__ source, const T_W* __restrict__ w, T_RESULT* __restrict__ results,
#ifdef EPILOGUE
              const Shape shape, const __grid_constant__ Epilogue epilogue) {
#else
              const Shape shape) {
#endif
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= shape.results) return;
  const Axis rows = shape.rows, columns = shape.columns;
  const int terms = shape.terms, source_channel_stride = shape.source_channel_stride;
  const int filter_term_stride = shape.filter_term_stride;
  const int line = item / columns.edges, plane = line / rows.edges, image = plane / shape.channels;
  const int channel = plane - image * shape.channels.by, group = channel / shape.group_channels;
  const int i = rows.result(line - plane * rows.edges.by), j = columns.result(item - line * columns.edges.by);
  const TapRange down = taps_of(rows, i), across = taps_of(columns, j);
  if (down.count() * across.count() * shape.terms >= shape.limit) return;
  const T_SOURCE* from = source + image * shape.source_image_stride + group * shape.terms * shape.source_channel_stride;
  const T_W* filter =
      w + group * shape.filter_group_stride + (channel - group * shape.group_channels.by) * shape.filter_channel_stride;
  float sum = 0.0f;
  for (int r = down.first, at_r = down.source; r < down.end; r += down.step, at_r += down.source_step) {
    for (int c = across.first, at_c = across.source; c < across.end; c += across.step, at_c += across.source_step) {
      const int in_plane = at_r * rows.source_stride + at_c * columns.source_stride;
      const int in_filter = r * rows.filter_stride + c * columns.filter_stride;
#pragma unroll 4
      for (int term = 0; term < terms; ++term)
        sum += convert<float>(from[in_plane + term * source_channel_stride]) *
               convert<float>(filter[in_filter + term * filter_term_stride]);
    }
  }
#ifdef EPILOGUE
  const int at = image * shape.result_image_stride + channel * shape.result_channel_stride + i * rows.result_stride +
                 j * columns.result_stride;
  results[at] = convert<T_RESULT>(finish_at(sum, epilogue, image, channel, shape.channels.by, at));
#else
  results[image * shape.result_image_stride + channel * shape.result_channel_stride + i * rows.result_stride +
          j * columns.result_stride] = convert<T_RESULT>(sum);
#endif
}
