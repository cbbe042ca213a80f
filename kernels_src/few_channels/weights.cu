// dw[k,c,r,s] = sum_{n,i,j} dy[n,k,i,j] * x[n, c, i*STRIDE_Y - pad_top + r, j*STRIDE_X - pad_left + s] for CHANNELS <=
// 4 channels, on tensor cores with float32 accumulators.
//
// A block stages tiles of TILE_H x TILE_W outputs: TILE_K filters of dy, STAGES tiles at a time, and the input tile of
// x with its halo, two at a time, with pixels of four channels. A window is what one output, or two neighbours if
// STRIDE_X is odd, meets of the input tile: of each row pixels side by side, the first of them even (implicit
// im2col). M is filters, for each output of a window, N the elements of a window, K is windows; ldmatrix reads both as
// they lie. WARPS_Y warps share the filter's rows, WARPS_K its filters and WARPS_P the windows. The accumulators of a
// window's outputs are added at the end. Grid: blocks of filters, times `tile_step` blocks that tiles are dealt to
// (split-K). Each writes float32 partials, which few_channels_weights_finish adds in a fixed order.
#include "common/copy_bytes.cuh"
#include "common/split_k.cuh"
#include "common/mma.cuh"
#include "few_channels/output_tiles.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K)
#error "define STRIDE_Y, STRIDE_X, TILE_H, TILE_W and TILE_K"
#endif
#if !defined(WARPS_Y) || !defined(WARPS_K) || !defined(WARPS_P) || !defined(CHANNELS_LAST) || !defined(OFFSET)
#error "define WARPS_Y, WARPS_K, WARPS_P, CHANNELS_LAST and OFFSET"
#endif
#if !defined(IN_VECTOR) || !defined(OUT_VECTOR) || !defined(STAGES) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define IN_VECTOR, OUT_VECTOR, STAGES, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kThreads = 32 * WARPS_Y * WARPS_K * WARPS_P, kTileH = TILE_H, kTileW = TILE_W, kTileK = TILE_K;
static_assert(kTileK % (16 * WARPS_K) == 0, "TILE_K is a multiple of 16 filters a warp");

// Windows: outputs of one, pixels from one to the next, 16-byte words of a row, windows of a row and of a tile.
constexpr int kOutputs = 1 + STRIDE_X % 2, kWindowPixels = kOutputs * STRIDE_X;
constexpr int kRowWords = ceil_div(FILTER_X + (kOutputs - 1) * STRIDE_X, 2);
constexpr int kRowWindows = ceil_div(kTileW, kOutputs), kWindows = kTileH * kRowWindows;
constexpr int kWindowBlocks = ceil_div(kWindows, 16), kSlots = 16 * kWindowBlocks;
// OFFSET columns are staged before those that the first output meets, so that vectors are aligned.
constexpr int kFirstPixel = OFFSET % 2, kLead = OFFSET + kFirstPixel;
constexpr int kColumns =
    round_up(kLead + (kRowWindows - 1) * kWindowPixels + round_up(2 * kRowWords, 4) - kFirstPixel, IN_VECTOR);
using Pixels =
    InputTile<CHANNELS, (kTileH - 1) * STRIDE_Y + FILTER_Y, kColumns, kFirstPixel, IN_VECTOR, CHANNELS_LAST, false>;
using Loader = InputTileLoader<Pixels, kThreads, ELEMENT>;

// Outputs in shared memory, an odd number of 16-byte words from row to row, so that eight meet every bank once: rows
// are windows of filters, for each output of a window, if CHANNELS_LAST; else filters of outputs.
constexpr int kOutPitch = CHANNELS_LAST ? 2 * kTileK + 16 : round_up(2 * kOutputs * kSlots, 32) + 16;
constexpr int kOutBytes = CHANNELS_LAST ? kOutputs * kSlots * kOutPitch : kTileK * kOutPitch;
constexpr int kRowOutputs = kOutputs * kRowWindows, kInputTileAt = STAGES * kOutBytes;
static_assert(STAGES >= 2, "STAGES is at least 2: a tile is loaded while another is read");

// A warp's part of the product, and the accumulators of a block when warps add theirs.
constexpr int kWarpRows = ceil_div(FILTER_Y, WARPS_Y), kWarpFilters = kTileK / 16 / WARPS_K;
constexpr int kTaps = CHANNELS * FILTER_Y * FILTER_X, kAccumulatorPitch = FILTER_Y * kRowWords * 8 + 8;
static_assert(SHARED_BYTES == maximum(kInputTileAt + 2 * Pixels::kBytes, 4 * kOutputs * kTileK * kAccumulatorPitch),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// OUT_VECTOR elements to shared memory, asynchronously where they can be; zeros, and nothing is read, if not `inside`.
__device__ __forceinline__ void copy_outputs(unsigned char* to, const ELEMENT* from, bool inside) {
  if constexpr (OUT_VECTOR > 1)
    copy_bytes<2 * OUT_VECTOR>(static_cast<unsigned>(__cvta_generic_to_shared(to)), from, inside);
  else
    *reinterpret_cast<ELEMENT*>(to) = inside ? *from : convert<ELEMENT>(0.0f);
}

// Starts to stage a tile's outputs as one group, zeros where there are none. A thread copies the same place of every
// row, or of every few filters, so that addresses are computed once.
__device__ __forceinline__ void load_outputs(unsigned char* to, const ELEMENT* __restrict__ dy, const Shape& shape,
                                             const OutputTile& tile) {
  if constexpr (CHANNELS_LAST) {
    constexpr unsigned kVectors = kTileK / OUT_VECTOR;
    const int channels = shape.out_channels, row_stride = shape.out_width * channels;
    const int rows = shape.out_height - tile.row, columns = shape.out_width - tile.column;
    const ELEMENT* const first =
        dy + ((tile.image * shape.out_height + tile.row) * shape.out_width + tile.column) * channels + tile.first_k;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < kRowOutputs * kVectors; i += kThreads) {
      const int k = i % kVectors * OUT_VECTOR, column = i / kVectors;
      const bool inside = column < columns && k < channels - tile.first_k;
      const ELEMENT* const source = first + column * channels + k;
      unsigned char* const at = to + (column % kOutputs * kSlots + column / kOutputs) * kOutPitch + 2 * k;
#pragma unroll
      for (int row = 0; row < kTileH; ++row)
        copy_outputs(at + row * kRowWindows * kOutPitch, source + row * row_stride, inside && row < rows);
    }
  } else {
    constexpr int kVectors = ceil_div(kTileH * kRowOutputs, OUT_VECTOR),
                  kLanes = kVectors < kThreads ? kVectors : kThreads;
    constexpr int kGroups = kThreads / kLanes;
    const int channel_stride = shape.out_height * shape.out_width, filters = shape.out_channels - tile.first_k;
    const ELEMENT* const first = dy + (tile.image * shape.out_channels + tile.first_k) * channel_stride;
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
#pragma unroll 1
    for (int vector = lane; vector < kVectors && group < kGroups; vector += kLanes) {
      const int pixel = vector * OUT_VECTOR, row = tile.row + pixel / kRowOutputs;
      const int column = tile.column + pixel % kRowOutputs;
      const bool inside = row < shape.out_height && column < shape.out_width;
      const ELEMENT* const source = first + row * shape.out_width + column;
#pragma unroll 8
      for (int k = group; k < kTileK; k += kGroups)
        copy_outputs(to + k * kOutPitch + 2 * pixel, source + k * channel_stride, inside && k < filters);
    }
  }
  commit_copies();
}

// Clears what is staged beyond a tile's last window, once: tiles that are loaded leave it as it is.
__device__ __forceinline__ void clear_rest(unsigned char* to) {
  constexpr int kLoaded = CHANNELS_LAST ? kWindows : round_up(kTileH * kRowOutputs, OUT_VECTOR);
  constexpr int kRest = (CHANNELS_LAST ? kSlots : kOutputs * kSlots) - kLoaded;
  constexpr int kAcross = CHANNELS_LAST ? kTileK : 1, kTimes = CHANNELS_LAST ? kOutputs : kTileK;
  if constexpr (kRest > 0)
    for (int i = threadIdx.x; i < STAGES * kTimes * kRest * kAcross; i += kThreads) {
      const int k = i % kAcross, slot = kLoaded + i / kAcross % kRest, time = i / kAcross / kRest % kTimes;
      unsigned char* const stage = to + i / kAcross / kRest / kTimes * kOutBytes;
      const int at = CHANNELS_LAST ? (time * kSlots + slot) * kOutPitch + 2 * k : time * kOutPitch + 2 * slot;
      *reinterpret_cast<ELEMENT*>(stage + at) = convert<ELEMENT>(0.0f);
    }
}

// The window that counts as number `depth` of 16 in the product. Channels first, a register holds a window's two
// outputs: of one of them, two windows that are four apart are joined.
__device__ __forceinline__ int window_of(int depth) {
  return CHANNELS_LAST || kOutputs == 1 ? depth : depth / 8 * 8 + depth % 8 / 2 + depth % 2 * 4;
}

using Accumulators = float[kWarpFilters][kOutputs][kWarpRows][kRowWords][4];
using Filters = unsigned[kWarpFilters][kOutputs][4];

// A block of windows' gradients of the warp's filters, the first of which is number `first`.
__device__ __forceinline__ void read_outputs(Filters& filters, unsigned outputs, int block, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int f = 0; f < kWarpFilters; ++f) {
    if constexpr (CHANNELS_LAST) {
      const int slot = 16 * block + lane / 16 * 8 + lane % 8;
#pragma unroll
      for (int p = 0; p < kOutputs; ++p)
        load_transposed(filters[f][p],
                        outputs + (p * kSlots + slot) * kOutPitch + 2 * (first + 16 * f) + lane / 8 % 2 * 16);
    } else {
      const unsigned at = outputs + (first + 16 * f + lane % 16) * kOutPitch + 32 * kOutputs * block + lane / 16 * 16;
      if constexpr (kOutputs == 1) {
        load_matrices(filters[f][0], at);
      } else {
        unsigned low[4], high[4];
        load_matrices(low, at);
        load_matrices(high, at + 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned one = i < 2 ? low[i] : high[i - 2], other = i < 2 ? low[i + 2] : high[i];
          filters[f][0][i] = (one & 0xffffu) | other << 16;
          filters[f][kOutputs - 1][i] = one >> 16 | (other & 0xffff0000u);
        }
      }
    }
  }
}

// Adds a staged tile's products to the warp's accumulators.
__device__ __forceinline__ void add_tile(Accumulators& acc, unsigned outputs, unsigned input_tile, int first_y,
                                         int first_filter, int first_block) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int block = first_block; block < kWindowBlocks; block += WARPS_P) {
    const int window = min(16 * block + window_of(lane % 16), kWindows - 1);
    const int word = (kLead + window % kRowWindows * kWindowPixels) / 2 + lane / 16;
    const unsigned row = input_tile + 16 * ((window / kRowWindows * STRIDE_Y + first_y) * Pixels::kRowWords + word);
    Filters filters;
    read_outputs(filters, outputs, block, first_filter);
    // The words of the next row are on their way while those of this one are multiplied.
    constexpr int kPairs = ceil_div(kRowWords, 2);
    unsigned words[2][kPairs][4];
#pragma unroll
    for (int r = -1; r < kWarpRows; ++r) {
      if (r + 1 < kWarpRows && (FILTER_Y % WARPS_Y == 0 || first_y + r + 1 < FILTER_Y)) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j)
          load_transposed(words[(r + 1) % 2][j], row + 16 * ((r + 1) * Pixels::kRowWords + 2 * j));
      }
      if (r < 0) continue;
      if (FILTER_Y % WARPS_Y != 0 && first_y + r >= FILTER_Y) break;
#pragma unroll
      for (int j = 0; j < kRowWords; ++j)
#pragma unroll
        for (int f = 0; f < kWarpFilters; ++f)
#pragma unroll
          for (int p = 0; p < kOutputs; ++p)
            multiply_add<ELEMENT>(acc[f][p][r][j], filters[f][p], words[r % 2][j / 2][j % 2 * 2],
                                  words[r % 2][j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Adds the accumulators of warps with different windows in shared memory, in order.
__device__ __forceinline__ void reduce_warps(float* reduced, const Accumulators& acc, int first_y, int first_filter,
                                             int slice) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int round = 0; round < WARPS_P; ++round) {
    __syncthreads();  // stages have been read, or the round before is complete
    if (round != slice) continue;
#pragma unroll
    for (int f = 0; f < kWarpFilters; ++f)
#pragma unroll
      for (int p = 0; p < kOutputs; ++p)
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
          if (first_y + r >= FILTER_Y) break;
#pragma unroll
          for (int j = 0; j < kRowWords; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int k = first_filter + 16 * f + 8 * half + lane / 4;
              float* const at =
                  reduced + (p * kTileK + k) * kAccumulatorPitch + ((first_y + r) * kRowWords + j) * 8 + lane % 4 * 2;
              Vector<float, 2> pair = {acc[f][p][r][j][2 * half], acc[f][p][r][j][2 * half + 1]};
              if (round > 0) {
                const Vector<float, 2> before = *reinterpret_cast<const Vector<float, 2>*>(at);
                pair.at[0] += before.at[0];
                pair.at[1] += before.at[1];
              }
              *reinterpret_cast<Vector<float, 2>*>(at) = pair;
            }
        }
  }
  __syncthreads();  // the last round is complete
}

// Writes `count` filters in the order of dw.
__device__ __forceinline__ void store_partials(float* __restrict__ partials, const float* reduced, int count) {
  for (int i = threadIdx.x; i < count * kTaps; i += kThreads) {
    const int k = i / kTaps, tap = i % kTaps;
    const int c = CHANNELS_LAST ? tap % CHANNELS : tap / (FILTER_Y * FILTER_X);
    const int s = CHANNELS_LAST ? tap / CHANNELS % FILTER_X : tap % FILTER_X;
    const int r = CHANNELS_LAST ? tap / (CHANNELS * FILTER_X) : tap / FILTER_X % FILTER_Y;
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kOutputs; ++p)
      sum += reduced[(p * kTileK + k) * kAccumulatorPitch + r * kRowWords * 8 + 4 * (s + p * STRIDE_X) + c];
    partials[i] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_weights(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ dy, float* __restrict__ partials,
                         const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int split = static_cast<int>(blockIdx.x) / shape.filter_tiles;
  const int first_k = (blockIdx.x - split * shape.filter_tiles.by) * kTileK;
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  griddepcontrol_launch_dependents();

  OutputTile tile = {0, first_k, 0, 0};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int first_y = warp % WARPS_Y * kWarpRows, first_filter = warp / WARPS_Y % WARPS_K * kWarpFilters * 16;
  const int slice = warp / (WARPS_Y * WARPS_K);

  Loader loader;
#pragma unroll 1
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    const int number = split + ahead * shape.tile_step;
    if (number >= shape.tiles) break;
    go_to(tile, shape, number);
    load_outputs(shared + ahead * kOutBytes, dy, shape, tile);
  }
  clear_rest(shared);
  go_to(tile, shape, split);
  loader.copy(shared + kInputTileAt, x, input_tile_of(tile, shape));
  if (split + shape.tile_step < shape.tiles) {
    go_to(tile, shape, split + shape.tile_step);
    if (Loader::kIsWhole) loader.load(x, input_tile_of(tile, shape));
  }
  Accumulators acc = {};
  int stage = 0, half = 0;
#pragma unroll 1
  for (int number = split; number < shape.tiles; number += shape.tile_step) {
    // Groups of tiles that are not there were not committed: the last tiles wait for all.
    if (number + (STAGES - 2) * shape.tile_step < shape.tiles)
      wait_for_copies<STAGES - 2>();
    else
      wait_for_copies<0>();
    __syncthreads();  // the tile has arrived, and every warp has read those that are overwritten next
    const int ahead = number + (STAGES - 1) * shape.tile_step;
    if (ahead < shape.tiles) {
      go_to(tile, shape, ahead);
      load_outputs(shared + (stage == 0 ? STAGES - 1 : stage - 1) * kOutBytes, dy, shape, tile);
    }
    // The next input tile was taken a round before, and now the one after it is.
    unsigned char* const input_tile = shared + kInputTileAt + (half ^ 1) * Pixels::kBytes;
    if (Loader::kIsWhole && number + shape.tile_step < shape.tiles) {
      loader.store(input_tile);
      go_to(tile, shape, number + 2 * shape.tile_step);
      if (number + 2 * shape.tile_step < shape.tiles) loader.load(x, input_tile_of(tile, shape));
    }
    const unsigned now = base + stage * kOutBytes;
    if (first_y < FILTER_Y)
      add_tile(acc, now, base + kInputTileAt + half * Pixels::kBytes, first_y, first_filter, slice);
    if (!Loader::kIsWhole && number + shape.tile_step < shape.tiles) {
      go_to(tile, shape, number + shape.tile_step);
      loader.copy(input_tile, x, input_tile_of(tile, shape));
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    half ^= 1;
  }
  float* const reduced = reinterpret_cast<float*>(shared);
  reduce_warps(reduced, acc, first_y, first_filter, slice);
  store_partials(partials + (static_cast<int64>(split) * shape.out_channels + first_k) * kTaps, reduced,
                 min(kTileK, shape.out_channels - first_k));
}

// dw[i] = sum of partials[split][i] over the splits. A block has 32 elements; each of its warps sums every 32nd split.
constexpr int kSplitLanes = 32;

extern "C" __global__ void __launch_bounds__(32 * kSplitLanes)
    few_channels_weights_finish(const float* partials, ELEMENT* dw, int size, int splits) {
  __shared__ float acc[kSplitLanes][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = blockIdx.x * 32 + lane;
  griddepcontrol_wait();
  float sum = sum_splits<8, int64>(partials, at, size, {warp, splits, kSplitLanes}, at < size);
  acc[warp][lane] = sum;
  __syncthreads();  // every warp's sums are there
  sum = acc[lane][warp];
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (lane == 0 && blockIdx.x * 32 + warp < size) dw[blockIdx.x * 32 + warp] = convert<ELEMENT>(sum);
}
