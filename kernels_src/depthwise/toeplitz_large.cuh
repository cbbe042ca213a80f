// Sizes of a depthwise convolution with a large filter, of stride 1, and the images that a block reads and writes.
#pragma once

#include "depthwise/staged_images.cuh"

#if !defined(SHAPE_FIELDS)
#error "define SHAPE_FIELDS"
#endif

// in_* are of the tensor that the filter slides over, out_* of the other one. A block stages the columns of `in` from
// its first output column + first_column on.
struct Shape {
  SHAPE_FIELDS
};

__device__ __forceinline__ Images input_images(const Shape& shape, int image, int channel, int row, int out_column) {
  return {shape.batch,
          shape.channels,
          shape.in_height,
          shape.in_width,
          image,
          channel,
          row,
          out_column + shape.first_column};
}

__device__ __forceinline__ Images output_images(const Shape& shape, int image, int channel, int row, int column) {
  return {shape.batch, shape.channels, shape.out_height, shape.out_width, image, channel, row, column};
}
