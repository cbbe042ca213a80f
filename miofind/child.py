"""A spawned Python process and the connection to it: started on one GPU, ended for good.

Knows nothing of what is said over the connection.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from miofind.forks import follow_forks
from miofind.interrupts import held_back

logger = logging.getLogger(__name__)

_GONE_S = 60.0


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
        # -c, not -m: what crosses must be of the module in both processes, never of __main__.
        command = [sys.executable, "-c", entry, str(theirs.fileno()), *arguments]
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
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
            return self._process.wait(timeout=5)
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
