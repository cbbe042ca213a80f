"""ConvFirstLayerWgmma: forward convolution of few channels by Hopper's warpgroup products, which read windows in place.

Kernel: kernels_src/few_channels/forward_wgmma.cu; how windows lie: kernels_src/few_channels/window_rows.cuh.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, divisor, larger, mapped, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import APPLICABLE, Applicability, EstimatedConfig
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.limits import refuse_tensors
from miofind.solvers.common.statistics import partial_statistics, with_statistics
from miofind.solvers.few_channels.shapes import STRIPS_SHAPE
from miofind.solvers.few_channels.solver import HOPPER_KEYS, FewChannelsSolver, problem_defines
from miofind.solvers.few_channels.tile_schedule import TileSchedule
from miofind.solvers.few_channels.window_rows import is_same_load, refuse_pixels

_ROWS = 64  # of a product
_MAX_STEPS = 64  # of 16 elements, that a window takes
_MAX_WARPGROUPS = 4
_MAX_REGISTERS = 232
_MAX_RESIDENT = 8
_OTHERS, _CHANNELS_FIRST = 40, 8  # registers for addresses and counters, and more of them for NCHW
_ACTIVATION = 16  # registers of an activation that takes more than comparisons
_STATISTICS = 8  # registers of sums of results
_MOST_MOVED, _LEAD_WORDS = 48, 48  # registers of what a thread has on its way, and of several chunks before a strip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    few_channels/forward_wgmma.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        outputs: of a window.
        columns: windows of a tile, and columns of a product.
        steps: products of 16 elements of a window.
        offset: columns staged before those that the first output meets.
        vector: columns that are loaded at once.
        out_vector: elements that are stored at once.
        tile_k: filters of a block of threads.
        threads: of a block.
        chunk_rows, chunk_pixels: of the part of x that a step moves on by.
        earlier: chunks that a step meets before its own.
        moved: registers of a chunk on its way.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        strips: of an image, as equal as may be.
        schedule: of tiles, of which a row is a strip.
    """

    outputs: int
    columns: int
    steps: int
    offset: int
    vector: int
    out_vector: int
    tile_k: int
    threads: int
    chunk_rows: int
    chunk_pixels: int
    earlier: int
    moved: int
    registers: int
    shared_bytes: int
    resident: int
    strips: int
    schedule: TileSchedule

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> _Tiling:
        (out_h, out_w), (stride_y, stride_x) = problem.out_spatial, problem.conv.stride
        (taps_y, taps_x), last = problem.filter, problem.x.layout.channels_last
        rows, blocks = config["rows"], config["blocks"]
        outputs = 1 + stride_x % 2
        windows = ceil_div(out_w, outputs)
        strip_tiles = ceil_div(windows, config["tile_w"])
        columns = round_up(ceil_div(windows, strip_tiles), 16)
        strip_tiles = ceil_div(windows, columns)
        strips = ceil_div(out_h, config["strip"])
        row_steps = ceil_div(taps_x + (outputs - 1) * stride_x, 4)
        steps, threads = taps_y * row_steps, 128 * rows * blocks
        tile_k = blocks * _ROWS // outputs

        vector = divisor(config["vector"], problem.spatial[1])
        offset = -problem.conv.pad_before[1] % vector
        pixels = round_up(offset + (columns - 1) * outputs * stride_x + 4 * row_steps, vector)
        met = (taps_y - 1) * problem.conv.dilation[0] + 1
        chunk_rows = rows * stride_y
        earlier = larger(0, ceil_div(met - stride_y, chunk_rows))
        moved = ceil_div(chunk_rows * pixels, vector * threads) * problem.c * larger(1, vector // 2)

        phases = outputs * stride_x // 2
        first = offset % 2
        skipped = -((offset + first) // 2) % phases
        row_words = phases * (ceil_div(skipped + ceil_div(first + pixels, 2), phases) | 1)
        ring = 16 * (earlier + 2) * chunk_rows * row_words
        filters = blocks * 2 * steps * (16 * _ROWS + 16)
        raw = round_up(2 * tile_k * problem.c * taps_y * taps_x, 16)
        shared_bytes = filters + ring + larger(rows * blocks * _result_bytes(columns, outputs, last), raw)
        lead = larger(1, smaller(earlier + 1, _LEAD_WORDS // moved)) * moved
        held = 4 * steps * config["held"]
        others = _OTHERS + (0 if last else _CHANNELS_FIRST) + epilogue_registers(problem, 3 - outputs, 16)
        if not problem.epilogue.activation.is_exact:
            others += _ACTIVATION
        others += _STATISTICS * problem.epilogue.statistics
        registers = round_up(held + larger(columns // 2 + moved, lead) + others, 8)
        resident = smaller(_MAX_RESIDENT, resident_blocks(registers, threads, shared_bytes, SmLimits.of(device)))
        return _Tiling(
            outputs=outputs,
            columns=columns,
            steps=steps,
            offset=offset,
            vector=vector,
            out_vector=math.gcd(8, problem.k if last else out_w),
            tile_k=tile_k,
            threads=threads,
            chunk_rows=chunk_rows,
            chunk_pixels=chunk_rows * pixels,
            earlier=earlier,
            moved=moved,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=resident,
            strips=strips,
            schedule=TileSchedule.of(problem, tile_k, (strips, strip_tiles), device.sm_count * resident),
        )


def _result_bytes(columns: int, outputs: int, last: bool) -> int:
    """Shared memory that a warpgroup's results go through."""
    if last:
        pixel = 16 * (8 // outputs + 1)
        return columns * pixel * outputs + (64 if outputs == 2 else 0)
    words = columns * outputs // 8
    return 16 * (_ROWS // outputs) * (words | 1 if outputs == 1 else words + 2)


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    return (
        *problem_defines(problem),
        ("DILATION_Y", problem.conv.dilation[0]),
        ("COLUMNS", tiling.columns),
        ("STEP_ROWS", config["rows"]),
        ("FILTER_BLOCKS", config["blocks"]),
        ("FILTERS_IN_REGISTERS", config["held"]),
        ("DEFERRED_STORE", config["late"]),
        ("OFFSET", tiling.offset),
        ("IN_VECTOR", tiling.vector),
        ("OUT_VECTOR", tiling.out_vector),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        STRIPS_SHAPE.define,
        *epilogue_defines(problem),
    )


_DEFAULTS = 8
_STRIPS = (1, 2, 4, 7, 10, 14, 28, 56)

# What default_configs ranks by estimate.
_SHORT_LIST = tuple(
    Config.of(tile_w=tile_w, rows=rows, blocks=blocks, held=held, strip=strip, vector=2, late=0)
    for tile_w, (rows, blocks), held, strip in itertools.product(
        (64, 128), ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)), (1, 0), _STRIPS
    )
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


@functools.cache
def _wide_list() -> ConfigTable:
    """The same with wide loads."""
    return ConfigTable([Config({**config, "vector": 4}) for config in _SHORT_LIST])


# Cycles of a multiprocessor: for a product of 16 elements by a column; of shared memory for 128 bytes; to stage a
# pixel; of a block to lay out and store a row beside that, if at once or late, to begin a strip, and to lay out 8
# elements of filters. Share of the bandwidth that is reached, and of the time to move all tensors, or to compute if
# that is shorter, that the other does not hide. Fitted to 329 measurements on an H200, the order of the fastest first:
# the configuration with the least estimate takes 2 % longer than the best. What storing late saves is reckoned.
_PRODUCT = 0.5
_SHARED = 0.65
_STAGED = 0.13
_ROW = (875.0, 500.0)
_STRIP = 410.0
_LAID = 2.35
_LAUNCH_MS = 0.0024
_REACHED = 0.9
_EXPOSED = 0.775


class ConvFirstLayerWgmma(FewChannelsSolver):
    """Implicit GEMM for up to four channels: warpgroup products read windows of staged rows as they lie.

    Zeros around a filter's rows are multiplied: an infinity or NaN of the input spreads to outputs up to 4 columns
    away, and one of the filter to outputs at the border. Accumulators are float32.

    Configuration: a block computes `rows` rows of up to `tile_w` windows at a time, each of `blocks` blocks of 64
    filters (32 if STRIDE_X is odd) by a warpgroup of its own, which keeps its filters in registers if `held`; it goes
    down strips of up to `strip` rows. Results are stored at once or, if `late`, during products of the next rows.
    A thread loads up to `vector` pixels of x at once.
    """

    id = "ConvFirstLayerWgmma"
    direction = Direction.FORWARD
    kind = ("rows", "blocks")
    keys = HOPPER_KEYS
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_w": (64, 128),
        "rows": (1, 2, 4),
        "blocks": (1, 2),
        "held": (0, 1),
        "strip": _STRIPS,
        "vector": (2, 4),
        "late": (0, 1),
    }
    sources = ("few_channels/forward_wgmma.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        half, brain, last = DataType.FLOAT16, DataType.BFLOAT16, Layout.NHWC
        conv = ProblemDescription.convolution
        return (
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half, layout=last),
            conv(x=(2, 3, 64, 64), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, dtype=brain, layout=last),
            conv(x=(2, 3, 32, 40), w=(32, 3, 3, 3), padding=1, dtype=brain),
            conv(x=(2, 3, 32, 32), w=(96, 3, 4, 4), stride=4, dtype=half, layout=last),
            conv(x=(3, 1, 28, 28), w=(6, 1, 5, 5), padding=2, dtype=half),
            conv(x=(2, 4, 17, 23), w=(37, 4, 3, 2), padding=((4, 0), (5, 1)), stride=(1, 4), dtype=brain, layout=last),
            conv(x=(1, 2, 33, 31), w=(19, 2, 5, 11), padding=2, stride=(3, 1), dilation=(2, 1), dtype=half),
            conv(x=(1, 3, 32, 224), w=(64, 3, 16, 4), padding=(8, 2), stride=(16, 4), dtype=half),
            conv(x=(2, 3, 64, 60), w=(64, 3, 7, 7), padding=3, stride=2, dtype=half, layout=last, epilogue="bias.relu"),
            conv(x=(2, 3, 32, 40), w=(40, 3, 3, 3), padding=1, dtype=brain, epilogue="scale.bias.residual.silu"),
            conv(x=(3, 3, 31, 33), w=(20, 3, 3, 3), dtype=half, layout=last, epilogue="channel_bias.silu.residual"),
            conv(x=(2, 3, 40, 60), w=(72, 3, 7, 7), stride=2, dtype=half, layout=last, epilogue="statistics"),
            conv(x=(2, 3, 31, 33), w=(20, 3, 3, 3), dtype=brain, epilogue="bias.relu.statistics"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE if problem.epilogue.statistics else super().fuses_training(problem)

    def refuse_problem(self, problem: ProblemDescription) -> Applicability:
        stride_x = problem.conv.stride[1]
        if (answer := refuse_pixels(problem)).refused:
            return answer
        if problem.conv.dilation[1] != 1:
            return Applicability(
                f"reads neighbouring columns: needs dilation 1 along them, not {problem.conv.dilation}"
            )
        if stride_x > 2 and stride_x % 4:
            return Applicability(
                f"reads windows in place at strides of 1, 2 and multiples of 4 columns, not {stride_x}"
            )
        taps_y, taps_x = problem.filter
        if taps_y * ceil_div(taps_x + stride_x % 2, 4) > _MAX_STEPS:
            return Applicability(f"takes up to {_MAX_STEPS} products of four taps, not a filter of {problem.filter}")
        return refuse_tensors(problem)

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config, device)
        is_valid: bool = (tiling.moved <= _MOST_MOVED) & (tiling.registers <= _MAX_REGISTERS) & (tiling.resident > 0)
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        out_h, out_w = problem.out_spatial
        outputs = 1 + problem.conv.stride[1] % 2
        rows, blocks, strip = config["rows"], config["blocks"], config["strip"]

        def is_least(rows: int, strip: int) -> bool:
            """Whether no shorter strips are as many."""
            shorter = max((length for length in _STRIPS if rows <= length < strip), default=0)
            return not shorter or ceil_div(out_h, shorter) != ceil_div(out_h, strip)

        has_steps = ceil_div(out_h, ceil_div(out_h, strip)) > rows  # a strip
        is_of_size: bool = (
            (rows * blocks <= _MAX_WARPGROUPS)
            & (rows <= smaller(out_h, strip))
            & (mapped(is_least, rows, strip) == 1)
            & ((config["late"] == 0) | has_steps)
            & (config["tile_w"] < 2 * max(64, ceil_div(out_w, outputs)))
            & (blocks < 1 + ceil_div(problem.k, _ROWS // outputs))
            & (is_same_load(problem, config["vector"]) == 0)
        )
        return is_of_size

    def short_list(self) -> ConfigTable:
        return _short_list()

    def ranked_list(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """With wide loads where these pay and fit."""
        if problem.conv.stride[1] % 4 or problem.spatial[1] % 4:
            return super().ranked_list(problem, device)
        wide = _wide_list()
        fitting = set(self.valid_of(problem, device, wide).configs)
        pairs = zip(_SHORT_LIST, wide.configs, strict=True)
        either = ConfigTable([wider if wider in fitting else config for config, wider in pairs])
        return self.ranked_table(problem, device, self.valid_of(problem, device, either))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        """The least estimate of each kind, then the next of each; each stored late and at once, not estimated well."""
        turns: Counter[tuple[ConfigValue, ...]] = Counter()

        def turn(each: EstimatedConfig) -> int:
            kind = tuple(each.config[name] for name in self.kind)
            turns[kind] += 1
            return turns[kind]

        likely = sorted(self.ranked_list(problem, device), key=turn)
        either = (Config({**each.config, "late": late}) for each in likely for late in (1, 0))
        valid = (config for config in either if self.is_of_size(problem, config))
        return tuple(
            EstimatedConfig(config, self.estimate_ms(problem, device, config))
            for config in itertools.islice(valid, _DEFAULTS)
        )

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        """Time to move all tensors and to compute, of which the longer hides most of the other.

        A step's products take the tensor cores, or shared memory that is read by them, written and read once more; what
        follows them takes a while that other blocks of the multiprocessor can fill.
        """
        tiling = _Tiling.of(problem, config, device)
        moved_ms = 1e3 * problem.bytes / (_REACHED * device.bandwidth_bytes_per_s)
        groups, columns = tiling.threads // 128, tiling.columns
        staged = _STAGED * tiling.chunk_pixels
        read = tiling.steps * (columns / 4 + 16 * (1 - config["held"]))
        products = groups * tiling.steps * columns * _PRODUCT
        busy = larger(products, _SHARED * (groups * (read + 2.5 * columns) + staged))
        alone = products + staged + mapped(_ROW.__getitem__, config["late"])
        blocks = tiling.schedule.blocks
        turns = ceil_div(tiling.schedule.tiles * tiling.schedule.filter_tiles, blocks)
        together = smaller(tiling.resident, ceil_div(blocks, device.sm_count))
        strip_steps = ceil_div(ceil_div(problem.out_spatial[0], tiling.strips), config["rows"])
        strip = strip_steps * larger(together * busy, alone)
        begun = _STRIP + tiling.earlier * together * staged
        filters = _LAID * together * tiling.tile_k * tiling.outputs * tiling.steps
        busy_ms = 1e3 * (filters + turns * (begun + strip)) / device.clock_hz
        ms: float = _LAUNCH_MS + larger(moved_ms, busy_ms) + _EXPOSED * smaller(moved_ms, busy_ms)
        return ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config, device)
        strip_rows, longer_strips = divmod(problem.out_spatial[0], tiling.strips)
        step = KernelStep(
            source="few_channels/forward_wgmma.cu",
            entry="few_channels_forward_wgmma",
            grid=(tiling.schedule.blocks, 1, 1),
            block=(tiling.threads, 1, 1),
            shared_bytes=tiling.shared_bytes,
            defines=_defines(problem, config, tiling),
            args=(
                *(Pointer(buffer=name) for name in ("x", "w", "y")),
                STRIPS_SHAPE(**tiling.schedule.fields(problem), strip_rows=strip_rows, longer_strips=longer_strips),
                *partial_statistics(problem),
                *epilogue_arguments(problem),
            ),
        )
        return with_statistics(ConvSolution(steps=(step,)), problem, tiling.schedule.step * config["rows"])


SOLVERS = (ConvFirstLayerWgmma(),)
