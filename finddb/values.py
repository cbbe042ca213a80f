"""The values that go into a FindDB and come out of it: inert, of strings and numbers only.

Identity is content: the id of a row or scope is a hash of all it says, the id of an environment a hash of its
versions. So merging two databases is a union by id. Nothing here touches a file or knows SQL.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, overload

from miofind.errors import DatabaseError

USABLE_STATUSES = frozenset({"ok", "cut_off"})
MOMENTARY_STATUSES = frozenset({"out_of_memory", "timed_out"})
"""Failures that speak of the moment and not of the candidate: they never displace a usable row."""
STATUSES = USABLE_STATUSES | MOMENTARY_STATUSES | {"compile_failed", "launch_failed", "wrong_result", "crashed"}

EFFORTS = ("defaults", "search")
"""Search efforts of a find, the lesser first."""


class Prune(StrEnum):
    """What `Store.prune` removes."""

    SUPERSEDED = "superseded"
    FAILED = "failed"
    OTHER_DEVICES = "other_devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement of one solver and configuration.

    A store checks a row when it takes it in, not when it gives it out: a look-up pays for no validation.

    Attributes:
        config: canonical JSON text of the configuration.
        status: one of STATUSES; a row of USABLE_STATUSES has a time.
        source_hash: hash of the sources that the solver's steps reach.
        kernel_hash: hash of sources, defines and options of the steps that were measured.
        message: why it failed, "" otherwise; a store takes folders out of it.
        time_ms, min_ms, p20_ms, p80_ms: median and statistics of the samples, in milliseconds a run.
        protocol: version of the timing protocol.
        max_error: largest |error| / (|x| * |w|) seen in verification.
        environment: id of the versions it was measured with; "" lets the store fill it in.
        created_at: ISO 8601 in UTC, with microseconds and a Z; "" lets the store fill it in.
        id: hash of the content, filled in by the store.
    """

    solver_id: str
    solver_version: int
    config: str
    status: str
    algorithm: str = ""
    library: str = ""
    source_hash: str = ""
    kernel_hash: str = ""
    message: str = ""
    time_ms: float | None = None
    min_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    protocol: str = ""
    workspace_bytes: int = 0
    deterministic: bool = True
    max_error: float | None = None
    environment: str = ""
    created_at: str = ""
    id: str = ""

    @property
    def usable(self) -> bool:
        """Whether it passed verification and was timed."""
        return self.status in USABLE_STATUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What one find considered.

    Attributes:
        solvers: {solver id: version} of the solvers considered, applicable or not.
        filters: options that left candidates out, {} when nothing did. Filters only ever narrow a find.
        workspace_limit_bytes: None is no limit.
        effort: "defaults" timed default configurations, "search" searched them.
        complete: False where a budget ended the find early.
        created_at, id: filled in by the store.
    """

    solvers: Mapping[str, int]
    filters: Mapping[str, object] = field(default_factory=dict)
    workspace_limit_bytes: int | None = None
    effort: str = "defaults"
    complete: bool = True
    created_at: str = ""
    id: str = ""

    def covers(self, other: Scope) -> bool:
        """Whether a find of this scope timed all that a find of `other` would."""
        if self.complete < other.complete:
            return False
        if EFFORTS.index(self.effort) < EFFORTS.index(other.effort):
            return False
        if self.filters and self.filters != other.filters:
            return False
        if not _limit_covers(self.workspace_limit_bytes, other.workspace_limit_bytes):
            return False
        return self.solvers.items() >= other.solvers.items()


def _limit_covers(mine: int | None, other: int | None) -> bool:
    if mine is None:
        return True
    return other is not None and mine >= other


ROW_FIELDS = tuple(item.name for item in fields(Row))
SCOPE_FIELDS = tuple(item.name for item in fields(Scope))


# A frozen dataclass sets each field by name, which costs three times as much as all else of a look-up's decoding.
_ROW_SETTERS = tuple(Row.__dict__[name].__set__ for name in ROW_FIELDS)
_raw_decode = json.JSONDecoder().raw_decode


def _decoded_values(line: str) -> list[Any]:
    try:
        values: list[Any]
        values, _ = _raw_decode(line)
    except ValueError as error:
        raise DatabaseError(f"an answer of a FindDB cannot be read, at {line[:60]!r}: check the database") from error
    return values


def _decoded_row(line: str) -> Row:
    row = object.__new__(Row)
    try:
        values = _decoded_values(line)
        for set_field, value in zip(_ROW_SETTERS, values, strict=True):
            set_field(row, value)
    except (ValueError, TypeError) as error:
        raise DatabaseError(f"an answer of a FindDB cannot be read, at {line[:60]!r}: check the database") from error
    return row


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
            row = self._lines[index] = _decoded_row(row)
        return row

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self._lines)))

    def columns(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Those fields of each row, for callers that read few of many rows: half the cost of whole rows.

        Raises:
            DatabaseError: an answer cannot be read.
        """
        pick = operator.itemgetter(*map(ROW_FIELDS.index, names))
        for line in self._lines:
            values = _decoded_values(line) if isinstance(line, str) else [getattr(line, name) for name in ROW_FIELDS]
            if len(values) != len(ROW_FIELDS):
                raise DatabaseError(f"an answer of a FindDB has a row of {len(values)} fields: check the database")
            yield pick(values)

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
    """

    device: str
    network_config: str
    rows: RankedRows
    scopes: tuple[Scope, ...]

    def covers(self, request: Scope) -> bool:
        """Whether one of the scopes covers what a find of `request` would time."""
        return any(scope.covers(request) for scope in self.scopes)

    def missing(self, solvers: Mapping[str, int]) -> tuple[str, ...]:
        """Ids of the solvers, given as {id: version}, that no scope has considered at that version."""
        return tuple(
            solver_id
            for solver_id, version in solvers.items()
            if not any(scope.solvers.get(solver_id) == version for scope in self.scopes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that a store holds of one problem on one device; what merging, exporting and shipping move about.

    Attributes:
        rows: by solver, configuration and time.
        environments: {environment id: versions} of the rows.
    """

    device: str
    network_config: str
    rows: tuple[Row, ...] = ()
    scopes: tuple[Scope, ...] = ()
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemKey:
    """A problem on a device."""

    device: str
    network_config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """A problem whose answer is usable and wants measuring again, and why."""

    device: str
    network_config: str
    reason: str
    created_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts of one store; `by_device` counts problems, `by_solver` and `by_status` rows."""

    problems: int
    rows: int
    scopes: int
    environments: int
    rechecks: int
    file_bytes: int
    by_device: Mapping[str, int]
    by_solver: Mapping[str, int]
    by_status: Mapping[str, int]


def canonical_json(value: object) -> str:
    """JSON text with sorted keys, no spaces and ASCII only; equal values have equal text.

    Raises:
        ValueError: NaN or infinity. TypeError: something JSON has no form for.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def environment_id(versions: Mapping[str, str]) -> str:
    """Id of a set of versions, such as {"driver": "580.65", "nvrtc": "13.0"}; a row whose id differs is stale."""
    return _digest(dict(versions), 8)


def row_id(device: str, network_config: str, row: Row) -> str:
    """Content hash of a measurement. Fields at their default are left out, so that fields that come later void none."""
    content = {
        item.name: getattr(row, item.name)
        for item in fields(Row)
        if item.name != "id" and getattr(row, item.name) != item.default
    }
    return _digest([device, network_config, content], 16)


def scope_id(device: str, network_config: str, scope: Scope) -> str:
    """Content hash of a scope."""
    content = [dict(scope.solvers), dict(scope.filters), scope.workspace_limit_bytes, scope.effort]
    return _digest([device, network_config, *content, scope.complete, scope.created_at], 16)


def _digest(value: object, size: int) -> str:
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=size).hexdigest()
