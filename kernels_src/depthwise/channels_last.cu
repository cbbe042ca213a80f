// y[n,t,k] = sum_{i} x[n, stride*t - pad + i*dilation, k/M] * w[k,i], in both spatial dimensions, NHWC; or with
// BACKWARD its gradient dx[n,m,c] = sum of dy[n,t,k] * w[k,i] over what meets: m = stride*t - pad + i*dilation.
//
// A block computes a row block of ROW_BLOCK_ROWS output rows for CHANNELS channels of x. It streams input rows through
// STAGES stages of STEP rows in shared memory. Its THREAD_GROUPS thread groups have neighbouring columns. A thread
// holds the filters of VECTOR channels in registers and computes TILE_COLUMNS output columns (with BACKWARD, STRIDE_H x
// STRIDE_W outputs each). It reads an input row once, for all output rows that it meets. Accumulators are float32.
// Grid: one dimension; blocks of channels innermost, then tiles of columns, row blocks, residue classes, images.
// Defines: as checked below. MULTIPLIER is M; PHASE_H and PHASE_W are x's first row and column modulo the stride.
#include "common/divisor.cuh"
#include "depthwise/channels_last_rows.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#include "common/statistics.cuh"
#endif

#if !defined(ELEMENT) || !defined(BACKWARD) || !defined(FILTER_Y) || !defined(FILTER_X) || !defined(MULTIPLIER)
#error "define ELEMENT, BACKWARD, FILTER_Y, FILTER_X and MULTIPLIER"
#endif
#if !defined(STRIDE_H) || !defined(STRIDE_W) || !defined(PHASE_H) || !defined(PHASE_W) || !defined(DILATED)
#error "define STRIDE_H, STRIDE_W, PHASE_H, PHASE_W and DILATED"
#endif
#if !defined(CHANNELS) || !defined(VECTOR) || !defined(TILE_COLUMNS) || !defined(ROW_BLOCK_ROWS) || \
    !defined(THREAD_GROUPS) || !defined(STAGES) || !defined(STEP)
#error "define CHANNELS, VECTOR, TILE_COLUMNS, ROW_BLOCK_ROWS, THREAD_GROUPS, STAGES and STEP"
#endif
#if !defined(COPY_VECTOR) || !defined(FILTER_VECTOR) || !defined(PIXEL_PITCH) || !defined(WHOLE_ROWS) || \
    !defined(WHOLE_GROUPS) || !defined(COLUMN_STEP)
#error "define COPY_VECTOR, FILTER_VECTOR, PIXEL_PITCH, WHOLE_ROWS, WHOLE_GROUPS and COLUMN_STEP"
#endif
#if !defined(THREADS) || !defined(SHARED_BYTES)
#error "define THREADS and SHARED_BYTES"
#endif
#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

struct Shape {
  SHAPE_FIELDS
};

constexpr bool kBackward = BACKWARD;
constexpr int kVector = VECTOR, kColumns = TILE_COLUMNS, kThreadGroups = THREAD_GROUPS;
constexpr int kStages = STAGES, kStep = STEP, kSlots = kStages * kStep;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kTaps = kFilterY * kFilterX;
constexpr int kInChannels = CHANNELS * (kBackward ? MULTIPLIER : 1);
constexpr int kOutChannels = CHANNELS * (kBackward ? 1 : MULTIPLIER);
constexpr int kSummed = kBackward ? MULTIPLIER : 1;  // channels of the input that add up
constexpr int kSegments = kOutChannels / kVector, kThreads = round_up(kSegments * kThreadGroups, 32);
static_assert(kOutChannels % kVector == 0 && (MULTIPLIER == 1 || kVector == 1), "a thread must have whole vectors");
static_assert(kThreads == THREADS && kThreads <= 1024, "THREADS differs from this layout: the solver computes another");
static_assert(kStages >= 2 && kStep >= 1, "STAGES must be at least 2: one is computed while others are copied");

// Input indices that `outputs` neighbouring units of output meet: how many, and the first less the first unit's own.
constexpr int lead_of(int taps, int stride, int phase) {
  return kBackward ? -floor_div(taps - 1 - phase, stride) : 0;
}
constexpr int inputs_of(int outputs, int taps, int stride, int phase) {
  return kBackward ? outputs + (phase + stride - 1) / stride - lead_of(taps, stride, phase)
                   : stride * (outputs - 1) + taps;
}
constexpr int kLeadRows = lead_of(kFilterY, STRIDE_H, PHASE_H), kLead = lead_of(kFilterX, STRIDE_W, PHASE_W);
constexpr int kInRows = inputs_of(ROW_BLOCK_ROWS, kFilterY, STRIDE_H, PHASE_H);  // of a row block
constexpr int kUnitRows = kBackward ? STRIDE_H : 1, kOutRows = ROW_BLOCK_ROWS * kUnitRows;
constexpr int kOutColumns = kColumns * (kBackward ? STRIDE_W : 1);
constexpr int kWindow = inputs_of(kColumns, kFilterX, STRIDE_W, PHASE_W);  // input columns that a thread reads
constexpr int kGroupStep = kColumns * (kBackward ? 1 : STRIDE_W);          // input columns from one group to the next
constexpr int kRowColumns = kGroupStep * (kThreadGroups - 1) + kWindow, kRowElements = kRowColumns * PIXEL_PITCH;

static_assert(SHARED_BYTES ==
                  static_cast<int>(sizeof(ELEMENT)) * (kSlots * kRowElements + CHANNELS * MULTIPLIER * kTaps),
              "SHARED_BYTES differs from this layout: the solver computes another");

using Copies = RowCopies<ELEMENT, 1, kRowColumns, kInChannels, PIXEL_PITCH, COPY_VECTOR, kThreads>;
using Accumulators = float[kOutRows][kOutColumns][kVector];
using Filters = float[kSummed][kFilterY][kFilterX][kVector];

// The output that a tap joins with an input, both counted from the first of a row block or of a thread; negative if
// none.
constexpr int output_of(int in, int tap, int stride, int phase, int lead) {
  if (kBackward) return stride * (in + lead) + tap - phase;
  return in < tap || (in - tap) % stride != 0 ? -1 : (in - tap) / stride;
}

// Starts to copy the filters of the block's channels.
__device__ __forceinline__ void copy_filters(ELEMENT* to, const ELEMENT* filter, int first, int count) {
  const ELEMENT* const from = filter + first * kTaps;
  for (int i = threadIdx.x * FILTER_VECTOR; i < count * kTaps; i += kThreads * FILTER_VECTOR)
    if constexpr (sizeof(ELEMENT) * FILTER_VECTOR >= 4)
      copy_bytes<static_cast<int>(sizeof(ELEMENT) * FILTER_VECTOR)>(
          static_cast<unsigned>(__cvta_generic_to_shared(to + i)), from + i, true);
    else
      to[i] = from[i];
}

__device__ __forceinline__ void read_filters(Filters& taps, const ELEMENT* filters) {
#pragma unroll
  for (int k = 0; k < kSummed; ++k)
#pragma unroll
    for (int i = 0; i < kTaps; ++i)
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        taps[k][i / kFilterX][i % kFilterX][v] = convert<float>(filters[(k + v * kSummed) * kTaps + i]);
}

// Adds what input row kRow of a row block contributes.
template <int kRow>
__device__ __forceinline__ void add_row(Accumulators& accumulators, const Filters& taps, const ELEMENT* window) {
#pragma unroll
  for (int k = 0; k < kSummed; ++k) {
    float values[kWindow][kVector];
#pragma unroll
    for (int at = 0; at < kWindow; ++at)
      widen<kVector>(values[at], *reinterpret_cast<const Vector<ELEMENT, kVector>*>(window + at * PIXEL_PITCH + k));
    if constexpr (!kBackward && (STRIDE_H > 1 || STRIDE_W > 1)) {
      // By outputs and taps, in which the inputs are affine. By inputs and taps, as below, few meet an output, and
      // NVRTC takes up to eight times as long to find that out.
      constexpr int kFirstTap = kRow % STRIDE_H;
#pragma unroll
      for (int i = 0; i <= (kFilterY - 1 - kFirstTap) / STRIDE_H; ++i) {
        const int y = kFirstTap + STRIDE_H * i, out = kRow / STRIDE_H - i;
        if (y >= kFilterY || out < 0 || out >= kOutRows) continue;
#pragma unroll
        for (int x = 0; x < kFilterX; ++x)
#pragma unroll
          for (int column = 0; column < kOutColumns; ++column)
#pragma unroll
            for (int v = 0; v < kVector; ++v)
              accumulators[out][column][v] += values[STRIDE_W * column + x][v] * taps[k][y][x][v];
      }
    } else {
#pragma unroll
      for (int y = 0; y < kFilterY; ++y) {
        const int out = output_of(kRow, y, STRIDE_H, PHASE_H, kLeadRows);
        if (out < 0 || out >= kOutRows) continue;
#pragma unroll
        for (int at = 0; at < kWindow; ++at)
#pragma unroll
          for (int x = 0; x < kFilterX; ++x) {
            const int column = output_of(at, x, STRIDE_W, PHASE_W, kLead);
            if (column < 0 || column >= kOutColumns) continue;
#pragma unroll
            for (int v = 0; v < kVector; ++v) accumulators[out][column][v] += values[at][v] * taps[k][y][x][v];
          }
      }
    }
  }
}

// The first of the output rows that no input row after `row` meets, of which there are as many as a unit has.
constexpr int first_complete(int row) {
  return output_of(row, kBackward ? 0 : kFilterY - 1, STRIDE_H, PHASE_H, kLeadRows);
}

// The first input row of a row block that output row `out` can meet; one that meets none begins where it is complete.
constexpr int first_met(int out) {
  if (!kBackward) return STRIDE_H * out;
  const int met = ceil_div(out + PHASE_H - kFilterY + 1 + STRIDE_H * kFilterY, STRIDE_H) - kFilterY - kLeadRows;
  const int complete = (out + PHASE_H) / STRIDE_H - kLeadRows;
  return maximum(0, met < complete ? met : complete);
}

// Sets the accumulators of the output rows that no input row before kRow meets.
template <int kRow>
__device__ __forceinline__ void start_rows(Accumulators& accumulators, float value) {
#pragma unroll
  for (int out = 0; out < kOutRows; ++out)
#pragma unroll
    for (int i = 0; i < kOutColumns; ++i)
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        if (first_met(out) == kRow) accumulators[out][i][v] = value;
}

#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
using ChannelSums = float[2][kVector];  // of a thread's results, and of their squares
static_assert(SHARED_BYTES >= 4 * kThreadGroups * kOutChannels, "a sum of each channel of all groups is staged");

// Results that have been added to the sums.
__device__ __forceinline__ Vector<ELEMENT, kVector> added(ChannelSums& sums, const Vector<ELEMENT, kVector>& results) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const float result = convert<float>(results.at[v]);
    sums[0][v] += result;
    sums[1][v] += result * result;
  }
  return results;
}

// Writes a block's sums, through `shared`, where nothing is needed any more once all threads are here.
__device__ __forceinline__ void write_sums(const ChannelSums& sums, float* shared, int first_channel, int channels,
                                           int part, int parts, float* statistics) {
  const int group = threadIdx.x / kSegments, channel = threadIdx.x % kSegments * kVector;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    __syncthreads();  // what was here has been read
    if (group < kThreadGroups)
#pragma unroll
      for (int v = 0; v < kVector; ++v) shared[group * kOutChannels + channel + v] = sums[q][v];
    __syncthreads();  // the sums of all groups are there
    for (int c = threadIdx.x; c < kOutChannels && first_channel + c < channels; c += kThreads) {
      float total = 0;
#pragma unroll 8
      for (int i = 0; i < kThreadGroups; ++i) total += shared[i * kOutChannels + c];
      statistics[static_cast<int64>(q * parts + part) * channels + first_channel + c] = total;
    }
  }
}
#endif
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    depthwise_channels_last(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter,
#ifdef EPILOGUE
                            ELEMENT* __restrict__ out, const __grid_constant__ Shape shape, float* statistics,
                            const __grid_constant__ Epilogue epilogue) {
#else
                            ELEMENT* __restrict__ out, const __grid_constant__ Shape shape) {
#endif
  extern __shared__ __align__(16) ELEMENT staged[];
  ELEMENT* const filters = staged + kSlots * kRowElements;
  const int channels = shape.channels;
  int rest = blockIdx.x / shape.channel_blocks;
  const int channel_block = blockIdx.x - rest * shape.channel_blocks.by;
  int next = rest / shape.column_tiles;
  const int tile = rest - next * shape.column_tiles.by;
  rest = next / shape.row_blocks;
  const int row_block = next - rest * shape.row_blocks.by;
  int residue_h = 0, residue_w = 0;
  if (DILATED) {
    residue_w = rest % shape.width.y_step, rest /= shape.width.y_step;
    residue_h = rest % shape.height.y_step, rest /= shape.height.y_step;
  }
  const Axis height = axis_of<DILATED>(shape.height, residue_h), width = axis_of<DILATED>(shape.width, residue_w);
  const Line in_rows = kBackward ? height.y : height.x, out_rows = kBackward ? height.x : height.y;
  const Line in_columns = kBackward ? width.y : width.x, out_columns = kBackward ? width.x : width.y;
  const int in_pixels = kBackward ? shape.width.y_size : shape.width.x_size;
  const int out_pixels = kBackward ? shape.width.x_size : shape.width.y_size;
  const int in_channels = kBackward ? channels * MULTIPLIER : channels;
  const int out_channels = kBackward ? channels : channels * MULTIPLIER;
  const int in_row_step = in_pixels * in_channels, out_row_step = out_pixels * out_channels;
  const int in_image_step = (kBackward ? shape.height.y_size : shape.height.x_size) * in_row_step;
  const int out_image_step = (kBackward ? shape.height.x_size : shape.height.y_size) * out_row_step;

  const int origin_h = kBackward ? floor_div(out_rows.low, STRIDE_H) : 0;
  const int origin_w = kBackward ? floor_div(out_columns.low, STRIDE_W) : 0;
  const int first_row = origin_h + row_block * ROW_BLOCK_ROWS;
  const int first_in_row = first_row * (kBackward ? 1 : STRIDE_H) + kLeadRows;
  const int first_out_row = first_row * (kBackward ? STRIDE_H : 1) + PHASE_H * kBackward;
  const int first_column = tile * kThreadGroups * kColumns + origin_w;

  const Copies copies(in_columns, first_column * (kBackward ? 1 : STRIDE_W) + kLead, in_channels,
                      channel_block * kInChannels);
  const ELEMENT* const image = in + rest * in_image_step;
  const auto copy_stage = [&](int stage) __attribute__((always_inline)) {
#pragma unroll
    for (int row = stage * kStep; row < (stage + 1) * kStep && row < kInRows; ++row)
      if (in_rows.holds(first_in_row + row))
        copies.copy(staged + row % kSlots * kRowElements, image + in_rows.at(first_in_row + row) * in_row_step);
    commit_copies();
  };
  const int first_filter = channel_block * CHANNELS * MULTIPLIER;
  copy_filters(filters, filter, first_filter, min(CHANNELS, channels - channel_block * CHANNELS) * MULTIPLIER);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_stage(stage);

  const int group = threadIdx.x / kSegments, channel = threadIdx.x % kSegments * kVector;
  const int in_channel = kBackward ? channel * MULTIPLIER : channel / MULTIPLIER;
  const int column = first_column * (kBackward ? STRIDE_W : 1) + (kBackward ? PHASE_W : 0) + group * kOutColumns;
  const bool computes =
      group < kThreadGroups && channel_block * kOutChannels + channel < out_channels && column < out_columns.high;
  const ELEMENT* const window = staged + group * kGroupStep * PIXEL_PITCH + in_channel;
  const int first_stored = DILATED ? out_columns.low - column : 0;
  const int end_stored = WHOLE_GROUPS ? kOutColumns : out_columns.high - column;
  const int row_step = out_rows.step * out_row_step;
  ELEMENT* stored = out + rest * out_image_step + out_rows.at(first_out_row) * out_row_step +
                    out_columns.at(column) * out_channels + channel_block * kOutChannels + channel;

#ifdef EPILOGUE
  ChannelTerms terms[kVector] = {};
  if (computes) read_terms(terms, epilogue, rest, channel_block * kOutChannels + channel, out_channels);
#if EPILOGUE_STATISTICS
  ChannelSums sums = {};
  griddepcontrol_launch_dependents();  // the last step, which waits
#endif
#endif

  Filters taps;
  wait_for_copies<kStages - 2>();
  __syncthreads();  // the filters have arrived
  if (computes) read_filters(taps, filters + channel * kSummed * kTaps);

  Accumulators accumulators;
  unrolled<0, kInRows>([&](auto index) __attribute__((always_inline)) {
    constexpr int kRow = decltype(index)::value;
#ifdef EPILOGUE
    // What is read with the rows that this input row completes is under way while that arrives and is multiplied.
    constexpr int kResult = first_complete(kRow), kFirstUnit = kResult < 0 ? -kResult : 0;
    Vector<ELEMENT, kVector> residual[kUnitRows][kOutColumns] = {}, saved[kUnitRows][kOutColumns] = {};
    if constexpr (kHasResidual || kHasSaved) {
#pragma unroll
      for (int i = kFirstUnit; i < kUnitRows && kResult + i < kOutRows; ++i) {
        const bool exists = computes && (WHOLE_ROWS || out_rows.holds(first_out_row + kResult + i));
#pragma unroll
        for (int j = 0; j < kOutColumns; ++j) {
          const int64 at = (stored - out) + (i - kFirstUnit) * row_step + j * COLUMN_STEP;
          const bool is_stored = exists && (!DILATED || j >= first_stored) && (WHOLE_GROUPS || j < end_stored);
          residual[i][j] = read_residual<kVector>(epilogue.residual + at, is_stored);
          saved[i][j] = read_saved<kVector>(epilogue.saved + at, is_stored);
        }
      }
    }
#endif
    if constexpr (kRow > 0 && kRow % kStep == 0) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // this stage has arrived, and the one that is filled next has been read
    }
    if constexpr (kRow % kStep == 0) copy_stage(kRow / kStep + kStages - 1);
    if (computes) {
      if (in_rows.holds(first_in_row + kRow)) {
        start_rows<kRow>(accumulators, 0.0f);
        add_row<kRow>(accumulators, taps, window + kRow % kSlots * kRowElements);
      } else {
        start_rows<kRow>(accumulators, __int_as_float(opaque(0)));  // here, rather than before the branch
      }
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) {
        constexpr int kFirst = first_complete(kRow);
        if (kFirst + i < 0 || kFirst + i >= kOutRows) continue;
        if (WHOLE_ROWS || out_rows.holds(first_out_row + kFirst + i))
#pragma unroll
          for (int j = 0; j < kOutColumns; ++j)
            if ((!DILATED || j >= first_stored) && (WHOLE_GROUPS || j < end_stored))
              *reinterpret_cast<Vector<ELEMENT, kVector>*>(stored + j * COLUMN_STEP) =
#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
                  added(sums, finished(accumulators[kFirst + i][j], terms, residual[i][j], saved[i][j], epilogue));
#else
                  finished(accumulators[kFirst + i][j], terms, residual[i][j], saved[i][j], epilogue);
#endif
#else
                  rounded<ELEMENT>(accumulators[kFirst + i][j]);
#endif
        stored += row_step;
      }
    }
  });
#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
  write_sums(sums, reinterpret_cast<float*>(staged), channel_block * kOutChannels, out_channels,
             blockIdx.x / shape.channel_blocks, gridDim.x / shape.channel_blocks, statistics);
#endif
#endif
}

#ifdef EPILOGUE
#if EPILOGUE_STATISTICS
extern "C" __global__ void __launch_bounds__(1024)
    depthwise_channels_last_statistics(const float* partials, float* sum, float* sum_of_squares, int channels,
                                       int parts) {
  finish_statistics(partials, sum, sum_of_squares, channels, parts);
}
#endif
#endif
