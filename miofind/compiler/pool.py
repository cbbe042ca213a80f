"""Compiles ahead: processes of their own fill the binary cache on disk while something else is measured.

A compilation that hangs or takes its process down costs one step. Needs no GPU and no CuPy; knows steps alone.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real

from miofind.compiler.build import Compiler, processors
from miofind.compiler.cache import BinaryCache
from miofind.compiler.nvrtc import compile_options
from miofind.compiler.worker import Answer, CompileReply, CompileRequest, serve
from miofind.errors import CompileError, InvalidOptionError, MissingLibraryError
from miofind.process.child import ChildExit
from miofind.process.forks import follow_forks
from miofind.process.protocol import Failed
from miofind.process.service import Service, told
from miofind.solver.steps import KernelStep

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
MAX_WAITING = 4096
_MAX_REMEMBERED = 16_384


class CompileTimeoutError(CompileError):
    """A compilation that did not end in time."""


@dataclass(slots=True, eq=False)
class _Task:
    """A step that is to be compiled, and its answer once there is one."""

    request: CompileRequest
    answer: Future[Answer] = field(default_factory=Future)


class CompilePool:
    """Processes that compile steps into the binary cache; started when first needed. Threads may share it.

    Args:
        cache: where the binaries go; by default the user's cache. Nothing is compiled where that has no folder.
        workers: processes; by default one less than this process may use processors, and at least one.
        timeout_s: seconds after which a compilation is given up and its process replaced.
        max_waiting: steps that wait at most; `submit` takes no more.

    Raises:
        InvalidOptionError: the message names the argument and the value.
    """

    _serve = staticmethod(serve)  # what a process does; tests put a faulty service in its place

    def __init__(
        self,
        cache: BinaryCache | None = None,
        *,
        workers: int | None = None,
        timeout_s: float = TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        _check(workers=1 if workers is None else workers, max_waiting=max_waiting, timeout_s=timeout_s)
        self._cache = BinaryCache() if cache is None else cache
        self._compiler = Compiler(self._cache.local)
        self._workers = max(1, processors() - 1) if workers is None else workers
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Task] = collections.deque()
        self._tasks: collections.OrderedDict[object, _Task] = collections.OrderedDict()
        self._threads: list[threading.Thread] = []
        self._works = self._compiler.cache.directory is not None
        follow_forks(self)

    def leave_parent(self) -> None:
        """Be closed in a forked child, which has neither the threads nor the processes."""
        self._changed = threading.Condition()
        self._waiting, self._tasks, self._threads = collections.deque(), collections.OrderedDict(), []
        self._works = False

    def start(self, most: int) -> None:
        """Start so many processes at most, so that the first steps need not wait for them; others start with steps."""
        with self._changed:
            for _ in range(min(most, self._workers) - len(self._threads)):
                if self._works:
                    self._begin_thread(at_once=True)

    def submit(self, steps: Iterable[KernelStep], arch: str) -> int:
        """Begin to compile steps that will be wanted, behind all that wait; returns how many will be, without waiting.

        Those beyond the bound of what may wait are left out: `errors` compiles them when they are wanted.
        """
        tasks = [self._taken(step, arch, wanted=False) for step in steps]
        return sum(is_new for _, is_new in tasks)

    def submitted(self, steps: Iterable[KernelStep], arch: str) -> dict[KernelStep, Future[Answer]]:
        """Begin to compile steps as `submit` does; gives the answers of all that are not compiled yet.

        An answer's callbacks are called by the pool's thread that has it, or by who closes the pool.
        """
        taken = {step: self._taken(step, arch, wanted=False)[0] for step in steps}
        return {step: task.answer for step, task in taken.items() if task is not None and not task.answer.done()}

    def errors(self, steps: Iterable[KernelStep], arch: str) -> dict[KernelStep, CompileError]:
        """The steps that cannot be compiled, once all were tried; the binaries of the others are in the cache.

        A pool that was closed or cannot start processes knows of no errors, nor of one where a process was killed or
        ran out of memory: who needs a binary compiles it. A step that did not end in time has a CompileTimeoutError.

        Raises:
            MissingLibraryError: NVRTC, cuda-bindings or the CUDA headers are not installed.
        """
        listed = list(dict.fromkeys(steps))
        taken = [self._taken(step, arch, wanted=True)[0] for step in reversed(listed)]
        found: dict[KernelStep, CompileError] = {}
        for step, task in zip(listed, reversed(taken), strict=True):
            answer = None if task is None else task.answer.result()
            if isinstance(answer, MissingLibraryError):
                raise answer
            if answer is not None:
                found[step] = answer
        return found

    def is_compiling(self, steps: Iterable[KernelStep], arch: str) -> bool:
        """Whether one of the steps was taken and is not compiled yet."""
        names = {_name(step, arch) for step in steps}
        with self._changed:
            known = [task for name in names if (task := self._tasks.get(name)) is not None]
            return self._works and not all(task.answer.done() for task in known)

    def close(self) -> None:
        """End the processes within a second; what still waits is given up. Harmless when repeated."""
        self._stop()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stop(self) -> None:
        with self._changed:
            self._works = False
            given_up = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for task in given_up:
            task.answer.set_result(None)

    def _taken(self, step: KernelStep, arch: str, *, wanted: bool) -> tuple[_Task | None, bool]:
        """A step's task, None where there is none, and whether it is new and waits."""
        name = _name(step, arch)
        with self._changed:
            known = self._known(name, wanted=wanted)
            if known is not None or not self._has_room(wanted=wanted):
                return known, False
        task = _Task(request=CompileRequest(step, arch))
        is_built = self._is_built(step, arch)
        with self._changed:
            known = self._known(name, wanted=wanted)
            if known is not None or not self._has_room(wanted=wanted):
                return known, False
            self._tasks[name] = task
            self._forget_oldest()
            if is_built:
                task.answer.set_result(None)
                return task, False
            self._waiting.insert(0 if wanted else len(self._waiting), task)
            if len(self._threads) < self._workers:
                self._begin_thread()
            self._changed.notify()
            return task, True

    def _begin_thread(self, *, at_once: bool = False) -> None:
        """Have one more thread; where none can be had, and none is there, all that waits is given up.

        Args:
            at_once: with its process, which else starts with its first task.
        """
        thread = threading.Thread(target=self._work, args=(at_once,), name="miofind-compile", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                logger.warning("nothing is compiled ahead: no thread can be started (%s)", error)
                self._stop()
        else:
            self._threads.append(thread)

    def _has_room(self, *, wanted: bool) -> bool:
        """Whether a new task may be taken. The lock is held."""
        return self._works and (wanted or len(self._waiting) < self._max_waiting)

    def _known(self, name: object, *, wanted: bool) -> _Task | None:
        """The task of that name; one that is wanted now goes before all that wait. The lock is held."""
        known = self._tasks.get(name) if self._works else None
        if known is not None:
            self._tasks.move_to_end(name)
            if wanted and known in self._waiting:
                self._waiting.remove(known)
                self._waiting.appendleft(known)
        return known

    def _is_built(self, step: KernelStep, arch: str) -> bool:
        """Whether the cache has the binary: to look is sooner done than to ask a process, and starts none."""
        try:
            binary = self._compiler.cache.get(self._compiler.key(step, arch))
        except CompileError:  # the process says what is wrong with the source
            return False
        return binary is not None and binary.has_entry(step.entry)

    def _forget_oldest(self) -> None:
        """Keep a bounded number of answers: the disk remembers binaries, and a failure is met again soon enough."""
        if len(self._tasks) <= _MAX_REMEMBERED:
            return
        for name in list(itertools.islice(self._tasks, len(self._tasks) - _MAX_REMEMBERED)):
            if self._tasks[name].answer.done():
                del self._tasks[name]

    def _next(self) -> _Task | None:
        with self._changed:
            while self._works and not self._waiting:
                self._changed.wait()
            return self._waiting.popleft() if self._works else None

    def _work(self, at_once: bool) -> None:
        """One thread's work: hand tasks to a process of its own."""
        child: Service | None = None
        if at_once:
            with contextlib.suppress(Exception):  # the first task meets the same, and says so
                child = self._started()
        while (task := self._next()) is not None:
            result = _Result(ended=True)
            try:
                child = child or self._started()
                result = _Result() if child is None else self._compiled(child, task.request)
            except Exception:  # what cannot be sent or received: who waits must not wait for good
                logger.warning("whether %s compiles is open", task.request.step.source, exc_info=True)
            if child is not None and result.ended:
                child.kill()
                child = None
            task.answer.set_result(result.answer)
        if child is not None:
            child.kill()

    def _is_open(self) -> bool:
        return self._works

    def _started(self) -> Service | None:
        """A process that is ready; None, and no more work for any, where none can be had."""
        assert self._cache.directory is not None, "without a folder no step is taken"
        try:
            child = Service(self._serve, self._cache)
        except OSError as error:
            logger.warning("nothing is compiled ahead: no process can be started (%s)", error)
            self._stop()
            return None
        end = child.await_ready(is_wanted=self._is_open)
        if end is None:
            return child
        if self._works:
            logger.warning("nothing is compiled ahead: %s", told(end, "a compiling process"))
        child.kill()
        self._stop()
        return None

    def _compiled(self, child: Service, request: CompileRequest) -> _Result:
        """What became of a compilation, and whether its process is of more use."""
        child.send(request)
        message = child.receive(self._timeout_s, is_wanted=self._is_open)
        if isinstance(message, CompileReply):
            return _Result(message.answer)
        if isinstance(message, ChildExit) and message.is_from_outside:
            logger.info("the process that compiled %s was killed: whether it compiles is open", request.step.source)
            return _Result(ended=True)
        if isinstance(message, ChildExit):
            return _Result(_failure(CompileError, request, f"ended its process with code {message.code}"), ended=True)
        if not self._works:
            return _Result(ended=True)
        if isinstance(message, Failed):
            return _Result(_failure(CompileError, request, f"ended its process: {message.message}"), ended=True)
        what = f"did not end within {self._timeout_s:g} s"
        return _Result(_failure(CompileTimeoutError, request, what), ended=True)


def _check(*, workers: object, max_waiting: object, timeout_s: object) -> None:
    """Refuse what would fail in a thread, where those who wait for an answer never learn of it."""
    for name, value in (("workers", workers), ("max_waiting", max_waiting)):
        if type(value) is not int or value < 1:
            raise InvalidOptionError(f"{name}={value!r} must be a whole number of at least 1")
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s) or timeout_s <= 0:
        raise InvalidOptionError(f"timeout_s={timeout_s!r} must be a number above 0")


@dataclass(frozen=True, slots=True)
class _Result:
    """An answer, and whether the process that gave it has to be replaced."""

    answer: Answer = None
    ended: bool = False


def _name(step: KernelStep, arch: str) -> object:
    """What decides the answer for a step."""
    return (step.binary, step.entry, arch)


def _failure(kind: type[CompileError], request: CompileRequest, what: str) -> CompileError:
    step = request.step
    options = compile_options(step.options, step.defines, request.arch)
    message = f"compiling {step.source} for sm_{request.arch} {what}: leave this configuration out"
    return kind(message, source=step.source, options=options, log="")
