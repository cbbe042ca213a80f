// Input tiles of images of up to four 16-bit channels in shared memory: [row][column][4 channels], absent channels
// zero, whatever the tensor's layout. The taps that an output meets in a row are then 8-byte pixels side by side; where
// the first is even, their 16-byte words are the rows that matrix instructions read.
#pragma once

#include "common/tile.cuh"

// Shape of an input tile. Its first column lies at pixel kFirstPixel of a row. kVector columns are loaded at once:
// the tensor's width and an input tile's first column are multiples of it. If kIsPermuted, the words of a row are
// permuted so that those of every eighth word and its neighbour fall into different banks.
template <int kChannelCount, int kRowCount, int kColumnCount, int kFirstPixel, int kVectorLength, bool kChannelsAreLast,
          bool kIsPermuted>
struct InputTile {
  static constexpr int kChannels = kChannelCount, kRows = kRowCount, kColumns = kColumnCount, kFirst = kFirstPixel;
  static constexpr int kVector = kVectorLength, kVectors = kRows * kColumns / kVector;
  static constexpr bool kChannelsLast = kChannelsAreLast;
  static constexpr int kRowWords = round_up(kFirst + kColumns, 16) / 2, kRowBytes = 16 * kRowWords;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kChannels >= 1 && kChannels <= 4, "pixels hold four channels");
  static_assert(kColumns % kVector == 0, "a vector lies within a row");
  static_assert(kFirst == 0 || kFirst == 1, "a row begins with its first word");

  static __device__ __forceinline__ int word_position(int word) {
    return kIsPermuted ? word ^ (word / 8 % 4 * 2) : word;
  }
};

// A tensor of images, contiguous in its layout, and the pixel of it that an input tile starts from, which may lie
// outside: there it reads as zero.
struct InputTileOrigin {
  int height, width;
  int image, row, column;
};

// Moves an input tile through registers; all kThreads threads of a block take part, each with as many vectors at a time
// as 32 registers hold, or with all if kAllAtOnce. What has been loaded stays in whole registers until it is written:
// nothing waits for a load before.
template <typename TileShape, int kThreads, typename T, bool kAllAtOnce = false>
struct InputTileLoader {
  static constexpr int kVector = TileShape::kVector, kChannels = TileShape::kChannels,
                       kRowVectors = TileShape::kColumns / kVector;
  // A vector's registers, a single element's upper half unused.
  static constexpr int kVectorWords = kVector > 1 ? kVector / 2 : 1, kWords = kChannels * kVectorWords;
  static constexpr int kRegisterLoads = 32 / kWords, kMostLoads = kRegisterLoads < 8 ? kRegisterLoads : 8;
  static constexpr int kAllLoads = ceil_div(TileShape::kVectors, kThreads),
                       kLoads = kAllAtOnce || kAllLoads < kMostLoads ? kAllLoads : kMostLoads;
  static constexpr bool kIsWhole = kAllLoads <= kMostLoads;
  static_assert(sizeof(T) == 2, "two elements are a register");

  using Pixel = Vector<unsigned, 2>;
  struct alignas(16) PixelPair {
    Pixel at[2];
  };

  unsigned words[kLoads][kWords];

  // Which half of a load's registers pixel j's channel c is; -1 if the channel is absent.
  static constexpr __device__ __forceinline__ int half_of(int j, int c) {
    if (c >= kChannels) return -1;
    const int at = j * kChannels + c;
    return TileShape::kChannelsLast ? at / kVector * 2 * kVectorWords + at % kVector : c * 2 * kVectorWords + j;
  }

  // Two halves of load i as one register; -1 is a zero.
  __device__ __forceinline__ unsigned joined(int i, int first, int second) const {
    const unsigned low = first < 0 ? 0 : words[i][first / 2], high = second < 0 ? 0 : words[i][second / 2];
    return __byte_perm(low, high, (first % 2 == 1 ? 0x32 : 0x10) | (second % 2 == 1 ? 0x7600 : 0x5400));
  }

  // Pixel j of load i, absent channels zero.
  __device__ __forceinline__ Pixel pixel_of(int i, int j) const {
    return {joined(i, half_of(j, 0), half_of(j, 1)), joined(i, half_of(j, 2), half_of(j, 3))};
  }

  // Starts to load, from vector `first` on.
  __device__ __forceinline__ void load(const T* __restrict__ x, const InputTileOrigin& origin, int first = 0) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int rank = first + i * kThreads + threadIdx.x;
      const int h = origin.row + rank / kRowVectors, v = origin.column + rank % kRowVectors * kVector;
      const bool inside = rank < TileShape::kVectors &&
                          static_cast<unsigned>(h) < static_cast<unsigned>(origin.height) &&
                          static_cast<unsigned>(v) < static_cast<unsigned>(origin.width);
      const int channel_stride = origin.height * origin.width;
      const int at = TileShape::kChannelsLast ? ((origin.image * origin.height + h) * origin.width + v) * kChannels
                                              : origin.image * kChannels * channel_stride + h * origin.width + v;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const T* const from = x + at + c * (TileShape::kChannelsLast ? kVector : channel_stride);
        Vector<unsigned, kVectorWords> loaded = {};
        if (inside) {
          if constexpr (kVector == 1)
            loaded.at[0] = *reinterpret_cast<const unsigned short*>(from);
          else
            loaded = *reinterpret_cast<const Vector<unsigned, kVectorWords>*>(from);
        }
#pragma unroll
        for (int word = 0; word < kVectorWords; ++word) words[i][c * kVectorWords + word] = loaded.at[word];
      }
    }
  }

  // Writes what load() loaded from vector `first` on.
  __device__ __forceinline__ void store(unsigned char* input_tile, int first = 0) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int rank = first + i * kThreads + threadIdx.x;
      if (rank >= TileShape::kVectors) break;
      unsigned char* const row = input_tile + rank / kRowVectors * TileShape::kRowBytes;
      const int pixel = TileShape::kFirst + rank % kRowVectors * kVector;
      if constexpr (kVector % 2 == 0) {
        // Two pixels of a word are written at once: lanes are kVector pixels apart, and meet banks less often.
#pragma unroll
        for (int j = -TileShape::kFirst; j < kVector; j += 2) {
          unsigned char* const to = row + 16 * TileShape::word_position((pixel + j) / 2);
          if (j >= 0 && j + 1 < kVector)
            *reinterpret_cast<PixelPair*>(to) = {pixel_of(i, j), pixel_of(i, j + 1)};
          else
            *reinterpret_cast<Pixel*>(to + (j < 0 ? 8 : 0)) = pixel_of(i, j < 0 ? 0 : j);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          *reinterpret_cast<Pixel*>(row + 16 * TileShape::word_position((pixel + j) / 2) + (pixel + j) % 2 * 8) =
              pixel_of(i, j);
      }
    }
  }

  // Both, for input tiles of any size.
  __device__ __forceinline__ void copy(unsigned char* input_tile, const T* __restrict__ x,
                                       const InputTileOrigin& origin) {
#pragma unroll 1
    for (int first = 0; first < TileShape::kVectors; first += kLoads * kThreads) {
      load(x, origin, first);
      store(input_tile, first);
    }
  }
};
