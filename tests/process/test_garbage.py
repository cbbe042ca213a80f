"""What was there before is left out where Python looks for garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from miofind.process.garbage import without_what_is_loaded


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As at a program's beginning."""
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
