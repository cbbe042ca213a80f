"""Processes that share a GPU: they make ready side by side, and measure one at a time while the others stand still.

Compilers take most of a network's time and no GPU. A process that measures holds the folder's lock and stops the
process groups of the others, which may hold GPU memory but run nothing then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 0.5
"""How long kernels that a stopped process had launched may still run."""

_LOCK = "lock"
_ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Turns:
    """The processes of one GPU, each the leader of its group.

    Attributes:
        folder: what they have in common, by GPU; None for a process that has the GPU to itself.
    """

    folder: Path | None = None

    def join(self) -> None:
        """Count this process among those that are stopped while another measures; before it uses the GPU."""
        with self.first():
            if self.folder is not None:
                (self.folder / str(os.getpgrp())).touch()

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """While no other process is in such a block, or alone; those that make ready go on."""
        if self.folder is None:
            yield
            return
        with (self.folder / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While the other processes stand still."""
        with self.first():
            if self.folder is None:
                yield
                return
            holder = self.folder / _ALONE
            holder.write_text(str(os.getpgrp()))
            try:
                self._signal(signal.SIGSTOP, but=os.getpgrp())
                time.sleep(SETTLE_S)
                yield
            finally:
                self._signal(signal.SIGCONT, but=os.getpgrp())
                holder.unlink(missing_ok=True)

    def leave(self, group: int) -> None:
        """Forget a process that has ended, and wake the others where it was ended while it was alone."""
        if self.folder is None:
            return
        (self.folder / str(group)).unlink(missing_ok=True)
        holder = self.folder / _ALONE
        with contextlib.suppress(FileNotFoundError):
            if holder.read_text() == str(group):
                self._signal(signal.SIGCONT, but=group)
                holder.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals, but: int) -> None:
        """Send the groups that joined a signal, except one."""
        assert self.folder is not None
        for path in self.folder.iterdir():
            if path.name.isdigit() and int(path.name) != but:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(path.name), number)
