// Of a convolution as a matrix product on wgmma: how sums leave the registers for the result, or for parts of it.
#pragma once

#include "implicit_gemm/wgmma_copies.cuh"

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

// A block of 64 rows of sums as elements in shared memory; swapped, of 64 pixels with 64 filters each.
__device__ __forceinline__ void lay_out(unsigned out, int warp, int lane, const float* sums) {
  if constexpr (SWAPPED) {
    const int word = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2, sums += 8)
      stmatrix_trans(out + word_at(8 * j + lane / 16 * 8 + lane % 8, word), packed(sums[0], sums[1]),
                     packed(sums[2], sums[3]), packed(sums[4], sums[5]), packed(sums[6], sums[7]));
  } else if constexpr (kElement == 2) {
    const int row = 16 * warp + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int j = 0; j < kWide / 16; j++, sums += 8)
      stmatrix(out + word_at(row, 2 * j + half), packed(sums[0], sums[1]), packed(sums[2], sums[3]),
               packed(sums[4], sums[5]), packed(sums[6], sums[7]));
  } else {
    const int row = 16 * warp + lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kWide / 8; j++, sums += 4)
#pragma unroll
      for (int below = 0; below < 2; below++)
        store_shared_pair(out + word_at(row + 8 * below, 2 * j + t / 2) + 8 * (t % 2), sums[2 * below],
                          sums[2 * below + 1]);
  }
}

// RUN neighbours of an image, which every multiple of RUN in a plane begins.
using Run = Vector<ELEMENT, RUN>;

// Where a pixel of the columns is in the plane of the first of the rows.
__device__ __forceinline__ int64 plane_at(const Shape& shape, const Item& item, int column) {
  int n, at;
  if constexpr (PLANES == EVERYWHERE) {
    const Pixel block = pixel_at(shape, column / kWide);
    n = block.n;
    at = block.w * kWide + column % kWide;
  } else {
    const Pixel pixel = pixel_at(shape, column);
    n = pixel.n;
    at = pixel.h * shape.width.by + pixel.w;
  }
  if (at >= shape.image) return -1;
  return (static_cast<int64>(n) * shape.groups + item.group) * shape.rows * shape.image + at;
}

// A block that has been laid out, run by run: columns are pixels whose images end anywhere in it.
__device__ __forceinline__ void write_runs(const Shape& shape, const Item& item, unsigned from, int first_row,
                                           int first_column, ELEMENT* result) {
  constexpr int kRuns = kWide / RUN;
  const int at = threadIdx.x % 128 % kRuns * RUN, column = first_column + at;
  if (column >= shape.columns) return;
  ELEMENT* const plane = result + plane_at(shape, item, column);
  for (int row = threadIdx.x % 128 / kRuns; row < 64 && first_row + row < shape.rows; row += 128 / kRuns) {
    const unsigned run = from + word_at(row, kElement * at / 16) + kElement * at % 16;
    *reinterpret_cast<Run*>(plane + static_cast<int64>(first_row + row) * shape.image) =
        *reinterpret_cast<const Run*>(__cvta_shared_to_generic(run));
  }
}

// A block that has been laid out, line by line: its rows are no neighbours in the result.
__device__ __forceinline__ void write_lines(const Shape& shape, const Item& item, unsigned from, int first_row,
                                            int first_column, ELEMENT* result) {
  constexpr int kWords = kOutSpan / 16, kRows = 128 / kWords;
  const int word = threadIdx.x % 128 % kWords, column = first_column + word * (16 / kElement);
  if (column >= shape.columns) return;
#pragma unroll
  for (int row = threadIdx.x % 128 / kWords; row < 64; row += kRows) {
    const int line = row_line(shape, item, first_row + row);
    if (line < 0) continue;
    *reinterpret_cast<Vector<float, 4>*>(
        result + (static_cast<int64>(line) * shape.groups + item.group) * shape.columns + column) =
        *reinterpret_cast<const Vector<float, 4>*>(__cvta_shared_to_generic(from + word_at(row, word)));
  }
}

// Begins to store a block that has been laid out.
__device__ __forceinline__ void store_block(const Shape& shape, const Item& item, const TensorMap* target,
                                            unsigned from, int first_row, int block) {
  if constexpr (SWAPPED) {
    tma_store(target, from, first_row, item.group, item.tile_n * kTileN + kOutColumns * block);
  } else if constexpr (kPlanesOfPixels) {
    const Pixel pixels = pixel_at(shape, item.tile_n * kColumnBlocks + block);
    tma_store(target, from, pixels.w * kWide, item.group * shape.rows + first_row, pixels.n);
  } else {
    const Columns columns = columns_at(shape, item.tile_n, block);
    if constexpr (KIND == WEIGHTS)
      tma_store(target, from, columns.first, columns.tap, item.group * shape.rows + first_row);
    else
      tma_store(target, from, columns.first, item.group, first_row);
  }
  tma_store_commit_group();
}

// The tile's sums as elements, block by block through the place of this consumer in shared memory and the `other`.
__device__ __forceinline__ void write_tile(const Shape& shape, const Item& item, const TensorMap* target,
                                           ELEMENT* result, unsigned& place, unsigned& other, int consumer,
                                           const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int first_row = item.tile_m * kTileM + 64 * (consumer * ROWS + r);
    if (first_row >= shape.rows) break;
#pragma unroll
    for (int block = 0; block < kTileN / kOutColumns; block++) {
      const int first_column = item.tile_n * kTileN + block * kOutColumns;
      if (SWAPPED ? first_column >= shape.columns : !any(shape, columns_at(shape, item.tile_n, block))) break;
      lay_out(place, thread / 32, thread % 32, sums[r] + block * kOutColumns / 2);
      fence_proxy_async();
      if (thread == 0) tma_store_wait_group_read();  // the other place, where the next block goes
      warpgroup_sync(1 + consumer);                  // the block is laid out
      if constexpr (PLANES == IN_RESULT)
        write_runs(shape, item, place, first_row, first_column, result);
      else if constexpr (STRIDED)
        write_lines(shape, item, place, first_row, first_column, result);
      else if (thread == 0)
        store_block(shape, item, target, place, first_row, block);
      const unsigned written = place;
      place = other;
      other = written;
    }
  }
}

// The tile's sums as they are, to the planes of a part; neighbours of a pair may be in two images.
__device__ __forceinline__ void write_part_planes(const Shape& shape, const Item& item, float* part, int consumer,
                                                  const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int j = 0; j < kTileN / 8; j++) {
    const int column = item.tile_n * kTileN + 8 * j + 2 * (lane % 4);
    if (column >= shape.columns) break;
    const int64 at = plane_at(shape, item, column);
    const int64 next = RUN % 2 == 0 ? at + 1 : column + 1 < shape.columns ? plane_at(shape, item, column + 1) : -1;
    if (at < 0) continue;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int below = 0; below < 2; below++) {
        const int row = item.tile_m * kTileM + 64 * (consumer * ROWS + r) + 16 * (thread / 32) + lane / 4 + 8 * below;
        if (row >= shape.rows) continue;
        const int64 line = static_cast<int64>(row) * shape.image;
        const float first = sums[r][4 * j + 2 * below], second = sums[r][4 * j + 2 * below + 1];
        if constexpr (RUN % 2 == 0) {
          *reinterpret_cast<Vector<float, 2>*>(part + at + line) = {first, second};
        } else {
          part[at + line] = first;
          if (next >= 0) part[next + line] = second;
        }
      }
  }
}

// Zeros to the pixels of phases that meet no tap, beside those of a consumer's part of the tile: elements, or of a
// part. Waits for the step before itself: all other writes follow a copy, which has waited, but these need none.
__device__ __forceinline__ void write_zeros(const Shape& shape, const Item& item, float* parts, int consumer) {
  constexpr int kVector = 16 / kElement, kVectors = kTileN / kVector, kRows = 64 * ROWS;
  const bool is_part = CLUSTER_K == 1 && shape.splits.by > 1;
  if (!is_part && (item.split > 0 || item.first == item.last)) return;
  griddepcontrol_wait();
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

// The tile's sums as they are, to this part's place; elements in the order of the tensor.
__device__ __forceinline__ void write_part(const Shape& shape, const Item& item, float* parts, int consumer,
                                           const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  const int64 pitch =
      KIND == WEIGHTS ? static_cast<int64>(taps) * shape.columns : static_cast<int64>(shape.groups) * shape.columns;
  const int64 first = KIND == WEIGHTS ? item.group * shape.rows * pitch : item.group * shape.columns;
  float* const part = parts + item.split * static_cast<int64>(shape.size) + first;
  if constexpr (kPixelColumns && PLANES) {
    write_part_planes(shape, item, part - first, consumer, sums);
    return;
  }
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
  named_barrier_sync<128 * CONSUMERS>(1 + CONSUMERS);  // all have read the ring
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < kTileN / 8; j++)
#pragma unroll
      for (int below = 0; below < 2; below++)
        store_shared_pair(to + 4 * ((first + 64 * r + 8 * below) * kSharePitch + 8 * j + 2 * (lane % 4)),
                          sums[r][4 * j + 2 * below], sums[r][4 * j + 2 * below + 1]);
}

// Adds this block's rows of the cluster's shares, in order, and writes them.
__device__ __forceinline__ void add_shares(const Shape& shape, unsigned from, ELEMENT* out) {
  constexpr int kVector = 4, kRowVectors = kTileN / kVector;
  constexpr int kPiece = RUN < kVector ? RUN : kVector;
  using Piece = Vector<ELEMENT, kPiece>;
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
    Vector<float, kVector> parts[CLUSTER_K];  // all on their way before the first is added
#pragma unroll
    for (int share = 0; share < CLUSTER_K; share++)
      if (!STRIDED || share >> power == 0)
        parts[share] = load_cluster_floats(map_shared_rank(from + 4 * (tile_row * kSharePitch + tile_column),
                                                           STRIDED ? at.k - item.split + share : share));
    Vector<ELEMENT, kVector> rounded;
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      float sum = parts[0].at[i];
#pragma unroll
      for (int share = 1; share < CLUSTER_K; share++)
        if (!STRIDED || share >> power == 0) sum += parts[share].at[i];
      rounded.at[i] = convert<ELEMENT>(sum);
    }
    if constexpr (kPixelColumns && PLANES) {
      const int64 line = static_cast<int64>(row) * shape.image;
#pragma unroll
      for (int run = 0; run < kVector && column + run < shape.columns; run += kPiece)
        if (const int64 there = plane_at(shape, item, column + run); there >= 0)
          *reinterpret_cast<Piece*>(out + there + line) = *reinterpret_cast<const Piece*>(rounded.at + run);
      continue;
    }
    const int64 line = KIND == WEIGHTS ? (static_cast<int64>(item.group) * shape.rows + row) * taps + columns.tap
                                       : static_cast<int64>(row_of_all) * shape.groups + item.group;
    *reinterpret_cast<Vector<ELEMENT, kVector>*>(out + line * shape.columns + column) = rounded;
  }
}
