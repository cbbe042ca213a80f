"""What fused problems are tried with: values of their epilogue's operands, and its numbers."""

from __future__ import annotations

import functools
import math

from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.core.values import Values

_PLAIN = EpilogueParameters(alpha=1.5, beta=0.5, low=-0.5, high=1.25, slope=0.125)
_SHIFTED = EpilogueParameters(alpha=-0.75, beta=1.5, low=0.5, high=3.0, slope=0.25)


def operand_values(name: str, values: Values, *, shifted: bool) -> Values:
    """The distribution of an epilogue's operand where the convolution's inputs have `values`.

    Args:
        shifted: they are positive, so that few results lie where an activation has them all alike; but what a
            derivative is taken at has both signs always.
    """
    if name == "saved":
        return Values.EDGES if values is Values.TERNARY else values
    if shifted:
        return Values.POSITIVE
    return Values.DYADIC if values is Values.TERNARY else values


@functools.lru_cache(maxsize=256)  # asked for at each run of a problem's candidates
def trial_parameters(problem: ProblemDescription, values: Values, *, shifted: bool) -> EpilogueParameters:
    """Numbers of an epilogue for inputs of a distribution: multiples of powers of two, none of them a default.

    NORMAL inputs without a shift go with the defaults, which a library may have made a plan of their own for.

    Alpha brings the sums of TERNARY inputs to a standard deviation of about 1, where activations are curved; NORMAL
    inputs are scaled (`ranges.numeric_powers`). Where summands are shifted it is negative: what the activation cut off
    without the shift, it lets pass then.
    """
    if not problem.epilogue.changes_results:
        return DEFAULT_PARAMETERS
    if values is not Values.TERNARY:
        return _SHIFTED if shifted else DEFAULT_PARAMETERS
    parameters = _SHIFTED if shifted else _PLAIN
    return EpilogueParameters(
        alpha=math.ldexp(parameters.alpha, -sum_exponent(problem, variance=4 / 9)),
        beta=parameters.beta,
        low=parameters.low,
        high=parameters.high,
        slope=parameters.slope,
    )


def sum_exponent(problem: ProblemDescription, variance: float = 1.0) -> int:
    """Exponent of the power of two next to the standard deviation of sums of products of that variance; at least 0."""
    return max(0, round(math.log2(problem.reduction_length * variance) / 2))
