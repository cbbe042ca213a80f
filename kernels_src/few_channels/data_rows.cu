// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_top + r, v = j*STRIDE_X - pad_left + s, for
// CHANNELS <= 4 channels, on tensor cores with float32 accumulators: a matrix product, then col2im along rows.
//
// Row streaming: a block goes down a strip of COLUMNS columns of dy, whose rows stream through STAGES buffers, in the
// tensor's layout. For each row of dy and filter row r: M is outputs j, N is taps (s, c), K is filters. Accumulators of
// FILTER_Y rows of dx are in registers and move up by STRIDE_Y from row to row of dy. Those of complete rows of dx go
// through shared memory, where threads add the taps s that meet a pixel (col2im). Fragments of filters stay in
// registers. WARPS_M warps share the columns, in BLOCKS blocks of 16, WARPS_N the taps, WARPS_K the filters. A block
// completes pixels of space-to-depth (s2d) blocks, STRIDE pixels each: block I of dx meets rows I, I - 1, ... of dy.
// Grid: strips, times column tiles, times images.
#include "few_channels/filters.cuh"
#include "few_channels/row_streaming.cuh"
#include "common/mma.cuh"

// The product: steps of 16 filters, blocks of 8 taps, and a warp's part of both.
constexpr int kKSteps = ceil_div(FILTERS, 16), kWarpKSteps = ceil_div(kKSteps, WARPS_K);
constexpr int kRowTaps = FILTER_X * CHANNELS, kTapBlocks = ceil_div(kRowTaps, 8), kWarpTaps = kTapBlocks / WARPS_N;
static_assert(kTapBlocks % WARPS_N == 0, "WARPS_N divides the blocks of taps");

// A staged row: columns of filters if CHANNELS_LAST, else filters of columns; an odd number of 16-byte words from one
// to the next, so that the eight that a matrix is read from meet every bank once.
constexpr int kPitch = CHANNELS_LAST ? 32 * kKSteps + 16 : 2 * COLUMNS + 16;
constexpr int kRowBytes = (CHANNELS_LAST ? COLUMNS : 16 * kKSteps) * kPitch;
// Products on their way to be added: for each complete row of dx and slice of the filters, taps of columns. The pitch
// is 12 modulo 32: the 4 x 8 lanes that write 2 taps of 8 columns meet every bank once, and so do, for up to three
// channels, those that read neighbouring columns.
constexpr int kProductTaps = round_up(kRowTaps, 2), kProductPitch = round_up(COLUMNS - 12, 32) + 12;
constexpr int kProductFloats = kCompleteRows * WARPS_K * kProductTaps * kProductPitch;
// Before the first products the same memory holds the filters as they come, and as fragments.
constexpr int kRawBytes = round_up(2 * FILTERS * kTaps, 16), kFragments = kKSteps * FILTER_Y * kTapBlocks;
constexpr int kProductAt = STAGES * kRowBytes;
static_assert(SHARED_BYTES == kProductAt + maximum(8 * kProductFloats, kRawBytes + 256 * kFragments),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// Lays out the filters as the fragments of the product, zeros beyond the filters and the taps.
__device__ __forceinline__ void stage_filters(unsigned char* to, const ELEMENT* raw) {
  for (int i = threadIdx.x; i < 32 * kFragments; i += kThreads) {
    const int lane = i % 32, block = i / 32 % kTapBlocks, r = i / 32 / kTapBlocks % FILTER_Y;
    const int first_k = i / 32 / kTapBlocks / FILTER_Y * 16 + lane % 4 * 2, tap = 8 * block + lane / 4;
    const int at = CHANNELS_LAST ? r * kRowTaps + tap : (tap % CHANNELS * FILTER_Y + r) * FILTER_X + tap / CHANNELS;
    Vector<ELEMENT, 4> values;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = first_k + e / 2 * 8 + e % 2;
      values.at[e] = tap < kRowTaps && k < FILTERS ? raw[k * kTaps + at] : convert<ELEMENT>(0.0f);
    }
    *reinterpret_cast<Vector<ELEMENT, 4>*>(to + 8 * i) = values;
  }
}

using Filters = unsigned[kWarpKSteps][FILTER_Y][kWarpTaps][2];
using Accumulators = float[BLOCKS][FILTER_Y][kWarpTaps][4];

__device__ __forceinline__ void read_filters(Filters& filters, const unsigned char* from, const WarpCoord& coord) {
#pragma unroll
  for (int i = 0; i < kWarpKSteps; ++i) {
    const int step = i * WARPS_K + coord.k;
#pragma unroll
    for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
      for (int b = 0; b < kWarpTaps; ++b) {
        const int fragment = (min(step, kKSteps - 1) * FILTER_Y + r) * kTapBlocks + coord.n * kWarpTaps + b;
        const auto two = *reinterpret_cast<const Vector<unsigned, 2>*>(from + 256 * fragment + threadIdx.x % 32 * 8);
        filters[i][r][b][0] = two.at[0];
        filters[i][r][b][1] = two.at[1];
      }
  }
}

// Adds the products of a staged row.
__device__ __forceinline__ void multiply(Accumulators& acc, const Filters& filters, unsigned row,
                                         const WarpCoord& coord) {
  const int lane = threadIdx.x % 32;
  const unsigned first =
      row + (CHANNELS_LAST ? (16 * coord.m + lane % 16) * kPitch + lane / 16 * 16 + 32 * coord.k
                           : (16 * coord.k + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16 + 32 * coord.m);
  constexpr int kBlockBytes = WARPS_M * (CHANNELS_LAST ? 16 * kPitch : 32);
  constexpr int kStepBytes = WARPS_K * (CHANNELS_LAST ? 32 : 16 * kPitch);
#pragma unroll
  for (int i = 0; i < kWarpKSteps; ++i) {
    if (kKSteps % WARPS_K != 0 && i * WARPS_K + coord.k >= kKSteps) break;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      if (!has_block(b, coord)) break;
      unsigned outputs[4];
      if (CHANNELS_LAST)
        load_matrices(outputs, first + b * kBlockBytes + i * kStepBytes);
      else
        load_transposed(outputs, first + b * kBlockBytes + i * kStepBytes);
#pragma unroll
      for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
        for (int t = 0; t < kWarpTaps; ++t)
          multiply_add<ELEMENT>(acc[b][r][t], outputs, filters[i][r][t][0], filters[i][r][t][1]);
    }
  }
}

// Writes the accumulators of the rows of dx that are complete.
__device__ __forceinline__ void stage_products(float* products, const Accumulators& acc, const WarpCoord& coord) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    if (!has_block(b, coord)) break;
#pragma unroll
    for (int e = 0; e < kCompleteRows; ++e)
#pragma unroll
      for (int t = 0; t < kWarpTaps; ++t) {
        const int tap = 8 * (coord.n * kWarpTaps + t) + lane % 4 * 2;
        float* const at = products + ((e * WARPS_K + coord.k) * kProductTaps + tap) * kProductPitch +
                          16 * (b * WARPS_M + coord.m) + lane / 4;
        if (kProductTaps % 8 != 0 && tap >= kProductTaps) continue;
        at[0] = acc[b][e][t][0];
        at[kProductPitch] = acc[b][e][t][1];
        at[8] = acc[b][e][t][2];
        at[kProductPitch + 8] = acc[b][e][t][3];
      }
  }
}

// Makes way for the next row of dy.
__device__ __forceinline__ void shift_accumulators(Accumulators& acc) {
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
      for (int t = 0; t < kWarpTaps; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[b][r][t][i] = r + STRIDE_Y < FILTER_Y ? acc[b][r + STRIDE_Y][t][i] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_data_rows(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ dx,
                           const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Strip strip = strip_of(shape);

  float* const products = reinterpret_cast<float*>(shared + kProductAt);
  unsigned char* const raw = shared + kProductAt;
  load_filters<kThreads>(static_cast<unsigned>(__cvta_generic_to_shared(raw)), w, FILTERS * kTaps);
  // Rows above the first of dy meet nothing.
  int row = max(strip.begin - kS2dY + 1, 0);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage)
    load_row<kPitch>(shared + stage * kRowBytes, dy, shape, strip, row + stage, row + stage < strip.end);
  clear_rest<16 * kKSteps, kPitch, kRowBytes>(shared);
  wait_for_copies<STAGES - 1>();
  __syncthreads();  // the filters have arrived
  stage_filters(raw + kRawBytes, reinterpret_cast<const ELEMENT*>(raw));
  __syncthreads();  // the filters are laid out

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const WarpCoord coord = {warp % WARPS_M, warp / WARPS_M % WARPS_N, warp / (WARPS_M * WARPS_N)};
  Filters filters;
  read_filters(filters, raw + kRawBytes, coord);
  Accumulators acc = {};
  const unsigned base_address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  int stage = 0, half = 0;
#pragma unroll 1
  for (; row < strip.end; ++row) {
    wait_for_copies<STAGES - 2>();
    // The row has arrived; every warp has read the row and the filters, or the products, that are overwritten next, and
    // has written those of the row before.
    __syncthreads();
    const int next = row + STAGES - 1;
    load_row<kPitch>(shared + (stage == 0 ? STAGES - 1 : stage - 1) * kRowBytes, dy, shape, strip, next,
                     next < strip.end);
    if (row >= 0 && row < shape.out_height) multiply(acc, filters, base_address + stage * kRowBytes, coord);
    if (row >= strip.begin) stage_products(products + half * kProductFloats, acc, coord);
    shift_accumulators(acc);
    if (row > strip.begin)
      col2im<kProductPitch, WARPS_K * kProductTaps, kProductTaps>(dx, shape, products + (half ^ 1) * kProductFloats,
                                                                  strip, row - 1);
    half ^= 1;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  __syncthreads();  // the last row's products are complete
  col2im<kProductPitch, WARPS_K * kProductTaps, kProductTaps>(dx, shape, products + (half ^ 1) * kProductFloats, strip,
                                                              strip.end - 1);
}
