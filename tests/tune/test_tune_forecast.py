"""What a tuning would do: counts that hold, times that grow with the work, and no measuring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders

from miofind.compiler import processors
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.evaluate.executors import InProcess
from miofind.find.plan import make_plan
from miofind.find.recording import Recording
from miofind.finddb import Store
from miofind.measure.effort import Effort
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Outcome, Status
from miofind.solver.registry import Registry
from miofind.suites import SuiteProblem
from miofind.tune.cost import CANDIDATE_S, PROBLEM_S, lightest, measuring_seconds, rough_seconds
from miofind.tune.forecast import COMPILE_S, forecast
from miofind.tune.service import TuneOptions, tune

OPTIONS = TuneOptions(find=FindOptions(time_budget_s=math.inf))


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[Handle]:
    with Handle("cpu", database=tmp_path / "finddb.db", strict=True) as made:
        yield made


def request(k: int, *, filter_size: int = 3, dtype: str = "float32") -> SuiteProblem:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(k, 4, filter_size, filter_size), dtype=dtype)
    return SuiteProblem(problem=problem, suite="small", layer=f"layer{k}", count=1)


def test_counts_are_those_of_the_plans_and_nothing_is_measured(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    requests = [request(2), request(3, filter_size=1)]
    planned = [p for r in requests for p in make_plan(r.problem, OPTIONS.find, handle).candidates]
    found = forecast(requests, [handle], OPTIONS)
    assert (found.problems, found.known, found.unsolvable) == (2, 0, 0)
    assert found.configurations == len(planned)
    assert set(found.solvers) == {p.solver.id for p in planned}
    assert (found.compiles, found.compiled) == (0, 0), "the CPU place compiles nothing"
    assert (found.calibration, found.calibrated_by) == (1.0, 0)
    assert found.measuring_seconds > 2 * PROBLEM_S


def test_what_is_known_is_left_out_and_corrects_the_rest(handle: Handle) -> None:
    requests = [request(2), request(3)]
    (result,) = tune(requests[:1], [handle], OPTIONS).results
    found = forecast(requests, [handle], OPTIONS)
    best = result.solutions[0]
    estimate_ms = Registry.default().named(best.solver_id).estimate_ms(best.problem, handle.device, best.config)
    assert (found.known, found.calibrated_by) == (1, 1)
    assert found.calibration == pytest.approx(best.time_ms / estimate_ms)
    assert forecast(requests, [handle], replace(OPTIONS, force=True)).known == 0
    assert forecast(requests[:1], [handle], OPTIONS).measuring_seconds == 0


def test_an_estimate_that_fails_corrects_nothing(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign solver's code may raise anything, and ended the dry run."""
    requests = [request(2)]
    (result,) = tune(requests, [handle], OPTIONS).results

    def broken(*_: object) -> float:
        raise ZeroDivisionError("broken for this test")

    monkeypatch.setattr(type(Registry.default().named(result.solutions[0].solver_id)), "estimate_ms", broken)
    found = forecast(requests, [handle], OPTIONS)
    assert (found.known, found.calibrated_by) == (1, 0)


def test_what_failed_before_is_left_out_unless_it_is_tried_again(handle: Handle) -> None:
    requests = [request(2)]
    failed, *others = make_plan(requests[0].problem, OPTIONS.find, handle).candidates
    with Recording(
        requests[0].problem, OPTIONS.find, handle, make_plan(requests[0].problem, OPTIONS.find, handle)
    ) as recording:
        recording.add(Outcome(candidate=failed.candidate, status=Status.CRASHED))
    assert forecast(requests, [handle], OPTIONS).configurations == len(others)
    again = replace(OPTIONS, find=replace(OPTIONS.find, retry_failed=True))
    assert forecast(requests, [handle], again).configurations == len(others) + 1


def test_a_problem_that_nobody_serves(handle: Handle) -> None:
    only = replace(OPTIONS, find=replace(OPTIONS.find, only=("ConvCpuGemm1x1",)))
    found = forecast([request(2)], [handle], only)
    assert (found.unsolvable, found.configurations, found.measuring_seconds) == (1, 0, 0)


def test_compiles_are_distinct_binaries_and_those_in_the_cache_are_told() -> None:
    with Handle(Device.virtual("90a"), database=":memory:") as handle:
        only = replace(OPTIONS, find=replace(OPTIONS.find, only=("ConvDirectTiled",)))
        requests = [request(8, dtype="float16"), request(16, dtype="float16")]
        found = forecast(requests, [handle], only)
        assert found.configurations >= found.compiles > 0
        assert found.compiled == 0
        assert found.compiling_seconds == pytest.approx(COMPILE_S * found.compiles / max(1, processors() - 1))
        plan = make_plan(requests[0].problem, only.find, handle)
        first = plan.candidates[0]
        step = first.solver.solution(requests[0].problem, handle.device, first.candidate.config).kernels[0]
        handle.compiler.build(step, handle.device.arch)
        later = forecast(requests, [handle], only)
        assert later.compiled == 1
        assert later.compiling_seconds < found.compiling_seconds


def test_seconds_grow_with_candidates_times_and_effort() -> None:
    assert measuring_seconds([], Effort.FIND) == 0
    one = measuring_seconds([0.01], Effort.FIND)
    assert one > PROBLEM_S + CANDIDATE_S
    assert measuring_seconds([0.01] * 10, Effort.FIND) > one + 9 * CANDIDATE_S
    assert measuring_seconds([50.0], Effort.FIND) > one
    assert measuring_seconds([0.01] * 10, Effort.TUNE) > measuring_seconds([0.01] * 10, Effort.FIND)


def test_what_is_far_behind_is_not_raced() -> None:
    raced = measuring_seconds([100.0, 100.0], Effort.TUNE) - measuring_seconds([100.0], Effort.TUNE)
    behind = measuring_seconds([1.0, 100.0], Effort.TUNE) - measuring_seconds([1.0], Effort.TUNE)
    assert behind < raced - 0.5, "not even the screen's samples of 100 ms"


@pytest.mark.parametrize("device", [Device.cpu(), Device.virtual("90a")], ids=["cpu", "90a"])
def test_rough_seconds_put_the_longer_problem_first(device: Device) -> None:
    small = ProblemDescription.convolution(x=(1, 64, 14, 14), w=(64, 64, 3, 3))
    large = ProblemDescription.convolution(x=(64, 64, 112, 112), w=(64, 64, 3, 3))
    assert 0 < rough_seconds(small, device, Effort.FIND) < rough_seconds(large, device, Effort.FIND)


def test_the_lightest_problems_take_little_of_a_networks_time() -> None:
    device = Device.virtual("90a")
    network = [sized(size, count=count) for size, count in ((112, 1), (56, 1), (28, 1), (14, 1), (14, 1000))]
    in_order = [each.problem for each in reversed(network[:4])]
    assert lightest([], device, 1.0) == frozenset()
    assert lightest(network[:4], device, 0.0) == frozenset()
    assert lightest(network[:4], device, 1.0) == frozenset(in_order)
    found = [lightest(network[:4], device, share / 100) for share in range(101)]
    assert all(some == frozenset(in_order[: len(some)]) for some in found), "the least first"
    assert {len(some) for some in found} == {0, 1, 2, 3, 4}
    assert in_order[0] not in lightest(network[1:], device, 0.5), "so many calls of it are not light"


def sized(size: int, *, count: int) -> SuiteProblem:
    problem = ProblemDescription.convolution(x=(32, 64, size, size), w=(64, 64, 3, 3), padding=1, dtype="float16")
    return SuiteProblem(problem=problem, suite="network", layer="layer", count=count)


def test_the_command_prints_a_row_and_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    result = run("tune", *FORWARD, "--device", "cpu", "--in-process", "--dry-run")
    header, _, cells = result.stdout.splitlines()[:3]
    assert header.split()[:3] == ["device", "problems", "known"]
    assert cells.endswith(" s")
    assert " s on the CPU; by the solvers' estimates alone, since nothing is known here yet" in result.stdout
    assert "GPU" not in result.stdout
    with Store(tmp_path / "finddb.db") as store:
        assert store.stats().rows == 0


def test_the_command_describes_gpus_that_are_not_here() -> None:
    asked = ("tune", "--suite", "resnet50", "--limit", "2", "--dtype", "float16", "--dry-run")
    printed = run_json(*asked, "--arch", "80", "--arch", "90a")
    assert [forecast["device"] for forecast in printed["forecasts"]] == ["sm_80|82|8.0|", "sm_90|132|9.0|"]
    for found in printed["forecasts"]:
        assert (found["problems"], found["known"], found["devices"]) == (2, 0, 1)
        assert found["configurations"] > 0
        assert found["compiles"] > 0
        assert found["measuring_minutes"] == found["measuring_minutes_each"] > 0
        assert found["compiling_minutes"] > 0
    text = run(*asked, "--arch", "90a").stdout
    assert " of GPU time, and " in text
    assert f" beside it for {found['compiles']} kernels that this host compiles" in text


def test_the_command_says_when_nothing_is_left() -> None:
    here = ("--device", "cpu", "--in-process")
    run("tune", *FORWARD, *here)
    assert "nothing to measure" in run("tune", *FORWARD, *here, "--dry-run").stdout
