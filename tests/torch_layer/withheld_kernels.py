"""Kernels that are compiled when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Withheld:
    """Compiles nothing until it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.errors: list[Exception] = []
        self._is_done = False
        self._calls: list[Callable[[], object]] = []

    def begin(self, steps: Iterable[Any]) -> Any:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return None if self._is_done else self

    def when_done(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def finish(self) -> None:
        self._is_done = True
        while self._calls:
            self._calls.pop()()

    def close(self) -> None:
        """Nothing is left to end."""
