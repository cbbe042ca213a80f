// What stands before and after a library's transforms: tiles of a tensor as planes of floats, and back.
//
// fft_pack writes planes [tile][channel][row][column] of zeros and elements, with rows of 2 * (columns / 2 + 1) floats
// so that a real transform fits in place. fft_unpack writes the elements that tiles are kept of, scaled and rounded
// once. Channels first: a thread a pair of columns, or a kept element. Channels last: a block turns 32 pairs of columns
// (or 32 kept elements) of 32 channels over in shared memory. Offsets into tensors fit 30 bits. Defines: ELEMENT,
// CHANNELS_LAST.
#include "fft/fourier.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(ELEMENT) || !defined(CHANNELS_LAST)
#error "define ELEMENT and CHANNELS_LAST"
#endif

constexpr int kThreads = 256;
#if CHANNELS_LAST
constexpr int kLanes = 32, kRows = kThreads / kLanes;
#endif

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

// items: pairs of columns of all planes, of which each plane has plane_pairs and each row row_pairs.
extern "C" __global__ void __launch_bounds__(kThreads)
    fft_pack(const ELEMENT* __restrict__ tensor, float2* __restrict__ planes, int items, const Divisor plane_pairs,
             const Divisor row_pairs, const TiledTensor tiled) {
#if CHANNELS_LAST
  __shared__ float transposed[kLanes][2 * kLanes + 1];
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const int first_pair = blockIdx.y * kLanes, first_channel = blockIdx.z * kLanes;
  const TilePlace place = tiled.grid.place(blockIdx.x);
  const int channel = first_channel + lane;
  if (channel < tiled.channels.by) {
    const ELEMENT* from = tensor + place.image * tiled.image_stride + channel * tiled.channel_stride;
#pragma unroll
    for (int i = slot; i < kLanes; i += kRows) {
      const int pair = first_pair + i;
      if (pair >= plane_pairs.by) break;
      const int r = pair / row_pairs;
      const Pair values = pair_of(from, tiled.rows, tiled.columns, place, r, pair - r * row_pairs.by);
      transposed[lane][2 * i] = values.at[0];
      transposed[lane][2 * i + 1] = values.at[1];
    }
  }
  __syncthreads();  // the block's pairs are there
  const int pair = first_pair + lane;
  if (pair >= plane_pairs.by) return;
  for (int i = slot; i < kLanes && first_channel + i < tiled.channels.by; i += kRows) {
    const long long plane = static_cast<long long>(blockIdx.x) * tiled.channels.by + first_channel + i;
    planes[plane * plane_pairs.by + pair] = make_float2(transposed[i][2 * lane], transposed[i][2 * lane + 1]);
  }
#else
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= items) return;
  const int plane = item / plane_pairs, pair = item - plane * plane_pairs.by;
  const int tile = plane / tiled.channels, channel = plane - tile * tiled.channels.by;
  const int r = pair / row_pairs;
  const TilePlace place = tiled.grid.place(tile);
  const ELEMENT* from = tensor + place.image * tiled.image_stride + channel * tiled.channel_stride;
  const Pair values = pair_of(from, tiled.rows, tiled.columns, place, r, pair - r * row_pairs.by);
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
               const Divisor kept_plane, const Divisor kept_row, const Divisor plane_pairs, const Divisor row_pairs,
#ifdef EPILOGUE
               const TiledTensor tiled, const __grid_constant__ Epilogue epilogue) {
#else
               const TiledTensor tiled) {
#endif
  const int pitch = 2 * row_pairs.by;
#if CHANNELS_LAST
  __shared__ float transposed[kLanes][kLanes + 1];
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const int first_kept = blockIdx.y * kLanes, first_channel = blockIdx.z * kLanes;
  const TilePlace place = tiled.grid.place(blockIdx.x);
  if (first_kept + lane < kept_plane.by) {
    const int down = (first_kept + lane) / kept_row;
    const Kept at = kept(tiled.rows, tiled.columns, place, down, first_kept + lane - down * kept_row.by, pitch);
    const long long plane = static_cast<long long>(blockIdx.x) * tiled.channels.by + first_channel;
    const float* from = planes + plane * (2 * plane_pairs.by) + at.in_plane;
    for (int i = slot; i < kLanes && first_channel + i < tiled.channels.by && at.in_tensor >= 0; i += kRows)
      transposed[lane][i] = from[static_cast<long long>(i) * (2 * plane_pairs.by)];
  }
  __syncthreads();  // the block's elements are there
  if (first_channel + lane >= tiled.channels.by) return;
  ELEMENT* to = tensor + place.image * tiled.image_stride + (first_channel + lane) * tiled.channel_stride;
  for (int i = slot; i < kLanes && first_kept + i < kept_plane.by; i += kRows) {
    const int down = (first_kept + i) / kept_row;
    const Kept at = kept(tiled.rows, tiled.columns, place, down, first_kept + i - down * kept_row.by, pitch);
#ifdef EPILOGUE
    if (at.in_tensor < 0) continue;
    const float sum = scale * transposed[i][lane];
    to[at.in_tensor] = convert<ELEMENT>(
        finish_at(sum, epilogue, place.image, first_channel + lane, tiled.channels.by, to - tensor + at.in_tensor));
#else
    if (at.in_tensor >= 0) to[at.in_tensor] = convert<ELEMENT>(scale * transposed[i][lane]);
#endif
  }
#else
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= items) return;
  const int plane = item / kept_plane, rest = item - plane * kept_plane.by;
  const int tile = plane / tiled.channels, channel = plane - tile * tiled.channels.by;
  const int down = rest / kept_row;
  const TilePlace place = tiled.grid.place(tile);
  const Kept at = kept(tiled.rows, tiled.columns, place, down, rest - down * kept_row.by, pitch);
  if (at.in_tensor < 0) return;
  const float value = planes[static_cast<long long>(plane) * (2 * plane_pairs.by) + at.in_plane];
#ifdef EPILOGUE
  const int offset = place.image * tiled.image_stride + channel * tiled.channel_stride + at.in_tensor;
  tensor[offset] =
      convert<ELEMENT>(finish_at(scale * value, epilogue, place.image, channel, tiled.channels.by, offset));
#else
  tensor[place.image * tiled.image_stride + channel * tiled.channel_stride + at.in_tensor] =
      convert<ELEMENT>(scale * value);
#endif
#endif
}
