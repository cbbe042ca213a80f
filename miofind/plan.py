"""Which candidates a request measures: configurations of solvers that apply, within its limits, best guess first."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from miofind.candidate import Candidate
from miofind.device import Device
from miofind.errors import InvalidConfigError, MiofindError
from miofind.options import FindOptions
from miofind.problem import ProblemDescription
from miofind.solution import Config
from miofind.solver import Solver, solvers

logger = logging.getLogger(__name__)

SEARCH_LIMIT = 64
"""Configurations of one solver that a search measures at most, best estimates first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One candidate and its estimate."""

    candidate: Candidate
    solver: Solver
    estimate_ms: float
    workspace_bytes: int
    deterministic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request measures, and why not more.

    Attributes:
        candidates: by estimate, likely best first.
        last_resort: measured only where no candidate is usable.
        considered: version by id of every solver that was asked.
        is_filtered: whether the find mode, not only `only` and `exclude`, kept solvers out.
        refusals: reason by solver id, or by candidate id where a limit left one out.
    """

    candidates: tuple[Planned, ...]
    last_resort: tuple[Planned, ...]
    considered: dict[str, int]
    is_filtered: bool
    refusals: dict[str, str]


def make_plan(problem: ProblemDescription, device: Device, options: FindOptions, *, dynamic_only: bool = False) -> Plan:
    """The candidates of a request."""
    considered: dict[str, int] = {}
    refusals: dict[str, str] = {}
    planned: list[Planned] = []
    for solver in solvers().values():
        if not options.allows(solver) or (dynamic_only and not solver.is_dynamic):
            refusals[solver.id] = "left out by only, exclude or the find mode"
            continue
        if any(key.place is device.place and device.library_version(key.library) is not None for key in solver.keys):
            considered[solver.id] = solver.version
        try:
            applicability = solver.applicability(problem, device)
            if not applicability:
                refusals[solver.id] = applicability.reason
                continue
            planned += _within_limits(problem, device, solver, options, refusals)
        except Exception as error:  # what is wrong with one solver must not end the find for the others
            refusals[solver.id] = f"{type(error).__name__}: {error}"
            considered.pop(solver.id, None)
            if not isinstance(error, MiofindError):  # a library that cannot list its plans raises one of these
                logger.warning("solver %s cannot plan for %s and is left out: %r", solver.id, problem, error)
    planned.sort(key=lambda p: p.estimate_ms)
    return Plan(
        candidates=tuple(p for p in planned if not p.solver.is_last_resort),
        last_resort=tuple(p for p in planned if p.solver.is_last_resort),
        considered=considered,
        is_filtered=dynamic_only,
        refusals=refusals,
    )


def _within_limits(
    problem: ProblemDescription, device: Device, solver: Solver, options: FindOptions, refusals: dict[str, str]
) -> Iterator[Planned]:
    """A solver's configurations that keep the caller's limits; reasons of the others go into `refusals`."""
    configs = search_space(problem, device, solver) if options.searches else solver.default_configs(problem, device)
    for config in configs:
        if not isinstance(config, Config):
            raise InvalidConfigError(f"{solver.id}: config {config!r} must be a Config")
        solution = solver.solution(problem, device, config)
        planned = Planned(
            candidate=Candidate(network_config=problem.network_config, solver_id=solver.id, config=config),
            solver=solver,
            estimate_ms=solver.estimate_ms(problem, device, config),
            workspace_bytes=solution.workspace.bytes,
            deterministic=solution.deterministic,
        )
        reason = limit_exceeded(planned, problem, options)
        if reason:
            refusals[planned.candidate.id] = reason
        else:
            yield planned


def limit_exceeded(planned: Planned, problem: ProblemDescription, options: FindOptions) -> str:
    """Which of the caller's limits a candidate breaks, "" if none."""
    limit = options.workspace_limit_bytes
    if limit is not None and planned.workspace_bytes > limit:
        return f"needs {planned.workspace_bytes} bytes of workspace, the limit is {limit}"
    if options.deterministic and not planned.deterministic:
        return "is not deterministic"
    if options.max_error is None and planned.solver.error_growth(problem, planned.candidate.config) > 1:
        return "has a wider error bound than direct summation; set max_error to allow it"
    return ""


def search_space(problem: ProblemDescription, device: Device, solver: Solver) -> Iterable[Config]:
    """The defaults and the configurations with the best estimates, SEARCH_LIMIT in all."""
    defaults = list(solver.default_configs(problem, device))
    best = heapq.nsmallest(
        SEARCH_LIMIT, solver.configs(problem, device), key=lambda c: solver.estimate_ms(problem, device, c)
    )
    return list(dict.fromkeys([*defaults, *best]))[: max(SEARCH_LIMIT, len(defaults))]
