"""A process for each device of a tuning, since planning for several would share one interpreter's lock.

This side hands out tasks and takes events. A process that ends by itself is replaced, and its task tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from miofind.compiler import processors
from miofind.process.child import ChildExit
from miofind.process.protocol import Failed, Finished
from miofind.process.restarts import ATTEMPTS, Restarts
from miofind.process.service import End, Service, Silence
from miofind.runtime.handle import Handle
from miofind.runtime.solution import reordered
from miofind.tune.device_process import DeviceProcessSetup, QueueCall, serve
from miofind.tune.values import Task, TuneFinished, TuneLost, TuneOptions, TuneResult, TuneStarted, WorkerEvent
from miofind.tune.worker import Tasks, failed

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long processes that were told to stop may take to record what they have measured."""

SILENCE_S = 120.0
"""How long a process may give no sign of life before it is replaced; it gives one every few seconds."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A device's part is over; `error` is what would fail the others' too."""

    error: Exception | None = None


class DeviceProcesses:
    """Processes that tune what a queue has, one a device.

    Args:
        handles: one a device; their FindDBs are opened anew by the processes.
        compiles: let each process compile ahead.
        share: how many sets of such processes share this host's processors.

    Raises:
        InvalidOptionError: a solver of a handle's registry cannot go to another process.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        options: TuneOptions,
        queue: Tasks,
        *,
        compiles: bool = False,
        share: int = 1,
    ) -> None:
        self._queue = queue
        self._events: SimpleQueue[WorkerEvent | _Left] = SimpleQueue()
        self._stopping = threading.Event()
        workers = max(1, processors() // (share * len(handles))) if compiles else 0
        self._threads = [
            _DeviceThread(_setup(number, handle, options, workers), handle, queue, self._events.put, self._stopping)
            for number, handle in enumerate(handles)
        ]
        self._handles = tuple(handles)

    def events(self) -> Iterator[WorkerEvent]:
        """What the processes tell, until all have ended.

        Raises:
            MiofindError: what would fail every problem; the other processes are still at work.
        """
        for thread in self._threads:
            thread.start()
        running = len(self._threads)
        while running:
            event = self._events.get()
            if not isinstance(event, _Left):
                yield self._known_here(event)
                continue
            running -= 1
            if event.error is not None:
                raise event.error

    def stop(self) -> Iterator[WorkerEvent]:
        """End the processes, by force after GRACE_S; what they told of meanwhile."""
        self._stopping.set()
        self._queue.close()
        for thread in self._threads:
            thread.interrupt()
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.end_by(deadline)
        while not self._events.empty():
            event = self._events.get()
            if not isinstance(event, _Left):
                yield self._known_here(event)

    def _known_here(self, event: WorkerEvent) -> WorkerEvent:
        """The event; answers that this process keeps and that it outdates are forgotten."""
        if isinstance(event, TuneFinished):
            for handle in self._handles:
                handle.forget_answers(event.task.problem.network_config)
        return event


def _setup(number: int, handle: Handle, options: TuneOptions, workers: int) -> DeviceProcessSetup:
    device = handle.device
    handle.registry.check_travels()
    return DeviceProcessSetup(
        number=number,
        device=replace(device, index=0) if device.uuid else device,  # it sees no other GPU
        database=handle.database.user.address,
        cache=handle.compiler.cache,
        options=options,
        compile_workers=workers,
        registry=handle.registry,
    )


class _DeviceThread(threading.Thread):
    """Serves one device's process, and replaces it where it ended by itself."""

    _serve = staticmethod(serve)  # what the process does; tests put a faulty service in its place

    def __init__(
        self,
        setup: DeviceProcessSetup,
        handle: Handle,
        queue: Tasks,
        tell: Callable[[WorkerEvent | _Left], None],
        stopping: threading.Event,
    ) -> None:
        super().__init__(name=f"miofind-device-{setup.number}", daemon=True)
        self._setup = setup
        self._tuning_handle = handle  # a thread has a `_handle` of its own from Python 3.13 on
        self._queue = queue
        self._tell = tell
        self._stopping = stopping
        self._process: Service | None = None
        self._task: Task | None = None
        self._restarts = Restarts()

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
        process = self._process
        if process is not None:
            process.interrupt()

    def end_by(self, deadline: float) -> None:
        """Wait for the process to end until a time of `time.monotonic`; then kill it."""
        if self.ident is None:
            return  # it was not begun
        self.join(max(0.0, deadline - time.monotonic()))
        process = self._process
        if self.is_alive() and process is not None:
            process.kill()

    def _served(self) -> bool:
        """Whether the device's part is over, once a process has ended.

        Raises:
            MiofindError: what would fail every problem.
        """
        setup, uuid = self._setup, self._tuning_handle.device.uuid
        self._process = process = Service(self._serve, setup, gpu=uuid, silence_s=SILENCE_S)
        if self._stopping.is_set():  # those who stop may not have seen it
            process.kill()
            return True
        try:
            end = process.await_ready()
            while end is None:
                message = process.receive()
                if isinstance(message, Finished):
                    return True
                if isinstance(message, ChildExit | Silence | Failed):
                    end = message
                else:
                    self._take(process, message)
            if isinstance(end, Failed) and end.error is not None:
                raise end.error
            return self._stopping.is_set() or self._ended(end)
        finally:
            process.kill()

    def _take(self, process: Service, message: object) -> None:
        match message:
            case QueueCall():
                answer = getattr(self._queue, message.method.value)(*message.arguments)
                if message.method is QueueCall.Method.TAKE:
                    self._task = answer
                elif message.method is QueueCall.Method.GIVE_BACK:
                    self._task = None
                process.send(answer)
            case TuneFinished():
                self._restarts.progressed()
                if self._task is not None:  # else it was given back too often, and is done with
                    self._queue.done(self._task)
                    self._task = None
                self._tell(replace(message, result=self._ours(message.result)))
            case TuneStarted() | TuneLost():
                self._tell(message)

    def _ours(self, result: TuneResult) -> TuneResult:
        """A result with solutions that run here."""
        solutions = (replace(solution, device=self._tuning_handle.device) for solution in result.solutions)
        return replace(result, solutions=tuple(reordered(solutions, self._tuning_handle)))

    def _ended(self, end: End) -> bool:
        """Note a process that came to that end by itself; whether the device is given up over it."""
        how = f"failed: {end.message}" if isinstance(end, Failed) else end.message
        told = f"the process that tuned on {self._tuning_handle.device.name} {how}"
        task, self._task = self._task, None
        number = self._setup.number
        if task is not None and not self._queue.give_back(task):
            self._tell(TuneFinished(device=number, task=task, result=failed(task, f"{told}, twice over it")))
        if not self._restarts.ended():
            logger.warning("%s: it is replaced", told)
            return False
        self._tell(TuneLost(device=number, message=f"{told}, {ATTEMPTS} times"))
        return True
