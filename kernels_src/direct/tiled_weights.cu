// dw[k,c,y,x] = sum_{n,i,j} dy[n,k,i,j] * x[n, c, i*stride - pad + y*dilation, ...], through shared memory, in two
// passes.
//
// First pass: a block computes TILE_K x TILE_C filters of each of GROUPS groups, STAGE_ROWS rows of them, over every
// splits-th tile of TILE_H x TILE_W outputs of all images, and writes float32 partials[split][k][c][y][x]. A thread
// holds THREAD_K x THREAD_C filters x CHUNK columns of one row and slides over kStrip neighbouring outputs at a time.
// Second pass (finish): split-K reduction, one thread an element.
// Grid: one dimension; k blocks innermost, then c blocks, groups, filter rows, splits.
// Shape: sizes, padding and element strides; channels and out_channels are those of a group. The other constants are
// defines, checked here and in the solver.
#include "common/split_k.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K) || !defined(TILE_C)
#error "define ELEMENT, TILE_H, TILE_W, TILE_K and TILE_C"
#endif
#if !defined(GROUPS) || !defined(THREAD_K) || !defined(THREAD_C) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define GROUPS, THREAD_K, THREAD_C, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(FILTER_H) || !defined(FILTER_W) || !defined(STAGE_ROWS) || !defined(CHUNK)
#error "define FILTER_H, FILTER_W, STAGE_ROWS and CHUNK"
#endif
#if !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W)
#error "define STRIDE_H, STRIDE_W, DILATION_H and DILATION_W"
#endif
#if !defined(CHANNELS_LAST) || !defined(X_VECTOR) || !defined(Y_VECTOR)
#error "define CHANNELS_LAST, X_VECTOR and Y_VECTOR"
#endif
#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

constexpr int kTileH = TILE_H, kTileW = TILE_W, kTileK = TILE_K, kTileC = TILE_C, kGroups = GROUPS;
constexpr int kThreadK = THREAD_K, kThreadC = THREAD_C, kStrip = 4;
constexpr int kFilterH = FILTER_H, kFilterW = FILTER_W, kStageRows = STAGE_ROWS, kChunk = CHUNK;
constexpr bool kChannelsLast = CHANNELS_LAST;

constexpr int kThreadsC = kTileC / kThreadC, kThreadsK = kTileK / kThreadK;
constexpr int kChunks = ceil_div(kFilterW, kChunk);
constexpr int kThreads = kThreadsC * kThreadsK * kGroups * kStageRows * kChunks;
static_assert(kTileC % kThreadC == 0 && kTileK % kThreadK == 0 && kTileW % kStrip == 0,
              "threads must tile the block without rest");
static_assert(kThreads <= 1024, "a block has at most 1024 threads");
static_assert(kStageRows == 1 || kStageRows == kFilterH, "STAGE_ROWS must be 1 or FILTER_H");

// With one filter row (column) a block needs only the input rows (columns) that outputs start from.
constexpr int kRowStep = kStageRows == 1 ? STRIDE_H : 1, kColumnStep = kFilterW == 1 ? STRIDE_W : 1;
constexpr int kStripRow = STRIDE_H / kRowStep, kStripColumn = STRIDE_W / kColumnStep;
constexpr int kPatchRows = (kTileH - 1) * kStripRow + (kStageRows - 1) * DILATION_H + 1;
constexpr int kPatchColumns =
    round_up((kTileW - 1) * kStripColumn + (kFilterW - 1) * DILATION_W + 1, kChannelsLast ? 1 : X_VECTOR);
constexpr int kWindow = (kStrip - 1) * kStripColumn + (kChunk - 1) * DILATION_W + 1;
constexpr bool kAlignedWindow = kChunks == 1 || kChunk * DILATION_W % 4 == 0;
constexpr int kReach = (kTileW - kStrip) * kStripColumn + (kChunks - 1) * kChunk * DILATION_W + round_up(kWindow, 4);
using XTile = Tile<kGroups * kTileC, kPatchRows, kPatchColumns, round_up(maximum(kPatchColumns, kReach), 4), kRowStep,
                   kColumnStep, X_VECTOR, kChannelsLast>;
using YTile = Tile<kGroups * kTileK, kTileH, kTileW, kTileW, 1, 1, Y_VECTOR, kChannelsLast>;
static_assert(SHARED_BYTES == 4 * (XTile::kFloats + YTile::kFloats),
              "SHARED_BYTES differs from this layout: the solver computes another");

struct Shape {
  SHAPE_FIELDS
};

// Splits `rest` into its remainder by `size`, which is returned, and its quotient, which is left.
__device__ __forceinline__ int take(int& rest, int size) {
  const int remainder = rest % size;
  rest /= size;
  return remainder;
}

// The filters that a thread holds: channels k + i * kThreadsK and c + i * kThreadsC of its group, row y,
// columns from x on. Interleaved channels keep neighbouring lanes on neighbouring planes.
struct ThreadFilters {
  int c, k, group, y, x;
};

__device__ __forceinline__ ThreadFilters thread_filters(int thread) {
  ThreadFilters filters;
  filters.c = take(thread, kThreadsC);
  filters.k = take(thread, kThreadsK);
  filters.group = take(thread, kGroups);
  filters.y = take(thread, kStageRows);
  filters.x = thread * kChunk;
  return filters;
}

__device__ __forceinline__ void add_tile(float (&accumulators)[kThreadK][kThreadC][kChunk], const float* x_tile,
                                         const float* y_tile, const ThreadFilters& filters) {
  const float* x_row = x_tile + (filters.group * kTileC + filters.c) * XTile::kPlane +
                       filters.y * DILATION_H * XTile::kPitch + filters.x * DILATION_W;
  const float* y_row = y_tile + (filters.group * kTileK + filters.k) * YTile::kPlane;
#pragma unroll 1
  for (int h = 0; h < kTileH; ++h)
#pragma unroll 1
    for (int v = 0; v < kTileW; v += kStrip) {
      float dy[kThreadK][kStrip];
#pragma unroll
      for (int k = 0; k < kThreadK; ++k)
        read_floats<kStrip, true>(dy[k], y_row + k * kThreadsK * YTile::kPlane + h * YTile::kPitch + v);
#pragma unroll
      for (int c = 0; c < kThreadC; ++c) {
        float window[round_up(kWindow, 4)];
        read_floats<kWindow, kAlignedWindow>(
            window, x_row + c * kThreadsC * XTile::kPlane + h * kStripRow * XTile::kPitch + v * kStripColumn);
#pragma unroll
        for (int p = 0; p < kStrip; ++p)
#pragma unroll
          for (int k = 0; k < kThreadK; ++k)
#pragma unroll
            for (int j = 0; j < kChunk; ++j)
              accumulators[k][c][j] += dy[k][p] * window[p * kStripColumn + j * DILATION_W];
      }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    direct_tiled_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, float* __restrict__ partials,
                         const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) float shared[];
  float* const x_tile = shared;
  float* const y_tile = shared + XTile::kFloats;
  int rest = blockIdx.x;
  const int first_k = take(rest, ceil_div(shape.out_channels, kTileK)) * kTileK;
  const int first_c = take(rest, ceil_div(shape.channels, kTileC)) * kTileC;
  const int first_group = take(rest, ceil_div(shape.groups, kGroups)) * kGroups;
  const int first_y = take(rest, kFilterH / kStageRows) * kStageRows;
  const int split = rest;

  const Plane x_plane = {shape.height, shape.width, shape.x_row_stride, shape.x_column_stride};
  const Plane y_plane = {shape.out_height, shape.out_width, shape.y_row_stride, shape.y_column_stride};
  const auto x_channel = [&](int slot) {
    const int group = first_group + slot / kTileC, channel = first_c + slot % kTileC;
    return group < shape.groups && channel < shape.channels
               ? (group * shape.channels + channel) * shape.x_channel_stride
               : -1;
  };
  const auto y_channel = [&](int slot) {
    const int group = first_group + slot / kTileK, channel = first_k + slot % kTileK;
    return group < shape.groups && channel < shape.out_channels
               ? (group * shape.out_channels + channel) * shape.y_channel_stride
               : -1;
  };

  const ThreadFilters filters = thread_filters(threadIdx.x);
  const int tiles_w = ceil_div(shape.out_width, kTileW), tiles_h = ceil_div(shape.out_height, kTileH),
            tiles = shape.batch * tiles_h * tiles_w;
  float accumulators[kThreadK][kThreadC][kChunk] = {};
  for (int tile = split; tile < tiles; tile += shape.splits) {
    int image = tile;
    const int column = take(image, tiles_w) * kTileW, row = take(image, tiles_h) * kTileH;
    const int top = row * STRIDE_H - shape.pad_top + first_y * DILATION_H, left = column * STRIDE_W - shape.pad_left;
    load_tile<XTile, kThreads>(x_tile, x + image * shape.x_batch_stride, x_plane, top, left, x_channel);
    load_tile<YTile, kThreads>(y_tile, dy + image * shape.y_batch_stride, y_plane, row, column, y_channel);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();  // every thread's part of the tiles has arrived
    add_tile(accumulators, x_tile, y_tile, filters);
    __syncthreads();  // every thread has read the tiles before they are overwritten
  }

  float* const mine =
      partials + static_cast<int64>(split) * shape.groups * shape.out_channels * shape.channels * kFilterH * kFilterW;
  const int group = first_group + filters.group;
  if (group >= shape.groups) return;
#pragma unroll
  for (int i = 0; i < kThreadK; ++i)
#pragma unroll
    for (int j = 0; j < kThreadC; ++j) {
      const int out_k = first_k + filters.k + i * kThreadsK, out_c = first_c + filters.c + j * kThreadsC;
      if (out_k >= shape.out_channels || out_c >= shape.channels) continue;
      float* const to =
          mine +
          (((group * shape.out_channels + out_k) * shape.channels + out_c) * kFilterH + first_y + filters.y) * kFilterW;
#pragma unroll
      for (int t = 0; t < kChunk; ++t)
        if (filters.x + t < kFilterW) to[filters.x + t] = accumulators[i][j][t];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    direct_tiled_weights_finish(const float* __restrict__ partials, ELEMENT* __restrict__ dw,
                                const __grid_constant__ Shape shape) {
  const int element = blockIdx.x * 256 + threadIdx.x;
  const int size = shape.groups * shape.out_channels * shape.channels * kFilterH * kFilterW;
  if (element >= size) return;
  const float sum = sum_splits<0, int64>(partials, element, size, {0, shape.splits, 1});
  int rest = element;
  const int x = take(rest, kFilterW), y = take(rest, kFilterH), c = take(rest, shape.channels);
  dw[rest * shape.w_out_channel_stride + c * shape.w_channel_stride + y * shape.w_row_stride +
     x * shape.w_column_stride] = convert<ELEMENT>(sum);
}
