// Operands of a matrix product on tensor cores: gathered from tensors into shared memory, and read as fragments.
//
// Each index of the product (M, N, K) is a number in mixed radix whose digits are coordinates, so that an element's
// offset is linear in the digits of its operand's two indices, MN (M or N) and K. Shared memory holds rows of 16-byte
// words, along K if the operand is K-major, else along MN. Words of a row are swizzled: eight neighbouring rows of one
// column meet every bank once.
//
// Defines, as solvers/implicit_gemm/mma.py gives them: the fields of the structures below.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/divisor.cuh"
#include "common/mma_tf32.cuh"
#include "common/tile.cuh"

#if !defined(RADIX_FIELDS) || !defined(OPERANDLAYOUT_FIELDS) || !defined(OUTPUTLAYOUT_FIELDS)
#error "define RADIX_FIELDS, OPERANDLAYOUT_FIELDS and OUTPUTLAYOUT_FIELDS"
#endif
#if !defined(WINDOW_FIELDS) || !defined(TILEORDER_FIELDS) || !defined(PRODUCT_FIELDS)
#error "define WINDOW_FIELDS, TILEORDER_FIELDS and PRODUCT_FIELDS"
#endif

// How many values an index has, and the sizes of its digits, the least first; the last digit has no size.
struct Radix {
  RADIX_FIELDS
};

template <int kDigits>
struct Number {
  int digit[kDigits];
};

template <int kDigits>
__device__ __forceinline__ Number<kDigits> number_of(int value, const Radix& radix) {
  Number<kDigits> number;
#pragma unroll
  for (int i = 0; i + 1 < kDigits; ++i) {
    const int rest = value / radix.size[i];
    number.digit[i] = value - rest * radix.size[i].by;
    value = rest;
  }
  number.digit[kDigits - 1] = value;
  return number;
}

template <int kDigits>
__device__ __forceinline__ void add(Number<kDigits>& number, const Number<kDigits>& more, const Radix& radix) {
  int carry = 0;
#pragma unroll
  for (int i = 0; i < kDigits; ++i) {
    number.digit[i] += more.digit[i] + carry;
    if (i + 1 == kDigits) break;
    carry = number.digit[i] >= radix.size[i].by;
    if (carry) number.digit[i] -= radix.size[i].by;
  }
}

// The part of an offset that comes from one index. Offsets of elements outside wrap around and are not used.
template <int kDigits, int kMost>
__device__ __forceinline__ unsigned offset_of(const Number<kDigits>& number, const unsigned (&strides)[kMost]) {
  unsigned offset = 0;
#pragma unroll
  for (int i = 0; i < kDigits; ++i) offset += static_cast<unsigned>(number.digit[i]) * strides[i];
  return offset;
}

// Where an operand's elements are, modulo 2^32, as the first tap may lie before the tensor: its first offset, and the
// elements between neighbours along the digits of both indices and between groups.
struct OperandLayout {
  OPERANDLAYOUT_FIELDS
};

// The same of the output; split-K partials are `size` elements apart.
struct OutputLayout {
  OUTPUTLAYOUT_FIELDS
};

// Image coordinates, the innermost first: first + digit * stride of both indices; inside from 0 up to extent.
struct Window {
  WINDOW_FIELDS
};

// How a block's rank is divided: by groups, by the tiles of a group and of a band, and by the rows of the last band.
struct TileOrder {
  TILEORDER_FIELDS
};

// The indices m, n and k, the layouts of a, b and out, a window on one of the operands, the order of tiles, and how
// much of k a split sums.
struct Product {
  PRODUCT_FIELDS
};

// Where a block's tile begins along MN, in which group, and where its split begins along K.
struct TileOrigin {
  int group, mn, k;
};

// An operand of a block. A vector is kVector elements along a row, equally far apart in the tensor; they are neighbours
// there and move at once if kAtOnce, else they pass through registers. If kAxes, elements outside the window are zero:
// its coordinates are digits of MN from kMnAxis on, and of K from kKAxis on.
template <typename T, int kThreadCount, bool kIsKMajor, int kMnTile, int kKTile, int kVectorLength, bool kMovesAtOnce,
          int kMnDigitCount, int kKDigitCount, int kAxisCount, int kFirstMnAxis, int kFirstKAxis>
struct Operand {
  using Element = T;
  static constexpr bool kKMajor = kIsKMajor;
  static constexpr int kThreads = kThreadCount, kVector = kVectorLength, kMn = kMnTile, kK = kKTile;
  static constexpr int kMnDigits = kMnDigitCount, kKDigits = kKDigitCount;
  static constexpr int kAxes = kAxisCount, kMnAxis = kFirstMnAxis, kKAxis = kFirstKAxis;

  static constexpr int kRows = kKMajor ? kMn : kK, kColumns = kKMajor ? kK : kMn;
  static constexpr int kWord = 16 / sizeof(T), kWords = kColumns / kWord, kRowBytes = 16 * kWords;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kWords >= 2 && (kWords & (kWords - 1)) == 0 && kRows % 8 == 0, "tiles are powers of two");

  // A thread copies one vector of each of kLoads rows, kRowStep rows apart.
  static constexpr int kRowVectors = kColumns / kVector, kRowStep = kThreads / kRowVectors;
  static constexpr int kLoads = ceil_div(kRows, kRowStep), kKStep = kKMajor ? kK : kK / kLoads;
  static_assert(kRowVectors <= kThreads && kThreads % kRowVectors == 0, "a thread stays in its column");
  static constexpr bool kAtOnce = kMovesAtOnce;
  static_assert(!kAtOnce || kVector * sizeof(T) >= 4, "asynchronous copies move 4 bytes at least");
  // Whether the elements of a vector have a coordinate each.
  static constexpr bool kAcross = kAxes > 0 && (kKMajor ? kKAxis : kMnAxis) == 0;
  static_assert(!kAtOnce || kVector == 1 || !kAcross, "vectors that move at once are inside or outside as a whole");

  // Rows of 4-byte elements that run along MN are read one element at a time, four rows at once.
  static constexpr bool kTransposes = !kKMajor && sizeof(T) == 2;
  static constexpr int kSpread = kKMajor || kTransposes ? 1 : 2;
  static constexpr int kRowsALine = maximum(1, 8 / kWords), kMask = kWords < 8 ? kWords - 1 : 7;
  static constexpr __device__ __forceinline__ int swizzle(int row) { return row / kRowsALine * kSpread & kMask; }
  // Byte of an element in the tile.
  static constexpr __device__ __forceinline__ int place(int row, int column) {
    return row * kRowBytes + (((column / kWord) ^ swizzle(row)) * 16) + column % kWord * static_cast<int>(sizeof(T));
  }
};

// A thread's part in copying an operand, tile after tile along K.
template <typename Shape>
struct Copier {
  using T = typename Shape::Element;
  static constexpr int kDigits = Shape::kMnDigits, kAxes = Shape::kAxes;
  // A linear MN needs one offset; the others follow.
  static constexpr int kKept = Shape::kKMajor && (kDigits > 1 || kAxes > 0) ? Shape::kLoads : 1;

  const T* tensor;
  const OperandLayout& layout;
  const Window& window;
  const Radix& radix_k;
  int row, column, mn, mn_count, k;
  Number<Shape::kKDigits> number, advance;
  unsigned offsets[kKept];
  int at[kKept][maximum(1, kAxes)];
  using Few = Vector<T, Shape::kVector>;
  Few held[Shape::kAtOnce ? 1 : Shape::kLoads];

  __device__ __forceinline__ Copier(const T* source, const OperandLayout& source_layout, const Radix& radix_mn,
                                    const Product& product, const TileOrigin& origin)
      : tensor(source), layout(source_layout), window(product.window), radix_k(product.k), mn_count(radix_mn.count) {
    row = threadIdx.x / Shape::kRowVectors;
    column = threadIdx.x % Shape::kRowVectors * Shape::kVector;
    mn = origin.mn + (Shape::kKMajor ? row : column);
    k = origin.k + (Shape::kKMajor ? column : row);
    number = number_of<Shape::kKDigits>(k, radix_k);
    advance = number_of<Shape::kKDigits>(Shape::kKStep, radix_k);
    Number<kDigits> digits = number_of<kDigits>(mn, radix_mn);
    const Number<kDigits> next_row = number_of<kDigits>(Shape::kRowStep, radix_mn);
    const unsigned first = layout.offset + static_cast<unsigned>(origin.group) * layout.group_stride;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      offsets[i] = first + offset_of<kDigits>(digits, layout.mn_strides);
#pragma unroll
      for (int axis = 0; axis < kAxes; ++axis) {
        const int coordinate = window.first[axis] + digits.digit[Shape::kMnAxis + axis] * window.mn_strides[axis];
        // So far out that no tap reaches the image.
        at[i][axis] = mn + i * Shape::kRowStep < mn_count ? coordinate : -(1 << 30);
      }
      add<kDigits>(digits, next_row, radix_mn);
    }
  }

  // Starts to copy the next tile to the byte address `stage` of shared memory. What passes through registers is read
  // here and written by `put`.
  __device__ __forceinline__ void take(unsigned stage) {
#pragma unroll
    for (int i = 0; i < Shape::kLoads; ++i) {
      const int kept = kKept > 1 ? i : 0, position = k + (Shape::kKMajor ? 0 : i * Shape::kKStep);
      unsigned offset = offsets[kept] + offset_of<Shape::kKDigits>(number, layout.k_strides);
      if (Shape::kKMajor && kKept == 1) offset += static_cast<unsigned>(i * Shape::kRowStep) * layout.mn_strides[0];
      bool inside = position < radix_k.count;
      if (kAxes == 0) inside &= mn + (Shape::kKMajor ? i * Shape::kRowStep : 0) < mn_count;
      int coordinate = 0;
#pragma unroll
      for (int axis = kAxes - 1; axis >= 0; --axis) {
        coordinate = at[kept][axis] + number.digit[Shape::kKAxis + axis] * window.k_strides[axis];
        if (Shape::kAcross && axis == 0) break;
        inside &= static_cast<unsigned>(coordinate) < static_cast<unsigned>(window.extent[axis]);
      }
      if (Shape::kRows < Shape::kRowStep && row >= Shape::kRows) break;
      if constexpr (Shape::kAtOnce) {
        if (Shape::kAcross) inside &= static_cast<unsigned>(coordinate) < static_cast<unsigned>(window.extent[0]);
        copy_bytes<Shape::kVector * sizeof(T)>(stage + Shape::place(row + i * Shape::kRowStep, column),
                                               tensor + (inside ? offset : 0), inside);
      } else {
        const unsigned stride = Shape::kKMajor ? layout.k_strides[0] : layout.mn_strides[0];
        const int coordinate_stride = Shape::kKMajor ? window.k_strides[0] : window.mn_strides[0];
#pragma unroll
        for (int j = 0; j < Shape::kVector; ++j) {
          const unsigned x = coordinate + j * coordinate_stride;
          const bool takes = inside && (!Shape::kAcross || x < static_cast<unsigned>(window.extent[0]));
          held[i].at[j] = takes ? tensor[offset + static_cast<unsigned>(j) * stride] : convert<T>(0.0f);
        }
      }
      if (!Shape::kKMajor) add<Shape::kKDigits>(number, advance, radix_k);
    }
    if (Shape::kKMajor) add<Shape::kKDigits>(number, advance, radix_k);
    k += Shape::kK;
  }

  // Writes what passed through registers to the tile at `stage`.
  __device__ __forceinline__ void put(unsigned char* stage) const {
    if constexpr (!Shape::kAtOnce) {
#pragma unroll
      for (int i = 0; i < Shape::kLoads; ++i) {
        if (Shape::kRows < Shape::kRowStep && row >= Shape::kRows) break;
        *reinterpret_cast<Few*>(stage + Shape::place(row + i * Shape::kRowStep, column)) = held[i];
      }
    }
  }
};

// Reads 16 of MN by 32 bytes of K as four registers of a fragment: as a[4] of one block of rows if
// kIsA, else as b_low and b_high of two neighbouring blocks of 8 columns.
template <typename Shape, bool kIsA>
struct Reader {
  int row, word;
  unsigned swizzle;

  __device__ __forceinline__ Reader() {
    const int lane = threadIdx.x % 32;
    const bool low_is_row = kIsA == Shape::kKMajor;
    if (Shape::kKMajor || Shape::kTransposes) {
      row = lane % 8 + (low_is_row ? lane / 8 % 2 : lane / 16) * 8;
      word = low_is_row ? lane / 16 : lane / 8 % 2;
    } else {
      row = lane % 4;
      word = lane / 16;
    }
    swizzle = Shape::swizzle(row);
  }

  __device__ __forceinline__ void read(unsigned (&to)[4], const unsigned char* tile, int mn, int step) const {
    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
    if constexpr (Shape::kKMajor) {
      load_matrices(to, base + (mn + row) * Shape::kRowBytes + ((2 * step + word) ^ swizzle) * 16);
    } else if constexpr (Shape::kTransposes) {
      load_transposed(to, base + (16 * step + row) * Shape::kRowBytes + ((mn / 8 + word) ^ swizzle) * 16);
    } else {
      static_assert(Shape::kWords >= 4, "words of rows that are 4 apart are swizzled alike");
      const unsigned char* lane_row = tile + row * Shape::kRowBytes + threadIdx.x / 4 % 4 * 4;
#pragma unroll
      for (int more = 0; more < 2; ++more) {
        const unsigned char* at = lane_row + ((mn / 4 + 2 * more + word) ^ swizzle) * 16;
        to[kIsA ? more : 2 * more] = *reinterpret_cast<const unsigned*>(at + 8 * step * Shape::kRowBytes);
        to[kIsA ? more + 2 : 2 * more + 1] = *reinterpret_cast<const unsigned*>(at + (8 * step + 4) * Shape::kRowBytes);
      }
    }
  }
};
