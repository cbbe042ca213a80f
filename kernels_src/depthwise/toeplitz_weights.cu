// dw[c,y,x] = sum_{n,i,j} x[n, c, i - PAD_H + y, j - PAD_W + x] * dy[n,c,i,j], stride 1, NCHW, on tensor cores.
//
// A filter row is a product over images and rows: columns of dy times columns of x. 16 columns of dy meet at most 24 of
// x. Taps are the sums along the diagonals of the 16 x 24 product, the same diagonals for all blocks of 16 columns and
// all rows: a warp adds all that it computes to the same registers. K of a product is eight images: a warp transposes
// words of two columns of an image into words of two images of a column. In rows of odd length, the diagonals of every
// other row shift by one: even and odd rows of dy have their own accumulators where they differ.
// A block computes ROW_BLOCK_ROWS rows of dy, for CHANNELS channels of IMAGES images. WARPS warps share the images of a
// channel. The block writes float32 partials[split][c][y][x] or, of a single split, dw; a second kernel adds partials.
// Grid: one dimension, channels innermost, then row blocks, then images.
#include "depthwise/toeplitz.cuh"
#include "common/split_k.cuh"
#include "depthwise/even_segments.cuh"
#include "common/small_matrices.cuh"
#include "depthwise/transposed_matrix.cuh"

#if !defined(ELEMENT) || !defined(H) || !defined(W) || !defined(OUT_H) || !defined(OUT_W) || !defined(FILTER_Y)
#error "define ELEMENT, H, W, OUT_H, OUT_W and FILTER_Y"
#endif
#if !defined(FILTER_X) || !defined(PAD_H) || !defined(PAD_W) || !defined(SHIFT) || !defined(CHANNELS)
#error "define FILTER_X, PAD_H, PAD_W, SHIFT and CHANNELS"
#endif
#if !defined(IMAGES) || !defined(ROW_BLOCK_ROWS) || !defined(ROW_BLOCKS) || !defined(RING) || !defined(SPLITS)
#error "define IMAGES, ROW_BLOCK_ROWS, ROW_BLOCKS, RING and SPLITS"
#endif
#if !defined(WARPS) || !defined(ALIKE) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define WARPS, ALIKE, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kChannels = CHANNELS, kImages = IMAGES, kRowBlocks = ROW_BLOCKS, kWarps = WARPS;
constexpr int kThreads = 32 * kChannels * kWarps;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
static_assert(kImages % 8 == 0 && kThreads <= 1024, "the K of a product is eight images: IMAGES must be a multiple");
static_assert(kImages / 8 >= kWarps && 8 % kWarps == 0, "every warp must have images");
static_assert(ROW_BLOCK_ROWS * (kRowBlocks - 1) < OUT_H && ROW_BLOCK_ROWS * kRowBlocks >= OUT_H,
              "ROW_BLOCKS row blocks of ROW_BLOCK_ROWS must cover the rows, and none may be empty");

using Row = ToeplitzRow<W, OUT_W, FILTER_X, PAD_W, SHIFT>;
using Begin = Parity<H, W, OUT_H, OUT_W>;
constexpr bool kIsOdd = Row::kIsOdd;
constexpr int kOdd = Row::kOdd, kBlocks = Row::kBlocks, kWords = Row::kWords, kOutWords = 2 * kBlocks;
static_assert(!kIsOdd || ROW_BLOCK_ROWS % 2 == 0 || kRowBlocks == 1, "a row block must begin at an even row");

// Rows of x are in a ring of registers, in which the next one arrives while a row of dy is multiplied; or there are
// registers for all, and the compiler knows every row.
constexpr int kRing = RING;
constexpr bool kIsWhole = kRowBlocks == 1 && kRing >= OUT_H + kFilterY - 1;
static_assert(kIsWhole || (kRing >= kFilterY + 1 && kRing % 2 == 0), "a row's words and the next one's fit");
constexpr int kIterations = kIsWhole ? OUT_H : kRing;  // rows of dy that are unrolled

// A segment is what a row block meets of one channel of an image, in x and in dy. An odd number of 16-byte words lies
// between segments, so that eight images' rows of four words meet every bank once.
constexpr int kSegment = (kRowBlocks == 1 || ROW_BLOCK_ROWS + kFilterY - 1 > H ? H : ROW_BLOCK_ROWS + kFilterY - 1) * W;
constexpr int kOutSegment = (kRowBlocks == 1 ? OUT_H : ROW_BLOCK_ROWS) * OUT_W;
constexpr int odd_padded_size(int count) {
  return (padded_size<ELEMENT>(count) / kCopyElements<ELEMENT> | 1) * kCopyElements<ELEMENT>;
}
constexpr int kPitch = odd_padded_size(kSegment), kOutPitch = odd_padded_size(kOutSegment),
              kSlots = kChannels * kImages;
constexpr int kTogether = 8 * kWarps, kStages = kImages / kTogether;  // images that warps need at once
static_assert(kImages % kTogether == 0, "a warp must have whole groups of images");

// Accumulators: of diagonals of 8 x 8 columns, from FIRST_WORD on, for each filter row; twice where parities differ.
constexpr bool is_alike(int y) {
  return Begin::is_alike(y + PAD_H);
}
constexpr int kMet = Row::kIsNarrow ? 2 : 3;  // words of x that a block meets
constexpr int kHalves = OUT_W + kOdd <= 8 ? 1 : 2;
using Accumulators = float[kFilterY][2][kMet][4];

// Products of a filter row, staged: [column of dy][column of x], odd pitch; as many filter rows at once as fit.
constexpr int kColumns = 8 * kMet + 1, kMatrix = 8 * kHalves * kColumns;
constexpr int kWarpFloats = kImages * (kPitch + kOutPitch) / 2 / kWarps;
constexpr int kVariants = kIsOdd ? 2 : 1;
constexpr int kStagedRows =
    kWarpFloats / (kVariants * kMatrix) < kFilterY ? maximum(1, kWarpFloats / (kVariants * kMatrix)) : kFilterY;
constexpr int kOwnFloats = maximum(kStagedRows * kVariants * kMatrix, kWarpFloats);
constexpr int kTotals = kWarps > 1 ? kChannels * kWarps * kTaps : 0;  // accumulators of the warps that share a channel
static_assert(SHARED_BYTES == 4 * (kChannels * kWarps * kOwnFloats + kTotals),
              "SHARED_BYTES differs from this layout: the solver computes another");

using Words = unsigned[kWords];
using OutWords = unsigned[kOutWords];

// A channel of eight images, of which a lane reads one. Both pointers are to where row 0 of the image would have the
// lane's first word, did it begin at an even element.
struct WarpTile {
  const ELEMENT *x, *dy;
  int first_row, end_row, end_in;  // rows of dy, and of x the first beyond those that they meet
  bool exists;
};

struct Masks {
  Words x[2];
  OutWords dy[2];
};

__device__ __forceinline__ void read_row(Words& words, const WarpTile& tile, const Masks& masks, const Begin& begin,
                                         int row, int odd) {
  constexpr int kEnd = Row::is_live(kWords - 1) ? kWords : Row::is_live(kWords - 2) ? kWords - 1 : kWords - 2;
  read_words<0, kEnd, kIsOdd>(
      words, tile.x + row * W - begin.of_in(odd), masks.x[kIsOdd ? odd : 0],
      tile.exists && static_cast<unsigned>(row) < static_cast<unsigned>(kIsWhole ? H : tile.end_in), Row::is_edge);
}

__device__ __forceinline__ void read_out_row(OutWords& words, const WarpTile& tile, const Masks& masks,
                                             const Begin& begin, int row, int odd) {
  read_words<0, kOutWords, kIsOdd>(words, tile.dy + row * OUT_W - begin.of_out(odd), masks.dy[kIsOdd ? odd : 0],
                                   tile.exists && row < tile.end_row, Row::is_out_edge);
}

template <int kCount>
__device__ __forceinline__ void transpose(unsigned (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = transposed_matrix(words[i]);
}

// Adds the products of a row of dy and a row of x.
__device__ __forceinline__ void add_row(float (&accumulators)[kMet][4], const OutWords& dy, const Words& x) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j)
#pragma unroll
    for (int d = 0; d < kMet; ++d)
      if (Row::is_met(j, 2 * j + d))
        multiply_add_half<ELEMENT>(accumulators[d], dy[2 * j], kHalves == 1 ? 0u : dy[2 * j + 1], x[2 * j + d]);
}

__device__ __forceinline__ void add_rows(Accumulators& accumulators, const WarpTile& tile, const Masks& masks,
                                         const Begin& begin) {
  // Row m of the ring is row first_row - PAD_H + m of x, which row first_row of dy meets by filter row m.
  Words ring[kRing] = {};
  OutWords dy[2];
  constexpr int kReadFirst = kIsWhole ? OUT_H + kFilterY - 1 : kFilterY;
  const int start = kIsWhole ? 0 : tile.first_row;
#pragma unroll
  for (int m = 0; m < kReadFirst; ++m) {
    if (kIsWhole && (m < PAD_H || m - PAD_H >= H)) continue;
    read_row(ring[m], tile, masks, begin, start - PAD_H + m, (m + PAD_H) & 1);
    transpose(ring[m]);
  }
  read_out_row(dy[0], tile, masks, begin, start, 0);
#pragma unroll 1
  for (int first = start; first < tile.end_row; first += kRing) {
#pragma unroll
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      const int row = (kIsWhole ? 0 : first) + iteration;
      if (!kIsWhole && row >= tile.end_row) break;
      OutWords& now = dy[iteration % 2];
      transpose(now);
      if (!kIsWhole || iteration + 1 < OUT_H)
        read_out_row(dy[(iteration + 1) % 2], tile, masks, begin, row + 1, (iteration + 1) & 1);
      if constexpr (!kIsWhole)
        read_row(ring[(iteration + kFilterY) % kRing], tile, masks, begin, row + kFilterY - PAD_H,
                 (iteration + kFilterY + PAD_H) & 1);
#pragma unroll
      for (int y = 0; y < kFilterY; ++y) {
        if (kIsWhole && (iteration + y < PAD_H || iteration + y - PAD_H >= H)) continue;
        add_row(accumulators[y][is_alike(y) ? 0 : iteration & 1], now, ring[(iteration + y) % kRing]);
      }
      if constexpr (!kIsWhole) transpose(ring[(iteration + kFilterY) % kRing]);
    }
    if (kIsWhole) break;
  }
}

// Adds a warp's sums along diagonals, and writes them to `to`.
template <typename T>
__device__ __forceinline__ void write_taps(T* to, float* staged, const Accumulators& accumulators, const Begin& begin) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kFilterY; first += kStagedRows) {
    __syncwarp();  // what was staged before has been read
#pragma unroll
    for (int y = first; y < first + kStagedRows && y < kFilterY; ++y)
#pragma unroll
      for (int odd = 0; odd < kVariants; ++odd) {
        if (odd > 0 && is_alike(y)) continue;
        float* const matrix = staged + ((y - first) * kVariants + odd) * kMatrix + lane / 4 * kColumns + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < kMet; ++d)
#pragma unroll
          for (int i = 0; i < 2 * kHalves; ++i)
            matrix[i / 2 * 8 * kColumns + 8 * d + i % 2] = accumulators[y][odd][d][i];
      }
    __syncwarp();  // all products are staged
    const int rows = first + kStagedRows < kFilterY ? kStagedRows : kFilterY - first;
    for (int i = lane; i < rows * kFilterX; i += 32) {
      const int row = i / kFilterX, tap = i % kFilterX, y = first + row;
      float sum = 0;
#pragma unroll
      for (int odd = 0; odd < kVariants; ++odd) {
        if (odd > 0 && is_alike(y)) break;
        const float* const matrix = staged + (row * kVariants + odd) * kMatrix;
        const int shift = is_alike(y) ? 0 : begin.of_out(odd) - begin.of_in(odd + y + PAD_H);
        const int column = tap - Row::kFirstTap - shift;  // of x that joins column 0 of dy and the tap
#pragma unroll
        for (int m = 0; m < 8 * kHalves; ++m)
          if (static_cast<unsigned>(column + m) < 8 * kMet) sum += matrix[m * kColumns + column + m];
      }
      to[first * kFilterX + i] = convert<T>(sum);
    }
  }
}

// Waits for all but the last `stages` stages of copies.
template <int kMost>
__device__ __forceinline__ void wait_for_all_but(int stages) {
  if constexpr (kMost > 0)
    if (stages < kMost) return wait_for_all_but<kMost - 1>(stages);
  wait_for_copies<kMost>();
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_toeplitz_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, ELEMENT* dw,
                               float* partials, int images, int channels) {
  extern __shared__ __align__(16) ELEMENT staged[];
  const int channel_tiles = (channels + kChannels - 1) / kChannels;
  const int split = blockIdx.x / channel_tiles, channel = blockIdx.x % channel_tiles * kChannels;
  const int image = split / kRowBlocks * kImages, first_row = split % kRowBlocks * ROW_BLOCK_ROWS;
  const int here = min(kChannels, channels - channel), end_row = min(OUT_H, first_row + ROW_BLOCK_ROWS);
  const int first_in = kRowBlocks == 1 ? 0 : max(0, first_row - PAD_H);
  const int end_in = kRowBlocks == 1 ? H : max(0, min(H, end_row - PAD_H + kFilterY - 1));

  ELEMENT* const staged_dy = staged + kSlots * kPitch;
  // Slots are channel by channel. A channel's segments are the rows [first, end) of its images of `area` elements.
  // They are copied in the order in which warps need them, a group of eight images for each warp at a time.
  const auto segments_of = [&](int own, int first_image, unsigned area, int first, int end, unsigned width) {
    const unsigned before = (image + first_image) * channels + channel + own;  // channels of images
    return EvenSegments{before * area + first * width, channels * area,
                        static_cast<unsigned>(own < here ? max(0, images - image - first_image) : 0),
                        max(0, end - first) * width};
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    const int first = stage * kTogether;
#pragma unroll
    for (int own = 0; own < kChannels; ++own) {
      const int slot = own * kImages + first;
      load_even_segments<kThreads, kTogether, kSegment, kPitch, ALIKE>(
          staged + slot * kPitch, x, images * channels * (H * W), segments_of(own, first, H * W, first_in, end_in, W));
      load_even_segments<kThreads, kTogether, kOutSegment, kOutPitch, ALIKE>(
          staged_dy + slot * kOutPitch, dy, images * channels * (OUT_H * OUT_W),
          segments_of(own, first, OUT_H * OUT_W, first_row, end_row, OUT_W));
    }
    commit_copies();
  }
  griddepcontrol_launch_dependents();

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int own = warp / kWarps, own_channel = channel + own, column = lane % 4 * 2;
  const bool computes = own < here;
  const Begin begin = Begin::of(own_channel);
  Masks masks;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) masks.x[odd][i] = existing<W>(8 * i + column - SHIFT - begin.of_in(odd));
#pragma unroll
    for (int i = 0; i < kOutWords; ++i) masks.dy[odd][i] = existing<OUT_W>(8 * i + column - begin.of_out(odd));
  }
  Accumulators accumulators = {};
#pragma unroll 1
  for (int stage = 0; stage < kStages && image + stage * kTogether < images; ++stage) {
    wait_for_all_but<kStages - 1>(kStages - 1 - stage);
    __syncthreads();  // the stage has arrived
    const int group = stage * kWarps + warp % kWarps;
    if (computes && image + 8 * group < images) {
      const int slot = own * kImages + 8 * group + lane / 4, of_image = image + 8 * group + lane / 4;
      const unsigned before = of_image * channels + own_channel;  // channels of images
      const unsigned first = (before * H + first_in) * W, first_out = (before * OUT_H + first_row) * OUT_W;
      WarpTile tile;
      tile.x = staged + slot * kPitch + first % kCopyElements<ELEMENT> - first_in * W + column - SHIFT;
      tile.dy = staged_dy + slot * kOutPitch + first_out % kCopyElements<ELEMENT> - first_row * OUT_W + column;
      tile.first_row = first_row;
      tile.end_row = end_row;
      tile.end_in = end_in;
      tile.exists = of_image < images;
      add_rows(accumulators, tile, masks, begin);
    }
  }
  __syncthreads();  // every warp has read the images before sums overwrite them
  float* const shared = reinterpret_cast<float*>(staged);
  float* const matrices = shared + warp * kOwnFloats;
  if constexpr (kWarps > 1) {
    float* const totals = shared + kChannels * kWarps * kOwnFloats;
    if (computes) write_taps(totals + warp * kTaps, matrices, accumulators, begin);
    __syncthreads();  // the accumulators of all warps are there
    for (int i = threadIdx.x; i < here * kTaps; i += kThreads) {
      const float* const from = totals + i / kTaps * (kWarps * kTaps) + i % kTaps;
      float sum = 0;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) sum += from[other * kTaps];
      if constexpr (SPLITS == 1)
        dw[channel * kTaps + i] = convert<ELEMENT>(sum);
      else
        partials[(split * channels + channel) * kTaps + i] = sum;
    }
  } else if (computes) {
    if constexpr (SPLITS == 1)
      write_taps(dw + own_channel * kTaps, matrices, accumulators, begin);
    else
      write_taps(partials + (split * channels + own_channel) * kTaps, matrices, accumulators, begin);
  }
}

// dw[i] = sum of partials[split][i] over the splits, in order.
extern "C" __global__ void __launch_bounds__(128)
    depthwise_toeplitz_weights_finish(const float* partials, ELEMENT* dw, int count) {
  griddepcontrol_wait();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= count) return;
  dw[i] = convert<ELEMENT>(sum_splits<8, int>(partials, i, count, {0, SPLITS, 1}));
}
