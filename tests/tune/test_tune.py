"""Tuning: it leaves out what is known, records as it goes, survives failures and stops when told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.device.environment import versions
from miofind.errors import DatabaseError, InvalidOptionError, LaunchError, MissingLibraryError
from miofind.evaluate.evaluate import DeviceLostError
from miofind.evaluate.executors import InProcess
from miofind.finddb import Answer, Row, Store
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.candidate import Outcome
from miofind.suites import SuiteProblem
from miofind.tune.service import (
    TuneBegan,
    TuneEnd,
    TuneEvent,
    TuneFinished,
    TuneLost,
    TuneOptions,
    TuneResult,
    TuneStarted,
    TuneStatus,
    TuneSummary,
    mean_gain,
    tune,
)

OPTIONS = TuneOptions(find=FindOptions(only=("ConvCpuDirect", "ConvCpuIm2colGemm"), time_budget_s=math.inf))
measuring = InProcess.run


def request(k: int, count: int = 1) -> SuiteProblem:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(k, 4, 3, 3), padding=1)
    return SuiteProblem(problem=problem, suite="small", layer=f"layer{k}", count=count)


REQUESTS = [request(4), request(3), request(2)]
"""In the order they are tuned: the heaviest first."""


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
    summary = tune(REQUESTS, [handle], OPTIONS, events.append)
    assert statuses(summary) == [TuneStatus.TUNED] * 3
    assert (summary.end, summary.left) == (TuneEnd.COMPLETE, 0)
    began, *others = events
    assert isinstance(began, TuneBegan)
    assert (began.devices, len(began.tasks)) == ((handle.device,), 3)
    assert [type(event) for event in others] == [TuneStarted, TuneFinished] * 3
    assert [event.number for event in others if not isinstance(event, (TuneBegan, TuneLost))] == [1, 1, 2, 2, 3, 3]
    for result in summary.results:
        assert {solution.solver_id for solution in result.solutions} == {"ConvCpuDirect", "ConvCpuIm2colGemm"}
    handle.close()
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert store.stats().problems == 3


def test_a_second_tuning_measures_nothing(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(REQUESTS, [handle], OPTIONS)
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    summary = tune(REQUESTS, [handle], OPTIONS)
    assert statuses(summary) == [TuneStatus.KNOWN] * 3
    assert all(result.solutions for result in summary.results)


def test_force_measures_again(handle: Handle) -> None:
    tune(REQUESTS[:1], [handle], OPTIONS)
    summary = tune(REQUESTS[:1], [handle], replace(OPTIONS, force=True))
    assert statuses(summary) == [TuneStatus.TUNED]
    history = handle.database.user.history(handle.device.identity, REQUESTS[0].problem.network_config)
    assert history is not None
    assert len(history.scopes) == 2


@pytest.mark.parametrize("force", [False, True])
def test_measuring_gets_the_pool_and_goes_on_where_it_was_unless_forced(
    force: bool, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def measure(*_: object, **arguments: Any) -> list[Solution]:
        told.append({name: value for name, value in arguments.items() if name != "at_rest"})
        raise LaunchError("nothing is measured here")

    monkeypatch.setattr("miofind.tune.worker.measure", measure)
    with CompilePool(workers=1) as pool:
        tune(REQUESTS[:1], [handle], replace(OPTIONS, force=force), pool=pool)
    assert told == [{"also": (), "ahead": pool, "afresh": force, "stored": False, "likeliest": None}]


def test_a_search_is_not_covered_by_defaults(handle: Handle) -> None:
    tune(REQUESTS[:1], [handle], OPTIONS)
    search = TuneOptions(find=replace(OPTIONS.find, tuning=True))
    assert statuses(tune(REQUESTS[:1], [handle], search)) == [TuneStatus.TUNED]
    assert statuses(tune(REQUESTS[:1], [handle], search)) == [TuneStatus.KNOWN]
    assert statuses(tune(REQUESTS[:1], [handle], OPTIONS)) == [TuneStatus.KNOWN]


def test_solvers_that_are_new_are_measured(handle: Handle) -> None:
    direct = TuneOptions(find=replace(OPTIONS.find, only=("ConvCpuDirect",)))
    tune(REQUESTS[:1], [handle], direct)
    assert statuses(tune(REQUESTS[:1], [handle], OPTIONS)) == [TuneStatus.TUNED]


def test_solvers_whose_sources_changed_are_measured(handle: Handle) -> None:
    tune(REQUESTS[:1], [handle], OPTIONS)
    key = (handle.device.identity, REQUESTS[0].problem.network_config)
    history = handle.database.user.history(*key)
    assert history is not None
    (row,) = (row for row in history.rows if row.solver_id == "ConvCpuDirect")
    others = {"source_hash": "0" * 64, "created_at": "", "id": ""}
    handle.database.record(*key, [replace(row, **others)])
    assert statuses(tune(REQUESTS[:1], [handle], OPTIONS)) == [TuneStatus.KNOWN], "it was measured as it is now, too"
    handle.database.clean(*key)
    rows = [replace(each, **others) if each == row else replace(each, id="") for each in history.rows]
    handle.database.user.add([replace(history, rows=tuple(replace(each, created_at=row.created_at) for each in rows))])
    assert statuses(tune(REQUESTS[:1], [handle], OPTIONS)) == [TuneStatus.TUNED]
    assert statuses(tune(REQUESTS[:1], [handle], OPTIONS)) == [TuneStatus.KNOWN]


def test_a_problem_that_fails_stops_nothing(handle: Handle) -> None:
    unsolvable = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
    options = TuneOptions(find=replace(OPTIONS.find, only=("ConvCpuGemm1x1",)))
    solvable = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 1, 1))
    requests = [replace(REQUESTS[0], problem=problem) for problem in (unsolvable, solvable)]
    summary = tune(requests, [handle], options)
    assert statuses(summary) == [TuneStatus.FAILED, TuneStatus.TUNED], "in the order of the requests"
    assert "ConvCpuGemm1x1: serves unpadded filters of one tap" in summary.results[0].message
    assert statuses(tune(requests, [handle], options)) == [TuneStatus.FAILED, TuneStatus.KNOWN]


@pytest.mark.parametrize("error", [LaunchError("the stream broke"), ZeroDivisionError("in a solver"), MemoryError()])
def test_whatever_one_problem_raises_is_in_its_result(
    handle: Handle, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(2, error, monkeypatch)
    summary = tune(REQUESTS, [handle], OPTIONS)
    assert statuses(summary) == [TuneStatus.TUNED, TuneStatus.FAILED, TuneStatus.FAILED]
    assert summary.results[1].message in (str(error), "MemoryError")


@pytest.mark.parametrize("error", [DatabaseError("the disk is full"), MissingLibraryError("no NVRTC")])
def test_what_would_fail_every_problem_ends_it(
    handle: Handle, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(2, error, monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        tune(REQUESTS, [handle], OPTIONS)
    assert handle.database.answer(handle.device.identity, REQUESTS[0].problem.network_config) is not None


def test_a_lost_device_ends_it_with_a_summary(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(2, DeviceLostError("the context is gone"), monkeypatch)
    summary = tune(REQUESTS, [handle], OPTIONS)
    assert (summary.end, summary.left) == (TuneEnd.DEVICE_LOST, 2)
    assert statuses(summary) == [TuneStatus.TUNED]


def test_ctrl_c_keeps_what_is_done_and_the_next_tuning_goes_on(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(2, KeyboardInterrupt(), monkeypatch)
    summary = tune(REQUESTS, [handle], OPTIONS)
    assert (summary.end, summary.left) == (TuneEnd.INTERRUPTED, 2)
    broken_off = handle.database.user.history(handle.device.identity, REQUESTS[1].problem.network_config)
    assert broken_off is not None
    assert (len(broken_off.rows), len(broken_off.scopes)) == (1, 0)
    monkeypatch.setattr(InProcess, "run", measuring)
    summary = tune(REQUESTS, [handle], OPTIONS)
    assert statuses(summary) == [TuneStatus.KNOWN, TuneStatus.TUNED, TuneStatus.TUNED]


def test_no_problem_is_begun_after_the_time(handle: Handle) -> None:
    summary = tune(REQUESTS, [handle], replace(OPTIONS, stop_after_s=0.0))
    assert (summary.end, summary.left) == (TuneEnd.OUT_OF_TIME, 3)


def test_a_database_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("something was measured"))
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 1000)
    with Handle("cpu", database=damaged, strict=True) as handle, pytest.raises(DatabaseError, match=r"damaged\.db"):
        tune(REQUESTS, [handle], OPTIONS)


def test_heavy_and_frequent_problems_come_first(handle: Handle) -> None:
    events: list[TuneEvent] = []
    requests = [request(2), request(3, count=1000), request(4)]
    summary = tune(requests, [handle], OPTIONS, events.append)
    begun = [event.request.layer for event in events if isinstance(event, TuneStarted)]
    assert begun == ["layer3", "layer4", "layer2"]
    assert [result.request for result in summary.results] == requests


def test_gain_is_over_the_first_default_and_weighed_by_count(handle: Handle) -> None:
    (result,) = tune(REQUESTS[:1], [handle], OPTIONS).results
    best = result.solutions[0]
    assert result.default_ms is not None
    assert result.gain == pytest.approx(result.default_ms / best.time_ms)
    often = replace(result, request=request(4, count=3), default_ms=2 * best.time_ms)
    once = replace(result, request=request(3, count=1), default_ms=16 * best.time_ms)
    known = replace(once, status=TuneStatus.KNOWN)
    failed = TuneResult(request=request(2), kind=result.kind, status=TuneStatus.FAILED, message="no")
    assert mean_gain([often, once, known, failed]) == pytest.approx((2**3 * 16) ** (1 / 4))
    assert mean_gain([known, failed]) is None


def test_a_recheck_measures_what_is_queued_with_all_that_answers_now(handle: Handle) -> None:
    search = TuneOptions(find=replace(OPTIONS.find, only=("ConvCpuIm2colGemm",), tuning=True))
    tune(REQUESTS[:2], [handle], search)
    device, config = handle.device.identity, REQUESTS[0].problem.network_config
    answered = {row.config for row in _answer(handle, config).rows}
    handle.database.queue_recheck(device, config, "measured with other versions")
    recheck = replace(search, find=replace(search.find, tuning=False), recheck=True)
    before = _row_count(handle, config)
    summary = tune(REQUESTS, [handle], recheck)
    assert [(result.request, result.status) for result in summary.results] == [(REQUESTS[0], TuneStatus.TUNED)]
    measured_again = {row.config for row in _rows(handle, config)[before:]}
    assert measured_again >= answered
    assert _row_count(handle, REQUESTS[1].problem.network_config) > 0


def _answer(handle: Handle, network_config: str) -> Answer:
    answer = handle.database.answer(handle.device.identity, network_config)
    assert answer is not None
    return answer


def _rows(handle: Handle, network_config: str) -> list[Row]:
    history = handle.database.user.history(handle.device.identity, network_config)
    assert history is not None
    return sorted(history.rows, key=lambda row: row.created_at)


def _row_count(handle: Handle, network_config: str) -> int:
    return len(_rows(handle, network_config))


def test_stored_configurations_are_measured_again_and_no_others(handle: Handle, tmp_path: Path) -> None:
    """After a solver's code changed, a tuning brings up to date what the FindDB held, and the next one does nothing."""
    tune(REQUESTS[:1], [handle], OPTIONS)
    device, config = handle.device.identity, REQUESTS[0].problem.network_config
    before = [replace(row, created_at="", id="") for row in _answer(handle, config).rows]
    earlier = [replace(row, source_hash="ab") if row.solver_id == "ConvCpuDirect" else row for row in before]
    options = TuneOptions(stored=True)
    with Handle("cpu", database=tmp_path / "earlier.db", strict=True) as upgraded:
        upgraded.database.record(device, config, earlier, environment=versions(handle.device))
        assert statuses(tune(REQUESTS[:1], [upgraded], options)) == [TuneStatus.TUNED]
        again = _rows(upgraded, config)[len(earlier) :]
        assert {row.candidate: row.source_hash for row in again} == {row.candidate: row.source_hash for row in before}
        history = upgraded.database.user.history(device, config)
        assert history is not None
        assert history.scopes == (), "no solver was asked for all that it has"
        assert statuses(tune(REQUESTS[:1], [upgraded], options)) == [TuneStatus.KNOWN]


def test_stored_last_resorts_are_measured_again_once(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem that only a last resort solves is known after one tuning, like any other."""
    tune(REQUESTS[:1], [handle], OPTIONS)
    device, config = handle.device.identity, REQUESTS[0].problem.network_config
    rows = [row for row in _answer(handle, config).rows if row.solver_id == "ConvCpuDirect"]
    monkeypatch.setattr(type(handle.registry["ConvCpuDirect"]), "is_last_resort", True)
    with Handle("cpu", database=tmp_path / "earlier.db", strict=True) as upgraded:
        earlier = [replace(row, source_hash="ab", created_at="", id="") for row in rows]
        upgraded.database.record(device, config, earlier, environment=versions(handle.device))
        told = [statuses(tune(REQUESTS[:1], [upgraded], TuneOptions(stored=True))) for _ in range(2)]
    assert told == [[TuneStatus.TUNED], [TuneStatus.KNOWN]]


def test_what_is_stored_for_requests_with_a_wide_error_bound_is_measured_again_too() -> None:
    assert TuneOptions(stored=True).find.max_error == math.inf
    assert TuneOptions(stored=True, find=FindOptions(max_error=1e-5)).find.max_error == 1e-5
    assert TuneOptions().find.max_error is None


def test_what_is_not_stored_is_not_measured(handle: Handle) -> None:
    (result,) = tune(REQUESTS[:1], [handle], TuneOptions(stored=True)).results
    assert result.status is TuneStatus.FAILED
    assert "the FindDB holds nothing to measure again" in result.message


@pytest.mark.parametrize("other", [{"recheck": True}, {"find": FindOptions(tuning=True)}], ids=["recheck", "search"])
def test_stored_is_not_asked_for_with_what_measures_more(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="stored measures no other configurations"):
        TuneOptions(stored=True, **other)


def test_stale_rows_are_measured_once_more_and_then_hold(handle: Handle) -> None:
    tune(REQUESTS[:2], [handle], OPTIONS)
    device, config = handle.device.identity, REQUESTS[0].problem.network_config
    stale = [replace(row, environment="", created_at="", id="") for row in _rows(handle, config)]
    handle.database.record(device, config, stale, environment={"driver": "an older one"})
    assert statuses(tune(REQUESTS[:2], [handle], OPTIONS)) == [TuneStatus.KNOWN] * 2, "stale rows are usable"
    recheck = TuneOptions(find=FindOptions(time_budget_s=math.inf), recheck=True)  # a filtered one settles no notes
    assert [result.request for result in tune(REQUESTS, [handle], recheck).results] == REQUESTS[:1]
    assert tune(REQUESTS, [handle], recheck).total == 0


def test_what_failed_is_tried_again_where_that_is_asked_for(handle: Handle) -> None:
    tune(REQUESTS[:1], [handle], OPTIONS)
    config = REQUESTS[0].problem.network_config
    row = replace(_rows(handle, config)[0], created_at="", id="", status="crashed", time_ms=None)
    handle.database.record(handle.device.identity, config, [row])
    again = replace(OPTIONS, find=replace(OPTIONS.find, retry_failed=True))
    assert statuses(tune(REQUESTS[:1], [handle], OPTIONS)) == [TuneStatus.KNOWN]
    assert statuses(tune(REQUESTS[:1], [handle], again)) == [TuneStatus.TUNED]
