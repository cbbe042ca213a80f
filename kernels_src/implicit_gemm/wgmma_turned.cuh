// Of kernels_src/implicit_gemm/wgmma_turned.cu, which says what its macros mean: how backward weights are cut into
// tiles and steps, and the two threads that copy steps of both operands into the ring of stages.
#pragma once

#if !defined(TILE_N) || !defined(STAGES) || !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS)
#error "define TILE_N, STAGES, CONSUMERS, ROWS and BLOCKS"
#endif
#if !defined(POINTWISE) || !defined(SHARES) || !defined(TOGETHER)
#error "define POINTWISE, SHARES and TOGETHER"
#endif
#define WGMMA_N TILE_N

#include "common/divisor.cuh"
#include "common/hopper.cuh"
#include "common/wgmma.cuh"

static_assert(ROWS == 1 || ROWS == 2, "a warp's rows lie in one block of channels");
static_assert(TILE_N % 32 == 0 && ROWS * TILE_N <= 256, "sums stay in registers");

// Blocks of 32 pixels by 32 channels or filters, 128 bytes a pixel and swizzled so; turned, 128 bytes a filter.
constexpr int kWide = 32, kTileK = 32, kSpan = 128, kBlock = kTileK * kSpan;
constexpr int kTileM = 64 * CONSUMERS * ROWS, kRowBlocks = kTileM / kWide, kColumnBlocks = TILE_N / kWide;
constexpr int kRowBytes = kRowBlocks * kBlock, kStageBytes = kRowBytes + kColumnBlocks * kBlock;
constexpr int kThreads = 128 * (CONSUMERS + 1), kSums = TILE_N / 2, kTurners = 2;
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

// This item's copies of x, step by step.
struct PixelCopies {
  int number, bytes;
  Pixel pixel, stride;
  int first[kRowBlocks];
  unsigned short tap_h[kRowBlocks], tap_w[kRowBlocks];

  __device__ __forceinline__ PixelCopies(const Shape& shape, const Item& item)
      : number(item.first * kTileK), bytes(kRowBytes), pixel(pixel_at(shape, number)), stride(pixel_at(shape, kTileK)) {
#pragma unroll
    for (int block = 0; block < kRowBlocks; block++) {
      const Rows rows = rows_at(shape, item, block);
      const int tap_y = rows.tap / shape.taps_x, tap_x = rows.tap - tap_y * shape.taps_x.by;
      first[block] = rows.tap < shape.taps ? item.group * (POINTWISE ? 0 : shape.channels) + rows.first : -1;
      tap_h[block] = tap_y * shape.dilation_h;
      tap_w[block] = tap_x * shape.dilation_w;
      if (first[block] < 0) bytes -= kBlock;
    }
  }

  __device__ __forceinline__ void begin(const Shape& shape, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
    const int w = pixel.w * shape.stride_w + shape.low_w, h = pixel.h * shape.stride_h + shape.low_h;
#pragma unroll
    for (int block = 0; block < kRowBlocks; block++) {
      if (first[block] < 0) break;
      if constexpr (POINTWISE)
        tma_load_tiled(stage + block * kBlock, map, barrier, first[block], item.group, number);
      else
        tma_load_im2col(stage + block * kBlock, map, barrier, first[block], w, h, pixel.n, tap_w[block], tap_h[block]);
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    number += kTileK;
    pixel = sum(shape, pixel, stride);
  }
};

// Likewise of dy; what lies beyond its filters or pixels is zero.
struct FilterCopies {
  static constexpr int bytes = kColumnBlocks * kBlock;
  int number;

  __device__ __forceinline__ FilterCopies(const Shape&, const Item& item) : number(item.first * kTileK) {}

  __device__ __forceinline__ void begin(const Shape&, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
#pragma unroll
    for (int block = 0; block < kColumnBlocks; block++)
      tma_load_tiled(stage + kRowBytes + block * kBlock, map, barrier, item.tile_n * TILE_N + block * kWide, item.group,
                     number);
  }

  __device__ __forceinline__ void next(const Shape&) { number += kTileK; }
};

// One thread's work.
template <typename Copies>
__device__ __forceinline__ void produce(const Shape& shape, const TensorMap* map, const Ring& ring, unsigned here) {
  prefetch_tensor_map(map);
  griddepcontrol_wait();
  Place at(1);  // the first round finds all stages empty
  for (int number = first_item(); number < shape.items; number = item_after(number)) {
    const Item item = item_at(shape, number);
    Copies copies(shape, item);
    for (int step = item.first; step < item.last; step++) {
      mbarrier_wait(ring.empty + 8 * at.slot, at.parity);
      mbarrier_arrive_expect_tx(here + 8 * at.slot, copies.bytes);
      copies.begin(shape, item, map, ring.stage(at), here + 8 * at.slot);
      copies.next(shape);
      at.next();
    }
  }
  griddepcontrol_launch_dependents();
}
