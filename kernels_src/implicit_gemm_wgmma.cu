// Convolution as a matrix product on Hopper's tensor cores, channels last, float32 sums; float32 elements count as
// TF32.
//
// FORWARD:  y[m, k]  = sum_{tap, c} x[m at tap, c] * w[k, tap, c]   m: output pixels, rows; k: filters, columns
// DATA:     dx[m, c] = sum_{tap, k} dy[m at tap, k] * w[k, tap, c]  m: input pixels; stride 1; taps backwards
// WEIGHTS:  dw[k, c] = sum_{m} dy[m, k] * x[m at tap, c]            for each tap; m: output pixels, the depth
// Pixels at a tap are copied by the copy engine in its im2col mode, padding included (TMA); all else as boxes.
// One thread copies into a ring of STAGES; CONSUMERS warpgroups multiply, ROWS blocks of 64 rows each, and write their
// tile through shared memory. Blocks are persistent: they take tiles, or SPLITS parts of each tile's depth, in turn;
// parts are written as float32 and added by `add_parts`, always in the same order.
// Grid: one dimension. Design after the public description of Hopper's warp-specialised GEMMs (CUTLASS, sm90).
#if !defined(ELEMENT) || !defined(KIND) || !defined(TILE_N) || !defined(TILE_K) || !defined(STAGES)
#error "define ELEMENT, KIND, TILE_N, TILE_K and STAGES"
#endif
#if !defined(CONSUMERS) || !defined(ROWS) || !defined(BLOCKS)
#error "define CONSUMERS, ROWS and BLOCKS"
#endif
#define PRODUCT_COLUMNS TILE_N

#include "common/products.cuh"

enum Kind { FORWARD, DATA, WEIGHTS };

constexpr int kBlocks = CONSUMERS * ROWS, kTileM = 64 * kBlocks, kTileN = TILE_N, kTileK = TILE_K;
constexpr int kThreads = 128 * (CONSUMERS + 1);
constexpr int kSums = TILE_N / 2;
constexpr bool kMovesRegisters = kThreads * BLOCKS == 384;  // from the warpgroup that copies to those that multiply
constexpr bool kDeepRows = KIND != WEIGHTS;                 // the depth lies side by side in the rows' operand
constexpr int kElement = sizeof(ELEMENT);
// And in the columns'; TF32 backward data takes a filter that `transpose_filters` has laid out so.
constexpr bool kDeepColumns = KIND == FORWARD || (KIND == DATA && kElement == 4);

// A span is what swizzling covers: the depth of a step, or 128 bytes of rows or columns (64 where the tile has fewer).
constexpr int kSpanDepth = kElement * kTileK;
constexpr int kWide = kTileN * kElement % 128 == 0 ? 128 / kElement : 64 / kElement;
constexpr int kSpanWide = kElement * kWide;
static_assert(kSpanDepth == 128 || (kDeepRows && (kSpanDepth == 64 || kSpanDepth == 32)), "swizzles span 32 to 128");
static_assert(ROWS * kSums <= 192, "sums stay in registers");

constexpr int kRowBytes = kElement * kTileM * kTileK, kColumnBytes = kElement * kTileN * kTileK;
constexpr int kStageBytes = kRowBytes + kColumnBytes;
static_assert(kRowBytes % 1024 == 0 && kColumnBytes % 1024 == 0, "operands begin where swizzles do");
// Of one consumer's tile: blocks of 64 rows, kWide columns.
constexpr int kOutBlock = 64 * kSpanWide;
constexpr int kOutBytes = ROWS * (kTileN / kWide) * kOutBlock;

// Depth side by side: rows of one span, 8 of them a repetition. Else: a repetition is 8 terms of kWide or 64.
constexpr unsigned long long kRowForm =
    kDeepRows ? operand_form(16, 8 * kSpanDepth, kSpanDepth) : operand_form(kTileK * 128, 1024, 128);
constexpr unsigned long long kColumnForm = kDeepColumns ? operand_form(16, 8 * kSpanDepth, kSpanDepth)
                                                        : operand_form(kTileK * kSpanWide, 8 * kSpanWide, kSpanWide);
// Bytes from one product's terms to the next's, and from one block of 64 rows to the next.
constexpr int kRowStep = kDeepRows ? 32 : 16 * 128;
constexpr int kColumnStep = kDeepColumns ? 32 : 16 * kSpanWide;
constexpr int kRowBlock = 64 * kElement * kTileK;

// Of one convolution; sizes of one group. `steps` are of a tile's depth: without WEIGHTS `chunks` a tap, which meet
// `channels` in all. Copies of pixels walk images of `height` x `width`, from `low` on; taps step by `dilation`.
struct Shape {
  int rows, columns, groups, taps_y, taps_x;
  int chunks, channels, height, width;
  int stride_h, stride_w, low_h, low_w, dilation_h, dilation_w;
  int tiles_m, tiles_n, steps, splits, items;
};

struct Item {
  int tile_m, tile_n, group, tap, split, first, last;
};

__device__ __forceinline__ Item item_at(const Shape& shape, int number) {
  Item item;
  item.tile_n = number % shape.tiles_n;
  number /= shape.tiles_n;
  item.tile_m = number % shape.tiles_m;
  number /= shape.tiles_m;
  item.split = number % shape.splits;
  number /= shape.splits;
  item.group = number % shape.groups;
  item.tap = number / shape.groups;
  item.first = static_cast<int>(static_cast<int64>(shape.steps) * item.split / shape.splits);
  item.last = static_cast<int>(static_cast<int64>(shape.steps) * (item.split + 1) / shape.splits);
  return item;
}

struct Pixel {
  int n, h, w;
};

// Where the copy of pixels from `number` on starts.
__device__ __forceinline__ Pixel pixel_at(const Shape& shape, int number) {
  const int row = number / shape.width;
  Pixel pixel;
  pixel.w = (number - row * shape.width) * shape.stride_w + shape.low_w;
  pixel.n = row / shape.height;
  pixel.h = (row - pixel.n * shape.height) * shape.stride_h + shape.low_h;
  return pixel;
}

__device__ __forceinline__ void copy_step(const Shape& shape, const Item& item, int step, const Pixel& first,
                                          const TensorMap* rows, const TensorMap* columns, unsigned stage,
                                          unsigned barrier) {
  const unsigned column_stage = stage + kRowBytes;
  if constexpr (KIND == WEIGHTS) {
    const int tap_y = item.tap / shape.taps_x, tap_x = item.tap - tap_y * shape.taps_x;
    const Pixel pixel = pixel_at(shape, step * kTileK);
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
      copy_box(stage + block * kRowBlock, rows, barrier, item.tile_m * kTileM + 64 * block, item.group, step * kTileK);
#pragma unroll
    for (int block = 0; block < kTileN / kWide; block++)
      copy_pixels(column_stage + block * kTileK * kSpanWide, columns, barrier,
                  item.group * shape.columns + item.tile_n * kTileN + kWide * block, pixel.w, pixel.h, pixel.n,
                  tap_x * shape.dilation_w, tap_y * shape.dilation_h);
  } else {
    const int tap = step / shape.chunks, at = (step - tap * shape.chunks) * kTileK;
    const int tap_y = tap / shape.taps_x, tap_x = tap - tap_y * shape.taps_x;
    const int out_y = KIND == DATA ? shape.taps_y - 1 - tap_y : tap_y;
    const int out_x = KIND == DATA ? shape.taps_x - 1 - tap_x : tap_x;
    copy_pixels(stage, rows, barrier, item.group * shape.channels + at, first.w, first.h, first.n,
                out_x * shape.dilation_w, out_y * shape.dilation_h);
    if constexpr (kDeepColumns) {
      copy_box(column_stage, columns, barrier, at, tap, item.group * shape.columns + item.tile_n * kTileN);
    } else {
#pragma unroll
      for (int block = 0; block < kTileN / kWide; block++)
        copy_box(column_stage + block * kTileK * kSpanWide, columns, barrier, item.tile_n * kTileN + kWide * block, tap,
                 item.group * shape.channels + at);
    }
  }
}

__device__ __forceinline__ void produce(const Shape& shape, const TensorMap* rows, const TensorMap* columns,
                                        unsigned stages, unsigned full, unsigned empty) {
  int slot = 0;
  unsigned parity = 1;  // the first round finds all stages empty
  for (int number = blockIdx.x; number < shape.items; number += gridDim.x) {
    const Item item = item_at(shape, number);
    const Pixel first = KIND == WEIGHTS ? Pixel{} : pixel_at(shape, item.tile_m * kTileM);
    for (int step = item.first; step < item.last; step++) {
      barrier_wait(empty + 8 * slot, parity);
      barrier_expect(full + 8 * slot, kStageBytes);
      copy_step(shape, item, step, first, rows, columns, stages + slot * kStageBytes, full + 8 * slot);
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

// Where 16 bytes of a row of a swizzled block are, by the number of their word.
__device__ __forceinline__ int word_at(int row, int word) {
  return row * kSpanWide + 16 * (kSpanWide == 128 ? word ^ (row & 7) : word ^ (row >> 1 & 3));
}

// 64 rows of sums as elements in shared memory, in blocks of kWide columns.
__device__ __forceinline__ void lay_out(unsigned out, int warp, int lane, const float (&sums)[kSums]) {
  if constexpr (kElement == 2) {
    const int row = 16 * warp + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int j = 0; j < kTileN / 16; j++) {
      unsigned packed[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        Vector<ELEMENT, 2> pair;
        pair.at[0] = convert<ELEMENT>(sums[8 * j + 2 * i]);
        pair.at[1] = convert<ELEMENT>(sums[8 * j + 2 * i + 1]);
        packed[i] = *reinterpret_cast<const unsigned*>(&pair);
      }
      const unsigned block = out + 16 * j / kWide * kOutBlock;
      store_matrices(block + word_at(row, 2 * (j % (kWide / 16)) + half), packed[0], packed[1], packed[2], packed[3]);
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
  for (int r = 0; r < ROWS; r++) lay_out(out + r * (kTileN / kWide) * kOutBlock, warp, lane, sums[r]);
  shared_writes_done();
  warpgroup_barrier(1 + consumer);  // `out` is written
  if (thread != 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int first_row = item.tile_m * kTileM + 64 * (consumer * ROWS + r);
    if (first_row >= shape.rows) break;
#pragma unroll
    for (int block = 0; block < kTileN / kWide; block++) {
      const int column = item.tile_n * kTileN + kWide * block;
      const unsigned from = out + (r * (kTileN / kWide) + block) * kOutBlock;
      if (column >= shape.columns) break;
      if (KIND == WEIGHTS)
        store_box(target, from, column, item.tap, item.group * shape.rows + first_row);
      else
        store_box(target, from, column, item.group, first_row);
    }
  }
  stores_commit();
}

// The tile's sums as they are, to this part's place; elements in the order of the tensor.
__device__ __forceinline__ void write_part(const Shape& shape, const Item& item, float* parts, int consumer,
                                           const float (&sums)[ROWS][kSums]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int taps = KIND == WEIGHTS ? shape.taps_y * shape.taps_x : 1;
  const int64 pitch =
      KIND == WEIGHTS ? static_cast<int64>(taps) * shape.columns : static_cast<int64>(shape.groups) * shape.columns;
  const int64 all_rows = KIND == WEIGHTS ? static_cast<int64>(shape.groups) * shape.rows : shape.rows;
  const int64 first =
      KIND == WEIGHTS ? item.group * shape.rows * pitch + item.tap * shape.columns : item.group * shape.columns;
  float* const part = parts + item.split * all_rows * pitch + first;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int row = item.tile_m * kTileM + 64 * (consumer * ROWS + r) + 16 * (thread / 32) + lane / 4;
#pragma unroll
    for (int j = 0; j < kTileN / 8; j++) {
      const int column = item.tile_n * kTileN + 8 * j + 2 * (lane % 4);
      if (column >= shape.columns) break;
#pragma unroll
      for (int below = 0; below < 2; below++)
        if (row + 8 * below < shape.rows) {
          Vector<float, 2> pair;
          pair.at[0] = sums[r][4 * j + 2 * below];
          pair.at[1] = sums[r][4 * j + 2 * below + 1];
          *reinterpret_cast<Vector<float, 2>*>(part + (row + 8 * below) * pitch + column) = pair;
        }
    }
  }
}

__device__ __forceinline__ void consume(const Shape& shape, const TensorMap* target, float* parts, int consumer,
                                        unsigned stages, unsigned full, unsigned empty, unsigned out) {
  int slot = 0;
  unsigned parity = 0;
  const bool signals = threadIdx.x % 32 == 0;
  for (int number = blockIdx.x; number < shape.items; number += gridDim.x) {
    const Item item = item_at(shape, number);
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
      if (before >= 0 && signals) barrier_arrive(empty + 8 * before);
      before = slot;
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
    products_wait<0>();
    if (signals) barrier_arrive(empty + 8 * before);
    if (shape.splits == 1)
      write_tile(shape, item, target, out, consumer, sums);
    else
      write_part(shape, item, parts, consumer, sums);
  }
  if (threadIdx.x % 128 == 0) stores_done();
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                        const __grid_constant__ TensorMap target, float* parts, int all_rows, int all_columns,
                        int groups, int taps_y, int taps_x, int chunks, int channels, int height, int width,
                        int stride_h, int stride_w, int low_h, int low_w, int dilation_h, int dilation_w, int tiles_m,
                        int tiles_n, int steps, int splits, int items) {
  const Shape shape{all_rows, all_columns, groups, taps_y,     taps_x,     chunks,  channels, height, width,  stride_h,
                    stride_w, low_h,       low_w,  dilation_h, dilation_w, tiles_m, tiles_n,  steps,  splits, items};
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
  const unsigned stages = (shared_address(shared) + 1023) / 1024 * 1024;
  const unsigned out = stages + STAGES * kStageBytes;
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * CONSUMERS);
    }
    barrier_init_done();
  }
  __syncthreads();  // barriers are ready
  const int role = threadIdx.x / 128;
  if (role == CONSUMERS) {
    if constexpr (kMovesRegisters) give_registers<40>();
    if (threadIdx.x == CONSUMERS * 128) {
      prefetch(&rows);
      prefetch(&columns);
      produce(shape, &rows, &columns, stages, full, empty);
    }
  } else {
    if constexpr (kMovesRegisters) take_registers<232>();
    consume(shape, &target, parts, role, stages, full, empty, out + role * kOutBytes);
  }
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
