"""How kernels_src/few_channels/data_wgmma.cu cuts dx into space-to-depth (s2d) blocks, tiles and strips.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import chosen, larger, smaller
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.few_channels.s2d_blocks import S2dRows, Strips

_ROWS = 64  # of a product
_OTHERS = 56  # registers for addresses and counters
_MOST = 256  # of a box, of the tensor's elements


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBoxes:
    """Boxes in which the copy engine takes a row of dy with channels last, as products read it.

    Attributes:
        columns: whose filters are side by side in a row of a box: those of an s2d block, or one.
        phases: columns of dy from one row of a box to the next, in units of `columns`; each phase has boxes of its own.
        lead: columns that are staged before the first that is met.
        swizzle_bytes: of a row of a box, within which it is swizzled.
        rows: of a box.
        count: boxes of a row of dy.
        bytes: of all, where each phase of columns begins where the swizzle repeats.
    """

    columns: int
    phases: int
    lead: int
    swizzle_bytes: int
    rows: int
    count: int
    bytes: int

    @staticmethod
    def of(problem: ProblemDescription, s2d_blocks: int, shifts: int, widen: int, before: int) -> RowBoxes:
        """Boxes of `s2d_blocks`, `widen` columns of dy each; the first meets `before` columns before it."""
        divides = (problem.k % 16 == 0) & (problem.out_spatial[1] % widen == 0)
        columns = chosen(divides, widen, 1)
        lead, phases, filters = -before % columns, widen // columns, columns * problem.k
        swizzle_bytes = chosen(filters <= 16, 32, chosen(filters <= 32, 64, 128))
        phase_rows = s2d_blocks + (lead + shifts - 1) // widen
        boxes = ceil_div(phase_rows * phases, _MOST)
        rows = chosen(boxes == 1, phase_rows, round_up(ceil_div(phase_rows, boxes), 8))
        parts = ceil_div(2 * filters, swizzle_bytes) * phases
        return RowBoxes(
            columns=columns,
            phases=phases,
            lead=lead,
            swizzle_bytes=swizzle_bytes,
            rows=rows,
            count=parts * boxes,
            bytes=parts * round_up(boxes * rows, 8) * swizzle_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWgmmaTiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    kernels_src/few_channels/data_wgmma.cu computes the same from the defines and refuses to compile where it differs.

    Attributes:
        height: s2d blocks of stride rows.
        left: columns before dx where s2d blocks begin: the padding, or one more, so that two elements side by side are
            aligned.
        s2d_offset, ahead: how far that is from where taps begin: columns of dx less than a stride, and columns of dy.
        out_vector: elements of an s2d block that are stored at once: two side by side if they are aligned.
        first_s2d, s2d_blocks: along a row, of `widen` strides; block I has pixels from I * widen * stride - left on.
        shifts: columns of dy that a s2d block meets.
        columns, tiles: s2d blocks of a tile, a multiple of 8; how many tiles a row has.
        in_vector: elements of an NCHW row of dy that are loaded at once.
        entry_rows, warpgroups: rows of the product of a row of s2d blocks; those of a team, 64 of these rows each.
        products: of 16 filters, that a row of dy takes.
        staged: columns of dy of a tile, of NCHW with some more.
        boxes: with channels last, how a team's row is copied.
        filter_bytes, stage_bytes, transposed_bytes: of a thread block's filters; of a team's row of dy, as it comes
            and, for NCHW, transposed.
        threads: of a block.
        registers: of a thread that spills nothing.
        shared_bytes: of a block.
        resident: blocks of a multiprocessor.
        strips, blocks: one a team; of the grid.
    """

    height: S2dRows
    left: int
    s2d_offset: int
    ahead: int
    out_vector: int
    first_s2d: int
    s2d_blocks: int
    shifts: int
    columns: int
    tiles: int
    in_vector: int
    entry_rows: int
    warpgroups: int
    products: int
    staged: int
    boxes: RowBoxes | None
    filter_bytes: int
    stage_bytes: int
    transposed_bytes: int
    threads: int
    registers: int
    shared_bytes: int
    resident: int
    strips: Strips
    blocks: int

    @staticmethod
    @functools.lru_cache(maxsize=16)  # whether it is valid is asked before its estimate
    def of(problem: ProblemDescription, config: Config, device: Device) -> DataWgmmaTiling:
        """Tiles of as equal as may be of up to `tile_w` s2d blocks, and strips that fill the device."""
        last, (stride_y, stride_x) = problem.y.layout.channels_last, problem.conv.stride
        height, widen, teams = S2dRows.of(problem, 0), config["widen"], config["teams"]
        pad, wide = problem.conv.pad_before[1], widen * stride_x
        pixel = problem.c if last else 1  # elements side by side
        even = (wide * pixel % 2 == 0) & (problem.spatial[1] * pixel % 2 == 0)
        left = chosen(even & (pad * pixel % 2 == 1 and _fits_a_column_more(problem)), pad + 1, pad)
        ahead, s2d_offset = divmod(left - pad, stride_x)
        first_s2d = left // wide
        s2d_blocks = (problem.spatial[1] - 1 + left) // wide + 1 - first_s2d
        columns = round_up(ceil_div(s2d_blocks, ceil_div(s2d_blocks, config["tile_w"])), 8)
        tiles = ceil_div(s2d_blocks, columns)
        shifts = ceil_div(problem.filter[1] + s2d_offset, stride_x) + widen - 1

        entry_rows, steps = stride_y * wide * problem.c, ceil_div(problem.k, 16)
        warpgroups, products = ceil_div(height.met * entry_rows, _ROWS), shifts * steps
        staged = (columns - 1) * widen + shifts
        if not last:
            staged = round_up(7 + staged, 8)
        spare_rows = _ROWS * warpgroups - height.met * entry_rows
        filter_bytes = 16 * (2 * products * (2 * height.met - 1) * entry_rows + spare_rows)
        raw_bytes = round_up(2 * problem.w.size, 16)
        boxes, transposed_bytes = None, 0
        if last:
            boxes = RowBoxes.of(problem, columns, shifts, widen, ahead + shifts - widen)
            stage_bytes = boxes.bytes
            before = round_up(filter_bytes, 8 * boxes.swizzle_bytes) + (config["stages"] - 1) * teams * stage_bytes
            barrier_bytes = 8 * config["stages"] * teams
            shared_bytes = before + larger(teams * stage_bytes, raw_bytes) + barrier_bytes
        else:
            stage_bytes = 256 * steps * (staged // 8 | 1)
            transposed_bytes = 32 * steps * (widen * ceil_div(staged, widen) | 1)
            before = filter_bytes + config["stages"] * teams * stage_bytes
            shared_bytes = before + larger(2 * teams * transposed_bytes, raw_bytes)

        threads, registers = 128 * warpgroups * teams, round_up(columns // 2 + _OTHERS, 8)
        resident = smaller(config["resident"], resident_blocks(registers, threads, shared_bytes, SmLimits.of(device)))
        strips = Strips.of(height, problem.n, tiles, device.sm_count * teams * larger(1, resident))
        return DataWgmmaTiling(
            height=height,
            left=left,
            s2d_offset=s2d_offset,
            ahead=ahead,
            out_vector=chosen(even & (left * pixel % 2 == 0), 2, 1),
            first_s2d=first_s2d,
            s2d_blocks=s2d_blocks,
            shifts=shifts,
            columns=columns,
            tiles=tiles,
            in_vector=math.gcd(8, problem.out_spatial[1]),
            entry_rows=entry_rows,
            warpgroups=warpgroups,
            products=products,
            staged=staged,
            boxes=boxes,
            filter_bytes=filter_bytes,
            stage_bytes=stage_bytes,
            transposed_bytes=transposed_bytes,
            threads=threads,
            registers=registers,
            shared_bytes=shared_bytes,
            resident=resident,
            strips=strips,
            blocks=ceil_div(strips.count, teams),
        )


def _fits_a_column_more(problem: ProblemDescription) -> bool:
    """Whether s2d blocks that begin a column earlier meet no more columns of dy."""
    taps, stride = problem.filter[1], problem.conv.stride[1]
    return stride == 1 or ceil_div(taps + 1, stride) == ceil_div(taps, stride)
