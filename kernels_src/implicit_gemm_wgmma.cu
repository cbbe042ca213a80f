// Convolution as a matrix product on Hopper's tensor cores, channels last, float32 sums; float32 counts as TF32.
// FORWARD:  y[m, k] = sum_{tap, c} x[m at tap, c] * w[k, tap, c]; m: output pixels, rows; k: filters, columns.
// DATA:     dx[m, c] = sum_{tap, k} dy[m at tap, k] * w[k, tap, c]; m: input pixels; stride 1; taps backwards.
// WEIGHTS:  dw[k, tap c] = sum_m dy[m, k] * x[m at tap, c]; m: output pixels, the depth.
// SWAPPED, pixels are the columns. They come by the copy engine's im2col mode (TMA), padding included; all else as
// boxes, and so do POINTWISE pixels: one tap, stride 1, no padding. Two warps copy, one pixels and one boxes, into a
// ring of STAGES; CONSUMERS warpgroups multiply, ROWS blocks of 64 rows each, and write blocks of WIDE columns, for
// WEIGHTS each of one tap. Grid: one dimension; blocks are persistent and take tiles, or SPLITS parts of each tile's
// depth as float32, which `add_parts` adds in order. A cluster's CLUSTER_M x CLUSTER_N blocks have neighbouring tiles,
// and each copies a share of what they have in common; or CLUSTER_K blocks add parts of one tile in order.
// Design after the public description of Hopper's warp-specialised GEMMs (CUTLASS, sm90).
#if !defined(ELEMENT) || !defined(KIND) || !defined(TILE_N) || !defined(TILE_K) || !defined(STAGES)
#error "define ELEMENT, KIND, TILE_N, TILE_K and STAGES"
#endif
#if !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS) || !defined(WIDE)
#error "define CONSUMERS, ROWS, BLOCKS and WIDE"
#endif
#if !defined(CLUSTER_M) || !defined(CLUSTER_N) || !defined(CLUSTER_K) || !defined(POINTWISE) || !defined(SWAPPED)
#error "define CLUSTER_M, CLUSTER_N, CLUSTER_K, POINTWISE and SWAPPED"
#endif
#define PRODUCT_COLUMNS TILE_N

#include "common/divisor.cuh"
#include "common/products.cuh"

enum Kind { FORWARD, DATA, WEIGHTS };

constexpr int kBlocks = CONSUMERS * ROWS, kTileM = 64 * kBlocks, kTileN = TILE_N, kTileK = TILE_K;
constexpr int kCluster = CLUSTER_M * CLUSTER_N * CLUSTER_K;
static_assert(CLUSTER_K == 1 || CLUSTER_M * CLUSTER_N == 1, "blocks share what they copy, or what they add");
constexpr int kThreads = 128 * CONSUMERS + 64;
constexpr int kSums = TILE_N / 2;
constexpr int kElement = sizeof(ELEMENT);
// Whether the depth lies side by side in the filter (TF32 backward data takes one that `transpose_filters` has laid out
// so), in the rows' operand and in the columns'.
constexpr bool kDeepFilter = KIND == FORWARD || (KIND == DATA && kElement == 4);
constexpr bool kDeepRows = SWAPPED ? kDeepFilter : KIND != WEIGHTS, kDeepColumns = SWAPPED || kDeepFilter;
static_assert(!SWAPPED || (KIND != WEIGHTS && kElement == 2 && ROWS == 1 && kCluster == 1), "swaps what it can");

// A span is what swizzling covers: the depth of a step, 64 rows, or a block of columns.
constexpr int kSpanDepth = kElement * kTileK;
constexpr int kWide = WIDE, kColumnBlocks = kTileN / kWide;
constexpr int kSpanWide = kElement * kWide;
static_assert(kTileN % kWide == 0, "tiles have whole blocks of columns");
static_assert(kSpanWide == 128 || kSpanWide == 64 || kSpanWide == 32, "swizzles span 32 to 128");
static_assert(kSpanDepth == 128 || (KIND != WEIGHTS && (kSpanDepth == 64 || kSpanDepth == 32)), "swizzles span so");
static_assert(ROWS * kSums <= 192, "sums stay in registers");

constexpr int kRowBytes = kElement * kTileM * kTileK, kColumnBytes = kElement * kTileN * kTileK;
constexpr int kStageBytes = kRowBytes + kColumnBytes, kColumnBlock = kWide * kElement * kTileK;
static_assert(kRowBytes % 1024 == 0 && kColumnBytes % 1024 == 0, "operands begin where swizzles do");
// Of one consumer's tile, as it is written: blocks of 64 rows, kWide columns; swapped, of 64 pixels and filters.
constexpr int kOutSpan = SWAPPED ? 128 : kSpanWide, kOutBlock = 64 * kOutSpan;
constexpr int kOutBytes = SWAPPED ? kTileN / 64 * kOutBlock : ROWS * kColumnBlocks * kOutBlock;
static_assert(!SWAPPED || kTileN % 64 == 0, "swapped tiles have whole blocks of pixels");

// Depth side by side: rows of one span, 8 of them a repetition. Else: a repetition is 8 terms of kWide or 64.
constexpr unsigned long long kRowForm =
    kDeepRows ? operand_form(16, 8 * kSpanDepth, kSpanDepth) : operand_form(kTileK * 128, 1024, 128);
constexpr unsigned long long kColumnForm =
    kDeepColumns ? operand_form(16, 8 * kSpanDepth, kSpanDepth) : operand_form(kColumnBlock, 8 * kSpanWide, kSpanWide);
// Bytes from one product's terms to the next's, and from one block of 64 rows to the next.
constexpr int kRowStep = kDeepRows ? 32 : 16 * 128;
constexpr int kColumnStep = kDeepColumns ? 32 : 16 * kSpanWide;
constexpr int kRowBlock = 64 * kElement * kTileK;

// Of one convolution; sizes of one group, `columns` for WEIGHTS of one tap. `steps` are of a tile's depth: without
// WEIGHTS `chunks` a tap, which meet `channels` in all; with it a tap has `chunks` blocks of columns. Copies of pixels
// walk images of `height` x `width`, from `low` on; taps step by `dilation`.
struct Shape {
  int rows, columns, groups, taps_y;
  Divisor taps_x, chunks;
  int channels;
  Divisor height, width;
  int stride_h, stride_w, low_h, low_w, dilation_h, dilation_w;
  Divisor tiles_m, tiles_n;  // in clusters
  int steps;
  Divisor splits;
  int items;
};

// The place of a block in its cluster: along rows, columns and depth.
struct Place {
  int m, n, k;
};

__device__ __forceinline__ Place place() {
  const int rank = kCluster > 1 ? cluster_rank() : 0;
  if constexpr (CLUSTER_K > 1) return {0, 0, rank};
  return {rank / CLUSTER_N, rank % CLUSTER_N, 0};
}

// Blocks of a cluster, one bit each: those with the same rows, and those with the same columns.
__device__ __forceinline__ unsigned short same_rows(const Place& at) {
  return ((1 << CLUSTER_N) - 1) << at.m * CLUSTER_N;
}

__device__ __forceinline__ unsigned short same_columns(const Place& at) {
  unsigned short blocks = 0;
#pragma unroll
  for (int m = 0; m < CLUSTER_M; m++) blocks |= 1 << (m * CLUSTER_N + at.n);
  return blocks;
}

struct Item {
  int tile_m, tile_n, group, split, first, last;
};

// A block of a tile's columns: where its columns begin, and for WEIGHTS their tap.
struct Columns {
  int first, tap, tap_y, tap_x;
};

__device__ __forceinline__ bool any(const Shape& shape, const Columns& columns) {
  return KIND == WEIGHTS ? columns.tap_y < shape.taps_y : columns.first < shape.columns;
}

__device__ __forceinline__ Columns columns_at(const Shape& shape, int tile_n, int block) {
  const int number = tile_n * kColumnBlocks + block;
  Columns columns{};
  if constexpr (KIND == WEIGHTS) {
    columns.tap = number / shape.chunks;
    columns.first = (number - columns.tap * shape.chunks.by) * kWide;
    columns.tap_y = columns.tap / shape.taps_x;
    columns.tap_x = columns.tap - columns.tap_y * shape.taps_x.by;
  } else {
    columns.first = number * kWide;
  }
  return columns;
}

__device__ __forceinline__ Item item_at(const Shape& shape, const Place& at, int number) {
  Item item;
  const int row = number / shape.tiles_n, part = row / shape.tiles_m;
  item.tile_n = (number - row * shape.tiles_n.by) * CLUSTER_N + at.n;
  item.tile_m = (row - part * shape.tiles_m.by) * CLUSTER_M + at.m;
  item.group = CLUSTER_K > 1 ? part : part / shape.splits;
  item.split = CLUSTER_K > 1 ? at.k : part - item.group * shape.splits.by;
  item.first = shape.steps * item.split / shape.splits;
  item.last = shape.steps * (item.split + 1) / shape.splits;
  return item;
}

struct Pixel {
  int n, h, w;
};

// The pixel of that number, counted in images of the shape's height and width.
__device__ __forceinline__ Pixel pixel_at(const Shape& shape, int number) {
  const int row = number / shape.width, n = row / shape.height;
  return {n, row - n * shape.height.by, number - row * shape.width.by};
}

__device__ __forceinline__ Pixel sum(const Shape& shape, Pixel a, const Pixel& b) {
  a.w += b.w;
  a.h += b.h;
  a.n += b.n;
  if (a.w >= shape.width.by) {
    a.w -= shape.width.by;
    a.h++;
  }
  if (a.h >= shape.height.by) {
    a.h -= shape.height.by;
    a.n++;
  }
  return a;
}

// The channel and the tap of a step, without WEIGHTS.
struct Depth {
  int at, tap, tap_y, tap_x;

  __device__ __forceinline__ Depth(const Shape& shape, int step) {
    tap = step / shape.chunks;
    at = (step - tap * shape.chunks.by) * kTileK;
    tap_y = tap / shape.taps_x;
    tap_x = tap - tap_y * shape.taps_x.by;
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    at += kTileK;
    if (at < shape.chunks.by * kTileK) return;
    at = 0;
    tap++;
    if (++tap_x == shape.taps_x.by) {
      tap_x = 0;
      tap_y++;
    }
  }
};

// This block's share of an item's copies of pixels, step by step: of the rows, for WEIGHTS of the columns.
struct PixelCopies {
  static constexpr int kShares = KIND == WEIGHTS ? CLUSTER_M : CLUSTER_N;
  static constexpr int kPixels = (KIND == WEIGHTS ? kTileK : SWAPPED ? kTileN : kTileM) / kShares;
  int share, bytes;  // bytes that this block gets a step
  unsigned short blocks;
  int number;  // of the first pixel
  Pixel pixel, stride;
  Depth depth;
  Columns columns[KIND == WEIGHTS ? kColumnBlocks : 1];

  __device__ __forceinline__ PixelCopies(const Shape& shape, const Place& at, const Item& item)
      : share(KIND == WEIGHTS ? at.m : at.n),
        bytes(KIND == WEIGHTS || SWAPPED ? kColumnBytes : kRowBytes),
        blocks(KIND == WEIGHTS ? same_columns(at) : same_rows(at)),
        number((KIND == WEIGHTS ? item.first * kTileK
                : SWAPPED       ? item.tile_n * kTileN
                                : item.tile_m * kTileM) +
               share * kPixels),
        pixel(pixel_at(shape, number)),
        stride{},
        depth(shape, item.first) {
    if constexpr (KIND == WEIGHTS) {
      stride = pixel_at(shape, kTileK);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++) {
        columns[block] = columns_at(shape, item.tile_n, block);
        if (!any(shape, columns[block])) bytes -= kColumnBlock;
      }
    }
  }

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (KIND == WEIGHTS) {
      number += kTileK;
      pixel = sum(shape, pixel, stride);
    } else {
      depth.next(shape);
    }
  }

  __device__ __forceinline__ void begin(const Shape& shape, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
    const int w = pixel.w * shape.stride_w + shape.low_w, h = pixel.h * shape.stride_h + shape.low_h;
    if constexpr (KIND == WEIGHTS) {
      const unsigned to = stage + kRowBytes + share * kPixels * kSpanWide;
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++) {
        const Columns& from = columns[block];
        if (!any(shape, from)) break;
        if constexpr (POINTWISE)
          copy_box<kShares>(to + block * kColumnBlock, map, barrier, from.first, item.group, number, blocks);
        else
          copy_pixels<kShares>(to + block * kColumnBlock, map, barrier, item.group * shape.columns + from.first, w, h,
                               pixel.n, from.tap_x * shape.dilation_w, from.tap_y * shape.dilation_h, blocks);
      }
      return;
    }
    const unsigned to = stage + (SWAPPED ? kRowBytes : share * kPixels * kSpanDepth);
    if constexpr (POINTWISE) {
      copy_box<kShares>(to, map, barrier, depth.at, item.group, number, blocks);
    } else {
      const int tap_y = KIND == DATA ? shape.taps_y - 1 - depth.tap_y : depth.tap_y;
      const int tap_x = KIND == DATA ? shape.taps_x.by - 1 - depth.tap_x : depth.tap_x;
      copy_pixels<kShares>(to, map, barrier, item.group * shape.channels + depth.at, w, h, pixel.n,
                           tap_x * shape.dilation_w, tap_y * shape.dilation_h, blocks);
    }
  }
};

// Likewise its copies of boxes: of the columns, for WEIGHTS of the rows.
struct BoxCopies {
  static constexpr int kShares = KIND == WEIGHTS ? CLUSTER_N : CLUSTER_M;
  static constexpr int kLength = (kDeepFilter ? kTileN : kTileK) / kShares;
  static_assert(kLength % 8 == 0, "shares are whole repetitions of a swizzle");
  int share, bytes, pixel;
  unsigned short blocks;
  Depth depth;

  __device__ __forceinline__ BoxCopies(const Shape& shape, const Place& at, const Item& item)
      : share(KIND == WEIGHTS ? at.n : at.m),
        bytes(KIND == WEIGHTS || SWAPPED ? kRowBytes : kColumnBytes),
        pixel(item.first * kTileK + share * kLength),
        blocks(KIND == WEIGHTS ? same_rows(at) : same_columns(at)),
        depth(shape, item.first) {}

  __device__ __forceinline__ void next(const Shape& shape) {
    if constexpr (KIND == WEIGHTS)
      pixel += kTileK;
    else
      depth.next(shape);
  }

  __device__ __forceinline__ void begin(const Shape& shape, const Item& item, const TensorMap* map, unsigned stage,
                                        unsigned barrier) const {
    if constexpr (KIND == WEIGHTS) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        copy_box<kShares>(stage + block * kRowBlock + share * kLength * 128, map, barrier,
                          item.tile_m * kTileM + 64 * block, item.group, pixel, blocks);
    } else if constexpr (SWAPPED && kDeepFilter) {
      copy_box(stage, map, barrier, depth.at, depth.tap, item.group * shape.rows + item.tile_m * kTileM);
    } else if constexpr (SWAPPED) {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        copy_box(stage + block * kRowBlock, map, barrier, item.tile_m * kTileM + 64 * block, depth.tap,
                 item.group * shape.channels + depth.at);
    } else if constexpr (kDeepFilter) {
      copy_box<kShares>(stage + kRowBytes + share * kLength * kSpanDepth, map, barrier, depth.at, depth.tap,
                        item.group * shape.columns + item.tile_n * kTileN + share * kLength, blocks);
    } else {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block++)
        copy_box<kShares>(stage + kRowBytes + block * kColumnBlock + share * kLength * kSpanWide, map, barrier,
                          item.tile_n * kTileN + block * kWide, depth.tap,
                          item.group * shape.channels + depth.at + share * kLength, blocks);
    }
  }
};

// All blocks of the cluster have come here; what they wrote to shared memory before is seen.
__device__ __forceinline__ void meet() {
  if constexpr (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    block_barrier();
  }
}

template <typename Copies>
__device__ __forceinline__ void produce(const Shape& shape, const TensorMap* map, unsigned stages, unsigned full,
                                        unsigned empty) {
  const Place at = place();
  int number = blockIdx.x / kCluster;
  Item item = item_at(shape, at, number);
  Copies copies(shape, at, item);
  meet();  // barriers are ready
  if (threadIdx.x % 32 == 0) {
    int slot = 0;
    unsigned parity = 1;  // the first round finds all stages empty
    while (true) {
      for (int step = item.first; step < item.last; step++) {
        barrier_wait(empty + 8 * slot, parity);
        barrier_expect(full + 8 * slot, copies.bytes);
        copies.begin(shape, item, map, stages + slot * kStageBytes, full + 8 * slot);
        copies.next(shape);
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      }
      number += gridDim.x / kCluster;
      if (number >= shape.items) break;
      item = item_at(shape, at, number);
      copies = Copies(shape, at, item);
    }
  }
  __syncwarp();
}

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

// The tile's sums as they are, to this part's place; elements in the order of the tensor.
__device__ __forceinline__ void write_part(const Shape& shape, const Item& item, float* parts, int consumer,
                                           const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  const int64 pitch =
      KIND == WEIGHTS ? static_cast<int64>(taps) * shape.columns : static_cast<int64>(shape.groups) * shape.columns;
  const int64 all_rows = KIND == WEIGHTS ? static_cast<int64>(shape.groups) * shape.rows : shape.rows;
  const int64 first = KIND == WEIGHTS ? item.group * shape.rows * pitch : item.group * shape.columns;
  float* const part = parts + item.split * all_rows * pitch + first;
#pragma unroll
  for (int block = 0; block < kColumnBlocks; block++) {
    const Columns columns = columns_at(shape, item.tile_n, block);
    if (!any(shape, columns)) break;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = item.tile_m * kTileM + 64 * (consumer * ROWS + r) + 16 * (thread / 32) + lane / 4;
#pragma unroll
      for (int j = 0; j < kWide / 8; j++) {
        const int column = columns.first + 8 * j + 2 * (lane % 4);
        if (column >= shape.columns) break;
#pragma unroll
        for (int below = 0; below < 2; below++)
          if (row + 8 * below < shape.rows) {
            const int sum = 4 * (block * kWide / 8 + j) + 2 * below;
            Vector<float, 2> pair;
            pair.at[0] = sums[r][sum];
            pair.at[1] = sums[r][sum + 1];
            *reinterpret_cast<Vector<float, 2>*>(part + (row + 8 * below) * pitch + columns.tap * shape.columns +
                                                 column) = pair;
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
  constexpr int kVector = 16 / kElement, kRowVectors = kTileN / kVector, kRows = kTileM / CLUSTER_K;
  const Place at = place();
  const Item item = item_at(shape, at, blockIdx.x / kCluster);
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x.by : 1;
  for (int number = threadIdx.x; number < kRows * kRowVectors; number += kThreads) {
    const int tile_row = at.k * kRows + number / kRowVectors, tile_column = number % kRowVectors * kVector;
    const Columns columns = columns_at(shape, item.tile_n, tile_column / kWide);
    const int row = item.tile_m * kTileM + tile_row, column = columns.first + tile_column % kWide;
    if (row >= shape.rows || column >= shape.columns || !any(shape, columns)) continue;
    Vector<float, kVector> sums = {};
#pragma unroll
    for (int share = 0; share < CLUSTER_K; share++) {
      const unsigned there = address_of(from + 4 * (tile_row * kSharePitch + tile_column), share);
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
                                       : static_cast<int64>(row) * shape.groups + item.group;
    *reinterpret_cast<Vector<ELEMENT, kVector>*>(out + line * shape.columns + column) = rounded;
  }
}

__device__ __forceinline__ void consume(const Shape& shape, const TensorMap* target, float* parts, int consumer,
                                        unsigned stages, unsigned full, unsigned empty, unsigned out) {
  meet();  // barriers are ready
  const Place at = place();
  const int lane = threadIdx.x % 32;  // tells one block of those that copy to this one that a stage may be filled again
  const bool signals = lane < CLUSTER_M * CLUSTER_N && (lane / CLUSTER_N == at.m || lane % CLUSTER_N == at.n);
  int slot = 0;
  unsigned parity = 0;
  for (int number = blockIdx.x / kCluster; number < shape.items; number += gridDim.x / kCluster) {
    const Item item = item_at(shape, at, number);
    float sums[ROWS][kSums];
    int before = -1;
    for (int step = item.first; step < item.last; step++) {
      barrier_wait(full + 8 * slot, parity);
      const unsigned rows = stages + slot * kStageBytes + consumer * ROWS * kRowBlock;
      const unsigned columns = stages + slot * kStageBytes + kRowBytes;
      products_begin();
#pragma unroll
      for (int k = 0; k < kElement * kTileK / 32; k++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
          Products<ELEMENT>::begin<!kDeepRows, !kDeepColumns>(
              sums[r], operand(kRowForm, rows + r * kRowBlock + k * kRowStep),
              operand(kColumnForm, columns + k * kColumnStep), step > item.first || k > 0);
      products_commit();
      products_wait<1>();  // the step before is done with its stage
      if (before >= 0 && signals) barrier_arrive<CLUSTER_M * CLUSTER_N>(empty + 8 * before, lane);
      before = slot;
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
    products_wait<0>();
    if (signals) barrier_arrive<CLUSTER_M * CLUSTER_N>(empty + 8 * before, lane);
    if (CLUSTER_K > 1)
      write_share(stages, consumer, sums);
    else if (SWAPPED || shape.splits.by == 1)
      write_tile(shape, item, target, out, consumer, sums);
    else
      write_part(shape, item, parts, consumer, sums);
  }
  if (threadIdx.x % 128 == 0) stores_have_read();
  __syncwarp();
}

#if CLUSTER_M * CLUSTER_N * CLUSTER_K > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER_M * CLUSTER_N * CLUSTER_K, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                        const __grid_constant__ TensorMap target, float* parts, int all_rows, int all_columns,
                        int groups, int channels, int taps_y, int stride_h, int stride_w, int low_h, int low_w,
                        int dilation_h, int dilation_w, int steps, int items, int taps_x, unsigned taps_x_multiplier,
                        int taps_x_shift, int chunks, unsigned chunks_multiplier, int chunks_shift, int height,
                        unsigned height_multiplier, int height_shift, int width, unsigned width_multiplier,
                        int width_shift, int tiles_m, unsigned tiles_m_multiplier, int tiles_m_shift, int tiles_n,
                        unsigned tiles_n_multiplier, int tiles_n_shift, int splits, unsigned splits_multiplier,
                        int splits_shift) {
  const Shape shape{all_rows,
                    all_columns,
                    groups,
                    taps_y,
                    {taps_x, taps_x_multiplier, taps_x_shift},
                    {chunks, chunks_multiplier, chunks_shift},
                    channels,
                    {height, height_multiplier, height_shift},
                    {width, width_multiplier, width_shift},
                    stride_h,
                    stride_w,
                    low_h,
                    low_w,
                    dilation_h,
                    dilation_w,
                    {tiles_m, tiles_m_multiplier, tiles_m_shift},
                    {tiles_n, tiles_n_multiplier, tiles_n_shift},
                    steps,
                    {splits, splits_multiplier, splits_shift},
                    items};
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
  const unsigned stages = (shared_address(shared) + 1023) / 1024 * 1024;
  const unsigned out = stages + STAGES * kStageBytes;
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  const int role = threadIdx.x / 128;
  if (role < CONSUMERS) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        barrier_init(full + 8 * i, 2);
        barrier_init(empty + 8 * i, 4 * CONSUMERS * (CLUSTER_M + CLUSTER_N - 1));
      }
      barrier_init_done();
    }
    consume(shape, &target, parts, role, stages, full, empty, out + role * kOutBytes);
  } else if (threadIdx.x < CONSUMERS * 128 + 32) {
    const TensorMap* map = KIND == WEIGHTS || SWAPPED ? &columns : &rows;
    if (threadIdx.x % 32 == 0) prefetch(map);
    produce<PixelCopies>(shape, map, stages, full, empty);
  } else {
    const TensorMap* map = KIND == WEIGHTS || SWAPPED ? &rows : &columns;
    if (threadIdx.x % 32 == 0) prefetch(map);
    produce<BoxCopies>(shape, map, stages, full, empty);
  }
  if constexpr (CLUSTER_K > 1) {
    meet();  // all shares are written
    add_shares(shape, stages, reinterpret_cast<ELEMENT*>(parts));
  }
  if constexpr (kCluster > 1) meet();  // others signal this block's barriers, or read its share, until here
}

// out[i] = sum of part[i] over the parts, in order.
extern "C" __global__ void __launch_bounds__(256) add_parts(const float* parts, ELEMENT* out, int64 count, int splits) {
  const int64 at = 4 * (blockIdx.x * 256ll + threadIdx.x);
  if (at >= count) return;
  Vector<float, 4> sum = *reinterpret_cast<const Vector<float, 4>*>(parts + at);
  for (int split = 1; split < splits; split++) {
    const Vector<float, 4> part = *reinterpret_cast<const Vector<float, 4>*>(parts + split * count + at);
#pragma unroll
    for (int i = 0; i < 4; i++) sum.at[i] += part.at[i];
  }
  Vector<ELEMENT, 4> rounded;
#pragma unroll
  for (int i = 0; i < 4; i++) rounded.at[i] = convert<ELEMENT>(sum.at[i]);
  *reinterpret_cast<Vector<ELEMENT, 4>*>(out + at) = rounded;
}

// out[group, c, tap, k] = w[group, k, tap, c]; one block a 32 x 32 tile of one tap.
extern "C" __global__ void __launch_bounds__(256)
    transpose_filters(const ELEMENT* w, ELEMENT* out, int groups, int filters, int channels, int taps) {
  __shared__ ELEMENT tile[32][33];
  const int tiles_k = (filters + 31) / 32, tiles_c = (channels + 31) / 32;
  int number = blockIdx.x;
  const int first_c = number % tiles_c * 32;
  number /= tiles_c;
  const int first_k = number % tiles_k * 32;
  number /= tiles_k;
  const int tap = number % taps, group = number / taps;
  const int x = threadIdx.x % 32;
  for (int y = threadIdx.x / 32; y < 32; y += 8)
    if (first_k + y < filters && first_c + x < channels)
      tile[y][x] = w[(static_cast<int64>(group * filters + first_k + y) * taps + tap) * channels + first_c + x];
  __syncthreads();  // the tile is there
  for (int y = threadIdx.x / 32; y < 32; y += 8)
    if (first_c + y < channels && first_k + x < filters)
      out[(static_cast<int64>(group * channels + first_c + y) * taps + tap) * filters + first_k + x] = tile[x][y];
}
