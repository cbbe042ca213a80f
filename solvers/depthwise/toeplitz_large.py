"""ConvDepthwiseLarge: depthwise convolution with large filters on tensor cores, forward and backward data.

Kernel: kernels_src/depthwise/toeplitz_large.cu. ConvDepthwiseLargeWeights serves backward weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import cycles_of_waves
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.correlation import Axis, Correlation, ceil_div, correlations, round_up
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.limits import MAX_ELEMENTS
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

_MAX_DIAGONALS = 16
_MAX_SUMS = 128
_SHARED_BYTES = 48 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to one correlation: what the kernel's constants come to.

    kernels_src/depthwise/toeplitz_large.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        tile_h, tile_w: outputs of a block, no more than there are; columns in whole blocks of 8.
        in_rows, in_columns: inputs staged for them.
        first_column: of the inputs staged, less that of the outputs.
        left: the tap that joins input and output columns of equal number within the tile.
        out_columns: of the tile that are stored.
        in_vector, out_vector: how elements are loaded and stored.
        slot_blocks, warp_blocks: blocks of 16 output rows, counted over images, of a channel and of a warp.
        depth_blocks: blocks of 16 input columns.
        diagonals: Toeplitz blocks of 8 x 8 that differ and are not zero.
        products: pairs of a block of input and one of output columns that have a tap in common.
        threads: of a block.
        shared_bytes: of a block.
        blocks: in the grid.
    """

    tile_h: int
    tile_w: int
    in_rows: int
    in_columns: int
    first_column: int
    left: int
    out_columns: int
    in_vector: StagedVector
    out_vector: StagedVector
    slot_blocks: int
    warp_blocks: int
    depth_blocks: int
    diagonals: int
    products: int
    threads: int
    shared_bytes: int
    blocks: int

    @staticmethod
    def of(conv: Correlation, config: Config) -> _Tiling:
        height, width = conv.axes
        channels, images = config["channels"], config["images"]
        tile_h, tile_w = min(config["tile_h"], height.outputs), min(config["tile_w"], round_up(width.outputs, 8))
        in_rows = min(height.size, tile_h + height.taps - 1)
        columns = StagedColumns.of(width, tile_w)
        column_blocks, depth_blocks = tile_w // 8, ceil_div(columns.count, 16)
        first_diagonal = max(1 - column_blocks, -((columns.left + 7) // 8))
        last_diagonal = min(ceil_div(columns.count, 8) - 1, (width.taps + 6 - columns.left) // 8)
        diagonals = last_diagonal - first_diagonal + 1
        source, target = (conv.problem.tensor(name) for name in _operands(conv))
        tile_is_all = tile_h == height.outputs and tile_w >= width.outputs
        all_staged = in_rows == height.size and height.pad >= 0 and columns.first == 0 and columns.count == width.size
        in_vector = StagedVector.of(source, channels, whole=tile_is_all and all_staged)
        slot_blocks = ceil_div(tile_h * images, 16)
        in_pitch, out_pitch = 16 * depth_blocks + 8, 8 * (column_blocks // 2 * 2 + 1)
        gap = gap_slots(images)
        staged = (gap + channels * (in_rows * images + gap)) * in_pitch
        staged += channels * height.taps * 4 * _copy_words(diagonals)
        staged += round_up(channels * height.taps * width.taps + 7, 8)
        return _Tiling(
            tile_h=tile_h,
            tile_w=tile_w,
            in_rows=in_rows,
            in_columns=columns.count if conv.channels_last else round_up(columns.count, in_vector.columns),
            first_column=columns.first,
            left=columns.left,
            out_columns=min(tile_w, width.outputs),
            in_vector=in_vector,
            out_vector=StagedVector.of(target, channels, whole=tile_is_all),
            slot_blocks=slot_blocks,
            warp_blocks=ceil_div(slot_blocks, config["warps"]),
            depth_blocks=depth_blocks,
            diagonals=diagonals,
            products=_products(column_blocks, depth_blocks, first_diagonal, last_diagonal),
            threads=32 * channels * config["warps"],
            shared_bytes=2 * max(staged, channels * tile_h * images * out_pitch),
            blocks=_blocks(conv, config, tile_h, tile_w),
        )


@functools.lru_cache(maxsize=256)  # whether a configuration is valid is asked before its estimate
def _tiling(problem: ProblemDescription, config: Config) -> _Tiling:
    """A configuration applied to a problem, which is one correlation."""
    (conv,) = correlations(problem)
    return _Tiling.of(conv, config)


def _operands(conv: Correlation) -> tuple[str, str]:
    """Names of the tensors that are read beside the filter, and written."""
    return ("y", "x") if conv.flipped else ("x", "y")


def _copy_words(diagonals: int) -> int:
    """Words of one of the two copies of a staged filter row; the copies start in different banks."""
    words = 4 * diagonals + 4
    while not 8 <= words % 32 <= 24:
        words += 4
    return words


def _products(column_blocks: int, depth_blocks: int, first_diagonal: int, last_diagonal: int) -> int:
    return sum(
        2 * k - j <= last_diagonal and 2 * k + 1 - j >= first_diagonal
        for k in range(depth_blocks)
        for j in range(column_blocks)
    )


def _blocks(conv: Correlation, config: Config, tile_h: int, tile_w: int) -> int:
    height, width = conv.axes
    tiles = ceil_div(height.outputs, tile_h) * ceil_div(width.outputs, tile_w)
    images, channels = ceil_div(conv.problem.n, config["images"]), ceil_div(conv.problem.c, config["channels"])
    return int(tiles * images * channels)


def _registers(tiling: _Tiling) -> int:
    """Registers of a thread that spills nothing: sums, fragments, taps of two rows, and addresses."""
    sums = tiling.warp_blocks * tiling.tile_w // 2
    return round_up(sums + 8 * tiling.warp_blocks + 2 * tiling.diagonals + 40, 8)


def _launch(conv: Correlation, config: Config) -> KernelStep:
    tiling = _Tiling.of(conv, config)
    source, target = _operands(conv)
    return KernelStep(
        source="depthwise/toeplitz_large.cu",
        entry="depthwise_toeplitz_large",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(conv, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            shape_of(conv.problem, conv.axes, tiling.first_column),
            *epilogue_arguments(conv.problem),
        ),
    )


def _defines(conv: Correlation, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width = conv.axes
    return (
        ("ELEMENT", conv.problem.x.dtype.value),
        ("TILE_H", tiling.tile_h),
        ("TILE_W", tiling.tile_w),
        *((name.upper(), config[name]) for name in ("images", "channels", "warps")),
        ("FILTER_Y", height.taps),
        ("FILTER_X", width.taps),
        ("FLIPPED", int(conv.flipped)),
        ("CHANNELS_LAST", int(conv.channels_last)),
        ("IN_ROWS", tiling.in_rows),
        ("IN_COLUMNS", tiling.in_columns),
        ("OUT_COLUMNS", tiling.out_columns),
        ("LEFT", tiling.left),
        ("IN_VECTOR", tiling.in_vector.length),
        ("IN_FLAT", int(tiling.in_vector.flat)),
        ("OUT_VECTOR", tiling.out_vector.length),
        ("OUT_FLAT", int(tiling.out_vector.flat)),
        ("MIN_BLOCKS", min_blocks(_registers(tiling), tiling.threads, tiling.shared_bytes)),
        ("SHARED_BYTES", tiling.shared_bytes),
        SHAPE.define,
        *epilogue_defines(conv.problem),
    )


# Cycles of a multiprocessor for a product of fragments, for a read of 512 bytes of shared memory, and to move a vector:
# channels-last ones lie in memory sectors of their own. Cycles that a warp waits in a filter row and for a product, and
# a block to load and store. Set against 600 measurements on an H200: most estimates of configurations that are within
# twice the best are off by less than a fifth.
_PRODUCT = 1.7
_READ = 4.5
_VECTOR, _CHANNELS_VECTOR = 0.4, 2.4
_ROW_LATENCY, _PRODUCT_LATENCY = 90, 8
_BLOCK_LATENCY = 3000
_LAUNCH_MS = 0.003


@functools.lru_cache(maxsize=16)  # all configurations ask
def _met_share(height: Axis) -> float:
    """Share of the pairs of a filter row and an output row that meet an input row."""
    first = (max(0, height.pad - y) for y in range(height.taps))
    end = (min(height.outputs, height.size + height.pad - y) for y in range(height.taps))
    met = sum(max(0, stop - start) for start, stop in zip(first, end, strict=True))
    return met / (height.taps * height.outputs)


def _busy_ms(conv: Correlation, config: Config, tiling: _Tiling, device: Device) -> float:
    """Milliseconds of the multiprocessors, device memory aside."""
    taps, images = conv.axes[0].taps, config["images"]
    share = min(1.0, _met_share(conv.axes[0]) + 8 / (tiling.tile_h * images))
    row = tiling.slot_blocks * share * (tiling.products * _PRODUCT + tiling.depth_blocks * _READ)
    vectors = tiling.in_rows * tiling.in_columns / tiling.in_vector.length
    vectors += tiling.tile_h * tiling.out_columns / tiling.out_vector.length
    moved = images * vectors * (_CHANNELS_VECTOR if conv.channels_last else _VECTOR)
    busy = config["channels"] * (taps * (row + 3 * tiling.diagonals) + moved)
    row_latency = _ROW_LATENCY + tiling.warp_blocks * share * tiling.products * _PRODUCT_LATENCY
    alone = _BLOCK_LATENCY + taps * row_latency + config["channels"] * moved
    resident = min_blocks(_registers(tiling), tiling.threads, tiling.shared_bytes)
    cycles = cycles_of_waves(tiling.blocks, resident, device, lambda blocks: max(blocks * busy, alone))
    return float(1e3 * cycles / device.clock_hz)


# What default_configs ranks by estimate; the last is valid for every applicable problem.
_SHORT_LIST = (
    *Config.product(
        {
            ("tile_h", "tile_w"): ((8, 16), (16, 16), (32, 32), (64, 64)),
            ("images", "channels"): ((8, 1), (4, 1), (4, 2), (8, 2), (8, 4), (4, 8), (2, 8), (1, 8)),
            "warps": (1, 2, 4, 8),
        }
    ),
    Config.of(tile_h=8, tile_w=16, images=1, channels=1, warps=1),
)


class ConvDepthwiseLarge(Solver):
    """Depthwise convolution as products with Toeplitz matrices of the filter's rows, with float32 accumulators.

    The zeros of those matrices are multiplied: an infinity or NaN of the input spreads over its row's outputs.

    Configuration: a block computes `tile_h` x `tile_w` outputs of `channels` channels of `images` images. `warps` warps
    share the rows of a channel.
    """

    id = "ConvDepthwiseLarge"
    algorithm = Algorithm.DIRECT
    directions = OF_IMAGES
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": (8, 16, 32, 64),
        "tile_w": (16, 32, 64),
        "images": (1, 2, 4, 8),
        "channels": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8),
    }
    sources = ("depthwise/toeplitz_large.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        back = Direction.BACKWARD_DATA
        return (
            depthwise_example(32, x=(8, 32, 14, 14), w=(27, 27), padding=13, dtype=half),
            depthwise_example(32, x=(3, 32, 14, 14), w=(27, 27), padding=13, dtype=half, layout=Layout.NHWC),
            depthwise_example(16, x=(9, 16, 7, 7), w=(13, 13), padding=6, dtype=brain, direction=back),
            depthwise_example(
                12, x=(2, 12, 33, 45), w=(9, 11), padding=((2, 4), (9, 0)), dtype=brain, layout=Layout.NHWC
            ),
            depthwise_example(4, x=(2, 4, 40, 75), w=(21, 31), padding=(3, 15), dtype=half, direction=back),
            depthwise_example(3, x=(2, 3, 300), w=(15,), padding=((20, 1),), dtype=half),
            depthwise_example(
                24, x=(3, 24, 14, 14), w=(13, 13), padding=6, dtype=half, layout=Layout.NHWC, epilogue="bias.residual"
            ),
            depthwise_example(
                6, x=(5, 6, 13, 15), w=(9, 9), padding=4, dtype=brain, epilogue="scale.channel_bias.residual.silu"
            ),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_large(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _SHORT_LIST[-1]):
            return Applicability(f"filter {problem.filter} is too large for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        (conv,) = correlations(problem)
        height, width = conv.axes
        if config["images"] >= 2 * problem.n or config["channels"] >= 2 * problem.c:
            return False
        if config["tile_h"] >= 2 * max(8, height.outputs) or config["tile_w"] >= 2 * max(16, width.outputs):
            return False
        tiling = _tiling(problem, config)
        if config["warps"] > tiling.slot_blocks or tiling.diagonals > _MAX_DIAGONALS:
            return False
        if tiling.warp_blocks * tiling.tile_w // 2 > _MAX_SUMS or tiling.threads > 1024:
            return False
        fits_registers = _registers(tiling) * tiling.threads <= 65536
        fits_shared = tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES)
        return fits_registers and fits_shared and tiling.blocks <= MAX_ELEMENTS

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return tuple(self.ranked_estimates(problem, device, _SHORT_LIST)[:8])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        (conv,) = correlations(problem)
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        return _LAUNCH_MS + moved_ms + _busy_ms(conv, config, _tiling(problem, config), device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=tuple(_launch(conv, config) for conv in correlations(problem)))


SOLVERS = (ConvDepthwiseLarge(),)
