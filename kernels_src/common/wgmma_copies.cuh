// Of a convolution as a matrix product on wgmma: the two warps that copy steps of its operands into the ring of stages.
#pragma once

#include "common/wgmma_tiles.cuh"

// This block's share of an item's copies of pixels, step by step: of the rows, for WEIGHTS of the columns.
struct PixelCopies {
  static constexpr int kShares = KIND == WEIGHTS ? CLUSTER_M : CLUSTER_N;
  static constexpr int kPixels = (KIND == WEIGHTS ? kTileK : SWAPPED ? kTileN : kTileM) / kShares;
  int share, bytes;  // bytes that this block gets a step
  unsigned short blocks;
  int number;  // of the first pixel
  Pixel pixel, stride;
  Depth depth;
  Columns columns[KIND == WEIGHTS ? kColumnBlocks : 1];

  __device__ __forceinline__ PixelCopies(const Shape& shape, const Place& at, const Item& item)
      : share(KIND == WEIGHTS ? at.m : at.n),
        bytes(KIND == WEIGHTS || SWAPPED ? kColumnBytes : kRowBytes),
        blocks(KIND == WEIGHTS ? same_columns(at) : same_rows(at)),
        number((KIND == WEIGHTS ? item.first * kTileK
                : SWAPPED       ? item.tile_n * kTileN
                                : item.tile_m * kTileM) +
               share * kPixels),
        pixel(pixel_at(shape, number)),
        stride{},
        depth(shape, item) {
    if constexpr (KIND == WEIGHTS) {
      stride = pixel_at(shape, kTileK);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++) {
        columns[block] = columns_at(shape, item.tile_n, block);
        if (!any(shape, columns[block])) bytes -= kColumnBlock;
      }
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (KIND == WEIGHTS) {
      number += kTileK;
      pixel = sum(shape, pixel, stride);
    } else {
      depth.next(shape);
    }
  }

  __device__ __forceinline__ void begin(const Shape& shape, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
    const int w = pixel.w * (STRIDED ? 1 : shape.stride_w) + shape.low_w;
    const int h = pixel.h * (STRIDED ? 1 : shape.stride_h) + shape.low_h;
    if constexpr (KIND == WEIGHTS) {
      const unsigned to = stage + kRowBytes + share * kPixels * kSpanWide;
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++) {
        const Columns& from = columns[block];
        if (!any(shape, from)) break;
        if constexpr (POINTWISE)
          copy_box<kShares>(to + block * kColumnBlock, map, barrier, from.first, item.group, number, blocks);
        else
          copy_pixels<kShares>(to + block * kColumnBlock, map, barrier, item.group * shape.columns + from.first, w, h,
                               pixel.n, from.tap_x * shape.dilation_w, from.tap_y * shape.dilation_h, blocks);
      }
      return;
    }
    const unsigned to = stage + (SWAPPED ? kRowBytes : share * kPixels * kSpanDepth);
    if constexpr (POINTWISE) {
      copy_box<kShares>(to, map, barrier, depth.at, item.group, number, blocks);
    } else {
      const int tap_h = depth.tap_y * shape.dilation_h, tap_w = depth.tap_x * shape.dilation_w;
      copy_pixels<kShares>(to, map, barrier, item.group * shape.channels + depth.at, w, h, pixel.n,
                           KIND == DATA ? depth.phase.w.offset - tap_w : tap_w,
                           KIND == DATA ? depth.phase.h.offset - tap_h : tap_h, blocks);
    }
  }
};

// Likewise its copies of boxes: of the columns, for WEIGHTS of the rows.
struct BoxCopies {
  static constexpr int kShares = KIND == WEIGHTS ? CLUSTER_N : CLUSTER_M;
  static constexpr int kLength = (kDeepFilter ? kTileN : kTileK) / kShares;
  static_assert(kLength % 8 == 0, "shares are whole repetitions of a swizzle");
  int share, bytes, pixel;
  unsigned short blocks;
  Depth depth;

  __device__ __forceinline__ BoxCopies(const Shape& shape, const Place& at, const Item& item)
      : share(KIND == WEIGHTS ? at.n : at.m),
        bytes(KIND == WEIGHTS || SWAPPED ? kRowBytes : kColumnBytes),
        pixel(item.first * kTileK + share * kLength),
        blocks(KIND == WEIGHTS ? same_rows(at) : same_columns(at)),
        depth(shape, item) {}

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (KIND == WEIGHTS)
      pixel += kTileK;
    else
      depth.next(shape);
  }

  __device__ __forceinline__ void begin(const Shape& shape, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
    if constexpr (KIND == WEIGHTS) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        copy_box<kShares>(stage + block * kRowBlock + share * kLength * 128, map, barrier,
                          item.tile_m * kTileM + 64 * block, item.group, pixel, blocks);
    } else if constexpr (SWAPPED && kDeepFilter) {
      copy_box(stage, map, barrier, depth.at, depth.tap, item.group * shape.rows + item.tile_m * kTileM);
    } else if constexpr (SWAPPED) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        copy_box(stage + block * kRowBlock, map, barrier, item.tile_m * kTileM + 64 * block, depth.tap,
                 item.group * shape.channels + depth.at);
    } else if constexpr (kDeepFilter) {
      copy_box<kShares>(stage + kRowBytes + share * kLength * kSpanDepth, map, barrier, depth.at, depth.tap,
                        item.group * shape.columns + item.tile_n * kTileN + share * kLength, blocks);
    } else {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++)
        copy_box<kShares>(stage + kRowBytes + block * kColumnBlock + share * kLength * kSpanWide, map, barrier,
                          item.tile_n * kTileN + block * kWide, depth.tap,
                          item.group * shape.channels + depth.at + share * kLength, blocks);
    }
  }
};

// All blocks of the cluster have come here; what they wrote to shared memory before is seen.
__device__ __forceinline__ void meet() {
  if constexpr (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    block_barrier();
  }
}

template <typename Copies>
__device__ __forceinline__ void produce(const Shape& shape, const TensorMap* map, unsigned stages, unsigned full,
                                        unsigned empty) {
  const Place at = place();
  int number = blockIdx.x / kCluster;
  Item item = item_at(shape, at, number);
  Copies copies(shape, at, item);
  meet();  // barriers are ready
  if (threadIdx.x % 32 == 0) {
    int slot = 0;
    unsigned parity = 1;  // the first round finds all stages empty
    while (true) {
      for (int step = item.first; step < item.last; step++) {
        barrier_wait(empty + 8 * slot, parity);
        barrier_expect(full + 8 * slot, copies.bytes);
        copies.begin(shape, item, map, stages + slot * kStageBytes, full + 8 * slot);
        copies.next(shape);
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      }
      number = item_after(number);
      if (number >= shape.items) break;
      item = item_at(shape, at, number);
      copies = Copies(shape, at, item);
    }
  }
  __syncwarp();
}
