// What the depthwise kernels for tensor cores share. Pixels of 8 channels are rows of matrices, a filter's tap is a
// diagonal one. A warp takes pairs of neighbouring outputs: matrix number j of 8 pairs holds pixel 2 * kStep * i + j of
// each pair i, so that it serves the first output of a pair at one tap and the second at another. The same arithmetic:
// solvers/depthwise/mma_tiling.py.
#pragma once

#include "common/shared_pixels.cuh"

// How results of one axis meet pixels: that of unit i and a phase meets pixel i * kStep + offset(phase, tap). Forward a
// unit is an output; of backward data as many as the stride, each met by taps of its own.
template <bool kFlipped, int kStride, int kDilation, int kPad, int kFilter>
struct UnitAxis {
  static constexpr int kPhases = kFlipped ? kStride : 1, kStep = kFlipped ? 1 : kStride;
  static constexpr bool meets(int phase, int tap) {
    return !kFlipped || (phase + kPad - tap * kDilation) % kStride == 0;
  }
  static constexpr int offset(int phase, int tap) {
    return kFlipped ? (phase + kPad - tap * kDilation) / kStride : tap * kDilation - kPad;
  }
  static constexpr int bound(int sign) {
    int most = -(1 << 30);
    for (int phase = 0; phase < kPhases; ++phase)
      for (int tap = 0; tap < kFilter; ++tap)
        if (meets(phase, tap) && sign * offset(phase, tap) > most) most = sign * offset(phase, tap);
    return most;
  }
  static constexpr int kFirst = -bound(-1), kReach = bound(1) - kFirst;

  // Pixel, from the first that unit 0 meets on, that a unit meets at a tap.
  static constexpr int pixel(int unit, int phase, int tap) { return unit * kStep + offset(phase, tap) - kFirst; }
};

// Pixels in shared memory, [image][row][column modulo 2 * kStep][column / (2 * kStep)][channel]: those of neighbouring
// pairs, also of two images, lie an odd number of 16-byte words apart (modulo 128 bytes), so that 8 meet all banks.
template <int kImageCount, int kRowCount, int kPairCount, int kColumnStep, int kReach, int kChannelCount>
struct PairedPixels {
  static constexpr int kImages = kImageCount, kRows = kRowCount, kPairs = kPairCount, kChannels = kChannelCount;
  static constexpr int kStep = kColumnStep, kClasses = 2 * kStep, kMatrices = kReach + kStep + 1;
  static constexpr int kColumns = (2 * kPairs - 1) * kStep + kReach + 1;
  static constexpr int kSegment = kPairs + (kMatrices - 1) / kClasses;
  static constexpr int kPixelBytes = odd_words(2 * kChannels), kRowBytes = kClasses * kSegment * kPixelBytes;
  static constexpr int kGap = kImages == 1 ? 0 : ((kPairs * kPixelBytes - kRows * kRowBytes) % 128 + 128) % 128;
  static constexpr int kImageBytes = kRows * kRowBytes + kGap, kBytes = kImages * kImageBytes;
  static constexpr int slot(int column) { return column % kClasses * kSegment + column / kClasses; }
};

// Of each of a warp's rows the last one that is loaded before its products, and whether it is met. A table, since loops
// whose bounds the compiler computes are not unrolled, and their rows would lie in local memory.
template <int kRowCount>
struct Lookahead {
  int last[kRowCount];
  bool met[kRowCount];

  static constexpr Lookahead of(int (*next)(int), bool (*is_met)(int)) {
    Lookahead rows = {};
    for (int row = 0; row < kRowCount; ++row) rows.last[row] = next(row), rows.met[row] = is_met(row);
    return rows;
  }
  // Whether row `other` is loaded just before the products of `row`.
  constexpr bool is_loaded_before(int other, int row) const {
    return other <= last[row] && (row == 0 || other > last[row == 0 ? 0 : row - 1]);
  }
};

// Starts to copy a block's pixels: rows that exist, zeros for columns, images and channels that do not, and with
// kZeroRows for rows. Rows kFrom ... kEnd - 1 are known to exist. Complete after wait_for_copies and a barrier.
template <typename Shape, int kThreads, int kTotalChannels, bool kZeroRows, int kFrom, int kEnd, typename T>
__device__ __forceinline__ void stage_pairs(unsigned to, const T* tensor, const Images& images) {
  constexpr int kWords = Shape::kChannels / 8, kColumnWords = Shape::kColumns * kWords;
  const int row_step = images.width * kTotalChannels;
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kImages * kColumnWords; i += kThreads) {
    const int word = i % kWords, column = i / kWords % Shape::kColumns, image = i / kColumnWords;
    const int n = images.first_n + image, channel = images.first_channel + 8 * word, v = images.first_column + column;
    const bool inside =
        n < images.n && channel < kTotalChannels && static_cast<unsigned>(v) < static_cast<unsigned>(images.width);
    const int pixel = (n * images.height + images.first_row) * images.width + v;
    const T* from = tensor + (inside ? pixel * kTotalChannels + channel : 0);
    asm volatile("" : "+l"(from));  // one address for all rows, rather than one each
    const unsigned at = to + image * Shape::kImageBytes + Shape::slot(column) * Shape::kPixelBytes + 16 * word;
#pragma unroll(Shape::kRows <= 24 ? Shape::kRows : 8)
    for (int row = 0; row < Shape::kRows; ++row) {
      const bool exists = (row >= kFrom && row < kEnd) ||
                          static_cast<unsigned>(images.first_row + row) < static_cast<unsigned>(images.height);
      if (kZeroRows || exists)
        copy_bytes<16>(at + row * Shape::kRowBytes, from + row * row_step, inside && (!kZeroRows || exists));
    }
  }
}
