// Fourier transforms of long lines in shared memory: from a tensor to its transforms, and back to the elements kept.
//
// A block has LINES lines [tile][channel] of LENGTH real numbers as half as many complex ones: the first pass takes
// elements from memory, the last of the way back stores them. Frequencies stay in the order that fft/passes.cuh
// leaves them in, LENGTH / 2 last: products do not ask which one is which. Sums are float32.
// Defines: ELEMENT, CHANNELS_LAST, SPREAD (elements have gaps between them), LENGTH (a power of two), LINES, THREADS.
#include "fft/passes.cuh"
#include "fft/rows.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "fft/finish.cuh"
#endif

#if !defined(ELEMENT) || !defined(CHANNELS_LAST) || !defined(SPREAD) || !defined(LENGTH) || !defined(LINES)
#error "define ELEMENT, CHANNELS_LAST, SPREAD, LENGTH, LINES and THREADS"
#endif

constexpr int kLength = LENGTH, kLines = LINES, kThreads = THREADS;
constexpr int kPoints = kLength / 2, kFrequencies = kPoints + 1, kFirstApart = kPoints / radix_at(kPoints);
static_assert((kLength & (kLength - 1)) == 0 && kPoints >= 128, "two passes or more");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block must have whole warps");

constexpr int kPitch = line_pitch(kPoints);

// The frequency at a place; digits of the passes, the first most significant in a place and least in a frequency.
template <int kSize>
__device__ __forceinline__ int frequency_at(int place) {
  if constexpr (kSize == 1) {
    return 0;
  } else {
    constexpr int kApart = kSize / radix_at(kSize);
    return place / kApart + radix_at(kSize) * frequency_at<kApart>(place % kApart);
  }
}

// Places of frequencies f and kPoints - f. Those of a first digit that is not 0 mirror each other, for all digits
// become what is left to the greatest, and the first to the radix; with a first digit of 0 the next one decides.
struct Pair {
  int place, mirror;
};

template <int kSize>
__device__ __forceinline__ Pair pair_of(int i) {
  constexpr int kApart = kSize / radix_at(kSize), kPairs = (kSize - kApart) / 2;
  if constexpr (kApart == 1) {
    return {i, i == 0 ? kSize / 2 : kSize - i};  // the pair of 0 is none: two that are their own mirrors
  } else {
    if (i < kPairs) return {kApart + i, kSize - 1 - i};
    return pair_of<kApart>(i - kPairs);
  }
}

struct Rows {
  Row at[kLines];
};

__device__ __forceinline__ void find_rows(Rows& found, int planes, const TiledTensor& tiled) {
  for (int line = threadIdx.x; line < kLines; line += kThreads) {
    const int rank = blockIdx.x * kLines + line, tile = rank / tiled.channels;
    const TilePlace at = tiled.grid.place(tile);
    const int plane = at.image * tiled.image_stride + (rank - tile * tiled.channels.by) * tiled.channel_stride;
    const int down = rank < planes ? tiled.rows.offset(at.row, tiled.rows.low) : -1;
    found.at[line] = row_of<SPREAD>(at.column, plane + down, down >= 0, tiled.columns);
  }
}

// cos and sin of half a turn times frequency / kPoints.
__device__ __forceinline__ float2 half_twiddle(int place) {
  float2 found;
  sincospif(static_cast<float>(frequency_at<kPoints>(place)) / kPoints, &found.y, &found.x);
  return found;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_lines_forward(const ELEMENT* __restrict__ tensor, float2* __restrict__ transforms, int planes,
                      const __grid_constant__ TiledTensor tiled) {
  extern __shared__ float2 lines[];
  __shared__ Rows found;
  find_rows(found, planes, tiled);
  __syncthreads();  // all rows are found
  const auto element = [&](const Row& row, int position) {
    const Place place = place_of<SPREAD>(row, tiled.columns, position);
    const ELEMENT value = tensor[place.holds ? place.offset : 0];  // loads need not wait for a branch
    return place.holds ? convert<float>(value) : 0.0f;
  };
  const auto load = [&](const Butterfly& butterfly, int r) {
    const Row row = found.at[butterfly.line];
    const int position = 2 * (butterfly.first + r * kFirstApart);
    return make_float2(element(row, position), element(row, position + 1));
  };
  pass<kPoints, kPoints, kLines, kThreads, false, CHANNELS_LAST>(load, InLines<kPoints>{lines});
  __syncthreads();  // all points of the first pass are there
  passes<kFirstApart, kPoints, kLines, kThreads, false>(lines);
  for (int i = threadIdx.x; i < kLines * (kPoints / 2); i += kThreads) {
    const int line = i / (kPoints / 2);
    const long long plane = static_cast<long long>(blockIdx.x) * kLines + line;
    if (plane >= planes) break;
    const Pair pair = pair_of<kPoints>(i % (kPoints / 2));
    const float2* points = lines + line * kPitch;
    const float2 a = points[slot_of(pair.place)], b = points[slot_of(pair.mirror)];
    float2* to = transforms + plane * kFrequencies;
    if (pair.place == 0) {
      to[0] = make_float2(a.x + a.y, 0.0f);
      to[kPoints] = make_float2(a.x - a.y, 0.0f);
      to[pair.mirror] = make_float2(b.x, -b.y);
    } else {
      const float2 even = make_float2(0.5f * (a.x + b.x), 0.5f * (a.y - b.y));
      const float2 odd = make_float2(0.5f * (a.y + b.y), 0.5f * (b.x - a.x)), twiddle = half_twiddle(pair.place);
      const float2 rotated = make_float2(odd.x * twiddle.x + odd.y * twiddle.y, odd.y * twiddle.x - odd.x * twiddle.y);
      to[pair.place] = plus(even, rotated);
      to[pair.mirror] = make_float2(even.x - rotated.x, rotated.y - even.y);
    }
  }
}

#ifdef EPILOGUE
// All residuals of a thread are read ahead; left alone, 256 threads take so many registers for it that no second block
// fits a multiprocessor.
extern "C" __global__ void __launch_bounds__(kThreads, kThreads <= 256 ? 2 : 1)
#else
extern "C" __global__ void __launch_bounds__(kThreads, 1)
#endif
    fft_lines_backward(const float2* __restrict__ transforms, ELEMENT* __restrict__ tensor, int planes, float scale,
#ifdef EPILOGUE
                       const __grid_constant__ TiledTensor tiled, const __grid_constant__ Epilogue epilogue) {
  __shared__ ChannelTerms terms[kLines];
  find_terms<kThreads, 1>(terms, epilogue, blockIdx.x * kLines, planes, tiled);
#else
                       const __grid_constant__ TiledTensor tiled) {
#endif
  extern __shared__ float2 lines[];
  __shared__ Rows found;
  find_rows(found, planes, tiled);
#pragma unroll 4
  for (int i = threadIdx.x; i < kLines * (kPoints / 2); i += kThreads) {
    const int line = i / (kPoints / 2);
    const long long plane = min(static_cast<long long>(blockIdx.x) * kLines + line, planes - 1LL);
    const Pair pair = pair_of<kPoints>(i % (kPoints / 2));
    const float2* from = transforms + plane * kFrequencies;
    const float2 a = from[pair.place], b = from[pair.mirror];
    float2* points = lines + line * kPitch;
    if (pair.place == 0) {
      const float last = from[kPoints].x;
      points[0] = make_float2(a.x + last, a.x - last);
      points[slot_of(pair.mirror)] = make_float2(2.0f * b.x, -2.0f * b.y);
    } else {
      const float2 even = make_float2(a.x + b.x, a.y - b.y), apart = make_float2(a.x - b.x, a.y + b.y);
      const float2 twiddle = half_twiddle(pair.place);
      const float2 odd =
          make_float2(apart.x * twiddle.x - apart.y * twiddle.y, apart.y * twiddle.x + apart.x * twiddle.y);
      points[slot_of(pair.place)] = make_float2(even.x - odd.y, even.y + odd.x);
      points[slot_of(pair.mirror)] = make_float2(even.x + odd.y, odd.x - even.y);
    }
  }
  __syncthreads();  // all frequencies are there, and all rows and terms are found
  passes<kFirstApart, kPoints, kLines, kThreads, true>(lines);
#ifdef EPILOGUE
  const auto keep = [&](const Row& row, int position, float value, const ChannelTerms& of_line) {
    const Place place = place_of<SPREAD>(row, tiled.columns, position);
    const int at = place.holds ? place.offset : 0;  // loads need not wait for a branch
    const ELEMENT result = convert<ELEMENT>(finish_element(scale * value, of_line, epilogue, at));
    if (place.holds) tensor[place.offset] = result;
  };
#else
  const auto keep = [&](const Row& row, int position, float value) {
    const Place place = place_of<SPREAD>(row, tiled.columns, position);
    const ELEMENT result = convert<ELEMENT>(scale * value);
    if (place.holds) tensor[place.offset] = result;
  };
#endif
  const auto store = [&](const Butterfly& butterfly, int r, float2 value) {
    const Row row = found.at[butterfly.line];
    const int position = 2 * (butterfly.first + r * kFirstApart);
#ifdef EPILOGUE
    keep(row, position, value.x, terms[butterfly.line]);
    keep(row, position + 1, value.y, terms[butterfly.line]);
#else
    keep(row, position, value.x);
    keep(row, position + 1, value.y);
#endif
  };
  pass<kPoints, kPoints, kLines, kThreads, true, CHANNELS_LAST>(InLines<kPoints>{lines}, store);
}
