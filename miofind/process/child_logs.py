"""What a spawned process logs, handed to its parent, which knows how to show it."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Callable

_PACKAGE = logging.getLogger("miofind")


class _ToParent(logging.handlers.QueueHandler):
    """Sends records."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # only `enqueue` uses it
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record; once the parent has gone there is nobody to read it."""
        with contextlib.suppress(OSError):
            self._send(record)


def level() -> int:
    """The level that a child is to log at: this process's."""
    return _PACKAGE.getEffectiveLevel()


def hand_over(send: Callable[[logging.LogRecord], None], level: int) -> None:
    """In a child: from now on, send what is logged at `level` and above, and show nothing here."""
    _PACKAGE.setLevel(level)
    _PACKAGE.addHandler(_ToParent(send))
    _PACKAGE.propagate = False


def show(record: logging.LogRecord) -> None:
    """In the parent: handle a child's record as this process's own, which may log less by now."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
