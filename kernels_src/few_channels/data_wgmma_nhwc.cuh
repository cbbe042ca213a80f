// Rows of dy, of pixels with their filters side by side, on their way to products of few_channels/data_wgmma.cu: copied
// in boxes (TMA) as the products read them, with zeros for what dy lacks.
//
// A row of a box is kSpan bytes of the filters of TOGETHER columns, side by side as dy has them: of WIDEN, or of one,
// and then of every WIDEN-th. The copies cost by rows, not by their bytes. Words of 16 bytes are swizzled by address:
// its bits 4 to 6, or fewer for rows of less than 128 bytes, are XORed with those 3 above. So an operand may begin at
// any row (measured on an H200, as that it costs no more than at a multiple of 8).
#pragma once

#include "few_channels/data_wgmma_tiling.cuh"

#if !defined(TOGETHER) || !defined(LEAD)
#error "define TOGETHER and LEAD"
#endif
#if FILTERS % 8 != 0 || (TOGETHER > 1 && FILTERS % 16 != 0) || (TOGETHER > 1 && TOGETHER != WIDEN)
#error "filters of a pixel are whole words, and whole steps of products where other pixels' follow"
#endif

#define DY const __grid_constant__ TensorMap dy

// A box has up to 256 rows of columns that are neighbours in dy. Parts are of kSpan bytes each, each of planes of
// columns, each of boxes; they begin where the swizzle repeats. LEAD columns are staged before the first that is met.
constexpr int kFilters = TOGETHER * FILTERS, kSpan = kFilters <= 16 ? 32 : kFilters <= 32 ? 64 : 128;
constexpr int kParts = ceil_div(2 * kFilters, kSpan), kPlanes = WIDEN / TOGETHER;
constexpr int kPlaneRows = COLUMNS + (LEAD + kShifts - 1) / WIDEN, kBoxes = ceil_div(kPlaneRows * kPlanes, 256);
constexpr int kBoxRows = kBoxes == 1 ? kPlaneRows : round_up(ceil_div(kPlaneRows, kBoxes), 8);
constexpr int kPlaneBytes = round_up(kBoxes * kBoxRows, 8) * kSpan, kPartBytes = kPlanes * kPlaneBytes;
constexpr int kStageBytes = kParts * kPartBytes, kCopiedBytes = kParts * kPlanes * kBoxes * kBoxRows * kSpan;
// Stages follow the filters, which are in the last one as they come, then a barrier for each stage of a team.
constexpr int kStagesAt = round_up(kFilterBytes, 8 * kSpan), kTeamsStage = TEAMS * kStageBytes;
constexpr int kLastAt = kStagesAt + (STAGES - 1) * kTeamsStage;
constexpr int kBarriersAt = kLastAt + maximum(kTeamsStage, kRawBytes);
static_assert(SHARED_BYTES == kBarriersAt + 8 * TEAMS * STAGES,
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

// An operand's form, and its words from a row's first to those of a column that is met and 16 filters.
constexpr unsigned long long kBDescriptor = matrix_descriptor(16, 8 * kSpan, kSpan);
__device__ __forceinline__ constexpr int word_offset(int column, int step) {
  const int staged = LEAD + column, in_row = staged % TOGETHER * 2 * FILTERS + 32 * step;
  return (in_row / kSpan * kPartBytes + staged % WIDEN / TOGETHER * kPlaneBytes + staged / WIDEN * kSpan +
          in_row % kSpan) /
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
        first((column - LEAD) / TOGETHER),
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
    for (int i = 0; i < kParts * kPlanes * kBoxes; ++i) {
      const int part = i / kBoxes / kPlanes, plane = i / kBoxes % kPlanes, box_row = i % kBoxes * kBoxRows;
      tma_load_tiled(to + part * kPartBytes + plane * kPlaneBytes + box_row * kSpan, &dy, barrier, part * kSpan / 2,
                     first + plane + box_row * kPlanes, rank);
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
