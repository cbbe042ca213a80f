"""A spawned Python process and the connection to it: started on one GPU, ended for good."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from miofind.process.forks import follow_forks
from miofind.process.interrupts import held_back
from miofind.process.threads import Helper

logger = logging.getLogger(__name__)

_ENDS_S = 60.0
_GONE_S = 60.0

# The child's sys.path is the parent's, and so is its miofind, wherever the parent found it; then the entry is run.
# What it imports stays: Python does not look for garbage among it until the child is ready.
_START = """
import gc, importlib.util, json, sys
gc.disable()
entry, sys.path[:], package = json.loads(sys.argv.pop(1))
spec = importlib.util.spec_from_file_location("miofind", package)
sys.modules["miofind"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["miofind"])
exec(entry)
"""
_PACKAGE = Path(__file__).parents[1] / "__init__.py"


class _Starter:
    """Starts processes in a thread that lasts as long as this process.

    On Linux the kernel ends a child with the thread that started it (`end_with_parent`), and callers' threads come and
    go.
    """

    def __init__(self) -> None:
        self._helper = Helper("miofind-starter")
        follow_forks(self)

    def leave_parent(self) -> None:
        """Have a thread of its own in a forked process."""
        self._helper = Helper("miofind-starter")

    def popen(self, command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        """As subprocess.Popen; where no thread can be had the caller's does it."""
        started: Future[subprocess.Popen[bytes]] = Future()

        def start() -> None:
            try:
                started.set_result(subprocess.Popen(command, **settings))
            except BaseException as error:  # who waits for it is to have it
                started.set_exception(error)

        if sys.is_finalizing() or not self._helper.submit(start):
            start()
        return started.result()


_starter = _Starter()


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a process ended.

    Attributes:
        code: its exit code, minus the signal that ended it; None where it hung up and did not end.
    """

    code: int | None

    @property
    def message(self) -> str:
        """In words."""
        name = ""
        if self.code is not None and self.code < 0:
            with contextlib.suppress(ValueError):
                name = f" ({signal.Signals(-self.code).name})"
        return f"ended with code {self.code}{name}"

    @property
    def is_from_outside(self) -> bool:
        """Whether it speaks of an operator or of the kernel's out-of-memory killer as much as of what it did."""
        return self.code in (-signal.SIGKILL, -signal.SIGTERM)


class Child:
    """A process that runs a piece of Python, spawned so that nothing of this one's CUDA or threads goes along.

    Args:
        entry: the code; finds the connection's file descriptor and `arguments` in sys.argv[1:].
        gpu: UUID of the one GPU or MIG instance that it sees; "" for all that this process sees.
        arguments: further words of its command line.

    Attributes:
        connection: this end.
    """

    def __init__(self, entry: str, gpu: str, arguments: list[str]) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = multiprocessing.connection.Pipe()
        path = _import_path()
        start = json.dumps([entry, path, os.fspath(_PACKAGE)])
        # -c, not -m: what crosses must be of the module in both processes, never of __main__.
        command = [sys.executable, *_import_flags(), "-c", _START, start, str(theirs.fileno()), *arguments]
        environment = dict(os.environ)
        # For what Python itself imports before it comes to _START: relative entries would be others by now.
        environment["PYTHONPATH"] = os.pathsep.join(filter(_is_plain, path))
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        # A process group of its own: Ctrl-C reaches the parent alone, which ends the child.
        try:
            with held_back():  # Popen would forget a process that it has begun, and nobody would wait for its end
                self._process = _starter.popen(
                    command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
                )
        except BaseException:
            if hasattr(self, "_process"):
                self.kill()
            raise
        finally:
            theirs.close()
        follow_forks(self)

    def leave_parent(self) -> None:
        """Be over in a forked process, whose parent it still serves."""
        self.connection.close()
        self._process.returncode = 0  # Popen's sign that there is nobody to wait for

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def exit(self) -> ChildExit:
        """How it ended; waits for a process that is ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ChildExit(self._process.wait(timeout=_ENDS_S))
        return ChildExit(None)

    def interrupt(self) -> None:
        """Ask the process to end: SIGTERM."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End the process and its group; a kernel that never ends dies with it, which may take seconds."""
        self.connection.close()
        if self._process.returncode is None:  # until its end was asked for, the number is its group's, dead or alive
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=_GONE_S)
        except subprocess.TimeoutExpired:
            logger.warning("child process %d was killed %.0f s ago and is not gone", self.pid, _GONE_S)


def _import_path() -> list[str]:
    """This process's sys.path as it stands; relative names of folders, of which "" is one, made absolute."""
    entries = []
    for entry in filter(lambda entry: isinstance(entry, str), sys.path):
        with contextlib.suppress(OSError):  # the current folder was removed: nothing can be imported from it
            # What is no file is left as it is: it may be a name that an import hook knows.
            entries.append(os.path.abspath(entry) if os.path.exists(entry or os.curdir) else entry)
    return entries


def _is_plain(entry: str) -> bool:
    return os.path.isabs(entry) and os.pathsep not in entry


def _import_flags() -> list[str]:
    """Options of this process that say where Python looks for modules; -P: not by itself in the current folder."""
    flags = sys.flags
    told = {"-I": flags.isolated, "-E": flags.ignore_environment, "-s": flags.no_user_site, "-S": flags.no_site}
    return ["-P", *(option for option, is_set in told.items() if is_set)]
