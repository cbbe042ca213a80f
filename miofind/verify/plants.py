"""Where infinities and NaN are planted in an input, to see that they reach the results that sum them and no others.

Pure index arithmetic on logical shapes; knows nothing of devices or buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.problem import Direction, ProblemDescription
from miofind.tensor import TensorDescriptor

_MOST = 8
_LEAST_UNTOUCHED = 4
_VALUES = (math.inf, math.nan, -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plants:
    """Elements of one tensor that are not finite.

    Attributes:
        index: coordinates, an array a dimension.
        places: the same elements' places in memory.
        values: an infinity or NaN each.
    """

    index: tuple[NDArray[np.int64], ...]
    places: NDArray[np.int64]
    values: NDArray[np.float64]


def plants_of(problem: ProblemDescription, random: np.random.Generator) -> dict[str, Plants]:
    """The plants of each input that has some: at its borders and anywhere, so few that most results meet none.

    An image (x, or dy for backward data) has one at least. Zeros of the padding, or between strided gradients, make 0
    or NaN of an infinity in the other operand, and neither is promised: that has plants only where they meet no zeros.
    """
    image = "y" if problem.direction is Direction.BACKWARD_DATA else "x"
    other = next(name for name in problem.direction.inputs if name != image)
    plants = {image: _drawn(problem.tensor(image), max(1, _count(problem, image)), None, random)}
    inner = _coordinates_without_padding(problem)
    count = _count(problem, other)
    if count and all(at.size for at in inner):
        plants[other] = _drawn(problem.tensor(other), count, inner, random)
    return plants


def _coordinates_without_padding(problem: ProblemDescription) -> list[NDArray[np.int64]]:
    """By spatial dimension, coordinates of the operand that is no image which meet no zeros of padding or strides."""
    conv, found = problem.conv, []
    for i, (size, taps, out) in enumerate(zip(problem.spatial, problem.filter, problem.out_spatial, strict=True)):
        pad, stride, dilation = conv.pad_before[i], conv.stride[i], conv.dilation[i]
        if problem.direction is Direction.FORWARD:
            tap = np.arange(taps, dtype=np.int64) * dilation - pad
            found.append(np.flatnonzero((tap >= 0) & ((out - 1) * stride + tap < size)))
        elif problem.direction is Direction.BACKWARD_DATA:
            tap = pad - np.arange(taps, dtype=np.int64) * dilation
            found.append(np.flatnonzero((stride == 1) & (tap >= 0) & (size - 1 + tap < out)))
        else:
            start = np.arange(out, dtype=np.int64) * stride - pad
            found.append(np.flatnonzero((start >= 0) & (start + (taps - 1) * dilation < size)))
    return found


def _count(problem: ProblemDescription, name: str) -> int:
    """Plants of a tensor that leave three quarters of the results untouched."""
    return min(_MOST, problem.output.size // (_LEAST_UNTOUCHED * _reach(problem, name)))


def _reach(problem: ProblemDescription, name: str) -> int:
    """Results that one element of an input has a part in, at most."""
    taps, groups = math.prod(problem.filter), problem.groups
    c, k = problem.c // groups, problem.k // groups
    reach = {
        Direction.FORWARD: {"x": taps * k, "w": problem.n * math.prod(problem.out_spatial)},
        Direction.BACKWARD_DATA: {"y": taps * c, "w": problem.n * math.prod(problem.spatial)},
        Direction.BACKWARD_WEIGHTS: {"y": taps * c, "x": taps * k},
    }
    return reach[problem.direction][name]


def _drawn(
    tensor: TensorDescriptor, count: int, inner: list[NDArray[np.int64]] | None, random: np.random.Generator
) -> Plants:
    """Plants at random coordinates, of the spatial ones at those listed where they are."""
    allowed = [np.arange(size, dtype=np.int64) for size in tensor.shape]
    if inner is not None:
        allowed[2:] = inner
    index = tuple(np.unique(np.stack([_chosen(at, count, random) for at in allowed]), axis=1))
    places = np.array(tensor.strides, dtype=np.int64) @ np.stack(index)
    start = int(random.integers(len(_VALUES)))
    values = [_VALUES[(start + i) % len(_VALUES)] for i in range(places.size)]
    return Plants(index=index, places=places, values=np.array(values))


def _chosen(allowed: NDArray[np.int64], count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`count` of the coordinates: first, last or any, with equal chances."""
    positions = np.stack(
        [np.zeros(count, np.int64), np.full(count, allowed.size - 1), random.integers(0, allowed.size, count)]
    )
    chosen: NDArray[np.int64] = np.take_along_axis(positions, random.integers(0, 3, (1, count)), axis=0)[0]
    return allowed[chosen]
