"""Where Python looks for no garbage, or leaves out what was there before."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from miofind.process.garbage import without_garbage_collection, without_what_is_loaded
from miofind.solver.registry import Registry


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As at a program's beginning."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_looked_for_afterwards_as_it_was_before(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError), without_garbage_collection(), without_garbage_collection():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_solvers_are_imported_without_a_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """One among all objects of PyTorch and of a network takes 0.1 s."""
    registry = Registry()
    registry._indexed = Registry.default().facts
    enabled: list[bool] = []
    real = importlib.import_module

    def noted(name: str) -> ModuleType:
        enabled.append(gc.isenabled())
        return real(name)

    monkeypatch.setattr(importlib, "import_module", noted)
    assert registry["ConvWinograd"].id == "ConvWinograd"
    assert enabled == [False]
    assert gc.isenabled()


def test_what_was_there_is_looked_at_again_afterwards() -> None:
    before, left_over = _Cycle(), _Cycle()
    there = weakref.ref(left_over)
    with without_what_is_loaded():
        del left_over
        new = weakref.ref(_Cycle())
        gc.collect()
        assert new() is None
        assert there() is not None
        assert not any(each is before for each in gc.get_objects())
    gc.collect()
    assert there() is None
    assert any(each is before for each in gc.get_objects())


def test_what_the_program_froze_itself_stays_frozen() -> None:
    """As servers do before they fork, so that their children share the memory of what was loaded."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    with without_what_is_loaded(), without_what_is_loaded():
        pass
    assert gc.get_freeze_count() == frozen
