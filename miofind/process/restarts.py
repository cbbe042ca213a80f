"""How often a child that is of no use is replaced: one rule for all services."""

from __future__ import annotations

import time
from collections.abc import Iterator

PAUSES_S = (0.0, 2.0, 10.0)
"""Before each attempt to start a child: a GPU that was reset, or a killed kernel, takes seconds to be gone."""

ATTEMPTS = len(PAUSES_S)
"""Starts of a child, and ends of children with nobody to blame and nothing done, before a service is given up."""


def attempts() -> Iterator[int]:
    """A number for each attempt to start a child, after its pause."""
    for number, pause_s in enumerate(PAUSES_S):
        time.sleep(pause_s)
        yield number


class Restarts:
    """Counts the ends of a service's children between which nothing was done."""

    def __init__(self) -> None:
        self.fruitless = 0

    def progressed(self) -> None:
        """Something was done: count anew."""
        self.fruitless = 0

    def ended(self) -> bool:
        """Note an end; whether the service is given up."""
        self.fruitless += 1
        return self.fruitless >= ATTEMPTS
