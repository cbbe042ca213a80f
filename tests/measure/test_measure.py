"""Timing and the race on the CPU place: what is sampled, how often, and who wins."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
from helpers.runs.fake_invokers import FakeInvoker, Run, right

from miofind.bench.ceilings import Ceilings, arithmetic_of
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError, MeasurementError
from miofind.measure import backend_host
from miofind.measure.backend import TimedCandidate
from miofind.measure.backend_cuda import FirstRun
from miofind.measure.effort import Effort
from miofind.measure.gpu_monitor import Reading
from miofind.measure.race import Entrant, Race, RaceObserver
from miofind.measure.timer import Batch, Timer
from miofind.solver.candidate import Timing

SMALL = ProblemDescription.convolution(x=(1, 4, 6, 6), w=(4, 4, 3, 3))


def cpu_timer() -> Timer:
    return Timer(SMALL, Device.cpu(), None)  # type: ignore[arg-type]


class ScriptedTimedCandidate(TimedCandidate):
    """A candidate whose samples are a fixed time with a small ripple; counts what is asked of it."""

    def __init__(self, time_ms: float, rough_ms: float, log: list[float]) -> None:
        self.rough_ms = rough_ms
        self._ripple = itertools.cycle((1.0, 1.002, 0.998))
        self._time_ms = time_ms
        self._log = log

    def samples(self, count: int) -> list[float]:
        self._log += [self._time_ms] * count
        return [self._time_ms * next(self._ripple) for _ in range(count)]


class ScriptedTimer(Timer):
    """A timer whose candidates' times are set by the test."""

    def __init__(self, times_ms: dict[str, float], rough_ms: dict[str, float] | None = None) -> None:
        self.problem = SMALL
        self.times_ms = times_ms
        self.rough_ms = rough_ms or {}
        self.log: list[float] = []
        self.failing: set[str] = set()
        self.contended: set[str] = set()

    @property
    def protocol(self) -> str:
        return "scripted-1"

    def prepare(self, invoker: Any) -> TimedCandidate:
        name = invoker.solver_id
        return ScriptedTimedCandidate(self.times_ms[name], self.rough_ms.get(name, self.times_ms[name]), self.log)

    def batch(self, timed: TimedCandidate, invoker: Any, count: int) -> Batch:
        if invoker.solver_id in self.failing:
            raise LaunchError(f"{invoker.solver_id} failed")
        return Batch(times_ms=timed.samples(count), contended=invoker.solver_id in self.contended, dropped=1)

    def close(self) -> None:
        pass


def entrant(name: str, *, workspace_bytes: int = 0, max_error: float = 0.0) -> Entrant:
    invoker = FakeInvoker(SMALL, right(SMALL), workspace_bytes=workspace_bytes)
    invoker.solver_id = name
    return Entrant(key=name, invoker=invoker, max_error=max_error)


def run_race(times_ms: dict[str, float], effort: Effort = Effort.FIND, **timer: Any) -> tuple[Race, ScriptedTimer]:
    scripted = ScriptedTimer(times_ms, **timer)
    race = Race(scripted, effort)
    for name in times_ms:
        race.enter(entrant(name))
    return race, scripted


def test_results_come_fastest_first_for_all_entrants() -> None:
    times = {f"c{i}": 1.0 + 0.15 * i for i in (5, 2, 0, 3, 1, 4)}
    race, _ = run_race(times)
    results = race.finish()
    assert list(results) == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert all(isinstance(result.timing, Timing) for result in results.values())
    assert results["c0"].timing.time_ms == pytest.approx(1.0, rel=0.01)


def test_what_is_far_behind_is_cut_off_after_one_run() -> None:
    timer = ScriptedTimer({"fast": 1.0, "slow": 9.0, "fair": 1.9})
    race = Race(timer, Effort.FIND)
    assert race.enter(entrant("fast"))
    asked = len(timer.log)
    assert not race.enter(entrant("slow"))
    assert len(timer.log) == asked
    assert race.enter(entrant("fair"))
    results = race.finish()
    assert results["slow"].cut_off
    assert results["slow"].timing.samples == 1
    assert results["slow"].timing.time_ms == 9.0
    assert not results["fair"].cut_off
    assert list(results) == ["fast", "fair", "slow"]


def test_short_first_runs_never_cut_off() -> None:
    race, _ = run_race({"fast": 0.01, "slow": 0.08})
    assert not race.finish()["slow"].cut_off


def test_a_time_reached_elsewhere_cuts_off() -> None:
    race = Race(ScriptedTimer({"slow": 5.0}), Effort.FIND, best_ms=0.5)
    assert not race.enter(entrant("slow"))
    assert race.finish()["slow"].cut_off


def test_what_is_behind_after_screening_is_not_sampled_further() -> None:
    race, _ = run_race({"fast": 1.0, "behind": 1.6, "near": 1.2})
    results = race.finish()
    assert results["behind"].timing.samples == 3
    assert results["near"].timing.samples > 3


def test_finalists_are_interleaved() -> None:
    race, timer = run_race({"a": 1.0, "b": 1.1})
    timer.log.clear()
    race.finish()
    rounds = list(zip(timer.log[::2], timer.log[1::2], strict=True))
    assert len(rounds) == Effort.FIND.schedule.final_rounds
    assert all(sorted(round_) == [1.0, 1.1] for round_ in rounds)


def test_in_two_rounds_each_finalist_goes_once_before_any_other() -> None:
    times = {f"c{i}": 1.0 + 0.01 * i for i in range(5)}
    race, timer = run_race(times, Effort.TUNE)
    timer.log.clear()
    race.finish()
    rounds = [timer.log[i : i + 5] for i in range(0, len(timer.log), 5)]
    assert len(rounds) == Effort.TUNE.schedule.final_rounds
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=False))
    assert len({tuple(round_) for round_ in rounds}) > 10


def test_ties_go_to_the_smaller_workspace_then_the_smaller_error() -> None:
    timer = ScriptedTimer({"large": 1.0, "small": 1.004, "wide": 1.003, "other": 1.05})
    race = Race(timer, Effort.FIND)
    race.enter(entrant("large", workspace_bytes=1 << 20))
    race.enter(entrant("wide", max_error=2e-3))
    race.enter(entrant("small", max_error=1e-3))
    race.enter(entrant("other"))
    assert list(race.finish()) == ["small", "wide", "large", "other"]


def test_rounds_halve_the_field() -> None:
    times = {f"c{i:02}": 1.0 + 0.01 * i for i in range(24)}
    race, _ = run_race(times, Effort.TUNE)
    counts = [result.timing.samples for result in race.finish().values()]
    assert counts[0] == Effort.TUNE.schedule.final_rounds
    assert sorted(counts)[0] == 5
    assert counts.count(5) == 12


def test_tuning_measures_more_than_finding() -> None:
    times = {f"c{i:02}": 0.1 + 0.001 * i for i in range(24)}
    logs = []
    for effort in (Effort.SCREEN, Effort.FIND, Effort.TUNE):
        race, timer = run_race(times, effort)
        race.finish()
        logs.append(len(timer.log))
    assert logs[0] < logs[1] < logs[2]
    assert logs[0] == 3 * len(times)


def test_slow_candidates_get_fewer_samples() -> None:
    race, timer = run_race({"a": 1000.0, "b": 1010.0})
    race.finish()
    assert len(timer.log) == 4 * Effort.FIND.schedule.screen


def test_tuning_takes_thirty_rounds_however_slow() -> None:
    race, _ = run_race({"a": 1000.0, "b": 1010.0}, Effort.TUNE)
    assert {result.timing.samples for result in race.finish().values()} == {30}
    assert race.verdict is not None
    assert race.verdict.rounds == 30


def test_screening_has_no_verdict() -> None:
    race, _ = run_race({"a": 1.0, "b": 2.0}, Effort.SCREEN)
    assert list(race.finish()) == ["a", "b"]
    assert race.verdict is None
    assert race.final_samples == {}


def test_the_verdict_is_of_the_finals_rounds() -> None:
    race, _ = run_race({"a": 1.0, "b": 1.1, "c": 1.002})
    results = race.finish(incumbent="c")
    verdict = race.verdict
    assert verdict is not None
    assert (verdict.winner, verdict.ties, verdict.protocol) == ("c", ("c", "a"), "scripted-1")
    assert verdict.rounds == Effort.FIND.schedule.final_rounds == len(race.final_samples["b"])
    assert [comparison.candidate for comparison in verdict.comparisons] == ["a", "b"]
    assert verdict.comparisons[1].low > 1.05
    assert list(results) == ["c", "a", "b"]


def test_too_few_rounds_give_no_verdict() -> None:
    race, _ = run_race({"a": 1000.0, "b": 1010.0})
    assert len(race.finish()) == 2
    assert race.verdict is None


def test_who_is_fast_by_few_samples_meets_the_finalists() -> None:
    """Its few early samples stood against the finalists' many, and no round held both."""

    class Tiring(ScriptedTimedCandidate):
        def samples(self, count: int) -> list[float]:
            self.taken = getattr(self, "taken", 0) + count
            return [time_ms * (1.03 if self.taken > 8 else 1.0) for time_ms in super().samples(count)]

    class Stadium(ScriptedTimer):
        def prepare(self, invoker: Any) -> TimedCandidate:
            steady = super().prepare(invoker)
            return steady if invoker.solver_id == "late" else Tiring(1.0, 1.0, self.log)

    race = Race(Stadium({f"c{i}": 1.0 for i in range(5)} | {"late": 1.008}), Effort.FIND)
    for name in ("c0", "c1", "c2", "c3", "c4", "late"):
        race.enter(entrant(name))
    race.finish()
    assert set(race.final_samples) == {"c0", "c1", "c2", "c3", "c4", "late"}
    assert race.verdict is not None
    assert (race.verdict.winner, race.verdict.ties) == ("late", ("late",))


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_a_final_of_late_that_the_deadline_ends_costs_nothing_of_the_first(rounds: int) -> None:
    """Its few rounds, or none, stood in the place of the first final's, and there was no verdict."""
    finalists = [f"c{i}" for i in range(5)]
    most = Effort.FIND.schedule.final_rounds

    class Late(ScriptedTimer):
        turns = 0

        def batch(self, timed: TimedCandidate, invoker: Any, count: int) -> Batch:
            found = super().batch(timed, invoker, count)
            self.turns += count
            slowed = [time_ms * (1.03 if self.turns > screened else 1.0) for time_ms in found.times_ms]
            if self.turns >= screened + 5 * most + 6 * rounds:
                race._deadline = -math.inf
            return Batch(times_ms=slowed, contended=False, dropped=0)

    race = Race(timer := Late(dict.fromkeys(finalists, 1.0) | {"late": 1.008}), Effort.FIND)
    screened = math.inf
    for name in (*finalists, "late"):
        race.enter(entrant(name))
    for name in (*finalists, "late"):
        race._extend(race._runners[name], 2)
    screened = timer.turns
    results = race.finish()
    assert timer.turns == screened + 5 * most + 6 * rounds
    assert set(race.final_samples) == set(finalists)
    assert race.verdict is not None
    assert race.verdict.rounds == most
    assert {results[name].timing.samples for name in finalists} == {most + rounds}
    assert results["late"].timing.samples == 5 + rounds


def test_an_observer_hears_of_samples_before_and_of_failures_after() -> None:
    told: list[str] = []

    class Told(RaceObserver):
        def before_sample(self, key: str) -> None:
            told.append(f"{key} of {len(timer.log)}")

        def failed(self, key: str, error: Exception) -> None:
            told.append(f"{key} failed: {error}")

        def confirm(self, key: str, *, cut_off: bool) -> None:
            told.append(f"{key} confirmed" + (", cut off" if cut_off else ""))

    timer = ScriptedTimer({"a": 1.0, "b": 1.1})
    race = Race(timer, Effort.FIND, observer=Told())
    for name in ("a", "b"):
        race.enter(entrant(name))
    assert told == []
    timer.failing.add("b")
    race.finish()
    turn, failure = [line for line in told if "b" in line]
    assert turn in ("b of 6", "b of 7")
    assert failure == "b failed: b failed"
    assert told[-3:] == [f"a of {len(timer.log) - 1}", f"a of {len(timer.log)}", "a confirmed"]


def test_disturbances_are_told() -> None:
    race, timer = run_race({"a": 1.0, "b": 1.1, "c": 9.0})
    timer.contended.add("b")
    results = race.finish()
    assert {name: result.contended for name, result in results.items()} == {"a": False, "b": True, "c": False}
    assert results["a"].dropped_samples == Effort.FIND.schedule.final_rounds
    assert results["c"].dropped_samples == 0


def test_a_disturbed_screening_says_nothing_of_a_clean_final() -> None:
    """The final's samples alone make the timing, and the screening's flag and count stood beside it."""
    timer = ScriptedTimer({"a": 1.0, "b": 1.1, "behind": 1.7})
    race = Race(timer, Effort.FIND)
    timer.contended |= {"a", "behind"}
    for name in ("a", "b", "behind"):
        race.enter(entrant(name))
    timer.contended.clear()
    results = race.finish()
    assert {name: result.contended for name, result in results.items()} == {"a": False, "b": False, "behind": True}
    assert results["a"].dropped_samples == results["a"].timing.samples == Effort.FIND.schedule.final_rounds


def test_what_disturbed_samples_that_still_count_is_kept() -> None:
    timer = ScriptedTimer({"a": 1.0, "b": 1.1})
    race = Race(timer, Effort.FIND, deadline=time.monotonic() - 1)
    timer.contended.add("a")
    for name in ("a", "b"):
        race.enter(entrant(name))
    timer.contended.clear()
    results = race.finish()
    assert [(result.contended, result.dropped_samples) for result in results.values()] == [(True, 1), (False, 1)]


class Disturbed:
    """A monitor that reads what the test says, then quiet."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = list(readings)

    def look(self) -> Reading:
        return self._readings.pop(0) if self._readings else Reading()


def test_throttled_samples_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("miofind.measure.timer.time.sleep", pauses.append)
    with cpu_timer() as timer:
        invoker = FakeInvoker(SMALL, right(SMALL))
        timed = timer.prepare(invoker)
        quiet, hot = Reading(), Reading(throttled=True)
        timer.monitor = Disturbed(quiet, hot, hot, quiet)  # type: ignore[assignment]
        batch = timer.batch(timed, invoker, 2)
    assert (len(batch.times_ms), batch.dropped, batch.contended) == (2, 4, False)
    assert len(pauses) == 2


def test_a_device_that_stays_throttled_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.measure.timer.time.sleep", lambda seconds: None)
    with cpu_timer() as timer:
        invoker = FakeInvoker(SMALL, right(SMALL))
        timed = timer.prepare(invoker)
        timer.monitor = Disturbed(*[Reading(throttled=True)] * 1000)  # type: ignore[assignment]
        batches = [timer.batch(timed, invoker, 1) for _ in range(2)]
    assert [(len(batch.times_ms), batch.contended) for batch in batches] == [(1, True), (1, True)]
    assert batches[0].dropped > 10
    assert batches[1].dropped == 0


def test_load_of_others_marks_samples() -> None:
    with cpu_timer() as timer:
        invoker = FakeInvoker(SMALL, right(SMALL))
        timed = timer.prepare(invoker)
        timer.monitor = Disturbed(Reading(), Reading(contended=True))  # type: ignore[assignment]
        assert [timer.batch(timed, invoker, 1).contended for _ in range(2)] == [True, False]


def test_past_the_deadline_what_was_measured_stands() -> None:
    timer = ScriptedTimer({"a": 1.0, "b": 1.1})
    race = Race(timer, Effort.TUNE, deadline=time.monotonic() - 1)
    race.enter(entrant("b"))
    race.enter(entrant("a"))
    asked = len(timer.log)
    results = race.finish()
    assert list(results) == ["a", "b"]
    assert len(timer.log) == asked
    assert results["a"].timing.samples == 3


def test_a_failure_in_the_race_is_kept_and_comes_last() -> None:
    race, timer = run_race({"a": 1.0, "b": 1.1})
    timer.failing.add("a")
    results = race.finish()
    assert list(results) == ["b", "a"]
    assert isinstance(results["a"].failure, LaunchError)
    assert results["a"].timing.samples == 3


def test_an_empty_race_has_no_results() -> None:
    assert Race(ScriptedTimer({}), Effort.FIND).finish() == {}


class Clock:
    """A clock that goes on where a run says how long it lasts."""

    def __init__(self) -> None:
        self._now_ns = 0

    def perf_counter_ns(self) -> int:
        return self._now_ns

    def lasting(self, milliseconds: float) -> Run:
        def run(tensors: dict[str, Any], workspace: Any) -> None:
            self._now_ns += round(1e6 * milliseconds)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(backend_host, "time", clock)
    return clock


def test_host_times_are_those_of_the_clock(clock: Clock) -> None:
    with cpu_timer() as timer:
        invoker = FakeInvoker(SMALL, clock.lasting(3.0))
        timed = timer.prepare(invoker)
        assert invoker.runs == 2
        timing = timer.timing(timer.samples(timed, invoker, 5))
    assert timed.rough_ms == pytest.approx(3.0)
    assert [timing.min_ms, timing.p20_ms, timing.time_ms, timing.p80_ms] == pytest.approx([3.0] * 4)
    assert timing.samples == 5
    assert timing.protocol == "cpu-1"


@pytest.mark.parametrize(
    ("first", "wants_graph", "misleads"),
    [
        (FirstRun(1.2, 1.15), True, True),
        (FirstRun(0.2, 0.11), True, True),
        (FirstRun(0.19, 0.18), True, False),
        (FirstRun(0.9, 0.02), True, False),
        (FirstRun(1.2, 0.6), False, False),
        (FirstRun(30.0, 16.0), True, True),
    ],
    ids=["late", "late and not long", "short", "below a millisecond", "in time", "very late"],
)
def test_a_first_run_that_waited_for_the_host_is_timed_in_a_graph(
    first: FirstRun, wants_graph: bool, misleads: bool
) -> None:
    assert (first.wants_graph, first.misleads) == (wants_graph, misleads)


def test_short_host_runs_are_amortised_over_rotating_buffers() -> None:
    seen = set()

    def run(tensors: dict[str, Any], _: Any) -> None:
        seen.add(tensors["x"].__array_interface__["data"][0])

    with cpu_timer() as timer:
        invoker = FakeInvoker(SMALL, run)
        timed = timer.prepare(invoker)
        timer.samples(timed, invoker, 1)
    assert invoker.runs > 3
    assert len(seen) == 2


def test_timed_inputs_are_random() -> None:
    seen: list[np.ndarray] = []
    with cpu_timer() as timer:
        timer.prepare(FakeInvoker(SMALL, lambda tensors, _: seen.append(tensors["x"].copy())))
    assert np.std(seen[0]) == pytest.approx(1.0, abs=0.3)


def test_the_workspace_is_as_large_as_declared() -> None:
    sizes: list[int] = []
    with cpu_timer() as timer:
        for size in (100, 5000, 300):
            timer.prepare(FakeInvoker(SMALL, lambda _, ws: sizes.append(ws.size), workspace_bytes=size))
    assert sizes == [100, 100, 5000, 5000, 300, 300]


def test_what_a_candidate_raises_while_timed_is_chained() -> None:
    def run(tensors: dict[str, Any], _: Any) -> None:
        raise RuntimeError("gone")

    with cpu_timer() as timer, pytest.raises(LaunchError, match="gone") as caught:
        timer.prepare(FakeInvoker(SMALL, run))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_times_that_are_not_positive_are_refused() -> None:
    class Stopped(TimedCandidate):
        def samples(self, count: int) -> list[float]:
            return [0.0] * count

    with cpu_timer() as timer, pytest.raises(MeasurementError, match="not all positive"):
        timer.samples(Stopped(), FakeInvoker(SMALL, right(SMALL)), 2)


def test_race_on_the_cpu_place_finds_the_faster(clock: Clock) -> None:
    with cpu_timer() as timer:
        race = Race(timer, Effort.FIND)
        for name, milliseconds in (("slow", 1.2), ("fast", 1.0), ("slowest", 50.0)):
            invoker = FakeInvoker(SMALL, clock.lasting(milliseconds))
            race.enter(Entrant(key=name, invoker=invoker))
        results = race.finish()
    assert list(results) == ["fast", "slow", "slowest"]
    assert results["slowest"].cut_off
    assert math.isfinite(race.best_ms)


def test_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float16": 1e15, "tf32": 1e14})
    dense = ProblemDescription.convolution(x=(64, 512, 28, 28), w=(512, 512, 3, 3), padding=1, dtype="float16")
    assert ceilings.floor_ms(dense) == pytest.approx(dense.flops / 1e12 + 1e-3)
    thin = ProblemDescription.convolution(x=(64, 512, 28, 28), w=(512, 1, 3, 3), groups=512, dtype="float16")
    assert ceilings.floor_ms(thin) == pytest.approx(thin.bytes / 1e9 + 1e-3)
    assert ceilings.floor_ms(SMALL) is None


def test_arithmetic_is_named_by_the_inputs() -> None:
    assert arithmetic_of(SMALL) == "float32"
    tf32 = ProblemDescription.convolution(x=(1, 4, 6, 6), w=(4, 4, 3, 3), math="tf32")
    assert arithmetic_of(tf32) == "tf32"
    mixed = ProblemDescription.convolution(
        x=(1, 4, 6, 6), w=(4, 4, 3, 3), dtype={"x": "bfloat16", "w": "bfloat16", "y": "float32"}
    )
    assert arithmetic_of(mixed) == "bfloat16"
