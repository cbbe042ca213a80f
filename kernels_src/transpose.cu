// to[b, j, i] = from[b, i, j]: rows x columns to columns x rows, for each of a batch; of one tensor or of two in one
// launch. Elements are moved, not computed.
//
// A block moves a tile through shared memory: vectors of `In` neighbours in a row come in, of `Out` in a column go out.
// A tile as wide as the matrix is one run of memory, and so is the result of one as high: vectors then go on from line
// to line, so that odd lines do not make them narrow.
// Grid: one dimension, tiles of columns innermost, then of rows, then the batch; the second tensor's blocks come last.
//
// Defines: ELEMENT; FIRST and, for two tensors, SECOND: rows and columns of a tile, In, Out, as a list.
#include "common/divisor.cuh"
#include "common/hopper.cuh"

#if !defined(ELEMENT) || !defined(FIRST)
#error "define ELEMENT and FIRST"
#endif

constexpr int kThreads = 256;
constexpr int kPiece = 16 / sizeof(ELEMENT), kLine = 8 * kPiece;  // elements in 16 bytes, and in all banks

template <int Rows, int Columns, int In, int Out>
struct Tile {
  static constexpr int kRows = Rows, kColumns = Columns, kIn = In, kOut = Out;
  static constexpr int kElements = Rows * Columns;
  static constexpr int kRun = Rows % kLine == 0 ? kLine : Rows;  // rows that neighbouring threads write side by side
  static_assert(kElements % In == 0 && kElements % Out == 0, "vectors fill the tile");
  static_assert(kPiece % In == 0 && kPiece % Out == 0, "a vector has 16 bytes at most");

  // Where an element is. Rows an odd number of pieces apart have their columns in different banks; others are permuted.
  static __device__ __forceinline__ int place(int at) {
    return Columns % 2 ? at : at ^ (at / kLine ^ at / (8 * kLine)) % 8 * kPiece;
  }
};

struct Matrices {
  int rows, columns;
  Divisor down, across;  // tiles
};

template <class T>
__device__ __forceinline__ void load(ELEMENT* tile, const ELEMENT* __restrict__ from, int columns, int rows_left,
                                     int columns_left) {
  using Found = Vector<ELEMENT, T::kIn>;
  constexpr int kVectors = T::kElements / T::kIn, kEach = (kVectors + kThreads - 1) / kThreads;
  constexpr int kInFlight = kEach < 8 ? kEach : 8;
  for (int first = threadIdx.x; first < kVectors; first += kInFlight * kThreads) {
    Found found[kInFlight];
#pragma unroll
    for (int l = 0; l < kInFlight; l++) {
      const int at = (first + l * kThreads) * T::kIn, i = at / T::kColumns, j = at % T::kColumns;
      if (at < T::kElements && i < rows_left && j < columns_left)
        found[l] = *reinterpret_cast<const Found*>(from + static_cast<int64>(i) * columns + j);
    }
#pragma unroll
    for (int l = 0; l < kInFlight; l++) {
      const int at = (first + l * kThreads) * T::kIn;
      if (at < T::kElements) *reinterpret_cast<Found*>(tile + T::place(at)) = found[l];
    }
  }
}

template <class T>
__device__ __forceinline__ void store(const ELEMENT* tile, ELEMENT* __restrict__ to, int rows, int rows_left,
                                      int columns_left) {
#pragma unroll 2
  for (int vector = threadIdx.x; vector < T::kElements / T::kOut; vector += kThreads) {
    const int at = vector * T::kOut, first = at / (T::kRun * T::kColumns) * T::kRun, rest = at - first * T::kColumns;
    int i = rest % T::kRun, j = rest / T::kRun;
    if (first + i >= rows_left || j >= columns_left) continue;
    ELEMENT* target = to + static_cast<int64>(j) * rows + first + i;
    Vector<ELEMENT, T::kOut> moved;
#pragma unroll
    for (int e = 0; e < T::kOut; e++) {
      moved.at[e] = tile[T::place((first + i) * T::kColumns + j)];
      i++;
      if (T::kRun % T::kOut != 0 && i == T::kRun) i = 0, j++;
    }
    *reinterpret_cast<Vector<ELEMENT, T::kOut>*>(target) = moved;
  }
}

template <class T>
__device__ __forceinline__ void turn(ELEMENT* tile, const ELEMENT* from, ELEMENT* to, const Matrices& all, int number) {
  const int line = number / all.across, batch = line / all.down;
  const int first_i = (line - batch * all.down.by) * T::kRows, first_j = (number - line * all.across.by) * T::kColumns;
  const int64 matrix = static_cast<int64>(batch) * all.rows * all.columns;
  const int rows_left = all.rows - first_i, columns_left = all.columns - first_j;
  load<T>(tile, from + matrix + static_cast<int64>(first_i) * all.columns + first_j, all.columns, rows_left,
          columns_left);
  __syncthreads();  // the tile is there
  store<T>(tile, to + matrix + static_cast<int64>(first_j) * all.rows + first_i, all.rows, rows_left, columns_left);
}

using First = Tile<FIRST>;

#ifndef SECOND
extern "C" __global__ void __launch_bounds__(kThreads)
    transpose(const ELEMENT* from, ELEMENT* to, int rows, int columns, int tiles_i, unsigned tiles_i_multiplier,
              int tiles_i_shift, int tiles_j, unsigned tiles_j_multiplier, int tiles_j_shift) {
  __shared__ alignas(128) ELEMENT tile[(First::kElements + kLine - 1) / kLine * kLine];
  next_step_may_begin();
  previous_step_done();
  const Matrices all{
      rows, columns, {tiles_i, tiles_i_multiplier, tiles_i_shift}, {tiles_j, tiles_j_multiplier, tiles_j_shift}};
  turn<First>(tile, from, to, all, blockIdx.x);
}
#else
using Second = Tile<SECOND>;
constexpr int kMost = First::kElements > Second::kElements ? First::kElements : Second::kElements;

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_two(const ELEMENT* from, ELEMENT* to, int rows, int columns, int tiles_i, unsigned tiles_i_multiplier,
                  int tiles_i_shift, int tiles_j, unsigned tiles_j_multiplier, int tiles_j_shift,
                  const ELEMENT* other_from, ELEMENT* other_to, int other_rows, int other_columns, int other_tiles_i,
                  unsigned other_tiles_i_multiplier, int other_tiles_i_shift, int other_tiles_j,
                  unsigned other_tiles_j_multiplier, int other_tiles_j_shift, int blocks) {
  __shared__ alignas(128) ELEMENT tile[(kMost + kLine - 1) / kLine * kLine];
  next_step_may_begin();
  previous_step_done();
  const int number = blockIdx.x;
  if (number < blocks) {
    const Matrices all{
        rows, columns, {tiles_i, tiles_i_multiplier, tiles_i_shift}, {tiles_j, tiles_j_multiplier, tiles_j_shift}};
    turn<First>(tile, from, to, all, number);
  } else {
    const Matrices all{other_rows,
                       other_columns,
                       {other_tiles_i, other_tiles_i_multiplier, other_tiles_i_shift},
                       {other_tiles_j, other_tiles_j_multiplier, other_tiles_j_shift}};
    turn<Second>(tile, other_from, other_to, all, number - blocks);
  }
}
#endif
