"""Ctrl-C and SIGTERM: where they would leave a traceback or lose what was begun, and where they are to be raised."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended."""


def is_program() -> bool:
    """Whether this process is `miofind` or `python -m miofind`, from the first import on."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "miofind":
        return True
    words = sys.orig_argv  # sys.argv has -m in the place of the module until that is imported
    return name == "-m" and "-m" in words and words[words.index("-m") + 1 :][:1] == ["miofind"]


def end_at_once() -> None:
    """Let Ctrl-C end the process with a word from now on. Where it is ignored or means something else, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def ends_at_once() -> bool:
    """Whether Ctrl-C does."""
    return signal.getsignal(signal.SIGINT) is _end


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, where it ended the process."""
    if ends_at_once():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:  # whatever became of stderr
        os._exit(INTERRUPTED)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Lets Ctrl-C wait until the block ends: what it begins must not be lost before it is named."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number, frame in came[:1]:
            handler(number, frame)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM raise KeyboardInterrupt, as Ctrl-C does, until the block ends; a second one changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
