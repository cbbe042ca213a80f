"""How blocks divide depthwise convolutions of volumes: the arithmetic of kernels_src/depthwise/volume.cuh.

Pure arithmetic on shapes; a configuration may be a table of many (miofind/solver/columns.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription, TensorDescriptor
from miofind.device.device import Device, Library, Place
from miofind.solver.columns import chosen, divisor, larger, mapped
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import APPLICABLE, Applicability, KernelKey, first_refusal
from miofind.solver.steps import Config
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.limits import MAX_ELEMENTS, refuse_tensors
from miofind.solvers.depthwise.channels_last_rows import channel_share, even_size

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
        layouts=frozenset({Layout.NCDHW, Layout.NDHWC}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

VOLUME = StructType(
    "Volume",
    channels="int32",
    in_size=("int32", 3),
    in_first=("int32", 2),
    **dict.fromkeys(("in_image", "in_plane", "in_row", "in_pixel", "in_channel"), "int32"),
    out_size=("int32", 3),
    **dict.fromkeys(("out_image", "out_plane", "out_row", "out_pixel", "out_channel"), "int32"),
    **dict.fromkeys(("first_in", "in_step", "first_out", "out_step"), "int32"),
    **dict.fromkeys(("first_unit", "end_unit", "part_units"), "int32"),
    **dict.fromkeys(("channel_blocks", "column_tiles", "row_tiles", "parts", "residues"), DIVISOR),
)
"""What kernels take of a problem: sizes and steps of what they stage (`in`) and of its counterpart, and divisors."""

MOST_SHARED_BYTES = 48 << 10
VECTOR_CHANNELS = (
    *((1, channels) for channels in (1, 4, 8, 16, 32, 64)),
    *((2, channels) for channels in (16, 32, 64, 128)),
)
"""Of short lists: channels of a thread, and of a block."""
_MOST_COPIES = 20  # of a thread and a plane: each holds two registers
_COPY_BYTES = 16
_BANK_BYTES = 128
_SECTOR_BYTES = 32
_MOST_REGISTERS, _SPARE_REGISTERS = 232, 16
_MOST_THREADS = 512
_LARGEST_TILE = 64  # rows or columns of a block, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeAxis:
    """One dimension. An output counts in units: of backward data those of a whole stride, which meet the same inputs.

    Attributes:
        size, out_size: of what is staged, and of its counterpart.
        taps, stride, dilation, pad: of the problem; no dilation of a single tap.
        backward: whether dy is staged to compute dx.
    """

    size: int
    out_size: int
    taps: int
    stride: int
    dilation: int
    pad: int
    backward: bool

    @staticmethod
    def of(problem: ProblemDescription, dim: int) -> VolumeAxis:
        backward, conv, taps = problem.direction is Direction.BACKWARD_DATA, problem.conv, problem.filter[dim]
        sizes = problem.spatial[dim], problem.out_spatial[dim]
        size, out_size = reversed(sizes) if backward else sizes
        return VolumeAxis(
            size=size,
            out_size=out_size,
            taps=taps,
            stride=conv.stride[dim],
            dilation=conv.dilation[dim] if taps > 1 else 1,
            pad=conv.pad_before[dim],
            backward=backward,
        )

    @property
    def outs(self) -> int:
        """Outputs of a unit."""
        return self.stride if self.backward else 1

    @property
    def step(self) -> int:
        """Inputs from one unit to the next."""
        return 1 if self.backward else self.stride

    @property
    def phase(self) -> int:
        """Of backward data the first dx's place within its stride."""
        return self.pad % self.stride if self.backward else 0

    @property
    def _lead(self) -> int:
        return (self.phase - (self.taps - 1) * self.dilation) // self.stride

    @property
    def first(self) -> int:
        """The input coordinate where the window of unit 0 begins."""
        return self.pad // self.stride + self._lead if self.backward else -self.pad

    @property
    def units(self) -> int:
        return ceil_div(self.out_size, self.outs)

    def window(self, units: int) -> int:
        """Inputs that so many neighbouring units meet, with those between them."""
        if self.backward:
            return (units * self.stride - 1 + self.phase) // self.stride - self._lead + 1
        return (units - 1) * self.stride + (self.taps - 1) * self.dilation + 1

    # Along the depth, where residue classes of outputs modulo the dilation are walked one by one.

    @property
    def residues(self) -> int:
        return self.dilation

    @property
    def span(self) -> int:
        """Units that an input meets."""
        return ceil_div(self.taps, self.stride)

    @property
    def first_unit(self) -> int:
        return self.pad // self.stride if self.backward and self.stride > 1 else 0

    @property
    def end_unit(self) -> int:
        if self.backward and self.stride > 1:
            return ceil_div(self.out_size + self.pad, self.stride)
        return ceil_div(self.out_size, self.residues)

    @property
    def first_in(self) -> int:
        if not self.backward:
            return -self.pad
        return self.pad if self.stride == 1 else 0

    @property
    def first_out(self) -> int:
        return -self.pad if self.backward and self.stride > 1 else 0


@dataclass(frozen=True, kw_only=True)
class VolumeTiling:
    """A configuration of `vector`, `channels`, `rows`, `columns`, `height`, `width`, `depth` and `stages`, applied.

    The kernels compute the same from their defines.

    Attributes:
        channels: of a block.
        vector, rows, columns, stages: as configured.
        block_rows, block_columns: threads of a block down and across a plane.
        part_units: units of depth of a block.
    """

    problem: ProblemDescription
    depth: VolumeAxis
    height: VolumeAxis
    width: VolumeAxis
    channels: int
    vector: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int
    part_units: int
    stages: int

    @classmethod
    def attributes(cls, problem: ProblemDescription, config: Config) -> Mapping[str, object]:
        depth, height, width = (VolumeAxis.of(problem, dim) for dim in range(3))
        rows, columns = config["rows"], config["columns"]
        last = problem.x.layout.channels_last
        return {
            "problem": problem,
            "depth": depth,
            "height": height,
            "width": width,
            "channels": channel_share(problem, config) if last else even_size(problem.c, config["channels"]),
            "vector": config["vector"],
            "rows": rows,
            "columns": columns,
            "block_rows": ceil_div(even_size(height.units, config["height"]), rows),
            "block_columns": ceil_div(even_size(width.units, config["width"]), columns),
            "part_units": even_size(depth.end_unit - depth.first_unit, config["depth"]),
            "stages": config["stages"],
        }

    @property
    def itemsize(self) -> int:
        return self.problem.x.dtype.itemsize

    @property
    def channels_last(self) -> bool:
        return self.problem.x.layout.channels_last

    @property
    def backward(self) -> bool:
        return self.width.backward

    @cached_property
    def threads(self) -> int:
        return round_up(larger(1, self.channels // self.vector) * self.block_rows * self.block_columns, 32)

    @cached_property
    def channel_blocks(self) -> int:
        return ceil_div(self.problem.c, self.channels)

    @cached_property
    def row_tiles(self) -> int:
        return ceil_div(self.height.units, self.block_rows * self.rows)

    @cached_property
    def column_tiles(self) -> int:
        return ceil_div(self.width.units, self.block_columns * self.columns)

    @cached_property
    def parts(self) -> int:
        """Of the depth."""
        return ceil_div(self.depth.end_unit - self.depth.first_unit, self.part_units)

    @cached_property
    def items(self) -> int:
        """Tiles of all parts, residue classes and images."""
        return self.column_tiles * self.row_tiles * self.parts * self.depth.residues * self.problem.n

    @cached_property
    def blocks(self) -> int:
        """Of a launch."""
        return self.channel_blocks * self.items

    @cached_property
    def alignment(self) -> int:
        """Elements that the first staged column of a row is a multiple of, channels first."""
        if self.channels_last:
            return 1
        most = _COPY_BYTES // self.itemsize
        return divisor(most, chosen(self.column_tiles > 1, self.block_columns * self.columns * self.width.step, most))

    @cached_property
    def skew(self) -> int:
        """Columns that are staged before the first one that is met."""
        return self.width.first % self.alignment

    @cached_property
    def read_vector(self) -> int:
        return divisor(self.alignment, self.columns * self.width.step)

    @cached_property
    def copy_vector(self) -> int:
        if self.channels_last:
            return divisor(_COPY_BYTES // self.itemsize, self.channels, self.problem.c)
        return divisor(self.alignment, self.width.size)

    @cached_property
    def out_vector(self) -> int:
        """Results that a thread can write at once."""
        if self.channels_last:
            return self.vector
        return divisor(_COPY_BYTES // self.itemsize, self.columns * self.width.outs, self.width.out_size)

    @cached_property
    def plane_rows(self) -> int:
        """Rows of a staged plane."""
        return self.height.step * self.rows * (self.block_rows - 1) + self.height.window(self.rows)

    @cached_property
    def plane_columns(self) -> int:
        columns = self.width.step * self.columns * (self.block_columns - 1) + self.width.window(self.columns)
        return round_up(columns + self.skew, self.alignment)

    @cached_property
    def pitch(self) -> int:
        """Elements from one staged pixel to the next, channels first from one row: with the fewest bank conflicts."""
        if self.channels_last:
            step, lanes = self.columns * self.width.step, larger(1, self.channels // self.vector)
            read = self.vector * self.itemsize
            return mapped(best_pitch, self.channels, self.itemsize, read, read, step, lanes)
        return mapped(best_pitch, self.plane_columns, self.itemsize, *self._lanes_of_columns)

    @property
    def _lanes_of_columns(self) -> tuple[int, int, int, int]:
        between, read = self.columns * self.width.step * self.itemsize, self.read_vector * self.itemsize
        return between, read, self.rows * self.height.step, self.block_columns

    @cached_property
    def wavefronts(self) -> float:
        """Cycles of shared memory in which a warp reads a row of its window."""
        window = self.width.window(self.columns)
        if self.channels_last:
            step, lanes = self.columns * self.width.step, larger(1, self.channels // self.vector)
            read = self.vector * self.itemsize
            each = mapped(wavefronts, self.pitch * self.itemsize, read, read, step, lanes)
            return window * each
        each = mapped(wavefronts, self.pitch * self.itemsize, *self._lanes_of_columns)
        return (ceil_div(window, self.read_vector) + 1) * each

    @cached_property
    def plane(self) -> int:
        """Elements of a staged plane."""
        of_pixels = self.plane_columns if self.channels_last else self.channels
        return self.plane_rows * self.pitch * of_pixels

    @cached_property
    def staged_elements(self) -> int:
        """Elements of shared memory of all stages."""
        return self.stages * round_up(self.plane, 16)

    @cached_property
    def copies(self) -> int:
        """Of a thread for a plane."""
        return ceil_div(self.plane_rows * self.plane_columns * self.channels // self.copy_vector, self.threads)

    @cached_property
    def copy_registers(self) -> int:
        return self.copies * chosen(self.copy_vector * self.itemsize < 4, 5, 2)

    @cached_property
    def met_planes(self) -> float:
        """Planes that a block meets, on average."""
        span = self.depth.span
        if self.backward:
            planes, halo = self.part_units + span - 1, span - 1
        else:
            planes, halo = self.depth.stride * (self.part_units - 1) + self.depth.taps, self.depth.taps - 1
        every = larger(1.0, self.depth.size / self.depth.residues)
        return chosen(self.parts == 1, every, 1.0 * planes - halo / self.parts)

    @cached_property
    def sector_share(self) -> float:
        """Bytes of device memory's sectors that a block's channels of a pixel touch, over their own."""
        if not self.channels_last:
            return 1.0
        own, pixel = self.channels * self.itemsize, self.problem.c * self.itemsize
        apart = 1.0 * (_SECTOR_BYTES - divisor(_SECTOR_BYTES, own, pixel)) / own
        return 1.0 + chosen(self.channel_blocks > 1, apart, 0.0)

    def resident(self, registers: int, shared_bytes: int, device: Device) -> int:
        """Blocks that a multiprocessor holds at once, with registers to spare: estimates are off by some."""
        held = round_up(registers + _SPARE_REGISTERS, 8)
        return larger(1, resident_blocks(held, self.threads, shared_bytes, SmLimits.of(device)))

    @property
    def volume(self) -> Struct:
        """What the kernels take."""
        names = ("y", "x") if self.backward else ("x", "y")
        source, target = (self.problem.tensor(name) for name in names)
        depth = self.depth
        step = depth.dilation if depth.stride == 1 else 1
        return VOLUME(
            channels=self.problem.c,
            in_size=source.shape[2:],
            in_first=(self.height.first, self.width.first - self.skew),
            **_strides("in", source),
            out_size=target.shape[2:],
            **_strides("out", target),
            first_in=depth.first_in,
            in_step=step,
            first_out=depth.first_out,
            out_step=step,
            first_unit=depth.first_unit,
            end_unit=depth.end_unit,
            part_units=self.part_units,
            channel_blocks=divide_by(self.channel_blocks),
            column_tiles=divide_by(self.column_tiles),
            row_tiles=divide_by(self.row_tiles),
            parts=divide_by(self.parts),
            residues=divide_by(depth.residues),
        )

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """Those of volume.cuh, but for the planes of the filters."""
        height, width = self.height, self.width
        return (
            ("ELEMENT", self.problem.x.dtype.value),
            ("CHANNELS_LAST", int(self.channels_last)),
            ("BACKWARD", int(self.backward)),
            ("FILTER_H", height.taps),
            ("FILTER_W", width.taps),
            ("STRIDE_D", self.depth.stride),
            ("STRIDE_H", height.stride),
            ("STRIDE_W", width.stride),
            ("DILATION_H", height.dilation),
            ("DILATION_W", width.dilation),
            ("PHASE_H", height.phase),
            ("PHASE_W", width.phase),
            ("CHANNELS", self.channels),
            ("VECTOR", self.vector),
            ("TILE_ROWS", self.rows),
            ("TILE_COLUMNS", self.columns),
            ("BLOCK_ROWS", self.block_rows),
            ("BLOCK_COLUMNS", self.block_columns),
            ("STAGES", self.stages),
            ("THREADS", self.threads),
            ("SKEW", self.skew),
            ("PITCH", self.pitch),
            ("ALIGNMENT", self.alignment),
            ("READ_VECTOR", self.read_vector),
            ("COPY_VECTOR", self.copy_vector),
            ("OUT_VECTOR", self.out_vector),
            VOLUME.define,
        )

    def is_economical(self, config: Config) -> bool:
        """Whether no smaller value of a parameter does the same, and threads have whole vectors."""
        least = 16 if self.channels_last else 1
        is_economical: bool = (
            (self.problem.c % self.vector == 0)
            & (self.channels_last | (self.vector == 1))
            & ((not self.channels_last) | (config["channels"] >= least))
            & (config["channels"] < 2 * max(least, self.problem.c))
            & (self.rows < 2 * self.height.units)
            & (self.columns < 2 * max(2, self.width.units))
            & (config["height"] < 2 * max(4, self.height.units))
            & (config["width"] < 2 * max(8, self.width.units))
            & (config["depth"] < 2 * max(8, self.depth.end_unit - self.depth.first_unit))
        )
        return is_economical

    def holds(self, registers: int, device: Device) -> bool:
        """Whether a thread can have so many registers, about, and a multiprocessor those of a block."""
        held = round_up(registers + _SPARE_REGISTERS, 8)
        return (registers <= _MOST_REGISTERS) & (resident_blocks(held, self.threads, 0, SmLimits.of(device)) > 0)

    @property
    def fits(self) -> bool:
        """Whether a block has threads and copies enough, and not too many."""
        fits: bool = (
            (self.threads <= _MOST_THREADS)
            & (self.copies <= _MOST_COPIES)
            & (self.items <= MAX_ELEMENTS)
            & (self.blocks <= MAX_ELEMENTS)
        )
        return fits


@functools.lru_cache(maxsize=1 << 13)
def wavefronts(pitch_bytes: int, between: int, read: int, step: int, lanes: int) -> float:
    """Cycles of shared memory for a read of a warp.

    Args:
        pitch_bytes: from one pixel or row to the next.
        between: bytes from one lane's read to the next one's.
        read: bytes of a lane.
        step: pixels or rows between those that neighbouring groups of lanes read.
        lanes: of a group, which read one pixel or row.
    """
    phases = max(1, 32 * read // _BANK_BYTES)
    cycles = 0
    for first in range(0, 32, 32 // phases):
        words: dict[int, set[int]] = {}
        for lane in range(first, first + 32 // phases):
            at = lane // lanes * step * pitch_bytes + lane % lanes * between
            for word in range(at // 4, max(at // 4 + 1, (at + read) // 4)):
                words.setdefault(word % 32, set()).add(word)
        cycles += max(map(len, words.values()))
    return float(cycles)


@functools.lru_cache(maxsize=1 << 13)
def best_pitch(least: int, itemsize: int, between: int, read: int, step: int, lanes: int) -> int:
    """Elements from one pixel or row to the next, at least `least`, whole 16 bytes, with the fewest `wavefronts`."""
    unit = _COPY_BYTES // itemsize
    pitches = [round_up(least, unit) + more * unit for more in range(4)]
    return min(pitches, key=lambda pitch: (wavefronts(pitch * itemsize, between, read, step, lanes), pitch))


def _strides(name: str, tensor: TensorDescriptor) -> dict[str, int]:
    """Elements between neighbours of each dimension."""
    image, channel, plane, row, pixel = tensor.strides
    steps = {"image": image, "plane": plane, "row": row, "pixel": pixel, "channel": channel}
    return {f"{name}_{dimension}": step for dimension, step in steps.items()}


def refuse_volumes(problem: ProblemDescription) -> Applicability:
    """Why kernels on planes of volumes cannot compute a problem, whatever its direction; APPLICABLE if they can."""
    return first_refusal(
        _refuse_channels(problem), refuse_tensors(problem), _refuse_steps(problem), _refuse_reach(problem)
    )


def _refuse_channels(problem: ProblemDescription) -> Applicability:
    if problem.groups == problem.c == problem.k:
        return APPLICABLE
    return Applicability(f"needs one filter a channel: groups={problem.groups} c={problem.c} k={problem.k}")


def _refuse_steps(problem: ProblemDescription) -> Applicability:
    backward = problem.direction is Direction.BACKWARD_DATA
    for dim in range(3):
        axis = VolumeAxis.of(problem, dim)
        if axis.stride > 1 and axis.dilation > 1 and (dim == 0 or backward):
            stride, dilation = problem.conv.stride, problem.conv.dilation
            return Applicability(f"walks the depth, or dx, by stride or by dilation, not by {stride} and {dilation}")
    return APPLICABLE


def _refuse_reach(problem: ProblemDescription) -> Applicability:
    # Tiles reach beyond the last row and column of a volume.
    for tensor in (problem.x, problem.y):
        if tensor.size + 4 * _LARGEST_TILE * math.prod(problem.conv.stride) * max(tensor.strides[3:]) > MAX_ELEMENTS:
            return Applicability(f"counts elements in 32 bits: tiles of {tensor.shape} reach beyond")
    return APPLICABLE
