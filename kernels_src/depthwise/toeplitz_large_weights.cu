// dw[c,y,x] = sum_{n,i,j} dy[n,c,i,j] * in[n, c, i - pad_top + y, j - pad_left + x], stride 1, on tensor cores.
//
// One filter row y is a product: input columns x slots times slots x output columns. Slots are (output row, image);
// inputs are shifted by y - pad_top rows. Element (k, j) belongs to tap k - j + LEFT: blocks on one diagonal share
// their accumulators, and the diagonals of a block are added at the end.
// A block computes CHANNELS channels and WARPS x WARP_ROWS filter rows, for every splits-th tile of IMAGES images and
// TILE_H x TILE_W outputs; or, if that is one tile, PASSES times as many filter rows. With ONE_SPLIT it writes dw, else
// float32 partials, which a second kernel adds in a fixed order. Accumulators are float32.
// Grid: one dimension, channels innermost, then filter rows, splits.
#include "common/mma.cuh"
#include "common/split_k.cuh"
#include "depthwise/toeplitz_large.cuh"

#if !defined(ELEMENT) || !defined(TILE_H) || !defined(TILE_W) || !defined(IMAGES) || !defined(CHANNELS)
#error "define ELEMENT, TILE_H, TILE_W, IMAGES and CHANNELS"
#endif
#if !defined(PASSES)
#error "define PASSES"
#endif
#if !defined(WARPS) || !defined(WARP_ROWS) || !defined(FILTER_Y) || !defined(FILTER_X) || !defined(CHANNELS_LAST)
#error "define WARPS, WARP_ROWS, FILTER_Y, FILTER_X and CHANNELS_LAST"
#endif
#if !defined(IN_ROWS) || !defined(IN_COLUMNS) || !defined(OUT_COLUMNS) || !defined(LEFT) || !defined(MIN_BLOCKS)
#error "define IN_ROWS, IN_COLUMNS, OUT_COLUMNS, LEFT and MIN_BLOCKS"
#endif
#if !defined(IN_VECTOR) || !defined(IN_FLAT) || !defined(OUT_FLAT) || !defined(OUT_VECTOR) || \
    !defined(SHARED_BYTES) || !defined(ONE_SPLIT)
#error "define IN_VECTOR, IN_FLAT, OUT_FLAT, OUT_VECTOR, SHARED_BYTES and ONE_SPLIT"
#endif

constexpr int kImages = IMAGES, kChannels = CHANNELS, kWarps = WARPS, kThreads = 32 * kChannels * kWarps;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTileH = TILE_H, kTileW = TILE_W;
constexpr int kWarpRows = WARP_ROWS, kPassRows = kWarps * kWarpRows, kPasses = PASSES;
static_assert(kTileW % 8 == 0, "TILE_W must be a multiple of 8, the columns of a product");
static_assert(kThreads <= 1024, "a block has at most 1024 threads");
// Loads of a thread under way at once: as many as its registers allow.
constexpr int kInFlight = MIN_BLOCKS * kThreads <= 512 ? 8 : 4;

// Fragments: columns of outputs by 8, of inputs by 16, slots of outputs by 16.
constexpr int kColumnBlocks = kTileW / 8, kInBlocks = ceil_div(IN_COLUMNS, 16);
constexpr int kSlotBlocks = ceil_div(kTileH * kImages, 16);

// Between slots lie an odd number of 16-byte words, so that eight of them meet every bank once.
constexpr int kInPitch = 16 * kInBlocks + 8, kOutPitch = round_up(kTileW, 16) + 8;
// Around the staged slots lie as many zeros as a block of 16 can reach beyond them.
constexpr int kGap = 16 - largest_power_dividing(kImages);
using In = StagedImages<kChannels, kImages, IN_ROWS, IN_COLUMNS, kInPitch, kGap, IN_VECTOR, CHANNELS_LAST, IN_FLAT>;
using Out = StagedImages<kChannels, kImages, kTileH, OUT_COLUMNS, kOutPitch, kGap, OUT_VECTOR, CHANNELS_LAST, OUT_FLAT>;

// Diagonal d: input columns 8 * d from output columns on. A block of 16 x 8 on it holds taps 8 * d + LEFT - 7 ... + 15.
constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -ceil_div(-a, b);
}
constexpr int kFirstDiagonal = maximum(1 - kColumnBlocks, -floor_div(LEFT + 15, 8));
constexpr int kLastDiagonal = -maximum(2 - 2 * kInBlocks, -floor_div(kFilterX + 6 - LEFT, 8));
constexpr int kDiagonals = kLastDiagonal - kFirstDiagonal + 1;
static_assert(kDiagonals > 0, "no output meets an input: the solver refuses such problems");

// A warp's blocks of accumulators of one filter row, in shared memory at the end, over images that no pass needs any
// more: neighbours on a diagonal in different banks.
constexpr int kAccumulatorPitch = 9, kAccumulatorBlock = 16 * kAccumulatorPitch,
              kAccumulatorFloats = kDiagonals * kAccumulatorBlock;
constexpr int kStagedBytes = 2 * (In::kElements + Out::kElements), kAccumulatorsAt = kPasses > 1 ? kStagedBytes : 0;
static_assert(SHARED_BYTES == maximum(kStagedBytes, kAccumulatorsAt + 4 * kChannels * kWarps * kAccumulatorFloats),
              "SHARED_BYTES differs from this layout: the solver computes another");

#if ONE_SPLIT
using Result = ELEMENT;
#else
using Result = float;
#endif

// Adds a tile. Output slot s meets staged input slot s + shift + r * kWarps * kImages in the warp's filter row r.
// in_slots and out_slots are addresses of the channel's first slots for the lane.
__device__ __forceinline__ void add_tile(float (&accumulators)[kWarpRows][kDiagonals][4], unsigned in_slots,
                                         unsigned out_slots, int shift) {
#pragma unroll 1
  for (int s = 0; s < kSlotBlocks; ++s) {
    unsigned outputs[(kColumnBlocks + 1) / 2][4];
#pragma unroll
    for (int j = 0; j < (kColumnBlocks + 1) / 2; ++j)
      load_transposed(outputs[j], out_slots + 2 * s * 16 * kOutPitch + 32 * j);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int first = 16 * s + shift + r * kWarps * kImages;
      if (static_cast<unsigned>(first + 15) >= In::kSlots + 15u) continue;
#pragma unroll
      for (int k = 0; k < kInBlocks; ++k) {
        unsigned inputs[4];
        load_transposed(inputs, in_slots + 2 * first * kInPitch + 32 * k);
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          const int d = 2 * k - j;
          if (d < kFirstDiagonal || d > kLastDiagonal) continue;
          multiply_add<ELEMENT>(accumulators[r][d - kFirstDiagonal], inputs, outputs[j / 2][j % 2 * 2],
                                outputs[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

// Adds along the diagonals of one filter row's blocks and writes its taps; `mine` is the warp's part of shared memory.
__device__ __forceinline__ void store_row(Result* to, float* mine, const float (&accumulators)[kDiagonals][4]) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the row before has been read
#pragma unroll
  for (int d = 0; d < kDiagonals; ++d)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mine[d * kAccumulatorBlock + (lane / 4 + i / 2 * 8) * kAccumulatorPitch + lane % 4 * 2 + i % 2] =
          accumulators[d][i];
  __syncwarp();  // the row is complete
  for (int tap = lane; tap < kFilterX; tap += 32) {
    float sum = 0;
#pragma unroll
    for (int d = 0; d < kDiagonals; ++d) {
      const int offset = tap - 8 * (d + kFirstDiagonal) - LEFT;  // row less column within the block
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = j + offset;
        if (i >= 0 && i < 16) sum += mine[d * kAccumulatorBlock + i * kAccumulatorPitch + j];
      }
    }
    to[tap] = convert<Result>(sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_toeplitz_large_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ in,
                                     Result* __restrict__ out, const __grid_constant__ Shape shape, int splits) {
  extern __shared__ __align__(16) ELEMENT staged[];
  const int channel_tiles = ceil_div(shape.channels, kChannels), row_blocks = ceil_div(kFilterY, kPassRows * kPasses);
  const int first_channel = blockIdx.x % channel_tiles * kChannels, rest = blockIdx.x / channel_tiles;
  const int split = rest / row_blocks;
  const int column_tiles = ceil_div(shape.out_width, kTileW), row_tiles = ceil_div(shape.out_height, kTileH);
  const int tiles = column_tiles * row_tiles * ceil_div(shape.batch, kImages);

  // A warp's filter rows are kWarps apart, so that all warps meet as much padding.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, channel = warp / kWarps;
  const int block_y = rest % row_blocks * kPassRows * kPasses + warp % kWarps;
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(staged));
  const int in_slot = lane / 16 * 8 + lane % 8, out_slot = lane % 16;
  const unsigned in_slots =
      base + 2 * (In::kFirst + channel * In::kChannelPitch + in_slot * kInPitch + lane / 8 % 2 * 8);
  const unsigned out_slots =
      base + 2 * (In::kElements + Out::kFirst + channel * Out::kChannelPitch + out_slot * kOutPitch + lane / 16 * 8);

  float* const mine = reinterpret_cast<float*>(staged) + kAccumulatorsAt / 4 + warp * kAccumulatorFloats;
  const int filter = split * shape.channels + first_channel + channel;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const int first_y = block_y + pass * kPassRows;
    float accumulators[kWarpRows][kDiagonals][4] = {};
#pragma unroll 1
    for (int tile = split; tile < tiles; tile += splits) {
      const int column = tile % column_tiles * kTileW, row = tile / column_tiles % row_tiles * kTileH;
      const int image = tile / column_tiles / row_tiles * kImages, in_row = max(0, row - shape.pad_top);
      if (pass == 0) {
        load_images<In, kThreads, 16 * kInBlocks, kInFlight>(staged, in,
                                                             input_images(shape, image, first_channel, in_row, column));
        load_images<Out, kThreads, kTileW, kInFlight>(staged + In::kElements, dy,
                                                      output_images(shape, image, first_channel, row, column));
        wait_for_copies<0>();
        __syncthreads();  // the images have arrived
      }
      add_tile(accumulators, in_slots, out_slots, (row - shape.pad_top + first_y - in_row) * kImages);
      if (kPasses == 1) __syncthreads();  // every warp has read the images before others overwrite them
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int y = first_y + r * kWarps;
      if (y < kFilterY && first_channel + channel < shape.channels)
        store_row(out + (filter * kFilterY + y) * kFilterX, mine, accumulators[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    depthwise_toeplitz_large_weights_finish(const float* __restrict__ partials, ELEMENT* __restrict__ dw, int size,
                                            int splits) {
  const int tap = blockIdx.x * 256 + threadIdx.x;
  if (tap >= size) return;
  dw[tap] = convert<ELEMENT>(sum_splits<4, int64>(partials, tap, size, {0, splits, 1}));
}
