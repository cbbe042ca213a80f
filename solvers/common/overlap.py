"""How few products a result of a convolution is a sum of.

Algorithms that transform whole tiles or images round such results as they do their neighbours: a sum of nothing does
not come out as 0, and one of a few products is no more exact than its neighbours' long sums. Pure arithmetic on shapes.
"""

from __future__ import annotations

import math

from miofind.core.problem import Direction, ProblemDescription
from miofind.solvers.common.correlation import ceil_div


def least_products(problem: ProblemDescription) -> int:
    """The fewest products that any element of the result is a sum of; dilation 1."""
    met = math.prod(_least_met(problem, axis) for axis in range(problem.spatial_dims))
    per_tap = {
        Direction.FORWARD: problem.c // problem.groups,
        Direction.BACKWARD_DATA: problem.k // problem.groups,
        Direction.BACKWARD_WEIGHTS: problem.n,
    }
    return met * per_tap[problem.direction]


def _least_met(problem: ProblemDescription, axis: int) -> int:
    """The fewest pairs along an axis: taps that an output or an input meets, or outputs that a tap does."""
    taps, stride, before = problem.filter[axis], problem.conv.stride[axis], problem.conv.pad_before[axis]
    size, outputs = problem.spatial[axis], problem.out_spatial[axis]
    if problem.direction is Direction.FORWARD:
        ends = (0, outputs - 1)
        return min(max(0, min(size, o * stride - before + taps) - max(0, o * stride - before)) for o in ends)
    if problem.direction is Direction.BACKWARD_DATA:
        return _fewest(before, size, taps, stride, outputs)
    return _fewest(before + size - taps, taps, size, stride, outputs)  # the last tap's inputs end there


def _fewest(first: int, count: int, window: int, stride: int, outputs: int) -> int:
    """The fewest of 0, stride, ... (outputs - 1) * stride that end at most `window` before one of `count` places.

    Within the outputs every window holds window // stride or one more, and beyond either end ever fewer.
    """
    fewest = min(_count(at - window + 1, at, stride, outputs) for at in (first, first + count - 1))
    holds_least = count > window % stride - first % stride
    return min(fewest, window // stride) if holds_least else fewest


def _count(first: int, last: int, stride: int, outputs: int) -> int:
    """How many of 0, stride, ... (outputs - 1) * stride are in first ... last."""
    return max(0, min(last // stride, outputs - 1) - max(0, ceil_div(first, stride)) + 1)
