"""What becomes of candidates: compile, verify, then race, in the process that calls.

One `Job` is one problem and its candidates; `evaluate` yields an `Outcome` for each, and the race's `RaceVerdict`. A
journal hears of each candidate before it is compiled and before it is launched, so that a watcher of this process knows
whom to blame for its end.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from miofind.compiler import Compiler, kernel_hash, processors
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import (
    CompileError,
    LaunchError,
    MeasurementError,
    MiofindError,
    MissingEnvironmentError,
    WrongResultError,
    causes,
    described,
    raise_if_interrupted,
)
from miofind.evaluate.health import context_error, used_bytes
from miofind.launch.invoker import Invoker, make_invoker
from miofind.measure.effort import Effort
from miofind.measure.race import Entrant, Race, RaceObserver, RaceResult
from miofind.measure.timer import Timer
from miofind.measure.verdict import RaceVerdict
from miofind.process.threads import in_threads
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, KernelStep
from miofind.verify.claims import Claims, claims_of
from miofind.verify.verifier import Verifier

MAX_MESSAGE = 2000

# Memory that a candidate which ran out of it may leave in use, before its process counts as poisoned for the others.
_LEFT_BYTES = 256 << 20
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One problem to measure.

    Attributes:
        network_config: the problem.
        candidates: in the order they are tried.
        effort: how long the race is.
        budget_s: seconds after which no further candidate is started.
        best_ms: a time already reached elsewhere; what is far behind it is timed no further.
        incumbent: id of the candidate that wins between ties of equal workspace and error.
        compile_workers: candidates compiled at a time; 0 for as many as there are processors.
    """

    network_config: str
    candidates: tuple[Candidate, ...]
    effort: Effort = Effort.FIND
    budget_s: float = float("inf")
    best_ms: float = float("inf")
    incumbent: str = ""
    compile_workers: int = 0


class JournalPhase(StrEnum):
    """What a process does next: COMPILE and RUN are a candidate's, COMPILED ends its COMPILE, PREPARE is nobody's."""

    PREPARE = "prepare"
    COMPILE = "compile"
    COMPILED = "compiled"
    RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """An entry of the journal: written before the process does what it says.

    Attributes:
        place: of the candidate among those of the job, which whoever reads the journal has, too; None for PREPARE.
    """

    phase: JournalPhase
    place: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """The candidate of the last outcome left this process unfit for the others."""

    reason: str


_Result = TypeVar("_Result")
Journal = Callable[[JournalEntry], None]
Event = Outcome | RaceVerdict | Poisoned


class DeviceLostError(LaunchError):
    """A candidate destroyed this process's CUDA context, or the device works no more: nothing can run on it here."""


def evaluate(
    job: Job, device: Device, compiler: Compiler, registry: Registry, journal: Journal | None = None
) -> Iterator[Event]:
    """Events of a job, in order: an outcome for every candidate that was started, the verdict last.

    Args:
        registry: has the candidates' solvers.
        journal: of a process that can be replaced, which breaks a race off where a candidate poisons it. Called from
            this thread and, while candidates are compiled, from others.

    Raises:
        DeviceLostError: after the outcome of the candidate that destroyed the CUDA context. Nothing is said of those
            that still raced, since all that ran after it failed too.
        MeasurementError: the problem's tensors do not fit the device.
        MissingLibraryError: nothing can be compiled here.
    """
    problem = ProblemDescription.from_network_config(job.network_config)
    deadline = time.monotonic() + job.budget_s
    places = {candidate: place for place, candidate in enumerate(job.candidates)}
    context = _EvaluationContext(problem, device, compiler, registry, journal or _unheard, places)
    ready: list[Candidate] = []
    for candidate, failure in context.compiled(job):
        if failure is None:
            ready.append(candidate)
        else:
            yield failure
    if not ready:
        return
    context.journal(JournalEntry(phase=JournalPhase.PREPARE))
    with contextlib.ExitStack() as stack:
        verifier, timer = _harnesses(stack, problem, device, compiler)
        entered: list[_Entered] = []
        observer = _JournalingObserver(context, ready, may_break_off=journal is not None)
        race = Race(timer, job.effort, deadline=deadline, best_ms=job.best_ms, observer=observer)
        for candidate in ready:
            if time.monotonic() > deadline and entered:
                break
            used = used_bytes(device)
            context.note(JournalPhase.RUN, candidate)
            result = context.try_out(candidate, verifier, race)
            lost = context_error(device)
            if lost:
                yield _crashed(candidate, lost)
                raise _device_lost(candidate, lost)
            if isinstance(result, _Entered):
                entered.append(result)
                observer.confirms(result.candidate, functools.partial(result.confirm, verifier))
                continue
            yield result
            if result.status is Status.OUT_OF_MEMORY and _holds_memory(device, used):
                yield Poisoned(reason=_held(candidate.id))
        yield from _raced(race, entered, observer, job.incumbent)


def _harnesses(
    stack: contextlib.ExitStack, problem: ProblemDescription, device: Device, compiler: Compiler
) -> tuple[Verifier, Timer]:
    """A problem's verifier and timer, which a stack closes.

    Raises:
        MeasurementError: the problem's tensors do not fit the device.
    """
    try:
        verifier = stack.enter_context(Verifier(problem, device, compiler))
        timer = stack.enter_context(Timer(problem, device, compiler))
    except MemoryError as error:
        raise MeasurementError(
            f"{problem} cannot be measured on {device.name}: twice its tensors' {problem.bytes} bytes do not fit "
            f"the memory that is free ({error})"
        ) from error
    return verifier, timer


def _unheard(entry: JournalEntry) -> None:
    """A journal that nobody reads."""


def _raced(race: Race, entered: list[_Entered], observer: _JournalingObserver, incumbent: str) -> Iterator[Event]:
    """What the race makes of those that entered it."""
    try:
        observer.begin()
        finished = race.finish(incumbent=incumbent)
        observer.check()
    except _BrokenOffError as broken:
        yield broken.outcome
        if broken.outcome.status is Status.CRASHED:
            raise _device_lost(broken.outcome.candidate, broken.reason) from None
        yield Poisoned(reason=broken.reason)
        return
    for entry in entered:
        yield entry.outcome(finished[entry.candidate.id])
    if race.verdict is not None:
        yield race.verdict


class _BrokenOffError(Exception):
    """A candidate left the process unfit for those that race with it."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class _JournalingObserver(RaceObserver):
    """Writes a race's turns into the journal, and looks after the device when one goes wrong.

    Args:
        may_break_off: this process can be replaced where a candidate poisons it.
    """

    def __init__(self, context: _EvaluationContext, candidates: Iterable[Candidate], *, may_break_off: bool) -> None:
        self._context = context
        self._candidates = {candidate.id: candidate for candidate in candidates}
        self._device = context.device
        self._may_break_off = may_break_off
        self._confirm: dict[str, Callable[[bool], None]] = {}
        self._last = ""
        self._used = 0

    def confirms(self, candidate: Candidate, confirm: Callable[[bool], None]) -> None:
        """Take what is to be asked of a candidate once it has raced, given whether it was cut off."""
        self._confirm[candidate.id] = confirm

    def begin(self) -> None:
        """The race begins."""
        self._used = used_bytes(self._device)

    def before_sample(self, key: str) -> None:
        """See `RaceObserver.before_sample`."""
        self._last = key
        self._context.note(JournalPhase.RUN, self._candidates[key])

    def failed(self, key: str, error: MiofindError | MemoryError) -> None:
        """See `RaceObserver.failed`.

        Raises:
            _BrokenOffError: the others cannot go on.
        """
        self.check()
        status = _status_of(error)
        if self._may_break_off and status is Status.OUT_OF_MEMORY and _holds_memory(self._device, self._used):
            raise _BrokenOffError(_failed(self._candidates[key], status, error), _held(key))

    def confirm(self, key: str, *, cut_off: bool) -> None:
        """See `RaceObserver.confirm`."""
        self._confirm[key](cut_off)

    def check(self) -> None:
        """Do nothing while the device answers.

        Raises:
            _BrokenOffError: it does not; the last one whose turn it was is to blame.
        """
        lost = context_error(self._device)
        if lost and self._last:
            raise _BrokenOffError(_crashed(self._candidates[self._last], lost), lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entered:
    """A candidate that passed verification and takes part in the race."""

    candidate: Candidate
    invoker: Invoker
    claims: Claims
    max_error: float | None
    fingerprint: int | None

    def confirm(self, verifier: Verifier, cut_off: bool) -> None:
        """Do nothing where it is as right as it was at first.

        Raises:
            WrongResultError: they are not.
            LaunchError, MemoryError: one failed.
        """
        message = verifier.repeat(self.invoker, self.claims, self.fingerprint, once=cut_off)
        if message:
            raise WrongResultError(message)

    def outcome(self, result: RaceResult) -> Outcome:
        """What the race made of it."""
        if result.failure is not None:
            return _failed(self.candidate, _status_of(result.failure), result.failure)
        return Outcome(
            candidate=self.candidate,
            status=Status.CUT_OFF if result.cut_off else Status.OK,
            timing=result.timing,
            max_error=self.max_error,
            workspace_bytes=self.invoker.workspace_bytes,
            deterministic=self.invoker.deterministic,
            kernel_hash=kernel_hash(self.invoker.solution),
            contended=result.contended,
            dropped_samples=result.dropped_samples,
        )


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of a candidate that are not at hand."""

    candidate: Candidate
    steps: tuple[KernelStep, ...]


@dataclass(frozen=True, slots=True)
class _EvaluationContext:
    """What every candidate of a job is tried with, and their places in it."""

    problem: ProblemDescription
    device: Device
    compiler: Compiler
    registry: Registry
    journal: Journal
    places: Mapping[Candidate, int]

    def note(self, phase: JournalPhase, candidate: Candidate) -> None:
        """Write into the journal what is done next with a candidate."""
        self.journal(JournalEntry(phase=phase, place=self.places[candidate]))

    def compiled(self, job: Job) -> Iterator[tuple[Candidate, Outcome | None]]:
        """Each candidate with None, or with the outcome of one whose kernels cannot be compiled.

        Threads compile. What is at hand is not given to them: Python would let one of them look for it at a time.
        """
        asked = [self._asked(candidate) for candidate in job.candidates]
        wanted = [kernels for kernels in asked if isinstance(kernels, _Kernels) and kernels.steps]
        workers = job.compile_workers or processors()
        with contextlib.closing(in_threads(self._compile, wanted, workers, "miofind-compile")) as compiled:
            for candidate, answer in zip(job.candidates, asked, strict=True):
                if isinstance(answer, _Kernels):
                    yield candidate, next(compiled) if answer.steps else None
                else:
                    yield candidate, answer

    def _asked(self, candidate: Candidate) -> _Kernels | Outcome:
        """The kernels that are to be compiled for a candidate, or the outcome of one that has none to run."""

        def ask() -> _Kernels:
            solver = self.registry.named(candidate.solver_id)
            solver.check_config(self.problem, self.device, candidate.config)
            steps = _all_kernels(solver, self.problem, self.device, candidate.config)
            if self.device.place is Place.CPU:
                return _Kernels(candidate, ())
            return _Kernels(candidate, tuple(s for s in steps if not self.compiler.is_at_hand(s, self.device)))

        return self._attempted(candidate, ask)

    def _compile(self, kernels: _Kernels) -> Outcome | None:
        def build() -> None:
            for step in kernels.steps:
                self.compiler.build(step, self.device.arch)

        return self._attempted(kernels.candidate, build)

    def _attempted(self, candidate: Candidate, act: Callable[[], _Result]) -> _Result | Outcome:
        """What comes of a part of a candidate's compilation, or the outcome of one that it fails."""
        self.note(JournalPhase.COMPILE, candidate)
        try:
            result: _Result | Outcome = act()
        except MissingEnvironmentError:
            raise
        except BaseException as error:  # a solver's own code may raise anything
            raise_if_interrupted(error)
            result = _failed(candidate, _status_of(error), error)
        self.note(JournalPhase.COMPILED, candidate)
        return result

    def try_out(self, candidate: Candidate, verifier: Verifier, race: Race) -> Outcome | _Entered:
        """Verify one candidate and let it enter the race, or say why it failed."""
        solver = self.registry.named(candidate.solver_id)
        try:
            asked = (self.problem, self.device, candidate.config)
            solution = solver.kept_solution(*asked)  # what was asked for when it was compiled
            invoker = make_invoker(self.problem, self.device, solver, candidate.config, self.compiler, solution)
            claims = claims_of(solver, *asked, self.compiler)
            verdict = verifier.verify(invoker, claims)
            if not verdict.ok:
                return _failed(candidate, Status.WRONG_RESULT, verdict.message)
            race.enter(Entrant(key=candidate.id, invoker=invoker, max_error=verdict.max_error or 0.0))
        except BaseException as error:  # a solver's own code may raise anything
            raise_if_interrupted(error)
            return _failed(candidate, _status_of(error), error)
        return _Entered(
            candidate=candidate,
            invoker=invoker,
            claims=claims,
            max_error=verdict.max_error,
            fingerprint=verdict.fingerprint,
        )


def _all_kernels(solver: Solver, problem: ProblemDescription, device: Device, config: Config) -> tuple[KernelStep, ...]:
    """The kernels of a solution, and of its packed form where it has one."""
    packing = solver.packing(problem, device, config)
    parts = () if packing is None else (packing.pack, packing.run)
    return tuple(step for part in (solver.kept_solution(problem, device, config), *parts) for step in part.kernels)


def _status_of(error: BaseException) -> Status:
    """The status an error stands for."""
    if isinstance(error, CompileError):
        return Status.COMPILE_FAILED
    if isinstance(error, WrongResultError):
        return Status.WRONG_RESULT
    if any(map(_is_out_of_memory, causes(error))):
        return Status.OUT_OF_MEMORY
    return Status.LAUNCH_FAILED


def _is_out_of_memory(error: BaseException) -> bool:
    """CuPy's OutOfMemoryError is a MemoryError; its runtime and driver errors carry CUDA's number."""
    if isinstance(error, MemoryError):
        return True
    return type(error).__module__.startswith("cupy") and getattr(error, "status", None) == _OUT_OF_MEMORY


def _holds_memory(device: Device, before: int) -> bool:
    """Whether much more memory is in use than `before` bytes."""
    return used_bytes(device) - before > _LEFT_BYTES


def _held(candidate_id: str) -> str:
    return f"{candidate_id} ran out of memory and has not given it back"


def _failed(candidate: Candidate, status: Status, reason: object) -> Outcome:
    if isinstance(reason, BaseException):
        reason = described(reason, str if isinstance(reason, MiofindError) else repr)
    return Outcome(candidate=candidate, status=status, message=str(reason)[:MAX_MESSAGE])


def _crashed(candidate: Candidate, reason: str) -> Outcome:
    return _failed(candidate, Status.CRASHED, f"it destroyed the CUDA context: {reason}")


def _device_lost(candidate: Candidate, reason: str) -> DeviceLostError:
    return DeviceLostError(
        f"{candidate.id} destroyed the CUDA context of this process ({reason}): restart it, and find with "
        "isolate=True (--isolate), or exclude this solver"
    )
