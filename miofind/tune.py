"""Measures many problems into a FindDB: leaves out what is known, goes on past failures, stops cleanly.

Each problem is recorded when it is done, so a tuning that was stopped takes up where it was. Knows nothing of how its
progress is shown.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from miofind import records
from miofind.driver_line import driver_line
from miofind.errors import DatabaseError, InvalidOptionError, MissingEnvironmentError
from miofind.evaluate import DeviceLostError
from miofind.find import measure
from miofind.found import Solution
from miofind.handle import Handle
from miofind.options import FindOptions
from miofind.problem import ProblemDescription
from miofind.suites import SuiteProblem

logger = logging.getLogger(__name__)


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
        stop_after_s: seconds after which no further problem is begun.

    Raises:
        InvalidOptionError: the message names the option and the value.
    """

    find: FindOptions = field(default_factory=FindOptions)
    force: bool = False
    stop_after_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.stop_after_s >= 0:
            raise InvalidOptionError(f"stop_after_s={self.stop_after_s!r} must be a number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What became of one problem.

    Attributes:
        solutions: fastest first; empty where it failed.
        message: why it failed, "" otherwise.
        seconds: time it took.
    """

    request: SuiteProblem
    status: TuneStatus
    solutions: tuple[Solution, ...] = ()
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStarted:
    """A problem is begun; `number` counts from 1 to `total`."""

    request: SuiteProblem
    number: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFinished:
    """A problem is done with; `number` counts from 1 to `total`."""

    result: TuneResult
    number: int
    total: int


TuneEvent = TuneStarted | TuneFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSummary:
    """How a tuning went.

    Attributes:
        results: of the problems that were done with, in the order of the requests.
        total: how many problems were asked for.
        end: why it ended.
        seconds: time it took.
    """

    results: tuple[TuneResult, ...]
    total: int
    end: TuneEnd
    seconds: float

    def count(self, status: TuneStatus) -> int:
        """How many problems have that status."""
        return sum(result.status is status for result in self.results)

    @property
    def left(self) -> int:
        """Problems that were not done with."""
        return self.total - len(self.results)


def tune(
    requests: Sequence[SuiteProblem],
    handle: Handle,
    options: TuneOptions,
    on_event: Callable[[TuneEvent], None] = lambda event: None,
) -> TuneSummary:
    """Find solutions of every problem, and record them in the handle's FindDB.

    Ctrl-C ends it with a summary, and so does a device that no longer answers. What was recorded stays.

    Args:
        requests: the problems, in the order they are tuned.
        handle: a strict one, so that nothing is measured that cannot be kept.
        on_event: called when a problem is begun and when it is done with.

    Raises:
        DatabaseError: the FindDB cannot be written.
        MissingEnvironmentError: the device or a library that measuring needs is missing.
    """
    handle.database.user.add(())  # refuses now, not after the first problem
    began = time.monotonic()
    results: list[TuneResult] = []
    end = TuneEnd.COMPLETE
    try:
        for number, request in enumerate(requests, start=1):
            if time.monotonic() - began >= options.stop_after_s:
                end = TuneEnd.OUT_OF_TIME
                break
            on_event(TuneStarted(request=request, number=number, total=len(requests)))
            result = _tuned(request, handle, options)
            results.append(result)
            on_event(TuneFinished(result=result, number=number, total=len(requests)))
    except KeyboardInterrupt:
        end = TuneEnd.INTERRUPTED
    except DeviceLostError as error:
        logger.error("%s", error)
        end = TuneEnd.DEVICE_LOST
    return TuneSummary(results=tuple(results), total=len(requests), end=end, seconds=time.monotonic() - began)


def _tuned(request: SuiteProblem, handle: Handle, options: TuneOptions) -> TuneResult:
    """One problem's result; whatever fails is in it, unless it would fail every problem."""
    began = time.monotonic()
    try:
        known = None if options.force else _known(request.problem, options.find, handle)
        solutions = known or measure(request.problem, options.find, handle)
    except (DatabaseError, MissingEnvironmentError, DeviceLostError):
        raise
    except Exception as error:  # a solver's own code may raise anything, and hours of tuning must survive it
        logger.debug("tuning failed: %s", driver_line(request.problem), exc_info=True)
        message = str(error) or type(error).__name__
        seconds = time.monotonic() - began
        return TuneResult(request=request, status=TuneStatus.FAILED, message=message, seconds=seconds)
    return TuneResult(
        request=request,
        status=TuneStatus.KNOWN if known else TuneStatus.TUNED,
        solutions=tuple(solutions),
        seconds=time.monotonic() - began,
    )


def _known(problem: ProblemDescription, options: FindOptions, handle: Handle) -> list[Solution] | None:
    """What the FindDB has, if no solver of this release is missing from it."""
    return records.look_up(problem, options, handle, partial=False)
