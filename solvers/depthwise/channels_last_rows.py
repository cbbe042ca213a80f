"""Rows of NHWC images that blocks stream through shared memory: the arithmetic of depthwise/channels_last_rows.cuh.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import Integers, Numbers, divisor, larger, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, Applicability, KernelKey
from miofind.solver.steps import Config
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.divisor import divide_by
from miofind.solvers.common.limits import MAX_ELEMENTS, refuse_tensors

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
        layouts=frozenset({Layout.NWC, Layout.NHWC}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

_COPY_BYTES = 16
_BANK_BYTES = 128
_MAX_STEP = 2**15

DIMENSION = StructType(
    "Dimension", **dict.fromkeys(("x_size", "y_size", "stride", "pad", "dilation", "y_step"), "int32")
)
"""An axis of the problem, as the kernels take it: see `RowAxis`, whose x_stride is `stride` here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAxis:
    """One axis, divided into residue classes in which output t, tap i and input m meet where m = stride * t + i.

    Attributes:
        x_size, y_size, taps, pad: of the problem.
        x_stride, dilation: of the problem; 1 for a dilation of a single tap.
        stride: within a class.
        y_step: output coordinates between neighbours of a class; also the number of classes.
    """

    x_size: int
    y_size: int
    taps: int
    pad: int
    x_stride: int
    dilation: int
    stride: int
    y_step: int

    @staticmethod
    def of(problem: ProblemDescription, dim: int) -> RowAxis:
        """The axis `dim` of a problem of two dimensions."""
        conv, taps = problem.conv, problem.filter[dim]
        dilation = conv.dilation[dim] if taps > 1 else 1
        common = math.gcd(conv.stride[dim], dilation)
        return RowAxis(
            x_size=problem.spatial[dim],
            y_size=problem.out_spatial[dim],
            taps=taps,
            pad=conv.pad_before[dim],
            x_stride=conv.stride[dim],
            dilation=dilation,
            stride=conv.stride[dim] // common,
            y_step=dilation // common,
        )

    @property
    def dimension(self) -> Struct:
        return DIMENSION(
            x_size=self.x_size,
            y_size=self.y_size,
            stride=self.x_stride,
            pad=self.pad,
            dilation=self.dilation,
            y_step=self.y_step,
        )

    @property
    def span(self) -> int:
        """Outputs of a class that `stride` neighbouring inputs meet."""
        return ceil_div(self.taps, self.stride)

    def units(self, *, backward: bool, aligned: bool = False) -> int:
        """Outputs of the longest class; with `backward` runs of `stride` inputs, which begin at the first input, or
        with `aligned` at a multiple of the stride."""
        if not backward:
            return ceil_div(self.y_size, self.y_step)
        if self.dilation == 1:
            return ceil_div(self.x_size + (self.pad % self.stride if aligned else 0), self.stride)
        return max(self._aligned_units(residue) for residue in range(self.y_step))

    def _aligned_units(self, residue: int) -> int:
        first = residue * self.x_stride - self.pad
        low, high = -(first // self.dilation), -((first - self.x_size) // self.dilation)
        return ceil_div(high - low // self.stride * self.stride, self.stride)


@functools.lru_cache(maxsize=64)  # a search asks for each of thousands of configurations
def row_axes(problem: ProblemDescription) -> tuple[RowAxis, RowAxis]:
    """Rows and columns of a 1-D or 2-D problem."""
    planar = problem.lifted(2)
    return RowAxis.of(planar, 0), RowAxis.of(planar, 1)


def is_dilated(problem: ProblemDescription) -> bool:
    return any(axis.dilation > 1 for axis in row_axes(problem))


def phases(problem: ProblemDescription) -> tuple[int, int]:
    """Indices of the first input row and column modulo the stride, where they are the same for all blocks; else 0."""
    if is_dilated(problem):
        return 0, 0
    height, width = row_axes(problem)
    return height.pad % height.stride, width.pad % width.stride


def is_whole(problem: ProblemDescription, dim: int, units: int) -> bool:
    """Whether all parts of `units` units of an axis are full: see RowAxis.units."""
    axis = row_axes(problem)[dim]
    if is_dilated(problem):
        return False
    if problem.direction is Direction.BACKWARD_DATA:
        return axis.x_size % (axis.stride * units) == 0
    return axis.y_size % units == 0


def copy_vector(problem: ProblemDescription, channels: int, total: int) -> int:
    """Elements that are copied at once of pixels of `total` channels of which blocks take `channels` each."""
    return divisor(_COPY_BYTES // problem.x.dtype.itemsize, channels, total)


def even_size(total: int, most: int, unit: int = 1) -> int:
    """The size of parts that `total` falls into evenly, multiples of `unit`, at most `most` if that is one."""
    parts = ceil_div(total, larger(unit, most))
    return round_up(ceil_div(total, parts), unit)


@functools.lru_cache(maxsize=4096)
def pixel_pitch(channels: int, itemsize: int, vector: int, step: int, runs: int) -> int:
    """Elements from one staged pixel to the next with which warps that read vectors meet the fewest bank conflicts.

    Args:
        channels: of a pixel.
        itemsize: bytes of an element.
        vector: elements that a lane reads.
        step: pixels between those that neighbouring groups of lanes read.
        runs: lanes of a group, which read one pixel.
    """
    least = round_up(channels * itemsize, _COPY_BYTES)
    pitches = np.arange(least, least + _BANK_BYTES, _COPY_BYTES)
    best = np.argmin(bank_conflicts(pitches, vector * itemsize, step, runs))
    return int(pitches[best]) // itemsize


def bank_conflicts(pitches_bytes: Integers, bytes_read: int, step: int, runs: int) -> Numbers:
    """By pitch, cycles of shared memory for a warp's reads, over those that as many bytes take at least."""
    lane = np.arange(32)
    at = np.multiply.outer(pitches_bytes, lane // runs * step) + lane % runs * bytes_read
    phases = max(1, 32 * bytes_read // _BANK_BYTES)
    words = np.add.outer(at, np.arange(0, bytes_read, 4)) // 4
    words = np.sort(words.reshape(len(pitches_bytes) * phases, -1))
    is_new = np.diff(words, prepend=-1) > 0  # lanes that read the same word read it at once
    banks = words % 32 + np.arange(0, 32 * len(words), 32)[:, None]
    met = np.bincount(banks[is_new], minlength=32 * len(words)).reshape(-1, phases, 32)
    conflicts: Numbers = met.max(axis=2).mean(axis=1)
    return conflicts


def refuse_rows(problem: ProblemDescription) -> Applicability:
    """Why kernels on rows of channels cannot compute a problem, whatever its direction; APPLICABLE if they can."""
    if problem.groups != problem.c:
        return Applicability(f"needs one input channel a group: groups={problem.groups} c={problem.c}")
    if (answer := refuse_tensors(problem)).refused:
        return answer
    conv = problem.conv
    if max(*conv.stride, *conv.dilation) > _MAX_STEP:
        return Applicability(f"counts coordinates in 32 bits: stride or dilation is more than {_MAX_STEP}")
    if problem.direction is Direction.BACKWARD_DATA:
        for stride, dilation, taps in zip(conv.stride, conv.dilation, problem.filter, strict=True):
            if taps > 1 and math.gcd(stride, dilation) > 1:
                return Applicability(
                    f"needs stride and dilation without a common divisor, not {conv.stride} and {conv.dilation}"
                )
        if problem.x.size + _reach(problem) > MAX_ELEMENTS:
            return Applicability(
                f"counts elements in 32 bits: stride {conv.stride} and dilation {conv.dilation} reach too far"
            )
    return APPLICABLE


def _reach(problem: ProblemDescription) -> int:
    """Elements of x, at most, that the rows and columns of one residue lie apart or begin before the tensor."""
    steps = [stride * dilation for stride, dilation in zip(problem.conv.stride, problem.conv.dilation, strict=True)]
    return sum(step * problem.c * math.prod(problem.spatial[dim + 1 :]) for dim, step in enumerate(steps))


def dimensions(problem: ProblemDescription) -> dict[str, Struct]:
    """Height and width, the fields of a kernel's structure that are a `DIMENSION`."""
    return {name: axis.dimension for name, axis in zip(("height", "width"), row_axes(problem), strict=True)}


def channel_share(problem: ProblemDescription, config: Config) -> int:
    """Channels of x that a block takes, about `channels`: whole vectors, and whole copies where there are such."""
    unit = larger(config["vector"], math.gcd(_COPY_BYTES // problem.x.dtype.itemsize, problem.c))
    return even_size(problem.c, config["channels"], unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiling:
    """A configuration of `channels`, `vector`, `columns`, `tile` and `rows` applied to a problem.

    The kernels compute the same from their defines.

    Attributes:
        channels: of x that a block takes.
        thread_groups: of a block, each at its own columns.
        rows: units of rows of a row block: see RowAxis.units.
        channel_blocks, column_tiles, row_blocks, classes: their product is the grid of an image.
        images: of the problem.
        threads: of a block.
    """

    channels: int
    thread_groups: int
    rows: int
    channel_blocks: int
    column_tiles: int
    row_blocks: int
    classes: int
    images: int
    threads: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config, lane_channels: int) -> RowTiling:
        """Those of a kernel whose lanes hold vectors of `lane_channels` channels for each of x."""
        height, width = row_axes(problem)
        backward = problem.direction is Direction.BACKWARD_DATA
        vector, columns = config["vector"], config["columns"]
        channels = channel_share(problem, config)
        column_units = width.units(backward=backward, aligned=is_dilated(problem))
        row_units = height.units(backward=backward, aligned=is_dilated(problem))
        thread_groups = ceil_div(even_size(column_units, config["tile"]), columns)
        rows = config["rows"]
        return RowTiling(
            channels=channels,
            thread_groups=thread_groups,
            rows=rows,
            channel_blocks=ceil_div(problem.c, channels),
            column_tiles=ceil_div(column_units, thread_groups * columns),
            row_blocks=ceil_div(row_units, rows),
            classes=height.y_step * width.y_step,
            images=problem.n,
            threads=round_up(channels * lane_channels // vector * thread_groups, 32),
        )

    @property
    def blocks(self) -> int:
        """In the grid."""
        return self.channel_blocks * self.column_tiles * self.row_blocks * self.classes * self.images

    @property
    def divisors(self) -> dict[str, Struct]:
        """What divides a block's number, the fields of the kernel's structure that are a `DIVISOR`."""
        return {
            "channel_blocks": divide_by(self.channel_blocks),
            "column_tiles": divide_by(self.column_tiles),
            "row_blocks": divide_by(self.row_blocks),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRates:
    """What a kernel's work costs; fitted to measurements of the kernel.

    Attributes:
        launch_ms: of all its launches.
        issue: issue slots of an instruction.
        alone: cycles of an instruction in a warp that has a scheduler to itself.
        serial: share of the shorter of computing and moving that does not overlap the longer.
    """

    launch_ms: float
    issue: float
    alone: float
    serial: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """What a kernel on rows of channels does.

    Attributes:
        instructions: of a thread.
        registers: of a thread.
        shared_bytes: of a block.
        moved_bytes: of device memory, all blocks.
    """

    instructions: float
    registers: int
    shared_bytes: int
    moved_bytes: float

    def time_ms(self, tiling: RowTiling, device: Device, rates: RowRates) -> float:
        """Milliseconds, launches and all."""
        registers = round_up(self.registers, 8)
        resident = larger(1, resident_blocks(registers, tiling.threads, self.shared_bytes, SmLimits.of(device)))
        cycles = cycles_of_waves(
            tiling.blocks, resident, device, lambda blocks: self._wave(blocks * tiling.threads, rates)
        )
        busy_ms = 1e3 * cycles * self.instructions / device.clock_hz
        moved_ms = 1e3 * self.moved_bytes / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
        return rates.launch_ms + larger(busy_ms, moved_ms) + rates.serial * smaller(busy_ms, moved_ms)

    def _wave(self, threads: int, rates: RowRates) -> float:
        """Cycles of an instruction of a thread where a multiprocessor runs so many at once."""
        return larger(rates.alone, rates.issue * ceil_div(threads, 32 * _SCHEDULERS))


_SCHEDULERS = 4
_BANDWIDTH_SHARE = 0.95
