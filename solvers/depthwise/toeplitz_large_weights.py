"""ConvDepthwiseLargeWeights: backward weights of depthwise convolutions with large filters on tensor cores.

Splits share the tiles of outputs; a split-K reduction adds their float32 partials in a fixed order. Kernels:
kernels_src/depthwise/toeplitz_large_weights.cu.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import cycles_of_waves, register_limit
from miofind.solver.solver import APPLICABLE, OF_WEIGHTS, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    int32s,
)
from miofind.solvers.common.correlation import Axis, ceil_div, forward_axes, round_up
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.depthwise.staged_images import (
    KEYS,
    SHAPE,
    StagedColumns,
    StagedVector,
    gap_slots,
    min_blocks,
    refuse_large,
    shape_of,
)

_MAX_SUMS = 128
_REDUCTION_THREADS = 256
_MAX_WORKSPACE_BYTES = 1 << 30
_SHARED_BYTES = 48 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/depthwise/toeplitz_large_weights.cu computes the same from the defines, and does not compile where it
    differs.

    Attributes:
        axes: the correlation of x and w, rows and columns.
        tile_h, tile_w: outputs of a tile, no more than there are; columns in whole blocks of 8.
        in_rows: inputs staged for them.
        columns: inputs staged for them.
        in_columns, out_columns: of a tile that are loaded.
        in_vector, out_vector: how elements are loaded.
        row_groups, warp_rows: blocks or passes of a block that share the filter's rows, and rows of a warp.
        slot_blocks: blocks of 16 output rows, counted over images.
        diagonals: diagonals of 8 x 8 blocks of inputs and outputs that have a tap in common.
        products: pairs of a block of input and one of output columns that have a tap in common.
        threads: of a block.
        shared_bytes: of a block.
        blocks, tiles: of the grid, and of all images, which splits share.
    """

    axes: tuple[Axis, Axis]
    tile_h: int
    tile_w: int
    in_rows: int
    columns: StagedColumns
    in_columns: int
    out_columns: int
    in_vector: StagedVector
    out_vector: StagedVector
    row_groups: int
    warp_rows: int
    slot_blocks: int
    diagonals: int
    products: int
    threads: int
    shared_bytes: int
    blocks: int
    tiles: int

    @staticmethod
    @functools.lru_cache(maxsize=512)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        height, width = forward_axes(problem)
        channels, images, warps = config["channels"], config["images"], config["warps"]
        tile_h, tile_w = _tile(height, width, config)
        in_rows = min(height.size, tile_h + height.taps - 1)
        columns = StagedColumns.of(width, tile_w)
        column_blocks, in_blocks = tile_w // 8, ceil_div(columns.count, 16)
        first_diagonal = max(1 - column_blocks, -((columns.left + 15) // 8))
        last_diagonal = min(2 * in_blocks - 2, (width.taps + 6 - columns.left) // 8)
        diagonals = last_diagonal - first_diagonal + 1
        tile_is_all = tile_h == height.outputs and tile_w >= width.outputs
        all_staged = in_rows == height.size and columns.first == 0 and columns.count == width.size
        in_vector = StagedVector.of(problem.x, channels, whole=tile_is_all and all_staged)
        row_groups = ceil_div(height.taps, warps * config["warp_rows"])
        gap = gap_slots(images)
        staged = (gap + channels * (in_rows * images + gap)) * (16 * in_blocks + 8)
        staged += (gap + channels * (tile_h * images + gap)) * (round_up(tile_w, 16) + 8)
        channel_blocks = ceil_div(problem.c, channels)
        return _Tiling(
            axes=(height, width),
            tile_h=tile_h,
            tile_w=tile_w,
            in_rows=in_rows,
            columns=columns,
            in_columns=columns.count if problem.x.layout.channels_last else round_up(columns.count, in_vector.columns),
            out_columns=min(tile_w, width.outputs),
            in_vector=in_vector,
            out_vector=StagedVector.of(problem.y, channels, whole=tile_is_all),
            row_groups=row_groups,
            warp_rows=ceil_div(height.taps, warps * row_groups),
            slot_blocks=ceil_div(tile_h * images, 16),
            diagonals=diagonals,
            products=sum(
                first_diagonal <= 2 * k - j <= last_diagonal for k in range(in_blocks) for j in range(column_blocks)
            ),
            threads=32 * channels * warps,
            shared_bytes=max(
                2 * staged, 2 * staged * config["whole_filter"] + 4 * channels * warps * diagonals * 16 * 9
            ),
            blocks=channel_blocks * (1 if config["whole_filter"] else row_groups) * config["splits"],
            tiles=_tiles(problem, config),
        )


def _tile(height: Axis, width: Axis, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile."""
    return min(config["tile"], height.outputs), min(max(16, config["tile"]), round_up(width.outputs, 8))


def _tiles(problem: ProblemDescription, config: Config) -> int:
    """Of all images."""
    height, width = forward_axes(problem)
    tile_h, tile_w = _tile(height, width, config)
    return ceil_div(height.outputs, tile_h) * ceil_div(width.outputs, tile_w) * ceil_div(problem.n, config["images"])


def _registers(tiling: _Tiling) -> int:
    """Registers of a thread that spills nothing: sums, fragments, and addresses."""
    sums = 4 * tiling.warp_rows * tiling.diagonals
    return round_up(sums + tiling.tile_w // 4 + 8 * ceil_div(tiling.columns.count, 16) + 56, 8)


def _spills(tiling: _Tiling) -> bool:
    """Whether a thread lacks registers beside as many blocks as the kernel is told to leave room for.

    Fitted to 1,700 kernels for sm_80 and sm_90a, some of odd sizes. Vectors that run on from row to row in one of the
    tensors alone are under way with where each of their elements goes; where they do in both, compilers keep less.
    """
    blocks = min_blocks(_registers(tiling), tiling.threads, tiling.shared_bytes)
    others = 4 * ceil_div(tiling.tile_w, 16) + 56
    if tiling.in_vector.flat != tiling.out_vector.flat:
        in_flight = 8 if blocks * tiling.threads <= 512 else 4  # as in the kernel
        others = max(others, 13 * in_flight + 12)
    return 4 * tiling.warp_rows * tiling.diagonals + others > register_limit(blocks, tiling.threads)


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width = tiling.axes
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("TILE_H", tiling.tile_h),
        ("TILE_W", tiling.tile_w),
        *((name.upper(), config[name]) for name in ("images", "channels", "warps")),
        ("WARP_ROWS", tiling.warp_rows),
        ("PASSES", tiling.row_groups if config["whole_filter"] else 1),
        ("FILTER_Y", height.taps),
        ("FILTER_X", width.taps),
        ("CHANNELS_LAST", int(problem.x.layout.channels_last)),
        ("IN_ROWS", tiling.in_rows),
        ("IN_COLUMNS", tiling.in_columns),
        ("OUT_COLUMNS", tiling.out_columns),
        ("LEFT", tiling.columns.left),
        ("IN_VECTOR", tiling.in_vector.length),
        ("IN_FLAT", int(tiling.in_vector.flat)),
        ("OUT_VECTOR", tiling.out_vector.length),
        ("OUT_FLAT", int(tiling.out_vector.flat)),
        ("MIN_BLOCKS", min_blocks(_registers(tiling), tiling.threads, tiling.shared_bytes)),
        ("SHARED_BYTES", tiling.shared_bytes),
        ("ONE_SPLIT", int(config["splits"] == 1)),
        SHAPE.define,
    )


def _sum_step(problem: ProblemDescription, config: Config, tiling: _Tiling) -> KernelStep:
    result = _split_k(problem, config).target
    return KernelStep(
        source="depthwise/toeplitz_large_weights.cu",
        entry="depthwise_toeplitz_large_weights",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", result)),
            shape_of(problem, tiling.axes, tiling.columns.first),
            *int32s(config["splits"]),
        ),
    )


def _split_k(problem: ProblemDescription, config: Config) -> SplitK:
    return SplitK.of(problem, config["splits"])


def _reduction(split_k: SplitK, first: KernelStep) -> KernelStep:
    return split_k.reduction(
        first,
        *int32s(split_k.results, split_k.splits),
        blocks=ceil_div(split_k.results, _REDUCTION_THREADS),
        threads=_REDUCTION_THREADS,
        pdl=False,
    )


# Cycles of a multiprocessor for a product of fragments, for a read of 512 bytes of shared memory, and to move a vector:
# channels-last ones lie in memory sectors of their own. Cycles that a warp waits for a block of slots and for a
# product, and a block for a tile. Set against 500 measurements on an H200: most estimates of configurations that are
# within twice the best are off by less than a third.
_PRODUCT = 1.4
_READ = 3.5
_VECTOR, _CHANNELS_VECTOR = 0.6, 4.0
_SLOT_LATENCY, _PRODUCT_LATENCY = 60, 5
_TILE_LATENCY = 3000
_LAUNCH_MS = 0.0045


def _busy_ms(problem: ProblemDescription, config: Config, device: Device) -> float:
    """Milliseconds of the multiprocessors, device memory aside."""
    tiling = _Tiling.of(problem, config)
    height, passes = tiling.axes[0], tiling.row_groups if config["whole_filter"] else 1
    share = min(1.0, height.size / (height.size + height.taps / 4) + 8 / tiling.in_rows)
    row = share * (tiling.products * _PRODUCT + ceil_div(tiling.columns.count, 16) * _READ)
    slot = config["warps"] * (tiling.warp_rows * row + tiling.tile_w / 16 * _READ)
    vectors = tiling.in_rows * tiling.in_columns / tiling.in_vector.length
    vectors += tiling.tile_h * tiling.out_columns / tiling.out_vector.length
    cost = _CHANNELS_VECTOR if problem.x.layout.channels_last else _VECTOR
    moved = config["channels"] * config["images"] * vectors * cost
    busy = moved + config["channels"] * passes * tiling.slot_blocks * slot
    waits = _SLOT_LATENCY + tiling.warp_rows * share * tiling.products * _PRODUCT_LATENCY
    alone = _TILE_LATENCY + moved + passes * tiling.slot_blocks * waits
    tiles = ceil_div(tiling.tiles, config["splits"])
    resident = min_blocks(_registers(tiling), tiling.threads, tiling.shared_bytes)
    cycles = cycles_of_waves(tiling.blocks, resident, device, lambda blocks: max(blocks * busy, alone))
    return float(1e3 * tiles * cycles / device.clock_hz)


# What default_configs ranks by estimate; the last is valid for every applicable problem.
_SHORT_LIST = (
    *Config.product(
        {
            "tile": (8, 16, 32, 64),
            ("images", "channels"): ((8, 1), (4, 1), (1, 1), (8, 4), (8, 8), (4, 8)),
            ("warps", "warp_rows"): ((8, 2), (8, 4), (4, 8), (2, 8)),
            "whole_filter": (False,),
            "splits": (1, 4),
        }
    ),
    *Config.product(
        {
            "tile": (16, 32, 64),
            ("images", "channels"): ((1, 8), (2, 8), (4, 8), (8, 1)),
            ("warps", "warp_rows"): ((1, 4), (2, 2), (2, 4), (4, 4)),
            "whole_filter": (True,),
            "splits": (1, 2, 4, 8),
        }
    ),
    Config.of(tile=8, images=1, channels=1, warps=1, warp_rows=1, whole_filter=False, splits=1),
)


class ConvDepthwiseLargeWeights(Solver):
    """Backward weights of depthwise convolutions: products of input and dy rows, added along diagonals.

    Zeros around the images are multiplied: an infinity or NaN spreads over taps of its channel that do not meet it.

    Configuration: a block computes `channels` filters from tiles of `tile` x `tile` outputs, at least 16 columns, of
    `images` images. `warps` warps share a filter, up to `warp_rows` rows each. Other blocks compute the other rows or,
    with `whole_filter`, the same block does in further passes. `splits` blocks share the tiles.
    """

    id = "ConvDepthwiseLargeWeights"
    algorithm = Algorithm.DIRECT
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile": (8, 16, 32, 64),
        "images": (1, 2, 4, 8),
        "channels": (1, 2, 4, 8),
        "warps": (1, 2, 4, 8),
        "warp_rows": (1, 2, 4, 8),
        "whole_filter": (False, True),
        "splits": (1, 2, 4, 8),
    }
    sources = ("depthwise/toeplitz_large_weights.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(depthwise_example, direction=Direction.BACKWARD_WEIGHTS)
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        return (
            depthwise(32, x=(8, 32, 14, 14), w=(27, 27), padding=13, dtype=half),
            depthwise(32, x=(3, 32, 14, 14), w=(27, 27), padding=13, dtype=half, layout=Layout.NHWC),
            depthwise(16, x=(9, 16, 7, 7), w=(13, 13), padding=6, dtype=brain),
            depthwise(12, x=(2, 12, 33, 45), w=(9, 11), padding=((2, 4), (9, 0)), dtype=brain, layout=Layout.NHWC),
            depthwise(3, x=(2, 3, 300), w=(15,), padding=((20, 1),), dtype=half),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_large(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _SHORT_LIST[-1]):
            return Applicability(f"filter {problem.filter} is too large for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        height, width = forward_axes(problem)
        if config["images"] >= 2 * problem.n or config["channels"] >= 2 * problem.c:
            return False
        if config["tile"] >= 2 * max(8, height.outputs, width.outputs):
            return False
        if config["warps"] > height.taps or config["warp_rows"] >= 2 * ceil_div(height.taps, config["warps"]):
            return False
        if config["splits"] > 1 and _split_k(problem, config).bytes > _MAX_WORKSPACE_BYTES:
            return False
        tiles = _tiles(problem, config)
        if config["splits"] > tiles or (config["whole_filter"] and config["splits"] != tiles):
            return False
        tiling = _Tiling.of(problem, config)
        if config["whole_filter"] and tiling.row_groups == 1:
            return False
        if 4 * tiling.warp_rows * tiling.diagonals > _MAX_SUMS:
            return False
        if tiling.threads > 1024 or _registers(tiling) * tiling.threads > 65536 or _spills(tiling):
            return False
        fits_shared = tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)
        return fits_shared and tiling.blocks <= MAX_ELEMENTS

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return tuple(self.ranked_estimates(problem, device, _SHORT_LIST)[:8])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        partial_bytes = 2 * _split_k(problem, config).bytes if config["splits"] > 1 else 0
        launches = 1 + (config["splits"] > 1)
        moved_ms = 1e3 * (problem.bytes + partial_bytes) / device.bandwidth_bytes_per_s
        return float(launches * _LAUNCH_MS + moved_ms + _busy_ms(problem, config, device))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config)
        first = _sum_step(problem, config, tiling)
        split_k = _split_k(problem, config)
        return split_k.solution(first, _reduction(split_k, first))


SOLVERS = (ConvDepthwiseLargeWeights(),)
