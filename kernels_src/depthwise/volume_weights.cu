// Backward weights of depthwise convolution of volumes with one filter a channel; accumulators are float32.
// dw[c,i] = sum over n, o of dy[n,c,o] * x[n, c, stride*o - pad + i*dilation] in all three dimensions, NCDHW or NDHWC.
//
// A block adds up FILTER_D planes of the FILTER_DEPTH that filters of CHANNELS channels have, over every SPLITS-th
// item: a tile of rows and columns of dy in a part of its depth. It marches along that as volume.cuh has it. A thread
// holds its tile of the latest planes of dy in slots, meets a plane of x once for all of them, and has accumulators of
// all taps. Threads add up in shared memory, splits by volume_weights_finish, in a fixed order. Grid: one dimension;
// blocks of channels innermost, then groups of planes of the filters, splits.
#include "common/split_k.cuh"
#include "depthwise/volume.cuh"

#if !defined(FILTER_DEPTH) || !defined(FILTER_GROUPS) || !defined(SPLITS) || !defined(MIN_BLOCKS) || \
    !defined(SHARED_BYTES)
#error "define FILTER_DEPTH, FILTER_GROUPS, SPLITS, MIN_BLOCKS and SHARED_BYTES"
#endif
static_assert(!kBackward, "x is met as forward");

constexpr int kPlaneTaps = FILTER_H * FILTER_W, kTaps = FILTER_DEPTH * kPlaneTaps;
constexpr int kSumPitch = kThreads + 1;  // from one tap's sums of all threads to the next
static_assert(SHARED_BYTES ==
                  maximum(static_cast<int>(sizeof(ELEMENT)) * kStages * kPlane, 4 * kPlaneTaps * kVector * kSumPitch),
              "SHARED_BYTES differs from this layout: the solver computes another");

constexpr int kPhases = phases(FILTER_D * FILTER_H * FILTER_W * TILE_ROWS * TILE_COLUMNS * kVector);
using Accumulators = float[FILTER_D][FILTER_H][FILTER_W][kVector];
using Gradients = float[TILE_ROWS][TILE_COLUMNS][kVector];
constexpr int kGradientVector = kChannelsLast ? kVector : OUT_VECTOR, kGradientStep = kChannelsLast ? 1 : OUT_VECTOR;
using Loaded = Vector<ELEMENT, kGradientVector>[TILE_ROWS][TILE_COLUMNS / kGradientStep];

// A tile of a plane of dy, zero where there is none.
__device__ __forceinline__ void load_gradients(Loaded& loaded, const ELEMENT* dy, const Volume& volume, int rows,
                                               int columns) {
  rows = opaque(rows), columns = opaque(columns);
  const int row_step = opaque(volume.out_row), pixel_step = opaque(volume.out_pixel);
#pragma unroll
  for (int row = 0; row < TILE_ROWS; ++row)
#pragma unroll
    for (int i = 0; i < TILE_COLUMNS / kGradientStep; ++i) {
      loaded[row][i] = {};
      if (row < rows && i * kGradientStep < columns)
        loaded[row][i] = *reinterpret_cast<const Vector<ELEMENT, kGradientVector>*>(dy + row * row_step +
                                                                                    i * kGradientStep * pixel_step);
    }
}

__device__ __forceinline__ void widen(Gradients& gradients, const Loaded& loaded) {
#pragma unroll
  for (int row = 0; row < TILE_ROWS; ++row)
#pragma unroll
    for (int column = 0; column < TILE_COLUMNS; ++column)
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        gradients[row][column][v] =
            convert<float>(loaded[row][column / kGradientStep].at[kChannelsLast ? v : column % kGradientStep]);
}

// Begins an iteration: the oldest plane's slot becomes the next one's.
template <int kPhase>
__device__ __forceinline__ void move_slots(Gradients (&gradients)[kSpan]) {
  if constexpr (kPhases == 1)
#pragma unroll
    for (int slot = kSpan - 1; slot > 0; --slot)
#pragma unroll
      for (int row = 0; row < TILE_ROWS; ++row)
#pragma unroll
        for (int column = 0; column < TILE_COLUMNS; ++column)
#pragma unroll
          for (int v = 0; v < kVector; ++v) gradients[slot][row][column][v] = gradients[slot - 1][row][column][v];
}

// Adds the products of input kIn of a phase, whose window begins at `window`.
template <int kPhase, int kIn>
__device__ __forceinline__ void add_plane(Accumulators& accumulators, const Gradients (&gradients)[kSpan],
                                          const ELEMENT* window) {
#pragma unroll
  for (int row = 0; row < Rows::kWindow; ++row) {
    float values[Columns::kWindow][kVector];
    read_row(values, window + row * kRowPitch);
#pragma unroll
    for (int y = 0; y < FILTER_H; ++y)
#pragma unroll
      for (int out = 0; out < TILE_ROWS; ++out) {
        if (Rows::at(out, y) != row) continue;
#pragma unroll
        for (int slot = 0; slot < kSpan; ++slot) {
          const int z = tap_of(slot, kIn, 0);
          if (z >= FILTER_D) continue;
#pragma unroll
          for (int column = 0; column < TILE_COLUMNS; ++column)
#pragma unroll
            for (int x = 0; x < FILTER_W; ++x)
#pragma unroll
              for (int v = 0; v < kVector; ++v)
                accumulators[z][y][x][v] +=
                    gradients[slot_at<kPhases>(kPhase, slot)][out][column][v] * values[Columns::at(column, x)][v];
        }
      }
  }
}

// Adds the sums of all threads of a channel and writes them to `to`: [channel][tap], of which `channels` exist.
template <typename T>
__device__ __forceinline__ void write_sums(T* to, float* shared, const Accumulators& accumulators, int first_tap,
                                           int channels) {
#pragma unroll
  for (int z = 0; z < FILTER_D; ++z) {
    __syncthreads();  // what was here has been read
#pragma unroll
    for (int i = 0; i < kPlaneTaps; ++i)
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        shared[(i * kVector + v) * kSumPitch + threadIdx.x] = accumulators[z][i / FILTER_W][i % FILTER_W][v];
    __syncthreads();  // the sums of this plane of taps are there
#pragma unroll 1
    for (int i = threadIdx.x; i < kPlaneTaps * kChannels; i += kThreads) {
      const int tap = kChannelsLast ? i / kChannels : i % kPlaneTaps;
      const int channel = kChannelsLast ? i % kChannels : i / kPlaneTaps;
      const float* const from = shared + (tap * kVector + channel % kVector) * kSumPitch +
                                (kChannelsLast ? channel / kVector : channel * kPlaces);
      float sum = 0;
#pragma unroll 8
      for (int place = 0; place < kPlaces; ++place) sum += from[place * (kChannelsLast ? kLanes : 1)];
      if (channel < channels && first_tap + z * kPlaneTaps < kTaps)
        to[channel * kTaps + first_tap + z * kPlaneTaps + tap] = convert<T>(sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_volume_weights(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ x, ELEMENT* dw,
                             float* partials, const __grid_constant__ Volume volume, int items) {
  extern __shared__ __align__(16) float shared[];
  ELEMENT* const staged = reinterpret_cast<ELEMENT*>(shared);
  griddepcontrol_launch_dependents();

  int rest = blockIdx.x / volume.channel_blocks;
  const int first_channel = (blockIdx.x - rest * volume.channel_blocks.by) * kChannels;
  const int split = rest / FILTER_GROUPS, first_plane = (rest - split * FILTER_GROUPS) * FILTER_D;
  const Place place;
  const bool computes = place.exists && first_channel + place.channel < volume.channels;
  const ELEMENT* const window = staged + opaque(place.window());
  Accumulators accumulators = {};

#pragma unroll 1
  for (int item = split; item < items; item += SPLITS) {
    rest = item / volume.column_tiles;
    const int column_tile = item - rest * volume.column_tiles.by;
    int next = rest / volume.row_tiles;
    const int row_tile = rest - next * volume.row_tiles.by;
    rest = next / volume.parts;
    const int first_unit = (next - rest * volume.parts.by) * volume.part_units;
    const int image = rest / volume.residues, residue = rest - image * volume.residues.by;
    March march(volume, residue, first_unit, min(first_unit + volume.part_units, volume.end_unit));
    march.first_in += first_plane * volume.in_step;

    __syncthreads();  // the last item has been read
    PlaneCopies copies(volume, first_channel, row_tile * (BLOCK_ROWS * Rows::kStep) + volume.in_first[0],
                       column_tile * (BLOCK_COLUMNS * Columns::kStep) + volume.in_first[1], staged);
    const ELEMENT* const source = x + image * volume.in_image;
    const auto begin_plane = [&](int plane, int stage) __attribute__((always_inline)) {
      const int at = march.in(volume, plane);
      if (at >= 0) copies.begin(stage, source + at * volume.in_plane);
      commit_copies();
      return at >= 0;
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage)
      if (begin_plane(stage, stage)) copies.end(staged, stage);

    const int row = (row_tile * BLOCK_ROWS + place.row) * TILE_ROWS;
    const int column = (column_tile * BLOCK_COLUMNS + place.column) * TILE_COLUMNS;
    const int rows = computes ? volume.out_size[1] - row : 0, columns = volume.out_size[2] - column;
    const ELEMENT* const own = dy + image * volume.out_image + (first_channel + place.channel) * volume.out_channel +
                               row * volume.out_row + column * volume.out_pixel;
    const auto load_unit = [&](Loaded& loaded, int unit) __attribute__((always_inline)) {
      const int at = march.first_out + volume.out_step * unit;
      load_gradients(loaded, own + at * volume.out_plane, volume,
                     unit < march.units && at < volume.out_size[0] ? rows : 0, columns);
    };
    Loaded loaded;
    load_unit(loaded, 0);
    Gradients gradients[kSpan] = {};
    const int iterations = march.units + kSpan - 1;
    int next_stage = 0;
#pragma unroll 1
    for (int first = 0; first < iterations; first += kPhases)
      unrolled<0, kPhases>([&](auto phase) __attribute__((always_inline)) {
        constexpr int kPhase = decltype(phase)::value;
        const int iteration = first + kPhase;
        if (iteration >= iterations) return;
        move_slots<kPhase>(gradients);
        widen(gradients[slot_at<kPhases>(kPhase, 0)], loaded);
        load_unit(loaded, iteration + 1);
        unrolled<0, kInPlanes>([&](auto in) __attribute__((always_inline)) {
          constexpr int kIn = decltype(in)::value, kStage = stage_of<kPhases>(kPhase, kIn);
          const int stage = kStage < 0 ? next_stage : kStage, filled = stage == 0 ? kStages - 1 : stage - 1;
          const int plane = iteration * kInPlanes + kIn;
          wait_for_copies<kStages - 2>();
          __syncthreads();  // this plane has arrived, and the one that is filled next has been read
          const bool is_begun = begin_plane(plane + kStages - 1, filled);
          if (march.in(volume, plane) >= 0) add_plane<kPhase, kIn>(accumulators, gradients, window + stage * kPlane);
          if (is_begun) copies.end(staged, filled);
          if (kStage < 0) next_stage = stage == kStages - 1 ? 0 : stage + 1;
        });
      });
    wait_for_copies<0>();
  }

  const int first_tap = first_plane * kPlaneTaps, at = first_channel * kTaps;
  if constexpr (SPLITS == 1)
    write_sums(dw + at, shared, accumulators, first_tap, volume.channels - first_channel);
  else
    write_sums(partials + static_cast<int64>(split) * volume.channels * kTaps + at, shared, accumulators, first_tap,
               volume.channels - first_channel);
}

extern "C" __global__ void __launch_bounds__(256)
    depthwise_volume_weights_finish(const float* partials, ELEMENT* dw, int size, int splits, int lanes) {
  reduce_split_k<256, 1>(partials, dw, size, splits, lanes);
}
