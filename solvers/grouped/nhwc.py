"""ConvGrouped: grouped convolution with few channels a group on tensor cores, forward and backward data.

Pixels are NHWC in shared memory, whatever the tensors' layout. Kernel: kernels_src/grouped/nhwc.cu. ConvGroupedWeights
serves backward weights.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_IMAGES, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import grouped_example
from miofind.solvers.common.packed_groups import (
    SOURCE,
    GroupedAxis,
    GroupedTiling,
    is_dense,
    least_ample,
    refuse_groups,
    unit_channels,
    units_of,
)
from miofind.solvers.grouped.nhwc_shape import KEYS, SHAPE, shape_of

_DEFAULTS, _FIRST, _MOST_ALIKE = 8, 4, 3
_ROWS, _COLUMNS = (1, 2, 4, 7, 8), (8, 16, 32)
_MAX_SUMS = 128
_MAX_REGISTERS = 255
_MAX_THREADS = 512
_MAX_GRID = 2**16 - 1
_FINISHING = 12  # registers of an epilogue's arithmetic


def _registers(problem: ProblemDescription, tiling: GroupedTiling) -> int:
    """Registers of a thread that spills nothing: sums, fragments of a column of taps, and addresses."""
    blocks_n = tiling.out_blocks // tiling.shares
    unrolled = chosen((blocks_n > 2) & (not tiling.is_dense), 32, 0)  # all of the depth is, and loads run ahead
    addresses = chosen(tiling.stages > 1, 64, 48 if tiling.axes[0].stride == 1 else 56)
    fused = epilogue_registers(problem, 2 * blocks_n, 2) + (_FINISHING if problem.epilogue else 0)
    return round_up(tiling.sums + 2 * tiling.axes[0].taps * blocks_n + addresses + unrolled + fused, 8)


def _resident(problem: ProblemDescription, tiling: GroupedTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(_registers(problem, tiling), tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _tiles_of_block(tiling: GroupedTiling, resident: int, device: Device) -> int:
    """Tiles that a block of several stages computes one after another: all blocks are resident at once."""
    return ceil_div(tiling.spatial_tiles, larger(1, device.sm_count * resident // tiling.tiles[0]))


def _launch(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    planar, tiling = problem.lifted(2), GroupedTiling.of(problem, config)
    resident = _resident(problem, tiling, device)
    channel_tiles, row_tiles, column_tiles, image_tiles = tiling.tiles
    across = (row_tiles * column_tiles, image_tiles)
    if tiling.stages > 1:
        across = (ceil_div(tiling.spatial_tiles, _tiles_of_block(tiling, resident, device)), 1)
    source, target = SOURCE[problem.direction], problem.direction.output
    return KernelStep(
        source="grouped/nhwc.cu",
        entry="grouped_nhwc",
        grid=(channel_tiles, *across),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(planar, config, tiling, resident),
        args=(
            *(Pointer(buffer=name) for name in (source, "w", target)),
            shape_of(planar.tensor(source), planar.tensor(target), tiling.spatial_tiles),
            *epilogue_arguments(problem),
        ),
    )


def _defines(
    planar: ProblemDescription, config: Config, tiling: GroupedTiling, resident: int
) -> tuple[tuple[str, str | int], ...]:
    source = planar.tensor(SOURCE[planar.direction]).shape[2:]
    return (
        ("ELEMENT", planar.x.dtype.value),
        ("GROUPS", planar.groups),
        ("GROUP_C", planar.c // planar.groups),
        ("GROUP_K", planar.k // planar.groups),
        ("FLIPPED", int(planar.direction is Direction.BACKWARD_DATA)),
        *axis_defines(planar),
        ("UNITS", config["units"]),
        ("SHARES", tiling.shares),
        ("WARP_ROWS", config["rows"]),
        ("ROW_GROUPS", config["row_groups"]),
        ("COLUMNS", tiling.columns),
        ("SPAN", tiling.span),
        ("COLUMN_TILES", tiling.tiles[2]),
        ("ROW_TILES", tiling.tiles[1]),
        ("STAGES", config["stages"]),
        ("IMAGES", config["images"]),
        ("IN_H", source[0]),
        ("IN_W", source[1]),
        ("OUT_H", planar.output.shape[2]),
        ("OUT_W", planar.output.shape[3]),
        ("WHOLE_IMAGES", int(tiling.is_whole)),
        ("CHANNELS_LAST", int(planar.x.layout.channels_last)),
        ("MIN_BLOCKS", resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        SHAPE.define,
        *epilogue_defines(planar),
    )


# Set against ResNeXt-50's layers at batch 32 on an H200, some 20 configurations of each. Issue slots, in a warp's
# instructions, to move 16 bytes, channels last and first; cycles of tensor cores for a product of depth 16; cycles
# between blocks that follow one another, for each 16 bytes of a thread, and for each product of a warp.
_MOVE, _TURN = 45, 93  # channels first reckoned
_PRODUCT = 0.5
_WAVE_LATENCY, _MOVE_LATENCY, _PRODUCT_LATENCY = 1670, 73, 1.9
_SHORT_SEGMENT = 20  # bytes that a segment of channels costs besides its own
_SERIAL_SHARE, _ALONE = (
    0.085,
    0.3,
)  # share of the shorter of memory and multiprocessors that does not overlap; with one block
_BANDWIDTH_SHARE = 0.89  # of the nominal one that copies reach
_LAUNCH_MS = 0.0034
_WRITE_ALONE = 4.5  # cycles for 16 bytes of rows of an odd length, channels first: 26 configurations of 5 problems


def _work_ms(problem: ProblemDescription, device: Device, tiling: GroupedTiling, resident: int) -> float:
    """Milliseconds of multiprocessors and memory together."""
    height, width = tiling.axes
    warps, taps_h, taps_w = tiling.threads // 32, height.taps, width.taps
    rows_in = (tiling.rows - 1) * height.stride + height.reach + 1
    blocks_n, depth = tiling.out_blocks // tiling.shares, tiling.in_blocks // 2
    products = tiling.rows * taps_h * taps_w * (depth * blocks_n if tiling.is_dense else tiling.in_blocks / 2)
    reads = depth * taps_w * (rows_in * 4 + taps_h * blocks_n * 2)
    read = tiling.images * math.prod(tiling.patch) * tiling.units * tiling.in_blocks
    written = tiling.images * tiling.rows * tiling.row_groups * height.phases * width.phases * tiling.span
    written *= tiling.units * tiling.out_blocks
    moved = read + written + tiling.filter_bytes / 16
    slots = moved * (_MOVE if problem.x.layout.channels_last else _TURN) / 32
    slots += warps * (1.3 * products + reads / 2 + 150)
    shared = (3 * read + 4 * written) / 8 + warps * reads
    busy = larger(larger(slots / 3, shared), warps * products * _PRODUCT)
    if not problem.x.layout.channels_last and problem.output.shape[-1] % 2:
        busy = busy + _WRITE_ALONE * written
    alone = _MOVE_LATENCY * moved / tiling.threads + _PRODUCT_LATENCY * products
    # With several stages, blocks share the tiles; with one, they come in waves.
    is_staged, tiles = tiling.stages > 1, _tiles_of_block(tiling, resident, device)
    blocks = chosen(is_staged, tiling.tiles[0] * ceil_div(tiling.spatial_tiles, tiles), tiling.blocks)
    together = smaller(resident, ceil_div(blocks, device.sm_count))
    waves = cycles_of_waves(tiling.blocks, resident, device, lambda count: _WAVE_LATENCY + larger(count * busy, alone))
    processing = 1e3 * chosen(is_staged, tiles * larger(together * busy, alone), waves) / device.clock_hz
    segment_bytes = 2 * tiling.span
    if problem.x.layout.channels_last:
        segment_bytes = 16 * tiling.units * min(tiling.in_blocks, tiling.out_blocks)
    through = problem.bytes * (1 + _SHORT_SEGMENT / segment_bytes)
    memory = 1e3 * through / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    serial_share = _SERIAL_SHARE + _ALONE / (together * tiling.stages)
    return larger(memory, processing) + smaller(memory, processing) * serial_share


# What default_configs ranks by estimate. A problem is served if one of them is valid.
_SHORT_LIST = (
    *Config.product(
        {
            "rows": (2, 4, 7, 8),
            "row_groups": (1, 2),
            "columns": (8, 16, 32),
            "images": (1, 2, 4),
            "units": (1, 2, 4),
            "shares": (1, 2),
            "stages": (1, 2, 3),
        }
    ),
    Config.of(rows=1, row_groups=1, columns=8, images=1, units=1, shares=1, stages=1),
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


def _is_of_size(problem: ProblemDescription, config: Config) -> bool:
    """Whether no smaller value of a parameter does the same, and a unit has so many shares."""
    planar = problem.lifted(2)
    height, width = GroupedAxis.of(planar, 0), GroupedAxis.of(planar, 1)
    _, unit_out = unit_channels(problem)
    is_of_size: bool = (
        (config["rows"] * config["row_groups"] < 2 * height.outputs)
        & (config["rows"] <= least_ample(_ROWS, height.outputs))
        & (config["columns"] <= least_ample(_COLUMNS, width.outputs))
        & (config["images"] < 2 * problem.n)
        & (config["units"] < 2 * units_of(problem))
        & ((config["shares"] == 1) | (is_dense(problem) & (unit_out // 8 % config["shares"] == 0)))
        & ((config["stages"] == 1) | problem.x.layout.channels_last)
    )
    return is_of_size


def _fits(problem: ProblemDescription, tiling: GroupedTiling, device: Device) -> bool:
    """Whether a thread, a block and a grid have what they take, and blocks of several stages several tiles."""
    registers, resident = _registers(problem, tiling), _resident(problem, tiling, device)
    return (
        (tiling.sums <= _MAX_SUMS)
        & (tiling.threads <= _MAX_THREADS)
        & (tiling.tiles[1] * tiling.tiles[2] <= _MAX_GRID)
        & (tiling.tiles[3] <= _MAX_GRID)
        & (registers <= _MAX_REGISTERS)
        & (resident > 0)
        & ((tiling.stages == 1) | (tiling.stages <= _tiles_of_block(tiling, resident, device)))
    )


def _varied(ranked: Iterable[EstimatedConfig], most: int) -> list[EstimatedConfig]:
    """The first few, then the first of each number of rows and units, a few of each number of rows, so many in all.

    Registers, and so blocks at once, depend on rows most, and what segments of channels cost on units.
    """
    likely: dict[tuple[int, int], EstimatedConfig] = {}
    taken: Counter[int] = Counter()
    firsts: list[EstimatedConfig] = []
    for each in ranked:
        if len(firsts) < _FIRST:
            firsts.append(each)
        rows, units = each.config["rows"], each.config["units"]
        if (rows, units) not in likely and taken[rows] < _MOST_ALIKE:
            likely[rows, units] = each
            taken[rows] += 1
        if len(likely) == most:
            break
    return list(dict.fromkeys([*firsts, *likely.values()]))[:most]


class ConvGrouped(Solver):
    """Grouped convolution as products with block-diagonal matrices of filters on tensor cores, float32 accumulators.

    Groups of less than 8 channels share products, whose zeros are multiplied: an infinity or NaN of the input spreads
    to the results of groups whose channels are among the same 16 (less than 8 groups either side). Padding is
    multiplied as zeros: an infinity or NaN of the filter spreads to outputs at the border.

    Configuration: a warp computes `rows` rows of 16 pixels for one of `shares` shares of the results of a unit, the
    fewest groups whose channels fill a product. A block has `row_groups` times as many rows, `columns` columns,
    `images` images and `units` units. With several `stages`, blocks that are resident at once share the tiles (NHWC
    only).
    """

    id = "ConvGrouped"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_IMAGES
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": _ROWS,
        "row_groups": (1, 2, 4),
        "columns": _COLUMNS,
        "images": (1, 2, 4),
        "units": (1, 2, 4, 8),
        "shares": (1, 2, 4),
        "stages": (1, 2, 3),
    }
    sources = ("grouped/nhwc.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        grouped = functools.partial(grouped_example, dtype=DataType.FLOAT16, layout=Layout.NHWC, padding=1)
        brain, data = DataType.BFLOAT16, Direction.BACKWARD_DATA
        return (
            grouped(8, 4, 4, x=(2, 30, 29), w=(3, 3)),
            grouped(4, 8, 8, x=(3, 28, 27), w=(3, 3), stride=2, dtype=brain),
            grouped(3, 32, 32, x=(3, 7, 7), w=(3, 3)),
            grouped(4, 6, 10, x=(2, 13, 9), w=(5, 3), padding=((4, 0), (1, 5)), dilation=(1, 2)),
            grouped(2, 24, 64, x=(2, 9, 12), w=(1, 1), padding=0, dtype=brain),
            grouped(8, 4, 4, x=(2, 30, 29), w=(3, 3), direction=data, dtype=brain),
            grouped(2, 16, 16, x=(3, 15, 14), w=(3, 3), stride=2, direction=data),
            grouped(2, 16, 32, x=(3, 14, 14), w=(3, 3), stride=2, layout=Layout.NCHW),
            grouped(8, 4, 4, x=(2, 30, 28), w=(3, 3), direction=data, layout=Layout.NCHW),
            grouped(8, 3, 5, x=(2, 11, 12), w=(4, 3), stride=(2, 3), dilation=(3, 1), direction=data),
            grouped(4, 2, 4, x=(2, 50), w=(7,), stride=2, layout=Layout.NWC),
            grouped(8, 4, 4, x=(2, 30, 29), w=(3, 3), epilogue="bias.relu"),
            grouped(8, 4, 4, x=(2, 30, 29), w=(3, 3), direction=data, epilogue="residual.drelu"),
            grouped(2, 16, 32, x=(3, 15, 14), w=(3, 3), stride=2, dtype=brain, epilogue="scale.bias.residual.silu"),
            grouped(4, 8, 8, x=(3, 14, 13), w=(3, 3), layout=Layout.NCHW, epilogue="channel_bias.silu.residual"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        if problem.direction is not Direction.BACKWARD_DATA:
            return super().fuses_training(problem)
        is_strided = max(problem.conv.stride) > 1
        return Applicability(f"fuses gradients of stride 1, not {problem.conv.stride}" if is_strided else "")

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_groups(problem)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in reversed(_SHORT_LIST)):
            return Applicability(
                f"filter {problem.filter} or its stride or dilation is too large for a block, or the image for a grid"
            )
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        if not _is_of_size(problem, config):
            return False
        return _fits(problem, GroupedTiling.of(problem, config), device)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return any(channels // problem.groups % 8 for channels in (problem.c, problem.k))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked = self._ranked(problem, device)
        staged = _varied((each for each in ranked if each.config["stages"] > 1), _DEFAULTS // 2)
        plain = _varied((each for each in ranked if each.config["stages"] == 1), _DEFAULTS - len(staged))
        return tuple(sorted([*plain, *staged], key=lambda each: each.estimate_ms))

    def _ranked(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        of_size = _short_list().valid(functools.partial(_is_of_size, problem))
        return self.ranked_table(
            problem, device, of_size.valid(lambda config: _fits(problem, GroupedTiling.of(problem, config), device))
        )

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = GroupedTiling.of(problem, config)
        resident = _resident(problem, tiling, device)
        return _LAUNCH_MS + _work_ms(problem, device, tiling, resident)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(_launch(problem, config, device),))


SOLVERS = (ConvGrouped(),)
