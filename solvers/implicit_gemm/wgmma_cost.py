"""Cost model of kernels_src/implicit_gemm/wgmma.cu: milliseconds of a tiling, fitted to measurements of an H200."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from miofind.device.device import Device
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.wgmma_product import NchwTensors
from miofind.solvers.implicit_gemm.transpose import BANDWIDTH_SHARE
from miofind.solvers.implicit_gemm.wgmma_tiling import WGMMA_M, WgmmaTiling

# Where no other reason is given, a constant was fitted on an H200: to 293 float16 problems with 8 likely configurations
# each, then to 38 problems with 20 each. The error is 11 % over the latter (root mean square); it was 13 % over
# 135 problems that no fit had seen.
CLOCK_HZ = 1.98e9  # boost clock of an H200: all cycles below are cycles of it
# Rates of one multiprocessor, in bytes a cycle.
_SHARED_MEMORY_BYTES = 128  # shared memory: 32 banks of 4 bytes, by the hardware
PARTIALS_BYTES = 217  # split-K partials written to the workspace
CLUSTER_PARTIALS_BYTES = 17  # split-K partials added through the shared memory of a cluster
ZEROS_BYTES = 48  # zeros written where strided backward data has no taps
# M times N times bytes of K that wgmma multiplies in a cycle: 4 tensor cores of 512 multiply-adds of 2 bytes, by the
# hardware.
_OPERATIONS = 4096
# Cycles of a k-tile.
COPY_ROW_CYCLES = 1.55  # TMA moves one row of a box
COPY_CYCLES = 120  # a producer warp issues one TMA load
LATENCY_CYCLES = 1350  # from issuing a TMA load to its data, spread over the pipeline's stages
K_TILE_CYCLES = 198  # barriers and issue of wgmma, however small the tile
CLUSTER_K_TILE_CYCLES = 115  # more, where B is multicast to the blocks of a cluster
# Cycles of a work tile.
TILE_CYCLES = 1200  # prologue and epilogue of a block alone on its multiprocessor
SHARED_TILE_CYCLES = 340  # what remains of them where other blocks of the multiprocessor hide most
CLUSTER_TILE_CYCLES = 440  # more, where the blocks of a cluster wait for each other
SCATTERED_TILE_CYCLES = 200  # more, where threads store the rows of strided backward data one by one
# Share of the multiprocessors that clusters of four and more can occupy: an H200 of 132 runs 30 clusters of 4 at once
# (120 multiprocessors), 15 of 8.
CLUSTERED = 0.91
FIRST_MS = 0.00257  # from the first launch to its first wgmma
LAUNCH_MS = 0.00022  # a further launch, most of which programmatic dependent launch hides
PARTIAL_MS = 9.4e-05  # a thread of the reduction waits for one more split-K partial of its element
EXPOSED = 0.59  # share of the time to move all tensors once through memory that computation does not hide


def copied(tiling: WgmmaTiling) -> tuple[float, int]:
    """Rows of swizzle width that a block loads a k-tile, and TMA loads of the busier producer warp."""
    product, tile_m, tile_n, tile_k = tiling.product, tiling.tile_m, tiling.tile_n, tiling.tile_k
    along_m, along_n, _ = tiling.cluster
    row_blocks, column_blocks = tile_m // WGMMA_M, tile_n // tiling.block_n
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


def multiply_cycles(tiling: WgmmaTiling) -> float:
    """Of a k-tile: bound by the tensor cores, or by shared memory."""
    tile_m, tile_n, k_tile_bytes = tiling.tile_m, tiling.tile_n, tiling.product.element_bytes * tiling.tile_k
    read_bytes = tile_m // WGMMA_M * (WGMMA_M + tile_n) * k_tile_bytes
    moved_bytes = read_bytes + (tile_m + tile_n) * k_tile_bytes
    return max(tile_m * tile_n * k_tile_bytes / _OPERATIONS, moved_bytes / _SHARED_MEMORY_BYTES)


def _busy_ms(tiling: WgmmaTiling, device: Device) -> float:
    """Time of the busiest multiprocessor: bound by each of its blocks alone, or by what its blocks share."""
    product, (along_m, _, cluster_k), blocks = tiling.product, tiling.cluster, math.prod(tiling.cluster)
    tile_m, tile_n, splits, work_tiles = tiling.tile_m, tiling.tile_n, tiling.splits, tiling.work_tiles
    processors = max(1, device.sm_count)
    placed = int(CLUSTERED * processors) if cluster_k > 2 else processors
    at_once = max(1, placed * tiling.blocks // blocks)

    multiply = multiply_cycles(tiling)
    rows, copies = copied(tiling)
    copy = rows * COPY_ROW_CYCLES
    arrive = (LATENCY_CYCLES + copy + 2 * multiply) / tiling.stages
    wait = K_TILE_CYCLES + (CLUSTER_K_TILE_CYCLES if along_m > 1 and not product.is_weights else 0)
    write = 4 * splits * product.problem.output.size / (work_tiles * blocks) / PARTIALS_BYTES if splits > 1 else 0
    end = TILE_CYCLES + write + (CLUSTER_TILE_CYCLES if blocks > 1 else 0)
    end += SCATTERED_TILE_CYCLES if product.is_strided else 0
    if cluster_k > 1:
        end += 4 * tile_m * tile_n / CLUSTER_PARTIALS_BYTES
    k_tiles = [
        count / (splits * each) for count, each in zip(tiling.phase_k_tiles, tiling.phase_cluster_k, strict=True)
    ]
    alone = [
        max(count * max(copy, copies * COPY_CYCLES, arrive), count * max(multiply, wait) + end) for count in k_tiles
    ]
    shared = [count * max(copy, multiply) + SHARED_TILE_CYCLES + write / 2 for count in k_tiles]
    zeros = (len(product.phases) - len(k_tiles)) * product.element_bytes * tile_m * tile_n / ZEROS_BYTES
    alone[-1] += zeros
    shared[-1] += zeros
    together = [count * blocks for count in tiling.phase_work_tiles]
    return (
        1e3
        * max(_makespan(tiling.phase_work_tiles, alone, at_once), _makespan(together, shared, processors))
        / CLOCK_HZ
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
    ms = FIRST_MS + _busy_ms(tiling, device) + EXPOSED * problem.bytes * byte_ms
    if tiling.product.transposes_filters:
        ms += LAUNCH_MS + 2 * problem.w.bytes * byte_ms / BANDWIDTH_SHARE
    if tiling.splits > 1:
        moved_bytes = problem.output.size * (8 * tiling.splits + tiling.product.element_bytes)
        ms += LAUNCH_MS + max(moved_bytes * byte_ms, tiling.splits * PARTIAL_MS)
    return ms
