// y[n,k,i,j] = sum_{c,r,s} x[n, c, i*STRIDE_Y - pad_top + r, j*STRIDE_X - pad_left + s] * w[k,c,r,s] for CHANNELS <= 4
// channels, on tensor cores with float32 accumulators.
//
// A block stages the input tile of x that TILE_H x TILE_W outputs meet, with pixels of four channels. A window is what
// one output, or two neighbours if STRIDE_X is odd, meets of the input tile: of each row a run of pixels that starts
// with an even one, and so rows of ldmatrix as they lie. A K is a filter row after the other, each in
// whole steps of 16; the TILE_K filters of a block are laid out so once, with zeros around the taps and a copy for each
// output of a window. Windows are rows of the product and filters its columns if CHANNELS_LAST, else the other way
// round, and both are ordered so that a thread's results are 8 neighbours in memory. WARPS warps take BLOCKS * 16
// windows at a time. Grid: persistent; a block keeps its filters and goes through tiles of images.
#include "common/mma.cuh"
#include "few_channels/filters.cuh"
#include "few_channels/output_tiles.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#endif

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K)
#error "define STRIDE_Y, STRIDE_X, TILE_H, TILE_W and TILE_K"
#endif
#if !defined(WARPS) || !defined(BLOCKS) || !defined(CHANNELS_LAST) || !defined(OFFSET) || !defined(IN_VECTOR)
#error "define WARPS, BLOCKS, CHANNELS_LAST, OFFSET and IN_VECTOR"
#endif
#if !defined(OUT_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define OUT_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kThreads = 32 * WARPS, kTileH = TILE_H, kTileW = TILE_W, kTileK = TILE_K, kBlocks = BLOCKS;
static_assert(kTileK % 32 == 0, "TILE_K is a multiple of 32: a thread has 8 neighbouring filters of 32");

// Windows: outputs of one, pixels from one to the next, steps of 16 along a filter row, windows of a row and of a tile.
constexpr int kOutputs = 1 + STRIDE_X % 2, kWindowPixels = kOutputs * STRIDE_X;
constexpr int kRowKSteps = ceil_div(4 * (FILTER_X + (kOutputs - 1) * STRIDE_X), 16);
constexpr int kRowWindows = ceil_div(kTileW, kOutputs), kWindows = kTileH * kRowWindows;
constexpr int kWindowBlocks = ceil_div(kWindows, 16), kFilterBlocks = kOutputs * kTileK / 16;
// OFFSET columns are staged before those that the first output meets, so that vectors are aligned.
constexpr int kFirstPixel = OFFSET % 2, kLead = OFFSET + kFirstPixel;
constexpr int kColumns = round_up(kLead + (kRowWindows - 1) * kWindowPixels + 4 * kRowKSteps - kFirstPixel, IN_VECTOR);
constexpr bool kPermuted = !CHANNELS_LAST && kWindowPixels == 2;
using Pixels =
    InputTile<CHANNELS, (kTileH - 1) * STRIDE_Y + FILTER_Y, kColumns, kFirstPixel, IN_VECTOR, CHANNELS_LAST, kPermuted>;
using Loader = InputTileLoader<Pixels, kThreads, ELEMENT>;

// Filters in shared memory: an odd number of 16-byte words lies between them, so that eight meet every bank once.
constexpr int kDepth = FILTER_Y * kRowKSteps * 16, kFilterPitch = kDepth + 8;
constexpr int kFilterBytes = 2 * kOutputs * kTileK * kFilterPitch, kTaps = CHANNELS * FILTER_Y * FILTER_X;
constexpr int kRawBytes = round_up(2 * kTileK * kTaps, 16);
static_assert(SHARED_BYTES == kFilterBytes + maximum(Pixels::kBytes, kRawBytes),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");
// Windows whose results are one thread's 8 neighbours are of this many blocks.
constexpr int kGroupBlocks = CHANNELS_LAST ? 1 : 2 / kOutputs;
static_assert(kBlocks % kGroupBlocks == 0, "BLOCKS is a multiple of the blocks whose results are 8 neighbours");

// Which filter of 32 a column of the product is: thread t holds columns 2t and 2t + 1 of each 8, for filters 8t ...
// + 7.
__device__ __forceinline__ int filter_of(int column) {
  return CHANNELS_LAST ? column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2 : column;
}

// Lays out the filters for the product, zeros beyond the `count` of them.
__device__ __forceinline__ void stage_filters(unsigned char* to, const ELEMENT* raw, int count) {
  constexpr int kRowWords = 2 * kRowKSteps, kWords = FILTER_Y * kRowWords;
  for (int i = threadIdx.x; i < kOutputs * kTileK * kWords; i += kThreads) {
    const int word = i % kWords, slot = i / kWords, output = slot / kTileK, k = filter_of(slot % kTileK);
    const int r = word / kRowWords, pixel = word % kRowWords * 2 - output * STRIDE_X;
    Vector<ELEMENT, 8> taps;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int s = pixel + e / 4, c = e % 4;
      const int at = CHANNELS_LAST ? ((k * FILTER_Y + r) * FILTER_X + s) * CHANNELS + c
                                   : ((k * CHANNELS + c) * FILTER_Y + r) * FILTER_X + s;
      const bool inside = c < CHANNELS && s >= 0 && s < FILTER_X && k < count;
      taps.at[e] = inside ? raw[at] : convert<ELEMENT>(0.0f);
    }
    *reinterpret_cast<Vector<ELEMENT, 8>*>(to + 2 * slot * kFilterPitch + 16 * word) = taps;
  }
}

// The window of a tile that a lane reads for block b of its warp's.
__device__ __forceinline__ int window_of(int b) {
  const int lane = threadIdx.x % 32;
  if (CHANNELS_LAST) return 16 * b + lane % 16;
  const int i = lane % 8, half = lane / 16;
  if (kOutputs == 2) return 16 * b + i / 2 * 4 + half * 2 + i % 2;
  return b / 2 * 32 + i / 2 * 8 + b % 2 * 4 + half * 2 + i % 2;
}

using Accumulators = float[kBlocks][kFilterBlocks][2][4];

// The products of the warp's windows from `first` on with all filters.
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned filters, unsigned input_tile, int first) {
  constexpr int kPlaces = kPermuted ? kRowKSteps : 1;
  const int lane = threadIdx.x % 32, half = CHANNELS_LAST ? lane / 16 : lane / 8 % 2;
  unsigned windows[kBlocks][kPlaces];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int window = min(first + window_of(b), kWindows - 1);
    const int row = window / kRowWindows, word = (kLead + window % kRowWindows * kWindowPixels) / 2 + half;
#pragma unroll
    for (int step = 0; step < kPlaces; ++step)
      windows[b][step] =
          input_tile + 16 * (row * STRIDE_Y * Pixels::kRowWords + Pixels::word_position(word + 2 * step));
  }
  // What the next products need is on its way while these are computed.
  unsigned pixels[kBlocks][4], taps[4];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) load_matrices(pixels[b], windows[b][0]);
  load_matrices(taps, filters);
#pragma unroll(FILTER_Y* kRowKSteps <= 16 ? FILTER_Y : 1)
  for (int r = 0; r < FILTER_Y; ++r)
#pragma unroll
    for (int step = 0; step < kRowKSteps; ++step) {
      const bool is_last_step = step + 1 == kRowKSteps, is_last = is_last_step && r + 1 == FILTER_Y;
      const int next_r = is_last_step ? r + 1 : r, next_step = is_last_step ? 0 : step + 1;
      unsigned next_pixels[kBlocks][4];
      if (!is_last) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
          load_matrices(next_pixels[b], windows[b][kPermuted ? next_step : 0] + 16 * next_r * Pixels::kRowWords +
                                            (kPermuted ? 0 : 32 * next_step));
      }
#pragma unroll
      for (int f = 0; f < kFilterBlocks; ++f) {
        unsigned next_taps[4];
        const bool same = f + 1 < kFilterBlocks;
        const int block = same ? f + 1 : 0, depth = same ? r * kRowKSteps + step : next_r * kRowKSteps + next_step;
        if (same || !is_last) load_matrices(next_taps, filters + 2 * (16 * block * kFilterPitch + depth * 16));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (CHANNELS_LAST)
              multiply_add<ELEMENT>(acc[b][f][h], pixels[b], taps[2 * h], taps[2 * h + 1]);
            else
              multiply_add<ELEMENT>(acc[b][f][h], taps, pixels[b][2 * h], pixels[b][2 * h + 1]);
          }
#pragma unroll
        for (int i = 0; i < 4; ++i) taps[i] = next_taps[i];
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) pixels[b][i] = next_pixels[b][i];
    }
}

#ifdef EPILOGUE
// 8 elements of the residual, OUT_VECTOR at a time; at(i) is where the one of number i is, exists(i) whether.
template <typename At, typename Exists>
__device__ __forceinline__ Vector<ELEMENT, 8> read_eight(const At& at, const Exists& exists) {
  using Few = Vector<ELEMENT, OUT_VECTOR>;
  Vector<ELEMENT, 8> elements = {};
#pragma unroll
  for (int i = 0; i < 8; i += OUT_VECTOR)
    *reinterpret_cast<Few*>(elements.at + i) = read_residual<OUT_VECTOR>(at(i), exists(i));
  return elements;
}

// Makes results of the sums that store_channels_last writes.
__device__ __forceinline__ void finish_channels_last(Accumulators& acc, const Shape& shape, const OutputTile& tile,
                                                     int first, const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < kTileK / 32; ++group) {
    const int k = tile.first_k + 32 * group + lane % 4 * 8;
    ChannelTerms terms[8 / OUT_VECTOR][OUT_VECTOR] = {};
#pragma unroll
    for (int i = 0; i < 8; i += OUT_VECTOR)
      if (k + i < shape.out_channels)
        read_terms(terms[i / OUT_VECTOR], epilogue, tile.image, k + i, shape.out_channels);
    Vector<ELEMENT, 8> residual[kBlocks][2][kOutputs];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int window = first + 16 * b + 8 * half + lane / 4, row = tile.row + window / kRowWindows;
#pragma unroll
        for (int p = 0; p < kOutputs; ++p) {
          const int column = tile.column + window % kRowWindows * kOutputs + p;
          const bool inside = window < kWindows && row < shape.out_height && column < shape.out_width;
          const int pixel = (tile.image * shape.out_height + row) * shape.out_width + column;
          residual[b][half][p] =
              read_eight([&](int i) { return epilogue.residual + (pixel * shape.out_channels + k + i); },
                         [&](int i) { return inside && k + i < shape.out_channels; });
        }
      }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int p = 0; p < kOutputs; ++p)
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& sum = acc[b][p * kTileK / 16 + 2 * group + i / 4][i / 2 % 2][2 * half + i % 2];
            sum = finish(sum, terms[i / OUT_VECTOR][i % OUT_VECTOR], convert<float>(residual[b][half][p].at[i]),
                         epilogue);
          }
  }
}

// Makes results of the sums that store_channels_first writes.
__device__ __forceinline__ void finish_channels_first(Accumulators& acc, const Shape& shape, const OutputTile& tile,
                                                      int first, const Epilogue& epilogue) {
  const int lane = threadIdx.x % 32, channel_stride = shape.out_height * shape.out_width;
#pragma unroll
  for (int f = 0; f < kTileK / 16; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = tile.first_k + 16 * f + 8 * half + lane / 4;
      if (k >= shape.out_channels) continue;
      const ChannelTerms terms = channel_terms(epilogue, tile.image, k, shape.out_channels);
      const EpilogueElement* const from = epilogue.residual + (tile.image * shape.out_channels + k) * channel_stride;
#pragma unroll
      for (int b = 0; b < kBlocks; b += kGroupBlocks) {
        const auto offset = [&](int i) {
          const int window = first + 16 * b + lane % 4 * (8 / kOutputs) + i / kOutputs;
          const int row = tile.row + window / kRowWindows;
          const int column = tile.column + window % kRowWindows * kOutputs + i % kOutputs;
          const bool inside = window < kWindows && row < shape.out_height && column < shape.out_width;
          return inside ? row * shape.out_width + column : -1;
        };
        const Vector<ELEMENT, 8> residual =
            read_eight([&](int i) { return from + offset(i); }, [&](int i) { return offset(i) >= 0; });
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int window = i / kOutputs, p = i % kOutputs;
          float& sum = acc[b + window / 4][p * kTileK / 16 + f][window / 2 % 2][2 * half + window % 2];
          sum = finish(sum, terms, convert<float>(residual.at[i]), epilogue);
        }
      }
    }
}
#endif

// Writes 8 neighbours along k of one output, OUT_VECTOR at a time.
__device__ __forceinline__ void store_channels_last(ELEMENT* y, const Shape& shape, const OutputTile& tile,
                                                    const Accumulators& acc, int first) {
  using Few = Vector<ELEMENT, OUT_VECTOR>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int window = first + 16 * b + 8 * half + lane / 4, row = tile.row + window / kRowWindows;
      if (window >= kWindows || row >= shape.out_height) continue;
#pragma unroll
      for (int p = 0; p < kOutputs; ++p) {
        const int column = tile.column + window % kRowWindows * kOutputs + p;
        if (column >= shape.out_width) continue;
        ELEMENT* const to = y + ((tile.image * shape.out_height + row) * shape.out_width + column) * shape.out_channels;
#pragma unroll
        for (int group = 0; group < kTileK / 32; ++group) {
          const int k = tile.first_k + 32 * group + lane % 4 * 8;
          Vector<ELEMENT, 8> values;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            values.at[i] = convert<ELEMENT>(acc[b][p * kTileK / 16 + 2 * group + i / 4][i / 2 % 2][2 * half + i % 2]);
#pragma unroll
          for (int i = 0; i < 8; i += OUT_VECTOR)
            if (k + i < shape.out_channels)
              *reinterpret_cast<Few*>(to + k + i) = *reinterpret_cast<const Few*>(values.at + i);
        }
      }
    }
}

// Writes 8 neighbours along a row, or along the rows of a tile of whole rows, of one filter, OUT_VECTOR at a time.
__device__ __forceinline__ void store_channels_first(ELEMENT* y, const Shape& shape, const OutputTile& tile,
                                                     const Accumulators& acc, int first) {
  using Few = Vector<ELEMENT, OUT_VECTOR>;
  const int lane = threadIdx.x % 32, channel_stride = shape.out_height * shape.out_width;
#pragma unroll
  for (int b = 0; b < kBlocks; b += kGroupBlocks) {
    int offsets[8 / OUT_VECTOR];
#pragma unroll
    for (int i = 0; i < 8; i += OUT_VECTOR) {
      const int window = first + 16 * b + lane % 4 * (8 / kOutputs) + i / kOutputs;
      const int row = tile.row + window / kRowWindows;
      const int column = tile.column + window % kRowWindows * kOutputs + i % kOutputs;
      const bool inside = window < kWindows && row < shape.out_height && column < shape.out_width;
      offsets[i / OUT_VECTOR] = inside ? row * shape.out_width + column : -1;
    }
#pragma unroll
    for (int f = 0; f < kTileK / 16; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = tile.first_k + 16 * f + 8 * half + lane / 4;
        if (k >= shape.out_channels) continue;
        ELEMENT* const to = y + (tile.image * shape.out_channels + k) * channel_stride;
        Vector<ELEMENT, 8> values;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int window = i / kOutputs, p = i % kOutputs;
          values.at[i] =
              convert<ELEMENT>(acc[b + window / 4][p * kTileK / 16 + f][window / 2 % 2][2 * half + window % 2]);
        }
#pragma unroll
        for (int i = 0; i < 8; i += OUT_VECTOR)
          if (offsets[i / OUT_VECTOR] >= 0)
            *reinterpret_cast<Few*>(to + offsets[i / OUT_VECTOR]) = *reinterpret_cast<const Few*>(values.at + i);
      }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_forward(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ y,
#ifdef EPILOGUE
                         const __grid_constant__ Shape shape, const __grid_constant__ Epilogue epilogue) {
#else
                         const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(16) unsigned char shared[];
  const int first_tile = static_cast<int>(blockIdx.x) / shape.filter_tiles;
  const int first_k = (blockIdx.x - first_tile * shape.filter_tiles.by) * kTileK;
  const int count = min(kTileK, shape.out_channels - first_k);
  unsigned char* const input_tile = shared + kFilterBytes;
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared));

  OutputTile tile = {0, first_k, 0, 0};
  Loader loader;
  load_filters<kThreads>(base + kFilterBytes, w + first_k * kTaps, count * kTaps);
  go_to(tile, shape, first_tile);
  if (Loader::kIsWhole) loader.load(x, input_tile_of(tile, shape));
  wait_for_copies<0>();
  __syncthreads();  // the filters have arrived
  stage_filters(shared, reinterpret_cast<const ELEMENT*>(input_tile), count);
  __syncthreads();  // the filters are laid out, and no longer needed where the input tile goes

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int slot = CHANNELS_LAST ? lane / 16 * 8 + lane % 8 : lane % 16;
  const int filter_half = CHANNELS_LAST ? lane / 8 % 2 : lane / 16;
  const unsigned filters = base + 2 * slot * kFilterPitch + 16 * filter_half;
#pragma unroll 1
  for (int number = first_tile; number < shape.tiles; number += shape.tile_step) {
    go_to(tile, shape, number);
    if (Loader::kIsWhole)
      loader.store(input_tile);
    else
      loader.copy(input_tile, x, input_tile_of(tile, shape));
    __syncthreads();  // the input tile is in place
    const OutputTile stored = tile;
    if (Loader::kIsWhole && number + shape.tile_step < shape.tiles) {
      go_to(tile, shape, number + shape.tile_step);
      loader.load(x, input_tile_of(tile, shape));
    }
#pragma unroll 1
    for (int block = warp * kBlocks; block < kWindowBlocks; block += WARPS * kBlocks) {
      Accumulators acc = {};
      multiply(acc, filters, base + kFilterBytes, 16 * block);
#ifdef EPILOGUE
      if (CHANNELS_LAST)
        finish_channels_last(acc, shape, stored, 16 * block, epilogue);
      else
        finish_channels_first(acc, shape, stored, 16 * block, epilogue);
#endif
      if (CHANNELS_LAST)
        store_channels_last(y, shape, stored, acc, 16 * block);
      else
        store_channels_first(y, shape, stored, acc, 16 * block);
    }
    __syncthreads();  // every warp has read the input tile before the next overwrites it
  }
}
