"""How far a correct fused convolution may be from the exact one: an error bound's way through an epilogue.

The sums' bound is that of `accuracy.py`. It is multiplied by what the epilogue multiplies the sums by and by the
activation's largest slope; to that come the epilogue's own roundings and the error of the activation, which is declared
here once for each. A derivative multiplies the bound by itself, and adds its own error.
kernels_src/harness/epilogue.cu computes the same on a GPU. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.epilogue import Activation, EpilogueParameters, ResidualPosition
from miofind.core.problem import DataType, ProblemDescription
from miofind.reference.convolution import round_once
from miofind.reference.epilogue import activated, along_output, before_activation, derivative_terms, differentiated
from miofind.verify.accuracy import half_ulp

Wide = NDArray[np.float64]

# Of alpha * sum, * scale, + bias, + channel_bias, beta * residual and its sum; behind the activation the last two.
_ROUNDINGS = 6.0
_LATER_ROUNDINGS = 3.0
# Of float64 twice, because the reference is no more exact than the candidate.
_ROUNDOFF = {DataType.FLOAT32: 2.0**-24, DataType.FLOAT64: 2.0**-52}
# Results this small are as good as 0: factors of theirs may be subnormal.
_TINY = {DataType.FLOAT32: 2.0**-120, DataType.FLOAT64: 2.0**-1000}
# Sums of so many products of small integers leave the epilogue bits for its own, of the 24 of float32.
_MOST_EXACT_PRODUCTS = 1 << 18

# Relative errors of the formulas in kernels_src/common/epilogue.cuh in units of the accumulator's roundoff: a constant,
# and a part that grows with the exponent of e^-exponent in the result (`_exponents`). The CUDA programming guide bounds
# expf by 2 ulp (4 roundoffs), erfcf by 4, tanhf by 2 and expm1f by 1, PTX ex2.approx by 2 and rcp.approx by 1; the
# argument of gelu's erfc is off by 2 roundoffs and that of gelu_tanh's exponential by 7, which the exponent multiplies.
_ACTIVATION_ERRORS = {
    Activation.SILU: (16.0, 4.0),
    Activation.GELU: (16.0, 6.0),
    Activation.GELU_TANH: (16.0, 10.0),
    Activation.HARDSWISH: (8.0, 0.0),
    Activation.SIGMOID: (16.0, 4.0),
    Activation.TANH: (8.0, 0.0),
    Activation.ELU: (8.0, 0.0),
    Activation.MISH: (20.0, 4.0),
}
# The same where results are rounded to 16 bits, half a unit of which is 2^-12 at least, by kernels_src/common/
# activation.cuh: gelu's factor is 2 to the power of a polynomial, tanh and elu are differences of numbers next to 1
# from a sixteenth and a thirty-second on.
_SHORT_ACTIVATION_ERRORS = _ACTIVATION_ERRORS | {
    Activation.GELU: (512.0, 256.0),
    Activation.TANH: (256.0, 0.0),
    Activation.ELU: (256.0, 0.0),
}
_SHORT_TINY = 2.0**-112
# The same of derivatives, in units of the sum of the magnitudes of their two terms.
_DERIVATIVE_ERRORS = {
    Activation.SILU: (24.0, 4.0),
    Activation.GELU: (24.0, 6.0),
    Activation.GELU_TANH: (32.0, 10.0),
    Activation.HARDSWISH: (4.0, 0.0),
}
# Largest slope, where it is not 1 or the slope given.
_SLOPES = {
    Activation.SILU: 1.09985,
    Activation.GELU: 1.12891,
    Activation.GELU_TANH: 1.12900,
    Activation.HARDSWISH: 1.5,
    Activation.SIGMOID: 0.25,
    Activation.MISH: 1.08850,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueStandard:
    """What the results of a fused problem are held to.

    Attributes:
        factor: bound of the sums' |error| in units of sqrt(x^2 * w^2); 0 where they are exact.
        roundings: of the epilogue up to its activation; 0 where it is exact.
        rounds_sums: the reference rounds the sums to the output's dtype.
        doubts_sums: the bound has room for that rounding.
        bitwise: results must equal the rounded reference.
    """

    factor: float
    roundings: float
    rounds_sums: bool
    doubts_sums: bool
    bitwise: bool

    @staticmethod
    def of(problem: ProblemDescription, factor: float | None, *, rounds_twice: bool) -> EpilogueStandard:
        """The standard of a fused problem.

        Args:
            factor: None where sums and the epilogue's operands are small multiples of powers of two.
            rounds_twice: see `Claims`.
        """
        exact = factor is None and problem.reduction_length <= _MOST_EXACT_PRODUCTS
        return EpilogueStandard(
            factor=factor or 0.0,
            roundings=0.0 if exact else _ROUNDINGS,
            rounds_sums=rounds_twice and factor is None,
            doubts_sums=rounds_twice and factor is not None,
            bitwise=exact and problem.epilogue.nonlinearity.is_exact,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueNumbers:
    """The numbers of a bound that follow from a problem and a run's parameters.

    Attributes:
        slope: largest slope of the activation; 1 before a derivative.
        roundoff: of the accumulator.
        error, error_per_exponent: see `_ACTIVATION_ERRORS` and `_DERIVATIVE_ERRORS`.
        tiny: error of an activation or derivative whatever its result.
        later_roundings: of the activation's result and of what is done after it, or of a derivative's product.
    """

    slope: float
    roundoff: float
    error: float
    error_per_exponent: float
    tiny: float
    later_roundings: float

    @staticmethod
    def of(problem: ProblemDescription, parameters: EpilogueParameters) -> EpilogueNumbers:
        """The numbers of a problem and a run's parameters."""
        activation, derivative = problem.epilogue.activation, problem.epilogue.derivative
        is_short, tiny = problem.output.dtype.itemsize == 2, _TINY[problem.accumulator]
        if derivative is not Activation.NONE:
            error, per_exponent = _DERIVATIVE_ERRORS.get(derivative, (0.0, 0.0))
        else:
            errors = _SHORT_ACTIVATION_ERRORS if is_short else _ACTIVATION_ERRORS
            error, per_exponent = errors.get(activation, (0.0, 0.0))
            tiny = _SHORT_TINY if is_short else tiny
        return EpilogueNumbers(
            slope=largest_slope(activation, parameters),
            roundoff=_ROUNDOFF[problem.accumulator],
            error=error,
            error_per_exponent=per_exponent,
            tiny=0.0 if problem.epilogue.nonlinearity.is_exact else tiny,
            later_roundings=_LATER_ROUNDINGS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BareSums:
    """x * w, |x| * |w| and x^2 * w^2 of some elements of an output."""

    sums: Wide
    magnitudes: Wide
    squares: Wide


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedResults:
    """What an epilogue makes of sums.

    Attributes:
        wanted: the results, not rounded.
        magnitudes: sums of the magnitudes of all that is summed in one, before the activation and after it.
        arithmetic: bounds of |error| before the results are rounded.
    """

    wanted: Wide
    magnitudes: Wide
    arithmetic: Wide


def fused_results(
    problem: ProblemDescription,
    bare: BareSums,
    operands: Mapping[str, NDArray[Any]],
    parameters: EpilogueParameters,
    standard: EpilogueStandard,
    indices: NDArray[np.int64] | None = None,
) -> FusedResults:
    """The results of a fused problem and their bounds.

    Args:
        bare: of the listed elements, or of all, flat.
        operands: the epilogue's, by name.
        parameters: the run's.
        standard: what the results are held to.
        indices: flat logical indices of the elements; all if left out.
    """
    flat = np.arange(problem.output.size) if indices is None else indices
    with np.errstate(all="ignore"):  # infinities are among the sums
        sums = _rounded(bare.sums, problem.output.dtype) if standard.rounds_sums else bare.sums
        v = before_activation(problem, sums, operands, parameters, flat)
        size = _sizes(problem, operands, parameters, flat)
        numbers = EpilogueNumbers.of(problem, parameters)
        spread = standard.factor * np.sqrt(bare.squares)
        if standard.doubts_sums:
            spread = spread + half_ulp(np.abs(sums) + spread, problem.output.dtype)
        rounding = standard.roundings * numbers.roundoff * (size.factor * np.abs(sums) + size.summands)
        spread = np.where(np.isfinite(v), size.factor * spread + rounding, 0.0)
        if problem.epilogue.derivative is Activation.NONE:
            result = activated(v, problem.epilogue.activation, parameters)
            error = numbers.slope * spread + _activation_error(problem, v, result, numbers)
        else:
            saved = along_output(problem, "saved", operands, flat)
            result = differentiated(v, saved, problem.epilogue.derivative, parameters)
            error = _derivative_error(problem, saved, _Doubtful(v, spread), numbers, parameters)
        later = numbers.later_roundings * numbers.roundoff * (np.abs(result) + size.later)
        return FusedResults(
            wanted=result + size.residual_after,
            magnitudes=size.factor * bare.magnitudes + size.summands + size.later,
            arithmetic=error + later,
        )


def largest_slope(activation: Activation, parameters: EpilogueParameters) -> float:
    """By how much an activation's results differ at most, over the difference of its arguments."""
    if activation in (Activation.LEAKY_RELU, Activation.ELU):
        return max(1.0, abs(parameters.numbers(activation)[2]))
    return _SLOPES.get(activation, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Magnitudes of what an epilogue does to each element: its factor, its summands before and after the activation."""

    factor: Wide
    summands: Wide
    later: Wide
    residual_after: Wide


def _sizes(
    problem: ProblemDescription,
    operands: Mapping[str, NDArray[Any]],
    parameters: EpilogueParameters,
    indices: NDArray[np.int64],
) -> _Sizes:
    epilogue, nothing = problem.epilogue, np.zeros(indices.shape)
    along = {name: along_output(problem, name, operands, indices) for name in epilogue.operands}
    residual = parameters.beta * along.get("residual", nothing)
    is_after = epilogue.residual is ResidualPosition.AFTER
    before = nothing if is_after else residual
    return _Sizes(
        factor=abs(parameters.alpha) * np.abs(along.get("scale", np.ones(indices.shape))),
        summands=np.abs(along.get("bias", nothing)) + np.abs(along.get("channel_bias", nothing)) + np.abs(before),
        later=np.abs(residual) if is_after else nothing,
        residual_after=residual if is_after else nothing,
    )


def _rounded(sums: Wide, dtype: DataType) -> Wide:
    return round_once(sums, dtype).astype(np.float64)


def _activation_error(problem: ProblemDescription, v: Wide, result: Wide, numbers: EpilogueNumbers) -> Wide:
    relative = numbers.error + numbers.error_per_exponent * _exponents(problem.epilogue.activation, v)
    return np.where(result == 0, 0.0, numbers.roundoff * relative * np.abs(result)) + numbers.tiny


@dataclass(frozen=True, slots=True)
class _Doubtful:
    """Numbers, and how far from them what stands for them may be."""

    v: Wide
    spread: Wide


def _derivative_error(
    problem: ProblemDescription, saved: Wide, of: _Doubtful, numbers: EpilogueNumbers, parameters: EpilogueParameters
) -> Wide:
    """The error of products with a derivative, of which `saved` is an exact argument; 0 where they are not finite."""
    activation = problem.epilogue.derivative
    largest = np.where(np.isfinite(of.v), np.abs(of.v) + of.spread, 0.0)
    if activation.is_exact:
        return np.abs(differentiated(of.spread, saved, activation, parameters))
    factor, summand = derivative_terms(saved, activation)
    magnitude = np.abs(factor) + np.abs(summand)
    if activation is Activation.HARDSWISH:
        magnitude = np.where(np.abs(saved) < 3, magnitude, 0.0)
    relative = numbers.error + numbers.error_per_exponent * _exponents(activation, saved)
    slope = np.abs(differentiated(np.ones_like(saved), saved, activation, parameters))
    error = slope * of.spread + numbers.roundoff * relative * magnitude * largest
    return np.where(np.isfinite(error), error, 0.0) + numbers.tiny


def _exponents(activation: Activation, v: Wide) -> Wide:
    """How large the exponent is of the exponential that an activation multiplies by; 0 where v is positive."""
    below = np.where(v < 0, -v, 0.0)
    if activation is Activation.GELU:
        return np.where(v < 0, below * below / 2 + 0.5, 0.0)
    if activation is Activation.GELU_TANH:
        return 1.5957691216057308 * (below + 0.044715 * below**3)
    return below if activation in (Activation.SILU, Activation.SIGMOID, Activation.MISH) else np.zeros_like(v)
