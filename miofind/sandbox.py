"""Executors: who carries out a job. In this process, or in a spawned child that a crashing candidate may kill.

The parent of a child needs no CUDA for it: a job crosses as values, and the child tells of a candidate before it
launches it, so that the one at fault is known when the child dies or falls silent.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from miofind.candidate import Candidate, Outcome, Status
from miofind.compiler import BinaryCache, Compiler
from miofind.device import Device, Place
from miofind.errors import MeasurementError, MiofindError
from miofind.evaluate import Event, Job, Racing, Started, evaluate
from miofind.solution import Config

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
CANDIDATE_TIMEOUT_S = 60.0
RACE_TIMEOUT_S = 600.0


class Executor(Protocol):
    """Carries out jobs one after another."""

    def run(self, job: Job) -> Iterator[Outcome]:
        """An outcome for every candidate that was started."""

    def close(self) -> None:
        """Release what the executor holds."""


class InProcess:
    """Carries out jobs in this process."""

    def __init__(self, device: Device, compiler: Compiler) -> None:
        self._device = device
        self._compiler = compiler

    def run(self, job: Job) -> Iterator[Outcome]:
        """An outcome for every candidate that was started.

        Raises:
            DeviceLostError: a candidate destroyed this process's CUDA context.
        """
        for event in evaluate(job, self._device, self._compiler):
            if isinstance(event, Outcome):
                yield event

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class _Done:
    """The child has finished a job."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """The child cannot go on; it exits after this."""

    message: str


class Isolated:
    """Carries out jobs in a child process, replaced whenever a candidate kills it or hangs.

    Args:
        device: what the child measures on.
        modules: modules the child imports first, for solvers registered by import.
        candidate_timeout_s: seconds after which a silent candidate is given up.
    """

    def __init__(
        self, device: Device, *, modules: tuple[str, ...] = (), candidate_timeout_s: float = CANDIDATE_TIMEOUT_S
    ) -> None:
        self._device = device
        self._modules = modules
        self._candidate_timeout_s = candidate_timeout_s
        self._child: _Child | None = None

    def run(self, job: Job) -> Iterator[Outcome]:
        """An outcome for every candidate that was started; a crash or a hang costs that candidate alone.

        Raises:
            MeasurementError: the child dies without any candidate to blame.
        """
        remaining = list(job.candidates)
        while remaining:
            watch = _Watch(self._candidate_timeout_s)
            for event in self._events(replace(job, candidates=tuple(remaining)), watch):
                if isinstance(event, Outcome):
                    remaining.remove(event.candidate)
                    yield event
            failure = watch.failure
            if failure is None:
                return
            if watch.culprit is None:
                raise MeasurementError(f"the measuring process ended before any candidate ran: {failure.message}")
            if watch.racing and len(remaining) > 1:  # any of them may be at fault: each by itself from here
                for candidate in remaining:
                    yield from self.run(replace(job, candidates=(candidate,)))
                return
            culprit = remaining[0] if watch.racing and remaining else watch.culprit
            if culprit in remaining:
                remaining.remove(culprit)
                yield replace(failure, candidate=culprit)

    def _events(self, job: Job, watch: _Watch) -> Iterator[Event]:
        """The child's events; what ended them early is in `watch`."""
        child = self._taken() or _Child(self._device, self._modules)
        try:
            child.connection.send(job)
            while True:
                if not child.connection.poll(watch.patience_s):
                    watch.fail(Status.TIMED_OUT, f"no answer for {watch.patience_s:.0f} s")
                    break
                message = child.connection.recv()
                if isinstance(message, _Done):
                    self._child = child
                    return
                if isinstance(message, _Broken):
                    watch.fail(Status.CRASHED, message.message)
                    break
                watch.see(message)
                yield message
        except (EOFError, OSError):
            watch.fail(Status.CRASHED, f"the measuring process ended with code {child.exit_code()}")
        finally:
            if self._child is not child:
                child.kill()

    def _taken(self) -> _Child | None:
        """The child of the last job, if it is there still."""
        child, self._child = self._child, None
        if child is None or child.is_alive:
            return child
        child.kill()
        return None

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Watch:
    """Who runs in the child, how long it may be silent, and what ended it."""

    def __init__(self, candidate_timeout_s: float) -> None:
        self._candidate_timeout_s = candidate_timeout_s
        self.culprit: Candidate | None = None
        self.racing = False
        self.patience_s = START_TIMEOUT_S
        self.failure: Outcome | None = None

    def see(self, event: Event) -> None:
        """Note an event."""
        if isinstance(event, Started):
            self.culprit = event.candidate
            self.patience_s = self._candidate_timeout_s
        elif isinstance(event, Racing):
            self.racing = True
            self.patience_s = max(RACE_TIMEOUT_S, self._candidate_timeout_s)

    def fail(self, status: Status, message: str) -> None:
        """Note what ended the child."""
        nobody = Candidate(network_config="", solver_id="", config=Config())
        self.failure = Outcome(candidate=self.culprit or nobody, status=status, message=message)


_ENTRY = "import sys; from miofind.sandbox import main; main(sys.argv[1:])"


class _Child:
    """A spawned process that evaluates jobs, and the connection to it."""

    def __init__(self, device: Device, modules: tuple[str, ...]) -> None:
        self.connection, theirs = multiprocessing.connection.Pipe()
        # -c, not -m: what crosses must be of miofind.sandbox in both processes, never of __main__.
        command = [sys.executable, "-c", _ENTRY, str(theirs.fileno()), str(device.index), *modules]
        environment = dict(os.environ)
        paths = [path for path in sys.path if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        # A process group of its own: Ctrl-C reaches the parent alone, which ends the child.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """Exit code, waiting for a process that is ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=5)
        return None

    def kill(self) -> None:
        """End the process at once."""
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _serve(connection: Connection[Any, Any], device: Device, compiler: Compiler) -> None:
    """Evaluate jobs until the parent hangs up."""
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            for event in evaluate(job, device, compiler):
                connection.send(event)
        except ConnectionError:  # the parent has gone
            return
        except Exception as error:  # CuPy's and a solver's own errors too: the parent is to read what ended the child
            told = str(error) if isinstance(error, MiofindError) else f"{type(error).__name__}: {error}"
            connection.send(_Broken(told))
            return
        connection.send(_Done())


def end_with_parent() -> None:
    """End this process soon after its parent, however that ended: a race that nobody waits for may take minutes."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="miofind-parent", daemon=True).start()


def main(arguments: list[str]) -> None:
    """Entry of the child: connection's file descriptor, device index (-1 for the CPU place), modules to import."""
    end_with_parent()
    os.dup2(2, 1)  # what solvers and kernels print must not stand among the parent's results
    connection: Connection[Any, Any] = Connection(int(arguments[0]))
    for name in arguments[2:]:
        importlib.import_module(name)
    index = int(arguments[1])
    device = Device.cpu() if index < 0 else Device.cuda(index)
    if device.place is Place.CUDA:
        import cupy

        cupy.cuda.Device(index).use()
    _serve(connection, device, Compiler(BinaryCache()))
