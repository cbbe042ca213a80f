"""A model of candidates' times on one kind of device, and the file that keeps it.

The file: MAGIC, SHA-256 of what follows, a line of JSON, then arrays of little-endian numbers as the line lists them.
It may come from anywhere: what is read of it is bounded and checked, and nothing of it runs.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.errors import ModelError
from miofind.files import write_whole
from miofind.find.immediate.features import FEATURES_VERSION
from miofind.find.immediate.forest import ARRAYS, Forest, InvalidForestError
from miofind.find.immediate.kinds import AXES, Kind
from miofind.find.immediate.table import MOST_LOG2, Table
from miofind.find.immediate.winners import MOST_SOLVERS, Winners, Won

MAGIC = b"miofind model 2\n"
MAX_BYTES = 4 << 20
_MOST_FEATURES = 2048
_MOST_NAMED = 20_000  # solvers, corrections or positions
_MOST_CHARS = 300
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Calibration:
    """What held-out predictions showed.

    Attributes:
        bias: mean logarithm to base 2 of the measured over the predicted time of what was predicted to be the fastest:
            the least of many guesses is too small.
        edges: predicted time over that of the best other candidate, as logarithms to base 2, ascending.
        shares: how often a candidate was within 10 % of the best: below the first edge, between edges, above the last.
    """

    bias: float = 0.0
    edges: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.0,)

    def share(self, gap: float) -> float:
        """The share for a candidate whose predicted time is 2**gap times that of the best other one."""
        return self.shares[bisect.bisect_left(self.edges, gap)]


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """What is learnt beyond the table.

    Attributes:
        names: the features, in the order of columns.
        time: logarithm to base 2 of measured time over the table's.
        rank: the greater, the earlier.
        rank_weight: how many powers of two a point of rank is worth.
        calibration: of what the trees predict.
        positions: of the problems they were trained with (`kinds.position`), one a row.
        kinds: of these problems.
        reach: how far from the nearest position a problem may lie.
        winners: the fastest solvers of these problems.
        axes: the positions, one a column.
        both: the trees of `time`, then those of `rank`.
    """

    names: tuple[str, ...]
    time: Forest
    rank: Forest
    rank_weight: float
    calibration: Calibration
    positions: NDArray[np.float32]
    kinds: frozenset[tuple[str, ...]]
    reach: float
    winners: Winners = field(default_factory=Winners)
    axes: NDArray[np.float32] = field(init=False, repr=False)
    both: Forest = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", np.ascontiguousarray(self.positions.T))
        object.__setattr__(self, "both", Forest.joined((self.time, self.rank)))

    def reaches(self, kind: Kind, position: Sequence[float]) -> bool:
        """Whether problems like one of that kind at that position were among those trained with."""
        if kind.levels[0] not in self.kinds:
            return False
        apart = np.abs(self.axes - np.array(position, np.float32)[:, None])
        return bool(np.maximum.reduce(apart).min() <= self.reach)

    def sums(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What `time` and `rank` say of rows of features: all trees take a step at a time."""
        values, count = self.both.tree_values(rows), len(self.time.roots)
        return values[:, :count].sum(axis=1, dtype=np.float64), values[:, count:].sum(axis=1, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """What is known of the times of candidates on a kind of device.

    Attributes:
        device: its identity.
        solvers: version by id of the solvers that it was trained with.
        table: corrections of estimates.
        table_calibration, estimate_calibration: of what the table corrects, and of plain estimates.
        trees: None where the table is all.
        trained_on: hash of the lessons.
        report: what held-out problems showed, in numbers.
    """

    device: str
    solvers: Mapping[str, int]
    table: Table
    table_calibration: Calibration
    estimate_calibration: Calibration
    trees: Trees | None = None
    trained_on: str = ""
    report: Mapping[str, float] = field(default_factory=dict)


def write_model(model: Model, path: Path) -> None:
    """Write a model's file, whole or not at all; equal models make equal bytes.

    Raises:
        ModelError: the file cannot be written.
    """
    try:
        write_whole(path, model_bytes(model))
    except OSError as error:
        raise ModelError(f"the model {path.name} cannot be written: {error}") from error


def model_bytes(model: Model) -> bytes:
    """What a model's file holds."""
    arrays: list[NDArray[np.generic]] = []
    header: dict[str, object] = {
        "device": model.device,
        "features_version": FEATURES_VERSION,
        "solvers": dict(sorted(model.solvers.items())),
        "table": [[*key, value] for key, value in sorted(model.table.corrections.items())],
        "table_calibration": _plain(model.table_calibration),
        "estimate_calibration": _plain(model.estimate_calibration),
        "trained_on": model.trained_on,
        "report": dict(sorted(model.report.items())),
        "trees": None,
    }
    if (trees := model.trees) is not None:
        forests = (trees.time, trees.rank)
        header["trees"] = {
            "names": list(trees.names),
            "rank_weight": trees.rank_weight,
            "calibration": _plain(trees.calibration),
            "kinds": sorted(map(list, trees.kinds)),
            "reach": trees.reach,
            "positions": list(trees.positions.shape),
            "forests": [[len(forest.roots), len(forest.features)] for forest in forests],
            "winners": list(trees.winners.solvers),
            "won": [[*kind, len(won.bits)] for kind, won in sorted(trees.winners.kinds.items())],
        }
        arrays.append(trees.positions.astype("<f4"))
        arrays += [getattr(forest, name).astype(kind) for forest in forests for name, kind in ARRAYS.items()]
        for _, won in sorted(trees.winners.kinds.items()):
            arrays += [won.axes.astype("<f4"), won.bits.astype("<u8")]
    line = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    content = line + b"\n" + b"".join(array.tobytes() for array in arrays)
    return MAGIC + hashlib.sha256(content).digest() + content


def read_model(path: Path) -> Model:
    """The model of a file.

    Raises:
        ModelError: the file cannot be read, is damaged, of another version, or holds what no model does.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(f"the model {path.name} cannot be read: {error.strerror}") from error
    try:
        return parse_model(content)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, IndexError, AttributeError) as error:
        raise ModelError(f"the model {path.name} is refused: {str(error)[:_MOST_CHARS]}. Train it anew") from error


def parse_model(content: bytes) -> Model:
    """The model of a file's bytes.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RecursionError, IndexError, AttributeError: they are none.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    if not content.startswith(MAGIC):
        raise ValueError("it does not begin as a model of this version does")
    start = len(MAGIC) + _DIGEST_BYTES
    if hashlib.sha256(content[start:]).digest() != content[len(MAGIC) : start]:
        raise ValueError("it is damaged, its hash differs")
    line, _, body = content[start:].partition(b"\n")
    header = json.loads(line)
    if header["features_version"] != FEATURES_VERSION:
        raise ValueError(f"its features are of version {header['features_version']!r:.20}, not {FEATURES_VERSION}")
    trees = _trees(header["trees"], body)
    if trees is None and body:
        raise ValueError("bytes follow that it does not name")
    return Model(
        device=_text(header["device"]),
        solvers={_text(name): _whole(value) for name, value in _bounded(header["solvers"].items())},
        table=Table({_key(row[:-1]): _number(row[-1], MOST_LOG2) for row in _bounded(header["table"])}),
        table_calibration=_calibration(header["table_calibration"]),
        estimate_calibration=_calibration(header["estimate_calibration"]),
        trees=trees,
        trained_on=_text(header["trained_on"]),
        report={_text(name): _number(value) for name, value in _bounded(header["report"].items())},
    )


def _trees(told: Any, body: bytes) -> Trees | None:
    if told is None:
        return None
    names = tuple(_text(name) for name in _bounded(told["names"], _MOST_FEATURES))
    rows, columns = (_whole(number) for number in told["positions"])
    if not 0 < rows <= _MOST_NAMED or columns != AXES:
        raise ValueError(f"it has {rows} positions of {columns} numbers")
    reader = _Arrays(body)
    positions = reader.take(rows * columns, "<f4").astype(np.float32).reshape(rows, columns)
    if not np.isfinite(positions).all():
        raise ValueError("a position is not finite")
    try:
        time, rank = (_forest(reader, sizes, len(names)) for sizes in told["forests"])
    except InvalidForestError as error:
        raise ValueError(f"a forest is none: {error}") from error
    winners = _winners(reader, told["winners"], told["won"])
    reader.end()
    return Trees(
        names=names,
        time=time,
        rank=rank,
        rank_weight=_number(told["rank_weight"]),
        calibration=_calibration(told["calibration"]),
        positions=positions,
        kinds=frozenset(_key(kind) for kind in _bounded(told["kinds"])),
        reach=_number(told["reach"]),
        winners=winners,
    )


class _Arrays:
    """The arrays of a file, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, count: int, kind: str) -> NDArray[np.generic]:
        size = count * np.dtype(kind).itemsize
        if count < 0 or self._at + size > len(self._body):
            raise ValueError("it is cut off")
        found = np.frombuffer(self._body, kind, count, self._at)
        self._at += size
        return found

    def end(self) -> None:
        if self._at != len(self._body):
            raise ValueError("bytes follow that it does not name")


def _forest(reader: _Arrays, sizes: Sequence[object], width: int) -> Forest:
    trees, nodes = (_whole(size) for size in sizes)
    return Forest.of(
        {name: reader.take(trees if name == "roots" else nodes, kind) for name, kind in ARRAYS.items()}, width
    )


def _winners(reader: _Arrays, solvers: Any, kinds: Any) -> Winners:
    names = tuple(_text(name) for name in _bounded(solvers, MOST_SOLVERS))
    found: dict[tuple[str, ...], Won] = {}
    for *kind, size in _bounded(kinds):
        count = _whole(size)
        axes = reader.take(AXES * count, "<f4").astype(np.float32).reshape(AXES, count)
        bits = reader.take(count, "<u8").astype(np.uint64)
        if not count or not np.isfinite(axes).all() or int(bits.max()) >> len(names):
            raise ValueError("it has winners that are none")
        found[_key(kind)] = Won(axes, bits)
    return Winners(names, found)


def _plain(calibration: Calibration) -> list[object]:
    return [calibration.bias, list(calibration.edges), list(calibration.shares)]


def _calibration(value: Any) -> Calibration:
    bias, *parts = _bounded(value, 3)
    edges, shares = (tuple(_number(number) for number in _bounded(part, 64)) for part in parts)
    if len(shares) != len(edges) + 1 or list(edges) != sorted(edges):
        raise ValueError("its shares and their edges do not match")
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError("a share is not between 0 and 1")
    return Calibration(_number(bias, MOST_LOG2), edges, shares)


def _bounded(values: Any, most: int = _MOST_NAMED) -> list[Any]:
    found = list(values)
    if len(found) > most:
        raise ValueError(f"it names {len(found)} of what may be {most}")
    return found


def _key(values: Any) -> tuple[str, ...]:
    return tuple(_text(value) for value in _bounded(values, 8))


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_CHARS:
        raise TypeError(f"{value!r:.60} is no text of at most {_MOST_CHARS} characters")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise TypeError(f"{value!r:.60} is no whole number from 0 to 2**31 - 1")
    return value


def _number(value: object, most: float = 1e9) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > most:  # type: ignore[arg-type]
        raise TypeError(f"{value!r:.60} is no number from {-most} to {most}")
    return float(value)  # type: ignore[arg-type]
