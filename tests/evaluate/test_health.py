"""Health checks: what a process holds, and what a kernel of known results must give."""

from __future__ import annotations

import mmap
import queue
from dataclasses import replace

import numpy as np
import pytest
from helpers.processes.waiting import LIMIT_S

from miofind.compiler import Binary, Compiler
from miofind.device.device import Device, has_driver
from miofind.errors import CompileError
from miofind.evaluate import health
from miofind.solver.steps import KernelStep


def test_the_cpu_place_has_nothing_to_complain_of() -> None:
    assert health.complaint(Device.cpu(), Compiler()) == ""
    assert health.context_error(Device.cpu()) == ""


def test_memory_in_use_grows_with_what_is_kept() -> None:
    kept = mmap.mmap(-1, 64 << 20)  # of its own: an array may get memory that an earlier test had
    before = health.used_bytes(Device.cpu())
    kept.write(b"\1" * len(kept))
    assert health.used_bytes(Device.cpu()) - before > 48 << 20
    kept.close()


def test_the_expected_values_are_ternary_and_depend_on_the_seed() -> None:
    values = health._ternary(30_000, 20)
    counts = [int((values == value).sum()) for value in (-1, 0, 1)]
    assert sum(counts) == values.size
    assert min(counts) > 9_000
    assert (values != health._ternary(30_000, 21)).mean() > 0.5


def test_a_uuid_does_not_tell_devices_apart_in_a_finddb() -> None:
    device = Device.virtual("90a")
    assert replace(device, uuid="GPU-1") == device
    assert replace(device, uuid="GPU-1").identity == device.identity


@pytest.mark.parametrize("words", ["memory does not hold", "a kernel gives wrong"])
def test_wrong_answers_of_a_device_are_told(words: str) -> None:
    class Memory:
        stream_address = 0

        def allocate(self, size: int) -> int:
            return 0

        def set_bytes(self, address: int, value: int, size: int) -> None:
            pass

        def download(self, address: int, count: int, dtype: type) -> np.ndarray:
            holds = words.startswith("a kernel") and dtype is np.uint8
            return np.full(count, health._PATTERN if holds else 7, dtype)

    class Kernels:
        def fill(self, *_: object) -> None:
            pass

    assert words in health._complaint(Memory(), Kernels())  # type: ignore[arg-type]


def test_what_a_check_waits_for_is_begun_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails of it: the check itself meets it again."""
    device, begun = replace(Device.virtual("90a"), index=3), queue.SimpleQueue[object]()

    class Builds(Compiler):
        def build(self, step: KernelStep, arch: str) -> Binary:
            begun.put((step.source, arch))
            raise CompileError("it does not compile", source=step.source, options=(), log="")

    monkeypatch.setattr(health, "_make_context", begun.put)
    health.begin_check(Device.cpu(), Builds())
    health.begin_check(device, Builds())
    found = [begun.get(timeout=LIMIT_S) for _ in range(2)]
    assert sorted(found, key=str) == [("harness/random_inputs.cu", "90a"), 3]


@pytest.mark.skipif(has_driver(), reason="there is a driver")
def test_without_a_driver_there_is_no_context() -> None:
    with pytest.raises(OSError, match="libcuda"):
        health._make_context(0)
