// Tiles of a tensor that are transformed: which element lies where in which tile (solvers/common/fourier.py).
//
// Tiles are counted image by image, by rows of tiles. Kernels take what DIVISOR_OF, AXIS_OF and TILES_OF name, as
// solvers/fft/steps.py passes it. Offsets into tensors fit 30 bits.
#pragma once

#include "common/divisor.cuh"

// Element i of tile t lies at i * spread + shift - t * step; positions from `low` to before `high` hold elements.
struct TileAxis {
  int size;    // elements of the tensor
  int stride;  // from one to the next in memory
  int step, shift, low, high;
  Divisor spread;

  // Offset in memory of the element at a position of a tile, -1 where there is none.
  __device__ __forceinline__ int offset(int tile, int position) const {
    const int ahead = position - shift + tile * step;
    if (position < low || position >= high || ahead < 0) return -1;
    const int element = ahead / spread;
    return element < size && element * spread.by == ahead ? element * stride : -1;
  }

  // First element of a tile.
  __device__ __forceinline__ int first(int tile) const {
    return max(0, low - shift + tile * step + spread.by - 1) / spread;
  }

  // Position of an element in a tile.
  __device__ __forceinline__ int position(int tile, int element) const {
    return element * spread.by + shift - tile * step;
  }
};

// Where a tile lies: its image, and its place there.
struct TilePlace {
  int image, row, column;
};

struct TileGrid {
  int first;  // tile of the chunk
  Divisor of_image, across;

  __device__ __forceinline__ TilePlace place(int tile) const {
    const int rank = first + tile;
    const int image = rank / of_image, within = rank - image * of_image.by;
    const int row = within / across;
    return {image, row, within - row * across.by};
  }
};

#define DIVISOR_OF(name) int name, unsigned name##_multiplier, int name##_shift
#define DIVISOR(name) {name, name##_multiplier, name##_shift}
#define AXIS_OF(name)                                                                                  \
  int name##_size, int name##_stride, int name##_step, int name##_at, int name##_low, int name##_high, \
      DIVISOR_OF(name##_spread)
#define AXIS(name) {name##_size, name##_stride, name##_step, name##_at, name##_low, name##_high, DIVISOR(name##_spread)}
#define GRID_OF int first, DIVISOR_OF(per_image), DIVISOR_OF(across)
#define GRID {first, DIVISOR(per_image), DIVISOR(across)}
