// y[n,k,i,j] = sum_{c,r,s} x[n, c, i*STRIDE_Y - pad_top + r*DILATION_Y, j*STRIDE_X - pad_left + s] * w[k,c,r,s] for
// CHANNELS <= 4 channels, on Hopper's tensor cores (wgmma) with float32 accumulators.
//
// M is filters, FILTER_BLOCKS blocks of 64, laid out once with zeros around the taps and once more for each output of a
// window (few_channels/window_rows.cuh), in registers if FILTERS_IN_REGISTERS. N is COLUMNS windows of a row of y, read
// from staged rows of x as they lie (implicit im2col). A step is STEP_ROWS rows of y, one a warpgroup and block of
// filters. Rows of x arrive in chunks, as many as a step moves on, through registers into a ring: those of the step
// after next are loaded, and those of the next one written, while wgmma is under way. Results go through shared memory
// to words of 16 bytes in the tensor's order, and on at once, or, if DEFERRED_STORE, while the next wgmma is under way.
// Grid: persistent; a block keeps its filters and goes through every `tile_step`-th tile of images.
#include "common/divisor.cuh"
#include "few_channels/filters.cuh"
#include "few_channels/window_rows.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS) || !defined(FILTER_Y) || !defined(FILTER_X)
#error "define ELEMENT, CHANNELS, FILTER_Y and FILTER_X"
#endif
#if !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(DILATION_Y) || !defined(COLUMNS) || !defined(STEP_ROWS)
#error "define STRIDE_Y, STRIDE_X, DILATION_Y, COLUMNS and STEP_ROWS"
#endif
#if !defined(FILTER_BLOCKS) || !defined(FILTERS_IN_REGISTERS) || !defined(CHANNELS_LAST) || !defined(OFFSET) || \
    !defined(IN_VECTOR)
#error "define FILTER_BLOCKS, FILTERS_IN_REGISTERS, CHANNELS_LAST, OFFSET and IN_VECTOR"
#endif
#if !defined(DEFERRED_STORE) || !defined(OUT_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define DEFERRED_STORE, OUT_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif
#ifndef SHAPE_FIELDS
#error "define SHAPE_FIELDS, as STRIPS_SHAPE of solvers/few_channels/shapes.py declares them"
#endif
#define WGMMA_N COLUMNS
#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#ifdef EPILOGUE
#include "common/copy_bytes.cuh"
#include "common/epilogue.cuh"
#include "common/statistics.cuh"
#endif

// An image has `image_tiles` tiles of COLUMNS windows by a strip of `strip_rows` rows, of which the first
// `longer_strips` have one more; `row_tiles` are of one strip.
struct Shape {
  SHAPE_FIELDS
};

using Row = Windows<FILTER_X, STRIDE_X>;
constexpr int kColumns = COLUMNS, kOutputs = Row::kOutputs, kTileW = kColumns * kOutputs;
constexpr int kWarpgroups = STEP_ROWS * FILTER_BLOCKS, kThreads = 128 * kWarpgroups;
constexpr int kBlockFilters = 64 / kOutputs, kTileK = FILTER_BLOCKS * kBlockFilters;

// Rows of x: of a chunk, that an output meets, and whole chunks that a step meets before its own. The last row that a
// step meets is the last of its chunk. The ring has a chunk more, for the next step.
constexpr int kChunkRows = STEP_ROWS * STRIDE_Y, kMet = (FILTER_Y - 1) * DILATION_Y + 1;
constexpr int kEarlierChunks = maximum(0, ceil_div(kMet - STRIDE_Y, kChunkRows));
constexpr int kChunks = kEarlierChunks + 2, kRingRows = kChunks * kChunkRows;
// From the first row of the earliest chunk to the first row that the step's first output meets.
constexpr int kBefore = kEarlierChunks * kChunkRows - (kMet - STRIDE_Y);
using Chunk = WindowRows<Row, CHANNELS, kChunkRows, kColumns, OFFSET, IN_VECTOR, CHANNELS_LAST>;
using Loader = InputTileLoader<Chunk, kThreads, ELEMENT, true>;
constexpr int kLoaderWords = Loader::kLoads * CHANNELS * maximum(1, IN_VECTOR / 2);
constexpr int kAtOnce = kLoaderWords * (kEarlierChunks + 1) <= 48 ? kEarlierChunks + 1 : maximum(1, 48 / kLoaderWords);

// Filters: words of 8 elements, [word][64 rows] of a block of filters. Words lie an odd number of 16 bytes apart, so
// that a filter's are written to different banks.
constexpr int kRowWords = 2 * Row::kKSteps, kKSteps = FILTER_Y * Row::kKSteps;
constexpr int kWordBytes = 16 * 64 + 16, kBlockBytes = 2 * kKSteps * kWordBytes;
constexpr int kFilterBytes = FILTER_BLOCKS * kBlockBytes, kTaps = CHANNELS * FILTER_Y * FILTER_X;
// Results of a warpgroup: pixels of kBlockFilters elements if CHANNELS_LAST, else filters of kTileW; places are apart
// so that 8 that are written together meet every bank once.
constexpr int kPixelWords = 8 / kOutputs, kPixelBytes = 16 * (kPixelWords + 1);
constexpr int kHalfBytes = kOutputs == 1 ? 16 : kColumns * kPixelBytes + 64;
constexpr int kFilterRowWords = kTileW / 8,
              kFilterRowBytes = 16 * (kOutputs == 1 ? kFilterRowWords | 1 : kFilterRowWords + 2);
constexpr int kResultBytes = CHANNELS_LAST ? (kOutputs == 1 ? 0 : kHalfBytes) + kColumns * kPixelBytes  //
                                           : kBlockFilters * kFilterRowBytes;
constexpr int kResultsAt = kFilterBytes + kRingRows * Chunk::kRowBytes;
constexpr int kRawBytes = round_up(2 * kTileK * kTaps, 16);
static_assert(SHARED_BYTES == kResultsAt + maximum(kWarpgroups * kResultBytes, kRawBytes),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");
static_assert(kResultBytes % 16 == 0, "results of a warpgroup are whole 16-byte words");

constexpr int power_of_two(int least) {
  return least <= 1 ? 1 : 2 * power_of_two((least + 1) / 2);
}
// What a thread stores at once, and threads that store a line (a pixel, or a filter's row) together; some have nothing
// to store where a line is no power of two.
template <int kCount>
struct UnitOf;
template <>
struct UnitOf<8> {
  using Type = uint4;
};
template <>
struct UnitOf<4> {
  using Type = uint2;
};
template <>
struct UnitOf<2> {
  using Type = unsigned;
};
template <>
struct UnitOf<1> {
  using Type = unsigned short;
};
using Unit = UnitOf<OUT_VECTOR>::Type;
constexpr int kLines = CHANNELS_LAST ? kTileW : kBlockFilters;
constexpr int kLineUnits = (CHANNELS_LAST ? kBlockFilters : kTileW) / OUT_VECTOR;
constexpr int kPowerUnits = power_of_two(kLineUnits), kSlots = kPowerUnits < 128 ? kPowerUnits : 128;
constexpr int kSlotUnits = ceil_div(kLineUnits, kSlots), kRoundLines = 128 / kSlots,
              kRounds = ceil_div(kLines, kRoundLines);

// Lays out the filters for the products, zeros beyond the `count` of them. Row 16 * w + r of a block is filter 16 * w +
// r, or, of two outputs, filter 8 * w + r % 8 for output r / 8. A thread takes a row of taps; neighbours take those of
// the next filter, or, where filters lie so that they would read from few banks, the next row.
__device__ __forceinline__ void stage_filters(unsigned char* to, const ELEMENT* raw, int count) {
  constexpr bool kRowsFirst = kTaps % 8 == 0;
  constexpr int kTogether = kRowWords <= 8 ? kRowWords : 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileK * FILTER_Y; i += kThreads) {
    const int k = kRowsFirst ? i / FILTER_Y : i % kTileK, r = kRowsFirst ? i % FILTER_Y : i / kTileK;
    const int filter = k % kBlockFilters, row = kOutputs == 1 ? filter : filter / 8 * 16 + filter % 8;
    unsigned char* const line = to + k / kBlockFilters * kBlockBytes + r * kRowWords * kWordBytes + row * 16;
    const ELEMENT* const taps =
        raw + (CHANNELS_LAST ? (k * FILTER_Y + r) * FILTER_X * CHANNELS : (k * CHANNELS * FILTER_Y + r) * FILTER_X);
#pragma unroll
    for (int output = 0; output < kOutputs; ++output)
#pragma unroll 1
      for (int first = 0; first < kRowWords; first += kTogether) {
        unsigned pairs[kTogether][4];
#pragma unroll
        for (int word = 0; word < kTogether; ++word)
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int s = 2 * (first + word) - output * STRIDE_X + e / 4, c = e % 4;
            const bool inside = c < CHANNELS && s >= 0 && s < FILTER_X;
            const int at = CHANNELS_LAST ? s * CHANNELS + c : c * FILTER_Y * FILTER_X + s;
            const unsigned tap = inside && k < count ? *reinterpret_cast<const unsigned short*>(taps + at) : 0;
            pairs[word][e / 2] = e % 2 ? pairs[word][e / 2] | tap << 16 : tap;
          }
#pragma unroll
        for (int word = 0; word < kTogether; ++word)
          *reinterpret_cast<uint4*>(line + (first + word) * kWordBytes + output * 128) =
              make_uint4(pairs[word][0], pairs[word][1], pairs[word][2], pairs[word][3]);
      }
  }
}

using FilterFragments = unsigned[FILTERS_IN_REGISTERS ? kKSteps : 1][4];

// This thread's fragments of all steps of a block of filters.
__device__ __forceinline__ void load_fragments(FilterFragments& fragments, const unsigned char* block) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int step = 0; step < kKSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragments[FILTERS_IN_REGISTERS ? step : 0][i] = *reinterpret_cast<const unsigned*>(
          block + (2 * step + i / 2) * kWordBytes + (row + i % 2 * 8) * 16 + lane % 4 * 4);
}

// Begins the products of a row of windows, whose first row of x is number `first` of the ring, perhaps once around it.
__device__ __forceinline__ void issue_wgmma(Accumulators& acc, const FilterFragments& fragments, unsigned filters,
                                            unsigned ring, int first) {
  wgmma_fence();
#pragma unroll
  for (int r = 0; r < FILTER_Y; ++r) {
    const int row = first + r * DILATION_Y;
    const unsigned long long windows =
        descriptor_at(matrix_descriptor(Chunk::kNextWordBytes, Chunk::kEightWindowsBytes, 0),
                      ring + (row < kRingRows ? row : row - kRingRows) * Chunk::kRowBytes);
#pragma unroll
    for (int i = 0; i < Row::kKSteps; ++i) {
      const int step = r * Row::kKSteps + i;
      if constexpr (FILTERS_IN_REGISTERS)
        Wgmma<ELEMENT>::rs(acc, fragments[step], windows + Chunk::step_bytes(i) / 16, step > 0);
      else
        Wgmma<ELEMENT>::ss(acc, descriptor_at(matrix_descriptor(kWordBytes, 128, 0), filters + 2 * step * kWordBytes),
                           windows + Chunk::step_bytes(i) / 16, step > 0);
    }
  }
  wgmma_commit_group();
}

__device__ __forceinline__ unsigned packed(float first, float second) {
  Vector<ELEMENT, 2> pair;
  pair.at[0] = convert<ELEMENT>(first);
  pair.at[1] = convert<ELEMENT>(second);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// The accumulators of a warpgroup as elements at `results` in shared memory, rows of filters or of pixels as the tensor
// has them.
__device__ __forceinline__ void stage_results(unsigned char* results, const Accumulators& acc) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, half = lane / 8 % 2;
  const unsigned to = shared_address(results);
  if constexpr (!CHANNELS_LAST && kOutputs == 2) {
    unsigned char* const at = results + (8 * warp + lane / 4) * kFilterRowBytes + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      Vector<unsigned, 2> four;
      four.at[0] = packed(acc[4 * j], acc[4 * j + 2]);
      four.at[1] = packed(acc[4 * j + 1], acc[4 * j + 3]);
      *reinterpret_cast<Vector<unsigned, 2>*>(at + 32 * j) = four;
    }
  } else {
    const unsigned from = CHANNELS_LAST ? to + half * kHalfBytes + (lane / 16 * 8 + lane % 8) * kPixelBytes +
                                              warp * (kOutputs == 1 ? 32 : 16)
                                        : to + (16 * warp + lane % 16) * kFilterRowBytes + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      const unsigned a = packed(acc[4 * j], acc[4 * j + 1]), b = packed(acc[4 * j + 2], acc[4 * j + 3]);
      const unsigned c = packed(acc[4 * j + 4], acc[4 * j + 5]), d = packed(acc[4 * j + 6], acc[4 * j + 7]);
      if constexpr (CHANNELS_LAST)
        stmatrix_trans(from + 8 * j * kPixelBytes, a, b, c, d);
      else
        stmatrix(from + 16 * j, a, b, c, d);
    }
  }
}

// Where results of a warpgroup go: a row of y from a column on, and the first filter.
struct OutputRow {
  int image, row, column, first_k;
};

// Writes what has been laid out, in the tensor's order.
__device__ __forceinline__ void store(ELEMENT* __restrict__ y, const Shape& shape, const OutputRow& to,
                                      const unsigned char* results) {
  const int first = threadIdx.x % 128 / kSlots, element = threadIdx.x % kSlots * OUT_VECTOR;
  const int channels = shape.out_channels, channel_stride = shape.out_height * shape.out_width;
  const int line_step = CHANNELS_LAST ? channels : channel_stride;
  const int columns = shape.out_width - to.column, filters = channels - to.first_k;
  const int lines = min(kLines, CHANNELS_LAST ? columns : filters);
  const int elements = min(kLineUnits * OUT_VECTOR, CHANNELS_LAST ? filters : columns);
  const int pixel = to.row * shape.out_width + to.column;
  y += element + first * line_step +
       (CHANNELS_LAST ? (to.image * channel_stride + pixel) * channels + to.first_k
                      : (to.image * channels + to.first_k) * channel_stride + pixel);
#pragma unroll(kRounds* kSlotUnits <= 8 ? kRounds : 4)
  for (int round = 0; round < kRounds; ++round, y += kRoundLines * line_step) {
    const int line = kRoundLines * round + first;
    if (line >= lines) break;
    const unsigned char* const from =
        results + 2 * element +
        (CHANNELS_LAST ? line % kOutputs * kHalfBytes + line / kOutputs * kPixelBytes : line * kFilterRowBytes);
#pragma unroll
    for (int unit = 0; unit < kSlotUnits; ++unit) {
      const int ahead = unit * kSlots * OUT_VECTOR;
      if (element + ahead < elements)
        *reinterpret_cast<Unit*>(y + ahead) = *reinterpret_cast<const Unit*>(from + 2 * ahead);
    }
  }
}

#ifdef EPILOGUE
// Filters whose results a thread has: of rows lane / 4 and lane / 4 + 8 of its warp's 16, or one for both.
constexpr int kOwnFilters = kOutputs == 1 ? 2 : 1;
using Terms = ChannelTerms[kOwnFilters];

__device__ __forceinline__ void read_terms(Terms& terms, const Epilogue& epilogue, const OutputRow& to, int channels) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < kOwnFilters; ++i) {
    const int k = to.first_k + 8 * kOwnFilters * warp + 8 * i + lane / 4;
    if (k < channels) terms[i] = channel_terms(epilogue, to.image, k, channels);
  }
}

// Starts to copy what of the residual belongs to results to where these are laid out. Complete after
// wait_for_copies<0>() and a barrier.
__device__ __forceinline__ void copy_residual(unsigned char* results, const EpilogueElement* residual,
                                              const Shape& shape, const OutputRow& to) {
  const int first = threadIdx.x % 128 / kSlots, element = threadIdx.x % kSlots * OUT_VECTOR;
  const int channels = shape.out_channels, channel_stride = shape.out_height * shape.out_width;
  const int line_step = CHANNELS_LAST ? channels : channel_stride;
  const int columns = shape.out_width - to.column, filters = channels - to.first_k;
  const int lines = min(kLines, CHANNELS_LAST ? columns : filters);
  const int elements = min(kLineUnits * OUT_VECTOR, CHANNELS_LAST ? filters : columns);
  const int pixel = to.row * shape.out_width + to.column;
  residual += element + first * line_step +
              (CHANNELS_LAST ? (to.image * channel_stride + pixel) * channels + to.first_k
                             : (to.image * channels + to.first_k) * channel_stride + pixel);
#pragma unroll(kRounds* kSlotUnits <= 8 ? kRounds : 4)
  for (int round = 0; round < kRounds; ++round, residual += kRoundLines * line_step) {
    const int line = kRoundLines * round + first;
    if (line >= lines) break;
    unsigned char* const at =
        results + 2 * element +
        (CHANNELS_LAST ? line % kOutputs * kHalfBytes + line / kOutputs * kPixelBytes : line * kFilterRowBytes);
#pragma unroll
    for (int unit = 0; unit < kSlotUnits; ++unit) {
      const int ahead = unit * kSlots * OUT_VECTOR;
      if (element + ahead >= elements) continue;
      if constexpr (OUT_VECTOR > 1)
        copy_bytes<2 * OUT_VECTOR>(shared_address(at + 2 * ahead), residual + ahead, true);
      else
        *reinterpret_cast<Unit*>(at + 2 * ahead) = *reinterpret_cast<const Unit*>(residual + ahead);
    }
  }
  commit_copies();
}

// Four 8 x 8 matrices from where stmatrix, or stmatrix_trans, writes them.
__device__ __forceinline__ void load_four(unsigned (&words)[4], unsigned address) {
  if constexpr (CHANNELS_LAST)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// Makes results of a warpgroup's sums; what of the residual belongs to them lies where stage_results writes them.
__device__ __forceinline__ void finish_results(Accumulators& acc, const unsigned char* results, const Terms& terms,
                                               const Epilogue& epilogue) {
  constexpr bool kHasRuns = !CHANNELS_LAST && kOutputs == 2;  // a thread has runs of four outputs
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, half = lane / 8 % 2;
  const unsigned at = shared_address(results);
  const unsigned from = kHasRuns        ? at + (8 * warp + lane / 4) * kFilterRowBytes + lane % 4 * 8
                        : CHANNELS_LAST ? at + half * kHalfBytes + (lane / 16 * 8 + lane % 8) * kPixelBytes +
                                              warp * (kOutputs == 1 ? 32 : 16)
                                        : at + (16 * warp + lane % 16) * kFilterRowBytes + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    unsigned words[4] = {};
    if constexpr (kHasResidual && kHasRuns) {
      unsigned low[2], high[2];
      load_shared(low, from + 32 * j);
      load_shared(high, from + 32 * j + 32);
      words[0] = low[0], words[1] = low[1], words[2] = high[0], words[3] = high[1];
    } else if constexpr (kHasResidual) {
      load_four(words, from + (CHANNELS_LAST ? 8 * j * kPixelBytes : 16 * j));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned word = kHasRuns ? words[i / 4 * 2 + i % 2] : words[i / 2];
      const auto pair = reinterpret_cast<const Vector<ELEMENT, 2>&>(word);
      const ELEMENT residual = pair.at[kHasRuns ? i / 2 % 2 : i % 2];
      acc[4 * j + i] = finish(acc[4 * j + i], terms[i / 2 % kOwnFilters], convert<float>(residual), epilogue);
    }
  }
}

#if EPILOGUE_STATISTICS
// What a lane that `holds_channel` has of its filters: sums of results, and of their squares.
struct FilterSums {
  float sum[kOwnFilters], squares[kOwnFilters];
};

// Adds the results of a row, of its first `inside` outputs.
__device__ __forceinline__ void add_row(FilterSums& sums, const Accumulators& acc, int inside) {
  const int lane = threadIdx.x % 32;
  float products[2][4] = {};
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    unsigned words[4];  // windows 8 j + 2 (lane % 4) and the next of both filters, or outputs, then 8 windows on
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = packed(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
    if (inside < kTileW)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int window = 8 * (j + i / 2) + 2 * (lane % 4), output = kOutputs * window + i % 2 * (kOutputs - 1);
        words[i] &= output >= inside ? 0 : output + kOutputs >= inside ? 0xffff : ~0u;
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) add_pixels<ELEMENT>(products[i], words[i], words[i + 2]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums.sum[i % kOwnFilters] += sum_of(products[i], lane);
    sums.squares[i % kOwnFilters] += squares_of(products[i], lane);
  }
}

// Writes what a block's row of warpgroups has summed up, one of `parts`.
__device__ __forceinline__ void write_sums(const FilterSums& sums, int first_k, int channels, int part, int parts,
                                           float* statistics) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < kOwnFilters; ++i) {
    const int k = first_k + 8 * kOwnFilters * warp + 8 * i + lane / 4;
    if (!holds_channel(lane) || k >= channels) continue;
    statistics[static_cast<int64>(part) * channels + k] = sums.sum[i];
    statistics[static_cast<int64>(parts + part) * channels + k] = sums.squares[i];
  }
}
#endif
#endif

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_forward_wgmma(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ y,
#ifdef EPILOGUE
                               const __grid_constant__ Shape shape, float* statistics,
                               const __grid_constant__ Epilogue epilogue) {
#else
                               const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(128) unsigned char shared[];
  const int first_tile = static_cast<int>(blockIdx.x) / shape.filter_tiles;
  const int first_k = (blockIdx.x - first_tile * shape.filter_tiles.by) * kTileK;
  const int count = min(kTileK, shape.out_channels - first_k);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), row_of_step = warpgroup / FILTER_BLOCKS;
  unsigned char* const raw = shared + kResultsAt;
  unsigned char* const results = raw + warpgroup * kResultBytes;
  unsigned char* const block = shared + warpgroup % FILTER_BLOCKS * kBlockBytes;
  const unsigned ring = shared_address(shared) + kFilterBytes;

  OutputRow to = {0, 0, 0, first_k + warpgroup % FILTER_BLOCKS * kBlockFilters};
  InputTileOrigin origin = {shape.height, shape.width, 0, 0, 0};
  int first, last;  // row of y that begins the strip, and the one that ends it
  const auto load = [&](Loader& loader) {
    loader.load(x, origin);
    origin.row += kChunkRows;
  };
  const auto write = [&](const Loader& loader, int chunk) {
    loader.store(shared + kFilterBytes + chunk * Chunk::kBytes);
  };
  // Stores what this warpgroup has laid out, of the step that began with a row.
  const auto store_step = [&](int row) {
    OutputRow stored = to;
    stored.row = row + row_of_step;
    store(y, shape, stored, results);
  };
  // Goes to a tile: loads what its first step meets, and begins to load what the next one adds.
  Loader loader;
  const auto begin = [&](int tile) {
    to.image = tile / shape.image_tiles;
    tile -= to.image * shape.image_tiles.by;
    const int strip = tile / shape.row_tiles;
    to.row = strip * shape.strip_rows + min(strip, shape.longer_strips);
    to.column = (tile - strip * shape.row_tiles.by) * kTileW;
    first = to.row;
    last = first + shape.strip_rows + (strip < shape.longer_strips);
    origin.image = to.image;
    origin.row = to.row * STRIDE_Y - shape.pad_top - kBefore;
    origin.column = to.column * STRIDE_X - shape.pad_left - OFFSET;
#pragma unroll 1
    for (int chunk = 0; chunk <= kEarlierChunks; chunk += kAtOnce) {
      Loader some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (chunk + i <= kEarlierChunks) load(some[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (chunk + i <= kEarlierChunks) write(some[i], chunk + i);
    }
    fence_proxy_async();  // before the next loads begin: it would wait for them
    if (to.row + STEP_ROWS < last) load(loader);
  };

  load_filters<kThreads>(shared_address(raw), w + first_k * kTaps, count * kTaps);
  begin(first_tile);
  wait_for_copies<0>();
  __syncthreads();  // the filters have arrived
  stage_filters(shared, reinterpret_cast<const ELEMENT*>(raw), count);
  fence_proxy_async();
  __syncthreads();  // the filters are laid out, and no longer needed where results go
  FilterFragments fragments;
  if constexpr (FILTERS_IN_REGISTERS) load_fragments(fragments, block);
#ifdef EPILOGUE
  Terms terms = {};
  read_terms(terms, epilogue, to, shape.out_channels);
#if EPILOGUE_STATISTICS
  FilterSums sums = {};
  griddepcontrol_launch_dependents();  // the last step, which waits
#endif
#endif

#pragma unroll 1
  for (int tile = first_tile; tile < shape.tiles;) {
    int chunk = 0;  // the earliest that the step meets
#pragma unroll 1
    for (; to.row < last; to.row += STEP_ROWS) {
      // The step's chunks are in place; results of the last step are laid out or, unless DEFERRED_STORE, stored.
      __syncthreads();
      Accumulators acc;  // beyond the strip's last row they are computed, too, but not stored
      issue_wgmma(acc, fragments, shared_address(block), ring, chunk * kChunkRows + kBefore + row_of_step * STRIDE_Y);
      if (to.row + STEP_ROWS < last) {
        write(loader, chunk == 0 ? kChunks - 1 : chunk - 1);
        fence_proxy_async();
      }
      if (to.row + 2 * STEP_ROWS < last) load(loader);
      if (DEFERRED_STORE && to.row > first) store_step(to.row - STEP_ROWS);
#ifdef EPILOGUE
      if constexpr (kHasResidual) {
        if constexpr (DEFERRED_STORE) warpgroup_sync(1 + warpgroup);  // results of the last step have been read
        OutputRow next = to;
        next.row += row_of_step;
        if (next.row < last) copy_residual(results, epilogue.residual, shape, next);
      }
#endif
      wgmma_wait_group<0>();
#ifdef EPILOGUE
      if constexpr (kHasResidual) {
        wait_for_copies<0>();
        warpgroup_sync(1 + warpgroup);  // the residual has arrived
      }
#endif
      if constexpr (DEFERRED_STORE) warpgroup_sync(1 + warpgroup);  // results of the last step have been read
      if (to.row + row_of_step < last) {
#ifdef EPILOGUE
        finish_results(acc, results, terms, epilogue);
#if EPILOGUE_STATISTICS
        add_row(sums, acc, shape.out_width - to.column);
#endif
#endif
        stage_results(results, acc);
        if constexpr (!DEFERRED_STORE) {
          warpgroup_sync(1 + warpgroup);  // results are laid out
          store_step(to.row);
        }
      }
      chunk = chunk + 1 < kChunks ? chunk + 1 : 0;
    }
    tile += shape.tile_step;
    if (!DEFERRED_STORE && tile >= shape.tiles) break;
    __syncthreads();  // all products have read the ring; if DEFERRED_STORE, results of the last step are laid out
    if (DEFERRED_STORE && to.row - STEP_ROWS + row_of_step < last) store_step(to.row - STEP_ROWS);
    if (DEFERRED_STORE && tile >= shape.tiles) break;
    begin(tile);
#ifdef EPILOGUE
    if constexpr (kHasChannelBias) read_terms(terms, epilogue, to, shape.out_channels);
#endif
  }
#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
  write_sums(sums, to.first_k, shape.out_channels, first_tile * STEP_ROWS + row_of_step, shape.tile_step * STEP_ROWS,
             statistics);
#endif
#endif
}

#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
extern "C" __global__ void __launch_bounds__(1024)
    few_channels_forward_wgmma_statistics(const float* partials, float* sum, float* sum_of_squares, int channels,
                                          int parts) {
  finish_statistics(partials, sum, sum_of_squares, channels, parts);
}
#endif
#endif
