// Segments of neighbouring elements of a tensor, copied to and from shared memory as they lie, 16 bytes at a time.
//
// Element `first` of the tensor lies at first % kCopyElements of its place in shared memory, so that words of both are
// aligned alike, wherever a segment begins. Beside a segment lie elements of the tensor that share its first and last
// word.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/tile.cuh"

template <typename T>
constexpr int kCopyElements = 16 / sizeof(T);

// Elements of shared memory that hold a segment of `count`, wherever it begins.
template <typename T>
constexpr int padded_size(int count) {
  return round_up(count + kCopyElements<T> - 1, kCopyElements<T>);
}

struct Segment {
  int first, count;
};

// Iterations that kThreads threads take for `count` things, and how many of them are unrolled.
template <int kThreads>
constexpr int iterations(int count) {
  return ceil_div(count, kThreads);
}
template <int kThreads>
constexpr int unrolled(int count) {
  return iterations<kThreads>(count) <= 6 ? iterations<kThreads>(count) : 4;
}

__device__ __forceinline__ void unpack(float16, unsigned pair, float& low, float& high) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  low = both.x;
  high = both.y;
}
__device__ __forceinline__ void unpack(bfloat16, unsigned pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ unsigned pack(float16, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&both);
}
__device__ __forceinline__ unsigned pack(bfloat16, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&both);
}

// kCount elements as floats; their address is a multiple of their size.
template <int kCount, typename T>
__device__ __forceinline__ void read_elements(float* to, const T* from) {
  if constexpr (kCount == 1) {
    to[0] = convert<float>(*from);
  } else if constexpr (sizeof(T) == 4) {
    const Vector<float, kCount> values = *reinterpret_cast<const Vector<float, kCount>*>(from);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = values.at[i];
  } else {
    const Vector<unsigned, kCount / 2> pairs = *reinterpret_cast<const Vector<unsigned, kCount / 2>*>(from);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) unpack(T{}, pairs.at[i], to[2 * i], to[2 * i + 1]);
  }
}

// Two of four neighbouring 16-bit elements: the middle ones where `is_odd`, else the first.
__device__ __forceinline__ unsigned middle_or_first(unsigned first, unsigned second, bool is_odd) {
  return __funnelshift_r(first, second, is_odd ? 16 : 0);
}

// kCount 16-bit elements as floats, whether their address is a multiple of 4 bytes or not, by words of 4 bytes.
template <int kCount, typename T>
__device__ __forceinline__ void read_anywhere(float* to, const T* from) {
  const bool is_odd = reinterpret_cast<unsigned long long>(from) % 4 != 0;
  const unsigned* const words = reinterpret_cast<const unsigned*>(from - (is_odd ? 1 : 0));
  constexpr int kPairs = (kCount + 1) / 2;
  unsigned word = words[0];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    unsigned next = 0;
    if (i + 1 < kPairs || (kCount % 2 == 0 && is_odd)) next = words[i + 1];
    float high;
    unpack(T{}, middle_or_first(word, next, is_odd), to[2 * i],
           i + 1 < kPairs || kCount % 2 == 0 ? to[2 * i + 1] : high);
    word = next;
  }
}

template <bool kIsGlobal, typename Word>
__device__ __forceinline__ void put(void* to, const Word& word) {
  if constexpr (kIsGlobal)
    __stwb(reinterpret_cast<Word*>(to), word);  // a plain store would be split into words of 4 bytes
  else
    *reinterpret_cast<Word*>(to) = word;
}

// Rounds kCount floats to elements in device or in shared memory; their address is a multiple of their size.
template <int kCount, bool kIsGlobal, typename T>
__device__ __forceinline__ void write_elements(T* to, const float* from) {
  if constexpr (kCount == 1) {
    *to = convert<T>(from[0]);
  } else if constexpr (sizeof(T) == 4) {
    if constexpr (kCount == 2) put<kIsGlobal>(to, make_float2(from[0], from[1]));
    if constexpr (kCount == 4) put<kIsGlobal>(to, make_float4(from[0], from[1], from[2], from[3]));
  } else {
    unsigned pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) pairs[i] = pack(T{}, from[2 * i], from[2 * i + 1]);
    if constexpr (kCount == 2) put<kIsGlobal>(to, pairs[0]);
    if constexpr (kCount == 4) put<kIsGlobal>(to, make_uint2(pairs[0], pairs[1]));
    if constexpr (kCount == 8) put<kIsGlobal>(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

// Rounds an odd number of floats to 16-bit elements in shared memory, wherever they begin, by words of 4 bytes.
template <int kCount, typename T>
__device__ __forceinline__ void write_anywhere(T* to, const float* from) {
  static_assert(kCount % 2 == 1, "one element is written alone, the first or the last");
  const bool is_odd = reinterpret_cast<unsigned long long>(to) % 4 != 0;
  unsigned* const words = reinterpret_cast<unsigned*>(to + (is_odd ? 1 : 0));
  const unsigned first = pack(T{}, from[0], kCount > 1 ? from[1] : 0.0f);
  unsigned pair = first;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const unsigned next = pack(T{}, from[2 * i + 2], 2 * i + 3 < kCount ? from[2 * i + 3] : 0.0f);
    words[i] = middle_or_first(pair, next, is_odd);
    pair = next;
  }
  *reinterpret_cast<unsigned short*>(is_odd ? to : to + kCount - 1) =
      static_cast<unsigned short>(is_odd ? first : pair);
}

// Starts to copy kSlots segments of at most kMost elements of a tensor of `size`; segment_of(slot) tells which. Slots
// are kPitch elements apart. All kThreads threads take part; complete after wait_for_copies<0>() and a barrier.
template <int kThreads, int kSlots, int kMost, int kPitch, typename T, typename SegmentOf>
__device__ __forceinline__ void load_segments(T* to, const T* tensor, int size, SegmentOf segment_of) {
  constexpr int kWords = padded_size<T>(kMost) / kCopyElements<T>;
  static_assert(kPitch % kCopyElements<T> == 0 && (kSlots == 1 || kPitch >= padded_size<T>(kMost)),
                "kPitch must be a multiple of 16 bytes");
#pragma unroll(unrolled<kThreads>(kSlots * kWords))
  for (int iteration = 0; iteration < iterations<kThreads>(kSlots * kWords); ++iteration) {
    const int i = iteration * kThreads + threadIdx.x, slot = i / kWords, at = i % kWords * kCopyElements<T>;
    const Segment segment = segment_of(slot);
    const int skipped = segment.first % kCopyElements<T>, from = segment.first - skipped + at;
    if (slot >= kSlots || at >= skipped + segment.count || from + kCopyElements<T> > size) continue;
    copy_bytes<16>(static_cast<unsigned>(__cvta_generic_to_shared(to + slot * kPitch + at)), tensor + from, true);
  }
  if (size % kCopyElements<T> == 0) return;
  // The tensor ends within a word.
#pragma unroll 1
  for (int i = threadIdx.x; i < kSlots * kCopyElements<T>; i += kThreads) {
    const int slot = i / kCopyElements<T>, element = size - size % kCopyElements<T> + i % kCopyElements<T>;
    const Segment segment = segment_of(slot);
    const int at = element - (segment.first - segment.first % kCopyElements<T>);
    if (element < size && element >= segment.first && element < segment.first + segment.count)
      to[slot * kPitch + at] = tensor[element];
  }
}

// Writes a segment of at most kMost elements; all kThreads threads take part.
template <int kThreads, int kMost, typename T>
__device__ __forceinline__ void store_segment(T* tensor, const T* from, const Segment& segment) {
  const int skipped = segment.first % kCopyElements<T>, end = skipped + segment.count;
  T* const to = tensor + (segment.first - skipped);
  const int first_word = ceil_div(skipped, kCopyElements<T>), words = end / kCopyElements<T>;
  constexpr int kWords = padded_size<T>(kMost) / kCopyElements<T>;
#pragma unroll(unrolled<kThreads>(kWords))
  for (int iteration = 0; iteration < iterations<kThreads>(kWords); ++iteration) {
    const int i = iteration * kThreads + threadIdx.x;
    if (i >= first_word && i < words) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  if (skipped == 0 && end % kCopyElements<T> == 0) return;
  // The first and the last word belong to neighbours, too.
  if (threadIdx.x >= 2 * kCopyElements<T>) return;
  const int at = threadIdx.x < kCopyElements<T>
                     ? threadIdx.x
                     : end / kCopyElements<T> * kCopyElements<T> + threadIdx.x - kCopyElements<T>;
  if (at >= skipped && at < end && (at < first_word * kCopyElements<T> || at >= words * kCopyElements<T>))
    to[at] = from[at];
}
