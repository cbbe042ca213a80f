"""What was there before is left out where Python looks for garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from miofind.process import garbage
from miofind.process.garbage import without_what_is_loaded


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As at a program's beginning."""
    monkeypatch.setattr(garbage, "_window", garbage._Window())
    gc.unfreeze()
    yield
    gc.unfreeze()


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


@pytest.mark.parametrize("freezes", [False, True], ids=["nobody_froze", "program_froze"])
def test_frozen_objects_are_counted_once(freezes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts them one by one: with PyTorch loaded each count takes 23 ms."""
    if freezes:
        gc.freeze()
    counts: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    with without_what_is_loaded():
        for _ in range(3):
            with without_what_is_loaded():
                assert count() > 0
        assert count() > 0
    assert len(counts) == 1
    assert bool(count()) == freezes


def test_a_block_that_fails_freezes_nothing_for_good() -> None:
    with pytest.raises(KeyError), without_what_is_loaded():
        raise KeyError
    assert not gc.get_freeze_count()
    with without_what_is_loaded():
        assert gc.get_freeze_count()
