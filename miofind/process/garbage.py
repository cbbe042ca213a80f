"""Python's search for garbage, which stops every thread for 0.1 s and more where PyTorch is loaded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from miofind.process.forks import ForkedLock, follow_forks

_RARE = 50_000
"""How many more objects there are than at the last search when Python looks for garbage again, instead of 700 or 2,000:
a plan makes a thousand, the trace of a network twenty thousand."""


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Has no garbage looked for until the block ends: for imports, which are short and leave none.

    A search among what they made alone would have the next one among all objects come early: it waits for a quarter
    more of them than the last one found.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_what_is_loaded() -> Iterator[None]:
    """Has garbage looked for only among what is made from now on, until the block ends.

    Where somebody else froze objects nothing changes: `gc.unfreeze` knows no others than all.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _RareSearches:
    """What makes Python's searches rare while any thread is in a block that asks for it."""

    def __init__(self) -> None:
        self._lock = ForkedLock()
        self._blocks = 0
        self._usual = 0
        follow_forks(self)

    def leave_parent(self) -> None:
        """End the blocks of threads that a forked child does not have; one that it was forked in ends once more."""
        self._end_all()

    def begin(self) -> None:
        """Begin a block."""
        with self._lock:
            self._blocks += 1
            usual = gc.get_threshold()[0]
            if self._blocks == 1 and 0 < usual < _RARE:
                self._usual = usual
                gc.set_threshold(_RARE)

    def end(self) -> None:
        """End a block, and with the last one have Python look for garbage as often as before."""
        with self._lock:
            self._blocks -= 1
            if self._blocks <= 0:
                self._end_all()

    def _end_all(self) -> None:
        usual, self._usual = self._usual, 0
        self._blocks = 0
        if usual and gc.get_threshold()[0] == _RARE:  # else the program has set another one meanwhile
            gc.set_threshold(usual)


_rare_searches = _RareSearches()


@contextlib.contextmanager
def with_rare_garbage_collection() -> Iterator[None]:
    """Has garbage looked for rarely until the block ends, in all threads: for what makes more objects than garbage.

    Some searches are among all objects, by how many there were before: with PyTorch and CuPy loaded one takes 0.13 s,
    and without this one falls into a program's first result. Nothing is to be measured in such a block: finds take
    seconds, in which other threads leave garbage.
    """
    try:
        _rare_searches.begin()
        yield
    finally:
        _rare_searches.end()
