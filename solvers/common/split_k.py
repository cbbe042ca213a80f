"""Split-K: blocks sum parts of a result, and a second kernel adds their float32 partials (common/split_k.cuh).

The partials are a region of the workspace, [split][result]; the reduction is a step of the same source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from miofind.core.problem import ProblemDescription
from miofind.solver.epilogue import epilogue_arguments
from miofind.solver.steps import ConvSolution, KernelStep, Pointer, Region, Scalar, WorkspacePlan, int32s
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by

_MAX_LANES = 32
_SPLITS_OF_LANE = 4
_THREADS = 256
_VECTOR = 4  # results of a thread, unless the kernel says otherwise
_SUMMED_PIXELS, _SUMMED_CHANNELS = 64, 32  # of a block that sums results up, too: kernels choose it by template


RESULT_ORDER = StructType("ResultOrder", channels=DIVISOR, channel_stride=DIVISOR, image_stride=DIVISOR)
"""Where a fused kernel finds the channel and the image of a result; sources that have one take its define."""


def result_order(problem: ProblemDescription) -> Struct:
    """How the elements of a problem's output lie: a `RESULT_ORDER`."""
    output, pixels = problem.output, math.prod(problem.out_spatial)
    return RESULT_ORDER(
        channels=divide_by(output.shape[1]),
        channel_stride=divide_by(1 if output.layout.channels_last else pixels),
        image_stride=divide_by(output.shape[1] * pixels),
    )


def summed_parts(problem: ProblemDescription) -> int:
    """Parts of the output whose statistics a reduction leaves."""
    return ceil_div(problem.n * math.prod(problem.out_spatial), _SUMMED_PIXELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitK:
    """A sum of `results` elements that is split among blocks.

    Attributes:
        results: elements of which each split leaves a partial.
        splits: how many there are.
        output: the tensor that the reduction writes.
        region: the workspace region that holds the partials.
    """

    results: int
    splits: int
    output: str = "w"
    region: str = "partials"

    @classmethod
    def of(cls, problem: ProblemDescription, splits: int) -> SplitK:
        """All elements of the problem's output, each a sum that is split."""
        return cls(results=problem.output.size, splits=splits, output=problem.direction.output)

    @property
    def bytes(self) -> int:
        """Of the partials of all splits."""
        return 4 * self.splits * self.results

    @property
    def target(self) -> str:
        """The buffer that the first kernel writes: the output itself if there is but one split."""
        return self.output if self.splits == 1 else self.region

    @property
    def partials(self) -> Region:
        """The workspace that holds them."""
        return Region(name=self.region, bytes=self.bytes)

    @property
    def lanes(self) -> int:
        """Threads of `reduce_split_k` that share a result: a power of two, with up to 4 splits each."""
        return min(_MAX_LANES, 1 << max(0, ceil_div(self.splits, _SPLITS_OF_LANE) - 1).bit_length())

    def arguments(self, *numbers: Scalar | Struct) -> tuple[Pointer | Scalar | Struct, ...]:
        """What a reduction kernel takes: partials, output, then numbers."""
        return (Pointer(buffer=self.region), Pointer(buffer=self.output), *numbers)

    def reduction(
        self, first: KernelStep, *numbers: Scalar | Struct, blocks: int, threads: int, pdl: bool = True
    ) -> KernelStep:
        """The step that adds the partials: a kernel of the same source and defines, named as the first and `_finish`.

        Args:
            first: the step that leaves the partials.
            numbers: what the kernel takes after partials and output.
            blocks, threads: of the grid, and of a block.
            pdl: whether it is launched with PDL: it begins while the first kernel still runs, and waits itself.
        """
        return KernelStep(
            source=first.source,
            entry=f"{first.entry}_finish",
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            defines=first.defines,
            args=self.arguments(*numbers),
            pdl=pdl,
        )

    def vector_reduction(self, first: KernelStep, *, lanes: int | None = None, vector: int = _VECTOR) -> KernelStep:
        """The same, with 256 threads, by a kernel that calls `reduce_split_k`: its numbers are results, splits, lanes.

        Args:
            lanes: if not `self.lanes`.
            vector: results of a thread, of which there is a whole number.
        """
        lanes = self.lanes if lanes is None else lanes
        blocks = ceil_div(self.results, vector * _THREADS // lanes)
        numbers = int32s(self.results, self.splits, lanes)
        return self.reduction(first, *numbers, blocks=blocks, threads=_THREADS)

    def fused_reduction(self, reduction: KernelStep, problem: ProblemDescription) -> KernelStep:
        """A reduction to all of the problem's output, with its epilogue; the same for a bare problem."""
        if not problem.epilogue:
            return reduction
        return replace(reduction, args=(*reduction.args, result_order(problem), *epilogue_arguments(problem)))

    def summing_reduction(self, first: KernelStep, problem: ProblemDescription, sums: str) -> KernelStep:
        """The same, channels last, by a kernel that calls `reduce_split_k_and_sum`.

        Args:
            sums: the region that the kernel leaves the statistics of `summed_parts(problem)` parts in.
        """
        reduction = self.fused_reduction(self.vector_reduction(first), problem)
        blocks = summed_parts(problem) * ceil_div(problem.k, _SUMMED_CHANNELS)
        return replace(reduction, grid=(blocks, 1, 1), args=(*reduction.args, Pointer(buffer=sums)))

    def solution(self, first: KernelStep, reduction: KernelStep) -> ConvSolution:
        """Both steps, with the partials between them in the workspace; `first` alone where it writes the output."""
        if Pointer(buffer=self.region) not in first.args:
            return ConvSolution(steps=(first,))
        return ConvSolution(steps=(first, reduction), workspace=WorkspacePlan((self.partials,)))
