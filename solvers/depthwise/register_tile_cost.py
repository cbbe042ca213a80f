"""Cost model of depthwise kernels with register tiles: moving, computing, and what of both does not overlap.

The model knows no configurations: solvers say what a launch asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from miofind.device.device import Device
from miofind.solver.columns import chosen, larger, smaller
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.depthwise.register_tile import RegisterTileAxis, vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a launch asks of a device, for estimates.

    Attributes:
        blocks, threads: of the launch, and of a block.
        resident: blocks that a multiprocessor holds at once.
        instructions: of a thread.
        reads: of them, reads of shared memory.
        bytes: moved from and to device memory.
        waits: cycles of a block in which it computes nothing.
    """

    blocks: int
    threads: int
    resident: int
    instructions: float
    reads: float
    bytes: float
    waits: float = 0


# Fitted to 541 measurements of forward and backward data in float16 on an H200: half of the estimates of configurations
# within twice the best are off by less than a tenth, and the configuration ranked first takes 5 % more than the best.
_LAUNCH_MS = 0.0016
_READ = 2.3  # instructions that a read of shared memory is worth
_ALONE = 4.2  # warps of a scheduler that hide an instruction's latency: fewer take as long
_CLOCK_SHARE = 0.89  # of the nominal clock and of the nominal bandwidth
_BANDWIDTH_SHARE = 0.89
_SERIAL_SHARE, _FIRST_SERIAL_SHARE = 0.3, 0.52  # of the shorter of moving and computing: always, and once a launch


def estimate_ms(load: Load, device: Device) -> float:
    """Milliseconds of a launch: the longer of moving and computing, and what of the shorter does not overlap it."""
    blocks = ceil_div(load.blocks, device.sm_count)
    waves = larger(1.0, blocks / load.resident)
    warps = smaller(blocks, load.resident) * load.threads / 128
    instructions = load.instructions + _READ * load.reads
    cycles = larger(warps, _ALONE) * instructions + load.waits
    computing = 1e3 * waves * cycles / (_CLOCK_SHARE * device.clock_hz)
    busiest = blocks * device.sm_count / load.blocks  # over the mean
    moving = 1e3 * busiest * load.bytes / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    serial_share = _SERIAL_SHARE + _FIRST_SERIAL_SHARE / waves
    return _LAUNCH_MS + larger(computing, moving) + serial_share * smaller(computing, moving)


def row_reads(itemsize: int, axis: RegisterTileAxis) -> float:
    """Reads of shared memory for a row of a tile's window, about."""
    width = vector(itemsize, axis.size, axis.step)
    return axis.met / width + chosen(width == 1, 0.0, 1.5)
