"""Imported by the processes of a crew: lets measuring go wrong there as CREW_FAULT says, once CREW_FOLDER allows it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miofind.candidate import Outcome
from miofind.errors import DatabaseError, NoDeviceError
from miofind.evaluate import DeviceLostError
from miofind.measure.verdict import Verdict
from miofind.sandbox.executors import InProcess

FAULT = os.environ["CREW_FAULT"]
FOLDER = Path(os.environ["CREW_FOLDER"])
HEAVIEST = os.environ["CREW_HEAVIEST"]

_measuring = InProcess.run
_jobs = 0


def wait_for(name: str, count: int = 1) -> None:
    """Wait until so many files of a name are in the folder."""
    deadline = time.monotonic() + 30
    while len(list(FOLDER.glob(f"{name}*"))) < count:
        assert time.monotonic() < deadline, f"{name} never came"
        time.sleep(0.01)


def _run(self: InProcess, job: Any) -> Iterator[Outcome | Verdict]:
    global _jobs
    _jobs += 1
    number = self._device.memory_bytes  # the tests number their devices so
    if FAULT == "meet" and _jobs == 1:
        (FOLDER / f"met{number}").touch()
        wait_for("met", 2)  # both devices are at work at one time
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
        (FOLDER / f"hangs{number}").touch()
        yield from _measuring(self, job)
        time.sleep(60)
    elif FAULT == "exit" or (FAULT == "exit at heaviest" and job.network_config == HEAVIEST):
        os._exit(7)
    elif FAULT == "exit once" and not (FOLDER / "exited").exists():
        (FOLDER / "exited").touch()
        os._exit(7)
    yield from _measuring(self, job)
    if FAULT.startswith("lose") and not FAULT.startswith(f"lose{number}") and _jobs == 1:
        wait_for("lost")


InProcess.run = _run  # type: ignore[method-assign]
