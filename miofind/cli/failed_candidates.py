"""Candidates that an answer lacks because they failed: a line for people, objects for programs, and counts of both."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from miofind.finddb import told_address, user_path
from miofind.runtime.handle import Handle
from miofind.solver.candidate import Candidate, Outcome, Status

_SOLVERS_NAMED = 3
_MESSAGE_CHARS = 200
_GRAVEST_FIRST = (
    Status.WRONG_RESULT,
    Status.CRASHED,
    Status.TIMED_OUT,
    Status.LAUNCH_FAILED,
    Status.COMPILE_FAILED,
    Status.OUT_OF_MEMORY,
)


def left_out_lines(failed: Sequence[Outcome], handle: Handle) -> list[str]:
    """One line on who failed at a problem and why, the gravest first; none where nobody did."""
    if not failed:
        return []
    groups: dict[tuple[str, Status], list[Outcome]] = {}
    for outcome in sorted(failed, key=lambda outcome: _GRAVEST_FIRST.index(outcome.status)):
        groups.setdefault((outcome.candidate.solver_id, outcome.status), []).append(outcome)
    told = [_group_text(group) for group in groups.values()]
    more = [f"and {len(told) - _SOLVERS_NAMED} more"] if len(told) > _SOLVERS_NAMED else []
    listed = ", ".join([*told[:_SOLVERS_NAMED], *more])
    where = _where_told(failed[0].candidate, handle) or "--verbose"  # what is in memory alone was measured just now
    return [f"left out: {listed}; {where} tells more"]


def _where_told(candidate: Candidate, handle: Handle) -> str:
    """The command that lists the row of a candidate, from the first FindDB that has it; "" where only memory does."""
    for layer in handle.database.layers:
        if layer.in_memory or not (layer.read_only or layer.exists):
            continue
        history = layer.history(handle.device.identity, candidate.network_config)
        if history is not None and any(row.candidate == candidate.id for row in history.rows):
            return f"`{show_all_command(candidate.network_config, layer.location)}`"
    return ""


def show_all_command(network_config: str, database: str) -> str:
    """The command line that lists all that a FindDB has of a problem."""
    named = "" if database == told_address(user_path()) else f" --db {shlex.quote(database)}"
    return f"miofind db show --all{named} {network_config}"


def failed_json(failed: Iterable[Outcome]) -> list[dict[str, object]]:
    """Each of them as an object for JSON."""
    return [
        {
            "solver": outcome.candidate.solver_id,
            "config": dict(outcome.candidate.config),
            "status": outcome.status.value,
            "message": outcome.message,
        }
        for outcome in failed
    ]


def failed_counts(failed: Sequence[Outcome]) -> str:
    """How many were wrong and how many failed otherwise, such as "2 candidates wrong, 1 failed"; "" for none."""
    wrong = sum(outcome.status is Status.WRONG_RESULT for outcome in failed)
    others = len(failed) - wrong
    noun = "candidate" if (wrong or others) == 1 else "candidates"
    if wrong and others:
        return f"{wrong} {noun} wrong, {others} failed"
    return f"{wrong} {noun} wrong" if wrong else f"{others} {noun} failed" if others else ""


def _group_text(group: Sequence[Outcome]) -> str:
    """A solver's failures of one kind, by the first of them."""
    first = group[0]
    count = f"{len(group)} configurations, " if len(group) > 1 else ""
    message = first.message.partition("\n")[0]
    if len(message) > _MESSAGE_CHARS:
        message = f"{message[:_MESSAGE_CHARS]}..."
    reason = ": ".join(filter(None, (first.status.value.replace("_", " "), message)))
    return f"{first.candidate.solver_id} ({count}{reason})"
