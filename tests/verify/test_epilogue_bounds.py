"""Bounds of fused results: the slopes and errors of activations, and epilogues carried out in float32."""

from __future__ import annotations

import importlib.resources
import math
import re
from typing import Any

import numpy as np
import pytest

from miofind.core.epilogue import Activation, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.reference.convolution import round_once
from miofind.reference.epilogue import activated
from miofind.verify.epilogue_bounds import BareSums, EpilogueStandard, FusedResults, fused_results, largest_slope
from miofind.verify.epilogue_trials import operand_values, trial_parameters
from miofind.verify.harness_host import random_values

NUMBERS = EpilogueParameters(alpha=-0.75, beta=1.5, low=-0.5, high=1.25, slope=0.125)
INEXACT = [activation for activation in Activation if not activation.is_exact]
Single = np.float32


def single_exp(v: np.ndarray) -> np.ndarray:
    """As expf, within 2 units in the last place."""
    right = np.exp(v.astype(np.float64)).astype(Single)
    return np.nextafter(np.nextafter(right, Single(np.inf)), Single(np.inf))


def in_single(activation: Activation, v: np.ndarray) -> np.ndarray:
    """The formulas of kernels_src/common/epilogue.cuh in float32, with functions as inexact as CUDA's may be."""
    one, half = Single(1), Single(0.5)
    small = single_exp(-np.abs(v))
    if activation in (Activation.SILU, Activation.SIGMOID):
        sigmoid = np.where(v < 0, small, one) / (one + small)
        return sigmoid if activation is Activation.SIGMOID else v * sigmoid
    if activation is Activation.GELU:
        erfc = np.vectorize(math.erfc)((v * Single(-0.7071067811865476)).astype(np.float64)).astype(Single)
        return v * (half * (erfc * Single(1 + 3 * 2.0**-23)))
    if activation is Activation.GELU_TANH:
        doubled = Single(1.5957691216057308) * (v + Single(0.044715) * v * v * v)
        small = single_exp(-np.abs(doubled))
        return v * (np.where(doubled < 0, small, one) / (one + small))
    if activation is Activation.HARDSWISH:
        return v * (np.clip(v + Single(3), Single(0), Single(6)) * Single(1 / 6))
    if activation is Activation.TANH:
        return np.tanh(v.astype(np.float64)).astype(Single) * Single(1 + 2.0**-23)
    if activation is Activation.ELU:
        below = np.expm1(np.minimum(v, 0).astype(np.float64)).astype(Single) * Single(1 + 2.0**-23)
        return np.where(v < 0, Single(0.125) * below, v)
    assert activation is Activation.MISH
    top = np.where(v < 0, small * (small + 2), one + 2 * small)
    bottom = np.where(v < 0, top + 2, top + 2 * small * small)
    return v * (top / bottom)


def gelu_terms(dtype: str) -> tuple[np.float32, list[np.float32]]:
    """Where the polynomial of gelu's factor ends, and its terms, in kernels_src/common/activation.cuh."""
    text = (importlib.resources.files("kernels_src") / "common" / "activation.cuh").read_text(encoding="utf-8")
    body = text[text.index(f"GeluExponent<{dtype}> {{") :]
    numbers = re.search(r"kEnd = ([\d.]+)f;.*?\{(.*?)\}", body, re.DOTALL)
    assert numbers is not None
    return Single(numbers[1]), [Single(term.strip().rstrip("f")) for term in numbers[2].split(",")]


def short(activation: Activation, v: np.ndarray, dtype: str, sign: int, *, alone: bool) -> np.ndarray:
    """The formulas of kernels_src/common/activation.cuh, with ex2.approx and rcp.approx off by all that they may be.

    Args:
        alone: each result has a reciprocal of its own, where two may share one.
    """
    one, log2e = Single(1), Single(1.44269504)

    def exp2(exponent: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return (np.exp2(exponent.astype(np.float64)) * (1 + sign * 2.0**-22)).astype(Single)

    def reciprocal(divisor: np.ndarray) -> np.ndarray:
        return ((1 - sign * 2.0**-23) / divisor.astype(np.float64)).astype(Single)

    above = np.maximum(v, Single(0))
    if activation is Activation.SIGMOID:
        return reciprocal(one + exp2(-log2e * v))
    if activation in (Activation.SILU, Activation.GELU_TANH):
        is_silu = activation is Activation.SILU
        bounded = np.maximum(v, Single(-89 if is_silu else -10.5)) if alone else np.abs(v)
        magnitude = np.minimum(bounded, Single(128 if is_silu else 16))
        tangent = Single(2.30220819) + Single(0.10294324) * magnitude * magnitude
        small = exp2(-magnitude * (log2e if is_silu else tangent))
        divisor = one + small
        if alone:
            return bounded * reciprocal(divisor)
        return above - magnitude * small * (reciprocal(divisor * divisor[::-1]) * divisor[::-1])
    if activation is Activation.GELU:
        end, terms = gelu_terms(dtype)
        magnitude, exponent = np.minimum(np.abs(v), end), np.full_like(v, terms[-1])
        for term in terms[-2::-1]:
            exponent = exponent * magnitude + term
        return above - magnitude * exp2(exponent)
    if activation is Activation.HARDSWISH:
        return np.maximum(v, Single(-3)) * np.clip((v + Single(3)) * Single(1 / 6), Single(0), one)
    if activation is Activation.TANH:
        result = one - Single(2) * reciprocal(one + exp2(Single(2) * log2e * v))
        return np.where(np.abs(v) < 0.0625, v - v * v * v * Single(1 / 3), result)
    if activation is Activation.ELU:
        near = v + v * v * (Single(0.5) + v * Single(1 / 6))
        below = np.where(v > -0.03125, near, exp2(log2e * np.minimum(v, Single(0))) - one)
        return np.where(v < 0, Single(0.125) * below, v)
    assert activation is Activation.MISH
    small = exp2(log2e * np.minimum(v, Single(20)))
    top = small * (small + Single(2))
    return np.maximum(v, Single(-88)) * (top * reciprocal(top + Single(2)))


def results_of(
    problem: ProblemDescription, sums: np.ndarray, factor: float | None, **operands: np.ndarray
) -> FusedResults:
    standard = EpilogueStandard.of(problem, factor, rounds_twice=False)
    bare = BareSums(sums=sums, magnitudes=np.abs(sums), squares=np.zeros_like(sums))
    return fused_results(problem, bare, operands, NUMBERS, standard)


@pytest.mark.parametrize("activation", INEXACT)
def test_formulas_in_float32_keep_the_declared_error(activation: Activation) -> None:
    random = np.random.default_rng(1)
    v = (8 * random.standard_normal(200_000)).astype(Single)
    problem = ProblemDescription.convolution(x=(1, 1, v.size), w=(1, 1, 1), epilogue=activation.value)
    wanted = results_of(problem, v.astype(np.float64) / NUMBERS.alpha, None)
    errors = np.abs(in_single(activation, v).astype(np.float64) - wanted.wanted)
    assert (errors <= wanted.arithmetic).all()
    middle = np.abs(v) < 2.9  # hardswish is 0 from 3 on
    relative = wanted.arithmetic[middle] / np.abs(wanted.wanted[middle])
    assert relative.max() < 2.0**-15, "nor is it so wide that a coarse function would pass"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", INEXACT)
def test_short_formulas_keep_the_error_declared_for_16_bits(
    activation: Activation, dtype: str, sign: int, alone: bool
) -> None:
    random = np.random.default_rng(3)
    v = (random.choice([0.03, 1, 8], 200_000) * random.standard_normal(200_000)).astype(Single)
    problem = ProblemDescription.convolution(x=(1, 1, v.size), w=(1, 1, 1), epilogue=activation.value, dtype=dtype)
    wanted = results_of(problem, v.astype(np.float64) / NUMBERS.alpha, None)
    errors = np.abs(short(activation, v, dtype, sign, alone=alone).astype(np.float64) - wanted.wanted)
    is_normal = np.abs(wanted.wanted) >= (2.0**-25 if dtype == "float16" else 2.0**-112)
    assert (errors <= 0.7 * wanted.arithmetic)[is_normal].all()
    assert (errors <= 2.0**-26)[~is_normal].all()
    middle = np.abs(v) < 2.9
    relative = wanted.arithmetic[middle] / np.abs(wanted.wanted[middle])
    assert relative.max() < 2.0**-13, "half a unit of float16 is 2^-12 of a result at least"


@pytest.mark.parametrize("activation", Activation)
def test_slopes_are_the_largest_and_tight(activation: Activation) -> None:
    v = np.linspace(-8, 8, 1_600_001)
    results = activated(v, activation, NUMBERS)
    steepest = (np.abs(np.diff(results)) / np.diff(v)).max()
    declared = largest_slope(activation, NUMBERS)
    assert 0.999 * declared < steepest <= declared * (1 + 1e-9)


@pytest.mark.parametrize("activation", [Activation.LEAKY_RELU, Activation.ELU])
def test_a_steep_slope_counts(activation: Activation) -> None:
    assert largest_slope(activation, EpilogueParameters(slope=-3.0)) == 3.0


@pytest.mark.parametrize("text", ["scale.bias.channel_bias.residual.leaky_relu", "scale.bias.relu.residual"])
def test_an_epilogue_in_float32_keeps_its_bound(text: str) -> None:
    random = np.random.default_rng(2)
    problem = ProblemDescription.convolution(x=(4, 1, 500), w=(30, 1, 1), epilogue=text)
    shapes = {operand.name: operand.shape for operand in problem.operands}
    operands = {name: random.standard_normal(shapes[name]).astype(Single) for name in problem.epilogue.operands}
    sums = random.standard_normal(problem.y.shape).astype(Single)
    wanted = results_of(problem, sums.reshape(-1).astype(np.float64), 1e-30, **operands)
    v = Single(NUMBERS.alpha) * sums * operands["scale"][:, None] + operands["bias"][:, None]
    after = Single(NUMBERS.beta) * operands["residual"]
    if text.endswith("residual"):
        got = np.where(v < 0, Single(0), v) + after
    else:
        v = v + operands["channel_bias"][:, :, None] + after
        got = np.where(v < 0, Single(NUMBERS.numbers(Activation.LEAKY_RELU)[2]) * v, v)
    errors = np.abs(got.reshape(-1).astype(np.float64) - wanted.wanted)
    assert (errors <= wanted.arithmetic).all()
    assert errors.max() > 0.1 * wanted.arithmetic.max()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("products", [1, 9, 1152, 1 << 18])
def test_exact_trials_are_exact_in_float32(products: int, shifted: bool) -> None:
    """Sums of up to eight standard deviations, in the epilogue that takes the most bits."""
    problem = ProblemDescription.convolution(
        x=(1, products, 20_000),
        w=(1, products, 1),
        epilogue="scale.bias.channel_bias.leaky_relu.residual",
    )
    numbers = trial_parameters(problem, Values.TERNARY, shifted=shifted)
    values = operand_values("residual", Values.TERNARY, shifted=shifted)
    most = 8 * math.sqrt(4 / 9 * products)
    sums = np.random.default_rng(4).integers(-math.ceil(most), math.ceil(most) + 1, 20_000).astype(np.float64)
    scale, bias, added, residual = (random_values(problem.y, values, seed).reshape(-1) for seed in range(4))

    def finished(number: type[np.floating[Any]]) -> np.ndarray:
        v = number(numbers.alpha) * sums.astype(number) * scale.astype(number)
        v = v + bias.astype(number) + added.astype(number)
        v = np.where(v < 0, number(numbers.numbers(Activation.LEAKY_RELU)[2]) * v, v)
        return v + number(numbers.beta) * residual.astype(number)

    assert (finished(np.float32) == finished(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_long_sums_leave_an_epilogue_no_bits(dtype: str) -> None:
    long = ProblemDescription.convolution(x=(1, 1 << 18, 1), w=(1, 1 << 18, 1), dtype=dtype, epilogue="bias.relu")
    longer = ProblemDescription.convolution(x=(1, 1 << 19, 1), w=(1, 1 << 19, 1), dtype=dtype, epilogue="bias.relu")
    assert EpilogueStandard.of(long, None, rounds_twice=False).bitwise
    assert not EpilogueStandard.of(longer, None, rounds_twice=False).bitwise
    assert EpilogueStandard.of(longer, None, rounds_twice=False).roundings


def test_sums_are_rounded_or_doubted_where_a_candidate_rounds_twice() -> None:
    problem = ProblemDescription.convolution(x=(1, 1, 3), w=(1, 1, 1), dtype="bfloat16", epilogue="relu")
    sums = np.array([1000.0, 1001.0, 1003.0])
    bare = BareSums(sums=sums, magnitudes=sums, squares=np.zeros(3))
    numbers = EpilogueParameters(alpha=2.0)
    for factor in (None, 1e-30):
        once, twice = (
            fused_results(problem, bare, {}, numbers, EpilogueStandard.of(problem, factor, rounds_twice=rounds))
            for rounds in (False, True)
        )
        if factor is None:
            assert twice.wanted.tolist() == (2 * round_once(sums, problem.y.dtype).astype(np.float64)).tolist()
        else:
            assert twice.wanted.tolist() == once.wanted.tolist() == (2 * sums).tolist()
            assert (twice.arithmetic - once.arithmetic).tolist() == pytest.approx([4.0] * 3)  # half of 4, twice
