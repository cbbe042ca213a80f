"""What an epilogue is: the reference in float64, on the host.

`kernels_src/common/epilogue.cuh` computes the same in the accumulator's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.epilogue import DEFAULT_PARAMETERS, Activation, EpilogueParameters, ResidualPosition
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
    """What a problem's activation is given of its convolution's sums, in float64; arguments as in `apply_epilogue`."""
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
    whole = operand if name == "residual" else operand.reshape((1,) * (operand.ndim == 1) + operand.shape + ones)
    wide = np.broadcast_to(whole, shape)
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


def _times(v: NDArray[np.float64], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """v * factor, 0 where the factor is: minus infinity goes to 0 as the large negative numbers before it do."""
    return np.where(factor == 0, 0.0, v * factor)


def _sigmoid(v: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-v)) without overflow."""
    small = np.exp(-np.abs(v))
    return np.where(v < 0, small, 1.0) / (1.0 + small)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])
