// Tiles of a tensor that are transformed: which element lies where in which tile (solvers/common/fourier.py).
//
// Tiles are counted image by image, by rows of tiles. Offsets into tensors fit 30 bits.
// Defines, as solvers/fft/steps.py declares them: TILEAXIS_FIELDS, TILEGRID_FIELDS, TILEDTENSOR_FIELDS.
#pragma once

#include "common/divisor.cuh"

#if !defined(TILEAXIS_FIELDS) || !defined(TILEGRID_FIELDS) || !defined(TILEDTENSOR_FIELDS)
#error "define TILEAXIS_FIELDS, TILEGRID_FIELDS and TILEDTENSOR_FIELDS"
#endif

// An axis of `size` elements, `stride` apart in memory. Element i of tile t lies at i * spread + shift - t * step;
// positions from `low` to before `high` hold elements.
struct TileAxis {
  TILEAXIS_FIELDS

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

// A chunk's tiles, which begin with `first`.
struct TileGrid {
  TILEGRID_FIELDS

  __device__ __forceinline__ TilePlace place(int tile) const {
    const int rank = first + tile;
    const int image = rank / tiles_per_image, within = rank - image * tiles_per_image.by;
    const int row = within / tiles_across;
    return {image, row, within - row * tiles_across.by};
  }
};

// A tensor, and how tiles cut its planes.
struct TiledTensor {
  TILEDTENSOR_FIELDS
};
