"""The process that tunes on one device of several: asks its parent for tasks, and reports what becomes of them."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from miofind.compiler import BinaryCache, CompilePool, Compiler
from miofind.device.device import Device
from miofind.process.interrupts import INTERRUPTED, terminable
from miofind.process.parent import Parent
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.tune.precompiler import Precompiler
from miofind.tune.values import Task, TuneOptions
from miofind.tune.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcessSetup:
    """What a process is there for.

    Attributes:
        number: the device's, in events.
        device: as the process sees it.
        database: address of the user FindDB, which may hold a password.
        cache: of binaries; what compiles ahead asks all of it, the measuring thread what is on this host.
        compile_workers: processes that compile ahead; 0 for none.
        registry: the parent's solvers.
    """

    number: int
    device: Device
    database: str = field(repr=False)
    cache: BinaryCache
    options: TuneOptions
    compile_workers: int
    registry: Registry


@dataclass(frozen=True, slots=True)
class QueueCall:
    """A call of the parent's queue, which answers with what that returns."""

    class Method(StrEnum):
        """The queue's methods that may be called."""

        TAKE = "take"
        AHEAD = "ahead"
        GIVE_BACK = "give_back"

    method: Method
    arguments: tuple[Any, ...]


class _RemoteQueue:
    """The parent's queue, as a worker sees it, at the other end of the connection; the worker's thread alone asks."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    def take(self, kind: str) -> Task | None:
        """See `TaskQueue.take`."""
        task: Task | None = self._asked(QueueCall.Method.TAKE, kind)
        return task

    def promise(self, kind: str) -> Task | None:
        """None: any device may take the next task."""
        return None

    def ahead(self, kind: str, count: int) -> tuple[Task, ...]:
        """See `TaskQueue.ahead`."""
        tasks: tuple[Task, ...] = self._asked(QueueCall.Method.AHEAD, kind, count)
        return tasks

    def done(self, task: Task) -> None:
        """See `TaskQueue.done`: the parent notes it with the event, so that no end of this process parts the two."""

    def give_back(self, task: Task) -> bool:
        """See `TaskQueue.give_back`."""
        return bool(self._asked(QueueCall.Method.GIVE_BACK, task))

    def close(self) -> None:
        """See `TaskQueue.close`: the parent's to do."""

    def _asked(self, method: QueueCall.Method, *arguments: object) -> Any:
        self._parent.send(QueueCall(method, arguments))
        return self._parent.receive()


def serve(parent: Parent, setup: DeviceProcessSetup) -> None:
    """Tune what the parent's queue has for a device. SIGTERM ends it as Ctrl-C ends a tuning: what came is recorded.

    Raises:
        MiofindError: what would fail every problem here as elsewhere.
    """
    try:
        with terminable():
            _work(parent, setup)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _work(parent: Parent, setup: DeviceProcessSetup) -> None:
    with contextlib.ExitStack() as stack:
        compiler = Compiler(setup.cache.local)
        handle = stack.enter_context(
            Handle(setup.device, database=setup.database, strict=True, compiler=compiler, registry=setup.registry)
        )
        precompiler = None
        if setup.compile_workers:
            pool = stack.enter_context(CompilePool(setup.cache, workers=setup.compile_workers))
            precompiler = Precompiler(pool, setup.options)
            stack.callback(precompiler.close)
        parent.ready()
        queue = _RemoteQueue(parent)
        Worker(setup.number, handle, setup.options, queue, precompiler=precompiler, tell=parent.send).run()
