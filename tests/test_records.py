"""What of a find goes into the FindDB, and which candidates that keeps out of later ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from miofind.candidate import Candidate, Outcome, Status, Timing
from miofind.find import records
from miofind.find.plan import make_plan
from miofind.finddb import History, Row
from miofind.handle import Handle
from miofind.measure.verdict import Comparison, Verdict
from miofind.options import FindOptions
from miofind.problem import ProblemDescription

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(3, 4, 1, 1))
OPTIONS = FindOptions()
TIMING = Timing(time_ms=1.0, min_ms=0.9, p20_ms=0.95, p80_ms=1.1, samples=45, protocol="cpu-1")
FAILED = [status for status in Status if not status.usable]


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with Handle("cpu", database=tmp_path / "finddb.db", strict=True) as made:
        yield made


def candidates(handle: Handle) -> list[Candidate]:
    return [planned.candidate for planned in make_plan(PROBLEM, handle.device, OPTIONS).candidates]


def outcome(candidate: Candidate, status: Status = Status.OK) -> Outcome:
    return Outcome(candidate=candidate, status=status, timing=TIMING if status.usable else None, message=status.value)


def record(
    handle: Handle, *outcomes: Outcome, verdict: Verdict | None = None, error: BaseException | None = None
) -> None:
    plan = make_plan(PROBLEM, handle.device, OPTIONS)
    with records.Recording(PROBLEM, OPTIONS, handle, plan) as recording:
        for each in outcomes:
            recording.add(each)
        if verdict is not None:
            recording.add_verdict(verdict)
        if error is not None:
            raise error


def history(handle: Handle) -> History:
    found = handle.database.user.history(handle.device.identity, PROBLEM.network_config)
    assert found is not None
    return found


@pytest.mark.parametrize("status", FAILED, ids=str)
def test_failures_are_quarantined_but_for_memory(handle: Handle, status: Status) -> None:
    first, second, *_ = candidates(handle)
    record(handle, outcome(first, status), outcome(second))
    expected = set() if status is Status.OUT_OF_MEMORY else {first.id}
    assert records.quarantined(PROBLEM, handle) == expected
    assert records.failures(PROBLEM, handle) == {first.id: status}


def test_a_later_success_lifts_a_quarantine(handle: Handle) -> None:
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.CRASHED))
    record(handle, outcome(first))
    assert records.quarantined(PROBLEM, handle) == frozenset()


def test_running_out_of_memory_lifts_no_quarantine(handle: Handle) -> None:
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.CRASHED))
    record(handle, outcome(first, Status.OUT_OF_MEMORY))
    assert records.quarantined(PROBLEM, handle) == {first.id}


def test_a_quarantine_is_of_one_solver_version_device_and_problem(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.WRONG_RESULT))
    other = ProblemDescription.convolution(x=(2, 4, 6, 5), w=(3, 4, 1, 1))
    assert records.quarantined(other, handle) == frozenset()
    device = handle.device
    handle.device = replace(device, sm_count=device.sm_count + 1)
    assert records.quarantined(PROBLEM, handle) == frozenset()
    handle.device = device
    rows = [replace(row, solver_version=row.solver_version + 1, id="") for row in history(handle).rows]
    assert records.quarantined(PROBLEM, handle) == {first.id}
    assert not any(records.is_valid(row, device) for row in rows)


def test_disturbances_are_recorded(handle: Handle) -> None:
    first, second, *_ = candidates(handle)
    disturbed = replace(outcome(first), contended=True, dropped_samples=7)
    record(handle, disturbed, outcome(second))
    rows: dict[str, Row] = {f"{row.solver_id}:{row.config}": row for row in history(handle).rows}
    assert (rows[first.id].contended, rows[first.id].dropped_samples) == (True, 7)
    assert (rows[second.id].contended, rows[second.id].dropped_samples) == (False, 0)


def test_the_verdict_is_recorded(handle: Handle) -> None:
    first, second, *_ = candidates(handle)
    verdict = Verdict(
        winner=first.id,
        ties=(first.id,),
        comparisons=(Comparison(candidate=second.id, low=1.02, high=1.05),),
        blocks=45,
        protocol="cpu-1",
    )
    record(handle, outcome(first), outcome(second), verdict=verdict)
    (stored,) = history(handle).verdicts
    assert (stored.winner, stored.ties, stored.blocks, stored.protocol) == (first.id, (first.id,), 45, "cpu-1")
    assert [(c.candidate, c.low, c.high) for c in stored.comparisons] == [(second.id, 1.02, 1.05)]
    assert stored.environment


def test_a_verdict_outlives_a_find_that_is_broken_off(handle: Handle) -> None:
    first, *_ = candidates(handle)
    verdict = Verdict(winner=first.id, ties=(first.id,), comparisons=(), blocks=45, protocol="cpu-1")
    with pytest.raises(KeyboardInterrupt):
        record(handle, outcome(first), verdict=verdict, error=KeyboardInterrupt())
    assert len(history(handle).verdicts) == len(history(handle).rows) == 1
    assert history(handle).scopes == ()


def test_a_find_is_complete_when_all_that_was_planned_was_tried(handle: Handle) -> None:
    planned = candidates(handle)
    record(handle, *[outcome(planned[0])] * len(planned))
    assert [scope.complete for scope in history(handle).scopes] == [False]
    record(handle, *map(outcome, planned))
    assert sorted(scope.complete for scope in history(handle).scopes) == [False, True]
