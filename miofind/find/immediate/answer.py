"""What a request is answered with where nothing is to be measured: predictions, and stored rows among them.

cuDNN's plans are predicted only where nothing of ours serves: to list them takes 0.2 s on a GPU, and their estimates
are no better than a guess, while our own best is within 0.3 % of theirs (geometric mean of the shipped problems).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from miofind.core.problem import ProblemDescription
from miofind.device.device import Library
from miofind.find.immediate.ranker import Estimated, Prediction, Ranker
from miofind.find.immediate.shipped import ranker_of
from miofind.find.lookup import failures, records
from miofind.find.lookup.stored import answers_no_more
from miofind.find.plan import Plan, Planned, make_plan, nothing_found
from miofind.options import FindOptions, Order
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution, SolutionList, Source, copied, without_steps
from miofind.solver.facts import SolverFacts
from miofind.solver.registry import Registry, inner_id

_CALL = 1.01
"""What a prediction of a library's call is taken for: its first takes 0.1 s, so what is as good as equal goes behind
kernels. Models are off by more."""


def predicted(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    dynamic_only: bool = False,
    is_known: bool | None = None,
) -> list[Solution]:
    """Solutions of a problem that the FindDB has no answer to, fastest first: predictions, and rows that it has.

    A find of other solvers or under other limits may have left rows. They count as they are.

    Args:
        dynamic_only: leave out solvers that compile for each shape.
        is_known: whether a FindDB has an answer that does not serve; None to ask.

    Raises:
        NoSolutionError: no solver applies.
    """
    if is_known is None:
        is_known = handle.database.answer(handle.device.identity, problem.network_config) is not None
    stored = records.all_rows(problem, options, handle) if is_known else []
    known = {solution.solver_id for solution in stored}
    tried = _tried(problem, handle) if is_known else {}

    def plan_of(asked: Set[str], *, in_haste: bool = True) -> Plan:
        return _plan(
            problem,
            options,
            handle,
            asked - known,
            dynamic_only=dynamic_only,
            tried=tried,
            in_haste=in_haste,
            is_known=is_known,
        )

    plan, every = None, handle.registry.facts.keys()
    if not tried and not dynamic_only and (asked := _worth_asking(problem, options, handle)) is not None:
        plan = plan_of(asked)
    if plan is None or not plan.candidates or plan.is_cut:
        plan = plan_of(every)
    if not plan.candidates and not stored:  # each reason is told
        plan = _of_last_resort(problem, options, handle, plan_of(every, in_haste=False), dynamic_only=dynamic_only)
    if not plan.candidates and not stored:
        raise nothing_found(problem, plan)
    return _merged(stored, plan.candidates, problem, handle)


def _worth_asking(problem: ProblemDescription, options: FindOptions, handle: Handle) -> Set[str] | None:
    """Which solvers to ask of a problem: those that won near it, and those that the model does not know as they are.

    None where all are: nothing near is known, or under the request's limits others may be the fastest. Whether a limit
    of workspace has left candidates out is seen then.
    """
    is_limited = options.max_error is not None or options.deterministic or options.strict_nonfinite
    if is_limited or options.searches or options.order is not Order.TIME:
        return None
    ranker = ranker_of(handle.device)
    near = ranker.winners_near(problem)
    known = handle.registry.facts
    if near is None or not all(name in known and options.allows(known[name]) for name in near):
        return None
    return near | _not_learnt(ranker, handle.registry)


@functools.lru_cache(maxsize=16)
def _not_learnt(ranker: Ranker, registry: Registry) -> frozenset[str]:
    """The solvers that a model was not trained with as they are."""
    return frozenset(name for name, facts in registry.facts.items() if not ranker.knows(facts))


def with_predictions(
    hit: list[Solution], options: FindOptions, handle: Handle, *, dynamic_only: bool = False
) -> list[Solution]:
    """The FindDB's answer and predictions of the solvers that it lacks, fastest first.

    Those are the solvers whose rows are void or beyond the request's limits, and those that came since.

    Args:
        hit: what `records.look_up` gave.
        dynamic_only: leave out solvers that compile for each shape.
    """
    gaps = hit[0].solution_list.gaps
    lacking = {*gaps.solvers, *gaps.limited}
    if not lacking:
        return hit
    lacking |= {inner_id(name) for name in lacking}
    problem = hit[0].problem
    tried = _tried(problem, handle)
    plan = _plan(
        problem,
        options,
        handle,
        lacking,
        dynamic_only=dynamic_only,
        tried=tried,
        in_haste=True,
    )
    if not plan.candidates:
        return hit
    answer = _merged(hit, plan.candidates, problem, handle)
    answer[0].solution_list.gaps = gaps
    return answer


def _plan(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    asked: Set[str],
    *,
    dynamic_only: bool,
    tried: Mapping[str, str],
    in_haste: bool,
    is_known: bool = True,
) -> Plan:
    """The candidates of those solvers but cuDNN, without those that were tried."""

    def is_asked(facts: SolverFacts) -> bool:
        return facts.id in asked and facts.library is not Library.CUDNN

    plan = make_plan(
        problem,
        options,
        handle,
        dynamic_only=dynamic_only,
        asks=is_asked,
        trusts_own=True,
        in_haste=in_haste and not tried,  # what is left out may be what others are far behind
        is_known=is_known,
    )
    return plan.without(tried) if tried else plan


def _of_last_resort(
    problem: ProblemDescription, options: FindOptions, handle: Handle, plan: Plan, *, dynamic_only: bool
) -> Plan:
    """A plan of cuDNN's candidates, else of the last resort, where there is nothing else."""
    cudnn = make_plan(
        problem, options, handle, dynamic_only=dynamic_only, asks=lambda facts: facts.library is Library.CUDNN
    ).without(_tried(problem, handle))
    refusals = plan.refusals | cudnn.refusals
    left_out = tuple(name for name in plan.left_out if name in cudnn.left_out)
    return Plan(
        candidates=cudnn.candidates or plan.last_resort,
        last_resort=(),
        considered=plan.considered | cudnn.considered,
        is_filtered=plan.is_filtered,
        refusals=refusals,
        left_out=left_out,
        absent=plan.absent | cudnn.absent,
    )


def _tried(problem: ProblemDescription, handle: Handle) -> dict[str, str]:
    """By id, the candidates that were measured or failed here, and why they are not predicted."""
    newest = failures.newest_rows(problem, handle, ignored=frozenset())
    return {
        name: "failed here before" if not row.usable else "was measured"
        for name, row in newest.items()
        if not row.usable or not answers_no_more(row, problem, handle)
    }


def _merged(
    stored: Sequence[Solution], planned: Collection[Planned], problem: ProblemDescription, handle: Handle
) -> list[Solution]:
    """Stored solutions in their order, and each prediction before the first of them that it is faster than."""
    found = SolutionList(handle)
    predictions = ranked(list(planned), problem, handle)
    if predictions:  # it is what runs: known to be sound before it is answered
        first = predictions[0].planned
        first.solver.kept_solution(problem, handle.device, first.config)
    at = 0
    for solution in stored:
        while at < len(predictions) and predictions[at].prediction.time_ms < solution.time_ms:
            found.solutions.append(_as_solution(predictions[at], found))
            at += 1
        found.solutions.append(copied(solution, found, len(found.solutions)))
    found.solutions += [_as_solution(each, found, more) for more, each in enumerate(predictions[at:])]
    return found.solutions


class Ranked(NamedTuple):
    """A candidate and what is predicted of it."""

    planned: Planned
    prediction: Prediction


def ranked(planned: Sequence[Planned], problem: ProblemDescription, handle: Handle) -> list[Ranked]:
    """Candidates with the least predicted time first."""
    estimated = [Estimated(each.solver, each.config, each.estimate_ms) for each in planned]
    predictions = ranker_of(handle.device).predictions(problem, handle.device, estimated)
    found = itertools.starmap(_ranked, zip(planned, predictions, strict=True))
    return sorted(found, key=lambda each: each.prediction.time_ms)


def _ranked(planned: Planned, prediction: Prediction) -> Ranked:
    is_call = planned.solver.library is not Library.PLAIN
    return Ranked(planned, prediction._replace(time_ms=_CALL * prediction.time_ms) if is_call else prediction)


def _as_solution(which: Ranked, found: SolutionList, more: int = 0) -> Solution:
    """The solution of a candidate that is to stand so many places behind the end of a list."""
    planned, prediction = which
    return without_steps(
        problem=planned.problem,
        device=found.handle.device,
        solver_id=planned.solver.id,
        algorithm=planned.solver.algorithm,
        library=planned.solver.library,
        config=planned.config,
        time_ms=prediction.time_ms,
        max_error=None,
        source=Source.PREDICTED,
        confidence=prediction.confidence,
        solution_list=found,
        position=len(found.solutions) + more,
    )
