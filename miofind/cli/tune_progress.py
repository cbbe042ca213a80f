"""How a tuning shows that it goes on: a live bar on a terminal, a line a problem elsewhere. All of it on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from miofind.cli.output import print_note, seconds_text, stderr, tflops_text, time_text
from miofind.cli.problems import short_direction, short_problem
from miofind.tune import TuneEvent, TuneFinished, TuneResult, TuneStarted, TuneStatus

OnEvent = Callable[[TuneEvent], None]


@contextmanager
def progress(total: int) -> Iterator[OnEvent]:
    """What to call with the events of a tuning of `total` problems."""
    if not stderr().is_terminal:
        yield _line
        return
    columns = (
        TextColumn("tune"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=stderr(), transient=True) as bar:
        yield _Live(bar, total)


class _Live:
    """Moves a bar; failures are printed above it."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._counts = dict.fromkeys(TuneStatus, 0)
        self._task: TaskID = bar.add_task("", total=total, counts="")

    def __call__(self, event: TuneEvent) -> None:
        """Show one event."""
        if isinstance(event, TuneStarted):
            problem = event.request.problem
            description = f"{event.request.layer} {short_problem(problem)} {short_direction(problem)}"
            self._bar.update(self._task, description=description)
            return
        status = event.result.status
        self._counts[status] += 1
        counts = ", ".join(f"{count} {name.value}" for name, count in self._counts.items() if count)
        self._bar.update(self._task, advance=1, counts=counts)
        if status is TuneStatus.FAILED:
            print_note(_text(event))


def _line(event: TuneEvent) -> None:
    if isinstance(event, TuneFinished):
        print_note(_text(event))


def _text(event: TuneFinished) -> str:
    result = event.result
    problem = result.request.problem
    width = len(str(event.total))
    where = f"[{event.number:>{width}}/{event.total}] {result.status.value:6} {result.request.layer}"
    return f"{where} {short_problem(problem)} {short_direction(problem)}: {_outcome(result)}"


def _outcome(result: TuneResult) -> str:
    if not result.solutions:
        return result.message.splitlines()[0]
    best = result.solutions[0]
    rate = tflops_text(best.problem.flops, best.time_ms)
    return f"{best.solver_id} {time_text(best.time_ms)} ms, {rate} TFLOP/s ({seconds_text(result.seconds)})"
