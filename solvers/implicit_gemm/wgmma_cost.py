"""How long kernels_src/implicit_gemm/wgmma.cu takes for a tiling: a model, fitted to measurements of an H200."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from miofind.device.device import Device
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import Planes
from miofind.solvers.implicit_gemm.transpose import BANDWIDTH_SHARE
from miofind.solvers.implicit_gemm.wgmma_tiling import ROW_BLOCK, WgmmaTiling

# Of an H200, fitted to 293 problems with float16 and 8 likely configurations each, then to 38 problems with 20 each:
# root mean square of the error 11 % over the latter, 13 % over 135 other problems before.
# Bytes that a multiprocessor's memory moves a cycle, bytes of parts that it writes in one, of a cluster's that it adds,
# and of zeros that it writes; rows times columns times bytes of depth that it multiplies in one.
_CLOCK_HZ = 1.98e9
_SHARED_MEMORY_BYTES = 128
_PARTS_BYTES = 217
_SHARES_BYTES = 17
_ZEROS_BYTES = 48
_OPERATIONS = 4096
# Cycles: of a row of a copy, of issuing a copy, until a copy has come, of a step at least, of sharing columns in a
# cluster for a step; of a tile besides its steps, alone and where other blocks hide most of it; and in addition, in a
# cluster, and where threads store lines of strided backward data.
_COPY_ROW_CYCLES = 1.55
_COPY_CYCLES = 120
_LATENCY_CYCLES = 1350
_STEP_CYCLES = 198
_CLUSTER_STEP_CYCLES = 115
_TILE_CYCLES = 1200
_SHARED_TILE_CYCLES = 340
_CLUSTER_TILE_CYCLES = 440
_SCATTERED_TILE_CYCLES = 200
# Share of the multiprocessors where clusters of four and more find a place: of 4, 30 run at once, and of 8, 15.
_CLUSTERED = 0.91
# Of a launch with all that precedes the first product, of a second one, of adding one part of an element; the share of
# the time to move all tensors that products hide not.
_FIRST_MS = 0.00257
_LAUNCH_MS = 0.00022
_PART_MS = 9.4e-05
_EXPOSED = 0.59


def _copied(tiling: WgmmaTiling) -> tuple[float, int]:
    """Rows of copies that a block begins a step, each of one span, and copies of its busier warp."""
    product, tile_m, tile_n, tile_k = tiling.product, tiling.tile_m, tiling.tile_n, tiling.tile_k
    along_m, along_n, _ = tiling.cluster
    row_blocks, column_blocks = tile_m // ROW_BLOCK, tile_n // tiling.width
    if product.has_planes_of_depth:
        return tile_m + tile_n, 1
    if product.is_weights:
        rows = tile_m if product.planes is Planes.IN_ROWS else tile_k * row_blocks / along_n
        return rows + tile_k * column_blocks / along_m, max(row_blocks, column_blocks)
    across = tiling.has_pixel_columns
    if product.has_planes_of_pixels:
        pixels, copies = float(tile_k * column_blocks), column_blocks
    else:
        pixels, copies = tile_n if across else tile_m / along_n, 1
    if product.has_deep_filters:
        return pixels + (tile_m if across else tile_n / along_m), copies
    blocks = row_blocks if across else column_blocks
    return pixels + tile_k * blocks / along_m, max(copies, blocks)


def _busy_ms(tiling: WgmmaTiling, device: Device) -> float:
    """Time of the multiprocessor with most tiles: of its blocks one by one, or of what they share."""
    product, (along_m, _, shares), blocks = tiling.product, tiling.cluster, math.prod(tiling.cluster)
    tile_m, tile_n, splits, items = tiling.tile_m, tiling.tile_n, tiling.splits, tiling.items
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
    steps = [count / (splits * each) for count, each in zip(tiling.phase_steps, tiling.phase_shares, strict=True)]
    alone = [
        max(count * max(copy, copies * _COPY_CYCLES, arrive), count * max(multiply, wait) + end) for count in steps
    ]
    shared = [count * max(copy, multiply) + _SHARED_TILE_CYCLES + write / 2 for count in steps]
    zeros = (len(product.phases) - len(steps)) * product.element_bytes * tile_m * tile_n / _ZEROS_BYTES
    alone[-1] += zeros
    shared[-1] += zeros
    together = [count * blocks for count in tiling.phase_items]
    return 1e3 * max(_most(tiling.phase_items, alone, at_once), _most(together, shared, processors)) / _CLOCK_HZ


def _most(items: Sequence[int], cycles: Sequence[float], takers: int) -> float:
    """Cycles of who has most of those who take items by turns: in a first round forwards, in all others backwards.

    Args:
        items, cycles: how many items of each phase there are, one phase after another, and how long one takes.
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
    """Milliseconds that a product takes on a device as its launches do, with a cold L2 cache."""
    problem, byte_ms = tiling.product.problem, 1e3 / device.bandwidth_bytes_per_s
    ms = _FIRST_MS + _busy_ms(tiling, device) + _EXPOSED * problem.bytes * byte_ms
    if tiling.product.transposes_filters:
        ms += _LAUNCH_MS + 2 * problem.w.bytes * byte_ms / BANDWIDTH_SHARE
    if tiling.splits > 1:
        moved_bytes = problem.output.size * (8 * tiling.splits + tiling.product.element_bytes)
        ms += _LAUNCH_MS + max(moved_bytes * byte_ms, tiling.splits * _PART_MS)
    return ms
