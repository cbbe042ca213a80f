"""What a find measures that is asked for the likeliest: a few candidates, those with the least predicted times.

On problems of an H200 that were held out of its model's training the best of these few was 0.45 % off the best of all
candidates that were ever measured (geometric mean); 0.40 % is what leaving cuDNN out costs by itself. The rest costs a
compilation each, of about a second, and nothing is run before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from miofind.core.problem import ProblemDescription
from miofind.device.device import Library
from miofind.find.immediate.answer import ranked
from miofind.find.immediate.shipped import ranker_of
from miofind.find.lookup.scopes import requested_scope
from miofind.find.plan import Plan, make_plan
from miofind.options import FindOptions
from miofind.runtime.handle import Handle

NEAR = 1.15
"""How far behind the first a candidate may be predicted to be measured."""

LEAST, MOST = 3, 8
"""How many are measured, whatever their predictions are."""

_CUDNN_PLANS = 2
"""cuDNN's plans that are measured, the first of its own order, where nothing is known of such problems."""


def likely_plan(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    dynamic_only: bool = False,
    left_out: Mapping[str, str],
) -> Plan:
    """The few candidates of a request that are predicted to be the fastest, the first of them first.

    cuDNN is asked where the device's model knows no such problems, and where nothing else serves: what it costs to list
    its plans is a fifth of a second, of a fused problem seconds. It counts as considered all the same.

    Args:
        dynamic_only: leave out solvers that compile for each shape.
        left_out: by id, candidates that are not measured, and why.

    Raises:
        UnknownSolverError: the options name a solver that the handle's registry has not.
    """
    plan = None
    if ranker_of(handle.device).reaches(problem.bare):
        plan = make_plan(
            problem,
            options,
            handle,
            dynamic_only=dynamic_only,
            asks=lambda facts: facts.library is not Library.CUDNN,
            trusts_own=True,
        ).without(left_out)
    if plan is None or not plan.candidates:
        plan = make_plan(problem, options, handle, dynamic_only=dynamic_only, trusts_own=True).without(left_out)
    cudnn = [each for each in plan.candidates if each.solver.library is Library.CUDNN]
    own = ranked([each for each in plan.candidates if each.solver.library is not Library.CUDNN], problem, handle)
    most = how_many([each.prediction.time_ms for each in own])
    first = [each.planned for each in own[:most]] + cudnn[: _CUDNN_PLANS if own else None]
    asked = requested_scope(options, handle.device, handle.registry, dynamic_only, bool(problem.epilogue)).solvers
    unasked = {
        name: version
        for name, version in asked.items()
        if name in handle.registry.facts and handle.registry.facts[name].library is Library.CUDNN
    }
    is_part = len(first) < len(plan.candidates) or not unasked.keys() <= plan.considered.keys()
    return replace(plan, candidates=tuple(first), considered=unasked | plan.considered, is_part=is_part)


def how_many(times_ms: Sequence[float]) -> int:
    """How many candidates are measured, given the predicted times of all, the least first."""
    near = itertools.takewhile(lambda time_ms: time_ms <= NEAR * times_ms[0], times_ms)
    return max(LEAST, min(MOST, sum(1 for _ in near)))
