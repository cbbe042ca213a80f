"""Register tiles of depthwise kernels: a thread's outputs, and the inputs that they meet.

Pure arithmetic on shapes, the same as kernels_src/depthwise/register_tile.cuh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.columns import chosen, divisor, larger, made, smaller
from miofind.solver.solver import APPLICABLE, Applicability, KernelKey, first_refusal
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.limits import refuse_overpadded, refuse_oversized
from miofind.solvers.common.packed_groups import least_ample

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
        layouts=frozenset({Layout.NCW, Layout.NCHW}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

COPY_BYTES = 16
MAX_TAPS = 64
"""Of a filter: a thread keeps them in registers."""

MAX_DEFAULTS = 8
"""Configurations of one of these solvers that a find without a search measures."""

MAX_WINDOW = 128
"""Sources from the first that a tile meets to the last: the compiler goes through them one by one."""

_MAX_REACH = 96
_MAX_PRODUCTS = 2048  # of a tile: each is an instruction of a kernel
_MAX_TILE = 64  # elements of a tile: each is a register of a thread
_MAX_STRIDE = 8


@dataclass(frozen=True, kw_only=True)
class RegisterTileAxis:
    """One axis of an image cut into register tiles of outputs.

    Output o and tap t meet source o * stride - pad + t * dilation; in a transposed convolution source s and tap t meet
    output s * stride - pad + t * dilation instead. Sources are counted from a tile's origin.

    Attributes:
        size, outputs, taps: of the whole axis.
        length: outputs of a tile; where transposed, a multiple of the stride.
        first, last: sources that a tile meets.
        met: sources between them that it does meet.
    """

    size: int
    outputs: int
    taps: int
    stride: int
    dilation: int
    pad: int
    transposed: bool
    length: int
    first: int
    last: int
    met: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # configurations have few lengths
    def of(problem: ProblemDescription, dim: int, length: int, *, transposed: bool) -> RegisterTileAxis:
        """That of a 2-D problem, with tiles of `length` outputs or, of a shorter axis, of all.

        Args:
            problem: whose sources are x and outputs y, or the other way round where transposed.
            dim: 0 or 1.
            length: wanted.
            transposed: whether it gives dx.
        """
        conv = problem.conv
        size, outputs = problem.spatial[dim], problem.out_spatial[dim]
        if transposed:
            size, outputs = outputs, size
        stride = conv.stride[dim]
        length = min(length, outputs)
        if transposed:
            length = round_up(length, stride)
        taps, dilation, pad = problem.filter[dim], conv.dilation[dim], conv.pad_before[dim]
        first, last, met = _met(length, taps, stride, dilation, pad, transposed)
        return RegisterTileAxis(
            size=size,
            outputs=outputs,
            taps=taps,
            stride=stride,
            dilation=dilation,
            pad=pad,
            transposed=transposed,
            length=length,
            first=first,
            last=last,
            met=met,
        )

    @cached_property
    def count(self) -> int:
        """Tiles of the axis."""
        return ceil_div(self.outputs, self.length)

    @cached_property
    def step(self) -> int:
        """Sources from one tile's origin to the next's."""
        return self.length // self.stride if self.transposed else self.length * self.stride

    @cached_property
    def window(self) -> int:
        """Sources from the first that a tile meets to the last."""
        return self.last - self.first + 1

    @cached_property
    def leaves(self) -> bool:
        """Whether what some tiles meet lies outside, and other tiles differ."""
        return self.count > 1 and (self.first < 0 or self.last + (self.count - 1) * self.step >= self.size)

    @cached_property
    def products(self) -> int:
        """Pairs of an output of a tile and a tap that meet in a source, which the compiler cannot rule out."""
        size = self.size if self.count == 1 else None
        return _products(self.length, self.taps, self.stride, self.dilation, self.pad, self.transposed, size)


def _source(output: int, tap: int, stride: int, dilation: int, pad: int, transposed: bool) -> int | None:
    """The source that an output and a tap meet in, if any."""
    if not transposed:
        return output * stride - pad + tap * dilation
    whole, rest = divmod(output + pad - tap * dilation, stride)
    return None if rest else whole


@functools.lru_cache(maxsize=4096)
def _met(length: int, taps: int, stride: int, dilation: int, pad: int, transposed: bool) -> tuple[int, int, int]:
    pairs = ((o, t) for o in range(length) for t in range(taps))
    sources = {_source(o, t, stride, dilation, pad, transposed) for o, t in pairs} - {None}
    met = [source for source in sources if source is not None]
    return min(met), max(met), len(met)


@functools.lru_cache(maxsize=4096)
def _products(length: int, taps: int, stride: int, dilation: int, pad: int, transposed: bool, size: int | None) -> int:
    """Pairs of an output and a tap that meet in a source, of so many sources where they are given."""
    pairs = ((o, t) for o in range(length) for t in range(taps))
    met = (_source(o, t, stride, dilation, pad, transposed) for o, t in pairs)
    return sum(source is not None and (size is None or 0 <= source < size) for source in met)


def vector(itemsize: int, *counts: int) -> int:
    """Elements that move at once within rows and tiles of `counts` elements."""
    return divisor(COPY_BYTES // itemsize, *counts)


def padded_size(itemsize: int, count: int) -> int:
    """Elements of shared memory that hold a segment of `count`, wherever it begins."""
    copied = COPY_BYTES // itemsize
    return round_up(count + copied - 1, copied)


def tap_pitch(taps: int) -> int:
    """Floats from one staged filter to the next."""
    return 4 * (ceil_div(taps, 4) | 1)


@dataclass(frozen=True, kw_only=True)
class RegisterTiling:
    """What the depthwise kernels have in common of a configuration applied to a problem.

    Attributes:
        problem: lifted to two dimensions.
        down, across: the axes of the results, or of dy for backward weights.
        channel_images: of a block; one is one channel of one image. For backward weights, the filters of a block.
        row_blocks: of a channel of an image; they are read and computed apart.
    """

    problem: ProblemDescription
    down: RegisterTileAxis
    across: RegisterTileAxis
    channel_images: int
    row_blocks: int

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.problem.x.dtype.itemsize

    @property
    def transposed(self) -> bool:
        return self.down.transposed

    @property
    def multiplier(self) -> int:
        """Filters of a channel."""
        return self.problem.k // self.problem.c

    @cached_property
    def taps(self) -> int:
        """Of a filter."""
        return self.down.taps * self.across.taps

    @cached_property
    def products(self) -> int:
        """Multiplications of a tile and a filter."""
        return self.down.products * self.across.products

    @cached_property
    def row_block_tiles(self) -> int:
        """Tiles down a row block."""
        return ceil_div(self.down.count, self.row_blocks)

    @cached_property
    def sources(self) -> int:
        """Channels of images that a block reads at most to compute its own, or of x beside those of dy."""
        images, multiplier = self.channel_images, self.multiplier
        if self.transposed:
            return images * multiplier
        apart = (images - 1 + chosen(images % multiplier > 0, multiplier - 1, 0)) // multiplier + 1
        return chosen(multiplier % images == 0, 1, apart)

    @cached_property
    def source_elements(self) -> int:
        """Elements of a source that a row block meets at most."""
        down, reach = self.down, (self.row_block_tiles - 1) * self.down.step + self.down.window
        return chosen(self.row_blocks == 1, down.size, smaller(down.size, reach)) * self.across.size

    @cached_property
    def elements(self) -> int:
        """Elements of a channel of an image that a row block has at most."""
        return smaller(self.down.outputs, self.row_block_tiles * self.down.length) * self.across.outputs

    @cached_property
    def zeros(self) -> int:
        """Elements of a row of zeros, if some tiles meet rows outside their image."""
        return chosen(self.down.leaves, round_up(self.across.size, COPY_BYTES // self.itemsize), 0)

    @cached_property
    def vector(self) -> int:
        """Elements that a thread moves at once."""
        return vector(self.itemsize, self.across.outputs, self.across.length)

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """What both kernels are told."""
        down, across = self.down, self.across
        pairs = (
            ("", (down.size, across.size)),
            ("OUT_", (down.outputs, across.outputs)),
            ("FILTER_", (down.taps, across.taps)),
            ("STRIDE_", (down.stride, across.stride)),
            ("DILATION_", (down.dilation, across.dilation)),
            ("PAD_", (down.pad, across.pad)),
        )
        return (
            ("ELEMENT", self.problem.x.dtype.value),
            ("FILTERS", self.problem.k),
            ("MULTIPLIER", self.multiplier),
            *((f"{name}{letter}", value) for name, values in pairs for letter, value in zip("HW", values, strict=True)),
            ("CHANNEL_IMAGES", self.channel_images),
            ("ROW_BLOCKS", self.row_blocks),
            ("TILE_ROWS", down.length),
            ("TILE_COLUMNS", across.length),
        )

    @property
    def has_whole_row_blocks(self) -> bool:
        """Whether the last row block has tiles, too."""
        return (self.row_blocks == 1) | ((self.row_blocks - 1) * self.row_block_tiles < self.down.count)

    def has_least_tile(self, config: Config, rows: Sequence[int], columns: Sequence[int]) -> bool:
        """Whether no smaller choice of rows or columns gives the same tile.

        Args:
            rows, columns: what tiles were to choose from.
        """
        most_rows, most_columns = (least_ample(rows, self.down.outputs), least_ample(columns, self.across.outputs))
        has_least_tile: bool = (config["rows"] <= most_rows) & (config["columns"] <= most_columns)
        return has_least_tile

    def wastes_little(self, rows: Sequence[int], columns: Sequence[int]) -> bool:
        """Whether tiles do not lie outside in large part, and their code is not too long.

        Args:
            rows, columns: what tiles were to choose from.
        """
        down, across = self.down, self.across
        return (
            (3 * down.count * down.length <= 4 * larger(rows[2], down.outputs))
            & (3 * across.count * across.length <= 4 * larger(columns[0] + 2, across.outputs))
            & (self.products <= _MAX_PRODUCTS)
            & (down.length * across.length <= _MAX_TILE)
        )


def register_tile_axes(
    planar: ProblemDescription, config: Config, *, transposed: bool
) -> tuple[RegisterTileAxis, RegisterTileAxis]:
    """The axes of a configuration of `rows` and `columns`, or of a table of many."""
    down = made(lambda rows: RegisterTileAxis.of(planar, 0, rows, transposed=transposed), config["rows"])
    across = made(lambda columns: RegisterTileAxis.of(planar, 1, columns, transposed=transposed), config["columns"])
    return down, across


def row_blocks_of(down: RegisterTileAxis, rows: int) -> int:
    """Row blocks of about so many rows that an image is cut into; one where rows is 0."""
    return chosen(rows > 0, ceil_div(down.count, larger(1, rows // down.length)), 1)


def refuse_register_tiles(problem: ProblemDescription) -> Applicability:
    """Why the kernels on register tiles cannot compute a problem, whatever its direction; APPLICABLE if they can."""
    if problem.groups != problem.c:
        return Applicability(f"needs filters of one channel: groups={problem.groups} c={problem.c}")
    if len({tensor.dtype for tensor in (problem.x, problem.w, problem.y)}) > 1:
        return Applicability("needs one dtype for x, w and y")
    if math.prod(problem.filter) > MAX_TAPS:
        return Applicability(f"keeps at most {MAX_TAPS} taps in registers, not a filter of {problem.filter}")
    if min(tensor.size for tensor in (problem.x, problem.w, problem.y)) == 0:
        return Applicability("serves no empty tensors")
    if (answer := first_refusal(refuse_oversized(problem), refuse_overpadded(problem))).refused:
        return answer
    conv = problem.conv
    if max(conv.stride) > _MAX_STRIDE:
        return Applicability(f"serves strides up to {_MAX_STRIDE}, not {conv.stride}")
    if max((t - 1) * d for t, d in zip(problem.filter, conv.dilation, strict=True)) > _MAX_REACH:
        return Applicability(f"serves taps up to {_MAX_REACH} apart: the dilated filter is too large")
    return APPLICABLE
