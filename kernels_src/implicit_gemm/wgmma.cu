// Convolution as a matrix product on Hopper's tensor cores, float32 sums; float32 counts as TF32.
// FORWARD:  y[m, k] = sum_{tap, c} x[m at tap, c] * w[k, tap, c]; m: output pixels, rows; k: filters, columns.
// DATA:     dx[m, c] = sum_{tap, k} dy[m at tap, k] * w[k, tap, c]; m: input pixels; STRIDED, phase after phase.
// WEIGHTS:  dw[k, tap c] = sum_m dy[m, k] * x[m at tap, c]; m: output pixels, the depth.
// Pixels are the columns if SWAPPED, or where PLANES says that channels come first, in the result alone or everywhere.
// They come by the copy engine's im2col mode (TMA), padding included; all else as boxes, and so do POINTWISE pixels:
// one tap, stride 1, no padding. Two warps copy, one pixels and one boxes, into a ring of STAGES; CONSUMERS warpgroups
// multiply, ROWS blocks of 64 rows each, and write blocks of WIDE columns, for WEIGHTS each of one tap. Blocks are
// persistent and take tiles, or SPLITS parts of each tile's depth as float32, which `add_parts` adds in order. The
// CLUSTER_M x CLUSTER_N blocks of a cluster have neighbouring tiles, and each copies a share of what they have in
// common; or CLUSTER_K blocks add parts of one tile in order.
// Design after the public description of Hopper's warp-specialised GEMMs (CUTLASS, sm90).
#include "common/opaque.cuh"
#include "common/split_k.cuh"
#include "implicit_gemm/wgmma_results.cuh"

__device__ __forceinline__ void consume(const Shape& shape, const TensorMap* target, float* parts, int consumer,
                                        unsigned stages, unsigned full, unsigned empty, unsigned out) {
  meet();  // barriers are ready
  const Place at = place();
  const int lane = threadIdx.x % 32;  // tells one block of those that copy to this one that a stage may be filled again
  const bool signals = lane < CLUSTER_M * CLUSTER_N && (lane / CLUSTER_N == at.m || lane % CLUSTER_N == at.n);
  int slot = 0;
  unsigned other = out + kOutBlock;
  unsigned parity = 0;
  for (int number = blockIdx.x / kCluster; number < shape.items; number = item_after(number)) {
    const Item item = item_at(shape, at, number);
    float sums[ROWS][kSums];
    if (STRIDED && item.phase == phases_with_taps(shape) - 1) write_zeros(shape, item, parts, consumer);
    int before = -1;
    for (int step = item.first; step < item.last; step++) {
      mbarrier_wait(full + 8 * slot, parity);
      const unsigned rows = stages + slot * kStageBytes + consumer * ROWS * kRowBlock;
      const unsigned columns = stages + slot * kStageBytes + kRowBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kElement * kTileK / 32; k++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
          Wgmma<ELEMENT>::ss<kDeepRows ? Major::K : Major::MN, kDeepColumns ? Major::K : Major::MN>(
              sums[r], descriptor_at(kRowForm, rows + r * kRowBlock + k * kRowStep),
              descriptor_at(kColumnForm, columns + k * kColumnStep), step > item.first || k > 0);
      wgmma_commit_group();
      wgmma_wait_group<1>();  // the step before is done with its stage
      if (before >= 0 && signals) mbarrier_arrive<CLUSTER_M * CLUSTER_N>(empty + 8 * before, lane);
      before = slot;
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
    wgmma_wait_group<0>();
    const Item done = item_at(shape, at, opaque(number));  // not kept in registers beside the sums
    if ((!STRIDED || CLUSTER_K == 1) && signals) mbarrier_arrive<CLUSTER_M * CLUSTER_N>(empty + 8 * before, lane);
    if (CLUSTER_K > 1)
      write_share(stages, consumer, sums);
    else if (SWAPPED || shape.splits.by == 1)
      write_tile(shape, done, target, reinterpret_cast<ELEMENT*>(parts), out, other, consumer, sums);
    else
      write_part(shape, done, parts, consumer, sums);
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_group_read();
  __syncwarp();
}

#if CLUSTER_M * CLUSTER_N * CLUSTER_K > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER_M * CLUSTER_N * CLUSTER_K, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                        const __grid_constant__ TensorMap target, float* parts, int all_rows, int all_columns,
                        int groups, int channels, int taps_y, int stride_h, int stride_w, int low_h, int low_w,
                        int dilation_h, int dilation_w, int image, int size, int all_h, int all_w, int tap_step_h,
                        int tap_step_w, int first_h, int other_h, int first_w, int other_w, int phases, int steps,
                        int items, int taps_x, unsigned taps_x_multiplier, int taps_x_shift, int chunks,
                        unsigned chunks_multiplier, int chunks_shift, int height, unsigned height_multiplier,
                        int height_shift, int width, unsigned width_multiplier, int width_shift, int tiles_m,
                        unsigned tiles_m_multiplier, int tiles_m_shift, int tiles_n, unsigned tiles_n_multiplier,
                        int tiles_n_shift, int splits, unsigned splits_multiplier, int splits_shift) {
  const Shape shape{all_rows,
                    all_columns,
                    groups,
                    taps_y,
                    {taps_x, taps_x_multiplier, taps_x_shift},
                    {chunks, chunks_multiplier, chunks_shift},
                    channels,
                    {height, height_multiplier, height_shift},
                    {width, width_multiplier, width_shift},
                    stride_h,
                    stride_w,
                    low_h,
                    low_w,
                    dilation_h,
                    dilation_w,
                    image,
                    {tiles_m, tiles_m_multiplier, tiles_m_shift},
                    {tiles_n, tiles_n_multiplier, tiles_n_shift},
                    steps,
                    {splits, splits_multiplier, splits_shift},
                    items,
                    size,
                    all_h,
                    all_w,
                    tap_step_h,
                    tap_step_w,
                    first_h,
                    other_h,
                    first_w,
                    other_w,
                    phases};
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
  const unsigned stages = (shared_address(shared) + 1023) / 1024 * 1024;
  const unsigned out = stages + STAGES * kStageBytes;
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  const int role = threadIdx.x / 128;
  if (role < CONSUMERS) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        mbarrier_init(full + 8 * i, 2);
        mbarrier_init(empty + 8 * i, 4 * CONSUMERS * (CLUSTER_M + CLUSTER_N - 1));
      }
      fence_mbarrier_init();
    }
    consume(shape, &target, parts, role, stages, full, empty, out + role * 2 * kOutBlock);
  } else if (threadIdx.x < CONSUMERS * 128 + 32) {
    const TensorMap* map = KIND == WEIGHTS || kPixelColumns ? &columns : &rows;
    if (threadIdx.x % 32 == 0) prefetch_tensor_map(map);
    produce<PixelCopies>(shape, map, stages, full, empty);
  } else {
    const TensorMap* map = KIND == WEIGHTS || kPixelColumns ? &rows : &columns;
    if (threadIdx.x % 32 == 0) prefetch_tensor_map(map);
    produce<BoxCopies>(shape, map, stages, full, empty);
  }
  if constexpr (CLUSTER_K > 1) {
    meet<true>();  // all shares are written
    add_shares(shape, stages, reinterpret_cast<ELEMENT*>(parts));
  }
  // Others read this block's share until here, or signal its barriers: signals land before a meeting that shows them.
  if constexpr (kCluster > 1) meet<(CLUSTER_M * CLUSTER_N > 1)>();
}

// out[i] = sum of partials[split][i] over the splits.
extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float* partials, ELEMENT* out, int64 count, int splits) {
  const int64 at = 4 * (blockIdx.x * 256ll + threadIdx.x);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (at >= count) return;
  store_rounded(out + at, sum_from_first_split<4, 0>(partials, at, count, {0, splits, 1}));
}
