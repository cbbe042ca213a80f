// out[n,k,i,j] = sum_{c,y,x} in[n, c, i*stride - pad + y*dilation, ...] * filter[k,c,y,x], through shared memory.
//
// Forward; and backward data, where in is dy, c and k change places and the filter is flipped by negative strides (one
// launch for each residue of a strided convolution, which writes every stride-th row and column).
// A block computes TILE_K output channels of each of GROUPS groups, at TILE_H x TILE_W pixels of one image; it stages
// CHANNELS input channels and STAGE_ROWS filter rows at a time. A thread holds THREAD_K channels x THREAD_W pixels of a
// row and slides over CHUNK filter columns in registers. Accumulators are float32.
// Grid: one dimension, output-channel blocks innermost, then tiles of an image, then images.
// Shape: sizes, padding (may be negative) and element strides; channels are those of a group, height and width of `out`
// those that this launch computes. The other constants below are defines, checked here and in the solver.
#include "common/tile.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(ELEMENT) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K) || !defined(GROUPS)
#error "define ELEMENT, TILE_H, TILE_W, TILE_K and GROUPS"
#endif
#if !defined(THREAD_W) || !defined(THREAD_K) || !defined(CHANNELS) || !defined(STAGES) || !defined(MIN_BLOCKS)
#error "define THREAD_W, THREAD_K, CHANNELS, STAGES and MIN_BLOCKS"
#endif
#if !defined(FILTER_H) || !defined(FILTER_W) || !defined(STAGE_ROWS) || !defined(CHUNK) || !defined(FILTER_ORDER)
#error "define FILTER_H, FILTER_W, STAGE_ROWS, CHUNK and FILTER_ORDER"
#endif
#if !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W)
#error "define STRIDE_H, STRIDE_W, DILATION_H and DILATION_W"
#endif
#if !defined(CHANNELS_LAST) || !defined(VECTOR) || !defined(OUT_VECTOR) || !defined(SHARED_BYTES)
#error "define CHANNELS_LAST, VECTOR, OUT_VECTOR and SHARED_BYTES"
#endif
#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

constexpr int kTileH = TILE_H, kTileW = TILE_W, kGroupK = TILE_K, kGroups = GROUPS, kTileK = kGroups * kGroupK;
constexpr int kThreadW = THREAD_W, kThreadK = THREAD_K, kChannels = CHANNELS, kStages = STAGES;
constexpr int kFilterH = FILTER_H, kFilterW = FILTER_W, kStageRows = STAGE_ROWS, kChunk = CHUNK;
constexpr bool kChannelsLast = CHANNELS_LAST;
constexpr int kOutVector = OUT_VECTOR;

constexpr int kStripsW = kTileW / kThreadW;
constexpr int kStrips = kTileH * kStripsW;
constexpr int kThreads = kStrips * (kTileK / kThreadK);
static_assert(kTileW % kThreadW == 0 && kGroupK % kThreadK == 0, "threads must tile the block without rest");
static_assert(kThreads <= 1024, "a block has at most 1024 threads");
static_assert(kStageRows == 1 || kStageRows == kFilterH, "STAGE_ROWS must be 1 or FILTER_H");
static_assert(kThreadK == 1 || kThreadK == 2 || kThreadK % 4 == 0, "filter values must make loads of 4, 8 or 16 bytes");
static_assert((kChannelsLast ? kThreadK : kThreadW) % kOutVector == 0, "a thread must store whole vectors");

// With one filter row (column) a stage needs only the input rows (columns) that outputs start from.
constexpr int kRowStep = kStageRows == 1 ? STRIDE_H : 1, kColumnStep = kFilterW == 1 ? STRIDE_W : 1;
constexpr int kStripRow = STRIDE_H / kRowStep, kStripColumn = STRIDE_W / kColumnStep;
constexpr int kPatchRows = (kTileH - 1) * kStripRow + (kStageRows - 1) * DILATION_H + 1;
constexpr int kPatchColumns = (kTileW - 1) * kStripColumn + (kFilterW - 1) * DILATION_W + 1;
constexpr int kChunks = ceil_div(kFilterW, kChunk);
constexpr int kWindow = (kThreadW - 1) * kStripColumn + (kChunk - 1) * DILATION_W + 1;
constexpr bool kAlignedWindow =
    kWindow <= 32 && kThreadW * kStripColumn % 4 == 0 && (kChunks == 1 || kChunk * DILATION_W % 4 == 0);
constexpr int kReach = (kTileW - kThreadW) * kStripColumn + (kChunks - 1) * kChunk * DILATION_W + round_up(kWindow, 4);
constexpr int kPatchVector = kChannelsLast ? 1 : VECTOR;
using Patch = Tile<kGroups * kChannels, kPatchRows, round_up(kPatchColumns, kPatchVector),
                   round_up(maximum(round_up(kPatchColumns, kPatchVector), kReach), 4), kRowStep, kColumnStep, VECTOR,
                   kChannelsLast>;

// The staged filter is [channel][row][column][output channel]; lanes on neighbouring taps are 4 banks apart.
constexpr int kStageTaps = kStageRows * kFilterW;
constexpr int kFilterPitch = plane_pitch(kTileK);
constexpr int kFilterFloats = kChannels * kStageTaps * kFilterPitch;
constexpr int kStageFloats = Patch::kFloats + kFilterFloats;
static_assert(SHARED_BYTES == 4 * kStages * kStageFloats,
              "SHARED_BYTES differs from this layout: the solver computes another");

struct Shape {
  SHAPE_FIELDS
};

// First output, group and output channel of a block.
struct BlockOrigin {
  int n, row, column, group, k;
};

__device__ __forceinline__ BlockOrigin block_origin(const Shape& shape, unsigned block) {
  const unsigned k_blocks = ceil_div(shape.out_channels, kGroupK), group_blocks = ceil_div(shape.groups, kGroups);
  const unsigned tiles_w = ceil_div(shape.out_width, kTileW), tiles_h = ceil_div(shape.out_height, kTileH);
  BlockOrigin origin;
  origin.k = block % k_blocks * kGroupK;
  block /= k_blocks;
  origin.group = block % group_blocks * kGroups;
  block /= group_blocks;
  origin.column = block % tiles_w * kTileW;
  block /= tiles_w;
  origin.row = block % tiles_h * kTileH;
  origin.n = block / tiles_h;
  return origin;
}

// Splits `rest` into its remainder by kSize, which is returned, and its quotient, which is left.
template <int kSize>
__device__ __forceinline__ int take(int& rest) {
  const int remainder = rest % kSize;
  rest /= kSize;
  return remainder;
}

// Stages filter rows [y, y + kStageRows) of input channels [c, c + kChannels); threads walk along memory.
__device__ __forceinline__ void load_filter(float* staged, const ELEMENT* filter, const Shape& shape,
                                            const BlockOrigin& origin, int c, int y) {
#pragma unroll(kCopiesInFlight<ELEMENT>)
  for (int i = threadIdx.x; i < kChannels * kStageTaps * kTileK; i += kThreads) {
    int rest = i, tap, in, out;
    if constexpr (FILTER_ORDER == 0) {  // (out, in, taps) in memory
      tap = take<kStageTaps>(rest);
      in = take<kChannels>(rest);
      out = rest;
    } else if constexpr (FILTER_ORDER == 1) {  // (out, taps, in)
      in = take<kChannels>(rest);
      tap = take<kStageTaps>(rest);
      out = rest;
    } else if constexpr (FILTER_ORDER == 2) {  // (in, out, taps)
      tap = take<kStageTaps>(rest);
      out = take<kTileK>(rest);
      in = rest;
    } else {  // (in, taps, out)
      static_assert(FILTER_ORDER >= 0 && FILTER_ORDER <= 3, "FILTER_ORDER is 0 to 3");
      out = take<kTileK>(rest);
      tap = take<kStageTaps>(rest);
      in = rest;
    }
    const int group = origin.group + out / kGroupK, k = origin.k + out % kGroupK;
    const bool inside = c + in < shape.in_channels && k < shape.out_channels && group < shape.groups;
    const int offset = group * shape.filter_group_stride + k * shape.filter_out_channel_stride +
                       (c + in) * shape.filter_in_channel_stride + (y + tap / kFilterW) * shape.filter_row_stride +
                       tap % kFilterW * shape.filter_column_stride;
    copy_element(staged + (in * kStageTaps + tap) * kFilterPitch + out, inside ? filter + offset : filter, inside);
  }
}

__device__ __forceinline__ void load_stage(float* stage, const ELEMENT* in, const ELEMENT* filter, const Shape& shape,
                                           const BlockOrigin& origin, int c, int y) {
  const auto channel_offset = [&](int slot) {
    const int group = origin.group + slot / kChannels, channel = c + slot % kChannels;
    const bool inside = group < shape.groups && channel < shape.in_channels;
    return inside ? (group * shape.in_channels + channel) * shape.in_channel_stride : -1;
  };
  const int top = origin.row * STRIDE_H - shape.pad_top + y * DILATION_H,
            left = origin.column * STRIDE_W - shape.pad_left;
  const Plane in_plane = {shape.in_height, shape.in_width, shape.in_row_stride, shape.in_column_stride};
  load_tile<Patch, kThreads>(stage, in + origin.n * shape.in_batch_stride, in_plane, top, left, channel_offset);
  load_filter(stage + Patch::kFloats, filter, shape, origin, c, y);
  commit_copies();
}

// Adds what one filter row of one channel contributes to a thread's strip. `row` points to the strip's first input.
__device__ __forceinline__ void add_row(float (&accumulators)[kThreadK][kThreadW], const float* row,
                                        const float* taps) {
#pragma unroll(kChunks <= 2 ? kChunks : 1)
  for (int first = 0; first < kFilterW; first += kChunk) {
    float window[round_up(kWindow, 4)];
    read_floats<kWindow, kAlignedWindow>(window, row + first * DILATION_W);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (kFilterW % kChunk != 0 && first + j >= kFilterW) break;
      float values[round_up(kThreadK, 4)];
      read_floats<kThreadK, kThreadK % 4 == 0>(values, taps + (first + j) * kFilterPitch);
#pragma unroll
      for (int k = 0; k < kThreadK; ++k)
#pragma unroll
        for (int p = 0; p < kThreadW; ++p) accumulators[k][p] += values[k] * window[p * kStripColumn + j * DILATION_W];
    }
  }
}

__device__ __forceinline__ void add_stage(float (&accumulators)[kThreadK][kThreadW], const float* stage) {
  const int strip = threadIdx.x % kStrips, k = threadIdx.x / kStrips * kThreadK;
  const float* patch = stage + k / kGroupK * kChannels * Patch::kPlane + strip / kStripsW * kStripRow * Patch::kPitch +
                       strip % kStripsW * kThreadW * kStripColumn;
  const float* taps = stage + Patch::kFloats + k;
#pragma unroll(kStageTaps == 1 ? 2 : 1)
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll(kStageTaps <= 25 ? kStageRows : 1)
    for (int y = 0; y < kStageRows; ++y)
      add_row(accumulators, patch + c * Patch::kPlane + y * DILATION_H * Patch::kPitch,
              taps + (c * kStageTaps + y * kFilterW) * kFilterPitch);
  }
}

__device__ __forceinline__ void store(const float (&accumulators)[kThreadK][kThreadW], ELEMENT* out, const Shape& shape,
#ifdef EPILOGUE
                                      const Epilogue& epilogue,
#endif
                                      const BlockOrigin& origin) {
  const int strip = threadIdx.x % kStrips, first_k = threadIdx.x / kStrips * kThreadK;
  const int row = origin.row + strip / kStripsW, first_column = origin.column + strip % kStripsW * kThreadW;
  const int group = origin.group + first_k / kGroupK, first = origin.k + first_k % kGroupK;
  if (row >= shape.out_height || group >= shape.groups) return;
  const int columns_left = shape.out_width - first_column, channels_left = shape.out_channels - first;
  ELEMENT* to = out + origin.n * shape.out_batch_stride +
                (group * shape.out_channels + first) * shape.out_channel_stride + row * shape.out_row_stride +
                first_column * shape.out_column_stride;
  constexpr int kStepK = kChannelsLast ? kOutVector : 1, kStepW = kChannelsLast ? 1 : kOutVector;
#pragma unroll
  for (int k = 0; k < kThreadK; k += kStepK) {
    if (k >= channels_left) return;
#pragma unroll
    for (int p = 0; p < kThreadW; p += kStepW) {
      Vector<ELEMENT, kOutVector> values;
#ifdef EPILOGUE
      if (p >= columns_left) continue;
      const int64 at = to + p * shape.out_column_stride - out;
      const int channel = group * shape.out_channels + first + k, channels = shape.groups * shape.out_channels;
#pragma unroll
      for (int i = 0; i < kOutVector; ++i) {
        const float sum = kChannelsLast ? accumulators[k + i % kStepK][p] : accumulators[k][p + i % kStepW];
        const float result = finish_at(sum, epilogue, origin.n, channel + (kChannelsLast ? i : 0), channels, at + i);
        values.at[i] = convert<ELEMENT>(result);
      }
#else
#pragma unroll
      for (int i = 0; i < kOutVector; ++i)
        values.at[i] =
            convert<ELEMENT>(kChannelsLast ? accumulators[k + i % kStepK][p] : accumulators[k][p + i % kStepW]);
#endif
      if (p < columns_left) *reinterpret_cast<Vector<ELEMENT, kOutVector>*>(to + p * shape.out_column_stride) = values;
    }
    to += kStepK * shape.out_channel_stride;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    direct_tiled(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter, ELEMENT* __restrict__ out,
#ifdef EPILOGUE
                 const __grid_constant__ Shape shape, const __grid_constant__ Epilogue epilogue) {
#else
                 const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(16) float shared[];
  const BlockOrigin origin = block_origin(shape, blockIdx.x);
  constexpr int kSteps = kFilterH / kStageRows;
  const int steps = ceil_div(shape.in_channels, kChannels) * kSteps;
  const auto load = [&](int step) {
    load_stage(shared + step % kStages * kStageFloats, in, filter, shape, origin, step / kSteps * kChannels,
               step % kSteps * kStageRows);
  };
  float accumulators[kThreadK][kThreadW] = {};
  if (kStages == 2 && steps > 0) load(0);
  for (int step = 0; step < steps; ++step) {
    if (kStages == 1) load(step);
    if (kStages == 2 && step + 1 < steps) {
      load(step + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();  // every thread's part of the stage has arrived
    add_stage(accumulators, shared + step % kStages * kStageFloats);
    __syncthreads();  // every thread has read the stage before it is overwritten
  }
#ifdef EPILOGUE
  store(accumulators, out, shape, epilogue, origin);
#else
  store(accumulators, out, shape, origin);
#endif
}
