"""Python's search for garbage, which stops every thread for a quarter of a second where PyTorch is loaded."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Window:
    """The block that objects are frozen for, if there is one.

    Attributes:
        is_open: held by it.
        others_freeze: whether somebody else had frozen objects. Asked for once: Python counts them one by one, 220,000
            in 23 ms.
    """

    def __init__(self) -> None:
        self.is_open = threading.Lock()
        self.others_freeze = False

    def begin(self) -> bool:
        """Freeze what there is; False, and nothing done, within such a block and where somebody else did."""
        if self.others_freeze or not self.is_open.acquire(blocking=False):
            return False
        if gc.get_freeze_count():
            self.others_freeze = True
            self.is_open.release()
            return False
        gc.freeze()
        return True

    def end(self) -> None:
        """Have all looked through again."""
        gc.unfreeze()
        self.is_open.release()


_window = _Window()


@contextlib.contextmanager
def without_what_is_loaded() -> Iterator[None]:
    """Has garbage looked for only among what is made from now on, until the block ends.

    Where somebody else froze objects nothing changes from then on: `gc.unfreeze` knows no others than all.
    """
    if not _window.begin():
        yield
        return
    try:
        yield
    finally:
        _window.end()
