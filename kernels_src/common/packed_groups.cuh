// How groups of a few channels fill matrices. The same arithmetic: solvers/common/packed_groups.py. Groups are
// taken `kPackedGroups` at a time, as many as have multiples of 8 channels on both sides.
#pragma once

constexpr int greatest_divisor(int a, int b) {
  return b == 0 ? a : greatest_divisor(b, a % b);
}

// Groups of kC input and kK output channels each; blocks of 8 x 8 in which no group meets itself are left out.
template <int kC, int kK>
struct PackedGroups {
  static constexpr int kPackedGroups = 8 / greatest_divisor(8, greatest_divisor(kC, kK));
  static constexpr int kPackedC = kPackedGroups * kC, kPackedK = kPackedGroups * kK;

  // Whether 8 channels from 8 * c on and 8 filters from 8 * k on have a group in common.
  static constexpr bool meet(int c, int k) { return 8 * c / kC <= (8 * k + 7) / kK && 8 * k / kK <= (8 * c + 7) / kC; }
};

// Bytes rounded up to an odd number of 16-byte words, so that 8 neighbours meet all banks.
constexpr int odd_words(int bytes) {
  return (bytes + 15) / 16 % 2 ? (bytes + 15) / 16 * 16 : (bytes + 15) / 16 * 16 + 16;
}
