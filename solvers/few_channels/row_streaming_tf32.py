"""Rows of dy streamed once for backward data of few channels in float32.

What kernels_src/few_channels/data_rows_tf32.cu computes. Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import chosen, larger, made, mapped, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.product_tiles import products_of_tf32
from miofind.solvers.few_channels.row_streaming import ColumnTiles, StreamedRows, completed_floats, warps
from miofind.solvers.few_channels.s2d_blocks import S2dRows, Strips

_BASE_REGISTERS = 46
MAX_REGISTERS = 248
# Steps whose fragments of dy are in registers at once: by blocks, and where filters come from shared memory, too.
_CHUNKS, _CHUNK_WITH_READS = {1: 4, 2: 2, 3: 1, 4: 1}, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TapBlocks:
    """How a product's columns are taps: filter rows side by side where that takes fewer blocks of 8.

    Attributes:
        packed: whether they are; each row begins a block otherwise.
        groups: of filter rows.
        count: of blocks of a group.
    """

    packed: bool
    groups: int
    count: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # configurations have few of these
    def of(problem: ProblemDescription, warps: int) -> TapBlocks:
        """Those that `warps` warps share; accumulators of packed rows move up within one."""
        (rows, row_taps), stride = (problem.filter[0], problem.filter[1] * problem.c), problem.conv.stride[0]
        packed, apart = ceil_div(rows * round_up(row_taps, 2), 8), ceil_div(row_taps, 8)
        if packed < rows * apart and (warps == 1 or (stride >= rows and packed % warps == 0)):
            return TapBlocks(packed=True, groups=1, count=packed)
        return TapBlocks(packed=False, groups=rows, count=apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStreamingTf32(StreamedRows):
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/data_rows_tf32.cu computes the same from the defines and refuses to compile where it
    differs.

    Attributes:
        products: of tf32 for one of float32.
        taps: blocks of taps.
        chunk: steps that are summed before they are added to others.
        warp_blocks: fragments of taps of a warp in a step.
    """

    products: int
    taps: TapBlocks
    chunk: int
    warp_blocks: int

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> RowStreamingTf32:
        """Tiles of as many columns as the warps take, and strips that fill the device."""
        height, width, last = S2dRows.of(problem, 0), S2dRows.of(problem, 1), problem.y.layout.channels_last
        blocks, warps_m, warps_n, warps_k = (config[name] for name in ("blocks", "warps_m", "warps_n", "warps_k"))
        in_vector, tiles = _in_vector(problem), column_tiles(problem, blocks * warps_m)
        taps, steps = made(functools.partial(TapBlocks.of, problem), warps_n), round_up(ceil_div(problem.k, 8), warps_k)
        warp_steps, warp_blocks = steps // warps_k, taps.groups * ceil_div(taps.count, warps_n)
        products, product_floats = products_of_tf32(problem), completed_floats(problem, warps_k, tiles.columns)
        row_bytes = (32 * steps + 16) * tiles.columns if last else 32 * steps * (round_up(tiles.columns - 8, 32) + 8)
        is_shared = config["filters"] == "shared"
        laid = chosen(is_shared, 256 * steps * taps.groups * taps.count, 0)
        shared_bytes = config["stages"] * row_bytes + laid + 8 * product_floats
        held = chosen(is_shared, 0, (4 if products == 3 else 2) * warp_steps * warp_blocks)
        most = smaller(mapped(_CHUNKS.__getitem__, blocks), chosen(is_shared, _CHUNK_WITH_READS, warp_steps))

        def taken(chunk: int) -> tuple[int, int]:
            """Registers, and blocks of a multiprocessor."""
            registers = _registers(blocks, chunk, products, warp_blocks, held)
            fitting = resident_blocks(registers, 32 * warps(config), shared_bytes, SmLimits.of(device))
            return registers, smaller(config["resident"], fitting)

        chunk, (registers, resident) = 1, taken(1)
        for size in range(2, max(_CHUNKS.values()) + 1):
            needed, held_at_once = taken(size)
            fits = (held_at_once == config["resident"]) & (needed <= MAX_REGISTERS)
            takes = (size <= most) & (warp_steps % size == 0) & fits
            chunk, registers = chosen(takes, size, chunk), chosen(takes, needed, registers)
            resident = chosen(takes, held_at_once, resident)
        return RowStreamingTf32(
            height=height,
            width=width,
            tiles=tiles,
            in_vector=in_vector,
            products=products,
            taps=taps,
            steps=steps,
            chunk=chunk,
            warp_blocks=warp_blocks,
            registers=registers,
            product_floats=product_floats,
            shared_bytes=shared_bytes,
            resident=resident,
            strips=Strips.of(height, problem.n, tiles.count, device.sm_count * larger(1, resident)),
        )


def _in_vector(problem: ProblemDescription) -> int:
    return math.gcd(4, problem.k if problem.y.layout.channels_last else problem.out_spatial[1])


def column_tiles(problem: ProblemDescription, blocks: int) -> ColumnTiles:
    """Tiles of columns of dy for so many blocks of 16 outputs."""
    aligned = 1 if problem.y.layout.channels_last else _in_vector(problem)
    return made(lambda most: ColumnTiles.of(problem, S2dRows.of(problem, 1), most, aligned), 16 * blocks)


def _registers(blocks: int, chunk: int, products: int, warp_blocks: int, held: int) -> int:
    """Those of a thread: accumulators, filters that are held, fragments of dy and of filters at work, and the rest."""
    beside = chosen((products == 1) | (blocks >= 3), 1, 2)
    parts = 2 if products == 3 else 1
    at_work = 4 * parts * blocks * chunk + 2 * parts * chunk * beside + (4 * blocks * beside if products == 3 else 0)
    ahead = _read_ahead(chunk, products, held)
    return round_up(4 * blocks * warp_blocks + held + at_work + ahead + _BASE_REGISTERS, 8)


def _read_ahead(chunk: int, products: int, held: int) -> int:
    """Registers of what ptxas reads ahead, as 1,500 configurations for sm_90a tell where more would spill."""
    beside_held = 8 if products == 1 else chosen(chunk == 1, 56, 0)
    return chosen(held == 0, 16 if products == 1 else 24, beside_held)
