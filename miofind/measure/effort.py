"""How long a race is: numbers of samples, thresholds, and the arithmetic on both. Pure.

`Race` asks a `Schedule` how many samples come next; a forecast adds up the same numbers over estimated times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

SHORT_MS = 0.2
"""A first run below this is never too long to sample."""

# Above this its time is as good as a sample's, since the launches from the host hide behind it.
_LONG_MS = 2.0
_LEAST_SAMPLE_MS = 0.2


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
        halvings: samples of each candidate by the end of each halving of the field.
        finalists: candidates in the final, besides the first that entered.
        final_rounds: rounds of the final, each with one sample of each finalist; 0 for no final.
        least_final_rounds: the same, however slow the finalists are.
        budget_ms: milliseconds of each halving and of the final; slow candidates get fewer samples.
    """

    cutoff: float
    long_cutoff: float
    screen: int
    keep: float
    halvings: tuple[int, ...]
    finalists: int
    final_rounds: int
    least_final_rounds: int
    budget_ms: float

    def cuts_off(self, rough_ms: float, best_ms: float) -> bool:
        """Whether a candidate is timed no further after a first run of `rough_ms`."""
        if rough_ms < SHORT_MS:
            return False
        return rough_ms > best_ms * (self.cutoff if rough_ms < _LONG_MS else self.long_cutoff)

    def keeps(self, time_ms: float, best_ms: float) -> bool:
        """Whether a candidate races on after screening."""
        return time_ms <= self.keep * best_ms

    def halving_samples(self, count: int, times_ms: Iterable[float]) -> int:
        """Samples of each candidate by the end of a halving to `count` samples, given the field's times."""
        return self._affordable(count, times_ms, self.screen)

    def survivors(self, field: int) -> int:
        """How many of a field of candidates a halving leaves."""
        return max(self.finalists, -(-field // 2))

    def rounds_of_final(self, times_ms: Iterable[float]) -> int:
        """Rounds of the final, given the finalists' times."""
        return self._affordable(self.final_rounds, times_ms, self.least_final_rounds)

    def expected_ms(self, times_ms: Sequence[float]) -> float:
        """Milliseconds that the samples of a whole race take, of candidates that always run for as long.

        Args:
            times_ms: milliseconds of a run of each candidate, in the order in which they enter.
        """
        best_ms, screened = math.inf, []
        for time_ms in times_ms:
            if not self.cuts_off(time_ms, best_ms):
                screened.append(time_ms)
                best_ms = min(best_ms, time_ms)
        contenders = [time_ms for time_ms in screened if self.keeps(time_ms, best_ms)]
        field, taken = sorted(contenders), self.screen
        total_ms = self.screen * _round_ms(screened)
        for count in self.halvings:
            if len(field) <= self.finalists:
                break
            samples = self.halving_samples(count, field)
            total_ms += max(0, samples - taken) * _round_ms(field)
            taken, field = max(taken, samples), field[: self.survivors(len(field))]
        if not self.final_rounds or not contenders:
            return total_ms
        finalists = field[: self.finalists]
        if contenders[0] not in finalists:
            finalists.append(contenders[0])
        return total_ms + self.rounds_of_final(finalists) * _round_ms(finalists)

    def _affordable(self, count: int, times_ms: Iterable[float], least: int) -> int:
        """As many of `count` samples of each candidate as fit the budget, at least `least`."""
        return max(least, min(count, int(self.budget_ms / _round_ms(times_ms))))


def sample_ms(time_ms: float) -> float:
    """Milliseconds that one sample takes of a candidate whose run takes `time_ms`.

    A sample lasts 0.1 ms or one run, and about as long again for the flush of the cache.
    """
    return max(_LEAST_SAMPLE_MS, 2 * time_ms)


def _round_ms(times_ms: Iterable[float]) -> float:
    """Milliseconds of one sample of each candidate."""
    return sum(map(sample_ms, times_ms))


_SCHEDULES = {
    Effort.SCREEN: Schedule(
        cutoff=8.0,
        long_cutoff=2.0,
        screen=3,
        keep=1.5,
        halvings=(),
        finalists=0,
        final_rounds=0,
        least_final_rounds=0,
        budget_ms=0.0,
    ),
    Effort.FIND: Schedule(
        cutoff=4.0,
        long_cutoff=2.0,
        screen=3,
        keep=1.5,
        halvings=(5, 15),
        finalists=5,
        final_rounds=15,
        least_final_rounds=3,
        budget_ms=200.0,
    ),
    Effort.TUNE: Schedule(
        cutoff=8.0,
        long_cutoff=2.0,
        screen=3,
        keep=1.5,
        halvings=(5, 15, 45),
        finalists=5,
        final_rounds=45,
        least_final_rounds=30,
        budget_ms=4000.0,
    ),
}
