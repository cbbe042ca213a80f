"""Tuning on several devices: who gets what, and what becomes of the rest when a device or a user gives up."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miofind.candidate import Outcome
from miofind.device import Device
from miofind.errors import DatabaseError, NoDeviceError
from miofind.evaluate import DeviceLostError
from miofind.finddb import Store
from miofind.handle import Handle
from miofind.options import FindOptions
from miofind.problem import ProblemDescription
from miofind.sandbox.executors import InProcess
from miofind.suites import SuiteProblem
from miofind.tune import service as tune_module
from miofind.tune.queue import TaskQueue
from miofind.tune.service import (
    Task,
    TuneEnd,
    TuneEvent,
    TuneFinished,
    TuneLost,
    TuneOptions,
    TuneStarted,
    TuneStatus,
    tune,
)

OPTIONS = TuneOptions(find=FindOptions(only=("ConvCpuIm2colGemm",), time_budget_s=math.inf))
KIND_A, KIND_B = (replace(Device.cpu(), name=name) for name in ("kind A", "kind B"))
measuring = InProcess.run
Crew = Callable[..., list[Handle]]


def request(k: int, count: int = 1) -> SuiteProblem:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(k, 4, 3, 3), padding=1)
    return SuiteProblem(problem=problem, suite="small", layer=f"layer{k}", count=count)


REQUESTS = [request(k) for k in (6, 5, 4, 3, 2)]


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Strict handles over one FindDB, one for each device given."""
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with ExitStack() as stack:

        def made(*devices: Device) -> list[Handle]:
            path = tmp_path / "finddb.db"
            return [stack.enter_context(Handle(device, database=path, strict=True)) for device in devices]

        yield made


def events_of(handles: list[Handle], options: TuneOptions = OPTIONS) -> tuple[tune_module.TuneSummary, list[TuneEvent]]:
    events: list[TuneEvent] = []
    return tune(REQUESTS, handles, options, events.append), events


def lose(handles: list[Handle], doomed: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the devices of those numbers be lost at their n-th problem, while the others wait for it to happen."""
    executors = {id(handle.executor(isolate=False)): number for number, handle in enumerate(handles)}
    jobs: Counter[int] = Counter()
    lost = threading.Semaphore(0)

    def run(self: InProcess, job: Any) -> Iterator[Outcome]:
        number = executors[id(self)]
        jobs[number] += 1
        if number in doomed and jobs[number] >= doomed[number]:
            lost.release()
            raise DeviceLostError(f"device {number} is gone")
        yield from measuring(self, job)
        if number not in doomed and jobs[number] == 1:
            assert lost.acquire(timeout=30)

    monkeypatch.setattr(InProcess, "run", run)


def test_devices_of_a_kind_share_the_problems(crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2, timeout=30)

    def run(self: InProcess, job: Any) -> Iterator[Outcome]:
        if job.network_config in {entry.problem.network_config for entry in REQUESTS[:2]}:
            meeting.wait()  # both devices are at work at one time
        yield from measuring(self, job)

    monkeypatch.setattr(InProcess, "run", run)
    summary, events = events_of(crew(KIND_A, KIND_A))
    assert [(r.request, r.kind, r.status) for r in summary.results] == [
        (entry, KIND_A.identity, TuneStatus.TUNED) for entry in REQUESTS
    ]
    assert (summary.end, summary.total) == (TuneEnd.COMPLETE, 5)
    assert {event.device for event in events if isinstance(event, TuneFinished)} == {0, 1}
    assert [event.number for event in events if isinstance(event, TuneFinished)] == [1, 2, 3, 4, 5]
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert {len(history.scopes) for history in store.histories()} == {1}, "nothing is measured twice"


def test_every_kind_gets_every_problem_and_keeps_its_own_rows(crew: Crew, tmp_path: Path) -> None:
    summary, _ = events_of(crew(KIND_A, KIND_B))
    assert Counter(result.kind for result in summary.results) == {KIND_A.identity: 5, KIND_B.identity: 5}
    assert summary.total == 10
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert store.stats().by_device == {KIND_A.identity: 5, KIND_B.identity: 5}


def test_another_of_its_kind_takes_a_lost_devices_problem(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = crew(KIND_A, KIND_A)
    lose(handles, {0: 1}, monkeypatch)
    summary, events = events_of(handles)
    assert (summary.end, summary.left) == (TuneEnd.COMPLETE, 0)
    assert [result.status for result in summary.results] == [TuneStatus.TUNED] * 5
    assert summary.lost == {0: "device 0 is gone"}
    assert [event for event in events if isinstance(event, TuneLost)] == [
        TuneLost(device=0, message="device 0 is gone")
    ]
    begun = Counter(event.request.layer for event in events if isinstance(event, TuneStarted))
    assert sorted(begun.values()) == [1, 1, 1, 1, 2]


def test_a_problem_that_costs_two_devices_is_given_up(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = crew(KIND_A, KIND_A, KIND_A)
    heaviest = REQUESTS[0].problem.network_config

    def run(self: InProcess, job: Any) -> Iterator[Outcome]:
        if job.network_config == heaviest:
            raise DeviceLostError("gone")
        time.sleep(0.05)
        yield from measuring(self, job)

    monkeypatch.setattr(InProcess, "run", run)
    summary, _ = events_of(handles)
    assert [result.status for result in summary.results] == [TuneStatus.FAILED] + [TuneStatus.TUNED] * 4
    assert "devices were lost over it twice" in summary.results[0].message
    assert (summary.end, len(summary.lost)) == (TuneEnd.COMPLETE, 2)


def test_a_kind_that_is_lost_leaves_its_work_and_the_others_go_on(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = crew(KIND_A, KIND_B)
    lose(handles, {0: 2}, monkeypatch)
    summary, _ = events_of(handles)
    assert Counter(result.kind for result in summary.results) == {KIND_A.identity: 1, KIND_B.identity: 5}
    assert (summary.end, summary.left) == (TuneEnd.DEVICE_LOST, 4)


def test_a_device_that_vanished_is_lost(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> Iterator[Outcome]:
        raise NoDeviceError("CUDA device 0 does not exist")
        yield

    monkeypatch.setattr(InProcess, "run", run)
    summary, _ = events_of(crew(KIND_A, KIND_A))
    assert (summary.end, len(summary.lost)) == (TuneEnd.DEVICE_LOST, 2)
    assert summary.left in (4, 5)


def test_a_database_that_fails_one_worker_ends_all(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = threading.Semaphore(2)

    def run(self: InProcess, job: Any) -> Iterator[Outcome]:
        if not jobs.acquire(blocking=False):
            raise DatabaseError("the disk is full")
        yield from measuring(self, job)

    monkeypatch.setattr(InProcess, "run", run)
    with pytest.raises(DatabaseError, match="the disk is full"):
        tune(REQUESTS, crew(KIND_A, KIND_A), OPTIONS)


def test_ctrl_c_does_not_wait_for_what_is_measured(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def run(self: InProcess, job: Any) -> Iterator[Outcome]:
        assert let_go.wait(timeout=30)
        yield from measuring(self, job)

    def interrupted(event: TuneEvent) -> None:
        if isinstance(event, TuneStarted):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(InProcess, "run", run)
    monkeypatch.setattr(tune_module, "GRACE_S", 0.2)
    before = threading.active_count()
    began = time.monotonic()
    summary = tune(REQUESTS, crew(KIND_A, KIND_A), OPTIONS, interrupted)
    assert time.monotonic() - began < 5
    assert (summary.end, summary.left) == (TuneEnd.INTERRUPTED, 5)
    let_go.set()
    while threading.active_count() > before:  # what was under measurement is finished, and no more is begun
        time.sleep(0.01)
        assert time.monotonic() - began < 30


def test_what_ends_within_the_grace_is_kept(crew: Crew) -> None:
    def interrupted(event: TuneEvent) -> None:
        if isinstance(event, TuneStarted) and event.number == 1:
            signal.raise_signal(signal.SIGINT)

    summary = tune(REQUESTS, crew(KIND_A, KIND_A), OPTIONS, interrupted)
    assert summary.end is TuneEnd.INTERRUPTED
    assert [result.status for result in summary.results] == [TuneStatus.TUNED] * len(summary.results)
    assert 1 <= len(summary.results) <= 2


def test_no_problem_is_begun_after_the_time(crew: Crew) -> None:
    summary = tune(REQUESTS, crew(KIND_A, KIND_B), replace(OPTIONS, stop_after_s=0.0))
    assert (summary.end, summary.left) == (TuneEnd.OUT_OF_TIME, 10)


def task(k: int, kind: str = "a", estimate_s: float = 1.0, count: int = 1) -> Task:
    return Task(request=request(k, count), kind=kind, estimate_s=estimate_s)


def test_a_queue_gives_the_heaviest_of_a_kind() -> None:
    light, heavy, frequent, other = task(2), task(3, estimate_s=5.0), task(4, count=9), task(5, kind="b")
    queue = TaskQueue([light, heavy, frequent, other], seconds=math.inf)
    assert queue.next("a") == frequent
    taken = [queue.take("a") for _ in range(3)]
    assert taken == [frequent, heavy, light]
    assert queue.take("b") == other
    assert queue.next("a") is None
    assert queue.take("c") is None


def test_a_worker_waits_for_what_another_may_give_back() -> None:
    queue = TaskQueue([task(2)], seconds=math.inf)
    first = queue.take("a")
    assert first is not None
    got: list[Task | None] = []
    waiting = threading.Thread(target=lambda: got.append(queue.take("a")))
    waiting.start()
    assert queue.give_back(first)
    waiting.join(timeout=30)
    assert got == [replace(first, losses=1)]
    assert got[0] is not None
    assert not queue.give_back(got[0])
    assert queue.take("a") is None


def test_a_closed_queue_lets_the_waiting_go() -> None:
    queue = TaskQueue([task(2), task(3)], seconds=math.inf)
    taken = [queue.take("a"), queue.take("a")]
    got: list[Task | None] = []
    waiting = threading.Thread(target=lambda: got.append(queue.take("a")))
    waiting.start()
    queue.close()
    waiting.join(timeout=30)
    assert got == [None]
    assert None not in taken
