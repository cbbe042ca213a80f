// Pixels of grouped convolutions in shared memory, channels last whatever the tensor's layout. The same arithmetic:
// solvers/common/packed_groups.py.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/packed_groups.cuh"
#include "common/mma.cuh"
#include "common/small_matrices.cuh"
#include "common/tile.cuh"

// Pixels of images in shared memory: [image][row][slot][channel]. Columns that are kStep apart lie side by side.
template <int kImageCount, int kRowCount, int kColumnCount, int kColumnStep, int kChannelCount>
struct Pixels {
  static constexpr int kImages = kImageCount, kRows = kRowCount, kColumns = kColumnCount, kChannels = kChannelCount;
  static constexpr int kStep = kColumnStep, kSegment = ceil_div(kColumns, kStep), kSlots = kSegment * kStep;
  static constexpr int kPixelBytes = odd_words(2 * kChannels), kRowBytes = kSlots * kPixelBytes;
  static constexpr int kImageBytes = kRows * kRowBytes, kBytes = kImages * kImageBytes;
  static constexpr int slot(int column) { return column % kStep * kSegment + column / kStep; }
};

// Channels-first pixels on their way to `Shape`: [image][channel][row][column] as in the tensor, of height kHeight and
// width kWidth: whole images without gaps if kWhole, else the shape's rows from kShift columns before its first column
// on, which is then a multiple of 8, and an odd number of 16-byte words a channel, so that 8 channels meet all banks.
template <typename Shape, int kHeight, int kWidth, int kShift, bool kWhole>
struct StagedNchw {
  static constexpr int kVector = kWhole ? 8 : greatest_divisor(8, kWidth);
  static constexpr int kRow = kWhole ? kWidth : round_up(kShift + Shape::kColumns, 8);
  static constexpr int kChannel = kWhole ? kHeight * kWidth : odd_words(2 * Shape::kRows * kRow) / 2;
  static constexpr int kImage = Shape::kChannels * kChannel, kBytes = 2 * Shape::kImages * kImage;
};

// A tensor's sizes, and where a block's part of it begins; rows and columns may begin outside.
struct Images {
  int n, channels, height, width;
  int first_n, first_channel, first_row, first_column;
};

// Iterations of a loop over `count` rows that are unrolled.
constexpr int rows_at_once(int count) {
  return count <= 16 ? count : 6;
}

// Starts to copy pixels, zeros outside the tensor, whose rows are kTensorRow elements apart; complete after
// wait_for_copies and a barrier. A thread copies its words of a column row by row, which takes few instructions.
template <typename Shape, int kTensorRow, int kThreads, typename T>
__device__ __forceinline__ void stage_pixels(unsigned to, const T* tensor, const Images& images) {
  constexpr int kWords = Shape::kChannels / 8, kColumnWords = Shape::kColumns * kWords;
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kImages * kColumnWords; i += kThreads) {
    const int word = i % kWords, column = i / kWords % Shape::kColumns, image = i / kColumnWords;
    const int n = images.first_n + image, channel = images.first_channel + 8 * word, v = images.first_column + column;
    const bool inside =
        n < images.n && channel < images.channels && static_cast<unsigned>(v) < static_cast<unsigned>(images.width);
    const unsigned at = to + image * Shape::kImageBytes + Shape::slot(column) * Shape::kPixelBytes + 16 * word;
    // May name memory outside the tensor, which a copy of zeros does not read: one address serves all rows.
    const T* const from = tensor + static_cast<int64>(n * images.height + images.first_row) * kTensorRow +
                          (v * images.channels + channel);
#pragma unroll(rows_at_once(Shape::kRows))
    for (int row = 0; row < Shape::kRows; ++row) {
      const bool there = inside && static_cast<unsigned>(images.first_row + row) < static_cast<unsigned>(images.height);
      copy_bytes<16>(at + row * Shape::kRowBytes, from + static_cast<int64>(row) * kTensorRow, there);
    }
  }
}

template <int kVector, typename T>
__device__ __forceinline__ void stage_vector(unsigned char* to, const T* from, bool inside) {
  if constexpr (kVector > 1)
    copy_bytes<2 * kVector>(static_cast<unsigned>(__cvta_generic_to_shared(to)), from, inside);
  else
    *reinterpret_cast<T*>(to) = inside ? *from : convert<T>(0.0f);
}

// Starts to copy channels-first pixels; complete after wait_for_copies and a barrier.
template <typename Shape, int kHeight, int kWidth, int kShift, bool kWhole, int kThreads, typename T>
__device__ __forceinline__ void stage_nchw(unsigned char* to, const T* tensor, const Images& images) {
  using Raw = StagedNchw<Shape, kHeight, kWidth, kShift, kWhole>;
  constexpr int kVector = Raw::kVector, kVectors = (kWhole ? Raw::kImage : Raw::kRow) / kVector;
  if constexpr (kWhole) {
    constexpr int kPlane = kHeight * kWidth;
#pragma unroll 4
    for (int i = threadIdx.x; i < Shape::kImages * kVectors; i += kThreads) {
      const int n = images.first_n + i / kVectors, at = images.first_channel * kPlane + i % kVectors * kVector;
      const bool inside = n < images.n && at < images.channels * kPlane;
      stage_vector<kVector>(to + 2 * kVector * i, tensor + (inside ? n * images.channels * kPlane + at : 0), inside);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kImages * Shape::kChannels * kVectors; i += kThreads) {
      const int at = i % kVectors * kVector, channel = i / kVectors % Shape::kChannels;
      const int image = i / (kVectors * Shape::kChannels), n = images.first_n + image;
      const int c = images.first_channel + channel, v = images.first_column - kShift + at;
      const bool inside =
          n < images.n && c < images.channels && static_cast<unsigned>(v) < static_cast<unsigned>(kWidth);
      unsigned offset = ((n * images.channels + c) * kHeight + images.first_row) * kWidth + v;
#pragma unroll(rows_at_once(Shape::kRows))
      for (int row = 0; row < Shape::kRows; ++row) {
        const bool there = inside && static_cast<unsigned>(images.first_row + row) < static_cast<unsigned>(kHeight);
        stage_vector<kVector>(to + 2 * (image * Raw::kImage + channel * Raw::kChannel + row * Raw::kRow + at),
                              tensor + (there ? offset : 0u), there);
        offset += kWidth;
      }
    }
  }
}

// Lays channels-first pixels that have arrived out as `Shape`: whole images element by element, others by transposing
// matrices of 8 channels x 8 columns, four at a time.
template <typename Shape, int kHeight, int kWidth, int kShift, bool kWhole, int kThreads, typename T>
__device__ __forceinline__ void transpose_nchw(unsigned char* to, const T* planes, const Images& images) {
  using Raw = StagedNchw<Shape, kHeight, kWidth, kShift, kWhole>;
  constexpr int kWords = Shape::kChannels / 8;
  if constexpr (kWhole) {
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kImages * kWords * Shape::kColumns; i += kThreads) {
      const int column = i % Shape::kColumns, word = i / Shape::kColumns % kWords,
                image = i / (Shape::kColumns * kWords);
      const int v = images.first_column + column;
      const bool inside = static_cast<unsigned>(v) < static_cast<unsigned>(kWidth);
      const T* from = planes + image * Raw::kImage + 8 * word * Raw::kChannel + images.first_row * kWidth + v;
      unsigned char* const at = to + image * Shape::kImageBytes + Shape::slot(column) * Shape::kPixelBytes + 16 * word;
#pragma unroll 2
      for (int row = 0; row < Shape::kRows; ++row) {
        Vector<T, 8> values = {};
        if (inside && static_cast<unsigned>(images.first_row + row) < static_cast<unsigned>(kHeight))
#pragma unroll
          for (int e = 0; e < 8; ++e) values.at[e] = from[row * kWidth + e * Raw::kChannel];
        *reinterpret_cast<Vector<T, 8>*>(at + row * Shape::kRowBytes) = values;
      }
    }
  } else {
    constexpr int kGroups = Raw::kRow / 8, kPairs = kWords / 2, kIterations = Shape::kImages * Shape::kRows * kGroups;
    static_assert(kWords % 2 == 0, "kChannels must be a multiple of 16");
    const int lane = threadIdx.x % 32;
    // Of four matrices two are blocks of channels, and two iterations.
#pragma unroll 2
    for (int i = threadIdx.x / 32; i < ceil_div(kIterations, 2) * kPairs; i += kThreads / 32) {
      const int pair = i % kPairs, first = i / kPairs * 2;
      const int source = min(first + lane / 16, kIterations - 1);
      const unsigned from =
          static_cast<unsigned>(__cvta_generic_to_shared(planes)) +
          2 * (source / (kGroups * Shape::kRows) * Raw::kImage + (16 * pair + lane % 16) * Raw::kChannel +
               source / kGroups % Shape::kRows * Raw::kRow + source % kGroups * 8);
      unsigned matrices[4];
      load_transposed(matrices, from);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int iteration = first + half, column = iteration % kGroups * 8 + lane / 4 - kShift;
        if (iteration >= kIterations || column < 0 || column >= Shape::kColumns) continue;
        unsigned* const at =
            reinterpret_cast<unsigned*>(to + iteration / (kGroups * Shape::kRows) * Shape::kImageBytes +
                                        iteration / kGroups % Shape::kRows * Shape::kRowBytes +
                                        Shape::slot(column) * Shape::kPixelBytes + 32 * pair + 4 * (lane % 4));
        at[0] = matrices[2 * half];
        at[4] = matrices[2 * half + 1];
      }
      __syncwarp();  // matrices are loaded by whole warps
    }
  }
}
