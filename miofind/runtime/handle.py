"""A device with its caches and its FindDB: what a find and a run need beside the problem."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miofind.compiler import BinaryCache, Compiler, kernel_hash
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place, check_fork
from miofind.errors import InvalidOptionError, LaunchError, brief, described, raise_if_interrupted, with_known_keywords
from miofind.finddb import LayeredStore, open_layered
from miofind.launch.invoker import Invoker, InvokerCache, make_invoker
from miofind.process.forks import follow_forks, loading, wait_for_imports
from miofind.runtime.background import BackgroundCompiler
from miofind.runtime.refusals import Refusals
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, ConvSolution

if TYPE_CHECKING:
    from miofind.evaluate.executors import Executor
    from miofind.options import FindOptions
    from miofind.runtime.solution import Solution


MAX_ANSWERS = 10_000

wait_for_imports()  # here, since FindDBs have forks wait, too, and know those alone that are there by then


@dataclass(slots=True)
class RememberedCalls:
    """What runs calls over arrays that are like earlier ones (miofind/api/repeated.py).

    Attributes:
        by_key: by all that poses a call's problem.
        last: of forward calls with `out`, by their shapes.
    """

    by_key: dict[object, Any] = field(default_factory=dict)
    last: dict[object, Any] = field(default_factory=dict)


class Handle:
    """A device and solvers, their kernels and invokers, answers so far and the FindDB. Safe to share between threads.

    Args:
        device: a Device, a CUDA ordinal, "cuda", "cuda:N", "cpu", or None for the current GPU, else the CPU place.
        database: the user FindDB, a file's path or a PostgreSQL server's URL; None for MIOFIND_DB, else a file in the
            user's data directory.
        strict: raise DatabaseError where the user FindDB cannot be used, instead of going on in memory.
        compiler: shared compiler; None for one over the user's binary cache.
        registry: the solvers that finds and runs know; None for all of miofind and of the other packages installed.

    Attributes:
        answers: answers of this process by (network_config, options).
        calls: what runs calls over arrays; a new one where answers change.
        measuring: held while something is measured: two measurements at a time would slow each other. A tuning has its
            next problem begun without it, while one is recorded.

    Raises:
        NoDeviceError, MissingLibraryError: the device cannot be used.
        InvalidOptionError: the registry is none.
    """

    @with_known_keywords
    def __init__(
        self,
        device: Device | str | int | None = None,
        *,
        database: str | Path | None = None,
        strict: bool = False,
        compiler: Compiler | None = None,
        registry: Registry | None = None,
    ) -> None:
        self.device = as_device(device)
        self.compiler = compiler or Compiler(BinaryCache())
        self.invokers = InvokerCache()
        self.answers: dict[tuple[str, FindOptions], list[Solution]] = {}
        self.calls = RememberedCalls()
        self._refusals: dict[str, Refusals] = {}
        self.lock = threading.RLock()
        self.measuring = threading.RLock()
        self._database_path = database
        self._strict = strict
        self._registry = _checked(registry)
        self._database: LayeredStore | None = None
        self._executors: dict[bool, Executor] = {}
        self._background: BackgroundCompiler | None = None
        follow_forks(self)

    @property
    def database(self) -> LayeredStore:
        """The FindDB, opened on first use."""
        if self._database is None:
            with self.lock:
                if self._database is None:
                    self._database = open_layered(self._database_path, strict=self._strict)
        return self._database

    @property
    def registry(self) -> Registry:
        """The solvers that finds and runs know; the default ones are discovered on first use."""
        return Registry.default() if self._registry is None else self._registry

    @property
    def background(self) -> BackgroundCompiler:
        """Who compiles beside the program what it can do without meanwhile."""
        with self.lock:
            if self._background is None:
                self._background = BackgroundCompiler(self.compiler, self.device)
            return self._background

    def executor(self, *, isolate: bool) -> Executor:
        """Who measures: this process, or a child of it.

        Raises:
            InvalidOptionError: a solver of the registry cannot go to a child.
        """
        with loading():
            from miofind.evaluate.executors import InProcess, Isolated
        with self.lock:
            if isolate not in self._executors:
                self._executors[isolate] = (
                    Isolated(self.device, self.registry)
                    if isolate
                    else InProcess(self.device, self.compiler, self.registry)
                )
            return self._executors[isolate]

    def invoker(self, problem: ProblemDescription, solver_id: str, config: Config, expected_hash: str = "") -> Invoker:
        """The invoker of a solution, from the cache or made now.

        Args:
            expected_hash: hash of the kernels that were measured; "" accepts any.

        Raises:
            InvalidConfigError: the configuration is outside the solver's schema.
            CompileError, MissingLibraryError: it cannot be built.
            LaunchError: it cannot be made ready, its solver serves the problem no longer, or its kernels are no longer
                those that were measured.
        """
        cached = self.invokers.get(problem.network_config, solver_id, config)
        if cached is not None:
            return cached
        if self.device.place is Place.CUDA:
            check_fork()
        solver = self.registry.named(solver_id)
        check_serves(solver, problem, self.device)
        invoker = make_invoker(problem, self.device, solver, config, self.compiler)
        check_kernels(invoker.solution, expected_hash, f"{solver_id}:{config.json}")
        return self.invokers.put(invoker)

    def refusals(self, problem: ProblemDescription) -> Refusals:
        """What solvers were asked of stored rows of a problem, and are asked from now on; kept like answers."""
        known = self._refusals.get(problem.network_config)
        if known is None or known.device is not self.device:
            known = Refusals(problem, self.device)
            with self.lock:
                self._refusals[problem.network_config] = known
                while len(self._refusals) > MAX_ANSWERS:
                    self._refusals.pop(next(iter(self._refusals)))
        return known

    def forget_answers(self, network_config: str) -> None:
        """Drop the answers to one problem kept in this process, whatever their options: its rows have changed.

        Those to volumes that it is flattened from, too.
        """
        for key, answer in list(self.answers.items()):
            if network_config in (key[0], *(each.problem.flattened.network_config for each in answer[:1])):
                self.answers.pop(key, None)
        self.calls = RememberedCalls()

    def remember(self, key: tuple[str, FindOptions], solutions: list[Solution]) -> None:
        """Keep an answer for this process; the oldest are dropped beyond MAX_ANSWERS."""
        with self.lock:
            if key in self.answers:
                self.calls = RememberedCalls()
            self.answers[key] = solutions
            while len(self.answers) > MAX_ANSWERS:
                self.answers.pop(next(iter(self.answers)))

    def forget(self) -> None:
        """Drop answers, invokers and what solvers said of rows in this process; FindDB and binary cache stay."""
        self.answers.clear()
        self.calls = RememberedCalls()
        self._refusals.clear()
        self.invokers.clear()

    def leave_parent(self) -> None:
        """Part from the process this one was forked from, whose locks may be held and whose children are not ours."""
        self.lock, self.measuring = threading.RLock(), threading.RLock()
        self.invokers = InvokerCache()
        self.calls = RememberedCalls()
        self._executors, self._background = {}, None

    def close(self) -> None:
        """End child processes and close the FindDB."""
        with self.lock:
            for executor in self._executors.values():
                executor.close()
            self._executors.clear()
            background, self._background = self._background, None
            if self._database is not None:
                self._database.close()
                self._database = None
        if background is not None:  # its threads may ask for the lock
            background.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _checked(registry: object) -> Registry | None:
    if registry is None or isinstance(registry, Registry):
        return registry
    what = f"registry={registry!r:.100} must be a Registry"
    raise InvalidOptionError(f"{what}: Registry.default().with_solvers(...) of miofind.solver.registry adds solvers")


def as_device(device: Device | str | int | None) -> Device:
    """A device from the forms users write.

    Raises:
        NoDeviceError, MissingLibraryError: the device cannot be used.
    """
    if device is None:
        return Device.default()
    if isinstance(device, Device):
        return device
    return Device.named(device)


def check_kernels(solution: ConvSolution, expected_hash: str, name: str) -> None:
    """Do nothing where a solution's kernels are those that were measured, or no hash is expected.

    Raises:
        LaunchError: they are others.
    """
    if expected_hash and kernel_hash(solution) != expected_hash:
        raise LaunchError(f"{name} was measured with other kernels than this release has")


def check_serves(solver: Solver, problem: ProblemDescription, device: Device) -> None:
    """Do nothing where a solver serves a problem: a solution may come from a release in which it served more.

    Raises:
        LaunchError: it does not.
    """
    try:
        applicability = solver.applicability(problem, device)
    except Exception:
        raise
    except BaseException as error:  # a solver's own code may raise anything, and must not end a program that runs it
        raise_if_interrupted(error)
        raise LaunchError(f"{solver.id} cannot say whether it serves {problem}: {described(error)}") from error
    if not applicability:
        raise LaunchError(f"{solver.id} does not serve {problem} on {device.name}: {applicability.reason}. Find again")


_default_handles: dict[int, Handle] = {}
"""By the index of their device."""


def no_handle(given: object) -> InvalidOptionError:
    """The error that says that an argument is no handle."""
    return InvalidOptionError(f"handle={brief(given)} must be a Handle, such as miofind.Handle('cpu')")


def known_handle(index: int) -> Handle | None:
    """The handle that `default_handle` has given for a device; None where it has given none."""
    return _default_handles.get(index)


def default_handle(device: Device | None = None) -> Handle:
    """The handle that this process shares for a device; for None the current GPU's, else the CPU place's."""
    chosen = Device.default() if device is None else device
    handle = _default_handles.get(chosen.index)
    if handle is None:
        made = Handle(chosen)
        handle = _default_handles.setdefault(chosen.index, made)  # the first of two threads makes the one there is
    return handle
