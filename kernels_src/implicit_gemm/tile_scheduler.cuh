// Of a convolution as a matrix product by persistent blocks: the walk over its pixels, and the work tiles that blocks
// take one after another. Defines, as solvers/implicit_gemm/tile_scheduler.py gives them: PIXELWALK_FIELDS and
// TILEGRID_FIELDS.
#pragma once

#include "common/divisor.cuh"

#if !defined(PIXELWALK_FIELDS) || !defined(TILEGRID_FIELDS)
#error "define PIXELWALK_FIELDS and TILEGRID_FIELDS"
#endif

// The pixels that im2col loads walk: `height` x `width` of them an image, from (low_h, low_w) on, a stride apart. Taps
// of the filter are a dilation apart.
struct PixelWalk {
  PIXELWALK_FIELDS
};

struct Pixel {
  int n, h, w;
};

// The pixel of that index, w innermost, then h and n.
__device__ __forceinline__ Pixel pixel_at(const PixelWalk& walk, int index) {
  const int row = index / walk.width, n = row / walk.height;
  return {n, row - n * walk.height.by, index - row * walk.width.by};
}

// The pixel whose index is the sum of both pixels' indices.
__device__ __forceinline__ Pixel sum(const PixelWalk& walk, Pixel a, const Pixel& b) {
  a.w += b.w;
  a.h += b.h;
  a.n += b.n;
  if (a.w >= walk.width.by) {
    a.w -= walk.width.by;
    a.h++;
  }
  if (a.h >= walk.height.by) {
    a.h -= walk.height.by;
    a.n++;
  }
  return a;
}

// Tiles of the product, ranked with tile_n innermost, then tile_m, split and group: `tiles_m` x `tiles_n` a group (in
// clusters, where clusters multicast), each with `k_tiles` along K in `splits` (split-K), and `work_tiles`
// in all.
struct TileGrid {
  TILEGRID_FIELDS
};

// What a block computes at a time: a tile of a group, from k-tile `first_k_tile` to before `end_k_tile`; of strided
// backward data, a tile of one phase.
struct WorkTile {
  int tile_m, tile_n, group, split, first_k_tile, end_k_tile, phase;
};

// The rank of the work tile that a block begins with; the `kCluster` blocks of a cluster have the same.
template <int kCluster>
__device__ __forceinline__ int first_work_tile() {
  return blockIdx.x / kCluster;
}

// The rank of the work tile that a block takes after one: every cluster takes one a round. If `kSnakes`, all rounds but
// the first run backwards: work tiles are sorted by their size, and who had most gets least.
template <int kCluster, bool kSnakes = false>
__device__ __forceinline__ int next_work_tile(int rank) {
  const int clusters = gridDim.x / kCluster;
  return kSnakes && rank < clusters ? 2 * clusters - 1 - rank : rank + clusters;
}
