"""How many blocks of a kernel a multiprocessor of a device holds at once, and what that leaves to each thread.

Pure arithmetic.
"""

from __future__ import annotations

from miofind.device.device import Device

_SCHEDULERS, _SCHEDULER_REGISTERS, _MOST_REGISTERS = 4, 1 << 14, 255
_RESERVED_BYTES = 1 << 10  # of shared memory, for each block
_SHARED_BYTES = 48 << 10  # that every device has
_MANY_THREADS, _THREADS = 2048, 1536
_WITH_MANY_THREADS = frozenset({80, 90, 100, 103})
_MOST, _FEWER = 32, {75: 16, 86: 16, 87: 16, 89: 24, 120: 24, 121: 24}  # blocks, by compute capability


def resident_blocks(registers: int, threads: int, shared_bytes: int, device: Device) -> int:
    """Blocks that a multiprocessor holds at once, 0 if its four schedulers lack registers for one.

    Args:
        registers: of a thread.
        threads, shared_bytes: of a block.
        device: the multiprocessor's.

    Source: CUDA C++ Programming Guide, Compute Capabilities, technical specifications.
    """
    warps = _SCHEDULERS * (_SCHEDULER_REGISTERS // (32 * registers))
    by_shared = ((device.shared_bytes or _SHARED_BYTES) - _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)
    by_threads = (_MANY_THREADS if device.sm in _WITH_MANY_THREADS else _THREADS) // threads
    return min(warps // (threads // 32), max(1, by_shared), by_threads, _FEWER.get(device.sm, _MOST))


def held_registers(blocks: int, threads: int) -> int:
    """Registers of a thread, at most, where a multiprocessor is to hold that many blocks: a warp's are one scheduler's.

    Source: as for `resident_blocks`.
    """
    scheduler_warps = -(-blocks * (threads // 32) // _SCHEDULERS)
    return min(_MOST_REGISTERS, _SCHEDULER_REGISTERS // (32 * scheduler_warps) // 8 * 8)
