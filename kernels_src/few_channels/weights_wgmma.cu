// dw[k,c,r,s] = sum_{n,i,j} dy[n,k,i,j] * x[n, c, i*STRIDE_Y - pad_top + r, j*STRIDE_X - pad_left + s] for CHANNELS <=
// 4 channels, on Hopper's tensor cores (wgmma, compute capability 9.0) with float32 accumulators.
//
// A block stages tiles of TILE_H x TILE_W outputs: TILE_K filters of dy, and the input tile of x with its halo as
// 16-byte words of two neighbouring pixels of four channels: of every second pixel, or of every pixel if STRIDE_X is
// odd. What eight neighbouring outputs meet of a pair of taps is then eight words side by side, a core matrix as it
// lies. M is 64 filters, N a pair of taps of all (or of up to eight) rows of the filter, K 16 outputs. WARPGROUPS_K
// warpgroups share the filters and WARPGROUPS_S the pairs of taps. PRODUCERS more load, a tile each by turns,
// through registers: what is on its way is in registers, and a tile is in shared memory when it is complete. Grid:
// blocks of filters, times `tile_step` blocks that tiles are dealt to (split-K). Each writes float32 partials, which
// few_channels_weights_wgmma_finish adds in a fixed order.
#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K)
#error "define STRIDE_Y, STRIDE_X, TILE_H, TILE_W and TILE_K"
#endif
#if !defined(WARPGROUPS_K) || !defined(WARPGROUPS_S) || !defined(CHANNELS_LAST) || !defined(OFFSET) || \
    !defined(COLUMN_BLOCKS)
#error "define WARPGROUPS_K, WARPGROUPS_S, CHANNELS_LAST, OFFSET and COLUMN_BLOCKS"
#endif
#if !defined(PRODUCERS) || !defined(IN_VECTOR) || !defined(OUT_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define PRODUCERS, IN_VECTOR, OUT_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif

#include "common/split_k.cuh"
#include "common/hopper.cuh"
#include "few_channels/output_tiles.cuh"

// The width of a product, by its blocks of 8 columns.
#if COLUMN_BLOCKS < 1 || COLUMN_BLOCKS > 8
#error "COLUMN_BLOCKS is 1 to 8"
#elif COLUMN_BLOCKS == 1
#define WGMMA_N 8
#elif COLUMN_BLOCKS == 2
#define WGMMA_N 16
#elif COLUMN_BLOCKS == 3
#define WGMMA_N 24
#elif COLUMN_BLOCKS == 4
#define WGMMA_N 32
#elif COLUMN_BLOCKS == 5
#define WGMMA_N 40
#elif COLUMN_BLOCKS == 6
#define WGMMA_N 48
#elif COLUMN_BLOCKS == 7
#define WGMMA_N 56
#elif COLUMN_BLOCKS == 8
#define WGMMA_N 64
#endif
#include "common/wgmma.cuh"

// The first PRODUCERS warpgroups load, the others multiply. A warpgroup that did both would have its products
// serialized by ptxas.
constexpr int kConsumerThreads = 128 * WARPGROUPS_K * WARPGROUPS_S, kProducerThreads = 128, kProducers = PRODUCERS;
static_assert(kProducers > 0,
              "PRODUCERS is at least 1: a warpgroup that loads and multiplies would have its wgmma serialized");
constexpr int kThreads = kProducers * kProducerThreads + kConsumerThreads, kTileH = TILE_H, kTileW = TILE_W,
              kTileK = TILE_K;
static_assert(kTileW % 8 == 0, "eight neighbours in a tile are outputs of one row");
static_assert(kTileK % 8 == 0 && ceil_div(kTileK, 64) == WARPGROUPS_K, "a warpgroup has up to 64 filters");

// Filter rows are cut into kRowGroups of COLUMN_BLOCKS, the last with rows that count for none.
constexpr int kTapPairs = ceil_div(FILTER_X, 2), kWarpgroupTapPairs = kTapPairs / WARPGROUPS_S;
constexpr int kRowGroups = ceil_div(FILTER_Y, COLUMN_BLOCKS), kSpareRows = kRowGroups * COLUMN_BLOCKS - FILTER_Y;
static_assert(kTapPairs % WARPGROUPS_S == 0, "WARPGROUPS_S divides the pairs of taps");

// The input tile. Its words hold pixels that are kWordPixels apart; those of outputs that are neighbours are kPhases
// apart, and are side by side in a phase. OFFSET columns are staged before those that the first output meets, so that
// vectors are aligned.
constexpr int kWordPixels = STRIDE_X % 2 == 0 ? 2 : 1, kPhases = STRIDE_X / kWordPixels;
constexpr int kTapPairWords = 2 / kWordPixels;
constexpr int kFirstPixel = kWordPixels == 2 ? OFFSET % 2 : 0, kLead = (kFirstPixel + OFFSET) / kWordPixels;
constexpr int kColumns = round_up(OFFSET + (kTileW - 1) * STRIDE_X + FILTER_X, IN_VECTOR);
using Staged =
    InputTile<CHANNELS, (kTileH - 1) * STRIDE_Y + FILTER_Y, kColumns, kFirstPixel, IN_VECTOR, CHANNELS_LAST, false>;

struct Pixels : Staged {
  static constexpr int kWords = ceil_div(kFirstPixel + kColumns, kWordPixels), kPhaseWords = ceil_div(kWords, kPhases);
  // An odd number, so that the same word of eight rows is in different banks.
  static constexpr int kRowWords = kPhases * kPhaseWords | 1, kRowBytes = 16 * kRowWords, kBytes = kRows * kRowBytes;

  static __device__ __forceinline__ int word_position(int word) {
    return word % kPhases * kPhaseWords + word / kPhases;
  }
};

struct Loader : InputTileLoader<Pixels, kProducerThreads, ELEMENT> {
  // Writes what load() loaded, a pixel into both words that hold it.
  __device__ __forceinline__ void store_words(unsigned char* input_tile, int first) const {
    if constexpr (kWordPixels == 2) {
      store(input_tile, first);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int rank = first + i * kProducerThreads + threadIdx.x;
        if (rank >= Pixels::kVectors) break;
        unsigned char* const row = input_tile + rank / kRowVectors * Pixels::kRowBytes;
        const int column = rank % kRowVectors * kVector;
        const auto word = [&](int at) { return row + 16 * Pixels::word_position(at); };
        if (column > 0) *reinterpret_cast<Pixel*>(word(column - 1) + 8) = pixel_of(i, 0);
#pragma unroll
        for (int j = 0; j < kVector - 1; ++j)
          *reinterpret_cast<PixelPair*>(word(column + j)) = {pixel_of(i, j), pixel_of(i, j + 1)};
        *reinterpret_cast<Pixel*>(word(column + kVector - 1)) = pixel_of(i, kVector - 1);
      }
    }
  }
};
static_assert(Loader::kIsWhole, "registers of a thread hold its row_group of an input tile");

// Outputs in shared memory: blocks of 8 outputs and 8 filters, which lie as in the tensor. Gaps between blocks let
// eight writes meet every bank once.
constexpr int kOctets = kTileH * kTileW / 8, kRowOctets = kTileW / 8, kKSteps = ceil_div(kOctets, 2);
constexpr int kFilterBlocks = kTileK / 8, kBlockGap = CHANNELS_LAST ? 16 * maximum(1, 8 / kFilterBlocks) : 0;
constexpr int kBlockPitch = 128 + kBlockGap, kOctetGap = CHANNELS_LAST ? 0 : 16 * maximum(1, 8 / kRowOctets);
constexpr int kOctetPitch = kFilterBlocks * kBlockPitch + kOctetGap;
constexpr int kOutBytes = 2 * kKSteps * kOctetPitch, kStages = 3, kInputTileAt = kStages * kOutBytes;
// Products read rows of filters and columns of taps that there are not, of which nothing is kept.
constexpr int kSpare = maximum((8 * WARPGROUPS_K - kFilterBlocks) * kBlockPitch, kSpareRows* Pixels::kRowBytes);
static_assert(SHARED_BYTES == kInputTileAt + kStages * Pixels::kBytes + kSpare,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// A thread's accumulators, in fours as it writes them.
constexpr int kFragments = 128 * WARPGROUPS_K * kTapPairs * FILTER_Y;
using TileAccumulators = float[kWarpgroupTapPairs][kRowGroups][4 * COLUMN_BLOCKS];
using Four = Vector<float, 4>;

// Moves a tile's outputs through registers, zeros where there are none. A thread moves the same positions of every row.
struct OutLoader {
  static constexpr int kVectors = (CHANNELS_LAST ? kTileK : kTileW) / OUT_VECTOR;
  static constexpr int kPositions = kVectors * (CHANNELS_LAST ? kTileW : kTileK),
                       kLoads = ceil_div(kPositions, kProducerThreads);
  static constexpr int kWords = OUT_VECTOR > 1 ? OUT_VECTOR / 2 : 1;
  using Few = Vector<unsigned, kWords>;

  Few values[kLoads][kTileH];

  // Filter and column of a position.
  static __device__ __forceinline__ int filter_of(int position) {
    return CHANNELS_LAST ? position % kVectors * OUT_VECTOR : position / kVectors;
  }
  static __device__ __forceinline__ int column_of(int position) {
    return CHANNELS_LAST ? position / kVectors : position % kVectors * OUT_VECTOR;
  }

  // Starts to load.
  __device__ __forceinline__ void load(const ELEMENT* __restrict__ dy, const Shape& shape, const OutputTile& tile,
                                       int thread) {
    const int rows = shape.out_height - tile.row, columns = shape.out_width - tile.column;
    const int channels = shape.out_channels, filters = channels - tile.first_k;
    const int pixel = tile.row * shape.out_width + tile.column, channel_stride = shape.out_height * shape.out_width;
    const ELEMENT* const first = dy + (CHANNELS_LAST ? (tile.image * channel_stride + pixel) * channels + tile.first_k
                                                     : (tile.image * channels + tile.first_k) * channel_stride + pixel);
    const int row_stride = CHANNELS_LAST ? shape.out_width * channels : shape.out_width;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int position = thread + i * kProducerThreads, k = filter_of(position), column = column_of(position);
      const bool inside = position < kPositions && column < columns && k < filters;
      const ELEMENT* const source = first + (CHANNELS_LAST ? column * channels + k : k * channel_stride + column);
#pragma unroll
      for (int row = 0; row < kTileH; ++row) {
        Few loaded = {};
        if (inside && row < rows) {
          if constexpr (OUT_VECTOR == 1)
            loaded.at[0] = *reinterpret_cast<const unsigned short*>(source + row * row_stride);
          else
            loaded = *reinterpret_cast<const Few*>(source + row * row_stride);
        }
        values[i][row] = loaded;
      }
    }
  }

  // Writes what load() loaded.
  __device__ __forceinline__ void store(unsigned char* to, int thread) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int position = thread + i * kProducerThreads, k = filter_of(position), column = column_of(position);
      if (position >= kPositions) break;
      unsigned char* const at = to + k / 8 * kBlockPitch + column / 8 * kOctetPitch +
                                (CHANNELS_LAST ? column % 8 * 16 + k % 8 * 2 : k % 8 * 16 + column % 8 * 2);
#pragma unroll
      for (int row = 0; row < kTileH; ++row) {
        unsigned char* const here = at + row * kRowOctets * kOctetPitch;
        if constexpr (OUT_VECTOR == 1)
          *reinterpret_cast<unsigned short*>(here) = static_cast<unsigned short>(values[i][row].at[0]);
        else
          *reinterpret_cast<Few*>(here) = values[i][row];
      }
    }
  }
};

// Clears what is staged beyond a tile's last output, once: tiles that are loaded leave it as it is.
__device__ __forceinline__ void clear_rest(unsigned char* to) {
  if constexpr (kOctets % 2 != 0)
    for (int i = threadIdx.x; i < kStages * kOctetPitch / 16; i += kProducers * kProducerThreads) {
      unsigned char* const octet = to + i / (kOctetPitch / 16) * kOutBytes + kOctets * kOctetPitch;
      *reinterpret_cast<Four*>(octet + i % (kOctetPitch / 16) * 16) = {};
    }
}

// Bytes from the input tile's start to what an octet of outputs meets of the first row and pair of taps.
__device__ __forceinline__ constexpr int octet_offset(int octet) {
  return octet / kRowOctets * STRIDE_Y * Pixels::kRowBytes + octet % kRowOctets * 128;
}

// Begins a staged tile's products. Of the last 8 terms there may be none: they are zeros times what is there.
__device__ __forceinline__ void issue_wgmma(TileAccumulators& acc, unsigned outputs, unsigned input_tile,
                                            int first_tap_pair) {
  const unsigned long long filters = descriptor_at(matrix_descriptor(kOctetPitch, kBlockPitch, 0), outputs);
  unsigned tap_pairs[kWarpgroupTapPairs];
#pragma unroll
  for (int c = 0; c < kWarpgroupTapPairs; ++c)
    tap_pairs[c] = input_tile + 16 * Pixels::word_position(kLead + (first_tap_pair + c) * kTapPairWords);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKSteps; ++step) {
    const int at = octet_offset(2 * step), next = 2 * step + 1 < kOctets ? octet_offset(2 * step + 1) : at;
    const unsigned long long form = matrix_descriptor(next - at, Pixels::kRowBytes, 0);
#pragma unroll
    for (int row_group = 0; row_group < kRowGroups; ++row_group)
#pragma unroll
      for (int c = 0; c < kWarpgroupTapPairs; ++c)
        Wgmma<ELEMENT>::ss<CHANNELS_LAST ? Major::MN : Major::K, Major::MN>(
            acc[c][row_group], filters + (2 * step * kOctetPitch >> 4),
            descriptor_at(form, tap_pairs[c] + at + row_group * COLUMN_BLOCKS * Pixels::kRowBytes));
  }
  wgmma_commit_group();
}

// Where the accumulators of a fragment belong: acc[e] is of filter k + e / 2 * 8, in its block, and of channel c + e
// % 2.
struct Fragment {
  int k, c, r, s;

  __device__ __forceinline__ explicit Fragment(int number) {
    const int lane = number % 32, row = number / 128;
    k = row / (FILTER_Y * kTapPairs) * 64 + number % 128 / 32 * 16 + lane / 4;
    c = lane % 2 * 2;
    r = row % FILTER_Y;
    s = row / FILTER_Y % kTapPairs * 2 + lane % 4 / 2;
  }

  __device__ __forceinline__ bool any(int filters) const { return k < filters && c < CHANNELS && s < FILTER_X; }
};

// Writes the accumulators of a thread, whose first pair of taps, counted through its blocks of 64 filters, is number
// `first`.
__device__ __forceinline__ void store_partials(Four* __restrict__ partials, const TileAccumulators& acc, int first,
                                               int filters) {
#pragma unroll
  for (int c = 0; c < kWarpgroupTapPairs; ++c)
#pragma unroll
    for (int r = 0; r < FILTER_Y; ++r) {
      const int number = ((first + c) * FILTER_Y + r) * 128 + threadIdx.x % 128;
      if (!Fragment(number).any(filters)) continue;
      const float* const four = acc[c][r / COLUMN_BLOCKS] + r % COLUMN_BLOCKS * 4;
      partials[number] = {four[0], four[1], four[2], four[3]};
    }
}

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_weights_wgmma(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ dy,
                               float* __restrict__ partials, const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int split = static_cast<int>(blockIdx.x) / shape.filter_tiles;
  const int first_k = (blockIdx.x - split * shape.filter_tiles.by) * kTileK;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), consumer = warpgroup - kProducers;
  const int first_tap_pair = consumer % WARPGROUPS_S * kWarpgroupTapPairs, warpgroup_k = consumer / WARPGROUPS_S;
  griddepcontrol_launch_dependents();

  const auto work = [&](auto is_producer) {
    constexpr bool kIsProducer = decltype(is_producer)::value;
    OutputTile tile = {0, first_k, 0, 0};
    Loader pixels;
    OutLoader outputs;
    // Of a producer: starts to load a tile, and puts it in place.
    const int producer = warpgroup, thread = threadIdx.x - kProducerThreads * producer;
    const auto load = [&](int number) {
      if (number >= shape.tiles) return;
      go_to(tile, shape, number);
      pixels.load(x, input_tile_of(tile, shape), -kProducerThreads * producer);
      outputs.load(dy, shape, tile, thread);
    };
    const auto store = [&](int number, int stage) {
      if (number >= shape.tiles) return;
      pixels.store_words(shared + kInputTileAt + stage * Pixels::kBytes, -kProducerThreads * producer);
      outputs.store(shared + stage * kOutBytes, thread);
      fence_proxy_async();  // waits for loads, too: none of this thread may be on its way for a later tile
    };
    if constexpr (kIsProducer) {
      clear_rest(shared);
      fence_proxy_async();
      load(split + producer * shape.tile_step);
      if (producer == 0) store(split, 0);
      if (kProducers == 1) load(split + shape.tile_step);
    }
    TileAccumulators acc = {};
    int stage = 0, round = 0;  // of the tile: its number modulo kStages and kProducers
#pragma unroll 1
    for (int number = split; number < shape.tiles; number += shape.tile_step) {
      // The tile is in place, and products have read the one that is overwritten next: all but the last.
      block_sync();
      if constexpr (!kIsProducer)
        issue_wgmma(acc, shared_address(shared) + stage * kOutBytes + warpgroup_k * 8 * kBlockPitch,
                    shared_address(shared) + kInputTileAt + stage * Pixels::kBytes, first_tap_pair);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if constexpr (kIsProducer) {
        // The producer that put this tile in place goes on to load, and another puts the next in place.
        const int next = round + 1 == kProducers ? 0 : round + 1;
        if (producer == next) store(number + shape.tile_step, stage);
        if (producer == round) load(number + maximum(2, kProducers) * shape.tile_step);
        round = next;
      }
      if constexpr (!kIsProducer) wgmma_wait_group<1>();
    }
    if constexpr (!kIsProducer) {
      wgmma_wait_group<0>();
      store_partials(reinterpret_cast<Four*>(partials) + static_cast<int64>(blockIdx.x) * kFragments, acc,
                     warpgroup_k * kTapPairs + first_tap_pair, min(kTileK, shape.out_channels - first_k));
    }
  };
  if (warpgroup < kProducers)
    work(Flag<true>{});
  else
    work(Flag<false>{});
}

// dw[i] = sum of partials[split][i] over the splits. A block has 32 fragments; each of its warps sums every 32nd split.
constexpr int kSplitLanes = 32;

extern "C" __global__ void __launch_bounds__(32 * kSplitLanes)
    few_channels_weights_wgmma_finish(const float* partials, ELEMENT* dw, int out_channels, int filter_tiles,
                                      int splits) {
  __shared__ Four acc[kSplitLanes][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = filter_tiles * kFragments;
  const int at = blockIdx.x * 32 + lane, filter_tile = at / kFragments;
  const Fragment fragment(at % kFragments);
  const int filters = min(kTileK, out_channels - filter_tile * kTileK);
  griddepcontrol_wait();
  acc[warp][lane] = sum_splits<4, 8, int64>(reinterpret_cast<const Four*>(partials), at, all,
                                            {warp, splits, kSplitLanes}, fragment.any(filters));
  __syncthreads();  // every warp's sums are there
  if (warp >= 4) return;
  float total = 0;
#pragma unroll
  for (int split_lane = 0; split_lane < kSplitLanes; ++split_lane) total += acc[split_lane][lane].at[warp];
  const int in_tile = fragment.k + warp / 2 * 8, c = fragment.c + warp % 2;
  if (!fragment.any(filters) || in_tile >= filters || c >= CHANNELS) return;
  const int64 first = static_cast<int64>(filter_tile * kTileK + in_tile) * CHANNELS;
  const int r = fragment.r, s = fragment.s;
  dw[CHANNELS_LAST ? ((first / CHANNELS * FILTER_Y + r) * FILTER_X + s) * CHANNELS + c
                   : ((first + c) * FILTER_Y + r) * FILTER_X + s] = convert<ELEMENT>(total);
}
