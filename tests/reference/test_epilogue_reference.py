"""The float64 reference of epilogues, against formulas written out by element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from miofind.core.epilogue import DERIVATIVES, Activation, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.reference.epilogue import activated, apply_epilogue, differentiated

NUMBERS = EpilogueParameters(alpha=0.5, beta=2.0, low=-0.75, high=1.5, slope=0.125)


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


BY_ELEMENT = {
    Activation.NONE: lambda v: v,
    Activation.RELU: lambda v: max(v, 0),
    Activation.CLAMP: lambda v: min(max(v, -0.75), 1.5),
    Activation.LEAKY_RELU: lambda v: v if v >= 0 else 0.125 * v,
    Activation.SILU: lambda v: v * sigmoid(v),
    Activation.GELU: lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
    Activation.GELU_TANH: lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    Activation.HARDSWISH: lambda v: v * min(max(v + 3, 0), 6) / 6,
    Activation.SIGMOID: sigmoid,
    Activation.TANH: math.tanh,
    Activation.ELU: lambda v: v if v >= 0 else 0.125 * math.expm1(v),
    Activation.MISH: lambda v: v * math.tanh(math.log1p(math.exp(v))),
}


@pytest.mark.parametrize("activation", Activation)
def test_activations(activation: Activation) -> None:
    values = np.array([-30.0, -4.0, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 3.0, 5.0, 30.0])
    wanted = [BY_ELEMENT[activation](float(v)) for v in values]
    assert activated(values, activation, NUMBERS) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("activation", Activation)
def test_activations_keep_nan_and_take_infinities_to_their_limits(activation: Activation) -> None:
    low, high, nan = activated(np.array([-np.inf, np.inf, np.nan]), activation, NUMBERS)
    near_low, near_high = activated(np.array([-1e30, 1e30]), activation, NUMBERS)
    assert np.isnan(nan)
    assert low == near_low or (np.isinf(low) and near_low < -1e20)
    assert high == near_high or (np.isinf(high) and near_high > 1e20)


@pytest.mark.parametrize("activation", DERIVATIVES)
def test_derivatives_are_those_of_the_activations(activation: Activation) -> None:
    saved = np.array([-9.0, -3.5, -2.9, -1.0, -0.25, 0.25, 0.75, 1.25, 2.0, 2.9, 3.5, 9.0])
    step = 1e-6
    slope = (activated(saved + step, activation, NUMBERS) - activated(saved - step, activation, NUMBERS)) / (2 * step)
    assert differentiated(np.full(saved.shape, 3.0), saved, activation, NUMBERS) == pytest.approx(3 * slope, abs=1e-8)
    if activation in (Activation.RELU, Activation.CLAMP, Activation.LEAKY_RELU):
        result = activated(saved, activation, NUMBERS)
        assert differentiated(saved, result, activation, NUMBERS).tolist() == pytest.approx((saved * slope).tolist())


@pytest.mark.parametrize(
    ("activation", "saved", "wanted"),
    [
        (Activation.RELU, [0.0, -0.0, np.nan, np.inf, -np.inf], [0, 0, 1, 1, 0]),
        (Activation.CLAMP, [-0.75, 1.5, np.nan, 1.4, -0.7], [0, 0, 1, 1, 1]),
        (Activation.LEAKY_RELU, [0.0, -0.0, np.nan, np.inf, -np.inf], [0.125, 0.125, 0.125, 1, 0.125]),
        (Activation.HARDSWISH, [-3.0, 3.0, np.nan, np.inf, -np.inf], [0, 1, 1, 1, 0]),
        (Activation.SILU, [0.0, np.nan, np.inf, -np.inf], [0.5, np.nan, 1, 0]),
        (Activation.GELU, [0.0, np.nan, np.inf, -np.inf], [0.5, np.nan, 1, 0]),
        (Activation.GELU_TANH, [0.0, np.nan, np.inf, -np.inf], [0.5, np.nan, 1, 0]),
    ],
)
def test_derivatives_at_their_jumps_and_beyond(activation: Activation, saved: list[float], wanted: list[float]) -> None:
    at = np.array(saved)
    np.testing.assert_array_equal(differentiated(np.ones(at.shape), at, activation, NUMBERS), wanted)
    infinite = differentiated(np.full(at.shape, np.inf), at, activation, NUMBERS)
    np.testing.assert_array_equal(infinite, [0.0 if w == 0 else w * np.inf for w in wanted])


def test_the_residual_is_added_before_a_derivative() -> None:
    problem = ProblemDescription.convolution(
        x=(2, 3, 4), w=(5, 3, 2), direction="backward_data", epilogue="residual.dleaky_relu"
    )
    random = np.random.default_rng(0)
    sums, residual, saved = (random.standard_normal(problem.x.shape) for _ in range(3))
    got = apply_epilogue(problem, sums, {"residual": residual, "saved": saved}, NUMBERS)
    np.testing.assert_allclose(got, (0.5 * sums + 2 * residual) * np.where(saved > 0, 1, 0.125))


@pytest.mark.parametrize("text", ["scale.bias.channel_bias.residual.tanh", "bias.silu.residual", "residual", "scale"])
def test_the_order_is_fixed(text: str) -> None:
    problem = ProblemDescription.convolution(x=(2, 3, 4), w=(5, 3, 2), epilogue=text)
    random = np.random.default_rng(0)
    sums = random.standard_normal(problem.y.shape)
    operands = {name: random.standard_normal(problem_shape(problem, name)) for name in problem.epilogue.operands}
    got = apply_epilogue(problem, sums, operands, NUMBERS)
    for n, k, o in np.ndindex(*problem.y.shape):
        v = 0.5 * sums[n, k, o]
        v *= operands["scale"][k] if "scale" in operands else 1
        v += operands["bias"][k] if "bias" in operands else 0
        v += operands["channel_bias"][n, k] if "channel_bias" in operands else 0
        residual = 2 * operands["residual"][n, k, o] if "residual" in operands else 0
        v = BY_ELEMENT[problem.epilogue.activation](v + residual * (text != "bias.silu.residual"))
        assert got[n, k, o] == pytest.approx(v + residual * (text == "bias.silu.residual"), rel=1e-12)
    indices = np.array([3, 17, 29])
    listed = apply_epilogue(problem, sums.reshape(-1)[indices], operands, NUMBERS, indices)
    assert listed.tolist() == got.reshape(-1)[indices].tolist()


def problem_shape(problem: ProblemDescription, name: str) -> tuple[int, ...]:
    return next(operand.shape for operand in problem.operands if operand.name == name)
