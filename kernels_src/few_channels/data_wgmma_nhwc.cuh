// Rows of dy, of pixels with their filters side by side, on their way to products of few_channels/data_wgmma.cu: copied
// in boxes (TMA) as the products read them, with zeros for what dy lacks.
//
// A row of a box is kSwizzleBytes bytes of the filters of BOX_COLUMNS columns, side by side as dy has them: of
// S2D_STRIDES, or of one, and then of every S2D_STRIDES-th. The copies cost by rows, not by their bytes. Words of 16
// bytes are swizzled by address: its bits 4 to 6, or fewer for rows of less than 128 bytes, are XORed with those 3
// above. So an operand may begin at any row (measured on an H200, as that it costs no more than at a multiple of 8).
#pragma once

#include "few_channels/data_wgmma_tiling.cuh"

#if !defined(BOX_COLUMNS) || !defined(LEAD_COLUMNS)
#error "define BOX_COLUMNS and LEAD_COLUMNS"
#endif
#if FILTERS % 8 != 0 || (BOX_COLUMNS > 1 && FILTERS % 16 != 0) || (BOX_COLUMNS > 1 && BOX_COLUMNS != S2D_STRIDES)
#error "filters of a pixel are whole words, and whole steps of products where other pixels' follow"
#endif

#define DY_PARAMETER const __grid_constant__ TensorMap dy

// A box has up to 256 rows of columns that are neighbours in dy. Such a row is cut into kSpans of kSwizzleBytes bytes,
// each of phases of columns, each of boxes; they begin where the swizzle repeats. LEAD_COLUMNS columns are staged
// before the first that is met.
constexpr int kFilters = BOX_COLUMNS * FILTERS, kSwizzleBytes = kFilters <= 16 ? 32 : kFilters <= 32 ? 64 : 128;
constexpr int kSpans = ceil_div(2 * kFilters, kSwizzleBytes), kPhases = S2D_STRIDES / BOX_COLUMNS;
constexpr int kPhaseRows = COLUMNS + (LEAD_COLUMNS + kShifts - 1) / S2D_STRIDES,
              kBoxes = ceil_div(kPhaseRows * kPhases, 256);
constexpr int kBoxRows = kBoxes == 1 ? kPhaseRows : round_up(ceil_div(kPhaseRows, kBoxes), 8);
constexpr int kPhaseBytes = round_up(kBoxes * kBoxRows, 8) * kSwizzleBytes, kSpanBytes = kPhases * kPhaseBytes;
constexpr int kStageBytes = kSpans * kSpanBytes, kCopiedBytes = kSpans * kPhases * kBoxes * kBoxRows * kSwizzleBytes;
// Stages follow the filters, which are in the last one as they come, then a barrier for each stage of a team.
constexpr int kStagesAt = round_up(kFilterBytes, 8 * kSwizzleBytes), kTeamsStage = TEAMS * kStageBytes;
constexpr int kLastAt = kStagesAt + (STAGES - 1) * kTeamsStage;
constexpr int kBarriersAt = kLastAt + maximum(kTeamsStage, kRawBytes);
static_assert(SHARED_BYTES == kBarriersAt + 8 * TEAMS * STAGES,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// An operand's form, and its words from a row's first to those of a column that is met and 16 filters.
constexpr unsigned long long kBDescriptor = matrix_descriptor(16, 8 * kSwizzleBytes, kSwizzleBytes);
__device__ __forceinline__ constexpr int word_offset(int column, int step) {
  const int staged = LEAD_COLUMNS + column, in_row = staged % BOX_COLUMNS * 2 * FILTERS + 32 * step;
  return (in_row / kSwizzleBytes * kSpanBytes + staged % S2D_STRIDES / BOX_COLUMNS * kPhaseBytes +
          staged / S2D_STRIDES * kSwizzleBytes + in_row % kSwizzleBytes) /
         16;
}

// A team's rows of dy, those that a strip meets, one after another. Its first thread copies them.
struct Rows {
  // Copies of a thread that are begun before it lays out filters.
  static constexpr int kBegun = 0;
  // Columns before those that word_offset counts from.
  static constexpr int lead = 0;

  const TensorMap& dy;
  const Shape& shape;
  unsigned stages, barriers;
  int image, first, row, left, team;
  int stage = 0, parity = 0;

  // `strip_steps` of them from `row` on, of columns from `column` on; zeros for what dy lacks.
  __device__ __forceinline__ Rows(const TensorMap& dy, const Shape& shape, unsigned char* shared, int team, int image,
                                  int column, int row, int)
      : dy(dy),
        shape(shape),
        stages(shared_address(shared) + kStagesAt + team * kStageBytes),
        barriers(shared_address(shared) + kBarriersAt + team * 8 * STAGES),
        image(image),
        first((column - LEAD_COLUMNS) / BOX_COLUMNS),
        row(row),
        left(shape.strip_steps),
        team(team) {}

  // Rows of all images are one dimension; what lies before it is zeros, too.
  __device__ __forceinline__ void load(int number, int at) const {
    const unsigned to = stages + number * kTeamsStage, barrier = barriers + 8 * number;
    const int rank =
        static_cast<unsigned>(at) < static_cast<unsigned>(shape.out_height) ? image * shape.out_height + at : -1;
    mbarrier_arrive_expect_tx(barrier, kCopiedBytes);
#pragma unroll
    for (int i = 0; i < kSpans * kPhases * kBoxes; ++i) {
      const int span = i / kBoxes / kPhases, phase = i / kBoxes % kPhases, box_row = i % kBoxes * kBoxRows;
      tma_load_tiled(to + span * kSpanBytes + phase * kPhaseBytes + box_row * kSwizzleBytes, &dy, barrier,
                     span * kSwizzleBytes / 2, first + phase + box_row * kPhases, rank);
    }
  }

  __device__ __forceinline__ void begin() {
    if (threadIdx.x % kTeamThreads == 0) {
      prefetch_tensor_map(&dy);
#pragma unroll 1
      for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
      fence_mbarrier_init();
#pragma unroll 1
      for (int i = 0; i < min(STAGES - 1, left); ++i) load(i, row + i);
    }
    left -= STAGES - 1;
  }

  // The filters as they came are not needed any more.
  __device__ __forceinline__ void filters_done() const {}

  // Waits for the next row; where its columns are.
  __device__ __forceinline__ unsigned arrived() const {
    mbarrier_wait(barriers + 8 * stage, parity);
    named_barrier_sync<kTeamThreads>(1 + team);  // every product has read what is overwritten next
    return stages + stage * kTeamsStage;
  }

  // Begins what is needed later, while products read the row.
  __device__ __forceinline__ void next() {
    if (threadIdx.x % kTeamThreads == 0 && left > 0) load(stage == 0 ? STAGES - 1 : stage - 1, row + STAGES - 1);
    --left;
    ++row;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};
