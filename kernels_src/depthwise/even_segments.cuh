// Segments of a tensor that lie equally far apart, as a channel does from image to image, copied to and from
// shared memory as depthwise/segments.cuh says. A thread has the same words of every so many segments, so that a word
// takes few instructions: warps are few beside what they copy.
#pragma once

#include "depthwise/copy_if.cuh"
#include "depthwise/segments.cuh"

// The first segment begins at element `first`, each next one `distance` elements later; `slots` of them exist, of
// `count` elements each. They begin alike (kAlike, below) if `distance` is a multiple of 16 bytes: then a tensor of
// them ends with a whole word, too.
struct EvenSegments {
  unsigned first, distance, slots, count;
};

// How kThreads threads share the words of kSlots segments: kTogether segments at once, of each of which a thread takes
// kEach words, kAcross apart.
template <int kThreads, int kSlots, int kWords>
struct CopyLayout {
  static constexpr int across(int each) { return ceil_div(kWords, each); }
  static constexpr int iterations_of(int each) {
    return each * ceil_div(kSlots, least_of(kSlots, maximum(1, kThreads / across(each))));
  }
  static constexpr int least_of(int a, int b) { return a < b ? a : b; }
  // Of the least numbers of words that leave threads enough, the one with the fewest iterations, unless by a
  // tenth only.
  static constexpr int best_each() {
    const int least = ceil_div(kWords, kThreads);
    int best = least;
    for (int each = least + 1; each < least + 4 && each <= kWords; ++each)
      if (10 * iterations_of(each) < 9 * iterations_of(best)) best = each;
    return best;
  }
  static constexpr int kEach = best_each(), kAcross = across(kEach);
  static constexpr int kTogether = least_of(kSlots, maximum(1, kThreads / kAcross));
  static constexpr int kIterations = ceil_div(kSlots, kTogether);
  static constexpr int kUnrolledWords = kEach <= 6 ? kEach : 4;
  static constexpr int kUnrolledIterations = kIterations * kEach <= 8 ? kIterations : maximum(1, 4 / kEach);
};

// Calls visit(slot, word) for every word of kSlots segments of kWords, and for some that do not exist, which it tests.
template <int kThreads, int kSlots, int kWords, typename Visit>
__device__ __forceinline__ void for_each_word(Visit visit) {
  using Layout = CopyLayout<kThreads, kSlots, kWords>;
  const unsigned own = threadIdx.x / Layout::kAcross, first_word = threadIdx.x % Layout::kAcross;
  if (Layout::kTogether * Layout::kAcross < kThreads && own >= Layout::kTogether) return;
#pragma unroll(Layout::kUnrolledIterations)
  for (int iteration = 0; iteration < Layout::kIterations; ++iteration) {
    const unsigned slot = own + iteration * Layout::kTogether;
#pragma unroll(Layout::kUnrolledWords)
    for (int k = 0; k < Layout::kEach; ++k) {
      const unsigned word = first_word + k * Layout::kAcross;
      visit(slot, word);
    }
  }
}

// Starts to copy up to kSlots segments of at most kMost elements of a tensor of `size`. Slots are kPitch elements
// apart. All kThreads threads take part; complete after wait_for_copies<0>() and a barrier.
template <int kThreads, int kSlots, int kMost, int kPitch, bool kAlike, typename T>
__device__ __forceinline__ void load_even_segments(T* to, const T* tensor, unsigned size,
                                                   const EvenSegments& segments) {
  constexpr unsigned kElements = kCopyElements<T>;
  static_assert(kPitch % kCopyElements<T> == 0 && kPitch >= padded_size<T>(kMost),
                "kPitch must be a multiple of 16 bytes");
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to)), whole = size - size % kElements;
  const unsigned slots = segments.slots < kSlots ? segments.slots : kSlots;
  for_each_word<kThreads, kSlots, padded_size<T>(kMost) / kCopyElements<T>>([&](unsigned slot, unsigned word) {
    const unsigned first = segments.first + slot * segments.distance, at = word * kElements;
    const unsigned skipped = (kAlike ? segments.first : first) % kElements;
    const unsigned from = first - skipped + at;
    copy_if(slot < slots && at < skipped + segments.count && (kAlike || from < whole),
            shared + (slot * kPitch + at) * static_cast<unsigned>(sizeof(T)), tensor + from);
  });
  if (kAlike || whole == size) return;
  // The tensor ends within a word.
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < kSlots * kElements; i += kThreads) {
    const unsigned slot = i / kElements, element = whole + i % kElements,
                   first = segments.first + slot * segments.distance;
    if (slot < slots && element < size && element >= first && element < first + segments.count)
      to[slot * kPitch + element - (first - first % kElements)] = tensor[element];
  }
}

// Writes up to kSlots segments of at most kMost elements, 16 bytes at a time. kPartial says whether some begin or end
// within a word, which then belongs to a neighbour, too. All kThreads threads take part.
template <int kThreads, int kSlots, int kMost, int kPitch, bool kAlike, bool kPartial, typename T>
__device__ __forceinline__ void store_even_segments(T* tensor, const T* staged, const EvenSegments& segments) {
  constexpr unsigned kElements = kCopyElements<T>;
  const unsigned slots = segments.slots < kSlots ? segments.slots : kSlots;
  for_each_word<kThreads, kSlots, padded_size<T>(kMost) / kCopyElements<T>>([&](unsigned slot, unsigned word) {
    const unsigned first = segments.first + slot * segments.distance, at = word * kElements;
    const unsigned skipped = !kPartial ? 0 : (kAlike ? segments.first : first) % kElements;
    if (slot < slots && at >= skipped && at + kElements <= skipped + segments.count)
      *reinterpret_cast<uint4*>(tensor + (first - skipped + at)) =
          *reinterpret_cast<const uint4*>(staged + (slot * kPitch + at));
  });
  if constexpr (kPartial) {
    // Elements of a segment's first and last word, if it has not the whole of them; of a segment within one word, once.
#pragma unroll(unrolled<kThreads>(kSlots * 2 * kCopyElements<T>))
    for (int iteration = 0; iteration < iterations<kThreads>(kSlots * 2 * kCopyElements<T>); ++iteration) {
      const unsigned i = iteration * kThreads + threadIdx.x, slot = i / (2 * kElements), k = i % (2 * kElements);
      const unsigned first = segments.first + slot * segments.distance, skipped = first % kElements,
                     end = skipped + segments.count;
      const bool is_last = k >= kElements;
      const unsigned at = is_last ? end - end % kElements + k - kElements : k;
      const bool writes = is_last ? at >= kElements || skipped == 0 : skipped > 0;
      if (slot < slots && writes && at >= skipped && at < end)
        tensor[first - skipped + at] = staged[slot * kPitch + at];
    }
  }
}
