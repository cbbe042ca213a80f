"""What changed from one FindDB to another: which problems got faster, slower or another winner, which came or went.

It compares answers, and tells of each change how sure it is. Nothing here knows SQL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from miofind.finddb.ranking import TIE, newest_verdict
from miofind.finddb.store import Store
from miofind.finddb.values import Comparison, ProblemKey, Row, Verdict


class ChangeKind(StrEnum):
    """What became of a problem's best time; within 1 % it is the SAME."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    NEW = "new"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One problem in two FindDBs.

    Attributes:
        before, after: its best row in each, None where one has none.
        old_winner_after: how the second's race saw the winner of the first, against its own; None where it did not.
        new_winner_before: how the first's race saw the winner of the second, likewise.
    """

    key: ProblemKey
    kind: ChangeKind
    before: Row | None
    after: Row | None
    old_winner_after: Comparison | None = None
    new_winner_before: Comparison | None = None

    @property
    def ratio(self) -> float | None:
        """Time after over time before; None for what came or went."""
        if self.before is None or self.after is None:
            return None
        return _time(self.after) / _time(self.before)

    @property
    def has_new_winner(self) -> bool:
        """Whether another solver or configuration is the best now."""
        return self.before is not None and self.after is not None and self.before.candidate != self.after.candidate

    @property
    def is_clear(self) -> bool:
        """Whether the middle 60 % of samples before and after lie apart."""
        if self.before is None or self.after is None:
            return False
        faster, slower = sorted((self.before, self.after), key=_time)
        return (faster.p80_ms or _time(faster)) < (slower.p20_ms or _time(slower))


def differences(before: Store, after: Store) -> list[Change]:
    """How every problem fared that either FindDB has a usable row of, the greatest change first.

    Raises:
        DatabaseError: one cannot be read.
    """
    return sorted(_changes(before, after), key=_order)


def _changes(before: Store, after: Store) -> Iterator[Change]:
    best_before, best_after = before.best_of_all(), after.best_of_all()
    for key in sorted({*best_before, *best_after}, key=lambda key: (key.device, key.network_config)):
        old, new = best_before.get(key), best_after.get(key)
        if old is None and new is None:
            continue
        change = Change(key=key, kind=_kind(old, new), before=old, after=new)
        if old is None or new is None or not change.has_new_winner:
            yield change
            continue
        yield Change(
            key=key,
            kind=change.kind,
            before=old,
            after=new,
            old_winner_after=_comparison(after, key, old, new),
            new_winner_before=_comparison(before, key, new, old),
        )


def _kind(before: Row | None, after: Row | None) -> ChangeKind:
    if before is None:
        return ChangeKind.NEW
    if after is None:
        return ChangeKind.GONE
    ratio = _time(after) / _time(before)
    if ratio * TIE < 1:
        return ChangeKind.FASTER
    return ChangeKind.SLOWER if ratio > TIE else ChangeKind.SAME


def _comparison(store: Store, key: ProblemKey, row: Row, winner: Row) -> Comparison | None:
    """What the race that `winner` won said of `row`; None where another won, or `row` was not in it."""
    history = store.history(key.device, key.network_config)
    verdict: Verdict | None = newest_verdict(history.verdicts) if history else None
    if verdict is None or verdict.winner != winner.candidate:
        return None
    return next((item for item in verdict.comparisons if item.candidate == row.candidate), None)


def _order(change: Change) -> tuple[bool, float, str, str]:
    """By size of the change; what came or went has none and comes last."""
    size = math.inf if change.ratio is None else abs(math.log(change.ratio))
    return math.isinf(size), -size, change.kind.value, change.key.network_config


def _time(row: Row) -> float:
    """Milliseconds of a row that is in an answer: it has a time."""
    assert row.time_ms is not None
    return row.time_ms
