"""One find's measuring: candidates in, recorded outcomes out; for a search, rounds that learn, then a last race.

Knows neither how candidates are chosen nor how they are timed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miofind.compiler import CompilePool, CompileTimeoutError
from miofind.core.problem import ProblemDescription
from miofind.device.device import Place
from miofind.errors import CompileError, MiofindError, described, raise_if_interrupted
from miofind.evaluate.evaluate import MAX_MESSAGE, Job
from miofind.find.recording import Recording
from miofind.find.search import Search
from miofind.measure.effort import Effort
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.steps import KernelStep

logger = logging.getLogger(__name__)

# Of a time budget, what rounds may use; the last race has the rest.
_ROUNDS_SHARE = 0.75
_FINALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRequest:
    """What is measured, where and how.

    Attributes:
        incumbent: id of the candidate that wins between ties.
        ahead: compiles candidates before they are measured; None where measuring does.
    """

    problem: ProblemDescription
    options: FindOptions
    handle: Handle
    incumbent: str = ""
    ahead: CompilePool | None = None


class Measuring:
    """Runs the jobs of one find and records what becomes of their candidates; its time budget begins now."""

    def __init__(self, request: FindRequest, recording: Recording) -> None:
        self._request = request
        self._recording = recording
        self._began = time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether it is time for the last race."""
        return self._left_s(_ROUNDS_SHARE) <= 0

    def run(self, candidates: Iterable[Candidate], effort: Effort, *, best_ms: float = math.inf) -> list[Outcome]:
        """What became of candidates; of those that the budget left out there is nothing."""
        listed = tuple(dict.fromkeys(candidates))
        outcomes = self._uncompilable(listed)
        refused = {outcome.candidate for outcome in outcomes}
        ready = tuple(candidate for candidate in listed if candidate not in refused)
        for outcome in outcomes:
            self._take(outcome)
        if not ready:
            return outcomes
        job = Job(
            network_config=self._request.problem.network_config,
            candidates=ready,
            effort=effort,
            budget_s=max(0.0, self._left_s(_ROUNDS_SHARE if effort is Effort.SCREEN else 1.0)),
            best_ms=best_ms,
            incumbent=self._request.incumbent,
        )
        for event in self._request.handle.executor(isolate=self._request.options.isolate).run(job):
            if isinstance(event, Outcome):
                self._take(event)
                outcomes.append(event)
            else:
                self._recording.add_verdict(event)
        return outcomes

    def compile_ahead(self, candidates: Sequence[Candidate]) -> None:
        """Begin to compile what is likely to be measured next."""
        ahead = self._request.ahead
        if ahead is not None and self._request.handle.device.place is Place.CUDA:
            steps = [step for candidate in candidates for step in self._steps(candidate)]
            ahead.submit(steps, self._request.handle.device.arch)

    def _take(self, outcome: Outcome) -> None:
        if not outcome.status.usable:
            logger.info("%s: %s %s", outcome.candidate.id, outcome.status, outcome.message)
        elif outcome.timing is not None:
            logger.debug(
                "%s: %s, %.4g ms (%d samples, from %.4g ms on%s), workspace of %d bytes, error %s",
                outcome.candidate.id,
                outcome.status,
                outcome.timing.time_ms,
                outcome.timing.samples,
                outcome.timing.min_ms,
                ", disturbed" if outcome.contended else "",
                outcome.workspace_bytes,
                "unknown" if outcome.max_error is None else f"{outcome.max_error:.2g}",
            )
        self._recording.add(outcome)

    def _left_s(self, share: float) -> float:
        return share * self._request.options.budget_s - (time.monotonic() - self._began)

    def _uncompilable(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Outcomes of the candidates that the pool cannot compile; () without a pool."""
        ahead = self._request.ahead
        if ahead is None or self._request.handle.device.place is not Place.CUDA:
            return []
        steps = {candidate: self._steps(candidate) for candidate in candidates}
        errors = ahead.errors((step for some in steps.values() for step in some), self._request.handle.device.arch)
        broken = {candidate: errors[step] for candidate, some in steps.items() for step in some if step in errors}
        return [
            Outcome(candidate=candidate, status=_status_of(error), message=str(error)[:MAX_MESSAGE])
            for candidate, error in broken.items()
        ]

    def _steps(self, candidate: Candidate) -> tuple[KernelStep, ...]:
        """The kernels of a candidate; () where its solver fails over it, as measuring it will say."""
        solver = self._request.handle.registry.named(candidate.solver_id)
        try:
            return solver.solution(self._request.problem, self._request.handle.device, candidate.config).kernels
        except BaseException as error:  # a solver's own code may raise anything
            raise_if_interrupted(error)
            if not isinstance(error, MiofindError):
                logger.debug("%s has no kernels: %s", candidate.id, described(error))
            return ()


def _status_of(error: CompileError) -> Status:
    """The status that the measuring process, too, gives such a step."""
    return Status.TIMED_OUT if isinstance(error, CompileTimeoutError) else Status.COMPILE_FAILED


def searched(search: Search, measuring: Measuring, also: Sequence[Candidate] = ()) -> list[Outcome]:
    """Outcomes of all that a search measures: screened in rounds, the best raced at the end.

    A round that is known to be the last goes into the race unscreened.

    Args:
        also: raced with the best, whether or not the search finds them.
    """
    outcomes: list[Outcome] = []
    batch = search.propose()
    while True:
        while batch and not measuring.is_late and (following := search.likely_next()):
            measuring.compile_ahead(following)
            new = measuring.run(batch, Effort.SCREEN, best_ms=search.best_ms)
            search.learn(new)
            outcomes += new
            batch = search.propose()
        outcomes += _decided(search, measuring, (*batch, *also))
        if not batch or measuring.is_late:
            return outcomes
        batch, also = search.propose(), ()
        if not batch:
            return outcomes


def _decided(search: Search, measuring: Measuring, others: Sequence[Candidate]) -> list[Outcome]:
    """Outcomes of a last race; of another where a few early samples still put somebody before its winner."""
    outcomes: list[Outcome] = []
    raced: set[Candidate] = set()
    for _ in range(_FINALS):
        if raced and (search.fastest is None or search.fastest in raced):
            break
        finalists = search.finalists()
        # What is left of a budget belongs to those that have shown their worth.
        racing = finalists if finalists and measuring.is_late else (*finalists, *others)
        new = measuring.run(racing, Effort.TUNE)
        search.settle(new)
        outcomes += new
        raced.update(racing)
        others = ()
        if not racing:
            break
    return outcomes
