// Division by what the host knows, without a division: a few cycles instead of over a hundred.
// Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994, figure 4.1.
#pragma once

// n / by for 0 <= n < 2^31; fields as DIVISOR of miofind/solvers/common/divisor.py declares them.
struct Divisor {
  int by;
  unsigned multiplier;
  int shift;
};

__device__ __forceinline__ int operator/(int n, const Divisor& divisor) {
  return static_cast<int>((__umulhi(divisor.multiplier, static_cast<unsigned>(n)) + static_cast<unsigned>(n)) >>
                          divisor.shift);
}
