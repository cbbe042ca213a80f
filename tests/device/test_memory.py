"""Device memory that a process keeps: given out again once nothing uses it, and a share of what is free at most."""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from miofind.device import memory
from miofind.device.device import Device
from miofind.device.memory import DeviceMemory
from miofind.evaluate import health

TOTAL = 80 << 30
GIB = 1 << 30


class CudaError(RuntimeError):
    """Stands in for CuPy's errors."""


@dataclass
class FakeCupy:
    """A device, of whose memory others hold some."""

    others: int = 0
    pools: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return TOTAL - self.others - sum(pool.total_bytes() for pool in self.pools)

    def pool(self) -> SimpleNamespace:
        held: set[int] = set()
        sizes: dict[int, int] = {}
        numbers = itertools.count(512, 512)

        class Block:
            def __init__(self, size: int) -> None:
                kept = [at for at in sizes if at not in held and sizes[at] >= size]
                self.ptr = kept[0] if kept else next(numbers)
                sizes.setdefault(self.ptr, size)
                held.add(self.ptr)

            def __del__(self) -> None:
                held.discard(self.ptr)

        def free_all_blocks() -> None:
            for at in set(sizes) - held:
                del sizes[at]

        made = SimpleNamespace(
            malloc=Block,
            free_all_blocks=free_all_blocks,
            total_bytes=lambda: sum(sizes.values()),
            free_bytes=lambda: sum(size for at, size in sizes.items() if at not in held),
        )
        self.pools.append(made)
        return made

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            ptr=1,
            synchronize=lambda: self.events.append(f"{name} is waited for"),
            record=lambda: None,
            wait_event=lambda event: None,
            begin_capture=lambda: self.events.append(f"{name} captures"),
            end_capture=lambda: self.graph(name),
        )

    def graph(self, name: str) -> SimpleNamespace:
        self.events.append(f"{name} has captured")
        return SimpleNamespace(launch=lambda stream: self.events.append("the graph is launched"))

    def module(self) -> SimpleNamespace:
        names = itertools.count()
        runtime = SimpleNamespace(memGetInfo=lambda: (self.free, TOTAL), CUDARuntimeError=CudaError)

        def stream(*, non_blocking: bool) -> SimpleNamespace:
            return self.stream(f"stream {next(names)}")

        stream.null = contextlib.nullcontext()  # type: ignore[attr-defined]
        return SimpleNamespace(
            cuda=SimpleNamespace(
                Device=lambda index: contextlib.nullcontext(),
                MemoryPool=self.pool,
                Stream=stream,
                runtime=runtime,
                driver=SimpleNamespace(CUDADriverError=CudaError),
                memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            )
        )


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """CuPy in a process that keeps memory."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake.module())  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "_kept_pools", {})
    return fake


def measure(size: int) -> None:
    held = DeviceMemory(0)
    held.allocate(size)
    held.close()


def test_a_share_of_what_others_leave_is_kept(cupy: FakeCupy) -> None:
    """Libraries and drivers take memory of their own, which the pool does not give them."""
    measure(8 * GIB)
    assert cupy.free == TOTAL - 8 * GIB
    memory.empty_pools()
    cupy.others = 70 * GIB
    measure(8 * GIB)
    assert cupy.free == TOTAL - cupy.others
    measure(GIB)
    assert cupy.free == TOTAL - cupy.others - GIB


def test_what_is_kept_is_not_in_use(cupy: FakeCupy) -> None:
    """Else what a failing allocation gave back would hide what a candidate holds."""
    device = replace(Device.virtual("90a"), index=0)
    measure(4 * GIB)
    assert health.used_bytes(device) == 0
    cupy.others = GIB
    memory.empty_pools()
    assert health.used_bytes(device) == GIB


@pytest.mark.parametrize("is_closed", [False, True], ids=["left", "closed"])
def test_both_streams_are_waited_for_before_memory_is_given_out_again(cupy: FakeCupy, is_closed: bool) -> None:
    """A block beside the first stream that raises leaves work on the second, of which the first knows nothing."""
    held = DeviceMemory(0)
    with contextlib.suppress(KeyError), held, held.beside():
        raise KeyError("a launch failed")
    if is_closed:
        cupy.events.clear()
        held.close()
    assert cupy.events == ["stream 0 is waited for", "stream 1 is waited for"]


def test_what_is_captured_runs_when_its_graph_is_launched(cupy: FakeCupy) -> None:
    held = DeviceMemory(0)
    graph = held.graph_of(lambda: cupy.events.append("launches"))
    assert cupy.events == ["stream 0 captures", "launches", "stream 0 has captured"]
    graph.launch(held.stream)
    assert cupy.events[-1] == "the graph is launched"


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "the driver tells of it once more"])
def test_a_capture_ends_where_what_is_captured_raises(cupy: FakeCupy, ends: bool) -> None:
    def fail() -> None:
        raise KeyError("a launch failed")

    def refuse() -> None:
        cupy.events.append("stream 0 has captured")
        raise CudaError("the capture was invalidated")

    held = DeviceMemory(0)
    if not ends:
        held.stream.end_capture = refuse
    with pytest.raises(KeyError):
        held.graph_of(fail)
    assert cupy.events == ["stream 0 captures", "stream 0 has captured"]
