// Patches of images of up to four 16-bit channels in shared memory: [row][column][4 channels], absent channels zero,
// whatever the tensor's layout. The taps that outputs meet in a row are then one run of 8-byte pixels; where a run
// starts with an even pixel, its 16-byte words are the rows that matrix instructions read.
#pragma once

#include "common/tile.cuh"

// Shape of a patch. Its first column lies at pixel kFirstPixel of a row. kVector columns are loaded at once: the
// tensor's width and a patch's first column are multiples of it. If kIsTurned, the words of a row are permuted so that
// those of every eighth word and its neighbour fall into different banks.
template <int kChannelCount, int kRowCount, int kColumnCount, int kFirstPixel, int kVectorLength, bool kChannelsAreLast,
          bool kIsTurned>
struct Patch {
  static constexpr int kChannels = kChannelCount, kRows = kRowCount, kColumns = kColumnCount, kFirst = kFirstPixel;
  static constexpr int kVector = kVectorLength, kRuns = kRows * kColumns / kVector;
  static constexpr bool kChannelsLast = kChannelsAreLast;
  static constexpr int kRowWords = round_up(kFirst + kColumns, 16) / 2, kBytes = 16 * kRows * kRowWords;
  static_assert(kChannels >= 1 && kChannels <= 4, "pixels hold four channels");
  static_assert(kColumns % kVector == 0, "a vector lies within a row");

  static __device__ __forceinline__ int turned(int word) { return kIsTurned ? word ^ (word / 8 % 4 * 2) : word; }
};

// A tensor of images, contiguous in its layout, and the pixel of it that a patch starts from, which may lie outside:
// there it reads as zero.
struct PatchPlace {
  int height, width;
  int image, row, column;
};

// Moves a patch through registers; all kThreads threads of a block take part, with at most kMost vectors of a channel
// each at a time.
template <typename Shape, int kThreads, int kMost, typename T>
struct PatchLoader {
  static constexpr int kVector = Shape::kVector, kChannels = Shape::kChannels, kColumnRuns = Shape::kColumns / kVector;
  static constexpr int kAll = ceil_div(Shape::kRuns, kThreads), kLoads = kAll < kMost ? kAll : kMost;
  static constexpr bool kIsWhole = kAll <= kMost;

  Vector<T, kVector> values[kLoads][kChannels];

  // Starts to load, from vector `first` on.
  __device__ __forceinline__ void take(const T* __restrict__ x, const PatchPlace& place, int first = 0) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int rank = first + i * kThreads + threadIdx.x;
      const int h = place.row + rank / kColumnRuns, v = place.column + rank % kColumnRuns * kVector;
      const bool inside = rank < Shape::kRuns && static_cast<unsigned>(h) < static_cast<unsigned>(place.height) &&
                          static_cast<unsigned>(v) < static_cast<unsigned>(place.width);
      const int plane = place.height * place.width;
      const int at = Shape::kChannelsLast ? ((place.image * place.height + h) * place.width + v) * kChannels
                                          : place.image * kChannels * plane + h * place.width + v;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        values[i][c] = {};
        if (inside)
          values[i][c] =
              *reinterpret_cast<const Vector<T, kVector>*>(x + at + c * (Shape::kChannelsLast ? kVector : plane));
      }
    }
  }

  // Writes what take() loaded from vector `first` on.
  __device__ __forceinline__ void put(unsigned char* patch, int first = 0) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int rank = first + i * kThreads + threadIdx.x;
      if (rank >= Shape::kRuns) break;
      unsigned char* const row = patch + rank / kColumnRuns * 16 * Shape::kRowWords;
      const int pixel = Shape::kFirst + rank % kColumnRuns * kVector;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        Vector<T, 4> channels = {};
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const int at = j * kChannels + c;
          channels.at[c] = Shape::kChannelsLast ? values[i][at / kVector].at[at % kVector] : values[i][c].at[j];
        }
        const int word = Shape::turned((pixel + j) / 2), half = (Shape::kFirst + j) % 2;
        *reinterpret_cast<Vector<T, 4>*>(row + 16 * word + 8 * (kVector % 2 == 0 ? half : (pixel + j) % 2)) = channels;
      }
    }
  }

  // Both, for patches of any size.
  __device__ __forceinline__ void move(unsigned char* patch, const T* __restrict__ x, const PatchPlace& place) {
#pragma unroll 1
    for (int first = 0; first < Shape::kRuns; first += kLoads * kThreads) {
      take(x, place, first);
      put(patch, first);
    }
  }
};
