// Rows of dy, of phases of columns, on their way to products of few_channels/data_wgmma.cu: they are copied as they
// come and transposed into words of 8 filters of a column.
#pragma once

#include "few_channels/data_wgmma_tiling.cuh"
#include "few_channels/row_copies.cuh"
#include "common/mma.cuh"

#ifndef IN_VECTOR
#error "define IN_VECTOR"
#endif

#define DY_PARAMETER const ELEMENT* __restrict__ dy

// Words of 8 filters, of S2D_STRIDES phases of columns; an odd number from 8 filters to the next, so that eight words
// of a column meet every bank once. Phases begin with the column at a multiple of 8 before the first that is met.
constexpr int kStaged = round_up(7 + (COLUMNS - 1) * S2D_STRIDES + kShifts, 8);
constexpr int kPhaseColumns = ceil_div(kStaged, S2D_STRIDES), kPitch = S2D_STRIDES * kPhaseColumns | 1;
constexpr int kTransposedBytes = 16 * kOctets * kPitch;
// A row of columns as it comes, likewise.
constexpr int kRawPitch = 16 * (kStaged / 8 | 1);
constexpr int kStageBytes = 16 * kKSteps * kRawPitch;
// Stages follow the filters, then, where the filters as they come are first, two rows of words.
constexpr int kStagesAt = kFilterBytes, kTeamsStage = TEAMS * kStageBytes, kLastAt = kStagesAt + STAGES * kTeamsStage;
static_assert(SHARED_BYTES == kLastAt + maximum(TEAMS * 2 * kTransposedBytes, kRawBytes),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// An operand's form, and its words from a row's first to those of a column and 16 filters.
constexpr unsigned long long kBDescriptor = matrix_descriptor(16 * kPitch, 128, 0);
__device__ __forceinline__ constexpr int word_offset(int column, int step) {
  return column % S2D_STRIDES * kPhaseColumns + column / S2D_STRIDES + 2 * step * kPitch;
}

__device__ __forceinline__ void clear_stage(unsigned char* stage) {
  static_assert(kStageBytes % 16 == 0, "a stage is whole 16-byte words");
  for (int i = threadIdx.x % kTeamThreads; i < kStageBytes / 16; i += kTeamThreads)
    *reinterpret_cast<uint4*>(stage + 16 * i) = make_uint4(0, 0, 0, 0);
}

// Starts to copy the columns of a row of dy that there are, of those staged, which begin at `first`. The others stay as
// they are.
__device__ __forceinline__ void load_row(unsigned char* to, const ELEMENT* __restrict__ dy, const Shape& shape,
                                         int image, int row, int first) {
  const int thread = threadIdx.x % kTeamThreads, begin = max(0, -first), end = min(kStaged, shape.out_width - first);
  constexpr int kVectors = kStaged / IN_VECTOR;
  const int channel_stride = shape.out_height * shape.out_width;
  const ELEMENT* const from = dy + image * FILTERS * channel_stride + row * shape.out_width + first;
#pragma unroll 4
  for (int i = thread; i < FILTERS * kVectors; i += kTeamThreads) {
    const int k = i / kVectors, column = i % kVectors * IN_VECTOR;
    if (column >= begin && column < end)
      copy_vector<IN_VECTOR>(to + k * kRawPitch + 2 * column, from + k * channel_stride + column);
  }
}

// Transposes a row of columns into words, 8 columns of 32 filters at a time.
__device__ __forceinline__ void transpose_row(unsigned char* to, const unsigned char* from) {
  constexpr int kBlocks = kStaged / 8, kQuads = ceil_div(kOctets, 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kTeamThreads / 32;
#pragma unroll 2
  for (int i = warp; i < kBlocks * kQuads; i += kTeamThreads / 32) {
    const int octet = min(i / kBlocks * 4 + lane / 8, kOctets - 1), column = i % kBlocks * 8;
    unsigned four[4];
    load_transposed(four, shared_address(from) + (octet * 8 + lane % 8) * kRawPitch + 2 * column);
    stmatrix(shared_address(to) + 16 * (octet * kPitch + word_offset(column + lane % 8, 0)), four[0], four[1], four[2],
             four[3]);
  }
}

// A team's rows of dy, those that a strip meets, one after another.
struct Rows {
  // Copies of a thread that are begun before it lays out filters.
  static constexpr int kBegun = STAGES - 1;

  const ELEMENT* dy;
  const Shape& shape;
  unsigned char *stages, *transposed;
  int image, first, lead, row, end, barrier;
  int stage = 0, half = 0;

  // Those from `row` on, which are met up to before `end`, of columns from `column` on; zeros for what dy lacks.
  __device__ __forceinline__ Rows(const ELEMENT* dy, const Shape& shape, unsigned char* shared, int team, int image,
                                  int column, int row, int end)
      : dy(dy),
        shape(shape),
        stages(shared + kStagesAt + team * kStageBytes),
        transposed(shared + kLastAt + team * 2 * kTransposedBytes),
        image(image),
        first(column - (column & 7)),
        lead(column & 7),
        row(row),
        end(end),
        barrier(1 + team) {}

  __device__ __forceinline__ void load(int number, int at) const {
    unsigned char* const to = stages + number * kTeamsStage;
    if (at >= 0 && at < min(end, shape.out_height))
      load_row(to, dy, shape, image, at, first);
    else if (at < end)
      clear_stage(to);
    commit_copies();
  }

  __device__ __forceinline__ void begin() const {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) clear_stage(stages + i * kTeamsStage);
    named_barrier_sync<kTeamThreads>(barrier);  // stages are clear
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) load(i, row + i);
  }

  // The filters as they came are not needed any more.
  __device__ __forceinline__ void filters_done() const {
    wait_for_copies<STAGES - 2>();
    named_barrier_sync<kTeamThreads>(barrier);  // the first row has arrived
    transpose_row(transposed, stages);
    load(STAGES - 1, row + STAGES - 1);
  }

  // Waits for the next row; where its columns are.
  __device__ __forceinline__ unsigned arrived() const {
    wait_for_copies<STAGES - 2>();
    fence_proxy_async();
    // This row's words and the next row have arrived; every product has read what is overwritten next.
    named_barrier_sync<kTeamThreads>(barrier);
    return shared_address(transposed) + half * kTransposedBytes;
  }

  // Begins what is needed later, while products read the row.
  __device__ __forceinline__ void next() {
    load(stage, row + STAGES);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    half ^= 1;
    transpose_row(transposed + half * kTransposedBytes, stages + stage * kTeamsStage);
    ++row;
  }
};
