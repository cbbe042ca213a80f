// Of kernels_src/implicit_gemm/wgmma.cu: the two producer warps, which load k-tiles of A and B into the pipeline.
#pragma once

#include "implicit_gemm/wgmma_tiling.cuh"

#ifdef VARIANT_VOLUME
// Loads the pixels of volumes that a tap of the filter, or of a phase's sub-filter, meets, from the one at (`w`, `h`)
// of a plane on.
template <int kMulticast>
__device__ __forceinline__ void load_volume(const Shape& shape, const Phase& phase, unsigned to, const TensorMap* map,
                                            unsigned barrier, int channel, int w, int h, int plane, int tap_x,
                                            int tap_row, unsigned short cta_mask) {
  const Volume& volume = shape.volume;
  const int n = plane / volume.depth, z = plane - n * volume.depth.by;
  const int d = z * (STRIDED ? 1 : volume.stride_d) + volume.low_d;
  const int tap_z = STRIDED ? tap_row / phase.h.taps : tap_row / volume.plane_taps_y;
  const int tap_y = tap_row - tap_z * (STRIDED ? phase.h.taps : volume.plane_taps_y.by);
  int tap_w = tap_x * shape.walk.dilation_w, tap_h = tap_y * shape.walk.dilation_h, tap_d = tap_z * volume.dilation_d;
  if constexpr (KIND == DATA) {
    tap_w = phase.w.offset - tap_w;
    tap_h = phase.h.offset - tap_h;
    tap_d = phase.d.offset - tap_d;
  }
  tma_load_im2col<kMulticast>(to, map, barrier, channel, w, h, d, n, tap_w, tap_h, tap_d, cta_mask);
}
#endif

// This block's part of a work tile's loads of pixels, k-tile by k-tile: of A, of B for WEIGHTS or where pixels are N.
struct PixelLoads {
  static constexpr int kMulticast = KIND == WEIGHTS ? CLUSTER_M : CLUSTER_N;
  static constexpr int kPixels = (KIND == WEIGHTS ? kTileK : kPixelsAreN ? kTileN : kTileM) / kMulticast;
  int slice;  // of kMulticast, the one that this block loads
  int bytes;  // that arrive at this block a k-tile
  unsigned short cta_mask;
  int index;  // of the first pixel
  Pixel pixel, stride;
  KTileIterator k_tile;
  NBlock n_blocks[KIND == WEIGHTS ? kNBlocks : 1];
  Pixel nchw_blocks[kNchwN ? kNBlocks : 1];

  __device__ __forceinline__ PixelLoads(const Shape& shape, const ClusterCoord& at, const WorkTile& tile)
      : slice(KIND == WEIGHTS ? at.m : at.n),
        bytes(KIND == WEIGHTS || kPixelsAreN ? kBBytes : kABytes),
        cta_mask(KIND == WEIGHTS ? same_b_mask(at) : same_a_mask(at)),
        index((kNchwBothK        ? tile.first_k_tile
               : KIND == WEIGHTS ? tile.first_k_tile * kTileK
               : kPixelsAreN     ? tile.tile_n * kTileN
                                 : tile.tile_m * kTileM) +
              slice * kPixels),
        pixel(pixel_at(shape.walk, index)),
        stride{},
        k_tile(shape, tile) {
    if constexpr (kNchwBothK) {
      stride = {0, 0, 1};
    } else if constexpr (KIND == WEIGHTS) {
      stride = pixel_at(shape.walk, kTileK);
#pragma unroll
      for (int block = 0; block < kNBlocks; block++) {
        n_blocks[block] = n_block_at(shape, tile.tile_n, block);
        if (!is_inside(shape, n_blocks[block])) bytes -= kNBlockBytes;
      }
    } else if constexpr (kNchwN) {
#pragma unroll
      for (int block = 0; block < kNBlocks; block++)
        nchw_blocks[block] = pixel_at(shape.walk, tile.tile_n * kNBlocks + block);
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (KIND == WEIGHTS) {
      index += kTileK;
      pixel = sum(shape.walk, pixel, stride);
    } else {
      k_tile.next(shape);
    }
  }

  __device__ __forceinline__ void load(const Shape& shape, const WorkTile& tile, const TensorMap* map, unsigned stage,
                                       unsigned barrier) const {
    if constexpr (kNchwBothK) {
      tma_load_tiled(stage + kABytes, map, barrier, pixel.w * kTileK, tile.group * shape.size_n + tile.tile_n * kTileN,
                     pixel.n);
      return;
    }
    if constexpr (kNchwN) {
#pragma unroll
      for (int block = 0; block < kNBlocks; block++)
        tma_load_tiled(stage + kABytes + block * kNBlockBytes, map, barrier, nchw_blocks[block].w * kBlockN,
                       tile.group * shape.channels + k_tile.channel, nchw_blocks[block].n);
      return;
    }
    const int w = pixel.w * (STRIDED ? 1 : shape.walk.stride_w) + shape.walk.low_w;
    const int h = pixel.h * (STRIDED ? 1 : shape.walk.stride_h) + shape.walk.low_h;
    if constexpr (KIND == WEIGHTS) {
      const unsigned to = stage + kABytes + slice * kPixels * kSwizzleN;
#pragma unroll
      for (int block = 0; block < kNBlocks; block++) {
        const NBlock& from = n_blocks[block];
        if (!is_inside(shape, from)) break;
        if constexpr (POINTWISE)
          tma_load_tiled<kMulticast>(to + block * kNBlockBytes, map, barrier, from.first, tile.group, index, cta_mask);
        else
#ifdef VARIANT_VOLUME
          load_volume<kMulticast>(shape, k_tile.phase, to + block * kNBlockBytes, map, barrier,
                                  tile.group * shape.size_n + from.first, w, h, pixel.n, from.tap_x, from.tap_y,
                                  cta_mask);
#else
          tma_load_im2col<kMulticast>(to + block * kNBlockBytes, map, barrier, tile.group * shape.size_n + from.first,
                                      w, h, pixel.n, from.tap_x * shape.walk.dilation_w,
                                      from.tap_y * shape.walk.dilation_h, cta_mask);
#endif
      }
      return;
    }
    const unsigned to = stage + (kPixelsAreN ? kABytes : slice * kPixels * kSwizzleK);
    if constexpr (POINTWISE) {
      tma_load_tiled<kMulticast>(to, map, barrier, k_tile.channel, tile.group, index, cta_mask);
    } else {
#ifdef VARIANT_VOLUME
      load_volume<kMulticast>(shape, k_tile.phase, to, map, barrier, tile.group * shape.channels + k_tile.channel, w, h,
                              pixel.n, k_tile.tap_x, k_tile.tap_y, cta_mask);
#else
      const int tap_h = k_tile.tap_y * shape.walk.dilation_h, tap_w = k_tile.tap_x * shape.walk.dilation_w;
      tma_load_im2col<kMulticast>(to, map, barrier, tile.group * shape.channels + k_tile.channel, w, h, pixel.n,
                                  KIND == DATA ? k_tile.phase.w.offset - tap_w : tap_w,
                                  KIND == DATA ? k_tile.phase.h.offset - tap_h : tap_h, cta_mask);
#endif
    }
  }
};

// This block's part of the loads of the other operand, in boxes: of the filter, for WEIGHTS of dy.
struct OtherLoads {
  static constexpr int kMulticast = KIND == WEIGHTS ? CLUSTER_N : CLUSTER_M;
  static constexpr int kLength = (kKMajorFilter ? kTileN : kTileK) / kMulticast;
  static_assert(kLength % 8 == 0, "each block of a multicast loads whole repetitions of a swizzle, 8 rows");
  int slice, bytes, index;
  unsigned short cta_mask;
  KTileIterator k_tile;
  Pixel pixel, stride;

  __device__ __forceinline__ OtherLoads(const Shape& shape, const ClusterCoord& at, const WorkTile& tile)
      : slice(KIND == WEIGHTS ? at.n : at.m),
        bytes(KIND == WEIGHTS || kPixelsAreN ? kABytes : kBBytes),
        index(tile.first_k_tile * kTileK + slice * kLength),
        cta_mask(KIND == WEIGHTS ? same_a_mask(at) : same_b_mask(at)),
        k_tile(shape, tile),
        pixel{},
        stride{0, 0, 1} {
    if constexpr (kNchwBothK) pixel = pixel_at(shape.walk, tile.first_k_tile);
    if constexpr (kNchwAK) {
      pixel = pixel_at(shape.walk, index);
      stride = pixel_at(shape.walk, kTileK);
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (kNchwBothK || kNchwAK)
      pixel = sum(shape.walk, pixel, stride);
    else if constexpr (KIND == WEIGHTS)
      index += kTileK;
    else
      k_tile.next(shape);
  }

  // Filters from one of the group on, K-major.
  __device__ __forceinline__ void load_filters(const Shape& shape, const WorkTile& tile, const TensorMap* map,
                                               unsigned to, unsigned barrier, int first) const {
    if constexpr (kTransposedFilter)
      tma_load_tiled<kMulticast>(to, map, barrier, k_tile.channel, first,
                                 tile.group * shape.taps_y * shape.taps_x.by + k_tile.tap, cta_mask);
    else
      tma_load_tiled<kMulticast>(to, map, barrier, k_tile.channel, k_tile.tap,
                                 tile.group * (kPixelsAreN ? shape.size_m : shape.size_n) + first, cta_mask);
  }

  __device__ __forceinline__ void load(const Shape& shape, const WorkTile& tile, const TensorMap* map, unsigned stage,
                                       unsigned barrier) const {
    if constexpr (kNchwBothK || kNchwAK) {
      const int first = kNchwBothK ? pixel.w * kTileK : pixel.h * shape.walk.width.by + pixel.w;
      tma_load_tiled(stage, map, barrier, first, tile.group * shape.size_m + tile.tile_m * kTileM, pixel.n);
    } else if constexpr (KIND == WEIGHTS) {
#pragma unroll
      for (int block = 0; block < kMBlocks; block++)
        tma_load_tiled<kMulticast>(stage + block * kMBlockBytes + slice * kLength * 128, map, barrier,
                                   tile.tile_m * kTileM + 64 * block, tile.group, index, cta_mask);
    } else if constexpr (kPixelsAreN && kKMajorFilter) {
      load_filters(shape, tile, map, stage, barrier, tile.tile_m * kTileM);
    } else if constexpr (kPixelsAreN) {
#pragma unroll
      for (int block = 0; block < kMBlocks; block++)
        tma_load_tiled(stage + block * kMBlockBytes, map, barrier, tile.tile_m * kTileM + 64 * block, k_tile.tap,
                       tile.group * shape.channels + k_tile.channel);
    } else if constexpr (kKMajorFilter) {
      load_filters(shape, tile, map, stage + kABytes + slice * kLength * kSwizzleK, barrier,
                   tile.tile_n * kTileN + slice * kLength);
    } else {
#pragma unroll
      for (int block = 0; block < kNBlocks; block++)
        tma_load_tiled<kMulticast>(stage + kABytes + block * kNBlockBytes + slice * kLength * kSwizzleN, map, barrier,
                                   tile.tile_n * kTileN + block * kBlockN, k_tile.tap,
                                   tile.group * shape.channels + k_tile.channel + slice * kLength, cta_mask);
    }
  }
};

// A barrier of all threads of the cluster; with `kRelease` what each has written is visible after it, else mbarriers
// that have been initialised.
template <bool kRelease = false>
__device__ __forceinline__ void cluster_sync() {
  if constexpr (kCluster > 1) {
    cluster_arrive<kRelease>();
    cluster_wait();
  } else {
    block_sync();
  }
}

template <typename Loads>
__device__ __forceinline__ void produce(const Shape& shape, const TensorMap* map, unsigned stages, unsigned full,
                                        unsigned empty) {
  const ClusterCoord at = cluster_coord();
  int rank = first_work_tile<kCluster>();
  WorkTile tile = work_tile_at(shape, at, rank);
  Loads loads(shape, at, tile);
  cluster_sync();  // mbarriers are initialised
  if (threadIdx.x % 32 == 0) {
    griddepcontrol_wait();
    int stage = 0;
    unsigned parity = 1;  // in the first round all stages are empty
    while (true) {
      for (int k_tile = tile.first_k_tile; k_tile < tile.end_k_tile; k_tile++) {
        mbarrier_wait(empty + 8 * stage, parity);
        mbarrier_arrive_expect_tx(full + 8 * stage, loads.bytes);
        loads.load(shape, tile, map, stages + stage * kStageBytes, full + 8 * stage);
        loads.next(shape);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      rank = next_work_tile<kCluster, STRIDED>(rank);
      if (rank >= shape.grid.work_tiles) break;
      tile = work_tile_at(shape, at, rank);
      loads = Loads(shape, at, tile);
    }
    griddepcontrol_launch_dependents();
  }
  __syncwarp();
}
