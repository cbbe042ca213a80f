// F(2x2, 3x3) in one kernel: y = A ((G g G^T) * (B d B^T)) A^T, the 16 places multiplied on tensor cores.
//
// Filters come transformed, as kernels_src/winograd/fused_filters.cu lays them out. A block computes IMAGES x TILE_ROWS
// x TILE_COLUMNS tiles of 8 * MMA_TILES_N * WARPS_K filters of a group. Patches of images, and filters, arrive
// 8 * WARPS_C channels at a time in STAGES buffers. A warp multiplies one row of places for 16 * MMA_TILES_M tiles and
// 8 * MMA_TILES_N filters of every WARPS_C-th 8 channels; it transforms the patches on the way from shared memory.
// Accumulators are float32, in registers, of places; float32 factors are cut to tf32 if PRODUCTS is 1, else split in
// two, of which three products are added. Warps along channels are added in one order. Offsets fit 30 bits. Grid:
// filters, groups and tiles, in this order, in one dimension. Defines: those above, WARPS_T and WARPS_K (of tiles, of
// filters), CHANNELS_LAST, VECTOR (channels copied at once, or 1), OUT_VECTOR (neighbouring elements stored at once),
// MIN_BLOCKS, SHARED_BYTES, IMAGES_FIELDS, SHAPE_FIELDS.
// Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
#include "common/copy_bytes.cuh"
#include "common/divisor.cuh"
#include "common/pdl.cuh"
#include "common/mma_tf32.cuh"
#include "common/tile.cuh"
#ifdef EPILOGUE
#include "winograd/stored_terms.cuh"
#endif

#if !defined(IMAGES) || !defined(TILE_ROWS) || !defined(TILE_COLUMNS) || !defined(MMA_TILES_M) || \
    !defined(MMA_TILES_N) || !defined(STAGES)
#error "define IMAGES, TILE_ROWS, TILE_COLUMNS, MMA_TILES_M, MMA_TILES_N and STAGES"
#endif
#if !defined(WARPS_T) || !defined(WARPS_K) || !defined(WARPS_C) || !defined(PRODUCTS) || !defined(CHANNELS_LAST)
#error "define WARPS_T, WARPS_K, WARPS_C, PRODUCTS and CHANNELS_LAST"
#endif
#if !defined(VECTOR) || !defined(OUT_VECTOR) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define VECTOR, OUT_VECTOR, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(IMAGES_FIELDS) || !defined(SHAPE_FIELDS)
#error "define IMAGES_FIELDS and SHAPE_FIELDS"
#endif

constexpr int kRows = TILE_ROWS, kColumns = TILE_COLUMNS, kImages = IMAGES, kStages = STAGES;
constexpr int kWarpsT = WARPS_T, kWarpsK = WARPS_K, kWarpsC = WARPS_C, kProducts = PRODUCTS;
constexpr int kThreads = 128 * kWarpsT * kWarpsK * kWarpsC;
constexpr int kTiles = 16 * MMA_TILES_M * kWarpsT, kFilters = 8 * MMA_TILES_N * kWarpsK, kChannels = 8 * kWarpsC;
static_assert(kImages * kRows * kColumns == kTiles && kColumns % 4 == 0,
              "tiles of a block, at least four side by side");
static_assert(kProducts == 1 || kProducts == 3, "factors are whole, or split in two");
static_assert(kStages >= 2, "copies overlap with arithmetic");

// Patches: pixels of all images one after another, [pixel][channel] or [channel][pixel]. With pitches that are 4 modulo
// 8 and 4 modulo 16, 8 bytes of four tiles side by side and of four pairs of channels meet every bank once.
constexpr bool kLast = CHANNELS_LAST;
constexpr int kPatchRows = 2 * kRows + 2, kPatchColumns = 2 * kColumns + 2, kPatch = kPatchRows * kPatchColumns;
constexpr int kPixels = kImages * kPatch, kPixelPitch = kChannels + 4, kChannelPitch = round_up(kPixels - 4, 16) + 4;
constexpr int kPixelStep = kLast ? kPixelPitch : 1, kChannelStep = kLast ? 1 : kChannelPitch;
constexpr int kPatchFloats = kLast ? kPixels * kPixelPitch : kChannels * kChannelPitch;
constexpr int kUnit = 1024;  // floats of 8 channels of 8 filters
constexpr int kStageFloats = kPatchFloats + kWarpsC * kFilters / 8 * kUnit;
static_assert(kStageFloats % 4 == 0 && kPatchFloats % 4 == 0, "buffers begin at 16 bytes");

// What warps exchange: [warp along channels][row of places][column of outputs] of [tile][filter] or [filter][tile],
// with pitches that let a warp's fragments meet no bank twice.
constexpr int kTileStep = kLast ? kFilters + 8 : 1, kFilterStep = kLast ? 1 : kTiles + 4;
constexpr int kPlane = kLast ? kTiles * kTileStep : kFilters * kFilterStep;
constexpr int kTableBytes = round_up(4 * kPixels, 16);
static_assert(SHARED_BYTES == kTableBytes + 4 * maximum(kStages * kStageFloats, 8 * kWarpsC * kPlane),
              "host and kernel agree on shared memory");

using Accumulators = float[4][MMA_TILES_M][MMA_TILES_N][4];  // of a row of places

// Sizes and element strides of what filters slide over, and of the results.
struct Images {
  IMAGES_FIELDS
};

// `x` is what filters slide over; channels are a group's. pad_top and pad_left are the rows and columns before it that
// the first tile begins. Blocks: filter_blocks of a group's filters, row_blocks and column_blocks of an image's tiles.
struct Shape {
  SHAPE_FIELDS
};

// What a block computes.
struct BlockOrigin {
  int image, row, column;  // first image, and first row and column of tiles
  int filter, group;
};

// Offsets of a patch's pixels of the first channel of the group; -4 outside the image, where nothing is read, but
// addresses are to be aligned.
__device__ __forceinline__ void make_table(int* table, const Shape& shape, const BlockOrigin& origin) {
  const Images& from = shape.x;
  for (int pixel = threadIdx.x; pixel < kPixels; pixel += kThreads) {
    const int image = pixel / kPatch, rest = pixel - image * kPatch, row = rest / kPatchColumns;
    const int n = origin.image + image, h = 2 * origin.row - shape.pad_top + row;
    const int w = 2 * origin.column - shape.pad_left + rest - row * kPatchColumns;
    const bool inside = n < shape.batch && static_cast<unsigned>(h) < static_cast<unsigned>(from.height) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(from.width);
    table[pixel] = inside ? n * from.image_stride + h * from.row_stride + w * from.column_stride : -4;
  }
}

// Starts to copy the patches of channels first ... first + kChannels - 1 of a group. Where zeros are written nothing is
// read: addresses there may lie outside.
__device__ __forceinline__ void copy_patches(float* stage, const float* __restrict__ x, const int* table, int first,
                                             int channels, int channel_stride) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  if constexpr (kLast) {
    constexpr int kVectors = kChannels / VECTOR, kStep = kThreads / kVectors, kItems = ceil_div(kPixels, kStep);
    const int start = threadIdx.x / kVectors, channel = threadIdx.x % kVectors * VECTOR;
    const bool exists = first + channel < channels;
    const float* const from = x + (first + channel);
    const unsigned at = to + 4 * (start * kPixelPitch + channel);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if ((i + 1) * kStep > kPixels && start + i * kStep >= kPixels) break;
      const int offset = table[start + i * kStep];
      copy_bytes<4 * VECTOR>(at + 4 * i * kStep * kPixelPitch, from + offset, exists && offset >= 0);
    }
  } else {
    constexpr int kWarps = kThreads / 32, kOwn = ceil_div(kChannels, kWarps);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= kChannels) return;
    const float* from[kOwn];
    bool exists[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      exists[i] = first + warp + i * kWarps < channels;
      from[i] = x + (first + warp + i * kWarps) * channel_stride;
    }
    const unsigned at = to + 4 * (warp * kChannelPitch + lane);
#pragma unroll
    for (int pixel = 0; pixel < kPixels; pixel += 32) {
      if (pixel + 32 > kPixels && lane + pixel >= kPixels) break;
      const int offset = table[lane + pixel];
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        copy_bytes<4>(at + 4 * (i * kWarps * kChannelPitch + pixel), from[i] + offset, exists[i] && offset >= 0);
    }
  }
}

// Starts to copy the filters of a stage, from 8 channels number `step` on.
__device__ __forceinline__ void copy_filters(float* stage, const float* __restrict__ filters, const BlockOrigin& origin,
                                             int step, int steps, int units) {
  constexpr int kFloats = kFilters / 8 * kUnit, kAtOnce = 4 * kThreads;  // of 8 channels, and of all threads
  static_assert(kFloats % kAtOnce == 0 || kAtOnce % kFloats == 0, "threads stay in their place of 8 channels");
  const int channel_block = 4 * threadIdx.x / kFloats, at = 4 * threadIdx.x % kFloats, unit = origin.filter / 8;
  const int end = (units - unit) * kUnit - at;
  const float* from = filters + ((origin.group * steps + step + channel_block) * units + unit) * kUnit + at;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage + kPatchFloats)) + 16 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWarpsC * kFloats; i += kAtOnce) {
    copy_bytes<16>(to + 4 * i, from + i % kFloats, step + channel_block + i / kFloats < steps && i % kFloats < end);
    if ((i + kAtOnce) % kFloats == 0 || kAtOnce > kFloats) from += maximum(1, kAtOnce / kFloats) * units * kUnit;
  }
}

using Pair = Vector<float, 2>;

// A row of B d: rows `first` + sign * `second` of a tile's patch, of two channels.
struct Lane {
  int first, second;  // floats from the tile's first pixel
  float sign;
};

__device__ __forceinline__ Pair combined(const float* patch, const Lane& lane, int at) {
  const Pair a = *reinterpret_cast<const Pair*>(patch + lane.first + at);
  const Pair b = *reinterpret_cast<const Pair*>(patch + lane.second + at);
  return {fmaf(lane.sign, b.at[0], a.at[0]), fmaf(lane.sign, b.at[1], a.at[1])};
}

// One row of places of a tile, of the lane's two channels: fragments' elements `row` and `row` + 2 of each place.
__device__ __forceinline__ void transform_tile(float (&places)[4][MMA_TILES_M][4], int m, int row, const float* patch,
                                               const Lane& lane) {
  float columns[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kLast) {
      const Pair both = combined(patch, lane, i * kPixelStep);
      columns[i][0] = both.at[0], columns[i][1] = both.at[1];
    } else {
      const Pair both = combined(patch, lane, i / 2 * kChannelStep + i % 2 * 2);
      columns[i % 2 * 2][i / 2] = both.at[0], columns[i % 2 * 2 + 1][i / 2] = both.at[1];
    }
  }
#pragma unroll
  for (int channel = 0; channel < 2; ++channel) {
    places[0][m][row + 2 * channel] = columns[0][channel] - columns[2][channel];
    places[1][m][row + 2 * channel] = columns[1][channel] + columns[2][channel];
    places[2][m][row + 2 * channel] = columns[2][channel] - columns[1][channel];
    places[3][m][row + 2 * channel] = columns[1][channel] - columns[3][channel];
  }
}

// Factors of three products are split in two, others are cut to tf32 by tensor cores.
__device__ __forceinline__ void split(float value, unsigned& whole, unsigned& rest) {
  if constexpr (kProducts == 3)
    split_tf32(value, whole, rest);
  else
    whole = __float_as_uint(value);
}

__device__ __forceinline__ void multiply_all(float (&accumulators)[MMA_TILES_M][MMA_TILES_N][4],
                                             const unsigned (&a)[MMA_TILES_M][4], const unsigned (&b)[MMA_TILES_N][2]) {
#pragma unroll
  for (int n = 0; n < MMA_TILES_N; ++n)
#pragma unroll
    for (int m = 0; m < MMA_TILES_M; ++m) multiply_add<float32>(accumulators[m][n], a[m], b[n][0], b[n][1]);
}

// Adds the products of one place.
__device__ __forceinline__ void multiply_place(float (&accumulators)[MMA_TILES_M][MMA_TILES_N][4],
                                               const float (&a)[MMA_TILES_M][4], const float (&b)[MMA_TILES_N][2]) {
  unsigned a_whole[MMA_TILES_M][4], b_whole[MMA_TILES_N][2], a_rest[MMA_TILES_M][4], b_rest[MMA_TILES_N][2];
#pragma unroll
  for (int m = 0; m < MMA_TILES_M; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) split(a[m][i], a_whole[m][i], a_rest[m][i]);
#pragma unroll
  for (int n = 0; n < MMA_TILES_N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) split(b[n][i], b_whole[n][i], b_rest[n][i]);
  if constexpr (kProducts == 3) {
    multiply_all(accumulators, a_rest, b_whole);
    multiply_all(accumulators, a_whole, b_rest);
  }
  multiply_all(accumulators, a_whole, b_whole);
}

// Adds 8 channels: `tiles` are the floats from a patch's first to the lane's tiles, two for each of MMA_TILES_M.
__device__ __forceinline__ void add_step(Accumulators& accumulators, const float* patches, const float* filters,
                                         const int (&tiles)[MMA_TILES_M][2], const Lane& lane) {
  float places[4][MMA_TILES_M][4];
#pragma unroll
  for (int m = 0; m < MMA_TILES_M; ++m)
#pragma unroll
    for (int row = 0; row < 2; ++row) transform_tile(places, m, row, patches + tiles[m][row], lane);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    float b[2][MMA_TILES_N][2];
#pragma unroll
    for (int n = 0; n < MMA_TILES_N; ++n) {
      const Vector<float, 4> both = *reinterpret_cast<const Vector<float, 4>*>(filters + n * kUnit + pair * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][n][i % 2] = both.at[i];
    }
#pragma unroll
    for (int place = 0; place < 2; ++place)
      multiply_place(accumulators[2 * pair + place], places[2 * pair + place], b[place]);
  }
}

// Transforms a row of places to two columns of outputs, for the warps of the other rows to read.
__device__ __forceinline__ void exchange(float* shared, const Accumulators& accumulators, int first_tile,
                                         int first_filter) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MMA_TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < MMA_TILES_N; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int tile = first_tile + 16 * m + 4 * i + lane / 4, filter = first_filter + 8 * n + lane % 4 * 2;
        float* const to = shared + tile * kTileStep + filter * kFilterStep;
        Pair left, right;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float a = accumulators[1][m][n][i + j], b = accumulators[2][m][n][i + j];
          left.at[j] = accumulators[0][m][n][i + j] + a + b;
          right.at[j] = a - b - accumulators[3][m][n][i + j];
        }
        if constexpr (kLast) {
          *reinterpret_cast<Pair*>(to) = left;
          *reinterpret_cast<Pair*>(to + kPlane) = right;
        } else {
          to[0] = left.at[0], to[kFilterStep] = left.at[1];
          to[kPlane] = right.at[0], to[kPlane + kFilterStep] = right.at[1];
        }
      }
}

// Adds the partial sums of kCount neighbours' two rows of one column of outputs.
template <int kCount>
__device__ __forceinline__ void gather(float (&rows)[2][kCount], const float* shared) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) rows[0][i] = rows[1][i] = 0.0f;
#pragma unroll
  for (int warp_c = 0; warp_c < kWarpsC; ++warp_c) {
    Vector<float, kCount> places[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      places[i] = *reinterpret_cast<const Vector<float, kCount>*>(shared + (warp_c * 4 + i) * 2 * kPlane);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      rows[0][i] += places[0].at[i] + places[1].at[i] + places[2].at[i];
      rows[1][i] += places[1].at[i] - places[2].at[i] - places[3].at[i];
    }
  }
}

#ifdef EPILOGUE
// Brings scale and bias of the block's filters nearer while the first stage arrives; no register holds them later.
__device__ __forceinline__ void bring_terms(const Epilogue& epilogue, const Shape& shape, const BlockOrigin& origin) {
  const int number = threadIdx.x, filters = shape.y.channels;
  if (!(kHasScale || kHasBias) || number > kFilters / kTermsAhead) return;
  const int filter = min(origin.filter + number * kTermsAhead, filters - 1);
  keep_terms_ahead(read_terms_ahead(epilogue, origin.group * filters + filter));
}

constexpr int kColumnStep = kLast ? 1 : OUT_VECTOR;  // columns of results that are stored at once

// What is read with a tile's results, as they are stored.
struct TileTensors {
  Vector<float, OUT_VECTOR> residual[2][2 / kColumnStep], saved[2][2 / kColumnStep];

  // `first`: the first result's element; rows, columns: how many there are.
  __device__ __forceinline__ TileTensors(const Epilogue& epilogue, const Images& to, int first, int rows, int columns) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int column = 0; column < 2; column += kColumnStep) {
        const int at = first + row * to.row_stride + column * to.column_stride;
        const bool exists = row < rows && column < columns;
        residual[row][column / kColumnStep] = read_residual<OUT_VECTOR>(epilogue.residual + at, exists);
        saved[row][column / kColumnStep] = read_saved<OUT_VECTOR>(epilogue.saved + at, exists);
      }
  }
};
#endif

// Writes the block's results: neighbouring threads take neighbouring filters, or tiles where channels come first.
__device__ __forceinline__ void store_results(float* __restrict__ y, const float* shared, const Shape& shape,
#ifdef EPILOGUE
                                              const Epilogue& epilogue,
#endif
                                              const BlockOrigin& origin) {
  const Images& to = shape.y;
  const int filters = to.channels;
  constexpr int kLanes = kLast ? OUT_VECTOR : 1;  // filters of a thread
  constexpr int kItems = kTiles * kFilters / kLanes;
#pragma unroll 1
  for (int i = threadIdx.x; i < kItems; i += kThreads) {
    const int tile = kLast ? i / (kFilters / kLanes) : i % kTiles;
    const int filter = kLast ? i % (kFilters / kLanes) * kLanes : i / kTiles;
    const int image = tile / (kRows * kColumns), rest = tile - image * (kRows * kColumns);
    const int n = origin.image + image, h = 2 * (origin.row + rest / kColumns),
              w = 2 * (origin.column + rest % kColumns);
    if (n >= shape.batch || h >= to.height || w >= to.width || origin.filter + filter >= filters) continue;
#ifdef EPILOGUE
    const int channel = origin.group * filters + origin.filter + filter, channels = shape.groups.by * filters;
    const int first = n * to.image_stride + channel * to.channel_stride + h * to.row_stride + w * to.column_stride;
    ChannelTerms terms[OUT_VECTOR];
    stored_terms<kLast>(terms, epilogue, n, channel, channels);
    const TileTensors tensors(epilogue, to, first, to.height - h, to.width - w);
#endif
    float columns[2][2][kLanes];
#pragma unroll
    for (int column = 0; column < 2; ++column)
      gather<kLanes>(columns[column], shared + column * kPlane + tile * kTileStep + filter * kFilterStep);
#ifdef EPILOGUE
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (h + row >= to.height) break;
#pragma unroll
      for (int column = 0; column < 2; column += kColumnStep) {
        if (w + column >= to.width) break;
        float sums[OUT_VECTOR];
#pragma unroll
        for (int i = 0; i < OUT_VECTOR; ++i) sums[i] = columns[kLast ? column : column + i][row][kLast ? i : 0];
        *reinterpret_cast<Vector<float, OUT_VECTOR>*>(y + first + row * to.row_stride + column * to.column_stride) =
            finished(sums, terms, tensors.residual[row][column / kColumnStep], tensors.saved[row][column / kColumnStep],
                     epilogue);
      }
    }
#else
    float* const at = y + n * to.image_stride + (origin.group * filters + origin.filter + filter) * to.channel_stride +
                      h * to.row_stride + w * to.column_stride;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (h + row >= to.height) break;
      if constexpr (!kLast && OUT_VECTOR == 2) {
        *reinterpret_cast<Vector<float, 2>*>(at + row * to.row_stride) = {columns[0][row][0], columns[1][row][0]};
        continue;
      }
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (w + column >= to.width) break;
        Vector<float, kLanes> values;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) values.at[lane] = columns[column][row][lane];
        *reinterpret_cast<Vector<float, kLanes>*>(at + row * to.row_stride + column * to.column_stride) = values;
      }
    }
#endif
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    winograd_fused(const float* __restrict__ x, const float* __restrict__ filters, float* __restrict__ y,
#ifdef EPILOGUE
                   const __grid_constant__ Shape shape, const __grid_constant__ Epilogue epilogue) {
#else
                   const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(16) unsigned char shared[];
  int* const table = reinterpret_cast<int*>(shared);
  float* const stages = reinterpret_cast<float*>(shared + kTableBytes);
  const int number = blockIdx.x / shape.filter_blocks, tile = number / shape.groups;
  const int line = tile / shape.column_blocks, image = line / shape.row_blocks;
  const BlockOrigin origin = {
      image * kImages, (line - image * shape.row_blocks.by) * kRows, (tile - line * shape.column_blocks.by) * kColumns,
      (static_cast<int>(blockIdx.x) - number * shape.filter_blocks.by) * kFilters, number - tile * shape.groups.by};
  const int channels = shape.x.channels, channel_stride = shape.x.channel_stride;
  const int units = ceil_div(shape.y.channels, 8), steps = ceil_div(channels, 8), iterations = ceil_div(steps, kWarpsC);
  const float* const source = x + origin.group * channels * channel_stride;

  make_table(table, shape, origin);
  __syncthreads();  // the table is there
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1 && stage < iterations; ++stage)
    copy_patches(stages + stage * kStageFloats, source, table, stage * kChannels, channels, channel_stride);
  griddepcontrol_wait();
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < iterations) copy_filters(stages + stage * kStageFloats, filters, origin, stage * kWarpsC, steps, units);
    commit_copies();
  }

#ifdef EPILOGUE
  bring_terms(epilogue, shape, origin);
#endif
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int row = warp % 4, warp_c = warp / 4 % kWarpsC;
  const int warp_t = warp / (4 * kWarpsC) % kWarpsT, warp_k = warp / (4 * kWarpsC * kWarpsT);
  // Rows of B: d0 - d2, d1 + d2, d2 - d1, d1 - d3.
  const int first = row == 0 ? 0 : row == 2 ? 2 : 1, second = row == 2 ? 1 : row == 3 ? 3 : 2;
  const Lane rows = {first * kPatchColumns * kPixelStep, second * kPatchColumns * kPixelStep, row == 1 ? 1.0f : -1.0f};
  int tiles[MMA_TILES_M][2];
#pragma unroll
  for (int m = 0; m < MMA_TILES_M; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number_of_tile = (warp_t * MMA_TILES_M + m) * 16 + 8 * i + lane / 4;
      const int of_image = number_of_tile / (kRows * kColumns), rest = number_of_tile - of_image * (kRows * kColumns);
      const int pixel = of_image * kPatch + rest / kColumns * 2 * kPatchColumns + rest % kColumns * 2;
      tiles[m][i] = pixel * kPixelStep + (8 * warp_c + lane % 4 * 2) * kChannelStep;
    }
  const int own_filters =
      kPatchFloats + (warp_c * (kFilters / 8) + warp_k * MMA_TILES_N) * kUnit + row * 256 + lane * 4;

  Accumulators accumulators = {};
  int read_at = 0, write_at = kStages - 1;
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the stage has arrived, and every warp has read the one that is overwritten next
    if (iteration + kStages - 1 < iterations) {
      float* const next = stages + write_at * kStageFloats;
      copy_patches(next, source, table, (iteration + kStages - 1) * kChannels, channels, channel_stride);
      copy_filters(next, filters, origin, (iteration + kStages - 1) * kWarpsC, steps, units);
    }
    commit_copies();
    const float* const stage = stages + read_at * kStageFloats;
    add_step(accumulators, stage, stage + own_filters, tiles, rows);
    read_at = read_at + 1 == kStages ? 0 : read_at + 1;
    write_at = write_at + 1 == kStages ? 0 : write_at + 1;
  }

  wait_for_copies<0>();
  __syncthreads();  // every warp has read the last stage, which the results overwrite
  exchange(stages + (warp_c * 4 + row) * 2 * kPlane, accumulators, warp_t * MMA_TILES_M * 16, warp_k * MMA_TILES_N * 8);
  __syncthreads();  // all rows of places are there
#ifdef EPILOGUE
  store_results(y, stages, shape, epilogue, origin);
#else
  store_results(y, stages, shape, origin);
#endif
}
