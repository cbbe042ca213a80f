// How outputs of one axis meet inputs, forward and backward data. The same arithmetic: solvers/common/packed_groups.py.
#pragma once

// Output kPhases * i + phase meets input i * kStep + offset(phase, tap). Forward there is one phase; backward data
// (kFlipped) has one for each residue of its coordinates modulo the convolution's stride, met by taps of its own.
template <bool kFlipped, int kStride, int kDilation, int kPad, int kFilter>
struct GroupAxis {
  static constexpr int kTaps = kFilter, kPhases = kFlipped ? kStride : 1, kStep = kFlipped ? 1 : kStride;
  static constexpr bool meets(int phase, int tap) {
    return !kFlipped || (phase + kPad - tap * kDilation) % kStride == 0;
  }
  static constexpr int offset(int phase, int tap) {
    return kFlipped ? (phase + kPad - tap * kDilation) / kStride : tap * kDilation - kPad;
  }
  static constexpr int first() {
    int least = 1 << 30;
    for (int phase = 0; phase < kPhases; ++phase)
      for (int tap = 0; tap < kFilter; ++tap)
        if (meets(phase, tap) && offset(phase, tap) < least) least = offset(phase, tap);
    return least;
  }
  static constexpr int last() {
    int most = -(1 << 30);
    for (int phase = 0; phase < kPhases; ++phase)
      for (int tap = 0; tap < kFilter; ++tap)
        if (meets(phase, tap) && offset(phase, tap) > most) most = offset(phase, tap);
    return most;
  }
  static constexpr int kFirst = first(), kLast = last(), kReach = last() - first();

  // The row of outputs, of kRows, that row `row` of the inputs they meet contributes to by a tap in a phase; negative
  // if none.
  template <int kRows>
  static constexpr int output(int row, int phase, int tap) {
    if (!meets(phase, tap)) return -1;
    const int from = row - (offset(phase, tap) - kFirst);
    return from >= 0 && from % kStep == 0 && from / kStep < kRows ? from / kStep : -1;
  }

  // Whether that row of inputs contributes to any.
  template <int kRows>
  static constexpr bool is_used(int row) {
    for (int phase = 0; phase < kPhases; ++phase)
      for (int tap = 0; tap < kFilter; ++tap)
        if (output<kRows>(row, phase, tap) >= 0) return true;
    return false;
  }
};
