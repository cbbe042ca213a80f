"""Python's search for garbage, which stops every thread for 0.1 s and more where PyTorch is loaded."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

from miofind.process.held_settings import HeldSetting, Holder

_RARE = 50_021
"""How many more objects there are than at the last search when Python looks for garbage again, instead of 700 or 2,000:
a plan makes a thousand, the trace of a network twenty thousand. No round number, which a program may set by itself."""

_INTERPRETERS = 1_000 if sys.version_info >= (3, 12) else 0
"""Python 3.12 has frozen 375 objects of its own before a program begins, earlier ones none; a program that freezes what
it has loaded has over 4,000 more, though it has loaded nothing yet."""


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
def without_what_is_loaded() -> Iterator[Callable[[], None]]:
    """Has garbage looked for only among what is made from now on, until the block ends.

    Where the program froze objects nothing changes: `gc.unfreeze` knows no others than all.

    Yields:
        A function that leaves out what was loaded since, too.
    """
    if gc.get_freeze_count() > _INTERPRETERS:
        yield lambda: None
        return
    try:
        gc.freeze()
        yield gc.freeze
    finally:
        gc.unfreeze()


_rare_searches = HeldSetting(
    lambda: gc.get_threshold()[0], gc.set_threshold, held=_RARE, gives_way=lambda usual: 0 < usual < _RARE
)


@contextlib.contextmanager
def with_rare_garbage_collection() -> Iterator[None]:
    """Has garbage looked for rarely until the block ends, in all threads: for what makes more objects than garbage.

    Some searches are among all objects, by how many there were before: with PyTorch and CuPy loaded one takes 0.13 s,
    and without this one falls into a program's first result. Nothing is to be measured in such a block: finds take
    seconds, in which other threads leave garbage.
    """
    block = Holder()
    try:
        _rare_searches.begin(block)
        yield
    finally:
        _rare_searches.end(block)
