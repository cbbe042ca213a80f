"""Infinities and NaN to inject into the inputs: a check sees that they spread to the results that sum them, no others.

Some products of an injected infinity get a zero as the other factor: 0 * inf is NaN, and a kernel that skips zeros
would give 0. What a derivative is taken at gets some, too. The functions choose elements by their logical indices; the
harnesses write the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription
from miofind.core.tensor import TensorDescriptor

_MAX_INJECTED = 8  # in one tensor: enough for borders and middle, and few for the results to stay finite
_RESULTS_PER_HIT = 4  # of this many results at most one may sum an injected value: the others show that none leaks
_ZEROS_PER_INFINITY = 4  # in different channels: another injected value may spoil the results of some
_DRAWS_PER_ELEMENT = 16  # random coordinates drawn for each wanted element, since strides leave some unused
_MAX_TAPS = 512  # of a filter dimension that are tried: bounds the work for filters as long as the image
_VALUES = (math.inf, math.nan, -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Injected:
    """Values to write into one tensor: infinities, NaN, and zeros that are multiplied with infinities.

    Attributes:
        index: logical indices of the elements, one array for each dimension.
        places: offsets of the same elements in memory, in elements.
        values: the value of each element.
    """

    index: tuple[NDArray[np.int64], ...]
    places: NDArray[np.int64]
    values: NDArray[np.float64]


def injected_values(problem: ProblemDescription, random: np.random.Generator) -> dict[str, Injected]:
    """The values to inject into each input, and into `saved` of an epilogue.

    They lie at borders and at random, and are so few that most results stay finite.

    "Image" is the input that the filter slides over (dy for backward data, else x); it always gets at least one value.
    The other input is multiplied by padding, too, and solvers may skip those products or not: infinity * 0 is either 0
    or NaN there. It therefore gets infinities only at coordinates that no padding, and no gap of a stride, meets.
    """
    image = "y" if problem.direction is Direction.BACKWARD_DATA else "x"
    other = next(name for name in problem.direction.inputs if name != image)
    in_image = _in_image(problem, image, max(1, _count(problem, image)), random)
    zeros = _zeros_against(problem, in_image.index, random)
    inner = _coordinates_without_padding(problem)
    count = _count(problem, other)
    if count and all(at.size for at in inner):
        drawn = np.stack(
            [_chosen(at, count, random) for at in (*map(np.arange, problem.tensor(other).shape[:2]), *inner)]
        )
        zeros = _joined(zeros, _nonfinite(problem.tensor(other), drawn, 1))
    found = {image: in_image, other: zeros}
    if "saved" in problem.epilogue.operands:
        anywhere = np.stack([_chosen(np.arange(size), _MAX_INJECTED, random) for size in problem.output.shape])
        found["saved"] = _nonfinite(problem.output, anywhere, 1)
    return found


def _zeros_against(
    problem: ProblemDescription, image: tuple[NDArray[np.int64], ...], random: np.random.Generator
) -> Injected:
    """Zeros of the other input that are multiplied with given elements of the image.

    Each element gets up to _ZEROS_PER_INFINITY of them, in different channels.

    Args:
        image: logical indices of the elements in the image, one array for each dimension.
    """
    is_forward, is_data = (problem.direction is each for each in (Direction.FORWARD, Direction.BACKWARD_DATA))
    c, k = problem.c // problem.groups, problem.k // problem.groups
    channels = c if is_data else k
    count = min(_ZEROS_PER_INFINITY, channels)
    batch, channel, *pixel = (np.repeat(at, count) for at in image)
    others = (random.integers(0, channels, (image[0].size, 1)) + np.arange(count)).reshape(-1) % channels
    tap, out_pixel = zip(*(_meeting(problem, i, at, random) for i, at in enumerate(pixel)), strict=True)
    if is_data:
        return _injected(problem.w, (channel, others, *tap), np.zeros(batch.size))
    if is_forward:
        return _injected(problem.w, (channel // c * k + others, channel % c, *tap), np.zeros(batch.size))
    return _injected(problem.y, (batch, channel // c * k + others, *out_pixel), np.zeros(batch.size))


def _meeting(
    problem: ProblemDescription, i: int, image: NDArray[np.int64], random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """In spatial dimension i: for each coordinate of the image a random tap that it meets, and the output pixel."""
    taps = _some_taps(problem, i, random)
    meets, out = _meetings(problem, i, image, taps)
    chosen = np.argmax(meets * random.random(meets.shape), axis=1)
    return taps[chosen], np.take_along_axis(out, chosen[:, None], axis=1)[:, 0]


def _some_taps(problem: ProblemDescription, i: int, random: np.random.Generator) -> NDArray[np.int64]:
    """All taps of a filter dimension, or a random subset of a long one."""
    size = problem.filter[i]
    if size <= _MAX_TAPS:
        return np.arange(size, dtype=np.int64)
    return np.unique(random.integers(0, size, _MAX_TAPS))


def _meetings(
    problem: ProblemDescription, i: int, image: NDArray[np.int64], taps: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """In spatial dimension i: which taps multiply which coordinates of the image, and into which output pixel.

    Returns:
        Two arrays (coordinate, tap): whether they are multiplied, and the output pixel, valid where they are.
    """
    stride, dilation, pad = problem.conv.stride[i], problem.conv.dilation[i], problem.conv.pad_before[i]
    if problem.direction is Direction.BACKWARD_DATA:
        x = image[:, None] * stride - pad + taps * dilation
        return (x >= 0) & (x < problem.spatial[i]), np.broadcast_to(image[:, None], x.shape)
    shifted = image[:, None] + pad - taps * dilation
    out = np.clip(shifted // stride, 0, problem.out_spatial[i] - 1)
    return out * stride == shifted, out


def _joined(first: Injected, second: Injected) -> Injected:
    """Both sets of values; the second's where both name an element."""
    places = np.concatenate([second.places, first.places])
    _, chosen = np.unique(places, return_index=True)
    index = tuple(np.concatenate(pair)[chosen] for pair in zip(second.index, first.index, strict=True))
    return Injected(index=index, places=places[chosen], values=np.concatenate([second.values, first.values])[chosen])


def _coordinates_without_padding(problem: ProblemDescription) -> list[NDArray[np.int64]]:
    """Coordinates of the other input, by spatial dimension, that meet neither padding nor the gaps of a stride."""
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
    """How many values a tensor can take with at least three quarters of the results still finite."""
    return min(_MAX_INJECTED, problem.output.size // (_RESULTS_PER_HIT * _reach(problem, name)))


def _reach(problem: ProblemDescription, name: str) -> int:
    """How many results one element of an input contributes to, at most."""
    taps, groups = math.prod(problem.filter), problem.groups
    c, k = problem.c // groups, problem.k // groups
    reach = {
        Direction.FORWARD: {"x": taps * k, "w": problem.n * math.prod(problem.out_spatial)},
        Direction.BACKWARD_DATA: {"y": taps * c, "w": problem.n * math.prod(problem.spatial)},
        Direction.BACKWARD_WEIGHTS: {"y": taps * c, "x": taps * k},
    }
    return reach[problem.direction][name]


def _in_image(problem: ProblemDescription, image: str, count: int, random: np.random.Generator) -> Injected:
    """Values for the image: `count` at random coordinates that some result sums, and one that no result should sum.

    The first value is an infinity, so that the zeros it is multiplied with make NaN.
    """
    tensor = problem.tensor(image)
    drawn = np.stack([_chosen(np.arange(size), _DRAWS_PER_ELEMENT * count, random) for size in tensor.shape])
    meets = [_meetings(problem, i, at, _some_taps(problem, i, random))[0].any(axis=1) for i, at in enumerate(drawn[2:])]
    is_summed = np.logical_and.reduce(meets)
    chosen = np.concatenate([drawn[:, is_summed][:, :count], drawn[:, ~is_summed][:, :1]], axis=1)
    return _nonfinite(tensor, chosen, 2 * int(random.integers(2)))


def _nonfinite(tensor: TensorDescriptor, index: NDArray[np.int64], start: int) -> Injected:
    """Infinities and NaN by turns at the coordinates that are columns of `index`, beginning with _VALUES[start]."""
    _, first = np.unique(index, axis=1, return_index=True)
    chosen = index[:, np.sort(first)]
    values = [_VALUES[(start + i) % len(_VALUES)] for i in range(chosen.shape[1])]
    return _injected(tensor, tuple(chosen), np.array(values))


def _injected(tensor: TensorDescriptor, index: tuple[NDArray[np.int64], ...], values: NDArray[np.float64]) -> Injected:
    places = np.array(tensor.strides, dtype=np.int64) @ np.stack(index)
    return Injected(index=index, places=places, values=values)


def _chosen(allowed: NDArray[np.int64], count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`count` random coordinates: the first, the last or any other, with equal probability."""
    positions = np.stack(
        [np.zeros(count, np.int64), np.full(count, allowed.size - 1), random.integers(0, allowed.size, count)]
    )
    chosen: NDArray[np.int64] = np.take_along_axis(positions, random.integers(0, 3, (1, count)), axis=0)[0]
    return allowed[chosen]
