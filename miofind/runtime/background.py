"""Kernels that are compiled beside the program, by processes of their own, for who can do without them meanwhile."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from miofind.compiler.build import Compiler, processors
from miofind.compiler.pool import CompilePool
from miofind.compiler.worker import Answer
from miofind.device.device import Device
from miofind.errors import described
from miofind.process.forks import follow_forks
from miofind.solver.steps import KernelStep

logger = logging.getLogger(__name__)

_IDLE_S = 10.0
"""How long the processes, of 40 MB each, stay when there is nothing to compile."""

_compilers: weakref.WeakSet[BackgroundCompiler] = weakref.WeakSet()


class PendingKernels:
    """Kernels that are being compiled."""

    def __init__(self, background: BackgroundCompiler, answers: Iterable[Future[Answer]]) -> None:
        self._background = background
        self._answers = tuple(answers)

    def when_done(self, call: Callable[[], object]) -> None:
        """Have a function called once all of them were tried: by a thread that compiles, or now where they were."""
        self._background.call_after(self._answers, call)


class BackgroundCompiler:
    """Compiles the steps of one device into the binary cache. The processes start with the first step that is missing.

    Args:
        compiler: who loads the kernels; its cache is filled.
        workers: processes; by default one for two processors that this process may use.
        idle_s: seconds after which they end if nothing more comes.
    """

    def __init__(
        self, compiler: Compiler, device: Device, *, workers: int | None = None, idle_s: float = _IDLE_S
    ) -> None:
        self._compiler = compiler
        self._device = device
        self._workers = max(1, processors() // 2) if workers is None else workers
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._pool: CompilePool | None = None
        self._awaited: dict[Future[Answer], list[Callable[[], object]]] = {}
        self._failed: dict[str, Exception] = {}
        self._is_open = True
        self._timer: threading.Timer | None = None
        _compilers.add(self)
        follow_forks(self)

    def leave_parent(self) -> None:
        """Have nothing to wait for in a forked child, whose parent has the processes."""
        self._changed = threading.Condition()
        self._pool, self._awaited, self._is_open, self._timer = None, {}, False, None

    def begin(self, steps: Iterable[KernelStep]) -> PendingKernels | None:
        """Begin to compile what is not at hand; None where nothing is to be waited for.

        That is where all is at hand, and where nothing can be compiled beside the program: who launches the steps
        compiles them.

        Raises:
            CompileError, MissingLibraryError: one of them was tried before and cannot be compiled.
        """
        lacking = [step for step in steps if not self._compiler.is_at_hand(step, self._device)]
        names = {step: self._compiler.key(step, self._device.arch) + step.entry for step in lacking}
        for name in names.values():
            if name in self._failed:
                raise copy.copy(self._failed[name])  # what is raised keeps the tensors of all its callers
        if not lacking:
            return None
        with self._changed:
            if not self._is_open:
                return None
            if self._pool is None:
                self._pool = CompilePool(self._compiler.cache, workers=self._workers)
            submitted = self._pool.submitted(lacking, self._device.arch)
            new = {answer: step for step, answer in submitted.items() if answer not in self._awaited}
            self._awaited |= {answer: [] for answer in new}
        for answer, step in new.items():
            answer.add_done_callback(functools.partial(self._ended, names[step]))
        return PendingKernels(self, submitted.values()) if submitted else None

    def call_after(self, answers: Iterable[Future[Answer]], call: Callable[[], object]) -> None:
        """Have a function called once all the answers are there."""
        with self._changed:
            for answer in answers:
                if answer in self._awaited and not answer.done():
                    self._awaited[answer].append(functools.partial(self.call_after, answers, call))
                    return
        call()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being compiled; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._awaited, timeout_s)

    def close(self) -> None:
        """End the processes within a second; what still waits is given up, and nothing is begun any more."""
        with self._changed:
            self._is_open = False
            timer, self._timer = self._timer, None
        self._end()
        if timer is not None:
            timer.cancel()
            if timer is not threading.current_thread():
                timer.join()  # it may be ending the processes

    def _ended(self, name: str, answer: Future[Answer]) -> None:
        """Note a failure, call who asked to be, and have the processes end soon if there is no more for them to do."""
        if (error := answer.result()) is not None:
            logger.warning("%s", str(error).partition("\n")[0])
            logger.debug("%s", error)
            self._failed[name] = error
        while True:
            with self._changed:
                calls = self._awaited.get(answer)
                if not calls:
                    self._awaited.pop(answer, None)
                    self._changed.notify_all()
                    is_idle = not self._awaited and self._pool is not None
                    break
                self._awaited[answer] = []
            for call in calls:
                try:
                    call()
                except Exception as error:  # the others are to be called, and who waits for all has an end
                    logger.warning("what was to follow a compilation failed: %s", described(error), exc_info=True)
        if is_idle:
            self._end_later()

    def _end_later(self) -> None:
        """Have the processes end some time from now, and not before."""
        with self._changed:
            if not self._is_open:
                return
            if self._timer is not None:
                self._timer.cancel()
            timer = threading.Timer(self._idle_s, self._end_idle, (self._pool,))
            timer.daemon = True
            timer.start()
            self._timer = timer

    def _end_idle(self, pool: CompilePool | None) -> None:
        with self._changed:
            is_idle = not self._awaited and self._pool is pool
        if is_idle:
            self._end()

    def _end(self) -> None:
        with self._changed:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def wait_until_compiled(timeout_s: float | None = None) -> bool:
    """Wait until nothing is compiled beside this program any more; False where that takes longer."""
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    return all(each.wait(None if ends is None else max(0.0, ends - time.monotonic())) for each in list(_compilers))
