// Depthwise convolution of channels-first tensors, forward and backward data; sums are float32.
// Forward: y[n,k,o,p] = sum_{y,x} in[n, k/m, o*stride - pad + y*dilation, ...] * w[k,y,x]; m = MULTIPLIER.
// Backward data (TRANSPOSED): in is dy, and dx[n,c,i,j] sums the terms of those outputs and taps that meet (i, j),
// over the m filters of channel c.
//
// A block computes PLANES whole planes, or one of BANDS bands of rows of a plane: it copies what they meet, which is
// one run of memory, to shared memory. A thread computes strips of ROWS x COLUMNS outputs from windows of rows; what of
// its window a strip meets, and where, is known to the compiler; where ROLLED, filter rows are a loop instead, which
// makes the code short. Results go through shared memory, where STAGED, so
// that they leave as one run. Grid: one dimension, bands innermost, then planes.
// Defines: see below; H, W, OUT_H and OUT_W are sizes of what is read and of what is written.
#include "depthwise/strips.cuh"

#if !defined(ELEMENT) || !defined(TRANSPOSED) || !defined(FILTERS) || !defined(MULTIPLIER) || !defined(H) || !defined(W)
#error "define ELEMENT, TRANSPOSED, FILTERS, MULTIPLIER, H and W"
#endif
#if !defined(OUT_H) || !defined(OUT_W) || !defined(FILTER_H) || !defined(FILTER_W) || !defined(STRIDE_H)
#error "define OUT_H, OUT_W, FILTER_H, FILTER_W and STRIDE_H"
#endif
#if !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W) || !defined(PAD_H) || !defined(PAD_W)
#error "define STRIDE_W, DILATION_H, DILATION_W, PAD_H and PAD_W"
#endif
#if !defined(PLANES) || !defined(BANDS) || !defined(ROWS) || !defined(COLUMNS) || !defined(STAGED) || !defined(THREADS)
#error "define PLANES, BANDS, ROWS, COLUMNS, STAGED and THREADS"
#endif
#if !defined(ROLLED) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define ROLLED, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kPlanes = PLANES, kBands = BANDS, kThreads = THREADS, kMultiplier = MULTIPLIER;
static_assert(kPlanes == 1 || kBands == 1, "a block has whole planes or a band of one");
static_assert(!ROLLED || !TRANSPOSED || STRIDE_H == 1, "neighbouring filter rows meet neighbouring rows");
// Strips down and across a plane, and down a band.
constexpr int kBandStrips = ceil_div(ceil_div(OUT_H, ROWS), kBands), kColumnStrips = ceil_div(OUT_W, COLUMNS);
constexpr int kRowStrips = ceil_div(OUT_H, ROWS);
static_assert((kBands - 1) * kBandStrips < kRowStrips, "no band is empty");
using Rows = Axis<H, FILTER_H, STRIDE_H, DILATION_H, PAD_H, ROWS, kRowStrips, TRANSPOSED>;
using Columns = Axis<W, FILTER_W, STRIDE_W, DILATION_W, PAD_W, COLUMNS, kColumnStrips, TRANSPOSED>;

// Planes that a block reads: those of its filters, or of its channels.
constexpr int kSources = TRANSPOSED ? kPlanes * kMultiplier
                         : kMultiplier % kPlanes == 0
                             ? 1
                             : (kPlanes - 1 + (kPlanes % kMultiplier ? kMultiplier - 1 : 0)) / kMultiplier + 1;
constexpr int kTerms = TRANSPOSED ? kMultiplier : 1;  // planes that a result sums over
constexpr int kBandRows = kBands == 1 ? H : least(H, (kBandStrips - 1) * Rows::kStep + Rows::kWindow);
constexpr int kSlots = kBands == 1 ? 1 : kSources;  // runs that a block reads
constexpr int kRun = kSources / kSlots * kBandRows * W, kSlotPitch = room<ELEMENT>(kRun);
constexpr int kOutRun = kPlanes * least(OUT_H, kBandStrips* ROWS) * OUT_W;

// Filters in shared memory as floats, whole 16-byte words that fall into different banks.
constexpr int kTaps = FILTER_H * FILTER_W, kTapPitch = 4 * (ceil_div(kTaps, 4) | 1);
constexpr int kFilters = kPlanes * kTerms;

// Shared memory: a row of zeros, if rows of some strips lie outside; the filters; the run read and the run to write.
constexpr bool kHasZeros = Rows::may_be_outside(Rows::kFirst) || Rows::may_be_outside(Rows::kLast);
constexpr int kZeroElements = kHasZeros ? round_up(W, kWide<ELEMENT>) : 0;
constexpr int kFilterBytes = 4 * kFilters * kTapPitch;
constexpr int kInAt = kZeroElements, kOutAt = kInAt + kSlots * kSlotPitch;
constexpr int kElements = kOutAt + (STAGED ? room<ELEMENT>(kOutRun) : 0);
static_assert(SHARED_BYTES == kFilterBytes + kElements * sizeof(ELEMENT), "the host and the kernel agree");

constexpr int kVector = common_vector<ELEMENT>(W, Columns::kStep);
constexpr int kOutVector = common_vector<ELEMENT>(OUT_W, COLUMNS);

// Adds what window rows from kRow on contribute. `plane` is where the plane's row 0 would be staged.
template <int kRow = Rows::kFirst>
__device__ __forceinline__ void add_rows(float (&sums)[ROWS][COLUMNS], const float (&taps)[kTaps], const ELEMENT* plane,
                                         const ELEMENT* zeros, int row, int column) {
  if constexpr (kRow <= Rows::kLast) {
    if constexpr (Rows::is_met(kRow)) {
      const ELEMENT* from = plane + (row + kRow) * W;
      if constexpr (Rows::may_be_outside(kRow))
        from = static_cast<unsigned>(row + kRow) < static_cast<unsigned>(H) ? from : zeros;
      float window[Columns::kWindow];
      read_window<Columns, kVector>(window, from, column);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int y = 0; y < FILTER_H; ++y) {
          if (Rows::at(i, y) != kRow) continue;
#pragma unroll
          for (int x = 0; x < FILTER_W; ++x) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
              const int source = Columns::at(j, x);
              if (source == kNever || Columns::is_outside(source)) continue;
              sums[i][j] = fmaf(window[source - Columns::kFirst], taps[y * FILTER_W + x], sums[i][j]);
            }
          }
        }
      }
    }
    add_rows<kRow + 1>(sums, taps, plane, zeros, row, column);
  }
}

// Adds what each filter row contributes in turn, from taps in shared memory.
__device__ __forceinline__ void add_filter_rows(float (&sums)[ROWS][COLUMNS], const float* taps, const ELEMENT* plane,
                                                const ELEMENT* zeros, int row, int column) {
#pragma unroll 1
  for (int y = 0; y < FILTER_H; ++y) {
    float row_taps[FILTER_W];
#pragma unroll
    for (int x = 0; x < FILTER_W; ++x) row_taps[x] = taps[y * FILTER_W + x];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int source_row = row + Rows::at(i, y);
      const bool is_inside = static_cast<unsigned>(source_row) < static_cast<unsigned>(H);
      if (kRowStrips == 1 && !is_inside) continue;
      const ELEMENT* const from = kRowStrips == 1 || !kHasZeros || is_inside ? plane + source_row * W : zeros;
      float window[Columns::kWindow];
      read_window<Columns, kVector>(window, from, column);
#pragma unroll
      for (int x = 0; x < FILTER_W; ++x) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          const int source = Columns::at(j, x);
          if (source == kNever || Columns::is_outside(source)) continue;
          sums[i][j] = fmaf(window[source - Columns::kFirst], row_taps[x], sums[i][j]);
        }
      }
    }
  }
}

// The filters of planes from `first` on, as floats.
__device__ __forceinline__ void load_filters(float* to, const ELEMENT* filters, int first) {
#pragma unroll(unrolled<kThreads>(kFilters * kTaps))
  for (int turn = 0; turn < turns<kThreads>(kFilters * kTaps); ++turn) {
    const int i = turn * kThreads + threadIdx.x, filter = i / kTaps, tap = i % kTaps;
    if (filter < kFilters)
      to[filter * kTapPitch + tap] = convert<float>(filters[(first + filter) % FILTERS * kTaps + tap]);
  }
}

__device__ __forceinline__ void read_taps(float (&taps)[kTaps], const float* from) {
#pragma unroll
  for (int i = 0; i < kTaps; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    taps[i] = four.x;
    if (i + 1 < kTaps) taps[i + 1] = four.y;
    if (i + 2 < kTaps) taps[i + 2] = four.z;
    if (i + 3 < kTaps) taps[i + 3] = four.w;
  }
}

// Writes a strip's results to a plane at `to`, whose row `row` and column `column` are its first.
__device__ __forceinline__ void write_strip(ELEMENT* to, const float (&sums)[ROWS][COLUMNS], int row, int column) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (OUT_H % ROWS && row + i >= OUT_H) break;
    if constexpr (STAGED && kColumnStrips == 1 && OUT_W % 2 && sizeof(ELEMENT) == 2) {
      write_anywhere<OUT_W>(to + (row + i) * OUT_W, sums[i]);
      continue;
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j += kOutVector) {
      if (OUT_W % COLUMNS && column + j >= OUT_W) break;
      write_elements<kOutVector, !STAGED>(to + (row + i) * OUT_W + column + j, sums[i] + j);
    }
  }
}

// Where in shared memory the first element lies that a block reads of a plane; `first` is that of its first plane.
__device__ __forceinline__ int place_of(int first, int plane) {
  if (kSlots == 1) return first % kWide<ELEMENT> + plane * (H * W);
  return plane * kSlotPitch + (first + plane * (H * W)) % kWide<ELEMENT>;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_channels_first(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filters,
                             ELEMENT* __restrict__ out, int planes, int in_size) {
  extern __shared__ __align__(16) float shared[];
  float* const staged_filters = shared;
  ELEMENT* const staged = reinterpret_cast<ELEMENT*>(shared + kFilters * kTapPitch);

  const int band = blockIdx.x % kBands, first_plane = blockIdx.x / kBands * kPlanes;
  const int count = min(kPlanes, planes - first_plane);
  // What is read: planes, and rows of them.
  const int first_source = TRANSPOSED ? first_plane * kMultiplier : first_plane / kMultiplier;
  const int sources = TRANSPOSED ? count * kMultiplier : (first_plane + count - 1) / kMultiplier - first_source + 1;
  const int origin = band * kBandStrips * Rows::kStep;
  const int first_row = kBands == 1 ? 0 : min(max(0, origin + Rows::kFirst), H);
  const int end_row = kBands == 1 ? H : min(H, origin + (kBandStrips - 1) * Rows::kStep + Rows::kLast + 1);
  const int first = (first_source * H + first_row) * W;
  load_runs<kThreads, kSlots, kRun, kSlotPitch>(staged + kInAt, in, in_size, [&](int slot) {
    return Run{first + slot * (H * W), kBands == 1 ? sources * H * W : max(0, end_row - first_row) * W};
  });
  commit_copies();
  load_filters(staged_filters, filters, first_plane * kTerms);
  if constexpr (kHasZeros) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kZeroElements / kWide<ELEMENT>; i += kThreads)
      reinterpret_cast<uint4*>(staged)[i] = make_uint4(0, 0, 0, 0);
  }
  wait_for_copies<0>();
  __syncthreads();  // the run, the filters and the zeros are in place

  // Where results go: plane 0 of the block in the tensor, or in the run that waits to be written.
  const int first_out_row = band * kBandStrips * ROWS, first_out = (first_plane * OUT_H + first_out_row) * OUT_W;
  ELEMENT* const results = STAGED ? staged + kOutAt + first_out % kWide<ELEMENT> - first_out_row * OUT_W
                                  : out + static_cast<int64>(first_plane) * (OUT_H * OUT_W);
#pragma unroll 1
  for (int item = threadIdx.x; item < kPlanes * kBandStrips * kColumnStrips; item += kThreads) {
    const int across = item % kColumnStrips, down = item / kColumnStrips % kBandStrips + band * kBandStrips;
    const int plane = item / (kColumnStrips * kBandStrips);
    if (plane >= count || (kBands > 1 && down >= kRowStrips)) break;
    float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int term = 0; term < kTerms; ++term) {
      const float* const filter = staged_filters + (plane * kTerms + term) * kTapPitch;
      const int source = TRANSPOSED ? plane * kMultiplier + term : (first_plane + plane) / kMultiplier - first_source;
      const ELEMENT* const from = staged + kInAt + place_of(first, source) - first_row * W;
      if constexpr (ROLLED) {
        add_filter_rows(sums, filter, from, staged, down * Rows::kStep, across * Columns::kStep);
      } else {
        float taps[kTaps];
        read_taps(taps, filter);
        add_rows(sums, taps, from, staged, down * Rows::kStep, across * Columns::kStep);
      }
    }
    write_strip(results + plane * (OUT_H * OUT_W), sums, down * ROWS, across * COLUMNS);
  }
  if constexpr (STAGED) {
    __syncthreads();  // every result is staged
    const int rows = min(OUT_H - first_out_row, kBandStrips * ROWS);
    store_run<kThreads, kOutRun>(out, staged + kOutAt, {first_out, (kBands == 1 ? count * OUT_H : rows) * OUT_W});
  }
}
