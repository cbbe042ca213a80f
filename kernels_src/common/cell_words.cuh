// Of first_layer_data_wgmma.cu, which says what cells and slots are: sizes, and rows of dy on their way to words.
#pragma once

#include "common/column_copies.cuh"
#include "common/mma.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(WIDEN) || !defined(COLUMNS) || !defined(TEAMS)
#error "define STRIDE_Y, STRIDE_X, WIDEN, COLUMNS and TEAMS"
#endif
#if !defined(STAGES) || !defined(CHANNELS_LAST) || !defined(IN_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define STAGES, CHANNELS_LAST, IN_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(PHASE) || !defined(PAIRED)
#error "define PHASE and PAIRED"
#endif
#define PRODUCT_COLUMNS COLUMNS
#include "common/column_products.cuh"

static_assert(STAGES >= 2, "a row is loaded while another is read");

// Outputs along an axis that meet a cell of one stride, PHASE columns after where taps begin; columns of dy that a cell
// meets, and columns of dx that it has.
constexpr int kTaps = CHANNELS * FILTER_Y * FILTER_X;
constexpr int kCellsY = ceil_div(FILTER_Y, STRIDE_Y), kCellsX = ceil_div(FILTER_X + PHASE, STRIDE_X);
constexpr int kShifts = kCellsX + WIDEN - 1, kCell = WIDEN * STRIDE_X;
static_assert(!PAIRED || kCell * CHANNELS % 2 == 0, "two elements side by side are of one cell");
// Rows of the product: of a slot, of all, and 64 of a warpgroup. Steps of 16 filters.
constexpr int kSlot = STRIDE_Y * kCell * CHANNELS, kRows = kCellsY * kSlot, kGroups = ceil_div(kRows, 64);
constexpr int kSteps = ceil_div(FILTERS, 16), kOctets = 2 * kSteps, kProducts = kShifts * kSteps;
constexpr int kTeam = 128 * kGroups, kThreads = TEAMS * kTeam;

// Words of 8 filters, of WIDEN planes of columns; an odd number from 8 filters to the next, so that eight words of a
// column meet every bank once. Planes begin with the column at a multiple of 8 before the first that is met.
constexpr int kStaged =
    CHANNELS_LAST ? (COLUMNS - 1) * WIDEN + kShifts : round_up(7 + (COLUMNS - 1) * WIDEN + kShifts, 8);
constexpr int kPlane = ceil_div(kStaged, WIDEN), kPitch = WIDEN * kPlane | 1;
constexpr int kWordBytes = 16 * kOctets * kPitch;
// A row of columns as it comes, likewise, and the words that it is turned into.
constexpr int kRawPitch = 16 * (kStaged / 8 | 1);
constexpr int kStageBytes = CHANNELS_LAST ? kWordBytes : 16 * kSteps * kRawPitch;
constexpr int kTurnedBytes = CHANNELS_LAST ? 0 : kWordBytes;

__device__ __forceinline__ constexpr int place_of(int column) {
  return column % WIDEN * kPlane + column / WIDEN;
}

// An element of a cell, as the tensor has them side by side.
struct Pixel {
  int y, x, c;

  __device__ __forceinline__ explicit Pixel(int number)
      : y(number / (kCell * CHANNELS)),
        x(CHANNELS_LAST ? number / CHANNELS % kCell : number % kCell),
        c(CHANNELS_LAST ? number % CHANNELS : number / kCell % CHANNELS) {}
};

// What a team computes: of `image`, cells from `cell` on.
struct Strip {
  int image, cell;
};
struct Size {
  int height, width;
};

__device__ __forceinline__ void clear_stage(unsigned char* stage) {
  static_assert(kStageBytes % 16 == 0, "whole words");
  for (int i = threadIdx.x % kTeam; i < kStageBytes / 16; i += kTeam)
    *reinterpret_cast<uint4*>(stage + 16 * i) = make_uint4(0, 0, 0, 0);
}

// Starts to copy the columns of a row of dy that there are, of those staged, which begin at `first`. The others stay as
// they are.
__device__ __forceinline__ void load_row(unsigned char* to, const ELEMENT* __restrict__ dy, const Size& size, int image,
                                         int row, int first) {
  const int thread = threadIdx.x % kTeam, begin = max(0, -first), end = min(kStaged, size.width - first);
  constexpr int kRuns = (CHANNELS_LAST ? FILTERS : kStaged) / IN_VECTOR, kAtOnce = maximum(1, kTeam / kRuns);
  if constexpr (CHANNELS_LAST) {
    const ELEMENT* const from = dy + ((image * size.height + row) * size.width + first) * FILTERS;
    for (int run = kRuns > kTeam ? thread : thread % kRuns; run < kRuns; run += kTeam) {
      unsigned char* const words = to + run * IN_VECTOR / 8 * 16 * kPitch + run * IN_VECTOR % 8 * 2;
      const int first_column = kRuns > kTeam ? 0 : thread / kRuns;
      if (first_column >= kAtOnce) break;
#pragma unroll 4
      for (int column = first_column; column < kStaged; column += kAtOnce)
        if (column >= begin && column < end)
          copy_vector<IN_VECTOR>(words + 16 * place_of(column), from + column * FILTERS + run * IN_VECTOR);
    }
  } else {
    const int plane = size.height * size.width;
    const ELEMENT* const from = dy + image * FILTERS * plane + row * size.width + first;
#pragma unroll 4
    for (int i = thread; i < FILTERS * kRuns; i += kTeam) {
      const int k = i / kRuns, column = i % kRuns * IN_VECTOR;
      if (column >= begin && column < end)
        copy_vector<IN_VECTOR>(to + k * kRawPitch + 2 * column, from + k * plane + column);
    }
  }
}

// Turns a row of columns into words, 8 columns of 32 filters at a time.
__device__ __forceinline__ void turn_row(unsigned char* to, const unsigned char* from) {
  constexpr int kBlocks = kStaged / 8, kQuads = ceil_div(kOctets, 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kTeam / 32;
#pragma unroll 2
  for (int i = warp; i < kBlocks * kQuads; i += kTeam / 32) {
    const int octet = min(i / kBlocks * 4 + lane / 8, kOctets - 1), column = i % kBlocks * 8;
    unsigned four[4];
    load_transposed(four, shared_address(from) + (octet * 8 + lane % 8) * kRawPitch + 2 * column);
    store_matrices(shared_address(to) + 16 * (octet * kPitch + place_of(column + lane % 8)), four[0], four[1], four[2],
                   four[3]);
  }
}
