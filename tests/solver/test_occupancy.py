"""How many blocks a multiprocessor holds, and the registers that this leaves to each thread."""

from __future__ import annotations

import pytest

from miofind.device.device import Device
from miofind.solver.occupancy import SmLimits, cycles_of_waves, register_limit, resident_blocks

H200 = SmLimits.of(Device.virtual("90a"))


@pytest.mark.parametrize(
    ("blocks", "threads", "registers"),
    [(1, 32, 255), (1, 1024, 64), (2, 256, 128), (3, 128, 168), (5, 64, 168), (16, 32, 128), (9, 32, 168)],
)
def test_a_warps_registers_are_one_schedulers(blocks: int, threads: int, registers: int) -> None:
    """Five blocks of two warps are ten, three of them one scheduler's: 168, not the 204 that a fifth of all allows."""
    assert register_limit(blocks, threads) == registers


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("registers", [32, 72, 96, 128, 168, 248])
def test_blocks_that_are_resident_have_their_registers(registers: int, threads: int) -> None:
    if blocks := resident_blocks(registers, threads, 0, H200):
        assert register_limit(blocks, threads) >= registers


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [
        (32, 256, 0, 8),  # threads: 2048
        (32, 32, 0, 32),  # blocks
        (128, 128, 0, 4),  # registers: 65,536
        (121, 128, 0, 4),  # 121 registers are allocated as 128
        (168, 128, 0, 3),  # three warps a scheduler, where a pool of all registers had room for three blocks, too
        (96, 224, 0, 2),  # five warps a scheduler, twenty in all; a pool of all registers had room for three blocks
        (255, 544, 0, 0),  # more registers than there are
        (32, 128, 227 << 10, 1),  # all shared memory of a block
        (32, 128, 113 << 10, 2),  # 114 KiB with what is reserved, of 228
        (32, 128, (113 << 10) + 1, 1),
        (32, 128, 228 << 10, 0),
    ],
)
def test_the_scarcest_of_a_multiprocessor_bounds_its_blocks(
    registers: int, threads: int, shared_bytes: int, blocks: int
) -> None:
    assert resident_blocks(registers, threads, shared_bytes, H200) == blocks


@pytest.mark.parametrize(("arch", "blocks"), [("75", 4), ("80", 8), ("86", 6), ("89", 6), ("90a", 8)])
def test_devices_differ_in_threads(arch: str, blocks: int) -> None:
    assert resident_blocks(32, 256, 0, SmLimits.of(Device.virtual(arch))) == blocks


def test_limits_may_be_less_than_the_devices() -> None:
    few = SmLimits(threads=1024, blocks=8, shared_bytes=96 << 10, schedulers=1)
    assert resident_blocks(32, 32, 0, few) == 8
    assert resident_blocks(32, 256, 0, few) == 4
    assert resident_blocks(96, 224, 0, few) == 3


@pytest.mark.parametrize(("blocks", "cycles"), [(0, 0), (1, 10), (132, 10), (133, 20), (264, 20), (265, 30), (660, 50)])
def test_waves_hold_what_is_resident_and_the_last_what_is_left(blocks: int, cycles: int) -> None:
    device = Device.virtual("90a")
    assert device.sm_count == 132
    assert cycles_of_waves(blocks, 2, device, lambda held: 10.0 * held) == cycles
