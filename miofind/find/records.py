"""Answers of the FindDBs: rows become solutions.

Holds the rules of a hit: a row is valid while its solver's version and sources are those of this release and its
library is installed; an answer counts where the scope of an earlier find covers the request.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from miofind.find.failures import newest_statuses
from miofind.find.scopes import WIDE_BOUNDS, asked, considered, requested_scope
from miofind.find.validity import current_environment, is_current, is_valid, may_serve
from miofind.finddb import BEST_PER_SOLVER, Answer, Row, Scope
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


class _Taken(NamedTuple):
    """What became of rows.

    Attributes:
        void: solvers with rows of other versions or sources than they have now.
        is_thin: whether the history may have faster rows that the request takes: of a solver of which an answer keeps
            the best alone, some of these are not taken.
        is_stale: whether other versions of libraries or driver measured some of the solutions.
    """

    solutions: list[Solution]
    void: frozenset[str]
    is_thin: bool
    is_stale: bool


class _Held(NamedTuple):
    """What one FindDB has for a request.

    Attributes:
        late: solvers that might serve, and that came or changed since it was measured.
        is_stale: whether other versions of libraries or driver measured some of it.
    """

    solutions: list[Solution]
    late: tuple[str, ...]
    is_stale: bool


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
    """Solutions that FindDBs have for a request, fastest first; None where no FindDB has any or has looked far enough.

    The first FindDB that lacks no solver answers, else the one that lacks the fewest; where another one came before it,
    with the rows of all.

    Args:
        measured: ids of solutions measured just now.
        partial: whether an answer counts that lacks solvers which came or changed since it was measured, or whose find
            ran out of time.
        dynamic_only: an answer counts that lacks others than shape-generic solvers; what it has of these is given, too.
        queue: note for a re-check what is stale or incomplete.
    """
    request = requested_scope(options, handle.device, dynamic_only)
    if not partial and _wants_all(problem, options, handle):
        request = replace(request, complete=True)
    asked = _Asked(problem, options, handle, request, frozenset(measured), partial)
    device = handle.device.identity
    found, *others = _chosen(map(asked.held, handle.database.answers(device, problem.network_config)))
    if found is None or (found.late and not partial):
        return None
    if others and (whole := asked.of_all_histories()).solutions:
        found = found._replace(solutions=whole.solutions, is_stale=whole.is_stale)
    if queue and not asked.fresh:
        if found.late:
            handle.database.queue_recheck(device, problem.network_config, f"not measured yet: {', '.join(found.late)}")
        elif found.is_stale:
            handle.database.queue_recheck(device, problem.network_config, "measured with other versions")
    return found.solutions


def _chosen(held: Iterable[_Held | None]) -> list[_Held | None]:
    """The first that lacks no solver, else the first of those that lack the fewest; then what was asked besides."""
    seen = []
    for each in held:
        if each is not None:
            seen.append(each)
            if not each.late:
                break
    return [*sorted(seen, key=lambda each: len(each.late))] or [None]


class _Asked(NamedTuple):
    """A request as answers are held against it.

    Attributes:
        fresh: ids of solutions measured just now; where there are any, what they were recorded in is the answer.
    """

    problem: ProblemDescription
    options: FindOptions
    handle: Handle
    request: Scope
    fresh: frozenset[str]
    partial: bool

    def held(self, answer: Answer) -> _Held | None:
        """What an answer has for the request, None where that is nothing, or too little was considered for it."""
        late = self._not_considered(answer)
        if late is None:
            return None
        taken = self._taken(map(_Stored._make, answer.rows.columns(*_Stored._fields)))
        void = taken.void
        if taken.is_thin:
            taken = self.of_all_histories()
        if void and not self.fresh:
            void -= {solution.solver_id for solution in taken.solutions}
            late = tuple(sorted({*late, *self._serving(void & self.request.solvers.keys())}))
        return _Held(taken.solutions, late, taken.is_stale) if taken.solutions else None

    def of_all_histories(self) -> _Taken:
        """Solutions of the best rows of all FindDBs that the request takes."""
        device = self.handle.device

        def admits(row: Row) -> bool:
            stored = _Stored._make(_stored_fields(row))
            return _is_within(stored, self.options) and _is_of_kind(stored, self.problem, self.options)

        rows = self.handle.database.best_rows(
            device.identity, self.problem.network_config, holds=lambda row: is_valid(row, device), admits=admits
        )
        return self._taken(map(_Stored._make, map(_stored_fields, rows)))

    def _taken(self, rows: Iterable[_Stored]) -> _Taken:
        """Solutions of those of the rows that a request takes."""
        problem, handle, fresh = self.problem, self.handle, self.fresh
        found = Found(handle)
        environment = current_environment(handle.device)
        current: dict[tuple[str, int, str], bool] = {}
        void, stale = set(), False
        kept: Counter[str] = Counter()
        passed_over: set[str] = set()
        for row in rows:
            version = row[:3]
            if version not in current:
                current[version] = is_current(*version, handle.device)
            if not current[version]:
                void.add(row.solver_id)
                continue
            kept[row.solver_id] += 1
            if not _is_within(row, self.options):
                continue
            if not _is_of_kind(row, problem, self.options):
                passed_over.add(row.solver_id)
                continue
            source = Source.MEASURED if fresh and f"{row.solver_id}:{row.config}" in fresh else Source.FINDDB
            found.solutions.append(_as_solution(problem, row, found, source))
            stale = stale or row.environment != environment
        is_thin = any(kept[solver_id] >= BEST_PER_SOLVER for solver_id in passed_over)
        return _Taken(found.solutions, frozenset(void), is_thin, stale)

    def _not_considered(self, answer: Answer) -> tuple[str, ...] | None:
        """The solvers that might serve and that an answer's finds together have not considered; None if it is none.

        What refuses the problem need not have been considered. What came since a find that asked all solvers, or
        changed since one that asked it, may be missing from a partial answer; what a filter left out may not.
        """
        if self.fresh or answer.covers(self.request):
            return ()
        known = considered(self.request, answer.scopes)
        missing = self.request.solvers.keys() - known
        if not known or WIDE_BOUNDS in missing:
            return None
        late = self._serving(missing)
        return late if not late or (self.partial and asked(late, self.request, answer.scopes)) else None

    def _serving(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the solvers that do not refuse the problem."""
        return tuple(name for name in sorted(names) if may_serve(solvers()[name], self.problem, self.handle.device))


def _wants_all(problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether only a find that came to its own end counts, not one that a budget ended.

    For a search with `trials`: unless as many candidates of the solvers that the options allow were tried, by whatever
    finds and whatever became of them, so that more trials search on and as many do not. Otherwise: unless the time
    budget is finite.
    """
    if options.searches and options.trials is not None:
        tried = newest_statuses(problem, handle, ignored=frozenset())
        return sum(options.allows(solvers()[name.partition(":")[0]]) for name in tried) < options.trials
    return math.isinf(options.budget_s)


@functools.lru_cache(maxsize=1 << 16)
def _stored_config(text: str) -> Config:
    """A configuration from a FindDB: few texts serve many problems."""
    return Config.from_json(text)


_stored_fields = operator.attrgetter(*_Stored._fields)


def _is_within(row: _Stored, options: FindOptions) -> bool:
    """Whether a row keeps the caller's limits."""
    limit = options.workspace_limit_bytes
    if limit is not None and row.workspace_bytes > limit:
        return False
    if options.deterministic and not row.deterministic:
        return False
    if (options.only or options.exclude) and not options.allows(solvers()[row.solver_id]):
        return False
    return options.max_error is None or (row.max_error is not None and row.max_error <= options.max_error)


def _is_of_kind(row: _Stored, problem: ProblemDescription, options: FindOptions) -> bool:
    """Whether a row is of a kind that a request takes, which its solver alone can tell."""
    solver = solvers()[row.solver_id]
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
