"""What is made ready beside the program, for who can do without it meanwhile.

Kernels are compiled by processes of their own; a library's plan is made by a thread, which the library lets others run
beside: cuDNN and cuBLASLt take 0.1 s for the first plan of a process.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from miofind.compiler.build import Compiler, processors
from miofind.compiler.pool import CompilePool
from miofind.device.device import Device
from miofind.errors import described
from miofind.process.forks import follow_forks
from miofind.solver.steps import KernelStep

logger = logging.getLogger(__name__)

_IDLE_S = 10.0
"""How long the processes, of 40 MB each, stay when there is nothing to compile."""

_compilers: weakref.WeakSet[BackgroundCompiler] = weakref.WeakSet()


class PendingKernels:
    """Kernels that are being compiled, or plans of a library that are being made."""

    def __init__(self, background: BackgroundCompiler, answers: Iterable[Future[Any]]) -> None:
        self._background = background
        self._answers = tuple(answers)

    def when_done(self, call: Callable[[], object]) -> None:
        """Have a function called once all of them were tried: by a thread that makes them, or now where they were."""
        self._background.call_after(self._answers, call)


class BackgroundCompiler:
    """Compiles the steps of one device into the binary cache, and has its libraries' plans made.

    The processes start with the first step that is missing.

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
        self._awaited: dict[Future[Any], list[Callable[[], object]]] = {}
        self._failed: dict[str, Exception] = {}
        self._plans: dict[str, Future[Exception | None]] = {}
        self._is_open = True
        self._timer: threading.Timer | None = None
        _compilers.add(self)
        follow_forks(self)

    def leave_parent(self) -> None:
        """Have nothing to wait for in a forked child, whose parent has the processes."""
        self._changed = threading.Condition()
        self._pool, self._awaited, self._is_open, self._timer = None, {}, False, None
        self._plans = {}

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
            self._check(name)
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

    def is_at_hand(self, steps: Iterable[KernelStep]) -> bool:
        """Whether nothing of it need be compiled.

        Raises:
            CompileError: as of `Compiler.is_at_hand`.
        """
        return all(self._compiler.is_at_hand(step, self._device) for step in steps)

    def begin_plan(self, name: str, make: Callable[[], object]) -> PendingKernels | None:
        """Begin to make a library's plan; None where it was made, or can only be made by who runs it.

        Args:
            name: of the plan; one that is being made is not begun again.
            make: makes it. What a thread keeps of it to itself is free for others when the result is told, since the
                thread has ended then.

        Raises:
            Exception: it was tried before, and this is what `make` raised.
        """
        self._check(name)
        with self._changed:
            if (known := self._plans.get(name)) is not None:
                return PendingKernels(self, (known,)) if known in self._awaited else None
            if not self._is_open:
                return None
            answer: Future[Exception | None] = Future()
            try:
                threading.Thread(target=_try, args=(make, answer), name="miofind plan").start()
            except RuntimeError:  # the process has too many, or is ending
                return None
            self._plans[name], self._awaited[answer] = answer, []
        answer.add_done_callback(functools.partial(self._ended, name))
        return PendingKernels(self, (answer,))

    def _check(self, name: str) -> None:
        """Raise what was raised when it was tried before."""
        if name in self._failed:
            raise copy.copy(self._failed[name])  # what is raised keeps the tensors of all its callers

    def call_after(self, answers: Iterable[Future[Any]], call: Callable[[], object]) -> None:
        """Have a function called once all the answers are there."""
        with self._changed:
            for answer in answers:
                if answer in self._awaited and not answer.done():
                    self._awaited[answer].append(functools.partial(self.call_after, answers, call))
                    return
        call()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being compiled or made; False where that takes longer."""
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

    def _ended(self, name: str, answer: Future[Any]) -> None:
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


def _try(make: Callable[[], object], answer: Future[Exception | None]) -> None:
    """Make something in a thread that ends before the result is told: None, or why it cannot be made."""
    told: list[Exception] = []

    def tried() -> None:
        try:
            make()
        except Exception as error:
            told.append(error.with_traceback(None))

    try:
        maker = threading.Thread(target=tried, name="miofind plan")
        maker.start()
        maker.join()
    except RuntimeError:  # the process is ending, or has too many threads: who runs it makes it
        pass
    answer.set_result(told[0] if told else None)


def wait_until_compiled(timeout_s: float | None = None) -> bool:
    """Wait until nothing is made ready beside this program any more; False where that takes longer."""
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    return all(each.wait(None if ends is None else max(0.0, ends - time.monotonic())) for each in list(_compilers))
