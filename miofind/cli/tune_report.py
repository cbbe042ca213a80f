"""What a tuning says at its end: a table of winners, what failed, and one line that sums it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miofind.cli.output import (
    Sheet,
    bytes_text,
    config_text,
    print_text,
    ratio_text,
    seconds_text,
    tflops_text,
    time_text,
)
from miofind.cli.problems import problem_json, short_direction, short_problem, traits
from miofind.cli.solution_table import solution_json
from miofind.found import Solution
from miofind.handle import Handle
from miofind.race import TIE
from miofind.tune import TuneEnd, TuneResult, TuneStatus, TuneSummary

_COLUMNS = (
    "layer",
    "problem",
    "dir",
    "solver",
    "config",
    "ms",
    "TFLOP/s",
    "workspace",
    "second best",
    "behind",
    "source",
)
_NUMBERS = ("ms", "TFLOP/s", "workspace", "behind")
_SPARE = ("source", "config", "workspace", "behind", "second best", "dir")
_CONFIG_CHARS = 32
_REASONS_SHOWN = 12
_ENDS = {
    TuneEnd.COMPLETE: "",
    TuneEnd.INTERRUPTED: "interrupted",
    TuneEnd.OUT_OF_TIME: "out of time",
    TuneEnd.DEVICE_LOST: "the device was lost",
}


def print_report(summary: TuneSummary, handle: Handle) -> None:
    """Print the table, the failures and the summary."""
    solved = [result for result in summary.results if result.solutions]
    if solved:
        _winners(solved, handle).print()
    for result in summary.results:
        if not result.solutions:
            print_text(f"failed: {result.request.layer} {_shortened(result.message)}")
    print_text(_summary_line(summary, handle))


def second_best(solutions: Sequence[Solution]) -> Solution | None:
    """The fastest solution of another solver than the first's."""
    return next((s for s in solutions[1:] if s.solver_id != solutions[0].solver_id), None)


def summary_json(summary: TuneSummary, handle: Handle) -> dict[str, object]:
    """The whole tuning as one object."""
    return {
        "device": handle.device.identity,
        "database": _database(handle),
        "end": summary.end.value,
        "seconds": summary.seconds,
        "total": summary.total,
        "counts": {status.value: summary.count(status) for status in TuneStatus} | {"left": summary.left},
        "results": [_result_json(result) for result in summary.results],
    }


def _winners(solved: list[TuneResult], handle: Handle) -> Sheet:
    all_traits = [traits(result.request.problem) for result in solved]
    common = {name: value for name, value in all_traits[0].items() if all(t[name] == value for t in all_traits)}
    about = ", ".join(value for value in common.values() if value)
    made = Sheet(f"{handle.device.name}" + (f": {about}" if about else ""), _COLUMNS, right=_NUMBERS, spare=_SPARE)
    for result, own in zip(solved, all_traits, strict=True):
        made.add(*_cells(result, [value for name, value in own.items() if value and name not in common]))
    return made


def _cells(result: TuneResult, own_traits: list[str]) -> list[str]:
    problem, best = result.request.problem, result.solutions[0]
    second = second_best(result.solutions)
    return [
        result.request.layer,
        " ".join([short_problem(problem), *own_traits]),
        short_direction(problem),
        best.solver_id,
        config_text(best.config, _CONFIG_CHARS),
        time_text(best.time_ms),
        tflops_text(problem.flops, best.time_ms),
        bytes_text(best.workspace_bytes),
        second.solver_id if second else "-",
        _behind(best, second) if second else "-",
        "measured" if result.status is TuneStatus.TUNED else best.source.value,
    ]


def _behind(best: Solution, second: Solution) -> str:
    ratio = second.time_ms / best.time_ms
    return "tie" if ratio <= TIE else ratio_text(ratio)


def _shortened(message: str) -> str:
    lines = message.splitlines()
    rest = len(lines) - _REASONS_SHOWN
    return "\n".join(lines[:_REASONS_SHOWN] + ([f"  and {rest} more: see --json"] if rest > 0 else []))


def _summary_line(summary: TuneSummary, handle: Handle) -> str:
    counts: Mapping[str, int] = {
        "measured": summary.count(TuneStatus.TUNED),
        "known already": summary.count(TuneStatus.KNOWN),
        "failed": summary.count(TuneStatus.FAILED),
        "left": summary.left,
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    solved = [result for result in summary.results if result.solutions]
    calls = ""
    if len(solved) == summary.total:
        total_ms = sum(result.solutions[0].time_ms * result.request.count for result in solved)
        calls = f"; all their calls together take {time_text(total_ms)} ms"
    end = f"{_ENDS[summary.end]}: " if _ENDS[summary.end] else ""
    problems = f"{summary.total} problem{'s' if summary.total > 1 else ''}"
    return f"{end}{problems}, {told} in {seconds_text(summary.seconds)}{calls}; FindDB: {_database(handle)}"


def _database(handle: Handle) -> str:
    path = handle.database.user.path
    return "in memory" if path is None else str(path)


def _result_json(result: TuneResult) -> dict[str, object]:
    request = result.request
    second = second_best(result.solutions)
    return problem_json(request.problem) | {
        "suite": request.suite,
        "layer": request.layer,
        "count": request.count,
        "status": result.status.value,
        "message": result.message,
        "seconds": result.seconds,
        "best": solution_json(result.solutions[0]) if result.solutions else None,
        "second_best": solution_json(second) if second else None,
        "solutions": len(result.solutions),
    }
