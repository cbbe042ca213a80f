"""Measures many problems into a FindDB: a worker a device, one queue for all, and a summary whatever ends it.

What is known is left out, and each problem is recorded when it is done, so a tuning that was stopped, or killed, goes
on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from miofind.compiler import CompilePool
from miofind.errors import DatabaseError
from miofind.find.lookup import records
from miofind.measure.effort import Effort
from miofind.runtime.handle import Handle
from miofind.suites import SuiteProblem
from miofind.tune.cost import lightest, rough_seconds
from miofind.tune.device_processes import DeviceProcesses
from miofind.tune.precompiler import Precompiler
from miofind.tune.queue import TaskQueue
from miofind.tune.values import (
    OnEvent,
    Task,
    TuneBegan,
    TuneEnd,
    TuneEvent,
    TuneFinished,
    TuneLost,
    TuneOptions,
    TuneResult,
    TuneStarted,
    TuneStatus,
    TuneSummary,
    WorkerEvent,
    mean_gain,
)
from miofind.tune.worker import Worker

__all__ = [
    "OnEvent",
    "Task",
    "TuneBegan",
    "TuneEnd",
    "TuneEvent",
    "TuneFinished",
    "TuneLost",
    "TuneOptions",
    "TuneResult",
    "TuneStarted",
    "TuneStatus",
    "TuneSummary",
    "mean_gain",
    "tasks_of",
    "tune",
]


def tune(
    requests: Sequence[SuiteProblem],
    handles: Sequence[Handle],
    options: TuneOptions,
    on_event: OnEvent = lambda event: None,
    *,
    pool: CompilePool | None = None,
    light_share: float = 0.0,
) -> TuneSummary:
    """Find solutions of every problem on every kind of device, and record them in the handles' FindDB.

    Devices of one kind share the problems, the heaviest first. A lost device ends its own work; another of its kind
    takes its problem over. KeyboardInterrupt ends all with a summary. What was recorded stays.

    With one handle the work is done in this thread, with several in a process each.

    Args:
        requests: the problems.
        handles: one a device, strict ones, so that nothing is measured that cannot be kept.
        on_event: called in this thread with what happens.
        pool: compiles each problem's kernels while the one before is measured; each of several processes then makes
            one of its own instead.
        light_share: of the problems that take least, together that share of the time of all, few candidates are
            measured where the options ask for the likeliest: what they lose is little of a network's time.

    Raises:
        DatabaseError: the FindDB cannot be written, or several handles have theirs in memory.
        UnknownSolverError: the options name a solver that a handle's registry has not.
        InvalidOptionError: a solver of several handles' registries cannot go to their processes.
        MissingEnvironmentError: a library that measuring needs is missing.
    """
    for handle in handles:
        options.find.check_names(handle.registry)
        handle.database.user.add(())  # refuses now, not after the first problem
    if len(handles) > 1 and any(handle.database.user.in_memory for handle in handles):
        raise DatabaseError("processes on several devices share no FindDB in memory: name a file or a server")
    tasks = tasks_of(requests, handles, options, light_share)
    queue = TaskQueue(tasks, seconds=options.stop_after_s)
    log = _Log(tasks, on_event)
    on_event(TuneBegan(devices=tuple(handle.device for handle in handles), tasks=tasks))
    interrupted = False
    try:
        if len(handles) == 1:
            _run_alone(handles[0], options, queue, pool, log)
        else:
            processes = DeviceProcesses(handles, options, queue, compiles=pool is not None)
            _run_processes(processes, log)
    except KeyboardInterrupt:
        interrupted = True
    return log.summary(requests, interrupted=interrupted, out_of_time=queue.out_of_time)


def _run_alone(handle: Handle, options: TuneOptions, queue: TaskQueue, pool: CompilePool | None, log: _Log) -> None:
    """Run a worker in this thread."""
    precompiler = None
    if pool is not None:
        precompiler = Precompiler(pool, options, defers=not options.find.searches)
        queue.defer(lambda task: precompiler.is_preparing(task.problem), precompiler.depth)
    try:
        Worker(0, handle, options, queue, precompiler=precompiler, tell=log.take).run()
    finally:
        if precompiler is not None:
            precompiler.close()


def _run_processes(processes: DeviceProcesses, log: _Log) -> None:
    """Run a process a device, and hand their events to the log."""
    try:
        for event in processes.events():
            log.take(event)
    finally:
        for event in processes.stop():
            log.take(event)


def tasks_of(
    requests: Sequence[SuiteProblem], handles: Sequence[Handle], options: TuneOptions, light_share: float = 0.0
) -> tuple[Task, ...]:
    """Each problem once for every kind of device; with `recheck` those that the FindDB has queued for it."""
    effort = Effort.TUNE if options.find.searches else Effort.FIND
    tasks: list[Task] = []
    for kind, handle in {handle.device.identity: handle for handle in handles}.items():
        wanted = _queued(requests, handle, options) if options.recheck else requests
        light = lightest(requests, handle.device, light_share) if options.find.likely else frozenset()
        tasks += [
            Task(
                request=request,
                kind=kind,
                estimate_s=rough_seconds(request.problem, handle.device, effort),
                options=replace(options, few=True) if request.problem in light else None,
            )
            for request in wanted
        ]
    return tuple(tasks)


def _queued(requests: Sequence[SuiteProblem], handle: Handle, options: TuneOptions) -> list[SuiteProblem]:
    """Those of the problems whose answer wants measuring again; to look one up queues it where that is so."""
    for request in requests:
        records.look_up(request.problem.flattened, options.find, handle)
    noted = {note.network_config for note in handle.database.rechecks(handle.device.identity)}
    return [request for request in requests if request.problem.flattened.network_config in noted]


class _Log:
    """Counts the workers' events, tells of them and keeps the results."""

    def __init__(self, tasks: Sequence[Task], on_event: OnEvent) -> None:
        self._total = len(tasks)
        self._on_event = on_event
        self._began = time.monotonic()
        self._started = 0
        self._results: list[TuneResult] = []
        self._lost: dict[int, str] = {}

    def take(self, event: WorkerEvent) -> None:
        """Keep one event and tell of it."""
        match event:
            case TuneStarted():
                self._started += event.task.losses == 0
                event = replace(event, number=self._started, total=self._total)
            case TuneLost():
                self._lost[event.device] = event.message
            case TuneFinished():
                self._results.append(event.result)
                event = replace(event, number=len(self._results), total=self._total)
        self._on_event(event)

    def summary(self, requests: Sequence[SuiteProblem], *, interrupted: bool, out_of_time: bool) -> TuneSummary:
        """How it went."""
        place = {request.problem: i for i, request in enumerate(requests)}
        end = TuneEnd.COMPLETE
        if interrupted:
            end = TuneEnd.INTERRUPTED
        elif out_of_time:
            end = TuneEnd.OUT_OF_TIME
        elif len(self._results) < self._total:
            end = TuneEnd.DEVICE_LOST
        return TuneSummary(
            results=tuple(sorted(self._results, key=lambda result: place[result.request.problem])),
            total=self._total,
            end=end,
            seconds=time.monotonic() - self._began,
            lost=self._lost,
        )
