"""The passes that sum a tensor up for each channel: kernels_src/pointwise/channel_sums.cu.

What a problem's epilogue writes besides the convolution's own output: statistics of y as it was written, or dy's sums,
the bias gradient. Partial sums of blocks in the workspace, then each result from its own, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from miofind.core.cached import cached_property
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.reference.convolution import round_once
from miofind.solver.steps import Argument, Config, HostStep, KernelStep, Pointer, Region, Scalar
from miofind.solvers.common.correlation import ceil_div

SOURCE = "pointwise/channel_sums.cu"
MODULE = __name__
"""Of the host function."""

PARTIALS = "channel sums"
"""The region of the workspace."""

_VECTOR_BYTES = 16
_THREADS = 256
_LANES = 32  # columns of a block at most: 512 bytes side by side
_BLOCKS_PER_SM = 3
_FINISHING_CHANNELS = 32
_FINISHING_THREADS = 1024
_FINISHING_WARPS = _FINISHING_THREADS // 32
_LONGEST_ROW = 64
_LAUNCH_MS = 2e-3
_BANDWIDTH_SHARE = 0.8
_HOST_BANDWIDTH_SHARE = 0.05


def channel_sums_ms(problem: ProblemDescription, device: Device) -> float:
    """Expected time of the passes in milliseconds: two launches, and the tensor through memory; 0 where none is due."""
    if not problem.epilogue.outputs:
        return 0.0
    share = _BANDWIDTH_SHARE if device.place is Place.CUDA else _HOST_BANDWIDTH_SHARE
    return 2 * _LAUNCH_MS + 1e3 * problem.y.bytes / (share * device.bandwidth_bytes_per_s)


def channel_sums_regions(problem: ProblemDescription, device: Device) -> tuple[Region, ...]:
    """The workspace that the steps name."""
    if not problem.epilogue.outputs or device.place is Place.CPU:
        return ()
    return (_ChannelSums(problem, device).region,)


def channel_sums_steps(problem: ProblemDescription, device: Device) -> tuple[KernelStep | HostStep, ...]:
    """The steps that compute the second outputs of a problem from its y or dy; none where it has none."""
    if not problem.epilogue.outputs:
        return ()
    if device.place is Place.CPU:
        return (HostStep(module=MODULE, function="sum_channels", fused=True),)
    return _ChannelSums(problem, device).steps


@dataclass(frozen=True)
class _ChannelSums:
    """One problem's launches."""

    problem: ProblemDescription
    device: Device

    @cached_property
    def plane(self) -> int:
        """Elements of a channel of an image."""
        return math.prod(self.problem.out_spatial)

    @property
    def is_last(self) -> bool:
        """Whether neighbouring elements are of neighbouring channels."""
        return self.problem.y.layout.channels_last or self.plane == 1

    @property
    def vector(self) -> int:
        """Elements of a vector."""
        return _VECTOR_BYTES // self.problem.y.dtype.itemsize

    @property
    def columns(self) -> int:
        """Vectors of a row, channels last."""
        return self.problem.k // math.gcd(self.problem.k, self.vector)

    @property
    def lanes(self) -> int:
        """Columns of a block."""
        return min(self.columns, _LANES)

    @property
    def strips(self) -> int:
        """Blocks side by side."""
        return ceil_div(self.columns, self.lanes) if self.is_last else self.problem.k

    @property
    def side(self) -> int:
        """Rows, or vectors of a channel, that a block takes side by side."""
        return 1 << (_THREADS // self.lanes).bit_length() - 1 if self.is_last else _THREADS

    @cached_property
    def plane_vectors(self) -> int:
        """Vectors that a plane touches at most, channels first."""
        return ceil_div(self.plane, self.vector) + (self.plane % self.vector != 0)

    @cached_property
    def length(self) -> int:
        """Rows of the tensor, or vectors of a channel."""
        if not self.is_last:
            return self.problem.n * self.plane_vectors
        return ceil_div(ceil_div(self.problem.y.size, self.vector), self.columns)

    @cached_property
    def unroll(self) -> int:
        """Vectors that a thread has under way: fewer where that leaves multiprocessors idle."""
        blocks = self.strips * ceil_div(self.length, 4 * self.side)
        return 4 if blocks >= 2 * self.device.sm_count else 2

    @cached_property
    def part(self) -> int:
        """Rows, or vectors of a channel, of a block."""
        batch = self.side * self.unroll
        parts = max(1, _BLOCKS_PER_SM * self.device.sm_count // self.strips)
        row = min(ceil_div(self.length, self.side * parts), self.longest_row)
        return ceil_div(self.side * row, batch) * batch

    @property
    def longest_row(self) -> int:
        """How many numbers a thread adds one after another at most; rounding errors of one sign grow with them.

        Of long sums as many as those who finish then add, whose partial sums are the more the fewer these are.
        """
        return max(_LONGEST_ROW, math.isqrt(self.length // (self.side * _FINISHING_WARPS)))

    @property
    def parts(self) -> int:
        """Blocks one below the other."""
        return ceil_div(self.length, self.part)

    @property
    def partials(self) -> int:
        """Partial sums of a channel and quantity."""
        return self.parts * (self.columns * self.vector // self.problem.k if self.is_last else 1)

    @property
    def region(self) -> Region:
        """The partial sums."""
        quantities = len(self.problem.epilogue.outputs)
        size = quantities * self.partials * self.problem.k * self.problem.accumulator.itemsize
        return Region(name=PARTIALS, bytes=size)

    @property
    def steps(self) -> tuple[KernelStep, KernelStep]:
        """The launches."""
        sums = KernelStep(
            source=SOURCE,
            entry="channel_sums",
            grid=(self.strips * self.parts, 1, 1),
            block=(self.side * self.lanes if self.is_last else _THREADS, 1, 1),
            defines=self._defines,
            args=(Pointer(buffer="y"), Pointer(buffer=PARTIALS), *self._arguments()),
            pdl=True,
        )
        return sums, self._finish

    @property
    def _finish(self) -> KernelStep:
        """The launch that adds the partial sums."""
        outputs = self.problem.second_outputs
        return KernelStep(
            source=SOURCE,
            entry="channel_sums_finish",
            grid=(ceil_div(self.problem.k, _FINISHING_CHANNELS), len(outputs), 1),
            block=(_FINISHING_THREADS, 1, 1),
            defines=self._defines,
            args=(
                *(Pointer(buffer=name) for name in (PARTIALS, outputs[0].name, outputs[-1].name)),
                *(Scalar(ctype="uint32", value=count) for count in (self.problem.k, self.partials)),
            ),
            pdl=True,
        )

    @property
    def _defines(self) -> tuple[tuple[str, str | int], ...]:
        outputs = self.problem.second_outputs
        return (
            ("ELEMENT", self.problem.y.dtype.value),
            ("NUMBER", self.problem.accumulator.value),
            ("RESULT", outputs[0].tensor.dtype.value),
            ("CHANNELS_LAST", int(self.is_last)),
            ("VECTOR", self.vector),
            ("UNROLL", self.unroll),
            ("SQUARES", len(outputs) - 1),
        )

    def _arguments(self) -> tuple[Argument, ...]:
        """Sizes, and whether the tensor's end is read first: a convolution has just written that, a pass not."""
        k, from_end = self.problem.k, int(not self.problem.epilogue.changes_results)
        size, wide, counts = self.problem.y.size, [self.plane, self.plane_vectors, self.part, self.length], [k]
        if self.is_last:
            wide, counts = [self.length, self.part], [self.columns, self.lanes, self.strips]
        return (
            *(Scalar(ctype="int64", value=value) for value in (size, *wide)),
            *(Scalar(ctype="uint32", value=count) for count in counts),
            Scalar(ctype="int32", value=from_end),
        )


def sum_channels(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
    """Write the second outputs of a problem on the host, from its y or dy; arrays have logical shapes."""
    sums = np.zeros((2, problem.k))
    for image in buffers["y"]:
        elements = image.reshape(problem.k, -1).astype(np.float64)
        sums += elements.sum(axis=1), np.square(elements).sum(axis=1)
    for operand in problem.second_outputs:
        found = sums[int(operand.name == "sum_of_squares")]
        buffers[operand.name][...] = round_once(found, operand.tensor.dtype)
