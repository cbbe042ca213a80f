"""Depthwise convolution of long lines by kernels_src/fft/depthwise.cu: plans, and the steps of one solution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import Argument, ConvSolution, KernelStep, Packing, Pointer, Region, Scalar, Step, int32s
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.fft.choice import tile_serves
from miofind.solvers.fft.edges import edges_step, strides
from miofind.solvers.fft.own_blocks import OWN_LINES, line_ms, passes_of, waiting
from miofind.solvers.fft.steps import TILE_DEFINES, FftPlan

SOURCE = "fft/depthwise.cu"
FILTERS = "filters"
POINTS = (2048, 4096)

_COMPLEX_BYTES = 8
_MOST_THREADS = 512
_STEP_MS = 0.002
_BANDWIDTH_SHARE = 0.6  # of the device's, that lines are taken to pass with
_EDGES_INSTRUCTIONS = 64  # for a point: between memory and registers and back, and the product
_FREE_SHARED_BYTES = 1 << 10  # that a block has besides its lines
_MOST_POINTS = 1 << 30  # of a line of every channel: as many as elements of a tensor


@dataclass(frozen=True, slots=True)
class DepthwisePlan:
    """One way to compute a problem.

    Attributes:
        tiles: how its lines are cut.
        points: complex numbers that a thread block transforms at once, of one line at least.
    """

    tiles: FftPlan
    points: int

    @staticmethod
    def of(problem: ProblemDescription, tile: int, points: int) -> DepthwisePlan:
        """The plan of tiles of a length, 0 for whole lines."""
        return DepthwisePlan(FftPlan.of(problem, as_tiles(tile)), points)

    @property
    def length(self) -> int:
        """Of a transform."""
        return self.tiles.lengths[1]

    @property
    def lines(self) -> int:
        """Of a thread block."""
        return max(1, self.points // self.length)

    @property
    def threads(self) -> int:
        """Of a block: one for each butterfly of sixteen numbers."""
        return min(_MOST_THREADS, self.lines * self.length // 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return _COMPLEX_BYTES * self.lines * (self.length + self.length // 16 + 2)

    @property
    def all_lines(self) -> int:
        """Pairs of tiles times channels."""
        return ceil_div(self.tiles.all_tiles, 2) * self.tiles.problem.c

    @property
    def pairs_images(self) -> bool:
        """Whether tiles of two images would share a complex line, and the larger one's errors reach the other."""
        tiles = self.tiles
        return tiles.problem.n > 1 and tiles.all_tiles // tiles.problem.n % 2 > 0

    def refuse_sizes(self) -> Applicability:
        """Why the plan is out of bounds; APPLICABLE if it is not.

        Tensors that 32-bit offsets reach have fewer lines than a launch has blocks; offsets of a line's points beyond a
        tensor's end must fit 32 bits, too.
        """
        if self.length * self.tiles.problem.k >= _MOST_POINTS:
            return Applicability("needs filters' transforms of fewer points")
        return APPLICABLE

    def regions(self) -> tuple[Region, ...]:
        """Workspace for the transforms of filters."""
        return (Region(name=FILTERS, bytes=_COMPLEX_BYTES * self.length * self.tiles.problem.k),)

    def steps(self) -> Iterator[Step]:
        """The steps in order."""
        yield self._filters()
        yield self._lines()
        if limit := self.tiles.summed_directly:
            yield edges_step(self.tiles.problem, limit)

    def packing(self) -> Packing | None:
        """The steps in two parts: the filters' transforms, and the rest; None where that reads the filters, too."""
        if self.tiles.summed_directly:
            return None
        (transforms,) = self.regions()
        filters, rest = self._filters(), self._lines()
        return Packing(
            pack=ConvSolution(steps=(filters.on_buffers({FILTERS: "y"}),)),
            run=ConvSolution(steps=(rest.on_buffers({FILTERS: "w"}),)),
            bytes=transforms.bytes,
        )

    def _filters(self) -> KernelStep:
        problem, inner = self.tiles.problem, self.tiles.order[1]
        steps = strides(problem.w)
        return self._kernel(
            "fft_depthwise_filters",
            ceil_div(problem.k, self.lines),
            ("w", FILTERS),
            int32s(problem.k, problem.filter[inner], steps[0], steps[2 + inner]),
        )

    def _lines(self) -> KernelStep:
        plan = self.tiles
        source, result = self._names()
        scale = Scalar(ctype="float32", value=1.0 / self.length)
        return self._kernel(
            "fft_depthwise",
            ceil_div(self.all_lines, self.lines),
            (source, FILTERS, result),
            (
                *int32s(self.all_lines, plan.all_tiles),
                scale,
                plan.tiled_tensor(source, 0),
                plan.tiled_tensor(result, 0),
                *epilogue_arguments(plan.problem),
            ),
        )

    def _names(self) -> tuple[str, str]:
        """The tensor that is transformed, and the result."""
        return ("y", "x") if self.tiles.problem.direction is Direction.BACKWARD_DATA else ("x", "y")

    def _spread(self, name: str) -> int:
        """From one element of a tensor to the next in a tile."""
        return self.tiles.axes[1].placement(self.tiles.problem, self.tiles.order[1], name).spread

    def _kernel(self, entry: str, blocks: int, buffers: tuple[str, ...], others: tuple[Argument, ...]) -> KernelStep:
        problem = self.tiles.problem
        source_name, result_name = self._names()
        source, result = problem.tensor(source_name), problem.tensor(result_name)
        return KernelStep(
            source=SOURCE,
            entry=entry,
            defines=(
                ("T_SOURCE", source.dtype.value),
                ("T_W", problem.w.dtype.value),
                ("T_RESULT", result.dtype.value),
                ("SOURCE_LAST", int(source.layout.channels_last)),
                ("RESULT_LAST", int(result.layout.channels_last)),
                ("SOURCE_SPREAD", int(self._spread(source_name) > 1)),
                ("RESULT_SPREAD", int(self._spread(result_name) > 1)),
                ("CONJUGATE", int(problem.direction is Direction.FORWARD)),
                ("LENGTH", self.length),
                ("LINES", self.lines),
                ("THREADS", self.threads),
                *TILE_DEFINES,
                *epilogue_defines(problem),
            ),
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            args=(*(Pointer(buffer=buffer) for buffer in buffers), *others),
        )

    def estimate_ms(self, device: Device) -> float:
        """Time of all steps."""
        problem, bandwidth = self.tiles.problem, _BANDWIDTH_SHARE * device.bandwidth_bytes_per_s / 1e3
        overlap = math.prod(axis.length / axis.step for axis in self.tiles.axes)
        least = overlap * problem.bytes / bandwidth
        there_and_back = 2 * (passes_of(self.length) - 1)
        lines = line_ms(self.length * self.all_lines, _EDGES_INSTRUCTIONS, there_and_back, device)
        filters = _COMPLEX_BYTES * self.length * problem.k / bandwidth
        return 3 * _STEP_MS + max(least, lines * waiting(device, self.threads, self.shared_bytes)) + filters


def as_tiles(tile: int) -> dict[str, Any]:
    """The configuration of a `FftPlan` that cuts lines alike."""
    return {"tile": tile, "chunk_mib": 16, "product": "1x1", "planes": 8}


def refuse_depthwise(problem: ProblemDescription) -> Applicability:
    """Why lines of one channel do not serve a problem that transforms serve; APPLICABLE if they do."""
    if not problem.groups == problem.c == problem.k:
        return Applicability(f"needs one filter a channel: groups={problem.groups} c={problem.c} k={problem.k}")
    if sum(taps > 1 for taps in problem.filter) > 1:
        return Applicability("transforms along one axis")
    return APPLICABLE


def is_valid(problem: ProblemDescription, device: Device, tile: int, points: int) -> bool:
    """Whether a plan's lines are cut and fit shared memory, and more points at once are more lines."""
    if not tile_serves(problem, tile, is_own=True):
        return False
    plan = DepthwisePlan.of(problem, tile, points)
    if plan.length < OWN_LINES[0] or plan.refuse_sizes().refused or plan.pairs_images:
        return False
    if points > POINTS[0] and plan.lines == DepthwisePlan(plan.tiles, POINTS[0]).lines:
        return False
    return plan.shared_bytes <= device.shared_bytes - _FREE_SHARED_BYTES
