"""What becomes of candidates: compile, verify, then race, in the process that calls.

One `Job` is one problem and its candidates; `evaluate` yields a `Started` before each candidate's first launch, so that
a watcher knows whom to blame for a crash, and an `Outcome` for each candidate. Knows nothing of FindDBs or options.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from miofind.candidate import Candidate, Outcome, Status
from miofind.compiler import Compiler, kernel_hash
from miofind.device import Device, Place
from miofind.errors import CompileError, LaunchError, MeasurementError, MiofindError
from miofind.invoker import Invoker, make_invoker
from miofind.measure import Stage
from miofind.problem import ProblemDescription
from miofind.race import Effort, Entrant, Race, RaceResult
from miofind.solution import KernelStep
from miofind.solver import solver_by_id
from miofind.verify import Verifier

MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One problem to measure.

    Attributes:
        network_config: the problem.
        candidates: in the order they are tried, likely best first.
        effort: how long the race is.
        budget_s: seconds after which no further candidate is started.
    """

    network_config: str
    candidates: tuple[Candidate, ...]
    effort: Effort = Effort.FIND
    budget_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A candidate is about to be launched for the first time."""

    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing:
    """All candidates have been tried; the survivors are raced now."""

    survivors: int


Event = Started | Racing | Outcome


class DeviceLostError(LaunchError):
    """A candidate destroyed this process's CUDA context: nothing more can run on the device here."""


def evaluate(job: Job, device: Device, compiler: Compiler) -> Iterator[Event]:
    """Events of a job, in order; an outcome for every candidate that was started.

    Raises:
        DeviceLostError: after the outcome of the candidate that destroyed the CUDA context; in the race, before any
            outcome of those that raced, since all that ran after it failed too.
        MeasurementError: the problem's tensors do not fit the device.
    """
    problem = ProblemDescription.from_network_config(job.network_config)
    deadline = time.monotonic() + job.budget_s
    bench = _Bench(problem, device, compiler)
    ready: list[Candidate] = []
    for candidate, failure in bench.compiled(job.candidates):
        if failure is None:
            ready.append(candidate)
        else:
            yield failure
    if not ready:
        return
    with contextlib.ExitStack() as stack:
        try:
            verifier = stack.enter_context(Verifier(problem, device, compiler))
            stage = stack.enter_context(Stage(problem, device, compiler))
        except MemoryError as error:
            raise MeasurementError(
                f"{problem} cannot be measured on {device.name}: twice its tensors' {problem.bytes} bytes do not fit "
                f"the memory that is free ({error})"
            ) from error
        race = Race(stage, job.effort, deadline=deadline)
        entered: list[_Entered] = []
        for candidate in ready:
            if time.monotonic() > deadline and entered:
                break
            yield Started(candidate=candidate)
            result = bench.try_out(candidate, verifier, race)
            if isinstance(result, _Entered):
                entered.append(result)
                continue
            yield result
            if result.status is not Status.WRONG_RESULT:
                _check_alive(device, candidate.id)
        yield Racing(survivors=len(entered))
        finished = race.finish()
        if race.first_failed is not None:
            _check_alive(device, race.first_failed)
        for entry in entered:
            yield entry.outcome(finished[entry.candidate.id])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entered:
    """A candidate that passed verification and takes part in the race."""

    candidate: Candidate
    invoker: Invoker
    max_error: float | None

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
        )


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every candidate of a job is tried with."""

    problem: ProblemDescription
    device: Device
    compiler: Compiler

    def compiled(self, candidates: tuple[Candidate, ...]) -> Iterator[tuple[Candidate, Outcome | None]]:
        """Each candidate with None, or with the outcome of one whose kernels cannot be compiled."""
        steps: dict[Candidate, tuple[KernelStep, ...]] = {}
        for candidate in candidates:
            solver = solver_by_id(candidate.solver_id)
            try:
                solver.check_config(self.problem, self.device, candidate.config)
                steps[candidate] = solver.solution(self.problem, self.device, candidate.config).kernels
            except Exception as error:  # a solver's own code may raise anything
                yield candidate, _failed(candidate, Status.LAUNCH_FAILED, error)
        errors: dict[KernelStep, CompileError] = {}
        if self.device.place is Place.CUDA:
            wanted = dict.fromkeys(step for kernels in steps.values() for step in kernels)
            for step, result in self.compiler.build_all(wanted, self.device.arch):
                if isinstance(result, CompileError):
                    errors[step] = result
        for candidate, kernels in steps.items():
            broken = next((errors[step] for step in kernels if step in errors), None)
            yield candidate, None if broken is None else _failed(candidate, Status.COMPILE_FAILED, broken)

    def try_out(self, candidate: Candidate, verifier: Verifier, race: Race) -> Outcome | _Entered:
        """Verify one candidate and let it enter the race, or say why it failed."""
        solver = solver_by_id(candidate.solver_id)
        try:
            invoker = make_invoker(self.problem, self.device, solver, candidate.config, self.compiler)
            growth = solver.error_growth(self.problem, candidate.config)
            verdict = verifier.verify(invoker, growth=growth, exact=solver.is_exact(candidate.config))
            if not verdict.ok:
                return _failed(candidate, Status.WRONG_RESULT, verdict.message)
            race.enter(Entrant(key=candidate.id, invoker=invoker, max_error=verdict.max_error or 0.0))
        except Exception as error:  # a solver's own code may raise anything
            return _failed(candidate, _status_of(error), error)
        return _Entered(candidate=candidate, invoker=invoker, max_error=verdict.max_error)


def _status_of(error: BaseException) -> Status:
    """The status an error stands for; CuPy's OutOfMemoryError is a MemoryError."""
    if isinstance(error, CompileError):
        return Status.COMPILE_FAILED
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        return Status.OUT_OF_MEMORY
    return Status.LAUNCH_FAILED


def _failed(candidate: Candidate, status: Status, reason: object) -> Outcome:
    foreseen = not isinstance(reason, Exception) or isinstance(reason, MiofindError)
    return Outcome(
        candidate=candidate, status=status, message=(str(reason) if foreseen else repr(reason))[:MAX_MESSAGE]
    )


def _check_alive(device: Device, candidate_id: str) -> None:
    """Do nothing while the device still answers.

    Raises:
        DeviceLostError: it does not; a sticky error such as an illegal address ends the context.
    """
    if device.place is Place.CPU:
        return
    import cupy

    try:
        with cupy.cuda.Device(device.index):
            cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceLostError(
            f"{candidate_id} destroyed the CUDA context of this process ({error}): restart it, and find with "
            "isolate=True or exclude this solver"
        ) from error
