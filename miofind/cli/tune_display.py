"""How a tuning shows that it goes on: a live table on a terminal, elsewhere a line a problem and some in between.

All of it on stderr.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from miofind.cli.failed_candidates import failed_counts
from miofind.cli.output import print_note, ratio_text, seconds_text, stderr, tflops_text, time_text
from miofind.cli.tune_progress import DeviceProgress, TuneProgress
from miofind.device.device import Device, Place
from miofind.process.threads import Helper
from miofind.suites import SuiteProblem
from miofind.suites.short_text import short_direction, short_problem
from miofind.text.printable import printable, printable_name
from miofind.tune.service import OnEvent, TuneEvent, TuneFinished, TuneLost, TuneResult, TuneStatus

_EVERY_S = 5.0
"""Seconds of silence after which a line says what is measured; twice as many before the next, up to _LONGEST_S."""
_LONGEST_S = 60.0

_NUMBERS = ("done", "failed", "left", "ETA", "gain")


@contextmanager
def display() -> Iterator[OnEvent]:
    """What to call with the events of a tuning."""
    if not stderr().is_terminal:
        lines = _TuneLines()
        with _reminded(lines):
            yield lines
        return
    view = _View()
    with Live(console=stderr(), transient=True, refresh_per_second=4, get_renderable=view.shown):
        yield view


def device_name(number: int, device: Device) -> str:
    """A device in a few words, such as "GPU 0 NVIDIA H200"."""
    place = "GPU" if device.place is Place.CUDA else "CPU"
    return f"{place} {device.index if device.index >= 0 else number} {device.name}"


class _TuneLines:
    """Prints a line for each problem that is done with and each device that is lost, and one after silence."""

    def __init__(self) -> None:
        self._progress = TuneProgress()
        self._lock = threading.Lock()
        self._began = self._told = time.monotonic()
        self._pause_s = _EVERY_S

    def __call__(self, event: TuneEvent) -> None:
        with self._lock:
            self._progress.take(event)
            text = _text(event, self._progress)
            if text:
                print_note(text)
                self._told, self._pause_s = time.monotonic(), _EVERY_S

    def remind(self) -> None:
        """Print what is measured where nothing was printed for a while; another thread may call."""
        with self._lock:
            now = time.monotonic()
            running = [state for state in self._progress.devices if state.task is not None]
            if not running or now - self._told < self._pause_s:
                return
            print_note(_running_text(self._progress, running, now, now - self._began))
            self._told, self._pause_s = now, min(2 * self._pause_s, _LONGEST_S)


@contextmanager
def _reminded(lines: _TuneLines) -> Iterator[None]:
    """Have a thread ask every few seconds whether a line is due."""
    ended = threading.Event()

    def remind() -> None:
        while not ended.wait(_EVERY_S):
            lines.remind()

    helper = Helper("miofind-tune-lines")
    helper.submit(remind)
    try:
        yield
    finally:
        ended.set()
        helper.finish()


class _View:
    """A table that is drawn again and again, a row a device; failures are printed above it."""

    def __init__(self) -> None:
        self._progress = TuneProgress()
        self._began = time.monotonic()

    def __call__(self, event: TuneEvent) -> None:
        self._progress.take(event)
        failed = isinstance(event, TuneFinished) and event.result.status is TuneStatus.FAILED
        if failed or isinstance(event, TuneLost):
            print_note(_text(event, self._progress))

    def shown(self) -> RenderableType:
        """The table as it is now, and a line that sums it up."""
        table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
        for name in ("device", "measures", "for", *_NUMBERS):
            right = name in (*_NUMBERS, "for")
            table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
        for number, state in enumerate(self._progress.devices):
            table.add_row(*map(printable, self._cells(number, state)))
        counts = self._progress.counts()
        told = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
        elapsed = seconds_text(time.monotonic() - self._began)
        return Group(table, Text(f"{sum(counts.values())}/{self._progress.total} {told or 'begun'} in {elapsed}"))

    def _cells(self, number: int, state: DeviceProgress) -> list[str]:
        eta_s, gain = self._progress.eta_s(state), self._progress.gain(state)
        task = state.task
        return [
            device_name(number, state.device),
            "lost" if state.lost else "-" if task is None else _named(task.request),
            "-" if task is None else seconds_text(time.monotonic() - state.since),
            str(sum(state.counts.values())),
            str(state.counts[TuneStatus.FAILED]),
            str(self._progress.left(state)),
            "-" if eta_s is None else seconds_text(eta_s),
            "-" if gain is None else ratio_text(gain),
        ]


def _text(event: TuneEvent, progress: TuneProgress) -> str:
    """One line on what happened, "" where it is not worth one."""
    if isinstance(event, TuneLost):
        return f"lost {device_name(event.device, progress.devices[event.device].device)}: {event.message}"
    if not isinstance(event, TuneFinished):
        return ""
    result, width = event.result, len(str(event.total))
    several = len(progress.devices) > 1
    where = f"{device_name(event.device, progress.devices[event.device].device)}: " if several else ""
    head = f"[{event.number:>{width}}/{event.total}] {result.status.value:6} {where}"
    return f"{head}{_named(result.request)}: {_outcome(result)}"


def _running_text(progress: TuneProgress, running: Sequence[DeviceProgress], now: float, elapsed_s: float) -> str:
    """One line on what is measured, the longest first."""
    first, *others = sorted(running, key=lambda state: state.since)
    assert first.task is not None
    done = sum(progress.counts().values())
    eta_s = progress.eta_s(first)
    left = "" if eta_s is None else f", about {seconds_text(eta_s)} left"
    more = f", and {len(others)} more" if others else ""
    named = f"{_named(first.task.request)} for {seconds_text(now - first.since)}"
    return f"tune: {done}/{progress.total} in {seconds_text(elapsed_s)}{left}; measuring {named}{more}"


def _named(request: SuiteProblem) -> str:
    return f"{printable_name(request.layer)} {short_problem(request.problem)} {short_direction(request.problem)}"


def _outcome(result: TuneResult) -> str:
    if not result.solutions:
        return result.message.splitlines()[0]
    best = result.solutions[0]
    rate = tflops_text(best.problem.flops, best.time_ms)
    gain = "" if result.gain is None or result.gain < 1.005 else f", gain {ratio_text(result.gain)}"
    failed = f", {counts}" if (counts := failed_counts(result.failed)) else ""
    took = seconds_text(result.seconds)
    return f"{best.solver_id} {time_text(best.time_ms)} ms, {rate} TFLOP/s{gain}{failed} ({took})"
