"""Tiles of kernels_src/implicit_gemm/wgmma_halo_swapped.cu: pixels with their halo, and how long a configuration takes.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.cached import cached_property
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, smaller
from miofind.solver.occupancy import SmLimits, register_limit, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import Axis, ceil_div, round_up
from miofind.solvers.implicit_gemm.wgmma_halo_shared import (
    MAX_BOX,
    HaloTile,
    correlation_axes,
    even_tile,
    halo,
    least_limits,
    without_taps,
)
from miofind.solvers.implicit_gemm.wgmma_shared import BARRIER_BYTES, PATTERN, FiltersAsA

TILES_H = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20)
TILES_W = (8, 16, 20, 28, 40, 56, 64, 80, 120, 248)
FILTER_STAGES = (0, 8, 6)
"""Filters of taps that are held at a time; 0 for all."""
MOST_COLUMNS = 32
"""Of a filter: a row of taps is unrolled."""

COLUMNS_ALIGNMENT = 8
"""Of planes: pixels of a row that are staged together, and that a copy's rows are multiples of."""

_UNUSED_BYTES = 16
_MAX_INT = 2**31 - 1  # taps of all that a block multiplies are counted
_REGISTERS = 72  # of a thread beside its accumulators

# Of 1,247 configurations of 80 problems on an H200, whose times were 1.00 times the estimates in the median, and 0.91
# and 1.13 times those at the ends of nine tenths.
_LAUNCH_MS = 0.003
_START_CYCLES = 1200  # of a block until its first products, and after its last
_ITEM_CYCLES = 30  # between one consumer's products and the next one's
_COPY_CYCLES = 1500  # until staged results have left, and one consumer's after another's
_LOADED_BYTES = 35.5  # a cycle that a multiprocessor loads from the L2 cache
_STAGE_CYCLES = 1300  # until filters are there, of which all stages but the two that are multiplied by are on their way
_PIXEL_CYCLES = 21  # of a pixel's results until they are staged, with an exponential of each
_RATE = 1.25  # of what products take to what they would at the rates of tensor cores and of shared memory
_CONFLICT_CYCLES = 0.6  # of a pixel's results that are staged, for each that waits for their bank
_MOVED = 1.6  # of what all bytes take to what they would at the memory's rate


@dataclass(frozen=True, kw_only=True)
class SwappedHaloProduct(FiltersAsA):
    """A problem as the kernel sees it: forward, or backward data as a correlation of dy.

    Attributes:
        height, width: its spatial dimensions; in one, images are the rows.
        images: of which a tile has one.
    """

    height: Axis
    width: Axis
    images: int

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(problem: ProblemDescription) -> SwappedHaloProduct:
        """That of a problem of stride 1 in one or two dimensions."""
        axes = correlation_axes(problem)
        if len(axes) == 1:
            axes.insert(0, without_taps(problem.n))
        return SwappedHaloProduct(
            problem=problem,
            taps=axes[0].taps * axes[1].taps,
            height=axes[0],
            width=axes[1],
            images=1 if len(problem.spatial) == 1 else problem.n,
        )

    @property
    def rows_are_images(self) -> bool:
        """Whether the rows of a tile are of different images."""
        return len(self.problem.spatial) == 1

    @cached_property
    def column_limits(self) -> tuple[int, ...]:
        """The limits that cut rows in different ways, each the least that cuts them so."""
        limits = least_limits(self.width, TILES_W, TILES_W)
        if not self.has_nchw_output:
            return limits
        by_tile = {self.tile_columns(limit): limit for limit in sorted(limits, reverse=True)}
        return tuple(sorted(by_tile.values()))

    def tile_columns(self, limit: int) -> int:
        """Of a tile of at most so many, but that they are aligned."""
        return self.aligned(even_tile(self.width, limit))

    def aligned(self, pixels: int) -> int:
        """Pixels of a row of a tile: as many as these, or the next multiple of 8 where results are channels first."""
        return round_up(pixels, COLUMNS_ALIGNMENT) if self.has_nchw_output else pixels


@dataclass(frozen=True, kw_only=True)
class SwappedHaloTiling(HaloTile):
    """A configuration applied to a product.

    Attributes:
        tile_n: pixels that are multiplied, with the halo between rows.
        unit_blocks: blocks of filters of a unit.
        consumers: warpgroups that multiply by turns.
        slots, filter_stages: of the rings.
        keeps_filters: whether all filters are loaded once and stay.
        blocks: of the grid, each of which takes units until there are none left.
    """

    product: SwappedHaloProduct
    tile_n: int
    unit_blocks: int
    consumers: int
    slots: int
    filter_stages: int
    keeps_filters: bool
    blocks: int

    @staticmethod
    def of(product: SwappedHaloProduct, config: Config, device: Device) -> SwappedHaloTiling:
        """Tiles of at most `tile_h` rows and `tile_w` columns."""
        height, width = product.height.outputs, product.width.outputs
        tile_h = even_tile(product.height, config["tile_h"])
        tile_w = product.tile_columns(config["tile_w"])
        tile_n = round_up((tile_h - 1) * product.aligned(tile_w + halo(product.width)) + tile_w, 8)
        unit_blocks, stages = config["unit_blocks"], config["filter_stages"]
        held = chosen(unit_blocks > 1, product.chunks, 1)
        tiles = product.images * ceil_div(height, tile_h) * ceil_div(width, tile_w)
        units = tiles * ceil_div(product.filter_blocks, unit_blocks)
        return SwappedHaloTiling(
            product=product,
            height=product.height,
            width=product.width,
            tile_h=tile_h,
            tile_w=tile_w,
            tile_n=tile_n,
            unit_blocks=unit_blocks,
            consumers=config["consumers"],
            slots=held + config["slots_ahead"],
            filter_stages=chosen(stages == 0, unit_blocks * product.chunks * product.taps, stages),
            keeps_filters=stages == 0,
            blocks=smaller(units, device.sm_count),
        )

    @cached_property
    def row_pixels(self) -> int:
        return self.product.aligned(self.tile_w + halo(self.width))

    @cached_property
    def parts(self) -> int:
        """Units that share a tile of pixels."""
        return ceil_div(self.product.filter_blocks, self.unit_blocks)

    @property
    def units(self) -> int:
        """Of all blocks."""
        return self.product.images * math.prod(self.tiles) * self.parts

    @cached_property
    def items(self) -> int:
        """Blocks of filters that are multiplied by, of all units of a block, at most."""
        return ceil_div(self.units, self.blocks) * self.unit_blocks

    @property
    def threads(self) -> int:
        """Of a block: consumers, two warps that load and one that copies results."""
        return 128 * self.consumers + 96

    @cached_property
    def slot_bytes(self) -> int:
        """Shared memory of a chunk of a tile."""
        return round_up(self.rows * self.row_pixels * 2 * self.product.channels, PATTERN)

    @property
    def out_bytes(self) -> int:
        """Shared memory of a tile's results."""
        return round_up(self.tile_h * self.tile_w * 2 * self.product.out_channels, PATTERN)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: both rings, and results of all consumers."""
        rings = self.slots * self.slot_bytes + self.filter_stages * self.product.filter_bytes
        return PATTERN + rings + self.consumers * self.product.out_buffers * self.out_bytes

    @property
    def static_bytes(self) -> int:
        """Shared memory that the kernel itself declares."""
        barriers = BARRIER_BYTES * (2 * (self.slots + self.filter_stages) + 3 * self.consumers)
        return round_up(barriers, _UNUSED_BYTES) + _UNUSED_BYTES

    def is_valid(self, device: Device) -> bool:
        """Whether a block can run, and rings hold what is needed at once."""
        product, registers = self.product, self.tile_n // 2 + _REGISTERS
        fitting = resident_blocks(registers, self.threads, self.shared_bytes + self.static_bytes, SmLimits.of(device))
        of_one_image = product.rows_are_images and product.problem.epilogue.channel_bias
        return (
            (larger(self.row_pixels, self.rows) <= MAX_BOX)
            & (product.filter_blocks % self.unit_blocks == 0)
            & ((self.filter_stages == self.unit_blocks * product.chunks * product.taps) == self.keeps_filters)
            & (self.keeps_filters <= (self.parts == 1))  # else they would have to change
            & ((self.tile_h == 1) | (not of_one_image))
            & (registers <= register_limit(1, self.threads))
            & (fitting >= 1)
            & ((self.items + self.consumers) * product.chunks * product.taps <= _MAX_INT)
        )

    @property
    def _loaded_bytes(self) -> float:
        """Of a turn: a tile's pixels for one of the blocks of filters that they stay for, and filters that do not."""
        product = self.product
        pixels = product.chunks * self.slot_bytes / self.unit_blocks
        return pixels + chosen(self.keeps_filters, 0, product.taps * product.chunks * product.filter_bytes)

    @property
    def _conflict_cycles(self) -> float:
        """Of shared memory, where filters' results of the same pixels are staged in the same of its banks."""
        if not self.product.has_nchw_output:
            return 0.0
        words = self.tile_h * self.tile_w // COLUMNS_ALIGNMENT  # of 16 bytes, of a filter; all banks are 8 of them
        waiting = 1 * (words % 2 == 0) + 2 * (words % 4 == 0) + 4 * (words % 8 == 0)
        return self.tile_n * waiting * _CONFLICT_CYCLES

    def estimate_ms(self, device: Device) -> float:
        """Milliseconds: consumers' products one after the other, or their results at once, or all bytes."""
        product, epilogue = self.product, self.product.problem.epilogue
        step_cycles = larger(self.tile_n / 2, 16 + self.tile_n / 4)
        products = product.k_steps * step_cycles * _RATE + _ITEM_CYCLES + self._conflict_cycles
        taps = product.taps * product.chunks
        arrivals = chosen(self.keeps_filters, 0, taps * _STAGE_CYCLES / larger(1, self.filter_stages - 2))
        results = 0 if epilogue.nonlinearity.is_exact else self.tile_n * _PIXEL_CYCLES
        alone = larger(larger(products, arrivals), self._loaded_bytes / _LOADED_BYTES)
        item = larger(larger(alone, _COPY_CYCLES), (products + results) / self.consumers)
        busy_ms = 1e3 * (_START_CYCLES + self.items * item + results) / device.clock_hz
        moved_ms = 1e3 * product.problem.bytes / device.bandwidth_bytes_per_s * _MOVED
        return _LAUNCH_MS + larger(busy_ms, moved_ms) + 0.2 * smaller(busy_ms, moved_ms)


def short_list(product: SwappedHaloProduct) -> ConfigTable:
    """Configurations worth an estimate, as they cut a product, which has no smaller limits for any."""
    heights = least_limits(product.height, TILES_H, TILES_H)
    blocks = tuple(blocks for blocks in (1, 2, 4) if product.filter_blocks % blocks == 0)
    return _of_limits(heights, product.column_limits, blocks)


@functools.lru_cache(maxsize=256)
def _of_limits(heights: tuple[int, ...], widths: tuple[int, ...], blocks: tuple[int, ...]) -> ConfigTable:
    return ConfigTable.product(
        {
            "tile_h": heights,
            "tile_w": widths,
            "consumers": (2, 3),
            "unit_blocks": blocks,
            "slots_ahead": (1,),
            "filter_stages": FILTER_STAGES,
        }
    )
