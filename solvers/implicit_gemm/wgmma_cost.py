"""Cost model of kernels_src/implicit_gemm/wgmma.cu: milliseconds of a tiling, fitted to measurements of an H200.

A tiling may be a table of many (`miofind.solver.columns`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from miofind.device.device import Device
from miofind.solver.columns import Each, chosen, is_table, larger
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.implicit_gemm.transpose import BANDWIDTH_SHARE
from miofind.solvers.implicit_gemm.wgmma_tiling import WgmmaTiling

# Where no other reason is given, a constant was fitted on an H200: to 293 float16 problems with 8 likely configurations
# each, then to 38 problems with 20 each. The error is 11 % over the latter (root mean square); it was 13 % over
# 135 problems that no fit had seen.
_CLOCK_HZ = 1.98e9  # boost clock of an H200: all cycles below are cycles of it
# Rates of one multiprocessor, in bytes a cycle.
_PARTIALS_BYTES = 217  # split-K partials written to the workspace
_CLUSTER_PARTIALS_BYTES = 17  # split-K partials added through the shared memory of a cluster
_ZEROS_BYTES = 48  # zeros written where strided backward data has no taps
# Cycles of a k-tile.
_COPY_ROW_CYCLES = 1.55  # TMA moves one row of a box
_COPY_CYCLES = 120  # a producer warp issues one TMA load
_LATENCY_CYCLES = 1350  # from issuing a TMA load to its data, spread over the pipeline's stages
_K_TILE_CYCLES = 198  # barriers and issue of wgmma, however small the tile
_CLUSTER_K_TILE_CYCLES = 115  # more, where B is multicast to the blocks of a cluster
# Cycles of a work tile.
_TILE_CYCLES = 1200  # prologue and epilogue of a block alone on its multiprocessor
_SHARED_TILE_CYCLES = 340  # what remains of them where other blocks of the multiprocessor hide most
_CLUSTER_TILE_CYCLES = 440  # more, where the blocks of a cluster wait for each other
_SCATTERED_TILE_CYCLES = 200  # more, where threads store the rows of strided backward data one by one
# Share of the multiprocessors that clusters of four and more can occupy: an H200 of 132 runs 30 clusters of 4 at once
# (120 multiprocessors), 15 of 8.
_CLUSTERED = 0.91
_FIRST_MS = 0.00257  # from the first launch to its first wgmma
_LAUNCH_MS = 0.00022  # a further launch, most of which programmatic dependent launch hides
_PARTIAL_MS = 9.4e-05  # a thread of the reduction waits for one more split-K partial of its element
_EXPOSED = 0.59  # share of the time to move all tensors once through memory that computation does not hide


def _end_cycles(tiling: WgmmaTiling) -> tuple[Each, Each]:
    """Cycles of a block that writes split-K partials, and all that a work tile takes besides its k-tiles."""
    product, tile, blocks = tiling.product, tiling.tile, tiling.cluster_blocks
    written = 4 * tiling.splits * product.problem.output.size / (tiling.work_tiles * blocks) / _PARTIALS_BYTES
    write = chosen(tiling.splits > 1, written, 0.0)
    end = _TILE_CYCLES + write + chosen(blocks > 1, _CLUSTER_TILE_CYCLES, 0)
    if product.is_strided:
        end = end + _SCATTERED_TILE_CYCLES
    return write, end + chosen(tiling.cluster_k > 1, 4 * tile.m * tile.n / _CLUSTER_PARTIALS_BYTES, 0.0)


def _busy_ms(tiling: WgmmaTiling, device: Device) -> Each:
    """Time of the busiest multiprocessor: bound by each of its blocks alone, or by what its blocks share."""
    product, tile, blocks, multiply = tiling.product, tiling.tile, tiling.cluster_blocks, tiling.tile.multiply_cycles
    processors = max(1, device.sm_count)
    placed = chosen(tiling.cluster_k > 2, int(_CLUSTERED * processors), processors)
    at_once = larger(1, placed * tiling.blocks // blocks)

    rows_of_a, rows_of_b = tile.rows
    copy = (rows_of_a / tiling.cluster_n + rows_of_b / tiling.cluster_m) * _COPY_ROW_CYCLES
    arrive = (_LATENCY_CYCLES + copy + 2 * multiply) / tiling.stages
    load = larger(larger(copy, tile.copies * _COPY_CYCLES), arrive)
    shares_b = (tiling.cluster_m > 1) & (not product.is_weights)
    compute = larger(multiply, chosen(shares_b, _K_TILE_CYCLES + _CLUSTER_K_TILE_CYCLES, _K_TILE_CYCLES))
    busier, (write, end) = larger(copy, multiply), _end_cycles(tiling)
    alone, shared = [], []
    for count, shares in zip(tiling.grid.phase_k_tiles, tiling.phase_cluster_k, strict=True):
        k_tiles = count / (tiling.splits * shares)
        alone.append(larger(k_tiles * load, k_tiles * compute + end))
        shared.append(k_tiles * busier + _SHARED_TILE_CYCLES + write / 2)
    if empty := len(product.phases) - len(alone):
        zeros = empty * product.element_bytes * tile.m * tile.n / _ZEROS_BYTES
        alone[-1], shared[-1] = alone[-1] + zeros, shared[-1] + zeros
    together = [count * blocks for count in tiling.phase_work_tiles]
    busiest = larger(_makespan(tiling.phase_work_tiles, alone, at_once), _makespan(together, shared, processors))
    return 1e3 * busiest / _CLOCK_HZ


def _makespan(items: Sequence[Each], cycles: Sequence[Each], takers: Each) -> Each:
    """Makespan in cycles: work tiles are dealt to takers in rounds, the first forwards and all others backwards.

    Args:
        items: work tiles of each phase, one phase after another.
        cycles: of one work tile of each phase.
        takers: multiprocessors, or clusters that run at once.
    """
    if len(items) == 1:
        return ceil_div(items[0], takers) * cycles[0]
    ends = [0 * items[0], *itertools.accumulate(items)]

    def span(taker: Each) -> Each:
        taken = [(taker < end) + larger(0, (end - takers + taker) // takers) for end in ends]
        return sum(
            (after - before) * each for (before, after), each in zip(itertools.pairwise(taken), cycles, strict=True)
        )

    turns = [place % takers for end in ends for place in (end, end - 1)]
    return _most(span, [*turns, *(takers - 1 - turn for turn in turns)])


def _most(function: Callable[[Each], Each], numbers: Sequence[Each]) -> Each:
    """The most that a function gives of one of the numbers."""
    if not is_table(*numbers):
        return max(map(function, set(numbers)))
    return np.max(function(np.stack(numbers)), axis=0)


def estimate_ms(tiling: WgmmaTiling, device: Device) -> Each:
    """Milliseconds of all launches of a tiling on a device, with a cold L2 cache."""
    product, splits = tiling.product, tiling.splits
    problem, byte_ms = product.problem, 1e3 / device.bandwidth_bytes_per_s
    ms = _FIRST_MS + _busy_ms(tiling, device) + _EXPOSED * problem.bytes * byte_ms
    if product.transposes_filters:
        ms = ms + (_LAUNCH_MS + 2 * problem.w.bytes * byte_ms / BANDWIDTH_SHARE)
    moved_bytes = problem.output.size * (8 * splits + product.element_bytes)
    reduction_ms = _LAUNCH_MS + larger(moved_bytes * byte_ms, splits * _PARTIAL_MS)
    return ms + chosen(splits > 1, reduction_ms, 0.0)
