"""Rows of dy streamed once for backward data of few channels: what kernels_src/few_channels/data_rows.cu computes.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up

_BEGIN_ROWS = 3  # what a block's beginning costs, in rows


@dataclass(frozen=True, slots=True, kw_only=True)
class S2dRows:
    """Runs of `stride` pixels along an axis of dx: pixel p of s2d block I is I * stride + p - pad.

    It meets outputs I, I - 1, ... through taps p, p + stride, ...

    Attributes:
        first, end: of the s2d blocks that have pixels.
        met: outputs that an s2d block meets at most.
    """

    first: int
    end: int
    met: int

    @staticmethod
    def of(problem: ProblemDescription, axis: int) -> S2dRows:
        """Those along `axis` of a problem of two dimensions."""
        stride, pad = problem.conv.stride[axis], problem.conv.pad_before[axis]
        return S2dRows(
            first=pad // stride,
            end=(problem.spatial[axis] - 1 + pad) // stride + 1,
            met=ceil_div(problem.filter[axis], stride),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTiles:
    """Tiles of columns of dy that complete every s2d block of a row once.

    Attributes:
        base: of dy, from which the first begins.
        columns: of a tile, a multiple of 16.
        step: from one to the next, 0 if there is but one.
        count: how many.
    """

    base: int
    columns: int
    step: int
    count: int

    @staticmethod
    def of(problem: ProblemDescription, width: S2dRows, most: int, aligned: int) -> ColumnTiles:
        """Those of up to `most` columns that begin at multiples of `aligned`."""
        base = max(0, width.first - width.met + 1) // aligned * aligned
        met = max(1, min(width.end, problem.out_spatial[1]) - base)
        columns, overlap = round_up(met, 16), round_up(width.met - 1, aligned)
        if not columns > most > overlap:
            return ColumnTiles(base=base, columns=columns, step=0, count=1)
        count = ceil_div(met - overlap, most - overlap)
        step = round_up(ceil_div(met - overlap, count), aligned)
        return ColumnTiles(base=base, columns=round_up(step + overlap, 16), step=step, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStreaming:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/data_rows.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        height, width: s2d blocks.
        base, columns, column_step, column_tiles: of dy, from which tiles begin; of a tile, a multiple of 16; from one
            tile to the next, 0 if there is but one; how many tiles.
        in_vector: elements of dy that are loaded at once.
        steps, tap_blocks: of 16 filters, and of 8 taps of a filter row.
        held_registers: of a thread for accumulators and fragments of filters.
        registers: of a thread that spills nothing.
        products: floats of the rows that a row of dy completes.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        rows, strips: of s2d blocks of a strip; how many strips.
        strip_steps: rows of dy that a strip meets.
        blocks: of the grid.
    """

    height: S2dRows
    width: S2dRows
    base: int
    columns: int
    column_step: int
    column_tiles: int
    in_vector: int
    steps: int
    tap_blocks: int
    held_registers: int
    registers: int
    products: int
    shared_bytes: int
    resident: int
    rows: int
    strips: int
    strip_steps: int
    blocks: int

    @staticmethod
    def of(problem: ProblemDescription, config: Config, device: Device) -> RowStreaming:
        """Tiles of as many columns as the warps take, and strips that fill the device."""
        height, width, last = S2dRows.of(problem, 0), S2dRows.of(problem, 1), problem.y.layout.channels_last
        blocks, warps_m, warps_n, warps_k = (config[name] for name in ("blocks", "warps_m", "warps_n", "warps_k"))
        in_vector = math.gcd(8, problem.k if last else problem.out_spatial[1])
        tiles = ColumnTiles.of(problem, width, 16 * blocks * warps_m, 1 if last else in_vector)
        columns = tiles.columns
        steps, row_taps = ceil_div(problem.k, 16), problem.filter[1] * problem.c
        tap_blocks, done = ceil_div(row_taps, 8), min(problem.conv.stride[0], problem.filter[0])
        pitch = 32 * steps + 16 if last else 2 * columns + 16
        products = done * warps_k * round_up(row_taps, 2) * (round_up(columns - 12, 32) + 12)
        laid = round_up(2 * problem.w.size, 16) + 256 * steps * problem.filter[0] * tap_blocks
        shared_bytes = config["stages"] * pitch * (columns if last else 16 * steps) + max(8 * products, laid)
        held_registers = problem.filter[0] * ceil_div(tap_blocks, warps_n) * (4 * blocks + 2 * ceil_div(steps, warps_k))
        registers = round_up(held_registers + 48, 8)
        threads = 32 * warps_m * warps_n * warps_k
        resident = min(config["resident"], resident_blocks(registers, threads, shared_bytes, SmLimits.of(device)))
        rows = strip_rows(height, problem.n * tiles.count, device.sm_count * max(1, resident))
        strips = ceil_div(height.end - height.first, rows)
        return RowStreaming(
            height=height,
            width=width,
            base=tiles.base,
            columns=columns,
            column_step=tiles.step,
            column_tiles=tiles.count,
            in_vector=in_vector,
            steps=steps,
            tap_blocks=tap_blocks,
            held_registers=held_registers,
            registers=registers,
            products=products,
            shared_bytes=shared_bytes,
            resident=resident,
            rows=rows,
            strips=strips,
            strip_steps=rows + height.met - 1,
            blocks=problem.n * tiles.count * strips,
        )


def strip_rows(height: S2dRows, units: int, slots: int) -> int:
    """Rows of a strip that let `slots` blocks at a time finish soonest, of images and columns in `units`."""
    count = height.end - height.first

    def cost(rows: int) -> int:
        return ceil_div(units * ceil_div(count, rows), slots) * (rows + height.met - 1 + _BEGIN_ROWS)

    choices = [ceil_div(count, max(1, min(count, turns * slots // units))) for turns in range(1, 5)]
    return min(choices, key=cost)
