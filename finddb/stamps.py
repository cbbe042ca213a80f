"""The times that entries bear."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from miofind.finddb.validation import LAST_STAMP
from miofind.finddb.values import History

TIME_FORM = "%Y-%m-%dT%H:%M:%S.%fZ"


def now() -> str:
    """The present, in the form of `created_at`, which ends before some clocks do."""
    return min(datetime.now(UTC).strftime(TIME_FORM), LAST_STAMP)


def stamped(history: History, stamp: str) -> History:
    """The history with a time for those entries that have none."""
    return replace(
        history,
        rows=tuple(replace(row, created_at=row.created_at or stamp) for row in history.rows),
        scopes=tuple(replace(scope, created_at=scope.created_at or stamp) for scope in history.scopes),
        verdicts=tuple(replace(verdict, created_at=verdict.created_at or stamp) for verdict in history.verdicts),
    )
