// What kernels that stream rows of dy have in common: strips, rows on their way to shared memory, and products of rows
// that are added to pixels of dx. few_channels/data_rows.cu tells of strips and s2d blocks.
//
// Defines: those checked below; SHAPE_FIELDS as ROWS_SHAPE of solvers/few_channels/shapes.py declares them.
#pragma once

#include "few_channels/row_copies.cuh"
#include "common/divisor.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(COLUMNS) || !defined(COLUMN_STEP) || !defined(BLOCKS)
#error "define STRIDE_Y, STRIDE_X, COLUMNS, COLUMN_STEP and BLOCKS"
#endif
#if !defined(WARPS_M) || !defined(WARPS_N) || !defined(WARPS_K) || !defined(STAGES) || !defined(CHANNELS_LAST)
#error "define WARPS_M, WARPS_N, WARPS_K, STAGES and CHANNELS_LAST"
#endif
#if !defined(IN_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES) || !defined(SHAPE_FIELDS)
#error "define IN_VECTOR, MIN_BLOCKS, SHARED_BYTES and SHAPE_FIELDS"
#endif

constexpr int kThreads = 32 * WARPS_M * WARPS_N * WARPS_K, kTaps = CHANNELS * FILTER_Y * FILTER_X;
static_assert(STAGES >= 2, "STAGES is at least 2: a row is loaded while another is read");
static_assert(COLUMNS % 16 == 0 && COLUMNS <= 16 * BLOCKS * WARPS_M,
              "COLUMNS is a multiple of 16 that the warps cover");

// S2d blocks along an axis that meet an output, and rows of dx that a row of dy completes and that meet it.
constexpr int kS2dY = ceil_div(FILTER_Y, STRIDE_Y), kS2dX = ceil_div(FILTER_X, STRIDE_X);
constexpr int kCompleteRows = STRIDE_Y < FILTER_Y ? STRIDE_Y : FILTER_Y;
static_assert(COLUMN_STEP + kS2dX - 1 <= COLUMNS || COLUMN_STEP == 0,
              "tiles overlap by the columns that an s2d block meets, unless there is one tile");

// The pixels are in s2d blocks of rows from `first_row` to before `end_row`, and columns likewise. Tiles of columns of
// dy begin at `first_out_column`. A strip has `strip_rows` rows of s2d blocks; an image has `image_strips` strips, a
// row of s2d blocks `column_tiles`.
struct Shape {
  SHAPE_FIELDS
};

// What a block computes: of `image`, columns of dy from `column` on; s2d blocks of rows from `begin` to before `end`,
// of columns from `first_s2d` to before `end_s2d`.
struct Strip {
  int image, column, first_s2d, end_s2d, begin, end;
};

__device__ __forceinline__ Strip strip_of(const Shape& shape) {
  const int image = static_cast<int>(blockIdx.x) / shape.image_strips;
  const int in_image = blockIdx.x - image * shape.image_strips.by;
  const int number = in_image / shape.column_tiles, tile = in_image - number * shape.column_tiles.by;
  const int column = shape.first_out_column + tile * COLUMN_STEP, begin = shape.first_row + number * shape.strip_rows;
  return {image,
          column,
          tile == 0 ? shape.first_column : column + kS2dX - 1,
          tile + 1 == shape.column_tiles.by ? shape.end_column : column + COLUMN_STEP + kS2dX - 1,
          begin,
          min(begin + shape.strip_rows, shape.end_row)};
}

// Starts to copy a row of dy, as one group, and nothing if there is none. Columns that dy lacks stay as they are: no
// s2d block reads their products. kPitch bytes are between columns of filters if CHANNELS_LAST, else between filters.
template <int kPitch>
__device__ __forceinline__ void load_row(unsigned char* to, const ELEMENT* __restrict__ dy, const Shape& shape,
                                         const Strip& strip, int row, bool wanted) {
  if (wanted && row >= 0 && row < shape.out_height) {
    const int channel_stride = shape.out_height * shape.out_width;
    const ELEMENT* const image = dy + strip.image * FILTERS * channel_stride;
    const int at = row * shape.out_width + strip.column, columns = min(COLUMNS, shape.out_width - strip.column);
    if constexpr (CHANNELS_LAST)
      copy_channels_last<kThreads, COLUMNS, FILTERS, IN_VECTOR, kPitch>(to, image + at * FILTERS, 0, columns);
    else
      copy_channels_first<kThreads, COLUMNS, FILTERS, IN_VECTOR, kPitch>(to, image + at, channel_stride, columns);
  }
  commit_copies();
}

// Clears what is staged of kDepth filters beyond the last, once: rows that are loaded leave it as it is.
template <int kDepth, int kPitch, int kRowBytes>
__device__ __forceinline__ void clear_rest(unsigned char* stages) {
  constexpr int kRest = kDepth - FILTERS, kSome = maximum(1, kRest), kBytes = sizeof(ELEMENT);
  if constexpr (kRest > 0)
    for (int i = threadIdx.x; i < STAGES * kRest * COLUMNS; i += kThreads) {
      const int column = i % COLUMNS, k = FILTERS + i / COLUMNS % kSome;
      unsigned char* const stage = stages + i / COLUMNS / kSome * kRowBytes;
      const int at = CHANNELS_LAST ? column * kPitch + kBytes * k : k * kPitch + kBytes * column;
      *reinterpret_cast<ELEMENT*>(stage + at) = convert<ELEMENT>(0.0f);
    }
}

// A warp's coordinates in the block's product: its slice of M, N and K.
struct WarpCoord {
  int m, n, k;
};

__device__ __forceinline__ bool has_block(int b, const WarpCoord& coord) {
  return COLUMNS == 16 * BLOCKS * WARPS_M || b * WARPS_M + coord.m < COLUMNS / 16;
}

// Adds the products that meet the pixels of a row of s2d blocks, and writes the pixels. A thread has an s2d block of a
// row of dx, whose taps are known when this is compiled, but a pixel where s2d blocks are wide: stores of a warp would
// be far apart. kPitch floats are between taps in `products`, kRow taps between rows of dx, kSlice between slices
// of the filters (sliced-K).
template <int kPitch, int kRow, int kSlice>
__device__ __forceinline__ void col2im(ELEMENT* __restrict__ dx, const Shape& shape, const float* products,
                                       const Strip& strip, int row) {
  constexpr int kPixels = STRIDE_X <= 2 ? STRIDE_X : 1, kSegments = STRIDE_X / kPixels;
  const int count = kSegments * (strip.end_s2d - strip.first_s2d);
#pragma unroll 1
  for (int i = threadIdx.x; i < STRIDE_Y * count; i += kThreads) {
    int e = 0;
#pragma unroll
    for (int other = 1; other < STRIDE_Y; ++other) e += i >= other * count;
    const int segment = i - e * count, s2d = strip.first_s2d + segment / kSegments, begin = segment % kSegments;
    const int h = row * STRIDE_Y + e - shape.pad_top;
    if (static_cast<unsigned>(h) >= static_cast<unsigned>(shape.height)) continue;
    float acc[kPixels][CHANNELS] = {};
    const float* const from = products + e * kRow * kPitch + s2d - strip.column;
#pragma unroll
    for (int q = 0; q < kS2dX; ++q) {
      if (static_cast<unsigned>(s2d - q) >= static_cast<unsigned>(shape.out_width) || e >= FILTER_Y) continue;
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        const int s = begin + p + q * STRIDE_X;
        if (s >= FILTER_X) continue;
#pragma unroll
        for (int slice = 0; slice < WARPS_K; ++slice)
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c) acc[p][c] += from[(slice * kSlice + s * CHANNELS + c) * kPitch - q];
      }
    }
    const int first = s2d * STRIDE_X + begin - shape.pad_left, column_stride = CHANNELS_LAST ? CHANNELS : 1;
    ELEMENT* const to = dx +
                        (CHANNELS_LAST ? strip.image * shape.height + h : strip.image * CHANNELS * shape.height + h) *
                            shape.width * column_stride +
                        first * column_stride;
    const int channel_stride = CHANNELS_LAST ? 1 : shape.height * shape.width;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (static_cast<unsigned>(first + p) >= static_cast<unsigned>(shape.width)) continue;
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) to[p * column_stride + c * channel_stride] = convert<ELEMENT>(acc[p][c]);
    }
  }
}
