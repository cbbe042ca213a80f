"""Tilings of grouped convolutions of NCHW tensors: whole rows in shared memory.

The same arithmetic as kernels_src/grouped/nchw_rows.cuh, grouped/nchw.cu and grouped/nchw_weights.cu.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.columns import chosen, larger, mapped, smaller
from miofind.solver.solver import KernelKey
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.packed_groups import (
    SOURCE,
    GroupedAxis,
    PackedGroups,
    aligned_units_of,
    odd_words,
    packed_groups_of_aligned_unit,
)

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset({Layout.NCW, Layout.NCHW}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

_WORD = 16  # bytes that shared memory moves at once
_LINE = 128  # bytes of all of its banks
_MOST_BLOCKS = 4  # blocks of 8 filters of a warp
_MOST_SUMS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class NchwRows:
    """Rows of a tensor's images in shared memory: [channel][image][row][column], zeros between rows.

    Attributes:
        channels, images, rows: that are staged.
        height, width: of the tensor.
        pitch: elements from row to row.
        channel_bytes: from channel to channel.
    """

    channels: int
    images: int
    rows: int
    height: int
    width: int
    pitch: int
    channel_bytes: int

    @property
    def vector(self) -> int:
        """Elements of a row that one copy moves, 1 where images are copied as a whole."""
        return math.gcd(8, self.width)

    @property
    def is_flat(self) -> bool:
        """Whether rows are too odd to be copied one by one."""
        return self.vector == 1

    @property
    def bytes(self) -> int:
        """Of rows that are laid out, with a word of zeros before and after."""
        return _WORD + self.channels * self.channel_bytes + _WORD

    @property
    def arriving_bytes(self) -> int:
        """That one tile's copies fill."""
        if self.is_flat:
            return 2 * self.images * self.channels * self.height * self.width + _WORD
        return self.bytes

    @property
    def laid_bytes(self) -> int:
        """Of rows that are laid out besides the copies."""
        return self.bytes if self.is_flat else 0

    @property
    def copies(self) -> int:
        """That one tile takes."""
        if self.is_flat:
            return self.images * self.channels * self.height * self.width // 8
        return self.channels * self.images * self.rows * self.width // self.vector


@functools.lru_cache(maxsize=4096)
def quiet_pitch(size: int, lanes: tuple[int, ...]) -> int:
    """The least multiple of 16 bytes from `size` on at which two neighbouring channels' lanes meet fewest banks twice.

    Args:
        size: bytes of a channel.
        lanes: offsets in bytes of the 16-byte words that four lanes read of one channel.
    """

    def most_met(pitch: int) -> int:
        met = [at % _LINE // _WORD for first in (0, pitch) for at in (first + lane for lane in lanes)]
        return max(met.count(bank) for bank in set(met))

    first = round_up(size, _WORD)
    return min((first + _WORD * i for i in range(_LINE // _WORD)), key=lambda pitch: (most_met(pitch), pitch))


@dataclass(frozen=True, slots=True, kw_only=True)
class NchwWeightsTiling:
    """A configuration applied to backward weights: what the kernel's constants come to.

    Attributes:
        x, y: staged rows of inputs and of gradients.
        channel_blocks, item_blocks: blocks of 8 channels and of 8 filters of a warp.
        items: pairs of a warp's channels, 8 or 16, and its filters in a block.
        streams: segments of 8 outputs down `rows` rows, of which a warp takes four at once.
        rows: outputs of a stream.
        row_tiles, image_tiles: tiles of outputs.
        units: packs of groups of a block.
        channel_tiles: blocks for all packs.
        warps: that share the streams.
        sums: registers of a thread that hold sums.
        threads: of a block.
        shared_bytes: of a block.
    """

    x: NchwRows
    y: NchwRows
    channel_blocks: int
    item_blocks: int
    items: int
    streams: int
    rows: int
    row_tiles: int
    image_tiles: int
    units: int
    channel_tiles: int
    warps: int
    sums: int
    threads: int
    shared_bytes: int

    @property
    def tile_count(self) -> int:
        """Tiles that splits share."""
        return self.row_tiles * self.image_tiles

    @property
    def sets(self) -> int:
        """Of four streams."""
        return ceil_div(self.streams, 4)

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> NchwWeightsTiling:
        planar = problem.lifted(2)
        (filter_y, filter_x), (out_h, out_w), conv = planar.filter, planar.out_spatial, planar.conv
        packs, units, images, rows = PackedGroups.of(problem), config["units"], config["images"], config["rows"]
        stride_h, stride_w = conv.stride
        share_c, tile_rows = packs.c // config["shares"], rows * config["row_groups"]
        channels, filters = units * share_c, units * packs.k
        channel_blocks = chosen(share_c % 16 > 0, 1, 2)
        products = ceil_div(channel_blocks * filter_x, 2) * filter_y
        item_blocks = mapped(functools.partial(_item_blocks, packs.k // 8), products)
        items = units * (share_c // 8 // channel_blocks) * (packs.k // 8 // item_blocks)
        segments = ceil_div(out_w, 8)
        patch_rows = (tile_rows - 1) * stride_h + (filter_y - 1) * conv.dilation[0] + 1
        x_pitch = _x_pitch(planar)

        def x_channel(rows: int, row_groups: int, images: int, patch_rows: int) -> int:
            row = 2 * x_pitch
            lanes = _lanes(segments, row_groups, 16 * stride_w, row * rows * stride_h, row * patch_rows)
            return quiet_pitch(row * patch_rows * images, lanes)

        def y_channel(rows: int, row_groups: int, images: int) -> int:
            row = 16 * segments
            lanes = _lanes(segments, row_groups, 16, row * rows, row * rows * row_groups)
            return quiet_pitch(row * rows * row_groups * images, lanes)

        x = NchwRows(
            channels=channels, images=images, rows=patch_rows, height=planar.spatial[0], width=planar.spatial[1],
            pitch=x_pitch, channel_bytes=mapped(x_channel, rows, config["row_groups"], images, patch_rows),
        )  # fmt: skip
        y = NchwRows(
            channels=filters, images=images, rows=tile_rows, height=out_h, width=out_w,
            pitch=8 * segments, channel_bytes=mapped(y_channel, rows, config["row_groups"], images),
        )  # fmt: skip
        streams = segments * config["row_groups"] * images
        staged = x.laid_bytes + y.laid_bytes + config["stages"] * (x.arriving_bytes + y.arriving_bytes)
        zeros = chosen(streams % 4 > 0, (rows - 1) * 2 * y.pitch + _WORD, 0)
        row_floats = chosen(config["shares"] == 1, packs.c // packs.groups, share_c) * filter_y * filter_x
        return NchwWeightsTiling(
            x=x,
            y=y,
            channel_blocks=channel_blocks,
            item_blocks=item_blocks,
            items=items,
            streams=streams,
            rows=rows,
            row_tiles=ceil_div(out_h, tile_rows),
            image_tiles=ceil_div(problem.n, images),
            units=units,
            channel_tiles=ceil_div(ceil_div(problem.groups, packs.groups), units) * config["shares"],
            warps=config["warps"],
            sums=4 * products * item_blocks,
            threads=32 * items * config["warps"],
            shared_bytes=larger(staged + zeros, 4 * config["warps"] * filters * _sum_pitch(row_floats)),
        )


def shifts(problem: ProblemDescription) -> range:
    """From the least to the largest column of x that output column 0 meets, of a problem of two dimensions."""
    conv = problem.conv
    return range(-conv.pad_before[1], (problem.filter[1] - 1) * conv.dilation[1] - conv.pad_before[1] + 1)


@functools.lru_cache(maxsize=256)
def _x_pitch(planar: ProblemDescription) -> int:
    """Elements from row to row of x, which hold the padding and what whole segments of 8 outputs meet."""
    width, out_w, stride, reached = planar.spatial[1], planar.out_spatial[1], planar.conv.stride[1], shifts(planar)
    right = (out_w - 1) * stride + reached[-1] + 1
    return round_up(max(width + max(0, -reached[0]), right, 8 * ceil_div(out_w, 8) * stride), 8)


def _lanes(segments: int, row_groups: int, segment: int, group: int, image: int) -> tuple[int, ...]:
    """Where the first four streams begin."""
    return tuple(
        s % segments * segment + s // segments % row_groups * group + s // (segments * row_groups) * image
        for s in range(4)
    )


def _item_blocks(blocks: int, products: int) -> int:
    """Blocks of 8 filters of a warp: as many as share the pack evenly and leave registers for all else."""
    counts = range(1, _MOST_BLOCKS + 1)
    return max((n for n in counts if blocks % n == 0 and 4 * products * n <= _MOST_SUMS), default=1)


def _sum_pitch(floats: int) -> int:
    """Floats of shared memory of a filter's sums: 8 modulo 16, so that neighbouring filters are in other banks."""
    whole = round_up(floats, 4)
    return whole + (8 - whole) % 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NchwTiling:
    """A configuration applied to forward or backward data: what the kernel's constants come to.

    Attributes:
        axes: rows and columns.
        source: staged rows of what is read.
        depth: summed channels of a unit, in 16s; a warp's shares of its results likewise.
        shares: of a unit's results, 16 each.
        rows: outputs of a warp, of each phase.
        width: tiles of 8 outputs of a row, of each phase.
        in_tiles: tiles of 8 inputs of a row that a warp reads.
        row_tiles, image_tiles: tiles of outputs.
        channel_tiles: blocks for all units.
        written: 16-byte words of results of a tile.
        threads: of a block.
        shared_bytes: of a block.
    """

    axes: tuple[GroupedAxis, GroupedAxis]
    source: NchwRows
    depth: int
    shares: int
    rows: int
    width: int
    in_tiles: int
    row_tiles: int
    image_tiles: int
    channel_tiles: int
    written: int
    threads: int
    shared_bytes: int

    @property
    def tile_count(self) -> int:
        """Tiles of one channel tile."""
        return self.row_tiles * self.image_tiles

    @property
    def sums(self) -> int:
        """Registers of a thread that hold sums."""
        return 4 * self.axes[0].phases * self.axes[1].phases * self.rows * self.width

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> NchwTiling:
        planar = problem.lifted(2)
        height, width = axes = (GroupedAxis.of(planar, 0), GroupedAxis.of(planar, 1))
        unit_in, unit_out = nchw_unit_channels(problem)
        unit_k = unit_in if problem.direction is Direction.BACKWARD_DATA else unit_out
        packs, units, images, rows = PackedGroups.of(problem), config["units"], config["images"], config["rows"]
        tile_rows = rows * config["row_groups"]
        read, (out_h, out_w) = planar.tensor(SOURCE[problem.direction]), planar.output.shape[2:]
        patch_rows = (tile_rows - 1) * height.stride + height.reach + 1
        tiles = ceil_div(width.outputs, 8)
        met = ceil_div((8 * tiles - 1) * width.stride + width.first + width.reach + 1, 8)
        in_tiles = round_up(max(tiles * width.stride, min(met, ceil_div(read.shape[3], 8))), width.stride)
        pitch = max(8 * in_tiles, round_up(read.shape[3], 8))
        source = NchwRows(
            channels=units * unit_in, images=images, rows=patch_rows, height=read.shape[2], width=read.shape[3],
            pitch=pitch, channel_bytes=odd_words(2 * images * patch_rows * pitch),
        )  # fmt: skip
        row_tiles, area = ceil_div(height.outputs, tile_rows), out_h * out_w
        channel_pitch = chosen(row_tiles == 1, area, odd_words(2 * tile_rows * height.phases * out_w) // 2)
        taps = math.prod(planar.filter)
        filters = units * unit_k * odd_words(taps * 2 * packs.c)
        if packs.groups > 1:  # which arrive in another order
            filters += _WORD + units * unit_k * 2 * taps * (packs.c // packs.groups)
        staged = source.laid_bytes + config["stages"] * source.arriving_bytes
        shares = unit_out // 16
        return NchwTiling(
            axes=axes,
            source=source,
            depth=unit_in // 16,
            shares=shares,
            rows=rows,
            width=tiles,
            in_tiles=in_tiles,
            row_tiles=row_tiles,
            image_tiles=ceil_div(problem.n, images),
            channel_tiles=ceil_div(aligned_units_of(problem), units),
            written=images * units * unit_out * smaller(area, tile_rows * height.phases * out_w) // 8,
            threads=32 * units * shares * config["row_groups"] * images,
            shared_bytes=staged + larger(2 * images * units * unit_out * channel_pitch, filters),
        )


def nchw_unit_channels(problem: ProblemDescription) -> tuple[int, int]:
    """Channels of a unit that are summed and that result: multiples of 16, both."""
    packs, count = PackedGroups.of(problem), packed_groups_of_aligned_unit(problem)
    c, k = count * packs.c, count * packs.k
    return (k, c) if problem.direction is Direction.BACKWARD_DATA else (c, k)
