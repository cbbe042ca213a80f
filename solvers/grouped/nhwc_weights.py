"""ConvGroupedWeights: backward weights of grouped convolutions with few channels a group on tensor cores.

Splits share the tiles of outputs; a split-K reduction adds their float32 partials in a fixed order. Kernels:
kernels_src/grouped/nhwc_weights.cu.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, mapped, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_WEIGHTS, Algorithm, Applicability, EstimatedConfig, RankedTable, Solver
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
)
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.examples import grouped_example
from miofind.solvers.common.packed_groups import aligned_units_of, least_ample, refuse_groups
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.grouped.nhwc_shape import KEYS, SHAPE, shape_of
from miofind.solvers.grouped.nhwc_weights_tiling import SHARES, GroupedWeightsTiling, may_share

_DEFAULTS = 8
_MOST_BLOCKS = 3  # of a multiprocessor, so that split-K partials are few
_ROWS, _COLUMNS = (1, 2, 4, 7, 8), (8, 16, 32)
_MOST_COLUMNS = 32  # of all images of a tile
_MAX_SUMS = 128
_MAX_THREADS = 1024
_MAX_GRID = 2**16 - 1
_MAX_WORKSPACE_BYTES = 1 << 28


def _registers(tiling: GroupedWeightsTiling) -> int:
    """Registers of a thread that spills nothing: sums, fragments, and addresses."""
    return 8 * ceil_div(tiling.sums + 4 * tiling.taps[0] + 64, 8)


def _resident(tiling: GroupedWeightsTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(_registers(tiling), tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _split_k(problem: ProblemDescription, config: Config) -> SplitK:
    return SplitK.of(problem, config["splits"])


def _defines(
    problem: ProblemDescription, config: Config, tiling: GroupedWeightsTiling, resident: int
) -> tuple[tuple[str, str | int], ...]:
    planar = problem.lifted(2)
    return (
        ("ELEMENT", planar.x.dtype.value),
        ("GROUPS", planar.groups),
        ("GROUP_C", planar.c // planar.groups),
        ("GROUP_K", planar.k // planar.groups),
        *axis_defines(planar),
        ("UNITS", config["units"]),
        *zip(("SHARES_C", "SHARES_K"), SHARES[config["shares"]], strict=True),
        ("TILE_ROWS", config["rows"]),
        ("COLUMNS", tiling.columns),
        ("SPAN", tiling.span),
        ("IMAGES", config["images"]),
        ("WARP_TAPS", tiling.taps[0]),
        ("TAP_BLOCKS", tiling.tap_blocks),
        ("WARPS", config["warps"]),
        ("STAGES", config["stages"]),
        ("ROW_TILES", tiling.tiles[0]),
        ("COLUMN_TILES", tiling.tiles[1]),
        *zip(("IN_H", "IN_W", "OUT_H", "OUT_W"), (*planar.spatial, *planar.out_spatial), strict=True),
        ("CHANNELS_LAST", int(planar.x.layout.channels_last)),
        ("MIN_BLOCKS", resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        SHAPE.define,
    )


def _sum_step(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    tiling, planar = GroupedWeightsTiling.of(problem, config), problem.lifted(2)
    return KernelStep(
        source="grouped/nhwc_weights.cu",
        entry="grouped_nhwc_weights",
        grid=(tiling.channel_tiles // config["shares"], config["splits"], tiling.tap_blocks * config["shares"]),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling, _resident(tiling, device)),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", "w", _split_k(problem, config).target)),
            shape_of(planar.x, planar.y, tiling.tile_count),
        ),
    )


# Set against ResNeXt-50's layers at batch 32 on an H200, some 20 configurations of each. Issue slots, in a warp's
# instructions, to move 16 bytes, channels last and first; cycles of tensor cores for a product; cycles of a block's
# start and end, of each tile, for each 16 bytes of a thread, and for each product of a warp.
_MOVE, _TURN = 14, 46  # channels first reckoned
_PRODUCT = 0.66
_BLOCK_LATENCY, _TILE_LATENCY, _MOVE_LATENCY, _PRODUCT_LATENCY = 4000, 740, 21, 2.4
# For each 16 bytes of a thread that is channels first: its elements come one after another, of strided rows of an odd
# length still slower; 53 configurations of 14 problems.
_TURN_LATENCY, _APART_LATENCY = 450, 1200
_SHORT_SEGMENT = 30  # bytes that a segment of channels costs besides its own
_AGAIN, _PARTIALS_SHARE = 0.51, 1.2  # shares of bytes read once more, and of partials, that device memory sees
_ALONE = 0.45  # share of the shorter of memory and multiprocessors that does not overlap with one buffer at a time
_BANDWIDTH_SHARE = 0.89  # of the nominal one that copies reach
_LAUNCH_MS, _FINISH_MS = 0.0021, 0.0008


def _work_ms(problem: ProblemDescription, device: Device, tiling: GroupedWeightsTiling, config: Config) -> float:
    """Milliseconds of multiprocessors and memory together."""
    planar = problem.lifted(2)
    (stride, _), (dilation, _) = planar.conv.stride, planar.conv.dilation
    shares = ceil_div(planar.filter[0], tiling.taps[0]) // tiling.tap_blocks
    rows_in = (tiling.rows - 1) * stride + (tiling.taps[0] - 1) * dilation + 1
    read = tiling.images * tiling.units * math.prod(tiling.patch) * tiling.unit_c / 8
    read += tiling.images * tiling.units * tiling.rows * tiling.columns * tiling.unit_k / 8
    items = tiling.units * tiling.items * shares * tiling.segment_pairs
    products = items * tiling.rows * 2 * math.prod(tiling.taps)
    reads = items * 4 * (tiling.rows + rows_in * tiling.taps[1])
    slots = read * (_MOVE if problem.x.layout.channels_last else _TURN) / 32 + 1.3 * products + reads / 3
    busy = larger(larger(slots / 3, 3 * read / 8 + reads), products * _PRODUCT)
    serial = tiling.rows * math.prod(tiling.taps) * 2 * ceil_div(tiling.segment_pairs, config["warps"])
    waits = _TILE_LATENCY * chosen(config["stages"] == 1, 2, 1)
    latency = _MOVE_LATENCY
    if not planar.x.layout.channels_last:
        latency = _APART_LATENCY if stride > 1 and planar.x.shape[-1] % 2 else _TURN_LATENCY
    alone = waits + latency * read / tiling.threads + _PRODUCT_LATENCY * serial
    resident = _resident(tiling, device)
    tiles = ceil_div(tiling.tile_count, config["splits"])
    blocks = tiling.channel_tiles * config["splits"] * tiling.tap_blocks
    cycles = cycles_of_waves(
        blocks, resident, device, lambda together: _BLOCK_LATENCY + tiles * larger(together * busy, alone)
    )
    processing = 1e3 * cycles / device.clock_hz
    partials = chosen(config["splits"] > 1, 8 * problem.w.size * config["splits"], 0)
    segment_bytes = 2 * tiling.span
    if problem.x.layout.channels_last:
        segment_bytes = 2 * tiling.units * smaller(tiling.unit_c, tiling.unit_k)
    again = larger(0.0, 16 * read * tiling.tile_count * tiling.channel_tiles - problem.bytes)
    through = problem.bytes * (1 + _SHORT_SEGMENT / segment_bytes) + _AGAIN * again + _PARTIALS_SHARE * partials
    memory = 1e3 * through / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    together = config["stages"] * smaller(resident, ceil_div(blocks, device.sm_count))
    ms: float = larger(memory, processing) + smaller(memory, processing) * _ALONE / together
    return ms


_SPLITS = (1, 4, 8, 16, 32, 64)
# One of them is valid for every applicable problem.
_LAST_RESORTS = tuple(
    Config.of(rows=1, columns=columns, images=1, units=1, warps=1, stages=1, splits=1, shares=1) for columns in (8, 16)
)


@functools.cache
def _last_resorts() -> ConfigTable:
    return ConfigTable(_LAST_RESORTS)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable.product(
        {
            ("units", "shares"): (*((1, shares) for shares in SHARES), (2, 1), (4, 1)),
            "splits": _SPLITS,
            "rows": (2, 4, 7, 8),
            ("columns", "images"): ((8, 2), (8, 4), (16, 1), (16, 2), (32, 1)),
            "warps": (1, 2),
            "stages": (2, 3),
        }
    )


def _likely(problem: ProblemDescription, device: Device) -> ConfigTable:
    """What default_configs ranks by estimate: as many blocks as there are multiprocessors, or about twice as many."""

    def is_likely(config: Config) -> bool:
        splits, tiles = config["splits"], ceil_div(aligned_units_of(problem), config["units"]) * config["shares"]
        blocks = tiles * splits / device.sm_count
        likely: bool = (splits == 1) | ((blocks >= 0.6) & (blocks <= 2.4))
        return likely

    return ConfigTable.joined([_short_list().valid(is_likely), _last_resorts()])


def _is_of_size(problem: ProblemDescription, config: Config) -> bool:
    """Whether a unit has so many shares, and no smaller value of a parameter does the same."""
    (out_h, out_w), images = problem.lifted(2).out_spatial, config["images"]
    may = mapped(functools.partial(may_share, problem), config["shares"])
    is_of_size: bool = (
        ((config["shares"] == 1) | ((may == 1) & (config["units"] == 1)))
        & (config["rows"] <= least_ample(_ROWS, out_h))
        & (config["columns"] <= least_ample(_COLUMNS, out_w))
        # One row serves what no other number of rows does.
        & ((config["rows"] > 1) | (smaller(out_h, config["splits"]) <= 1))
        & (images * config["columns"] <= _MOST_COLUMNS)
        & (images < 2 * problem.n)
        & (config["units"] < 2 * aligned_units_of(problem))
    )
    return is_of_size


def _can_run(problem: ProblemDescription, device: Device, config: Config) -> bool:
    """Whether a block, a thread and the workspace have what it takes, and tiles are enough for splits and stages."""
    tiling, splits, stages = GroupedWeightsTiling.of(problem, config), config["splits"], config["stages"]
    out_w, is_alone = problem.lifted(2).out_spatial[1], splits == 1
    # Copies and products of several tiles overlap.
    overlaps = (stages > 1) | is_alone | (splits >= tiling.tile_count)
    can_run: bool = (
        ((config["shares"] == 1) | (tiling.tap_blocks == 1))
        & ((tiling.columns <= config["columns"]) | (out_w <= config["columns"]))
        & (tiling.segment_pairs % config["warps"] == 0)
        & (is_alone | (splits * tiling.channel_tiles <= _MOST_BLOCKS * device.sm_count))
        & overlaps
        & (splits <= tiling.tile_count)
        & (stages <= ceil_div(tiling.tile_count, splits))
        & (is_alone | (_split_k(problem, config).bytes <= _MAX_WORKSPACE_BYTES))
        & (tiling.sums <= _MAX_SUMS)
        & (tiling.threads <= _MAX_THREADS)
        & (_resident(tiling, device) > 0)
    )
    return can_run


def _valid(problem: ProblemDescription, device: Device, table: ConfigTable) -> ConfigTable:
    """The valid ones of a table."""
    return table.valid(functools.partial(_is_of_size, problem), functools.partial(_can_run, problem, device))


class ConvGroupedWeights(Solver):
    """Backward weights of grouped convolutions: products of pixels on tensor cores, with float32 accumulators.

    Pixels beyond the images are multiplied as zeros: an infinity or NaN spreads over taps that do not meet it.

    Configuration: a warp adds 16 filters x 16 channels of a unit, the fewest groups that fill them, for some rows of
    the filter, over `rows` x `columns` outputs of `images` images at a time. `warps` warps share the columns. A block
    has `units` units, or one in `shares` shares of a unit's items, and `stages` stages. `splits` blocks share the
    tiles.
    """

    id = "ConvGroupedWeights"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": _ROWS,
        "columns": _COLUMNS,
        "images": (1, 2, 4),
        "units": (1, 2, 4),
        "warps": (1, 2),
        "stages": (1, 2, 3),
        "splits": _SPLITS,
        "shares": tuple(SHARES),
    }
    sources = ("grouped/nhwc_weights.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        grouped = functools.partial(
            grouped_example, dtype=DataType.FLOAT16, layout=Layout.NHWC, padding=1, direction=Direction.BACKWARD_WEIGHTS
        )
        brain = DataType.BFLOAT16
        return (
            grouped(8, 4, 4, x=(2, 30, 29), w=(3, 3)),
            grouped(4, 8, 8, x=(3, 28, 27), w=(3, 3), stride=2, dtype=brain),
            grouped(3, 32, 32, x=(3, 7, 7), w=(3, 3)),
            grouped(4, 6, 10, x=(2, 13, 9), w=(5, 3), padding=((4, 0), (1, 5)), dilation=(1, 2)),
            grouped(2, 24, 64, x=(2, 9, 12), w=(1, 1), padding=0, dtype=brain),
            grouped(2, 64, 64, x=(2, 9, 8), w=(3, 3), layout=Layout.NCHW),
            grouped(4, 2, 4, x=(2, 50), w=(7,), stride=2, layout=Layout.NWC),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_groups(problem)).refused:
            return answer
        if not _valid(problem, device, _last_resorts()).configs:
            return Applicability(f"filter {problem.filter} or its stride or dilation is too large for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(_is_of_size(problem, config)) and bool(_can_run(problem, device, config))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked = self._ranked(problem, device, _likely(problem, device))
        of_shares = {shares: place for place, shares in reversed([*enumerate(ranked.values("shares"))])}
        firsts = [ranked[place] for place in of_shares.values()]
        others = (each for each in ranked if each not in firsts)
        best = itertools.islice(others, _DEFAULTS - len(firsts))
        return tuple(sorted([*firsts, *best], key=lambda each: each.estimate_ms))

    def _ranked(self, problem: ProblemDescription, device: Device, table: ConfigTable) -> RankedTable:
        """The valid ones of a table, the least estimate first."""
        return self.ranked_table(problem, device, _valid(problem, device, table))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = GroupedWeightsTiling.of(problem, config)
        launches = _LAUNCH_MS + chosen(config["splits"] > 1, _FINISH_MS, 0.0)
        return launches + _work_ms(problem, device, tiling, config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        step, split_k = _sum_step(problem, config, device), _split_k(problem, config)
        return split_k.solution(step, split_k.vector_reduction(step))


SOLVERS = (ConvGroupedWeights(),)
