// dx[n,c,h,v] = sum_{k,r,s} dy[n,k,i,j] * w[k,c,r,s], h = i*STRIDE_Y - pad_y + r, v = j*STRIDE_X - pad_x + s, for
// CHANNELS <= 4 channels, on Hopper's tensor cores (wgmma, compute capability 9.0) with float32 sums.
//
// A cell is STRIDE_Y rows of WIDEN * STRIDE_X columns of dx. Product rows are its pixels' elements, columns are COLUMNS
// cells side by side, the depth is filters of kShifts columns of dy: 8 filters of a column are a word of 16 bytes,
// words of columns (of every WIDEN-th) lie side by side, and an operand begins at any word, so that a shift is an
// address. Sums are of the kCellsY rows of cells that a row of dy meets, each in a slot of the product's rows. It stays
// there until complete, and the filters go round: they are laid out as slot 0, 1, ... of a row's, more than once over.
// A team of a warpgroup for each 64 product rows goes down a strip of cells, whose rows of dy stream through STAGES
// buffers; unless CHANNELS_LAST each is turned into words by one more step. A block's TEAMS share the filters.
// Grid: strips, times tiles of COLUMNS cells, times images, dealt to teams.
#include "common/cell_words.cuh"
#include "common/divisor.cuh"

// Of 8 filters of each cell's element, from one to the next; a product may read rows that there are not.
constexpr int kFilterRows = (2 * kCellsY - 1) * kSlot, kFilterWords = 2 * kProducts * kFilterRows;
constexpr int kSpareRows = 64 * kGroups - kRows, kStagesAt = 16 * (kFilterWords + kSpareRows);
constexpr int kTeamsStage = TEAMS * kStageBytes;
// Filters as they come take the place of what is written last: the last stage, or rows that are turned.
constexpr int kLastAt = kStagesAt + (CHANNELS_LAST ? STAGES - 1 : STAGES) * kTeamsStage;
constexpr int kLastBytes = TEAMS * (CHANNELS_LAST ? kStageBytes : 2 * kTurnedBytes);
constexpr int kRawBytes = round_up(2 * FILTERS * kTaps, 16);
static_assert(SHARED_BYTES == kLastAt + maximum(kLastBytes, kRawBytes), "the host and the kernel agree");

__device__ __forceinline__ void load_filters(unsigned raw, const ELEMENT* filters) {
  constexpr int kCount = FILTERS * kTaps;
  for (int i = 8 * threadIdx.x; i < kCount; i += 8 * kThreads)
    copy_some(raw + 2 * i, filters + i, min(16, 2 * (kCount - i)));
  commit_copies();
}

// Lays out the filters as words, zeros beyond filters and taps: of each shift and 8 filters, rows of all slots. A
// thread has the same row of every kAtOnce-th 8 filters.
__device__ __forceinline__ void spread_filters(unsigned char* to, const ELEMENT* raw) {
  constexpr int kAtOnce = kThreads / kRows;
  static_assert(kAtOnce > 0, "every row has a thread");
  const int row = threadIdx.x % kRows, first_octet = threadIdx.x / kRows;
  if (first_octet >= kAtOnce) return;
  const Pixel pixel(row % kSlot);
  const int r = row / kSlot * STRIDE_Y + pixel.y, first_s = pixel.x - PHASE + (kCellsX - 1) * STRIDE_X;
  unsigned char* const line = to + 16 * row;
#pragma unroll 2
  for (int octet = first_octet; octet < 2 * kProducts; octet += kAtOnce) {
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
    if (row < kRows - kSlot) *reinterpret_cast<Vector<unsigned, 4>*>(first + 16 * kRows) = word;
  }
}

using Sums = float[COLUMNS / 2];

// Begins a row's products: `filters` is the word of the first slot's first row, `words` that of the first column.
__device__ __forceinline__ void begin_products(Sums& sums, unsigned filters, unsigned words, int lead) {
  const unsigned long long a = operand(words_form(kFilterRows), filters);
  products_begin();
#pragma unroll
  for (int shift = 0; shift < kShifts; ++shift) {
    const unsigned long long b = operand(words_form(kPitch), words + 16 * place_of(lead + shift));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ColumnProducts<ELEMENT>::begin(sums, a + 2 * (shift * kSteps + step) * kFilterRows, b + 2 * step * kPitch);
  }
  products_commit();
}

// Where a strip's results go; `left` is as many columns to the left of dx as cells begin.
struct Target {
  ELEMENT* dx;
  Size size;
  int top, left;
};

// Writes the sums of the slot that is complete, if `wanted`, of a row of cells, and clears them. Which rows of the
// product a warp has in it is the same for its lanes. If PAIRED two lanes exchange what each has of two cells, so that
// both write two elements side by side.
__device__ __forceinline__ void finish(Sums& sums, const Target& to, const Strip& strip, int row, int slot,
                                       bool wanted) {
  constexpr int kColumn = CHANNELS_LAST ? CHANNELS : 1;
  const int lane = threadIdx.x % 32, odd = PAIRED ? lane / 4 % 2 : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int warp_row = threadIdx.x % kTeam / 32 * 16 + 8 * half - slot * kSlot, in_slot = warp_row + lane / 4;
    if (warp_row <= -8 || warp_row >= kSlot) continue;
    const bool mine = in_slot >= 0 && in_slot < kSlot;
    const Pixel pixel(mine ? in_slot - odd : 0);
    const int h = row * STRIDE_Y + pixel.y - to.top;
    const int v = (strip.cell + lane % 4 * 2 + odd) * kCell + pixel.x - to.left;
    const bool inside = mine && wanted && static_cast<unsigned>(h) < static_cast<unsigned>(to.size.height);
    const unsigned width = inside ? to.size.width : 0;
    ELEMENT* const dx =
        to.dx + (CHANNELS_LAST ? ((strip.image * to.size.height + h) * to.size.width + v) * CHANNELS + pixel.c
                               : ((strip.image * CHANNELS + pixel.c) * to.size.height + h) * to.size.width + v);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      float& first = sums[4 * j + 2 * half];
      float& second = sums[4 * j + 2 * half + 1];
      const int right = 8 * j * kCell;
      if constexpr (PAIRED) {
        const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
        Vector<ELEMENT, 2> pair;
        pair.at[0] = convert<ELEMENT>(odd ? other : first);
        pair.at[1] = convert<ELEMENT>(odd ? second : other);
        if (static_cast<unsigned>(v + right) < width)
          *reinterpret_cast<Vector<ELEMENT, 2>*>(dx + right * kColumn) = pair;
      } else {
        if (static_cast<unsigned>(v + right) < width) dx[right * kColumn] = convert<ELEMENT>(first);
        if (static_cast<unsigned>(v + right + kCell) < width) dx[(right + kCell) * kColumn] = convert<ELEMENT>(second);
      }
      first = mine ? 0.0f : first;
      second = mine ? 0.0f : second;
    }
  }
}

#define DIVISOR_PARAMETERS(d) int d, unsigned d##_multiplier, int d##_shift
#define DIVISOR(d) {d, d##_multiplier, d##_shift}

// Cells begin `top` rows and `left` columns before dx, and the last column of dy that a cell I meets is WIDEN * (I + 1)
// - 1 - ahead. The pixels are in rows of cells from `first_row` to before `end_row`, in columns from `first_cell` on; a
// strip has `rows` rows of them, which meet `steps` rows of dy, and there are `strips` strips of all images.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    first_layer_data_wgmma(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ w, ELEMENT* __restrict__ dx,
                           int height, int width, int out_height, int out_width, int top, int left, int ahead,
                           int first_row, int end_row, int first_cell, int rows, int steps, int strips,
                           DIVISOR_PARAMETERS(image_strips), DIVISOR_PARAMETERS(tiles)) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Divisor by_image = DIVISOR(image_strips), by_tile = DIVISOR(tiles);
  const int team = TEAMS == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / kTeam, 0);
  const int number = static_cast<int>(blockIdx.x) * TEAMS + team, image = number / by_image;
  const int rank = number - image * image_strips, strip_rank = rank / by_tile, tile = rank - strip_rank * tiles;
  const Strip strip = {image, first_cell + tile * COLUMNS};
  const int begin = first_row + strip_rank * rows, end = number < strips ? min(begin + rows, end_row) : 0;
  const Size out_size = {out_height, out_width};
  const Target target = {dx, {height, width}, top, left};
  // Of dy, where words and what is staged begin.
  const int column = strip.cell * WIDEN - ahead - (kCellsX - 1), lead = CHANNELS_LAST ? 0 : column & 7;
  unsigned char* const stages = shared + kStagesAt + team * kStageBytes;
  // Rows that dy lacks are zeros.
  const auto load = [&](int stage, int row) {
    unsigned char* const to = stages + stage * kTeamsStage;
    if (row >= 0 && row < min(end, out_height))
      load_row(to, dy, out_size, image, row, column - lead);
    else if (row < end)
      clear_stage(to);
    commit_copies();
  };
  const auto barrier = [&] { consumers_barrier<kTeam>(1 + team); };

  load_filters(shared_address(shared + kLastAt), w);
  constexpr int kFirst = CHANNELS_LAST ? STAGES - 1 : STAGES;
#pragma unroll 1
  for (int stage = 0; stage < kFirst; ++stage) clear_stage(stages + stage * kTeamsStage);
  barrier();  // stages are clear
  int row = begin - kCellsY + 1;
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) load(stage, row + stage);
  wait_for_copies<STAGES - 1>();
  __syncthreads();  // the filters have arrived
  spread_filters(shared, reinterpret_cast<const ELEMENT*>(shared + kLastAt));
  shared_writes_done();
  __syncthreads();  // the filters are laid out
  if (CHANNELS_LAST) clear_stage(stages + (STAGES - 1) * kTeamsStage);

  const unsigned filters = shared_address(shared) + threadIdx.x % kTeam / 128 * 64 * 16;
  unsigned char* const turned = shared + kLastAt + team * 2 * kTurnedBytes;
  int stage = 0, half = 0, slot = 0;
  if constexpr (!CHANNELS_LAST) {
    wait_for_copies<STAGES - 2>();
    barrier();  // the first row has arrived
    turn_row(turned, stages);
    load(STAGES - 1, row + STAGES - 1);
  }
  Sums sums = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++row) {
    wait_for_copies<STAGES - 2>();
    shared_writes_done();
    // This row, or its words and the next row, has arrived; every product has read what is overwritten next.
    barrier();
    const unsigned words =
        CHANNELS_LAST ? shared_address(stages) + stage * kTeamsStage : shared_address(turned) + half * kTurnedBytes;
    begin_products(sums, filters + (slot == 0 ? 0 : kCellsY - slot) * kSlot * 16, words, lead);
    const int next = stage + 1 == STAGES ? 0 : stage + 1;
    if constexpr (CHANNELS_LAST) {
      load(stage == 0 ? STAGES - 1 : stage - 1, row + STAGES - 1);
    } else {
      load(stage, row + STAGES);
      turn_row(turned + (half ^ 1) * kTurnedBytes, stages + next * kTeamsStage);
      half ^= 1;
    }
    products_wait<0>();
    finish(sums, target, strip, row, slot, row >= begin && row < end);
    stage = next;
    slot = slot + 1 == kCellsY ? 0 : slot + 1;
  }
}
