"""What FindDBs teach: candidates of problems with their measured times and estimates.

Every row counts that is of a solver's present version and sources, in whichever source it is, and every finalist of a
race: a release keeps few of a solver's rows, and its verdicts tell how others compared. Of a candidate that several
sources have, the last measurement counts.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library
from miofind.errors import DatabaseError, InvalidConfigError, InvalidProblemError, described, raise_if_interrupted
from miofind.find.immediate.kinds import Kind
from miofind.find.lookup.validity import is_current
from miofind.finddb import LIKELY, History, Row, Store, Verdict
from miofind.runtime.refusals import stored_config
from miofind.solver.registry import Registry, inner_id, is_composed
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

logger = logging.getLogger(__name__)

_LEAST_MS, _MOST_MS = 1e-6, 1e9
"""Times of no kernel are beyond, but of damaged FindDBs: a nanosecond and eleven days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One candidate of a problem.

    Attributes:
        time_ms: measured.
        is_bound: whether it was cut off, so that the time is rough.
        estimate_ms: the solver's own, today; 0 of cuDNN's, whose plans nothing predicts.
    """

    solver_id: str
    config: Config
    time_ms: float
    is_bound: bool
    estimate_ms: float

    @property
    def is_predicted(self) -> bool:
        """Whether an answer without measuring may be this candidate."""
        return self.estimate_ms > 0


@dataclass(frozen=True)
class Lesson:
    """A problem and the candidates that are known of it, in the order of solver and configuration.

    Attributes:
        is_complete: whether each solver that serves the problem has a candidate here, or a find of all passed it over:
            of a fused problem those that are far slower without its epilogue.
        device: what measured them, and what their estimates are for.
    """

    problem: ProblemDescription
    samples: tuple[Sample, ...] = field(repr=False)
    is_complete: bool
    device: Device = field(repr=False)

    @cached_property
    def kind(self) -> Kind:
        """The kind of the problem."""
        return Kind.of(self.problem)

    @property
    def is_asked_for(self) -> bool:
        """Whether finds ask for the problem: volumes that are images are found as these."""
        return self.problem.flattened is self.problem

    @cached_property
    def best_ms(self) -> float:
        """The best time known, cuDNN's included."""
        return min(sample.time_ms for sample in self.samples)

    @cached_property
    def predicted(self) -> tuple[Sample, ...]:
        """The candidates that an answer without measuring may be."""
        return tuple(sample for sample in self.samples if sample.is_predicted)


@dataclass(frozen=True, slots=True)
class _Known:
    """The last measurement of a candidate."""

    created_at: str
    time_ms: float
    is_bound: bool


@dataclass(slots=True)
class _Found:
    """What sources tell of a problem.

    Attributes:
        known: by solver and configuration.
        asked: solvers that finds of all considered.
        tried: solvers that were measured, whatever code they had.
    """

    known: dict[tuple[str, str], _Known] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)


def lessons(sources: Sequence[Store], device: Device, registry: Registry) -> list[Lesson]:
    """The problems that sources know of a device, in the order of their keys; those with two candidates or more.

    Raises:
        DatabaseError: a source cannot be read.
    """
    found: defaultdict[str, _Found] = defaultdict(_Found)
    for source in sources:
        try:
            for history in source.histories(device.identity):
                _take_in(history, device, registry, found[history.network_config])
        except DatabaseError as error:
            raise DatabaseError(f"{source.where} cannot be learnt from: {error}") from error
    made = (_lesson(name, found[name], device, registry) for name in sorted(found))
    return [lesson for lesson in made if lesson is not None]


def _take_in(history: History, device: Device, registry: Registry, found: _Found) -> None:
    """Add what a history tells of candidates with the solvers of this release."""
    known = found.known
    found.tried.update(inner_id(row.solver_id) for row in history.rows)
    for scope in history.scopes:
        if scope.complete and scope.effort != LIKELY and not scope.filters:
            found.asked |= scope.solvers.keys()
    rows = [row for row in history.rows if row.usable and _is_taken(row, device, registry)]
    for row in rows:
        assert row.time_ms is not None
        _note(known, (row.solver_id, row.config), _Known(row.created_at, row.time_ms, row.is_cut_off))
    measured = {row.candidate: row for row in rows}
    days = {(row.solver_id, row.created_at[:13]) for row in rows}
    for verdict in history.verdicts:
        for candidate, time_ms in _finalists(verdict, measured):
            solver_id, _, config = candidate.partition(":")
            if (solver_id, verdict.created_at[:13]) in days:  # in the same hour: with the code that the rows tell of
                _note(known, (solver_id, config), _Known(verdict.created_at, time_ms, False))


def _note(known: dict[tuple[str, str], _Known], name: tuple[str, str], new: _Known) -> None:
    if name not in known or known[name].created_at < new.created_at:
        known[name] = new


def _is_taken(row: Row, device: Device, registry: Registry) -> bool:
    if row.contended:
        return False
    return is_current(registry.get(row.solver_id), row.solver_version, row.source_hash, device)


def _finalists(verdict: Verdict, measured: Mapping[str, Row]) -> Iterator[tuple[str, float]]:
    """The candidates beside a race's winner, and their times by how they compared."""
    winner = measured.get(verdict.winner)
    if winner is None or winner.time_ms is None:
        return
    for comparison in verdict.comparisons:
        if comparison.candidate not in measured and comparison.low > 0:
            yield comparison.candidate, winner.time_ms * math.sqrt(comparison.low * comparison.high)


def _lesson(network_config: str, found: _Found, device: Device, registry: Registry) -> Lesson | None:
    known = found.known
    try:
        problem = ProblemDescription.from_network_config(network_config)
    except InvalidProblemError as error:
        logger.debug("%s is left out: %s", network_config, error)
        return None
    if len(known) < 2:
        return None
    serving = {solver.id for solver in registry.values() if _serves(solver, problem, device)}
    if problem.epilogue:
        forms = {solver_id for solver_id, _ in known if is_composed(solver_id)}
        serving |= {name for name in forms if _serves(registry[name], problem, device)}
    samples = tuple(_samples(problem, known, serving, device, registry))
    if len(samples) < 2:
        return None
    missing = serving - {solver_id for solver_id, _ in known}
    if problem.epilogue:
        missing -= found.asked - found.tried
    is_complete = not any(_is_asked(registry[name], problem, device) for name in missing)
    return Lesson(problem, samples, is_complete, device)


def _serves(solver: Solver, problem: ProblemDescription, device: Device) -> bool:
    """Whether a solver serves a problem."""
    try:
        return bool(solver.applicability(problem, device))
    except BaseException as error:  # a solver's own code may raise anything
        raise_if_interrupted(error)
        logger.debug("%s is left out of %s: %s", solver.id, problem, described(error))
        return False


def _is_asked(solver: Solver, problem: ProblemDescription, device: Device) -> bool:
    """Whether a default find would measure a solver that serves a problem."""
    if solver.is_last_resort or solver.library is Library.CUDNN:
        return not solver.is_last_resort
    return any(solver.keeps_bound(problem, config) for config in solver.default_configs(problem, device))


def _samples(
    problem: ProblemDescription,
    known: Mapping[tuple[str, str], _Known],
    serving: Iterable[str],
    device: Device,
    registry: Registry,
) -> Iterator[Sample]:
    for (solver_id, text), measured in sorted(known.items()):
        if solver_id not in serving or not _LEAST_MS <= measured.time_ms <= _MOST_MS:
            continue
        try:
            config, solver = stored_config(text), registry[solver_id]
            estimate_ms = 0.0
            if solver.library is not Library.CUDNN:
                solver.check_config(problem, device, config)
                if not solver.keeps_bound(problem, config):
                    continue
                estimate_ms = solver.estimate_ms(problem, device, config)
        except InvalidConfigError as error:
            logger.debug("%s: %s is left out: %s", problem, solver_id, error)
            continue
        yield Sample(
            solver_id=solver_id,
            config=config,
            time_ms=measured.time_ms,
            is_bound=measured.is_bound,
            estimate_ms=estimate_ms,
        )
