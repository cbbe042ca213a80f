// Products of complex matrices, one a frequency: out[i,j] = sum_r a[i,r] * b[j,r] or, where CONJUGATE_A or _B says so,
// their conjugates.
//
// Frequencies are innermost in memory, so that lanes on neighbouring frequencies load neighbouring numbers; the
// matrices lie by strides in planes of `bins` frequencies. A thread computes TILE_M x TILE_N sums of one frequency.
// fft_product: a block computes BLOCKS_M x BLOCKS_N such tiles of BINS frequencies, its operands staged in shared
// memory, DEPTH terms at once. fft_product_direct: without staging, for few channels, where operands serve few sums.
// Sums are float32. Blocks of the same frequencies follow each other, so that their operands stay in the L2 cache.
// Defines: TILE_M, TILE_N, BLOCKS_M, BLOCKS_N, BINS, DEPTH, STAGES (0: direct), CONJUGATE_A, CONJUGATE_B,
// MATRIX_FIELDS, PRODUCT_FIELDS.
#include "common/divisor.cuh"
#include "common/tile.cuh"

#if !defined(TILE_M) || !defined(TILE_N) || !defined(BLOCKS_M) || !defined(BLOCKS_N) || !defined(BINS)
#error "define TILE_M, TILE_N, BLOCKS_M, BLOCKS_N, BINS, DEPTH, STAGES, CONJUGATE_A and CONJUGATE_B"
#endif
#if !defined(MATRIX_FIELDS) || !defined(PRODUCT_FIELDS)
#error "define MATRIX_FIELDS and PRODUCT_FIELDS"
#endif

constexpr int kTileM = TILE_M, kTileN = TILE_N, kBlocksM = BLOCKS_M, kBlocksN = BLOCKS_N;
constexpr int kBins = BINS, kDepth = DEPTH;
constexpr int kThreads = kBins * kBlocksM * kBlocksN;
constexpr int kRowsM = kTileM * kBlocksM, kRowsN = kTileN * kBlocksN;

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block must have whole warps");

// A matrix of each frequency: strides in planes. Those of columns of `out` are its term_stride.
struct Matrix {
  MATRIX_FIELDS
};

// Sizes of the matrices of a group, and how many blocks cover them and the frequencies.
struct Product {
  PRODUCT_FIELDS
};

struct Accumulators {
  float2 at[kTileM][kTileN];

  __device__ __forceinline__ void add(const float2 (&a)[kTileM], const float2 (&b)[kTileN]) {
    constexpr float kSignA = CONJUGATE_A ? -1.0f : 1.0f, kSignB = CONJUGATE_B ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kTileM; ++i) {
#pragma unroll
      for (int j = 0; j < kTileN; ++j) {
        at[i][j].x += a[i].x * b[j].x;
        at[i][j].y += (kSignB * a[i].x) * b[j].y;
        at[i][j].x -= (kSignA * kSignB * a[i].y) * b[j].y;
        at[i][j].y += (kSignA * a[i].y) * b[j].x;
      }
    }
  }

  // To the matrix from its element (row, column) on, at one frequency; added to what is there or not.
  template <bool kAdd>
  __device__ __forceinline__ void store(float2* __restrict__ to, const Matrix& out, int rows, int columns,
                                        int bins) const {
    const long long down = static_cast<long long>(out.row_stride) * bins,
                    across = static_cast<long long>(out.term_stride) * bins;
#pragma unroll
    for (int i = 0; i < kTileM; ++i, to += down) {
      if (i >= rows) break;
      float2* next = to;
#pragma unroll
      for (int j = 0; j < kTileN; ++j, next += across) {
        if (j >= columns) break;
        const float2 before = kAdd ? *next : make_float2(0.0f, 0.0f);
        *next = kAdd ? make_float2(before.x + at[i][j].x, before.y + at[i][j].y) : at[i][j];
      }
    }
  }

  __device__ __forceinline__ void store(float2* __restrict__ to, const Matrix& out, int row, int column, int rows,
                                        int columns, int bins, bool accumulate) const {
    to += (static_cast<long long>(row) * out.row_stride + static_cast<long long>(column) * out.term_stride) * bins;
    if (accumulate)
      store<true>(to, out, rows - row, columns - column, bins);
    else
      store<false>(to, out, rows - row, columns - column, bins);
  }
};

// The first row, column and frequency of a block, and its group.
struct Block {
  int row, column, bin, group;
};

__device__ __forceinline__ Block block_of(const Product& product) {
  const int rank = blockIdx.x;
  const int above = rank / product.column_blocks, higher = above / product.row_blocks;
  const int group = higher / product.bin_blocks;
  return {(above - higher * product.row_blocks.by) * kRowsM, (rank - above * product.column_blocks.by) * kRowsN,
          (higher - group * product.bin_blocks.by) * kBins, group};
}

#if STAGES == 0
// Few sums need few registers, and leave room for many loads under way.
constexpr int kMinBlocks = kTileM * kTileN <= 2 ? 8 : 1;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    fft_product_direct(const float2* __restrict__ a, const float2* __restrict__ b, float2* __restrict__ out,
                       const __grid_constant__ Product product) {
  const Block block = block_of(product);
  const int rows = product.rows, columns = product.columns, terms = product.terms, bins = product.bins;
  const Matrix left = product.a, right = product.b, result = product.out;
  const bool accumulate = product.accumulate;
  const int bin = block.bin + threadIdx.x % kBins, slot = threadIdx.x / kBins;
  if (bin >= bins) return;
  const int row = block.row + slot / kBlocksN * kTileM, column = block.column + slot % kBlocksN * kTileN;
  if (row >= rows || column >= columns) return;
  const float2* from_a = a + static_cast<long long>(block.group) * left.group_stride * bins + bin;
  const float2* from_b = b + static_cast<long long>(block.group) * right.group_stride * bins + bin;
  Accumulators accumulators = {};
  // What lies beyond the last row or column is computed from the last one, and not stored.
  long long at_a[kTileM], at_b[kTileN];
#pragma unroll
  for (int i = 0; i < kTileM; ++i) at_a[i] = static_cast<long long>(min(row + i, rows - 1)) * left.row_stride * bins;
#pragma unroll
  for (int j = 0; j < kTileN; ++j)
    at_b[j] = static_cast<long long>(min(column + j, columns - 1)) * right.row_stride * bins;
  const long long step_a = static_cast<long long>(left.term_stride) * bins,
                  step_b = static_cast<long long>(right.term_stride) * bins;
#pragma unroll(kDepth)
  for (int term = 0; term < terms; ++term, from_a += step_a, from_b += step_b) {
    float2 values_a[kTileM], values_b[kTileN];
#pragma unroll
    for (int i = 0; i < kTileM; ++i) values_a[i] = from_a[at_a[i]];
#pragma unroll
    for (int j = 0; j < kTileN; ++j) values_b[j] = from_b[at_b[j]];
    accumulators.add(values_a, values_b);
  }
  accumulators.store(out + static_cast<long long>(block.group) * result.group_stride * bins + bin, result, row, column,
                     rows, columns, bins, accumulate);
}
#else
constexpr int kStages = STAGES, kRows = kRowsM + kRowsN;
static_assert(kTileM % kBlocksN == 0 && kTileN % kBlocksM == 0, "each thread must copy whole rows");
constexpr int kSlots = kBlocksM * kBlocksN;
constexpr int kCopiesM = kRowsM / kSlots, kCopiesN = kRowsN / kSlots;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fft_product(const float2* __restrict__ a, const float2* __restrict__ b, float2* __restrict__ out,
                const __grid_constant__ Product product) {
  extern __shared__ float2 staged[];  // [stage][term][row of a, then of b][frequency]
  const Block block = block_of(product);
  const int rows = product.rows, columns = product.columns, terms = product.terms, bins = product.bins;
  const Matrix left = product.a, right = product.b, result = product.out;
  const bool accumulate = product.accumulate;
  const int lane = threadIdx.x % kBins, slot = threadIdx.x / kBins;
  const int bin = block.bin + lane;
  const bool has_bin = bin < bins;
  const float2* from_a = a + static_cast<long long>(block.group) * left.group_stride * bins + (has_bin ? bin : 0);
  const float2* from_b = b + static_cast<long long>(block.group) * right.group_stride * bins + (has_bin ? bin : 0);
  const long long step_a = static_cast<long long>(left.term_stride) * bins,
                  step_b = static_cast<long long>(right.term_stride) * bins;

  // The rows this thread copies, at the first term that is not copied yet; those beyond the last become zeros.
  const float2 *next_a[kCopiesM], *next_b[kCopiesN];
  bool has_a[kCopiesM], has_b[kCopiesN];
#pragma unroll
  for (int i = 0; i < kCopiesM; ++i) {
    const int row = block.row + slot + i * kSlots;
    has_a[i] = has_bin && row < rows;
    next_a[i] = from_a + (has_a[i] ? static_cast<long long>(row) * left.row_stride * bins : 0);
  }
#pragma unroll
  for (int i = 0; i < kCopiesN; ++i) {
    const int column = block.column + slot + i * kSlots;
    has_b[i] = has_bin && column < columns;
    next_b[i] = from_b + (has_b[i] ? static_cast<long long>(column) * right.row_stride * bins : 0);
  }
  // Starts to copy the terms of a step, which are asked for in order; zeros beyond the last.
  const auto load = [&](int step) {
    float2* to = staged + (step % kStages * kDepth * kRows + slot) * kBins + lane;
#pragma unroll
    for (int d = 0; d < kDepth; ++d, to += kRows * kBins) {
      const bool has_term = step * kDepth + d < terms;
#pragma unroll
      for (int i = 0; i < kCopiesM; ++i) {
        copy_async<2>(&to[i * kSlots * kBins].x, &next_a[i]->x, has_a[i] && has_term);
        if (has_term) next_a[i] += step_a;
      }
#pragma unroll
      for (int i = 0; i < kCopiesN; ++i) {
        copy_async<2>(&to[(kRowsM + i * kSlots) * kBins].x, &next_b[i]->x, has_b[i] && has_term);
        if (has_term) next_b[i] += step_b;
      }
    }
  };

  const int steps = ceil_div(terms, kDepth);
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(step);
    commit_copies();
  }
  const int row = slot / kBlocksN * kTileM, column = slot % kBlocksN * kTileN;
  Accumulators accumulators = {};
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // this step's terms are there, and all threads are done with the step before, which is
                      // overwritten
    if (step + kStages - 1 < steps) load(step + kStages - 1);
    commit_copies();
    const float2* from = staged + step % kStages * kDepth * kRows * kBins + lane;
#pragma unroll
    for (int d = 0; d < kDepth; ++d, from += kRows * kBins) {
      float2 values_a[kTileM], values_b[kTileN];
#pragma unroll
      for (int i = 0; i < kTileM; ++i) values_a[i] = from[(row + i) * kBins];
#pragma unroll
      for (int j = 0; j < kTileN; ++j) values_b[j] = from[(kRowsM + column + j) * kBins];
      accumulators.add(values_a, values_b);
    }
  }
  if (!has_bin) return;
  accumulators.store(out + static_cast<long long>(block.group) * result.group_stride * bins + bin, result,
                     block.row + row, block.column + column, rows, columns, bins, accumulate);
}
#endif
