// out[n,c,i,j] = sum_{y,x} in[n, c, i - pad_top + y, j - pad_left + x] * filter[c,y,x], stride 1, on tensor cores.
//
// One filter row y is a product: row i + y - pad_top of the input, times the Toeplitz matrix whose element (k, j) is
// tap k - j + LEFT. Rows of the product are slots (output row, image), columns are output columns.
// A block stages CHANNELS channels of IMAGES images: the input rows that TILE_H x TILE_W outputs meet, and the filter.
// Filter rows are kept twice, one element apart, so that pairs of taps are aligned. WARPS warps share a channel's
// slots. Toeplitz fragments depend on k - j alone. A warp skips fragments that are zero all over, and rows of padding.
// Backward data: `in` is dy, and the filter is read backwards (FLIPPED). Accumulators are float32.
// Grid: one dimension, channels innermost, then column tiles, row tiles, images.
#include "common/mma.cuh"
#include "depthwise/toeplitz_large.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(ELEMENT) || !defined(TILE_H) || !defined(TILE_W) || !defined(IMAGES) || !defined(CHANNELS)
#error "define ELEMENT, TILE_H, TILE_W, IMAGES and CHANNELS"
#endif
#if !defined(WARPS) || !defined(FILTER_Y) || !defined(FILTER_X) || !defined(FLIPPED) || !defined(CHANNELS_LAST)
#error "define WARPS, FILTER_Y, FILTER_X, FLIPPED and CHANNELS_LAST"
#endif
#if !defined(IN_ROWS) || !defined(IN_COLUMNS) || !defined(OUT_COLUMNS) || !defined(LEFT) || !defined(MIN_BLOCKS)
#error "define IN_ROWS, IN_COLUMNS, OUT_COLUMNS, LEFT and MIN_BLOCKS"
#endif
#if !defined(IN_VECTOR) || !defined(IN_FLAT) || !defined(OUT_FLAT) || !defined(OUT_VECTOR) || !defined(SHARED_BYTES)
#error "define IN_VECTOR, IN_FLAT, OUT_FLAT, OUT_VECTOR and SHARED_BYTES"
#endif

constexpr int kImages = IMAGES, kChannels = CHANNELS, kWarps = WARPS, kThreads = 32 * kChannels * kWarps;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTileH = TILE_H, kTileW = TILE_W;
static_assert(kTileW % 8 == 0, "TILE_W must be a multiple of 8, the columns of a product");
static_assert(kThreads <= 1024, "a block has at most 1024 threads");
// Loads of a thread under way at once: as many as its registers allow.
constexpr int kInFlight = MIN_BLOCKS * kThreads <= 512 ? 8 : 4;

// Fragments: columns of outputs by 8, of inputs by 16 and by 8, slots of outputs by 16.
constexpr int kColumnBlocks = kTileW / 8;
constexpr int kDepthBlocks = ceil_div(IN_COLUMNS, 16), kHalfBlocks = ceil_div(IN_COLUMNS, 8);
constexpr int kSlotBlocks = ceil_div(kTileH * kImages, 16), kWarpBlocks = ceil_div(kSlotBlocks, kWarps);

// Between slots lie an odd number of 16-byte words, so that eight of them meet every bank once.
constexpr int kInPitch = 16 * kDepthBlocks + 8;
constexpr int kOutPitch = 8 * (kColumnBlocks / 2 * 2 + 1);
// Around the staged slots lie as many zeros as a block of 16 can reach beyond them.
constexpr int kGap = 16 - largest_power_dividing(kImages);
using In = StagedImages<kChannels, kImages, IN_ROWS, IN_COLUMNS, kInPitch, kGap, IN_VECTOR, CHANNELS_LAST, IN_FLAT>;
using Out = StagedImages<kChannels, kImages, kTileH, OUT_COLUMNS, kOutPitch, 0, OUT_VECTOR, CHANNELS_LAST, OUT_FLAT>;

// Diagonal d of 8 x 8 Toeplitz blocks: input block - output block = d. It holds taps 8 * d + LEFT - 7 ... + 7.
constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -ceil_div(-a, b);
}
constexpr int kFirstDiagonal = maximum(1 - kColumnBlocks, -floor_div(LEFT + 7, 8));
constexpr int kLastDiagonal = -maximum(1 - kHalfBlocks, -floor_div(kFilterX + 6 - LEFT, 8));
constexpr int kDiagonals = kLastDiagonal - kFirstDiagonal + 1;
static_assert(kDiagonals > 0, "no output meets an input: the solver refuses such problems");

// A filter row in shared memory: taps from kFirstTap on, twice. The words of the copies fall into different banks.
constexpr int kFirstTap = 8 * kFirstDiagonal + LEFT - 7;
constexpr int kRowTaps = 8 * kDiagonals + 8;
constexpr int copy_words() {
  int words = kRowTaps / 2;
  while (words % 32 < 8 || words % 32 > 24) words += 4;
  return words;
}
constexpr int kCopyWords = copy_words(), kRowWords = 2 * kCopyWords;
constexpr int kFilterElements = kChannels * kFilterY * 2 * kRowWords;

// The filters of a block's channels as they lie in memory, from the 16-byte word on in which they start.
constexpr int kTaps = kFilterY * kFilterX, kRawElements = round_up(kChannels * kTaps + 7, 8);
constexpr int kFilterAt = In::kElements, kRawAt = kFilterAt + kFilterElements;
static_assert(SHARED_BYTES == 2 * maximum(kRawAt + kRawElements, Out::kElements),
              "SHARED_BYTES differs from this layout: the solver computes another");

// Starts to copy the filters from element `first` on.
__device__ __forceinline__ void load_filter(ELEMENT* raw, const ELEMENT* filter, int first, int channels) {
  const int skipped = first % 8, count = skipped + channels * kTaps;
  const ELEMENT* const from = filter + first - skipped;
  for (int i = 8 * threadIdx.x; i < count; i += 8 * kThreads) {
    if (i + 8 <= count) {
      copy_async<4>(reinterpret_cast<float*>(raw + i), reinterpret_cast<const float*>(from + i), true);
    } else {
      for (int k = i; k < count; ++k) raw[k] = from[k];
    }
  }
  commit_copies();
}

// Makes the rows of the staged filters from them, zeros where the filter ends.
__device__ __forceinline__ void spread_filter(ELEMENT* rows, const ELEMENT* raw) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kChannels * kFilterY * kRowTaps; i += kThreads) {
    const int at = i % kRowTaps, row = i / kRowTaps, tap = kFirstTap + at, y = row % kFilterY;
    const int rank = FLIPPED ? (row - y + kFilterY - 1 - y) * kFilterX + kFilterX - 1 - tap : row * kFilterX + tap;
    const bool inside = tap >= 0 && tap < kFilterX;
    const ELEMENT value = inside ? raw[rank] : convert<ELEMENT>(0.0f);
    ELEMENT* const to = rows + row * 2 * kRowWords + at;
    to[0] = value;
    if (at > 0) to[2 * kCopyWords - 1] = value;
  }
}

// A warp's view of shared memory: the address of its first block of output slots among the staged ones, for its lane;
// words of its channel's filter rows, from which its lane's pair of taps of the first diagonal starts; the number of
// its first output slot.
struct WarpTile {
  unsigned slots;
  const unsigned* taps;
  int first_slot;
};

__device__ __forceinline__ WarpTile warp_tile_of(const ELEMENT* staged) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int channel = warp / kWarps, first_slot = warp % kWarps * 16;
  const int at = 2 * (lane % 4) + 7 - lane / 4;  // of the pair of taps within the row
  const ELEMENT* slots =
      staged + In::kFirst + channel * In::kChannelPitch + (first_slot + lane % 16) * kInPitch + lane / 16 * 8;
  const unsigned* rows = reinterpret_cast<const unsigned*>(staged + kFilterAt) + channel * kFilterY * kRowWords;
  return {static_cast<unsigned>(__cvta_generic_to_shared(slots)), rows + at % 2 * kCopyWords + at / 2, first_slot};
}

__device__ __forceinline__ void read_taps(unsigned (&taps)[kDiagonals], const WarpTile& tile, int y) {
#pragma unroll
  for (int d = 0; d < kDiagonals; ++d) taps[d] = tile.taps[y * kRowWords + 4 * d];
}

constexpr bool is_zero(int diagonal) {
  return diagonal < kFirstDiagonal || diagonal > kLastDiagonal;
}

// Adds what one filter row contributes. Slot m of the outputs meets staged slot m + shift.
__device__ __forceinline__ void add_row(float (&accumulators)[kWarpBlocks][kColumnBlocks][4],
                                        const unsigned (&taps)[kDiagonals], const WarpTile& tile, int shift) {
  const unsigned slots = tile.slots + 2 * shift * kInPitch;
  bool meets[kWarpBlocks];
#pragma unroll
  for (int m = 0; m < kWarpBlocks; ++m)
    meets[m] = static_cast<unsigned>(tile.first_slot + m * kWarps * 16 + shift + 15) < In::kSlots + 15u;
#pragma unroll
  for (int k = 0; k < kDepthBlocks; ++k) {
    unsigned rows[kWarpBlocks][4];
#pragma unroll
    for (int m = 0; m < kWarpBlocks; ++m)
      if (meets[m]) load_matrices(rows[m], slots + 2 * m * kWarps * 16 * kInPitch + 32 * k);
#pragma unroll
    for (int m = 0; m < kWarpBlocks; ++m) {
      if (!meets[m]) continue;
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        const int low = 2 * k - j, high = low + 1;
        if (is_zero(low) && (is_zero(high) || 2 * k + 1 >= kHalfBlocks)) continue;
        multiply_add<ELEMENT>(accumulators[m][j], rows[m], is_zero(low) ? 0u : taps[low - kFirstDiagonal],
                              is_zero(high) ? 0u : taps[high - kFirstDiagonal]);
      }
    }
  }
}

#ifdef EPILOGUE
// Rounds a warp's results into the staged outputs, which hold the residual; `terms` are those of the warp's
// channel and the first image.
__device__ __forceinline__ void stage_results(ELEMENT* staged,
                                              const float (&accumulators)[kWarpBlocks][kColumnBlocks][4],
                                              const WarpTile& tile, const Images& images, ChannelTerms terms,
                                              const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 / kWarps;
#pragma unroll
  for (int m = 0; m < kWarpBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = tile.first_slot + m * kWarps * 16 + half * 8 + lane / 4, n = images.first_n + slot % kImages;
      if (slot >= Out::kSlots || n >= images.n || images.first_channel + own >= images.channels) continue;
      if constexpr (kHasChannelBias) terms = channel_terms(epilogue, n, images.first_channel + own, images.channels);
      ELEMENT* const to = staged + own * Out::kChannelPitch + slot * kOutPitch + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        const float* sum = accumulators[m][j] + 2 * half;
        Vector<ELEMENT, 2>& pair = *reinterpret_cast<Vector<ELEMENT, 2>*>(to + 8 * j);
        const Vector<ELEMENT, 2> residual = kHasResidual ? pair : Vector<ELEMENT, 2>{};
        pair = {convert<ELEMENT>(finish(sum[0], terms, convert<float>(residual.at[0]), epilogue)),
                convert<ELEMENT>(finish(sum[1], terms, convert<float>(residual.at[1]), epilogue))};
      }
    }
}
#endif

// Rounds a warp's accumulators into the staged outputs.
__device__ __forceinline__ void stage_accumulators(ELEMENT* staged,
                                                   const float (&accumulators)[kWarpBlocks][kColumnBlocks][4],
                                                   const WarpTile& tile) {
  const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 / kWarps;
#pragma unroll
  for (int m = 0; m < kWarpBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = tile.first_slot + m * kWarps * 16 + half * 8 + lane / 4;
      if (slot >= Out::kSlots) continue;
      ELEMENT* const to = staged + channel * Out::kChannelPitch + slot * kOutPitch + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        const float* sum = accumulators[m][j] + 2 * half;
        *reinterpret_cast<Vector<ELEMENT, 2>*>(to + 8 * j) = {convert<ELEMENT>(sum[0]), convert<ELEMENT>(sum[1])};
      }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_toeplitz_large(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter,
#ifdef EPILOGUE
                             ELEMENT* __restrict__ out, const __grid_constant__ Shape shape,
                             const __grid_constant__ Epilogue epilogue) {
#else
                             ELEMENT* __restrict__ out, const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(16) ELEMENT staged[];
  const int channel_tiles = ceil_div(shape.channels, kChannels), column_tiles = ceil_div(shape.out_width, kTileW);
  const int row_tiles = ceil_div(shape.out_height, kTileH);
  int rest = blockIdx.x;
  const int channel = rest % channel_tiles * kChannels;
  rest /= channel_tiles;
  const int column = rest % column_tiles * kTileW;
  rest /= column_tiles;
  const int row = rest % row_tiles * kTileH, image = rest / row_tiles * kImages;
  const int in_row = max(0, row - shape.pad_top);

  load_filter(staged + kRawAt, filter, channel * kTaps, min(kChannels, shape.channels - channel));
  load_images<In, kThreads, 16 * kDepthBlocks, kInFlight>(staged, in,
                                                          input_images(shape, image, channel, in_row, column));
  wait_for_copies<0>();
  __syncthreads();  // the images and the filters have arrived
  spread_filter(staged + kFilterAt, staged + kRawAt + channel * kTaps % 8);
  __syncthreads();  // every row of the filters is in place

  const WarpTile tile = warp_tile_of(staged);
#ifdef EPILOGUE
  const Images results = output_images(shape, image, channel, row, column);
  const int own_channel = channel + static_cast<int>(threadIdx.x) / 32 / kWarps;
  const ChannelTerms terms = channel_terms(epilogue, image, min(own_channel, shape.channels - 1), shape.channels);
#endif
  const int first_y = max(0, shape.pad_top - row - (kTileH - 1)),
            end_y = min(kFilterY, shape.in_height + shape.pad_top - row);
  float accumulators[kWarpBlocks][kColumnBlocks][4] = {};
  unsigned taps[kDiagonals], next[kDiagonals];
  read_taps(taps, tile, min(first_y, kFilterY - 1));
#pragma unroll 2
  for (int y = first_y; y < end_y; ++y) {
    read_taps(next, tile, min(y + 1, kFilterY - 1));
    add_row(accumulators, taps, tile, (row - shape.pad_top + y - in_row) * kImages);
#pragma unroll
    for (int d = 0; d < kDiagonals; ++d) taps[d] = next[d];
  }
  __syncthreads();  // every warp has read the images before outputs overwrite them
#ifdef EPILOGUE
  if constexpr (kHasResidual) {
    load_images<Out, kThreads, round_up(OUT_COLUMNS, 8), kInFlight>(staged, epilogue.residual, results);
    wait_for_copies<0>();
    __syncthreads();  // the residual has arrived
  }
  stage_results(staged, accumulators, tile, results, terms, epilogue);
#else
  stage_accumulators(staged, accumulators, tile);
#endif
  __syncthreads();  // the outputs of every warp are staged
  store_images<Out, kThreads>(out, staged, output_images(shape, image, channel, row, column));
}
