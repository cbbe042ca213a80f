"""The parent's side of the protocol: a child that serves this process. See protocol.py."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from miofind.process import child_logs
from miofind.process.child import Child, ChildExit
from miofind.process.parent import ENTRY, Parent
from miofind.process.protocol import Alive, Failed, Ready, Start

Setup = TypeVar("Setup")
IsWanted = Callable[[], bool]

START_TIMEOUT_S = 300.0
"""Of a child until it is ready: it may have libraries to load, and a device to make ready and to check."""

_LOOK_S = 0.25
_BEATS = 12


@dataclass(frozen=True, slots=True)
class Silence:
    """A child has said nothing for so many seconds, or nobody wants to know any more what it says."""

    seconds: float

    @property
    def message(self) -> str:
        """In words."""
        return f"was silent for {self.seconds:g} s"


End = ChildExit | Silence | Failed
"""Why a child is of no more use."""


def told(end: End, process: str) -> str:
    """How a child ended, in words: what it said itself, else what became of it, which goes by the name of `process`."""
    return end.message if isinstance(end, Failed) else f"{process} {end.message}"


class Service:
    """A child process that serves this one.

    Args:
        serve: a module's function, called in the child with a `Parent` and `setup`; the child ends with it.
        setup: what it needs to know; anything that can be pickled.
        gpu: UUID of the one GPU or MIG instance that the child sees; "" for all that this process sees.
        silence_s: seconds for which the child may give no sign of life; where this is finite it gives one several times
            in as many.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        serve: Callable[[Parent, Setup], None],
        setup: Setup,
        *,
        gpu: str = "",
        silence_s: float = math.inf,
    ) -> None:
        self._silence_s = silence_s
        self._child = Child(ENTRY, gpu, [str(os.getpid())])
        try:
            self.send(
                Start(
                    service=bytes(ForkingPickler.dumps((serve, setup))),
                    log_level=child_logs.level(),
                    beat_s=silence_s / _BEATS if math.isfinite(silence_s) else None,
                )
            )
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child has not ended."""
        return self._child.is_alive

    def await_ready(self, within_s: float = START_TIMEOUT_S, *, is_wanted: IsWanted | None = None) -> End | None:
        """None once the child can serve, else why it never will; it need give no sign of life before."""
        message = self._receive(within_s, math.inf, is_wanted)
        if isinstance(message, Ready):
            return None
        if isinstance(message, ChildExit | Silence | Failed):
            return message
        return Failed(f"said {type(message).__name__} before it was ready")

    def send(self, message: object) -> None:
        """Send one message; a child that has ended takes none, which `receive` tells."""
        with contextlib.suppress(OSError):
            self._child.connection.send(message)

    def receive(self, within_s: float = math.inf, *, is_wanted: IsWanted | None = None) -> Any:
        """The child's next message, within so many seconds, or how it ended; what it logs is shown.

        What it logs is no message, so that one who logs and does no work is not waited for.

        Args:
            is_wanted: asked several times a second; where it says no, waiting ends as if the time were up.
        """
        return self._receive(within_s, self._silence_s, is_wanted)

    def _receive(self, within_s: float, silence_s: float, is_wanted: IsWanted | None) -> Any:
        look_s = math.inf if is_wanted is None else _LOOK_S
        deadline = time.monotonic() + within_s
        silent_at = time.monotonic() + silence_s
        try:
            while is_wanted is None or is_wanted():
                left_s = max(0.0, min(deadline, silent_at) - time.monotonic())
                if self._polls(min(left_s, look_s)):
                    message = self._child.connection.recv()
                    silent_at = time.monotonic() + silence_s
                    if isinstance(message, logging.LogRecord):
                        child_logs.show(message)
                    elif not isinstance(message, Alive):
                        return message
                if left_s <= 0:
                    break
        except (EOFError, OSError):
            return self._child.exit()
        return Silence(silence_s if silent_at < deadline else within_s)

    def interrupt(self) -> None:
        """Ask the child to end: SIGTERM."""
        self._child.interrupt()

    def kill(self) -> None:
        """End the child for good; harmless when repeated."""
        self._child.kill()

    def _polls(self, within_s: float) -> bool:
        return self._child.connection.poll(within_s if math.isfinite(within_s) else None)
