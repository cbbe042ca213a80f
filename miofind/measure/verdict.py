"""Which finalist is fastest, how sure that is, and which are as good: statistics of interleaved rounds.

A round holds one sample of each finalist, so drifting clocks cancel in its ratios. Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_ROUNDS = 5
"""Rounds below which no verdict is given."""

DIFFERENCE = 1.01
"""A beats B where all of the interval of B's time over A's lies beyond this."""

_CLOSE = 1.03
"""Whoever is further behind at the median is no tie, however wide its interval: too few rounds prove no equality."""

_RESAMPLES = 4000
_PERCENTILES = (2.5, 97.5)

_Times = NDArray[np.float64]
_Intervals = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """One candidate of a final.

    Attributes:
        key: its name.
        samples_ms: one a round, in the order of the rounds.
        workspace_bytes, max_error: decide between ties, in this order.
    """

    key: str
    samples_ms: Sequence[float]
    workspace_bytes: int = 0
    max_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """A candidate against the winner.

    Attributes:
        candidate: id of the candidate.
        low, high: 95 % interval of its time over the winner's, from paired samples; 1.03 is 3 % slower.
    """

    candidate: str
    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        """Whether the winner beats it."""
        return self.low > DIFFERENCE

    @property
    def differs(self) -> bool:
        """Whether one of the two beats the other."""
        return self.is_slower or self.high < 1 / DIFFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceVerdict:
    """What a final says.

    Attributes:
        winner: id of the candidate to take.
        ties: ids of those that are as fast, the winner first.
        comparisons: every other finalist against the winner, fastest first.
        rounds: interleaved samples of each finalist.
        protocol: version of the timing protocol that took them.
    """

    winner: str
    ties: tuple[str, ...]
    comparisons: tuple[PairedComparison, ...]
    rounds: int
    protocol: str


def judge(finalists: Sequence[Finalist], *, protocol: str, incumbent: str = "") -> RaceVerdict | None:
    """The verdict on a final; None with fewer than two finalists or MIN_ROUNDS rounds.

    Whoever is not beaten by the fastest, and not clearly behind it, is a tie. Ties go to the smaller workspace, then
    the smaller error, then the incumbent, then the smaller time. Nobody wins whom another finalist beats, unless each
    is beaten by one.

    Args:
        finalists: with equally many samples each.
        incumbent: key of the answer so far.

    Raises:
        ValueError: the finalists' samples differ in number.
    """
    if len(finalists) < 2 or len(finalists[0].samples_ms) < MIN_ROUNDS:
        return None
    logs = np.log(np.array([finalist.samples_ms for finalist in finalists], np.float64))
    typical = np.median(logs - logs.mean(axis=0), axis=1)
    over = functools.cache(functools.partial(_intervals, logs))
    fastest = _fastest(over, int(np.argmin(typical)))
    close = [
        i
        for i, (low, _) in enumerate(over(fastest))
        if low <= DIFFERENCE and typical[i] - typical[fastest] <= math.log(_CLOSE)
    ]

    def preference(i: int) -> tuple[int, float, bool, float]:
        finalist = finalists[i]
        return finalist.workspace_bytes, finalist.max_error, finalist.key != incumbent, float(typical[i])

    close.sort(key=preference)
    winner = next((i for i in close if not _beating(over(i))), fastest)
    compared = {
        i: PairedComparison(candidate=finalists[i].key, low=low, high=high)
        for i, (low, high) in enumerate(over(winner))
        if i != winner
    }
    ties = [winner, *(i for i in close if i != winner and not compared[i].is_slower)]
    return RaceVerdict(
        winner=finalists[winner].key,
        ties=tuple(finalists[i].key for i in ties),
        comparisons=tuple(compared[i] for i in sorted(compared, key=lambda i: typical[i])),
        rounds=logs.shape[1],
        protocol=protocol,
    )


def _fastest(over: Callable[[int], _Intervals], first: int) -> int:
    """Who is beaten by nobody, beginning with the one whose times are typically the least.

    Medians and paired ratios need not agree: half of the times of one may be another's best, and half far off.

    Args:
        over: the intervals of all finalists' times over one's.
    """
    base, seen = first, {first}
    while left := {i: high for i, high in _beating(over(base)).items() if i not in seen}:
        base = min(left, key=left.__getitem__)
        seen.add(base)
    return base


def _beating(intervals: _Intervals) -> dict[int, float]:
    """Who beats the one that the intervals are over: their upper ends."""
    return {i: high for i, (_, high) in enumerate(intervals) if high < 1 / DIFFERENCE}


def _intervals(logs: _Times, base: int) -> _Intervals:
    """95 % percentile intervals of the median ratio of each row of log times to the base row's."""
    ratios = np.sort(logs - logs[base], axis=1)
    lower, upper = _median_ranks(logs.shape[1])
    medians = (ratios[:, lower] + ratios[:, upper]) / 2
    bounds = np.exp(np.percentile(medians, _PERCENTILES, axis=1))
    return [(float(low), float(high)) for low, high in bounds.T]


@functools.lru_cache(maxsize=64)
def _median_ranks(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The two middle ranks of each resample of `count` values; equal ones where `count` is odd.

    The median of a resample of sorted values is at the median of the resampled positions, so positions are drawn once
    for all candidates and finals. The seed is fixed: equal samples give equal verdicts.
    """
    drawn = np.sort(np.random.default_rng(0).integers(0, count, (_RESAMPLES, count)), axis=1)
    return drawn[:, (count - 1) // 2].astype(np.intp), drawn[:, count // 2].astype(np.intp)
