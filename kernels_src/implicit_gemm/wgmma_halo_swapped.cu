// y[n, i, j, k] = sum_{r, s, c} x[n, i - pad_h + r * DILATION_H, j - pad_w + s * DILATION_W, c] * w[k, r, s, c],
// channels last, on Hopper's tensor cores (wgmma) with float32 accumulators; or, if DATA, dx likewise from dy, with the
// filter turned around and w[c, r, s, k] read as its transpose. In one dimension ROWS_ARE_IMAGES.
// A pixel is loaded once for all taps, as in wgmma_halo.cu: TMA puts TILE_H x TILE_W pixels with their halo, padding as
// zeros, and CHANNELS of their channels, a chunk, into a stage (slot) of shared memory, where taps are other addresses.
// Filters are M, 64 a block; pixels are N, row after row, with the halo between rows, whose results go nowhere.
// Persistent blocks take units, tiles of pixels for UNIT_BLOCKS blocks of filters. Ping-pong: CONSUMERS warpgroups take
// a block of filters each by turns, one issues its products while the one before it applies the epilogue. A warp each
// loads pixels, loads filters of taps into a ring of FILTER_STAGES, which stay if it holds all, and stores results by
// TMA, from where the residual, or what is saved for a derivative, was loaded to. Grid: units are parts of the filters,
// column tiles, row tiles, images. Source: PTX ISA, wgmma; CUTLASS's description of ping-pong kernels.
// VARIANT_NCHW_OUTPUT: what is laid out as results is channels first, rows of pixels of a channel.
#include "common/divisor.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(DATA) || !defined(FILTER_H) || !defined(FILTER_W)
#error "define ELEMENT, DATA, FILTER_H and FILTER_W"
#endif
#if !defined(DILATION_H) || !defined(DILATION_W) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_N)
#error "define DILATION_H, DILATION_W, TILE_H, TILE_W and TILE_N"
#endif
#if !defined(CHANNELS) || !defined(CHUNKS) || !defined(LAST_K_STEPS) || !defined(OUT_CHANNELS)
#error "define CHANNELS, CHUNKS, LAST_K_STEPS and OUT_CHANNELS"
#endif
#ifndef ROWS_ARE_IMAGES
#error "define ROWS_ARE_IMAGES"
#endif
#if !defined(UNIT_BLOCKS) || !defined(CONSUMERS) || !defined(SLOTS) || !defined(FILTER_STAGES) || !defined(SHARED_BYTES)
#error "define UNIT_BLOCKS, CONSUMERS, SLOTS, FILTER_STAGES and SHARED_BYTES"
#endif
#ifndef SHAPE_FIELDS
#error "define SHAPE_FIELDS, as SHAPE of solvers/implicit_gemm/wgmma_halo_swapped.py declares them"
#endif
#define WGMMA_N TILE_N
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

// `parts`: units of one tile, each of UNIT_BLOCKS blocks of filters. `filters` are those of the output.
struct Shape {
  SHAPE_FIELDS
};

constexpr int kTaps = FILTER_H * FILTER_W, kThreads = 128 * CONSUMERS + 96, kSteps = CHANNELS / 16;
constexpr bool kKeepsFilters = FILTER_STAGES == UNIT_BLOCKS * CHUNKS * kTaps;

// A slot: rows of pixels of CHANNELS channels, swizzled over as many bytes as these are.
constexpr int kPixelBytes = 2 * CHANNELS;
#ifdef VARIANT_NCHW_OUTPUT
// Eight pixels that are multiplied side by side are of one row.
constexpr int kRowPixels = round_up(TILE_W + (FILTER_W - 1) * DILATION_W, 8);
constexpr int kRows = TILE_H + (FILTER_H - 1) * DILATION_H;
static_assert(TILE_W % 8 == 0 && !ROWS_ARE_IMAGES, "copies of rows of pixels are of 16 bytes");
#else
constexpr int kRowPixels = TILE_W + (FILTER_W - 1) * DILATION_W, kRows = TILE_H + (FILTER_H - 1) * DILATION_H;
#endif
constexpr int kLoadedSlotBytes = kRows * kRowPixels * kPixelBytes, kSlotBytes = round_up(kLoadedSlotBytes, 1024);
static_assert(TILE_N == round_up((TILE_H - 1) * kRowPixels + TILE_W, 8), "N is all pixels between a tile's ends");
static_assert(kPixelBytes == 32 || kPixelBytes == 64 || kPixelBytes == 128, "a pixel is a span of a swizzle");
static_assert(kTaps > 1, "taps are multiplied two at a time");
static_assert(UNIT_BLOCKS == 1 || SLOTS >= CHUNKS, "chunks are held for all blocks of filters of a unit");

// A block of filters of a tap: 64 rows of CHANNELS; of DATA rows of 64, a row for each of the CHANNELS terms.
constexpr int kFilterRowBytes = DATA ? 128 : kPixelBytes, kFilterBytes = 128 * CHANNELS;
constexpr int kFilterStepBytes = DATA ? 16 * kFilterRowBytes : 32;

// A consumer's place for results: pixels of OUT_CHANNELS channels, swizzled over as many bytes, of which a warp writes
// 16. What is read with results comes to there; `saved` to a second one if there is a residual, too.
constexpr int kWritingWarps = OUT_CHANNELS / 16;
constexpr int kOutPixelBytes = 2 * OUT_CHANNELS, kLoadedOutBytes = TILE_H * TILE_W * kOutPixelBytes;
constexpr int kOutBytes = round_up(kLoadedOutBytes, 1024);
#ifdef EPILOGUE
constexpr bool kLoadsTensors = kHasResidual || kHasSaved, kLoadsBoth = kHasResidual && kHasSaved;
#else
constexpr bool kLoadsTensors = false, kLoadsBoth = false;
#endif
constexpr int kTensors = kLoadsBoth ? 2 : 1;
static_assert(SHARED_BYTES ==
                  1024 + SLOTS * kSlotBytes + FILTER_STAGES * kFilterBytes + CONSUMERS * kTensors * kOutBytes,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// Descriptors without addresses: eight rows side by side are a pattern of the swizzle.
constexpr unsigned long long kPixelDescriptor = matrix_descriptor(16, 8 * kPixelBytes, kPixelBytes);
constexpr unsigned long long kFilterDescriptor = matrix_descriptor(16, 8 * kFilterRowBytes, kFilterRowBytes);

// What a block computes at a time: a tile of pixels, and from which filter on.
struct Unit {
  int image, row, column, filter;
};

__device__ __forceinline__ Unit unit_at(const Shape& shape, int number) {
  const int tile = number / shape.parts, rows = tile / shape.column_tiles, image = rows / shape.row_tiles;
  return {image, (rows - image * shape.row_tiles.by) * TILE_H, (tile - rows * shape.column_tiles.by) * TILE_W,
          (number - tile * shape.parts.by) * UNIT_BLOCKS * 64};
}

// Addresses in shared memory.
struct Shared {
  unsigned slots, filters, places, slots_full, slots_empty, filters_full, filters_empty, turns, places_ready,
      places_staged, unused;
};

__device__ __forceinline__ void tma_load(unsigned to, const TensorMap* map, unsigned barrier, int c, int w, int h,
                                         int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, unsigned from, int c, int w, int h, int n) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(c), "r"(w), "r"(h), "r"(n)
               : "memory");
}

// The next stage of a ring, and the parity of its phase.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The chunks of all units' tiles, in order.
__device__ __forceinline__ void load_pixels(const Shape& shape, const TensorMap* map, const Shared& at) {
  Ring<SLOTS> ring = {0, 1};
  for (int number = blockIdx.x; number < shape.units; number += gridDim.x) {
    const Unit unit = unit_at(shape, number);
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const unsigned full = at.slots_full + 8 * ring.stage;
      mbarrier_wait(at.slots_empty + 8 * ring.stage, ring.parity);
      mbarrier_arrive_expect_tx(full, kLoadedSlotBytes);
      tma_load(at.slots + ring.stage * kSlotBytes, map, full, chunk * CHANNELS, unit.column - shape.pad_w,
               unit.row - shape.pad_h, unit.image);
      ring.next();
    }
  }
}

// Filters of the taps of all chunks, in the order in which they are multiplied by; all of them once, if they are kept.
__device__ __forceinline__ void load_filters(const Shape& shape, const TensorMap* map, const Shared& at) {
  Ring<FILTER_STAGES> ring = {0, 1};
  for (int number = blockIdx.x; number < shape.units; number += gridDim.x) {
    const int first = unit_at(shape, number).filter;
    for (int block = 0; block < UNIT_BLOCKS; ++block)
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
        for (int tap = 0; tap < kTaps; ++tap) {
          const unsigned full = at.filters_full + 8 * ring.stage, to = at.filters + ring.stage * kFilterBytes;
          mbarrier_wait(at.filters_empty + 8 * ring.stage, ring.parity);
          mbarrier_arrive_expect_tx(full, kFilterBytes);
          if constexpr (DATA)
            tma_load_tiled(to, map, full, first + 64 * block, kTaps - 1 - tap, chunk * CHANNELS);
          else
            tma_load_tiled(to, map, full, chunk * CHANNELS, tap, first + 64 * block);
          ring.next();
        }
    if constexpr (kKeepsFilters) break;
  }
}

#ifdef VARIANT_NCHW_OUTPUT
// Where a lane's row of 16 bytes of a group of 16 pixels is staged, as `stmatrix` takes it: 8 pixels of one filter.
// Pixels of the halo have no place.
__device__ __forceinline__ unsigned staged_row(const Shared& at, unsigned place, int group) {
  const int filter = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
  const int pixel = 16 * group + threadIdx.x % 32 / 16 * 8, row = pixel / kRowPixels, column = pixel - row * kRowPixels;
  if (row >= TILE_H || column >= TILE_W) return at.unused;
  return place + 2 * ((filter * TILE_H + row) * TILE_W + column);
}
#else
// Where a lane's row of 16 bytes of a group of 16 pixels is staged, as `stmatrix_trans` takes it: 8 filters of one
// pixel. Pixels of the halo have no place.
__device__ __forceinline__ unsigned staged_row(const Shared& at, unsigned place, int group) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, word = 2 * warp + lane / 8 % 2;
  const int pixel = 16 * group + lane / 16 * 8 + lane % 8, row = pixel / kRowPixels, column = pixel - row * kRowPixels;
  if (row >= TILE_H || column >= TILE_W) return at.unused;
  const int offset = (row * TILE_W + column) * kOutPixelBytes;
  return place + offset + 16 * (word ^ (offset / 128 & (kOutPixelBytes / 16 - 1)));
}
#endif

__device__ __forceinline__ unsigned pack(float first, float second) {
  const Vector<ELEMENT, 2> pair = {convert<ELEMENT>(first), convert<ELEMENT>(second)};
  return *reinterpret_cast<const unsigned*>(&pair);
}

#ifdef EPILOGUE
static_assert(!ROWS_ARE_IMAGES || !kHasChannelBias || TILE_H == 1, "a tile has channel_bias of one image");

// Terms of a thread's two filters.
__device__ __forceinline__ void read_terms(ChannelTerms (&terms)[2], const Shape& shape, const Epilogue& epilogue,
                                           const Unit& unit, int first) {
  const int image = ROWS_ARE_IMAGES ? unit.row : unit.image;
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    const int filter = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * below;
    terms[below] = channel_terms(epilogue, image, min(filter, shape.filters - 1), shape.filters);
  }
}

// Two neighbouring elements of a register.
__device__ __forceinline__ void unpack(float (&to)[2], unsigned word) {
  const Vector<EpilogueElement, 2> pair = *reinterpret_cast<const Vector<EpilogueElement, 2>*>(&word);
  to[0] = convert<float>(pair.at[0]), to[1] = convert<float>(pair.at[1]);
}
#endif

// Whether pixels are finished in pairs: not where one of a pair could be of the halo, which is no result's business.
constexpr bool kPairs = TILE_W % 2 == 0 && kRowPixels % 2 == 0;

// Stages results, 16 pixels at a time.
__device__ __forceinline__ void stage_results(const Shared& at, unsigned place,
#ifdef EPILOGUE
                                              const ChannelTerms (&terms)[2], const Epilogue& epilogue,
#endif
                                              const Accumulators& acc) {
#pragma unroll
  for (int group = 0; group < ceil_div(TILE_N, 16); ++group) {
    const unsigned to = staged_row(at, place, group);
    unsigned words[4] = {};
#ifdef EPILOGUE
    unsigned read[4] = {}, saved[4] = {};
#ifdef VARIANT_NCHW_OUTPUT
    if constexpr (kLoadsTensors) load_matrices(read, to);
    if constexpr (kLoadsBoth) load_matrices(saved, to == at.unused ? to : to + kOutBytes);
#else
    if constexpr (kLoadsTensors) load_transposed(read, to);
    if constexpr (kLoadsBoth) load_transposed(saved, to == at.unused ? to : to + kOutBytes);
#endif
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a filter's two pixels
      const int first = 8 * group + 2 * i;
      if (first >= TILE_N / 2) break;
      float pair[2] = {acc[first], acc[first + 1]};
#ifdef EPILOGUE
      float added[2] = {}, argument[2] = {};
      if constexpr (kHasResidual) unpack(added, read[i]);
      if constexpr (kHasSaved) unpack(argument, kLoadsBoth ? saved[i] : read[i]);
      if constexpr (kPairs) {
        finish_pair(pair[0], pair[1], terms[i % 2], terms[i % 2], added, argument, epilogue);
      } else {
        pair[0] = finish(pair[0], terms[i % 2], added[0], argument[0], epilogue);
        pair[1] = finish(pair[1], terms[i % 2], added[1], argument[1], epilogue);
      }
#endif
      words[i] = pack(pair[0], pair[1]);
    }
#ifdef VARIANT_NCHW_OUTPUT
    stmatrix(to, words[0], words[1], words[2], words[3]);
#else
    stmatrix_trans(to, words[0], words[1], words[2], words[3]);
#endif
  }
}

// What a consumer multiplies: a block of filters by a unit's tile.
struct Item {
  int number;    // of all of the block's
  int of_block;  // the block's units before this one
  int filters;   // of the unit's blocks of filters, which
};

// The first of an item's filters of taps among all that are loaded.
__device__ __forceinline__ int first_filters(const Item& item) {
  return (kKeepsFilters ? item.filters : item.number) * CHUNKS * kTaps;
}

// Adds the products of a chunk, `kChunkSteps` steps of 16 channels of it, after those of the chunks before. Two taps
// are under way while the next one is begun: between two a warp would else wait for its turn to issue instructions.
template <int kChunkSteps>
__device__ __forceinline__ void multiply_chunk(Accumulators& acc, const Item& item, int chunk, const Shared& at) {
  const bool signals = threadIdx.x % 32 == 0;
  const int loaded = item.of_block * CHUNKS + chunk, slot = loaded % SLOTS;
  mbarrier_wait(at.slots_full + 8 * slot, loaded / SLOTS & 1);
  const unsigned pixels = at.slots + slot * kSlotBytes;
#pragma unroll(kTaps <= 9 ? FILTER_H : 1)
  for (int r = 0; r < FILTER_H; ++r)
#pragma unroll
    for (int s = 0; s < FILTER_W; ++s) {
      const int step = (chunk * FILTER_H + r) * FILTER_W + s, filters = first_filters(item) + step;
      if (!kKeepsFilters || item.number < CONSUMERS * UNIT_BLOCKS)
        mbarrier_wait(at.filters_full + 8 * (filters % FILTER_STAGES), filters / FILTER_STAGES & 1);
      const unsigned a = at.filters + filters % FILTER_STAGES * kFilterBytes;
      const unsigned b = pixels + (r * DILATION_H * kRowPixels + s * DILATION_W) * kPixelBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunkSteps; ++k)
        Wgmma<ELEMENT>::ss<DATA ? Major::MN : Major::K, Major::K>(
            acc, descriptor_at(kFilterDescriptor, a + k * kFilterStepBytes),
            descriptor_at(kPixelDescriptor, b + 32 * k), step + k > 0);
      wgmma_commit_group();
      const bool ends_chunk = r * FILTER_W + s == 1 && chunk > 0;
      if (!kKeepsFilters || ends_chunk) {
        wgmma_wait_group<2>();  // all taps but these two have been multiplied
        if (!kKeepsFilters && step >= 2 && signals)
          mbarrier_arrive(at.filters_empty + 8 * ((filters - 2) % FILTER_STAGES));
        if (ends_chunk && signals) mbarrier_arrive(at.slots_empty + 8 * ((loaded - 1) % SLOTS));
      }
    }
}

__device__ __forceinline__ void consume(const Shape& shape, int consumer,
#ifdef EPILOGUE
                                        const Epilogue& epilogue,
#endif
                                        const Shared& at) {
  const bool signals = threadIdx.x % 32 == 0;
  int turn = 0;
  for (Item item = {consumer};; item.number += CONSUMERS, ++turn) {
    item.of_block = item.number / UNIT_BLOCKS;
    item.filters = item.number - item.of_block * UNIT_BLOCKS;
    const int number = blockIdx.x + item.of_block * gridDim.x;
    if (number >= shape.units) break;
    Accumulators acc;
    mbarrier_wait(at.turns + 8 * consumer, (turn + (consumer == 0)) & 1);
    int chunk = 0;
    for (; chunk < CHUNKS - (LAST_K_STEPS < kSteps); ++chunk) multiply_chunk<kSteps>(acc, item, chunk, at);
    if constexpr (LAST_K_STEPS < kSteps) multiply_chunk<LAST_K_STEPS>(acc, item, chunk, at);
    if (signals) mbarrier_arrive(at.turns + 8 * ((consumer + 1) % CONSUMERS));
#ifdef EPILOGUE
    const Unit unit = unit_at(shape, number);
    ChannelTerms terms[2];
    read_terms(terms, shape, epilogue, unit, unit.filter + 64 * item.filters);
#endif
    wgmma_wait_group<0>();
    if (signals) {
      if constexpr (!kKeepsFilters)
        for (int i = CHUNKS * kTaps - 2; i < CHUNKS * kTaps; ++i)
          mbarrier_arrive(at.filters_empty + 8 * ((first_filters(item) + i) % FILTER_STAGES));
      mbarrier_arrive(at.slots_empty + 8 * ((item.of_block * CHUNKS + CHUNKS - 1) % SLOTS));
    }
    if (threadIdx.x % 128 / 32 >= kWritingWarps) continue;
    mbarrier_wait(at.places_ready + 8 * consumer, turn & 1);
#ifdef EPILOGUE
    stage_results(at, at.places + consumer * kTensors * kOutBytes, terms, epilogue, acc);
#else
    stage_results(at, at.places + consumer * kTensors * kOutBytes, acc);
#endif
    fence_proxy_async();
    __syncwarp();
    if (signals) mbarrier_arrive(at.places_staged + 8 * consumer);
  }
}

// Stores results once they are staged, and gives the consumer its place again, with what is read with the next ones.
__device__ __forceinline__ void copy_results(const Shape& shape, const TensorMap* map_out, const TensorMap* map_read,
                                             const TensorMap* map_saved, const Shared& at) {
  const auto unit_of = [](int item) { return static_cast<int>(blockIdx.x + item / UNIT_BLOCKS * gridDim.x); };
  const auto make_ready = [&](int item) {
    const int number = unit_of(item), consumer = item % CONSUMERS;
    const unsigned ready = at.places_ready + 8 * consumer, to = at.places + consumer * kTensors * kOutBytes;
    if (number >= shape.units) return;
    if constexpr (kLoadsTensors) {
      const Unit unit = unit_at(shape, number);
      const int filter = unit.filter + 64 * (item % UNIT_BLOCKS);
      mbarrier_arrive_expect_tx(ready, kTensors * kLoadedOutBytes);
#ifdef VARIANT_NCHW_OUTPUT
      tma_load(to, map_read, ready, unit.column, unit.row, filter, unit.image);
      if constexpr (kLoadsBoth) tma_load(to + kOutBytes, map_saved, ready, unit.column, unit.row, filter, unit.image);
#else
      tma_load(to, map_read, ready, filter, unit.column, unit.row, unit.image);
      if constexpr (kLoadsBoth) tma_load(to + kOutBytes, map_saved, ready, filter, unit.column, unit.row, unit.image);
#endif
    } else {
      mbarrier_arrive(ready);
    }
  };
  for (int item = 0; item < CONSUMERS; ++item) make_ready(item);
  for (int item = 0; unit_of(item) < shape.units; ++item) {
    const Unit unit = unit_at(shape, unit_of(item));
    const int consumer = item % CONSUMERS;
    mbarrier_wait(at.places_staged + 8 * consumer, item / CONSUMERS & 1);
#ifdef VARIANT_NCHW_OUTPUT
    tma_store(map_out, at.places + consumer * kTensors * kOutBytes, unit.column, unit.row,
              unit.filter + 64 * (item % UNIT_BLOCKS), unit.image);
#else
    tma_store(map_out, at.places + consumer * kTensors * kOutBytes, unit.filter + 64 * (item % UNIT_BLOCKS),
              unit.column, unit.row, unit.image);
#endif
    tma_store_commit_group();
    tma_store_wait_group_read();
    make_ready(item + CONSUMERS);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    implicit_gemm_wgmma_halo_swapped(const __grid_constant__ TensorMap map_pixels,
                                     const __grid_constant__ TensorMap map_filters,
#ifdef EPILOGUE
                                     const __grid_constant__ TensorMap map_out, const __grid_constant__ Shape shape,
                                     const __grid_constant__ TensorMap map_read,
                                     const __grid_constant__ TensorMap map_saved,
                                     const __grid_constant__ Epilogue epilogue) {
#else
                                     const __grid_constant__ TensorMap map_out, const __grid_constant__ Shape shape) {
#endif
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * (SLOTS + FILTER_STAGES) + 3 * CONSUMERS];
  __shared__ alignas(16) char unused[16];
  Shared at;
  at.slots = (shared_address(shared) + 1023) / 1024 * 1024;
  at.filters = at.slots + SLOTS * kSlotBytes;
  at.places = at.filters + FILTER_STAGES * kFilterBytes;
  at.slots_full = shared_address(barriers);
  at.slots_empty = at.slots_full + 8 * SLOTS;
  at.filters_full = at.slots_empty + 8 * SLOTS;
  at.filters_empty = at.filters_full + 8 * FILTER_STAGES;
  at.turns = at.filters_empty + 8 * FILTER_STAGES;
  at.places_ready = at.turns + 8 * CONSUMERS;
  at.places_staged = at.places_ready + 8 * CONSUMERS;
  at.unused = shared_address(unused);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) {
      mbarrier_init(at.slots_full + 8 * i, 1);
      mbarrier_init(at.slots_empty + 8 * i, 4 * UNIT_BLOCKS);
    }
    for (int i = 0; i < FILTER_STAGES; ++i) {
      mbarrier_init(at.filters_full + 8 * i, 1);
      mbarrier_init(at.filters_empty + 8 * i, 4);
    }
    for (int i = 0; i < CONSUMERS; ++i) {
      mbarrier_init(at.turns + 8 * i, 4);
      mbarrier_init(at.places_ready + 8 * i, 1);
      mbarrier_init(at.places_staged + 8 * i, kWritingWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();                                                      // mbarriers are initialised
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // known to be the same in a warp
  if (warpgroup < CONSUMERS) {
#ifdef EPILOGUE
    consume(shape, warpgroup, epilogue, at);
#else
    consume(shape, warpgroup, at);
#endif
  } else if (threadIdx.x == 128 * CONSUMERS) {
    load_pixels(shape, &map_pixels, at);
  } else if (threadIdx.x == 128 * CONSUMERS + 32) {
    load_filters(shape, &map_filters, at);
  } else if (threadIdx.x == 128 * CONSUMERS + 64) {
#ifdef EPILOGUE
    copy_results(shape, &map_out, &map_read, &map_saved, at);
#else
    copy_results(shape, &map_out, nullptr, nullptr, at);
#endif
  }
}
