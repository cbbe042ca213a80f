// Of kernels_src/implicit_gemm/wgmma_transposed.cu, which says what its defines mean: how backward weights are cut into
// tiles and k-tiles, and the two producer threads that load both operands into the pipeline.
#pragma once

#if !defined(TILE_N) || !defined(STAGES) || !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS)
#error "define TILE_N, STAGES, CONSUMERS, ROWS and BLOCKS"
#endif
#if !defined(POINTWISE) || !defined(CLUSTER_K) || !defined(K_BATCH)
#error "define POINTWISE, CLUSTER_K and K_BATCH"
#endif
#ifndef SHAPE_FIELDS
#error "define SHAPE_FIELDS"
#endif
#define WGMMA_N TILE_N

#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#include "implicit_gemm/tile_scheduler.cuh"

static_assert(ROWS == 1 || ROWS == 2, "the rows of a warp lie in one block of 32 channels");
static_assert(TILE_N % 32 == 0 && ROWS * TILE_N <= 256, "accumulators stay in registers");

// Boxes of 32 pixels by 32 channels or filters: 128 bytes a pixel, swizzled over 128; transposed, 128 bytes a filter.
constexpr int kBlock = 32, kTileK = 32, kSwizzle = 128, kBlockBytes = kTileK * kSwizzle;
constexpr int kTileM = 64 * CONSUMERS * ROWS, kMBlocks = kTileM / kBlock, kNBlocks = TILE_N / kBlock;
constexpr int kABytes = kMBlocks * kBlockBytes, kStageBytes = kABytes + kNBlocks * kBlockBytes;
constexpr int kThreads = 128 * (CONSUMERS + 1), kAccumulators = TILE_N / 2, kTransposeWarps = 2;
constexpr int kPartialPitch = kTileM + 4;  // floats, so that lanes that write partials together meet all banks
static_assert(CLUSTER_K == 1 || STAGES * kStageBytes >= 4 * TILE_N * kPartialPitch,
              "partials of a cluster fit where the pipeline was");
static_assert(TILE_N % CLUSTER_K == 0, "the blocks of a cluster add as many filters each");

// One convolution; filters (N) and channels are of one group. M is taps, `taps_x` a row, of `tap_blocks` blocks of
// channels each. The output, and each split-K partial, has `out_size` elements.
struct Shape {
  SHAPE_FIELDS
};

// The first k-tile of a cluster's block's share of a split.
__device__ __forceinline__ int first_k_tile(const Shape& shape, int split, int rank) {
  return shape.grid.k_tiles * (split * CLUSTER_K + rank) / shape.grid.splits / CLUSTER_K;
}

// The rank of a block in its cluster, in a way that shows the compiler that it is the same for all threads.
__device__ __forceinline__ int uniform_cluster_rank() {
  return blockIdx.x % CLUSTER_K;
}

__device__ __forceinline__ WorkTile work_tile_at(const Shape& shape, int number) {
  const int row = number / shape.grid.tiles_n, rest = row / shape.grid.tiles_m;
  WorkTile tile;
  tile.tile_n = number - row * shape.grid.tiles_n.by;
  tile.tile_m = row - rest * shape.grid.tiles_m.by;
  tile.group = rest / shape.grid.splits;
  tile.split = rest - tile.group * shape.grid.splits.by;
  const int rank = uniform_cluster_rank();
  tile.first_k_tile = first_k_tile(shape, tile.split, rank);
  tile.end_k_tile = first_k_tile(shape, tile.split, rank + 1);
  return tile;
}

// A block of rows: its tap, and its first channel.
struct MBlock {
  int tap, first;
};

__device__ __forceinline__ MBlock m_block_at(const Shape& shape, const WorkTile& tile, int number_in_tile) {
  const int number = tile.tile_m * kMBlocks + number_in_tile, tap = number / shape.tap_blocks;
  return {tap, (number - tap * shape.tap_blocks.by) * kBlock};
}

// Where a role is in the pipeline: the stage, and the parity of the mbarrier's phase that it waits for. A consumer
// begins with parity 0, a producer with 1: in its first round all stages are empty.
struct PipelineState {
  int stage = 0;
  unsigned parity;

  __device__ __forceinline__ explicit PipelineState(unsigned first_parity) : parity(first_parity) {}

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Addresses of the stages, and of the mbarriers of each: x has come, dy has come, dy is transposed, both are read.
struct Pipeline {
  unsigned stages, x_full, y_full, transposed, empty;

  __device__ __forceinline__ unsigned stage(const PipelineState& at) const { return stages + at.stage * kStageBytes; }
};

// A work tile's loads of x, k-tile by k-tile.
struct PixelLoads {
  int index, bytes;
  Pixel pixel, stride;
  int first[kMBlocks];
  unsigned short tap_h[kMBlocks], tap_w[kMBlocks];

  __device__ __forceinline__ PixelLoads(const Shape& shape, const WorkTile& tile)
      : index(tile.first_k_tile * kTileK),
        bytes(kABytes),
        pixel(pixel_at(shape.walk, index)),
        stride(pixel_at(shape.walk, kTileK)) {
#pragma unroll
    for (int block = 0; block < kMBlocks; block++) {
      const MBlock rows = m_block_at(shape, tile, block);
      const int tap_y = rows.tap / shape.taps_x, tap_x = rows.tap - tap_y * shape.taps_x.by;
      first[block] = rows.tap < shape.taps ? tile.group * (POINTWISE ? 0 : shape.channels) + rows.first : -1;
      tap_h[block] = tap_y * shape.walk.dilation_h;
      tap_w[block] = tap_x * shape.walk.dilation_w;
      if (first[block] < 0) bytes -= kBlockBytes;
    }
  }

  __device__ __forceinline__ void load(const Shape& shape, const WorkTile& tile, const TensorMap* map, unsigned stage,
                                       unsigned barrier) const {
    const int w = pixel.w * shape.walk.stride_w + shape.walk.low_w,
              h = pixel.h * shape.walk.stride_h + shape.walk.low_h;
#pragma unroll
    for (int block = 0; block < kMBlocks; block++) {
      if (first[block] < 0) break;
      if constexpr (POINTWISE)
        tma_load_tiled(stage + block * kBlockBytes, map, barrier, first[block], tile.group, index);
      else
        tma_load_im2col(stage + block * kBlockBytes, map, barrier, first[block], w, h, pixel.n, tap_w[block],
                        tap_h[block]);
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    index += kTileK;
    pixel = sum(shape.walk, pixel, stride);
  }
};

// The same of dy; what lies beyond its filters or pixels is zero.
struct FilterLoads {
  static constexpr int bytes = kNBlocks * kBlockBytes;
  int index;

  __device__ __forceinline__ FilterLoads(const Shape&, const WorkTile& tile) : index(tile.first_k_tile * kTileK) {}

  __device__ __forceinline__ void load(const Shape&, const WorkTile& tile, const TensorMap* map, unsigned stage,
                                       unsigned barrier) const {
#pragma unroll
    for (int block = 0; block < kNBlocks; block++)
      tma_load_tiled(stage + kABytes + block * kBlockBytes, map, barrier, tile.tile_n * TILE_N + block * kBlock,
                     tile.group, index);
  }

  __device__ __forceinline__ void next(const Shape&) { index += kTileK; }
};

// One thread's work.
template <typename Loads>
__device__ __forceinline__ void produce(const Shape& shape, const TensorMap* map, const Pipeline& pipeline,
                                        unsigned full) {
  prefetch_tensor_map(map);
  griddepcontrol_wait();
  PipelineState at(1);
  for (int rank = first_work_tile<CLUSTER_K>(); rank < shape.grid.work_tiles; rank = next_work_tile<CLUSTER_K>(rank)) {
    const WorkTile tile = work_tile_at(shape, rank);
    Loads loads(shape, tile);
    for (int k_tile = tile.first_k_tile; k_tile < tile.end_k_tile; k_tile++) {
      mbarrier_wait(pipeline.empty + 8 * at.stage, at.parity);
      mbarrier_arrive_expect_tx(full + 8 * at.stage, loads.bytes);
      loads.load(shape, tile, map, pipeline.stage(at), full + 8 * at.stage);
      loads.next(shape);
      at.next();
    }
  }
  griddepcontrol_launch_dependents();
}
