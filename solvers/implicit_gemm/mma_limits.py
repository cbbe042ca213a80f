"""Which configurations of kernels_src/implicit_gemm/mma.cu can run: what a block, a thread and a grid have.

A configuration may be a table of many (`miofind.solver.columns`).
"""

from __future__ import annotations

import functools

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import larger, smaller
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.product import largest, products
from miofind.solvers.common.product_tiles import BlockKind, ProductBlock, alike, block_kinds, threads_of, tiles_of
from miofind.solvers.common.split_k import SplitK

K_BYTES = (64, 128)
"""Of a tile's row along k."""

MAX_WORKSPACE_BYTES = 1 << 30
_LEAST_TILE, _MAX_WARP_TILE = 16, 64 * 64
"""Rows or columns, and elements, of a warp's part of a tile."""

_MAX_LOADS = 16
"""Of a thread, in vectors."""

_MAX_REGISTERS, _REGISTERS_OF_SM = 255, 1 << 16
_SHARED_BYTES = 99 << 10


def is_valid(problem: ProblemDescription, device: Device, config: Config) -> bool:
    """Whether a configuration can run, and smaller tiles would not do."""
    most, splits = largest(problem), config["splits"]
    has_splits = splits <= ceil_div(most.k, config["tile_k"])
    has_partials = SplitK.of(problem, splits).bytes <= MAX_WORKSPACE_BYTES
    is_filled = (config["tile_m"] < 2 * max(_LEAST_TILE, most.m)) & (config["tile_n"] < 2 * max(_LEAST_TILE, most.n))
    can_run: bool = is_filled & ((splits == 1) | (has_splits & has_partials))
    for kind, product in zip(block_kinds(problem), products(problem), strict=True):
        fits = _fits(kind, device, alike(kind, config))
        can_run = can_run & fits & (tiles_of(problem, product, config) * splits <= MAX_ELEMENTS)
    return can_run


@functools.lru_cache(maxsize=1 << 12)  # few kinds of blocks serve all problems
def _fits(kind: BlockKind, device: Device, config: Config) -> bool:
    """Whether a launch is within what a block and a thread have, and a warp's part of a tile of some size."""
    block, threads, k_bytes = ProductBlock.of(kind, config), threads_of(config), config["tile_k"] * kind.dtype.itemsize
    warp_m, warp_n = config["tile_m"] // config["warps_m"], config["tile_n"] // config["warps_n"]
    has_warps = (smaller(warp_m, warp_n) >= _LEAST_TILE) & (warp_m * warp_n <= _MAX_WARP_TILE)
    stores = (block.gathers == 0) | (config["tile_n"] // block.out_vector <= threads)
    fits: bool = (
        ((k_bytes == K_BYTES[0]) | (k_bytes == K_BYTES[1]))
        & has_warps
        & (larger(block.a.row_vectors, block.b.row_vectors) <= threads)
        & (larger(block.a.loads, block.b.loads) <= _MAX_LOADS)
        & stores
        & (block.registers <= _MAX_REGISTERS)
        & (block.registers * threads <= _REGISTERS_OF_SM)
        & (block.shared_bytes <= (device.shared_bytes or _SHARED_BYTES))
    )
    return fits
