// Of kernels_src/implicit_gemm/wgmma.cu, which says what its defines mean: how the product is cut into tiles and
// k-tiles, and where each part of them lies in shared memory.
#pragma once

#if !defined(ELEMENT) || !defined(KIND) || !defined(TILE_N) || !defined(TILE_K) || !defined(STAGES)
#error "define ELEMENT, KIND, TILE_N, TILE_K and STAGES"
#endif
#if !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS) || !defined(BLOCK_N)
#error "define CONSUMERS, ROWS, BLOCKS and BLOCK_N"
#endif
#if !defined(CLUSTER_M) || !defined(CLUSTER_N) || !defined(CLUSTER_K)
#error "define CLUSTER_M, CLUSTER_N and CLUSTER_K"
#endif
#if !defined(POINTWISE) || !defined(SWAPPED) || !defined(NCHW) || !defined(SEGMENT)
#error "define POINTWISE, SWAPPED, NCHW and SEGMENT"
#endif
#if !defined(STRIDED) || !defined(PHASEAXIS_FIELDS) || !defined(PHASE_FIELDS) || !defined(SHAPE_FIELDS)
#error "define STRIDED, PHASEAXIS_FIELDS, PHASE_FIELDS and SHAPE_FIELDS"
#endif
#define WGMMA_N TILE_N

#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#include "implicit_gemm/tile_scheduler.cuh"

enum Kind { FORWARD, DATA, WEIGHTS };
// Tensors of pixels that are NCHW: none, the output, A (of backward weights), or all.
enum NchwTensors { NCHW_NONE, NCHW_OUTPUT, NCHW_A, NCHW_ALL };

constexpr int kMBlocks = CONSUMERS * ROWS, kTileM = 64 * kMBlocks, kTileN = TILE_N, kTileK = TILE_K;
constexpr int kCluster = CLUSTER_M * CLUSTER_N * CLUSTER_K;
static_assert(CLUSTER_K == 1 || CLUSTER_M * CLUSTER_N == 1, "a cluster multicasts loads or splits K, not both");
constexpr int kThreads = 128 * CONSUMERS + 64;
constexpr int kAccumulators = TILE_N / 2;
constexpr int kElementBytes = sizeof(ELEMENT);
// TF32 backward data takes a filter that has been transposed, for each group from k x (tap, c) to (tap, c) x k.
constexpr bool kTransposedFilter = KIND == DATA && kElementBytes == 4;
constexpr bool kKMajorFilter = KIND == FORWARD || kTransposedFilter;
// Pixels are N (A and B are swapped), or the operand of pixels is NCHW: as B's N, as B's K, or as A's K.
constexpr bool kPixelsAreN = KIND != WEIGHTS && (SWAPPED || NCHW != NCHW_NONE);
constexpr bool kNchwN = KIND != WEIGHTS && NCHW == NCHW_ALL;
constexpr bool kNchwBothK = KIND == WEIGHTS && NCHW == NCHW_ALL, kNchwAK = NCHW == NCHW_A;
constexpr bool kKMajorA = kPixelsAreN ? kKMajorFilter : KIND != WEIGHTS || NCHW;
constexpr bool kKMajorB = kPixelsAreN ? !kNchwN : kKMajorFilter || kNchwBothK;
static_assert(
    !SWAPPED || (KIND != WEIGHTS && kElementBytes == 2 && ROWS == 1 && kCluster == 1),
    "A and B are swapped for 16-bit forward and backward data alone, one 64-row block a consumer, no cluster");
static_assert(NCHW == NCHW_NONE || (!SWAPPED && !STRIDED && CLUSTER_M * CLUSTER_N == 1),
              "NCHW tensors go with no swap of A and B, no strided backward data and no multicast");
static_assert(NCHW != NCHW_ALL || POINTWISE, "NCHW inputs are loaded as boxes: one tap, stride 1, no padding");
static_assert(KIND != WEIGHTS || NCHW != NCHW_OUTPUT, "the output of backward weights is no tensor of pixels");
static_assert(KIND == WEIGHTS || NCHW != NCHW_A, "only in backward weights is A a tensor of pixels besides B");
static_assert(!STRIDED || (KIND == DATA && !SWAPPED && !POINTWISE && CLUSTER_M * CLUSTER_N == 1),
              "STRIDED is backward data without a swap of A and B and without multicast");

// Swizzle widths: of a K-major operand the bytes of a k-tile, else those of an N block, or 64 rows.
constexpr int kSwizzleK = kElementBytes * kTileK;
constexpr int kBlockN = BLOCK_N, kNBlocks = kTileN / kBlockN;
constexpr int kSwizzleN = kElementBytes * kBlockN;
static_assert(kTileN % kBlockN == 0, "TILE_N is a multiple of BLOCK_N");
static_assert(kSwizzleN == 128 || kSwizzleN == 64 || kSwizzleN == 32, "swizzles are 32, 64 or 128 bytes wide");
static_assert(kSwizzleK == 128 || (KIND != WEIGHTS && (kSwizzleK == 64 || kSwizzleK == 32)),
              "swizzles are 32, 64 or 128 bytes wide, of backward weights 128");
static_assert(ROWS * kAccumulators <= 192, "accumulators stay in registers");

constexpr int kABytes = kElementBytes * kTileM * kTileK, kBBytes = kElementBytes * kTileN * kTileK;
constexpr int kStageBytes = kABytes + kBBytes, kNBlockBytes = kBlockN * kElementBytes * kTileK;
static_assert(kABytes % 1024 == 0 && kBBytes % 1024 == 0, "operands begin where 128-byte swizzles repeat");
// The epilogue writes blocks of 64 rows and kBlockN columns; with A and B swapped, of 64 pixels and 64 filters.
constexpr int kOutSwizzle = SWAPPED ? 128 : kSwizzleN, kOutBlockBytes = 64 * kOutSwizzle;
constexpr int kOutBlockN = SWAPPED ? 64 : kBlockN;
static_assert(!SWAPPED || kTileN % 64 == 0, "with A and B swapped, TILE_N is a multiple of 64 pixels");

// K-major: 8 rows of one swizzle width repeat. MN-major: 8 terms of kBlockN, or of 64 rows, do.
constexpr unsigned long long kADescriptor =
    kKMajorA ? matrix_descriptor(16, 8 * kSwizzleK, kSwizzleK) : matrix_descriptor(kTileK * 128, 1024, 128);
constexpr unsigned long long kBDescriptor = kKMajorB ? matrix_descriptor(16, 8 * kSwizzleK, kSwizzleK)
                                                     : matrix_descriptor(kNBlockBytes, 8 * kSwizzleN, kSwizzleN);
// Bytes from one wgmma's terms to the next's, and from one 64-row block to the next.
constexpr int kAStepBytes = kKMajorA ? 32 : 16 * 128;
constexpr int kBStepBytes = kKMajorB ? 32 : 16 * kSwizzleN;
constexpr int kMBlockBytes = 64 * kElementBytes * kTileK;

// Strided backward data is cut into phases: pixels of dx of one residue modulo the stride, which the same sub-filter
// meets. Along one axis: `at` is the residue; the sub-filter has `taps` of the filter from tap `first` on; `offset` is
// from the pixel of dy that the walk is at to the one that the first tap meets (further taps meet those before).
struct PhaseAxis {
  PHASEAXIS_FIELDS
};

// All axes, and the log of the blocks of a cluster that split K of the phase's tiles.
struct Phase {
  PHASE_FIELDS
};

#ifdef VARIANT_VOLUME
#if !defined(VOLUME_FIELDS)
#error "define VOLUME_FIELDS"
#endif
static_assert(NCHW != NCHW_A, "volumes have no y alone with channels first");

// What the pixels of volumes are besides. The walk counts the planes of all images as its images, `depth` of them each,
// from `low_d` on, a stride apart; and as rows of taps those of all planes of the filter, `plane_taps_y` of them each,
// a dilation apart, or those of a phase, `tap_stride_d` apart in the filter. `image` divides by `image_pixels`; dx has
// `dx_depth` planes an image.
struct Volume {
  VOLUME_FIELDS
};
#endif

// One convolution; sizes are of one group. `size_m` x `size_n` is the product, for WEIGHTS of one tap. A tap has
// `tap_blocks`: k-tiles of its `channels` terms, or for WEIGHTS N blocks. NCHW pixels, where they are N or K, are
// walked as one row of `width` N blocks or k-tiles; an NCHW output has images of `image_pixels`. The output, and each
// split-K partial, has `out_size` elements. Taps of a phase are `tap_stride_h` and `tap_stride_w` apart in the filter.
// STRIDED has `phase_count` phases, 2, 4 or 8, from those of most taps to those of none; other products have one.
struct Shape {
  SHAPE_FIELDS
};

__device__ __forceinline__ const Phase& phase_at(const Shape& shape, int number) {
  return shape.phases[STRIDED ? number : 0];
}

// Blocks of a cluster that split K of a phase's tile, as a power of 2: so many that each has as many k-tiles.
constexpr int kLog2ClusterK = CLUSTER_K == 8 ? 3 : CLUSTER_K == 4 ? 2 : CLUSTER_K == 2 ? 1 : 0;
static_assert(1 << kLog2ClusterK == CLUSTER_K, "CLUSTER_K is 1, 2, 4 or 8");

__device__ __forceinline__ int log2_cluster_k(const Shape& shape, int phase) {
  return STRIDED ? phase_at(shape, phase).log2_cluster_k : kLog2ClusterK;
}

// Where a block is in its cluster.
struct ClusterCoord {
  int m, n, k;
};

__device__ __forceinline__ ClusterCoord cluster_coord() {
  const int rank = kCluster > 1 ? cluster_rank() : 0;
  if constexpr (CLUSTER_K > 1) return {0, 0, rank};
  return {rank / CLUSTER_N, rank % CLUSTER_N, 0};
}

// Multicast masks: the cluster's blocks that load the same A, and those that load the same B.
__device__ __forceinline__ unsigned short same_a_mask(const ClusterCoord& at) {
  return ((1 << CLUSTER_N) - 1) << at.m * CLUSTER_N;
}

__device__ __forceinline__ unsigned short same_b_mask(const ClusterCoord& at) {
  unsigned short mask = 0;
#pragma unroll
  for (int m = 0; m < CLUSTER_M; m++) mask |= 1 << (m * CLUSTER_N + at.n);
  return mask;
}

// kBlockN columns of a tile: the first, and for WEIGHTS the tap that they are all of.
struct NBlock {
  int first, tap, tap_y, tap_x;
};

// Whether the output has any of it.
__device__ __forceinline__ bool is_inside(const Shape& shape, const NBlock& block) {
  return KIND == WEIGHTS ? block.tap_y < shape.taps_y : block.first < shape.size_n;
}

__device__ __forceinline__ NBlock n_block_at(const Shape& shape, int tile_n, int number_in_tile) {
  const int number = tile_n * kNBlocks + number_in_tile;
  NBlock block{};
  if constexpr (KIND == WEIGHTS) {
    block.tap = number / shape.tap_blocks;
    block.first = (number - block.tap * shape.tap_blocks.by) * kBlockN;
    block.tap_y = block.tap / shape.taps_x;
    block.tap_x = block.tap - block.tap_y * shape.taps_x.by;
  } else {
    block.first = number * kBlockN;
  }
  return block;
}

// The work tile of that rank for the block at a place of its cluster. STRIDED, phases follow one another, and a
// cluster takes as many tiles of a phase as it has blocks beyond those that split K.
__device__ __forceinline__ WorkTile work_tile_at(const Shape& shape, const ClusterCoord& at, int rank) {
  WorkTile tile;
  tile.phase = 0;
  if constexpr (STRIDED) {
    const int tiles =
        shape.grid.tiles_n.by * shape.grid.tiles_m.by * shape.groups * (CLUSTER_K > 1 ? 1 : shape.grid.splits.by);
    int apart = kLog2ClusterK - log2_cluster_k(shape, 0);  // tiles of a cluster, as a power of 2
    for (int items; rank >= (items = (tiles + (1 << apart) - 1) >> apart); rank -= items)
      apart = kLog2ClusterK - log2_cluster_k(shape, ++tile.phase);
    rank = (rank << apart) + (at.k >> (kLog2ClusterK - apart));
  }
  const int row = rank / shape.grid.tiles_n, rest = row / shape.grid.tiles_m;
  tile.tile_n = (rank - row * shape.grid.tiles_n.by) * CLUSTER_N + at.n;
  tile.tile_m = (row - rest * shape.grid.tiles_m.by) * CLUSTER_M + at.m;
  tile.group = CLUSTER_K > 1 ? rest : rest / shape.grid.splits;
  tile.split = CLUSTER_K > 1 ? at.k : rest - tile.group * shape.grid.splits.by;
  int k_tiles = shape.grid.k_tiles;
  if constexpr (STRIDED) {
    const Phase& phase = phase_at(shape, tile.phase);
#ifdef VARIANT_VOLUME
    k_tiles = phase.d.taps * phase.h.taps * phase.w.taps * shape.tap_blocks.by;
#else
    k_tiles = phase.h.taps * phase.w.taps * shape.tap_blocks.by;
#endif
    if constexpr (CLUSTER_K > 1) {
      const int power = log2_cluster_k(shape, tile.phase);
      tile.split &= (1 << power) - 1;
      tile.first_k_tile = k_tiles * tile.split >> power;
      tile.end_k_tile = tile.group < shape.groups ? k_tiles * (tile.split + 1) >> power : tile.first_k_tile;
      return tile;
    }
  }
  tile.first_k_tile = k_tiles * tile.split / shape.grid.splits;
  tile.end_k_tile = k_tiles * (tile.split + 1) / shape.grid.splits;
  return tile;
}

// The pixel of dx that a phase's pixel is, as an index with w innermost, or -1 if it is beyond the image.
__device__ __forceinline__ int dx_pixel(const Shape& shape, const Phase& phase, const Pixel& pixel) {
  const int h = pixel.h * shape.walk.stride_h + phase.h.at, w = pixel.w * shape.walk.stride_w + phase.w.at;
#ifdef VARIANT_VOLUME
  const Volume& volume = shape.volume;
  const int n = pixel.n / volume.depth;
  const int d = (pixel.n - n * volume.depth.by) * volume.stride_d + phase.d.at;
  return d < volume.dx_depth && h < shape.dx_height && w < shape.dx_width
             ? ((n * volume.dx_depth + d) * shape.dx_height + h) * shape.dx_width + w
             : -1;
#else
  return h < shape.dx_height && w < shape.dx_width ? (pixel.n * shape.dx_height + h) * shape.dx_width + w : -1;
#endif
}

// The row of the output that a row of the product is, or -1; for WEIGHTS the row of its group.
__device__ __forceinline__ int out_row(const Shape& shape, const WorkTile& tile, int row) {
  if (row >= shape.size_m) return -1;
  if constexpr (!STRIDED) return row;
  return dx_pixel(shape, phase_at(shape, tile.phase), pixel_at(shape.walk, row));
}

// Without WEIGHTS, walks the k-tiles of a work tile: the first channel of each, and its tap. `tap` is its number in the
// filter; tap_y and tap_x count those of the phase, tap_y of all its planes.
struct KTileIterator {
  Phase phase;
  int channel, tap, tap_y, tap_x;

  __device__ __forceinline__ KTileIterator(const Shape& shape, const WorkTile& tile)
      : phase(phase_at(shape, tile.phase)) {
    tap = tile.first_k_tile / shape.tap_blocks;
    channel = (tile.first_k_tile - tap * shape.tap_blocks.by) * kTileK;
    if constexpr (STRIDED) {
      tap_y = 0;
      for (tap_x = tap; tap_x >= phase.w.taps; tap_x -= phase.w.taps) tap_y++;
      tap = filter_tap(shape);
    } else {
      tap_y = tap / shape.taps_x;
      tap_x = tap - tap_y * shape.taps_x.by;
    }
  }

  // The number in the filter of the sub-filter's tap.
  __device__ __forceinline__ int filter_tap(const Shape& shape) const {
#ifdef VARIANT_VOLUME
    const Volume& volume = shape.volume;
    const int z = tap_y / phase.h.taps, y = tap_y - z * phase.h.taps;
    const int row =
        (phase.d.first + z * volume.tap_stride_d) * volume.plane_taps_y.by + phase.h.first + y * shape.tap_stride_h;
    return row * shape.taps_x.by + phase.w.first + tap_x * shape.tap_stride_w;
#else
    return (phase.h.first + tap_y * shape.tap_stride_h) * shape.taps_x.by + phase.w.first + tap_x * shape.tap_stride_w;
#endif
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    channel += kTileK;
    if (channel < shape.tap_blocks.by * kTileK) return;
    channel = 0;
    tap++;
    if (++tap_x == (STRIDED ? phase.w.taps : shape.taps_x.by)) {
      tap_x = 0;
      tap_y++;
    }
    if constexpr (STRIDED) tap = filter_tap(shape);
  }
};
