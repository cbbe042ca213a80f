"""Composed candidates of fused problems: which solutions of the bare problem are worth a pass after them.

The pass takes as long after each, so the fastest bare solutions make the fastest composed ones. Reads the FindDB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from miofind.core.problem import ProblemDescription
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.options import FindEnforce, FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import COMPOSED_SUFFIX
from miofind.solver.steps import Config

MAX_COMPOSED = 3
"""Solvers whose composed forms a find measures, unless the options name more of these."""
_IN_REACH = 1.5
"""A bare solution that is slower than the fastest by this factor is not composed."""

Choices = dict[str, tuple[Config, ...]]
"""By id of a bare solver, the configurations that are composed."""


def bare_request(options: FindOptions) -> FindOptions:
    """What is asked of a bare problem so that its answer tells what to compose for a request of the fused one."""
    only, exclude = (
        tuple(name.removesuffix(COMPOSED_SUFFIX.lower()) for name in names) for names in (options.only, options.exclude)
    )
    return replace(options, only=only, exclude=exclude)


def fastest_bare(problem: ProblemDescription, options: FindOptions, handle: Handle) -> Choices:
    """Of a fused problem, what the FindDB's answer to the bare one gives to compose; {} where there is no answer."""
    request = replace(bare_request(options), tuning=False, find_enforce=FindEnforce.NONE)
    found = records.look_up(problem.bare, request, handle, queue=False) or []
    near = [solution for solution in found if solution.time_ms <= _IN_REACH * found[0].time_ms]
    return first_of_each(((solution.solver_id, solution.config) for solution in near), options)


def is_bare_known(
    problem: ProblemDescription, options: FindOptions, handle: Handle, *, dynamic_only: bool = False
) -> bool:
    """Whether the FindDB answers the bare problem of a fused one, with as much effort as is asked for that."""
    coverage = Coverage.DYNAMIC if dynamic_only else Coverage.PARTIAL
    request = bare_request(options)
    return records.look_up(problem.bare, request, handle, coverage=coverage, queue=False) is not None


def first_of_each(candidates: Iterable[tuple[str, Config]], options: FindOptions) -> Choices:
    """The first configuration of each of the first solvers among candidates."""
    named = sum(name.endswith(COMPOSED_SUFFIX.lower()) for name in options.only)
    chosen: Choices = {}
    for solver_id, config in candidates:
        if solver_id not in chosen and len(chosen) < max(MAX_COMPOSED, named):
            chosen[solver_id] = (config,)
    return chosen
