"""Tiles of kernels_src/implicit_gemm/wgmma_halo.cu: slices with their halo, and how long a configuration takes.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.cached import cached_property
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, chosen, larger, mapped, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, register_limit, resident_blocks
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
from miofind.solvers.implicit_gemm.wgmma_shared import BARRIER_BYTES, PATTERN, span_of

MOST_CHANNELS = 64
TILES_H = (1, 2, 3, 4, 6, 7, 8, 10, 12, 14, 16)
TILES_W = (16, 32, 64, 128, 192)
_LIKELY_H = (1, 2, 4, 8, 16)
_LIKELY_GROUPS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))  # warpgroups of a block, and blocks of a multiprocessor
_ATOM = 64  # pixels that an instruction multiplies
_MAX_N = 64
_MAX_STAGES = 8  # of filters that do not stay
_MAX_PARTS = 64

# First principles, for an H200.
_LAUNCH_MS = 0.004
_START_CYCLES = 6000  # of a block until its first products
_SLICE_CYCLES = 1000  # between products of one slice and of the next: the last ones' latency, and results
_TAP_CYCLES = 40  # between products of one tap and of the next, where filters do not stay
_RATE = 1.15  # of what products take to what they would at the rates of tensor cores and of shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloProduct:
    """A problem as the kernel sees it: forward, or backward data as a correlation of dy.

    Attributes:
        depth, height, width: its spatial dimensions. In two, rows are the depth and images the rows of a slice; in one,
            there is one slice.
        images: that blocks take one by one.
        sums, results: channels that are summed over, and those of the output.
        channels: that are loaded of a pixel, zeros beyond those that there are.
        k_steps: steps of 16 channels.
        tile_n, filter_tiles: filters of a block, and blocks for all of them.
        filter_columns: of backward data, columns of a row of filters that are swizzled together.
    """

    problem: ProblemDescription
    depth: Axis
    height: Axis
    width: Axis
    images: int
    sums: int
    results: int
    channels: int
    k_steps: int
    tile_n: int
    filter_tiles: int
    filter_columns: int

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(problem: ProblemDescription) -> HaloProduct:
        """That of a problem of stride 1."""
        is_data = problem.direction is Direction.BACKWARD_DATA
        axes = correlation_axes(problem)
        rows_are_images = len(axes) < 3
        if rows_are_images:
            axes.insert(-1, without_taps(problem.n))
        if len(axes) < 3:
            axes.insert(0, without_taps(1))
        sums, results = (problem.k, problem.c) if is_data else (problem.c, problem.k)
        filter_tiles = ceil_div(results, _MAX_N)
        tile_n = round_up(ceil_div(results, filter_tiles), 8)
        return HaloProduct(
            problem=problem,
            depth=axes[0],
            height=axes[1],
            width=axes[2],
            images=1 if rows_are_images else problem.n,
            sums=sums,
            results=results,
            channels=span_of(sums),
            k_steps=ceil_div(sums, 16),
            tile_n=tile_n,
            filter_tiles=ceil_div(results, tile_n),
            filter_columns=span_of(tile_n),
        )

    @property
    def rows_are_images(self) -> bool:
        """Whether the rows of a slice are of different images."""
        return len(self.problem.spatial) < 3

    @property
    def is_data(self) -> bool:
        return self.problem.direction is Direction.BACKWARD_DATA

    @property
    def taps(self) -> int:
        """Of a filter."""
        return self.depth.taps * self.height.taps * self.width.taps

    @property
    def filter_bytes(self) -> int:
        """Shared memory of the filters of a tap."""
        rows, row_bytes = (
            (16 * self.k_steps, 2 * self.filter_columns) if self.is_data else (self.tile_n, 2 * self.channels)
        )
        return round_up(rows * row_bytes, PATTERN)


@dataclass(frozen=True, kw_only=True)
class HaloTiling(HaloTile):
    """A configuration applied to a product.

    Attributes:
        consumers, atoms: warpgroups that multiply, and atoms of each.
        slices, filter_stages: of the rings.
        resident: blocks that a multiprocessor holds.
        parts, part_depth: blocks that share the depth, and slices of outputs of each.
    """

    product: HaloProduct
    consumers: int
    atoms: int
    slices: int
    filter_stages: int
    resident: int
    parts: int
    part_depth: int

    @staticmethod
    def of(product: HaloProduct, config: Config, device: Device) -> HaloTiling:
        """Tiles of at most `tile_h` rows and `tile_w` columns; parts of the depth that keep the device busy."""
        height, width = product.height.outputs, product.width.outputs
        tile_h = even_tile(product.height, config["tile_h"])
        tile_w = even_tile(product.width, config["tile_w"])
        is_odd = (width > tile_w) & (tile_w > _ATOM) & (tile_w % _ATOM > 0)
        tile_w = chosen(is_odd, round_up(tile_w, 8), tile_w)
        row_pixels = tile_w + halo(product.width)
        across_rows = ceil_div((tile_h - 1) * row_pixels + tile_w, _ATOM)
        atoms = ceil_div(chosen(tile_w % _ATOM == 0, tile_h * tile_w // _ATOM, across_rows), config["consumers"])
        slices = product.depth.taps + config["slices_ahead"]
        filters = chosen(config["keeps_filters"] == 1, product.taps, min(max(2, product.taps - 1), _MAX_STAGES))
        blocks = product.images * product.filter_tiles * ceil_div(height, tile_h) * ceil_div(width, tile_w)
        parts = mapped(functools.partial(_parts, product.depth.outputs), blocks, device.sm_count * config["blocks"])
        part_depth = ceil_div(product.depth.outputs, parts)
        return HaloTiling(
            product=product,
            height=product.height,
            width=product.width,
            tile_h=tile_h,
            tile_w=tile_w,
            consumers=config["consumers"],
            atoms=atoms,
            slices=slices,
            filter_stages=filters,
            resident=config["blocks"],
            parts=ceil_div(product.depth.outputs, part_depth),
            part_depth=part_depth,
        )

    @property
    def threads(self) -> int:
        """Of a block: consumers and two warps that load."""
        return 128 * self.consumers + 64

    @cached_property
    def slice_bytes(self) -> int:
        """Shared memory of a slice."""
        return round_up(self.rows * self.row_pixels * 2 * self.product.channels, PATTERN)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: both rings."""
        return PATTERN + self.slices * self.slice_bytes + self.filter_stages * self.product.filter_bytes

    @property
    def static_bytes(self) -> int:
        """Shared memory that the kernel itself declares: two mbarriers for each stage of the rings."""
        return 2 * BARRIER_BYTES * (self.slices + self.filter_stages)

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.product.images * self.product.filter_tiles * math.prod(self.tiles) * self.parts

    def is_valid(self, device: Device) -> bool:
        """Whether a block can run, and what its atoms meet beyond the last slice is shared memory still."""
        registers = self.atoms * self.product.tile_n // 2 + 56
        shared_bytes = self.shared_bytes + self.static_bytes
        fitting = resident_blocks(registers, self.threads, shared_bytes, SmLimits.of(device))
        last = self.consumers * self.atoms - 1
        of_row = larger(1, self.tile_w // _ATOM)
        by_rows = last // of_row * self.row_pixels + last % of_row * _ATOM
        begins = chosen(self.tile_w % _ATOM == 0, by_rows, _ATOM * last)
        reach = halo(self.product.height) * self.row_pixels + halo(self.product.width)
        met = 2 * self.product.channels * (begins + _ATOM + reach)
        beyond = met - self.slice_bytes
        return (
            (registers <= register_limit(self.resident, self.threads))
            & (larger(self.row_pixels, self.rows) <= MAX_BOX)
            & (fitting >= self.resident)
            & (beyond <= self.filter_stages * self.product.filter_bytes)
        )

    def estimate_ms(self, device: Device) -> float:
        """Milliseconds: products at the rate of tensor cores or of shared memory, in waves of blocks, or all bytes."""
        product = self.product
        step_cycles = max(product.tile_n / 2, 16 + product.tile_n / 4)
        steps = product.taps * product.k_steps * self.consumers * self.atoms
        taps_alone = chosen(self.filter_stages == product.taps, 0, product.taps * _TAP_CYCLES)
        products, alone = steps * step_cycles * _RATE, taps_alone + _SLICE_CYCLES / self.consumers

        def cycles(blocks: int) -> float:
            return _START_CYCLES + self.part_depth * (blocks * products + alone)

        busy_ms = 1e3 * cycles_of_waves(self.blocks, self.resident, device, cycles) / device.clock_hz
        moved_ms = 1e3 * product.problem.bytes / device.bandwidth_bytes_per_s
        return _LAUNCH_MS + larger(busy_ms, moved_ms) + 0.3 * smaller(busy_ms, moved_ms)


def short_list(product: HaloProduct) -> ConfigTable:
    """Configurations worth an estimate, as they cut a product, which has no smaller limits for any."""
    heights = least_limits(product.height, TILES_H, _LIKELY_H)
    return _of_limits(heights, least_limits(product.width, TILES_W, TILES_W))


@functools.lru_cache(maxsize=256)
def _of_limits(heights: tuple[int, ...], widths: tuple[int, ...]) -> ConfigTable:
    return ConfigTable.product(
        {
            "tile_h": heights,
            "tile_w": widths,
            ("consumers", "blocks"): _LIKELY_GROUPS,
            "slices_ahead": (0,),
            "keeps_filters": (0, 1),
        }
    )


@functools.lru_cache(maxsize=1 << 10)
def _parts(depth: int, blocks: int, multiprocessors: int) -> int:
    """Parts of the depth that take least time; each costs the slices that its neighbour meets, too, and its start."""

    def cost(parts: int) -> float:
        own = ceil_div(depth, parts)
        return ceil_div(blocks * ceil_div(depth, own), multiprocessors) * (own + 1.0)

    return min(range(1, min(depth, _MAX_PARTS) + 1), key=cost)
