"""Waiting for what happens, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO

LIMIT_S = 900.0
"""After which what has not happened never will: a limit for tests that fail, far beyond what any takes that passes."""


def wait_until(has_happened: Callable[[], bool], what: str, every_s: float = 0.01) -> None:
    """Return once it has happened; fail with its name after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not has_happened():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(every_s)


def read_until(stream: IO[str], words: str) -> None:
    """Read lines until one has `words`, however many tell of slow progress before it; fail where there is none."""
    told = []
    for line in stream:
        if words in line:
            return
        told.append(line)
    raise AssertionError(f"no line has {words!r}: {''.join(told)}")
