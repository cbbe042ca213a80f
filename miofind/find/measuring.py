"""A find that measures: plan, verify and time the candidates, record what became of each, answer from the record."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.device.device import Place, check_fork
from miofind.device.environment import versions
from miofind.driver.line import driver_line
from miofind.errors import LaunchError, NoSolutionError, described, raise_if_interrupted
from miofind.evaluate.evaluate import Job
from miofind.evaluate.harness_kernels import harness_steps
from miofind.find.composition import bare_request, is_bare_known
from miofind.find.likely import likely_plan
from miofind.find.lookup import failures, records
from miofind.find.lookup.known import candidate_of, incumbent, known_times
from miofind.find.lookup.scopes import Coverage, requested_scope
from miofind.find.plan import Plan, make_plan, nothing_found, stored_plan
from miofind.find.recording import Recording, row_of, storable
from miofind.find.rounds import FindRequest, Measuring, searched
from miofind.find.search import Search
from miofind.find.warm_start import shared_warm_start
from miofind.finddb import Row
from miofind.measure.effort import Effort
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Gaps, Solution
from miofind.solver.candidate import Candidate, Outcome, Status

logger = logging.getLogger(__name__)

TRUST_TOLERANCE = 1.25
"""How much slower than recorded a solution may be for TRUST_VERIFY to keep it."""

_LONGEST_REASON = 200
"""Characters of an earlier failure that are told."""


def measure(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    dynamic_only: bool = False,
    also: Sequence[Solution] = (),
    ahead: CompilePool | None = None,
    afresh: bool = False,
    stored: bool = False,
    likeliest: Plan | None = None,
    at_rest: Callable[[], None] = lambda: None,
) -> list[Solution]:
    """Verify and time the candidates of a request, record what became of each, and answer.

    A search goes on where an earlier one of the problem stopped: what the FindDB knows with the present versions counts
    among its trials and is raced again only where it is among the best. What failed here before is left out, unless
    the options say `retry_failed`.

    Args:
        dynamic_only: leave out solvers that compile for each shape.
        also: solutions to measure besides, whether or not the request plans them.
        ahead: compiles candidates before they are measured, and the likely next ones of a search meanwhile.
        afresh: search from the beginning, whatever the FindDB knows.
        stored: measure what the FindDBs' answers hold, and nothing else; no search.
        likeliest: the plan of a request for the likeliest, where it was made before.
        at_rest: called when the device has nothing more to do for this, before what it did is recorded.

    Raises:
        NoSolutionError: nothing usable.
        DeviceLostError: a candidate destroyed this process's CUDA context.
        MeasurementError: the problem does not fit the device, or the measuring process ended without one to blame.
        LaunchError: a CUDA graph is being captured.
    """
    _refuse_capture(handle)
    began = time.monotonic()
    logger.info("find: %s", driver_line(problem))
    handle.executor(isolate=options.isolate).prepare()
    if options.likely and not stored and _was_found_in_full(problem, options, handle):
        options = replace(options, likely=False)  # what was found in full stays so, with other code, too
    if ahead is not None:
        ahead.submit(harness_steps(problem, handle.device), handle.device.arch)
    if problem.epilogue and not stored and not options.likely:
        options = _with_bare_measured(problem, options, handle, dynamic_only=dynamic_only, ahead=ahead)
    start = shared_warm_start(handle.database, handle.device.identity) if options.searches else None
    winners = start.winners(problem, handle.database) if start else {}
    left_out = _left_out(problem, options, handle)
    if stored:
        plan = stored_plan(problem, options, handle)
    elif options.likely:
        if likeliest is None or not likeliest.without(left_out).candidates:
            likeliest = likely_plan(problem, options, handle, dynamic_only=dynamic_only, left_out=left_out)
        plan = likeliest
        options = replace(options, likely=plan.is_part)
    else:
        plan = make_plan(problem, options, handle, dynamic_only=dynamic_only, winners=winners)
    plan = plan.without(left_out)
    plan.log()
    besides = [candidate for candidate in map(_candidate, also) if candidate.id not in left_out]
    request = FindRequest(problem=problem, options=options, handle=handle, ahead=ahead)
    outcomes, gaps = _measured(request, plan, besides, left_out, at_rest, afresh=afresh)
    _warn_of_wrong_results(problem, outcomes)
    if start:
        start.add(problem.network_config)
    handle.forget_answers(problem.network_config)
    measured = {outcome.candidate.id for outcome in outcomes if outcome.status.usable}
    answer = None
    if measured:
        answer = records.look_up(
            problem, options, handle, measured=measured, coverage=Coverage.of_find(dynamic_only=dynamic_only)
        )
    if not answer and options.likely and not stored:
        left_s = max(0.0, options.budget_s - (time.monotonic() - began))
        options = replace(options, likely=False, time_budget_s=left_s)
        return measure(problem, options, handle, dynamic_only=dynamic_only, also=also, ahead=ahead, afresh=afresh)
    if not answer:
        raise nothing_found(problem, plan, outcomes)
    answer[0].solution_list.gaps = gaps
    return answer


def _was_found_in_full(problem: ProblemDescription, options: FindOptions, handle: Handle) -> bool:
    """Whether a FindDB has a find of all that a request's likeliest are of."""
    wanted = requested_scope(problem, replace(options, likely=False), handle.device, handle.registry)
    return any(
        answer.covers(wanted) for answer in handle.database.answers(handle.device.identity, problem.network_config)
    )


def _with_bare_measured(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    dynamic_only: bool,
    ahead: CompilePool | None,
) -> FindOptions:
    """A request of a fused problem after the FindDB has come to answer the bare one: with the time that is left.

    The fastest solutions of the bare problem are what is composed with a pass.
    """
    if is_bare_known(problem, options, handle, dynamic_only=dynamic_only):
        return options
    began, half_s = time.monotonic(), options.budget_s / 2
    is_limited = not math.isinf(half_s)
    request = bare_request(options)
    try:
        request = replace(request, time_budget_s=half_s) if is_limited else request
        measure(problem.bare, request, handle, dynamic_only=dynamic_only, ahead=ahead)
    except NoSolutionError as error:
        logger.debug("nothing is composed: %s", error)
    left_s = max(half_s, 2 * half_s - (time.monotonic() - began))
    return replace(options, time_budget_s=left_s) if is_limited else options


def begin_likeliest(
    problem: ProblemDescription, options: FindOptions, handle: Handle, likeliest: Plan, pool: CompilePool
) -> None:
    """Have the measuring process begin with what `measure` will ask it first, where that is sure and it can.

    It is where no FindDB knows anything of the problem, and all candidates are compiled.

    Args:
        likeliest: the plan of a request for the likeliest.
        pool: what compiled it.
    """
    try:
        if not options.isolate or handle.database.histories(handle.device.identity, problem.network_config):
            return
        listed = tuple(dict.fromkeys(planned.candidate for planned in likeliest.candidates))
        steps = (step for planned in likeliest.candidates for step in planned.kernels(handle.device))
        if not pool.errors(steps, handle.device.arch):
            job = Job(network_config=problem.network_config, candidates=listed, budget_s=options.budget_s)
            handle.executor(isolate=True).begin(job)
    except Exception as error:  # measuring the problem meets the same error, and says so
        raise_if_interrupted(error)
        logger.debug("nothing is begun for %s: %s", problem, described(error))


def _measured(
    request: FindRequest,
    plan: Plan,
    besides: Sequence[Candidate],
    left_out: Iterable[str],
    at_rest: Callable[[], None],
    *,
    afresh: bool,
) -> tuple[list[Outcome], Gaps]:
    """Outcomes of a plan's candidates and of others besides, as they were recorded, and what the budget left out.

    Where none of them is usable, those of the plan's last resort follow.
    """
    problem, options, handle = request.problem, request.options, request.handle
    with handle.measuring, Recording(problem, options, handle, plan) as recording:
        measuring = Measuring(replace(request, incumbent=incumbent(problem, handle)), recording)
        if plan.spaces:
            known = {} if afresh else known_times(problem, handle)
            known |= {candidate_of(name, problem): None for name in left_out}
            recording.know(known)
            search = _search(problem, options, plan, known)
            outcomes, gaps = searched(search, measuring, besides), Gaps()
            recording.search_ended = search.is_complete
        else:
            listed = dict.fromkeys([*(planned.candidate for planned in plan.candidates), *besides])
            outcomes = measuring.run(listed, Effort.FIND)
            left = listed.keys() - {outcome.candidate for outcome in outcomes}
            gaps = Gaps(candidates=len(listed), unmeasured=len(left))
        if not any(outcome.status.usable for outcome in outcomes):
            effort = Effort.TUNE if options.searches else Effort.FIND
            outcomes += measuring.run((planned.candidate for planned in plan.last_resort), effort)
        at_rest()
    return outcomes, gaps


def _left_out(problem: ProblemDescription, options: FindOptions, handle: Handle) -> dict[str, str]:
    """By id, the candidates that failed here before and are not tried again, and why."""
    quarantined = {} if options.retry_failed else failures.quarantined_rows(problem, handle)
    if not options.isolate:  # what destroyed a process before must not do it to this one
        failed = failures.failed_rows(problem, handle)
        quarantined |= {name: row for name, row in failed.items() if row.status == Status.CRASHED}
    return {
        name: f"failed here before ({_told(row)}): retry_failed (--retry-failed) measures it again"
        for name, row in quarantined.items()
    }


def _told(row: Row) -> str:
    """What became of a candidate, in one line."""
    message = row.message.partition("\n")[0]
    return f"{row.status}: {message[:_LONGEST_REASON]}" if message else row.status


def _warn_of_wrong_results(problem: ProblemDescription, outcomes: Iterable[Outcome]) -> None:
    """One warning a solver that computed wrong results: who wrote it wants to know, whoever else answers."""
    wrong: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status is Status.WRONG_RESULT:
            wrong.setdefault(outcome.candidate.solver_id, []).append(outcome)
    for solver_id, found in wrong.items():
        others = f" (and {len(found) - 1} more of its configurations)" if len(found) > 1 else ""
        first = found[0]
        told = f"{first.candidate.config.json}{others}: {first.message}"
        logger.warning("solver %s is wrong for %s and left out, with %s", solver_id, problem, told)


def _search(
    problem: ProblemDescription, options: FindOptions, plan: Plan, known: Mapping[Candidate, float | None]
) -> Search:
    return Search(
        problem.network_config,
        plan.spaces,
        trials=options.trials,
        patience=options.patience,
        seed=options.seed,
        known=known,
    )


def _candidate(solution: Solution) -> Candidate:
    network_config = solution.problem.network_config
    return Candidate(network_config=network_config, solver_id=solution.solver_id, config=solution.config)


def still_holds(best: Solution, options: FindOptions, handle: Handle) -> bool:
    """Whether one more measurement of the FindDB's best answer passes and is not slower than recorded."""
    _refuse_capture(handle)
    fused = bool(best.problem.epilogue)
    job = Job(network_config=best.problem.network_config, candidates=(_candidate(best),))
    with handle.measuring:
        events = list(handle.executor(isolate=options.isolate).run(job))
    outcomes = [event for event in events if isinstance(event, Outcome)]
    handle.database.record(
        handle.device.identity,
        best.problem.network_config,
        storable(
            best.problem,
            handle,
            [row_of(outcome, handle.registry, fused=fused) for outcome in outcomes],
        ),
        environment=versions(handle.device),
    )
    timing = outcomes[0].timing if outcomes and outcomes[0].status.usable else None
    if timing is not None and timing.time_ms <= TRUST_TOLERANCE * best.time_ms:
        return True
    logger.info("the FindDB's answer no longer holds for: %s", driver_line(best.problem))
    return False


def _refuse_capture(handle: Handle) -> None:
    """Do nothing unless a CUDA graph is being captured on the current stream.

    Raises:
        ForkedProcessError: this process was forked from one that had used CUDA.
        LaunchError: one is; measuring would become part of the graph.
    """
    if handle.device.place is Place.CPU:
        return
    check_fork()
    import cupy

    capturing = bool(cupy.cuda.get_current_stream(handle.device.index).is_capturing())
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        capturing = capturing or bool(torch.cuda.is_current_stream_capturing())
    if capturing:
        raise LaunchError(
            "a find cannot run while a CUDA graph is captured: find before, and capture run_solution only"
        )
