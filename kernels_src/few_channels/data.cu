// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_top + r, v = j*STRIDE_X - pad_left + s, for
// CHANNELS <= 4 channels, on tensor cores with float32 accumulators.
//
// dx is cut along rows into space-to-depth (s2d) blocks of STRIDE_X pixels, which all meet dy alike: block I meets
// columns I + first ... + TAPS_X - 1 of dy, its pixel e by tap LAST_TAP + e - i*STRIDE_X. Row streaming: a thread block
// goes down a strip of s2d blocks, and rows of dy stream through STAGES buffers, in the tensor's layout. For each row
// of dy and filter row r: M is s2d blocks, N the elements of a block, K is TAPS_X columns of dy with all filters.
// Accumulators of FILTER_Y rows of dx are in registers and move up by STRIDE_Y from row to row of dy; complete rows are
// written from there. Fragments of filters stay in registers, too. WARPS warps share the s2d blocks, BLOCKS times 16
// each. Grid: strips, times tiles of s2d blocks, times images.
#include "few_channels/filters.cuh"
#include "few_channels/row_copies.cuh"
#include "common/divisor.cuh"
#include "common/mma.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTERS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTERS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(TAPS_X) || !defined(LAST_TAP)
#error "define STRIDE_Y, STRIDE_X, TAPS_X and LAST_TAP"
#endif
#if !defined(BLOCKS) || !defined(WARPS) || !defined(STAGES) || !defined(CHANNELS_LAST)
#error "define BLOCKS, WARPS, STAGES and CHANNELS_LAST"
#endif
#if !defined(S2D_BLOCKS) || !defined(IN_VECTOR) || !defined(OUT_VECTOR) || !defined(MIN_BLOCKS) || \
    !defined(SHARED_BYTES)
#error "define S2D_BLOCKS, IN_VECTOR, OUT_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif
#ifndef SHAPE_FIELDS
#error "define SHAPE_FIELDS, as DATA_SHAPE of solvers/few_channels/shapes.py declares them"
#endif

// Rows of dx are taken in groups of STRIDE_Y, the first of which that has any is `first_row` and begins pad_top rows
// later; those before `end_row` have all. A strip has `strip_rows` of them. S2d blocks begin `s2d_left` columns before
// dx, and s2d block 0 meets columns from `first_out_column` on. An image has `image_strips` strips, a row of s2d blocks
// `s2d_tiles` tiles.
struct Shape {
  SHAPE_FIELDS
};

constexpr int kThreads = 32 * WARPS, kTaps = CHANNELS * FILTER_Y * FILTER_X;
static_assert(STAGES >= 2, "STAGES is at least 2: a row is loaded while another is read");
static_assert(S2D_BLOCKS % 16 == 0 && S2D_BLOCKS <= 16 * BLOCKS * WARPS,
              "S2D_BLOCKS is a multiple of 16 that the warps cover");
static_assert(CHANNELS_LAST || TAPS_X == 1, "channels first, matrices begin at every eighth column alone");

// Rows of dy that meet a row of dx, and rows of dx that a row of dy completes and that meet it.
constexpr int kMetY = ceil_div(FILTER_Y, STRIDE_Y), kCompleteRows = STRIDE_Y < FILTER_Y ? STRIDE_Y : FILTER_Y;
// The product: steps of 16 filters, elements of an s2d block in blocks of 8.
constexpr int kKSteps = ceil_div(FILTERS, 16), kElements = STRIDE_X * CHANNELS;
constexpr int kElementBlocks = ceil_div(kElements, 8);

// A staged row: columns of filters if CHANNELS_LAST, else filters of columns; an odd number of 16-byte words from one
// to the next, so that the eight that a matrix is read from meet every bank once.
constexpr int kColumns = S2D_BLOCKS + TAPS_X - 1;
constexpr int kPitch = CHANNELS_LAST ? 32 * kKSteps + 16 : 2 * kColumns + 16;
constexpr int kRowBytes = (CHANNELS_LAST ? kColumns : 16 * kKSteps) * kPitch;
// The filters as they come lie where the last row is staged and beyond, which is loaded when they are laid out.
constexpr int kRawBytes = round_up(2 * FILTERS * kTaps, 16), kFragments = kKSteps * TAPS_X * FILTER_Y * kElementBlocks;
constexpr int kRawAt = (STAGES - 1) * kRowBytes, kFragmentsAt = kRawAt + kRawBytes;
static_assert(SHARED_BYTES == maximum(STAGES * kRowBytes, kFragmentsAt + 256 * kFragments),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// Lays out the filters as the fragments of the product, zeros beyond the filters and where a pixel does not meet a
// column.
__device__ __forceinline__ void stage_filters(unsigned char* to, const ELEMENT* raw) {
  for (int i = threadIdx.x; i < 32 * kFragments; i += kThreads) {
    const int lane = i % 32, block = i / 32 % kElementBlocks, r = i / 32 / kElementBlocks % FILTER_Y;
    const int depth = i / 32 / kElementBlocks / FILTER_Y, column = depth % TAPS_X;
    const int first_k = depth / TAPS_X * 16 + lane % 4 * 2, element = 8 * block + lane / 4;
    const int c = CHANNELS_LAST ? element % CHANNELS : element / STRIDE_X;
    const int pixel = CHANNELS_LAST ? element / CHANNELS : element % STRIDE_X;
    const int s = LAST_TAP + pixel - column * STRIDE_X;
    const int at = CHANNELS_LAST ? (r * FILTER_X + s) * CHANNELS + c : (c * FILTER_Y + r) * FILTER_X + s;
    const bool inside = element < kElements && s >= 0 && s < FILTER_X;
    Vector<ELEMENT, 4> values;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = first_k + e / 2 * 8 + e % 2;
      values.at[e] = inside && k < FILTERS ? raw[k * kTaps + at] : convert<ELEMENT>(0.0f);
    }
    *reinterpret_cast<Vector<ELEMENT, 4>*>(to + 8 * i) = values;
  }
}

// What of dy a block reads: the image's rows, from the column on that would be staged first; of those staged, columns
// `first` to before `end` are there.
struct Source {
  const Shape& shape;
  const ELEMENT* dy;
  int first, end;
};

// Starts to copy a row of dy, as one group, and nothing if there is none.
__device__ __forceinline__ void load_row(unsigned char* to, const Source& from, int row, bool wanted) {
  const int height = from.shape.out_height, width = from.shape.out_width;
  if (wanted && row >= 0 && row < height) {
    if constexpr (CHANNELS_LAST)
      copy_channels_last<kThreads, kColumns, FILTERS, IN_VECTOR, kPitch>(to, from.dy + row * width * FILTERS,
                                                                         from.first, from.end);
    else
      copy_channels_first<kThreads, kColumns, FILTERS, IN_VECTOR, kPitch>(to, from.dy + row * width, height * width,
                                                                          from.end);
  }
  commit_copies();
}

// Clears what is staged beyond the columns and the filters, once: rows that are loaded leave it as it is.
__device__ __forceinline__ void clear_rest(unsigned char* stages, const Source& from) {
  const auto clear = [&](int column, int k) {
    const int at = CHANNELS_LAST ? column * kPitch + 2 * k : k * kPitch + 2 * column;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage)
      *reinterpret_cast<ELEMENT*>(stages + stage * kRowBytes + at) = convert<ELEMENT>(0.0f);
  };
  constexpr int kRest = 16 * kKSteps - FILTERS, kSome = maximum(1, kRest);
  if constexpr (kRest > 0)
    for (int i = threadIdx.x; i < kRest * kColumns; i += kThreads) clear(i / kSome, FILTERS + i % kSome);
  for (int i = threadIdx.x; i < (kColumns - from.end + from.first) * FILTERS; i += kThreads) {
    const int rank = i / FILTERS;
    clear(rank < from.first ? rank : rank + from.end - from.first, i % FILTERS);
  }
}

using Filters = unsigned[kFragments][2];
using Accumulators = float[BLOCKS][FILTER_Y][kElementBlocks][4];

__device__ __forceinline__ void read_fragment(unsigned (&to)[2], const unsigned char* fragments, int rank) {
  const auto two = *reinterpret_cast<const Vector<unsigned, 2>*>(fragments + 256 * rank + threadIdx.x % 32 * 8);
  to[0] = two.at[0];
  to[1] = two.at[1];
}

__device__ __forceinline__ bool has_block(int b, int warp) {
  return S2D_BLOCKS == 16 * BLOCKS * WARPS || b * WARPS + warp < S2D_BLOCKS / 16;
}

// Adds the products of a staged row. Where a warp has one block less, it multiplies the last of all once more.
__device__ __forceinline__ void multiply(Accumulators& acc, const Filters& filters, unsigned row, int warp) {
  const int lane = threadIdx.x % 32;
  constexpr int kBlockBytes = CHANNELS_LAST ? 16 * kPitch : 32, kStepBytes = CHANNELS_LAST ? 32 : 16 * kPitch;
  const unsigned first = row + (CHANNELS_LAST ? lane % 16 * kPitch + lane / 16 * 16
                                              : (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16);
  unsigned blocks[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const int block = b * WARPS + warp;
    blocks[b] = first + kBlockBytes * (b + 1 < BLOCKS ? block : min(block, S2D_BLOCKS / 16 - 1));
  }
#pragma unroll
  for (int step = 0; step < kKSteps; ++step)
#pragma unroll
    for (int i = 0; i < TAPS_X; ++i) {
      const int depth = step * TAPS_X + i, shift = CHANNELS_LAST ? i * kPitch : 0;
      unsigned outputs[BLOCKS][4];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        if (CHANNELS_LAST)
          load_matrices(outputs[b], blocks[b] + step * kStepBytes + shift);
        else
          load_transposed(outputs[b], blocks[b] + step * kStepBytes);
      }
#pragma unroll
      for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
        for (int t = 0; t < kElementBlocks; ++t) {
          const int rank = (depth * FILTER_Y + r) * kElementBlocks + t;
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b)
            multiply_add<ELEMENT>(acc[b][r][t], outputs[b], filters[rank][0], filters[rank][1]);
        }
    }
}

// Where a thread's results go, in elements of a row if CHANNELS_LAST, else in columns: that of its first s2d block, and
// how many there are of all; the image, and its rows.
struct Target {
  const Shape& shape;
  ELEMENT* dx;
  int first, size;
};

// Writes a row of dx.
__device__ __forceinline__ void store_row(const Target& to, const float (&acc)[kElementBlocks][4], int b, int h,
                                          bool any) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kElementBlocks; ++t) {
    const int element = 8 * t + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int s2d_blocks = 16 * WARPS * b + 8 * half;
      Vector<ELEMENT, 2> pair;
      pair.at[0] = convert<ELEMENT>(any ? acc[t][2 * half] : 0.0f);
      pair.at[1] = convert<ELEMENT>(any ? acc[t][2 * half + 1] : 0.0f);
#pragma unroll
      for (int e = 0; e < 2; e += OUT_VECTOR) {
        const int c = (element + e) / STRIDE_X, within = CHANNELS_LAST ? element + e : (element + e) % STRIDE_X;
        const int at = to.first + s2d_blocks * (CHANNELS_LAST ? kElements : STRIDE_X) + within;
        if (static_cast<unsigned>(at) >= static_cast<unsigned>(to.size) || element + e >= kElements) continue;
        const int row = CHANNELS_LAST ? h * CHANNELS : c * to.shape.height + h;
        ELEMENT* const dx = to.dx + row * to.shape.width + at;
        if constexpr (OUT_VECTOR == 2)
          *reinterpret_cast<Vector<ELEMENT, 2>*>(dx) = pair;
        else
          *dx = pair.at[e];
      }
    }
  }
}

// Writes the rows of dx that are complete.
__device__ __forceinline__ void store_rows(const Target& to, const Accumulators& acc, int first_h, int warp) {
#pragma unroll
  for (int e = 0; e < STRIDE_Y; ++e) {
    if (static_cast<unsigned>(first_h + e) >= static_cast<unsigned>(to.shape.height)) continue;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      if (!has_block(b, warp)) break;
      store_row(to, acc[b][e < kCompleteRows ? e : 0], b, first_h + e, e < kCompleteRows);
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
      for (int t = 0; t < kElementBlocks; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[b][r][t][i] = r + STRIDE_Y < FILTER_Y ? acc[b][r + STRIDE_Y][t][i] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_data(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ dx,
                      const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int image = static_cast<int>(blockIdx.x) / shape.image_strips;
  const int in_image = blockIdx.x - image * shape.image_strips.by;
  const int strip = in_image / shape.s2d_tiles, s2d = (in_image - strip * shape.s2d_tiles.by) * S2D_BLOCKS;
  const int begin = shape.first_row + strip * shape.strip_rows, end = min(begin + shape.strip_rows, shape.end_row);
  const int column = s2d + shape.first_out_column, first_there = min(max(-column, 0), kColumns);
  const int end_there = max(min(kColumns, shape.out_width - column), first_there);
  const Source source = {
      shape, dy + image * FILTERS * shape.out_height * shape.out_width + column * (CHANNELS_LAST ? FILTERS : 1),
      first_there, end_there};
  unsigned char *const raw = shared + kRawAt, *const fragments = shared + kFragmentsAt;

  load_filters<kThreads>(static_cast<unsigned>(__cvta_generic_to_shared(raw)), w, FILTERS * kTaps);
  // Rows above the first of dy meet nothing.
  int row = max(begin - kMetY + 1, 0);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage)
    load_row(shared + stage * kRowBytes, source, row + stage, row + stage < end);
  wait_for_copies<STAGES - 1>();
  __syncthreads();  // the filters have arrived
  stage_filters(fragments, reinterpret_cast<const ELEMENT*>(raw));
  __syncthreads();  // the filters are laid out
  Filters filters;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) read_fragment(filters[i], fragments, i);
  __syncthreads();  // no fragment lies where rows are staged
  clear_rest(shared, source);

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int first = (s2d + 16 * warp + lane / 4) * STRIDE_X - shape.s2d_left, per_column = CHANNELS_LAST ? CHANNELS : 1;
  const Target target = {shape, dx + image * CHANNELS * shape.height * shape.width, first * per_column,
                         shape.width * per_column};
  Accumulators acc = {};
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  int stage = 0;
#pragma unroll 1
  for (; row < end; ++row) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the row has arrived, and every warp has read the one that is overwritten next
    const int next = row + STAGES - 1;
    load_row(shared + (stage == 0 ? STAGES - 1 : stage - 1) * kRowBytes, source, next, next < end);
    if (row >= 0 && row < shape.out_height) multiply(acc, filters, base + stage * kRowBytes, warp);
    if (row >= begin) store_rows(target, acc, row * STRIDE_Y - shape.pad_top, warp);
    shift_accumulators(acc);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
}
