"""The process that measures for an executor: receives solvers and jobs, evaluates these, and says what it does next."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device, Place
from miofind.errors import MiofindError, MissingLibraryError, described
from miofind.evaluate.evaluate import Journal, evaluate
from miofind.evaluate.health import complaint
from miofind.process import child_logs
from miofind.process.child import Line
from miofind.solver.registry import Registry

_ALONE_S = 900.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started and its device works."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job is finished."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The process cannot go on; it exits after this. `error` is what any other here would meet."""

    message: str
    error: MissingLibraryError | None = None


ENTRY = "import sys; from miofind.evaluate.entry import main; main(sys.argv[1:])"


def _serve(line: Line, device: Device, compiler: Compiler, registry: Registry) -> None:
    """Evaluate jobs until the parent hangs up."""
    journal: Journal = line.send
    while True:
        try:
            job = line.receive()
        except (EOFError, ConnectionError):
            return
        try:
            for event in evaluate(job, device, compiler, registry, journal):
                line.send(event)
        except ConnectionError:  # the parent has gone
            return
        except Exception as error:  # CuPy's and a solver's own errors too: the parent is to read what ended the child
            line.send(_broken(error))
            return
        line.send(Done())


def _broken(error: Exception) -> Broken:
    told = described(error, str)
    return Broken(
        told if isinstance(error, MiofindError) else f"{type(error).__name__}: {told}",
        error if isinstance(error, MissingLibraryError) else None,
    )


def end_with_parent() -> None:
    """End this process soon after its parent, however that ended: a race that nobody waits for may take minutes.

    A candidate that never lets go of Python's interpreter stops the thread that looks, and after _ALONE_S the process.
    """
    parent = os.getppid()
    nowhere = open(os.devnull, "w")  # noqa: SIM115, for the life of the process

    def watch() -> None:
        armed_at = -_ALONE_S
        while os.getppid() == parent:
            if time.monotonic() - armed_at > _ALONE_S / 10:
                faulthandler.dump_traceback_later(_ALONE_S, exit=True, file=nowhere)
                armed_at = time.monotonic()
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="miofind-parent", daemon=True).start()


def main(arguments: list[str]) -> None:
    """Entry of the child.

    Args:
        arguments: connection's file descriptor, device index (-1 for the CPU place), log level, modules to import.
    """
    end_with_parent()
    os.dup2(2, 1)  # what solvers and kernels print must not stand among the parent's results
    line = Line(Connection(int(arguments[0])))
    child_logs.hand_over(line.send, int(arguments[2]))
    for name in arguments[3:]:
        importlib.import_module(name)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        _work(line, int(arguments[1]))


def _work(line: Line, index: int) -> None:
    """Make the device of that index ready, and evaluate jobs on it."""
    compiler = Compiler(BinaryCache())
    try:
        registry: Registry = line.receive()
        device = Device.cpu() if index < 0 else Device.cuda(index)
        if device.place is Place.CUDA:
            import cupy

            cupy.cuda.Device(index).use()
        reason = complaint(device, compiler)
    except MiofindError as error:
        line.send(_broken(error))
        return
    if reason:
        line.send(Broken(reason))
        return
    line.send(Ready())
    _serve(line, device, compiler, registry)
