"""ConvGroupedPlanesWeights: backward weights of grouped convolutions of NCHW tensors on tensor cores.

Rows of pixels are multiplied as they lie in memory, with pixels as K. Splits share the tiles of outputs; a split-K
reduction adds their float32 partials in a fixed order. Kernels: kernels_src/grouped/nchw_weights.cu.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_WEIGHTS, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep, Pointer, int32s
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.examples import grouped_example
from miofind.solvers.common.packed_groups import PackedGroups, least_ample, refuse_groups
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.grouped.nchw_tiling import KEYS, NchwWeightsTiling, shifts

_DEFAULTS, _MOST_ALIKE = 8, 2
_MOST_BLOCKS = 4  # of a multiprocessor, so that split-K partials are few
_LEAST_BLOCKS = 0.8  # with which several splits fill it
_ROWS = (1, 2, 4, 7, 14)
_SPLITS = (1, 2, 4, 8, 16, 32)
_MAX_PAIR = 2  # pixels that shifts may reach before a segment
_MAX_SUMS, _MAX_REGISTERS = 128, 255
_LEAST_THREADS, _MAX_THREADS = 32, 512
_MAX_GRID = 2**16 - 1
_MAX_WORKSPACE_BYTES = 1 << 28


def _registers(problem: ProblemDescription, tiling: NchwWeightsTiling) -> int:
    """Registers of a thread that spills nothing: sums, gradients of rows under way, a segment of x and its shift."""
    planar = problem.lifted(2)
    live = smaller(tiling.rows, (planar.filter[0] - 1) * planar.conv.dilation[0] // planar.conv.stride[0] + 1)
    segments = 4 * live * tiling.item_blocks + (6 * planar.conv.stride[1] + 4) * tiling.channel_blocks
    return 8 * ceil_div(tiling.sums + segments + 36, 8)


def _resident(problem: ProblemDescription, tiling: NchwWeightsTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(_registers(problem, tiling), tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _split_k(problem: ProblemDescription, config: Config) -> SplitK:
    return SplitK.of(problem, config["splits"])


def _defines(
    problem: ProblemDescription, config: Config, tiling: NchwWeightsTiling, resident: int
) -> tuple[tuple[str, str | int], ...]:
    planar = problem.lifted(2)
    return (
        ("ELEMENT", planar.x.dtype.value),
        ("GROUP_C", planar.c // planar.groups),
        ("GROUP_K", planar.k // planar.groups),
        *axis_defines(planar, IN=planar.spatial, OUT=planar.out_spatial),
        *((name.upper(), config[name]) for name in ("units", "shares", "images", "row_groups")),
        ("WARP_ROWS", config["rows"]),
        ("ITEM_BLOCKS", tiling.item_blocks),
        ("ROW_TILES", tiling.row_tiles),
        ("WARPS", config["warps"]),
        ("STAGES", config["stages"]),
        ("X_PITCH", tiling.x.pitch),
        ("DY_PITCH", tiling.y.pitch),
        ("X_CHANNEL", tiling.x.channel_bytes),
        ("DY_CHANNEL", tiling.y.channel_bytes),
        ("MIN_BLOCKS", resident),
        ("SHARED_BYTES", tiling.shared_bytes),
    )


def _sum_step(problem: ProblemDescription, config: Config, device: Device) -> KernelStep:
    tiling = NchwWeightsTiling.of(problem, config)
    return KernelStep(
        source="grouped/nchw_weights.cu",
        entry="grouped_nchw_weights",
        grid=(tiling.channel_tiles // config["shares"], config["splits"], config["shares"]),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling, _resident(problem, tiling, device)),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", "w", _split_k(problem, config).target)),
            *int32s(problem.n, problem.c, problem.k, tiling.tile_count),
        ),
    )


# Set against ResNeXt-50's layers at batch 32 on an H200, some 30 configurations of each: issue slots of a thread to
# copy a vector and to lay out 16 bytes; a warp's instructions besides products for a row of x and for one of dy; cycles
# of a scheduler for a product; cycles of a tile and of a block at least.
_COPY, _LAY_OUT = 13, 71
_ROW_OF_X, _ROW_OF_DY = 29, 9.6
_PRODUCT = 2.1
_ISSUED = 0.4  # instructions of a scheduler in a cycle
_TILE_LATENCY, _BLOCK_LATENCY = 350, 1800
_PARTIALS_SHARE = 1.14  # of the bytes of partials that device memory sees
_SERIAL_SHARE = 0.69  # share of the shorter of memory and multiprocessors that does not overlap
_LAUNCH_MS, _FINISH_MS = 0.0015, 0.00057


def _busy_cycles(problem: ProblemDescription, tiling: NchwWeightsTiling) -> float:
    """Cycles of a multiprocessor's schedulers that one tile of one block takes."""
    planar = problem.lifted(2)
    stride_h, stride_w = planar.conv.stride
    filter_y = planar.filter[0]
    slots = 0.0
    for rows in (tiling.x, tiling.y):
        slots += rows.copies * _COPY / 32
        if rows.is_flat:
            slots += rows.channels * rows.images * rows.rows * ceil_div(rows.width, 8) * _LAY_OUT / 32
    rows_of_x = (tiling.rows - 1) * stride_h + (filter_y - 1) * planar.conv.dilation[0] + 1
    products = 2 * tiling.rows * tiling.sums / 4
    visits = tiling.items * tiling.sets
    slots += visits * (rows_of_x * tiling.channel_blocks * (_ROW_OF_X + 8 * (stride_w - 1)))
    slots += visits * tiling.rows * _ROW_OF_DY * tiling.item_blocks
    slots += visits * products
    return larger(slots / (4 * _ISSUED), visits * products * _PRODUCT / 4)


def _work_ms(problem: ProblemDescription, device: Device, tiling: NchwWeightsTiling, config: Config) -> float:
    """Milliseconds of multiprocessors and memory together."""
    resident, tiles = _resident(problem, tiling, device), ceil_div(tiling.tile_count, config["splits"])
    busy = _busy_cycles(problem, tiling)
    alone = _TILE_LATENCY * chosen(config["stages"] == 1, 2, 1) + 128 * busy / tiling.threads
    blocks = tiling.channel_tiles * config["splits"]
    cycles = cycles_of_waves(
        blocks, resident, device, lambda together: _BLOCK_LATENCY + tiles * larger(together * busy, alone)
    )
    processing = 1e3 * cycles / device.clock_hz
    partials = chosen(config["splits"] > 1, 8 * problem.w.size * config["splits"], 0)
    halo = 0.1 * (tiling.x.rows - tiling.rows * problem.lifted(2).conv.stride[0]) / tiling.x.rows
    through = problem.bytes * (1 + halo) + _PARTIALS_SHARE * partials
    memory = 1e3 * through / device.bandwidth_bytes_per_s
    ms: float = larger(memory, processing) + _SERIAL_SHARE * smaller(memory, processing)
    return ms


# One of them is valid for every applicable problem.
_LAST_RESORTS = Config.product(
    {
        "rows": _ROWS,
        "row_groups": (1, 2, 4),
        "images": (1,),
        "units": (1,),
        "warps": (1,),
        "shares": (4, 2, 1),
        "stages": (1,),
        "splits": (1,),
    }
)


@functools.cache
def _last_resorts() -> ConfigTable:
    return ConfigTable(_LAST_RESORTS)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable.product(
        {
            ("units", "shares"): ((1, 1), (2, 1), (1, 2), (1, 4)),
            "splits": _SPLITS,
            "rows": (4, 7, 14),
            "row_groups": (1, 2, 4),
            "images": (1, 4, 8),
            "warps": (1, 2, 4),
            "stages": (2, 3),
        }
    )


def _likely(problem: ProblemDescription, device: Device) -> ConfigTable:
    """What default_configs ranks by estimate: as many blocks as there are multiprocessors, to four times as many."""
    packs, out_h = ceil_div(problem.groups, PackedGroups.of(problem).groups), problem.lifted(2).out_spatial[0]

    def is_likely(config: Config) -> bool:
        rows, splits = config["rows"] * config["row_groups"], config["splits"]
        blocks = ceil_div(packs, config["units"]) * config["shares"] * splits / device.sm_count
        fills_images = (config["images"] == 1) | (rows >= out_h)
        fills_device = (splits == 1) | ((blocks >= _LEAST_BLOCKS) & (blocks <= _MOST_BLOCKS))
        likely: bool = (rows < 2 * out_h) & fills_images & fills_device
        return likely

    return ConfigTable.joined([_short_list().valid(is_likely), _last_resorts()])


def _varied(ranked: Sequence[EstimatedConfig]) -> tuple[EstimatedConfig, ...]:
    """The likely best, at most two of each way to deal outputs: estimates of others differ less than they are off."""
    taken: Counter[tuple[int, ...]] = Counter()
    kept = []
    for each in ranked:
        deal = (each.config["units"], each.config["shares"], each.config["splits"])
        if taken[deal] < _MOST_ALIKE:
            kept.append(each)
        taken[deal] += 1
        if len(kept) == _DEFAULTS:
            break
    return tuple(kept)


def _is_of_size(problem: ProblemDescription, config: Config) -> bool:
    """Whether channels have so many shares, and no smaller value of a parameter does the same."""
    packs, out_h = PackedGroups.of(problem), problem.lifted(2).out_spatial[0]
    shares, units, row_groups = config["shares"], config["units"], config["row_groups"]
    may_share = (units == 1) & (packs.groups == 1) & (packs.c // 8 % shares == 0)
    is_of_size: bool = (
        ((shares == 1) | may_share)
        & (units < 2 * ceil_div(problem.groups, packs.groups))
        & (config["images"] < 2 * problem.n)
        & (config["rows"] <= least_ample(_ROWS, out_h))
        & ((row_groups == 1) | (row_groups // 2 * config["rows"] < out_h))
    )
    return is_of_size


def _can_run(problem: ProblemDescription, device: Device, config: Config) -> bool:
    """Whether a block, a thread and the workspace have what it takes, and tiles are enough for splits and stages."""
    tiling, splits, stages = NchwWeightsTiling.of(problem, config), config["splits"], config["stages"]
    is_flat = tiling.x.is_flat or tiling.y.is_flat
    is_alone = splits == 1
    # Copies and products of several tiles overlap.
    overlaps = (stages > 1) | is_alone | (splits >= tiling.tile_count)
    can_run: bool = (
        ((tiling.row_tiles == 1) | ((config["images"] == 1) & (not is_flat)))
        & (config["warps"] <= tiling.sets)
        & (tiling.threads >= _LEAST_THREADS)
        & (tiling.threads <= _MAX_THREADS)
        & (is_alone | (splits * tiling.channel_tiles <= _MOST_BLOCKS * device.sm_count))
        & (splits <= tiling.tile_count)
        & (stages <= ceil_div(tiling.tile_count, splits))
        & overlaps
        & (is_alone | (_split_k(problem, config).bytes <= _MAX_WORKSPACE_BYTES))
        & (tiling.sums <= _MAX_SUMS)
        & (_registers(problem, tiling) <= _MAX_REGISTERS)
        & (_resident(problem, tiling, device) > 0)
    )
    return can_run


def _valid(problem: ProblemDescription, device: Device, table: ConfigTable) -> ConfigTable:
    """The valid ones of a table."""
    return table.valid(functools.partial(_is_of_size, problem), functools.partial(_can_run, problem, device))


class ConvGroupedPlanesWeights(Solver):
    """Backward weights of grouped convolution of NCHW tensors: products of rows of pixels, float32 accumulators.

    Pixels beyond the images are multiplied as zeros: an infinity or NaN spreads over taps that do not meet it.

    Configuration: a warp adds 8 or 16 channels x some filters of a pack, the fewest groups that fill 8 of each, over
    segments of 8 outputs in `rows` rows. A tile has `row_groups` times as many rows of `images` images; `warps` warps
    share its segments. A block has `units` packs, or one in `shares` shares of a pack's channels, and `stages` stages.
    `splits` blocks share the tiles.
    """

    id = "ConvGroupedPlanesWeights"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": _ROWS,
        "row_groups": (1, 2, 4),
        "images": (1, 2, 4, 8),
        "units": (1, 2),
        "shares": (1, 2, 4),
        "warps": (1, 2, 4),
        "stages": (1, 2, 3),
        "splits": _SPLITS,
    }
    sources = ("grouped/nchw_weights.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        grouped = functools.partial(
            grouped_example, dtype=DataType.FLOAT16, layout=Layout.NCHW, padding=1, direction=Direction.BACKWARD_WEIGHTS
        )
        brain = DataType.BFLOAT16
        return (
            grouped(8, 4, 4, x=(2, 30, 28), w=(3, 3)),
            grouped(4, 8, 8, x=(3, 28, 28), w=(3, 3), stride=2, dtype=brain),
            grouped(3, 32, 32, x=(5, 7, 7), w=(3, 3)),
            grouped(2, 16, 16, x=(3, 14, 14), w=(3, 3), stride=2, dtype=brain),
            grouped(4, 6, 10, x=(2, 13, 9), w=(5, 3), padding=((4, 0), (2, 1)), dilation=(1, 2)),
            grouped(2, 24, 64, x=(2, 9, 12), w=(1, 1), padding=0),
            grouped(4, 2, 4, x=(2, 50), w=(5,), padding=2, stride=2, layout=Layout.NCW),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_groups(problem)).refused:
            return answer
        planar = problem.lifted(2)
        if max(planar.conv.stride) > 2:
            return Applicability(f"serves strides of 1 and 2, not {problem.conv.stride}")
        reached, most = shifts(planar), 2 if planar.conv.stride[1] == 1 else 3
        if reached[0] < -_MAX_PAIR or reached[-1] > most:
            return Applicability(f"shifts columns by -2 to {most}, not by {reached[0]} to {reached[-1]}")
        if not _valid(problem, device, _last_resorts()).configs:
            return Applicability(f"filter {problem.filter} is too large, or rows are too wide, for a block")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return bool(_is_of_size(problem, config)) and bool(_can_run(problem, device, config))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return _varied(self._ranked(problem, device, _likely(problem, device)))

    def _ranked(self, problem: ProblemDescription, device: Device, table: ConfigTable) -> Sequence[EstimatedConfig]:
        """The valid ones of a table, the least estimate first."""
        return self.ranked_table(problem, device, _valid(problem, device, table))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = NchwWeightsTiling.of(problem, config)
        launches = _LAUNCH_MS + chosen(config["splits"] > 1, _FINISH_MS, 0.0)
        return launches + _work_ms(problem, device, tiling, config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        step, split_k = _sum_step(problem, config, device), _split_k(problem, config)
        return split_k.solution(step, split_k.vector_reduction(step))


SOLVERS = (ConvGroupedPlanesWeights(),)
