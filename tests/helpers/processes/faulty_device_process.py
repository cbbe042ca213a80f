"""Imported by the processes that tune on a device each: lets measuring go wrong there as DEVICE_FAULT says."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.processes.waiting import wait_until

from miofind.errors import DatabaseError, NoDeviceError
from miofind.evaluate.evaluate import DeviceLostError
from miofind.evaluate.executors import InProcess
from miofind.measure.verdict import RaceVerdict
from miofind.solver.candidate import Outcome
from miofind.tune.values import TuneFinished
from miofind.tune.worker import Worker

FAULT = os.environ["DEVICE_FAULT"]
FOLDER = Path(os.environ["DEVICE_FOLDER"])
HEAVIEST = os.environ["DEVICE_HEAVIEST"]

_measuring = InProcess.run
_jobs = 0
_ends = False


def _run(self: InProcess, job: Any) -> Iterator[Outcome | RaceVerdict]:
    global _jobs, _ends
    _jobs += 1
    number = self._device.memory_bytes  # the tests number their devices so
    if FAULT == "meet" and _jobs == 1:
        (FOLDER / f"met{number}").touch()
        wait_until(lambda: len(list(FOLDER.glob("met*"))) == 2, "both devices at work at one time")
    elif f"lose{number} at {_jobs}" == FAULT:
        (FOLDER / "lost").touch()
        raise DeviceLostError(f"device {number} is gone")
    elif FAULT == "heaviest is lost":
        if job.network_config == HEAVIEST:
            raise DeviceLostError("gone")
        time.sleep(0.05)
    elif FAULT == "vanish":
        raise NoDeviceError("CUDA device 0 does not exist")
    elif FAULT == "disk" and _jobs == 2:
        raise DatabaseError("the disk is full")
    elif FAULT == "hang":
        yield from _measuring(self, job)
        (FOLDER / f"hangs{number}").touch()
        time.sleep(3600)
    elif FAULT == "exit" or (FAULT == "exit at heaviest" and job.network_config == HEAVIEST):
        os._exit(7)
    elif FAULT == "stop once" and not (FOLDER / "stopped").exists():
        (FOLDER / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "exit once" and not (FOLDER / "exited").exists():
        (FOLDER / "exited").touch()
        os._exit(7)
    yield from _measuring(self, job)
    if FAULT == "exit after" and not (FOLDER / "exited").exists():
        (FOLDER / "exited").touch()
        _ends = True
        threading.Thread(target=_end_when_told, daemon=True).start()
    if FAULT.startswith("lose") and not FAULT.startswith(f"lose{number}") and _jobs == 1:
        wait_until((FOLDER / "lost").exists, "the other device's end")


def _end_when_told() -> None:
    """End this process as soon as its worker asks for the next task."""
    wait_until((FOLDER / "told").exists, "a result that was told", every_s=1e-3)
    os._exit(7)


def _told(self: Worker, *arguments: Any, **named: Any) -> None:
    _beginning(self, *arguments, **named)
    tell = self._tell

    def telling(event: Any) -> None:
        tell(event)
        if isinstance(event, TuneFinished) and _ends:
            (FOLDER / "told").touch()
            threading.Event().wait()  # for that end

    self._tell = telling


_beginning = Worker.__init__
Worker.__init__ = _told  # type: ignore[method-assign]
InProcess.run = _run  # type: ignore[method-assign]
