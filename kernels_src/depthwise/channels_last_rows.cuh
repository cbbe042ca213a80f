// Rows of channels-last images that a block streams through shared memory, a slice of the channels of each.
//
// An axis is taken apart into residue classes in which taps are neighbours: output index t, tap i and input index m
// then meet where m = stride * t + i, whatever the dilation.
#pragma once

#include "common/opaque.cuh"
#include "common/copy_bytes.cuh"
#include "common/tile.cuh"

#if !defined(DIMENSION_FIELDS)
#error "define DIMENSION_FIELDS"
#endif

constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

template <int kNumber>
struct Constant {
  static constexpr int value = kNumber;
};

// body(Constant<kFirst>()), ... body(Constant<kEnd - 1>()): a loop whose index is a constant, however long its body is.
template <int kFirst, int kEnd, typename Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  if constexpr (kFirst < kEnd) {
    body(Constant<kFirst>());
    unrolled<kFirst + 1, kEnd>(body);
  }
}

// Indices from low on, below high, are those of a tensor's coordinates first + step * index.
struct Line {
  int first, step, low, high;

  __device__ __forceinline__ bool holds(int index) const { return index >= low && index < high; }
  __device__ __forceinline__ int at(int index) const { return first + step * index; }
};

// An axis of the problem. y_step is the distance of a residue class's neighbours in y, and the number of classes.
struct Dimension {
  DIMENSION_FIELDS
};

// One residue class of an axis.
struct Axis {
  Line x, y;
};

template <bool kDilated>
__device__ __forceinline__ Axis axis_of(const Dimension& axis, int residue) {
  if (!kDilated) return {{-axis.pad, 1, axis.pad, axis.x_size + axis.pad}, {0, 1, 0, axis.y_size}};
  const int first = residue * axis.stride - axis.pad;
  const int low = -floor_div(first, axis.dilation), high = -floor_div(first - axis.x_size, axis.dilation);
  return {{first, axis.dilation, low, high},
          {residue, axis.y_step, 0, max(0, (axis.y_size - residue + axis.y_step - 1) / axis.y_step)}};
}

// How all kThreads threads of a block copy kColumns pixels of a row of each of kImages images, kChannels of each, to
// pixels kPitch elements apart in shared memory, kVector elements at a time. Columns outside an image read as zero.
template <typename T, int kImages, int kColumns, int kChannels, int kPitch, int kVector, int kThreads>
struct RowCopies {
  static constexpr int kSegments = kChannels / kVector, kAll = kImages * kColumns * kSegments;
  static constexpr int kCount = ceil_div(kAll, kThreads);
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * kVector;
  static_assert(kChannels % kVector == 0 && kPitch % kVector == 0, "a pixel must have whole vectors");
  int from[kCount], to[kCount];  // elements from the row's first
  bool inside[kCount];

  __device__ __forceinline__ RowCopies(const Line& columns, int first, int channels, int first_channel,
                                       int image_step = 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int rank = threadIdx.x + i * kThreads, index = first + rank / kSegments % kColumns;
      const int channel = first_channel + rank % kSegments * kVector;
      inside[i] = columns.holds(index) && channel < channels;
      from[i] = inside[i] ? columns.at(index) * channels + channel + rank / (kSegments * kColumns) * image_step : 0;
      to[i] = rank / kSegments * kPitch + rank % kSegments * kVector;
    }
  }

  // Starts to copy the row of the tensor that begins at `row`, and as many images' as there are.
  __device__ __forceinline__ void copy(T* staged, const T* row, int images = kImages) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int rank = threadIdx.x + i * kThreads;
      if (((i + 1) * kThreads > kAll && rank >= kAll) || (kImages > 1 && rank / (kSegments * kColumns) >= images))
        break;
      if constexpr (kBytes >= 4)
        copy_bytes<kBytes>(static_cast<unsigned>(__cvta_generic_to_shared(staged)) + to[i] * sizeof(T), row + from[i],
                           inside[i]);
      else
        staged[to[i]] = inside[i] ? row[from[i]] : convert<T>(0.0f);
    }
  }
};

// kVector neighbouring elements as floats.
template <int kVector, typename T>
__device__ __forceinline__ void widen(float (&values)[kVector], const Vector<T, kVector>& elements) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) values[v] = convert<float>(elements.at[v]);
}

// The reverse, rounded.
template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> rounded(const float (&values)[kVector]) {
  Vector<T, kVector> elements;
#pragma unroll
  for (int v = 0; v < kVector; ++v) elements.at[v] = convert<T>(values[v]);
  return elements;
}
