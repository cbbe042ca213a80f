"""ConvGrouped: grouped convolution with few channels a group on tensor cores, forward and backward data.

Pixels are NHWC in shared memory, whatever the tensors' layout. Kernel: kernels_src/grouped/nhwc.cu. ConvGroupedWeights
serves backward weights.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.epilogue_registers import epilogue_registers
from miofind.solvers.common.examples import grouped_example
from miofind.solvers.common.packed_groups import SOURCE, GroupedTiling, is_ample, refuse_groups, units_of
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
    unrolled = 32 if not tiling.is_dense and blocks_n > 2 else 0  # all of the depth is, and loads run ahead
    addresses = 64 if tiling.stages > 1 else 48 if tiling.axes[0].stride == 1 else 56
    fused = epilogue_registers(problem, 2 * blocks_n, 2) + (_FINISHING if problem.epilogue else 0)
    return 8 * math.ceil((tiling.sums + 2 * tiling.axes[0].taps * blocks_n + addresses + unrolled + fused) / 8)


def _resident(problem: ProblemDescription, tiling: GroupedTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(_registers(problem, tiling), tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _tiles_of_block(tiling: GroupedTiling, resident: int, device: Device) -> int:
    """Tiles that a block of several stages computes one after another: all blocks are resident at once."""
    return ceil_div(tiling.spatial_tiles, max(1, device.sm_count * resident // tiling.tiles[0]))


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
    busy = max(slots / 3, shared, warps * products * _PRODUCT)
    alone = _MOVE_LATENCY * moved / tiling.threads + _PRODUCT_LATENCY * products
    together = min(resident, math.ceil(tiling.blocks / device.sm_count))
    if tiling.stages > 1:
        tiles = _tiles_of_block(tiling, resident, device)
        together = min(resident, ceil_div(tiling.tiles[0] * ceil_div(tiling.spatial_tiles, tiles), device.sm_count))
        cycles = tiles * max(together * busy, alone)
    else:
        cycles = cycles_of_waves(
            tiling.blocks, resident, device, lambda blocks: _WAVE_LATENCY + max(blocks * busy, alone)
        )
    processing = 1e3 * cycles / device.clock_hz
    segment_bytes = 2 * tiling.span
    if problem.x.layout.channels_last:
        segment_bytes = 16 * tiling.units * min(tiling.in_blocks, tiling.out_blocks)
    through = problem.bytes * (1 + _SHORT_SEGMENT / segment_bytes)
    memory = 1e3 * through / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    return max(memory, processing) + min(memory, processing) * (_SERIAL_SHARE + _ALONE / (together * tiling.stages))


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


def _varied(ranked: Sequence[Config]) -> list[Config]:
    """The first few, then the first of each number of rows and units, a few of each number of rows.

    Registers, and so blocks at once, depend on rows most, and what segments of channels cost on units.
    """
    chosen: dict[tuple[int, int], Config] = {}
    taken: Counter[int] = Counter()
    for config in ranked:
        rows, units = config["rows"], config["units"]
        if (rows, units) not in chosen and taken[rows] < _MOST_ALIKE:
            chosen[rows, units] = config
            taken[rows] += 1
    return list(dict.fromkeys([*ranked[:_FIRST], *chosen.values()]))


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
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            return Applicability("serves forward and backward data: ConvGroupedWeights serves backward weights")
        if (answer := refuse_groups(problem)).refused:
            return answer
        if not any(self.is_valid_config(problem, device, config) for config in reversed(_SHORT_LIST)):
            return Applicability(
                f"filter {problem.filter} or its stride or dilation is too large for a block, or the image for a grid"
            )
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = GroupedTiling.of(problem, config)
        height, width = tiling.axes
        tile_h = config["rows"] * config["row_groups"]
        if config["shares"] > 1 and (not tiling.is_dense or tiling.out_blocks % config["shares"]):
            return False
        if tile_h >= 2 * height.outputs or is_ample(config["rows"], _ROWS, height.outputs):
            return False
        if is_ample(config["columns"], _COLUMNS, width.outputs):
            return False
        if config["images"] >= 2 * problem.n or config["units"] >= 2 * units_of(problem):
            return False
        if tiling.stages > 1 and not problem.x.layout.channels_last:
            return False
        if tiling.stages > 1:
            resident = _resident(problem, tiling, device)
            if resident == 0 or tiling.stages > _tiles_of_block(tiling, resident, device):
                return False
        if tiling.sums > _MAX_SUMS or tiling.threads > _MAX_THREADS:
            return False
        if tiling.tiles[1] * tiling.tiles[2] > _MAX_GRID or tiling.tiles[3] > _MAX_GRID:
            return False
        return _registers(problem, tiling) <= _MAX_REGISTERS and _resident(problem, tiling, device) > 0

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return any(channels // problem.groups % 8 for channels in (problem.c, problem.k))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        ranked = self.ranked(problem, device, _SHORT_LIST)
        staged = _varied([config for config in ranked if config["stages"] > 1])[: _DEFAULTS // 2]
        plain = _varied([config for config in ranked if config["stages"] == 1])[: _DEFAULTS - len(staged)]
        return tuple(self.ranked(problem, device, [*plain, *staged]))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = GroupedTiling.of(problem, config)
        resident = _resident(problem, tiling, device)
        return _LAUNCH_MS + _work_ms(problem, device, tiling, resident)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(_launch(problem, config, device),))


SOLVERS = (ConvGrouped(),)
