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
  static_assert(kFirst == 0 || kFirst == 1, "a row begins with its first word");

  static __device__ __forceinline__ int turned(int word) { return kIsTurned ? word ^ (word / 8 % 4 * 2) : word; }
};

// A tensor of images, contiguous in its layout, and the pixel of it that a patch starts from, which may lie outside:
// there it reads as zero.
struct PatchPlace {
  int height, width;
  int image, row, column;
};

// Moves a patch through registers; all kThreads threads of a block take part, each with as many vectors at a time as 32
// registers hold.
template <typename Shape, int kThreads, typename T>
struct PatchLoader {
  static constexpr int kVector = Shape::kVector, kChannels = Shape::kChannels, kColumnRuns = Shape::kColumns / kVector;
  static constexpr int kHeld = 32 / (kChannels * (kVector > 1 ? kVector / 2 : 1)), kMost = kHeld < 8 ? kHeld : 8;
  static constexpr int kAll = ceil_div(Shape::kRuns, kThreads), kLoads = kAll < kMost ? kAll : kMost;
  static constexpr bool kIsWhole = kAll <= kMost;

  using Pixel = Vector<T, 4>;
  struct alignas(16) PixelPair {
    Pixel at[2];
  };

  Vector<T, kVector> values[kLoads][kChannels];

  // Pixel j of load i, absent channels zero.
  __device__ __forceinline__ Pixel pixel_of(int i, int j) const {
    Pixel channels = {};
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const int at = j * kChannels + c;
      channels.at[c] = Shape::kChannelsLast ? values[i][at / kVector].at[at % kVector] : values[i][c].at[j];
    }
    return channels;
  }

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
      if constexpr (kVector % 2 == 0) {
        // Two pixels of a word are written at once: lanes are kVector pixels apart, and meet banks less often.
#pragma unroll
        for (int j = -Shape::kFirst; j < kVector; j += 2) {
          unsigned char* const to = row + 16 * Shape::turned((pixel + j) / 2);
          if (j >= 0 && j + 1 < kVector)
            *reinterpret_cast<PixelPair*>(to) = {pixel_of(i, j), pixel_of(i, j + 1)};
          else
            *reinterpret_cast<Pixel*>(to + (j < 0 ? 8 : 0)) = pixel_of(i, j < 0 ? 0 : j);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          *reinterpret_cast<Pixel*>(row + 16 * Shape::turned((pixel + j) / 2) + (pixel + j) % 2 * 8) = pixel_of(i, j);
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
