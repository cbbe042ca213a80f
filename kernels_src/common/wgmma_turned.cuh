// Of kernels_src/implicit_gemm_wgmma_turned.cu, which says what its macros mean: how backward weights are cut into
// tiles and steps, and how steps of both operands are copied into the ring of stages.
#pragma once

#if !defined(TILE_N) || !defined(STAGES) || !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS)
#error "define TILE_N, STAGES, CONSUMERS, ROWS and BLOCKS"
#endif
#if !defined(POINTWISE) || !defined(SHARES) || !defined(TOGETHER)
#error "define POINTWISE, SHARES and TOGETHER"
#endif
#define PRODUCT_COLUMNS TILE_N

#include "common/divisor.cuh"
#include "common/wgmma_registers.cuh"

static_assert(ROWS == 1 || ROWS == 2, "a warp's rows lie in one block of channels");
static_assert(TILE_N % 32 == 0 && ROWS * TILE_N <= 256, "sums stay in registers");

// Blocks of 32 pixels by 32 channels or filters, 128 bytes a pixel and swizzled so; turned, 128 bytes a filter.
constexpr int kWide = 32, kTileK = 32, kSpan = 128, kBlock = kTileK * kSpan;
constexpr int kTileM = 64 * CONSUMERS * ROWS, kRowBlocks = kTileM / kWide, kColumnBlocks = TILE_N / kWide;
constexpr int kRowBytes = kRowBlocks * kBlock, kStageBytes = kRowBytes + kColumnBlocks * kBlock;
constexpr int kThreads = 128 * (CONSUMERS + 1), kSums = TILE_N / 2, kHelpers = 4;
constexpr int kSharePitch = kTileM + 4;  // floats, so that lanes that write shares at once meet all banks
static_assert(SHARES == 1 || STAGES * kStageBytes >= 4 * TILE_N * kSharePitch, "shares take the place of the ring");
static_assert(TILE_N % SHARES == 0, "blocks add as many filters each");

// Of one convolution; filters and channels of one group. A tap has `chunks` blocks of channels.
struct Shape {
  int filters, channels, groups, taps;
  Divisor taps_x, chunks, height, width;
  int stride_h, stride_w, low_h, low_w, dilation_h, dilation_w;
  Divisor tiles_m, tiles_n, splits;
  int steps, items, size;
};

struct Item {
  int tile_m, tile_n, group, split, first, last;
};

// Where a share of a part of the pixels begins.
__device__ __forceinline__ int first_step(const Shape& shape, int split, int share) {
  return shape.steps * (split * SHARES + share) / shape.splits / SHARES;
}

// The rank of a block in its cluster, in a way that shows the compiler that it is the same for all threads.
__device__ __forceinline__ int own_share() {
  return blockIdx.x % SHARES;
}

// The item that a block begins with; the cluster's blocks have the same.
__device__ __forceinline__ int first_item() {
  return blockIdx.x / SHARES;
}

__device__ __forceinline__ int item_after(int number) {
  return number + gridDim.x / SHARES;
}

__device__ __forceinline__ Item item_at(const Shape& shape, int number) {
  const int row = number / shape.tiles_n, part = row / shape.tiles_m;
  Item item;
  item.tile_n = number - row * shape.tiles_n.by;
  item.tile_m = row - part * shape.tiles_m.by;
  item.group = part / shape.splits;
  item.split = part - item.group * shape.splits.by;
  const int share = own_share();
  item.first = first_step(shape, item.split, share);
  item.last = first_step(shape, item.split, share + 1);
  return item;
}

// A block of rows: its tap, and where its channels begin.
struct Rows {
  int tap, first;
};

__device__ __forceinline__ Rows rows_at(const Shape& shape, const Item& item, int block) {
  const int number = item.tile_m * kRowBlocks + block, tap = number / shape.chunks;
  return {tap, (number - tap * shape.chunks.by) * kWide};
}

struct Pixel {
  int n, h, w;
};

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

// Where a role is in the ring of stages.
struct Place {
  int slot = 0;
  unsigned parity;

  __device__ __forceinline__ explicit Place(unsigned first) : parity(first) {}

  __device__ __forceinline__ void next() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Addresses of the stages, and of each one's barriers: x has come, dy has come, dy is turned, all is read.
struct Ring {
  unsigned stages, x_here, y_here, turned, empty;

  __device__ __forceinline__ unsigned stage(const Place& at) const { return stages + at.slot * kStageBytes; }
};

// What a warp copies: of each step every fourth block of rows, and of columns after them. One of its lanes goes through
// the steps of all items.
struct Copier {
  static constexpr int kRows = (kRowBlocks + kHelpers - 1) / kHelpers;
  int warp, number, step, last, group, column, bytes;
  Pixel pixel;
  int first[kRows];  // of each block's channels, negative if it is beyond the last row
  unsigned short tap_h[kRows], tap_w[kRows];
  Place at;

  __device__ __forceinline__ Copier(const Shape& shape, int warp) : warp(warp), number(first_item()), at(1) {
    begin(shape);  // stages are empty in the first round
  }

  __device__ __forceinline__ void begin(const Shape& shape) {
    const Item item = item_at(shape, number);
    step = item.first;
    last = item.last;
    group = item.group;
    column = item.tile_n * TILE_N;
    bytes = min(kRowBlocks, shape.taps * shape.chunks.by - item.tile_m * kRowBlocks) * kBlock;
    if constexpr (!POINTWISE) pixel = pixel_at(shape, step * kTileK);
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const Rows rows = rows_at(shape, item, warp + i * kHelpers);
      const int tap_y = rows.tap / shape.taps_x, tap_x = rows.tap - tap_y * shape.taps_x.by;
      first[i] = rows.tap < shape.taps ? (POINTWISE ? 0 : group * shape.channels) + rows.first : -1;
      tap_h[i] = tap_y * shape.dilation_h;
      tap_w[i] = tap_x * shape.dilation_w;
    }
  }

  // The next step, once its stage is empty; nothing after the last one. Barriers count bytes that come before they are
  // expected, too: who expects arrives, and without that no phase ends.
  __device__ __forceinline__ void copy(const Shape& shape, const TensorMap* x, const TensorMap* y, const Ring& ring) {
    if (number >= shape.items) return;
    const unsigned stage = ring.stage(at), x_here = ring.x_here + 8 * at.slot, y_here = ring.y_here + 8 * at.slot;
    barrier_wait(ring.empty + 8 * at.slot, at.parity);
    if (warp == 0) barrier_expect(x_here, bytes);
    if (warp == kHelpers - 1) barrier_expect(y_here, kColumnBlocks * kBlock);
#pragma unroll
    for (int i = 0; i < kColumnBlocks; i += kHelpers) {
      const int block = i + (warp + kRowBlocks) % kHelpers;
      if (block < kColumnBlocks)
        copy_box(stage + kRowBytes + block * kBlock, y, y_here, column + block * kWide, group, step * kTileK);
    }
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int block = warp + i * kHelpers;
      if (block >= kRowBlocks || first[i] < 0) break;
      if constexpr (POINTWISE)
        copy_box(stage + block * kBlock, x, x_here, first[i], group, step * kTileK);
      else
        copy_pixels(stage + block * kBlock, x, x_here, first[i], pixel.w * shape.stride_w + shape.low_w,
                    pixel.h * shape.stride_h + shape.low_h, pixel.n, tap_w[i], tap_h[i]);
    }
    at.next();
    if constexpr (!POINTWISE) pixel = sum(shape, pixel, pixel_at(shape, kTileK));
    if (++step < last) return;
    number = item_after(number);
    if (number < shape.items) begin(shape);
  }
};
