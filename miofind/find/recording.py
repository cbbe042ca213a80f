"""Outcomes of a find become rows, a verdict and a scope of the FindDB."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from miofind.core.problem import ProblemDescription
from miofind.device.environment import versions
from miofind.find.lookup.scopes import scope_of
from miofind.find.lookup.validity import solver_hash
from miofind.find.plan import Plan
from miofind.finddb import LIKELY, Comparison, Row, Scope, Verdict, refusal
from miofind.measure.verdict import RaceVerdict
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.registry import Registry

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", Row, Scope, Verdict)

_BATCH = 32
_LONGEST_WAIT_S = 1.0

_FEW = "the likeliest alone were measured"
_MEMORY_RAN_OUT = "a candidate ran out of memory"
_DISTURBED = "measured while another process used the device"

_DIGITS = 6
"""Significant ones of what is kept: a clock has fewer, and each that says nothing costs room in every release."""


def row_of(outcome: Outcome, registry: Registry, *, fused: bool = False) -> Row:
    """What a FindDB keeps of an outcome of one of a registry's solvers.

    Args:
        fused: its problem has an epilogue.
    """
    solver = registry.named(outcome.candidate.solver_id)
    timing = outcome.timing
    return Row(
        solver_id=solver.id,
        solver_version=solver.version,
        config=outcome.candidate.config.json,
        status=outcome.status.value,
        algorithm=solver.algorithm.value,
        library=solver.library.value,
        source_hash=solver_hash(solver, fused=fused),
        kernel_hash=outcome.kernel_hash,
        message=outcome.message,
        time_ms=_rounded(timing.time_ms) if timing else None,
        min_ms=_rounded(timing.min_ms) if timing else None,
        p20_ms=_rounded(timing.p20_ms) if timing else None,
        p80_ms=_rounded(timing.p80_ms) if timing else None,
        samples=timing.samples if timing else 0,
        protocol=timing.protocol if timing else "",
        workspace_bytes=outcome.workspace_bytes,
        deterministic=outcome.deterministic,
        max_error=None if outcome.max_error is None else _rounded(outcome.max_error),
        contended=outcome.contended,
        dropped_samples=outcome.dropped_samples,
    )


def storable(problem: ProblemDescription, handle: Handle, entries: Iterable[Entry]) -> list[Entry]:
    """The entries that a FindDB takes in; of each of the others a warning says why: they must not cost the rest."""
    kept = []
    for entry in entries:
        reason = refusal(handle.device.identity, problem.network_config, entry)
        if not reason:
            kept.append(entry)
            continue
        what = entry.candidate if isinstance(entry, Row) else type(entry).__name__.lower()
        logger.warning("%.100s of %s is not recorded: %s", what, problem, reason)
    return kept


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


class Recording:
    """Writes the outcomes of one find with its verdict and scope when it ends; of a search, in batches as they come.

    What measured stored configurations alone considered no solver, and leaves no scope.
    A search that a budget ended counts as a find of the defaults, too, where it had come to all of them.
    A find that ends drops the problem's notes for a re-check, since it was one; one of the likeliest leaves one more.
    So does something that speaks of the moment alone: a candidate ran out of memory, and not in a re-check for that
    reason, or was measured while another process used the device.

    Attributes:
        search_ended: for a search, whether it came to its own end; a scope is incomplete where a budget ended it.
    """

    def __init__(self, problem: ProblemDescription, options: FindOptions, handle: Handle, plan: Plan) -> None:
        self._problem = problem
        self._options = options
        self._handle = handle
        self._plan = plan
        self._pending: list[Row] = []
        self._written_at = time.monotonic()
        self._tried: set[str] = set()
        self._momentary: dict[str, str] = {}
        self._verdict: Verdict | None = None
        self.search_ended = False

    def __enter__(self) -> Recording:
        return self

    def know(self, candidates: Iterable[Candidate]) -> None:
        """Count candidates as tried that need not be: the FindDB has them, or they are left out."""
        self._tried.update(candidate.id for candidate in candidates)

    def add(self, outcome: Outcome) -> None:
        """Take one outcome."""
        self._tried.add(outcome.candidate.id)
        self._pending.append(row_of(outcome, self._handle.registry, fused=bool(self._problem.epilogue)))
        self._momentary.pop(outcome.candidate.id, None)
        if outcome.status is Status.OUT_OF_MEMORY:
            self._momentary[outcome.candidate.id] = _MEMORY_RAN_OUT
        elif outcome.contended:
            self._momentary[outcome.candidate.id] = _DISTURBED
        if not outcome.status.usable or (self._plan.spaces and self._is_due):
            self._write()

    def add_verdict(self, verdict: RaceVerdict) -> None:
        """Take the verdict of the find's last race; it is written after the rows it speaks of."""
        self._verdict = Verdict(
            winner=verdict.winner,
            ties=verdict.ties,
            comparisons=tuple(
                Comparison(candidate=other.candidate, low=_rounded(other.low), high=_rounded(other.high))
                for other in verdict.comparisons
            ),
            blocks=verdict.rounds,
            protocol=verdict.protocol,
        )

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Write what came; the scope too where the find was not broken off."""
        scope = None
        if kind is None and self._plan.considered:
            scope = scope_of(
                self._options, self._plan.considered, complete=self._is_complete, filtered=self._plan.is_filtered
            )
        if scope is not None and not scope.complete and self._has_tried_defaults:
            self._write(scope, self._verdict)
            scope, self._verdict = replace(scope, effort="defaults", complete=True), None
        reasons = set(self._momentary.values())
        if _MEMORY_RAN_OUT in reasons and _MEMORY_RAN_OUT in self._noted():
            reasons.remove(_MEMORY_RAN_OUT)  # this was the second chance: it does not fit
        if scope is not None and scope.complete and not scope.filters and scope.workspace_limit_bytes is None:
            if scope.effort == LIKELY:
                reasons.add(_FEW)
            self._write(scope, self._verdict, notes=reasons)
            return
        if self._pending or scope is not None or self._verdict is not None:
            self._write(scope, self._verdict)
        for reason in reasons:
            self._handle.database.queue_recheck(self._handle.device.identity, self._problem.network_config, reason)

    def _noted(self) -> set[str]:
        """Reasons for which the problem is queued for a re-check."""
        notes = self._handle.database.rechecks(self._handle.device.identity)
        return {note.reason for note in notes if note.network_config == self._problem.network_config}

    @property
    def _is_due(self) -> bool:
        """Whether a killed process would lose more than a write costs."""
        return len(self._pending) >= _BATCH or time.monotonic() - self._written_at >= _LONGEST_WAIT_S

    @property
    def _is_complete(self) -> bool:
        """Whether no budget ended the find before it had tried all that it would."""
        if self._plan.spaces:
            return self.search_ended
        return self._tried.issuperset(planned.candidate.id for planned in self._plan.candidates)

    @property
    def _has_tried_defaults(self) -> bool:
        """Whether a search has tried all that it begins with, the defaults among them."""
        seeds = (f"{space.solver_id}:{config.json}" for space in self._plan.spaces for config in space.seeds)
        return bool(self._plan.spaces) and self._tried.issuperset(seeds)

    def _write(
        self, scope: Scope | None = None, verdict: Verdict | None = None, notes: Collection[str] | None = None
    ) -> None:
        rows = tuple(self._pending)
        self._written_at = time.monotonic()
        problem, handle = self._problem, self._handle
        handle.database.record(
            handle.device.identity,
            problem.network_config,
            storable(problem, handle, rows),
            scope=next(iter(storable(problem, handle, [scope] if scope else [])), None),
            environment=versions(handle.device),
            verdict=next(iter(storable(problem, handle, [verdict] if verdict else [])), None),
            notes=notes,
        )
        del self._pending[: len(rows)]  # not before: Ctrl-C in a write leaves them to the last one
