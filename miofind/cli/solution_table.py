"""How solutions are shown: a table for people, objects for programs."""

from __future__ import annotations

from collections.abc import Sequence

from miofind.cli.output import Sheet, bytes_text, error_text, ratio_text, tflops, tflops_text, time_text
from miofind.runtime.solution import Solution
from miofind.solver.steps import config_text

_COLUMNS = (
    "#",
    "solver",
    "algorithm",
    "library",
    "config",
    "ms",
    "vs best",
    "TFLOP/s",
    "workspace",
    "error",
    "determ.",
    "source",
)
_NUMBERS = ("#", "ms", "vs best", "TFLOP/s", "workspace", "error")
_SPARE = ("source", "determ.", "algorithm", "error", "library", "vs best", "#", "workspace")


def solution_sheet(title: str, solutions: Sequence[Solution]) -> Sheet:
    """Solutions of one problem, one a line."""
    made = Sheet(title, _COLUMNS, right=_NUMBERS, fold=("config",), spare=_SPARE)
    best_ms = min(solution.time_ms for solution in solutions)
    for number, solution in enumerate(solutions, start=1):
        made.add(
            str(number),
            solution.solver_id,
            solution.algorithm.value,
            solution.library.value,
            config_text(solution.config),
            time_text(solution.time_ms),
            ratio_text(solution.time_ms / best_ms),
            tflops_text(solution.problem.flops, solution.time_ms),
            bytes_text(solution.workspace_bytes),
            error_text(solution.max_error),
            "yes" if solution.deterministic else "no",
            solution.source.value,
            style="bold" if number == 1 else "",
        )
    return made


def solution_json(solution: Solution) -> dict[str, object]:
    """What every JSON output says of a solution."""
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
    }
