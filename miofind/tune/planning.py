"""What a tuning measures of a problem: what a find would, or what the FindDB holds; nothing that is known already."""

from __future__ import annotations

from dataclasses import replace

from miofind.core.problem import ProblemDescription
from miofind.find.composition import bare_request, is_bare_known
from miofind.find.likely import likely_plan
from miofind.find.lookup import failures, records
from miofind.find.lookup.known import known_times
from miofind.find.lookup.scopes import Coverage
from miofind.find.plan import Plan, make_plan, stored_plan
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.tune.values import TuneOptions


def tuning_plans(problem: ProblemDescription, options: TuneOptions, handle: Handle) -> tuple[Plan, ...]:
    """What a tuning of a problem measures: of a fused one the bare problem first, unless the FindDB answers that."""
    plans = [tuning_plan(problem, options, handle)]
    is_first_bare = bool(problem.epilogue) and not options.stored and not options.find.likely
    if is_first_bare and not is_bare_known(problem, options.find, handle):
        plans.insert(0, tuning_plan(problem.bare, replace(options, find=bare_request(options.find)), handle))
    return tuple(plans)


def tuning_plan(problem: ProblemDescription, options: TuneOptions, handle: Handle) -> Plan:
    """The candidates of a tuning, but for what failed here before."""
    failed = frozenset() if options.find.retry_failed else failures.quarantined(problem, handle)
    left_out = dict.fromkeys(failed, "failed here before")
    if options.find.likely and not options.stored:
        return likely_plan(problem, options.find, handle, left_out=left_out, few=options.few, drawn=options.drawn)
    make = stored_plan if options.stored else make_plan
    return make(problem, options.find, handle).without(left_out)


def known_solutions(
    problem: ProblemDescription, options: TuneOptions, handle: Handle, *, queue: bool = True
) -> list[Solution] | None:
    """What the FindDB has, if a tuning would leave it at that: nothing that was asked for is missing from it.

    Args:
        queue: note for a re-check what is stale or incomplete.
    """
    if options.force or options.recheck:
        return None
    if options.find.retry_failed and failures.failures(problem, handle):
        return None
    if options.stored:
        return _measured_again(problem, options, handle)
    return records.look_up(problem, options.find, handle, coverage=Coverage.ALL, queue=queue)


def _measured_again(problem: ProblemDescription, options: TuneOptions, handle: Handle) -> list[Solution] | None:
    """What answers hold, if all of it was measured, or has failed, with the present code and versions."""
    plan = stored_plan(problem, options.find, handle)
    stored = {planned.candidate.id for planned in plan.candidates}
    timed = {candidate.id for candidate in known_times(problem, handle)}
    if not stored & timed:
        stored |= {planned.candidate.id for planned in plan.last_resort}
    if stored - timed - failures.failures(problem, handle).keys():
        return None
    return records.look_up(problem, options.find, handle, measured=stored & timed, queue=False)
