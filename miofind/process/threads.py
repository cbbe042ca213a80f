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
    for _ in range(min(workers, len(items))):
        if _begun(line.work_off, name) is None:
            break
        line.is_helped = True
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

    def submit(self, work: Callable[[], object]) -> bool:
        """Have something done soon; whether it will be: never where no thread can be had."""
        self._thread = self._thread or _begun(self._work_off, self._name)
        if self._thread is not None:
            self._waiting.put(work)
        return self._thread is not None

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


def _begun(work: Callable[[], object], name: str) -> threading.Thread | None:
    """A thread that has begun its work; None where none can be had."""
    if sys.is_finalizing():  # a thread begun now never starts
        return None
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process has too many, or is ending
        return None
    return thread
