"""Rows of dy streamed once for backward data of few channels: what kernels_src/few_channels/data_rows.cu computes.

And what it has in common with its twin for float32 (row_streaming_tf32.py). Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import larger, made, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.steps import Config, KernelStep, Pointer
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.divisor import divide_by
from miofind.solvers.few_channels.s2d_blocks import S2dRows, Strips
from miofind.solvers.few_channels.shapes import ROWS_SHAPE, images
from miofind.solvers.few_channels.solver import gradient_defines


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
    @functools.lru_cache(maxsize=256)  # configurations have few of these
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
class StreamedRows:
    """A configuration applied to a problem, as far as both kernels are alike.

    Attributes:
        height, width: s2d blocks.
        tiles: of columns of dy.
        in_vector: elements of dy that are loaded at once.
        steps: of the filters, 16 each, or 8 of float32.
        registers: of a thread that spills nothing.
        product_floats: of the rows of dx that a row of dy completes.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        strips: one a thread block.
    """

    height: S2dRows
    width: S2dRows
    tiles: ColumnTiles
    in_vector: int
    steps: int
    registers: int
    product_floats: int
    shared_bytes: int
    resident: int
    strips: Strips

    def step(
        self, source: str, problem: ProblemDescription, config: Config, *defines: tuple[str, str | int]
    ) -> KernelStep:
        """The step of a kernel of row_streaming.cuh, named as its source, with defines of its own."""
        pad_top, pad_left = problem.conv.pad_before
        shape = ROWS_SHAPE(
            **images(problem),
            pad_top=pad_top,
            pad_left=pad_left,
            first_row=self.height.first,
            end_row=self.height.end,
            first_column=self.width.first,
            end_column=self.width.end,
            first_out_column=self.tiles.base,
            strip_rows=self.strips.rows,
            image_strips=divide_by(self.strips.image_strips),
            column_tiles=divide_by(self.tiles.count),
        )
        return KernelStep(
            source=f"few_channels/{source}.cu",
            entry=f"few_channels_{source}",
            grid=(self.strips.count, 1, 1),
            block=(32 * warps(config), 1, 1),
            shared_bytes=self.shared_bytes,
            defines=(
                *gradient_defines(problem),
                ("COLUMNS", self.tiles.columns),
                ("COLUMN_STEP", self.tiles.step),
                *((name.upper(), config[name]) for name in ("blocks", "warps_m", "warps_n", "warps_k", "stages")),
                ("IN_VECTOR", self.in_vector),
                ("MIN_BLOCKS", self.resident),
                ("SHARED_BYTES", self.shared_bytes),
                ROWS_SHAPE.define,
                *defines,
            ),
            args=(*(Pointer(buffer=name) for name in ("y", "w", "x")), shape),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingCost:
    """What the time of a kernel of row_streaming.cuh is, beside what a row of dy costs.

    Attributes:
        begin_cycles: of a block before its first row.
        launch_ms: of the launch.
        exposed: share of the time to move all tensors, or to compute if that is shorter, that the other does not hide.
        rows_again, columns_again: of the time to read dy what rows and columns cost that several blocks read.
    """

    begin_cycles: float
    launch_ms: float
    exposed: float
    rows_again: float
    columns_again: float

    def ms(self, problem: ProblemDescription, device: Device, tiling: StreamedRows, row_cycles: float) -> float:
        """Of all rows, where one takes a block so many cycles."""
        strips, tiles = tiling.strips, tiling.tiles
        turns = ceil_div(strips.count, device.sm_count * tiling.resident)
        busy_ms = 1e3 * (turns * (self.begin_cycles + strips.steps * row_cycles)) / device.clock_hz
        columns_again = tiles.columns * tiles.count / problem.out_spatial[1] - 1
        again = self.rows_again * (strips.steps / strips.rows - 1) + self.columns_again * columns_again
        moved_ms = 1e3 * problem.bytes * (1 + again) / device.bandwidth_bytes_per_s
        return self.launch_ms + larger(moved_ms, busy_ms) + self.exposed * smaller(moved_ms, busy_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStreaming(StreamedRows):
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/data_rows.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        tap_blocks: of 8 taps of a filter row.
        held_registers: of a thread for accumulators and fragments of filters.
    """

    tap_blocks: int
    held_registers: int

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> RowStreaming:
        """Tiles of as many columns as the warps take, and strips that fill the device."""
        height, width, last = S2dRows.of(problem, 0), S2dRows.of(problem, 1), problem.y.layout.channels_last
        blocks, warps_m, warps_n, warps_k = (config[name] for name in ("blocks", "warps_m", "warps_n", "warps_k"))
        in_vector = math.gcd(8, problem.k if last else problem.out_spatial[1])
        aligned = 1 if last else in_vector
        tiles = made(lambda most: ColumnTiles.of(problem, width, most, aligned), 16 * blocks * warps_m)
        columns = tiles.columns
        steps, tap_blocks = ceil_div(problem.k, 16), ceil_div(problem.filter[1] * problem.c, 8)
        pitch = 32 * steps + 16 if last else 2 * columns + 16
        product_floats = completed_floats(problem, warps_k, columns)
        laid = round_up(2 * problem.w.size, 16) + 256 * steps * problem.filter[0] * tap_blocks
        staged = config["stages"] * pitch * (columns if last else 16 * steps)
        shared_bytes = staged + larger(8 * product_floats, laid)
        held = problem.filter[0] * ceil_div(tap_blocks, warps_n) * (4 * blocks + 2 * ceil_div(steps, warps_k))
        registers = round_up(held + 48, 8)
        limits = SmLimits.of(device)
        resident = smaller(config["resident"], resident_blocks(registers, 32 * warps(config), shared_bytes, limits))
        return RowStreaming(
            height=height,
            width=width,
            tiles=tiles,
            in_vector=in_vector,
            steps=steps,
            tap_blocks=tap_blocks,
            held_registers=held,
            registers=registers,
            product_floats=product_floats,
            shared_bytes=shared_bytes,
            resident=resident,
            strips=Strips.of(height, problem.n, tiles.count, device.sm_count * larger(1, resident)),
        )


def warps(config: Config) -> int:
    """Of a thread block."""
    count: int = config["warps_m"] * config["warps_n"] * config["warps_k"]
    return count


def completed_floats(problem: ProblemDescription, warps_k: int, columns: int) -> int:
    """Shared memory for the products of the rows of dx that a row of dy completes, of every slice of the filters."""
    rows = min(problem.conv.stride[0], problem.filter[0])
    return rows * warps_k * round_up(problem.filter[1] * problem.c, 2) * (round_up(columns - 12, 32) + 12)
