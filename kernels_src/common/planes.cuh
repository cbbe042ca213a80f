// Planes of images in shared memory, in their own 16-bit type: [channel][row][image][column], whatever the tensor's
// layout, so that the same row of a block's images is one run of slots that matrix instructions read as rows.
//
// A slot is one row of one image. Channels-last tensors are transposed on the way, 16 bytes of channels at a time.
#pragma once

#include "common/tile.cuh"

// Shape of staged planes. kVector neighbours in memory move at once: channels if kChannelsLast, else columns, in which
// case kColumns, the tensor's width and every first column are multiples of it. kPitch elements lie between slots.
template <int kChannelCount, int kImageCount, int kRowCount, int kColumnCount, int kSlotPitch, int kVectorLength,
          bool kChannelsAreLast>
struct Planes {
  static constexpr int kChannels = kChannelCount, kImages = kImageCount, kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPitch = kSlotPitch, kVector = kVectorLength;
  static constexpr bool kChannelsLast = kChannelsAreLast;
  static constexpr int kSlots = kRows * kImages, kPlane = kSlots * kPitch, kElements = kChannels * kPlane;
  static constexpr int kVectors = kChannels * kSlots * kColumns / kVector;
  static_assert(kPitch % 8 == 0 && kPitch >= kColumns, "slots are whole 16-byte words");
  static_assert((kChannelsLast ? kChannels : kColumns) % kVector == 0, "a vector lies within one run");
};

// A tensor of images, contiguous in its layout, and the element of it that a block's planes start from. The first row
// and column may be negative; what lies outside reads as zero and is not written.
struct Images {
  int n, channels, height, width;
  int first_n, first_channel, first_row, first_column;
};

// Where a vector of planes is: its place in shared memory, and in the tensor, negative if outside.
struct VectorPlace {
  int staged, offset;
};

template <typename Shape>
__device__ __forceinline__ VectorPlace vector_place(const Images& images, int rank) {
  constexpr int kChannelRuns = Shape::kChannelsLast ? Shape::kChannels / Shape::kVector : 1;
  constexpr int kColumnRuns = Shape::kChannelsLast ? Shape::kColumns : Shape::kColumns / Shape::kVector;
  int channel = rank % kChannelRuns * Shape::kVector;
  rank /= kChannelRuns;
  const int column = rank % kColumnRuns * (Shape::kChannelsLast ? 1 : Shape::kVector);
  rank /= kColumnRuns;
  const int row = rank % Shape::kRows;
  rank /= Shape::kRows;
  const int image = rank % Shape::kImages;
  if (!Shape::kChannelsLast) channel = rank / Shape::kImages;
  const int n = images.first_n + image, c = images.first_channel + channel;
  const int h = images.first_row + row, v = images.first_column + column;
  const bool inside = n < images.n && c < images.channels &&
                      static_cast<unsigned>(h) < static_cast<unsigned>(images.height) &&
                      static_cast<unsigned>(v) < static_cast<unsigned>(images.width);
  const int offset = Shape::kChannelsLast ? ((n * images.height + h) * images.width + v) * images.channels + c
                                          : ((n * images.channels + c) * images.height + h) * images.width + v;
  const int slot = row * Shape::kImages + image;
  return {channel * Shape::kPlane + slot * Shape::kPitch + column, inside ? offset : -1};
}

constexpr int largest_power_dividing(int columns) {
  return columns % 8 == 0 ? 8 : columns % 4 == 0 ? 4 : columns % 2 == 0 ? 2 : 1;
}

// Zeroes columns [kFirst, kEnd) of kSlots slots.
template <int kSlots, int kFirst, int kEnd, int kPitch, int kThreads, typename T>
__device__ __forceinline__ void clear_columns(T* planes) {
  constexpr int kVector = largest_power_dividing(kFirst), kRuns = (kEnd - kFirst) / kVector;
  static_assert(kEnd % 8 == 0 && kEnd <= kPitch, "whole 16-byte words are cleared");
  if constexpr (kRuns > 0) {
    for (int i = threadIdx.x; i < kSlots * kRuns; i += kThreads)
      *reinterpret_cast<Vector<T, kVector>*>(planes + i / kRuns * kPitch + kFirst + i % kRuns * kVector) = {};
  }
}

// Starts to fill the columns of all slots, and zeroes those from kColumns to kWidth; all kThreads threads take part.
// Complete after wait_for_copies<0>() and a barrier.
template <typename Shape, int kThreads, int kWidth, typename T>
__device__ __forceinline__ void load_planes(T* planes, const T* tensor, const Images& images) {
  constexpr int kVector = Shape::kVector;
  if constexpr (!Shape::kChannelsLast && kVector > 1) {
    for (int rank = threadIdx.x; rank < Shape::kVectors; rank += kThreads) {
      const VectorPlace place = vector_place<Shape>(images, rank);
      const bool inside = place.offset >= 0;
      copy_async<kVector / 2>(reinterpret_cast<float*>(planes + place.staged),
                              reinterpret_cast<const float*>(inside ? tensor + place.offset : tensor), inside);
    }
    commit_copies();
  } else {
    constexpr int kInFlight = kVector == 1 ? 8 : 4;
    constexpr int kStep = Shape::kChannelsLast ? Shape::kPlane : 1;
    for (int first = threadIdx.x; first < Shape::kVectors; first += kInFlight * kThreads) {
      Vector<T, kVector> values[kInFlight] = {};
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int rank = first + i * kThreads;
        const VectorPlace place = vector_place<Shape>(images, rank);
        if (rank < Shape::kVectors && place.offset >= 0)
          values[i] = *reinterpret_cast<const Vector<T, kVector>*>(tensor + place.offset);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int rank = first + i * kThreads;
        if (rank >= Shape::kVectors) break;
        T* const to = planes + vector_place<Shape>(images, rank).staged;
#pragma unroll
        for (int k = 0; k < kVector; ++k) to[k * kStep] = values[i].at[k];
      }
    }
  }
  clear_columns<Shape::kChannels * Shape::kSlots, Shape::kColumns, kWidth, Shape::kPitch, kThreads>(planes);
}

// Writes planes to the tensor; all kThreads threads take part.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void store_planes(T* tensor, const T* planes, const Images& images) {
  constexpr int kVector = Shape::kVector;
  constexpr int kStep = Shape::kChannelsLast ? Shape::kPlane : 1;
#pragma unroll 2
  for (int rank = threadIdx.x; rank < Shape::kVectors; rank += kThreads) {
    const VectorPlace place = vector_place<Shape>(images, rank);
    if (place.offset < 0) continue;
    Vector<T, kVector> values;
#pragma unroll
    for (int k = 0; k < kVector; ++k) values.at[k] = planes[place.staged + k * kStep];
    *reinterpret_cast<Vector<T, kVector>*>(tensor + place.offset) = values;
  }
}
