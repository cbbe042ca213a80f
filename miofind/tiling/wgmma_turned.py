"""How kernels_src/implicit_gemm_wgmma_turned.cu cuts backward weights into tiles, and how long that takes.

Rows are channels of a tap, columns filters, and the depth is of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from miofind.device import Device
from miofind.solution import Config
from miofind.tiling.correlation import ceil_div
from miofind.tiling.wgmma import ROW_BLOCK
from miofind.tiling.wgmma_product import WgmmaProduct

WIDE = 32
"""Channels, filters or pixels of a block that is copied at once."""

TILE_K = 32
"""Pixels of a step."""

WIDTHS = (32, 64, 96, 128, 160, 192, 256)
SHARES = (1, 2, 4, 8)
SPLITS = (*range(1, 9), 10, 11, 12, 14, 16, 18, 22, 24, 28, 32, 40, 44, 48, 64, 88, 128)
TOGETHER = (2, 4)
_WARPGROUPS = ((2, 2), (3, 1), (2, 1), (1, 2), (1, 1))
"""Consumers, and blocks of 64 rows of each."""

_STAGES = range(3, 9)
_REGISTERS = 1 << 16
_COPYING_REGISTERS = 64  # of a thread that copies or turns
_OTHER_REGISTERS = (24, 40)  # of one that multiplies, besides its sums and two times what products at once load
_ALIGNMENT_BYTES = 1024  # of stages in shared memory; a block besides costs as much of it
_STATIC_BYTES = 256  # at most, of the barriers
_MAX_INT = 2**31 - 1
_MAX_PARTS_BYTES = 1 << 30
_MAX_ADDERS, _PARTS_AT_ONCE, _ADDERS_AT_ONCE = 32, 4, 1024
_FULL_DEVICES = 4

# Expected of an H200, not measured: as kernels_src/implicit_gemm_wgmma.cu takes them, where they are the same.
_CLOCK_HZ = 1.75e9
_SHARED_MEMORY_BYTES = 128
_OPERATIONS = 1024
_COPY_ROW_CYCLES = 1.55
_COPY_CYCLES = 120
_TURN_CYCLES = 250
_LATENCY_CYCLES = 1350
_STEP_CYCLES = 260
_TILE_CYCLES = 1200
_SHARED_TILE_CYCLES = 340
_PARTS_BYTES = 100
_SHARES_BYTES = 40
_CLUSTER_TILE_CYCLES = 440
_CLUSTERED = 0.91  # share of the multiprocessors where clusters of four and more find a place
_FIRST_MS = 0.00257
_LAUNCH_MS = 0.00022
_PART_MS = 9.4e-05
_EXPOSED = 0.59


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTiling:
    """A product cut into tiles as a configuration says.

    Attributes:
        product: what is cut.
        consumers: warpgroups that multiply.
        row_blocks: blocks of 64 rows of each.
        tile_n: filters of a tile.
        splits: parts of the pixels that a second pass adds.
        shares: blocks of a cluster that share a part, and add what they have.
        blocks: of a multiprocessor.
        together: products along a step's depth that are begun at once.
    """

    product: WgmmaProduct
    consumers: int
    row_blocks: int
    tile_n: int
    splits: int
    shares: int
    blocks: int
    together: int

    @staticmethod
    def of(product: WgmmaProduct, config: Config) -> TurnedTiling:
        """The tiling of a configuration of ConvImplicitGemmWgmmaTurned, valid or not."""
        return TurnedTiling(
            product=product,
            consumers=int(config["consumers"]),
            row_blocks=int(config["rows"]),
            tile_n=int(config["tile_n"]),
            splits=int(config["splits"]),
            shares=int(config["shares"]),
            blocks=int(config["blocks"]),
            together=int(config["together"]),
        )

    @property
    def config(self) -> Config:
        """The configuration that it is of."""
        return Config.of(
            consumers=self.consumers,
            rows=self.row_blocks,
            tile_n=self.tile_n,
            splits=self.splits,
            shares=self.shares,
            blocks=self.blocks,
            together=self.together,
        )

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return ROW_BLOCK * self.consumers * self.row_blocks

    @property
    def filters(self) -> int:
        """Columns of one group."""
        return self.product.rows

    @property
    def chunks(self) -> int:
        """Blocks of rows of a tap."""
        return ceil_div(self.product.columns, WIDE)

    @property
    def all_rows(self) -> int:
        """Rows of one group in whole blocks, all taps together."""
        return WIDE * self.chunks * math.prod(self.product.taps)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of one group along rows and columns."""
        return ceil_div(self.all_rows, self.tile_m), ceil_div(self.filters, self.tile_n)

    @property
    def steps(self) -> int:
        """Steps of all pixels."""
        return ceil_div(self.product.depth, TILE_K)

    @property
    def items(self) -> int:
        """Parts of tiles that blocks, or clusters, compute."""
        return math.prod(self.tiles) * self.product.problem.groups * self.splits

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and a warpgroup that copies and turns."""
        return 128 * (self.consumers + 1)

    @property
    def stage_bytes(self) -> int:
        """Of both operands of a step."""
        return 4 * (self.tile_m + self.tile_n) * TILE_K

    def stages(self, shared_bytes: int) -> int:
        """Steps that are copied ahead: as many as a multiprocessor's shared memory holds; 0 if too few."""
        free = (shared_bytes + _ALIGNMENT_BYTES) // self.blocks - 2 * _ALIGNMENT_BYTES - _STATIC_BYTES
        return max((count for count in _STAGES if count * self.stage_bytes <= free), default=0)

    def shared_bytes(self, stages: int) -> int:
        """Dynamic shared memory."""
        return _ALIGNMENT_BYTES + stages * self.stage_bytes

    def adders(self, device: Device) -> int:
        """Threads of the second pass that add parts of the same elements: more while the device has room for them."""
        adders, quads = 1, self.product.problem.output.size // 4
        while adders < _MAX_ADDERS and 2 * adders * _PARTS_AT_ONCE <= self.splits:
            if adders * quads >= max(1, device.sm_count) * _ADDERS_AT_ONCE:
                break
            adders *= 2
        return adders

    def is_valid(self, shared_bytes: int) -> bool:
        """Whether the kernel serves it on a multiprocessor with that much shared memory for a block."""
        return (
            self.is_filled
            and self._has_sums()
            and self.stages(shared_bytes) > 0
            and self._is_divisible()
            and self._has_cluster(shared_bytes)
            and max(self.items, self.steps * self.splits) * self.shares <= _MAX_INT
            and self.tiles[0] * self.tile_m <= _MAX_INT
        )

    @property
    def is_filled(self) -> bool:
        """Whether a tile is not mostly empty."""
        return self.tile_n < 2 * max(WIDE, self.filters) and self.tile_m < 2 * max(ROW_BLOCK, self.all_rows)

    def _has_sums(self) -> bool:
        """Whether registers hold the sums, and what is loaded beside them."""
        if (self.consumers, self.row_blocks) not in _WARPGROUPS or (self.blocks > 1 and self.consumers > 1):
            return False
        is_long = self.together > min(TOGETHER)
        if self.row_blocks > 1 and (self.tile_n == min(WIDTHS) or is_long):
            return False  # compilers wait for each product
        given = min(255, _REGISTERS // (self.threads * self.blocks) // 8 * 8)
        most = (given * (self.consumers + 1) - _COPYING_REGISTERS) // self.consumers // 8 * 8 if given < 248 else given
        sums = self.row_blocks * self.tile_n // 2
        return sums <= 128 and sums + 8 * self.together * self.row_blocks + _OTHER_REGISTERS[is_long] <= most

    def _has_cluster(self, shared_bytes: int) -> bool:
        """Whether blocks can share a part: the ring holds the sums, and tiles leave multiprocessors idle."""
        if self.shares == 1:
            return True
        ring, sums = self.stages(shared_bytes) * self.stage_bytes, 4 * self.tile_n * (self.tile_m + 4)
        return self.blocks == 1 and self.tile_n % self.shares == 0 and sums <= ring

    def _is_divisible(self) -> bool:
        """Whether the depth has that many parts, and each can be kept."""
        if self.splits * self.shares == 1:
            return True
        if self.steps < 2 * self.splits * self.shares:
            return False
        return 4 * self.splits * self.product.problem.output.size <= _MAX_PARTS_BYTES


def _step_cycles(tiling: TurnedTiling) -> tuple[float, float]:
    """Cycles of a step: of the busiest unit that blocks of a multiprocessor share, and of a block alone."""
    tile_m, tile_n = tiling.tile_m, tiling.tile_n
    # Products read columns once for each block of rows; both operands come, rows are read, columns read and written.
    moved = tile_m // ROW_BLOCK * tile_n * 128 + 256 * tile_m + 384 * tile_n
    multiply = max(tile_m * tile_n * TILE_K / _OPERATIONS, moved / _SHARED_MEMORY_BYTES)
    copy = (tile_m + tile_n) * _COPY_ROW_CYCLES
    copies = max(tile_m, tile_n) // WIDE * _COPY_CYCLES
    turn = ceil_div(tile_n, 2 * WIDE) * _TURN_CYCLES
    return max(multiply, copy), max(multiply, _STEP_CYCLES, copy, copies, turn)


def estimate_ms(tiling: TurnedTiling, device: Device, shared_bytes: int) -> float:
    """Milliseconds that a product takes on a device with that much shared memory, with a cold L2 cache."""
    problem, byte_ms = tiling.product.problem, 1e3 / device.bandwidth_bytes_per_s
    processors, items, splits = max(1, device.sm_count), tiling.items * tiling.shares, tiling.splits
    shared, alone = _step_cycles(tiling)
    turn = ceil_div(tiling.tile_n, 2 * WIDE) * _TURN_CYCLES
    arrive = (_LATENCY_CYCLES + turn + 2 * shared) / max(1, tiling.stages(shared_bytes))
    steps = tiling.steps / (splits * tiling.shares)
    write = 4 * tiling.tile_m * tiling.tile_n / _PARTS_BYTES
    if tiling.shares > 1:
        processors = int(_CLUSTERED * processors) if tiling.shares > 2 else processors
        write += 4 * tiling.tile_m * tiling.tile_n / _SHARES_BYTES + _CLUSTER_TILE_CYCLES
    one = ceil_div(items, processors * tiling.blocks) * (steps * max(alone, arrive) + _TILE_CYCLES + write)
    all_ = ceil_div(items, processors) * (steps * shared + _SHARED_TILE_CYCLES + write / 2)
    ms = _FIRST_MS + 1e3 * max(one, all_) / _CLOCK_HZ + _EXPOSED * problem.bytes * byte_ms
    if splits > 1:
        ms += _LAUNCH_MS + max(problem.output.size * (8 * splits + 4) * byte_ms, splits * _PART_MS)
    return ms


def likely_tilings(product: WgmmaProduct, device: Device, shared_bytes: int) -> Iterator[TurnedTiling]:
    """Valid tilings that are good for some problem: all pixels at once, and in parts that fill the device in turns."""
    for consumers, row_blocks in _WARPGROUPS:
        for tile_n in WIDTHS:
            for blocks in (1, 2) if consumers == 1 else (1,):
                tiles = (
                    TurnedTiling(
                        product=product,
                        consumers=consumers,
                        row_blocks=row_blocks,
                        tile_n=tile_n,
                        splits=1,
                        shares=1,
                        blocks=blocks,
                        together=together,
                    )
                    for together in reversed(TOGETHER)
                )
                tile = next((tile for tile in tiles if tile.is_valid(shared_bytes)), None)
                if tile is not None:
                    yield from _parts(tile, device, shared_bytes)


def _parts(tile: TurnedTiling, device: Device, shared_bytes: int) -> Iterator[TurnedTiling]:
    """All pixels at once, and in parts that fill the device in turns."""
    at_once = max(1, device.sm_count) * tile.blocks
    for shares in SHARES:
        found = {1}
        for turns in range(1, (_FULL_DEVICES if shares == 1 else 1) + 1):
            most = min(turns * at_once // (tile.items * shares), tile.steps // (2 * shares))
            found.add(max((count for count in SPLITS if count <= most), default=1))
        for splits in sorted(found):
            tiling = replace(tile, splits=splits, shares=shares)
            if (shares == 1 or tiling.items * shares <= at_once) and tiling.is_valid(shared_bytes):
                yield tiling
