"""Powers of two to scale the inputs by, so that a check covers the magnitudes that the data types can hold.

Scaling by powers of two is exact: the reference of scaled inputs is the scaled reference. Each input is scaled along
the axis that it shares with the output (forward: n of x, k of w), by one power at even coordinates and another at odd
ones. One tensor then holds large and small numbers, and no sum mixes them: no sum runs along that axis.

An epilogue adds to the sums what is not scaled: its exact sums are not scaled either, and the reference of others is
the epilogue of the scaled sums.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.verify.epilogue_trials import sum_exponent

# Sums of K products of normal values stay below 2**3 * sqrt(K): eight standard deviations, exceeded with probability
# 1e-15.
_SUM_BITS = 3
# Exponents of float16: of its largest numbers, of its smallest subnormal one, and of the grid that normal values are
# rounded to (harness/random_inputs.cu). Values on the grid stay exact when scaled by 2**-12, where a fifth of them are
# subnormal.
_FLOAT16_LARGEST = 15
_FLOAT16_LEAST = -24
_FLOAT16_GRID = -12
# Exponent added to the largest scaling of small integers, so that their sums overflow float16 at times: their standard
# deviation is then 2/3 to 4/3 of its largest number, and 4 % to 70 % of the sums overflow (padding lowers the share).
_OVERFLOW = _SUM_BITS + 2
# Scaling of normal values in other types: (even, odd) powers of the first input and of the second. They use a third of
# the exponent range either way. The rest is left to algorithms that need some: transforms, and split operands, whose
# lower parts are 2**-22 times the upper ones and must be normal numbers, too.
_WIDE = {
    DataType.FLOAT32: ((-80, 16), (-16, 80)),
    DataType.BFLOAT16: ((-80, 16), (-16, 80)),
    DataType.FLOAT64: ((-300, 20), (-20, 300)),
}
# Scaling of normal values before an epilogue, but for the length of sums: the first input of sums of size 1, then the
# inputs of sums of several sizes, a single image's of size 1 and of the largest.
_BEFORE_EPILOGUE = 40
_FUSED = ((16, -80), (-16, 80))
_FUSED_FLOAT16 = ((-2, -12), (2, 12))
# Scaling of small integers in other types. _SUBNORMAL: some inputs are large and some subnormal, and the product of the
# two is a normal number. _NORMAL: neither inputs nor products are subnormal.
_SUBNORMAL = {
    DataType.FLOAT32: ((88, -130), (12, -130)),
    DataType.BFLOAT16: ((88, -130), (12, -130)),
    DataType.FLOAT64: ((900, -1040), (100, -1040)),
}
_NORMAL = {
    DataType.FLOAT32: ((88, -60), (12, -60)),
    DataType.BFLOAT16: ((88, -60), (12, -60)),
    DataType.FLOAT64: ((900, -500), (100, -500)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Powers:
    """Powers of two that scale the two inputs of a direction.

    Attributes:
        first, second: exponents at (even, odd) coordinates of the input's `ScaledAxis`, of the direction's first and
            second input.
    """

    first: tuple[int, int] = (0, 0)
    second: tuple[int, int] = (0, 0)

    @property
    def pairs(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The exponents of both inputs, in the direction's order."""
        return (self.first, self.second)

    def __bool__(self) -> bool:
        return any(self.first) or any(self.second)


UNSCALED = Powers()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledAxis:
    """The axis along which an input is scaled: the one that it shares with the output.

    It is dimension 0 of the output for the first input, dimension 1 for the second.

    Attributes:
        dimension: dimension of the input.
        size: length after which even and odd are counted anew: the channels of a group where groups lie along the axis.
    """

    dimension: int
    size: int


@functools.lru_cache(maxsize=256)  # asked for at each launch of a problem's checks
def axes(problem: ProblemDescription) -> tuple[ScaledAxis, ScaledAxis]:
    """The scaled axes of the direction's first and second input."""
    channels = problem.c // problem.groups
    if problem.direction is Direction.FORWARD:
        return ScaledAxis(dimension=0, size=problem.n), ScaledAxis(dimension=0, size=problem.k)
    if problem.direction is Direction.BACKWARD_DATA:
        return ScaledAxis(dimension=0, size=problem.n), ScaledAxis(dimension=1, size=channels)
    return ScaledAxis(dimension=1, size=problem.k), ScaledAxis(dimension=1, size=channels)


def exponents_along(pair: tuple[int, int], axis: ScaledAxis, coordinates: NDArray[np.int64]) -> NDArray[np.int32]:
    """The exponent of the scaling at each coordinate of an axis."""
    return np.where(coordinates % axis.size % 2 == 0, pair[0], pair[1]).astype(np.int32)


def exact_powers(problem: ProblemDescription, *, subnormal: bool = True) -> Powers:
    """Scaling of the exact gate's inputs, drawn from {-1, 0, 1}: results stay exact at every scale.

    Each input holds large numbers beside the smallest of its type, subnormal ones included. Float16 results overflow to
    infinity, lie at the upper end of the range, and among and below the subnormal numbers. Results of other types are
    large, small, or far below the smallest number: there a solver may flush subnormal results to zero. None before an
    epilogue, whose operands could not be added exactly.

    Args:
        subnormal: whether inputs of types other than float16 hold subnormal numbers.
    """
    if problem.epilogue:
        return UNSCALED
    first, second = (problem.tensor(name).dtype for name in problem.direction.inputs)
    if not _has_float16(problem):
        powers = _SUBNORMAL if subnormal else _NORMAL
        return Powers(first=powers[first][0], second=powers[second][1])
    large = _FLOAT16_LARGEST - 1
    return Powers(first=(large, _FLOAT16_LEAST), second=(_room(problem) + _OVERFLOW - large, _FLOAT16_LEAST))


def numeric_powers(problem: ProblemDescription) -> Powers:
    """Scaling of the numeric gate's inputs, normally distributed: results have full precision, as without scaling.

    Float16: the first input is small and the second large, so that results are of ordinary size; they are scaled down
    only where unscaled ones could overflow. Other types: results go up to 2**96 and down to 2**-96 (2**320 in float64).
    They are small where `exact_powers` makes them large, so that a small absolute error shows in one of the two gates.
    Before an epilogue all sums are of size 1, where activations are curved, of one small input and a large one.
    """
    if problem.epilogue:
        first = _FLOAT16_GRID if _has_float16(problem) else -_BEFORE_EPILOGUE
        second = -first - sum_exponent(problem)
        return Powers(first=(first, first), second=(second, second))
    if not _has_float16(problem):
        return _wide(problem)
    first, second = _FLOAT16_GRID, min(0, _room(problem)) - _FLOAT16_GRID  # never below the grid: inputs stay exact
    return Powers(first=(first, first), second=(second, second))


def range_powers(problem: ProblemDescription) -> Powers:
    """Scaling of the range gate's inputs, normally distributed: the magnitudes that `numeric_powers` leaves out.

    It is for candidates that skip the exact gate, and for fused ones. Float16: the first input is large at even
    coordinates and small at odd ones, the second is small; results go up to 2**15 and down to subnormal numbers. Other
    types: as in `numeric_powers`, with even and odd coordinates exchanged. Before an epilogue sums are as in
    `numeric_powers` and far above and below that: by 2**10 and 2**-10 in float16, by 2**96 and 2**-96 in other types.
    """
    if problem.epilogue:
        return _before_epilogue(problem)
    if not _has_float16(problem):
        wide = _wide(problem)
        return Powers(first=wide.first[::-1], second=wide.second[::-1])
    large, room = -_FLOAT16_GRID, _room(problem)
    return Powers(first=(large + min(0, room), _FLOAT16_GRID), second=(max(0, room) - large, _FLOAT16_GRID))


def _before_epilogue(problem: ProblemDescription) -> Powers:
    first, (even, odd) = _FUSED_FLOAT16 if _has_float16(problem) else _FUSED
    least = sum_exponent(problem)
    return Powers(first=first, second=(even - least, odd - least))


def _wide(problem: ProblemDescription) -> Powers:
    first, second = (_WIDE[problem.tensor(name).dtype] for name in problem.direction.inputs)
    return Powers(first=first[0], second=second[1])


def _has_float16(problem: ProblemDescription) -> bool:
    return DataType.FLOAT16 in (problem.x.dtype, problem.w.dtype, problem.y.dtype)


def _room(problem: ProblemDescription) -> int:
    """Exponent by which results may grow before a float16 output overflows; never negative for other output types."""
    room = _FLOAT16_LARGEST - _SUM_BITS - math.ceil(math.log2(problem.reduction_length) / 2)
    return room if problem.output.dtype is DataType.FLOAT16 else max(0, room)
