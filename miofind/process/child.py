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
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from miofind.process.forks import follow_forks
from miofind.process.interrupts import held_back

logger = logging.getLogger(__name__)

_GONE_S = 60.0

# The child's sys.path is the parent's, and so is its miofind, wherever the parent found it; then the entry is run.
_START = """
import importlib.util, json, sys
entry, sys.path[:], package = json.loads(sys.argv.pop(1))
spec = importlib.util.spec_from_file_location("miofind", package)
sys.modules["miofind"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["miofind"])
exec(entry)
"""
_PACKAGE = Path(__file__).parents[1] / "__init__.py"


class Line:
    """The child's end of the connection, which its threads may write to."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._is_broken = False

    def send(self, message: object) -> None:
        """Send one message; nothing where an earlier one was broken off in the middle."""
        written = ForkingPickler.dumps(message)
        with self._lock:
            if self._is_broken:
                return
            self._is_broken = True
            self._connection.send_bytes(written)
            self._is_broken = False

    def receive(self) -> Any:
        """The parent's next message; one thread alone asks."""
        return self._connection.recv()


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
                self._process = subprocess.Popen(
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

    def exit_code(self) -> int | None:
        """Exit code, minus the signal that ended it; waits for a process that is ending, None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=60)
        return None

    def interrupt(self) -> None:
        """Ask the process to end: SIGTERM."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End the process and its group; a kernel that never ends dies with it, which may take seconds."""
        self.connection.close()
        if self.is_alive:
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
