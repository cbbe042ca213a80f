"""How F(2x2, 3x3) in one kernel deals tiles, filters and channels to blocks and warps, and how long that takes.

Pure arithmetic on shapes; the kernel is kernels_src/winograd/fused.cu.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miofind.core.problem import Direction, MathMode, ProblemDescription, TensorDescriptor
from miofind.device.device import Device
from miofind.solver.columns import larger, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solvers.common.correlation import ceil_div, round_up

ROWS, COLS = (1, 2, 4, 8), (4, 8)

_UNIT_BYTES = 4096  # of transformed filters, of 8 channels of 8 filters
_ROWS_OF_PLACES = 4
# Of a thread; besides sums and factors, by products: what ptxas says of sm_90a and sm_80, and some.
_MAX_REGISTERS, _REGISTERS_BESIDES = 255, {3: 52, 1: 72}

# Fitted to 107 times on an H200 (1 to 32 images of 64 to 640 channels, ieee and tf32, both layouts): 6 % off in the
# mean square, 20 % at most. Cycles of a scheduler for a product of 16 x 8 x 8, and to read, transform and split the
# factors of 16 tiles or of 8 filters for 8 channels; of a multiprocessor to start a warp's copies; that a stage waits,
# of which blocks at once take each other's; of the first and last things a block does. Of a launch, the filters' too.
_PRODUCT_CYCLES, _FACTORS_CYCLES, _COPY_CYCLES = 8, 60, 7
_STAGE_CYCLES, _BLOCK_CYCLES = 800, 3000
_LAUNCH_MS = 0.0035
_BANDWIDTH_SHARE = 0.8  # of the nominal: taken, not fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTiling:
    """One way to compute a problem, and what it takes.

    Attributes:
        problem: of two spatial dimensions, forward or backward data.
        tiles, filters: of a warp.
        warps_t, warps_k, warps_c: of a block, along tiles, filters and channels; each is four, one a row of places.
        rows, cols: of tiles of an image, in a block.
        stages: buffers.
    """

    problem: ProblemDescription
    tiles: int
    filters: int
    warps_t: int
    warps_k: int
    warps_c: int
    rows: int
    cols: int
    stages: int

    @staticmethod
    def of(problem: ProblemDescription, config: Mapping[str, Any]) -> FusedTiling:
        """The tiling that a configuration names, or those of a table of them."""
        return FusedTiling(problem=problem, **config)

    @property
    def source(self) -> TensorDescriptor:
        """The images that filters slide over."""
        return self.problem.y if self.problem.direction is Direction.BACKWARD_DATA else self.problem.x

    @property
    def pads(self) -> tuple[int, int]:
        """Rows and columns before the image that the first tile begins."""
        pad_top, pad_left = self.problem.conv.pad_before
        if self.problem.direction is Direction.BACKWARD_DATA:
            return 2 - pad_top, 2 - pad_left
        return pad_top, pad_left

    @property
    def channels(self) -> int:
        """Summed over, of a group."""
        return self.source.shape[1] // self.problem.groups

    @property
    def results(self) -> int:
        """Channels of the result, of a group."""
        return self.problem.output.shape[1] // self.problem.groups

    @property
    def is_last(self) -> bool:
        """Whether channels are last."""
        return self.source.layout.channels_last

    @property
    def vector(self) -> int:
        """Channels copied at once."""
        return 4 if self.is_last and self.channels % 4 == 0 else 1

    @property
    def out_vector(self) -> int:
        """Elements stored at once: channels, or columns where channels come first."""
        if self.is_last:
            return math.gcd(4, self.results)
        return math.gcd(2, self.problem.output.shape[-1])

    @property
    def block_tiles(self) -> int:
        """Tiles of a block."""
        return self.tiles * self.warps_t

    @property
    def block_filters(self) -> int:
        """Filters of a block."""
        return self.filters * self.warps_k

    @property
    def images(self) -> int:
        """Of a block; 0 if the tiles are none."""
        return self.block_tiles // (self.rows * self.cols)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * _ROWS_OF_PLACES * self.warps_t * self.warps_k * self.warps_c

    @property
    def tile_grid(self) -> tuple[int, int, int]:
        """Blocks along images, down and across them."""
        n, _, height, width = self.problem.output.shape
        return ceil_div(n, self.images), ceil_div(height, 2 * self.rows), ceil_div(width, 2 * self.cols)

    @property
    def filter_blocks(self) -> int:
        """Blocks along a group's filters."""
        return ceil_div(self.results, self.block_filters)

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return math.prod(self.tile_grid) * self.filter_blocks * self.problem.groups

    @property
    def k_iterations(self) -> int:
        """Stages that a block goes through."""
        return ceil_div(self.channels, 8 * self.warps_c)

    @property
    def products(self) -> int:
        """Products of tf32 for one of float32."""
        return 1 if self.problem.math is MathMode.TF32 else 3

    @property
    def units(self) -> int:
        """Of transformed filters: 8 channels of 8 filters each."""
        return self.problem.groups * ceil_div(self.channels, 8) * ceil_div(self.results, 8)

    @property
    def filter_bytes(self) -> int:
        """Of all transformed filters."""
        return _UNIT_BYTES * self.units

    @property
    def pixels(self) -> int:
        """Of a block's patches."""
        return self.images * (2 * self.rows + 2) * (2 * self.cols + 2)

    @property
    def stage_filters(self) -> int:
        """Bytes of a stage's filters."""
        return self.warps_c * self.block_filters // 8 * _UNIT_BYTES

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        channels = 8 * self.warps_c
        by_channel = channels * (round_up(self.pixels - 4, 16) + 4)
        patches = self.pixels * (channels + 4) if self.is_last else by_channel
        return 4 * patches + self.stage_filters

    @property
    def shared_bytes(self) -> int:
        """Of a block: the table of pixels, and stages, which the exchanged rows overwrite."""
        tiles, filters = self.block_tiles, self.block_filters
        plane = tiles * (filters + 8) if self.is_last else filters * (tiles + 4)
        exchanged = 4 * 2 * _ROWS_OF_PLACES * self.warps_c * plane
        return round_up(4 * self.pixels, 16) + larger(self.stages * self.stage_bytes, exchanged)

    @property
    def registers(self) -> int:
        """Of a thread that spills nothing."""
        tiles, filters = self.tiles // 16, self.filters // 8
        factors = 16 * tiles + 4 * filters
        halves = 4 * tiles + 4 * filters if self.products == 3 else 0
        used = 16 * tiles * filters + factors + halves + _REGISTERS_BESIDES[self.products]
        return smaller(_MAX_REGISTERS, 8 * ceil_div(used, 8))

    def resident(self, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return resident_blocks(self.registers, self.threads, self.shared_bytes, SmLimits.of(device))

    def estimate_ms(self, device: Device) -> float:
        """Analytic milliseconds of both kernels.

        The filters' moves them; then the other multiplies, or moves tensors where that takes longer.
        """
        per_ms = _BANDWIDTH_SHARE * device.bandwidth_bytes_per_s / 1e3
        transformed = (self.filter_bytes + self.problem.w.bytes) / per_ms
        moved = (self.problem.bytes + self.filter_bytes) / per_ms
        return _LAUNCH_MS + transformed + larger(moved, 1e3 * self._cycles(device) / device.clock_hz)

    def _cycles(self, device: Device) -> float:
        """Of the multiprocessor that is busy longest: as many blocks at once as it holds, then what is left."""
        return cycles_of_waves(self.blocks, larger(1, self.resident(device)), device, self._cycles_of)

    def _cycles_of(self, blocks: int) -> float:
        """Of a multiprocessor for so many blocks at once."""
        tiles, filters, warps = self.tiles // 16, self.filters // 8, self.threads // 32
        scheduler = 4 * tiles * filters * self.products * _PRODUCT_CYCLES + (tiles + filters) * _FACTORS_CYCLES
        copies = self.pixels * 8 * self.warps_c / self.vector + self.stage_filters / 16
        busy = warps / 4 * scheduler + _COPY_CYCLES * copies / 32
        return self.k_iterations * (_STAGE_CYCLES / blocks + blocks * busy) + _BLOCK_CYCLES
