"""A FindDB as JSON lines: sorted, stable, checked line by line when it comes back.

The first line names the format. Then, problem by problem, come lines of kind "environment" (before the first entry
that names it), "row", "scope" and "verdict". Fields at their default are left out, so that an export of version 1 reads
as one of this version. It opens no database.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TextIO

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb.schema_versions import SCHEMA_VERSION
from miofind.finddb.validation import checked_environment, checked_key, checked_row, checked_scope, checked_verdict
from miofind.finddb.values import (
    Comparison,
    Entry,
    History,
    ProblemKey,
    Release,
    Row,
    Scope,
    Verdict,
    canonical_json,
    without_defaults,
)

FORMAT = "miofind-finddb"
MAX_LINE_CHARS = 100_000


def write(file: TextIO, histories: Iterable[History]) -> int:
    """Write histories, in the order they come; returns how many lines."""
    count = 0
    for value in _lines(histories):
        file.write(canonical_json(value) + "\n")
        count += 1
    return count


def read(file: TextIO) -> list[History]:
    """The histories that a file of JSON lines holds.

    Raises:
        DatabaseError: a line is no entry of a FindDB; the message gives its number and what is wrong.
        SchemaVersionError: a newer release wrote it.
    """
    reading = _Reading()
    for number, line in _numbered(file):
        try:
            reading.take(_object(line), is_first=number == 1)
        except SchemaVersionError:
            raise
        except DatabaseError as error:
            raise DatabaseError(f"{_name(file)}line {number}: {error}") from error
    if not reading.begun:
        raise DatabaseError(f"{_name(file)}line 1: it is missing: this file is no export of a FindDB")
    return reading.histories()


def release_of(histories: Sequence[History], *, parent: Release | None = None) -> Release:
    """What a release of these histories says of itself: equal for equal content, in whatever order it comes.

    Its hash is over the lines of its export but the first, sorted. With the content of its parent it is that parent.
    """
    digest = hashlib.sha256()
    for line in sorted(map(canonical_json, _entry_lines(histories))):
        digest.update(line.encode() + b"\n")
    problems: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for history in histories:
        problems[history.device] += 1
        rows[history.device] += len(history.rows)
    made = Release(content_hash=digest.hexdigest(), problems=dict(problems), rows=dict(rows))
    if parent is None:
        return made
    return replace(made, parent=parent.parent if parent.content_hash == made.content_hash else parent.content_hash)


def _name(file: TextIO) -> str:
    """What stands before a line's number in an error."""
    name = getattr(file, "name", None)
    return f"{name}, " if isinstance(name, str) else ""


def _lines(histories: Iterable[History]) -> Iterator[Mapping[str, object]]:
    yield {"format": FORMAT, "schema_version": SCHEMA_VERSION}
    yield from _entry_lines(histories)


def _entry_lines(histories: Iterable[History]) -> Iterator[Mapping[str, object]]:
    written: set[str] = set()
    for history in histories:
        key = {"device": history.device, "network_config": history.network_config}
        for name in sorted(history.environments.keys() - written):
            yield {"kind": "environment", "id": name, "versions": dict(history.environments[name])}
        written |= history.environments.keys()
        entries: tuple[Entry, ...] = (*history.rows, *history.scopes, *history.verdicts)
        for entry in entries:
            yield {"kind": type(entry).__name__.lower()} | key | without_defaults(entry)


def _numbered(file: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE_CHARS + 1)
        except UnicodeDecodeError as error:
            raise DatabaseError(f"{_name(file)}line {number}: it is not UTF-8 text") from error
        if not line:
            return
        if len(line) > MAX_LINE_CHARS:
            raise DatabaseError(f"{_name(file)}line {number}: it is longer than {MAX_LINE_CHARS} characters")
        yield number, line


def _object(line: str) -> dict[str, object]:
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{line[:60]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DatabaseError(f"{line[:60]!r} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key comes twice")
    return value


@dataclass(slots=True)
class _Entries:
    rows: list[Row] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


class _Reading:
    """What the lines read so far hold."""

    def __init__(self) -> None:
        self.begun = False
        self._environments: dict[str, Mapping[str, str]] = {}
        self._entries: dict[ProblemKey, _Entries] = {}

    def take(self, value: dict[str, object], *, is_first: bool) -> None:
        """Take one line's object."""
        if is_first:
            self._begin(value)
            return
        kind = value.pop("kind", None)
        if kind == "environment":
            self._take_environment(value)
        elif kind == "row":
            self._take_row(value)
        elif kind == "scope":
            self._take_scope(value)
        elif kind == "verdict":
            self._take_verdict(value)
        else:
            raise DatabaseError(f"kind={kind!r} is none of environment, row, scope and verdict")

    def histories(self) -> list[History]:
        """The histories, in the order of their keys."""
        ordered = sorted(self._entries.items(), key=lambda item: (item[0].device, item[0].network_config))
        return [self._history(key, found) for key, found in ordered]

    def _history(self, key: ProblemKey, found: _Entries) -> History:
        history = History(
            device=key.device,
            network_config=key.network_config,
            rows=tuple(found.rows),
            scopes=tuple(found.scopes),
            verdicts=tuple(found.verdicts),
        )
        return replace(history, environments={name: self._environments[name] for name in history.named_environments})

    def _begin(self, value: dict[str, object]) -> None:
        version = value.get("schema_version")
        if value.get("format") != FORMAT or type(version) is not int or version < 1:
            raise DatabaseError("it does not name the format: this file is no export of a FindDB")
        if version > SCHEMA_VERSION:
            raise SchemaVersionError(
                f"the file has schema version {version}, this release of miofind reads {SCHEMA_VERSION}: "
                "upgrade miofind"
            )
        self.begun = True

    def _take_environment(self, value: dict[str, object]) -> None:
        name, versions = value.get("id"), value.get("versions")
        if not isinstance(name, str) or not isinstance(versions, dict) or len(value) != 2:
            raise DatabaseError("an environment takes an id and versions, and nothing else")
        if checked_environment(versions) != name:
            raise DatabaseError(f"environment {name!r} is not named by the hash of its versions: it was altered")
        self._environments[name] = versions

    def _take_row(self, value: dict[str, object]) -> None:
        key = _key(value)
        row = checked_row(key.device, key.network_config, Row(**_fields(Row, value)))
        self._check_environment(row.environment)
        self._entries.setdefault(key, _Entries()).rows.append(row)

    def _take_scope(self, value: dict[str, object]) -> None:
        key = _key(value)
        scope = checked_scope(key.device, key.network_config, Scope(**_fields(Scope, value)))
        self._entries.setdefault(key, _Entries()).scopes.append(scope)

    def _take_verdict(self, value: dict[str, object]) -> None:
        key = _key(value)
        values = _fields(Verdict, value)
        values["ties"] = _tuple(values["ties"])
        values["comparisons"] = tuple(_comparison(item) for item in _tuple(values["comparisons"]))
        verdict = checked_verdict(key.device, key.network_config, Verdict(**values))
        self._check_environment(verdict.environment)
        self._entries.setdefault(key, _Entries()).verdicts.append(verdict)

    def _check_environment(self, name: str) -> None:
        if name and name not in self._environments:
            raise DatabaseError(f"environment {name!r} has no line before this one")


def _tuple(value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise DatabaseError(f"{str(value)[:60]!r} is no list")
    return tuple(value)


def _comparison(value: object) -> Comparison:
    if not isinstance(value, dict) or value.keys() != {"candidate", "low", "high"}:
        raise DatabaseError(f"{str(value)[:60]!r} is no comparison of candidate, low and high")
    return Comparison(**value)


def _key(value: dict[str, object]) -> ProblemKey:
    device, network_config = value.pop("device", None), value.pop("network_config", None)
    if not isinstance(device, str) or not isinstance(network_config, str):
        raise DatabaseError("it names no device or no network_config")
    checked_key(device, network_config)
    return ProblemKey(device=device, network_config=network_config)


def _fields(kind: type[Entry], value: dict[str, object]) -> dict[str, Any]:
    """The values as keyword arguments; their types are checked with the entry made of them."""
    known = {item.name: item for item in fields(kind)}
    for name in value:
        if name not in known:
            raise DatabaseError(f"field {name!r} is unknown to this release: upgrade miofind, or remove it")
    for name, item in known.items():
        is_required = item.default is MISSING and item.default_factory is MISSING
        if is_required and name not in value:
            raise DatabaseError(f"field {name!r} is missing")
    if not value.get("id"):
        raise DatabaseError("field 'id' is missing")
    return value
