// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_y + r, v = j*STRIDE_X - pad_x + s, for
// CHANNELS <= 4 channels, on tensor cores with float32 sums.
//
// The input is divided into cells of STRIDE_Y x CELL_X pixels: all cells meet outputs in the same way, TAPS_Y x TAPS_X
// of them around a cell. Rows of the product are cells, columns a cell's elements, its depth is filters, for each of
// those outputs. The filters are laid out so once, with zeros where an output does not meet a pixel. A block stages the
// outputs that WARPS_Y * ROWS rows of WARPS_X * 16 cells meet, DEPTH filters of them at a time, filters innermost
// whatever the layout. A warp reads a row of outputs once for all ROWS rows of cells that meet it. WARPS_K warps share
// the depth and add their sums. Grid: persistent; blocks go through tiles of cells.
#include "common/copy_bytes.cuh"
#include "common/divisor.cuh"
#include "common/mma.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(CELL_X) || !defined(TAPS_Y) || !defined(TAPS_X)
#error "define STRIDE_Y, STRIDE_X, CELL_X, TAPS_Y and TAPS_X"
#endif
#if !defined(LAST_TAP_Y) || !defined(LAST_TAP_X) || !defined(ORIGIN_Y) || !defined(ORIGIN_X) || !defined(OFFSET)
#error "define LAST_TAP_Y, LAST_TAP_X, ORIGIN_Y, ORIGIN_X and OFFSET"
#endif
#if !defined(ROWS) || !defined(WARPS_Y) || !defined(WARPS_X) || !defined(WARPS_K) || !defined(DEPTH)
#error "define ROWS, WARPS_Y, WARPS_X, WARPS_K and DEPTH"
#endif
#if !defined(STAGES) || !defined(CHANNELS_LAST) || !defined(IN_VECTOR) || !defined(PAIRS) || !defined(MIN_BLOCKS)
#error "define STAGES, CHANNELS_LAST, IN_VECTOR, PAIRS and MIN_BLOCKS"
#endif
#ifndef SHARED_BYTES
#error "define SHARED_BYTES"
#endif

constexpr int kThreads = 32 * WARPS_Y * WARPS_X * WARPS_K, kChunks = ceil_div(FILTERS, DEPTH);
static_assert(DEPTH % 16 == 0, "products are 16 deep");
static_assert(CELL_X % STRIDE_X == 0, "outputs recur from cell to cell");

// Columns of the product in blocks of 8: one, or an even number, which are read two at a time.
constexpr int kElements = STRIDE_Y * CELL_X * CHANNELS, kBlocks = kElements <= 8 ? 1 : ceil_div(kElements, 16) * 2;
// A column's filters: for each tap column, each tap row, all filters; an odd number of 16-byte words from one to the
// next, so that eight meet every bank once.
constexpr int kTapDepth = kChunks * DEPTH, kFilterPitch = 2 * TAPS_X * TAPS_Y * kTapDepth + 16;
constexpr int kFilterBytes = 8 * kBlocks * kFilterPitch;
constexpr int kTaps = CHANNELS * FILTER_Y * FILTER_X, kRawBytes = round_up(2 * FILTERS * kTaps, 16);

// Staged outputs: pixels of DEPTH filters. Of two outputs a cell along a row, all first ones lie before all others, so
// that those of neighbouring cells are neighbours.
constexpr int kTileH = WARPS_Y * ROWS, kTileW = 16 * WARPS_X, kStep = CELL_X / STRIDE_X;
constexpr int kInRows = kTileH + TAPS_Y - 1;
constexpr int kColumns = round_up(OFFSET + (kTileW - 1) * kStep + TAPS_X, CHANNELS_LAST ? 1 : IN_VECTOR);
constexpr int kHalf = ceil_div(kColumns, kStep), kRowPixels = kStep * kHalf;
constexpr int kPitch = 2 * DEPTH + 16, kStageBytes = kInRows * kRowPixels * kPitch;

// The sums of warps that share the depth, but for the first.
constexpr int kSums = 4 * ROWS * kBlocks;
constexpr int kJoinAt = kFilterBytes + STAGES * kStageBytes;
constexpr int kJoinBytes = (WARPS_K - 1) * WARPS_Y * WARPS_X * kSums * 128;
// The filters as they come lie behind the first outputs, which come at the same time.
constexpr int kRawAt = kFilterBytes + kStageBytes;
static_assert(SHARED_BYTES == maximum(kJoinAt + kJoinBytes, kRawAt + kRawBytes),
              "the host and the kernel agree on shared memory");

// A tensor's place that a tile starts from.
struct Place {
  int image, row, column;
};
struct Size {
  int height, width;
};

__device__ __forceinline__ void load_filters(unsigned raw, const ELEMENT* filters) {
  constexpr int kCount = FILTERS * kTaps;
  for (int i = 8 * threadIdx.x; i < kCount; i += 8 * kThreads)
    copy_some(raw + 2 * i, filters + i, min(16, 2 * (kCount - i)));
  commit_copies();
}

// An element of a cell: of a row of pixels all channels are neighbours if CHANNELS_LAST, else of a channel its pixels.
struct Element {
  int row, column, channel;
};
__device__ __forceinline__ Element element_of(int rank) {
  if (CHANNELS_LAST) return {rank / (CELL_X * CHANNELS), rank / CHANNELS % CELL_X, rank % CHANNELS};
  return {rank / CELL_X % STRIDE_Y, rank % CELL_X, rank / (CELL_X * STRIDE_Y)};
}

// Lays out the filters for the product.
__device__ __forceinline__ void spread_filters(unsigned char* to, const ELEMENT* raw) {
  constexpr int kTapWords = kTapDepth / 8, kWords = TAPS_X * TAPS_Y * kTapWords;
  for (int i = threadIdx.x; i < 8 * kBlocks * kWords; i += kThreads) {
    // Neighbours lay out neighbouring elements of a cell, whose taps are neighbours as they come.
    const int rank = i % (8 * kBlocks), word = i / (8 * kBlocks);
    const int first_k = word % kTapWords * 8, tap = word / kTapWords;
    const Element element = element_of(rank);
    const int r = LAST_TAP_Y + element.row - tap % TAPS_Y * STRIDE_Y;
    const int s = LAST_TAP_X + element.column - tap / TAPS_Y * STRIDE_X;
    const bool meets = rank < kElements && r >= 0 && r < FILTER_Y && s >= 0 && s < FILTER_X;
    const int at = CHANNELS_LAST ? (r * FILTER_X + s) * CHANNELS + element.channel
                                 : (element.channel * FILTER_Y + r) * FILTER_X + s;
    Vector<ELEMENT, 8> taps;
#pragma unroll
    for (int k = 0; k < 8; ++k)
      taps.at[k] = meets && first_k + k < FILTERS ? raw[(first_k + k) * kTaps + at] : convert<ELEMENT>(0.0f);
    *reinterpret_cast<Vector<ELEMENT, 8>*>(to + rank * kFilterPitch + 16 * word) = taps;
  }
}

// Where a column's pixel lies in a staged row.
__device__ __forceinline__ int pixel_of(int column) {
  return kStep == 1 ? column : column % kStep * kHalf + column / kStep;
}

// IN_VECTOR elements as they are loaded: two in a word, or a single one.
#if IN_VECTOR > 1
using Run = Vector<unsigned, IN_VECTOR / 2>;
#else
using Run = Vector<unsigned short, 1>;
#endif

// The lower halves of two words, or the upper ones.
__device__ __forceinline__ unsigned joined(unsigned low, unsigned high, int half) {
  return __byte_perm(low, high, half == 0 ? 0x5410 : 0x7632);
}

// Stages DEPTH filters of dy from number first_k on, zeros where there are none; complete after wait_for_copies<0>()
// and a barrier. `from` is the first output.
__device__ __forceinline__ void load_outputs(unsigned char* to, const ELEMENT* __restrict__ dy, const Size& size,
                                             const Place& from, int first_k) {
  if constexpr (CHANNELS_LAST) {
    constexpr int kRuns = DEPTH / IN_VECTOR;
#pragma unroll 4
    for (int i = threadIdx.x; i < kInRows * kColumns * kRuns; i += kThreads) {
      const int k = i % kRuns * IN_VECTOR, pixel = i / kRuns, column = pixel % kColumns, row = pixel / kColumns;
      const int h = from.row + row, v = from.column + column;
      const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(size.height) &&
                          static_cast<unsigned>(v) < static_cast<unsigned>(size.width) && first_k + k < FILTERS;
      const int offset = ((from.image * size.height + h) * size.width + v) * FILTERS + first_k + k;
      unsigned char* const at = to + (row * kRowPixels + pixel_of(column)) * kPitch + 2 * k;
      const ELEMENT* const source = dy + (inside ? offset : 0);
      if constexpr (IN_VECTOR > 1)
        copy_bytes<2 * IN_VECTOR>(static_cast<unsigned>(__cvta_generic_to_shared(at)), source, inside);
      else
        *reinterpret_cast<ELEMENT*>(at) = inside ? *source : convert<ELEMENT>(0.0f);
    }
    commit_copies();
  } else {
    constexpr int kGroups = DEPTH / 8, kRuns = kColumns / IN_VECTOR, kItems = kInRows * kRuns * kGroups;
    constexpr int kAtOnce = IN_VECTOR == 8 ? 2 : 4;
    const int plane = size.height * size.width;
#pragma unroll 1
    for (int first = threadIdx.x; first < kItems; first += kAtOnce * kThreads) {
      // All loads are under way before the first is waited for.
      Run runs[kAtOnce][8];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int i = first + a * kThreads, k = first_k + i % kGroups * 8, run = i / kGroups;
        const int h = from.row + run / kRuns, v = from.column + run % kRuns * IN_VECTOR;
        const bool inside = i < kItems && static_cast<unsigned>(h) < static_cast<unsigned>(size.height) &&
                            static_cast<unsigned>(v) < static_cast<unsigned>(size.width);
        const int offset = (from.image * FILTERS + k) * plane + h * size.width + v;
#pragma unroll
        for (int f = 0; f < 8; ++f) {
          runs[a][f] = {};
          if (inside && k + f < FILTERS) runs[a][f] = *reinterpret_cast<const Run*>(dy + offset + f * plane);
        }
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int i = first + a * kThreads, run = i / kGroups;
        if (i >= kItems) break;
        unsigned char* const row = to + run / kRuns * kRowPixels * kPitch + 16 * (i % kGroups);
#pragma unroll
        for (int j = 0; j < IN_VECTOR; ++j) {
          Vector<unsigned, 4> filters;
#pragma unroll
          for (int f = 0; f < 8; f += 2)
            filters.at[f / 2] = joined(runs[a][f].at[j / 2], runs[a][f + 1].at[j / 2], j % 2);
          *reinterpret_cast<Vector<unsigned, 4>*>(row + pixel_of(run % kRuns * IN_VECTOR + j) * kPitch) = filters;
        }
      }
    }
  }
}

using Sums = float[ROWS][kBlocks][4];

// Adds the products of a chunk, whose filters start at address `filters`; both addresses are the lane's.
__device__ __forceinline__ void multiply(Sums& sums, unsigned filters, unsigned outputs, int share) {
  constexpr int kFragments = TAPS_Y * kBlocks;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int tap = 0; tap < TAPS_X; ++tap) {
    const unsigned columns = outputs + pixel_of(OFFSET + tap) * kPitch;
#pragma unroll 1
    for (int step = share; step < DEPTH / 16; step += WARPS_K) {
      unsigned taps[round_up(kFragments, 2)][2];
#pragma unroll
      for (int f = 0; f < kFragments; f += 2) {
        // Two fragments at once: of two blocks of columns, or of two tap rows.
        const int y = kBlocks == 1 ? min(f + lane / 16, TAPS_Y - 1) : f / kBlocks;
        const int rank = kBlocks == 1 ? 0 : f % kBlocks * 8 + lane / 16 * 8;
        unsigned two[4];
        load_matrices(two, filters + rank * kFilterPitch + 2 * ((tap * TAPS_Y + y) * kTapDepth + 16 * step));
        taps[f][0] = two[0];
        taps[f][1] = two[1];
        taps[f + 1][0] = two[2];
        taps[f + 1][1] = two[3];
      }
#pragma unroll
      for (int row = 0; row < ROWS + TAPS_Y - 1; ++row) {
        unsigned pixels[4];
        load_matrices(pixels, columns + row * kRowPixels * kPitch + 32 * step);
#pragma unroll
        for (int y = 0; y < TAPS_Y; ++y) {
          if (row < y || row - y >= ROWS) continue;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            multiply_add<ELEMENT>(sums[row - y][b], pixels, taps[y * kBlocks + b][0], taps[y * kBlocks + b][1]);
        }
      }
    }
  }
}

// Adds the sums of warps that share the depth, in order, to those of the first.
__device__ __forceinline__ void join_sums(Sums& sums, unsigned char* shared, int place, int share) {
  if constexpr (WARPS_K == 1) return;
  float* const joined = reinterpret_cast<float*>(shared + kJoinAt) + place * kSums * 32 + threadIdx.x % 32;
  constexpr int kShare = WARPS_Y * WARPS_X * kSums * 32;
  if (share > 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      joined[(share - 1) * kShare + 32 * i] = sums[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4];
  }
  __syncthreads();  // every share is there
  if (share > 0) return;
#pragma unroll 1
  for (int other = 0; other < WARPS_K - 1; ++other)
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] += joined[other * kShare + 32 * i];
}

// Writes the sums of the warp's cells, of which `from` is the first.
__device__ __forceinline__ void store(ELEMENT* __restrict__ dx, const Sums& sums, const Size& size, const Place& from) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < 2; i += 1 + PAIRS) {
      const int rank = 8 * b + lane % 4 * 2 + i;
      const Element element = element_of(rank);
      if (rank >= kElements) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v = (from.column + 8 * half + lane / 4) * CELL_X + element.column - ORIGIN_X;
        if (v < 0 || v >= size.width) continue;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const int h = (from.row + row) * STRIDE_Y + element.row - ORIGIN_Y;
          if (h < 0 || h >= size.height) continue;
          const int offset = CHANNELS_LAST
                                 ? ((from.image * size.height + h) * size.width + v) * CHANNELS + element.channel
                                 : ((from.image * CHANNELS + element.channel) * size.height + h) * size.width + v;
          const float* const sum = sums[row][b] + 2 * half;
          if constexpr (PAIRS)
            *reinterpret_cast<Vector<ELEMENT, 2>*>(dx + offset) = {convert<ELEMENT>(sum[0]), convert<ELEMENT>(sum[1])};
          else
            dx[offset] = convert<ELEMENT>(sum[i]);
        }
      }
    }
}

#define DIVISOR_PARAMETERS(d) int d, unsigned d##_multiplier, int d##_shift
#define DIVISOR(d) {d, d##_multiplier, d##_shift}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    first_layer_data(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ dx,
                     int height, int width, int out_height, int out_width, int first_row, int first_column, int tiles,
                     DIVISOR_PARAMETERS(image_tiles), DIVISOR_PARAMETERS(row_tiles)) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Divisor by_image = DIVISOR(image_tiles), by_row = DIVISOR(row_tiles);
  const Size size = {height, width}, out_size = {out_height, out_width};
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  unsigned char* const stages = shared + kFilterBytes;
  const auto tile_of = [&](int tile) {
    const int image = tile / by_image;
    tile -= image * image_tiles;
    const int row = tile / by_row;
    return Place{image, row * kTileH, (tile - row * row_tiles) * kTileW};
  };
  const auto load = [&](int stage, int tile, int chunk) {
    const Place at = tile_of(tile);
    load_outputs(stages + stage * kStageBytes, dy, out_size,
                 {at.image, at.row + first_row, at.column * kStep + first_column - OFFSET}, chunk * DEPTH);
  };

  load_filters(base + kRawAt, w);
  load(0, blockIdx.x, 0);
  wait_for_copies<0>();
  __syncthreads();  // the filters have arrived
  spread_filters(shared, reinterpret_cast<const ELEMENT*>(shared + kRawAt));

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp_y = warp % WARPS_Y, warp_x = warp / WARPS_Y % WARPS_X, share = warp / (WARPS_Y * WARPS_X);
  const unsigned filters = base + lane % 8 * kFilterPitch + lane / 8 % 2 * 16;
  const unsigned outputs =
      base + kFilterBytes + lane / 16 * 16 + (warp_y * ROWS * kRowPixels + 16 * warp_x + lane % 16) * kPitch;

  Sums sums = {};
  int stage = 0, chunk = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles;) {
    const bool is_last = chunk + 1 == kChunks;
    const int next_tile = is_last ? tile + gridDim.x : tile, next_chunk = is_last ? 0 : chunk + 1;
    wait_for_copies<0>();
    __syncthreads();  // the outputs have arrived, and every warp has read those, or the filters, overwritten next
    if (STAGES > 1 && next_tile < tiles) load(stage ^ 1, next_tile, next_chunk);
    multiply(sums, filters + 2 * chunk * DEPTH, outputs + stage * kStageBytes, share);
    if (is_last) {
      join_sums(sums, shared, warp % (WARPS_Y * WARPS_X), share);
      const Place at = tile_of(tile);
      if (share == 0) store(dx, sums, size, {at.image, at.row + warp_y * ROWS, at.column + 16 * warp_x});
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] = 0;
    }
    if (STAGES == 1) {
      __syncthreads();  // every warp has read the outputs before the next overwrite them
      if (next_tile < tiles) load(0, next_tile, next_chunk);
    } else {
      stage ^= 1;
    }
    tile = next_tile;
    chunk = next_chunk;
  }
}
