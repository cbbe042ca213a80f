// Depthwise convolution of long lines by Fourier transforms, from tensor to tensor in one pass over memory.
//
// y = (x * conj(W)) transformed back, or with W itself for backward data. Two tiles of a channel are the real and the
// imaginary part of one complex line, which products with the transform of real filters keep apart. A block has LINES
// such lines [pair of tiles][channel] of LENGTH in shared memory; fft_depthwise_filters writes W [channel][LENGTH] in
// the order that common/fft_passes.cuh leaves frequencies in, so that nothing is ever permuted. Sums are float32.
// Defines: T_SOURCE, T_W, T_RESULT (dtype names), SOURCE_LAST, RESULT_LAST (channels last), CONJUGATE, LENGTH, LINES,
// THREADS.
#include "common/fft_passes.cuh"
#include "common/fourier.cuh"
#include "common/types.cuh"

#if !defined(T_SOURCE) || !defined(T_W) || !defined(T_RESULT) || !defined(LENGTH) || !defined(LINES)
#error "define T_SOURCE, T_W, T_RESULT, SOURCE_LAST, RESULT_LAST, CONJUGATE, LENGTH, LINES and THREADS"
#endif

constexpr int kPoints = LENGTH, kLines = LINES, kThreads = THREADS, kPitch = line_pitch(kPoints);
constexpr int kBatch = 4;  // pairs of loads of a thread under way
static_assert((kPoints & (kPoints - 1)) == 0 && kPoints >= 256, "two passes or more");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
static_assert(kLines * kPoints % (kBatch * kThreads) == 0, "batches are whole");

// Where a line's two tiles are in a tensor: offset of the row, -1 where there is none, and the tile's place along it.
struct Rows {
  int offset[kLines][2], column[kLines][2];
};

__device__ __forceinline__ void find_rows(Rows& found, int lines, int tiles, const Divisor& channels, int image_stride,
                                          int channel_stride, const TileGrid& grid, const TileAxis& rows) {
  for (int i = threadIdx.x; i < 2 * kLines; i += kThreads) {
    const int line = i / 2, rank = blockIdx.x * kLines + line;
    const int pair = rank / channels, tile = 2 * pair + i % 2;
    const TilePlace at = grid.place(tile);
    const int down = rank < lines && tile < tiles ? rows.offset(at.row, rows.low) : -1;
    found.offset[line][i % 2] =
        down < 0 ? -1 : at.image * image_stride + (rank - pair * channels.by) * channel_stride + down;
    found.column[line][i % 2] = at.column;
  }
}

struct Item {
  int line, position;
};

// In the order of memory: channels innermost, or positions.
template <bool kLast>
__device__ __forceinline__ Item item_of(int i) {
  if constexpr (kLast) return {i % kLines, i / kLines};
  return {i / kPoints, i % kPoints};
}

__device__ __forceinline__ int offset_of(const Rows& found, const TileAxis& columns, const Item& item, int half) {
  const int row = found.offset[item.line][half];
  const int across = columns.offset(found.column[item.line][half], item.position);
  return row < 0 || across < 0 ? -1 : row + across;
}

__device__ __forceinline__ float2* number_of(float2* lines, const Item& item) {
  return lines + item.line * kPitch + slot_of(item.position);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fft_depthwise_filters(const T_W* __restrict__ w, float2* __restrict__ filters, int channels, int taps,
                          int channel_stride, int tap_stride) {
  extern __shared__ float2 lines[];
  const int first = blockIdx.x * kLines;
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const Item item = item_of<false>(i);
    const int channel = first + item.line;
    const bool inside = channel < channels && item.position < taps;
    const float tap = inside ? convert<float>(w[channel * channel_stride + item.position * tap_stride]) : 0.0f;
    *number_of(lines, item) = make_float2(tap, 0.0f);
  }
  __syncthreads();  // all taps are there
  passes<kPoints, kPoints, kLines, kThreads, false>(lines);
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const Item item = item_of<false>(i);
    const int channel = first + item.line;
    if (channel < channels)
      filters[static_cast<long long>(channel) * kPoints + item.position] = *number_of(lines, item);
  }
}

// lines: pairs of tiles times channels.
extern "C" __global__ void __launch_bounds__(kThreads)
    fft_depthwise(const T_SOURCE* __restrict__ source, const float2* __restrict__ filters,
                  T_RESULT* __restrict__ results, int all_lines, int tiles, float scale, int source_image,
                  int source_channel, int result_image, int result_channel, DIVISOR_OF(channels), GRID_OF,
                  AXIS_OF(source_row), AXIS_OF(source_column), AXIS_OF(result_row), AXIS_OF(result_column)) {
  extern __shared__ float2 lines[];
  __shared__ Rows from, to;
  const TileGrid grid = GRID;
  const Divisor of_pair = DIVISOR(channels);
  const TileAxis rows = AXIS(source_row), columns = AXIS(source_column);
  const TileAxis kept_rows = AXIS(result_row), kept_columns = AXIS(result_column);
  find_rows(from, all_lines, tiles, of_pair, source_image, source_channel, grid, rows);
  find_rows(to, all_lines, tiles, of_pair, result_image, result_channel, grid, kept_rows);
  __syncthreads();  // all rows are found
  for (int first = threadIdx.x; first < kLines * kPoints; first += kBatch * kThreads) {
    float2 values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const Item item = item_of<SOURCE_LAST>(first + b * kThreads);
      const int real = offset_of(from, columns, item, 0), imaginary = offset_of(from, columns, item, 1);
      values[b].x = real < 0 ? 0.0f : convert<float>(source[real]);
      values[b].y = imaginary < 0 ? 0.0f : convert<float>(source[imaginary]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) *number_of(lines, item_of<SOURCE_LAST>(first + b * kThreads)) = values[b];
  }
  __syncthreads();  // all numbers are there
  passes<kPoints, kPoints, kLines, kThreads, false>(lines);
#pragma unroll 4
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const Item item = item_of<false>(i);
    const int rank = min(static_cast<int>(blockIdx.x) * kLines + item.line, all_lines - 1);
    const int channel = rank - rank / of_pair * channels;
    float2 w = filters[static_cast<long long>(channel) * kPoints + item.position];
    if (CONJUGATE) w.y = -w.y;
    float2* number = number_of(lines, item);
    const float2 value = *number;
    *number = make_float2(value.x * w.x - value.y * w.y, value.x * w.y + value.y * w.x);
  }
  __syncthreads();  // all products are there
  passes<kPoints, kPoints, kLines, kThreads, true>(lines);
#pragma unroll 2
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const Item item = item_of<RESULT_LAST>(i);
    const int real = offset_of(to, kept_columns, item, 0), imaginary = offset_of(to, kept_columns, item, 1);
    const float2 value = *number_of(lines, item);
    if (real >= 0) results[real] = convert<T_RESULT>(scale * value.x);
    if (imaginary >= 0) results[imaginary] = convert<T_RESULT>(scale * value.y);
  }
}
