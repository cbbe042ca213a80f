// Columns of a convolution and their inverse, in three spatial dimensions (fewer are lifted).
//   unfold: columns[pixel, channel, tap] = x[channel, pixel * STRIDE - pad + tap * DILATION], zero outside x
//   fold:   x[channel, position] = sum over the taps whose pixel exists of columns[pixel, channel, tap], in float;
//           reads instead of adding into x: no atomics, equal bits on every run
//   nhwc: x (images, d, h, w, channels), columns (images, pixels, groups, depth); depth: taps, group_channels, zeros
//   nchw: x (images, channels, d, h, w), columns (images, groups, depth, pixels); depth: group_channels, taps, zeros
//   pad, sum: filters of width taps * group_channels to rows of `depth`; partial sums of such rows back, in float
// Defines: ELEMENT, COLUMN (types of x and of the columns, equal for unfold), FILTER_*, STRIDE_*, DILATION_* of D, H
// and W, BOUNDED (whether a tap can fall outside x), VECTOR (elements written at once: of depth, channels or pixels),
// READ (elements of x that nhwc's unfold reads at once; divides VECTOR and group_channels).
// Blocks of at most 256: x counts vectors (nhwc) or pixels (nchw), y counts pixels (nhwc) or channels (nchw).
#include "common/split_k.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(COLUMN) || !defined(BOUNDED) || !defined(VECTOR) || !defined(READ)
#error "im2col.cu needs ELEMENT, COLUMN, BOUNDED, VECTOR and READ"
#endif
#if !defined(FILTER_D) || !defined(FILTER_H) || !defined(FILTER_W)
#error "im2col.cu needs FILTER_D, FILTER_H and FILTER_W"
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
                                              int channels, int group_channels, int depth, int in_d, int in_h, int in_w,
                                              int out_d, int out_h, int out_w, int pad_d, int pad_h, int pad_w) {
  using Written = Vector<ELEMENT, kVector>;
  using Piece = Vector<ELEMENT, kRead>;
  const int row_elements = channels / group_channels * depth;
  const int vector_blocks = ceil_div(row_elements / kVector, blockDim.x);
  const int pixel_blocks = ceil_div(out_w, blockDim.y * kPixelsAThread);
  unsigned block = blockIdx.x;
  const int element = (block % vector_blocks * blockDim.x + threadIdx.x) * kVector;
  if (element >= row_elements) return;
  block /= vector_blocks;
  const int first_ow = block % pixel_blocks * blockDim.y * kPixelsAThread + threadIdx.y;
  const int row = block / pixel_blocks;

  const int group = element / depth;
  const int oh = row % out_h;
  const int od = row / out_h % out_d;
  const int64 image = row / out_h / out_d;
  const ELEMENT* sources[kPieces];
  int shifts_w[kPieces];
  bool rows_inside[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int in_group = element - group * depth + p * kRead;
    const int tap = in_group / group_channels;
    const int id = input_of<STRIDE_D, DILATION_D>(od, pad_d, tap / (FILTER_H * FILTER_W));
    const int ih = input_of<STRIDE_H, DILATION_H>(oh, pad_h, tap / FILTER_W % FILTER_H);
    shifts_w[p] = tap % FILTER_W * DILATION_W - pad_w;
    rows_inside[p] = tap < kTaps && inside(id, in_d) && inside(ih, in_h);
    sources[p] = x + ((image * in_d + id) * in_h + ih) * in_w * channels + group * group_channels + in_group -
                 tap * group_channels;
  }
  ELEMENT* target = columns + static_cast<int64>(row) * out_w * row_elements + element;
#pragma unroll
  for (int i = 0; i < kPixelsAThread; ++i) {
    const int ow = first_ow + i * blockDim.y;
    if (ow >= out_w) return;
    Written written = {};
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int iw = ow * STRIDE_W + shifts_w[p];
      if (!rows_inside[p] || !inside(iw, in_w)) continue;
      const Piece piece = *reinterpret_cast<const Piece*>(sources[p] + static_cast<int64>(iw) * channels);
#pragma unroll
      for (int e = 0; e < kRead; ++e) written.at[p * kRead + e] = piece.at[e];
    }
    *reinterpret_cast<Written*>(target + static_cast<int64>(ow) * row_elements) = written;
  }
}

extern "C" __global__ void im2col_unfold_nchw(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ columns,
                                              int channels, int group_channels, int depth, int in_d, int in_h, int in_w,
                                              int out_d, int out_h, int out_w, int pad_d, int pad_h, int pad_w) {
  using Moved = Vector<ELEMENT, kVector>;
  const int pixels = out_d * out_h * out_w;
  const int pixel_blocks = ceil_div(pixels / kVector, blockDim.x);
  const int channel_blocks = ceil_div(channels, blockDim.y);
  const int pixel = (blockIdx.x % pixel_blocks * blockDim.x + threadIdx.x) * kVector;
  const int channel = blockIdx.x / pixel_blocks % channel_blocks * blockDim.y + threadIdx.y;
  if (pixel >= pixels || channel >= channels) return;

  const int64 image = blockIdx.x / pixel_blocks / channel_blocks;
  const int groups = channels / group_channels;
  const int group = channel / group_channels;
  const int in_group = channel - group * group_channels;
  const int ow = pixel % out_w;
  const int oh = pixel / out_w % out_h;
  const int od = pixel / out_w / out_h;
  const ELEMENT* source = x + (image * channels + channel) * in_d * in_h * in_w;
  ELEMENT* target = columns + ((image * groups + group) * depth + in_group * kTaps) * pixels + pixel;
  for (int fz = 0; fz < FILTER_D; ++fz) {
    const int id = input_of<STRIDE_D, DILATION_D>(od, pad_d, fz);
    for (int fy = 0; fy < FILTER_H; ++fy) {
      const int ih = input_of<STRIDE_H, DILATION_H>(oh, pad_h, fy);
      const bool row_inside = inside(id, in_d) && inside(ih, in_h);
      const ELEMENT* row = source + (static_cast<int64>(id) * in_h + ih) * in_w;
      for (int fx = 0; fx < FILTER_W; ++fx) {
        Moved moved = {};
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const int iw = input_of<STRIDE_W, DILATION_W>(ow + e, pad_w, fx);
          if (row_inside && inside(iw, in_w)) moved.at[e] = row[iw];
        }
        *reinterpret_cast<Moved*>(target) = moved;
        target += pixels;
      }
    }
  }
  // The last channel of a group writes the zeros behind its filter's width.
  if (in_group != group_channels - 1) return;
  for (int zero = group_channels * kTaps; zero < depth; ++zero) {
    *reinterpret_cast<Moved*>(target) = Moved{};
    target += pixels;
  }
}

extern "C" __global__ void im2col_fold_nhwc(const COLUMN* __restrict__ columns, ELEMENT* __restrict__ x, int channels,
                                            int group_channels, int depth, int in_d, int in_h, int in_w, int out_d,
                                            int out_h, int out_w, int pad_d, int pad_h, int pad_w) {
  using Read = Vector<COLUMN, kVector>;
  using Written = Vector<ELEMENT, kVector>;
  const int vector_blocks = ceil_div(channels / kVector, blockDim.x);
  const int position_blocks = ceil_div(in_w, blockDim.y);
  unsigned block = blockIdx.x;
  const int channel = (block % vector_blocks * blockDim.x + threadIdx.x) * kVector;
  block /= vector_blocks;
  const int iw = block % position_blocks * blockDim.y + threadIdx.y;
  if (channel >= channels || iw >= in_w) return;

  const int row = block / position_blocks;
  const int ih = row % in_h;
  const int id = row / in_h % in_d;
  const int64 image = row / in_h / in_d;
  const int group = channel / group_channels;
  const int row_elements = channels / group_channels * depth;
  const COLUMN* source = columns + group * depth + channel - group * group_channels;
  float sums[kVector] = {};
  for (int fz = 0; fz < FILTER_D; ++fz) {
    const int od = output_of<STRIDE_D, DILATION_D>(id, pad_d, fz, out_d);
    if (od < 0) continue;
    for (int fy = 0; fy < FILTER_H; ++fy) {
      const int oh = output_of<STRIDE_H, DILATION_H>(ih, pad_h, fy, out_h);
      if (oh < 0) continue;
      for (int fx = 0; fx < FILTER_W; ++fx) {
        const int ow = output_of<STRIDE_W, DILATION_W>(iw, pad_w, fx, out_w);
        if (ow < 0) continue;
        const int64 pixel = ((image * out_d + od) * out_h + oh) * out_w + ow;
        const int tap = (fz * FILTER_H + fy) * FILTER_W + fx;
        const Read read = *reinterpret_cast<const Read*>(source + pixel * row_elements + tap * group_channels);
#pragma unroll
        for (int e = 0; e < kVector; ++e) sums[e] += convert<float>(read.at[e]);
      }
    }
  }
  Written written;
#pragma unroll
  for (int e = 0; e < kVector; ++e) written.at[e] = convert<ELEMENT>(sums[e]);
  *reinterpret_cast<Written*>(x + (static_cast<int64>(row) * in_w + iw) * channels + channel) = written;
}

extern "C" __global__ void im2col_fold_nchw(const COLUMN* __restrict__ columns, ELEMENT* __restrict__ x, int channels,
                                            int group_channels, int depth, int in_d, int in_h, int in_w, int out_d,
                                            int out_h, int out_w, int pad_d, int pad_h, int pad_w) {
  const int positions = in_d * in_h * in_w;
  const int pixels = out_d * out_h * out_w;
  const int position_blocks = ceil_div(positions, blockDim.x);
  const int channel_blocks = ceil_div(channels, blockDim.y * kChannelsAThread);
  const int position = blockIdx.x % position_blocks * blockDim.x + threadIdx.x;
  const int first_channel = blockIdx.x / position_blocks % channel_blocks * blockDim.y * kChannelsAThread + threadIdx.y;
  if (position >= positions) return;

  const int64 image = blockIdx.x / position_blocks / channel_blocks;
  const int groups = channels / group_channels;
  const int iw = position % in_w;
  const int ih = position / in_w % in_h;
  const int id = position / in_w / in_h;
  const COLUMN* sources[kChannelsAThread];
#pragma unroll
  for (int i = 0; i < kChannelsAThread; ++i) {
    // A channel beyond the last reads the last one and writes nothing.
    const int channel = min(first_channel + i * static_cast<int>(blockDim.y), channels - 1);
    const int group = channel / group_channels;
    const int in_group = channel - group * group_channels;
    sources[i] = columns + ((image * groups + group) * depth + in_group * kTaps) * pixels;
  }
  float sums[kChannelsAThread] = {};
  for (int fz = 0; fz < FILTER_D; ++fz) {
    const int od = output_of<STRIDE_D, DILATION_D>(id, pad_d, fz, out_d);
    if (od < 0) continue;
    for (int fy = 0; fy < FILTER_H; ++fy) {
      const int oh = output_of<STRIDE_H, DILATION_H>(ih, pad_h, fy, out_h);
      if (oh < 0) continue;
      for (int fx = 0; fx < FILTER_W; ++fx) {
        const int ow = output_of<STRIDE_W, DILATION_W>(iw, pad_w, fx, out_w);
        if (ow < 0) continue;
        const int tap = (fz * FILTER_H + fy) * FILTER_W + fx;
        const int64 offset = static_cast<int64>(tap) * pixels + (od * out_h + oh) * out_w + ow;
#pragma unroll
        for (int i = 0; i < kChannelsAThread; ++i) sums[i] += convert<float>(sources[i][offset]);
      }
    }
  }
  for (int i = 0; i < kChannelsAThread; ++i) {
    const int channel = first_channel + i * blockDim.y;
    if (channel >= channels) return;
    x[(image * channels + channel) * positions + position] = convert<ELEMENT>(sums[i]);
  }
}

extern "C" __global__ void im2col_pad(const ELEMENT* __restrict__ filters, ELEMENT* __restrict__ padded, int width,
                                      int depth, int64 size) {
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const int64 row = i / depth;
    const int at = static_cast<int>(i - row * depth);
    padded[i] = at < width ? filters[row * width + at] : ELEMENT{};
  }
}

extern "C" __global__ void im2col_sum(const float* __restrict__ partials, ELEMENT* __restrict__ filters, int width,
                                      int depth, int64 size, int count) {
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const int64 row = i / depth;
    const int at = static_cast<int>(i - row * depth);
    if (at >= width) continue;
    filters[row * width + at] = convert<ELEMENT>(sum_splits<0, int64>(partials, i, size, {0, count, 1}));
  }
}
