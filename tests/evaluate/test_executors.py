"""The measuring process: what a candidate that crashes, hangs or fails costs, and what becomes of the process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.processes import faulty_services
from helpers.processes.waiting import LIMIT_S, wait_until

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError, MeasurementError
from miofind.evaluate import executors
from miofind.evaluate.evaluate import DeviceLostError, Job, JournalEntry, JournalPhase, evaluate
from miofind.evaluate.executors import InProcess, Isolated, _End, _Watch
from miofind.measure.effort import Effort
from miofind.measure.race import Race, RaceResult
from miofind.measure.verdict import RaceVerdict
from miofind.process.child import Child
from miofind.process.service import Service, Silence
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.registry import Registry

pytestmark = [pytest.mark.sampled(2), pytest.mark.usefixtures("forked_children")]

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(3, 4, 1, 1))
FAULTY = "ConvCpuGemm1x1"
SOLVERS = ("ConvCpuDirect", FAULTY, "ConvCpuIm2colGemm")
FIRST_RUN, SCREENING, RACE = "first run", "screening", "race"
SILENCE_S = 0.5
BUDGET_S = 300.0
"""Far more than a job takes."""

Fault = Callable[..., None]


def job(**settings: object) -> Job:
    candidates = []
    for name in SOLVERS:
        config = Registry.default().named(name).default_configs(PROBLEM, Device.cpu())[0]
        candidates.append(Candidate(network_config=PROBLEM.network_config, solver_id=name, config=config))
    return replace(Job(network_config=PROBLEM.network_config, candidates=tuple(candidates)), **settings)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fault")
        patch.setenv("FAULT_FOLDER", str(folder))
        yield folder


@pytest.fixture
def folder(shared_folder: Path) -> Path:
    """What faulty_solver goes by and leaves behind, empty."""
    for file in shared_folder.iterdir():
        file.unlink()
    return shared_folder


@pytest.fixture
def fault(folder: Path) -> Fault:
    """Sets what goes wrong in measuring processes, from which stage of a job on."""

    def set_fault(name: str, stage: str = FIRST_RUN) -> None:
        (folder / "fault").write_text(name, encoding="utf-8")
        (folder / "stage").write_text(stage, encoding="utf-8")

    return set_fault


class FaultyIsolated(Isolated):
    """Isolated, with a child that imports faulty_solver."""

    _serve = staticmethod(faulty_services.measure)


def isolated() -> Isolated:
    """An executor that gives up on nobody who is slow."""
    return FaultyIsolated(Device.cpu(), candidate_timeout_s=LIMIT_S, compile_timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def long_lived(shared_folder: Path) -> Iterator[Isolated]:
    made = isolated()
    yield made
    made.close()


@pytest.fixture
def shared(long_lived: Isolated, folder: Path) -> Isolated:
    """An executor whose process may be that of the test before."""
    return long_lived


@pytest.fixture
def executor(folder: Path) -> Iterator[Isolated]:
    made = isolated()
    yield made
    made.close()


@pytest.fixture
def once(folder: Path) -> Path:
    return folder / "once"


@pytest.fixture
def hangs(folder: Path, shared: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a hang on the shared executor waits for SILENCE_S, and takes that for more than the budget."""
    told, hangs, passed_s = Service.receive, folder / "hangs", 0.0

    def message(child: Service, patience_s: float) -> object:
        nonlocal passed_s
        connection = child._child.connection
        wait_until(lambda: hangs.exists() or connection.poll(0.01), "a message, or a hang", every_s=0)
        answer = told(child, patience_s)
        if isinstance(answer, Silence):
            hangs.unlink()
            passed_s += 10 * BUDGET_S
        return answer

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s, sleep=time.sleep)
    monkeypatch.setattr(executors, "time", clock)
    monkeypatch.setattr(Service, "receive", message)
    monkeypatch.setattr(shared, "_limits", executors._Limits(compile_s=SILENCE_S, run_s=SILENCE_S))


def by_solver(events: Iterable[Outcome | RaceVerdict]) -> dict[str, Outcome]:
    outcomes = [event for event in events if isinstance(event, Outcome)]
    found = {outcome.candidate.solver_id: outcome for outcome in outcomes}
    assert len(found) == len(outcomes) == len(SOLVERS), "one outcome a candidate"
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "stage", "status", "message"),
    [
        pytest.param("segfault", FIRST_RUN, Status.CRASHED, "SIGSEGV", marks=pytest.mark.full_matrix),
        ("segfault", SCREENING, Status.CRASHED, "SIGSEGV"),
        ("segfault", RACE, Status.CRASHED, "SIGSEGV"),
        pytest.param("kill", FIRST_RUN, Status.CRASHED, "SIGKILL", marks=pytest.mark.full_matrix),
        ("kill", RACE, Status.CRASHED, "SIGKILL"),
        ("exit", FIRST_RUN, Status.CRASHED, "ended with code 0"),
        pytest.param("exit", RACE, Status.CRASHED, "ended with code 0", marks=pytest.mark.full_matrix),
        pytest.param("raise", FIRST_RUN, Status.LAUNCH_FAILED, "broken for this test", marks=pytest.mark.full_matrix),
        ("raise", RACE, Status.LAUNCH_FAILED, "broken for this test"),
        ("sys.exit", FIRST_RUN, Status.LAUNCH_FAILED, "SystemExit(0)"),
        pytest.param("sys.exit", RACE, Status.LAUNCH_FAILED, "SystemExit(0)", marks=pytest.mark.full_matrix),
        ("own Ctrl-C", FIRST_RUN, Status.CRASHED, "SIGINT"),
        ("nan", FIRST_RUN, Status.WRONG_RESULT, "unwritten or NaN"),
        ("wrong", FIRST_RUN, Status.WRONG_RESULT, "are wrong"),
        pytest.param("exhaust", FIRST_RUN, Status.OUT_OF_MEMORY, "MemoryError", marks=pytest.mark.full_matrix),
        ("exhaust", RACE, Status.OUT_OF_MEMORY, "MemoryError"),
        ("compile and crash", FIRST_RUN, Status.CRASHED, "SIGSEGV"),
        ("compile and sys.exit", FIRST_RUN, Status.LAUNCH_FAILED, "SystemExit(0)"),
        pytest.param("compile and own Ctrl-C", FIRST_RUN, Status.CRASHED, "SIGINT", marks=pytest.mark.full_matrix),
    ],
    ids=lambda value: str(value),
)
def test_a_fault_costs_its_candidate_alone(
    shared: Isolated, fault: Fault, name: str, stage: str, status: Status, message: str
) -> None:
    fault(name, stage)
    check_that_the_others_are_usable(list(shared.run(job())), status, message)


@pytest.mark.usefixtures("hangs")
@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("spin", FIRST_RUN, "it ran for 0.5 s without an end"),
        ("spin", RACE, "it ran for 0.5 s without an end"),
        ("compile forever", FIRST_RUN, "it compiled for 0.5 s without an end"),
    ],
)
def test_a_hang_costs_its_candidate_alone(shared: Isolated, fault: Fault, name: str, stage: str, message: str) -> None:
    fault(name, stage)
    check_that_the_others_are_usable(list(shared.run(job())), Status.TIMED_OUT, message)


def check_that_the_others_are_usable(events: list[Outcome | RaceVerdict], status: Status, message: str) -> None:
    found = by_solver(events)
    assert found[FAULTY].status is status
    assert message in found[FAULTY].message
    assert all(outcome.status.usable for name, outcome in found.items() if name != FAULTY)
    verdicts = [event for event in events if isinstance(event, RaceVerdict)]
    assert len(verdicts) == 1
    assert FAULTY not in str(verdicts)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_what_a_child_logs_is_logged_here(
    executor: Isolated, fault: Fault, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    fault("log")
    with caplog.at_level(level, logger="miofind"):
        assert by_solver(executor.run(job()))[FAULTY].status.usable
    told = [record for record in caplog.records if record.name == "miofind.faulty"]
    assert bool(told) == (level == logging.DEBUG)


@pytest.mark.usefixtures("hangs")
@pytest.mark.parametrize(("name", "status"), [("spin", Status.TIMED_OUT), ("segfault", Status.CRASHED)])
def test_the_others_have_their_budget_whatever_a_fault_takes(
    shared: Isolated, fault: Fault, name: str, status: Status
) -> None:
    """A hang in the race used the budget up: one of those that had raced was tried again, the others left out."""
    fault(name, RACE)
    events = list(shared.run(job(budget_s=BUDGET_S)))
    found = by_solver(events)
    assert found[FAULTY].status is status
    assert [name for name, outcome in found.items() if not outcome.status.usable] == [FAULTY]
    assert isinstance(events[-1], RaceVerdict)


def test_what_is_lost_with_processes_comes_back_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process here works for most of the budget and dies; the last candidate's has what is left of twice it."""
    given: list[float] = []

    def lost(executor: Isolated, part: Job, watch: _Watch) -> Iterator[Outcome]:
        given.append(part.budget_s)
        watch.end, watch.suspects, watch.worked_s = _End(Status.CRASHED, "lost"), [part.candidates[0]], 8.0
        yield from ()

    monkeypatch.setattr(Isolated, "_events", lost)
    assert {outcome.status for outcome in by_solver(Isolated(Device.cpu()).run(job(budget_s=10.0))).values()} == {
        Status.CRASHED
    }
    assert given == [10.0, 10.0, 4.0]


def test_of_several_that_compile_the_culprit_is_found(shared: Isolated, fault: Fault) -> None:
    fault("compile and crash")
    found = by_solver(shared.run(job(compile_workers=3)))
    assert {name: outcome.status.usable for name, outcome in found.items()} == {
        name: name != FAULTY for name in SOLVERS
    }


def test_memory_that_is_not_given_back_costs_the_process(shared: Isolated, fault: Fault) -> None:
    """The next candidates found none left, and were recorded as out of memory, too."""
    fault("exhaust")
    events = shared.run(job())
    assert next(events).status is Status.OUT_OF_MEMORY  # type: ignore[union-attr]
    assert shared._child is None
    assert all(event.status.usable for event in events if isinstance(event, Outcome))


def test_who_was_killed_from_outside_is_tried_once_more(shared: Isolated, fault: Fault, once: Path) -> None:
    fault("wait to be killed")

    def kill() -> None:
        wait_until(lambda: once.exists() and bool(once.read_text()), "a candidate that waits")
        os.kill(int(once.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = by_solver(shared.run(job()))
    killer.join()
    assert all(outcome.status.usable for outcome in found.values())


def test_nobody_is_blamed_for_a_process_that_ends_in_between(shared: Isolated, fault: Fault, once: Path) -> None:
    fault("die once")
    assert all(outcome.status.usable for outcome in by_solver(shared.run(job())).values())
    assert once.exists()


def test_processes_that_always_end_give_the_job_up(shared: Isolated, fault: Fault) -> None:
    fault("die")
    with pytest.raises(MeasurementError, match=r"ended 3 times.*SIGKILL"):
        list(shared.run(job()))


def test_a_device_that_recovers_is_used(
    executor: Isolated, fault: Fault, monkeypatch: pytest.MonkeyPatch, once: Path
) -> None:
    fault("sick once")
    monkeypatch.setattr("miofind.process.restarts.PAUSES_S", (0, 0, 0))
    assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())
    assert once.exists()


def test_a_device_that_stays_sick_ends_the_job(
    executor: Isolated, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("sick")
    monkeypatch.setattr("miofind.process.restarts.PAUSES_S", (0,))
    with pytest.raises(MeasurementError, match=r"no measuring process can be started on .*gives wrong results"):
        list(executor.run(job()))
    monkeypatch.setattr(executor, "_device", replace(Device.cpu(), place=Device.virtual("90a").place))
    with pytest.raises(DeviceLostError, match="gives wrong results"):
        list(executor.run(job()))


def test_a_job_takes_the_child_that_was_prepared(executor: Isolated) -> None:
    executor.prepare()
    prepared = executor._prepared
    assert prepared is not None
    executor.prepare()
    assert executor._prepared is prepared
    by_solver(executor.run(job()))
    assert executor._child is prepared


def test_nothing_is_prepared_beside_a_job_at_work(executor: Isolated) -> None:
    events = executor.run(job())
    next(events)
    executor.prepare()
    assert executor._prepared is None
    list(events)
    worked = executor._child
    executor.prepare()
    assert (executor._child, executor._prepared) == (worked, None)


def test_a_job_that_found_no_child_leaves_the_next_to_be_prepared(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_starts() -> Service:
        raise MeasurementError("no process")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_started", none_starts)
        with pytest.raises(MeasurementError, match="no process"):
            list(executor.run(job()))
    executor.prepare()
    assert executor._prepared is not None


def test_a_prepared_child_that_was_killed_is_replaced(executor: Isolated) -> None:
    executor.prepare()
    prepared = executor._prepared
    assert prepared is not None
    os.kill(prepared.pid, signal.SIGKILL)
    assert all(outcome.status is Status.OK for outcome in by_solver(executor.run(job())).values())
    assert executor._child is not prepared


def test_a_child_sees_one_gpu_by_its_uuid() -> None:
    code = (
        "import os, sys; from multiprocessing.connection import Connection;"
        "Connection(int(sys.argv[1])).send((os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[2:]))"
    )
    child = Child(code, "GPU-1-2", ["0", "module"])
    try:
        assert child.connection.recv() == ("GPU-1-2", ["0", "module"])
    finally:
        child.kill()
    assert Isolated(Device.cpu())._setup.device.index == -1
    assert Isolated(replace(Device.virtual("90a"), index=3, uuid="GPU-1-2"))._setup.device.index == 0
    assert Isolated(replace(Device.virtual("90a"), index=3))._setup.device.index == 3


def test_children_end_with_their_parent(fault: Fault, once: Path) -> None:
    fault("wait to be killed")
    code = "import test_executors as t; list(t.isolated().run(t.job()))"
    paths = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    wait_until(lambda: parent.poll() is not None or (once.exists() and bool(once.read_text())), "a run in a child")
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    child = Path("/proc", once.read_text())
    wait_until(lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2], "the end of the child")


def test_the_journal_tells_of_candidates_by_their_places_in_the_job_before_they_run() -> None:
    entries: list[JournalEntry] = []
    wanted = job(effort=Effort.SCREEN)
    outcomes = list(evaluate(wanted, Device.cpu(), None, Registry.default(), entries.append))  # type: ignore[arg-type]
    assert len(outcomes) == len(SOLVERS)
    compiled = [(phase, place) for place in range(len(SOLVERS)) for phase in ("compile", "compiled")]
    written = [(entry.phase.value, entry.place) for entry in entries]
    assert written[: len(compiled) + 1] == [*compiled, ("prepare", None)]
    assert written[len(compiled) + 1 :][: len(SOLVERS)] == [("run", place) for place in range(len(SOLVERS))]
    assert {phase for phase, _ in written[len(compiled) + 1 :]} == {"run"}


def test_who_may_have_ended_a_process_is_known_by_its_place_in_the_job() -> None:
    candidates = job().candidates
    watch, seen = _Watch(executors._Limits(compile_s=1.0, run_s=1.0), candidates), []
    for phase, place in (
        (JournalPhase.COMPILE, 2),
        (JournalPhase.COMPILE, 1),
        (JournalPhase.COMPILED, 2),
        (JournalPhase.COMPILED, 1),
        (JournalPhase.PREPARE, None),
        (JournalPhase.RUN, 1),
    ):
        watch.note(JournalEntry(phase=phase, place=place))
        seen.append([candidates.index(suspect) for suspect in watch.suspects])
    assert seen == [[2], [2, 1], [1], [], [], [1]]


def test_the_verdict_comes_last(shared: Isolated) -> None:
    *outcomes, verdict = shared.run(job(effort=Effort.FIND))
    assert isinstance(verdict, RaceVerdict)
    assert by_solver(outcomes)
    assert verdict.winner in verdict.ties
    assert {comparison.candidate for comparison in verdict.comparisons} < {o.candidate.id for o in outcomes}  # type: ignore[union-attr]


def test_screening_times_and_judges_nothing(shared: Isolated) -> None:
    outcomes = by_solver(shared.run(job(effort=Effort.SCREEN)))
    assert [outcome.timing and outcome.timing.samples for outcome in outcomes.values()] == [3, 3, 3]


def test_a_time_reached_elsewhere_cuts_off(executor: Isolated, fault: Fault) -> None:
    fault("cut off")
    large = ProblemDescription.convolution(x=(8, 64, 56, 56), w=(64, 64, 1, 1))
    slow = Candidate(
        network_config=large.network_config,
        solver_id="ConvCpuIm2colGemm",
        config=Registry.default()["ConvCpuIm2colGemm"].default_configs(large, Device.cpu())[0],
    )
    wanted = Job(network_config=large.network_config, candidates=(slow,), best_ms=1e-3)
    (outcome,) = executor.run(wanted)
    assert isinstance(outcome, Outcome)
    assert outcome.status is Status.CUT_OFF


def test_the_next_job_runs_after_a_crash(executor: Isolated, fault: Fault) -> None:
    fault("segfault")
    assert by_solver(executor.run(job()))[FAULTY].status is Status.CRASHED
    fault("")
    assert executor._child is not None
    executor.close()
    assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())


def test_a_process_serves_many_jobs_and_is_replaced_where_it_has_ended(executor: Isolated) -> None:
    assert by_solver(executor.run(job()))
    first = executor._child
    assert by_solver(executor.run(job()))
    assert executor._child is first
    assert first is not None
    first._child._process.kill()
    first._child._process.wait()
    assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())
    assert executor._child is not first


def test_closing_leaves_no_process_behind(executor: Isolated) -> None:
    list(executor.run(job()))
    child = executor._child
    assert child is not None
    executor.close()
    assert child._child._process.returncode is not None


def test_a_job_that_is_given_up_ends_its_process(shared: Isolated) -> None:
    outcomes = shared.run(job())
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert shared._child is None


def test_a_problem_too_large_for_memory_says_so(shared: Isolated, fault: Fault) -> None:
    fault("memory")
    with pytest.raises(MeasurementError, match=r"do not fit the memory that is free \(none is left\)"):
        list(shared.run(job()))


def test_memory_that_does_not_suffice_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr("miofind.evaluate.evaluate.Verifier", none_left)
    with pytest.raises(MeasurementError, match="do not fit the memory that is free"):
        list(InProcess(Device.cpu(), None).run(job()))  # type: ignore[arg-type]


def test_a_device_lost_in_the_race_condemns_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ran after the culprit failed too, and was recorded as failed in place of its usable rows."""
    finish = Race.finish

    def broken(race: Race, **options: str) -> dict[str, RaceResult]:
        def fail(*_: object) -> None:
            monkeypatch.setattr("miofind.evaluate.evaluate.context_error", lambda device: "illegal address")
            raise LaunchError("the context is gone")

        race._timer.batch = fail  # type: ignore[method-assign, assignment]
        return finish(race, **options)

    monkeypatch.setattr(Race, "finish", broken)
    outcomes = InProcess(Device.cpu(), None).run(job())  # type: ignore[arg-type]
    culprit = next(outcomes)
    assert isinstance(culprit, Outcome)
    assert culprit.status is Status.CRASHED
    with pytest.raises(DeviceLostError, match=culprit.candidate.solver_id):
        next(outcomes)


def test_a_device_lost_in_verification_ends_the_job_after_its_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.evaluate.evaluate.context_error", lambda device: "illegal address")
    outcomes = InProcess(Device.cpu(), None).run(job())  # type: ignore[arg-type]
    culprit = next(outcomes)
    assert isinstance(culprit, Outcome)
    assert (culprit.candidate.solver_id, culprit.status) == (SOLVERS[0], Status.CRASHED)
    assert "illegal address" in culprit.message
    with pytest.raises(DeviceLostError, match=SOLVERS[0]):
        next(outcomes)


def test_an_address_error_that_surfaces_after_the_race_blames_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Race.finish

    def late(race: Race, **options: str) -> dict[str, RaceResult]:
        results = finish(race, **options)
        monkeypatch.setattr("miofind.evaluate.evaluate.context_error", lambda device: "illegal address")
        return results

    monkeypatch.setattr(Race, "finish", late)
    outcomes = InProcess(Device.cpu(), None).run(job())  # type: ignore[arg-type]
    assert next(outcomes).status is Status.CRASHED  # type: ignore[union-attr]
    with pytest.raises(DeviceLostError, match="illegal address"):
        next(outcomes)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that children are sent."""
    jobs: list[Job] = []
    send = Service.send

    def noted(child: Service, message: object) -> None:
        if isinstance(message, Job):
            jobs.append(message)
        send(child, message)

    monkeypatch.setattr(Service, "send", noted)
    return jobs


def test_a_job_that_was_begun_is_not_sent_again(executor: Isolated, sent: list[Job]) -> None:
    """Some of its budget has passed when it is run."""
    executor.begin(job())
    assert not sent, "there is no child yet"
    by_solver(executor.run(job()))
    child = executor._child
    executor.begin(job(budget_s=BUDGET_S))
    executor.begin(job(effort=Effort.TUNE))
    assert [each.effort for each in sent] == [Effort.FIND] * 2, "one at a time"
    found = by_solver(executor.run(job(budget_s=BUDGET_S - 1)))
    assert all(outcome.status.usable for outcome in found.values())
    assert (executor._child, len(sent)) == (child, 2)
    by_solver(executor.run(job()))
    assert len(sent) == 3, "it was begun for one run"


@pytest.mark.parametrize("change", ["candidates", "budget_s", "best_ms"])
def test_nobody_hears_of_a_job_that_was_begun_and_is_not_run(executor: Isolated, sent: list[Job], change: str) -> None:
    """The child goes on with the one that is."""
    by_solver(executor.run(job()))
    child, wanted = executor._child, job(budget_s=BUDGET_S)
    others = {"candidates": wanted.candidates[:1], "budget_s": 0.0, "best_ms": 1e9}
    executor.begin(replace(wanted, **{change: others[change]}))
    assert len(by_solver(executor.run(wanted))) == len(SOLVERS)
    assert (executor._child, len(sent)) == (child, 3)
    executor.begin(wanted)
    executor.close()
    assert len(by_solver(executor.run(wanted))) == len(SOLVERS)
    assert executor._child is not child


@pytest.mark.parametrize("is_run", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_fault_in_a_job_that_was_begun_costs_its_candidate_alone(
    executor: Isolated, fault: Fault, is_run: bool, waits: bool
) -> None:
    """Whether the process has ended when the job is run, or ends meanwhile; nobody hears of one that is not run."""
    by_solver(executor.run(job()))
    child = executor._child
    assert child is not None
    fault("segfault")
    executor.begin(job() if is_run else job(effort=Effort.SCREEN))
    if waits:
        wait_until(lambda: not child.is_alive, "the end of the child")
    if not is_run:
        fault("")
        assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())
        return
    check_that_the_others_are_usable(list(executor.run(job())), Status.CRASHED, "SIGSEGV")


@pytest.mark.usefixtures("hangs")
@pytest.mark.parametrize("is_run", [True, False])
def test_a_hang_in_a_job_that_was_begun_is_waited_for_as_long(shared: Isolated, fault: Fault, is_run: bool) -> None:
    fault("")
    by_solver(shared.run(job()))
    fault("spin")
    shared.begin(job() if is_run else job(effort=Effort.SCREEN))
    if is_run:
        check_that_the_others_are_usable(list(shared.run(job())), Status.TIMED_OUT, "it ran for 0.5 s without an end")
        return
    wait_until(lambda: (Path(os.environ["FAULT_FOLDER"]) / "hangs").exists(), "a hang")
    fault("")
    assert all(outcome.status.usable for outcome in by_solver(shared.run(job())).values())


def test_what_fills_the_memory_in_a_job_that_nobody_runs_is_not_the_next_ones(executor: Isolated, fault: Fault) -> None:
    by_solver(executor.run(job()))
    child = executor._child
    fault("exhaust")
    executor.begin(job(effort=Effort.SCREEN))
    wait_until(lambda: child is not None and child._child.connection.poll(0), "what the child tells")
    time.sleep(0.2)  # it has been told to fail by now
    fault("")
    assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())


@pytest.mark.usefixtures("hangs")
def test_ctrl_c_while_a_begun_job_is_waited_for_leaves_no_process(
    shared: Isolated, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_solver(shared.run(job()))
    child = shared._child
    assert child is not None
    fault("spin")
    shared.begin(job(effort=Effort.SCREEN))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Service, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(shared.run(job()))
    assert not child.is_alive
    fault("")
    assert all(outcome.status.usable for outcome in by_solver(shared.run(job())).values())


def test_what_is_abandoned_ends_and_what_is_not_begun_stays(executor: Isolated, fault: Fault) -> None:
    executor.abandon()
    by_solver(executor.run(job()))
    child = executor._child
    assert child is not None
    executor.abandon()
    assert executor._child is child
    fault("wait to be killed")
    executor.begin(job())
    executor.abandon()
    assert executor._child is None
    assert not child.is_alive
    fault("")
    assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())


@pytest.mark.parametrize("runs_it", [True, False])
def test_ctrl_c_in_begin_leaves_nobody_waiting(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch, runs_it: bool
) -> None:
    """The child may have the job, or not, or a part of it: none of these is taken for begun."""
    by_solver(executor.run(job()))
    child = executor._child
    assert child is not None

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Service, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.begin(job())
    assert not child.is_alive
    wanted = job() if runs_it else job(effort=Effort.TUNE)
    assert all(outcome.status.usable for outcome in by_solver(executor.run(wanted)).values())


@pytest.mark.parametrize("ends_by", ["run", "close", "abandon"])
def test_what_was_begun_is_its_childs(executor: Isolated, fault: Fault, sent: list[Job], ends_by: str) -> None:
    """Of runs that overlap the last one's child is kept, which has not begun what another one has; that one ends."""
    first = executor.run(job())
    next(first)
    by_solver(executor.run(job()))
    other = executor._child
    assert other is not None
    fault("wait to be killed")
    executor.begin(job())
    list(first)
    fault("")
    if ends_by == "close":
        executor.close()
    elif ends_by == "abandon":
        executor.abandon()
        assert executor._child is not None
    assert all(outcome.status.usable for outcome in by_solver(executor.run(job())).values())
    assert not other.is_alive
    assert len(sent) == 4


def test_ctrl_c_while_a_prepared_child_starts_leaves_no_process(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.prepare()
    prepared = executor._prepared
    assert prepared is not None

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Service, "await_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(executor.run(job()))
    assert not prepared.is_alive
