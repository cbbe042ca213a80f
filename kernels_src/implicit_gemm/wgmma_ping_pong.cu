// y[m, k] = sum_{tap, c} x[m at tap, c] * w[k, tap, c] on Hopper's tensor cores (wgmma) with float32 accumulators; or,
// if DATA, dx likewise from dy, with w[k, tap, c] read as its transpose. Strided DATA is cut into PHASES, pixels of dx
// that are equal modulo the stride, which meet the same taps. Tensors of pixels are channels last, or, as NCHW says,
// what is laid out as results is channels first, or all are: then each output meets one pixel.
// Filters are M, 64 * ROWS a tile; output pixels, counted over all images, of a phase over those of its own, are N,
// TILE_N a tile. TMA loads pixels in im2col mode, padding as zeros; in boxes where they are ORDERED: each output meets
// the pixel of its own number and no other. A k-tile is CHANNELS channels of one tap; a stage of a ring of STAGES has
// its pixels and its filters, but for filters that stay in shared memory: KEPT_TILES k-tiles of them, which a block
// loads once, as all its tiles are of the same filters.
// Persistent and ping-pong: two warpgroups take tiles by turns, one issues its products while the other applies the
// epilogue to its own. A warp each loads pixels, loads filters, and stores results by TMA, from one of OUT_STAGES
// places to which the residual, or what is saved for a derivative, was loaded. Source: PTX ISA, wgmma and setmaxnreg;
// CUTLASS's description of ping-pong kernels.
#include "common/tile.cuh"
#include "implicit_gemm/tile_scheduler.cuh"

#if !defined(ELEMENT) || !defined(DATA) || !defined(NCHW) || !defined(ORDERED)
#error "define ELEMENT, DATA, NCHW and ORDERED"
#endif
#if !defined(PHASES) || !defined(PHASES_IN_TURN)
#error "define PHASES and PHASES_IN_TURN"
#endif
#if !defined(ROWS) || !defined(TILE_N) || !defined(CHANNELS) || !defined(LAST_K_STEPS) || !defined(OUT_CHANNELS)
#error "define ROWS, TILE_N, CHANNELS, LAST_K_STEPS and OUT_CHANNELS"
#endif
#if !defined(STAGES) || !defined(KEPT_TILES) || !defined(OUT_STAGES)
#error "define STAGES, KEPT_TILES and OUT_STAGES"
#endif
#if !defined(SHARED_BYTES) || !defined(PHASEAXIS_FIELDS) || !defined(PHASE_FIELDS) || !defined(SHAPE_FIELDS)
#error "define SHARED_BYTES, and fields as solvers/implicit_gemm/wgmma_ping_pong.py declares them"
#endif
#define WGMMA_N TILE_N
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

// A phase along an axis: its pixels are those from `at` on, a stride apart, and its `taps` those of the filter from
// `first` on. The first meets the pixel `offset` behind the one that the walk is at. All else has one phase, all taps.
struct PhaseAxis {
  PHASEAXIS_FIELDS
};

struct Phase {
  PHASE_FIELDS
};

// Blocks take `tiles`: of some pixels of a phase, `filter_tiles` tiles of filters one after another; the grid is a
// multiple of these where filters stay. Then come, PHASES_IN_TURN, other phases of those pixels, `phase_step` in all,
// each time another one first, since a block may come to one place of them alone; else other pixels of the phase, of
// which `phase_step` tiles are. A tap has `chunks` k-tiles. Of a phase taps are `tap_step_h` and `tap_step_w` apart in
// a filter of rows of `filter_w`. `filters` and `image_pixels` are those of the output, of `images`; where channels are
// first the pixels are those of whole units.
struct Shape {
  SHAPE_FIELDS
};

constexpr int kConsumers = 2, kThreads = 128 * kConsumers + 128, kSteps = CHANNELS / 16;
constexpr bool kKeepsFilters = KEPT_TILES > 0, kStrided = PHASES > 1;
static_assert(DATA || !kStrided, "only pixels of dx are cut into phases");

enum NchwTensors { NCHW_NONE, NCHW_OUTPUT, NCHW_ALL };
constexpr bool kNchwPixels = NCHW == NCHW_ALL, kNchwOutput = NCHW != NCHW_NONE;

// Where channels are first: pixels of a channel that are copied together, a row of a swizzle. Images are whole units;
// where all channels are first they are counted so: TMA reads zeros behind an image's last pixel, and does not write
// there.
constexpr int kUnit = 64, kUnits = TILE_N / kUnit, kUnitRowBytes = 2 * kUnit;
static_assert(!kNchwPixels || ORDERED, "with all channels first each output meets one pixel");
static_assert(!kNchwOutput || (!kStrided && TILE_N % kUnit == 0), "with channels first a tile is whole units");

// A stage: pixels of CHANNELS channels, swizzled over as many bytes as these are, or units of pixels one after another,
// of a row for each channel; then filters if they do not stay.
constexpr int kPixelBytes = 2 * CHANNELS, kPixelsBytes = TILE_N * kPixelBytes;
constexpr int kPixelStepBytes = kNchwPixels ? 16 * kUnitRowBytes : 32;
static_assert(TILE_N % 16 == 0, "results are staged 16 pixels at a time");
static_assert(kPixelBytes == 32 || kPixelBytes == 64 || kPixelBytes == 128, "a pixel is a span of a swizzle");

// 64 filters of a tap: rows of CHANNELS; of DATA rows of 64, a row for each of the CHANNELS terms.
constexpr int kFilterRowBytes = DATA ? 128 : kPixelBytes, kFilterStepBytes = DATA ? 16 * kFilterRowBytes : 32;
constexpr int kBlockBytes = 128 * CHANNELS, kFiltersBytes = ROWS * kBlockBytes;
constexpr int kFiltersAt = round_up(kPixelsBytes, 1024);
constexpr int kStageBytes = kFiltersAt + (kKeepsFilters ? 0 : kFiltersBytes);

// A place for results: of each 64 filters, pixels of OUT_CHANNELS channels, swizzled over as many bytes, or units of
// pixels, of a row for each channel. A warp writes 16 channels. What is read with results comes to there; `saved` to a
// second one if there is a residual, too.
constexpr int kWritingWarps = OUT_CHANNELS / 16;
constexpr int kOutPixelBytes = 2 * OUT_CHANNELS, kLoadedOutBytes = TILE_N * kOutPixelBytes;
constexpr int kOutBytes = round_up(kLoadedOutBytes, 1024);
static_assert(ROWS == 1 || OUT_CHANNELS == 64, "one block of filters where these are fewer than 64");
#ifdef EPILOGUE
constexpr bool kLoadsTensors = kHasResidual || kHasSaved, kLoadsBoth = kHasResidual && kHasSaved;
#else
constexpr bool kLoadsTensors = false, kLoadsBoth = false;
#endif
constexpr int kTensors = kLoadsBoth ? 2 : 1, kPlaceBytes = kTensors * ROWS * kOutBytes;
static_assert(SHARED_BYTES == 1024 + STAGES * kStageBytes + KEPT_TILES * kFiltersBytes + OUT_STAGES * kPlaceBytes,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// Descriptors without addresses: eight rows side by side are a pattern of the swizzle.
constexpr unsigned long long kPixelDescriptor =
    kNchwPixels ? matrix_descriptor(CHANNELS * kUnitRowBytes, 8 * kUnitRowBytes, kUnitRowBytes)
                : matrix_descriptor(16, 8 * kPixelBytes, kPixelBytes);
constexpr unsigned long long kFilterDescriptor = matrix_descriptor(16, 8 * kFilterRowBytes, kFilterRowBytes);

// Of a thread that multiplies, and of one that does not, of what all have at launch.
constexpr int kRegisters = 232, kFewRegisters = 40, kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(kConsumers * kRegisters + kFewRegisters <= (kConsumers + 1) * kLaunchRegisters,
              "warps that multiply get the registers that the others give back");

// Groups of products, a k-tile each, that are under way while the next one is begun.
constexpr int kUnderWay = ROWS == 1 ? 2 : 1;
static_assert(STAGES > kUnderWay, "stages that are multiplied are not loaded");

// What a block computes at a time: from which of a phase's pixels and from which filter on.
struct OutputTile {
  int pixel, filter, phase;
};

// The number of a block's `item`-th tile.
__device__ __forceinline__ int tile_number(int item) {
  return static_cast<int>(blockIdx.x + static_cast<unsigned>(item) * gridDim.x);
}

__device__ __forceinline__ OutputTile tile_at(const Shape& shape, int number) {
  const int group = number / shape.filter_tiles, filters = number - group * shape.filter_tiles.by;
  if constexpr (!kStrided) return {group * TILE_N, filters * 64 * ROWS, 0};
  const int quotient = group / shape.phase_step, rest = group - quotient * shape.phase_step.by;
  const int pixels = PHASES_IN_TURN ? quotient : rest;
  const int phase = PHASES_IN_TURN ? (quotient + rest) % PHASES : quotient;
  return {pixels * TILE_N, filters * 64 * ROWS, phase};
}

__device__ __forceinline__ const Phase& phase_of(const Shape& shape, const OutputTile& tile) {
  return shape.phases[kStrided ? tile.phase : 0];
}

// The k-tiles of a block's `item`-th tile, 0 behind the last one.
__device__ __forceinline__ int k_tiles_of(const Shape& shape, int item) {
  const int number = tile_number(item);
  if (kStrided && number >= shape.tiles) return 0;
  const Phase& phase = phase_of(shape, tile_at(shape, number));
  return phase.h.taps * phase.w.taps * shape.chunks;
}

// Where a unit of pixels is: its image, and its first pixel there.
struct Unit {
  int image, pixel;
};

__device__ __forceinline__ Unit unit_at(const Shape& shape, const OutputTile& tile, int number) {
  const int pixel = tile.pixel + number * kUnit, image = pixel / shape.image_pixels;
  return {image, pixel - image * shape.image_pixels.by};
}

// Loads units of a tile's pixels, one after another: `kChannels` rows of each, of channels from `channel` on.
template <int kChannels>
__device__ __forceinline__ void load_units(unsigned to, const TensorMap* map, unsigned full, const Shape& shape,
                                           const OutputTile& tile, int channel) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit = unit_at(shape, tile, i);
    tma_load_tiled(to + i * kChannels * kUnitRowBytes, map, full, unit.pixel, channel, unit.image);
  }
}

// Addresses in shared memory.
struct Shared {
  unsigned stages, filters, places, full, empty, filters_full, turns, places_ready, places_staged;
};

// The next stage of the ring, and the parity of its phase.
struct Ring {
  int stage;
  unsigned parity;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The ring after `k_tiles` of it have been used.
__device__ __forceinline__ Ring ring_after(int k_tiles) {
  const int rounds = k_tiles / STAGES;
  return {k_tiles - rounds * STAGES, static_cast<unsigned>(rounds) & 1};
}

// The pixels of all tiles' k-tiles, in order. Taps of DATA meet pixels further and further back.
__device__ __forceinline__ void load_pixels(const Shape& shape, const TensorMap* map, const Shared& at) {
  constexpr int kSign = DATA ? -1 : 1;
  Ring ring = {0, 1};  // in the first round all stages are empty
  for (int item = 0, number; (number = tile_number(item)) < shape.tiles; ++item) {
    const OutputTile tile = tile_at(shape, number);
    const Phase& phase = phase_of(shape, tile);
    const Pixel pixel = pixel_at(shape.walk, tile.pixel);
    const int w = pixel.w * (DATA ? 1 : shape.walk.stride_w) + shape.walk.low_w;
    const int h = pixel.h * (DATA ? 1 : shape.walk.stride_h) + shape.walk.low_h;
    for (int r = 0; r < phase.h.taps; ++r)
      for (int s = 0; s < phase.w.taps; ++s)
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
          const unsigned full = at.full + 8 * ring.stage, to = at.stages + ring.stage * kStageBytes;
          mbarrier_wait(at.empty + 8 * ring.stage, ring.parity);
          mbarrier_arrive_expect_tx(full, kPixelsBytes);
          if constexpr (kNchwPixels) {
            load_units<CHANNELS>(to, map, full, shape, tile, chunk * CHANNELS);
          } else if constexpr (ORDERED) {
            tma_load_tiled(to, map, full, chunk * CHANNELS, 0, tile.pixel);
          } else {
            tma_load_im2col(to, map, full, chunk * CHANNELS, w, h, pixel.n,
                            phase.w.offset + kSign * s * shape.walk.dilation_w,
                            phase.h.offset + kSign * r * shape.walk.dilation_h);
          }
          ring.next();
        }
  }
}

// The filters of a k-tile.
__device__ __forceinline__ void load_filter_tile(const TensorMap* map, unsigned to, unsigned full, int filter, int tap,
                                                 int chunk) {
  mbarrier_arrive_expect_tx(full, kFiltersBytes);
  if constexpr (DATA) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      tma_load_tiled(to + row * kBlockBytes, map, full, filter + 64 * row, tap, chunk * CHANNELS);
  } else {
    tma_load_tiled(to, map, full, chunk * CHANNELS, tap, filter);
  }
}

// The filters of all tiles' k-tiles, in order; once, if they stay.
__device__ __forceinline__ void load_filters(const Shape& shape, const TensorMap* map, const Shared& at) {
  Ring ring = {0, 1};
  for (int item = 0, number; (number = tile_number(item)) < shape.tiles; ++item) {
    const OutputTile tile = tile_at(shape, number);
    const Phase& phase = phase_of(shape, tile);
    int k_tile = 0;
    for (int r = 0; r < phase.h.taps; ++r)
      for (int s = 0; s < phase.w.taps; ++s) {
        const int row = phase.h.first + r * shape.tap_step_h, column = phase.w.first + s * shape.tap_step_w;
        for (int chunk = 0; chunk < shape.chunks; ++chunk, ++k_tile) {
          unsigned to = at.filters + k_tile * kFiltersBytes, full = at.filters_full + 8 * k_tile;
          if constexpr (!kKeepsFilters) {
            to = at.stages + ring.stage * kStageBytes + kFiltersAt, full = at.full + 8 * ring.stage;
            mbarrier_wait(at.empty + 8 * ring.stage, ring.parity);
          }
          load_filter_tile(map, to, full, tile.filter, row * shape.filter_w + column, chunk);
          ring.next();
        }
      }
    if constexpr (kKeepsFilters) break;
  }
}

// Where a lane's row of 16 bytes of a group of 16 pixels is staged: a pixel's 8 filters, as `stmatrix_trans` takes it,
// or, channels first, a filter's 8 pixels, as `stmatrix` does.
__device__ __forceinline__ unsigned staged_row(unsigned place, int group) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if constexpr (kNchwOutput) {
    const int row = 16 * warp + lane % 16, first = 16 * group % kUnit / 8 + lane / 16;
    const int unit = 16 * group / kUnit * OUT_CHANNELS * kUnitRowBytes;
    return place + unit + row * kUnitRowBytes + 16 * (first ^ row % 8);
  }
  const int word = 2 * warp + lane / 8 % 2;
  const int pixel = 16 * group + lane / 16 * 8 + lane % 8, offset = pixel * kOutPixelBytes;
  return place + offset + 16 * (word ^ (offset / 128 & (kOutPixelBytes / 16 - 1)));
}

__device__ __forceinline__ unsigned pack(float first, float second) {
  const Vector<ELEMENT, 2> pair = {convert<ELEMENT>(first), convert<ELEMENT>(second)};
  return *reinterpret_cast<const unsigned*>(&pair);
}

#ifdef EPILOGUE
// Of 64 filters from the first on, those of a thread: the upper one, and 8 `below` it.
__device__ __forceinline__ int filter_of_thread(const Shape& shape, int first, int below) {
  const int filter = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * below;
  return min(filter, shape.filters - 1);
}

// Two neighbouring elements of a register.
__device__ __forceinline__ void unpack(float (&to)[2], unsigned word) {
  const Vector<EpilogueElement, 2> pair = *reinterpret_cast<const Vector<EpilogueElement, 2>*>(&word);
  to[0] = convert<float>(pair.at[0]), to[1] = convert<float>(pair.at[1]);
}

// Reads four 8 x 8 matrices of what is laid out as the results, as they are staged.
__device__ __forceinline__ void load_staged(unsigned (&to)[4], unsigned address) {
  if constexpr (kNchwOutput)
    load_matrices(to, address);
  else
    load_transposed(to, address);
}

// Puts channel_bias of a pixel's image into terms of a thread's filters. Images have multiples of 16 pixels, or are
// counted as whole units.
__device__ __forceinline__ void read_channel_bias(ChannelTerms (&terms)[2], const Shape& shape,
                                                  const Epilogue& epilogue, int first_filter, int pixel) {
  const int64 image = min(pixel / shape.image_pixels, shape.images - 1);
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    const int filter = filter_of_thread(shape, first_filter, below);
    terms[below].channel_bias = convert<EpilogueNumber>(epilogue.channel_bias[image * shape.filters + filter]);
  }
}
#endif

// Stages the results of 64 filters, 16 pixels at a time.
__device__ __forceinline__ void stage_results(
#ifdef EPILOGUE
    const Shape& shape, const OutputTile& tile, unsigned place, ChannelTerms (&terms)[2], const Epilogue& epilogue,
    const float (&acc)[TILE_N / 2]) {
#else
    unsigned place, const float (&acc)[TILE_N / 2]) {
#endif
#pragma unroll
  for (int group = 0; group < TILE_N / 16; ++group) {
    const unsigned to = staged_row(place, group);
    unsigned words[4] = {};
#ifdef EPILOGUE
    unsigned read[4] = {}, saved[4] = {};
    if constexpr (kHasChannelBias) read_channel_bias(terms, shape, epilogue, tile.filter, tile.pixel + 16 * group);
    if constexpr (kLoadsTensors) load_staged(read, to);
    if constexpr (kLoadsBoth) load_staged(saved, to + ROWS * kOutBytes);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a filter's two pixels
      const int first = 8 * group + 2 * i;
      float pair[2] = {acc[first], acc[first + 1]};
#ifdef EPILOGUE
      float added[2] = {}, argument[2] = {};
      if constexpr (kHasResidual) unpack(added, read[i]);
      if constexpr (kHasSaved) unpack(argument, kLoadsBoth ? saved[i] : read[i]);
      finish_pair(pair[0], pair[1], terms[i % 2], terms[i % 2], added, argument, epilogue);
#endif
      words[i] = pack(pair[0], pair[1]);
    }
    if constexpr (kNchwOutput)
      stmatrix(to, words[0], words[1], words[2], words[3]);
    else
      stmatrix_trans(to, words[0], words[1], words[2], words[3]);
  }
}

// Tells that a stage is empty.
__device__ __forceinline__ void release(const Shared& at, int stage) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(at.empty + 8 * stage);
}

// Adds the products of a k-tile, the `k_tile`-th of its item, of which it multiplies `kTileSteps` steps of 16 channels.
template <int kTileSteps>
__device__ __forceinline__ void multiply_tile(float (&acc)[ROWS][TILE_N / 2], Ring& ring, int k_tile,
                                              const Shared& at) {
  const unsigned b = at.stages + ring.stage * kStageBytes;
  const unsigned a = kKeepsFilters ? at.filters + k_tile * kFiltersBytes : b + kFiltersAt;
  mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
  if constexpr (kKeepsFilters) mbarrier_wait(at.filters_full + 8 * k_tile, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileSteps; ++k)
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      Wgmma<ELEMENT>::ss<DATA ? Major::MN : Major::K, kNchwPixels ? Major::MN : Major::K>(
          acc[row], descriptor_at(kFilterDescriptor, a + row * kBlockBytes + k * kFilterStepBytes),
          descriptor_at(kPixelDescriptor, b + k * kPixelStepBytes), k_tile + k > 0);
  wgmma_commit_group();
  wgmma_wait_group<kUnderWay>();  // all k-tiles but these have been multiplied
  if (k_tile >= kUnderWay) release(at, (ring.stage + STAGES - kUnderWay) % STAGES);
  ring.next();
}

__device__ __forceinline__ void consume(const Shape& shape, int consumer,
#ifdef EPILOGUE
                                        const Epilogue& epilogue,
#endif
                                        const Shared& at) {
  const int lane = threadIdx.x % 32;
  int turn = 0, before = consumer == 0 ? 0 : k_tiles_of(shape, 0);  // k-tiles of the items before
  for (int item = consumer; tile_number(item) < shape.tiles; item += kConsumers, ++turn) {
    const int k_tiles = k_tiles_of(shape, item);
    float acc[ROWS][TILE_N / 2];
    Ring ring = ring_after(before);
    before += k_tiles + k_tiles_of(shape, item + 1);
    mbarrier_wait(at.turns + 8 * consumer, (turn + (consumer == 0)) & 1);
    if (kStrided && k_tiles == 0) {
#pragma unroll
      for (int i = 0; i < ROWS * TILE_N / 2; ++i) acc[i / (TILE_N / 2)][i % (TILE_N / 2)] = 0.0f;
    }
    for (int k_tile = 0; k_tile < k_tiles;) {  // tap after tap
      for (int chunk = 0; chunk < shape.chunks - (LAST_K_STEPS < kSteps); ++chunk, ++k_tile)
        multiply_tile<kSteps>(acc, ring, k_tile, at);
      if constexpr (LAST_K_STEPS < kSteps) multiply_tile<LAST_K_STEPS>(acc, ring, k_tile++, at);
    }
    if (lane == 0) mbarrier_arrive(at.turns + 8 * (1 - consumer));
#ifdef EPILOGUE
    const OutputTile tile = tile_at(shape, tile_number(item));
    ChannelTerms terms[ROWS][2];
#pragma unroll
    for (int i = 0; i < 2 * ROWS; ++i)
      terms[i / 2][i % 2] =
          channel_terms(epilogue, 0, filter_of_thread(shape, tile.filter + 64 * (i / 2), i % 2), shape.filters);
#endif
    wgmma_wait_group<0>();
    for (int last = min(kUnderWay, k_tiles); last > 0; --last) release(at, (ring.stage + STAGES - last) % STAGES);
    if (threadIdx.x % 128 / 32 >= kWritingWarps) continue;
    mbarrier_wait(at.places_ready + 8 * consumer, turn & 1);
    const unsigned place = at.places + item % OUT_STAGES * kPlaceBytes;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#ifdef EPILOGUE
      stage_results(shape, {tile.pixel, tile.filter + 64 * row, tile.phase}, place + row * kOutBytes, terms[row],
                    epilogue, acc[row]);
#else
      stage_results(place + row * kOutBytes, acc[row]);
#endif
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(at.places_staged + 8 * consumer);
  }
}

// The maps of a tensor of results by phase; of two phases there are four, too.
struct ResultMaps {
  const TensorMap* maps[kStrided ? 4 : 1];

  __device__ __forceinline__ const TensorMap* of(int phase) const {
    if constexpr (!kStrided)
      return maps[0];
    else
      return phase < 2 ? (phase == 0 ? maps[0] : maps[1]) : (phase == 2 ? maps[2] : maps[3]);
  }
};

template <class... Maps>
__device__ __forceinline__ ResultMaps maps_at(const Maps&... maps) {
  return {{&maps...}};
}

// As parameters of a kernel, and as one value.
#if PHASES > 1
#define RESULT_MAPS(name)                                                             \
  const __grid_constant__ TensorMap name, const __grid_constant__ TensorMap name##_1, \
      const __grid_constant__ TensorMap name##_2, const __grid_constant__ TensorMap name##_3
#define ALL_MAPS(name) maps_at(name, name##_1, name##_2, name##_3)
#else
#define RESULT_MAPS(name) const __grid_constant__ TensorMap name
#define ALL_MAPS(name) maps_at(name)
#endif

// Where a tile's first pixel is in dx.
__device__ __forceinline__ Pixel strided_pixel(const Shape& shape, const OutputTile& tile) {
  const Phase& phase = phase_of(shape, tile);
  const Pixel pixel = pixel_at(shape.walk, tile.pixel);
  return {pixel.n, pixel.h * shape.walk.stride_h + phase.h.at, pixel.w * shape.walk.stride_w + phase.w.at};
}

// Loads what is laid out as the results of 64 filters of a tile.
__device__ __forceinline__ void load_results(unsigned to, const ResultMaps& maps, unsigned barrier, const Shape& shape,
                                             const OutputTile& tile, int filter) {
  if constexpr (kStrided) {
    const Pixel pixel = strided_pixel(shape, tile);
    tma_load_im2col(to, maps.of(tile.phase), barrier, filter, pixel.w, pixel.h, pixel.n, 0, 0);
  } else if constexpr (kNchwOutput) {
    load_units<OUT_CHANNELS>(to, maps.of(0), barrier, shape, tile, filter);
  } else {
    tma_load_tiled(to, maps.of(0), barrier, filter, 0, tile.pixel);
  }
}

// Stores the results of 64 filters of a tile.
__device__ __forceinline__ void store_results(const ResultMaps& maps, unsigned from, const Shape& shape,
                                              const OutputTile& tile, int filter) {
  if constexpr (kStrided) {
    const Pixel pixel = strided_pixel(shape, tile);
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            maps.of(tile.phase)),
        "r"(from), "r"(filter), "r"(pixel.w), "r"(pixel.h), "r"(pixel.n)
        : "memory");
  } else if constexpr (kNchwOutput) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const Unit unit = unit_at(shape, tile, i);
      tma_store(maps.of(0), from + i * OUT_CHANNELS * kUnitRowBytes, unit.pixel, filter, unit.image);
    }
  } else {
    tma_store(maps.of(0), from, filter, 0, tile.pixel);
  }
}

// Stores results once they are staged, and makes their place ready again, with what is read with the next ones.
__device__ __forceinline__ void copy_results(const Shape& shape, const ResultMaps& out, const ResultMaps& read,
                                             const ResultMaps& saved, const Shared& at) {
  const auto make_ready = [&](int item) {
    const int number = tile_number(item);
    const unsigned ready = at.places_ready + 8 * (item % kConsumers), to = at.places + item % OUT_STAGES * kPlaceBytes;
    if (number >= shape.tiles) return;
    if constexpr (kLoadsTensors) {
      const OutputTile tile = tile_at(shape, number);
      mbarrier_arrive_expect_tx(ready, kTensors * ROWS * kLoadedOutBytes);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        load_results(to + row * kOutBytes, read, ready, shape, tile, tile.filter + 64 * row);
        if constexpr (kLoadsBoth)
          load_results(to + (ROWS + row) * kOutBytes, saved, ready, shape, tile, tile.filter + 64 * row);
      }
    } else {
      mbarrier_arrive(ready);
    }
  };
  for (int item = 0; item < OUT_STAGES; ++item) make_ready(item);
  for (int item = 0, number; (number = tile_number(item)) < shape.tiles; ++item) {
    const OutputTile tile = tile_at(shape, number);
    const unsigned place = at.places + item % OUT_STAGES * kPlaceBytes;
    mbarrier_wait(at.places_staged + 8 * (item % kConsumers), item / kConsumers & 1);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      store_results(out, place + row * kOutBytes, shape, tile, tile.filter + 64 * row);
    tma_store_commit_group();
    tma_store_wait_group_read();
    make_ready(item + OUT_STAGES);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    implicit_gemm_wgmma_ping_pong(const __grid_constant__ TensorMap map_pixels,
                                  const __grid_constant__ TensorMap map_filters,
#ifdef EPILOGUE
                                  RESULT_MAPS(map_out), const __grid_constant__ Shape shape, RESULT_MAPS(map_read),
                                  RESULT_MAPS(map_saved), const __grid_constant__ Epilogue epilogue) {
#else
                                  RESULT_MAPS(map_out), const __grid_constant__ Shape shape) {
#endif
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * STAGES + KEPT_TILES + 3 * kConsumers];
  Shared at;
  at.stages = (shared_address(shared) + 1023) / 1024 * 1024;
  at.filters = at.stages + STAGES * kStageBytes;
  at.places = at.filters + KEPT_TILES * kFiltersBytes;
  at.full = shared_address(barriers);
  at.empty = at.full + 8 * STAGES;
  at.filters_full = at.empty + 8 * STAGES;
  at.turns = at.filters_full + 8 * KEPT_TILES;
  at.places_ready = at.turns + 8 * kConsumers;
  at.places_staged = at.places_ready + 8 * kConsumers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(at.full + 8 * i, kKeepsFilters ? 1 : 2);
      mbarrier_init(at.empty + 8 * i, 4);
    }
    for (int i = 0; i < KEPT_TILES; ++i) mbarrier_init(at.filters_full + 8 * i, 1);
    for (int i = 0; i < kConsumers; ++i) {
      mbarrier_init(at.turns + 8 * i, 4);
      mbarrier_init(at.places_ready + 8 * i, 1);
      mbarrier_init(at.places_staged + 8 * i, kWritingWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();                                                      // mbarriers are initialised
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // known to be the same in a warp
  if (warpgroup < kConsumers) {
    setmaxnreg_inc<kRegisters>();
#ifdef EPILOGUE
    consume(shape, warpgroup, epilogue, at);
#else
    consume(shape, warpgroup, at);
#endif
  } else {
    setmaxnreg_dec<kFewRegisters>();
    if (threadIdx.x == 128 * kConsumers) {
      load_pixels(shape, &map_pixels, at);
    } else if (threadIdx.x == 128 * kConsumers + 32) {
      load_filters(shape, &map_filters, at);
    } else if (threadIdx.x == 128 * kConsumers + 64) {
#ifdef EPILOGUE
      copy_results(shape, ALL_MAPS(map_out), ALL_MAPS(map_read), ALL_MAPS(map_saved), at);
#else
      copy_results(shape, ALL_MAPS(map_out), ALL_MAPS(map_out), ALL_MAPS(map_out), at);
#endif
    }
  }
}
