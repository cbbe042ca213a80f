"""The values that go into a FindDB and come out of it: inert, of strings and numbers only.

Identity is content: the id of a row, scope or verdict is a hash of all it says, the id of an environment a hash of its
versions. So merging two databases is a union by id. Nothing here touches a file or knows SQL.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any

CUT_OFF = "cut_off"
USABLE_STATUSES = frozenset({"ok", CUT_OFF})
MOMENTARY_STATUSES = frozenset({"out_of_memory"})
"""Failures that speak of the moment and not of the candidate: they never displace a usable row."""
RIVAL = "rival"
"""Of a row that has another library's time at a problem: it is no solution, no failure, and in no answer."""
STATUSES = (
    USABLE_STATUSES
    | MOMENTARY_STATUSES
    | {"compile_failed", "launch_failed", "wrong_result", "timed_out", "crashed", RIVAL}
)

_SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)

LIKELY = "likely"
EFFORTS = (LIKELY, "defaults", "search")
"""How much a find measures, the least first."""

ANY_EFFORT = "any"
"""The effort of a request that takes what any find of the same filters left; no find is stored with it."""


class Prune(StrEnum):
    """What `Store.prune` removes."""

    SUPERSEDED = "superseded"
    FAILED = "failed"
    OTHER_DEVICES = "other_devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement of one solver and configuration, or of another library's beside one.

    A store checks a row when it takes it in, not when it gives it out: a look-up pays for no validation.

    Attributes:
        config: canonical JSON text of the configuration.
        status: one of STATUSES; a row of USABLE_STATUSES has a time, and so has a RIVAL.
        source_hash: hash of the sources that the solver's steps reach.
        kernel_hash: hash of sources, defines and options of the steps that were measured.
        message: why it failed, or what a rival was timed beside, "" otherwise; a store takes folders out of it.
        time_ms, min_ms, p20_ms, p80_ms: median and statistics of the samples, in milliseconds a run.
        protocol: version of the timing protocol.
        max_error: largest |error| / (|x| * |w|) seen in verification.
        environment: id of the versions it was measured with; "" lets the store fill it in.
        created_at: ISO 8601 in UTC, with microseconds and a Z; "" lets the store fill it in.
        id: hash of the content, filled in by the store.
        contended: whether something else ran on the device meanwhile; such a row loses ties and never ships.
        dropped_samples: samples left out of the statistics, since the device was slowed down while they were taken.
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
    contended: bool = False
    dropped_samples: int = 0

    @property
    def usable(self) -> bool:
        """Whether it passed verification and was timed."""
        return self.status in USABLE_STATUSES

    @property
    def is_rival(self) -> bool:
        """Whether it has the time of another library, which no solver of a registry is."""
        return self.status == RIVAL

    @property
    def is_cut_off(self) -> bool:
        """Whether it was measured with few samples only, because it was far behind the best."""
        return self.status == CUT_OFF

    @property
    def candidate(self) -> str:
        """The name of what was measured: `solver_id:config`."""
        return f"{self.solver_id}:{self.config}"

    @property
    def age(self) -> tuple[str, bool, int, str]:
        """Orders rows by time; of one instant a failure comes last, since it ended the candidate's part."""
        return self.created_at, not self.usable, self.samples, self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a finalist stood against the winner.

    Attributes:
        candidate: `solver_id:config`.
        low, high: 95 % bootstrap interval of the ratio candidate / winner of paired times; 1.03 is 3 % slower.
    """

    candidate: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the final of one race ended: an interval in place of an argmin.

    Attributes:
        winner: `solver_id:config`.
        ties: candidates that the race could not tell from the fastest, the winner first.
        comparisons: the finalists beside the winner.
        blocks: interleaved blocks that the intervals were drawn from.
        protocol: version of the timing protocol.
        environment, created_at, id: as in a Row.
    """

    winner: str
    ties: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    blocks: int
    protocol: str
    environment: str = ""
    created_at: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What one find considered.

    Attributes:
        solvers: {solver id: version} of the solvers considered, applicable or not. In answers and releases the version
            of a solver of which nothing was usable is a `failed_code`.
        filters: options that left candidates out, {} when nothing did. Filters only ever narrow a find.
        workspace_limit_bytes: None is no limit.
        effort: "likely" timed the few candidates with the least predicted times, "defaults" all default configurations,
            "search" searched them.
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

    @property
    def asked(self) -> frozenset[str] | None:
        """The solvers that a find of some was asked for; None for a find of all, none where nobody can tell."""
        if "solvers" not in self.filters:
            return None
        names = self.filters["solvers"]
        return frozenset(map(str, names)) if isinstance(names, (list, tuple)) else frozenset()

    @property
    def candidate_filters(self) -> dict[str, object]:
        """The filters that are on candidates, not on solvers."""
        return {name: value for name, value in self.filters.items() if name != "solvers"}

    def covers(self, other: Scope) -> bool:
        """Whether a find of this scope timed all that a find of `other` would.

        A search that a budget ended says nothing of the defaults: it may not have come to all of them. The likeliest of
        all are not those of some: a find of them covers requests with the same filters alone, and for one of the
        likeliest with the same limit.
        """
        if self.complete < other.complete or _rank(self.effort) < _rank(other.effort):
            return False
        if self.effort == LIKELY:
            if self.filters != other.filters:
                return False
            if other.effort == LIKELY and self.workspace_limit_bytes != other.workspace_limit_bytes:
                return False
        if self.effort == "search" != other.effort and not self.complete:
            return False
        if self.filters and self.filters != other.filters:
            return False
        if not _limit_covers(self.workspace_limit_bytes, other.workspace_limit_bytes):
            return False
        return self.solvers.items() >= other.solvers.items()


def _rank(effort: str) -> int:
    """How much is measured; a request that takes whatever there is asks for least."""
    return -1 if effort == ANY_EFFORT else EFFORTS.index(effort)


def _limit_covers(mine: int | None, other: int | None) -> bool:
    if mine is None:
        return True
    return other is not None and mine >= other


Entry = Row | Scope | Verdict
"""What a store keeps of a problem; each is named by the hash of its content."""

ROW_FIELDS = tuple(item.name for item in fields(Row))
SCOPE_FIELDS = tuple(item.name for item in fields(Scope))
VERDICT_FIELDS = tuple(item.name for item in fields(Verdict))


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that a store holds of one problem on one device; what merging, exporting and shipping move about.

    Attributes:
        rows: by solver, configuration and time.
        verdicts: by time, the newest last.
        environments: {environment id: versions} of the rows and verdicts.
    """

    device: str
    network_config: str
    rows: tuple[Row, ...] = ()
    scopes: tuple[Scope, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def named_environments(self) -> frozenset[str]:
        """Ids of the environments that its rows and verdicts name."""
        entries: tuple[Row | Verdict, ...] = (*self.rows, *self.verdicts)
        return frozenset(entry.environment for entry in entries if entry.environment)


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
    verdicts: int
    environments: int
    rechecks: int
    file_bytes: int
    by_device: Mapping[str, int]
    by_solver: Mapping[str, int]
    by_status: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a database that was made to ship says of itself.

    Attributes:
        content_hash: SHA-256 of the sorted lines of its export.
        parent: content hash of the release it came after, "" for the first.
        problems, rows: counts by device.

    Raises:
        ValueError: a hash is none.
    """

    content_hash: str
    parent: str = ""
    problems: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in (self.content_hash, self.parent or self.content_hash):
            if not isinstance(value, str) or not _SHA256.fullmatch(value):
                raise ValueError(f"{str(value)[:80]!r} is no SHA-256")


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode  # json.dumps makes one a call


def canonical_json(value: object) -> str:
    """JSON text with sorted keys, no spaces and ASCII only; equal values have equal text.

    Raises:
        ValueError: NaN or infinity. TypeError: something JSON has no form for.
    """
    return _encode(value)


def from_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or holds NaN or infinity, by name or by a number that no float reaches. TypeError: it is
            no text. RecursionError: it is too deep.
    """
    return _decode(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


_decode = json.JSONDecoder(parse_constant=_finite, parse_float=_finite).decode


def environment_id(versions: Mapping[str, str]) -> str:
    """Id of a set of versions, such as {"driver": "580.65", "nvrtc": "13.0"}; a row whose id differs is stale."""
    return _digest(dict(versions), 8)


@functools.lru_cache(maxsize=1 << 12)
def failed_code(solver_version: int, source_hash: str) -> int:
    """A number of a solver's version and sources: what failed with these says nothing of it with others."""
    return int(_digest([solver_version, source_hash], 6), 16)


def content_id(device: str, network_config: str, entry: Entry) -> str:
    """Content hash of a row, scope or verdict; what identifies it wherever it is kept."""
    if isinstance(entry, Scope):
        content: list[object] = [dict(entry.solvers), dict(entry.filters), entry.workspace_limit_bytes, entry.effort]
        return _digest([device, network_config, *content, entry.complete, entry.created_at], 16)
    return _digest([device, network_config, without_defaults(entry, "id")], 16)


def without_defaults(entry: Entry, *left_out: str) -> dict[str, object]:
    """The fields of an entry as plain JSON values, without those at their default: fields that come later void no hash.

    Raises:
        TypeError: a field holds what JSON has no form for.
    """
    values = {}
    for item in fields(entry):
        value = getattr(entry, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if item.name not in left_out and value != default:
            values[item.name] = _plain(value)
    return values


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Comparison):
        return {"candidate": value.candidate, "low": value.low, "high": value.high}
    return dict(value) if isinstance(value, Mapping) else value


def _digest(value: object, size: int) -> str:
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=size).hexdigest()
