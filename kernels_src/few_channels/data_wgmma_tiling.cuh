// Of few_channels/data_wgmma.cu, which says what s2d blocks and entries are: their sizes, and those of the filters.
#pragma once

#include "common/divisor.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(S2D_STRIDES) || !defined(COLUMNS) || !defined(TEAMS)
#error "define STRIDE_Y, STRIDE_X, S2D_STRIDES, COLUMNS and TEAMS"
#endif
#if !defined(STAGES) || !defined(CHANNELS_LAST) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define STAGES, CHANNELS_LAST, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(S2D_OFFSET) || !defined(OUT_VECTOR) || !defined(SHAPE_FIELDS)
#error "define S2D_OFFSET, OUT_VECTOR and SHAPE_FIELDS (DATA_WGMMA_SHAPE of solvers/few_channels/shapes.py)"
#endif
#define WGMMA_N COLUMNS
#include "common/hopper.cuh"
#include "common/wgmma.cuh"

static_assert(STAGES >= 2, "STAGES is at least 2: a row is loaded while another is read");

// Outputs along an axis that meet an s2d block of one stride, S2D_OFFSET columns after where taps begin; columns of dy
// that an s2d block meets, and columns of dx that it has.
constexpr int kTaps = CHANNELS * FILTER_Y * FILTER_X;
constexpr int kS2dY = ceil_div(FILTER_Y, STRIDE_Y), kS2dX = ceil_div(FILTER_X + S2D_OFFSET, STRIDE_X);
constexpr int kShifts = kS2dX + S2D_STRIDES - 1, kS2dColumns = S2D_STRIDES * STRIDE_X;
static_assert(OUT_VECTOR == 1 || kS2dColumns * CHANNELS % 2 == 0,
              "two elements that are stored at once are of one s2d block");
// Rows of the product: of an entry, of all, and 64 of a warpgroup. Steps of 16 filters.
constexpr int kEntryRows = STRIDE_Y * kS2dColumns * CHANNELS, kRows = kS2dY * kEntryRows,
              kWarpgroups = ceil_div(kRows, 64);
constexpr int kKSteps = ceil_div(FILTERS, 16), kOctets = 2 * kKSteps, kInstructions = kShifts * kKSteps;
constexpr int kTeamThreads = 128 * kWarpgroups, kThreads = TEAMS * kTeamThreads;

// Of 8 filters of each s2d block's element, from one to the next; a product may read rows that there are not. Filters
// as they come take the place of what is written last.
constexpr int kFilterRows = (2 * kS2dY - 1) * kEntryRows, kSpareRows = 64 * kWarpgroups - kRows;
constexpr int kFilterBytes = 16 * (2 * kInstructions * kFilterRows + kSpareRows);
constexpr int kRawBytes = round_up(2 * FILTERS * kTaps, 16);

// An element of an s2d block, as the tensor has them side by side.
struct Pixel {
  int y, x, c;

  __device__ __forceinline__ explicit Pixel(int number)
      : y(number / (kS2dColumns * CHANNELS)),
        x(CHANNELS_LAST ? number / CHANNELS % kS2dColumns : number % kS2dColumns),
        c(CHANNELS_LAST ? number % CHANNELS : number / kS2dColumns % CHANNELS) {}
};

// What a team computes: of `image`, s2d blocks from `s2d` on.
struct Strip {
  int image, s2d;
};

// S2d blocks begin `s2d_top` rows and `s2d_left` columns before dx, and the last column of dy that an s2d block I meets
// is (I + 1) * S2D_STRIDES - 1 - columns_ahead. The pixels are in rows of s2d blocks from `first_row` to before
// `end_row`, in columns from `first_s2d` on. A strip has `strip_rows` rows of them, which meet `strip_steps` rows of
// dy; there are `strips` strips of all images, `image_strips` of one, and `s2d_tiles` tiles of a row.
struct Shape {
  SHAPE_FIELDS
};
