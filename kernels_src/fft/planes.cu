// What stands before and after a library's transforms: tiles of a tensor as planes of floats, and back.
//
// fft_pack writes planes [tile][channel][row][column] of zeros and elements, with rows of 2 * (columns / 2 + 1) floats
// so that a real transform fits in place. fft_unpack writes the elements that tiles are kept of, scaled and rounded
// once. Channels first: a thread a pair of columns, or a kept element. Channels last: a block turns 32 pairs of columns
// (or 32 kept elements) of 32 channels over in shared memory. Offsets into tensors fit 30 bits. Defines: ELEMENT,
// CHANNELS_LAST.
#include "fft/fourier.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS_LAST)
#error "define ELEMENT and CHANNELS_LAST"
#endif

constexpr int kThreads = 256;
#if CHANNELS_LAST
constexpr int kLanes = 32, kRows = kThreads / kLanes;
#endif

struct Tensor {
  int image_stride, channel_stride, channels;
};

struct Pair {
  float at[2];
};

// A pair of columns of one channel of a tile.
__device__ __forceinline__ Pair pair_of(const ELEMENT* __restrict__ plane, const TileAxis& rows,
                                        const TileAxis& columns, const TilePlace& place, int row, int pair) {
  Pair values = {};
  const int down = rows.offset(place.row, row);
  if (down < 0) return values;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int across = columns.offset(place.column, 2 * pair + i);
    if (across >= 0) values.at[i] = convert<float>(plane[down + across]);
  }
  return values;
}

#define TENSOR_OF int image_stride, int channel_stride, DIVISOR_OF(channels)
#define PLANES_OF DIVISOR_OF(plane_pairs), DIVISOR_OF(row_pairs)

// items: pairs of columns of all planes.
extern "C" __global__ void __launch_bounds__(kThreads)
    fft_pack(const ELEMENT* __restrict__ tensor, float2* __restrict__ planes, int items, TENSOR_OF, GRID_OF, PLANES_OF,
             AXIS_OF(row), AXIS_OF(column)) {
  const TileAxis rows = AXIS(row), columns = AXIS(column);
  const TileGrid grid = GRID;
  const Divisor of_row = DIVISOR(row_pairs);
#if CHANNELS_LAST
  __shared__ float transposed[kLanes][2 * kLanes + 1];
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const int first_pair = blockIdx.y * kLanes, first_channel = blockIdx.z * kLanes;
  const TilePlace place = grid.place(blockIdx.x);
  const int channel = first_channel + lane;
  if (channel < channels) {
    const ELEMENT* from = tensor + place.image * image_stride + channel * channel_stride;
#pragma unroll
    for (int i = slot; i < kLanes; i += kRows) {
      const int pair = first_pair + i;
      if (pair >= plane_pairs) break;
      const int r = pair / of_row;
      const Pair values = pair_of(from, rows, columns, place, r, pair - r * row_pairs);
      transposed[lane][2 * i] = values.at[0];
      transposed[lane][2 * i + 1] = values.at[1];
    }
  }
  __syncthreads();  // the block's pairs are there
  const int pair = first_pair + lane;
  if (pair >= plane_pairs) return;
  for (int i = slot; i < kLanes && first_channel + i < channels; i += kRows) {
    const long long plane = static_cast<long long>(blockIdx.x) * channels + first_channel + i;
    planes[plane * plane_pairs + pair] = make_float2(transposed[i][2 * lane], transposed[i][2 * lane + 1]);
  }
#else
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= items) return;
  const Divisor of_tile = DIVISOR(channels), of_plane = DIVISOR(plane_pairs);
  const int plane = item / of_plane, pair = item - plane * plane_pairs;
  const int tile = plane / of_tile, channel = plane - tile * channels;
  const int r = pair / of_row;
  const TilePlace place = grid.place(tile);
  const ELEMENT* from = tensor + place.image * image_stride + channel * channel_stride;
  const Pair values = pair_of(from, rows, columns, place, r, pair - r * row_pairs);
  planes[item] = make_float2(values.at[0], values.at[1]);
#endif
}

// Offsets of a kept element.
struct Kept {
  int in_plane, in_tensor;  // -1: there is none
};

__device__ __forceinline__ Kept kept(const TileAxis& rows, const TileAxis& columns, const TilePlace& place, int down,
                                     int across, int pitch) {
  const int i = rows.first(place.row) + down, j = columns.first(place.column) + across;
  const int r = rows.position(place.row, i), c = columns.position(place.column, j);
  if (i >= rows.size || j >= columns.size || r >= rows.high || c >= columns.high) return {0, -1};
  return {r * pitch + c, i * rows.stride + j * columns.stride};
}

// items: kept elements of all planes, at most kept_plane of each and kept_row of a row.
extern "C" __global__ void __launch_bounds__(kThreads)
    fft_unpack(const float* __restrict__ planes, ELEMENT* __restrict__ tensor, int items, float scale,
               DIVISOR_OF(kept_plane), DIVISOR_OF(kept_row), TENSOR_OF, GRID_OF, PLANES_OF, AXIS_OF(row),
               AXIS_OF(column)) {
  const TileAxis rows = AXIS(row), columns = AXIS(column);
  const TileGrid grid = GRID;
  const Divisor of_row = DIVISOR(kept_row);
  const int pitch = 2 * row_pairs;
#if CHANNELS_LAST
  __shared__ float transposed[kLanes][kLanes + 1];
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const int first_kept = blockIdx.y * kLanes, first_channel = blockIdx.z * kLanes;
  const TilePlace place = grid.place(blockIdx.x);
  if (first_kept + lane < kept_plane) {
    const int down = (first_kept + lane) / of_row;
    const Kept at = kept(rows, columns, place, down, first_kept + lane - down * kept_row, pitch);
    const long long plane = static_cast<long long>(blockIdx.x) * channels + first_channel;
    const float* from = planes + plane * (2 * plane_pairs) + at.in_plane;
    for (int i = slot; i < kLanes && first_channel + i < channels && at.in_tensor >= 0; i += kRows)
      transposed[lane][i] = from[static_cast<long long>(i) * (2 * plane_pairs)];
  }
  __syncthreads();  // the block's elements are there
  if (first_channel + lane >= channels) return;
  ELEMENT* to = tensor + place.image * image_stride + (first_channel + lane) * channel_stride;
  for (int i = slot; i < kLanes && first_kept + i < kept_plane; i += kRows) {
    const int down = (first_kept + i) / of_row;
    const Kept at = kept(rows, columns, place, down, first_kept + i - down * kept_row, pitch);
    if (at.in_tensor >= 0) to[at.in_tensor] = convert<ELEMENT>(scale * transposed[i][lane]);
  }
#else
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= items) return;
  const Divisor of_tile = DIVISOR(channels), of_plane = DIVISOR(kept_plane);
  const int plane = item / of_plane, rest = item - plane * kept_plane;
  const int tile = plane / of_tile, channel = plane - tile * channels;
  const int down = rest / of_row;
  const TilePlace place = grid.place(tile);
  const Kept at = kept(rows, columns, place, down, rest - down * kept_row, pitch);
  if (at.in_tensor < 0) return;
  const float value = planes[static_cast<long long>(plane) * (2 * plane_pairs) + at.in_plane];
  tensor[place.image * image_stride + channel * channel_stride + at.in_tensor] = convert<ELEMENT>(scale * value);
#endif
}
