"""ConvFirstLayerWeights: backward weights of convolutions of few channels on tensor cores.

Tiles of outputs are dealt to blocks; a second kernel adds the blocks' float32 partials in a fixed order. Kernels:
kernels_src/few_channels/weights.cu. Windows and tiles: solvers/few_channels/window_rows.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, mapped, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    int32s,
)
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.few_channels.shapes import TILED_SHAPE
from miofind.solvers.few_channels.solver import FewChannelsSolver, problem_defines
from miofind.solvers.few_channels.tile_schedule import TileSchedule
from miofind.solvers.few_channels.window_rows import WindowTile, is_same_load

_MAX_ACCUMULATORS = 128
_MAX_WARPS = 14
_MAX_REGISTERS = 248
_MAX_WORKSPACE_BYTES = 1 << 30
_SHARED_BYTES = 48 << 10
_OTHER_REGISTERS, _FEWEST_REGISTERS = 28, 88
_MOST_OUTPUTS = 512  # of a tile
_REDUCTION_WARPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/weights.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        tile: of outputs.
        row_words: 16-byte words of a window's row.
        accumulators: of a thread.
        out_vector: elements of dy that are loaded at once.
        threads: of a block.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        schedule: of tiles, whose step is the number of splits.
    """

    tile: WindowTile
    row_words: int
    accumulators: int
    out_vector: int
    threads: int
    registers: int
    shared_bytes: int
    resident: int
    schedule: TileSchedule

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> _Tiling:
        tile = WindowTile.of(problem, config["tile_h"], config["tile_w"], config["vector"])
        tile_k, threads = config["tile_k"], 32 * config["warps_y"] * config["warps_k"] * config["warps_p"]
        last, taps_y = problem.y.layout.channels_last, problem.filter[0]
        row_words = ceil_div(problem.filter[1] + (tile.outputs - 1) * problem.conv.stride[1], 2)
        filters, rows = tile_k // 16 // config["warps_k"], ceil_div(taps_y, config["warps_y"])
        accumulators = 4 * filters * tile.outputs * rows * row_words
        slots = round_up(tile.windows, 16)
        pitch = 2 * tile_k + 16 if last else round_up(2 * tile.outputs * slots, 32) + 16
        staged = config["stages"] * pitch * (tile.outputs * slots if last else tile_k) + 2 * tile.input_tile_bytes
        shared_bytes = larger(staged, 4 * tile.outputs * tile_k * (8 * taps_y * row_words + 8))
        moved = tile.input_tile_load(problem.c, threads).registers
        words = 4 * ceil_div(row_words, 2) * smaller(2, rows)
        words += 0 if last else chosen((tile.outputs == 1) & (rows == 1), 0, 8)
        registers = accumulators + moved + 4 * filters * tile.outputs + words
        registers = larger(_FEWEST_REGISTERS, round_up(registers + _OTHER_REGISTERS, 8))
        fitting = resident_blocks(registers, threads, shared_bytes, SmLimits.of(device))
        resident = smaller(fitting, config["resident"])
        return _Tiling(
            tile=tile,
            row_words=row_words,
            accumulators=accumulators,
            out_vector=math.gcd(8, problem.k) if last else tile.channels_first_vector(problem),
            threads=threads,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=resident,
            schedule=TileSchedule.of(problem, tile_k, tile.image, device.sm_count * resident),
        )

    def split_k(self, problem: ProblemDescription) -> SplitK:
        """Partials of all filters."""
        return SplitK.of(problem, self.schedule.step)


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    tile = tiling.tile
    return (
        *problem_defines(problem),
        ("TILE_H", tile.tile_h),
        ("TILE_W", tile.tile_w),
        *((name.upper(), config[name]) for name in ("tile_k", "warps_y", "warps_k", "warps_p")),
        ("OFFSET", tile.offset),
        ("IN_VECTOR", tile.vector),
        ("OUT_VECTOR", tiling.out_vector),
        ("STAGES", config["stages"]),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        TILED_SHAPE.define,
    )


def _partials_step(problem: ProblemDescription, config: Config, tiling: _Tiling) -> KernelStep:
    return KernelStep(
        source="few_channels/weights.cu",
        entry="few_channels_weights",
        grid=(tiling.schedule.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in ("x", "y", tiling.split_k(problem).region)),
            TILED_SHAPE(**tiling.schedule.fields(problem)),
        ),
    )


_TILES = (
    (1, 128, 3),
    (2, 64, 3),
    (2, 128, 2),
    (2, 128, 3),
    (4, 64, 2),
    (4, 64, 3),
    (4, 32, 3),
    (4, 128, 2),
)
_WARPS = ((1, 2, 2), (1, 2, 4), (1, 1, 4), (2, 2, 1), (2, 2, 2), (3, 2, 1), (4, 1, 1), (4, 2, 1), (7, 1, 1), (7, 1, 2))
# What default_configs ranks by estimate; few filters, for those whose accumulators fill a warp's registers, come last.
_SHORT_LIST = (
    *(
        config
        for tile_k, residents in ((32, (1, 2, 3)), (64, (1, 2)), (96, (1, 2)))
        for config in Config.product(
            {
                ("tile_h", "tile_w", "stages"): _TILES,
                "tile_k": (tile_k,),
                ("warps_y", "warps_k", "warps_p"): _WARPS,
                "resident": residents,
                "vector": (2,),
            }
        )
    ),
    *Config.product(
        {
            ("tile_h", "tile_w", "stages"): ((1, 32, 2), (1, 64, 2), (2, 32, 2)),
            "tile_k": (16,),
            ("warps_y", "warps_k", "warps_p"): ((1, 1, 4), (4, 1, 1), (5, 1, 1), (6, 1, 1), (7, 1, 1), (8, 1, 1)),
            "resident": (1,),
            "vector": (2,),
        }
    ),
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


# Cycles of a multiprocessor for a product of fragments, to read one, to stage a pixel of x by vectors of some length,
# to load a vector of dy, and to reduce an accumulator among warps; cycles that a block waits for a tile, and a warp for
# a block of windows and for a product. How often partials move as long as memory would take. Share of the time to move
# all tensors, or to compute if that is shorter, that the other does not hide. Fitted to 269 measurements on an H200,
# the order of the fastest first: the configuration with the least estimate takes 2 % longer than the best. What a block
# waits decides there.
_PRODUCT = 0.45
_READ = 1.14
_STAGED: Mapping[int, float] = {8: 0.5, 4: 0.35, 2: 0.3, 1: 0.4}
_LOADED = 0.26
_TILE = 760.0
_BLOCK = 282.0
_LATENCY = 12.8
_JOIN = 6.9
_PARTIALS = 2.6
_LAUNCH_MS = 0.00484
_EXPOSED = 0.73


class ConvFirstLayerWeights(FewChannelsSolver):
    """Backward weights for up to four channels: windows of an input tile are operands of tensor cores as they lie.

    Zeros around the images and beyond a filter's rows are multiplied: an infinity or NaN spreads over taps that do not
    meet it. Accumulators are float32; equal inputs give equal bits.

    Configuration: a block computes `tile_k` filters from `tile_h` x `tile_w` outputs at a time; `warps_y` warps share a
    filter's rows, `warps_k` its filters and `warps_p` the outputs; `stages` tiles of dy are in shared memory, and tiles
    are dealt to `resident` blocks of a multiprocessor. A thread loads up to `vector` pixels of x at once.
    """

    id = "ConvFirstLayerWeights"
    direction = Direction.BACKWARD_WEIGHTS
    kind = ("tile_h", "tile_w", "tile_k")
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": (1, 2, 4),
        "tile_w": (32, 64, 128),
        "tile_k": (16, 32, 64, 96),
        "warps_y": (1, 2, 3, 4, 5, 6, 7, 8),
        "warps_k": (1, 2),
        "warps_p": (1, 2, 4),
        "stages": (2, 3),
        "resident": (1, 2, 3),
        "vector": (2, 8),
    }
    sources = ("few_channels/weights.cu",)

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config, device)
        is_valid: bool = (
            (tiling.accumulators <= _MAX_ACCUMULATORS)
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.resident >= config["resident"])
            & (tiling.split_k(problem).bytes <= _MAX_WORKSPACE_BYTES)
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
        )
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        out_h, out_w = problem.out_spatial
        taps_y, warps_y = problem.filter[0], config["warps_y"]
        warps = config["warps_y"] * config["warps_k"] * config["warps_p"]
        has_rows = ceil_div(taps_y, ceil_div(taps_y, warps_y)) == warps_y  # each warp
        is_of_size: bool = (
            (config["tile_h"] < 2 * out_h)
            & (config["tile_w"] < 2 * max(32, out_w))
            & (config["tile_k"] < 32 + round_up(problem.k, 16))
            & (is_same_load(problem, config["vector"]) == 0)
            & (config["tile_h"] * config["tile_w"] <= _MOST_OUTPUTS)
            & has_rows
            & (config["tile_k"] // 16 % config["warps_k"] == 0)
            & (warps >= 4)
            & (warps <= _MAX_WARPS)
        )
        return is_of_size

    def short_list(self) -> ConfigTable:
        return _short_list()

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config, device)
        moved_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
        tile, splits = tiling.tile, tiling.schedule.step
        warps_y, warps_k, warps_p = config["warps_y"], config["warps_k"], config["warps_p"]
        filters, rows = config["tile_k"] // 16 * tile.outputs, ceil_div(problem.filter[0], warps_y) * warps_y
        turn = ceil_div(ceil_div(tile.windows, 16), warps_p)
        products = turn * warps_p * filters * rows * tiling.row_words
        reads = turn * warps_p * (filters * warps_y + rows * ceil_div(tiling.row_words, 2) * warps_k)
        staged = tile.in_rows * tile.in_columns
        loaded = tile.outputs * tile.windows * config["tile_k"] / tiling.out_vector
        moved = mapped(_STAGED.__getitem__, tile.vector) * staged + _LOADED * loaded
        busy = larger(_PRODUCT * products, _READ * reads) + moved
        alone = _TILE + turn * _BLOCK + _LATENCY * products / (warps_y * warps_k * warps_p) + moved
        turns = ceil_div(tiling.schedule.tiles, splits)
        together = smaller(tiling.resident, ceil_div(tiling.schedule.blocks, device.sm_count))
        cycles = _JOIN * warps_p * tiling.accumulators * together + turns * larger(together * busy, alone)
        partials_ms = _PARTIALS * 1e3 * 4 * splits * problem.w.size / device.bandwidth_bytes_per_s
        busy_ms = 1e3 * cycles / device.clock_hz
        ms: float = _LAUNCH_MS + larger(moved_ms, busy_ms) + _EXPOSED * smaller(moved_ms, busy_ms) + partials_ms
        return ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config, device)
        first, split_k = _partials_step(problem, config, tiling), tiling.split_k(problem)
        numbers = int32s(split_k.results, split_k.splits)
        reduction = split_k.reduction(
            first, *numbers, blocks=ceil_div(split_k.results, 32), threads=32 * _REDUCTION_WARPS
        )
        return split_k.solution(first, reduction)


SOLVERS = (ConvFirstLayerWeights(),)
