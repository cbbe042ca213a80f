"""Ctrl-C: where KeyboardInterrupt would leave a traceback, while modules are imported and while Python ends; and
whether an exception is a signal's doing, or that of the code it came out of.
"""

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


def raise_if_interrupted(error: BaseException) -> None:
    """Raise an exception again that a signal brought, Ctrl-C above all; nothing where code raised it by itself.

    Foreign code may raise anything, SystemExit too, and that is its failing. Signals arrive in the main thread, and a
    KeyboardInterrupt there counts as the user's.
    """
    if threading.current_thread() is threading.main_thread() and (_holds_ctrl_c(error) or _is_of_handler(error)):
        raise error


def _holds_ctrl_c(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def _is_of_handler(error: BaseException) -> bool:
    """Whether a function that was given the frame below its own raised it: what Python gives to a signal's handler."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        if _was_given(trace.tb_frame, interrupted):
            return True
    return False


def _was_given(frame: FrameType, interrupted: FrameType) -> bool:
    for value in frame.f_locals.values():
        if value is interrupted or (isinstance(value, tuple) and any(item is interrupted for item in value)):
            return True
    return False
