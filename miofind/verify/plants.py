"""Where infinities and NaN are planted in an input, to see that they reach the results that sum them and no others.

Zeros are planted in the other input where some of them are met, since their products are NaN, not 0.

Pure index arithmetic on logical shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription
from miofind.core.tensor import TensorDescriptor

_MOST = 8
_LEAST_UNTOUCHED = 4
_ZEROS = 4
_DRAWS = 16
_MOST_TAPS = 512
_VALUES = (math.inf, math.nan, -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plants:
    """Elements of one tensor that are not finite, or zeros that meet such.

    Attributes:
        index: coordinates, an array a dimension.
        places: the same elements' places in memory.
        values: an infinity, NaN or zero each.
    """

    index: tuple[NDArray[np.int64], ...]
    places: NDArray[np.int64]
    values: NDArray[np.float64]


def plants_of(problem: ProblemDescription, random: np.random.Generator) -> dict[str, Plants]:
    """The plants of each input: at its borders and anywhere, so few that most results meet none.

    An image (x, or dy for backward data) has one at least. Zeros of the padding, or between strided gradients, make 0
    or NaN of an infinity in the other operand, and neither is promised: that has plants only where they meet no zeros.
    """
    image = "y" if problem.direction is Direction.BACKWARD_DATA else "x"
    other = next(name for name in problem.direction.inputs if name != image)
    in_image = _in_image(problem, image, max(1, _count(problem, image)), random)
    zeros = _met(problem, in_image.index, random)
    inner = _coordinates_without_padding(problem)
    count = _count(problem, other)
    if count and all(at.size for at in inner):
        drawn = np.stack(
            [_chosen(at, count, random) for at in (*map(np.arange, problem.tensor(other).shape[:2]), *inner)]
        )
        zeros = _joined(zeros, _nonfinite(problem.tensor(other), drawn, 1))
    return {image: in_image, other: zeros}


def _met(problem: ProblemDescription, image: tuple[NDArray[np.int64], ...], random: np.random.Generator) -> Plants:
    """For each of some elements of the image, zeros of the other input that it meets, where it meets any.

    They are in several channels, since other infinities may spoil the results of some.
    """
    is_forward, is_data = (problem.direction is each for each in (Direction.FORWARD, Direction.BACKWARD_DATA))
    c, k = problem.c // problem.groups, problem.k // problem.groups
    channels = c if is_data else k
    count = min(_ZEROS, channels)
    batch, channel, *pixel = (np.repeat(at, count) for at in image)
    others = (random.integers(0, channels, (image[0].size, 1)) + np.arange(count)).reshape(-1) % channels
    tap, out_pixel = zip(*(_meeting(problem, i, at, random) for i, at in enumerate(pixel)), strict=True)
    if is_data:
        return _planted(problem.w, (channel, others, *tap), np.zeros(batch.size))
    if is_forward:
        return _planted(problem.w, (channel // c * k + others, channel % c, *tap), np.zeros(batch.size))
    return _planted(problem.y, (batch, channel // c * k + others, *out_pixel), np.zeros(batch.size))


def _meeting(
    problem: ProblemDescription, i: int, image: NDArray[np.int64], random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """In spatial dimension i, for each coordinate of the image a tap that it meets, and the output's pixel there."""
    taps = _some_taps(problem, i, random)
    meets, out = _meetings(problem, i, image, taps)
    chosen = np.argmax(meets * random.random(meets.shape), axis=1)
    return taps[chosen], np.take_along_axis(out, chosen[:, None], axis=1)[:, 0]


def _some_taps(problem: ProblemDescription, i: int, random: np.random.Generator) -> NDArray[np.int64]:
    """All taps of a filter's dimension, or some of a long one."""
    size = problem.filter[i]
    if size <= _MOST_TAPS:
        return np.arange(size, dtype=np.int64)
    return np.unique(random.integers(0, size, _MOST_TAPS))


def _meetings(
    problem: ProblemDescription, i: int, image: NDArray[np.int64], taps: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """In spatial dimension i, whether coordinates of the image meet some taps, and the output's pixel if they do."""
    stride, dilation, pad = problem.conv.stride[i], problem.conv.dilation[i], problem.conv.pad_before[i]
    if problem.direction is Direction.BACKWARD_DATA:
        x = image[:, None] * stride - pad + taps * dilation
        return (x >= 0) & (x < problem.spatial[i]), np.broadcast_to(image[:, None], x.shape)
    shifted = image[:, None] + pad - taps * dilation
    out = np.clip(shifted // stride, 0, problem.out_spatial[i] - 1)
    return out * stride == shifted, out


def _joined(first: Plants, second: Plants) -> Plants:
    """The plants of both, those of the second where both have one."""
    places = np.concatenate([second.places, first.places])
    _, chosen = np.unique(places, return_index=True)
    index = tuple(np.concatenate(pair)[chosen] for pair in zip(second.index, first.index, strict=True))
    return Plants(index=index, places=places[chosen], values=np.concatenate([second.values, first.values])[chosen])


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


def _in_image(problem: ProblemDescription, image: str, count: int, random: np.random.Generator) -> Plants:
    """Plants of the image at random coordinates that some result sums, and one that probably none does, if any.

    The first one is an infinity, so that zeros which meet it make NaN of it.
    """
    tensor = problem.tensor(image)
    drawn = np.stack([_chosen(np.arange(size), _DRAWS * count, random) for size in tensor.shape])
    meets = [_meetings(problem, i, at, _some_taps(problem, i, random))[0].any(axis=1) for i, at in enumerate(drawn[2:])]
    is_summed = np.logical_and.reduce(meets)
    chosen = np.concatenate([drawn[:, is_summed][:, :count], drawn[:, ~is_summed][:, :1]], axis=1)
    return _nonfinite(tensor, chosen, 2 * int(random.integers(2)))


def _nonfinite(tensor: TensorDescriptor, index: NDArray[np.int64], start: int) -> Plants:
    """An infinity or NaN at each of some coordinates, columns of `index`; the first is number `start` of the values."""
    _, first = np.unique(index, axis=1, return_index=True)
    chosen = index[:, np.sort(first)]
    values = [_VALUES[(start + i) % len(_VALUES)] for i in range(chosen.shape[1])]
    return _planted(tensor, tuple(chosen), np.array(values))


def _planted(tensor: TensorDescriptor, index: tuple[NDArray[np.int64], ...], values: NDArray[np.float64]) -> Plants:
    places = np.array(tensor.strides, dtype=np.int64) @ np.stack(index)
    return Plants(index=index, places=places, values=values)


def _chosen(allowed: NDArray[np.int64], count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`count` of the coordinates: first, last or any, with equal chances."""
    positions = np.stack(
        [np.zeros(count, np.int64), np.full(count, allowed.size - 1), random.integers(0, allowed.size, count)]
    )
    chosen: NDArray[np.int64] = np.take_along_axis(positions, random.integers(0, 3, (1, count)), axis=0)[0]
    return allowed[chosen]
