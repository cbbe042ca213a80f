"""Executors: who carries out a job. In this process, or in a spawned child that a crashing candidate may kill.

The parent of a child needs no CUDA for it: a job crosses as values, and the child writes a journal of what it does
next, so that the one at fault is known when the child dies or falls silent.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from miofind.compiler import Compiler
from miofind.device.device import Device, Place
from miofind.errors import InvalidOptionError, MeasurementError, MissingLibraryError
from miofind.evaluate.evaluate import DeviceLostError, Event, Job, JournalEntry, JournalPhase, Poisoned, evaluate
from miofind.evaluate.measuring_child import JobDone, MeasuringSetup, serve
from miofind.measure.verdict import RaceVerdict
from miofind.process.child import ChildExit
from miofind.process.forks import follow_forks
from miofind.process.protocol import Failed
from miofind.process.restarts import Restarts, attempts
from miofind.process.service import START_TIMEOUT_S, Service, Silence, told
from miofind.process.service import End as ServiceEnd
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.registry import Registry

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 120.0
CANDIDATE_TIMEOUT_S = 60.0

_PROCESS = "the measuring process"


class Executor(Protocol):
    """Carries out jobs one after another."""

    def prepare(self) -> None:
        """Begin what a first job would wait for; returns at once."""

    def begin(self, job: Job) -> None:
        """Begin a job that is likely to be run next, beside what comes before that; returns at once."""

    def run(self, job: Job) -> Iterator[Outcome | RaceVerdict]:
        """An outcome for every candidate that was started, then the verdict, where the race has one."""

    def abandon(self) -> None:
        """End what was begun and will not be run."""

    def close(self) -> None:
        """Release what the executor holds."""


class InProcess:
    """Carries out jobs in this process.

    Args:
        registry: has the candidates' solvers; None for the default one.
    """

    def __init__(self, device: Device, compiler: Compiler, registry: Registry | None = None) -> None:
        self._device = device
        self._compiler = compiler
        self._registry = Registry.default() if registry is None else registry

    def prepare(self) -> None:
        """Nothing to begin: this process is there."""

    def begin(self, job: Job) -> None:
        """Nothing to begin: this process has other things to do."""

    def run(self, job: Job) -> Iterator[Outcome | RaceVerdict]:
        """An outcome for every candidate that was started, then the verdict, where the race has one.

        Raises:
            DeviceLostError: a candidate destroyed this process's CUDA context.
            MeasurementError: the problem does not fit the device.
        """
        for event in evaluate(job, self._device, self._compiler, self._registry):
            if isinstance(event, Poisoned):
                logger.warning("%s: measure with isolate=True (--isolate) to keep it from the others", event.reason)
            else:
                yield event

    def abandon(self) -> None:
        """Nothing was begun."""

    def close(self) -> None:
        """Nothing to release."""


class Isolated:
    """Carries out jobs in a child process, replaced whenever a candidate kills it, hangs or poisons it.

    Args:
        device: what the child measures on; a GPU is found there by its UUID.
        registry: has the candidates' solvers, which the child gets; None for the default one.
        candidate_timeout_s: seconds after which a candidate that is silent while it runs is given up.
        compile_timeout_s: seconds after which a candidate that compiles is given up.

    Raises:
        InvalidOptionError: a solver of the registry cannot go to a child.
    """

    _serve = staticmethod(serve)  # what the child does; tests put a faulty service in its place

    def __init__(
        self,
        device: Device,
        registry: Registry | None = None,
        *,
        candidate_timeout_s: float = CANDIDATE_TIMEOUT_S,
        compile_timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._device = device
        self._registry = Registry.default() if registry is None else registry
        self._registry.check_travels()
        self._limits = _Limits(compile_s=compile_timeout_s, run_s=candidate_timeout_s)
        self._child: Service | None = None
        self._prepared: Service | None = None
        self._begun: tuple[Service, Job] | None = None  # the child that works on what nobody has asked for yet
        self._lock = threading.Lock()
        self._works = False
        follow_forks(self)
        _in_use.add(self)

    def leave_parent(self) -> None:
        """Have no child in a forked process, whose parent goes on with it."""
        self._lock = threading.Lock()
        self._child = self._prepared = None
        self._begun = None
        self._works = False

    def prepare(self) -> None:
        """Start a child now, so that it is there when the first job has been planned; not beside a job at work."""
        with self._lock:
            if self._child is None and self._prepared is None and not self._works:
                self._prepared = self._new_child()

    def begin(self, job: Job) -> None:
        """Have the child of the last job work on one that is likely to be run next; one such job at a time.

        If another one is run, it waits until the child is done with this one, and nobody hears of that.
        """
        with self._lock:
            child = self._child
            if child is None or self._begun is not None or self._works:
                return
            try:
                self._begun = child, job
                child.send(job)
            except BaseException:  # Ctrl-C: whether the child has it is open
                self._child = self._begun = None
                child.kill()
                raise

    def run(self, job: Job) -> Iterator[Outcome | RaceVerdict]:
        """An outcome for every candidate that was started, then the verdict, where the race has one.

        A crash or a hang costs its candidate alone: those that were only queued, or still raced, are tried again in a
        new child. A candidate whose child was killed by a signal that may have come from outside is tried once more.
        Waiting for a child that is silent does not count against the budget, nor does work that is lost with a child,
        as long as all work together stays within twice the budget.

        Raises:
            DeviceLostError: the device works no more.
            MeasurementError: children die without any candidate to blame, or the problem does not fit the device.
            MissingLibraryError: a library that measuring needs is missing.
        """
        remaining = list(job.candidates)
        worked_s = 0.0
        doubted: set[Candidate] = set()
        blameless = Restarts()
        while remaining:
            left_s = max(0.0, min(job.budget_s, 2 * job.budget_s - worked_s))
            part = replace(job, candidates=tuple(remaining), budget_s=left_s)
            watch = _Watch(self._limits, part.candidates)
            for event in self._events(part, watch):
                if isinstance(event, Poisoned):
                    logger.info("%s: its process is replaced", event.reason)
                    continue
                if isinstance(event, Outcome):
                    remaining.remove(event.candidate)
                yield event
            end = watch.end
            if end is None:
                return
            worked_s += watch.worked_s
            suspects = [candidate for candidate in watch.suspects if candidate in remaining]
            if not suspects:
                if not watch.has_progressed and blameless.ended():
                    raise MeasurementError(f"the measuring process ended {blameless.fruitless} times: {end.message}")
            elif len(suspects) > 1:
                job = replace(job, compile_workers=1)  # any of them may be at fault: one at a time from here
            elif end.from_outside and suspects[0] not in doubted:
                doubted.add(suspects[0])
                remaining.remove(suspects[0])
                remaining.append(suspects[0])
            else:
                remaining.remove(suspects[0])
                yield Outcome(candidate=suspects[0], status=end.status, message=end.message)

    def _events(self, job: Job, watch: _Watch) -> Iterator[Event]:
        """The child's events; what ended them early is in `watch`."""
        self._works = True
        child: Service | None = None
        try:
            child, is_begun = self._taken(job)
            child = child or self._started()
            yield from self._told(child, job, watch, is_begun=is_begun)
        except BaseException:
            if child is not None and self._child is not child:
                child.kill()
            raise
        finally:
            self._works = False

    def _told(self, child: Service, job: Job, watch: _Watch, *, is_begun: bool) -> Iterator[Event]:
        """What a child that is ready tells of a job."""
        began = time.monotonic()
        try:
            if not is_begun:
                child.send(job)
            while True:
                message = child.receive(watch.patience_s)
                if not isinstance(message, Silence | ChildExit):
                    watch.worked_s = time.monotonic() - began
                if isinstance(message, Silence | ChildExit | Failed):
                    watch.ended(message)
                    return
                if isinstance(message, JobDone):
                    self._child = child
                    return
                if isinstance(message, JournalEntry):
                    watch.note(message)
                    continue
                watch.has_progressed = True
                yield message
                if isinstance(message, Poisoned):
                    watch.poisoned(message)
                    return
        finally:
            if self._child is not child:
                child.kill()

    def _taken(self, job: Job) -> tuple[Service | None, bool]:
        """The child of the last job or of `prepare`, if it is there still and its device works; whether it has begun.

        Raises:
            MissingLibraryError: a library that measuring needs is missing.
        """
        child: Service | None = None
        prepared: Service | None = None
        begun: tuple[Service, Job] | None = None
        try:
            with self._lock:
                child, self._child = self._child, None
                prepared, self._prepared = self._prepared, None
                begun, self._begun = self._begun, None
            if begun is not None and begun[0] is not child:
                begun[0].kill()
                begun = None
            if child is not None:
                is_begun = begun is not None and _is_same(begun[1], job)
                if child.is_alive and (begun is None or is_begun or self._is_done(*begun)):
                    return child, is_begun
                child.kill()
            if prepared is not None:
                if not self._complaint(prepared):
                    return prepared, False
                prepared.kill()
        except BaseException:  # Ctrl-C: nobody else knows of them
            for each in filter(None, (child, prepared, begun and begun[0])):
                each.kill()
            raise
        return None, False

    def _is_done(self, child: Service, begun: Job) -> bool:
        """Whether a child ends a job that it has begun, for which it has as long as for one that is run."""
        watch = _Watch(self._limits, begun.candidates)
        while not isinstance(message := child.receive(watch.patience_s), JobDone):
            if isinstance(message, Silence | ChildExit | Failed | Poisoned):
                return False
            if isinstance(message, JournalEntry):
                watch.note(message)
        return True

    def _new_child(self) -> Service:
        return Service(self._serve, self._setup, gpu=self._device.uuid)

    @property
    def _setup(self) -> MeasuringSetup:
        """What a child is told; it sees one GPU where that is known by its UUID."""
        index = 0 if self._device.uuid else self._device.index
        return MeasuringSetup(device=replace(self._device, index=index), registry=self._registry)

    def _complaint(self, child: Service) -> str:
        """Why a new child is of no use, "" once it is ready.

        Raises:
            InvalidOptionError: the registry cannot be made in the child.
            MissingLibraryError: a library that measuring needs is missing.
        """
        try:
            end = child.await_ready()
            if isinstance(end, Failed) and isinstance(end.error, InvalidOptionError | MissingLibraryError):
                raise end.error
        except BaseException:
            child.kill()
            raise
        if end is None:
            return ""
        reason = told(end, _PROCESS)
        logger.warning("a measuring process could not start on %s: %s", self._device.name, reason)
        return reason

    def _started(self) -> Service:
        """A new child whose device works.

        Raises:
            DeviceLostError, MeasurementError: no child starts, or the device of none works.
            InvalidOptionError: the registry cannot be made in the child.
            MissingLibraryError: a library that measuring needs is missing.
        """
        reason = ""
        for _ in attempts():
            child = self._new_child()
            reason = self._complaint(child)
            if not reason:
                return child
            child.kill()
        kind = MeasurementError if self._device.place is Place.CPU else DeviceLostError
        raise kind(f"no measuring process can be started on {self._device.name}: {reason}")

    def abandon(self) -> None:
        """End the child where it works on what nobody has asked for: whatever is measured next has the device."""
        with self._lock:
            if self._begun is None:
                return
            child, _ = self._begun
            child.kill()  # before it is forgotten: Ctrl-C may come at any time, and to kill it twice is harmless
            if child is self._child:
                self._child = None
            self._begun = None

    def close(self) -> None:
        """End the child."""
        with self._lock:
            begun = None if self._begun is None else self._begun[0]
            children = [child for child in (self._child, self._prepared, begun) if child is not None]
        for child in children:
            child.kill()  # before they are forgotten, as in `abandon`
        with self._lock:
            if self._child in children:
                self._child = None
            if self._prepared in children:
                self._prepared = None
            if self._begun is not None and self._begun[0] in children:
                self._begun = None


def _is_same(begun: Job, job: Job) -> bool:
    """Whether a job that was begun is the one that is run: some of the budget has passed since."""
    return begun == replace(job, budget_s=begun.budget_s) and begun.budget_s >= job.budget_s


_in_use: weakref.WeakSet[Isolated] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the children with this process; each would notice by itself a second later, and Popen complain meanwhile."""
    for each in list(_in_use):
        each.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Seconds that a candidate may be silent while it compiles and while it runs."""

    compile_s: float
    run_s: float


@dataclass(frozen=True, slots=True)
class _End:
    """How a child ended."""

    status: Status
    message: str
    from_outside: bool = False


class _Watch:
    """Who compiles or runs in the child, how long it may be silent, and what ended it.

    Args:
        candidates: those of the job.

    Attributes:
        end: how the child ended; None while it lives and where it finished its job.
        suspects: who may have ended it.
        has_progressed: the child has told what became of a candidate.
        worked_s: seconds from the job's begin until the child was last heard of.
    """

    def __init__(self, limits: _Limits, candidates: tuple[Candidate, ...]) -> None:
        self._limits = limits
        self._candidates = candidates
        self._compiling: dict[Candidate, float] = {}
        self._running: Candidate | None = None
        self.end: _End | None = None
        self.suspects: list[Candidate] = []
        self.has_progressed = False
        self.worked_s = 0.0

    @property
    def patience_s(self) -> float:
        """Seconds until the next message must have come."""
        if self._running is not None:
            return self._limits.run_s
        if not self._compiling:
            return START_TIMEOUT_S  # preparations that no candidate answers for
        return max(0.0, min(self._compiling.values()) + self._limits.compile_s - time.monotonic())

    def note(self, entry: JournalEntry) -> None:
        """Note an entry of the journal."""
        candidate = None if entry.place is None else self._candidates[entry.place]
        self._running = candidate if entry.phase is JournalPhase.RUN else None
        if candidate is not None and entry.phase is JournalPhase.COMPILE:
            self._compiling[candidate] = time.monotonic()
        elif candidate is not None and entry.phase is JournalPhase.COMPILED:
            self._compiling.pop(candidate, None)
        self.suspects = list(self._compiling) if self._running is None else [self._running]

    def poisoned(self, event: Poisoned) -> None:
        """The child goes on no more, and nobody is to blame beyond the candidate whose outcome has come."""
        self.end = _End(Status.OUT_OF_MEMORY, event.reason)
        self._compiling, self._running, self.suspects = {}, None, []

    def ended(self, end: ServiceEnd) -> None:
        """The child was silent for too long, has ended, or has told why it goes on no more.

        Raises:
            MissingLibraryError, MeasurementError: any other child would meet the same.
        """
        if isinstance(end, Silence):
            self._time_out()
        elif isinstance(end, ChildExit):
            self.end = _End(Status.CRASHED, told(end, _PROCESS), from_outside=end.is_from_outside)
        elif isinstance(end.error, MissingLibraryError):
            raise end.error
        elif not self.suspects:
            raise MeasurementError(f"the measuring process ended before any candidate ran: {end.message}")
        else:
            self.end = _End(Status.CRASHED, end.message)

    def _time_out(self) -> None:
        limit_s = START_TIMEOUT_S
        if self._running is not None:
            limit_s = self._limits.run_s
        elif self._compiling:
            limit_s = self._limits.compile_s
            self.suspects = [min(self._compiling, key=self._compiling.__getitem__)]
        what = "compiled" if self._compiling else "ran"
        message = f"it {what} for {limit_s:g} s without an end" if self.suspects else f"no answer for {limit_s:g} s"
        self.end = _End(Status.TIMED_OUT, message)
