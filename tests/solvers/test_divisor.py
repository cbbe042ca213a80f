"""Division by multiplication, as kernels_src/common/divisor.cuh does it: exact for all that kernels divide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miofind.compiler.sources import read_source
from miofind.solvers.common.divisor import DIVISOR, divide_by

MOST = 2**31 - 1


def divided(number: int, by: int) -> int:
    """The kernel's arithmetic, where nothing may exceed 32 bits."""
    kinds, numbers = zip(*divide_by(by).numbers, strict=True)
    assert kinds == ("int32", "uint32", "int32")
    kept, multiplier, shift = map(int, numbers)
    assert kept == by
    assert 0 <= multiplier < 2**32
    assert 0 <= shift < 32
    high = (multiplier * number >> 32) + number
    assert high < 2**32
    return high >> shift


@pytest.mark.parametrize("by", [1, 2, 3, 5, 7, 8, 9, 641, 2**16 - 1, 2**16 + 1, 2**30 - 1, 2**30 + 1, MOST])
def test_around_multiples(by: int) -> None:
    for multiple in {by, 2 * by, 3 * by, MOST // by * by}:
        for number in {multiple - 1, multiple, multiple + 1, MOST}:
            if 0 <= number <= MOST:
                assert divided(number, by) == number // by


@given(number=st.integers(0, MOST), by=st.integers(1, MOST) | st.integers(1, 5000))
def test_quotients_are_exact(number: int, by: int) -> None:
    assert divided(number, by) == number // by
    assert divided(number // by * by, by) == number // by


def test_the_kernels_structure_has_the_same_fields() -> None:
    fields = " ".join(read_source("common/divisor.cuh").text.split())
    assert f"struct Divisor {{ {DIVISOR.define[1]} }};" in fields
