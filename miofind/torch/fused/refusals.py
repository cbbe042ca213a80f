"""What code does that no graph tells, noted where it is refused: code that catches exceptions goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.fx.proxy import TraceError

_noted: list[list[TraceError]] = []
"""Of each run of code that is traced now, the innermost last."""


class Refusal(TraceError):
    """Code is not traced, whatever it does when this is raised in it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if _noted:
            _noted[-1].append(self)


@contextlib.contextmanager
def noted_refusals() -> Iterator[list[TraceError]]:
    """The refusals of the code that runs in a block, as they come."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()
