// Columns of a convolution and their inverse, in three spatial dimensions (fewer are lifted).
//   unfold: columns[pixel, channel, tap] = x[channel, pixel * STRIDE - pad + tap * DILATION], zero outside x
//   fold:   x[channel, position] = sum over the taps whose pixel exists of columns[pixel, channel, tap], in float;
//           reads instead of adding into x: no atomics, equal bits on every run
//   nhwc: x (images, d, h, w, channels), columns (images, pixels, groups, row); row: taps, group_channels, zeros
//   nchw: x (images, channels, d, h, w), columns (images, groups, row, pixels); row: group_channels, taps, zeros
//   pad, sum: filters to such rows; split-K partials of such rows to filters, in float
// Shape: sizes of x and of the output; padded_elements is the length of a row, filter_elements that without zeros.
// Defines: ELEMENT, COLUMN (types of x and of the columns, equal for unfold), FILTER_*, STRIDE_*, DILATION_* of D, H
// and W, BOUNDED (whether a tap can fall outside x), VECTOR (elements written at once: of depth, channels or pixels),
// READ (elements of x that nhwc's unfold reads at once; divides VECTOR and group_channels), SHAPE_FIELDS.
// Blocks of at most 256: x counts vectors (nhwc) or pixels (nchw), y counts pixels (nhwc) or channels (nchw).
#include "common/split_k.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(COLUMN) || !defined(BOUNDED) || !defined(VECTOR) || !defined(READ)
#error "im2col.cu needs ELEMENT, COLUMN, BOUNDED, VECTOR and READ"
#endif
#if !defined(FILTER_D) || !defined(FILTER_H) || !defined(FILTER_W)
#error "im2col.cu needs FILTER_D, FILTER_H and FILTER_W"
#endif
#if !defined(SHAPE_FIELDS)
#error "im2col.cu needs SHAPE_FIELDS"
#endif

constexpr int kTaps = FILTER_D * FILTER_H * FILTER_W;
constexpr int kVector = VECTOR;
constexpr int kRead = READ;
constexpr int kPieces = kVector / kRead;
constexpr int kPixelsAThread = kPieces > 1 ? 8 : 4;
constexpr int kChannelsAThread = 4;

static_assert(kTaps >= 1, "a filter has at least one tap");
static_assert(STRIDE_D >= 1 && STRIDE_H >= 1 && STRIDE_W >= 1, "strides are at least 1");
static_assert(DILATION_D >= 1 && DILATION_H >= 1 && DILATION_W >= 1, "dilations are at least 1");
static_assert(kVector * sizeof(COLUMN) <= 16, "a vector is at most 16 bytes");
static_assert(kVector % kRead == 0, "a vector is whole pieces");

struct Shape {
  SHAPE_FIELDS
};

// Whether `position` lies in [0, size).
__device__ __forceinline__ bool inside(int position, int size) {
  return !BOUNDED || static_cast<unsigned>(position) < static_cast<unsigned>(size);
}

// The output position whose tap `tap` reads `position`, or -1.
template <int kStride, int kDilation>
__device__ __forceinline__ int output_of(int position, int pad, int tap, int out_size) {
  const int reach = position + pad - tap * kDilation;
  if (reach < 0 || reach % kStride != 0) return -1;
  return reach / kStride < out_size ? reach / kStride : -1;
}

__device__ __forceinline__ int ceil_div(int value, int divisor) {
  return (value + divisor - 1) / divisor;
}

// Input position of tap `tap` of output `out` along one axis.
template <int kStride, int kDilation>
__device__ __forceinline__ int input_of(int out, int pad, int tap) {
  return out * kStride - pad + tap * kDilation;
}

extern "C" __global__ void im2col_unfold_nhwc(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ columns,
                                              const Shape shape) {
  using Written = Vector<ELEMENT, kVector>;
  using Piece = Vector<ELEMENT, kRead>;
  const int row_elements = shape.channels / shape.group_channels * shape.padded_elements;
  const int vector_blocks = ceil_div(row_elements / kVector, blockDim.x);
  const int pixel_blocks = ceil_div(shape.out_width, blockDim.y * kPixelsAThread);
  unsigned block = blockIdx.x;
  const int element = (block % vector_blocks * blockDim.x + threadIdx.x) * kVector;
  if (element >= row_elements) return;
  block /= vector_blocks;
  const int first_ow = block % pixel_blocks * blockDim.y * kPixelsAThread + threadIdx.y;
  const int row = block / pixel_blocks;

  const int group = element / shape.padded_elements;
  const int oh = row % shape.out_height;
  const int od = row / shape.out_height % shape.out_depth;
  const int64 image = row / shape.out_height / shape.out_depth;
  const ELEMENT* sources[kPieces];
  int shifts_w[kPieces];
  bool rows_inside[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int in_group = element - group * shape.padded_elements + p * kRead;
    const int tap = in_group / shape.group_channels;
    const int id = input_of<STRIDE_D, DILATION_D>(od, shape.pad_front, tap / (FILTER_H * FILTER_W));
    const int ih = input_of<STRIDE_H, DILATION_H>(oh, shape.pad_top, tap / FILTER_W % FILTER_H);
    shifts_w[p] = tap % FILTER_W * DILATION_W - shape.pad_left;
    rows_inside[p] = tap < kTaps && inside(id, shape.depth) && inside(ih, shape.height);
    sources[p] = x + ((image * shape.depth + id) * shape.height + ih) * shape.width * shape.channels +
                 group * shape.group_channels + in_group - tap * shape.group_channels;
  }
  ELEMENT* target = columns + static_cast<int64>(row) * shape.out_width * row_elements + element;
#pragma unroll
  for (int i = 0; i < kPixelsAThread; ++i) {
    const int ow = first_ow + i * blockDim.y;
    if (ow >= shape.out_width) return;
    Written written = {};
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int iw = ow * STRIDE_W + shifts_w[p];
      if (!rows_inside[p] || !inside(iw, shape.width)) continue;
      const Piece piece = *reinterpret_cast<const Piece*>(sources[p] + static_cast<int64>(iw) * shape.channels);
#pragma unroll
      for (int e = 0; e < kRead; ++e) written.at[p * kRead + e] = piece.at[e];
    }
    *reinterpret_cast<Written*>(target + static_cast<int64>(ow) * row_elements) = written;
  }
}

extern "C" __global__ void im2col_unfold_nchw(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ columns,
                                              const Shape shape) {
  using Moved = Vector<ELEMENT, kVector>;
  const int pixels = shape.out_depth * shape.out_height * shape.out_width;
  const int pixel_blocks = ceil_div(pixels / kVector, blockDim.x);
  const int channel_blocks = ceil_div(shape.channels, blockDim.y);
  const int pixel = (blockIdx.x % pixel_blocks * blockDim.x + threadIdx.x) * kVector;
  const int channel = blockIdx.x / pixel_blocks % channel_blocks * blockDim.y + threadIdx.y;
  if (pixel >= pixels || channel >= shape.channels) return;

  const int64 image = blockIdx.x / pixel_blocks / channel_blocks;
  const int groups = shape.channels / shape.group_channels;
  const int group = channel / shape.group_channels;
  const int in_group = channel - group * shape.group_channels;
  const int ow = pixel % shape.out_width;
  const int oh = pixel / shape.out_width % shape.out_height;
  const int od = pixel / shape.out_width / shape.out_height;
  const ELEMENT* source = x + (image * shape.channels + channel) * shape.depth * shape.height * shape.width;
  ELEMENT* target = columns + ((image * groups + group) * shape.padded_elements + in_group * kTaps) * pixels + pixel;
  for (int fz = 0; fz < FILTER_D; ++fz) {
    const int id = input_of<STRIDE_D, DILATION_D>(od, shape.pad_front, fz);
    for (int fy = 0; fy < FILTER_H; ++fy) {
      const int ih = input_of<STRIDE_H, DILATION_H>(oh, shape.pad_top, fy);
      const bool row_inside = inside(id, shape.depth) && inside(ih, shape.height);
      const ELEMENT* row = source + (static_cast<int64>(id) * shape.height + ih) * shape.width;
      for (int fx = 0; fx < FILTER_W; ++fx) {
        Moved moved = {};
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const int iw = input_of<STRIDE_W, DILATION_W>(ow + e, shape.pad_left, fx);
          if (row_inside && inside(iw, shape.width)) moved.at[e] = row[iw];
        }
        *reinterpret_cast<Moved*>(target) = moved;
        target += pixels;
      }
    }
  }
  // The last channel of a group writes the zeros behind its filter.
  if (in_group != shape.group_channels - 1) return;
  for (int zero = shape.group_channels * kTaps; zero < shape.padded_elements; ++zero) {
    *reinterpret_cast<Moved*>(target) = Moved{};
    target += pixels;
  }
}

extern "C" __global__ void im2col_fold_nhwc(const COLUMN* __restrict__ columns, ELEMENT* __restrict__ x,
                                            const Shape shape) {
  using Read = Vector<COLUMN, kVector>;
  using Written = Vector<ELEMENT, kVector>;
  const int vector_blocks = ceil_div(shape.channels / kVector, blockDim.x);
  const int position_blocks = ceil_div(shape.width, blockDim.y);
  unsigned block = blockIdx.x;
  const int channel = (block % vector_blocks * blockDim.x + threadIdx.x) * kVector;
  block /= vector_blocks;
  const int iw = block % position_blocks * blockDim.y + threadIdx.y;
  if (channel >= shape.channels || iw >= shape.width) return;

  const int row = block / position_blocks;
  const int ih = row % shape.height;
  const int id = row / shape.height % shape.depth;
  const int64 image = row / shape.height / shape.depth;
  const int group = channel / shape.group_channels;
  const int row_elements = shape.channels / shape.group_channels * shape.padded_elements;
  const COLUMN* source = columns + group * shape.padded_elements + channel - group * shape.group_channels;
  float sums[kVector] = {};
  for (int fz = 0; fz < FILTER_D; ++fz) {
    const int od = output_of<STRIDE_D, DILATION_D>(id, shape.pad_front, fz, shape.out_depth);
    if (od < 0) continue;
    for (int fy = 0; fy < FILTER_H; ++fy) {
      const int oh = output_of<STRIDE_H, DILATION_H>(ih, shape.pad_top, fy, shape.out_height);
      if (oh < 0) continue;
      for (int fx = 0; fx < FILTER_W; ++fx) {
        const int ow = output_of<STRIDE_W, DILATION_W>(iw, shape.pad_left, fx, shape.out_width);
        if (ow < 0) continue;
        const int64 pixel = ((image * shape.out_depth + od) * shape.out_height + oh) * shape.out_width + ow;
        const int tap = (fz * FILTER_H + fy) * FILTER_W + fx;
        const Read read = *reinterpret_cast<const Read*>(source + pixel * row_elements + tap * shape.group_channels);
#pragma unroll
        for (int e = 0; e < kVector; ++e) sums[e] += convert<float>(read.at[e]);
      }
    }
  }
  Written written;
#pragma unroll
  for (int e = 0; e < kVector; ++e) written.at[e] = convert<ELEMENT>(sums[e]);
  *reinterpret_cast<Written*>(x + (static_cast<int64>(row) * shape.width + iw) * shape.channels + channel) = written;
}

extern "C" __global__ void im2col_fold_nchw(const COLUMN* __restrict__ columns, ELEMENT* __restrict__ x,
                                            const Shape shape) {
  const int positions = shape.depth * shape.height * shape.width;
  const int pixels = shape.out_depth * shape.out_height * shape.out_width;
  const int position_blocks = ceil_div(positions, blockDim.x);
  const int channel_blocks = ceil_div(shape.channels, blockDim.y * kChannelsAThread);
  const int position = blockIdx.x % position_blocks * blockDim.x + threadIdx.x;
  const int first_channel = blockIdx.x / position_blocks % channel_blocks * blockDim.y * kChannelsAThread + threadIdx.y;
  if (position >= positions) return;

  const int64 image = blockIdx.x / position_blocks / channel_blocks;
  const int groups = shape.channels / shape.group_channels;
  const int iw = position % shape.width;
  const int ih = position / shape.width % shape.height;
  const int id = position / shape.width / shape.height;
  const COLUMN* sources[kChannelsAThread];
#pragma unroll
  for (int i = 0; i < kChannelsAThread; ++i) {
    // A channel beyond the last reads the last one and writes nothing.
    const int channel = min(first_channel + i * static_cast<int>(blockDim.y), shape.channels - 1);
    const int group = channel / shape.group_channels;
    const int in_group = channel - group * shape.group_channels;
    sources[i] = columns + ((image * groups + group) * shape.padded_elements + in_group * kTaps) * pixels;
  }
  float sums[kChannelsAThread] = {};
  for (int fz = 0; fz < FILTER_D; ++fz) {
    const int od = output_of<STRIDE_D, DILATION_D>(id, shape.pad_front, fz, shape.out_depth);
    if (od < 0) continue;
    for (int fy = 0; fy < FILTER_H; ++fy) {
      const int oh = output_of<STRIDE_H, DILATION_H>(ih, shape.pad_top, fy, shape.out_height);
      if (oh < 0) continue;
      for (int fx = 0; fx < FILTER_W; ++fx) {
        const int ow = output_of<STRIDE_W, DILATION_W>(iw, shape.pad_left, fx, shape.out_width);
        if (ow < 0) continue;
        const int tap = (fz * FILTER_H + fy) * FILTER_W + fx;
        const int64 offset = static_cast<int64>(tap) * pixels + (od * shape.out_height + oh) * shape.out_width + ow;
#pragma unroll
        for (int i = 0; i < kChannelsAThread; ++i) sums[i] += convert<float>(sources[i][offset]);
      }
    }
  }
  for (int i = 0; i < kChannelsAThread; ++i) {
    const int channel = first_channel + i * blockDim.y;
    if (channel >= shape.channels) return;
    x[(image * shape.channels + channel) * positions + position] = convert<ELEMENT>(sums[i]);
  }
}

extern "C" __global__ void im2col_pad(const ELEMENT* __restrict__ filters, ELEMENT* __restrict__ padded,
                                      int filter_elements, int padded_elements, int64 size) {
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const int64 row = i / padded_elements;
    const int at = static_cast<int>(i - row * padded_elements);
    padded[i] = at < filter_elements ? filters[row * filter_elements + at] : ELEMENT{};
  }
}

extern "C" __global__ void im2col_sum(const float* __restrict__ partials, ELEMENT* __restrict__ filters,
                                      int filter_elements, int padded_elements, int64 size, int splits) {
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const int64 row = i / padded_elements;
    const int at = static_cast<int>(i - row * padded_elements);
    if (at >= filter_elements) continue;
    filters[row * filter_elements + at] = convert<ELEMENT>(sum_splits<0, int64>(partials, i, size, {0, splits, 1}));
  }
}
