// Results that are sums of few products, by direct summation in float32: transforms would round them as their tile.
//
// Forward: y[n,k,o] = sum_{c,t} x[n,c,o*stride-pad+t] w[k,c,t]; backward: dx[n,c,i] = sum_{k,t}
// dy[n,k,(i+pad-t)/stride] w[k,c,t]. A thread a result of those near the corners: of each axis the first and the last,
// in boxes that the host chooses; those of `limit` products or more are left alone. Offsets fit 30 bits. Defines:
// T_SOURCE, T_W, T_RESULT (dtype names), BACKWARD.
#include "common/divisor.cuh"
#include "common/types.cuh"

#if !defined(T_SOURCE) || !defined(T_W) || !defined(T_RESULT) || !defined(BACKWARD)
#error "define T_SOURCE, T_W, T_RESULT and BACKWARD"
#endif

constexpr int kThreads = 128;

// One axis: its taps, how it strides, and which results are near its ends.
struct Axis {
  int source_size, result_size, taps, pad;
  Divisor stride;
  int leading;  // results from the first on that are asked about; what else there is, from the last back
  int source_stride, filter_stride, result_stride;

  __device__ __forceinline__ int result(int rank, int asked) const {
    return rank < leading ? rank : result_size - asked + rank;
  }
};

// The taps that a result meets: `first`, first + step, ... below `end`; the first one's source, from one to the next.
struct Met {
  int first, end, step, source, source_step;

  __device__ __forceinline__ int count() const { return max(0, end - first + step - 1) / step; }
};

__device__ __forceinline__ Met met_by(const Axis& axis, int result) {
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

#define DIVISOR_OF(name) int name, unsigned name##_multiplier, int name##_shift
#define DIVISOR(name) {name, name##_multiplier, name##_shift}
#define AXIS_OF(name)                                                                                         \
  int name##_source_size, int name##_result_size, int name##_taps, int name##_pad, DIVISOR_OF(name##_stride), \
      int name##_leading, int name##_source_step, int name##_filter_step, int name##_result_step,             \
      DIVISOR_OF(name##_asked)
#define AXIS(name)                                                                                        \
  {name##_source_size, name##_result_size, name##_taps,        name##_pad,        DIVISOR(name##_stride), \
   name##_leading,     name##_source_step, name##_filter_step, name##_result_step}

// terms: channels of a group that are summed; items: results asked about of all images and channels.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_edges(const T_SOURCE* __restrict__ source, const T_W* __restrict__ w, T_RESULT* __restrict__ results, int items,
              int limit, int terms, DIVISOR_OF(channels), DIVISOR_OF(group_channels), int source_image,
              int source_channel, int filter_term, int filter_channel, int filter_group, int result_image,
              int result_channel, AXIS_OF(row), AXIS_OF(column)) {
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= items) return;
  const Divisor of_row = DIVISOR(column_asked), of_plane = DIVISOR(row_asked), of_image = DIVISOR(channels);
  const Divisor of_group = DIVISOR(group_channels);
  const Axis rows = AXIS(row), columns = AXIS(column);
  const int line = item / of_row, plane = line / of_plane, image = plane / of_image;
  const int channel = plane - image * channels, group = channel / of_group;
  const int i = rows.result(line - plane * row_asked, row_asked);
  const int j = columns.result(item - line * column_asked, column_asked);
  const Met down = met_by(rows, i), across = met_by(columns, j);
  if (down.count() * across.count() * terms >= limit) return;
  const T_SOURCE* from = source + image * source_image + group * terms * source_channel;
  const T_W* filter = w + group * filter_group + (channel - group * group_channels) * filter_channel;
  float sum = 0.0f;
  for (int r = down.first, at_r = down.source; r < down.end; r += down.step, at_r += down.source_step) {
    for (int c = across.first, at_c = across.source; c < across.end; c += across.step, at_c += across.source_step) {
      const int in_plane = at_r * row_source_step + at_c * column_source_step;
      const int in_filter = r * row_filter_step + c * column_filter_step;
#pragma unroll 4
      for (int term = 0; term < terms; ++term)
        sum += convert<float>(from[in_plane + term * source_channel]) *
               convert<float>(filter[in_filter + term * filter_term]);
    }
  }
  results[image * result_image + channel * result_channel + i * row_result_step + j * column_result_step] =
      convert<T_RESULT>(sum);
}
