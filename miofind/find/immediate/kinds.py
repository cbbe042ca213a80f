"""What kind of problem a prediction is for, and how a problem differs from those a model was trained with."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from miofind.core.problem import MathMode, ProblemDescription
from miofind.suites import problem_class


@dataclass(frozen=True, slots=True)
class Kind:
    """What tables of medians are kept by.

    Attributes:
        numbers: element types of x, w and y, and "tf32" where they may be rounded to it.
        direction: of the problem.
        layout: of x, w and y.
        shape: its class (`miofind.suites.problem_class`), after its rank where that is not 2.
    """

    numbers: str
    direction: str
    layout: str
    shape: str

    @staticmethod
    @functools.lru_cache(maxsize=64)  # an answer asks for that of its problem twice
    def of(problem: ProblemDescription) -> Kind:
        """The kind of a problem; its epilogue plays no part."""
        tensors = (problem.x, problem.w, problem.y)
        dtypes = _joined([tensor.dtype.value for tensor in tensors])
        rank = problem.spatial_dims
        return Kind(
            numbers="tf32" if problem.math is MathMode.TF32 else dtypes,
            direction=problem.direction.value,
            layout=_joined([tensor.layout.value for tensor in tensors]),
            shape=problem_class(problem) if rank == 2 else f"{rank}d {problem_class(problem)}",
        )

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The kind by ever fewer of its fields, itself first."""
        return (
            (self.numbers, self.direction, self.layout, self.shape),
            (self.numbers, self.direction, self.layout),
            (self.numbers, self.direction),
            (),
        )


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else "/".join(values)


AXES = 7
"""Numbers of a position."""


@functools.lru_cache(maxsize=64)  # an answer asks for that of its problem twice
def position(problem: ProblemDescription) -> tuple[float, ...]:
    """Where a problem's shape lies among others: logarithms of its sizes, to base 2.

    Of two positions the largest difference tells how far a problem is from another: 1 is a factor of two.
    """
    group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
    numbers = (
        problem.n * math.prod(problem.out_spatial),
        math.prod(problem.spatial) / max(1, math.prod(problem.out_spatial)),
        group_c,
        group_k,
        problem.groups,
        math.prod(problem.filter),
        max(problem.conv.dilation),
    )
    return tuple(math.log2(number) for number in numbers)
