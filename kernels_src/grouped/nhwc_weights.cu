// Backward weights of grouped convolutions with few channels a group, on tensor cores, per group
//   dw[k,c,i,j] = sum_{n,oh,ow} dy[n,k,oh,ow] * x[n, c, oh*stride - pad + i*dilation, ow*stride - pad + j*dilation].
// K of the products is pixels. A block sums UNITS units of groups over every gridDim.y-th tile of IMAGES x TILE_ROWS x
// COLUMNS outputs; cp.async copies tiles into STAGES stages. A warp computes one item, 16 filters x 16 channels, for
// WARP_TAPS rows of the filter, from every WARPS-th pair of segments of 8 columns. A fragment of x serves the taps of
// its column, one of dy those of its row. The accumulators of warps are added in shared memory, those of blocks by
// `grouped_nhwc_weights_finish`, in a fixed order.
//
// Defines: as checked below; SHARES_C and SHARES_K are blocks that share a unit's channels and filters, SPAN how many
// of COLUMNS exist.
#include "common/split_k.cuh"
#include "common/shared_pixels.cuh"

#if !defined(ELEMENT) || !defined(GROUPS) || !defined(GROUP_C) || !defined(GROUP_K) || !defined(FILTER_Y) ||          \
    !defined(FILTER_X) || !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W) || \
    !defined(PAD_H) || !defined(PAD_W) || !defined(IN_H) || !defined(IN_W) || !defined(OUT_H) || !defined(OUT_W)
#error "define the problem: ELEMENT, GROUP*, FILTER_*, STRIDE_*, DILATION_*, PAD_*, IN_* and OUT_*"
#endif
#if !defined(UNITS) || !defined(SHARES_C) || !defined(SHARES_K) || !defined(TILE_ROWS) || !defined(COLUMNS) || \
    !defined(SPAN) || !defined(IMAGES) || !defined(WARP_TAPS) || !defined(TAP_BLOCKS) || !defined(WARPS) ||    \
    !defined(STAGES) || !defined(ROW_TILES) || !defined(COLUMN_TILES) || !defined(CHANNELS_LAST) ||            \
    !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define the tiling: UNITS, ROW*, COLUMN*, SPAN, IMAGES, WARP_TAPS, TAP_BLOCKS, WARPS, STAGES, ..."
#endif
#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

using Group = PackedGroups<GROUP_C, GROUP_K>;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
constexpr int kUnitPackedGroups = Group::kPackedC % 16 || Group::kPackedK % 16 ? 2 : 1;
constexpr int kUnitC = kUnitPackedGroups * Group::kPackedC, kUnitK = kUnitPackedGroups * Group::kPackedK;
constexpr int kUnits = UNITS, kShareC = kUnitC / SHARES_C, kShareK = kUnitK / SHARES_K;
constexpr int kC = kUnits * kShareC, kK = kUnits * kShareK, kRowC = SHARES_C == 1 ? GROUP_C : kShareC;
constexpr bool kShared = SHARES_C * SHARES_K > 1;
static_assert(!kShared || (UNITS == 1 && Group::kPackedGroups == 1 && kUnitPackedGroups == 1 && TAP_BLOCKS == 1 &&
                           kShareC % 16 == 0 && kShareK % 16 == 0),
              "blocks share items of one group");
constexpr int kTileRows = TILE_ROWS, kColumns = COLUMNS, kSpan = SPAN, kImages = IMAGES, kStages = STAGES;

// Items of a unit: pairs of 16 filters and 16 channels that have a group in common.
constexpr bool item_meets(int k, int c) {
  return Group::meet(2 * c, 2 * k) || Group::meet(2 * c + 1, 2 * k) || Group::meet(2 * c, 2 * k + 1) ||
         Group::meet(2 * c + 1, 2 * k + 1);
}
constexpr int item_count() {
  int count = 0;
  for (int k = 0; k < kShareK / 16; ++k)
    for (int c = 0; c < kShareC / 16; ++c) count += item_meets(k, c);
  return count;
}
constexpr int kItems = item_count();
constexpr int kWarpTaps = WARP_TAPS, kTapTiles = ceil_div(kFilterY, kWarpTaps), kWarps = WARPS;
constexpr int kBlockTapTiles = TAP_BLOCKS == 1 ? kTapTiles : 1;  // of a block
static_assert(TAP_BLOCKS == 1 || TAP_BLOCKS == kTapTiles, "shares of the filter are in one block or in as many");
constexpr int kThreads = 32 * kUnits * kItems * kBlockTapTiles * kWarps;

constexpr int kPatchH = (kTileRows - 1) * STRIDE_H + (kFilterY - 1) * DILATION_H + 1;
constexpr int kPatchW = (kSpan - 1) * STRIDE_W + (kFilterX - 1) * DILATION_W + 1;
using Patch = Pixels<kImages, kPatchH, kPatchW, STRIDE_W, kC>;
using Gradients = Pixels<kImages, kTileRows, kColumns, 1, kK>;
constexpr int kSegments = kColumns / 8 * kImages, kSegmentPairs = kSegments / 2;
static_assert(kColumns % 8 == 0 && kSegments % 2 == 0, "warps take pairs of segments of 8 columns");
constexpr int kTileBytes = Patch::kBytes + Gradients::kBytes;

// Channels first, what arrives as it is in memory: whole images if a tile has all of them.
constexpr bool kLast = CHANNELS_LAST, kWhole = ROW_TILES == 1 && COLUMN_TILES == 1;
constexpr int kShift = (8 - PAD_W % 8) % 8;
using RawPatch = StagedNchw<Patch, IN_H, IN_W, kShift, kWhole>;
using RawGradients = StagedNchw<Gradients, OUT_H, OUT_W, 0, kWhole>;
constexpr int kStageBytes = kLast ? kTileBytes : RawPatch::kBytes + RawGradients::kBytes;
constexpr int kStagesAt = kLast ? 0 : kTileBytes;

// The warps' accumulators, one set of a block's filters each, in the order of w; rows of neighbouring filters are 8 or
// 24 banks apart.
constexpr int kFilterFloats = kTaps * kRowC;
constexpr int kAccumulatorPitch = round_up(kFilterFloats, 4) + ((8 - round_up(kFilterFloats, 4)) % 16 + 16) % 16;
constexpr int kAccumulatorBytes = 4 * kWarps * kK * kAccumulatorPitch;
static_assert(SHARED_BYTES == maximum(kStagesAt + kStages * kStageBytes, kAccumulatorBytes),
              "solvers/common/packed_groups.py counts otherwise");

// What a warp computes of each tile: rows of taps from first_tap on, of which those from own_tap on are its own.
struct WarpTile {
  int unit, k, c, first_tap, own_tap, first_pair;
};

__device__ __forceinline__ WarpTile warp_tile_of(int warp) {
  const int share = TAP_BLOCKS == 1 ? warp / (kUnits * kItems) % kBlockTapTiles : blockIdx.z;
  // The last share may compute rows of the one before too, which it leaves to that one.
  WarpTile warp_tile = {warp % kUnits,
                        0,
                        0,
                        min(share * kWarpTaps, kFilterY - kWarpTaps),
                        share * kWarpTaps,
                        warp / (kUnits * kItems * kBlockTapTiles)};
  int item = warp / kUnits % kItems;
  for (; warp_tile.k < kShareK / 16; ++warp_tile.k)
    for (warp_tile.c = 0; warp_tile.c < kShareC / 16; ++warp_tile.c)
      if (item_meets(warp_tile.k, warp_tile.c) && item-- == 0) return warp_tile;
  return warp_tile;
}

// Which of a group's channels and filters a block has.
__device__ __forceinline__ int share_of_channels() {
  return kShared ? blockIdx.z % SHARES_C : 0;
}
__device__ __forceinline__ int share_of_filters() {
  return kShared ? blockIdx.z / SHARES_C : 0;
}

// in_* are of x, out_* of dy.
struct Shape {
  SHAPE_FIELDS
};

// What a tile reads of x and of dy.
struct TileImages {
  Images x, dy;
};

__device__ __forceinline__ TileImages images_of(const Shape& shape, int tile) {
  const int column = tile % COLUMN_TILES * kColumns, row = tile / COLUMN_TILES % ROW_TILES * kTileRows;
  const int image = tile / (COLUMN_TILES * ROW_TILES) * kImages, unit = blockIdx.x * kUnits;
  const int channel = unit * kUnitC + share_of_channels() * kShareC,
            filter = unit * kUnitK + share_of_filters() * kShareK;
  return {{shape.batch, shape.in_channels, shape.in_height, shape.in_width, image, channel, row * STRIDE_H - PAD_H,
           column * STRIDE_W - PAD_W},
          {shape.batch, shape.out_channels, shape.out_height, shape.out_width, image, filter, row, column}};
}

// Starts to copy a tile.
__device__ __forceinline__ void stage_tile(unsigned char* to, const ELEMENT* x, const ELEMENT* dy, const Shape& shape,
                                           int tile) {
  const TileImages images = images_of(shape, tile);
  if constexpr (kLast) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    stage_pixels<Patch, IN_W * GROUPS * GROUP_C, kThreads>(address, x, images.x);
    stage_pixels<Gradients, OUT_W * GROUPS * GROUP_K, kThreads>(address + Patch::kBytes, dy, images.dy);
  } else {
    stage_nchw<Patch, IN_H, IN_W, kShift, kWhole, kThreads>(to, x, images.x);
    stage_nchw<Gradients, OUT_H, OUT_W, 0, kWhole, kThreads>(to + RawPatch::kBytes, dy, images.dy);
  }
}

// Lays a tile that has arrived channels first out as pixels.
__device__ __forceinline__ void transpose_tile(unsigned char* to, const unsigned char* from, const Shape& shape,
                                               int tile) {
  const TileImages images = images_of(shape, tile);
  transpose_nchw<Patch, IN_H, IN_W, kShift, kWhole, kThreads>(to, reinterpret_cast<const ELEMENT*>(from), images.x);
  transpose_nchw<Gradients, OUT_H, OUT_W, 0, kWhole, kThreads>(
      to + Patch::kBytes, reinterpret_cast<const ELEMENT*>(from + RawPatch::kBytes), images.dy);
}

// Number of a pair's segment and column for a lane.
struct Segment {
  int image, column;
};

__device__ __forceinline__ Segment segment_at(int segment) {
  return {segment / (kColumns / 8), segment % (kColumns / 8) * 8};
}

using Accumulators = float[kWarpTaps][kFilterX][2][4];

// Adds what the rows of one pair contribute. Addresses: of x for fragments of pixels x channels, which lanes give as
// (pixels 0-7, 8 channels), (pixels 8-15, same), (0-7, next 8), (8-15, next 8); of dy with filters for channels as
// (0-7, 8 filters), (0-7, next 8), (8-15, 8), (8-15, next 8).
__device__ __forceinline__ void add_segment_pair(Accumulators& accumulators, unsigned x, unsigned dy) {
  unsigned gradients[kTileRows][4];
#pragma unroll
  for (int row = 0; row < (kTileRows - 1) * STRIDE_H + (kWarpTaps - 1) * DILATION_H + 1; ++row) {
    if (row % STRIDE_H == 0 && row / STRIDE_H < kTileRows)
      load_transposed(gradients[row / STRIDE_H], dy + row / STRIDE_H * Gradients::kRowBytes);
    bool is_met = false;
#pragma unroll
    for (int i = 0; i < kWarpTaps; ++i) {
      const int from = row - i * DILATION_H;
      is_met = is_met || (from >= 0 && from % STRIDE_H == 0 && from / STRIDE_H < kTileRows);
    }
    if (!is_met) continue;
#pragma unroll
    for (int j = 0; j < kFilterX; ++j) {
      unsigned pixels[4];
      load_transposed(pixels, x + row * Patch::kRowBytes + Patch::slot(j * DILATION_W) * Patch::kPixelBytes);
#pragma unroll
      for (int i = 0; i < kWarpTaps; ++i) {
        const int from = row - i * DILATION_H;
        if (from < 0 || from % STRIDE_H != 0 || from / STRIDE_H >= kTileRows) continue;
        multiply_add<ELEMENT>(accumulators[i][j][0], gradients[from / STRIDE_H], pixels[0], pixels[1]);
        multiply_add<ELEMENT>(accumulators[i][j][1], gradients[from / STRIDE_H], pixels[2], pixels[3]);
      }
    }
  }
}

__device__ __forceinline__ void add_tile(Accumulators& accumulators, unsigned stage, const WarpTile& warp_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int pair = warp_tile.first_pair; pair < kSegmentPairs; pair += kWarps) {
    const Segment in = segment_at(2 * pair + lane / 8 % 2), out = segment_at(2 * pair + lane / 16);
    const int column = min(in.column + lane % 8, kSpan - 1);  // past the last one, dy is zero
    const unsigned x = stage + in.image * Patch::kImageBytes + warp_tile.first_tap * DILATION_H * Patch::kRowBytes +
                       column * Patch::kPixelBytes + 2 * (warp_tile.unit * kShareC + 16 * warp_tile.c) + lane / 16 * 16;
    const unsigned dy = stage + Patch::kBytes + out.image * Gradients::kImageBytes +
                        (out.column + lane % 8) * Gradients::kPixelBytes +
                        2 * (warp_tile.unit * kShareK + 16 * warp_tile.k) + lane / 8 % 2 * 16;
    add_segment_pair(accumulators, x, dy);
  }
}

// Where a sum's filter, tap and channel are in a row of w.
__device__ __forceinline__ int filter_offset(int tap, int channel) {
  return CHANNELS_LAST ? tap * kRowC + channel : channel * kTaps + tap;
}

__device__ __forceinline__ void stage_accumulators(float* staged, const Accumulators& accumulators,
                                                   const WarpTile& warp_tile) {
  const int lane = threadIdx.x % 32;
  float* const to = staged + warp_tile.first_pair * kK * kAccumulatorPitch;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = 16 * warp_tile.k + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = 16 * warp_tile.c + 8 * j + lane % 4 * 2 + e, channel = c - k / GROUP_K * GROUP_C;
        if (channel < 0 || channel >= GROUP_C) continue;
#pragma unroll
        for (int y = 0; y < kWarpTaps; ++y) {
          if (kFilterY % kWarpTaps != 0 && warp_tile.first_tap + y < warp_tile.own_tap) continue;
#pragma unroll
          for (int x = 0; x < kFilterX; ++x)
            to[(warp_tile.unit * kShareK + k) * kAccumulatorPitch +
               filter_offset((warp_tile.first_tap + y) * kFilterX + x, channel)] = accumulators[y][x][j][2 * half + e];
        }
      }
    }
}

// Whether a block has summed what is there in a row of w.
__device__ __forceinline__ bool is_summed(int offset, int own_tap) {
  const int tap = (CHANNELS_LAST ? offset / kRowC : offset % kTaps) / kFilterX;
  return TAP_BLOCKS == 1 || (tap >= own_tap && tap < own_tap + kWarpTaps);
}

// Adds the warps' accumulators and stores them: elements if there is one block for them, else floats.
template <typename T>
__device__ __forceinline__ void store_accumulators(T* out, const float* staged, int filters, int own_tap) {
  constexpr int kVector = TAP_BLOCKS > 1 ? 1 : greatest_divisor(4, SHARES_C == 1 ? kFilterFloats : kRowC),
                kVectors = kFilterFloats / kVector;
  const int first = blockIdx.x * kUnits * kUnitK + share_of_filters() * kShareK;
#pragma unroll 2
  for (int i = threadIdx.x; i < kK * kVectors; i += kThreads) {
    const int k = i / kVectors, at = i % kVectors * kVector;
    if (first + k >= filters || !is_summed(at, own_tap)) continue;
    Vector<float, kVector> sum = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const auto more =
          *reinterpret_cast<const Vector<float, kVector>*>(staged + (warp * kK + k) * kAccumulatorPitch + at);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum.at[e] += more.at[e];
    }
    Vector<T, kVector> rounded;
#pragma unroll
    for (int e = 0; e < kVector; ++e) rounded.at[e] = convert<T>(sum.at[e]);
    const int offset = CHANNELS_LAST ? at / kRowC * GROUP_C + share_of_channels() * kRowC + at % kRowC
                                     : share_of_channels() * kFilterFloats + at;
    *reinterpret_cast<Vector<T, kVector>*>(out + (first + k) * kTaps * GROUP_C + (SHARES_C == 1 ? at : offset)) =
        rounded;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped_nhwc_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, ELEMENT* __restrict__ dw,
                         float* __restrict__ partials, const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char staged[];
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(staged));
  const WarpTile warp_tile = warp_tile_of(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0));
  const int step = gridDim.y, tiles = shape.tiles, filters = shape.out_channels;

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    const int tile = blockIdx.y + stage * step;
    if (tile < tiles) stage_tile(staged + kStagesAt + stage * kStageBytes, x, dy, shape, tile);
    commit_copies();
  }
  Accumulators accumulators = {};
  int at = 0;
#pragma unroll 1
  for (int tile = blockIdx.y; tile < tiles; tile += step) {
    if constexpr (kStages == 1) {
      __syncthreads();  // every warp has read the tile before
      stage_tile(staged + kStagesAt, x, dy, shape, tile);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();  // the tile has arrived
    } else {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the tile has arrived, and every warp has read the one that is overwritten next
      const int next = tile + (kStages - 1) * step, to = at == 0 ? kStages - 1 : at - 1;
      if (next < tiles) stage_tile(staged + kStagesAt + to * kStageBytes, x, dy, shape, next);
      commit_copies();
    }
    if constexpr (!kLast) {
      transpose_tile(staged, staged + kStagesAt + at * kStageBytes, shape, tile);
      __syncthreads();  // the tile is laid out
    }
    add_tile(accumulators, base + (kLast ? at * kStageBytes : 0), warp_tile);
    at = at + 1 == kStages ? 0 : at + 1;
  }
  wait_for_copies<0>();
  __syncthreads();  // every warp has read the last tile, which the sums overwrite
  griddepcontrol_launch_dependents();
  float* const warp_accumulators = reinterpret_cast<float*>(staged);
  stage_accumulators(warp_accumulators, accumulators, warp_tile);
  __syncthreads();  // the accumulators of every warp are staged
  if (gridDim.y == 1)
    store_accumulators(dw, warp_accumulators, filters, warp_tile.own_tap);
  else
    store_accumulators(partials + static_cast<int64>(blockIdx.y) * filters * kTaps * GROUP_C, warp_accumulators,
                       filters, warp_tile.own_tap);
}

constexpr int kFinishThreads = 256;

extern "C" __global__ void __launch_bounds__(kFinishThreads)
    grouped_nhwc_weights_finish(const float* partials, ELEMENT* dw, int size, int splits, int lanes) {
  reduce_split_k<kFinishThreads, 4>(partials, dw, size, splits, lanes);
}
