"""Tiles of kernels_src/implicit_gemm/wgmma_ping_pong.cu, and how long a configuration takes.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from miofind.core.cached import cached_property
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.occupancy import RESERVED_SHARED_BYTES, SmLimits
from miofind.solver.steps import Config, ConfigValue
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_shared import BARRIER_BYTES, FILTER_BLOCK, PATTERN, FiltersAsA

STAGED_PIXELS = 16
"""Pixels whose results are staged together."""

UNIT = 64
"""Pixels of a channel that are copied together where channels are first: a row of the widest swizzle."""

PARAMETERS: Mapping[str, Sequence[ConfigValue]] = {
    "rows": (1, 2),
    "tile_n": tuple(range(64, 257, STAGED_PIXELS)),
    "out_stages": (1, 2),
    "keeps_filters": (0, 1),
}
"""The values of configurations."""

THREADS = 384
"""Of a block: two warpgroups that multiply, and warps that load and store."""

_CONSUMERS = 2
_ALIGNMENT = 16  # of what a kernel declares
_LEAST_STAGES, _MOST_STAGES = 3, 8
_K_STEP_BYTES = 32  # of 16 channels
_MAX_INT = 2**31 - 1

# Up to so many items of a block phases of other lengths end sooner one after another than in turn, as timed on an H200
# (12 problems); and wherever a block would come to long ones so much more often than another.
_FEW_ITEMS = 7
_UNEVEN = 1.15
_ROUNDS = 64  # of all blocks that are looked at

# Effective rates, fitted to 1,322 configurations of 59 problems on an H200, a configuration's weight falling with the
# square of its time: their times are met within 10 % (root mean square), and of the same problems the best of the six
# least estimates is 0.4 % off the best.
_LAUNCH_MS = 0.002
_START_CYCLES = 800  # of a block until its first products, and after its last
_ITEM_CYCLES = 470  # between one consumer's products and the next one's
_COPY_CYCLES = 840  # until staged results have left
_SHARED_BYTES = 128  # a cycle that shared memory gives or takes
_LOADED_BYTES = 64  # a cycle that copies bring
_LATENCY_CYCLES = 1570  # of a copy, of which as many are under way as there are stages that are not multiplied
_IM2COL_CYCLES = 220  # that a copy in im2col mode takes, and bytes a cycle that it brings
_IM2COL_BYTES = 70
_PIXEL_CYCLES = 12  # of 64 results of a pixel until they are staged, whatever the epilogue
_RATE = 1.25  # of what products take to what they would at the rate of tensor cores
_BOTH = 0.33  # of the shorter of both, computing and moving all bytes, which overlap


@dataclass(frozen=True, kw_only=True)
class PingPongProduct(FiltersAsA):
    """A problem as the kernel sees it, lifted to two dimensions.

    Attributes:
        product: as a matrix product.
    """

    product: WgmmaProduct

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(problem: ProblemDescription) -> PingPongProduct:
        """That of a problem in one or two dimensions."""
        product = WgmmaProduct.of(problem)
        return PingPongProduct(problem=product.problem, taps=math.prod(product.taps), product=product)

    @cached_property
    def phases(self) -> int:
        """Of strided backward data; all else has one."""
        return len(self.product.phases)

    @cached_property
    def is_ordered(self) -> bool:
        """Whether each output meets one pixel, of its own number."""
        product = self.product
        if not product.is_strided:
            return product.is_pointwise
        axes = [axis for axes in product.phase_axes for axis in axes]
        corners = (*product.low, *product.high)
        return all(axis.taps <= 1 and axis.offset == 0 for axis in axes) and not any(corners)

    @cached_property
    def image_pixels(self) -> int:
        """Of an image of the output; channels first, of all its units."""
        return round_up(self.product.image, UNIT) if self.has_nchw_output else self.product.image

    @cached_property
    def pixels(self) -> int:
        """Of a phase of the output, over all images: fewer than 2^31, as a tensor has elements.

        Channels first, images of eight pixels or more are counted as up to eight times as many, of eight channels or
        more.
        """
        counted = self.image_pixels if self.has_nchw_output else math.prod(self.product.walked)
        return counted * self.problem.n

    @cached_property
    def k_tiles(self) -> int:
        """Chunks of all taps, of all phases together."""
        return self.taps * self.chunks

    @cached_property
    def most_accumulators(self) -> int:
        """Of a thread, which has 232 registers: as many as the epilogue leaves without a spill."""
        epilogue = self.problem.epilogue
        if epilogue.channel_bias:
            return 144
        return 192 if epilogue.nonlinearity.is_exact else 176


@dataclass(frozen=True, kw_only=True)
class PingPongTiling:
    """A configuration applied to a product.

    Attributes:
        rows: blocks of 64 filters of a tile.
        tile_n: pixels of a tile.
        out_stages: places for results.
        kept_tiles: k-tiles of filters that are loaded once and stay; 0 if they do not. A block's tiles are then all of
            the same filters: `blocks` is a multiple of `filter_tiles`.
        stages: of the ring, as many as there is shared memory for.
        blocks: of the grid, each of which takes tiles until there are none left.
    """

    product: PingPongProduct
    rows: int
    tile_n: int
    out_stages: int
    kept_tiles: int
    stages: int
    blocks: int

    @staticmethod
    def of(product: PingPongProduct, config: Config, device: Device) -> PingPongTiling:
        rows, tile_n = config["rows"], config["tile_n"]
        kept_tiles = product.k_tiles * config["keeps_filters"]
        filter_tiles = ceil_div(product.filter_blocks, rows)
        tiles = filter_tiles * ceil_div(product.pixels, tile_n) * product.phases
        alike = chosen(kept_tiles > 0, filter_tiles, 1)
        empty = PingPongTiling(
            product=product,
            rows=rows,
            tile_n=tile_n,
            out_stages=config["out_stages"],
            kept_tiles=kept_tiles,
            stages=0,
            blocks=smaller(tiles, larger(device.sm_count // alike * alike, 1)),
        )
        room = _room(device) - empty.shared_bytes - empty.static_bytes
        return replace(empty, stages=smaller(_MOST_STAGES, room // (empty.stage_bytes + 2 * BARRIER_BYTES)))

    @cached_property
    def filter_tiles(self) -> int:
        """Tiles of filters."""
        return ceil_div(self.product.filter_blocks, self.rows)

    @property
    def pixel_tiles(self) -> int:
        """Tiles of a phase's pixels."""
        return ceil_div(self.product.pixels, self.tile_n)

    @cached_property
    def tiles(self) -> int:
        """Of all blocks."""
        return self.filter_tiles * self.pixel_tiles * self.product.phases

    @cached_property
    def items(self) -> int:
        """Tiles of a block, at most."""
        return ceil_div(self.tiles, self.blocks)

    @property
    def phases_in_turn(self) -> bool:
        """Whether all phases of some pixels follow each other, and meet what they read in the cache.

        Otherwise all pixels of the longest phase come first, so that blocks of few items end together.
        """
        taps = tuple(phase.taps for phase in self.product.product.phases)
        return len(set(taps)) == 1 or (
            self.items > _FEW_ITEMS and _is_even_in_turn(taps, self.filter_tiles, self.tiles, self.blocks)
        )

    @property
    def pixels_bytes(self) -> int:
        """Of a k-tile of pixels."""
        return 2 * self.product.channels * self.tile_n

    @cached_property
    def filters_bytes(self) -> int:
        """Of a k-tile of filters."""
        return self.product.filter_bytes * self.rows

    @cached_property
    def loaded_bytes(self) -> int:
        """Of a k-tile of pixels, and of filters that do not stay."""
        return self.pixels_bytes + chosen(self.kept_tiles > 0, 0, self.filters_bytes)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return round_up(self.loaded_bytes, PATTERN)

    @property
    def out_bytes(self) -> int:
        """Shared memory of a tile's results of 64 filters."""
        return round_up(2 * self.product.out_channels * self.tile_n, PATTERN)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        loaded = self.stages * self.stage_bytes + self.kept_tiles * self.filters_bytes
        return PATTERN + loaded + self.out_stages * self.product.out_buffers * self.rows * self.out_bytes

    @cached_property
    def static_bytes(self) -> int:
        """Shared memory that the kernel itself declares."""
        barriers = BARRIER_BYTES * (2 * self.stages + self.kept_tiles + 3 * _CONSUMERS)
        return round_up(barriers, _ALIGNMENT)

    @property
    def under_way(self) -> int:
        """Stages that are multiplied while the next one's products are begun."""
        return chosen(self.rows == 1, 2, 1)

    def is_valid(self, device: Device) -> bool:
        """Whether a block can run."""
        product = self.product
        return (
            (self.stages >= _LEAST_STAGES)
            & (self.shared_bytes + self.static_bytes <= _room(device))
            & (self.rows * self.tile_n // 2 <= product.most_accumulators)
            & (self.rows <= product.filter_blocks)
            & ((self.tile_n % UNIT == 0) | (not product.has_nchw_output))
            & ((self.kept_tiles == 0) | ((self.blocks % self.filter_tiles == 0) & (self.items > 1)))
            & ((self.kept_tiles == 0) | (product.phases == 1))
            & (self.items * product.k_tiles <= _MAX_INT)  # of one phase there are fewer
        )

    @property
    def _copy_cycles(self) -> float:
        """Between one k-tile's arrival and the next one's."""
        cycles = larger(self.loaded_bytes / _LOADED_BYTES, _LATENCY_CYCLES / larger(self.stages - self.under_way, 1))
        if self.product.is_ordered:
            return cycles
        return larger(cycles, _IM2COL_CYCLES + self.pixels_bytes / _IM2COL_BYTES)

    @property
    def _product_cycles(self) -> float:
        """Of a tile's products: as copies arrive, as tensor cores multiply, or as shared memory is read and written.

        Those of phases of more and of fewer taps are taken to be alike.
        """
        phases = self.product.phases
        k_tiles, steps = self.product.k_tiles / phases, self.product.k_steps * self.rows / phases
        read = steps * _K_STEP_BYTES * (FILTER_BLOCK + self.tile_n)
        shared = (read + k_tiles * self.loaded_bytes) / _SHARED_BYTES
        return larger(larger(steps * self.tile_n / 2 * _RATE, shared), k_tiles * self._copy_cycles) + _ITEM_CYCLES

    def estimate_ms(self, device: Device) -> float:
        """Milliseconds: products one after the other, or both consumers' results at once, or all bytes."""
        alone = self._product_cycles
        results = self.rows * self.tile_n * _PIXEL_CYCLES
        copied = chosen(self.out_stages == 1, results + _COPY_CYCLES, _COPY_CYCLES)
        item = larger(larger(alone, copied), (alone + results + _COPY_CYCLES) / _CONSUMERS)
        busy_ms = 1e3 * (_START_CYCLES + self.items * item + results) / device.clock_hz
        moved_ms = 1e3 * self.product.problem.bytes / device.bandwidth_bytes_per_s
        return _LAUNCH_MS + larger(busy_ms, moved_ms) + _BOTH * smaller(busy_ms, moved_ms)


@functools.lru_cache(maxsize=64)
def _is_even_in_turn(taps: Sequence[int], filter_tiles: int, tiles: int, blocks: int) -> bool:
    """Whether blocks that take phases of so many taps in turn, as the kernel does, have much the same to multiply."""
    rounds = min(tiles // blocks, _ROUNDS)
    pixels, place = np.divmod(np.arange(rounds * blocks) // filter_tiles, len(taps))
    of_blocks = np.array(taps)[(pixels + place) % len(taps)].reshape(rounds, blocks).sum(axis=0)
    return bool(of_blocks.max() <= _UNEVEN * of_blocks.mean() + max(taps) / 2)


def _room(device: Device) -> int:
    """Shared memory of the largest block."""
    return SmLimits.of(device).shared_bytes - RESERVED_SHARED_BYTES


@functools.cache
def short_list() -> ConfigTable:
    """All configurations that there are of any product."""
    return ConfigTable.product({name: PARAMETERS[name] for name in PARAMETERS})
