"""Tuning on several devices: who gets what, and what becomes of the rest when a device or a user gives up."""

from __future__ import annotations

import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import faulty_services
from helpers.processes.waiting import LIMIT_S, wait_until

from miofind import find_solutions, run_solution
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import DatabaseError, InvalidOptionError
from miofind.finddb import Store
from miofind.options import FindOptions
from miofind.process.service import Service
from miofind.runtime.handle import Handle
from miofind.suites import SuiteProblem
from miofind.tune import device_processes
from miofind.tune.queue import TaskQueue
from miofind.tune.service import (
    OnEvent,
    Task,
    TuneEnd,
    TuneEvent,
    TuneFinished,
    TuneLost,
    TuneOptions,
    TuneStarted,
    TuneStatus,
    TuneSummary,
    tune,
)

pytestmark = pytest.mark.usefixtures("forked_children")

OPTIONS = TuneOptions(find=FindOptions(only=("ConvCpuIm2colGemm",), time_budget_s=math.inf))
KIND_A, KIND_B = (replace(Device.cpu(), name=name) for name in ("kind A", "kind B"))
HandlesOf = Callable[..., list[Handle]]
Fault = Callable[[str], None]


def request(k: int, count: int = 1) -> SuiteProblem:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(k, 4, 3, 3), padding=1)
    return SuiteProblem(problem=problem, suite="small", layer=f"layer{k}", count=count)


REQUESTS = [request(k) for k in (6, 5, 4, 3, 2)]


@pytest.fixture
def handles_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HandlesOf]:
    """Strict handles over one FindDB, one for each device given; the faulty module goes by the devices' numbers."""
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with ExitStack() as stack:

        def made(*devices: Device) -> list[Handle]:
            path = tmp_path / "finddb.db"
            numbered = [replace(device, memory_bytes=number) for number, device in enumerate(devices)]
            return [stack.enter_context(Handle(device, database=path, strict=True)) for device in numbered]

        yield made


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what goes wrong in the devices' processes."""
    monkeypatch.setattr(device_processes._DeviceThread, "_serve", staticmethod(faulty_services.tune))

    def set_fault(fault: str) -> None:
        monkeypatch.setenv("DEVICE_FAULT", fault)
        monkeypatch.setenv("DEVICE_FOLDER", str(tmp_path))
        monkeypatch.setenv("DEVICE_HEAVIEST", REQUESTS[0].problem.network_config)

    set_fault("")
    return set_fault


def tuned(
    handles: list[Handle], options: TuneOptions = OPTIONS, on_event: OnEvent | None = None
) -> tuple[TuneSummary, list[TuneEvent]]:
    events: list[TuneEvent] = []
    summary = tune(REQUESTS, handles, options, on_event or events.append)
    return summary, events


def test_devices_of_a_kind_share_the_problems(handles_of: HandlesOf, faulty: Fault, tmp_path: Path) -> None:
    faulty("meet")
    summary, events = tuned(handles_of(KIND_A, KIND_A))
    assert [(r.request, r.kind, r.status) for r in summary.results] == [
        (entry, KIND_A.identity, TuneStatus.TUNED) for entry in REQUESTS
    ]
    assert (summary.end, summary.total) == (TuneEnd.COMPLETE, 5)
    assert {event.device for event in events if isinstance(event, TuneFinished)} == {0, 1}
    assert [event.number for event in events if isinstance(event, TuneFinished)] == [1, 2, 3, 4, 5]
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert {len(history.scopes) for history in store.histories()} == {1}, "nothing is measured twice"


def test_every_kind_gets_every_problem_and_keeps_its_own_rows(
    handles_of: HandlesOf, faulty: Fault, tmp_path: Path
) -> None:
    summary, _ = tuned(handles_of(KIND_A, KIND_B))
    assert Counter(result.kind for result in summary.results) == {KIND_A.identity: 5, KIND_B.identity: 5}
    assert summary.total == 10
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        assert store.stats().by_device == {KIND_A.identity: 5, KIND_B.identity: 5}


def test_solutions_that_come_from_a_process_run_here(handles_of: HandlesOf, faulty: Fault) -> None:
    handles = handles_of(KIND_A, KIND_A)
    summary, _ = tuned(handles)
    best = summary.results[0].solutions[0]
    x, w = np.ones((1, 4, 6, 5), np.float32), np.ones((6, 4, 3, 3), np.float32)
    y = run_solution(best, x, w)
    assert y[0, 0, 2, 2] == pytest.approx(36.0)
    assert best.solution_list.handle in handles


def test_another_of_its_kind_takes_a_lost_devices_problem(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("lose0 at 1")
    summary, events = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, summary.left) == (TuneEnd.COMPLETE, 0)
    assert [result.status for result in summary.results] == [TuneStatus.TUNED] * 5
    assert summary.lost == {0: "device 0 is gone"}
    assert [event for event in events if isinstance(event, TuneLost)] == [
        TuneLost(device=0, message="device 0 is gone")
    ]
    begun = Counter(event.request.layer for event in events if isinstance(event, TuneStarted))
    assert sorted(begun.values()) == [1, 1, 1, 1, 2]


def test_a_problem_that_costs_two_devices_is_given_up(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("heaviest is lost")
    summary, _ = tuned(handles_of(KIND_A, KIND_A, KIND_A))
    assert [result.status for result in summary.results] == [TuneStatus.FAILED] + [TuneStatus.TUNED] * 4
    assert "devices were lost over it twice" in summary.results[0].message
    assert (summary.end, len(summary.lost)) == (TuneEnd.COMPLETE, 2)


def test_a_kind_that_is_lost_leaves_its_work_and_the_others_go_on(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("lose0 at 2")
    summary, _ = tuned(handles_of(KIND_A, KIND_B))
    assert Counter(result.kind for result in summary.results) == {KIND_A.identity: 1, KIND_B.identity: 5}
    assert (summary.end, summary.left) == (TuneEnd.DEVICE_LOST, 4)


def test_a_device_that_vanished_is_lost(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("vanish")
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, len(summary.lost)) == (TuneEnd.DEVICE_LOST, 2)
    assert summary.left in (4, 5)


def test_a_database_that_fails_one_process_ends_all(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("disk")
    with pytest.raises(DatabaseError, match="the disk is full"):
        tuned(handles_of(KIND_A, KIND_A))


def test_a_process_that_ends_is_replaced_and_its_task_tried_again(
    handles_of: HandlesOf, faulty: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    faulty("exit once")
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, summary.lost) == (TuneEnd.COMPLETE, {})
    assert [result.status for result in summary.results] == [TuneStatus.TUNED] * 5
    assert "ended with code 7: it is replaced" in caplog.text


def test_a_problem_that_ends_two_processes_is_given_up(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("exit at heaviest")
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, summary.lost) == (TuneEnd.COMPLETE, {})
    assert [result.status for result in summary.results] == [TuneStatus.FAILED] + [TuneStatus.TUNED] * 4
    assert "ended with code 7, twice over it" in summary.results[0].message


def patient_poll(service: Service, within_s: float) -> bool:
    """`Service._polls` for which a process is silent only once it was stopped."""
    state, connection = Path("/proc", str(service.pid), "stat"), service._child.connection
    while not connection.poll(0.05):
        if state.read_text().rpartition(")")[2].split()[0] == "T":
            return connection.poll(within_s)
    return True


def test_a_process_that_falls_silent_is_replaced(
    handles_of: HandlesOf, faulty: Fault, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty("stop once")
    monkeypatch.setattr(device_processes, "SILENCE_S", 2.0)
    monkeypatch.setattr(Service, "_polls", patient_poll)
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, summary.lost) == (TuneEnd.COMPLETE, {})
    assert [result.status for result in summary.results] == [TuneStatus.TUNED] * 5
    assert "was silent for 2 s: it is replaced" in caplog.text


def test_devices_whose_processes_always_end_are_lost(handles_of: HandlesOf, faulty: Fault) -> None:
    faulty("exit")
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    # Each device has three tries, and each problem two: the last two of six may be of one problem or of two.
    failures = summary.count(TuneStatus.FAILED)
    assert failures in (2, 3)
    assert (summary.end, summary.left) == (TuneEnd.DEVICE_LOST, 5 - failures)
    assert all("3 times" in message for message in summary.lost.values())
    assert len(summary.lost) == 2


def test_a_process_that_ends_between_two_problems_loses_no_result(
    handles_of: HandlesOf, faulty: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    faulty("exit after")
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, summary.left, summary.lost) == (TuneEnd.COMPLETE, 0, {})
    assert "ended with code 7: it is replaced" in caplog.text


def test_the_callers_handles_answer_from_what_was_measured(handles_of: HandlesOf, faulty: Fault) -> None:
    """Of one candidate: of several one may be cut off on a busy machine, and keeps the time that it had."""
    handles, options = handles_of(KIND_A, KIND_A), replace(OPTIONS, find=FindOptions(only=("ConvCpuDirect",)))
    tuned(handles, options)
    problem = REQUESTS[0].problem
    before = find_solutions(problem, options=options.find, handle=handles[0])[0]
    tuned(handles, replace(options, force=True))
    after = find_solutions(problem, options=options.find, handle=handles[0])[0]
    assert after.time_ms != before.time_ms
    answer = handles[0].database.answer(KIND_A.identity, problem.network_config)
    assert answer is not None
    assert after.time_ms == answer.rows[0].time_ms


def test_answers_to_images_are_forgotten_where_a_volume_was_measured(handles_of: HandlesOf, faulty: Fault) -> None:
    handles = handles_of(KIND_A, KIND_A)
    volume = ProblemDescription.convolution(x=(1, 4, 3, 6, 5), w=(2, 4, 3, 1, 1))
    kept = find_solutions(volume.flattened, options=OPTIONS.find, handle=handles[0])[0]
    tune([replace(REQUESTS[0], problem=volume)], handles, replace(OPTIONS, force=True))
    assert find_solutions(volume.flattened, options=OPTIONS.find, handle=handles[0])[0] is not kept


def test_a_findb_in_memory_is_not_shared(faulty: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    with (
        Handle(KIND_A, database=":memory:") as one,
        Handle(KIND_A, database=":memory:") as two,
        pytest.raises(DatabaseError, match="share no FindDB in memory: name a file"),
    ):
        tuned([one, two])


def test_what_processes_refuse_is_raised(handles_of: HandlesOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_processes._DeviceThread, "_serve", staticmethod(faulty_services.refuse))
    with pytest.raises(InvalidOptionError, match="the service is refused"):
        tune(REQUESTS, handles_of(KIND_A, KIND_A), OPTIONS)


def test_ctrl_c_before_a_process_was_begun(
    handles_of: HandlesOf, faulty: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = device_processes._DeviceThread.start

    def start(self: threading.Thread) -> None:
        if self.name.endswith("1"):
            raise KeyboardInterrupt
        started(self)  # type: ignore[arg-type]

    monkeypatch.setattr(device_processes._DeviceThread, "start", start)
    summary, _ = tuned(handles_of(KIND_A, KIND_A))
    assert (summary.end, summary.total) == (TuneEnd.INTERRUPTED, 5)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in tests begun as a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_what_is_measured_and_keeps_what_was(
    handles_of: HandlesOf, faulty: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured there would take an hour."""
    faulty("hang")
    monkeypatch.setattr(device_processes, "GRACE_S", LIMIT_S)

    def interrupted(event: TuneEvent) -> None:
        if isinstance(event, TuneStarted) and event.number == 2:
            wait_until(lambda: len(list(tmp_path.glob("hangs*"))) == 2, "two processes that have measured")
            signal.raise_signal(signal.SIGINT)

    summary, _ = tuned(handles_of(KIND_A, KIND_A), on_event=interrupted)
    assert (summary.end, summary.left) == (TuneEnd.INTERRUPTED, 5)
    with Store(tmp_path / "finddb.db", read_only=True) as store:
        stats = store.stats()
    assert (stats.problems, stats.scopes) == (2, 0)
    assert stats.rows >= 2


def test_no_problem_is_begun_after_the_time(handles_of: HandlesOf, faulty: Fault) -> None:
    summary, _ = tuned(handles_of(KIND_A, KIND_B), replace(OPTIONS, stop_after_s=0.0))
    assert (summary.end, summary.left) == (TuneEnd.OUT_OF_TIME, 10)


def task(k: int, kind: str = "a", estimate_s: float = 1.0, count: int = 1) -> Task:
    return Task(request=request(k, count), kind=kind, estimate_s=estimate_s)


def test_a_queue_gives_the_heaviest_of_a_kind() -> None:
    light, heavy, frequent, other = task(2), task(3, estimate_s=5.0), task(4, count=9), task(5, kind="b")
    queue = TaskQueue([light, heavy, frequent, other], seconds=math.inf)
    assert queue.ahead("a", 1) == (frequent,)
    taken = [queue.take("a") for _ in range(3)]
    assert taken == [frequent, heavy, light]
    assert queue.take("b") == other
    assert queue.ahead("a", 1) == ()
    assert queue.take("c") is None


def test_a_queue_passes_over_what_is_being_prepared_and_waits_while_all_is() -> None:
    tasks = [task(k, estimate_s=20.0 - k) for k in range(1, 6)]
    queue, preparing = TaskQueue(tasks, seconds=math.inf), set(tasks)
    queue.defer(lambda each: each in preparing, depth=3)
    preparing -= {tasks[2], tasks[3]}
    assert queue.take("a") == tasks[2]
    assert queue.take("a") == tasks[3], "the third of those that are left"
    got: list[Task | None] = []
    waiting = threading.Thread(target=lambda: got.append(queue.take("a")))
    waiting.start()
    preparing.discard(tasks[1])
    waiting.join(timeout=LIMIT_S)
    assert got == [tasks[1]]


def test_the_time_is_up_for_what_is_being_prepared_too() -> None:
    queue = TaskQueue([task(2)], seconds=0.05)
    queue.defer(lambda _: True, depth=3)
    assert queue.take("a") is None
    assert queue.out_of_time


def test_a_queue_gives_each_task_once_to_be_prepared_as_many_as_devices_at_work_need() -> None:
    tasks = [task(k, estimate_s=20.0 - k) for k in range(1, 9)]
    queue = TaskQueue(tasks, seconds=math.inf)
    assert queue.take("a") == tasks[0]
    assert queue.ahead("a", 2) == (tasks[1], tasks[2])
    assert queue.ahead("a", 2) == ()
    assert queue.take("a") == tasks[1]
    assert queue.ahead("a", 2) == (tasks[3], tasks[4], tasks[5])
    queue.close()
    assert queue.ahead("a", 8) == ()


def test_a_worker_waits_for_what_another_may_give_back() -> None:
    queue = TaskQueue([task(2)], seconds=math.inf)
    first = queue.take("a")
    assert first is not None
    got: list[Task | None] = []
    waiting = threading.Thread(target=lambda: got.append(queue.take("a")))
    waiting.start()
    assert queue.give_back(first)
    waiting.join(timeout=LIMIT_S)
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
    waiting.join(timeout=LIMIT_S)
    assert got == [None]
    assert None not in taken
