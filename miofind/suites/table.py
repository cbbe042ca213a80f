"""Reads and writes CSV tables of convolution problems. An error names the file, the line, the column and the value."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from miofind.core.problem import DataType, Direction, Epilogue, Layout, ProblemDescription, enum_value
from miofind.driver.line import OPERATIONS
from miofind.errors import InvalidProblemError

_SIZES = ("n", "c", "d", "h", "w", "k", "fz", "fy", "fx")
_OPTIONAL_SIZES = {
    **{f"pad_{d}": 0 for d in "dhw"},
    **{f"stride_{d}": 1 for d in "dhw"},
    **{f"dil_{d}": 1 for d in "dhw"},
    "groups": 1,
    "count": 1,
}
_TEXTS = ("suite", "layer", "spatial_dims", "layout", "dtype", "direction", "epilogue")
_PROBLEM = "problem"
_BESIDE_PROBLEM = ("suite", "layer", "count")
_MOST_SHOWN = 40
_FILTER = {"d": "fz", "h": "fy", "w": "fx"}
_DEPTH = {"d", "fz", "pad_d", "stride_d", "dil_d"}
_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
_DIRECTIONS = {
    "f": Direction.FORWARD,
    "b": Direction.BACKWARD_DATA,
    "w": Direction.BACKWARD_WEIGHTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRow:
    """One row of a table or line of a file.

    Attributes:
        problem: as written; float32, channels first and forward where the row does not say.
        suite, layer: where it comes from.
        count: calls of that shape in one forward pass.
        directions: those the row asks for.
    """

    problem: ProblemDescription
    suite: str
    layer: str
    count: int
    directions: tuple[Direction, ...]


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one row, and where they stand."""

    where: str
    values: Mapping[str, str]

    def integer(self, column: str, least: int = 1) -> int:
        text = self.values.get(column)
        if text is None:
            return _OPTIONAL_SIZES[column]
        if re.fullmatch(r"-?[0-9]{1,20}", text) is None or int(text) < least:
            shown = repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
            raise InvalidProblemError(f"{self.where}, column {column}: {shown} must be an integer of at least {least}")
        return int(text)

    def each(self, columns: Iterable[str], least: int = 1) -> tuple[int, ...]:
        return tuple(self.integer(column, least) for column in columns)


def read_table(lines: Iterable[str], *, source: str, suite: str) -> Iterator[SuiteRow]:
    """The rows of a CSV table.

    Args:
        lines: its text, with a header.
        source: what errors call it: a file's name.
        suite: name for rows without a column `suite`.

    Raises:
        InvalidProblemError: the message names the source, the line, the column and the value.
    """
    rows = _rows(lines, source)
    columns = [name.strip() for name in next(rows, _Row("", [])).values]
    if not any(columns):
        raise InvalidProblemError(f"{source} is empty: its first line names the columns, such as n,c,h,w,k,fy,fx")
    _check_columns(columns, source)
    for where, values in rows:
        if not values:
            continue
        if len(values) != len(columns):
            raise InvalidProblemError(f"{where}: {len(values)} values for {len(columns)} columns")
        cells = _Cells(where, dict(zip(columns, (value.strip() for value in values), strict=True)))
        yield _row(cells, suite, _named_problem(cells) if _PROBLEM in columns else _sized_problem(cells))


class _Row(NamedTuple):
    """The cells of a line, and where it stands."""

    where: str
    values: list[str]


def _rows(lines: Iterable[str], source: str) -> Iterator[_Row]:
    reader = csv.reader(lines, strict=True)
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InvalidProblemError(f"{source}, line {reader.line_num}: it is no line of a table: {error}") from error
        yield _Row(f"{source}, line {reader.line_num}", values)


def write_table(rows: Iterable[SuiteRow], target: TextIO) -> None:
    """Write rows as a table that says of each problem all that there is to say, in its column `problem`.

    A row of several directions becomes as many.
    """
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow((*_BESIDE_PROBLEM, _PROBLEM))
    for row in rows:
        for direction in row.directions:
            problem = row.problem.in_direction(direction)
            writer.writerow((row.suite, row.layer, row.count, problem.network_config))


def _check_columns(columns: list[str], source: str) -> None:
    first = columns[0].partition(" ")[0] if columns else ""
    if first in OPERATIONS or first.endswith("MIOpenDriver"):
        raise InvalidProblemError(f"{source}, line 1: this is a driver line, and no header: --lines reads such a file")
    known = [*_SIZES, *_OPTIONAL_SIZES, *_TEXTS, _PROBLEM]
    if _PROBLEM in columns:
        known = [*_BESIDE_PROBLEM, _PROBLEM]
    if unknown := [name for name in columns if name not in known]:
        names = ", ".join(known)
        raise InvalidProblemError(f"{source}, line 1: column {unknown[0]!r} is unknown: known are {names}")
    if len(set(columns)) != len(columns):
        raise InvalidProblemError(f"{source}, line 1: a column stands twice in {','.join(columns)}")
    if _PROBLEM in columns:
        return
    needed = [name for name in _SIZES if _DEPTH & set(columns) or name not in _DEPTH]
    if missing := [name for name in needed if name not in columns]:
        raise InvalidProblemError(f"{source}, line 1: column {missing[0]!r} is missing")


def _row(cells: _Cells, suite: str, problem: ProblemDescription) -> SuiteRow:
    return SuiteRow(
        problem=problem,
        suite=cells.values.get("suite") or suite,
        layer=cells.values.get("layer") or cells.where.rpartition(", ")[2],
        count=cells.integer("count"),
        directions=(problem.direction,),
    )


def _named_problem(cells: _Cells) -> ProblemDescription:
    """The problem whose network_config stands in the row."""
    try:
        return ProblemDescription.from_network_config(cells.values[_PROBLEM])
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{cells.where}, column {_PROBLEM}: {error}") from error


def _sized_problem(cells: _Cells) -> ProblemDescription:
    """The problem that the row's columns describe, one a size."""
    values = cells.values
    dims = "dhw" if "d" in values else "hw"
    rank = values.get("spatial_dims") or str(len(dims))
    if rank != str(len(dims)):
        raise InvalidProblemError(f"{cells.where}, column spatial_dims: {rank!r}, but the columns have {len(dims)}")
    c, groups = cells.integer("c"), cells.integer("groups")
    x = (cells.integer("n"), c, *cells.each(dims))
    w = (cells.integer("k"), max(1, c // groups), *cells.each(_FILTER[d] for d in dims))
    padding = cells.each((f"pad_{d}" for d in dims), 0)
    stride, dilation = cells.each(f"stride_{d}" for d in dims), cells.each(f"dil_{d}" for d in dims)
    direction, dtype, layout = _direction(cells), _dtype(cells), _layout(cells)
    epilogue = _epilogue(cells)
    try:
        return ProblemDescription.convolution(
            x=x,
            w=w,
            padding=padding,
            stride=stride,
            dilation=dilation,
            groups=groups,
            direction=direction,
            dtype=dtype,
            layout=layout,
            epilogue=epilogue,
        )
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{cells.where}: {error}") from error


def _dtype(cells: _Cells) -> DataType:
    text = cells.values.get("dtype") or DataType.FLOAT32.value
    return enum_value(DataType, _DTYPES.get(text.lower(), text), f"{cells.where}, column dtype")


def _direction(cells: _Cells) -> Direction:
    text = cells.values.get("direction") or Direction.FORWARD.value
    return enum_value(Direction, _DIRECTIONS.get(text.lower(), text), f"{cells.where}, column direction")


def _layout(cells: _Cells) -> Layout | None:
    text = cells.values.get("layout")
    return enum_value(Layout, text, f"{cells.where}, column layout") if text else None


def _epilogue(cells: _Cells) -> Epilogue:
    try:
        return Epilogue.of(cells.values.get("epilogue"))
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{cells.where}, column epilogue: {error}") from error
