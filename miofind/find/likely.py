"""What a find measures that is asked for the likeliest: a few candidates, those with the least predicted times.

On 4,414 problems of an H200 whose networks were held out of its model's training the best of these few, 2.75 on
average, was 0.57 % off the best that is known, cuDNN's included (geometric mean); that of four at most, 3.3 on average,
0.50 %. On 166 layers of families of networks the best of these few was 3.6 % off. Each costs a compilation, of half a
second, and nothing is run before.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from miofind.core.problem import ProblemDescription
from miofind.core.tensor import MathMode
from miofind.device.device import Library
from miofind.find.immediate.answer import ranked
from miofind.find.immediate.shipped import ranker_of
from miofind.find.lookup.scopes import requested_scope
from miofind.find.plan import Plan, make_plan
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import inner_id

FIRST, MOST = 2, 3
"""How many of the first are measured, whatever they are, and how many at most."""

FEW = 2
"""The same of a light problem: the best of two was 0.9 % off the best that is known."""

NEAR, REACH = 1.1, 1.3
"""How many times the first one's time others may be predicted to take, and the first of another solver."""

_LEAST = 1e-300
"""Stands for 0, which has no logarithm."""

_CUDNN_PLANS = 2
"""cuDNN's plans that are measured, the first of its own order, where nothing is known of such problems."""


def likely_plan(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    dynamic_only: bool = False,
    left_out: Mapping[str, str],
    few: bool = False,
    drawn: int = 0,
) -> Plan:
    """The few candidates of a request that are predicted to be the fastest, the first of them first.

    cuDNN is asked where the device's model knows no such problems, where it is often ahead, and where nothing else
    serves: what it costs to list its plans is a fifth of a second, of a fused problem seconds. It counts as considered
    all the same.

    Args:
        dynamic_only: leave out solvers that compile for each shape.
        left_out: by id, candidates that are not measured, and why.
        few: the first two alone, of a problem that takes little of a network's time.
        drawn: how many others are measured besides, drawn at random: a model learns what it takes for slow, too.

    Raises:
        UnknownSolverError: the options name a solver that the handle's registry has not.
    """
    plan = None
    if ranker_of(handle.device).reaches(problem) and not _is_led_by_cudnn(problem):
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
    times = [(each.planned.solver.id, each.prediction.time_ms) for each in own]
    places = list(range(min(FEW, len(own)))) if few else likely_places(times)
    unmeasured = {place: time_ms for place, (_, time_ms) in enumerate(times) if place not in places}
    places += _drawn_places(unmeasured, drawn, f"{options.seed} {problem.network_config}")
    first = [own[place].planned for place in places] + cudnn[: _CUDNN_PLANS if own else None]
    asked = requested_scope(problem, options, handle.device, handle.registry, dynamic_only=dynamic_only).solvers
    unasked = {
        name: version
        for name, version in asked.items()
        if name in handle.registry.facts and handle.registry.facts[name].library is Library.CUDNN
    }
    is_part = len(first) < len(plan.candidates) or not unasked.keys() <= plan.considered.keys()
    return replace(plan, candidates=tuple(first), considered=unasked | plan.considered, is_part=is_part)


def _drawn_places(times: Mapping[int, float], count: int, seed: str) -> list[int]:
    """So many of these places at random, one after the other, each with a weight of its predicted time to the -2.

    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006.
    """
    draw = random.Random(seed)
    # Of keys, which are random ** (1 / weight), the greatest; by logarithms, since keys underflow.
    keys = {
        place: math.log(draw.expovariate(1.0) or _LEAST) + 2 * math.log(time_ms or _LEAST)
        for place, time_ms in times.items()
    }
    return sorted(sorted(keys, key=keys.__getitem__)[:count])


def _is_led_by_cudnn(problem: ProblemDescription) -> bool:
    """Whether a find without cuDNN loses much.

    Of the 543 problems in TF32 and channels first that ship for an H200 it loses 8.4 % (geometric mean), of the 3,707
    others 0.4 %.
    """
    return problem.math is MathMode.TF32 and not problem.x.layout.channels_last


def likely_places(candidates: Sequence[tuple[str, float]]) -> list[int]:
    """The places of the candidates that are measured.

    Those of one solver are predicted well beside each other, those of different solvers less so: behind the first few
    the first of another solver comes before what else is near. Forms with a pass count as their solvers.

    Args:
        candidates: solver and predicted time of each, the least first.
    """
    solvers = [inner_id(name) for name, _ in candidates]
    times = [time_ms for _, time_ms in candidates]
    taken = list(range(min(FIRST, len(candidates))))
    for place in range(FIRST, len(candidates)):
        is_another = solvers[place] not in {solvers[each] for each in taken}
        if len(taken) < MOST and is_another and times[place] <= REACH * times[0]:
            taken.append(place)
    near = (place for place in range(FIRST, len(candidates)) if times[place] <= NEAR * times[0] and place not in taken)
    return sorted(taken + list(itertools.islice(near, MOST - len(taken))))
