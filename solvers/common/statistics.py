"""Statistics of results, sum and sum of squares of each channel, by kernels that write the results.

These leave partials of parts of the pixels in the workspace, float32 [2][part][channel]; a last step adds them
(kernels_src/common/statistics.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from miofind.core.problem import ProblemDescription
from miofind.solver.steps import ConvSolution, KernelStep, Pointer, Region, WorkspacePlan, int32s
from miofind.solvers.common.correlation import ceil_div

PARTIAL_STATISTICS = "partial statistics"
"""The region of the workspace."""

_THREADS = (256, 512, 1024)  # of a block
_CHANNELS = 8  # of a block, as in the kernel: 32 bytes of a part
_AT_ONCE = 8  # parts that a thread loads before it adds them


def partial_statistics(problem: ProblemDescription) -> tuple[Pointer, ...]:
    """Where a fused kernel that can sum up results leaves the partials; the output, which it writes anyway, without.

    Nothing for a bare problem.
    """
    if not problem.epilogue:
        return ()
    return (Pointer(buffer=PARTIAL_STATISTICS if problem.epilogue.statistics else problem.direction.output),)


def with_statistics(solution: ConvSolution, problem: ProblemDescription, parts: int) -> ConvSolution:
    """A solution whose first step leaves partials of so many parts, and the step that adds them, if a problem has any.

    The same for one without statistics.
    """
    if not problem.epilogue.statistics:
        return solution
    statistics = Statistics(channels=problem.k, parts=parts)
    return replace(
        solution,
        steps=(*solution.steps, statistics.finish(solution.kernels[0])),
        workspace=WorkspacePlan((*solution.workspace.regions, statistics.partials)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The statistics of a problem's results.

    Attributes:
        channels: of the results.
        parts: of the pixels, for each of which there are partials.
    """

    channels: int
    parts: int

    @property
    def partials(self) -> Region:
        """The workspace that holds the partials."""
        return Region(name=PARTIAL_STATISTICS, bytes=2 * 4 * self.parts * self.channels)

    @property
    def _threads(self) -> int:
        """As many as load all parts at once, if a block can have them."""
        return next((threads for threads in _THREADS if threads * _AT_ONCE >= self.parts * _CHANNELS), _THREADS[-1])

    def finish(self, first: KernelStep) -> KernelStep:
        """The step that adds the partials, of the same source and defines, named as the first and `_statistics`.

        Its kernel calls `finish_statistics`.
        """
        return KernelStep(
            source=first.source,
            entry=f"{first.entry}_statistics",
            grid=(ceil_div(self.channels, _CHANNELS), 2, 1),
            block=(self._threads, 1, 1),
            defines=first.defines,
            args=(
                Pointer(buffer=PARTIAL_STATISTICS),
                Pointer(buffer="sum"),
                Pointer(buffer="sum_of_squares"),
                *int32s(self.channels, self.parts),
            ),
            pdl=True,
        )
