"""Which candidate is fastest, with as few samples as that takes.

Candidates enter one by one: a first run, then three samples unless that run was far behind. `finish` halves the field,
each time on more samples, and lets the finalists run in interleaved rounds of one sample each, so that drifting clocks
hit all alike. `verdict` says what those rounds prove. A `Schedule` says how many samples there are.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from miofind.errors import MiofindError
from miofind.measure.backend import TimedCandidate
from miofind.measure.effort import Effort
from miofind.measure.timer import Timer
from miofind.measure.verdict import MIN_ROUNDS, Finalist, RaceVerdict, judge
from miofind.solver.candidate import Timing

if TYPE_CHECKING:
    from miofind.launch.invoker import Invoker

logger = logging.getLogger(__name__)

# Without a verdict, times within 1 % are ties: repeated medians of one kernel differ by about as much.
TIE = 1.01
# A candidate is asked for its samples in chunks of this many milliseconds, so that the deadline is seen in time.
_CHUNK_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A verified candidate.

    Attributes:
        key: its name in the results.
        invoker: runs it.
        max_error: breaks ties after the workspace.
    """

    key: str
    invoker: Invoker
    max_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """How an entrant fared.

    Attributes:
        timing: of its best comparable samples: the final's for finalists.
        cut_off: it was far behind and has the time of its first run alone.
        contended: samples of it were disturbed and could not be replaced.
        dropped_samples: samples that were taken while the device was throttled, and were taken again.
        failure: what it raised during the race, after it had been verified; None for a usable result.
    """

    timing: Timing
    cut_off: bool = False
    contended: bool = False
    dropped_samples: int = 0
    failure: MiofindError | MemoryError | None = None


class RaceObserver:
    """Is told what happens in a race; this one does nothing."""

    def before_sample(self, key: str) -> None:
        """An entrant is about to be sampled."""

    def failed(self, key: str, error: MiofindError | MemoryError) -> None:
        """An entrant has failed as it ran; what this raises ends the race."""

    def confirm(self, key: str, *, cut_off: bool) -> None:
        """Do nothing where an entrant's results are right still, after all its samples or the one of a cut-off.

        Raises:
            WrongResultError: they are not.
            LaunchError, MemoryError: it failed over it.
        """


@dataclass(slots=True, eq=False)
class _Runner:
    """An entrant in the race and what was measured of it so far."""

    entrant: Entrant
    timed: TimedCandidate | None
    samples: list[float] = field(default_factory=list)
    contended: bool = False
    dropped: int = 0
    failure: MiofindError | MemoryError | None = None
    cut_off: bool = False

    @property
    def time_ms(self) -> float:
        return median(self.samples)

    def take(self, timer: Timer, count: int) -> None:
        """Take further samples of it."""
        assert self.timed is not None
        batch = timer.batch(self.timed, self.entrant.invoker, count)
        self.samples += batch.times_ms
        self.contended = self.contended or batch.contended
        self.dropped += batch.dropped

    def restart(self) -> _Runner:
        """Forget its samples and what disturbed them; a copy that has them still."""
        earlier = replace(self)
        self.samples, self.contended, self.dropped = [], False, 0
        return earlier

    def resume(self, earlier: _Runner) -> None:
        """Put the samples from before a restart, and what disturbed them, before those since."""
        self.samples = earlier.samples + self.samples
        self.contended = self.contended or earlier.contended
        self.dropped += earlier.dropped


class Race:
    """A race of one problem's candidates.

    Args:
        timer: times them.
        effort: how long it is.
        deadline: `time.monotonic()` after which no more is measured; what was measured stands.
        best_ms: a time already reached elsewhere, for cutting off what is far behind.
        observer: hears of every sample and failure in `finish`.

    Attributes:
        final_samples: by key, the finalists' samples in milliseconds, one a round; empty before `finish` and without a
            final.
        verdict: what the final's rounds prove; None before `finish`, and where there were too few finalists or rounds.
    """

    def __init__(
        self,
        timer: Timer,
        effort: Effort,
        *,
        deadline: float = math.inf,
        best_ms: float = math.inf,
        observer: RaceObserver | None = None,
    ) -> None:
        self._timer = timer
        self._schedule = effort.schedule
        self._deadline = deadline
        self._best_ms = best_ms
        self._observer = observer or RaceObserver()
        self._runners: dict[str, _Runner] = {}
        self.final_samples: Mapping[str, list[float]] = {}
        self.verdict: RaceVerdict | None = None

    @property
    def best_ms(self) -> float:
        """The fastest time so far, infinite before the first."""
        return self._best_ms

    def enter(self, entrant: Entrant) -> bool:
        """Whether the candidate races on; False where it was cut off after its first timed run.

        Raises:
            LaunchError: it failed to start or to finish.
            MemoryError: its workspace does not fit the device.
        """
        timed = self._timer.prepare(entrant.invoker)
        runner = _Runner(entrant=entrant, timed=timed)
        if self._schedule.cuts_off(timed.rough_ms, self._best_ms):
            runner.samples, runner.timed, runner.cut_off = [timed.rough_ms], None, True
        else:
            runner.take(self._timer, self._schedule.screen)
            self._best_ms = min(self._best_ms, runner.time_ms)
        self._runners[entrant.key] = runner
        return not runner.cut_off

    def finish(self, *, incumbent: str = "") -> dict[str, RaceResult]:
        """The result of every entrant, best first: the verdict's ties, then by time; the failed come last.

        An entrant that fails now keeps the timing it had.

        Args:
            incumbent: key that wins between ties of equal workspace and error.
        """
        field_ = self._halved(self._contenders())
        finalists = field_[: self._schedule.finalists]
        if self._schedule.final_rounds:
            finalists += [runner for runner in self._contenders()[:1] if runner not in finalists]
            self._final(finalists)
            self._final_of_late(finalists)
        self._confirm_all()
        if self._schedule.final_rounds:
            self.verdict = self._judged(incumbent)
        ordered = self._ordered(incumbent)
        return {runner.entrant.key: self._result(runner) for runner in ordered}

    def _contenders(self) -> list[_Runner]:
        """Entrants close enough to the best to go on, in the order they entered."""
        best_ms = min(self._best_ms, *(runner.time_ms for runner in self._runners.values()), math.inf)
        return [
            runner
            for runner in self._runners.values()
            if runner.timed is not None and runner.failure is None and self._schedule.keeps(runner.time_ms, best_ms)
        ]

    def _halved(self, field_: list[_Runner]) -> list[_Runner]:
        """The field after all halvings, fastest first; none follows when few enough are left."""
        for count in self._schedule.halvings:
            if len(field_) <= self._schedule.finalists:
                break
            samples = self._schedule.halving_samples(count, (runner.time_ms for runner in field_))
            for runner in field_:
                self._extend(runner, samples - len(runner.samples))
            alive = sorted((r for r in field_ if r.failure is None), key=lambda r: r.time_ms)
            field_ = alive[: self._schedule.survivors(len(alive))]
        return sorted(field_, key=lambda r: r.time_ms)

    def _final(self, finalists: list[_Runner]) -> None:
        """Interleaved rounds; where there are enough, they alone make the finalists' timings.

        Too few for a verdict, and fewer than an earlier final took, add to the timings and leave that final's rounds.
        """
        if not finalists:
            return
        rounds = self._schedule.rounds_of_final(runner.time_ms for runner in finalists)
        earlier = [runner.restart() for runner in finalists]
        for order in _orders(finalists, rounds):
            if time.monotonic() > self._deadline:
                break
            for runner in order:
                self._extend(runner, 1, always=True)
        taken = {r.entrant.key: list(r.samples) for r in finalists if r.failure is None}
        is_enough = _rounds(taken) >= min(_rounds(self.final_samples), MIN_ROUNDS)
        before_it = {key: samples for key, samples in self.final_samples.items() if key in taken}
        self.final_samples = taken if is_enough else before_it
        for runner, before in zip(finalists, earlier, strict=True):
            if not is_enough or len(runner.samples) < self._schedule.screen:
                runner.resume(before)

    def _final_of_late(self, finalists: list[_Runner]) -> None:
        """One more final, with those that a few early samples put before the finalists' many."""
        alive = [runner for runner in finalists if runner.failure is None]
        best_ms = min((runner.time_ms for runner in alive), default=0.0)
        late = [r for r in self._contenders() if r not in finalists and r.time_ms < best_ms]
        if late:
            self._final([*alive, *late])

    def _confirm_all(self) -> None:
        """Let those fail whose results are no longer right."""
        for runner in self._runners.values():
            if runner.failure is None:
                self._observer.before_sample(runner.entrant.key)
                self._attempt(
                    runner, functools.partial(self._observer.confirm, runner.entrant.key, cut_off=runner.cut_off)
                )
        self.final_samples = {
            key: samples for key, samples in self.final_samples.items() if self._runners[key].failure is None
        }

    def _attempt(self, runner: _Runner, act: Callable[[], None]) -> None:
        """Do something with an entrant; a failure is kept, not raised."""
        try:
            act()
        except (MiofindError, MemoryError) as error:
            logger.warning("%s failed in the race: %s", runner.entrant.key, error)
            runner.failure = error
            self._observer.failed(runner.entrant.key, error)

    def _judged(self, incumbent: str) -> RaceVerdict | None:
        finalists = [
            Finalist(
                key=key,
                samples_ms=samples,
                workspace_bytes=self._runners[key].entrant.invoker.workspace_bytes,
                max_error=self._runners[key].entrant.max_error,
            )
            for key, samples in self.final_samples.items()
        ]
        return judge(finalists, protocol=self._timer.protocol, incumbent=incumbent)

    def _ordered(self, incumbent: str) -> list[_Runner]:
        usable = [runner for runner in self._runners.values() if runner.failure is None]
        ties = [self._runners[key] for key in (self.verdict.ties if self.verdict else ())]
        raced = [runner for runner in usable if not runner.cut_off and runner not in ties]
        behind = [runner for runner in usable if runner.cut_off]
        failed = [runner for runner in self._runners.values() if runner.failure is not None]
        return [*ties, *_ranked(raced, incumbent), *_ranked(behind, incumbent), *failed]

    def _extend(self, runner: _Runner, count: int, *, always: bool = False) -> None:
        """Take further samples in chunks, until the deadline; a failure is kept, not raised."""
        while count > 0 and runner.failure is None and (always or time.monotonic() <= self._deadline):
            chunk = count if not runner.samples else min(count, max(1, int(_CHUNK_MS / runner.time_ms)))
            self._observer.before_sample(runner.entrant.key)
            self._attempt(runner, functools.partial(runner.take, self._timer, chunk))
            count -= chunk

    def _result(self, runner: _Runner) -> RaceResult:
        return RaceResult(
            timing=self._timer.timing(runner.samples),
            cut_off=runner.cut_off,
            contended=runner.contended,
            dropped_samples=runner.dropped,
            failure=runner.failure,
        )


def _rounds(final_samples: Mapping[str, list[float]]) -> int:
    """How many rounds a final had; 0 where nobody is left of it."""
    return min(map(len, final_samples.values()), default=0)


def _orders(finalists: list[_Runner], count: int) -> Iterator[list[_Runner]]:
    """The order of each of `count` rounds: shuffled, and in every second round the reverse of the one before.

    Where a candidate stands in a round changes its time: after a pause clocks are higher, and a hot neighbour leaves
    them lower. Over two rounds each candidate's mean position is the same and of any two each goes first once; who
    precedes whom is left to chance, which a fixed rotation would not do.
    """
    shuffler = random.Random(0)
    order = list(finalists)
    for number in range(count):
        if number % 2:
            order = order[::-1]
        else:
            shuffler.shuffle(order)
        yield order


def _ranked(runners: list[_Runner], incumbent: str) -> list[_Runner]:
    """By time; the leader of those left goes with its ties, by workspace, then error, then the incumbent, then time."""
    left = sorted(runners, key=lambda runner: runner.time_ms)
    ranked: list[_Runner] = []

    def preference(runner: _Runner) -> tuple[int, float, bool, float]:
        entrant = runner.entrant
        return entrant.invoker.workspace_bytes, entrant.max_error, entrant.key != incumbent, runner.time_ms

    while left:
        ties = [runner for runner in left if runner.time_ms <= TIE * left[0].time_ms]
        left = left[len(ties) :]
        ranked += sorted(ties, key=preference)
    return ranked
