// dw[k,i] = sum_{n,t} dy[n,t,k] * x[n, stride*t - pad + i*dilation, k/M], in both spatial dimensions, all
// channels-last, in two passes.
//
// First pass: a block streams rows of x and dy through STAGES stages of shared memory, CHANNELS channels of x of each,
// for GROUPS groups of columns of a strip of ROWS rows of dy, of TOGETHER images at a time. A thread holds the sums of
// VECTOR filters in registers, and COLUMNS columns of the rows of dy that a row of x meets; both are read once. Groups
// add up in order. The block's sums are float32 in partial[part][tap][k], or, of a single part, dw.
// Second pass (finish): the parts are added in a fixed order, so that results do not vary from run to run.
// Grid: one dimension; blocks of channels innermost, then tiles of columns, strips of rows, residue classes, images.
// Defines: as checked below, MULTIPLIER is M; of the second pass ELEMENT, TAPS and LANES, the threads of an element.
#include "common/channels_last_rows.cuh"
#include "common/divisor.cuh"
#if __CUDA_ARCH__ >= 900
#include "common/hopper.cuh"
#endif

#if defined(LANES)
// out[filter][tap] = sum of partial[part][tap][filter] over the parts.
extern "C" __global__ void __launch_bounds__(32 * LANES)
    depthwise_channels_last_weights_finish(const float* __restrict__ partial, ELEMENT* __restrict__ out, int filters,
                                           int parts) {
  __shared__ float sums[LANES][32];
  const int lane = threadIdx.x / 32, at = threadIdx.x % 32, count = filters * TAPS, i = blockIdx.x * 32 + at;
#if __CUDA_ARCH__ >= 900
  previous_step_done();
#endif
  float sum = 0;
  if (i < count) {
#pragma unroll 8
    for (int part = lane; part < parts; part += LANES) sum += partial[static_cast<int64>(part) * count + i];
  }
  sums[lane][at] = sum;
  __syncthreads();  // all lanes' sums are there
  if (lane > 0 || i >= count) return;
#pragma unroll
  for (int other = 1; other < LANES; ++other) sum += sums[other][at];
  out[i % filters * TAPS + i / filters] = convert<ELEMENT>(sum);
}

#else

#if !defined(ELEMENT) || !defined(FILTER_Y) || !defined(FILTER_X) || !defined(MULTIPLIER)
#error "define ELEMENT, FILTER_Y, FILTER_X and MULTIPLIER"
#endif
#if !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(DILATED) || !defined(WHOLE) || !defined(WHOLE_ROWS) || \
    !defined(WHOLE_GROUPS)
#error "define STRIDE_H, STRIDE_W, DILATED, WHOLE, WHOLE_ROWS and WHOLE_GROUPS"
#endif
#if !defined(CHANNELS) || !defined(VECTOR) || !defined(COLUMNS) || !defined(ROWS) || !defined(GROUPS) || \
    !defined(TOGETHER) || !defined(STAGES)
#error "define CHANNELS, VECTOR, COLUMNS, ROWS, GROUPS, TOGETHER and STAGES"
#endif
#if !defined(X_VECTOR) || !defined(Y_VECTOR) || !defined(X_PITCH) || !defined(Y_PITCH)
#error "define X_VECTOR, Y_VECTOR, X_PITCH and Y_PITCH"
#endif

constexpr int kVector = VECTOR, kColumns = COLUMNS, kTogether = TOGETHER, kStages = STAGES;
constexpr int kImageGroups = GROUPS, kGroups = kImageGroups * kTogether;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
constexpr int kXChannels = CHANNELS, kYChannels = CHANNELS * MULTIPLIER;
constexpr int kRuns = kYChannels / kVector, kThreads = round_up(kRuns * kGroups, 32);
static_assert(kYChannels % kVector == 0 && (MULTIPLIER == 1 || kVector == 1), "a thread has whole vectors");
static_assert(kThreads <= 1024 && kStages >= 2, "a block has up to 1024 threads and two stages or more");

constexpr int kInRows = STRIDE_H * (ROWS - 1) + kFilterY;      // of x that a strip meets
constexpr int kWindow = STRIDE_W * (kColumns - 1) + kFilterX;  // columns of x that a thread reads
constexpr int kXColumns = STRIDE_W * (kColumns * kImageGroups - 1) + kFilterX, kYColumns = kColumns * kImageGroups;
// A stage has a row of x and, where it is the first that one meets, a row of dy.
constexpr int kXRow = kTogether * kXColumns * X_PITCH, kStage = kXRow + kTogether * kYColumns * Y_PITCH;

using XCopies = RowCopies<ELEMENT, kTogether, kXColumns, kXChannels, X_PITCH, X_VECTOR, kThreads>;
using YCopies = RowCopies<ELEMENT, kTogether, kYColumns, kYChannels, Y_PITCH, Y_VECTOR, kThreads>;
using Sums = float[kFilterY][kFilterX][kVector];
using Gradients = float[ROWS][kColumns][kVector];

template <int kCount>
__device__ __forceinline__ void read_pixels(float (&values)[kCount][kVector], const ELEMENT* from, int pitch) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    widen<kVector>(values[i], *reinterpret_cast<const Vector<ELEMENT, kVector>*>(from + i * pitch));
}

// Adds what row kRow of x of a strip contributes. `rows` of the strip's gradient rows exist, and `columns` of a
// thread's columns. What does not exist is not multiplied: x may be infinite.
template <int kRow>
__device__ __forceinline__ void add_row(Sums& sums, const Gradients& gradients, const ELEMENT* from, int rows,
                                        int columns) {
  float window[kWindow][kVector];
  read_pixels<kWindow>(window, from, X_PITCH);
#pragma unroll
  for (int y = 0; y < kFilterY; ++y) {
    const int gradient = kRow < y || (kRow - y) % STRIDE_H != 0 ? ROWS : (kRow - y) / STRIDE_H;
    if (gradient >= ROWS || (!WHOLE_ROWS && gradient >= rows)) continue;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      if (!WHOLE_GROUPS && column >= columns) continue;
#pragma unroll
      for (int x = 0; x < kFilterX; ++x)
#pragma unroll
        for (int v = 0; v < kVector; ++v)
          sums[y][x][v] += gradients[gradient][column][v] * window[STRIDE_W * column + x][v];
    }
  }
}

// Adds the sums of the block's groups, one filter row at a time, and writes them.
__device__ __forceinline__ void write_sums(const Sums& sums, float* staged, void* out, int64 part, int first_filter,
                                           int filters, bool computes) {
  constexpr int kRow = kFilterX * kYChannels;
  const int group = threadIdx.x / kRuns, channel = threadIdx.x % kRuns * kVector;
#pragma unroll
  for (int y = 0; y < kFilterY; ++y) {
    __syncthreads();  // the rows, or the sums of the filter row before, have been read
    if (computes)
#pragma unroll
      for (int x = 0; x < kFilterX; ++x)
#pragma unroll
        for (int v = 0; v < kVector; ++v) staged[group * kRow + x * kYChannels + channel + v] = sums[y][x][v];
    __syncthreads();  // the sums of all groups are there
    for (int i = threadIdx.x; i < kRow; i += kThreads) {
      const int x = i / kYChannels, filter = first_filter + i % kYChannels, tap = y * kFilterX + x;
      if (filter >= filters) continue;
      float sum = staged[i];
#pragma unroll 4
      for (int g = 1; g < kGroups; ++g) sum += staged[g * kRow + i];
      if constexpr (WHOLE)
        static_cast<ELEMENT*>(out)[filter * kTaps + tap] = convert<ELEMENT>(sum);
      else
        static_cast<float*>(out)[(part * kTaps + tap) * filters + filter] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    depthwise_channels_last_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, void* out, int n,
                                    int channels, int x_height, int x_width, int y_height, int y_width, int stride_h,
                                    int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, int y_step_h,
                                    int y_step_w, int images, int channel_blocks, unsigned channel_multiplier,
                                    int channel_shift, int column_tiles, unsigned column_multiplier, int column_shift,
                                    int strips, unsigned strip_multiplier, int strip_shift) {
  extern __shared__ __align__(16) ELEMENT staged[];
  const int part = blockIdx.x / Divisor{channel_blocks, channel_multiplier, channel_shift};
  const int channel_block = blockIdx.x - part * channel_blocks;
  const int next = part / Divisor{column_tiles, column_multiplier, column_shift}, tile = part - next * column_tiles;
  int rest = next / Divisor{strips, strip_multiplier, strip_shift};
  const int strip = next - rest * strips;
  int residue_h = 0, residue_w = 0;
  if (DILATED) {
    residue_w = rest % y_step_w, rest /= y_step_w;
    residue_h = rest % y_step_h, rest /= y_step_h;
  }
  const Axis height = axis_of<DILATED>(x_height, y_height, stride_h, pad_h, dilation_h, y_step_h, residue_h);
  const Axis width = axis_of<DILATED>(x_width, y_width, stride_w, pad_w, dilation_w, y_step_w, residue_w);
  const int filters = channels * MULTIPLIER;
  const int x_row_step = x_width * channels, y_row_step = y_width * filters;
  const int x_image_step = x_height * x_row_step, y_image_step = y_height * y_row_step;

  const int first_row = strip * ROWS, first_in_row = first_row * STRIDE_H;
  const int first_image = rest * images, end_image = min(n, first_image + images);
  const int first_column = tile * kYColumns;

  const XCopies x_copies(width.x, first_column * STRIDE_W, channels, channel_block * kXChannels, x_image_step);
  const YCopies y_copies(width.y, first_column, filters, channel_block * kYChannels, y_image_step);
  const ELEMENT* copied_x = x + first_image * x_image_step;
  const ELEMENT* copied_y = dy + first_image * y_image_step;
  int to_copy = ceil_div(end_image - first_image, kTogether) * kInRows, left = end_image - first_image, copied = 0,
      stage_to_fill = 0;
  const auto copy_rows = [&] {
    if (to_copy > 0) {
      const int index = first_in_row + copied, row = first_row + copied / STRIDE_H;
      ELEMENT* const to = staged + stage_to_fill;
      if (height.x.holds(index)) x_copies.copy(to, copied_x + height.x.at(index) * x_row_step, left);
      if (copied % STRIDE_H == 0 && copied < STRIDE_H * ROWS && height.y.holds(row))
        y_copies.copy(to + kXRow, copied_y + height.y.at(row) * y_row_step, left);
      --to_copy;
      if (++copied == kInRows) {
        copied = 0, left -= kTogether;
        copied_x += kTogether * x_image_step, copied_y += kTogether * y_image_step;
      }
      stage_to_fill = stage_to_fill == (kStages - 1) * kStage ? 0 : stage_to_fill + kStage;
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) copy_rows();

  const int group = threadIdx.x / kRuns, channel = threadIdx.x % kRuns * kVector;
  const int at_image = group / kImageGroups, at = group % kImageGroups;
  const int columns = width.y.high - first_column - at * kColumns;
  const bool in_block = group < kGroups && channel_block * kYChannels + channel < filters;
  const bool computes = in_block && columns > 0;
  const ELEMENT* const x_window =
      staged + (at_image * kXColumns + at * kColumns * STRIDE_W) * X_PITCH + channel / MULTIPLIER;
  const ELEMENT* const y_window = staged + kXRow + group * kColumns * Y_PITCH + channel;

  Sums sums = {};
  int stage = 0;
#pragma unroll 1
  for (int image = first_image; image < end_image; image += kTogether) {
    const int x_row = forgotten(first_in_row), y_row = forgotten(first_row), count = forgotten(columns);
    Gradients gradients;
    unrolled<0, kInRows>([&](auto index) __attribute__((always_inline)) {
      constexpr int kRow = decltype(index)::value;
      wait_for_copies<kStages - 2>();
      __syncthreads();  // these rows have arrived, and the stage that is filled next has been read
      copy_rows();
      if (computes && (kTogether == 1 || image + at_image < end_image)) {
        if constexpr (kRow % STRIDE_H == 0 && kRow < STRIDE_H * ROWS)
          read_pixels<kColumns>(gradients[kRow / STRIDE_H], y_window + stage, Y_PITCH);
        if (height.x.holds(x_row + kRow))
          add_row<kRow>(sums, gradients, x_window + stage, height.y.high - y_row, count);
      }
      stage = stage == (kStages - 1) * kStage ? 0 : stage + kStage;
    });
  }
#if __CUDA_ARCH__ >= 900
  next_step_may_begin();
#endif
  wait_for_copies<0>();
  write_sums(sums, reinterpret_cast<float*>(staged), out, part, channel_block * kYChannels, filters, in_block);
}
#endif
