"""The short list of ConvImplicitGemmMma: all of its configurations at once, as arrays for the cost model.

An array has a row a tile and, where numbers of splits matter, a column a split. What `mma_limits.py` and `mma_cost.py`
say of one configuration is said here of all, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import Integers, Numbers, Truths, ceil_div_each
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import EstimatedConfig
from miofind.solver.steps import Config
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.product import largest
from miofind.solvers.common.product_tiles import Side, Sides, copies_of, products_of_tf32, sides_of, threads_of
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.implicit_gemm.mma_cost import (
    BLOCK_CYCLES,
    LAUNCH_MS,
    START_CYCLES,
    STEP_CYCLES,
    copy_cycles,
    flops_a_cycle,
    issued,
)
from miofind.solvers.implicit_gemm.mma_limits import (
    K_BYTES,
    LEAST_TILE,
    MAX_LOADS,
    MAX_REGISTERS,
    MAX_WORKSPACE_BYTES,
    REGISTERS_OF_SM,
    shared_bytes_of,
)

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHORT_LIST = Config.product(
    {
        ("tile_m", "tile_n", "warps_m", "warps_n"): (
            (128, 128, 2, 2),
            (128, 256, 2, 4),
            (256, 128, 4, 2),
            (128, 64, 2, 2),
            (64, 128, 2, 2),
            (256, 64, 4, 1),
            (64, 256, 1, 4),
            (64, 64, 2, 2),
            (128, 32, 4, 1),
            (32, 128, 1, 4),
            (64, 32, 2, 2),
            (32, 64, 2, 2),
            (256, 32, 4, 1),
            (32, 256, 1, 4),
            (128, 16, 4, 1),
            (16, 128, 1, 4),
            (64, 16, 4, 1),
            (16, 64, 1, 4),
            (32, 32, 2, 2),
            (16, 16, 1, 1),
        ),
        ("tile_k", "stages"): ((16, 4), (32, 4), (64, 3)),
        "splits": SPLITS,
        "band": (8,),
    }
)


@functools.cache
def short_list(itemsize: int) -> tuple[Config, ...]:
    """Those that tile sums of such elements: a tile with each number of splits, then the next tile."""
    return tuple(config for config in _SHORT_LIST if config["tile_k"] * itemsize in K_BYTES)


def short_listed(problem: ProblemDescription, device: Device) -> Iterator[EstimatedConfig]:
    """What `Solver.ranked` gives of the short list, sooner, with the estimates."""
    configs = short_list(problem.x.dtype.itemsize)
    estimated = estimated_short_list(problem, device)
    places = np.flatnonzero(estimated.is_valid)
    times = estimated.ms.reshape(-1)[places]
    order = np.argsort(times, kind="stable")
    for place, ms in zip(places[order].tolist(), times[order].tolist(), strict=True):
        yield EstimatedConfig(configs[place], ms)


class Estimated(NamedTuple):
    """The short list for one problem, by tile and by number of splits.

    Attributes:
        ms: estimates, as `estimate_ms` of `mma_cost.py` has them; of no meaning where a configuration is not valid.
        is_valid: which of them can run.
    """

    ms: Numbers
    is_valid: Truths


def estimated_short_list(problem: ProblemDescription, device: Device) -> Estimated:
    """The short list for a problem that `ConvImplicitGemmMma` serves."""
    columns, splits = _columns(problem.x.dtype.itemsize), _SPLITS
    most, launches = largest(problem), _launches(problem, device)
    is_whole, partials_bytes = splits == 1, SplitK.of(problem, 1).bytes * splits
    fits = (columns.tile_m < 2 * max(LEAST_TILE, most.m)) & (columns.tile_n < 2 * max(LEAST_TILE, most.n))
    is_valid = fits[:, None] & (is_whole | (splits <= ceil_div_each(most.k, columns.tile_k)[:, None]))
    is_valid &= is_whole | (partials_bytes <= MAX_WORKSPACE_BYTES)
    busy_ms = np.zeros(is_valid.shape)
    for launch in launches:
        is_valid &= launch.common.fits & (launch.tiles[:, None] * splits <= MAX_ELEMENTS)
        busy_ms += launch.ms(device)
    moved = problem.bytes + np.where(is_whole, 0, 2 * splits * (4 * problem.output.size))
    moved_ms = 1e3 * moved / device.bandwidth_bytes_per_s
    starts_ms = LAUNCH_MS * (len(launches) + ~is_whole)
    ms = starts_ms + np.maximum(busy_ms, moved_ms) + 0.3 * np.minimum(busy_ms, moved_ms)
    return Estimated(ms, is_valid)


_SPLITS = np.array(SPLITS)


class _Columns(NamedTuple):
    """The tiles of the short list for elements of one size, by parameter."""

    configs: tuple[Config, ...]
    tile_m: Integers
    tile_n: Integers
    tile_k: Integers
    warps_m: Integers
    warps_n: Integers
    stages: Integers
    threads: Integers


@functools.cache
def _columns(itemsize: int) -> _Columns:
    tiles = short_list(itemsize)[:: len(SPLITS)]
    named = {name: np.array([tile[name] for tile in tiles]) for name in _Columns._fields[1:-1]}
    return _Columns(configs=tiles, **named, threads=np.array(list(map(threads_of, tiles))))


class _SideColumns(NamedTuple):
    """`Copies` of one operand, by tile."""

    row_vectors: Integers
    loads: Integers
    registers: Integers
    bytes: Integers


@functools.lru_cache(maxsize=512)
def _side_columns(side: Side) -> _SideColumns:
    copies = [copies_of(side, tile) for tile in _columns(side.itemsize).configs]
    return _SideColumns(*(np.array([getattr(each, name) for each in copies]) for name in _SideColumns._fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """All that launches' tilings depend on but how many tiles and k-tiles there are.

    Attributes:
        itemsize: of elements, in bytes.
        products: on tensor cores, for one of the problem's.
        flops_a_cycle: that a multiprocessor does.
        out_vector, float32_vector: elements stored at once of the problem's type, and of float32.
    """

    itemsize: int
    products: int
    flops_a_cycle: float
    a: Side
    b: Side
    out_vector: int
    float32_vector: int

    @staticmethod
    def of(problem: ProblemDescription, device: Device, sides: Sides) -> _Kind:
        return _Kind(
            itemsize=problem.x.dtype.itemsize,
            products=products_of_tf32(problem),
            flops_a_cycle=flops_a_cycle(problem, device),
            a=sides.a,
            b=sides.b,
            out_vector=sides.out_vector,
            float32_vector=sides.float32_vector,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Common:
    """What launches of one kind have in common: which tiles fit, and what a time is made of.

    Attributes:
        fits: whether a block and a thread have what a tile with so many splits takes.
        resident: blocks of it that a multiprocessor holds at once.
        step_cycles: of a tile, that a multiprocessor is busy with a step of a block.
        copy_cycles: that a block takes at least for the copies of a step.
    """

    fits: Truths
    resident: Integers
    step_cycles: Numbers
    copy_cycles: Numbers


@functools.lru_cache(maxsize=1024)
def _common(kind: _Kind, device: Device) -> _Common:
    columns, a, b = _columns(kind.itemsize), _side_columns(kind.a), _side_columns(kind.b)
    threads, registers = columns.threads, _registers(kind)
    fits = (np.maximum(a.row_vectors, b.row_vectors) <= threads) & (np.maximum(a.loads, b.loads) <= MAX_LOADS)
    fits &= (registers <= MAX_REGISTERS) & (registers * threads <= REGISTERS_OF_SM)
    gathers = (kind.itemsize == 2) & (_SPLITS == 1)
    pipeline_bytes = columns.stages * (a.bytes + b.bytes)
    gathered_bytes = 2 * columns.tile_m * (columns.tile_n + 8)
    shared_bytes = np.maximum(pipeline_bytes[:, None], np.where(gathers, gathered_bytes[:, None], 0))
    stores = ~gathers | (columns.tile_n // kind.out_vector <= threads)[:, None]
    of_tile: tuple[Any, Any, Any] = registers[:, None], threads[:, None], shared_bytes
    resident = resident_blocks(*of_tile, SmLimits.of(device))
    step_cycles, copy_cycles = _cycles(kind)
    return _Common(
        fits=fits[:, None] & stores & (shared_bytes <= shared_bytes_of(device)),
        resident=np.maximum(1, resident),
        step_cycles=step_cycles[:, None],
        copy_cycles=copy_cycles[:, None],
    )


def _registers(kind: _Kind) -> Integers:
    """Registers of a thread that spills nothing, by tile."""
    columns = _columns(kind.itemsize)
    warp_m, warp_n = columns.tile_m // columns.warps_m, columns.tile_n // columns.warps_n
    parts = 2 if kind.products > 1 else 1
    held = parts * (warp_m * warp_n // 32) + parts * ((warp_m + warp_n) // 4)
    copies = _side_columns(kind.a).registers + _side_columns(kind.b).registers
    registers: Integers = ceil_div_each(held + copies + 40, 8) * 8
    return registers


def _cycles(kind: _Kind) -> tuple[Numbers, Numbers]:
    """Of a step, by tile: that a multiprocessor is busy, and that a block takes at least for its copies."""
    columns = _columns(kind.itemsize)
    tile_m, tile_n, warps = columns.tile_m, columns.tile_n, columns.threads // 32
    warp_m, warp_n = tile_m // columns.warps_m, tile_n // columns.warps_n
    k_tile_bytes = columns.tile_k * kind.itemsize
    step_flops, read_bytes = 2 * tile_m * tile_n * columns.tile_k, warps * (warp_m + warp_n) * k_tile_bytes
    copies_of_a, copies_of_b = (
        warps * _side_columns(side).loads * copy_cycles(side.at_once, side.vector) / 4 for side in (kind.a, kind.b)
    )
    copies = copies_of_a + copies_of_b
    k_major = kind.a.k_major, kind.b.k_major
    instructions = issued(warp_m // 16, warp_n // 16, k_major, kind.itemsize, kind.products)
    issue = copies + warps / 4 * (8 + k_tile_bytes / 32 * instructions)
    busy = np.maximum(np.maximum(step_flops / kind.flops_a_cycle, read_bytes / 128), issue)
    return busy, copies * 4 / warps


class _Launch(NamedTuple):
    """A launch of each configuration.

    Attributes:
        tiles, k_tiles: of the product, by tile.
    """

    common: _Common
    tiles: Integers
    k_tiles: Integers

    def ms(self, device: Device) -> Numbers:
        """Milliseconds by tile and number of splits: arithmetic, copies and latency in waves of blocks."""
        common, resident = self.common, self.common.resident
        steps = ceil_div_each(self.k_tiles[:, None], _SPLITS)
        busy = steps * common.step_cycles + BLOCK_CYCLES
        step_cycles = np.maximum(busy / np.maximum(1, steps), common.copy_cycles) + STEP_CYCLES
        alone = steps * step_cycles + START_CYCLES
        full, rest = np.divmod(self.tiles[:, None] * _SPLITS, device.sm_count * resident)
        last = np.where(rest > 0, np.maximum(ceil_div_each(rest, device.sm_count) * busy, alone), 0.0)
        ms: Numbers = 1e3 * (full * np.maximum(resident * busy, alone) + last) / device.clock_hz
        return ms


def _launches(problem: ProblemDescription, device: Device) -> list[_Launch]:
    columns, found = _columns(problem.x.dtype.itemsize), []
    for sides in sides_of(problem):
        m, n, k = (index.count for index in (sides.product.m, sides.product.n, sides.product.k))
        found.append(
            _Launch(
                common=_common(_Kind.of(problem, device, sides), device),
                tiles=ceil_div_each(m, columns.tile_m) * ceil_div_each(n, columns.tile_n) * problem.groups,
                k_tiles=ceil_div_each(k, columns.tile_k),
            )
        )
    return found
