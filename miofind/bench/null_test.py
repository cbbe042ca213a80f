"""How honest the protocol is on a device: how often equal kernels are called different, and a slower one is found.

Each pair is a race of two entrants from the first run to the verdict, as in a tuning. The slowdown is real work: where
the fair entrant launches its kernels n times a run, the slowed one launches them n + 1 times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidOptionError, MiofindError, NoSolutionError
from miofind.find.plan import make_plan
from miofind.launch.invoker import Invoker, make_invoker
from miofind.measure.effort import Effort
from miofind.measure.race import Entrant, Race
from miofind.measure.timer import Timer
from miofind.measure.verdict import Finalist, PairedComparison, judge
from miofind.options import FindOptions
from miofind.runtime.handle import Handle

logger = logging.getLogger(__name__)

MOST_DIFFERENT = 0.05
"""Share of equal pairs that may be called different."""

LEAST_FOUND = 0.8
"""Share of pairs whose slowdown must be found."""

DEFAULT_PROBLEM = ProblemDescription.convolution(x=(1, 64, 28, 28), w=(64, 64, 1, 1))
"""Small, so that hundreds of pairs take a minute or two, and no easier than others: short runs are the noisy ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NullTestOptions:
    """What is tested.

    Attributes:
        pairs: of equal entrants, and as many with a slowdown.
        slowdown: how much slower the slowed entrant is; 0.03 is 3 %.
        find: limits and filters that choose the solver.

    Raises:
        InvalidOptionError: the message names the option and the value.
    """

    pairs: int = 400
    slowdown: float = 0.03
    find: FindOptions = field(default_factory=FindOptions)

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise InvalidOptionError(f"pairs={self.pairs!r} must be at least 1")
        if not 0.005 <= self.slowdown <= 1:
            raise InvalidOptionError(f"slowdown={self.slowdown!r} must be between 0.005 and 1")

    @property
    def repeats(self) -> int:
        """Launches a run of the fair entrant; the slowed one's last launch is the slowdown."""
        return round(1 / self.slowdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSeries:
    """What became of a number of pairs.

    Attributes:
        pairs: how many.
        called: pairs that were called different; of slowed pairs, those whose slowdown was found.
        noise: median over the pairs of the spread of a round's ratio, as half the width from its 16th to its 84th
            percentile: one standard deviation, if the noise is normal.
        rounds: least rounds of a final; 0 where no pair came to one.
        contended: pairs with samples that another process or throttled clocks disturbed.
    """

    pairs: int
    called: int
    noise: float
    rounds: int
    contended: int

    @property
    def share(self) -> float:
        """Pairs that were called different, of all."""
        return self.called / self.pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class NullTestReport:
    """What a null test found.

    Attributes:
        solver_id, config: who ran the problem.
        protocol: version of the timing protocol.
        equal: pairs of one invoker under two names.
        slowed: pairs with one more launch in one of the two.
        scaled: the equal pairs' samples with one side's multiplied by the slowdown: what the same noise, without the
            averaging over many launches, lets be found.
    """

    problem: ProblemDescription
    solver_id: str
    config: str
    protocol: str
    slowdown: float
    equal: PairSeries
    slowed: PairSeries
    scaled: PairSeries

    @property
    def ok(self) -> bool:
        """Whether the protocol keeps both its promises here."""
        found = min(self.slowed.share, self.scaled.share)
        return self.equal.share <= MOST_DIFFERENT and found >= LEAST_FOUND


def null_test(
    problem: ProblemDescription,
    device: Device,
    compiler: Compiler,
    options: NullTestOptions,
    on_pair: Callable[[], None] = lambda: None,
) -> NullTestReport:
    """Race equal and slowed pairs of a problem's first planned solution.

    Args:
        on_pair: called after each of 2 * options.pairs races.

    Raises:
        NoSolutionError: no planned solution can be run.
        LaunchError, MeasurementError: it fails while it is timed.
        MemoryError: the problem's tensors do not fit the device.
    """
    invoker = _invoker(problem, device, compiler, options.find)
    repeats = options.repeats
    equal, slowed, scaled = _PairTally(), _PairTally(), _PairTally()
    with Timer(problem, device, compiler) as timer:
        for swapped in _alternating(options.pairs):
            pair = _pair(timer, invoker, invoker, swapped=swapped)
            equal.add(pair, is_called=pair.comparison is None or pair.comparison.differs)
            slower = pair.scaled(1 + options.slowdown, timer.protocol)
            scaled.add(slower, is_called=slower.finds_the_second)
            on_pair()
        fair, slow = Repeated(invoker, repeats), Repeated(invoker, repeats + 1)
        for swapped in _alternating(options.pairs):
            pair = _pair(timer, fair, slow, swapped=swapped)
            slowed.add(pair, is_called=pair.finds_the_second)
            on_pair()
        protocol = timer.protocol
    return NullTestReport(
        problem=problem,
        solver_id=invoker.solver_id,
        config=invoker.config.json,
        protocol=protocol,
        slowdown=options.slowdown,
        equal=equal.series,
        slowed=slowed.series,
        scaled=scaled.series,
    )


class Repeated(Invoker):
    """Runs another invoker several times a run.

    A kernel that waits could not be slowed by a few percent honestly: its time is not that of the work beside it. One
    launch more among many costs what a launch costs, whatever the device does meanwhile.
    """

    def __init__(self, inner: Invoker, times: int) -> None:
        self._inner = inner
        self._times = times
        self.problem, self.device = inner.problem, inner.device
        self.solver_id, self.config = inner.solver_id, inner.config
        self.workspace_bytes, self.alignment_bytes = inner.workspace_bytes, inner.alignment_bytes
        self.deterministic, self.solution = inner.deterministic, inner.solution

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        """Run `times` times."""
        for _ in range(self._times):
            self._inner.run(bases, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One race of two.

    Attributes:
        first_ms, second_ms: the final's samples, one a block; empty where one of the two did not reach it.
        comparison: of the verdict; None where there was none.
    """

    first_ms: list[float]
    second_ms: list[float]
    comparison: PairedComparison | None
    is_contended: bool

    @property
    def finds_the_second(self) -> bool:
        """Whether the second was found to be slower."""
        return self.comparison is not None and self.comparison.candidate == _SECOND and self.comparison.is_slower

    @property
    def noise(self) -> float:
        """One standard deviation of a round's ratio, robustly; infinite without rounds."""
        logs = sorted(math.log(b / a) for a, b in zip(self.first_ms, self.second_ms, strict=True))
        if not logs:
            return math.inf
        return (logs[int(0.84 * (len(logs) - 1))] - logs[int(0.16 * (len(logs) - 1))]) / 2

    def scaled(self, factor: float, protocol: str) -> _Pair:
        """The same rounds with the second's samples multiplied, judged anew."""
        second_ms = [factor * time_ms for time_ms in self.second_ms]
        verdict = judge(
            [Finalist(key=_FIRST, samples_ms=self.first_ms), Finalist(key=_SECOND, samples_ms=second_ms)],
            protocol=protocol,
        )
        return _Pair(
            first_ms=self.first_ms,
            second_ms=second_ms,
            comparison=verdict.comparisons[0] if verdict else None,
            is_contended=self.is_contended,
        )


_FIRST, _SECOND = "first", "second"


def _pair(timer: Timer, first: Invoker, second: Invoker, *, swapped: bool) -> _Pair:
    """A race of two; `swapped` lets the second enter first."""
    race = Race(timer, Effort.TUNE)
    entrants = [Entrant(key=_FIRST, invoker=first), Entrant(key=_SECOND, invoker=second)]
    for entrant in entrants[::-1] if swapped else entrants:
        race.enter(entrant)
    results = race.finish()
    for result in results.values():
        if result.failure is not None:
            raise result.failure
    return _Pair(
        first_ms=race.final_samples.get(_FIRST, []) if len(race.final_samples) == 2 else [],
        second_ms=race.final_samples.get(_SECOND, []) if len(race.final_samples) == 2 else [],
        comparison=race.verdict.comparisons[0] if race.verdict else None,
        is_contended=any(result.contended for result in results.values()),
    )


class _PairTally:
    """Counts pairs."""

    def __init__(self) -> None:
        self._noises: list[float] = []
        self._rounds: list[int] = []
        self._called = 0
        self._contended = 0

    def add(self, pair: _Pair, *, is_called: bool) -> None:
        """Count one pair."""
        self._noises.append(pair.noise)
        if pair.first_ms:
            self._rounds.append(len(pair.first_ms))
        self._called += is_called
        self._contended += pair.is_contended

    @property
    def series(self) -> PairSeries:
        """The counts."""
        return PairSeries(
            pairs=len(self._noises),
            called=self._called,
            noise=median(self._noises),
            rounds=min(self._rounds, default=0),
            contended=self._contended,
        )


def _alternating(count: int) -> Iterator[bool]:
    return (bool(number % 2) for number in range(count))


def _invoker(problem: ProblemDescription, device: Device, compiler: Compiler, options: FindOptions) -> Invoker:
    """The first planned candidate that can be made ready."""
    plan = make_plan(problem, options, Handle(device, compiler=compiler))
    for planned in (*plan.candidates, *plan.last_resort):
        try:
            return make_invoker(problem, device, planned.solver, planned.config, compiler)
        except MiofindError as error:
            logger.info("%s is left out: %s", planned.candidate.id, error)
    raise NoSolutionError(f"no solver can be tested with {problem} on {device.name}")
