"""Timing on a GPU: plausible, repeatable, cold and free of launch costs. No speed is asserted beyond physics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from miofind.bench.ceilings import measure_ceilings
from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device import memory
from miofind.device.device import Device
from miofind.device.memory import DeviceMemory
from miofind.launch.invoker import Invoker, make_invoker
from miofind.measure.effort import Effort
from miofind.measure.race import Entrant, Race
from miofind.measure.timer import Timer
from miofind.solver.registry import Registry

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SMALL = ProblemDescription.convolution(x=(1, 16, 14, 14), w=(16, 16, 3, 3), padding=1, dtype="float16")
LARGE = ProblemDescription.convolution(x=(32, 256, 56, 56), w=(64, 256, 1, 1), dtype="float16")


def naive(problem: ProblemDescription, device: Device, compiler: Compiler) -> Invoker:
    solver = Registry.default()["ConvDirectNaive"]
    return make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)


class Copying(Invoker):
    """Copies x over y, as far as it goes: a run whose least time is known. Counts its launches from the host."""

    def __init__(self, problem: ProblemDescription, device: Device, *, workspace_bytes: int = 0) -> None:
        self.problem, self.device = problem, device
        self.solver_id, self.config = "Copying", type("Config", (), {"json": "{}"})()
        self.workspace_bytes, self.deterministic, self.alignment_bytes = workspace_bytes, True, 2
        self.bytes = min(problem.x.bytes, problem.y.bytes)
        self.addresses: list[tuple[int, int, int]] = []

    def run(self, bases: tuple[int, ...], stream: int) -> None:
        x, _, y, workspace = bases
        self.addresses.append((x, y, workspace))
        kind = cupy.cuda.runtime.memcpyDeviceToDevice
        cupy.cuda.runtime.memcpyAsync(y, x, self.bytes, kind, stream)


class Uncapturable(Copying):
    """Synchronises, which a capture refuses."""

    def run(self, bases: tuple[int, ...], stream: int) -> None:
        super().run(bases, stream)
        cupy.cuda.runtime.streamSynchronize(stream)


class Late(Copying):
    """Takes 3 ms on the host before it launches."""

    def run(self, bases: tuple[int, ...], stream: int) -> None:
        time.sleep(3e-3)
        super().run(bases, stream)


def test_short_runs_are_captured_and_rotate_over_buffers(device: Device, compiler: Compiler) -> None:
    with Timer(SMALL, device, compiler) as timer:
        invoker = Copying(SMALL, device)
        timed: Any = timer.prepare(invoker)
        times = timer.samples(timed, invoker, 20)
        captured = len(invoker.addresses)
        timer.samples(timed, invoker, 20)
        assert len(invoker.addresses) == captured
        assert timed._graph is not None
        assert len({x for x, _, _ in invoker.addresses}) >= 8
        assert timer.timing(times).time_ms < 0.05


def test_cold_copies_are_no_faster_than_memory(device: Device, compiler: Compiler) -> None:
    with Timer(LARGE, device, compiler) as timer:
        invoker = Copying(LARGE, device)
        timed = timer.prepare(invoker)
        timing = timer.timing(timer.samples(timed, invoker, 20))
    assert 2 * invoker.bytes / (timing.time_ms * 1e-3) < 1.1 * device.bandwidth_bytes_per_s
    assert timing.p80_ms < 1.2 * timing.p20_ms


def test_what_cannot_be_captured_is_timed_by_launches(device: Device, compiler: Compiler) -> None:
    with Timer(SMALL, device, compiler) as timer:
        broken, sound = Uncapturable(SMALL, device), Copying(SMALL, device)
        timed: Any = timer.prepare(broken)
        assert all(time > 0 for time in timer.samples(timed, broken, 5))
        assert timed._graph is None
        other: Any = timer.prepare(sound)
        timer.samples(other, sound, 3)
        assert other._graph is not None


def test_a_host_that_launches_late_makes_nothing_slow(device: Device, compiler: Compiler) -> None:
    """What is launched 3 ms late by itself is timed in a graph from the first on, and not cut off."""
    with Timer(LARGE, device, compiler) as timer:
        late: Any = timer.prepare(invoker := Late(LARGE, device))
        assert late._graph is not None
        assert max(late.rough_ms, *timer.samples(late, invoker, 3)) < 1.0


def test_a_grown_workspace_voids_graphs(device: Device, compiler: Compiler) -> None:
    with Timer(SMALL, device, compiler) as timer:
        first, second = Copying(SMALL, device, workspace_bytes=1 << 20), Copying(SMALL, device, workspace_bytes=1 << 28)
        timed = timer.prepare(first)
        timer.samples(timed, first, 2)
        old = first.addresses[-1][2]
        timer.samples(timer.prepare(second), second, 2)
        timer.samples(timed, first, 2)
        assert first.addresses[-1][2] == second.addresses[-1][2]
        assert old != 0


def test_a_race_prefers_the_faster(device: Device, compiler: Compiler) -> None:
    with Timer(LARGE, device, compiler) as timer:
        race = Race(timer, Effort.FIND)
        race.enter(Entrant(key="naive", invoker=naive(LARGE, device, compiler)))
        race.enter(Entrant(key="copy", invoker=Copying(LARGE, device)))
        results = race.finish()
    assert list(results) == ["copy", "naive"]
    assert results["copy"].timing.protocol == "cuda-1"


def test_ceilings_are_plausible(device: Device) -> None:
    ceilings = measure_ceilings(device)
    assert 0.3 * device.bandwidth_bytes_per_s < ceilings.copy_bytes_per_s < 1.1 * device.bandwidth_bytes_per_s
    rates = ceilings.flops_per_s
    assert rates["float16"] > rates["float32"] > 1e11
    assert ceilings.floor_ms(LARGE) is not None


def test_memory_is_kept_for_the_next_measurement_and_given_back_when_told(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 256 << 20

    def used() -> int:
        free, total = cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def measured() -> int:
        held = DeviceMemory(device.index)
        address = held.allocate(size)
        held.close()
        return address

    measured()
    before = used()
    monkeypatch.setattr(memory, "_kept_pools", None)
    memory.keep_pools()
    first = measured()
    assert used() >= before + size
    assert measured() == first  # on another stream
    other = DeviceMemory(device.index)
    assert other.free_bytes >= device.memory_bytes - used() + size - (64 << 20)
    other.close()
    memory.empty_pools()
    assert used() < before + size
    monkeypatch.setattr(memory, "_KEPT_SHARE", 2 * device.memory_bytes // size)
    measured()
    assert used() < before + size, "more than a share is not kept"
