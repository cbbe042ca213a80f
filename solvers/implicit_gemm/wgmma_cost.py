"""Cost model of kernels_src/implicit_gemm/wgmma.cu: milliseconds of a tiling, fitted to measurements of an H200."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from miofind.device.device import Device
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import NchwTensors
from miofind.solvers.implicit_gemm.transpose import BANDWIDTH_SHARE
from miofind.solvers.implicit_gemm.wgmma_tiling import ROW_BLOCK, WgmmaTiling

# Of an H200, fitted to 293 problems with float16 and 8 likely configurations each, then to 38 problems with 20 each:
# root mean square of the error 11 % over the latter, 13 % over 135 other problems before.
# Of a multiprocessor, a cycle: bytes of shared memory moved, bytes of split-K partials written, bytes of a cluster's
# partials added, bytes of zeros written, and M times N times bytes of K multiplied.
_CLOCK_HZ = 1.98e9
_SHARED_MEMORY_BYTES = 128
_PARTS_BYTES = 217
_SHARES_BYTES = 17
_ZEROS_BYTES = 48
_OPERATIONS = 4096
# Cycles of: a row of a TMA box; issuing a TMA load; its latency; a k-tile at least; multicast of B, a k-tile; the
# prologue and epilogue of a work tile, alone and where other blocks hide most of them. In addition, of a work tile in a
# cluster, and where threads store rows of strided backward data.
_COPY_ROW_CYCLES = 1.55
_COPY_CYCLES = 120
_LATENCY_CYCLES = 1350
_STEP_CYCLES = 198
_CLUSTER_STEP_CYCLES = 115
_TILE_CYCLES = 1200
_SHARED_TILE_CYCLES = 340
_CLUSTER_TILE_CYCLES = 440
_SCATTERED_TILE_CYCLES = 200
# Share of the multiprocessors that clusters of four and more occupy: 30 clusters of 4 run at once, 15 of 8.
_CLUSTERED = 0.91
# Milliseconds of: the first launch up to the first wgmma; a further launch; adding one split-K partial of an element.
# Share of the time to move all tensors that computation does not hide.
_FIRST_MS = 0.00257
_LAUNCH_MS = 0.00022
_PART_MS = 9.4e-05
_EXPOSED = 0.59


def _copied(tiling: WgmmaTiling) -> tuple[float, int]:
    """Rows of swizzle width that a block loads a k-tile, and TMA loads of the busier producer warp."""
    product, tile_m, tile_n, tile_k = tiling.product, tiling.tile_m, tiling.tile_n, tiling.tile_k
    along_m, along_n, _ = tiling.cluster
    row_blocks, column_blocks = tile_m // ROW_BLOCK, tile_n // tiling.block_n
    if product.has_nchw_k:
        return tile_m + tile_n, 1
    if product.is_weights:
        rows = tile_m if product.nchw is NchwTensors.A else tile_k * row_blocks / along_n
        return rows + tile_k * column_blocks / along_m, max(row_blocks, column_blocks)
    across = tiling.has_pixels_as_n
    if product.has_nchw_n:
        pixels, copies = float(tile_k * column_blocks), column_blocks
    else:
        pixels, copies = tile_n if across else tile_m / along_n, 1
    if product.has_k_major_filters:
        return pixels + (tile_m if across else tile_n / along_m), copies
    blocks = row_blocks if across else column_blocks
    return pixels + tile_k * blocks / along_m, max(copies, blocks)


def _busy_ms(tiling: WgmmaTiling, device: Device) -> float:
    """Time of the busiest multiprocessor: bound by each of its blocks alone, or by what its blocks share."""
    product, (along_m, _, shares), blocks = tiling.product, tiling.cluster, math.prod(tiling.cluster)
    tile_m, tile_n, splits, items = tiling.tile_m, tiling.tile_n, tiling.splits, tiling.work_tiles
    depth_bytes = product.element_bytes * tiling.tile_k
    processors = max(1, device.sm_count)
    placed = int(_CLUSTERED * processors) if shares > 2 else processors
    at_once = max(1, placed * tiling.blocks // blocks)

    read_bytes = tile_m // ROW_BLOCK * (ROW_BLOCK + tile_n) * depth_bytes
    moved_bytes = read_bytes + (tile_m + tile_n) * depth_bytes
    multiply = max(tile_m * tile_n * depth_bytes / _OPERATIONS, moved_bytes / _SHARED_MEMORY_BYTES)
    rows, copies = _copied(tiling)
    copy = rows * _COPY_ROW_CYCLES
    arrive = (_LATENCY_CYCLES + copy + 2 * multiply) / tiling.stages
    wait = _STEP_CYCLES + (_CLUSTER_STEP_CYCLES if along_m > 1 and not product.is_weights else 0)
    write = 4 * splits * product.problem.output.size / (items * blocks) / _PARTS_BYTES if splits > 1 else 0
    end = _TILE_CYCLES + write + (_CLUSTER_TILE_CYCLES if blocks > 1 else 0)
    end += _SCATTERED_TILE_CYCLES if product.is_strided else 0
    if shares > 1:
        end += 4 * tile_m * tile_n / _SHARES_BYTES
    steps = [count / (splits * each) for count, each in zip(tiling.phase_k_tiles, tiling.phase_cluster_k, strict=True)]
    alone = [
        max(count * max(copy, copies * _COPY_CYCLES, arrive), count * max(multiply, wait) + end) for count in steps
    ]
    shared = [count * max(copy, multiply) + _SHARED_TILE_CYCLES + write / 2 for count in steps]
    zeros = (len(product.phases) - len(steps)) * product.element_bytes * tile_m * tile_n / _ZEROS_BYTES
    alone[-1] += zeros
    shared[-1] += zeros
    together = [count * blocks for count in tiling.phase_work_tiles]
    return (
        1e3
        * max(_makespan(tiling.phase_work_tiles, alone, at_once), _makespan(together, shared, processors))
        / _CLOCK_HZ
    )


def _makespan(items: Sequence[int], cycles: Sequence[float], takers: int) -> float:
    """Makespan in cycles: work tiles are dealt to takers in rounds, the first forwards and all others backwards.

    Args:
        items: work tiles of each phase, one phase after another.
        cycles: of one work tile of each phase.
        takers: multiprocessors, or clusters that run at once.
    """
    if len(items) == 1:
        return ceil_div(items[0], takers) * cycles[0]
    ends = [0, *itertools.accumulate(items)]
    turns = {end % takers for end in ends} | {(end - 1) % takers for end in ends}
    most = 0.0
    for taker in turns | {takers - 1 - turn for turn in turns}:
        taken = [(taker < end) + max(0, (end - takers + taker) // takers) for end in ends]
        most = max(most, sum((taken[i + 1] - taken[i]) * cycles[i] for i in range(len(items))))
    return most


def estimate_ms(tiling: WgmmaTiling, device: Device) -> float:
    """Milliseconds of all launches of a tiling on a device, with a cold L2 cache."""
    problem, byte_ms = tiling.product.problem, 1e3 / device.bandwidth_bytes_per_s
    ms = _FIRST_MS + _busy_ms(tiling, device) + _EXPOSED * problem.bytes * byte_ms
    if tiling.product.transposes_filters:
        ms += _LAUNCH_MS + 2 * problem.w.bytes * byte_ms / BANDWIDTH_SHARE
    if tiling.splits > 1:
        moved_bytes = problem.output.size * (8 * tiling.splits + tiling.product.element_bytes)
        ms += _LAUNCH_MS + max(moved_bytes * byte_ms, tiling.splits * _PART_MS)
    return ms
