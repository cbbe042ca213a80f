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
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, Solver
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
from miofind.solvers.common.packed_groups import is_ample
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


def _splits(problem: ProblemDescription, device: Device, config: Config) -> int:
    """Blocks that share the tiles of a block's channels, as evenly as can be."""
    tiling = DepthwiseWeightsTiling.of(problem, config)
    if config["cluster"] > 1:
        return int(config["cluster"])
    most = min(tiling.tile_count, max(1, config["blocks"] * device.sm_count // tiling.channel_tiles))
    return ceil_div(tiling.tile_count, ceil_div(tiling.tile_count, most))


def _split_k(problem: ProblemDescription, device: Device, config: Config) -> SplitK:
    """What the reduction adds; a cluster adds the partials of its blocks itself."""
    splits = _splits(problem, device, config) if config["cluster"] == 1 else 1
    return SplitK.of(problem, splits)


def _uses_all_blocks(problem: ProblemDescription, device: Device, config: Config) -> bool:
    """Whether blocks use all their buffers, and a lesser number of blocks would not do the same."""
    splits = _splits(problem, device, config)
    tiles = ceil_div(DepthwiseWeightsTiling.of(problem, config).tile_count, splits)
    if config["stages"] > tiles or (config["stages"] == 1 and tiles > 1):
        return False
    if config["cluster"] > 1:
        return device.sm >= _MIN_CLUSTER_SM and splits <= DepthwiseWeightsTiling.of(problem, config).tile_count
    if splits > 1 and _split_k(problem, device, config).bytes > _MAX_WORKSPACE_BYTES:
        return False
    fewer = [blocks for blocks in _BLOCKS if blocks < config["blocks"]]
    return not fewer or splits > _splits(problem, device, Config({**config, "blocks": max(fewer)}))


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
    tiling, splits = DepthwiseWeightsTiling.of(problem, config), _splits(problem, device, config)
    resident = _resident(tiling, device)
    return KernelStep(
        source="depthwise/mma_weights.cu",
        entry="depthwise_mma_weights",
        grid=(tiling.channel_tiles, splits, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, splits, tiling, resident),
        args=(
            *(Pointer(buffer=name) for name in ("y", "x", "w", _split_k(problem, device, config).target)),
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
    busy = max(slots / _SLOTS, walks * loads + 4 * copies, walks * products * _PRODUCT)
    serial = ceil_div(tiling.iterations, tiling.warps) * products
    alone = _TILE_LATENCY * (2 if config["stages"] == 1 else 1) + 32 * copies * _COPY / tiling.threads
    alone += serial * _PRODUCT_LATENCY
    resident = _resident(tiling, device)
    splits = _splits(problem, device, config)
    tiles, taps = ceil_div(tiling.tile_count, splits), problem.w.size // problem.c
    blocks = tiling.channel_tiles * splits
    first = _BLOCK_LATENCY + _TAP_LATENCY * taps + warps * taps / 4

    def wave_cycles(held: int) -> float:
        """Cycles of as many blocks on one multiprocessor."""
        return first + tiles * max(held * busy * unbalance(held * warps), alone)

    cycles = cycles_of_waves(blocks, resident, device, wave_cycles)
    processing = 1e3 * cycles / device.clock_hz
    split_k = _split_k(problem, device, config)
    partials = 2 * split_k.bytes if split_k.splits > 1 else 0
    again = max(0.0, 512 * copies * tiling.tile_count * tiling.channel_tiles - problem.bytes)
    through = problem.bytes * (1 + 4 / tiling.channels) + _AGAIN * again + _PARTIALS_SHARE * partials
    memory = 1e3 * through / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    together = config["stages"] * min(resident, ceil_div(blocks, device.sm_count))
    return float(max(memory, processing) + min(memory, processing) * _ALONE / together)


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


def _varied(ranked: Sequence[Config]) -> list[Config]:
    """The first few, then the first of each number of blocks and of channels, which are estimated least well."""
    chosen = {(config["blocks"], config["cluster"], config["channels"]): config for config in reversed(ranked)}
    return list(dict.fromkeys([*ranked[:_FIRST], *(config for config in ranked if config in chosen.values())]))


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
        if problem.direction is not Direction.BACKWARD_WEIGHTS:
            return Applicability("serves backward weights: ConvDepthwiseMma serves the other directions")
        if (answer := refuse_mma(problem)).refused:
            return answer
        if not self.is_valid_config(problem, device, _LAST_RESORT):
            return Applicability(f"filter {problem.filter} is too large for a thread")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        height, width = unit_axes(problem)
        if is_ample(config["rows"], _ROWS, height.outputs) or is_ample(config["columns"], _COLUMNS, width.outputs):
            return False
        if config["images"] >= 2 * problem.n or is_ample(config["channels"], _CHANNELS, problem.c):
            return False
        if config["cluster"] > 1 and config["blocks"] > 0:
            return False
        tiling = DepthwiseWeightsTiling.of(problem, config)
        if config["warps"] > tiling.iterations or tiling.threads > _MAX_THREADS:
            return False
        if tiling.products > _MAX_PRODUCTS and config["rows"] > min(_ROWS):
            return False
        if config != _LAST_RESORT and not _uses_all_blocks(problem, device, config):
            return False
        return tiling.registers <= _MAX_REGISTERS and _resident(tiling, device) > 0

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(_varied(self.ranked(problem, device, _SHORT_LIST))[:_DEFAULTS])

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = DepthwiseWeightsTiling.of(problem, config)
        launches = _LAUNCH_MS + (_CLUSTER_MS if config["cluster"] > 1 else 0.0)
        if _split_k(problem, device, config).splits > 1:
            launches += _FINISH_MS
        return launches + _work_ms(problem, device, tiling, config)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        step, split_k = _sum_step(problem, device, config), _split_k(problem, device, config)
        return split_k.solution(step, split_k.vector_reduction(step))


SOLVERS = (ConvDepthwiseMmaWeights(),)
