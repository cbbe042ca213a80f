"""Divisors as kernels take them: kernels_src/common/divisor.cuh divides by them without a division."""

from __future__ import annotations

from miofind.solver.steps import Scalar


def divisor(by: int) -> tuple[Scalar, Scalar, Scalar]:
    """What a kernel's three arguments `by`, `multiplier` and `shift` are, for numbers from 0 to 2^31 - 1.

    Args:
        by: the divisor, from 1 to 2^31 - 1.

    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994, figure 4.1.
    """
    shift = (by - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - by)) // by + 1
    return (
        Scalar(ctype="int32", value=by),
        Scalar(ctype="uint32", value=multiplier),
        Scalar(ctype="int32", value=shift),
    )


def divisors(*numbers: int) -> tuple[Scalar, ...]:
    """The arguments of several divisors, one after the other."""
    return tuple(scalar for number in numbers for scalar in divisor(number))
