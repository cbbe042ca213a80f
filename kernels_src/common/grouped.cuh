// What the kernels of grouped convolutions share: fragments of one or two 8 x 8 matrices, products of depth 8, and how
// groups fill matrices (miofind/tiling/grouped.py). Groups are taken `kPack` at a time, as many as have multiples of 8
// channels on both sides; blocks of 8 x 8 in which no group meets itself are left out.
#pragma once

#include "common/mma.cuh"
#include "common/small_matrices.cuh"

constexpr int greatest_divisor(int a, int b) {
  return b == 0 ? a : greatest_divisor(b, a % b);
}

// Groups of kC input and kK output channels each.
template <int kC, int kK>
struct Groups {
  static constexpr int kPack = 8 / greatest_divisor(8, greatest_divisor(kC, kK));
  static constexpr int kPackC = kPack * kC, kPackK = kPack * kK;

  // Whether 8 channels from 8 * c on and 8 filters from 8 * k on have a group in common.
  static constexpr bool meet(int c, int k) {
    return 8 * c / kC <= (8 * k + 7) / kK && 8 * k / kK <= (8 * c + 7) / kC;
  }
};
