"""Weights' gradients of parts: kernels that split their sums leave float32 partials, and one reduction adds all.

Solvers with a `SplitK` have such kernels: the first step leaves partials, [split][result], and the second adds them; of
the numbers that it takes the second says how many splits there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from miofind.solver.steps import ConvSolution, Scalar, WorkspacePlan, int32s
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.large.parts import Part

_MOST_BYTES = 4 << 30  # of all partials
_VECTOR = 4  # of partials, which begin at a multiple of 16 bytes


def partials_of_all(solutions: Iterable[tuple[int, ConvSolution]], results: int) -> SplitK | None:
    """The partials of all parts in one region; None where a part leaves none, or all are too large.

    Args:
        solutions: each with how many parts it is of.
        results: elements of the output.
    """
    splits = [(count, _splits(solution, results)) for count, solution in solutions]
    whole = SplitK(results=results, splits=sum(count * each for count, each in splits))
    return whole if all(each for _, each in splits) and whole.bytes <= _MOST_BYTES else None


def sum_of_parts(solutions: Sequence[tuple[Part, ConvSolution]], whole: SplitK) -> ConvSolution:
    """The parts' first steps and one reduction.

    Args:
        whole: the partials of all.
    """
    steps = []
    splits = (_splits(solution, whole.results) for _, solution in solutions)
    for (part, solution), before in zip(solutions, itertools.accumulate(splits, initial=0), strict=False):
        first = SplitK(results=whole.results, splits=before).bytes
        steps.append(solution.kernels[0].moved({**part.offsets_bytes, whole.region: first}))
    reduction = solutions[0][1].kernels[1]
    partials, output, size, _, *others = reduction.args
    return ConvSolution(
        steps=(*steps, replace(reduction, args=(partials, output, size, *int32s(whole.splits), *others))),
        workspace=WorkspacePlan((whole.partials,)),
        deterministic=all(solution.deterministic for _, solution in solutions),
    )


def _splits(solution: ConvSolution, results: int) -> int:
    """Partials of each result that a solution's first step leaves; 0 where it is no such solution."""
    if len(solution.kernels) != 2 or results % _VECTOR:
        return 0
    first, reduction = solution.kernels
    numbers = [arg.value for arg in reduction.args[2:] if isinstance(arg, Scalar)]
    if reduction.entry != f"{first.entry}_finish" or not 2 <= len(numbers) == len(reduction.args) - 2:
        return 0
    split_k = SplitK(results=results, splits=int(numbers[1]))
    is_whole = solution.workspace.regions == (split_k.partials,) and reduction.args[:2] == split_k.arguments()
    return split_k.splits if is_whole else 0
