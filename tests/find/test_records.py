"""What of a find goes into the FindDB, and which candidates that keeps out of later ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miofind import find_solutions
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import NoSolutionError
from miofind.find import recording as recording_module
from miofind.find.immediate.answer import predicted
from miofind.find.lookup import failures, known, records, scopes, stored, validity
from miofind.find.lookup.scopes import Coverage
from miofind.find.measuring import measure
from miofind.find.plan import make_plan
from miofind.find.recording import Recording
from miofind.finddb import RIVAL, History, Row, Store
from miofind.measure.verdict import PairedComparison, RaceVerdict
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Candidate, Outcome, Status, Timing
from miofind.solver.registry import Registry
from miofind.solver.steps import Region, WorkspacePlan

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
    return [planned.candidate for planned in make_plan(PROBLEM, OPTIONS, handle).candidates]


def outcome(candidate: Candidate, status: Status = Status.OK) -> Outcome:
    solver, device = Registry.default().named(candidate.solver_id), Device.cpu()
    return Outcome(
        candidate=candidate,
        status=status,
        timing=TIMING if status.usable else None,
        message=status.value,
        workspace_bytes=solver.solution(PROBLEM, device, candidate.config).workspace.bytes if status.usable else 0,
    )


def record(
    handle: Handle, *outcomes: Outcome, verdict: RaceVerdict | None = None, error: BaseException | None = None
) -> None:
    plan = make_plan(PROBLEM, OPTIONS, handle)
    with Recording(PROBLEM, OPTIONS, handle, plan) as recording:
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
    assert failures.quarantined(PROBLEM, handle) == expected
    assert failures.failures(PROBLEM, handle) == {first.id: status}


def test_a_later_success_lifts_a_quarantine(handle: Handle) -> None:
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.CRASHED))
    record(handle, outcome(first))
    assert failures.quarantined(PROBLEM, handle) == frozenset()


def test_a_rival_under_a_solver_s_name_is_no_outcome_of_it(handle: Handle) -> None:
    """Whoever wrote it: no find writes such a row."""
    first, second, *_ = candidates(handle)
    record(handle, outcome(first), outcome(second))
    rows = [replace(row, status=RIVAL, created_at="", id="") for row in history(handle).rows]
    handle.database.record(handle.device.identity, PROBLEM.network_config, rows)
    assert failures.failures(PROBLEM, handle) == {}
    assert failures.newest_statuses(PROBLEM, handle, ignored=frozenset()) == dict.fromkeys(
        (first.id, second.id), Status.OK
    )
    assert failures.quarantined(PROBLEM, handle) == frozenset()


def test_a_solver_that_failed_with_other_sources_was_not_considered(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failures were void, and yet no find tried it again after its kernels were mended."""
    sources = "ab"
    broken = candidates(handle)[-1].solver_id
    for module in (recording_module, scopes, validity):
        monkeypatch.setattr(module, "solver_hash", lambda solver, fused=False: sources if solver.id == broken else "")
    validity.is_current.cache_clear()
    outcomes = [
        outcome(each, Status.WRONG_RESULT if each.solver_id == broken else Status.OK) for each in candidates(handle)
    ]
    record(handle, *outcomes)
    assert records.look_up(PROBLEM, OPTIONS, handle, coverage=Coverage.ALL), "it failed with the sources that it has"
    sources = "cd"
    validity.is_current.cache_clear()
    assert records.look_up(PROBLEM, OPTIONS, handle, coverage=Coverage.ALL) is None
    assert records.look_up(PROBLEM, OPTIONS, handle)
    assert [note.reason for note in handle.database.rechecks()] == [f"not measured yet: {broken}"]
    record(handle, *map(outcome, candidates(handle)))
    assert records.look_up(PROBLEM, OPTIONS, handle, coverage=Coverage.ALL)


def test_running_out_of_memory_lifts_no_quarantine(handle: Handle) -> None:
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.CRASHED))
    record(handle, outcome(first, Status.OUT_OF_MEMORY))
    assert failures.quarantined(PROBLEM, handle) == {first.id}
    assert [each.status for each in failures.failed_outcomes(PROBLEM, OPTIONS, handle)] == [Status.CRASHED]


def test_a_failed_row_whose_configuration_is_damaged_is_passed_over(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended a whole tuning."""
    (first, second, *_) = candidates(handle)
    record(handle, outcome(first, Status.WRONG_RESULT), outcome(second, Status.CRASHED))
    rows = failures.failed_rows(PROBLEM, handle)
    damaged = rows | {first.id: replace(rows[first.id], config="x")}
    monkeypatch.setattr(failures, "failed_rows", lambda *_: damaged)
    monkeypatch.setattr(failures, "quarantined_rows", lambda *_: {})
    assert [each.candidate for each in failures.failed_outcomes(PROBLEM, OPTIONS, handle)] == [second]


def test_what_failed_here_alone_is_left_out_of_a_find(handle: Handle) -> None:
    """It passed with another driver since: a find that was to say why it is left out ended with a KeyError."""
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.LAUNCH_FAILED))
    row = recording_module.row_of(outcome(first), handle.registry)
    handle.database.record(handle.device.identity, PROBLEM.network_config, [row], environment={"driver": "another"})
    assert failures.failures(PROBLEM, handle) == {}
    assert failures.quarantined(PROBLEM, handle) == {first.id}
    with pytest.raises(NoSolutionError, match=r"failed here before \(launch_failed: launch_failed\)"):
        measure(PROBLEM, replace(OPTIONS, only=(first.solver_id,), exclude=()), handle, stored=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": Status.OUT_OF_MEMORY, "timing": None}, "a candidate ran out of memory"),
        ({"contended": True}, "measured while another process used the device"),
    ],
    ids=["memory", "company"],
)
def test_what_speaks_of_the_moment_is_noted_for_a_re_check(handle: Handle, change: dict[str, Any], reason: str) -> None:
    first, second, *_ = candidates(handle)
    identity = handle.device.identity
    record(handle, replace(outcome(first), **change), outcome(second))
    (note,) = handle.database.rechecks(identity)
    assert (note.network_config, note.reason) == (PROBLEM.network_config, reason)
    record(handle, *map(outcome, candidates(handle)))
    assert not handle.database.rechecks(identity)


def test_who_ran_out_of_memory_in_a_re_check_too_is_not_noted_again(handle: Handle) -> None:
    first, *others = candidates(handle)
    for notes in (1, 0):
        record(handle, outcome(first, Status.OUT_OF_MEMORY), *map(outcome, others))
        assert len(handle.database.rechecks(handle.device.identity)) == notes


def test_a_search_writes_each_second(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, *_ = candidates(handle)
    time_s = 10.0
    monkeypatch.setattr(recording_module.time, "monotonic", lambda: time_s)
    plan = make_plan(PROBLEM, OPTIONS, handle)
    plan = replace(plan, spaces=(None,))  # type: ignore[arg-type]  # a search's
    recording = Recording(PROBLEM, OPTIONS, handle, plan)
    recording.add(outcome(first))
    assert handle.database.user.history(handle.device.identity, PROBLEM.network_config) is None
    time_s = 11.0
    recording.add(outcome(second))
    assert len(history(handle).rows) == 2
    recording.add(outcome(third))
    assert len(history(handle).rows) == 2
    recording.__exit__(KeyboardInterrupt, None, None)
    assert len(history(handle).rows) == 3


def test_what_is_kept_of_a_time_are_six_digits(handle: Handle) -> None:
    first, *_ = candidates(handle)
    timing = replace(TIMING, time_ms=0.013592000119388103, min_ms=1234567.8, p20_ms=2e-9, p80_ms=3.0)
    record(handle, replace(outcome(first), timing=timing, max_error=0.00038292095996439457))
    (row,) = history(handle).rows
    assert (row.time_ms, row.min_ms, row.p20_ms, row.p80_ms) == (0.013592, 1234570.0, 2e-9, 3.0)
    assert row.max_error == 0.000382921


def test_a_quarantine_is_of_one_solver_version_device_and_problem(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_) = candidates(handle)
    record(handle, outcome(first, Status.WRONG_RESULT))
    other = ProblemDescription.convolution(x=(2, 4, 6, 5), w=(3, 4, 1, 1))
    assert failures.quarantined(other, handle) == frozenset()
    device = handle.device
    handle.device = replace(device, sm_count=device.sm_count + 1)
    assert failures.quarantined(PROBLEM, handle) == frozenset()
    handle.device = device
    rows = [replace(row, solver_version=row.solver_version + 1, id="") for row in history(handle).rows]
    assert failures.quarantined(PROBLEM, handle) == {first.id}
    assert not any(validity.is_valid(row, handle) for row in rows)


def test_disturbances_are_recorded(handle: Handle) -> None:
    first, second, *_ = candidates(handle)
    disturbed = replace(outcome(first), contended=True, dropped_samples=7)
    record(handle, disturbed, outcome(second))
    rows: dict[str, Row] = {f"{row.solver_id}:{row.config}": row for row in history(handle).rows}
    assert (rows[first.id].contended, rows[first.id].dropped_samples) == (True, 7)
    assert (rows[second.id].contended, rows[second.id].dropped_samples) == (False, 0)


def test_the_verdict_is_recorded(handle: Handle) -> None:
    first, second, *_ = candidates(handle)
    verdict = RaceVerdict(
        winner=first.id,
        ties=(first.id,),
        comparisons=(PairedComparison(candidate=second.id, low=1.02, high=1.05),),
        rounds=45,
        protocol="cpu-1",
    )
    record(handle, outcome(first), outcome(second), verdict=verdict)
    (stored,) = history(handle).verdicts
    assert (stored.winner, stored.ties, stored.blocks, stored.protocol) == (first.id, (first.id,), 45, "cpu-1")
    assert [(c.candidate, c.low, c.high) for c in stored.comparisons] == [(second.id, 1.02, 1.05)]
    assert stored.environment


def test_solutions_tell_how_they_were_timed(handle: Handle) -> None:
    first, second, third, *_ = candidates(handle)
    rough = replace(outcome(second, Status.CUT_OFF), timing=replace(TIMING, time_ms=9.0, samples=1))
    disturbed = replace(outcome(third), timing=replace(TIMING, time_ms=3.0), contended=True)
    record(handle, outcome(first), rough, disturbed)
    found = records.look_up(PROBLEM, OPTIONS, handle)
    assert found is not None
    told = {each.id: (each.samples, each.cut_off, each.contended, each.ties_with_best) for each in found}
    assert told == {
        first.id: (45, False, False, False),
        second.id: (1, True, False, False),
        third.id: (45, False, True, False),
    }


def test_a_rough_time_takes_the_place_of_no_full_measurement(handle: Handle) -> None:
    first, second, *_ = candidates(handle)
    rough = replace(outcome(first, Status.CUT_OFF), timing=replace(TIMING, time_ms=0.5, samples=1))
    record(handle, outcome(first), outcome(second))
    record(handle, rough)
    found = records.look_up(PROBLEM, OPTIONS, handle)
    assert found is not None
    assert {each.id: (each.time_ms, each.cut_off) for each in found} == {
        first.id: (1.0, False),
        second.id: (1.0, False),
    }
    assert known.known_times(PROBLEM, handle) == {first: 1.0, second: 1.0}


@pytest.mark.parametrize("is_judged", [True, False], ids=["verdict", "one percent"])
def test_solutions_tell_ties(handle: Handle, is_judged: bool) -> None:
    """The interval of a race, or, without one, a time within 1 % of the best."""
    first, second, third, *_ = candidates(handle)
    times_ms = {first: 1.02, second: 1.0, third: 1.009}
    verdict = RaceVerdict(
        winner=first.id,
        ties=(first.id, second.id),
        comparisons=(
            PairedComparison(candidate=second.id, low=0.97, high=1.01),
            PairedComparison(candidate=third.id, low=1.02, high=1.05),
        ),
        rounds=45,
        protocol="cpu-1",
    )
    outcomes = [replace(outcome(each), timing=replace(TIMING, time_ms=time_ms)) for each, time_ms in times_ms.items()]
    record(handle, *outcomes, verdict=verdict if is_judged else None)
    found = records.look_up(PROBLEM, OPTIONS, handle)
    assert found is not None
    ties = {each.id for each in found if each.ties_with_best}
    assert ties == ({first.id, second.id} if is_judged else {second.id, third.id})
    assert not predicted(PROBLEM, OPTIONS, handle)[0].ties_with_best


def test_a_verdict_outlives_a_find_that_is_broken_off(handle: Handle) -> None:
    first, *_ = candidates(handle)
    verdict = RaceVerdict(winner=first.id, ties=(first.id,), comparisons=(), rounds=45, protocol="cpu-1")
    with pytest.raises(KeyboardInterrupt):
        record(handle, outcome(first), verdict=verdict, error=KeyboardInterrupt())
    assert len(history(handle).verdicts) == len(history(handle).rows) == 1
    assert history(handle).scopes == ()


def test_ctrl_c_in_a_write_loses_no_measurement(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it broke off was taken for written."""
    first, second, *_ = candidates(handle)
    store, writes = handle.database.user, []

    def record_interrupted(*arguments: Any, **further: Any) -> Any:
        writes.append(arguments)
        if len(writes) == 1:
            raise KeyboardInterrupt
        return type(store).record(store, *arguments, **further)

    monkeypatch.setattr(store, "record", record_interrupted)
    with pytest.raises(KeyboardInterrupt):  # a failure is written at once
        record(handle, outcome(first), outcome(second, Status.CRASHED))
    assert {row.candidate for row in history(handle).rows} == {first.id, second.id}


def test_a_find_is_complete_when_all_that_was_planned_was_tried(handle: Handle) -> None:
    planned = candidates(handle)
    record(handle, *[outcome(planned[0])] * len(planned))
    assert [scope.complete for scope in history(handle).scopes] == [False]
    record(handle, *map(outcome, planned))
    assert sorted(scope.complete for scope in history(handle).scopes) == [False, True]


@pytest.mark.parametrize("status", [Status.WRONG_RESULT, Status.CRASHED, Status.TIMED_OUT], ids=str)
def test_who_fails_in_the_last_race_is_neither_answered_nor_tried_again(handle: Handle, status: Status) -> None:
    first, second, *_ = candidates(handle)
    screened = replace(outcome(first), timing=replace(TIMING, time_ms=0.5, samples=3))
    record(handle, screened, outcome(second), outcome(first, status))
    found = records.look_up(PROBLEM, OPTIONS, handle, measured=[second.id])
    assert found is not None
    assert first.id not in {solution.id for solution in found}
    assert failures.quarantined(PROBLEM, handle) == {first.id}


def test_a_failure_is_written_before_the_find_ends(handle: Handle) -> None:
    (first, *_) = candidates(handle)
    with Recording(PROBLEM, OPTIONS, handle, make_plan(PROBLEM, OPTIONS, handle)) as recording:
        recording.add(outcome(first, Status.TIMED_OUT))
        assert [row.status for row in history(handle).rows] == ["timed_out"]


def test_a_void_row_of_a_solver_that_refuses_the_problem_asks_for_nothing(handle: Handle) -> None:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(3, 4, 3, 3))
    assert find_solutions(problem, handle=handle)
    void = Row(solver_id="ConvCpuGemm1x1", solver_version=99, config="{}", status="ok", time_ms=0.01)
    handle.database.record(handle.device.identity, problem.network_config, [void])
    assert records.look_up(problem, OPTIONS, handle, coverage=Coverage.ALL)
    assert handle.database.rechecks() == ()


def test_a_look_up_that_is_only_a_question_notes_nothing(handle: Handle) -> None:
    record(handle, *map(outcome, candidates(handle)))
    handle.database.record(handle.device.identity, PROBLEM.network_config, [stale_row(handle)])
    assert records.look_up(PROBLEM, OPTIONS, handle, queue=False)
    assert handle.database.rechecks() == ()
    assert records.look_up(PROBLEM, OPTIONS, handle)
    assert [note.reason for note in handle.database.rechecks()] == ["measured with other versions"]


def stale_row(handle: Handle) -> Row:
    return replace(history(handle).rows[0], time_ms=0.1, environment="", created_at="", id="")


def test_equal_look_ups_share_no_list(handle: Handle) -> None:
    """What is made of an answer is kept, its lists are not: each has runners, gaps and ties of its own."""
    record(handle, *map(outcome, candidates(handle)))
    first, second = records.look_up(PROBLEM, OPTIONS, handle), records.look_up(PROBLEM, OPTIONS, handle)
    assert first
    assert first == second
    assert first[0].solution_list.solutions is first
    assert {id(each.solution_list) for each in second or ()}.isdisjoint(id(each.solution_list) for each in first)
    assert [each.position for each in second or ()] == list(range(len(first)))
    only = records.look_up(PROBLEM, FindOptions(only=(first[-1].solver_id,)), handle)
    assert [each.id for each in only or ()] == [each.id for each in first if each.solver_id == first[-1].solver_id]
    assert records.look_up(PROBLEM, OPTIONS, handle) == first


def test_sources_of_solvers_that_are_not_asked_are_not_hashed(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    record(handle, *map(outcome, candidates(handle)))
    hashed = []
    monkeypatch.setattr(stored, "is_current", lambda solver, *others: hashed.append(solver.id) or True)
    assert records.look_up(PROBLEM, FindOptions(only=("ConvCpuDirect",)), handle)
    assert set(hashed) == {"ConvCpuDirect"}


def test_a_look_up_sees_what_another_store_recorded_since(handle: Handle, tmp_path: Path) -> None:
    record(handle, *map(outcome, candidates(handle)))
    before = records.look_up(PROBLEM, OPTIONS, handle)
    assert before
    (row,) = [row for row in history(handle).rows if f"{row.solver_id}:{row.config}" == before[-1].id]
    faster = replace(row, time_ms=before[0].time_ms / 2, created_at="", id="")
    with Store(tmp_path / "finddb.db") as other:
        other.record(handle.device.identity, PROBLEM.network_config, [faster])
        after = records.look_up(PROBLEM, OPTIONS, handle)
        assert after
        assert (after[0].id, after[0].time_ms) == (before[-1].id, faster.time_ms)
        other.clean(handle.device.identity, PROBLEM.network_config)
        assert records.look_up(PROBLEM, OPTIONS, handle) is None


def test_rows_that_a_request_leaves_out_hide_no_slower_one_that_it_takes(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer held the best three of a solver, all of which let infinities spread."""
    solver = Registry.default()["ConvCpuIm2colGemm"]
    *spreading, last = list(solver.configs(PROBLEM, handle.device))[:5]
    monkeypatch.setattr(type(solver), "spreads_nonfinite", lambda self, problem, config: config != last)
    every = [
        Candidate(network_config=PROBLEM.network_config, solver_id=solver.id, config=config)
        for config in (*spreading, last)
    ]
    record(handle, *map(outcome, candidates(handle)))
    record(handle, *(replace(outcome(each), timing=replace(TIMING, time_ms=1.0 + i)) for i, each in enumerate(every)))
    for fresh in ((), [every[-1].id]):
        strict = records.look_up(PROBLEM, FindOptions(strict_nonfinite=True), handle, measured=fresh)
        assert [one.config for one in strict or () if one.solver_id == solver.id] == [last]


def test_a_slow_row_that_is_kept_for_its_workspace_hides_no_faster_one(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = Registry.default()["ConvCpuIm2colGemm"]
    *spreading, fast, small = list(solver.configs(PROBLEM, handle.device))[:5]
    monkeypatch.setattr(type(solver), "spreads_nonfinite", lambda self, problem, config: config in spreading)
    made = (
        Candidate(network_config=PROBLEM.network_config, solver_id=solver.id, config=config)
        for config in (*spreading, fast, small)
    )
    solution = type(solver).solution
    monkeypatch.setattr(
        type(solver),
        "solution",
        lambda *args: replace(
            solution(*args), workspace=WorkspacePlan((Region(name="inputs", bytes=0 if args[-1] == small else 256),))
        ),
    )
    times_ms = zip(made, (1.0, 2.0, 3.0, 4.0, 400.0), strict=True)
    record(handle, *map(outcome, candidates(handle)))
    record(
        handle,
        *(replace(outcome(each), timing=replace(TIMING, time_ms=time_ms)) for each, time_ms in times_ms),
    )
    strict = records.look_up(PROBLEM, FindOptions(strict_nonfinite=True), handle)
    assert [one.config for one in strict or () if one.solver_id == solver.id] == [fast, small]


@pytest.mark.parametrize("options", [OPTIONS, FindOptions(workspace_limit_bytes=1 << 30)], ids=["whole", "limited"])
def test_only_a_whole_find_drops_the_notes(handle: Handle, options: FindOptions) -> None:
    handle.database.queue_recheck(handle.device.identity, PROBLEM.network_config, "why")
    plan = make_plan(PROBLEM, options, handle)
    with Recording(PROBLEM, options, handle, plan) as recording:
        for planned in plan.candidates:
            recording.add(outcome(planned.candidate))
    assert len(handle.database.rechecks()) == (options is not OPTIONS)
