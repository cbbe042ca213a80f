"""ConvDepthwiseChannelsLastWeights: backward weights of depthwise convolution of NHWC tensors, small filters.

A split-K reduction adds the float32 partials of the splits in a fixed order. Kernels:
kernels_src/depthwise/channels_last_weights.cu.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, is_one_of, larger, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import (
    APPLICABLE,
    OF_WEIGHTS,
    Algorithm,
    Applicability,
    EstimatedConfig,
    Solver,
    first_of_kinds,
)
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    int32s,
)
from miofind.solver.structs import StructType
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.depthwise.channels_last_rows import (
    DIMENSION,
    KEYS,
    channel_share,
    dimensions,
    is_dilated,
    is_whole,
    refuse_rows,
    row_axes,
)

_SOURCE = "depthwise/channels_last_weights.cu"
_STAGED_BYTES = 40 << 10  # of shared memory, at most: two blocks of most sizes fit a multiprocessor
_MAX_REGISTERS = 200
_MAX_PRODUCTS = 3200
_MAX_WINDOW = 32
_MAX_LANES = 16
_FEW_THREADS = 128
_DEFAULTS = 8
_MAX_WORKSPACE_BYTES = 64 << 20

SHAPE = StructType(
    "Shape",
    channels="int32",
    height=DIMENSION,
    width=DIMENSION,
    items="int32",
    iterations="int32",
    rows="int32",
    channel_blocks=DIVISOR,
    column_groups=DIVISOR,
    row_blocks=DIVISOR,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to; of a table of them, arrays.

    Attributes:
        channels: of x that a block takes.
        channel_blocks: of all channels.
        lanes: threads that share an item; each has a vector of filters.
        slots: items that a block has at once.
        column_groups, row_blocks: items across and down an image's dy.
        items: of all images.
        iterations: items that a thread takes.
        window: columns of x that an item meets.
        steps: of an item: its rows, and those after it that meet the same rows of x.
        staged_filter_rows: filter rows of a block's sums that are added at once.
    """

    channels: int
    channel_blocks: int
    lanes: int
    slots: int
    column_groups: int
    row_blocks: int
    items: int
    iterations: int
    window: int
    steps: int
    staged_filter_rows: int
    shared_bytes: int
    registers: int
    products: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Tiling:
        height, width = row_axes(problem)
        multiplier, itemsize = problem.k // problem.c, problem.x.dtype.itemsize
        vector, columns, rows = config["vector"], config["columns"], config["rows"]
        channels = channel_share(problem, config)
        lanes = channels * multiplier // vector
        column_groups = ceil_div(width.units(backward=False), columns)
        row_blocks = ceil_div(height.units(backward=False), rows)
        items = column_groups * row_blocks * height.y_step * width.y_step * problem.n
        slots = larger(1, smaller(config["threads"] // lanes, items))
        window, taps = width.stride * (columns - 1) + width.taps, height.taps * width.taps
        row_bytes = 4 * slots * width.taps * channels * multiplier
        staged_filter_rows = larger(1, smaller(height.taps, _STAGED_BYTES // row_bytes))
        words = (height.stride * window + columns) * ceil_div(vector * itemsize, 4)
        return _Tiling(
            channels=channels,
            channel_blocks=ceil_div(problem.c, channels),
            lanes=lanes,
            slots=slots,
            column_groups=column_groups,
            row_blocks=row_blocks,
            items=items,
            iterations=smaller(config["turns"], ceil_div(items, slots)),
            window=window,
            steps=rows + height.span - 1,
            staged_filter_rows=staged_filter_rows,
            shared_bytes=staged_filter_rows * row_bytes,
            registers=round_up(
                (taps + height.span * columns + height.stride * window) * vector + config["ahead"] * words + 52, 8
            ),
            products=taps * columns * vector * height.span * config["ahead"],
        )

    @property
    def threads(self) -> int:
        """Of a block."""
        return round_up(self.lanes * self.slots, 32)

    @property
    def splits(self) -> int:
        """Blocks that share the same channels."""
        return ceil_div(self.items, self.slots * self.iterations)

    def split_k(self, problem: ProblemDescription) -> SplitK:
        return SplitK.of(problem, self.splits)

    @property
    def blocks(self) -> int:
        return self.channel_blocks * self.splits

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return larger(1, resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device)))

    @property
    def reduction_lanes(self) -> int:
        """Threads of the reduction that share an element."""
        return min(_MAX_LANES, 1 << (self.splits - 1).bit_length())


def _sum_step(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    tiling = _Tiling.of(problem, config)
    return KernelStep(
        source=_SOURCE,
        entry="depthwise_channels_last_weights",
        grid=(tiling.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, device),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", tiling.split_k(problem).target)),
            SHAPE(
                channels=problem.c,
                **dimensions(problem),
                items=tiling.items,
                iterations=tiling.iterations,
                rows=config["rows"],
                channel_blocks=divide_by(tiling.channel_blocks),
                column_groups=divide_by(tiling.column_groups),
                row_blocks=divide_by(tiling.row_blocks),
            ),
        ),
    )


def _reduction(problem: ProblemDescription, tiling: _Tiling) -> KernelStep:
    taps = math.prod(problem.filter)
    return KernelStep(
        source=_SOURCE,
        entry="depthwise_channels_last_weights_finish",
        grid=(ceil_div(problem.k, 32), taps, 1),
        block=(32 * tiling.reduction_lanes, 1, 1),
        defines=(("ELEMENT", problem.x.dtype.value), ("TAPS", taps), ("LANES", tiling.reduction_lanes)),
        args=tiling.split_k(problem).arguments(*int32s(problem.k, tiling.splits)),
        pdl=True,
    )


def _defines(problem: ProblemDescription, config: Config, device: Device) -> tuple[tuple[str, str | int], ...]:
    height, width = row_axes(problem)
    tiling = _Tiling.of(problem, config)
    # Columns of windows that exist in every item; residues differ where the filter is dilated.
    last = width.stride * config["columns"] * (tiling.column_groups - 1)
    first_inside = min(width.pad, tiling.window)
    end_inside = 0 if is_dilated(problem) else max(0, min(tiling.window, width.x_size + width.pad - last))
    return (
        ("ELEMENT", problem.x.dtype.value),
        ("LANES", 0),
        ("TAPS", height.taps * width.taps),
        ("FILTER_Y", height.taps),
        ("FILTER_X", width.taps),
        ("MULTIPLIER", problem.k // problem.c),
        ("STRIDE_H", height.stride),
        ("STRIDE_W", width.stride),
        ("DILATED", int(is_dilated(problem))),
        ("ONE_SPLIT", int(tiling.splits == 1)),
        ("WHOLE_COLUMNS", int(is_whole(problem, 1, config["columns"]))),
        ("FIRST_INSIDE", first_inside),
        ("END_INSIDE", end_inside),
        ("CHANNELS", tiling.channels),
        ("VECTOR", config["vector"]),
        ("TILE_COLUMNS", config["columns"]),
        ("AHEAD", config["ahead"]),
        ("SLOTS", tiling.slots),
        ("STAGED_FILTER_ROWS", tiling.staged_filter_rows),
        ("X_STEP", width.dilation * problem.c),
        ("Y_STEP", width.y_step * problem.k),
        ("THREADS", tiling.threads),
        ("MIN_BLOCKS", tiling.resident(device)),
        ("SHARED_BYTES", tiling.shared_bytes),
        DIMENSION.define,
        SHAPE.define,
    )


# Launches, in milliseconds. Cycles of a scheduler: for a vector read, an element of it converted, a product, and an
# element of a thread's sums at the end. Cycles that a block waits: for an item, and for a row of x read one row ahead.
# A byte of partials costs as much as one and a half of the tensors: most are read again from the cache. Fitted to 546
# times of an H200, float16 and float32: configurations ranked first take 1.04 times the best.
_LAUNCH_MS, _REDUCTION_MS = 0.0025, 0.0012
_READ, _CONVERT, _PRODUCT, _SUM = 3.9, 0.7, 2.1, 20
_ITEM_WAIT, _ROW_WAIT = 1180, 228
_PARTIALS_COST = 1.6
_SERIAL_SHARE = 0.4  # of the shorter of moving and computing, which does not overlap the longer
_BANDWIDTH_SHARE = 0.85


def _busy_ms(problem: ProblemDescription, config: Config, device: Device) -> float:
    """Milliseconds of the multiprocessors, device memory aside."""
    tiling = _Tiling.of(problem, config)
    height, _ = row_axes(problem)
    vector, columns, iterations = config["vector"], config["columns"], tiling.iterations
    taps, converts = math.prod(problem.filter), problem.x.dtype is not DataType.FLOAT32
    rows = height.units(backward=False) / tiling.row_blocks
    steps = rows + height.span - 1
    met = smaller(steps * height.stride, height.x_size / tiling.row_blocks + height.taps - 1)
    reads = met * tiling.window + steps * columns
    item = reads * (_READ + _CONVERT * converts * vector) + rows * taps * columns * vector * _PRODUCT
    per_warp = iterations * item + taps * vector * _SUM
    alone = iterations * (_ITEM_WAIT + met * _ROW_WAIT / config["ahead"])
    blocks = ceil_div(tiling.blocks, device.sm_count)
    waves = larger(1.0, blocks / tiling.resident(device))
    cycles = blocks * tiling.threads / 128 * per_warp + waves * alone
    busy_ms: float = 1e3 * cycles / device.clock_hz
    return busy_ms


# What default_configs ranks by estimate: those that are valid wherever one is, then others.
_FALLBACKS = tuple(
    Config.of(vector=1, channels=32, columns=1, rows=rows, threads=128, turns=turns, ahead=1)
    for rows, turns in ((28, 8), (7, 1))
)
_WORKS = ((128, 1, 2), (256, 1, 2), (256, 4, 2))  # threads, turns, ahead
_VECTOR_4_WORKS = ((128, 1, 1), (256, 1, 1), (256, 4, 1), (128, 4, 2))
_SHORT_LIST = tuple(
    config
    for vectors, works in ((((1, 32), (2, 32), (2, 64)), _WORKS), (((4, 64),), _VECTOR_4_WORKS))
    for config in Config.product(
        {
            ("vector", "channels"): vectors,
            "columns": (2, 4, 7),
            "rows": (4, 7, 14),
            ("threads", "turns", "ahead"): works,
        }
    )
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable((*_FALLBACKS, *_SHORT_LIST))


def _is_economical(problem: ProblemDescription, config: Config, tiling: _Tiling) -> bool:
    """Whether no smaller value of a parameter does the same, and lanes of a block leave room for several items."""
    height, width = row_axes(problem)
    is_economical: bool = (
        (config["channels"] < 2 * max(32, problem.c))
        & (config["rows"] < 2 * max(4, height.units(backward=False)))
        & (config["columns"] < 2 * width.units(backward=False))
        & (config["turns"] <= tiling.iterations)
        & ((config["threads"] <= _FEW_THREADS) | (tiling.lanes * tiling.slots > _FEW_THREADS))
        & (tiling.lanes <= max(64, 32 * problem.k // problem.c))
        & (config["ahead"] < tiling.steps)
    )
    return is_economical


class ConvDepthwiseChannelsLastWeights(Solver):
    """Backward weights of depthwise convolution of NHWC tensors, with float32 accumulators in registers.

    Configuration: a block of up to `threads` threads takes `channels` channels. A thread multiplies `vector` channels
    of `turns` items, one after the other; an item is `columns` columns x `rows` rows of dy. The thread loads rows of x
    `ahead` rows early.
    """

    id = "ConvDepthwiseChannelsLastWeights"
    algorithm = Algorithm.DIRECT
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "vector": (1, 2, 4),
        "channels": (32, 64),
        "columns": (1, 2, 4, 7),
        "rows": (4, 7, 14, 28),
        "threads": (128, 256),
        "turns": (1, 4, 8),
        "ahead": (1, 2),
    }
    sources = (_SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(depthwise_example, layout=Layout.NHWC, direction=Direction.BACKWARD_WEIGHTS)
        half, brain = DataType.FLOAT16, DataType.BFLOAT16
        return (
            depthwise(64, x=(4, 64, 14, 14), w=(3, 3), padding=1, dtype=half),
            depthwise(48, x=(2, 48, 15, 17), w=(5, 5), padding=2, stride=2, dtype=brain),
            depthwise(24, x=(3, 24, 14, 13), w=(7, 7), padding=3, dtype=half),
            depthwise(20, x=(2, 20, 11, 12), w=(3, 5), padding=((4, 0), (1, 6)), stride=(3, 2)),
            depthwise(16, x=(1, 16, 20, 19), w=(3, 3), padding=6, dilation=(6, 2), dtype=half),
            depthwise(8, k=24, x=(2, 8, 9, 10), w=(3, 3), padding=1, stride=2, dtype=brain),
            depthwise(5, x=(1, 5, 7, 6), w=(3, 2), padding=1, dtype=half),
            depthwise(32, x=(3, 32, 100), w=(7,), padding=((6, 0),), layout=Layout.NWC),
        )

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
        tiling, vector = _Tiling.of(problem, config), config["vector"]
        is_valid: bool = (
            (problem.c % vector == 0)
            & ((problem.k == problem.c) | (vector == 1))
            & (is_one_of(config, _FALLBACKS) | _is_economical(problem, config, tiling))
            & (tiling.products <= _MAX_PRODUCTS)
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.window <= _MAX_WINDOW)
            & (tiling.threads <= 1024)
            & (tiling.threads * round_up(tiling.registers, 8) <= 65536)
            & (larger(tiling.items, tiling.blocks) <= MAX_ELEMENTS)
            & (tiling.split_k(problem).bytes <= max(_MAX_WORKSPACE_BYTES, problem.x.bytes))
            & (tiling.shared_bytes <= _STAGED_BYTES)
        )
        return is_valid

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        # The best of each shape of a thread's work: estimates of one shape err alike.
        return first_of_kinds(
            self._ranked(problem, device),
            lambda each: (each.config["vector"], each.config["columns"], each.config["rows"]),
            _DEFAULTS,
        )

    def _ranked(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        return self.ranked_valid(problem, device, _short_list())

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config)
        busy_ms = _busy_ms(problem, config, device)
        moved_ms = 1e3 * problem.bytes / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
        partials_ms = 1e3 * _PARTIALS_COST * tiling.split_k(problem).bytes / device.bandwidth_bytes_per_s
        launches_ms = _LAUNCH_MS + chosen(tiling.splits > 1, _REDUCTION_MS + partials_ms, 0.0)
        return launches_ms + larger(busy_ms, moved_ms) + _SERIAL_SHARE * smaller(busy_ms, moved_ms)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config)
        first = _sum_step(problem, config, device)
        return tiling.split_k(problem).solution(first, _reduction(problem, tiling))


SOLVERS = (ConvDepthwiseChannelsLastWeights(),)
