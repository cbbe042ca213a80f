// Fourier transforms of tiles in shared memory: from a tensor to its transforms, and back to the elements that are
// kept.
//
// A block has PLANES planes [tile][channel]. Forward: elements to shared memory with zeros around, a thread a row (two
// real numbers as one complex, then split), a thread a column of the half that is kept, from registers to memory.
// Backward: the same in reverse, of the rows that are kept. Shared memory holds rows of kSlots complex numbers; it is
// an odd number, so that neighbouring rows begin in different banks. Sums are float32. Defines: ELEMENT, CHANNELS_LAST,
// LENGTH_H, LENGTH_W, PLANES, THREADS. Source: Vasilache et al., Fast Convolutional Nets with fbfft, ICLR 2015.
#include "common/fft_registers.cuh"
#include "common/fourier.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS_LAST) || !defined(LENGTH_H) || !defined(LENGTH_W) || !defined(PLANES)
#error "define ELEMENT, CHANNELS_LAST, LENGTH_H, LENGTH_W, PLANES and THREADS"
#endif

constexpr int kHeight = LENGTH_H, kWidth = LENGTH_W, kPlanes = PLANES, kThreads = THREADS;
constexpr int kHalf = kWidth / 2, kSlots = kHalf + 1;
constexpr int kFrequencies = kHeight * kSlots;
constexpr int kBatch = 8;  // loads of a thread under way
// 4 floats modulo 32, so that four columns of eight neighbouring planes lie in different banks.
constexpr int kPlanePitch = (kFrequencies + 13) / 16 * 16 + 2;

static_assert(kWidth % 4 == 0, "rows of an odd number of slots");
static_assert(kPlanePitch >= kFrequencies, "planes do not overlap");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");

// Where the positions of a block's planes are in the tensor: a row's and a column's offset add up; -1 where there is no
// element.
struct Offsets {
  int base[kPlanes];
  int rows[kPlanes][kHeight];
  int columns[kPlanes][kWidth];

  __device__ __forceinline__ int at(int plane, int row, int column) const {
    const int down = rows[plane][row], across = columns[plane][column];
    return down < 0 || across < 0 ? -1 : base[plane] + down + across;
  }
};

struct Position {
  int plane, row, column;
};

// In the order of memory, rows outermost: channels innermost, or columns.
__device__ __forceinline__ Position position_of(int item) {
  const int within = item % (kPlanes * kWidth);
  if constexpr (CHANNELS_LAST) return {within % kPlanes, item / (kPlanes * kWidth), within / kPlanes};
  return {within / kWidth, item / (kPlanes * kWidth), within % kWidth};
}

__device__ __forceinline__ float* number_of(float2* tile, const Position& at) {
  return reinterpret_cast<float*>(tile + at.plane * kPlanePitch + at.row * kSlots) + at.column;
}

__device__ __forceinline__ void find_offsets(Offsets& offsets, int planes, const Divisor& channels, int image_stride,
                                             int channel_stride, const TileGrid& grid, const TileAxis& rows,
                                             const TileAxis& columns) {
  for (int i = threadIdx.x; i < kPlanes * (kHeight + kWidth); i += kThreads) {
    const int slot = i / (kHeight + kWidth), place = i % (kHeight + kWidth);
    const int plane = blockIdx.x * kPlanes + slot;
    const int tile = plane / channels;
    const TilePlace at = grid.place(tile);
    const bool is_row = place < kHeight;
    int offset = is_row ? rows.offset(at.row, place) : columns.offset(at.column, place - kHeight);
    if (plane >= planes) offset = -1;
    if (is_row)
      offsets.rows[slot][place] = offset;
    else
      offsets.columns[slot][place - kHeight] = offset;
    if (place == 0) offsets.base[slot] = at.image * image_stride + (plane - tile * channels.by) * channel_stride;
  }
}

#define TENSOR_OF int image_stride, int channel_stride, DIVISOR_OF(channels)

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_tiles_forward(const ELEMENT* __restrict__ tensor, float2* __restrict__ transforms, int planes, TENSOR_OF,
                      GRID_OF, AXIS_OF(row), AXIS_OF(column)) {
  extern __shared__ float2 tile[];
  __shared__ Offsets offsets;
  const TileAxis rows = AXIS(row), columns = AXIS(column);
  find_offsets(offsets, planes, DIVISOR(channels), image_stride, channel_stride, GRID, rows, columns);
  __syncthreads();                           // all offsets are there
  const int used = min(rows.high, kHeight);  // rows below it are zero
  const int items = used * kPlanes * kWidth;
  for (int first_item = threadIdx.x; first_item < items; first_item += kBatch * kThreads) {
    float values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int item = first_item + b * kThreads;
      const Position at = position_of(item);
      const int offset = item < items ? offsets.at(at.plane, at.row, at.column) : -1;
      values[b] = offset < 0 ? 0.0f : convert<float>(tensor[offset]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int item = first_item + b * kThreads;
      if (item < items) *number_of(tile, position_of(item)) = values[b];
    }
  }
  __syncthreads();  // all elements are there
  for (int i = threadIdx.x; i < used * kPlanes; i += kThreads) {
    float2* slots = tile + i % kPlanes * kPlanePitch + i / kPlanes * kSlots;
    float2 values[kHalf], out[kSlots];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) values[j] = slots[j];
    transform<kHalf, false>(values);
    split_real(values, out);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) slots[j] = out[j];
  }
  __syncthreads();  // all rows are transformed
  for (int i = threadIdx.x; i < kPlanes * kSlots; i += kThreads) {
    const int slot = i / kSlots, column = i % kSlots;
    const int plane = blockIdx.x * kPlanes + slot;
    if (plane >= planes) break;
    const float2* from = tile + slot * kPlanePitch + column;
    float2 values[kHeight];
#pragma unroll
    for (int j = 0; j < kHeight; ++j) values[j] = j < used ? from[j * kSlots] : make_float2(0.0f, 0.0f);
    transform<kHeight, false>(values);
    float2* to = transforms + static_cast<long long>(plane) * kFrequencies + column;
#pragma unroll
    for (int j = 0; j < kHeight; ++j) to[j * kSlots] = values[j];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_tiles_backward(const float2* __restrict__ transforms, ELEMENT* __restrict__ tensor, int planes, float scale,
                       TENSOR_OF, GRID_OF, AXIS_OF(row), AXIS_OF(column)) {
  extern __shared__ float2 tile[];
  __shared__ Offsets offsets;
  const TileAxis rows = AXIS(row), columns = AXIS(column);
  find_offsets(offsets, planes, DIVISOR(channels), image_stride, channel_stride, GRID, rows, columns);
  const int low = rows.low, high = min(rows.high, kHeight);  // rows that are kept
  for (int i = threadIdx.x; i < kPlanes * kSlots; i += kThreads) {
    const int slot = i / kSlots, column = i % kSlots;
    const int plane = blockIdx.x * kPlanes + slot;
    if (plane >= planes) break;
    const float2* from = transforms + static_cast<long long>(plane) * kFrequencies + column;
    float2 values[kHeight];
#pragma unroll
    for (int j = 0; j < kHeight; ++j) values[j] = from[j * kSlots];
    transform<kHeight, true>(values);
    float2* to = tile + slot * kPlanePitch + column;
#pragma unroll
    for (int j = 0; j < kHeight; ++j) {
      if (j >= low && j < high) to[j * kSlots] = values[j];
    }
  }
  __syncthreads();  // all columns are transformed, and all offsets are there
  for (int i = threadIdx.x; i < (high - low) * kPlanes; i += kThreads) {
    float2* slots = tile + i % kPlanes * kPlanePitch + (low + i / kPlanes) * kSlots;
    float2 in[kSlots], values[kHalf];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) in[j] = slots[j];
    merge_real(in, values);
    transform<kHalf, true>(values);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) slots[j] = values[j];
  }
  __syncthreads();  // all elements are there
#pragma unroll 4
  for (int i = low * kPlanes * kWidth + threadIdx.x; i < high * kPlanes * kWidth; i += kThreads) {
    const Position at = position_of(i);
    const int offset = offsets.at(at.plane, at.row, at.column);
    if (offset >= 0) tensor[offset] = convert<ELEMENT>(scale * *number_of(tile, at));
  }
}
