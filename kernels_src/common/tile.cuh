// Tiles of an image in shared memory: load_tile copies channels x rows x columns as float, zero outside the image.
//
// A tile is laid out [slot][row][column] with pitches kPlane and kPitch, whatever the layout of the tensor, so that
// compute loops are the same for both. A slot is one channel; the caller maps slots to channels.
#pragma once

#include "common/types.cuh"

constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}
constexpr int round_up(int a, int b) {
  return ceil_div(a, b) * b;
}
constexpr int maximum(int a, int b) {
  return a > b ? a : b;
}

// Floats from one channel's plane to the next: 4 modulo 8, so that lanes on neighbouring channels meet no bank twice
// in scalar or 16-byte accesses.
constexpr int plane_pitch(int floats) {
  return round_up(floats - 4, 8) + 4;
}

// Turns of a copying loop that are unrolled: loads that convert need company in flight, asynchronous copies do not, and
// each turn's addresses cost registers that the sums beside them need.
template <typename T>
constexpr int kCopiesInFlight = sizeof(T) == 4 ? 1 : 2;

// An image's bounds and element strides.
struct Plane {
  int height, width, row_stride, column_stride;
};

// Shape of a tile. Elements are kRowStep rows and kColumnStep columns apart in the image. kVector neighbours in memory
// are loaded at once: channels if kChannelsLast, else columns, in which case kColumns is a multiple of it.
template <int kSlotCount, int kRowCount, int kColumnCount, int kRowPitch, int kRowStepInImage, int kColumnStepInImage,
          int kVectorLength, bool kChannelsAreLast>
struct Tile {
  static constexpr int kSlots = kSlotCount, kRows = kRowCount, kColumns = kColumnCount, kPitch = kRowPitch;
  static constexpr int kRowStep = kRowStepInImage, kColumnStep = kColumnStepInImage, kVector = kVectorLength;
  static constexpr bool kChannelsLast = kChannelsAreLast;
  static constexpr int kPlane = plane_pitch(kRows * kPitch);
  static constexpr int kFloats = kSlots * kPlane;
  static_assert(kPitch % 4 == 0 && kPitch >= kColumns, "kPitch must be a multiple of 16 bytes and hold a row");
  static_assert((kChannelsLast ? kSlots : kColumns) % kVector == 0, "a contiguous segment must have whole vectors");
  static_assert(kChannelsLast || kVector == 1 || kColumnStep == 1,
                "kVector > 1 needs columns that are neighbours in memory");
};

// Starts the copy of kCount floats, or of as many zeros, to shared memory; the copy engine does it from sm_80 on.
template <int kCount>
__device__ __forceinline__ void copy_async(float* to, const float* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = inside ? 4 * kCount : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(4 * kCount), "r"(bytes)
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = inside ? from[i] : 0.0f;
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's latest groups of copies are still under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// One element to shared memory, asynchronously where its type needs no conversion.
__device__ __forceinline__ void copy_element(float* to, const float* from, bool inside) {
  copy_async<1>(to, from, inside);
}
template <typename T>
__device__ __forceinline__ void copy_element(float* to, const T* from, bool inside) {
  *to = inside ? convert<float>(*from) : 0.0f;
}

// kVector elements to floats kStep apart, asynchronously where they need neither conversion nor transposition.
template <int kVector, int kStep, typename T>
__device__ __forceinline__ void copy_vector(float* to, const T* from, bool inside) {
  if constexpr (sizeof(T) == 4 && kStep == 1) {
    copy_async<kVector>(to, from, inside);
    return;
  }
  Vector<T, kVector> values = {};
  if (inside) values = *reinterpret_cast<const Vector<T, kVector>*>(from);
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i * kStep] = inside ? convert<float>(values.at[i]) : 0.0f;
}

// Copies the tile whose first element is (top, left) of `image`; all kThreads threads of the block take part.
// channel_offset(slot) gives a channel's offset in elements, or a negative number for a channel to be filled with
// zeros.
template <typename Shape, int kThreads, typename T, typename ChannelOffset>
__device__ __forceinline__ void load_tile(float* tile, const T* image, const Plane& plane, int top, int left,
                                          ChannelOffset channel_offset) {
  constexpr int kVector = Shape::kVector;
  constexpr int kVectors = Shape::kSlots * Shape::kRows * Shape::kColumns / kVector;
#pragma unroll(kCopiesInFlight<T>)
  for (int run = threadIdx.x; run < kVectors; run += kThreads) {
    int slot, row, column;
    if (Shape::kChannelsLast) {
      constexpr int kSlotVectors = Shape::kSlots / kVector;
      slot = run % kSlotVectors * kVector;
      column = run / kSlotVectors % Shape::kColumns;
      row = run / (kSlotVectors * Shape::kColumns);
    } else {
      constexpr int kColumnVectors = Shape::kColumns / kVector;
      column = run % kColumnVectors * kVector;
      row = run / kColumnVectors % Shape::kRows;
      slot = run / (kColumnVectors * Shape::kRows);
    }
    const int h = top + row * Shape::kRowStep, v = left + column * Shape::kColumnStep, offset = channel_offset(slot);
    const bool inside = offset >= 0 && static_cast<unsigned>(h) < static_cast<unsigned>(plane.height) &&
                        static_cast<unsigned>(v) < static_cast<unsigned>(plane.width);
    // Outside, the address is that of the image, so that no copy ever names memory beyond the tensor.
    const T* from = inside ? image + offset + h * plane.row_stride + v * plane.column_stride : image;
    float* to = tile + slot * Shape::kPlane + row * Shape::kPitch + column;
    if constexpr (kVector == 1)
      copy_element(to, from, inside);
    else
      copy_vector<kVector, Shape::kChannelsLast ? Shape::kPlane : 1>(to, from, inside);
  }
}

// kCount floats of shared memory into registers, 16 bytes at a time where kAligned says that the address allows it.
template <int kCount, bool kAligned>
__device__ __forceinline__ void read_floats(float (&values)[round_up(kCount, 4)], const float* from) {
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = from[i];
  }
}
