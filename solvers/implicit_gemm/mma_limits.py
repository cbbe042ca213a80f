"""Which configurations of kernels_src/implicit_gemm/mma.cu can run: what a block, a thread and a grid have."""

from __future__ import annotations

import functools

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.steps import Config
from miofind.solvers.common.product import largest
from miofind.solvers.common.product_tiles import ProductTiling, threads_of, tilings

K_BYTES = (64, 128)
"""Of a tile's row along k."""

LEAST_TILE, MAX_WARP_TILE = 16, 64 * 64
"""Rows or columns, and elements, of a warp's part of a tile."""

MAX_LOADS = 16
"""Of a thread, in vectors."""

MAX_REGISTERS, REGISTERS_OF_SM = 255, 1 << 16
MAX_WORKSPACE_BYTES = 1 << 30
_SHARED_BYTES = 99 << 10


def shared_bytes_of(device: Device) -> int:
    """Shared memory that a block has."""
    return device.shared_bytes or _SHARED_BYTES


@functools.lru_cache(maxsize=1 << 12)  # a ranking asks for each of hundreds of configurations
def most_blocks(problem: ProblemDescription, device: Device, config: Config) -> int | None:
    """Blocks of the largest launch, for one split; None where blocks cannot run, or smaller ones would do.

    Args:
        config: that `alike` gave.
    """
    if config["tile_k"] * problem.x.dtype.itemsize not in K_BYTES:
        return None
    warp_m, warp_n = config["tile_m"] // config["warps_m"], config["tile_n"] // config["warps_n"]
    if warp_m < LEAST_TILE or warp_n < LEAST_TILE or warp_m * warp_n > MAX_WARP_TILE:
        return None
    most = largest(problem)
    if config["tile_m"] >= 2 * max(LEAST_TILE, most.m) or config["tile_n"] >= 2 * max(LEAST_TILE, most.n):
        return None
    launches = tilings(problem, config)
    return max(one.tiles for one in launches) if all(_fits(one, config, device) for one in launches) else None


def _fits(tiling: ProductTiling, config: Config, device: Device) -> bool:
    """Whether a launch is within what a block and a thread have."""
    threads = threads_of(config)
    sides = (tiling.a, tiling.b)
    if any(side.row_vectors > threads or side.loads > MAX_LOADS for side in sides):
        return False
    if tiling.gathers and config["tile_n"] // tiling.out_vector > threads:
        return False
    if tiling.registers > MAX_REGISTERS or tiling.registers * threads > REGISTERS_OF_SM:
        return False
    return tiling.shared_bytes <= shared_bytes_of(device)
