"""What a tuning is given, tells of and ends with: inert values, fit to cross to another process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidOptionError
from miofind.options import FindOptions
from miofind.runtime.solution import Solution
from miofind.solver.candidate import Outcome
from miofind.suites import SuiteProblem


class TuneStatus(StrEnum):
    """What became of a problem: measured now, known before, or left without a solution."""

    TUNED = "tuned"
    KNOWN = "known"
    FAILED = "failed"


class TuneEnd(StrEnum):
    """Why a tuning ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    OUT_OF_TIME = "out_of_time"
    DEVICE_LOST = "device_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How problems are tuned.

    Attributes:
        find: limits, filters and effort of each problem's find.
        force: measure what the FindDB knows already, too.
        recheck: measure only what the FindDB has queued for it, the solutions in its answers included.
        stored: measure the configurations in the FindDBs' answers, composed forms also with what their solvers are
            fastest with by now without the epilogue, and no others: those of changed solvers, or under
            other versions of libraries and driver, that were not measured again yet. Where `find` sets no `max_error`,
            it becomes infinite: also what only requests with `max_error` take is measured.
        few: where `find` measures the likeliest, the first two alone.
        drawn: where `find` measures the likeliest, so many others besides, drawn at random.
        stop_after_s: seconds after which no further problem is begun.

    Raises:
        InvalidOptionError: the message names the option and the value.
    """

    find: FindOptions = field(default_factory=FindOptions)
    force: bool = False
    recheck: bool = False
    stored: bool = False
    few: bool = False
    drawn: int = 0
    stop_after_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.stop_after_s >= 0:
            raise InvalidOptionError(f"stop_after_s={self.stop_after_s!r} must be a number of at least 0")
        if type(self.drawn) is not int or self.drawn < 0:
            raise InvalidOptionError(f"drawn={self.drawn!r} must be a whole number of at least 0")
        if self.drawn and not self.find.likely:
            raise InvalidOptionError("candidates are drawn beside the likeliest alone: ask for likely (--likely), too")
        if self.drawn and self.stored:
            raise InvalidOptionError("stored measures no other configurations, and draws none: ask for one of the two")
        if self.stored and (self.recheck or self.find.searches):
            other = "recheck" if self.recheck else "a search"
            raise InvalidOptionError(f"stored measures no other configurations, {other} does: ask for one of them")
        if self.stored and self.find.max_error is None:
            object.__setattr__(self, "find", replace(self.find, max_error=math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem for one kind of device.

    Attributes:
        kind: `Device.identity` of those that may take it.
        estimate_s: how long measuring it may take, from its size alone.
        losses: devices that were lost over it.
        options: how it is measured; None for the tuning's own.
        ticket: what a queue that serves several tunings knows it by: they may have tasks of one problem.
    """

    request: SuiteProblem
    kind: str
    estimate_s: float
    losses: int = 0
    options: TuneOptions | None = None
    ticket: int = 0

    @property
    def problem(self) -> ProblemDescription:
        """What is measured and recorded: the request's, flattened."""
        return self.request.problem.flattened

    @property
    def weight(self) -> float:
        """What the order of work goes by: long problems first, so that none is left for the end, and frequent ones."""
        return self.estimate_s * self.request.count


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What became of one problem on one kind of device.

    Attributes:
        kind: `Device.identity` of the device.
        solutions: the fastest of each solver, fastest first; empty where it failed.
        default_ms: time of the winning solver's first default configuration, None where it is not known.
        message: why it failed, "" otherwise.
        seconds: time it took.
        failed: candidates that are left out of the solutions, since they failed there, now or before.
    """

    request: SuiteProblem
    kind: str
    status: TuneStatus
    solutions: tuple[Solution, ...] = ()
    default_ms: float | None = None
    message: str = ""
    seconds: float = 0.0
    failed: tuple[Outcome, ...] = ()

    @property
    def gain(self) -> float | None:
        """Time of the first default over the best time: 1.2 is 20 % faster than without a search."""
        if self.default_ms is None or not self.solutions:
            return None
        return self.default_ms / self.solutions[0].time_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneBegan:
    """The work is laid out: the devices, by number, and the tasks they share by kind."""

    devices: tuple[Device, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStarted:
    """A device begins a problem.

    Attributes:
        device: its number.
        number: counts the problems begun, from 1 to `total`; 0 until the tuning has counted it.
        total: problems of the tuning.
    """

    task: Task
    device: int
    number: int = 0
    total: int = 0

    @property
    def request(self) -> SuiteProblem:
        """The problem."""
        return self.task.request


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFinished:
    """A device is done with a problem.

    Attributes:
        device: its number.
        number: counts the problems done with, from 1 to `total`; 0 until the tuning has counted it.
        total: problems of the tuning.
    """

    task: Task
    device: int
    result: TuneResult
    number: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneLost:
    """A device no longer answers; its problem goes to another of its kind."""

    device: int
    message: str


WorkerEvent = TuneStarted | TuneFinished | TuneLost
"""What one device's part in a tuning tells of."""

TuneEvent = TuneBegan | WorkerEvent
OnEvent = Callable[[TuneEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSummary:
    """How a tuning went.

    Attributes:
        results: of the problems that were done with, in the order of the requests.
        total: how many were asked for; a problem counts once a kind of device.
        end: why it ended.
        seconds: time it took.
        lost: by number, the devices that no longer answer, and what was said of each.
    """

    results: tuple[TuneResult, ...]
    total: int
    end: TuneEnd
    seconds: float
    lost: dict[int, str] = field(default_factory=dict)

    def count(self, status: TuneStatus) -> int:
        """How many problems have that status."""
        return sum(result.status is status for result in self.results)

    @property
    def left(self) -> int:
        """Problems that were not done with."""
        return self.total - len(self.results)


def mean_gain(results: Iterable[TuneResult]) -> float | None:
    """Geometric mean of the gains of what was measured now, weighed by `count`; None where no gain is known."""
    gains = [
        (result.gain, result.request.count)
        for result in results
        if result.status is TuneStatus.TUNED and result.gain is not None
    ]
    weights = sum(count for _, count in gains)
    return math.exp(sum(math.log(gain) * count for gain, count in gains) / weights) if weights else None
