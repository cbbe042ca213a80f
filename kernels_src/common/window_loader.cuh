// Moves rows of few channels from a tensor through registers to where common/pixel_windows.cuh lays them out. What has
// been loaded stays in whole registers until it is written: nothing waits for a load before that.
#pragma once

#include "common/pixel_windows.cuh"

// The elements numbered `first` and `second` of neighbours, two to a word, as one word; -1 is a zero.
template <int kCount>
__device__ __forceinline__ unsigned two_of(const unsigned (&words)[kCount], int first, int second) {
  const unsigned low = first < 0 ? 0 : words[first / 2], high = second < 0 ? 0 : words[second / 2];
  return __byte_perm(low, high, (first > 0 && first % 2 ? 0x32 : 0x10) | (second > 0 && second % 2 ? 0x7600 : 0x5400));
}

// Of a chunk of rows, Shape of common/pixel_windows.cuh; all kThreads threads of a block take part.
template <typename Shape, int kThreads, typename T>
struct WindowLoader {
  static constexpr int kVector = Shape::kVector, kChannels = Shape::kChannels, kColumnRuns = Shape::kColumns / kVector;
  static constexpr int kLoads = ceil_div(Shape::kRuns, kThreads);
  // A vector's words, a single element's upper half unused.
  static constexpr int kVectorWords = kVector > 1 ? kVector / 2 : 1;
  static constexpr bool kChannelsLast = Shape::kChannelsLast;

  struct alignas(8) Pixel {
    unsigned at[2];
  };
  struct alignas(16) PixelPair {
    Pixel at[2];
  };

  unsigned words[kLoads][kChannels * kVectorWords];

  // Which element pixel j's channel c is, of those that a thread loads at once.
  static constexpr __device__ __forceinline__ int element_of(int j, int c) {
    if (c >= kChannels) return -1;
    const int vector = kChannelsLast ? (j * kChannels + c) / kVector : c;
    const int at = kChannelsLast ? (j * kChannels + c) % kVector : j;
    return 2 * kVectorWords * vector + at;
  }

  // Pixel j of load i, absent channels zero.
  __device__ __forceinline__ Pixel pixel_of(int i, int j) const {
    return {two_of(words[i], element_of(j, 0), element_of(j, 1)), two_of(words[i], element_of(j, 2), element_of(j, 3))};
  }

  // Starts to load; zeros outside the image.
  __device__ __forceinline__ void take(const T* __restrict__ x, const PatchPlace& place) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int rank = i * kThreads + threadIdx.x;
      const int h = place.row + rank / kColumnRuns, v = place.column + rank % kColumnRuns * kVector;
      const bool inside = rank < Shape::kRuns && static_cast<unsigned>(h) < static_cast<unsigned>(place.height) &&
                          static_cast<unsigned>(v) < static_cast<unsigned>(place.width);
      const int plane = place.height * place.width;
      const int at = kChannelsLast ? ((place.image * place.height + h) * place.width + v) * kChannels
                                   : place.image * kChannels * plane + h * place.width + v;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const T* const from = x + at + c * (kChannelsLast ? kVector : plane);
        unsigned* const to = words[i] + c * kVectorWords;
        if constexpr (kVector == 1) {
          to[0] = 0;
          if (inside) to[0] = *reinterpret_cast<const unsigned short*>(from);
        } else {
          Vector<unsigned, kVectorWords> loaded = {};
          if (inside) loaded = *reinterpret_cast<const Vector<unsigned, kVectorWords>*>(from);
#pragma unroll
          for (int word = 0; word < kVectorWords; ++word) to[word] = loaded.at[word];
        }
      }
    }
  }

  // Writes what take() loaded.
  __device__ __forceinline__ void put(unsigned char* chunk) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int rank = i * kThreads + threadIdx.x;
      if (rank >= Shape::kRuns) break;
      unsigned char* const row = chunk + rank / kColumnRuns * Shape::kRowBytes;
      const int pixel = Shape::kFirst + rank % kColumnRuns * kVector;
      // Two pixels of a word are written at once, but for those that share theirs with another vector's.
#pragma unroll
      for (int j = kVector > 1 ? -Shape::kFirst : 0; j < kVector; j += 2) {
        unsigned char* const to = row + 16 * Shape::turned((pixel + j) / 2);
        if (j >= 0 && j + 1 < kVector)
          *reinterpret_cast<PixelPair*>(to) = {pixel_of(i, j), pixel_of(i, j + 1)};
        else
          *reinterpret_cast<Pixel*>(to + (kVector == 1 ? pixel % 2 * 8 : j < 0 ? 8 : 0)) = pixel_of(i, j < 0 ? 0 : j);
      }
    }
  }
};
