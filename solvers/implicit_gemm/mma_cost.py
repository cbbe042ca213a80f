"""How long kernels_src/implicit_gemm/mma.cu takes for a configuration: a model of first principles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

from miofind.core.problem import DataType, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import Integers
from miofind.solver.occupancy import SmLimits, cycles_of_waves, resident_blocks
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.product import Product, products
from miofind.solvers.common.product_tiles import ProductTiling, alike, products_of_tf32, threads_of, tilings

Count = TypeVar("Count", int, Integers)
"""Of one configuration, or of many at once."""

# First principles, for an H200: mma.sync reaches 60 % of the peak of wgmma, in blocks of 16 x 8 x 16.
_MMA_SHARE = 0.6
LAUNCH_MS = 0.002
STEP_CYCLES = 450  # latency of a step where a block is alone: barrier, ldmatrix, products in a row
BLOCK_CYCLES = 600  # of a multiprocessor, with each block besides its steps
START_CYCLES = 2500  # first tiles from device memory, and the results
_COPY_CYCLES = 10  # issue slots of a copy with its address and tests
_SPLIT_CYCLES = 12  # of four float32 elements of a lane, into two tf32 each
_ELEMENT_CYCLES = 4  # each element of one that passes through registers, besides


def issued(blocks_m: Count, blocks_n: Count, k_major: tuple[bool, bool], itemsize: int, products: int) -> Count:
    """Instructions of a warp for 32 bytes of K.

    Args:
        blocks_m, blocks_n: of 16 rows and columns, of a warp's part of a tile; of one configuration, or of many.
        k_major: whether tiles of A and of B have rows along k.
        itemsize: of an element, in bytes.
        products: on tensor cores, for one of the problem's.
    """
    by_element = itemsize == 4  # no instruction transposes these
    a_reads, b_reads = (4 if by_element and not each else 1 for each in k_major)
    splits = _SPLIT_CYCLES * (blocks_m + blocks_n) if products > 1 else 0
    found: Count = blocks_m * a_reads + blocks_n * b_reads + splits + 2 * blocks_m * blocks_n * products
    return found


def copy_cycles(at_once: bool, vector: int) -> int:
    """Issue slots of the copy of a vector of elements."""
    return _COPY_CYCLES + (0 if at_once else _ELEMENT_CYCLES * vector)


def flops_a_cycle(problem: ProblemDescription, device: Device) -> float:
    """Operations of the problem's that a multiprocessor does."""
    math_mode = MathMode.TF32 if problem.x.dtype is DataType.FLOAT32 else problem.math
    peak = (
        device.peak_flops_per_s(problem.x.dtype, math_mode, tensor_cores=True) * _MMA_SHARE / products_of_tf32(problem)
    )
    return peak / device.sm_count / device.clock_hz


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What a launch's time is made of, however many splits there are, if there are several.

    Attributes:
        tiles, k_tiles: of the product.
        resident: blocks that a multiprocessor holds at once.
        step_cycles: that a multiprocessor is busy with a step of a block.
        copy_cycles: that a block takes at least for the copies of a step.
    """

    tiles: int
    k_tiles: int
    resident: int
    step_cycles: float
    copy_cycles: float

    def ms(self, splits: int, device: Device) -> float:
        """Milliseconds: arithmetic, copies and latency in waves of blocks."""
        steps = ceil_div(self.k_tiles, splits)
        busy = steps * self.step_cycles + BLOCK_CYCLES
        alone = steps * (max(busy / max(1, steps), self.copy_cycles) + STEP_CYCLES) + START_CYCLES
        blocks = self.tiles * splits
        cycles = cycles_of_waves(blocks, self.resident, device, lambda together: max(together * busy, alone))
        return float(1e3 * cycles / device.clock_hz)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """All launches of configurations that are tiled alike; bytes are the problem's, and of its output as float32."""

    launches: tuple[_Launch, ...]
    problem_bytes: int
    output_bytes: int

    def ms(self, splits: int, device: Device) -> float:
        """Milliseconds that all launches take, with a cold L2 cache."""
        busy_ms = sum(launch.ms(splits, device) for launch in self.launches)
        moved = self.problem_bytes
        if splits > 1:
            moved += 2 * splits * self.output_bytes  # partials are written and read
        moved_ms = 1e3 * moved / device.bandwidth_bytes_per_s
        count = len(self.launches) + int(splits > 1)
        return float(LAUNCH_MS * count + max(busy_ms, moved_ms) + 0.3 * min(busy_ms, moved_ms))


@functools.lru_cache(maxsize=1 << 12)
def work_of(problem: ProblemDescription, device: Device, config: Config) -> _Work:
    """What the configurations launch for which `alike` gave this one."""
    tiled = zip(products(problem), tilings(problem, config), strict=True)
    return _Work(
        launches=tuple(_launch(problem, device, config, product, tiling) for product, tiling in tiled),
        problem_bytes=problem.bytes,
        output_bytes=4 * problem.output.size,
    )


def _launch(
    problem: ProblemDescription, device: Device, config: Config, product: Product, tiling: ProductTiling
) -> _Launch:
    threads = threads_of(config)
    k_tile_bytes = config["tile_k"] * problem.x.dtype.itemsize
    step_flops = 2 * config["tile_m"] * config["tile_n"] * config["tile_k"]
    warps = threads // 32
    read_bytes = warps * (config["tile_m"] // config["warps_m"] + config["tile_n"] // config["warps_n"]) * k_tile_bytes
    copies = sum(warps * side.loads * copy_cycles(side.at_once, side.vector) / 4 for side in (tiling.a, tiling.b))
    blocks_m, blocks_n = (int(config[f"tile_{i}"] // config[f"warps_{i}"]) // 16 for i in "mn")
    k_major = product.a_k_major, product.b_k_major
    instructions = issued(blocks_m, blocks_n, k_major, problem.x.dtype.itemsize, products_of_tf32(problem))
    return _Launch(
        tiles=tiling.tiles,
        k_tiles=tiling.k_tiles,
        resident=max(1, resident_blocks(tiling.registers, threads, tiling.shared_bytes, SmLimits.of(device))),
        step_cycles=max(
            step_flops / flops_a_cycle(problem, device),
            read_bytes / 128,
            copies + warps / 4 * (8 + k_tile_bytes / 32 * instructions),
        ),
        copy_cycles=copies * 4 / warps,
    )


def estimate_ms(problem: ProblemDescription, device: Device, config: Config) -> float:
    """Milliseconds that all launches of a configuration take, with a cold L2 cache."""
    return work_of(problem, device, alike(problem.x.dtype.itemsize, config)).ms(config["splits"], device)
