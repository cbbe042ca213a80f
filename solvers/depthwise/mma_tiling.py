"""Tilings of depthwise convolutions of NHWC tensors for tensor cores, and which problems the kernels serve.

The same arithmetic as kernels_src/depthwise/depthwise_mma.cuh and depthwise/mma.cu.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Library, Place
from miofind.solver.columns import chosen, larger, smaller
from miofind.solver.solver import APPLICABLE, Applicability, KernelKey
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.limits import refuse_tensors
from miofind.solvers.common.packed_groups import GroupedAxis, odd_words

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset({Layout.NWC, Layout.NHWC}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

_MOST_TAPS = 64
_MOST_REACH = 16
_MOST_STRIDE = 4
_BLOCK = 8
_LOADED_AHEAD = 49  # matrices of taps that leave registers for a row's pixels besides those in use


def refuse_mma(problem: ProblemDescription) -> Applicability:
    """Why the kernels cannot compute a problem, whatever its direction and sizes of tiles; APPLICABLE if they can."""
    if not problem.groups == problem.c == problem.k:
        return Applicability(f"serves one filter a channel: groups={problem.groups} c={problem.c} k={problem.k}")
    if (answer := refuse_tensors(problem)).refused:
        return answer
    if problem.c % _BLOCK:
        return Applicability(f"moves {_BLOCK} channels at once: c={problem.c} is no multiple")
    planar = problem.lifted(2)
    if math.prod(planar.filter) > _MOST_TAPS:
        return Applicability(f"keeps filters in registers: {planar.filter} has more than {_MOST_TAPS} taps")
    if max(planar.conv.stride) > _MOST_STRIDE or planar.conv.stride[1] == 3:
        return Applicability(
            f"serves strides of 1, 2 and 4 columns and up to {_MOST_STRIDE} rows, not {planar.conv.stride}"
        )
    spans = [(taps - 1) * step for taps, step in zip(planar.filter, planar.conv.dilation, strict=True)]
    if max(spans) > _MOST_REACH:
        return Applicability(f"serves filters that reach {_MOST_REACH} pixels, not {spans} (rows, columns)")
    return APPLICABLE


@functools.lru_cache(maxsize=64)  # a search asks for each of thousands of configurations
def unit_axes(problem: ProblemDescription) -> tuple[GroupedAxis, GroupedAxis]:
    """Rows and columns of a 1-D or 2-D problem; backward weights meet pixels as forward does."""
    planar = problem.lifted(2)
    if planar.direction is Direction.BACKWARD_WEIGHTS:
        planar = replace(planar, direction=Direction.FORWARD)
    return GroupedAxis.of(planar, 0), GroupedAxis.of(planar, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedPixels:
    """Pixels of a block in shared memory, two neighbouring outputs to a pair.

    Attributes:
        columns: staged of a row.
        matrices: of 8 x 8 that a warp meets in a row of 8 pairs and 8 channels.
        shared_bytes: of all images.
    """

    columns: int
    matrices: int
    shared_bytes: int

    @staticmethod
    def of(width: GroupedAxis, *, images: int, rows: int, pairs: int, channels: int) -> PairedPixels:
        step = width.stride
        matrices = width.reach + step + 1
        pixel = odd_words(2 * channels)
        image_bytes = rows * 2 * step * (pairs + (matrices - 1) // (2 * step)) * pixel
        gap = chosen(images > 1, (pairs * pixel - image_bytes) % 128, 0)
        return PairedPixels(
            columns=(2 * pairs - 1) * step + width.reach + 1,
            matrices=matrices,
            shared_bytes=images * (image_bytes + gap),
        )


def unbalance(warps: int) -> float:
    """How much longer the fullest of the four schedulers of a multiprocessor takes than all would on average."""
    return round_up(warps, 4) / warps


def pairs_of(outputs: int, columns: int) -> int:
    """Pairs across a tile of at most `columns` outputs, as even as tiles can be."""
    tiles = ceil_div(outputs, columns)
    return ceil_div(ceil_div(outputs, tiles), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseTiling:
    """A configuration applied to a problem, forward or backward data: what the kernel's constants come to; of a table
    of configurations, arrays.

    Attributes:
        axes: rows and columns.
        rows, images, channels, warp_channels: as configured.
        pairs: of outputs, across a tile.
        pixels: staged.
        staged_rows: of an image.
        iterations: walks of a warp's channels.
        threads: of a block.
        registers: of a thread that spills nothing.
        fragments: of a row's pixels and 8 channels, at two taps each, in a phase of columns.
        products: of a walk, in units of depth 16.
        shared_bytes: of a block.
        tiles: across channels, rows, columns and images.
    """

    axes: tuple[GroupedAxis, GroupedAxis]
    rows: int
    images: int
    channels: int
    warp_channels: int
    pairs: int
    pixels: PairedPixels
    staged_rows: int
    iterations: int
    threads: int
    registers: int
    fragments: int
    products: int
    shared_bytes: int
    tiles: tuple[int, int, int, int]

    @property
    def blocks(self) -> int:
        """In the grid."""
        return math.prod(self.tiles)

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> DepthwiseTiling:
        height, width = axes = unit_axes(problem)
        rows, images, channels = (config[name] for name in ("rows", "images", "channels"))
        pairs = pairs_of(width.outputs, config["columns"])
        planar, row_tiles = problem.lifted(2), ceil_div(height.outputs, rows)
        met = _staged_rows(height, rows, planar.tensor(_source(problem)).shape[2])
        pixels = PairedPixels.of(width, images=images, rows=met, pairs=pairs, channels=channels)
        of_phase = width.phases // math.gcd(width.phases, planar.conv.dilation[1])
        taps = ceil_div(width.taps, of_phase)  # of a phase, at most
        halves = config["warp_channels"] // _BLOCK
        fragments = ceil_div(taps, 2)
        ahead = fragments * chosen(halves * height.taps * width.taps <= _LOADED_AHEAD, 7, 3)
        sums = smaller(rows, height.reach // height.stride + 1) * height.phases
        if planar.conv.dilation[0] == 1:
            sums = smaller(height.taps, sums)
        held = halves * (4 * sums + 13 * height.taps * taps // 10 + ahead)
        held += epilogue_registers(problem, 2 * halves, 2 * _BLOCK * halves)
        return DepthwiseTiling(
            axes=axes,
            rows=rows,
            images=images,
            channels=channels,
            warp_channels=config["warp_channels"],
            pairs=pairs,
            pixels=pixels,
            staged_rows=met,
            iterations=ceil_div(images * pairs, 8),
            threads=4 * channels // halves,
            registers=round_up(_dilated(problem) * 2 // 3 + held + 24, 8),
            fragments=fragments,
            products=halves * rows * height.taps * fragments,
            shared_bytes=pixels.shared_bytes + 2 * channels * height.taps * width.taps,
            tiles=(
                ceil_div(problem.c, channels),
                row_tiles,
                ceil_div(width.outputs, 2 * pairs),
                ceil_div(problem.n, images),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseWeightsTiling:
    """A configuration applied to a problem of backward weights: what the kernel's constants come to.

    Attributes:
        rows, images, channels, warps: as configured.
        pairs: of outputs, across a tile.
        x, dy: pixels staged.
        staged_rows: of an image of x.
        iterations: groups of 8 pairs of a tile.
        threads: of a block.
        registers: of a thread that spills nothing.
        products: of 8 pairs of a tile and 8 channels.
        shared_bytes: of a block.
        channel_tiles: of the grid.
        tiles: across rows, columns and images, which blocks share.
    """

    rows: int
    images: int
    channels: int
    warps: int
    pairs: int
    x: PairedPixels
    dy: PairedPixels
    staged_rows: int
    iterations: int
    threads: int
    registers: int
    products: int
    shared_bytes: int
    channel_tiles: int
    tiles: tuple[int, int, int]

    @property
    def tile_count(self) -> int:
        """Tiles to deal to the blocks of a channel tile."""
        return math.prod(self.tiles)

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> DepthwiseWeightsTiling:
        height, width = unit_axes(problem)
        rows, images, channels = config["rows"], config["images"], config["channels"]
        pairs = pairs_of(width.outputs, config["columns"])
        row_tiles, met = ceil_div(height.outputs, rows), _staged_rows(height, rows, problem.lifted(2).spatial[0])
        x = PairedPixels.of(width, images=images, rows=met, pairs=pairs, channels=channels)
        single = replace(width, stride=1, reach=0)
        dy = PairedPixels.of(single, images=images, rows=rows, pairs=pairs, channels=channels)
        products = height.taps * (width.taps // 2) + width.taps % 2 * ceil_div(height.taps, 2)
        kept = smaller(rows, height.reach // height.stride + 1)
        stages = config["stages"] * (x.shared_bytes + dy.shared_bytes)
        return DepthwiseWeightsTiling(
            rows=rows,
            images=images,
            channels=channels,
            warps=config["warps"],
            pairs=pairs,
            x=x,
            dy=dy,
            staged_rows=met,
            iterations=ceil_div(images * pairs, 8),
            threads=4 * channels * config["warps"],
            registers=round_up(_dilated(problem) + 4 * products + 2 * kept + 6 * ceil_div(x.matrices, 4) + 48, 8),
            products=rows * products,
            shared_bytes=larger(stages, 4 * config["warps"] * channels * height.taps * width.taps),
            channel_tiles=ceil_div(problem.c, channels),
            tiles=(row_tiles, ceil_div(width.outputs, 2 * pairs), ceil_div(problem.n, images)),
        )


def _staged_rows(height: GroupedAxis, rows: int, size: int) -> int:
    """Rows of an image of `size` that a tile of so many rows of outputs meets, without padding if there is one tile."""
    met = (rows - 1) * height.stride + height.reach + 1
    inside = smaller(met, size - height.first) - max(0, -height.first)
    return chosen(ceil_div(height.outputs, rows) == 1, larger(1, inside), met)


def _dilated(problem: ProblemDescription) -> int:
    """Registers more where the pixels that taps meet are apart, and so more of them are held."""
    return 24 if max(problem.conv.dilation) > 1 else 0


def _source(problem: ProblemDescription) -> str:
    return "y" if problem.direction is Direction.BACKWARD_DATA else "x"
