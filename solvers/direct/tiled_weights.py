"""ConvDirectTiledWeights: backward weights by direct convolution from shared-memory tiles.

Images and tiles of outputs are split over blocks; a split-K reduction adds their float32 partials in a fixed order.
Kernels: kernels_src/direct/tiled_weights.cu.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import resident_blocks
from miofind.solver.solver import APPLICABLE, OF_WEIGHTS, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import Axis, ceil_div, forward_axes, round_up
from miofind.solvers.common.limits import refuse_tensors
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.direct.tiled_cost import KEYS, LIMITS, TileRates, TileWork, least_tile_ms, plane_pitch, tile_ms

_MAX_ELEMENTS = 2**31 - 1
_MAX_WORKSPACE_BYTES = 1 << 30
_MAX_REGISTERS = 160
_STRIP = 4
_REDUCTION_THREADS = 256
_SHARED_BYTES = 48 << 10
_LAUNCH_MS = 0.011
_SHAPE = StructType(
    "Shape",
    **dict.fromkeys(("batch", "channels", "out_channels", "groups", "splits", "height", "width"), "int32"),
    **dict.fromkeys(("x_batch_stride", "x_channel_stride", "x_row_stride", "x_column_stride"), "int32"),
    **dict.fromkeys(("out_height", "out_width"), "int32"),
    **dict.fromkeys(("y_batch_stride", "y_channel_stride", "y_row_stride", "y_column_stride"), "int32"),
    **dict.fromkeys(("pad_top", "pad_left"), "int32"),
    **dict.fromkeys(("w_out_channel_stride", "w_channel_stride", "w_row_stride", "w_column_stride"), "int32"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/direct/tiled_weights.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        axes: the correlation of x and dy, rows and columns.
        threads: of a block.
        chunk: filter columns that a thread holds.
        window: inputs of a row that a strip of outputs meets through them.
        registers: of a thread that spills nothing.
        stage_rows: filter rows of a block.
        x_vector, y_vector: elements of x and dy loaded at once.
        shared_bytes: of a block.
        copies: loads of a block for one tile.
        blocks, tiles: in the grid, and tiles of outputs to split over them.
    """

    axes: tuple[Axis, Axis]
    threads: int
    chunk: int
    window: int
    registers: int
    stage_rows: int
    x_vector: int
    y_vector: int
    shared_bytes: int
    copies: int
    blocks: int
    tiles: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        whole = _whole(problem, _unsplit(config))
        return replace(whole, blocks=whole.blocks * config["splits"]) if config["splits"] > 1 else whole

    @staticmethod
    def of_one_split(problem: ProblemDescription, config: Config) -> _Tiling:
        """The tiling with one split, however many the configuration has."""
        height, width = forward_axes(problem)
        c, k = problem.c // problem.groups, problem.k // problem.groups
        channels_last = problem.x.layout.channels_last
        stage_rows = height.taps if config["whole_filter"] else 1
        strip_row = height.stride if stage_rows > 1 else 1
        strip_column = width.stride if width.taps > 1 else 1
        chunk = _chunk(width.taps)
        chunks = ceil_div(width.taps, chunk)
        window = (_STRIP - 1) * strip_column + (chunk - 1) * width.dilation + 1
        x_vector, y_vector = _vectors(problem, config, width)
        rows = (config["tile_h"] - 1) * strip_row + (stage_rows - 1) * height.dilation + 1
        columns = (config["tile_w"] - 1) * strip_column + (width.taps - 1) * width.dilation + 1
        columns = columns if channels_last else round_up(columns, x_vector)
        last_chunk = (chunks - 1) * chunk * width.dilation
        reach = (config["tile_w"] - _STRIP) * strip_column + last_chunk + round_up(window, 4)
        x_slots, y_slots = config["groups"] * config["tile_c"], config["groups"] * config["tile_k"]
        pixels = config["tile_h"] * config["tile_w"]
        x_floats = x_slots * plane_pitch(rows * round_up(max(columns, reach), 4))
        filters = ceil_div(k, config["tile_k"]) * ceil_div(c, config["tile_c"])
        row_blocks = height.taps // stage_rows
        sums = config["thread_k"] * config["thread_c"] * chunk
        return _Tiling(
            axes=(height, width),
            threads=y_slots // config["thread_k"] * (config["tile_c"] // config["thread_c"]) * stage_rows * chunks,
            chunk=chunk,
            window=window,
            registers=round_up(sums + _STRIP * config["thread_k"] + round_up(window, 4) + 44, 8),
            stage_rows=stage_rows,
            x_vector=x_vector,
            y_vector=y_vector,
            shared_bytes=4 * (x_floats + y_slots * plane_pitch(pixels)),
            copies=x_slots * rows * columns // x_vector + y_slots * pixels // y_vector,
            blocks=filters * ceil_div(problem.groups, config["groups"]) * row_blocks,
            tiles=problem.n * ceil_div(height.outputs, config["tile_h"]) * ceil_div(width.outputs, config["tile_w"]),
        )


@functools.lru_cache(maxsize=1 << 14)  # of all problems together
def _unsplit(config: Config) -> Config:
    """The same configuration with one split."""
    return Config({**config, "splits": 1})


@functools.lru_cache(maxsize=1 << 10)  # a ranking asks twice for every number of splits
def _whole(problem: ProblemDescription, config: Config) -> _Tiling:
    return _Tiling.of_one_split(problem, config)


def _chunk(taps: int) -> int:
    """Filter columns that a thread holds: up to 7, those that waste least."""
    return min(range(1, min(taps, 7) + 1), key=lambda c: (round_up(taps, c), -c))


def _vectors(problem: ProblemDescription, config: Config, width: Axis) -> tuple[int, int]:
    """Elements of x and of dy loaded at once: neighbouring channels, or columns that padding does not shift."""
    most = 16 // problem.x.dtype.itemsize
    if problem.x.layout.channels_last:
        return tuple(  # type: ignore[return-value]
            _channel_vector(most, channels // problem.groups, config[tile], problem.groups, config["groups"])
            for channels, tile in ((problem.c, "tile_c"), (problem.k, "tile_k"))
        )
    y_vector = math.gcd(most, width.outputs, config["tile_w"])
    if width.taps == 1 and width.stride > 1:
        return 1, y_vector
    return math.gcd(most, width.size, width.pad, config["tile_w"] * width.stride), y_vector


def _channel_vector(most: int, channels: int, tile: int, groups: int, tile_groups: int) -> int:
    if channels == 1:
        return math.gcd(most, groups, tile_groups) if tile == 1 else 1
    return math.gcd(most, channels, tile)


def _min_blocks(tiling: _Tiling) -> int:
    """Blocks that the kernel is compiled for a multiprocessor to hold at once, whatever the device; at least 1."""
    return max(1, resident_blocks(tiling.registers, tiling.threads, tiling.shared_bytes, LIMITS))


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width = tiling.axes
    tiles = ("tile_h", "tile_w", "tile_k", "tile_c", "groups", "thread_k", "thread_c")
    return (
        ("ELEMENT", problem.x.dtype.value),
        *((name.upper(), config[name]) for name in tiles),
        ("MIN_BLOCKS", _min_blocks(tiling)),
        ("FILTER_H", height.taps),
        ("FILTER_W", width.taps),
        ("STAGE_ROWS", tiling.stage_rows),
        ("CHUNK", tiling.chunk),
        ("STRIDE_H", height.stride),
        ("STRIDE_W", width.stride),
        ("DILATION_H", height.dilation),
        ("DILATION_W", width.dilation),
        ("CHANNELS_LAST", int(problem.x.layout.channels_last)),
        ("X_VECTOR", tiling.x_vector),
        ("Y_VECTOR", tiling.y_vector),
        ("SHARED_BYTES", tiling.shared_bytes),
        _SHAPE.define,
    )


def _sum_step(problem: ProblemDescription, config: Config, tiling: _Tiling) -> KernelStep:
    return KernelStep(
        source="direct/tiled_weights.cu",
        entry="direct_tiled_weights",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            Pointer(buffer="y"),
            Pointer(buffer="x"),
            Pointer(buffer="partials"),
            _shape(problem, config, tiling),
        ),
    )


def _shape(problem: ProblemDescription, config: Config, tiling: _Tiling) -> Struct:
    planar = problem.lifted(2)
    height, width = tiling.axes
    x, w, y = planar.x.strides, planar.w.strides, planar.y.strides
    return _SHAPE(
        batch=problem.n,
        channels=problem.c // problem.groups,
        out_channels=problem.k // problem.groups,
        groups=problem.groups,
        splits=config["splits"],
        height=height.size,
        width=width.size,
        x_batch_stride=x[0],
        x_channel_stride=x[1],
        x_row_stride=x[2],
        x_column_stride=x[3],
        out_height=height.outputs,
        out_width=width.outputs,
        y_batch_stride=y[0],
        y_channel_stride=y[1],
        y_row_stride=y[2],
        y_column_stride=y[3],
        pad_top=height.pad,
        pad_left=width.pad,
        w_out_channel_stride=w[0],
        w_channel_stride=w[1],
        w_row_stride=w[2],
        w_column_stride=w[3],
    )


def _split_k(problem: ProblemDescription, config: Config) -> SplitK:
    return SplitK.of(problem, config["splits"])


def _reduction(problem: ProblemDescription, config: Config, first: KernelStep) -> KernelStep:
    return _split_k(problem, config).reduction(
        first,
        _shape(problem, config, _Tiling.of(problem, config)),
        blocks=ceil_div(problem.w.size, _REDUCTION_THREADS),
        threads=_REDUCTION_THREADS,
        pdl=False,
    )


# Fitted to 900 configurations of 40 problems on an H200: the best of the first four by estimate is 1 % slower than the
# best measured, in the geometric mean.
_RATES = TileRates(
    product=2,
    copy=1,
    round=0,
    step=0,
    read=2.3,
    broadcast=0.9,
    latency=3800,
    copy_latency=160,
    convert=26,
    convert_latency=25,
    block=0,
)


def _work(problem: ProblemDescription, config: Config) -> TileWork:
    """What the first pass does."""
    tiling = _Tiling.of(problem, config)
    strips, vector = config["tile_h"] * config["tile_w"] // _STRIP, max(tiling.x_vector, tiling.y_vector)
    return TileWork(
        blocks=tiling.blocks,
        resident=_min_blocks(tiling),
        steps=ceil_div(tiling.tiles, config["splits"]),
        warps=ceil_div(tiling.threads, 32),
        products=strips * config["thread_k"] * config["thread_c"] * tiling.chunk * _STRIP,
        reads=strips * config["thread_c"] * tiling.window / 4,
        broadcasts=strips * config["thread_k"],
        rounds=strips,
        copies=tiling.copies / tiling.threads,
        converts=problem.x.dtype is not DataType.FLOAT32 or (problem.x.layout.channels_last and vector > 1),
    )


def _config(**values: int | bool) -> Config:
    return Config({"groups": 1, "whole_filter": True, "splits": 1, **values})


# What default_configs ranks by estimate, with every number of splits; one of the last two is valid for every applicable
# problem. Together they come within 10 % of the least estimate of the whole space, in the geometric mean over layers of
# 20 networks.
_SHORT_LIST = (
    _config(tile_h=8, tile_w=8, tile_k=64, tile_c=16, thread_k=4, thread_c=4),
    _config(tile_h=4, tile_w=16, tile_k=64, tile_c=16, thread_k=4, thread_c=4),
    _config(tile_h=4, tile_w=32, tile_k=64, tile_c=16, thread_k=4, thread_c=4),
    _config(tile_h=4, tile_w=16, tile_k=32, tile_c=16, thread_k=4, thread_c=4),
    _config(tile_h=4, tile_w=32, tile_k=32, tile_c=64, thread_k=4, thread_c=4),
    _config(tile_h=4, tile_w=8, tile_k=64, tile_c=64, thread_k=8, thread_c=4, whole_filter=False),
    _config(tile_h=1, tile_w=32, tile_k=64, tile_c=64, thread_k=8, thread_c=4),
    _config(tile_h=1, tile_w=8, tile_k=32, tile_c=64, thread_k=8, thread_c=4),
    _config(tile_h=1, tile_w=16, tile_k=32, tile_c=4, thread_k=4, thread_c=1),
    _config(tile_h=8, tile_w=8, tile_k=32, tile_c=4, thread_k=4, thread_c=1),
    _config(tile_h=4, tile_w=8, tile_k=64, tile_c=1, thread_k=8, thread_c=1),
    _config(tile_h=8, tile_w=8, tile_k=32, tile_c=1, thread_k=8, thread_c=1),
    _config(tile_h=4, tile_w=8, tile_k=4, tile_c=16, thread_k=4, thread_c=1),
    _config(tile_h=8, tile_w=8, tile_k=4, tile_c=4, thread_k=4, thread_c=1),
    _config(tile_h=4, tile_w=8, tile_k=4, tile_c=4, thread_k=4, thread_c=1, groups=32),
    _config(tile_h=4, tile_w=16, tile_k=4, tile_c=4, thread_k=4, thread_c=1, groups=8),
    _config(tile_h=4, tile_w=32, tile_k=1, tile_c=1, thread_k=1, thread_c=1, groups=32),
    _config(tile_h=1, tile_w=16, tile_k=1, tile_c=1, thread_k=1, thread_c=1, groups=32),
    _config(tile_h=8, tile_w=32, tile_k=1, tile_c=1, thread_k=1, thread_c=1, groups=8),
    _config(tile_h=8, tile_w=8, tile_k=1, tile_c=1, thread_k=1, thread_c=1, groups=8),
    _config(tile_h=8, tile_w=32, tile_k=1, tile_c=1, thread_k=1, thread_c=1, groups=8, whole_filter=False),
    _config(tile_h=8, tile_w=32, tile_k=1, tile_c=1, thread_k=1, thread_c=1),
    _config(tile_h=1, tile_w=8, tile_k=1, tile_c=1, thread_k=1, thread_c=1),
    _config(tile_h=1, tile_w=8, tile_k=1, tile_c=1, thread_k=1, thread_c=1, whole_filter=False),
)


@functools.cache
def _split_short_list() -> tuple[Config, ...]:
    """The short list with every number of splits: made once, for to write their texts takes longer than a ranking."""
    splits = ConvDirectTiledWeights.parameters["splits"]
    return tuple(Config({**config, "splits": count}) for config in _SHORT_LIST for count in splits)


class ConvDirectTiledWeights(Solver):
    """Backward weights of tiles in shared memory, float32 accumulators in registers, deterministic split-K reduction.

    Configuration: a block computes `tile_k` x `tile_c` filters in each of `groups` groups, whole or one row of them,
    from `tile_h` x `tile_w` outputs at a time; a thread holds `thread_k` x `thread_c` filters; the outputs are dealt
    to `splits` blocks.
    """

    id = "ConvDirectTiledWeights"
    algorithm = Algorithm.DIRECT
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": (1, 4, 8),
        "tile_w": (8, 16, 32),
        "tile_k": (1, 4, 32, 64),
        "tile_c": (1, 4, 16, 64),
        "groups": (1, 8, 32),
        "thread_k": (1, 4, 8),
        "thread_c": (1, 4),
        "whole_filter": (True, False),
        "splits": (1, 4, 16, 64, 256),
    }
    sources = ("direct/tiled_weights.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        weights = Direction.BACKWARD_WEIGHTS
        convolution = ProblemDescription.convolution
        return (
            convolution(x=(2, 19, 17, 15), w=(37, 19, 3, 3), padding=1, direction=weights),
            convolution(
                x=(2, 16, 14, 14), w=(24, 16, 1, 1), dtype=DataType.FLOAT16, layout=Layout.NHWC, direction=weights
            ),
            convolution(x=(1, 32, 15, 15), w=(32, 1, 5, 5), padding=2, stride=2, groups=32, direction=weights),
            convolution(x=(1, 6, 40), w=(10, 6, 7), dilation=3, dtype=DataType.BFLOAT16, direction=weights),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_tensors(problem, _MAX_ELEMENTS)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in _SHORT_LIST[-2:]):
            return Applicability(f"filter {problem.filter} is too large for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        c, k, groups = problem.c // problem.groups, problem.k // problem.groups, config["groups"]
        if config["tile_k"] % config["thread_k"] or config["tile_c"] % config["thread_c"]:
            return False
        if config["tile_k"] >= 2 * k or config["tile_c"] >= 2 * c:
            return False
        if groups > 1 and (config["tile_k"] < k or config["tile_c"] < c or groups >= 2 * problem.groups):
            return False
        if _split_k(problem, config).bytes > _MAX_WORKSPACE_BYTES and config["splits"] > 1:
            return False
        tiling = _Tiling.of(problem, config)
        height, width = tiling.axes
        if config["tile_h"] >= 2 * height.outputs or config["tile_w"] >= 2 * max(8, width.outputs):
            return False
        if not config["whole_filter"] and height.taps == 1:
            return False
        if config["splits"] > max(1, tiling.tiles) or tiling.blocks > _MAX_ELEMENTS:
            return False
        fits_registers = tiling.registers <= _MAX_REGISTERS and tiling.registers * tiling.threads <= 65536
        shared_limit = device.shared_bytes or _SHARED_BYTES
        return tiling.threads <= 512 and fits_registers and tiling.shared_bytes <= shared_limit

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        """Where tiles reach beyond the outputs: zeros there meet inputs that no output of theirs meets."""
        height, width = _Tiling.of(problem, config).axes
        return bool(height.outputs % config["tile_h"] or width.outputs % config["tile_w"])

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return tuple(self.ranked_estimates(problem, device, _split_short_list())[:4])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        busy_ms = tile_ms(_work(problem, config), _RATES, device)
        return _time_ms(problem, device, config["splits"], busy_ms)

    def least_ms(self, problem: ProblemDescription, device: Device) -> float:
        return _time_ms(problem, device, 1, least_tile_ms(problem.flops // 2, _RATES, device))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config)
        step = _sum_step(problem, config, tiling)
        return _split_k(problem, config).solution(step, _reduction(problem, config, step))


def _time_ms(problem: ProblemDescription, device: Device, splits: int, busy_ms: float) -> float:
    """Of both passes, the first of which has multiprocessors busy for so long."""
    partial_bytes = 2 * SplitK.of(problem, splits).bytes
    moved_ms = 1e3 * (problem.bytes + partial_bytes) / device.bandwidth_bytes_per_s
    return _LAUNCH_MS + max(busy_ms, 3.5 * moved_ms) + 0.7 * moved_ms


SOLVERS = (ConvDirectTiledWeights(),)
