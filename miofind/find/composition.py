"""What the bare problem's solutions tell of a fused one: what to compose, and which solvers need not be tried.

An epilogue adds about as much time to each, so the fastest bare solutions make the fastest fused ones, composed or
natively. Reads the FindDB.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from miofind.core.epilogue import EPILOGUE_TENSORS, Epilogue
from miofind.core.problem import ProblemDescription
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.options import FindEnforce, FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.registry import COMPOSED_SUFFIX, composed_id
from miofind.solver.steps import Config

MAX_COMPOSED = 3
"""Solvers whose composed forms a find measures, beside those whose forms the options name."""
_IN_REACH = 1.5
"""A bare solution that is slower than the fastest by this factor is not composed, unless the options name its form."""
_FUSED_IN_REACH = 2.0
"""A solver that is slower than the fastest by this factor without the epilogue is not tried with it: what is fastest
may be composed, and its pass takes about half of a convolution's time at most."""

Choices = dict[str, tuple[Config, ...]]
"""By id of a bare solver, the configurations that are composed."""


@functools.lru_cache(maxsize=64)  # every fused problem asks
def bare_request(options: FindOptions) -> FindOptions:
    """What is asked of a bare problem so that its answer tells what to compose for a request of the fused one."""
    only, exclude = (
        tuple(name.removesuffix(COMPOSED_SUFFIX.lower()) for name in names) for names in (options.only, options.exclude)
    )
    return replace(options, only=only, exclude=exclude)


@functools.lru_cache(maxsize=64)
def default_bare_request(options: FindOptions) -> FindOptions:
    """The same for default configurations, of what is known by now."""
    return replace(bare_request(options), tuning=False, find_enforce=FindEnforce.NONE)


def bare_solutions(problem: ProblemDescription, options: FindOptions, handle: Handle) -> Sequence[Solution]:
    """The FindDB's answer to the bare problem of a fused one, for the solvers that a request allows, fastest first."""
    return records.look_up(problem.bare, default_bare_request(options), handle, queue=False, in_full=True) or ()


def fastest_bare(found: Sequence[Solution], options: FindOptions) -> Choices:
    """What a bare problem's solutions, fastest first, give to compose."""
    limit_ms = found[0].time_ms * _IN_REACH if found else 0.0
    wanted = (each for each in found if each.time_ms <= limit_ms or _is_named(each.solver_id, options))
    return first_of_each(((each.solver_id, each.config) for each in wanted), options)


def out_of_reach(found: Sequence[Solution], options: FindOptions) -> dict[str, str]:
    """By solver, why a find of the fused problem leaves out what was slow without the epilogue.

    A search tries all, and what the options name is tried.
    """
    if options.searches or options.only:
        return {}
    fastest: dict[str, Solution] = {}
    for solution in found:
        fastest.setdefault(solution.solver_id, solution)
    ratios = {solver_id: solution.time_ms / found[0].time_ms for solver_id, solution in fastest.items()}
    return {
        solver_id: f"takes {ratio:.1f} times as long as {found[0].solver_id} without the epilogue"
        for solver_id, ratio in ratios.items()
        if ratio > _FUSED_IN_REACH
    }


def is_light(epilogue: Epilogue) -> bool:
    """Whether an epilogue costs next to nothing, so that the fastest configurations are those without it."""
    reads_tensors = any(name in EPILOGUE_TENSORS for name in epilogue.operands)
    return not reads_tensors and epilogue.activation.is_exact


def is_bare_known(
    problem: ProblemDescription, options: FindOptions, handle: Handle, *, dynamic_only: bool = False
) -> bool:
    """Whether the FindDB answers the bare problem of a fused one, with as much effort as is asked for that."""
    coverage = Coverage.DYNAMIC if dynamic_only else Coverage.PARTIAL
    request = bare_request(options)
    return records.look_up(problem.bare, request, handle, coverage=coverage, queue=False, in_full=True) is not None


def first_of_each(candidates: Iterable[tuple[str, Config]], options: FindOptions) -> Choices:
    """The first configuration of each of the first solvers among candidates, and of each whose form is named."""
    chosen: Choices = {}
    for solver_id, config in candidates:
        if solver_id not in chosen and (len(chosen) < MAX_COMPOSED or _is_named(solver_id, options)):
            chosen[solver_id] = (config,)
    return chosen


def _is_named(solver_id: str, options: FindOptions) -> bool:
    """Whether the options ask for a solver's composed form by its id."""
    return composed_id(solver_id).lower() in options.only
