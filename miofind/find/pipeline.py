"""The pipeline of a find: look up, else predict or measure (`measuring.py`, which few processes need)."""

from __future__ import annotations

import itertools
import logging
import os
from typing import TYPE_CHECKING

from miofind.core.problem import ProblemDescription
from miofind.driver.line import driver_line
from miofind.errors import NoSolutionError
from miofind.find import late
from miofind.find.immediate.answer import predicted, with_predictions
from miofind.find.lookup import records
from miofind.find.lookup.scopes import Coverage
from miofind.options import FindEnforce, FindMode, FindOptions, OnMiss, Order, member
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution, posed, reordered

if TYPE_CHECKING:
    from miofind.compiler import CompilePool
    from miofind.find.plan import Plan

logger = logging.getLogger(__name__)

_ALWAYS_MEASURES = (FindEnforce.DB_UPDATE, FindEnforce.SEARCH_DB_UPDATE)


def find(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    *,
    ahead: CompilePool | None = None,
    likeliest: Plan | None = None,
) -> list[Solution]:
    """Solutions of a problem in the order asked for, by the mode asked for.

    Args:
        ahead: compiles candidates before they are measured.
        likeliest: the plan of a request for the likeliest, where it was made before.

    Raises:
        NoSolutionError: nothing usable; the message lists each solver's reason. NoPlaceError where all that is asked
            for needs a GPU or a library that is not here.
        DatabaseError: the FindDB cannot be used, with a strict handle.
        UnknownSolverError: the options name a solver that the handle's registry has not.
    """
    options.check_names(handle.registry)
    mode = find_mode(options)
    if options.find_enforce is FindEnforce.DB_CLEAN:
        handle.database.clean(handle.device.identity, problem.network_config)
        handle.forget_answers(problem.network_config)
    if problem.flattened is not problem:
        return _found_as_images(problem, options, handle, ahead, likeliest)
    if mode is not FindMode.NORMAL and options.find_enforce not in _ALWAYS_MEASURES:
        dynamic_only = mode is FindMode.DYNAMIC_HYBRID
        is_immediate = _is_immediate(mode, options)
        coverage = Coverage.of_find(dynamic_only=dynamic_only)
        answers = handle.database.answers(handle.device.identity, problem.network_config)
        first = next(answers, None)
        hit = None
        if first is not None:
            answers = itertools.chain((first,), answers)
            queue = mode is not FindMode.FAST or handle.database.is_recorded  # it only reads, so it makes no FindDB
            hit = records.look_up(problem, options, handle, coverage=coverage, queue=queue, answers=answers)
        if hit is not None:
            logger.debug("the FindDB has %d solutions: %s", len(hit), problem)
            if is_immediate:
                return _ordered(with_predictions(hit, options, handle, dynamic_only=dynamic_only), options)
            if mode is FindMode.TRUST_VERIFY and not late.still_holds(hit[0], options, handle):
                hit = late.measure(problem, options, handle, also=hit, ahead=ahead, afresh=True)
            return _ordered(hit, options)
        if options.on_miss is OnMiss.ERROR:
            raise NoSolutionError(
                f"the FindDB has no answer for {problem} on {handle.device.name} and on_miss is 'error': "
                f"tune it with `miofind tune`, or allow a find. Problem: {driver_line(problem)}"
            )
        if is_immediate or options.on_miss is OnMiss.ESTIMATE:
            is_known = first is not None
            found = predicted(problem, options, handle, dynamic_only=dynamic_only, is_known=is_known)
            return _ordered(found, options)
        with handle.measuring:
            # another thread may have measured it meanwhile
            answer = records.look_up(problem, options, handle, coverage=coverage)
            if answer is None:
                planned = None if dynamic_only else likeliest
                answer = late.measure(
                    problem, options, handle, dynamic_only=dynamic_only, ahead=ahead, likeliest=planned
                )
        return _ordered(answer, options)
    return _ordered(late.measure(problem, options, handle, ahead=ahead, afresh=True, likeliest=likeliest), options)


def _found_as_images(
    problem: ProblemDescription,
    options: FindOptions,
    handle: Handle,
    ahead: CompilePool | None,
    likeliest: Plan | None,
) -> list[Solution]:
    """What `find` gives for a volume that is flattened."""
    try:
        found = find(problem.flattened, options, handle, ahead=ahead, likeliest=likeliest)
    except NoSolutionError as error:
        raise type(error)(f"{problem} is found as images: {error}") from error
    return posed(found, problem)


def looked_up(
    problem: ProblemDescription, options: FindOptions, handle: Handle, *, queue: bool
) -> list[Solution] | None:
    """What the FindDB answers to a problem, of the solvers that it was measured with; None for nothing.

    Args:
        queue: note where the answer wants measuring again.
    """
    flattened = problem.flattened
    found = records.look_up(flattened, options, handle, queue=queue)
    return found if found is None or flattened is problem else posed(found, problem)


def _is_immediate(mode: FindMode, options: FindOptions) -> bool:
    """Whether an answer may have predictions in it, so that nothing is measured for it."""
    return mode is FindMode.FAST or (options.on_miss is OnMiss.ESTIMATE and mode is not FindMode.TRUST_VERIFY)


def find_mode(options: FindOptions) -> FindMode:
    """The mode asked for, else that of MIOFIND_FIND_MODE, else HYBRID."""
    if options.find_mode is not None:
        return options.find_mode
    return member(FindMode, os.environ.get("MIOFIND_FIND_MODE") or FindMode.HYBRID, "MIOFIND_FIND_MODE")


def _ordered(solutions: list[Solution], options: FindOptions) -> list[Solution]:
    if options.order is Order.TIME:
        return solutions
    found = solutions[0].solution_list
    made = reordered(sorted(solutions, key=lambda s: (s.workspace_bytes, s.time_ms)), found.handle)
    made[0].solution_list.gaps = found.gaps
    return made
