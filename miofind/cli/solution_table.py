"""Solutions as commands show them: a table for people, objects for programs, and notes on how far a time goes."""

from __future__ import annotations

from collections.abc import Sequence

from miofind.cli.output import Sheet, bytes_text, error_text, ratio_text, tflops, tflops_text, time_text
from miofind.runtime.solution import Solution, Source
from miofind.solver.steps import config_text

_COLUMNS = (
    "#",
    "solver",
    "algorithm",
    "library",
    "config",
    "ms",
    "notes",
    "vs best",
    "TFLOP/s",
    "workspace",
    "error",
    "determ.",
    "source",
)
_NUMBERS = ("#", "ms", "vs best", "TFLOP/s", "workspace", "error")
_MEANINGS = {
    "predicted": "expected by a model or the solver's estimate, not measured",
    "cut off": "far behind at its first run and timed no further: the time is rough",
    "contended": "something else used the device meanwhile: the time may be too long",
    "tie": "as fast as the best, as far as the measurements tell; the smaller workspace comes first, then the smaller "
    "error",
}
_SPARE = ("source", "determ.", "algorithm", "TFLOP/s", "library", "vs best", "#", "error", "workspace")
"""Workspace and error go last: they say which of ties comes first."""


def solution_sheet(title: str, solutions: Sequence[Solution]) -> Sheet:
    """Solutions of one problem, one a line; notes, where there are any, are shown at every width."""
    has_notes = any(map(notes_of, solutions))
    columns = [name for name in _COLUMNS if name != "notes" or has_notes]
    made = Sheet(title, columns, right=_NUMBERS, fold=("config",), spare=_SPARE)
    best_ms = min(solution.time_ms for solution in solutions)
    for number, solution in enumerate(solutions, start=1):
        made.add(
            str(number),
            solution.solver_id,
            solution.algorithm.value,
            solution.library.value,
            config_text(solution.config),
            time_text(solution.time_ms),
            *([", ".join(notes_of(solution))] if has_notes else []),
            ratio_text(solution.time_ms / best_ms),
            tflops_text(solution.problem.flops, solution.time_ms),
            bytes_text(solution.workspace_bytes),
            error_text(solution.max_error),
            "yes" if solution.deterministic else "no",
            solution.source.value,
            style="bold" if number == 1 else "",
        )
    return made


def notes_of(solution: Solution) -> tuple[str, ...]:
    """The notes on a solution's time: predicted, cut off, contended, tie."""
    holds = {
        "predicted": solution.source is Source.PREDICTED,
        "cut off": solution.cut_off,
        "contended": solution.contended,
        "tie": solution.ties_with_best,
    }
    return tuple(name for name, is_so in holds.items() if is_so)


def explained_notes(solutions: Sequence[Solution]) -> list[str]:
    """A line on each note that one of the solutions has."""
    noted = {note for solution in solutions for note in notes_of(solution)}
    return [f"{note}: {meaning}" for note, meaning in _MEANINGS.items() if note in noted]


def solution_json(solution: Solution) -> dict[str, object]:
    """A solution as an object for JSON."""
    return {
        "id": solution.id,
        "solver": solution.solver_id,
        "algorithm": solution.algorithm.value,
        "library": solution.library.value,
        "config": dict(solution.config),
        "time_ms": solution.time_ms,
        "tflops": tflops(solution.problem.flops, solution.time_ms),
        "workspace_bytes": solution.workspace_bytes,
        "max_error": solution.max_error,
        "deterministic": solution.deterministic,
        "source": solution.source.value,
        "samples": solution.samples,
        "cut_off": solution.cut_off,
        "contended": solution.contended,
        "confidence": solution.confidence,
    }
