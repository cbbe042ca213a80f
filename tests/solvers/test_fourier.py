"""Tiles of transforms: circular convolutions of them give every result once, and exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription
from miofind.reference.convolution import reference_on_host
from miofind.solvers.common.fourier import FftAxis, smooth, spectrum, whole_length
from miofind.solvers.common.overlap import least_products


@st.composite
def problems(draw: st.DrawFn) -> ProblemDescription:
    size, taps, stride = draw(st.integers(1, 12)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    pads = draw(st.tuples(st.integers(0, 7), st.integers(0, 7)))
    assume(size + sum(pads) >= taps)
    direction = draw(st.sampled_from(list(Direction)))
    return ProblemDescription.convolution(
        x=(1, 1, size), w=(1, 1, taps), padding=(pads,), stride=stride, direction=direction
    )


def tile_of(problem: ProblemDescription, axis: FftAxis, name: str, values: NDArray[np.float64], tile: int) -> NDArray:
    """The transform of one tile of a tensor."""
    start = 0 if name == "w" else tile * axis.step
    elements, positions = axis.placement(problem, 0, name).elements(start, values.size)
    laid = np.zeros(axis.length)
    laid[positions] = values[elements]
    return np.fft.fft(laid)


@given(problem=problems(), extra=st.integers(0, 9), tiled=st.booleans())
def test_circular_convolutions_of_tiles(problem: ProblemDescription, extra: int, tiled: bool) -> None:
    assume(least_products(problem) > 0)
    if tiled:
        axis = FftAxis.tiled(problem, 0, problem.filter[0] + extra)
    else:
        axis = FftAxis.whole(problem, 0, whole_length(problem, 0) + extra)
    direction, generator = problem.direction, np.random.default_rng(extra)
    values = {name: generator.integers(-3, 4, problem.tensor(name).shape) * 1.0 for name in direction.inputs}
    expected = reference_on_host(problem, **values).ravel()
    got = np.full(expected.size, np.nan)
    total = np.zeros(axis.length, complex)
    for tile in range(axis.tiles):
        first, second = (tile_of(problem, axis, name, values[name].ravel(), tile) for name in direction.inputs)
        if direction is Direction.BACKWARD_WEIGHTS:
            total += first.conj() * second if direction.inputs[0] == "y" else first * second.conj()
        else:
            total = first * (second.conj() if direction is Direction.FORWARD else second)
        start = 0 if direction is Direction.BACKWARD_WEIGHTS else tile * axis.step
        elements, positions = axis.placement(problem, 0, direction.output).elements(start, got.size)
        got[elements] = np.fft.ifft(total).real[positions]
    np.testing.assert_allclose(got, expected, atol=1e-9)


@given(problem=problems())
def test_least_products_are_those_of_ones(problem: ProblemDescription) -> None:
    ones = {name: np.ones(problem.tensor(name).shape) for name in problem.direction.inputs}
    assert least_products(problem) == reference_on_host(problem, **ones).min()


@pytest.mark.parametrize("size", [1, 2, 3, 11, 64, 121, 127, 4097, 2_000_003])
def test_lengths_are_even_and_of_small_factors(size: int) -> None:
    length = smooth(size)
    assert length >= size
    assert length % 2 == 0 or length == 1
    rest = length
    for factor in (2, 3, 5, 7):
        while rest % factor == 0:
            rest //= factor
    assert rest == 1


def test_a_real_spectrum_is_half() -> None:
    assert spectrum((6, 8)) == (6, 5)
    assert math.prod(spectrum((1, 1))) == 1


def test_least_products_of_huge_axes_are_told_at_once() -> None:
    sizes = {"x": (1, 1, 2**30), "w": (1, 1, 2), "stride": 2**29}
    told = [least_products(ProblemDescription.convolution(**sizes, direction=direction)) for direction in Direction]
    assert told == [2, 0, 2]
