"""The process that tunes on one device of several: asks its parent for tasks, and reports what becomes of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from miofind.compiler import BinaryCache, CompilePool, Compiler
from miofind.device.device import Device
from miofind.errors import InvalidOptionError, MiofindError
from miofind.evaluate.entry import end_with_parent
from miofind.process import child_logs
from miofind.process.child import Line
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.tune.ahead import Ahead
from miofind.tune.values import Task, TuneOptions
from miofind.tune.worker import Worker

BEAT_S = 10.0

ENTRY = "import sys; from miofind.tune.member import main; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a process is there for; the first message to it.

    Attributes:
        number: the device's, in reports.
        device: as the process sees it.
        database: path of the user FindDB.
        cache_directory: of the binary cache; None for the user's.
        compile_workers: processes that compile ahead; 0 for none.
        log_level: of what is logged here and handled by the parent.
        registry: the parent's solvers.
        modules: imported first.
    """

    number: int
    device: Device
    database: str
    cache_directory: Path | None
    options: TuneOptions
    compile_workers: int
    log_level: int
    registry: Registry
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the parent's queue, which it answers."""

    class What(StrEnum):
        """The queue's methods that may be called."""

        TAKE = "take"
        NEXT = "next"
        GIVE_BACK = "give_back"

    what: What
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """Sent every BEAT_S, so that a process that was stopped or hangs is told from one at work."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message; `error` is what would fail every problem here as elsewhere."""

    error: MiofindError | None = None


class _Queue(Line):
    """The parent's queue, as a worker sees it, at the other end of the connection."""

    def take(self, kind: str) -> Task | None:
        """See `TaskQueue.take`."""
        task: Task | None = self._asked(Ask.What.TAKE, kind)
        return task

    def next(self, kind: str) -> Task | None:
        """See `TaskQueue.next`."""
        task: Task | None = self._asked(Ask.What.NEXT, kind)
        return task

    def done(self, task: Task) -> None:
        """See `TaskQueue.done`: the parent notes it with the report, so that no end of this process parts the two."""

    def give_back(self, task: Task) -> bool:
        """See `TaskQueue.give_back`."""
        return bool(self._asked(Ask.What.GIVE_BACK, task))

    def _asked(self, what: Ask.What, *arguments: object) -> Any:
        """The answer to a question; the worker's thread alone asks."""
        self.send(Ask(what, arguments))
        return self.receive()


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
    line = _Queue(connection)
    # The parent has gone where the connection is closed.
    with contextlib.suppress(EOFError, ConnectionError), _terminable():
        post: Post = connection.recv()
        threading.Thread(target=_beat, args=(line,), name="miofind-beat", daemon=True).start()
        child_logs.hand_over(line.send, post.log_level)
        try:
            _import(post.modules)
            _work(post, line)
        except MiofindError as error:
            line.send(Ended(error))
        else:
            line.send(Ended())


def _beat(line: _Queue) -> None:
    """Say again and again that this process lives, as long as anybody hears it."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(BEAT_S)
            line.send(Alive())


def _import(modules: tuple[str, ...]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises, the others of the crew would meet it, too
            raise InvalidOptionError(f"modules: {name!r} cannot be imported: {error!r}") from error


def _work(post: Post, line: _Queue) -> None:
    with contextlib.ExitStack() as stack:
        cache = BinaryCache(post.cache_directory)
        compiler = Compiler(cache)
        handle = stack.enter_context(
            Handle(post.device, database=post.database, strict=True, compiler=compiler, registry=post.registry)
        )
        ahead = None
        if post.compile_workers:
            pool = stack.enter_context(CompilePool(cache, workers=post.compile_workers, modules=post.modules))
            ahead = Ahead(pool, post.options.find)
            stack.callback(ahead.close)
        Worker(post.number, handle, post.options, line, ahead=ahead, tell=line.send).run()
