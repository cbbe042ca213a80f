"""How parts of sums are added: the second step of backward weights, by kernels_src/common/add_parts.cuh."""

from __future__ import annotations

from miofind.solver.steps import ConvSolution, KernelStep, Pointer, Region, WorkspacePlan, int32s
from miofind.solvers.common.correlation import ceil_div

PARTS = "parts"
"""The region that holds them."""

_THREADS = 256
_AT_ONCE = 4  # elements of a thread


def adding_lanes(splits: int) -> int:
    """Threads that share the addition of one element's parts."""
    return min(32, 1 << max(0, ceil_div(splits, 4) - 1).bit_length())


def added_up(first: KernelStep, size: int, splits: int, *, told: tuple[int, ...]) -> ConvSolution:
    """A step that leaves so many parts of `size` elements of w in `PARTS`, and the one that adds them.

    Args:
        told: the numbers that the second kernel takes; it is in the same source, with the same name and `_finish`.
    """
    finish = KernelStep(
        source=first.source,
        entry=f"{first.entry}_finish",
        grid=(ceil_div(size, _AT_ONCE * _THREADS // adding_lanes(splits)), 1, 1),
        block=(_THREADS, 1, 1),
        defines=first.defines,
        args=(Pointer(buffer=PARTS), Pointer(buffer="w"), *int32s(*told)),
        waits_itself=True,
    )
    parts = Region(name=PARTS, bytes=4 * splits * size)
    return ConvSolution(steps=(first, finish), workspace=WorkspacePlan((parts,)))
