// Fourier transforms of long lines in shared memory, by all threads of a block: passes of radix 8 and 16 in place.
//
// Lines of kPoints complex numbers, a power of two, have a gap after every 16, so that strides of 8 and 16 meet every
// bank. Forward (decimation in frequency) leaves frequencies in the order of their reversed digits; backward takes them
// in that order and undoes the passes in reverse. Not scaled.
// Source: Gentleman and Sande, Fast Fourier Transforms: for Fun and Profit, 1966.
#pragma once

#include "fft/registers.cuh"

// Where a point of a line lies.
__device__ __forceinline__ constexpr int slot_of(int point) {
  return point + point / 16;
}
// From a line to the next: 4 floats modulo 32 times an odd number, so that four points of eight lines meet every bank.
constexpr int line_pitch(int points) {
  return points + points / 16 + 2;
}

// The radix of the pass over blocks of a size: as many of 8 as leave passes of 16.
constexpr int radix_at(int size) {
  int bits = 0;
  for (int rest = size; rest > 1; rest /= 2) ++bits;
  return bits % 4 == 0 ? 16 : 8;
}

// v[k] times exp(-2 pi i * at * k / kSize), or its conjugate; powers by products of few factors.
template <int kSize, int kRadix, bool kBack>
__device__ __forceinline__ void twiddle(float2 (&v)[kRadix], int at) {
  float2 powers[kRadix];
  sincospif(2.0f * at / kSize, &powers[1].y, &powers[1].x);
  if (!kBack) powers[1].y = -powers[1].y;
#pragma unroll
  for (int k = 2; k < kRadix; ++k) {
    const float2 a = powers[k / 2], b = powers[k - k / 2];
    powers[k] = make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
  }
#pragma unroll
  for (int k = 1; k < kRadix; ++k)
    v[k] = make_float2(v[k].x * powers[k].x - v[k].y * powers[k].y, v[k].x * powers[k].y + v[k].y * powers[k].x);
}

// The points of a block of kSize that a thread transforms at once: `first` and each kApart after it, of one line.
struct Butterfly {
  int line, first;
  int slot;  // of the first, among all lines
};

template <int kSize, int kPoints, int kLines, bool kLinesFirst>
__device__ __forceinline__ Butterfly butterfly_of(int i) {
  constexpr int kApart = kSize / radix_at(kSize), kCount = kPoints / radix_at(kSize);
  static_assert(kApart == 1 || kApart % 8 == 0, "from a butterfly's first slot to the others is known");
  const int line = kLinesFirst ? i % kLines : i / kCount, within = kLinesFirst ? i / kLines : i % kCount;
  const int first = within / kApart * kSize + within % kApart;
  return {line, first, line * line_pitch(kPoints) + slot_of(first)};
}

// One pass over blocks of kSize points: values[r] = load(butterfly, r), and store(butterfly, r, values[r]). Threads
// take neighbouring points, or with kLinesFirst neighbouring lines.
template <int kSize, int kPoints, int kLines, int kThreads, bool kBack, bool kLinesFirst, class Load, class Store>
__device__ __forceinline__ void pass(const Load& load, const Store& store) {
  constexpr int kRadix = radix_at(kSize), kApart = kSize / kRadix;
  static_assert(kRadix * kApart == kSize, "the length must be made of whole passes");
  for (int i = threadIdx.x; i < kLines * (kPoints / kRadix); i += kThreads) {
    const Butterfly butterfly = butterfly_of<kSize, kPoints, kLines, kLinesFirst>(i);
    float2 values[kRadix];
#pragma unroll
    for (int r = 0; r < kRadix; ++r) values[r] = load(butterfly, r);
    if constexpr (kBack && kApart > 1) twiddle<kSize, kRadix, kBack>(values, butterfly.first % kApart);
    transform<kRadix, kBack>(values);
    if constexpr (!kBack && kApart > 1) twiddle<kSize, kRadix, kBack>(values, butterfly.first % kApart);
#pragma unroll
    for (int r = 0; r < kRadix; ++r) store(butterfly, r, values[r]);
  }
}

// A butterfly's numbers in shared memory.
template <int kSize>
struct InLines {
  float2* lines;

  __device__ __forceinline__ float2& at(const Butterfly& butterfly, int r) const {
    return lines[butterfly.slot + slot_of(r * (kSize / radix_at(kSize)))];
  }
  __device__ __forceinline__ float2 operator()(const Butterfly& butterfly, int r) const { return at(butterfly, r); }
  __device__ __forceinline__ void operator()(const Butterfly& butterfly, int r, float2 value) const {
    at(butterfly, r) = value;
  }
};

// One pass in place.
template <int kSize, int kPoints, int kLines, int kThreads, bool kBack>
__device__ __forceinline__ void pass_in_place(float2* lines) {
  const InLines<kSize> numbers{lines};
  pass<kSize, kPoints, kLines, kThreads, kBack, false>(numbers, numbers);
  __syncthreads();  // the next pass takes what other threads wrote
}

// All passes over blocks of kSize points, in place.
template <int kSize, int kPoints, int kLines, int kThreads, bool kBack>
__device__ __forceinline__ void passes(float2* lines) {
  if constexpr (kSize > 1) {
    constexpr int kApart = kSize / radix_at(kSize);
    if constexpr (kBack) passes<kApart, kPoints, kLines, kThreads, kBack>(lines);
    pass_in_place<kSize, kPoints, kLines, kThreads, kBack>(lines);
    if constexpr (!kBack) passes<kApart, kPoints, kLines, kThreads, kBack>(lines);
  }
}
