"""What is made of NVML's answers, with a stand-in for it: load of others, throttled clocks, containers, refusals."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from miofind.device.device import Device
from miofind.measure import gpu_monitor as module
from miofind.measure.gpu_monitor import GpuMonitor, Reading, gpu_monitor

ME, PARENT, OTHER = os.getpid(), os.getppid(), 4_000_000_001
GPU = replace(Device.virtual("90a"), index=0, uuid="GPU-1")


class Error(Exception):
    """Stands in for NVMLError."""


class NotFound(Error):
    """No process was sampled."""


class FakeNvml:
    """Answers with what the test sets; None makes it refuse."""

    NVMLError = Error
    NVMLError_NotFound = NotFound

    def __init__(self) -> None:
        self.reasons: int | None = 0
        self.pids: list[int] | None = [ME]
        self.use: dict[int, int] | None = {}
        self.time_us = 1000
        self.asked_since: list[int] = []
        self.listings = 0
        self.handles: list[str] = []
        self.works = True

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.works:
            raise Error("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.handles.append(uuid)
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        if not handle.startswith("MIG"):
            raise Error("no MIG instance")
        return "GPU of it"

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: N802
        if self.reasons is None or handle.startswith("MIG"):
            raise Error("not supported")
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        self.listings += 1
        if self.pids is None:
            raise Error("no permission")
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:  # noqa: N802
        self.asked_since.append(since)
        if self.use is None:
            raise Error("not supported")
        if not self.use:
            raise NotFound("none")
        self.time_us += 500
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=self.time_us) for pid, share in self.use.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml()
    monkeypatch.setattr(module, "_PROCESSES_EVERY_S", 0.0)
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    gpu_monitor.cache_clear()
    return made


def watched(nvml: FakeNvml, uuid: str = "GPU-1") -> GpuMonitor:
    """A monitor that has looked once: that look is at what was before."""
    monitor = GpuMonitor(nvml, uuid)
    use, nvml.use = nvml.use, {ME: 100}
    monitor.look()
    nvml.use = use
    return monitor


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [(0, False), (0x01, False), (0x02, False), (0x04, False), (0x08, True), (0x20, True), (0x40, True), (0x84, True)],
    ids=["none", "idle", "clocks set", "power cap", "hw slowdown", "sw thermal", "hw thermal", "brake and cap"],
)
def test_heat_and_the_power_brake_throttle_and_the_cap_does_not(nvml: FakeNvml, reasons: int, throttled: bool) -> None:
    nvml.reasons = reasons
    assert watched(nvml).look().throttled is throttled


@pytest.mark.parametrize(
    ("pids", "use", "contended"),
    [
        ([ME], {ME: 100}, False),
        ([ME, OTHER], {ME: 100}, False),
        ([ME, OTHER], {ME: 100, OTHER: 3}, False),
        ([ME, OTHER], {ME: 100, OTHER: 40}, True),
        ([ME, PARENT], {ME: 100, PARENT: 29}, False),
        ([ME, PARENT], {ME: 100, PARENT: 30}, True),
        ([ME, PARENT, OTHER], {ME: 100, PARENT: 20, OTHER: 20}, True),
        ([ME, OTHER], {OTHER: 100}, True),
        ([ME, PARENT], None, False),
        ([ME, OTHER], None, True),
        ([7], {7: 100}, False),
        ([7, OTHER], {7: 100, OTHER: 30}, True),
        ([], {7: 100}, False),
        ([7, 8], None, False),
        (None, None, False),
        (None, {}, False),
    ],
    ids=[
        "alone",
        "idle other",
        "hardly busy other",
        "busy other",
        "parent that plans",
        "parent that computes",
        "busy other beside the parent",
        "other alone",
        "parent, use untold",
        "other, use untold",
        "container, alone",
        "container, busy other",
        "container, none listed",
        "container, use untold",
        "nothing told",
        "nobody listed nor busy",
    ],
)
def test_load_of_others(nvml: FakeNvml, pids: list[int] | None, use: dict[int, int] | None, contended: bool) -> None:
    nvml.pids, nvml.use = pids, use
    monitor = watched(nvml)
    assert monitor.look().contended is contended


def test_the_first_look_is_at_the_past(nvml: FakeNvml) -> None:
    """A child that was killed a second ago is no load of others."""
    nvml.use = {OTHER: 100, ME: 1}
    monitor = GpuMonitor(nvml, "GPU-1")
    assert not monitor.look().contended
    assert monitor.look().contended
    assert nvml.asked_since == [0, 1500]


def test_processes_are_asked_for_now_and_then(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESSES_EVERY_S", 60.0)
    monitor = GpuMonitor(nvml, "GPU-1")
    for _ in range(5):
        monitor.look()
    assert nvml.listings == 1


def test_a_mig_instance_has_its_gpus_clocks(nvml: FakeNvml) -> None:
    nvml.reasons = 0x40
    assert watched(nvml, "MIG-1").look().throttled


def test_what_nvml_refuses_counts_as_undisturbed(nvml: FakeNvml) -> None:
    nvml.reasons = nvml.pids = nvml.use = None
    assert watched(nvml).look() == Reading()


def test_a_gpu_is_found_by_its_uuid(nvml: FakeNvml) -> None:
    assert isinstance(gpu_monitor(GPU), GpuMonitor)
    assert nvml.handles == ["GPU-1"]


def test_nothing_is_watched_without_nvml(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_monitor(Device.cpu()) is None
    nvml.works = False
    assert gpu_monitor(GPU) is None
    gpu_monitor.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_monitor(GPU) is None
    gpu_monitor.cache_clear()
