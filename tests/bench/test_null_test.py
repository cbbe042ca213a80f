"""The null test: what it counts, what it slows down, and when it says no."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, run_json, use_own_folders

from miofind.bench import null_test as module
from miofind.bench.null_test import DEFAULT_PROBLEM, NullTestOptions, NullTestReport, Repeated, null_test
from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidOptionError, LaunchError, NoSolutionError
from miofind.measure.backend import TimedCandidate
from miofind.measure.timer import Batch, Timer
from miofind.options import FindOptions


class Launches(TimedCandidate):
    """A launch takes 1 ms, and what the noise adds."""

    def __init__(self, timer: ScriptedTimer, launches: int) -> None:
        self.rough_ms = float(launches)
        self._timer = timer
        self._launches = launches

    def samples(self, count: int) -> list[float]:
        return [self._launches * self._timer.random.gauss(1.0, self._timer.noise) for _ in range(count)]


class ScriptedTimer(Timer):
    """A timer whose times are those of `Launches`."""

    noise = 0.005
    fails = False

    def __init__(self, problem: Any, device: Any, compiler: Any) -> None:
        self.random = random.Random(3)
        self.monitor = None

    @property
    def protocol(self) -> str:
        return "scripted-1"

    def prepare(self, invoker: Any) -> TimedCandidate:
        return Launches(self, invoker._times if isinstance(invoker, Repeated) else 1)

    def batch(self, timed: TimedCandidate, invoker: Any, count: int) -> Batch:
        if self.fails:
            raise LaunchError("it failed for this test")
        return Batch(times_ms=timed.samples(count))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Timer", ScriptedTimer)


def report(pairs: int = 20, slowdown: float = 0.03, **options: Any) -> NullTestReport:
    asked = NullTestOptions(pairs=pairs, slowdown=slowdown, **options)
    return null_test(DEFAULT_PROBLEM, Device.cpu(), Compiler(), asked)


def test_a_quiet_device_passes() -> None:
    found = report()
    assert found.ok
    assert (found.equal.called, found.slowed.called, found.scaled.called) == (0, 20, 20)
    assert found.equal.pairs == found.slowed.pairs == found.scaled.pairs == 20
    assert 0.005 < found.equal.noise < 0.009
    assert found.equal.rounds == 45
    assert found.protocol == "scripted-1"


def test_a_noisy_device_does_not_find_the_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedTimer, "noise", 0.08)
    found = report()
    assert found.slowed.share < 0.8
    assert not found.ok


def test_a_protocol_that_sees_differences_everywhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.measure.verdict._PERCENTILES", (99.9, 100.0))
    monkeypatch.setattr("miofind.measure.verdict.DIFFERENCE", 1.0)
    found = report()
    assert found.slowed.share == 1
    assert found.equal.share > 0.05
    assert not found.ok


@pytest.mark.parametrize(("slowdown", "repeats"), [(0.03, 33), (0.1, 10), (0.015, 67)])
def test_the_slowdown_is_one_more_launch(slowdown: float, repeats: int) -> None:
    assert NullTestOptions(slowdown=slowdown).repeats == repeats


def test_repeated_runs_run_as_often() -> None:
    invoker = module._invoker(DEFAULT_PROBLEM, Device.cpu(), Compiler(), FindOptions())
    runs: list[tuple[Any, ...]] = []
    invoker.run = lambda *arguments: runs.append(arguments)  # type: ignore[method-assign]
    Repeated(invoker, 34).run((1, 2, 3, 4), 5)
    assert runs == [((1, 2, 3, 4), 5)] * 34


def test_pairs_are_told_as_they_come() -> None:
    told: list[None] = []
    null_test(DEFAULT_PROBLEM, Device.cpu(), Compiler(), NullTestOptions(pairs=3), lambda: told.append(None))
    assert len(told) == 6


def test_options_choose_the_solver() -> None:
    assert report(pairs=1, find=FindOptions(only=("ConvCpuDirect",))).solver_id == "ConvCpuDirect"
    padded = ProblemDescription.convolution(x=(1, 4, 6, 6), w=(4, 4, 3, 3), padding=1)
    asked = NullTestOptions(pairs=1, find=FindOptions(only=("ConvCpuGemm1x1",)))
    with pytest.raises(NoSolutionError, match="no solver can be tested"):
        null_test(padded, Device.cpu(), Compiler(), asked)


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"slowdown": 0.0}, {"slowdown": 2.0}], ids=str)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(wrong))):
        NullTestOptions(**wrong)


def test_a_failure_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedTimer, "fails", True)
    with pytest.raises(LaunchError, match="failed for this test"):
        report()


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.mark.usefixtures("own_folders")
class TestCommand:
    def test_it_prints_a_table(self) -> None:
        result = run("db", "null-test", "--pairs", "5", "--device", "cpu")
        assert "keeps its promises" in result.stdout
        assert "3 % slower, by one more launch" in result.stdout
        assert "scripted-1" in result.stdout

    def test_it_prints_json(self) -> None:
        printed = run_json("db", "null-test", *FORWARD, "--pairs", "5", "--slowdown", "10", "--device", "cpu")
        assert printed["ok"]
        assert printed["slowdown"] == 0.1
        assert printed["equal"]["called_different"] == 0
        assert printed["slowed"]["share"] == printed["scaled"]["share"] == 1
        assert printed["driver_line"].startswith("conv -n 1 -c 4 -H 6 -W 5")

    def test_it_ends_with_1_where_a_bound_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ScriptedTimer, "noise", 0.08)
        assert "does not keep" in run("db", "null-test", "--pairs", "5", "--device", "cpu", code=1).stdout

    def test_it_takes_one_direction(self) -> None:
        assert "add -F 1" in run("db", "null-test", *TINY, "-F", "0", "--device", "cpu", code=2).stderr


@pytest.mark.usefixtures("own_folders")
def test_it_runs_on_the_cpu_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Timer", Timer)
    result = run("db", "null-test", *FORWARD, "--pairs", "1", "--device", "cpu", "--json", code=None)
    assert result.exit_code in (0, 1), "a busy machine may fail the test"
    printed = json.loads(result.stdout)
    assert printed["protocol"] == "cpu-1"
    assert printed["equal"]["pairs"] == printed["slowed"]["pairs"] == 1
