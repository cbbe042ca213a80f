"""Ctrl-C where KeyboardInterrupt would leave a traceback: while modules are imported, and while Python ends."""

from __future__ import annotations

import os
import signal
import sys

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
