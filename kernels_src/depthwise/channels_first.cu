// Depthwise convolution of NCHW tensors, forward and backward data; accumulators are float32.
// Forward: y[n,k,o,p] = sum_{y,x} in[n, k/m, o*stride - pad + y*dilation, ...] * w[k,y,x]; m = MULTIPLIER.
// Backward data (TRANSPOSED): in is dy; dx[n,c,i,j] sums the outputs and taps that meet (i, j), over channel c's m
// filters.
//
// An image here is one channel of one image. A block computes CHANNEL_IMAGES whole ones, or one of ROW_BLOCKS row
// blocks of one. It copies the inputs that they meet, one contiguous segment, to shared memory. A thread computes
// register tiles of TILE_ROWS x TILE_COLUMNS outputs from windows of rows; the compiler knows what each output meets of
// a window. With ROLLED, filter rows are a loop, for short code. With STAGED, results leave through shared memory as
// one segment. H and W are of what is read, OUT_H and OUT_W of what is written.
// Grid: one dimension, row blocks innermost, then images.
#include "depthwise/register_tile.cuh"
#ifdef EPILOGUE
#include "common/epilogue_vectors.cuh"
#endif

#if !defined(ELEMENT) || !defined(TRANSPOSED) || !defined(FILTERS) || !defined(MULTIPLIER) || !defined(H) || !defined(W)
#error "define ELEMENT, TRANSPOSED, FILTERS, MULTIPLIER, H and W"
#endif
#if !defined(OUT_H) || !defined(OUT_W) || !defined(FILTER_H) || !defined(FILTER_W) || !defined(STRIDE_H)
#error "define OUT_H, OUT_W, FILTER_H, FILTER_W and STRIDE_H"
#endif
#if !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W) || !defined(PAD_H) || !defined(PAD_W)
#error "define STRIDE_W, DILATION_H, DILATION_W, PAD_H and PAD_W"
#endif
#if !defined(CHANNEL_IMAGES) || !defined(ROW_BLOCKS) || !defined(TILE_ROWS) || !defined(TILE_COLUMNS) || \
    !defined(STAGED) || !defined(THREADS)
#error "define CHANNEL_IMAGES, ROW_BLOCKS, TILE_ROWS, TILE_COLUMNS, STAGED and THREADS"
#endif
#if !defined(ROLLED) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define ROLLED, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kChannelImages = CHANNEL_IMAGES, kRowBlocks = ROW_BLOCKS, kThreads = THREADS, kMultiplier = MULTIPLIER;
static_assert(kChannelImages == 1 || kRowBlocks == 1, "a block has whole images or a row block of one");
static_assert(!ROLLED || !TRANSPOSED || STRIDE_H == 1, "neighbouring filter rows meet neighbouring rows");
// Tiles down and across an image, and down a row block.
constexpr int kRowBlockTiles = ceil_div(ceil_div(OUT_H, TILE_ROWS), kRowBlocks),
              kColumnTiles = ceil_div(OUT_W, TILE_COLUMNS);
constexpr int kRowTiles = ceil_div(OUT_H, TILE_ROWS);
static_assert((kRowBlocks - 1) * kRowBlockTiles < kRowTiles, "every row block must have rows");
using Rows = Axis<H, FILTER_H, STRIDE_H, DILATION_H, PAD_H, TILE_ROWS, kRowTiles, TRANSPOSED>;
using Columns = Axis<W, FILTER_W, STRIDE_W, DILATION_W, PAD_W, TILE_COLUMNS, kColumnTiles, TRANSPOSED>;

// Images that a block reads: those of its filters, or of its channels.
constexpr int kSources =
    TRANSPOSED ? kChannelImages * kMultiplier
    : kMultiplier % kChannelImages == 0
        ? 1
        : (kChannelImages - 1 + (kChannelImages % kMultiplier ? kMultiplier - 1 : 0)) / kMultiplier + 1;
constexpr int kTerms = TRANSPOSED ? kMultiplier : 1;  // images that a result sums over
constexpr int kRowBlockRows = kRowBlocks == 1 ? H : least(H, (kRowBlockTiles - 1) * Rows::kStep + Rows::kWindow);
constexpr int kSlots = kRowBlocks == 1 ? 1 : kSources;  // segments that a block reads
constexpr int kSegment = kSources / kSlots * kRowBlockRows * W, kSlotPitch = padded_size<ELEMENT>(kSegment);
constexpr int kOutSegment = kChannelImages * least(OUT_H, kRowBlockTiles* TILE_ROWS) * OUT_W;

// Filters in shared memory as floats, whole 16-byte words that fall into different banks.
constexpr int kTaps = FILTER_H * FILTER_W, kTapPitch = 4 * (ceil_div(kTaps, 4) | 1);
constexpr int kFilters = kChannelImages * kTerms;

// Shared memory: a row of zeros, if rows of some tiles lie outside; the filters; the segment read and the segment to
// write.
constexpr bool kHasZeros = Rows::may_be_outside(Rows::kFirst) || Rows::may_be_outside(Rows::kLast);
constexpr int kZeroElements = kHasZeros ? round_up(W, kCopyElements<ELEMENT>) : 0;
constexpr int kFilterBytes = 4 * kFilters * kTapPitch;
constexpr int kInAt = kZeroElements, kOutAt = kInAt + kSlots * kSlotPitch;
constexpr int kElements = kOutAt + (STAGED ? padded_size<ELEMENT>(kOutSegment) : 0);
static_assert(SHARED_BYTES == kFilterBytes + kElements * sizeof(ELEMENT),
              "SHARED_BYTES differs from this layout: the solver computes another");

constexpr int kVector = common_vector<ELEMENT>(W, Columns::kStep);
constexpr int kOutVector = common_vector<ELEMENT>(OUT_W, TILE_COLUMNS);

// Adds what window rows from kRow on contribute. `image` is where the image's row 0 would be staged.
template <int kRow = Rows::kFirst>
__device__ __forceinline__ void add_rows(float (&accumulators)[TILE_ROWS][TILE_COLUMNS], const float (&taps)[kTaps],
                                         const ELEMENT* image, const ELEMENT* zeros, int row, int column) {
  if constexpr (kRow <= Rows::kLast) {
    if constexpr (Rows::is_met(kRow)) {
      const ELEMENT* from = image + (row + kRow) * W;
      if constexpr (Rows::may_be_outside(kRow))
        from = static_cast<unsigned>(row + kRow) < static_cast<unsigned>(H) ? from : zeros;
      float window[Columns::kWindow];
      read_window<Columns, kVector>(window, from, column);
#pragma unroll
      for (int i = 0; i < TILE_ROWS; ++i) {
#pragma unroll
        for (int y = 0; y < FILTER_H; ++y) {
          if (Rows::at(i, y) != kRow) continue;
#pragma unroll
          for (int x = 0; x < FILTER_W; ++x) {
#pragma unroll
            for (int j = 0; j < TILE_COLUMNS; ++j) {
              const int source = Columns::at(j, x);
              if (source == kNever || Columns::is_outside(source)) continue;
              accumulators[i][j] = fmaf(window[source - Columns::kFirst], taps[y * FILTER_W + x], accumulators[i][j]);
            }
          }
        }
      }
    }
    add_rows<kRow + 1>(accumulators, taps, image, zeros, row, column);
  }
}

// Adds what each filter row contributes in turn, from taps in shared memory.
__device__ __forceinline__ void add_filter_rows(float (&accumulators)[TILE_ROWS][TILE_COLUMNS], const float* taps,
                                                const ELEMENT* image, const ELEMENT* zeros, int row, int column) {
#pragma unroll 1
  for (int y = 0; y < FILTER_H; ++y) {
    float row_taps[FILTER_W];
#pragma unroll
    for (int x = 0; x < FILTER_W; ++x) row_taps[x] = taps[y * FILTER_W + x];
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i) {
      const int source_row = row + Rows::at(i, y);
      const bool is_inside = static_cast<unsigned>(source_row) < static_cast<unsigned>(H);
      if (kRowTiles == 1 && !is_inside) continue;
      const ELEMENT* const from = kRowTiles == 1 || !kHasZeros || is_inside ? image + source_row * W : zeros;
      float window[Columns::kWindow];
      read_window<Columns, kVector>(window, from, column);
#pragma unroll
      for (int x = 0; x < FILTER_W; ++x) {
#pragma unroll
        for (int j = 0; j < TILE_COLUMNS; ++j) {
          const int source = Columns::at(j, x);
          if (source == kNever || Columns::is_outside(source)) continue;
          accumulators[i][j] = fmaf(window[source - Columns::kFirst], row_taps[x], accumulators[i][j]);
        }
      }
    }
  }
}

// The filters of images from `first` on, as floats.
__device__ __forceinline__ void load_filters(float* to, const ELEMENT* filters, int first) {
#pragma unroll(unrolled<kThreads>(kFilters * kTaps))
  for (int iteration = 0; iteration < iterations<kThreads>(kFilters * kTaps); ++iteration) {
    const int i = iteration * kThreads + threadIdx.x, filter = i / kTaps, tap = i % kTaps;
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

// Writes a tile's results to an image at `to`, whose row `row` and column `column` are its first.
__device__ __forceinline__ void write_tile(ELEMENT* to, const float (&accumulators)[TILE_ROWS][TILE_COLUMNS], int row,
                                           int column) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS; ++i) {
    if (OUT_H % TILE_ROWS && row + i >= OUT_H) break;
    if constexpr (STAGED && kColumnTiles == 1 && OUT_W % 2 && sizeof(ELEMENT) == 2) {
      write_anywhere<OUT_W>(to + (row + i) * OUT_W, accumulators[i]);
      continue;
    }
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS; j += kOutVector) {
      if (OUT_W % TILE_COLUMNS && column + j >= OUT_W) break;
      write_elements<kOutVector, !STAGED>(to + (row + i) * OUT_W + column + j, accumulators[i] + j);
    }
  }
}

#ifdef EPILOGUE
static_assert(!TRANSPOSED, "this kernel fuses forward epilogues alone");

// What a tile's results need of the residual, of results that are not STAGED: vectors as they are written.
using ResidualTile = Vector<ELEMENT, kOutVector>[TILE_ROWS][TILE_COLUMNS / kOutVector];

// Reads it from an image; the tile begins at row `row` and column `column`.
__device__ __forceinline__ void read_tile(ResidualTile& tile, const EpilogueElement* image, int row, int column) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS; ++i)
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS; j += kOutVector)
      tile[i][j / kOutVector] = read_residual<kOutVector>(
          image + (row + i) * OUT_W + column + j,
          (OUT_H % TILE_ROWS == 0 || row + i < OUT_H) && (OUT_W % TILE_COLUMNS == 0 || column + j < OUT_W));
}

// Makes results of a tile's sums. The residual is in `tile` or, of results that are STAGED, where write_tile writes
// these.
__device__ __forceinline__ void finish_tile(float (&accumulators)[TILE_ROWS][TILE_COLUMNS], const ResidualTile& tile,
                                            const ELEMENT* staged, int row, int column, const ChannelTerms& terms,
                                            const Epilogue& epilogue) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS; ++i) {
    if (OUT_H % TILE_ROWS && row + i >= OUT_H) break;
    float residual[TILE_COLUMNS] = {};
    if constexpr (kHasResidual && STAGED && kColumnTiles == 1 && OUT_W % 2 && sizeof(ELEMENT) == 2) {
      read_anywhere<OUT_W>(residual, staged + (row + i) * OUT_W);
    } else if constexpr (kHasResidual) {
#pragma unroll
      for (int j = 0; j < TILE_COLUMNS; j += kOutVector) {
        if (OUT_W % TILE_COLUMNS && column + j >= OUT_W) break;
        if constexpr (STAGED)
          read_elements<kOutVector>(residual + j, staged + (row + i) * OUT_W + column + j);
        else
#pragma unroll
          for (int e = 0; e < kOutVector; ++e) residual[j + e] = convert<float>(tile[i][j / kOutVector].at[e]);
      }
    }
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS; ++j)
      accumulators[i][j] = finish(accumulators[i][j], terms, residual[j], epilogue);
  }
}
#endif

// Where in shared memory the first element lies that a block reads of an image; `first` is that of its first image.
__device__ __forceinline__ int staged_offset(int first, int image) {
  if (kSlots == 1) return first % kCopyElements<ELEMENT> + image * (H * W);
  return image * kSlotPitch + (first + image * (H * W)) % kCopyElements<ELEMENT>;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_channels_first(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filters,
#ifdef EPILOGUE
                             ELEMENT* __restrict__ out, int images, int in_size,
                             const __grid_constant__ Epilogue epilogue) {
#else
                             ELEMENT* __restrict__ out, int images, int in_size) {
#endif
  extern __shared__ __align__(16) float shared[];
  float* const staged_filters = shared;
  ELEMENT* const staged = reinterpret_cast<ELEMENT*>(shared + kFilters * kTapPitch);

  const int row_block = blockIdx.x % kRowBlocks, first_image = blockIdx.x / kRowBlocks * kChannelImages;
  const int count = min(kChannelImages, images - first_image);
  // What is read: images, and rows of them.
  const int first_source = TRANSPOSED ? first_image * kMultiplier : first_image / kMultiplier;
  const int sources = TRANSPOSED ? count * kMultiplier : (first_image + count - 1) / kMultiplier - first_source + 1;
  const int origin = row_block * kRowBlockTiles * Rows::kStep;
  const int first_row = kRowBlocks == 1 ? 0 : min(max(0, origin + Rows::kFirst), H);
  const int end_row = kRowBlocks == 1 ? H : min(H, origin + (kRowBlockTiles - 1) * Rows::kStep + Rows::kLast + 1);
  const int first = (first_source * H + first_row) * W;
  load_segments<kThreads, kSlots, kSegment, kSlotPitch>(staged + kInAt, in, in_size, [&](int slot) {
    return Segment{first + slot * (H * W), kRowBlocks == 1 ? sources * H * W : max(0, end_row - first_row) * W};
  });
#ifdef EPILOGUE
  const int first_result_row = row_block * kRowBlockTiles * TILE_ROWS;
  if constexpr (kHasResidual && STAGED)
    load_segments<kThreads, 1, kOutSegment, padded_size<ELEMENT>(kOutSegment)>(
        staged + kOutAt, epilogue.residual, images * (OUT_H * OUT_W), [&](int) {
          const int rows = kRowBlocks == 1 ? count * OUT_H : min(OUT_H - first_result_row, kRowBlockTiles * TILE_ROWS);
          return Segment{(first_image * OUT_H + first_result_row) * OUT_W, rows * OUT_W};
        });
#endif
  commit_copies();
  load_filters(staged_filters, filters, first_image * kTerms);
  if constexpr (kHasZeros) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kZeroElements / kCopyElements<ELEMENT>; i += kThreads)
      reinterpret_cast<uint4*>(staged)[i] = make_uint4(0, 0, 0, 0);
  }
  wait_for_copies<0>();
  __syncthreads();  // the segment, the filters and the zeros are in place

  // Where results go: image 0 of the block in the tensor, or in the segment that waits to be written.
  const int first_out_row = row_block * kRowBlockTiles * TILE_ROWS,
            first_out = (first_image * OUT_H + first_out_row) * OUT_W;
  ELEMENT* const results = STAGED ? staged + kOutAt + first_out % kCopyElements<ELEMENT> - first_out_row * OUT_W
                                  : out + static_cast<int64>(first_image) * (OUT_H * OUT_W);
#pragma unroll 1
  for (int item = threadIdx.x; item < kChannelImages * kRowBlockTiles * kColumnTiles; item += kThreads) {
    const int across = item % kColumnTiles, down = item / kColumnTiles % kRowBlockTiles + row_block * kRowBlockTiles;
    const int image = item / (kColumnTiles * kRowBlockTiles);
    if (image >= count || (kRowBlocks > 1 && down >= kRowTiles)) break;
#ifdef EPILOGUE
    const int number = first_image + image, n = number / FILTERS;
    const ChannelTerms terms = channel_terms(epilogue, n, number - n * FILTERS, FILTERS);
    ResidualTile residual = {};
    if constexpr (!STAGED)
      read_tile(residual, epilogue.residual + static_cast<int64>(number) * (OUT_H * OUT_W), down * TILE_ROWS,
                across * TILE_COLUMNS);
#endif
    float accumulators[TILE_ROWS][TILE_COLUMNS] = {};
#pragma unroll 1
    for (int term = 0; term < kTerms; ++term) {
      const float* const filter = staged_filters + (image * kTerms + term) * kTapPitch;
      const int source = TRANSPOSED ? image * kMultiplier + term : (first_image + image) / kMultiplier - first_source;
      const ELEMENT* const from = staged + kInAt + staged_offset(first, source) - first_row * W;
      if constexpr (ROLLED) {
        add_filter_rows(accumulators, filter, from, staged, down * Rows::kStep, across * Columns::kStep);
      } else {
        float taps[kTaps];
        read_taps(taps, filter);
        add_rows(accumulators, taps, from, staged, down * Rows::kStep, across * Columns::kStep);
      }
    }
#ifdef EPILOGUE
    finish_tile(accumulators, residual, results + image * (OUT_H * OUT_W), down * TILE_ROWS, across * TILE_COLUMNS,
                terms, epilogue);
#endif
    write_tile(results + image * (OUT_H * OUT_W), accumulators, down * TILE_ROWS, across * TILE_COLUMNS);
  }
  if constexpr (STAGED) {
    __syncthreads();  // every result is staged
    const int rows = min(OUT_H - first_out_row, kRowBlockTiles * TILE_ROWS);
    store_segment<kThreads, kOutSegment>(out, staged + kOutAt,
                                         {first_out, (kRowBlocks == 1 ? count * OUT_H : rows) * OUT_W});
  }
}
