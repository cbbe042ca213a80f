// Second outputs of a convolution against float64 sums of a tensor over images and space, for each channel: of its
// elements, or of their squares. miofind/verify/channel_sums.py says what is right, and computes the same on the host.
//
// A block takes a channel after the other. Defines: T (dtype name of the tensor), RESULT (of the sums),
// CHANNELSUMS_FIELDS.
#include "common/types.cuh"

#if !defined(T) || !defined(RESULT) || !defined(CHANNELSUMS_FIELDS)
#error "define T, RESULT and CHANNELSUMS_FIELDS"
#endif

using Slot = unsigned long long;
constexpr int kThreads = 256;

struct ChannelSums {
  CHANNELSUMS_FIELDS
};

// A channel's sum, the sum of its magnitudes, and the exponent of the last binary one of all its numbers.
struct Found {
  double sum, magnitude;
  int quantum;
};

__device__ __forceinline__ Found joined(const Found& a, const Found& b) {
  return {a.sum + b.sum, a.magnitude + b.magnitude, a.quantum < b.quantum ? a.quantum : b.quantum};
}

__device__ __forceinline__ int quantum_of(double value) {
  const Slot bits = __double_as_longlong(value), mantissa = bits & 0xFFFFFFFFFFFFFull;
  const int exponent = static_cast<int>(bits >> 52) & 0x7FF;
  const Slot whole = exponent == 0 ? mantissa : mantissa | 1ull << 52;
  return (exponent == 0 ? 1 : exponent) - 1075 + __ffsll(whole) - 1;
}

__device__ __forceinline__ Found sum_of_channel(const T* from, const ChannelSums& of) {
  Found found = {0, 0, 0x7FFF};
  for (int64 i = threadIdx.x; i < of.images * of.plane; i += kThreads) {
    const int64 image = i / of.plane;
    const double element = convert<double>(from[image * of.image_stride + (i - image * of.plane) * of.place_stride]);
    const double value = of.squares ? element * element : element;
    if (value != 0) found = joined(found, {value, fabs(value), quantum_of(value)});
  }
  __shared__ Found parts[kThreads];
  __syncthreads();  // the last channel's parts have been read
  parts[threadIdx.x] = found;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();  // all parts of the last step are written
    if (threadIdx.x < half) parts[threadIdx.x] = joined(parts[threadIdx.x], parts[threadIdx.x + half]);
  }
  return parts[0];  // of use in thread 0
}

__device__ __forceinline__ double half_ulp(double value, const ChannelSums& of) {
  const int exponent = value > 0 ? ilogb(value) : of.least_exponent;
  return scalbn(1.0, (exponent > of.least_exponent ? exponent : of.least_exponent) - of.mantissa_bits - 1);
}

// details[3 * channel] = what was written, what is wanted, how far it may be from that. slots[0] += channels that are
// wrong, slots[1] raised to (error over what is allowed, channel) of the worst of them, as 32 + 32 bits.
extern "C" __global__ void __launch_bounds__(kThreads)
    verify_channel_sums(const T* __restrict__ from, const RESULT* __restrict__ results, double* __restrict__ details,
                        const __grid_constant__ ChannelSums of, Slot* slots) {
  const double infinity = __longlong_as_double(0x7FF0000000000000ll);
  for (int64 channel = blockIdx.x; channel < of.channels; channel += gridDim.x) {
    const Found found = sum_of_channel(from + channel * of.channel_stride, of);
    if (threadIdx.x != 0) continue;
    const double got = convert<double>(results[channel]), sum = found.sum;
    double wanted = sum, bound = 0, share = infinity;
    bool wrong;
    if (!(fabs(sum) < infinity)) {
      wrong = !(got == sum || (got != got && sum != sum));
    } else {
      const bool exact = found.quantum >= of.least_quantum && found.magnitude <= scalbn(1.0, found.quantum + of.digits);
      const double arithmetic = exact || found.magnitude == 0 ? 0 : of.roundings * found.magnitude + of.tiny;
      const bool overflows = fabs(got) == infinity && got * sum > 0 && fabs(sum) + arithmetic >= of.overflow;
      wanted = arithmetic == 0 ? convert<double>(convert<RESULT>(sum)) : sum;
      bound = arithmetic == 0 ? 0 : arithmetic + half_ulp(fabs(sum) + arithmetic, of);
      const double error = fabs(got - wanted);
      wrong = !(error <= bound) && !overflows &&
              !(found.magnitude + arithmetic >= of.sum_overflow && !(fabs(got) < infinity));
      if (error / bound < infinity) share = error / bound;
    }
    details[3 * channel] = got;
    details[3 * channel + 1] = wanted;
    details[3 * channel + 2] = bound;
    if (!wrong) continue;
    atomicAdd(slots, 1ull);
    const unsigned order = __float_as_uint(static_cast<float>(fmin(share, 3.0e38)));
    atomicMax(slots + 1, static_cast<Slot>(order) << 32 | static_cast<Slot>(channel));
  }
}
