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

from miofind.problem import DataType, Direction, ProblemDescription

# Normal values are below 2**3, and sums of K products below 8 * sqrt(K): what exceeds eight standard deviations has
# a chance of 1e-15.
_SUM_BITS = 3
# Values of float16 are multiples of 2**-12 (random_inputs.cu), so that they stay exact when they are divided by 2**12:
# a fifth of them are subnormal then.
_FLOAT16 = 12
_FLOAT16_LARGEST = 15
_OVERFLOW = 4
# A third of float32's and bfloat16's range of exponents either way: what transforms and split products need of it is
# left to them. The lesser parts of split operands are 2**-22 times the greater ones and must be normal numbers, too.
_WIDE = {DataType.FLOAT32: 48, DataType.BFLOAT16: 48, DataType.FLOAT64: 160}


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
class Axis:
    """The axis of an input that it shares with the output, where it is dimension 0 (first input) or 1 (second).

    Attributes:
        dimension: of the input.
        size: coordinates count anew after so many, the channels of a group.
    """

    dimension: int
    size: int


def axes(problem: ProblemDescription) -> tuple[Axis, Axis]:
    """The axes of the direction's inputs."""
    channels = problem.c // problem.groups
    if problem.direction is Direction.FORWARD:
        return Axis(dimension=0, size=problem.n), Axis(dimension=0, size=problem.k)
    if problem.direction is Direction.BACKWARD_DATA:
        return Axis(dimension=0, size=problem.n), Axis(dimension=1, size=channels)
    return Axis(dimension=1, size=problem.k), Axis(dimension=1, size=channels)


def exponents_along(pair: tuple[int, int], axis: Axis, coordinates: NDArray[np.int64]) -> NDArray[np.int32]:
    """The power of two at each coordinate of an axis."""
    return np.where(coordinates % axis.size % 2 == 0, pair[0], pair[1]).astype(np.int32)


def numeric_powers(problem: ProblemDescription) -> Powers:
    """Powers of two for plain inputs: none, unless sums of normal ones could exceed the output's type."""
    room = min(0, _room(problem))
    first, second = room // 2, room - room // 2
    return Powers(first=(first, first), second=(second, second))


def range_powers(problem: ProblemDescription) -> tuple[Powers, ...]:
    """Powers of two that make each input large and small, and the results.

    Where a tensor is float16: inputs up to 2**14 and down to its least number 2**-24, results up to 2**15, beyond it
    (they are infinite) and down to the subnormal ones. Else inputs of 2**48 and 2**-48 and results of 2**96 and 2**-96
    (2**160 and 2**320 in float64). Subnormal numbers of those types are left to the hardware.
    """
    first, second = (problem.tensor(name).dtype for name in problem.direction.inputs)
    if DataType.FLOAT16 not in (first, second, problem.output.dtype):
        wide = Powers(first=(_WIDE[first], -_WIDE[first]), second=(_WIDE[second], -_WIDE[second]))
        swapped = Powers(first=wide.first[::-1], second=wide.second[::-1])
        return (wide,) if all(axis.size > 1 for axis in axes(problem)) else (wide, swapped)
    room = min(2 * _FLOAT16 - _OVERFLOW, _room(problem))
    return (
        Powers(first=(_FLOAT16, -_FLOAT16), second=(room - _FLOAT16, -_FLOAT16)),
        Powers(first=(-_FLOAT16, room + _OVERFLOW - _FLOAT16), second=(-_FLOAT16, _FLOAT16)),
    )


def _room(problem: ProblemDescription) -> int:
    """Powers of two by which results may grow before they exceed a float16 output; plenty for others."""
    if problem.output.dtype is not DataType.FLOAT16:
        return 2 * _FLOAT16
    return _FLOAT16_LARGEST - _SUM_BITS - math.ceil(math.log2(problem.reduction_length) / 2)
