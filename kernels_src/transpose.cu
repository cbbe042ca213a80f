// to[b, j, i] = from[b, i, j]: rows x columns to columns x rows, for each of a batch. Elements are moved, not computed.
//
// A block moves a tile of 64 x 64 through shared memory, IN neighbours of a row and OUT of a column at once. Rows of
// the tile are an odd number of words apart, so that columns are read without bank conflicts. Grid: one dimension,
// tiles of columns innermost, then of rows, then the batch.
#include "common/divisor.cuh"
#include "common/types.cuh"

#if !defined(ELEMENT) || !defined(IN) || !defined(OUT)
#error "define ELEMENT, IN and OUT"
#endif

constexpr int kTile = 64, kThreads = 256;
constexpr int kPitch = kTile + 4 / static_cast<int>(sizeof(ELEMENT));
static_assert(kPitch * sizeof(ELEMENT) / 4 % 2 == 1, "columns fall into different banks");

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose(const ELEMENT* from, ELEMENT* to, int rows, int columns, int tiles_i, unsigned tiles_i_multiplier,
              int tiles_i_shift, int tiles_j, unsigned tiles_j_multiplier, int tiles_j_shift) {
  __shared__ alignas(16) ELEMENT tile[kTile * kPitch];  // [column][row]
  const Divisor across{tiles_j, tiles_j_multiplier, tiles_j_shift}, down{tiles_i, tiles_i_multiplier, tiles_i_shift};
  const int number = blockIdx.x, line = number / across, batch = line / down;
  const int first_j = (number - line * tiles_j) * kTile, first_i = (line - batch * tiles_i) * kTile;
  const int64 matrix = static_cast<int64>(batch) * rows * columns;
  for (int at = threadIdx.x; at < kTile * kTile / IN; at += kThreads) {
    const int i = at / (kTile / IN), j = at % (kTile / IN) * IN;
    if (first_i + i >= rows || first_j + j >= columns) continue;
    const Vector<ELEMENT, IN> found = *reinterpret_cast<const Vector<ELEMENT, IN>*>(
        from + matrix + static_cast<int64>(first_i + i) * columns + first_j + j);
#pragma unroll
    for (int e = 0; e < IN; e++) tile[(j + e) * kPitch + i] = found.at[e];
  }
  __syncthreads();  // the tile is there
  for (int at = threadIdx.x; at < kTile * kTile / OUT; at += kThreads) {
    const int j = at / (kTile / OUT), i = at % (kTile / OUT) * OUT;
    if (first_i + i >= rows || first_j + j >= columns) continue;
    Vector<ELEMENT, OUT> moved;
#pragma unroll
    for (int e = 0; e < OUT; e++) moved.at[e] = tile[j * kPitch + i + e];
    *reinterpret_cast<Vector<ELEMENT, OUT>*>(to + matrix + static_cast<int64>(first_j + j) * rows + first_i + i) =
        moved;
  }
}
