"""What failed on this device before, and what of it is not tried again."""

from __future__ import annotations

import contextlib

from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidConfigError
from miofind.find.lookup.known import candidate_of
from miofind.find.lookup.validity import current_environment, is_valid
from miofind.finddb import Row
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Outcome, Status


def failures(problem: ProblemDescription, handle: Handle) -> dict[str, Status]:
    """By id, the candidates that the FindDBs know to have failed here with the solvers of this release."""
    return {name: Status(row.status) for name, row in failed_rows(problem, handle).items()}


def failed_rows(problem: ProblemDescription, handle: Handle) -> dict[str, Row]:
    """By id, the last rows of those candidates."""
    return _failed(newest_rows(problem, handle, ignored=frozenset()))


def failed_outcomes(problem: ProblemDescription, options: FindOptions, handle: Handle) -> tuple[Outcome, ...]:
    """What became of those candidates whose solvers a request allows, in the order of their ids.

    Of one that ran out of memory last and is quarantined it is what quarantines it.
    """
    failed = failed_rows(problem, handle)
    if not failed:
        return ()
    quarantining = quarantined_rows(problem, handle)
    last = [quarantining.get(name, failed[name]) for name in sorted(failed)]
    found = []
    for row in last:
        if options.allows(handle.registry[row.solver_id]):
            with contextlib.suppress(InvalidConfigError):  # a damaged row says nothing of any candidate
                candidate = candidate_of(row.candidate, problem)
                found.append(Outcome(candidate=candidate, status=Status(row.status), message=row.message))
    return tuple(found)


def quarantined(problem: ProblemDescription, handle: Handle) -> frozenset[str]:
    """Ids of the candidates that failed here with the solvers of this release and are not to be tried again."""
    return frozenset(quarantined_rows(problem, handle))


def quarantined_rows(problem: ProblemDescription, handle: Handle) -> dict[str, Row]:
    """By id, the rows that quarantine those candidates.

    Running out of memory speaks of the moment: it quarantines nobody, and lifts no quarantine. A failure with another
    driver or library says nothing of this one.
    """
    environment = current_environment(handle.device)
    return _failed(newest_rows(problem, handle, ignored=frozenset({Status.OUT_OF_MEMORY}), environment=environment))


def _failed(rows: dict[str, Row]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if not row.usable}


def newest_statuses(
    problem: ProblemDescription, handle: Handle, *, ignored: frozenset[Status], environment: str | None = None
) -> dict[str, Status]:
    """What became last of each candidate that was measured on this device with the solvers of this release."""
    newest = newest_rows(problem, handle, ignored=ignored, environment=environment)
    return {name: Status(row.status) for name, row in newest.items()}


def newest_rows(
    problem: ProblemDescription, handle: Handle, *, ignored: frozenset[Status], environment: str | None = None
) -> dict[str, Row]:
    """By id, the last row of each candidate that was measured on this device with the solvers of this release."""
    newest: dict[str, Row] = {}
    for history in handle.database.histories(handle.device.identity, problem.network_config):
        for row in history.rows:
            name = row.candidate
            known = newest.get(name)
            if row.is_rival or row.status in ignored or (environment is not None and row.environment != environment):
                continue
            if not is_valid(row, handle):
                continue
            if known is None or known.age < row.age:
                newest[name] = row
    return newest
