"""Answers, and the text that a store keeps of each so that a look-up reads one line and sorts nothing.

The text is the scopes in one line, then a line a row in rank order. Fields that came after version 1 stand last and are
left out at their default: answers of version 1 read as they are. Whoever may have written a text, what comes out of it
has the types and bounds of a row. Nothing here knows SQL.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from types import NoneType
from typing import Any, NamedTuple, overload

from miofind.errors import DatabaseError
from miofind.finddb import ranking
from miofind.finddb.validation import RefusedEntryError, is_stamp, well_formed_verdict
from miofind.finddb.values import (
    EFFORTS,
    ROW_FIELDS,
    SCOPE_FIELDS,
    USABLE_STATUSES,
    VERDICT_FIELDS,
    Comparison,
    Row,
    Scope,
    Verdict,
    canonical_json,
    from_json,
)

_LATE_DEFAULTS = (False, 0)
"""Of `contended` and `dropped_samples`, which version 1 did not know."""

_EARLY = len(ROW_FIELDS) - len(_LATE_DEFAULTS)

_KINDS = {"str": (str,), "int": (int,), "bool": (bool,), "float | None": (float, NoneType)}
_ROW_KINDS = tuple(_KINDS[str(item.type)] for item in fields(Row))
_ROW_SHAPES = frozenset(product(*_ROW_KINDS))
_TIME, _WORKSPACE, _STATUS = map(ROW_FIELDS.index, ("time_ms", "workspace_bytes", "status"))
_COUNTED = [place for place, kinds in enumerate(_ROW_KINDS) if int in kinds or float in kinds]
_SCOPE_SHAPES = frozenset(product((dict,), (dict,), (int, NoneType), (str,), (bool,), (str,), (str,)))

# A frozen dataclass sets each field by name, which costs three times as much as all else of a look-up's decoding.
_ROW_SETTERS = tuple(Row.__dict__[name].__set__ for name in ROW_FIELDS)


class _Columns(NamedTuple):
    """How some fields are taken from a row's values, and the types they may have."""

    pick: Callable[[list[Any]], tuple[Any, ...]]
    shapes: frozenset[tuple[type, ...]]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


_raw_decode = json.JSONDecoder(parse_constant=_refuse).raw_decode


def encode(rows: Iterable[Row], scopes: Sequence[Scope], verdicts: Sequence[Verdict] = ()) -> str | None:
    """The answer that rows, scopes and verdicts give, as text; None where all that there is are times of rivals."""
    rows = list(rows)
    if rows and all(row.is_rival for row in rows) and not (scopes or verdicts):
        return None
    told = ranking.with_failures(scopes, rows)
    return text_of(ranking.best_rows(rows, verdicts), ranking.widest_scopes(told))


def text_of(rows: Iterable[Row], scopes: Iterable[Scope]) -> str:
    """The answer of ranked rows and their scopes, as text of ASCII only."""
    values = [[_scope_value(scope, name) for name in SCOPE_FIELDS] for scope in scopes]
    return "\n".join([canonical_json(values), *(canonical_json(_row_values(row)) for row in rows)])


def decode(device: str, network_config: str, text: str) -> Answer:
    """The answer that `encode` or `text_of` wrote.

    Raises:
        ValueError, TypeError, RecursionError: it did not write that.
    """
    scopes, *rows = text.split("\n")
    return Answer(
        device=device,
        network_config=network_config,
        rows=RankedRows(rows),
        scopes=tuple(scope_of(values) for values in from_json(scopes)),
    )


def check_kinds(values: Sequence[object]) -> None:
    """Refuses values that no row holds, in the order of ROW_FIELDS; SQLite's columns hold whatever was put into them.

    Raises:
        TypeError, ValueError: the message names the field.
    """
    for name, value, kinds in zip(ROW_FIELDS, values, _ROW_KINDS, strict=True):
        if type(value) not in kinds:
            raise TypeError(f"{name}={str(value)[:60]!r}")
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}")


def row_of(values: Sequence[Any]) -> Row:
    """The row of values, in the order of ROW_FIELDS.

    Raises:
        TypeError, ValueError: they are none.
    """
    check_kinds(values)
    return Row(**dict(zip(ROW_FIELDS, values, strict=True)))


def rival_of(values: Sequence[Any]) -> Row:
    """As `row_of`, a rival's row: it counts by its time and its age.

    Raises:
        TypeError, ValueError: they are none.
    """
    row = row_of(values)
    if not row.time_ms or not is_stamp(row.created_at):
        raise ValueError(f"a rival's time_ms={row.time_ms} at {row.created_at!r:.60}")
    return row


def scope_of(values: Sequence[Any]) -> Scope:
    """The scope of decoded values, in the order of SCOPE_FIELDS.

    Raises:
        TypeError, ValueError: they are none.
    """
    scope = Scope(**dict(zip(SCOPE_FIELDS, values, strict=True)))
    if tuple(map(type, values)) not in _SCOPE_SHAPES or scope.effort not in EFFORTS:
        raise TypeError("it is no scope")
    return scope


def verdict_of(values: Sequence[Any]) -> Verdict:
    """The verdict of decoded values, in the order of VERDICT_FIELDS.

    Raises:
        TypeError, ValueError: they are none.
    """
    named = dict(zip(VERDICT_FIELDS, values, strict=True))
    named["ties"] = tuple(named["ties"])
    named["comparisons"] = tuple(Comparison(**item) for item in named["comparisons"])
    try:
        return well_formed_verdict(Verdict(**named))
    except RefusedEntryError as error:  # what is stored was not refused: it was altered
        raise ValueError(str(error)) from error


class RankedRows(Sequence[Row]):
    """Rows of an answer, the best first; each is decoded when it is read, since most callers read one or two."""

    __slots__ = ("_lines",)

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines: list[str | Row] = list(lines)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self._lines))))
        row = self._lines[index]
        if isinstance(row, str):
            row = self._lines[index] = _row(row)
        return row

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self._lines)))

    def columns(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Those fields of each row, two or more, for callers that read few of many rows: half the cost of whole rows.

        Raises:
            DatabaseError: an answer cannot be read.
        """
        pick, shapes = _columns(names)
        for line in self._lines:
            if isinstance(line, str):
                found = pick(_values(line))
                if tuple(map(type, found)) not in shapes:
                    raise _unreadable(line)
                yield found
            else:
                yield tuple(getattr(line, name) for name in names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankedRows) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"RankedRows({list(self)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a FindDB knows of a problem on a device.

    Attributes:
        rows: usable rows, the best first. They hold, for every limit on workspace and every demand for determinism,
            the best row of each solver; for a limit on the error they do so to a factor of two.
        scopes: what was considered to get them; a scope that another one covers is left out.

    A release leaves out the ids, which its histories have.
    """

    device: str
    network_config: str
    rows: RankedRows
    scopes: tuple[Scope, ...]

    def covers(self, request: Scope) -> bool:
        """Whether one of the scopes covers what a find of `request` would time."""
        return any(scope.covers(request) for scope in self.scopes)


@functools.cache
def _columns(names: tuple[str, ...]) -> _Columns:
    places = [ROW_FIELDS.index(name) for name in names]
    return _Columns(operator.itemgetter(*places), frozenset(product(*(_ROW_KINDS[place] for place in places))))


def _values(line: str) -> list[Any]:
    """The fields of a row, those that are compared within their bounds, all of whatever types they have."""
    try:
        values: list[Any]
        values, end = _raw_decode(line)
        if end != len(line):
            raise _unreadable(line)
        values += _LATE_DEFAULTS[len(values) - _EARLY :]
        if len(values) == len(ROW_FIELDS) and 0 < values[_TIME] < math.inf and 0 <= values[_WORKSPACE] < 1 << 63:
            return values
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(line) from error
    raise _unreadable(line)


def _row(line: str) -> Row:
    row = object.__new__(Row)
    values = _values(line)
    if tuple(map(type, values)) not in _ROW_SHAPES or values[_STATUS] not in USABLE_STATUSES:
        raise _unreadable(line)
    for place in _COUNTED:
        if values[place] is not None and not 0 <= values[place] < math.inf:
            raise _unreadable(line)
    for set_field, value in zip(_ROW_SETTERS, values, strict=True):
        set_field(row, value)
    return row


def _unreadable(line: str) -> DatabaseError:
    return DatabaseError(f"an answer of a FindDB cannot be read, at {line[:60]!r}: check the database")


def _row_values(row: Row) -> list[object]:
    values = [getattr(row, name) for name in ROW_FIELDS]
    while len(values) > _EARLY and values[-1] == _LATE_DEFAULTS[len(values) - _EARLY - 1]:
        values.pop()
    return values


def _scope_value(scope: Scope, name: str) -> object:
    value = getattr(scope, name)
    return dict(value) if name in ("solvers", "filters") else value
