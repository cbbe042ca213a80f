"""What an agent holds of the queue, from a claim to what the server has been told of it.

A job is measured, then its rows are merged on the server, and only then it is finished there: a host that is lost for
good takes no row along that anybody counts on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from miofind.finddb import ProblemKey
from miofind.fleet.values import Claimed, Finish, Hold
from miofind.tune.values import Task, TuneResult, TuneStatus

_RECENT = 0.2
"""Weight of the newest problem in the mean of how long problems take."""


class Stage(Enum):
    """How far a job is."""

    WAITING = auto()
    IN_WORK = auto()
    MEASURED = auto()
    MERGED = auto()
    LOST = auto()
    GIVEN_BACK = auto()


@dataclass(slots=True)
class _Held:
    claimed: Claimed
    stage: Stage
    is_told_begun: bool = False
    finish: Finish | None = None
    measured_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What members of a kind have before them.

    Attributes:
        waiting: jobs that nobody measures yet.
        mean_s: how long a problem takes, None before the first.
    """

    waiting: int
    mean_s: float | None


class Holdings:
    """The jobs of an agent by how far they are. Threads share it.

    Attributes:
        is_behind: whether the server lacks so much of what was measured that no more is to be claimed.
        wanting: called where a member takes a job or finds none, and where a job came to another stage.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: dict[int, _Held] = {}
        self._waiting: dict[str, deque[int]] = {}
        self._mean_s: dict[str, float] = {}
        self._prepared: set[int] = set()
        self._is_closed = False
        self.is_behind = False
        self.wanting: Callable[[], object] = lambda: None

    def add(self, claimed: Iterable[Claimed]) -> None:
        """Take in what was claimed; what cannot be read is finished as failed, what comes too late is given back."""
        with self._changed:
            for each in claimed:
                self._forget_waiting(each.hold.job)
                if each.task is None:
                    finish = Finish(hold=each.hold, outcome=TuneStatus.FAILED, message=each.refusal)
                    self._jobs[each.hold.job] = _Held(each, Stage.MERGED, finish=finish)
                elif self._is_closed:
                    self._jobs[each.hold.job] = _Held(each, Stage.GIVEN_BACK)
                else:
                    self._jobs[each.hold.job] = _Held(each, Stage.WAITING)
                    self._waiting.setdefault(each.task.kind, deque()).append(each.hold.job)
            self._changed.notify_all()

    def _forget_waiting(self, job: int) -> None:
        """Drop an older hold of a job that comes again: it was lost, and waits no more."""
        self._prepared.discard(job)
        for waiting in self._waiting.values():
            if job in self._jobs and job in waiting:
                waiting.remove(job)

    def take(self, tasks: GpuTasks) -> Task | None:
        """The next task for a member; waits for one, and is None once nothing more is given out."""
        with self._changed:
            while not (self._is_closed or tasks.is_closed):
                if tasks.own:
                    return tasks.own.popleft()
                waiting = None if tasks.is_held else self._waiting.get(tasks.kind)
                if waiting:
                    held = self._jobs[waiting.popleft()]
                    held.stage = Stage.IN_WORK
                    self._prepared.discard(held.claimed.hold.job)
                    self.wanting()
                    return held.claimed.task
                self.wanting()
                self._changed.wait()
            return None

    def ahead(self, kind: str, count: int) -> tuple[Task, ...]:
        """Of the next tasks those that nobody prepares yet; they stay where they are."""
        with self._changed:
            found = [job for job in list(self._waiting.get(kind, ()))[:count] if job not in self._prepared]
            self._prepared.update(found)
            tasks = [self._jobs[job].claimed.task for job in found]
            return tuple(task for task in tasks if task is not None)

    def measured(self, task: Task, result: TuneResult) -> None:
        """Note what became of a task: its rows, if it has any, are in the local FindDB."""
        with self._changed:
            held = self._jobs.get(task.ticket)
            if held is None or held.stage is not Stage.IN_WORK:
                return
            before = self._mean_s.get(task.kind, result.seconds)
            self._mean_s[task.kind] = before + _RECENT * (result.seconds - before)
            held.stage, held.measured_at = Stage.MEASURED, time.monotonic()
            held.finish = Finish(
                hold=held.claimed.hold, outcome=result.status, message=result.message, seconds=result.seconds
            )
        self.wanting()

    def lost(self, task: Task) -> None:
        """Note that a device was lost over a task."""
        self._move([task.ticket], Stage.IN_WORK, Stage.LOST)

    def merged(self, jobs: Iterable[int]) -> None:
        """Note that the server has the rows of jobs."""
        self._move(jobs, Stage.MEASURED, Stage.MERGED)

    def refused(self, job: int, message: str) -> None:
        """Note that the server does not take the rows of a job."""
        with self._changed:
            held = self._jobs.get(job)
            if held is not None and held.finish is not None:
                held.finish = Finish(hold=held.claimed.hold, outcome=TuneStatus.FAILED, message=message)
        self.merged([job])

    def give_back_waiting(self, campaigns: Collection[int] | None = None, *, kind: str | None = None) -> None:
        """Measure none of what waits, of some campaigns or kind of device or all; the queue is to have it back."""
        with self._changed:
            for waiting in (found for name, found in self._waiting.items() if kind in (None, name)):
                for job in list(waiting):
                    held = self._jobs[job]
                    if campaigns is None or held.claimed.campaign in campaigns:
                        waiting.remove(job)
                        held.stage = Stage.GIVEN_BACK
            self._changed.notify_all()

    def give_back_unfinished(self) -> None:
        """Have the queue take back what was begun and never came to an end, since its member was told to stop."""
        with self._changed:
            jobs = [job for job, held in self._jobs.items() if held.stage is Stage.IN_WORK]
        self._move(jobs, Stage.IN_WORK, Stage.GIVEN_BACK)

    def drop(self, lost: Collection[Hold]) -> None:
        """Drop what waits and is no longer ours; what was begun or measured stays: its rows are true."""
        with self._changed:
            for waiting in self._waiting.values():
                for job in [job for job in waiting if self._jobs[job].claimed.hold in lost]:
                    waiting.remove(job)
                    del self._jobs[job]

    def forget(self, holds: Iterable[Hold]) -> None:
        """Drop jobs of which the server was told all."""
        with self._changed:
            for hold in holds:
                held = self._jobs.get(hold.job)
                if held is not None and held.claimed.hold == hold:
                    del self._jobs[hold.job]

    def told_begun(self, holds: Iterable[Hold]) -> None:
        """Note that the server knows that jobs are being measured."""
        with self._changed:
            for hold in holds:
                if hold.job in self._jobs:
                    self._jobs[hold.job].is_told_begun = True

    @property
    def holds(self) -> list[Hold]:
        """All that are held, to be renewed."""
        with self._changed:
            return [held.claimed.hold for held in self._jobs.values()]

    @property
    def untold(self) -> list[Hold]:
        """Those in work that the server believes to be waiting."""
        with self._changed:
            jobs = self._jobs.values()
            return [held.claimed.hold for held in jobs if held.stage is Stage.IN_WORK and not held.is_told_begun]

    @property
    def finishes(self) -> list[Finish]:
        """What the server is to be told of jobs whose rows it has."""
        with self._changed:
            jobs = self._jobs.values()
            return [held.finish for held in jobs if held.stage is Stage.MERGED and held.finish is not None]

    def at(self, stage: Stage) -> list[Claimed]:
        """The jobs that are so far."""
        with self._changed:
            return [held.claimed for held in self._jobs.values() if held.stage is stage]

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being measured."""
        with self._changed:
            return not any(held.stage in (Stage.WAITING, Stage.IN_WORK) for held in self._jobs.values())

    @property
    def campaigns(self) -> set[int]:
        """Those that anything is held of."""
        with self._changed:
            return {held.claimed.campaign for held in self._jobs.values()}

    def load(self, kind: str) -> Load:
        """What members of a kind have before them."""
        with self._changed:
            return Load(waiting=len(self._waiting.get(kind, ())), mean_s=self._mean_s.get(kind))

    @property
    def unmerged_s(self) -> float:
        """Seconds since the first of those was measured whose rows the server has not."""
        with self._changed:
            times = [held.measured_at for held in self._jobs.values() if held.stage is Stage.MEASURED]
        return time.monotonic() - min(times) if times else 0.0

    def close(self) -> None:
        """Give out nothing more; what waits goes back to the queue."""
        with self._changed:
            self._is_closed = True
        self.give_back_waiting()

    def look(self) -> None:
        """Have members that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def _move(self, jobs: Iterable[int], before: Stage, after: Stage) -> None:
        with self._changed:
            for job in jobs:
                held = self._jobs.get(job)
                if held is not None and held.stage is before:
                    held.stage = after
        self.wanting()


class GpuTasks:
    """The queue as one member's processes see it; a `Tasks`.

    Args:
        kind: `Device.identity` of the member's device.

    Attributes:
        own: tasks of this device alone, which go before all others and are no jobs: their tickets are below 0.
        is_held: whether it gives out no jobs at present: the device is not believed.
        is_closed: whether it gives out nothing more.
    """

    def __init__(self, holdings: Holdings, kind: str) -> None:
        self.kind = kind
        self.own: deque[Task] = deque()
        self.is_held = False
        self.is_closed = False
        self._holdings = holdings

    def take(self, kind: str) -> Task | None:
        """See `TaskQueue.take`."""
        return self._holdings.take(self)

    def promise(self, kind: str) -> Task | None:
        """None: any member may take the next job."""
        return None

    def ahead(self, kind: str, count: int) -> tuple[Task, ...]:
        """See `TaskQueue.ahead`."""
        return self._holdings.ahead(self.kind, count)

    def done(self, task: Task) -> None:
        """See `TaskQueue.done`: the agent notes it with the event, which has what became of it."""

    def give_back(self, task: Task) -> bool:
        """See `TaskQueue.give_back`: it is the server that counts a job's losses. A canary is tried no second time."""
        if task.ticket < 0:
            return False
        self._holdings.lost(task)
        return True

    def hold(self, is_held: bool) -> None:
        """Give out no jobs for now, or again."""
        self.is_held = is_held
        self._holdings.look()

    def ask(self, tasks: Sequence[Task]) -> None:
        """Have this device measure tasks of its own next."""
        self.own.extend(tasks)
        self._holdings.look()

    def close(self) -> None:
        """Give out nothing more."""
        self.is_closed = True
        self._holdings.look()


def key_of(claimed: Claimed) -> ProblemKey:
    """Where the FindDB has what is measured of a job that can be read."""
    assert claimed.task is not None
    return ProblemKey(device=claimed.task.kind, network_config=claimed.task.problem.network_config)
