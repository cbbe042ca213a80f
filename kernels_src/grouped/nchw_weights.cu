// Backward weights of grouped convolutions of NCHW tensors with few channels a group, on tensor cores, per group
//   dw[k,c,i,j] = sum_{n,oh,ow} dy[n,k,oh,ow] * x[n, c, oh*stride - pad + i*dilation, ow*stride - pad + j*dilation].
// K of the products is pixels, in rows as in memory. A block sums UNITS packs of groups over every gridDim.y-th tile of
// IMAGES x ROW_GROUPS x WARP_ROWS rows of outputs; cp.async copies tiles into STAGES stages. Lane 4g + t of a warp
// reads 8 neighbouring pixels of channel g or filter g at once, in one of four streams t: a segment of 8 columns in
// WARP_ROWS rows. The order of pixels along K is free, if x and dy agree. Columns of taps are shifts by single pixels
// within registers. A warp computes an item, 8 or 16 channels x 8 * ITEM_BLOCKS filters, from every WARPS-th set of
// four streams. SHARES blocks share a pack's channels. The accumulators of warps are added in shared memory, those of
// blocks by `grouped_nchw_weights_finish`, in a fixed order.
// Defines: as checked below; X_PITCH and DY_PITCH are elements from row to row, *_CHANNEL bytes by channel.
#include "common/split_k.cuh"
#include "common/mma.cuh"
#include "grouped/nchw_rows.cuh"

#if !defined(ELEMENT) || !defined(GROUP_C) || !defined(GROUP_K) || !defined(FILTER_Y) || !defined(FILTER_X) ||     \
    !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W) || !defined(PAD_H) || \
    !defined(PAD_W) || !defined(IN_H) || !defined(IN_W) || !defined(OUT_H) || !defined(OUT_W)
#error "define the problem: ELEMENT, GROUP_*, FILTER_*, STRIDE_*, DILATION_*, PAD_*, IN_* and OUT_*"
#endif
#if !defined(UNITS) || !defined(SHARES) || !defined(ITEM_BLOCKS) || !defined(IMAGES) || !defined(ROW_GROUPS) || \
    !defined(WARP_ROWS) || !defined(ROW_TILES) || !defined(WARPS) || !defined(STAGES) || !defined(X_PITCH) ||   \
    !defined(DY_PITCH) || !defined(X_CHANNEL) || !defined(DY_CHANNEL) || !defined(MIN_BLOCKS) ||                \
    !defined(SHARED_BYTES)
#error "define the tiling: UNITS, SHARES, ITEM_BLOCKS, IMAGES, ROW*, WARPS, STAGES, *_PITCH, *_CHANNEL, ..."
#endif

using Group = PackedGroups<GROUP_C, GROUP_K>;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
constexpr int kUnits = UNITS, kPackedK = Group::kPackedK, kShareC = Group::kPackedC / SHARES;
constexpr int kC = kUnits * kShareC, kK = kUnits * kPackedK;
static_assert(SHARES == 1 || (UNITS == 1 && Group::kPackedGroups == 1 && kShareC % 8 == 0),
              "blocks share channels of a group");

// Items: 8 or 16 channels and kBlocks times 8 filters.
constexpr int kChannelBlocks = kShareC % 16 ? 1 : 2, kItemsC = kShareC / 8 / kChannelBlocks;
constexpr int kBlocks = ITEM_BLOCKS, kItemsK = kPackedK / 8 / kBlocks;
static_assert(kPackedK / 8 % kBlocks == 0, "items share the filters evenly");
constexpr int kWarps = WARPS, kThreads = 32 * kUnits * kItemsC * kItemsK * kWarps;

// A tile's rows of outputs, and the inputs that they meet.
constexpr int kWarpRows = WARP_ROWS, kImages = IMAGES, kStages = STAGES, kTileRows = kWarpRows * ROW_GROUPS;
constexpr int kPatchRows = (kTileRows - 1) * STRIDE_H + (kFilterY - 1) * DILATION_H + 1;
constexpr int kSegments = ceil_div(OUT_W, 8), kStreams = kSegments * ROW_GROUPS * kImages,
              kSets = ceil_div(kStreams, 4);
using Inputs = NchwRows<kC, kImages, kPatchRows, IN_H, IN_W, X_PITCH, X_CHANNEL>;
using Gradients = NchwRows<kK, kImages, kTileRows, OUT_H, OUT_W, DY_PITCH, DY_CHANNEL>;
static_assert(Gradients::kPitch >= 8 * kSegments, "a row of dy holds its segments");
static_assert(ROW_TILES == 1 || !(Inputs::kFlat || Gradients::kFlat), "images of odd width are staged whole");

// Columns of taps are shifts; a lane has the pairs of pixels around its segment that they reach.
constexpr int floor_half(int a) {
  return a >= 0 ? a / 2 : -((1 - a) / 2);
}
constexpr int kLeast = -PAD_W, kMost = (kFilterX - 1) * DILATION_W - PAD_W;
constexpr int kPairs = 4 * STRIDE_W;  // of a segment, in x
static_assert(STRIDE_W <= 2 && kLeast >= -2 && kMost <= (STRIDE_W == 1 ? 2 : 3), "shifts reach a pair either side");
static_assert(Inputs::kPitch >= IN_W - kLeast && Inputs::kPitch > (OUT_W - 1) * STRIDE_W + kMost &&
                  Inputs::kPitch >= 8 * kSegments * STRIDE_W,
              "rows end in the padding of both sides");

// Where things are in shared memory: rows of odd width laid out, then the stages.
constexpr int kLaidInputs = Inputs::kFlat ? Inputs::kBytes : 0;
constexpr int kLaid = kLaidInputs + (Gradients::kFlat ? Gradients::kBytes : 0);
constexpr int kStageBytes = Inputs::kArrivingBytes + Gradients::kArrivingBytes;
constexpr int kZerosAt = kLaid + kStages * kStageBytes;  // rows of dy of streams that are not there
constexpr int kZeroBytes = kStreams % 4 ? (kWarpRows - 1) * Gradients::kRowBytes + 16 : 0;

// The warps' accumulators, a row a filter of a block.
constexpr int kRowFloats = (SHARES == 1 ? GROUP_C : kShareC) * kTaps;
constexpr int kAccumulatorPitch = round_up(kRowFloats, 4) + ((8 - round_up(kRowFloats, 4)) % 16 + 16) % 16;
constexpr int kAccumulatorBytes = 4 * kWarps * kK * kAccumulatorPitch;
static_assert(SHARED_BYTES == maximum(kZerosAt + kZeroBytes, kAccumulatorBytes),
              "solvers/grouped/nchw_tiling.py counts otherwise");

// What a warp computes of each tile.
struct WarpTile {
  int unit, channel, filter, set;
};

__device__ __forceinline__ WarpTile warp_tile_of(int warp) {
  return {warp % kUnits, warp / kUnits % kItemsC * kChannelBlocks * 8,
          warp / (kUnits * kItemsC) % kItemsK * kBlocks * 8, warp / (kUnits * kItemsC * kItemsK)};
}

// Halves of products, 8 channels shifted for a column of taps each, in pairs.
constexpr int kHalves = kChannelBlocks * kFilterX, kPairsOfHalves = ceil_div(kHalves, 2);

// The row of dy that a tap multiplies with row `row` of a stream's rows of x; negative if none.
constexpr int met_row(int row, int tap) {
  const int from = row - tap * DILATION_H;
  return from >= 0 && from % STRIDE_H == 0 && from / STRIDE_H < kWarpRows ? from / STRIDE_H : -1;
}

constexpr bool is_met(int row) {
  for (int tap = 0; tap < kFilterY; ++tap)
    if (met_row(row, tap) >= 0) return true;
  return false;
}

using Accumulators = float[kPairsOfHalves][kFilterY][kBlocks][4];

__device__ __forceinline__ void load_four(unsigned* to, const unsigned char* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

// Zeros that the compiler does not know to be zeros. Added to the selectors of shifts, they have every operand written
// for its product alone, where the product wants it, rather than copied from those that happen to be equal.
struct Hidden {
  unsigned zero[4];
};

// A pair of pixels, number `pair` of four STRIDE_W apart, `shift` from a segment whose pairs are in[1] on.
__device__ __forceinline__ unsigned shifted(const unsigned (&in)[kPairs + 2], int shift, int pair, unsigned zero) {
  const int low = 1 + floor_half(shift) + pair * STRIDE_W;
  const bool is_odd = shift % 2 != 0;
  const unsigned selector = STRIDE_W == 1 ? (is_odd ? 0x5432u : 0x3210u) : is_odd ? 0x7632u : 0x5410u;
  return __byte_perm(in[low], in[low <= kPairs ? low + 1 : low], selector + zero);
}

// Adds the pairs before and after a segment, number `column` of its row: other lanes have them where four streams are
// whole rows.
__device__ __forceinline__ void add_neighbours(unsigned (&in)[kPairs + 2], const unsigned char* segment, int column) {
  constexpr bool kWholeRows = 4 % kSegments == 0 && IN_W <= 8 * kSegments * STRIDE_W;
  if constexpr (!kWholeRows) {
    if (kLeast < 0) in[0] = *reinterpret_cast<const unsigned*>(segment - 4);
    if (kMost >= STRIDE_W) in[kPairs + 1] = *reinterpret_cast<const unsigned*>(segment + 4 * kPairs);
  } else if constexpr (kSegments > 1) {
    if (kLeast < 0) {
      const unsigned before = __shfl_up_sync(0xffffffffu, in[kPairs], 1);
      in[0] = column > 0 ? before : 0u;
    }
    if (kMost >= STRIDE_W) {
      const unsigned after = __shfl_down_sync(0xffffffffu, in[1], 1);
      in[kPairs + 1] = column < kSegments - 1 ? after : 0u;
    }
  }
}

// Adds what a set of four streams contributes, in this lane segment `column` of its rows; blocks of 8 filters are
// dy_block_bytes apart.
__device__ __forceinline__ void add_streams(Accumulators& accumulators, const unsigned char* x, const unsigned char* dy,
                                            int dy_block_bytes, int column, const Hidden& hidden) {
  unsigned gradients[kWarpRows][kBlocks][4];
#pragma unroll
  for (int row = 0; row < (kWarpRows - 1) * STRIDE_H + (kFilterY - 1) * DILATION_H + 1; ++row) {
    if (row % STRIDE_H == 0 && row / STRIDE_H < kWarpRows)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        load_four(gradients[row / STRIDE_H][block],
                  dy + row / STRIDE_H * Gradients::kRowBytes + block * dy_block_bytes);
    if (!is_met(row)) continue;
    unsigned in[kChannelBlocks][kPairs + 2] = {};
#pragma unroll
    for (int block = 0; block < kChannelBlocks; ++block) {
      const unsigned char* const segment = x + row * Inputs::kRowBytes + block * 8 * Inputs::kChannelBytes;
#pragma unroll
      for (int e = 0; e < kPairs; e += 4) load_four(in[block] + 1 + e, segment + 4 * e);
      add_neighbours(in[block], segment, column);
    }
#pragma unroll
    for (int pair = 0; pair < kPairsOfHalves; ++pair)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        unsigned pixels[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 2 * pair + half < kHalves ? 2 * pair + half : kHalves - 1, column_of_taps = at % kFilterX;
          const int shift = kLeast + column_of_taps * DILATION_W;
          const unsigned zero = hidden.zero[2 * pair + half > at ? 3 : column_of_taps % 3];
          pixels[half] = shifted(in[at / kFilterX], shift, e, zero);
          pixels[2 + half] = shifted(in[at / kFilterX], shift, e + 1, zero);
        }
#pragma unroll
        for (int tap = 0; tap < kFilterY; ++tap) {
          const int to = met_row(row, tap);
          if (to < 0) continue;
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            multiply_add<ELEMENT>(accumulators[pair][tap][block], pixels, gradients[to][block][e],
                                  gradients[to][block][e + 1]);
        }
      }
  }
}

__device__ __forceinline__ void add_tile(Accumulators& accumulators, const unsigned char* x, const unsigned char* dy,
                                         const unsigned char* zeros, const WarpTile& warp_tile, const Hidden& hidden) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll 1
  for (int set = warp_tile.set; set < kSets; set += kWarps) {
    int stream = 4 * set + lane % 4;
    const bool there = kStreams % 4 == 0 || stream < kStreams;
    if (!there) stream = 0;
    const int segment = stream % kSegments, group = stream / kSegments % ROW_GROUPS,
              image = stream / (kSegments * ROW_GROUPS);
    const unsigned char* const inputs =
        x + 16 + (warp_tile.unit * kShareC + warp_tile.channel + g) * Inputs::kChannelBytes +
        image * Inputs::kImageBytes + group * kWarpRows * STRIDE_H * Inputs::kRowBytes + 16 * STRIDE_W * segment;
    const unsigned char* const gradients =
        dy + 16 + (warp_tile.unit * kPackedK + warp_tile.filter + g) * Gradients::kChannelBytes +
        image * Gradients::kImageBytes + group * kWarpRows * Gradients::kRowBytes + 16 * segment;
    add_streams(accumulators, inputs, there ? gradients : zeros, there ? 8 * Gradients::kChannelBytes : 0, segment,
                hidden);
  }
}

struct Sizes {
  int n, channels, filters;
};

struct Origins {
  NchwOrigin x, dy;
};

__device__ __forceinline__ Origins origins_of(const Sizes& sizes, int tile) {
  const int row = tile % ROW_TILES * kTileRows, image = tile / ROW_TILES * kImages, unit = blockIdx.x * kUnits;
  const int channel = unit * Group::kPackedC + blockIdx.z * kShareC;
  return {{sizes.n, sizes.channels, image, channel, row * STRIDE_H - PAD_H},
          {sizes.n, sizes.filters, image, unit * kPackedK, row}};
}

__device__ __forceinline__ void stage_tile(unsigned to, const ELEMENT* x, const ELEMENT* dy, const Sizes& sizes,
                                           int tile) {
  const Origins origins = origins_of(sizes, tile);
  stage_rows<Inputs, kThreads>(to, x, origins.x);
  stage_rows<Gradients, kThreads>(to + Inputs::kArrivingBytes, dy, origins.dy);
}

// Writes a warp's accumulators: rows of filters, [channel][tap].
__device__ __forceinline__ void stage_accumulators(float* staged, const Accumulators& accumulators,
                                                   const WarpTile& warp_tile) {
  const int lane = threadIdx.x % 32;
  float* const to = staged + warp_tile.set * kK * kAccumulatorPitch;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int k = warp_tile.filter + 8 * block + lane % 4 * 2 + e;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int channel =
            warp_tile.channel + half / kFilterX * 8 + lane / 4 - (SHARES == 1 ? k / GROUP_K * GROUP_C : 0);
        if (channel < 0 || channel >= GROUP_C) continue;
        float* const row = to + (warp_tile.unit * kPackedK + k) * kAccumulatorPitch + channel * kTaps + half % kFilterX;
#pragma unroll
        for (int tap = 0; tap < kFilterY; ++tap)
          row[tap * kFilterX] = accumulators[half / 2][tap][block][half % 2 * 2 + e];
      }
    }
}

// Adds the warps' accumulators and stores them: elements if there is one block for them, else floats.
template <typename T>
__device__ __forceinline__ void store_accumulators(T* out, const float* staged, int filters) {
  constexpr int kVector = greatest_divisor(4, kRowFloats), kVectors = kRowFloats / kVector;
  const int first = blockIdx.x * kK;
#pragma unroll 2
  for (int i = threadIdx.x; i < kK * kVectors; i += kThreads) {
    const int k = i / kVectors, at = i % kVectors * kVector;
    if (first + k >= filters) continue;
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
    *reinterpret_cast<Vector<T, kVector>*>(out + (first + k) * GROUP_C * kTaps + blockIdx.z * kRowFloats + at) =
        rounded;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped_nchw_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, ELEMENT* __restrict__ dw,
                         float* __restrict__ partials, int n, int channels, int filters, int tiles) {
  extern __shared__ __align__(16) unsigned char staged[];
  const unsigned stages = static_cast<unsigned>(__cvta_generic_to_shared(staged)) + kLaid;
  const Sizes sizes = {n, channels, filters};
  const WarpTile warp_tile = warp_tile_of(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0));
  const int step = gridDim.y;
  const Hidden hidden = {{static_cast<unsigned>(n >> 31), static_cast<unsigned>(channels >> 31),
                          static_cast<unsigned>(filters >> 31),
                          static_cast<unsigned>(tiles >> 31)}};  // sizes are positive

  // What copies never write is zeroed once.
  if constexpr (Inputs::kFlat) clear_margins<Inputs, kThreads>(staged);
  if constexpr (Gradients::kFlat) clear_margins<Gradients, kThreads>(staged + kLaidInputs);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    unsigned char* const at = staged + kLaid + stage * kStageBytes;
    if constexpr (!Inputs::kFlat) clear_margins<Inputs, kThreads>(at);
    if constexpr (!Gradients::kFlat) clear_margins<Gradients, kThreads>(at + Inputs::kArrivingBytes);
  }
  for (int i = 16 * threadIdx.x; i < kZeroBytes; i += 16 * kThreads)
    *reinterpret_cast<uint4*>(staged + kZerosAt + i) = {};
  __syncthreads();  // words that hold margins beside pixels are zeroed before pixels arrive

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    const int tile = blockIdx.y + stage * step;
    if (tile < tiles) stage_tile(stages + stage * kStageBytes, x, dy, sizes, tile);
    commit_copies();
  }
  Accumulators accumulators = {};
  int at = 0;
#pragma unroll 1
  for (int tile = blockIdx.y; tile < tiles; tile += step) {
    if constexpr (kStages == 1) {
      __syncthreads();  // every warp has read the tile before
      stage_tile(stages, x, dy, sizes, tile);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();  // the tile has arrived
    } else {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the tile has arrived, and every warp has read the one that is overwritten next
      const int next = tile + (kStages - 1) * step, to = at == 0 ? kStages - 1 : at - 1;
      if (next < tiles) stage_tile(stages + to * kStageBytes, x, dy, sizes, next);
      commit_copies();
    }
    const unsigned char* const arrived = staged + kLaid + at * kStageBytes;
    const Origins origins = origins_of(sizes, tile);
    if constexpr (Inputs::kFlat) lay_out_rows<Inputs, kThreads>(staged, arrived, origins.x.first_row);
    if constexpr (Gradients::kFlat)
      lay_out_rows<Gradients, kThreads>(staged + kLaidInputs, arrived + Inputs::kArrivingBytes, origins.dy.first_row);
    if constexpr (kLaid > 0) __syncthreads();  // rows of odd width are laid out; the barrier above frees them
    add_tile(accumulators, Inputs::kFlat ? staged : arrived,
             Gradients::kFlat ? staged + kLaidInputs : arrived + Inputs::kArrivingBytes, staged + kZerosAt, warp_tile,
             hidden);
    at = at + 1 == kStages ? 0 : at + 1;
  }
  wait_for_copies<0>();
  __syncthreads();  // every warp has read the last tile, which the sums overwrite
  griddepcontrol_launch_dependents();
  float* const warp_accumulators = reinterpret_cast<float*>(staged);
  stage_accumulators(warp_accumulators, accumulators, warp_tile);
  __syncthreads();  // the accumulators of every warp are staged
  if (gridDim.y == 1)
    store_accumulators(dw, warp_accumulators, filters);
  else
    store_accumulators(partials + static_cast<int64>(blockIdx.y) * filters * GROUP_C * kTaps, warp_accumulators,
                       filters);
}

constexpr int kFinishThreads = 256;

extern "C" __global__ void __launch_bounds__(kFinishThreads)
    grouped_nchw_weights_finish(const float* partials, ELEMENT* dw, int size, int splits, int lanes) {
  reduce_split_k<kFinishThreads, 4>(partials, dw, size, splits, lanes);
}
