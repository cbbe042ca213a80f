// out[m, n] = sum_k a[m, k] * b[k, n] on tensor cores (mma.sync), both operands gathered: a convolution in any
// direction and layout as implicit GEMM, with float32 accumulators.
//
// Radices and strides say what m, n and k stand for (solvers/implicit_gemm/mma.py). A block computes a tile
// of TILE_M x TILE_N elements of one group, TILE_K at a time in STAGES buffers, with WARPS_M x WARPS_N warps. With
// FINAL it rounds the accumulators; else (split-K) it writes its split's float32 partial to the workspace, laid out
// like the output, and implicit_gemm_mma_finish adds the partials in a fixed order. float32 elements are cut to tf32 if
// PRODUCTS is 1; if it is 3 they are split in two, and all products but that of the rests are added. Grid: one
// dimension, groups innermost, then tiles, rasterised along bands of BAND tiles of m, then splits. Offsets are 32 bits
// wide: the host refuses tensors for which they are too narrow.
#include "common/split_k.cuh"
#include "implicit_gemm/mma_operands.cuh"

#if !defined(ELEMENT) || !defined(TILE_M) || !defined(TILE_N) || !defined(TILE_K) || !defined(BAND)
#error "define ELEMENT, TILE_M, TILE_N, TILE_K and BAND"
#endif
#if !defined(WARPS_M) || !defined(WARPS_N) || !defined(STAGES) || !defined(FINAL) || !defined(SHARED_BYTES)
#error "define WARPS_M, WARPS_N, STAGES, FINAL and SHARED_BYTES"
#endif
#if !defined(A_K_MAJOR) || !defined(B_K_MAJOR) || !defined(A_VECTOR) || !defined(B_VECTOR) || !defined(OUT_VECTOR)
#error "define A_K_MAJOR, B_K_MAJOR, A_VECTOR, B_VECTOR and OUT_VECTOR"
#endif
#if !defined(A_AT_ONCE) || !defined(B_AT_ONCE) || !defined(PRODUCTS) || !defined(REDUCTION_VECTOR)
#error "define A_AT_ONCE, B_AT_ONCE, PRODUCTS and REDUCTION_VECTOR"
#endif
// Digits of an index where it serves a tensor; 1 if it is linear there.
#if !defined(A_M_DIGITS) || !defined(A_K_DIGITS) || !defined(B_N_DIGITS) || !defined(B_K_DIGITS) || \
    !defined(OUT_M_DIGITS) || !defined(OUT_N_DIGITS)
#error "define A_M_DIGITS, A_K_DIGITS, B_N_DIGITS, B_K_DIGITS, OUT_M_DIGITS and OUT_N_DIGITS"
#endif
// Image coordinates checked for a and for b, and the first digits that hold them.
#if !defined(A_AXES) || !defined(B_AXES) || !defined(MN_AXIS) || !defined(K_AXIS)
#error "define A_AXES, B_AXES, MN_AXIS and K_AXIS"
#endif

constexpr int kTileM = TILE_M, kTileN = TILE_N, kTileK = TILE_K, kStages = STAGES, kBand = BAND;
constexpr int kWarpsM = WARPS_M, kWarpsN = WARPS_N, kThreads = 32 * kWarpsM * kWarpsN;
constexpr int kWarpM = kTileM / kWarpsM, kWarpN = kTileN / kWarpsN, kKSteps = kTileK * sizeof(ELEMENT) / 32;
static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kKSteps >= 1, "a warp computes blocks of 16 x 16");
static_assert(kStages >= 2, "STAGES is at least 2: copies overlap with arithmetic");
constexpr int kProducts = PRODUCTS;
static_assert(kProducts == 1 || (kProducts == 3 && sizeof(ELEMENT) == 4),
              "PRODUCTS is 1, or 3 for float32 split in two tf32");

using A = Operand<ELEMENT, kThreads, A_K_MAJOR, kTileM, kTileK, A_VECTOR, A_AT_ONCE, A_M_DIGITS, A_K_DIGITS, A_AXES,
                  MN_AXIS, K_AXIS>;
using B = Operand<ELEMENT, kThreads, B_K_MAJOR, kTileN, kTileK, B_VECTOR, B_AT_ONCE, B_N_DIGITS, B_K_DIGITS, B_AXES,
                  MN_AXIS, K_AXIS>;
constexpr int kStageBytes = A::kBytes + B::kBytes;

#if FINAL
using Result = ELEMENT;
#else
using Result = float;
#endif
// Two-byte results are gathered in shared memory first, so that whole words are written.
constexpr bool kStoresThroughShared = sizeof(Result) == 2;
constexpr int kOutPitch = kTileN + 8, kOutBytes = kStoresThroughShared ? 2 * kTileM * kOutPitch : 0;
static_assert(SHARED_BYTES == maximum(kStages * kStageBytes, kOutBytes),
              "SHARED_BYTES is what the tiling computed: host and kernel must agree");

using Accumulators = float[kWarpM / 16][kWarpN / 8][4];

// What the block computes: from row m and column n on, of a group, and of which split of the sum.
struct WorkTile {
  int m, n, group, split;
};

__device__ __forceinline__ WorkTile work_tile_of(int rank, const TileOrder& order, int count_m) {
  const int number = rank / order.groups, split = number / order.tiles, tile = number - split * order.tiles.by;
  const int band = tile / order.band, rest = tile - band * order.band.by;
  const bool whole = (band + 1) * kBand * kTileM < count_m + kTileM;
  const int rows = whole ? kBand : order.last_band.by, column = whole ? rest / kBand : rest / order.last_band;
  return {(band * kBand + rest - column * rows) * kTileM, column * kTileN, rank - number * order.groups.by, split};
}

// Splits float32 elements into the nearest tf32 and what that leaves, which is left in `rest`.
template <int kCount>
__device__ __forceinline__ void split(unsigned (&values)[kCount][4], unsigned (&rest)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) split_tf32(__uint_as_float(values[i][j]), values[i][j], rest[i][j]);
}

__device__ __forceinline__ void multiply_all(Accumulators& acc, const unsigned (&a)[kWarpM / 16][4],
                                             const unsigned (&b)[kWarpN / 16][4]) {
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j)
      multiply_add<ELEMENT>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
}

__device__ __forceinline__ void multiply_k_tile(Accumulators& acc, const unsigned char* stage,
                                                const Reader<A, true>& read_a, const Reader<B, false>& read_b,
                                                int warp_m, int warp_n) {
#pragma unroll
  for (int step = 0; step < kKSteps; ++step) {
    unsigned a[kWarpM / 16][4], b[kWarpN / 16][4];
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i) read_a.read(a[i], stage, warp_m + 16 * i, step);
#pragma unroll
    for (int j = 0; j < kWarpN / 16; ++j) read_b.read(b[j], stage + A::kBytes, warp_n + 16 * j, step);
    if constexpr (kProducts == 3) {
      unsigned a_rest[kWarpM / 16][4], b_rest[kWarpN / 16][4];
      split(a, a_rest);
      split(b, b_rest);
      multiply_all(acc, a_rest, b);
      multiply_all(acc, a, b_rest);
    }
    multiply_all(acc, a, b);
  }
}

__device__ __forceinline__ void add_k_tile(Accumulators& acc, const unsigned char* stage, const Reader<A, true>& read_a,
                                           const Reader<B, false>& read_b, int warp_m, int warp_n) {
  if constexpr (kProducts == 1) {
    multiply_k_tile(acc, stage, read_a, read_b, warp_m, warp_n);
    return;
  }
  // Tensor cores truncate running accumulators. A tile's own are short; they are added to the others rounding to
  // nearest.
  Accumulators tile = {};
  multiply_k_tile(tile, stage, read_a, read_b, warp_m, warp_n);
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
      for (int part = 0; part < 4; ++part) acc[i][j][part] += tile[i][j][part];
}

// Where results go: `first` is the offset of the group's first.
struct Target {
  Result* out;
  unsigned first;
  const Radix &m, &n;
  const OutputLayout& layout;
};

// Writes from registers, two columns at once where they are neighbours in memory.
__device__ __forceinline__ void store_accumulators(const Target& to, const Accumulators& acc, int first_m,
                                                   int first_n) {
  const int lane = threadIdx.x % 32, lane_m = first_m + lane / 4, lane_n = first_n + lane % 4 * 2;
  unsigned rows[kWarpM / 8];
  Number<OUT_M_DIGITS> m = number_of<OUT_M_DIGITS>(lane_m, to.m);
  const Number<OUT_M_DIGITS> next_m = number_of<OUT_M_DIGITS>(8, to.m);
#pragma unroll
  for (int i = 0; i < kWarpM / 8; ++i) {
    rows[i] = to.first + offset_of<OUT_M_DIGITS>(m, to.layout.m_strides);
    add<OUT_M_DIGITS>(m, next_m, to.m);
  }
  Number<OUT_N_DIGITS> n = number_of<OUT_N_DIGITS>(lane_n, to.n);
  const Number<OUT_N_DIGITS> one = number_of<OUT_N_DIGITS>(1, to.n), next_n = number_of<OUT_N_DIGITS>(7, to.n);
#pragma unroll
  for (int j = 0; j < kWarpN / 8; ++j) {
    if (lane_n + 8 * j >= to.n.count) break;
    const unsigned column = offset_of<OUT_N_DIGITS>(n, to.layout.n_strides);
    add<OUT_N_DIGITS>(n, one, to.n);
    const unsigned beside = offset_of<OUT_N_DIGITS>(n, to.layout.n_strides);
    add<OUT_N_DIGITS>(n, next_n, to.n);
#pragma unroll
    for (int i = 0; i < kWarpM / 8; ++i) {
      if (lane_m + 8 * i >= to.m.count) break;
      const float low = acc[i / 2][j][i % 2 * 2], high = acc[i / 2][j][i % 2 * 2 + 1];
      if constexpr (OUT_VECTOR > 1) {
        *reinterpret_cast<Vector<Result, 2>*>(to.out + (rows[i] + column)) = {convert<Result>(low),
                                                                              convert<Result>(high)};
      } else {
        to.out[rows[i] + column] = convert<Result>(low);
        if (lane_n + 8 * j + 1 < to.n.count) to.out[rows[i] + beside] = convert<Result>(high);
      }
    }
  }
}

// Rounds into shared memory and writes from there, OUT_VECTOR columns at once.
__device__ __forceinline__ void store_through_shared(const Target& to, const Accumulators& acc, Result* shared,
                                                     const WorkTile& work, int warp_m, int warp_n) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kWarpM / 8; ++i)
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j) {
      Result* pair = shared + (warp_m + 8 * i + lane / 4) * kOutPitch + warp_n + 8 * j + lane % 4 * 2;
      *reinterpret_cast<Vector<Result, 2>*>(pair) = {convert<Result>(acc[i / 2][j][i % 2 * 2]),
                                                     convert<Result>(acc[i / 2][j][i % 2 * 2 + 1])};
    }
  __syncthreads();  // the whole tile is in shared memory
  constexpr int kRowVectors = kTileN / OUT_VECTOR, kRowStep = maximum(1, kThreads / kRowVectors);
  static_assert(!kStoresThroughShared || kThreads % kRowVectors == 0, "a thread stays in its column");
  const int column = threadIdx.x % kRowVectors * OUT_VECTOR, n = work.n + column;
  if (n >= to.n.count) return;
  const unsigned column_at = offset_of<OUT_N_DIGITS>(number_of<OUT_N_DIGITS>(n, to.n), to.layout.n_strides);
  const int first_row = threadIdx.x / kRowVectors;
  Number<OUT_M_DIGITS> m = number_of<OUT_M_DIGITS>(work.m + first_row, to.m);
  const Number<OUT_M_DIGITS> next_m = number_of<OUT_M_DIGITS>(kRowStep, to.m);
#pragma unroll 4
  for (int row = first_row; row < kTileM && work.m + row < to.m.count; row += kRowStep) {
    using Few = Vector<Result, OUT_VECTOR>;
    const unsigned at = to.first + offset_of<OUT_M_DIGITS>(m, to.layout.m_strides) + column_at;
    *reinterpret_cast<Few*>(to.out + at) = *reinterpret_cast<const Few*>(shared + row * kOutPitch + column);
    add<OUT_M_DIGITS>(m, next_m, to.m);
  }
}

#ifdef EPILOGUE
// Elements of two neighbouring columns in a row; `beside` is the second one's place.
template <typename T>
__device__ __forceinline__ Vector<T, 2> read_pair(const T* from, unsigned at, unsigned beside) {
  if constexpr (OUT_VECTOR > 1) return *reinterpret_cast<const Vector<T, 2>*>(from + at);
  return {from[at], from[beside]};
}

// Applies the epilogue to all accumulators that are results, before any is rounded. Channels are columns where
// CHANNELS_LAST, else rows: scale and bias are read once for each, what goes by element for a pair of columns in all
// rows at once.
__device__ __forceinline__ void finish_accumulators(const Target& to, Accumulators& acc, int first_m, int first_n,
                                                    const ResultOrder& order, const Epilogue& epilogue) {
  constexpr int kRows = kWarpM / 8;
  const int lane = threadIdx.x % 32, lane_m = first_m + lane / 4, lane_n = first_n + lane % 4 * 2;
  unsigned rows[kRows], row_terms[kRows];  // row_terms: where channel_bias has the row's image, or the row's channel
  ChannelTerms of_rows[kRows] = {};
  Number<OUT_M_DIGITS> m = number_of<OUT_M_DIGITS>(lane_m, to.m);
  const Number<OUT_M_DIGITS> next_m = number_of<OUT_M_DIGITS>(8, to.m);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned row = offset_of<OUT_M_DIGITS>(m, to.layout.m_strides);
    const bool inside = lane_m + 8 * i < to.m.count;
    add<OUT_M_DIGITS>(m, next_m, to.m);
    rows[i] = to.first + row;
    row_terms[i] = 0;
    if constexpr (CHANNELS_LAST && kHasChannelBias)
      row_terms[i] = static_cast<int>(row) / order.image_stride * order.channels.by;
    if constexpr (!CHANNELS_LAST && (kHasScale || kHasBias || kHasChannelBias)) {
      row_terms[i] = inside ? static_cast<int>(rows[i]) / order.channel_stride : 0;
      if constexpr (kHasScale) of_rows[i].scale = convert<float>(epilogue.scale[row_terms[i]]);
      if constexpr (kHasBias) of_rows[i].bias = convert<float>(epilogue.bias[row_terms[i]]);
    }
  }
  Number<OUT_N_DIGITS> n = number_of<OUT_N_DIGITS>(lane_n, to.n);
  const Number<OUT_N_DIGITS> one = number_of<OUT_N_DIGITS>(1, to.n), next_n = number_of<OUT_N_DIGITS>(7, to.n);
#pragma unroll
  for (int j = 0; j < kWarpN / 8; ++j) {
    if (lane_n + 8 * j >= to.n.count) break;
    const unsigned column = offset_of<OUT_N_DIGITS>(n, to.layout.n_strides);
    add<OUT_N_DIGITS>(n, one, to.n);
    const bool is_pair = OUT_VECTOR > 1 || lane_n + 8 * j + 1 < to.n.count;
    const unsigned beside = is_pair ? offset_of<OUT_N_DIGITS>(n, to.layout.n_strides) : column;
    add<OUT_N_DIGITS>(n, next_n, to.n);
    unsigned column_terms[2] = {to.first + column, to.first + beside};  // as row_terms
    Vector<EpilogueParameter, 2> scale = {}, bias = {};
    if constexpr (CHANNELS_LAST) {
      if constexpr (kHasScale) scale = read_pair(epilogue.scale, column_terms[0], column_terms[1]);
      if constexpr (kHasBias) bias = read_pair(epilogue.bias, column_terms[0], column_terms[1]);
    } else if constexpr (kHasChannelBias) {
      column_terms[0] = static_cast<int>(column) / order.image_stride * order.channels.by;
      column_terms[1] = static_cast<int>(beside) / order.image_stride * order.channels.by;
    }
    Vector<EpilogueElement, 2> residual[kRows] = {}, saved[kRows] = {}, channel_bias[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (lane_m + 8 * i >= to.m.count) break;
      if constexpr (kHasResidual) residual[i] = read_pair(epilogue.residual, rows[i] + column, rows[i] + beside);
      if constexpr (kHasSaved) saved[i] = read_pair(epilogue.saved, rows[i] + column, rows[i] + beside);
      if constexpr (kHasChannelBias) {
        const EpilogueElement* const from = epilogue.channel_bias + row_terms[i];
        if constexpr (CHANNELS_LAST)
          channel_bias[i] = read_pair(from, column_terms[0], column_terms[1]);
        else
          channel_bias[i] = {from[column_terms[0]], from[column_terms[1]]};
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        ChannelTerms terms = of_rows[i];
        if constexpr (CHANNELS_LAST) terms = {convert<float>(scale.at[k]), convert<float>(bias.at[k]), 0};
        terms.channel_bias = convert<float>(channel_bias[i].at[k]);
        float& sum = acc[i / 2][j][i % 2 * 2 + k];
        sum = finish(sum, terms, convert<float>(residual[i].at[k]), convert<float>(saved[i].at[k]), epilogue);
      }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    implicit_gemm_mma(const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, Result* __restrict__ out,
#ifdef EPILOGUE
                      const __grid_constant__ Product product, const __grid_constant__ ResultOrder order,
                      const __grid_constant__ Epilogue epilogue) {
#else
                      const __grid_constant__ Product product) {
#endif
  extern __shared__ __align__(128) unsigned char shared[];
  const WorkTile work = work_tile_of(blockIdx.x, product.order, product.m.count);
  const int first_k = work.split * product.k_of_split, end_k = min(product.k.count, first_k + product.k_of_split);
  const int k_tiles = end_k > first_k ? ceil_div(end_k - first_k, kTileK) : 0;

  Copier<A> copy_a(a, product.a, product.m, product, {work.group, work.m, first_k});
  Copier<B> copy_b(b, product.b, product.n, product, {work.group, work.n, first_k});
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp_m = warp % kWarpsM * kWarpM, warp_n = warp / kWarpsM * kWarpN;
  const Reader<A, true> read_a;
  const Reader<B, false> read_b;

#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < k_tiles) {
      copy_a.take(base + stage * kStageBytes);
      copy_b.take(base + stage * kStageBytes + A::kBytes);
      copy_a.put(shared + stage * kStageBytes);
      copy_b.put(shared + stage * kStageBytes + A::kBytes);
    }
    commit_copies();
  }
  Accumulators acc = {};
  int read_at = 0, write_at = kStages - 1;
#pragma unroll 1
  for (int tile = 0; tile < k_tiles; ++tile) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the tile has arrived, and every warp has read the one that is overwritten next
    const bool more = tile + kStages - 1 < k_tiles;
    unsigned char* const next = shared + write_at * kStageBytes;
    if (more) {
      copy_a.take(base + write_at * kStageBytes);
      copy_b.take(base + write_at * kStageBytes + A::kBytes);
    }
    commit_copies();
    add_k_tile(acc, shared + read_at * kStageBytes, read_a, read_b, warp_m, warp_n);
    if (more) {
      copy_a.put(next);
      copy_b.put(next + A::kBytes);
    }
    read_at = read_at + 1 == kStages ? 0 : read_at + 1;
    write_at = write_at + 1 == kStages ? 0 : write_at + 1;
  }

  const OutputLayout& layout = product.out;
  const Target target = {out + static_cast<int64>(work.split) * layout.size,
                         layout.offset + static_cast<unsigned>(work.group) * layout.group_stride, product.m, product.n,
                         layout};
#ifdef EPILOGUE
  if constexpr (FINAL) finish_accumulators(target, acc, work.m + warp_m, work.n + warp_n, order, epilogue);
#endif
  if constexpr (kStoresThroughShared) {
    wait_for_copies<0>();
    __syncthreads();  // every warp has read the last tiles, which the results overwrite
    store_through_shared(target, acc, reinterpret_cast<Result*>(shared), work, warp_m, warp_n);
  } else {
    store_accumulators(target, acc, work.m + warp_m, work.n + warp_n);
  }
}

constexpr int kReductionThreads = 256;

extern "C" __global__ void __launch_bounds__(kReductionThreads)
#ifdef EPILOGUE
    implicit_gemm_mma_finish(const float* partials, ELEMENT* out, int size, int splits, int lanes,
                             const __grid_constant__ ResultOrder order, const __grid_constant__ Epilogue epilogue) {
  reduce_split_k<kReductionThreads, REDUCTION_VECTOR>(partials, out, size, splits, lanes, order, epilogue);
}
#else
    implicit_gemm_mma_finish(const float* partials, ELEMENT* out, int size, int splits, int lanes) {
  reduce_split_k<kReductionThreads, REDUCTION_VECTOR>(partials, out, size, splits, lanes);
}
#endif
