"""How long kernels_src/implicit_gemm/mma.cu takes for a configuration: a model of first principles.

A configuration may be a table of many (`miofind.solver.columns`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import chosen, larger, smaller
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.product import products
from miofind.solvers.common.product_tiles import (
    BlockKind,
    Copies,
    ProductBlock,
    alike,
    block_kinds,
    threads_of,
    tiles_of,
)

# First principles, for an H200: mma.sync reaches 60 % of the peak of wgmma, in blocks of 16 x 8 x 16.
_MMA_SHARE = 0.6
_LAUNCH_MS = 0.002
_STEP_CYCLES = 450  # latency of a step where a block is alone: barrier, ldmatrix, products in a row
_BLOCK_CYCLES = 600  # of a multiprocessor, with each block besides its steps
_START_CYCLES = 2500  # first tiles from device memory, and the results
_COPY_CYCLES = 10  # issue slots of a copy with its address and tests
_SPLIT_CYCLES = 12  # of four float32 elements of a lane, into two tf32 each
_ELEMENT_CYCLES = 4  # each element of one that passes through registers, besides
# Of a multiprocessor, with each element of 2 or 4 bytes of strided backward data whose neighbours another phase writes:
# 350 configurations of 150 problems on an H200.
_SCATTERED_CYCLES = {2: 0.8, 4: 3.0}


def _issued(kind: BlockKind, config: Config) -> int:
    """Instructions of a warp for 32 bytes of K."""
    blocks_m, blocks_n = (config[f"tile_{i}"] // config[f"warps_{i}"] // 16 for i in "mn")
    by_element = kind.dtype.itemsize == 4  # no instruction transposes these
    a_reads, b_reads = (4 if by_element and not side.k_major else 1 for side in (kind.a, kind.b))
    splits = _SPLIT_CYCLES * (blocks_m + blocks_n) if kind.products > 1 else 0
    issued: int = blocks_m * a_reads + blocks_n * b_reads + splits + 2 * blocks_m * blocks_n * kind.products
    return issued


def _copy_cycles(copies: Copies) -> int:
    """Issue slots of the copy of a vector of elements."""
    return _COPY_CYCLES + (0 if copies.at_once else _ELEMENT_CYCLES * copies.vector)


def _flops_a_cycle(kind: BlockKind, device: Device) -> float:
    """Operations of the problem's that a multiprocessor does."""
    math_mode = MathMode.TF32 if kind.dtype is DataType.FLOAT32 else kind.math
    peak = device.peak_flops_per_s(kind.dtype, math_mode, tensor_cores=True) * _MMA_SHARE / kind.products
    return peak / device.sm_count / device.clock_hz


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCost:
    """What a launch's time is made of, however many blocks and steps there are.

    Attributes:
        resident: blocks that a multiprocessor holds at once.
        step_cycles: that a multiprocessor is busy with a step of a block.
        copy_cycles: that a block takes at least for the copies of a step.
    """

    resident: int
    step_cycles: float
    copy_cycles: float

    def ms(self, blocks: int, steps: int, device: Device) -> float:
        """Milliseconds of a launch of so many blocks: arithmetic, copies and latency in waves of blocks."""
        busy = steps * self.step_cycles + _BLOCK_CYCLES
        alone = steps * (larger(busy / larger(1, steps), self.copy_cycles) + _STEP_CYCLES) + _START_CYCLES
        cycles = cycles_of_waves(blocks, self.resident, device, lambda together: larger(together * busy, alone))
        return 1e3 * cycles / device.clock_hz


@functools.lru_cache(maxsize=1 << 12)  # few kinds of blocks serve all problems
def _block_cost(kind: BlockKind, device: Device, config: Config) -> _BlockCost:
    block, threads = ProductBlock.of(kind, config), threads_of(config)
    warps, k_tile_bytes = threads // 32, config["tile_k"] * kind.dtype.itemsize
    step_flops = 2 * config["tile_m"] * config["tile_n"] * config["tile_k"]
    read_bytes = warps * (config["tile_m"] // config["warps_m"] + config["tile_n"] // config["warps_n"]) * k_tile_bytes
    copies_of_a, copies_of_b = (warps * side.loads * _copy_cycles(side) / 4 for side in (block.a, block.b))
    copies = copies_of_a + copies_of_b
    issue = copies + warps / 4 * (8 + k_tile_bytes / 32 * _issued(kind, config))
    fitting = resident_blocks(block.registers, threads, block.shared_bytes, SmLimits.of(device))
    return _BlockCost(
        resident=larger(1, fitting),
        step_cycles=larger(larger(step_flops / _flops_a_cycle(kind, device), read_bytes / 128), issue),
        copy_cycles=copies * 4 / warps,
    )


def estimate_ms(problem: ProblemDescription, device: Device, config: Config) -> float:
    """Milliseconds that all launches of a configuration take, with a cold L2 cache."""
    splits, launches, busy_ms = config["splits"], products(problem), 0.0
    for kind, product in zip(block_kinds(problem), launches, strict=True):
        steps = ceil_div(ceil_div(product.k.count, config["tile_k"]), splits)
        cost = _block_cost(kind, device, alike(kind, config))
        busy_ms += cost.ms(tiles_of(problem, product, config) * splits, steps, device)
    # Partials are written and read.
    moved = problem.bytes + chosen(splits == 1, 0, 2 * splits * (4 * problem.output.size))
    moved_ms = 1e3 * moved / device.bandwidth_bytes_per_s
    is_scattered = problem.direction is Direction.BACKWARD_DATA and problem.conv.stride[-1] > 1
    if is_scattered and not problem.x.layout.channels_last:
        cycles = _SCATTERED_CYCLES[problem.x.dtype.itemsize] * problem.x.size
        busy_ms += 1e3 * cycles / (max(1, device.sm_count) * device.clock_hz)
    ms: float = (
        _LAUNCH_MS * (len(launches) + (splits > 1)) + larger(busy_ms, moved_ms) + 0.3 * smaller(busy_ms, moved_ms)
    )
    return ms
