"""Python's search for garbage, which stops every thread for a quarter of a second where PyTorch is loaded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
