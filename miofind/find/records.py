"""Between finds and the FindDB: outcomes become rows, rows become solutions.

Holds the rules of a hit: a row is valid while its solver's version and sources are those of this release and its
library is installed; an answer counts where the scope of an earlier find covers the request.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from miofind.candidate import Outcome, Status
from miofind.compiler import source_hash
from miofind.device import Device
from miofind.environment import versions
from miofind.find.plan import Plan
from miofind.finddb import Answer, Comparison, Row, Scope, environment_id
from miofind.finddb import Verdict as StoredVerdict
from miofind.found import Found, Solution, Source
from miofind.handle import Handle
from miofind.measure.verdict import Verdict
from miofind.options import FindOptions
from miofind.problem import ProblemDescription
from miofind.solution import Config
from miofind.solver import Solver, solver_by_id, solvers

logger = logging.getLogger(__name__)

_BATCH = 32
WIDE_BOUNDS = "any error bound"
"""Stands among a scope's solvers where `max_error` let algorithms with wider error bounds take part."""


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
    request = _request(options, handle.device, dynamic_only)
    if not partial and _wants_all(problem, options, handle):
        request = replace(request, complete=True)
    device = handle.device.identity
    answer = handle.database.answer(device, problem.network_config)
    if answer is None:
        return None
    late: tuple[str, ...] = ()
    if not fresh and not answer.covers(request):
        nearest = _nearest(handle.database.answers(device, problem.network_config), request)
        if nearest is None:
            return None
        answer = nearest.answer
        late = tuple(name for name in nearest.missing if may_serve(solvers()[name], problem, handle.device))
        if late and not partial:
            return None
    found = Found(handle)
    void = set()
    stale = False
    environment = _current_environment(handle.device)
    solutions = found.solutions
    current: dict[tuple[str, int, str], bool] = {}
    for row in map(_Stored._make, answer.rows.columns(*_Stored._fields)):
        version = row[:3]
        if version not in current:
            current[version] = _is_current(*version, handle.device)
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


@functools.lru_cache(maxsize=64)
def _current_environment(device: Device) -> str:
    return environment_id(versions(device))


def _wants_all(problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether only a find that came to its own end counts, not one that a budget ended.

    For a search with `trials`: unless as many candidates were tried, by whatever finds and whatever became of them, so
    that more trials search on and as many do not. Otherwise: unless the time budget is finite.
    """
    if options.searches and options.trials is not None:
        return len(_newest_statuses(problem, handle, ignored=frozenset())) < options.trials
    return math.isinf(options.budget_s)


def failures(problem: ProblemDescription, handle: Handle) -> dict[str, Status]:
    """By id, the candidates that the FindDBs know to have failed here with the solvers of this release."""
    statuses = _newest_statuses(problem, handle, ignored=frozenset())
    return {name: status for name, status in statuses.items() if not status.usable}


def quarantined(problem: ProblemDescription, handle: Handle) -> frozenset[str]:
    """Ids of the candidates that failed here with the solvers of this release and are not to be tried again.

    Running out of memory speaks of the moment: it quarantines nobody, and lifts no quarantine. A failure with another
    driver or library says nothing of this one.
    """
    statuses = _newest_statuses(
        problem,
        handle,
        ignored=frozenset({Status.OUT_OF_MEMORY}),
        environment=_current_environment(handle.device),
    )
    return frozenset(name for name, status in statuses.items() if not status.usable)


def _newest_statuses(
    problem: ProblemDescription, handle: Handle, *, ignored: frozenset[Status], environment: str | None = None
) -> dict[str, Status]:
    """What became last of each candidate that was measured on this device with the solvers of this release."""
    newest: dict[str, Row] = {}
    for history in handle.database.histories(handle.device.identity, problem.network_config):
        for row in history.rows:
            name = f"{row.solver_id}:{row.config}"
            known = newest.get(name)
            if row.status in ignored or (environment is not None and row.environment != environment):
                continue
            if not is_valid(row, handle.device):
                continue
            if known is None or known.age < row.age:
                newest[name] = row
    return {name: Status(row.status) for name, row in newest.items()}


@dataclass(frozen=True, slots=True)
class _Nearest:
    """An answer and the solvers it has not considered."""

    answer: Answer
    missing: tuple[str, ...]


def _nearest(answers: Iterable[Answer], request: Scope) -> _Nearest | None:
    """The first FindDB's answer that covers a request but for solvers that are new since; None if there is none."""
    for answer in answers:
        missing = answer.missing(request.solvers)
        rest = {name: version for name, version in request.solvers.items() if name not in missing}
        if WIDE_BOUNDS not in missing and rest and answer.covers(replace(request, solvers=rest)):
            return _Nearest(answer, missing)
    return None


def may_serve(solver: Solver, problem: ProblemDescription, device: Device) -> bool:
    """Whether a solver would have to be measured to be ranked: it does not refuse the problem."""
    try:
        return bool(solver.applicability(problem, device))
    except Exception as error:  # a solver's own code may raise anything
        logger.debug("%s cannot say whether it serves %s: %r", solver.id, problem, error)
        return True


def is_valid(row: Row, device: Device) -> bool:
    """Whether this release would still do what a row measured, as far as version, sources and libraries tell."""
    return _is_current(row.solver_id, row.solver_version, row.source_hash, device)


@functools.lru_cache(maxsize=1024)
def _is_current(solver_id: str, version: int, sources: str, device: Device) -> bool:
    solver = solvers().get(solver_id)
    if solver is None or version != solver.version or sources != solver_hash(solver):
        return False
    return all(device.library_version(key.library) is not None for key in solver.keys)


@functools.lru_cache(maxsize=1 << 16)
def _stored_config(text: str) -> Config:
    """A configuration from a FindDB: few texts serve many problems."""
    return Config.from_json(text)


@functools.cache
def solver_hash(solver: Solver) -> str:
    """Hash of the sources that a solver's kernels reach."""
    return source_hash(solver.sources, solver.source_package) if solver.sources else ""


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
    if options.max_error is not None:
        return row.max_error is not None and row.max_error <= options.max_error
    try:
        return solver.error_growth(problem, _stored_config(row.config)) <= 1
    except Exception as error:  # a solver's own code may raise anything: its rows are no answer, those of others are
        logger.debug("%s cannot say how its errors grow with %s: %r", solver.id, row.config, error)
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


@functools.lru_cache(maxsize=256)
def _request(options: FindOptions, device: Device, dynamic_only: bool) -> Scope:
    """The scope that a request wants covered."""
    considered = {
        solver.id: solver.version
        for solver in solvers().values()
        if options.allows(solver)
        and (solver.is_dynamic or not dynamic_only)
        and any(key.place is device.place for key in solver.keys)
        and any(device.library_version(key.library) is not None for key in solver.keys)
    }
    return _scope(options, considered, complete=False, filtered=dynamic_only)


def _scope(options: FindOptions, considered: Mapping[str, int], *, complete: bool, filtered: bool) -> Scope:
    filters: dict[str, object] = {}
    if filtered or options.only or options.exclude:
        filters["solvers"] = sorted(considered)
    if options.deterministic:
        filters["deterministic"] = True
    if options.max_error is not None:
        considered = {**considered, WIDE_BOUNDS: 1}
    return Scope(
        solvers=dict(considered),
        filters=filters,
        workspace_limit_bytes=options.workspace_limit_bytes,
        effort="search" if options.searches else "defaults",
        complete=complete,
    )


def row_of(outcome: Outcome) -> Row:
    """What a FindDB keeps of an outcome."""
    solver = solver_by_id(outcome.candidate.solver_id)
    timing = outcome.timing
    return Row(
        solver_id=solver.id,
        solver_version=solver.version,
        config=outcome.candidate.config.json,
        status=outcome.status.value,
        algorithm=solver.algorithm.value,
        library=solver.library.value,
        source_hash=solver_hash(solver),
        kernel_hash=outcome.kernel_hash,
        message=outcome.message,
        time_ms=timing.time_ms if timing else None,
        min_ms=timing.min_ms if timing else None,
        p20_ms=timing.p20_ms if timing else None,
        p80_ms=timing.p80_ms if timing else None,
        samples=timing.samples if timing else 0,
        protocol=timing.protocol if timing else "",
        workspace_bytes=outcome.workspace_bytes,
        deterministic=outcome.deterministic,
        max_error=outcome.max_error,
        contended=outcome.contended,
        dropped_samples=outcome.dropped_samples,
    )


class Recording:
    """Writes the outcomes of one find with its verdict and scope when it ends; of a search, in batches as they come.

    A find that ends drops the problem's notes for a re-check, since it was one.

    Attributes:
        search_ended: for a search, whether it came to its own end; a scope is incomplete where a budget ended it.
    """

    def __init__(self, problem: ProblemDescription, options: FindOptions, handle: Handle, plan: Plan) -> None:
        self._problem = problem
        self._options = options
        self._handle = handle
        self._plan = plan
        self._pending: list[Row] = []
        self._tried: set[str] = set()
        self._verdict: StoredVerdict | None = None
        self.search_ended = False

    def __enter__(self) -> Recording:
        return self

    def add(self, outcome: Outcome) -> None:
        """Take one outcome."""
        self._tried.add(outcome.candidate.id)
        self._pending.append(row_of(outcome))
        if not outcome.status.usable or (self._plan.spaces and len(self._pending) >= _BATCH):
            self._write()

    def add_verdict(self, verdict: Verdict) -> None:
        """Take the verdict of the find's last race; it is written after the rows it speaks of."""
        self._verdict = StoredVerdict(
            winner=verdict.winner,
            ties=verdict.ties,
            comparisons=tuple(
                Comparison(candidate=other.candidate, low=other.low, high=other.high) for other in verdict.comparisons
            ),
            blocks=verdict.blocks,
            protocol=verdict.protocol,
        )

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Write what came; the scope too where the find was not broken off."""
        scope = None
        if kind is None:
            scope = _scope(
                self._options, self._plan.considered, complete=self._is_complete, filtered=self._plan.is_filtered
            )
        if self._pending or scope is not None or self._verdict is not None:
            self._write(scope, self._verdict)
        if scope is not None and scope.complete and not scope.filters and scope.workspace_limit_bytes is None:
            self._handle.database.drop_rechecks(self._handle.device.identity, self._problem.network_config)

    @property
    def _is_complete(self) -> bool:
        """Whether no budget ended the find before it had tried all that it would."""
        if self._plan.spaces:
            return self.search_ended
        return self._tried.issuperset(planned.candidate.id for planned in self._plan.candidates)

    def _write(self, scope: Scope | None = None, verdict: StoredVerdict | None = None) -> None:
        rows, self._pending = self._pending, []
        self._handle.database.record(
            self._handle.device.identity,
            self._problem.network_config,
            rows,
            scope=scope,
            environment=versions(self._handle.device),
            verdict=verdict,
        )
