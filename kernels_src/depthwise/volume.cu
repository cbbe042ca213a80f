// Depthwise convolution of volumes with one filter a channel, forward and backward data; accumulators are float32.
// y[n,c,o] = sum_i x[n, c, stride*o - pad + i*dilation] * w[c,i]; or with BACKWARD its gradient dx[n,c,m] = sum of
// dy[n,c,o] * w[c,i] over what meets: m = stride*o - pad + i*dilation; in all three dimensions, NCDHW or NDHWC.
//
// A block computes a tile of rows and columns of CHANNELS channels, and marches along DEPTH of it: volume.cuh. A thread
// meets an input plane once, for all output planes that it reaches, whose accumulators wait in slots. Filters are held
// in registers, or with HELD 0 read from shared memory, with ROLLED in a loop over their rows. STAGED results pass
// through shared memory, where threads cannot write 16 bytes at once.
// Grid: one dimension; blocks of channels innermost, then columns, rows, parts of the depth, residue classes, images.
#include "depthwise/volume.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#endif

#if !defined(HELD) || !defined(ROLLED) || !defined(STAGED) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define HELD, ROLLED, STAGED, MIN_BLOCKS and SHARED_BYTES"
#endif
static_assert(!ROLLED || (!HELD && (!kBackward || STRIDE_H == 1)), "neighbouring filter rows meet neighbouring rows");

// Filters in shared memory: [row][plane, column][channel], or channels first [channel][row][plane, column].
constexpr int kRowTaps = FILTER_D * FILTER_W, kTapRow = kChannelsLast ? kRowTaps : round_up(kRowTaps, 4);
constexpr int kTapStep = kChannelsLast ? kChannels : 1;
constexpr int kFilterPitch = kChannelsLast ? 1 : 4 * (FILTER_H * kTapRow / 4 | 1);
constexpr int kFilters = kChannelsLast ? FILTER_H * kRowTaps * kChannels : kFilterPitch * kChannels;

// Results of a plane that wait in shared memory.
constexpr int kOutRows = BLOCK_ROWS * Rows::kOuts, kOutColumns = BLOCK_COLUMNS * Columns::kOuts;
constexpr int kResults = STAGED ? kOutPlanes * kChannels * kOutRows * kOutColumns : 0;
static_assert(SHARED_BYTES == 4 * round_up(kFilters, 4) +
                                  static_cast<int>(sizeof(ELEMENT)) * (kStages * kPlane + round_up(kResults, 8)),
              "SHARED_BYTES differs from this layout: the solver computes another");

// Whether where results go is computed anew for each plane: kept in registers, these spill where a thread loads a
// residual or what is saved, or without an epilogue where multiplications in pairs hold their factors twice.
#ifdef EPILOGUE
constexpr bool kForgets = kHasResidual || kHasSaved;
#elif __CUDA_ARCH__ >= 1000
constexpr bool kForgets = true;
#else
constexpr bool kForgets = false;
#endif

constexpr int kPhases = phases(FILTER_D * (ROLLED ? 1 : FILTER_H) * FILTER_W * TILE_ROWS * TILE_COLUMNS * kVector);
using Accumulators = float[kSpan][kOutPlanes][Rows::kOuts][Columns::kOuts][kVector];
using RowFilters = float[kRowTaps][kVector];
using Filters = RowFilters[HELD ? FILTER_H : 1];

__device__ __forceinline__ void load_filters(float* to, const ELEMENT* filters, int first, int channels) {
  constexpr int kTaps = FILTER_D * FILTER_H * FILTER_W;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTaps * kChannels; i += kThreads) {
    const int channel = i / kTaps, tap = i % kTaps;
    const int x = tap % FILTER_W, y = tap / FILTER_W % FILTER_H, z = tap / (FILTER_W * FILTER_H);
    const bool exists = first + channel < channels;
    to[channel * kFilterPitch + (y * kTapRow + z * FILTER_W + x) * kTapStep] =
        exists ? convert<float>(filters[first * kTaps + i]) : 0.0f;
  }
}

__device__ __forceinline__ void read_filters(RowFilters& taps, const float* from) {
  if constexpr (kChannelsLast) {
#pragma unroll
    for (int i = 0; i < kRowTaps; ++i) {
      const auto values = *reinterpret_cast<const Vector<float, kVector>*>(from + i * kTapStep);
#pragma unroll
      for (int v = 0; v < kVector; ++v) taps[i][v] = values.at[v];
    }
  } else {
    float values[round_up(kRowTaps, 4)];
    read_floats<kRowTaps, true>(values, from);
#pragma unroll
    for (int i = 0; i < kRowTaps; ++i) taps[i][0] = values[i];
  }
}

// Adds what a row of input kIn of a phase contributes to output row `out` by a row of the filters.
template <int kPhase, int kIn>
__device__ __forceinline__ void add_row(Accumulators& accumulators, const RowFilters& taps,
                                        const float (&values)[Columns::kWindow][kVector], int out) {
#pragma unroll
  for (int slot = 0; slot < kSpan; ++slot)
#pragma unroll
    for (int plane = 0; plane < kOutPlanes; ++plane) {
      const int z = tap_of(slot, kIn, plane);
      if (z >= FILTER_D) continue;
#pragma unroll
      for (int x = 0; x < FILTER_W; ++x)
#pragma unroll
        for (int column = 0; column < Columns::kOuts; ++column) {
          const int at = Columns::at(column, x);
          if (at < 0) continue;
#pragma unroll
          for (int v = 0; v < kVector; ++v)
            accumulators[slot_at<kPhases>(kPhase, slot)][plane][out][column][v] +=
                values[at][v] * taps[z * FILTER_W + x][v];
        }
    }
}

// Adds what input kIn of a phase contributes, whose window begins at `window`.
template <int kPhase, int kIn>
__device__ __forceinline__ void add_plane(Accumulators& accumulators, const Filters& held, const float* filters,
                                          const ELEMENT* window) {
  float values[Columns::kWindow][kVector];
  if constexpr (ROLLED) {
#pragma unroll 1
    for (int y = 0; y < FILTER_H; ++y) {
      RowFilters taps;
      read_filters(taps, filters + y * (kTapRow * kTapStep));
#pragma unroll
      for (int out = 0; out < Rows::kOuts; ++out) {
        read_row(values, window + (kBackward ? Rows::at(out, 0) - y * DILATION_H : Rows::at(out, 0) + y * DILATION_H) *
                                      kRowPitch);
        add_row<kPhase, kIn>(accumulators, taps, values, out);
      }
    }
  } else {
#pragma unroll
    for (int row = 0; row < Rows::kWindow; ++row) {
      read_row(values, window + row * kRowPitch);
#pragma unroll
      for (int y = 0; y < FILTER_H; ++y)
#pragma unroll
        for (int out = 0; out < Rows::kOuts; ++out) {
          if (Rows::at(out, y) != row) continue;
          if constexpr (HELD) {
            add_row<kPhase, kIn>(accumulators, held[y], values, out);
          } else {
            RowFilters taps;
            read_filters(taps, filters + y * (kTapRow * kTapStep));
            add_row<kPhase, kIn>(accumulators, taps, values, out);
          }
        }
    }
  }
}

// Where a thread's results go, and what becomes of its sums.
struct Results {
  ELEMENT* out;
  int rows, columns, row_step, pixel_step;  // how many there are of its tile
#ifdef EPILOGUE
  ChannelTerms terms[kVector];
#endif
};

#ifdef EPILOGUE
// The result of kCount neighbours in memory from `at` on, of which channels first all are of one channel.
template <int kCount>
__device__ __forceinline__ Vector<ELEMENT, kCount> results_of(const float (&sums)[kCount], const Results& results,
                                                              int at, bool exists, const Epilogue& epilogue) {
  const auto residual = read_residual<kCount>(epilogue.residual + at, exists);
  const auto saved = read_saved<kCount>(epilogue.saved + at, exists);
  ChannelTerms terms[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) terms[i] = results.terms[kChannelsLast ? i : 0];
  return finished(sums, terms, residual, saved, epilogue);
}
#else
template <int kCount>
__device__ __forceinline__ Vector<ELEMENT, kCount> results_of(const float (&sums)[kCount]) {
  Vector<ELEMENT, kCount> rounded;
#pragma unroll
  for (int i = 0; i < kCount; ++i) rounded.at[i] = convert<ELEMENT>(sums[i]);
  return rounded;
}
#endif

// Writes a plane of a thread's tile from element `at` of the output on; or to `staged`, as far as that exists.
#ifdef EPILOGUE
__device__ __forceinline__ void write_plane(const Results& results,
                                            const float (&sums)[Rows::kOuts][Columns::kOuts][kVector], int at,
                                            ELEMENT* staged, const Epilogue& epilogue) {
#else
__device__ __forceinline__ void write_plane(const Results& results,
                                            const float (&sums)[Rows::kOuts][Columns::kOuts][kVector], int at,
                                            ELEMENT* staged) {
#endif
  constexpr int kColumnStep = kChannelsLast ? 1 : OUT_VECTOR, kCount = kChannelsLast ? kVector : OUT_VECTOR;
  const int rows = kForgets ? opaque(results.rows) : results.rows;
  const int columns = kForgets ? opaque(results.columns) : results.columns;
  const int row_step = kForgets ? opaque(results.row_step) : results.row_step;
  const int pixel_step = kForgets ? opaque(results.pixel_step) : results.pixel_step;
#pragma unroll
  for (int row = 0; row < Rows::kOuts; ++row)
#pragma unroll
    for (int column = 0; column < Columns::kOuts; column += kColumnStep) {
      const bool exists = row < rows && column < columns;
      const int element = at + row * row_step + column * pixel_step;
      float values[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = sums[row][column + (kChannelsLast ? 0 : i)][kChannelsLast ? i : 0];
#ifdef EPILOGUE
      const auto written = results_of<kCount>(values, results, element, exists, epilogue);
#else
      const auto written = results_of<kCount>(values);
#endif
      if constexpr (STAGED)
        *reinterpret_cast<Vector<ELEMENT, kCount>*>(staged + row * kOutColumns + column) = written;
      else if (exists)
        *reinterpret_cast<Vector<ELEMENT, kCount>*>(results.out + element) = written;
    }
}

// Copies a staged plane of all channels of the block, `channels` of which exist, to `out`, where its tile begins.
__device__ __forceinline__ void copy_results(ELEMENT* out, const ELEMENT* staged, const Volume& volume, int channels,
                                             int rows, int columns) {
  constexpr int kSegments = kOutColumns / OUT_VECTOR, kAll = kChannels * kOutRows * kSegments;
  const int first = opaque(threadIdx.x);
#pragma unroll
  for (int i = 0; i < ceil_div(kAll, kThreads); ++i) {
    const int rank = first + i * kThreads, row = rank / kSegments % kOutRows;
    const int column = rank % kSegments * OUT_VECTOR, channel = rank / (kSegments * kOutRows);
    if (channel < channels && row < rows && column < columns)
      *reinterpret_cast<Vector<ELEMENT, OUT_VECTOR>*>(out + channel * volume.out_channel + row * volume.out_row +
                                                      column) =
          *reinterpret_cast<const Vector<ELEMENT, OUT_VECTOR>*>(staged + rank * OUT_VECTOR);
  }
}

// Ends an iteration: the slot of the unit that is complete becomes the next unit's.
template <int kPhase>
__device__ __forceinline__ void move_slots(Accumulators& accumulators) {
#pragma unroll
  for (int slot = kSpan - 1; slot >= 0; --slot) {
    if (kPhases > 1 && slot != slot_at<kPhases>(kPhase, kSpan - 1)) continue;
#pragma unroll
    for (int i = 0; i < kOutPlanes; ++i)
#pragma unroll
      for (int r = 0; r < Rows::kOuts; ++r)
#pragma unroll
        for (int c = 0; c < Columns::kOuts; ++c)
#pragma unroll
          for (int v = 0; v < kVector; ++v)
            accumulators[slot][i][r][c][v] = kPhases == 1 && slot > 0 ? accumulators[slot - 1][i][r][c][v] : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_volume(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filters,
#ifdef EPILOGUE
                     ELEMENT* __restrict__ out, const __grid_constant__ Volume volume,
                     const __grid_constant__ Epilogue epilogue) {
#else
                     ELEMENT* __restrict__ out, const __grid_constant__ Volume volume) {
#endif
  extern __shared__ __align__(16) float shared[];
  float* const staged_filters = shared;
  ELEMENT* const staged = reinterpret_cast<ELEMENT*>(shared + round_up(kFilters, 4));
  ELEMENT* const staged_results = staged + kStages * kPlane;

  int rest = blockIdx.x / volume.channel_blocks;
  const int first_channel = (blockIdx.x - rest * volume.channel_blocks.by) * kChannels;
  int next = rest / volume.column_tiles;
  const int column_tile = rest - next * volume.column_tiles.by;
  rest = next / volume.row_tiles;
  const int row_tile = next - rest * volume.row_tiles.by;
  next = rest / volume.parts;
  const int first_unit = volume.first_unit + (rest - next * volume.parts.by) * volume.part_units;
  const int image = next / volume.residues, residue = next - image * volume.residues.by;
  const March march(volume, residue, first_unit, min(first_unit + volume.part_units, volume.end_unit));

  const int in_row = row_tile * (BLOCK_ROWS * Rows::kStep) + volume.in_first[0];
  const int in_column = column_tile * (BLOCK_COLUMNS * Columns::kStep) + volume.in_first[1];
  PlaneCopies copies(volume, first_channel, in_row, in_column, staged);
  const ELEMENT* const source = in + image * volume.in_image;
  const auto begin_plane = [&](int plane, int stage) __attribute__((always_inline)) {
    const int at = march.in(volume, plane);
    if (at >= 0) copies.begin(stage, source + at * volume.in_plane);
    commit_copies();
    return at >= 0;
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage)
    if (begin_plane(stage, stage)) copies.end(staged, stage);
  load_filters(staged_filters, filters, first_channel, volume.channels);

  const Place place;
  const bool computes = place.exists && first_channel + place.channel < volume.channels;
  const int tile_row = row_tile * kOutRows, tile_column = column_tile * kOutColumns;
  const int row = tile_row + place.row * Rows::kOuts, column = tile_column + place.column * Columns::kOuts;
  const int tile = image * volume.out_image + first_channel * volume.out_channel + tile_row * volume.out_row +
                   tile_column * volume.out_pixel;
  const int own = tile + place.channel * volume.out_channel + place.row * (Rows::kOuts * volume.out_row) +
                  place.column * (Columns::kOuts * volume.out_pixel);
  Results results;
  results.out = out, results.row_step = volume.out_row, results.pixel_step = volume.out_pixel;
  results.rows = computes ? volume.out_size[1] - row : 0, results.columns = volume.out_size[2] - column;
#ifdef EPILOGUE
  if (computes) read_terms(results.terms, epilogue, image, first_channel + place.channel, volume.channels);
#endif
  const float* const own_filters = staged_filters + place.channel * kFilterPitch;
  Filters held;
  if constexpr (HELD) {
    __syncthreads();  // the filters are there
    if (computes)
#pragma unroll
      for (int y = 0; y < FILTER_H; ++y) read_filters(held[y], own_filters + y * (kTapRow * kTapStep));
  }

  const ELEMENT* const window = staged + opaque(place.window());
  const int iterations = march.units + kSpan - 1;
  Accumulators accumulators = {};
  int next_stage = 0;
#pragma unroll 1
  for (int first = 0; first < iterations; first += kPhases)
    unrolled<0, kPhases>([&](auto phase) __attribute__((always_inline)) {
      constexpr int kPhase = decltype(phase)::value, kLast = slot_at<kPhases>(kPhase, kSpan - 1);
      const int iteration = first + kPhase;
      if (iteration >= iterations) return;
      unrolled<0, kInPlanes>([&](auto in) __attribute__((always_inline)) {
        constexpr int kIn = decltype(in)::value, kStage = stage_of<kPhases>(kPhase, kIn);
        const int stage = kStage < 0 ? next_stage : kStage, filled = stage == 0 ? kStages - 1 : stage - 1;
        const int plane = iteration * kInPlanes + kIn;
        wait_for_copies<kStages - 2>();
        __syncthreads();  // this plane has arrived, and the one that is filled next has been read
        const bool is_begun = begin_plane(plane + kStages - 1, filled);
        if (march.in(volume, plane) >= 0)
          add_plane<kPhase, kIn>(accumulators, held, own_filters, window + stage * kPlane);
        if (is_begun) copies.end(staged, filled);
        if (kStage < 0) next_stage = stage == kStages - 1 ? 0 : stage + 1;
      });
      if (iteration >= kSpan - 1) {
        const int first_at = march.first_out + volume.out_step * (kOutPlanes * (iteration - kSpan + 1));
#pragma unroll
        for (int i = 0; i < kOutPlanes; ++i) {
          const int at = first_at + i * volume.out_step;
          if (!computes || static_cast<unsigned>(at) >= static_cast<unsigned>(volume.out_size[0])) continue;
          ELEMENT* const waiting =
              staged_results + ((i * kChannels + place.channel) * kOutRows + place.row * Rows::kOuts) * kOutColumns +
              place.column * Columns::kOuts;
#ifdef EPILOGUE
          write_plane(results, accumulators[kLast][i], own + at * volume.out_plane, waiting, epilogue);
#else
          write_plane(results, accumulators[kLast][i], own + at * volume.out_plane, waiting);
#endif
        }
        if constexpr (STAGED) {
          __syncthreads();  // all results of this unit are staged; the next unit's come after another barrier
#pragma unroll
          for (int i = 0; i < kOutPlanes; ++i) {
            const int at = first_at + i * volume.out_step;
            if (static_cast<unsigned>(at) < static_cast<unsigned>(volume.out_size[0]))
              copy_results(out + tile + at * volume.out_plane, staged_results + i * (kResults / kOutPlanes), volume,
                           min(kChannels, volume.channels - first_channel), volume.out_size[1] - tile_row,
                           volume.out_size[2] - tile_column);
          }
        }
      }
      move_slots<kPhase>(accumulators);
    });
}
