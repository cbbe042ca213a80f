// Backward weights of depthwise convolution, channels last, on tensor cores:
//   dw[c,i,j] = sum_{n,oh,ow} dy[n,oh,ow,c] * x[n, oh*stride - pad + i*dilation, ow*stride - pad + j*dilation, c].
// K of a product is 8 pairs of neighbouring pixels of a row: 8 channels of x at two taps of the filter, times 8
// channels of dy. Of the 16 x 8 accumulators the two diagonals count. A block sums CHANNELS channels over every
// gridDim.y-th tile of IMAGES x TILE_ROWS x (2 * PAIRS) outputs; cp.async copies tiles into STAGES stages. A warp has 8
// channels and every WARPS-th group of pairs. A row of x serves all taps; a row of dy stays in registers until all rows
// of x have met it. The accumulators of warps are added in shared memory, those of blocks in a cluster of CLUSTER or by
// `depthwise_mma_weights_finish`, in a fixed order.
//
// Defines: as checked below; ALL_CHANNELS, IN_H and IN_W of x, OUT_H and OUT_W of dy.
#include "common/split_k.cuh"
#include "depthwise/depthwise_mma.cuh"

#if !defined(ELEMENT) || !defined(FILTER_Y) || !defined(FILTER_X) || !defined(STRIDE_H) || !defined(STRIDE_W) || \
    !defined(DILATION_H) || !defined(DILATION_W) || !defined(PAD_H) || !defined(PAD_W)
#error "define ELEMENT, FILTER_Y and _X, STRIDE_H and _W, DILATION_H and _W, PAD_H and _W"
#endif
#if !defined(TILE_ROWS) || !defined(PAIRS) || !defined(IMAGES) || !defined(CHANNELS) || !defined(WARPS) || \
    !defined(STAGES) || !defined(ROW_TILES) || !defined(COLUMN_TILES)
#error "define TILE_ROWS, PAIRS, IMAGES, CHANNELS, WARPS, STAGES, ROW_TILES and COLUMN_TILES"
#endif
#if !defined(ALL_CHANNELS) || !defined(IN_H) || !defined(IN_W) || !defined(OUT_H) || !defined(OUT_W) || \
    !defined(CLUSTER) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define ALL_CHANNELS, IN_H, IN_W, OUT_H, OUT_W, CLUSTER, MIN_BLOCKS and SHARED_BYTES"
#endif
#if CLUSTER > 1
#include "common/hopper.cuh"
#define IN_CLUSTER __cluster_dims__(1, CLUSTER, 1)
#else
#include "common/pdl.cuh"
#define IN_CLUSTER
#endif

constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
using AxisH = UnitAxis<false, STRIDE_H, DILATION_H, PAD_H, kFilterY>;
using AxisW = UnitAxis<false, STRIDE_W, DILATION_W, PAD_W, kFilterX>;

constexpr int kTileRows = TILE_ROWS, kPairs = PAIRS, kImages = IMAGES, kChannels = CHANNELS,
              kAllChannels = ALL_CHANNELS;
constexpr int kLanes = kImages * kPairs, kIterations = ceil_div(kLanes, 8), kStages = STAGES;
constexpr int kChannelGroups = kChannels / 8, kThreads = 32 * kChannelGroups * WARPS;
static_assert(kChannels % 8 == 0 && kAllChannels % 8 == 0,
              "CHANNELS must be a multiple of 8: a warp has 8, and so has a copy");
static_assert(kThreads <= 1024 && WARPS <= kIterations, "a block must have up to 1024 threads, and every warp work");

// Rows of x that a tile meets; of those that a sole tile of rows exist, others are not staged.
constexpr int kMet = (kTileRows - 1) * AxisH::kStep + AxisH::kReach + 1, kTileStep = kTileRows * AxisH::kStep;
constexpr int kTop = ROW_TILES == 1 ? maximum(0, -AxisH::kFirst) : 0;
constexpr int kBottom = ROW_TILES == 1 ? -maximum(-kMet, AxisH::kFirst - IN_H) : kMet;
using XPixels = PairedPixels<kImages, maximum(1, kBottom - kTop), kPairs, AxisW::kStep, AxisW::kReach, kChannels>;
using YPixels = PairedPixels<kImages, kTileRows, kPairs, 1, 0, kChannels>;
constexpr int kStageBytes = XPixels::kBytes + YPixels::kBytes;
static_assert(SHARED_BYTES == maximum(kStages * kStageBytes, 4 * WARPS * kChannels * kTaps),
              "SHARED_BYTES differs from this layout: solvers/depthwise/mma_tiling.py computes another");

constexpr bool is_inside(int tile, int row) {
  const int at = tile * kTileStep + AxisH::kFirst + row;
  return at >= 0 && at < IN_H;
}

// The row of dy that a row of x meets at a tap; negative if none.
constexpr int row_of_dy(int row, int tap) {
  const int from = row - AxisH::pixel(0, 0, tap);
  return from >= 0 && from % AxisH::kStep == 0 && from / AxisH::kStep < kTileRows ? from / AxisH::kStep : -1;
}

constexpr bool is_met(int row) {
  if (ROW_TILES == 1 && !is_inside(0, row)) return false;
  for (int tap = 0; tap < kFilterY; ++tap)
    if (row_of_dy(row, tap) >= 0) return true;
  return false;
}

// The row whose matrices are loaded before those of `row` are multiplied; with many taps that is no use.
constexpr int next_met(int row) {
  if (kTaps > 16) return row;
  int next = row + 1;
  while (next < kMet - 1 && !is_met(next)) ++next;
  return next < kMet ? next : row;
}

constexpr Lookahead<kMet> kAhead = Lookahead<kMet>::of(next_met, is_met);

// A tile's first image, row and column of dy.
struct TileOrigin {
  int image, row, column;
};

__device__ __forceinline__ TileOrigin origin_of(int tile) {
  return {tile / (COLUMN_TILES * ROW_TILES) * kImages, tile / COLUMN_TILES % ROW_TILES * kTileRows,
          tile % COLUMN_TILES * 2 * kPairs};
}

// Starts to copy a tile.
__device__ __forceinline__ void stage_tile(unsigned to, const ELEMENT* x, const ELEMENT* dy, int n, int tile) {
  const TileOrigin origin = origin_of(tile);
  const int channel = blockIdx.x * kChannels;
  constexpr int kFirst = AxisH::kFirst + kTop, kLast = (ROW_TILES - 1) * kTileStep + kFirst;
  stage_pairs<XPixels, kThreads, kAllChannels, false, -kFirst, IN_H - kLast>(
      to, x,
      {n, kAllChannels, IN_H, IN_W, origin.image, channel, origin.row * AxisH::kStep + kFirst,
       origin.column * AxisW::kStep + AxisW::kFirst});
  stage_pairs<YPixels, kThreads, kAllChannels, true, 0, OUT_H - (ROW_TILES - 1) * kTileRows>(
      to + XPixels::kBytes, dy, {n, kAllChannels, OUT_H, OUT_W, origin.image, channel, origin.row, origin.column});
}

// Taps are taken by two, of a row, or the last ones of an odd filter's rows of two rows: accumulators [0] and [1] of a
// fragment are of the first tap, [2] and [3] of the second.
constexpr bool kOdd = kFilterX % 2 == 1;
struct Accumulators {
  float pairs[kFilterY][maximum(1, kFilterX / 2)][4], lasts[ceil_div(kFilterY, 2)][4];
};

// A fragment has the pixels of both outputs of a pair at two taps of a row: the slots of its matrices; the last pixel
// of an odd row has two.
constexpr int kFragments = kFilterX / 2;
constexpr int slot_of(int fragment, int i) {
  return XPixels::slot(AxisW::pixel(0, 0, 2 * fragment + i % 2) + i / 2 * AxisW::kStep);
}
constexpr int last_slot(int i) {
  return XPixels::slot(AxisW::pixel(0, 0, kFilterX - 1) + i * AxisW::kStep);
}

// Of each fragment its first slot, and the first fragment whose matrices lie as its own: lanes add the same to their
// addresses. A table for the same reason.
struct Slots {
  int first[maximum(1, kFragments)], like[maximum(1, kFragments)];
};
constexpr Slots slots() {
  Slots all = {};
  for (int fragment = 0; fragment < kFragments; ++fragment) {
    all.first[fragment] = slot_of(fragment, 0), all.like[fragment] = fragment;
    for (int first = fragment; first-- > 0;) {
      bool alike = true;
      for (int i = 0; i < 4; ++i)
        alike = alike && slot_of(first, i) - slot_of(first, 0) == slot_of(fragment, i) - slot_of(fragment, 0);
      if (alike) all.like[fragment] = first;
    }
  }
  return all;
}
constexpr Slots kSlots = slots();

// What a lane adds to the addresses of fragments, and of an odd row's last pixels: where its row's matrix lies.
struct Offsets {
  unsigned fragments[maximum(1, kFragments)], last;
};
__device__ __forceinline__ Offsets lane_offsets() {
  const int lane = threadIdx.x % 32;
  Offsets offsets = {};
#pragma unroll
  for (int fragment = 0; fragment < kFragments; ++fragment)
#pragma unroll
    for (int i = 1; i < 4; ++i)
      if (lane / 8 == i)
        offsets.fragments[fragment] = (slot_of(fragment, i) - slot_of(fragment, 0)) * XPixels::kPixelBytes;
  offsets.last = last_slot(lane / 8 % 2) * XPixels::kPixelBytes;
  return offsets;
}

// The pixels of a row that 8 pairs meet. Each fragment is loaded as it is multiplied: registers moved between products
// would wait for these.
struct Row {
  unsigned pairs[maximum(1, kFragments)][4], last[2];
};
__device__ __forceinline__ void load_row(Row& row, const Offsets& offsets, unsigned x) {
#pragma unroll
  for (int fragment = 0; fragment < kFragments; ++fragment)
    load_transposed(row.pairs[fragment],
                    x + kSlots.first[fragment] * XPixels::kPixelBytes + offsets.fragments[kSlots.like[fragment]]);
  if (kOdd) load_matrix_pair<true>(row.last, x + offsets.last);
}

// Adds what 8 pairs of a tile contribute; `first_row` is the number in the tensor of the first row of x. `exists` is 1
// bits where a lane's pixels of dy are: what is beside them is another pair, met already.
__device__ __forceinline__ void add_pairs(Accumulators& accumulators, const Offsets& offsets, unsigned x, unsigned dy,
                                          int first_row, unsigned exists) {
  unsigned gradients[kTileRows][2], lasts[kMet][2];
  Row rows[kMet];
#pragma unroll
  for (int row = 0; row < kMet; ++row) {
#pragma unroll
    for (int loaded = 0; loaded < kMet; ++loaded) {
      if (!kAhead.is_loaded_before(loaded, row)) continue;
      if (kAhead.met[loaded]) load_row(rows[loaded], offsets, x + loaded * XPixels::kRowBytes);
      if (loaded % AxisH::kStep != 0 || loaded / AxisH::kStep >= kTileRows) continue;
      unsigned (&gradient)[2] = gradients[loaded / AxisH::kStep];
      load_matrix_pair<true>(gradient, dy + loaded / AxisH::kStep * YPixels::kRowBytes);
      if (kLanes % 8 != 0) gradient[0] &= exists, gradient[1] &= exists;
    }
    const bool always = is_inside(0, row) && is_inside(ROW_TILES - 1, row);
    const bool inside =
        kAhead.met[row] && (always || static_cast<unsigned>(first_row + row) < static_cast<unsigned>(IN_H));
    if (inside) {
#pragma unroll
      for (int k = 0; k < kFragments; ++k) {
#pragma unroll
        for (int y = 0; y < kFilterY; ++y) {
          const int met = row_of_dy(row, y);
          if (met >= 0)
            multiply_add<ELEMENT>(accumulators.pairs[y][k], rows[row].pairs[k], gradients[met][0], gradients[met][1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; kOdd && i < 2; ++i) lasts[row][i] = inside ? rows[row].last[i] : 0u;
#pragma unroll
    for (int y = 0; kOdd && y < kFilterY; ++y) {
      const int met = row_of_dy(row, y), other = y % 2 == 1 ? row - DILATION_H : row;
      if (met < 0 || (y % 2 == 0 && y + 1 < kFilterY) || (!is_met(row) && !is_met(other))) continue;
      const unsigned fragment[4] = {lasts[other][0], lasts[row][0], lasts[other][1], lasts[row][1]};
      multiply_add<ELEMENT>(accumulators.lasts[y / 2], fragment, gradients[met][0], gradients[met][1]);
    }
    __syncwarp();  // keeps the compiler from loading many rows ahead, for which there are no registers
  }
}

__device__ __forceinline__ void add_tile(Accumulators& accumulators, unsigned stage, int tile, int group, int warp) {
  const int lane = threadIdx.x % 32, first_row = origin_of(tile).row * AxisH::kStep + AxisH::kFirst;
  const Offsets offsets = lane_offsets();
#pragma unroll 1
  for (int iteration = warp; iteration < kIterations; iteration += WARPS) {
    const int at = min(8 * iteration + lane % 8, kLanes - 1), image = at / kPairs, pair = at % kPairs;
    const int left =
        kLanes - 8 * iteration - lane % 4 * 2;  // pairs from the first of the two of a lane's fragment of dy on
    const unsigned exists = left <= 0 ? 0u : left == 1 ? 0xffffu : 0xffffffffu;
    const unsigned x =
        stage + image * XPixels::kImageBytes + pair * XPixels::kPixelBytes + 16 * group - kTop * XPixels::kRowBytes;
    const unsigned dy = stage + XPixels::kBytes + image * YPixels::kImageBytes + pair * YPixels::kPixelBytes +
                        16 * group + lane / 8 % 2 * YPixels::slot(1) * YPixels::kPixelBytes;
    add_pairs(accumulators, offsets, x, dy, first_row, exists);
  }
}

// Lays a warp's accumulators out as [warp][channel][tap]. Lanes g / 2 == t hold the diagonals.
__device__ __forceinline__ void stage_accumulators(float* staged, const Accumulators& accumulators, int group,
                                                   int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4;
  if (g / 2 != lane % 4) return;
  float* const to = staged + ((warp * kChannelGroups + group) * 8 + g) * kTaps;
#pragma unroll
  for (int y = 0; y < kFilterY; ++y)
#pragma unroll
    for (int x = 0; x < kFilterX; ++x) {
      const float* const sum =
          kOdd && x == kFilterX - 1 ? accumulators.lasts[y / 2] + y % 2 * 2 : accumulators.pairs[y][x / 2] + x % 2 * 2;
      to[y * kFilterX + x] = g % 2 == 0 ? sum[0] : sum[1];
    }
}

// Adds the warps' accumulators and stores them: elements if there is one block for them, else floats.
template <typename T>
__device__ __forceinline__ void store_accumulators(T* out, const float* staged) {
  const int first = blockIdx.x * kChannels * kTaps, count = min(kChannels * kTaps, kAllChannels * kTaps - first);
#pragma unroll 2
  for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads) {
    Vector<float, 4> sum = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const auto more = *reinterpret_cast<const Vector<float, 4>*>(staged + warp * kChannels * kTaps + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.at[e] += more.at[e];
    }
    Vector<T, 4> rounded;
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded.at[e] = convert<T>(sum.at[e]);
    *reinterpret_cast<Vector<T, 4>*>(out + first + i) = rounded;
  }
}

#if CLUSTER > 1
// Adds the accumulators of all warps of all blocks of a cluster, in order, and stores them. The blocks share the
// accumulators out.
__device__ __forceinline__ void add_cluster(ELEMENT* out, const float* staged) {
  cluster_arrive<true>();
  cluster_wait();  // the accumulators of every block are staged
  const int first = blockIdx.x * kChannels * kTaps, count = min(kChannels * kTaps, kAllChannels * kTaps - first);
#pragma unroll 1
  for (int i = 4 * (cluster_rank() * kThreads + threadIdx.x); i < count; i += 4 * CLUSTER * kThreads) {
    float accumulators[4] = {};
#pragma unroll
    for (int set = 0; set < CLUSTER * WARPS; ++set) {
      const unsigned at = shared_address(staged + set % WARPS * kChannels * kTaps + i);
      const Vector<float, 4> more = load_cluster_floats(map_shared_rank(at, set / WARPS));
#pragma unroll
      for (int e = 0; e < 4; ++e) accumulators[e] += more.at[e];
    }
    Vector<ELEMENT, 4> rounded;
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded.at[e] = convert<ELEMENT>(accumulators[e]);
    *reinterpret_cast<Vector<ELEMENT, 4>*>(out + first + i) = rounded;
  }
  cluster_arrive<false>();
  cluster_wait();  // others read this block's accumulators until here
}
#endif

extern "C" __global__ void IN_CLUSTER __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_mma_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, ELEMENT* __restrict__ dw,
                          float* partials, int n, int tiles) {
  extern __shared__ __align__(16) unsigned char staged[];
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(staged));
  const int number = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = number % kChannelGroups,
            warp = number / kChannelGroups;
  const int step = gridDim.y;

  constexpr int kAhead = kStages - 1;  // tiles under way while one is added
  Accumulators accumulators = {};
  int at = 0, to = 0;
#pragma unroll 1
  for (int iteration = -kAhead, tile = blockIdx.y - kAhead * step; tile < tiles; ++iteration, tile += step) {
    if (iteration >= 0) {
      wait_for_copies<maximum(0, kAhead - 1)>();
      __syncthreads();  // the tile has arrived, and every warp has read the one that is overwritten next
    }
    if (tile + kAhead * step < tiles) stage_tile(base + to * kStageBytes, x, dy, n, tile + kAhead * step);
    commit_copies();
    to = to + 1 == kStages ? 0 : to + 1;
    if (iteration < 0) continue;
    if constexpr (kAhead == 0) {
      wait_for_copies<0>();
      __syncthreads();  // the tile has arrived
    }
    add_tile(accumulators, base + at * kStageBytes, tile, group, warp);
    at = at + 1 == kStages ? 0 : at + 1;
  }
  wait_for_copies<0>();
  __syncthreads();  // every warp has read the last tile, which the sums overwrite
  float* const warp_accumulators = reinterpret_cast<float*>(staged);
#if CLUSTER > 1
  stage_accumulators(warp_accumulators, accumulators, group, warp);
  add_cluster(dw, warp_accumulators);
#else
  griddepcontrol_launch_dependents();
  stage_accumulators(warp_accumulators, accumulators, group, warp);
  __syncthreads();  // the accumulators of every warp are staged
  if (gridDim.y == 1)
    store_accumulators(dw, warp_accumulators);
  else
    store_accumulators(partials + static_cast<int64>(blockIdx.y) * kAllChannels * kTaps, warp_accumulators);
#endif
}

constexpr int kFinishThreads = 256;

// Adds the blocks' accumulators.
extern "C" __global__ void __launch_bounds__(kFinishThreads)
    depthwise_mma_weights_finish(const float* partials, ELEMENT* dw, int size, int splits, int lanes) {
  reduce_split_k<kFinishThreads, 4>(partials, dw, size, splits, lanes);
}
