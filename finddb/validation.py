"""What a FindDB takes in: bounds, types and forms of rows, scopes, verdicts and environments, whoever offers them.

Strings come from users and from other people's databases, so all of them are bounded; what would name a machine or a
person (folders, host names, device ids) is refused or taken out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from miofind.errors import DatabaseError, described
from miofind.finddb.values import (
    EFFORTS,
    STATUSES,
    Comparison,
    History,
    Row,
    Scope,
    Verdict,
    canonical_json,
    content_id,
    environment_id,
    without_defaults,
)

Checked = TypeVar("Checked", Row, Scope, Verdict)

MAX_NAME_CHARS = 200
MAX_KEY_BYTES = 2000
"""Of a device and a network_config together: PostgreSQL's indexes hold 2.7 kB."""

_MAX_REASON_BYTES = 500
MAX_JSON_CHARS = 20_000
MAX_MESSAGE_CHARS = 2000
MAX_INT = 2**63 - 1
_MOST_SHOWN = 120

PRIVATE_KEYS = frozenset({"gpu_uuid", "uuid", "host", "hostname", "user", "username", "path", "home", "ip"})
"""Environment keys that name a machine or a person."""

LAST_STAMP = "2199-12-31T23:59:59.999999Z"
"""The end of what `created_at` can be."""

_CREATED_AT = re.compile(r"(19|20|21)\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_ENVIRONMENT_KEY = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
_FOLDERS = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:\"'<>|()\[\],;]+)*[/\\](?=[^\s/\\])")


class RefusedEntryError(DatabaseError):
    """Something a FindDB does not take in, whatever state its file is in."""


def checked_key(device: str, network_config: str) -> None:
    """Refuses strings that cannot name a device and a problem.

    Raises:
        RefusedEntryError: the message names the field and the value.
    """
    _text("device", device, MAX_KEY_BYTES, required=True)
    _text("network_config", network_config, MAX_KEY_BYTES, required=True)
    if len(device.encode()) + len(network_config.encode()) > MAX_KEY_BYTES:
        raise _refused("network_config", network_config, f"at most {MAX_KEY_BYTES} bytes with its device's name")


def checked_row(device: str, network_config: str, row: Row) -> Row:
    """The row with folders taken out of its message, numbers as floats, and its id.

    Raises:
        RefusedEntryError: a field of a wrong type, form or size, or an id that is not that of the content.
    """
    for name in ("solver_id", "algorithm", "library", "source_hash", "kernel_hash", "protocol", "environment"):
        _text(name, getattr(row, name), MAX_NAME_CHARS, required=name == "solver_id")
    _check_config(row.config)
    if not isinstance(row.status, str) or row.status not in STATUSES:
        raise _refused("status", row.status, f"one of {', '.join(sorted(STATUSES))}")
    for name in ("deterministic", "contended"):
        _flag(name, getattr(row, name))
    for name in ("solver_version", "samples", "workspace_bytes", "dropped_samples"):
        _count(name, getattr(row, name))
    _check_created_at(row.created_at)
    numbers = _numbers(row)
    row = replace(
        row,
        status=str(row.status),
        message=_clean_message(row.message),
        time_ms=numbers["time_ms"],
        min_ms=numbers["min_ms"],
        p20_ms=numbers["p20_ms"],
        p80_ms=numbers["p80_ms"],
        max_error=numbers["max_error"],
    )
    return _with_id(device, network_config, row)


def checked_scope(device: str, network_config: str, scope: Scope) -> Scope:
    """The scope with its id.

    Raises:
        RefusedEntryError: a field of a wrong type, form or size, or an id that is not that of the content.
    """
    if not isinstance(scope.solvers, Mapping):
        raise _refused("solvers", scope.solvers, "a mapping of solver ids to versions")
    for solver_id, version in scope.solvers.items():
        _text("solver_id", solver_id, MAX_NAME_CHARS, required=True)
        _count(f"version of {solver_id}", version)
    _check_json("filters", scope.filters)
    _check_json("solvers", scope.solvers)
    if scope.workspace_limit_bytes is not None:
        _count("workspace_limit_bytes", scope.workspace_limit_bytes)
    if scope.effort not in EFFORTS:
        raise _refused("effort", scope.effort, f"one of {', '.join(EFFORTS)}")
    _flag("complete", scope.complete)
    _check_created_at(scope.created_at)
    scope = replace(scope, effort=str(scope.effort))
    return _with_id(device, network_config, scope)


def checked_verdict(device: str, network_config: str, verdict: Verdict) -> Verdict:
    """The verdict with its bounds as floats, and its id.

    Raises:
        RefusedEntryError: a field of a wrong type, form or size, or an id that is not that of the content.
    """
    return _with_id(device, network_config, well_formed_verdict(verdict))


def well_formed_verdict(verdict: Verdict) -> Verdict:
    """The verdict with its bounds as floats, its id as it was.

    Raises:
        RefusedEntryError: a field of a wrong type, form or size.
    """
    _check_candidate("winner", verdict.winner)
    if not isinstance(verdict.ties, tuple) or verdict.ties[:1] != (verdict.winner,):
        raise _refused("ties", verdict.ties, "a tuple of candidates, the winner first")
    for candidate in verdict.ties[1:]:
        _check_candidate("ties", candidate)
    if not isinstance(verdict.comparisons, tuple):
        raise _refused("comparisons", verdict.comparisons, "a tuple of comparisons")
    verdict = replace(verdict, comparisons=tuple(map(_checked_comparison, verdict.comparisons)))
    for name, found in (("ties", verdict.ties), ("comparisons", [item.candidate for item in verdict.comparisons])):
        if len(set(found)) < len(found):
            raise _refused(name, found, "each candidate once")
    _count("blocks", verdict.blocks)
    for name in ("protocol", "environment", "id"):
        _text(name, getattr(verdict, name), MAX_NAME_CHARS)
    _check_created_at(verdict.created_at)
    text = canonical_json(without_defaults(verdict))
    if len(text) > MAX_JSON_CHARS:
        raise _refused("verdict", text, f"at most {MAX_JSON_CHARS} characters of JSON")
    return verdict


def checked_history(history: History) -> History:
    """The history as it will be stored: of known form, with the ids of its entries.

    Raises:
        RefusedEntryError: something of it cannot be stored.
    """
    key = (history.device, history.network_config)
    checked_key(*key)
    for name, versions in history.environments.items():
        if checked_environment(versions) != name:
            raise RefusedEntryError(f"environment {name!r} is not named by the hash of its versions: it was altered")
    return replace(
        history,
        rows=tuple(checked_row(*key, row) for row in history.rows),
        scopes=tuple(checked_scope(*key, scope) for scope in history.scopes),
        verdicts=tuple(checked_verdict(*key, verdict) for verdict in history.verdicts),
    )


def refusal(device: str, network_config: str, entry: Row | Scope | Verdict) -> str:
    """Why a FindDB does not take in a new entry of a problem, "" where it does."""
    entry = replace(entry, created_at=entry.created_at or LAST_STAMP)
    try:
        if isinstance(entry, Row):
            checked_row(device, network_config, entry)
        elif isinstance(entry, Scope):
            checked_scope(device, network_config, entry)
        else:
            checked_verdict(device, network_config, entry)
    except RefusedEntryError as error:
        return str(error)
    return ""


def checked_environment(versions: Mapping[str, str]) -> str:
    """The id of an environment that holds versions and nothing that names a machine or a person.

    Raises:
        RefusedEntryError: the message names the key and what is wrong with it.
    """
    _check_json("environment", versions)
    for key, value in versions.items():
        if not _ENVIRONMENT_KEY.fullmatch(key):
            raise _refused("environment", key, "keys of lower-case letters, digits and underscores")
        if key in PRIVATE_KEYS:
            raise _refused("environment", key, "versions only: a FindDB is passed on and names no machine or person")
        _text(f"environment {key}", value, MAX_NAME_CHARS)
        if without_folders(value) != value:
            raise _refused(f"environment {key}", value, "a version, not a path")
    return environment_id(versions)


def checked_reason(reason: str) -> None:
    """Refuses a reason for a re-check that is no short text.

    Raises:
        RefusedEntryError: the message shows the reason.
    """
    _text("reason", reason, MAX_NAME_CHARS, required=True)
    if len(reason.encode()) > _MAX_REASON_BYTES:
        raise _refused("reason", reason, f"at most {_MAX_REASON_BYTES} bytes")


def without_folders(text: str) -> str:
    """The text with the folders of absolute paths taken out: what is stored says nothing about the machine."""
    return _FOLDERS.sub("", text)


def _clean_message(message: str) -> str:
    if not isinstance(message, str):
        raise _refused("message", message, "a string")
    printable = message.encode("utf-8", "replace").decode().replace("\0", "")
    return without_folders(printable)[:MAX_MESSAGE_CHARS]


def _check_config(config: str) -> None:
    if not isinstance(config, str) or len(config) > MAX_JSON_CHARS:
        raise _refused("config", config, f"a string of at most {MAX_JSON_CHARS} characters")
    try:
        values = json.loads(config)
        canonical = canonical_json(values)
    except (ValueError, RecursionError) as error:
        raise _refused("config", config, "a JSON object") from error
    if not isinstance(values, dict) or canonical != config:
        raise _refused("config", config, "a JSON object in canonical form: sorted keys, no spaces, ASCII")


def _check_candidate(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _refused(name, value, "a candidate such as Solver:{}")
    solver_id, separator, config = value.partition(":{")
    _text(name, solver_id, MAX_NAME_CHARS, required=True)
    if not separator:
        raise _refused(name, value, "a candidate such as Solver:{}")
    _check_config("{" + config)


def _checked_comparison(comparison: Comparison) -> Comparison:
    if not isinstance(comparison, Comparison):
        raise _refused("comparisons", comparison, "comparisons")
    _check_candidate("candidate", comparison.candidate)
    low, high = _number("low", comparison.low), _number("high", comparison.high)
    if not low or not high or low > high:
        raise _refused("comparison", (comparison.low, comparison.high), "0 < low <= high")
    return replace(comparison, low=low, high=high)


def _check_json(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise _refused(name, value, "a mapping")
    try:
        text = canonical_json(dict(value))
        same = json.loads(text) == dict(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(name, value, "a mapping that JSON has a form for") from error
    if not same:
        raise _refused(name, value, "a mapping of strings to plain JSON values (lists, not tuples)")
    if len(text) > MAX_JSON_CHARS:
        raise _refused(name, text, f"at most {MAX_JSON_CHARS} characters of JSON")


def is_stamp(value: object) -> bool:
    """Whether it is a time in the form of `created_at`, LAST_STAMP at most."""
    if not isinstance(value, str) or not _CREATED_AT.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:  # such as the 31st of February
        return False
    return True


def _check_created_at(value: object) -> None:
    if not is_stamp(value):
        raise _refused("created_at", value, "a time such as 2026-01-31T12:00:00.000000Z")


def _numbers(row: Row) -> dict[str, float | None]:
    """Times and error as floats, so that 1 and 1.0 have one id."""
    numbers = {name: _number(name, getattr(row, name)) for name in ("time_ms", "min_ms", "p20_ms", "p80_ms")}
    if (row.usable or row.is_rival) and not numbers["time_ms"]:
        raise _refused("time_ms", row.time_ms, f"more than 0 in a row of status {row.status}")
    return numbers | {"max_error": _number("max_error", row.max_error)}


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(name, value, "a number or null")
    try:
        number = float(value)
    except OverflowError as error:
        raise _refused(name, value, "a finite number") from error
    if not math.isfinite(number) or number < 0:
        raise _refused(name, value, "a finite number, not negative")
    return number + 0.0  # SQLite keeps no negative zero, and the id must survive it


def _count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise _refused(name, value, "an integer, not negative, below 2**63")


def _text(name: str, value: object, limit: int, *, required: bool = False) -> None:
    if not isinstance(value, str) or not value.isprintable() or len(value) > limit:
        raise _refused(name, value, f"printable text of at most {limit} characters")
    if required and not value:
        raise _refused(name, value, "at least one character")


def _flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise _refused(name, value, "true or false")


def _with_id(device: str, network_config: str, entry: Checked) -> Checked:
    _text("id", entry.id, MAX_NAME_CHARS)
    name = content_id(device, network_config, entry)
    if entry.id and entry.id != name:
        raise _refused("id", entry.id, f"{name}, the hash of its content: it was altered or damaged")
    return replace(entry, id=name)


def _refused(name: str, value: object, wanted: str) -> RefusedEntryError:
    return RefusedEntryError(f"{name}={_shown(value)} cannot be stored in a FindDB: it takes {wanted}")


def _shown(value: object) -> str:
    """The beginning of a value for a message, its type where it cannot be written: too deep, too many digits."""
    shown = described(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 3]}..."
