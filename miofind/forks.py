"""Locks in a forked child: threads of its parent held some of them when it was forked, and none is there to let go."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Forkable(Protocol):
    """What makes its locks anew in a forked child."""

    def leave_parent(self) -> None:
        """Part with what belongs to the process this one was forked from, its threads and their locks above all."""


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def follow_forks(owner: Forkable) -> None:
    """Have `leave_parent` called in every child that this process is forked into, as long as its owner lives."""
    _known.add(owner)


_loading = threading.RLock()


@contextmanager
def loading() -> Iterator[None]:
    """Other threads' forks wait meanwhile: Python's locks of modules that are being imported cannot be made anew."""
    with _loading:
        yield


def _leave_parent() -> None:
    for owner in list(_known):
        owner.leave_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)
    os.register_at_fork(after_in_child=_leave_parent)
