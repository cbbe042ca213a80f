"""Measuring processes on a GPU: what breaks the context, hangs or hoards costs its candidate alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs.cuda_package import make_package
from helpers.runs.faulty_cuda_solver import FAULTY, SOURCE, Faulty

from miofind.bench.null_test import DEFAULT_PROBLEM, NullTestOptions, null_test
from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, cuda_device_count
from miofind.evaluate.evaluate import Job
from miofind.evaluate.executors import Isolated
from miofind.evaluate.health import complaint, context_error
from miofind.measure.gpu_monitor import gpu_monitor
from miofind.measure.verdict import RaceVerdict
from miofind.process.child import Child
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.registry import Registry
from miofind.solver.steps import Config

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

PROBLEM = ProblemDescription.convolution(x=(1, 1, 64, 64), w=(1, 1, 1, 1))
NAIVE = "ConvDirectNaive"
# Four runs before screening, at most 164 before the final, and 480 in it.
IN_SCREENING = 20
IN_THE_FINAL = 400


@pytest.fixture
def executor(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Isolated]:
    package = make_package(tmp_path, monkeypatch)
    package.write(faults_cu=SOURCE)
    monkeypatch.setenv("FAULT_PACKAGE", package.name)
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path / "cache"))
    # A sound candidate beside many processes on a slow host may be silent for seconds; one without end stays silent.
    made = Isolated(device, Registry.default().with_solvers(Faulty()), candidate_timeout_s=20.0)
    yield made
    made.close()


def candidate(solver_id: str, config: Config) -> Candidate:
    return Candidate(network_config=PROBLEM.network_config, solver_id=solver_id, config=config)


def job(device: Device, fault: str, after: int) -> Job:
    """A sound candidate, the faulty one, and one of ours."""
    naive = Registry.default().named(NAIVE).default_configs(PROBLEM, device)[0]
    candidates = (
        candidate(FAULTY, Config.of(fault="none", after=0)),
        candidate(FAULTY, Config.of(fault=fault, after=after)),
        candidate(NAIVE, naive),
    )
    return Job(network_config=PROBLEM.network_config, candidates=candidates)


@pytest.mark.parametrize(
    ("fault", "after", "status"),
    [
        ("out of bounds", 0, Status.CRASHED),
        ("out of bounds", IN_SCREENING, Status.CRASHED),
        ("out of bounds", IN_THE_FINAL, Status.CRASHED),
        ("without end", 0, Status.TIMED_OUT),
        ("without end", IN_SCREENING, Status.TIMED_OUT),
        ("nan", 0, Status.WRONG_RESULT),
        ("wrong", 0, Status.WRONG_RESULT),
        ("workspace", 0, Status.OUT_OF_MEMORY),
        ("hoard", 0, Status.OUT_OF_MEMORY),
        ("exit", 0, Status.CRASHED),
    ],
    ids=str,
)
def test_a_fault_costs_its_candidate_alone(
    executor: Isolated, device: Device, fault: str, after: int, status: Status
) -> None:
    wanted = job(device, fault, after)
    events = list(executor.run(wanted))
    outcomes = {event.candidate: event for event in events if isinstance(event, Outcome)}
    assert set(outcomes) == set(wanted.candidates)
    assert len([event for event in events if isinstance(event, Outcome)]) == len(outcomes), "one outcome a candidate"
    sound, faulty, naive = (outcomes[each] for each in wanted.candidates)
    assert faulty.status is status, faulty.message
    assert sound.status.usable, sound.message
    assert naive.status.usable, naive.message
    assert not any(faulty.candidate.id in event.ties for event in events if isinstance(event, RaceVerdict))
    assert context_error(device) == "", "this process's context is untouched"
    assert all(event.status.usable for event in executor.run(job(device, "none", 20)) if isinstance(event, Outcome))


def test_every_gpu_is_found_by_its_uuid() -> None:
    code = (
        "import sys; from multiprocessing.connection import Connection; from miofind.device.device import Device;"
        "found = Device.cuda(0); Connection(int(sys.argv[1])).send((found.uuid, found.identity))"
    )
    for index in range(cuda_device_count()):
        here = Device.cuda(index)
        assert here.uuid.startswith(("GPU-", "MIG-"))
        child = Child(code, here.uuid, [])
        try:
            assert child.connection.recv() == (here.uuid, here.identity)
        finally:
            child.kill()


def test_a_working_device_has_no_complaint(device: Device) -> None:
    assert complaint(device, Compiler()) == ""


def test_the_monitor_finds_the_gpu(device: Device) -> None:
    pytest.importorskip("pynvml")
    monitor = gpu_monitor.__wrapped__(device)  # one that no test before has looked with
    assert monitor is not None
    assert not monitor.look().contended, "the first look blames nobody"


def test_the_protocol_is_honest_here(device: Device) -> None:
    """Few pairs: the bounds are those of 400 pairs with room for chance."""
    report = null_test(DEFAULT_PROBLEM, device, Compiler(), NullTestOptions(pairs=20))
    assert report.protocol == "cuda-1"
    for series in (report.equal, report.slowed):
        assert series.rounds == 45
    assert report.equal.called <= 3
    assert report.slowed.called >= 12


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_capture_in_another_thread_is_no_fault_of_the_context(device: Device, mode: str) -> None:
    begun, asked = threading.Event(), threading.Event()
    captured: list[bool] = []

    def capture() -> None:
        with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
            begun.set()
            asked.wait(timeout=10)
            captured.append(stream.end_capture() is not None)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(timeout=10)
    assert context_error(device) == ""
    asked.set()
    thread.join()
    assert captured == [True], "the capture is not broken off"
