"""The child's side of the protocol: its parent, as it sees it, and where it begins. See protocol.py."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from miofind.errors import MiofindError, described
from miofind.process import child_logs
from miofind.process.protocol import Alive, Failed, Finished, Ready, Start

logger = logging.getLogger(__name__)

ENTRY = "import sys; from miofind.process.parent import main; main(sys.argv[1:])"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 1.0


class ParentGoneError(ConnectionError):
    """The parent has ended, or wants no more of this process."""


class Parent:
    """The other end of the connection, which threads may write to and one alone reads from."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._is_broken = False

    def ready(self) -> None:
        """Say that this process can serve; from now on Python collects garbage, but for what it has loaded.

        Raises:
            ParentGoneError: nobody hears it.
        """
        gc.freeze()
        gc.enable()
        self.send(Ready())

    def send(self, message: object) -> None:
        """Send one message; nothing where an earlier one was broken off in the middle.

        Raises:
            ParentGoneError: nobody hears it.
        """
        written = ForkingPickler.dumps(message)
        with self._lock:
            if self._is_broken:
                return
            self._is_broken = True
            try:
                self._connection.send_bytes(written)
            except ConnectionError as error:
                raise ParentGoneError(str(error)) from error
            self._is_broken = False

    def is_silent(self, seconds: float) -> bool:
        """Whether no message comes within so long; waits for one.

        Raises:
            ParentGoneError: there is none to come.
        """
        try:
            return not self._connection.poll(seconds)
        except (EOFError, ConnectionError) as error:
            raise ParentGoneError(str(error)) from error

    def receive(self) -> Any:
        """The next message.

        Raises:
            ParentGoneError: there is none to come.
        """
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise ParentGoneError(str(error)) from error


def main(arguments: list[str]) -> None:
    """Where a child begins.

    Args:
        arguments: the connection's file descriptor, the parent's process id.
    """
    end_with_parent(int(arguments[1]))
    os.dup2(2, 1)  # what solvers, kernels and compilers print must not stand among the parent's results
    parent = Parent(Connection(int(arguments[0])))
    with contextlib.suppress(ParentGoneError):
        start: Start = parent.receive()
        child_logs.hand_over(parent.send, start.log_level)
        if start.beat_s is not None:
            threading.Thread(target=_beat, args=(parent, start.beat_s), name="miofind-beat", daemon=True).start()
        parent.send(_served(parent, start))


def end_with_parent(parent: int) -> None:
    """End this process with its parent, however that ends: a race that nobody waits for may take minutes.

    On Linux the kernel sees to it, whatever this process is stuck in. Elsewhere a thread looks each second, which a
    candidate that never lets go of Python's interpreter stops.

    Args:
        parent: its process id, told by itself: this process may have another one by now.
    """
    if not _signalled_with_parent(signal.SIGKILL):
        threading.Thread(target=_watch, args=(parent,), name="miofind-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def run_told_of_parent(parent: int, arguments: list[str]) -> None:
    """Become another Python program, which Linux sends SIGTERM when its parent ends, however that ends.

    Args:
        parent: its process id, told by itself.
        arguments: the program's, without the interpreter.
    """
    _signalled_with_parent(signal.SIGTERM)
    if os.getppid() == parent:
        os.execv(sys.executable, [sys.executable, *arguments])


def _signalled_with_parent(number: signal.Signals) -> bool:
    """Have the kernel send this process a signal when the thread that started it ends; whether it can."""
    return sys.platform.startswith("linux") and not ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def _beat(parent: Parent, beat_s: float) -> None:
    """Say again and again that this process lives, as long as anybody hears it."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(beat_s)
            parent.send(Alive())


def _served(parent: Parent, start: Start) -> Finished | Failed:
    """Do what this process is there for; how that ended.

    Raises:
        ParentGoneError: nobody wants it any more.
    """
    try:
        serve, setup = ForkingPickler.loads(start.service)
        serve(parent, setup)
    except ParentGoneError:
        raise
    except Exception as error:  # CuPy's and a solver's own errors too: the parent is to read what ended this process
        logger.debug("a child process fails", exc_info=True)
        told = described(error, str)
        if isinstance(error, MiofindError):
            return Failed(told, error if _travels(error) else None)
        return Failed(f"{type(error).__name__}: {told}")
    return Finished()


def _travels(error: MiofindError) -> bool:
    """Whether the parent can read an error: a class of another package may not be made of what pickle gives it."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception as refused:  # whatever such a class raises
        logger.debug("the parent is told what %s says alone: %r", type(error).__name__, refused)
        return False
    return True
