"""Answers of the FindDBs: rows become solutions.

Holds the rules of a hit: a row is valid while its solver's version and sources are those of this release and its
library is installed; an answer counts where the scope of an earlier find covers the request.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from miofind.find.failures import newest_statuses
from miofind.find.scopes import WIDE_BOUNDS, asked_all, considered, requested_scope
from miofind.find.validity import current_environment, is_current, may_serve
from miofind.finddb import Answer, Scope
from miofind.found import Found, Solution, Source
from miofind.handle import Handle
from miofind.options import FindOptions
from miofind.problem import ProblemDescription
from miofind.solution import Config
from miofind.solver import solvers

logger = logging.getLogger(__name__)


class _Stored(NamedTuple):
    """What of a row becomes a solution."""

    solver_id: str
    solver_version: int
    source_hash: str
    kernel_hash: str
    config: str
    time_ms: float
    workspace_bytes: int
    deterministic: bool
    max_error: float | None
    environment: str


def look_up(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    measured: Iterable[str] = (),
    partial: bool = True,
    dynamic_only: bool = False,
    queue: bool = True,
) -> list[Solution] | None:
    """Solutions that the FindDB has for a request, fastest first; None where it has none or has not looked far enough.

    Args:
        measured: ids of solutions measured just now.
        partial: whether an answer counts that lacks solvers which came or changed since it was measured, or whose find
            ran out of time.
        dynamic_only: ask for no more than shape-generic solvers.
        queue: note for a re-check what is stale or incomplete.
    """
    fresh = frozenset(measured)
    request = requested_scope(options, handle.device, dynamic_only)
    if not partial and _wants_all(problem, options, handle):
        request = replace(request, complete=True)
    device = handle.device.identity
    answer = handle.database.answer(device, problem.network_config)
    if answer is None:
        return None
    late: tuple[str, ...] = ()
    if not fresh and not answer.covers(request):
        nearest = _nearest(problem, request, handle, partial=partial)
        if nearest is None:
            return None
        answer, late = nearest.answer, nearest.missing
    found = Found(handle)
    void = set()
    stale = False
    environment = current_environment(handle.device)
    solutions = found.solutions
    current: dict[tuple[str, int, str], bool] = {}
    for row in map(_Stored._make, answer.rows.columns(*_Stored._fields)):
        version = row[:3]
        if version not in current:
            current[version] = is_current(*version, handle.device)
        if not current[version]:
            void.add(row.solver_id)
        elif _is_within(row, problem, options):
            source = Source.MEASURED if fresh and f"{row.solver_id}:{row.config}" in fresh else Source.FINDDB
            solutions.append(_as_solution(problem, row, found, source))
            stale = stale or row.environment != environment
    if void:
        void -= {solution.solver_id for solution in solutions}
        wanted = sorted(void & set(request.solvers))
        late = (*late, *(name for name in wanted if may_serve(solvers()[name], problem, handle.device)))
    if late and not fresh and not partial:
        return None
    if fresh or not queue:
        return solutions or None
    if late:
        handle.database.queue_recheck(device, problem.network_config, f"not measured yet: {', '.join(late)}")
    elif stale:
        handle.database.queue_recheck(device, problem.network_config, "measured with other versions")
    return solutions or None


def _wants_all(problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether only a find that came to its own end counts, not one that a budget ended.

    For a search with `trials`: unless as many candidates were tried, by whatever finds and whatever became of them, so
    that more trials search on and as many do not. Otherwise: unless the time budget is finite.
    """
    if options.searches and options.trials is not None:
        return len(newest_statuses(problem, handle, ignored=frozenset())) < options.trials
    return math.isinf(options.budget_s)


@dataclass(frozen=True, slots=True)
class _Nearest:
    """An answer and the solvers that might serve and that it has not considered."""

    answer: Answer
    missing: tuple[str, ...]


def _nearest(problem: ProblemDescription, request: Scope, handle: Handle, *, partial: bool) -> _Nearest | None:
    """The first FindDB's answer whose finds together considered what a request wants; None if there is none.

    What refuses the problem need not have been considered. What came since a find that asked all solvers may be
    missing from a partial answer; what a filter left out may not.
    """
    for answer in handle.database.answers(handle.device.identity, problem.network_config):
        known = considered(request, answer.scopes)
        missing = request.solvers.keys() - known
        if not known or WIDE_BOUNDS in missing:
            continue
        late = tuple(name for name in sorted(missing) if may_serve(solvers()[name], problem, handle.device))
        if not late or (partial and asked_all(request, answer.scopes)):
            return _Nearest(answer, late)
    return None


@functools.lru_cache(maxsize=1 << 16)
def _stored_config(text: str) -> Config:
    """A configuration from a FindDB: few texts serve many problems."""
    return Config.from_json(text)


def _is_within(row: _Stored, problem: ProblemDescription, options: FindOptions) -> bool:
    """Whether a row keeps the caller's limits."""
    limit = options.workspace_limit_bytes
    if limit is not None and row.workspace_bytes > limit:
        return False
    if options.deterministic and not row.deterministic:
        return False
    solver = solvers()[row.solver_id]
    if (options.only or options.exclude) and not options.allows(solver):
        return False
    if options.max_error is not None and (row.max_error is None or row.max_error > options.max_error):
        return False
    try:
        if options.strict_nonfinite and solver.spreads_nonfinite(problem, _stored_config(row.config)):
            return False
        return options.max_error is not None or solver.error_growth(problem, _stored_config(row.config)) <= 1
    except Exception as error:  # a solver's own code may raise anything: its rows are no answer, those of others are
        logger.debug("%s cannot say what becomes of errors with %s: %r", solver.id, row.config, error)
        return False


def _as_solution(problem: ProblemDescription, row: _Stored, found: Found, source: Source) -> Solution:
    solver = solvers()[row.solver_id]
    return Solution(
        problem=problem,
        device=found.handle.device,
        solver_id=row.solver_id,
        algorithm=solver.algorithm,
        library=solver.library,
        config=_stored_config(row.config),
        time_ms=row.time_ms,
        workspace_bytes=row.workspace_bytes,
        deterministic=row.deterministic,
        max_error=row.max_error,
        source=source,
        kernel_hash=row.kernel_hash,
        found=found,
        position=len(found.solutions),
    )
