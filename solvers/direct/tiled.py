"""ConvDirectTiled: direct convolution from shared-memory tiles, forward and backward data.

Kernel: kernels_src/direct/tiled.cu. Backward weights have a kernel of their own: ConvDirectTiledWeights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import resident_blocks
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import Correlation, ceil_div, correlations, round_up
from miofind.solvers.common.limits import refuse_tensors
from miofind.solvers.direct.tiled_cost import KEYS, LIMITS, TileRates, TileWork, least_tile_ms, plane_pitch, tile_ms

_MAX_ELEMENTS = 2**31 - 1
_MAX_LAUNCHES = 16
_MAX_WINDOW = 24
_SHARED_BYTES = 48 << 10
_LAUNCH_MS = 0.006
_SHAPE = StructType(
    "Shape",
    **dict.fromkeys(("in_channels", "out_channels", "groups", "in_height", "in_width"), "int32"),
    **dict.fromkeys(("in_batch_stride", "in_channel_stride", "in_row_stride", "in_column_stride"), "int32"),
    **dict.fromkeys(("out_height", "out_width", "pad_top", "pad_left"), "int32"),
    **dict.fromkeys(("filter_group_stride", "filter_out_channel_stride", "filter_in_channel_stride"), "int32"),
    **dict.fromkeys(("filter_row_stride", "filter_column_stride"), "int32"),
    **dict.fromkeys(("out_batch_stride", "out_channel_stride", "out_row_stride", "out_column_stride"), "int32"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to one correlation: what the kernel's constants come to.

    kernels_src/direct/tiled.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        threads: of a block.
        chunk: filter columns that a thread slides over at once.
        window: inputs of a row that its pixels meet through them.
        stage_rows: filter rows staged at a time.
        vector, out_vector: elements loaded and stored at once.
        shared_bytes: of a block.
        stage_copies: loads of a block to fill one stage.
    """

    threads: int
    chunk: int
    window: int
    stage_rows: int
    vector: int
    out_vector: int
    shared_bytes: int
    stage_copies: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # whether it is valid is asked before its estimate
    def of(conv: Correlation, config: Config) -> _Tiling:
        height, width = conv.axes
        taps_y, taps_x = max(1, height.taps), max(1, width.taps)
        stage_rows = taps_y if config["whole_filter"] else 1
        strip_row = height.stride if stage_rows > 1 else 1
        strip_column = width.stride if taps_x > 1 else 1
        chunk, vector = _chunk(conv, config), _vector(conv, config)
        window = _window(conv, config, chunk)
        rows = (config["tile_h"] - 1) * strip_row + (stage_rows - 1) * height.dilation + 1
        columns = (config["tile_w"] - 1) * strip_column + (taps_x - 1) * width.dilation + 1
        columns = columns if conv.channels_last else round_up(columns, vector)
        last_chunk = (ceil_div(taps_x, chunk) - 1) * chunk * width.dilation
        reach = (config["tile_w"] - config["thread_w"]) * strip_column + last_chunk + round_up(window, 4)
        slots, filters = config["groups"] * config["channels"], config["groups"] * config["tile_k"]
        stage_taps = config["channels"] * stage_rows * taps_x
        patch_floats = slots * plane_pitch(rows * round_up(max(columns, reach), 4))
        return _Tiling(
            threads=config["tile_h"] * (config["tile_w"] // config["thread_w"]) * (filters // config["thread_k"]),
            chunk=chunk,
            window=window,
            stage_rows=stage_rows,
            vector=vector,
            out_vector=_out_vector(conv, config),
            shared_bytes=4 * config["stages"] * (patch_floats + stage_taps * plane_pitch(filters)),
            stage_copies=slots * rows * columns // vector + stage_taps * filters,
        )


def _window(conv: Correlation, config: Config, chunk: int) -> int:
    width = conv.axes[1]
    step = width.stride if width.taps > 1 else 1
    return int((config["thread_w"] - 1) * step + (chunk - 1) * width.dilation + 1)


def _chunk(conv: Correlation, config: Config) -> int:
    """Filter columns held at once: those that waste least, with a window of bounded length."""
    taps = max(1, conv.axes[1].taps)
    fitting = [c for c in range(2, min(taps, 8) + 1) if _window(conv, config, c) <= _MAX_WINDOW]
    return min(fitting, key=lambda c: (round_up(taps, c), -c), default=1)


def _vector(conv: Correlation, config: Config) -> int:
    """Elements of the source loaded at once: neighbouring channels, or columns that padding does not shift."""
    most = 16 // conv.problem.x.dtype.itemsize
    width = conv.axes[1]
    if conv.channels_last:
        if conv.in_channels == 1:
            return math.gcd(most, config["groups"], conv.problem.groups) if config["channels"] == 1 else 1
        return math.gcd(most, config["channels"], conv.in_channels)
    if width.taps <= 1 and width.stride > 1:
        return 1
    return math.gcd(most, width.size, width.pad, config["tile_w"] * width.stride)


def _out_vector(conv: Correlation, config: Config) -> int:
    """Elements of the target stored at once: neighbouring channels, or columns of whole rows."""
    most = 16 // conv.problem.x.dtype.itemsize
    width = conv.axes[1]
    if conv.channels_last:
        return math.gcd(most, config["thread_k"], conv.out_channels)
    return math.gcd(most, config["thread_w"], width.outputs) if width.output_step == 1 else 1


def _registers(config: Config, tiling: _Tiling) -> int:
    """Registers of a thread that spills nothing: accumulators, window, filter values, and addresses."""
    return round_up(config["thread_k"] * (config["thread_w"] + 1) + min(tiling.window, _MAX_WINDOW) + 40, 8)


def _min_blocks(config: Config, tiling: _Tiling) -> int:
    """Blocks that the kernel is compiled for a multiprocessor to hold at once, whatever the device; at least 1."""
    return max(1, resident_blocks(_registers(config, tiling), tiling.threads, tiling.shared_bytes, LIMITS))


def _blocks(conv: Correlation, config: Config) -> int:
    height, width = conv.axes
    tiles = ceil_div(height.outputs, config["tile_h"]) * ceil_div(width.outputs, config["tile_w"])
    groups = ceil_div(conv.problem.groups, config["groups"])
    return conv.problem.n * tiles * groups * ceil_div(conv.out_channels, config["tile_k"])


def _launch(conv: Correlation, config: Config) -> KernelStep:
    tiling = _Tiling.of(conv, config)
    height, width = conv.axes
    w, strides = conv.problem.w, conv.problem.w.strides
    source, target = _source_and_target(conv)
    out_strides = conv.problem.tensor(target).strides
    filter_first = 0 if conv.is_empty else height.first_tap * strides[2] + width.first_tap * strides[3]
    out_first = height.first_output * out_strides[2] + width.first_output * out_strides[3]
    itemsize = w.dtype.itemsize
    return KernelStep(
        source="direct/tiled.cu",
        entry="direct_tiled",
        grid=(_blocks(conv, config), 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(conv, config, tiling),
        args=(
            Pointer(buffer=source),
            Pointer(buffer="w", offset_bytes=filter_first * itemsize),
            Pointer(buffer=target, offset_bytes=out_first * itemsize),
            _shape(conv),
            *epilogue_arguments(conv.problem, out_first),
        ),
    )


def _source_and_target(conv: Correlation) -> tuple[str, str]:
    return ("y", "x") if conv.flipped else ("x", "y")


def _shape(conv: Correlation) -> Struct:
    height, width = conv.axes
    source, target = (conv.problem.tensor(name).strides for name in _source_and_target(conv))
    w, filter_strides = conv.problem.w, conv.problem.w.strides
    out_channel, in_channel = (filter_strides[1], filter_strides[0]) if conv.flipped else filter_strides[:2]
    return _SHAPE(
        in_channels=0 if conv.is_empty else conv.in_channels,
        out_channels=conv.out_channels,
        groups=conv.problem.groups,
        in_height=height.size,
        in_width=width.size,
        in_batch_stride=source[0],
        in_channel_stride=source[1],
        in_row_stride=source[2],
        in_column_stride=source[3],
        out_height=height.outputs,
        out_width=width.outputs,
        pad_top=height.pad,
        pad_left=width.pad,
        filter_group_stride=w.shape[0] // conv.problem.groups * filter_strides[0],
        filter_out_channel_stride=out_channel,
        filter_in_channel_stride=in_channel,
        filter_row_stride=height.tap_step * filter_strides[2],
        filter_column_stride=width.tap_step * filter_strides[3],
        out_batch_stride=target[0],
        out_channel_stride=target[1],
        out_row_stride=height.output_step * target[2],
        out_column_stride=width.output_step * target[3],
    )


def _defines(conv: Correlation, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width = conv.axes
    tiles = ("tile_h", "tile_w", "tile_k", "groups", "thread_w", "thread_k", "channels", "stages")
    return (
        ("ELEMENT", conv.problem.x.dtype.value),
        *((name.upper(), config[name]) for name in tiles),
        ("MIN_BLOCKS", _min_blocks(config, tiling)),
        ("FILTER_H", max(1, height.taps)),
        ("FILTER_W", max(1, width.taps)),
        ("STAGE_ROWS", tiling.stage_rows),
        ("CHUNK", tiling.chunk),
        ("FILTER_ORDER", 2 * int(conv.flipped) + int(conv.channels_last)),
        ("STRIDE_H", height.stride),
        ("STRIDE_W", width.stride),
        ("DILATION_H", height.dilation),
        ("DILATION_W", width.dilation),
        ("CHANNELS_LAST", int(conv.channels_last)),
        ("VECTOR", tiling.vector),
        ("OUT_VECTOR", tiling.out_vector),
        ("SHARED_BYTES", tiling.shared_bytes),
        _SHAPE.define,
        *epilogue_defines(conv.problem),
    )


# Fitted to 1800 configurations of 70 problems on an H200: the best of the first four by estimate is 3 % slower than the
# best measured, in the geometric mean.
_RATES = TileRates(
    product=1.9,
    copy=40,
    round=1.1,
    step=144,
    read=1.2,
    broadcast=0.27,
    latency=400,
    copy_latency=67,
    convert=19,
    convert_latency=80,
    block=1900,
)
_OVERLAPPED = replace(_RATES, latency=970, copy_latency=20, convert_latency=24)


def _work(conv: Correlation, config: Config) -> TileWork:
    """What the launch of one correlation does."""
    tiling = _Tiling.of(conv, config)
    height, width = conv.axes
    taps_y, taps_x = max(1, height.taps), max(1, width.taps)
    chunks = ceil_div(taps_x, tiling.chunk)
    rows = config["channels"] * tiling.stage_rows
    return TileWork(
        blocks=_blocks(conv, config),
        resident=_min_blocks(config, tiling),
        steps=ceil_div(conv.in_channels, config["channels"]) * (taps_y // tiling.stage_rows),
        warps=ceil_div(tiling.threads, 32),
        products=rows * taps_x * config["thread_k"] * config["thread_w"],
        reads=rows * chunks * _window_reads(conv, config, tiling),
        broadcasts=rows * taps_x * max(1, config["thread_k"] / 4),
        rounds=rows * chunks,
        copies=tiling.stage_copies / tiling.threads,
        converts=conv.problem.x.dtype is not DataType.FLOAT32 or (conv.channels_last and tiling.vector > 1),
    )


def _window_reads(conv: Correlation, config: Config, tiling: _Tiling) -> float:
    """Reads of shared memory for one window: of 16 bytes where it is aligned, else of each input that is used."""
    width = conv.axes[1]
    step = width.stride if width.taps > 1 else 1
    later_aligned = width.taps <= tiling.chunk or tiling.chunk * width.dilation % 4 == 0
    if tiling.window <= 32 and config["thread_w"] * step % 4 == 0 and later_aligned:
        return tiling.window / 4
    return float(min(tiling.window, config["thread_w"] * tiling.chunk))


def _config(**values: int | bool) -> Config:
    return Config({"groups": 1, "stages": 1, "whole_filter": True, **values})


# What default_configs ranks by estimate; one of the last two is valid for every applicable problem. Together they come
# within 10 % of the least estimate of the whole space, in the geometric mean over layers of 20 networks.
_SHORT_LIST = (
    _config(tile_h=8, tile_w=32, tile_k=32, thread_w=8, thread_k=8, channels=4),
    _config(tile_h=8, tile_w=32, tile_k=64, thread_w=8, thread_k=8, channels=8),
    _config(tile_h=7, tile_w=32, tile_k=32, thread_w=8, thread_k=4, channels=8),
    _config(tile_h=7, tile_w=32, tile_k=128, thread_w=8, thread_k=8, channels=16),
    _config(tile_h=8, tile_w=16, tile_k=64, thread_w=8, thread_k=8, channels=8),
    _config(tile_h=8, tile_w=16, tile_k=128, thread_w=4, thread_k=8, channels=16, stages=2),
    _config(tile_h=8, tile_w=16, tile_k=128, thread_w=8, thread_k=4, channels=16),
    _config(tile_h=8, tile_w=8, tile_k=128, thread_w=8, thread_k=4, channels=8),
    _config(tile_h=8, tile_w=8, tile_k=32, thread_w=4, thread_k=4, channels=16),
    _config(tile_h=7, tile_w=8, tile_k=64, thread_w=4, thread_k=4, channels=16, whole_filter=False),
    _config(tile_h=8, tile_w=32, tile_k=32, thread_w=4, thread_k=8, channels=1),
    _config(tile_h=8, tile_w=16, tile_k=64, thread_w=8, thread_k=8, channels=1),
    _config(tile_h=4, tile_w=32, tile_k=32, thread_w=8, thread_k=8, channels=1),
    _config(tile_h=1, tile_w=128, tile_k=64, thread_w=4, thread_k=8, channels=16, stages=2),
    _config(tile_h=1, tile_w=128, tile_k=128, thread_w=8, thread_k=8, channels=16),
    _config(tile_h=1, tile_w=128, tile_k=32, thread_w=8, thread_k=4, channels=16),
    _config(tile_h=1, tile_w=32, tile_k=64, thread_w=4, thread_k=4, channels=16, stages=2),
    _config(tile_h=1, tile_w=32, tile_k=32, thread_w=4, thread_k=4, channels=4),
    _config(tile_h=1, tile_w=16, tile_k=32, thread_w=4, thread_k=1, channels=16),
    _config(tile_h=4, tile_w=8, tile_k=8, thread_w=4, thread_k=1, channels=8, stages=2),
    _config(tile_h=8, tile_w=16, tile_k=8, thread_w=4, thread_k=4, channels=8),
    _config(tile_h=8, tile_w=32, tile_k=4, thread_w=4, thread_k=4, channels=16),
    _config(tile_h=8, tile_w=16, tile_k=4, thread_w=4, thread_k=1, channels=8),
    _config(tile_h=8, tile_w=32, tile_k=4, thread_w=4, thread_k=4, channels=4, groups=8, stages=2),
    _config(tile_h=4, tile_w=16, tile_k=4, thread_w=8, thread_k=4, channels=4, groups=8),
    _config(tile_h=4, tile_w=16, tile_k=8, thread_w=8, thread_k=8, channels=8, groups=8),
    _config(tile_h=8, tile_w=32, tile_k=1, thread_w=4, thread_k=1, channels=1),
    _config(tile_h=8, tile_w=16, tile_k=1, thread_w=8, thread_k=1, channels=1, groups=8),
    _config(tile_h=8, tile_w=16, tile_k=1, thread_w=8, thread_k=1, channels=1, groups=8, stages=2),
    _config(tile_h=7, tile_w=8, tile_k=1, thread_w=8, thread_k=1, channels=1, groups=32),
    _config(tile_h=4, tile_w=8, tile_k=1, thread_w=8, thread_k=1, channels=1, groups=32),
    _config(tile_h=1, tile_w=32, tile_k=1, thread_w=8, thread_k=1, channels=1, groups=32),
    _config(tile_h=4, tile_w=32, tile_k=1, thread_w=8, thread_k=1, channels=1, groups=8, whole_filter=False),
    _config(tile_h=1, tile_w=32, tile_k=1, thread_w=4, thread_k=1, channels=1),
    _config(tile_h=1, tile_w=32, tile_k=1, thread_w=4, thread_k=1, channels=1, whole_filter=False),
)


class ConvDirectTiled(Solver):
    """Direct convolution of tiles in shared memory with float32 accumulators in registers.

    Configuration: a block computes `tile_h` x `tile_w` pixels of `tile_k` output channels in each of `groups` groups
    from `channels` input channels at a time, with the whole filter or one row of it; a thread holds `thread_k` channels
    of `thread_w` pixels; two `stages` overlap loads with arithmetic.
    """

    id = "ConvDirectTiled"
    algorithm = Algorithm.DIRECT
    directions = OF_IMAGES
    applies_epilogues = True
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": (1, 2, 4, 7, 8),
        "tile_w": (8, 16, 32, 128),
        "tile_k": (1, 4, 8, 32, 64, 128),
        "groups": (1, 8, 32),
        "thread_w": (4, 8),
        "thread_k": (1, 4, 8),
        "channels": (1, 4, 8, 16),
        "stages": (1, 2),
        "whole_filter": (True, False),
    }
    sources = ("direct/tiled.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        convolution, data = ProblemDescription.convolution, Direction.BACKWARD_DATA
        return (
            convolution(x=(2, 19, 17, 15), w=(37, 19, 3, 3), padding=1),
            convolution(x=(2, 16, 14, 14), w=(24, 16, 1, 1), dtype=DataType.FLOAT16, layout=Layout.NHWC),
            convolution(x=(2, 19, 17, 15), w=(38, 19, 3, 3), padding=1, epilogue="channel_bias.residual.relu"),
            convolution(
                x=(2, 16, 9, 9), w=(24, 8, 1, 1), groups=2, layout=Layout.NHWC, epilogue="scale.bias.tanh.residual"
            ),
            convolution(x=(2, 8, 13, 12), w=(12, 8, 1, 1), stride=2, direction=data, epilogue="residual.drelu"),
            convolution(x=(1, 32, 15, 15), w=(32, 1, 5, 5), padding=2, stride=2, groups=32, dtype=DataType.BFLOAT16),
            convolution(x=(2, 8, 13, 12), w=(12, 4, 3, 3), stride=2, groups=2, direction=data),
            convolution(x=(1, 6, 40), w=(10, 6, 7), dilation=3, padding=9, direction=data),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_tensors(problem, _MAX_ELEMENTS)).refused:
            return answer
        launches = math.prod(problem.conv.stride) if problem.direction is Direction.BACKWARD_DATA else 1
        if launches > _MAX_LAUNCHES:
            return Applicability(f"backward data with stride {problem.conv.stride} would take {launches} launches")
        if not any(self.is_valid_config(problem, device, config) for config in _SHORT_LIST[-2:]):
            return Applicability(f"filter {problem.filter} is too large for shared memory")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        if config["tile_k"] % config["thread_k"] or config["tile_w"] % config["thread_w"]:
            return False
        if config["stages"] == 2 and problem.x.dtype is not DataType.FLOAT32:
            return False
        limit = device.shared_bytes or _SHARED_BYTES
        return all(_fits(conv, config, limit) for conv in correlations(problem))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return tuple(self.ranked_estimates(problem, device, _SHORT_LIST)[:4])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        rates = _OVERLAPPED if config["stages"] == 2 else _RATES
        launches = correlations(problem)
        busy_ms = sum(tile_ms(_work(conv, config), rates, device) for conv in launches)
        return _time_ms(problem, device, busy_ms)

    def least_ms(self, problem: ProblemDescription, device: Device) -> float:
        pixels = sum(math.prod(axis.outputs * axis.taps for axis in conv.axes) for conv in correlations(problem))
        products = problem.n * pixels * problem.k * problem.w.shape[1]
        return _time_ms(problem, device, least_tile_ms(products, _RATES, device))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=tuple(_launch(conv, config) for conv in correlations(problem)))


def _time_ms(problem: ProblemDescription, device: Device, busy_ms: float) -> float:
    """Of all launches, whose multiprocessors are busy for so long."""
    moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
    return len(correlations(problem)) * _LAUNCH_MS + max(busy_ms, 3.8 * moved_ms) + moved_ms / 4


def _fits(conv: Correlation, config: Config, shared_limit: int) -> bool:
    """Whether tiles are not much larger than the problem and a block fits a multiprocessor."""
    height, width = conv.axes
    if config["groups"] > 1 and (config["tile_k"] < conv.out_channels or config["groups"] >= 2 * conv.problem.groups):
        return False
    if config["tile_k"] >= 2 * conv.out_channels or config["channels"] >= 2 * conv.in_channels:
        return False
    if config["tile_h"] >= 2 * height.outputs or config["tile_w"] >= 2 * max(32, width.outputs):
        return False
    if not config["whole_filter"] and conv.problem.filter[0] == 1:
        return False
    tiling = _Tiling.of(conv, config)
    fits_registers = _registers(config, tiling) * round_up(tiling.threads, 32) <= 65536
    fits_grid = _blocks(conv, config) <= _MAX_ELEMENTS
    return 8 <= tiling.threads <= 512 and fits_registers and fits_grid and tiling.shared_bytes <= shared_limit


SOLVERS = (ConvDirectTiled(),)
