// What is checked after a run: the output against float64 sums, unwritten elements, guard bands, changed inputs.
//
// All kernels are grid-stride with any grid and a block that is a multiple of 32, 1024 at most, and add to slots of 64
// bits that the host has cleared. Defines: T (dtype name of the output), GUARDBANDS_FIELDS, COMPARISON_FIELDS.
#define HAS_DEPENDENT  // of verify_late, behind which whatever a run launches first begins
#include "common/pdl.cuh"
#include "common/types.cuh"

#if !defined(T) || !defined(GUARDBANDS_FIELDS) || !defined(COMPARISON_FIELDS)
#error "define T, GUARDBANDS_FIELDS and COMPARISON_FIELDS"
#endif

using Slot = unsigned long long;

__device__ __forceinline__ int64 first_item() {
  return int64(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64 item_step() {
  return int64(gridDim.x) * blockDim.x;
}

__device__ __forceinline__ Slot larger(Slot a, Slot b) {
  return a > b ? a : b;
}

__device__ __forceinline__ int64 nanoseconds() {
  int64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Joins the block's parts in thread 0; every thread must come here.
template <typename Join>
__device__ __forceinline__ Slot joined(Slot part, Join join) {
  __shared__ Slot of_warp[32];
  for (int lane = 16; lane > 0; lane /= 2) part = join(part, __shfl_down_sync(~0u, part, lane));
  __syncthreads();  // an earlier call's parts have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = part;
  __syncthreads();  // all warps' parts are written before the first warp reads them
  if (threadIdx.x >= 32) return 0;
  part = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0;
  for (int lane = 16; lane > 0; lane /= 2) part = join(part, __shfl_down_sync(~0u, part, lane));
  return part;
}

// One atomic a block: some ten thousand to one address would take longer than what they count.
__device__ __forceinline__ void add_to(Slot* slot, Slot part) {
  part = joined(part, [](Slot a, Slot b) { return a + b; });
  if (threadIdx.x == 0 && part != 0) atomicAdd(slot, part);
}

__device__ __forceinline__ void raise_to(Slot* slot, Slot part) {
  part = joined(part, [](Slot a, Slot b) { return larger(a, b); });
  if (threadIdx.x == 0 && part != 0) atomicMax(slot, part);
}

// Order of non-negative floats, infinity last, as order of integers. NaN does not come here.
__device__ __forceinline__ Slot ordered(double value) {
  return __float_as_uint(static_cast<float>(fmin(value, 3.0e38)));
}

// slots[0] += elements that are NaN; slots[1] raised to size - index of the first of them.
extern "C" __global__ void verify_written(const T* __restrict__ out, int64 size, Slot* slots) {
  Slot unwritten = 0, first = 0;
  for (int64 i = first_item(); i < size; i += item_step()) {
    const double value = convert<double>(out[i]);
    if (value == value) continue;
    ++unwritten;
    first = larger(first, static_cast<Slot>(size - i));
  }
  add_to(slots, unwritten);
  raise_to(slots + 1, first);
}

// Of four buffers: their sizes in `bytes`, bands of band_bytes before and after each, and the byte that fills these.
struct GuardBands {
  GUARDBANDS_FIELDS
};

struct Guarded {
  unsigned char* start[4];
  const GuardBands& bands;

  __device__ __forceinline__ int64 size() const { return 8 * bands.band_bytes; }

  // Byte i of all bands together: that of band i / band_bytes, which is 2 * buffer or, behind it, 2 * buffer + 1.
  __device__ __forceinline__ unsigned char* at(int64 i) const {
    const int64 band = i / bands.band_bytes;
    unsigned char* byte = nullptr;
#pragma unroll
    for (int buffer = 0; buffer < 4; ++buffer)
      if (band / 2 == buffer)
        byte = start[buffer] + (band % 2 ? bands.bytes[buffer] : -bands.band_bytes) + i % bands.band_bytes;
    return byte;
  }
};

// All bands filled with `poison`.
extern "C" __global__ void verify_poison(unsigned char* buffer0, unsigned char* buffer1, unsigned char* buffer2,
                                         unsigned char* buffer3, const __grid_constant__ GuardBands bands) {
  const Guarded guarded = {{buffer0, buffer1, buffer2, buffer3}, bands};
  for (int64 i = first_item(); i < guarded.size(); i += item_step()) *guarded.at(i) = bands.poison;
}

// slots[band] += bytes of a band that are not `poison`.
extern "C" __global__ void verify_guards(unsigned char* buffer0, unsigned char* buffer1, unsigned char* buffer2,
                                         unsigned char* buffer3, const __grid_constant__ GuardBands bands,
                                         Slot* slots) {
  const Guarded guarded = {{buffer0, buffer1, buffer2, buffer3}, bands};
  for (int64 i = first_item(); i < guarded.size(); i += item_step())
    if (*guarded.at(i) != bands.poison) atomicAdd(slots + i / bands.band_bytes, 1ull);
}

__device__ __forceinline__ Slot mixed(int64 place, Slot word) {
  Slot z = (static_cast<Slot>(place) << 16 | word) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 29)) * 0xBF58476D1CE4E5B9ull;
  return z ^ (z >> 32);
}

// slots[0] += a sum over (value, place) of all 16-bit words; equal contents give equal sums. Four words are read at a
// time where their address allows it.
extern "C" __global__ void verify_checksum(const unsigned short* __restrict__ words, int64 count, Slot* slots) {
  const int64 fours = reinterpret_cast<Slot>(words) % 8 == 0 ? count / 4 : 0;
  const ushort4* four = reinterpret_cast<const ushort4*>(words);
  Slot sum = 0;
  for (int64 i = first_item(); i < fours; i += item_step()) {
    const ushort4 at = four[i];
    sum += mixed(4 * i, at.x) + mixed(4 * i + 1, at.y) + mixed(4 * i + 2, at.z) + mixed(4 * i + 3, at.w);
  }
  for (int64 i = 4 * fours + first_item(); i < count; i += item_step()) sum += mixed(i, words[i]);
  add_to(slots, sum);
}

// `count` elements of an output whose first two dimensions are images and channels, whatever they are called, with
// `plane` places in each of those; of its type, explicit bits of the mantissa, least normal exponent and what rounds to
// infinity.
struct Comparison {
  COMPARISON_FIELDS
};

// Half the spacing of the output's numbers around `value` >= 0.
__device__ __forceinline__ double half_ulp(double value, const Comparison& of) {
  const int exponent = value > 0 ? ilogb(value) : of.least_exponent;
  return scalbn(1.0, (exponent > of.least_exponent ? exponent : of.least_exponent) - of.mantissa_bits - 1);
}

// Compares listed elements, all where indices is null, with sums[i] = x*w, scales[2*i] = |x|*|w| and
// scales[2*i + 1] = sqrt(x^2 * w^2), each multiplied by what the inputs were multiplied by: first_even or first_odd by
// the parity of the first coordinate, and second_even or second_odd by that of the second, counted anew after
// `second_size`. scales may be null where factor < 0, and |x*w| stands for |x|*|w| then. A sum that is not finite must
// come out as it is, NaN or an infinity of its sign, and one that may round to `overflow` may be infinite.
// factor < 0: the output must equal the rounded reference. Otherwise |error| <= factor * sqrt(x^2 * w^2) + rounding.
// slots: [0] += elements that are wrong, [1] raised to (ratio, position) of the worst of them, as 32 + 32 bits,
// [2] to the largest |error| / (|x|*|w|), [3] to the largest ratio (|error| - rounding) / (factor * sqrt(x^2 * w^2));
// ratios are bits of a float.
extern "C" __global__ void verify_compare(const T* __restrict__ out, const int64* __restrict__ indices,
                                          const double* __restrict__ sums, const float* __restrict__ scales,
                                          const __grid_constant__ Comparison of, Slot* slots) {
  const double infinity = __longlong_as_double(0x7FF0000000000000ll);
  Slot wrong = 0, worst = 0, relative = 0, ratio = 0;
  for (int64 i = first_item(); i < of.count; i += item_step()) {
    const int64 index = indices == nullptr ? i : indices[i];
    const int64 image = index / of.plane / of.channels, channel = index / of.plane - image * of.channels;
    const int64 place = index - (image * of.channels + channel) * of.plane;
    const double got =
        convert<double>(out[image * of.image_stride + channel * of.channel_stride + place * of.place_stride]);
    const double first = image & 1 ? of.first_odd : of.first_even;
    const double second = channel % of.second_size & 1 ? of.second_odd : of.second_even;
    const double sum = sums[i] * first * second;
    if (!(fabs(sum) < infinity)) {
      if (got == sum || (got != got && sum != sum)) continue;
      ++wrong;
      worst = larger(worst, ordered(infinity) << 32 | static_cast<Slot>(i));
      continue;
    }
    const double magnitude = scales == nullptr ? fabs(sum) : scales[2 * i] * first * second;
    const bool exact = of.factor < 0;
    const double wanted = exact ? convert<double>(convert<T>(sum)) : sum;
    const double arithmetic = exact ? 0 : of.factor * scales[2 * i + 1] * first * second;
    const double rounding = exact ? 0 : half_ulp(fabs(sum) + arithmetic, of);
    const bool overflows = fabs(got) == infinity && got * sum > 0 && fabs(sum) + arithmetic >= of.overflow;
    double error = got == wanted || (overflows && !exact) ? 0 : fabs(got - wanted);
    if (!(error == error)) error = infinity;
    const Slot share = ordered(error <= rounding ? 0 : (error - rounding) / arithmetic);
    ratio = larger(ratio, share);
    relative = larger(relative, ordered(error == 0 ? 0 : error / magnitude));
    if (error <= arithmetic + rounding && arithmetic < infinity) continue;  // a scale may have overflowed
    ++wrong;
    worst = larger(worst, share << 32 | static_cast<Slot>(i));
  }
  add_to(slots, wrong);
  raise_to(slots + 1, worst);
  raise_to(slots + 2, relative);
  raise_to(slots + 3, ratio);
}

// Ends once the host has written a number, or after a while: what waits for it begins all at once.
extern "C" __global__ void verify_hold(const volatile int* released, int64 most_ns) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const int64 began = nanoseconds();
  while (*released == 0 && nanoseconds() - began < most_ns) {
  }
}

// Copies buffers, each by its source, target and even number of bytes in a table, a while after it let the next kernel
// begin: one that begins then and does not wait for this one to end reads what the targets held before.
extern "C" __global__ void verify_late(const int64* __restrict__ table, int64 buffers, int64 late_ns) {
  griddepcontrol_launch_dependents();
  const int64 began = nanoseconds();
  while (nanoseconds() - began < late_ns) {
  }
  for (int64 buffer = 0; buffer < buffers; ++buffer) {
    const auto* from = reinterpret_cast<const unsigned short*>(table[3 * buffer]);
    auto* to = reinterpret_cast<unsigned short*>(table[3 * buffer + 1]);
    const int64 words = table[3 * buffer + 2] / 2;
    for (int64 i = first_item(); i < words; i += item_step()) to[i] = from[i];
  }
}
