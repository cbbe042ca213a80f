"""A process for each device of a tuning, since planning for several would share one interpreter's lock.

This side hands out tasks and takes reports. A process that ends by itself is replaced, and its task tried again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from miofind.compiler import processors
from miofind.process import child_logs
from miofind.process.child import Child
from miofind.runtime.handle import Handle
from miofind.runtime.solution import reordered
from miofind.tune.member import ENTRY, Ask, Ended, Post
from miofind.tune.queue import TaskQueue
from miofind.tune.values import Task, TuneOptions, TuneResult
from miofind.tune.worker import Begun, Done, Lost, Report, failed

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long processes that were told to stop may take to record what they have measured."""

SILENCE_S = 120.0
"""How long a process that says every few seconds that it lives may say nothing, before it is replaced."""

_ATTEMPTS = 3
"""Ends of a device's processes with nothing done between them, before the device is given up."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A device's part is over; `error` is what would fail the others' too."""

    error: Exception | None = None


class Crew:
    """Processes that tune what a queue has, one a device.

    Args:
        handles: one a device; their FindDBs are opened anew by the processes.
        compiles: let each process compile ahead.
        modules: imported first by each process.

    Raises:
        InvalidOptionError: a solver of a handle's registry cannot go to another process.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        options: TuneOptions,
        queue: TaskQueue,
        *,
        compiles: bool = False,
        modules: tuple[str, ...] = (),
    ) -> None:
        self._queue = queue
        self._reports: SimpleQueue[Report | _Left] = SimpleQueue()
        self._stopping = threading.Event()
        workers = max(1, processors() // len(handles)) if compiles else 0
        self._members = [
            _Member(_post(number, handle, options, workers, modules), handle, queue, self._reports.put, self._stopping)
            for number, handle in enumerate(handles)
        ]
        self._handles = tuple(handles)

    def reports(self) -> Iterator[Report]:
        """What the processes tell, until all have ended.

        Raises:
            MiofindError: what would fail every problem; the other processes are still at work.
        """
        for member in self._members:
            member.start()
        running = len(self._members)
        while running:
            report = self._reports.get()
            if not isinstance(report, _Left):
                yield self._known_here(report)
                continue
            running -= 1
            if report.error is not None:
                raise report.error

    def stop(self) -> Iterator[Report]:
        """End the processes, by force after GRACE_S; what they told of meanwhile."""
        self._stopping.set()
        self._queue.close()
        for member in self._members:
            member.interrupt()
        deadline = time.monotonic() + GRACE_S
        for member in self._members:
            member.end_by(deadline)
        while not self._reports.empty():
            report = self._reports.get()
            if not isinstance(report, _Left):
                yield self._known_here(report)

    def _known_here(self, report: Report) -> Report:
        """The report; answers that this process keeps and that it outdates are forgotten."""
        if isinstance(report, Done):
            for handle in self._handles:
                handle.forget_answers(report.task.request.problem.network_config)
        return report


def _post(number: int, handle: Handle, options: TuneOptions, workers: int, modules: tuple[str, ...]) -> Post:
    device = handle.device
    handle.registry.check_travels()
    return Post(
        number=number,
        device=replace(device, index=0) if device.uuid else device,  # it sees no other GPU
        database=str(handle.database.user.path),
        cache_directory=handle.compiler.cache.directory,
        options=options,
        compile_workers=workers,
        log_level=child_logs.level(),
        registry=handle.registry,
        modules=modules,
    )


class _Member(threading.Thread):
    """Serves one device's process, and replaces it where it ended by itself."""

    def __init__(
        self,
        post: Post,
        handle: Handle,
        queue: TaskQueue,
        tell: Callable[[Report | _Left], None],
        stopping: threading.Event,
    ) -> None:
        super().__init__(name=f"miofind-device-{post.number}", daemon=True)
        self._post = post
        self._handle = handle
        self._queue = queue
        self._tell = tell
        self._stopping = stopping
        self._child: Child | None = None
        self._task: Task | None = None
        self._fruitless = 0

    def run(self) -> None:
        """Serve processes until one has ended as it should, or too many have not."""
        error = None
        try:
            while not (self._stopping.is_set() or self._served()):
                pass  # a process that ended by itself is replaced
        except Exception as raised:  # the calling thread raises it
            error = raised
        self._tell(_Left(error))

    def interrupt(self) -> None:
        """Let the process record what it has, and end."""
        child = self._child
        if child is not None:
            child.interrupt()

    def end_by(self, deadline: float) -> None:
        """Wait for the process to end until a time of `time.monotonic`; then kill it."""
        if self.ident is None:
            return  # it was not begun
        self.join(max(0.0, deadline - time.monotonic()))
        child = self._child
        if self.is_alive() and child is not None:
            child.kill()

    def _served(self) -> bool:
        """Whether the device's part is over, once a process has ended.

        Raises:
            MiofindError: what would fail every problem.
        """
        self._child = child = Child(ENTRY, self._handle.device.uuid, [])
        if self._stopping.is_set():  # those who stop may not have seen it
            child.kill()
            return True
        is_silent = False
        try:
            with contextlib.suppress(EOFError, OSError):
                child.connection.send(self._post)
                while not (is_silent := not child.connection.poll(SILENCE_S)):
                    message = child.connection.recv()
                    if isinstance(message, Ended):
                        if message.error is not None:
                            raise message.error
                        return True
                    self._take(child, message)
            end = f"was silent for {SILENCE_S:g} s" if is_silent else f"ended with code {child.exit_code()}"
            return self._stopping.is_set() or self._ended(end)
        finally:
            child.kill()

    def _take(self, child: Child, message: object) -> None:
        if isinstance(message, Ask):
            answer = getattr(self._queue, message.what.value)(*message.arguments)
            if message.what is Ask.What.TAKE:
                self._task = answer
            elif message.what is Ask.What.GIVE_BACK:
                self._task = None
            child.connection.send(answer)
        elif isinstance(message, logging.LogRecord):
            child_logs.show(message)
        elif isinstance(message, Done):
            self._fruitless = 0
            if self._task is not None:  # else it was given back too often, and is done with
                self._queue.done(self._task)
                self._task = None
            self._tell(replace(message, result=self._ours(message.result)))
        elif isinstance(message, Begun | Lost):
            self._tell(message)

    def _ours(self, result: TuneResult) -> TuneResult:
        """A result with solutions that run here."""
        solutions = (replace(solution, device=self._handle.device) for solution in result.solutions)
        return replace(result, solutions=tuple(reordered(solutions, self._handle)))

    def _ended(self, end: str) -> bool:
        """Note a process that came to that end by itself; whether the device is given up over it."""
        told = f"the process that tuned on {self._handle.device.name} {end}"
        task, self._task = self._task, None
        if task is not None and not self._queue.give_back(task):
            self._tell(Done(device=self._post.number, task=task, result=failed(task, f"{told}, twice over it")))
        self._fruitless += 1
        if self._fruitless < _ATTEMPTS:
            logger.warning("%s: it is replaced", told)
            return False
        self._tell(Lost(device=self._post.number, message=f"{told}, {_ATTEMPTS} times"))
        return True
