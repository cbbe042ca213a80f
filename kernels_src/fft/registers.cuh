// Fourier transforms of a thread's own numbers, in registers: lengths of the factors 2, 3, 5 and 7, known at compile
// time.
//
// Everything is unrolled, so that twiddle factors are immediates and reorderings cost nothing. Not scaled.
// Source: Cooley and Tukey, An Algorithm for the Machine Calculation of Complex Fourier Series, 1965 (mixed radices).
#pragma once

constexpr double kTurn = 6.283185307179586476925286766559;

// sin by its series; |x| at most pi / 2.
constexpr double sine(double x) {
  double term = x, sum = x;
  for (int i = 1; i < 14; ++i) {
    term *= -x * x / ((2 * i) * (2 * i + 1));
    sum += term;
  }
  return sum;
}

// cos(2 pi k / n), by the eighth of a turn that it mirrors.
constexpr double cosine_of(int k, int n) {
  k %= n;
  if (2 * k > n) k = n - k;
  if (4 * k > n) return -cosine_of(n - 2 * k, 2 * n);
  return sine(kTurn * (n - 4 * k) / (4.0 * n));
}

// cos and sin of 2 pi k / n for k < n.
template <int kCount>
struct Roots {
  float cosine[kCount], sine[kCount];

  constexpr Roots() : cosine(), sine() {
    for (int k = 0; k < kCount; ++k) {
      cosine[k] = static_cast<float>(cosine_of(k, kCount));
      sine[k] = static_cast<float>(cosine_of(4 * k + 3 * kCount, 4 * kCount));
    }
  }
};

// value * exp(-2 pi i k / n), or its conjugate for the way back.
template <int kCount, bool kBack>
__device__ __forceinline__ float2 rotated(float2 value, int k) {
  constexpr Roots<kCount> roots;
  const float c = roots.cosine[k % kCount], s = kBack ? -roots.sine[k % kCount] : roots.sine[k % kCount];
  return make_float2(value.x * c + value.y * s, value.y * c - value.x * s);
}

__device__ __forceinline__ float2 plus(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 minus(float2 a, float2 b) {
  return make_float2(a.x - b.x, a.y - b.y);
}

constexpr int radix_of(int length) {
  return length % 4 == 0 ? 4 : length % 2 == 0 ? 2 : length % 3 == 0 ? 3 : length % 5 == 0 ? 5 : 7;
}

// v becomes its transform: v[k] = sum_j v[j] exp(-2 pi i j k / kLength), or + for the way back.
template <int kLength, bool kBack>
__device__ __forceinline__ void transform(float2 (&v)[kLength]) {
  constexpr int kRadix = kLength == 1 ? 1 : radix_of(kLength);
  static_assert(kLength % kRadix == 0, "lengths have the factors 2, 3, 5 and 7");
  if constexpr (kLength == 1) {
    return;
  } else if constexpr (kLength == 2) {
    const float2 sum = plus(v[0], v[1]);
    v[1] = minus(v[0], v[1]);
    v[0] = sum;
  } else if constexpr (kLength == 4) {
    const float2 even = plus(v[0], v[2]), odd = plus(v[1], v[3]);
    const float2 apart = minus(v[0], v[2]), side = minus(v[1], v[3]);
    const float2 quarter = kBack ? make_float2(-side.y, side.x) : make_float2(side.y, -side.x);
    v[0] = plus(even, odd);
    v[1] = plus(apart, quarter);
    v[2] = minus(even, odd);
    v[3] = minus(apart, quarter);
  } else if constexpr (kLength == kRadix) {
    // An odd prime: pairs j and kLength - j share their factors.
    constexpr Roots<kLength> roots;
    constexpr int kPairs = kLength / 2;
    float2 sums[kPairs], differences[kPairs], out[kLength];
    out[0] = v[0];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      sums[j] = plus(v[j + 1], v[kLength - 1 - j]);
      differences[j] = minus(v[j + 1], v[kLength - 1 - j]);
      out[0] = plus(out[0], sums[j]);
    }
#pragma unroll
    for (int k = 1; k <= kPairs; ++k) {
      float2 even = v[0], odd = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float c = roots.cosine[(j + 1) * k % kLength];
        const float s = kBack ? -roots.sine[(j + 1) * k % kLength] : roots.sine[(j + 1) * k % kLength];
        even.x += c * sums[j].x;
        even.y += c * sums[j].y;
        odd.x += s * differences[j].y;
        odd.y -= s * differences[j].x;
      }
      out[k] = plus(even, odd);
      out[kLength - k] = minus(even, odd);
    }
#pragma unroll
    for (int k = 0; k < kLength; ++k) v[k] = out[k];
  } else {
    constexpr int kParts = kLength / kRadix;
    float2 parts[kRadix][kParts];
#pragma unroll
    for (int r = 0; r < kRadix; ++r) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) parts[r][i] = v[i * kRadix + r];
      transform<kParts, kBack>(parts[r]);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float2 across[kRadix];
#pragma unroll
      for (int r = 0; r < kRadix; ++r)
        across[r] = r * i == 0 ? parts[r][i] : rotated<kLength, kBack>(parts[r][i], r * i);
      transform<kRadix, kBack>(across);
#pragma unroll
      for (int r = 0; r < kRadix; ++r) v[r * kParts + i] = across[r];
    }
  }
}

// The transform of 2 * kHalf real numbers, of which v[j] holds two, from v's transform: kHalf + 1 frequencies.
template <int kHalf>
__device__ __forceinline__ void split_real(const float2 (&v)[kHalf], float2 (&out)[kHalf + 1]) {
#pragma unroll
  for (int k = 0; k <= kHalf; ++k) {
    const float2 a = v[k % kHalf], b = v[(kHalf - k) % kHalf];
    const float2 even = make_float2(0.5f * (a.x + b.x), 0.5f * (a.y - b.y));
    const float2 odd = make_float2(0.5f * (a.y + b.y), 0.5f * (b.x - a.x));
    out[k] = plus(even, rotated<2 * kHalf, false>(odd, k));
  }
}

// What `transform` turns back to pairs of real numbers, from their kHalf + 1 frequencies; twice as large.
template <int kHalf>
__device__ __forceinline__ void merge_real(const float2 (&in)[kHalf + 1], float2 (&v)[kHalf]) {
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const float2 a = in[k], b = in[kHalf - k];
    const float2 even = make_float2(a.x + b.x, a.y - b.y);
    const float2 odd = rotated<2 * kHalf, true>(make_float2(a.x - b.x, a.y + b.y), k);
    v[k] = make_float2(even.x - odd.y, even.y + odd.x);
  }
}
