"""Locks in a forked child: threads of its parent held some of them when it was forked, and none is there to let go."""

from __future__ import annotations

import functools
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


class ForkedLock:
    """A lock for with blocks that whoever holds it may take again, and that a forked child finds free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        follow_forks(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # not where the block itself was forked
            self._lock.release()

    def leave_parent(self) -> None:
        """Make the lock anew."""
        self._lock = threading.RLock()


_loading = threading.RLock()
_held: list[bool] = []
# How long a fork waits: a second or two is what imports take.
_PATIENCE_S = 60.0


class _AwaitedByForks(threading.local):
    """With blocks of a thread that hold a lock of their own for which forks wait.

    `loading` takes none within: a fork that has it waits for the block.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


awaited_by_forks = _AwaitedByForks()


@contextmanager
def loading() -> Iterator[None]:
    """Other threads' forks wait meanwhile: Python's locks of modules that are being imported cannot be made anew."""
    if awaited_by_forks.depth > 0:
        yield
        return
    with _loading:
        yield


def _begin_fork() -> None:
    _held.append(_loading.acquire(timeout=_PATIENCE_S))


def _end_fork() -> None:
    if _held and _held.pop():  # Ctrl-C may have come between
        _loading.release()


def _leave_parent() -> None:
    for owner in list(_known):
        owner.leave_parent()


@functools.cache
def wait_for_imports() -> None:
    """Have forks wait for `loading` before all that was registered until now: that sees what was loaded, then."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)
