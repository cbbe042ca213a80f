// Convolution as implicit GEMM on Hopper's tensor cores (wgmma), float32 accumulators; float32 counts as TF32.
// FORWARD:  y[m, k] = sum_{tap, c} x[m at tap, c] * w[k, tap, c]; M: output pixels, N: filters, K: taps and channels.
// DATA:     dx[m, c] = sum_{tap, k} dy[m at tap, k] * w[k, tap, c]; M: input pixels; STRIDED, phase after phase.
// WEIGHTS:  dw[k, tap c] = sum_m dy[m, k] * x[m at tap, c]; M: filters, N: taps and channels, K: output pixels.
// Pixels are N instead, and A and B swapped, if SWAPPED, or where NCHW says that the output or all tensors are NCHW.
// TMA loads pixels in im2col mode, padding included, all else in boxes; so it does POINTWISE pixels: one tap, stride 1,
// no padding. Warp-specialised: two producer warps load A and B into a pipeline of STAGES; CONSUMERS warpgroups
// multiply ROWS blocks of 64 rows each, and write blocks of BLOCK_N columns, for WEIGHTS each of one tap. Persistent
// blocks take work tiles: tiles, or splits of their K, whose float32 partials a second pass adds in order. The
// CLUSTER_M x CLUSTER_N blocks of a cluster have neighbouring tiles and multicast what they share; or CLUSTER_K blocks
// split K of a tile and add their partials in order. Design after the public description of CUTLASS's GEMMs for sm_90.
// VARIANT_VOLUME: pixels and taps have a depth, too.
#include "common/opaque.cuh"
#include "common/split_k.cuh"
#include "implicit_gemm/wgmma_epilogue.cuh"
#ifdef EPILOGUE
#include "implicit_gemm/wgmma_bias_gradient.cuh"
#endif

__device__ __forceinline__ void consume(const Shape& shape, const TensorMap* map_out, float* out, int consumer,
#ifdef EPILOGUE
                                        const Epilogue& epilogue, TensorLoads loads, float* sums,
#endif
                                        unsigned stages, unsigned full, unsigned empty, unsigned staging) {
  cluster_sync();  // mbarriers are initialised
  const ClusterCoord at = cluster_coord();
  const int lane = threadIdx.x % 32;  // tells one of the blocks that load to this one that a stage is empty
  const bool signals = lane < CLUSTER_M * CLUSTER_N && (lane / CLUSTER_N == at.m || lane % CLUSTER_N == at.n);
  int stage = 0;
  unsigned other = staging + kOutBlockBytes;
  unsigned parity = 0;
  for (int rank = first_work_tile<kCluster>(); rank < shape.grid.work_tiles;
       rank = next_work_tile<kCluster, STRIDED>(rank)) {
    const WorkTile tile = work_tile_at(shape, at, rank);
    float acc[ROWS][kAccumulators];
#ifdef EPILOGUE
    const TermsAhead terms_ahead = read_tile_terms_ahead(shape, tile, epilogue, consumer);
    if constexpr (CLUSTER_K > 1 && kReducesVectors && (kHasResidual || kHasSaved))
      prefetch_cluster_tensors(shape, tile, epilogue);
    if constexpr (kCopiesTensors) {
      if (shape.grid.splits.by == 1) copy_first_blocks(shape, tile, epilogue, staging, other, consumer);
    } else if constexpr (kLoadsTensors)
      if (threadIdx.x % 128 == 0 && (SWAPPED || shape.grid.splits.by == 1))
        load_first_tensors(shape, tile, loads, staging, other, consumer);
#if EPILOGUE_BIAS_GRADIENT
    FilterSums filter_sums = {};
    const bool sums_up = sums_filters(tile);
#endif
#endif
#ifdef EPILOGUE
    if (STRIDED && tile.phase == shape.phases_with_taps - 1) write_zeros(shape, tile, epilogue, out, consumer);
#else
    if (STRIDED && tile.phase == shape.phases_with_taps - 1) write_zeros(shape, tile, out, consumer);
#endif
    int before = -1;
    for (int k_tile = tile.first_k_tile; k_tile < tile.end_k_tile; k_tile++) {
      mbarrier_wait(full + 8 * stage, parity);
      const unsigned a = stages + stage * kStageBytes + consumer * ROWS * kMBlockBytes;
      const unsigned b = stages + stage * kStageBytes + kABytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kElementBytes * kTileK / 32; k++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
          Wgmma<ELEMENT>::ss<kKMajorA ? Major::K : Major::MN, kKMajorB ? Major::K : Major::MN>(
              acc[r], descriptor_at(kADescriptor, a + r * kMBlockBytes + k * kAStepBytes),
              descriptor_at(kBDescriptor, b + k * kBStepBytes), k_tile > tile.first_k_tile || k > 0);
      wgmma_commit_group();
#ifdef EPILOGUE
#if EPILOGUE_BIAS_GRADIENT
      if (sums_up) add_filters(filter_sums, a);
#endif
#endif
      wgmma_wait_group<1>();  // the k-tile before has read its stage
      if (before >= 0 && signals) mbarrier_arrive<CLUSTER_M * CLUSTER_N>(empty + 8 * before, lane);
      before = stage;
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    wgmma_wait_group<0>();
    const WorkTile done = work_tile_at(shape, at, opaque(rank));  // not kept in registers beside the accumulators
    if ((!STRIDED || CLUSTER_K == 1) && signals) mbarrier_arrive<CLUSTER_M * CLUSTER_N>(empty + 8 * before, lane);
#ifdef EPILOGUE
    keep_terms_ahead(terms_ahead);
#endif
    if (CLUSTER_K > 1)
      write_cluster_partial(stages, consumer, acc);
    else if (SWAPPED || shape.grid.splits.by == 1)
#ifdef EPILOGUE
      write_tile(shape, done, map_out, epilogue, loads, sums, reinterpret_cast<ELEMENT*>(out), staging, other, consumer,
                 acc);
#else
      write_tile(shape, done, map_out, reinterpret_cast<ELEMENT*>(out), staging, other, consumer, acc);
#endif
    else
      write_partial(shape, done, out, consumer, acc);
#ifdef EPILOGUE
#if EPILOGUE_BIAS_GRADIENT
    if (sums_filters(done)) write_filter_sums(shape, done, filter_sums, consumer, sums, stages);
#endif
#endif
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_group_read();
  __syncwarp();
}

#if CLUSTER_M * CLUSTER_N * CLUSTER_K > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER_M * CLUSTER_N * CLUSTER_K, 1, 1)
#else
#define IN_CLUSTERS
#endif

// `sums` takes what a fused kernel sums up for second outputs: partial statistics, or the bias gradient, or a partial
// of that for each split.
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
#ifdef EPILOGUE
                        const __grid_constant__ TensorMap map_out, float* out, const __grid_constant__ Shape shape,
                        const __grid_constant__ TensorMap map_first, const __grid_constant__ TensorMap map_saved,
                        float* sums, const __grid_constant__ Epilogue epilogue) {
  __shared__ alignas(8) unsigned long long tensor_barriers[2 * CONSUMERS];
  const unsigned tensor_full = shared_address(tensor_barriers);
#else
                        const __grid_constant__ TensorMap map_out, float* out, const __grid_constant__ Shape shape) {
#endif
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
  const unsigned stages = (shared_address(shared) + 1023) / 1024 * 1024;
  const unsigned staging = stages + STAGES * kStageBytes;
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  const int role = threadIdx.x / 128;
  if (role < CONSUMERS) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        mbarrier_init(full + 8 * i, 2);
        mbarrier_init(empty + 8 * i, 4 * CONSUMERS * (CLUSTER_M + CLUSTER_N - 1));
      }
#ifdef EPILOGUE
      for (int i = 0; i < 2 * CONSUMERS; i++) mbarrier_init(tensor_full + 8 * i, 1);
#endif
      fence_mbarrier_init();
    }
#ifdef EPILOGUE
    const unsigned base = staging + role * 2 * kOutBlockBytes;
    consume(shape, &map_out, out, role, epilogue, {&map_first, &map_saved, base, tensor_full + 16 * role, 0}, sums,
            stages, full, empty, base);
#else
    consume(shape, &map_out, out, role, stages, full, empty, staging + role * 2 * kOutBlockBytes);
#endif
  } else if (threadIdx.x < CONSUMERS * 128 + 32) {
    const TensorMap* map = KIND == WEIGHTS || kPixelsAreN ? &map_b : &map_a;
    if (threadIdx.x % 32 == 0) prefetch_tensor_map(map);
    produce<PixelLoads>(shape, map, stages, full, empty);
  } else {
    const TensorMap* map = KIND == WEIGHTS || kPixelsAreN ? &map_a : &map_b;
    if (threadIdx.x % 32 == 0) prefetch_tensor_map(map);
    produce<OtherLoads>(shape, map, stages, full, empty);
  }
  if constexpr (CLUSTER_K > 1) {
    cluster_sync<true>();  // all partials are written
#ifdef EPILOGUE
    reduce_cluster_partials(shape, epilogue, stages, reinterpret_cast<ELEMENT*>(out));
#if EPILOGUE_BIAS_GRADIENT
    reduce_cluster_filter_sums(shape, stages, reinterpret_cast<EpilogueParameter*>(sums));
#endif
#else
    reduce_cluster_partials(shape, stages, reinterpret_cast<ELEMENT*>(out));
#endif
  }
  // Until here other blocks read this one's partial, or arrive at its mbarriers: a releasing barrier waits for these.
  if constexpr (kCluster > 1) cluster_sync<(CLUSTER_M * CLUSTER_N > 1)>();
}

constexpr int kReductionThreads = 256;

extern "C" __global__ void __launch_bounds__(kReductionThreads)
#ifdef EPILOGUE
    implicit_gemm_wgmma_finish(const float* partials, ELEMENT* out, int size, int splits, int lanes,
                               const __grid_constant__ ResultOrder order, const __grid_constant__ Epilogue epilogue,
#if EPILOGUE_BIAS_GRADIENT
                               float* sums, EpilogueParameter* bias_gradient, int filters) {
  const int first = static_cast<int>(gridDim.x) - (filters + 31) / 32, block = static_cast<int>(blockIdx.x);
  if (block >= first) {
    reduce_filter_sums<kReductionThreads>(sums, bias_gradient, filters, splits, first);
    return;
  }
#else
                               float* sums) {
#endif
#if EPILOGUE_STATISTICS
  reduce_split_k_and_sum<kReductionThreads, 4, 8, 2>(partials, out, size, splits, order, epilogue, sums);
#else
  reduce_split_k<kReductionThreads, 4>(partials, out, size, splits, lanes, order, epilogue);
#endif
}
#else
    implicit_gemm_wgmma_finish(const float* partials, ELEMENT* out, int size, int splits, int lanes) {
  reduce_split_k<kReductionThreads, 4>(partials, out, size, splits, lanes);
}
#endif

#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
extern "C" __global__ void __launch_bounds__(1024)
    implicit_gemm_wgmma_statistics(const float* partials, float* sum, float* sum_of_squares, int channels, int parts) {
  finish_statistics(partials, sum, sum_of_squares, channels, parts);
}
#endif
#endif
