"""What an epilogue is: the reference in float64, on the host.

`kernels_src/common/epilogue.cuh` computes the same in the accumulator's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.epilogue import DEFAULT_PARAMETERS, EPILOGUE_TENSORS, Activation, EpilogueParameters, ResidualPosition
from miofind.core.problem import ProblemDescription


def apply_epilogue(
    problem: ProblemDescription,
    sums: NDArray[np.float64],
    operands: Mapping[str, NDArray[Any]],
    parameters: EpilogueParameters = DEFAULT_PARAMETERS,
    indices: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """What a problem's epilogue makes of its convolution's sums, in float64.

    Args:
        sums: of the whole output in its shape, or of the listed elements.
        operands: by name, those that the epilogue reads, in any dtype and the shapes that `Operand.shape` says.
        parameters: its numbers.
        indices: flat logical indices of the output elements that the sums are of; all if left out.
    """
    v = before_activation(problem, sums, operands, parameters, indices)
    if problem.epilogue.derivative is not Activation.NONE:
        saved = along_output(problem, "saved", operands, indices)
        return differentiated(v, saved, problem.epilogue.derivative, parameters)
    v = activated(v, problem.epilogue.activation, parameters)
    if problem.epilogue.residual is not ResidualPosition.AFTER:
        return v
    with np.errstate(all="ignore"):  # whatever the caller has NumPy do
        return v + parameters.beta * along_output(problem, "residual", operands, indices)


def before_activation(
    problem: ProblemDescription,
    sums: NDArray[np.float64],
    operands: Mapping[str, NDArray[Any]],
    parameters: EpilogueParameters,
    indices: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """What a problem's activation is given of its convolution's sums, or what its derivative is multiplied by.

    In float64; arguments as in `apply_epilogue`.
    """
    epilogue = problem.epilogue
    with np.errstate(all="ignore"):  # whatever the caller has NumPy do
        v = parameters.alpha * sums
        if epilogue.scale:
            v = v * along_output(problem, "scale", operands, indices)
        for name in ("bias", "channel_bias"):
            if getattr(epilogue, name):
                v = v + along_output(problem, name, operands, indices)
        if epilogue.residual is ResidualPosition.BEFORE:
            v = v + parameters.beta * along_output(problem, "residual", operands, indices)
    return v


def along_output(
    problem: ProblemDescription,
    name: str,
    operands: Mapping[str, NDArray[Any]],
    indices: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """An epilogue's operand as each element of the output meets it, or as the listed ones do, in float64."""
    shape = problem.output.shape
    operand = np.asarray(operands[name], dtype=np.float64)
    ones = (1,) * (len(shape) - 2)
    if name not in EPILOGUE_TENSORS:
        operand = operand.reshape((1,) * (operand.ndim == 1) + operand.shape + ones)
    wide = np.broadcast_to(operand, shape)
    return wide if indices is None else wide[np.unravel_index(indices, shape)]


def activated(
    v: NDArray[np.float64], activation: Activation, parameters: EpilogueParameters = DEFAULT_PARAMETERS
) -> NDArray[np.float64]:
    """An activation of each value in float64; NaN stays NaN. The formulas: `Activation`."""
    _, _, first, second = parameters.numbers(activation)
    with np.errstate(all="ignore"):
        below = v < 0
        formulas: dict[Activation, Callable[[], NDArray[np.float64]]] = {
            Activation.NONE: lambda: v,
            Activation.RELU: lambda: np.where(below, 0.0, v),
            Activation.CLAMP: lambda: np.where(v < first, first, np.where(v > second, second, v)),
            Activation.LEAKY_RELU: lambda: np.where(below, first * v, v),
            Activation.SILU: lambda: _times(v, _sigmoid(v)),
            Activation.GELU: lambda: _times(v, 0.5 * _erfc(-v * math.sqrt(0.5))),
            Activation.GELU_TANH: lambda: _times(v, _sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
            Activation.HARDSWISH: lambda: _times(v, np.clip(v + 3, 0, 6) / 6),
            Activation.SIGMOID: lambda: _sigmoid(v),
            Activation.TANH: lambda: np.tanh(v),
            Activation.ELU: lambda: np.where(below, first * np.expm1(np.minimum(v, 0)), v),
            Activation.MISH: lambda: _times(v, np.tanh(np.logaddexp(0, v))),
        }
        return formulas[activation]()


def differentiated(
    v: NDArray[np.float64],
    saved: NDArray[np.float64],
    activation: Activation,
    parameters: EpilogueParameters = DEFAULT_PARAMETERS,
) -> NDArray[np.float64]:
    """Each value times the derivative of an activation at what was saved, in float64; PyTorch's definitions.

    Where relu, clamp and hardswish are flat the result is 0, whatever v is; their bounds are flat, too. They keep v
    where `saved` is NaN, and leaky_relu multiplies by its slope there. At infinities of `saved` it is the limit.
    """
    _, _, first, second = parameters.numbers(activation)
    with np.errstate(all="ignore"):
        formulas: dict[Activation, Callable[[], NDArray[np.float64]]] = {
            Activation.RELU: lambda: np.where(saved <= 0, 0.0, v),
            Activation.CLAMP: lambda: np.where((saved <= first) | (saved >= second), 0.0, v),
            Activation.LEAKY_RELU: lambda: np.where(saved > 0, v, v * first),
            Activation.HARDSWISH: lambda: np.where(saved <= -3, 0.0, np.where(saved < 3, v * (saved / 3 + 0.5), v)),
        }
        if activation in formulas:
            return formulas[activation]()
        factor, summand = derivative_terms(saved, activation)
        return _times(v, factor + summand)


def derivative_terms(
    saved: NDArray[np.float64], activation: Activation
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The two summands of a derivative, in float64: of x * f(x) those are f(x) and x * f'(x).

    Of activations that are their argument times a factor between 0 and 1: silu, gelu, gelu_tanh, hardswish.
    """
    with np.errstate(all="ignore"):
        if activation is Activation.HARDSWISH:
            return np.full_like(saved, 0.5), saved / 3
        if activation is Activation.GELU:
            return 0.5 * _erfc(-saved * math.sqrt(0.5)), _times(saved, np.exp(-0.5 * saved**2) / math.sqrt(2 * math.pi))
        if activation is Activation.SILU:
            return _sigmoid(saved), _times(saved, _sigmoid(saved) * _sigmoid(-saved))
        scale = 2 * math.sqrt(2 / math.pi)
        cubic, slope = scale * (saved + 0.044715 * saved**3), scale * (1 + 3 * 0.044715 * saved**2)
        return _sigmoid(cubic), _times(saved * slope, _sigmoid(cubic) * _sigmoid(-cubic))


def _times(v: NDArray[np.float64], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """v * factor, 0 where the factor is: minus infinity goes to 0 as the large negative numbers before it do."""
    return np.where(factor == 0, 0.0, v * factor)


def _sigmoid(v: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-v)) without overflow."""
    small = np.exp(-np.abs(v))
    return np.where(v < 0, small, 1.0) / (1.0 + small)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])
