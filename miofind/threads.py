"""Work in threads that hold up no end of Python: results in the order of what was given, all of it begun at once.

`concurrent.futures` takes no work once the main thread has returned, and makes the process wait for what it has begun:
a second Ctrl-C then leaves a traceback.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], workers: int, name: str) -> Results[Result]:
    """What `work` makes of each item, in their order; closing the iterator cancels what has not begun.

    Where no thread can be had the caller's does the work.

    Raises:
        BaseException: what `work` raises, when it is the item's turn.
    """
    line = Results(work, items)
    begun = 0
    for _ in range(0 if sys.is_finalizing() else min(workers, len(items))):  # a thread begun then never starts
        try:
            threading.Thread(target=line.work_off, name=name, daemon=True).start()
        except RuntimeError:  # the process has too many, or is ending
            break
        begun += 1
    line.is_helped = begun > 0
    return line


class Results(Iterator[Result]):
    """What becomes of items, in their order.

    Attributes:
        is_helped: whether threads work; whoever asks for the next result does else.
    """

    def __init__(self, work: Callable[[Any], Result], items: Sequence[Any]) -> None:
        self.is_helped = False
        self._work = work
        futures: list[Future[Result]] = [Future() for _ in items]
        self._waiting = collections.deque(zip(items, futures, strict=True))
        self._left = iter(futures)

    def __next__(self) -> Result:
        try:
            future = next(self._left)
            if not self.is_helped:
                self._work_on_next()
            return future.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Begin no further work."""
        self._waiting.clear()

    def work_off(self) -> None:
        """Do what waits until nothing does."""
        while self._work_on_next():
            pass

    def _work_on_next(self) -> bool:
        """Whether there was something to do."""
        try:
            item, future = self._waiting.popleft()
        except IndexError:
            return False
        try:
            result = self._work(item)
        except BaseException as error:  # who waits for it is to have it
            future.set_exception(error)
        else:
            future.set_result(result)
        return True


class Helper:
    """A thread that does what it is given, one thing after another; started when it is first needed.

    What it is given raises nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Have something done soon; never where no thread can be had."""
        if self._thread is None:
            if sys.is_finalizing():  # a thread begun now never starts
                return
            thread = threading.Thread(target=self._work_off, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process has too many, or is ending
                return
            self._thread = thread
        self._waiting.put(work)

    def give_up(self) -> None:
        """Do nothing more than what has begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put(None)

    def finish(self) -> None:
        """Wait until all is done; then do nothing more."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work_off(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
