"""Which results of a convolution are sums of little but padding, or of nothing at all; dilation 1.

Algorithms that transform whole tiles or images round such results as they do their neighbours: a sum of nothing does
not come out as 0, and one of a few products is no more exact than its neighbours' long sums.
"""

from __future__ import annotations

import math

from miofind.problem import Direction, ProblemDescription


def has_empty_sums(problem: ProblemDescription) -> bool:
    """Whether along some axis an output meets no input, an input no output, or a tap neither."""
    return any(_has_empty_sums(problem, axis) for axis in range(problem.spatial_dims))


def least_pixels(problem: ProblemDescription) -> int:
    """Of all taps the fewest outputs, counted over images, that one joins with an input."""
    return problem.n * math.prod(min(_met_by_taps(problem, axis)) for axis in range(problem.spatial_dims))


def _has_empty_sums(problem: ProblemDescription, axis: int) -> bool:
    taps, stride, before = problem.filter[axis], problem.conv.stride[axis], problem.conv.pad_before[axis]
    size, last = (
        problem.spatial[axis],
        (problem.out_spatial[axis] - 1) * stride - before,
    )  # where the last output begins
    if problem.direction is Direction.FORWARD:
        return before >= taps or last >= size
    if problem.direction is Direction.BACKWARD_DATA:
        return last + taps < size or any((at + before) % stride >= taps for at in range(min(size, stride)))
    return min(_met_by_taps(problem, axis)) == 0


def _met_by_taps(problem: ProblemDescription, axis: int) -> list[int]:
    """Outputs along an axis that each tap joins with an input."""
    stride, before, size = problem.conv.stride[axis], problem.conv.pad_before[axis], problem.spatial[axis]
    met = []
    for tap in range(problem.filter[axis]):
        first = max(0, -((tap - before) // stride))  # output whose input is the first in the image
        beyond = -((tap - before - size) // stride)  # and the first whose input is past it
        met.append(max(0, min(problem.out_spatial[axis], beyond) - first))
    return met
