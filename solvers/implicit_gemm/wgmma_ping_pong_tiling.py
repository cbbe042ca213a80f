"""Tiles of kernels_src/implicit_gemm/wgmma_ping_pong.cu, and how long a configuration takes.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable, Each, chosen, larger, smaller
from miofind.solver.occupancy import RESERVED_SHARED_BYTES, SmLimits
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_halo_shared import BARRIER_BYTES, PATTERN, span_of

WIDTHS = tuple(range(64, 257, 16))
"""Pixels of a tile: results are staged 16 at a time."""
THREADS = 384
"""Of a block: two warpgroups that multiply, and warps that load and store."""

_CONSUMERS = 2
_ALIGNMENT = 16  # of what a kernel declares
_BLOCK = 64  # filters that an instruction multiplies
_ACCUMULATORS = 192  # of a thread, of the 232 registers that it has
_LEAST_STAGES, _MOST_STAGES = 3, 8
_MAX_INT = 2**31 - 1

# Of 1,322 configurations of 59 problems on an H200, whose times were met within 10 % (root mean square, with a
# configuration's weight falling with the square of its time): the best of the first six was 0.4 % off the best.
_LAUNCH_MS = 0.002
_START_CYCLES = 800  # of a block until its first products, and after its last
_ITEM_CYCLES = 470  # between one consumer's products and the next one's
_COPY_CYCLES = 840  # until staged results have left
_SHARED_BYTES = 128  # a cycle that shared memory gives or takes
_LOADED_BYTES = 64  # a cycle that copies bring
_LATENCY_CYCLES = 1570  # of a copy, of which as many are under way as there are stages that are not multiplied
_IM2COL_CYCLES = 220  # that a copy in im2col mode takes, and bytes a cycle that it brings
_IM2COL_BYTES = 70
_PIXEL_CYCLES = 12  # of 64 results of a pixel until they are staged
_RATE = 1.25  # of what products take to what they would at the rate of tensor cores
_BOTH = 0.33  # of the shorter of both, computing and moving all bytes, which overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class PingPongProduct:
    """A problem as the kernel sees it.

    Attributes:
        product: as a matrix product.
        results: channels of the output.
        channels, chunks: of a pixel that a stage holds, zeros beyond those that there are, and how many are all.
        last_k_steps: steps of 16 channels of the last chunk.
        filter_blocks: of 64 filters.
        out_channels: of a pixel of results that are staged together.
        pixels: of the output, over all images.
    """

    product: WgmmaProduct
    results: int
    channels: int
    chunks: int
    last_k_steps: int
    filter_blocks: int
    out_channels: int
    pixels: int

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(problem: ProblemDescription) -> PingPongProduct:
        """That of a problem in one or two dimensions."""
        product = WgmmaProduct.of(problem)
        results = problem.c if problem.direction is Direction.BACKWARD_DATA else problem.k
        channels = span_of(product.channels)
        chunks = ceil_div(product.channels, channels)
        return PingPongProduct(
            product=product,
            results=results,
            channels=channels,
            chunks=chunks,
            last_k_steps=ceil_div(product.channels - (chunks - 1) * channels, 16),
            filter_blocks=ceil_div(results, _BLOCK),
            out_channels=span_of(results),
            pixels=product.image * problem.n,
        )

    @property
    def problem(self) -> ProblemDescription:
        """Lifted to two dimensions."""
        return self.product.problem

    @property
    def is_data(self) -> bool:
        return self.problem.direction is Direction.BACKWARD_DATA

    @property
    def taps(self) -> int:
        """Of a filter."""
        return math.prod(self.product.taps)

    @property
    def k_tiles(self) -> int:
        """Chunks of all taps."""
        return self.taps * self.chunks

    @property
    def k_steps(self) -> int:
        """Of 16 channels, over all taps."""
        return self.taps * ((self.chunks - 1) * self.channels // 16 + self.last_k_steps)

    @property
    def tensors(self) -> int:
        """Buffers of a place: one for results and what is read with them, two if that is two tensors."""
        epilogue = self.problem.epilogue
        return 2 if epilogue.has_residual and "saved" in epilogue.operands else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PingPongTiling:
    """A configuration applied to a product.

    Attributes:
        rows: blocks of 64 filters of a tile.
        tile_n: pixels of a tile.
        places: for results.
        kept_tiles: k-tiles of filters that are loaded once and stay; 0 if they do not. A block's tiles are then all of
            the same filters: there is a multiple of `filter_tiles` of blocks.
        stages: of the ring, as many as there is shared memory for.
        blocks: of the grid, each of which takes tiles until there are none left.
    """

    product: PingPongProduct
    rows: int
    tile_n: int
    places: int
    kept_tiles: int
    stages: int
    blocks: int

    @staticmethod
    def of(product: PingPongProduct, config: Config, device: Device) -> PingPongTiling:
        rows, tile_n, places = config["rows"], config["tile_n"], config["places"]
        kept_tiles = product.k_tiles * config["keeps_filters"]
        filter_tiles = ceil_div(product.filter_blocks, rows)
        tiles = filter_tiles * ceil_div(product.pixels, tile_n)
        alike = chosen(kept_tiles > 0, filter_tiles, 1)
        blocks = larger(device.sm_count // alike * alike, 1)
        empty = PingPongTiling(
            product=product,
            rows=rows,
            tile_n=tile_n,
            places=places,
            kept_tiles=kept_tiles,
            stages=0,
            blocks=smaller(tiles, blocks),
        )
        room = SmLimits.of(device).shared_bytes - RESERVED_SHARED_BYTES - empty.shared_bytes - empty.static_bytes
        return replace(empty, stages=smaller(_MOST_STAGES, room // (empty.stage_bytes + 2 * BARRIER_BYTES)))

    @property
    def filter_tiles(self) -> int:
        """Tiles of filters."""
        return ceil_div(self.product.filter_blocks, self.rows)

    @property
    def tiles(self) -> int:
        """Of all blocks."""
        return self.filter_tiles * ceil_div(self.product.pixels, self.tile_n)

    @property
    def items(self) -> int:
        """Tiles of a block, at most."""
        return ceil_div(self.tiles, self.blocks)

    @property
    def filters_bytes(self) -> int:
        """Shared memory of a k-tile of filters."""
        return 2 * _BLOCK * self.product.channels * self.rows

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a k-tile, of pixels alone where filters stay."""
        pixels = round_up(2 * self.product.channels * self.tile_n, PATTERN)
        return pixels + chosen(self.kept_tiles > 0, 0, self.filters_bytes)

    @property
    def out_bytes(self) -> int:
        """Shared memory of a tile's results of 64 filters."""
        return round_up(2 * self.product.out_channels * self.tile_n, PATTERN)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        loaded = self.stages * self.stage_bytes + self.kept_tiles * self.filters_bytes
        return PATTERN + loaded + self.places * self.product.tensors * self.rows * self.out_bytes

    @property
    def static_bytes(self) -> int:
        """Shared memory that the kernel itself declares."""
        barriers = BARRIER_BYTES * (2 * self.stages + self.kept_tiles + 3 * _CONSUMERS)
        return round_up(barriers, _ALIGNMENT)

    def is_valid(self) -> bool:
        """Whether a block can run."""
        product = self.product
        return (
            (self.stages >= _LEAST_STAGES)
            & (self.rows * self.tile_n // 2 <= _ACCUMULATORS)
            & (self.rows <= product.filter_blocks)
            & ((self.kept_tiles == 0) | ((self.blocks % self.filter_tiles == 0) & (self.items > 1)))
            & ((self.items + _CONSUMERS) * product.k_tiles <= _MAX_INT)
            & (self.tiles * self.tile_n <= _MAX_INT)
        )

    @property
    def _product_cycles(self) -> Each:
        """Of a tile's products: at the tensor cores' rate, or at shared memory's, which copies are written to, too."""
        product = self.product
        steps, pixels = product.k_steps * self.rows, 2 * product.channels * self.tile_n
        loaded = pixels + chosen(self.kept_tiles > 0, 0, self.filters_bytes)
        copies = larger(loaded / _LOADED_BYTES, _LATENCY_CYCLES / (self.stages - (_LEAST_STAGES - self.rows)))
        if not product.product.is_pointwise:
            copies = larger(copies, _IM2COL_CYCLES + pixels / _IM2COL_BYTES)
        shared = (32 * steps * (_BLOCK + self.tile_n) + product.k_tiles * loaded) / _SHARED_BYTES
        multiplied = larger(steps * self.tile_n / 2 * _RATE, shared)
        return larger(multiplied, product.k_tiles * copies) + _ITEM_CYCLES

    def estimate_ms(self, device: Device) -> Each:
        """Milliseconds: products one after the other, or both consumers' results at once, or all bytes."""
        product = self.product
        alone = self._product_cycles
        results = self.rows * self.tile_n * _PIXEL_CYCLES
        copied = chosen(self.places == 1, results + _COPY_CYCLES, _COPY_CYCLES)
        item = larger(larger(alone, copied), (alone + results + _COPY_CYCLES) / _CONSUMERS)
        busy_ms = 1e3 * (_START_CYCLES + self.items * item + results) / device.clock_hz
        moved_ms = 1e3 * product.problem.bytes / device.bandwidth_bytes_per_s
        return _LAUNCH_MS + larger(busy_ms, moved_ms) + _BOTH * smaller(busy_ms, moved_ms)


def short_list(product: PingPongProduct) -> ConfigTable:
    """Configurations worth an estimate."""
    return _of_rows(tuple(rows for rows in (1, 2) if rows <= product.filter_blocks))


@functools.lru_cache(maxsize=2)
def _of_rows(rows: tuple[int, ...]) -> ConfigTable:
    return ConfigTable.product({"rows": rows, "tile_n": WIDTHS, "places": (1, 2), "keeps_filters": (0, 1)})
