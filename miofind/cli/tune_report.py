"""What a tuning says at its end: a table of winners, what failed, and one line that sums it up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from miofind.cli.failed_candidates import failed_counts, failed_json, left_out_lines
from miofind.cli.output import (
    Sheet,
    bytes_text,
    print_text,
    ratio_text,
    seconds_text,
    tflops_text,
    time_text,
)
from miofind.cli.problems import problem_json, traits
from miofind.cli.solution_table import solution_json
from miofind.measure.race import TIE
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.steps import config_text
from miofind.suites.short_text import short_direction, short_problem
from miofind.text.printable import printable_name
from miofind.tune.service import TuneEnd, TuneResult, TuneStatus, TuneSummary, mean_gain

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
_LEAST_GAIN_SHOWN = 1.005
_ENDS = {
    TuneEnd.COMPLETE: "",
    TuneEnd.INTERRUPTED: "interrupted",
    TuneEnd.OUT_OF_TIME: "out of time",
    TuneEnd.DEVICE_LOST: "the device was lost",
}


def print_report(summary: TuneSummary, handles: Sequence[Handle]) -> None:
    """Print a table of winners a kind of device, the failures and the summary."""
    for kind, handle in by_kind(handles).items():
        solved = [result for result in summary.results if result.solutions and result.kind == kind]
        if solved:
            _winners(solved, handle).print()
    for result in summary.results:
        if not result.solutions:
            first, *more = _shortened(result.message)
            print_text(f"failed: {printable_name(result.request.layer)} {first}", *more)
    _print_failed_candidates(summary.results, by_kind(handles))
    print_text(_summary_line(summary, handles))


def _print_failed_candidates(results: Iterable[TuneResult], kinds: Mapping[str, Handle]) -> None:
    """A line a problem on what is left out of its solutions; of many problems the first."""
    lines = [
        f"{printable_name(result.request.layer)} {short_direction(result.request.problem)}: {line}"
        for result in results
        if result.solutions
        for line in left_out_lines(result.failed, kinds[result.kind])
    ]
    rest = len(lines) - _REASONS_SHOWN
    print_text(*lines[:_REASONS_SHOWN], *([f"  and {rest} more: see --json"] if rest > 0 else []))


def by_kind(handles: Iterable[Handle]) -> dict[str, Handle]:
    """The first handle of each kind of device, by identity."""
    found: dict[str, Handle] = {}
    for handle in handles:
        found.setdefault(handle.device.identity, handle)
    return found


def second_best(solutions: Sequence[Solution]) -> Solution | None:
    """The fastest solution of another solver than the first's."""
    return next((s for s in solutions[1:] if s.solver_id != solutions[0].solver_id), None)


def summary_json(summary: TuneSummary, handles: Sequence[Handle]) -> dict[str, object]:
    """The whole tuning as one object."""
    return {
        "devices": [
            {"device": handle.device.identity, "index": handle.device.index, "lost": summary.lost.get(number)}
            for number, handle in enumerate(handles)
        ],
        "database": _database(handles[0]),
        "end": summary.end.value,
        "seconds": summary.seconds,
        "total": summary.total,
        "counts": {status.value: summary.count(status) for status in TuneStatus} | {"left": summary.left},
        "gain": mean_gain(summary.results),
        "calls_ms": {kind: _calls_ms(summary.results, kind) for kind in by_kind(handles)},
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


def _shortened(message: str) -> list[str]:
    lines = message.split("\n")
    rest = len(lines) - _REASONS_SHOWN
    return lines[:_REASONS_SHOWN] + ([f"  and {rest} more: see --json"] if rest > 0 else [])


def _summary_line(summary: TuneSummary, handles: Sequence[Handle]) -> str:
    counts: Mapping[str, int] = {
        "measured": summary.count(TuneStatus.TUNED),
        "known already": summary.count(TuneStatus.KNOWN),
        "failed": summary.count(TuneStatus.FAILED),
        "left": summary.left,
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if candidates := failed_counts([outcome for result in summary.results for outcome in result.failed]):
        told = f"{told} ({candidates})" if told else candidates
    kinds = by_kind(handles)
    gain = mean_gain(summary.results)
    parts = [f"{_plural(summary.total, 'problem')}, {told or 'nothing to measure'} in {seconds_text(summary.seconds)}"]
    if len(handles) > 1:
        parts[0] += f" on {len(handles)} devices" + (f", {len(summary.lost)} lost" if summary.lost else "")
    if summary.total and sum(bool(result.solutions) for result in summary.results) == summary.total:
        times = " and ".join(f"{time_text(_calls_ms(summary.results, kind))} ms" for kind in kinds)
        parts.append(f"all their calls together take {times}")
    if gain is not None and gain >= _LEAST_GAIN_SHOWN:
        parts.append(f"{ratio_text(gain)} as fast as the first defaults (geometric mean over all calls)")
    end = f"{_ENDS[summary.end]}: " if _ENDS[summary.end] else ""
    return end + "; ".join([*parts, f"FindDB: {_database(handles[0])}"])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _calls_ms(results: Iterable[TuneResult], kind: str) -> float:
    """Time of all calls of the problems that have a solution, each as often as the suites call it."""
    solved = (result for result in results if result.solutions and result.kind == kind)
    return math.fsum(result.solutions[0].time_ms * result.request.count for result in solved)


def _database(handle: Handle) -> str:
    store = handle.database.user
    return "in memory" if store.in_memory else store.location


def _result_json(result: TuneResult) -> dict[str, object]:
    request = result.request
    second = second_best(result.solutions)
    return problem_json(request.problem) | {
        "device": result.kind,
        "suite": request.suite,
        "layer": request.layer,
        "count": request.count,
        "status": result.status.value,
        "message": result.message,
        "failed": failed_json(result.failed),
        "seconds": result.seconds,
        "gain": result.gain,
        "best": solution_json(result.solutions[0]) if result.solutions else None,
        "second_best": solution_json(second) if second else None,
        "solutions": len(result.solutions),
    }
