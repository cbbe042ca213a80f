// Of a convolution as a matrix product on wgmma: how it is cut into tiles and steps, and where each part of it lies.
// kernels_src/implicit_gemm/wgmma.cu says what its macros mean.
#pragma once

#if !defined(ELEMENT) || !defined(KIND) || !defined(TILE_N) || !defined(TILE_K) || !defined(STAGES)
#error "define ELEMENT, KIND, TILE_N, TILE_K and STAGES"
#endif
#if !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS) || !defined(WIDE)
#error "define CONSUMERS, ROWS, BLOCKS and WIDE"
#endif
#if !defined(CLUSTER_M) || !defined(CLUSTER_N) || !defined(CLUSTER_K)
#error "define CLUSTER_M, CLUSTER_N and CLUSTER_K"
#endif
#if !defined(POINTWISE) || !defined(SWAPPED) || !defined(PLANES) || !defined(RUN)
#error "define POINTWISE, SWAPPED, PLANES and RUN"
#endif
#ifndef STRIDED
#error "define STRIDED"
#endif
#define WGMMA_N TILE_N

#include "common/divisor.cuh"
#include "common/hopper.cuh"
#include "common/wgmma.cuh"

enum Kind { FORWARD, DATA, WEIGHTS };
enum Planes { NOWHERE, IN_RESULT, IN_ROWS, EVERYWHERE };

constexpr int kBlocks = CONSUMERS * ROWS, kTileM = 64 * kBlocks, kTileN = TILE_N, kTileK = TILE_K;
constexpr int kCluster = CLUSTER_M * CLUSTER_N * CLUSTER_K;
static_assert(CLUSTER_K == 1 || CLUSTER_M * CLUSTER_N == 1, "blocks share what they copy, or what they add");
constexpr int kThreads = 128 * CONSUMERS + 64;
constexpr int kSums = TILE_N / 2;
constexpr int kElement = sizeof(ELEMENT);
// Whether the depth lies side by side in the filter, in the rows' operand and in the columns'. TF32 backward data takes
// a filter that has been turned, for each group from k x (tap, c) to (tap, c) x k.
constexpr bool kTurnedFilter = KIND == DATA && kElement == 4, kDeepFilter = KIND == FORWARD || kTurnedFilter;
constexpr bool kPixelColumns = KIND != WEIGHTS && (SWAPPED || PLANES != NOWHERE);
constexpr bool kPlanesOfPixels = KIND != WEIGHTS && PLANES == EVERYWHERE;
constexpr bool kPlanesOfDepth = KIND == WEIGHTS && PLANES == EVERYWHERE, kPlanesOfRows = PLANES == IN_ROWS;
constexpr bool kDeepRows = kPixelColumns ? kDeepFilter : KIND != WEIGHTS || PLANES;
constexpr bool kDeepColumns = kPixelColumns ? !kPlanesOfPixels : kDeepFilter || kPlanesOfDepth;
static_assert(!SWAPPED || (KIND != WEIGHTS && kElement == 2 && ROWS == 1 && kCluster == 1), "swaps what it can");
static_assert(PLANES == NOWHERE || (!SWAPPED && !STRIDED && CLUSTER_M * CLUSTER_N == 1), "planes stay as they are");
static_assert(PLANES != EVERYWHERE || POINTWISE, "planes of pixels come as boxes");
static_assert(KIND != WEIGHTS || PLANES != IN_RESULT, "filters have no planes");
static_assert(KIND == WEIGHTS || PLANES != IN_ROWS, "rows of pixels are no planes");
static_assert(!STRIDED || (KIND == DATA && !SWAPPED && !POINTWISE && CLUSTER_M * CLUSTER_N == 1),
              "strides what it can");

// A span is what swizzling covers: the depth of a step, 64 rows, or a block of columns.
constexpr int kSpanDepth = kElement * kTileK;
constexpr int kWide = WIDE, kColumnBlocks = kTileN / kWide;
constexpr int kSpanWide = kElement * kWide;
static_assert(kTileN % kWide == 0, "tiles have whole blocks of columns");
static_assert(kSpanWide == 128 || kSpanWide == 64 || kSpanWide == 32, "swizzles span 32 to 128");
static_assert(kSpanDepth == 128 || (KIND != WEIGHTS && (kSpanDepth == 64 || kSpanDepth == 32)), "swizzles span so");
static_assert(ROWS * kSums <= 192, "sums stay in registers");

constexpr int kRowBytes = kElement * kTileM * kTileK, kColumnBytes = kElement * kTileN * kTileK;
constexpr int kStageBytes = kRowBytes + kColumnBytes, kColumnBlock = kWide * kElement * kTileK;
static_assert(kRowBytes % 1024 == 0 && kColumnBytes % 1024 == 0, "operands begin where swizzles do");
// Sums are written in blocks of 64 rows and kWide columns; swapped, of 64 pixels and filters.
constexpr int kOutSpan = SWAPPED ? 128 : kSpanWide, kOutBlock = 64 * kOutSpan, kOutColumns = SWAPPED ? 64 : kWide;
static_assert(!SWAPPED || kTileN % 64 == 0, "swapped tiles have whole blocks of pixels");

// Depth side by side: rows of one span, 8 of them a repetition. Else: a repetition is 8 terms of kWide or 64.
constexpr unsigned long long kRowForm =
    kDeepRows ? matrix_descriptor(16, 8 * kSpanDepth, kSpanDepth) : matrix_descriptor(kTileK * 128, 1024, 128);
constexpr unsigned long long kColumnForm = kDeepColumns ? matrix_descriptor(16, 8 * kSpanDepth, kSpanDepth)
                                                        : matrix_descriptor(kColumnBlock, 8 * kSpanWide, kSpanWide);
// Bytes from one product's terms to the next's, and from one block of 64 rows to the next.
constexpr int kRowStep = kDeepRows ? 32 : 16 * 128;
constexpr int kColumnStep = kDeepColumns ? 32 : 16 * kSpanWide;
constexpr int kRowBlock = 64 * kElement * kTileK;

// Of one convolution; sizes of one group, `columns` for WEIGHTS of one tap. `steps` are of a tile's depth: without
// WEIGHTS `chunks` a tap, which meet `channels` in all; with it a tap has `chunks` blocks of columns. Copies of pixels
// walk images of `height` x `width`, from `low` on; taps step by `dilation`. Planes of pixels or depth are walked as
// one row of `width` blocks or steps; a result's have `image` elements.
struct Shape {
  int rows, columns, groups, taps_y;
  Divisor taps_x, chunks;
  int channels;
  Divisor height, width;
  int stride_h, stride_w, low_h, low_w, dilation_h, dilation_w, image;
  Divisor tiles_m, tiles_n;  // in clusters
  int steps;
  Divisor splits;
  int items;
  int size;                                        // of the result, or of a part
  int all_h, all_w;                                // rows and columns of an image of dx
  int tap_step_h, tap_step_w;                      // between two taps of a phase
  int first_h, other_h, first_w, other_w, phases;  // packed
};

// Along one axis, pixels of dx `at` more than a multiple of the stride: they meet `taps` of the filter from `first` on,
// and the first one's pixels of dy `offset` from where the copies' walk is, the others' before.
struct Residue {
  int at, first, taps, offset;

  __device__ __forceinline__ Residue(int packed)
      : at(packed & 1), first(packed >> 1 & 1), taps(packed >> 2 & 511), offset(packed >> 11) {}
};

// Pixels of dx that meet the same taps, STRIDED 2 or 4 phases of them, from those that meet most to those that meet
// none. `phases` has two bits for each, from bit 8 on two for its shares, then how many meet any tap and how many are.
struct Phase {
  Residue h, w;

  __device__ __forceinline__ Phase(const Shape& shape, int number)
      : h(STRIDED && shape.phases >> 2 * number & 2 ? shape.other_h : shape.first_h),
        w(STRIDED && shape.phases >> 2 * number & 1 ? shape.other_w : shape.first_w) {}
};

// Blocks of a cluster that share a phase's tile, as a power of 2: so many that each has as many steps.
constexpr int kSharesPower = CLUSTER_K == 8 ? 3 : CLUSTER_K == 4 ? 2 : CLUSTER_K == 2 ? 1 : 0;
static_assert(1 << kSharesPower == CLUSTER_K, "shares are a power of 2");

__device__ __forceinline__ int shares_power(const Shape& shape, int phase) {
  return STRIDED ? shape.phases >> (8 + 2 * phase) & 3 : kSharesPower;
}

__device__ __forceinline__ int phases_with_taps(const Shape& shape) {
  return shape.phases >> 16 & 7;
}

__device__ __forceinline__ int all_phases(const Shape& shape) {
  return shape.phases >> 19;
}

// The place of a block in its cluster: along rows, columns and depth.
struct Place {
  int m, n, k;
};

__device__ __forceinline__ Place place() {
  const int rank = kCluster > 1 ? cluster_rank() : 0;
  if constexpr (CLUSTER_K > 1) return {0, 0, rank};
  return {rank / CLUSTER_N, rank % CLUSTER_N, 0};
}

// Blocks of a cluster, one bit each: those with the same rows, and those with the same columns.
__device__ __forceinline__ unsigned short same_rows(const Place& at) {
  return ((1 << CLUSTER_N) - 1) << at.m * CLUSTER_N;
}

__device__ __forceinline__ unsigned short same_columns(const Place& at) {
  unsigned short blocks = 0;
#pragma unroll
  for (int m = 0; m < CLUSTER_M; m++) blocks |= 1 << (m * CLUSTER_N + at.n);
  return blocks;
}

struct Item {
  int tile_m, tile_n, group, split, first, last, phase;
};

// A block of a tile's columns: where its columns begin, and for WEIGHTS their tap.
struct Columns {
  int first, tap, tap_y, tap_x;
};

__device__ __forceinline__ bool any(const Shape& shape, const Columns& columns) {
  return KIND == WEIGHTS ? columns.tap_y < shape.taps_y : columns.first < shape.columns;
}

__device__ __forceinline__ Columns columns_at(const Shape& shape, int tile_n, int block) {
  const int number = tile_n * kColumnBlocks + block;
  Columns columns{};
  if constexpr (KIND == WEIGHTS) {
    columns.tap = number / shape.chunks;
    columns.first = (number - columns.tap * shape.chunks.by) * kWide;
    columns.tap_y = columns.tap / shape.taps_x;
    columns.tap_x = columns.tap - columns.tap_y * shape.taps_x.by;
  } else {
    columns.first = number * kWide;
  }
  return columns;
}

__device__ __forceinline__ Item item_at(const Shape& shape, const Place& at, int number) {
  Item item;
  item.phase = 0;
  if constexpr (STRIDED) {
    const int tiles = shape.tiles_n.by * shape.tiles_m.by * shape.groups * (CLUSTER_K > 1 ? 1 : shape.splits.by);
    int apart = kSharesPower - shares_power(shape, 0);  // tiles of a cluster, as a power of 2
    for (int items; number >= (items = (tiles + (1 << apart) - 1) >> apart); number -= items)
      apart = kSharesPower - shares_power(shape, ++item.phase);
    number = (number << apart) + (at.k >> (kSharesPower - apart));
  }
  const int row = number / shape.tiles_n, part = row / shape.tiles_m;
  item.tile_n = (number - row * shape.tiles_n.by) * CLUSTER_N + at.n;
  item.tile_m = (row - part * shape.tiles_m.by) * CLUSTER_M + at.m;
  item.group = CLUSTER_K > 1 ? part : part / shape.splits;
  item.split = CLUSTER_K > 1 ? at.k : part - item.group * shape.splits.by;
  int steps = shape.steps;
  if constexpr (STRIDED) {
    const Phase phase(shape, item.phase);
    steps = phase.h.taps * phase.w.taps * shape.chunks.by;
    if constexpr (CLUSTER_K > 1) {
      const int power = shares_power(shape, item.phase);
      item.split &= (1 << power) - 1;
      item.first = steps * item.split >> power;
      item.last = item.group < shape.groups ? steps * (item.split + 1) >> power : item.first;
      return item;
    }
  }
  item.first = steps * item.split / shape.splits;
  item.last = steps * (item.split + 1) / shape.splits;
  return item;
}

// The item that a block takes after one. STRIDED, all rounds but the first run backwards: who had most gets least.
__device__ __forceinline__ int item_after(int number) {
  const int clusters = gridDim.x / kCluster;
  return STRIDED && number < clusters ? 2 * clusters - 1 - number : number + clusters;
}

struct Pixel {
  int n, h, w;
};

// The pixel of that number, counted in images of the shape's height and width.
__device__ __forceinline__ Pixel pixel_at(const Shape& shape, int number) {
  const int row = number / shape.width, n = row / shape.height;
  return {n, row - n * shape.height.by, number - row * shape.width.by};
}

__device__ __forceinline__ Pixel sum(const Shape& shape, Pixel a, const Pixel& b) {
  a.w += b.w;
  a.h += b.h;
  a.n += b.n;
  if (a.w >= shape.width.by) {
    a.w -= shape.width.by;
    a.h++;
  }
  if (a.h >= shape.height.by) {
    a.h -= shape.height.by;
    a.n++;
  }
  return a;
}

// The line of dx that a phase's pixel is, or -1.
__device__ __forceinline__ int pixel_line(const Shape& shape, const Phase& phase, const Pixel& pixel) {
  const int h = pixel.h * shape.stride_h + phase.h.at, w = pixel.w * shape.stride_w + phase.w.at;
  return h < shape.all_h && w < shape.all_w ? (pixel.n * shape.all_h + h) * shape.all_w + w : -1;
}

// The line of the result that a row of the item is, or -1; for WEIGHTS the row of its group.
__device__ __forceinline__ int row_line(const Shape& shape, const Item& item, int row) {
  if (row >= shape.rows) return -1;
  if constexpr (!STRIDED) return row;
  return pixel_line(shape, Phase(shape, item.phase), pixel_at(shape, row));
}

// The channel and the tap of a step, without WEIGHTS; tap_y and tap_x count those of the item's phase.
struct Depth {
  Phase phase;
  int at, tap, tap_y, tap_x;

  __device__ __forceinline__ Depth(const Shape& shape, const Item& item) : phase(shape, item.phase) {
    tap = item.first / shape.chunks;
    at = (item.first - tap * shape.chunks.by) * kTileK;
    if constexpr (STRIDED) {
      tap_y = 0;
      for (tap_x = tap; tap_x >= phase.w.taps; tap_x -= phase.w.taps) tap_y++;
      tap = strided_tap(shape);
    } else {
      tap_y = tap / shape.taps_x;
      tap_x = tap - tap_y * shape.taps_x.by;
    }
  }

  // The number in the filter of a phase's tap.
  __device__ __forceinline__ int strided_tap(const Shape& shape) const {
    return (phase.h.first + tap_y * shape.tap_step_h) * shape.taps_x.by + phase.w.first + tap_x * shape.tap_step_w;
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    at += kTileK;
    if (at < shape.chunks.by * kTileK) return;
    at = 0;
    tap++;
    if (++tap_x == (STRIDED ? phase.w.taps : shape.taps_x.by)) {
      tap_x = 0;
      tap_y++;
    }
    if constexpr (STRIDED) tap = strided_tap(shape);
  }
};
