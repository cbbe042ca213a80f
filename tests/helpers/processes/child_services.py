"""What children of test_service do."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from miofind.errors import DatabaseError
from miofind.process.parent import Parent

logger = logging.getLogger("miofind.child_services")


class TwoPartsError(DatabaseError):
    """An error of another package, which is not made of its message."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")


def echo(parent: Parent, setup: Any) -> None:
    """Send back what the parent sends, `setup` first."""
    parent.ready()
    parent.send(setup)
    while True:
        parent.send(parent.receive())


def finish(parent: Parent, setup: Any) -> None:
    parent.ready()
    parent.send(setup)


def tell_of_garbage(parent: Parent, setup: Any) -> None:
    """Say whether Python collects garbage before and after this is ready, and whether it keeps what was loaded."""
    is_early, kept = gc.isenabled(), gc.get_freeze_count()
    parent.ready()
    parent.send({"early": is_early, "then": gc.isenabled(), "keeps": gc.get_freeze_count() > kept})


def raise_error(parent: Parent, kind: str) -> None:
    if kind == "own":
        raise DatabaseError("the disk is full")
    parent.ready()
    if kind == "not made of its message":
        raise TwoPartsError("the disk", "is full")
    raise ZeroDivisionError("by zero")


def die(parent: Parent, number: int) -> None:
    parent.ready()
    parent.send("a last word")
    os.kill(os.getpid(), number)


def log_for_good(parent: Parent, setup: Any) -> None:
    parent.ready()
    while True:
        logger.warning("still here")
        time.sleep(0.05)


def log_once(parent: Parent, setup: Any) -> None:
    parent.ready()
    logger.warning("still here")
    parent.send("logged")


def stop(parent: Parent, setup: Any) -> None:
    """Be stopped: the thread that gives signs of life is, too."""
    parent.ready()
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter(parent: Parent, told: str) -> None:
    """Let no other thread of this process run any Python, in a call that does not end."""
    Path(told).write_text(f"{os.getpid()};", encoding="ascii")
    parent.ready()
    ctypes.PyDLL(None).sleep(600)
