// Rows of images of up to four 16-bit channels in shared memory, laid out so that wgmma reads windows as they lie.
//
// A window is what one output, or two neighbours where the stride is odd, meets of a row: pixels of four channels (8
// bytes, absent channels zero), two to a 16-byte word, from an even pixel on. Neighbouring windows start kWords words
// apart; the words of a row lie in kWords phases, word i as number i / kWords of phase i % kWords. Then the words of
// equal number of 8 neighbouring windows are 128 bytes side by side, a core matrix of wgmma without swizzling: the next
// 8 windows are 128 bytes further, and words 2i and 2i + 1 of a window always equally far apart. Core matrices of
// neighbouring words overlap; nothing is copied.
#pragma once

#include "few_channels/input_tile.cuh"

// Windows along a row for kTaps taps: outputs of one, pixels and words from one to the next, steps of 16 elements (four
// pixels) that cover its taps.
template <int kTaps, int kStride>
struct Windows {
  static constexpr int kOutputs = 1 + kStride % 2, kPixels = kOutputs * kStride, kWords = kPixels / 2;
  static constexpr int kKSteps = ceil_div(kTaps + (kOutputs - 1) * kStride, 4);
  static_assert(kWords == 1 || kWords % 2 == 0, "both words of a step are equally far apart in every step");
};

// Shape of rows for InputTileLoader of few_channels/input_tile.cuh. kOffset columns are staged before those that the
// first of kCount windows meets, so that vectors are aligned; they start at pixel kFirst of a row, so that windows
// start with even ones. kVectorLength columns are loaded at once: the tensor's width and the first column are multiples
// of it.
template <typename W, int kChannelCount, int kRowCount, int kCount, int kOffset, int kVectorLength,
          bool kChannelsAreLast>
struct WindowRows {
  static constexpr int kChannels = kChannelCount, kRows = kRowCount, kVector = kVectorLength;
  static constexpr int kFirst = kOffset % 2;
  static constexpr int kColumns = round_up(kOffset + (kCount - 1) * W::kPixels + 4 * W::kKSteps, kVector);
  static constexpr int kVectors = kRows * kColumns / kVector;
  static constexpr bool kChannelsLast = kChannelsAreLast;
  // A window's first word; kSkipped words before a row's let it be in the first phase.
  static constexpr int kLead = (kOffset + kFirst) / 2, kSkipped = round_up(kLead, W::kWords) - kLead;
  // Phases are an odd number of words, so that writes to neighbouring ones fall into different banks.
  static constexpr int kPhaseWords = ceil_div(kSkipped + ceil_div(kFirst + kColumns, 2), W::kWords) | 1;
  static constexpr int kRowWords = W::kWords * kPhaseWords, kRowBytes = 16 * kRowWords, kBytes = kRows * kRowBytes;
  static_assert(kChannels >= 1 && kChannels <= 4, "pixels hold four channels");
  static_assert(kColumns % kVector == 0, "a vector lies within a row");

  // Where a word of a row lies.
  static constexpr __device__ __forceinline__ int word_position(int word) {
    return (kSkipped + word) % W::kWords * kPhaseWords + (kSkipped + word) / W::kWords;
  }
  // Bytes from a row's start to word 2 * step of its first window, and from there to the next word.
  static constexpr __device__ __forceinline__ int step_bytes(int step) { return 16 * word_position(kLead + 2 * step); }
  static constexpr int kNextWordBytes = 16 * (W::kWords == 1 ? 1 : kPhaseWords), kEightWindowsBytes = 128;
};
