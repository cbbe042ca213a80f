"""Tilings of backward weights of grouped convolutions for tensor cores.

The same arithmetic as kernels_src/grouped/nhwc_weights.cu.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solver.columns import chosen, larger, mapped, smaller
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.packed_groups import (
    PackedGroups,
    aligned_units_of,
    odd_words,
    packed_groups_of_aligned_unit,
    raw_bytes,
)

_MANY_WARPS = 12
_MOST_SUMS = 80

SHARES = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
"""How many blocks share a unit's channels, and its filters, by a configuration's `shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeightsTiling:
    """A configuration applied to a problem: what the kernel's constants come to.

    Attributes:
        unit_c, unit_k: channels and filters of a unit, packs of groups that have multiples of 16 of both, or of a
            share.
        units, images: as configured.
        items: pairs of 16 filters and 16 channels of a unit that have a group in common.
        columns, span: outputs of a tile's rows, in segments of 8, and those that exist.
        segment_pairs: pairs of segments of 8 outputs.
        taps: rows and columns of the filter of a warp.
        rows: outputs of a tile.
        patch: input rows and columns staged, of an image.
        tap_blocks: blocks that share the filter's rows; 1 where the warps of a block do, unless they were too many.
        threads: of a block.
        shared_bytes: of a block.
        channel_tiles: blocks for all units.
        tiles: of rows, columns and images.
    """

    unit_c: int
    unit_k: int
    units: int
    images: int
    items: int
    columns: int
    span: int
    segment_pairs: int
    taps: tuple[int, int]
    rows: int
    patch: tuple[int, int]
    tap_blocks: int
    threads: int
    shared_bytes: int
    channel_tiles: int
    tiles: tuple[int, int, int]

    @property
    def tile_count(self) -> int:
        """Tiles that splits share."""
        return math.prod(self.tiles)

    @property
    def sums(self) -> int:
        """Registers of a thread that hold sums."""
        return 8 * math.prod(self.taps)

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> GroupedWeightsTiling:
        planar = problem.lifted(2)
        (filter_y, filter_x), (out_h, out_w), conv = planar.filter, planar.out_spatial, planar.conv
        packs, unit_packs = PackedGroups.of(problem), packed_groups_of_aligned_unit(problem)
        unit_c, unit_k, units = unit_packs * packs.c, unit_packs * packs.k, config["units"]
        shares_c, shares_k = (mapped(lambda shares, of=of: SHARES[shares][of], config["shares"]) for of in range(2))
        unit_c, unit_k = unit_c // shares_c, unit_k // shares_k
        items = mapped(functools.partial(_items, problem), unit_c, unit_k)
        columns, rows, images = smaller(config["columns"], round_up(out_w, 8)), config["rows"], config["images"]
        columns += chosen(columns // 8 * images % 2 > 0, 8, 0)
        span, warp_taps = smaller(columns, out_w), _rows_of_a_warp(filter_y, filter_x, items)
        shares = ceil_div(filter_y, warp_taps)
        is_spread = (units == 1) & (config["warps"] == 1) & (items * shares > _MANY_WARPS)
        tap_blocks = chosen(is_spread, shares, 1)
        patch_h = (rows - 1) * conv.stride[0] + (filter_y - 1) * conv.dilation[0] + 1
        patch_w = (span - 1) * conv.stride[1] + (filter_x - 1) * conv.dilation[1] + 1
        slots = round_up(patch_w, conv.stride[1])
        tiles = (ceil_div(out_h, rows), ceil_div(out_w, columns), ceil_div(problem.n, images))
        tile = images * patch_h * slots * odd_words(2 * units * unit_c)
        tile += images * rows * columns * odd_words(2 * units * unit_k)
        if planar.x.layout.channels_last:
            staged = config["stages"] * tile
        else:
            is_whole = (tiles[0] == 1) & (tiles[1] == 1)
            x = raw_bytes(planar.x, (patch_h, patch_w), -conv.pad_before[1], whole=is_whole)
            y = raw_bytes(planar.y, (rows, columns), 0, whole=is_whole)
            staged = tile + config["stages"] * images * units * (unit_c * x + unit_k * y)
        sums = 4 * config["warps"] * units * unit_k * _sum_pitch(filter_y * filter_x * problem.w.shape[1] // shares_c)
        return GroupedWeightsTiling(
            unit_c=unit_c,
            unit_k=unit_k,
            units=units,
            images=images,
            items=items,
            columns=columns,
            span=span,
            segment_pairs=columns // 8 * images // 2,
            taps=(warp_taps, filter_x),
            rows=rows,
            patch=(patch_h, patch_w),
            tap_blocks=tap_blocks,
            threads=32 * units * items * (shares // tap_blocks) * config["warps"],
            shared_bytes=larger(staged, sums),
            channel_tiles=ceil_div(aligned_units_of(problem), units) * config["shares"],
            tiles=tiles,
        )


def may_share(problem: ProblemDescription, shares: int) -> bool:
    """Whether a unit is one group whose items `shares` blocks can share."""
    c, k = problem.c // problem.groups, problem.k // problem.groups
    shares_c, shares_k = SHARES[shares]
    return shares == 1 or (c % (16 * shares_c) == 0 and k % (16 * shares_k) == 0)


def _rows_of_a_warp(filter_y: int, filter_x: int, items: int) -> int:
    """Rows of the filter whose sums leave registers for all else, and for as many warps as there are items."""
    return chosen(items > _MANY_WARPS, 1, max(1, min(filter_y, _MOST_SUMS // (8 * filter_x))))


def _items(problem: ProblemDescription, unit_c: int, unit_k: int) -> int:
    c, k = problem.c // problem.groups, problem.k // problem.groups

    def meet(first_c: int, first_k: int) -> bool:
        return first_c // c <= (first_k + 15) // k and first_k // k <= (first_c + 15) // c

    return sum(meet(at_c, at_k) for at_c in range(0, unit_c, 16) for at_k in range(0, unit_k, 16))


def _sum_pitch(floats: int) -> int:
    """Floats of shared memory of a filter's sums: 8 modulo 16, so that neighbouring filters are in other banks."""
    whole = round_up(floats, 4)
    return whole + (8 - whole) % 16
