"""A table of medians: how much longer a solver's kernels take than it estimates, by kind of problem."""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miofind.find.immediate.kinds import Kind

LEAST_PROBLEMS = 4
"""Problems of a kind that a correction needs, so that few odd ones correct nothing."""

_PRIOR = 4.0  # a kind's median counts as much as its wider kind's where it comes from so many problems
MOST_LOG2 = 6.0
"""Of a correction: beyond a factor of 64 an estimate is broken, and no table mends it."""

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One candidate's measured time over its estimate.

    Attributes:
        solver_id: whose estimate.
        kind: of the problem.
        problem: the problem's name: candidates of one problem count as one by their median.
        log2: logarithm of the ratio.
    """

    solver_id: str
    kind: Kind
    problem: str
    log2: float


class Table:
    """Corrections of estimates.

    Args:
        corrections: by solver and level of its kind (`Kind.levels`), the logarithm to base 2 of the factor.
    """

    def __init__(self, corrections: Mapping[Key, float]) -> None:
        self.corrections = dict(corrections)
        self._solvers = frozenset(key[0] for key in self.corrections)
        self.factors = functools.lru_cache(maxsize=512)(self._factors_of)

    def log2(self, solver_id: str, kind: Kind) -> float:
        """The correction of a solver's estimates for a kind of problem; 0 of one that the table does not know."""
        return self._log2(solver_id, kind.levels)

    def _log2(self, solver_id: str, levels: Sequence[Key]) -> float:
        for level in levels:
            if (correction := self.corrections.get((solver_id, *level))) is not None:
                return correction
        return 0.0

    def _factors_of(self, kind: Kind) -> dict[str, float]:
        """By solver, what estimates for a kind of problem are multiplied by; kept in `factors`: all problems ask."""
        levels = kind.levels
        return {solver_id: float(2.0 ** self._log2(solver_id, levels)) for solver_id in self._solvers}

    @staticmethod
    def of(ratios: Iterable[Ratio]) -> Table:
        """The medians of measured ratios, each drawn towards that of the wider kind."""
        by_problem: defaultdict[tuple[str, Kind, str], list[float]] = defaultdict(list)
        for ratio in ratios:
            by_problem[ratio.solver_id, ratio.kind, ratio.problem].append(ratio.log2)
        logs: defaultdict[Key, list[float]] = defaultdict(list)
        for (solver_id, kind, _), found in by_problem.items():
            for level in kind.levels:
                logs[(solver_id, *level)].append(statistics.median(found))
        corrections: dict[Key, float] = {}
        for key in sorted(logs, key=lambda key: (len(key), key)):  # wider kinds first
            if len(logs[key]) < LEAST_PROBLEMS:
                continue
            wider = next((corrections[up] for up in _wider(key) if up in corrections), 0.0)
            weight = len(logs[key])
            value = (weight * statistics.median(logs[key]) + _PRIOR * wider) / (weight + _PRIOR)
            corrections[key] = math.copysign(min(abs(value), MOST_LOG2), value)
        return Table({key: round(value, 4) for key, value in corrections.items()})


def _wider(key: Key) -> tuple[Key, ...]:
    """The keys of the wider kinds, the next one first."""
    solver_id, *level = key
    return tuple((solver_id, *level[:length]) for length in (3, 2, 0) if length < len(level))
