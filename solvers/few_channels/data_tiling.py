"""How kernels_src/few_channels/data.cu streams rows of dy past space-to-depth (s2d) blocks of dx.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import larger, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.few_channels.s2d_blocks import S2dBlocks, S2dRows, Strips


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/data.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        height, width: s2d blocks; along rows, groups of a stride's rows.
        s2d_blocks, s2d_tiles: of a tile, a multiple of 16; tiles of a row.
        columns: of dy that are staged.
        in_vector: elements of dy that are loaded at once.
        steps: of 16 filters.
        fragments: of the filters.
        held_registers: of a thread for accumulators and fragments.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        strips: one a thread block.
    """

    height: S2dRows
    width: S2dBlocks
    s2d_blocks: int
    s2d_tiles: int
    columns: int
    in_vector: int
    steps: int
    fragments: int
    held_registers: int
    registers: int
    shared_bytes: int
    resident: int
    strips: Strips

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> DataTiling:
        """Tiles of as many s2d blocks as the warps take, and strips that fill the device."""
        blocks, warps, stages = (config[name] for name in ("blocks", "warps", "stages"))
        height, width = S2dRows.of(problem, 0), S2dBlocks.of(problem, 1, problem.conv.stride[1])
        last, (taps_y, _) = problem.y.layout.channels_last, problem.filter
        s2d_tiles = ceil_div(width.count, 16 * blocks * warps)
        s2d_blocks = round_up(ceil_div(width.count, s2d_tiles), 16)
        s2d_tiles = ceil_div(width.count, s2d_blocks)
        columns = s2d_blocks + width.taps - 1
        steps, element_blocks = ceil_div(problem.k, 16), ceil_div(width.size * problem.c, 8)
        fragments = steps * width.taps * taps_y * element_blocks
        row_bytes = (32 * steps + 16) * columns if last else (2 * columns + 16) * 16 * steps
        raw = (stages - 1) * row_bytes + round_up(2 * problem.w.size, 16)
        shared_bytes = larger(stages * row_bytes, raw + 256 * fragments)
        held_registers = 4 * blocks * taps_y * element_blocks + 2 * fragments
        registers = round_up(held_registers + 4 * blocks + 44, 8)
        fitting = resident_blocks(registers, 32 * warps, shared_bytes, SmLimits.of(device))
        resident = smaller(config["resident"], fitting)
        return DataTiling(
            height=height,
            width=width,
            s2d_blocks=s2d_blocks,
            s2d_tiles=s2d_tiles,
            columns=columns,
            in_vector=math.gcd(8, problem.k if last else problem.out_spatial[1]),
            steps=steps,
            fragments=fragments,
            held_registers=held_registers,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=resident,
            strips=Strips.of(height, problem.n, s2d_tiles, device.sm_count * larger(1, resident)),
        )
