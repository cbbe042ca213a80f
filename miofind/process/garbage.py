"""Python's search for garbage, which stops every thread for 0.1 s and more where PyTorch is loaded."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

from miofind.process.forks import follow_forks

_RARE = 50_021
"""How many more objects there are than at the last search when Python looks for garbage again, instead of 700 or 2,000:
a plan makes a thousand, the trace of a network twenty thousand. No round number, which a program may set by itself."""


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


class _Block:
    """One thread's block, for as long as its frame lives."""


class _RareSearches:
    """What makes Python's searches rare while any thread is in a block that asks for it.

    It has no lock: one that Ctrl-C leaves held stops every thread that plans. What is interrupted in here the end of
    the next block puts right, and of threads that meet one may search as ever.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, weakref.ref[_Block]] = {}
        self._usual = 0
        follow_forks(self)

    def leave_parent(self) -> None:
        """End the blocks of threads that a forked child does not have, and the one that it was forked in."""
        self._blocks.clear()
        self._restore()

    def begin(self, block: _Block) -> None:
        """Begin a block."""
        self._blocks[id(block)] = weakref.ref(block)
        usual = gc.get_threshold()[0]
        if len(self._blocks) == 1 and 0 < usual < _RARE:
            self._usual = usual
            gc.set_threshold(_RARE)

    def end(self, block: _Block) -> None:
        """End a block, and with the last one have Python look for garbage as often as before."""
        self._blocks.pop(id(block), None)
        for name, each in list(self._blocks.items()):
            if each() is None:  # its end was interrupted
                self._blocks.pop(name, None)
        if not self._blocks:
            self._restore()

    def _restore(self) -> None:
        if gc.get_threshold()[0] == _RARE and self._usual:  # else the program has set another one meanwhile
            gc.set_threshold(self._usual)


_rare_searches = _RareSearches()


@contextlib.contextmanager
def with_rare_garbage_collection() -> Iterator[None]:
    """Has garbage looked for rarely until the block ends, in all threads: for what makes more objects than garbage.

    Some searches are among all objects, by how many there were before: with PyTorch and CuPy loaded one takes 0.13 s,
    and without this one falls into a program's first result. Nothing is to be measured in such a block: finds take
    seconds, in which other threads leave garbage.
    """
    block = _Block()
    try:
        _rare_searches.begin(block)
        yield
    finally:
        _rare_searches.end(block)
