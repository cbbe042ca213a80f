"""How long a race is: numbers of samples and thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Effort(StrEnum):
    """How long a race is: SCREEN for a batch of a search, FIND for somebody who waits, TUNE for a database.

    SCREEN takes the samples of entering and no others: a later race of the best decides.
    """

    SCREEN = "screen"
    FIND = "find"
    TUNE = "tune"

    @property
    def schedule(self) -> Schedule:
        """Numbers of samples and thresholds."""
        return _SCHEDULES[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Numbers of samples and thresholds of a race.

    Attributes:
        cutoff: a candidate whose first run is this many times slower than the best is timed no further.
        long_cutoff: the same for runs of 2 ms and more.
        screen: samples on entering.
        keep: after screening, candidates this many times slower than the best are left behind.
        rounds: samples in each halving round.
        finalists: candidates in the final, besides the first that entered.
        blocks: interleaved samples of each finalist; 0 for no final.
        least_blocks: the same, however slow the finalists are.
        round_ms: time of each round and of the final, in milliseconds; slow candidates get fewer samples.
    """

    cutoff: float
    long_cutoff: float
    screen: int
    keep: float
    rounds: tuple[int, ...]
    finalists: int
    blocks: int
    least_blocks: int
    round_ms: float


_SCHEDULES = {
    Effort.SCREEN: Schedule(
        cutoff=8.0,
        long_cutoff=2.0,
        screen=3,
        keep=1.5,
        rounds=(),
        finalists=0,
        blocks=0,
        least_blocks=0,
        round_ms=0.0,
    ),
    Effort.FIND: Schedule(
        cutoff=4.0,
        long_cutoff=2.0,
        screen=3,
        keep=1.5,
        rounds=(5, 15),
        finalists=5,
        blocks=15,
        least_blocks=3,
        round_ms=200.0,
    ),
    Effort.TUNE: Schedule(
        cutoff=8.0,
        long_cutoff=2.0,
        screen=3,
        keep=1.5,
        rounds=(5, 15, 45),
        finalists=5,
        blocks=45,
        least_blocks=30,
        round_ms=4000.0,
    ),
}
