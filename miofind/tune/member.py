"""The process that tunes on one device of several: asks its parent for tasks, and reports what becomes of them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import logging.handlers
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from miofind.compiler import CompilePool
from miofind.device import Device
from miofind.errors import MiofindError
from miofind.handle import Handle
from miofind.sandbox.entry import end_with_parent
from miofind.tune.ahead import Ahead
from miofind.tune.values import Task, TuneOptions
from miofind.tune.worker import Worker

ENTRY = "import sys; from miofind.tune.member import main; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a process is there for; the first message to it.

    Attributes:
        number: the device's, in reports.
        device: as the process sees it.
        database: path of the user FindDB.
        compile_workers: processes that compile ahead; 0 for none.
        log_level: of what is logged here and handled by the parent.
        modules: imported first, for solvers registered by import.
    """

    number: int
    device: Device
    database: str
    options: TuneOptions
    compile_workers: int
    log_level: int
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the parent's queue, which it answers."""

    class What(StrEnum):
        """The queue's methods that may be called."""

        TAKE = "take"
        NEXT = "next"
        DONE = "done"
        GIVE_BACK = "give_back"

    what: What
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message; `error` is what would fail every problem here as elsewhere."""

    error: MiofindError | None = None


class _Line:
    """This end of the connection: threads that log write to it, too. The parent's queue, as a worker sees it."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message."""
        with self._lock:
            self._connection.send(message)

    def take(self, kind: str) -> Task | None:
        """See `TaskQueue.take`."""
        task: Task | None = self._asked(Ask.What.TAKE, kind)
        return task

    def next(self, kind: str) -> Task | None:
        """See `TaskQueue.next`."""
        task: Task | None = self._asked(Ask.What.NEXT, kind)
        return task

    def done(self, task: Task) -> None:
        """See `TaskQueue.done`."""
        self._asked(Ask.What.DONE, task)

    def give_back(self, task: Task) -> bool:
        """See `TaskQueue.give_back`."""
        return bool(self._asked(Ask.What.GIVE_BACK, task))

    def _asked(self, what: Ask.What, *arguments: object) -> Any:
        """The answer to a question; the worker's thread alone asks."""
        self.send(Ask(what, arguments))
        return self._connection.recv()


class _ToParent(logging.handlers.QueueHandler):
    """Hands log records to the parent, which knows how to show them."""

    def __init__(self, line: _Line) -> None:
        super().__init__(line)  # type: ignore[arg-type]  # only `enqueue` uses it
        self._line = line

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record; once the parent has gone there is nobody to read it."""
        with contextlib.suppress(OSError):
            self._line.send(record)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end what is measured as Ctrl-C ends it in the parent; a second one changes nothing."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        yield


def main(arguments: list[str]) -> None:
    """Entry: the connection's file descriptor."""
    end_with_parent()
    os.dup2(2, 1)  # what solvers print must not stand among the parent's results
    connection: Connection[Any, Any] = Connection(int(arguments[0]))
    line = _Line(connection)
    # The parent has gone where the connection is closed.
    with contextlib.suppress(EOFError, ConnectionError), _terminable():
        post: Post = connection.recv()
        logging.getLogger("miofind").setLevel(post.log_level)
        logging.getLogger("miofind").addHandler(_ToParent(line))
        logging.getLogger("miofind").propagate = False
        for name in post.modules:
            importlib.import_module(name)
        try:
            _work(post, line)
        except MiofindError as error:
            line.send(Ended(error))
        else:
            line.send(Ended())


def _work(post: Post, line: _Line) -> None:
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(Handle(post.device, database=post.database, strict=True))
        ahead = None
        if post.compile_workers:
            pool = stack.enter_context(CompilePool(workers=post.compile_workers, modules=post.modules))
            ahead = Ahead(pool, post.options.find)
            stack.callback(ahead.close)
        Worker(post.number, handle, post.options, line, ahead=ahead, tell=line.send).run()
