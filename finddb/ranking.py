"""From the measurements of a problem to its answer: a function of the set of rows, never of their order.

So databases that hold the same measurements give the same answers, whichever way they were merged. Nothing here knows
SQL.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from miofind.finddb.values import (
    MOMENTARY_STATUSES,
    ROW_FIELDS,
    SCOPE_FIELDS,
    Answer,
    RankedRows,
    Row,
    Scope,
    canonical_json,
)

TIE = 1.01
"""Times within 1 % of the fastest of a group are a tie: the race cannot tell them apart."""

BEST_PER_SOLVER = 3
BEST_OVERALL = 4
MAX_SCOPES = 8


def rank(rows: Iterable[Row]) -> list[Row]:
    """Rows by time, ties by smaller workspace, smaller error, older row.

    "Within 1 %" is not transitive, so ties are groups: the fastest row opens one and takes in all within 1 % of it.
    """
    ranked: list[Row] = []
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: (_time(row), row.id)):
        if group and _time(row) > _time(group[0]) * TIE:
            ranked += sorted(group, key=_tie_order)
            group = []
        group.append(row)
    return ranked + sorted(group, key=_tie_order)


def usable_rows(rows: Iterable[Row]) -> list[Row]:
    """The row in force of each solver and configuration, where that one is usable."""
    return [row for row in _in_force(rows) if row.usable]


def best_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows an answer keeps, in rank order.

    They are the best three of each solver, the four best of all, and each row that no better-ranked row of its solver
    matches in workspace, determinism and error: a caller's limits on those find the same row as in the whole history.
    """
    kept: list[Row] = []
    of_solver: dict[str, list[Row]] = {}
    for place, row in enumerate(rank(usable_rows(rows))):
        better = of_solver.setdefault(row.solver_id, [])
        matched = any(_matches(other, row) for other in better)
        better.append(row)
        if place < BEST_OVERALL or len(better) <= BEST_PER_SOLVER or not matched:
            kept.append(row)
    return kept


def widest_scopes(scopes: Iterable[Scope]) -> list[Scope]:
    """The scopes that no other covers, the newest of equals, the newest first."""
    newest_first = sorted(scopes, key=lambda scope: (scope.created_at, scope.id), reverse=True)
    widest = [
        scope
        for place, scope in enumerate(newest_first)
        if not any(
            other.covers(scope) and (other_place < place or not scope.covers(other))
            for other_place, other in enumerate(newest_first)
            if other_place != place
        )
    ]
    return widest[:MAX_SCOPES]


def superseded_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that can be removed without a change to the answer or to what is known of each configuration's end."""
    wanted = {row.id for row in _in_force(rows)} | {row.id for row in _newest(rows)}
    return [row for row in rows if row.id not in wanted]


def failed_rows(rows: Sequence[Row]) -> list[Row]:
    """Failed rows, and the older rows that each displaces: those would come back into the answer without it."""
    displaced = {_candidate(row) for row in _in_force(rows) if not row.usable}
    return [row for row in rows if not row.usable or _candidate(row) in displaced]


def encode(rows: Iterable[Row], scopes: Iterable[Scope]) -> str:
    """The answer as text: the scopes in one line, then one line a row in rank order."""
    lines = [canonical_json([[_scope_value(scope, name) for name in SCOPE_FIELDS] for scope in widest_scopes(scopes)])]
    lines += [canonical_json([getattr(row, name) for name in ROW_FIELDS]) for row in best_rows(rows)]
    return "\n".join(lines)


def decode(device: str, network_config: str, text: str) -> Answer:
    """The answer that `encode` wrote.

    Raises:
        ValueError, TypeError: it did not write that.
    """
    scopes, *rows = text.split("\n")
    return Answer(
        device=device,
        network_config=network_config,
        rows=RankedRows(rows),
        scopes=tuple(Scope(**dict(zip(SCOPE_FIELDS, values, strict=True))) for values in json.loads(scopes)),
    )


def _newest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each solver and configuration; of one instant, the one of more samples."""
    newest: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row.created_at, row.samples, row.id)):
        newest[_candidate(row)] = row
    return list(newest.values())


def _in_force(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each solver and configuration that says something of the candidate itself."""
    return _newest(row for row in rows if row.status not in MOMENTARY_STATUSES)


def _candidate(row: Row) -> tuple[str, str]:
    return row.solver_id, row.config


def _time(row: Row) -> float:
    return math.inf if row.time_ms is None else row.time_ms


def _tie_order(row: Row) -> tuple[int, float, str, str]:
    return row.workspace_bytes, _error(row), row.created_at, row.id


def _error(row: Row) -> float:
    return math.inf if row.max_error is None else row.max_error


def _matches(other: Row, row: Row) -> bool:
    """Whether every limit that lets `row` pass lets `other` pass, errors compared by their power of two."""
    return (
        other.workspace_bytes <= row.workspace_bytes
        and other.deterministic >= row.deterministic
        and _power_of_two(_error(other)) <= _power_of_two(_error(row))
    )


def _power_of_two(error: float) -> float:
    if error in (0.0, math.inf):
        return -math.inf if error == 0.0 else math.inf
    return math.frexp(error)[1]


def _scope_value(scope: Scope, name: str) -> object:
    value = getattr(scope, name)
    return dict(value) if name in ("solvers", "filters") else value
