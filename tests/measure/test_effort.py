"""What a schedule foretells of a race is what the race takes."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.fake_invokers import FakeInvoker, right

from miofind.core.problem import ProblemDescription
from miofind.measure.backend import TimedCandidate
from miofind.measure.effort import Effort, sample_ms
from miofind.measure.race import Entrant, Race
from miofind.measure.timer import Batch, Timer

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 6), w=(4, 4, 3, 3))
FIELDS = {
    "one": [1.0],
    "equal": [1.0] * 5,
    "near": [1.0 + 0.01 * i for i in range(24)],
    "spread": [1.15**i for i in range(16)],
    "slowest first": [1.15**i for i in reversed(range(16))],
    "far": [1.0, 30.0, 1.2, 4.0, 9.0, 1.1],
}


class GivenTime(TimedCandidate):
    """A candidate whose every run takes the same time."""

    def __init__(self, time_ms: float) -> None:
        self.rough_ms = time_ms

    def samples(self, count: int) -> list[float]:
        return [self.rough_ms] * count


class GivenTimes(Timer):
    """A timer whose candidates run as long as the test says, on a clock that only their samples move."""

    def __init__(self, times_ms: dict[str, float]) -> None:
        self._times_ms = times_ms
        self.clock_ms = 0.0

    @property
    def protocol(self) -> str:
        return "given-1"

    def prepare(self, invoker: Any) -> TimedCandidate:
        return GivenTime(self._times_ms[invoker.solver_id])

    def batch(self, timed: TimedCandidate, invoker: Any, count: int) -> Batch:
        self.clock_ms += count * sample_ms(timed.rough_ms)
        return Batch(times_ms=timed.samples(count))

    def close(self) -> None:
        pass


def raced_ms(times_ms: list[float], effort: Effort) -> float:
    """Milliseconds of a race of candidates that take these times."""
    named = {f"c{i}": time_ms for i, time_ms in enumerate(times_ms)}
    race = Race(timer := GivenTimes(named), effort)
    for name in named:
        invoker = FakeInvoker(PROBLEM, right(PROBLEM))
        invoker.solver_id = name
        race.enter(Entrant(key=name, invoker=invoker))
    race.finish()
    return timer.clock_ms


@pytest.mark.parametrize("best_ms", [0.01, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 40.0, 100.0, 200.0])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("effort", Effort)
def test_a_race_takes_what_its_schedule_expects(effort: Effort, field: str, best_ms: float) -> None:
    times_ms = [best_ms * factor for factor in FIELDS[field]]
    assert effort.schedule.expected_ms(times_ms) == pytest.approx(raced_ms(times_ms, effort))


def test_a_final_of_slow_candidates_is_foretold_in_full() -> None:
    """The forecast took the final for as short as the screening: 4 s for five finalists of 40 ms or of 100 ms."""
    schedule = Effort.TUNE.schedule
    for time_ms, final_ms in ((40.0, 30 * 5 * 80.0), (100.0, 30 * 5 * 200.0)):
        screened_ms = schedule.screen * 5 * 2 * time_ms
        assert schedule.expected_ms([time_ms] * 5) == pytest.approx(screened_ms + final_ms)


def test_an_empty_race_takes_no_time() -> None:
    assert Effort.TUNE.schedule.expected_ms([]) == 0
