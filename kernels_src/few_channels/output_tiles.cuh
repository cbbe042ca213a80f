// Tiles of TILE_H x TILE_W outputs that thread blocks go through, and the input tiles that these meet.
//
// Blocks of TILE_K filters are the fastest dimension of the grid. For each, tiles of all images are dealt to
// `tile_step` thread blocks, which go through every `tile_step`-th. An image has `image_tiles`, a row of tiles
// `row_tiles`. Defines: those checked below; SHAPE_FIELDS as TILED_SHAPE of solvers/few_channels/shapes.py declares
// them.
#pragma once

#include "common/divisor.cuh"
#include "few_channels/input_tile.cuh"

#if !defined(SHAPE_FIELDS) || !defined(STRIDE_Y) || !defined(STRIDE_X) || !defined(OFFSET)
#error "define SHAPE_FIELDS, STRIDE_Y, STRIDE_X and OFFSET"
#endif
#if !defined(TILE_H) || !defined(TILE_W) || !defined(TILE_K)
#error "define TILE_H, TILE_W and TILE_K"
#endif

struct Shape {
  SHAPE_FIELDS
};

// A tile: its image, and its first filter, row and column of outputs.
struct OutputTile {
  int image, first_k, row, column;
};

// Goes to the tile of that number, of the same filters.
__device__ __forceinline__ void go_to(OutputTile& tile, const Shape& shape, int number) {
  tile.image = number / shape.image_tiles;
  number -= tile.image * shape.image_tiles.by;
  const int row = number / shape.row_tiles;
  tile.row = row * TILE_H;
  tile.column = (number - row * shape.row_tiles.by) * TILE_W;
}

// The input tile that a tile meets. OFFSET columns are staged before those that the first output meets.
__device__ __forceinline__ InputTileOrigin input_tile_of(const OutputTile& tile, const Shape& shape) {
  return {shape.height, shape.width, tile.image, tile.row * STRIDE_Y - shape.pad_top,
          tile.column * STRIDE_X - shape.pad_left - OFFSET};
}
