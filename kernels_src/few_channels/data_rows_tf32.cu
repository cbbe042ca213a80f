// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_top + r, v = j*STRIDE_X - pad_left + s, for
// CHANNELS <= 4 channels in float32, by products of tf32: a product, then col2im along rows.
//
// Strips, warps and s2d blocks are those of few_channels/data_rows.cu. Columns of the product are taps (s, c), for each
// filter row r on its own, or of all rows side by side if PACKED: accumulators then move up from lane to lane. Elements
// are cut to tf32 if PRODUCTS is 1; if it is 3 they are split in two and all products but that of the small parts are
// added. Tensor cores truncate running accumulators: those of CHUNK steps of 8 filters are short; they are added to the
// others rounding to nearest. Filters stay in registers as they are multiplied, or in shared memory as they are if
// SHARED_FILTERS. Grid: strips, times column tiles, times images.
#include "few_channels/row_streaming.cuh"
#include "common/mma_tf32.cuh"

#if !defined(PRODUCTS) || !defined(PACKED) || !defined(CHUNK) || !defined(SHARED_FILTERS)
#error "define PRODUCTS, PACKED, CHUNK and SHARED_FILTERS"
#endif
static_assert(sizeof(ELEMENT) == 4 && (PRODUCTS == 1 || PRODUCTS == 3),
              "PRODUCTS is 1, or 3 for float32 split in two tf32");

// The product: steps of 8 filters, groups of filter rows in blocks of 8 taps, and a warp's part of both.
constexpr int kKSteps = round_up(ceil_div(FILTERS, 8), WARPS_K), kWarpKSteps = kKSteps / WARPS_K;
constexpr int kRowTaps = FILTER_X * CHANNELS, kProductTaps = round_up(kRowTaps, 2);
constexpr int kRowGroups = PACKED ? 1 : FILTER_Y, kRowGroupTaps = PACKED ? FILTER_Y * kProductTaps : kRowTaps;
constexpr int kTapBlocks = ceil_div(kRowGroupTaps, 8), kWarpTaps = kTapBlocks / WARPS_N,
              kBlocks = kRowGroups * kWarpTaps;
static_assert(kTapBlocks % WARPS_N == 0 && kWarpKSteps % CHUNK == 0,
              "WARPS_N divides the blocks of taps, and CHUNK the K steps of a warp");
static_assert(!PACKED || WARPS_N == 1 || STRIDE_Y >= FILTER_Y,
              "PACKED accumulators move up within a warp: one warp along N");
// Blocks of taps whose products a warp computes side by side, so that none waits for another.
constexpr int kBlocksAtOnce = PRODUCTS == 1 || BLOCKS >= 3 ? 1 : 2;

// A staged row: columns of filters if CHANNELS_LAST, an odd number of 16-byte words from one to the next, so that the
// eight that a matrix is read from meet every bank once; else filters of columns, 8 modulo 32 words from one to the
// next, so that 4 filters of 8 columns do.
constexpr int kPitch = CHANNELS_LAST ? 32 * kKSteps + 16 : 4 * (round_up(COLUMNS - 8, 32) + 8);
constexpr int kRowBytes = (CHANNELS_LAST ? COLUMNS : 8 * kKSteps) * kPitch;
constexpr int kFragments = SHARED_FILTERS ? kKSteps * kRowGroups * kTapBlocks : 0, kFragmentsAt = STAGES * kRowBytes;
// Products on their way to be added: for each slice of the filters and complete row of dx, taps of columns. The pitch
// is as in few_channels/data_rows.cu.
constexpr int kProductPitch = round_up(COLUMNS - 12, 32) + 12;
constexpr int kSliceTaps = kCompleteRows * kProductTaps, kProductFloats = WARPS_K * kSliceTaps * kProductPitch;
constexpr int kProductAt = kFragmentsAt + 256 * kFragments;
static_assert(SHARED_BYTES == kProductAt + 8 * kProductFloats,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// A fragment of the filters for products: the nearest tf32 or the element, and what that leaves.
struct Fragment {
  unsigned big[2], small[2];
};
using Filters = Fragment[SHARED_FILTERS ? 1 : kWarpKSteps][SHARED_FILTERS ? 1 : kBlocks];
using Accumulators = float[BLOCKS][kBlocks][4];

// Of filter k the element that a column of a group of the product has: zero beyond the filters and the taps.
__device__ __forceinline__ float filter_at(const float* __restrict__ w, int k, int group, int column) {
  const int r = PACKED ? column / kProductTaps : group, tap = PACKED ? column % kProductTaps : column;
  const int at = CHANNELS_LAST ? r * kRowTaps + tap : (tap % CHANNELS * FILTER_Y + r) * FILTER_X + tap / CHANNELS;
  return tap < kRowTaps && r < FILTER_Y && k < FILTERS ? w[k * kTaps + at] : 0.0f;
}

// Lays out the filters as the fragments of the product.
__device__ __forceinline__ void stage_filters(unsigned char* to, const float* __restrict__ w) {
#pragma unroll 4
  for (int i = threadIdx.x; i < 32 * kFragments; i += kThreads) {
    const int lane = i % 32, block = i / 32 % kTapBlocks, group = i / 32 / kTapBlocks % kRowGroups;
    const int k = i / 32 / kTapBlocks / kRowGroups * 8 + lane % 4, column = 8 * block + lane / 4;
    *reinterpret_cast<Vector<float, 2>*>(to + 8 * i) = {filter_at(w, k, group, column),
                                                        filter_at(w, k + 4, group, column)};
  }
}

__device__ __forceinline__ Fragment fragment_of(float low, float high) {
  Fragment to = {{__float_as_uint(low), __float_as_uint(high)}};
  if constexpr (PRODUCTS == 3) {
    split_tf32(low, to.big[0], to.small[0]);
    split_tf32(high, to.big[1], to.small[1]);
  }
  return to;
}

__device__ __forceinline__ void load_filters(Filters& filters, const float* __restrict__ w, const WarpCoord& coord) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kWarpKSteps; ++i)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int k = 8 * (coord.k * kWarpKSteps + i) + lane % 4;
      const int group = b / kWarpTaps, column = 8 * (coord.n * kWarpTaps + b % kWarpTaps) + lane / 4;
      filters[i][b] = fragment_of(filter_at(w, k, group, column), filter_at(w, k + 4, group, column));
    }
}

// `fragments` has the fragments of the warp's steps, if they are in shared memory.
__device__ __forceinline__ Fragment read_filters(const Filters& filters, const unsigned char* fragments, int step,
                                                 int b, const WarpCoord& coord) {
  if constexpr (SHARED_FILTERS) {
    const int block = (step * kRowGroups + b / kWarpTaps) * kTapBlocks + coord.n * kWarpTaps + b % kWarpTaps;
    const auto two = *reinterpret_cast<const Vector<float, 2>*>(fragments + 256 * block + threadIdx.x % 32 * 8);
    return fragment_of(two.at[0], two.at[1]);
  } else {
    return filters[step][b];
  }
}

// A fragment of dy, 16 columns of 8 filters: `from` is the lane's row of a matrix, or its first element.
__device__ __forceinline__ void read_outputs(unsigned (&to)[4], const unsigned char* from) {
  if constexpr (CHANNELS_LAST) {
    load_matrices(to, static_cast<unsigned>(__cvta_generic_to_shared(from)));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = *reinterpret_cast<const unsigned*>(from + i / 2 * 4 * kPitch + i % 2 * 32);
  }
}

// Adds the products of CHUNK steps.
__device__ __forceinline__ void multiply_chunk(Accumulators& acc, const Filters& filters,
                                               const unsigned char* fragments,
                                               const unsigned char* const (&rows)[BLOCKS], int first,
                                               const WarpCoord& coord) {
  unsigned outputs[CHUNK][BLOCKS][4], small_outputs[CHUNK][BLOCKS][4];
#pragma unroll
  for (int i = 0; i < CHUNK; ++i)
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      read_outputs(outputs[i][b], rows[b] + (first + i) * (CHANNELS_LAST ? 32 : 8 * kPitch));
      if constexpr (PRODUCTS == 3)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          split_tf32(__uint_as_float(outputs[i][b][e]), outputs[i][b][e], small_outputs[i][b][e]);
    }
#pragma unroll
  for (int t = 0; t < kBlocks; t += kBlocksAtOnce) {
    Fragment taps[CHUNK][kBlocksAtOnce];
    float chunk[kBlocksAtOnce][BLOCKS][4] = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
#pragma unroll
      for (int u = 0; u < kBlocksAtOnce && t + u < kBlocks; ++u)
        taps[i][u] = read_filters(filters, fragments, first + i, t + u, coord);
    // The small products first, so that little is truncated.
#pragma unroll
    for (int turn = PRODUCTS == 3 ? 0 : 2; turn < 3; ++turn)
#pragma unroll
      for (int i = 0; i < CHUNK; ++i)
#pragma unroll
        for (int u = 0; u < kBlocksAtOnce && t + u < kBlocks; ++u)
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b) {
            const auto& two = turn == 1 ? taps[i][u].small : taps[i][u].big;
            multiply_add<float>(PRODUCTS == 3 ? chunk[u][b] : acc[b][t + u],
                                turn == 0 ? small_outputs[i][b] : outputs[i][b], two[0], two[1]);
          }
    if constexpr (PRODUCTS == 3)
#pragma unroll
      for (int u = 0; u < kBlocksAtOnce && t + u < kBlocks; ++u)
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[b][t + u][e] += chunk[u][b][e];
  }
}

// Adds the products of a staged row. A warp that has a block less multiplies the last of all once more.
__device__ __forceinline__ void multiply(Accumulators& acc, const Filters& filters, const unsigned char* fragments,
                                         const unsigned char* row, const WarpCoord& coord) {
  const int lane = threadIdx.x % 32, step = coord.k * kWarpKSteps;
  const unsigned char* rows[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const int block = 16 * min(b * WARPS_M + coord.m, COLUMNS / 16 - 1);
    rows[b] = row + (CHANNELS_LAST ? (block + lane % 16) * kPitch + lane / 16 * 16 + 32 * step
                                   : (8 * step + lane % 4) * kPitch + 4 * (block + lane / 4));
  }
  fragments += 256 * step * kRowGroups * kTapBlocks;
#pragma unroll(SHARED_FILTERS ? 1 : kWarpKSteps)
  for (int i = 0; i < kWarpKSteps; i += CHUNK) multiply_chunk(acc, filters, fragments, rows, i, coord);
}

// Writes the accumulators of the rows of dx that are complete.
__device__ __forceinline__ void stage_products(float* products, const Accumulators& acc, const WarpCoord& coord) {
  constexpr int kCompleteGroups = PACKED ? 1 : kCompleteRows, kColumns = PACKED ? kSliceTaps : kProductTaps;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    if (!has_block(b, coord)) break;
#pragma unroll
    for (int t = 0; t < kCompleteGroups * kWarpTaps; ++t) {
      const int column = 8 * (coord.n * kWarpTaps + t % kWarpTaps) + lane % 4 * 2;
      if (8 * kTapBlocks > kColumns && column >= kColumns) continue;
      const int tap = coord.k * kSliceTaps + t / kWarpTaps * kProductTaps + column;
      float* const at = products + tap * kProductPitch + 16 * (b * WARPS_M + coord.m) + lane / 4;
      at[0] = acc[b][t][0];
      at[kProductPitch] = acc[b][t][1];
      at[8] = acc[b][t][2];
      at[kProductPitch + 8] = acc[b][t][3];
    }
  }
}

// Makes way for the next row of dy.
__device__ __forceinline__ void shift_accumulators(Accumulators& acc) {
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int t = 0; t < kBlocks; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int from = t + STRIDE_Y * kWarpTaps;
        acc[b][t][e] = from < kBlocks ? acc[b][from < kBlocks ? from : 0][e] : 0.0f;
      }
}

// The same where filter rows lie side by side: a lane has pairs of columns, four lanes those of a block.
__device__ __forceinline__ void shift_packed_accumulators(Accumulators& acc) {
  constexpr int kShift = STRIDE_Y * kProductTaps / 2, kStay = FILTER_Y * kProductTaps / 2 - kShift;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float moved[kBlocks + 1] = {};
#pragma unroll
      for (int t = kShift / 4; t < kBlocks; ++t)
        moved[t] = kShift % 4 == 0 ? acc[b][t][e] : __shfl_sync(0xffffffffu, acc[b][t][e], lane + kShift % 4, 4);
#pragma unroll
      for (int t = 0; t < kBlocks; ++t) {
        const int from = min(t + kShift / 4, kBlocks);
        const float here = moved[from], next = moved[min(from + 1, kBlocks)];
        acc[b][t][e] = 4 * t + lane < kStay ? (lane + kShift % 4 < 4 ? here : next) : 0.0f;
      }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_data_rows_tf32(const float* __restrict__ dy, const float* __restrict__ w, float* __restrict__ dx,
                                const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Strip strip = strip_of(shape);

  // Rows above the first of dy meet nothing.
  int row = max(strip.begin - kS2dY + 1, 0);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage)
    load_row<kPitch>(shared + stage * kRowBytes, dy, shape, strip, row + stage, row + stage < strip.end);
  clear_rest<8 * kKSteps, kPitch, kRowBytes>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const WarpCoord coord = {warp % WARPS_M, warp / WARPS_M % WARPS_N, warp / (WARPS_M * WARPS_N)};
  unsigned char* const fragments = shared + kFragmentsAt;
  Filters filters;
  if constexpr (SHARED_FILTERS)
    stage_filters(fragments, w);
  else
    load_filters(filters, w, coord);

  float* const products = reinterpret_cast<float*>(shared + kProductAt);
  Accumulators acc = {};
  int stage = 0, half = 0;
#pragma unroll 1
  for (; row < strip.end; ++row) {
    wait_for_copies<STAGES - 2>();
    // The row has arrived, and the filters; every warp has read the row, or the products, that are overwritten next,
    // and has written those of the row before.
    __syncthreads();
    const int next = row + STAGES - 1;
    load_row<kPitch>(shared + (stage == 0 ? STAGES - 1 : stage - 1) * kRowBytes, dy, shape, strip, next,
                     next < strip.end);
    if (row >= 0 && row < shape.out_height) multiply(acc, filters, fragments, shared + stage * kRowBytes, coord);
    if (row >= strip.begin) stage_products(products + half * kProductFloats, acc, coord);
    if constexpr (PACKED && STRIDE_Y < FILTER_Y)
      shift_packed_accumulators(acc);
    else
      shift_accumulators(acc);
    if (row > strip.begin)
      col2im<kProductPitch, kProductTaps, kSliceTaps>(dx, shape, products + (half ^ 1) * kProductFloats, strip,
                                                      row - 1);
    half ^= 1;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  __syncthreads();  // the last row's products are complete
  col2im<kProductPitch, kProductTaps, kSliceTaps>(dx, shape, products + (half ^ 1) * kProductFloats, strip,
                                                  strip.end - 1);
}
