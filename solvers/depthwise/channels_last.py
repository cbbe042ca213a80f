"""ConvDepthwiseChannelsLast: depthwise convolution of NHWC tensors with small filters, forward and backward data.

Kernel: kernels_src/depthwise/channels_last.cu. ConvDepthwiseChannelsLastWeights serves backward weights.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, mapped, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import (
    APPLICABLE,
    OF_IMAGES,
    Algorithm,
    Applicability,
    EstimatedConfig,
    RankedTable,
    Solver,
    first_of_kinds,
)
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solver.structs import StructType
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.divisor import DIVISOR
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.statistics import partial_statistics, with_statistics
from miofind.solvers.depthwise.channels_last_rows import (
    DIMENSION,
    KEYS,
    RowAxis,
    RowRates,
    RowTiling,
    RowWork,
    copy_vector,
    dimensions,
    is_dilated,
    is_whole,
    phases,
    pixel_pitch,
    refuse_rows,
    row_axes,
)

_SHARED_BYTES = 48 << 10
_MAX_REGISTERS = 232
_MAX_PRODUCTS = 3200
_DEFAULTS = 8

SHAPE = StructType(
    "Shape",
    channels="int32",
    height=DIMENSION,
    width=DIMENSION,
    channel_blocks=DIVISOR,
    column_tiles=DIVISOR,
    row_blocks=DIVISOR,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    Attributes:
        blocks: the grid, and the work of a block.
        in_channels: of a block.
        window: input columns that a thread reads.
        group_step: input columns between neighbouring groups' first.
        pitch: elements from one staged pixel to the next.
        slots, out_columns: sums of a thread, for each of its channels.
        shared_bytes: of a block.
        registers: of a thread, about.
    """

    blocks: RowTiling
    in_channels: int
    window: int
    group_step: int
    pitch: int
    slots: int
    out_columns: int
    shared_bytes: int
    registers: int
    products: int
    in_rows: int
    whole_rows: bool
    whole_groups: bool

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        height, width = row_axes(problem)
        backward = problem.direction is Direction.BACKWARD_DATA
        multiplier, itemsize = problem.k // problem.c, problem.x.dtype.itemsize
        blocks = RowTiling.of(problem, config, 1 if backward else multiplier)
        columns, vector = config["columns"], config["vector"]
        in_channels = blocks.channels * (multiplier if backward else 1)
        out_channels = blocks.channels * (1 if backward else multiplier)
        if backward:
            phase = phases(problem)[1]
            lead = -((width.taps - 1 - phase) // width.stride)
            window = (phase + columns * width.stride - 1) // width.stride - lead + 1
        else:
            window = width.stride * (columns - 1) + width.taps
        group_step = columns * (1 if backward else width.stride)
        out_rows = height.stride if backward else 1
        in_rows = _in_rows(height, config, backward=backward)
        pitch = mapped(pixel_pitch, in_channels, itemsize, vector, group_step, out_channels // vector)
        row = (group_step * (blocks.thread_groups - 1) + window) * pitch
        taps, out_columns = height.taps * width.taps, columns * (width.stride if backward else 1)
        filters = blocks.channels * multiplier * taps
        slots = height.span * out_rows
        sums = slots * out_columns * vector
        return _Tiling(
            blocks=blocks,
            in_channels=in_channels,
            window=window,
            group_step=group_step,
            pitch=pitch,
            slots=slots,
            out_columns=out_columns,
            shared_bytes=itemsize * (config["stages"] * config["step"] * row + filters),
            products=taps * config["rows"] * columns * vector * (multiplier if backward else 1),
            in_rows=in_rows,
            whole_rows=is_whole(problem, 0, config["rows"]),
            whole_groups=is_whole(problem, 1, columns),
            registers=taps * vector * (multiplier if backward else 1)
            + sums
            + window * vector
            + epilogue_registers(problem, vector, out_rows * out_columns * vector)
            + 2 * vector * problem.epilogue.statistics
            + 40,
        )


def _in_rows(height: RowAxis, config: Config, *, backward: bool) -> int:
    """Input rows of a row block."""
    rows: int = config["rows"]
    return rows + height.span - 1 if backward else height.stride * (rows - 1) + height.taps


def _launch(problem: ProblemDescription, config: Config) -> KernelStep:
    tiling = _Tiling.of(problem, config)
    source, target = ("y", "x") if problem.direction is Direction.BACKWARD_DATA else ("x", "y")
    return KernelStep(
        source="depthwise/channels_last.cu",
        entry="depthwise_channels_last",
        grid=(tiling.blocks.blocks, 1, 1),
        block=(tiling.blocks.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            SHAPE(channels=problem.c, **dimensions(problem), **tiling.blocks.divisors),
            *partial_statistics(problem),
            *epilogue_arguments(problem),
        ),
    )


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    height, width = row_axes(problem)
    multiplier = problem.k // problem.c
    backward = problem.direction is Direction.BACKWARD_DATA
    phase_h, phase_w = phases(problem)
    channels, taps = tiling.blocks.channels, height.taps * width.taps
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("BACKWARD", int(backward)),
        ("FILTER_Y", height.taps),
        ("FILTER_X", width.taps),
        ("MULTIPLIER", multiplier),
        ("STRIDE_H", height.stride),
        ("STRIDE_W", width.stride),
        ("PHASE_H", phase_h),
        ("PHASE_W", phase_w),
        ("DILATED", int(is_dilated(problem))),
        ("CHANNELS", channels),
        *((name.upper(), config[name]) for name in ("vector", "stages", "step")),
        ("TILE_COLUMNS", config["columns"]),
        ("ROW_BLOCK_ROWS", config["rows"]),
        ("THREAD_GROUPS", tiling.blocks.thread_groups),
        ("COPY_VECTOR", copy_vector(problem, tiling.in_channels, problem.k if backward else problem.c)),
        ("FILTER_VECTOR", copy_vector(problem, channels * multiplier * taps, problem.k * taps)),
        ("PIXEL_PITCH", tiling.pitch),
        ("COLUMN_STEP", width.dilation * problem.c if backward else width.y_step * problem.k),
        ("WHOLE_ROWS", int(tiling.whole_rows)),
        ("WHOLE_GROUPS", int(tiling.whole_groups)),
        ("THREADS", tiling.blocks.threads),
        ("SHARED_BYTES", tiling.shared_bytes),
        DIMENSION.define,
        SHAPE.define,
        *epilogue_defines(problem),
    )


# Set against 90 measurements on an H200, the fastest and a slow configuration of each problem: half of the estimates
# are off by less than 10 %, nine in ten by less than 25 %.
_RATES = RowRates(launch_ms=0.0027, issue=0.96, alone=1.5, serial=0.42)


def _work(problem: ProblemDescription, config: Config, tiling: _Tiling) -> RowWork:
    backward, converts = problem.direction is Direction.BACKWARD_DATA, problem.x.dtype is not DataType.FLOAT32
    height, width = row_axes(problem)
    vector, taps = config["vector"], height.taps * width.taps
    multiplier = problem.k // problem.c if backward else 1
    in_rows, out_rows = tiling.in_rows, config["rows"] * (height.stride if backward else 1)
    units = height.units(backward=backward, aligned=is_dilated(problem))
    filled = smaller(1.0, units / (tiling.blocks.row_blocks * config["rows"]))
    sources = height.y_size if backward else height.x_size
    met = smaller(smaller(in_rows * filled, 1.0 * in_rows), sources / tiling.blocks.row_blocks + height.taps - 1)
    copies = ceil_div(
        (tiling.group_step * (tiling.blocks.thread_groups - 1) + tiling.window)
        * tiling.in_channels
        // copy_vector(problem, tiling.in_channels, problem.k if backward else problem.c),
        tiling.blocks.threads,
    )
    row = multiplier * tiling.window * (1 + converts * vector) + 12 + 9 * copies + 12 / config["step"]
    store = tiling.out_columns * (1.3 + vector * (0.5 if converts else 0)) + 8
    instructions = 300 + 1.5 * taps * vector * multiplier + met * row + out_rows * filled * store
    instructions += tiling.products * filled * chosen(tiling.whole_rows, 1.0, 1.05)
    return RowWork(
        instructions=instructions,
        registers=tiling.registers,
        shared_bytes=tiling.shared_bytes,
        moved_bytes=problem.bytes,
    )


def _time_ms(problem: ProblemDescription, config: Config, tiling: _Tiling, device: Device) -> float:
    return _work(problem, config, tiling).time_ms(tiling.blocks, device, _RATES)


# What default_configs ranks by estimate, after those that are valid wherever one is.
_FALLBACKS = tuple(
    Config.of(vector=1, channels=16, columns=columns, tile=14, rows=2, stages=3, step=1) for columns in (1, 4)
)
_SHORT_LIST = Config.product(
    {
        ("vector", "channels"): ((1, 32), (2, 32), (2, 64), (4, 32), (4, 64), (4, 128)),
        "columns": (1, 2, 4, 7),
        "tile": (14, 28, 56),
        "rows": (2, 4, 7, 14),
        ("stages", "step"): ((6, 1), (3, 2)),
    }
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


def _is_economical(problem: ProblemDescription, config: Config) -> bool:
    """Whether no smaller value of a parameter does the same."""
    height, width = row_axes(problem)
    backward, aligned = problem.direction is Direction.BACKWARD_DATA, is_dilated(problem)
    rows, columns = (axis.units(backward=backward, aligned=aligned) for axis in (height, width))
    in_rows = _in_rows(height, config, backward=backward)
    is_economical: bool = (
        (config["channels"] < 2 * max(16, problem.c))
        & (config["rows"] < 2 * max(2, rows))
        & ((config["stages"] - 1) * config["step"] < in_rows + 4)
        & (config["step"] < in_rows)
        & (config["tile"] < 2 * max(14, columns))
        & (config["columns"] < 2 * columns)
        & _has_vectors(problem, config)
    )
    return is_economical


def _has_vectors(problem: ProblemDescription, config: Config) -> bool:
    """Whether channels are whole vectors, of which each has one output."""
    has_vectors: bool = (problem.c % config["vector"] == 0) & ((problem.k == problem.c) | (config["vector"] == 1))
    return has_vectors


def _fits(tiling: _Tiling, device: Device) -> bool:
    """Whether a thread and a block have what they take."""
    registers, threads = round_up(tiling.registers, 8), tiling.blocks.threads
    return (
        (tiling.products <= _MAX_PRODUCTS)
        & (tiling.registers <= _MAX_REGISTERS)
        & (threads <= 1024)
        & (threads * registers <= 65536)
        & (tiling.blocks.blocks <= MAX_ELEMENTS)
        & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
    )


class ConvDepthwiseChannelsLast(Solver):
    """Depthwise convolution of NHWC tensors with filters in registers and float32 accumulators.

    Configuration: a block streams rows of `channels` channels through shared memory, `step` input rows at a time, in
    `stages` stages. It computes a tile of up to `tile` output columns of a row block of up to `rows` output rows. A
    thread computes `columns` columns of `vector` channels. Backward data counts s x s outputs as one.
    """

    id = "ConvDepthwiseChannelsLast"
    algorithm = Algorithm.DIRECT
    directions = OF_IMAGES
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "vector": (1, 2, 4),
        "channels": (16, 32, 64, 128),
        "columns": (1, 2, 4, 7),
        "tile": (14, 28, 56),
        "rows": (2, 4, 7, 14),
        "stages": (3, 6),
        "step": (1, 2),
    }
    sources = ("depthwise/channels_last.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(depthwise_example, layout=Layout.NHWC)
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        back = Direction.BACKWARD_DATA
        return (
            depthwise(64, x=(4, 64, 14, 14), w=(3, 3), padding=1, dtype=half),
            depthwise(48, x=(2, 48, 15, 17), w=(5, 5), padding=2, stride=2, dtype=brain),
            depthwise(24, x=(3, 24, 14, 13), w=(7, 7), padding=3, dtype=half, direction=back),
            depthwise(72, x=(2, 72, 15, 16), w=(3, 3), padding=1, stride=2, dtype=half, direction=back),
            depthwise(20, x=(2, 20, 11, 12), w=(3, 5), padding=((4, 0), (1, 6)), stride=(3, 2), direction=back),
            depthwise(16, x=(1, 16, 20, 19), w=(3, 3), padding=6, dilation=(6, 2), dtype=half),
            depthwise(8, k=24, x=(2, 8, 9, 10), w=(3, 3), padding=1, stride=2, dtype=brain),
            depthwise(8, k=16, x=(2, 8, 9, 10), w=(3, 3), padding=1, dilation=2, direction=back),
            depthwise(5, x=(1, 5, 7, 6), w=(3, 2), padding=1, dtype=half, direction=back),
            depthwise(32, x=(3, 32, 100), w=(7,), padding=((6, 0),), layout=Layout.NWC),
            depthwise(40, x=(2, 40, 15, 17), w=(3, 3), padding=1, stride=2, dtype=half, epilogue="bias.clamp"),
            depthwise(24, x=(3, 24, 14, 13), w=(7, 7), padding=3, dtype=brain, epilogue="float32.bias.silu.residual"),
            depthwise(16, x=(1, 16, 20, 19), w=(3, 3), padding=6, dilation=(6, 2), epilogue="scale.bias.residual.relu"),
            depthwise(
                24, x=(3, 24, 14, 13), w=(5, 5), padding=2, dtype=half, direction=back, epilogue="residual.drelu"
            ),
            depthwise(40, x=(2, 40, 15, 16), w=(3, 3), stride=2, dtype=brain, direction=back, epilogue="dhardswish"),
            depthwise(4, k=12, x=(2, 4, 9, 10), w=(3, 3), padding=1, dtype=half, epilogue="channel_bias.residual.relu"),
            depthwise(40, x=(2, 40, 15, 17), w=(3, 3), padding=1, stride=2, dtype=half, epilogue="statistics"),
            depthwise(16, x=(1, 16, 20, 19), w=(3, 3), padding=6, dilation=(6, 2), epilogue="bias.relu.statistics"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        if problem.direction is Direction.BACKWARD_DATA:
            return APPLICABLE
        if not problem.epilogue.statistics:
            return super().fuses_training(problem)
        return Applicability("sums up one output of each channel" if problem.k != problem.c else "")

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_rows(problem)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in _FALLBACKS):
            stride, multiplier = problem.conv.stride, problem.k // problem.c
            return Applicability(
                f"filter {problem.filter} at stride {stride}, {multiplier} outputs a channel: too large for a thread"
            )
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        is_tried = _is_economical(problem, config) or (config in _FALLBACKS and _has_vectors(problem, config))
        return is_tried and _fits(_Tiling.of(problem, config), device)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        # The best of each shape of a thread's work: estimates of one shape err alike.
        return first_of_kinds(
            self._ranked(problem, device), lambda each: (each.config["vector"], each.config["columns"]), _DEFAULTS
        )

    def _ranked(self, problem: ProblemDescription, device: Device) -> Iterator[EstimatedConfig]:
        """The fallbacks and the short list as far as they are valid, the least estimate first."""
        fallbacks = (config for config in _FALLBACKS if self.is_valid_config(problem, device, config))
        last = (EstimatedConfig(config, self.estimate_ms(problem, device, config)) for config in fallbacks)
        by_time = operator.attrgetter("estimate_ms")
        return heapq.merge(sorted(last, key=by_time), self._ranked_list(problem, device), key=by_time)

    @staticmethod
    def _ranked_list(problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        economical = _short_list().valid(functools.partial(_is_economical, problem))
        if not economical.configs:
            return ()
        tiling = _Tiling.of(problem, economical.as_config)
        times = np.asarray(_time_ms(problem, economical.as_config, tiling, device))
        return RankedTable(economical, times, economical.places(_fits(tiling, device)))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _time_ms(problem, config, _Tiling.of(problem, config), device)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        blocks = _Tiling.of(problem, config).blocks
        parts = blocks.blocks // blocks.channel_blocks
        return with_statistics(ConvSolution(steps=(_launch(problem, config),)), problem, parts)


SOLVERS = (ConvDepthwiseChannelsLast(),)
