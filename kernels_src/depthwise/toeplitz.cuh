// Rows of depthwise convolutions (stride 1) by blocks of 16 outputs, and the words of 8 inputs that a block meets.
//
// Rows lie as in memory, and lanes read pairs of elements: word w has eight columns, of which lane l has 2 * (l % 4)
// and the next. Where rows are of odd length, every other one begins at an odd element: its words and blocks begin a
// column earlier, so that pairs are aligned.
#pragma once

#include "common/tile.cuh"

// Rows of kWidth inputs and kOutputs outputs, of which output o meets input o - kPad + tap. The words of block b begin
// kShift columns before it, with number 2 * b; if the only block meets all inputs of a row, those are its words.
template <int kWidth, int kOutputs, int kTaps, int kPad, int kShift>
struct ToeplitzRow {
  static constexpr bool kIsOdd = kWidth % 2 != 0 || kOutputs % 2 != 0;
  static constexpr int kOdd = kIsOdd ? 1 : 0;
  static constexpr int kBlocks = ceil_div(kOutputs + kOdd, 16), kWords = 2 * kBlocks + 1;
  static constexpr bool kIsNarrow = kBlocks == 1 && kShift == 0 && kWidth + kOdd <= 16;
  static constexpr int kFirstTap = kPad - kShift;  // joins the first input and the first output of a block
  static_assert(kShift % 2 == 0 && (kIsNarrow || kFirstTap + kOdd <= 0),
                "words must begin no later than the first column met");
  static_assert(kIsNarrow || kTaps + 15 - kFirstTap + kOdd <= 24, "words must end no earlier than the last column met");

  // Whether a word has columns that exist, and whether a block meets them.
  static constexpr bool is_live(int word) { return 8 * word - kShift - kOdd < kWidth && 8 * word + 7 - kShift >= 0; }
  static constexpr bool is_met(int block, int word) {
    const int outputs = kOutputs - 1 + kOdd - 16 * block, last = outputs < 15 ? outputs : 15;
    const int at = 8 * (word - 2 * block);
    return is_live(word) && at - last + kFirstTap - kOdd < kTaps && at + 7 + kFirstTap + kOdd >= 0;
  }
  // Whether some lane's part of a word lies outside, all or half.
  static constexpr bool is_edge(int word) { return 8 * word - kShift - kOdd < 0 || 8 * word - kShift + 8 > kWidth; }
  // The same of outputs.
  static constexpr bool is_out_edge(int word) { return 8 * word - kOdd < 0 || 8 * word + 8 > kOutputs; }
};

// The half or halves of a pair whose columns, `column` and the next, exist.
template <int kWidth>
__device__ __forceinline__ unsigned existing(int column) {
  return (static_cast<unsigned>(column) < kWidth ? 0x0000ffffu : 0u) |
         (static_cast<unsigned>(column + 1) < kWidth ? 0xffff0000u : 0u);
}

// Whether rows of inputs and of outputs of even number begin at odd elements; where rows are of odd length, those of
// odd number do otherwise.
template <int kHeight, int kWidth, int kOutHeight, int kOutWidth>
struct Parity {
  static constexpr bool kIsOdd = kWidth % 2 != 0 || kOutWidth % 2 != 0;
  int in, out;

  // Of a channel, by its number in its image; images begin at even elements.
  static __device__ __forceinline__ Parity of(int channel) {
    return {channel & kHeight & kWidth & 1, channel & kOutHeight & kOutWidth & 1};
  }
  __device__ __forceinline__ int of_in(int row) const { return kIsOdd ? in ^ (row & kWidth & 1) : 0; }
  __device__ __forceinline__ int of_out(int row) const { return kIsOdd ? out ^ (row & kOutWidth & 1) : 0; }
  // Whether rows of inputs and of outputs that are `apart` rows apart begin alike, whatever their number.
  static constexpr bool is_alike(int apart) {
    return !kIsOdd ||
           (kWidth % 2 == kOutWidth % 2 && kHeight * kWidth % 2 == kOutHeight * kOutWidth % 2 && apart % 2 == 0);
  }
};

// Reads words [kFirst, kEnd) of a row, as far as they exist. `from` is where lane 0 has its part of word 0. `masks` say
// what exists of words for which is_edge(word); of rows of even length, all or nothing of a lane's part does.
template <int kFirst, int kEnd, bool kIsOdd, int kCount, typename T, typename IsEdge>
__device__ __forceinline__ void read_words(unsigned (&words)[kCount], const T* from, const unsigned (&masks)[kCount],
                                           bool exists, IsEdge is_edge) {
#pragma unroll
  for (int i = kFirst; i < kEnd; ++i) {
    words[i] = 0;
    const unsigned mask = is_edge(i) ? masks[i] : ~0u;
    if (exists && mask != 0) words[i] = *reinterpret_cast<const unsigned*>(from + 8 * i);
    if (kIsOdd && is_edge(i)) words[i] &= mask;
  }
}
