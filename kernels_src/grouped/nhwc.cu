// Grouped convolution with few channels a group; per group, forward and backward data,
//   y[n,k,oh,ow] = sum_{c,i,j} x[n, c, oh*stride - pad + i*dilation, ow*stride - pad + j*dilation] * w[k,c,i,j],
//   dx[n,c,h,w] = sum_{k,i,j} dy[n, k, (h + pad - i*dilation) / stride, likewise] * w[k,c,i,j], where whole.
// Implicit GEMM on tensor cores; filters are block-diagonal matrices. A block stages a patch of IMAGES images and UNITS
// units of groups, channels last, and their filters. With STAGES > 1 it computes every gridDim.y-th patch and copies
// ahead. A warp computes WARP_ROWS rows of 16 pixels (two segments of 8 columns) for one of SHARES shares of a unit's
// results. A fragment of pixels serves all taps and rows of its column. Backward data has stride_h * stride_w phases:
// coordinates modulo the stride, each with taps of its own.
//
// Defines: as checked below; FLIPPED is backward data, SPAN how many of COLUMNS exist.
#include "grouped/group_axis.cuh"
#include "grouped/group_filters.cuh"
#include "common/shared_pixels.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#endif

#if !defined(ELEMENT) || !defined(GROUPS) || !defined(GROUP_C) || !defined(GROUP_K) || !defined(FLIPPED) ||         \
    !defined(FILTER_Y) || !defined(FILTER_X) || !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATION_H) || \
    !defined(DILATION_W)
#error "define the convolution: ELEMENT, GROUP*, FLIPPED, FILTER_*, STRIDE_* and DILATION_*"
#endif
#if !defined(PAD_H) || !defined(PAD_W) || !defined(IN_H) || !defined(IN_W) || !defined(OUT_H) || !defined(OUT_W) || \
    !defined(UNITS) || !defined(SHARES) || !defined(WARP_ROWS) || !defined(ROW_GROUPS) || !defined(COLUMNS) ||      \
    !defined(SPAN) || !defined(COLUMN_TILES) || !defined(ROW_TILES) || !defined(STAGES) || !defined(IMAGES) ||      \
    !defined(WHOLE_IMAGES) || !defined(CHANNELS_LAST) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define PAD_*, IN_*, OUT_* and the tiling: UNITS, SHARES, ROW*, COLUMN*, SPAN, IMAGES, WHOLE_IMAGES, ..."
#endif
#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

using Group = PackedGroups<GROUP_C, GROUP_K>;
constexpr bool kFlipped = FLIPPED;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;

// A unit: packs of groups whose summed channels are a multiple of 16.
constexpr int kUnitPackedGroups = (kFlipped ? Group::kPackedK : Group::kPackedC) % 16 ? 2 : 1;
constexpr int kUnitC = kUnitPackedGroups * Group::kPackedC, kUnitK = kUnitPackedGroups * Group::kPackedK;
constexpr int kUnitIn = kFlipped ? kUnitK : kUnitC, kUnitOut = kFlipped ? kUnitC : kUnitK;
constexpr int kUnits = UNITS, kIn = kUnits * kUnitIn, kOut = kUnits * kUnitOut;
constexpr int kDepth = kUnitIn / 16, kShares = SHARES, kBlocksN = kUnitOut / 8 / kShares;
static_assert(kUnitOut / 8 % kShares == 0, "warps share the results of a unit evenly");

constexpr int kInRow = IN_W * GROUPS * (kFlipped ? GROUP_K : GROUP_C),
              kOutRow = OUT_W * GROUPS * (kFlipped ? GROUP_C : GROUP_K);

using AxisH = GroupAxis<kFlipped, STRIDE_H, DILATION_H, PAD_H, kFilterY>;
using AxisW = GroupAxis<kFlipped, STRIDE_W, DILATION_W, PAD_W, kFilterX>;

constexpr int kWarpRows = WARP_ROWS, kTileH = WARP_ROWS * ROW_GROUPS, kColumns = COLUMNS, kSpan = SPAN,
              kImages = IMAGES, kStages = STAGES;
constexpr int kSegments = kColumns / 8 * ROW_GROUPS * kImages;  // of 8 pixels in WARP_ROWS rows
constexpr int kFragments = ceil_div(kSegments, 2);
constexpr int kThreads = 32 * kFragments * kShares * kUnits;
static_assert(kColumns % 8 == 0 && kSpan <= kColumns && kSpan > kColumns - 8,
              "segments of 8 columns, the last one cut");

// The staged patch.
constexpr int kPatchH = (kTileH - 1) * AxisH::kStep + AxisH::kReach + 1;
constexpr int kPatchW = (kSpan - 1) * AxisW::kStep + AxisW::kReach + 1;
using Patch = Pixels<kImages, kPatchH, kPatchW, AxisW::kStep, kIn>;

// The staged filters, and what arrives of them as it is in memory.
using Filters = FilterRows<GROUP_C, GROUP_K, kTaps, kUnits * kUnitK, CHANNELS_LAST>;
constexpr int kFiltersAt = kStages * Patch::kBytes;

// The staged results: channels last, of one phase of columns, [image][row][phase of rows][column][channel]; channels
// first, of all phases, [image][channel][row][phase of rows][column][phase of columns], neighbouring channels 4 or 12
// banks apart.
constexpr bool kLast = CHANNELS_LAST, kOverlaid = AxisW::kPhases == 1 && kStages == 1;
static_assert(kLast || kStages == 1, "images are transposed where they arrive");
constexpr int kTileRows = kTileH * AxisH::kPhases, kTileColumns = kSpan * AxisW::kPhases;
constexpr int kResultBytes = odd_words(2 * kOut), kChannelPitch = round_up(kTileRows * kTileColumns - 8, 16) + 8;
constexpr int kResultsBytes = kImages * (kLast ? kTileRows * kSpan * kResultBytes : 2 * kOut * kChannelPitch);

// Channels first, what arrives as it is in memory: whole images if a block has all of them.
constexpr bool kWhole = WHOLE_IMAGES;
constexpr int kShift = (AxisW::kFirst % 8 + 8) % 8;
using Raw = StagedNchw<Patch, IN_H, IN_W, kShift, kWhole>;
constexpr int kRawAt = kFiltersAt + Filters::kBytes, kRawFiltersAt = kRawAt + Raw::kBytes;
constexpr int kStagedBytes = kLast ? kRawAt : kRawFiltersAt + Filters::kRawBytes;
constexpr int kResultsAt = kOverlaid ? 0 : kStagedBytes;
static_assert(SHARED_BYTES == (kOverlaid ? maximum(kStagedBytes, kResultsBytes) : kStagedBytes + kResultsBytes),
              "solvers/common/packed_groups.py counts otherwise");

// A segment of 8 pixels in WARP_ROWS rows.
struct Segment {
  int image, row, column;
};

__device__ __forceinline__ Segment segment_at(int number) {
  constexpr int kAcross = kColumns / 8;
  return {number / (kAcross * ROW_GROUPS), number / kAcross % ROW_GROUPS * kWarpRows, number % kAcross * 8};
}

// What a warp computes: a unit, the first of its blocks of 8 results, and two segments.
struct WarpTile {
  int unit, block, first_segment;
};

using Accumulators = float[AxisH::kPhases][kWarpRows][kBlocksN][4];
using Filter = unsigned[kBlocksN][2];

constexpr bool meet(int in_block, int out_block) {
  return kFlipped ? Group::meet(out_block, in_block) : Group::meet(in_block, out_block);
}

// Whether every block of a unit's matrix holds filters: all parts of the depth are then alike.
constexpr bool kDense = kUnitPackedGroups == 1 && Group::kPackedGroups == 1;

// The matrix of one tap: 16 summed channels, SHARES * 8 results. A warp's share of results is known only at run time
// where the matrix is dense, else it has all of them.
static_assert(kDense || kShares == 1, "warps share the results of dense matrices only");

__device__ __forceinline__ void load_filter(Filter& to, unsigned filters, int tap, int depth, int first_block) {
#pragma unroll
  for (int j = 0; j < kBlocksN; ++j) {
    const bool low = kDense || meet(2 * depth, j), high = kDense || meet(2 * depth + 1, j);
    if (!low && !high) continue;
    const int in = 2 * depth + !low, out = first_block + j;
    const int row = kFlipped ? 8 * in : 8 * out, channel = kFlipped ? 8 * out : 8 * in;
    const unsigned from = filters + row * Filters::kRowBytes + tap * Filters::kTapBytes +
                          2 * (kDense ? channel : channel % Group::kPackedC);
    if (low && high)
      load_matrix_pair<kFlipped>(to[j], from);
    else
      to[j][!low] = load_matrix<kFlipped>(from);
  }
}

__device__ __forceinline__ void add_products(float (&accumulators)[kBlocksN][4], const unsigned (&pixels)[4],
                                             const Filter& filter, int depth) {
#pragma unroll
  for (int j = 0; j < kBlocksN; ++j) {
    const bool low = kDense || meet(2 * depth, j), high = kDense || meet(2 * depth + 1, j);
    if (low && high)
      multiply_add<ELEMENT>(accumulators[j], pixels, filter[j][0], filter[j][1]);
    else if (low)
      multiply_add_half<ELEMENT>(accumulators[j], pixels[0], pixels[1], filter[j][0]);
    else if (high)
      multiply_add_half<ELEMENT>(accumulators[j], pixels[2], pixels[3], filter[j][1]);
  }
}

// Adds what one column of taps and 16 channels contribute.
__device__ __forceinline__ void add_column(Accumulators& accumulators, unsigned pixels, unsigned filters, int column,
                                           int depth, int first_block) {
  Filter filter[kFilterY];
#pragma unroll
  for (int tap = 0; tap < kFilterY; ++tap)
    load_filter(filter[tap], filters, tap * kFilterX + column, depth, first_block);
#pragma unroll
  for (int row = 0; row < (kWarpRows - 1) * AxisH::kStep + AxisH::kReach + 1; ++row) {
    if (!AxisH::is_used<kWarpRows>(row)) continue;
    unsigned fragment[4];
    load_matrices(fragment, pixels + row * Patch::kRowBytes);
#pragma unroll
    for (int phase = 0; phase < AxisH::kPhases; ++phase)
#pragma unroll
      for (int tap = 0; tap < kFilterY; ++tap) {
        const int to = AxisH::output<kWarpRows>(row, phase, tap);
        if (to >= 0) add_products(accumulators[phase][to], fragment, filter[tap], depth);
      }
  }
}

// Address of a lane's pixel and word for load_matrices: segment (lane / 8) % 2, pixel lane % 8, words lane / 16.
__device__ __forceinline__ unsigned pixels_of(unsigned patch, const WarpTile& warp_tile) {
  const int lane = threadIdx.x % 32;
  const Segment segment = segment_at(min(warp_tile.first_segment + lane / 8 % 2, kSegments - 1));
  const int column = min(segment.column + lane % 8, kSpan - 1);
  return patch + segment.image * Patch::kImageBytes + segment.row * AxisH::kStep * Patch::kRowBytes +
         column * Patch::kPixelBytes + 2 * warp_tile.unit * kUnitIn + lane / 16 * 16;
}

// Rounds accumulators into the staged results.
__device__ __forceinline__ void stage_accumulators(unsigned char* results, const Accumulators& accumulators,
                                                   const WarpTile& warp_tile, int columns_phase) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Segment segment = segment_at(warp_tile.first_segment + half);
    const int column = segment.column + lane / 4;
    if (warp_tile.first_segment + half >= kSegments || column >= kSpan) continue;
    if constexpr (!kLast) {
      const int channel = warp_tile.unit * kUnitOut + 8 * warp_tile.block + lane % 4 * 2;
      ELEMENT* const to = reinterpret_cast<ELEMENT*>(results) + (segment.image * kOut + channel) * kChannelPitch +
                          segment.row * AxisH::kPhases * kTileColumns + column * AxisW::kPhases + columns_phase;
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row)
#pragma unroll
        for (int phase = 0; phase < AxisH::kPhases; ++phase)
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              to[(8 * j + e) * kChannelPitch + (row * AxisH::kPhases + phase) * kTileColumns] =
                  convert<ELEMENT>(accumulators[phase][row][j][2 * half + e]);
      continue;
    }
    const int first = (segment.image * kTileH + segment.row) * AxisH::kPhases * kSpan + column;
    unsigned char* const to =
        results + first * kResultBytes + 2 * warp_tile.unit * kUnitOut + 16 * warp_tile.block + lane % 4 * 4;
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row)
#pragma unroll
      for (int phase = 0; phase < AxisH::kPhases; ++phase)
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          const float* sum = accumulators[phase][row][j] + 2 * half;
          *reinterpret_cast<Vector<ELEMENT, 2>*>(to + (row * AxisH::kPhases + phase) * kSpan * kResultBytes +
                                                 16 * j) = {convert<ELEMENT>(sum[0]), convert<ELEMENT>(sum[1])};
        }
  }
}

// Stores the staged results of one phase of columns; `images` counts rows and columns of the output tensor.
__device__ __forceinline__ void store_results(ELEMENT* out, const unsigned char* results, const Images& images,
                                              int phase) {
  constexpr int kWords = kOut / 8, kColumnWords = kSpan * kWords;
  const int rows = min(kTileRows, images.height - images.first_row);
#pragma unroll 1
  for (int i = threadIdx.x; i < kImages * kColumnWords; i += kThreads) {
    const int word = i % kWords, column = i / kWords % kSpan, image = i / kColumnWords;
    const int n = images.first_n + image, channel = images.first_channel + 8 * word;
    const int v = images.first_column + column * AxisW::kPhases + phase;
    if (n >= images.n || channel >= images.channels || v >= images.width) continue;
    const unsigned char* from = results + (image * kTileRows * kSpan + column) * kResultBytes + 16 * word;
    ELEMENT* const to =
        out + static_cast<int64>(n * images.height + images.first_row) * kOutRow + (v * images.channels + channel);
#pragma unroll(rows_at_once(kTileRows))
    for (int row = 0; row < kTileRows; ++row) {
      if (row >= rows) break;
      *reinterpret_cast<Vector<ELEMENT, 8>*>(to + row * kOutRow) =
          *reinterpret_cast<const Vector<ELEMENT, 8>*>(from + row * kSpan * kResultBytes);
    }
  }
}

// Stores staged images of all phases: row by row, or, of whole images without gaps, in one segment of all channels.
__device__ __forceinline__ void store_nchw(ELEMENT* out, const unsigned char* results, const Images& images) {
  constexpr bool kOneSegment = kWhole && kTileColumns == OUT_W;
  constexpr int kArea = OUT_H * OUT_W;
  const ELEMENT* const from = reinterpret_cast<const ELEMENT*>(results);
  if constexpr (kOneSegment) {
    constexpr int kVector = greatest_divisor(8, kArea) >= 4 ? greatest_divisor(8, kArea) : 8;
    constexpr int kVectors = kOut * kArea / kVector;
#pragma unroll 2
    for (int i = threadIdx.x; i < kImages * kVectors; i += kThreads) {
      const int first = i % kVectors * kVector, n = images.first_n + i / kVectors;
      if (n >= images.n || images.first_channel + first / kArea >= images.channels) continue;
      int rank = i / kVectors * kOut + first / kArea, at = first % kArea;
      Vector<ELEMENT, kVector> values;
      if constexpr (kArea % kVector == 0) {
        values = *reinterpret_cast<const Vector<ELEMENT, kVector>*>(from + rank * kChannelPitch + at);
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          values.at[e] = from[rank * kChannelPitch + at];
          if (++at == kArea) at = 0, ++rank;
        }
      }
      *reinterpret_cast<Vector<ELEMENT, kVector>*>(out + (n * images.channels + images.first_channel) * kArea + first) =
          values;
    }
  } else {
    constexpr int kVector = greatest_divisor(8, greatest_divisor(OUT_W, kTileColumns));
    constexpr int kVectors = kTileColumns / kVector;
    const int rows = min(kTileRows, images.height - images.first_row);
#pragma unroll 1
    for (int i = threadIdx.x; i < kImages * kOut * kVectors; i += kThreads) {
      const int column = i % kVectors * kVector, rank = i / kVectors;
      const int n = images.first_n + rank / kOut, channel = images.first_channel + rank % kOut;
      const int v = images.first_column + column;
      if (n >= images.n || channel >= images.channels || v >= images.width) continue;
      unsigned offset = ((n * images.channels + channel) * images.height + images.first_row) * images.width + v;
#pragma unroll(rows_at_once(kTileRows))
      for (int row = 0; row < kTileRows; ++row) {
        if (row >= rows) break;
        *reinterpret_cast<Vector<ELEMENT, kVector>*>(out + offset) = *reinterpret_cast<const Vector<ELEMENT, kVector>*>(
            from + rank * kChannelPitch + row * kTileColumns + column);
        offset += images.width;
      }
    }
  }
}

#ifdef EPILOGUE
static_assert(AxisW::kPhases == 1 && AxisH::kPhases == 1, "an epilogue follows sums of one phase");
// What is read with results is staged where these will be: the residual, or `saved` where there is none. With both,
// `saved` is read where it is needed.
constexpr bool kStagesResidual = kHasResidual || kHasSaved;

__device__ __forceinline__ const EpilogueElement* staged_tensor(const Epilogue& epilogue) {
  return kHasResidual ? epilogue.residual : epilogue.saved;
}

// Starts to copy what of the residual belongs to results of channels last to where these are staged.
__device__ __forceinline__ void copy_residual(unsigned char* results, const EpilogueElement* residual,
                                              const Images& images) {
  constexpr int kWords = kOut / 8, kColumnWords = kSpan * kWords;
  const int rows = min(kTileRows, images.height - images.first_row);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(results));
#pragma unroll 1
  for (int i = threadIdx.x; i < kImages * kColumnWords; i += kThreads) {
    const int word = i % kWords, column = i / kWords % kSpan, image = i / kColumnWords;
    const int n = images.first_n + image, channel = images.first_channel + 8 * word;
    const int v = images.first_column + column;
    if (n >= images.n || channel >= images.channels || v >= images.width) continue;
    const unsigned to = shared + (image * kTileRows * kSpan + column) * kResultBytes + 16 * word;
    const EpilogueElement* const from =
        residual + static_cast<int64>(n * images.height + images.first_row) * kOutRow + (v * images.channels + channel);
#pragma unroll(rows_at_once(kTileRows))
    for (int row = 0; row < kTileRows; ++row) {
      if (row >= rows) break;
      copy_bytes<16>(to + row * kSpan * kResultBytes, from + row * kOutRow, true);
    }
  }
  commit_copies();
}

// Reads what of the residual belongs to results of channels first to where these are staged: see store_nchw.
__device__ __forceinline__ void read_residual_nchw(unsigned char* results, const EpilogueElement* residual,
                                                   const Images& images) {
  constexpr int kArea = OUT_H * OUT_W;
  ELEMENT* const to = reinterpret_cast<ELEMENT*>(results);
  if constexpr (kWhole && kTileColumns == OUT_W) {
    constexpr int kVector = greatest_divisor(8, kArea) >= 4 ? greatest_divisor(8, kArea) : 8;
    constexpr int kVectors = kOut * kArea / kVector;
#pragma unroll 2
    for (int i = threadIdx.x; i < kImages * kVectors; i += kThreads) {
      const int first = i % kVectors * kVector, n = images.first_n + i / kVectors;
      if (n >= images.n || images.first_channel + first / kArea >= images.channels) continue;
      int rank = i / kVectors * kOut + first / kArea, at = first % kArea;
      const auto values = *reinterpret_cast<const Vector<ELEMENT, kVector>*>(
          residual + (n * images.channels + images.first_channel) * kArea + first);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        to[rank * kChannelPitch + at] = values.at[e];
        if (++at == kArea) at = 0, ++rank;
      }
    }
  } else {
    constexpr int kVector = greatest_divisor(8, greatest_divisor(OUT_W, kTileColumns));
    constexpr int kVectors = kTileColumns / kVector;
    const int rows = min(kTileRows, images.height - images.first_row);
#pragma unroll 1
    for (int i = threadIdx.x; i < kImages * kOut * kVectors; i += kThreads) {
      const int column = i % kVectors * kVector, rank = i / kVectors;
      const int n = images.first_n + rank / kOut, channel = images.first_channel + rank % kOut;
      const int v = images.first_column + column;
      if (n >= images.n || channel >= images.channels || v >= images.width) continue;
      unsigned offset = ((n * images.channels + channel) * images.height + images.first_row) * images.width + v;
#pragma unroll(rows_at_once(kTileRows))
      for (int row = 0; row < kTileRows; ++row) {
        if (row >= rows) break;
        *reinterpret_cast<Vector<ELEMENT, kVector>*>(to + rank * kChannelPitch + row * kTileColumns + column) =
            *reinterpret_cast<const Vector<ELEMENT, kVector>*>(residual + offset);
        offset += images.width;
      }
    }
  }
}

// Terms of the channels of a lane's sums, but for those of each image.
using Terms = ChannelTerms[kBlocksN][2];

__device__ __forceinline__ int channel_of_lane(const WarpTile& warp_tile, const Images& target) {
  return target.first_channel + warp_tile.unit * kUnitOut + 8 * warp_tile.block + threadIdx.x % 4 * 2;
}

__device__ __forceinline__ void read_unit_terms(Terms& terms, const Epilogue& epilogue, const WarpTile& warp_tile,
                                                const Images& target) {
  const int channel = channel_of_lane(warp_tile, target);
#pragma unroll
  for (int j = 0; j < kBlocksN; ++j)
    if (channel + 8 * j < target.channels)
      read_terms(terms[j], epilogue, target.first_n, channel + 8 * j, target.channels);
}

// What was saved for a pair of neighbouring channels' results.
__device__ __forceinline__ Vector<EpilogueElement, 2> read_saved_pair(const EpilogueElement* saved,
                                                                      const Images& target, int n, int channel, int row,
                                                                      int column) {
  const int h = target.first_row + row, v = target.first_column + column;
  if (h >= target.height || v >= target.width) return {};
  if constexpr (kLast)
    return *reinterpret_cast<const Vector<EpilogueElement, 2>*>(
        saved + static_cast<int64>(n * target.height + h) * kOutRow + (v * target.channels + channel));
  const int64 at = (static_cast<int64>(n * target.channels + channel) * target.height + h) * target.width + v;
  return {saved[at], saved[at + target.height * target.width]};
}

// Makes results of a warp's sums; what of the residual belongs to them lies where stage_accumulators writes them.
__device__ __forceinline__ void finish_sums(Accumulators& accumulators, const unsigned char* results,
                                            const WarpTile& warp_tile, const Images& target, const Terms& unit_terms,
                                            const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32, channel = channel_of_lane(warp_tile, target);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Segment segment = segment_at(warp_tile.first_segment + half);
    const int column = segment.column + lane / 4, n = target.first_n + segment.image;
    if (warp_tile.first_segment + half >= kSegments || column >= kSpan || n >= target.n) continue;
    const ELEMENT* const planes = reinterpret_cast<const ELEMENT*>(results) +
                                  (segment.image * kOut + channel - target.first_channel) * kChannelPitch +
                                  segment.row * kTileColumns + column;
    const unsigned char* const pixels = results +
                                        ((segment.image * kTileH + segment.row) * kSpan + column) * kResultBytes +
                                        2 * (channel - target.first_channel);
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      if (channel + 8 * j >= target.channels) continue;
      ChannelTerms terms[2] = {unit_terms[j][0], unit_terms[j][1]};
      if constexpr (kHasChannelBias) read_terms(terms, epilogue, n, channel + 8 * j, target.channels);
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row) {
        Vector<ELEMENT, 2> residual = {}, saved = {};
        if constexpr (kStagesResidual && kLast)
          residual = *reinterpret_cast<const Vector<ELEMENT, 2>*>(pixels + row * kSpan * kResultBytes + 16 * j);
        else if constexpr (kStagesResidual)
          residual = {planes[8 * j * kChannelPitch + row * kTileColumns],
                      planes[(8 * j + 1) * kChannelPitch + row * kTileColumns]};
        if constexpr (kHasSaved)
          saved = kHasResidual ? read_saved_pair(epilogue.saved, target, n, channel + 8 * j, segment.row + row, column)
                               : residual;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& sum = accumulators[0][row][j][2 * half + e];
          sum = finish(sum, terms[e], convert<float>(residual.at[e]), convert<float>(saved.at[e]), epilogue);
        }
      }
    }
  }
}
#endif

// Computes a tile from its staged patch and stores it.
__device__ __forceinline__ void compute_tile(ELEMENT* out, unsigned char* results, unsigned pixels, unsigned matrices,
#ifdef EPILOGUE
                                             const WarpTile& warp_tile, const Images& target,
                                             const Epilogue& epilogue) {
  Terms terms = {};
  read_unit_terms(terms, epilogue, warp_tile, target);
#else
                                             const WarpTile& warp_tile, const Images& target) {
#endif
#pragma unroll 1
  for (int phase = 0; phase < AxisW::kPhases; ++phase) {
    Accumulators accumulators = {};
#pragma unroll(kDense ? 1 : kDepth)
    for (int depth = 0; depth < kDepth; ++depth)
#pragma unroll(kFilterX <= 3 ? kFilterX : 1)
      for (int tap = 0; tap < kFilterX; ++tap) {
        if (!AxisW::meets(phase, tap)) continue;
        const int shift = Patch::slot(AxisW::offset(phase, tap) - AxisW::kFirst);
        add_column(accumulators, pixels + shift * Patch::kPixelBytes + 32 * depth, matrices, tap, depth,
                   warp_tile.block);
      }
    if (kOverlaid || (kLast && phase > 0))
      __syncthreads();  // every warp has read the patch, or stored the phase before
#ifdef EPILOGUE
    if constexpr (kStagesResidual) {
      if constexpr (!kLast) {
        read_residual_nchw(results, staged_tensor(epilogue), target);
      } else if constexpr (kOverlaid) {
        copy_residual(results, staged_tensor(epilogue), target);
        wait_for_copies<0>();
      } else {
        wait_for_copies<1>();  // it was copied just before the next patch
      }
      __syncthreads();  // the residual has arrived
    }
    finish_sums(accumulators, results, warp_tile, target, terms, epilogue);
#endif
    stage_accumulators(results, accumulators, warp_tile, phase);
    if (!kLast && phase < AxisW::kPhases - 1) continue;
    __syncthreads();  // the results of every warp are staged
    if constexpr (kLast)
      store_results(out, results, target, phase);
    else
      store_nchw(out, results, target);
  }
}

// in_* are of the tensor that is read, out_* of the one that is written.
struct Shape {
  SHAPE_FIELDS
};

// A tile's first output row and column of a phase, and its first image.
struct TileAt {
  int row, column, image;
};

__device__ __forceinline__ TileAt tile_at(int number) {
  return {number / COLUMN_TILES % ROW_TILES * kTileH, number % COLUMN_TILES * kColumns,
          number / (COLUMN_TILES * ROW_TILES) * kImages};
}

__device__ __forceinline__ Images source_of(const Shape& shape, const TileAt& tile) {
  const int channel = blockIdx.x * kIn, row = tile.row * AxisH::kStep + AxisH::kFirst;
  const int column = tile.column * AxisW::kStep + AxisW::kFirst;
  return {shape.batch, shape.in_channels, shape.in_height, shape.in_width, tile.image, channel, row, column};
}

__device__ __forceinline__ Images target_of(const Shape& shape, const TileAt& tile) {
  const int channel = blockIdx.x * kOut, row = tile.row * AxisH::kPhases, column = tile.column * AxisW::kPhases;
  return {shape.batch, shape.out_channels, shape.out_height, shape.out_width, tile.image, channel, row, column};
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped_nhwc(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter, ELEMENT* __restrict__ out,
#ifdef EPILOGUE
                 const __grid_constant__ Shape shape, const __grid_constant__ Epilogue epilogue) {
#else
                 const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(16) unsigned char staged[];
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(staged));
  const int first_filter = blockIdx.x * kUnits * kUnitK, filters = kFlipped ? shape.in_channels : shape.out_channels;
  const int step = gridDim.y, tiles = shape.tiles;
  // Blocks of one stage have a tile each, others every gridDim.y-th.
  const TileAt first = kStages > 1 ? tile_at(blockIdx.y)
                                   : TileAt{static_cast<int>(blockIdx.y) / COLUMN_TILES * kTileH,
                                            static_cast<int>(blockIdx.y) % COLUMN_TILES * kColumns,
                                            static_cast<int>(blockIdx.z) * kImages};
  const Images source = source_of(shape, first);
  if constexpr (kLast) {
    stage_pixels<Patch, kInRow, kThreads>(base, in, source);
    if constexpr (Group::kPackedGroups == 1)
      stage_filters<Filters, kThreads>(base + kFiltersAt, filter, first_filter, filters);
    commit_copies();
#pragma unroll
    for (int stage = 1; stage < kStages - 1; ++stage) {
      const int tile = blockIdx.y + stage * step;
      if (tile < tiles)
        stage_pixels<Patch, kInRow, kThreads>(base + stage * Patch::kBytes, in, source_of(shape, tile_at(tile)));
      commit_copies();
    }
    if constexpr (Group::kPackedGroups != 1)
      arrange_filters<Filters, kThreads>(staged + kFiltersAt, filter + first_filter * kTaps * GROUP_C,
                                         filters - first_filter);
  } else {
    stage_nchw<Patch, IN_H, IN_W, kShift, kWhole, kThreads>(staged + kRawAt, in, source);
    stage_raw_filters<Filters, kThreads>(base + kRawFiltersAt, filter, first_filter, filters);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();  // the images and the filters have arrived
    transpose_nchw<Patch, IN_H, IN_W, kShift, kWhole, kThreads>(
        staged, reinterpret_cast<const ELEMENT*>(staged + kRawAt), source);
    arrange_filters<Filters, kThreads>(staged + kFiltersAt, reinterpret_cast<const ELEMENT*>(staged + kRawFiltersAt),
                                       Filters::kFilters);
  }

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const WarpTile warp_tile = {warp % kUnits, warp / kUnits % kShares * kBlocksN, warp / (kUnits * kShares) * 2};
  const unsigned pixels = pixels_of(base, warp_tile);
  const unsigned matrices =
      base + kFiltersAt + warp_tile.unit * kUnitK * Filters::kRowBytes +
      (kFlipped ? lane % 16 * Filters::kRowBytes : lane % 8 * Filters::kRowBytes + lane / 8 % 2 * 16);
  if constexpr (kStages == 1) {
    wait_for_copies<0>();
    __syncthreads();  // the patch and the filters have arrived
#ifdef EPILOGUE
    compute_tile(out, staged + kResultsAt, pixels, matrices, warp_tile, target_of(shape, first), epilogue);
#else
    compute_tile(out, staged + kResultsAt, pixels, matrices, warp_tile, target_of(shape, first));
#endif
  } else {
    int at = 0;
#pragma unroll 1
    for (int tile = blockIdx.y; tile < tiles; tile += step) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the patch has arrived, and every warp has read the one before and stored its results
#ifdef EPILOGUE
      if constexpr (kStagesResidual && kLast)
        copy_residual(staged + kResultsAt, staged_tensor(epilogue), target_of(shape, tile_at(tile)));
#endif
      const int next = tile + (kStages - 1) * step, to = at == 0 ? kStages - 1 : at - 1;
      if (next < tiles)
        stage_pixels<Patch, kInRow, kThreads>(base + to * Patch::kBytes, in, source_of(shape, tile_at(next)));
      commit_copies();
      compute_tile(out, staged + kResultsAt, pixels + at * Patch::kBytes, matrices, warp_tile,
#ifdef EPILOGUE
                   target_of(shape, tile_at(tile)), epilogue);
#else
                   target_of(shape, tile_at(tile)));
#endif
      at = at + 1 == kStages ? 0 : at + 1;
    }
  }
}
