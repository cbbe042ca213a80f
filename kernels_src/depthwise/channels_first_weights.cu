// Backward weights of depthwise convolution of NCHW tensors; accumulators are float32; m = MULTIPLIER.
// dw[k,y,x] = sum_{n,o,p} dy[n,k,o,p] * x[n, k/m, o*stride - pad + y*dilation, p*stride - pad + x*dilation].
//
// A block computes CHANNEL_IMAGES filters, from the same number of channels of dy, for one split of the units. A unit
// is an image or, for one filter, a row block of an image. A unit meets a contiguous segment of x and one of dy. UNITS
// units at a time are copied to BUFFERS buffers of shared memory. A thread multiplies register tiles of dy, TILE_ROWS x
// TILE_COLUMNS, by their windows of x, into accumulators of all taps. The accumulators are added over the block's
// threads through shared memory, and over SPLITS blocks by a split-K reduction or, if CLUSTERED, by the cluster.
// Grid: one dimension, splits innermost.
#include "depthwise/register_tile.cuh"

#if !defined(ELEMENT) || !defined(FILTERS) || !defined(MULTIPLIER) || !defined(H) || !defined(W) || !defined(OUT_H)
#error "define ELEMENT, FILTERS, MULTIPLIER, H, W and OUT_H"
#endif
#if !defined(OUT_W) || !defined(FILTER_H) || !defined(FILTER_W) || !defined(STRIDE_H) || !defined(STRIDE_W)
#error "define OUT_W, FILTER_H, FILTER_W, STRIDE_H and STRIDE_W"
#endif
#if !defined(DILATION_H) || !defined(DILATION_W) || !defined(PAD_H) || !defined(PAD_W) || !defined(CHANNEL_IMAGES)
#error "define DILATION_H, DILATION_W, PAD_H, PAD_W and CHANNEL_IMAGES"
#endif
#if !defined(ROW_BLOCKS) || !defined(TILE_ROWS) || !defined(TILE_COLUMNS) || !defined(UNITS) || !defined(BUFFERS) || \
    !defined(THREADS)
#error "define ROW_BLOCKS, TILE_ROWS, TILE_COLUMNS, UNITS, BUFFERS and THREADS"
#endif
#if !defined(SPLITS) || !defined(CLUSTERED) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define SPLITS, CLUSTERED, MIN_BLOCKS and SHARED_BYTES"
#endif
#if CLUSTERED
#include "common/hopper.cuh"
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#else
#include "common/split_k.cuh"
#define CLUSTER
#endif

constexpr int kChannelImages = CHANNEL_IMAGES, kRowBlocks = ROW_BLOCKS, kUnits = UNITS, kThreads = THREADS,
              kMultiplier = MULTIPLIER;
static_assert(kChannelImages == 1 || kRowBlocks == 1, "ROW_BLOCKS must be 1 where a block has several filters");
static_assert(32 % kChannelImages == 0 && kThreads % 32 == 0,
              "CHANNEL_IMAGES must divide a warp, and THREADS be whole warps: lanes of one filter recur");
static_assert(BUFFERS >= 1 && SPLITS >= 1 && (!CLUSTERED || (SPLITS > 1 && SPLITS <= 8)),
              "a cluster has 2 to 8 blocks");
constexpr int kRowTiles = ceil_div(OUT_H, TILE_ROWS), kColumnTiles = ceil_div(OUT_W, TILE_COLUMNS);
constexpr int kRowBlockTiles = ceil_div(kRowTiles, kRowBlocks);
static_assert((kRowBlocks - 1) * kRowBlockTiles < kRowTiles, "every row block must have rows");
using Rows = Axis<H, FILTER_H, STRIDE_H, DILATION_H, PAD_H, TILE_ROWS, kRowTiles, false>;
using Columns = Axis<W, FILTER_W, STRIDE_W, DILATION_W, PAD_W, TILE_COLUMNS, kColumnTiles, false>;

// Channels of x that the filters of a block meet, and rows of a unit.
constexpr int kSources =
    kMultiplier % kChannelImages == 0
        ? 1
        : (kChannelImages - 1 + (kChannelImages % kMultiplier ? kMultiplier - 1 : 0)) / kMultiplier + 1;
constexpr int kRowBlockRows = kRowBlocks == 1 ? H : least(H, (kRowBlockTiles - 1) * Rows::kStep + Rows::kWindow);
constexpr int kSegment = kSources * kRowBlockRows * W,
              kOutSegment = kChannelImages * least(OUT_H, kRowBlockTiles* TILE_ROWS) * OUT_W;
// From unit to unit an odd number of 16-byte words, so that threads on the same elements of eight units meet all banks.
constexpr int odd_padded_size(int count) {
  return (padded_size<ELEMENT>(count) / kCopyElements<ELEMENT> | 1) * kCopyElements<ELEMENT>;
}
constexpr int kPitch = odd_padded_size(kSegment), kOutPitch = odd_padded_size(kOutSegment);

// Shared memory: a row of zeros, if rows of some tiles lie outside, and the buffers, of x and then of dy; later
// accumulators.
constexpr bool kHasZeros = Rows::may_be_outside(Rows::kFirst) || Rows::may_be_outside(Rows::kLast);
constexpr int kZeroElements = kHasZeros ? round_up(W, kCopyElements<ELEMENT>) : 0;
constexpr int kBuffer = kUnits * (kPitch + kOutPitch);
constexpr int kTaps = FILTER_H * FILTER_W;
constexpr int kTotals = CLUSTERED ? round_up(kChannelImages * kTaps, 4) : 0;  // of a block, which its cluster reads
static_assert(SHARED_BYTES == maximum((kZeroElements + BUFFERS * kBuffer) * static_cast<int>(sizeof(ELEMENT)),
                                      4 * (kTaps * kThreads + kTotals)),
              "SHARED_BYTES differs from this layout: the solver computes another");

constexpr int kVector = common_vector<ELEMENT>(W, Columns::kStep);
constexpr int kOutVector = common_vector<ELEMENT>(OUT_W, TILE_COLUMNS);
constexpr int kItems = kChannelImages * kColumnTiles * kRowBlockTiles * kUnits;  // tiles of a stage

// Rows of a unit that lie in memory: of x from first_row on, of dy from out_row on.
struct Unit {
  int image, first_row, rows, out_row, out_rows;
};

__device__ __forceinline__ Unit unit_of(int rank) {
  if constexpr (kRowBlocks == 1) return {rank, 0, H, 0, OUT_H};
  const int row_block = rank % kRowBlocks, origin = row_block * kRowBlockTiles * Rows::kStep;
  const int first_row = min(max(0, origin + Rows::kFirst), H), out_row = row_block * kRowBlockTiles * TILE_ROWS;
  const int end = min(H, origin + (kRowBlockTiles - 1) * Rows::kStep + Rows::kLast + 1);
  return {rank / kRowBlocks, first_row, max(0, end - first_row), out_row,
          min(OUT_H - out_row, kRowBlockTiles * TILE_ROWS)};
}

// The filters of a block, and the channels they belong to.
struct BlockFilters {
  int filter, filters, channel, channels;
};

// First elements of a unit's segments.
__device__ __forceinline__ int first_of(const BlockFilters& own, const Unit& unit) {
  return ((unit.image * (FILTERS / kMultiplier) + own.channel) * H + unit.first_row) * W;
}
__device__ __forceinline__ int first_out_of(const BlockFilters& own, const Unit& unit) {
  return ((unit.image * FILTERS + own.filter) * OUT_H + unit.out_row) * OUT_W;
}

// Starts to copy the units from rank `first` on, up to rank `end`.
__device__ __forceinline__ void load_units(ELEMENT* buffer, const ELEMENT* x, const ELEMENT* dy,
                                           const BlockFilters& own, int first, int end, int images) {
  load_segments<kThreads, kUnits, kSegment, kPitch>(
      buffer, x, images * (FILTERS / kMultiplier) * (H * W), [&](int slot) {
        if (first + slot >= end) return Segment{0, 0};
        const Unit unit = unit_of(first + slot);
        return Segment{first_of(own, unit), (kRowBlocks == 1 ? own.channels * H : unit.rows) * W};
      });
  load_segments<kThreads, kUnits, kOutSegment, kOutPitch>(
      buffer + kUnits * kPitch, dy, images * FILTERS * (OUT_H * OUT_W), [&](int slot) {
        if (first + slot >= end) return Segment{0, 0};
        const Unit unit = unit_of(first + slot);
        return Segment{first_out_of(own, unit), (kRowBlocks == 1 ? own.filters * OUT_H : unit.out_rows) * OUT_W};
      });
}

// A tile of dy as floats, and which of it exists where that is not known to the compiler.
struct RegisterTile {
  float at[TILE_ROWS][TILE_COLUMNS];
  bool is_last_row, is_last_column;
};
constexpr int kSureRows = OUT_H % TILE_ROWS ? OUT_H % TILE_ROWS : TILE_ROWS;
constexpr int kSureColumns = OUT_W % TILE_COLUMNS ? OUT_W % TILE_COLUMNS : TILE_COLUMNS;

__device__ __forceinline__ void read_tile(RegisterTile& tile, const ELEMENT* image, int down, int across) {
  tile.is_last_row = down == kRowTiles - 1;
  tile.is_last_column = across == kColumnTiles - 1;
#pragma unroll
  for (int i = 0; i < TILE_ROWS; ++i) {
    if (i >= kSureRows && tile.is_last_row) continue;
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS; j += kOutVector) {
      if (j >= kSureColumns && tile.is_last_column) continue;
      read_elements<kOutVector>(tile.at[i] + j, image + (down * TILE_ROWS + i) * OUT_W + across * TILE_COLUMNS + j);
    }
  }
}

// Adds what window rows from kRow on contribute. `image` is where the image's row 0 would be staged.
template <int kRow = Rows::kFirst>
__device__ __forceinline__ void add_rows(float (&accumulators)[kTaps], const RegisterTile& tile, const ELEMENT* image,
                                         const ELEMENT* zeros, int row, int column) {
  if constexpr (kRow <= Rows::kLast) {
    if constexpr (Rows::is_met(kRow)) {
      const ELEMENT* from = image + (row + kRow) * W;
      if constexpr (Rows::may_be_outside(kRow))
        from = static_cast<unsigned>(row + kRow) < static_cast<unsigned>(H) ? from : zeros;
      float window[Columns::kWindow];
      read_window<Columns, kVector>(window, from, column);
#pragma unroll
      for (int i = 0; i < TILE_ROWS; ++i) {
#pragma unroll
        for (int y = 0; y < FILTER_H; ++y) {
          if (Rows::at(i, y) != kRow || (i >= kSureRows && tile.is_last_row)) continue;
#pragma unroll
          for (int j = 0; j < TILE_COLUMNS; ++j) {
            if (j >= kSureColumns && tile.is_last_column) continue;
#pragma unroll
            for (int x = 0; x < FILTER_W; ++x) {
              const int source = Columns::at(j, x);
              if (Columns::is_outside(source)) continue;
              float& sum = accumulators[y * FILTER_W + x];
              sum = fmaf(window[source - Columns::kFirst], tile.at[i][j], sum);
            }
          }
        }
      }
    }
    add_rows<kRow + 1>(accumulators, tile, image, zeros, row, column);
  }
}

// Adds the tiles of a stage's units.
__device__ __forceinline__ void add_units(float (&accumulators)[kTaps], const ELEMENT* buffer, const ELEMENT* zeros,
                                          const BlockFilters& own, int first, int end) {
#pragma unroll 1
  for (int item = threadIdx.x; item < kItems; item += kThreads) {
    const int filter = item % kChannelImages, rest = item / kChannelImages, across = rest % kColumnTiles;
    const int slot = rest / (kColumnTiles * kRowBlockTiles);
    if (first + slot >= end) break;
    const Unit unit = unit_of(first + slot);
    const int down = rest / kColumnTiles % kRowBlockTiles + unit.out_row / TILE_ROWS;
    if (filter >= own.filters || (kRowBlocks > 1 && down >= kRowTiles)) continue;
    const int source = (own.filter + filter) / kMultiplier - own.channel;
    const ELEMENT* const in = buffer + slot * kPitch + first_of(own, unit) % kCopyElements<ELEMENT> + source * (H * W);
    const ELEMENT* const out = buffer + kUnits * kPitch + slot * kOutPitch +
                               first_out_of(own, unit) % kCopyElements<ELEMENT> + filter * (OUT_H * OUT_W);
    RegisterTile tile;
    read_tile(tile, out - unit.out_row * OUT_W, down, across);
    add_rows(accumulators, tile, in - unit.first_row * W, zeros, down * Rows::kStep, across * Columns::kStep);
  }
}

// Adds the accumulators of all threads: those of filter q are in threads q, q + kChannelImages and so on.
template <typename T>
__device__ __forceinline__ void write_accumulators(T* to, float* shared, const float (&accumulators)[kTaps],
                                                   int filters) {
  __syncthreads();  // every thread has read the buffers before sums overwrite them
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) shared[tap * kThreads + threadIdx.x] = accumulators[tap];
  __syncthreads();  // the accumulators of all threads are in place
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 2
  for (int iteration = 0; iteration < ceil_div(kTaps, kWarps); ++iteration) {
    const int tap = iteration * kWarps + warp;
    const float* const from = shared + min(tap, kTaps - 1) * kThreads + lane;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kThreads; i += 32) sum += from[i];
#pragma unroll
    for (int distance = 16; distance >= kChannelImages; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (tap < kTaps && lane < filters) to[lane * kTaps + tap] = convert<T>(sum);
  }
}

#if CLUSTERED
// Adds the totals of the blocks of a cluster in order. The blocks share the accumulators out.
__device__ __forceinline__ void add_totals(ELEMENT* dw, const float* totals, int count) {
  cluster_arrive<true>();
  cluster_wait();  // the totals of every block are in place
  const int first = 4 * (cluster_rank() * kThreads + threadIdx.x);
  if (first < count) {
    float accumulators[4] = {};
#pragma unroll
    for (int rank = 0; rank < SPLITS; ++rank) {
      const Vector<float, 4> part = load_cluster_floats(map_shared_rank(shared_address(totals + first), rank));
#pragma unroll
      for (int i = 0; i < 4; ++i) accumulators[i] += part.at[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i < count) dw[first + i] = convert<ELEMENT>(accumulators[i]);
  }
  cluster_arrive<false>();
  cluster_wait();  // others read this block's totals until here
}
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_channels_first_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x,
                                     ELEMENT* __restrict__ dw, float* __restrict__ partials, int images) {
  extern __shared__ __align__(16) float shared[];
  ELEMENT* const staged = reinterpret_cast<ELEMENT*>(shared);
  ELEMENT* const buffers = staged + kZeroElements;
  const int split = blockIdx.x % SPLITS;
  BlockFilters own;
  own.filter = blockIdx.x / SPLITS * kChannelImages;
  own.filters = min(kChannelImages, FILTERS - own.filter);
  own.channel = own.filter / kMultiplier;
  own.channels = (own.filter + own.filters - 1) / kMultiplier - own.channel + 1;
  // Units are dealt in stages, so that all but the last are whole.
  const int units = images * kRowBlocks, stages = (units + kUnits - 1) / kUnits;
  const int first_stage = split * stages / SPLITS, end_stage = (split + 1) * stages / SPLITS;

#pragma unroll
  for (int ahead = 0; ahead < maximum(1, BUFFERS - 1); ++ahead) {
    if (first_stage + ahead < end_stage)
      load_units(buffers + ahead * kBuffer, x, dy, own, (first_stage + ahead) * kUnits, units, images);
    commit_copies();
  }
  if constexpr (!CLUSTERED) griddepcontrol_launch_dependents();
  if constexpr (kHasZeros) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kZeroElements / kCopyElements<ELEMENT>; i += kThreads)
      reinterpret_cast<uint4*>(staged)[i] = make_uint4(0, 0, 0, 0);
  }
  float accumulators[kTaps] = {};
#pragma unroll 1
  for (int stage = first_stage; stage < end_stage; ++stage) {
    wait_for_copies<maximum(0, BUFFERS - 2)>();
    __syncthreads();  // the stage has arrived, and every thread has read the buffer that is filled next
    const ELEMENT* const buffer = buffers + (stage - first_stage) % BUFFERS * kBuffer;
    if constexpr (BUFFERS > 1) {
      const int next = stage + BUFFERS - 1;
      if (next < end_stage)
        load_units(buffers + (next - first_stage) % BUFFERS * kBuffer, x, dy, own, next * kUnits, units, images);
      commit_copies();
    }
    add_units(accumulators, buffer, staged, own, stage * kUnits, units);
    if constexpr (BUFFERS == 1) {
      if (stage + 1 < end_stage) {
        __syncthreads();  // every thread has read the buffer
        load_units(buffers, x, dy, own, (stage + 1) * kUnits, units, images);
      }
      commit_copies();
    }
  }
  const int at = own.filter * kTaps;
#if CLUSTERED
  float* const totals = shared + kTaps * kThreads;
  write_accumulators(totals, shared, accumulators, own.filters);
  add_totals(dw + at, totals, own.filters * kTaps);
#else
  if constexpr (SPLITS == 1)
    write_accumulators(dw + at, shared, accumulators, own.filters);
  else
    write_accumulators(partials + split * (FILTERS * kTaps) + at, shared, accumulators, own.filters);
#endif
}
#if !CLUSTERED

// dw[i] = sum of partials[split][i] over the splits.
extern "C" __global__ void __launch_bounds__(128)
    depthwise_channels_first_weights_finish(const float* partials, ELEMENT* dw) {
  griddepcontrol_wait();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= FILTERS * kTaps) return;
  dw[i] = convert<ELEMENT>(sum_splits<8, int>(partials, i, FILTERS * kTaps, {0, SPLITS, 1}));
}
#endif
