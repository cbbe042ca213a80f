"""Divisors as kernels take them: kernels_src/common/divisor.cuh divides by them without a division."""

from __future__ import annotations

import functools

from miofind.solver.structs import Struct, StructType

DIVISOR = StructType("Divisor", by="int32", multiplier="uint32", shift="int32")
"""The structure of kernels_src/common/divisor.cuh, as a field of a kernel's structure."""


@functools.lru_cache(maxsize=1 << 12)  # few numbers, and each row of a look-up asks for some
def divide_by(number: int) -> Struct:
    """The value of a field that is a `DIVISOR`: it divides numbers from 0 to 2^31 - 1.

    Args:
        number: the divisor, from 1 to 2^31 - 1.

    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994, figure 4.1.
    """
    shift = (number - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - number)) // number + 1
    return DIVISOR(by=number, multiplier=multiplier, shift=shift)
