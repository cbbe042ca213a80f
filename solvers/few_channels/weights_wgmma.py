"""ConvFirstLayerWgmmaWeights: backward weights of convolutions of few channels on Hopper's tensor cores.

Tiles of outputs are dealt to blocks; a second kernel adds the blocks' float32 partials in a fixed order. Kernels:
kernels_src/few_channels/weights_wgmma.cu.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, divisor, larger, mapped, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import EstimatedConfig
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
from miofind.solvers.few_channels.solver import HOPPER_KEYS, FewChannelsSolver, problem_defines
from miofind.solvers.few_channels.tile_schedule import TileSchedule

_MAX_ACCUMULATORS = 128
_MAX_THREADS = 768
_MAX_REGISTERS = 248
_MAX_WORKSPACE_BYTES = 1 << 30
_MAX_STEPS = 32  # whose products are unrolled
_SHARED_BYTES = 227 << 10
_OTHER_REGISTERS, _FEWEST_REGISTERS = 56, 80
_HELD_WORDS, _HELD_LOADS = 32, 8  # of x that a thread has on their way at most
_HELD_OUT_WORDS = 64  # of dy
_WIDTHS = (32, 56, 64, 112, 128)
_MOST_ROWS = 8  # of a filter in one product
_STAGES = 3
_REDUCTION_WARPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    few_channels/weights_wgmma.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        tile_h, tile_w: outputs of a tile, no more rows than there are, columns in whole eights.
        tile_k: filters of a block, in whole eights.
        warpgroups_k, warpgroups_s: warpgroups along filters and pairs of taps.
        tap_pairs: of a row of the filter.
        column_blocks: rows of the filter in one product.
        steps: of 16 outputs.
        offset: columns staged before those that the first output meets.
        in_vector, out_vector: elements of x and of dy that are loaded at once.
        loads, out_loads: of vectors of x and of dy by a thread, of a tile.
        load_registers: of a thread for what it loads.
        threads: of a block.
        accumulators: of a thread.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        schedule: of tiles, whose step is the number of splits.
    """

    tile_h: int
    tile_w: int
    tile_k: int
    warpgroups_k: int
    warpgroups_s: int
    tap_pairs: int
    column_blocks: int
    steps: int
    offset: int
    in_vector: int
    out_vector: int
    loads: int
    out_loads: int
    load_registers: int
    threads: int
    accumulators: int
    registers: int
    shared_bytes: int
    resident: int
    schedule: TileSchedule

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> _Tiling:
        (out_h, out_w), (stride_y, stride_x) = problem.out_spatial, problem.conv.stride
        (taps_y, taps_x), last = problem.filter, problem.y.layout.channels_last
        column_tiles = ceil_div(out_w, config["tile_w"])
        tile_h, tile_w = smaller(config["tile_h"], out_h), round_up(ceil_div(out_w, column_tiles), 8)
        tile_k = smaller(config["tile_k"], round_up(problem.k, 8))
        warpgroups_k, warpgroups_s, tap_pairs = ceil_div(tile_k, 64), config["groups_s"], ceil_div(taps_x, 2)
        row_groups = ceil_div(taps_y, _MOST_ROWS)
        column_blocks = ceil_div(taps_y, row_groups)
        consumers, producers = 128 * warpgroups_k * warpgroups_s, config["loaders"]
        threads = consumers + 128 * producers
        # The input tile of x.
        in_vector = divisor(config["vector"], problem.spatial[1])
        offset = -problem.conv.pad_before[1] % in_vector
        columns = round_up(offset + (tile_w - 1) * stride_x + taps_x, in_vector)
        rows = (tile_h - 1) * stride_y + taps_y
        word_pixels = 1 + (stride_x + 1) % 2
        first_pixel = offset % 2 if word_pixels == 2 else 0
        phases = stride_x // word_pixels
        pitch = 16 * (phases * ceil_div(ceil_div(first_pixel + columns, word_pixels), phases) | 1)
        loads = ceil_div(rows * columns, in_vector * 128)
        # Outputs.
        blocks, steps = tile_k // 8, ceil_div(tile_h * tile_w, 16)
        block_pitch = 128 + (16 * larger(1, 8 // blocks) if last else 0)
        out_bytes = 2 * steps * (blocks * block_pitch + (0 if last else 16 * larger(1, 64 // tile_w)))
        spare = larger((8 * warpgroups_k - blocks) * block_pitch, (row_groups * column_blocks - taps_y) * pitch)
        shared_bytes = _STAGES * (out_bytes + rows * pitch) + spare
        accumulators = 4 * tap_pairs // warpgroups_s * row_groups * column_blocks
        out_vector = math.gcd(8, problem.k if last else out_w)
        places = ceil_div(tile_w * tile_k // out_vector, 128)
        out_loads = tile_h * places
        # Values, and where they come from and go.
        load_registers = loads * (problem.c * larger(1, in_vector // 2) + 2)
        load_registers += out_loads * max(1, out_vector // 2) + 2 * places
        registers = larger(_FEWEST_REGISTERS, round_up(larger(accumulators, load_registers) + _OTHER_REGISTERS, 8))
        resident = resident_blocks(registers, threads, shared_bytes, SmLimits.of(device))
        resident = smaller(resident, config["resident"])
        image = ceil_div(out_h, tile_h), column_tiles
        return _Tiling(
            tile_h=tile_h,
            tile_w=tile_w,
            tile_k=tile_k,
            warpgroups_k=warpgroups_k,
            warpgroups_s=warpgroups_s,
            tap_pairs=tap_pairs,
            column_blocks=column_blocks,
            steps=steps,
            offset=offset,
            in_vector=in_vector,
            out_vector=out_vector,
            load_registers=load_registers,
            out_loads=out_loads,
            loads=loads,
            threads=threads,
            accumulators=accumulators,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=resident,
            schedule=TileSchedule.of(problem, tile_k, image, device.sm_count * resident, config["least"]),
        )

    def split_k(self, problem: ProblemDescription) -> SplitK:
        """Partials of all filters, in fragments of 4."""
        fragments = 128 * self.warpgroups_k * self.tap_pairs * problem.filter[0]
        return SplitK(results=4 * fragments * self.schedule.filter_tiles, splits=self.schedule.step)


def _defines(problem: ProblemDescription, config: Config, tiling: _Tiling) -> tuple[tuple[str, str | int], ...]:
    return (
        *problem_defines(problem),
        ("TILE_H", tiling.tile_h),
        ("TILE_W", tiling.tile_w),
        ("TILE_K", tiling.tile_k),
        ("WARPGROUPS_K", tiling.warpgroups_k),
        ("WARPGROUPS_S", tiling.warpgroups_s),
        ("PRODUCERS", config["loaders"]),
        ("COLUMN_BLOCKS", tiling.column_blocks),
        ("OFFSET", tiling.offset),
        ("IN_VECTOR", tiling.in_vector),
        ("OUT_VECTOR", tiling.out_vector),
        ("MIN_BLOCKS", tiling.resident),
        ("SHARED_BYTES", tiling.shared_bytes),
        TILED_SHAPE.define,
    )


def _partials_step(problem: ProblemDescription, config: Config, tiling: _Tiling) -> KernelStep:
    return KernelStep(
        source="few_channels/weights_wgmma.cu",
        entry="few_channels_weights_wgmma",
        grid=(tiling.schedule.blocks, 1, 1),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
        defines=_defines(problem, config, tiling),
        args=(
            *(Pointer(buffer=name) for name in ("x", "y", tiling.split_k(problem).region)),
            TILED_SHAPE(**tiling.schedule.fields(problem)),
        ),
    )


def _reduction(problem: ProblemDescription, tiling: _Tiling, first: KernelStep) -> KernelStep:
    split_k = tiling.split_k(problem)
    return split_k.reduction(
        first,
        *int32s(problem.k, tiling.schedule.filter_tiles, tiling.schedule.step),
        blocks=split_k.results // (4 * 32),
        threads=32 * _REDUCTION_WARPS,
    )


# What default_configs ranks by estimate.
_SHORT_LIST = Config.product(
    {
        ("tile_h", "tile_w"): (
            *((tile_h, tile_w) for tile_h in (1, 2, 4) for tile_w in (32, 56, 64)),
            *((1, 112), (2, 112), (2, 128), (8, 32)),
        ),
        "tile_k": (64, 128),
        "groups_s": (1, 2, 3, 4, 5),
        "loaders": (1, 2, 3),
        "resident": (1, 2, 3),
        "vector": (2,),
        "least": (1, 2),
    }
)


@functools.cache
def _short_list() -> ConfigTable:
    return ConfigTable(_SHORT_LIST)


# Cycles of a multiprocessor for 128 bytes that products read of shared memory, or for 8 columns of a product, whichever
# takes longer; of a thread to load and to write a vector of x, and of dy; from a load to what it loads, and that a tile
# takes at least. Bytes a multiprocessor has on their way when memory is busy. How often partials move as long as memory
# would take. Share of the shorter of moving all tensors and computing that the other does not hide. All but the first
# two, which are the device's, are guesses.
_READ = 1.0
_COLUMNS = 4.0
_STAGED = 90.0
_LOADED = 30.0
_LATENCY = 1500.0
_TILE = 250.0
_BUSY_BYTES = 40e3
_PARTIALS = 2.0
_LAUNCH_MS = 0.0048
_EXPOSED = 0.2


class ConvFirstLayerWgmmaWeights(FewChannelsSolver):
    """Backward weights for up to four channels: windows of a staged input tile are operands of wgmma as they lie.

    Zeros around the images and beyond a filter's rows are multiplied: an infinity or NaN spreads over taps that do not
    meet it. Accumulators are float32; equal inputs give equal bits.

    Configuration: a block computes `tile_k` filters from `tile_h` x `tile_w` outputs at a time; 64 filters are a
    warpgroup's, and `groups_s` warpgroups share the pairs of a filter row's taps. `loaders` more load a
    tile each by turns (the kernel could do without, but ptxas gives up asynchronous products then). Tiles are dealt to
    `resident` blocks of a multiprocessor, at least `least` to each. A thread loads up to `vector` pixels of x at once.
    """

    id = "ConvFirstLayerWgmmaWeights"
    direction = Direction.BACKWARD_WEIGHTS
    kind = ("loaders", "resident")
    keys = HOPPER_KEYS
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile_h": (1, 2, 4, 8),
        "tile_w": _WIDTHS,
        "tile_k": (64, 128),
        "groups_s": (1, 2, 3, 4, 5, 6),
        "loaders": (1, 2, 3),
        "resident": (1, 2, 3),
        "vector": (2, 8),
        "least": (1, 2),
    }
    sources = ("few_channels/weights_wgmma.cu",)

    def is_valid_tiling(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tiling = _Tiling.of(problem, config, device)
        schedule = tiling.schedule
        words = problem.c * larger(1, tiling.in_vector // 2)
        has_tiles = config["loaders"] <= larger(1, ceil_div(schedule.tiles, schedule.step))
        # With as many tiles as that, blocks have the least number anyway.
        has_few = schedule.tiles < config["least"] * device.sm_count * tiling.resident
        is_valid: bool = (
            (tiling.threads <= _MAX_THREADS)
            & (tiling.steps <= _MAX_STEPS)
            & (tiling.accumulators <= _MAX_ACCUMULATORS)
            & (tiling.loads <= smaller(_HELD_LOADS, _HELD_WORDS // words))
            & (tiling.out_loads * max(1, tiling.out_vector // 2) <= _HELD_OUT_WORDS)
            & (tiling.registers <= _MAX_REGISTERS)
            & (tiling.resident >= config["resident"])
            & has_tiles
            & ((config["least"] == 1) | has_few)
            & (tiling.split_k(problem).bytes <= _MAX_WORKSPACE_BYTES)
            & (tiling.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
        )
        return is_valid

    def is_of_size(self, problem: ProblemDescription, config: Config) -> bool:
        out_h, out_w = problem.out_spatial
        vector = config["vector"]

        def least_width(width: int) -> int:
            """The smallest that gives as many tiles."""
            return min(less for less in _WIDTHS if ceil_div(out_w, less) == ceil_div(out_w, width))

        is_of_size: bool = (
            (config["tile_h"] < 2 * out_h)
            & (config["tile_k"] < 64 + round_up(problem.k, 64))
            & (mapped(least_width, config["tile_w"]) == config["tile_w"])
            & ((vector == 2) | (problem.spatial[1] % vector == 0))  # else as with a lower limit
            & (ceil_div(problem.filter[1], 2) % config["groups_s"] == 0)
        )
        return is_of_size

    def short_list(self) -> ConfigTable:
        return _short_list()

    def ranked_list(self, problem: ProblemDescription, device: Device) -> Sequence[EstimatedConfig]:
        """Of those with the same tiles, loaders and blocks of a multiprocessor the first alone."""
        first: dict[tuple[ConfigValue, ...], EstimatedConfig] = {}
        for each in super().ranked_list(problem, device):
            first.setdefault(tuple(each.config[name] for name in (*self.kind, "tile_h", "tile_w", "tile_k")), each)
        return list(first.values())

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        """Those of the least estimates, and the first with longer loads: estimates do not tell these apart."""
        likely = super().estimated_defaults(problem, device)
        longer = Config({**likely[0].config, "vector": 8})
        if not self.is_valid_config(problem, device, longer):
            return likely
        return (*likely[:-1], EstimatedConfig(longer, self.estimate_ms(problem, device, longer)))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        tiling = _Tiling.of(problem, config, device)
        row_groups = ceil_div(problem.filter[0], tiling.column_blocks)
        products = tiling.steps * tiling.warpgroups_k * tiling.tap_pairs * row_groups
        multiplied = products * larger(_COLUMNS * tiling.column_blocks, _READ * (16 + 2 * tiling.column_blocks))
        moved = _STAGED * tiling.loads + _LOADED * tiling.out_loads
        alone = larger(multiplied, (moved + _LATENCY) / config["loaders"]) + _TILE
        # What loads wait for their own instructions, four warpgroups need not.
        busy = larger(multiplied, moved / 4)
        turns = ceil_div(tiling.schedule.tiles, tiling.schedule.step)
        together = smaller(tiling.resident, ceil_div(tiling.schedule.blocks, device.sm_count))
        busy_ms = 1e3 * turns * larger(together * busy, alone) / device.clock_hz
        # Memory is busy if enough is on its way; edges of tiles are moved, too.
        slots = tiling.tile_h * tiling.tile_w
        y_share = tiling.schedule.tiles * slots * tiling.schedule.filter_tiles * tiling.tile_k / problem.y.size
        under_way = together * config["loaders"] * 2 * slots * tiling.tile_k
        moved_bytes = problem.bytes * larger(1.0, _BUSY_BYTES / under_way) * (1 + 0.25 * (y_share - 1))
        moved_ms = 1e3 * moved_bytes / device.bandwidth_bytes_per_s
        partials_ms = _PARTIALS * 1e3 * tiling.split_k(problem).bytes / device.bandwidth_bytes_per_s
        ms: float = _LAUNCH_MS + larger(moved_ms, busy_ms) + _EXPOSED * smaller(moved_ms, busy_ms) + partials_ms
        return ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        tiling = _Tiling.of(problem, config, device)
        first = _partials_step(problem, config, tiling)
        return tiling.split_k(problem).solution(first, _reduction(problem, tiling, first))


SOLVERS = (ConvFirstLayerWgmmaWeights(),)
