// Transforms 3x3 filters for F(2x2, 3x3), G g G^T, and lays them out as fragments for kernels_src/winograd/fused.cu.
//
// filters[group][8 channels][8 filters][row of places][pair of places][lane][4], zeros beyond the last channel and
// filter of a group: of lane 4 * g + t the places' factors of filter g and channels 2t and 2t + 1. A warp writes 8 x 8.
// Offsets fit 31 bits. Defines: FLIPPED (taps in reverse order, for backward data), SHAPE_FIELDS.
// Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.1.
#include "common/divisor.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

#if !defined(FLIPPED) || !defined(SHAPE_FIELDS)
#error "define FLIPPED and SHAPE_FIELDS"
#endif

constexpr int kUnit = 1024;  // floats of 8 channels of 8 filters

// Channels and strides of a group's filters, in blocks of 8; blocks: 8 x 8 of all groups.
struct Shape {
  SHAPE_FIELDS
};

constexpr int kThreads = 128;

// A thread transforms two channels of a filter, a warp a block.
extern "C" __global__ void __launch_bounds__(kThreads)
    winograd_fused_filters(const float* __restrict__ w, float* __restrict__ filters,
                           const __grid_constant__ Shape shape) {
  griddepcontrol_launch_dependents();
  const int number = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (number >= shape.blocks) return;
  const int line = number / shape.out_channel_blocks, group = line / shape.channel_blocks;
  const int output = (number - line * shape.out_channel_blocks.by) * 8 + lane / 4;
  const int channel = (line - group * shape.channel_blocks.by) * 8 + lane % 4 * 2;
  float places[4][4][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool exists = output < shape.out_channels && channel + i < shape.channels;
    const float* from =
        w + group * shape.group_stride + output * shape.out_channel_stride + (channel + i) * shape.channel_stride;
    float half[4][3];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      float taps[3];
#pragma unroll
      for (int r = 0; r < 3; ++r)
        taps[r] = exists ? from[(FLIPPED ? 8 - 3 * r - j : 3 * r + j) * shape.tap_stride] : 0.0f;
      const float sum = 0.5f * (taps[0] + taps[2]), middle = 0.5f * taps[1];
      half[0][j] = taps[0], half[1][j] = sum + middle, half[2][j] = sum - middle, half[3][j] = taps[2];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float sum = 0.5f * (half[r][0] + half[r][2]), middle = 0.5f * half[r][1];
      places[r][0][i] = half[r][0], places[r][1][i] = sum + middle;
      places[r][2][i] = sum - middle, places[r][3][i] = half[r][2];
    }
  }
  float* const to = filters + number * kUnit + lane * 4;
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      *reinterpret_cast<Vector<float, 4>*>(to + (2 * r + pair) * 128) = {
          places[r][2 * pair][0], places[r][2 * pair][1], places[r][2 * pair + 1][0], places[r][2 * pair + 1][1]};
}
