"""Rows of FindDBs become the solutions that a request takes.

A row is valid while its solver's version and sources are those of this release and its library is installed, and while
the solver, asked today, would do what was measured; a request takes those within its limits and of its kind.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from miofind.core.problem import ProblemDescription
from miofind.errors import described, raise_if_interrupted
from miofind.find.lookup.validity import current_environment, is_current
from miofind.finddb import BEST_PER_SOLVER, Answer, Row
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.refusals import Measured, Refusals, Selected, Selection, stored_config
from miofind.runtime.solution import Solution, SolutionList, Source, reordered
from miofind.solver.candidate import Status
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
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
    status: str
    samples: int
    contended: bool


_fields_of = operator.attrgetter(*Stored._fields)


def of_answer(answer: Answer) -> Iterator[Stored]:
    """The rows of an answer, of which less is decoded than of whole rows."""
    return map(Stored._make, answer.rows.columns(*Stored._fields))


def of_rows(rows: Iterable[Row]) -> Iterator[Stored]:
    """What of each row a choice needs."""
    return map(Stored._make, map(_fields_of, rows))


def admits(row: Row, problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether a request takes a row of a solver's present version and sources."""
    stored, solver = Stored._make(_fields_of(row)), handle.registry[row.solver_id]
    if not options.allows(solver) or not _is_within(stored, options) or answers_no_more(stored, problem, handle):
        return False
    return _is_of_kind(stored, solver, problem, options)


def answers_no_more(row: Row | Stored, problem: ProblemDescription, handle: Handle) -> bool:
    """Whether a row's solver, asked today, would do otherwise than the row says."""
    return _is_refused(row, handle.registry[row.solver_id], handle.refusals(problem))


def _is_refused(row: Row | Stored, solver: Solver, refusals: Refusals) -> bool:
    measured = Measured(row.config, row.workspace_bytes, row.deterministic, row.kernel_hash)
    return refusals.of_row(solver, measured).refused


def selected_of(answer: Answer, problem: ProblemDescription, options: FindOptions, handle: Handle) -> Selection:
    """Solutions of those of an answer's rows that a request takes; the last request's are made again without a look."""
    refusals = handle.refusals(problem)
    last = refusals.last
    if last is None or last.answer is not answer or last.options != options:
        found = selected(of_answer(answer), problem, options, handle, frozenset())
        refusals.last = last = Selected(answer, options, found)
    return last.selection._replace(solutions=reordered(last.selection.solutions, handle))


def selected(
    rows: Iterable[Stored],
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    fresh: frozenset[str],
) -> Selection:
    """Solutions of those of the rows that a request takes.

    Args:
        fresh: ids of solutions measured just now.
    """
    found = SolutionList(handle)
    environment = current_environment(handle.device)
    current: dict[tuple[str, int, str], Solver | None] = {}
    registry, refusals = handle.registry, handle.refusals(problem)
    void, stale = set(), False
    kept: Counter[str] = Counter()
    passed_over: set[str] = set()
    for row in _asked(rows, options, registry):
        version = row[:3]
        if version not in current:
            known = registry.get(row.solver_id)
            current[version] = known if is_current(known, *version[1:], handle.device) else None
        solver = current[version]
        if solver is None:
            void.add(row.solver_id)
            continue
        kept[row.solver_id] += 1
        if not _is_within(row, options):
            continue
        if _is_refused(row, solver, refusals):
            void.add(row.solver_id)
            passed_over.add(row.solver_id)
            continue
        if not _is_of_kind(row, solver, problem, options):
            passed_over.add(row.solver_id)
            continue
        source = Source.MEASURED if fresh and f"{row.solver_id}:{row.config}" in fresh else Source.FINDDB
        found.solutions.append(_as_solution(problem, row, found, source))
        stale = stale or row.environment != environment
    is_thin = any(kept[solver_id] >= BEST_PER_SOLVER for solver_id in passed_over)
    limited = kept.keys() - void - {solution.solver_id for solution in found.solutions}
    return Selection(found.solutions, frozenset(void), is_thin, stale, frozenset(limited))


def _asked(rows: Iterable[Stored], options: FindOptions, registry: Registry) -> Iterable[Stored]:
    """Rows but for those of solvers that a request does not ask: nobody need hash the sources of these."""
    if not (options.only or options.exclude):
        return rows
    listed = list(rows)
    solvers = {row.solver_id: registry.get(row.solver_id) for row in listed}
    others = {name for name, solver in solvers.items() if solver is not None and not options.allows(solver)}
    return [row for row in listed if row.solver_id not in others]


def _is_within(row: Stored, options: FindOptions) -> bool:
    """Whether a row keeps the caller's limits."""
    limit = options.workspace_limit_bytes
    if limit is not None and row.workspace_bytes > limit:
        return False
    if options.deterministic and not row.deterministic:
        return False
    return options.max_error is None or (row.max_error is not None and row.max_error <= options.max_error)


def _is_of_kind(row: Stored, solver: Solver, problem: ProblemDescription, options: FindOptions) -> bool:
    """Whether a row is of a kind that a request takes, which its solver alone can tell."""
    try:
        if options.strict_nonfinite and solver.spreads_nonfinite(problem, stored_config(row.config)):
            return False
        return options.max_error is not None or _keeps_bound(solver, problem, row.config)
    except BaseException as error:  # its own code may raise anything: its rows are no answer, those of others are
        raise_if_interrupted(error)
        logger.debug("%s cannot say what becomes of errors with %s: %s", solver.id, row.config, described(error))
        return False


@functools.lru_cache(maxsize=1 << 14)  # every look-up asks it of every row
def _keeps_bound(solver: Solver, problem: ProblemDescription, config: str) -> bool:
    return solver.keeps_bound(problem, stored_config(config))


def _as_solution(problem: ProblemDescription, row: Stored, found: SolutionList, source: Source) -> Solution:
    solver = found.handle.registry[row.solver_id]
    return Solution(
        problem=problem,
        device=found.handle.device,
        solver_id=row.solver_id,
        algorithm=solver.algorithm,
        library=solver.library,
        config=stored_config(row.config),
        time_ms=row.time_ms,
        workspace_bytes=row.workspace_bytes,
        deterministic=row.deterministic,
        max_error=row.max_error,
        source=source,
        kernel_hash=row.kernel_hash,
        samples=row.samples,
        cut_off=row.status == Status.CUT_OFF,
        contended=row.contended,
        solution_list=found,
        position=len(found.solutions),
    )
