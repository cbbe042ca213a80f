"""A FindDB as JSON lines: sorted, stable, checked line by line when it comes back.

The first line names the format. Then, problem by problem, come lines of kind "environment" (before the first row that
names it), "row" and "scope". Fields at their default are left out. It opens no database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TextIO

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb.schema import SCHEMA_VERSION
from miofind.finddb.validation import checked_environment, checked_key, checked_row, checked_scope
from miofind.finddb.values import History, ProblemKey, Row, Scope, canonical_json

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


def _name(file: TextIO) -> str:
    """What stands before a line's number in an error."""
    name = getattr(file, "name", None)
    return f"{name}, " if isinstance(name, str) else ""


def _lines(histories: Iterable[History]) -> Iterator[Mapping[str, object]]:
    yield {"format": FORMAT, "schema_version": SCHEMA_VERSION}
    written: set[str] = set()
    for history in histories:
        key = {"device": history.device, "network_config": history.network_config}
        for name in sorted(history.environments.keys() - written):
            yield {"kind": "environment", "id": name, "versions": dict(history.environments[name])}
        written |= history.environments.keys()
        for row in history.rows:
            yield {"kind": "row"} | key | _without_defaults(row)
        for scope in history.scopes:
            yield {"kind": "scope"} | key | _without_defaults(scope)


def _without_defaults(value: Row | Scope) -> dict[str, object]:
    items = {}
    for item in fields(value):
        content = getattr(value, item.name)
        content = dict(content) if isinstance(content, Mapping) else content
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if content != default:
            items[item.name] = content
    return items


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
        else:
            raise DatabaseError(f"kind={kind!r} is none of environment, row and scope")

    def histories(self) -> list[History]:
        """The histories, in the order of their keys."""
        ordered = sorted(self._entries.items(), key=lambda item: (item[0].device, item[0].network_config))
        return [
            History(
                device=key.device,
                network_config=key.network_config,
                rows=tuple(found.rows),
                scopes=tuple(found.scopes),
                environments={
                    name: self._environments[name] for name in {row.environment for row in found.rows} if name
                },
            )
            for key, found in ordered
        ]

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
        if row.environment and row.environment not in self._environments:
            raise DatabaseError(f"environment {row.environment!r} has no line before this one")
        self._entries.setdefault(key, _Entries()).rows.append(row)

    def _take_scope(self, value: dict[str, object]) -> None:
        key = _key(value)
        scope = checked_scope(key.device, key.network_config, Scope(**_fields(Scope, value)))
        self._entries.setdefault(key, _Entries()).scopes.append(scope)


def _key(value: dict[str, object]) -> ProblemKey:
    device, network_config = value.pop("device", None), value.pop("network_config", None)
    if not isinstance(device, str) or not isinstance(network_config, str):
        raise DatabaseError("it names no device or no network_config")
    checked_key(device, network_config)
    return ProblemKey(device=device, network_config=network_config)


def _fields(kind: type[Row] | type[Scope], value: dict[str, object]) -> dict[str, Any]:
    """The values as keyword arguments; their types are checked with the row or scope made of them."""
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
