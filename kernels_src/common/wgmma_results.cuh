// Of a convolution as a matrix product on wgmma: how sums leave the registers for the result, or for parts of it.
#pragma once

#include "common/wgmma_copies.cuh"

// Where 16 bytes of a row of a swizzled block are, by the number of their word.
__device__ __forceinline__ int word_at(int row, int word) {
  return row * kOutSpan + 16 * (word ^ (row * kOutSpan / 128 & (kOutSpan / 16 - 1)));
}

__device__ __forceinline__ unsigned packed(float first, float second) {
  Vector<ELEMENT, 2> pair;
  pair.at[0] = convert<ELEMENT>(first);
  pair.at[1] = convert<ELEMENT>(second);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// 64 swapped rows of sums as elements in shared memory, in blocks of 64 pixels, each with its 64 filters.
__device__ __forceinline__ void lay_out_swapped(unsigned out, int warp, int lane, const float (&sums)[kSums]) {
  const int word = 2 * warp + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < kTileN / 8; j += 2) {
    const int pixel = 8 * j % 64 + lane / 16 * 8 + lane % 8;
    store_transposed(out + j / 8 * kOutBlock + word_at(pixel, word), packed(sums[4 * j], sums[4 * j + 1]),
                     packed(sums[4 * j + 2], sums[4 * j + 3]), packed(sums[4 * j + 4], sums[4 * j + 5]),
                     packed(sums[4 * j + 6], sums[4 * j + 7]));
  }
}

// 64 rows of sums as elements in shared memory, in blocks of kWide columns.
__device__ __forceinline__ void lay_out(unsigned out, int warp, int lane, const float (&sums)[kSums]) {
  if constexpr (kElement == 2) {
    const int row = 16 * warp + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int j = 0; j < kTileN / 16; j++) {
      const unsigned block = out + 16 * j / kWide * kOutBlock;
      const float* const four = sums + 8 * j;
      store_matrices(block + word_at(row, 2 * (j % (kWide / 16)) + half), packed(four[0], four[1]),
                     packed(four[2], four[3]), packed(four[4], four[5]), packed(four[6], four[7]));
    }
  } else {
    const int row = 16 * warp + lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kTileN / 8; j++) {
      const unsigned block = out + 8 * j / kWide * kOutBlock;
#pragma unroll
      for (int below = 0; below < 2; below++)
        store_pair(block + word_at(row + 8 * below, 2 * (j % (kWide / 8)) + t / 2) + 8 * (t % 2),
                   sums[4 * j + 2 * below], sums[4 * j + 2 * below + 1]);
    }
  }
}

// The tile's sums as elements, through shared memory: `out` of this consumer, `barrier` of its warpgroup.
__device__ __forceinline__ void write_tile(const Shape& shape, const Item& item, const TensorMap* target, unsigned out,
                                           int consumer, const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (thread == 0) stores_have_read();
  warpgroup_barrier(1 + consumer);  // `out` may be written
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if constexpr (SWAPPED)
      lay_out_swapped(out, warp, lane, sums[r]);
    else
      lay_out(out + r * kColumnBlocks * kOutBlock, warp, lane, sums[r]);
  shared_writes_done();
  warpgroup_barrier(1 + consumer);  // `out` is written
  if (thread != 0) return;
  if constexpr (SWAPPED) {
    const int filter = item.tile_m * kTileM + 64 * consumer;
#pragma unroll
    for (int block = 0; block < kTileN / 64; block++) {
      const int pixel = item.tile_n * kTileN + 64 * block;
      if (pixel < shape.columns && filter < shape.rows)
        store_box(target, out + block * kOutBlock, filter, item.group, pixel);
    }
    stores_commit();
    return;
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int first_row = item.tile_m * kTileM + 64 * (consumer * ROWS + r);
    if (first_row >= shape.rows) break;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; block++) {
      const Columns columns = columns_at(shape, item.tile_n, block);
      const unsigned from = out + (r * kColumnBlocks + block) * kOutBlock;
      if (!any(shape, columns)) break;
      if (KIND == WEIGHTS)
        store_box(target, from, columns.first, columns.tap, item.group * shape.rows + first_row);
      else
        store_box(target, from, columns.first, item.group, first_row);
    }
  }
  stores_commit();
}

// Zeros to the pixels of phases that meet no tap, beside those of a consumer's part of the tile: elements, or of a
// part.
__device__ __forceinline__ void write_zeros(const Shape& shape, const Item& item, float* parts, int consumer) {
  constexpr int kVector = 16 / kElement, kVectors = kTileN / kVector, kRows = 64 * ROWS;
  const bool is_part = CLUSTER_K == 1 && shape.splits.by > 1;
  if (!is_part && (item.split > 0 || item.first == item.last)) return;
  char* const to = reinterpret_cast<char*>(is_part ? parts + item.split * static_cast<int64>(shape.size) : parts);
  for (int number = threadIdx.x % 128; number < kRows * kVectors; number += 128) {
    const int row = item.tile_m * kTileM + kRows * consumer + number / kVectors;
    const int column = item.tile_n * kTileN + number % kVectors * kVector;
    if (row >= shape.rows || column >= shape.columns) continue;
    const Pixel pixel = pixel_at(shape, row);
#pragma unroll 1  // else registers that the widest sums need would be spilled
    for (int phase = phases_with_taps(shape); phase < all_phases(shape); phase++) {
      const int line = pixel_line(shape, Phase(shape, phase), pixel);
      if (line < 0) continue;
      const int64 element = (static_cast<int64>(line) * shape.groups + item.group) * shape.columns + column;
      Vector<float, 4>* const there = reinterpret_cast<Vector<float, 4>*>(to + element * (is_part ? 4 : kElement));
      there[0] = {};
      if (kElement < 4 && is_part) there[1] = {};
    }
  }
}

// The tile's sums as elements, through shared memory, where its rows are no neighbours in the result.
__device__ __forceinline__ void write_scattered(const Shape& shape, const Item& item, ELEMENT* to, unsigned out,
                                                int consumer, const float (&sums)[ROWS][kSums]) {
  constexpr int kWords = kOutSpan / 16, kRows = 128 / kWords;
  const int thread = threadIdx.x % 128, word = thread % kWords;
  warpgroup_barrier(1 + consumer);  // `out` may be written
#pragma unroll
  for (int r = 0; r < ROWS; r++) lay_out(out + r * kColumnBlocks * kOutBlock, thread / 32, thread % 32, sums[r]);
  warpgroup_barrier(1 + consumer);  // `out` is written
#pragma unroll
  for (int first = 0; first < 64 * ROWS; first += kRows) {
    const int row = first + thread / kWords;
    const int line = row_line(shape, item, item.tile_m * kTileM + 64 * ROWS * consumer + row);
    if (line < 0) continue;
    ELEMENT* const there = to + (static_cast<int64>(line) * shape.groups + item.group) * shape.columns;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; block++) {
      const int column = item.tile_n * kTileN + block * kWide + word * (16 / kElement);
      if (column >= shape.columns) break;
      const unsigned from = out + (first / 64 * kColumnBlocks + block) * kOutBlock + word_at(row % 64, word);
      *reinterpret_cast<Vector<float, 4>*>(there + column) =
          *reinterpret_cast<const Vector<float, 4>*>(__cvta_shared_to_generic(from));
    }
  }
}

// The tile's sums as they are, to this part's place; elements in the order of the tensor.
__device__ __forceinline__ void write_part(const Shape& shape, const Item& item, float* parts, int consumer,
                                           const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  const int64 pitch =
      KIND == WEIGHTS ? static_cast<int64>(taps) * shape.columns : static_cast<int64>(shape.groups) * shape.columns;
  const int64 first = KIND == WEIGHTS ? item.group * shape.rows * pitch : item.group * shape.columns;
  float* const part = parts + item.split * static_cast<int64>(shape.size) + first;
#pragma unroll
  for (int block = 0; block < kColumnBlocks; block++) {
    const Columns columns = columns_at(shape, item.tile_n, block);
    if (!any(shape, columns)) break;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = item.tile_m * kTileM + 64 * (consumer * ROWS + r) + 16 * (thread / 32) + lane / 4;
      const int lines[2] = {row_line(shape, item, row), row_line(shape, item, row + 8)};
#pragma unroll
      for (int j = 0; j < kWide / 8; j++) {
        const int column = columns.first + 8 * j + 2 * (lane % 4);
        if (column >= shape.columns) break;
#pragma unroll
        for (int below = 0; below < 2; below++)
          if (lines[below] >= 0) {
            const int sum = 4 * (block * kWide / 8 + j) + 2 * below;
            Vector<float, 2> pair;
            pair.at[0] = sums[r][sum];
            pair.at[1] = sums[r][sum + 1];
            *reinterpret_cast<Vector<float, 2>*>(part + lines[below] * pitch + columns.tap * shape.columns + column) =
                pair;
          }
      }
    }
  }
}

// Shares of a cluster's sums, in the ring of stages once all have read it: rows of floats, apart so that no two of a
// warp's meet one bank.
constexpr int kSharePitch = kTileN + 8;

__device__ __forceinline__ void write_share(unsigned to, int consumer, const float (&sums)[ROWS][kSums]) {
  const int lane = threadIdx.x % 32, first = 64 * ROWS * consumer + threadIdx.x % 128 / 32 * 16 + lane / 4;
  consumers_barrier<128 * CONSUMERS>(1 + CONSUMERS);  // all have read the ring
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < kTileN / 8; j++)
#pragma unroll
      for (int below = 0; below < 2; below++)
        store_pair(to + 4 * ((first + 64 * r + 8 * below) * kSharePitch + 8 * j + 2 * (lane % 4)),
                   sums[r][4 * j + 2 * below], sums[r][4 * j + 2 * below + 1]);
}

// Adds this block's rows of the cluster's shares, in order, and writes them.
__device__ __forceinline__ void add_shares(const Shape& shape, unsigned from, ELEMENT* out) {
  constexpr int kVector = 16 / kElement, kRowVectors = kTileN / kVector;
  const Place at = place();
  const Item item = item_at(shape, at, blockIdx.x / kCluster);
  const int power = shares_power(shape, item.phase), rows = kTileM >> power;
  if (STRIDED && item.group >= shape.groups) return;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  for (int number = threadIdx.x; number < rows * kRowVectors; number += kThreads) {
    const int tile_row = item.split * rows + number / kRowVectors, tile_column = number % kRowVectors * kVector;
    const Columns columns = columns_at(shape, item.tile_n, tile_column / kWide);
    const int row = item.tile_m * kTileM + tile_row, column = columns.first + tile_column % kWide;
    const int row_of_all = row_line(shape, item, row);
    if (row_of_all < 0 || column >= shape.columns || !any(shape, columns)) continue;
    Vector<float, kVector> sums = {};
#pragma unroll
    for (int share = 0; share < CLUSTER_K; share++) {
      if (share >> power) break;
      const unsigned there = address_of(from + 4 * (tile_row * kSharePitch + tile_column), at.k - item.split + share);
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const Vector<float, 4> part = load_floats(there + 4 * i);
#pragma unroll
        for (int j = 0; j < 4; j++) sums.at[i + j] += part.at[j];
      }
    }
    Vector<ELEMENT, kVector> rounded;
#pragma unroll
    for (int i = 0; i < kVector; i++) rounded.at[i] = convert<ELEMENT>(sums.at[i]);
    const int64 line = KIND == WEIGHTS ? (static_cast<int64>(item.group) * shape.rows + row) * taps + columns.tap
                                       : static_cast<int64>(row_of_all) * shape.groups + item.group;
    *reinterpret_cast<Vector<ELEMENT, kVector>*>(out + line * shape.columns + column) = rounded;
  }
}
