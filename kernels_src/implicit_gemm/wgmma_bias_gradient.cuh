// Of kernels_src/implicit_gemm/wgmma.cu, the bias gradient: sums of dy over pixels, of each filter. dy is A of backward
// weights: the blocks of the first column of tiles sum it up from the k-tiles in shared memory while these are
// multiplied. Sums leave with the products: as results, as split-K partials [split][filter], or through the cluster.
#pragma once

#include "common/epilogue.cuh"
#include "common/mma.cuh"
#include "implicit_gemm/wgmma_epilogue.cuh"

#if EPILOGUE_BIAS_GRADIENT
static_assert(KIND == WEIGHTS && kElementBytes == 2 && kTileK == 64, "dy is A, in k-tiles of 64 pixels of 16 bits");

// What a thread has of the 16 filters of its warp in each block of 64 rows: of filters lane / 4 and 8 + lane / 4.
struct FilterSums {
  float of[ROWS][2];
};

__device__ __forceinline__ bool sums_filters(const WorkTile& tile) {
  return tile.tile_n == 0;
}

// Adds the pixels of a k-tile; `a` is where this consumer's rows begin.
__device__ __forceinline__ void add_filters(FilterSums& sums, unsigned a) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int part = 0; part < 2; part++) {
        unsigned pixels[4];
        if constexpr (kKMajorA) {
          const int filter = 16 * warp + 8 * i + lane % 8, word = 4 * part + lane / 8;
          load_matrices(pixels, a + r * kMBlockBytes + 128 * filter + 16 * (word ^ filter % 8));
        } else {
          const int pixel = 32 * part + lane, word = 2 * warp + i;
          load_transposed(pixels, a + r * kMBlockBytes + 128 * pixel + 16 * (word ^ pixel % 8));
        }
        float pairs[4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
          const auto two = *reinterpret_cast<const Vector<ELEMENT, 2>*>(&pixels[p]);
          pairs[p] = convert<float>(two.at[0]) + convert<float>(two.at[1]);
        }
        sums.of[r][i] += (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
      }
  __syncwarp();  // all have read before one signals that the stage is empty
}

// Writes the sums of a consumer's filters. `sums_to` is for results or split-K partials; `shared` is the block's
// partial of a cluster, whose rows have room behind their columns.
__device__ __forceinline__ void write_filter_sums(const Shape& shape, const WorkTile& tile, const FilterSums& sums,
                                                  int consumer, float* sums_to, unsigned shared) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float own = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = sums.of[r][i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == i) own = sum;
    }
    const int in_tile = 64 * (consumer * ROWS + r) + 16 * warp + lane % 4 * 8 + lane / 4;
    const int row = tile.tile_m * kTileM + in_tile, filter = tile.group * shape.size_m + row;
    if (lane % 4 < 2 && row < shape.size_m) {
      if constexpr (CLUSTER_K > 1)
        store_shared_pair(shared + 4 * (in_tile * kPartialPitch + kTileN), own, 0);
      else if (shape.grid.splits.by > 1)
        sums_to[static_cast<int64>(tile.split) * shape.groups * shape.size_m + filter] = own;
      else
        reinterpret_cast<EpilogueParameter*>(sums_to)[filter] = convert<EpilogueParameter>(own);
    }
  }
}

// Adds this block's rows of the sums of all blocks of a cluster, in order of ranks, and writes them.
__device__ __forceinline__ void reduce_cluster_filter_sums(const Shape& shape, unsigned from, EpilogueParameter* out) {
  const WorkTile tile = work_tile_at(shape, cluster_coord(), first_work_tile<kCluster>());
  if (!sums_filters(tile)) return;
  constexpr int kRows = kTileM / CLUSTER_K;
  for (int number = threadIdx.x; number < kRows; number += kThreads) {
    const int in_tile = tile.split * kRows + number, row = tile.tile_m * kTileM + in_tile;
    if (row >= shape.size_m) break;
    float total = 0;
#pragma unroll
    for (int k = 0; k < CLUSTER_K; k++)
      total += load_cluster_floats(map_shared_rank(from + 4 * (in_tile * kPartialPitch + kTileN), k)).at[0];
    out[tile.group * shape.size_m + row] = convert<EpilogueParameter>(total);
  }
}

// The reduction of split-K partials, [split][filter], by blocks of kThreads threads that take 32 filters each, from
// block `first` on.
template <int kThreads>
__device__ __forceinline__ void reduce_filter_sums(const float* partials, EpilogueParameter* out, int filters,
                                                   int splits, int first) {
  constexpr int kSide = kThreads / 32;
  __shared__ float thread_sums[kThreads];
  const int filter = (blockIdx.x - first) * 32 + threadIdx.x % 32, row = threadIdx.x / 32;
  float own = 0;
  griddepcontrol_wait();
  if (filter < filters) {
#pragma unroll 8
    for (int split = row; split < splits; split += kSide) own += partials[static_cast<int64>(split) * filters + filter];
  }
  thread_sums[threadIdx.x] = own;
#pragma unroll
  for (int half = kSide / 2; half > 0; half /= 2) {
    __syncthreads();  // the sums of the last step are there
    if (row < half) thread_sums[threadIdx.x] = own += thread_sums[threadIdx.x + half * 32];
  }
  if (row == 0 && filter < filters) out[filter] = convert<EpilogueParameter>(own);
}
#endif
