"""A FindDB as a source of a report: the best row of each problem, and the searches that it remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miofind.core.problem import ProblemDescription
from miofind.device.device import IDENTITY, Library, device_text
from miofind.errors import DatabaseError, InvalidConfigError, InvalidProblemError
from miofind.finddb import Answer, History, Row, Store, told_address
from miofind.report.results import (
    AGAINST_CUDNN,
    OWN_AGAINST_CUDNN,
    ProblemResult,
    SearchCurve,
    SourceContent,
    ratio_of,
)
from miofind.solver.steps import Config, config_text

MIN_TRIALS = 16
"""Configurations tried from which on a find is shown as a search."""

MAX_CURVES = 200


def read_finddb(address: str | Path) -> SourceContent:
    """What a FindDB holds: one result for each problem of which something is usable.

    Raises:
        DatabaseError: it is not there, or cannot be read.
    """
    with Store(address, read_only=True) as store:
        if store.in_memory or not store.exists:
            raise DatabaseError(
                f"there is no FindDB at {told_address(address)}: name another, or fill one with `miofind tune`"
            )
        with store.open().one_instant():
            return _content(store, told_address(address))


def _content(store: Store, name: str) -> SourceContent:
    is_release = store.release() is not None
    results: list[ProblemResult] = []
    curves: list[SearchCurve] = []
    unreadable = unsolved = 0
    for history in store.histories():
        try:
            problem = ProblemDescription.from_network_config(history.network_config)
        except InvalidProblemError:
            unreadable += 1
            continue
        answer = store.answer(history.device, history.network_config)
        if answer is None or not len(answer.rows):
            unsolved += 1
            continue
        if not is_release and (curve := search_curve(history.rows, len(results))) is not None:
            curves.append(curve)
        found = _result(problem, answer, history)
        results.append(replace(found, ratios=_without_own(found.ratios)) if is_release else found)
    return SourceContent(
        name=name,
        kind="FindDB",
        results=tuple(results),
        curves=tuple(sorted(curves, key=lambda curve: -curve.trials[-1])[:MAX_CURVES]),
        notes=_notes(unreadable, unsolved, len(curves)),
    )


def _device_name(identity: str) -> str:
    """The GPU's name; the whole identity where it has a part of one alone."""
    told = IDENTITY.fullmatch(identity)
    return told["name"] if told is not None and told["name"] and not told["mig_profile"] else device_text(identity)


def _result(problem: ProblemDescription, answer: Answer, history: History) -> ProblemResult:
    rows = answer.rows
    best = rows[0]
    times = {library: _best_ms(rows, library) for library in (Library.CUDNN, Library.PLAIN)}
    compared = {
        AGAINST_CUDNN: ratio_of(times[Library.CUDNN], best.time_ms),
        OWN_AGAINST_CUDNN: ratio_of(times[Library.CUDNN], times[Library.PLAIN]),
    }
    return ProblemResult(
        problem=problem,
        device=_device_name(history.device),
        solver_id=best.solver_id,
        config=_config_text(best),
        library=best.library,
        time_ms=best.time_ms,
        ratios={name: ratio for name, ratio in compared.items() if ratio is not None},
        marks=_marks(best, history),
    )


def _without_own(ratios: Mapping[str, float]) -> dict[str, float]:
    """The ratios of a release: it has no rows of a solver whose kernels changed, so its best own one may be missing."""
    return {name: ratio for name, ratio in ratios.items() if name != OWN_AGAINST_CUDNN}


def _best_ms(rows: Iterable[Row], library: Library) -> float | None:
    return min((row.time_ms for row in rows if row.library == library and row.time_ms is not None), default=None)


def _config_text(row: Row) -> str:
    try:
        return config_text(Config.from_json(row.config))
    except (InvalidConfigError, RecursionError):
        return row.config


def _marks(best: Row, history: History) -> tuple[str, ...]:
    verdict = history.verdicts[-1] if history.verdicts else None
    found = {
        "tie": verdict is not None and len(verdict.ties) > 1 and best.candidate in verdict.ties,
        "contended": best.contended,
        "cut off": best.status == "cut_off",
        "not deterministic": not best.deterministic,
    }
    return tuple(name for name, holds in found.items() if holds)


def search_curve(rows: Sequence[Row], place: int) -> SearchCurve | None:
    """The best time after each batch of trials of a problem's rows; None where fewer than MIN_TRIALS were tried.

    Rows of one batch have one time of recording, so nothing is known of their order.
    """
    tried: set[str] = set()
    best_ms: float | None = None
    trials: list[int] = []
    times: list[float] = []
    ordered = sorted((row for row in rows if not row.is_rival), key=lambda row: row.created_at)
    for row, following in zip(ordered, [*ordered[1:], None], strict=True):
        tried.add(row.candidate)
        if row.usable and row.time_ms is not None:
            best_ms = row.time_ms if best_ms is None else min(best_ms, row.time_ms)
        ends = following is None or following.created_at != row.created_at
        if ends and best_ms is not None and (not trials or trials[-1] < len(tried)):
            trials.append(len(tried))
            times.append(best_ms)
    if len(tried) < MIN_TRIALS or len(trials) < 2:
        return None
    return SearchCurve(place=place, trials=tuple(trials), best_ms=tuple(times))


def _notes(unreadable: int, unsolved: int, curves: int) -> tuple[str, ...]:
    notes = {
        f"{unreadable} problems are left out: this release cannot read their network_config": unreadable,
        f"{unsolved} problems are left out: nothing usable is known of them": unsolved,
        f"of {curves} searches the {MAX_CURVES} with most trials are drawn": curves > MAX_CURVES,
    }
    return tuple(note for note, applies in notes.items() if applies)
