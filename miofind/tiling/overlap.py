"""Which results of a convolution are sums of nothing but padding, or of nothing at all.

Algorithms that transform whole tiles or images round them as they do their neighbours, so they do not come out as 0.
"""

from __future__ import annotations

from miofind.problem import Direction, ProblemDescription


def has_empty_sums(problem: ProblemDescription) -> bool:
    """Whether along some axis an output meets no input, an input no output, or a tap neither; dilation 1."""
    return any(_has_empty_sums(problem, axis) for axis in range(problem.spatial_dims))


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
    return any(not _is_met(tap - before, last + tap, stride, size) for tap in range(taps))


def _is_met(first: int, last: int, stride: int, size: int) -> bool:
    """Whether one of first, first + stride, ... last is in 0 ... size - 1."""
    met = first if first >= 0 else first % stride
    return met <= min(last, size - 1)
