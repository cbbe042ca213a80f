// out[n,c,i,j] = sum_{y,x} in[n, c, i - PAD_H + y, j - PAD_W + x] * filter[c,y,x], stride 1, NCHW, on tensor cores.
// Backward data: `in` is dy, and the filter is read backwards (FLIPPED). Accumulators are float32.
//
// A filter row is a banded Toeplitz matrix: 16 neighbouring outputs meet at most 24 inputs. All blocks of 16 columns
// use the same 16 x 24 matrix. A warp keeps its fragments in registers. The columns of a product are one row of 8
// images. A warp reads a row of inputs from shared memory once, as fragments, and multiplies it by all filter rows.
// In rows of odd length, words of two elements begin at an odd column in every other row: windows, blocks and matrices
// shift by one. A block holds CHANNELS channels of IMAGES images. A warp computes a channel, or one of its ROW_BLOCKS
// row blocks, TILE_ROWS rows at a time. Outputs go (TARGET) over the inputs: 0, beside them: 1, or to device memory: 2.
// Grid: one dimension, channels innermost, then images.
#include "depthwise/toeplitz.cuh"
#include "depthwise/even_segments.cuh"
#include "common/mma.cuh"
#include "common/small_matrices.cuh"
#include "depthwise/transposed_matrix.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(ELEMENT) || !defined(H) || !defined(W) || !defined(OUT_H) || !defined(OUT_W) || !defined(FILTER_Y)
#error "define ELEMENT, H, W, OUT_H, OUT_W and FILTER_Y"
#endif
#if !defined(FILTER_X) || !defined(PAD_H) || !defined(PAD_W) || !defined(FLIPPED) || !defined(SHIFT)
#error "define FILTER_X, PAD_H, PAD_W, FLIPPED and SHIFT"
#endif
#if !defined(CHANNELS) || !defined(IMAGES) || !defined(ROW_BLOCKS) || !defined(TARGET) || !defined(TILE_ROWS)
#error "define CHANNELS, IMAGES, ROW_BLOCKS, TARGET and TILE_ROWS"
#endif
#if !defined(RING) || !defined(ALIKE) || !defined(PARTIAL_WORDS) || !defined(MIN_BLOCKS) || !defined(SHARED_BYTES)
#error "define RING, ALIKE, PARTIAL_WORDS, MIN_BLOCKS and SHARED_BYTES"
#endif

constexpr int kChannels = CHANNELS, kImages = IMAGES, kRowBlocks = ROW_BLOCKS, kThreads = 32 * kChannels * kRowBlocks;
constexpr int kFilterY = FILTER_Y, kFilterX = FILTER_X, kInArea = H * W, kOutArea = OUT_H * OUT_W;
static_assert(kImages % 8 == 0 && kThreads <= 1024, "the K of a product is eight images: IMAGES must be a multiple");

using Row = ToeplitzRow<W, OUT_W, FILTER_X, PAD_W, SHIFT>;
using Begin = Parity<H, W, OUT_H, OUT_W>;
constexpr bool kIsOdd = Row::kIsOdd;
constexpr int kOdd = Row::kOdd, kBlocks = Row::kBlocks, kWords = Row::kWords, kFirstTap = Row::kFirstTap;

// Input rows are in a ring of registers: the next iteration's rows arrive while an iteration computes. Or there are
// registers for all rows, and the compiler knows every row.
constexpr int kTileRows = TILE_ROWS, kRing = RING;
static_assert((!kIsOdd || kTileRows % 2 == 0) && kRing % kTileRows == 0,
              "an iteration must begin at an even row, and the ring must hold whole iterations");
constexpr bool kIsWhole = kRowBlocks == 1 && kRing >= OUT_H + kFilterY - 1;
static_assert(kIsWhole || kRing >= 2 * kTileRows + kFilterY - 1,
              "the ring must hold an iteration's rows and the next one's new rows");
constexpr int kIterations = kIsWhole ? ceil_div(OUT_H, kTileRows) : kRing / kTileRows;  // that are unrolled
constexpr int kRowBlockRows = round_up(ceil_div(OUT_H, kRowBlocks), kTileRows);

// Segments of a block's channels, an image each. An odd number of 16-byte words lies between them, so that eight
// images' rows of four words meet every bank once.
constexpr int odd_padded_size(int count) {
  return (padded_size<ELEMENT>(count) / kCopyElements<ELEMENT> | 1) * kCopyElements<ELEMENT>;
}
constexpr int kPitch = odd_padded_size(kChannels * kInArea), kOutPitch = odd_padded_size(kChannels * kOutArea);
constexpr bool kDirect = TARGET == 2;
static_assert(TARGET != 0 || (H == OUT_H && W == OUT_W && kRowBlocks == 1 && kFilterY > PAD_H &&
                              (kChannels == 1 || kInArea % 2 == 0)),
              "a warp's outputs replace inputs that it has read, in words that no other warp reads");
static_assert(!kDirect || !kIsOdd, "outputs must be written in whole words");
constexpr int kOutAt = TARGET == 1 ? kImages * kPitch : 0;
static_assert(SHARED_BYTES == 2 * (kImages * kPitch + (TARGET == 1 ? kImages * kOutPitch : 0)),
              "SHARED_BYTES differs from this layout: the solver computes another");

// Fragments of a banded Toeplitz matrix, 8 x 8 each, by diagonals: word - half block of outputs = -1, 0, 1 and 2. Or,
// where rows are of whole quads of outputs, the matrix has its rows in such an order that a lane's outputs of both
// halves are a quad: row g of half h is output g / 2 * 4 + g % 2 + 2 * h, and fragments are by half and word.
constexpr bool kHasQuads = !kIsOdd && OUT_W % 4 == 0;
using Matrix = unsigned[kHasQuads ? 6 : 4];
using Words = unsigned[kWords];

// Filter rows whose matrix is the same for all rows of outputs: inputs and outputs begin alike.
constexpr bool is_alike(int y) {
  return Begin::is_alike(y + PAD_H);
}

// Taps `tap` and the next of a filter row, zero outside.
__device__ __forceinline__ unsigned taps_from(const unsigned short* row, int tap) {
  constexpr int kStep = FLIPPED ? -1 : 1;
  const unsigned low = static_cast<unsigned>(tap) < kFilterX ? row[kStep * tap] : 0u;
  const unsigned high = static_cast<unsigned>(tap + 1) < kFilterX ? row[kStep * (tap + 1)] : 0u;
  return low | high << 16;
}

// Reads what the matrices of a filter row have in words kFirst and on for a lane that has tap `first` in word 0. Taps
// of a word are eight apart from those of the next one, so that a filter of up to eight columns has one of them at
// most.
template <int kFirst, int kCount>
__device__ __forceinline__ void read_taps(unsigned (&to)[kCount], const unsigned short* row, int first) {
  if constexpr (kFilterX > 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = taps_from(row, first + 8 * (kFirst + i));
    return;
  }
  constexpr int kStep = FLIPPED ? -1 : 1;
  const int low = first & 7, high = (first + 1) & 7;
  unsigned pair = low < kFilterX ? row[kStep * low] : 0u;
  pair |= (high < kFilterX ? row[kStep * high] : 0u) << 16;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool has_low = kFirst + i == -(first >> 3), has_high = kFirst + i == -((first + 1) >> 3);
    to[i] = pair & ((has_low ? 0xffffu : 0u) | (has_high ? 0xffff0000u : 0u));
  }
}

// Reads the matrices of a channel: those for outputs of even and of odd rows.
__device__ __forceinline__ void read_matrices(Matrix (&matrices)[2][kFilterY], const ELEMENT* filter,
                                              const Begin& begin) {
  const unsigned short* const taps = reinterpret_cast<const unsigned short*>(filter);
  const int lane = threadIdx.x % 32, first = lane % 4 * 2 - lane / 4 + kFirstTap;
  const int quad_first = lane % 4 * 2 - (lane / 8 * 4 + lane / 4 % 2) + kFirstTap;
#pragma unroll
  for (int y = 0; y < kFilterY; ++y)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      if (odd > 0 && is_alike(y)) continue;
      const int shift = is_alike(y) ? 0 : begin.of_out(odd) - begin.of_in(odd + y + PAD_H);
      const unsigned short* const row = taps + (FLIPPED ? (kFilterY - 1 - y) * kFilterX + kFilterX - 1 : y * kFilterX);
      if constexpr (kHasQuads) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned words[3];
          read_taps<0>(words, row, quad_first - 2 * half);
#pragma unroll
          for (int i = 0; i < 3; ++i) matrices[odd][y][2 * i + half] = words[i];
        }
      } else {
        read_taps<-1>(matrices[odd][y], row, first + shift);
      }
    }
}

// Adds what a row of inputs contributes to a row of outputs.
__device__ __forceinline__ void add_row(float (&accumulators)[kBlocks][4], const Matrix& matrix, const Words& row) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if constexpr (kHasQuads) {
      if (Row::is_met(j, 2 * j) && Row::is_met(j, 2 * j + 1)) {
        const unsigned rows[4] = {matrix[0], matrix[1], matrix[2], matrix[3]};
        multiply_add<ELEMENT>(accumulators[j], rows, row[2 * j], row[2 * j + 1]);
      } else if (Row::is_met(j, 2 * j)) {
        multiply_add_half<ELEMENT>(accumulators[j], matrix[0], matrix[1], row[2 * j]);
      } else if (Row::is_met(j, 2 * j + 1)) {
        multiply_add_half<ELEMENT>(accumulators[j], matrix[2], matrix[3], row[2 * j + 1]);
      }
      if (Row::is_met(j, 2 * j + 2)) multiply_add_half<ELEMENT>(accumulators[j], matrix[4], matrix[5], row[2 * j + 2]);
      continue;
    }
    if (Row::is_met(j, 2 * j) && Row::is_met(j, 2 * j + 1)) {
      const unsigned rows[4] = {matrix[1], matrix[0], matrix[2], matrix[1]};
      multiply_add<ELEMENT>(accumulators[j], rows, row[2 * j], row[2 * j + 1]);
    } else if (Row::is_met(j, 2 * j)) {
      multiply_add_half<ELEMENT>(accumulators[j], matrix[1], matrix[0], row[2 * j]);
    } else if (Row::is_met(j, 2 * j + 1)) {
      multiply_add_half<ELEMENT>(accumulators[j], matrix[2], matrix[1], row[2 * j + 1]);
    }
    if (Row::is_met(j, 2 * j + 2)) multiply_add_half<ELEMENT>(accumulators[j], matrix[3], matrix[2], row[2 * j + 2]);
  }
}

// Reads row `row` of inputs, which is odd if `odd`. Row 0 would have the lane's first word at `lane_image`, did it
// begin at an even element; `masks` are of rows of even and of odd number.
__device__ __forceinline__ void read_row(Words& words, const ELEMENT* lane_image, const Words (&masks)[2],
                                         const Begin& begin, int row, int odd) {
  constexpr int kEnd = Row::is_live(kWords - 1) ? kWords : Row::is_live(kWords - 2) ? kWords - 1 : kWords - 2;
  constexpr int kFirst = Row::is_live(0) ? 0 : 1;
  read_words<kFirst, kEnd, kIsOdd>(words, lane_image + row * W - begin.of_in(odd), masks[kIsOdd ? odd : 0],
                                   static_cast<unsigned>(row) < H, Row::is_edge);
}

// Writes the accumulators of a row to `to`, where the lane's image has the row's column 0; the row begins `odd`
// elements late.
__device__ __forceinline__ void write_row(ELEMENT* to, const float (&accumulators)[kBlocks][4], int odd, bool writes) {
  if constexpr (kHasQuads) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const unsigned low = transposed_matrix(pack(ELEMENT{}, accumulators[block][0], accumulators[block][1]));
      const unsigned high = transposed_matrix(pack(ELEMENT{}, accumulators[block][2], accumulators[block][3]));
      const int column = 16 * block + threadIdx.x % 4 * 4;
      if (writes && (16 * block + 16 <= OUT_W || column < OUT_W))
        *reinterpret_cast<uint2*>(to + column) = make_uint2(low, high);
    }
    return;
  }
  const int first = threadIdx.x % 4 * 2 - odd;
#pragma unroll
  for (int block = 0; block < 2 * kBlocks; ++block) {
    if (8 * block - kOdd >= OUT_W) continue;
    const float* const pair = accumulators[block / 2] + block % 2 * 2;  // of a column, of two images
    const unsigned word = transposed_matrix(pack(ELEMENT{}, pair[0], pair[1]));
    const int column = first + 8 * block;
    const bool low = (block > 0 || !kIsOdd) && 8 * block + 6 < OUT_W ? true : static_cast<unsigned>(column) < OUT_W;
    const bool high = 8 * block + 7 < OUT_W || static_cast<unsigned>(column + 1) < OUT_W;
    if (!writes) continue;
    if (low && high)
      *reinterpret_cast<unsigned*>(to + column) = word;
    else if (kIsOdd && (low || high))
      reinterpret_cast<unsigned short*>(to)[low ? column : column + 1] =
          static_cast<unsigned short>(low ? word : word >> 16);
  }
}

// A channel of eight images, of which a lane reads and writes one, and its rows from first_row on.
struct WarpTile {
  const ELEMENT* lane_image;
  ELEMENT* out;
  int first_row, end_row;
  bool writes;
};

#ifdef EPILOGUE
static_assert(!FLIPPED, "this kernel fuses forward epilogues alone");

// The epilogue of a warp's channel: terms of the two images of a lane's sums, and the residual of the image that a lane
// writes.
struct WarpEpilogue {
  const Epilogue& all;
  const EpilogueElement* residual;
  ChannelTerms terms[2];
};

// What a lane reads of a row of the residual: as much as it writes.
using ResidualRow = unsigned[2 * kBlocks];

// Reads the row at `from`, which begins `odd` elements late.
__device__ __forceinline__ void read_residual_row(ResidualRow& words, const ELEMENT* from, int odd, bool exists) {
  if constexpr (kHasQuads) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int column = 16 * block + threadIdx.x % 4 * 4;
      uint2 quad = {};
      if (exists && (16 * block + 16 <= OUT_W || column < OUT_W)) quad = *reinterpret_cast<const uint2*>(from + column);
      words[2 * block] = quad.x, words[2 * block + 1] = quad.y;
    }
    return;
  }
#pragma unroll
  for (int block = 0; block < 2 * kBlocks; ++block) {
    words[block] = 0;
    const int column = static_cast<int>(threadIdx.x % 4 * 2) - odd + 8 * block;
    const bool low = exists && static_cast<unsigned>(column) < OUT_W,
               high = exists && static_cast<unsigned>(column + 1) < OUT_W;
    if (low && high)
      words[block] = *reinterpret_cast<const unsigned*>(from + column);
    else if (kIsOdd && (low || high))
      words[block] = static_cast<unsigned>(reinterpret_cast<const unsigned short*>(from)[low ? column : column + 1])
                     << (low ? 0 : 16);
  }
}

// Makes results of a row's sums.
__device__ __forceinline__ void finish_row(float (&sums)[kBlocks][4], const ResidualRow& residual,
                                           const WarpEpilogue& epilogue) {
#pragma unroll
  for (int block = 0; block < 2 * kBlocks; ++block) {
    const unsigned word = kHasResidual ? transposed_matrix(residual[block]) : 0;  // of a column, of two images
    const auto pair = reinterpret_cast<const Vector<ELEMENT, 2>&>(word);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float& sum = sums[block / 2][block % 2 * 2 + k];
      sum = finish(sum, epilogue.terms[k], convert<float>(pair.at[k]), epilogue.all);
    }
  }
}
#endif

__device__ __forceinline__ void compute(const WarpTile& tile, const Matrix (&matrices)[2][kFilterY],
#ifdef EPILOGUE
                                        const Words (&masks)[2], const Begin& begin, const WarpEpilogue& epilogue) {
#else
                                        const Words (&masks)[2], const Begin& begin) {
#endif
  // Row m of the ring is row first_row - PAD_H + m of the inputs, and first meets output row first_row + m.
  Words ring[kRing] = {};
  constexpr int kReadFirst = kIsWhole ? OUT_H + kFilterY - 1 : kRing - kTileRows;
#pragma unroll
  for (int m = 0; m < kReadFirst; ++m)
    read_row(ring[m], tile.lane_image, masks, begin, (kIsWhole ? 0 : tile.first_row) - PAD_H + m, (m + PAD_H) & 1);
#pragma unroll 1
  for (int first = tile.first_row; first < tile.end_row; first += kRing) {
#pragma unroll
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      const int row = (kIsWhole ? 0 : first) + iteration * kTileRows;
      if (!kIsWhole && row >= tile.end_row) break;
      if constexpr (!kIsWhole) {
#pragma unroll
        for (int i = 0; i < kTileRows; ++i) {
          const int m = kRing - kTileRows + i;
          read_row(ring[(iteration * kTileRows + m) % kRing], tile.lane_image, masks, begin, row + m - PAD_H,
                   (iteration * kTileRows + m + PAD_H) & 1);
        }
      }
#ifdef EPILOGUE
      ResidualRow residual[kTileRows] = {};
      if constexpr (kHasResidual) {
#pragma unroll
        for (int i = 0; i < kTileRows; ++i)
          if (row + i < (kIsWhole ? OUT_H : tile.end_row))
            read_residual_row(residual[i], epilogue.residual + (row + i) * OUT_W,
                              begin.of_out((iteration * kTileRows + i) & 1), tile.writes);
      }
#endif
      float accumulators[kTileRows][kBlocks][4] = {};
#pragma unroll
      for (int y = 0; y < kFilterY; ++y)
#pragma unroll
        for (int i = 0; i < kTileRows; ++i) {
          const int at = iteration * kTileRows + i, in_row = at + y - PAD_H;
          if (kIsWhole && (in_row < 0 || in_row >= H || at >= OUT_H)) continue;
          add_row(accumulators[i], matrices[is_alike(y) ? 0 : at & 1][y], ring[(at + y) % kRing]);
        }
#ifdef EPILOGUE
#pragma unroll
      for (int i = 0; i < kTileRows; ++i)
        if (row + i < (kIsWhole ? OUT_H : tile.end_row)) finish_row(accumulators[i], residual[i], epilogue);
#endif
      if (TARGET == 0) __syncwarp();  // other lanes have read what a lane's outputs replace
#pragma unroll
      for (int i = 0; i < kTileRows; ++i)
        if (row + i < (kIsWhole ? OUT_H : tile.end_row))
          write_row(tile.out + (row + i) * OUT_W, accumulators[i], begin.of_out((iteration * kTileRows + i) & 1),
                    tile.writes);
    }
    if (kIsWhole) break;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_toeplitz(const ELEMENT* __restrict__ in, const ELEMENT* __restrict__ filter, ELEMENT* __restrict__ out,
#ifdef EPILOGUE
                       int images, int channels, const __grid_constant__ Epilogue epilogue) {
#else
                       int images, int channels) {
#endif
  extern __shared__ __align__(16) ELEMENT staged[];
  const int channel_tiles = (channels + kChannels - 1) / kChannels;
  const int image = blockIdx.x / channel_tiles * kImages, channel = blockIdx.x % channel_tiles * kChannels;
  const int here = min(kChannels, channels - channel);
  // One segment an image: the block's channels, `area` elements each.
  const auto segments_of = [&](unsigned area) {
    const unsigned first = image * channels + channel;
    return EvenSegments{first * area, channels * area, static_cast<unsigned>(images - image), here * area};
  };
  load_even_segments<kThreads, kImages, kChannels * kInArea, kPitch, ALIKE>(staged, in, images * channels * kInArea,
                                                                            segments_of(kInArea));
  commit_copies();

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int own = warp / kRowBlocks, row_block = warp % kRowBlocks, own_channel = channel + own;
  const bool computes = own < here;
  const Begin begin = Begin::of(own_channel);
  Matrix matrices[2][kFilterY];
  if (computes) read_matrices(matrices, filter + own_channel * (kFilterY * kFilterX), begin);
  Words masks[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd)
#pragma unroll
    for (int i = 0; i < kWords; ++i) masks[odd][i] = existing<W>(8 * i + lane % 4 * 2 - SHIFT - begin.of_in(odd));
  wait_for_copies<0>();
  __syncthreads();  // the images have arrived

  if (computes) {
#pragma unroll 1
    for (int group = 0; group < kImages / 8 && image + 8 * group < images; ++group) {
      const int slot = 8 * group + lane / 4, first = (image + slot) * channels + channel;
      WarpTile tile;
      tile.lane_image =
          staged + slot * kPitch + first * kInArea % kCopyElements<ELEMENT> + own * kInArea + lane % 4 * 2 - SHIFT;
      tile.out = kDirect
                     ? out + (first + own) * kOutArea
                     : staged + kOutAt + slot * kOutPitch + first * kOutArea % kCopyElements<ELEMENT> + own * kOutArea;
      tile.first_row = row_block * kRowBlockRows;
      tile.end_row = min(OUT_H, tile.first_row + kRowBlockRows);
      tile.writes = image + slot < images;
#ifdef EPILOGUE
      const int summed = image + 8 * group + lane % 4 * 2;  // the first image of the lane's sums
      compute(tile, matrices, masks, begin,
              {epilogue,
               epilogue.residual + static_cast<int64>(first + own) * kOutArea,
               {channel_terms(epilogue, min(summed, images - 1), own_channel, channels),
                channel_terms(epilogue, min(summed + 1, images - 1), own_channel, channels)}});
#else
      compute(tile, matrices, masks, begin);
#endif
    }
  }
  if constexpr (!kDirect) {
    __syncthreads();  // the outputs of every warp are staged
    store_even_segments<kThreads, kImages, kChannels * kOutArea, kOutPitch, ALIKE, PARTIAL_WORDS>(
        out, staged + kOutAt, segments_of(kOutArea));
  }
}
