"""Processes that share a GPU: they make ready side by side, and measure one at a time while the others stand still.

Compilers take most of a network's time and no GPU. A process that measures holds the folder's lock and stops the
sessions of the others, with all that they have started: these may hold GPU memory, but run nothing then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 0.5
"""How long kernels that a stopped process had launched may still run."""

_LOCK = "lock"
_ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Turns:
    """The processes of one GPU, each the leader of a session.

    Attributes:
        folder: what they have in common, by GPU; None for a process that has the GPU to itself.
    """

    folder: Path | None = None

    def join(self) -> None:
        """Count this process among those that are stopped while another measures; before it uses the GPU."""
        if self.folder is not None:
            with self._first():
                (self.folder / str(os.getsid(0))).touch()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While the other processes stand still."""
        if self.folder is None:
            yield
            return
        with self._first():
            holder, others = self.folder / _ALONE, self._others(os.getsid(0))
            holder.write_text(str(os.getsid(0)))
            try:
                signal_sessions(signal.SIGSTOP, others)
                time.sleep(SETTLE_S)
                yield
            finally:
                signal_sessions(signal.SIGCONT, others)
                holder.unlink(missing_ok=True)

    def leave(self, session: int) -> None:
        """Forget a process that has ended, and wake the others where it was ended while it was alone."""
        if self.folder is None:
            return
        (self.folder / str(session)).unlink(missing_ok=True)
        holder = self.folder / _ALONE
        with contextlib.suppress(FileNotFoundError):
            if holder.read_text() == str(session):
                signal_sessions(signal.SIGCONT, self._others(session))
                holder.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        """While no other process is in such a block."""
        assert self.folder is not None
        with (self.folder / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # which a child that was forked meanwhile would keep

    def _others(self, session: int) -> set[int]:
        """The sessions that joined, but one."""
        assert self.folder is not None
        return {int(path.name) for path in self.folder.iterdir() if path.name.isdigit()} - {session}


def signal_sessions(number: signal.Signals, sessions: Iterable[int]) -> None:
    """Send all processes of sessions a signal, in whatever groups they are, and those that they start meanwhile."""
    wanted, told = {*sessions}, set[int]()
    while found := {*_processes(wanted)} - told:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        told |= found


def _processes(sessions: Collection[int]) -> Iterator[int]:
    """The ids of the processes of sessions."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(path.name)) in sessions:
                    yield int(path.name)
