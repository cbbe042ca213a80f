"""What the FindDB knows of one problem: times that a search need not measure again, and the answer that wins ties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from miofind.core.problem import ProblemDescription
from miofind.device.environment import versions
from miofind.errors import InvalidConfigError
from miofind.find.lookup import validity
from miofind.find.lookup.stored import answers_no_more
from miofind.finddb import Row, environment_id, usable_rows
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Candidate
from miofind.solver.steps import Config


def known_times(problem: ProblemDescription, handle: Handle) -> dict[Candidate, float | None]:
    """Median times in milliseconds of the candidates that need not be measured again, as the FindDB has them.

    A row counts only if all of this holds:
      - its solver has the same version and sources today (`validity.is_valid`);
      - its solver, asked today, would still launch what was measured (not `answers_no_more`);
      - it was measured with the library and driver versions of this process;
      - no other process disturbed it (`contended`).
    """
    environment = environment_id(versions(handle.device))
    rows = [
        row
        for history in handle.database.histories(handle.device.identity, problem.network_config)
        for row in history.rows
        if validity.is_valid(row, handle) and not (row.usable and answers_no_more(row, problem, handle))
    ]
    return {
        candidate_of(row.candidate, problem): row.time_ms
        for row in usable_rows(rows)
        if row.environment == environment and not row.contended
    }


def incumbent(problem: ProblemDescription, handle: Handle) -> str:
    """Id of the best candidate in the FindDB's answer; "" if there is no answer. It wins ties in a new race."""
    answer = handle.database.answer(handle.device.identity, problem.network_config)
    first = next(iter(answer.rows), None) if answer else None
    return first.candidate if first else ""


def stored_configs(problem: ProblemDescription, handle: Handle) -> dict[str, tuple[Config, ...]]:
    """By solver, the configurations that the FindDBs' answers hold, whatever code they were measured with; the fastest
    first."""
    return _configs(_answered(problem, handle))


def earlier_configs(problem: ProblemDescription, handle: Handle) -> dict[str, tuple[Config, ...]]:
    """Those of `stored_configs` that no longer count, since the solver's code has changed.

    They are worth a measurement with the code of today: a search may have found them.
    """
    return _configs(
        row
        for row in _answered(problem, handle)
        if not validity.is_valid(row, handle) or answers_no_more(row, problem, handle)
    )


def _answered(problem: ProblemDescription, handle: Handle) -> Iterator[Row]:
    """The usable rows of all FindDBs' answers whose solvers are here."""
    for answer in handle.database.answers(handle.device.identity, problem.network_config):
        yield from (row for row in answer.rows if row.usable and row.solver_id in handle.registry)


def _configs(rows: Iterable[Row]) -> dict[str, tuple[Config, ...]]:
    found: dict[str, dict[Config, None]] = {}
    for row in rows:
        with contextlib.suppress(InvalidConfigError):
            found.setdefault(row.solver_id, {})[Config.from_json(row.config)] = None
    return {solver_id: tuple(configs) for solver_id, configs in found.items()}


def candidate_of(name: str, problem: ProblemDescription) -> Candidate:
    """The candidate that an id, "solver:configuration", names.

    Raises:
        InvalidConfigError: the id names no configuration.
    """
    solver_id, _, config = name.partition(":")
    return Candidate(network_config=problem.network_config, solver_id=solver_id, config=Config.from_json(config))
