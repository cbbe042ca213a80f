"""What `miofind db show` prints: problems with their winners, or all that is known of one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from miofind.cli.output import (
    Sheet,
    bytes_text,
    config_text,
    error_text,
    print_json,
    print_text,
    tflops_text,
    time_text,
)
from miofind.errors import InvalidProblemError
from miofind.finddb import ProblemKey, Row, Scope, Store
from miofind.problem import ProblemDescription
from miofind.solution import Config

_LIST = ("device", "problem", "solver", "config", "ms", "TFLOP/s", "workspace")
_ROWS = ("solver", "config", "status", "ms", "p20", "p80", "samples", "workspace", "error", "measured at")
_CONFIG_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """What a FindDB knows of one problem: the rows to show, and the scopes of its finds."""

    key: ProblemKey
    rows: tuple[Row, ...]
    scopes: tuple[Scope, ...]

    @staticmethod
    def of(store: Store, key: ProblemKey, *, everything: bool) -> HistoryView:
        """The rows of the answer, or all there are."""
        if everything:
            history = store.history(key.device, key.network_config)
            rows, scopes = (history.rows, history.scopes) if history else ((), ())
        else:
            answer = store.answer(key.device, key.network_config)
            rows, scopes = (tuple(answer.rows), answer.scopes) if answer else ((), ())
        return HistoryView(key=key, rows=rows, scopes=scopes)

    @property
    def json(self) -> dict[str, object]:
        """The same as an object."""
        return asdict(self.key) | {
            "rows": [asdict(row) | {"config": dict(Config.from_json(row.config))} for row in self.rows],
            "scopes": [asdict(scope) for scope in self.scopes],
        }


def show_history(view: HistoryView) -> None:
    """Print one problem's rows and scopes."""
    made = Sheet(f"\n{view.key.network_config}  on {view.key.device}", _ROWS, right=_ROWS[3:9])
    for row in view.rows:
        made.add(
            row.solver_id,
            config_text(Config.from_json(row.config)),
            row.status,
            *(_time(value) for value in (row.time_ms, row.p20_ms, row.p80_ms)),
            str(row.samples),
            bytes_text(row.workspace_bytes),
            error_text(row.max_error),
            row.created_at[:16].replace("T", " "),
        )
    made.print()
    for row in view.rows:
        if row.message:
            print_text(f"  {row.solver_id}:{row.config}: {row.message.splitlines()[0]}")
    for scope in view.scopes:
        filters = ", ".join(f"{name}={value}" for name, value in scope.filters.items())
        ended = "" if scope.complete else ", ended early"
        print_text(
            f"  find of {len(scope.solvers)} solvers ({scope.effort}{ended})"
            f"{f', {filters}' if filters else ''} at {scope.created_at[:16].replace('T', ' ')}"
        )


def list_problems(store: Store, as_json: bool) -> None:
    """Print every problem with its best row."""
    found = [(key, _best(store, key)) for key in store.problems()]
    if as_json:
        print_json({"database": str(store.path), "problems": [_listed_json(key, row) for key, row in found]})
        return
    made = Sheet("", _LIST, right=_LIST[4:])
    for key, row in found:
        if row is None or row.time_ms is None:
            made.add(key.device, key.network_config, "none", *[""] * 4)
            continue
        flops = _flops(key.network_config)
        made.add(
            key.device,
            key.network_config,
            row.solver_id,
            config_text(Config.from_json(row.config), _CONFIG_CHARS),
            time_text(row.time_ms),
            tflops_text(flops, row.time_ms) if flops else "-",
            bytes_text(row.workspace_bytes),
        )
    if found:
        made.print()
    print_text(f"{len(found)} problems in {store.path}")


def _best(store: Store, key: ProblemKey) -> Row | None:
    answer = store.answer(key.device, key.network_config)
    return answer.rows[0] if answer is not None and len(answer.rows) else None


def _listed_json(key: ProblemKey, row: Row | None) -> dict[str, object]:
    best = None if row is None else asdict(row) | {"config": dict(Config.from_json(row.config))}
    return asdict(key) | {"best": best}


def _flops(network_config: str) -> int:
    """Operations of a problem, 0 where this release cannot read it."""
    try:
        return ProblemDescription.from_network_config(network_config).flops
    except InvalidProblemError:
        return 0


def _time(value: float | None) -> str:
    return "-" if value is None else time_text(value)
