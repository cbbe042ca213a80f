// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_y + r, v = j*STRIDE_X - pad_x + s, for
// CHANNELS <= 4 channels, on tensor cores with float32 sums: a product, then col2im along rows.
//
// A block goes down a strip of COLUMNS columns of dy, whose rows stream through STAGES buffers, in the tensor's layout.
// A row is multiplied by all filters: product rows are outputs j, columns taps (s, c), for each filter row r, its depth
// is filters. Sums of FILTER_Y rows of dx are in registers and move up by STRIDE_Y from row to row of dy. Those of
// complete rows of dx go through shared memory, where threads add the taps s that meet a pixel. Fragments of filters
// stay in registers. WARPS_M warps share the columns, in BLOCKS blocks of 16, WARPS_N the taps, WARPS_K the filters.
// A block completes pixels of `cells`, runs of STRIDE pixels: cell I of dx meets rows I, I - 1, ... of dy.
// Grid: strips, times column tiles, times images.
#include "common/column_copies.cuh"
#include "common/divisor.cuh"
#include "common/mma.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(COLUMNS) || !defined(COLUMN_STEP) || !defined(BLOCKS)
#error "define STRIDE_Y, STRIDE_X, COLUMNS, COLUMN_STEP and BLOCKS"
#endif
#if !defined(WARPS_M) || !defined(WARPS_N) || !defined(WARPS_K) || !defined(STAGES) || !defined(CHANNELS_LAST)
#error "define WARPS_M, WARPS_N, WARPS_K, STAGES and CHANNELS_LAST"
#endif
#if !defined(IN_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define IN_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kThreads = 32 * WARPS_M * WARPS_N * WARPS_K, kTaps = CHANNELS * FILTER_Y * FILTER_X;
static_assert(STAGES >= 2, "a row is loaded while another is read");
static_assert(COLUMNS % 16 == 0 && COLUMNS <= 16 * BLOCKS * WARPS_M, "the warps have all columns, in blocks of 16");

// Cells along an axis that meet an output, and rows of dx that a row of dy completes and that meet it.
constexpr int kCellsY = ceil_div(FILTER_Y, STRIDE_Y), kCellsX = ceil_div(FILTER_X, STRIDE_X);
constexpr int kDone = STRIDE_Y < FILTER_Y ? STRIDE_Y : FILTER_Y;
static_assert(COLUMN_STEP + kCellsX - 1 <= COLUMNS || COLUMN_STEP == 0,
              "tiles overlap by what cells meet, but a single");

// The product: steps of 16 filters, blocks of 8 taps, and a warp's share of both.
constexpr int kSteps = ceil_div(FILTERS, 16), kWarpSteps = ceil_div(kSteps, WARPS_K);
constexpr int kRowTaps = FILTER_X * CHANNELS, kTapBlocks = ceil_div(kRowTaps, 8), kWarpTaps = kTapBlocks / WARPS_N;
static_assert(kTapBlocks % WARPS_N == 0, "warps have equal shares of the taps");

// A staged row: columns of filters if CHANNELS_LAST, else filters of columns; an odd number of 16-byte words from one
// to the next, so that the eight that a matrix is read from meet every bank once.
constexpr int kPitch = CHANNELS_LAST ? 32 * kSteps + 16 : 2 * COLUMNS + 16;
constexpr int kRowBytes = (CHANNELS_LAST ? COLUMNS : 16 * kSteps) * kPitch;
// Products on their way to be added: for each complete row of dx and share of the filters, taps of columns. The pitch
// is 12 modulo 32: the 4 x 8 lanes that write 2 taps of 8 columns meet every bank once, and so do, for up to three
// channels, those that read neighbouring columns.
constexpr int kProductTaps = round_up(kRowTaps, 2), kProductPitch = round_up(COLUMNS - 12, 32) + 12;
constexpr int kProductFloats = kDone * WARPS_K * kProductTaps * kProductPitch;
// Before the first products the same memory holds the filters as they come, and as fragments.
constexpr int kRawBytes = round_up(2 * FILTERS * kTaps, 16), kFragments = kSteps * FILTER_Y * kTapBlocks;
constexpr int kProductAt = STAGES * kRowBytes;
static_assert(SHARED_BYTES == kProductAt + maximum(8 * kProductFloats, kRawBytes + 256 * kFragments),
              "the host and the kernel agree on shared memory");

__device__ __forceinline__ void load_filters(unsigned raw, const ELEMENT* filters) {
  constexpr int kCount = FILTERS * kTaps;
  for (int i = 8 * threadIdx.x; i < kCount; i += 8 * kThreads)
    copy_some(raw + 2 * i, filters + i, min(16, 2 * (kCount - i)));
  commit_copies();
}

// Lays out the filters as the fragments of the product, zeros beyond the filters and the taps.
__device__ __forceinline__ void spread_filters(unsigned char* to, const ELEMENT* raw) {
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

// What a block computes: of `image`, columns of dy from `column` on, cells from `first_cell` to before `end_cell`.
struct Strip {
  int image, column, first_cell, end_cell;
};
struct Size {
  int height, width;
};

// Starts to copy a row of dy, as one group, and nothing if there is none. Columns that dy lacks stay as they are: no
// cell reads their products.
__device__ __forceinline__ void load_row(unsigned char* to, const ELEMENT* __restrict__ dy, const Size& size,
                                         const Strip& strip, int row, bool wanted) {
  if (wanted && row >= 0 && row < size.height) {
    const ELEMENT* const image = dy + strip.image * FILTERS * size.height * size.width;
    const int at = row * size.width + strip.column, columns = min(COLUMNS, size.width - strip.column);
    if constexpr (CHANNELS_LAST)
      copy_columns<kThreads, COLUMNS, FILTERS, IN_VECTOR, kPitch>(to, image + at * FILTERS, 0, columns);
    else
      copy_planes<kThreads, COLUMNS, FILTERS, IN_VECTOR, kPitch>(to, image + at, size.height * size.width, columns);
  }
  commit_copies();
}

// Clears what is staged beyond the last filter, once: rows that are loaded leave it as it is.
__device__ __forceinline__ void clear_rest(unsigned char* stages) {
  constexpr int kRest = 16 * kSteps - FILTERS, kSome = maximum(1, kRest);
  if constexpr (kRest > 0)
    for (int i = threadIdx.x; i < STAGES * kRest * COLUMNS; i += kThreads) {
      const int column = i % COLUMNS, k = FILTERS + i / COLUMNS % kSome;
      unsigned char* const stage = stages + i / COLUMNS / kSome * kRowBytes;
      const int at = CHANNELS_LAST ? column * kPitch + 2 * k : k * kPitch + 2 * column;
      *reinterpret_cast<ELEMENT*>(stage + at) = convert<ELEMENT>(0.0f);
    }
}

using Filters = unsigned[kWarpSteps][FILTER_Y][kWarpTaps][2];
using Sums = float[BLOCKS][FILTER_Y][kWarpTaps][4];

// A warp's part of the product.
struct Part {
  int m, n, k;
};

__device__ __forceinline__ void read_filters(Filters& filters, const unsigned char* from, const Part& part) {
#pragma unroll
  for (int i = 0; i < kWarpSteps; ++i) {
    const int step = i * WARPS_K + part.k;
#pragma unroll
    for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
      for (int b = 0; b < kWarpTaps; ++b) {
        const int fragment = (min(step, kSteps - 1) * FILTER_Y + r) * kTapBlocks + part.n * kWarpTaps + b;
        const auto two = *reinterpret_cast<const Vector<unsigned, 2>*>(from + 256 * fragment + threadIdx.x % 32 * 8);
        filters[i][r][b][0] = two.at[0];
        filters[i][r][b][1] = two.at[1];
      }
  }
}

__device__ __forceinline__ bool has_block(int b, const Part& part) {
  return COLUMNS == 16 * BLOCKS * WARPS_M || b * WARPS_M + part.m < COLUMNS / 16;
}

// Adds the products of a staged row.
__device__ __forceinline__ void multiply(Sums& sums, const Filters& filters, unsigned row, const Part& part) {
  const int lane = threadIdx.x % 32;
  const unsigned first =
      row + (CHANNELS_LAST ? (16 * part.m + lane % 16) * kPitch + lane / 16 * 16 + 32 * part.k
                           : (16 * part.k + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16 + 32 * part.m);
  constexpr int kBlockBytes = WARPS_M * (CHANNELS_LAST ? 16 * kPitch : 32);
  constexpr int kStepBytes = WARPS_K * (CHANNELS_LAST ? 32 : 16 * kPitch);
#pragma unroll
  for (int i = 0; i < kWarpSteps; ++i) {
    if (kSteps % WARPS_K != 0 && i * WARPS_K + part.k >= kSteps) break;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      if (!has_block(b, part)) break;
      unsigned outputs[4];
      if (CHANNELS_LAST)
        load_matrices(outputs, first + b * kBlockBytes + i * kStepBytes);
      else
        load_transposed(outputs, first + b * kBlockBytes + i * kStepBytes);
#pragma unroll
      for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
        for (int t = 0; t < kWarpTaps; ++t)
          multiply_add<ELEMENT>(sums[b][r][t], outputs, filters[i][r][t][0], filters[i][r][t][1]);
    }
  }
}

// Writes the sums of the rows of dx that are complete.
__device__ __forceinline__ void put_products(float* products, const Sums& sums, const Part& part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    if (!has_block(b, part)) break;
#pragma unroll
    for (int e = 0; e < kDone; ++e)
#pragma unroll
      for (int t = 0; t < kWarpTaps; ++t) {
        const int tap = 8 * (part.n * kWarpTaps + t) + lane % 4 * 2;
        float* const at = products + ((e * WARPS_K + part.k) * kProductTaps + tap) * kProductPitch +
                          16 * (b * WARPS_M + part.m) + lane / 4;
        if (kProductTaps % 8 != 0 && tap >= kProductTaps) continue;
        at[0] = sums[b][e][t][0];
        at[kProductPitch] = sums[b][e][t][1];
        at[8] = sums[b][e][t][2];
        at[kProductPitch + 8] = sums[b][e][t][3];
      }
  }
}

// Makes way for the next row of dy.
__device__ __forceinline__ void move_up(Sums& sums) {
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
      for (int t = 0; t < kWarpTaps; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[b][r][t][i] = r + STRIDE_Y < FILTER_Y ? sums[b][r + STRIDE_Y][t][i] : 0.0f;
}

// Where a strip's results go, and the columns of dy that there are.
struct Target {
  ELEMENT* dx;
  Size size;
  int pad_y, pad_x, out_width;
};

// Adds the products that meet the pixels of a row of cells, and writes the pixels. A thread has a cell of a row of dx,
// whose taps are known when this is compiled, but a pixel where cells are wide: stores of a warp would be far apart.
__device__ __forceinline__ void fold(const Target& to, const float* products, const Strip& strip, int row) {
  constexpr int kPixels = STRIDE_X <= 2 ? STRIDE_X : 1, kParts = STRIDE_X / kPixels;
  const int count = kParts * (strip.end_cell - strip.first_cell);
#pragma unroll 1
  for (int i = threadIdx.x; i < STRIDE_Y * count; i += kThreads) {
    int e = 0;
#pragma unroll
    for (int other = 1; other < STRIDE_Y; ++other) e += i >= other * count;
    const int part = i - e * count, cell = strip.first_cell + part / kParts, begin = part % kParts;
    const int h = row * STRIDE_Y + e - to.pad_y;
    if (static_cast<unsigned>(h) >= static_cast<unsigned>(to.size.height)) continue;
    float sums[kPixels][CHANNELS] = {};
    const float* const from = products + e * WARPS_K * kProductTaps * kProductPitch + cell - strip.column;
#pragma unroll
    for (int q = 0; q < kCellsX; ++q) {
      if (static_cast<unsigned>(cell - q) >= static_cast<unsigned>(to.out_width) || e >= FILTER_Y) continue;
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        const int s = begin + p + q * STRIDE_X;
        if (s >= FILTER_X) continue;
#pragma unroll
        for (int share = 0; share < WARPS_K; ++share)
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c)
            sums[p][c] += from[(share * kProductTaps + s * CHANNELS + c) * kProductPitch - q];
      }
    }
    const int first = cell * STRIDE_X + begin - to.pad_x, rest = CHANNELS_LAST ? CHANNELS : 1;
    ELEMENT* const dx =
        to.dx +
        (CHANNELS_LAST ? strip.image * to.size.height + h : strip.image * CHANNELS * to.size.height + h) *
            to.size.width * rest +
        first * rest;
    const int plane = to.size.height * to.size.width;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (static_cast<unsigned>(first + p) >= static_cast<unsigned>(to.size.width)) continue;
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) dx[p * rest + c * (CHANNELS_LAST ? 1 : plane)] = convert<ELEMENT>(sums[p][c]);
    }
  }
}

#define DIVISOR_PARAMETERS(d) int d, unsigned d##_multiplier, int d##_shift
#define DIVISOR(d) {d, d##_multiplier, d##_shift}

// The pixels are in cells of rows from `first_row` to before `end_row`, and columns likewise; a strip has `rows` rows
// of them. The first tile of columns of dy begins at `base`.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    first_layer_data_rows(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ dx,
                          int height, int width, int out_height, int out_width, int pad_y, int pad_x, int first_row,
                          int end_row, int first_column, int end_column, int base, int rows,
                          DIVISOR_PARAMETERS(image_strips), DIVISOR_PARAMETERS(column_tiles)) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Divisor by_image = DIVISOR(image_strips), by_column = DIVISOR(column_tiles);
  const int image = static_cast<int>(blockIdx.x) / by_image, rank = blockIdx.x - image * image_strips;
  const int strip_rank = rank / by_column, tile = rank - strip_rank * column_tiles;
  const int column = base + tile * COLUMN_STEP, end_cell = column + COLUMN_STEP + kCellsX - 1;
  const Strip strip = {image, column, tile == 0 ? first_column : column + kCellsX - 1,
                       tile + 1 == column_tiles ? end_column : end_cell};
  const int begin = first_row + strip_rank * rows, end = min(begin + rows, end_row);
  const Size out_size = {out_height, out_width};
  const Target target = {dx, {height, width}, pad_y, pad_x, out_width};

  float* const products = reinterpret_cast<float*>(shared + kProductAt);
  unsigned char* const raw = shared + kProductAt;
  load_filters(static_cast<unsigned>(__cvta_generic_to_shared(raw)), w);
  // Rows above the first of dy meet nothing.
  int row = max(begin - kCellsY + 1, 0);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage)
    load_row(shared + stage * kRowBytes, dy, out_size, strip, row + stage, row + stage < end);
  clear_rest(shared);
  wait_for_copies<STAGES - 1>();
  __syncthreads();  // the filters have arrived
  spread_filters(raw + kRawBytes, reinterpret_cast<const ELEMENT*>(raw));
  __syncthreads();  // the filters are laid out

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const Part part = {warp % WARPS_M, warp / WARPS_M % WARPS_N, warp / (WARPS_M * WARPS_N)};
  Filters filters;
  read_filters(filters, raw + kRawBytes, part);
  Sums sums = {};
  const unsigned base_address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  int stage = 0, half = 0;
#pragma unroll 1
  for (; row < end; ++row) {
    wait_for_copies<STAGES - 2>();
    // The row has arrived; every warp has read the row and the filters, or the products, that are overwritten next, and
    // has written those of the row before.
    __syncthreads();
    const int next = row + STAGES - 1;
    load_row(shared + (stage == 0 ? STAGES - 1 : stage - 1) * kRowBytes, dy, out_size, strip, next, next < end);
    if (row >= 0 && row < out_height) multiply(sums, filters, base_address + stage * kRowBytes, part);
    if (row >= begin) put_products(products + half * kProductFloats, sums, part);
    move_up(sums);
    if (row > begin) fold(target, products + (half ^ 1) * kProductFloats, strip, row - 1);
    half ^= 1;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  __syncthreads();  // the last row's products are complete
  fold(target, products + (half ^ 1) * kProductFloats, strip, end - 1);
}
