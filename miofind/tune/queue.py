"""The one queue that the workers of a tuning take their problems from: inert tasks, the heaviest of a kind first.

Knows nothing of devices beyond their kind and nothing of measuring, so that a queue shared by hosts can take its place.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from miofind.tune.values import Task

MOST_LOSSES = 2
"""Devices that may be lost over one problem before it is given up."""

_LOOK_S = 0.01


class TaskQueue:
    """Tasks by kind of device. Workers take from it until it gives None.

    Args:
        tasks: in any order.
        seconds: time after which no further task is given out.
    """

    def __init__(self, tasks: Iterable[Task], *, seconds: float) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Task]] = {}
        self._in_work: dict[str, int] = {}
        self._prepared: set[Task] = set()
        self._promised: dict[str, Task] = {}
        self._closed = False
        self._deadline = time.monotonic() + seconds
        self._is_preparing: Callable[[Task], bool] = lambda task: False
        self._depth = 1
        self.out_of_time = False
        for task in sorted(tasks, key=lambda task: task.weight, reverse=True):
            self._waiting.setdefault(task.kind, deque()).append(task)

    def defer(self, is_preparing: Callable[[Task], bool], depth: int) -> None:
        """Have `take` pass over tasks that are being prepared, among the heaviest `depth` of a kind."""
        self._is_preparing, self._depth = is_preparing, depth

    def take(self, kind: str) -> Task | None:
        """The heaviest task left for a kind; None when there is none, the time is up, or the queue is closed.

        While others of the kind are at work it waits for what they may give back.
        """
        with self._changed:
            while not self._closed:
                if self._waiting.get(kind):
                    if time.monotonic() >= self._deadline:
                        self.out_of_time = True
                        return None
                    task = self._ready(kind)
                    if task is None:
                        self._changed.wait(_LOOK_S)
                        continue
                    self._waiting[kind].remove(task)
                    self._in_work[kind] = self._in_work.get(kind, 0) + 1
                    return task
                if not self._in_work.get(kind):
                    return None
                self._changed.wait()
            return None

    def promise(self, kind: str) -> Task | None:
        """Fix which task `take` gives next, and leave it where it is; None where it would wait, or give none."""
        with self._changed:
            if self._closed or not self._waiting.get(kind) or time.monotonic() >= self._deadline:
                return None
            task = self._ready(kind)
            if task is not None:
                self._promised[kind] = task
            return task

    def _ready(self, kind: str) -> Task | None:
        """The one that was promised, else the heaviest task that is not being prepared; None while all are."""
        promised = self._promised.pop(kind, None)
        if promised is not None and promised in self._waiting[kind]:
            return promised
        nearest = itertools.islice(self._waiting[kind], self._depth)
        return next((task for task in nearest if not self._is_preparing(task)), None)

    def ahead(self, kind: str, count: int) -> tuple[Task, ...]:
        """Of the next tasks, `count` a device at work, those that nobody prepares yet; they stay where they are.

        Each is given once, so that devices do not prepare the same ones.
        """
        with self._changed:
            if self._closed:
                return ()
            next_ones = itertools.islice(self._waiting.get(kind, ()), count * max(1, self._in_work.get(kind, 0)))
            found = tuple(task for task in next_ones if task not in self._prepared)
            self._prepared.update(found)
            return found

    def done(self, task: Task) -> None:
        """Note that a task that was taken is done with."""
        with self._changed:
            self._in_work[task.kind] -= 1
            self._changed.notify_all()

    def give_back(self, task: Task) -> bool:
        """Put a task whose device was lost first in line for another of its kind.

        Returns:
            False where it has cost too many devices: then it is done with.
        """
        lost = replace(task, losses=task.losses + 1)
        with self._changed:
            self._in_work[task.kind] -= 1
            again = lost.losses < MOST_LOSSES
            if again:
                self._waiting[task.kind].appendleft(lost)
            self._changed.notify_all()
            return again

    def close(self) -> None:
        """Give out nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
