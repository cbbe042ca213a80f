// Grouped convolution of NCHW tensors with few channels a group; per group, forward and backward data,
//   y[n,k,oh,ow] = sum_{c,i,j} x[n, c, oh*stride - pad + i*dilation, ow*stride - pad + j*dilation] * w[k,c,i,j],
//   dx[n,c,h,w] = sum_{k,i,j} dy[n, k, (h + pad - i*dilation) / stride, likewise] * w[k,c,i,j], where whole.
// Implicit GEMM on tensor cores: filters, in registers, times rows of pixels as they lie in memory. A block computes
// UNITS units of groups for every gridDim.y-th tile of IMAGES x ROW_GROUPS x WARP_ROWS whole rows; cp.async copies
// tiles into STAGES stages. A warp computes 16 results of a unit for WARP_ROWS rows of all columns. Columns of taps are
// shifts between lanes: a warp reads each fragment of pixels from shared memory once. Forward with stride 2, shuffles
// between lanes separate even and odd columns; the columns of a product are then 0, 4, 1, 5, 2, 6, 3, 7. Backward data
// has stride_h * stride_w phases: coordinates modulo the stride, each with taps of its own.
// Defines: as checked below; FLIPPED is backward data, IN_* and OUT_* sizes of what is read and written.
#include "grouped/group_axis.cuh"
#include "grouped/group_filters.cuh"
#include "common/mma.cuh"
#include "grouped/nchw_rows.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#endif

#if !defined(ELEMENT) || !defined(GROUP_C) || !defined(GROUP_K) || !defined(FLIPPED) || !defined(FILTER_Y) || \
    !defined(FILTER_X) || !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W)
#error "define the convolution: ELEMENT, GROUP_*, FLIPPED, FILTER_*, STRIDE_* and DILATION_*"
#endif
#if !defined(PAD_H) || !defined(PAD_W) || !defined(IN_H) || !defined(IN_W) || !defined(OUT_H) || !defined(OUT_W) || \
    !defined(UNITS) || !defined(IMAGES) || !defined(ROW_GROUPS) || !defined(WARP_ROWS) || !defined(ROW_TILES) ||    \
    !defined(STAGES) || !defined(PITCH) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define PAD_*, IN_*, OUT_* and the tiling: UNITS, IMAGES, ROW*, STAGES, PITCH, MIN_BLOCKS, SHARED_BYTES"
#endif

using Group = PackedGroups<GROUP_C, GROUP_K>;
using AxisH = GroupAxis<FLIPPED, STRIDE_H, DILATION_H, PAD_H, FILTER_Y>;
using AxisW = GroupAxis<FLIPPED, STRIDE_W, DILATION_W, PAD_W, FILTER_X>;
constexpr bool kFlipped = FLIPPED;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;

// A unit: packs of groups whose channels and filters are multiples of 16.
constexpr int kUnitPackedGroups = Group::kPackedC % 16 || Group::kPackedK % 16 ? 2 : 1;
constexpr int kUnitC = kUnitPackedGroups * Group::kPackedC, kUnitK = kUnitPackedGroups * Group::kPackedK;
constexpr int kUnitIn = kFlipped ? kUnitK : kUnitC, kUnitOut = kFlipped ? kUnitC : kUnitK;
constexpr int kUnits = UNITS, kIn = kUnits * kUnitIn, kOut = kUnits * kUnitOut;
constexpr int kDepth = kUnitIn / 16, kResultBlocks = kUnitOut / 16;
static_assert(kDepth <= 2, "fragments of a row are read two at a time");

constexpr int kWarpRows = WARP_ROWS, kImages = IMAGES, kStages = STAGES, kTileRows = kWarpRows * ROW_GROUPS;
constexpr int kThreads = 32 * kUnits * kResultBlocks * ROW_GROUPS * kImages;

// Tiles of 8 outputs of a row and phase, and tiles of 8 inputs that they meet.
constexpr int kTiles = ceil_div(ceil_div(OUT_W, AxisW::kPhases), 8);
constexpr int kMet = ceil_div((8 * kTiles - 1) * AxisW::kStep + AxisW::kLast + 1, 8);
constexpr int kInTiles = round_up(maximum(kTiles * AxisW::kStep, -maximum(-kMet, -ceil_div(IN_W, 8))), AxisW::kStep);
static_assert(AxisW::kStep <= 2 && AxisW::kPhases <= 2, "columns are de-interleaved in two");
static_assert(AxisW::kStep == 1 ? AxisW::kFirst >= -7 && AxisW::kLast <= 7 : AxisW::kFirst >= -2 && AxisW::kLast <= 3,
              "shifts reach the next tile");

constexpr int kPatchRows = (kTileRows - 1) * AxisH::kStep + AxisH::kReach + 1;
constexpr int kChannelBytes = odd_words(2 * kImages * kPatchRows * PITCH);
using Inputs = NchwRows<kIn, kImages, kPatchRows, IN_H, IN_W, PITCH, kChannelBytes>;
static_assert(PITCH >= 8 * kInTiles, "a row holds the tiles that are read");
static_assert(ROW_TILES == 1 || !Inputs::kFlat, "images of odd width are staged whole");

// The staged results: [image][channel][row][column], without gaps if a tile has whole images.
constexpr bool kWhole = ROW_TILES == 1;
constexpr int kArea = OUT_H * OUT_W, kOutRows = kTileRows * AxisH::kPhases;
constexpr int kChannelPitch = kWhole ? kArea : odd_words(2 * kOutRows * OUT_W) / 2;
constexpr int kResultBytes = 2 * kImages * kOut * kChannelPitch;

// Shared memory: rows laid out, the stages, then the results, where the filters are before. Filters of 8 channels and
// more are read from rows as they lie in memory, others are arranged.
using Filters = FilterRows<GROUP_C, GROUP_K, kTaps, kUnits * kUnitK, false>;
constexpr bool kArranged = Group::kPackedGroups > 1;
constexpr int kLaid = Inputs::kFlat ? Inputs::kBytes : 0, kStageBytes = Inputs::kArrivingBytes;
constexpr int kResultsAt = kLaid + kStages * kStageBytes;
constexpr int kZerosAt = kResultsAt + Filters::kBytes, kRawFiltersAt = kZerosAt + 16;
constexpr int kFilterBytes = Filters::kBytes + (kArranged ? 16 + Filters::kRawBytes : 0);
static_assert(SHARED_BYTES == kResultsAt + maximum(kResultBytes, kFilterBytes),
              "solvers/grouped/nchw_tiling.py counts otherwise");

// What a warp computes of each tile.
struct WarpTile {
  int unit, result_block, group, image;
};

__device__ __forceinline__ WarpTile warp_tile_of(int warp) {
  return {warp % kUnits, warp / kUnits % kResultBlocks, warp / (kUnits * kResultBlocks) % ROW_GROUPS,
          warp / (kUnits * kResultBlocks * ROW_GROUPS)};
}

// A warp's filters: matrices of 16 results x 16 summed channels.
using Matrices = unsigned[kTaps][kDepth][4];

__device__ __forceinline__ void load_filters(Matrices& to, unsigned filters, unsigned zeros,
                                             const WarpTile& warp_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int depth = 0; depth < kDepth; ++depth) {
    const int result = 2 * warp_tile.result_block + lane / 8 % 2, summed = 2 * depth + lane / 16;
    const int k = 8 * (kFlipped ? summed : result), c = 8 * (kFlipped ? result : summed);
    const bool is_there = k / Group::kPackedK == c / Group::kPackedC;
    const unsigned from =
        filters + (warp_tile.unit * kUnitK + k + lane % 8) * Filters::kRowBytes + 2 * (c % Group::kPackedC);
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const unsigned address = is_there ? from + tap * Filters::kTapBytes : zeros;
      if constexpr (kFlipped)
        load_transposed(to[tap][depth], address);
      else
        load_matrices(to[tap][depth], address);
    }
  }
}

// The same from filters that are not arranged: lane 4g + t has rows g, g + 8, columns 2t, 2t + 8 and the next ones.
__device__ __forceinline__ void load_raw_filters(Matrices& to, const unsigned char* filters,
                                                 const WarpTile& warp_tile) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4 * 2;
#pragma unroll
  for (int depth = 0; depth < kDepth; ++depth)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int result = 8 * (2 * warp_tile.result_block + e % 2), summed = 8 * (2 * depth + e / 2);
      const int k = kFlipped ? summed : result, c = kFlipped ? result : summed;
      unsigned pairs[kTaps] = {};
      if (k / Group::kPackedK == c / Group::kPackedC)
        load_pairs<Filters, kFlipped>(pairs, filters, warp_tile.unit * kUnitK + k + (kFlipped ? t : g),
                                      c % Group::kPackedC + (kFlipped ? g : t));
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) to[tap][depth][e] = pairs[tap];
    }
}

// The values of lanes whose pixel is kBy further, given those of the tiles before, here and after.
template <int kBy>
__device__ __forceinline__ unsigned shifted(unsigned before, unsigned here, unsigned after) {
  const int lane = threadIdx.x % 32, pixel = lane / 4;
  if constexpr (kBy > 0) return __shfl_sync(0xffffffffu, pixel < kBy ? after : here, (lane + 4 * kBy) % 32);
  if constexpr (kBy < 0) return __shfl_sync(0xffffffffu, pixel >= 8 + kBy ? before : here, (lane + 4 * kBy + 32) % 32);
  return here;
}

// The same for tiles of de-interleaved columns, whose order is 0, 4, 1, 5, 2, 6, 3, 7; kBy is -1, 0 or 1.
template <int kBy>
__device__ __forceinline__ unsigned shifted_deinterleaved(unsigned before, unsigned here, unsigned after) {
  const int lane = threadIdx.x % 32, at = lane / 4;
  if constexpr (kBy > 0)
    return __shfl_sync(0xffffffffu, at == 0 ? after : here, (at < 6 ? at + 2 : 7 - at) * 4 + lane % 4);
  if constexpr (kBy < 0)
    return __shfl_sync(0xffffffffu, at == 7 ? before : here, (at >= 2 ? at - 2 : 7 - at) * 4 + lane % 4);
  return here;
}

// Fragments of one row of pixels: 16 channels x 8 columns a tile; de-interleaved, tiles of even and of odd columns.
using Row = unsigned[AxisW::kStep][kInTiles][2];

// Accumulators of WARP_ROWS rows of outputs.
using Accumulators = float[AxisH::kPhases][AxisW::kPhases][kWarpRows][kTiles][4];

template <typename To>
__device__ __forceinline__ void load_row(To& to, unsigned pixels) {
  constexpr int kInOrder = kDepth == 1 ? 2 : 1;
#pragma unroll
  for (int tile = 0; tile < kInTiles; tile += kInOrder) {
    unsigned both[4];
    load_transposed(both, pixels + 16 * tile);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = kDepth == 1 ? tile + e / 2 : tile, depth = kDepth == 1 ? 0 : e / 2;
      if (at < kInTiles) to[depth][0][at][e % 2] = both[e];
    }
  }
}

// Parts a row's columns: pairs of tiles become one of even columns and one of odd ones.
template <typename Tiles>
__device__ __forceinline__ void deinterleave_columns(Tiles& row) {
  const bool is_odd = threadIdx.x / 4 % 2;
#pragma unroll
  for (int tile = 0; tile < kInTiles / 2; ++tile)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const unsigned low = row[0][2 * tile][e], high = row[0][2 * tile + 1][e];
      const unsigned other = __shfl_xor_sync(0xffffffffu, is_odd ? low : high, 4);
      row[0][tile][e] = is_odd ? other : low;
      row[1][tile][e] = is_odd ? high : other;
    }
}

constexpr int floor_half(int a) {
  return a >= 0 ? a / 2 : -((1 - a) / 2);
}

// What tap kTap of a phase of columns multiplies in a tile.
template <int kPhase, int kTap>
__device__ __forceinline__ void select(unsigned (&to)[2], const Row& row, int tile) {
  constexpr int kOffset = AxisW::offset(kPhase, kTap), kBy = AxisW::kStep == 1 ? kOffset : floor_half(kOffset);
  constexpr int kWhich = AxisW::kStep == 1 ? 0 : kOffset - 2 * kBy, kCount = kInTiles / AxisW::kStep;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const unsigned before = tile > 0 ? row[kWhich][maximum(tile - 1, 0)][e] : 0u;
    const unsigned after = tile + 1 < kCount ? row[kWhich][tile + 1 < kCount ? tile + 1 : 0][e] : 0u;
    if constexpr (AxisW::kStep == 1)
      to[e] = shifted<kBy>(before, row[kWhich][tile][e], after);
    else
      to[e] = shifted_deinterleaved<kBy>(before, row[kWhich][tile][e], after);
  }
}

// Adds what one row of pixels contributes by the taps of a column, and by those of the columns after it.
template <int kPhase, int kTap>
__device__ __forceinline__ void add_taps(Accumulators& accumulators, const Row& pixels, const Matrices& filters,
                                         int row, int depth) {
  if constexpr (AxisW::meets(kPhase, kTap)) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      unsigned selected[2];
      select<kPhase, kTap>(selected, pixels, tile);
#pragma unroll
      for (int phase = 0; phase < AxisH::kPhases; ++phase)
#pragma unroll
        for (int tap = 0; tap < kFilterY; ++tap) {
          const int to = AxisH::output<kWarpRows>(row, phase, tap);
          if (to >= 0)
            multiply_add<ELEMENT>(accumulators[phase][kPhase][to][tile], filters[tap * kFilterX + kTap][depth],
                                  selected[0], selected[1]);
        }
    }
  }
  if constexpr (kTap + 1 < kFilterX)
    add_taps<kPhase, kTap + 1>(accumulators, pixels, filters, row, depth);
  else if constexpr (kPhase + 1 < AxisW::kPhases)
    add_taps<kPhase + 1, 0>(accumulators, pixels, filters, row, depth);
}

// The first row of a warp's patch, from `row` on, that contributes to any output, or their count.
constexpr int kRowsIn = (kWarpRows - 1) * AxisH::kStep + AxisH::kReach + 1;
constexpr int used_from(int row) {
  while (row < kRowsIn && !AxisH::is_used<kWarpRows>(row)) ++row;
  return row;
}

__device__ __forceinline__ void add_rows(Accumulators& accumulators, unsigned pixels, const Matrices& filters) {
  Row fragments[2][kDepth];
  load_row(fragments[0], pixels + used_from(0) * Inputs::kRowBytes);
#pragma unroll
  for (int row = 0, iteration = 0; row < kRowsIn; ++row) {
    if (!AxisH::is_used<kWarpRows>(row)) continue;
    const int next = used_from(row + 1);
    if (next < kRowsIn) load_row(fragments[(iteration + 1) % 2], pixels + next * Inputs::kRowBytes);
    __syncwarp();  // no order of memory is needed: it keeps the compiler from loading more rows than the next one
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      if constexpr (AxisW::kStep == 2) deinterleave_columns(fragments[iteration % 2][depth]);
      add_taps<0, 0>(accumulators, fragments[iteration % 2][depth], filters, row, depth);
    }
    ++iteration;
  }
}

// Rounds accumulators into the staged results: a lane has two columns of each phase, neighbours in a row unless
// de-interleaved.
__device__ __forceinline__ void stage_accumulators(ELEMENT* results, const Accumulators& accumulators,
                                                   const WarpTile& warp_tile) {
  constexpr int kPhasesW = AxisW::kPhases, kCount = 2 * kPhasesW;
  constexpr int kVector = AxisW::kStep == 1 ? greatest_divisor(kCount, OUT_W) : 1;
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = warp_tile.unit * kUnitOut + 16 * warp_tile.result_block + 8 * half + lane / 4;
    ELEMENT* const to = results + (warp_tile.image * kOut + channel) * kChannelPitch +
                        warp_tile.group * kWarpRows * AxisH::kPhases * OUT_W;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int first = 0; first < kCount; first += kVector) {
        const int column = AxisW::kStep == 1 ? (8 * tile + 2 * t) * kPhasesW + first : 8 * tile + t + 4 * first;
        if (column >= OUT_W) continue;
#pragma unroll
        for (int row = 0; row < kWarpRows; ++row)
#pragma unroll
          for (int phase = 0; phase < AxisH::kPhases; ++phase) {
            const int at = row * AxisH::kPhases + phase;
            if (kWhole && warp_tile.group * kWarpRows * AxisH::kPhases + at >= OUT_H) continue;
            Vector<ELEMENT, kVector> values;
#pragma unroll
            for (int e = 0; e < kVector; ++e)
              values.at[e] = convert<ELEMENT>(
                  accumulators[phase][(first + e) % kPhasesW][row][tile][2 * half + (first + e) / kPhasesW]);
            *reinterpret_cast<Vector<ELEMENT, kVector>*>(to + at * OUT_W + column) = values;
          }
      }
  }
}

// Stores the staged results: whole images in one segment of all channels, else segments of rows.
__device__ __forceinline__ void store_results(ELEMENT* out, const ELEMENT* results, const NchwOrigin& origin) {
  if constexpr (kWhole) {
    using Eight = Vector<ELEMENT, 8>;  // channels are multiples of 8
    const int vectors = min(kOut, origin.channels - origin.first_channel) * kArea / 8;
    for (int image = 0; image < kImages && origin.first_n + image < origin.n; ++image) {
      const Eight* const from = reinterpret_cast<const Eight*>(results + image * kOut * kArea);
      Eight* const to = reinterpret_cast<Eight*>(
          out + static_cast<unsigned>((origin.first_n + image) * origin.channels + origin.first_channel) * kArea);
#pragma unroll 4
      for (int i = threadIdx.x; i < vectors; i += kThreads) to[i] = from[i];
    }
  } else {
    static_assert(kWhole || kImages == 1, "tiles of several images have whole images");
    constexpr int kVector = greatest_divisor(8, greatest_divisor(kOutRows * OUT_W, kArea));
    constexpr int kVectors = kOutRows * OUT_W / kVector;
    constexpr int kIterations = kThreads < 2 * kVectors ? kOut : maximum(1, ceil_div(kOut, kThreads / kVectors));
    constexpr int kStep = ceil_div(kOut, kIterations);  // channels that threads store at once
    const int vectors = min(kVectors, (OUT_H - origin.first_row) * OUT_W / kVector);
#pragma unroll 1
    for (int i = threadIdx.x; i < kVectors * kStep; i += kThreads) {
      const int at = i % kVectors, first = i / kVectors, channel = origin.first_channel + first;
      const int left = min(kOut - first, origin.channels - channel);
      if (at >= vectors) continue;
      const ELEMENT* const from = results + first * kChannelPitch + at * kVector;
      ELEMENT* const to = out + static_cast<unsigned>((origin.first_n * origin.channels + channel) * kArea +
                                                      origin.first_row * OUT_W + at * kVector);
#pragma unroll(kIterations <= 16 ? kIterations : 8)
      for (int iteration = 0; iteration < kIterations; ++iteration) {
        if (iteration * kStep >= left) continue;
        *reinterpret_cast<Vector<ELEMENT, kVector>*>(to + iteration * kStep * kArea) =
            *reinterpret_cast<const Vector<ELEMENT, kVector>*>(from + iteration * kStep * kChannelPitch);
      }
    }
  }
}

#ifdef EPILOGUE
static_assert(!kFlipped && AxisW::kPhases == 1 && AxisH::kPhases == 1, "this kernel fuses forward epilogues alone");

// Starts to copy what of the residual belongs to results to where these are staged: see store_results.
__device__ __forceinline__ void copy_residual(ELEMENT* results, const EpilogueElement* residual,
                                              const NchwOrigin& origin) {
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(results));
  if constexpr (kWhole) {
    const int vectors = min(kOut, origin.channels - origin.first_channel) * kArea / 8;
    for (int image = 0; image < kImages && origin.first_n + image < origin.n; ++image) {
      const EpilogueElement* const from =
          residual + static_cast<unsigned>((origin.first_n + image) * origin.channels + origin.first_channel) * kArea;
#pragma unroll 4
      for (int i = threadIdx.x; i < vectors; i += kThreads)
        copy_bytes<16>(shared + 2 * image * kOut * kArea + 16 * i, from + 8 * i, true);
    }
  } else {
    constexpr int kVector = greatest_divisor(8, greatest_divisor(kOutRows * OUT_W, kArea));
    constexpr int kVectors = kOutRows * OUT_W / kVector;
    const int vectors = min(kVectors, (OUT_H - origin.first_row) * OUT_W / kVector);
    const int channels = min(kOut, origin.channels - origin.first_channel);
#pragma unroll 4
    for (int i = threadIdx.x; i < kVectors * channels; i += kThreads) {
      const int at = i % kVectors, channel = i / kVectors;
      if (at >= vectors) continue;
      const EpilogueElement* const from =
          residual + static_cast<unsigned>((origin.first_n * origin.channels + origin.first_channel + channel) * kArea +
                                           origin.first_row * OUT_W + at * kVector);
      if constexpr (kVector > 1)
        copy_bytes<2 * kVector>(shared + 2 * (channel * kChannelPitch + at * kVector), from, true);
      else
        results[channel * kChannelPitch + at] = *from;
    }
  }
  commit_copies();
}

// Terms of a lane's two channels.
using Terms = ChannelTerms[2];

__device__ __forceinline__ void read_lane_terms(Terms& terms, const Epilogue& epilogue, const WarpTile& warp_tile,
                                                const NchwOrigin& origin) {
  const int image = min(origin.first_n + warp_tile.image, origin.n - 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = origin.first_channel + warp_tile.unit * kUnitOut + 16 * warp_tile.result_block + 8 * half +
                        threadIdx.x % 32 / 4;
    if (channel < origin.channels) terms[half] = channel_terms(epilogue, image, channel, origin.channels);
  }
}

// Makes results of a warp's sums; what of the residual belongs to them lies where stage_accumulators writes them.
__device__ __forceinline__ void finish_sums(Accumulators& accumulators, const ELEMENT* results,
                                            const WarpTile& warp_tile, const Terms& terms, const Epilogue& epilogue) {
  constexpr int kVector = AxisW::kStep == 1 ? greatest_divisor(2, OUT_W) : 1;
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = warp_tile.unit * kUnitOut + 16 * warp_tile.result_block + 8 * half + lane / 4;
    const ELEMENT* const from =
        results + (warp_tile.image * kOut + channel) * kChannelPitch + warp_tile.group * kWarpRows * OUT_W;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int first = 0; first < 2; first += kVector) {
        const int column = AxisW::kStep == 1 ? 8 * tile + 2 * t + first : 8 * tile + t + 4 * first;
        if (column >= OUT_W) continue;
#pragma unroll
        for (int row = 0; row < kWarpRows; ++row) {
          if (kWhole && warp_tile.group * kWarpRows + row >= OUT_H) continue;
          const auto residual = read_residual<kVector>(from + row * OUT_W + column, true);
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            float& sum = accumulators[0][0][row][tile][2 * half + first + e];
            sum = finish(sum, terms[half], convert<float>(residual.at[e]), epilogue);
          }
        }
      }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped_nchw(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter, ELEMENT* __restrict__ out, int n,
#ifdef EPILOGUE
                 int in_channels, int out_channels, int tiles, const __grid_constant__ Epilogue epilogue) {
#else
                 int in_channels, int out_channels, int tiles) {
#endif
  extern __shared__ __align__(16) unsigned char staged[];
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(staged));
  const int unit = blockIdx.x * kUnits, step = gridDim.y, lane = threadIdx.x % 32;
  const WarpTile warp_tile = warp_tile_of(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0));
  const auto source_of = [&](int tile) {
    return NchwOrigin{n, in_channels, tile / ROW_TILES * kImages, unit * kUnitIn,
                      tile % ROW_TILES * kTileRows * AxisH::kStep + AxisH::kFirst};
  };

  const int filters = kFlipped ? in_channels : out_channels;
  if constexpr (kArranged)
    stage_raw_filters<Filters, kThreads>(base + kRawFiltersAt, filter, unit * kUnitK, filters);
  else
    stage_filters<Filters, kThreads>(base + kResultsAt, filter, unit * kUnitK, filters);
  commit_copies();
  // What copies never write is zeroed once.
  if constexpr (Inputs::kFlat) {
    clear_margins<Inputs, kThreads>(staged);
  } else {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) clear_margins<Inputs, kThreads>(staged + stage * kStageBytes);
  }
  if (kArranged && threadIdx.x == 0) *reinterpret_cast<uint4*>(staged + kZerosAt) = {};
  __syncthreads();  // words that hold margins beside pixels are zeroed before pixels arrive
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    const int tile = blockIdx.y + stage * step;
    if (tile < tiles) stage_rows<Inputs, kThreads>(base + kLaid + stage * kStageBytes, in, source_of(tile));
    commit_copies();
  }
  wait_for_copies<kStages - 1>();
  __syncthreads();  // the filters have arrived
  Matrices matrices;
  if constexpr (kArranged) {
    arrange_filters<Filters, kThreads>(staged + kResultsAt, reinterpret_cast<const ELEMENT*>(staged + kRawFiltersAt),
                                       filters - unit * kUnitK);
    __syncthreads();  // the filters are laid out
    load_filters(matrices, base + kResultsAt, base + kZerosAt, warp_tile);
  } else {
    load_raw_filters(matrices, staged + kResultsAt, warp_tile);
  }

  const int delta = lane / 16 * (kDepth == 1 ? 16 : 16 * Inputs::kChannelBytes);
  const unsigned pixels = base + 16 + (warp_tile.unit * kUnitIn + lane % 16) * Inputs::kChannelBytes +
                          warp_tile.image * Inputs::kImageBytes +
                          warp_tile.group * kWarpRows * AxisH::kStep * Inputs::kRowBytes + delta;
  ELEMENT* const results = reinterpret_cast<ELEMENT*>(staged + kResultsAt);
  int at = 0;
#pragma unroll 1
  for (int tile = blockIdx.y; tile < tiles; tile += step) {
    if constexpr (kStages == 1) {
      stage_rows<Inputs, kThreads>(base + kLaid, in, source_of(tile));
      commit_copies();
      wait_for_copies<0>();
    } else {
      wait_for_copies<kStages - 2>();
    }
    // The tile has arrived, and every warp has read its filters, or stored the results before.
    __syncthreads();
#ifdef EPILOGUE
    const NchwOrigin target = {n, out_channels, tile / ROW_TILES * kImages, unit * kUnitOut,
                               tile % ROW_TILES * kOutRows};
    if constexpr (kHasResidual) copy_residual(results, epilogue.residual, target);
    Terms terms = {};
    read_lane_terms(terms, epilogue, warp_tile, target);
#endif
    if constexpr (kStages > 1) {
      const int next = tile + (kStages - 1) * step, to = at == 0 ? kStages - 1 : at - 1;
      if (next < tiles) stage_rows<Inputs, kThreads>(base + kLaid + to * kStageBytes, in, source_of(next));
      commit_copies();
    }
    if constexpr (Inputs::kFlat) {
      lay_out_rows<Inputs, kThreads>(staged, staged + kLaid + at * kStageBytes, source_of(tile).first_row);
      __syncthreads();  // rows of odd width are laid out; the barrier below frees them
    }
    Accumulators accumulators = {};
    add_rows(accumulators, pixels + (Inputs::kFlat ? 0 : at * kStageBytes), matrices);
#ifdef EPILOGUE
    if constexpr (kHasResidual) {
      wait_for_copies<kStages == 1 ? 0 : 1>();  // it was copied just before the next tile
      __syncthreads();                          // the residual has arrived
    }
    finish_sums(accumulators, results, warp_tile, terms, epilogue);
#endif
    stage_accumulators(results, accumulators, warp_tile);
    __syncthreads();  // the results are staged, and every warp has read the tile, which may be overwritten
    store_results(out, results,
                  {n, out_channels, tile / ROW_TILES * kImages, unit * kUnitOut, tile % ROW_TILES * kOutRows});
    at = at + 1 == kStages ? 0 : at + 1;
  }
}
