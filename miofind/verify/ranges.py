"""Which powers of two inputs are multiplied by, so that a candidate meets the magnitudes that its types can hold.

Results of scaled inputs are exact multiples of unscaled ones: they need no reference of their own. An input is scaled
along the axis that it shares with the output, by one power where the coordinate is even and another where it is odd, so
that large and small numbers stand in one tensor and none of them meet in a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, ProblemDescription

# Sums of K normal products are below 8 * sqrt(K): what exceeds eight standard deviations has a chance of 1e-15.
_SUM_BITS = 3
# Float16: its largest exponent, its least number, and the grid on which normal values lie (harness/random_inputs.cu),
# so that they stay exact when they are multiplied by it, though a fifth of them are subnormal then.
_FLOAT16_LARGEST = 15
_FLOAT16_LEAST = -24
_FLOAT16_GRID = -12
# Sums of small integers that are scaled highest have a standard deviation of 2/3 to 4/3 of float16's largest number:
# some 4 % to 70 % of them exceed it, the fewer the more of their products are padding.
_OVERFLOW = _SUM_BITS + 2
# Powers of two of the first input and of the second in other types, by which normal numbers go up to a third of the
# range of exponents either way: what transforms and split products need of it is left to them. The lesser parts of
# split operands are 2**-22 times the greater ones and must be normal numbers, too.
_WIDE = {
    DataType.FLOAT32: ((-80, 16), (-16, 80)),
    DataType.BFLOAT16: ((-80, 16), (-16, 80)),
    DataType.FLOAT64: ((-300, 20), (-20, 300)),
}
# The same for small integers: large ones, and such that are subnormal though their products with large ones are normal
# again; and where neither 1 nor any product is subnormal.
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
    """Powers of two that the inputs of a direction are multiplied by, each at even and at odd coordinates of its axis.

    Attributes:
        first, second: (even, odd) of the direction's first and second input.
    """

    first: tuple[int, int] = (0, 0)
    second: tuple[int, int] = (0, 0)

    @property
    def pairs(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of both inputs in order."""
        return (self.first, self.second)

    def __bool__(self) -> bool:
        return any(self.first) or any(self.second)


UNSCALED = Powers()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledAxis:
    """The axis of an input that it shares with the output, where it is dimension 0 (first input) or 1 (second).

    Attributes:
        dimension: of the input.
        size: coordinates count anew after so many, the channels of a group.
    """

    dimension: int
    size: int


def axes(problem: ProblemDescription) -> tuple[ScaledAxis, ScaledAxis]:
    """The axes of the direction's inputs."""
    channels = problem.c // problem.groups
    if problem.direction is Direction.FORWARD:
        return ScaledAxis(dimension=0, size=problem.n), ScaledAxis(dimension=0, size=problem.k)
    if problem.direction is Direction.BACKWARD_DATA:
        return ScaledAxis(dimension=0, size=problem.n), ScaledAxis(dimension=1, size=channels)
    return ScaledAxis(dimension=1, size=problem.k), ScaledAxis(dimension=1, size=channels)


def exponents_along(pair: tuple[int, int], axis: ScaledAxis, coordinates: NDArray[np.int64]) -> NDArray[np.int32]:
    """The power of two at each coordinate of an axis."""
    return np.where(coordinates % axis.size % 2 == 0, pair[0], pair[1]).astype(np.int32)


def exact_powers(problem: ProblemDescription, *, subnormal: bool = True) -> Powers:
    """Powers of two for inputs from {-1, 0, 1}, whose results are exact at any of them.

    Each input holds the least numbers of its type, or subnormal ones, beside large ones. Results in float16 lie beyond
    its range (they are infinite), at its upper end, and among and below its subnormal numbers. Those of other types are
    large, small, or far below the least number: subnormal results of these may be flushed to zero.

    Args:
        subnormal: whether other types than float16 have subnormal numbers.
    """
    first, second = (problem.tensor(name).dtype for name in problem.direction.inputs)
    if not _has_float16(problem):
        powers = _SUBNORMAL if subnormal else _NORMAL
        return Powers(first=powers[first][0], second=powers[second][1])
    large = _FLOAT16_LARGEST - 1
    return Powers(first=(large, _FLOAT16_LEAST), second=(_room(problem) + _OVERFLOW - large, _FLOAT16_LEAST))


def numeric_powers(problem: ProblemDescription) -> Powers:
    """Powers of two for normal inputs, which leave as many digits to results as unscaled ones would have.

    Float16: the first input is small and the second large, results are neither, but where unscaled ones could exceed
    the type. Other types: one is large and one small, results up to 2**96 and down to 2**-96 (2**320 in float64), small
    where `exact_powers` makes them large, so that what is off by a small number shows in one of the two.
    """
    if not _has_float16(problem):
        return _wide(problem)
    first, second = _FLOAT16_GRID, min(0, _room(problem)) - _FLOAT16_GRID  # never below the grid: inputs stay exact
    return Powers(first=(first, first), second=(second, second))


def range_powers(problem: ProblemDescription) -> Powers:
    """Powers of two for the normal inputs of candidates that are not exact: what `numeric_powers` leaves out.

    Float16: the first input is large and small, the second small, results are up to 2**15 and among the subnormal ones.
    Other types: even and odd coordinates change places.
    """
    if not _has_float16(problem):
        wide = _wide(problem)
        return Powers(first=wide.first[::-1], second=wide.second[::-1])
    large, room = -_FLOAT16_GRID, _room(problem)
    return Powers(first=(large + min(0, room), _FLOAT16_GRID), second=(max(0, room) - large, _FLOAT16_GRID))


def _wide(problem: ProblemDescription) -> Powers:
    first, second = (_WIDE[problem.tensor(name).dtype] for name in problem.direction.inputs)
    return Powers(first=first[0], second=second[1])


def _has_float16(problem: ProblemDescription) -> bool:
    return DataType.FLOAT16 in (problem.x.dtype, problem.w.dtype, problem.y.dtype)


def _room(problem: ProblemDescription) -> int:
    """Powers of two by which results may grow before they exceed a float16 output; few for others, too."""
    room = _FLOAT16_LARGEST - _SUM_BITS - math.ceil(math.log2(problem.reduction_length) / 2)
    return room if problem.output.dtype is DataType.FLOAT16 else max(0, room)
