// Winograd's minimal filtering around products of matrices: y = A ((G g) * (B d)), along both axes of a tile.
//
// winograd_operands transforms tiles of images and, in its first blocks, filters, or for backward weights tiles of dy;
// winograd_results products to tiles of y, winograd_weights to filters. A thread has a whole tile in registers, with
// tiles along the lanes where channels come first, else of some channels. Of a place of tiles, operands hold [group]
// [slice][channel][tile] or, channels last, [group][slice][tile][channel], with zeros beyond the last; filters
// [group][slice][k][c]. Offsets fit 30 bits. Accumulators are float32.
// Defines: ELEMENT, OPERAND, WEIGHTS, MIN_BLOCKS on an SM, INPUT_LEAD, PLACES_WITHIN; TILE_ (the next tile), TAPS_,
// PRODUCTS_ and the matrices B: INPUT_, G: OTHER_, A: OUTPUT_, each _H and _W; of each tensor _LAST, _LANES, _VECTOR;
// TILES_FIELDS, OPERAND_FIELDS.
// Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
#include "common/divisor.cuh"
#include "common/types.cuh"
#ifdef EPILOGUE
#include "winograd/stored_terms.cuh"
#endif

#if !defined(ELEMENT) || !defined(OPERAND) || !defined(WEIGHTS)
#error "define ELEMENT, OPERAND, WEIGHTS and what the header lists"
#endif
#if !defined(TILES_FIELDS) || !defined(OPERAND_FIELDS)
#error "define TILES_FIELDS and OPERAND_FIELDS"
#endif

constexpr int kThreads = 128;
constexpr int kMinBlocks = MIN_BLOCKS;
constexpr int kProductsH = PRODUCTS_H, kProductsW = PRODUCTS_W;
constexpr int kTaps = TAPS_H * TAPS_W;

static_assert(kProductsH == TILE_H + TAPS_H - 1 && kProductsW == TILE_W + TAPS_W - 1, "F(tile, taps)");

// Matrices by row; what is 0 costs nothing once loops are unrolled.
struct InputH {
  static constexpr int kRows = kProductsH, kColumns = kProductsH;
  static constexpr __device__ float at(int i) {
    constexpr float values[] = {INPUT_H};
    return values[i];
  }
};
struct InputW {
  static constexpr int kRows = kProductsW, kColumns = kProductsW;
  static constexpr __device__ float at(int i) {
    constexpr float values[] = {INPUT_W};
    return values[i];
  }
};
struct OtherH {
  static constexpr int kRows = kProductsH, kColumns = WEIGHTS ? TILE_H : TAPS_H;
  static constexpr __device__ float at(int i) {
    constexpr float values[] = {OTHER_H};
    return values[i];
  }
};
struct OtherW {
  static constexpr int kRows = kProductsW, kColumns = WEIGHTS ? TILE_W : TAPS_W;
  static constexpr __device__ float at(int i) {
    constexpr float values[] = {OTHER_W};
    return values[i];
  }
};
struct OutputH {
  static constexpr int kRows = WEIGHTS ? TAPS_H : TILE_H, kColumns = kProductsH;
  static constexpr __device__ float at(int i) {
    constexpr float values[] = {OUTPUT_H};
    return values[i];
  }
};
struct OutputW {
  static constexpr int kRows = WEIGHTS ? TAPS_W : TILE_W, kColumns = kProductsW;
  static constexpr __device__ float at(int i) {
    constexpr float values[] = {OUTPUT_W};
    return values[i];
  }
};

// One row of kSize places, kLanes channels each.
template <int kSize, int kLanes>
struct Row {
  float at[kSize * kLanes];
};

// A row of a matrix times values. Nothing is added to 0, which the compiler would not leave out.
template <class Matrix, class Values>
__device__ __forceinline__ float dot(int row, Values values) {
  float sum = 0.0f;
  bool is_first = true;
#pragma unroll
  for (int j = 0; j < Matrix::kColumns; ++j) {
    const float factor = Matrix::at(row * Matrix::kColumns + j);
    if (factor == 0.0f) continue;
    sum = is_first ? factor * values(j) : sum + factor * values(j);
    is_first = false;
  }
  return sum;
}

// Down * (what `load` gives row by row) * Across^T; `store` takes it row by row.
template <class Down, class Across, int kLanes, class Load, class Store>
__device__ __forceinline__ void transform(Load load, Store store) {
  Row<Across::kRows, kLanes> half[Down::kColumns];
#pragma unroll
  for (int r = 0; r < Down::kColumns; ++r) {
    const Row<Across::kColumns, kLanes> row = load(r);
#pragma unroll
    for (int i = 0; i < Across::kRows; ++i) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        half[r].at[i * kLanes + lane] = dot<Across>(i, [&](int j) { return row.at[j * kLanes + lane]; });
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Down::kRows; ++i) {
    Row<Across::kRows, kLanes> row;
#pragma unroll
    for (int j = 0; j < Across::kRows; ++j) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        row.at[j * kLanes + lane] = dot<Down>(i, [&](int r) { return half[r].at[j * kLanes + lane]; });
      }
    }
    store(i, row);
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void load_vector(float* to, const T* from) {
  const Vector<T, kCount> values = *reinterpret_cast<const Vector<T, kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = convert<float>(values.at[i]);
}

template <int kCount, typename T>
__device__ __forceinline__ void store_vector(T* to, const float* from) {
  Vector<T, kCount> values;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values.at[i] = convert<T>(from[i]);
  *reinterpret_cast<Vector<T, kCount>*>(to) = values;
}

// The tiles of one launch: tiles first ... first + count - 1 of all, row by row and image by image; an image has
// tile_rows x tile_columns, a slice slice_tiles.
struct Tiles {
  TILES_FIELDS
};

// A tensor (n, channels, height, width) and its transformed counterpart. The first tile begins pad_top rows and
// pad_left columns before it. items: that neighbouring threads take, vectors of channels or tiles.
struct Operand {
  OPERAND_FIELDS
};

struct Item {
  int channel, tile;  // first of kLanes channels
};

template <bool kLast, int kLanes>
__device__ __forceinline__ Item item_of(const Operand& operand, int rank) {
  const int slow = rank / operand.items, fast = rank - slow * operand.items.by;
  return kLast ? Item{fast * kLanes, slow} : Item{slow, fast};
}

// Whether places of a tile lie side by side: [tile][place][channel] of all groups.
template <bool kLast>
constexpr bool kPlacesWithin = kLast && PLACES_WITHIN;

// Where an item's elements lie in transformed data, of the first place.
template <bool kLast>
__device__ __forceinline__ int transformed_offset(const Operand& operand, const Tiles& tiles, const Item& item) {
  if (kPlacesWithin<kLast>) return item.tile * (kProductsH * kProductsW) * operand.channels + item.channel;
  const int channels = operand.group_channels.by;
  const int group = item.channel / operand.group_channels, channel = item.channel - group * channels;
  const int slice = item.tile / tiles.slice_tiles, tile = item.tile - slice * tiles.slice_tiles.by;
  const int matrix = (group * tiles.slices + slice) * channels * tiles.slice_tiles.by;
  return matrix + (kLast ? tile * channels + channel : channel * tiles.slice_tiles.by + tile);
}

// Elements from one place to the next.
template <bool kLast>
__device__ __forceinline__ int place_step(const Operand& operand, const Tiles& tiles) {
  return kPlacesWithin<kLast> ? operand.channels : operand.channels * tiles.slices * tiles.slice_tiles.by;
}

// The row and column that a tile begins at, and its image.
struct Corner {
  int image, h, w;
};

__device__ __forceinline__ Corner corner_of(const Operand& operand, const Tiles& tiles, int tile) {
  const int number = tiles.first + tile;
  const int row = number / tiles.tile_columns, image = row / tiles.tile_rows;
  return {image, (row - image * tiles.tile_rows.by) * TILE_H - operand.pad_top,
          (number - row * tiles.tile_columns.by) * TILE_W - operand.pad_left};
}

__device__ __forceinline__ bool is_within(int at, int size) {
  return static_cast<unsigned>(at) < static_cast<unsigned>(size);
}

// Transforms one tile of kLanes channels. Where channels come first, columns kLead, kLead + kVector ... begin vectors.
template <class Down, class Across, bool kLast, int kLanes, int kVector, int kLead>
__device__ __forceinline__ void transform_tile(const ELEMENT* __restrict__ tensor, OPERAND* __restrict__ transformed,
                                               const Operand& operand, const Tiles& tiles, int rank) {
  static_assert(kLast || kLanes == 1, "a warp's lanes must be channels: whole warps of them");
  const Item item = item_of<kLast, kLanes>(operand, rank);
  if (kLast ? item.tile >= tiles.slices * tiles.slice_tiles.by : item.channel >= operand.channels) return;
  const Corner corner = corner_of(operand, tiles, item.tile);
  const bool exists = item.tile < tiles.count;
  const int column_step = kLast ? operand.channels : 1, row_step = operand.width * column_step;
  const int plane = (kLast ? corner.image : corner.image * operand.channels + item.channel) * operand.height;
  const int start = (plane + corner.h) * row_step + corner.w * column_step + (kLast ? item.channel : 0);
  constexpr int kColumns = Across::kColumns;
  const auto load = [&](int r) {
    Row<kColumns, kLanes> row = {};
    if (!exists || !is_within(corner.h + r, operand.height)) return row;
    const ELEMENT* from = tensor + start + r * row_step;
    if constexpr (kLast || kVector == 1) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (is_within(corner.w + j, operand.width)) load_vector<kLanes>(row.at + j * kLanes, from + j * column_step);
      }
    } else {
      constexpr int kEnd = kLead + (kColumns - kLead) / kVector * kVector;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (!is_within(corner.w + j, operand.width)) continue;
        if (j < kLead || j >= kEnd)
          load_vector<1>(row.at + j, from + j);
        else if ((j - kLead) % kVector == 0)
          load_vector<kVector>(row.at + j, from + j);
      }
    }
    return row;
  };
  OPERAND* to = transformed + transformed_offset<kLast>(operand, tiles, item);
  const int step = place_step<kLast>(operand, tiles);
  transform<Down, Across, kLanes>(load, [&](int i, const Row<Across::kRows, kLanes>& row) {
#pragma unroll
    for (int j = 0; j < Across::kRows; ++j)
      store_vector<kLanes>(to + (i * Across::kRows + j) * step, row.at + j * kLanes);
  });
}

// Filters of all groups one after another, `pairs` of an output and an input channel, taps apart or channels last.
template <bool kLast>
struct Taps {
  int first;  // pair of the block's first thread
  int pairs;
  Divisor group_channels;

  __device__ __forceinline__ int offset(int pair, int tap) const {  // of a pair's tap, channels last
    const int k = pair / group_channels;
    return (k * kTaps + tap) * group_channels.by + pair - k * group_channels.by;
  }
};

template <bool kLast>
__device__ __forceinline__ void transform_filters(const ELEMENT* __restrict__ w, OPERAND* __restrict__ transformed,
                                                  ELEMENT* staged, const Taps<kLast>& taps) {
  const int pair = taps.first + threadIdx.x;
  if constexpr (!kLast) {  // a thread's taps are neighbours in memory: the block reads them in order
    const int count = min(kThreads, taps.pairs - taps.first) * kTaps;
    for (int i = threadIdx.x; i < count; i += kThreads) staged[i] = w[taps.first * kTaps + i];
    __syncthreads();  // all filters of the block are there
  }
  if (pair >= taps.pairs) return;
  const auto load = [&](int r) {
    Row<TAPS_W, 1> row;
#pragma unroll
    for (int j = 0; j < TAPS_W; ++j) {
      const int tap = r * TAPS_W + j;
      row.at[j] = convert<float>(kLast ? w[taps.offset(pair, tap)] : staged[threadIdx.x * kTaps + tap]);
    }
    return row;
  };
  OPERAND* to = transformed + pair;
  transform<OtherH, OtherW, 1>(load, [&](int i, const Row<kProductsW, 1>& row) {
#pragma unroll
    for (int j = 0; j < kProductsW; ++j) to[(i * kProductsW + j) * taps.pairs] = convert<OPERAND>(row.at[j]);
  });
}

// Transforms products of kLanes channels of one tile back; stores kVector columns at once where channels come first.
template <bool kLast, int kLanes, int kVector>
__device__ __forceinline__ void transform_back(const float* __restrict__ products, ELEMENT* __restrict__ tensor,
#ifdef EPILOGUE
                                               const Epilogue& epilogue,
#endif
                                               const Operand& result, const Tiles& tiles, int rank) {
  static_assert(kLast || kLanes == 1, "a warp's lanes must be channels: whole warps of them");
  const Item item = item_of<kLast, kLanes>(result, rank);
  if (item.tile >= tiles.count || item.channel >= result.channels) return;
  const Corner corner = corner_of(result, tiles, item.tile);
  const int column_step = kLast ? result.channels : 1, row_step = result.width * column_step;
  const int plane = (kLast ? corner.image : corner.image * result.channels + item.channel) * result.height;
  const int start = (plane + corner.h) * row_step + corner.w * column_step + (kLast ? item.channel : 0);
  const float* from = products + transformed_offset<kLast>(result, tiles, item);
  const int step = place_step<kLast>(result, tiles);
  const auto load = [&](int r) {
    Row<kProductsW, kLanes> row;
#pragma unroll
    for (int j = 0; j < kProductsW; ++j) load_vector<kLanes>(row.at + j * kLanes, from + (r * kProductsW + j) * step);
    return row;
  };
#ifdef EPILOGUE
  constexpr int kCount = kLast ? kLanes : kVector, kStep = kLast ? 1 : kVector;
  ChannelTerms terms[kCount];
  stored_terms<kLast>(terms, epilogue, corner.image, item.channel, result.channels);
  transform<OutputH, OutputW, kLanes>(load, [&](int i, const Row<OutputW::kRows, kLanes>& row) {
    if (corner.h + i >= result.height) return;
    Vector<EpilogueElement, kCount> residual[OutputW::kRows / kStep], saved[OutputW::kRows / kStep];
#pragma unroll
    for (int j = 0; j < OutputW::kRows; j += kStep) {  // all of a row are under way at once
      const int at = start + i * row_step + j * column_step;
      residual[j / kStep] = read_residual<kCount>(epilogue.residual + at, corner.w + j < result.width);
      saved[j / kStep] = read_saved<kCount>(epilogue.saved + at, corner.w + j < result.width);
    }
#pragma unroll
    for (int j = 0; j < OutputW::kRows; j += kStep) {
      if (corner.w + j >= result.width) continue;
      EpilogueNumber sums[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k] = row.at[j * kLanes + k];
      *reinterpret_cast<Vector<EpilogueElement, kCount>*>(tensor + start + i * row_step + j * column_step) =
          finished(sums, terms, residual[j / kStep], saved[j / kStep], epilogue);
    }
  });
#else
  transform<OutputH, OutputW, kLanes>(load, [&](int i, const Row<OutputW::kRows, kLanes>& row) {
    if (corner.h + i >= result.height) return;
    constexpr int kStored = kLast ? kLanes : kVector;
#pragma unroll
    for (int j = 0; j < OutputW::kRows; j += kLast ? 1 : kVector) {
      if (corner.w + j >= result.width) continue;
      store_vector<kStored>(tensor + start + i * row_step + j * column_step, row.at + j * kLanes);
    }
  });
#endif
}

#if WEIGHTS
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    winograd_operands(const ELEMENT* __restrict__ x, OPERAND* __restrict__ inputs, const ELEMENT* __restrict__ dy,
                      OPERAND* __restrict__ others, int other_blocks, const __grid_constant__ Tiles tiles,
                      const __grid_constant__ Operand x_operand, const __grid_constant__ Operand dy_operand) {
  const int block = blockIdx.x - other_blocks;
  if (block < 0) {
    transform_tile<OtherH, OtherW, OTHER_LAST, OTHER_LANES, OTHER_VECTOR, 0>(dy, others, dy_operand, tiles,
                                                                             blockIdx.x * kThreads + threadIdx.x);
  } else {
    transform_tile<InputH, InputW, INPUT_LAST, INPUT_LANES, INPUT_VECTOR, INPUT_LEAD>(x, inputs, x_operand, tiles,
                                                                                      block * kThreads + threadIdx.x);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    winograd_weights(const float* __restrict__ products, ELEMENT* __restrict__ dw, int pairs, int slices,
                     const Divisor group_channels, const Divisor group_pairs) {
  __shared__ ELEMENT staged[OUTPUT_LAST ? 1 : kThreads * kTaps];
  const Taps<OUTPUT_LAST> taps{static_cast<int>(blockIdx.x) * kThreads, pairs, group_channels};
  const int pair = taps.first + threadIdx.x;
  if (pair < pairs) {
    // Slices of a group's products lie one after another.
    const float* from = products + pair + pair / group_pairs * (slices - 1) * group_pairs.by;
    Row<kProductsW, 1> accumulators[kProductsH] = {};
    for (int slice = 0; slice < slices; ++slice, from += group_pairs.by) {
#pragma unroll
      for (int place = 0; place < kProductsH * kProductsW; ++place)
        accumulators[place / kProductsW].at[place % kProductsW] += from[place * slices * pairs];
    }
    transform<OutputH, OutputW, 1>([&](int r) { return accumulators[r]; },
                                   [&](int i, const Row<OutputW::kRows, 1>& row) {
#pragma unroll
                                     for (int j = 0; j < TAPS_W; ++j) {
                                       const int tap = i * TAPS_W + j;
                                       const ELEMENT value = convert<ELEMENT>(row.at[j]);
                                       if constexpr (OUTPUT_LAST)
                                         dw[taps.offset(pair, tap)] = value;
                                       else
                                         staged[threadIdx.x * kTaps + tap] = value;
                                     }
                                   });
  }
  if constexpr (!OUTPUT_LAST) {
    __syncthreads();  // all filters of the block are there, and go to memory in order
    const int count = min(kThreads, pairs - taps.first) * kTaps;
    for (int i = threadIdx.x; i < count; i += kThreads) dw[taps.first * kTaps + i] = staged[i];
  }
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    winograd_operands(const ELEMENT* __restrict__ x, OPERAND* __restrict__ inputs, const ELEMENT* __restrict__ w,
                      OPERAND* __restrict__ others, int other_blocks, const __grid_constant__ Tiles tiles,
                      const __grid_constant__ Operand x_operand, int pairs, const Divisor group_channels) {
  __shared__ ELEMENT staged[OTHER_LAST ? 1 : kThreads * kTaps];
  const int block = blockIdx.x - other_blocks;
  if (block < 0) {
    transform_filters<OTHER_LAST>(w, others, staged, {static_cast<int>(blockIdx.x) * kThreads, pairs, group_channels});
  } else {
    transform_tile<InputH, InputW, INPUT_LAST, INPUT_LANES, INPUT_VECTOR, INPUT_LEAD>(x, inputs, x_operand, tiles,
                                                                                      block * kThreads + threadIdx.x);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    winograd_results(const float* __restrict__ products, ELEMENT* __restrict__ y, const __grid_constant__ Tiles tiles,
#ifdef EPILOGUE
                     const __grid_constant__ Operand result, const __grid_constant__ Epilogue epilogue) {
  transform_back<OUTPUT_LAST, OUTPUT_LANES, OUTPUT_VECTOR>(products, y, epilogue, result, tiles,
                                                           blockIdx.x * kThreads + threadIdx.x);
#else
                     const __grid_constant__ Operand result) {
  transform_back<OUTPUT_LAST, OUTPUT_LANES, OUTPUT_VECTOR>(products, y, result, tiles,
                                                           blockIdx.x * kThreads + threadIdx.x);
#endif
}
#endif
