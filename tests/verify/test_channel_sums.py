"""The standard of second outputs: when sums are exact whatever the order, and how far off they may be otherwise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from miofind.core.problem import ProblemDescription
from miofind.verify.channel_sums import WrongSum, wrong_sums


def weights(dtype: str = "float32", pixels: int = 64, epilogue: str = "bias_gradient") -> ProblemDescription:
    """One channel of so many pixels."""
    return ProblemDescription.convolution(
        x=(1, 1, pixels, 1), w=(1, 1, 1, 1), dtype=dtype, epilogue=epilogue, direction="backward_weights"
    )


def judged(dy: NDArray[np.float64], result: float, dtype: str = "float32") -> WrongSum | None:
    problem = weights(dtype, dy.size)
    arrays = {"y": dy.reshape(problem.y.shape), "bias_gradient": np.array([result]).reshape(1, 1, 1, 1)}
    found = wrong_sums(problem, arrays)
    return found[0] if found else None


@pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**80])
def test_sums_of_few_bits_are_exact(scale: float) -> None:
    dy = scale * np.array([3.0, -5.0, 7.0, 2.0**20])
    assert judged(dy, scale * (5 + 2.0**20)) is None
    wrong = judged(dy, scale * (6 + 2.0**20))
    assert wrong is not None
    assert (wrong.bound, wrong.channel, wrong.wanted) == (0, 0, scale * (5 + 2.0**20))


def test_other_sums_have_a_bound_of_their_magnitudes() -> None:
    dy = np.random.default_rng(0).standard_normal(4096)
    total, magnitude = float(dy.sum()), float(np.abs(dy).sum())
    allowed = 2.0**-24 * (16 + 2 * 12) * magnitude
    assert judged(dy, total + 0.99 * allowed) is None
    wrong = judged(dy, total + 1.01 * allowed)
    assert wrong is not None
    assert wrong.bound == pytest.approx(allowed, rel=0.01)


def test_the_results_rounding_comes_on_top() -> None:
    dy = np.array([2049.0, 0.0])  # between two numbers of float16: the even one is the rounded
    assert judged(dy, 2048.0, "float16") is None
    assert judged(dy, 2050.0, "float16") is not None


@pytest.mark.parametrize("bad", [math.nan, 5.0, -math.inf])
def test_infinite_sums_come_out_as_they_are(bad: float) -> None:
    dy = np.array([1.0, math.inf])
    assert judged(dy, math.inf) is None
    assert judged(dy, bad) is not None
    assert judged(np.array([math.inf, -math.inf]), math.nan) is None


def test_sums_beyond_the_type_may_overflow() -> None:
    assert judged(np.array([60000.0, 60000.0]), math.inf, "float16") is None
    assert judged(np.array([60000.0, 60000.0]), -math.inf, "float16") is not None
    assert judged(np.array([60000.0, 3.0]), math.inf, "float16") is not None
    assert judged(np.array([3e38, 3e38, -3e38]), math.nan) is None, "a partial sum overflows"


def test_a_long_sum_of_float32_in_pairs_is_within_its_bound() -> None:
    dy = np.abs(np.random.default_rng(1).standard_normal(1 << 20)).astype(np.float32)
    parts = dy.reshape(-1, 512)
    partials = np.zeros(parts.shape[0], np.float32)
    for place in range(512):
        partials += parts[:, place]
    while partials.size > 1:
        partials = partials[: partials.size // 2] + partials[partials.size // 2 :]
    assert judged(dy.astype(np.float64), float(partials[0])) is None


def test_the_worst_channel_is_told() -> None:
    problem = ProblemDescription.convolution(
        x=(2, 1, 3, 3), w=(4, 1, 1, 1), epilogue="bias_gradient", direction="backward_weights"
    )
    dy = np.arange(72, dtype=np.float64).reshape(2, 4, 3, 3)
    result = dy.sum((0, 2, 3))
    result[1] += 1
    result[2] = math.nan
    (wrong,) = wrong_sums(problem, {"y": dy, "bias_gradient": result})
    assert (wrong.name, wrong.wrong, wrong.channels) == ("bias_gradient", 2, 4)
    assert str(wrong).startswith("2 of 4 channels of bias_gradient are wrong, the worst ")
