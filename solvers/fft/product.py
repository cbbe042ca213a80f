"""How a thread block multiplies transforms: tiles of kernels_src/fft/product.cu, and what they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miofind.core.problem import DataType
from miofind.device.device import Device
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR

_FLOPS_SHARE = 0.58  # of the device's instructions, that a full grid of blocks issues on an H200
_OTHER_INSTRUCTIONS = 12  # of a thread a term: copies, addresses and the loop
_BANDWIDTH_SHARE = 0.7
_MOST_WASTE = 4
_MOST_BLOCKS = 8  # down and across, without staging
_RESIDENT_SUMS = 128 * 128  # complex sums that a multiprocessor has registers for
_L2_SPEED = 2.5  # times the bandwidth of memory

_MATRIX = StructType("Matrix", row_stride="int32", term_stride="int32", group_stride="int32")
PRODUCT = StructType(
    "Product",
    **dict.fromkeys(("rows", "columns", "terms", "bins", "accumulate"), "int32"),
    **dict.fromkeys(("a", "b", "out"), _MATRIX),
    **dict.fromkeys(("column_blocks", "row_blocks", "bin_blocks"), DIVISOR),
)
PRODUCT_DEFINES = (_MATRIX.define, PRODUCT.define)


def matrix(row_stride: int, term_stride: int, group_stride: int) -> Struct:
    """An operand or the result of `PRODUCT`, by its strides in planes of frequencies."""
    return _MATRIX(row_stride=row_stride, term_stride=term_stride, group_stride=group_stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """One shape of thread block.

    Attributes:
        tile_m, tile_n: sums of a thread.
        blocks_m, blocks_n: threads down and across a block's sums of a frequency.
        bins: frequencies.
        depth: terms that are staged, or loaded, at once.
        stages: copies of a stage's terms, 0 for operands that are loaded by each thread.
    """

    tile_m: int
    tile_n: int
    blocks_m: int = 1
    blocks_n: int = 1
    bins: int
    depth: int
    stages: int = 0

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.tile_m * self.blocks_m

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.tile_n * self.blocks_n

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.bins * self.blocks_m * self.blocks_n

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 8 * self.stages * self.depth * (self.rows + self.columns) * self.bins

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The kernel's compile-time parameters, but for the conjugates."""
        names = ("tile_m", "tile_n", "blocks_m", "blocks_n", "bins", "depth", "stages")
        return tuple((name.upper(), int(getattr(self, name))) for name in names)

    def serves(self, rows: int, columns: int) -> bool:
        """Whether whole blocks do not compute far more sums than are wanted, and operands serve enough sums."""
        blocks = ceil_div(rows, self.rows) * ceil_div(columns, self.columns)
        if blocks * self.rows * self.columns > _MOST_WASTE * rows * columns:
            return False
        return self.stages > 0 or rows < _MOST_BLOCKS * self.rows or columns < _MOST_BLOCKS * self.columns

    @property
    def _flops_share(self) -> float:
        """Of instructions those that multiply and add, and of these what is taken to be issued in time."""
        sums, operands = 4 * self.tile_m * self.tile_n, self.tile_m + self.tile_n
        return _FLOPS_SHARE * sums / (sums + operands + _OTHER_INSTRUCTIONS)

    def estimate_ms(self, device: Device, sizes: tuple[int, int, int], frequencies: int, groups: int) -> float:
        """Time of one launch."""
        rows, columns, terms = sizes
        blocks = ceil_div(rows, self.rows) * ceil_div(columns, self.columns) * ceil_div(frequencies, self.bins) * groups
        resident = max(1, _RESIDENT_SUMS // (self.threads * self.tile_m * self.tile_n))
        waves = blocks / (device.sm_count * resident)
        idle = max(1.0, math.ceil(waves) / waves)
        flops = 8.0 * blocks * self.bins * self.rows * self.columns * terms
        ceiling = self._flops_share * device.peak_flops_per_s(DataType.FLOAT32, tensor_cores=False)
        loaded = 8.0 * blocks * self.bins * (self.rows + self.columns) * terms
        least = 8.0 * frequencies * groups * (rows * terms + columns * terms + rows * columns)
        bandwidth = _BANDWIDTH_SHARE * device.bandwidth_bytes_per_s
        return 1e3 * max(idle * flops / ceiling, loaded / (_L2_SPEED * bandwidth), least / bandwidth)


PRODUCTS = {
    "32x32": ProductTile(tile_m=8, tile_n=8, blocks_m=4, blocks_n=4, bins=16, depth=4, stages=3),
    "16x16": ProductTile(tile_m=8, tile_n=8, blocks_m=2, blocks_n=2, bins=32, depth=4, stages=3),
    "16x16 of 4x4": ProductTile(tile_m=4, tile_n=4, blocks_m=4, blocks_n=4, bins=16, depth=4, stages=3),
    "1x8": ProductTile(tile_m=1, tile_n=8, bins=128, depth=2),
    "8x4": ProductTile(tile_m=8, tile_n=4, bins=128, depth=2),
    "4x4": ProductTile(tile_m=4, tile_n=4, bins=128, depth=2),
    "8x1": ProductTile(tile_m=8, tile_n=1, bins=128, depth=2),
    "2x1": ProductTile(tile_m=2, tile_n=1, bins=128, depth=4),
    "1x1": ProductTile(tile_m=1, tile_n=1, bins=128, depth=8),
}
"""By name; rows x columns of a block's sums of a frequency."""
