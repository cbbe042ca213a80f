// y[n, z, i, j, k] = sum_{t, r, s, c} x[n, z - pad_d + t, i - pad_h + r * DILATION_H, j - pad_w + s * DILATION_W, c] *
// w[k, t, r, s, c], channels last, on Hopper's tensor cores (wgmma) with float32 accumulators; or, if DATA, dx likewise
// from dy, with the filter turned around and w[c, t, r, s, k] read as its transpose.
//
// A pixel is loaded once for all taps: a block keeps TILE_H x TILE_W pixels of outputs and goes along the depth; the
// slices of x that it meets, with the halo that the filter's window needs, stand in a ring of SLICES, where TMA puts
// them, padding as zeros. In two dimensions rows of an image are its depth, and the rows of a slice are of different
// images. M of a product is 64 pixels side by side in a slice, an atom; another tap is the same pixels from another
// address on. If TILE_W is a multiple of 64 an atom is of one row; else atoms go on over the ends of rows, and what
// they compute of the halo there is not written. N is TILE_N filters, K the CHANNELS that are loaded of a pixel, in
// K_STEPS of 16. CONSUMERS warpgroups have ATOMS each. Filters of a tap arrive in a ring of FILTER_STAGES, by a second
// producer warp; if that holds all taps they stay. Grid: column tiles, row tiles, tiles of filters, parts of the depth,
// images.
#include "common/divisor.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(DATA) || !defined(FILTER_D) || !defined(FILTER_H) || !defined(FILTER_W)
#error "define ELEMENT, DATA, FILTER_D, FILTER_H and FILTER_W"
#endif
#if !defined(DILATION_H) || !defined(DILATION_W) || !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_N)
#error "define DILATION_H, DILATION_W, TILE_H, TILE_W and TILE_N"
#endif
#if !defined(CHANNELS) || !defined(K_STEPS) || !defined(CONSUMERS) || !defined(ATOMS)
#error "define CHANNELS, K_STEPS, CONSUMERS and ATOMS"
#endif
#if !defined(SLICES) || !defined(FILTER_STAGES) || !defined(FILTER_COLUMNS) || !defined(BLOCKS) || \
    !defined(SHARED_BYTES)
#error "define SLICES, FILTER_STAGES, FILTER_COLUMNS, BLOCKS and SHARED_BYTES"
#endif
#ifndef SHAPE_FIELDS
#error "define SHAPE_FIELDS, as SHAPE of solvers/implicit_gemm/wgmma_halo.py declares them"
#endif
#define WGMMA_N TILE_N
#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

// out: sizes of the output, with its channels, and elements from an image, a slice or a row to the next; depth: slices
// of the input. A part is `part_depth` slices of outputs. `images_of_row` is 1 where rows are of different images.
struct Shape {
  SHAPE_FIELDS
};

constexpr int kTaps = FILTER_D * FILTER_H * FILTER_W, kThreads = 128 * CONSUMERS + 64;
constexpr bool kKeepsFilters = FILTER_STAGES == kTaps;

// A slice: rows of pixels of CHANNELS channels, swizzled over as many bytes as these are.
constexpr int kPixelBytes = 2 * CHANNELS;
constexpr int kRowPixels = TILE_W + (FILTER_W - 1) * DILATION_W, kRows = TILE_H + (FILTER_H - 1) * DILATION_H;
constexpr int kLoadedSliceBytes = kRows * kRowPixels * kPixelBytes, kSliceBytes = round_up(kLoadedSliceBytes, 1024);
static_assert(kPixelBytes == 32 || kPixelBytes == 64 || kPixelBytes == 128, "a pixel is a span of a swizzle");

// Filters of a tap: forward, TILE_N rows of CHANNELS; of DATA rows of FILTER_COLUMNS, a row for each of the 16 *
// K_STEPS terms of the sum.
constexpr int kTermRows = 16 * K_STEPS, kFilterRows = DATA ? kTermRows : TILE_N;
constexpr int kFilterRowBytes = DATA ? 2 * FILTER_COLUMNS : kPixelBytes;
constexpr int kLoadedFilterBytes = kFilterRows * kFilterRowBytes, kFilterBytes = round_up(kLoadedFilterBytes, 1024);
static_assert(SHARED_BYTES == 1024 + SLICES * kSliceBytes + FILTER_STAGES * kFilterBytes,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// From K-step to K-step, and the descriptors without addresses: eight rows side by side are a pattern of the swizzle.
constexpr unsigned long long kPixelDescriptor = matrix_descriptor(16, 8 * kPixelBytes, kPixelBytes);
constexpr unsigned long long kFilterDescriptor = matrix_descriptor(16, 8 * kFilterRowBytes, kFilterRowBytes);
constexpr int kFilterStepBytes = DATA ? 16 * kFilterRowBytes : 32;

constexpr bool kAtomsOfRows = TILE_W % 64 == 0;
constexpr int kRowAtoms = kAtomsOfRows ? TILE_W / 64 : 1;
constexpr int kAccumulators = TILE_N / 2;

// The first pixel of an atom in a slice.
__device__ __forceinline__ int atom_pixel(int atom) {
  return kAtomsOfRows ? atom / kRowAtoms * kRowPixels + atom % kRowAtoms * 64 : 64 * atom;
}

// What a block computes.
struct Work {
  int image, first_depth, end_depth, row, column, filter;
};

__device__ __forceinline__ Work work_of(const Shape& shape, int block) {
  const int rows = block / shape.column_tiles, columns = block - rows * shape.column_tiles.by;
  const int filters = rows / shape.row_tiles, parts = filters / shape.filter_tiles;
  const int image = parts / shape.parts, first = (parts - image * shape.parts.by) * shape.part_depth;
  return {image,
          first,
          min(first + shape.part_depth, shape.out_depth),
          (rows - filters * shape.row_tiles.by) * TILE_H,
          columns * TILE_W,
          (filters - parts * shape.filter_tiles.by) * TILE_N};
}

// Taps along the depth that meet slices of the input, of an output's slice.
__device__ __forceinline__ int first_tap(const Shape& shape, int depth) {
  return max(0, shape.pad_d - depth);
}
__device__ __forceinline__ int end_tap(const Shape& shape, int depth) {
  return min(FILTER_D, shape.depth + shape.pad_d - depth);
}

__device__ __forceinline__ void tma_load(unsigned to, const TensorMap* map, unsigned barrier, int c, int w, int h,
                                         int slice) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(slice)
      : "memory");
}

// The slices that a block meets, in order, each into the next of the ring.
__device__ __forceinline__ void load_slices(const Shape& shape, const Work& work, const TensorMap* map, unsigned slices,
                                            unsigned full, unsigned empty) {
  const int first = max(0, work.first_depth - shape.pad_d);
  const int end = min(shape.depth, work.end_depth - shape.pad_d + FILTER_D - 1);
  int stage = 0;
  unsigned parity = 1;
  for (int slice = first; slice < end; ++slice) {
    mbarrier_wait(empty + 8 * stage, parity);
    mbarrier_arrive_expect_tx(full + 8 * stage, kLoadedSliceBytes);
    tma_load(slices + stage * kSliceBytes, map, full + 8 * stage, 0, work.column - shape.pad_w, work.row - shape.pad_h,
             work.image * shape.depth + slice);
    if (++stage == SLICES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Filters of the taps that a block multiplies by, in order; all of them once, if they are kept.
__device__ __forceinline__ void load_filters(const Shape& shape, const Work& work, const TensorMap* map,
                                             unsigned filters, unsigned full, unsigned empty) {
  int stage = 0;
  unsigned parity = 1;
  const int end_depth = kKeepsFilters ? work.first_depth + 1 : work.end_depth;
  for (int depth = work.first_depth; depth < end_depth; ++depth) {
    const int first = kKeepsFilters ? 0 : first_tap(shape, depth),
              end = kKeepsFilters ? FILTER_D : end_tap(shape, depth);
    for (int tap = first * FILTER_H * FILTER_W; tap < end * FILTER_H * FILTER_W; ++tap) {
      if (!kKeepsFilters) mbarrier_wait(empty + 8 * stage, parity);
      mbarrier_arrive_expect_tx(full + 8 * stage, kLoadedFilterBytes);
      const unsigned to = filters + stage * kFilterBytes;
      if constexpr (DATA)
        tma_load_tiled(to, map, full + 8 * stage, work.filter, kTaps - 1 - tap, 0);
      else
        tma_load_tiled(to, map, full + 8 * stage, 0, tap, work.filter);
      if (++stage == FILTER_STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// Transposes 4 x 4 words among four neighbouring lanes: lane t has word i of what lane i had as word t.
__device__ __forceinline__ void transpose_words(unsigned (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? got : words[i];
    words[i + 1] = odd ? words[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned got = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + 2], 2);
    words[i] = upper ? got : words[i];
    words[i + 2] = upper ? words[i + 2] : got;
  }
}

// Where a lane's two pixels of an atom are: rows of 8 further on. Four lanes have a pixel.
struct Place {
  int at, image;
  bool is_inside;
};

__device__ __forceinline__ Place place_of(const Shape& shape, const Work& work, int depth, int atom, int half) {
  const int pixel = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
  int row, column;
  if constexpr (kAtomsOfRows) {
    row = atom / kRowAtoms;
    column = atom % kRowAtoms * 64 + pixel;
  } else {
    row = (64 * atom + pixel) / kRowPixels;
    column = 64 * atom + pixel - row * kRowPixels;
  }
  const bool is_inside =
      row < TILE_H && column < TILE_W && work.row + row < shape.out_height && work.column + column < shape.out_width;
  row += work.row;
  column += work.column;
  return {work.image * shape.image_stride + depth * shape.depth_stride + row * shape.row_stride +
              column * shape.out_channels + work.filter,
          work.image + row * shape.images_of_row, is_inside};
}

// Filters are written in groups of 32, of which each of four lanes writes 8 that are side by side in memory.
constexpr int kGroups = ceil_div(TILE_N, 32);

// The first of a group's filters that this lane writes, and whether there is one.
__device__ __forceinline__ int own_filter(int group) {
  return 32 * group + threadIdx.x % 4 * 8;
}
__device__ __forceinline__ bool is_filter(const Shape& shape, const Work& work, int filter) {
  return filter < TILE_N && work.filter + filter < shape.out_channels;
}

#ifdef EPILOGUE
// Scale and bias of this lane's filters: of each block of 8, two side by side.
struct FilterTerms {
  float scale[kHasScale ? TILE_N / 4 : 1], bias[kHasBias ? TILE_N / 4 : 1];
};

__device__ __forceinline__ void read_terms(FilterTerms& terms, const Shape& shape, const Work& work,
                                           const Epilogue& epilogue) {
#pragma unroll
  for (int i = 0; i < TILE_N / 4; ++i) {
    const int filter = work.filter + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (filter >= shape.out_channels) break;
    if constexpr (kHasScale) terms.scale[i] = convert<float>(epilogue.scale[filter]);
    if constexpr (kHasBias) terms.bias[i] = convert<float>(epilogue.bias[filter]);
  }
}

// What is read with an atom's results, as it lies in memory: 8 filters of each group, of both pixels.
template <bool kIsRead>
using AtomWords = unsigned[kIsRead ? 2 : 1][kIsRead ? kGroups : 1][4];
struct AtomTensors {
  AtomWords<kHasResidual> residual;
  AtomWords<kHasSaved> saved;
  AtomWords<kHasChannelBias> channel_bias;
};

__device__ __forceinline__ void read_words(unsigned (&words)[4], const EpilogueElement* from) {
  const uint4 read = *reinterpret_cast<const uint4*>(from);
  words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
}

__device__ __forceinline__ void read_tensors(AtomTensors& tensors, const Shape& shape, const Work& work, int depth,
                                             int atom, const Epilogue& epilogue) {
  if constexpr (!kHasResidual && !kHasSaved && !kHasChannelBias) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Place place = place_of(shape, work, depth, atom, half);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int filter = own_filter(group);
      if (!place.is_inside || !is_filter(shape, work, filter)) continue;
      if constexpr (kHasResidual) read_words(tensors.residual[half][group], epilogue.residual + place.at + filter);
      if constexpr (kHasSaved) read_words(tensors.saved[half][group], epilogue.saved + place.at + filter);
      if constexpr (kHasChannelBias)
        read_words(tensors.channel_bias[half][group],
                   epilogue.channel_bias + place.image * shape.out_channels + work.filter + filter);
    }
  }
}

// An element of two in a word.
__device__ __forceinline__ float element_of(unsigned word, int e) {
  return convert<float>(reinterpret_cast<const Vector<EpilogueElement, 2>*>(&word)->at[e]);
}
#endif

// Writes an atom's results.
__device__ __forceinline__ void store_atom(const Shape& shape, const Work& work, int depth, int atom,
#ifdef EPILOGUE
                                           const Epilogue& epilogue, const FilterTerms& of_filters,
                                           AtomTensors& tensors,
#endif
                                           ELEMENT* __restrict__ y, const float (&acc)[kAccumulators]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Place place = place_of(shape, work, depth, atom, half);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#ifdef EPILOGUE
      if constexpr (kHasResidual) transpose_words(tensors.residual[half][group]);
      if constexpr (kHasSaved) transpose_words(tensors.saved[half][group]);
      if constexpr (kHasChannelBias) transpose_words(tensors.channel_bias[half][group]);
#endif
      unsigned words[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = 4 * group + i;
        if (8 * block >= TILE_N) break;
        float pair[2] = {acc[4 * block + 2 * half], acc[4 * block + 2 * half + 1]};
#ifdef EPILOGUE
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          ChannelTerms terms = {1, 0, 0};
          float residual = 0, saved = 0;
          if constexpr (kHasScale) terms.scale = of_filters.scale[2 * block + e];
          if constexpr (kHasBias) terms.bias = of_filters.bias[2 * block + e];
          if constexpr (kHasChannelBias) terms.channel_bias = element_of(tensors.channel_bias[half][group][i], e);
          if constexpr (kHasResidual) residual = element_of(tensors.residual[half][group][i], e);
          if constexpr (kHasSaved) saved = element_of(tensors.saved[half][group][i], e);
          pair[e] = finish(pair[e], terms, residual, saved, epilogue);
        }
#endif
        const Vector<ELEMENT, 2> rounded = {convert<ELEMENT>(pair[0]), convert<ELEMENT>(pair[1])};
        words[i] = *reinterpret_cast<const unsigned*>(&rounded);
      }
      transpose_words(words);
      const int filter = own_filter(group);
      if (place.is_inside && is_filter(shape, work, filter))
        *reinterpret_cast<uint4*>(y + place.at + filter) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

__device__ __forceinline__ void consume(const Shape& shape, const Work& work, int consumer,
#ifdef EPILOGUE
                                        const Epilogue& epilogue,
#endif
                                        ELEMENT* __restrict__ y, unsigned slices, unsigned slices_full,
                                        unsigned slices_empty, unsigned filters, unsigned filters_full,
                                        unsigned filters_empty) {
  const bool signals = threadIdx.x % 32 == 0;
  const int first_slice = max(0, work.first_depth - shape.pad_d);
  int filter_stage = 0;
  unsigned filter_parity = 0;
  for (int depth = work.first_depth; depth < work.end_depth; ++depth) {
    float acc[ATOMS][kAccumulators];
    const int first = first_tap(shape, depth), end = end_tap(shape, depth);
    int before = -1;
    for (int t = first; t < end; ++t) {
      const int number = depth - shape.pad_d + t - first_slice, stage = number % SLICES;
      mbarrier_wait(slices_full + 8 * stage, number / SLICES & 1);
      const unsigned slice = slices + stage * kSliceBytes;
#pragma unroll
      for (int r = 0; r < FILTER_H; ++r)
#pragma unroll
        for (int s = 0; s < FILTER_W; ++s) {
          const int filter = kKeepsFilters ? (t * FILTER_H + r) * FILTER_W + s : filter_stage;
          if (!kKeepsFilters || depth < work.first_depth + FILTER_D)
            mbarrier_wait(filters_full + 8 * filter, kKeepsFilters ? 0 : filter_parity);
          const unsigned b = filters + filter * kFilterBytes;
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
              const unsigned a =
                  slice + 32 * k +
                  (atom_pixel(consumer * ATOMS + atom) + r * DILATION_H * kRowPixels + s * DILATION_W) * kPixelBytes;
              Wgmma<ELEMENT>::ss<Major::K, DATA ? Major::MN : Major::K>(
                  acc[atom], descriptor_at(kPixelDescriptor, a),
                  descriptor_at(kFilterDescriptor, b + k * kFilterStepBytes), t > first || r + s + k > 0);
            }
          wgmma_commit_group();
          if constexpr (!kKeepsFilters) {
            wgmma_wait_group<1>();  // the tap before has read its filters
            if (before >= 0 && signals) mbarrier_arrive(filters_empty + 8 * before);
            before = filter_stage;
            if (++filter_stage == FILTER_STAGES) {
              filter_stage = 0;
              filter_parity ^= 1;
            }
          }
          if (r == 0 && s == 0 && t == 1) {  // no later output meets the slice of tap 0
            wgmma_wait_group<1>();
            if (first == 0 && signals) mbarrier_arrive(slices_empty + 8 * ((number - 1) % SLICES));
          }
        }
    }
#ifdef EPILOGUE
    FilterTerms of_filters = {};
    read_terms(of_filters, shape, work, epilogue);
    AtomTensors ahead = {};
    read_tensors(ahead, shape, work, depth, consumer * ATOMS, epilogue);  // of the first atom, while it is computed
#endif
    wgmma_wait_group<0>();
    if (!kKeepsFilters && signals) mbarrier_arrive(filters_empty + 8 * before);
    if (end == 1 && signals) mbarrier_arrive(slices_empty + 8 * ((depth - shape.pad_d - first_slice) % SLICES));
#pragma unroll
    for (int i = 0; i < ATOMS; ++i) {
      const int atom = consumer * ATOMS + i;
#ifdef EPILOGUE
      AtomTensors tensors = ahead;
      if (i + 1 < ATOMS) read_tensors(ahead, shape, work, depth, atom + 1, epilogue);
      store_atom(shape, work, depth, atom, epilogue, of_filters, tensors, y, acc[i]);
#else
      store_atom(shape, work, depth, atom, y, acc[i]);
#endif
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma_halo(const __grid_constant__ TensorMap map_pixels,
                             const __grid_constant__ TensorMap map_filters,
#ifdef EPILOGUE
                             ELEMENT* __restrict__ y, const __grid_constant__ Shape shape,
                             const __grid_constant__ Epilogue epilogue) {
#else
                             ELEMENT* __restrict__ y, const __grid_constant__ Shape shape) {
#endif
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * (SLICES + FILTER_STAGES)];
  const unsigned slices = (shared_address(shared) + 1023) / 1024 * 1024, filters = slices + SLICES * kSliceBytes;
  const unsigned slices_full = shared_address(barriers), slices_empty = slices_full + 8 * SLICES;
  const unsigned filters_full = slices_empty + 8 * SLICES, filters_empty = filters_full + 8 * FILTER_STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLICES; ++i) {
      mbarrier_init(slices_full + 8 * i, 1);
      mbarrier_init(slices_empty + 8 * i, 4 * CONSUMERS);
    }
    for (int i = 0; i < FILTER_STAGES; ++i) {
      mbarrier_init(filters_full + 8 * i, 1);
      mbarrier_init(filters_empty + 8 * i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // mbarriers are initialised
  const Work work = work_of(shape, blockIdx.x);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < CONSUMERS) {
    consume(shape, work, warpgroup,
#ifdef EPILOGUE
            epilogue,
#endif
            y, slices, slices_full, slices_empty, filters, filters_full, filters_empty);
  } else if (threadIdx.x == 128 * CONSUMERS) {
    load_slices(shape, work, &map_pixels, slices, slices_full, slices_empty);
  } else if (threadIdx.x == 128 * CONSUMERS + 32) {
    load_filters(shape, work, &map_filters, filters, filters_full, filters_empty);
  }
}
