"""How far a correct convolution may be from the exact one: error bounds from the types and the reduction length.

The bound of one output element is `growth * direct_error(problem) * sqrt(x^2 * w^2) + rounding of the output`, where
`x^2 * w^2` is the convolution of the squares. Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, MathMode, ProblemDescription

# Simulated sums of K normal products, K = 1 ... 9216, up to 2e5 outputs each (test_accuracy.py repeats a part): the
# largest error in units of u * sqrt(K) * sqrt(x^2 * w^2) was 3.1 with rounding to nearest, at every K.
_SUMMATION = 8.0
# Tensor cores truncate the running sum once a step of 4 to 16 products, so that a long sum drifts towards zero: with
# steps of 4 the largest error was 21.5 * sqrt(K) at K = 9216, that is 0.9 * K / 4, growing with K and not with sqrt(K).
# Source: "FTTN: Feature-Targeted Testing for Numerical Properties of NVIDIA & AMD Matrix Accelerators", 2024, table 4.
_TRUNCATION = 0.5
# TF32 keeps 10 mantissa bits of each input; kernels that pass float32 bits untouched truncate, which biases every
# product alike: the largest simulated error was 7.3 * 2**-11 * sqrt(x^2 * w^2), whatever K.
_TF32_INPUTS = 16.0

_ROUNDOFF_FLOAT32 = 2.0**-24
_ROUNDOFF_FLOAT64 = 2.0**-53
_ROUNDOFF_TF32 = 2.0**-11
_LEAST_EXPONENT = {
    DataType.FLOAT64: -1022,
    DataType.FLOAT32: -126,
    DataType.FLOAT16: -14,
    DataType.BFLOAT16: -126,
}
_LARGEST_EXPONENT = {
    DataType.FLOAT64: 1023,
    DataType.FLOAT32: 127,
    DataType.FLOAT16: 15,
    DataType.BFLOAT16: 127,
}


def direct_error(problem: ProblemDescription) -> float:
    """Largest error of direct summation before the output is rounded, in units of sqrt(x^2 * w^2) of the element.

    A solver whose documented error is `e` in the same units declares a growth of `e / direct_error(problem)`.
    """
    length = problem.reduction_length
    dtypes = {problem.x.dtype, problem.w.dtype, problem.y.dtype}
    if problem.accumulator is DataType.FLOAT64:
        # Twice, because the reference is no more exact than the candidate.
        return 2 * _ROUNDOFF_FLOAT64 * _SUMMATION * math.sqrt(length)
    if dtypes == {DataType.FLOAT32} and problem.math is MathMode.IEEE:
        return _ROUNDOFF_FLOAT32 * _SUMMATION * math.sqrt(length)
    summation = _ROUNDOFF_FLOAT32 * (_SUMMATION * math.sqrt(length) + _TRUNCATION * length)
    if problem.math is MathMode.TF32:
        return _ROUNDOFF_TF32 * _TF32_INPUTS + summation
    return summation


def half_ulp(values: NDArray[np.float64], dtype: DataType) -> NDArray[np.float64]:
    """Largest error of rounding each value to `dtype`; half the spacing of the subnormals below the least normal."""
    _, exponent = np.frexp(values)
    least = _LEAST_EXPONENT[dtype]
    exponent = np.where(values == 0, least, np.maximum(exponent - 1, least))
    half: NDArray[np.float64] = np.ldexp(1.0, exponent - dtype.mantissa_bits - 1)
    return half


def overflow(dtype: DataType) -> float:
    """The least number that rounds to infinity."""
    largest = _LARGEST_EXPONENT[dtype]
    return math.ldexp(2.0 - 2.0 ** -(dtype.mantissa_bits + 1), largest) if largest < 1023 else math.inf


def least_exponent(dtype: DataType) -> int:
    """Exponent of the least normal number."""
    return _LEAST_EXPONENT[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBounds:
    """Bound of |error| of each element, in two parts: of the arithmetic, and of rounding to the output's dtype."""

    arithmetic: NDArray[np.float64]
    rounding: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        """The sum of the parts."""
        return self.arithmetic + self.rounding


def error_bounds(
    sums: NDArray[np.float64], squares: NDArray[np.float64], factor: float, dtype: DataType
) -> ErrorBounds:
    """Bounds of elements.

    Args:
        sums: x * w in float64.
        squares: x^2 * w^2 in float64, of the same shape.
        factor: `growth * direct_error(problem)`.
        dtype: the output's.
    """
    arithmetic = factor * np.sqrt(squares)
    # The unrounded result may lie beyond a power of two that the reference lies below, hence the sum.
    return ErrorBounds(arithmetic=arithmetic, rounding=half_ulp(np.abs(sums) + arithmetic, dtype))
