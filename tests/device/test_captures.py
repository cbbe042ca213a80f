"""What threads may do while somebody captures a CUDA graph, with a stand-in for the driver."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from miofind.compiler.load import LoadedFunction
from miofind.device import captures
from miofind.device.captures import captures_undisturbed
from miofind.libraries.cudnn_backend import Descriptor

GLOBAL, RELAXED = 0, 2


class Driver:
    """Has a thread's mode."""

    def __init__(self) -> None:
        self.mode, self.status = GLOBAL, 0

    def exchange(self, reference: Any) -> int:
        if self.status == 0:
            asked = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int)).contents
            self.mode, asked.value = asked.value, self.mode
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(captures, "_exchange", lambda: made.exchange)
    return made


def test_the_mode_is_the_one_before_afterwards(driver: Driver) -> None:
    with captures_undisturbed():
        assert driver.mode == RELAXED
        with captures_undisturbed():
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == GLOBAL


def raise_in_block() -> None:
    with captures_undisturbed():
        raise ValueError("of the block")


def test_it_is_so_after_an_error(driver: Driver) -> None:
    with pytest.raises(ValueError, match="of the block"):
        raise_in_block()
    assert driver.mode == GLOBAL


def test_the_block_runs_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_exchange", lambda: None)
    ran = []
    with captures_undisturbed():
        ran.append(1)
    assert ran


def test_a_mode_that_the_driver_did_not_change_is_not_changed_back(driver: Driver) -> None:
    driver.status = 201  # cuda.h: CUDA_ERROR_INVALID_CONTEXT
    with captures_undisturbed():
        driver.status = 0
    assert driver.mode == GLOBAL


def loaded(note: Callable[[], None]) -> object:
    class Function:
        def __del__(self) -> None:
            note()

    made = LoadedFunction(None)
    made.function = Function()  # made last: a collection runs finalizers from the oldest on, and CuPy's has none
    return made


def described(note: Callable[[], None]) -> object:
    descriptor = Descriptor.__new__(Descriptor)
    descriptor.pointer = 1
    descriptor._library = SimpleNamespace(destroy=lambda pointer: note())  # type: ignore[assignment]
    return descriptor


@pytest.mark.parametrize("make", [loaded, described])
@pytest.mark.parametrize("in_cycle", [False, True])
def test_what_is_collected_unloads_undisturbed(
    make: Callable[[Callable[[], None]], object], in_cycle: bool, driver: Driver
) -> None:
    modes: list[int] = []
    owner = SimpleNamespace(held=make(lambda: modes.append(driver.mode)))
    if in_cycle:
        owner.itself = owner
    del owner
    gc.collect()
    assert modes == [RELAXED]
    assert driver.mode == GLOBAL
