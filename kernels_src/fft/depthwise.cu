// Depthwise convolution of long lines by Fourier transforms, from tensor to tensor in one pass over memory.
//
// y = (x * conj(W)) transformed back, or with W itself for backward data. Two tiles of a channel are the real and the
// imaginary part of one complex line, which products with the transform of real filters keep apart. A block has LINES
// such lines [pair of tiles][channel] of LENGTH: the first pass takes elements from memory, the last stores them, and
// products are between the two passes over neighbouring frequencies, which nothing permutes. fft_depthwise_filters
// writes W [channel][place in a block of frequencies][block]. Sums are float32.
// Defines: T_SOURCE, T_W, T_RESULT (dtype names), SOURCE_LAST, RESULT_LAST (channels last), SOURCE_SPREAD,
// RESULT_SPREAD (elements have gaps between them), CONJUGATE, LENGTH, LINES, THREADS.
#include "fft/passes.cuh"
#include "fft/rows.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "fft/finish.cuh"
#endif

#if !defined(T_SOURCE) || !defined(T_W) || !defined(T_RESULT) || !defined(LENGTH) || !defined(LINES)
#error "define T_SOURCE, T_W, T_RESULT, SOURCE_*, RESULT_*, CONJUGATE, LENGTH, LINES and THREADS"
#endif

constexpr int kPoints = LENGTH, kLines = LINES, kThreads = THREADS;
constexpr int kFirstApart = kPoints / radix_at(kPoints);
static_assert((kPoints & (kPoints - 1)) == 0 && kPoints >= 256, "two passes or more");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block must have whole warps");

constexpr int last_radix(int size) {
  return size == radix_at(size) ? size : last_radix(size / radix_at(size));
}
constexpr int kNeighbours = last_radix(kPoints), kBlocks = kPoints / kNeighbours;

struct Rows {
  Row at[kLines][2];
};

template <bool kSpread>
__device__ __forceinline__ void find_rows(Rows& found, int lines, int tiles, const TiledTensor& tiled) {
  for (int i = threadIdx.x; i < 2 * kLines; i += kThreads) {
    const int line = i / 2, rank = blockIdx.x * kLines + line;
    const int pair = rank / tiled.channels, tile = 2 * pair + i % 2;
    const TilePlace at = tiled.grid.place(tile);
    const int plane = at.image * tiled.image_stride + (rank - pair * tiled.channels.by) * tiled.channel_stride;
    const int down = rank < lines && tile < tiles ? tiled.rows.offset(at.row, tiled.rows.low) : -1;
    found.at[line][i % 2] = row_of<kSpread>(at.column, plane + down, down >= 0, tiled.columns);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fft_depthwise_filters(const T_W* __restrict__ w, float2* __restrict__ filters, int channels, int taps,
                          int channel_stride, int tap_stride) {
  extern __shared__ float2 lines[];
  const int first = blockIdx.x * kLines;
  const auto load = [&](const Butterfly& butterfly, int r) {
    const int channel = first + butterfly.line, tap = butterfly.first + r * kFirstApart;
    const bool inside = channel < channels && tap < taps;
    return make_float2(inside ? convert<float>(w[channel * channel_stride + tap * tap_stride]) : 0.0f, 0.0f);
  };
  pass<kPoints, kPoints, kLines, kThreads, false, false>(load, InLines<kPoints>{lines});
  __syncthreads();  // all points of the first pass are there
  passes<kFirstApart, kPoints, kLines, kThreads, false>(lines);
  for (int i = threadIdx.x; i < kLines * kPoints; i += kThreads) {
    const int line = i / kPoints, place = i % kPoints, channel = first + line;
    const int point = place % kBlocks * kNeighbours + place / kBlocks;
    if (channel < channels)
      filters[static_cast<long long>(channel) * kPoints + place] = lines[line * line_pitch(kPoints) + slot_of(point)];
  }
}

// Transforms blocks of kSize points, multiplies them by filters and transforms them back.
template <int kSize>
__device__ __forceinline__ void multiply(float2* lines, const float2* __restrict__ filters, int all_lines,
                                         const Divisor& channels) {
  if constexpr (kSize > kNeighbours) {
    pass_in_place<kSize, kPoints, kLines, kThreads, false>(lines);
    multiply<kSize / radix_at(kSize)>(lines, filters, all_lines, channels);
    pass_in_place<kSize, kPoints, kLines, kThreads, true>(lines);
  } else {
    for (int i = threadIdx.x; i < kLines * kBlocks; i += kThreads) {
      const Butterfly butterfly = butterfly_of<kSize, kPoints, kLines, false>(i);
      const int rank = min(static_cast<int>(blockIdx.x) * kLines + butterfly.line, all_lines - 1);
      const int channel = rank - rank / channels * channels.by;
      const float2* factors = filters + static_cast<long long>(channel) * kPoints + butterfly.first / kNeighbours;
      const InLines<kSize> numbers{lines};
      float2 values[kNeighbours];
#pragma unroll
      for (int r = 0; r < kNeighbours; ++r) values[r] = numbers(butterfly, r);
      transform<kNeighbours, false>(values);
#pragma unroll
      for (int r = 0; r < kNeighbours; ++r) {
        float2 w = factors[r * kBlocks];
        if (CONJUGATE) w.y = -w.y;
        const float2 value = values[r];
        values[r] = make_float2(value.x * w.x - value.y * w.y, value.x * w.y + value.y * w.x);
      }
      transform<kNeighbours, true>(values);
#pragma unroll
      for (int r = 0; r < kNeighbours; ++r) numbers(butterfly, r, values[r]);
    }
    __syncthreads();  // the next pass takes what other threads wrote
  }
}

// all_lines: pairs of tiles times channels.
extern "C" __global__ void __launch_bounds__(kThreads)
    fft_depthwise(const T_SOURCE* __restrict__ source, const float2* __restrict__ filters,
                  T_RESULT* __restrict__ results, int all_lines, int tiles, float scale, const TiledTensor source_tiles,
#ifdef EPILOGUE
                  const TiledTensor result_tiles, const __grid_constant__ Epilogue epilogue) {
  __shared__ ChannelTerms terms[kLines];
  find_terms<kThreads, 2>(terms, epilogue, blockIdx.x * kLines, all_lines, result_tiles);
#else
                  const TiledTensor result_tiles) {
#endif
  extern __shared__ float2 lines[];
  __shared__ Rows from, to;
  find_rows<SOURCE_SPREAD>(from, all_lines, tiles, source_tiles);
  find_rows<RESULT_SPREAD>(to, all_lines, tiles, result_tiles);
  __syncthreads();  // all rows and terms are found
  const auto element = [&](const Row& row, int position) {
    const Place place = place_of<SOURCE_SPREAD>(row, source_tiles.columns, position);
    const T_SOURCE value = source[place.holds ? place.offset : 0];  // loads need not wait for a branch
    return place.holds ? convert<float>(value) : 0.0f;
  };
  const auto load = [&](const Butterfly& butterfly, int r) {
    const Row real = from.at[butterfly.line][0], imaginary = from.at[butterfly.line][1];
    const int position = butterfly.first + r * kFirstApart;
    return make_float2(element(real, position), element(imaginary, position));
  };
  pass<kPoints, kPoints, kLines, kThreads, false, SOURCE_LAST>(load, InLines<kPoints>{lines});
  __syncthreads();  // all points of the first pass are there
  multiply<kFirstApart>(lines, filters, all_lines, source_tiles.channels);
#ifdef EPILOGUE
  const auto keep = [&](const Row& row, int position, float value, const ChannelTerms& of_line) {
    const Place place = place_of<RESULT_SPREAD>(row, result_tiles.columns, position);
    const int at = place.holds ? place.offset : 0;  // loads need not wait for a branch
    const T_RESULT result = convert<T_RESULT>(finish_element(scale * value, of_line, epilogue, at));
    if (place.holds) results[place.offset] = result;
  };
#else
  const auto keep = [&](const Row& row, int position, float value) {
    const Place place = place_of<RESULT_SPREAD>(row, result_tiles.columns, position);
    const T_RESULT result = convert<T_RESULT>(scale * value);
    if (place.holds) results[place.offset] = result;
  };
#endif
  const auto store = [&](const Butterfly& butterfly, int r, float2 value) {
    const Row real = to.at[butterfly.line][0], imaginary = to.at[butterfly.line][1];
    const int position = butterfly.first + r * kFirstApart;
#ifdef EPILOGUE
    keep(real, position, value.x, terms[butterfly.line]);
    keep(imaginary, position, value.y, terms[butterfly.line]);
#else
    keep(real, position, value.x);
    keep(imaginary, position, value.y);
#endif
  };
  pass<kPoints, kPoints, kLines, kThreads, true, RESULT_LAST>(InLines<kPoints>{lines}, store);
}
