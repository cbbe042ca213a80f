// Fourier transforms of tiles in shared memory: from a tensor to its transforms, and back to the elements that are
// kept.
//
// A block has PLANES planes [tile][channel]. Forward: elements to shared memory with zeros around, a thread a row (two
// real numbers as one complex, then split), a thread a column of the half that is kept, from registers to memory.
// Backward: the same in reverse, of the rows that are kept. Shared memory holds rows of kSlots complex numbers; it is
// an odd number, so that neighbouring rows begin in different banks. Sums are float32. Defines: ELEMENT, CHANNELS_LAST,
// SPREAD (elements have gaps between them), LENGTH_H, LENGTH_W, PLANES, THREADS. Source: Vasilache et al., Fast
// Convolutional Nets with fbfft, ICLR 2015.
#include "fft/registers.cuh"
#include "fft/rows.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "fft/finish.cuh"
#endif

#if !defined(ELEMENT) || !defined(CHANNELS_LAST) || !defined(LENGTH_H) || !defined(LENGTH_W) || !defined(PLANES)
#error "define ELEMENT, CHANNELS_LAST, LENGTH_H, LENGTH_W, PLANES and THREADS"
#endif

constexpr int kHeight = LENGTH_H, kWidth = LENGTH_W, kPlanes = PLANES, kThreads = THREADS;
constexpr int kHalf = kWidth / 2, kSlots = kHalf + 1;
constexpr int kFrequencies = kHeight * kSlots;
constexpr int kBatch = LENGTH_H < 8 ? LENGTH_H : 8;  // loads of a thread under way
// 4 floats modulo 32, so that four columns of eight neighbouring planes lie in different banks.
constexpr int kPlanePitch = (kFrequencies + 13) / 16 * 16 + 2;

static_assert(kWidth % 4 == 0, "a row must have an odd number of slots, or its columns share banks");
static_assert(kPlanePitch >= kFrequencies, "planes must not overlap in shared memory");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block must have whole warps");

// Where a block's planes are in the tensor: offsets down and across add up.
struct Planes {
  Row down[kPlanes], across[kPlanes];
};

struct Column {
  int plane, across;
};

// In the order of memory: channels innermost, or columns.
__device__ __forceinline__ Column column_of(int item) {
  if constexpr (CHANNELS_LAST) return {item % kPlanes, item / kPlanes};
  return {item / kWidth, item % kWidth};
}

// A column's number in the first row; rows have kSlots pairs of numbers each.
__device__ __forceinline__ float* top_of(float2* tile, const Column& column) {
  return reinterpret_cast<float*>(tile + column.plane * kPlanePitch) + column.across;
}

__device__ __forceinline__ void find_planes(Planes& found, int planes, const TiledTensor& tiled) {
  for (int slot = threadIdx.x; slot < kPlanes; slot += kThreads) {
    const int plane = blockIdx.x * kPlanes + slot, tile = plane / tiled.channels;
    const TilePlace at = tiled.grid.place(tile);
    const int start = at.image * tiled.image_stride + (plane - tile * tiled.channels.by) * tiled.channel_stride;
    found.down[slot] = row_of<SPREAD>(at.row, start, plane < planes, tiled.rows);
    found.across[slot] = row_of<SPREAD>(at.column, 0, true, tiled.columns);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_tiles_forward(const ELEMENT* __restrict__ tensor, float2* __restrict__ transforms, int planes,
                      const __grid_constant__ TiledTensor tiled) {
  extern __shared__ float2 tile[];
  __shared__ Planes found;
  find_planes(found, planes, tiled);
  __syncthreads();                                 // all planes are found
  const int used = min(tiled.rows.high, kHeight);  // rows below it are zero
  for (int item = threadIdx.x; item < kPlanes * kWidth; item += kThreads) {
    const Column column = column_of(item);
    const Place across = place_of<SPREAD>(found.across[column.plane], tiled.columns, column.across);
    const Row down = found.down[column.plane];
    float* top = top_of(tile, column);
    for (int first = 0; first < used; first += kBatch) {
      float values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const Place place = place_of<SPREAD>(down, tiled.rows, first + b);
        const bool holds = across.holds && place.holds;
        const ELEMENT value = tensor[holds ? across.offset + place.offset : 0];  // loads need not wait for a branch
        values[b] = holds ? convert<float>(value) : 0.0f;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < used) top[2 * kSlots * (first + b)] = values[b];
      }
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
#ifdef EPILOGUE
                       const __grid_constant__ TiledTensor tiled, const __grid_constant__ Epilogue epilogue) {
  __shared__ ChannelTerms terms[kPlanes];
  find_terms<kThreads, 1>(terms, epilogue, blockIdx.x * kPlanes, planes, tiled);
#else
                       const __grid_constant__ TiledTensor tiled) {
#endif
  extern __shared__ float2 tile[];
  __shared__ Planes found;
  find_planes(found, planes, tiled);
  const int low = tiled.rows.low, high = min(tiled.rows.high, kHeight);  // rows that are kept
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
  __syncthreads();  // all columns are transformed, and all planes and terms are found
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
  for (int item = threadIdx.x; item < kPlanes * kWidth; item += kThreads) {
    const Column column = column_of(item);
    const Place across = place_of<SPREAD>(found.across[column.plane], tiled.columns, column.across);
    if (!across.holds) continue;
    const Row down = found.down[column.plane];
    const float* top = top_of(tile, column);
#pragma unroll 8
    for (int row = low; row < high; ++row) {
      const Place place = place_of<SPREAD>(down, tiled.rows, row);
#ifdef EPILOGUE
      const int at = place.holds ? across.offset + place.offset : 0;  // loads need not wait for a branch
      const float result = finish_element(scale * top[2 * kSlots * row], terms[column.plane], epilogue, at);
      const ELEMENT value = convert<ELEMENT>(result);
#else
      const ELEMENT value = convert<ELEMENT>(scale * top[2 * kSlots * row]);
#endif
      if (place.holds) tensor[across.offset + place.offset] = value;
    }
  }
}
