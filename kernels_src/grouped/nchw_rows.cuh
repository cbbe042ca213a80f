// Rows of channels-first images in shared memory, of 16-bit elements: [channel][image][row][column], each row whole
// 16-byte words, the columns past the tensor's zero: they are the padding right of their row and left of the next one.
// Rows whose width is even are copied as they are; images of odd width arrive without gaps and are then laid out.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/packed_groups.cuh"
#include "common/tile.cuh"

// kPitch elements lie between rows, kChannelBytes between channels, and 16 bytes of zeros before the first and after
// the last.
template <int kChannelCount, int kImageCount, int kRowCount, int kTensorHeight, int kTensorWidth, int kRowPitch,
          int kChannelPitchBytes>
struct NchwRows {
  static constexpr int kChannels = kChannelCount, kImages = kImageCount, kRows = kRowCount;
  static constexpr int kHeight = kTensorHeight, kWidth = kTensorWidth, kPitch = kRowPitch;
  static constexpr int kRowBytes = 2 * kPitch, kImageBytes = kRows * kRowBytes, kChannelBytes = kChannelPitchBytes;
  static constexpr int kBytes = 16 + kChannels * kChannelBytes + 16;
  static constexpr int kVector = greatest_divisor(8, kWidth);
  static constexpr bool kFlat = kVector == 1;
  static constexpr int kArea = kHeight * kWidth, kImageElements = kChannels * kArea;
  static constexpr int kArrivingBytes = kFlat ? 2 * kImages * kImageElements + 16 : kBytes;
  static_assert(kChannels % 8 == 0, "channels of an image are whole 16-byte words");
  static_assert(kPitch % 8 == 0 && kPitch > kWidth - 8 && kChannelBytes % 16 == 0,
                "kPitch must be a multiple of 16 bytes and hold a row");
  static_assert(kChannelBytes >= kImages * kImageBytes, "channels do not overlap");
};

// Where a block's rows begin in a tensor of `n` images of `channels` channels; the row may be outside.
struct NchwOrigin {
  int n, channels;
  int first_n, first_channel, first_row;
};

// Zeroes all that copies leave as it is. A barrier is needed before the rows are copied or laid out.
template <typename Shape, int kThreads>
__device__ __forceinline__ void clear_margins(unsigned char* rows) {
  // Copies fill part of a row's last word of pixels, laying out all of it.
  constexpr int kKept = Shape::kFlat ? ceil_div(Shape::kWidth, 8) : Shape::kWidth / 8;
  constexpr int kWords = Shape::kPitch / 8, kTail = kWords - kKept;
  constexpr int kSlack = (Shape::kChannelBytes - Shape::kImages * Shape::kImageBytes) / 16;
  constexpr int kAllRows = Shape::kImages * Shape::kRows;
  const uint4 zero = {};
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kChannels * kAllRows * kTail; i += kThreads) {
    const int word = i % maximum(1, kTail), row = i / maximum(1, kTail) % kAllRows;
    const int channel = i / (maximum(1, kTail) * kAllRows);
    const int at = channel * Shape::kChannelBytes + row * Shape::kRowBytes + 16 * (kKept + word);
    *reinterpret_cast<uint4*>(rows + 16 + at) = zero;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kChannels * kSlack; i += kThreads) {
    const int channel = i / maximum(1, kSlack), word = i % maximum(1, kSlack);
    *reinterpret_cast<uint4*>(rows + 16 + channel * Shape::kChannelBytes + Shape::kImages * Shape::kImageBytes +
                              16 * word) = zero;
  }
  if (threadIdx.x < 2) *reinterpret_cast<uint4*>(rows + threadIdx.x * (Shape::kBytes - 16)) = zero;
}

// Threads that share the channels of a vector of a patch, a power of 2 that divides them: so that few of the copies'
// instructions find threads without work.
constexpr int threads_of_vector(int vectors, int channels, int threads) {
  constexpr int kEach = 2, kStart = 14;  // instructions of a copy, and before the first
  int best = 1;
  for (int sharing = 2; channels % sharing == 0; sharing *= 2)
    if (ceil_div(vectors * sharing, threads) * (channels / sharing * kEach + kStart) <
        ceil_div(vectors * best, threads) * (channels / best * kEach + kStart))
      best = sharing;
  return best;
}

// Starts to copy what a tile has of a tensor, zeros outside it; complete after wait_for_copies and a barrier. A thread
// copies a vector of a row of channel after channel, which takes few instructions; neighbours copy what lies side by
// side in memory.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void stage_rows(unsigned to, const T* tensor, const NchwOrigin& origin) {
  if constexpr (Shape::kFlat) {
    constexpr int kVectors = Shape::kImageElements / 8;
    const int first = origin.first_channel * Shape::kArea, all = origin.channels * Shape::kArea;
#pragma unroll 2
    for (int i = threadIdx.x; i < Shape::kImages * kVectors; i += kThreads) {
      const int n = origin.first_n + i / kVectors, at = first + i % kVectors * 8;
      const bool inside = n < origin.n && at < all;
      copy_bytes<16>(to + 16 * i, tensor + (inside ? n * all + at : 0), inside);
    }
  } else {
    constexpr int kVector = Shape::kVector, kAcross = Shape::kWidth / kVector;
    constexpr int kVectors = Shape::kImages * Shape::kRows * kAcross;
    constexpr int kThreadsOfVector = threads_of_vector(kVectors, Shape::kChannels, kThreads);
    constexpr int kIterations = Shape::kChannels / kThreadsOfVector;
#pragma unroll 1
    for (int i = threadIdx.x; i < kVectors * kThreadsOfVector; i += kThreads) {
      const int at = i % kAcross * kVector, row = i / kAcross % Shape::kRows;
      const int image = i / (kAcross * Shape::kRows) % Shape::kImages, own = i / kVectors;
      const int n = origin.first_n + image, h = origin.first_row + row;
      const int left = origin.channels - origin.first_channel - own;
      const bool inside = n < origin.n && static_cast<unsigned>(h) < static_cast<unsigned>(Shape::kHeight);
      const unsigned row_at =
          to + 16 + own * Shape::kChannelBytes + image * Shape::kImageBytes + row * Shape::kRowBytes + 2 * at;
      // May name memory outside the tensor, which a copy of zeros does not read: one address serves all channels.
      const T* const from =
          tensor + static_cast<unsigned>((n * origin.channels + origin.first_channel + own) * Shape::kArea + at) +
          static_cast<int64>(h) * Shape::kWidth;
#pragma unroll(kIterations <= 32 ? kIterations : 8)
      for (int iteration = 0; iteration < kIterations; ++iteration)
        copy_bytes<2 * kVector>(row_at + iteration * kThreadsOfVector * Shape::kChannelBytes,
                                from + iteration * kThreadsOfVector * Shape::kArea,
                                inside && iteration * kThreadsOfVector < left);
    }
  }
}

// Lays images of odd width that have arrived out as rows, a thread 8 columns at a time.
template <typename Shape, int kThreads>
__device__ __forceinline__ void lay_out_rows(unsigned char* to, const unsigned char* arrived, int first_row) {
  constexpr int kWords = ceil_div(Shape::kWidth, 8), kAllRows = Shape::kImages * Shape::kRows;
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kChannels * kAllRows * kWords; i += kThreads) {
    const int word = i % kWords, row = i / kWords % Shape::kRows, image = i / (kWords * Shape::kRows) % Shape::kImages;
    const int channel = i / (kWords * kAllRows), h = first_row + row;
    uint4 values = {};
    if (static_cast<unsigned>(h) < static_cast<unsigned>(Shape::kHeight)) {
      const int at = (image * Shape::kChannels + channel) * Shape::kArea + h * Shape::kWidth + 8 * word;
      const unsigned* const pairs = reinterpret_cast<const unsigned*>(arrived) + at / 2;
      const int bits = at % 2 * 16, left = Shape::kWidth - 8 * word;
      unsigned in[5], out[4];
#pragma unroll
      for (int e = 0; e < 5; ++e) in[e] = pairs[e];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned both = __funnelshift_r(in[e], in[e + 1], bits);
        out[e] = left >= 2 * e + 2 ? both : left == 2 * e + 1 ? both & 0xffffu : 0u;
      }
      values = {out[0], out[1], out[2], out[3]};
    }
    *reinterpret_cast<uint4*>(to + 16 + channel * Shape::kChannelBytes + image * Shape::kImageBytes +
                              row * Shape::kRowBytes + 16 * word) = values;
  }
}
