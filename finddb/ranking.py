"""Which measurements of a problem its answer holds: a function of the sets of rows and verdicts, never of their order.

So databases that hold the same measurements give the same answers, whichever way they were merged. Nothing here knows
SQL.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from miofind.finddb.values import MOMENTARY_STATUSES, Row, Scope, Verdict, canonical_json, failed_code

TIE = 1.01
"""Times within 1 % of the fastest of a group are a tie: the race cannot tell them apart."""

BEST_PER_SOLVER = 3
BEST_OVERALL = 4
RELEASE_OVERALL = 2
MAX_SCOPES = 8


def rank(rows: Iterable[Row], verdicts: Iterable[Verdict] = ()) -> list[Row]:
    """Rows by time, ties by contention, smaller workspace, smaller error, older row.

    What disturbs a row makes it slow, never fast: a contended row that leads would lead undisturbed, too. "Within 1 %"
    is not transitive, so ties are groups: the fastest row opens one and takes in all within 1 % of it.
    Where the first row took part in the newest race, that race's verdict decides who leads.
    """
    return _as_judged(_by_time(rows), newest_verdict(verdicts))


def ties_of_best(rows: Iterable[Row], verdicts: Iterable[Verdict] = ()) -> list[Row]:
    """The first of `rank` and those that nothing tells from it: the newest race's ties, else those within 1 % of it."""
    ranked = _by_time(rows)
    judged = _judged_ties(ranked, newest_verdict(verdicts))
    if judged or not ranked:
        return judged
    fastest_ms = min(map(_time, ranked))
    return [row for row in ranked if _time(row) <= fastest_ms * TIE]


def _as_judged(ranked: list[Row], verdict: Verdict | None) -> list[Row]:
    """The order with a verdict's ties first."""
    first = _judged_ties(ranked, verdict)
    return first + [row for row in ranked if row not in first]


def _judged_ties(ranked: list[Row], verdict: Verdict | None) -> list[Row]:
    """The rows that a verdict ties; none where it says nothing of the first row or of rows as they are now."""
    if verdict is None or not ranked:
        return []
    raced = {*verdict.ties, *(comparison.candidate for comparison in verdict.comparisons)}
    known = [row for row in ranked if row.candidate in raced]
    if ranked[0].candidate not in raced or any(row.created_at > verdict.created_at for row in known):
        return []
    places = {candidate: place for place, candidate in enumerate(verdict.ties)}
    return sorted((row for row in known if row.candidate in places and not row.contended), key=_place_in(places))


def _place_in(places: Mapping[str, int]) -> Callable[[Row], int]:
    return lambda row: places[row.candidate]


def _by_time(rows: Iterable[Row]) -> list[Row]:
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


def best_rows(rows: Iterable[Row], verdicts: Iterable[Verdict] = ()) -> list[Row]:
    """The rows an answer keeps, in rank order.

    They are the best three of each solver, the four best of all, and each row that no better-ranked row of its solver
    matches in workspace, determinism and error: a caller's limits on those find the same row as in the whole history.
    """
    return _kept(rank(usable_rows(rows), verdicts), overall=BEST_OVERALL, per_solver=BEST_PER_SOLVER)


def release_rows(
    rows: Iterable[Row], verdicts: Iterable[Verdict] = (), *, kind: Callable[[Row], Hashable] = lambda row: None
) -> list[Row]:
    """The rows that a release keeps of a problem, in rank order; few, for it holds thousands of problems.

    They are the two best and, as in an answer, each row that no better-ranked row of its solver and kind matches: a
    release's scopes cover requests with limits, too, and without the history there is no other row to take.
    """
    return _kept(rank(usable_rows(rows), verdicts), overall=RELEASE_OVERALL, per_solver=1, kind=kind)


def _kept(
    ranked: Iterable[Row], *, overall: int, per_solver: int, kind: Callable[[Row], Hashable] = lambda row: None
) -> list[Row]:
    """The first rows of all and of each solver and kind, and each that no better-ranked row of these matches."""
    kept: list[Row] = []
    of_solver: dict[Hashable, list[Row]] = {}
    for place, row in enumerate(ranked):
        better = of_solver.setdefault((row.solver_id, kind(row)), [])
        matched = any(_matches(other, row) for other in better)
        better.append(row)
        if place < overall or len(better) <= per_solver or not matched:
            kept.append(row)
    return kept


def widest_scopes(scopes: Iterable[Scope]) -> list[Scope]:
    """What an answer says of scopes: `uncovered_scopes`, if they are few.

    Of more, those of some solvers each that differ in no more are joined, and those of all solvers go first.
    """
    widest = uncovered_scopes(scopes)
    if len(widest) > MAX_SCOPES:
        widest = sorted(_joined(widest), key=lambda scope: scope.asked is not None)
    return widest[:MAX_SCOPES]


def uncovered_scopes(scopes: Iterable[Scope]) -> list[Scope]:
    """The scopes that no other covers, the newest of equals, the newest first."""
    newest_first = sorted(scopes, key=lambda scope: (scope.created_at, scope.id), reverse=True)
    return [
        scope
        for place, scope in enumerate(newest_first)
        if not any(
            other.covers(scope) and (other_place < place or not scope.covers(other))
            for other_place, other in enumerate(newest_first)
            if other_place != place
        )
    ]


def _joined(newest_first: Sequence[Scope]) -> list[Scope]:
    """The scopes, those of some solvers each as one of all of these where they were asked for alike."""
    groups: dict[str, list[Scope]] = {}
    others = []
    for scope in newest_first:
        if not scope.asked:
            others.append(scope)
            continue
        marks = sorted(scope.solvers.keys() - scope.asked)
        kind = (scope.candidate_filters, marks, scope.workspace_limit_bytes, scope.effort, scope.complete)
        groups.setdefault(canonical_json(kind), []).append(scope)
    return [*others, *(group[0] if len(group) == 1 else _together(group) for group in groups.values())]


def _together(newest_first: Sequence[Scope]) -> Scope:
    names = sorted({name for scope in newest_first for name in scope.asked or ()})
    solvers = {name: version for scope in reversed(newest_first) for name, version in scope.solvers.items()}
    return replace(newest_first[0], solvers=solvers, filters={**newest_first[0].filters, "solvers": names}, id="")


def without_solvers(scopes: Iterable[Scope], lost: Collection[str]) -> list[Scope]:
    """Scopes without solvers whose rows stay behind: whoever has them measures those anew.

    What stands behind a plus in an id names a form of the solver, which scopes count with it.
    """
    lost = {*lost, *(name.partition("+")[0] for name in lost)}
    found = []
    for scope in scopes:
        left = {name: version for name, version in scope.solvers.items() if name not in lost}
        found.append(scope if len(left) == len(scope.solvers) else replace(scope, solvers=left, id=""))
    return found


def with_failures(scopes: Iterable[Scope], rows: Iterable[Row]) -> list[Scope]:
    """Scopes that tell with which sources solvers failed of which nothing is usable: those may have changed since."""
    rows = list(rows)
    in_force = _in_force(rows)
    usable = {row.solver_id for row in in_force if row.usable}
    failed = {row.solver_id: row for row in in_force if row.solver_id not in usable}
    hidden = {row.solver_id for row in rows if row.usable and row.solver_id in failed}
    return [_with_failures(scope, failed, hidden) for scope in scopes]


def _with_failures(scope: Scope, failed: Mapping[str, Row], hidden: Collection[str]) -> Scope:
    """A scope with what failed.

    Args:
        hidden: solvers of which something was usable before, in another version or with other sources.
    """
    codes = {
        name: failed_code(row.solver_version, row.source_hash)
        for name, row in failed.items()
        if (row.source_hash and scope.solvers.get(name) == row.solver_version)
        or (name in hidden and scope.solvers.get(name, row.solver_version) != row.solver_version)
    }
    return replace(scope, solvers={**scope.solvers, **codes}, id="") if codes else scope


def newest_verdict(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The verdict in force, None where no race was decided."""
    return max(verdicts, key=lambda verdict: (verdict.created_at, verdict.id), default=None)


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each solver and configuration."""
    return list({_candidate(row): row for row in sorted(rows, key=_age)}.values())


def superseded_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that can be removed without a change to the answer or to what is known of each configuration's end."""
    wanted = {row.id for row in _in_force(rows)} | {row.id for row in newest_rows(rows)}
    return [row for row in rows if row.id not in wanted]


def failed_rows(rows: Sequence[Row]) -> list[Row]:
    """Failed rows, and the older rows that each displaces: those would come back into the answer without it."""
    failed_at: dict[tuple[str, str], int] = {}
    by_age = sorted(rows, key=_age)
    for place, row in enumerate(by_age):
        if not (row.usable or row.is_rival or row.status in MOMENTARY_STATUSES):
            failed_at[_candidate(row)] = place
    return [
        row
        for place, row in enumerate(by_age)
        if not (row.usable or row.is_rival) or place < failed_at.get(_candidate(row), 0)
    ]


_age = operator.attrgetter("age")


def _in_force(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each solver and configuration that says something of the candidate itself, rivals aside.

    Rows of a solver's earlier code count no longer once its present code was measured, nor do rows before a failure.
    """
    standing: dict[tuple[str, str], list[Row]] = {}
    by_age = [row for row in sorted(rows, key=_age) if not (row.is_rival or row.status in MOMENTARY_STATUSES)]
    code = {row.solver_id: (row.solver_version, row.source_hash) for row in by_age}
    for row in by_age:
        if (row.solver_version, row.source_hash) != code[row.solver_id]:
            continue
        if row.usable:
            standing.setdefault(_candidate(row), []).append(row)
        else:
            standing[_candidate(row)] = [row]
    return [functools.reduce(_weightier, reversed(of_one)) for of_one in standing.values()]


def _weightier(row: Row, earlier: Row) -> Row:
    """The later of two rows of a candidate, unless it says less than the earlier one.

    A contended row says less than one that had the device to itself. Of two alike in that, of the same launches and of
    the same versions of libraries and driver, one whose candidate was cut off, after a sample or so, says less than a
    full measurement.
    """
    if not earlier.usable or not row.usable:
        return row
    if row.contended != earlier.contended:
        return earlier if row.contended else row
    is_outdone = row.is_cut_off and not earlier.is_cut_off and _measured(row) == _measured(earlier)
    return earlier if is_outdone else row


def _measured(row: Row) -> tuple[str, str, int, bool]:
    """With what a row was measured: a release may change how an unchanged kernel is launched, which voids its rows."""
    return row.environment, row.kernel_hash, row.workspace_bytes, row.deterministic


def _candidate(row: Row) -> tuple[str, str]:
    return row.solver_id, row.config


def _time(row: Row) -> float:
    return math.inf if row.time_ms is None else row.time_ms


def _tie_order(row: Row) -> tuple[bool, int, float, str, str]:
    return row.contended, row.workspace_bytes, _error(row), row.created_at, row.id


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
