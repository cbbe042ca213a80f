// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_top + r, v = j*STRIDE_X - pad_left + s, for
// CHANNELS <= 4 channels, on Hopper's tensor cores (wgmma, compute capability 9.0) with float32 accumulators.
//
// dx is cut into space-to-depth (s2d) blocks of STRIDE_Y rows by S2D_STRIDES * STRIDE_X columns, whose pixels all meet
// dy alike. M is the elements of a block, N is COLUMNS neighbouring blocks, K is the filters of kShifts columns of dy:
// an operand begins at any column of dy (of every S2D_STRIDES-th), so that a shift is an address. A row of dy meets
// kS2dY rows of blocks. Their accumulators are a ring along M: a row of blocks keeps its entry until it is complete,
// and the filters rotate instead: they are laid out once for every entry that may come first. A team, a warpgroup for
// each 64 rows of M, goes down a strip of blocks, whose rows of dy stream through STAGES buffers. A thread block's
// TEAMS share the filters. Grid: strips, times tiles of COLUMNS s2d blocks, times images, dealt to teams.
#include "few_channels/filters.cuh"
#if CHANNELS_LAST
#include "few_channels/data_wgmma_nhwc.cuh"
#else
#include "few_channels/data_wgmma_nchw.cuh"
#endif

// Lays out the filters as words, zeros beyond filters and taps: of each shift and 8 filters, rows of all entries. A
// thread has the same row of every kAtOnce-th 8 filters.
__device__ __forceinline__ void stage_filters(unsigned char* to, const ELEMENT* raw) {
  constexpr int kAtOnce = kThreads / kRows;
  static_assert(kAtOnce > 0, "a block has a thread for each row of the product");
  const int row = threadIdx.x % kRows, first_octet = threadIdx.x / kRows;
  if (first_octet >= kAtOnce) return;
  const Pixel pixel(row % kEntryRows);
  const int r = row / kEntryRows * STRIDE_Y + pixel.y, first_s = pixel.x - S2D_OFFSET + (kS2dX - 1) * STRIDE_X;
  unsigned char* const line = to + 16 * row;
#pragma unroll 2
  for (int octet = first_octet; octet < 2 * kInstructions; octet += kAtOnce) {
    const int first_k = octet % kOctets * 8, s = first_s - octet / kOctets * STRIDE_X;
    const bool inside = r < FILTER_Y && s >= 0 && s < FILTER_X;
    const int at = CHANNELS_LAST ? (r * FILTER_X + s) * CHANNELS + pixel.c : (pixel.c * FILTER_Y + r) * FILTER_X + s;
    const ELEMENT* const taps = raw + (inside ? at : 0);
    Vector<unsigned, 4> word;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      Vector<ELEMENT, 2> pair;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = first_k + 2 * e + i;
        pair.at[i] = FILTERS % 16 == 0 || k < FILTERS ? taps[k * kTaps] : convert<ELEMENT>(0.0f);
      }
      word.at[e] = inside ? *reinterpret_cast<const unsigned*>(&pair) : 0;
    }
    unsigned char* const first = line + 16 * octet * kFilterRows;
    *reinterpret_cast<Vector<unsigned, 4>*>(first) = word;
    if (row < kRows - kEntryRows) *reinterpret_cast<Vector<unsigned, 4>*>(first + 16 * kRows) = word;
  }
}

// Begins a row's products: `filters` is the word of the first entry's first row, `columns` where the first column is.
__device__ __forceinline__ void issue_wgmma(Accumulators& acc, unsigned filters, unsigned columns, int lead) {
  const unsigned long long a = descriptor_at(matrix_descriptor(16 * kFilterRows, 128, 0), filters);
  wgmma_fence();
#pragma unroll
  for (int shift = 0; shift < kShifts; ++shift) {
    const int word = word_offset(lead + shift, 0);
    const unsigned long long b = descriptor_at(kBDescriptor, columns) + word;
#pragma unroll
    for (int step = 0; step < kKSteps; ++step)
      Wgmma<ELEMENT>::ss(acc, a + 2 * (shift * kKSteps + step) * kFilterRows,
                         b + (word_offset(lead + shift, step) - word));
  }
  wgmma_commit_group();
}

// Writes the accumulators of the entry that is complete, if `wanted`, of a row of s2d blocks, and clears them. Which
// rows of the product a warp has in it is the same for its lanes. If OUT_VECTOR is 2, two lanes exchange what each has
// of two s2d blocks, so that both write two elements side by side.
__device__ __forceinline__ void finish(Accumulators& acc, ELEMENT* __restrict__ dx, const Shape& shape,
                                       const Strip& strip, int row, int entry, bool wanted) {
  constexpr int kColumn = CHANNELS_LAST ? CHANNELS : 1;
  const int lane = threadIdx.x % 32, odd = OUT_VECTOR == 2 ? lane / 4 % 2 : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int warp_row = threadIdx.x % kTeamThreads / 32 * 16 + 8 * half - entry * kEntryRows,
              in_entry = warp_row + lane / 4;
    if (warp_row <= -8 || warp_row >= kEntryRows) continue;
    const bool mine = in_entry >= 0 && in_entry < kEntryRows;
    const Pixel pixel(mine ? in_entry - odd : 0);
    const int h = row * STRIDE_Y + pixel.y - shape.s2d_top;
    const int v = (strip.s2d + lane % 4 * 2 + odd) * kS2dColumns + pixel.x - shape.s2d_left;
    const bool inside = mine && wanted && static_cast<unsigned>(h) < static_cast<unsigned>(shape.height);
    const unsigned width = inside ? shape.width : 0;
    ELEMENT* const to =
        dx + (CHANNELS_LAST ? ((strip.image * shape.height + h) * shape.width + v) * CHANNELS + pixel.c
                            : ((strip.image * CHANNELS + pixel.c) * shape.height + h) * shape.width + v);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      float& first = acc[4 * j + 2 * half];
      float& second = acc[4 * j + 2 * half + 1];
      const int right = 8 * j * kS2dColumns;
      if constexpr (OUT_VECTOR == 2) {
        const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
        Vector<ELEMENT, 2> pair;
        pair.at[0] = convert<ELEMENT>(odd ? other : first);
        pair.at[1] = convert<ELEMENT>(odd ? second : other);
        if (static_cast<unsigned>(v + right) < width)
          *reinterpret_cast<Vector<ELEMENT, 2>*>(to + right * kColumn) = pair;
      } else {
        if (static_cast<unsigned>(v + right) < width) to[right * kColumn] = convert<ELEMENT>(first);
        if (static_cast<unsigned>(v + right + kS2dColumns) < width)
          to[(right + kS2dColumns) * kColumn] = convert<ELEMENT>(second);
      }
      first = mine ? 0.0f : first;
      second = mine ? 0.0f : second;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    few_channels_data_wgmma(DY_PARAMETER, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ dx,
                            const __grid_constant__ Shape shape) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int team = TEAMS == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / kTeamThreads, 0);
  const int number = static_cast<int>(blockIdx.x) * TEAMS + team, image = number / shape.image_strips;
  const int in_image = number - image * shape.image_strips.by, row_of_strips = in_image / shape.s2d_tiles;
  const int tile = in_image - row_of_strips * shape.s2d_tiles.by;
  const Strip strip = {image, shape.first_s2d + tile * COLUMNS};
  const int begin = shape.first_row + row_of_strips * shape.strip_rows;
  const int end = number < shape.strips ? min(begin + shape.strip_rows, shape.end_row) : 0;

  load_filters<kThreads>(shared_address(shared + kLastAt), w, FILTERS * kTaps);
  int row = begin - kS2dY + 1;
  Rows staged(dy, shape, shared, team, image, strip.s2d * S2D_STRIDES - shape.columns_ahead - (kS2dX - 1), row, end);
  staged.begin();
  wait_for_copies<Rows::kBegun>();
  __syncthreads();  // the filters have arrived
  stage_filters(shared, reinterpret_cast<const ELEMENT*>(shared + kLastAt));
  fence_proxy_async();
  __syncthreads();  // the filters are laid out
  staged.filters_done();

  const unsigned filters = shared_address(shared) + threadIdx.x % kTeamThreads / 128 * 64 * 16;
  Accumulators acc = {};
  int entry = 0;
#pragma unroll 1
  for (int step = 0; step < shape.strip_steps; ++step, ++row) {
    const unsigned columns = staged.arrived();
    issue_wgmma(acc, filters + (entry == 0 ? 0 : kS2dY - entry) * kEntryRows * 16, columns, staged.lead);
    staged.next();
    wgmma_wait_group<0>();
    finish(acc, dx, shape, strip, row, entry, row >= begin && row < end);
    entry = entry + 1 == kS2dY ? 0 : entry + 1;
  }
}
