"""The classes that reports group problems by: each asks for kernels of another kind."""

from __future__ import annotations

import math

from miofind.core.problem import ProblemDescription

PROBLEM_CLASSES = (
    "depthwise",
    "depthwise large",
    "grouped",
    "first layer",
    "dilated",
    "1x1",
    "small batch",
    "3x3",
    "other",
)

_LARGEST_USUAL_FILTER = 7
_FEW_CHANNELS = 4
_SMALL_BATCH = 2


def problem_class(problem: ProblemDescription) -> str:
    """The first of `PROBLEM_CLASSES` that fits; direction, dtype and layout play no part.

    Depthwise means one input channel a group; it is large with a filter above 7. The first layer has at most 4 input
    channels, a small batch at most 2 images.
    """
    if problem.groups > 1:
        if problem.groups != problem.c:
            return "grouped"
        return "depthwise" if max(problem.filter) <= _LARGEST_USUAL_FILTER else "depthwise large"
    if problem.c <= _FEW_CHANNELS:
        return "first layer"
    if max(problem.conv.dilation) > 1:
        return "dilated"
    if math.prod(problem.filter) == 1:
        return "1x1"
    if problem.n <= _SMALL_BATCH:
        return "small batch"
    return "3x3" if set(problem.filter) == {3} else "other"
