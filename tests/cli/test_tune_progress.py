"""The live view's figures: what each device does, what is left, how long it may take, what was gained."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace

import pytest
from helpers.processes.waiting import LIMIT_S
from rich.console import Console

from miofind.cli import tune_display
from miofind.cli.tune_display import _View, device_name
from miofind.cli.tune_progress import TuneProgress
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.suites import SuiteProblem
from miofind.tune.service import Task, TuneBegan, TuneFinished, TuneLost, TuneResult, TuneStarted, TuneStatus

A, B = (replace(Device.cpu(), name=name) for name in ("kind A", "kind B"))


def task(k: int, device: Device, estimate_s: float, count: int = 1) -> Task:
    problem = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(k, 4, 3, 3), padding=1)
    request = SuiteProblem(problem=problem, suite="small", layer=f"layer{k}", count=count)
    return Task(request=request, kind=device.identity, estimate_s=estimate_s)


def finished(task: Task, device: int, seconds: float, status: TuneStatus = TuneStatus.TUNED) -> TuneFinished:
    result = TuneResult(request=task.request, kind=task.kind, status=status, seconds=seconds, message="why")
    return TuneFinished(task=task, device=device, result=result, number=1, total=4)


TASKS = (task(2, A, 10.0), task(3, A, 10.0), task(4, A, 20.0), task(5, B, 5.0))


@pytest.fixture
def progress() -> TuneProgress:
    made = TuneProgress()
    made.take(TuneBegan(devices=(A, A, B), tasks=TASKS))
    return made


def test_left_is_the_kinds(progress: TuneProgress) -> None:
    assert [progress.left(state) for state in progress.devices] == [3, 3, 1]
    progress.take(finished(TASKS[0], 0, 5.0, TuneStatus.FAILED))
    assert [progress.left(state) for state in progress.devices] == [2, 2, 1]
    assert progress.counts() == {TuneStatus.TUNED: 0, TuneStatus.KNOWN: 0, TuneStatus.FAILED: 1}


def test_eta_is_the_estimates_at_the_measured_pace_shared_by_the_living(progress: TuneProgress) -> None:
    assert progress.eta_s(progress.devices[0]) is None, "nothing is measured yet"
    progress.take(finished(TASKS[0], 0, 30.0))  # three times as long as estimated
    assert progress.eta_s(progress.devices[0]) == pytest.approx(3 * 30.0 / 2)
    assert progress.eta_s(progress.devices[2]) is None
    progress.take(finished(TASKS[1], 1, 0.0, TuneStatus.KNOWN))  # says nothing of the pace
    assert progress.eta_s(progress.devices[0]) == pytest.approx(3 * 20.0 / 2)
    progress.take(TuneLost(device=1, message="gone"))
    assert progress.eta_s(progress.devices[0]) == pytest.approx(3 * 20.0)


def test_eta_counts_what_runs_already(progress: TuneProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress.take(finished(TASKS[0], 0, 10.0))
    progress.take(TuneStarted(task=TASKS[2], device=0, number=2, total=4))
    now = 108.0
    assert progress.eta_s(progress.devices[0]) == pytest.approx((30.0 - 8.0) / 2)
    now = 1000.0  # it takes longer than thought, which is no reason to promise less for the rest
    assert progress.eta_s(progress.devices[0]) == pytest.approx((30.0 - 20.0) / 2)


def test_gain_is_weighed_by_count(progress: TuneProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"layer2": 2.0, "layer3": 16.0, "layer4": None}
    monkeypatch.setattr(TuneResult, "gain", property(lambda result: gains[result.request.layer]))
    assert progress.gain(progress.devices[0]) is None
    for work in (task(2, A, 1.0, count=3), task(3, A, 1.0), task(4, A, 1.0)):
        progress.take(finished(work, 0, 1.0))
    assert progress.gain(progress.devices[1]) == pytest.approx((2**3 * 16) ** (1 / 4))


def test_the_view_has_a_row_a_device_and_a_line_for_all() -> None:
    view = _View()
    view(TuneBegan(devices=(A, B), tasks=TASKS[1:]))
    view(TuneStarted(task=TASKS[1], device=0, number=1, total=3))
    view(finished(TASKS[3], 1, 1.0))
    view(TuneLost(device=1, message="the context is gone"))
    console = Console(file=io.StringIO(), width=140)
    console.print(view.shown())
    assert isinstance(console.file, io.StringIO)
    header, first, second, last = console.file.getvalue().splitlines()
    assert header.split() == ["device", "measures", "for", "done", "failed", "left", "ETA", "gain"]
    assert first.startswith("CPU 0 kind A  layer3 4x6x5 > 3, 3x3 p1 fwd")
    assert second.split() == ["CPU", "1", "kind", "B", "lost", "-", "1", "0", "0", "-", "-"]
    assert last.startswith("1/3 1 tuned in ")


def test_a_long_problem_is_told_of_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A piped tuning of one problem printed nothing for its half minute."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = tune_display._TuneLines()
    lines.remind()
    lines(TuneBegan(devices=(A, A), tasks=TASKS[:2]))
    lines(TuneStarted(task=TASKS[0], device=0, number=1, total=2))
    now = 1.0
    lines(TuneStarted(task=TASKS[1], device=1, number=2, total=2))
    told = []
    for second in range(1, 61):
        now = float(second)
        lines.remind()
        told += [second] if (said := capsys.readouterr().err) else []
        if second == 5:
            assert said == ("tune: 0/2 in 5.0 s; measuring layer2 4x6x5 > 2, 3x3 p1 fwd for 5.0 s, and 1 more\n")
    assert told == [5, 15, 35]
    lines(finished(TASKS[0], 0, 60.0, TuneStatus.FAILED))
    capsys.readouterr()
    now = 66.0
    lines.remind()
    assert capsys.readouterr().err == "tune: 1/2 in 1 min 06 s; measuring layer3 4x6x5 > 3, 3x3 p1 fwd for 1 min 05 s\n"


def test_a_thread_tells_of_it_until_the_tuning_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(tune_display, "_EVERY_S", 0.0)
    monkeypatch.setattr(tune_display, "print_note", lambda *_: told.set())
    with tune_display.display() as on_event:
        on_event(TuneBegan(devices=(A,), tasks=TASKS[:1]))
        on_event(TuneStarted(task=TASKS[0], device=0, number=1, total=1))
        assert told.wait(LIMIT_S)
    assert [thread for thread in threading.enumerate() if thread.name == "miofind-tune-lines"] == []


def test_devices_are_named_by_ordinal() -> None:
    assert device_name(0, replace(Device.virtual("90a"), index=3, name="NVIDIA H200")) == "GPU 3 NVIDIA H200"
