// The sums of reference.cu for whole outputs, with a block for each tile of elements, whose factors its threads share.
//
// Sums of a row and a column of factors, as a matrix product's: forward rows are pixels and columns output channels,
// backward weights rows are output channels and columns input channels of one tap. An element a thread of reference.cu
// reads two factors a product from memory and converts them; here 16 elements share each.
// Defines: T_X, T_W, T_Y (dtype names), INDEX_BITS, TILE (elements of a tile's side), and which kernel is wanted:
// FORWARD_TILED or BACKWARD_WEIGHTS_TILED.
#include "harness/reference_sums.cuh"

#if !defined(T_X) || !defined(T_W) || !defined(T_Y) || !defined(TILE)
#error "define T_X, T_W, T_Y and TILE"
#endif
#if !defined(FORWARD_TILED) && !defined(BACKWARD_WEIGHTS_TILED)
#error "define which kernel is wanted: FORWARD_TILED or BACKWARD_WEIGHTS_TILED"
#endif

constexpr int kTile = TILE, kThreads = kTile * kTile;
constexpr int kBlocks = 3;       // a multiprocessor's: else ptxas spills registers for more
constexpr int kDepth = 64;       // factors of an element that are in shared memory at once
constexpr int kRow = kTile + 1;  // so that no two factors of an element lie in one bank
static_assert(kThreads >= kDepth && kThreads <= 1024, "each of the terms has a thread");

struct Factors {
  double rows[kDepth * kRow], columns[kDepth * kRow];
};

// One term of a tile's sums: what it reads of both inputs for the tile's first row and column.
struct Term {
  Index first, second;
  Index at[3];  // forward, of the tap in the input
  bool met;
};

// Calls fill(d, i) for each factor of a tile, threads next to each other for terms next to each other or for rows.
template <typename Fill>
__device__ __forceinline__ void fill_tile(int depth, bool by_term, Fill fill) {
  for (int slot = threadIdx.x; slot < kDepth * kTile; slot += kThreads) {
    const int d = by_term ? slot % kDepth : slot / kTile, i = by_term ? slot / kDepth : slot % kTile;
    if (d < depth) fill(d, i);
  }
}

__device__ __forceinline__ Index least(Index a, Index b) {
  return a < b ? a : b;
}

#ifdef FORWARD_TILED
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    reference_forward_tiled(const T_X* __restrict__ x, const T_W* __restrict__ w, double* __restrict__ sums,
                            float* __restrict__ scales, int64 count, const __grid_constant__ Geometry conv) {
  __shared__ Factors factors;
  __shared__ bool met[kDepth * kTile];
  __shared__ Term terms[kDepth];
  __shared__ Position starts[kTile];  // of each pixel's first tap in the input
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = group_c * conv.taps[0] * conv.taps[1] * conv.taps[2];
  const Index group_tiles = (group_k + kTile - 1) / kTile, column_tiles = conv.groups * group_tiles;
  const int64 pixels = count / conv.k, tiles = (pixels + kTile - 1) / kTile * column_tiles;
  const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Index group = Index(tile % column_tiles) / group_tiles;
    const Index first_k = group * group_k + Index(tile % column_tiles) % group_tiles * kTile;
    const Index columns = least(kTile, (group + 1) * group_k - first_k);
    const int64 first_pixel = tile / column_tiles * kTile;
    const int rows = int(pixels - first_pixel < kTile ? pixels - first_pixel : kTile);
    if (threadIdx.x < rows) {
      const Position out = position_of<true>(first_pixel + threadIdx.x, 1, conv.out);
      Position start = {out.n, group * group_c, {}};
      for (int dim = 0; dim < 3; ++dim) start.at[dim] = out.at[dim] * conv.stride[dim] - conv.pad[dim];
      starts[threadIdx.x] = start;
    }
    Sums mine = {};
    for (Index from = 0; from < length; from += kDepth) {
      const int depth = int(least(kDepth, length - from));
      if (threadIdx.x < depth) {
        Index rest = from + threadIdx.x;
        const Index c = take(rest, group_c), tx = take(rest, conv.taps[2]), ty = take(rest, conv.taps[1]);
        const Position tap = {first_k, c, {rest, ty, tx}};
        Term term = {c * conv.x.c, offset_of(tap, conv.w), {}, true};
        for (int dim = 0; dim < 3; ++dim) term.at[dim] = tap.at[dim] * conv.dilation[dim];
        terms[threadIdx.x] = term;
      }
      __syncthreads();  // the terms are there, and the factors before were read
      fill_tile(depth, conv.x.c == 1, [&](int d, int i) {
        const Term& term = terms[d];
        Position in = starts[i < rows ? i : 0];
        bool inner = i < rows;
        for (int dim = 0; dim < 3; ++dim) {
          in.at[dim] += term.at[dim];
          inner = inner && inside(in.at[dim], conv.size[dim]);
        }
        met[d * kTile + i] = inner;
        if (inner) factors.rows[d * kRow + i] = convert<double>(x[offset_of(in, conv.x) + term.first]);
      });
      fill_tile(depth, true, [&](int d, int i) {
        if (i < columns) factors.columns[d * kRow + i] = convert<double>(w[terms[d].second + i * conv.w.n]);
      });
      __syncthreads();  // the factors are there
      if (column < columns)
        for (int d = 0; d < depth; ++d)
          if (met[d * kTile + row])
            mine.add(factors.rows[d * kRow + row], factors.columns[d * kRow + column], scales != nullptr);
    }
    if (row < rows && column < columns) {
      Position out = position_of<true>(first_pixel + row, 1, conv.out);
      out.c = first_k + column;
      mine.write(logical_rank(out, conv.k, conv.out), sums, scales);
    }
    __syncthreads();  // the pixels were read, and the factors
  }
}
#endif

#ifdef BACKWARD_WEIGHTS_TILED
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    reference_backward_weights_tiled(const T_Y* __restrict__ dy, const T_X* __restrict__ x, double* __restrict__ sums,
                                     float* __restrict__ scales, int64 count, const __grid_constant__ Geometry conv) {
  __shared__ Factors factors;
  __shared__ Term terms[kDepth];
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  const Index length = conv.n * conv.out[0] * conv.out[1] * conv.out[2];
  const Index taps = conv.taps[0] * conv.taps[1] * conv.taps[2];
  const Index row_tiles = (group_k + kTile - 1) / kTile, column_tiles = (group_c + kTile - 1) / kTile;
  const int64 tiles = int64(conv.groups) * row_tiles * column_tiles * taps;
  const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Index rest = Index(tile);
    const Index first_c = take(rest, column_tiles) * kTile, first_k = take(rest, row_tiles) * kTile;
    const Index tx = take(rest, conv.taps[2]), ty = take(rest, conv.taps[1]), tz = take(rest, conv.taps[0]);
    const Position tap = {rest * group_k + first_k, first_c, {tz, ty, tx}};
    const Index rows = least(kTile, group_k - first_k), columns = least(kTile, group_c - first_c);
    Sums mine = {};
    for (Index from = 0; from < length; from += kDepth) {
      const int depth = int(least(kDepth, length - from));
      if (threadIdx.x < depth) {
        Index pixel = from + threadIdx.x;
        const Index ow = take(pixel, conv.out[2]), oh = take(pixel, conv.out[1]), od = take(pixel, conv.out[0]);
        const Position out = {pixel, tap.n, {od, oh, ow}};
        Position in = {pixel, rest * group_c + first_c, {}};
        const bool inner = meets_input(conv, out.at, tap.at, in.at);
        terms[threadIdx.x] = {offset_of(out, conv.y), inner ? offset_of(in, conv.x) : 0, {}, inner};
      }
      __syncthreads();  // the terms are there
      fill_tile(depth, conv.y.c != 1, [&](int d, int i) {
        const Term& term = terms[d];
        if (term.met && i < rows) factors.rows[d * kRow + i] = convert<double>(dy[term.first + i * conv.y.c]);
      });
      fill_tile(depth, conv.x.c != 1, [&](int d, int i) {
        const Term& term = terms[d];
        if (term.met && i < columns) factors.columns[d * kRow + i] = convert<double>(x[term.second + i * conv.x.c]);
      });
      __syncthreads();  // the factors are there
      if (row < rows && column < columns)
        for (int d = 0; d < depth; ++d)
          if (terms[d].met)
            mine.add(factors.rows[d * kRow + row], factors.columns[d * kRow + column], scales != nullptr);
      __syncthreads();  // the terms were read, and the factors
    }
    if (row < rows && column < columns) {
      const Position element = {tap.n + row, first_c + column, {tz, ty, tx}};
      mine.write(logical_rank(element, group_c, conv.taps), sums, scales);
    }
  }
}
#endif
