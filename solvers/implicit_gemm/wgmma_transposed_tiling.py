"""Tilings of kernels_src/implicit_gemm/wgmma_transposed.cu for backward weights, their shortlist and cost model.

M is channels of a tap, N is filters, K is pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from miofind.core.cached import cached_property
from miofind.device.device import Device
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


@dataclass(frozen=True, kw_only=True)
class TransposedTiling:
    """A product cut into tiles as a configuration says. What a ranking asks for often is kept.

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
    consumers: int
    row_blocks: int
    tile_n: int
    splits: int
    cluster_k: int
    blocks: int

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

    def split(self, splits: int, cluster_k: int) -> TransposedTiling:
        """The same with K split otherwise, and with what is kept that this does not change."""
        made = object.__new__(TransposedTiling)
        made.__dict__.update(self.__dict__, splits=splits, cluster_k=cluster_k)
        made.__dict__.pop("work_tiles", None)
        return made

    @property
    def config(self) -> Config:
        """The configuration that it is of."""
        return Config.of(
            consumers=self.consumers,
            rows=self.row_blocks,
            tile_n=self.tile_n,
            splits=self.splits,
            shares=self.cluster_k,
            blocks=self.blocks,
        )

    @cached_property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return WGMMA_M * self.consumers * self.row_blocks

    @cached_property
    def filters(self) -> int:
        """Columns of one group."""
        return self.product.size_m

    @cached_property
    def tap_blocks(self) -> int:
        """Blocks of rows of a tap."""
        return ceil_div(self.product.size_n, BLOCK)

    @cached_property
    def padded_m(self) -> int:
        """Rows of one group in whole blocks, all taps together."""
        return BLOCK * self.tap_blocks * math.prod(self.product.taps)

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles of one group along rows and columns."""
        return ceil_div(self.padded_m, self.tile_m), ceil_div(self.filters, self.tile_n)

    @cached_property
    def k_tiles(self) -> int:
        """Of the whole K, all pixels."""
        return ceil_div(self.product.size_k, TILE_K)

    @cached_property
    def work_tiles(self) -> int:
        """Tiles, or splits of them, that blocks or clusters compute."""
        return math.prod(self.tiles) * self.product.problem.groups * self.splits

    @cached_property
    def threads(self) -> int:
        """Of a block: those that multiply, and a warpgroup that loads and transposes."""
        return 128 * (self.consumers + 1)

    @cached_property
    def stage_bytes(self) -> int:
        """Of both operands of a k-tile."""
        return 4 * (self.tile_m + self.tile_n) * TILE_K

    def stages(self, shared_bytes: int) -> int:
        """Of the pipeline: as many as a multiprocessor's shared memory holds; 0 if too few."""
        free = (shared_bytes + _ALIGNMENT_BYTES) // self.blocks - 2 * _ALIGNMENT_BYTES - _STATIC_BYTES
        held = min(free // self.stage_bytes, _STAGES[-1])
        return held if held >= _STAGES[0] else 0

    def shared_bytes(self, stages: int) -> int:
        """Dynamic shared memory."""
        return _ALIGNMENT_BYTES + stages * self.stage_bytes

    def lanes(self, device: Device) -> int:
        """Threads of the reduction that add partials of the same elements: more while the device has room for them."""
        lanes, quads = 1, self.product.problem.output.size // 4
        while lanes < _MAX_LANES and 2 * lanes * _SPLITS_OF_LANE <= self.splits:
            if lanes * quads >= max(1, device.sm_count) * _LANES_AT_ONCE:
                break
            lanes *= 2
        return lanes

    def is_valid(self, shared_bytes: int) -> bool:
        """Whether the kernel serves it on a multiprocessor with that much shared memory for a block."""
        return (
            self.is_filled
            and self.together > 0
            and self.stages(shared_bytes) > 0
            and self._is_divisible()
            and self._has_cluster(shared_bytes)
            and max(self.work_tiles, self.k_tiles * self.splits) * self.cluster_k <= _MAX_INT
            and self.tiles[0] * self.tile_m <= _MAX_INT
        )

    @property
    def is_filled(self) -> bool:
        """Whether a tile is not mostly empty."""
        return self.tile_n < 2 * max(BLOCK, self.filters) and self.tile_m < 2 * max(WGMMA_M, self.padded_m)

    @cached_property
    def together(self) -> int:
        """wgmma instructions along K that are begun at once: as many as registers hold beside accumulators, or 0."""
        if (self.consumers, self.row_blocks) not in _WARPGROUPS or (self.blocks > 1 and self.consumers > 1):
            return 0
        return next((count for count in _TOGETHER if self._has_registers(count)), 0)

    def _has_registers(self, together: int) -> bool:
        """Whether registers hold the accumulators, and what so many instructions load."""
        is_long = together > min(_TOGETHER)
        if self.row_blocks > 1 and (self.tile_n == min(WIDTHS) or is_long):
            return False  # compilers wait for each product
        given = min(255, _REGISTERS // (self.threads * self.blocks) // 8 * 8)
        most = (given * (self.consumers + 1) - _COPYING_REGISTERS) // self.consumers // 8 * 8 if given < 248 else given
        accumulators = self.row_blocks * self.tile_n // 2
        return accumulators <= 128 and accumulators + 8 * together * self.row_blocks + _OTHER_REGISTERS[is_long] <= most

    def _has_cluster(self, shared_bytes: int) -> bool:
        """Whether blocks of a cluster can split K: the pipeline's memory holds their partials."""
        if self.cluster_k == 1:
            return True
        pipeline, partials = self.stages(shared_bytes) * self.stage_bytes, 4 * self.tile_n * (self.tile_m + 4)
        return self.blocks == 1 and self.tile_n % self.cluster_k == 0 and partials <= pipeline

    def _is_divisible(self) -> bool:
        """Whether K has that many splits, and all partials can be kept."""
        if self.splits * self.cluster_k == 1:
            return True
        if self.k_tiles < 2 * self.splits * self.cluster_k:
            return False
        return 4 * self.splits * self.product.problem.output.size <= _MAX_PARTIALS_BYTES


def _k_tile_cycles(tiling: TransposedTiling) -> float:
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


def estimate_ms(tiling: TransposedTiling, device: Device, shared_bytes: int) -> float:
    """Milliseconds of all launches of a tiling on a device with that much shared memory, with a cold L2 cache."""
    problem, byte_ms = tiling.product.problem, 1e3 / device.bandwidth_bytes_per_s
    blocks, splits, cluster_k = tiling.work_tiles * tiling.cluster_k, tiling.splits, tiling.cluster_k
    processors = max(1, int((_CLUSTERED if cluster_k > 2 else 1) * device.sm_count))
    step = _k_tile_cycles(tiling)
    alone = max(step, (_LATENCY_CYCLES + step) / max(1, tiling.stages(shared_bytes)))
    steps, tile_bytes = ceil_div(tiling.k_tiles, splits * cluster_k), 4 * tiling.tile_m * tiling.tile_n
    turns = ceil_div(blocks, processors)
    one = ceil_div(blocks, processors * tiling.blocks) * (steps * alone + _TILE_CYCLES)
    busy = max(one, turns * (steps * step + _SHARED_TILE_CYCLES)) + turns * tile_bytes / cluster_k / _WRITTEN_BYTES
    busy_ms, moved_ms = 1e3 * busy / _CLOCK_HZ, _moved_ms(tiling.product, byte_ms)
    ms = _FIRST_MS + max(busy_ms, moved_ms) + _EXPOSED * min(busy_ms, moved_ms)
    if cluster_k > 1:
        ms += _CLUSTER_MS + 1e3 * tile_bytes / _CLUSTER_PARTIALS_BYTES / _CLOCK_HZ
        ms += _LARGE_CLUSTER_MS if cluster_k > 4 else 0
    if splits > 1:
        lanes = tiling.lanes(device)
        spared = _SPARED * (splits - splits / lanes - (lanes > 1))
        ms += (
            _LAUNCH_MS + _PARTIALS_MOVED * 4 * splits * problem.output.size * byte_ms + _PARTIAL_MS * (splits - spared)
        )
    return ms


def shortlisted_tilings(product: WgmmaProduct, device: Device, shared_bytes: int) -> Iterator[TransposedTiling]:
    """Valid tilings that are good for some problem: all pixels at once, and in splits that fill the device in turns."""
    for consumers, row_blocks in _WARPGROUPS:
        for tile_n in WIDTHS:
            for blocks in (1, 2) if consumers == 1 else (1,):
                tile = TransposedTiling(
                    product=product,
                    consumers=consumers,
                    row_blocks=row_blocks,
                    tile_n=tile_n,
                    splits=1,
                    cluster_k=1,
                    blocks=blocks,
                )
                if tile.is_valid(shared_bytes):
                    yield from _splits(tile, device, shared_bytes)


def _splits(tile: TransposedTiling, device: Device, shared_bytes: int) -> Iterator[TransposedTiling]:
    """All pixels at once, and in splits that fill the device in turns."""
    at_once = max(1, device.sm_count) * tile.blocks
    for cluster_k in CLUSTER_SPLITS:
        found = {1}
        for turns in range(1, (_FULL_DEVICES if cluster_k == 1 else 1) + 1):
            most = min(turns * at_once // (tile.work_tiles * cluster_k), tile.k_tiles // (2 * cluster_k))
            found.add(max((count for count in SPLITS if count <= most), default=1))
        for splits in sorted(found):
            tiling = tile.split(splits, cluster_k)
            if (cluster_k == 1 or tiling.work_tiles * cluster_k <= at_once) and tiling.is_valid(shared_bytes):
                yield tiling
