// Fourier transforms of long lines in shared memory: from a tensor to its transforms, and back to the elements kept.
//
// A block has LINES lines [tile][channel] of LENGTH real numbers as half as many complex ones. Frequencies stay in the
// order that common/fft_passes.cuh leaves them in, LENGTH / 2 last: products do not ask which one is which. Sums are
// float32.
// Defines: ELEMENT, CHANNELS_LAST, LENGTH (a power of two), LINES, THREADS.
#include "common/fft_passes.cuh"
#include "common/fourier.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS_LAST) || !defined(LENGTH) || !defined(LINES) || !defined(THREADS)
#error "define ELEMENT, CHANNELS_LAST, LENGTH, LINES and THREADS"
#endif

constexpr int kLength = LENGTH, kLines = LINES, kThreads = THREADS;
constexpr int kPoints = kLength / 2, kFrequencies = kPoints + 1;
static_assert((kLength & (kLength - 1)) == 0 && kPoints >= 128, "two passes or more");
constexpr int kBatch = 8;  // loads of a thread under way
static_assert(kLines * kLength % (kBatch * kThreads) == 0, "batches are whole");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");

constexpr int kPitch = line_pitch(kPoints);

// The frequency at a place, and the place of the frequency kPoints - `frequency`; digits of the passes, the first most
// significant in a place and least in a frequency.
template <int kSize>
__device__ __forceinline__ int frequency_at(int place) {
  if constexpr (kSize == 1) {
    return 0;
  } else {
    constexpr int kApart = kSize / radix_at(kSize);
    return place / kApart + radix_at(kSize) * frequency_at<kApart>(place % kApart);
  }
}
template <int kSize>
__device__ __forceinline__ int place_of(int frequency) {
  if constexpr (kSize == 1) {
    return 0;
  } else {
    constexpr int kRadix = radix_at(kSize), kApart = kSize / kRadix;
    return frequency % kRadix * kApart + place_of<kApart>(frequency / kRadix);
  }
}

// Where a block's lines are in the tensor: offset of the row, -1 where there is none, and the tile's place along it.
struct Rows {
  int offset[kLines], column[kLines];
};

__device__ __forceinline__ void find_rows(Rows& found, int planes, const Divisor& channels, int image_stride,
                                          int channel_stride, const TileGrid& grid, const TileAxis& rows) {
  for (int line = threadIdx.x; line < kLines; line += kThreads) {
    const int plane = blockIdx.x * kLines + line, tile = plane / channels;
    const TilePlace at = grid.place(tile);
    const int down = plane < planes ? rows.offset(at.row, rows.low) : -1;
    found.offset[line] = down < 0 ? -1 : at.image * image_stride + (plane - tile * channels.by) * channel_stride + down;
    found.column[line] = at.column;
  }
}

struct Item {
  int line, position;
};

// In the order of memory: channels innermost, or positions.
__device__ __forceinline__ Item item_of(int i) {
  if constexpr (CHANNELS_LAST) return {i % kLines, i / kLines};
  return {i / kLength, i % kLength};
}

__device__ __forceinline__ float* number_of(float2* lines, const Item& item) {
  return reinterpret_cast<float*>(lines + item.line * kPitch + slot_of(item.position / 2)) + item.position % 2;
}

__device__ __forceinline__ int offset_of(const Rows& found, const TileAxis& columns, const Item& item) {
  const int row = found.offset[item.line];
  const int across = columns.offset(found.column[item.line], item.position);
  return row < 0 || across < 0 ? -1 : row + across;
}

#define TENSOR_OF int image_stride, int channel_stride, DIVISOR_OF(channels)

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_lines_forward(const ELEMENT* __restrict__ tensor, float2* __restrict__ transforms, int planes, TENSOR_OF,
                      GRID_OF, AXIS_OF(row), AXIS_OF(column)) {
  extern __shared__ float2 lines[];
  __shared__ Rows found;
  const TileAxis rows = AXIS(row), columns = AXIS(column);
  find_rows(found, planes, DIVISOR(channels), image_stride, channel_stride, GRID, rows);
  __syncthreads();  // all rows are found
  for (int first_item = threadIdx.x; first_item < kLines * kLength; first_item += kBatch * kThreads) {
    float values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int offset = offset_of(found, columns, item_of(first_item + b * kThreads));
      values[b] = offset < 0 ? 0.0f : convert<float>(tensor[offset]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) *number_of(lines, item_of(first_item + b * kThreads)) = values[b];
  }
  __syncthreads();  // all numbers are there
  passes<kPoints, kPoints, kLines, kThreads, false>(lines);
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const int line = i / kPoints, place = i % kPoints;
    const long long plane = static_cast<long long>(blockIdx.x) * kLines + line;
    if (plane >= planes) break;
    const int frequency = frequency_at<kPoints>(place);
    const float2* points = lines + line * kPitch;
    const float2 a = points[slot_of(place)], b = points[slot_of(place_of<kPoints>((kPoints - frequency) % kPoints))];
    const float2 even = make_float2(0.5f * (a.x + b.x), 0.5f * (a.y - b.y));
    const float2 odd = make_float2(0.5f * (a.y + b.y), 0.5f * (b.x - a.x));
    float c, s;
    sincospif(static_cast<float>(frequency) / kPoints, &s, &c);
    float2* to = transforms + plane * kFrequencies;
    to[place] = make_float2(even.x + odd.x * c + odd.y * s, even.y + odd.y * c - odd.x * s);
    if (place == 0) to[kPoints] = minus(even, odd);  // half a turn further: exp(-i pi) = -1
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_lines_backward(const float2* __restrict__ transforms, ELEMENT* __restrict__ tensor, int planes, float scale,
                       TENSOR_OF, GRID_OF, AXIS_OF(row), AXIS_OF(column)) {
  extern __shared__ float2 lines[];
  __shared__ Rows found;
  const TileAxis rows = AXIS(row), columns = AXIS(column);
  find_rows(found, planes, DIVISOR(channels), image_stride, channel_stride, GRID, rows);
#pragma unroll 4
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const int line = i / kPoints, place = i % kPoints;
    const long long plane = min(static_cast<long long>(blockIdx.x) * kLines + line, planes - 1LL);
    const int frequency = frequency_at<kPoints>(place);
    const float2* from = transforms + plane * kFrequencies;
    const float2 a = from[place], b = from[frequency == 0 ? kPoints : place_of<kPoints>(kPoints - frequency)];
    const float2 even = make_float2(a.x + b.x, a.y - b.y), apart = make_float2(a.x - b.x, a.y + b.y);
    float c, s;
    sincospif(static_cast<float>(frequency) / kPoints, &s, &c);
    const float2 odd = make_float2(apart.x * c - apart.y * s, apart.y * c + apart.x * s);
    lines[line * kPitch + slot_of(place)] = make_float2(even.x - odd.y, even.y + odd.x);
  }
  __syncthreads();  // all frequencies are there, and all rows are found
  passes<kPoints, kPoints, kLines, kThreads, true>(lines);
#pragma unroll 4
  for (int i = threadIdx.x; i < kLines * kLength; i += kThreads) {
    const Item item = item_of(i);
    const int offset = offset_of(found, columns, item);
    if (offset >= 0) tensor[offset] = convert<ELEMENT>(scale * *number_of(lines, item));
  }
}
