// dw[k,c,y,x] = sum_{n,i,j} dy[n,k,i,j] * x[n, c, i*stride - pad + y*dilation, ...], through shared memory, in two
// passes.
//
// First pass: a block computes TILE_K x TILE_C filters of each of GROUPS groups, STAGE_ROWS rows of them, over every
// splits-th tile of TILE_H x TILE_W outputs of all images, and writes float32 partials[split][k][c][y][x]. A thread
// holds THREAD_K x THREAD_C filters x CHUNK columns of one row and slides over kStrip neighbouring outputs at a time.
// Second pass (finish): split-K reduction, one thread an element.
// Grid: one dimension; k blocks innermost, then c blocks, groups, filter rows, splits.
// Sizes, padding and strides are arguments; the other constants are defines, checked here and in the solver.
#include "common/split_k.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K) || !defined(TILE_C)
#error "define ELEMENT, TILE_H, TILE_W, TILE_K and TILE_C"
#endif
#if !defined(GROUPS) || !defined(THREAD_K) || !defined(THREAD_C) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define GROUPS, THREAD_K, THREAD_C, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(FILTER_Y) || !defined(FILTER_X) || !defined(STAGE_ROWS) || !defined(CHUNK)
#error "define FILTER_Y, FILTER_X, STAGE_ROWS and CHUNK"
#endif
#if !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W)
#error "define STRIDE_H, STRIDE_W, DILATION_H and DILATION_W"
#endif
#if !defined(CHANNELS_LAST) || !defined(X_VECTOR) || !defined(Y_VECTOR)
#error "define CHANNELS_LAST, X_VECTOR and Y_VECTOR"
#endif

constexpr int kTileH = TILE_H, kTileW = TILE_W, kTileK = TILE_K, kTileC = TILE_C, kGroups = GROUPS;
constexpr int kThreadK = THREAD_K, kThreadC = THREAD_C, kStrip = 4;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kStageRows = STAGE_ROWS, kChunk = CHUNK;
constexpr bool kChannelsLast = CHANNELS_LAST;

constexpr int kThreadsC = kTileC / kThreadC, kThreadsK = kTileK / kThreadK;
constexpr int kChunks = ceil_div(kFilterX, kChunk);
constexpr int kThreads = kThreadsC * kThreadsK * kGroups * kStageRows * kChunks;
static_assert(kTileC % kThreadC == 0 && kTileK % kThreadK == 0 && kTileW % kStrip == 0,
              "threads must tile the block without rest");
static_assert(kThreads <= 1024, "a block has at most 1024 threads");
static_assert(kStageRows == 1 || kStageRows == kFilterY, "STAGE_ROWS must be 1 or FILTER_Y");

// With one filter row (column) a block needs only the input rows (columns) that outputs start from.
constexpr int kRowStep = kStageRows == 1 ? STRIDE_H : 1, kColumnStep = kFilterX == 1 ? STRIDE_W : 1;
constexpr int kStripRow = STRIDE_H / kRowStep, kStripColumn = STRIDE_W / kColumnStep;
constexpr int kPatchRows = (kTileH - 1) * kStripRow + (kStageRows - 1) * DILATION_H + 1;
constexpr int kPatchColumns =
    round_up((kTileW - 1) * kStripColumn + (kFilterX - 1) * DILATION_W + 1, kChannelsLast ? 1 : X_VECTOR);
constexpr int kWindow = (kStrip - 1) * kStripColumn + (kChunk - 1) * DILATION_W + 1;
constexpr bool kAlignedWindow = kChunks == 1 || kChunk * DILATION_W % 4 == 0;
constexpr int kReach = (kTileW - kStrip) * kStripColumn + (kChunks - 1) * kChunk * DILATION_W + round_up(kWindow, 4);
using XTile = Tile<kGroups * kTileC, kPatchRows, kPatchColumns, round_up(maximum(kPatchColumns, kReach), 4), kRowStep,
                   kColumnStep, X_VECTOR, kChannelsLast>;
using YTile = Tile<kGroups * kTileK, kTileH, kTileW, kTileW, 1, 1, Y_VECTOR, kChannelsLast>;
static_assert(SHARED_BYTES == 4 * (XTile::kFloats + YTile::kFloats),
              "SHARED_BYTES differs from this layout: the solver computes another");

// Splits `rest` into its remainder by `size`, which is returned, and its quotient, which is left.
__device__ __forceinline__ int take(int& rest, int size) {
  const int remainder = rest % size;
  rest /= size;
  return remainder;
}

// The part of the filters that a thread holds: channels k + i * kThreadsK and c + i * kThreadsC of its group, row y,
// columns from x on. Interleaved channels keep neighbouring lanes on neighbouring planes.
struct Share {
  int c, k, group, y, x;
};

__device__ __forceinline__ Share share_of(int thread) {
  Share share;
  share.c = take(thread, kThreadsC);
  share.k = take(thread, kThreadsK);
  share.group = take(thread, kGroups);
  share.y = take(thread, kStageRows);
  share.x = thread * kChunk;
  return share;
}

__device__ __forceinline__ void add_tile(float (&accumulators)[kThreadK][kThreadC][kChunk], const float* x_tile,
                                         const float* y_tile, const Share& share) {
  const float* x_row = x_tile + (share.group * kTileC + share.c) * XTile::kPlane +
                       share.y * DILATION_H * XTile::kPitch + share.x * DILATION_W;
  const float* y_row = y_tile + (share.group * kTileK + share.k) * YTile::kPlane;
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
                         int n, int c, int k, int groups, int splits, int in_height, int in_width, int in_n, int in_c,
                         int in_h, int in_w, int rows, int columns, int y_n, int y_k, int y_h, int y_w, int pad_h,
                         int pad_w) {
  extern __shared__ __align__(16) float shared[];
  float* const x_tile = shared;
  float* const y_tile = shared + XTile::kFloats;
  const int group_c = c / groups, group_k = k / groups;
  int rest = blockIdx.x;
  const int first_k = take(rest, ceil_div(group_k, kTileK)) * kTileK;
  const int first_c = take(rest, ceil_div(group_c, kTileC)) * kTileC;
  const int first_group = take(rest, ceil_div(groups, kGroups)) * kGroups;
  const int first_y = take(rest, kFilterY / kStageRows) * kStageRows;
  const int split = rest;

  const Plane x_plane = {in_height, in_width, in_h, in_w}, y_plane = {rows, columns, y_h, y_w};
  const auto x_channel = [&](int slot) {
    const int group = first_group + slot / kTileC, channel = first_c + slot % kTileC;
    return group < groups && channel < group_c ? (group * group_c + channel) * in_c : -1;
  };
  const auto y_channel = [&](int slot) {
    const int group = first_group + slot / kTileK, channel = first_k + slot % kTileK;
    return group < groups && channel < group_k ? (group * group_k + channel) * y_k : -1;
  };

  const Share share = share_of(threadIdx.x);
  const int tiles_w = ceil_div(columns, kTileW), tiles_h = ceil_div(rows, kTileH), tiles = n * tiles_h * tiles_w;
  float accumulators[kThreadK][kThreadC][kChunk] = {};
  for (int tile = split; tile < tiles; tile += splits) {
    int place = tile;
    const int column = take(place, tiles_w) * kTileW, row = take(place, tiles_h) * kTileH;
    const int top = row * STRIDE_H - pad_h + first_y * DILATION_H, left = column * STRIDE_W - pad_w;
    load_tile<XTile, kThreads>(x_tile, x + place * in_n, x_plane, top, left, x_channel);
    load_tile<YTile, kThreads>(y_tile, dy + place * y_n, y_plane, row, column, y_channel);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();  // every thread's part of the tiles has arrived
    add_tile(accumulators, x_tile, y_tile, share);
    __syncthreads();  // every thread has read the tiles before they are overwritten
  }

  float* const mine = partials + static_cast<int64>(split) * k * group_c * kFilterY * kFilterX;
  const int group = first_group + share.group;
  if (group >= groups) return;
#pragma unroll
  for (int i = 0; i < kThreadK; ++i)
#pragma unroll
    for (int j = 0; j < kThreadC; ++j) {
      const int out_k = first_k + share.k + i * kThreadsK, out_c = first_c + share.c + j * kThreadsC;
      if (out_k >= group_k || out_c >= group_c) continue;
      float* const to =
          mine + (((group * group_k + out_k) * group_c + out_c) * kFilterY + first_y + share.y) * kFilterX;
#pragma unroll
      for (int t = 0; t < kChunk; ++t)
        if (share.x + t < kFilterX) to[share.x + t] = accumulators[i][j][t];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    direct_tiled_weights_finish(const float* __restrict__ partials, ELEMENT* __restrict__ dw, int size, int splits,
                                int group_c, int w_k, int w_c, int w_y, int w_x) {
  const int element = blockIdx.x * 256 + threadIdx.x;
  if (element >= size) return;
  const float sum = sum_splits<0, int64>(partials, element, size, {0, splits, 1});
  int rest = element;
  const int x = take(rest, kFilterX), y = take(rest, kFilterY), c = take(rest, group_c);
  dw[rest * w_k + c * w_c + y * w_y + x * w_x] = convert<ELEMENT>(sum);
}
