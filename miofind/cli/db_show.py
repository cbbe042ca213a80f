"""Tables of `miofind db show`: problems with their winners, or the measurements of one problem."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from miofind.cli.output import (
    Sheet,
    bytes_text,
    count_text,
    error_text,
    print_json,
    print_text,
    tflops_text,
    time_text,
)
from miofind.core.problem import ProblemDescription
from miofind.device.device import device_text
from miofind.errors import InvalidConfigError, InvalidProblemError
from miofind.finddb import ProblemKey, Row, Scope, Store, Verdict
from miofind.solver.steps import Config, config_text
from miofind.text.printable import printable

_LIST = ("problem", "solver", "config", "ms", "TFLOP/s", "workspace")
_ROWS = ("solver", "config", "status", "ms", "p20", "p80", "samples", "workspace", "error", "measured at")
_SPARE = ("measured at", "p80", "p20", "samples", "error")
_CONFIG_CHARS = 40


def stored_config(row: Row) -> Mapping[str, object]:
    """A row's configuration; a text that is none, as any file may hold, is shown as it is."""
    try:
        return dict(Config.from_json(row.config))
    except (InvalidConfigError, RecursionError):
        return {"unreadable": row.config[:_CONFIG_CHARS]}


def candidate_text(candidate: str) -> str:
    """A candidate, solver:{configuration as JSON}, in the form of the tables."""
    solver_id, _, config = candidate.partition(":")
    try:
        return f"{solver_id} {config_text(Config.from_json(config))}".rstrip()
    except (InvalidConfigError, RecursionError):
        return candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """One problem of a FindDB: the rows to show, the scopes of its finds, and the verdict of its last race.

    Times of other libraries stand behind the answer's rows, the newest of each.
    """

    key: ProblemKey
    rows: tuple[Row, ...]
    scopes: tuple[Scope, ...]
    verdict: Verdict | None

    @staticmethod
    def of(store: Store, key: ProblemKey, *, everything: bool) -> HistoryView:
        """The rows of the answer, or all there are."""
        history = store.history(key.device, key.network_config)
        verdict = history.verdicts[-1] if history and history.verdicts else None
        if everything:
            rows, scopes = (history.rows, history.scopes) if history else ((), ())
        else:
            answer = store.answer(key.device, key.network_config)
            rows, scopes = (tuple(answer.rows), answer.scopes) if answer else ((), ())
            rivals = [row for row in history.rows if row.is_rival] if history else []
            rows += tuple({row.candidate: row for row in sorted(rivals, key=lambda row: row.age)}.values())
        return HistoryView(key=key, rows=rows, scopes=scopes, verdict=verdict)

    @property
    def json(self) -> dict[str, object]:
        """The view as an object for JSON."""
        return asdict(self.key) | {
            "rows": [asdict(row) | {"config": stored_config(row)} for row in self.rows],
            "scopes": [asdict(scope) for scope in self.scopes],
            "verdict": None if self.verdict is None else asdict(self.verdict),
        }


def show_history(view: HistoryView) -> None:
    """Print one problem's rows and scopes."""
    title = f"\n{printable(view.key.network_config)}\non {device_text(view.key.device)}"
    made = Sheet(title, _ROWS, right=_ROWS[3:9], fold=("config",), spare=_SPARE)
    for row in view.rows:
        made.add(
            row.solver_id,
            config_text(stored_config(row)),
            f"{row.status}, contended" if row.contended else row.status,
            *(_time(value) for value in (row.time_ms, row.p20_ms, row.p80_ms)),
            f"{row.samples} (-{row.dropped_samples})" if row.dropped_samples else str(row.samples),
            bytes_text(row.workspace_bytes),
            error_text(row.max_error),
            row.created_at[:16].replace("T", " "),
        )
    made.print()
    for row in view.rows:
        if row.message:
            print_text(f"  {candidate_text(row.candidate)}: {row.message.splitlines()[0]}")
    if view.verdict is not None:
        _show_verdict(view.verdict)
    for scope in view.scopes:
        filters = ", ".join(f"{name}={value}" for name, value in scope.filters.items())
        ended = "" if scope.complete else ", ended early"
        print_text(
            f"  find of {count_text(len(scope.solvers), 'solver')} ({scope.effort}{ended})"
            f"{f', {filters}' if filters else ''} at {scope.created_at[:16].replace('T', ' ')}"
        )


def _show_verdict(verdict: Verdict) -> None:
    measured_at = verdict.created_at[:16].replace("T", " ")
    print_text(f"  race of {verdict.blocks} rounds at {measured_at}: {candidate_text(verdict.winner)} won")
    for comparison in sorted(verdict.comparisons, key=lambda item: item.low):
        tied = ", a tie" if comparison.candidate in verdict.ties else ""
        print_text(
            f"    {candidate_text(comparison.candidate)}: {comparison.low:.3f}..{comparison.high:.3f} of its time{tied}"
        )


def list_problems(store: Store, as_json: bool) -> None:
    """Print every problem with its best row."""
    found = list(store.best_of_all().items())
    if as_json:
        print_json({"database": store.location, "problems": [_listed_json(key, row) for key, row in found]})
        return
    for device, group in itertools.groupby(found, key=lambda item: item[0].device):
        made = Sheet(device_text(device), _LIST, right=_LIST[3:], fold=("config", "problem"))
        for key, row in group:
            made.add(key.network_config, *_best_cells(key, row))
        made.print()
    print_text(f"{count_text(len(found), 'problem')} in {store.location}")


def _best_cells(key: ProblemKey, row: Row | None) -> tuple[str, ...]:
    if row is None or row.time_ms is None:
        return ("none", *[""] * 4)
    flops = _flops(key.network_config)
    return (
        row.solver_id,
        config_text(stored_config(row)),
        time_text(row.time_ms),
        tflops_text(flops, row.time_ms) if flops else "-",
        bytes_text(row.workspace_bytes),
    )


def _listed_json(key: ProblemKey, row: Row | None) -> dict[str, object]:
    best = None if row is None else asdict(row) | {"config": stored_config(row)}
    return asdict(key) | {"best": best}


def _flops(network_config: str) -> int:
    """Operations of a problem, 0 where this release cannot read it."""
    try:
        return ProblemDescription.from_network_config(network_config).flops
    except InvalidProblemError:
        return 0


def _time(value: float | None) -> str:
    return "-" if value is None else time_text(value)
