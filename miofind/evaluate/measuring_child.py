"""The process that measures for an executor: receives jobs, evaluates them, and says beforehand what it does."""

from __future__ import annotations

from dataclasses import dataclass

from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device, Place
from miofind.device.memory import empty_pools, keep_pools
from miofind.errors import MeasurementError
from miofind.evaluate.evaluate import Job, Journal, evaluate
from miofind.evaluate.health import begin_check, complaint
from miofind.evaluate.warm_up import warm_up
from miofind.process.parent import Parent
from miofind.solver.registry import Registry

_IDLE_S = 0.1
"""How long memory is kept for a next job: what comes between two jobs of a tuning takes less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringSetup:
    """What a process is there for.

    Attributes:
        device: as this process numbers it; what else there is to know of it need not be asked again.
        registry: has the candidates' solvers.
    """

    device: Device
    registry: Registry


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job is finished; the process waits for the next one."""


def serve(parent: Parent, setup: MeasuringSetup) -> None:
    """Evaluate jobs on a device; each event of theirs is sent, and each entry of the journal before it is carried out.

    Raises:
        MeasurementError: the device does not work.
        MiofindError: it cannot be used, or a job cannot go on.
    """
    compiler, device = Compiler(BinaryCache()), setup.device
    begin_check(device, compiler)
    reason = complaint(device, compiler)
    if reason:
        raise MeasurementError(reason)
    if device.place is Place.CUDA:
        import cupy

        cupy.cuda.Device(device.index).use()
    parent.ready()
    keep_pools()
    warm_up(device, compiler, setup.registry, lambda: parent.is_silent(0.0))
    journal: Journal = parent.send
    while True:
        if parent.is_silent(_IDLE_S):
            empty_pools()
        job: Job = parent.receive()
        for event in evaluate(job, device, compiler, setup.registry, journal):
            parent.send(event)
        parent.send(JobDone())
