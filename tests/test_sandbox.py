"""The measuring process: what a candidate that crashes, hangs or fails costs, and what becomes of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from miofind.candidate import Candidate, Outcome, Status
from miofind.device import Device
from miofind.errors import LaunchError, MeasurementError
from miofind.evaluate import DeviceLostError, Job
from miofind.problem import ProblemDescription
from miofind.race import Race, RaceResult
from miofind.sandbox import InProcess, Isolated
from miofind.solver import solver_by_id

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(3, 4, 1, 1))
FAULTY = "ConvCpuGemm1x1"
SOLVERS = ("ConvCpuDirect", FAULTY, "ConvCpuIm2colGemm")
# Two runs are verified, one warms up, one is timed roughly: the next is a sample of the race's screening.
RUNS_BEFORE_SCREENING = 4
# A run this short is repeated 32 times a sample, and screening takes three samples.
RUNS_BEFORE_RACE = RUNS_BEFORE_SCREENING + 3 * 32


def job() -> Job:
    candidates = []
    for name in SOLVERS:
        config = solver_by_id(name).default_configs(PROBLEM, Device.cpu())[0]
        candidates.append(Candidate(network_config=PROBLEM.network_config, solver_id=name, config=config))
    return Job(network_config=PROBLEM.network_config, candidates=tuple(candidates))


@pytest.fixture
def executor() -> Iterator[Isolated]:
    made = Isolated(Device.cpu(), modules=("faulty_solver",), candidate_timeout_s=3.0)
    yield made
    made.close()


def by_solver(outcomes: list[Outcome]) -> dict[str, Outcome]:
    found = {outcome.candidate.solver_id: outcome for outcome in outcomes}
    assert len(found) == len(outcomes) == len(SOLVERS), "one outcome a candidate"
    return found


@pytest.mark.parametrize(
    ("fault", "after", "status"),
    [
        ("crash", 0, Status.CRASHED),
        ("crash", RUNS_BEFORE_SCREENING, Status.CRASHED),
        ("crash", RUNS_BEFORE_RACE, Status.CRASHED),
        ("hang", 0, Status.TIMED_OUT),
        ("raise", 0, Status.LAUNCH_FAILED),
        ("raise", RUNS_BEFORE_RACE, Status.LAUNCH_FAILED),
    ],
    ids=lambda value: str(value),
)
def test_a_fault_costs_its_candidate_alone(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch, fault: str, after: int, status: Status
) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_AFTER", str(after))
    found = by_solver(list(executor.run(job())))
    assert found[FAULTY].status is status
    assert found[FAULTY].message
    assert all(outcome.status.usable for name, outcome in found.items() if name != FAULTY)


def test_the_next_job_runs_after_a_crash(executor: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "crash")
    assert by_solver(list(executor.run(job())))[FAULTY].status is Status.CRASHED
    monkeypatch.delenv("FAULT")
    assert executor._child is not None
    executor.close()
    assert all(outcome.status.usable for outcome in executor.run(job()))


def test_a_process_serves_many_jobs_and_is_replaced_where_it_has_ended(executor: Isolated) -> None:
    assert len(list(executor.run(job()))) == len(SOLVERS)
    first = executor._child
    assert len(list(executor.run(job()))) == len(SOLVERS)
    assert executor._child is first
    assert first is not None
    first._process.kill()
    first._process.wait()
    assert all(outcome.status.usable for outcome in executor.run(job()))
    assert executor._child is not first


def test_closing_leaves_no_process_behind(executor: Isolated) -> None:
    list(executor.run(job()))
    child = executor._child
    assert child is not None
    executor.close()
    assert child._process.returncode is not None


def test_a_job_that_is_given_up_ends_its_process(executor: Isolated) -> None:
    outcomes = executor.run(job())
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert executor._child is None


def test_a_problem_too_large_for_memory_says_so(executor: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "memory")
    with pytest.raises(MeasurementError, match=r"do not fit the memory that is free \(none is left\)"):
        list(executor.run(job()))


def test_memory_that_does_not_suffice_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr("miofind.evaluate.Verifier", none_left)
    with pytest.raises(MeasurementError, match="do not fit the memory that is free"):
        list(InProcess(Device.cpu(), None).run(job()))  # type: ignore[arg-type]


def test_a_device_lost_in_the_race_condemns_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ran after the culprit failed too, and was recorded as failed in place of its usable rows."""

    def lost(device: Device, candidate_id: str) -> None:
        raise DeviceLostError(f"{candidate_id} destroyed the CUDA context")

    def finish(race: Race) -> dict[str, RaceResult]:
        timing = race._stage.timing([1.0])
        failed = RaceResult(timing=timing, failure=LaunchError("the context is gone"))
        race.first_failed = list(race._runners)[1]
        return dict.fromkeys(race._runners, failed)

    monkeypatch.setattr("miofind.evaluate._check_alive", lost)
    monkeypatch.setattr(Race, "finish", finish)
    outcomes = InProcess(Device.cpu(), None).run(job())  # type: ignore[arg-type]
    with pytest.raises(DeviceLostError, match=FAULTY):
        next(outcomes)
