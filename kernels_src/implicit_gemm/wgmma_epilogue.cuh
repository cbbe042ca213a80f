// Of kernels_src/implicit_gemm/wgmma.cu, the epilogue: how accumulators leave the registers for the output, for a
// split-K partial in memory, or for a partial in the shared memory of a cluster.
#pragma once

#include "implicit_gemm/wgmma_producer.cuh"
#ifdef EPILOGUE
#include "common/copy_bytes.cuh"
#include "common/epilogue.cuh"
#include "common/epilogue_vectors.cuh"
#include "common/mma.cuh"
#include "common/opaque.cuh"
#include "common/statistics.cuh"
#include "common/tile.cuh"
static_assert(KIND != WEIGHTS || EPILOGUE_BIAS_GRADIENT, "a problem's epilogue follows sums of pixels");
#endif

// Offset in a swizzled block of 64 rows of a row's 16-byte word.
__device__ __forceinline__ int swizzled_offset(int row, int word) {
  return row * kOutSwizzle + 16 * (word ^ (row * kOutSwizzle / 128 & (kOutSwizzle / 16 - 1)));
}

__device__ __forceinline__ unsigned pack(float first, float second) {
  Vector<ELEMENT, 2> pair;
  pair.at[0] = convert<ELEMENT>(first);
  pair.at[1] = convert<ELEMENT>(second);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Rounds a block of 64 rows of accumulators into shared memory; with A and B swapped, as 64 pixels of 64 filters.
__device__ __forceinline__ void stage_block(unsigned out, int warp, int lane, const float* acc) {
  if constexpr (SWAPPED) {
    const int word = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2, acc += 8)
      stmatrix_trans(out + swizzled_offset(8 * j + lane / 16 * 8 + lane % 8, word), pack(acc[0], acc[1]),
                     pack(acc[2], acc[3]), pack(acc[4], acc[5]), pack(acc[6], acc[7]));
  } else if constexpr (kElementBytes == 2) {
    const int row = 16 * warp + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int j = 0; j < kBlockN / 16; j++, acc += 8)
      stmatrix(out + swizzled_offset(row, 2 * j + half), pack(acc[0], acc[1]), pack(acc[2], acc[3]),
               pack(acc[4], acc[5]), pack(acc[6], acc[7]));
  } else {
    const int row = 16 * warp + lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; j++, acc += 4)
#pragma unroll
      for (int below = 0; below < 2; below++)
        store_shared_pair(out + swizzled_offset(row + 8 * below, 2 * j + t / 2) + 8 * (t % 2), acc[2 * below],
                          acc[2 * below + 1]);
  }
}

// SEGMENT neighbouring pixels of a channel of an NCHW output, aligned to their size.
using Segment = Vector<ELEMENT, SEGMENT>;

// Offset in an NCHW output of the pixel that a column is, in the plane of the group's first row; -1 beyond the image.
__device__ __forceinline__ int64 nchw_offset(const Shape& shape, const WorkTile& tile, int column) {
  int n, at;
  if constexpr (NCHW == NCHW_ALL) {
    const Pixel block = pixel_at(shape.walk, column / kBlockN);
    n = block.n;
    at = block.w * kBlockN + column % kBlockN;
  } else {
#ifdef VARIANT_VOLUME
    n = column / shape.volume.image;
    at = column - n * shape.volume.image.by;
#else
    const Pixel pixel = pixel_at(shape.walk, column);
    n = pixel.n;
    at = pixel.h * shape.walk.width.by + pixel.w;
#endif
  }
  if (at >= shape.image_pixels) return -1;
  return (static_cast<int64>(n) * shape.groups + tile.group) * shape.size_m * shape.image_pixels + at;
}

#ifdef EPILOGUE
// Where one result is: its channel among those of all groups, its image, and its element of the output.
struct ResultPlace {
  int channel, image;
  int64 at;
};

// The place of an element of the product that is inside the output; `at` is -1 for one that is not.
__device__ __forceinline__ ResultPlace result_place(const Shape& shape, const WorkTile& tile, int row, int column) {
  if (row >= shape.size_m || column >= shape.size_n) return {0, 0, -1};
  if constexpr (kPixelsAreN && NCHW) {
    const int64 plane = nchw_offset(shape, tile, column);
    if (plane < 0) return {0, 0, -1};
    const int64 image_size = static_cast<int64>(shape.groups) * shape.size_m * shape.image_pixels;
    return {tile.group * shape.size_m + row, kHasChannelBias ? static_cast<int>(plane / image_size) : 0,
            plane + static_cast<int64>(row) * shape.image_pixels};
  } else {
    const int pixel = SWAPPED ? column : out_row(shape, tile, row), channel = SWAPPED ? row : column;
    const int channels = SWAPPED ? shape.size_m : shape.size_n;
    if (STRIDED && pixel < 0) return {0, 0, -1};
    return {tile.group * channels + channel, kHasChannelBias ? pixel / shape.image_pixels : 0,
            (static_cast<int64>(pixel) * shape.groups + tile.group) * channels + channel};
  }
}

// The result of an element of the product, not rounded; 0 for one outside the output.
__device__ __forceinline__ float result_of(float sum, const Shape& shape, const WorkTile& tile,
                                           const Epilogue& epilogue, int row, int column) {
  if constexpr (KIND == WEIGHTS) return sum;
  const ResultPlace place = result_place(shape, tile, row, column);
  if (place.at < 0) return 0;
  const int channels = shape.groups * (kPixelsAreN ? shape.size_m : shape.size_n);
  return finish_at(sum, epilogue, place.image, place.channel, channels, place.at);
}

// Whether what is read with a tile's results is loaded to where these will be staged: the residual, or `saved` where
// there is none. It is loaded by TMA, or by copies of all threads, of segments of an NCHW output and of strided
// backward data, whose rows are not neighbours in dx. With both `saved` is loaded to buffers behind those of all
// consumers.
constexpr bool kCopiesSegments = NCHW == NCHW_OUTPUT && SEGMENT * kElementBytes >= 4 && !(kHasResidual && kHasSaved);
constexpr bool kLoadsTensors =
    (kHasResidual || kHasSaved) && CLUSTER_K == 1 && (NCHW != NCHW_OUTPUT || kCopiesSegments);
constexpr bool kCopiesTensors = kLoadsTensors && (STRIDED || NCHW == NCHW_OUTPUT);
constexpr bool kLoadsBoth = kLoadsTensors && kHasResidual && kHasSaved;
constexpr unsigned kSavedOffset = 2 * CONSUMERS * kOutBlockBytes;

// The loads of these for a consumer's tiles. `base` is the first of its two buffers in shared memory, `full` its
// mbarriers, one a buffer; `parity` has a bit for each, of the phase that is next to complete.
struct TensorLoads {
  const TensorMap *map, *map_saved;
  unsigned base, full, parity;

  __device__ __forceinline__ int number(unsigned buffer) const { return buffer == base ? 0 : 1; }

  // Begins to load what is read with a block of the output, as `tma_store_block` stores it.
  __device__ __forceinline__ void load(const Shape& shape, const WorkTile& tile, unsigned buffer, int first_m,
                                       int block) const {
    const unsigned barrier = full + 8 * number(buffer);
    mbarrier_arrive_expect_tx(barrier, kLoadsBoth ? 2 * kOutBlockBytes : kOutBlockBytes);
    if constexpr (SWAPPED) {
      load_box(buffer, barrier, first_m, tile.group, tile.tile_n * kTileN + kOutBlockN * block);
    } else if constexpr (kNchwN) {
      const Pixel pixels = pixel_at(shape.walk, tile.tile_n * kNBlocks + block);
      load_box(buffer, barrier, pixels.w * kBlockN, tile.group * shape.size_m + first_m, pixels.n);
    } else {
      load_box(buffer, barrier, n_block_at(shape, tile.tile_n, block).first, tile.group, first_m);
    }
  }

  __device__ __forceinline__ void load_box(unsigned buffer, unsigned barrier, int first, int second, int third) const {
    tma_load_tiled(buffer, map, barrier, first, second, third);
    if constexpr (kLoadsBoth) tma_load_tiled(buffer + kSavedOffset, map_saved, barrier, first, second, third);
  }

  __device__ __forceinline__ void wait(unsigned buffer) {
    mbarrier_wait(full + 8 * number(buffer), parity >> number(buffer) & 1);
    parity ^= 1 << number(buffer);
  }
};

// A block of a consumer's part of a tile: 64 rows from `first_m` on.
struct OutBlock {
  int first_m, block;
};

__device__ __forceinline__ bool is_written(const Shape& shape, const WorkTile& tile, const OutBlock& at) {
  if (at.first_m >= shape.size_m) return false;
  if constexpr (SWAPPED) return tile.tile_n * kTileN + at.block * kOutBlockN < shape.size_n;
  return is_inside(shape, n_block_at(shape, tile.tile_n, at.block));
}

// The block that is written after another, in the order of `write_tile`; its `first_m` is beyond all rows after the
// last.
__device__ __forceinline__ OutBlock next_block(const Shape& shape, const WorkTile& tile, int consumer, OutBlock at) {
  if (++at.block < kTileN / kOutBlockN && is_written(shape, tile, at)) return at;
  const int end = tile.tile_m * kTileM + 64 * (consumer + 1) * ROWS;
  return {at.first_m + 64 < end ? at.first_m + 64 : shape.size_m, 0};
}

// Begins to load what is read with a tile's first two blocks, once stores have left their buffers. The kernel before
// (PDL) may write it.
__device__ __forceinline__ void load_first_tensors(const Shape& shape, const WorkTile& tile, const TensorLoads& loads,
                                                   unsigned buffer, unsigned other, int consumer) {
  OutBlock at = {tile.tile_m * kTileM + 64 * consumer * ROWS, 0};
  if (!is_written(shape, tile, at)) return;
  griddepcontrol_wait();
  tma_store_wait_group_read();
  loads.load(shape, tile, buffer, at.first_m, at.block);
  at = next_block(shape, tile, consumer, at);
  if (is_written(shape, tile, at)) loads.load(shape, tile, other, at.first_m, at.block);
}

// Begins to copy what is read with a block of dx of strided backward data, to where `write_rows` takes such a block
// from.
__device__ __forceinline__ void copy_rows(const Shape& shape, const WorkTile& tile, const Epilogue& epilogue,
                                          unsigned buffer, int first_m, int first_column) {
  constexpr int kWords = kOutSwizzle / 16, kRows = 128 / kWords;
  const int word = threadIdx.x % 128 % kWords, column = first_column + word * (16 / kElementBytes);
  if (column >= shape.size_n) return;
#pragma unroll 1  // else the widest accumulators would spill
  for (int row = threadIdx.x % 128 / kWords; row < 64; row += kRows) {
    const int line = out_row(shape, tile, first_m + row);
    if (line < 0) continue;
    const int64 from = (static_cast<int64>(line) * shape.groups + tile.group) * shape.size_n + column;
    const unsigned to = buffer + swizzled_offset(row, word);
    copy_bytes<16>(to, (kHasResidual ? epilogue.residual : epilogue.saved) + from, true);
    if constexpr (kLoadsBoth) copy_bytes<16>(to + kSavedOffset, epilogue.saved + from, true);
  }
}

// The same of an NCHW output, for `write_nchw`.
__device__ __forceinline__ void copy_segments(const Shape& shape, const WorkTile& tile, const Epilogue& epilogue,
                                              unsigned buffer, int first_m, int first_column) {
  constexpr int kSegments = kBlockN / SEGMENT, kBytes = kCopiesSegments ? SEGMENT * kElementBytes : 16;
  const int at = threadIdx.x % 128 % kSegments * SEGMENT, column = first_column + at;
  if (column >= shape.size_n) return;
  const EpilogueElement* const plane =
      (kHasResidual ? epilogue.residual : epilogue.saved) + nchw_offset(shape, tile, column);
#pragma unroll 1
  for (int row = threadIdx.x % 128 / kSegments; row < 64 && first_m + row < shape.size_m; row += 128 / kSegments) {
    const unsigned to = buffer + swizzled_offset(row, kElementBytes * at / 16) + kElementBytes * at % 16;
    copy_bytes<kBytes>(to, plane + static_cast<int64>(first_m + row) * shape.image_pixels, true);
  }
}

// Begins to copy what is read with a block, if the block is written.
__device__ __forceinline__ void copy_block(const Shape& shape, const WorkTile& tile, const Epilogue& epilogue,
                                           unsigned buffer, const OutBlock& at) {
  if (!is_written(shape, tile, at)) return;
  const int first_column = n_block_at(shape, tile.tile_n, at.block).first;
  if constexpr (kCopiesSegments)
    copy_segments(shape, tile, epilogue, buffer, at.first_m, first_column);
  else
    copy_rows(shape, tile, epilogue, buffer, at.first_m, first_column);
}

// Begins to copy it for a tile's first two blocks, once all threads of the warpgroup have written those of the tile
// before. The kernel before (PDL) may write what is copied.
__device__ __forceinline__ void copy_first_blocks(const Shape& shape, const WorkTile& tile, const Epilogue& epilogue,
                                                  unsigned buffer, unsigned other, int consumer) {
  const OutBlock at = {tile.tile_m * kTileM + 64 * consumer * ROWS, 0};
  griddepcontrol_wait();
  warpgroup_sync(1 + consumer);  // both buffers have been read
  copy_block(shape, tile, epilogue, buffer, at);
  if (is_written(shape, tile, at)) copy_block(shape, tile, epilogue, other, next_block(shape, tile, consumer, at));
  commit_copies();
}

// Scale and bias of the channels of a consumer's part of a tile. The kernel before (PDL) may write them.
__device__ __forceinline__ TermsAhead read_tile_terms_ahead(const Shape& shape, const WorkTile& tile,
                                                            const Epilogue& epilogue, int consumer) {
  constexpr int kCount = kPixelsAreN ? 64 * ROWS : kTileN;
  const int first = kPixelsAreN ? tile.tile_m * kTileM + kCount * consumer : tile.tile_n * kTileN;
  const int channels = kPixelsAreN ? shape.size_m : shape.size_n, number = threadIdx.x % 128;
  if (!(kHasScale || kHasBias) || number > kCount / kTermsAhead) return {};
  griddepcontrol_wait();
  return read_terms_ahead(epilogue, tile.group * channels + min(first + number * kTermsAhead, channels - 1));
}

// Where a thread's part of group 0 of a block is staged, 16 columns of it, as `stage_block` lays it.
__device__ __forceinline__ unsigned first_staged(unsigned block) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if constexpr (SWAPPED) return block + swizzled_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  if constexpr (kElementBytes == 2) return block + swizzled_offset(16 * warp + (lane & 15), lane >> 4);
  return block + swizzled_offset(16 * warp + lane / 4, lane % 4 / 2) + 8 * (lane % 2);
}

// The same of group `g`: blocks are aligned to their rows, so that words are swizzled by bits of an address.
__device__ __forceinline__ unsigned staged_group(unsigned first, int g) {
  return SWAPPED ? first + 16 * g * kOutSwizzle : first ^ 16 * g * kElementBytes;
}

// Of float32: a pair of a thread's 8 results of a group.
__device__ __forceinline__ unsigned staged_pair(unsigned group, int i) {
  return (group ^ i / 4 * 32) + i / 2 % 2 * 8 * kOutSwizzle;
}

// What is read with 8 accumulators of each thread, as it is in memory.
struct TensorGroup {
  unsigned words[kElementBytes / 2][4];

  __device__ __forceinline__ float at(int i) const {
    return convert<float>(reinterpret_cast<const EpilogueElement*>(words)[i]);
  }
};

// What was loaded to where a group will be staged; nothing unless tensors are loaded.
__device__ __forceinline__ TensorGroup read_group(unsigned group) {
  TensorGroup read = {};
  if constexpr (!kLoadsTensors) return read;
  if constexpr (SWAPPED) {
    load_transposed(read.words[0], group);
  } else if constexpr (kElementBytes == 2) {
    load_matrices(read.words[0], group);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      unsigned pair[2];
      load_shared(pair, staged_pair(group, i));
      read.words[i / 4][i % 4] = pair[0];
      read.words[i / 4][i % 4 + 1] = pair[1];
    }
  }
  return read;
}

// Two neighbours in memory as they are there.
template <typename T>
struct RawPair {
  Vector<unsigned, sizeof(T) / 2> words = {};

  __device__ __forceinline__ void read(const T* from) { words = *reinterpret_cast<const decltype(words)*>(from); }
  __device__ __forceinline__ float at(int k) const {
    return convert<float>(reinterpret_cast<const Vector<T, 2>*>(&words)->at[k]);
  }
};

// Terms of the results of a block that a thread has: of rows `row` and row + 8, and pairs of columns from its first on.
// `read` is called for a pair ahead of `at` for its results.
template <bool kChannelsAreRows>
struct BlockTerms;

// A pair's columns are two neighbouring channels.
template <>
struct BlockTerms<false> {
  struct Pair {
    RawPair<EpilogueParameter> scale, bias;
    RawPair<EpilogueElement> channel_bias[2];  // of both rows
  };

  const Epilogue& epilogue;
  int64 first;     // of the thread's channels, among those of all groups
  int64 image[2];  // of both rows: where its channel_bias begins
  int left;        // columns from the first on that exist: an even number

  __device__ __forceinline__ BlockTerms(const Shape& shape, const WorkTile& tile, const Epilogue& of, int row,
                                        int column)
      : epilogue(of) {
    first = static_cast<int64>(tile.group) * shape.size_n + column;
    left = shape.size_n - column;
    if constexpr (kHasChannelBias)
#pragma unroll
      for (int below = 0; below < 2; below++)
        image[below] = static_cast<int64>(min(row + 8 * below, shape.size_m - 1) / shape.image_pixels) * shape.groups *
                       shape.size_n;
  }

  __device__ __forceinline__ Pair read(int behind) const {
    Pair pair;
    if (behind >= left) return pair;
    const int64 channel = first + behind;
    if constexpr (kHasScale) pair.scale.read(epilogue.scale + channel);
    if constexpr (kHasBias) pair.bias.read(epilogue.bias + channel);
    if constexpr (kHasChannelBias)
#pragma unroll
      for (int below = 0; below < 2; below++)
        pair.channel_bias[below].read(epilogue.channel_bias + image[below] + channel);
    return pair;
  }

  __device__ __forceinline__ ChannelTerms at(const Pair& pair, int below, int column) const {
    ChannelTerms terms = {1, 0, 0};
    if constexpr (kHasScale) terms.scale = pair.scale.at(column % 2);
    if constexpr (kHasBias) terms.bias = pair.bias.at(column % 2);
    if constexpr (kHasChannelBias) terms.channel_bias = pair.channel_bias[below].at(column % 2);
    return terms;
  }
};

// Rows are channels, columns pixels: most often of one image.
template <>
struct BlockTerms<true> {
  struct Pair {};

  const Shape& shape;
  const Epilogue& epilogue;
  int first_column;
  bool is_one_image;
  int64 channel[2];
  ChannelTerms terms[2];  // of the image of the block's first column

  __device__ __forceinline__ BlockTerms(const Shape& of, const WorkTile& tile, const Epilogue& with, int row,
                                        int column)
      : shape(of), epilogue(with), first_column(column) {
    const int block = column / kOutBlockN * kOutBlockN, last = min(block + kOutBlockN, shape.size_n) - 1;
    const int image = kHasChannelBias ? image_of(block) : 0;
    is_one_image = !kHasChannelBias || kNchwN || image_of(last) == image;
#pragma unroll
    for (int below = 0; below < 2; below++) {
      channel[below] = static_cast<int64>(tile.group) * shape.size_m + min(row + 8 * below, shape.size_m - 1);
      terms[below] = channel_terms(epilogue, image, channel[below], shape.groups * shape.size_m);
    }
  }

  __device__ __forceinline__ int image_of(int column) const {
#ifdef VARIANT_VOLUME
    if constexpr (!kNchwN) return column / shape.volume.image;
#endif
    return pixel_at(shape.walk, kNchwN ? column / kBlockN : column).n;
  }

  __device__ __forceinline__ Pair read(int) const { return {}; }

  __device__ __forceinline__ ChannelTerms at(const Pair&, int below, int column) const {
    ChannelTerms here = terms[below];
    if constexpr (kHasChannelBias && !kNchwN)
      if (!is_one_image) {
        const int64 image = image_of(min(first_column + column, shape.size_n - 1));
        here.channel_bias = convert<float>(epilogue.channel_bias[image * shape.groups * shape.size_m + channel[below]]);
      }
    return here;
  }
};

// Rounds 8 results of each thread to where a group is staged.
__device__ __forceinline__ void stage_group(unsigned group, const float (&results)[8]) {
  if constexpr (SWAPPED) {
    stmatrix_trans(group, pack(results[0], results[1]), pack(results[2], results[3]), pack(results[4], results[5]),
                   pack(results[6], results[7]));
  } else if constexpr (kElementBytes == 2) {
    stmatrix(group, pack(results[0], results[1]), pack(results[2], results[3]), pack(results[4], results[5]),
             pack(results[6], results[7]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) store_shared_pair(staged_pair(group, i), results[i], results[i + 1]);
  }
}

// Stages the results of a block of 64 rows of accumulators, 16 columns at a time: all results at once would spill. What
// is loaded is where they will be staged; a group's inputs are read ahead of the group before.
__device__ __forceinline__ void finish_block(const Shape& shape, const WorkTile& tile, const Epilogue& epilogue,
                                             unsigned staging, int first_m, int first_column, const float* acc) {
  constexpr int kGroups = kOutBlockN / 16;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int row = first_m + 16 * warp + lane / 4;
  const int column = first_column + 2 * (lane % 4);
  const unsigned first = opaque(first_staged(staging));  // else addresses of all blocks are kept in registers
  const BlockTerms<kPixelsAreN> terms(shape, tile, epilogue, row, column);
  typename BlockTerms<kPixelsAreN>::Pair pairs[kGroups][2] = {{terms.read(0), terms.read(8)}};
  TensorGroup loaded[kGroups] = {read_group(first)};
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    if (g + 1 < kGroups) {
      pairs[g + 1][0] = terms.read(16 * g + 16);
      pairs[g + 1][1] = terms.read(16 * g + 24);
      loaded[g + 1] = read_group(staged_group(first, g + 1));
    }
    const TensorGroup saved = kLoadsBoth ? read_group(staged_group(first, g) + kSavedOffset) : loaded[g];
    float results[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // a pair of a row's neighbouring columns
      const int below = i / 2 % 2, behind = 16 * g + i / 4 * 8;
      float added[2] = {}, arguments[2] = {};
#pragma unroll
      for (int k = 0; k < 2; k++) {
        if constexpr (kLoadsTensors && kHasResidual) added[k] = loaded[g].at(i + k);
        if constexpr (kLoadsTensors && kHasSaved) arguments[k] = saved.at(i + k);
        if constexpr ((kHasResidual || kHasSaved) && !kLoadsTensors)
          if (const ResultPlace place = result_place(shape, tile, row + 8 * below, column + behind + k);
              place.at >= 0) {
            if constexpr (kHasResidual) added[k] = convert<float>(epilogue.residual[place.at]);
            if constexpr (kHasSaved) arguments[k] = convert<float>(epilogue.saved[place.at]);
          }
      }
      results[i] = acc[8 * g + i];
      results[i + 1] = acc[8 * g + i + 1];
      finish_pair(results[i], results[i + 1], terms.at(pairs[g][i / 4], below, behind),
                  terms.at(pairs[g][i / 4], below, behind + 1), added, arguments, epilogue);
    }
    stage_group(staged_group(first, g), results);
  }
}

#if EPILOGUE_STATISTICS
// Sums of the results of each channel, and of their squares, from where a block is staged.
static_assert(kElementBytes == 2 && CLUSTER_K == 1, "statistics are summed of staged 16-bit results");
constexpr bool kChannelsAreColumns = SWAPPED || !kPixelsAreN;
constexpr int kBlockChannels = kChannelsAreColumns && !SWAPPED ? kBlockN : 64;
constexpr int kBlockPixels = kChannelsAreColumns ? 64 : kBlockN;
constexpr int kWarpChannels = (kBlockChannels + 31) / 32;  // eights of channels that a warp sums
static_assert(kBlockChannels % 32 == 0 || kBlockChannels == 16, "all warps sum as many eights, or two one each");
static_assert(kBlockPixels % 32 == 0, "32 pixels are loaded at once");

using ChannelSums = float[kWarpChannels][4];  // a warp's products, as `add_pixels` makes them

// Pixels of a block that the output has; the first `kBlockPixels` of more.
__device__ __forceinline__ int pixels_inside(const Shape& shape, const WorkTile& tile, int first_m, int first_column) {
  if constexpr (!kPixelsAreN) return shape.size_m - first_m;
  if constexpr (kNchwN) return shape.image_pixels - pixel_at(shape.walk, first_column / kBlockN).w * kBlockN;
  return shape.size_n - first_column;
}

// 32 pixels of 8 channels of a staged block as `add_pixels` takes them, 0 from pixel number `inside` on.
__device__ __forceinline__ void load_pixels(unsigned (&pixels)[4], unsigned from, int eight, int part, int inside) {
  const int lane = threadIdx.x % 32;
  if constexpr (kChannelsAreColumns)
    load_transposed(pixels, from + swizzled_offset(32 * part + lane, eight));
  else
    load_matrices(pixels, from + swizzled_offset(8 * eight + lane % 8, 4 * part + lane / 8));
  if (inside >= kBlockPixels) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int behind = 32 * part + 8 * i + 2 * (lane % 4) - opaque(inside);  // at least 0: beyond the output
    pixels[i] &= behind >= 0 ? 0 : behind == -1 ? 0xffff : ~0u;
  }
}

// Adds the sums of a staged block, of its first `inside` pixels. Neighbouring products do not wait for each other.
__device__ __forceinline__ void add_sums(ChannelSums& sums, unsigned from, int inside) {
  const int warp = threadIdx.x % 128 / 32;
  if (kBlockChannels % 32 != 0 && warp >= kBlockChannels / 8) return;
#pragma unroll
  for (int part = 0; part < kBlockPixels / 32; part++) {
    unsigned pixels[kWarpChannels][4];
#pragma unroll
    for (int i = 0; i < kWarpChannels; i++) load_pixels(pixels[i], from, warp + 4 * i, part, inside);
#pragma unroll
    for (int k = 0; k < 4; k += 2)
#pragma unroll
      for (int i = 0; i < kWarpChannels; i++) add_pixels<ELEMENT>(sums[i], pixels[i][k], pixels[i][k + 1]);
  }
}

// Writes the sums of a block's channels, from `first` of the group on, to [2][parts][channels]: over a part of the
// pixels.
__device__ __forceinline__ void write_sums(const Shape& shape, const WorkTile& tile, const ChannelSums& sums, int first,
                                           int part, float* statistics) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int of_group = kPixelsAreN ? shape.size_m : shape.size_n, channels = shape.groups * of_group;
  const int parts = kPixelsAreN ? shape.grid.tiles_n.by : (shape.size_m + 63) / 64;
#pragma unroll
  for (int i = 0; i < kWarpChannels; i++) {
    const int eight = warp + 4 * i, channel = first + 8 * eight + lane / 4;
    if (!holds_channel(lane) || eight >= kBlockChannels / 8 || channel >= of_group) continue;
    statistics[part * channels + tile.group * of_group + channel] = sum_of(sums[i], lane);
    statistics[(part + parts) * channels + tile.group * of_group + channel] = squares_of(sums[i], lane);
  }
}
#endif
#endif

// Writes a staged block to an NCHW output, segment by segment: its columns are pixels, and images end anywhere in it.
__device__ __forceinline__ void write_nchw(const Shape& shape, const WorkTile& tile, unsigned from, int first_m,
                                           int first_column, ELEMENT* result) {
  constexpr int kSegments = kBlockN / SEGMENT;
  const int at = threadIdx.x % 128 % kSegments * SEGMENT, column = first_column + at;
  if (column >= shape.size_n) return;
  ELEMENT* const plane = result + nchw_offset(shape, tile, column);
  for (int row = threadIdx.x % 128 / kSegments; row < 64 && first_m + row < shape.size_m; row += 128 / kSegments) {
    const unsigned run = from + swizzled_offset(row, kElementBytes * at / 16) + kElementBytes * at % 16;
    *reinterpret_cast<Segment*>(plane + static_cast<int64>(first_m + row) * shape.image_pixels) =
        *reinterpret_cast<const Segment*>(__cvta_shared_to_generic(run));
  }
}

// Writes a staged block row by row: of strided backward data, they are not neighbours in dx.
__device__ __forceinline__ void write_rows(const Shape& shape, const WorkTile& tile, unsigned from, int first_m,
                                           int first_column, ELEMENT* result) {
  constexpr int kWords = kOutSwizzle / 16, kRows = 128 / kWords;
  const int word = threadIdx.x % 128 % kWords, column = first_column + word * (16 / kElementBytes);
  if (column >= shape.size_n) return;
#pragma unroll
  for (int row = threadIdx.x % 128 / kWords; row < 64; row += kRows) {
    const int line = out_row(shape, tile, first_m + row);
    if (line < 0) continue;
    *reinterpret_cast<Vector<float, 4>*>(
        result + (static_cast<int64>(line) * shape.groups + tile.group) * shape.size_n + column) =
        *reinterpret_cast<const Vector<float, 4>*>(__cvta_shared_to_generic(from + swizzled_offset(row, word)));
  }
}

// Begins to store a staged block.
__device__ __forceinline__ void tma_store_block(const Shape& shape, const WorkTile& tile, const TensorMap* target,
                                                unsigned from, int first_m, int block) {
  if constexpr (SWAPPED) {
    tma_store(target, from, first_m, tile.group, tile.tile_n * kTileN + kOutBlockN * block);
  } else if constexpr (kNchwN) {
    const Pixel pixels = pixel_at(shape.walk, tile.tile_n * kNBlocks + block);
    tma_store(target, from, pixels.w * kBlockN, tile.group * shape.size_m + first_m, pixels.n);
  } else {
    const NBlock n_block = n_block_at(shape, tile.tile_n, block);
    if constexpr (KIND == WEIGHTS)
      tma_store(target, from, n_block.first, n_block.tap, tile.group * shape.size_m + first_m);
    else
      tma_store(target, from, n_block.first, tile.group, first_m);
  }
  tma_store_commit_group();
}

// Writes the tile's accumulators as elements, block by block, through two buffers of this consumer in shared memory:
// `buffer` is the next block's, `other` the one after's.
__device__ __forceinline__ void write_tile(const Shape& shape, const WorkTile& tile, const TensorMap* target,
#ifdef EPILOGUE
                                           const Epilogue& epilogue, TensorLoads& loads, float* statistics,
#endif
                                           ELEMENT* result, unsigned& buffer, unsigned& other, int consumer,
                                           const float (&acc)[ROWS][kAccumulators]) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int first_m = tile.tile_m * kTileM + 64 * (consumer * ROWS + r);
    if (first_m >= shape.size_m) break;
#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
    ChannelSums sums = {};
    int summed = -1;  // first column of the last block that they are of; a cluster's tile may have none
#endif
#endif
#pragma unroll
    for (int block = 0; block < kTileN / kOutBlockN; block++) {
      const int first_column = tile.tile_n * kTileN + block * kOutBlockN;
      if (SWAPPED ? first_column >= shape.size_n : !is_inside(shape, n_block_at(shape, tile.tile_n, block))) break;
#ifdef EPILOGUE
      if constexpr (kCopiesTensors) {
        wait_for_copies<0>();
        warpgroup_sync(1 + consumer);  // all threads' copies have arrived
      } else if constexpr (kLoadsTensors) {
        loads.wait(buffer);
      }
      if constexpr (KIND == WEIGHTS)
        stage_block(buffer, thread / 32, thread % 32, acc[r] + block * kOutBlockN / 2);
      else
        finish_block(shape, tile, epilogue, buffer, first_m, first_column, acc[r] + block * kOutBlockN / 2);
#else
      stage_block(buffer, thread / 32, thread % 32, acc[r] + block * kOutBlockN / 2);
#endif
      fence_proxy_async();
      if (thread == 0) tma_store_wait_group_read();  // the other buffer, where the next block goes
#ifdef EPILOGUE
      if constexpr (kLoadsTensors && !kCopiesTensors)
        if (thread == 0 && (r > 0 || block > 0)) {
          const OutBlock next = next_block(shape, tile, consumer, {first_m, block});
          if (is_written(shape, tile, next)) loads.load(shape, tile, other, next.first_m, next.block);
        }
#endif
      warpgroup_sync(1 + consumer);  // the block is staged
#ifdef EPILOGUE
      if constexpr (kCopiesTensors)  // all have written the block before
        if (r > 0 || block > 0) {
          copy_block(shape, tile, epilogue, other, next_block(shape, tile, consumer, {first_m, block}));
          commit_copies();
        }
#endif
      if constexpr (NCHW == NCHW_OUTPUT)
        write_nchw(shape, tile, buffer, first_m, first_column, result);
      else if constexpr (STRIDED)
        write_rows(shape, tile, buffer, first_m, first_column, result);
      else if (thread == 0)
        tma_store_block(shape, tile, target, buffer, first_m, block);
#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
      if (!kPixelsAreN && block > 0) {  // not right after the products, which take a while
        write_sums(shape, tile, sums, summed, first_m / 64, statistics);
#pragma unroll
        for (int i = 0; i < kWarpChannels; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) sums[i][k] = 0;
      }
      summed = first_column;
      add_sums(sums, buffer, pixels_inside(shape, tile, first_m, first_column));
      if constexpr (kLoadsTensors) warpgroup_sync(1 + consumer);  // all have read it: the next load may come
#endif
#endif
      const unsigned written = buffer;
      buffer = other;
      other = written;
    }
#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
    if (summed >= 0)
      write_sums(shape, tile, sums, kPixelsAreN ? first_m : summed, kPixelsAreN ? tile.tile_n : first_m / 64,
                 statistics);
#endif
#endif
  }
}

// Writes the tile's accumulators as they are to an NCHW split-K partial; the columns of a pair may be in two images.
__device__ __forceinline__ void write_partial_nchw(const Shape& shape, const WorkTile& tile, float* partial,
                                                   int consumer, const float (&acc)[ROWS][kAccumulators]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int j = 0; j < kTileN / 8; j++) {
    const int column = tile.tile_n * kTileN + 8 * j + 2 * (lane % 4);
    if (column >= shape.size_n) break;
    const int64 at = nchw_offset(shape, tile, column);
    const int64 next = SEGMENT % 2 == 0            ? at + 1
                       : column + 1 < shape.size_n ? nchw_offset(shape, tile, column + 1)
                                                   : -1;
    if (at < 0) continue;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int below = 0; below < 2; below++) {
        const int row = tile.tile_m * kTileM + 64 * (consumer * ROWS + r) + 16 * (thread / 32) + lane / 4 + 8 * below;
        if (row >= shape.size_m) continue;
        const int64 line = static_cast<int64>(row) * shape.image_pixels;
        const float first = acc[r][4 * j + 2 * below], second = acc[r][4 * j + 2 * below + 1];
        if constexpr (SEGMENT % 2 == 0) {
          *reinterpret_cast<Vector<float, 2>*>(partial + at + line) = {first, second};
        } else {
          partial[at + line] = first;
          if (next >= 0) partial[next + line] = second;
        }
      }
  }
}

// Strided backward data: writes zeros, or what an epilogue makes of them, to the pixels of phases without taps that
// belong to this consumer's rows of the tile, in the output or, as they are, in a split-K partial. It waits for the
// kernel before (PDL) itself: all other writes follow a TMA load, whose thread has waited.
#ifdef EPILOGUE
__device__ __forceinline__ void write_zeros(const Shape& shape, const WorkTile& tile, const Epilogue& epilogue,
                                            float* out, int consumer) {
#else
__device__ __forceinline__ void write_zeros(const Shape& shape, const WorkTile& tile, float* out, int consumer) {
#endif
  constexpr int kVector = 16 / kElementBytes, kVectors = kTileN / kVector, kRows = 64 * ROWS;
  const bool is_partial = CLUSTER_K == 1 && shape.grid.splits.by > 1;
  if (!is_partial && (tile.split > 0 || tile.first_k_tile == tile.end_k_tile)) return;
  griddepcontrol_wait();
  char* const to = reinterpret_cast<char*>(is_partial ? out + tile.split * static_cast<int64>(shape.out_size) : out);
  for (int number = threadIdx.x % 128; number < kRows * kVectors; number += 128) {
    const int row = tile.tile_m * kTileM + kRows * consumer + number / kVectors;
    const int column = tile.tile_n * kTileN + number % kVectors * kVector;
    if (row >= shape.size_m || column >= shape.size_n) continue;
    const Pixel pixel = pixel_at(shape.walk, row);
#pragma unroll 1  // else the widest accumulators would spill
    for (int phase = shape.phases_with_taps; phase < shape.phase_count; phase++) {
      const int line = dx_pixel(shape, phase_at(shape, phase), pixel);
      if (line < 0) continue;
      const int64 element = (static_cast<int64>(line) * shape.groups + tile.group) * shape.size_n + column;
#ifdef EPILOGUE
      if (!is_partial) {
        const auto residual = read_residual<kVector>(epilogue.residual + element, true);
        const auto saved = read_saved<kVector>(epilogue.saved + element, true);
        ChannelTerms terms[kVector];
        for (ChannelTerms& each : terms) each = {1, 0, 0};
        *reinterpret_cast<Vector<EpilogueElement, kVector>*>(reinterpret_cast<EpilogueElement*>(out) + element) =
            finished<kVector>({}, terms, residual, saved, epilogue);
        continue;
      }
#endif
      Vector<float, 4>* const there =
          reinterpret_cast<Vector<float, 4>*>(to + element * (is_partial ? 4 : kElementBytes));
      there[0] = {};
      if (kElementBytes < 4 && is_partial) there[1] = {};
    }
  }
}

// Writes the tile's accumulators as they are to the split-K partial, in the order of the output.
__device__ __forceinline__ void write_partial(const Shape& shape, const WorkTile& tile, float* partials, int consumer,
                                              const float (&acc)[ROWS][kAccumulators]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  const int64 pitch =
      KIND == WEIGHTS ? static_cast<int64>(taps) * shape.size_n : static_cast<int64>(shape.groups) * shape.size_n;
  const int64 first = KIND == WEIGHTS ? tile.group * shape.size_m * pitch : tile.group * shape.size_n;
  float* const partial = partials + tile.split * static_cast<int64>(shape.out_size) + first;
  if constexpr (kPixelsAreN && NCHW) {
    write_partial_nchw(shape, tile, partial - first, consumer, acc);
    return;
  }
#pragma unroll
  for (int block = 0; block < kNBlocks; block++) {
    const NBlock n_block = n_block_at(shape, tile.tile_n, block);
    if (!is_inside(shape, n_block)) break;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = tile.tile_m * kTileM + 64 * (consumer * ROWS + r) + 16 * (thread / 32) + lane / 4;
      const int lines[2] = {out_row(shape, tile, row), out_row(shape, tile, row + 8)};
#pragma unroll
      for (int j = 0; j < kBlockN / 8; j++) {
        const int column = n_block.first + 8 * j + 2 * (lane % 4);
        if (column >= shape.size_n) break;
#pragma unroll
        for (int below = 0; below < 2; below++)
          if (lines[below] >= 0) {
            const int pair_at = 4 * (block * kBlockN / 8 + j) + 2 * below;
            Vector<float, 2> pair;
            pair.at[0] = acc[r][pair_at];
            pair.at[1] = acc[r][pair_at + 1];
            *reinterpret_cast<Vector<float, 2>*>(partial + lines[below] * pitch + n_block.tap * shape.size_n + column) =
                pair;
          }
      }
    }
  }
}

// Cluster split-K: a block's partial, in shared memory where the pipeline was. The pitch, in floats, keeps the writes
// of a warp in different banks.
constexpr int kPartialPitch = kTileN + 8;

__device__ __forceinline__ void write_cluster_partial(unsigned to, int consumer,
                                                      const float (&acc)[ROWS][kAccumulators]) {
  const int lane = threadIdx.x % 32, first = 64 * ROWS * consumer + threadIdx.x % 128 / 32 * 16 + lane / 4;
  named_barrier_sync<128 * CONSUMERS>(1 + CONSUMERS);  // all have read the pipeline
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < kTileN / 8; j++)
#pragma unroll
      for (int below = 0; below < 2; below++)
        store_shared_pair(to + 4 * ((first + 64 * r + 8 * below) * kPartialPitch + 8 * j + 2 * (lane % 4)),
                          acc[r][4 * j + 2 * below], acc[r][4 * j + 2 * below + 1]);
}

#ifdef EPILOGUE
// Whether neighbouring results of a cluster's split-K are neighbouring channels.
constexpr bool kReducesVectors = !kPixelsAreN && KIND != WEIGHTS;

// Cluster split-K: brings what is read with the rows that this block will write to the L2 cache.
__device__ __forceinline__ void prefetch_cluster_tensors(const Shape& shape, const WorkTile& tile,
                                                         const Epilogue& epilogue) {
  constexpr int kLine = 128 / kElementBytes, kRowLines = (kTileN + kLine - 1) / kLine;
  const int rows = kTileM >> log2_cluster_k(shape, tile.phase);
  if (STRIDED && tile.group >= shape.groups) return;
  for (int number = threadIdx.x; number < rows * kRowLines; number += 128 * CONSUMERS) {
    const int line = out_row(shape, tile, tile.tile_m * kTileM + tile.split * rows + number / kRowLines);
    const int column = tile.tile_n * kTileN + number % kRowLines * kLine;
    if (line < 0 || column >= shape.size_n) continue;
    const int64 element = (static_cast<int64>(line) * shape.groups + tile.group) * shape.size_n + column;
    if constexpr (kHasResidual) asm volatile("prefetch.global.L2 [%0];" ::"l"(epilogue.residual + element));
    if constexpr (kHasSaved) asm volatile("prefetch.global.L2 [%0];" ::"l"(epilogue.saved + element));
  }
}
#endif

// Cluster split-K: adds this block's rows of all blocks' partials, in order of ranks, and writes them.
#ifdef EPILOGUE
__device__ __forceinline__ void reduce_cluster_partials(const Shape& shape, const Epilogue& epilogue, unsigned from,
                                                        ELEMENT* out) {
#else
__device__ __forceinline__ void reduce_cluster_partials(const Shape& shape, unsigned from, ELEMENT* out) {
#endif
  constexpr int kVector = 4, kRowVectors = kTileN / kVector;
  constexpr int kPiece = SEGMENT < kVector ? SEGMENT : kVector;
  using Piece = Vector<ELEMENT, kPiece>;
  const ClusterCoord at = cluster_coord();
  const WorkTile tile = work_tile_at(shape, at, first_work_tile<kCluster>());
  const int power = log2_cluster_k(shape, tile.phase), rows = kTileM >> power;
  if (STRIDED && tile.group >= shape.groups) return;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  for (int number = threadIdx.x; number < rows * kRowVectors; number += kThreads) {
    const int tile_row = tile.split * rows + number / kRowVectors, tile_column = number % kRowVectors * kVector;
    const NBlock n_block = n_block_at(shape, tile.tile_n, tile_column / kBlockN);
    const int row = tile.tile_m * kTileM + tile_row, column = n_block.first + tile_column % kBlockN;
    const int row_of_all = out_row(shape, tile, row);
    if (row_of_all < 0 || column >= shape.size_n || !is_inside(shape, n_block)) continue;
#ifdef EPILOGUE
    ChannelTerms terms[kVector] = {};
    Vector<EpilogueElement, kVector> residual = {}, saved = {};
    if constexpr (kReducesVectors) {  // on their way with the partials
      const int64 element = (static_cast<int64>(row_of_all) * shape.groups + tile.group) * shape.size_n + column;
      const int image = kHasChannelBias ? row_of_all / shape.image_pixels : 0;
      residual = read_residual<kVector>(epilogue.residual + element, true);
      saved = read_saved<kVector>(epilogue.saved + element, true);
      read_terms(terms, epilogue, image, tile.group * shape.size_n + column, shape.groups * shape.size_n);
    }
#endif
    Vector<float, kVector> partials[CLUSTER_K];  // all on their way before the first is added
#pragma unroll
    for (int k = 0; k < CLUSTER_K; k++)
      if (!STRIDED || k >> power == 0)
        partials[k] = load_cluster_floats(
            map_shared_rank(from + 4 * (tile_row * kPartialPitch + tile_column), STRIDED ? at.k - tile.split + k : k));
    Vector<ELEMENT, kVector> rounded;
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      float total = partials[0].at[i];
#pragma unroll
      for (int k = 1; k < CLUSTER_K; k++)
        if (!STRIDED || k >> power == 0) total += partials[k].at[i];
#ifdef EPILOGUE
      if constexpr (kReducesVectors)
        total = finish(total, terms[i], convert<float>(residual.at[i]), convert<float>(saved.at[i]), epilogue);
      else
        total = result_of(total, shape, tile, epilogue, row, column + i);
#endif
      rounded.at[i] = convert<ELEMENT>(total);
    }
    if constexpr (kPixelsAreN && NCHW) {
      const int64 line = static_cast<int64>(row) * shape.image_pixels;
#pragma unroll
      for (int run = 0; run < kVector && column + run < shape.size_n; run += kPiece)
        if (const int64 there = nchw_offset(shape, tile, column + run); there >= 0)
          *reinterpret_cast<Piece*>(out + there + line) = *reinterpret_cast<const Piece*>(rounded.at + run);
      continue;
    }
    const int64 line = KIND == WEIGHTS ? (static_cast<int64>(tile.group) * shape.size_m + row) * taps + n_block.tap
                                       : static_cast<int64>(row_of_all) * shape.groups + tile.group;
    *reinterpret_cast<Vector<ELEMENT, kVector>*>(out + line * shape.size_n + column) = rounded;
  }
}
