"""ConvDepthwiseMmaWeights: backward weights of depthwise convolution of NHWC tensors on tensor cores.

Blocks share the tiles of outputs; a cluster or a split-K reduction adds their float32 partials in a fixed order.
Kernels: kernels_src/depthwise/mma_weights.cu.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, is_config, larger, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, OF_WEIGHTS, Algorithm, Applicability, EstimatedConfig, Solver
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    int32s,
)
from miofind.solvers.common.axis_defines import axis_defines
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.examples import depthwise_example
from miofind.solvers.common.packed_groups import least_ample
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.depthwise.mma_tiling import KEYS, DepthwiseWeightsTiling, refuse_mma, unbalance, unit_axes

_DEFAULTS, _FIRST = 8, 3
_ROWS, _COLUMNS, _CHANNELS, _BLOCKS = (2, 4, 7, 8, 14), (8, 16, 32), (16, 32, 64), (0, 1, 2)
_MAX_PRODUCTS = 500  # of a tile's rows, all unrolled
_MAX_REGISTERS = 255
_MAX_THREADS = 1024
_MAX_WORKSPACE_BYTES = 1 << 28
_MIN_CLUSTER_SM = 90


def _resident(tiling: DepthwiseWeightsTiling, device: Device) -> int:
    """Blocks that a multiprocessor holds at once."""
    return resident_blocks(tiling.registers, tiling.threads, tiling.shared_bytes, SmLimits.of(device))


def _splits(tiling: DepthwiseWeightsTiling, device: Device, config: Config) -> int:
    """Blocks that share the tiles of a block's channels, as evenly as can be."""
    splits: int = chosen(config["cluster"] > 1, config["cluster"], _even(tiling, device, config["blocks"]))
    return splits


def _even(tiling: DepthwiseWeightsTiling, device: Device, blocks: int) -> int:
    """The splits of about so many blocks a multiprocessor, one where it is 0."""
    most = smaller(tiling.tile_count, larger(1, blocks * device.sm_count // tiling.channel_tiles))
    return ceil_div(tiling.tile_count, ceil_div(tiling.tile_count, most))


def _split_k(problem: ProblemDescription, splits: int, config: Config) -> SplitK:
    """What the reduction adds; a cluster adds the partials of its blocks itself."""
    return SplitK.of(problem, chosen(config["cluster"] == 1, splits, 1))


def _uses_all_blocks(
    problem: ProblemDescription, device: Device, tiling: DepthwiseWeightsTiling, config: Config
) -> bool:
    """Whether blocks use all their buffers, and a lesser number of blocks would not do the same."""
    splits, stages, blocks = _splits(tiling, device, config), config["stages"], config["blocks"]
    tiles = ceil_div(tiling.tile_count, splits)
    has_workspace = (splits == 1) | (_split_k(problem, splits, config).bytes <= _MAX_WORKSPACE_BYTES)
    is_least = (blocks == 0) | (splits > _even(tiling, device, larger(0, blocks - 1)))
    serves_cluster = (device.sm >= _MIN_CLUSTER_SM) & (splits <= tiling.tile_count)
    is_cluster = config["cluster"] > 1
    uses_all: bool = (
        (stages <= tiles)
        & ((stages > 1) | (tiles == 1))
        & (is_cluster | (has_workspace & is_least))
        & ((config["cluster"] == 1) | serves_cluster)
    )
    return uses_all


def _defines(
    problem: ProblemDescription, config: Config, splits: int, tiling: DepthwiseWeightsTiling, resident: int
) -> tuple[tuple[str, str | int], ...]:
    planar = problem.lifted(2)
    return (
        ("ELEMENT", planar.x.dtype.value),
        *axis_defines(planar, IN=planar.spatial, OUT=planar.out_spatial),
        ("TILE_ROWS", tiling.rows),
        ("PAIRS", tiling.pairs),
        ("IMAGES", tiling.images),
        ("CHANNELS", tiling.channels),
        ("WARPS", tiling.warps),
        ("STAGES", config["stages"]),
        ("ROW_TILES", tiling.tiles[0]),
        ("COLUMN_TILES", tiling.tiles[1]),
        ("ALL_CHANNELS", planar.c),
        ("CLUSTER", config["cluster"]),
        ("MIN_BLOCKS", resident),
        ("SHARED_BYTES", tiling.shared_bytes),
    )


def _sum_step(problem: ProblemDescription, device: Device, config: Config) -> KernelStep:
    tiling = DepthwiseWeightsTiling.of(problem, config)
    splits = _splits(tiling, device, config)
    resident = _resident(tiling, device)
    return KernelStep(
        source="depthwise/mma_weights.cu",
        entry="depthwise_mma_weights",
        grid=(tiling.channel_tiles, splits, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, splits, tiling, resident),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", "w", _split_k(problem, splits, config).target)),
            *int32s(problem.n, tiling.tile_count),
        ),
    )


# Set against 381 measurements on an H200. Cycles of a multiprocessor for a product of depth 16; instructions of a warp
# for a product, for 8 pairs of a tile, and to start copying 32 words of 16 bytes; cycles of a block at least, for each
# tap of its sums, of a tile while it waits for the copies, and for each product of a warp.
_PRODUCT, _PRODUCT_SLOTS, _WALK_SLOTS = 3.3, 3.5, 110
_COPY = 11
_BLOCK_LATENCY, _TAP_LATENCY, _TILE_LATENCY, _PRODUCT_LATENCY = 500, 13, 830, 8.4
_SLOTS = 2.0  # instructions that a multiprocessor issues a cycle
_AGAIN = 0.22  # share of bytes read once more that device memory sees
_PARTIALS_SHARE = 0.33  # of the bytes of split-K partials, which the cache holds
_ALONE = 0.75  # share of the shorter of memory and multiprocessors that does not overlap, with one buffer at a time
_BANDWIDTH_SHARE = 0.777  # of the nominal one that copies reach
_LAUNCH_MS, _FINISH_MS, _CLUSTER_MS = 0.00374, 0.00102, 0.00008


def _work_ms(problem: ProblemDescription, device: Device, tiling: DepthwiseWeightsTiling, config: Config) -> float:
    """Milliseconds of multiprocessors and memory together."""
    height, _ = unit_axes(problem)
    groups, warps = tiling.channels // 8, tiling.threads // 32
    met = min(1.0, problem.lifted(2).spatial[0] / ((height.outputs - 1) * height.stride + height.reach + 1) + 0.02)
    pixels = tiling.images * (tiling.staged_rows * tiling.x.columns + tiling.rows * tiling.dy.columns)
    copies = pixels * tiling.channels / 8 / 32
    products = met * tiling.products
    loads = met * tiling.staged_rows * tiling.x.matrices + 2 * tiling.rows
    walks = tiling.iterations * groups
    slots = walks * (products * _PRODUCT_SLOTS + loads / 2 + _WALK_SLOTS) + copies * _COPY
    busy = larger(larger(slots / _SLOTS, walks * loads + 4 * copies), walks * products * _PRODUCT)
    serial = ceil_div(tiling.iterations, tiling.warps) * products
    alone = _TILE_LATENCY * chosen(config["stages"] == 1, 2, 1) + 32 * copies * _COPY / tiling.threads
    alone += serial * _PRODUCT_LATENCY
    resident = _resident(tiling, device)
    splits = _splits(tiling, device, config)
    tiles, taps = ceil_div(tiling.tile_count, splits), problem.w.size // problem.c
    blocks = tiling.channel_tiles * splits
    first = _BLOCK_LATENCY + _TAP_LATENCY * taps + warps * taps / 4

    def wave_cycles(held: int) -> float:
        """Cycles of as many blocks on one multiprocessor."""
        return first + tiles * larger(held * busy * unbalance(held * warps), alone)

    cycles = cycles_of_waves(blocks, resident, device, wave_cycles)
    processing = 1e3 * cycles / device.clock_hz
    split_k = _split_k(problem, splits, config)
    partials = chosen(split_k.splits > 1, 2 * split_k.bytes, 0)
    again = larger(0.0, 512 * copies * tiling.tile_count * tiling.channel_tiles - problem.bytes)
    through = problem.bytes * (1 + 4 / tiling.channels) + _AGAIN * again + _PARTIALS_SHARE * partials
    memory = 1e3 * through / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    together = config["stages"] * smaller(resident, ceil_div(blocks, device.sm_count))
    ms: float = larger(memory, processing) + smaller(memory, processing) * _ALONE / together
    return ms


_LAST_RESORT = Config.of(rows=2, columns=8, images=1, channels=16, warps=1, stages=1, blocks=0, cluster=1)

# What default_configs ranks by estimate; the last is valid for every applicable problem.
_SHORT_LIST = (
    *Config.product(
        {
            "rows": (4, 7, 8, 14),
            ("columns", "images"): ((8, 1), (8, 2), (16, 1), (16, 2), (32, 1)),
            "channels": (32, 64),
            "warps": (1, 2),
            ("blocks", "cluster", "stages"): ((1, 1, 2), (2, 1, 2), (0, 4, 3), (0, 8, 2)),
        }
    ),
    *(
        Config.of(rows=7, columns=8, images=2, channels=32, warps=1, stages=1, blocks=blocks, cluster=cluster)
        for blocks, cluster in ((2, 1), (0, 8))
    ),
    _LAST_RESORT,
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


def _varied(ranked: Sequence[EstimatedConfig]) -> list[EstimatedConfig]:
    """The first few, then the first of each number of blocks and of channels, which are estimated least well."""
    firsts: dict[tuple[int, ...], EstimatedConfig] = {}
    for each in ranked:
        firsts.setdefault((each.config["blocks"], each.config["cluster"], each.config["channels"]), each)
    return list(dict.fromkeys([*ranked[:_FIRST], *firsts.values()]))


class ConvDepthwiseMmaWeights(Solver):
    """Backward weights of depthwise convolution: products of pixels on tensor cores, with float32 accumulators.

    A product joins 8 channels with 8; only results of equal channels are kept, so that an infinity or NaN stays in its
    channel. Pixels beyond the images are multiplied as zeros: an infinity or NaN spreads over taps that do not meet it.

    Configuration: a warp adds 8 channels over `rows` rows of 8 pairs of neighbouring outputs. A block has `channels`
    channels and `stages` stages of about `columns` columns of `images` images, which `warps` warps share. About
    `blocks` blocks a multiprocessor share the tiles; or one block has all tiles of a channel; or the blocks of a
    `cluster` share them and add their accumulators themselves.
    """

    id = "ConvDepthwiseMmaWeights"
    algorithm = Algorithm.IMPLICIT_GEMM
    directions = OF_WEIGHTS
    keys = KEYS
    alignment_bytes = 16
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "rows": _ROWS,
        "columns": _COLUMNS,
        "images": (1, 2),
        "channels": _CHANNELS,
        "warps": (1, 2),
        "stages": (1, 2, 3),
        "blocks": _BLOCKS,
        "cluster": (1, 4, 8),
    }
    sources = ("depthwise/mma_weights.cu",)

    def examples(self) -> tuple[ProblemDescription, ...]:
        depthwise = functools.partial(
            depthwise_example, dtype=DataType.FLOAT16, layout=Layout.NHWC, direction=Direction.BACKWARD_WEIGHTS
        )
        brain = DataType.BFLOAT16
        return (
            depthwise(64, x=(2, 64, 14, 14), w=(3, 3), padding=1),
            depthwise(48, x=(3, 48, 28, 27), w=(5, 5), padding=2, stride=2, dtype=brain),
            depthwise(24, x=(3, 24, 7, 7), w=(7, 7), padding=3),
            depthwise(8, x=(2, 8, 13, 9), w=(5, 3), padding=((4, 0), (1, 5)), dilation=(1, 2)),
            depthwise(72, x=(2, 72, 9, 12), w=(2, 4), padding=1, stride=(3, 1), dtype=brain),
            depthwise(16, x=(2, 16, 50), w=(7,), stride=2, padding=3, layout=Layout.NWC),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_mma(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _LAST_RESORT):
            return Applicability(f"filter {problem.filter} is too large for a thread")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        (height, width), tiling = unit_axes(problem), DepthwiseWeightsTiling.of(problem, config)
        is_last = is_config(config, _LAST_RESORT)
        is_valid: bool = (
            (config["rows"] <= least_ample(_ROWS, height.outputs))
            & (config["columns"] <= least_ample(_COLUMNS, width.outputs))
            & (config["images"] < 2 * problem.n)
            & (config["channels"] <= least_ample(_CHANNELS, problem.c))
            & ((config["cluster"] == 1) | (config["blocks"] == 0))
            & (config["warps"] <= tiling.iterations)
            & (tiling.threads <= _MAX_THREADS)
            & ((tiling.products <= _MAX_PRODUCTS) | (config["rows"] == min(_ROWS)))
            & (is_last | _uses_all_blocks(problem, device, tiling, config))
            & (tiling.registers <= _MAX_REGISTERS)
            & (_resident(tiling, device) > 0)
        )
        return is_valid

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return tuple(_varied(self._ranked(problem, device))[:_DEFAULTS])

    def _ranked(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """The short list as far as it is valid, the least estimate first."""
        return self.ranked_valid(problem, device, _short_list())

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = DepthwiseWeightsTiling.of(problem, config)
        split_k = _split_k(problem, _splits(tiling, device, config), config)
        launches = _LAUNCH_MS + chosen(config["cluster"] > 1, _CLUSTER_MS, 0.0)
        launches += chosen(split_k.splits > 1, _FINISH_MS, 0.0)
        return launches + _work_ms(problem, device, tiling, config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        splits = _splits(DepthwiseWeightsTiling.of(problem, config), device, config)
        step, split_k = _sum_step(problem, device, config), _split_k(problem, splits, config)
        return split_k.solution(step, split_k.vector_reduction(step))


SOLVERS = (ConvDepthwiseMmaWeights(),)
