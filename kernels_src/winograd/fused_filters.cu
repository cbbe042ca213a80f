// Transforms 3x3 filters for F(2x2, 3x3), G g G^T, and lays them out as fragments for kernels_src/winograd/fused.cu.
//
// filters[group][8 channels][8 filters][row of places][pair of places][lane][4], zeros beyond the last channel and
// filter of a group: of lane 4 * g + t the places' factors of filter g and channels 2t and 2t + 1. A warp writes 8 x 8.
// Offsets fit 31 bits. Defines: FLIPPED (taps in reverse order, for backward data).
// Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.1.
#include "common/divisor.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

#if !defined(FLIPPED)
#error "define FLIPPED"
#endif

constexpr int kUnit = 1024;  // floats of 8 channels of 8 filters

#define DIVISOR_OF(name) int name, unsigned name##_multiplier, int name##_shift
#define DIVISOR(name) {name, name##_multiplier, name##_shift}

constexpr int kThreads = 128;

// A thread transforms two channels of a filter. `outputs` and `channels` are a group's; a warp has 8 of each.
extern "C" __global__ void __launch_bounds__(kThreads)
    winograd_fused_filters(const float* __restrict__ w, float* __restrict__ filters, int outputs, int channels,
                           int group_stride, int output_stride, int channel_stride, int tap_stride, DIVISOR_OF(units),
                           DIVISOR_OF(steps), int total) {
  griddepcontrol_launch_dependents();
  const Divisor by_units = DIVISOR(units), by_steps = DIVISOR(steps);
  const int number = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (number >= total) return;
  const int line = number / by_units, group = line / by_steps;
  const int output = (number - line * units) * 8 + lane / 4, channel = (line - group * steps) * 8 + lane % 4 * 2;
  float places[4][4][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool exists = output < outputs && channel + i < channels;
    const float* from = w + group * group_stride + output * output_stride + (channel + i) * channel_stride;
    float half[4][3];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      float taps[3];
#pragma unroll
      for (int r = 0; r < 3; ++r) taps[r] = exists ? from[(FLIPPED ? 8 - 3 * r - j : 3 * r + j) * tap_stride] : 0.0f;
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
