// Images in shared memory, in their own 16-bit type: [channel][row][image][column], whatever the tensor's layout. The
// same row of all images is one contiguous segment of slots, which matrix instructions read as rows.
//
// A slot is one row of one image; channels can have slots of zeros between them, before the first and after the last.
// Channels-last tensors are transposed on the way, 16 bytes of channels at a time.
#pragma once

#include "common/tile.cuh"

// Shape of staged images. kVector neighbours in memory move at once: channels if kChannelsLast; else columns, in which
// case kColumns, the tensor's width and every first column are multiples of it; or, if kFlat, elements of the block's
// channels, which then hold whole images of the tensor. kPitch elements lie between slots. kGap slots of zeros lie
// around each channel's.
template <int kChannelCount, int kImageCount, int kRowCount, int kColumnCount, int kSlotPitch, int kGapSlots,
          int kVectorLength, bool kChannelsAreLast, bool kIsFlat>
struct StagedImages {
  static constexpr int kChannels = kChannelCount, kImages = kImageCount, kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPitch = kSlotPitch, kGap = kGapSlots, kVector = kVectorLength;
  static constexpr bool kChannelsLast = kChannelsAreLast, kFlat = kIsFlat;
  static constexpr int kSegment = kChannelsLast ? kChannels : kFlat ? kChannels * kRows * kColumns : kColumns;
  static constexpr int kSlots = kRows * kImages, kChannelPitch = (kSlots + kGap) * kPitch, kFirst = kGap * kPitch;
  static constexpr int kElements = kFirst + kChannels * kChannelPitch;
  static constexpr int kVectors = kChannels * kSlots * kColumns / kVector;
  static_assert(kPitch % 8 == 0 && kPitch >= kColumns, "kPitch must be a multiple of 8 elements and hold a row");
  static_assert(kSegment % kVector == 0 && !(kChannelsLast && kFlat), "a contiguous segment must have whole vectors");
};

// A tensor of images, contiguous in its layout, and the element of it that a block starts from. The first row
// and column may be negative; what lies outside reads as zero and is not written.
struct Images {
  int n, channels, height, width;
  int first_n, first_channel, first_row, first_column;
};

// Where a vector of images is: its first element's offset in shared memory, in the images, and in the tensor, negative
// if outside.
struct VectorOffsets {
  int staged, row, column, offset;
};

template <typename Shape>
__device__ __forceinline__ VectorOffsets vector_offsets(const Images& images, int rank) {
  int channel = 0, column = 0, row = 0, image = 0;
  if constexpr (Shape::kFlat) {
    const int at = rank % (Shape::kSegment / Shape::kVector) * Shape::kVector;
    image = rank / (Shape::kSegment / Shape::kVector);
    column = at % Shape::kColumns;
    row = at / Shape::kColumns % Shape::kRows;
    channel = at / (Shape::kColumns * Shape::kRows);
  } else {
    constexpr int kChannelSegments = Shape::kChannelsLast ? Shape::kChannels / Shape::kVector : 1;
    constexpr int kColumnSegments = Shape::kChannelsLast ? Shape::kColumns : Shape::kColumns / Shape::kVector;
    channel = rank % kChannelSegments * Shape::kVector;
    rank /= kChannelSegments;
    column = rank % kColumnSegments * (Shape::kChannelsLast ? 1 : Shape::kVector);
    rank /= kColumnSegments;
    row = rank % Shape::kRows;
    rank /= Shape::kRows;
    image = rank % Shape::kImages;
    if (!Shape::kChannelsLast) channel = rank / Shape::kImages;
  }
  const int n = images.first_n + image, c = images.first_channel + channel;
  const int h = images.first_row + row, v = images.first_column + column;
  const bool inside = n < images.n && c < images.channels &&
                      static_cast<unsigned>(h) < static_cast<unsigned>(images.height) &&
                      static_cast<unsigned>(v) < static_cast<unsigned>(images.width);
  const int offset = Shape::kChannelsLast ? ((n * images.height + h) * images.width + v) * images.channels + c
                                          : ((n * images.channels + c) * images.height + h) * images.width + v;
  const int slot = row * Shape::kImages + image;
  const int staged = Shape::kFirst + channel * Shape::kChannelPitch + slot * Shape::kPitch + column;
  return {staged, row, column, inside ? offset : -1};
}

// Goes on to the vector's next element in shared memory.
template <typename Shape>
__device__ __forceinline__ void advance(VectorOffsets& vector) {
  vector.staged += Shape::kChannelsLast ? Shape::kChannelPitch : 1;
  if (!Shape::kFlat || ++vector.column < Shape::kColumns) return;
  vector.column = 0;
  vector.staged += Shape::kImages * Shape::kPitch - Shape::kColumns;
  if (++vector.row < Shape::kRows) return;
  vector.row = 0;
  vector.staged += Shape::kChannelPitch - Shape::kSlots * Shape::kPitch;
}

constexpr int largest_power_dividing(int columns) {
  return columns % 8 == 0 ? 8 : columns % 4 == 0 ? 4 : columns % 2 == 0 ? 2 : 1;
}

// Zeroes the gaps between channels, and columns from kColumns to kWidth of all slots.
template <typename Shape, int kThreads, int kWidth, typename T>
__device__ __forceinline__ void clear_margins(T* staged) {
  constexpr int kGapSegments = Shape::kFirst / 8;
  for (int i = threadIdx.x; i < (Shape::kChannels + 1) * kGapSegments; i += kThreads) {
    const int at =
        kGapSegments == 0 ? 0 : i / maximum(1, kGapSegments) * Shape::kChannelPitch + i % maximum(1, kGapSegments) * 8;
    *reinterpret_cast<Vector<T, 8>*>(staged + at) = {};
  }
  constexpr int kVector = largest_power_dividing(Shape::kColumns), kSegments = (kWidth - Shape::kColumns) / kVector;
  static_assert(kWidth % 8 == 0 && kWidth <= Shape::kPitch,
                "kWidth must be a multiple of 8 within kPitch: margins are cleared by 16-byte words");
  for (int i = threadIdx.x; i < Shape::kChannels * Shape::kSlots * kSegments; i += kThreads) {
    const int slot = i / maximum(1, kSegments), channel = slot / Shape::kSlots;
    const int at = Shape::kFirst + (slot + channel * Shape::kGap) * Shape::kPitch + Shape::kColumns;
    *reinterpret_cast<Vector<T, kVector>*>(staged + at + i % maximum(1, kSegments) * kVector) = {};
  }
}

// Starts to fill the images, and zeroes what lies beside them up to column kWidth; all kThreads threads take part, with
// kInFlight vectors of each under way where they pass through registers.
// Complete after wait_for_copies<0>() and a barrier.
template <typename Shape, int kThreads, int kWidth, int kInFlight, typename T>
__device__ __forceinline__ void load_images(T* staged, const T* tensor, const Images& images) {
  constexpr int kVector = Shape::kVector;
  if constexpr (!Shape::kChannelsLast && !Shape::kFlat && kVector > 1) {
#pragma unroll 2
    for (int rank = threadIdx.x; rank < Shape::kVectors; rank += kThreads) {
      const VectorOffsets vector = vector_offsets<Shape>(images, rank);
      copy_async<kVector / 2>(reinterpret_cast<float*>(staged + vector.staged),
                              reinterpret_cast<const float*>(tensor + max(vector.offset, 0)), vector.offset >= 0);
    }
    commit_copies();
    clear_margins<Shape, kThreads, kWidth>(staged);
    return;
  }
  clear_margins<Shape, kThreads, kWidth>(staged);
  for (int first = threadIdx.x; first < Shape::kVectors; first += kInFlight * kThreads) {
    // Loads know no condition, so that all are under way before the first is waited for.
    Vector<T, kVector> values[kInFlight];
    VectorOffsets vectors[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      vectors[i] = vector_offsets<Shape>(images, min(first + i * kThreads, Shape::kVectors - 1));
      values[i] = *reinterpret_cast<const Vector<T, kVector>*>(tensor + max(vectors[i].offset, 0));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads >= Shape::kVectors) break;
#pragma unroll
      for (int k = 0; k < kVector; ++k, advance<Shape>(vectors[i]))
        staged[vectors[i].staged] = vectors[i].offset >= 0 ? values[i].at[k] : convert<T>(0.0f);
    }
  }
}

// Writes images to the tensor; all kThreads threads take part.
template <typename Shape, int kThreads, typename T>
__device__ __forceinline__ void store_images(T* tensor, const T* staged, const Images& images) {
  constexpr int kVector = Shape::kVector;
#pragma unroll 2
  for (int rank = threadIdx.x; rank < Shape::kVectors; rank += kThreads) {
    VectorOffsets vector = vector_offsets<Shape>(images, rank);
    if (vector.offset < 0) continue;
    Vector<T, kVector> values;
#pragma unroll
    for (int k = 0; k < kVector; ++k, advance<Shape>(vector)) values.at[k] = staged[vector.staged];
    *reinterpret_cast<Vector<T, kVector>*>(tensor + vector.offset) = values;
  }
}
