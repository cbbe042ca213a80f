// dw[k,i] = sum_{n,t} dy[n,t,k] * x[n, stride*t - pad + i*dilation, k/M], in both spatial dimensions, NHWC.
//
// First pass: an item is TILE_COLUMNS columns of a row block of an image's dy. A thread holds the accumulators of
// VECTOR filters in registers. It takes item after item, row by row, and loads rows from device memory AHEAD rows
// early; no thread waits for another. Neighbouring lanes have neighbouring channels, CHANNELS of x in a block. A
// block's SLOTS thread groups have neighbouring items; their accumulators are added in order at the end, as float32.
// The block writes partials[split][tap][k] or, with ONE_SPLIT, dw. Second pass (finish): split-K reduction.
// Grid: one dimension, blocks of channels innermost; of the second pass filters by taps.
#include "common/split_k.cuh"

#if !defined(ELEMENT) || !defined(TAPS) || !defined(LANES)
#error "define ELEMENT, TAPS and LANES"
#endif
#if LANES > 0
static_assert(LANES <= 32, "a block has at most 1024 threads");

// out[filter][tap] = sum of partials[split][tap][filter] over the splits: LANES threads each sum every LANES-th.
extern "C" __global__ void __launch_bounds__(32 * LANES)
    depthwise_channels_last_weights_finish(const float* partials, ELEMENT* out, int filters, int splits) {
  __shared__ float lane_sums[LANES][32];
  const int lane = threadIdx.x / 32, at = threadIdx.x % 32, filter = blockIdx.x * 32 + at, tap = blockIdx.y;
  griddepcontrol_wait();
  float sum = 0;
  if (filter < filters)
    sum = sum_splits<8, int64>(partials + static_cast<int64>(tap) * filters, filter, static_cast<int64>(TAPS) * filters,
                               {lane, splits, LANES});
  lane_sums[lane][at] = sum;
  __syncthreads();  // the accumulators of every lane are there
  if (lane > 0 || filter >= filters) return;
#pragma unroll
  for (int other = 1; other < LANES; ++other) sum += lane_sums[other][at];
  out[filter * TAPS + tap] = convert<ELEMENT>(sum);
}

#else
#include "common/divisor.cuh"
#include "depthwise/channels_last_rows.cuh"
#include "depthwise/segments.cuh"

#if !defined(FILTER_Y) || !defined(FILTER_X) || !defined(MULTIPLIER) || !defined(STRIDE_H) || !defined(STRIDE_W)
#error "define FILTER_Y, FILTER_X, MULTIPLIER, STRIDE_H and STRIDE_W"
#endif
#if !defined(DILATED) || !defined(ONE_SPLIT) || !defined(WHOLE_COLUMNS) || !defined(FIRST_INSIDE) || \
    !defined(END_INSIDE)
#error "define DILATED, ONE_SPLIT, WHOLE_COLUMNS, FIRST_INSIDE and END_INSIDE"
#endif
#if !defined(CHANNELS) || !defined(VECTOR) || !defined(TILE_COLUMNS) || !defined(AHEAD) || !defined(SLOTS) || \
    !defined(STAGED_FILTER_ROWS)
#error "define CHANNELS, VECTOR, TILE_COLUMNS, AHEAD, SLOTS and STAGED_FILTER_ROWS"
#endif
#if !defined(X_STEP) || !defined(Y_STEP) || !defined(THREADS) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define X_STEP, Y_STEP, THREADS, MIN_BLOCKS and SHARED_BYTES"
#endif
#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

// Work of a block: `iterations` items a thread, of `items` in all, `rows` rows of dy each.
struct Shape {
  SHAPE_FIELDS
};

constexpr int kVector = VECTOR, kColumns = TILE_COLUMNS, kAhead = AHEAD, kSlots = SLOTS, kThreads = THREADS;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X;
constexpr int kXChannels = CHANNELS, kYChannels = CHANNELS * MULTIPLIER, kLanes = kYChannels / kVector;
static_assert(TAPS == kFilterY * kFilterX, "TAPS must be FILTER_Y * FILTER_X");
static_assert(kYChannels % kVector == 0 && (MULTIPLIER == 1 || kVector == 1), "a thread must have whole vectors");
static_assert(kThreads == round_up(kLanes * kSlots, 32) && kThreads <= 1024,
              "THREADS differs from this layout: the solver computes another");
constexpr int kWindow = STRIDE_W * (kColumns - 1) + kFilterX;  // columns of x that an item meets
static_assert(kAhead >= 1 && kWindow <= 32, "a word tells which columns exist");
// Rows of dy that one step meets: step t takes row t of dy, and rows STRIDE_H * t + 0, 1 ... of x.
constexpr int kSpan = ceil_div(kFilterY, STRIDE_H);
// STAGED_FILTER_ROWS filter rows of a block's accumulators are added at once.
constexpr int kStaged = STAGED_FILTER_ROWS * kFilterX * kYChannels;
static_assert(SHARED_BYTES == 4 * kSlots * kStaged,
              "SHARED_BYTES differs from this layout: the solver computes another");

using Accumulators = float[kFilterY][kFilterX][kVector];
using Gradients = float[kSpan][kColumns][kVector];

// kVector elements as they lie in memory. Nothing is done with what a load gives before it is needed: that would wait.
struct Elements {
  static constexpr int kBytes = static_cast<int>(sizeof(ELEMENT)) * kVector, kWords = ceil_div(kBytes, 4);
  unsigned words[kWords];

  __device__ __forceinline__ void load(const ELEMENT* from) {
    if constexpr (kBytes == 2) {
      words[0] = *reinterpret_cast<const unsigned short*>(from);
    } else {
      const Vector<unsigned, kWords> loaded = *reinterpret_cast<const Vector<unsigned, kWords>*>(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = loaded.at[i];
    }
  }
  template <typename T = ELEMENT>
  __device__ __forceinline__ void widen(float (&values)[kVector]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = __uint_as_float(words[i]);
    } else if constexpr (kVector == 1) {
      float high;
      unpack(T{}, words[0], values[0], high);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) unpack(T{}, words[i], values[2 * i], values[2 * i + 1]);
    }
  }
};

// What a step multiplies, on its way.
struct Step {
  Elements x[STRIDE_H][kWindow], y[kColumns];
};

// `x` and `y` point to the item's first column in row 0 of its image, in which it may not exist; bit j of `inside` says
// whether column j of the window does, and `columns` how many of the item's own do. Its rows of dy are those from
// `first` on, below `end`.
struct Item {
  const ELEMENT *x, *y;
  Axis height;
  int first, end, columns;
  unsigned inside;

  __device__ __forceinline__ bool has(int row) const {
    return static_cast<unsigned>(row - first) < static_cast<unsigned>(end - first);
  }
};

// Starts to read what step t multiplies. Columns of x that do not exist are zero; rows stay as they are.
__device__ __forceinline__ void load_step(Step& step, const Item& item, int t, int x_row_step, int y_row_step) {
#pragma unroll
  for (int i = 0; i < STRIDE_H; ++i) {
    const int index = t * STRIDE_H + i;
    if (!item.height.x.holds(index)) continue;
    const ELEMENT* const from = item.x + item.height.x.at(index) * x_row_step;
    const unsigned inside = opaque(item.inside);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      step.x[i][j] = {};
      if ((j >= FIRST_INSIDE && j < END_INSIDE) || (inside >> j & 1))
        step.x[i][j].load(from + j * static_cast<int64>(X_STEP));
    }
  }
  if (t >= item.end) return;
  const ELEMENT* const from = item.y + item.height.y.at(t) * y_row_step;
  const int columns = opaque(item.columns);
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
    if (WHOLE_COLUMNS || j < columns) step.y[j].load(from + j * static_cast<int64>(Y_STEP));
}

// Adds what a row of x contributes that meets filter row kFirst in the row of dy kSlot of the ring, and the filter
// rows a stride further in the rows before. What does not exist of dy is not multiplied: x may be infinite.
template <int kFirst, int kSlot>
__device__ __forceinline__ void add_row(Accumulators& accumulators, const Gradients& gradients,
                                        const float (&window)[kWindow][kVector], const Item& item, int t) {
  const int columns = opaque(item.columns);
#pragma unroll
  for (int back = 0; back < kSpan; ++back) {
    const int y = kFirst + back * STRIDE_H, slot = (kSlot - back + kSpan) % kSpan;
    if (y >= kFilterY || !item.has(t - back)) continue;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      if (!WHOLE_COLUMNS && column >= columns) continue;
#pragma unroll
      for (int x = 0; x < kFilterX; ++x)
#pragma unroll
        for (int v = 0; v < kVector; ++v)
          accumulators[y][x][v] += gradients[slot][column][v] * window[STRIDE_W * column + x][v];
    }
  }
}

__device__ __forceinline__ void add_item(Accumulators& accumulators, const Item& item, int x_row_step, int y_row_step) {
  Step steps[kAhead];
  Gradients gradients;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_step(steps[i], item, item.first + i, x_row_step, y_row_step);
  const int end = item.end + kSpan - 1;
#pragma unroll 1
  for (int first = item.first; first < end; first += kSpan * kAhead) {
    unrolled<0, kSpan * kAhead>([&](auto index) __attribute__((always_inline)) {
      constexpr int kStep = decltype(index)::value, kSlot = kStep % kSpan;
      Step& step = steps[kStep % kAhead];
      const int t = first + kStep;
      float windows[STRIDE_H][kWindow][kVector];
#pragma unroll
      for (int i = 0; i < STRIDE_H; ++i)
#pragma unroll
        for (int j = 0; j < kWindow; ++j) step.x[i][j].widen(windows[i][j]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) step.y[j].widen(gradients[kSlot][j]);
      if (t + kAhead < end) load_step(step, item, t + kAhead, x_row_step, y_row_step);
      unrolled<0, STRIDE_H>([&](auto row) __attribute__((always_inline)) {
        constexpr int kRow = decltype(row)::value;
        if (kRow < kFilterY && item.height.x.holds(t * STRIDE_H + kRow))
          add_row<kRow, kSlot>(accumulators, gradients, windows[kRow], item, t);
      });
    });
  }
}

// Adds the accumulators of the block's slots in order, and writes them.
__device__ __forceinline__ void write_accumulators(const Accumulators& accumulators, float* staged, void* out,
                                                   int64 split, int first_filter, int filters) {
  const int slot = threadIdx.x / kLanes, channel = threadIdx.x % kLanes * kVector;
#pragma unroll
  for (int first = 0; first < kFilterY; first += STAGED_FILTER_ROWS) {
    if (first > 0) __syncthreads();  // the accumulators of the filter rows before have been read
    if (slot < kSlots)
#pragma unroll
      for (int y = first; y < first + STAGED_FILTER_ROWS && y < kFilterY; ++y)
#pragma unroll
        for (int x = 0; x < kFilterX; ++x) {
          float* const to = staged + slot * kStaged + ((y - first) * kFilterX + x) * kYChannels + channel;
#pragma unroll
          for (int v = 0; v < kVector; ++v) to[v] = accumulators[y][x][v];
        }
    __syncthreads();  // the accumulators of all slots are there
    for (int i = threadIdx.x; i < kStaged; i += kThreads) {
      const int tap = first * kFilterX + i / kYChannels, filter = first_filter + i % kYChannels;
      if (tap >= TAPS || filter >= filters) continue;
      float sum = staged[i];
#pragma unroll 8
      for (int other = 1; other < kSlots; ++other) sum += staged[other * kStaged + i];
      if constexpr (ONE_SPLIT)
        static_cast<ELEMENT*>(out)[filter * TAPS + tap] = convert<ELEMENT>(sum);
      else
        static_cast<float*>(out)[(split * TAPS + tap) * filters + filter] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_channels_last_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, void* out,
                                    const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) float staged[];
  const int channels = shape.channels, split = blockIdx.x / shape.channel_blocks;
  const int first_filter = (blockIdx.x - split * shape.channel_blocks.by) * kYChannels, filters = channels * MULTIPLIER;
  const int filter = first_filter + threadIdx.x % kLanes * kVector, slot = threadIdx.x / kLanes;
  const int x_row_step = shape.width.x_size * channels, y_row_step = shape.width.y_size * filters;
  const bool computes = slot < kSlots && filter < filters;

  Accumulators accumulators = {};
#pragma unroll 1
  for (int iteration = 0; iteration < shape.iterations; ++iteration) {
    const int rank = (split * shape.iterations + iteration) * kSlots + slot;
    if (!computes || rank >= shape.items) break;
    const int row_block_rank = rank / shape.column_groups, group = rank - row_block_rank * shape.column_groups.by;
    int image = row_block_rank / shape.row_blocks;
    const int row_block = row_block_rank - image * shape.row_blocks.by;
    int residue_h = 0, residue_w = 0;
    if (DILATED) {
      residue_w = image % shape.width.y_step, image /= shape.width.y_step;
      residue_h = image % shape.height.y_step, image /= shape.height.y_step;
    }
    const Axis width = axis_of<DILATED>(shape.width, residue_w);
    const int column = group * kColumns, first = column * STRIDE_W;
    const int x_column = width.x.at(first), y_column = width.y.at(column);
    Item item = {
        x + (image * shape.height.x_size * x_row_step + static_cast<int64>(x_column) * channels + filter / MULTIPLIER),
        dy + (image * shape.height.y_size * y_row_step + static_cast<int64>(y_column) * filters + filter),
        axis_of<DILATED>(shape.height, residue_h),
        row_block * shape.rows,
        0,
        width.y.high - column,
        0};
    item.end = min(item.height.y.high, item.first + shape.rows);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) item.inside |= width.x.holds(first + j) ? 1u << j : 0u;
    add_item(accumulators, item, x_row_step, y_row_step);
  }
  griddepcontrol_launch_dependents();
  write_accumulators(accumulators, staged, out, split, first_filter, filters);
}
#endif
