"""Kernels that stage tiles in shared memory: what they are made for, and their analytic time, which orders candidates.

A block alternates between copying a stage and computing on it. Blocks that share a multiprocessor hide each other's
latency until its issue slots or its shared memory are busy all the time; a last wave that is partly full has fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from miofind.core.problem import DataType, Layout
from miofind.device.device import Device, Library, Place
from miofind.solver.occupancy import SmLimits, cycles_of_waves
from miofind.solver.solver import KernelKey
from miofind.solvers.common.correlation import round_up

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset({Layout.NCW, Layout.NWC, Layout.NCHW, Layout.NHWC}),
        min_sm=75,
    ),
)
"""What the tiled kernels are made for, in all directions."""

LIMITS = SmLimits(threads=1024, blocks=8, shared_bytes=96 << 10, schedulers=1)
"""What the kernels are compiled for, whatever the device: less than any has."""

_SCHEDULERS, _WARP = 4, 32


def plane_pitch(floats: int) -> int:
    """Floats between planes of shared memory, as plane_pitch in kernels_src/common/tile.cuh: 4 modulo 8."""
    return round_up(floats - 4, 8) + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TileWork:
    """What one launch does.

    Attributes:
        blocks: in the grid.
        resident: blocks that a multiprocessor holds at once.
        steps: stages that a block goes through.
        warps: of a block.
        products, reads, broadcasts, rounds: of a thread in one stage: multiply-adds; 16-byte reads of shared memory
            whose address differs from lane to lane, and whose address few lanes or all share; turns of the inner loop.
        copies: loads of a thread to fill a stage.
        converts: whether copies pass through registers, to be converted or transposed, rather than go on by themselves.
    """

    blocks: int
    resident: int
    steps: int
    warps: int
    products: float
    reads: float
    broadcasts: float
    rounds: float
    copies: float
    converts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRates:
    """What a kernel's work costs, in cycles; fitted to measurements of the kernel.

    Attributes:
        product, copy, round, step: issue slots of a multiply-add, of a copy with its address and tests, of a turn of
            the inner loop, and of a stage besides.
        read, broadcast: cycles of shared memory, in units of a read without conflicts.
        latency, copy_latency: wait for a stage, and for each copy of a thread on top.
        convert, convert_latency: what a copy that passes through registers adds to `copy` and `copy_latency`.
        block: start and end of a block.
    """

    product: float
    copy: float
    round: float
    step: float
    read: float
    broadcast: float
    latency: float
    copy_latency: float
    convert: float
    convert_latency: float
    block: float


def tile_ms(work: TileWork, rates: TileRates, device: Device) -> float:
    """Milliseconds that the multiprocessors take for a launch, device memory aside."""
    copy, copy_latency = rates.copy, rates.copy_latency
    if work.converts:
        copy, copy_latency = copy + rates.convert, copy_latency + rates.convert_latency
    slots = (
        work.products * rates.product
        + work.reads
        + work.broadcasts
        + work.copies * copy
        + work.rounds * rates.round
        + rates.step
    )
    shared = _SCHEDULERS * work.warps * (rates.read * work.reads + rates.broadcast * work.broadcasts)
    busy = max(work.warps / _SCHEDULERS * slots, shared)
    alone = max(1.0, work.warps / _SCHEDULERS) * slots + rates.latency + work.copies * copy_latency

    def wave_cycles(blocks: int) -> float:
        """Cycles of as many blocks on one multiprocessor."""
        return work.steps * max(blocks * busy, alone) + rates.block

    return 1e3 * cycles_of_waves(work.blocks, work.resident, device, wave_cycles) / device.clock_hz


def least_tile_ms(products: int, rates: TileRates, device: Device) -> float:
    """What tiles take at least whose threads do so many multiply-adds: the issue slots of these alone."""
    slots = products / _WARP * rates.product
    return 1e3 * slots / (_SCHEDULERS * device.sm_count * device.clock_hz)
