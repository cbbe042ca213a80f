// Depthwise convolution, channels last, forward and backward data:
//   y[n,oh,ow,c] = sum_{i,j} x[n, oh*stride - pad + i*dilation, ow*stride - pad + j*dilation, c] * w[c,i,j],
//   dx[n,h,v,c] = sum_{i,j} dy[n, (h + pad - i*dilation) / stride, likewise, c] * w[c,i,j], where whole.
// Implicit GEMM on tensor cores. A product has K = 16 for two taps: 8 pairs of neighbouring pixels of a row, times 8 x
// 8 diagonal matrices of the taps of 8 channels. A block stages the pixels that CHANNELS channels of TILE_ROWS rows and
// 2 * PAIRS columns of IMAGES images meet. A warp keeps the filters of WARP_CHANNELS channels, 8 or 16, in registers.
// It goes down the rows of 8 pairs at a time; a row's pixels serve all taps of the rows that meet them. Backward data
// has stride_w phases, columns modulo the stride, one after the other.
//
// Defines: as checked below; ALL_CHANNELS, IN_H, IN_W, OUT_H, OUT_W of the tensors that are read and written.
#include "depthwise/depthwise_mma.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#endif

#if !defined(ELEMENT) || !defined(FLIPPED) || !defined(FILTER_Y) || !defined(FILTER_X) || !defined(STRIDE_H) || \
    !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W) || !defined(PAD_H) || !defined(PAD_W)
#error "define ELEMENT, FLIPPED (backward data), FILTER_Y and _X, STRIDE_H and _W, DILATION_H and _W, PAD_H and _W"
#endif
#if !defined(TILE_ROWS) || !defined(PAIRS) || !defined(IMAGES) || !defined(CHANNELS) || !defined(WARP_CHANNELS) || \
    !defined(ROW_TILES) || !defined(COLUMN_TILES)
#error "define TILE_ROWS, PAIRS, IMAGES, CHANNELS, WARP_CHANNELS, ROW_TILES and COLUMN_TILES"
#endif
#if !defined(ALL_CHANNELS) || !defined(IN_H) || !defined(IN_W) || !defined(OUT_H) || !defined(OUT_W) || \
    !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define ALL_CHANNELS, IN_H, IN_W, OUT_H, OUT_W, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
using AxisH = UnitAxis<FLIPPED, STRIDE_H, DILATION_H, PAD_H, kFilterY>;
using AxisW = UnitAxis<FLIPPED, STRIDE_W, DILATION_W, PAD_W, kFilterX>;

constexpr int kTileRows = TILE_ROWS, kPairs = PAIRS, kImages = IMAGES, kChannels = CHANNELS,
              kAllChannels = ALL_CHANNELS;
constexpr int kLanes = kImages * kPairs;
constexpr int kWarpChannels = WARP_CHANNELS, kHalves = kWarpChannels / 8;
constexpr int kWarps = kChannels / kWarpChannels, kThreads = 32 * kWarps;
static_assert(kWarpChannels == 8 || kWarpChannels == 16,
              "WARP_CHANNELS must be 8 or 16: four lanes hold the results of a pair");
static_assert(kChannels % 16 == 0 && kAllChannels % 8 == 0, "CHANNELS must be a multiple of 16 and ALL_CHANNELS of 8");

// With few taps, neither a barrier before the pixels arrive pays, to build the filters' matrices, nor loading pixels
// twice to save moves between registers.
constexpr bool kFewTaps = kTaps <= 9;

// Input rows that a walk meets. Those of a sole walk that do not exist are not staged.
constexpr int kWalked = (kTileRows - 1) * AxisH::kStep + AxisH::kReach + 1;
constexpr int kWalks = ROW_TILES, kWalkStep = kTileRows * AxisH::kStep;
constexpr int kTop = kWalks == 1 ? maximum(0, -AxisH::kFirst) : 0;
constexpr int kBottom = kWalks == 1 ? -maximum(-kWalked, AxisH::kFirst - IN_H) : kWalked;
using Patch = PairedPixels<kImages, maximum(1, kBottom - kTop), kPairs, AxisW::kStep, AxisW::kReach, kChannels>;
static_assert(SHARED_BYTES == Patch::kBytes + 2 * kChannels * kTaps,
              "SHARED_BYTES differs from this layout: solvers/depthwise/mma_tiling.py computes another");

constexpr bool is_inside(int walk, int row) {
  const int at = walk * kWalkStep + AxisH::kFirst + row;
  return at >= 0 && at < IN_H;
}

// The unit of a walk that meets its row at a tap in a phase; negative if none.
constexpr int unit_of(int row, int phase, int tap) {
  if (!AxisH::meets(phase, tap)) return -1;
  const int from = row - AxisH::pixel(0, phase, tap);
  return from >= 0 && from % AxisH::kStep == 0 && from / AxisH::kStep < kTileRows ? from / AxisH::kStep : -1;
}

constexpr bool is_met(int row) {
  if (kWalks == 1 && !is_inside(0, row)) return false;
  for (int phase = 0; phase < AxisH::kPhases; ++phase)
    for (int tap = 0; tap < kFilterY; ++tap)
      if (unit_of(row, phase, tap) >= 0) return true;
  return false;
}

// The row whose matrices are loaded before those of `row` are multiplied; with many taps that is no use.
constexpr int next_met(int row) {
  if (kHalves * kTaps > 49) return row;
  int next = row + 1;
  while (next < kWalked - 1 && !is_met(next)) ++next;
  return next < kWalked ? next : row;
}

constexpr Lookahead<kWalked> kAhead = Lookahead<kWalked>::of(next_met, is_met);

// The last row of a walk that a unit meets in a phase; its own if it meets none.
constexpr int last_met(int unit, int phase) {
  int last = unit * AxisH::kStep;
  for (int tap = 0; tap < kFilterY; ++tap)
    if (AxisH::meets(phase, tap)) last = maximum(last, AxisH::pixel(unit, phase, tap));
  return last;
}

// The taps of a filter's row that meet pixels in a phase of columns.
template <int kPhase>
struct Order {
  static constexpr int count() {
    int taps = 0;
    for (int tap = 0; tap < kFilterX; ++tap) taps += AxisW::meets(kPhase, tap);
    return taps;
  }
  static constexpr int kCount = count();

  // Number k in the order of the pixels that they meet.
  static constexpr int met(int k) {
    for (int i = 0; i < kFilterX; ++i) {
      const int tap = FLIPPED ? kFilterX - 1 - i : i;
      if (AxisW::meets(kPhase, tap) && k-- == 0) return tap;
    }
    return 0;
  }

  // Three taps of neighbouring pixels are taken with the middle one last: the fragment of the others holds its pixels.
  static constexpr bool kMiddleLast = kFewTaps && kCount == 3 && AxisW::kStep == 1 &&
                                      AxisW::pixel(0, kPhase, met(2)) == AxisW::pixel(0, kPhase, met(0)) + 2;
  static constexpr int number(int k) { return met(kMiddleLast && k > 0 ? 3 - k : k); }

  // A fragment has the pixels of both outputs of a pair at two taps, or at a last one: the slots of its matrices.
  static constexpr int kFragments = ceil_div(kCount, 2);
  static constexpr int slot(int fragment, int i) {
    return Patch::slot(AxisW::pixel(0, kPhase, number(2 * fragment + i / 2)) + i % 2 * AxisW::kStep);
  }
  static constexpr int matrices(int fragment) { return 2 * fragment + 1 < kCount ? 4 : 2; }

  // The first fragment whose matrices lie as those of another: lanes add the same to its address.
  static constexpr int like(int fragment) {
    for (int first = 0; first < fragment; ++first) {
      bool alike = true;
      for (int i = 0; i < matrices(fragment); ++i)
        alike = alike && slot(first, i) - slot(first, 0) == slot(fragment, i) - slot(fragment, 0);
      if (alike) return first;
    }
    return fragment;
  }
};

// The same as tables, since the compiler counts what it computes against loops that are to be unrolled.
template <int kPhase>
struct Tables {
  int number[maximum(1, Order<kPhase>::kCount)], slot[maximum(1, Order<kPhase>::kFragments)],
      like[maximum(1, Order<kPhase>::kFragments)];
};
template <int kPhase>
constexpr Tables<kPhase> tables() {
  using Of = Order<kPhase>;
  Tables<kPhase> all = {};
  for (int k = 0; k < Of::kCount; ++k) all.number[k] = Of::number(k);
  for (int i = 0; i < Of::kFragments; ++i) all.slot[i] = Of::slot(i, 0), all.like[i] = Of::like(i);
  return all;
}
template <int kPhase>
constexpr Tables<kPhase> kTables = tables<kPhase>();

// What a warp holds in a phase of columns.
template <int kPhase>
struct Taps : Order<kPhase> {
  using Order<kPhase>::kCount, Order<kPhase>::kFragments, Order<kPhase>::slot, Order<kPhase>::matrices;

  // Diagonal matrices of 8 channels each, as a lane holds them: rows 2t and 2t + 1 of column g.
  unsigned at[kHalves][kFilterY][maximum(1, kCount)];
  // What a lane adds to the addresses of fragments: where its row's matrix lies, from the first one on.
  unsigned offsets[maximum(1, kFragments)];

  __device__ __forceinline__ explicit Taps(const unsigned short* filters) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const unsigned unit = g / 2 != lane % 4 ? 0 : g % 2 == 0 ? 1 : 1 << 16;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int y = 0; y < kFilterY; ++y)
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          at[half][y][k] = unit * filters[(8 * half + g) * kTaps + y * kFilterX + kTables<kPhase>.number[k]];
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      offsets[fragment] = 0;
#pragma unroll
      for (int i = 1; i < matrices(fragment); ++i)
        if (lane / 8 == i) offsets[fragment] = (slot(fragment, i) - slot(fragment, 0)) * Patch::kPixelBytes;
    }
  }
};

using Accumulators = float[kTileRows][AxisH::kPhases][kHalves][4];

// The fragments of a row, of 8 channels each.
template <int kPhase>
using Row = unsigned[kHalves][maximum(1, Taps<kPhase>::kFragments)][4];

// Each fragment is loaded as it is multiplied: registers moved between products would wait for these.
template <int kPhase>
__device__ __forceinline__ void load_row(Row<kPhase>& row, const Taps<kPhase>& taps, unsigned pixels) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int fragment = 0; fragment < Taps<kPhase>::kFragments; ++fragment) {
      const unsigned from = pixels + 16 * half + kTables<kPhase>.slot[fragment] * Patch::kPixelBytes +
                            taps.offsets[kTables<kPhase>.like[fragment]];
      if (Taps<kPhase>::matrices(fragment) == 4)
        load_matrices(row[half][fragment], from);
      else if (Taps<kPhase>::kMiddleLast)
        row[half][1][0] = row[half][0][1], row[half][1][1] = row[half][0][2];
      else
        load_matrix_pair<false>(reinterpret_cast<unsigned (&)[2]>(row[half][fragment]), from);
    }
}

// Adds what a walk's row contributes.
template <int kPhase>
__device__ __forceinline__ void add_row(Accumulators& accumulators, const Taps<kPhase>& taps,
                                        const Row<kPhase>& fragments, int row) {
#pragma unroll
  for (int fragment = 0; fragment < Taps<kPhase>::kFragments; ++fragment)
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const unsigned (&pixels)[4] = fragments[half][fragment];
#pragma unroll
      for (int phase = 0; phase < AxisH::kPhases; ++phase)
#pragma unroll
        for (int y = 0; y < kFilterY; ++y) {
          const int unit = unit_of(row, phase, y), k = 2 * fragment;
          if (unit < 0) continue;
          if (Taps<kPhase>::matrices(fragment) == 4)
            multiply_add<ELEMENT>(accumulators[unit][phase][half], pixels, taps.at[half][y][k],
                                  taps.at[half][y][k + 1]);
          else
            multiply_add_half<ELEMENT>(accumulators[unit][phase][half], pixels[0], pixels[1], taps.at[half][y][k]);
        }
    }
}

// Words 0 and 1 of each of two neighbouring lanes: lane i gets their words i.
__device__ __forceinline__ void transpose_words(unsigned (&words)[2]) {
  const bool odd = threadIdx.x & 1;
  const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  words[0] = odd ? other : words[0], words[1] = odd ? words[1] : other;
}

// Words 0 ... 3 of each of four neighbouring lanes: lane i gets their words i.
__device__ __forceinline__ void transpose_words(unsigned (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const unsigned a = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  const unsigned b = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
  words[0] = odd ? a : words[0], words[1] = odd ? words[1] : a;
  words[2] = odd ? b : words[2], words[3] = odd ? words[3] : b;
  const unsigned c = __shfl_xor_sync(0xffffffffu, high ? words[0] : words[2], 2);
  const unsigned d = __shfl_xor_sync(0xffffffffu, high ? words[1] : words[3], 2);
  words[0] = high ? c : words[0], words[2] = high ? words[2] : c;
  words[1] = high ? d : words[1], words[3] = high ? words[3] : d;
}

// Stores 8 pairs of pixels, of a lane a pixel's kWarpChannels / 2 channels: those that lie in it and its neighbours.
__device__ __forceinline__ void store_pairs(ELEMENT* to, const float (&accumulators)[kHalves][4], bool stores) {
  unsigned words[2 * kHalves];
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) {
    const float* const sum = accumulators[i % kHalves] + i / kHalves * 2;
    const Vector<ELEMENT, 2> rounded = {convert<ELEMENT>(sum[0]), convert<ELEMENT>(sum[1])};
    words[i] = *reinterpret_cast<const unsigned*>(&rounded);
  }
  transpose_words(words);
  if (!stores) return;
  *reinterpret_cast<Vector<unsigned, 2 * kHalves>*>(to) = reinterpret_cast<Vector<unsigned, 2 * kHalves>&>(words);
}

#ifdef EPILOGUE
static_assert(AxisW::kPhases == 1 && AxisH::kPhases == 1, "an epilogue follows sums of one phase");

// What a lane reads of the residual, or of what was saved: as much as it stores.
using Residual = Vector<unsigned, 2 * kHalves>;

// The epilogue of a walk: terms of the channels of a lane's sums, and what is read with the results, from where a lane
// stores row 0 on.
struct WalkEpilogue {
  const Epilogue& all;
  const EpilogueElement *residual, *saved;
  ChannelTerms terms[kHalves][2] = {};

  // Of an image, and of a warp's channels from `channel` on.
  __device__ __forceinline__ WalkEpilogue(const Epilogue& epilogue, int image, int channel, int64 stored)
      : all(epilogue), residual(epilogue.residual + stored), saved(epilogue.saved + stored) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      if (channel + 8 * half < kAllChannels)
        read_terms(terms[half], epilogue, image, channel + 8 * half + threadIdx.x % 4 * 2, kAllChannels);
  }
};

// Makes results of a lane's sums.
__device__ __forceinline__ void finish_pairs(float (&sums)[kHalves][4], Residual residual, Residual saved,
                                             const WalkEpilogue& epilogue) {
  if constexpr (kHasResidual) transpose_words(residual.at);  // as the sums lie before those are stored
  if constexpr (kHasSaved) transpose_words(saved.at);
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) {
    const auto pair = reinterpret_cast<const Vector<ELEMENT, 2>&>(residual.at[i]);
    const auto arguments = reinterpret_cast<const Vector<ELEMENT, 2>&>(saved.at[i]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float& sum = sums[i % kHalves][i / kHalves * 2 + k];
      sum = finish(sum, epilogue.terms[i % kHalves][k], convert<float>(pair.at[k]), convert<float>(arguments.at[k]),
                   epilogue.all);
    }
  }
}

// Whether row `row` of a walk is where the residual of a unit is read: one row of results before it is needed.
constexpr bool is_read_at(int row, int unit) {
  return (kHasResidual || kHasSaved) && row == maximum(0, last_met(unit, 0) - AxisH::kStep);
}
#endif

// A walk of a warp: the address of a lane's pair in row 0; the number of row 0 in the tensor; where a lane stores
// row 0 of the results, of which `rows` exist, and whether.
struct Walk {
  unsigned pixels;
  int first_row;
  ELEMENT* results;
  int rows;
  bool stores;
};

template <int kPhase>
#ifdef EPILOGUE
__device__ __forceinline__ void walk_down(const Taps<kPhase>& taps, const Walk& walk, const WalkEpilogue& epilogue) {
#else
__device__ __forceinline__ void walk_down(const Taps<kPhase>& taps, const Walk& walk) {
#endif
  Accumulators accumulators = {};
  Row<kPhase> rows[kWalked];
#ifdef EPILOGUE
  Residual residuals[kTileRows] = {}, saved[kTileRows] = {};
#endif
#pragma unroll
  for (int row = 0; row < kWalked; ++row) {
#ifdef EPILOGUE
#pragma unroll
    for (int unit = 0; unit < kTileRows; ++unit)
      if (is_read_at(row, unit) && walk.stores && (kWalks * kTileRows == OUT_H || unit < walk.rows)) {
        const int at = unit * OUT_W * kAllChannels;
        if constexpr (kHasResidual) residuals[unit] = *reinterpret_cast<const Residual*>(epilogue.residual + at);
        if constexpr (kHasSaved) saved[unit] = *reinterpret_cast<const Residual*>(epilogue.saved + at);
      }
#endif
#pragma unroll
    for (int loaded = 0; loaded < kWalked; ++loaded)
      if (kAhead.is_loaded_before(loaded, row) && kAhead.met[loaded])
        load_row<kPhase>(rows[loaded], taps, walk.pixels + loaded * Patch::kRowBytes);
    const bool always = is_inside(0, row) && is_inside(kWalks - 1, row);
    if (kAhead.met[row] && (always || static_cast<unsigned>(walk.first_row + row) < static_cast<unsigned>(IN_H)))
      add_row<kPhase>(accumulators, taps, rows[row], row);
    __syncwarp();  // keeps the compiler from loading many rows ahead, for which there are no registers
#pragma unroll
    for (int unit = 0; unit < kTileRows; ++unit)
#pragma unroll
      for (int phase = 0; phase < AxisH::kPhases; ++phase) {
        if (last_met(unit, phase) != row) continue;
        const int result = unit * AxisH::kPhases + phase;
#ifdef EPILOGUE
        if (kWalks * kTileRows == OUT_H || result < walk.rows)
          finish_pairs(accumulators[unit][phase], residuals[unit], saved[unit], epilogue);
#endif
        if (kWalks * kTileRows * AxisH::kPhases == OUT_H || result < walk.rows)
          store_pairs(walk.results + result * OUT_W * kAllChannels, accumulators[unit][phase], walk.stores);
      }
  }
}

// A block's first image, channel, unit of columns, and walk.
struct TileOrigin {
  int image, channel, column, walk;
};

template <int kPhase>
__device__ __forceinline__ void compute(unsigned patch, const unsigned short* filters, ELEMENT* out,
#ifdef EPILOGUE
                                        const TileOrigin& tile, int n, const Epilogue& epilogue) {
#else
                                        const TileOrigin& tile, int n) {
#endif
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first = warp * kWarpChannels, quarter = lane % 4;
  const int second = kHalves == 2 ? quarter / 2 : quarter % 2;  // whether a lane stores the second pixel of a pair
  const int channel = tile.channel + first + (kHalves == 2 ? quarter % 2 * 8 : quarter / 2 * 4);
  const Taps<kPhase> taps(filters + first * kTaps);
  if constexpr (kPhase == 0 && !kFewTaps) {
    wait_for_copies<0>();
    __syncthreads();  // the pixels have arrived
  }
  int from = 0;
  asm volatile("" : "+r"(from));  // a loop even of one iteration: filters are built before it, not between its products
#pragma unroll 1
  for (; from < kLanes; from += 8) {
    const int read = min(from + lane % 8, kLanes - 1), written = from + lane / 4;
    const int image = tile.image + written / kPairs;
    const int column = (tile.column + written % kPairs * 2 + second) * AxisW::kPhases + kPhase;
    const int row = tile.walk * kTileRows * AxisH::kPhases;
    const Walk walk = {patch + read / kPairs * Patch::kImageBytes + read % kPairs * Patch::kPixelBytes + 2 * first -
                           kTop * Patch::kRowBytes,
                       tile.walk * kWalkStep + AxisH::kFirst,
                       out + ((image * OUT_H + row) * OUT_W + column) * kAllChannels + channel, OUT_H - row,
                       written < kLanes && image < n && column < OUT_W && channel < kAllChannels};
#ifdef EPILOGUE
    walk_down<kPhase>(taps, walk, WalkEpilogue(epilogue, min(image, n - 1), tile.channel + first, walk.results - out));
#else
    walk_down<kPhase>(taps, walk);
#endif
  }
  if constexpr (kPhase + 1 < AxisW::kPhases) compute<kPhase + 1>(patch, filters, out, tile, n);
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_mma(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter, ELEMENT* __restrict__ out,
#ifdef EPILOGUE
                  int n, const __grid_constant__ Epilogue epilogue) {
#else
                  int n) {
#endif
  extern __shared__ __align__(16) unsigned char staged[];
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(staged));
  const int row_tile = blockIdx.y / COLUMN_TILES, column = (blockIdx.y - row_tile * COLUMN_TILES) * 2 * kPairs;
  const TileOrigin tile = {static_cast<int>(blockIdx.z) * kImages, static_cast<int>(blockIdx.x) * kChannels, column,
                           row_tile};
  const ELEMENT* const filters = filter + tile.channel * kTaps;
  for (int i = threadIdx.x; i < min(kChannels, kAllChannels - tile.channel) * kTaps / 8; i += kThreads)
    copy_bytes<16>(base + Patch::kBytes + 16 * i, filters + 8 * i, true);
  commit_copies();
  constexpr int kFirst = AxisH::kFirst + kTop, kLast = (ROW_TILES - 1) * kWalkStep + kFirst;
  stage_pairs<Patch, kThreads, kAllChannels, false, -kFirst, IN_H - kLast>(
      base, in,
      {n, kAllChannels, IN_H, IN_W, tile.image, tile.channel, tile.walk * kWalkStep + kFirst,
       column * AxisW::kStep + AxisW::kFirst});
  commit_copies();
  wait_for_copies<kFewTaps ? 0 : 1>();
  __syncthreads();  // the filters have arrived; with few taps, the pixels too
#ifdef EPILOGUE
  compute<0>(base, reinterpret_cast<const unsigned short*>(staged + Patch::kBytes), out, tile, n, epilogue);
#else
  compute<0>(base, reinterpret_cast<const unsigned short*>(staged + Patch::kBytes), out, tile, n);
#endif
}
