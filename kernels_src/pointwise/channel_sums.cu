// sum[k] of a tensor's elements over images and space, and sum_of_squares[k] where SQUARES, in NUMBER.
//
// channel_sums: each block sums a part of the tensor and writes partials[quantity][part][width].
//   CHANNELS_LAST 1: the tensor is rows of `columns` vectors, as many pixels as make whole ones. A block takes a strip
//     of `lanes` columns in some rows, blockDim.x / lanes (a power of two) side by side; width is VECTOR * columns.
//   CHANNELS_LAST 0: a block takes vectors of one channel's planes, which begin anywhere; width is `channels`.
// channel_sums_finish: each result from its partials, [quantity][count][channels], 32 channels a block of 32 warps;
// blockIdx.y is the quantity. Nothing depends on the order in which blocks run. Pointers are not const __restrict__,
// for the kernel before (PDL) writes what they read: see common/split_k.cuh.
// Defines: ELEMENT, NUMBER, RESULT (dtype names), CHANNELS_LAST, VECTOR, UNROLL, SQUARES (0, 1).
#include "common/pdl.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(NUMBER) || !defined(RESULT) || !defined(CHANNELS_LAST) || !defined(VECTOR) || \
    !defined(UNROLL) || !defined(SQUARES)
#error "define ELEMENT, NUMBER, RESULT, CHANNELS_LAST, VECTOR, UNROLL and SQUARES"
#endif

constexpr int kThreads = 256;  // of a block that sums a part, at most
constexpr int kBlocks = 3;     // of a multiprocessor, as many as it is given
constexpr int kWarps = 32;     // of a block that finishes
constexpr int kQuantities = 1 + SQUARES;
using Element = ELEMENT;
using Number = NUMBER;
using Elements = Vector<Element, VECTOR>;
static_assert(sizeof(Elements) == 16, "vectors of 16 bytes");

// Some elements, 0 where they are none, as one load where the tensor has the whole vector.
__device__ __forceinline__ Elements load(const Element* from, int64 at, int64 elements) {
  Elements loaded;
  if (at + VECTOR <= elements) {
    const uint4 moved = *reinterpret_cast<const uint4*>(from + at);
    loaded = *reinterpret_cast<const Elements*>(&moved);
  } else {
#pragma unroll
    for (int e = 0; e < VECTOR; e++) loaded.at[e] = at + e < elements ? from[at + e] : convert<Element>(0.0f);
  }
  return loaded;
}

__device__ __forceinline__ Number quantity_of(Element element, int quantity) {
  const Number v = convert<Number>(element);
  return quantity == 0 ? v : v * v;
}

// Goes over blocks from the last to the first where `from_end`: what was written last is in the L2 cache.
__device__ __forceinline__ unsigned block_number(int from_end) {
  return from_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

#if CHANNELS_LAST

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    channel_sums(const Element* from, Number* partials, int64 elements, int64 rows, int64 rows_of_part,
                 unsigned columns, unsigned lanes, unsigned strips, int from_end) {
  __shared__ Number of_threads[VECTOR][kThreads];
  const unsigned block = block_number(from_end), part = block / strips, parts = gridDim.x / strips;
  const unsigned row_in_block = threadIdx.x / lanes, side = blockDim.x / lanes;
  const unsigned column = (block - part * strips) * lanes + threadIdx.x - row_in_block * lanes;
  const int64 begin = part * rows_of_part, end = begin + rows_of_part < rows ? begin + rows_of_part : rows;
  Number sums[kQuantities][VECTOR] = {};
  griddepcontrol_wait();
  if (column < columns) {
    for (int64 row = begin + row_in_block; row < end; row += side * UNROLL) {
      Elements loaded[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int64 at = ((row + u * side) * columns + column) * VECTOR;
        loaded[u] = load(from, row + u * side < end ? at : elements, elements);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int e = 0; e < VECTOR; e++)
#pragma unroll
          for (int q = 0; q < kQuantities; q++) sums[q][e] += quantity_of(loaded[u].at[e], q);
    }
  }
#pragma unroll
  for (int q = 0; q < kQuantities; q++) {
    __syncthreads();  // the last quantity's sums have been read
#pragma unroll
    for (int e = 0; e < VECTOR; e++) of_threads[e][threadIdx.x] = sums[q][e];
    for (unsigned half = side / 2; half > 0; half /= 2) {
      __syncthreads();  // all sums of the last step are written
      if (row_in_block < half) {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) of_threads[e][threadIdx.x] += of_threads[e][threadIdx.x + half * lanes];
      }
    }
    if (row_in_block == 0 && column < columns) {
      Number* to = partials + ((static_cast<int64>(q) * parts + part) * columns + column) * VECTOR;
#pragma unroll
      for (int e = 0; e < VECTOR; e++) to[e] = of_threads[e][threadIdx.x];
    }
  }
}

#else

// `vectors` of 16 bytes that a plane of `size` elements touches at most.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    channel_sums(const Element* from, Number* partials, int64 elements, int64 size, int64 vectors,
                 int64 vectors_of_part, int64 vectors_of_channel, unsigned channels, int from_end) {
  __shared__ Number of_warps[kQuantities][kThreads / 32];
  const unsigned block = block_number(from_end), part = block / channels, channel = block - part * channels;
  const unsigned parts = gridDim.x / channels;
  const int64 begin = part * vectors_of_part;
  const int64 end = begin + vectors_of_part < vectors_of_channel ? begin + vectors_of_part : vectors_of_channel;
  int64 image = (begin + threadIdx.x) / vectors, vector = begin + threadIdx.x - image * vectors;
  const int64 images_of_step = kThreads / vectors, vectors_of_step = kThreads - images_of_step * vectors;
  Number sums[kQuantities] = {};
  griddepcontrol_wait();
  for (int64 i = begin + threadIdx.x; i < end; i += kThreads * UNROLL) {
    Elements loaded[UNROLL];
    int first[UNROLL], behind[UNROLL];  // the elements of the vector that are the plane's
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int64 plane = (image * channels + channel) * size, at = (plane / VECTOR + vector) * VECTOR;
      const int64 left = plane + size - at;
      first[u] = at < plane ? static_cast<int>(plane - at) : 0;
      behind[u] = i + u * kThreads >= end || left <= 0 ? 0 : left < VECTOR ? static_cast<int>(left) : VECTOR;
      loaded[u] = load(from, behind[u] > 0 ? at : elements, elements);
      image += images_of_step;
      vector += vectors_of_step;
      if (vector >= vectors) {
        vector -= vectors;
        image++;
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      Number of_vector[kQuantities] = {};
#pragma unroll
      for (int e = 0; e < VECTOR; e++)
        if (e >= first[u] && e < behind[u]) {
#pragma unroll
          for (int q = 0; q < kQuantities; q++) of_vector[q] += quantity_of(loaded[u].at[e], q);
        }
#pragma unroll
      for (int q = 0; q < kQuantities; q++) sums[q] += of_vector[q];
    }
  }
#pragma unroll
  for (int q = 0; q < kQuantities; q++) {
    Number sum = sums[q];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_down_sync(~0u, sum, lane);
    if (threadIdx.x % 32 == 0) of_warps[q][threadIdx.x / 32] = sum;
  }
  __syncthreads();  // the sums of all warps are written
  if (threadIdx.x < kQuantities) {
    Number sum = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; warp++) sum += of_warps[threadIdx.x][warp];
    partials[(static_cast<int64>(threadIdx.x) * parts + part) * channels + channel] = sum;
  }
}

#endif

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    channel_sums_finish(const Number* partials, RESULT* sum, RESULT* sum_of_squares, unsigned channels,
                        unsigned count) {
  __shared__ Number of_warps[kWarps][33];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = blockIdx.x * 32 + lane;
  const Number* mine = partials + static_cast<int64>(blockIdx.y) * count * channels + channel;
  Number total = 0;
  griddepcontrol_wait();
  if (channel < channels) {
#pragma unroll 8
    for (unsigned i = warp; i < count; i += kWarps) total += mine[static_cast<int64>(i) * channels];
  }
  of_warps[warp][lane] = total;
  for (unsigned half = kWarps / 2; half > 0; half /= 2) {
    __syncthreads();  // all sums of the last step are written
    if (warp < half) of_warps[warp][lane] += of_warps[warp + half][lane];
  }
  if (warp == 0 && channel < channels)
    (blockIdx.y == 0 ? sum : sum_of_squares)[channel] = convert<RESULT>(of_warps[0][lane]);
}
