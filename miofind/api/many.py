"""Solutions of many problems, whose kernels are compiled in parallel before one is measured after another."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from miofind.api.solutions import measures_always, wrong_argument
from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.device.device import Place
from miofind.errors import InvalidOptionError, NoSolutionError, brief
from miofind.find.lookup import records
from miofind.find.pipeline import find, find_mode
from miofind.options import FindEnforce, FindMode, FindOptions, OnMiss
from miofind.runtime.handle import Handle, default_handle
from miofind.runtime.solution import Solution, posed
from miofind.tune.precompiler import Precompiler
from miofind.tune.values import TuneOptions

logger = logging.getLogger(__name__)


def find_many(
    problems: Iterable[ProblemDescription], *, options: FindOptions | None = None, handle: Handle | None = None
) -> list[list[Solution]]:
    """Solutions of each of many problems, fastest first: `find_solutions` of all of a network at once.

    On a GPU processes compile what will be measured of all problems meanwhile, one process less than there are
    processors; one problem is measured after another. `FindOptions(likely=True)` has least to compile and to measure.

    Args:
        problems: what to solve; equal ones are solved once.
        options: of each find; the defaults if left out.
        handle: as for `find_solutions`.

    Returns:
        The solutions of each problem, in their order; none, and a warning in the log, where nothing is usable.

    Raises:
        InvalidOptionError: an argument is none of these.
        NoDeviceError, MissingLibraryError: the handle's device cannot be used.
        LaunchError: called while a CUDA graph is being captured and something would have to be measured.
    """
    options = FindOptions() if options is None else options
    handle = default_handle() if handle is None else handle
    if isinstance(problems, ProblemDescription) or not isinstance(problems, Iterable):
        raise InvalidOptionError(f"problems={brief(problems)} must be a list of problems, such as [problem]")
    wanted = list(problems)
    for problem in wanted:
        if not (
            isinstance(problem, ProblemDescription) and isinstance(options, FindOptions) and isinstance(handle, Handle)
        ):
            raise wrong_argument(problem, options, handle)
    different = list(dict.fromkeys(wanted))
    answers = {} if measures_always(options) else _remembered(different, options, handle)
    left = [problem for problem in different if problem not in answers]
    if options.find_enforce is FindEnforce.DB_CLEAN:  # a volume's own key, too, under which PyTorch's time is
        for problem in left:
            handle.database.clean(handle.device.identity, problem.network_config)
    answers |= _found(list(dict.fromkeys(problem.flattened for problem in left)), options, handle)
    for problem in left:
        if problem not in answers:  # a volume that was found as images
            found = answers[problem.flattened]
            answers[problem] = posed(found, problem) if found else []
            if found:
                handle.remember((problem.network_config, options), answers[problem])
    return [answers[problem].copy() for problem in wanted]


def _remembered(
    problems: list[ProblemDescription], options: FindOptions, handle: Handle
) -> dict[ProblemDescription, list[Solution]]:
    """What the handle's memory has of problems."""
    kept = ((problem, handle.answers.get((problem.network_config, options))) for problem in problems)
    return {problem: solutions for problem, solutions in kept if solutions is not None}


def _found(
    problems: list[ProblemDescription], options: FindOptions, handle: Handle
) -> dict[ProblemDescription, list[Solution]]:
    """Each flattened problem's solutions, from the handle's memory where that may be, else by a find."""
    answers = {} if measures_always(options) else _remembered(problems, options, handle)
    left = [problem for problem in problems if problem not in answers]
    with contextlib.ExitStack() as stack:
        pool = precompiler = None
        if left and handle.device.place is Place.CUDA and _may_measure(options):
            pool = stack.enter_context(CompilePool())
            tuning = TuneOptions(find=options, force=True)
            precompiler = stack.enter_context(contextlib.closing(Precompiler(pool, tuning, defers=True)))
            precompiler.prepare(_unanswered(left[1:], options, handle), handle)
        while left:
            problem = left[0] if precompiler is None else precompiler.take(left)
            left.remove(problem)
            plan = None if precompiler is None else precompiler.take_plan(problem, tuning)
            try:
                answers[problem] = find(problem, options, handle, ahead=pool, likeliest=plan)
            except NoSolutionError as error:
                logger.warning("%s", error)
                answers[problem] = []
                continue
            handle.remember((problem.network_config, options), answers[problem])
    return answers


def _unanswered(problems: list[ProblemDescription], options: FindOptions, handle: Handle) -> list[ProblemDescription]:
    """Those of the problems that finds will measure."""
    if measures_always(options):
        return problems
    return [each for each in problems if records.look_up(each, options, handle, queue=False) is None]


def _may_measure(options: FindOptions) -> bool:
    """Whether a request may come to measuring."""
    if measures_always(options):
        return True
    return options.on_miss is OnMiss.FIND and find_mode(options) is not FindMode.FAST
