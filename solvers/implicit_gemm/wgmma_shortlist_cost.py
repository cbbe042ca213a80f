"""Cost model of the shortlist for kernels_src/implicit_gemm/wgmma.cu: what `wgmma_cost.py` says of one, of all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from miofind.device.device import Device
from miofind.solver.columns import Integers, Numbers, ceil_div_each
from miofind.solvers.implicit_gemm.transpose import BANDWIDTH_SHARE
from miofind.solvers.implicit_gemm.wgmma_cost import (
    CLOCK_HZ,
    CLUSTER_K_TILE_CYCLES,
    CLUSTER_PARTIALS_BYTES,
    CLUSTER_TILE_CYCLES,
    CLUSTERED,
    COPY_CYCLES,
    COPY_ROW_CYCLES,
    EXPOSED,
    FIRST_MS,
    K_TILE_CYCLES,
    LATENCY_CYCLES,
    LAUNCH_MS,
    PARTIAL_MS,
    PARTIALS_BYTES,
    SCATTERED_TILE_CYCLES,
    SHARED_TILE_CYCLES,
    TILE_CYCLES,
    ZEROS_BYTES,
)
from miofind.solvers.implicit_gemm.wgmma_shortlist import Shortlist, shares_of_phases


def estimates_ms(shortlist: Shortlist, device: Device) -> Numbers:
    """Milliseconds of all launches of each tiling on a device, with a cold L2 cache."""
    product, splits = shortlist.product, shortlist.splits
    problem, byte_ms = product.problem, 1e3 / device.bandwidth_bytes_per_s
    ms = FIRST_MS + _busy_ms(shortlist, device) + EXPOSED * problem.bytes * byte_ms
    if product.transposes_filters:
        ms += LAUNCH_MS + 2 * problem.w.bytes * byte_ms / BANDWIDTH_SHARE
    moved_bytes = problem.output.size * (8 * splits + product.element_bytes)
    reduction_ms = LAUNCH_MS + np.maximum(moved_bytes * byte_ms, splits * PARTIAL_MS)
    found: Numbers = ms + np.where(splits > 1, reduction_ms, 0.0)
    return found


def _busy_ms(shortlist: Shortlist, device: Device) -> Numbers:
    """Time of the busiest multiprocessor: bound by each of its blocks alone, or by what its blocks share."""
    product, tiles, cluster_k = shortlist.product, shortlist.tiles, shortlist.cluster_k
    blocks, multiply, splits = shortlist.along_m * cluster_k, tiles.multiply, shortlist.splits
    processors = max(1, device.sm_count)
    placed = np.where(cluster_k > 2, int(CLUSTERED * processors), processors)
    at_once = np.maximum(1, placed * shortlist.blocks // blocks)

    multicasts = shortlist.along_m > 1
    copy = np.where(multicasts, tiles.rows_of_two, tiles.rows) * COPY_ROW_CYCLES
    arrive = (LATENCY_CYCLES + copy + 2 * multiply) / shortlist.stages
    load = np.maximum(np.maximum(copy, tiles.copies * COPY_CYCLES), arrive)
    wait = np.where(multicasts, K_TILE_CYCLES + CLUSTER_K_TILE_CYCLES, K_TILE_CYCLES)
    compute, busier = np.maximum(multiply, wait), np.maximum(copy, multiply)
    write, end = _end_cycles(shortlist)
    alone, shared = [], []
    for count, shares in zip(shortlist.phase_k_tiles, shares_of_phases(product, cluster_k), strict=True):
        k_tiles = count / (splits * shares)
        alone.append(np.maximum(k_tiles * load, k_tiles * compute + end))
        shared.append(k_tiles * busier + SHARED_TILE_CYCLES + write / 2)
    empty = len(product.phases) - len(alone)
    zeros = empty * product.element_bytes * tiles.tile_m * tiles.tile_n / ZEROS_BYTES
    alone[-1] += zeros
    shared[-1] += zeros
    together = [count * blocks for count in shortlist.phase_work_tiles]
    cycles = np.maximum(
        _makespans(shortlist.phase_work_tiles, alone, at_once), _makespans(together, shared, np.full(1, processors))
    )
    return 1e3 * cycles / CLOCK_HZ


def _end_cycles(shortlist: Shortlist) -> tuple[Numbers, Numbers]:
    """Cycles of a block that writes split-K partials, and all that a work tile takes besides its k-tiles."""
    product, tiles, cluster_k = shortlist.product, shortlist.tiles, shortlist.cluster_k
    blocks, work_tiles = shortlist.along_m * cluster_k, np.add.reduce(shortlist.phase_work_tiles)
    written = 4 * shortlist.splits * product.problem.output.size / (work_tiles * blocks) / PARTIALS_BYTES
    write = np.where(shortlist.splits > 1, written, 0.0)
    end = TILE_CYCLES + write + np.where(blocks > 1, CLUSTER_TILE_CYCLES, 0)
    if product.is_strided:
        end += SCATTERED_TILE_CYCLES
    end += np.where(cluster_k > 1, 4 * tiles.tile_m * tiles.tile_n / CLUSTER_PARTIALS_BYTES, 0.0)
    return write, end


def _makespans(items: Sequence[Integers], cycles: Sequence[Numbers], takers: Integers) -> Numbers:
    """Makespans in cycles: work tiles are dealt to takers in rounds, the first forwards and all others backwards.

    Args:
        items: work tiles of each phase, one phase after another.
        cycles: of one work tile of each phase.
        takers: multiprocessors, or clusters that run at once.
    """
    if len(items) == 1:
        span: Numbers = ceil_div_each(items[0], takers) * cycles[0]
        return span
    ends = [np.zeros_like(items[0]), *itertools.accumulate(items)]
    turns = np.stack([place % takers for end in ends for place in (end, end - 1)])
    some = np.concatenate((turns, takers - 1 - turns))
    taken = [(some < end) + np.maximum(0, (end - takers + some) // takers) for end in ends]
    of_phases = zip(itertools.pairwise(taken), cycles, strict=True)
    spans = np.add.reduce([(after - before) * each for (before, after), each in of_phases])
    most: Numbers = np.maximum(0.0, np.max(spans, axis=0))
    return most
