"""How many blocks a multiprocessor holds, and the registers that this leaves to each thread."""

from __future__ import annotations

import pytest

from miofind.device.device import Device
from miofind.solvers.common.residency import held_registers, resident_blocks


@pytest.mark.parametrize(
    ("blocks", "threads", "registers"),
    [(1, 32, 255), (1, 1024, 64), (2, 256, 128), (3, 128, 168), (5, 64, 168), (16, 32, 128), (9, 32, 168)],
)
def test_a_warps_registers_are_one_schedulers(blocks: int, threads: int, registers: int) -> None:
    """Five blocks of two warps are ten, three of them one scheduler's: 168, not the 204 that a fifth of all allows."""
    assert held_registers(blocks, threads) == registers


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("registers", [32, 72, 96, 128, 168, 248])
def test_blocks_that_are_resident_have_their_registers(registers: int, threads: int) -> None:
    blocks = resident_blocks(registers, threads, 0, Device.virtual("90a"))
    if blocks:
        assert held_registers(blocks, threads) >= registers
