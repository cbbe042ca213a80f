// to[b, j, i] = from[b, i, j]: rows x columns to columns x rows, for each of a batch; of one tensor or of two in one
// launch. Elements are moved, not computed.
//
// A block moves a tile through shared memory, where it lies in lines: its rows, or, where `Scatters`, its columns.
// Along lines a thread moves whole vectors, across them one element of each line. Where lines are whole, the tile is
// one run of memory, and vectors go on from line to line: odd lines do not make them narrow. Grid: one dimension, tiles
// of columns innermost, then of rows, then the batch; the second tensor's blocks come last.
//
// Defines: ELEMENT; FIRST and, for two tensors, SECOND: a tile's rows and columns, elements that are loaded and that
// are stored at once, whether it scatters, whether lines are whole, as a list; MATRICES_FIELDS.
#include "common/divisor.cuh"
#include "common/hopper.cuh"

#if !defined(ELEMENT) || !defined(FIRST) || !defined(MATRICES_FIELDS)
#error "define ELEMENT, FIRST and MATRICES_FIELDS"
#endif

// What a vector is stored as: its members would be stored one by one.
template <int Bytes>
struct Word;
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

constexpr int kThreads = 256;
constexpr unsigned kPiece = 16 / sizeof(ELEMENT);  // elements of the widest vector

template <int Rows, int Columns, int In, int Out, bool Scatters, bool Whole>
struct Tile {
  static constexpr int kRows = Rows, kColumns = Columns;
  static constexpr bool kScatters = Scatters, kWhole = Whole;
  static constexpr unsigned kLines = Scatters ? Columns : Rows, kLength = Scatters ? Rows : Columns;
  static constexpr unsigned kAlong = Scatters ? Out : In, kAcross = Scatters ? In : Out;
  // Lines that neighbouring threads take side by side: 128 bytes in memory where there are as many.
  static constexpr unsigned kRun = kLines % (8 * kPiece) == 0 ? 8 * kPiece : kLines;
  // Between groups of lines: threads at one element of eight groups meet different banks, which odd lines do unaided.
  static constexpr unsigned kGap = kLength % 2 ? 0 : kPiece;
  static constexpr unsigned kElements = kLines * kLength + (kLines - 1) / kPiece * kGap;
  static_assert(kPiece % In == 0 && kPiece % Out == 0, "a vector has 16 bytes at most");
  static_assert(kRun % kAcross == 0 && (Whole ? kLines * kLength : kLength) % kAlong == 0, "vectors fill the tile");
};

struct Spot {
  int64 in_memory;
  unsigned in_tile;
  bool is_inside;
};

// Where the vector of that number is: along lines, or across them.
template <class T, bool kIsAlong>
__device__ __forceinline__ Spot spot(unsigned number, int stride, unsigned lines_left, unsigned length_left) {
  if constexpr (kIsAlong) {
    const unsigned at = number * T::kAlong, line = at / T::kLength, position = at % T::kLength;
    const unsigned in_tile = at + at / (kPiece * T::kLength) * T::kGap;
    if (T::kWhole) return {at, in_tile, at < lines_left * T::kLength};
    return {static_cast<int64>(line) * stride + position, in_tile, line < lines_left && position < length_left};
  } else {
    constexpr unsigned kGroups = T::kRun / T::kAcross;
    const unsigned rest = number / kGroups, run = T::kLines == T::kRun ? 0 : rest / T::kLength;
    const unsigned line = run * T::kRun + number % kGroups * T::kAcross, position = rest - run * T::kLength;
    return {static_cast<int64>(position) * stride + line, line * T::kLength + position + line / kPiece * T::kGap,
            line < lines_left && position < length_left};
  }
}

// Without __restrict__, which would let loads bypass what the step before writes while this kernel waits.
template <class T, bool kIsAlong>
__device__ __forceinline__ void load(ELEMENT* tile, const ELEMENT* from, int stride, unsigned lines_left,
                                     unsigned length_left) {
  constexpr unsigned kWidth = kIsAlong ? T::kAlong : T::kAcross, kVectors = T::kLines * T::kLength / kWidth;
  constexpr unsigned kEach = (kVectors + kThreads - 1) / kThreads, kInFlight = kEach < 8 ? kEach : 8;
  constexpr bool kFits = kVectors % (kInFlight * kThreads) == 0;
  for (unsigned first = threadIdx.x; first < kVectors; first += kInFlight * kThreads) {
    Vector<ELEMENT, kWidth> found[kInFlight];
#pragma unroll
    for (unsigned l = 0; l < kInFlight; l++) {
      const unsigned number = first + l * kThreads;
      const Spot at = spot<T, kIsAlong>(number, stride, lines_left, length_left);
      if (at.is_inside && (kFits || number < kVectors))
        found[l] = *reinterpret_cast<const Vector<ELEMENT, kWidth>*>(from + at.in_memory);
    }
#pragma unroll
    for (unsigned l = 0; l < kInFlight; l++) {
      const unsigned number = first + l * kThreads;
      if (!kFits && number >= kVectors) break;
      ELEMENT* to = tile + spot<T, kIsAlong>(number, stride, lines_left, length_left).in_tile;
      if constexpr (kIsAlong) {
        *reinterpret_cast<Vector<ELEMENT, kWidth>*>(to) = found[l];
      } else {
#pragma unroll
        for (unsigned e = 0; e < kWidth; e++) to[e * T::kLength] = found[l].at[e];
      }
    }
  }
}

template <class T, bool kIsAlong>
__device__ __forceinline__ void store(const ELEMENT* tile, ELEMENT* to, int stride, unsigned lines_left,
                                      unsigned length_left) {
  constexpr unsigned kWidth = kIsAlong ? T::kAlong : T::kAcross, kVectors = T::kLines * T::kLength / kWidth;
  constexpr unsigned kEach = (kVectors + kThreads - 1) / kThreads;
#pragma unroll 4
  for (unsigned l = 0; l < kEach; l++) {
    const unsigned number = threadIdx.x + l * kThreads;
    const Spot at = spot<T, kIsAlong>(number, stride, lines_left, length_left);
    if (!at.is_inside || (kVectors % kThreads != 0 && number >= kVectors)) continue;
    Vector<ELEMENT, kWidth> moved;
    if constexpr (kIsAlong) {
      moved = *reinterpret_cast<const Vector<ELEMENT, kWidth>*>(tile + at.in_tile);
    } else {
#pragma unroll
      for (unsigned e = 0; e < kWidth; e++) moved.at[e] = tile[at.in_tile + e * T::kLength];
    }
    using Whole = typename Word<sizeof(moved)>::Type;
    __stwb(reinterpret_cast<Whole*>(to + at.in_memory), *reinterpret_cast<const Whole*>(&moved));
  }
}

// A tensor: the size of each of its matrices, and how many tiles of FIRST or SECOND a matrix has, each way.
struct Matrices {
  MATRICES_FIELDS
};

template <class T>
__device__ __forceinline__ void transpose_tile(ELEMENT* tile, const ELEMENT* from, ELEMENT* to, const Matrices& all,
                                               int number) {
  const int line = number / all.tiles_across, batch = line / all.tiles_down;
  const int first_i = (line - batch * all.tiles_down.by) * T::kRows,
            first_j = (number - line * all.tiles_across.by) * T::kColumns;
  const int64 matrix = static_cast<int64>(batch) * all.rows * all.columns;
  const int rows_left = all.rows - first_i, columns_left = all.columns - first_j;
  const int lines_left = T::kScatters ? columns_left : rows_left, length_left = T::kScatters ? rows_left : columns_left;
  from += matrix + static_cast<int64>(first_i) * all.columns + first_j;
  to += matrix + static_cast<int64>(first_j) * all.rows + first_i;
  load<T, !T::kScatters>(tile, from, all.columns, lines_left, length_left);
  __syncthreads();  // the tile is there
  store<T, T::kScatters>(tile, to, all.rows, lines_left, length_left);
}

using First = Tile<FIRST>;

#ifndef SECOND
extern "C" __global__ void __launch_bounds__(kThreads)
    transpose(const ELEMENT* from, ELEMENT* to, const Matrices matrices) {
  __shared__ alignas(16) ELEMENT tile[First::kElements];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  transpose_tile<First>(tile, from, to, matrices, blockIdx.x);
}
#else
using Second = Tile<SECOND>;
constexpr unsigned kMost = First::kElements > Second::kElements ? First::kElements : Second::kElements;

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_two(const ELEMENT* from, ELEMENT* to, const Matrices matrices, const ELEMENT* other_from,
                  ELEMENT* other_to, const Matrices other_matrices, int blocks) {
  __shared__ alignas(16) ELEMENT tile[kMost];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int number = blockIdx.x;
  if (number < blocks) {
    transpose_tile<First>(tile, from, to, matrices, number);
  } else {
    transpose_tile<Second>(tile, other_from, other_to, other_matrices, number - blocks);
  }
}
#endif
