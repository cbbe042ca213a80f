"""Winograd's matrices are exact, and their error is what the norms tell."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miofind.solvers.common.minimal_filtering import MOST_POINTS, Filtering, bound_growth, matrices

SIZES = [(m, r) for m in range(1, MOST_POINTS + 2) for r in range(1, MOST_POINTS + 2) if m + r - 2 <= MOST_POINTS]


def product(matrix: list[list[Fraction]], vector: list[Fraction]) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), start=Fraction(0)) for row in matrix]


@given(size=st.sampled_from(SIZES), data=st.data())
def test_matrices_compute_the_correlation(size: tuple[int, int], data: st.DataObject) -> None:
    outputs, taps = size
    numbers = st.integers(-99, 99).map(Fraction)
    inputs = data.draw(st.lists(numbers, min_size=outputs + taps - 1, max_size=outputs + taps - 1))
    filters = data.draw(st.lists(numbers, min_size=taps, max_size=taps))
    output, filter_, input_ = matrices(outputs, taps)
    products = [a * b for a, b in zip(product(filter_, filters), product(input_, inputs), strict=True)]
    expected = [sum((inputs[i + k] * filters[k] for k in range(taps)), start=Fraction(0)) for i in range(outputs)]
    assert product(output, products) == expected


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (MOST_POINTS, 3)])
def test_sizes_without_points_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="points"):
        matrices(*size)


def test_small_tiles_transform_small_integers_exactly() -> None:
    for outputs, taps in ((2, 3), (3, 2), (2, 2)):
        for matrix in matrices(outputs, taps):
            assert {entry.denominator for row in matrix for entry in row} <= {1, 2}


@pytest.mark.parametrize("size", [(2, 3), (4, 3), (6, 3), (3, 4), (4, 5)])
def test_errors_grow_as_the_norms_tell(size: tuple[int, int]) -> None:
    """Of float32 arithmetic over many channels, against the direct sum's: within a factor of two of the model."""
    outputs, taps = size
    algorithm = Filtering.of(outputs, taps)
    generator = np.random.default_rng(5)
    channels, trials = 256, 400
    d = generator.standard_normal((trials, channels, algorithm.products)).astype(np.float32)
    g = generator.standard_normal((channels, taps)).astype(np.float32)
    inputs = d @ algorithm.input.T.astype(np.float32)
    filters = g @ algorithm.filter.T.astype(np.float32)
    products = np.zeros((trials, algorithm.products), np.float32)
    direct = np.zeros((trials, outputs), np.float32)
    for channel in range(channels):  # one after another, as a sum's error is modelled
        products += inputs[:, channel] * filters[channel]
        for tap in range(taps):
            direct += d[:, channel, tap : tap + outputs] * g[channel, tap]
    windows = np.lib.stride_tricks.sliding_window_view(d.astype(np.float64), taps, axis=2)
    exact = np.einsum("ncok,ck->no", windows, g.astype(np.float64))
    errors = [np.sqrt(np.mean((y - exact) ** 2)) for y in (products @ algorithm.output.T.astype(np.float32), direct)]
    ratio = errors[0] / errors[1]
    assert ratio <= 1.2 * algorithm.error_growth
    assert algorithm.error_growth <= 6 * ratio


@pytest.mark.parametrize(("outputs", "taps"), [size for size in SIZES if size[1] > 1])
def test_only_tiles_of_two_keep_a_large_input_out_of_outputs_that_do_not_meet_it(outputs: int, taps: int) -> None:
    algorithm = Filtering.of(outputs, taps)
    filter_ = np.random.default_rng(1).uniform(1, 2, taps).astype(np.float32)
    spoiled = False
    for at in range(algorithm.products):
        tile = np.zeros(algorithm.products, np.float32)
        tile[at] = np.float32(1.2345678e30)
        products = (algorithm.filter.astype(np.float32) @ filter_) * (algorithm.input.astype(np.float32) @ tile)
        results = algorithm.output.astype(np.float32) @ products
        meets = np.array([i <= at < i + taps for i in range(outputs)])
        spoiled = spoiled or bool(results[~meets].any())
    assert spoiled is not algorithm.is_local
    assert algorithm.is_local is (outputs <= 2)


def test_the_smallest_tiles_keep_the_bound_of_direct_sums() -> None:
    axes = {size: Filtering.of(*size) for size in ((2, 3), (3, 2), (4, 3), (6, 3))}
    assert bound_growth([axes[2, 3]] * 2) == bound_growth([axes[3, 2]] * 2) == 1
    assert bound_growth([axes[2, 3]] * 3) == pytest.approx(axes[2, 3].error_growth ** 3)
    assert 10 < bound_growth([axes[4, 3]] * 2) < 11 < 46 < bound_growth([axes[6, 3]] * 2)
