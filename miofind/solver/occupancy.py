"""Occupancy: how many blocks of a kernel a multiprocessor holds at once, and the registers that this leaves a thread.

Source: CUDA C++ Programming Guide, Compute Capabilities, technical specifications; registers are allocated to a warp in
units of 256, from the quarter of them that the warp's scheduler has. Numbers may be those of many configurations
(`columns.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from miofind.device.device import Device
from miofind.solver.columns import chosen, is_table, larger, smaller

RESERVED_SHARED_BYTES = 1 << 10
"""Shared memory that each block takes besides its own."""

_WARP = 32
_SCHEDULERS, _REGISTERS = 4, 1 << 16
_REGISTER_UNIT = 8  # registers of each of a warp's threads that are allocated together
_MAX_REGISTERS = 255
_SHARED_BYTES = 48 << 10  # that every device has
_THREADS, _THREADS_OF_SM = 1536, {75: 1024, 80: 2048, 90: 2048, 100: 2048, 103: 2048}
_BLOCKS, _BLOCKS_OF_SM = 32, {75: 16, 86: 16, 87: 16, 89: 24, 120: 24, 121: 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmLimits:
    """What a multiprocessor has for the blocks that it holds at once.

    Attributes:
        threads, blocks: at most.
        shared_bytes: with what each block has reserved.
        schedulers: that share the registers evenly.
    """

    threads: int
    blocks: int
    shared_bytes: int
    schedulers: int = _SCHEDULERS

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(device: Device) -> SmLimits:
        """Those of a device's compute capability; its largest block has all the shared memory."""
        return SmLimits(
            threads=_THREADS_OF_SM.get(device.sm, _THREADS),
            blocks=_BLOCKS_OF_SM.get(device.sm, _BLOCKS),
            shared_bytes=(device.shared_bytes or _SHARED_BYTES) + RESERVED_SHARED_BYTES,
        )


def resident_blocks(registers: int, threads: int, shared_bytes: int, limits: SmLimits) -> int:
    """Blocks that a multiprocessor holds at once; 0 if one alone exceeds a limit.

    Args:
        registers: of a thread.
        threads, shared_bytes: of a block.
        limits: of the multiprocessor.
    """
    of_warp = _WARP * -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT
    warps = limits.schedulers * (_REGISTERS // limits.schedulers // of_warp)
    by_registers = warps // -(-threads // _WARP)
    by_shared = limits.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES)
    return smaller(smaller(by_registers, by_shared), smaller(limits.threads // threads, limits.blocks))


def register_limit(blocks: int, threads: int) -> int:
    """Registers of a thread, at most, where a multiprocessor is to hold that many blocks of so many threads."""
    scheduler_warps = -(-blocks * -(-threads // _WARP) // _SCHEDULERS)
    registers = _REGISTERS // _SCHEDULERS // (_WARP * scheduler_warps)
    return smaller(_MAX_REGISTERS, registers // _REGISTER_UNIT * _REGISTER_UNIT)


def cycles_of_waves(blocks: int, resident: int, device: Device, cycles_of: Callable[[int], float]) -> float:
    """Cycles of the multiprocessor that is busy longest: waves of as many blocks as it holds, then what is left.

    Args:
        blocks: of the grid.
        resident: blocks that a multiprocessor holds at once.
        cycles_of: what a multiprocessor takes for so many blocks at once.
    """
    full, rest = divmod(blocks, device.sm_count * resident)
    last = -(-rest // device.sm_count)
    if is_table(blocks, resident):
        return full * cycles_of(resident) + chosen(rest > 0, cycles_of(larger(1, last)), 0.0)
    return full * cycles_of(resident) + (cycles_of(last) if rest else 0.0)
