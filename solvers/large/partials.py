"""Weights' gradients of parts: kernels that split their sums leave float32 partials, and one reduction adds all.

Solvers with a `SplitK` have such kernels: the first step leaves partials, [split][result], and the second adds them; of
the numbers that it takes the second says how many splits there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from miofind.solver.steps import ConvSolution, Scalar, WorkspacePlan, int32s
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.large.parts import Part

_MOST_BYTES = 4 << 30  # of all partials
_VECTOR = 4  # of partials, which begin at a multiple of 16 bytes


def sum_of_parts(solutions: Sequence[tuple[Part, ConvSolution]], results: int) -> ConvSolution | None:
    """The parts' first steps and one reduction; None where a part leaves no partials, or all are too large.

    Args:
        results: elements of the output.
    """
    splits = [_splits(solution, results) for _, solution in solutions]
    whole = SplitK(results=results, splits=sum(splits))
    if not all(splits) or whole.bytes > _MOST_BYTES:
        return None
    steps = []
    for (part, solution), before in zip(solutions, itertools.accumulate(splits, initial=0), strict=False):
        first = SplitK(results=results, splits=before).bytes
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
