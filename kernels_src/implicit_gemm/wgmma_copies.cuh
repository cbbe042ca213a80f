// Of a convolution as a matrix product on wgmma: the two warps that copy steps of its operands into the ring of stages.
#pragma once

#include "implicit_gemm/wgmma_tiles.cuh"

// This block's share of an item's copies of pixels, step by step: of the rows, for WEIGHTS of the columns.
struct PixelCopies {
  static constexpr int kShares = KIND == WEIGHTS ? CLUSTER_M : CLUSTER_N;
  static constexpr int kPixels = (KIND == WEIGHTS ? kTileK : kPixelColumns ? kTileN : kTileM) / kShares;
  int share, bytes;  // bytes that this block gets a step
  unsigned short blocks;
  int number;  // of the first pixel
  Pixel pixel, stride;
  Depth depth;
  Columns columns[KIND == WEIGHTS ? kColumnBlocks : 1];
  Pixel blocks_first[kPlanesOfPixels ? kColumnBlocks : 1];

  __device__ __forceinline__ PixelCopies(const Shape& shape, const Place& at, const Item& item)
      : share(KIND == WEIGHTS ? at.m : at.n),
        bytes(KIND == WEIGHTS || kPixelColumns ? kColumnBytes : kRowBytes),
        blocks(KIND == WEIGHTS ? same_columns(at) : same_rows(at)),
        number((kPlanesOfDepth    ? item.first
                : KIND == WEIGHTS ? item.first * kTileK
                : kPixelColumns   ? item.tile_n * kTileN
                                  : item.tile_m * kTileM) +
               share * kPixels),
        pixel(pixel_at(shape, number)),
        stride{},
        depth(shape, item) {
    if constexpr (kPlanesOfDepth) {
      stride = {0, 0, 1};
    } else if constexpr (KIND == WEIGHTS) {
      stride = pixel_at(shape, kTileK);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++) {
        columns[block] = columns_at(shape, item.tile_n, block);
        if (!any(shape, columns[block])) bytes -= kColumnBlock;
      }
    } else if constexpr (kPlanesOfPixels) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++)
        blocks_first[block] = pixel_at(shape, item.tile_n * kColumnBlocks + block);
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
    if constexpr (kPlanesOfDepth) {
      tma_load_tiled(stage + kRowBytes, map, barrier, pixel.w * kTileK,
                     item.group * shape.columns + item.tile_n * kTileN, pixel.n);
      return;
    }
    if constexpr (kPlanesOfPixels) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++)
        tma_load_tiled(stage + kRowBytes + block * kColumnBlock, map, barrier, blocks_first[block].w * kWide,
                       item.group * shape.channels + depth.at, blocks_first[block].n);
      return;
    }
    const int w = pixel.w * (STRIDED ? 1 : shape.stride_w) + shape.low_w;
    const int h = pixel.h * (STRIDED ? 1 : shape.stride_h) + shape.low_h;
    if constexpr (KIND == WEIGHTS) {
      const unsigned to = stage + kRowBytes + share * kPixels * kSpanWide;
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++) {
        const Columns& from = columns[block];
        if (!any(shape, from)) break;
        if constexpr (POINTWISE)
          tma_load_tiled<kShares>(to + block * kColumnBlock, map, barrier, from.first, item.group, number, blocks);
        else
          tma_load_im2col<kShares>(to + block * kColumnBlock, map, barrier, item.group * shape.columns + from.first, w,
                                   h, pixel.n, from.tap_x * shape.dilation_w, from.tap_y * shape.dilation_h, blocks);
      }
      return;
    }
    const unsigned to = stage + (kPixelColumns ? kRowBytes : share * kPixels * kSpanDepth);
    if constexpr (POINTWISE) {
      tma_load_tiled<kShares>(to, map, barrier, depth.at, item.group, number, blocks);
    } else {
      const int tap_h = depth.tap_y * shape.dilation_h, tap_w = depth.tap_x * shape.dilation_w;
      tma_load_im2col<kShares>(to, map, barrier, item.group * shape.channels + depth.at, w, h, pixel.n,
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
  int share, bytes, number;
  unsigned short blocks;
  Depth depth;
  Pixel pixel, stride;

  __device__ __forceinline__ BoxCopies(const Shape& shape, const Place& at, const Item& item)
      : share(KIND == WEIGHTS ? at.n : at.m),
        bytes(KIND == WEIGHTS || kPixelColumns ? kRowBytes : kColumnBytes),
        number(item.first * kTileK + share * kLength),
        blocks(KIND == WEIGHTS ? same_rows(at) : same_columns(at)),
        depth(shape, item),
        pixel{},
        stride{0, 0, 1} {
    if constexpr (kPlanesOfDepth) pixel = pixel_at(shape, item.first);
    if constexpr (kPlanesOfRows) {
      pixel = pixel_at(shape, number);
      stride = pixel_at(shape, kTileK);
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (kPlanesOfDepth || kPlanesOfRows)
      pixel = sum(shape, pixel, stride);
    else if constexpr (KIND == WEIGHTS)
      number += kTileK;
    else
      depth.next(shape);
  }

  // Filters from one of the group on, with their depth side by side.
  __device__ __forceinline__ void copy_deep(const Shape& shape, const Item& item, const TensorMap* map, unsigned to,
                                            unsigned barrier, int first) const {
    if constexpr (kTurnedFilter)
      tma_load_tiled<kShares>(to, map, barrier, depth.at, first,
                              item.group * shape.taps_y * shape.taps_x.by + depth.tap, blocks);
    else
      tma_load_tiled<kShares>(to, map, barrier, depth.at, depth.tap,
                              item.group * (kPixelColumns ? shape.rows : shape.columns) + first, blocks);
  }

  __device__ __forceinline__ void begin(const Shape& shape, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
    if constexpr (kPlanesOfDepth || kPlanesOfRows) {
      const int first = kPlanesOfDepth ? pixel.w * kTileK : pixel.h * shape.width.by + pixel.w;
      tma_load_tiled(stage, map, barrier, first, item.group * shape.rows + item.tile_m * kTileM, pixel.n);
    } else if constexpr (KIND == WEIGHTS) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        tma_load_tiled<kShares>(stage + block * kRowBlock + share * kLength * 128, map, barrier,
                                item.tile_m * kTileM + 64 * block, item.group, number, blocks);
    } else if constexpr (kPixelColumns && kDeepFilter) {
      copy_deep(shape, item, map, stage, barrier, item.tile_m * kTileM);
    } else if constexpr (kPixelColumns) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        tma_load_tiled(stage + block * kRowBlock, map, barrier, item.tile_m * kTileM + 64 * block, depth.tap,
                       item.group * shape.channels + depth.at);
    } else if constexpr (kDeepFilter) {
      copy_deep(shape, item, map, stage + kRowBytes + share * kLength * kSpanDepth, barrier,
                item.tile_n * kTileN + share * kLength);
    } else {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++)
        tma_load_tiled<kShares>(stage + kRowBytes + block * kColumnBlock + share * kLength * kSpanWide, map, barrier,
                                item.tile_n * kTileN + block * kWide, depth.tap,
                                item.group * shape.channels + depth.at + share * kLength, blocks);
    }
  }
};

// All threads of the cluster have come here; of what they wrote before, barriers are seen, and if it `Shows`, all.
template <bool Shows = false>
__device__ __forceinline__ void meet() {
  if constexpr (kCluster > 1) {
    cluster_arrive<Shows>();
    cluster_wait();
  } else {
    block_sync();
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
    griddepcontrol_wait();
    int slot = 0;
    unsigned parity = 1;  // the first round finds all stages empty
    while (true) {
      for (int step = item.first; step < item.last; step++) {
        mbarrier_wait(empty + 8 * slot, parity);
        mbarrier_arrive_expect_tx(full + 8 * slot, copies.bytes);
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
    griddepcontrol_launch_dependents();
  }
  __syncwarp();
}
