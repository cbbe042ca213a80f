"""One device's part in a tuning: takes problems from the queue, measures them into the FindDB and tells of it.

Whatever one problem raises stays in that problem's result, unless it would fail every problem or the device is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.driver.line import driver_line
from miofind.errors import DatabaseError, MissingEnvironmentError, NoDeviceError, described, raise_if_interrupted
from miofind.evaluate.evaluate import DeviceLostError
from miofind.find.lookup import records
from miofind.find.lookup.failures import failed_outcomes
from miofind.find.lookup.validity import is_valid
from miofind.find.measuring import begin_likeliest, measure
from miofind.find.plan import Plan
from miofind.finddb import RefusedEntryError, usable_rows
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution, reordered
from miofind.solver.candidate import Outcome
from miofind.solver.steps import Config
from miofind.tune.planning import known_solutions, tuning_plan
from miofind.tune.precompiler import Precompiler
from miofind.tune.values import (
    Task,
    TuneFinished,
    TuneLost,
    TuneOptions,
    TuneResult,
    TuneStarted,
    TuneStatus,
    WorkerEvent,
)

logger = logging.getLogger(__name__)


class Tasks(Protocol):
    """The queue, or what stands for it in another process; see `TaskQueue`."""

    def take(self, kind: str) -> Task | None:
        """The next task for a kind of device, None where there is no more."""

    def promise(self, kind: str) -> Task | None:
        """Fix which task `take` gives next, and leave it where it is; None where that is open."""

    def ahead(self, kind: str, count: int) -> tuple[Task, ...]:
        """Of the next tasks those to prepare, left where they are."""

    def done(self, task: Task) -> None:
        """Note that a task that was taken is done with."""

    def give_back(self, task: Task) -> bool:
        """Leave the task of a lost device to another; False where it has cost too many."""

    def close(self) -> None:
        """Give out nothing more."""


class Worker:
    """Tunes what a queue has for one device.

    Args:
        number: its device's, in events.
        handle: a strict one.
        precompiler: compiles what comes next; None where nothing does.
        tell: called with what happens, in the worker's thread.
    """

    def __init__(
        self,
        number: int,
        handle: Handle,
        options: TuneOptions,
        queue: Tasks,
        *,
        precompiler: Precompiler | None,
        tell: Callable[[WorkerEvent], None],
    ) -> None:
        self.number = number
        self._handle = handle
        self._options = options
        self._queue = queue
        self._precompiler = precompiler
        self._tell = tell
        self._has_begun = False

    def run(self) -> None:
        """Work until the queue gives no more or the device is lost.

        Raises:
            DatabaseError, MissingEnvironmentError: what would fail every problem.
        """
        try:
            self._run(self._handle.device.identity)
        finally:
            if self._has_begun:
                self._handle.executor(isolate=self._options.find.isolate).abandon()

    def _run(self, kind: str) -> None:
        if self._precompiler is not None and self._precompiler.defers:
            self._prepare(kind)  # the first of all, too: this thread would plan it against the one that prepares
        while (task := self._queue.take(kind)) is not None:
            self._tell(TuneStarted(device=self.number, task=task))
            self._prepare(kind)
            began = time.monotonic()
            try:
                options, ahead = task.options or self._options, self._precompiler
                plan = ahead.take_plan(task.problem, options) if ahead else None
                result = tuned(
                    task, self._handle, options, ahead.pool if ahead else None, plan, at_rest=self._begin_next
                )
            except (DeviceLostError, NoDeviceError) as error:
                self._lose(task, str(error), time.monotonic() - began)
                return
            self._queue.done(task)
            self._tell(TuneFinished(device=self.number, task=task, result=result))

    def _begin_next(self) -> None:
        """Have the next problem's likeliest candidates measured while this one's results are recorded."""
        task = self._queue.promise(self._handle.device.identity)
        if task is None or self._precompiler is None:
            return
        problem, options = task.problem, task.options or self._options
        plan = self._precompiler.plan(problem, options)
        if plan is not None and not (options.recheck or options.stored):
            self._has_begun = True
            begin_likeliest(problem, options.find, self._handle, plan, self._precompiler.pool)

    def _prepare(self, kind: str) -> None:
        """Have the next problems' kernels compiled."""
        if self._precompiler is not None:
            for each in self._queue.ahead(kind, self._precompiler.depth):
                self._precompiler.prepare([each.problem], self._handle, each.options)

    def _lose(self, task: Task, message: str, seconds: float) -> None:
        logger.error("%s: %s", self._handle.device.name, message)
        if not self._queue.give_back(task):
            told = f"devices were lost over it twice, the second time so: {message}"
            self._tell(TuneFinished(device=self.number, task=task, result=failed(task, told, seconds)))
        self._tell(TuneLost(device=self.number, message=message))


def tuned(
    task: Task,
    handle: Handle,
    options: TuneOptions,
    pool: CompilePool | None = None,
    plan: Plan | None = None,
    at_rest: Callable[[], None] = lambda: None,
) -> TuneResult:
    """One problem's result; whatever fails is in it.

    Args:
        pool: compiles the candidates; None where measuring does.
        plan: of the likeliest candidates, where there is one already.
        at_rest: called when the device has measured them and nothing is recorded yet.

    Raises:
        DatabaseError, MissingEnvironmentError: what would fail every problem.
        DeviceLostError: the device no longer answers.
    """
    began = time.monotonic()
    problem = task.problem
    try:
        known = known_solutions(problem, options, handle)
        solutions = known or measure(
            problem,
            options.find,
            handle,
            also=_checked_again(problem, options, handle),
            ahead=pool,
            afresh=options.force,
            stored=options.stored,
            likeliest=plan or (tuning_plan(problem, options, handle) if options.few or options.drawn else None),
            at_rest=at_rest,
        )
    except RefusedEntryError as error:
        return failed(task, str(error), time.monotonic() - began)
    except (DatabaseError, MissingEnvironmentError, DeviceLostError):
        raise
    except Exception as error:  # a solver's own code may raise anything, and hours of tuning must survive it
        raise_if_interrupted(error)
        logger.debug("tuning failed: %s", driver_line(problem), exc_info=True)
        told = described(error, str) or type(error).__name__
        result = failed(task, told, time.monotonic() - began)
        return replace(result, failed=_failures(problem, options, handle))
    return TuneResult(
        request=task.request,
        kind=task.kind,
        status=TuneStatus.KNOWN if known else TuneStatus.TUNED,
        solutions=tuple(reordered(_fastest_of_each_solver(solutions), handle)),
        default_ms=_default_ms(solutions, handle),
        seconds=time.monotonic() - began,
        failed=_failures(problem, options, handle),
    )


def _failures(problem: ProblemDescription, options: TuneOptions, handle: Handle) -> tuple[Outcome, ...]:
    """What became of the candidates that failed; none where that cannot be told, which a result must survive."""
    try:
        return failed_outcomes(problem, options.find, handle)
    except (DatabaseError, MissingEnvironmentError):
        raise
    except Exception as error:  # a solver's own code may raise anything
        raise_if_interrupted(error)
        logger.debug("what failed is not told: %s", driver_line(problem), exc_info=True)
        return ()


def _checked_again(problem: ProblemDescription, options: TuneOptions, handle: Handle) -> Sequence[Solution]:
    """For a re-check, every solution of the present answer: what is not measured again would stay stale."""
    return records.look_up(problem, options.find, handle) or () if options.recheck else ()


def failed(task: Task, message: str, seconds: float = 0.0) -> TuneResult:
    """The result of a task that has no solution, and why."""
    return TuneResult(request=task.request, kind=task.kind, status=TuneStatus.FAILED, message=message, seconds=seconds)


def _fastest_of_each_solver(solutions: Sequence[Solution]) -> list[Solution]:
    """Days of results must fit the memory, and reports need no more."""
    fastest: dict[str, Solution] = {}
    for solution in solutions:
        fastest.setdefault(solution.solver_id, solution)
    return list(fastest.values())


def _default_ms(solutions: Sequence[Solution], handle: Handle) -> float | None:
    """Time of the first default configuration of the solver that won, as far as the FindDB knows it."""
    best = solutions[0]
    default = _first_default(best, handle)
    if default is None:
        return None
    answered = next((s.time_ms for s in solutions if s.solver_id == best.solver_id and s.config == default), None)
    if answered is not None:
        return answered
    histories = handle.database.histories(handle.device.identity, best.problem.network_config)
    in_force = usable_rows(row for history in histories for row in history.rows if is_valid(row, handle))
    rows = (row for row in in_force if row.solver_id == best.solver_id and row.config == default.json)
    return next((row.time_ms for row in rows), None)


def _first_default(solution: Solution, handle: Handle) -> Config | None:
    solver = handle.registry.named(solution.solver_id)
    try:
        return next(iter(solver.default_configs(solution.problem, handle.device)), None)
    except BaseException as error:  # a solver's own code may raise anything, and this serves a report alone
        raise_if_interrupted(error)
        logger.debug("%s has no default configuration now: %s", solver.id, described(error))
        return None
