"""Tilings of kernels_src/implicit_gemm/wgmma_transposed.cu for backward weights, their shortlist and cost model.

M is channels of a tap, N is filters, K is pixels. A tiling may be a table of many: numbers are arrays then
(`miofind.solver.columns`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from miofind.device.device import Device
from miofind.solver.columns import Columns, Each, chosen, column, holds_all, larger, mapped, smaller
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_tiling import WGMMA_M

BLOCK = 32
"""Channels, filters or pixels of a block that is copied at once."""

TILE_K = 32
"""Pixels of a k-tile."""

WIDTHS = (32, 64, 96, 128, 160, 192)
CLUSTER_SPLITS = (1, 2, 4, 8)
SPLITS = (*range(1, 9), 10, 11, 12, 14, 16, 22, 24, 32, 44, 64, 128)
_TOGETHER = (4, 2)
_WARPGROUPS = ((2, 2), (3, 1), (2, 1), (1, 2), (1, 1))
"""Consumers, and blocks of 64 rows of each."""

_STAGES = range(3, 9)
_REGISTERS = 1 << 16
_COPYING_REGISTERS = 64  # of a thread that loads or transposes
_OTHER_REGISTERS = (24, 40)  # of one that multiplies, besides its accumulators and two times the fragments of a batch
_ALIGNMENT_BYTES = 1024  # of stages in shared memory; a block besides costs as much of it
_STATIC_BYTES = 256  # at most, of the barriers
_MAX_INT = 2**31 - 1
_MAX_PARTIALS_BYTES = 1 << 30
_MAX_LANES, _SPLITS_OF_LANE, _LANES_AT_ONCE = 32, 4, 1024
_FULL_DEVICES = 4

# Of an H200, fitted to 126 problems with 6 configurations each, whose partials one thread an element added: root mean
# square of the error 7 %. Cycles: of a k-tile's bytes in shared memory (at more than the 128 a cycle that it moves, so
# they are counted high), of a round of two blocks that are transposed, of a TMA load's latency, of the prologue and
# epilogue of a work tile, alone and where other blocks hide most of them.
_CLOCK_HZ = 1.755e9
_SHARED_MEMORY_BYTES = 160
_ROUND_CYCLES = 150
_LATENCY_CYCLES = 1530
_TILE_CYCLES = 3450
_SHARED_TILE_CYCLES = 1080
# Bytes a cycle of results that a multiprocessor writes, and of a cluster's partials that it adds.
_WRITTEN_BYTES = 60
_CLUSTER_PARTIALS_BYTES = 17.6
# Milliseconds of: the first launch up to the first wgmma, a cluster, one of more than four blocks, a second launch,
# adding one split-K partial after another; the share of the latter that several threads for an element spare (by
# comparison with another kernel, not measured alone); times that partials' bytes are moved; share of the shorter of
# moving all tensors and multiplying that the longer does not hide.
_FIRST_MS = 0.0017
_CLUSTER_MS = 0.00047
_LARGE_CLUSTER_MS = 0.00029
_LAUNCH_MS = 0.00067
_PARTIAL_MS = 8.8e-05
_SPARED = 0.5
_PARTIALS_MOVED = 1.28
_EXPOSED = 0.25
_CLUSTERED = 0.91  # share of the multiprocessors where clusters of four and more find a place


@dataclass(frozen=True, eq=False, kw_only=True)
class TransposedTiling(Columns):
    """A product cut into tiles as a configuration says.

    Attributes:
        product: what is cut.
        consumers: warpgroups that multiply.
        row_blocks: blocks of 64 rows of each.
        tile_n: filters of a tile.
        splits: of K, whose partials a second kernel adds.
        cluster_k: blocks of a cluster that split K again, and add their partials.
        blocks: of a multiprocessor.
    """

    product: WgmmaProduct
    consumers: Each
    row_blocks: Each
    tile_n: Each
    splits: Each
    cluster_k: Each
    blocks: Each

    @staticmethod
    def of(product: WgmmaProduct, config: Config) -> TransposedTiling:
        """The tiling of a configuration of ConvImplicitGemmWgmmaTurned, valid or not."""
        return TransposedTiling(
            product=product,
            consumers=int(config["consumers"]),
            row_blocks=int(config["rows"]),
            tile_n=int(config["tile_n"]),
            splits=int(config["splits"]),
            cluster_k=int(config["shares"]),
            blocks=int(config["blocks"]),
        )

    def config(self, place: int) -> Config:
        """The configuration that one of a table is of."""
        columns = (self.consumers, self.row_blocks, self.tile_n, self.splits, self.cluster_k, self.blocks)
        return config_of(*(int(each[place]) for each in columns))

    @column
    def tile_m(self) -> Each:
        """Rows of a tile."""
        return WGMMA_M * self.consumers * self.row_blocks

    @column
    def filters(self) -> int:
        """Columns of one group."""
        return self.product.size_m

    @column
    def tap_blocks(self) -> int:
        """Blocks of rows of a tap."""
        return ceil_div(self.product.size_n, BLOCK)

    @column
    def padded_m(self) -> int:
        """Rows of one group in whole blocks, all taps together."""
        return BLOCK * self.tap_blocks * math.prod(self.product.taps)

    @column
    def tiles(self) -> tuple[Each, Each]:
        """Tiles of one group along rows and columns."""
        return ceil_div(self.padded_m, self.tile_m), ceil_div(self.filters, self.tile_n)

    @column
    def k_tiles(self) -> int:
        """Of the whole K, all pixels."""
        return ceil_div(self.product.size_k, TILE_K)

    @column
    def work_tiles(self) -> Each:
        """Tiles, or splits of them, that blocks or clusters compute."""
        along_m, along_n = self.tiles
        return along_m * along_n * (self.product.problem.groups * self.splits)

    @column
    def threads(self) -> Each:
        """Of a block: those that multiply, and a warpgroup that loads and transposes."""
        return 128 * (self.consumers + 1)

    @column
    def stage_bytes(self) -> Each:
        """Of both operands of a k-tile."""
        return 4 * (self.tile_m + self.tile_n) * TILE_K

    def stages(self, shared_bytes: int) -> Each:
        """Of the pipeline: as many as a multiprocessor's shared memory holds; 0 if too few."""
        free = (shared_bytes + _ALIGNMENT_BYTES) // self.blocks - 2 * _ALIGNMENT_BYTES - _STATIC_BYTES
        held = smaller(free // self.stage_bytes, _STAGES[-1])
        return chosen(held >= _STAGES[0], held, 0)

    def shared_bytes(self, stages: Each) -> Each:
        """Dynamic shared memory."""
        return _ALIGNMENT_BYTES + stages * self.stage_bytes

    def lanes(self, device: Device) -> Each:
        """Threads of the reduction that add partials of the same elements: more while the device has room for them."""
        quads = self.product.problem.output.size // 4
        return mapped(functools.partial(_lanes, quads, max(1, device.sm_count) * _LANES_AT_ONCE), self.splits)

    @property
    def together(self) -> int:
        """wgmma instructions along K that are begun at once: as many as registers hold beside accumulators, or 0."""
        return _together(self.consumers, self.row_blocks, self.tile_n, self.blocks)

    def is_valid(self, shared_bytes: int) -> bool:
        """Whether the kernel serves one tiling on a multiprocessor with that much shared memory for a block."""
        return self.together > 0 and bool(self.is_valid_if_held(shared_bytes))

    def is_valid_if_held(self, shared_bytes: int) -> Each:
        """Whether the kernel serves it if registers hold its accumulators."""
        return holds_all(self._limits(shared_bytes))

    def _limits(self, shared_bytes: int) -> Iterator[Each]:
        """Whether each limit is kept."""
        yield self._is_filled
        yield self.stages(shared_bytes) > 0
        yield self._is_divisible
        yield self._has_cluster(shared_bytes)
        yield larger(self.work_tiles, self.k_tiles * self.splits) * self.cluster_k <= _MAX_INT
        yield self.tiles[0] * self.tile_m <= _MAX_INT

    @property
    def _is_filled(self) -> Each:
        """Whether a tile is not mostly empty."""
        return (self.tile_n < 2 * max(BLOCK, self.filters)) & (self.tile_m < 2 * max(WGMMA_M, self.padded_m))

    def _has_cluster(self, shared_bytes: int) -> Each:
        """Whether blocks of a cluster can split K: the pipeline's memory holds their partials."""
        pipeline, partials = self.stages(shared_bytes) * self.stage_bytes, 4 * self.tile_n * (self.tile_m + 4)
        may_split = (self.blocks == 1) & (self.tile_n % self.cluster_k == 0) & (partials <= pipeline)
        return (self.cluster_k == 1) | may_split

    @property
    def _is_divisible(self) -> Each:
        """Whether K has that many splits, and all partials can be kept."""
        is_kept = 4 * self.splits * self.product.problem.output.size <= _MAX_PARTIALS_BYTES
        parts = self.splits * self.cluster_k
        return (parts == 1) | ((self.k_tiles >= 2 * parts) & is_kept)


@functools.lru_cache(maxsize=1 << 12)  # few serve all problems, and to write one as JSON takes longest
def config_of(consumers: int, rows: int, tile_n: int, splits: int, shares: int, blocks: int) -> Config:
    """The configuration of ConvImplicitGemmWgmmaTurned with these parameters."""
    return Config.of(consumers=consumers, rows=rows, tile_n=tile_n, splits=splits, shares=shares, blocks=blocks)


def _lanes(quads: int, at_once: int, splits: int) -> int:
    """Threads that add so many partials of four elements each, where that many run at once."""
    lanes = 1
    while lanes < _MAX_LANES and 2 * lanes * _SPLITS_OF_LANE <= splits and lanes * quads < at_once:
        lanes *= 2
    return lanes


def _together(consumers: int, row_blocks: int, tile_n: int, blocks: int) -> int:
    """As `TransposedTiling.together`."""
    if (consumers, row_blocks) not in _WARPGROUPS or (blocks > 1 and consumers > 1):
        return 0
    given = min(255, _REGISTERS // (128 * (consumers + 1) * blocks) // 8 * 8)
    most = (given * (consumers + 1) - _COPYING_REGISTERS) // consumers // 8 * 8 if given < 248 else given
    accumulators = row_blocks * tile_n // 2
    for together, others in zip(_TOGETHER, reversed(_OTHER_REGISTERS), strict=True):
        waits = row_blocks > 1 and (tile_n == min(WIDTHS) or together > min(_TOGETHER))  # compilers, for each product
        held = accumulators + 8 * together * row_blocks + others
        if accumulators <= 128 and held <= most and not waits:
            return together
    return 0


def _k_tile_cycles(tiling: TransposedTiling) -> Each:
    """Cycles of a k-tile where copies are ahead: of moving both operands in shared memory, and of transposing one."""
    tile_m, tile_n = tiling.tile_m, tiling.tile_n
    # Products read columns once for each block of rows; both operands come, rows are read, columns read and written.
    moved = tile_m // WGMMA_M * tile_n * 128 + 256 * tile_m + 384 * tile_n
    return moved / _SHARED_MEMORY_BYTES + ceil_div(tile_n, 2 * BLOCK) * _ROUND_CYCLES


def _moved_ms(product: WgmmaProduct, byte_ms: float) -> float:
    """Time to move all tensors once; filters narrower than their strides skip some of x."""
    problem = product.problem
    met = math.prod(
        min(1.0, taps / stride) for taps, stride in zip(problem.w.shape[2:], problem.conv.stride, strict=True)
    )
    return (problem.bytes - (1 - met) * problem.x.bytes) * byte_ms


def estimate_ms(tiling: TransposedTiling, device: Device, shared_bytes: int) -> Each:
    """Milliseconds of all launches of a tiling on a device with that much shared memory, with a cold L2 cache."""
    problem, byte_ms = tiling.product.problem, 1e3 / device.bandwidth_bytes_per_s
    blocks, splits, cluster_k = tiling.work_tiles * tiling.cluster_k, tiling.splits, tiling.cluster_k
    clustered = max(1, int(_CLUSTERED * device.sm_count))
    processors = chosen(cluster_k > 2, clustered, max(1, device.sm_count))
    step = _k_tile_cycles(tiling)
    alone = larger(step, (_LATENCY_CYCLES + step) / larger(1, tiling.stages(shared_bytes)))
    steps, tile_bytes = ceil_div(tiling.k_tiles, splits * cluster_k), 4 * tiling.tile_m * tiling.tile_n
    turns = ceil_div(blocks, processors)
    one = ceil_div(blocks, processors * tiling.blocks) * (steps * alone + _TILE_CYCLES)
    busy = larger(one, turns * (steps * step + _SHARED_TILE_CYCLES)) + turns * tile_bytes / cluster_k / _WRITTEN_BYTES
    busy_ms, moved_ms = 1e3 * busy / _CLOCK_HZ, _moved_ms(tiling.product, byte_ms)
    ms = _FIRST_MS + larger(busy_ms, moved_ms) + _EXPOSED * smaller(busy_ms, moved_ms)
    in_cluster = _CLUSTER_MS + 1e3 * tile_bytes / _CLUSTER_PARTIALS_BYTES / _CLOCK_HZ
    ms = ms + chosen(cluster_k > 1, in_cluster, 0.0) + chosen(cluster_k > 4, _LARGE_CLUSTER_MS, 0.0)
    lanes = tiling.lanes(device)
    spared = _SPARED * (splits - splits / lanes - (lanes > 1))
    moved = _PARTIALS_MOVED * 4 * splits * problem.output.size * byte_ms
    return ms + chosen(splits > 1, _LAUNCH_MS + moved + _PARTIAL_MS * (splits - spared), 0.0)


_TILES = np.array(
    [
        (*warpgroups, tile_n, blocks)
        for warpgroups, tile_n, blocks in itertools.product(_WARPGROUPS, WIDTHS, (1, 2))
        if _together(*warpgroups, tile_n, blocks)
    ]
).T
_CLUSTER_K, _TURNS = np.array(
    [
        (cluster_k, turns)
        for cluster_k in CLUSTER_SPLITS
        for turns in range((_FULL_DEVICES if cluster_k == 1 else 1) + 1)
    ]
).T[:, :, None]
"""How a tile's sum may be spread: over a cluster of blocks, and over splits that fill the device in so many turns, of
which none stands for all pixels at once."""


def short_list(product: WgmmaProduct, device: Device, shared_bytes: int) -> TransposedTiling:
    """Valid tilings that are good for some problem: all pixels at once, and in splits that fill the device in turns."""
    consumers, row_blocks, tile_n, blocks = _TILES
    tiles = TransposedTiling(
        product=product, consumers=consumers, row_blocks=row_blocks, tile_n=tile_n, splits=1, cluster_k=1, blocks=blocks
    )
    at_once = max(1, device.sm_count) * blocks
    most = np.minimum(_TURNS * at_once // (tiles.work_tiles * _CLUSTER_K), tiles.k_tiles // (2 * _CLUSTER_K))
    places = np.searchsorted(SPLITS, most, side="right")
    splits = np.array(SPLITS)[np.maximum(places, 1) - 1]
    spread = tiles.but(splits=splits, cluster_k=_CLUSTER_K)
    is_taken = spread.is_valid_if_held(shared_bytes)
    is_taken &= (_CLUSTER_K == 1) | (spread.work_tiles * _CLUSTER_K <= at_once)
    is_taken[1:] &= (splits[1:] > splits[:-1]) | (_CLUSTER_K[1:] > _CLUSTER_K[:-1])  # each number once
    at, how = np.nonzero(is_taken.T)
    return TransposedTiling(
        product=product,
        consumers=consumers[at],
        row_blocks=row_blocks[at],
        tile_n=tile_n[at],
        splits=splits[how, at],
        cluster_k=_CLUSTER_K[how, 0],
        blocks=blocks[at],
    )
