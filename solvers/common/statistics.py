"""Statistics of results, sum and sum of squares of each channel, by kernels that write the results.

These leave partials of parts of the pixels in the workspace, float32 [2][part][channel]; a last step adds them
(kernels_src/common/statistics.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solver.steps import KernelStep, Pointer, Region, int32s
from miofind.solvers.common.correlation import ceil_div

PARTIAL_STATISTICS = "partial statistics"
"""The region of the workspace."""

_THREADS = 1024
_CHANNELS = 8  # of a block: 32 bytes of a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The statistics of a problem's results.

    Attributes:
        channels: of the results.
        parts: of the pixels, for each of which there are partials.
    """

    channels: int
    parts: int

    @classmethod
    def of(cls, problem: ProblemDescription, parts: int) -> Statistics:
        """Those of a problem with so many parts."""
        return cls(channels=problem.k, parts=parts)

    @property
    def partials(self) -> Region:
        """The workspace that holds the partials."""
        return Region(name=PARTIAL_STATISTICS, bytes=2 * 4 * self.parts * self.channels)

    def finish(self, first: KernelStep) -> KernelStep:
        """The step that adds the partials, of the same source and defines, named as the first and `_statistics`.

        Its kernel calls `finish_statistics`.
        """
        return KernelStep(
            source=first.source,
            entry=f"{first.entry}_statistics",
            grid=(ceil_div(self.channels, _CHANNELS), 2, 1),
            block=(_THREADS, 1, 1),
            defines=first.defines,
            args=(
                Pointer(buffer=PARTIAL_STATISTICS),
                Pointer(buffer="sum"),
                Pointer(buffer="sum_of_squares"),
                *int32s(self.channels, self.parts),
            ),
            pdl=True,
        )
