"""Tuning: it leaves out what is known, records as it goes, survives failures and stops when told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miofind.candidate import Outcome
from miofind.errors import DatabaseError, LaunchError, MissingLibraryError
from miofind.evaluate import DeviceLostError
from miofind.finddb import Store
from miofind.handle import Handle
from miofind.options import FindOptions
from miofind.problem import ProblemDescription
from miofind.sandbox import InProcess
from miofind.suites import SuiteProblem
from miofind.tune import TuneEnd, TuneEvent, TuneFinished, TuneOptions, TuneStarted, TuneStatus, TuneSummary, tune

OPTIONS = TuneOptions(find=FindOptions(only=("ConvCpuDirect", "ConvCpuIm2colGemm"), time_budget_s=math.inf))
measuring = InProcess.run


def request(k: int) -> SuiteProblem:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(k, 4, 3, 3), padding=1)
    return SuiteProblem(problem=problem, suite="small", layer=f"layer{k}", count=1)


REQUESTS = [request(2), request(3), request(4)]


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with Handle("cpu", database=tmp_path / "finddb.db", strict=True) as made:
        yield made


def statuses(summary: TuneSummary) -> list[TuneStatus]:
    return [result.status for result in summary.results]


def fail_from(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor raise from its n-th job on."""
    jobs = 0

    def run(self: InProcess, job: Any) -> Iterator[Outcome]:
        nonlocal jobs
        jobs += 1
        outcomes = measuring(self, job)
        yield next(outcomes)
        if jobs >= number:
            raise error
        yield from outcomes

    monkeypatch.setattr(InProcess, "run", run)


def test_every_problem_is_measured_and_recorded(handle: Handle, tmp_path: Path) -> None:
    events: list[TuneEvent] = []
    summary = tune(REQUESTS, handle, OPTIONS, events.append)
    assert statuses(summary) == [TuneStatus.TUNED] * 3
    assert (summary.end, summary.left) == (TuneEnd.COMPLETE, 0)
    assert [type(event) for event in events] == [TuneStarted, TuneFinished] * 3
    assert [event.number for event in events] == [1, 1, 2, 2, 3, 3]
    for result in summary.results:
        assert {solution.solver_id for solution in result.solutions} == {"ConvCpuDirect", "ConvCpuIm2colGemm"}
    handle.close()
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert store.stats().problems == 3


def test_a_second_tuning_measures_nothing(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(REQUESTS, handle, OPTIONS)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    summary = tune(REQUESTS, handle, OPTIONS)
    assert statuses(summary) == [TuneStatus.KNOWN] * 3
    assert all(result.solutions for result in summary.results)


def test_force_measures_again(handle: Handle) -> None:
    tune(REQUESTS[:1], handle, OPTIONS)
    summary = tune(REQUESTS[:1], handle, replace(OPTIONS, force=True))
    assert statuses(summary) == [TuneStatus.TUNED]
    history = handle.database.user.history(handle.device.identity, REQUESTS[0].problem.network_config)
    assert history is not None
    assert len(history.scopes) == 2


def test_a_search_is_not_covered_by_defaults(handle: Handle) -> None:
    tune(REQUESTS[:1], handle, OPTIONS)
    search = TuneOptions(find=replace(OPTIONS.find, tuning=True))
    assert statuses(tune(REQUESTS[:1], handle, search)) == [TuneStatus.TUNED]
    assert statuses(tune(REQUESTS[:1], handle, search)) == [TuneStatus.KNOWN]
    assert statuses(tune(REQUESTS[:1], handle, OPTIONS)) == [TuneStatus.KNOWN]


def test_solvers_that_are_new_are_measured(handle: Handle) -> None:
    direct = TuneOptions(find=replace(OPTIONS.find, only=("ConvCpuDirect",)))
    tune(REQUESTS[:1], handle, direct)
    assert statuses(tune(REQUESTS[:1], handle, OPTIONS)) == [TuneStatus.TUNED]


def test_solvers_whose_sources_changed_are_measured(handle: Handle) -> None:
    tune(REQUESTS[:1], handle, OPTIONS)
    key = (handle.device.identity, REQUESTS[0].problem.network_config)
    history = handle.database.user.history(*key)
    assert history is not None
    row = next(row for row in history.rows if row.solver_id == "ConvCpuDirect")
    handle.database.record(*key, [replace(row, source_hash="0" * 64, created_at="", id="")])
    assert statuses(tune(REQUESTS[:1], handle, OPTIONS)) == [TuneStatus.TUNED]
    assert statuses(tune(REQUESTS[:1], handle, OPTIONS)) == [TuneStatus.KNOWN]


def test_a_problem_that_fails_stops_nothing(handle: Handle) -> None:
    unsolvable = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
    options = TuneOptions(find=replace(OPTIONS.find, only=("ConvCpuGemm1x1",)))
    solvable = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 1, 1))
    requests = [replace(REQUESTS[0], problem=problem) for problem in (unsolvable, solvable)]
    summary = tune(requests, handle, options)
    assert statuses(summary) == [TuneStatus.FAILED, TuneStatus.TUNED]
    assert "ConvCpuGemm1x1: serves unpadded filters of one tap" in summary.results[0].message
    assert statuses(tune(requests, handle, options)) == [TuneStatus.FAILED, TuneStatus.KNOWN]


@pytest.mark.parametrize("error", [LaunchError("the stream broke"), ZeroDivisionError("in a solver"), MemoryError()])
def test_whatever_one_problem_raises_is_in_its_result(
    handle: Handle, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(2, error, monkeypatch)
    summary = tune(REQUESTS, handle, OPTIONS)
    assert statuses(summary) == [TuneStatus.TUNED, TuneStatus.FAILED, TuneStatus.FAILED]
    assert summary.results[1].message in (str(error), "MemoryError")


@pytest.mark.parametrize("error", [DatabaseError("the disk is full"), MissingLibraryError("no NVRTC")])
def test_what_would_fail_every_problem_ends_it(
    handle: Handle, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(2, error, monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        tune(REQUESTS, handle, OPTIONS)
    assert handle.database.answer(handle.device.identity, REQUESTS[0].problem.network_config) is not None


def test_a_lost_device_ends_it_with_a_summary(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(2, DeviceLostError("the context is gone"), monkeypatch)
    summary = tune(REQUESTS, handle, OPTIONS)
    assert (summary.end, summary.left) == (TuneEnd.DEVICE_LOST, 2)
    assert statuses(summary) == [TuneStatus.TUNED]


def test_ctrl_c_keeps_what_is_done_and_the_next_tuning_goes_on(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(2, KeyboardInterrupt(), monkeypatch)
    summary = tune(REQUESTS, handle, OPTIONS)
    assert (summary.end, summary.left) == (TuneEnd.INTERRUPTED, 2)
    broken_off = handle.database.user.history(handle.device.identity, REQUESTS[1].problem.network_config)
    assert broken_off is not None
    assert (len(broken_off.rows), len(broken_off.scopes)) == (1, 0)
    monkeypatch.setattr(InProcess, "run", measuring)
    summary = tune(REQUESTS, handle, OPTIONS)
    assert statuses(summary) == [TuneStatus.KNOWN, TuneStatus.TUNED, TuneStatus.TUNED]


def test_no_problem_is_begun_after_the_time(handle: Handle) -> None:
    summary = tune(REQUESTS, handle, replace(OPTIONS, stop_after_s=0.0))
    assert (summary.end, summary.left) == (TuneEnd.OUT_OF_TIME, 3)


def test_a_database_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 1000)
    with Handle("cpu", database=damaged, strict=True) as handle, pytest.raises(DatabaseError, match=r"damaged\.db"):
        tune(REQUESTS, handle, OPTIONS)
