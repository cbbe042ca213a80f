// Of few_channels/data_wgmma.cu, which says what cells and slots are: their sizes, and those of the filters.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(WIDEN) || !defined(COLUMNS) || !defined(TEAMS)
#error "define STRIDE_Y, STRIDE_X, WIDEN, COLUMNS and TEAMS"
#endif
#if !defined(STAGES) || !defined(CHANNELS_LAST) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define STAGES, CHANNELS_LAST, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(PHASE) || !defined(PAIRED)
#error "define PHASE and PAIRED"
#endif
#define WGMMA_N COLUMNS
#include "common/hopper.cuh"
#include "common/wgmma.cuh"

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

// Of 8 filters of each cell's element, from one to the next; a product may read rows that there are not. Filters as
// they come take the place of what is written last.
constexpr int kFilterRows = (2 * kCellsY - 1) * kSlot, kSpareRows = 64 * kGroups - kRows;
constexpr int kFilterBytes = 16 * (2 * kProducts * kFilterRows + kSpareRows);
constexpr int kRawBytes = round_up(2 * FILTERS * kTaps, 16);

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
