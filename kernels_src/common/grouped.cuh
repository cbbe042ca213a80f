// What the kernels of grouped convolutions share: how groups fill matrices, and pixels in shared memory. The same
// arithmetic: miofind/tiling/grouped.py. Groups are taken `kPack` at a time, as many as have multiples of 8 channels on
// both sides; blocks of 8 x 8 in which no group meets itself are left out.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/mma.cuh"
#include "common/small_matrices.cuh"
#include "common/tile.cuh"

constexpr int greatest_divisor(int a, int b) {
  return b == 0 ? a : greatest_divisor(b, a % b);
}

// Groups of kC input and kK output channels each.
template <int kC, int kK>
struct Groups {
  static constexpr int kPack = 8 / greatest_divisor(8, greatest_divisor(kC, kK));
  static constexpr int kPackC = kPack * kC, kPackK = kPack * kK;

  // Whether 8 channels from 8 * c on and 8 filters from 8 * k on have a group in common.
  static constexpr bool meet(int c, int k) {
    return 8 * c / kC <= (8 * k + 7) / kK && 8 * k / kK <= (8 * c + 7) / kC;
  }
};

// Bytes rounded up to an odd number of 16-byte words, so that 8 neighbours meet all banks.
constexpr int odd_words(int bytes) {
  return 16 * (ceil_div(bytes, 16) | 1);
}

// Pixels of images in shared memory: [image][row][slot][channel]. Columns that are kStep apart lie side by side.
template <int kImageCount, int kRowCount, int kColumnCount, int kColumnStep, int kChannelCount>
struct Pixels {
  static constexpr int kImages = kImageCount, kRows = kRowCount, kColumns = kColumnCount, kChannels = kChannelCount;
  static constexpr int kStep = kColumnStep, kRun = ceil_div(kColumns, kStep), kSlots = kRun * kStep;
  static constexpr int kPixelBytes = odd_words(2 * kChannels), kRowBytes = kSlots * kPixelBytes;
  static constexpr int kImageBytes = kRows * kRowBytes, kBytes = kImages * kImageBytes;
  static constexpr int slot(int column) { return column % kStep * kRun + column / kStep; }
};

// A tensor's sizes, and where a block's part of it begins; rows and columns may begin outside.
struct Images {
  int n, channels, height, width;
  int first_n, first_channel, first_row, first_column;
};

// Starts to copy pixels, zeros outside the tensor; complete after wait_for_copies and a barrier.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void stage_pixels(unsigned to, const T* tensor, const Images& images) {
  constexpr int kWords = Shape::kChannels / 8, kPixels = Shape::kRows * Shape::kColumns;
#pragma unroll 4
  for (int i = threadIdx.x; i < Shape::kImages * kPixels * kWords; i += kThreads) {
    const int word = i % kWords, pixel = i / kWords, column = pixel % Shape::kColumns;
    const int row = pixel / Shape::kColumns % Shape::kRows, image = pixel / kPixels;
    const int n = images.first_n + image, channel = images.first_channel + 8 * word;
    const int h = images.first_row + row, v = images.first_column + column;
    const bool inside = n < images.n && channel < images.channels &&
                        static_cast<unsigned>(h) < static_cast<unsigned>(images.height) &&
                        static_cast<unsigned>(v) < static_cast<unsigned>(images.width);
    const int offset = inside ? ((n * images.height + h) * images.width + v) * images.channels + channel : 0;
    copy_bytes<16>(to + image * Shape::kImageBytes + row * Shape::kRowBytes +
                       Shape::slot(column) * Shape::kPixelBytes + 16 * word,
                   tensor + offset, inside);
  }
}
